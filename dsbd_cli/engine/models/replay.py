"""Layers on the CPU recorded for a shape, and replayed without what Python adds to them.

With few nodes a kernel between two products takes some microseconds, and Python several times as long to call it. A
recording holds the kernels of all layers with their arguments, which one call runs, and between them the operations of
torch. It works as a CUDA graph does: addresses are fixed, and what changes from forward to forward is copied to them
before a replay. A shape runs plainly first, and is recorded beside its second plain run. The first replays of each kind
(settled slots or none, which masks) run beside plain runs, too: recordings that give other bits are dropped.

Shape letters: R rows, n nodes, H hidden width, T tail slots.
"""

from __future__ import annotations

import ctypes
import functools
import logging
import zlib
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from dsbd_cli.engine.models import attention
from dsbd_cli.engine.models.attention import Made, Sight
from dsbd_cli.engine.models.cache import ForestCache
from dsbd_cli.engine.models.native import Kernel, fields, kernels, noted, offsets, team_address
from dsbd_cli.engine.models.tail import Paths

__all__ = ["Layer", "Replays", "in_line"]

MOST_NODES = 256  # with more, Python's part is small beside the products
PLAIN_RUNS = 1  # times that a shape runs plainly before it is recorded
CHECKS = 3  # replays of a kind that are compared
MOST_PROGRAMS, MOST_SHAPES = 64, 4096  # recordings kept; shapes remembered
ROOM_STEP = 64  # slots of a path, and between its ends, are reserved in such steps
REFUSED = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape, torch.Tag.nondeterministic_seeded}
EMPTY = {torch.ops.aten.empty.memory_format, torch.ops.aten.new_empty.default, torch.ops.aten.empty_like.default,
         torch.ops.aten.empty_strided.default}  # fmt: skip
# tagged as random for its dropout, of which a model that answers has none
ATTENTION = {torch.ops.aten.scaled_dot_product_attention.default,
             torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default}  # fmt: skip

_logger = logging.getLogger(__name__)
_Seen = tuple[int, Made, "Paths | Tensor"]
Layer = Callable[..., Tensor]
"""The forward of a decoder layer: hidden states and keywords -> hidden states."""


class Run(ctypes.Structure):
    """Arguments of the kernel that runs kernels: `calls` is [count, 3] int64, address, arguments and threads."""

    _fields_ = fields("count", "calls", "team")


RUN = offsets(Run)
LAYOUT = zlib.crc32(repr([RUN, *(one[0] for one in Run._fields_)]).encode())


class _UnrecordableError(Exception):
    """What a layer does goes by data, or by tensors that have no fixed place."""


class _Arena:
    """Memory of the layers' results. A layer may read what the one before it left, so there are two parts by turns."""

    def __init__(self) -> None:
        self._parts: tuple[list[Tensor], list[Tensor]] = ([], [])
        self._part: list[Tensor] = self._parts[0]
        self._next = 0
        self.held: list[Tensor] = []  # too small for a later recording, and in use by an earlier one

    def turn(self, number: int) -> None:
        """Layer `number` begins."""
        self._part, self._next = self._parts[number % 2], 0

    def take(self, like: Tensor) -> Tensor:
        """A tensor of this shape, dtype and strides."""
        size = like.untyped_storage().nbytes()
        if self._next == len(self._part):
            self._part.append(torch.empty(0, dtype=torch.uint8))
        found = self._part[self._next]
        if len(found) < size:
            self.held.append(found)
            found = self._part[self._next] = torch.empty(size, dtype=torch.uint8)
        self._next += 1
        return found[:size].view(like.dtype).as_strided(like.shape, like.stride())

    def owns(self, one: object) -> bool:
        """It lies in this memory."""
        address = _address(one)
        return any(part.data_ptr() == address for parts in self._parts for part in parts)


