"""Live beams between iterations, and the best finished hypotheses. All are tensors on the device, one row per request.

Letters: R requests, W beams, F = W finished hypotheses kept, T suffix window, L history length.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import TypeVar

import torch
from torch import Tensor

from dsbd_cli.engine.core.slots import SlotTable
from dsbd_cli.engine.core.topk import NEG_INF, best_first

T = TypeVar("T", "Beams", "Finished", SlotTable)


@dataclass(slots=True)
class Beams:
    """Live beams of every row. All live beams of a row have the same length.

    Attributes:
        valid: [R, W] bool. token: [R, W] int64, the pending token (not yet run through the models).
        weight, logprob: [R, W] float32, the scores s and l of docs/algorithm.md. path: [R, W] int64 path keys.
            stop_state, legal_state: [R, W] int64, states of the stop automaton and of the constraints.
        ancestors: [R, W, T] bool, ancestors among the suffix slots.
        history: [R, W, L] int64, generated tokens.
        length: [R] int64, generated tokens (the pending one included). depth: [R] int64, position of the pending
            tokens.
    """

    valid: Tensor
    token: Tensor
    weight: Tensor
    logprob: Tensor
    path: Tensor
    stop_state: Tensor
    legal_state: Tensor
    ancestors: Tensor
    history: Tensor
    length: Tensor
    depth: Tensor

    @classmethod
    def empty(cls, rows: int, beams: int, window: int, history: int, device: torch.device) -> Beams:
        """Return beams none of which is live."""

        def zeros(*shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
            return torch.zeros(rows, *shape, dtype=dtype, device=device)

        return cls(
            valid=zeros(beams, dtype=torch.bool),
            token=zeros(beams),
            weight=zeros(beams, dtype=torch.float32),
            logprob=zeros(beams, dtype=torch.float32),
            path=zeros(beams),
            stop_state=zeros(beams) + 1,
            legal_state=zeros(beams),
            ancestors=zeros(beams, window, dtype=torch.bool),
            history=zeros(beams, history),
            length=zeros(),
            depth=zeros(),
        )

    def first(self) -> Beams:
        """Return the first beam of each row alone (W = 1)."""
        values = {item.name: getattr(self, item.name) for item in fields(self)}
        return Beams(**{name: value[:, :1] if value.dim() > 1 else value for name, value in values.items()})


@dataclass(slots=True)
class Finished:
    """The best `num_beams` finished hypotheses of every row, best first.

    Attributes:
        score, logprob: [R, F] float32 (score -inf: none). length: [R, F] int64. by_length: [R, F] bool, ended by the
            length limit.
        origin: [R, F] int64, source of the entry's tokens while a forest is verified: index of an older entry (>= 0),
            or -1 for a new pair.
        node, token: [R, F] int64, parent node and last token of a new pair.
        tokens: [R, F, L] int64.
    """

    score: Tensor
    logprob: Tensor
    length: Tensor
    by_length: Tensor
    origin: Tensor
    node: Tensor
    token: Tensor
    tokens: Tensor

    @classmethod
    def empty(cls, rows: int, kept: int, history: int, device: torch.device) -> Finished:
        """Return rows without a finished hypothesis."""
        number = torch.zeros(rows, kept, dtype=torch.int64, device=device)
        score = torch.full((rows, kept), NEG_INF, dtype=torch.float32, device=device)
        return cls(
            score=score,
            logprob=score.clone(),
            length=number,
            by_length=torch.zeros_like(number, dtype=torch.bool),
            origin=torch.arange(kept, device=device).expand(rows, kept).clone(),
            node=number.clone(),
            token=number.clone(),
            tokens=torch.zeros(rows, kept, history, dtype=torch.int64, device=device),
        )

    def best_after(self, score: Tensor) -> tuple[Tensor, Tensor]:
        """Select the best F hypotheses after each of L layers (here not the history length), which add E hypotheses
        each.

        score: [R, L, E], of the added hypotheses (-inf: none). Returns the selected scores, best first, and their
        indices into the older entries followed by all added ones, [R, L, F] each. Of equal scores the older entry comes
        first.
        """
        kept, (_, layers, count) = self.score.shape[1], score.shape
        number = torch.arange(layers, device=score.device)
        up_to_layer = (number.unsqueeze(1) >= number).unsqueeze(2).expand(-1, -1, count).flatten(1)  # [L, L * E]
        up_to_layer = torch.nn.functional.pad(up_to_layer, (kept, 0), value=True)
        together = torch.cat((self.score, score.flatten(1)), 1).unsqueeze(1)
        return best_first(torch.where(up_to_layer, together, NEG_INF), kept)

    def take(self, new: Mapping[str, Tensor], score: Tensor, index: Tensor, steps: Tensor) -> None:
        """Keep the best F after the first `steps` layers [R]. Rows of 0 steps stay as they are. score, index:
        [R, L, F], from best_after. new: fields of the added hypotheses, [R, L, E] each, by name: all but `score` and
        `tokens`."""
        last = (steps - 1).clamp(min=0).view(-1, 1, 1).expand(-1, 1, score.shape[2])
        advanced = (steps > 0).unsqueeze(1)
        self.score = torch.where(advanced, score.gather(1, last).squeeze(1), self.score)
        unchanged = torch.arange(score.shape[2], device=score.device)
        at = torch.where(advanced, index.gather(1, last).squeeze(1), unchanged)
        for name, added in new.items():
            setattr(self, name, torch.cat((getattr(self, name), added.flatten(1)), dim=1).gather(1, at))

    def store_tokens(self, tokens: Tensor) -> None:
        """Write the tokens of every entry, and reset `origin`. Older entries keep theirs, new ones take tokens
        [R, F, L]."""
        index = self.origin.clamp(min=0).unsqueeze(-1).expand_as(self.tokens)
        old = self.tokens.gather(1, index)
        self.tokens = torch.where((self.origin >= 0).unsqueeze(-1), old, tokens)
        self.origin = torch.arange(self.score.shape[1], device=self.score.device).expand_as(self.origin).clone()


def fit_window(ancestors: Tensor, window: int) -> Tensor:
    """Pad or cut ancestors [R, W, T] to a suffix window of `window` slots. What is cut off must be empty."""
    return torch.nn.functional.pad(ancestors, (0, window - ancestors.shape[-1]))


def select_rows(value: T, rows: Tensor) -> T:
    """Return the dataclass of tensors with only these rows, in this order."""
    return type(value)(**{field.name: getattr(value, field.name)[rows] for field in fields(value)})
