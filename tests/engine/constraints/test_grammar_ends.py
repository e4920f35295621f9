"""Ends of texts under a grammar: whatever can be closed within the tokens left is closed, however a text is nested."""

from __future__ import annotations

import itertools
import json
import math
import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from dsbd_cli.config.grammars import Grammar
from dsbd_cli.engine.constraints.grammar import GrammarCompiler, GrammarState
from dsbd_cli.engine.core.grammar_ends import EndFinder

# Tokens of several bytes, as vocabularies have them; token 0 ends
MERGED = [b'{"', b'": ', b', "', b'": [', b'": {"', b"[{", b"[[", b'[{"', b"]}", b"]}]}", b"}, {", b"]]", b'""', b"aa", b"10"]
Choice = Callable[[bytes], float]


class ByteCodec:
    eos_ids = (0,)

    def __init__(self, merged: list[bytes]) -> None:
        self.tokens = [b"", *[bytes([byte]) for byte in range(256)], *merged]

    def token_bytes(self) -> list[bytes]:
        return self.tokens


def compiler(merged: list[bytes]) -> GrammarCompiler:
    return GrammarCompiler(ByteCodec(merged), 257 + len(merged))  # type: ignore[arg-type]


def generate(made: GrammarCompiler, grammar: Grammar, limit: int, choice: Choice) -> tuple[bytes, bool]:
    """The text of the tokens that are best by `choice`, and whether it is whole. It never ends of its own will."""
    table = made._codec.token_bytes()
    state, text = made.start(grammar, limit), b""
    for _ in range(limit):
        legal = np.unpackbits(state.mask.view(np.uint8), bitorder="little")[: len(table)].astype(bool)
        logprobs = np.array([choice(token) if token else -99.0 for token in table], dtype=np.float32)
        logprobs[~legal] = -np.inf
        narrow = state.mask_within_limit
        if narrow is None:
            may = state.fitting(logprobs)
        else:
            may = np.unpackbits(narrow.view(np.uint8), bitorder="little")[: len(table)].astype(bool)
        logprobs[~may] = -np.inf
        token = int(logprobs.argmax())
        assert may[token], "a led text has a token that may follow"
        if token == 0:
            break
        text += table[token]
        following = state.after(token)
        assert following is not None
        state = following
    return text, made.matches(grammar, [tuple(encoded(table, text))])[0]


def encoded(table: list[bytes], text: bytes) -> Iterator[int]:
    return (table.index(bytes([byte])) for byte in text)


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
    known = dict.fromkeys(schema["$defs"], math.inf)

    def of(node: dict[str, Any]) -> float:
        if "$ref" in node:
            return known[node["$ref"].rpartition("/")[2]]
        if "anyOf" in node:
            return min(map(of, node["anyOf"]))
        if "enum" in node or "const" in node:
            return min(len(json.dumps(one)) for one in node.get("enum", [node.get("const")]))
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
        known = {name: of(node) for name, node in schema["$defs"].items()}
    return of(schema)


LIKED = (b"", b"[{,", b'{"', b"ab0123", b",[ab")


@pytest.mark.parametrize("part", range(6))
def test_a_text_is_valid_whenever_the_limit_has_room_for_one(part: int) -> None:
    """Random schemas, limits from the shortest text on, and models that rather open, choose and go on."""
    single, several = compiler([]), compiler(MERGED)
    looked = deep = 0
    for seed in range(part * 25, part * 25 + 25):
        schema = Schemas(seed).schema()
        room = shortest(schema)
        if not room <= 150:
            continue
        grammar, liked = Grammar.json_schema(schema), LIKED[seed % len(LIKED)]
        for made, limit in ((single, room), (single, room + 37), (several, room + 1), (several, 200)):
            text, valid = generate(made, grammar, int(limit), chooser(seed, liked))
            assert valid, (seed, limit, text)
            assert json.loads(text) is not None
            looked += 1
            deep = max(deep, text.count(b"{"))
        if room > 2:
            assert not generate(single, grammar, int(room) - 1, chooser(seed, liked))[1]
    assert looked > 30
    assert deep > 5
