"""Training and trimming of drafts."""
