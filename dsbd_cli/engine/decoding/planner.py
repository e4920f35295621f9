"""How deep and wide to draft in the next iteration: always the same, or what measured best (goodput, arXiv 2406.14066).

Host numbers only. A planner sees what every iteration reports anyway: seconds of its phases and how far each row's walk
came. Acceptance is each request's own, times are the engine's. Depth 0 is always among the choices, so drafting that
does not pay is left alone, but for a probe now and then.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from operator import add, mul
from typing import Protocol

from dsbd_cli.config import TEXT_DRAFTERS, MethodConfig, Proposers
from dsbd_cli.engine.decoding.acceptance import Acceptance, Lives
from dsbd_cli.engine.decoding.timing import Line

__all__ = ["NOTHING", "AdaptivePlanner", "FixedPlanner", "Planner", "Reading", "Shape", "planner_for"]

LayerCounters = Sequence[dict[str, int]]

PROBE_EVERY, PROBE_AT_MOST = 64, 4096  # iterations between probes of more drafts, at least and at most
PROBE_SHARE = 0.01  # of the time goes into probes, as far as that leaves room between the two
WARM = 1  # first iterations of a shape, whose times (allocation, caches) are not believed
TRIES = 8  # iterations in which a shape that is to be timed must have given a time that is believed
BETTER = 1.02  # a change must promise so much
PAID_OFF = 32  # iterations in which what the draft has to catch up on must pay, or what a request takes if that is less
READS = 16  # readings of prompts that say how long the next takes
HOPED = 0.9  # acceptance of a draft as good as drafts get
FIRST_RATE = 0.7  # acceptance believed before anything is seen, and its weight in layers
PRIOR = 2.0
SHALLOW = 8  # layers; so few are drafted however little is left to generate
TRUST = 8.0  # weight, in layers, of what all requests showed, against what a request shows itself


@dataclass(frozen=True, slots=True)
class Shape:
    """D layers of K nodes; drafters: which of two propose them."""

    depth: int
    drafts_per_layer: int
    drafters: Proposers = "all"

    def nodes(self, num_beams: int) -> int:
        """N."""
        return num_beams + self.depth * self.drafts_per_layer

    def within(self, steps: int) -> Shape:
        """No deeper than what `steps` steps can take, rounded up to a power of two and to SHALLOW.

        Few depths are few graphs to capture. With fewer layers than steps, the rows beside a row would decide which of
        its layers are drafted.
        """
        return replace(self, depth=min(self.depth, max(SHALLOW, 1 << (steps - 1).bit_length())))


@dataclass(frozen=True, slots=True)
class Reading:
    """What a draft model has to run before it drafts.

    Attributes:
        lag: most slots of a row, past the prompt, that it has not run.
        unread: prompt tokens of all rows that it has not run. prompts: all prompt tokens of all rows.
    """

    lag: int = 0
    unread: int = 0
    prompts: int = 0


NOTHING = Reading()


class Planner(Protocol):
    """Chooses the shape of each iteration. requests: what the running rows have shown, one entry each, the same objects
    from iteration to iteration."""

    def choose(self, requests: Sequence[Acceptance], reading: Reading = NOTHING) -> Shape:
        """Shape of the next iteration."""
        ...

    def observe(
        self,
        shape: Shape,
        requests: Sequence[Acceptance],
        layers: Sequence[LayerCounters],
        seconds: dict[str, float],
        reading: Reading = NOTHING,
        steady: bool = True,
    ) -> None:
        """What an iteration did. layers: counters of every running row; seconds: of the phases draft, target and
        verify, and `read` where the draft read prompts before; reading: what it read; steady: the three phases are what
        an iteration of this shape will take again (no capture, no plain run of what will be replayed)."""
        ...

    def out_of_memory(self, shape: Shape | None, rows: int) -> bool:
        """An iteration of this shape, or what comes before one, did not fit into memory, and the running requests start
        over. True: this shape will not be chosen again for as many rows, so that they may still fit."""
        ...


class FixedPlanner:
    """The configured shape, always."""

    def __init__(self, method: MethodConfig) -> None:
        self._shape = Shape(method.depth, method.drafts_per_layer)

    def choose(self, requests: Sequence[Acceptance], reading: Reading = NOTHING) -> Shape:
        """D and K as configured."""
        return self._shape

    def observe(
        self,
        shape: Shape,
        requests: Sequence[Acceptance],
        layers: Sequence[LayerCounters],
        seconds: dict[str, float],
        reading: Reading = NOTHING,
        steady: bool = True,
    ) -> None:
        """Nothing to learn."""

    def out_of_memory(self, shape: Shape | None, rows: int) -> bool:
        """There is no other shape."""
        return False


class AdaptivePlanner:
    """Maximises expected steps per second of the batch over depths 0 .. D and a few numbers of drafts up to K.

    Steps of a shape: for each running request 1 + the sum over the shape's layers of the chance that all layers down
    to it pass, by the request's own counts, which what all requests showed is the prior of. Seconds: lines fitted to
    draft, target and remaining time against the nodes each had to run. A layer that passed with its j-th draft as the
    last one needed would have passed with j drafts, so every iteration informs on all smaller K; and one that took
    nodes of one drafter alone, on that drafter alone.
    """

    def __init__(self, method: MethodConfig) -> None:
        self._choices, self._parts = _choices(method), _parts(method)
        self._share = method.second_share if len(self._parts) > 1 else 0
        self._beams, self._depth = method.num_beams, method.depth
        most = method.drafts_per_layer
        self._shared, self._lives = Acceptance(), Lives(PAID_OFF)
        self._prompts = deque[tuple[int, float]](maxlen=READS)  # tokens and seconds
        self._has_read = False
        self._room = math.inf  # nodes of all rows that fit into memory
        self._shared.open(len(self._choices), method.depth)
        self._rates = self._shared_rates()
        self._drafts, self._target, self._rest = {part: Line() for part in self._parts}, Line(), Line()
        self._seen: dict[tuple[int, Shape], int] = {}
        # everything below that goes over shapes is a list in this order
        depths = range(1, method.depth + 1)
        self._shapes = [Shape(0, most)]
        self._shapes += [Shape(depth, drafts, part) for drafts, part in self._choices for depth in depths]
        self._costs = [
            (shape.depth, self._drafting_nodes(shape), shape.nodes(self._beams), shape.drafters)
            for shape in self._shapes
        ]
        self._now = 0
        # to begin with, shapes apart enough to tell what a node and a layer cost; the last one first
        self._untimed = [Shape(min(method.depth, 1), self._choices[0][0]), self._shapes[0]]
        self._starting, self._tries = True, 0
        self._since_probe, self._patience, self._probes = 0, PROBE_EVERY, 0
        self._probe_cost: float | None = None  # seconds, more than without; None: no probe under way

    def choose(self, requests: Sequence[Acceptance], reading: Reading = NOTHING) -> Shape:
        """The shape of the most expected steps per second."""
        rows = len(requests)
        seconds = self._seconds(rows, reading)
        if self._starting and not self._untimed:
            self._starting, self._untimed = False, self._could_pay(seconds)
        self._untimed = [shape for shape in self._untimed if self._fits(shape, rows)]
        if self._untimed:
            return self._untimed[-1]
        self._since_probe, self._probe_cost = self._since_probe + 1, None
        if self._probe_is_due(reading.lag) and self._fits(shape := self._next_probe(), rows):
            return self._probe(shape)
        goodput = [
            steps / max(time, 1e-9) if self._fits(shape, rows) else 0.0
            for shape, steps, time in zip(self._shapes, self._steps(requests), seconds, strict=True)
        ]
        best = max(goodput)
        if best > BETTER * goodput[self._now]:
            self._now, self._patience = goodput.index(best), PROBE_EVERY
        return self._shapes[self._now]

    def observe(
        self,
        shape: Shape,
        requests: Sequence[Acceptance],
        layers: Sequence[LayerCounters],
        seconds: dict[str, float],
        reading: Reading = NOTHING,
        steady: bool = True,
    ) -> None:
        """Learn from an iteration."""
        rows = len(requests)
        self._lives.see(requests)
        if "read" in seconds:
            if self._has_read:  # the first reading sets things up
                self._prompts.append((reading.unread, seconds["read"]))
            self._has_read = True
        if shape.depth:
            self._count(shape, requests, layers)
        if steady:
            times = self._seen[rows, shape] = self._seen.get((rows, shape), 0) + 1
            steady = times > WARM
        if self._untimed:  # a shape that was cut to what is left to generate was tried, but not timed
            self._tried(steady and shape == self._untimed[-1], sum(seconds.values()), self._seconds(rows)[self._now])
        if not steady:
            return
        self._target.add(rows * shape.nodes(self._beams), seconds["target"])
        self._rest.add(shape.depth, seconds["verify"])
        if shape.depth:
            nodes = self._drafting_nodes(shape) + reading.lag / shape.depth
            self._drafts[shape.drafters].add(rows * nodes, seconds["draft"] / shape.depth)

    def out_of_memory(self, shape: Shape | None, rows: int) -> bool:
        """No shape of as many nodes again, but for the roots alone."""
        self._lives.restart()
        if shape is None or not shape.depth:
            return False
        self._room, self._tries = rows * shape.nodes(self._beams) - 1, 0
        return True

    def _fits(self, shape: Shape, rows: int) -> bool:
        return not shape.depth or rows * shape.nodes(self._beams) <= self._room

    def _steps(self, requests: Sequence[Acceptance]) -> list[float]:
        """Steps that one target call of each shape is expected to yield, of all requests together."""
        rows = float(len(requests))
        found = [rows]
        own = [request for request in requests if request.reached]
        fresh = len(requests) - len(own)
        for choice, rates in enumerate(self._rates):
            alive = [fresh * chance for chance in accumulate(rates, mul)]
            prior = [TRUST * rate for rate in rates]
            for request in own:
                alive = list(map(add, alive, request.alive(choice, prior, TRUST)))
            found += list(accumulate(alive, initial=rows))[1:]
        return found

    def _seconds(self, rows: int, reading: Reading = NOTHING) -> list[float]:
        """Time that an iteration of each shape is expected to take; 0 before any was timed. What the draft would have
        to catch up on first is a cost spread over some iterations to come, and so is every further request's prompt."""
        life = self._lives.now()
        lag, read = rows * reading.lag / min(PAID_OFF, life), (reading.unread + reading.prompts) / life
        per_token = self._per_token()
        (target, per_node), (rest, per_layer) = self._target.fit(), self._rest.fit()
        lines = {part: line.fit() for part, line in self._drafts.items()}
        found = []
        for depth, drafting, nodes, part in self._costs:
            taken = max(0.0, target + rows * per_node * nodes) + max(0.0, rest + per_layer * depth)
            if depth:
                draft, per_draft = lines[part]
                if part != "second":
                    taken += lag * per_draft + read * (per_draft if per_token is None else per_token)
                taken += depth * max(0.0, draft + rows * per_draft * drafting)
            found.append(taken)
        return found

    def _per_token(self) -> float | None:
        """Seconds in which the draft reads a token of a prompt; None before it was seen."""
        return statistics.median(seconds / tokens for tokens, seconds in self._prompts) if self._prompts else None

    def _could_pay(self, seconds: Sequence[float]) -> list[Shape]:
        """The largest shape of one or two layers, of each part, that would be faster than no draft if nearly all its
        layers passed. Larger ones would be dear to try, and for nothing."""
        plain, steps = seconds[0], (1.0, 1 + HOPED, 1 + HOPED + HOPED**2)
        found = dict[Proposers, Shape]()
        for shape, time in zip(self._shapes[1:], seconds[1:], strict=True):
            if shape.depth < len(steps) and steps[shape.depth] * plain > time:
                known = found.setdefault(shape.drafters, shape)
                found[shape.drafters] = max(known, shape, key=lambda item: item.nodes(self._beams))
        return list(found.values())

    def _probe_is_due(self, lag: int) -> bool:
        """A probe waits, up to as long again, for a moment when the draft has little to catch up on."""
        waited = self._since_probe - self._patience
        return waited >= 0 and (lag <= 4 * self._beams or waited >= self._patience)

    def _next_probe(self) -> Shape:
        """The most drafts there are, at the present depth and a layer deeper, of the drafters in turn."""
        turn, part = divmod(self._probes, len(self._parts))
        depth = min(self._shapes[self._now].depth + turn % 2, self._depth)
        return Shape(max(1, depth), self._shapes[0].drafts_per_layer, self._parts[part])

    def _probe(self, shape: Shape) -> Shape:
        self._since_probe, self._probe_cost, self._probes = 0, 0.0, self._probes + 1
        self._untimed.append(shape)
        return shape

    def _tried(self, timed: bool, taken: float, plain: float) -> None:
        """An iteration of the shape that is to be timed. taken, plain: seconds of it, and of one of the present shape.
        The dearer a probe was, the longer until the next."""
        self._tries += 1
        if self._probe_cost is not None:
            self._probe_cost += taken - plain
        if not timed and self._tries < TRIES:
            return
        self._untimed.pop()
        self._tries = 0
        if self._probe_cost is not None:
            share = self._probe_cost / max(PROBE_SHARE * plain, 1e-9)
            self._patience, self._probe_cost = round(min(max(share, PROBE_EVERY), PROBE_AT_MOST)), None

    def _drafting_nodes(self, shape: Shape) -> float:
        """Nodes per draft call of one row: the roots, then K per further layer."""
        return (self._beams + (shape.depth - 1) * shape.drafts_per_layer) / max(1, shape.depth)

    def _count(self, shape: Shape, requests: Sequence[Acceptance], layers: Sequence[LayerCounters]) -> None:
        informed = self._informed(shape)
        for request in requests:
            request.open(len(self._choices), self._depth)
        for depth in range(shape.depth):
            passed = [0] * len(self._choices)
            came = 0
            for request, counters in zip(requests, layers, strict=True):
                layer = counters[depth]
                if not layer["reached"]:
                    continue
                came += 1
                for at, drafts, unused in informed:
                    held = layer["passed"] and layer["needed"] <= drafts and (not unused or _held(layer, unused))
                    passed[at] += held
                    request.add(at, depth, 1.0, held)
            if not came:
                break
            for at, _, _ in informed:
                self._shared.add(at, depth, came, passed[at])
        self._rates = self._shared_rates()

    def _informed(self, shape: Shape) -> list[tuple[int, int, Proposers | None]]:
        """Choices that an iteration of this shape tells about: their number, how many drafts of the first drafter (or
        of the only one) the layer may have needed, and which drafter must have done without the other."""
        most, share, found = shape.drafts_per_layer, self._share, list[tuple[int, int, Proposers | None]]()
        for at, (drafts, part) in enumerate(self._choices):
            if part == shape.drafters:
                if drafts <= most:
                    found.append((at, drafts - share if part == "all" else drafts, None))
            elif shape.drafters == "all" and (drafts <= most - share if part == "first" else drafts >= most):
                found.append((at, drafts, part))
        return found

    def _shared_rates(self) -> list[list[float]]:
        return [self._shared.rates(at, FIRST_RATE, PRIOR) for at in range(len(self._choices))]


