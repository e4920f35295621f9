"""`dsbd schema`. What the schemas say is held in tests/io/test_schemas.py."""

from __future__ import annotations

import json
from collections.abc import Callable

from dsbd_cli.io.schemas.contracts import CONTRACTS
from tests.cli.conftest import Outcome


def test_schemas_are_listed_and_printed(dsbd: Callable[..., Outcome]) -> None:
    listed = dsbd("schema")
    assert (listed.code, listed.err) == (0, "")
    assert [line.split()[:2] for line in listed.out.splitlines()] == [
        [contract.name, contract.id] for contract in CONTRACTS.values()
    ]
    for name, contract in CONTRACTS.items():
        assert json.loads(dsbd("schema", name).out) == contract.schema()


def test_an_unknown_name_is_one_line(dsbd: Callable[..., Outcome]) -> None:
    wrong = dsbd("schema", "outptu")
    assert (wrong.code, wrong.out) == (2, "")
    names = ", ".join(CONTRACTS)
    assert wrong.err == f"dsbd: error: there is no schema 'outptu': name one of {names}\n"
