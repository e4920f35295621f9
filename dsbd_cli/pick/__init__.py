"""Choosing one of the n best: candidates of a row in, one choice and its reason out. No torch."""
