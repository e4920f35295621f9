"""Attention of a packed forest: prepared once per forward, computed by the first way that fits."""
