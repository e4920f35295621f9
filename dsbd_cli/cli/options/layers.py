"""Where an option's value comes from: the command line, else the job file, else the environment, else the default."""

from __future__ import annotations

import dataclasses
import difflib
import json
import os
import tomllib
import typing
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import UnionType

from dsbd_cli.errors import KINDS, SETTINGS, UsageError, option_name, reading, shorten

__all__ = ["Values", "job_text", "settle"]

PREFIX = "DSBD_"
OTHER_VARIABLES = ("DSBD_MODELS_FILE", "DSBD_DEBUG")  # read elsewhere, for every command
OR_AUTO = ("depth", "batch_size", "workers")  # numbers that may also be the word auto
NOT_IN_A_FILE = ("config", "print_config")
YES, NO = ("1", "true", "yes", "on"), ("0", "false", "no", "off", "")

Values = dict[str, object]


@dataclasses.dataclass(frozen=True, slots=True)
class _Field:
    """An option as far as its value goes."""

    name: str
    kind: type
    choices: tuple[str, ...] = ()

    @property
    def expected(self) -> str:
        if self.choices:
            return f"one of {', '.join(self.choices)}"
        return "a list of strings" if self.kind is list else KINDS.get(self.kind, "a string")


def settle(
    groups: tuple[type, ...], given: Mapping[str, object], command: str, elsewhere: tuple[type, ...] = ()
) -> Values:
    """Values of all options of the groups. `given` is the command line, where None and [] mean not given; command: its
    name, for messages. elsewhere: groups whose variables are let stand. Raises UsageError."""
    table = _fields(groups)
    _check_variables({**_fields(elsewhere), **table}, command)
    environment = dict(_from_environment(table))
    typed = {name: value for name, value in given.items() if value not in (None, [])}
    typed |= _from_settings(typed.pop("set", ()), table)
    config = typed.get("config") or environment.get("config")
    job = _from_file(Path(str(config)), table) if config is not None else {}
    layers = (typed, job, environment)
    return {name: next((layer[name] for layer in layers if name in layer), given.get(name)) for name in table}


def _fields(groups: tuple[type, ...]) -> dict[str, _Field]:
    return {name: _field(name, hint) for kind in groups for name, hint in typing.get_type_hints(kind).items()}


def _field(name: str, hint: object) -> _Field:
    """`int | None` is an integer; so are the others."""
    if isinstance(hint, UnionType) or typing.get_origin(hint) is typing.Union:
        hint = next(part for part in typing.get_args(hint) if part is not type(None))
    origin = typing.get_origin(hint)
    if origin is typing.Literal:
        return _Field(name, str, typing.get_args(hint))
    if origin is list:
        return _Field(name, list)
    assert isinstance(hint, type)
    return _Field(name, hint)


# --set NAME=VALUE


def _from_settings(words: object, table: dict[str, _Field]) -> Values:
    """Values of words as `min-p=0.1`; of a name that stands twice the last one, as of any option. Raises UsageError."""
    assert isinstance(words, list | tuple)
    names = {name.replace("_", "-"): name for name in table if name in SETTINGS}
    values: Values = {}
    for word in words:
        shown, equals, text = word.partition("=")
        name = shown.replace("-", "_")
        if name in table and name not in SETTINGS:
            raise UsageError(f"--set {shown}: it is an option of its own: {option_name(name)}")
        if name not in table:
            near = difflib.get_close_matches(name.replace("_", "-"), names, n=1)
            hint = f"did you mean {near[0]}?" if near else f"it takes {', '.join(sorted(names))}"
            raise UsageError(f"--set {shown}: there is no such setting: {hint}")
        if not equals:
            raise UsageError(f"--set {shown} has no value: it is spelled --set {shown}=VALUE")
        values[name] = _read(table[name], text, option_name(name))
    return values


# The job file


