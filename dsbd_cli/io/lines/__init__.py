"""JSON lines: compression, locks, resuming, parts of a file."""
