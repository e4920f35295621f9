"""Settings: what a user may choose, checked once. No tensors."""
