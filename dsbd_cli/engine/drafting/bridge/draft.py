"""A draft model with a vocabulary of its own, and what is asked of both tokenizers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol, TypeAlias

import torch

from dsbd_cli.engine.protocols import ForestModel

__all__ = ["AnyDraft", "BridgedDraft", "TextPieces"]


AnyDraft: TypeAlias = "ForestModel | BridgedDraft"  # a draft with the target's tokens, or with tokens of its own


class TextPieces(Protocol):
    """Interface that the bridge needs of each tokenizer."""

    @property
    def eos_ids(self) -> tuple[int, ...]:
        """Tokens that end a sequence."""
        ...

    def encode(self, prompt: str) -> list[int]:
        """Token ids with the special tokens the tokenizer adds by itself."""
        ...

    def encode_pieces(self, texts: list[str]) -> list[list[int]]:
        """Token ids of pieces of text, nothing added."""
        ...

    def token_bytes(self) -> list[bytes]:
        """For every token id the bytes it adds to a text; empty for special tokens."""
        ...


@dataclass(frozen=True, slots=True)
class BridgedDraft:
    """A draft model with a vocabulary of its own: what an engine with drafter `bridge` is given as its draft.

    codec, target: the tokenizers of the draft and of the target. markers: special tokens of the target and their ids in
    the draft's vocabulary; other special tokens, such as padding, say nothing to the draft.
    """

    model: ForestModel
    codec: TextPieces
    target: TextPieces
    markers: Mapping[int, int] = field(default_factory=dict)

    @property
    def device(self) -> torch.device:
        """Return the device of the draft model."""
        return self.model.device
