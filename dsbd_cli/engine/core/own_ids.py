"""The request's own ids: tokens that a row may draft beside the fixed ones of a draft whose LM head lacks some.

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

MOST = 2048  # own ids of a row
KEPT = 64  # tokens of each node that are learnt, the best ones


@dataclass(slots=True)
class OwnIds:
    """Own ids of all rows: the tokens of the prompt, then the target's best at the nodes of earlier iterations.

    Nothing of a row depends on the rows beside it. A row that is full takes no more.

    Attributes:
        places: [R, o + 1] int64, own ids in the order in which they came, V where there is none; the last place is for
            what is not kept.
        count: [R] int64, own ids of each row.
        known: [R, V + 1] bool, tokens that the row has or cannot have; V is no token.
        lacking: [V + 1] bool, what `known` is before a row has own ids.
    """

    places: Tensor
    count: Tensor
    known: Tensor
    lacking: Tensor

    @classmethod
    def of(
        cls, model: ForestModel | None, vocab_size: int, rows: int, device: torch.device, most: int = MOST
    ) -> OwnIds | None:
        """Return rows without own ids for a draft model; None where it has no use for any.

        most: o. vocab_size: V.
        """
        if model is None or model.head_ids is None or not model.own_ids_below:
            return None
        known = torch.ones(vocab_size + 1, dtype=torch.bool, device=device)
        known[: min(model.own_ids_below, vocab_size)] = False
        fixed = model.head_ids.to(device)
        known[fixed[fixed < vocab_size]] = True
        room = min(most, int((~known).sum()))
        places = torch.full((rows, room + 1), vocab_size, dtype=torch.int64, device=device)
        count = torch.zeros(rows, dtype=torch.int64, device=device)
        return cls(places, count, known.repeat(rows, 1), known) if room else None

    @property
    def tokens(self) -> Tensor:
        """[R, o] int64, V where there is none."""
        return self.places[:, :-1]

    @property
    def _none(self) -> int:
        """V."""
        return self.known.shape[1] - 1

    def begin(self, prompts: Mapping[int, Sequence[int]]) -> None:
        """Forget what these rows have, and take the tokens of their prompts."""
        at = torch.tensor(list(prompts), device=self.count.device)
        self.places[at], self.count[at], self.known[at] = self._none, 0, self.lacking
        held = torch.full((len(self.count), max(map(len, prompts.values()))), self._none, dtype=torch.int64)
        for row, prompt in prompts.items():
            held[row, : len(prompt)] = torch.tensor(prompt)
        self._take(held.to(self.count.device))

    def learn(self, nodes: LayerNodes, candidates: Candidates) -> None:
        """Take the best tokens that the target gave nodes [R, N], for the iterations to come."""
        tokens, logprobs = candidates.best(KEPT)
        real = nodes.valid.unsqueeze(-1) & (logprobs > NEG_INF)
        self._take(torch.where(real, tokens, self._none).flatten(1))

    def select(self, rows: Tensor) -> OwnIds:
        """Return these rows [n] int64, in this order."""
        return OwnIds(self.places[rows], self.count[rows], self.known[rows], self.lacking)

    def _take(self, tokens: Tensor) -> None:
        """Add tokens [R, m] int64 that the rows do not have; where there is no room for all, those of lower id."""
        room = self.places.shape[1] - 1
        tokens = tokens.sort(1).values
        new = ~self.known.gather(1, tokens)
        new[:, 1:] &= tokens[:, 1:] != tokens[:, :-1]
        place = self.count.unsqueeze(1) + new.cumsum(1) - 1
        new &= place < room
        self.places.scatter_(1, torch.where(new, place, room), tokens)
        self.known.scatter_(1, torch.where(new, tokens, self._none), True)
        self.count = self.count + new.sum(1)
