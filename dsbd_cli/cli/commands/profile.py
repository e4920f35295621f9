"""`dsbd profile`: where time and memory go on this machine, and which of some settings is the fastest."""

from __future__ import annotations

import dataclasses
import itertools
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal, TypeVar

import typer

from dsbd_cli.cli.options.declare import flag, grouped, option
from dsbd_cli.cli.options.options import (
    CHAT,
    MAIN,
    METHOD,
    AnswerOptions,
    DeviceOptions,
    MethodOptions,
    PairOptions,
    RowFileOptions,
    SamplingOptions,
)
from dsbd_cli.cli.options.settings import RunSettings, devices_of, fixed_depth, refuse_idle_templates, run_settings
from dsbd_cli.cli.run.files import check_columns, check_files_under, check_report_files
from dsbd_cli.cli.run.messages import Talk, say, set_style, talking
from dsbd_cli.cli.run.prompts import read_prompts, warn_left_out, warn_plain
from dsbd_cli.cli.run.signals import StoppedError, StopSignals
from dsbd_cli.config.method import DEFAULT_DEPTH
from dsbd_cli.config.spelling import parse, spell
from dsbd_cli.config.variants import MIN_WIDTH, RULES, SUFFIX_CACHE, WIDTHS
from dsbd_cli.errors import SETTINGS, UsageError, as_utf8, option_name
from dsbd_cli.io.lines.replace import write_atomically
from dsbd_cli.io.schemas import contracts
from dsbd_cli.lab.tasks.choose import TASKS
from dsbd_cli.requests import Request, derive_seed

if TYPE_CHECKING:
    from dsbd_cli.lab.reports.profile_data import ForestSize, Profile

T = TypeVar("T")

PROFILE = "Profile"
RECORDS, REPEATS, SECONDS = 8, 3, 60.0


@dataclass(frozen=True)
class ProfiledOptions:
    """Options of the records that are decoded to be measured."""

    input: Path | None = option(MAIN, "prompts as generate reads them", "-i")
    chat: bool | None = flag(MAIN, CHAT)
    task: Literal["sql", "qa"] | None = option(
        MAIN, "prompts of one built-in task: sql or qa", default="both", metavar="TASK"
    )
    records: int | None = option(MAIN, "prompts at most", default=RECORDS, least=1)


@dataclass(frozen=True)
class PromptOptions(RowFileOptions, ProfiledOptions):
    """Options of the prompts that are decoded to be measured."""


@dataclass(frozen=True)
class ProfileOptions:
    """Options of how long the profile may take, and what it writes besides the table."""

    seconds: float | None = option(
        PROFILE,
        "time for measuring, after the models are loaded; what there is no time for is left out and named",
        default=f"{SECONDS:g}",
        above=0,
    )
    repeats: int | None = option(PROFILE, "timed runs of each setting, taken in turn", default=REPEATS, least=1)
    show: int | None = option(PROFILE, "show the draft forest of iteration N of the first prompt as a tree", least=1)
    json: Path | None = option(PROFILE, "write all numbers here as one JSON document")
    existing: Literal["error", "overwrite"] | None = option(
        PROFILE, "where the --json file exists: error or overwrite", default="error", metavar="WHAT"
    )
    quiet: bool | None = flag(PROFILE, "print the recommended command line and nothing else", "-q")


@dataclass(frozen=True)
class ForestOptions(MethodOptions):
    """Options of how beams are drafted and verified. Every iteration has the same layers, so `--depth auto` is
    refused."""

    depth: str | None = option(METHOD, "D, drafted layers", default=DEFAULT_DEPTH, metavar="D")


