"""`dsbd schema`: the JSON schemas of what is read and written."""

from __future__ import annotations

from typing import Annotated

import typer

from dsbd_cli.io.schemas.contracts import CONTRACTS, contract_of

Name = Annotated[str | None, typer.Argument(metavar="NAME", help="which one; without it, a list", show_default=False)]


def schema(name: Name = None) -> None:
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
