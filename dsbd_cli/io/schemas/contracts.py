"""Names and versions of the formats that the commands read and write, their JSON schemas, and JSON that keeps to one
line.

A version number rises when a field is removed, or changes its meaning. Fields may be added under the same number; tests
check both (tests/io/test_schemas.py).
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import orjson

from dsbd_cli.errors import UsageError, shorten

FOLDER = Path(__file__).parent
SHARED = "common.json"  # parts that several schemas refer to


@dataclass(frozen=True, slots=True)
class Contract:
    """A format of lines or documents.

    Attributes:
        name: of its schema, as `dsbd schema` takes it. number: its version.
    """

    name: str
    number: int = 1

    @property
    def id(self) -> str:
        """Value of a line's field `schema`: dsbd.output/1."""
        return f"dsbd.{self.name}/{self.number}"

    def line(self, fields: Mapping[str, object]) -> bytes:
        """Return a line of JSON without its line end."""
        return dump_line(fields)

    def text_line(self, fields: Mapping[str, object]) -> str:
        """Return a line of JSON with its line end, in ASCII, for a text stream of any encoding."""
        return json.dumps(fields) + "\n"

    def page(self, fields: Mapping[str, object]) -> bytes:
        """Return an indented document that ends with a line end."""
        return _escaped(orjson.dumps(fields, option=orjson.OPT_INDENT_2)) + b"\n"

    def schema(self) -> dict[str, object]:
        """Return the JSON schema with all the parts that it refers to."""
        return _bundled(_read(f"{self.name}.json"))


INPUT = Contract("input")
OUTPUT = Contract("output")
FAILED = Contract("failed")
OPENAI = Contract("openai")
STEP = Contract("step")
SUMMARY = Contract("summary")
PICK = Contract("pick")
BENCH = Contract("bench")
PROFILE = Contract("profile")
DOCTOR = Contract("doctor")
TRIM = Contract("trim")
DISTILL = Contract("distill")
ANSWERS = Contract("answers")
LOG = Contract("log")
DRY_RUN = Contract("dry-run")
_ALL = (
    INPUT,
    OUTPUT,
    FAILED,
    OPENAI,
    STEP,
    SUMMARY,
    PICK,
    BENCH,
    PROFILE,
    DOCTOR,
    TRIM,
    DISTILL,
    ANSWERS,
    LOG,
    DRY_RUN,
)
CONTRACTS = {contract.name: contract for contract in _ALL}


def contract_of(name: str) -> Contract:
    """Return the contract of a name. Raises UsageError for a name that no schema has."""
    if name not in CONTRACTS:
        raise UsageError(f"there is no schema {shorten(name)}: name one of {', '.join(CONTRACTS)}")
    return CONTRACTS[name]


# Control characters that JSON leaves unescaped: DEL, C1 (0x9b begins a terminal sequence) and the Unicode line ends.
_CONTROLS = re.compile(rb"\x7f|\xc2[\x80-\x9f]|\xe2\x80[\xa8\xa9]")


def dump_line(record: object) -> bytes:
    """Return JSON without any raw control character or line end, so that no text can write outside its record."""
    return _escaped(orjson.dumps(record))


def _escaped(text: bytes) -> bytes:
    if b"\x7f" in text or not (text.isascii() or (b"\xc2" not in text and b"\xe2\x80" not in text)):
        text = _CONTROLS.sub(lambda match: b"\\u%04x" % ord(match[0].decode()), text)
    return text


def _read(file: str) -> dict[str, object]:
    schema: dict[str, object] = orjson.loads((FOLDER / file).read_bytes())
    return schema


def _bundled(schema: dict[str, object]) -> dict[str, object]:
    """Return a schema with the shared parts that it refers to inside it, so that a validator needs no other file."""
    shared = _read(SHARED)["$defs"]
    assert isinstance(shared, dict)
    taken: dict[str, object] = {}

    def resolved(node: object) -> object:
        if isinstance(node, list):
            return [resolved(item) for item in node]
        if not isinstance(node, dict):
            return node
        schema = {name: resolved(value) for name, value in node.items()}
        reference = schema.get("$ref")
        if isinstance(reference, str) and reference.startswith(SHARED):
            name = reference.rsplit("/", 1)[1]
            schema["$ref"] = f"#/$defs/{name}"
            if name not in taken:
                taken[name] = resolved(shared[name])
        return schema

    whole = resolved(schema)
    assert isinstance(whole, dict)
    parts = {**whole.pop("$defs", {}), **taken}
    return {**whole, "$defs": parts} if parts else whole
