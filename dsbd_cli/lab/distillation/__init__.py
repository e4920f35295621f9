"""A draft is trained on a target's answers and laws."""
