"""Models of transformers, adapted to forests."""
