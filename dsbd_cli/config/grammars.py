"""Grammars that a whole answer must match: a JSON schema, a regular expression or a Lark grammar.

The library llguidance reads and follows them. It is imported when the first grammar is used. A grammar that may cost
much is compiled in a child process first (child.py).
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

from dsbd_cli.config.checking import check_types
from dsbd_cli.config.child import parser_limits, trial_fault
from dsbd_cli.config.schema_checks import is_checkable, relaxed, rewritten, schema_check
from dsbd_cli.config.schema_ends import SchemaEnds
from dsbd_cli.config.schemas import ONE_SUBSCHEMA, SUBSCHEMA_LISTS, SUBSCHEMAS_BY_NAME, close_objects, extent
from dsbd_cli.errors import UsageError, one_line, shorten

GrammarKind = Literal["json_schema", "regex", "lark"]

# How JSON is written: in one line, as Python's json.dumps does. A schema's own "x-guidance" object wins over this.
LAYOUT = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
DEFINITIONS = ("$defs", "definitions")
MOST_TRIALS, MOST_TRIED = 2000, 10_000_000  # subschemas that are tried to find an error's place, and their letters
# A grammar that stays within all of these is compiled without a trial in a child process
CHEAP_SCHEMA, CHEAP_NODES, CHEAP_COUNT, CHEAP_PATTERN, CHEAP_LARK = 20_000, 5_000, 1_000, 200, 300
COSTLY_KEYS = frozenset("allOf multipleOf not oneOf pattern patternProperties x-guidance".split())
COSTLY_LARK = frozenset("&~{%")
MOST_PREPARED = 256  # grammars, patterns and formats that are kept
Schema = Mapping[str, object] | bool


@dataclass(frozen=True, slots=True)
class Grammar:
    """Grammar that a whole answer must match.

    Attributes:
        kind: how `text` is to be read.
        text: a JSON schema as JSON, a regular expression (Rust syntax, the whole answer must match), or a Lark grammar
            whose first rule is `start`.
        strict: a schema's keywords that the grammar cannot enforce are an error, instead of being checked of whole
            texts.
    """

    kind: GrammarKind
    text: str
    strict: bool = False

    def __post_init__(self) -> None:
        check_types(self)

    @classmethod
    def json_schema(cls, schema: Schema | str, *, strict: bool = False) -> Grammar:
        """Make the grammar of answers that are valid JSON under this schema. Properties come in the order in which the
        schema has them. strict: see the class."""
        try:
            text = schema if isinstance(schema, str) else json.dumps(schema, ensure_ascii=False)
        except (TypeError, ValueError) as error:
            raise UsageError(f"schema is {shorten(schema)}, but must be JSON: {one_line(error)}") from None
        return cls("json_schema", text, strict)

    @classmethod
    def json_object(cls) -> Grammar:
        """Make the grammar of any JSON object."""
        return cls.json_schema({"type": "object"})

    @classmethod
    def regex(cls, pattern: str) -> Grammar:
        """Make the grammar of answers that match this expression from their beginning to their end."""
        return cls("regex", pattern)

    @classmethod
    def lark(cls, grammar: str) -> Grammar:
        """Make the grammar of answers that this Lark grammar derives from `start`."""
        return cls("lark", grammar)

    @property
    def name(self) -> str:
        """Kind of the grammar and a hash of its text, by which runs are told apart."""
        return f"{self.kind} {hashlib.blake2b(self.text.encode('utf-8', 'surrogatepass'), digest_size=8).hexdigest()}"

    def source(self) -> str:
        """Return the grammar as llguidance takes it. Raises UsageError where it is malformed or uses something
        unsupported. For a schema the message names the place, as a JSON pointer."""
        return _prepared(self).source

    @property
    def enforced(self) -> Schema:
        """Schema that the grammar enforces, with its objects closed. Raises UsageError as `source` does."""
        return _prepared(self).schema

    def hold(self, texts: Sequence[bytes]) -> list[bool]:
        """Return for each whole text whether it is valid under what of a schema the grammar does not enforce."""
        is_checked = self.kind == "json_schema" and _prepared(self).is_checked
        return schema_check(self.text).hold(texts) if is_checked else [True] * len(texts)

    def schema_ends(self, scalar: Callable[[dict[str, object]], str | None]) -> SchemaEnds:
        """Return what is known of the ends of texts under this schema. scalar: finds the shortest text of a schema of
        one scalar type."""
        schema = self.enforced
        guidance = schema.get("x-guidance") if isinstance(schema, Mapping) else None
        layout = {**LAYOUT, **(guidance if isinstance(guidance, Mapping) else {})}
        separators = (str(layout["item_separator"]), str(layout["key_separator"]))
        return SchemaEnds(schema, separators, scalar)


@dataclass(frozen=True, slots=True)
class _Prepared:
    """A grammar as llguidance takes it.

    Attributes:
        schema: what it enforces, with its objects closed. is_checked: it enforces less than it was given.
    """

    source: str
    schema: Schema = True
    is_checked: bool = False


@lru_cache(MOST_PREPARED)
def _prepared(grammar: Grammar) -> _Prepared:
    try:
        grammar.text.encode()
    except UnicodeEncodeError:
        raise UsageError("it is no valid text: it holds half a surrogate pair") from None
    if grammar.kind == "json_schema":
        return _prepared_schema(_read_schema(grammar.text), grammar.text, strict=grammar.strict)
    from llguidance import LLMatcher

    if grammar.kind == "regex":
        if (len(grammar.text) - len(grammar.text.rstrip("\\"))) % 2:  # llguidance would drop it
            raise UsageError("a backslash at its end escapes nothing")
        source, cheap = LLMatcher.grammar_from_regex(grammar.text), _is_cheap_pattern(grammar.text)
    else:
        source, cheap = LLMatcher.grammar_from_lark(grammar.text), _is_cheap_lark(grammar.text)
    if (fault := _tried_fault(source, cheap=cheap)) is not None:
        raise UsageError(_message(fault))
    return _Prepared(source)


def _read_schema(text: str) -> Schema:
    try:
        schema = json.loads(text)
    except json.JSONDecodeError as error:
        raise UsageError(f"not valid JSON: {error}") from None
    except (ValueError, RecursionError):
        raise UsageError("a value has too many digits or levels") from None
    if not isinstance(schema, Mapping | bool):
        raise UsageError(f"{shorten(schema)} is no JSON schema: it must be an object")
    return schema


def _prepared_schema(schema: Schema, text: str, *, strict: bool) -> _Prepared:
    """Prepare a schema. Keywords that llguidance does not know are said by others where these can; the rest is left
    out, unless `strict`, and checked of whole texts."""
    cheap = _is_cheap_schema(text, schema)
    tried: list[tuple[Schema, str]] = []
    for is_rewritten, is_checked in ((False, False), (True, False), (True, True)):
        if (is_rewritten and isinstance(schema, bool)) or (is_checked and strict):
            break
        closed = schema
        if isinstance(schema, Mapping):
            schema = rewritten(dict(schema)) if is_rewritten else schema
            closed = close_objects(schema)
            if is_checked:
                schema, closed = relaxed(dict(schema), _is_enforced), relaxed(closed, _is_enforced)
        source = _schema_source(closed, coerce_one_of=is_checked)
        fault = _tried_fault(source, cheap=cheap)
        if fault is None:
            if is_checked:
                schema_check(text)  # an error where texts cannot be checked by it
            return _Prepared(source, closed, is_checked)
        tried.append((schema, fault))
    schema, fault = tried[-1]
    raise UsageError(f"{_message(fault)} (at {_place(schema, fault)})")


def _tried_fault(source: str, *, cheap: bool) -> str | None:
    """Return what llguidance has against a grammar, which is first tried in a child process unless it is cheap. Raises
    UsageError where it takes too much."""
    if not cheap and (fault := trial_fault(source)) is not None:
        raise UsageError(fault)
    return _fault(source)


@lru_cache(MOST_PREPARED)
def _is_enforced(keyword: str, value: str) -> bool:
    """Return whether llguidance can enforce a `pattern`, or knows a `format`. What nobody can check counts as enforced,
    so that llguidance's error comes out."""
    alone: dict[str, object] = {"type": "string", keyword: value}
    fault = _tried_fault(_schema_source(alone), cheap=_is_cheap_pattern(value))
    return fault is None or not is_checkable(alone)


