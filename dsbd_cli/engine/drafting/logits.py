"""Logits of a draft whose head may lack tokens (`dsbd trim-draft`): candidates are taken from the columns that there
are, and only then get their token ids, so that nothing of the vocabulary's size is touched."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from dsbd_cli.engine.core.candidates import CandidateCount, Candidates, LegalTokens, top_candidates
from dsbd_cli.engine.core.topk import NEG_INF
from dsbd_cli.engine.protocols import ForestModel
from dsbd_cli.ops.interface import Ops


def head_ids(model: ForestModel, vocab_size: int) -> Tensor | None:
    """Token ids [m] int64 below V of the columns of a model's logits, ascending; None where column v is token v."""
    ids = model.head_ids
    return None if ids is None else ids[ids < vocab_size]


@dataclass(frozen=True, slots=True)
class DraftLogits:
    """Logits of some nodes.

    Attributes:
        values: [R, n, m], in the model's dtype. ids: [m] int64, tokens of the columns; None: columns are tokens.
        vocab_size: V of the target; tokens without a column have q = 0.
    """

    values: Tensor
    ids: Tensor | None
    vocab_size: int

    @classmethod
    def of(cls, logits: Tensor, ids: Tensor | None, vocab_size: int) -> DraftLogits:
        """Without columns past V. ids: of head_ids."""
        if ids is None:
            return cls(logits[..., :vocab_size], None, vocab_size)
        return cls(logits[..., : len(ids)], ids.to(logits.device), vocab_size)

    @property
    def width(self) -> int:
        """Columns of `wide`."""
        return self.values.shape[-1] if self.ids is None else self.vocab_size

    def wide(self) -> Tensor:
        """[R, n, V], -inf where there is no column; as wide as the draft's own logits where it lacks no tokens."""
        if self.ids is None:
            return self.values
        wide = self.values.new_full((*self.values.shape[:-1], self.vocab_size), NEG_INF)
        return wide.index_copy_(-1, self.ids, self.values)

    def candidates(
        self, wanted: CandidateCount, legal: LegalTokens | None = None, ops: Ops | None = None
    ) -> Candidates:
        """Return top_candidates of `wide`, but for the last bits of the logits' sum."""
        if self.ids is None or wanted.count >= self.values.shape[-1] or legal is not None:
            return top_candidates(self.wide(), wanted, legal, ops)
        found = top_candidates(self.values, wanted, ops=ops)
        return Candidates(self.ids[found.tokens], found.logprobs, full=False)
