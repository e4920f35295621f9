"""Conversion of the given options to settings. An option that could not act is refused with one line, never ignored."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar, cast

import orjson

from dsbd_cli.cli.options.options import (
    PIPED,
    AnswerOptions,
    DeviceOptions,
    FileOptions,
    MethodOptions,
    PairOptions,
    RowOptions,
    SamplingOptions,
    TemplateOptions,
)
from dsbd_cli.config.chat import check_template_kwargs, template_text
from dsbd_cli.config.checking import require
from dsbd_cli.config.grammars import Grammar
from dsbd_cli.config.method import DEFAULT_BATCH_SIZE, DEFAULT_DEPTH, MAX_AUTO_DEPTH, MethodConfig
from dsbd_cli.config.model import BUILTIN_DRAFT, BUILTIN_TARGET, ModelSpec, OnTooLong
from dsbd_cli.config.sampling import SamplingConfig
from dsbd_cli.config.spelling import parse, parse_drafter, typed_names
from dsbd_cli.config.variants import GRAMMAR, RULES, SEARCH, SUFFIX, WIDTHS, runs_model, sampling_rules
from dsbd_cli.engine.constraints.answer_files import check_answer_file
from dsbd_cli.errors import UsageError, option_name, reading
from dsbd_cli.io.lines.compression import compression
from dsbd_cli.io.lines.encoding import check_text_file
from dsbd_cli.io.records.reader import RowReader, stops_fault
from dsbd_cli.io.records.record_parts import DIGESTS
from dsbd_cli.io.records.row import MAX_LINE_BYTES

if TYPE_CHECKING:
    from dsbd_cli.engine.decoding.engine import Engine

T = TypeVar("T")

DEFAULT_METHOD = MethodConfig()
NO_ROWS = RowOptions()  # not given
SPREADS = ("balanced", "balanced_low_0", "sequential")  # names of device maps that are no device

# by setting of a run: its name as the user types it
TYPED = {
    **typed_names(item.name for group in (*PIPED, FileOptions, AnswerOptions) for item in fields(group)),
    "rule": "--decode or --verify",
    **DIGESTS,
}


@dataclass(frozen=True, slots=True)
class RunSettings:
    """Settings of a run.

    `draft` is None if no draft model runs, `batch_size` if memory decides. require_valid: a row fails if its best text
    does not match its grammar. allow: a list of answers; a grammar is in `rows`. chat_template: the text of one.
    chat_template_kwargs, threads, cuda_graphs, kernels: see loading.load.
    """

    target: ModelSpec
    draft: ModelSpec | None
    method: MethodConfig
    rows: RowReader
    batch_size: int | None
    on_too_long: OnTooLong
    max_errors: int | None
    require_valid: bool
    allow: Path | None
    chat_template: str | None
    chat_template_kwargs: dict[str, object] | None
    threads: int | None
    cuda_graphs: bool | None
    kernels: bool | None

    @property
    def models(self) -> tuple[ModelSpec, ...]:
        """Target and draft, without a draft that is a part of the target's checkpoint."""
        pair = (self.target, self.draft)
        return tuple(model for model in pair if model is not None and not model.in_target)

    @property
    def files(self) -> tuple[str, ...]:
        """Names of the models, some of which may be single files."""
        return tuple(model.source for model in self.models)

    def loader(self, *, drafts: bool = True, log_steps: bool = False) -> partial[Engine]:
        """Return a function that loads the models into an engine, here or in a worker.

        drafts: load the draft as well, where there is one. log_steps: see loading.load.
        """
        from dsbd_cli.scale.worker import load_engine

        return partial(
            load_engine,
            self.target,
            self.draft if drafts else None,
            method=self.method,
            batch_size=self.batch_size,
            log_steps=log_steps,
            on_too_long=self.on_too_long,
            cuda_graphs=self.cuda_graphs,
            kernels=self.kernels,
            allow=self.allow,
            chat_template=self.chat_template,
            chat_template_kwargs=self.chat_template_kwargs,
            threads=self.threads,
        )

    def load(self) -> Engine:
        """Load the models into an engine. This is where torch is imported."""
        return self.loader()()


