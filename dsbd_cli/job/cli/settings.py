"""From given options to settings. An option that could not act is refused with one line, never ignored."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import TypeVar

from dsbd_cli.config import (
    BUILTIN_DRAFT,
    BUILTIN_TARGET,
    DEFAULT_BATCH_SIZE,
    DEFAULT_DEPTH,
    MAX_AUTO_DEPTH,
    MODEL_DRAFTERS,
    MethodConfig,
    ModelSpec,
    OnTooLong,
    SamplingConfig,
    check_drafter_name,
)
from dsbd_cli.errors import UsageError
from dsbd_cli.job.cli.drafter_options import DrafterOptions, drafter_settings
from dsbd_cli.job.cli.options import (
    DeviceOptions,
    FileOptions,
    MethodOptions,
    PairOptions,
    RowOptions,
    SamplingOptions,
)
from dsbd_cli.job.records import RowReader

__all__ = ["OPTIONS", "RunSettings", "fixed_depth", "model_specs", "run_settings"]

T = TypeVar("T")

OPTIONS = frozenset(
    item.name
    for group in (
        FileOptions,
        PairOptions,
        MethodOptions,
        DrafterOptions,
        SamplingOptions,
        DeviceOptions,
        RowOptions,
    )
    for item in fields(group)
)


@dataclass(frozen=True, slots=True)
class RunSettings:
    """All that a run needs to know; `draft` is None where nothing is drafted, `batch_size` where memory decides."""

    target: str
    draft: str | None
    method: MethodConfig
    rows: RowReader
    batch_size: int | None
    on_too_long: OnTooLong
    max_errors: int | None


def run_settings(
    pair: PairOptions,
    method: MethodOptions,
    sampling: SamplingOptions,
    devices: DeviceOptions,
    failing: RowOptions,
    drafter: DrafterOptions | None = None,
) -> RunSettings:
    """Settle defaults and refuse what contradicts itself. Raises UsageError."""
    _check_drafter(drafter, method)
    proposing = drafter_settings(drafter or DrafterOptions())
    target, draft = _pair(pair, method, str(proposing["drafter"]))
    _check_devices(devices, draft)
    drafting = draft is not None or not _needs_draft(str(proposing["drafter"]))
    if not drafting:
        _refuse(
            "there is no draft",
            ("--drafts-per-layer", method.drafts_per_layer),
            ("--width threshold", method.width == "threshold" or None),
            ("--width-threshold", method.width_threshold),
            ("--min-width", method.min_width),
        )
    if method.rule == "search":
        _refuse(
            "rule search is deterministic beam search",
            ("--temperature", sampling.temperature or None),
            ("--top-k", sampling.top_k),
            ("--top-p", sampling.top_p),
            ("--min-p", sampling.min_p),
            ("--warp-scope", method.warp_scope),
            ("--width threshold", method.width == "threshold" or None),
            ("--seed", sampling.seed),
        )
    config = _method(method, proposing, drafting=drafting)
    rows = _rows(sampling, config, strict=bool(failing.strict))
    batch_size: int | None = None
    if devices.batch_size != "auto":
        batch_size = _given(_number("--batch-size", devices.batch_size, 0), DEFAULT_BATCH_SIZE)
        if batch_size < 1:
            raise UsageError(f"--batch-size is {batch_size}, but must be 1 or more")
    on_too_long: OnTooLong = failing.on_too_long or "error"
    return RunSettings(target, draft, config, rows, batch_size, on_too_long, _max_errors(failing))


def model_specs(settings: RunSettings, devices: DeviceOptions) -> tuple[ModelSpec, ModelSpec | None]:
    """How target and draft are to be loaded."""
    given = {item.name: getattr(devices, item.name) for item in fields(ModelSpec) if hasattr(devices, item.name)}
    target = ModelSpec(settings.target, **{name: value for name, value in given.items() if value is not None})
    return target, None if settings.draft is None else target.of_draft(settings.draft, devices.draft_device)


def fixed_depth(pair: PairOptions, method: MethodOptions, drafter: str | None = None) -> MethodOptions:
    """The options with the library's depth in place of `auto` by default, for commands that measure a forest."""
    drafting = pair.draft != "none" or not _needs_draft(drafter or MethodConfig().drafter)
    open_ = method.depth is None and drafting
    return replace(method, depth=str(DEFAULT_DEPTH)) if open_ else method


def _given(value: T | None, default: T) -> T:
    return default if value is None else value


def _number(option: str, given: str | None, auto: int) -> int | None:
    """A number that may also be `auto`."""
    if given is None or given == "auto":
        return None if given is None else auto
    try:
        return int(given)
    except ValueError:
        raise UsageError(f"{option} is {given!r}, but must be a number or auto") from None


def _refuse(reason: str, *options: tuple[str, object]) -> None:
    """Options that were given although they could not act."""
    if given := [name for name, value in options if value is not None]:
        drop = "drop it" if len(given) == 1 else "drop them"
        raise UsageError(f"{', '.join(given)} would do nothing, because {reason}: {drop}")


