"""Checks at load: kernels and captured iterations beside tensor code."""
