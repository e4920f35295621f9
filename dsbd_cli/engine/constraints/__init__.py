"""Constraints: which tokens may follow a path, and where a text ends."""
