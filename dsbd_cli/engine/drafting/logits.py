"""Logits of a draft whose LM head may lack tokens (`dsbd trim-draft`). Candidates are taken from the columns that the
LM head has and get their token ids afterwards, so that no tensor of the vocabulary's size is needed.

Letters: R rows, n nodes, m columns of the LM head, o own ids of a row, V vocabulary of the target.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from dsbd_cli.engine.core.candidates import CandidateCount, Candidates, LegalTokens, top_candidates
from dsbd_cli.engine.core.topk import NEG_INF
from dsbd_cli.engine.protocols import ForestModel
from dsbd_cli.ops.interface import Ops


def lm_head_ids(model: ForestModel, vocab_size: int) -> Tensor | None:
    """Return the token ids [m] int64 below V of the columns of a model's logits, ascending; None where column v is
    token v."""
    ids = model.lm_head_ids
    return None if ids is None else ids[ids < vocab_size]


@dataclass(frozen=True, slots=True)
class DraftLogits:
    """Logits of some nodes.

    Attributes:
        values: [R, n, m + o], in the model's dtype.
        ids: [m] int64, tokens of the LM head's columns; None: column v is token v.
        vocab_size: V. Tokens without a column have q = 0.
        own_ids: [R, o] int64, tokens of the columns after the LM head's, none of which is in ids. V where a row has no
            further own id; its column in `values` is -inf. None: o is 0.
    """

    values: Tensor
    ids: Tensor | None
    vocab_size: int
    own_ids: Tensor | None = None

    @classmethod
    def of(cls, logits: Tensor, ids: Tensor | None, vocab_size: int, own_ids: Tensor | None = None) -> DraftLogits:
        """Make DraftLogits without the columns past V. ids: from lm_head_ids. own_ids: those that the forward was
        given."""
        if ids is None:
            return cls(logits[..., :vocab_size], None, vocab_size)
        ids, own = ids.to(logits.device), 0 if own_ids is None else own_ids.shape[1]
        kept = logits[..., : len(ids)]
        if own and logits.shape[-1] == len(ids) + own:
            kept = logits
        elif own:
            kept = torch.cat((kept, logits[..., -own:]), -1)
        return cls(kept, ids, vocab_size, own_ids)

    @property
    def width(self) -> int:
        """Number of columns of `wide`."""
        return self.values.shape[-1] if self.ids is None else self.vocab_size

    def wide(self) -> Tensor:
        """Return logits [R, n, V], -inf for a token without a column. Where the LM head lacks no tokens, they are as
        wide as the draft's own logits."""
        if self.ids is None:
            return self.values
        fixed, own_ids = len(self.ids), self.own_ids
        most = self.vocab_size if own_ids is None else self.vocab_size + 1
        wide = self.values.new_full((*self.values.shape[:-1], most), NEG_INF)
        wide.index_copy_(-1, self.ids, self.values[..., :fixed])
        if own_ids is None:
            return wide
        own = self.values[..., fixed:]
        return wide.scatter_(-1, own_ids.unsqueeze(-2).expand_as(own), own)[..., : self.vocab_size]

    def candidates(
        self, wanted: CandidateCount, legal: LegalTokens | None = None, ops: Ops | None = None
    ) -> Candidates:
        """Return top_candidates of `wide`. They may differ in the last bits of the logits' sum, and in which of equal
        tokens are the last ones: tokens of the LM head come before own ids."""
        if self.ids is None or wanted.count >= self.values.shape[-1] or legal is not None:
            return top_candidates(self.wide(), wanted, legal, ops)
        candidates = top_candidates(self.values, wanted, ops=ops)
        if self.own_ids is None:
            return Candidates(self.ids[candidates.tokens], candidates.logprobs, full=False)
        columns = torch.cat((self.ids.expand(len(self.own_ids), -1), self.own_ids), 1)
        tokens = columns.gather(1, candidates.tokens.flatten(1)).view_as(candidates.tokens)
        # where there is no own id the column is -inf, whatever token it is given
        tokens, order = tokens.clamp(max=self.vocab_size - 1).sort(-1)
        return Candidates(tokens, candidates.logprobs.gather(-1, order), full=False)
