"""The command line: commands, their options, and what a run is made of."""
