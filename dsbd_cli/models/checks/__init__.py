"""Checks of a loaded model: a forest against its separate paths, and bits against those in other company."""
