"""Checks of what runs on this machine, and how. Every part is tried, also where another one fails."""

from __future__ import annotations

import itertools
import platform
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from dsbd_cli.config.method import MethodConfig
from dsbd_cli.config.model import BUILTIN_TARGET, ModelSpec
from dsbd_cli.config.sampling import SamplingConfig
from dsbd_cli.errors import DsbdError, ModelNotFoundError, denial, plural
from dsbd_cli.lab.metrics.environment import cpu_name, installed, own_commit, versions
from dsbd_cli.lab.reports.units import bytes_text, figure, seconds_text
from dsbd_cli.lab.tasks.choose import TASKS
from dsbd_cli.models.checkpoints.catalog import fit
from dsbd_cli.models.checkpoints.checkpoint import Checkpoint, open_pair
from dsbd_cli.ops.processor import current
from dsbd_cli.requests import Request
from dsbd_cli.threads import processors

if TYPE_CHECKING:
    from dsbd_cli.engine.decoding.engine import Engine
    from dsbd_cli.engine.protocols import ForestModel
    from dsbd_cli.models.pair import LoadedPair

State = Literal["ok", "note", "off", "broken"]
Facts = dict[str, object]

OPTIONAL = ("triton", "ray")  # packages that parts of this one use where they are installed
NVIDIA = Path("/proc/driver/nvidia/version")  # this file exists where a driver is installed
GIB = 2**30
BEAMS, DEPTH = 4, 4
PROMPTS = (
    "The library opens at nine and closes at six. On Sunday it",
    "To change a tyre you need a jack and a wrench. First",
)
TOKENS = 24  # new tokens of the texts that are compared
MEMORY_TOKENS = 2000  # tokens of the rows whose number is reported


@dataclass(frozen=True, slots=True)
class Check:
    """The result for one part.

    Attributes:
        state: ok: it works. note: it works, and there is something to know. off: it is not in use here. broken: it does
            not work.
        text: for people, in one line. facts: numbers and names of the part, by name.
    """

    name: str
    state: State
    text: str
    facts: Facts = field(default_factory=dict)


class _BrokenError(Exception):
    """An error for a part that does not do what it should. Its message becomes the text of the check."""


def check_up(target: ModelSpec, draft: ModelSpec | None, seconds: float) -> Iterator[Check]:
    """Yield the check of every part, in order, as soon as it is done. seconds: for measuring the speed, in all.

    Nothing is downloaded. Where the models are not on this machine, the parts that need them are left out.
    """
    yield _check("versions", _versions)
    yield _check("machine", _machine)
    yield _check("GPU", _gpu)
    if draft is not None:
        fits = _check("pair", partial(_pair, target, draft))
        yield fits
        draft = None if fits.state == "broken" else draft
    try:
        pair, load_s = _load(target, draft)
    except Exception as error:
        yield _broken("models", error)
        return
    from dsbd_cli.engine.protocols import EncoderDecoderCodec

    yield _check("models", lambda: _models(target, draft, pair, load_s))
    yield _check("forest", lambda: _forest(pair))
    yield _check("numerics", lambda: _numerics(pair, target))
    graphs = _check("graphs", lambda: _graphs(pair))
    yield graphs
    captured = None if graphs.state == "ok" else False  # as a load leaves out captures that fail
    yield _check("kernels", lambda: _kernels(pair))
    yield _check("memory", lambda: _memory(pair))
    prompts = _prompts(target)
    if isinstance(pair.codec, EncoderDecoderCodec) and pair.codec.reads != "text":
        yield Check("texts", "off", f"the target reads {pair.codec.reads} files: no text can be tried on it")
        return
    yield _check("texts", lambda: _texts(pair, prompts, captured))
    share = seconds / (1 if pair.draft is None else 2)
    yield _check("speed", lambda: _speed(pair, prompts, share, captured))


def _check(name: str, part: Callable[[], tuple[State, str, Facts]]) -> Check:
    """Try a part and return its check. An error that it raises becomes a check, too."""
    try:
        return Check(name, *part())
    except Exception as error:
        return _broken(name, error)


