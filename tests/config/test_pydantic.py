"""Every type of Pydantic's documentation (Concepts: Types, Standard Library Types, API: Types, Network Types) is a
grammar as Pydantic writes its schema; what a grammar cannot enforce is checked of whole texts."""

from __future__ import annotations

import collections
import datetime
import decimal
import enum
import fractions
import ipaddress
import json
import pathlib
import re
import typing
import uuid
from typing import Annotated, Any, Literal

import pydantic
import pytest
from annotated_types import Ge, Len, MultipleOf
from llguidance import LLMatcher
from pydantic import BaseModel, Field, TypeAdapter
from typing_extensions import TypedDict

from dsbd_cli.config.child import byte_tokenizer
from dsbd_cli.config.grammars import Grammar
from dsbd_cli.config.schema_checks import SchemaCheck
from dsbd_cli.errors import UsageError


class Colour(enum.Enum):
    RED = "red"
    BLUE = "blue"


class Level(enum.IntEnum):
    LOW = 1
    HIGH = 2


class Point(typing.NamedTuple):
    x: int
    y: int = 0


class Movie(TypedDict):
    name: str
    year: typing.NotRequired[int]


class Node(BaseModel):
    value: int
    children: list[Node] = []


class Cat(BaseModel):
    kind: Literal["cat"]
    lives: int


class Dog(BaseModel):
    kind: Literal["dog"]
    tags: set[str] = set()


class Open(BaseModel):
    model_config = pydantic.ConfigDict(extra="allow")
    a: int


