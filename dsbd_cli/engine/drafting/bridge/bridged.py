"""A draft model with a vocabulary of its own, and the tokenizers of draft and target."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TypeAlias

import torch

from dsbd_cli.engine.protocols import ForestModel, TextCodec

AnyDraft: TypeAlias = "ForestModel | BridgedDraft"  # a draft with the target's tokens, or with tokens of its own


@dataclass(frozen=True, slots=True)
class BridgedDraft:
    """A draft model with a vocabulary of its own. An engine with drafter `bridge` is given it as its draft.

    codec, target: the tokenizers of the draft and of the target. markers: special tokens of the target and their ids in
    the draft's vocabulary. Other special tokens, such as padding, are left out of what the draft reads.
    """

    model: ForestModel
    codec: TextCodec
    target: TextCodec
    markers: Mapping[int, int] = field(default_factory=dict)

    @property
    def device(self) -> torch.device:
        """Device of the draft model."""
        return self.model.device
