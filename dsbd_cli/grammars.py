"""Grammars: what an answer must look like as a whole. A JSON schema, a regular expression or a Lark grammar.

The library llguidance reads and follows them. It is an optional part of the installation (`dsbd[grammar]`) and is
imported when the first grammar is used.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Literal

from dsbd_cli.errors import UsageError, shorten

__all__ = ["Grammar"]

GrammarKind = Literal["json_schema", "regex", "lark"]

# How JSON is written: in one line, as Python's json.dumps does. A schema's own "x-guidance" object wins over this.
LAYOUT = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
DEFINITIONS = ("$defs", "definitions")
MOST_TRIALS = 2000  # subschemas that are tried to find the place of an error
# Keywords whose value holds subschemas: one, a list of them, or some by name
NESTED = frozenset(
    "additionalProperties allOf anyOf definitions $defs items oneOf patternProperties prefixItems properties".split()
)
Schema = Mapping[str, object] | bool


@dataclass(frozen=True, slots=True)
class Grammar:
    """What a whole answer must match.

    Attributes:
        kind: how `text` is to be read.
        text: a JSON schema as JSON, a regular expression (Rust syntax, the whole answer must match), or a Lark grammar
            whose first rule is `start`.
    """

    kind: GrammarKind
    text: str

    @classmethod
    def json_schema(cls, schema: Schema | str) -> Grammar:
        """Answers that are valid JSON under this schema. Properties come in the order in which the schema has them."""
        return cls("json_schema", schema if isinstance(schema, str) else json.dumps(schema, ensure_ascii=False))

    @classmethod
    def json_object(cls) -> Grammar:
        """Any JSON object."""
        return cls.json_schema({"type": "object"})

    @classmethod
    def regex(cls, pattern: str) -> Grammar:
        """Answers that match this expression from their beginning to their end."""
        return cls("regex", pattern)

    @classmethod
    def lark(cls, grammar: str) -> Grammar:
        """Answers that this Lark grammar derives from `start`."""
        return cls("lark", grammar)

    @property
    def name(self) -> str:
        """Its kind and a hash of its text, by which runs are told apart."""
        return f"{self.kind} {hashlib.blake2b(self.text.encode('utf-8', 'surrogatepass'), digest_size=8).hexdigest()}"

    def source(self) -> str:
        """The grammar as llguidance takes it. Raises UsageError where it is malformed or uses what is not supported;
        of a schema the message names the place, as a JSON pointer."""
        if find_spec("llguidance") is None:
            raise UsageError("a grammar needs the package llguidance: pip install 'dsbd[grammar]'")
        try:
            self.text.encode()
        except UnicodeEncodeError:
            raise UsageError("it is no valid text: it holds half a surrogate pair") from None
        if self.kind == "json_schema":
            schema = self._schema()
            source = _schema_source(schema)
            if (fault := _fault(source)) is not None:
                raise UsageError(f"{_told(fault)} (at {_place(schema, fault)})")
            return source
        from llguidance import LLMatcher

        make = LLMatcher.grammar_from_regex if self.kind == "regex" else LLMatcher.grammar_from_lark
        source = make(self.text)
        if (fault := _fault(source)) is not None:
            raise UsageError(_told(fault))
        return source

    def _schema(self) -> Schema:
        try:
            schema = json.loads(self.text)
        except json.JSONDecodeError as error:
            raise UsageError(f"not valid JSON: {error}") from None
        except RecursionError:
            raise UsageError("nested too deep") from None
        if not isinstance(schema, Mapping | bool):
            raise UsageError(f"{shorten(schema)} is no JSON schema: it must be an object")
        return schema


def _schema_source(schema: object) -> str:
    from llguidance import LLMatcher

    if isinstance(schema, bool):  # llguidance takes it inside of a schema, but not as a whole one
        schema = {"allOf": [schema]}
    try:
        return LLMatcher.grammar_from_json_schema(json.dumps(schema), defaults=LAYOUT)  # type: ignore[arg-type]
    except (ValueError, RecursionError) as error:  # half a surrogate pair, a number that is too large
        raise UsageError(f"not valid JSON: {' '.join(str(error).split())[:200]}") from None


def _fault(source: str) -> str | None:
    """What llguidance says against a grammar; None where it takes it."""
    from llguidance import LLMatcher

    wrong, messages = LLMatcher.validate_grammar_with_warnings(source)
    # where llguidance came from is not told: the innermost place is found by trying
    lines = [line for line in messages[0].splitlines() if "while processing" not in line] if wrong else []
    return "\n".join(lines) if wrong else None


def _place(schema: Schema, fault: str) -> str:
    """JSON pointer of the innermost subschema that fails in the same way, or `the root`."""
    shared = {} if isinstance(schema, bool) else {name: schema[name] for name in DEFINITIONS if name in schema}
    pointer, trials, here = "", 0, schema
    while True:
        for step, inner in _subschemas(here):
            trials += 1
            if trials > MOST_TRIALS:
                return pointer or "the root"
            alone = {**shared, **inner} if isinstance(inner, Mapping) else inner
            if _fault(_schema_source(alone)) == fault:
                pointer, here = pointer + step, inner
                break
        else:
            return pointer or "the root"


def _subschemas(schema: Schema) -> Iterator[tuple[str, Schema]]:
    """Those one step below, with the pointer to them."""
    if isinstance(schema, bool):
        return
    for name in sorted(NESTED & schema.keys()):
        value, by_name = schema[name], name in ("properties", "patternProperties", *DEFINITIONS)
        if isinstance(value, list):
            yield from ((f"/{name}/{place}", one) for place, one in enumerate(value) if isinstance(one, Mapping | bool))
        elif isinstance(value, Mapping) and by_name:
            for key, one in value.items():
                if isinstance(one, Mapping | bool):
                    yield f"/{name}/{str(key).replace('~', '~0').replace('/', '~1')}", one
        elif isinstance(value, Mapping | bool):
            yield f"/{name}", value


def _told(fault: str) -> str:
    """A message of llguidance on one line."""
    if "Unimplemented keys:" in fault:
        return f"unsupported keywords {fault.partition(':')[2].strip()}"
    lines = fault.strip().splitlines()
    reasons = [line.removeprefix("error: ") for line in lines if line.startswith("error: ")]
    return " ".join((reasons or lines)[0].split())[:200]