def _broken(name: str, error: Exception) -> Check:
    """Return the check of a part that has raised an error."""
    line = str(error) if isinstance(error, DsbdError | _BrokenError) else denial(error)
    if line is not None:
        return Check(name, "broken", line, {"error": line})
    message = " ".join(f"{type(error).__name__}: {error}".split()).rstrip(": ")
    return Check(name, "broken", f"{message[:300]} (unexpected)", {"error": message})


# The machine


def _versions() -> tuple[State, str, Facts]:
    installed_versions = versions() | {name: installed(name) for name in OPTIONAL}
    commit = own_commit()
    shown = [f"{name} {version}" for name, version in installed_versions.items() if version is not None]
    shown[0] += f" ({commit})" if commit else ""
    return "ok", ", ".join(shown), {"versions": installed_versions, "commit": commit}


def _machine() -> tuple[State, str, Facts]:
    import torch

    from dsbd_cli.engine.planning.memory_limit import free_bytes, memory_bytes

    cpu, threads = torch.device("cpu"), torch.get_num_threads()
    cores = processors()
    total, free = memory_bytes(cpu), free_bytes(cpu)
    system = f"{platform.system()} {platform.machine()}"
    beside = f"{plural(cores, 'core')}, {plural(threads, 'thread')}"
    text = f"{cpu_name()} ({current()}), {beside}, {free / GIB:.1f} of {total / GIB:.1f} GiB free; {system}"
    facts = {
        "cpu": cpu_name(),
        "processor": str(current()),
        "cores": cores,
        "threads": threads,
        "memory_bytes": total,
        "free_bytes": free,
    }
    return "ok", text, {**facts, "system": system}


def _gpu() -> tuple[State, str, Facts]:
    import torch

    built = torch.version.cuda
    if not torch.cuda.is_available():
        if built is None and NVIDIA.exists():
            raise _BrokenError(f"there is an NVIDIA driver, but torch {torch.__version__} is built without CUDA")
        if NVIDIA.exists():
            raise _BrokenError(f"torch is built for CUDA {built} and the driver is there, but torch sees no device")
        return "off", f"none; torch {'is built without CUDA' if built is None else f'is built for CUDA {built}'}", {}
    lines, facts = [], []
    for index in range(torch.cuda.device_count()):
        name, (major, minor) = torch.cuda.get_device_name(index), torch.cuda.get_device_capability(index)
        free, total = torch.cuda.mem_get_info(index)
        try:
            values = torch.arange(64.0, device=f"cuda:{index}").reshape(8, 8)
            right = bool(torch.equal((values @ values.t()).cpu(), values.cpu() @ values.cpu().t()))
        except RuntimeError as error:
            raise _BrokenError(f"cuda:{index} {name} (sm_{major}{minor}) computes nothing: {error}") from error
        if not right:
            raise _BrokenError(f"cuda:{index} {name} (sm_{major}{minor}) gives a wrong product of whole numbers")
        lines.append(f"cuda:{index} {name}, sm_{major}{minor}, {free / GIB:.1f} of {total / GIB:.1f} GiB free")
        facts.append({"name": name, "capability": f"{major}.{minor}", "free_bytes": free, "memory_bytes": total})
    return "ok", f"{'; '.join(lines)}; CUDA {built}", {"cuda": built, "devices": facts}


# The models


def _pair(target: ModelSpec, draft: ModelSpec) -> tuple[State, str, Facts]:
    from dsbd_cli.models.draft_heads.formats import is_draft_head

    if draft.in_target:
        return "ok", "the draft is the target's own MTP layer", {}
    small = Checkpoint.open(draft, fetch=False)
    if is_draft_head(small.path):
        return "ok", "the draft is a head, which has no tokenizer; whether it fits is told at load", {}
    fitted = fit(Checkpoint.open(target, fetch=False), small)
    limit = "no limit of positions" if fitted.positions is None else f"{fitted.positions:,} positions"
    text = "; ".join([f"target and draft fit: {fitted.tokens:,} tokens in common, {limit}", *fitted.notes])
    return "ok", text, {"tokens": fitted.tokens, "positions": fitted.positions, "notes": list(fitted.notes)}


