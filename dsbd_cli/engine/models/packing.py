"""Linear layers whose weights lie in the order in which a product reads them, so that no call reorders them first.

torch hands a plain weight matrix to oneDNN, which copies it into blocks at every call; for a few tokens that copy costs
as much as the product (docs/experiments.md). Packed once, the same product reads the weights once.

Two ways. Where the processor has AVX-512 (and AVX-512 BF16 for bfloat16), a kernel of our own serves
(packing_kernel.py). Elsewhere, and for bfloat16 on processors with matrix units (AMX), operators of torch serve, which
are not documented. `packing_works` tries the one that serves against a plain product; where neither does, the layers
stay as they are.
"""

from __future__ import annotations

import copy
import ctypes
import functools
import mmap
import zlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from dsbd_cli.engine.models.tail import Kernel, kernels, loadable

__all__ = [
    "PackedLinear",
    "features",
    "fields",
    "offsets",
    "pack",
    "packing_works",
    "plain_linears",
    "room",
    "weight_of",
]

ROWS_HINT = 32  # blocks are chosen for about so many tokens; measured: any hint from 8 to 512 gives the same blocks
LEAST_ROWS = 4  # fewer rows take a slower kernel; measured: 1 row 0.65 ms, 4 rows 0.51 ms for 5632 x 2048 in bfloat16
MIN_FEATURES = 64
COLUMNS = 64  # outputs that our kernels compute at once
# Of our kernels. For more than FEW_ROWS rows a thread works on PIECE lines of weights at a time, which its cache holds.
CHUNK_ROWS, FEW_ROWS, PIECE = 96, 6, 1024
HUGE = 2**21
MULTIPLIED = ("dt_proj",)  # layers whose weights Mamba and Jamba multiply by themselves


def fields(*names: str) -> tuple[tuple[str, type[ctypes.c_int64]], ...]:
    """Of a structure of sizes, addresses and strides in bytes."""
    return tuple((name, ctypes.c_int64) for name in names)


def offsets(kind: type[ctypes.Structure]) -> tuple[int, ...]:
    return tuple(getattr(kind, field[0]).offset for field in kind._fields_)


class Multiply(ctypes.Structure):
    """Arguments of the kernel."""

    _fields_ = fields(
        "taken", "threads", "items", "rows", "chunk", "blocks", "share", "x", "x_row", "weights", "steps", "piece",
        "bias", "out", "out_row", "narrow", "scratch", "scratch_bytes",
    )  # fmt: skip


MULTIPLY = offsets(Multiply)
LAYOUT = zlib.crc32(repr([field[0] for field in Multiply._fields_]).encode())


@functools.cache
def features() -> frozenset[str]:
    """Instructions of this processor, by LLVM's names; none where numba is not installed."""
    try:
        from llvmlite.binding import get_host_cpu_features
    except ImportError:
        return frozenset()
    return frozenset(name for name, has in get_host_cpu_features().items() if has)


@functools.cache
def pairs() -> bool:
    """Whether our kernel multiplies bfloat16 here. Matrix units are faster for long prompts: they are left to torch."""
    return {"avx512f", "avx512bf16"} <= features() and "amx-bf16" not in features()


@functools.cache
def _kernel() -> Kernel:
    (found,) = kernels("packing_kernel", "multiply")
    return found


@functools.cache
def _served(dtype: torch.dtype) -> bool:
    """Whether our kernel serves here."""
    able = pairs() if dtype == torch.bfloat16 else dtype == torch.float32 and "avx512f" in features()
    return able and loadable(_kernel, "torch computes linear layers")