class _Recorder(TorchDispatchMode):
    """Notes kernels, which are not run, and operations of torch, which are."""

    def __init__(self, arena: _Arena) -> None:
        super().__init__()
        self._arena = arena
        self._calls: list[tuple[int, int, int]] = []
        self._arguments: list[ctypes.Structure] = []
        self.steps: list[Callable[[], object]] = []

    def kernel(self, kernel: Kernel, arguments: ctypes.Structure, threads: int) -> None:
        self._calls.append((kernel.address, ctypes.addressof(arguments), threads))
        self._arguments.append(arguments)

    def close(self) -> None:
        """The kernels noted last become a step."""
        if self._calls:
            self.steps.append(functools.partial(_run, torch.tensor(self._calls), self._arguments))
            self._calls, self._arguments = [], []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in EMPTY:
            return self._arena.take(func(*args, **kwargs))
        if REFUSED & set(func.tags) and func not in ATTENTION:
            raise _UnrecordableError(str(func))
        writes = func._schema.is_mutable
        if writes and not self._arena.owns(args[0]):  # layers write to the cache by kernels, which are not run now
            raise _UnrecordableError(str(func))
        found = func(*args, **kwargs)
        if func.is_view and _address(found) == _address(args[0]):  # `contiguous` may be none
            return found
        self.close()
        if writes:
            self.steps.append(functools.partial(func, *args, **kwargs))
            return found
        homes = tree_map_only(Tensor, self._arena.take, found)
        self.steps.append(functools.partial(_again, func, args, kwargs, homes))
        return homes


def _address(one: object) -> int | None:
    """Of a tensor's memory."""
    return one.untyped_storage().data_ptr() if isinstance(one, Tensor) else None


def _again(func: Any, args: Any, kwargs: Any, homes: Any) -> None:
    found = func(*args, **kwargs)
    if isinstance(homes, Tensor):
        homes.copy_(found)
        return
    for home, one in zip(homes, found, strict=True):
        if isinstance(home, Tensor):
            home.copy_(one)


def _run(calls: Tensor, arguments: Sequence[ctypes.Structure]) -> None:
    """The kernels of `calls`, one after another; their arguments must live."""
    _runner().alone(Run(len(calls), calls.data_ptr(), team_address()))


@functools.cache
def _runner() -> Kernel:
    (found,) = kernels("replay_kernel", "run")
    return found


@dataclass(slots=True)
class _Forward:
    """The layers' forward that is under way.

    hidden [R, n, H]. asked: what each layer was given. angles and masks: those that layers share stand there once;
    given: which of them each layer was given.
    """

    hidden: Tensor
    cache: ForestCache
    sight: Sight | None
    asked: list[tuple[Layer, dict[str, Any]]] = field(default_factory=list)
    angles: list[tuple[Tensor, Tensor]] = field(default_factory=list)
    masks: list[Tensor | None] = field(default_factory=list)
    given: list[tuple[int, int]] = field(default_factory=list)

    @classmethod
    def of(cls, hidden: Tensor, more: dict[str, Any]) -> _Forward | None:
        """None where the first layer is asked what no recording serves."""
        cache, sight = more.get("past_key_values"), attention.current()
        if not isinstance(more.get("position_embeddings"), tuple):
            return None
        if type(cache) is not ForestCache or hidden.device.type != "cpu" or hidden.shape[:2].numel() > MOST_NODES:
            return None
        if cache.planes(0) is None or cache.under_way is None or cache.under_way.rows is not None:
            return None
        if sight is not None and not isinstance(sight, Sight):
            return None
        return cls(hidden, cache, sight)

    def add(self, plain: Layer, more: dict[str, Any]) -> None:
        """A layer is asked."""
        self.asked.append((plain, more))
        angles, mask = more.get("position_embeddings"), more.get("attention_mask")
        self.given.append((_place(self.angles, angles), _place(self.masks, mask)))

    def key(self) -> Hashable:
        """What a recording is bound to, beside the cache's memory."""
        split = None if self.sight is None else self.sight.settled
        shapes = tuple((one.shape, one.dtype) for one in self.inputs())
        return torch.get_num_threads(), split, shapes, tuple(self.given)

    def kind(self) -> Hashable:
        """What a recording's steps go by, beside sizes."""
        return None if self.sight is None else bool(max(self.sight.settled)), tuple(self.given)

    def plain(self) -> Tensor:
        """The layers one by one: [R, n, H]."""
        hidden = self.hidden
        for layer, more in self.asked:
            hidden = layer(hidden, **more)
        return hidden

    def inputs(self) -> list[Tensor]:
        """What a recording copies, beside paths. A mask is read by operations of torch where no sight knows it."""
        assert self.cache.under_way is not None
        masks = [mask for mask in self.masks if mask is not None and not self.listed(mask)]
        return [self.hidden, self.cache.under_way.flat, *(part for pair in self.angles for part in pair), *masks]

    def listed(self, mask: Tensor | None) -> bool:
        """Layers with this mask go by what the sight makes of it."""
        return self.sight is not None and self.sight.knows(mask)

    def made(self) -> Iterator[_Seen]:
        """Places for what a plain run has asked the sight for."""
        for number, mask in enumerate(self.masks):
            if self.sight is not None and mask is not None:
                for what, one in self.sight.made(mask):
                    yield number, what, _home(one, max(self.sight.settled))

    def make(self, number: int, what: Made) -> Paths | Tensor:
        """Of a mask."""
        mask = self.masks[number]
        assert self.sight is not None
        assert mask is not None
        return self.sight.make(mask, what)

    def swap(self, number: int, what: Made, other: Paths | Tensor) -> Paths | Tensor:
        """As Sight.swap."""
        mask = self.masks[number]
        assert self.sight is not None
        assert mask is not None
        return self.sight.swap(mask, what, other)


