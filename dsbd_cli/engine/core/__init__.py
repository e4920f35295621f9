"""Tensors of one iteration: candidates, distributions, draws, nodes, beams and slots."""