class _Compiled:
    """Weights for our kernel: [blocks, inputs / u, COLUMNS, u], u numbers in four bytes; outputs are filled up."""

    def __init__(self, weight: Tensor) -> None:
        self.outputs, inputs = weight.shape
        unit = weight.element_size()
        self._blocks, self._steps = -(-self.outputs // COLUMNS), inputs * unit // 4
        self._columns = self._blocks * COLUMNS
        weight = nn.functional.pad(weight, (0, 0, 0, self._columns - self.outputs))
        blocks = weight.view(self._blocks, COLUMNS, self._steps, 4 // unit).transpose(1, 2)
        self._weights = room(weight.numel() * unit).view(weight.dtype)
        self._weights.view(blocks.shape).copy_(blocks)

    def bias(self, bias: Tensor | None) -> Tensor | None:
        return None if bias is None else nn.functional.pad(bias.float(), (0, self._columns - self.outputs))

    def __call__(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """x [..., i], bias as `bias` gave it -> [..., o]."""
        assert x.dtype == self._weights.dtype
        flat = x.reshape(-1, x.shape[-1])
        if flat.stride(1) != 1:
            flat = flat.contiguous()
        rows, unit, threads = len(flat), x.element_size(), torch.get_num_threads()
        assert flat.shape[1] * unit == 4 * self._steps
        out = x.new_empty(rows, self._columns)
        chunk, share = max(1, min(rows, CHUNK_ROWS)), max(1, self._blocks // (4 * threads))
        items = -(-self._blocks // share) * -(-rows // chunk)
        scratch = torch.empty(threads, chunk * COLUMNS)
        arguments = Multiply(
            0, 0, items, rows, chunk, self._blocks, share, flat.data_ptr(), flat.stride(0) * unit,
            self._weights.data_ptr(), self._steps, self._steps if rows <= FEW_ROWS else PIECE,
            0 if bias is None else bias.data_ptr(), out.data_ptr(), self._columns * unit, unit == 2,
            scratch.data_ptr(), chunk * COLUMNS * 4,
        )  # fmt: skip
        _kernel()(arguments, rows * self._columns * self._steps, items)
        # rows stay as far apart as they are: torch's functions give numbers by place (vector or rest) other bits
        return out.view(*x.shape[:-1], self._columns)[..., : self.outputs]


class _Torch:
    """Weights for torch's operators. Fewer outputs than MIN_FEATURES are filled up with zeros, which the result leaves
    out: in a product of few columns the bits of a row depend on the other rows."""

    def __init__(self, weight: Tensor) -> None:
        self.outputs = len(weight)
        self._packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(_filled(weight).contiguous(), ROWS_HINT)

    def bias(self, bias: Tensor | None) -> Tensor | None:
        return None if bias is None else _filled(bias)

    def __call__(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """x [..., i], bias as `bias` gave it -> [..., o]."""
        inputs = x.shape[-1]
        rows = x.numel() // inputs
        if rows >= LEAST_ROWS:
            return self._product(x, bias)[..., : self.outputs]
        flat = nn.functional.pad(x.reshape(rows, inputs), (0, 0, 0, LEAST_ROWS - rows))
        return self._product(flat, bias)[:rows, : self.outputs].reshape(*x.shape[:-1], self.outputs)

    def _product(self, x: Tensor, bias: Tensor | None) -> Tensor:
        result: Tensor = torch.ops.mkldnn._linear_pointwise(x, self._packed, bias, "none", [], "")
        return result


def room(size: int) -> Tensor:
    """[size] uint8 in pages of 2 MiB where the system gives them: reading memory in small pages takes longer."""
    if size < HUGE or not hasattr(mmap, "MADV_HUGEPAGE"):
        return torch.empty(size, dtype=torch.uint8)
    taken = mmap.mmap(-1, size + HUGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    taken.madvise(mmap.MADV_HUGEPAGE)
    found = torch.frombuffer(taken, dtype=torch.uint8)
    return found.narrow(0, -found.data_ptr() % HUGE, size)


class PackedLinear(nn.Module):
    """x W^T + b with a packed W. Inference only: the weight is no parameter and has no gradient.

    `weight` tells shape and dtype to models that look at it (T5, Mamba) and holds no numbers: it lies on `meta`.
    """

    def __init__(self, linear: nn.Linear | Conv1D) -> None:
        super().__init__()
        weight = weight_of(linear).detach()
        self.out_features, self.in_features = weight.shape
        whole = self.in_features * weight.element_size() % 4 == 0
        self._product = (_Compiled if whole and _served(weight.dtype) else _Torch)(weight)
        self.weight = torch.empty_like(linear.weight, device="meta", requires_grad=False)
        self.bias: Tensor | None = self._product.bias(None if linear.bias is None else linear.bias.detach())

    def forward(self, x: Tensor) -> Tensor:
        """x [..., in_features] -> [..., out_features]."""
        return self._product(x, self.bias)

    def with_bias(self, bias: Tensor) -> PackedLinear:
        """The same weights with this bias [out_features], which costs nothing on top of the product."""
        other = copy.copy(self)
        other.bias = self._product.bias(bias)
        return other

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}"


def pack(model: nn.Module) -> int:
    """Replace the plain linear layers of a model on the CPU by packed ones, in place; returns how many.

    Each original weight is freed as soon as it is packed, unless something else shares it (tied embeddings).
    """
    found = [item for item in plain_linears(model, least=1) if packing_works(item[2].weight.dtype)]
    for parent, name, child in found:
        setattr(parent, name, PackedLinear(child))
    return len(found)


def plain_linears(model: nn.Module, least: int = MIN_FEATURES) -> Iterator[tuple[nn.Module, str, nn.Linear | Conv1D]]:
    """The linear layers on the CPU that do nothing but x W^T + b, with their parents and names. least: outputs."""
    for parent in model.modules():
        for name, child in parent.named_children():
            if isinstance(child, nn.Linear | Conv1D) and name not in MULTIPLIED and _suits(child, least):
                yield parent, name, child


def weight_of(linear: nn.Linear | Conv1D) -> Tensor:
    """[out, in]; GPT-2's layers hold theirs the other way round."""
    weight: Tensor = linear.weight.t() if isinstance(linear, Conv1D) else linear.weight
    return weight


def _filled(weight: Tensor) -> Tensor:
    """Zeros after the last output, up to MIN_FEATURES."""
    missing = max(0, MIN_FEATURES - weight.shape[0])
    return nn.functional.pad(weight, (*[0] * (2 * weight.dim() - 1), missing)) if missing else weight


def _suits(linear: nn.Linear | Conv1D, least: int) -> bool:
    weight, bias = linear.weight, linear.bias
    hooked = bool(linear._forward_hooks or linear._forward_pre_hooks or hasattr(linear, "_hf_hook"))
    # one with a forward of its own, or with weights that quantised checkpoints keep in a form of theirs
    hooked |= type(linear) not in (nn.Linear, Conv1D) or "forward" in vars(linear)
    hooked |= type(weight.data) is not Tensor
    plain = weight.device.type == "cpu" and not hooked and (bias is None or bias.dtype == weight.dtype)
    outputs, inputs = weight_of(linear).shape
    return plain and weight.is_floating_point() and inputs >= MIN_FEATURES and outputs >= least


@functools.cache
def packing_works(dtype: torch.dtype) -> bool:
    """Whether this build of torch on this processor has the packed product, and it equals the plain one."""
    if dtype not in (torch.float32, torch.bfloat16):
        return False
    if not _served(dtype) and not (
        torch.backends.mkldnn.is_available() and (dtype == torch.float32 or _fast_bfloat16())
    ):
        return False
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(96, 64, generator=generator).to(dtype)
    x, bias = torch.randn(2, 5, 64, generator=generator).to(dtype), torch.randn(96, generator=generator).to(dtype)
    try:
        with torch.inference_mode():
            product = (_Compiled if _served(dtype) else _Torch)(weight)
            ours = product(x, product.bias(bias))
            plain = nn.functional.linear(x, weight, bias)
    except (AttributeError, RuntimeError, NotImplementedError):
        return False
    return ours.shape == plain.shape and torch.allclose(ours, plain, rtol=2e-2, atol=2e-2)


def _fast_bfloat16() -> bool:
    """Whether the processor multiplies bfloat16 itself."""
    check: Any = getattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", None)
    return bool(check is not None and check())
