"""Which of other people's decoding methods a comparator runs. No torch here, so that names can be checked at once."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from typing import Literal

from dsbd_cli.errors import UsageError

__all__ = ["PEERS", "PeerConfig", "PeerName"]

PeerName = Literal["greedy", "beam-search", "beam-sampling", "assisted"]
PeerEngine = Literal["transformers", "ctranslate2", "llama-cpp"]
PEERS: tuple[PeerName, ...] = ("greedy", "beam-search", "beam-sampling", "assisted")

# what each engine does, the package that it needs beside dsbd's own, and its extra
DOES: dict[PeerEngine, tuple[PeerName, ...]] = {
    "transformers": PEERS,
    "ctranslate2": ("greedy", "beam-search"),
    "llama-cpp": ("greedy",),
}
PACKAGES: dict[PeerEngine, tuple[str, str]] = {
    "ctranslate2": ("ctranslate2", "ctranslate2"),
    "llama-cpp": ("xllamacpp", "llama-cpp"),
}


@dataclass(frozen=True, slots=True)
class PeerConfig:
    """One of transformers', CTranslate2's or llama.cpp's methods.

    Attributes:
        kind: greedy, beam-search, beam-sampling, or assisted (speculative sampling of one sequence with the draft).
        num_beams: W of the two beam methods, 1 for the others.
        engine: whose.
        dtype: that CTranslate2 computes in: float32 or int8. The others go by the loaded model or its file.
    """

    kind: PeerName
    num_beams: int = 1
    engine: PeerEngine = "transformers"
    dtype: Literal["float32", "int8"] | None = None

    def __post_init__(self) -> None:
        if self.kind not in DOES[self.engine]:
            raise UsageError(f"peer is {self.kind!r}, but must be one of {', '.join(DOES[self.engine])}")
        if self.num_beams < 1 or (self.num_beams > 1 and not self.kind.startswith("beam")):
            raise UsageError(f"num_beams is {self.num_beams}, which {self.engine}'s {self.kind} cannot have")
        if (self.dtype is None) != (self.engine != "ctranslate2"):
            raise UsageError(f"dtype is {self.dtype}, which {self.engine} cannot have")

    @property
    def samples(self) -> bool:
        """Whether it draws at random."""
        return self.kind in ("beam-sampling", "assisted")

    @property
    def max_batch(self) -> int | None:
        """Sequences that it can decode together; None: any number."""
        return 1 if self.kind == "assisted" or self.engine == "llama-cpp" else None

    @property
    def whose(self) -> str:
        """Who decodes, for messages."""
        return "transformers' generate" if self.engine == "transformers" else self.engine

    @property
    def missing(self) -> str | None:
        """What to install before it can run, or None."""
        package, extra = PACKAGES.get(self.engine, ("transformers", ""))
        return None if importlib.util.find_spec(package) else f"pip install 'dsbd[{extra}]'"
