"""Decoder layers on the CPU, recorded for a shape and replayed without what Python adds to them.

With few nodes a kernel between two products takes some microseconds, and Python several times as long to call it. A
recording (recorder.py) of all layers is replayed in a few calls. What changes from forward to forward has a home, as in
decoding/graphs.py, and is copied to it before a replay: hidden states, cache slots, angles, masks, and the lists of
slots that attention goes by.

A shape runs plainly twice, and is recorded beside its third plain run. The first replay of each kind (settled slots or
none, which masks) runs beside a plain run, too: recordings that give other bits are dropped.

Shape letters: R rows, n nodes, H hidden width, m queries, S slots, T tail slots.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from dsbd_cli.engine.models import attention, tail
from dsbd_cli.engine.models.attention import HeadOf, PathsOf, Sight
from dsbd_cli.engine.models.cache import ForestCache
from dsbd_cli.engine.models.native import intercept
from dsbd_cli.engine.models.recorder import Arena, Recorder, Step, UnrecordableError
from dsbd_cli.engine.models.tail import Paths

__all__ = ["Layer", "Replays", "queued"]

MOST_NODES = 256  # with more, Python's part is small beside the products
PLAIN_RUNS = 2  # times that a shape runs plainly before it is recorded, which takes as long as three replays save
CHECKS = 1  # replays of a kind that are compared, at slots other than those of the recording
MOST_PROGRAMS, MOST_SHAPES = 64, 4096  # recordings kept; shapes remembered
LEAST_ROOM = 64  # slots of a path, and between its ends; more in powers of two

_logger = logging.getLogger(__name__)
Layer = Callable[..., Tensor]
"""The forward of a decoder layer: hidden states [R, n, H] and keywords -> [R, n, H]."""
FromSight = tuple[int, PathsOf | HeadOf, Paths | Tensor]
"""The number of a mask, what layers asked the sight for, and what they got, or its home."""


@dataclass(slots=True)
class _Forward:
    """The layers' forward that is under way.

    hidden: [R, n, H]. called: the layers, and what each was given beside hidden states. angles, masks: what layers
    share, each once; given: which angles and which mask each layer was given.
    """

    hidden: Tensor
    cache: ForestCache
    sight: Sight | None
    called: list[tuple[Layer, dict[str, Any]]] = field(default_factory=list)
    angles: list[tuple[Tensor, Tensor]] = field(default_factory=list)
    masks: list[Tensor | None] = field(default_factory=list)
    given: list[tuple[int, int]] = field(default_factory=list)

    @classmethod
    def of(cls, hidden: Tensor, more: dict[str, Any]) -> _Forward | None:
        """None where the first layer is given what no recording serves."""
        cache, sight = more.get("past_key_values"), attention.current()
        if not isinstance(more.get("position_embeddings"), tuple):
            return None
        if type(cache) is not ForestCache or hidden.device.type != "cpu" or hidden.shape[:2].numel() > MOST_NODES:
            return None
        if cache.planes(0) is None or cache.under_way is None or cache.under_way.rows is not None:
            return None
        if sight is not None and (not isinstance(sight, Sight) or not tail.serves()):
            return None
        return cls(hidden, cache, sight)

    def add(self, plain: Layer, more: dict[str, Any]) -> None:
        """A layer is called."""
        self.called.append((plain, more))
        angles, mask = more.get("position_embeddings"), more.get("attention_mask")
        self.given.append((_index(self.angles, angles), _index(self.masks, mask)))

    def key(self) -> Hashable:
        """What a recording is bound to, beside the cache's memory."""
        split = None if self.sight is None else self.sight.settled
        shapes = tuple((one.shape, one.dtype) for one in self.inputs())
        return torch.get_num_threads(), split, shapes, tuple(self.given)

    def kind(self) -> Hashable:
        """What a recording's steps go by, beside sizes."""
        settled = () if self.sight is None else self.sight.settled
        return self.sight is None, bool(max(settled, default=0)), len(set(settled)) > 1, tuple(self.given)

    def plain(self) -> Tensor:
        """The layers called one by one: [R, n, H]."""
        hidden = self.hidden
        for layer, more in self.called:
            hidden = layer(hidden, **more)
        return hidden

    def inputs(self) -> list[Tensor]:
        """What has a home, beside what the sight makes. A mask is read by operations of torch where no sight knows
        it."""
        assert self.cache.under_way is not None
        masks = [mask for mask in self.masks if mask is not None and not self.knows(mask)]
        return [self.hidden, self.cache.under_way.flat, *(part for pair in self.angles for part in pair), *masks]

    def knows(self, mask: Tensor | None) -> bool:
        """Layers with this mask go by what the sight makes of it."""
        return self.sight is not None and self.sight.knows(mask)

    def homes(self) -> Iterator[FromSight]:
        """New homes of what a plain run has asked the sight for."""
        for number, mask in enumerate(self.masks):
            if self.sight is not None and mask is not None:
                for what, one in self.sight.made(mask):
                    yield number, what, _home(one, max(self.sight.settled))

    def make(self, number: int, what: PathsOf | HeadOf) -> Paths | Tensor:
        """What the sight makes of a mask."""
        mask = self.masks[number]
        assert self.sight is not None
        assert mask is not None
        return self.sight.make(mask, what)

    def swap(self, number: int, what: PathsOf | HeadOf, other: Paths | Tensor) -> Paths | Tensor:
        """As Sight.swap."""
        mask = self.masks[number]
        assert self.sight is not None
        assert mask is not None
        return self.sight.swap(mask, what, other)


