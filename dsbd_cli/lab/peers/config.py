"""Which of transformers' decoding methods a comparator runs. No torch here, so that names can be checked at once."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from dsbd_cli.errors import UsageError

__all__ = ["PEERS", "PeerConfig", "PeerName"]

PeerName = Literal["greedy", "beam-search", "beam-sampling", "assisted"]
PEERS: tuple[PeerName, ...] = ("greedy", "beam-search", "beam-sampling", "assisted")


@dataclass(frozen=True, slots=True)
class PeerConfig:
    """One of transformers' methods.

    Attributes:
        kind: greedy, beam-search, beam-sampling, or assisted (speculative sampling of one sequence with the draft).
        num_beams: W of the two beam methods, 1 for the others.
    """

    kind: PeerName
    num_beams: int = 1

    def __post_init__(self) -> None:
        if self.kind not in PEERS:
            raise UsageError(f"peer is {self.kind!r}, but must be one of {', '.join(PEERS)}")
        if self.num_beams < 1 or (self.num_beams > 1 and not self.kind.startswith("beam")):
            raise UsageError(f"num_beams is {self.num_beams}, which transformers' {self.kind} cannot have")

    @property
    def samples(self) -> bool:
        """Whether it draws at random."""
        return self.kind in ("beam-sampling", "assisted")

    @property
    def max_batch(self) -> int | None:
        """Sequences that it can decode together; None: any number."""
        return 1 if self.kind == "assisted" else None
