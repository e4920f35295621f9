"""Sources of an option's value: the command line, else the job file, else the environment, else the default.

The default map of a command's context holds all but the typed options: values of --set, of the file, of variables, the
strongest first. The parser's own variables would win over the file, so they are in the map, too. A value is read like
the same word on the command line. In a file it must also have the option's type.
"""

from __future__ import annotations

import dataclasses
import difflib
import os
import tomllib
import typing
from collections import ChainMap
from collections.abc import Collection, MutableMapping, Sequence
from pathlib import Path

import orjson
import typer

from dsbd_cli.errors import KINDS, UsageError, is_utf8, reading, shorten

PREFIX = "DSBD_"
OR_AUTO = ("depth", "batch_size", "workers")  # numbers that may also be the word auto
OTHER_VARIABLES = ("DSBD_CPU", "DSBD_MODELS_FILE", "DSBD_DEBUG")  # read elsewhere, for every command
YES, NO = ("1", "true", "yes", "on"), ("0", "false", "no", "off")
OF_ONE_RUN = ("print_config", "dry_run", "set")  # what no file and no variable says


def open_sources(ctx: typer.Context) -> None:
    """Make --set, the job file and the DSBD_ variables defaults of the command's options. The first two are read when
    these options are. An empty variable counts as not given. Raises UsageError."""
    words: dict[str, object] = {}
    for param in ctx.command.params:
        word = os.environ.get(variable(param.name))
        if not word or param.name in OF_ONE_RUN:
            continue
        if getattr(param, "is_flag", False) and word.lower() not in (*YES, *NO):
            raise UsageError(f"{variable(param.name)} is {word!r}, but must be {KINDS[bool]}")
        words[param.name] = _words(param, word)
    ctx.default_map = ChainMap({}, {}, words)


def read_settings(ctx: typer.Context, words: Sequence[str] | None) -> None:
    """Read the words NAME=VALUE of --set; the last of a name counts. Raises UsageError for a setting without a value,
    and for one that the command does not have. While a shell completes the line, nothing is refused."""
    options = [name for param in ctx.command.params for name in param.opts if name.startswith("--")]
    for word in () if ctx.resilient_parsing else words or ():
        name, equals, value = word.partition("=")
        setting = f"--set {name.replace('_', '-')}"
        if setting not in options:
            names = {option.removeprefix("--").removeprefix("set "): option for option in options}
            near = [names[key] for key in difflib.get_close_matches(name.replace("_", "-"), names, n=3)]
            hint = f"did you mean {' or '.join(near)}?" if near else f"{ctx.command_path} --help lists the settings"
            raise UsageError(f"{setting}: {ctx.command_path} has no such setting: {hint}")
        if not equals:
            raise UsageError(f"{setting} has no value: it is spelled {setting}=VALUE")
        _maps(ctx)[0][name.replace("-", "_")] = value


def read_job(ctx: typer.Context, path: Path | None) -> Path | None:
    """Read a job file. Raises UsageError."""
    if path is None or ctx.resilient_parsing:
        return path
    try:
        with reading(f"--config {path}"):
            raw = tomllib.loads(path.read_text(encoding="utf-8-sig"))
    except tomllib.TOMLDecodeError as error:
        raise UsageError(f"--config {path} is not TOML: {error}") from None
    except (ValueError, RecursionError):
        raise UsageError(f"--config {path} cannot be read: a value has too many digits or levels") from None
    groups = vars(ctx.command.callback).get("groups", ())
    hints = {name: hint for group in groups for name, hint in typing.get_type_hints(group).items()}
    names = [name for name in hints if name not in ("config", *OF_ONE_RUN)]
    params, job = {param.name: param for param in ctx.command.params}, _maps(ctx)[1]
    for key, value in raw.items():
        name = key.replace("-", "_")
        if name not in names:
            near = difflib.get_close_matches(name, names, n=3)
            hint = f"did you mean {', '.join(near)}?" if near else "dsbd generate --print-config lists them"
            raise UsageError(f"--config {path}: {key} is no option of a job: {hint}")
        if name in job:
            raise UsageError(f"--config {path}: {key} is given twice, once with _ and once with -: drop one")
        if (expected := _expected(name, hints[name], value)) is not None:
            raise UsageError(f"--config {path}: {name} is {shorten(value)}, but must be {expected}")
        job[name] = _words(params[name], value)
    return path


