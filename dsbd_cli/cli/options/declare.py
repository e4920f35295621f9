"""Declaration of options, and commands made of groups of options."""

from __future__ import annotations

import dataclasses
import inspect
import typing
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Literal, TypeVar

import typer
from typer.core import TyperCommand, TyperGroup

from dsbd_cli.cli.options.precedence import NO, YES, check_variables, open_sources, place_of, read_settings
from dsbd_cli.config.spelling import typed_names
from dsbd_cli.errors import KINDS, MOST_INTEGER, SETTINGS, UsageError, is_utf8, option_name, shorten

T = TypeVar("T")
EXTRA = "Got unexpected extra argument(s)"  # of the parser
METAVARS: dict[object, str] = {int: "N", float: "X", Path: "FILE"}  # for options that name no metavar

# options of commands that take nothing from a job file or the environment
Output = Annotated[Path, typer.Option("--output", "-o", help="file to write", metavar="FILE", show_default=False)]
Existing = Annotated[
    Literal["error", "overwrite"],
    typer.Option(
        "--existing",
        help="where the file exists: error or overwrite (default: error)",
        metavar="WHAT",
        show_default=False,
    ),
]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="nothing on standard error but errors", metavar="")]


def option(
    panel: str,
    text: str,
    *short: str,
    default: object = None,
    metavar: str | None = None,
    least: int | None = None,
    most: int | None = None,
    above: float | None = None,
    negative: bool = False,
    hidden: bool = False,
    callback: Callable[..., object] | None = None,
) -> T:  # type: ignore[type-var]
    """Return a dataclass field that declares the option of the same name and type. Its value is None if the option is
    not given.

    default: only shown on the --help page, because the library fills it in. short: another name, as `-i`. least, most,
    above: bounds of a number; a count, which has a least, is at most MOST_INTEGER unless `most` is given. negative: of
    a switch, a --no- form. hidden: not on the --help page. callback: called with the context and the value before other
    options are read.
    """
    most = MOST_INTEGER if most is None and least is not None else most
    shown = text if default is None else f"{text} (default: {default})"
    declared = {
        "panel": panel, "help": shown, "short": short, "metavar": metavar, "bounds": (least, most, above),
        "negative": negative, "hidden": hidden, "callback": callback,
    }  # fmt: skip
    return typing.cast("T", dataclasses.field(default=None, metadata=declared))


def flag(panel: str, text: str, *short: str) -> T:  # type: ignore[type-var]
    """Return a field that declares a switch. Its --no- form takes back what a job file or the environment has switched
    on."""
    return option(panel, text, *short, metavar="", negative=True)


def switch(panel: str, text: str) -> T:  # type: ignore[type-var]
    """Return a field that declares a switch for a single run, which has no --no- form because nothing needs to take it
    back."""
    return option(panel, text, metavar="")


def _parameter(field: str, declaration: dataclasses.Field[object], kind: object) -> inspect.Parameter:
    """Return the option of a field as the parameter that typer reads. kind: its type."""
    name, setting, declared = option_name(field), field in SETTINGS, declaration.metadata
    kinds, parser = (*typing.get_args(kind), kind), None
    if number := next((kind for kind in (int, float) if kind in kinds), None):
        parser = _number(number, *declared["bounds"])
    elif setting and bool in kinds:  # a setting takes a value, unlike a switch
        kind, parser = str | None, _yes_or_no
    info = typer.Option(
        f"{name}/--no-{name.removeprefix('--')}" if declared["negative"] and not setting else name,
        *declared["short"],
        help=declared["help"],
        rich_help_panel=declared["panel"],
        show_default=False,
        metavar=declared["metavar"] or next((METAVARS[kind] for kind in kinds if kind in METAVARS), None),
        parser=parser,
        hidden=setting or declared["hidden"],
        is_eager=declared["callback"] is not None,
        callback=declared["callback"],
    )
    return inspect.Parameter(field, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=Annotated[kind, info])


def _number(kind: type, least: float | None, most: float | None, above: float | None) -> Callable[[str], object]:
    """Return a parser of a number, which refuses any other text in our own words: what stands behind the option's name
    in a message."""

    def read(text: str) -> object:
        try:
            value = kind(text)
        except ValueError:
            raise ValueError(f"is {shorten(text)}, but must be {KINDS[kind]}") from None
        if least is not None and value < least:
            raise ValueError(f"is {text}, but must be {least} or more")
        if most is not None and value > most:
            raise ValueError(f"is {text}, but must be at most {most}")
        if above is not None and not value > above:
            raise ValueError(f"is {text}, but must be above {above:g}")
        return value

    return read


def _check_text(values: Mapping[str, object], names: Mapping[str, str]) -> None:
    """Refuse values that are not UTF-8, which nothing can tokenize or write. Paths may have any bytes."""
    for name, value in values.items():
        for word in value if isinstance(value, list | tuple) else (value,):
            if isinstance(word, str) and not is_utf8(word):
                raise UsageError(f"{names.get(name, option_name(name))} is {word!r}, which is not UTF-8")


def _yes_or_no(text: str) -> bool:
    """Parse the value of a switch that is given as a setting."""
    if text.lower() not in (*YES, *NO):
        raise ValueError(f"is {shorten(text)}, but must be {KINDS[bool]}")
    return text.lower() in YES


