"""Schemas before they are compiled: how far references lead, and which objects are closed.

What a closed schema means is asked of the package jsonschema and of llguidance's own matcher, never of the rewriting.
"""

from __future__ import annotations

import json
from typing import Any

import jsonschema
import pytest
from llguidance import LLMatcher

from dsbd_cli.config import schemas
from dsbd_cli.config.child import byte_tokenizer
from dsbd_cli.config.grammars import Grammar
from dsbd_cli.config.schemas import MOST_LEVELS, close_objects, extent
from dsbd_cli.errors import UsageError

Schema = dict[str, Any]

A: Schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
B: Schema = {"type": "object", "properties": {"b": {"type": "integer"}}, "required": ["b"]}
INNER: Schema = {"type": "object", "properties": {"x": A}, "required": ["x"]}


def chain(kind: str, length: int) -> Schema:
    """References one behind the other."""
    ways: dict[str, Any] = {
        "defs": lambda to: {"$ref": to},
        "properties": lambda to: {"type": "object", "properties": {"x": {"$ref": to}}},
        "allOf": lambda to: {"allOf": [{"$ref": to}]},
    }
    links = {f"a{at}": ways[kind](f"#/$defs/a{at + 1}") for at in range(length)}
    return {"$defs": {**links, f"a{length}": {"type": "string"}}, "$ref": "#/$defs/a0"}


@pytest.mark.parametrize("kind", ["defs", "properties", "allOf"])
def test_a_chain_of_references_is_bounded(kind: str) -> None:
    """3,000 exhausted the stack of llguidance and took the process with it."""
    with pytest.raises(UsageError, match=f"its references lead through more than {MOST_LEVELS} levels"):
        Grammar.json_schema(chain(kind, 3_000)).source()
    Grammar.json_schema(chain(kind, 60)).source()


def test_references_in_a_circle_are_followed_once() -> None:
    tree = {"$defs": {"t": {"type": "object", "properties": {"t": {"$ref": "#/$defs/t"}}}}, "$ref": "#/$defs/t"}
    assert extent(tree).nodes < 10
    itself = {"type": "object", "properties": {"next": {"$ref": "#"}}}
    assert extent(itself).nodes < 10
    Grammar.json_schema(tree).source()
    Grammar.json_schema(itself).source()


def test_ways_are_counted_not_walked() -> None:
    """2 ** 100 ways through 100 definitions."""
    links = {f"a{at}": {"anyOf": [{"$ref": f"#/$defs/a{at + 1}"}] * 2} for at in range(100)}
    assert extent({"$defs": {**links, "a100": {}}, "$ref": "#/$defs/a0"}).nodes > 2**100


def test_a_schema_that_is_nested_too_deep() -> None:
    schema: Schema = {"type": "string"}
    for _ in range(400):
        schema = {"items": schema}
    with pytest.raises(UsageError, match="levels"):
        Grammar.json_schema(schema).source()


TEXTS = [
    *({"a": 1}, {"b": 2}, {"a": 1, "b": 2}, {"a": 1, "c": 3}, {"b": 1, "c": 3}, {"a": 1, "b": 2, "c": 3}),
    *({"x": {"a": 1}}, {"x": {"a": 1, "c": 3}}, {"x": {"a": 1}, "c": 3}, {}, {"c": 3}, {"a": "s"}, None),
]

