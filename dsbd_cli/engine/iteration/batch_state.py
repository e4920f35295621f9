"""State of a batch of requests: everything an iteration needs, as device tensors with one row per request."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dsbd_cli.config.method import MethodConfig
from dsbd_cli.config.sampling import SamplingConfig
from dsbd_cli.engine.constraints.legal import FREE
from dsbd_cli.engine.core.beams import Beams, Finished, select_rows
from dsbd_cli.engine.core.distribution import Warp
from dsbd_cli.engine.core.noise import seed_key
from dsbd_cli.engine.core.own_ids import OwnIds
from dsbd_cli.engine.core.slots import SlotTable
from dsbd_cli.engine.core.topk import NEG_INF
from dsbd_cli.engine.drafting.text import PromptTable
from dsbd_cli.engine.iteration.token_logprobs import TokenTrace

TOP_P_OF_BEST = 1e-30  # a top_p that the best entry alone reaches


@dataclass(slots=True)
class Limits:
    """Limits of the requests of a batch: max_new [R] int64, length_penalty [R] float32, early and never (early_stopping
    true and "never") [R] bool, num_beams [R] int64, W of each row. any_never: some row ends so. any_narrow: some row
    has fewer beams than the engine."""

    max_new: Tensor
    length_penalty: Tensor
    early: Tensor
    never: Tensor
    num_beams: Tensor
    any_never: bool = False
    any_narrow: bool = False

    @property
    def row_beams(self) -> Tensor | None:
        """W of each row, [R] int64; None where it is the engine's in all rows."""
        return self.num_beams if self.any_narrow else None


@dataclass(frozen=True, slots=True)
class NewRow:
    """A request that begins. prompt: its tokens, all but the last of which are in the caches. stop_state, legal_state:
    its initial states."""

    prompt: Sequence[int]
    seed: int
    sampling: SamplingConfig
    stop_state: int
    legal_state: int = FREE


