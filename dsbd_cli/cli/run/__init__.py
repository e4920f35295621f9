"""Parts of a command's run: files in and out, rows through an engine, progress, signals, messages."""
