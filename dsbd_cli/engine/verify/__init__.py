"""Verification rules, which accept drafted layers. `config.variants.RULES` says where the code of each is."""
