"""What `--depth auto` makes of two dozen made-up machines and pairs: steps per second, against the best fixed shape.

    python -m benchmarks.planner

No model runs and no clock is read: the seconds of a forward over n nodes are a + b n, and every request has a chance of
its own that a draft is a pair its layer needs. So the numbers are the same on every machine.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from dsbd_cli.config.method import MethodConfig
from dsbd_cli.engine.core.report import LayerCounters
from dsbd_cli.engine.planning.acceptance import Acceptance
from dsbd_cli.engine.planning.planner import AdaptivePlanner, DraftWork, Gate, Observation, Shape

__all__ = ["WORLDS", "World", "best_fixed", "planner_of", "serve", "serve_fixed"]

BEAMS, DRAFTS, DEPTH = 4, 8, 8
NEAR = 0.85  # of the best expectation; the best shape of hindsight has more than 0.99 of it in every world
METHOD = MethodConfig(num_beams=BEAMS, drafts_per_layer=DRAFTS, depth=DEPTH, adaptive_depth=True)


@dataclass(frozen=True)
class World:
    """A machine, a pair and its requests.

    Attributes:
        target, draft: seconds of a forward, fixed and per node. verify: seconds per layer. read: per prompt token.
        rates: chance of a layer to pass with as many drafts as beams, request by request in turn. later: the same from
            the middle of the run on. wide: what each further draft closes of the gap to 1.
        share: bytes of weights of the draft by those of the target; 0: the planner tries it at once.
        sure: the draft's confidence in a layer and the chance in place of the request's, one of these pairs for each
            layer of each request. Empty: the draft cannot tell.
        prompt, answer: tokens of each request. requests, rows: how many, and how many at once.
        cold: what the first iteration of a shape takes more, as a factor. setup: seconds of the very first draft.
        captured: the third iteration of a shape takes this many seconds more, and the two before it twice as long.
        room: nodes of all rows that fit into memory.
        slow: what everything takes in every other stretch of `stretch` seconds, as a factor. noise: relative spread of
            the times of iterations, which hindsight does not have.
    """

    target: tuple[float, float]
    draft: tuple[float, float]
    rates: tuple[float, ...]
    later: tuple[float, ...] = ()
    wide: float = 0.15
    share: float = 0.0
    sure: tuple[tuple[float, float], ...] = ()
    verify: float = 0.001
    read: float = 0.0
    prompt: int = 100
    answer: int = 120
    requests: int = 60
    rows: int = 1
    cold: float = 0.0
    setup: float = 0.0
    captured: float = 0.0
    room: int = 1 << 30
    slow: float = 1.0
    stretch: float = 3.0
    noise: float = 0.0


WORLDS: dict[str, World] = {
    "draft pays": World((0.05, 0.0003), (0.003, 0.0001), (0.75,)),
    "nodes are free": World((0.02, 0.0), (0.001, 0.0), (0.8,)),
    "draft hardly pays": World((0.05, 0.002), (0.006, 0.0002), (0.45,)),
    "draft never pays": World((0.05, 0.004), (0.01, 0.0005), (0.2,)),
    "draft dearer than target": World((0.01, 0.0002), (0.02, 0.0), (0.8,)),
    "1.1B on two cores": World((0.062, 0.00475), (0.005, 0.0005), (0.3,), wide=0.1, read=0.0005),
    "acceptance falls midway": World((0.05, 0.002), (0.005, 0.0002), (0.85,), later=(0.05,)),
    "acceptance rises midway": World((0.05, 0.002), (0.005, 0.0002), (0.05,), later=(0.85,)),
    "long prompts, short answers": World((0.02, 0.001), (0.001, 0.0002), (0.8,), read=0.0003, prompt=4000, answer=16),
    "long prompts, long answers": World((0.05, 0.001), (0.004, 0.0002), (0.8,), read=0.001, prompt=2000, answer=600),
    "unlike requests, one by one": World((0.05, 0.002), (0.008, 0.0002), (0.2, 0.9)),
    "unlike requests, a batch": World((0.05, 0.0003), (0.006, 0.0001), (0.1, 0.5, 0.9), rows=6),
    "batch of 16 fills the cores": World((0.05, 0.003), (0.004, 0.0003), (0.6,), rows=16, requests=96),
    "first iterations slow": World((0.03, 0.0005), (0.004, 0.0001), (0.75,), cold=4.0, setup=2.0),
    "captured as graphs": World((0.012, 0.0), (0.001, 0.0), (0.7,), captured=0.5, setup=1.0, requests=240),
    "little memory": World((0.05, 0.0003), (0.003, 0.0001), (0.75,), rows=4, room=100),
    "sure ones pay": World((0.03, 0.008), (0.004, 0.0001), (0.46,), sure=((0.2, 0.02), (0.95, 0.9)), wide=0.0),
    "sure of nothing": World((0.05, 0.002), (0.004, 0.0002), (0.1,), sure=((0.1, 0.1), (0.2, 0.1)), wide=0.02),
    "sure and wrong": World((0.05, 0.002), (0.004, 0.0002), (0.1,), sure=((0.5, 0.1), (0.95, 0.1)), wide=0.02),
    "speed changes, pays": World((0.04, 0.001), (0.005, 0.0002), (0.49,), slow=1.6, noise=0.04, answer=64),
    "speed changes, hardly pays": World((0.05, 0.002), (0.006, 0.0002), (0.45,), slow=1.6, stretch=1.0, noise=0.04),
    "speed changes, never pays": World((0.05, 0.004), (0.01, 0.0005), (0.2,), slow=1.6, noise=0.04),
    "short run": World((0.05, 0.002), (0.008, 0.0003), (0.4,), read=0.0002, answer=30, requests=8),
    "short run, never pays": World((0.05, 0.004), (0.01, 0.0005), (0.2,), read=0.0002, answer=14, requests=24, rows=8),
    # as measured: Qwen2.5-Coder 1.5B and its trimmed 0.5B in int8; a head of SmolLM2, on prompts of another kind
    "four answers, small model": World(
        (0.044, 0.0019), (0.014, 0.0011), (0.4,), wide=0.1, share=0.3, read=0.001, prompt=370, answer=48, requests=4
    ),
    "four answers, head": World(
        (0.044, 0.0019), (0.004, 0.0004), (0.05,), wide=0.03, share=0.05, read=0.0003, prompt=50, answer=48, requests=4
    ),
    "many answers, small model": World(
        (0.044, 0.0019), (0.014, 0.0011), (0.4,), wide=0.1, share=0.3, read=0.001, prompt=370, answer=48
    ),
    "many answers, good head": World((0.012, 0.0001), (0.001, 0.0), (0.75,), share=0.05, read=0.0001, answer=240),
}


def planner_of(world: World, *, gated: bool = True) -> AdaptivePlanner:
    """Return a planner that knows what an engine of this world would tell it."""
    return AdaptivePlanner(METHOD, gated=gated, draft_share=world.share)


class Chooser(Protocol):
    """What of a planner a run needs."""

    choose: Callable[..., Shape]
    gate: Callable[..., Gate | None]
    observe: Callable[..., None]
    out_of_memory: Callable[..., bool]


@dataclass(eq=False)
class _Request:
    rate: float
    left: int
    acceptance: Acceptance = field(default_factory=Acceptance)
    draft_backlog: int = 0
    has_read: bool = False


@dataclass(frozen=True, slots=True)
class Served:
    """Of a run: steps per second of the batch, and the share of its iterations that drafted."""

    goodput: float
    drafting: float


def serve(world: World, planner: Chooser, seed: int = 1) -> Served:
    """All requests of a world, with the shapes that a planner chooses."""
    rng, noise, seen = random.Random(seed), random.Random(seed), dict[tuple[Shape, int], int]()
    waiting = [_Request(rate, world.answer) for rate in _rates(world)]
    running: list[_Request] = []
    seconds, steps, iterations, drafted, first = 0.0, 0, 0, 0, True
    timed = dict[tuple[Shape, int, int, int], dict[str, float]]()
    while waiting or running:
        while waiting and len(running) < world.rows:
            running.append(waiting.pop(0))
        rows = len(running)
        shown = [request.acceptance for request in running]
        unread = world.prompt * [request.has_read for request in running].count(False)
        reading = DraftWork(_padded(max([request.draft_backlog for request in running])), unread, world.prompt * rows)
        shape = planner.choose(shown, reading)
        if shape.depth and rows * shape.nodes(BEAMS) > world.room:
            planner.out_of_memory(shape, rows)
            seconds += world.target[0]
            waiting[:0] = [_Request(request.rate, world.answer) for request in running]
            steps -= sum(world.answer - max(0, request.left) for request in running)
            running = []
            continue
        gate = planner.gate(shape, range(rows))
        layers, drafted_layers = _walks(world, shape, running, gate, rng)
        ran = shape._replace(depth=len(layers[0]))
        number = seen[ran, rows] = seen.get((ran, rows), 0) + 1
        key = ran, rows, reading.draft_backlog, drafted_layers
        times = timed[key] = timed.get(key) or _times(world, *key)
        times = _slow(world, shape, number, times)
        if world.slow > 1.0:
            factor = _pace(world, seconds) * (1 + world.noise * noise.uniform(-1, 1))
            times = {name: factor * value for name, value in times.items()}
        if shape.depth and unread:
            times = times | {"read": world.read * unread + world.setup * first}
            first = False
        read = reading if shape.depth or not reading.draft_backlog else replace(reading, draft_backlog=0)
        steady = not world.captured or number > 3
        planner.observe(Observation(shape, shown, layers, times, read, steady, gate))
        seconds, iterations, drafted = seconds + sum(times.values()), iterations + 1, drafted + (shape.depth > 0)
        for request, counters in zip(running, layers, strict=True):
            taken = 1 + sum([layer.passed for layer in counters])
            request.left, steps = request.left - taken, steps + taken
            request.draft_backlog = 0 if shape.depth else request.draft_backlog + BEAMS
            request.has_read |= shape.depth > 0
        running = [request for request in running if request.left > 0]
    return Served(steps / seconds, drafted / iterations)


def best_fixed(world: World) -> Served:
    """Of the best single shape, or of none, known in hindsight. Those that are expected to be far behind are not
    tried."""
    expected = {shape: _expected(world, shape) for shape in _fitting(world)}
    near = [shape for shape, goodput in expected.items() if goodput > NEAR * max(expected.values())]
    return max((serve_fixed(world, shape) for shape in near), key=lambda served: served.goodput)


def _fitting(world: World) -> list[Shape]:
    """All shapes that fit into memory."""
    shapes = [Shape(depth, number) for depth in range(DEPTH + 1) for number in ((4, 5, 6, 8) if depth else (DRAFTS,))]
    return [shape for shape in shapes if not shape.depth or world.rows * shape.nodes(BEAMS) <= world.room]


def _expected(world: World, shape: Shape) -> float:
    """About what `serve_fixed` finds, from the chances alone, at the machine's usual speed."""
    iterations = 0.0
    for rate in _rates(world):
        chance = rate + (1 - rate) * (1 - (1 - world.wide) ** (shape.drafts_per_layer - BEAMS))
        iterations += world.answer / sum([chance**layer for layer in range(shape.depth + 1)]) / world.rows
    seconds = iterations * sum(_times(world, shape, world.rows, 0, shape.depth).values())
    if shape.depth:
        seconds += world.requests * world.read * world.prompt + world.setup
    return world.requests * world.answer / seconds


