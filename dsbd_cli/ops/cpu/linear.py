"""Linear layers that read their weights from memory once at each call, and reorder none of them first.

torch hands a plain weight matrix to oneDNN, which copies it into blocks at every call; for a few tokens that copy costs
as much as the product (benchmarks/LOG.md).

Two ways. Where the processor has AVX-512, a kernel of our own serves (kernels/linear.py): weights are packed as lines,
in the order in which it reads them, once. Matrix units need no such copy: they read rows of bfloat16 as a checkpoint
has them, from its memory-mapped file. Elsewhere operators of torch serve, which pack, too, and are not documented.
ops/select.py tries them against a plain product; where neither serves, the layers stay as they are.
"""

from __future__ import annotations

import ctypes
import functools
import zlib
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from dsbd_cli.ops.cpu.runtime import (
    EAGER,
    PRODUCT,
    CpuKernel,
    Eager,
    features,
    fields,
    kernels,
    matrix_units,
    may_use_matrix_units,
    offsets,
    on_amd,
    scratch,
    team,
)

ROWS_HINT = 32  # blocks are chosen for about so many tokens; measured: any hint from 8 to 512 gives the same blocks
LEAST_ROWS = 4  # fewer rows take a slower kernel; measured: 1 row 0.65 ms, 4 rows 0.51 ms for 5632 x 2048 in bfloat16
MIN_FEATURES = 64
COLUMNS = 64  # outputs that our kernels compute at once
# Of matrix units: rows, or words of a row, that they multiply at once. Up to ROWS_AT_ONCE rows of x take weights that
# lie in rows from memory once; more take them from the cache, a piece at a time, as lines. A thread has up to BESIDE
# lines between its sums and its room.
SIDES, ROWS_AT_ONCE, BESIDE = 16, 64, 32
# Of our kernels. For more than FEW_ROWS rows a thread works on PIECE lines of weights at a time, which its cache holds.
CHUNK_ROWS, FEW_ROWS, PIECE = 96, 5, 1024
MATRIX_CHUNK_ROWS = 512  # in the place of CHUNK_ROWS with matrix units; measured: 256 rows take 4 to 8 % longer


class LinearArguments(ctypes.Structure):
    """Arguments of the kernel."""

    _fields_ = fields(
        *PRODUCT, "x", "x_row", "weights", "steps", "piece", "in_rows", "room", "bias", "out", "out_row", "narrow",
    )  # fmt: skip


class PackArguments(ctypes.Structure):
    """Arguments of the kernel that packs. rows: addresses of rows."""

    _fields_ = fields("taken", "threads", "items", "rows", "steps", "out")


MULTIPLY, PACK = offsets(LinearArguments), offsets(PackArguments)
LAYOUT = zlib.crc32(
    repr(
        [COLUMNS, MULTIPLY, PACK, [field[0] for kind in (LinearArguments, PackArguments) for field in kind._fields_]]
    ).encode()
)


@functools.cache
def bfloat16_tile() -> str | None:
    """The tile that multiplies bfloat16 here. None: torch does.

    Matrix units are fastest. AVX-512 BF16 multiplies pairs; an Emerald Rapids does that at half its rate of float32. So
    on other processors than AMD's, and where the instruction is missing, each number is made float32 first.
    """
    if matrix_units():
        return "amx"
    if "avx512f" not in features():
        return None
    return "bfloat16" if "avx512bf16" in features() and on_amd() else "widened"


@functools.cache
def compiled() -> list[CpuKernel]:
    """Return the kernels, made at the first call."""
    return kernels("linear", "multiply", "pack_rows")


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
    def of(rows: int, blocks: int, lines: int, kinds: int = 1, room: int = 0) -> Parts:
        """kinds: of sums. room: lines that a thread needs beside them."""
        return _parts(rows, blocks, lines, kinds, room, torch.get_num_threads())

    def scratch(self, run: Eager) -> Tensor:
        """Return memory for the sums."""
        return run.empty(*self.sums, dtype=torch.float32)

    def arguments(self, scratch: Tensor) -> tuple[int, ...]:
        """PRODUCT."""
        sums = scratch.data_ptr(), self.sums[1] * COLUMNS * 4
        return 0, 0, self.items, self.rows, self.chunk, self.blocks, self.share, *sums


