"""Linear layers whose weights lie in the order in which a product reads them, so that no call reorders them first.

torch hands a plain weight matrix to oneDNN, which copies it into blocks at every call; for a few tokens that copy costs
as much as the product (benchmarks/LOG.md). Packed once, the same product reads the weights once.

Two ways. Where the processor has AVX-512, a kernel of our own serves (packing_kernel.py). Elsewhere, and for bfloat16
on processors with matrix units (AMX), operators of torch serve, which are not documented. `packing_works` tries the one
that serves against a plain product; where neither does, the layers stay as they are.
"""

from __future__ import annotations

import copy
import ctypes
import functools
import zlib
from collections.abc import Collection, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from dsbd_cli.engine.models.native import (
    PRODUCT,
    Kernel,
    features,
    fields,
    kernels,
    loadable,
    offsets,
    on_amd,
    room,
    team,
)

__all__ = [
    "PackedLinear",
    "Parts",
    "Product",
    "bfloat16_tile",
    "lines",
    "pack",
    "packing_works",
    "plain_linears",
    "weight_of",
    "whole",
]

ROWS_HINT = 32  # blocks are chosen for about so many tokens; measured: any hint from 8 to 512 gives the same blocks
LEAST_ROWS = 4  # fewer rows take a slower kernel; measured: 1 row 0.65 ms, 4 rows 0.51 ms for 5632 x 2048 in bfloat16
MIN_FEATURES = 64
COLUMNS = 64  # outputs that our kernels compute at once
# Of our kernels. For more than FEW_ROWS rows a thread works on PIECE lines of weights at a time, which its cache holds.
CHUNK_ROWS, FEW_ROWS, PIECE = 96, 5, 1024
MULTIPLIED = ("dt_proj",)  # layers whose weights Mamba and Jamba multiply by themselves


class Multiply(ctypes.Structure):
    """Arguments of the kernel."""

    _fields_ = fields(
        *PRODUCT, "x", "x_row", "weights", "steps", "piece", "bias", "out", "out_row", "narrow",
    )  # fmt: skip


MULTIPLY = offsets(Multiply)
LAYOUT = zlib.crc32(repr([COLUMNS, MULTIPLY, [field[0] for field in Multiply._fields_]]).encode())


@functools.cache
def bfloat16_tile() -> str | None:
    """The tile of lanes.py that multiplies bfloat16 here. None: torch does. Matrix units are faster for long prompts.

    AVX-512 BF16 multiplies pairs. An Emerald Rapids does that at half its rate of float32. So on other processors than
    AMD's, and where the instruction is missing, each number is made float32 first.
    """
    if "avx512f" not in features() or "amx-bf16" in features():
        return None
    return "bfloat16" if "avx512bf16" in features() and on_amd() else "widened"


@functools.cache
def _kernel() -> Kernel:
    (found,) = kernels("packing_kernel", "multiply")
    return found


@functools.cache
def _loads() -> bool:
    return team() is not None and loadable(_kernel, "torch computes linear layers")


class Parts(NamedTuple):
    """How a product of so many rows and blocks of outputs is shared out.

    chunk: rows that a thread works on at once; share: blocks; items: parts that threads take; piece: lines of weights
    between two stores of the sums; sums: numbers that the threads need room for, [threads, lines, COLUMNS] float32.
    """

    rows: int
    blocks: int
    chunk: int
    share: int
    items: int
    piece: int
    sums: tuple[int, int, int]

    @staticmethod
    def of(rows: int, blocks: int, lines: int, kinds: int = 1) -> Parts:
        """kinds: of sums."""
        return _parts(rows, blocks, lines, kinds, torch.get_num_threads())

    def room(self) -> Tensor:
        """For the sums."""
        return torch.empty(self.sums, dtype=torch.float32, device="cpu")

    def arguments(self, room: Tensor) -> tuple[int, ...]:
        """PRODUCT."""
        sums = room.data_ptr(), self.sums[1] * COLUMNS * 4
        return 0, 0, self.items, self.rows, self.chunk, self.blocks, self.share, *sums