def _load(target: ModelSpec, draft: ModelSpec | None) -> tuple[LoadedPair, float]:
    """Load and test the models, and return them with the seconds that it took."""
    from dsbd_cli.models.checkpoints.hub import has_weights
    from dsbd_cli.models.pair import load_pair

    pair = open_pair(target, draft, fetch=False)
    for checkpoint in pair:
        if checkpoint is not None and not checkpoint.is_gguf and not has_weights(checkpoint.path):
            raise ModelNotFoundError(f"{checkpoint.name}: its weights are not on this machine")
    begin = time.monotonic()
    return load_pair(*pair, anew=True), time.monotonic() - begin


def _models(target: ModelSpec, draft: ModelSpec | None, pair: LoadedPair, load_s: float) -> tuple[State, str, Facts]:
    from dsbd_cli.models.forest_model import size_of

    lines: list[str] = []
    facts: Facts = {"load_s": load_s}
    for spec, model, dtype in zip((target, draft), _members(pair), (pair.target_dtype, pair.draft_dtype), strict=False):
        assert spec is not None
        size = size_of(model)
        how = f" ({spec.dtype})" if spec.dtype == "auto" else ""
        weights = "" if size is None else f", {bytes_text(size.held_bytes)}"
        name = getattr(model, "architecture", type(model).__name__)
        lines.append(f"{spec.role} {spec.source}: {name}, {dtype}{how} on {model.device}{weights}")
        facts[spec.role] = {
            "source": spec.source,
            "architecture": name,
            "dtype": dtype,
            "device": str(model.device),
            "weight_bytes": None if size is None else size.held_bytes,
        }
    if draft is None:
        lines.append("no draft")
    notes = [*([] if pair.draft_form is None else [f"draft: {pair.draft_form}"]), *pair.notes]
    facts["told"] = notes
    return "ok", "; ".join([*lines, f"loaded and tested in {load_s:.1f} s", *notes]), facts


def _members(pair: LoadedPair) -> list[ForestModel]:
    """Return the target, and the draft where there is one."""
    return [pair.target] if pair.draft is None else [pair.target, pair.draft]  # type: ignore[list-item]


def _forest(pair: LoadedPair) -> tuple[State, str, Facts]:
    """Report the errors that the self-test measured at load. It has passed, or the models would not be loaded."""
    lines: list[str] = []
    facts: Facts = {}
    for role, model in zip(("target", "draft"), _members(pair), strict=False):
        report = getattr(model, "tested", None)
        if report is not None:
            lines.append(
                f"{role} off by {report.median_error:.0e} at the median (limit {report.limit:.0e}), "
                f"{report.largest_error:.0e} at most"
            )
            facts[role] = {"median_error": report.median_error, "largest_error": report.largest_error}
    return "ok", f"a packed tree has the logits of its separate paths: {'; '.join(lines)}", facts


def _numerics(pair: LoadedPair, target: ModelSpec) -> tuple[State, str, Facts]:
    if pair.target.invariant:
        return "ok", "same-text: no bit of the logits depends on the draft or the batch", {"exactness": "same-text"}
    why = getattr(pair.target, "varies", None) or "the target does not say why"
    if target.numerics == "fast":
        why = "numerics is fast"
    text = f"same-law: rounding may change a text with the draft or the batch; {why}"
    return "note", text, {"exactness": "same-law", "reason": why}


def _graphs(pair: LoadedPair) -> tuple[State, str, Facts]:
    from dsbd_cli.engine.checks.captures import captured_otherwise

    model = pair.target
    if model.device.type != "cuda":
        return "off", f"iterations are captured on a GPU only; the target is on {model.device}", {}
    engine = _engine(pair, depth=DEPTH)
    why: str | None = "the models do not lie whole on one GPU, or their forwards read the host"
    if engine.stepper.graphs is not None:
        why = captured_otherwise(engine)
    if why is not None:
        return "note", f"iterations run plainly: {why}", {"reason": why}
    return "ok", "iterations are captured as CUDA graphs; a captured one gives what a plain one gives", {}


