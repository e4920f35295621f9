"""Choosers of one of the n best: they take the candidates of a row, and return one choice with its reason. No torch."""
