"""Kernels of the CPU, asked for, replaced and taken away."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

from dsbd_cli.ops import select
from dsbd_cli.ops.cpu.runtime import unloadable

CPU = torch.device("cpu")


def serves(name: str, dtype: torch.dtype = torch.float32) -> bool:
    """A kernel of numba serves this operation on this processor."""
    return name in select.ops_for(CPU, dtype, (name,)).by("numba")


@contextmanager
def table(monkeypatch: pytest.MonkeyPatch, kernels: Iterable[select.Kernel]) -> Iterator[None]:
    """These are all kernels of the CPU inside."""
    with monkeypatch.context() as patch:
        patch.setattr(select, "TABLE", tuple(kernels))
        patch.setattr(select, "_unloadable", functools.cache(unloadable))
        forget()
        yield
    forget()


def forget() -> None:
    """What has been chosen is chosen anew."""
    select._missing.cache_clear()
    select.ops_for.cache_clear()


def replaced(monkeypatch: pytest.MonkeyPatch, *names: str, **changes: Any) -> contextlib.AbstractContextManager[None]:
    """Something else stands inside for the kernels of these operations: `op`, or what they are loaded with. No name:
    all."""
    every = not names
    kernels = [kernel._replace(**changes) if every or kernel.name in names else kernel for kernel in select.TABLE]
    return table(monkeypatch, kernels)


def only(
    monkeypatch: pytest.MonkeyPatch, backend: object, weights: str = "plain"
) -> contextlib.AbstractContextManager[None]:
    """No other backend multiplies such weights inside."""
    return table(monkeypatch, [kernel for kernel in select.TABLE if kernel.weights != weights or kernel.op is backend])


def refuse() -> None:
    """What numba says beside a numpy that it does not know."""
    raise ImportError("Numba needs NumPy 2.4 or less")


def packed_words(levels: Tensor) -> Tensor:
    """Words [o, i / 8] of levels [o, i], as FourBit's docstring says."""
    halves = levels.to(torch.int64).unflatten(1, (-1, 2, 4))
    shifts = torch.tensor([[0, 8, 16, 24], [4, 12, 20, 28]])
    words = (halves << shifts).sum((2, 3))
    return torch.where(words >= 1 << 31, words - (1 << 32), words).to(torch.int32)


def int4_parts(product: Any) -> tuple[Tensor, Tensor, Tensor]:
    """The levels [o, i] of weights in groups, and their scales and offsets [o, i / 32], not yet multiplied by a
    factor."""
    blocks, groups, _ = product.weights.shape
    words, *factors = product.weights.split((product.group_bytes - 256, 128, 128), -1)
    words = words.reshape(blocks, groups, -1, 64, 4)
    parts = (words & 15, words >> 4) if words.shape[2] == 4 else (words,)  # of words in four bits, or bytes
    halves = torch.stack(parts, 3)  # [blocks, groups, line, half, column, byte]
    levels = halves.permute(0, 4, 1, 2, 3, 5).reshape(blocks * 64, groups * 32)
    scales, offsets = (part.contiguous().view(torch.float16).mT.reshape(blocks * 64, groups) for part in factors)
    return levels, scales, offsets


def normal(dtype: torch.dtype, *shape: int, seed: int = 0) -> Tensor:
    """Random numbers, which the seed fixes."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)