@functools.lru_cache(1024)
def _parts(rows: int, blocks: int, lines: int, kinds: int, room: int, threads: int) -> Parts:
    most = MATRIX_CHUNK_ROWS if matrix_units() else CHUNK_ROWS
    chunk, share = max(1, min(rows, most)), max(1, blocks // (4 * threads))
    items, piece = -(-blocks // share) * -(-rows // chunk), lines if rows <= FEW_ROWS else PIECE
    return Parts(rows, blocks, chunk, share, items, piece, (threads, kinds * chunk + room, COLUMNS))


def lines(weights: Sequence[Tensor]) -> Tensor:
    """Return weights [o, i] each, of one dtype and width, one below the other, as the kernels read them.

    [blocks, i / u, COLUMNS] of int32, which hold u numbers each. Outputs are filled up to a multiple of COLUMNS with
    zeros. Each weight is read once, from wherever it lies.
    """
    rows, held = row_addresses(weights)
    made = _lines(rows, sum(map(len, weights)), weights[0])
    del held
    return made


def picked_lines(table: Tensor, ids: Tensor, home: Tensor | None = None) -> Tensor:
    """Return the rows ids [o] int64 of a table [V, i] as lines. home: lines of as many rows, whose memory they take."""
    rows = ids * (table.stride(0) * table.element_size()) + table.data_ptr()
    return _lines(_filled(rows, COLUMNS), len(ids), table, home)


def _lines(rows: Tensor, count: int, like: Tensor, home: Tensor | None = None) -> Tensor:
    """Return the rows at addresses [o] int64 as lines. count: of real ones, behind which rows of zeros stand. like: [.,
    i], a tensor of such rows."""
    steps, zeros = like.shape[1] * like.element_size() // 4, torch.zeros_like(like[0]).contiguous()
    rows[count:] = zeros.data_ptr()
    made = scratch(len(rows) * steps * 4).view(torch.int32).view(-1, steps, COLUMNS) if home is None else home
    compiled()[1](PackArguments(0, 0, len(made), rows.data_ptr(), steps, made.data_ptr()), made.numel(), len(made))
    return made


def lie_in_groups(weights: Sequence[Tensor]) -> bool:
    """Return whether SIDES rows of weights [o, i] each, which follow each other, are equally far apart, and hold whole
    SIDES words."""
    wide = weights[0].shape[1] * weights[0].element_size() % (4 * SIDES) == 0
    return wide and all(len(weight) % SIDES == 0 and weight.stride(1) == 1 for weight in weights)


def row_groups(weights: Sequence[Tensor]) -> tuple[Tensor, list[Tensor]]:
    """Return where each SIDES rows of weights [o, i] begin and how many bytes they are apart, [groups, 2] int64, and
    the tensors that these point into. Rows of zeros fill up a multiple of COLUMNS."""
    assert all(weight.is_cpu for weight in weights)
    found, held = list[Tensor](), [*weights]
    for weight in weights:
        row = weight.stride(0) * weight.element_size()
        begin = torch.arange(0, len(weight), SIDES) * row + weight.data_ptr()
        found.append(torch.stack([begin, torch.full_like(begin, row)], 1))
    if missing := -sum(map(len, found)) % (COLUMNS // SIDES):
        held.append(torch.zeros_like(weights[0][0]))
        found.append(torch.tensor([[held[-1].data_ptr(), 0]]).expand(missing, 2))
    return torch.cat(found), held


def row_addresses(weights: Sequence[Tensor]) -> tuple[Tensor, list[Tensor]]:
    """Return the addresses [o] int64 of the rows of all weights, filled up to a multiple of COLUMNS with 0, and the
    tensors that they point into."""
    held = [weight if weight.stride(1) == 1 else weight.contiguous() for weight in weights]
    assert all(weight.is_cpu for weight in held)
    found = [
        torch.arange(len(weight)) * (weight.stride(0) * weight.element_size()) + weight.data_ptr() for weight in held
    ]
    return _filled(torch.cat(found), COLUMNS), held


def address(tensor: Tensor) -> int:
    """Return what tells the memory of a tensor from others'; torch's own packed weights do not say where they lie."""
    return id(tensor) if tensor.is_mkldnn else tensor.data_ptr()


class Compiled:
    """Weights for our kernel: rows of the tensors that it is given, which must not change, or lines."""

    @staticmethod
    def able(dtype: torch.dtype) -> bool:
        """Whether the processor has the instructions that the kernel is fast with."""
        tile = bfloat16_tile() if dtype == torch.bfloat16 else None
        known = may_use_matrix_units() if tile == "amx" else "avx512f" in features()
        return known and team() is not None

    @staticmethod
    def takes(weight: Tensor) -> bool:
        """Whether a row of weights [o, i] fills whole words."""
        return weight.shape[1] * weight.element_size() % 4 == 0

    def __init__(self, weights: Sequence[Tensor], picked: Tensor | None = None) -> None:
        """picked: [o] int64, rows of the only one of the weights; None: all rows of all."""
        like, self.dtype = weights[0], weights[0].dtype
        self.outputs = sum(map(len, weights)) if picked is None else len(picked)
        self._unit = like.element_size()
        self._steps = like.shape[1] * self._unit // 4
        in_groups = picked is None and self._unit == 2 and bfloat16_tile() == "amx"
        self._in_rows = in_groups and lie_in_groups(weights)
        if self._in_rows:
            self._places, self.weights = row_groups(weights)
        else:
            self._places = lines(weights) if picked is None else picked_lines(like, picked)
            self.weights = [self._places]
        self._blocks = -(-self.outputs // COLUMNS)

    def bias(self, bias: Tensor) -> Tensor:
        return _filled(bias.float(), COLUMNS)

    def _room(self, rows: int) -> int:
        """Return lines that a thread needs beside its sums: for rows of x, turned, or for a piece of the weights."""
        if not self._in_rows:
            return 0
        return BESIDE + (-(-rows // SIDES) * -(-self._steps * SIDES // COLUMNS) if rows <= ROWS_AT_ONCE else PIECE)

    def __call__(self, x: Tensor, bias: Tensor | None, run: Eager = EAGER) -> Tensor:
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
        out = run.empty(*x.shape[:-1], columns, dtype=x.dtype)
        room = self._room(rows)
        parts = Parts.of(rows, blocks, steps, room=room)
        sums = parts.scratch(run)
        arguments = LinearArguments(
            *parts.arguments(sums), flat.data_ptr(), row * unit, self._places.data_ptr(), steps, parts.piece,
            self._in_rows, (parts.sums[1] - room + BESIDE) * COLUMNS * 4, 0 if bias is None else bias.data_ptr(),
            out.data_ptr(), columns * unit, unit == 2,
        )  # fmt: skip
        run.launch(compiled()[0], arguments, rows * columns * steps, parts.items)
        # rows stay as far apart as they are: torch's functions give numbers by place (vector or rest) other bits
        return out if columns == self.outputs else out[..., : self.outputs]


class Torch:
    """Weights for torch's operators. Fewer outputs than MIN_FEATURES are filled up with zeros, which the result leaves
    out: in a product of few columns the bits of a row depend on the other rows."""

    @staticmethod
    def able(dtype: torch.dtype) -> bool:
        """Whether torch has such products, and the processor multiplies bfloat16 itself where they are of that."""
        if not torch.backends.mkldnn.is_available():
            return False
        check: Any = getattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", None)
        return dtype == torch.float32 or bool(check is not None and check())

    @staticmethod
    def takes(weight: Tensor) -> bool:
        """Whether weights [o, i] can be packed: all can."""
        return True

    def __init__(self, weights: Sequence[Tensor]) -> None:
        weight = weights[0] if len(weights) == 1 else torch.cat([*weights])
        self.outputs = len(weight)
        filled = _filled(weight, MIN_FEATURES) if len(weight) < MIN_FEATURES else weight
        self.weights: list[Tensor] = [torch.ops.mkldnn._reorder_linear_weight(filled.contiguous(), ROWS_HINT)]

    def bias(self, bias: Tensor) -> Tensor:
        return _filled(bias, MIN_FEATURES) if len(bias) < MIN_FEATURES else bias

    def __call__(self, x: Tensor, bias: Tensor | None, run: Eager = EAGER) -> Tensor:
        """x [..., i], bias as `bias` gave it -> [..., o]."""
        return run.compute(lambda: self._padded(x, bias))

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


class Product:
    """Layers that are handed the same tensor (query, key and value), as one product.

    Attributes:
        parts: outputs of each layer.
    """

    parts: list[int]
    _kept: tuple[Tensor, Tensor, int] | None = None  # input, result, and how many layers have not asked for it

    def compute(self, x: Tensor, run: Eager = EAGER) -> Tensor:
        """x [..., i] -> [..., o], the outputs of all layers side by side."""
        raise NotImplementedError

    def of(self, x: Tensor) -> Tensor:
        """Return `compute` of x, computed once for one tensor: it is kept until each layer has asked."""
        if len(self.parts) == 1:
            return self.compute(x)
        kept = self._kept  # read once: another thread may change it
        result, left = (self.compute(x), len(self.parts)) if kept is None or kept[0] is not x else kept[1:]
        self._kept = (x, result, left - 1) if left > 1 else None
        return result


class PackedProduct(Product):
    """Product of packed weights."""

    def __init__(
        self, weights: Sequence[Tensor], biases: Sequence[Tensor | None], backend: type[Compiled] | type[Torch]
    ) -> None:
        """weights: [o, i] of each layer, of one dtype. biases: [o] or None of each. backend: computes the product."""
        self.parts = [len(weight) for weight in weights]
        self._backend = backend(weights)
        self.compiled = backend is Compiled
        self._bias: Tensor | None = None
        if any(bias is not None for bias in biases):
            missing = (weights[0].new_zeros(part) for part in self.parts)
            self.set_bias(torch.cat([gap if bias is None else bias for bias, gap in zip(biases, missing, strict=True)]))

    @property
    def weights(self) -> list[Tensor]:
        """Return the weights as they are stored."""
        return self._backend.weights

    def set_bias(self, bias: Tensor) -> None:
        """bias [o]."""
        self._bias = self._backend.bias(bias)

    def compute(self, x: Tensor, run: Eager = EAGER) -> Tensor:
        return self._backend(x, self._bias, run)


class PickedRows:
    """Products of each row of a batch with rows of its own of a table [V, i]."""

    def __init__(self, table: Tensor) -> None:
        self._table = table
        self._products: list[Compiled] = []

    def take(self, ids: Tensor) -> None:
        """Multiply with the rows ids [R, o] int64 from now on."""
        if [one.outputs for one in self._products] != [ids.shape[1]] * len(ids):
            self._products = [Compiled([self._table], some) for some in ids]
            return
        for product, some in zip(self._products, ids, strict=True):
            picked_lines(self._table, some, product.weights[0])

    def compute(self, x: Tensor) -> Tensor:
        """x [R, n, i] -> [R, n, o]."""
        found = [product(part, None) for product, part in zip(self._products, x.split(1), strict=True)]
        return found[0] if len(found) == 1 else torch.cat(found)


def _filled(weight: Tensor, multiple: int) -> Tensor:
    """Zeros after the last output, up to a multiple of so many."""
    missing = -weight.shape[0] % multiple
    return nn.functional.pad(weight, (*[0] * (2 * weight.dim() - 1), missing)) if missing else weight
