"""Other people's decoding of the same models, to compare with. Names and settings need no torch."""
