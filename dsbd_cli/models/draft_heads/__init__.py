"""Draft heads: one layer on the target's own hidden states."""
