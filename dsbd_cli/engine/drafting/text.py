"""Tokens of each beam so far, prompt and output, for drafters that look up text instead of running a model.

Letters: R requests, W beams, P room for a prompt, L history, X = P + L.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dsbd_cli.engine.constraints.legal import NO_TOKEN, joined
from dsbd_cli.engine.core.beams import Beams


@dataclass(slots=True)
class PromptTable:
    """Prompts of all rows: tokens [R, P] int64, length [R] int64."""

    tokens: Tensor
    length: Tensor

    @classmethod
    def empty(cls, rows: int, device: torch.device) -> PromptTable:
        """Return a table whose rows have no prompt."""
        number = torch.zeros(rows, dtype=torch.int64, device=device)
        return cls(number.unsqueeze(1).clone(), number)

    def put(self, row: int, prompt: Sequence[int]) -> None:
        """Store the prompt of one row. The table grows where the prompt is longer than its room."""
        more = len(prompt) - self.tokens.shape[1]
        if more > 0:
            self.tokens = torch.nn.functional.pad(self.tokens, (0, more))
        self.tokens[row, : len(prompt)] = torch.tensor(prompt, device=self.tokens.device)
        self.length[row] = len(prompt)

    def select(self, rows: Tensor) -> PromptTable:
        """Return only these rows [n] int64, in this order."""
        return PromptTable(self.tokens[rows], self.length[rows])


def contexts(prompts: PromptTable, beams: Beams) -> tuple[Tensor, Tensor]:
    """Return each beam's tokens [R, W, X], NO_TOKEN past the end, and their number [R]. The last token is the pending
    one."""
    tokens = joined(prompts.tokens, prompts.length, beams.history, beams.length.unsqueeze(1))
    return tokens, prompts.length + beams.length


def host_contexts(prompts: PromptTable, beams: Beams) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
    """Return the same on the host, each beam's tokens [R * W, X] int32 at the end of its line, and their number."""
    tokens, history = prompts.tokens.cpu().numpy(), beams.history.cpu().numpy()
    rows, width = history.shape[:2]
    begun, generated = prompts.length.tolist(), beams.length.tolist()
    lengths = [prompt + text for prompt, text in zip(begun, generated, strict=True)]
    most = max(lengths, default=0)
    texts = np.full((rows, width, most), NO_TOKEN, np.int32)
    for row, (prompt, text) in enumerate(zip(begun, generated, strict=True)):
        texts[row, :, most - prompt - text : most - text] = tokens[row, :prompt]
        texts[row, :, most - text :] = history[row, :, :text]
    return texts.reshape(rows * width, most), np.repeat(np.array(lengths, np.int32), width)


def suffix(tokens: Tensor, length: Tensor, count: int) -> Tensor:
    """Return the last `count` tokens of every context, in order: [R, W, count]. A context with fewer begins with
    NO_TOKEN."""
    at = length.unsqueeze(1) - torch.arange(count, 0, -1, device=tokens.device)  # [R, count]
    index = at.clamp(min=0).unsqueeze(1).expand(-1, tokens.shape[1], -1)
    return tokens.gather(2, index).masked_fill((at < 0).unsqueeze(1), NO_TOKEN)