def _from_file(path: Path, table: dict[str, _Field]) -> Values:
    try:
        with reading(f"--config {path}"):
            raw = tomllib.loads(path.read_text(encoding="utf-8"))
    except tomllib.TOMLDecodeError as error:
        raise UsageError(f"--config {path} is not TOML: {error}") from None
    values: Values = {}
    for key, value in raw.items():
        name = key.replace("-", "_")
        if name not in table or name in NOT_IN_A_FILE:
            raise UsageError(f"--config {path}: {key} is no option of a job{_near(name, table)}")
        if name in values:
            raise UsageError(f"--config {path}: {key} is given twice, once with _ and once with -: drop one")
        values[name] = _checked(table[name], value, f"--config {path}: {key}")
    return values


def _near(name: str, table: Mapping[str, object]) -> str:
    near = difflib.get_close_matches(name, [key for key in table if key not in NOT_IN_A_FILE], n=3)
    return f": did you mean {', '.join(near)}?" if near else ": dsbd generate --print-config lists them"


def _checked(field: _Field, value: object, place: str) -> object:
    """The value of a TOML key as its option takes it."""
    if field.kind is float and type(value) is int:
        value = float(value)
    if field.kind is list and isinstance(value, str):
        value = [value]
    if field.kind is Path and isinstance(value, str):
        return Path(value)
    if field.name in OR_AUTO and type(value) is int:
        value = str(value)
    fits = type(value) is field.kind
    if isinstance(value, list):
        fits = fits and bool(value) and all(isinstance(item, str) for item in value)
    if not fits or (field.choices and value not in field.choices):
        raise UsageError(f"{place} is {shorten(value)}, but must be {field.expected}")
    return value


# The environment


def _from_environment(table: dict[str, _Field]) -> Iterator[tuple[str, object]]:
    for name, field in table.items():
        text = os.environ.get(variable(name))
        if text is not None and (text or field.kind is bool) and name != "print_config":
            yield name, _read(field, text, variable(name))


def variable(name: str) -> str:
    """DSBD_NUM_BEAMS for num_beams."""
    return PREFIX + name.rstrip("_").upper()


def _read(field: _Field, text: str, place: str) -> object:
    """The value that a word stands for. place: where it stands, for messages."""
    if field.kind is bool and text.strip().lower() in (*YES, *NO):
        return text.strip().lower() in YES
    value: object = text
    if field.kind in (int, float):
        try:
            value = field.kind(text)
        except ValueError:
            raise UsageError(f"{place} is {shorten(text)}, but must be {field.expected}") from None
    return _checked(field, value, place)


def _check_variables(table: Mapping[str, _Field], command: str) -> None:
    """Refuse a DSBD_ variable that is no option: it is most likely misspelt, and would be ignored."""
    known = {variable(name) for name in table if name != "print_config"}.union(OTHER_VARIABLES)
    for name in sorted(os.environ):
        if name.startswith(PREFIX) and name not in known:
            rest = name.removeprefix(PREFIX)  # the prefix alone makes any two names alike
            near = difflib.get_close_matches(rest, sorted(one.removeprefix(PREFIX) for one in known), n=1)
            hint = f"did you mean {PREFIX}{near[0]}? Otherwise unset it" if near else "unset it"
            raise UsageError(f"the variable {name} is set, but {command} has no such option: {hint}")


# Out


def job_text(groups: Sequence[object], help_of: Mapping[str, tuple[str, str]]) -> str:
    """TOML that --config accepts: what is set, and as comments what is not. help_of: option -> panel and text."""
    lines = ["# dsbd generate --config FILE; the command line wins over it, it wins over DSBD_ variables"]
    panels: dict[str, list[str]] = {}
    for group in groups:
        assert dataclasses.is_dataclass(group)
        for item in dataclasses.fields(group):
            panel, told = help_of[item.name]
            value = getattr(group, item.name)
            comment = told.replace("\n\n", "\n#   ")
            panels.setdefault(panel, []).append(
                f"# {item.name}: {comment}" if value in (None, []) else f"{item.name} = {_toml(value)}"
            )
    for panel, options in panels.items():
        lines += ["", f"# {panel}", *options]
    return "\n".join(lines)


def _toml(value: object) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_toml, value))}]"
    if isinstance(value, int | float):
        return repr(value)
    # a JSON string is a TOML string, but for DEL
    return json.dumps(str(value), ensure_ascii=False).replace("\x7f", "\\u007f")
