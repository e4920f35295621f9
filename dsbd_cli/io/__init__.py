"""Reading and writing of files: lines, rows and records. No torch."""