def _place(known: list[Any], one: Any) -> int:
    """Where it stands among those known; by identity."""
    for place, other in enumerate(known):
        if other is one or (isinstance(one, tuple) and isinstance(other, tuple) and other[0] is one[0]):
            return place
    known.append(one)
    return len(known) - 1


@dataclass(slots=True)
class _Program:
    """A recording: its own places of what changes, and its steps.

    seen: mask, what a sight makes of it, and the place. used: attentions that went by the sight.
    """

    inputs: list[Tensor]
    seen: list[_Seen]
    steps: list[Callable[[], object]]
    result: Tensor
    used: int
    kind: Hashable

    def load(self, forward: _Forward) -> bool:
        """Take what a forward is given; False where a path is too long."""
        for home, value in zip(self.inputs, forward.inputs(), strict=True):
            home.copy_(value)
        return all(_fill(place, forward.make(number, what)) for number, what, place in self.seen)

    def replay(self, forward: _Forward) -> Tensor:
        """[R, n, H], which the next replay overwrites."""
        for step in self.steps:
            step()
        if forward.sight is not None:
            forward.sight.used += self.used
        return self.result


def _fill(place: Paths | Tensor, made: Paths | Tensor) -> bool:
    """False where it does not fit."""
    if isinstance(place, Tensor):
        assert isinstance(made, Tensor)
        place.copy_(made[..., : place.shape[-1]])
        return True
    assert isinstance(made, Paths)
    width = made.slots.shape[2]
    if width > place.slots.shape[2] or made.span > place.span:
        return False
    place.slots[:, :, :width].copy_(made.slots)
    place.counts.copy_(made.counts)
    place.bounds.copy_(made.bounds)
    return True


