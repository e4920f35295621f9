"""Rows of an LM head for tokens that a trimmed LM head lacks: the request's own ids.

Letters: R batch rows, n nodes, H hidden width, o own ids, m tokens of the trimmed LM head, V rows of the whole one.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from dsbd_cli.ops.interface import RowsLinear
from dsbd_cli.ops.quantized_weight import QuantizedWeight
from dsbd_cli.ops.select import ops_for

OWN_IDS = "each request adds ids of its own"
COMPARED = 1024  # rows of a trimmed LM head that are compared with a table, to tell whether the LM head is a part of it
ROUNDED = 1e-2  # largest relative difference between equal numbers: bfloat16 rounds to 0.4 %


@dataclass(slots=True)
class OwnRows:
    """The whole table that the rows of a trimmed LM head come from.

    Attributes:
        table: [V, H], in any dtype.
        scale: logits are divided by it.
        rows: products with the rows that each batch row has picked.
    """

    table: Tensor
    scale: float
    rows: RowsLinear
    _ids: Tensor | None = field(default=None, init=False)

    @classmethod
    def of(
        cls, rows: Tensor, ids: Tensor, table: Tensor | QuantizedWeight, dtype: torch.dtype, scale: float = 1.0
    ) -> OwnRows | None:
        """Return the whole table if rows [m, H] of a trimmed LM head, for the tokens ids [m] int64, are rows of `table`
        [V, H] over `scale`, except for rounding. Otherwise return None. A quantised table is dequantised.

        At most COMPARED rows, evenly spaced, are compared. dtype: the dtype that products are computed in.
        """
        if rows.shape[1:] != table.shape[1:] or int(ids[-1]) >= len(table):
            return None
        if isinstance(table, QuantizedWeight):
            table = table.plain(dtype)
        some = slice(None, None, -(-len(ids) // COMPARED))
        theirs = table[ids[some].to(table.device)].float() / scale
        if not torch.allclose(rows[some].to(table.device).float(), theirs, rtol=ROUNDED, atol=0):
            return None
        return cls(table, scale, ops_for(table.device, dtype, ("pick",)).pick(table, dtype))

    def compute(self, hidden: Tensor, ids: Tensor) -> Tensor:
        """Return the products [R, n, o] of hidden states [R, n, H] after the final norm with the rows ids [R, o] int64.
        Those of ids past the table mean nothing. Rows are picked once for the same tensor of ids."""
        if ids is not self._ids:
            self.rows.take(ids.clamp(max=len(self.table) - 1))
            self._ids = ids
        logits = self.rows.compute(hidden)
        return logits if self.scale == 1 else logits / self.scale
