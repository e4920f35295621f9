"""Ends of texts under a grammar: whatever can be closed within the tokens left is closed, however a text is nested."""

from __future__ import annotations

import json
import math
import random
import re
from collections.abc import Callable
from typing import Any

import jsonschema_rs
import numpy as np
import pytest
from numpy.typing import NDArray

from dsbd_cli.config.grammars import Grammar
from dsbd_cli.engine.constraints.grammar import GrammarCompiler
from dsbd_cli.engine.core.grammar_ends import EndFinder, JsonPlace

# Tokens of several bytes, as vocabularies have them; token 0 ends
MERGED = [
    b'{"',
    b'": ',
    b', "',
    b'": [',
    b'": {"',
    b"[{",
    b"[[",
    b'[{"',
    b"]}",
    b"]}]}",
    b"}, {",
    b"]]",
    b'""',
    b"aa",
    b"10",
]
Schema = dict[str, Any]
Choice = Callable[[bytes], float]


class ByteCodec:
    eos_ids = (0,)

    def __init__(self, merged: list[bytes]) -> None:
        self.tokens = [b"", *[bytes([byte]) for byte in range(256)], *merged]

    def token_bytes(self) -> list[bytes]:
        return self.tokens


def compiler(merged: list[bytes]) -> GrammarCompiler:
    return GrammarCompiler(ByteCodec(merged), 257 + len(merged))  # type: ignore[arg-type]


def bits(mask: NDArray[np.int32] | None, size: int) -> NDArray[np.bool_]:
    assert mask is not None
    return np.unpackbits(mask.view(np.uint8), bitorder="little")[:size].astype(bool)


def generate(made: GrammarCompiler, grammar: Grammar, limit: int, choice: Choice) -> tuple[bytes, bool]:
    """The text of the tokens that are best by `choice`, and whether it is whole. It never ends of its own will."""
    table = made._codec.token_bytes()
    state, tokens = made.start(grammar, limit), list[int]()
    while len(tokens) < limit:
        logprobs = np.array([choice(token) if token else -99.0 for token in table], dtype=np.float32)
        logprobs[~bits(state.mask, len(table))] = -np.inf
        narrow = state.mask_within_limit
        may = state.fitting(logprobs) if narrow is None else bits(narrow, len(table))
        logprobs[~may] = -np.inf
        token = int(logprobs.argmax())
        assert may[token], "a text has a token that may follow"
        if token == 0:
            break
        tokens.append(token)
        following = state.after(token)
        assert following is not None
        state = following
    return b"".join(table[token] for token in tokens), made.matches(grammar, [tokens])[0]


def chooser(seed: int, liked: bytes) -> Choice:
    """A model of random likings that rather writes some bytes than others."""
    draw = random.Random(seed)
    return lambda token: draw.random() + 2 * any(byte in liked for byte in token)


class Schemas:
    """Random schemas of definitions that refer to each other, each with a shortest text."""

    def __init__(self, seed: int) -> None:
        self.draw = random.Random(seed)
        self.names = [f"N{number}" for number in range(self.draw.randint(1, 3))]

    def schema(self) -> dict[str, Any]:
        return {"$defs": {name: self.object(2) for name in self.names}, "$ref": "#/$defs/N0"}

    def any(self, depth: int) -> dict[str, Any]:
        kinds = [self.scalar, self.reference]
        return self.draw.choice(kinds if not depth else [*kinds, self.object, self.array, self.union])(depth - 1)

    def scalar(self, depth: int) -> dict[str, Any]:
        words = ["a" * self.draw.choice((1, 2, 40)), "b", "ab" * 9]
        return self.draw.choice(
            [
                {"type": "integer"},
                {"type": "boolean"},
                {"type": "string", "minLength": self.draw.choice((0, 0, 7))},
                {"type": "string", "pattern": self.draw.choice(("^a{12}b?$", "^(a|b{20})$", "^[ab]{0,30}$"))},
                {"enum": words},
                {"const": words[0]},
                {"type": ["null", "integer"]},
                {"type": "integer", "minimum": 1000},
            ]
        )

    def reference(self, depth: int) -> dict[str, Any]:
        return {"$ref": f"#/$defs/{self.draw.choice(self.names)}"}

    def object(self, depth: int) -> dict[str, Any]:
        names = self.draw.sample(["a", "ab", "b", "long" * 5], self.draw.randint(1, 3))
        values = {name: self.any(depth) for name in names}
        required = [name for name in names if self.draw.random() < 0.5]
        return {"type": "object", "properties": values, "required": required}

    def array(self, depth: int) -> dict[str, Any]:
        return {"type": "array", "items": self.any(depth), "minItems": self.draw.choice((0, 0, 0, 2))}

    def union(self, depth: int) -> dict[str, Any]:
        return {"anyOf": [self.any(depth) for _ in range(self.draw.randint(2, 3))]}