def _index(known: list[Any], one: Any) -> int:
    """Where it stands among those known, by identity."""
    for place, other in enumerate(known):
        if other is one or (isinstance(one, tuple) and isinstance(other, tuple) and other[0] is one[0]):
            return place
    known.append(one)
    return len(known) - 1


@dataclass(slots=True)
class _Program:
    """A recording, and the homes of its inputs.

    blocks: memory that its steps use. used: attentions that went by the sight.
    """

    kind: Hashable
    inputs: list[Tensor]
    from_sight: list[FromSight]
    steps: list[Step]
    blocks: list[Tensor]
    result: Tensor
    used: int

    def differs(self, forward: _Forward) -> bool:
        """Nodes go to other slots than those that were loaded last, so that all else has changed, too."""
        assert forward.cache.under_way is not None
        return not torch.equal(self.inputs[1], forward.cache.under_way.flat)

    def load(self, forward: _Forward) -> bool:
        """Copy what a forward is given to its homes; False where a path is too long for its home, and the recording of
        no use any more."""
        for home, value in zip(self.inputs, forward.inputs(), strict=True):
            home.copy_(value)
        return all(_fill(home, forward.make(number, what)) for number, what, home in self.from_sight)

    def replay(self, forward: _Forward) -> Tensor:
        """[R, n, H], in memory that the next replay overwrites."""
        for step in self.steps:
            step()
        if forward.sight is not None:
            forward.sight.used += self.used
        return self.result


def _fill(home: Paths | Tensor, made: Paths | Tensor) -> bool:
    """False where it does not fit."""
    if isinstance(home, Tensor):
        assert isinstance(made, Tensor)
        home.copy_(made[..., : home.shape[-1]])
        return True
    assert isinstance(made, Paths)
    width = made.slots.shape[2]
    if width > home.slots.shape[2] or made.span > home.span:
        return False
    home.slots[:, :, :width].copy_(made.slots)
    home.counts.copy_(made.counts)
    home.bounds.copy_(made.bounds)
    return True


def _home(made: Paths | Tensor, settled: int) -> Paths | Tensor:
    """A home for it: for paths with room for longer ones, for a mask [R, 1, m, S] of its settled slots, which are
    read."""
    if isinstance(made, Tensor):
        return made[..., :settled].clone(memory_format=torch.contiguous_format)
    width, span = (max(LEAST_ROOM, 1 << (size - 1).bit_length()) for size in (made.slots.shape[2], made.span))
    slots = torch.zeros(*made.slots.shape[:2], width, dtype=made.slots.dtype, device="cpu")
    home = Paths(slots, made.counts.clone(), made.bounds.clone(), span, made.total)
    _fill(home, made)
    return home


