"""A CPU kernel that selects the candidates of a node. Many candidates are selected by tensor code.

numba, which compiles kernels/candidates.py, is imported at the first call.
"""

from __future__ import annotations

import ctypes
import functools
from collections import namedtuple
from typing import Any

import torch
from torch import Tensor

from dsbd_cli.ops.cpu.runtime import FLOATS, CpuKernel, fields, kernels, layout, offsets
from dsbd_cli.ops.memory import CACHE_LINE

MOST_CANDIDATES = 256  # they are kept in order while they are found, which takes longer than sorting if there are many


class CandidatesArguments(ctypes.Structure):
    """Arguments of the kernel. items: nodes of all requests. row, node: strides of the logits in bytes."""

    _fields_ = fields(
        "taken", "threads", "items", "nodes", "vocabulary", "count", "narrow", "logits", "row", "node",
        "tokens", "best", "highest", "total", "work", "work_bytes",
    )  # fmt: skip


_names = [field[0] for field in CandidatesArguments._fields_]
_Offsets: Any = namedtuple("Offsets", _names)  # type: ignore[misc]
CANDIDATES = _Offsets(*offsets(CandidatesArguments))
LAYOUT = layout(CandidatesArguments)


def candidates(logits: Tensor, count: int) -> tuple[Tensor, Tensor] | None:
    """Return the tokens [R, n, C] int64, ascending, and log-probabilities [R, n, C] float32 of the C = `count` best
    tokens of every node, as `top_candidates` of engine/core/candidates.py does; None where many are wanted or the
    kernel does not read such logits [R, n, V]."""
    if count > MOST_CANDIDATES or logits.dtype not in FLOATS or logits.dim() != 3 or logits.stride(2) != 1:
        return None
    rows, nodes, vocabulary = logits.shape
    tokens = torch.empty(rows, nodes, count, dtype=torch.int64, device="cpu")
    best = torch.empty(rows, nodes, count, dtype=torch.float32, device="cpu")
    highest, total = torch.empty(2, rows, nodes, 1, dtype=torch.float32, device="cpu").unbind(0)
    kernel, size, work = compiled(), logits.element_size(), 4 * rows * nodes * vocabulary
    room = -(-(12 * count + vocabulary) // CACHE_LINE) * CACHE_LINE  # no two threads share a line of the cache
    memory = torch.empty(kernel.threads(work, rows * nodes), room, dtype=torch.uint8, device="cpu")
    arguments = CandidatesArguments(
        0, 0, rows * nodes, nodes, vocabulary, count, logits.dtype == torch.bfloat16,
        logits.data_ptr(), logits.stride(0) * size, logits.stride(1) * size,
        *(tensor.data_ptr() for tensor in (tokens, best, highest, total, memory)), room,
    )  # fmt: skip
    kernel(arguments, work, rows * nodes)
    # in float64, as in logsumexp.py
    return tokens, (best - highest).sub_(total.to(torch.float64).log_().to(torch.float32))


@functools.cache
def compiled() -> CpuKernel:
    """Return the kernel, made at the first call."""
    (kernel,) = kernels("candidates", "candidates")
    return kernel