def serve_fixed(world: World, shape: Shape) -> Served:
    """What `serve` gives with a planner that always chooses one shape, which fits into memory: without counters and
    times that nobody looks at, because hindsight tries dozens of shapes."""
    chance = random.Random(1).random
    waiting = [(rate, world.answer) for rate in reversed(_rates(world))]
    running: list[tuple[float, int]] = []
    seconds, steps, iterations, first = 0.0, 0, 0, True
    seen, usual = dict[int, int](), dict[int, float]()
    while waiting or running:
        unread = 0
        while waiting and len(running) < world.rows:
            running.append(waiting.pop())
            unread += world.prompt
        rows = len(running)
        number = seen[rows] = seen.get(rows, 0) + 1
        if number > 3 and rows in usual:
            took = usual[rows]
        else:
            took = sum(_slow(world, shape, number, _times(world, shape, rows, 0, shape.depth)).values())
            if number > 3:
                usual[rows] = took
        took *= _pace(world, seconds)
        if shape.depth and unread:
            took, first = took + (world.read * unread + world.setup * first), False
        seconds, iterations = seconds + took, iterations + 1
        left = []
        for rate, size in running:
            taken = 1 + _passes(world.wide, shape, rate, chance)
            steps += taken
            if size > taken:
                left.append((rate, size - taken))
        running = left
    return Served(steps / seconds, float(shape.depth > 0))