def _home(made: Paths | Tensor, settled: int) -> Paths | Tensor:
    """A place for it: of paths for somewhat longer ones, too, of a mask for the settled slots, which are read."""
    if isinstance(made, Tensor):
        return made[..., :settled].clone(memory_format=torch.contiguous_format)
    width, span = (-(-size // ROOM_STEP) * ROOM_STEP for size in (made.slots.shape[2], made.span))
    slots = made.slots.new_zeros(*made.slots.shape[:2], width)
    found = Paths(slots, torch.empty_like(made.counts), torch.empty_like(made.bounds), span, made.total)
    _fill(found, made)
    return found


class Replays:
    """The recordings of one model's layers over one cache. One forward at a time.

    Attributes:
        replayed: forwards that a recording served.
    """

    def __init__(self, layers: int) -> None:
        self._layers, self.replayed = layers, 0
        self._forward: _Forward | None = None
        self._seen: Counter[Hashable] = Counter()
        self._checked: Counter[Hashable] = Counter()  # replays of a kind that gave what a plain run gave
        self._refused: set[Hashable] = set()  # kinds
        self._forget(-1)

    def _forget(self, generation: int) -> None:
        """The cache's memory has moved: no recorded address holds any more."""
        self._generation = generation
        self._programs: dict[Hashable, _Program] = {}
        self._arena = _Arena()

    def ask(self, number: int, plain: Layer, hidden: Tensor, more: dict[str, Any]) -> Tensor:
        """Layer `number` is asked, in order. All layers run when the last one is; what the others give back is their
        input, which nobody looks at."""
        if number == 0:
            self._forward = _Forward.of(hidden, more)
        forward = self._forward
        if forward is None or len(forward.asked) != number:
            return plain(hidden, **more)
        forward.add(plain, more)
        if number + 1 < self._layers:
            return hidden
        self._forward = None
        return self._run(forward)

    def _run(self, forward: _Forward) -> Tensor:
        if forward.cache.generation != self._generation:
            self._forget(forward.cache.generation)
        key, kind = forward.key(), forward.kind()
        program = self._programs.pop(key, None)
        if program is not None and program.load(forward):
            self._programs[key] = program  # the last one now
            if self._checked[kind] < CHECKS:
                return self._check(kind, program, forward)
            self.replayed += 1
            return program.replay(forward)
        found = forward.plain()
        if self._seen[key] >= PLAIN_RUNS and kind not in self._refused:
            self._record(key, kind, forward)
        if len(self._seen) >= MOST_SHAPES:
            self._seen.clear()
        self._seen[key] += 1
        return found

    def _check(self, kind: Hashable, program: _Program, forward: _Forward) -> Tensor:
        """A replay beside a plain run, which gives the result. Where they differ nothing of this kind is recorded any
        more."""
        found = program.replay(forward).clone()
        before = 0 if forward.sight is None else forward.sight.used
        wanted = forward.plain()
        if forward.sight is not None:
            forward.sight.used = before
        if torch.equal(found.view(torch.uint8), wanted.view(torch.uint8)):
            self._checked[kind] += 1
        else:
            self._refuse(kind)
            _logger.warning("layers run one by one: a recording of them gave other bits")
        return wanted

    def _refuse(self, kind: Hashable) -> None:
        self._refused.add(kind)
        self._programs = {key: one for key, one in self._programs.items() if one.kind != kind}

    def _record(self, key: Hashable, kind: Hashable, forward: _Forward) -> None:
        """After a plain run. A kind of which a layer does what cannot be recorded is run plainly from now on."""
        while len(self._programs) >= MOST_PROGRAMS:
            del self._programs[next(iter(self._programs))]
        try:
            self._programs[key] = self._recorded(forward)
        except _UnrecordableError:
            self._refuse(kind)

    def _recorded(self, forward: _Forward) -> _Program:
        write, sight = forward.cache.under_way, forward.sight
        assert write is not None
        inputs = [one.clone(memory_format=torch.contiguous_format) for one in forward.inputs()]
        hidden, flat, *rest = inputs
        angles = [(rest.pop(0), rest.pop(0)) for _ in forward.angles]
        masks = [mask if mask is None or forward.listed(mask) else rest.pop(0) for mask in forward.masks]
        seen = list(forward.made())
        recorder, used = _Recorder(self._arena), 0 if sight is None else sight.used
        with _standing_in(forward, flat, seen), noted(recorder.kernel), recorder:
            for number, ((layer, more), (angle, mask)) in enumerate(zip(forward.asked, forward.given, strict=True)):
                self._arena.turn(number)
                given = {**more, "position_embeddings": angles[angle], "attention_mask": masks[mask]}
                hidden = layer(hidden, **given)
        recorder.close()
        if sight is not None:
            used, sight.used = sight.used - used, used
        return _Program(inputs, seen, recorder.steps, hidden, used, forward.kind())


@contextmanager
def _standing_in(forward: _Forward, flat: Tensor, seen: Sequence[_Seen]) -> Iterator[None]:
    """Layers inside are given a recording's own places of slots, and of what the sight makes."""
    write = forward.cache.under_way
    assert write is not None
    before, write.flat = write.flat, flat
    kept = [(number, what, forward.swap(number, what, place)) for number, what, place in seen]
    try:
        yield
    finally:
        write.flat = before
        for number, what, made in kept:
            forward.swap(number, what, made)


def in_line(layers: int, number: int, plain: Layer) -> Layer:
    """The forward of a layer that is recorded with the others over a forest's cache."""

    def forward(hidden_states: Tensor, *args: object, **more: Any) -> Tensor:
        cache = more.get("past_key_values")
        if args or not isinstance(cache, ForestCache):
            return plain(hidden_states, *args, **more)
        if cache.replays is None:
            cache.replays = Replays(layers)
        found: Tensor = cache.replays.ask(number, plain, hidden_states, more)
        return found

    return forward
