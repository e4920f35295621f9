"""How an option is declared, and how groups of options become a command."""

from __future__ import annotations

import dataclasses
import inspect
import typing
from collections.abc import Callable, Sequence

import typer

from dsbd_cli.errors import UsageError
from dsbd_cli.job.cli.layers import Values, settle
from dsbd_cli.variants import typed_names

__all__ = ["flag", "grouped", "help_texts", "option", "switch"]


def option(panel: str, *names: str, text: str, metavar: str | None = None, default: object = None) -> object:
    """A declaration; `default` is only shown, because the library fills it in."""
    shown = text if default is None else f"{text} (default: {default})"
    return typer.Option(*names, help=shown, rich_help_panel=panel, show_default=False, metavar=metavar)


def flag(panel: str, name: str, *short: str, text: str) -> object:
    """A switch; its --no- form takes back what a job file or the environment has switched on."""
    names = "/".join((name, "--no-" + name.removeprefix("--")))
    return typer.Option(names, *short, help=text, rich_help_panel=panel, show_default=False, metavar="")


def switch(panel: str, name: str, text: str) -> object:
    """A switch that stands for a single use, so that nothing needs to take it back."""
    return typer.Option(name, help=text, rich_help_panel=panel, show_default=False, metavar="")


def _number(kind: type) -> Callable[[str], object]:
    """How a number is read, so that what is none is refused in our words."""

    def read(text: str) -> object:
        try:
            return kind(text)
        except ValueError:
            raise ValueError(f"{text!r} is not {'an integer' if kind is int else 'a number'}") from None

    return read


def _with_reader(hint: object) -> object:
    """The declaration of one option; of a number also how it is read."""
    declared = typing.get_args(hint)
    for kind in (int, float):
        if declared and kind in typing.get_args(declared[0]):
            declared[1].parser = _number(kind)
    return hint


def grouped(function: Callable[..., None], *, elsewhere: tuple[type, ...] = ()) -> Callable[..., None]:
    """Make `f(files: FileOptions, pair: PairOptions, ..., arguments)` a command whose options are the groups' fields.

    What the command line leaves open comes from the job file, then from the environment. `arguments` is the command
    line as it was typed. elsewhere: groups of another command in the same pipe, whose variables are no
    mistake.
    """
    every = typing.get_type_hints(function)
    hints = {name: kind for name, kind in every.items() if name not in ("return", "arguments")}
    parameters = [
        inspect.Parameter(
            item.name, inspect.Parameter.KEYWORD_ONLY, default=item.default, annotation=_with_reader(types[item.name])
        )
        for kind in hints.values()
        for types in [typing.get_type_hints(kind, include_extras=True)]
        for item in dataclasses.fields(kind)
    ]

    def command(ctx: typer.Context, **given: object) -> None:
        values = settle(tuple(hints.values()), given, ctx.command_path, elsewhere)
        try:
            function(**_groups(hints, values), arguments=_arguments(ctx))
        except UsageError as error:
            # the library knows the field, only the command knows what was typed
            raise UsageError(error.typed(typed_names(given))) from error

    context = inspect.Parameter("ctx", inspect.Parameter.POSITIONAL_OR_KEYWORD, annotation=typer.Context)
    command.__name__, command.__doc__ = function.__name__, function.__doc__
    command.__annotations__ = {item.name: item.annotation for item in (context, *parameters)}
    command.__dict__["__signature__"] = inspect.Signature([context, *parameters])
    return command


def help_texts(groups: Sequence[object]) -> dict[str, tuple[str, str]]:
    """Panel and help of every option of the groups."""
    found = {}
    for group in groups:
        for name, hint in typing.get_type_hints(type(group), include_extras=True).items():
            declared = hint.__metadata__[0]
            found[name] = (declared.rich_help_panel, declared.help)
    return found


def _groups(hints: dict[str, type], values: Values) -> dict[str, object]:
    return {
        name: kind(**{item.name: values[item.name] for item in dataclasses.fields(kind)})
        for name, kind in hints.items()
    }


def _arguments(ctx: typer.Context) -> Sequence[str]:
    return ctx.obj if isinstance(ctx.obj, list | tuple) else ()
