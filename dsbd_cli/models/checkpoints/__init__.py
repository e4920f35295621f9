"""Checkpoints: names, folders, configs, weights, vocabularies."""
