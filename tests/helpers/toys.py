"""Toy models and a codec whose text is the token numbers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from dsbd_cli.config.chat import ChatConfig
from dsbd_cli.engine.protocols import ForestInput
from tests.helpers.plain import Rows


class TableLM:
    """Logits are table[token before, token], where the token before is found through mask and depth alone, so a wrong
    mask or a wrong
    move shows."""

    max_positions = None
    capturable = False
    invariant = copies_prefixes = True
    lm_head_ids: Tensor | None = None
    own_ids_below = 0
    read_bytes = 1

    def __init__(self, table: Tensor) -> None:
        self.table, self.generation = table, 0
        self.vocab_size = table.shape[-1]
        self.device = torch.device("cpu")
        self.tokens = torch.zeros(0, 0, dtype=torch.int64)

    def reserve(self, rows: int, slots: int, window: int | None = None) -> None:
        self.generation += 1
        old, self.tokens = self.tokens, torch.zeros(rows, slots, dtype=torch.int64)
        if old.shape[0] == rows:
            kept = min(old.shape[1], slots) - 1
            self.tokens[:, :kept] = old[:, :kept]

    def forward(self, batch: ForestInput, *, logits: bool = True) -> Tensor | None:
        rows = torch.arange(len(batch.tokens)) if batch.rows is None else batch.rows
        self.tokens[rows.unsqueeze(1), batch.slots] = batch.tokens
        if not logits:
            return None
        held = self.tokens[rows][:, : batch.mask.shape[-1]]
        before = batch.mask & (batch.slot_positions.unsqueeze(1) == (batch.positions - 1).unsqueeze(2))
        previous = (before * held.unsqueeze(1)).sum(-1)
        return self.table[previous.clamp(max=self.vocab_size - 1), batch.tokens]

    def move(self, source: Tensor, target: Tensor, common_prefix: Tensor) -> None:
        self.tokens.scatter_(1, target, self.tokens.gather(1, source))

    def select_rows(self, rows: Tensor) -> None:
        self.generation += 1
        self.tokens = self.tokens[rows]

    def clear(self, row: int, start: int = 0) -> None:
        self.tokens[row, start:] = 0

    def copy_prefixes(self, copies: Sequence[tuple[int, int, int]]) -> None:
        before = self.tokens.clone()
        for source, target, count in copies:
            self.tokens[target, :count] = before[source, :count]

    def release(self) -> None:
        self.generation += 1
        self.tokens = torch.zeros(0, 0, dtype=torch.int64)

    def kv_bytes_per_slot(self) -> int:
        return 0

    def recurrent_bytes(self, window: int) -> int:
        return 0


def _table(seed: int, vocabulary: int, scale: float = 1.5) -> Tensor:
    return torch.randn(vocabulary, vocabulary, vocabulary, generator=torch.Generator().manual_seed(seed)) * scale


def table_pair(
    seed: int, vocabulary: int, noise: float, ends: Mapping[int, float] | None = None
) -> tuple[TableLM, TableLM]:
    """A target and a draft that is a perturbed copy. ends: what is added to the logits of some tokens."""
    table = _table(seed, vocabulary)
    draft = table + noise * _table(seed + 1, vocabulary, 1.0)
    for token, boost in (ends or {}).items():
        table[..., token] += boost
        draft[..., token] += boost
    return TableLM(table), TableLM(draft)


def table_rows(seed: int, vocabulary: int, prompt: tuple[int, ...] = (0,)) -> Rows:
    """The target of table_pair as the plain decoder takes it."""
    logs = torch.log_softmax(_table(seed, vocabulary).double(), -1).tolist()

    def rows(path: tuple[int, ...]) -> dict[int, float]:
        tokens = (*prompt, *path)
        before = tokens[-2] if len(tokens) > 1 else 0
        return dict(enumerate(logs[before][tokens[-1]]))

    return rows


class NumberCodec:
    """Text is the token numbers with a space after each."""

    def __init__(self, vocabulary: int, eos_ids: tuple[int, ...] = ()) -> None:
        self.vocabulary, self.eos_ids = vocabulary, eos_ids

    def encode(self, prompt: str) -> list[int]:
        return [int(word) for word in prompt.split()]

    def encode_pieces(self, texts: list[str]) -> list[list[int]]:
        return [self.encode(text) for text in texts]

    def render_chat(self, messages: Sequence[Mapping[str, object]], chat: ChatConfig) -> str:
        return " ".join(str(message["content"]) for message in messages)

    def decode(self, ids: list[int], *, skip_special_tokens: bool = True) -> str:
        return "".join(f"{token} " for token in ids)

    def token_bytes(self, *, skip_special_tokens: bool = True) -> list[bytes]:
        return [f"{token} ".encode() for token in range(self.vocabulary)]
