"""The command line: commands, their options, and the parts of a run."""
