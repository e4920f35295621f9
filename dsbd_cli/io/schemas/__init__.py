"""JSON schemas of all that the commands read and write, and the one place where a written line is made."""
