"""Planners: they choose how many layers and drafts the next iteration has, either always the same numbers or what
measured best (goodput, arXiv 2406.14066).

A planner uses numbers on the host alone, which every iteration reports anyway: seconds of its phases, and which layers
of each row passed.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np

from dsbd_cli.config.method import MAX_AUTO_DEPTH, MethodConfig
from dsbd_cli.config.variants import GRAMMAR, SUFFIX
from dsbd_cli.engine.core.report import LayerCounters
from dsbd_cli.engine.planning.acceptance import PRIOR, SHARED_WEIGHT, Acceptance, Numbers, PassRates, RequestLengths
from dsbd_cli.engine.planning.timing import FORGOTTEN, UNIT_SHARE, FittedLine, RelativeTimes

FIRST_LIFE = 32  # iterations that a request is assumed to take, before any has ended
SWITCH_FACTOR = 1.02  # factor by which the goodput of another shape must exceed that of the present one
PROBE_SHARE = 0.01  # largest share of the time that goes into probes
PROBE_EVERY = 32  # least number of iterations between probes
WEIGHED_EVERY = 4  # iterations without drafts, which teach little, until drafts are weighed again
LEAST_DEPTH = 8  # layers; the depth is not cut below this, however little is left to generate
ASSUMED_FIXED_NODES = 32  # nodes that are assumed to cost as much as an iteration without nodes, before one is timed
CONFIDENCES = (0.0, 0.5, 0.7, 0.85)  # least confidences to choose from
FIRST_TRY = 8  # iterations without drafts that the first tries are assumed to cost, without the draft's own calls
CHANCES = np.array((0.05, 0.1, 0.2, 0.35, 0.5, 0.7, 0.9))  # bounds between layers of like chances
# least gain, with one beam and with several, of look-ups that are drafted: the best of many shapes is the one whose
# chances are too high, above all where those of several beams are joined
LEAST_GAIN, LEAST_OF_SEVERAL = 1.04, 1.1
FIRST_LOOK_UPS = 8  # that are made whatever they cost
LOOK_UP_SHARE, SHARE_OF_SEVERAL = 0.015, 0.005  # of all time that they may take, with one beam and with several
SAVED_SHARE = 0.1  # of what look-ups have saved that further ones may take
MOST_LOOK_UPS = 64  # that may be saved for later
MOST_PRICE = 4.0  # of a look-up, in usual ones: something else has taken the time beyond
SEVERAL_BEAMS = 0.55  # power of the product of the chances of several beams that is the chance of all
TRIES = 8  # iterations after which a shape that is to be timed is given up without a usable time


class Shape(NamedTuple):
    """At most D layers of K nodes. least_confidence: a layer must be above it to go to the target. The first layer that
    is not ends the forest. looked_up: of two drafters the second one alone drafts, so the draft model rests."""

    depth: int
    drafts_per_layer: int
    least_confidence: float = 0.0
    looked_up: bool = False

    @property
    def runs_draft(self) -> bool:
        """True where a draft model, if there is one, drafts."""
        return self.depth > 0 and not self.looked_up

    def nodes(self, num_beams: int) -> int:
        """Return N for the case that all layers go to the target."""
        return num_beams + self.depth * self.drafts_per_layer

    def per_call(self, num_beams: int) -> float:
        """Return the mean number of nodes in a draft call: the roots, then K per further layer. The depth is 1 or
        more."""
        return (num_beams + (self.depth - 1) * self.drafts_per_layer) / self.depth

    def within(self, steps: int) -> Shape:
        """Return the shape cut to the depth that `steps` steps can use, where `steps` is rounded up to a power of two
        and to LEAST_DEPTH.

        Fewer different depths mean fewer graphs to capture. It is never cut below `steps`, because the other rows of
        the batch would then decide which layers of a row are drafted.
        """
        return self._replace(depth=min(self.depth, max(LEAST_DEPTH, 1 << (steps - 1).bit_length())))


def deepest(method: MethodConfig, steps: int) -> Shape:
    """Return the largest shape that an iteration can have where `steps` steps are left."""
    return Shape(method.depth, method.drafts_per_layer).within(steps)


@dataclass(slots=True)
class Gate:
    """The decision in the middle of an iteration, layer by layer, of whether drafts go to the target.

    Attributes:
        least: what the confidence of a layer must be above. rows: the running rows. confidences: of all layers that
            were drafted, each the mean over the rows.
    """

    least: float
    rows: Sequence[int]
    confidences: list[float] = field(default_factory=list)

    def __call__(self, confidence: Sequence[float]) -> bool:
        """Return whether a layer goes to the target. confidence: of the layer, by row."""
        self.confidences.append(sum(confidence[row] for row in self.rows) / len(self.rows))
        return self.confidences[-1] > self.least


@dataclass(frozen=True, slots=True)
class DraftWork:
    """Work that a draft model has to do before it drafts.

    Attributes:
        draft_backlog: upper bound of the slots of a row, past the prompt, that it has not run.
        unread: prompt tokens of all rows that it has not run. prompts: prompt tokens of all rows, without those that
            were copied from other rows.
    """

    draft_backlog: int = 0
    unread: int = 0
    prompts: int = 0


NOTHING = DraftWork()


@dataclass(frozen=True, slots=True)
class Observation:
    """Record of an iteration, from which a planner learns.

    Attributes:
        shape: the shape that was chosen for it. requests: of the running rows. layers: counters of each of these rows.
        seconds: of the phases draft, target and verify, and `read` where the draft read prompts before.
        reading: the draft's work before the iteration.
        steady: the three phases took the time that an iteration of this shape will take again (no capture, no plain run
            of what will be replayed).
        gate: that of the iteration.
        looked_up_s: seconds of `draft` in which the drafter foresaw which layers pass.
    """

    shape: Shape
    requests: Sequence[Acceptance]
    layers: Sequence[Sequence[LayerCounters]]
    seconds: dict[str, float]
    reading: DraftWork = NOTHING
    steady: bool = True
    gate: Gate | None = None
    looked_up_s: float = 0.0


class Planner:
    """Chooser of the shape of each iteration; this class always takes the configured one. requests: what was observed
    of each running request, the same objects from iteration to iteration. foresees: before the iteration that was
    chosen last it asks the drafter for prospects.
    """

    foresees: bool = False

    def __init__(self, method: MethodConfig) -> None:
        self._configured = Shape(method.depth, method.drafts_per_layer)

    def choose(self, requests: Sequence[Acceptance], reading: DraftWork = NOTHING) -> Shape:
        """Return the shape of the next iteration."""
        return self._configured

    def cut(self, shape: Shape, prospects: Prospects, requests: Sequence[Acceptance]) -> Shape:
        """Return the shape within this one that is worth drafting. requests: of the running rows, in the order of the
        prospects."""
        return shape

    def gate(self, shape: Shape, rows: Sequence[int]) -> Gate | None:
        """Return what decides during an iteration of this shape which layers go to the target; None: all do. rows: the
        running rows."""
        return None

    def observe(self, seen: Observation) -> None:
        """Learn from what an iteration did."""

    def out_of_memory(self, shape: Shape | None, rows: int) -> bool:
        """Learn that an iteration of this shape, or the work before one, did not fit into memory. The running requests
        start over. Return True where this shape will not be chosen again for as many rows, so that they may still
        fit."""
        return False


class Prospects(NamedTuple):
    """Chances that the layers of the next forest pass, as a drafter foresees them.

    Attributes:
        counts: [C], numbers of drafts per layer. chances: [rows, C, D], of each running row, that a layer and all above
            it pass with so many drafts.
    """

    counts: Sequence[int]
    chances: Numbers


class ProspectPlanner(Planner):
    """Planner for a drafter that foresees which layers will pass. It takes the shape of the most expected steps per
    second. The chances are corrected by how often layers of like chances passed, in all rows, and then in this one.

    Look-ups take time, also where nothing repeats. So where the last iteration saved nothing, the next look-up waits
    until a share of the time, and of what look-ups have saved so far, pays for it. The first ones are free.

    Attributes:
        gain: steps per second of the shape that `cut` returned last, as expected, by those without drafts.
    """

    def __init__(self, method: MethodConfig, *, alone: bool = True) -> None:
        """alone: there is no draft model, so an iteration without look-ups has no drafts."""
        super().__init__(method)
        self._alone, self._beams, self._times = alone, method.num_beams, RelativeTimes()
        # the beams of a row go on alike, so more of their layers pass than if each had a chance of its own
        one, self._costs = method.num_beams == 1, SUFFIX in method.drafter_names  # what a grammar forces is certain
        self._exponent, self._least_gain = (1.0, LEAST_GAIN) if one else (SEVERAL_BEAMS, LEAST_OF_SEVERAL)
        self._least_gain = self._least_gain if self._costs else 1.0
        self._share = LOOK_UP_SHARE if one else SHARE_OF_SEVERAL
        self._has_run = set[tuple[int, Shape]]()
        # foreseen and real passes by like chances, of layers of any depth
        self._all = Acceptance(np.zeros((2, 1, len(CHANCES) + 1)))
        self._foreseen = np.zeros((0, 0))  # [rows, D] chance that a layer passes if those above it do
        self._most_nodes = math.inf  # most nodes of all rows that fit into memory
        self._drafted = 0  # iterations with drafts
        self.gain = 1.0
        self._look_ups, self._look_up_s, self._budget_s, self._goes_on = 0, math.inf, 0.0, False

    def choose(self, requests: Sequence[Acceptance], reading: DraftWork = NOTHING) -> Shape:
        """Return the widest shape, or no drafts where a look-up is not paid for."""
        free = not self._costs or self._goes_on or self._look_ups < FIRST_LOOK_UPS
        self.foresees = free or self._budget_s >= self._look_up_s
        return self._configured if self.foresees else Shape(0, self._configured.drafts_per_layer)

    def pay(self, seen: Observation, saved_s: float = 0.0) -> None:
        """Count what look-ups cost and save. saved_s: by an iteration that drafted them."""
        assert self._all.counts is not None
        self._all.counts *= FORGOTTEN  # so that what did not pass is tried again
        self._goes_on = saved_s > 0
        if self.foresees and self._look_ups < FIRST_LOOK_UPS:  # the first of all takes longer
            self._look_ups, self._look_up_s = self._look_ups + 1, min(self._look_up_s, seen.looked_up_s)
        elif self.foresees:
            price_s = min(seen.looked_up_s, MOST_PRICE * self._look_up_s)
            self._look_up_s += UNIT_SHARE * (price_s - self._look_up_s)
            self._budget_s = max(self._budget_s - price_s, -FIRST_LOOK_UPS * self._look_up_s)
        earned_s = self._share * sum(seen.seconds.values()) + SAVED_SHARE * max(0.0, saved_s)
        self._budget_s = min(self._budget_s + earned_s, MOST_LOOK_UPS * self._look_up_s)

    def cut(self, shape: Shape, prospects: Prospects, requests: Sequence[Acceptance]) -> Shape:
        """Return the shape of the most expected steps per second."""
        rows, depth, chances = len(requests), prospects.chances.shape[2], prospects.chances
        if self._alone and self._drafted >= TRIES and not self._times.knows(rows * self._beams):
            # an iteration without drafts is needed to tell what drafts cost
            self.gain = 1.0
            return Shape(0, shape.drafts_per_layer)
        above = np.concatenate((np.ones_like(chances[..., :1]), chances[..., :-1]), 2)
        foreseen = np.divide(chances, above, out=np.zeros_like(chances), where=above > 0) ** self._exponent
        own = np.array([self._of_row(request) for request in requests])[:, None, None]
        corrected = foreseen * self._of_all()[np.searchsorted(CHANCES, foreseen)] * own
        steps = rows + np.minimum(1.0, corrected).cumprod(2).sum(0).cumsum(1)
        counts, layers = np.array(prospects.counts)[:, None], np.arange(1, depth + 1)
        nodes = rows * np.concatenate(([self._beams], (self._beams + counts * layers).ravel()))
        steps = np.concatenate(([rows], steps.ravel()))
        goodput = np.where(nodes <= self._most_nodes, steps / self._times.at(nodes), 0.0)
        goodput[1:][steps[1:] <= rows] = 0.0  # nothing is drafted there
        best = int(goodput.argmax())
        self.gain = float(goodput[best] / goodput[0]) if best else 1.0
        if best == 0 or self.gain < self._least_gain:
            self.gain = 1.0
            return Shape(0, shape.drafts_per_layer)
        choice, last = divmod(best - 1, depth)
        self._foreseen = foreseen[:, choice, : last + 1]
        return Shape(last + 1, int(prospects.counts[choice]))

    def _of_all(self) -> Numbers:
        """Return the real by the foreseen number of layers that passed, of all rows, by like chances: [CHANCES + 1]."""
        assert self._all.counts is not None
        expected, passed = self._all.counts.sum(1)
        ratios: Numbers = (passed + PRIOR) / (expected + PRIOR)
        return ratios

    def _of_row(self, request: Acceptance) -> float:
        """Return the same of one row after the correction for all rows, over all chances together."""
        if request.counts is None:
            return 1.0
        expected, passed = request.counts.sum(1)
        return float((passed.sum() + SHARED_WEIGHT) / ((expected * self._of_all()).sum() + SHARED_WEIGHT))

    def observe(self, seen: Observation) -> None:
        """Learn what nodes cost, and how often layers pass. The time of a shape that runs for the first time is not
        used."""
        rows, shape, seconds = len(seen.requests), seen.shape, sum(seen.seconds.values()) - seen.looked_up_s
        self.time(rows, shape, seconds, steady=seen.steady)
        plain_s = self._times.unit * float(self._times.at(np.array([rows * self._beams]))[0])
        passed = sum(layer.passed for counters in seen.layers for layer in counters) / max(1, rows)
        self.pay(seen, (1 + passed) * plain_s - seconds if shape.depth and plain_s else 0.0)
        if not shape.depth:
            return
        self._drafted += 1
        sums: tuple[Numbers, Numbers] | None = None
        for request, counters, foreseen in zip(seen.requests, seen.layers, self._foreseen, strict=True):
            counts = np.array([(layer.reached, layer.passed) for layer in counters], float)  # [layers, 2]
            like = np.searchsorted(CHANCES, foreseen)[: len(counts), None] == np.arange(len(CHANCES) + 1)
            layers = (counts[:, 0] * foreseen[: len(counts)])[:, None] * like
            expected, passed = layers.sum(0, keepdims=True), ((layers > 0) * counts[:, 1:]).sum(0, keepdims=True)
            request.add(expected, passed, 1)
            sums = (sums[0] + expected, sums[1] + passed) if sums else (expected, passed)
        if sums:
            self._all.add(*sums, 1)

    def time(self, rows: int, shape: Shape, seconds: float, *, steady: bool) -> None:
        """Learn what an iteration of as many nodes takes, without a draft model. The time of a shape that runs for the
        first time, or that is not steady, is not used."""
        if steady and (rows, shape) in self._has_run:
            self._times.add(rows * shape.nodes(self._beams), seconds)
        self._has_run.add((rows, shape))

    def out_of_memory(self, shape: Shape | None, rows: int) -> bool:
        """Exclude all shapes of as many nodes, except the roots alone."""
        if shape is None or not shape.depth:
            return False
        self._most_nodes = rows * shape.nodes(self._beams) - 1
        return True


class AdaptivePlanner(Planner):
    """Planner that takes the shape of the most expected steps per second: no drafts, or 1 .. D layers with one of a few
    numbers of drafts up to K. It may also choose a least confidence, below which layers do not go to the target.

    Steps: each request yields 1 + the sum over the layers of the chance that all layers down to it pass. A layer that
    needed j drafts would have passed with j, so every iteration informs on all smaller K. Seconds: lines fitted to the
    times of a draft call and of the rest, over the number of nodes. A probe has K drafts per layer, and is as deep as
    the present shape or a layer deeper. It is made when PROBE_SHARE of the time since the last probe pays for it.

    With one beam drafts are tried at once. With several a draft model seldom pays, so a run of a few answers would lose
    what trying costs: the first try waits until PROBE_SHARE of the time pays for it, too.

    Attributes:
        gain: steps per second of the shape that was chosen last, as expected, by those without drafts; infinite where
            the shape is to be timed.
    """

    def __init__(self, method: MethodConfig, *, gated: bool = False, draft_share: float = 0.0) -> None:
        """gated: the drafter can be stopped while it drafts, by a gate. draft_share: bytes of weights that a call of
        the draft model reads, by those of the target; 0: there is no such model."""
        super().__init__(method)
        self._beams, most = method.num_beams, method.drafts_per_layer
        # fewer drafts than beams would be fast, but never let a layer keep all its beams
        least = min(self._beams, most)
        numbers = sorted({round(least * (most / least) ** (i / 3)) for i in range(4)} | {most})
        second = method.second_share if len(method.drafter_names) == 2 else 0
        numbers = [number for number in numbers if number > second]
        self._gated, confidences = gated, CONFIDENCES if gated else CONFIDENCES[:1]
        self._plain = self._now = Shape(0, most)
        self._shapes = [self._plain] + [
            Shape(depth, number, confidence)
            for confidence in confidences
            for number in numbers
            for depth in range(1, method.depth + 1)
        ]
        self._index = {shape: place for place, shape in enumerate(self._shapes)}
        self._nodes = np.array([shape.nodes(self._beams) for shape in self._shapes])  # at most
        self._numbers = np.array(numbers)[:, None]
        self._rates, self._lengths = PassRates(numbers, method.depth, second, confidences), RequestLengths(FIRST_LIFE)
        # times of a draft call, of target and verify, of reading prompts
        self._draft_line, self._target_line, self._prompt_line = FittedLine(), FittedLine(), FittedLine()
        self._has_run = set[tuple[int, Shape] | None]()  # rows and shapes; None: the draft has read prompts
        self._most_nodes = math.inf  # most nodes of all rows that fit into memory
        first, waits = Shape(1, numbers[len(numbers) // 2]), draft_share > 0 and self._beams > 1
        self._draft_share, self._waiting = draft_share, first if waits else None
        # shapes to be timed, the last one first
        self._untimed, self._tries = [self._plain] if waits else [first, self._plain], 0
        self._probe_budget_s, self._probes, self._probing = 0.0, 0, False
        self._idle = 0  # iterations since the last one with drafts
        self.gain = 1.0

    def choose(self, requests: Sequence[Acceptance], reading: DraftWork = NOTHING) -> Shape:
        """Return the shape of the most expected steps per second, or one that is to be timed."""
        self.gain = 1.0
        if self._idle % WEIGHED_EVERY and not self._untimed:
            return self._plain
        rows, life = len(requests), self._lengths.now()
        seconds = self._seconds(rows)
        _, per_node = self._draft_line.fit()
        draft_backlog = rows * reading.draft_backlog * per_node
        per_token = self._prompt_line.y / self._prompt_line.x if self._prompt_line.x else per_node
        self._untimed = [shape for shape in self._untimed if self._fits(shape, rows)]
        now = seconds[self._index[self._now]]
        if self._waiting is not None and not self._untimed:
            behind = reading.unread + rows * reading.draft_backlog
            price = now * (FIRST_TRY + self._draft_share * (2 + behind / ASSUMED_FIXED_NODES))
            if not self._target_line.weight or self._probe_budget_s < price:
                return self._plain
            self._untimed, self._waiting, self._probing = [self._waiting], None, True
        elif not self._untimed and now < math.inf:
            most_layers, most = self._shapes[-1][:2]
            # every other probe is a layer deeper
            probe = Shape(min(max(1, self._now.depth + self._probes % 2), most_layers), most)
            price = seconds[self._index[probe]] + draft_backlog + reading.unread * per_token - now
            if self._probe_budget_s >= max(price, PROBE_EVERY * PROBE_SHARE * now):
                self._untimed, self._probing, self._probes = [probe], True, self._probes + 1
        if self._untimed:
            self.gain = math.inf
            return self._untimed[-1]
        # the cost of catching up is spread over the iterations to come, and so is that of reading each prompt
        spread = draft_backlog / min(FIRST_LIFE, life) + (reading.unread + reading.prompts) * per_token / life
        seconds[1:] += spread
        goodput = np.concatenate(([rows], self._rates.steps(requests).ravel())) / seconds
        best = int(goodput.argmax())
        if goodput[best] > SWITCH_FACTOR * goodput[self._index[self._now]]:
            self._now = self._shapes[best]
        self.gain = float(goodput[self._index[self._now]] / goodput[0])
        return self._now

    def gate(self, shape: Shape, rows: Sequence[int]) -> Gate | None:
        """Return what decides during an iteration of this shape which layers go to the target."""
        return Gate(shape.least_confidence, rows) if self._gated and shape.depth else None

    def observe(self, seen: Observation, *, rested: bool = False) -> None:
        """Learn from an iteration. A shape that runs for the first time allocates memory and fills caches, so its time
        is not used. rested: another planner chose the iteration."""
        shape, layers, seconds, reading = seen.shape, seen.layers, seen.seconds, seen.reading
        rows, self._idle = len(seen.requests), 0 if shape.depth else self._idle + (not rested)
        self._lengths.see(seen.requests)
        confidences = (seen.gate and seen.gate.confidences) or None  # without confidences all layers go to the target
        self._rates.count(seen.requests, layers, shape.drafts_per_layer, shape.least_confidence, confidences)
        if "read" in seconds:
            if None in self._has_run:
                self._prompt_line.add(reading.unread, seconds["read"])
            self._has_run.add(None)
        ran = Shape(len(layers[0]) if layers else 0, shape.drafts_per_layer)
        drafted = ran._replace(depth=max(ran.depth, len(confidences or ())))
        steady = seen.steady and {(rows, ran), (rows, drafted)} <= self._has_run
        self._has_run |= {(rows, ran), (rows, drafted)}
        if steady:
            self._target_line.add(rows * ran.nodes(self._beams), seconds["target"] + seconds["verify"])
        if steady and drafted.depth:
            nodes = rows * (drafted.per_call(self._beams) + reading.draft_backlog / drafted.depth)
            self._draft_line.add(nodes, seconds["draft"] / drafted.depth)
        taken = sum(seconds.values())
        if not self._untimed:
            self._probe_budget_s += PROBE_SHARE * taken
            return
        if self._probing:
            self._probe_budget_s = min(self._probe_budget_s, 0.0) - taken + self._seconds(rows)[self._index[self._now]]
        self._tries += 1
        # a shape that was cut to what is left to generate was tried, but not timed
        if (steady and shape == self._untimed[-1]) or self._tries == TRIES:
            self._untimed.pop()
            self._tries, self._probing = 0, False

    def out_of_memory(self, shape: Shape | None, rows: int) -> bool:
        """Exclude all shapes of as many nodes, except the roots alone."""
        self._lengths.restart()
        if shape is None or not shape.depth:
            return False
        self._most_nodes, self._tries = rows * shape.nodes(self._beams) - 1, 0
        return True

    def _fits(self, shape: Shape, rows: int) -> bool:
        return not shape.depth or rows * shape.nodes(self._beams) <= self._most_nodes

    def _seconds(self, rows: int) -> Numbers:
        """Return the expected time of an iteration of each shape, without the time that the draft needs to catch up;
        infinite where it does not fit into memory."""
        (rest, per_node), (call, per_draft) = self._target_line.fit(), self._draft_line.fit()
        per_node, per_draft = rows * per_node, rows * per_draft
        reach_target = self._rates.reach_target()
        # layers: expected number that go to the target; the first one is always drafted
        # drafted_below: expected number that are drafted below one that goes to the target
        layers = reach_target.cumsum(1)[:, None]
        drafted_below = layers - reach_target[:, None]
        target = rest + per_node * (self._beams + self._numbers * layers)
        draft = call * (1 + drafted_below) + per_draft * (self._beams + self._numbers * drafted_below)
        drafting = np.maximum(0.0, target) + np.maximum(0.0, draft)
        seconds = np.concatenate(([rest + per_node * self._beams], drafting.ravel())).clip(1e-9)
        if self._most_nodes < math.inf:
            seconds[1:][rows * self._nodes[1:] > self._most_nodes] = math.inf
        return seconds


class LookUpsFirst(Planner):
    """Planner for a draft model and a second drafter that foresees which layers will pass. Where its look-ups promise
    more steps per second than drafts of the model, they are the whole forest, and the model rests."""

    def __init__(self, method: MethodConfig, model: AdaptivePlanner) -> None:
        """model: chooses where the draft model drafts."""
        super().__init__(method)
        self._model, self._look_ups = model, ProspectPlanner(method, alone=False)

    def choose(self, requests: Sequence[Acceptance], reading: DraftWork = NOTHING) -> Shape:
        """Return the shape that is best for the draft model."""
        self._look_ups.choose(requests)
        self.foresees = self._look_ups.foresees
        return self._model.choose(requests, reading)

    def cut(self, shape: Shape, prospects: Prospects, requests: Sequence[Acceptance]) -> Shape:
        """Return this shape, or that of look-ups where they promise more."""
        look_ups = self._look_ups.cut(shape, prospects, [request.look_ups() for request in requests])
        better = look_ups.depth > 0 and self._look_ups.gain > self._model.gain
        return look_ups._replace(looked_up=True) if better else shape

    def gate(self, shape: Shape, rows: Sequence[int]) -> Gate | None:
        """Return the gate of the draft model."""
        return None if shape.looked_up else self._model.gate(shape, rows)

    def observe(self, seen: Observation) -> None:
        """Learn from an iteration. To the planner of the model look-ups are an iteration without drafts that cannot be
        timed."""
        if seen.shape.looked_up:
            own = [request.look_ups() for request in seen.requests]
            self._look_ups.observe(replace(seen, requests=own))
            plain = Shape(0, seen.shape.drafts_per_layer)
            self._model.observe(replace(seen, shape=plain, layers=[() for _ in own], steady=False), rested=True)
            return
        seconds = seen.seconds | {"draft": seen.seconds["draft"] - seen.looked_up_s}
        self._model.observe(replace(seen, seconds=seconds))
        self._look_ups.pay(seen)
        ran = seen.shape._replace(depth=len(seen.layers[0]) if seen.layers else 0)
        taken = seen.seconds["target"] + seen.seconds["verify"]
        self._look_ups.time(len(seen.requests), ran, taken, steady=seen.steady)

    def out_of_memory(self, shape: Shape | None, rows: int) -> bool:
        """Exclude all shapes of as many nodes, except the roots alone."""
        self._look_ups.out_of_memory(shape, rows)
        return self._model.out_of_memory(shape, rows)


def planner_for(method: MethodConfig, *, gated: bool = False, draft_share: float = 0.0) -> Planner:
    """Return the planner that a method asks for. gated: an iteration can ask a gate in its middle. draft_share: see
    AdaptivePlanner."""
    if method.depth and (method.drafter == GRAMMAR or (method.drafter == SUFFIX and method.adaptive_depth)):
        return ProspectPlanner(method)
    if method.adaptive_depth and method.depth:
        if not method.looks_up_first:
            return AdaptivePlanner(method, gated=gated, draft_share=draft_share)
        shallower = replace(method, depth=min(method.depth, MAX_AUTO_DEPTH))
        return LookUpsFirst(method, AdaptivePlanner(shallower, gated=gated, draft_share=draft_share))
    return Planner(method)
