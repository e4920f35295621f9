"""Drafters, which propose a forest. `config.variants.DRAFTERS` says where the code of each is."""
