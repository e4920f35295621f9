"""State of a batch of requests: everything an iteration needs, as device tensors with one row per request."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dsbd_cli.config import MethodConfig, SamplingConfig
from dsbd_cli.engine.core.beams import Beams, Finished, select_rows
from dsbd_cli.engine.core.legal import FREE
from dsbd_cli.engine.core.noise import seed_key
from dsbd_cli.engine.core.probs import NEVER, Warp
from dsbd_cli.engine.core.slots import SlotTable
from dsbd_cli.engine.decoding.trace import TokenTrace
from dsbd_cli.engine.drafting.text import Prompts

__all__ = ["BatchState", "Limits"]

SMALLEST = 1e-30  # a top_p that the best entry alone reaches


@dataclass(slots=True)
class Limits:
    """When the requests of a batch end: max_new [R] int64, length_penalty [R] float32, early [R] bool."""

    max_new: Tensor
    length_penalty: Tensor
    early: Tensor


@dataclass(slots=True)
class BatchState:
    """R rows. `active` [R] bool: the row holds a request; row_key, iteration [R] int64: its noise.

    `sampling` is the host's copy of each row's settings, None where the row is free; `legal_starts` of the state in
    which its constraint began. `prompts` is kept only for a drafter that reads the text, `trace` only while a row asks
    for it.
    """

    method: MethodConfig
    beams: Beams
    finished: Finished
    table: SlotTable
    active: Tensor
    row_key: Tensor
    iteration: Tensor
    limits: Limits
    warp: Warp
    sampling: list[SamplingConfig | None]
    legal_starts: list[int | None]
    prompts: Prompts | None = None
    trace: TokenTrace | None = None

    @classmethod
    def empty(
        cls, method: MethodConfig, rows: int, slots: int, window: int, history: int, device: torch.device
    ) -> BatchState:
        """A batch without requests. slots: S, window: T, history: L."""
        number = torch.zeros(rows, dtype=torch.int64, device=device)
        real = torch.ones(rows, dtype=torch.float32, device=device)
        return cls(
            method=method,
            beams=Beams.empty(rows, method.num_beams, window, history, device),
            finished=Finished.empty(rows, method.num_beams, history, device),
            table=SlotTable.empty(rows, slots, device),
            active=torch.zeros_like(number, dtype=torch.bool),
            row_key=number.clone(),
            iteration=number.clone(),
            limits=Limits(number + 1, real.clone(), torch.zeros_like(number, dtype=torch.bool)),
            warp=Warp(
                temperature=real.clone(),
                top_k=number.clone(),
                top_p=real.clone(),
                min_p=real * 0,
                scope=method.warp_scope,
                max_top_k=0,
                all_top_k=False,
                even_top_k=True,
                any_top_p=False,
                any_min_p=False,
                cold=torch.zeros_like(number, dtype=torch.bool),
            ),
            sampling=[None] * rows,
            legal_starts=[None] * rows,
        )

    @property
    def rows(self) -> int:
        """R."""
        return len(self.sampling)

    def admit(
        self,
        row: int,
        prompt: Sequence[int],
        seed: int,
        stop_state: int,
        sampling: SamplingConfig,
        legal_state: int = FREE,
    ) -> None:
        """Put a request whose prompt (but its last token) is in the caches into a free row: one live beam of weight
        0. stop_state, legal_state: those in which it begins."""
        beams, table, known = self.beams, self.table, len(prompt) - 1
        device = self.active.device
        key = seed_key(torch.tensor(seed, dtype=torch.int64)).to(device)
        for tensor in (beams.valid, beams.weight, beams.logprob, beams.ancestors, beams.length):
            tensor[row] = 0
        beams.valid[row, 0] = True
        beams.token[row], beams.path[row], beams.stop_state[row] = prompt[-1], key, stop_state
        beams.legal_state[row], self.legal_starts[row] = legal_state, legal_state
        beams.depth[row] = known
        table.used[row] = table.trunk[row] = table.drafted[row] = known
        table.positions[row] = torch.arange(table.positions.shape[1], device=device)
        table.tokens[row, :known] = torch.tensor(prompt[:-1], dtype=torch.int64, device=device)
        self.finished.score[row] = NEVER
        self.active[row], self.row_key[row], self.iteration[row] = True, key, 0
        self.limits.max_new[row] = sampling.max_new_tokens
        self.limits.length_penalty[row] = sampling.length_penalty
        self.limits.early[row] = sampling.early_stopping
        cold, warp = sampling.temperature == 0, self.warp
        warp.cold[row], warp.temperature[row], warp.top_k[row] = cold, sampling.temperature or 1.0, sampling.top_k
        # in the limit all mass is on the best entry, which is all that top-p and min-p leave
        warp.top_p[row] = SMALLEST if cold and sampling.top_p < 1 else sampling.top_p
        warp.min_p[row] = 1.0 if cold and sampling.min_p > 0 else sampling.min_p
        self.sampling[row] = sampling
        if sampling.token_logprobs:
            self.trace = self.trace or TokenTrace.empty(beams, self.finished)
            self.trace.fit(beams.history.shape[2], sampling.top_logprobs)
        if self.prompts is not None:
            self.prompts.put(row, prompt)
        self._refresh()

    def release(self, row: int) -> None:
        """Free a row."""
        self.active[row] = False
        self.beams.valid[row] = False
        self.sampling[row] = self.legal_starts[row] = None
        if not any(item is not None and item.token_logprobs for item in self.sampling):
            self.trace = None
        self._refresh()

    def _refresh(self) -> None:
        """What the host knows about the rows' warps."""
        live = [item for item in self.sampling if item is not None]
        top_k = [item.top_k for item in live]
        self.warp.max_top_k, self.warp.all_top_k = max(top_k, default=0), bool(top_k) and all(top_k)
        self.warp.even_top_k = len(set(top_k)) < 2
        self.warp.any_top_p = any(item.top_p < 1 for item in live)
        self.warp.any_min_p = any(item.min_p > 0 for item in live)
        self.warp.any_cold = any(item.temperature == 0 for item in live)

    def select(self, rows: list[int]) -> None:
        """Keep only these rows."""
        index = torch.tensor(rows, device=self.active.device)
        self.beams = select_rows(self.beams, index)
        self.finished = select_rows(self.finished, index)
        table, limits, warp = self.table, self.limits, self.warp
        self.table = select_rows(table, index)
        self.active, self.row_key, self.iteration = self.active[index], self.row_key[index], self.iteration[index]
        self.limits = Limits(limits.max_new[index], limits.length_penalty[index], limits.early[index])
        warp.temperature, warp.top_k = warp.temperature[index], warp.top_k[index]
        warp.top_p, warp.min_p, warp.cold = warp.top_p[index], warp.min_p[index], warp.cold[index]
        self.sampling = [self.sampling[row] for row in rows]
        self.legal_starts = [self.legal_starts[row] for row in rows]
        if self.prompts is not None:
            self.prompts = self.prompts.select(index)
        if self.trace is not None:
            self.trace.select(index)

    def grow_history(self, length: int) -> None:
        """Room for `length` generated tokens."""
        more = length - self.beams.history.shape[2]
        if more > 0:
            self.beams.history = torch.nn.functional.pad(self.beams.history, (0, more))
            self.finished.tokens = torch.nn.functional.pad(self.finished.tokens, (0, more))
            if self.trace is not None:
                self.trace.fit(length, 0)