# A type, texts that are valid, texts that are not; those of the third are of the grammar and fail the check
TYPES: dict[str, tuple[Any, list[object], list[object]]] = {
    "bool": (bool, [True], [1]),
    "int": (int, [-3], [1.5]),
    "float": (float, [1.5, 2], ["1"]),
    "str": (str, ["a"], [1]),
    "bytes": (bytes, ["a"], [1]),
    "none": (None, [None], [0]),
    "Any": (Any, [{"a": [1]}], []),
    "object": (object, [1], []),
    "list": (list[int], [[1, 1]], [["a"]]),
    "list bare": (list, [["a", 1]], [{}]),
    "tuple": (tuple[int, str], [[1, "a"]], [[1]]),
    "tuple any length": (tuple[int, ...], [[], [1, 2]], [["a"]]),
    "NamedTuple": (Point, [[1, 2], [1]], [["a"]]),
    "set": (set[int], [[1, 2], []], [[1, 1], ["a"]]),
    "frozenset": (frozenset[str], [["a", "b"]], [["a", "a"]]),
    "set of enum": (set[Colour], [["red", "blue"]], [["red", "red"], ["green"]]),
    "deque": (collections.deque[int], [[1]], [["a"]]),
    "Sequence": (typing.Sequence[int], [[1]], [["a"]]),
    "Iterable": (typing.Iterable[int], [[1]], [["a"]]),
    "dict": (dict[str, int], [{"x": 1}, {}], [{"x": "a"}]),
    "dict of int": (dict[int, str], [{"1": "a"}], [{"1": 1}]),
    "dict of Literal": (dict[Literal["a", "b"], int], [{"a": 1}, {"a": 1, "b": 2}, {}], [{"c": 1}, {"a": "x"}]),
    "dict of Enum": (dict[Colour, int], [{"red": 1}], [{"green": 1}]),
    "dict of pattern": (dict[Annotated[str, Field(pattern="^a+$")], int], [{"aa": 1}], [{"b": 1}]),
    "dict of short keys": (dict[Annotated[str, Field(max_length=2)], int], [{"ab": 1}], [{"abc": 1}]),
    "dict of UUID": (dict[uuid.UUID, int], [{"12345678-1234-5678-1234-567812345678": 1}], [{"x": 1}]),
    "dict of date": (dict[datetime.date, int], [{"2020-01-01": 1}], [{"x": 1}]),
    "defaultdict": (collections.defaultdict[str, int], [{"a": 1}], [{"a": "b"}]),
    "OrderedDict": (collections.OrderedDict[str, int], [{"a": 1}], [{"a": "b"}]),
    "Counter": (collections.Counter[str], [{"a": 1}], [{"a": "b"}]),
    "Mapping": (typing.Mapping[str, int], [{"a": 1}], [{"a": "b"}]),
    "TypedDict": (Movie, [{"name": "a"}, {"name": "a", "year": 1}], [{"year": 1}]),
    "Literal": (Literal["a", 1], ["a", 1], ["b"]),
    "Enum": (Colour, ["red"], ["green"]),
    "IntEnum": (Level, [1], [3]),
    "Optional": (int | None, [1, None], ["a"]),
    "Union": (int | str, [1, "a"], [None]),
    "Pattern": (re.Pattern, ["a+"], [1]),
    "date": (datetime.date, ["2020-01-31"], ["2020-13-01"]),
    "datetime": (datetime.datetime, ["2020-01-31T10:00:00Z"], ["2020"]),
    "time": (datetime.time, ["10:00:00Z"], ["10"]),
    "timedelta": (datetime.timedelta, ["P1D"], ["x"]),
    "Decimal": (decimal.Decimal, [1.5, "1.5"], [None]),
    "Decimal with look-ahead": (
        Annotated[str, Field(json_schema_extra={"pattern": r"^(?!^[-+.]*$)[+-]?0*\d*\.?\d*$"})],
        ["1.5", "-0"],
        ["-", "a"],
    ),
    "Fraction": (fractions.Fraction, ["1/2"], [None]),
    "complex": (complex, ["1+2j"], [[1]]),
    "UUID": (uuid.UUID, ["12345678-1234-5678-1234-567812345678"], ["x"]),
    "Path": (pathlib.Path, ["/a/b"], [1]),
    "IPv4Address": (ipaddress.IPv4Address, ["127.0.0.1"], ["x"]),
    "IPv4Network": (ipaddress.IPv4Network, ["10.0.0.0/8"], [1]),
    "IPv6Interface": (ipaddress.IPv6Interface, ["::1/64"], [1]),
    "IPvAnyAddress": (pydantic.IPvAnyAddress, ["127.0.0.1"], [1]),
    "AnyUrl": (pydantic.AnyUrl, ["http://a.b/c"], [1]),
    "HttpUrl": (pydantic.HttpUrl, ["http://a.b/c"], [1]),
    "PostgresDsn": (pydantic.PostgresDsn, ["postgres://a"], [1]),
    "EmailStr pattern": (Annotated[str, Field(json_schema_extra={"format": "email"})], ["a@b.cd"], ["x"]),
    "StrictInt": (pydantic.StrictInt, [1], ["1"]),
    "PositiveInt": (pydantic.PositiveInt, [1], [0]),
    "NegativeFloat": (pydantic.NegativeFloat, [-1.5], [1]),
    "FiniteFloat": (pydantic.FiniteFloat, [1.5], ["a"]),
    "conint": (pydantic.conint(ge=2, lt=9, multiple_of=3), [3, 6], [4, 9]),
    "constr": (pydantic.constr(min_length=1, max_length=2, pattern="^[a-z]+$"), ["a", "ab"], ["", "abc", "A"]),
    "constr look-ahead": (Annotated[str, Field(json_schema_extra={"pattern": "^(?!ab)a.$"})], ["ac"], ["ab"]),
    "conlist": (pydantic.conlist(int, min_length=1, max_length=2), [[1]], [[], [1, 2, 3]]),
    "conset": (pydantic.conset(int, min_length=2), [[1, 2]], [[1], [1, 1]]),
    "condecimal": (pydantic.condecimal(max_digits=5, decimal_places=2), [1.25, "1.25"], [None]),
    "annotated-types": (Annotated[list[Annotated[int, Ge(1), MultipleOf(2)]], Len(1, 2)], [[2]], [[3], []]),
    "SecretStr": (pydantic.SecretStr, ["a"], [1]),
    "SecretBytes": (pydantic.SecretBytes, ["a"], [1]),
    "Json": (pydantic.Json[list[int]], ["[1]"], [1]),
    "Base64Bytes": (pydantic.Base64Bytes, ["YQ=="], [1]),
    "Base64UrlStr": (pydantic.Base64UrlStr, ["YQ=="], [1]),
    "FilePath": (pydantic.FilePath, [__file__], [1]),
    "ByteSize": (pydantic.ByteSize, [1, "1kb"], [None]),
    "PastDate": (pydantic.PastDate, ["2020-01-01"], ["x"]),
    "AwareDatetime": (pydantic.AwareDatetime, ["2020-01-31T10:00:00Z"], ["x"]),
    "JsonValue": (pydantic.JsonValue, [{"a": [1, None]}], []),
    "recursive model": (Node, [{"value": 1, "children": [{"value": 2}]}], [{"value": "a"}]),
    "discriminated": (
        Annotated[Cat | Dog, Field(discriminator="kind")],
        [{"kind": "cat", "lives": 9}, {"kind": "dog", "tags": ["a"]}],
        [{"kind": "dog", "tags": ["a", "a"]}, {"kind": "cow"}],
    ),
    "extra": (Open, [{"a": 1, "b": [2]}], [{"b": 1}]),
    "nested generics": (dict[str, list[set[int] | None]], [{"a": [[1], None]}], [{"a": [[1, 1]]}]),
    "RootModel": (pydantic.RootModel[list[int]], [[1]], [["a"]]),
}


