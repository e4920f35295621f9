"""JSON schemas of all that the commands read and write, and the one place that makes a written line."""