def _kernels(pair: LoadedPair) -> tuple[State, str, Facts]:
    """Return state, sentence and facts on which backend serves each operation of the target and of an iteration."""
    from dsbd_cli.engine.iteration.devices import iteration_ops
    from dsbd_cli.ops.select import rejected_kernels

    target, ops_by_backend = pair.target, dict[tuple[str, str], list[str]]()
    reports = {report.op: report for report in (*target.ops.report, *iteration_ops(target.device, None).report)}
    for report in reports.values():
        ops_by_backend.setdefault((report.backend, report.reason), []).append(report.op)
    products, wrong = _products(target), rejected_kernels(target.device, None)
    ours = sum(getattr(product, "compiled", False) for product in products)
    facts: Facts = {
        "ops": {name: {"backend": report.backend, "reason": report.reason} for name, report in reports.items()},
        "linear_layers": len(products),
        "linear_layers_as_kernels": ours,
    }
    lines = [f"{backend}: {', '.join(names)} ({reason})" for (backend, reason), names in ops_by_backend.items()]
    if target.device.type == "cpu":
        lines.append(f"{ours} of {len(products)} linear layers run as kernels of numba")
    served = any(report.backend != "torch" for report in reports.values())
    return "broken" if wrong else "ok" if served else "off", "; ".join([*lines, *wrong]), facts


def _products(target: ForestModel) -> list[object]:
    """Return the linear layers of a model. Our own decoder joins those that read the same input into one."""
    from torch.nn import Linear

    from dsbd_cli.models.decoder.decoder_model import DecoderForestModel
    from dsbd_cli.models.transformers_backend.base import TransformersForestModel
    from dsbd_cli.models.transformers_backend.patching import PackedLinear, QuantizedLinear

    if isinstance(target, DecoderForestModel):
        weights = target.decoder.weights
        names = ("qkv", "out", "gate_up", "down")
        return [*(getattr(layer, name) for layer in weights.layers for name in names), weights.lm_head]
    if not isinstance(target, TransformersForestModel):
        return []
    return [module for module in target.module.modules() if isinstance(module, PackedLinear | QuantizedLinear | Linear)]


def _memory(pair: LoadedPair) -> tuple[State, str, Facts]:
    from dsbd_cli.engine.planning.memory_limit import fitting_rows, free_bytes

    models = _members(pair)
    nodes = BEAMS * (1 + 2 * DEPTH)
    free, cache = free_bytes(pair.target.device), sum(model.kv_bytes_per_slot() for model in models)
    slots = MEMORY_TOKENS + 2 * nodes
    rows = fitting_rows(models, slots, nodes, free)
    text = (
        f"{bytes_text(free)} free on {pair.target.device} with the models loaded; "
        f"a token takes {bytes_text(cache)} of cache; "
        f"room for {plural(rows, 'row')} of {MEMORY_TOKENS:,} tokens and {BEAMS} beams together"
    )
    return "ok", text, {"free_bytes": free, "cache_bytes_per_token": cache, "rows": rows}


# Texts


def _prompts(target: ModelSpec) -> tuple[str, ...]:
    if target.source != BUILTIN_TARGET:
        return PROMPTS
    return tuple(record.prompt for record in itertools.islice(TASKS["sql"].records(), len(PROMPTS)))


def _engine(pair: LoadedPair, *, depth: int | None, captured: bool | None = None) -> Engine:
    """Make an engine over the pair with beam search, whose text does not depend on chance. depth: None for the default.
    Without a draft model, drafts come from the prompt. captured: False for iterations without CUDA graphs."""
    from dsbd_cli.engine.decoding.engine import Engine

    drafts = depth is None or depth > 0
    how: dict[str, object] = {} if depth is None else {"depth": depth}
    if drafts and pair.draft is None:
        how["drafter"] = "ngram"
    method = MethodConfig.of({"rule": "search", "num_beams": BEAMS, **how})
    return Engine(pair.target, pair.draft if drafts else None, pair.codec, method, batch_size=2, cuda_graphs=captured)