def grouped(function: Callable[..., None], *, elsewhere: tuple[type, ...] = ()) -> Callable[..., None]:
    """Make `f(files: FileOptions, pair: PairOptions, ..., arguments)` a command whose options are the groups' fields.

    A value that the command line does not give comes from the job file, then from the environment. `arguments`, where
    `f` has them, are the command line as it was typed. elsewhere: groups of another command in the same pipe, whose
    variables may be set, too.
    """
    every = typing.get_type_hints(function)
    hints = {name: kind for name, kind in every.items() if name not in ("return", "arguments")}
    types = {name: kind for group in hints.values() for name, kind in typing.get_type_hints(group).items()}
    table = {item.name: item for group in hints.values() for item in dataclasses.fields(group)}
    names_of_options = {*table, *(item.name for group in elsewhere for item in dataclasses.fields(group))}
    parameters = [_parameter(name, item, types[name]) for name, item in table.items()]
    if settings := sorted(name.replace("_", "-") for name in table if name in SETTINGS):
        shown = f"what is seldom typed, may be repeated: {', '.join(settings)} (docs/cli.md says what they mean)"
        declaration: dataclasses.Field[object] = option("Settings", shown, metavar="NAME=VALUE", callback=read_settings)
        parameters.append(_parameter("set", declaration, list[str] | None))

    def command(ctx: typer.Context, **options: object) -> None:
        check_variables(names_of_options, ctx.command_path)
        names = typed_names(table)
        _check_text(options, names)
        values = {
            name: kind(**{item.name: options[item.name] for item in dataclasses.fields(kind)})
            for name, kind in hints.items()
        }
        if "arguments" in every:
            values["arguments"] = ctx.obj if isinstance(ctx.obj, list | tuple) else ()
        try:
            function(**values)
        except UsageError as error:
            # the library knows the field, only the command knows what was typed
            raise UsageError(error.typed(names)) from error

    context = inspect.Parameter("ctx", inspect.Parameter.POSITIONAL_OR_KEYWORD, annotation=typer.Context)
    command.__name__, command.__doc__ = function.__name__, function.__doc__
    command.__annotations__ = {item.name: item.annotation for item in (context, *parameters)}
    command.__dict__["__signature__"] = inspect.Signature([context, *parameters])
    command.__dict__["groups"] = tuple(hints.values())
    return command


class _PlainHelp:
    """A command whose --help page shows a switch without a value and without a column for its --no- form, an argument
    without the type that it has in Python, and paragraphs that are as wide as the terminal.

    The text of the page explains --no- once.
    """

    help: str | None

    def __init__(self, *arguments: object, **options: object) -> None:
        super().__init__(*arguments, **options)
        paragraphs = inspect.cleandoc(self.help or "").split("\n\n")
        self.help = "\n\n".join(" ".join(paragraph.split()) for paragraph in paragraphs)

    def get_params(self, ctx: typer.Context) -> list[object]:
        params: list[object] = super().get_params(ctx)  # type: ignore[misc]
        for param in params:
            if getattr(param, "is_flag", False):
                param.metavar = ""  # type: ignore[attr-defined]
            if getattr(param, "param_type_name", "") == "argument":
                param.display_type_rich = lambda ctx: None  # type: ignore[attr-defined]
        return params

    def format_help(self, ctx: typer.Context, formatter: object) -> None:
        params = self.get_params(ctx)
        negative = [getattr(param, "secondary_opts", []) for param in params]
        for param in params:
            param.secondary_opts = []  # type: ignore[attr-defined]
        try:
            super().format_help(ctx, formatter)  # type: ignore[misc]
        finally:
            for param, names in zip(params, negative, strict=True):
                param.secondary_opts = names  # type: ignore[attr-defined]


class Command(_PlainHelp, TyperCommand):  # type: ignore[misc]
    """A command whose options take defaults from a job file and from the environment, with a page as _PlainHelp shows
    it."""

    def parse_args(self, ctx: typer.Context, args: list[str]) -> list[str]:  # type: ignore[override]
        """Parse the command line. Raises UsageError for a wrong value in a file or a variable, and names the place."""
        if "groups" in vars(self.callback):
            open_sources(ctx)
        try:
            return super().parse_args(ctx, args)
        except typer.BadParameter as error:
            if error.param is None or not error.message:  # one that is missing
                raise
            source = place_of(ctx, error.param.name, max(error.param.opts, key=len))
            raise UsageError(f"{source} {_refusal(error.message)}") from None
        except typer.TyperException as error:
            names = [name for param in self.params for name in param.opts]
            if not error.message.startswith(EXTRA) or "--input" not in names:
                raise
            words = error.message.removeprefix(f"{EXTRA} (").removesuffix(")")
            raise UsageError(f"{words} stands without an option: --input FILE names what is read") from None


def _refusal(message: str) -> str:
    """Return the parser's message about a wrong value as it stands behind the option's name."""
    text = message.removeprefix("Value error, ")
    value, is_choice, choices = text.partition(" is not one of ")
    return f"is {value}, but must be one of {choices.rstrip('.').replace(chr(39), '')}" if is_choice else text


class Group(_PlainHelp, TyperGroup):  # type: ignore[misc]
    """A group of commands, with a page as _PlainHelp shows it."""
