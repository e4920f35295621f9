"""Toy models, tiny checkpoints and made-up worlds that tests share."""
