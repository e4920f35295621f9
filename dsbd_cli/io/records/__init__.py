"""Records: a line to a row, a result to a record."""
