"""A run of a command: files in and out, rows through an engine, progress, signals, messages."""