def _held(layer: dict[str, int], alone: Proposers) -> int:
    """The layer needed nodes of this drafter only."""
    return not layer["accepted_second"] if alone == "first" else layer["held_second"]


def _parts(method: MethodConfig) -> tuple[Proposers, ...]:
    """Which drafters may take part: both, or one of them. The second one stands for the first where it does without
    the model that the first one runs; threshold width needs the law that the first one records."""
    names = method.drafter_names
    if len(names) == 1:
        return ("all",)
    return ("all", "first", "second") if names[1] in TEXT_DRAFTERS and method.width == "fixed" else ("all", "first")


def _choices(method: MethodConfig) -> list[tuple[int, Proposers]]:
    """Numbers of drafts, and who proposes them."""
    # fewer drafts than beams would be fast, but never let a layer keep all its beams
    least, most = min(method.num_beams, method.drafts_per_layer), method.drafts_per_layer
    numbers = sorted({round(least * (most / least) ** (i / 3)) for i in range(4)} | {most})
    found = list[tuple[int, Proposers]]()
    for part in _parts(method):
        room = method.second_share + 1 if part == "all" and len(_parts(method)) > 1 else 1
        found += [(drafts, part) for drafts in numbers if drafts >= room]
    return found


def planner_for(method: MethodConfig) -> Planner:
    """The planner that a method asks for."""
    return AdaptivePlanner(method) if method.adaptive_depth and method.depth else FixedPlanner(method)
