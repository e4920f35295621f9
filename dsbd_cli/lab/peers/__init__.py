"""Other people's decoding of the same models, to compare with. Names and settings need no torch."""

from dsbd_cli.lab.peers.config import PEERS, PeerConfig

__all__ = ["PEERS", "PeerConfig"]