@grouped
def profile(
    prompts: PromptOptions,
    pair: PairOptions,
    method: ForestOptions,
    sampling: SamplingOptions,
    answers: AnswerOptions,
    devices: DeviceOptions,
    wanted: ProfileOptions,
    arguments: Sequence[str],
) -> None:
    """Measure where time and memory go with these models and prompts, and recommend the fastest D and K that was run.

    Besides your setting it runs plain decoding without a draft, and half and twice the layers and the drafts.

    The most useful measurements come first, within --seconds. Ctrl-C prints what is measured by then.
    """
    set_style(quiet=wanted.quiet)
    chat = bool(prompts.chat)
    settings = run_settings(pair, fixed_depth(pair, method), sampling, devices, chat=chat, allow=answers.allow)
    if settings.allow is not None:
        raise UsageError(f"--allow {settings.allow} is not profiled, because a profile cuts answers short: drop it")
    if settings.method.value(SUFFIX_CACHE) is not None:
        raise UsageError(f"cache={settings.method.value(SUFFIX_CACHE)} is not written by a profile: drop it")
    if settings.method.adaptive_depth:
        raise UsageError(
            "--depth auto takes another D and K from iteration to iteration, so its phases are a mix of many: "
            "give the depth that is to be profiled"
        )
    if wanted.quiet and wanted.show is not None and wanted.json is None:
        raise UsageError("--show prints a tree and --quiet prints nothing but a command: drop one, or add --json")
    inputs = [prompts.input, answers.allow, devices.chat_template, *settings.method.index_files, *settings.files]
    check_report_files({"--json": wanted.json}, inputs, existing=wanted.existing)
    requests = _requests(prompts, settings, devices)
    options = given_options(pair, method, sampling, answers, devices)
    command = as_utf8(shlex.join(["dsbd", *(arguments or ["profile"])]))
    # libraries turn a KeyboardInterrupt in the middle of an import into errors of their own
    with StopSignals() as signals:
        with talking() as talk:
            render = _renderer(options, prompts)
            said = False if prompts.input is None else prompts.chat
            shown, result = _measure(settings, requests, wanted, command, render, talk, signals, chat=said)
        if result is not None:
            _write(result, wanted)
        if signals.number is not None:
            raise StoppedError(signals.number, early=result is None and not shown)


def _requests(prompts: PromptOptions, settings: RunSettings, devices: DeviceOptions) -> tuple[Request, ...]:
    """Return the prompts to decode. Raises UsageError if there are none, and with the first bad line."""
    count = prompts.records or RECORDS
    if prompts.input is None:
        check_files_under(prompts.files_under, "there is no --input")
        check_columns(prompts.columns, None)
        if prompts.chat is not None:
            raise UsageError("--chat would do nothing, because there is no --input: drop it")
        refuse_idle_templates("there is no --input", devices)
        reader, tasks = settings.rows, [TASKS[prompts.task]] if prompts.task else list(TASKS.values())
        streams = [task.records() for task in tasks]
        records = itertools.islice(itertools.chain.from_iterable(zip(*streams, strict=True)), count)
        return tuple(
            Request(
                id=record.id,
                seed=derive_seed(reader.seed, record.id),
                prompt=record.prompt,
                sampling=reader.sampling,
                grammar=reader.grammar,
            )
            for record in records
        )
    if prompts.task is not None:
        raise UsageError("--input and --task cannot be used together: give one of them")
    under, columns = prompts.files_under, prompts.columns
    read = read_prompts("--input", prompts.input, settings.rows, most=count, files_under=under, columns=columns)
    if not read:
        raise UsageError(f"--input {prompts.input} holds no prompt")
    return tuple(read)


def _measure(
    settings: RunSettings,
    requests: tuple[Request, ...],
    wanted: ProfileOptions,
    command: str,
    render: Callable[[ForestSize], str],
    talk: Talk,
    signals: StopSignals,
    *,
    chat: bool | None,
) -> tuple[bool, Profile | None]:
    """Load the models and measure. This is where torch is imported.

    chat: of --chat and --no-chat; None: neither is given. Return whether some measurement was printed on the way, and
    the profile.
    """
    talk.step("loading the models")
    engine = settings.load()
    warn_plain(chat, engine.info, requests)
    from dsbd_cli.train.target_answers import answerable

    kept, failed = answerable(engine, requests)
    if kept:  # else the first run says what is wrong
        warn_left_out(failed)
        requests = tuple(kept)
    from dsbd_cli.lab.profiling.budget import Budget
    from dsbd_cli.lab.profiling.measurements import ProfiledPair
    from dsbd_cli.lab.profiling.profile import take_profile

    shown = False

    def announce(message: str) -> None:
        nonlocal shown
        shown = not wanted.quiet
        say(f"measured: {message}")

    budget = Budget(wanted.seconds or SECONDS, talk.step, found=announce)
    signals.on_stop = budget.stop
    bench = ProfiledPair(engine, requests, settings.batch_size or len(requests), budget)
    result = take_profile(bench, settings.method, wanted.repeats or REPEATS, command, render, wanted.show)
    return shown, result


def given_options(*groups: object) -> dict[str, object]:
    """Return the options of groups, by field; None: not given."""
    return {name: value for group in groups for name, value in vars(group).items()}


