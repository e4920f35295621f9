"""Drafters: how a forest is proposed. `DRAFTERS` makes each by name; two names joined by + are fused."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from dsbd_cli.config import MethodConfig
from dsbd_cli.engine.core.grammar import GrammarTable
from dsbd_cli.engine.core.protocols import ForestModel, TextCodec
from dsbd_cli.engine.drafting.base import DraftContext, Drafter, Endings
from dsbd_cli.engine.drafting.beam import BeamDrafter, NoDrafter
from dsbd_cli.engine.drafting.bridge import BridgedDraft, BridgeDrafter
from dsbd_cli.engine.drafting.dynamic import DynamicTree
from dsbd_cli.engine.drafting.fusion import FusionDrafter
from dsbd_cli.engine.drafting.grammar import GrammarDrafter, GrammarSource
from dsbd_cli.engine.drafting.index import open_index
from dsbd_cli.engine.drafting.ngram import NgramSource
from dsbd_cli.engine.drafting.paths import PathDrafter
from dsbd_cli.engine.drafting.retrieval import RetrievalSource
from dsbd_cli.engine.drafting.rsd import ConstantBranching, StochasticBeams
from dsbd_cli.engine.drafting.trigram import TrigramSource
from dsbd_cli.errors import UsageError

__all__ = [
    "DRAFTERS",
    "AnyDraft",
    "BeamDrafter",
    "BridgeDrafter",
    "BridgedDraft",
    "DraftContext",
    "Drafter",
    "DrafterInputs",
    "Endings",
    "NoDrafter",
    "make_drafter",
]


AnyDraft = ForestModel | BridgedDraft  # a draft model with the target's tokens, or with tokens of its own


@dataclass(frozen=True, slots=True)
class DrafterInputs:
    """What drafters are made from. model: of the draft, None where there is none; grammars: of the rows."""

    method: MethodConfig
    model: AnyDraft | None
    vocab_size: int
    codec: TextCodec
    device: torch.device
    grammars: GrammarTable

    def draft(self) -> ForestModel:
        """The draft model of a drafter that needs one. Raises UsageError for one with tokens of its own."""
        assert self.model is not None, "checked by MethodConfig.fit_draft"
        if isinstance(self.model, BridgedDraft):
            raise UsageError(f"drafter {self.method.drafter} takes a plain draft")
        return self.model

    def bridged(self) -> BridgedDraft:
        """The draft of a bridge. Raises UsageError for any other."""
        if not isinstance(self.model, BridgedDraft):
            raise UsageError(f"drafter {self.method.drafter} takes a BridgedDraft")
        return self.model


def _retrieval(of: DrafterInputs) -> PathDrafter:
    assert of.method.index is not None, "checked by MethodConfig"
    index = open_index(Path(of.method.index), of.codec.token_bytes())
    return PathDrafter(RetrievalSource(index, of.device))


DRAFTERS: dict[str, Callable[[DrafterInputs], BeamDrafter | PathDrafter | BridgeDrafter]] = {
    "beam": lambda of: BeamDrafter(of.draft(), of.vocab_size),
    "rsd-c": lambda of: ConstantBranching(of.draft(), of.vocab_size, of.method.branching),
    "rsd-s": lambda of: StochasticBeams(of.draft(), of.vocab_size),
    "dynamic-tree": lambda of: DynamicTree(of.draft(), of.vocab_size, of.method.tree, of.method.value_threshold),
    "bridge": lambda of: BridgeDrafter(of.bridged(), of.vocab_size),
    "ngram": lambda of: PathDrafter(NgramSource(of.method.ngram)),
    "retrieval": _retrieval,
    "trigram": lambda of: PathDrafter(TrigramSource()),
    "grammar": lambda of: GrammarDrafter(GrammarSource(of.grammars)),
}


def make_drafter(of: DrafterInputs) -> Drafter:
    """The drafter that a method names. Raises UsageError where its draft or its index cannot be used."""
    method = of.method
    if method.depth == 0:
        return NoDrafter()
    first, *more = [DRAFTERS[name](of) for name in method.drafter_names]
    if not more:
        return first
    second = more[0]
    assert not isinstance(first, BridgeDrafter), "checked by MethodConfig"
    assert isinstance(second, PathDrafter), "checked by MethodConfig"
    return FusionDrafter(first, second, method.second_share, method.fusion_top_k)
