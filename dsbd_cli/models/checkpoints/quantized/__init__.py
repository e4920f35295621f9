"""Weights that stay packed as a checkpoint's files hold them."""
