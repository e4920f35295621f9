"""The tensors that kernels of an iteration read and write, declared once for all devices, and the constants that the
kernels share. And slots that a kernel lists for another.

A CPU's kernels (ops/cpu/iteration.py) get a structure with a field for each tensor and each size. A GPU's kernels
(ops/triton) get parameters of these names. The engine makes memory for results with `empty`, and collects a kernel's
tensors with `gather`.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

Tensors = dict[str, Tensor]  # by the names of TENSORS

FIELDS = ("token", "parent", "root", "path", "stop_state", "drafter_id", "slot", "position")  # numbers of a node
FLAGS = ("valid", "ends", "sampled")  # of a node
FIRST, COLUMNS = 7, 9  # counters of a row before those of its layers, and of each layer

# noise, see engine/core/noise.py: multipliers, the number of streams, and the streams in use
GOLDEN, MIX_A, MIX_B, MIX_TOKEN = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB, 0xD1342543DE82EF95
STREAMS = 8
DRAFT, ACCEPT, RESIDUAL, COMPLETION, CLOCK = 1, 2, 3, 4, 5  # one purpose each, so that no number is used twice
# shares of a distribution, see engine/core/distribution.py
SHARE_UNITS = 2.0**36  # integer units of a probability of 1: sums over fewer than 2**27 pairs stay below 2**63
NO_SHARE = -26.0  # exp of anything below is rounded to 0 units
# what kernels are compiled with
CONSTANTS = (FIRST, COLUMNS, GOLDEN, MIX_A, MIX_B, MIX_TOKEN, STREAMS, SHARE_UNITS, NO_SHARE, *FIELDS, *FLAGS)

SIZES = {
    "R": "rows",
    "W0": "roots",
    "W": "beams",  # also the number of finished hypotheses that are kept
    "K": "drafts",  # per layer
    "P": "depth",  # layers that a forest has room for
    "D": "layers",  # layers of the forest: fewer than P where a gate has ended it early
    "N": "nodes",  # W0 + D K
    "n": "above",  # nodes that have candidates: those of a layer, or all
    "C": "candidates",  # of a node
    "Q": "draft_candidates",
    "T": "window",  # of the suffix
    "S": "slots",  # that a mask covers
    "Z": "table_slots",
    "L": "history",
    "J": "backlog_nodes",  # tokens of the backlog and roots
    "V": "vocabulary",
    "A": "stop_states",
}
NUMBERS = {"drafts", "first", "layer", "trash", "last_position", "ran", "history_row"}  # arguments that are no tensors
KERNELS = ("begin", "extend", "verify", "commit")
DTYPES = {"int64": torch.int64, "int32": torch.int32, "bool": torch.bool, "float32": torch.float32,
          "float64": torch.float64}  # fmt: skip

# A line for each tensor: owner and field, dtype, shape, and what begin, extend, verify and commit do with it: r reads,
# w writes, u reads and writes, s reads and takes rows that lie apart. A dim is a letter of SIZES, a number, or a sum.
_DECLARATION = f"""
beam.token          int64    R W0            r...
beam.path           int64    R W0            r...
beam.stop_state     int64    R W0            r...
beam.valid          bool     R W0            r.r.
beam.weight         float32  R W0            r.r.
beam.logprob        float32  R W0            ..r.
beam.ancestors      bool     R W0 T          r...
beam.history        int64    R W0 L          ...s
beam.length         int64    R               ..ru
beam.depth          int64    R               rr.u
state.row_key       int64    R               r...
state.iteration     int64    R               r..u
state.active        bool     R               ..rr
table.used          int64    R               rr.u
table.common_prefix int64    R               rr.u
table.drafted       int64    R               ...u
table.positions     int64    R Z             uw.u
table.tokens        int64    R Z             uw.u
forest.numbers      int64    {len(FIELDS)} R N           wu..
forest.flags        bool     {len(FLAGS)} R N           wu..
forest.weight       float32  R N             wu..
forest.path_tokens  int64    R N P           wu..
forest.ancestors    bool     R N T           wu..
forest.mask         bool     R N S           ww..
candidate.tokens    int64    R n C           .rr.
candidate.logprobs  float32  R n C           .rr.
node.path           int64    R N             ..rr
node.stop_state     int64    R N             ..rr
node.parent         int64    R N             ..r.
node.token          int64    R N             ..r.
node.valid          bool     R N             ..r.
node.drafter_id     int64    R N             ..r.
node.sampled        bool     R N             ..r.
node.root           int64    R N             ...r
node.path_tokens    int64    R N P           ...r
node.ancestors      bool     R N T           ...r
endings.eos         bool     V               .rr.
endings.stops       int32    A V             .rrr
warp.temperature    float32  R               .rr.
warp.top_k          int64    R               .rr.
warp.top_p          float32  R               .rr.
warp.min_p          float32  R               .rr.
warp.greedy         bool     R               .rr.
limits.max_new      int64    R               ..r.
limits.length_penalty float32 R              ..r.
limits.early        bool     R               ..r.
finished.score      float32  R W             ..u.
finished.logprob    float32  R W             ..u.
finished.length     int64    R W             ..ur
finished.by_length  bool     R W             ..u.
finished.origin     int64    R W             ..uu
finished.node       int64    R W             ..ur
finished.token      int64    R W             ..ur
finished.tokens     int64    R W L           ...u
live.parent         int64    R W             ..wr
live.token          int64    R W             ..wr
live.node           int64    R W             ..w.
live.valid          bool     R W             ..wr
live.weight         float32  R W             ..wr
live.logprob        float32  R W             ..wr
verified.before     int64    R 1+D W         ..w.
verified.report     int64    R {FIRST}+{COLUMNS}D          ..wu
noise.keys          int64    R 1+P {STREAMS}         wrr.
backlog.numbers     int64    3 R J           w...
backlog.mask        bool     R J S           w...
next.valid          bool     R W             ...w
next.token          int64    R W             ...w
next.weight         float32  R W             ...w
next.logprob        float32  R W             ...w
next.path           int64    R W             ...w
next.stop_state     int64    R W             ...w
next.ancestors      bool     R W T           ...w
next.history        int64    R W L           ...w
moved.source        int64    R T             ...w
moved.target        int64    R T             ...w
draft.tokens        int64    R N Q           .wr.
draft.log_q         float32  R N Q           .wr.
draft.log_left      float64  2 R P K         .wr.
own.never           bool     R               ..r.
own.beams           int64    R               ..r.
"""


@dataclass(frozen=True, slots=True)
class Dim:
    """A dim of a declared tensor: `first` + `times` * the size named `size`; a number where `times` is 0."""

    first: int
    times: int
    size: str

    @classmethod
    def parse(cls, text: str) -> Dim:
        """Return the dim of a text such as `R`, `8` or `1+D`."""
        first, times, letter = re.fullmatch(r"(?:(\d+)(?:\+|$))?(\d+)?([A-Za-z]\d?)?", text).groups()  # type: ignore[union-attr]
        return cls(int(first or 0), int(times or 1) if letter else 0, SIZES[letter] if letter else "")

    def of(self, sizes: Mapping[str, int]) -> int:
        """Return the dim for these sizes."""
        return self.first + self.times * sizes[self.size] if self.times else self.first


@dataclass(frozen=True, slots=True)
class DeclaredTensor:
    """A tensor of an iteration.

    Attributes:
        owner, field: which object of the engine has it as which attribute. name: both, as kernels name it.
        access: for each of KERNELS, how it is used: see the declaration.
    """

    owner: str
    field: str
    name: str
    dtype: torch.dtype
    shape: tuple[Dim, ...]
    access: str


def _declared(line: str) -> DeclaredTensor:
    name, dtype, *shape, access = line.split()
    owner, field = name.split(".")
    dims = tuple(Dim.parse(dim) for dim in shape)
    return DeclaredTensor(owner, field, f"{owner}_{field}", DTYPES[dtype], dims, access)


TENSORS = tuple(_declared(line) for line in _DECLARATION.strip().splitlines())
_OWNED = {owner: [tensor for tensor in TENSORS if tensor.owner == owner] for owner in {t.owner for t in TENSORS}}


class KernelTensors:
    """The tensors that a kernel takes. writes: names of those it writes. apart: of those whose rows may lie apart."""

    def __init__(self, kernel: str) -> None:
        self.kernel, index = kernel, KERNELS.index(kernel)
        self.tensors = tuple(tensor for tensor in TENSORS if tensor.access[index] != ".")
        self.writes = frozenset(tensor.name for tensor in self.tensors if tensor.access[index] in "wu")
        self.apart = frozenset(tensor.name for tensor in self.tensors if tensor.access[index] == "s")
        # as plain tuples, which each call goes through: name, dtype, whether rows may lie apart, whether it is written
        self.checked = [(t.name, t.dtype, t.name in self.apart, t.name in self.writes) for t in self.tensors]
        # what each call goes through, as plain tuples: the fields of each owner, and the dims that give the sizes
        self._fields: dict[str, list[tuple[str, str]]] = {}
        self._dims: dict[str, list[tuple[str, int, int, int]]] = {}
        sizes = set[str]()
        for tensor in self.tensors:
            self._fields.setdefault(tensor.owner, []).append((tensor.field, tensor.name))
            for axis, dim in enumerate(tensor.shape):
                if dim.times and dim.size not in sizes:
                    sizes.add(dim.size)
                    self._dims.setdefault(tensor.name, []).append((dim.size, axis, dim.first, dim.times))

    def gather(self, **owners: object) -> Tensors:
        """Return the kernel's tensors by name. owners: objects, or dicts by field; of one that is left out or empty the
        kernel gets nothing."""
        tensors: Tensors = {}
        for owner, source in owners.items():
            if type(source) is dict:
                if source:
                    for field, name in self._fields[owner]:
                        tensors[name] = source[field]
            else:
                for field, name in self._fields[owner]:
                    tensors[name] = getattr(source, field)
        return tensors

    def sizes(self, tensors: Tensors) -> dict[str, int]:
        """Return the sizes by name, from the shapes of the tensors."""
        sizes = {}
        for name, dims in self._dims.items():
            if (tensor := tensors.get(name)) is not None:
                shape = tensor.shape
                for size, axis, first, times in dims:
                    sizes[size] = (shape[axis] - first) // times
        return sizes


BEGIN, EXTEND, VERIFY, COMMIT = (KernelTensors(kernel) for kernel in KERNELS)


@functools.lru_cache(256)
def _shapes(owner: str, sizes: tuple[tuple[str, int], ...]) -> list[tuple[str, tuple[int, ...], torch.dtype]]:
    by_name = dict(sizes)
    return [(tensor.field, tuple(dim.of(by_name) for dim in tensor.shape), tensor.dtype) for tensor in _OWNED[owner]]


def empty(owner: str, device: torch.device, **sizes: int) -> dict[str, Tensor]:
    """Return memory for all tensors of an owner, by field. sizes: by the names of SIZES."""
    return {
        field: torch.empty(shape, dtype=dtype, device=device)
        for field, shape, dtype in _shapes(owner, tuple(sizes.items()))
    }


@dataclass(frozen=True, slots=True)
class SlotPaths:
    """The suffix slots that each node sees, in order of depth.

    slots [R, n, T] int32, relative to the row's lowest; counts [R, n] int32, how many of them are used; bounds [R, 2]
    int32: the lowest slot that a node of the row sees, and one past the highest. span: the largest difference of these
    two. total: S.
    """

    slots: Tensor
    counts: Tensor
    bounds: Tensor
    span: int
    total: int
