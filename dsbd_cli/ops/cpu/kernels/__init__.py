"""Kernels for a CPU, which numba compiles: vectors, and one file for each operation."""
