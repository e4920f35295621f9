"""Checks of a loaded model: a forest beside its paths, and bits in any company."""
