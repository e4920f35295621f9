"""Prefill: all tokens of prompts but the last are written to the caches, in chunks, several rows at once. No logits are
computed."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence

import torch

from dsbd_cli.engine.protocols import ForestInput, ForestModel

CHUNK = 512
STEP = 32  # widths of chunks are multiples of it: a vector that is not full would change how a softmax is summed


def prefill(
    model: ForestModel,
    rows: Sequence[int],
    prompts: Sequence[Sequence[int]],
    trash: int,
    *,
    apart: bool,
    known: Sequence[int] | None = None,
) -> None:
    """Write prompts[i][:-1] to slots 0.. of cache row rows[i]. trash: the slot that padding is written to.

    apart: rows share a forward only if their chunks begin at the same slot and have the same width, so that the
    contents written for a prompt do not depend on the other rows. known: slots of each row that are written already.
    They must be multiples of PREFIX_STEP where the contents must have the same bits as with a prefill from slot 0 on.
    """
    first = dict(zip(rows, known or [0] * len(rows), strict=True))
    missing = {row: list(prompt[first[row] : -1]) for row, prompt in zip(rows, prompts, strict=True)}
    longest = max(map(len, missing.values()), default=0)
    for start in range(0, longest, CHUNK):
        parts = {row: tokens[start : start + CHUNK] for row, tokens in missing.items() if len(tokens) > start}
        for width, together in _together(parts, first, apart):
            starts = [first[row] + start for row in together]
            _chunk(model, together, [parts[row] for row in together], starts, width, trash, apart)


def _together(parts: Mapping[int, list[int]], first: Mapping[int, int], apart: bool) -> list[tuple[int, list[int]]]:
    """Group the rows that share a forward, each group with the width of its chunk."""
    widths = {row: -(-len(part) // STEP) * STEP for row, part in parts.items()}
    if not apart:
        return [(max(widths.values()), list(parts))]
    groups = defaultdict[tuple[int, int], list[int]](list)
    for row, width in widths.items():
        groups[width, first[row]].append(row)
    return [(width, rows) for (width, _), rows in groups.items()]


def _chunk(
    model: ForestModel, rows: list[int], parts: list[list[int]], starts: list[int], width: int, trash: int, apart: bool
) -> None:
    device = model.device
    start = torch.tensor(starts, device=device).unsqueeze(1)
    tokens = torch.tensor([part + [0] * (width - len(part)) for part in parts], device=device)
    length = torch.tensor([len(part) for part in parts], device=device).unsqueeze(1)
    steps = torch.arange(width, device=device).unsqueeze(0)
    real = steps < length
    slots = torch.where(real, steps + start, trash)
    # the largest start and the width may belong to different rows, and exceed the slots that there are
    index = torch.arange(min(max(starts) + width, trash + 1), device=device)
    # padding sees slot 0 alone: no row of the mask may be empty
    mask = torch.where(real.unsqueeze(-1), index <= (steps + start).unsqueeze(-1), index == 0)
    batch = ForestInput(
        tokens=tokens,
        positions=torch.where(real, steps + start, 0),
        slots=slots,
        mask=mask,
        slot_positions=index.expand(len(rows), -1),
        rows=torch.tensor(rows, device=device),
        prompt_slots=tuple(starts) if apart else None,
        chain=True,
    )
    model.forward(batch, logits=False)