def option_words(options: Mapping[str, object]) -> list[str]:
    """Return options as words of a command line."""
    words: list[str] = []
    for field, value in options.items():
        name = option_name(field)
        if value is None:
            continue
        if field in SETTINGS:
            flag, setting = name.split()
            words += [flag, f"{setting}={str(value).lower() if isinstance(value, bool) else value}"]
        elif isinstance(value, bool):
            words.append(name if value else "--no-" + name.removeprefix("--"))
        else:
            words += [word for item in (value if isinstance(value, list) else [value]) for word in (name, str(item))]
    return words


def _renderer(options: Mapping[str, object], prompts: PromptOptions) -> Callable[[ForestSize], str]:
    """Return a function that writes a setting as a ready command line, with the options that change something."""
    verify, width, device = (
        None if options.get(name) is None else str(options[name]) for name in ("verify", "width", "device")
    )

    def render(setting: ForestSize) -> str:
        changed: dict[str, object] = {"depth": str(setting.depth), "drafts_per_layer": setting.drafts_per_layer}
        if setting.min_width is not None:
            changed["width"] = _narrowed(width, setting.min_width)
        if not setting.depth:
            names = ["drafts_per_layer", "width", "drafter"]
            if verify is not None and RULES[parse("--verify", verify, RULES)[0]].needs_draft:
                names.append("verify")  # without a draft it is plain sampling
            trusted = "target" if options.get("trust_remote_code") in ("target", "both") else None
            changed = {**dict.fromkeys(names), "depth": "0", "draft": "none"}
            changed["device"] = devices_of(device)[0]
            changed["trust_remote_code"] = trusted
        words = option_words(_needed({**options, **changed}))
        words += ["--chat"] if prompts.chat else []
        words += [] if prompts.files_under is None else ["--files-under", str(prompts.files_under)]
        words += [] if prompts.columns is None else ["--set", f"columns={prompts.columns}"]
        source = shlex.quote(str(prompts.input)) if prompts.input is not None else "prompts.jsonl"
        return f"{shlex.join(['dsbd', 'generate', *words])} --input {source}"

    return render


def _narrowed(width: str | None, min_width: int) -> str:
    """Return the spelling of the threshold width as given, with another minimum width."""
    name, settings = parse(option_name("width"), width, WIDTHS) if width is not None else ("", {})
    wide = WIDTHS[name] if name and WIDTHS[name].dynamic else next(width for width in WIDTHS.values() if width.dynamic)
    return spell(wide, {**settings, MIN_WIDTH.field: min_width})


def _needed(options: dict[str, object]) -> dict[str, object]:
    """Return the options without those that make no difference to generate."""
    kept, wanted = options, _settings_of(options)
    for name in options:
        fewer = {**kept, name: None}
        # an option without which the others contradict each other is needed
        with suppress(UsageError):
            kept = fewer if _settings_of(fewer) == wanted else kept
    return kept


def _settings_of(options: Mapping[str, object]) -> RunSettings:
    """Return all settings that `dsbd generate` would use with these options."""

    def group(kind: type[T]) -> T:
        return kind(**{item.name: options.get(item.name) for item in dataclasses.fields(kind)})  # type: ignore[arg-type]

    method, sampling, allow = group(MethodOptions), group(SamplingOptions), group(AnswerOptions).allow
    return run_settings(group(PairOptions), method, sampling, group(DeviceOptions), allow=allow)


def _write(profile: Profile, wanted: ProfileOptions) -> None:
    try:
        if wanted.json is not None:
            document = {"schema": contracts.PROFILE.id, **dataclasses.asdict(profile)}
            document["recommended_command"] = as_utf8(profile.recommended_command)  # files may have any bytes
            write_atomically(wanted.json, contracts.PROFILE.page(document))
    finally:  # a full disk does not lose what was measured
        _print(profile, quiet=bool(wanted.quiet))


def _print(profile: Profile, *, quiet: bool) -> None:
    """Print the recommended command, or else the table, and the tree if there is one, to standard output."""
    if quiet:
        typer.echo(profile.recommended_command)
        return
    from dsbd_cli.lab.reports.profile_table import print_profile
    from dsbd_cli.lab.reports.profile_tree import forest_tree
    from dsbd_cli.lab.reports.screen import Screen

    console = Screen(sys.stdout)
    print_profile(profile, console)
    if profile.forest is not None:
        console.show(forest_tree(profile.forest))
