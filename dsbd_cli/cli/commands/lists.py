"""`dsbd models` and `dsbd schema`: lists of the names of models, and of the schemas of what is read and written."""

from __future__ import annotations

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


@app.callback()
def models(ctx: typer.Context) -> None:
    """List the names of models: the built-in pair, yours, ours and the hub cache, and whether the files are here.

    Columns: name, source, state (here, partly here, absent), origin (built-in, yours, ours, hub cache).
    """
    if ctx.invoked_subcommand is not None:
        return
    from dsbd_cli.models.checkpoints.catalog import listed

    rows = [(entry.name, entry.source, entry.state, entry.origin) for entry in listed()]
    widths = [max(len(row[column]) for row in rows) for column in range(3)]
    for row in rows:
        typer.echo("  ".join([*(cell.ljust(width) for cell, width in zip(row, widths, strict=False)), row[3]]))


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