def run_settings(
    pair: PairOptions,
    method: MethodOptions,
    sampling: SamplingOptions,
    devices: DeviceOptions,
    failing: RowOptions = NO_ROWS,
    *,
    strict: bool = False,
    chat: bool = False,
    allow: str | None = None,
) -> RunSettings:
    """Return the settings of a run, with defaults filled in. Raises UsageError for options that contradict each other.

    strict: rows with unknown fields fail. chat: prompts become messages. allow: the text of --allow.
    """
    layers = _number("--depth", method.depth, MAX_AUTO_DEPTH)
    if layers is not None and (layers < 0 or (layers == 0 and (has_draft(pair) or method.drafter is not None))):
        raise UsageError(f"--depth is {layers}, but must be 1 or more: --draft none --depth 0 drafts nothing")
    strict_schemas = failing.schema == "strict"
    answers, grammar = allowed_answers(allow, strict=strict_schemas)
    method = _with_drafter(method, pair, grammar)
    chosen = _variant_fields(method)
    target, draft = _model_names(pair, method, str(chosen["drafter"]))
    own = devices_of(devices.device)[1]
    if draft is None:
        refuse_idle("there is no draft", (f"{own} in --device {devices.device}", own))
    drafting = draft is not None or not runs_model(str(chosen["drafter"]))
    _check_idle(method, sampling, chosen, drafting=drafting)
    if answers is not None and sampling.stop:
        raise UsageError(f"--stop {sampling.stop[0]!r} would cut answers, but --allow says where one ends: drop it")
    config = _method(method, chosen, drafting=drafting)
    if answers is not None and GRAMMAR in config.drafter_names:
        refuse_idle(
            "a list of --allow leaves no grammar to draft from", (f"--drafter {method.drafter}", method.drafter)
        )
    if grammar is not None and devices.cuda_graphs:
        raise UsageError(
            f"--set gpu={devices.gpu} cannot be had with a grammar, whose masks the host makes in every iteration: "
            "drop it"
        )
    seed = _or_default(sampling.seed, RowReader().seed)
    rows = RowReader(
        _sampling(sampling),
        seed,
        config.rule,
        config.num_beams,
        strict=strict,
        grammar=grammar,
        chat=chat,
        strict_schemas=strict_schemas,
    )
    batch_size: int | None = None
    if devices.batch_size != "auto":
        batch_size = _or_default(_number("--batch-size", devices.batch_size, 0), DEFAULT_BATCH_SIZE)
        if batch_size < 1:
            raise UsageError(f"--batch-size is {batch_size}, but must be 1 or more")
    target_spec, draft_spec = _model_specs(target, draft, devices)
    template, template_kwargs = template_settings(devices)
    return RunSettings(
        target=target_spec,
        draft=draft_spec,
        method=config,
        rows=rows,
        batch_size=batch_size,
        on_too_long=failing.on_too_long or "error",
        max_errors=failing.max_errors,
        require_valid=bool(failing.require_valid),
        allow=answers,
        chat_template=template,
        chat_template_kwargs=template_kwargs,
        threads=devices.threads,
        cuda_graphs=devices.cuda_graphs,
        kernels=devices.wanted_kernels,
    )


def template_settings(template: TemplateOptions) -> tuple[str | None, dict[str, object] | None]:
    """Return the text of --set chat-template and the variables of --set chat-template-kwargs. Raises UsageError."""
    text = None if template.chat_template is None else template_text(template.chat_template)
    name, written = "chat_template_kwargs", template.chat_template_kwargs
    if written is None:
        return text, None
    try:
        kwargs: object = orjson.loads(written)
    except ValueError:
        kwargs = None
    require(isinstance(kwargs, dict), name, written, "a JSON object")
    check_template_kwargs(kwargs)
    return text, cast("dict[str, object]", kwargs)


def refuse_idle_templates(reason: str, template: TemplateOptions) -> None:
    """Raise UsageError for a template or its variables that were given although nothing is rendered."""
    names = ("chat_template", "chat_template_kwargs")
    refuse_idle(
        reason, *((f"{option_name(name)}={getattr(template, name)}", getattr(template, name)) for name in names)
    )


def _model_specs(target: str, draft: str | None, devices: DeviceOptions) -> tuple[ModelSpec, ModelSpec | None]:
    """Return how target and draft are loaded. Raises UsageError."""
    target_device, draft_device = devices_of(devices.device)
    spread = target_device is not None and (target_device.startswith("{") or target_device in SPREADS)
    trusted = devices.trust_remote_code
    values: dict[str, object] = {
        "dtype": devices.dtype,
        "device": None if spread else target_device,
        "device_map": target_device if spread else None,
        "trust_remote_code": trusted in ("target", "both"),
        "numerics": devices.numerics,
        "tensor_parallel": devices.tensor_parallel,
        "tokenizer": devices.tokenizer,
        "quantize": devices.quantize,
    }
    spec = ModelSpec(target, **{name: value for name, value in values.items() if value is not None})  # type: ignore[arg-type]
    if draft is None:
        if trusted in ("draft", "both"):
            raise UsageError(f"--trust-remote-code is {trusted}, but there is no draft model: name the target alone")
        return spec, None
    return spec, replace(spec.of_draft(draft, draft_device), trust_remote_code=trusted in ("draft", "both"))


