"""Own ids of a request: tokens that its row may draft in addition to those of a draft whose LM head lacks some tokens.

Letters: R rows, N nodes, C candidates of a node, o own ids of a row at most, V vocabulary of the target.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dsbd_cli.engine.core.candidates import Candidates
from dsbd_cli.engine.core.nodes import LayerNodes
from dsbd_cli.engine.core.topk import NEG_INF
from dsbd_cli.engine.protocols import ForestModel

MOST = 2048  # own ids of a row at most
KEPT = 64  # best tokens of each node that are learnt


@dataclass(slots=True)
class OwnIds:
    """Own ids of all rows: the tokens of the prompt, then the target's best tokens at the nodes of earlier iterations
    that had drafts.

    A row's ids do not depend on other rows. A full row takes no more.

    Attributes:
        places: [R, o + 1] int64, own ids in the order in which they were added, V in empty places. Tokens that are not
            kept are written to the last place.
        count: [R] int64, own ids of each row.
        known: [R, V + 1] bool, tokens that the row need not or cannot add: those that it has, those of the draft's
            head, and those without logits. V is no token and always True.
        lacking: [V + 1] bool, `known` of a row that has no own ids yet.
    """

    places: Tensor
    count: Tensor
    known: Tensor
    lacking: Tensor

    @classmethod
    def of(
        cls, model: ForestModel | None, vocab_size: int, rows: int, device: torch.device, most: int = MOST
    ) -> OwnIds | None:
        """Return rows without own ids for a draft model; None where it can use none.

        most: o at most. vocab_size: V.
        """
        if model is None or model.lm_head_ids is None or not model.own_ids_below:
            return None
        known = torch.ones(vocab_size + 1, dtype=torch.bool, device=device)
        known[: min(model.own_ids_below, vocab_size)] = False
        fixed = model.lm_head_ids.to(device)
        known[fixed[fixed < vocab_size]] = True
        room = min(most, int((~known).sum()))
        places = torch.full((rows, room + 1), vocab_size, dtype=torch.int64, device=device)
        count = torch.zeros(rows, dtype=torch.int64, device=device)
        return cls(places, count, known.repeat(rows, 1), known) if room else None

    @property
    def tokens(self) -> Tensor:
        """Own ids of each row, [R, o] int64, V in empty places."""
        return self.places[:, :-1]

    @property
    def _none(self) -> int:
        """V, which stands for no token."""
        return self.known.shape[1] - 1

    def begin(self, prompts: Mapping[int, Sequence[int]]) -> None:
        """Replace what these rows have by the tokens of their prompts."""
        at = torch.tensor(list(prompts), device=self.count.device)
        self.places[at], self.count[at], self.known[at] = self._none, 0, self.lacking
        held = torch.full((len(self.count), max(map(len, prompts.values()))), self._none, dtype=torch.int64)
        for row, prompt in prompts.items():
            held[row, : len(prompt)] = torch.tensor(prompt)
        self._take(held.to(self.count.device))

    def learn(self, nodes: LayerNodes, candidates: Candidates) -> None:
        """Add the target's best tokens at the valid nodes [R, N], for later iterations."""
        tokens, logprobs = candidates.best(KEPT)
        real = nodes.valid.unsqueeze(-1) & (logprobs > NEG_INF)
        self._take(torch.where(real, tokens, self._none).flatten(1))

    def select(self, rows: Tensor) -> OwnIds:
        """Return these rows [n] int64, in this order."""
        return OwnIds(self.places[rows], self.count[rows], self.known[rows], self.lacking)

    def _take(self, tokens: Tensor) -> None:
        """Add those of the tokens [R, m] int64 that a row does not have yet. Where there is no room for all, the lower
        ids are added."""
        room = self.places.shape[1] - 1
        tokens = tokens.sort(1).values
        new = ~self.known.gather(1, tokens)
        new[:, 1:] &= tokens[:, 1:] != tokens[:, :-1]
        place = self.count.unsqueeze(1) + new.cumsum(1) - 1
        new &= place < room
        self.places.scatter_(1, torch.where(new, place, room), tokens)
        self.known.scatter_(1, torch.where(new, tokens, self._none), True)
        self.count = self.count + new.sum(1)
