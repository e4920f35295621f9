"""A second device without a GPU: operations are checked for the devices of their tensors, but nothing is computed.

The device is called `meta`, whose tensors have shapes and no numbers, so reading one fails; to the code under test it
is any device that is not the CPU. What a GPU would refuse besides is refused here: operations over tensors of two
devices. `one_device` refuses the CPU altogether.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, ClassVar
from unittest.mock import patch

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

DEVICE = torch.device("meta")
COPIES = (torch.ops.aten._to_copy.default, torch.ops.aten.copy_.default)


_tensor = torch.tensor


def _made(data: Any, *, dtype: torch.dtype | None = None, device: Any = None) -> Tensor:
    """torch.tensor, which shows no copy from the host by itself where a device is given."""
    if device is None or torch.device(device).type == "cpu":
        return _tensor(data, dtype=dtype)
    made = _tensor(data, dtype=dtype)
    return torch.empty(made.shape, dtype=made.dtype, device=device)


def tensors(*values: Any) -> Iterator[Tensor]:
    """Those among these arguments, in lists too."""
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from tensors(*value)


def form(value: Any) -> Any:
    """What the shape of a result depends on: equal ones give equal results, because there are no numbers."""
    if isinstance(value, Tensor):
        return value.shape, value.stride(), value.dtype, value.device
    if isinstance(value, list | tuple):
        return tuple(form(item) for item in value)
    return type(value), value


class SameDevice(TorchDispatchMode):
    """Raises where an operation takes tensors of two devices. As on a GPU, a copy may, and any may take single numbers
    of the host. Forms of results are kept: most operations come again and again, and working one out is slow.

    strict: raises where an operation takes or makes any tensor on the CPU.
    """

    forms: ClassVar[dict[Any, Any]] = {}
    strict = False

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Nothing is compiled here, and to keep torch's compiler out costs as much as an operation."""
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func._schema.is_mutable:
            return self._checked(func, args, kwargs)
        key = self.strict, func, form(args), tuple((name, form(value)) for name, value in kwargs.items())
        if key not in self.forms:
            outputs = self._checked(func, args, kwargs)
            parts = outputs if isinstance(outputs, tuple) else (outputs,)
            if all(isinstance(item, Tensor) and item.device == DEVICE for item in parts):
                self.forms[key] = isinstance(outputs, tuple), form(parts)
            return outputs
        several, parts = self.forms[key]
        made = tuple(torch.empty_strided(size, steps, dtype=kind, device=DEVICE) for size, steps, kind, _ in parts)
        return made if several else made[0]

    def _checked(self, func: Any, args: Any, kwargs: Any) -> Any:
        devices = {item.device for item in tensors(*args, *kwargs.values()) if item.device == DEVICE or item.dim()}
        if len(devices) > 1 and func not in COPIES:
            message = f"{func}: expected all tensors to be on the same device, but found {devices}"
            raise RuntimeError(message)
        out = func(*args, **kwargs)
        if self.strict:
            for item in tensors(*args, *kwargs.values(), out):
                assert item.device == DEVICE, f"{func} on {item.device}"
        return out


@contextlib.contextmanager
def pretend() -> Iterator[SameDevice]:
    """Everything inside is checked."""
    with SameDevice() as mode, patch.object(torch, "tensor", _made):
        yield mode


@contextlib.contextmanager
def one_device(mode: SameDevice) -> Iterator[None]:
    """No operation inside takes or makes a tensor on the CPU."""
    with patch.object(mode, "strict", True):
        yield
