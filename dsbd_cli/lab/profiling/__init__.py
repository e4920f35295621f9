"""Where time and memory of a run go on this machine, and which settings would be faster."""
