"""Linear layers that read their weights from memory once per call and do not reorder them first.

torch hands a plain weight matrix to oneDNN, which copies it into blocks at every call; for a few tokens that copy costs
as much as the product (benchmarks/LOG.md).

There are two ways. On x86 with AVX2 our own kernel serves (kernels/linear.py). Weights are packed once,
as *lines* (kernels/simd.py), in the order in which the kernel reads them. Matrix units need no such copy: they read
rows of bfloat16 as a checkpoint has them, from its memory-mapped file. Elsewhere operators of torch serve, which pack,
too, and are not documented. ops/select.py compares both ways with a plain product. Where neither serves, the layers
stay as they are.
"""

from __future__ import annotations

import copy
import ctypes
import functools
from collections.abc import Sequence, Sized
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from dsbd_cli.ops import recording
from dsbd_cli.ops.cpu.runtime import (
    FLOATS,
    PRODUCT,
    CpuKernel,
    fields,
    flattened,
    kernels,
    layout,
    offsets,
)
from dsbd_cli.ops.memory import allocate_weights
from dsbd_cli.ops.processor import Processor, bfloat16_tile, current, on_amd
from dsbd_cli.ops.reference import OUTPUTS_STEP, Routes

ROWS_HINT = 32  # tokens for which torch chooses its blocks; measured: any hint from 8 to 512 gives the same blocks
LEAST_ROWS = 4  # fewer rows take torch longer; measured: 1 row 0.65 ms, 4 rows 0.51 ms for 5632 x 2048 in bfloat16
MIN_FEATURES = 64
NOTHING_PACKS = "nothing packs weights"
COLUMNS = OUTPUTS_STEP
EXPERT_ITEMS = 8  # parts of a product with experts that each thread takes, about
# For matrix units. They multiply SIDES rows, of SIDES words each, at once. For up to ROWS_AT_ONCE rows of x, weights
# that are stored in rows are read from memory once. For more, a thread turns a piece of them into lines, which its
# cache holds. SPARE_LINES: lines between the sums of a thread and its room (see `Parts.of`).
SIDES, ROWS_AT_ONCE, SPARE_LINES = 16, 64, 32
# For our kernels. A thread works on up to CHUNK_ROWS rows of x at once. For more than FEW_ROWS rows it works on PIECE
# lines of weights at a time, which its cache holds.
CHUNK_ROWS, FEW_ROWS, PIECE = 96, 5, 1024
# On AMD's processors so many rows take fewer lines: the first cache holds them while the next ones are prefetched.
SHORT_ROWS, SHORT_PIECE = range(7, 41), 64
MATRIX_CHUNK_ROWS = 512  # in place of CHUNK_ROWS with matrix units; measured: 256 rows take 4 to 8 % longer


class LinearArguments(ctypes.Structure):
    """Arguments of the kernel `multiply`."""

    _fields_ = fields(
        *PRODUCT, "x", "x_row", "weights", "steps", "piece", "in_rows", "room", "bias", "out", "out_row", "narrow",
    )  # fmt: skip


class PackArguments(ctypes.Structure):
    """Arguments of the kernel `pack_rows`. rows: the address of an array of row addresses."""

    _fields_ = fields("taken", "threads", "items", "rows", "steps", "out")


MULTIPLY, PACK = offsets(LinearArguments), offsets(PackArguments)
LAYOUT = layout(LinearArguments, PackArguments, constants=(COLUMNS,))


@functools.cache
def compiled() -> list[CpuKernel]:
    """Return the kernels, made at the first call."""
    return kernels("linear", "multiply", "pack_rows")


