"""Language models without weights, for tests of everything above the models.

They find a node's path only through the mask, the slot positions and the token stored in each slot, as attention would.
A wrong mask, position, slot or move therefore changes their logits.

Shape letters: R rows, n nodes of a forward, S active slots, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from dsbd_cli.engine.protocols import ForestInput

__all__ = ["HashModel", "TableModel"]

_MIX = 0x2545F4914F6CDD1D
_STEP = 0x1E3779B97F4A7C15


class _SlotModel:
    """The cache of a toy: one token per slot."""

    capturable, copies_prefixes, read_bytes = False, True, 1
    lm_head_ids: Tensor | None = None
    own_ids_below = 0

    def __init__(self, vocab_size: int, device: torch.device | str, max_positions: int | None) -> None:
        self._vocab_size = vocab_size
        self._device = torch.device(device)
        self._max_positions = max_positions
        self._tokens = torch.zeros((0, 0), dtype=torch.int64, device=self._device)  # [R, S]
        self.forwards = self.generation = 0

    @property
    def vocab_size(self) -> int:
        """V."""
        return self._vocab_size

    @property
    def device(self) -> torch.device:
        """Of inputs and logits."""
        return self._device

    @property
    def max_positions(self) -> int | None:
        """As given; None is unbounded."""
        return self._max_positions

    @property
    def invariant(self) -> bool:
        """A toy's logits are a function of the path."""
        return True

    def reserve(self, rows: int, slots: int, window: int | None = None) -> None:
        """Own rows x slots; grows only and keeps what is there."""
        old = self._tokens
        rows, slots = max(rows, old.shape[0]), max(slots, old.shape[1])
        if (rows, slots) != old.shape:
            self.generation += 1
            self._tokens = torch.full((rows, slots), -1, dtype=torch.int64, device=self._device)
            self._tokens[: old.shape[0], : old.shape[1]] = old

    def move(self, source: Tensor, target: Tensor, trunk: Tensor) -> None:
        """Copy slots within each row: source, target [R, T] int64."""
        tokens = self._tokens[: source.shape[0]]
        tokens.scatter_(1, target, tokens.gather(1, source))

    def select_rows(self, rows: Tensor) -> None:
        """Keep only these rows [n] int64, in this order; the memory stays reserved."""
        self._tokens[: len(rows)] = self._tokens[rows]

    def clear(self, row: int, start: int = 0) -> None:
        """Forget one row from a slot on."""
        self._tokens[row, start:] = -1

    def copy_prefixes(self, copies: Sequence[tuple[int, int, int]]) -> None:
        """Copy leading slots between rows: (source, target, slots)."""
        before = self._tokens.clone()
        for source, target, count in copies:
            self._tokens[target, :count] = before[source, :count]

    def release(self) -> None:
        """Give the memory back."""
        self.generation += 1
        self._tokens = self._tokens[:0, :0]

    def kv_bytes_per_slot(self) -> int:
        """Eight: one int64 token."""
        return self._tokens.element_size()

    def recurrent_bytes(self, window: int) -> int:
        """Nothing but tokens."""
        return 0

    def forward(self, batch: ForestInput, *, logits: bool = True) -> Tensor | None:
        """Store the tokens, return logits [R, n, V] float32 of what each node sees; None with logits=False."""
        self.forwards += 1
        stored = self._stored(batch)
        return self._logits(batch, stored) if logits else None

    def _stored(self, batch: ForestInput) -> Tensor:
        """[R, S] tokens of the rows of this forward, its own nodes written."""
        count, active = batch.tokens.shape[0], batch.mask.shape[-1]
        assert active <= self._tokens.shape[1], "forward outside the reserved slots"
        rows = torch.arange(count, device=self._device) if batch.rows is None else batch.rows
        self._tokens[rows[:, None], batch.slots] = batch.tokens
        return self._tokens[rows, :active]

    def _logits(self, batch: ForestInput, stored: Tensor) -> Tensor:
        raise NotImplementedError


class TableModel(_SlotModel):
    """Logits are a row of a table [V, V] (last token) or [V, V, V] (last two, older first; depth 0 counts twice)."""

    def __init__(self, table: Tensor, *, max_positions: int | None = None) -> None:
        super().__init__(table.shape[-1], table.device, max_positions)
        self.table = table

    def _logits(self, batch: ForestInput, stored: Tensor) -> Tensor:
        last = self._token_at(batch, stored, batch.positions)  # [R, n]
        if self.table.ndim == 2:
            return self.table[last]
        before = self._token_at(batch, stored, (batch.positions - 1).clamp_min(0))
        return self.table[before, last]

    def _token_at(self, batch: ForestInput, stored: Tensor, positions: Tensor) -> Tensor:
        """[R, n] token that each node sees at a position; a sum over what it sees: two or none give a wrong one."""
        there = batch.mask & (batch.slot_positions[:, None, :] == positions[:, :, None])  # [R, n, S]
        return (there * stored[:, None, :]).sum(dim=-1) % self._vocab_size


class HashModel(_SlotModel):
    """Logits are pseudo-random in the whole visible path, tokens and their positions.

    Attributes:
        sharpness: spread of the logits; 2 to 4 gives distributions about as peaked as a small language model's.
        noise: share of a second, independent hash mixed in. With the target's seed, 0 is the target itself, 0.3 a
            decent draft, and 1 has nothing to do with it.
        noise_seed: of the second hash.
    """

    def __init__(
        self,
        vocab_size: int,
        seed: int = 0,
        *,
        sharpness: float = 3.0,
        noise: float = 0.0,
        noise_seed: int = 1,
        max_positions: int | None = None,
        device: torch.device | str = "cpu",
    ) -> None:
        super().__init__(vocab_size, device, max_positions)
        self.seed, self.sharpness, self.noise, self.noise_seed = seed, sharpness, noise, noise_seed

    def _logits(self, batch: ForestInput, stored: Tensor) -> Tensor:
        # A sum of mixed (token, position) words: order counts through the position, slots do not
        words = _mix(stored * _STEP + _mix(batch.slot_positions + 1))  # [R, S]
        path = (batch.mask * words[:, None, :]).sum(dim=-1)  # [R, n], int64 sums wrap alike everywhere
        logits = self._gauss(path, self.seed)
        if self.noise:
            other = self._gauss(path, self.noise_seed + (1 << 40))
            logits = (1 - self.noise**2) ** 0.5 * logits + self.noise * other
        return self.sharpness * logits

    def _gauss(self, path: Tensor, seed: int) -> Tensor:
        """[R, n] int64 -> [R, n, V] float32, standard normal, a pure function of path, token and seed."""
        tokens = torch.arange(self._vocab_size, device=self._device)
        words = _mix(_mix(path + _word(seed * _STEP))[..., None] + tokens * _STEP)
        uniform = ((words & 0xFFFFFF).float() + 0.5) / (1 << 24)
        return torch.erfinv((2 * uniform - 1).clamp(-1 + 2**-23, 1 - 2**-23)) * 2**0.5


def _word(number: int) -> int:
    """The 64-bit word that an integer wraps to."""
    return (number + (1 << 63)) % (1 << 64) - (1 << 63)


def _mix(words: Tensor) -> Tensor:
    """A bijection of 64-bit words whose output bits all depend on all input bits (xor-shift and multiply)."""
    words = (words ^ (words >> 29)) * _MIX
    words = (words ^ (words >> 31)) * _STEP
    return words ^ (words >> 32)