def _rates(world: World) -> list[float]:
    later = world.later or world.rates
    half = world.requests // 2
    return [(world.rates if i < half else later)[i % len(world.rates)] for i in range(world.requests)]


def _padded(draft_backlog: int) -> int:
    size = BEAMS
    while size < draft_backlog:
        size *= 2
    return size if draft_backlog else 0


def _times(world: World, shape: Shape, rows: int, draft_backlog: int, drafted: int) -> dict[str, float]:
    """shape: of what goes to the target; drafted: layers that were."""
    drafting = drafted * world.draft[0]
    if drafted:
        drafting += world.draft[1] * rows * (BEAMS + (drafted - 1) * shape.drafts_per_layer + draft_backlog)
    target = world.target[0] + world.target[1] * rows * shape.nodes(BEAMS)
    return {"draft": drafting, "target": target, "verify": world.verify * (1 + shape.depth)}


def _pace(world: World, seconds: float) -> float:
    """Return what times are multiplied by at a moment of the run."""
    return world.slow if seconds % (2 * world.stretch) >= world.stretch else 1.0


def _slow(world: World, shape: Shape, number: int, times: dict[str, float]) -> dict[str, float]:
    """Times of the iteration of this number, from 1, with a shape."""
    if world.captured:
        if number < 3:
            return {name: value * 2 for name, value in times.items()}
        return times | {"draft": times["draft"] + world.captured} if number == 3 and shape.depth else times
    return {name: value * (1 + world.cold) for name, value in times.items()} if number == 1 else times