def _words(param: object, value: object) -> str | list[str]:
    """Return a value as it would be typed: a word, or words for an option that may be repeated."""
    items = value if isinstance(value, list) else [value]
    words = [str(item).lower() if isinstance(item, bool) else str(item) for item in items]
    return words if getattr(param, "multiple", False) else words[0]


def _expected(name: str, hint: object, value: object) -> str | None:
    """Return what a TOML value without its option's type must be; None for one with it. TOML tells 3 from '3', so a
    wrong type is a mistake."""
    kind = next((arg for arg in typing.get_args(hint) if arg is not type(None)), hint)
    if typing.get_origin(kind) is typing.Literal:
        choices = typing.get_args(kind)
        return None if value in choices else f"one of {', '.join(choices)}"
    if typing.get_origin(kind) is list:
        words = value if isinstance(value, list) else [value]
        return None if all(isinstance(word, str) for word in words) else "a string or a list of strings"
    if kind in (int, float, bool):
        fits = type(value) is kind or (kind is float and type(value) is int)
        return None if fits else KINDS[kind]
    if name in OR_AUTO:
        return None if type(value) in (int, str) else "an integer or a string"
    return None if isinstance(value, str) else "a string"


def place_of(ctx: typer.Context, option: str, name: str) -> str:
    """Return what gave an option its value: the file, the variable, or the option itself, which is typed `name`."""
    source = ctx.get_parameter_source(option)
    if source is None or source.name != "DEFAULT_MAP" or option in _maps(ctx)[0]:
        return name
    return f"--config {ctx.params['config']}: {option}" if option in _maps(ctx)[1] else variable(option)


def _maps(ctx: typer.Context) -> list[MutableMapping[str, object]]:
    """Return the values of --set, of the job file and of the variables, by option."""
    return typing.cast("ChainMap[str, object]", ctx.default_map).maps


def variable(name: str) -> str:
    """Return the variable of an option: DSBD_NUM_BEAMS for num_beams."""
    return PREFIX + name.rstrip("_").upper()


def check_variables(names: Collection[str], command: str) -> None:
    """Raise UsageError for a DSBD_ variable without an option: it is most likely misspelt, and would be ignored."""
    variables = {variable(name) for name in names if name not in OF_ONE_RUN}.union(OTHER_VARIABLES)
    for name in sorted(os.environ):
        if name.startswith(PREFIX) and name not in variables:
            rest = name.removeprefix(PREFIX)  # the prefix alone makes any two names alike
            near = difflib.get_close_matches(
                rest, sorted(name_of_variable.removeprefix(PREFIX) for name_of_variable in variables), n=1
            )
            hint = f"did you mean {PREFIX}{near[0]}? Otherwise unset it" if near else "unset it"
            raise UsageError(f"the variable {name} is set, but {command} has no such option: {hint}")


# Writing a job file


def job_text(groups: Sequence[object]) -> str:
    """Return TOML that --config accepts: the options that are set, and the others as comments."""
    lines = ["# dsbd generate --config FILE; the command line wins over it, it wins over DSBD_ variables"]
    panels: dict[str, list[str]] = {}
    for item, value in ((item, getattr(group, item.name)) for group in groups for item in dataclasses.fields(group)):  # type: ignore[arg-type]
        comment = item.metadata["help"].replace("\n\n", "\n#   ")
        line = f"# {item.name}: {comment}" if value in (None, []) else f"{item.name} = {_toml(value)}"
        panels.setdefault(item.metadata["panel"], []).append(line)
    for panel, options in panels.items():
        lines += ["", f"# {panel}", *options]
    return "\n".join(lines)


def _toml(value: object) -> str:
    if not is_utf8(str(value)):
        raise UsageError(f"{str(value)!r} cannot be written to a job file, because it is not UTF-8")
    # JSON as orjson writes it is TOML, except for DEL
    return orjson.dumps(value, default=str).decode().replace("\x7f", "\\u007f")