def _is_cheap_schema(text: str, schema: Schema) -> bool:
    """Return whether a schema is short, and small with its references followed. Raises UsageError where these lead too
    far to be compiled."""
    if isinstance(schema, bool):
        return True
    size = extent(schema)
    small = size.nodes <= CHEAP_NODES and size.largest <= CHEAP_COUNT and not size.keys & COSTLY_KEYS
    return small and len(text) <= CHEAP_SCHEMA


def _is_cheap_pattern(pattern: str) -> bool:
    """Return whether a pattern is short, and its counted repetitions make it little longer even if each is inside the
    next."""
    counts = re.findall(r"[0-9]+", " ".join(re.findall(r"\{[0-9, ]*\}", pattern)))
    return (
        len(pattern) <= CHEAP_PATTERN and math.prod(min(int(count), CHEAP_COUNT) or 1 for count in counts) < CHEAP_COUNT
    )


def _is_cheap_lark(text: str) -> bool:
    """Return whether a Lark grammar is short, without intersections, complements, repetitions by number and nested
    grammars."""
    return len(text) <= CHEAP_LARK and not COSTLY_LARK & set(text)


def _schema_source(schema: object, *, coerce_one_of: bool = False) -> str:
    from llguidance import LLMatcher

    layout = {**LAYOUT, "coerce_one_of": coerce_one_of}
    if isinstance(schema, bool):  # llguidance takes true and false inside of a schema, but not as a whole one
        schema = {"allOf": [schema]}
    try:
        return LLMatcher.grammar_from_json_schema(json.dumps(schema), defaults=layout)  # type: ignore[arg-type]
    except (ValueError, RecursionError) as error:  # half a surrogate pair, a number that is too large
        raise UsageError(f"not valid JSON: {one_line(error)}") from None


