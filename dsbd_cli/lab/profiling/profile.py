"""A whole profile: runs with clocks, forwards alone, drafted forests replayed, and what follows from them."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from dsbd_cli.config import MethodConfig
from dsbd_cli.engine.core.protocols import ForestModel
from dsbd_cli.engine.decoding.encode import Encoder
from dsbd_cli.engine.models.sizes import size_of
from dsbd_cli.errors import RowError, UsageError, plural
from dsbd_cli.lab.profiling import advice
from dsbd_cli.lab.profiling.acceptance import Rates, acceptance_rates
from dsbd_cli.lab.profiling.budget import Budget, CutOffError, Expected
from dsbd_cli.lab.profiling.curves import MIN_ROUNDS, WARM_UP, measure_forwards, node_counts, one_forward, points_of
from dsbd_cli.lab.profiling.machine import describe_machine, machine_rates
from dsbd_cli.lab.profiling.predict import Costs, Interpolation, choose, layer_costs, predictions
from dsbd_cli.lab.profiling.probe import DraftProbe, SlotProbe, owners, peak_bytes, reset_peak
from dsbd_cli.lab.profiling.runs import ProfiledPair, Run, drafts_nodes, method_for, phases_of, setting_of
from dsbd_cli.lab.profiling.snapshot import Snapshot
from dsbd_cli.lab.profiling.timers import Role, RunLog
from dsbd_cli.lab.profiling.trace import write_trace
from dsbd_cli.lab.profiling.watch import watch
from dsbd_cli.lab.reports.profile_data import (
    NO_DRAFT,
    Curve,
    DepthRate,
    DrafterRate,
    ForestSize,
    MeasuredSetting,
    Owner,
    Prediction,
    Profile,
    ShownForest,
    spread_of,
)
from dsbd_cli.requests import Request, derive_seed
from dsbd_cli.variants import TREE, WIDTH_THRESHOLD

__all__ = ["ProfileSpec", "take_profile"]

DRAFTS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32)
LEAST_DEPTH = 6
LEAST_DRAFTS = 16
SLOT_STEP = 32
CURVE_BUDGET_S = 12.0
# of the time: one run at most, which takes a fraction of that where texts end and drafts pass; the curve of one model
RUN_SHARE, CURVE_SHARE = 0.2, 0.25
# to warm up and timed at least; a slow model needs fewer, because its forwards spread less
MANY_ROUNDS, FEW_ROUNDS = (WARM_UP, MIN_ROUNDS), (1, 1)
FEWER_TOKENS = (16, 4)
Choice = tuple[list[int], tuple[int, int]]  # node counts and rounds
Acceptance = dict[tuple[int, int | None], Rates]


@dataclass(frozen=True, slots=True)
class ProfileSpec:
    """What to profile. resident_before: bytes of the process before models were loaded. show: an iteration, from 1.

    render: a setting as a command line that uses it. The bench's budget says how long it may take.
    """

    bench: ProfiledPair
    method: MethodConfig
    repeats: int
    command: str
    dtype: str
    resident_before: int | None
    render: Callable[[ForestSize], str]
    show: int | None = None
    trace: Path | None = None


def take_profile(job: ProfileSpec) -> Profile | None:
    """Measure what there is time for, what is worth most first; None where it was stopped before there was anything.

    Raises DsbdError where a prompt cannot be decoded, UsageError where --show asks for an iteration that there is not.
    """
    job.bench.budget.start()
    session = _Session(job)
    with suppress(CutOffError):
        session.measure()
    return session.profile()


class _Session:
    """What is measured until now."""

    def __init__(self, job: ProfileSpec) -> None:
        self._job, self._budget, self._method = job, job.bench.budget, job.method
        self._bench = job.bench
        self._every = not job.bench.captures
        self._machine = describe_machine(job.bench.target.device)
        self._forest: ShownForest | None = None
        self._memory: tuple[Owner, ...] = ()
        self._first: Run | None = None
        self._plain: Run | None = None
        self._other: Run | None = None
        self._curves: tuple[Curve, ...] = ()
        self._predictions: tuple[Prediction, ...] = ()
        self._rates: Acceptance = {}
        self._runs: dict[ForestSize, list[Run]] = {}
        self._rounds = 0
        self._notes: list[str] = []

    def measure(self) -> None:
        """Everything, in order of worth."""
        method, budget = self._method, self._budget
        expected = self._fit()
        if self._job.show is not None:
            budget.tell("drafting the forest to be shown")
            self._forest = _forest(self._job, self._bench)
        budget.tell("warming up")
        began = budget.clock()
        self._memory, self._first = _memory(self._job, self._bench)
        budget.found(f"{expected.now.label}: {_speed(self._first)}, the first run")
        expected = _scaled(expected, self._first, budget.clock() - began)
        if method.depth and self._affords("the run without a draft", expected.run(NO_DRAFT)):
            self._plain = self._timed(NO_DRAFT)
        self._measure_curves(expected)
        # the run that warmed up stands for it where time is short: what other D and K would do is worth more
        needed = expected.run(expected.now)
        behind = _least_to_predict(method, expected) if self._can_predict(expected) else 0.0
        if self._affords(f"a second run of {expected.now.label}", needed, behind=behind):
            self._first = self._timed(expected.now, every=True)
            if not self._every:
                self._first = self._timed(expected.now)
        self._predict(expected)
        self._take_rounds(expected)
        if self._job.trace is not None:
            budget.tell("tracing")
            count = write_trace(self._bench, method, self._job.trace)
            self._notes.append(f"{count} iterations are in the trace {self._job.trace}")

    def _affords(self, what: str, expected_s: float, *, behind: float = 0.0) -> bool:
        """Whether there is time for it, and for so many seconds behind it; says so, and says that it begins."""
        if not self._budget.affords(what, expected_s, behind=behind):
            return False
        self._budget.tell(f"timing {what}", expected_s)
        return True

    def _timed(self, setting: ForestSize, *, every: bool | None = None) -> Run:
        run = self._bench.timed(method_for(self._method, setting), every=self._every if every is None else every)
        self._budget.found(f"{setting.label}: {_speed(run)}")
        return run

    def _fit(self) -> Expected:
        """What single forwards take, and as many prompts and new tokens as one run has time for."""
        method, budget, bench = self._method, self._budget, self._bench
        budget.tell("timing one forward")
        encoder = Encoder.alone(bench.target, bench.codec, method)
        lengths = [_prompt_tokens(encoder, one) for one in bench.requests]
        beams, drafts = method.num_beams, method.drafts_per_layer
        nodes = sorted({beams, setting_of(method).nodes(beams) if method.depth else 4 * beams})
        slots = _up(max(lengths) + max(*nodes, drafts) + 1, SLOT_STEP)

        def line(model: ForestModel, counts: list[int]) -> Interpolation:
            return Interpolation(tuple((count, one_forward(model, slots, count, budget.clock)) for count in counts))

        draft = None
        if bench.draft_model is not None and method.depth:
            draft = line(bench.draft_model, sorted({1, max(drafts, 2)}))
        expected = Expected(line(bench.target, nodes), draft, beams, setting_of(method))
        for role, timed in (("target", expected.target), ("draft", expected.draft)):
            if timed is not None:
                shown = ", ".join(
                    f"{1000 * seconds:.3g} ms for {plural(count, 'node')}" for count, seconds in timed.points
                )
                budget.found(f"one forward of the {role}: {shown}")
        requests = _fitting(expected, bench.requests, lengths, budget.left * RUN_SHARE)
        if requests != bench.requests:
            self._bench = replace(bench, requests=requests, batch_size=min(bench.batch_size, len(requests)))
            tokens = max(one.sampling.max_new_tokens for one in requests)
            if len(requests) < len(bench.requests):
                budget.left_out.append(f"{len(bench.requests) - len(requests)} of {len(bench.requests)} prompts")
            budget.left_out.append(f"new tokens beyond {tokens} of each prompt")
        return expected

    def _measure_curves(self, expected: Expected) -> None:
        """T(N) at as many node counts as there is time for."""
        assert self._first is not None
        for role, model, line, choices in _curve_counts(self._method, self._bench, expected):
            rows = _rows_of(self._first, role)
            for place, (counts, rounds) in enumerate(choices):
                seconds = expected.forwards(line, counts, rows, sum(rounds))
                if seconds <= self._budget.left * CURVE_SHARE:
                    if place:
                        self._budget.left_out.append(
                            f"node counts of T_{role} other than {', '.join(map(str, counts))}"
                        )
                    self._budget.tell(f"timing forwards of the {role}", seconds)
                    self._curves += (_curve(self._job, self._budget, role, model, (counts, rounds), self._first),)
                    break
            else:
                self._budget.left_out.append(f"forwards of the {role} alone (about {seconds:.0f} s)")

    def _can_predict(self, expected: Expected) -> bool:
        """Whether there are a run without a draft and the curves of all models."""
        curves = _curve_counts(self._method, self._bench, expected)
        return self._plain is not None and len(self._curves) == len(curves)

    def _predict(self, expected: Expected) -> None:
        """What other D and K would do: a run with another K, and drafts of other forests."""
        method = self._method
        if not method.depth:
            self._other = self._plain = self._first
            self._predictions = self._fitted()
            return
        if not self._can_predict(expected):
            self._budget.left_out.append("predictions for other D and K")
            return
        if self._affords("other D and K", _least_to_predict(method, expected)):
            self._other = self._timed(_other_drafts(method))
            forests = self._affordable(_forests(method), expected)
            self._budget.tell("drafting other forests")
            self._rates = _acceptance(self._bench, method, forests)
            self._predictions = self._fitted()

    def _affordable(self, forests: Sequence[MethodConfig], expected: Expected) -> list[MethodConfig]:
        """The forests in use, and of the others as many as there is time for, the cheapest first."""
        (now, *others), left = forests, self._budget.left - expected.run(expected.now)
        taken, dear = [now], list[str]()
        costs = sorted(((expected.run(setting_of(one)), one) for one in others), key=lambda pair: pair[0])
        for cost, forest in costs:
            left -= cost
            if left >= 0:
                taken.append(forest)
            else:
                dear.append(f"{setting_of(forest).label} (about {cost:.0f} s)")
        if dear:
            self._budget.left_out.append(f"predictions from forests of {', '.join(dear)}")
        return taken

    def _fitted(self) -> tuple[Prediction, ...]:
        """Predictions from the runs of median length: what was measured and what is predicted from it go together."""
        first, plain = self._median(setting_of(self._method)), self._median(NO_DRAFT)
        if first is None or plain is None or self._other is None or not self._curves:
            return ()
        costs = costs_of(first, plain, self._other, self._curves)
        most = max((len(rates.reached) for rates in self._rates.values()), default=0)
        return predictions(costs, self._rates, range(1, most + 1))

    def _median(self, setting: ForestSize) -> Run | None:
        if runs := self._runs.get(setting):
            return _median_run(runs)
        return self._first if setting == setting_of(self._method) else self._plain

    def _take_rounds(self, expected: Expected) -> None:
        """Runs in turn of the setting in use, the one predicted to be the fastest and no draft."""
        settings = [expected.now]
        if self._predictions:
            found = [(one.setting, one.tokens_per_s) for one in self._predictions]
            settings.append(choose(found, self._method.num_beams))
        settings = list(dict.fromkeys([*settings, NO_DRAFT]))
        seconds = sum(expected.run(setting) for setting in settings)
        for number in range(1, self._job.repeats + 1):
            rest = f"round {number}" + (f" to {self._job.repeats}" if number < self._job.repeats else "")
            if not self._budget.affords(f"{rest} of runs in turn", seconds):
                return
            runs: dict[ForestSize, Run] = {}
            for setting in settings:
                what = f"round {number} of {self._job.repeats}: {setting.label}"
                self._budget.tell(what, expected.run(setting))
                runs[setting] = self._timed(setting)
            # a round counts as a whole, so that a drift of the machine meets all settings
            for setting, run in runs.items():
                self._runs.setdefault(setting, []).append(run)
            self._rounds = number

    def profile(self) -> Profile | None:
        """From what is measured; None where no run was."""
        if self._first is None:
            return None
        job, bench, method = self._job, self._bench, self._method
        now = setting_of(method)
        runs = self._runs or {
            setting: [run] for setting, run in ((now, self._first), (NO_DRAFT, self._plain)) if run is not None
        }
        found = self._predictions = self._fitted()
        measured = {
            setting: _measured(setting, some, advice.prediction_of(setting, found)) for setting, some in runs.items()
        }
        best = choose([(one.setting, one.tokens_per_s.median) for one in measured.values()], method.num_beams)
        told = advice.warnings(self._machine, list(measured.values()))
        told += advice.drafting(self._first)
        tried = [one for one in measured.values() if one.setting != now]
        told += advice.notes(measured[now], tried, best, predicted=bool(found))
        here = advice.prediction_of(now, found)
        if here is not None and now.depth:
            told += advice.neighbours(here, found, measured[now], measured.get(NO_DRAFT))
        told += self._notes + advice.missing(self._budget)
        rate = self._rates.get((now.drafts_per_layer, now.min_width))
        layers = zip(rate.reached, rate.passed, strict=True) if rate else ()
        return Profile(
            command=job.command,
            target=bench.names[0],
            draft=bench.names[1] if method.depth else None,
            drafter=method.drafter if method.depth else None,
            dtype=job.dtype,
            rule=method.rule,
            width=method.width,
            num_beams=method.num_beams,
            batch_size=bench.batch_size,
            prompts=len(bench.requests),
            prompt_tokens=sum(result.prompt_tokens for result in self._first.results),
            repeats=max(self._rounds, 1),
            seconds=bench.budget.seconds,
            left_out=tuple(bench.budget.left_out),
            complete=not bench.budget.stopped,
            machine=self._machine,
            now=measured[now],
            tried=tuple(one for setting, one in measured.items() if setting != now),
            curves=self._curves,
            acceptance=tuple(DepthRate(depth, reached, passed) for depth, (reached, passed) in enumerate(layers, 1)),
            predictions=found,
            best=best,
            memory=self._memory,
            notes=tuple(told),
            recommended_command=job.render(best),
            forest=self._forest,
            drafters=_drafter_rates(self._first),
            tree=method.value(TREE) if method.depth and TREE.field in method.settled else None,
        )


def _speed(run: Run) -> str:
    return f"{run.tokens / run.seconds:.1f} tokens/s"


def _prompt_tokens(encoder: Encoder, request: Request) -> int:
    """Of a prompt; 0 of one that cannot be decoded, which the run will say."""
    try:
        job = encoder.job(0, request)
        return len(job.prompt) + (job.source_tokens or 0)
    except RowError:
        return 0


def _fitting(
    expected: Expected, requests: tuple[Request, ...], lengths: list[int], seconds: float
) -> tuple[Request, ...]:
    """All requests where one run of them fits into so many seconds at most, else the first ones with few new tokens,
    at least one."""

    def cost(place: int, most: int) -> float:
        return expected.request(lengths[place], min(most, requests[place].sampling.max_new_tokens))

    whole = max(one.sampling.max_new_tokens for one in requests)
    if sum(cost(place, whole) for place in range(len(requests))) <= seconds:
        return requests
    for tokens in FEWER_TOKENS:
        count, used = 0, 0.0
        while count < len(requests) and used + cost(count, tokens) <= seconds:
            used += cost(count, tokens)
            count += 1
        if count:
            break
    return tuple(
        replace(one, sampling=replace(one.sampling, max_new_tokens=min(tokens, one.sampling.max_new_tokens)))
        for one in requests[: max(count, 1)]
    )


def _scaled(expected: Expected, run: Run, seconds: float) -> Expected:
    """Held against a run that was made."""
    log = run.log
    prefill_s = (log.forward_s("target", "prefill") + log.forward_s("draft", "prefill")) / run.seconds * seconds
    forwards = log.iterations * expected.iteration(expected.now)
    return replace(
        expected,
        prefill_s=prefill_s,
        iterations=log.iterations,
        steps_per_call=run.stats.steps_per_call,
        scale=(seconds - prefill_s) / forwards if forwards else 1.0,
    )


def _rows_of(run: Run, role: Role) -> int:
    return max(one.rows for one in run.log.of(role))


def _curve_counts(
    method: MethodConfig, bench: ProfiledPair, expected: Expected
) -> list[tuple[Role, ForestModel, Interpolation, list[Choice]]]:
    """Of each model the node counts to time: all that a prediction needs, and fewer for when time is short."""
    beams, nodes = method.num_beams, setting_of(method).nodes(method.num_beams)
    most = max(_drafts(method))  # without a draft too: the curve says what a forest would cost
    every = node_counts(beams, nodes, beams + max(method.depth, LEAST_DEPTH) * most)
    choices: list[Choice] = [
        (every, MANY_ROUNDS),
        ([count for count in every if count <= nodes], MANY_ROUNDS),
        (sorted({1, beams, nodes}), FEW_ROUNDS),
    ]
    models: list[tuple[Role, ForestModel, Interpolation, list[Choice]]] = [
        ("target", bench.target, expected.target, choices)
    ]
    if bench.draft_model is not None and method.depth and expected.draft is not None:
        drafts = method.drafts_per_layer
        every = node_counts(beams, 2 * beams, drafts, most)
        choices = [(every, MANY_ROUNDS), (sorted({1, beams, drafts}), FEW_ROUNDS)]
        models.append(("draft", bench.draft_model, expected.draft, choices))
    return models


def _forest(job: ProfileSpec, bench: ProfiledPair) -> ShownForest:
    """The wanted iteration of the first prompt, decoded alone."""
    assert job.show is not None
    request, log = bench.requests[0], RunLog()
    engine = bench.engine(job.method, log, log_steps=True)
    snapshot = Snapshot(request.seed, job.show)
    watch(engine, snapshot)
    result = bench.run(engine, log, [request]).results[0]
    steps = result.stats.step_log
    if snapshot.forest is None or len(steps) < job.show:
        raise UsageError(f"--show {job.show}: the first prompt ({request.id}) took {len(steps)} iterations only")
    size = bench.target.vocab_size
    pieces = bench.codec.token_bytes()[:size]
    names = [piece.decode("utf-8", "replace") for piece in pieces] + [""] * (size - len(pieces))
    ends = bench.codec.eos_ids
    names = [name or ("<end>" if token in ends else f"<{token}>") for token, name in enumerate(names)]
    return snapshot.shown(request.id, job.method.rule, steps[job.show - 1].steps, names, job.method.drafter)


def _memory(job: ProfileSpec, bench: ProfiledPair) -> tuple[tuple[Owner, ...], Run]:
    """A first run, which warms everything up, with an eye on the caches."""
    log = RunLog()
    reset_peak(bench.devices)
    engine, probe = bench.engine(job.method, log), SlotProbe(job.method.num_beams)
    watch(engine, probe)
    run = bench.run(engine, log)
    models: list[tuple[Role, ForestModel]] = [("target", bench.target)]
    if bench.draft_model is not None and job.method.depth:
        models.append(("draft", bench.draft_model))
    sizes = [(role, found.held_bytes if (found := size_of(model)) else None) for role, model in models]
    caches = {role: log.reserved.get(role, 0) * model.kv_bytes_per_slot() for role, model in models}
    # a draft with tokens of its own shares no slots with the target
    apart = caches.pop("draft", 0) if not drafts_nodes(job.method) else 0
    slot_bytes = sum(model.kv_bytes_per_slot() for role, model in models if role in caches)
    reserved = sum(caches.values())
    peak, on_gpu = peak_bytes(bench.devices), any(device.type == "cuda" for device in bench.devices)
    before = 0 if on_gpu else job.resident_before
    return owners(sizes, probe.peak, slot_bytes, reserved, job.method.num_beams, peak, before, apart), run


def _curve(job: ProfileSpec, budget: Budget, role: Role, model: ForestModel, choice: Choice, run: Run) -> Curve:
    """T(N) of one model, at the rows and slots of the run."""
    counts, rounds = choice
    forwards, rows = run.log.of(role), _rows_of(run, role)
    slots = max(_up(sum(one.slots for one in forwards) / len(forwards), SLOT_STEP), max(counts) + SLOT_STEP)
    measured = measure_forwards(
        model,
        rows,
        slots,
        counts,
        rounds=4 * job.repeats,
        budget_s=min(CURVE_BUDGET_S, budget.left * CURVE_SHARE),
        warm_up=rounds[0],
        least=rounds[1],
        clock=budget.clock,
        check=budget.check,
    )
    size = size_of(model)
    dtype = getattr(torch, job.dtype) if hasattr(torch, job.dtype) else torch.float32
    rates = machine_rates(model.device, dtype, size.read_bytes) if size else None
    return Curve(
        role=role,
        rows=rows,
        slots=slots,
        weight_bytes=size.read_bytes if size else None,
        flops_per_node=size.flops_per_node if size else None,
        kv_bytes_per_slot=model.kv_bytes_per_slot(),
        bandwidth_bytes_per_s=rates.copy_bytes_per_s if rates else None,
        matmul_flops_per_s=rates.matmul_flops_per_s if rates else None,
        in_run_s=sum(one.seconds() for one in forwards) / len(forwards),
        points=points_of(measured, rows, slots, model.kv_bytes_per_slot(), size, rates),
    )


def _up(value: float, step: int) -> int:
    return math.ceil(value / step) * step


def _drafts(method: MethodConfig) -> list[int]:
    """Values of K to look at: enough for a layer to pass, and the one in use."""
    least = 1 if method.dynamic else method.num_beams
    most = max(LEAST_DRAFTS, 3 * method.num_beams, method.drafts_per_layer)
    return sorted({k for k in (*DRAFTS, method.num_beams, method.drafts_per_layer) if least <= k <= most})


def _other_drafts(method: MethodConfig) -> ForestSize:
    """A setting with another K than the one in use, and no more than two layers."""
    values = _drafts(method)
    drafts = values[-1] if values[-1] != method.drafts_per_layer else values[0]
    return replace(setting_of(method), depth=min(method.depth, 2), drafts_per_layer=drafts)


def costs_of(run: Run, plain: Run, other: Run, curves: tuple[Curve, ...]) -> Costs:
    """What the parts of an iteration cost in a run, in one without drafts and in one with another K. Curves are
    scaled to the forwards of the runs, because rows leave a batch as they finish: the target's at each number of nodes
    that a run had, because the runs do not lose their rows alike."""
    method, log, first_nodes = run.method, run.log, float(run.method.num_beams)
    lines: dict[Role, Interpolation] = {}
    for curve in (one for one in curves if one.role == "target" or drafts_nodes(method)):
        line = Interpolation(tuple((point.nodes, point.seconds.median) for point in curve.points))
        work = [_work(some, curve.role) for some in (run, plain, other)]
        if curve.role == "target":
            lines["target"] = line.through([(nodes[0], seconds / len(nodes)) for nodes, seconds in work if nodes])
            continue
        scale = sum(seconds for _, seconds in work) / sum(line.at(nodes) for some, _ in work for nodes in some)
        lines[curve.role] = replace(line, scale=scale)
    begun = [one.nodes for some in (run, other) for one in some.log.forwards if one.first and one.role == "draft"]
    if begun:
        first_nodes = sum(begun) / len(begun)
    iteration, layer, draft = _rest(plain), 0.0, 0.0
    if method.depth:
        here, there = setting_of(method), setting_of(other.method)
        layer, draft = layer_costs(iteration, here, _rest(run), there, _rest(other))
    return Costs(
        target=lines["target"],
        draft=lines.get("draft"),
        first_nodes=first_nodes,
        iteration_s=iteration,
        layer_s=layer,
        draft_s=draft,
        once_s=_once(run),
        plain_once_s=_once(plain),
        rows=run.stats.target_calls / log.iterations,
        plain_rows=plain.stats.target_calls / plain.log.iterations,
        steps=run.stats.steps,
        tokens=run.tokens,
        num_beams=method.num_beams,
    )


def _once(run: Run) -> float:
    """Seconds that do not depend on the number of iterations."""
    return sum(one.total_s for one in phases_of(run) if one.name in ("tokenise", "prefill", "detokenise", "write"))


def _work(run: Run, role: Role) -> tuple[list[int], float]:
    """Nodes of all forwards of a model and their seconds together; of its phases where forwards are not logged."""
    method, log = run.method, run.log
    if role == "draft" and not drafts_nodes(method):
        return [], 0.0
    if log.every:
        return [one.nodes for one in log.of(role)], log.forward_s(role, "forest")
    drafts, beams, depth = method.drafts_per_layer, method.num_beams, method.depth
    nodes = [setting_of(method).nodes(beams)] if role == "target" else [beams, *[drafts] * (depth - 1)] if depth else []
    return nodes * log.iterations, log.phases[role] if nodes else 0.0


def _rest(run: Run) -> float:
    """Seconds of an iteration outside of forwards."""
    forwards = _work(run, "target")[1] + _work(run, "draft")[1]
    return max(run.seconds - _once(run) - forwards, 0.0) / run.log.iterations


def _least_to_predict(method: MethodConfig, expected: Expected) -> float:
    """Seconds of the two runs that a prediction for other D and K needs at least; 0 without a draft."""
    return expected.run(_other_drafts(method)) + expected.run(expected.now) if method.depth else 0.0


def _forests(method: MethodConfig) -> list[MethodConfig]:
    """What is drafted to know how much other K and D would accept. The forests in use, because larger ones stop where
    drafting is hard, and so begin there too; and larger ones, from which those of smaller K are replayed. A drafter
    that reads text alone chooses other nodes for each K, so it drafts for each. Of two drafters the nodes of the second
    are replayed as if they stood behind those of the first at every K."""
    drafts, depth = _drafts(method), max(method.depth, LEAST_DEPTH)
    sizes = drafts[-1:] if method.needs_draft else drafts
    return list(dict.fromkeys([method, *(replace(method, drafts_per_layer=k, depth=depth) for k in sizes)]))


def _acceptance(bench: ProfiledPair, method: MethodConfig, forests: Sequence[MethodConfig]) -> Acceptance:
    """Draft these forests, and count what those of each K accept."""
    drafts, depth, beams = _drafts(method), max(one.depth for one in forests), method.num_beams
    dynamic = method.dynamic
    requests = bench.requests
    if len({one.seed for one in requests}) < len(requests):  # a probe knows rows by their seeds
        requests = tuple(replace(one, seed=derive_seed(0, str(place))) for place, one in enumerate(requests))
    chains = []
    for looked_at in forests:
        log = RunLog()
        engine = bench.engine(looked_at, log, log_steps=True)
        probe = DraftProbe(drafts, beams, method.value(WIDTH_THRESHOLD) if dynamic else None)
        watch(engine, probe)
        chains += probe.chains(bench.run(engine, log, requests).results)
    widths: list[int | None] = [*range(1, beams + 1)] if dynamic else [None]
    rates = acceptance_rates(chains, drafts, widths, beams, depth, replayed=method.needs_draft)
    known = {}
    for (drafts_per_layer, min_width), rate in rates.items():
        # forests of so many drafts, or of more that are replayed, know this many layers
        layers = max((one.depth for one in forests if _speaks_for(one, drafts_per_layer)), default=0)
        if layers and (min_width is None or min_width <= drafts_per_layer):
            known[drafts_per_layer, min_width] = rate.first(layers)
    return known


def _speaks_for(forest: MethodConfig, drafts_per_layer: int) -> bool:
    more = forest.drafts_per_layer > drafts_per_layer
    return forest.drafts_per_layer == drafts_per_layer or (more and forest.needs_draft)


def _measured(setting: ForestSize, runs: list[Run], predicted: Prediction | None) -> MeasuredSetting:
    last = runs[-1]
    return MeasuredSetting(
        setting=setting,
        seconds=spread_of([run.seconds for run in runs]),
        tokens=last.tokens,
        tokens_per_s=spread_of([run.tokens / run.seconds for run in runs]),
        steps_per_call=last.stats.steps_per_call,
        iterations=last.log.iterations,
        mean_width=last.stats.mean_width,
        phases=phases_of(_median_run(runs)),
        predicted=predicted,
    )


def _median_run(runs: list[Run]) -> Run:
    """The run of median length."""
    return sorted(runs, key=lambda run: run.seconds)[len(runs) // 2]


def _drafter_rates(run: Run) -> tuple[DrafterRate, ...]:
    """Of a run with two drafters, the first one first."""
    return tuple(DrafterRate(name, part.drafted, part.accepted) for name, part in run.stats.drafters.items())