def shortest(schema: dict[str, Any]) -> float:
    """Letters of the shortest text of one of these schemas, by trying ever deeper texts."""
    lengths = dict.fromkeys(schema["$defs"], math.inf)

    def of(node: dict[str, Any]) -> float:
        if "$ref" in node:
            return lengths[node["$ref"].rpartition("/")[2]]
        if "anyOf" in node:
            return min(map(of, node["anyOf"]))
        if "enum" in node or "const" in node:
            return min(len(json.dumps(value)) for value in node.get("enum", [node.get("const")]))
        if "pattern" in node:
            return 2 + {"^a{12}b?$": 12, "^(a|b{20})$": 1, "^[ab]{0,30}$": 0}[node["pattern"]]
        match node["type"]:
            case "object":
                values = [len(json.dumps(name)) + 2 + of(node["properties"][name]) for name in node["required"]]
                return 2 + sum(values) + 2 * max(0, len(values) - 1)
            case "array":
                return 2 + node["minItems"] * of(node["items"]) + 2 * max(0, node["minItems"] - 1)
            case "string":
                return 2 + node["minLength"]
            case "boolean":
                return 4
            case "integer":
                return 4 if "minimum" in node else 1
            case _:
                return 1

    for _ in range(60):
        lengths = {name: of(node) for name, node in schema["$defs"].items()}
    return of(schema)


LIKED = (b"", b"[{,", b'{"', b"ab0123", b",[ab")


@pytest.mark.parametrize(
    "seeds",
    [range(12), range(100, 125), range(125, 150), range(150, 175), range(175, 200)],
    ids=str,
)
def test_a_text_is_valid_whenever_the_limit_has_room_for_one(seeds: range) -> None:
    """Random schemas, limits from the shortest text on, and models that rather open, choose and go on."""
    single, several = compiler([]), compiler(MERGED)
    looked = deep = 0
    for seed in seeds:
        schema = Schemas(seed).schema()
        room = shortest(schema)
        if not room <= 70:
            continue
        grammar, liked = Grammar.json_schema(schema), LIKED[seed % len(LIKED)]
        for made, limit in ((single, room), (single, room + 37), (several, room + 1), (several, 100)):
            text, valid = generate(made, grammar, int(limit), chooser(seed, liked))
            assert valid, (seed, limit, text)
            jsonschema_rs.validate(schema, json.loads(text))
            looked += 1
            deep = max(deep, text.count(b"{"))
        assert not generate(single, grammar, int(room) - 1, chooser(seed, liked))[1]
    assert looked >= 16
    assert deep > 4


TREE = {
    "$defs": {
        "N": {
            "type": "object",
            "properties": {"v": {"type": "integer"}, "c": {"type": "array", "items": {"$ref": "#/$defs/N"}}},
            "required": ["v", "c"],
        }
    },
    "$ref": "#/$defs/N",
}


@pytest.mark.parametrize("limit", [17, 40, 90, 120, 160, 400])
def test_a_text_that_opens_containers_as_long_as_it_may_is_closed(limit: int) -> None:
    """A fixed number of tokens before the limit is too late for it."""
    text, valid = generate(compiler(MERGED), Grammar.json_schema(TREE), limit, chooser(1, b"[{,"))
    assert valid
    assert text.count(b"{") >= limit // 14


def test_a_place_in_json() -> None:
    place = JsonPlace().after(b'{"a{": ["x\\\\", "y\\"]", ')
    assert (place.levels, place.quoted) == (2, False)
    assert place.after(b'"[').quoted
    assert place.after(b"]}").levels == 0
    assert JsonPlace(known=False).after(b"{").levels == 0


