"""Rows of an LM head for tokens that a trimmed one lacks: the request's own ids.

Letters: R batch rows, n nodes, H hidden width, o own ids, m tokens of the trimmed head, V rows of the whole one.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from dsbd_cli.ops.interface import RowsLinear
from dsbd_cli.ops.select import ops_for

OWN_IDS = "each request adds ids of its own"
COMPARED = 1024  # rows by which a trimmed head is told to be part of a table
ROUNDED = 1e-2  # of a number: bfloat16 rounds to 0.4 %


@dataclass(slots=True)
class OwnRows:
    """The whole table that the rows of a trimmed head are from.

    Attributes:
        table: [V, H], in any dtype. scale: logits are divided by it. rows: those that each batch row has picked.
    """

    table: Tensor
    scale: float
    rows: RowsLinear
    _ids: Tensor | None = field(default=None, init=False)

    @classmethod
    def of(cls, rows: Tensor, ids: Tensor, table: Tensor, dtype: torch.dtype, scale: float = 1.0) -> OwnRows | None:
        """Return a table [V, H] where rows [m, H], of the tokens ids [m] int64, are its own over `scale`, but for
        rounding; else None. Of many rows every so many-th is compared. dtype: what is computed in."""
        if rows.shape[1:] != table.shape[1:] or int(ids[-1]) >= len(table):
            return None
        some = slice(None, None, -(-len(ids) // COMPARED))
        theirs = table[ids[some].to(table.device)].float() / scale
        if not torch.allclose(rows[some].to(table.device).float(), theirs, rtol=ROUNDED, atol=0):
            return None
        return cls(table, scale, ops_for(table.device, dtype, ("pick",)).pick(table, dtype))

    def compute(self, hidden: Tensor, ids: Tensor) -> Tensor:
        """Return the products [R, n, o] of what the last norm gave, [R, n, H], with the rows ids [R, o] int64; those
        past the table mean nothing. Rows are picked once for the same tensor of ids."""
        if ids is not self._ids:
            self.rows.take(ids.clamp(max=len(self.table) - 1))
            self._ids = ids
        found = self.rows.compute(hidden)
        return found if self.scale == 1 else found / self.scale
