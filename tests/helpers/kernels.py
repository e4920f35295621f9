"""Kernels of the CPU, asked for, replaced and taken away."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from dsbd_cli.ops import select
from dsbd_cli.ops.cpu.runtime import unloadable

CPU = torch.device("cpu")


def serves(name: str, dtype: torch.dtype = torch.float32) -> bool:
    """A kernel of numba serves this operation on this processor."""
    return name in select.ops_for(CPU, dtype, (name,)).by("numba")


@contextmanager
def replaced(monkeypatch: pytest.MonkeyPatch, *names: str, **changes: Any) -> Iterator[None]:
    """Something else stands inside for the kernels of these operations: `op`, or what they are loaded with."""
    with monkeypatch.context() as patch:
        for name in names:
            patch.setitem(select.NUMBA, name, select.NUMBA[name]._replace(**changes))
        patch.setattr(select, "_unloadable", functools.cache(unloadable))
        select.ops_for.cache_clear()
        yield
    select.ops_for.cache_clear()


def refuse() -> None:
    """What numba says beside a numpy that it does not know."""
    raise ImportError("Numba needs NumPy 2.4 or less")