def _fault(source: str) -> str | None:
    """Return what llguidance has against a grammar; None where it accepts it."""
    from llguidance import LLMatcher

    wrong, messages = LLMatcher.validate_grammar_with_warnings(source, limits=parser_limits())
    # llguidance's lines on the place are left out: _place finds the innermost one by trying
    lines = [line for line in messages[0].splitlines() if "while processing" not in line] if wrong else []
    return "\n".join(lines) if wrong else None


def _place(schema: Schema, fault: str) -> str:
    """Return the JSON pointer of the innermost subschema that fails with the same message, or `the root`."""
    shared = {} if isinstance(schema, bool) else {name: schema[name] for name in DEFINITIONS if name in schema}
    pointer, trials, tried, here = "", 0, 0, schema
    while True:
        for step, inner in _subschemas(here):
            trials += 1
            alone = _schema_source({**shared, **inner} if isinstance(inner, Mapping) else inner)
            tried += len(alone)
            if trials > MOST_TRIALS or tried > MOST_TRIED:
                return pointer or "the root"
            if _fault(alone) == fault:
                pointer, here = pointer + step, inner
                break
        else:
            return pointer or "the root"


def _subschemas(schema: Schema) -> Iterator[tuple[str, Schema]]:
    """Yield the subschemas one step below, with the pointer to them from here."""
    if isinstance(schema, bool):
        return
    for name in sorted((ONE_SUBSCHEMA | SUBSCHEMA_LISTS | SUBSCHEMAS_BY_NAME) & schema.keys()):
        value = schema[name]
        if isinstance(value, list):
            yield from (
                (f"/{name}/{index}", subschema)
                for index, subschema in enumerate(value)
                if isinstance(subschema, Mapping | bool)
            )
        elif isinstance(value, Mapping) and name in SUBSCHEMAS_BY_NAME:
            for key, value_of_key in value.items():
                if isinstance(value_of_key, Mapping | bool):
                    yield f"/{name}/{str(key).replace('~', '~0').replace('/', '~1')}", value_of_key
        elif isinstance(value, Mapping | bool):
            yield f"/{name}", value


def _message(fault: str) -> str:
    """Return a message of llguidance on one line."""
    if "Unimplemented keys:" in fault:
        return f"unsupported keywords {fault.partition(':')[2].strip()}"
    lines = fault.strip().splitlines()
    reasons = [line.removeprefix("error: ") for line in lines if line.startswith("error: ")]
    return " ".join((reasons or lines)[0].split())[:200]