def devices_of(device: str | None) -> tuple[str | None, str | None]:
    """Return the target's device of --device, and the draft's if it has one of its own. Raises UsageError."""
    if device is None or device.startswith("{"):
        return device, None
    target, comma, draft = device.partition(",")
    if comma and not (target and draft):
        raise UsageError(
            f"--device is {device!r}, but must be one device, or the target's and the draft's with a comma"
        )
    return target, draft or None


def has_draft(pair: PairOptions) -> bool:
    """Return whether there is a draft model: one that is named, or the built-in one of the built-in target."""
    if pair.draft is None:
        return pair.target in (None, BUILTIN_TARGET)
    return pair.draft != "none"


def fixed_depth(pair: PairOptions, method: MethodOptions) -> MethodOptions:
    """Return the options with the library's fixed depth as default in place of `auto`, for commands that measure a
    forest.

    Without a draft the forest has its roots only, also with a grammar.
    """
    if not has_draft(pair) and method.drafter is None:
        return replace(method, drafter=DEFAULT_METHOD.drafter)
    drafting = has_draft(pair) or not runs_model(str(_variant_fields(method)["drafter"]))
    open_ = method.depth is None and drafting
    return replace(method, depth=str(DEFAULT_DEPTH)) if open_ else method


def _with_drafter(method: MethodOptions, pair: PairOptions, grammar: Grammar | None) -> MethodOptions:
    """Return the options with drafter `grammar`, so that tokens which a grammar forces are drafted without a draft
    model.

    The options stay as they are if there is no grammar, if a draft model or a drafter is given, or if the rule does not
    take such drafts.
    """
    rule = SEARCH if method.decode == "search" else (method.verify or DEFAULT_METHOD.rule).partition(":")[0]
    free = not has_draft(pair) and method.drafter is None
    if (
        grammar is None
        or not free
        or rule not in RULES
        or any(setting.field == "drafter" for setting in RULES[rule].limits)
    ):
        return method
    return replace(method, drafter=GRAMMAR)


def _or_default(value: T | None, default: T) -> T:
    return default if value is None else value


def _number(option: str, text: str | None, auto: int) -> int | None:
    """Return a number that may also be spelled `auto`. auto: the value of that word. Raises UsageError."""
    if text is None or text == "auto":
        return None if text is None else auto
    try:
        return int(text)
    except ValueError:
        raise UsageError(f"{option} is {text!r}, but must be a number or auto") from None


def refuse_idle(reason: str, *options: tuple[str, object]) -> None:
    """Raise UsageError for options that were given although they could not act."""
    if named := [name for name, value in options if value is not None]:
        drop = "drop it" if len(named) == 1 else "drop them"
        raise UsageError(f"{', '.join(named)} would do nothing, because {reason}: {drop}")


def _check_idle(
    method: MethodOptions, sampling: SamplingOptions, chosen: Mapping[str, object], *, drafting: bool
) -> None:
    """Raise UsageError for options that could not act without drafts, or under the rule of --decode search."""
    width = chosen.get("width")
    wide = None if width is None or not WIDTHS[str(width)].dynamic else method.width
    if not drafting:
        refuse_idle(
            "there is no draft",
            ("--drafts-per-layer", method.drafts_per_layer),
            (f"{option_name('width')}={wide}", wide),
        )
    if not RULES[str(chosen["rule"])].samples:
        refuse_idle(
            "--decode search is deterministic beam search",
            (f"--verify {method.verify}", method.verify),
            ("--temperature", sampling.temperature or None),
            ("--top-k", sampling.top_k),
            ("--top-p", sampling.top_p),
            (option_name("min_p"), sampling.min_p),
            (option_name("warp_scope"), method.warp_scope),
            (f"{option_name('width')}={wide}", wide),
            ("--seed", sampling.seed),
        )


def _variant_fields(method: MethodOptions) -> dict[str, object]:
    """Return rule, width and drafter with their settings, as fields of MethodConfig. Raises UsageError."""
    variant_fields: dict[str, object] = {"rule": SEARCH if method.decode == "search" else DEFAULT_METHOD.rule}
    try:
        name, settings = parse_drafter(_or_default(method.drafter, DEFAULT_METHOD.drafter))
    except UsageError as error:
        raise UsageError(error.typed(TYPED)) from None
    variant_fields |= {"drafter": name, **settings}
    if method.verify is not None:
        name, settings = parse("--verify", method.verify, sampling_rules())
        variant_fields |= settings if method.decode == "search" else {"rule": name, **settings}
    if method.width is not None:
        name, settings = parse(option_name("width"), method.width, WIDTHS)
        variant_fields |= {"width": name, **settings}
    return variant_fields


