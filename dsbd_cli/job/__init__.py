"""The job: the command, rows in and records out, and what survives a crash."""
