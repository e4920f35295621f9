"""Drafters: how a forest is proposed. `config.variants.DRAFTERS` says where the code of each is."""
