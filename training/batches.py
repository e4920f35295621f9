"""Batches of groups: questions that share a context are branches behind one copy of it."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice

import torch
from transformers import PreTrainedTokenizerFast

from dsbd_cli.lab.tasks.record import TaskRecord
from training.settings import BRANCHES
from training.tasks import GENERATORS

QUESTION_WEIGHT = 0.1
SORTED_GROUPS = 256

# QA is the slower to learn.
SHARES = {"sql": 0.45, "qa": 0.55}


@dataclass(frozen=True, slots=True)
class Row:
    """One group: branch 0 is the context; the weight is that of predicting the NEXT token."""

    ids: list[int]
    positions: list[int]
    branches: list[int]
    weights: list[float]


@dataclass(frozen=True, slots=True)
class Batch:
    """Padded rows; `seen` is the attention mask (True where a query may look)."""

    ids: torch.Tensor  # [R, S] int64
    positions: torch.Tensor  # [R, S] int64
    seen: torch.Tensor  # [R, 1, S, S] bool
    labels: torch.Tensor  # [R, S] int64
    weights: torch.Tensor  # [R, S] float32


def make_row(group: list[TaskRecord], tokenizer: PreTrainedTokenizerFast) -> Row:
    """The group's context, then question, answer and end of every record."""
    context = group[0].prompt.split("\nquestion:")[0]
    texts = [context]
    for record in group:
        texts += [record.prompt[len(context) :], " " + record.reference]
    encoded = tokenizer(texts, add_special_tokens=False)["input_ids"]
    ids = list(encoded[0])
    shared = len(ids)
    positions, branches, weights = list(range(shared)), [0] * shared, [0.0] * shared
    for index in range(len(group)):
        question, answer = encoded[1 + 2 * index], encoded[2 + 2 * index]
        tokens = [*question, *answer, tokenizer.eos_token_id]
        ids += tokens
        positions += range(shared, shared + len(tokens))
        branches += [index + 1] * len(tokens)
        weights += [QUESTION_WEIGHT] * (len(question) - 1) + [1.0] * (len(answer) + 1) + [0.0]
    return Row(ids, positions, branches, weights)


def stack(rows: list[Row], pad: int) -> Batch:
    """Rows as one batch, padded to the longest rounded up to 16."""
    longest = -(-max(len(row.ids) for row in rows) // 16) * 16

    def padded(values: list[list[int]], filler: int) -> torch.Tensor:
        return torch.tensor([value + [filler] * (longest - len(value)) for value in values])

    ids = padded([row.ids for row in rows], pad)
    branches = padded([row.branches for row in rows], -1)
    weights = torch.tensor([row.weights + [0.0] * (longest - len(row.weights)) for row in rows])
    causal = torch.ones(longest, longest, dtype=torch.bool).tril()
    related = (branches[:, None, :] == 0) | (branches[:, None, :] == branches[:, :, None])
    return Batch(ids, padded([row.positions for row in rows], 0), (causal & related)[:, None], ids.roll(-1, 1), weights)


def gold_groups(seed: int, level: Callable[[], list[float]]) -> Iterator[list[TaskRecord]]:
    """Endless groups of both tasks; `level()` gives the chances of levels 0, 1, 2."""
    rng = random.Random(seed)
    streams = {
        (name, lvl): task.groups("train", seed, BRANCHES, lvl) for name, task in GENERATORS.items() for lvl in range(3)
    }
    while True:
        lvl = rng.choices((0, 1, 2), level())[0]
        name = rng.choices(tuple(SHARES), tuple(SHARES.values()))[0]
        yield next(streams[name, lvl])


def make_batches(
    groups: Iterator[list[TaskRecord]], tokenizer: PreTrainedTokenizerFast, seed: int, tokens: Callable[[], int]
) -> Iterator[Batch]:
    """Batches of about `tokens()` tokens, rows of like length together, in random order."""
    rng = random.Random(seed)
    while True:
        rows = sorted((make_row(group, tokenizer) for group in islice(groups, SORTED_GROUPS)), key=lambda r: len(r.ids))
        made, start = [], 0
        for end in range(1, len(rows) + 1):
            if end == len(rows) or len(rows[end].ids) * (end + 1 - start) > tokens():
                made.append(stack(rows[start:end], tokenizer.eos_token_id))
                start = end
        rng.shuffle(made)
        yield from made