def is_valid(grammar: Grammar, value: object) -> bool:
    """Whether a JSON text is of the grammar, and holds under what is checked."""
    text = json.dumps(value).encode()
    matcher = LLMatcher(byte_tokenizer(), grammar.source(), log_level=0)
    assert not matcher.is_error()
    return matcher.validate_tokens([*text, 256]) == len(text) + 1 and grammar.hold([text]) == [True]


@pytest.mark.parametrize("name", TYPES)
def test_a_type_of_pydantic(name: str) -> None:
    kind, valid, invalid = TYPES[name]
    adapter = TypeAdapter(kind)
    grammar = Grammar.json_schema(adapter.json_schema())
    for value in valid:
        adapter.validate_json(json.dumps(value))
        assert is_valid(grammar, value), value
    for value in invalid:
        assert not is_valid(grammar, value), value


CHECKED = {
    "uniqueItems": ({"type": "array", "items": {"type": "integer"}, "uniqueItems": True}, [1, 2], [1, 1]),
    "contains": ({"type": "array", "items": {"type": "integer"}, "contains": {"const": 1}}, [1], [2]),
    "minContains": ({"type": "array", "contains": {"const": 1}, "minContains": 2}, [1, 1], [1]),
    "not": ({"type": "integer", "not": {"const": 1}}, 2, 1),
    "if": ({"type": "integer", "if": {"minimum": 5}, "then": {"multipleOf": 5}, "else": {"maximum": 2}}, 10, 7),
    "dependentRequired": (
        {"type": "object", "properties": {"a": {}, "b": {}}, "dependentRequired": {"a": ["b"]}},
        {"a": 1, "b": 1},
        {"a": 1},
    ),
    "dependencies": ({"properties": {"a": {}, "b": {}}, "dependencies": {"a": ["b"]}}, {"b": 1}, {"a": 1}),
    "propertyNames": ({"type": "object", "propertyNames": {"maxLength": 1}}, {"a": 1}, {"ab": 1}),
    "oneOf": ({"oneOf": [{"type": "integer"}, {"type": "number", "minimum": 5}]}, 4, 6),
    "look-around": ({"type": "string", "pattern": "^a(?=b)"}, "ab", "ac"),
    "back-reference": ({"type": "string", "pattern": "^(a|b)\\1$"}, "aa", "ab"),
    "format": ({"type": "string", "format": "json-pointer"}, "/a", "a"),
    "list of items": (
        {"type": "array", "items": [{"type": "integer"}, {"type": "integer"}], "uniqueItems": True},
        [1, 2],
        [1, 1],
    ),
    "in a definition": (
        {"$defs": {"s": {"type": "array", "uniqueItems": True}}, "properties": {"a": {"$ref": "#/$defs/s"}}},
        {"a": [1]},
        {"a": [1, 1]},
    ),
}


