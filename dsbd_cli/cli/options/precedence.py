"""Sources of an option's value: the command line, else the job file, else the environment, else the default.

File and environment become the default map of the command's context. A value there is read like the same word on the
command line. In a file it must also have the option's type.
"""

from __future__ import annotations

import dataclasses
import difflib
import os
import tomllib
import typing
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

import orjson
import typer

from dsbd_cli.errors import KINDS, UsageError, is_utf8, reading, shorten

PREFIX = "DSBD_"
OR_AUTO = ("depth", "batch_size", "workers")  # numbers that may also be the word auto
OTHER_VARIABLES = ("DSBD_CPU", "DSBD_MODELS_FILE", "DSBD_DEBUG")  # read elsewhere, for every command
YES, NO = ("1", "true", "yes", "on"), ("0", "false", "no", "off")
OF_ONE_RUN = ("print_config", "dry_run")  # what no file and no variable says
NOT_IN_A_FILE = ("config", "set", *OF_ONE_RUN)
PLACES = "dsbd_cli.places"  # in a context: the place of each value that does not come from the command line


def read_environment(ctx: typer.Context) -> None:
    """Make the values of DSBD_ variables defaults of the command's options. An empty variable counts as not given.

    Raises UsageError.
    """
    names = {one.name: variable(one.name) for one in ctx.command.params if one.name not in ("set", *OF_ONE_RUN)}
    given = {name: os.environ[place] for name, place in names.items() if os.environ.get(place)}
    for one in ctx.command.params:
        word = given.get(one.name, "") if getattr(one, "is_flag", False) else ""
        if word and word.lower() not in (*YES, *NO):
            raise UsageError(f"{names[one.name]} is {word!r}, but must be {KINDS[bool]}")
    _add_defaults(ctx, given, names)


def read_job(ctx: typer.Context, path: Path | None) -> Path | None:
    """Make the values of a job file defaults of the command's options. Raises UsageError."""
    if path is None or ctx.resilient_parsing:
        return path
    try:
        with reading(f"--config {path}"):
            raw = tomllib.loads(path.read_text(encoding="utf-8-sig"))
    except tomllib.TOMLDecodeError as error:
        raise UsageError(f"--config {path} is not TOML: {error}") from None
    except (ValueError, RecursionError):
        raise UsageError(f"--config {path} cannot be read: a value has too many digits or levels") from None
    known = [one.name for one in ctx.command.params if one.name not in NOT_IN_A_FILE]
    given: dict[str, object] = {}
    for key, value in raw.items():
        name = key.replace("-", "_")
        if name not in known:
            near = difflib.get_close_matches(name, known, n=3)
            hint = f"did you mean {', '.join(near)}?" if near else "dsbd generate --print-config lists them"
            raise UsageError(f"--config {path}: {key} is no option of a job: {hint}")
        if name in given:
            raise UsageError(f"--config {path}: {key} is given twice, once with _ and once with -: drop one")
        given[name] = value
    _check_types(ctx, given, f"--config {path}")
    _add_defaults(ctx, given, {name: f"--config {path}: {name}" for name in given})
    return path


def _check_types(ctx: typer.Context, given: Mapping[str, object], place: str) -> None:
    """Raise UsageError for a TOML value without its option's type. TOML tells 3 from '3', so a wrong type is a
    mistake."""
    groups = vars(ctx.command.callback).get("groups", ())
    hints = {name: hint for group in groups for name, hint in typing.get_type_hints(group).items()}
    for name, value in given.items():
        hint = next((one for one in typing.get_args(hints[name]) if one is not type(None)), hints[name])
        choices = typing.get_args(hint) if typing.get_origin(hint) is typing.Literal else ()
        if choices:
            fits, expected = value in choices, f"one of {', '.join(choices)}"
        elif typing.get_origin(hint) is list:
            # _add_defaults checks the items
            fits, expected = isinstance(value, str | list), "a string or a list of strings"
        elif hint in (int, float, bool):
            fits, expected = type(value) is hint or (hint is float and type(value) is int), KINDS[hint]
        else:
            or_number = name in OR_AUTO
            fits = isinstance(value, str) or (or_number and type(value) is int)
            expected = "an integer or a string" if or_number else "a string"
        if not fits:
            raise UsageError(f"{place}: {name} is {shorten(value)}, but must be {expected}")


def place_of(ctx: typer.Context, name: str) -> str | None:
    """Return the file or the variable that gave an option its value; None if neither did."""
    place: str | None = ctx.meta.get(PLACES, {}).get(name)
    source = ctx.get_parameter_source(name)
    return place if source is not None and source.name == "DEFAULT_MAP" else None


def _add_defaults(ctx: typer.Context, given: Mapping[str, object], places: Mapping[str, str]) -> None:
    """Add values to the context's defaults, in place of those that are there.

    Raises UsageError for a value that is no single word, or no list of words for an option that may be repeated.
    """
    several = {one.name for one in ctx.command.params if getattr(one, "multiple", False)}
    words: dict[str, object] = {}
    for name, value in given.items():
        items = value if isinstance(value, list) and name in several else [value]
        kinds = (str,) if name in several else (str, int, float)
        if (not items and name not in several) or not all(isinstance(item, kinds) for item in items):
            expected = "a string or a list of strings" if name in several else "a string, a number, true or false"
            raise UsageError(f"{places[name]} is {shorten(value)}, but must be {expected}")
        read = [str(item).lower() if isinstance(item, bool) else str(item) for item in items]
        words[name] = read if name in several else read[0]
    ctx.default_map = {**(ctx.default_map or {}), **words}
    ctx.meta[PLACES] = {**ctx.meta.get(PLACES, {}), **{name: places[name] for name in words}}


def variable(name: str) -> str:
    """Return the variable of an option: DSBD_NUM_BEAMS for num_beams."""
    return PREFIX + name.rstrip("_").upper()


def check_variables(names: Collection[str], command: str) -> None:
    """Raise UsageError for a DSBD_ variable without an option: it is most likely misspelt, and would be ignored."""
    known = {variable(name) for name in names if name not in OF_ONE_RUN}.union(OTHER_VARIABLES)
    for name in sorted(os.environ):
        if name.startswith(PREFIX) and name not in known:
            rest = name.removeprefix(PREFIX)  # the prefix alone makes any two names alike
            near = difflib.get_close_matches(rest, sorted(one.removeprefix(PREFIX) for one in known), n=1)
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
