"""Recurrent and hybrid layers: states of a forest, mixers, scans."""
