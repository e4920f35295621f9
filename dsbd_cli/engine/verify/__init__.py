"""Verification rules: how drafted layers are accepted. `config.variants.RULES` says where the code of each is."""