@functools.lru_cache(1024)
def _parts(rows: int, blocks: int, lines: int, kinds: int, threads: int) -> Parts:
    chunk, share = max(1, min(rows, CHUNK_ROWS)), max(1, blocks // (4 * threads))
    items, piece = -(-blocks // share) * -(-rows // chunk), lines if rows <= FEW_ROWS else PIECE
    return Parts(rows, blocks, chunk, share, items, piece, (threads, kinds * chunk, COLUMNS))


def lines(weight: Tensor) -> Tensor:
    """Weights [o, i] as the kernels read them: [blocks, i / u, COLUMNS] of int32, which hold u numbers each. Outputs
    are filled up to a multiple of COLUMNS with zeros."""
    words = _filled(weight, COLUMNS).contiguous().view(torch.int32)
    blocks, steps = len(words) // COLUMNS, words.shape[1]
    made = room(words.numel() * 4).view(torch.int32).view(blocks, steps, COLUMNS)
    return made.copy_(words.view(blocks, COLUMNS, steps).transpose(1, 2))


class _Compiled:
    """Weights for our kernel."""

    def __init__(self, weight: Tensor) -> None:
        self.outputs, self.dtype, self._unit = len(weight), weight.dtype, weight.element_size()
        self.weights = lines(weight)
        self._blocks, self._steps, _ = self.weights.shape

    def bias(self, bias: Tensor) -> Tensor:
        return _filled(bias.float(), COLUMNS)

    def __call__(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """x [..., i], bias as `bias` gave it -> [..., o]."""
        unit, inputs, blocks, steps = self._unit, x.shape[-1], self._blocks, self._steps
        columns = blocks * COLUMNS
        assert x.dtype == self.dtype
        assert x.is_cpu
        assert inputs * unit == 4 * steps
        flat = x.reshape(-1, inputs)
        row, step = flat.stride()
        if step != 1:
            flat, row = flat.contiguous(), inputs
        rows = flat.shape[0]
        out = x.new_empty((*x.shape[:-1], columns))
        parts = Parts.of(rows, blocks, steps)
        sums = parts.room()
        arguments = Multiply(
            *parts.arguments(sums), flat.data_ptr(), row * unit, self.weights.data_ptr(), steps, parts.piece,
            0 if bias is None else bias.data_ptr(), out.data_ptr(), columns * unit, unit == 2,
        )  # fmt: skip
        _kernel()(arguments, rows * columns * steps, parts.items)
        # rows stay as far apart as they are: torch's functions give numbers by place (vector or rest) other bits
        return out if columns == self.outputs else out[..., : self.outputs]


class _Torch:
    """Weights for torch's operators. Fewer outputs than MIN_FEATURES are filled up with zeros, which the result leaves
    out: in a product of few columns the bits of a row depend on the other rows."""

    def __init__(self, weight: Tensor) -> None:
        self.outputs = len(weight)
        filled = _filled(weight, MIN_FEATURES) if len(weight) < MIN_FEATURES else weight
        self.weights: Tensor = torch.ops.mkldnn._reorder_linear_weight(filled.contiguous(), ROWS_HINT)

    def bias(self, bias: Tensor) -> Tensor:
        return _filled(bias, MIN_FEATURES) if len(bias) < MIN_FEATURES else bias

    def __call__(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """x [..., i], bias as `bias` gave it -> [..., o]."""
        inputs = x.shape[-1]
        rows = x.numel() // inputs
        if rows >= LEAST_ROWS:
            return self._product(x, bias)[..., : self.outputs]
        flat = nn.functional.pad(x.reshape(rows, inputs), (0, 0, 0, LEAST_ROWS - rows))
        return self._product(flat, bias)[:rows, : self.outputs].reshape(*x.shape[:-1], self.outputs)

    def _product(self, x: Tensor, bias: Tensor | None) -> Tensor:
        result: Tensor = torch.ops.mkldnn._linear_pointwise(x, self.weights, bias, "none", [], "")
        return result


class Product:
    """Layers that are handed the same tensor (query, key and value), as one product.

    Attributes:
        parts: outputs of each layer.
    """

    parts: list[int]
    _kept: tuple[Tensor, Tensor, int] | None = None  # input, result, and how many layers have not asked for it

    def compute(self, x: Tensor) -> Tensor:
        """x [..., i] -> [..., o], the outputs of all layers side by side."""
        raise NotImplementedError

    def of(self, x: Tensor) -> Tensor:
        """As `compute`, once for one tensor: it is kept until each layer has asked."""
        if len(self.parts) == 1:
            return self.compute(x)
        kept = self._kept  # read once: another thread may change it
        result, left = (self.compute(x), len(self.parts)) if kept is None or kept[0] is not x else kept[1:]
        self._kept = (x, result, left - 1) if left > 1 else None
        return result


class PackedProduct(Product):
    """Of packed weights."""

    def __init__(self, linears: Sequence[nn.Linear | Conv1D]) -> None:
        weights = [weight_of(linear).detach() for linear in linears]
        self.parts = [len(weight) for weight in weights]
        weight = weights[0] if len(weights) == 1 else torch.cat(weights)
        del weights
        way = _way(weight)
        assert way is not None
        self._way = way(weight)
        self.compiled = way is _Compiled
        self._bias: Tensor | None = None
        if any(linear.bias is not None for linear in linears):
            missing = (weight.new_zeros(part) for part in self.parts)
            biases = [gap if one.bias is None else one.bias.detach() for one, gap in zip(linears, missing, strict=True)]
            self.set_bias(torch.cat(biases))

    @property
    def weights(self) -> Tensor:
        """As they are stored."""
        return self._way.weights

    def set_bias(self, bias: Tensor) -> None:
        """bias [o]."""
        self._bias = self._way.bias(bias)

    def compute(self, x: Tensor) -> Tensor:
        return self._way(x, self._bias)


class PackedLinear(nn.Module):
    """x W^T + b with a packed W: a product, or a part of one. Inference only: the weight is no parameter and has no
    gradient.

    `weight` tells shape and dtype to models that look at it (T5, Mamba) and holds no numbers: it lies on `meta`.
    """

    def __init__(self, linear: nn.Linear | Conv1D, product: PackedProduct | None = None, part: int = 0) -> None:
        super().__init__()
        self.out_features, self.in_features = weight_of(linear).shape
        self.product = product or PackedProduct([linear])
        self._first = sum(self.product.parts[:part])
        self.weight = torch.empty_like(linear.weight, device="meta", requires_grad=False)
        self.bias: Tensor | None = None if linear.bias is None else linear.bias.detach()

    @property
    def packed(self) -> Tensor:
        """The weights of the whole product as they are stored."""
        return self.product.weights

    @property
    def compiled(self) -> bool:
        """Whether a kernel of our own computes it."""
        return self.product.compiled

    def forward(self, x: Tensor) -> Tensor:
        """x [..., in_features] -> [..., out_features]."""
        result = self.product.of(x)
        if len(self.product.parts) == 1:
            return result
        # rows stay as far apart as they are, as in _Compiled
        return result.narrow(-1, self._first, self.out_features)

    def with_bias(self, bias: Tensor) -> PackedLinear:
        """The same weights with this bias [out_features], which costs nothing on top of the product. Of a whole
        product."""
        assert len(self.product.parts) == 1
        other = copy.copy(self)
        other.bias, other.product = bias, copy.copy(self.product)
        other.product.set_bias(bias)
        return other

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}"


def whole(layers: Sequence[Any]) -> Product | None:
    """The product whose parts these layers are, in its order; None where they are no such."""
    product: Product | None = getattr(layers[0], "product", None)
    if product is None or any(getattr(layer, "product", None) is not product for layer in layers):
        return None
    return product if [layer.out_features for layer in layers] == product.parts else None


def pack(model: nn.Module, joined: Collection[tuple[nn.Module, Sequence[str]]] = ()) -> int:
    """Replace the plain linear layers of a model on the CPU by packed ones, in place; returns how many.

    joined: modules, and the names of their layers that are handed one tensor: these become one product. Each original
    weight is freed as soon as it is packed, unless something else shares it (tied embeddings).
    """
    # small ones too: rows of torch's own products depend on each other
    found = [(parent, name) for parent, name, child in plain_linears(model, 1, 1) if _way(weight_of(child))]
    together = [[(parent, name) for name in names] for parent, names in joined]
    groups = [group for group in together if {*found}.issuperset(group) and _alike(group)]
    grouped = {place for group in groups for place in group}
    for group in [*groups, *([place] for place in found if place not in grouped)]:
        layers = [getattr(parent, name) for parent, name in group]
        product = PackedProduct(layers)
        for part, ((parent, name), layer) in enumerate(zip(group, layers, strict=True)):
            setattr(parent, name, PackedLinear(layer, product, part))
        del layers, layer
    return len(found)


def _alike(group: Sequence[tuple[nn.Module, str]]) -> bool:
    """Layers of one dtype and width of inputs."""
    layers = [weight_of(getattr(parent, name)) for parent, name in group]
    return len({(weight.dtype, weight.shape[1]) for weight in layers}) == 1


def plain_linears(
    model: nn.Module, least: int = MIN_FEATURES, inputs: int = MIN_FEATURES
) -> Iterator[tuple[nn.Module, str, nn.Linear | Conv1D]]:
    """The linear layers on the CPU that do nothing but x W^T + b, with their parents and names. least, inputs: fewest
    outputs and inputs."""
    for parent in model.modules():
        for name, child in parent.named_children():
            if isinstance(child, nn.Linear | Conv1D) and name not in MULTIPLIED and _suits(child, least, inputs):
                yield parent, name, child


def weight_of(linear: nn.Linear | Conv1D) -> Tensor:
    """[out, in]; GPT-2's layers hold theirs the other way round."""
    weight: Tensor = linear.weight.t() if isinstance(linear, Conv1D) else linear.weight
    return weight


def _filled(weight: Tensor, multiple: int) -> Tensor:
    """Zeros after the last output, up to a multiple of so many."""
    missing = -weight.shape[0] % multiple
    return nn.functional.pad(weight, (*[0] * (2 * weight.dim() - 1), missing)) if missing else weight


def _suits(linear: nn.Linear | Conv1D, least: int, fewest: int) -> bool:
    weight, bias = linear.weight, linear.bias
    hooked = bool(linear._forward_hooks or linear._forward_pre_hooks or hasattr(linear, "_hf_hook"))
    # one with a forward of its own, or with weights that quantised checkpoints keep in a form of theirs
    hooked |= type(linear) not in (nn.Linear, Conv1D) or "forward" in vars(linear)
    hooked |= type(weight.data) is not Tensor
    plain = weight.device.type == "cpu" and not hooked and (bias is None or bias.dtype == weight.dtype)
    outputs, inputs = weight_of(linear).shape
    return plain and weight.is_floating_point() and inputs >= fewest and outputs >= least


def _way(weight: Tensor) -> type[_Compiled] | type[_Torch] | None:
    """What serves for such a weight [o, i] here; None where nothing does."""
    dtype = weight.dtype
    if weight.shape[1] * weight.element_size() % 4 == 0 and _works(_Compiled, dtype):
        return _Compiled
    return _Torch if _works(_Torch, dtype) else None


def packing_works(dtype: torch.dtype) -> bool:
    """Whether this build of torch on this processor has a packed product that equals the plain one."""
    return _works(_Compiled, dtype) or _works(_Torch, dtype)


def _able(way: type[_Compiled] | type[_Torch], dtype: torch.dtype) -> bool:
    if dtype not in (torch.float32, torch.bfloat16):
        return False
    if way is _Torch:
        return torch.backends.mkldnn.is_available() and (dtype == torch.float32 or _fast_bfloat16())
    return (bool(bfloat16_tile()) if dtype == torch.bfloat16 else "avx512f" in features()) and _loads()


@functools.cache
def _works(way: type[_Compiled] | type[_Torch], dtype: torch.dtype) -> bool:
    """Whether it serves here, and gives the plain product."""
    if not _able(way, dtype):
        return False
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(96, 64, generator=generator).to(dtype)
    x, bias = torch.randn(2, 5, 64, generator=generator).to(dtype), torch.randn(96, generator=generator).to(dtype)
    try:
        with torch.inference_mode():
            product = way(weight)
            ours = product(x, product.bias(bias))
            plain = nn.functional.linear(x, weight, bias)
    except (AttributeError, RuntimeError, NotImplementedError):
        return False
    return ours.shape == plain.shape and torch.allclose(ours, plain, rtol=2e-2, atol=2e-2)


def _fast_bfloat16() -> bool:
    """Whether the processor multiplies bfloat16 itself."""
    check: Any = getattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", None)
    return bool(check is not None and check())
