"""Drafts through text, by a model with a tokenizer of its own."""
