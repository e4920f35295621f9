"""Measurements that the README quotes; run from the repository root, e.g. `python -m benchmarks.speed`."""