def _texts(pair: LoadedPair, prompts: Sequence[str], captured: bool | None) -> tuple[State, str, Facts]:
    sampling = SamplingConfig(max_new_tokens=TOKENS, n_best=BEAMS)
    requests = [Request(prompt, sampling=sampling) for prompt in prompts]
    results_by_depth = [_engine(pair, depth=depth, captured=captured).generate(requests) for depth in (0, DEPTH)]
    texts = [[[(beam.token_ids, beam.logprob) for beam in row.hypotheses] for row in rows] for rows in results_by_depth]
    equal, total = sum(mine == other for mine, other in zip(*texts, strict=True)), len(prompts)
    tokens = [[[ids for ids, _ in row] for row in way] for way in texts]
    alike = sum(mine == other for mine, other in zip(*tokens, strict=True))
    drafter, them = ("the draft", "it") if pair.draft is not None else ("drafts from the prompt", "them")
    lines = f"beam search with and without {drafter}: {equal} of {total} prompts give the same {BEAMS} beams"
    stats = [row.stats for row in results_by_depth[1]]
    steps = sum(row.steps for row in stats) / sum(row.target_calls for row in stats)
    facts: Facts = {"equal": equal, "same_tokens": alike, "prompts": total, "steps_per_call": steps}
    text = f"{lines}, bit for bit; {steps:.1f} steps per target call with {them}"
    if equal == total:
        return "ok", text, facts
    if pair.target.invariant:
        raise _BrokenError(f"{lines}, and all should: the target passed as same-text")
    return "note", f"{lines} to the bit, {alike} of {total} the same tokens; others are as likely (same-law)", facts


def _speed(pair: LoadedPair, prompts: Sequence[str], seconds: float, captured: bool | None) -> tuple[State, str, Facts]:
    from dsbd_cli.models.forest_model import size_of

    plain, call_s = _steps_per_second(_engine(pair, depth=0, captured=captured), prompts, seconds)
    size = size_of(pair.target)
    rate = None if size is None else size.read_bytes / call_s
    text = f"beam search, {BEAMS} beams, one prompt at a time: {figure(plain)} tokens/s without a draft"
    facts: Facts = {"tokens_per_s": plain, "target_call_s": call_s, "weight_bytes_per_s": rate}
    text += f" ({seconds_text(call_s)} per target call"
    text += ")" if rate is None else f", weights at {figure(rate / 1e9)} GB/s)"
    if pair.draft is not None:
        drafted, _ = _steps_per_second(_engine(pair, depth=None, captured=captured), prompts, seconds)
        facts["drafted_tokens_per_s"] = drafted
        text += f", {figure(drafted)} with the draft"
    return "ok", text, facts


def _steps_per_second(engine: Engine, prompts: Sequence[str], seconds: float) -> tuple[float, float]:
    """Return steps per second and seconds per target call, measured on the prompts in turn. A step makes all beams one
    token longer. The engine is stopped in the end."""
    sampling = SamplingConfig(max_new_tokens=64, n_best=BEAMS)
    engine = engine.replace(batch_size=1)
    engine.generate(Request(prompts[0], sampling=SamplingConfig(max_new_tokens=4)))  # set-up of the first use
    begun, first = time.monotonic(), engine.steps
    timer = threading.Timer(seconds, engine.stop)
    timer.daemon = True
    calls, target_s = 0, 0.0
    timer.start()
    try:
        for result in engine.run(Request(prompt, sampling=sampling) for prompt in itertools.cycle(prompts)):
            result.check()
            calls, target_s = calls + result.stats.target_calls, target_s + result.stats.target_s
            last, steps = time.monotonic(), engine.steps
    finally:
        timer.cancel()
    took = time.monotonic() - begun
    if not calls:  # no row was done in time
        steps = engine.steps - first
        if not steps:
            raise _BrokenError(f"no token in {took:.0f} s")
        return steps / took, took / steps
    return (steps - first) / (last - begun), target_s / calls
