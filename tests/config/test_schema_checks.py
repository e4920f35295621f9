"""What is left out of a grammar never makes it stricter than the schema. The judge is the package jsonschema, which
knows nothing of the rewriting; texts come in every order of their properties, as a grammar fixes one."""

from __future__ import annotations

import json
from itertools import permutations, product
from random import Random
from typing import Any

import pytest
from jsonschema import Draft202012Validator
from llguidance import LLMatcher

from dsbd_cli.config.child import byte_tokenizer
from dsbd_cli.config.grammars import Grammar
from dsbd_cli.errors import UsageError

Schema = dict[str, Any]


class Answers:
    """The texts of a schema's grammar."""

    def __init__(self, schema: Schema) -> None:
        self.grammar = Grammar.json_schema(schema)
        self._start = LLMatcher(byte_tokenizer(), self.grammar.source(), log_level=0)
        assert not self._start.is_error(), self._start.get_error()

    def match(self, value: object) -> bool:
        """Whether the grammar takes a value, whatever is checked later."""
        text = [*json.dumps(value).encode(), 256]
        return self._start.validate_tokens(text) == len(text)

    def hold(self, value: object) -> bool:
        return self.match(value) and self.grammar.hold([json.dumps(value).encode()]) == [True]


INTEGER, TEXT = {"type": "integer"}, {"type": "string"}
A: Schema = {"properties": {"a": INTEGER}, "required": ["a"]}
K_IS_A: Schema = {"properties": {"k": {"const": "a"}}}
V: Schema = {"properties": {"v": INTEGER}, "required": ["v"]}
K: Schema = {"properties": {"k": {"enum": ["a", "b"]}}, "required": ["k"]}
STREET: Schema = {"type": "object", "properties": {"street": TEXT}}
ZIP: Schema = {"type": "object", "properties": {"zip": INTEGER}, "required": ["zip"]}