def _model_names(pair: PairOptions, method: MethodOptions, drafter: str) -> tuple[str, str | None]:
    """Return the names of target and draft; no draft if the drafter runs no model. Raises UsageError."""
    target = _or_default(pair.target, BUILTIN_TARGET)
    if not target or pair.draft == "":
        raise UsageError("--target and --draft need a name: an alias, a folder or a hub id")
    if not runs_model(drafter):
        if pair.draft not in (None, "none"):
            raise UsageError(f"--draft {pair.draft} would do nothing, because drafter {drafter} runs no model: drop it")
        return target, None
    if not has_draft(pair):
        there = "--draft is none" if pair.draft == "none" else f"--target {target} has no draft"
        if method.verify is not None and RULES[parse("--verify", method.verify, RULES)[0]].needs_draft:
            raise UsageError(
                f"--verify {method.verify} compares the target with a draft model, but {there}: name one with --draft"
            )
        if drafter != DEFAULT_METHOD.drafter:
            raise UsageError(f"--drafter {drafter} needs a draft model, but {there}: name one with --draft")
        if method.depth not in (None, "0"):
            raise UsageError(
                f"--depth {method.depth} needs a draft, but {there}: name one with --draft, or --drafter {SUFFIX}"
            )
        return target, None
    return target, _or_default(pair.draft, BUILTIN_DRAFT)


def _method(given: MethodOptions, chosen: Mapping[str, object], *, drafting: bool) -> MethodConfig:
    """Return the method of the options. What is not given is left to MethodConfig, the one place of the defaults."""
    names = ("num_beams", "drafts_per_layer", "warp_scope", "memory_saving")
    options: dict[str, object] = {name: getattr(given, name) for name in names}
    looks_up = not drafting and given.drafter is None and given.depth is None
    if not drafting and not looks_up:
        options["depth"] = 0
    elif given.depth == "auto":
        options["adaptive_depth"] = True
    else:
        options["depth"] = _number("--depth", given.depth, MAX_AUTO_DEPTH)
    acting = {name: value for name, value in options.items() if value is not None}
    method = MethodConfig.of({**chosen, **acting})
    if looks_up:
        method = method.fit_draft(None)
    if given.memory_saving and method.num_beams == 1:
        raise UsageError("--set memory-saving keeps one beam of several, but --num-beams is 1: drop it")
    return method


def _sampling(options: SamplingOptions) -> SamplingConfig:
    asked = {name: value for name, value in vars(options).items() if value is not None and name != "seed"}
    sampling = SamplingConfig(**asked)
    if fault := stops_fault(sampling.stop):
        raise UsageError(f"--stop is {fault}")
    return sampling


REGEX = "regex:"


def allowed_answers(text: str | None, *, strict: bool = False) -> tuple[Path | None, Grammar | None]:
    """Return the file of a list of answers, or a grammar; at most one of both. strict: a schema's keywords that the
    grammar cannot enforce are an error.

    Raises UsageError if it cannot be read, or if the grammar cannot be followed.
    """
    if text is None:
        return None, None
    if text.startswith(REGEX):
        grammar = Grammar.regex(text.removeprefix(REGEX))
    elif text.endswith(".json"):
        grammar = Grammar.json_schema(_text(text), strict=strict)
    elif text.endswith(".lark"):
        grammar = Grammar.lark(_text(text))
    else:
        if not Path(text).is_file():
            raise UsageError(f"--allow {text or repr(text)} is no file")
        if compression(Path(text)) is None:
            with reading(f"--allow {text}"):
                check_text_file(Path(text))
        check_answer_file(Path(text))
        return Path(text), None
    try:
        grammar.source()
    except UsageError as error:
        raise UsageError(f"--allow {text} cannot be used: {error}") from None
    return None, grammar


def _text(text: str) -> str:
    path = Path(text)
    with reading(f"--allow {text}"):
        if path.exists() and not path.is_file():
            raise UsageError(f"--allow {text} is no file")
        if (size := path.stat().st_size) > MAX_LINE_BYTES:
            raise UsageError(f"--allow {text} has {size} bytes, but a grammar must have at most {MAX_LINE_BYTES}")
        check_text_file(path)
        return path.read_text(encoding="utf-8-sig")