class Replays:
    """The recordings of one model's layers over one cache. One forward at a time.

    Attributes:
        replayed: forwards that a recording served alone. slower: forwards that were recorded or compared.
    """

    def __init__(self, layers: int) -> None:
        self._layers, self.replayed, self.slower = layers, 0, 0
        self._forward: _Forward | None = None
        self._runs: Counter[Hashable] = Counter()  # by shape
        self._checked: Counter[Hashable] = Counter()  # replays of a kind that gave what a plain run gave
        self._refused: set[Hashable] = set()  # kinds
        self.forget()

    @property
    def nbytes(self) -> int:
        """Bytes of the layers' results."""
        blocks = {one.data_ptr(): one.nbytes for program in self._programs.values() for one in program.blocks}
        return max(self._arena.nbytes, sum(blocks.values()))

    def forget(self) -> None:
        """Drop all recordings: the cache's memory moves, or weights have changed."""
        self._programs: dict[Hashable, _Program] = {}
        self._arena = Arena()

    def call(self, number: int, plain: Layer, hidden: Tensor, more: dict[str, Any]) -> Tensor:
        """Layer `number` is called, in order. All run when the last one is called; until then each gives its input
        back, which must be the next one's."""
        if number == 0:
            self._forward = _Forward.of(hidden, more)
        forward = self._forward
        if forward is None:
            return plain(hidden, **more)
        if len(forward.called) != number or forward.hidden is not hidden:
            self._forward = None
            raise RuntimeError(f"layer {number} was not called after layer {number - 1}, with its result")
        forward.add(plain, more)
        if number + 1 < self._layers:
            return hidden
        self._forward = None
        return self._run(forward)

    def finish(self) -> None:
        """The model's forward has ended. Raises RuntimeError where it left layers out."""
        forward, self._forward = self._forward, None
        if forward is not None:
            raise RuntimeError(f"{len(forward.called)} of {self._layers} layers were called")

    def _run(self, forward: _Forward) -> Tensor:
        key, kind = forward.key(), forward.kind()
        program = self._programs.pop(key, None)
        sure = self._checked[kind] >= CHECKS
        if program is not None and not sure and not program.differs(forward):
            self._programs[key] = program
            return forward.plain()  # a comparison would not show what is not copied
        if program is not None and program.load(forward):
            self._programs[key] = program  # the last one now
            if not sure:
                return self._compared(kind, program, forward)
            self.replayed += 1
            return program.replay(forward)
        found = forward.plain()
        if self._runs[key] >= PLAIN_RUNS and kind not in self._refused:
            self._record(key, kind, forward)
        if len(self._runs) >= MOST_SHAPES:
            self._runs.clear()
        self._runs[key] += 1
        return found

    def _compared(self, kind: Hashable, program: _Program, forward: _Forward) -> Tensor:
        """A replay beside a plain run, which gives the result."""
        self.slower += 1
        found = program.replay(forward).clone()
        before = 0 if forward.sight is None else forward.sight.used
        wanted = forward.plain()
        if forward.sight is not None:
            forward.sight.used = before
        if torch.equal(found.view(torch.uint8), wanted.view(torch.uint8)):
            self._checked[kind] += 1
        else:
            self._refuse(kind, "a recording of them gave other bits")
        return wanted

    def _record(self, key: Hashable, kind: Hashable, forward: _Forward) -> None:
        """After a plain run, whose result stands whatever happens here."""
        self.slower += 1
        while len(self._programs) >= MOST_PROGRAMS:
            del self._programs[next(iter(self._programs))]
        try:
            # replayed in and outside of inference mode, so its memory must not belong to one
            with torch.inference_mode(False), torch.no_grad():
                self._programs[key] = self._recorded(forward)
        except UnrecordableError as error:
            self._refuse(kind, f"{error} cannot be recorded")
        except Exception as error:
            said = " ".join(f"{type(error).__name__}: {error}".split())[:160]
            self._refuse(kind, f"they cannot be recorded ({said})")

    def _refuse(self, kind: Hashable, reason: str) -> None:
        """Nothing of this kind is recorded any more."""
        _logger.warning("layers are called one by one: %s", reason)
        self._refused.add(kind)
        self._programs = {key: one for key, one in self._programs.items() if one.kind != kind}

    def _recorded(self, forward: _Forward) -> _Program:
        sight = forward.sight
        inputs = [one.clone(memory_format=torch.contiguous_format) for one in forward.inputs()]
        hidden, flat, *rest = inputs
        angles = [(rest.pop(0), rest.pop(0)) for _ in forward.angles]
        masks = [mask if mask is None or forward.knows(mask) else rest.pop(0) for mask in forward.masks]
        homes = list(forward.homes())
        recorder, before = Recorder(self._arena), 0 if sight is None else sight.used
        with _at_home(forward, flat, homes), intercept(recorder.record_kernel), recorder:
            for number, ((layer, more), (angle, mask)) in enumerate(zip(forward.called, forward.given, strict=True)):
                self._arena.begin(number)
                given = {**more, "position_embeddings": angles[angle], "attention_mask": masks[mask]}
                hidden = layer(hidden, **given)
        recorder.close()
        used = 0
        if sight is not None:
            used, sight.used = sight.used - before, before
        return _Program(forward.kind(), inputs, homes, recorder.steps, recorder.blocks, hidden, used)


@contextmanager
def _at_home(forward: _Forward, flat: Tensor, homes: Sequence[FromSight]) -> Iterator[None]:
    """Layers inside are given the homes of slots, and of what the sight makes."""
    write = forward.cache.under_way
    assert write is not None
    before, write.flat = write.flat, flat
    made = [(number, what, forward.swap(number, what, home)) for number, what, home in homes]
    try:
        yield
    finally:
        write.flat = before
        for number, what, one in made:
            forward.swap(number, what, one)


def queued(layers: int, number: int, plain: Layer) -> Layer:
    """The forward of layer `number` of so many, which runs with the others over a forest's cache."""

    def forward(hidden_states: Tensor, *args: object, **more: Any) -> Tensor:
        cache = more.get("past_key_values")
        if args or not isinstance(cache, ForestCache):
            return plain(hidden_states, *args, **more)
        if cache.replays is None:
            cache.replays = Replays(layers)
        found: Tensor = cache.replays.call(number, plain, hidden_states, more)
        return found

    return forward
