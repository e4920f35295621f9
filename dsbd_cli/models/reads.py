"""Whether operations wait for the device, which a CUDA graph cannot hold (rotary embeddings that change with the
length, experts picked on the host)."""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

__all__ = ["HostReads"]

READS = ("_local_scalar_dense", "nonzero", "masked_select", "is_nonzero", "equal", "unique", "_unique")


class HostReads(TorchDispatchMode):
    """Counts operations that give a number to the host, or whose shape depends on data.

    Attributes:
        counts: by operation; a boolean mask as an index counts too. operations: all that ran.
    """

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()
        self.operations = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.operations += 1
        name = func.overloadpacket.__name__
        boolean_index = name.startswith("index") and any(
            isinstance(item, torch.Tensor) and item.dtype == torch.bool
            for argument in args[1:2]
            if isinstance(argument, list | tuple)
            for item in argument
        )
        if boolean_index or name.startswith(READS):
            self.counts[name] += 1
        return func(*args, **(kwargs or {}))
