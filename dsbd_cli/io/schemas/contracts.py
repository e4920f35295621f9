"""Names and numbers of what the commands write, its JSON schemas, and JSON that stays on its line.

A number moves when a field goes, or means something else. Fields may be added under the same number; tests hold both
(tests/io/test_schemas.py).
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
    """A form of lines or documents.

    Attributes:
        name: of its schema, as `dsbd schema` takes it. number: of its version.
    """

    name: str
    number: int = 1

    @property
    def id(self) -> str:
        """Return what stands in the field `schema` of a line: dsbd.output/1."""
        return f"dsbd.{self.name}/{self.number}"

    def line(self, fields: Mapping[str, object]) -> bytes:
        """Return the line without its end."""
        return dump_line(fields)

    def text_line(self, fields: Mapping[str, object]) -> str:
        """Return the line with its end for a stream of text, whose encoding may be any: ASCII only."""
        return json.dumps(fields) + "\n"

    def page(self, fields: Mapping[str, object]) -> bytes:
        """Return an indented document with its last line end."""
        return _escaped(orjson.dumps(fields, option=orjson.OPT_INDENT_2)) + b"\n"

    def schema(self) -> dict[str, object]:
        """Return the JSON schema, complete in itself."""
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
_ALL = (INPUT, OUTPUT, FAILED, OPENAI, STEP, SUMMARY, PICK, BENCH, PROFILE, DOCTOR, TRIM, DISTILL, ANSWERS, LOG)
CONTRACTS = {one.name: one for one in _ALL}


def contract_of(name: str) -> Contract:
    """Raises UsageError for a name that no schema has."""
    if name not in CONTRACTS:
        raise UsageError(f"there is no schema {shorten(name)}: name one of {', '.join(CONTRACTS)}")
    return CONTRACTS[name]


# Control characters that JSON lets stand: DEL, C1 (0x9b begins a terminal sequence) and the Unicode line ends.
_CONTROLS = re.compile(rb"\x7f|\xc2[\x80-\x9f]|\xe2\x80[\xa8\xa9]")


def dump_line(record: object) -> bytes:
    """JSON without any raw control character or line end, so that no text can write outside its record."""
    return _escaped(orjson.dumps(record))


def _escaped(text: bytes) -> bytes:
    if b"\x7f" in text or not (text.isascii() or (b"\xc2" not in text and b"\xe2\x80" not in text)):
        text = _CONTROLS.sub(lambda found: b"\\u%04x" % ord(found[0].decode()), text)
    return text


def _read(file: str) -> dict[str, object]:
    found: dict[str, object] = orjson.loads((FOLDER / file).read_bytes())
    return found


def _bundled(schema: dict[str, object]) -> dict[str, object]:
    """Put the shared parts that a schema refers to into it, so that a validator needs no other file."""
    shared = _read(SHARED)["$defs"]
    assert isinstance(shared, dict)
    taken: dict[str, object] = {}

    def resolved(node: object) -> object:
        if isinstance(node, list):
            return [resolved(one) for one in node]
        if not isinstance(node, dict):
            return node
        found = {name: resolved(one) for name, one in node.items()}
        reference = found.get("$ref")
        if isinstance(reference, str) and reference.startswith(SHARED):
            name = reference.rsplit("/", 1)[1]
            found["$ref"] = f"#/$defs/{name}"
            if name not in taken:
                taken[name] = resolved(shared[name])
        return found

    whole = resolved(schema)
    assert isinstance(whole, dict)
    parts = {**whole.pop("$defs", {}), **taken}
    return {**whole, "$defs": parts} if parts else whole
