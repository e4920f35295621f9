"""Count operations that wait for the device, which a CUDA graph cannot hold (rotary embeddings that change with the
length, experts picked on the host)."""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

READS = ("_local_scalar_dense", "nonzero", "masked_select", "is_nonzero", "equal", "unique", "_unique")
COPIES = ("_to_copy", "copy_")


class HostReadCounter(TorchDispatchMode):
    """A mode that counts operations that give a number to the host, or whose shape depends on data.

    Attributes:
        counts: by operation; a boolean mask as an index counts too. operations: number of all operations that ran.
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
        out = func(*args, **(kwargs or {}))
        if boolean_index or name.startswith(READS) or (name in COPIES and _to_host(args, out)):
            self.counts[name] += 1
        return out


def _to_host(args: Any, out: Any) -> bool:
    """Return whether an operation has copied a tensor from another device to the CPU."""
    tensors = [item for item in args if isinstance(item, torch.Tensor)]
    return out.device.type == "cpu" and any(item.device.type != "cpu" for item in tensors)