LONG = "b" * 60
JUMPS: dict[str, Schema] = {
    "a form": {"anyOf": [{"const": "a"}, {"const": LONG}]},
    "an item": {"type": "array", "items": {"const": LONG}},
    "a property": {"type": "object", "properties": {"a": {"const": LONG}, "b": {"type": "integer"}}},
    "a type": {"type": ["string", "null"], "minLength": 30},
    "a key": {"type": "object", "properties": {LONG: {"type": "integer"}, "b": {"type": "integer"}}},
    "a pattern": {"type": "string", "pattern": f"^(a|b{{60}}|{'c' * 60})$"},
    "a bound": {"type": ["integer", "null"], "minimum": 10**17},
    "levels": {
        "$defs": {"N": {"anyOf": [{"type": "array", "items": {"$ref": "#/$defs/N"}}, {"const": LONG}]}},
        "$ref": "#/$defs/N",
    },
    "names": {"type": "object", "patternProperties": {"^b{30}$": {"type": "integer"}}, "additionalProperties": False},
    "what has no text": {
        "$defs": {"N": {"type": "object", "properties": {"a": {"$ref": "#/$defs/N"}}, "required": ["a"]}},
        "type": "object",
        "properties": {"b": {"$ref": "#/$defs/N"}, "c": {"type": "integer"}},
    },
    "forms that part late": {
        "$defs": {
            "short": {"type": "object", "properties": {"x": {"$ref": "#/$defs/N"}}, "required": ["x"]},
            "long": {
                "type": "object",
                "properties": {"x": {"$ref": "#/$defs/M"}, "y": {"const": LONG[:30]}},
                "required": ["x", "y"],
            },
            "N": {"anyOf": [{"type": "integer"}, {"$ref": "#/$defs/short"}]},
            "M": {"anyOf": [{"type": "boolean"}, {"$ref": "#/$defs/long"}, {"$ref": "#/$defs/short"}]},
        },
        "anyOf": [{"$ref": "#/$defs/long"}, {"$ref": "#/$defs/short"}],
    },
}


@pytest.mark.parametrize("liked", [b"b", b'b{[":,'])
@pytest.mark.parametrize("name", JUMPS)
def test_one_token_does_not_put_the_end_out_of_reach(name: str, liked: bytes) -> None:
    """A choice of one letter that 60 must follow."""
    for limit in (40, 70):
        text, valid = generate(compiler(MERGED), Grammar.json_schema(JUMPS[name]), limit, chooser(2, liked))
        assert valid, (limit, text)


@pytest.mark.parametrize("pattern", ["(a|b{200})c*", "([ab]{3}(x{90})?)*", "a*|b+c{150}", "(ab|(cd){80}e)?f+"])
def test_one_letter_of_an_expression_does_not_either(pattern: str) -> None:
    for limit in (20, 100, 250):
        text, valid = generate(compiler([]), Grammar.regex(pattern), limit, chooser(2, b"bxcd"))
        assert valid, (limit, text)
        assert re.fullmatch(pattern, text.decode())


def test_a_lark_grammar_is_led_where_its_text_is_nested() -> None:
    grammar = Grammar.lark('start: "(" start ")" | "[" start "]" | "x"')
    for limit in (10, 60, 200):
        assert generate(compiler([b"((", b"]]", b"[("]), grammar, limit, chooser(3, b"(["))[1], limit


def test_far_from_the_limit_the_end_is_seldom_searched(monkeypatch: pytest.MonkeyPatch) -> None:
    """And near it, mostly only once for a text."""
    searched = list[int]()
    find, find_after = EndFinder.find, EndFinder.find_after
    monkeypatch.setattr(EndFinder, "find", lambda *arguments: (searched.append(1), find(*arguments))[1])
    monkeypatch.setattr(EndFinder, "find_after", lambda *arguments: (searched.append(1), find_after(*arguments))[1])
    schema = {"properties": {"title": {"type": "string"}, "year": {"type": "integer"}}, "required": ["title", "year"]}
    made, text = compiler(MERGED), json.dumps({"title": "a " * 200, "year": 1813}).encode()
    counts, table = {}, made._codec.token_bytes()
    for limit in (10_000, 1000, len(text) + 100):
        state, position = made.start(Grammar.json_schema(schema), limit), 0
        searched.clear()
        while position < len(text):
            _ = state.mask_within_limit
            fitting = [token for token in range(1, len(table)) if text.startswith(table[token], position)]
            token = max((token for token in fitting if state.allows(token)), key=lambda token: len(table[token]))
            after = state.after(token)
            assert after is not None
            state, position = after, position + len(table[token])
        assert state.complete
        counts[limit] = len(searched)
    assert counts[10_000] <= 3
    assert counts[1000] <= 25
    assert counts[len(text) + 100] <= 60