@pytest.mark.parametrize("name", CHECKED)
def test_what_a_grammar_cannot_enforce_is_checked_or_strictly_refused(name: str) -> None:
    schema, valid, invalid = CHECKED[name]
    grammar = Grammar.json_schema(schema)
    assert is_valid(grammar, valid)
    text = json.dumps(invalid).encode()
    matcher = LLMatcher(byte_tokenizer(), grammar.source(), log_level=0)
    assert matcher.validate_tokens([*text, 256]) == len(text) + 1, "the grammar alone takes it"
    assert grammar.hold([text, json.dumps(valid).encode()]) == [False, True]
    with pytest.raises(UsageError, match=r"unsupported|not supported|Unknown format"):
        Grammar.json_schema(schema, strict=True).source()


ENFORCED = {
    "names": ({"propertyNames": {"enum": ["a", "b"]}, "additionalProperties": {"type": "integer"}}, {"a": 1}, {"c": 1}),
    "unevaluated": ({"properties": {"a": True}, "unevaluatedProperties": False}, {"a": 1}, {"b": 1}),
    "unevaluated values": ({"properties": {"a": True}, "unevaluatedProperties": {"const": 1}}, {"b": 1}, {"b": 2}),
    "not unique": ({"type": "array", "uniqueItems": False, "items": {"const": 1}}, [1, 1], [2]),
}


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("name", ENFORCED)
def test_what_other_keywords_say_is_enforced(name: str, strict: bool) -> None:
    schema, valid, invalid = ENFORCED[name]
    grammar = Grammar.json_schema({"type": "object", **schema}, strict=strict)
    assert is_valid(grammar, valid)
    text = json.dumps(invalid).encode()
    assert LLMatcher(byte_tokenizer(), grammar.source(), log_level=0).validate_tokens([*text, 256]) <= len(text)


WRONG = [
    ({"type": "array", "uniqueItems": True, "not": {"$ref": "http://127.0.0.1:9/a.json"}}, "a.json is outside of the"),
    ({"type": "array", "contains": {"type": "strng"}}, '"strng" is not valid'),
    ({"not": 5}, '5 is not of types "boolean", "object"'),
    ({"items": [{"type": "integer"}], "minContains": 1}, "is not of types"),
    ({"type": "string", "pattern": "(["}, "unclosed character class"),
    ({"$dynamicRef": "#x"}, "unsupported keywords"),
]


@pytest.mark.parametrize(("schema", "told"), WRONG, ids=[told for _, told in WRONG])
def test_nothing_is_fetched_to_check_and_nothing_wrong_is_ignored(schema: dict[str, Any], told: str) -> None:
    with pytest.raises(UsageError, match=re.escape(told)) as caught:
        Grammar.json_schema(schema).source()
    assert "\n" not in str(caught.value)


def test_a_check_that_takes_too_long_fails() -> None:
    """2 ** 40 ways through forty definitions: the child is ended, and what it had not checked is not valid."""
    links = {f"a{at}": {"anyOf": [{"$ref": f"#/$defs/a{at + 1}"}] * 2} for at in range(40)}
    check = SchemaCheck({"$defs": {**links, "a40": {"type": "string"}}, "not": {"$ref": "#/$defs/a0"}})
    assert check.costly
    assert check.hold([b'"a"', b"1", b"1"]) == [False, False, False]
    nodes = {"type": "object", "properties": {"c": {"type": "array", "uniqueItems": True, "items": {"$ref": "#"}}}}
    assert not SchemaCheck(nodes).costly, "a tree has one way"


def test_a_costly_check_is_made_in_a_child() -> None:
    node = {"anyOf": [{"const": 1}, {"type": "array", "uniqueItems": True, "items": {"$ref": "#"}}]}
    check = SchemaCheck(node)
    assert check.costly
    assert check.hold([b"[1, []]", b"[1, 1]", b"\xff", b"[[[1]]]"]) == [True, False, False, True]


def test_what_is_no_json_is_not_valid() -> None:
    grammar = Grammar.json_schema({"type": "array", "uniqueItems": True})
    assert grammar.hold([b"[1", b"\xff", b"[" * 100_000, b"9" * 5000]) == [False] * 4