def _needs_draft(drafter: str) -> bool:
    return any(name in MODEL_DRAFTERS for name in drafter.split("+"))


def _check_drafter(given: DrafterOptions | None, method: MethodOptions) -> None:
    """What can be told before any default is known."""
    name = given.drafter if given is not None else None
    if name is not None:
        check_drafter_name(name)
    if name is not None and _number("--depth", method.depth, MAX_AUTO_DEPTH) == 0:
        raise UsageError(f"--depth 0 drafts nothing, but --drafter is {name}: drop one of them")


def _pair(pair: PairOptions, method: MethodOptions, drafter: str) -> tuple[str, str | None]:
    """Names of target and draft. --depth 0 alone means no draft; with a draft named it is a contradiction."""
    target, depth = _given(pair.target, BUILTIN_TARGET), _number("--depth", method.depth, MAX_AUTO_DEPTH)
    if not target or pair.draft == "":
        raise UsageError("--target and --draft need a name: an alias, a folder or a hub id")
    if not _needs_draft(drafter):
        if pair.draft not in (None, "none"):
            raise UsageError(f"--draft {pair.draft} would do nothing, because drafter {drafter} runs no model: drop it")
        return target, None
    if pair.draft == "none":
        if method.rule == "fuzzy":
            raise UsageError("--rule fuzzy compares the target with a draft model, but --draft is none: name one")
        if drafter != MethodConfig().drafter:
            raise UsageError(f"--drafter {drafter} needs a draft model, but --draft is none: name one")
        if method.depth is not None and depth:
            raise UsageError(f"--depth {method.depth} needs a draft, but --draft is none: use --depth 0 or drop it")
        return target, None
    if depth == 0:
        if pair.draft is not None:
            raise UsageError(f"--depth 0 drafts nothing, but --draft is {pair.draft}: use --draft none")
        return target, None
    if pair.draft is None and not target.startswith("builtin:"):
        raise UsageError(
            f"--target is {target}, but --draft is missing and the built-in draft fits only the built-in target: "
            "name a draft, or use --draft none"
        )
    return target, _given(pair.draft, BUILTIN_DRAFT)


def _check_devices(devices: DeviceOptions, draft: str | None) -> None:
    if devices.device is not None and devices.device_map is not None:
        raise UsageError("--device and --device-map cannot be used together: give one of them")
    if draft is None:
        _refuse("there is no draft", ("--draft-device", devices.draft_device))


def _method(given: MethodOptions, proposing: Mapping[str, object], *, drafting: bool) -> MethodConfig:
    """What is not given is left to MethodConfig, the one place of the defaults."""
    options = {item.name: getattr(given, item.name) for item in fields(given)} | {"depth": None}
    if not drafting:
        options["depth"] = 0
    elif given.depth == "auto":
        options["adaptive_depth"] = True
    else:
        options["depth"] = _number("--depth", given.depth, MAX_AUTO_DEPTH)
    method = MethodConfig(**{name: value for name, value in options.items() if value is not None}, **proposing)  # type: ignore[arg-type]
    if method.width != "threshold":
        _refuse(
            f"the width is {method.width} (--width threshold would use it)",
            ("--width-threshold", given.width_threshold),
            ("--min-width", given.min_width),
        )
    if given.memory_saving and method.num_beams == 1:
        raise UsageError("--memory-saving keeps one beam of several, but --num-beams is 1: drop it")
    return method


def _rows(given: SamplingOptions, method: MethodConfig, *, strict: bool) -> RowReader:
    for text in given.stop or ():
        if not text.isprintable() and any("\ud800" <= char <= "\udfff" for char in text):
            raise UsageError(f"--stop is {text!r}, which is not UTF-8")
    default = SamplingConfig()
    sampling = SamplingConfig(
        temperature=_given(given.temperature, default.temperature),
        top_k=_given(given.top_k, default.top_k),
        top_p=_given(given.top_p, default.top_p),
        min_p=_given(given.min_p, default.min_p),
        max_new_tokens=_given(given.max_new_tokens, default.max_new_tokens),
        stop=tuple(given.stop or default.stop),
        length_penalty=_given(given.length_penalty, default.length_penalty),
        early_stopping=_given(given.early_stopping, default.early_stopping),
        n_best=_given(given.n_best, default.n_best),
    )
    seed = _given(given.seed, RowReader().seed)
    return RowReader(sampling, seed, method.rule, method.num_beams, strict)


def _max_errors(given: RowOptions) -> int | None:
    if given.fail_fast and given.max_errors is not None:
        raise UsageError("--fail-fast and --max-errors cannot be used together: give one of them")
    if given.max_errors is not None and given.max_errors < 1:
        raise UsageError(f"--max-errors is {given.max_errors}, but must be 1 or more")
    return 1 if given.fail_fast else given.max_errors