# A schema of objects, values that are valid, values that are not
CASES: dict[str, tuple[Schema, list[object], list[object]]] = {
    "then": ({**K, "if": K_IS_A, "then": V}, [{"k": "a", "v": 1}, {"k": "b"}], [{"k": "a"}, {"k": "b", "w": 1}]),
    "else": ({**K, "if": K_IS_A, "else": V}, [{"k": "b", "v": 1}, {"k": "a"}], [{"k": "b"}]),
    "then by reference": (
        {"$defs": {"V": V}, **K, "if": K_IS_A, "then": {"allOf": [{"$ref": "#/$defs/V"}]}},
        [{"k": "a", "v": 1}],
        [{"k": "a"}],
    ),
    "then in then": (
        {**K, "if": K_IS_A, "then": {"if": {}, "then": {"anyOf": [V]}}},
        [{"k": "a", "v": 1}],
        [{"k": "a"}],
    ),
    "if in allOf": ({**K, "allOf": [{"if": K_IS_A, "then": V}]}, [{"k": "a", "v": 1}, {"k": "b"}], [{"k": "a"}]),
    "if in anyOf": ({**K, "anyOf": [{"if": K_IS_A, "then": V}]}, [{"k": "a", "v": 1}, {"k": "b"}], [{"k": "a"}]),
    "then opens": (
        {**K, "if": K_IS_A, "then": {"additionalProperties": {}, "required": ["v"]}},
        [{"k": "a", "v": 1, "w": 2}],
        [{"k": "a"}],
    ),
    "then patterns": (
        {**K, "if": K_IS_A, "then": {"patternProperties": {"^v": INTEGER}, "minProperties": 2}},
        [{"k": "a", "v1": 1}],
        [{"k": "a"}, {"k": "a", "w": 1}],
    ),
    "then further in": (
        {"properties": {**K["properties"], "at": STREET}, "if": K_IS_A, "then": {"properties": {"at": ZIP}}},
        [{"k": "a", "at": {"street": "s", "zip": 1}}, {"k": "b", "at": {"street": "s"}}],
        [{"k": "a", "at": {"street": "s"}}, {"k": "b", "at": {"door": 1}}],
    ),
    "then behind a reference": (
        {
            "$defs": {"at": STREET},
            "properties": {**K["properties"], "at": {"$ref": "#/$defs/at"}},
            "if": K_IS_A,
            "then": {"properties": {"at": ZIP}},
        },
        [{"k": "a", "at": {"street": "s", "zip": 1}}],
        [{"k": "a", "at": {"street": "s"}}],
    ),
    "then of items": (
        {
            "properties": {**K["properties"], "of": {"type": "array", "items": STREET}},
            "if": K_IS_A,
            "then": {"properties": {"of": {"items": ZIP}}},
        },
        [{"k": "a", "of": [{"street": "s", "zip": 1}]}],
        [{"k": "a", "of": [{"street": "s"}]}],
    ),
    "contains": (
        {"properties": {"of": {"type": "array", "items": STREET, "contains": ZIP}}},
        [{"of": [{"street": "s"}, {"zip": 1}]}],
        [{"of": [{"street": "s"}]}, {"of": [{"zip": 1, "door": 1}]}],
    ),
    "dependentSchemas": ({**K, "dependentSchemas": {"k": V}}, [{"k": "a", "v": 1}], [{"k": "a"}]),
    "dependencies": ({**K, "dependencies": {"k": V}}, [{"k": "a", "v": 1}], [{"k": "a"}]),
    "dependentRequired": ({**K, "dependentRequired": {"k": ["v"]}}, [{"k": "a", "v": 1}], [{"k": "a"}]),
    "unevaluated beside allOf": (
        {"allOf": [A], "unevaluatedProperties": TEXT},
        [{"a": 1}, {"a": 1, "b": "s"}],
        [{"a": 1, "b": 2}, {"b": "s"}],
    ),
    "unevaluated beside a reference": (
        {"$defs": {"A": A}, "$ref": "#/$defs/A", "unevaluatedProperties": TEXT},
        [{"a": 1}, {"a": 1, "b": "s"}],
        [{"a": 1, "b": 2}],
    ),
    "unevaluated beside anyOf": (
        {"anyOf": [A], "unevaluatedProperties": TEXT},
        [{"a": 1, "b": "s"}],
        [{"a": 1, "b": 2}],
    ),
    "unevaluated beside then": (
        {**K, "if": K_IS_A, "then": V, "unevaluatedProperties": False},
        [{"k": "a", "v": 1}, {"k": "b"}],
        [{"k": "b", "v": 1}],
    ),
    "none unevaluated beside allOf": ({"allOf": [A], "unevaluatedProperties": False}, [{"a": 1}], [{"a": 1, "b": 2}]),
    "none unevaluated in a part": (
        {"allOf": [{**A, "unevaluatedProperties": False}, {"properties": {"b": INTEGER}}]},
        [{"a": 1}],
        [{"a": 1, "b": 2}],
    ),
    "none unevaluated at all": ({"unevaluatedProperties": False}, [{}], [{"a": 1}]),
    "names and patterns": (
        {
            "propertyNames": {"enum": ["x1", "x2"]},
            "patternProperties": {"^x": INTEGER},
            "additionalProperties": False,
        },
        [{}, {"x1": 1}, {"x1": 1, "x2": 2}],
        [{"x3": 1}, {"x1": "s"}],
    ),
    "names beside a reference": (
        {"$defs": {"A": A}, "$ref": "#/$defs/A", "propertyNames": {"enum": ["a", "b"]}},
        [{"a": 1}, {"a": 1, "b": "s"}],
        [{"a": 1, "c": 1}, {"b": 1}],
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_what_is_valid_is_of_the_grammar(name: str) -> None:
    schema, valid, invalid = CASES[name]
    answers = Answers({"type": "object", **schema})
    for value in valid:
        assert answers.hold(value), value
    for value in invalid:
        assert not answers.hold(value), value


VALUES = {"k": ["a", "b"], "a": [1, "s"], "b": [1, "s"], "v": [1, "s"]}
OBJECTS = [
    dict(zip(names, values, strict=True))
    for count in range(len(VALUES) + 1)
    for names in permutations(VALUES, count)
    for values in product(*(VALUES[name] for name in names))
]


def part(random: Random, depth: int) -> Schema:
    """A small subschema of objects with keywords that a grammar enforces and others."""
    some = random.choice([INTEGER, TEXT, True, {"const": 1}])
    names = random.sample(sorted(VALUES), random.randint(1, 2))
    made: Schema = {}
    if random.random() < 0.7:
        made["properties"] = {name: random.choice([INTEGER, TEXT, True]) for name in names}
    if random.random() < 0.3:
        made["required"] = random.sample(sorted(VALUES), 1)
    more: list[Schema] = [
        {"propertyNames": {"enum": random.sample(sorted(VALUES), 3)}},
        {"patternProperties": {f"^{random.choice('abv')}": some}},
        {"additionalProperties": random.choice([some, False])},
        {"unevaluatedProperties": random.choice([some, False])},
        {"dependentRequired": {names[0]: [random.choice("abv")]}},
        {"$ref": "#/$defs/d"},
    ]
    if depth:
        more += [
            {"allOf": [part(random, depth - 1) for _ in range(random.randint(1, 2))]},
            {"if": part(random, depth - 1), "then": part(random, depth - 1)},
            {"if": part(random, depth - 1), "else": part(random, depth - 1)},
            {"dependentSchemas": {names[0]: part(random, depth - 1)}},
        ]
    for keywords in random.sample(more, random.randint(0, 2)):
        made |= keywords
    return made


def declared(node: object) -> set[str]:
    """The names that a schema describes or requires, anywhere but in its definitions, unless these are referred to."""
    if not isinstance(node, dict):
        return set().union(*map(declared, node)) if isinstance(node, list) else set()
    own = {*node.get("properties", {}), *node.get("required", [])}
    own |= {"a"} if "$ref" in node else set()
    own |= {name for names in node.get("dependentRequired", {}).values() for name in names}
    return own.union(*(declared(subschema) for name, subschema in node.items() if name != "$defs"))


@pytest.mark.parametrize("seed", range(10))
def test_a_grammar_is_no_stricter_than_its_schema(seed: int) -> None:
    random, compiled = Random(seed), 0
    for _ in range(12):
        definition = {"type": "object", "properties": {"a": random.choice([INTEGER, True])}}
        schema = {"$defs": {"d": definition}, "type": "object", **part(random, 2)}
        names = declared(schema)
        judge = Draft202012Validator(schema)
        valid = [value for value in OBJECTS if judge.is_valid(value)]
        try:
            answers = Answers(schema)
        except UsageError:
            assert not [value for value in valid if value.keys() <= names], schema
            continue
        compiled += 1
        matched = {frozenset(value.items()) for value in OBJECTS if answers.match(value)}
        for value in valid:
            assert not value.keys() <= names or frozenset(value.items()) in matched, (schema, value)
        for value in OBJECTS:
            assert not answers.hold(value) or judge.is_valid(value), (schema, value)
    assert compiled > 3
