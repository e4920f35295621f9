"""Prompts into the caches: all tokens but the last, in chunks, several rows at once. No logits are computed."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from dsbd_cli.engine.core.protocols import ForestInput, ForestModel

__all__ = ["prefill"]

CHUNK = 512


def prefill(model: ForestModel, rows: Sequence[int], prompts: Sequence[Sequence[int]], trash: int) -> None:
    """Write prompts[i][:-1] to slots 0.. of cache row rows[i]. trash: the slot that padding is written to."""
    known = [list(prompt[:-1]) for prompt in prompts]
    longest = max((len(tokens) for tokens in known), default=0)
    for start in range(0, longest, CHUNK):
        picked = [(row, tokens) for row, tokens in zip(rows, known, strict=True) if len(tokens) > start]
        width = min(CHUNK, max(len(tokens) for _, tokens in picked) - start)
        _chunk(model, [row for row, _ in picked], [tokens[start : start + width] for _, tokens in picked], start, trash)


def _chunk(model: ForestModel, rows: list[int], parts: list[list[int]], start: int, trash: int) -> None:
    width = max(len(part) for part in parts)
    device = model.device
    tokens = torch.tensor([part + [0] * (width - len(part)) for part in parts], device=device)
    length = torch.tensor([len(part) for part in parts], device=device).unsqueeze(1)
    steps = torch.arange(width, device=device).unsqueeze(0)
    real = steps < length
    slots = torch.where(real, steps + start, trash)
    index = torch.arange(start + width, device=device)
    # padding sees slot 0 alone: no row of the mask may be empty
    mask = torch.where(real.unsqueeze(-1), index <= (steps + start).unsqueeze(-1), index == 0)
    batch = ForestInput(
        tokens=tokens,
        positions=torch.where(real, steps + start, 0),
        slots=slots,
        mask=mask,
        slot_positions=index.expand(len(rows), -1),
        rows=torch.tensor(rows, device=device),
    )
    model.forward(batch, logits=False)
