"""Lines of files: JSON lines, tables, compression, locks, resuming, part files."""