@dataclass(slots=True)
class BatchState:
    """The R rows of a batch. `active` [R] bool: the row holds a request. `row_key`, `iteration` [R] int64: keys of its
    noise.

    `sampling` is the host's copy of each row's settings, and `legal_starts` that of the state in which its constraint
    began. Both are None where the row is free. `prompts` is kept only for a drafter that reads the text, `trace` only
    while a row asks for it, `own_ids` only for a trimmed draft that can give their logits.
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
    prompts: PromptTable | None = None
    trace: TokenTrace | None = None
    own_ids: OwnIds | None = None

    @classmethod
    def empty(
        cls, method: MethodConfig, rows: int, slots: int, window: int, history: int, device: torch.device
    ) -> BatchState:
        """Return a batch without requests. slots: S, window: T, history: L."""
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
            limits=Limits(
                max_new=number + 1,
                length_penalty=real.clone(),
                early=torch.zeros_like(number, dtype=torch.bool),
                never=torch.zeros_like(number, dtype=torch.bool),
                num_beams=number + method.num_beams,
            ),
            warp=Warp(
                temperature=real.clone(),
                top_k=number.clone(),
                top_p=real.clone(),
                min_p=real * 0,
                greedy=torch.zeros_like(number, dtype=torch.bool),
                scope=method.warp_scope,
            ),
            sampling=[None] * rows,
            legal_starts=[None] * rows,
        )

    @property
    def rows(self) -> int:
        """R, number of rows."""
        return len(self.sampling)

    def admit(self, entries: Mapping[int, NewRow]) -> None:
        """Put requests into free rows, each with one live beam of weight 0. entries: by row."""
        beams, table, warp, device = self.beams, self.table, self.warp, self.active.device
        at, new = torch.tensor(list(entries), device=device), list(entries.values())

        def numbers(values: Iterable[float], dtype: torch.dtype = torch.int64) -> Tensor:
            return torch.tensor(list(values), dtype=dtype, device=device)

        real, sampling = torch.float32, [entry.sampling for entry in new]
        key = seed_key(torch.tensor([entry.seed for entry in new], dtype=torch.int64)).to(device)
        prompt_lengths = numbers(len(entry.prompt) - 1 for entry in new)
        for tensor in (beams.valid, beams.weight, beams.logprob, beams.ancestors, beams.length):
            tensor[at] = 0
        beams.valid[at, 0] = True
        for tensor, value in (
            (beams.token, numbers(entry.prompt[-1] for entry in new)),
            (beams.path, key),
            (beams.stop_state, numbers(entry.stop_state for entry in new)),
            (beams.legal_state, numbers(entry.legal_state for entry in new)),
        ):
            tensor[at] = value.unsqueeze(1)
        beams.depth[at] = table.used[at] = table.common_prefix[at] = table.drafted[at] = prompt_lengths
        table.positions[at] = torch.arange(table.positions.shape[1], device=device)
        longest = max(len(entry.prompt) for entry in new) - 1
        held = [[*entry.prompt[:-1], *[0] * (longest + 1 - len(entry.prompt))] for entry in new]
        table.tokens[at, :longest] = torch.tensor(held, dtype=torch.int64, device=device)
        self.finished.score[at] = NEG_INF
        self.active[at], self.row_key[at], self.iteration[at] = True, key, 0
        self.limits.max_new[at] = numbers(item.max_new_tokens for item in sampling)
        self.limits.length_penalty[at] = numbers((item.length_penalty for item in sampling), real)
        self.limits.early[at] = numbers((item.early_stopping is True for item in sampling), torch.bool)
        self.limits.never[at] = numbers((item.early_stopping == "never" for item in sampling), torch.bool)
        self.limits.num_beams[at] = numbers(item.num_beams or self.method.num_beams for item in sampling)
        warp.greedy[at] = numbers((item.temperature == 0 for item in sampling), torch.bool)
        warp.temperature[at] = numbers((item.temperature or 1.0 for item in sampling), real)
        warp.top_k[at] = numbers(item.top_k for item in sampling)
        # in the limit T -> 0 all mass is on the best entry, so top-p and min-p leave that entry alone
        # a smaller top_p might be 0 in float32
        top_p = (
            TOP_P_OF_BEST if item.temperature == 0 and item.top_p < 1 else max(item.top_p, TOP_P_OF_BEST)
            for item in sampling
        )
        min_p = (1.0 if item.temperature == 0 and item.min_p > 0 else item.min_p for item in sampling)
        warp.top_p[at], warp.min_p[at] = numbers(top_p, real), numbers(min_p, real)
        for row, entry in entries.items():
            self.sampling[row], self.legal_starts[row] = entry.sampling, entry.legal_state
            if self.prompts is not None:
                self.prompts.put(row, entry.prompt)
        if self.own_ids is not None:
            self.own_ids.begin({row: entry.prompt for row, entry in entries.items()})
        if any(item.token_logprobs for item in sampling):
            self.trace = self.trace or TokenTrace.empty(beams, self.finished)
            tops = max(item.top_logprobs for item in sampling if item.token_logprobs)
            self.trace.fit(beams.history.shape[2], tops)
        self._refresh()

    def release(self, rows: Sequence[int]) -> None:
        """Free rows."""
        at = torch.tensor(rows, device=self.active.device)
        self.active[at] = False
        self.beams.valid[at] = False
        for row in rows:
            self.sampling[row] = self.legal_starts[row] = None
        if not any(item is not None and item.token_logprobs for item in self.sampling):
            self.trace = None
        self._refresh()

    def _refresh(self) -> None:
        """Update the host's summary of the rows' sampling settings."""
        live = [item for item in self.sampling if item is not None]
        top_k = [item.top_k for item in live]
        self.warp.max_top_k, self.warp.all_top_k = max(top_k, default=0), bool(top_k) and all(top_k)
        self.warp.even_top_k = len(set(top_k)) < 2
        self.warp.any_top_p = any(item.top_p < 1 for item in live)
        self.warp.any_min_p = any(item.min_p > 0 for item in live)
        self.warp.any_greedy = any(item.temperature == 0 for item in live)
        self.limits.any_never = any(item.early_stopping == "never" for item in live)
        self.limits.any_narrow = any(item.num_beams not in (None, self.method.num_beams) for item in live)

    def select(self, rows: list[int]) -> None:
        """Keep only these rows, in this order."""
        index = torch.tensor(rows, device=self.active.device)
        self.beams = select_rows(self.beams, index)
        self.finished = select_rows(self.finished, index)
        table, limits, warp = self.table, self.limits, self.warp
        self.table = select_rows(table, index)
        self.active, self.row_key, self.iteration = self.active[index], self.row_key[index], self.iteration[index]
        limits.max_new, limits.length_penalty = limits.max_new[index], limits.length_penalty[index]
        limits.early, limits.never, limits.num_beams = limits.early[index], limits.never[index], limits.num_beams[index]
        warp.temperature, warp.top_k = warp.temperature[index], warp.top_k[index]
        warp.top_p, warp.min_p, warp.greedy = warp.top_p[index], warp.min_p[index], warp.greedy[index]
        self.sampling = [self.sampling[row] for row in rows]
        self.legal_starts = [self.legal_starts[row] for row in rows]
        if self.prompts is not None:
            self.prompts = self.prompts.select(index)
        if self.trace is not None:
            self.trace.select(index)
        if self.own_ids is not None:
            self.own_ids = self.own_ids.select(index)

    def grow_history(self, length: int) -> None:
        """Make room for `length` generated tokens of each beam and finished hypothesis."""
        more = length - self.beams.history.shape[2]
        if more > 0:
            self.beams.history = torch.nn.functional.pad(self.beams.history, (0, more))
            self.finished.tokens = torch.nn.functional.pad(self.finished.tokens, (0, more))
            if self.trace is not None:
                self.trace.fit(length, 0)
