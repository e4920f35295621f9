"""`dsbd models` and `dsbd schema`: lists of the names of models, and of the schemas of what is read and written."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from typing import Annotated

import typer

from dsbd_cli.cli.options.declare import Command, Group
from dsbd_cli.io.schemas.contracts import CONTRACTS, contract_of

app = typer.Typer(cls=Group, invoke_without_command=True)

NewName = Annotated[str, typer.Argument(metavar="NAME", help="the new name", show_default=False)]
SourceArgument = Annotated[str, typer.Argument(metavar="SOURCE", help="folder or hub id", show_default=False)]
SchemaName = Annotated[
    str | None, typer.Argument(metavar="NAME", help="which one; without it, a list", show_default=False)
]
SupportFlag = Annotated[
    bool, typer.Option("--support", help="list instead how each type of model of transformers runs here")
]


@app.callback()
def models(ctx: typer.Context, support: SupportFlag = False) -> None:
    """List the names of models: the built-in pair, yours, ours and the hub cache, and whether the files are here.

    Columns: name, source, state (here, partly here, absent), origin (built-in, yours, ours, hub cache).

    With --support: type (`model_type` of config.json), what it reads (types of images or sound run for their text), how
    it runs (decoder: our own; adapted: by transformers; refused, crash, not tried), exactness, for how many of three
    prompts all beams are those of transformers, why it does not run on our own decoder.
    """
    if ctx.invoked_subcommand is not None:
        return
    if support:
        from dsbd_cli.models.checkpoints.support import Support, read_table, tried_with

        typer.echo(f"# tried with tiny random models of transformers {tried_with()}")
        _print_table([tuple(field.name for field in fields(Support)), *(row.cells() for row in read_table())])
        return
    from dsbd_cli.models.checkpoints.catalog import listed

    _print_table([(entry.name, entry.source, entry.state, entry.origin) for entry in listed()])


def _print_table(rows: Sequence[tuple[str, ...]]) -> None:
    """Print rows in columns, of which the last one is as wide as it is."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        cells = [cell.ljust(width) for cell, width in zip(row[:-1], widths, strict=False)]
        typer.echo("  ".join([*cells, row[-1]]).rstrip())


@app.command(cls=Command)
def add(name: NewName, source: SourceArgument) -> None:
    """Give a folder or a hub id a name of your own, in your models.toml (or the file that DSBD_MODELS_FILE names)."""
    from dsbd_cli.models.checkpoints.catalog import add_name

    typer.echo(f"{name} = {source}, in {add_name(name, source)}")


def schema(name: SchemaName = None) -> None:
    """Print a JSON schema (draft 2020-12) of input rows, records, statistics or reports; without a name, list them.

    Columns: name, version, what has this form. A version number rises when a field is removed or changes its meaning.
    """
    if name is not None:
        contract = contract_of(name)
        typer.echo(contract.page(contract.schema()), nl=False)
        return
    width = max(map(len, CONTRACTS))
    for one in CONTRACTS.values():
        typer.echo(f"{one.name:<{width}}  {one.id:<{width + 7}}  {one.schema()['description']}")
