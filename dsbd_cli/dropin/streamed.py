"""New tokens for transformers' streamers, while the texts are decoded."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from dsbd_cli.engine.iteration.request_state import RequestState, ResultOrder
from dsbd_cli.requests import RequestResult


class Streamed(ResultOrder):
    """Results of one beam in input order, whose tokens go to a streamer as soon as all texts are so long.

    A streamer gets one tensor [B] per new token, as from transformers' own loop; texts that have ended are filled up.
    """

    def __init__(self, streamer: Any, rows: int, most: int, fill: int) -> None:
        """rows: B. most: tokens of a text at most. fill: the token behind the end of a text."""
        super().__init__()
        self._streamer, self._most, self._fill = streamer, most, fill
        self._texts: list[list[int]] = [[] for _ in range(rows)]
        self._ended: set[int] = set()
        self._sent = 0

    def progress(self, job: RequestState, tokens: Callable[[], list[int]]) -> None:
        """Take the tokens of a running request that can no longer change."""
        self._take(job.number, tokens())

    def put(self, number: int, result: RequestResult) -> None:
        """Take a result, and the rest of its tokens."""
        super().put(number, result)
        if result.hypotheses:
            self._ended.add(number)
            self._take(number, list(result.hypotheses[0].token_ids))

    def _take(self, number: int, tokens: list[int]) -> None:
        # fewer are known after out of memory, when the request begins again
        self._texts[number] = max(self._texts[number], tokens[: self._most], key=len)
        running = [len(text) for row, text in enumerate(self._texts) if row not in self._ended]
        ready = min(running, default=max(map(len, self._texts)))
        for position in range(self._sent, ready):
            column = [text[position] if position < len(text) else self._fill for text in self._texts]
            self._streamer.put(torch.tensor(column))
        self._sent = max(self._sent, ready)
