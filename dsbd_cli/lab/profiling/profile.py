"""A whole profile: runs with clocks, forwards alone, drafted forests replayed, and what follows from them."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from dsbd_cli.config import MethodConfig
from dsbd_cli.engine.core.protocols import ForestModel
from dsbd_cli.engine.models.sizes import size_of
from dsbd_cli.errors import UsageError
from dsbd_cli.lab.profiling import advice
from dsbd_cli.lab.profiling.acceptance import Rates, acceptance_rates
from dsbd_cli.lab.profiling.curves import measure_forwards, node_counts, points_of
from dsbd_cli.lab.profiling.machine import describe_machine, machine_rates
from dsbd_cli.lab.profiling.memory import owners, peak_bytes, reset_peak
from dsbd_cli.lab.profiling.predict import Costs, Interpolation, choose, layer_costs, predictions
from dsbd_cli.lab.profiling.probe import DraftProbe, SlotProbe
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
    Machine,
    MeasuredSetting,
    Owner,
    Phase,
    Prediction,
    Profile,
    ShownForest,
    spread_of,
)
from dsbd_cli.requests import derive_seed
from dsbd_cli.stats import DrafterStats

__all__ = ["ProfileSpec", "take_profile"]

DRAFTS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32)
LEAST_DEPTH = 6
LEAST_DRAFTS = 16
SLOT_STEP = 32
CURVE_BUDGET_S = 12.0
Acceptance = dict[tuple[int, int | None], Rates]


@dataclass(frozen=True, slots=True)
class ProfileSpec:
    """What to profile. resident_before: bytes of the process before models were loaded. show: an iteration, from 1.

    render: a setting as a command line that uses it. told: is called with what is being done.
    """

    bench: ProfiledPair
    method: MethodConfig
    repeats: int
    command: str
    dtype: str
    resident_before: int | None
    render: Callable[[ForestSize], str]
    told: Callable[[str], None]
    show: int | None = None
    trace: Path | None = None


def take_profile(job: ProfileSpec) -> Profile:
    """Measure everything. Raises DsbdError where a prompt cannot be decoded, UsageError where --show asks for an
    iteration that there is not."""
    bench, method = job.bench, job.method
    machine = describe_machine(bench.target.device)
    forest = _forest(job) if job.show is not None else None
    memory = _memory(job)
    job.told("timing runs")
    detailed = bench.timed(method)
    every = not bench.captures
    first = detailed if every else bench.timed(method, every=False)
    curves = _curves(job, detailed)
    plain = bench.timed(method_for(method, NO_DRAFT), every=every) if method.depth else first
    other = bench.timed(method_for(method, _other_drafts(method)), every=every) if method.depth else first
    costs = costs_of(first, plain, other, curves)
    found, rates = _predict(job, costs)
    now, best = setting_of(method), choose([(one.setting, one.tokens_per_s) for one in found], method.num_beams)
    wanted = dict.fromkeys([now, best, NO_DRAFT])
    runs = _rounds(job, list(wanted))
    measured = {
        setting: _measured(setting, some, advice.prediction_of(setting, found)) for setting, some in runs.items()
    }
    best = choose([(one.setting, one.tokens_per_s.median) for one in measured.values()], method.num_beams)
    told = advice.warnings(machine, list(measured.values()))
    told += advice.drafting(first)
    told += advice.notes(measured[now], [one for one in measured.values() if one.setting != now], best)
    here = advice.prediction_of(now, found)
    if here is not None and now.depth:
        told += advice.neighbours(here, found)
    if job.trace is not None:
        job.told("tracing")
        told.append(f"{write_trace(bench, method, job.trace)} iterations are in the trace {job.trace}")
    return _profile(job, machine, first, measured, curves, rates, found, best, memory, told, forest)


def _forest(job: ProfileSpec) -> ShownForest:
    """The wanted iteration of the first prompt, decoded alone."""
    assert job.show is not None
    job.told("drafting the forest to be shown")
    request, log = job.bench.requests[0], RunLog()
    engine = job.bench.engine(job.method, log, log_steps=True)
    snapshot = Snapshot(request.seed, job.show)
    watch(engine, snapshot)
    result = job.bench.run(engine, log, [request]).results[0]
    steps = result.stats.step_log
    if snapshot.forest is None or len(steps) < job.show:
        raise UsageError(f"--show {job.show}: the first prompt ({request.id}) took {len(steps)} iterations only")
    size = job.bench.target.vocab_size
    pieces = job.bench.codec.token_bytes()[:size]
    names = [piece.decode("utf-8", "replace") for piece in pieces] + [""] * (size - len(pieces))
    ends = job.bench.codec.eos_ids
    names = [name or ("<end>" if token in ends else f"<{token}>") for token, name in enumerate(names)]
    return snapshot.shown(request.id, job.method.rule, steps[job.show - 1].steps, names, job.method.drafter)


def _memory(job: ProfileSpec) -> tuple[Owner, ...]:
    """A first run, which warms everything up, with an eye on the caches."""
    job.told("warming up")
    bench, log = job.bench, RunLog()
    reset_peak(bench.devices)
    engine, probe = bench.engine(job.method, log), SlotProbe(job.method.num_beams)
    watch(engine, probe)
    bench.run(engine, log)
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
    return owners(sizes, probe.peak, slot_bytes, reserved, job.method.num_beams, peak, before, apart)


def _curves(job: ProfileSpec, run: Run) -> tuple[Curve, ...]:
    """T(N) of both models, at the rows and slots of the run."""
    bench, method = job.bench, job.method
    beams, depth = method.num_beams, method.depth
    most = max(_drafts(method))  # without a draft too: the curve says what a forest would cost
    models: list[tuple[Role, ForestModel, list[int]]] = [
        (
            "target",
            bench.target,
            node_counts(beams, beams + depth * method.drafts_per_layer, beams + max(depth, LEAST_DEPTH) * most),
        )
    ]
    if bench.draft_model is not None and depth:
        models.append(("draft", bench.draft_model, node_counts(beams, 2 * beams, method.drafts_per_layer, most)))
    curves = []
    for role, model, counts in models:
        job.told(f"timing forwards of the {role}")
        forwards = [one for one in run.log.forwards if (one.role, one.kind) == (role, "forest")]
        rows = max(one.rows for one in forwards)
        slots = max(_up(sum(one.slots for one in forwards) / len(forwards), SLOT_STEP), max(counts) + SLOT_STEP)
        measured = measure_forwards(model, rows, slots, counts, rounds=4 * job.repeats, budget_s=CURVE_BUDGET_S)
        size = size_of(model)
        dtype = getattr(torch, job.dtype) if hasattr(torch, job.dtype) else torch.float32
        rates = machine_rates(model.device, dtype, size.read_bytes) if size else None
        curves.append(
            Curve(
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
        )
    return tuple(curves)


def _up(value: float, step: int) -> int:
    return math.ceil(value / step) * step


def _drafts(method: MethodConfig) -> list[int]:
    """Values of K to look at: enough for a layer to pass, and the one in use."""
    least = method.num_beams if method.width == "fixed" else 1
    most = max(LEAST_DRAFTS, 3 * method.num_beams, method.drafts_per_layer)
    return sorted({k for k in (*DRAFTS, method.num_beams, method.drafts_per_layer) if least <= k <= most})


def _other_drafts(method: MethodConfig) -> ForestSize:
    """A setting with another K than the one in use, and no more than two layers."""
    values = _drafts(method)
    drafts = values[-1] if values[-1] != method.drafts_per_layer else values[0]
    return replace(setting_of(method), depth=min(method.depth, 2), drafts_per_layer=drafts)


def costs_of(run: Run, plain: Run, other: Run, curves: tuple[Curve, ...]) -> Costs:
    """What the parts of an iteration cost in a run, in one without drafts and in one with another K. Curves are
    scaled to the forwards of the runs, because rows leave a batch as they finish."""
    method, log, first_nodes = run.method, run.log, float(run.method.num_beams)
    lines: dict[Role, Interpolation] = {}
    for curve in (one for one in curves if one.role == "target" or drafts_nodes(method)):
        line = Interpolation(tuple((point.nodes, point.seconds.median) for point in curve.points))
        work = [_work(some, curve.role) for some in (run, plain, other)]
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
        rows=run.calls / log.iterations,
        plain_rows=plain.calls / plain.log.iterations,
        steps=run.steps,
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
        forwards = [one for one in log.forwards if (one.role, one.kind) == (role, "forest")]
        return [one.nodes for one in forwards], sum(one.seconds() for one in forwards)
    drafts, beams, depth = method.drafts_per_layer, method.num_beams, method.depth
    nodes = [beams + depth * drafts] if role == "target" else [beams, *[drafts] * (depth - 1)] if depth else []
    return nodes * log.iterations, log.phases[role] if nodes else 0.0


def _rest(run: Run) -> float:
    """Seconds of an iteration outside of forwards."""
    forwards = _work(run, "target")[1] + _work(run, "draft")[1]
    return max(run.seconds - _once(run) - forwards, 0.0) / run.log.iterations


def _predict(job: ProfileSpec, costs: Costs) -> tuple[tuple[Prediction, ...], Acceptance]:
    """Draft the forests in use and larger ones, and replay smaller ones from them."""
    method, bench = job.method, job.bench
    if not method.depth:
        return predictions(costs, {}, ()), {}
    job.told("drafting larger forests")
    drafts, depth, beams = _drafts(method), max(method.depth, LEAST_DEPTH), method.num_beams
    dynamic = method.width == "threshold"
    requests = bench.requests
    if len({one.seed for one in requests}) < len(requests):  # a probe knows rows by their seeds
        requests = tuple(replace(one, seed=derive_seed(0, str(place))) for place, one in enumerate(requests))
    chains = []
    # the larger forests stop where drafting is hard, and so begin there too; those in use are no such choice
    for looked_at in {method, replace(method, drafts_per_layer=max(drafts), depth=depth)}:
        log = RunLog()
        engine = bench.engine(looked_at, log, log_steps=True)
        probe = DraftProbe(drafts, beams, method.width_threshold if dynamic else None)
        watch(engine, probe)
        chains += probe.chains(bench.run(engine, log, requests).results)
    widths: list[int | None] = [*range(1, beams + 1)] if dynamic else [None]
    rates = acceptance_rates(chains, drafts, widths, beams, depth)
    possible = {key: rate for key, rate in rates.items() if key[1] is None or key[1] <= key[0]}
    return predictions(costs, possible, range(1, depth + 1)), possible


def _rounds(job: ProfileSpec, settings: list[ForestSize]) -> dict[ForestSize, list[Run]]:
    """Runs of all settings in turn, after one each to warm up."""
    runs: dict[ForestSize, list[Run]] = {setting: [] for setting in settings}
    for number in range(job.repeats):
        for setting in settings:
            job.told(f"round {number + 1} of {job.repeats}: {setting.label}")
            runs[setting].append(job.bench.timed(method_for(job.method, setting), every=not job.bench.captures))
    return runs


def _measured(setting: ForestSize, runs: list[Run], predicted: Prediction | None) -> MeasuredSetting:
    last = runs[-1]
    return MeasuredSetting(
        setting=setting,
        seconds=spread_of([run.seconds for run in runs]),
        tokens=last.tokens,
        tokens_per_s=spread_of([run.tokens / run.seconds for run in runs]),
        steps_per_call=last.steps / last.calls,
        iterations=last.log.iterations,
        mean_width=last.width,
        phases=_median_phases(runs),
        predicted=predicted,
    )


def _median_phases(runs: list[Run]) -> tuple[Phase, ...]:
    """The phases of the run of median length."""
    return phases_of(sorted(runs, key=lambda run: run.seconds)[len(runs) // 2])


def _profile(
    job: ProfileSpec,
    machine: Machine,
    first: Run,
    measured: dict[ForestSize, MeasuredSetting],
    curves: tuple[Curve, ...],
    rates: Acceptance,
    found: tuple[Prediction, ...],
    best: ForestSize,
    memory: tuple[Owner, ...],
    told: list[str],
    forest: ShownForest | None,
) -> Profile:
    bench, method = job.bench, job.method
    now = setting_of(method)
    rate = rates.get((now.drafts_per_layer, now.min_width))
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
        prompt_tokens=sum(result.prompt_tokens for result in first.results),
        repeats=job.repeats,
        machine=machine,
        now=measured[now],
        tried=tuple(one for setting, one in measured.items() if setting != now),
        curves=curves,
        acceptance=tuple(DepthRate(depth, reached, passed) for depth, (reached, passed) in enumerate(layers, 1)),
        predictions=found,
        best=best,
        memory=memory,
        notes=tuple(told),
        recommended_command=job.render(best),
        forest=forest,
        drafters=_drafter_rates(first),
        tree=method.tree if method.depth and "dynamic-tree" in method.drafter.split("+") else None,
    )


def _drafter_rates(run: Run) -> tuple[DrafterRate, ...]:
    """Of a run with two drafters, the first one first."""
    sums: dict[str, DrafterStats] = {}
    for result in run.results:
        for name, part in result.stats.drafters.items():
            sums.setdefault(name, DrafterStats()).add(part)
    return tuple(DrafterRate(name, part.drafted, part.accepted) for name, part in sums.items())