def _passes(wide: float, shape: Shape, rate: float, chance: Callable[[], float]) -> int:
    """Layers that pass, by the same chances as `_walk`."""
    most, passed_layers, alive = shape.drafts_per_layer, 0, True
    for _ in range(shape.depth):
        if chance() >= rate:
            needed = BEAMS + 1
            while chance() >= wide and needed <= most:
                needed += 1
            alive = alive and needed <= most
        passed_layers += alive
    return passed_layers


def _walks(
    world: World, shape: Shape, running: list[_Request], gate: Gate | None, rng: random.Random
) -> tuple[list[list[LayerCounters]], int]:
    """Counters of all requests' layers that go to the target, and how many were drafted."""
    if gate is None or not world.sure:
        sure = [rng.choices(world.sure, k=shape.depth) if world.sure else None for _ in running]
        return [_walk(world, shape, request, rng, own) for request, own in zip(running, sure, strict=True)], shape.depth
    layers = list[list[tuple[float, float]]]()
    while len(layers) < shape.depth:
        layers.append([rng.choice(world.sure) for _ in running])
        if not gate([confidence for confidence, _ in layers[-1]]):
            break
    gated = shape._replace(depth=sum(confidence > gate.least for confidence in gate.confidences))
    return [_walk(world, gated, request, rng, own) for request, *own in zip(running, *layers, strict=True)], len(layers)


def _walk(
    world: World, shape: Shape, request: _Request, rng: random.Random, sure: Sequence[tuple[float, float]] | None
) -> list[LayerCounters]:
    """Counters of a request's layers."""
    layers, alive, chance, most, wide = [], True, rng.random, shape.drafts_per_layer, world.wide
    for number in range(shape.depth):
        rate = request.rate if sure is None else sure[number][1]
        needed = BEAMS if chance() < rate else BEAMS + 1
        while needed > BEAMS and chance() >= wide and needed <= most:
            needed += 1
        passed = alive and needed <= most
        layers.append(LayerCounters(reached=int(alive), passed=int(passed), needed=needed if passed else 0))
        alive = passed
    return layers


def main() -> None:
    """Print the table."""
    print(f"{'world':30} {'best fixed':>10} {'auto':>8} {'of it':>7} {'drafting':>9}")
    for name, world in WORLDS.items():
        best, auto = best_fixed(world), serve(world, planner_of(world))
        share = auto.goodput / best.goodput
        print(f"{name:30} {best.goodput:10.2f} {auto.goodput:8.2f} {share:7.1%} {auto.drafting:9.0%}")


if __name__ == "__main__":
    main()
