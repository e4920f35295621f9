"""Tasks: data sets, and scorers of answers. Nothing here imports torch."""
