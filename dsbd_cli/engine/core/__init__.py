"""Tensors of one iteration: candidates, laws, draws, nodes, beams and slots."""
