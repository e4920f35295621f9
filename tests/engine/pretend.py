"""A second device without a GPU: operations are checked for the devices of their tensors, but nothing is computed.

PyTorch's fake tensors refuse to mix devices and to read numbers. The device is called `meta`; to the code under test it
is any device that is not the CPU.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest.mock import patch

import torch
import torch._functorch.config as functorch_config
from torch._subclasses.fake_tensor import FakeTensorMode

DEVICE = torch.device("meta")


_tensor = torch.tensor


def _made(data: Any, *, dtype: torch.dtype | None = None, device: Any = None) -> torch.Tensor:
    """torch.tensor, which makes no fake tensor by itself where a device is given."""
    if device is None or torch.device(device).type == "cpu":
        return _tensor(data, dtype=dtype)
    made = _tensor(data, dtype=dtype)
    return torch.empty(made.shape, dtype=made.dtype, device=device)


@contextlib.contextmanager
def pretend() -> Iterator[None]:
    """Everything inside makes fake tensors."""
    with (
        functorch_config.patch(fake_tensor_allow_meta=True),
        FakeTensorMode(),
        patch.object(torch, "tensor", _made),
    ):
        yield
