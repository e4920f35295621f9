"""Scripts that make the built-in pair."""
