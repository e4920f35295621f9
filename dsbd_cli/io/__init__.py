"""Files: lines in and out, rows and records. No torch."""
