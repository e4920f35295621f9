"""A whole profile: measurements of the setting in use and of some neighbours, and what follows from them."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace

import torch

from dsbd_cli.config.method import MethodConfig
from dsbd_cli.config.variants import TREE
from dsbd_cli.engine.decoding.encode import Encoder
from dsbd_cli.engine.planning.timing import FittedLine
from dsbd_cli.engine.protocols import ForestInput, ForestModel
from dsbd_cli.errors import RowError, UsageError, plural
from dsbd_cli.lab.metrics.memory import synchronise
from dsbd_cli.lab.profiling import advice
from dsbd_cli.lab.profiling.budget import CutOffError, Expected
from dsbd_cli.lab.profiling.machine import describe_machine, machine_rates
from dsbd_cli.lab.profiling.measurements import EngineMeasurement, ProfiledPair, method_for, phases_of, setting_of
from dsbd_cli.lab.profiling.snapshot import Snapshot
from dsbd_cli.lab.reports.profile_data import (
    NO_DRAFT,
    DepthRate,
    DrafterRate,
    ForestSize,
    MeasuredSetting,
    Profile,
    Roofline,
    ShownForest,
    TargetForward,
    spread_of,
)
from dsbd_cli.models.forest_model import size_of
from dsbd_cli.requests import Request
from dsbd_cli.stats import RequestStats

SLOT_STEP = 32
MEASUREMENT_SHARE = 0.2  # of the time, for one at most; texts that end early and drafts that pass take less
FEWER_TOKENS = (16, 4)


def take_profile(
    bench: ProfiledPair,
    method: MethodConfig,
    repeats: int,
    command: str,
    render: Callable[[ForestSize], str],
    show: int | None = None,
) -> Profile | None:
    """Measure what the budget of `bench` has time for, the most valuable parts first. Return None where it was stopped
    before the first measurement.

    repeats: rounds of measurements, at most. render: returns a command line that uses a setting. show: number of the
    iteration to be shown, from 1.

    Raises DsbdError where a prompt cannot be decoded, UsageError where --show asks for an iteration that there is not.
    """
    bench.budget.start()
    session = _Session(bench, method)
    with suppress(CutOffError):
        session.measure(repeats, show)
    return session.profile(command, render)


class _Session:
    """The measurements of a profile so far."""

    def __init__(self, bench: ProfiledPair, method: MethodConfig) -> None:
        self._bench, self._budget, self._method = bench, bench.budget, method
        self._now = setting_of(method)
        self._machine = describe_machine(bench.target.device)
        self._forest: ShownForest | None = None
        self._first: EngineMeasurement | None = None
        self._roofline: Roofline | None = None
        self._measured_once: dict[ForestSize, EngineMeasurement] = {}
        self._rounds: dict[ForestSize, list[EngineMeasurement]] = {}
        self._repeats = 1

    def measure(self, repeats: int, show: int | None) -> None:
        """Measure everything, the most valuable parts first. See take_profile."""
        method, budget = self._method, self._budget
        expected = self._fit()
        if show is not None:
            budget.tell("drafting the forest to be shown")
            self._forest = _forest(self._bench, method, show)
        budget.tell("warming up")
        began = budget.clock()
        self._measured_once[self._now] = self._first = self._bench.timed(method, log_steps=True)
        budget.found(f"{self._now.label}: {_speed(self._first)}, the first run")
        expected = _scaled(expected, self._first, budget.clock() - began)
        if method.depth:
            self._measure_once("the run without a draft", NO_DRAFT, expected)
        self._roofline = _roofline(self._bench)
        round_s = expected.seconds(self._now) + expected.seconds(NO_DRAFT)
        for setting in neighbours(method):
            self._measure_once(f"a run of {setting.label}", setting, expected, reserved_s=round_s)
        self._take_rounds(expected, repeats)

    def _measure_once(self, what: str, setting: ForestSize, expected: Expected, *, reserved_s: float = 0.0) -> None:
        """Run a setting if there is time for it, and for `reserved_s` seconds of what comes after it."""
        seconds = expected.seconds(setting)
        if self._budget.affords(what, seconds, reserved_s=reserved_s):
            self._budget.tell(f"timing {what}", seconds)
            self._measured_once[setting] = self._timed(setting)

    def _timed(self, setting: ForestSize) -> EngineMeasurement:
        measurement = self._bench.timed(method_for(self._method, setting))
        self._budget.found(f"{setting.label}: {_speed(measurement)}")
        return measurement

    def _fit(self) -> Expected:
        """Time single forwards, keep the prompts and new tokens that one measurement has time for, and return the
        expected times."""
        method, budget, bench = self._method, self._budget, self._bench
        budget.tell("timing one forward")
        encoder = Encoder.alone(bench.target, bench.loaded.codec, method)
        lengths = [_prompt_tokens(encoder, request) for request in bench.requests]
        beams, drafts = method.num_beams, method.drafts_per_layer
        nodes = sorted({beams, self._now.nodes(beams) if method.depth else 4 * beams})
        slots = -(-(max(lengths) + max(*nodes, drafts) + 1) // SLOT_STEP) * SLOT_STEP

        def line(role: str, model: ForestModel, counts: list[int]) -> FittedLine:
            fitted, shown = FittedLine(), []
            for count in counts:
                seconds = _one_forward(model, slots, count, budget.clock)
                fitted.add(count, seconds)
                shown.append(f"{1000 * seconds:.3g} ms for {plural(count, 'node')}")
            budget.found(f"one forward of the {role}: {', '.join(shown)}")
            return fitted

        target, draft = line("target", bench.target, nodes), None
        if bench.draft_model is not None and method.depth:
            draft = line("draft", bench.draft_model, sorted({1, max(drafts, 2)}))
        expected = Expected(target, draft, nodes[-1], beams, self._now)
        requests = _fitting(expected, bench.requests, lengths, budget.left * MEASUREMENT_SHARE)
        if requests != bench.requests:
            self._bench = replace(bench, requests=requests, batch_size=min(bench.batch_size, len(requests)))
            tokens = max(request.sampling.max_new_tokens for request in requests)
            if len(requests) < len(bench.requests):
                budget.left_out.append(f"{len(bench.requests) - len(requests)} of {len(bench.requests)} prompts")
            if any(request.sampling.max_new_tokens > tokens for request in bench.requests):
                budget.left_out.append(f"new tokens beyond {tokens} of each prompt")
        return expected

    def _take_rounds(self, expected: Expected, repeats: int) -> None:
        """Measure in turn, in several rounds, the setting in use, the fastest one that was measured, and no draft."""
        speeds = [
            (setting, measurement.tokens / measurement.seconds) for setting, measurement in self._measured_once.items()
        ]
        fastest = advice.choose(speeds, self._method.num_beams)
        settings = list(dict.fromkeys([self._now, fastest, NO_DRAFT]))
        seconds = sum(expected.seconds(setting) for setting in settings)
        for number in range(1, repeats + 1):
            rest = f"round {number}" + (f" to {repeats}" if number < repeats else "")
            if not self._budget.affords(f"{rest} of runs in turn", seconds):
                return
            measurements: dict[ForestSize, EngineMeasurement] = {}
            for setting in settings:
                what = f"round {number} of {repeats}: {setting.label}"
                self._budget.tell(what, expected.seconds(setting))
                measurements[setting] = self._timed(setting)
            # only whole rounds count, so that a drift of the machine affects all settings
            for setting, measurement in measurements.items():
                self._rounds.setdefault(setting, []).append(measurement)
            self._repeats = number

    def profile(self, command: str, render: Callable[[ForestSize], str]) -> Profile | None:
        """Return the profile of what is measured; None where none was made."""
        if self._first is None:
            return None
        bench, method, now = self._bench, self._method, self._now
        measurements = {setting: [measurement] for setting, measurement in self._measured_once.items()} | self._rounds
        measured = {setting: _measured(setting, some, self._roofline) for setting, some in measurements.items()}
        # where some settings were measured in rounds, only these are compared: single measurements are less certain
        compared = self._rounds or measurements
        best = advice.choose(
            [(setting, measured[setting].tokens_per_s.median) for setting in compared], method.num_beams
        )
        notes = advice.warnings(self._machine, list(measured.values()))
        notes += advice.drafting(self._first)
        tried = [setting for setting in measured.values() if setting.setting != now]
        notes += advice.notes(measured[now], tried, best)
        notes += advice.missing(self._budget)
        return Profile(
            command=command,
            target=bench.info.target,
            draft=bench.info.draft if method.depth else None,
            drafter=method.drafter if method.depth else None,
            dtype=bench.info.dtype,
            rule=method.rule,
            width=method.width,
            num_beams=method.num_beams,
            batch_size=bench.batch_size,
            prompts=len(bench.requests),
            prompt_tokens=sum(result.prompt_tokens for result in self._first.results),
            repeats=self._repeats,
            seconds=bench.budget.seconds,
            left_out=tuple(bench.budget.left_out),
            complete=not bench.budget.stopped,
            machine=self._machine,
            now=measured[now],
            tried=tuple(tried),
            roofline=self._roofline,
            acceptance=depth_rates(self._first.stats, self._first.method.depth),
            best=best,
            notes=tuple(notes),
            recommended_command=render(best),
            forest=self._forest,
            drafters=tuple(
                DrafterRate(name, part.drafted, part.accepted) for name, part in self._first.stats.drafters.items()
            ),
            tree=method.value(TREE) if method.depth and TREE.field in method.resolved else None,
        )


def neighbours(method: MethodConfig) -> list[ForestSize]:
    """Return the settings that are measured besides the one in use: half and twice its layers, half and twice its
    drafts per layer. There are at least as many drafts as a layer needs to pass."""
    now = setting_of(method)
    if not method.depth:
        return []
    depth, drafts, least = now.depth, now.drafts_per_layer, now.min_width or method.num_beams
    sizes = [(max(depth // 2, 1), drafts), (2 * depth, drafts), (depth, max(drafts // 2, least)), (depth, 2 * drafts)]
    sizes_around = []
    for size in dict.fromkeys(ForestSize(*size, now.min_width) for size in sizes):
        with suppress(UsageError):  # a drafter may not take these numbers
            method_for(method, size)
            sizes_around.append(size)
    return [size for size in sizes_around if size != now]


def _speed(measurement: EngineMeasurement) -> str:
    return f"{measurement.tokens / measurement.seconds:.1f} tokens/s"


def _prompt_tokens(encoder: Encoder, request: Request) -> int:
    """Count the tokens of a prompt. Return 0 for one that cannot be decoded; the run will report its error."""
    try:
        job = encoder.job(0, request)
        return len(job.prompt) + (job.source_tokens or 0)
    except RowError:
        return 0


def _fitting(
    expected: Expected, requests: tuple[Request, ...], lengths: list[int], seconds: float
) -> tuple[Request, ...]:
    """Return all requests where one measurement of them takes at most `seconds`. Otherwise return the first ones, at
    least one, with fewer new tokens."""

    def cost(index: int, most: int) -> float:
        return expected.request(lengths[index], min(most, requests[index].sampling.max_new_tokens))

    whole = max(request.sampling.max_new_tokens for request in requests)
    if sum(cost(index, whole) for index in range(len(requests))) <= seconds:
        return requests
    for tokens in FEWER_TOKENS:
        count, used = 0, 0.0
        while count < len(requests) and used + cost(count, tokens) <= seconds:
            used += cost(count, tokens)
            count += 1
        if count:
            break
    return tuple(
        replace(
            request, sampling=replace(request.sampling, max_new_tokens=min(tokens, request.sampling.max_new_tokens))
        )
        for request in requests[: max(count, 1)]
    )


def _scaled(expected: Expected, measurement: EngineMeasurement, seconds: float) -> Expected:
    """Return the expected times corrected by a measurement that was made and took `seconds`."""
    log = measurement.log
    prefill_s = log.span_s("prefill") / measurement.seconds * seconds
    forwards = log.iterations * expected.iteration(expected.now)
    return replace(
        expected,
        prefill_s=prefill_s,
        iterations=log.iterations,
        steps_per_call=measurement.stats.steps_per_call,
        scale=(seconds - prefill_s) / forwards if forwards else 1.0,
    )


def _forest(bench: ProfiledPair, method: MethodConfig, number: int) -> ShownForest:
    """Decode the first prompt alone, and return the forest of iteration `number`, from 1."""
    request = bench.requests[0]
    engine, snapshot = bench.engine(method, log_steps=True), Snapshot(request.seed, number)
    engine.observe(snapshot)
    (result,) = bench.answers(engine, [request])
    steps = result.stats.step_log
    if snapshot.forest is None or len(steps) < number:
        raise UsageError(f"--show {number}: the first prompt ({request.id}) took {len(steps)} iterations only")
    size = bench.target.vocab_size
    codec = bench.loaded.codec
    pieces = codec.token_bytes()[:size]
    names = [piece.decode("utf-8", "replace") for piece in pieces] + [""] * (size - len(pieces))
    ends = codec.eos_ids
    names = [name or ("<end>" if token in ends else f"<{token}>") for token, name in enumerate(names)]
    return snapshot.shown(request.id, method.rule, steps[number - 1].steps, names, method.drafter)


def _roofline(bench: ProfiledPair) -> Roofline | None:
    """Measure the highest rates of the target's device. Return None where the size of the weights is not known."""
    model = bench.target
    size = size_of(model)
    if size is None:
        return None
    bench.budget.tell("timing a copy and a matrix product")
    dtype = getattr(torch, bench.info.dtype, torch.float32)
    rates = machine_rates(model.device, dtype, size.read_bytes)
    return Roofline(size.read_bytes, size.flops_per_node, model.kv_bytes_per_slot(), *rates)


