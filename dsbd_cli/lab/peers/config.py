"""Settings of a comparator: which of transformers' decoding methods it runs. Made without torch, so that names can be
checked at once."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal, get_args

from dsbd_cli.errors import UsageError

if TYPE_CHECKING:
    from dsbd_cli.config.sampling import SamplingConfig
    from dsbd_cli.engine.decoding.engine import Engine
    from dsbd_cli.lab.peers.base import Peer

PeerName = Literal["greedy", "beam-search", "beam-sampling", "assisted"]
PEERS: tuple[PeerName, ...] = get_args(PeerName)


@dataclass(frozen=True, slots=True)
class PeerConfig:
    """One of transformers' methods. A subclass stands for another engine (benchmarks.peers).

    Attributes:
        kind: greedy, beam-search, beam-sampling, or assisted (speculative sampling of one sequence with the draft).
        num_beams: W of the two beam methods, 1 for the others.
        scores: return what beams are ranked by; transformers then keeps the logits of all steps.
        whose: the engine that decodes, for messages.
        does: the kinds that this engine has.
    """

    kind: PeerName
    num_beams: int = 1
    scores: bool = False

    whose: ClassVar[str] = "transformers' generate"
    does: ClassVar[tuple[PeerName, ...]] = PEERS

    def __post_init__(self) -> None:
        if self.kind not in self.does:
            raise UsageError(f"peer is {self.kind!r}, but must be one of {', '.join(self.does)}")
        if self.num_beams < 1 or (self.num_beams > 1 and not self.kind.startswith("beam")):
            raise UsageError(f"num_beams is {self.num_beams}, which {self.whose} {self.kind} cannot have")

    @property
    def samples(self) -> bool:
        """Whether the method draws at random."""
        return self.kind in ("beam-sampling", "assisted")

    @property
    def takes_greedy(self) -> bool:
        """Whether the method accepts temperature 0."""
        return not self.samples

    @property
    def needs_draft(self) -> bool:
        """Whether a draft model takes part."""
        return self.kind == "assisted"

    @property
    def max_batch(self) -> int | None:
        """Sequences that can be decoded together; None: any number."""
        return 1 if self.needs_draft else None

    def peer(self, pair: Engine, sampling: SamplingConfig, batch_size: int, longest: int) -> Peer:
        """Make the comparator over the models of `pair`. longest: tokens of the longest prompt. Raises ModelError where
        it does not take the target."""
        from dsbd_cli.errors import ModelError
        from dsbd_cli.lab.peers.transformers_generate import TransformersPeer
        from dsbd_cli.models.forest_model import BaseForestModel
        from dsbd_cli.models.tokenizer import HFCodec

        target, draft, codec = pair.target, pair.draft, pair.codec
        if not isinstance(target, BaseForestModel) or not isinstance(codec, HFCodec):
            raise ModelError("the target is no transformers model; leave it out of --methods")
        assistant = draft if isinstance(draft, BaseForestModel) else None
        return TransformersPeer(self, target, assistant, codec, sampling, batch_size, pair.catalogues.get(""))
