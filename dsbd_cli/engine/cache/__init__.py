"""Memory of both models: rows, slots, prompts that are read once."""