class Parts(NamedTuple):
    """The division of a product of `rows` rows of x and `blocks` blocks of outputs among threads.

    items: parts that threads take, of up to `chunk` rows and `share` blocks each. piece: lines of weights between two
    stores of the sums. sums: the shape of the memory for the sums of all threads, [threads, lines, COLUMNS] float32.
    routes: which expert each row has, whose `blocks` blocks it is multiplied by; None: each row has all blocks.
    """

    rows: int
    blocks: int
    chunk: int
    share: int
    items: int
    piece: int
    sums: tuple[int, int, int]
    routes: Routes | None = None

    @staticmethod
    def of(rows: int, blocks: int, lines: int, kinds: int = 1, room: int = 0, routes: Routes | None = None) -> Parts:
        """Divide a product. blocks: of all experts. lines: of weights per block. kinds: sums per output. room: more
        lines for each thread."""
        threads = torch.get_num_threads()
        if routes is None:
            return _parts(rows, blocks, lines, kinds, room, threads)
        own, active = blocks // routes.experts, min(rows, routes.experts)
        share = min(max(1, own * active // (EXPERT_ITEMS * threads)), own)
        piece = _parts(-(-rows // active), own, lines, kinds, room, threads).piece
        made = _parts(rows, own, lines, kinds, room, threads)
        return made._replace(share=share, items=-(-own // share) * active, piece=piece, routes=routes)

    def scratch(self) -> Tensor:
        """Return memory for the sums."""
        return recording.empty(*self.sums, dtype=torch.float32)

    def arguments(self, scratch: Tensor) -> tuple[int, ...]:
        """Return the values of the fields PRODUCT. scratch: memory for the sums."""
        sums = scratch.data_ptr(), self.sums[1] * COLUMNS * 4
        routes = 0 if self.routes is None else self.routes.table.data_ptr()
        return 0, 0, self.items, self.rows, self.chunk, self.blocks, self.share, *sums, routes


@functools.lru_cache(1024)
def _parts(rows: int, blocks: int, lines: int, kinds: int, room: int, threads: int) -> Parts:
    most = MATRIX_CHUNK_ROWS if current() == Processor.AMX else CHUNK_ROWS
    chunk, share = max(1, min(rows, most)), max(1, blocks // (4 * threads))
    items, piece = -(-blocks // share) * -(-rows // chunk), lines if rows <= FEW_ROWS else PIECE
    if current() < Processor.AVX512:
        piece = SHORT_PIECE if rows > 1 else lines  # several rows read each line strip by strip
    elif on_amd() and rows in SHORT_ROWS:
        piece = SHORT_PIECE
    return Parts(rows, blocks, chunk, share, items, piece, (threads, kinds * chunk + room, COLUMNS))


def lines(weights: Sequence[Tensor]) -> Tensor:
    """Return weights, one below the other, as the lines that the kernels read: [blocks, i / u, COLUMNS] int32, which
    hold u numbers each.

    weights: [o, i] each, of one dtype and width. Outputs are filled up with zeros to a multiple of COLUMNS. Each weight
    is read once, from wherever it is stored.
    """
    rows, owners = row_addresses(weights)
    made = _lines(rows, sum(map(len, weights)), weights[0])
    del owners
    return made


def picked_lines(table: Tensor, ids: Tensor, out: Tensor | None = None) -> Tensor:
    """Return the rows ids [o] int64 of a table [V, i] as lines. out: lines of as many rows, which are overwritten."""
    rows = ids * (table.stride(0) * table.element_size()) + table.data_ptr()
    return _lines(_filled(rows, COLUMNS), len(ids), table, out)


def _lines(rows: Tensor, count: int, like: Tensor, out: Tensor | None = None) -> Tensor:
    """Return the rows at the addresses `rows` [o] int64 as lines. Only the first `count` are real; rows of zeros take
    the place of the others. like: [., i], a tensor of the same dtype and width. out: as in `picked_lines`."""
    steps, zeros = like.shape[1] * like.element_size() // 4, torch.zeros_like(like[0]).contiguous()
    rows[count:] = zeros.data_ptr()
    made = allocate_weights(len(rows) * steps * 4).view(torch.int32) if out is None else out
    made = made.view(len(rows) // COLUMNS, steps, COLUMNS)
    compiled()[1](PackArguments(0, 0, len(made), rows.data_ptr(), steps, made.data_ptr()), made.numel(), len(made))
    return made


def readable_in_groups(weights: Sequence[Tensor]) -> bool:
    """Return whether weights [o, i] can be read in groups of SIDES rows: all rows of a group belong to one weight and
    are equally far apart, and a row consists of whole groups of SIDES words."""
    wide = weights[0].shape[1] * weights[0].element_size() % (4 * SIDES) == 0
    return wide and all(len(weight) % SIDES == 0 and weight.stride(1) == 1 for weight in weights)


def row_groups(weights: Sequence[Tensor]) -> tuple[Tensor, list[Tensor]]:
    """Return the address of each group of SIDES rows of weights [o, i] and the bytes between its rows, [groups, 2]
    int64, and the tensors that the addresses point into. Rows of zeros fill up the last COLUMNS rows."""
    assert all(weight.is_cpu for weight in weights)
    groups, owners = list[Tensor](), [*weights]
    for weight in weights:
        row = weight.stride(0) * weight.element_size()
        begin = torch.arange(0, len(weight), SIDES) * row + weight.data_ptr()
        groups.append(torch.stack([begin, torch.full_like(begin, row)], 1))
    if missing := -sum(map(len, groups)) % (COLUMNS // SIDES):
        owners.append(torch.zeros_like(weights[0][0]))
        groups.append(torch.tensor([[owners[-1].data_ptr(), 0]]).expand(missing, 2))
    return torch.cat(groups), owners


def row_addresses(weights: Sequence[Tensor]) -> tuple[Tensor, list[Tensor]]:
    """Return the addresses [o] int64 of the rows of all weights, filled up with 0 to a multiple of COLUMNS, and the
    tensors that they point into."""
    owners = [weight if weight.stride(1) == 1 else weight.contiguous() for weight in weights]
    assert all(weight.is_cpu for weight in owners)
    addresses = [
        torch.arange(len(weight)) * (weight.stride(0) * weight.element_size()) + weight.data_ptr() for weight in owners
    ]
    return _filled(torch.cat(addresses), COLUMNS), owners


class CompiledLinear:
    """Weights for our kernel: lines, or the rows of the given tensors, which must not change."""

    @staticmethod
    def fits(weight: Tensor) -> bool:
        """Return whether a row of the weights [o, i] fills whole words of four bytes."""
        return weight.shape[1] * weight.element_size() % 4 == 0

    def __init__(self, weights: Sequence[Tensor], picked: Tensor | None = None, *, experts: bool = False) -> None:
        """weights: [o, i] of each layer. picked: [o] int64, rows of the only weight; None: all rows of all weights.
        experts: rows will have experts."""
        like, self.dtype = weights[0], weights[0].dtype
        self.outputs = sum(map(len, weights)) if picked is None else len(picked)
        self._unit = like.element_size()
        self._steps = like.shape[1] * self._unit // 4
        in_groups = picked is None and not experts and self._unit == 2 and bfloat16_tile() == "amx"
        self._in_rows = in_groups and readable_in_groups(weights)
        if self._in_rows:
            self._places, self.weights = row_groups(weights)
        else:
            self._places = lines(weights) if picked is None else picked_lines(like, picked)
            self.weights = [self._places]
        self._blocks = -(-self.outputs // COLUMNS)

    def bias(self, bias: Tensor) -> Tensor:
        return _filled(bias.float(), COLUMNS)

    def _room_lines(self, rows: int) -> int:
        """Return how many lines a thread needs beside its sums: for transposed rows of x, or a piece of the weights."""
        if not self._in_rows:
            return 0
        return SPARE_LINES + (-(-rows // SIDES) * -(-self._steps * SIDES // COLUMNS) if rows <= ROWS_AT_ONCE else PIECE)

    def __call__(self, x: Tensor, bias: Tensor | None, routes: Routes | None = None) -> Tensor:
        """Compute the product: x [..., i] -> [..., o]. bias: as `bias` returned it. routes: the expert of each row,
        whose outputs alone are computed."""
        unit, steps = self._unit, self._steps
        columns = self._blocks * COLUMNS // (1 if routes is None else routes.experts)
        assert x.dtype == self.dtype
        assert x.shape[-1] * unit == 4 * steps
        flat, rows, row = flattened(x)
        out = recording.empty(*x.shape[:-1], columns, dtype=x.dtype)
        room = self._room_lines(rows)
        parts = Parts.of(rows, self._blocks, steps, room=room, routes=routes)
        sums = parts.scratch()
        arguments = LinearArguments(
            *parts.arguments(sums), flat.data_ptr(), row * unit, self._places.data_ptr(), steps, parts.piece,
            self._in_rows, (parts.sums[1] - room + SPARE_LINES) * COLUMNS * 4, 0 if bias is None else bias.data_ptr(),
            out.data_ptr(), columns * unit, unit == 2,
        )  # fmt: skip
        recording.launch(compiled()[0], arguments, rows * columns * x.shape[-1], parts.items)
        # gaps between rows stay: torch's functions give a number other bits behind the last whole vector of a tensor
        return out if routes is not None or columns == self.outputs else out[..., : self.outputs]


class TorchLinear:
    """Weights for torch's operators. Fewer outputs than MIN_FEATURES are filled up with zeros, which the result leaves
    out, because in a narrower product the bits of a row depend on the other rows."""

    @staticmethod
    def fits_dtype(dtype: torch.dtype) -> bool:
        """Return whether torch has packed products, and for bfloat16 whether the processor multiplies it itself."""
        if not torch.backends.mkldnn.is_available():
            return False
        check: Any = getattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", None)
        return dtype == torch.float32 or bool(check is not None and check())

    @staticmethod
    def fits(weight: Tensor) -> bool:
        """Return True: all weights [o, i] can be packed."""
        return True

    def __init__(self, weights: Sequence[Tensor]) -> None:
        weight = weights[0] if len(weights) == 1 else torch.cat([*weights])
        self.outputs = len(weight)
        filled = _filled(weight, MIN_FEATURES) if len(weight) < MIN_FEATURES else weight
        self.weights: list[Tensor] = [torch.ops.mkldnn._reorder_linear_weight(filled.contiguous(), ROWS_HINT)]

    def bias(self, bias: Tensor) -> Tensor:
        return _filled(bias, MIN_FEATURES) if len(bias) < MIN_FEATURES else bias

    def __call__(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """Compute the product: x [..., i] -> [..., o]. bias: as `bias` returned it."""
        return recording.compute(lambda: self._padded(x, bias))

    def _padded(self, x: Tensor, bias: Tensor | None) -> Tensor:
        inputs = x.shape[-1]
        rows = x.numel() // inputs
        if rows >= LEAST_ROWS:
            return self._product(x, bias)[..., : self.outputs]
        flat = nn.functional.pad(x.reshape(rows, inputs), (0, 0, 0, LEAST_ROWS - rows))
        return self._product(flat, bias)[:rows, : self.outputs].reshape(*x.shape[:-1], self.outputs)

    def _product(self, x: Tensor, bias: Tensor | None) -> Tensor:
        result: Tensor = torch.ops.mkldnn._linear_pointwise(x, self.weights[0], bias, "none", [], "")
        return result


def joined_bias(weights: Sequence[Sized], biases: Sequence[Tensor | None], dtype: torch.dtype) -> Tensor:
    """Return the biases of layers with weights [o, i] as one. Zeros take the place of those that are None."""
    pairs = zip(weights, biases, strict=True)
    parts = [torch.zeros(len(weight), dtype=dtype) if bias is None else bias.to(dtype) for weight, bias in pairs]
    return torch.cat(parts)


class PackedProduct:
    """A product with packed weights, of layers that have the same input (query, key and value).

    Attributes:
        parts: number of outputs of each layer.
        compiled: whether our kernel computes it.
    """

    def __init__(
        self,
        weights: Sequence[Tensor],
        biases: Sequence[Tensor | None],
        backend: type[CompiledLinear] | type[TorchLinear],
        experts: int = 1,
    ) -> None:
        """weights: [o, i] of each layer, of one dtype. biases: [o] or None of each. backend: computes the product.
        experts: of a mixture, which CompiledLinear alone serves."""
        self.parts = [len(weight) for weight in weights]
        self._backend = CompiledLinear(weights, experts=True) if experts > 1 else backend(weights)
        self.compiled = backend is CompiledLinear
        self._bias: Tensor | None = None
        if any(bias is not None for bias in biases):
            self._bias = self._backend.bias(joined_bias(weights, biases, weights[0].dtype))

    @property
    def weights(self) -> list[Tensor]:
        """The weights as they are stored."""
        return self._backend.weights

    def with_bias(self, bias: Tensor) -> PackedProduct:
        """Return the product of the same weights with a bias [o]."""
        other = copy.copy(self)
        other._bias = self._backend.bias(bias)
        return other

    def compute(self, x: Tensor) -> Tensor:
        """Compute the product: x [..., i] -> [..., o], with the outputs of all layers side by side."""
        return self._backend(x, self._bias)

    def compute_routed(self, x: Tensor, routes: Routes) -> Tensor:
        """Compute the products of rows x [r, i], each with the weights of its expert, [r, o / experts]."""
        assert isinstance(self._backend, CompiledLinear)
        return self._backend(x, self._bias, routes)


class CompiledPickedRows:
    """Products of each row of a batch with its own rows of a table [V, i]."""

    def __init__(self, table: Tensor) -> None:
        self._table = table
        self._products: list[CompiledLinear] = []

    def take(self, ids: Tensor) -> None:
        """Use the rows ids [R, o] int64 of the table as weights from now on."""
        if [product.outputs for product in self._products] != [ids.shape[1]] * len(ids):
            self._products = [CompiledLinear([self._table], some) for some in ids]
            return
        for product, some in zip(self._products, ids, strict=True):
            picked_lines(self._table, some, product.weights[0])

    def compute(self, x: Tensor) -> Tensor:
        """Compute the products: x [R, n, i] -> [R, n, o]."""
        results = [product(part, None) for product, part in zip(self._products, x.split(1), strict=True)]
        return results[0] if len(results) == 1 else torch.cat(results)


def _filled(weight: Tensor, multiple: int) -> Tensor:
    """Append zeros after the last output, up to a multiple of `multiple`."""
    missing = -weight.shape[0] % multiple
    return nn.functional.pad(weight, (*[0] * (2 * weight.dim() - 1), missing)) if missing else weight


def fault(backend: type[CompiledLinear] | type[TorchLinear], dtype: torch.dtype) -> str | None:
    """Return what is wrong with the packed products of a backend; None where they are the plain ones."""
    if dtype not in FLOATS or (backend is TorchLinear and not TorchLinear.fits_dtype(dtype)):
        return NOTHING_PACKS
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(96, 64, generator=generator).to(dtype)
    x, bias = torch.randn(2, 5, 64, generator=generator).to(dtype), torch.randn(96, generator=generator).to(dtype)
    try:
        with torch.inference_mode():
            product = backend([weight])
            ours = product(x, product.bias(bias))
            plain = nn.functional.linear(x, weight, bias)
    except (AttributeError, RuntimeError, NotImplementedError):
        return NOTHING_PACKS
    same = ours.shape == plain.shape and torch.allclose(ours, plain, rtol=2e-2, atol=2e-2)
    return None if same else NOTHING_PACKS