# What is left of TEXTS under each schema. The first three are what Pydantic writes.
CLOSED: dict[str, tuple[Schema, list[object]]] = {
    "alone": (A, [{"a": 1}]),
    "nested": (INNER, [{"x": {"a": 1}}]),
    "reference": ({"$defs": {"A": A}, "$ref": "#/$defs/A"}, [{"a": 1}]),
    "optional": ({"$defs": {"A": A}, "anyOf": [{"$ref": "#/$defs/A"}, {"type": "null"}]}, [{"a": 1}, None]),
    "allOf": ({"allOf": [A, B]}, [{"a": 1, "b": 2}]),
    "allOf of references": (
        {"$defs": {"A": A, "B": B}, "allOf": [{"$ref": "#/$defs/A"}, {"$ref": "#/$defs/B"}]},
        [{"a": 1, "b": 2}],
    ),
    "beside a reference": ({"$defs": {"A": A}, "$ref": "#/$defs/A", **B}, [{"a": 1, "b": 2}]),
    "beside anyOf": ({**A, "anyOf": [B, {"required": ["a"]}]}, [{"a": 1}, {"a": 1, "b": 2}]),
    "anyOf": ({"anyOf": [A, B]}, [{"a": 1}, {"b": 2}]),
    "required alone": ({"type": "object", "required": ["c"]}, [{"c": 3}]),
    "said to be open": (
        {**A, "additionalProperties": True},
        [value for value in TEXTS if value and value.get("a") == 1],
    ),
    "one part said so": (
        {"allOf": [{**A, "additionalProperties": True}, B]},
        [{"a": 1, "b": 2}, {"a": 1, "b": 2, "c": 3}],
    ),
    "values said": ({**A, "additionalProperties": {"const": 3}}, [{"a": 1}, {"a": 1, "c": 3}]),
    "no property named": ({"type": "object"}, [value for value in TEXTS if value is not None]),
}


def accepted(schema: Schema) -> list[object]:
    """Of TEXTS those that llguidance takes."""
    start = LLMatcher(byte_tokenizer(), Grammar.json_schema(schema).source(), log_level=0)
    assert not start.is_error(), start.get_error()
    tokens = [[*json.dumps(value).encode(), 256] for value in TEXTS]
    return [value for value, said in zip(TEXTS, tokens, strict=True) if start.validate_tokens(said) == len(said)]


@pytest.mark.parametrize("name", CLOSED)
def test_objects_are_closed_unless_the_schema_says_otherwise(name: str) -> None:
    schema, expected = CLOSED[name]
    values = accepted(schema)
    assert values == [value for value in TEXTS if value in expected]
    for value in values:
        jsonschema.validate(value, schema)
        jsonschema.validate(value, close_objects(schema))


def test_properties_by_pattern_are_closed_too() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "patternProperties": {"^b": {"const": 2}}}
    assert accepted(schema) == [{"a": 1}, {"b": 2}, {"a": 1, "b": 2}, {}]


def test_a_definition_that_is_merged_stays_closed_where_it_stands_alone() -> None:
    both = {"allOf": [{"$ref": "#/$defs/A"}, B]}
    schema = {"$defs": {"A": A}, "anyOf": [{"$ref": "#/$defs/A"}, both]}
    assert accepted(schema) == [{"a": 1}, {"a": 1, "b": 2}]


def test_what_is_no_schema_is_left_as_it_is() -> None:
    """Values of enum and const, defaults and names of properties are no subschemas."""
    value = {"properties": {"p": {}}}
    schema = {"properties": {"properties": {"const": value, "default": value}}}
    assert close_objects(schema)["properties"] == schema["properties"]


@pytest.mark.parametrize("keyword", ["allOf", "anyOf", "oneOf"])
def test_each_part_of_a_nested_merge_is_read_once(keyword: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards a run that hung at one row: twice the work for each level of parts, before the schema was tried apart."""
    read, real = [0], schemas._Closing._inner

    def inner(self: Any, node: dict[str, object], *conditional: Any) -> dict[str, object]:
        read[0] += 1
        return real(self, node, *conditional)

    monkeypatch.setattr(schemas._Closing, "_inner", inner)
    schema: dict[str, object] = {"properties": {"a": {}}}
    for _ in range(12):
        schema = {keyword: [schema]}
    closed: Any = close_objects(schema)
    assert read[0] < 100
    for _ in range(12):
        closed = closed[keyword][0]
    assert closed["properties"] == {"a": {}}


def test_properties_that_every_part_would_get_are_bounded() -> None:
    """Guards memory: names times parts."""
    schema = {"properties": {f"p{number}": {} for number in range(5000)}, "anyOf": [{} for _ in range(5000)]}
    with pytest.raises(UsageError, match="name more than 200,000 properties"):
        close_objects(schema)