@torch.inference_mode()
def _one_forward(model: ForestModel, slots: int, nodes: int, clock: Callable[[], float]) -> float:
    """Return the seconds of one forward of one row with logits, after one to warm up: enough to plan by. The nodes take
    the last of `slots` active slots and are siblings: each sees itself and all slots before the nodes."""
    model.release()
    model.reserve(1, slots + 1)
    device = model.device
    tokens = (torch.arange(nodes, device=device) * 7919 % model.vocab_size).view(1, nodes)
    at = torch.arange(slots - nodes, slots, device=device).view(1, nodes)
    last = min(slots - nodes, (model.max_positions or slots) - 1)
    positions = torch.arange(slots, device=device).clamp(max=last).view(1, slots)
    mask = (positions < last).repeat(nodes, 1)[None] | (torch.arange(slots, device=device) == at[0, :, None])
    batch = ForestInput(tokens, positions.gather(1, at), at, mask, positions)
    start = 0.0
    for _ in range(2):
        synchronise(device)
        start = clock()
        model.forward(batch)
        synchronise(device)
    seconds = clock() - start
    model.release()
    return seconds


def _measured(setting: ForestSize, measurements: list[EngineMeasurement], roofline: Roofline | None) -> MeasuredSetting:
    last = measurements[-1]
    middle = sorted(measurements, key=lambda measurement: measurement.seconds)[len(measurements) // 2]
    return MeasuredSetting(
        setting=setting,
        seconds=spread_of([measurement.seconds for measurement in measurements]),
        tokens=last.tokens,
        tokens_per_s=spread_of([measurement.tokens / measurement.seconds for measurement in measurements]),
        steps_per_call=last.stats.steps_per_call,
        iterations=last.log.iterations,
        mean_width=last.stats.mean_width,
        phases=phases_of(middle),
        forward=_forward(middle, roofline),
        peak_memory_bytes=middle.peak_memory_bytes,
    )


def _forward(measurement: EngineMeasurement, roofline: Roofline | None) -> TargetForward:
    log = measurement.log
    count = max(log.iterations, 1)
    mean = TargetForward(log.rows / count, log.nodes / count, log.slots / count, log.phases["target"] / count)
    if roofline is None:
        return mean
    floor, bound = roofline.floor(mean.nodes, mean.slots)
    return replace(mean, floor_s=floor, bound=bound)


def depth_rates(stats: RequestStats, depth: int) -> tuple[DepthRate, ...]:
    """Count, for each layer of the step log, how often it was verified and how often it passed."""
    reached, passed = [0] * depth, [0] * depth
    for step in stats.step_log:
        for place, layer in enumerate(step.layers):
            reached[place] += 1
            passed[place] += layer.passed
    return tuple(DepthRate(layer, *counts) for layer, counts in enumerate(zip(reached, passed, strict=True), 1))
