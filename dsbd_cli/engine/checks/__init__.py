"""Checks at load: kernels and captured iterations, compared with tensor code."""
