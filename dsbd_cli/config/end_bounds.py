"""Bounds on the ends of texts: by how many tokens one more token can lengthen the shortest completion of a text.

The bounds come from the grammar alone, and from what tokens there are. They say how long before the limit a text need not be led to its end: as long as
no token can put the end out of reach. They may be too large, never too small: for JSON schemas and regular expressions
this holds (tests/config/test_end_bounds.py); for Lark grammars nothing is known.

A completion grows where a text chooses: an item that an array need not have, an optional property, a longer one of
several forms, a letter that a pattern goes on after. In each place it grows by the shortest text of what was chosen.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Protocol

from dsbd_cli.config.schemas import COUNTS, resolve

Schema = dict[str, object]


class Spelling(Protocol):
    """Numbers of tokens that spell texts."""

    def opened(self, *, nested: bool) -> int:
        """Return the number of containers that one token opens in a JSON text, at most. nested: whether arrays may
        stand directly in arrays."""
        ...

    def least(self, text: str) -> int:
        """Return the fewest tokens that spell a text."""
        ...

    def most(self, text: str) -> int:
        """Return how many tokens spell a text, or its end from any byte on, at most."""
        ...


FORMAT_LETTERS = 64  # of a string of some format, at most
LETTER_REST = 5  # bytes of a letter in a string after its first one, at most: `\\uXXXX`
NUMBER_REST = 2  # letters of a number after its first one that it must have, beside the digits of its bounds
NUMBERS = ("integer", "number")
NUMBER_BOUNDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")
UNIONS = ("anyOf", "oneOf")


@dataclass(frozen=True, slots=True)
class EndBounds:
    """By how many tokens a text's shortest completion grows with one more token, at most.

    Attributes:
        step: wherever the text stands. level: in addition, for each container that is open.
        opened: number of containers that one token opens, at most.
    """

    step: float
    level: float = 0
    opened: int = 0

    def unchecked(self, left: int, completion: int, levels: int) -> int:
        """Return how many tokens may follow one another, each being any legal one, before one could leave no
        completion within the limit.

        left: tokens left. completion: length of the shortest completion. levels: containers that are open.
        """
        tokens, grown = 0, completion + self.step + self.level * levels
        while grown + tokens + 1 <= left:
            tokens += 1
            grown += self.step + self.level * (levels + self.opened * tokens)
        return tokens


def schema_bounds(
    schema: Mapping[str, object] | bool, spelling: Spelling, separators: tuple[str, str]
) -> EndBounds:
    """Return the bounds of a schema whose objects are closed. separators: between items, and after keys."""
    return _SchemaEnds(schema if isinstance(schema, dict) else {}, spelling, separators).bounds()


class _SchemaEnds:
    """Shortest texts of all subschemas of a schema."""

    def __init__(self, root: Schema, spelling: Spelling, separators: tuple[str, str]) -> None:
        self._root, self._spelling, (self._comma, self._colon) = root, spelling, separators
        self._cost = spelling.least
        self._letter = self._cost("0")
        self._nodes = list(_all_subschemas(root))
        self._shortest: dict[int, float] = {}
        for _ in self._nodes:  # each round settles a node or more, most of them many
            before = dict(self._shortest)
            for node in reversed(self._nodes):  # parts first
                self._shortest[id(node)] = self._shortest_of(node)
            if self._shortest == before:
                break

    def bounds(self) -> EndBounds:
        """Return the bounds of the whole schema.

        One token chooses in each container that it opens, and before the first of them. Each time it may choose an
        item or a property, and a form of it.
        """
        added = max([self._property("") + self._letter, *self._finite(self._added)])
        added += max(self._finite(self._forms), default=0.0)
        inside = max([*self._inside({"type": ["string", "number"]}), *self._finite(self._inside)])
        opened = self._spelling.opened(nested=any(map(self._has_arrays_in_arrays, self._nodes)))
        ambiguous = max(self._finite(self._ambiguous), default=None)
        level = 0.0 if ambiguous is None else ambiguous + added + inside
        return EndBounds(inside + (1 + opened) * added, level, opened)

    def _finite(self, bounds: Callable[[Schema], Iterable[float]]) -> Iterator[float]:
        """Yield the bounds of all subschemas, without those of what has no text: a grammar never leads there."""
        yield from (one for node in self._nodes for one in bounds(node) if math.isfinite(one))

    def _min(self, node: object) -> float:
        """Return the length of a short text of a subschema; infinite where none is known."""
        if isinstance(node, dict):
            return self._shortest.get(id(node), math.inf)
        return math.inf if node is False else self._letter

    def _shortest_of(self, node: Schema) -> float:
        """Return the same, from the lengths that are known of its parts."""
        total = 0.0
        if isinstance(reference := node.get("$ref"), str):
            total += self._min(resolve(self._root, reference))
        total += sum(self._min(part) for part in _list(node.get("allOf")))
        for name in UNIONS:
            if branches := _list(node.get(name)):
                total += min(map(self._min, branches))
        if "const" in node or "enum" in node:
            return total + max((self._cost(self._written(one)) for one in _values(node)), default=math.inf)
        kinds = _kinds(node)
        return total + min(map(lambda kind: self._of_kind(node, kind), kinds)) if kinds else total or self._letter

    def _of_kind(self, node: Schema, kind: str) -> float:
        if kind == "object":
            named = _dict(node.get("properties"))
            required = [name for name in _list(node.get("required")) if isinstance(name, str)]
            others = node.get("additionalProperties", True)
            more = max(0, _count(node, "minProperties") - len(required))
            found = sum(self._property(name) + self._min(named.get(name, others)) for name in required)
            free = min([self._min(others), *map(self._min, _dict(node.get("patternProperties")).values())])
            return self._cost("{}") + found + (more * (self._property("0" * 9) + free) if more else 0)
        if kind == "array":
            items = self._items(node)
            places = [items[min(place, len(items) - 1)] for place in range(int(_count(node, "minItems")))]
            return self._cost("[]") + sum(self._min(one) + self._cost(self._comma) for one in places)
        return self._scalar(node, kind)

    def _added(self, node: Schema) -> Iterator[float]:
        """Yield how much each item and property adds that a text need not have."""
        required = _list(node.get("required"))
        for name, one in _dict(node.get("properties")).items():
            if name not in required:
                yield self._property(name) + self._min(one)
        kinds = _kinds(node)
        if "object" in kinds:
            yield self._property("") + self._min(node.get("additionalProperties", True))
            for pattern, one in _dict(node.get("patternProperties")).items():
                yield self._property("") + _pattern_ends(pattern)[0] + self._min(one)
        if "array" in kinds:
            yield from (self._cost(self._comma) + self._min(one) for one in self._items(node))

    def _forms(self, node: Schema) -> Iterator[float]:
        """Yield the lengths of the forms of a value that has several."""
        for name in UNIONS:
            yield from map(self._min, _list(node.get(name)))
        if "const" in node or "enum" in node:
            yield from (self._cost(self._written(one)) for one in _values(node))
        elif len(kinds := _kinds(node)) > 1:
            yield from (self._of_kind(node, kind) for kind in kinds)

    def _inside(self, node: Schema) -> Iterator[float]:
        """Yield how long a scalar of this subschema, or a key, can still be from any place in it on."""
        most, kinds = self._spelling.most, _kinds(node)
        yield from (most(self._key(name)) for name in _dict(node.get("properties")))
        yield from (most(self._key("")) + _pattern_ends(one)[1] for one in _dict(node.get("patternProperties")))
        if "const" in node or "enum" in node:
            yield from (most(self._written(one)) for one in _values(node))
            return
        if "string" in kinds or "object" in kinds:
            yield self._scalar(node, "string") + self._letter * LETTER_REST
        yield from (self._scalar(node, kind) + NUMBER_REST * self._letter for kind in kinds if kind in NUMBERS)

    def _ambiguous(self, node: Schema) -> Iterator[float]:
        """Yield the lengths of those forms of this subschema that can be told apart only within a container."""
        for name in UNIONS:
            containers = [one for one in _list(node.get(name)) if self._is_container(one)]
            yield from map(self._min, containers if len(containers) > 1 else [])

    def _has_arrays_in_arrays(self, node: Schema) -> bool:
        return "array" in _kinds(node) and any(self._is_container(one, ("array",)) for one in self._items(node))

    def _is_container(self, node: object, kinds: tuple[str, ...] = ("object", "array")) -> bool:
        """Return whether a value of a subschema may be of one of these types."""
        seen, waiting = set[int](), [node]
        while waiting:
            one = waiting.pop()
            if one is True or one == {}:
                return True
            if isinstance(one, dict) and id(one) not in seen:
                seen.add(id(one))
                if set(kinds) & set(_kinds(one)):
                    return True
                if isinstance(reference := one.get("$ref"), str):
                    waiting.append(resolve(self._root, reference))
                waiting += [part for name in ("allOf", *UNIONS) for part in _list(one.get(name))]
        return False

    def _scalar(self, node: Schema, kind: str) -> float:
        """Return the length of a short text of this kind, at most. It bounds what is left from any letter on, too."""
        if kind == "string":
            pattern = node.get("pattern")
            length = _count(node, "minLength") + (_pattern_ends(pattern)[1] if isinstance(pattern, str) else 0)
            length += FORMAT_LETTERS if "format" in node else 0
            return self._letter * length + self._cost('""')
        if kind in NUMBERS:
            digits = [len(json.dumps(node[name])) for name in NUMBER_BOUNDS if isinstance(node.get(name), int | float)]
            return self._letter * (1 + sum(digits))
        return self._cost({"boolean": "false", "null": "null"}.get(kind, "0"))

    def _items(self, node: Schema) -> list[object]:
        """Return the subschemas of an array's items by place; the last one is that of all later items."""
        items = node.get("items", True)
        first = [*_list(node.get("prefixItems")), *_list(items)]
        return [*first, node.get("additionalItems", True) if isinstance(items, list) else items]

    def _property(self, name: str) -> float:
        return self._cost(self._key(name)) + self._cost(self._comma)

    def _key(self, name: str) -> str:
        return json.dumps(name, ensure_ascii=False) + self._colon

    def _written(self, value: object) -> str:
        return json.dumps(value, ensure_ascii=False, separators=(self._comma, self._colon))


def _all_subschemas(root: Schema) -> Iterator[Schema]:
    """Yield all objects of a schema, each once. Those that are no subschemas, such as constants, do no harm."""
    seen, waiting = set[int](), list[object]([root])
    while waiting:
        node = waiting.pop()
        if isinstance(node, list):
            waiting += node
        elif isinstance(node, dict) and id(node) not in seen:
            seen.add(id(node))
            yield node
            waiting += [value for name, value in node.items() if name not in ("const", "enum", "default", "examples")]


def _kinds(node: Schema) -> list[str]:
    """Return the types of a subschema that says them, or whose keywords do."""
    kinds = node.get("type")
    if kinds is None:
        said = {"properties": "object", "required": "object", "items": "array", "prefixItems": "array"}
        return list(dict.fromkeys(kind for name, kind in said.items() if name in node))
    return [kind for kind in (kinds if isinstance(kinds, list) else [kinds]) if isinstance(kind, str)]


def _values(node: Schema) -> list[object]:
    return [node["const"]] if "const" in node else _list(node.get("enum"))


def _count(node: Schema, name: str) -> float:
    value = node.get(name)
    assert name in COUNTS
    return value if isinstance(value, int | float) and not isinstance(value, bool) else 0


def _list(value: object) -> list[object]:
    return value if isinstance(value, list) else []


def _dict(value: object) -> dict[str, object]:
    return value if isinstance(value, dict) else {}


def pattern_bounds(pattern: str) -> EndBounds:
    """Return the bounds of a regular expression: from any place in it, its end is near."""
    return EndBounds(_pattern_ends(pattern)[1])


ATOM = re.compile(
    r"\\[pPxuU]\{[^}]*\}|\\p.|\\x[0-9a-fA-F]{2}|\\u[0-9a-fA-F]{4}|\\.|\[\^?\]?(?:\[:\^?\w+:\]|\\.|[^\]\\])*\]|.", re.DOTALL
)
GROUP = re.compile(r"\((?:\?(?:P?<\w+>|[a-zA-Z-]*:))?")
REPEAT = re.compile(r"(?:([*+?])|\{\s*(\d+)\s*(?:,\s*\d*\s*)?\}|\{\s*,\s*\d+\s*\})[?+]?")
LETTER_BYTES = 4  # of a letter in UTF-8, at most


def _pattern_ends(pattern: str) -> tuple[float, float]:
    """Return the length in bytes of a short text that matches, and the longest way to an end from any place in the
    expression. Anchors count as letters."""
    place = 0

    def alternatives() -> tuple[float, float]:
        nonlocal place
        branches = [sequence()]
        while pattern[place : place + 1] == "|":
            place += 1
            branches.append(sequence())
        return min(short for short, _ in branches), max(far for _, far in branches)

    def sequence() -> tuple[float, float]:
        nonlocal place
        parts: list[tuple[float, float]] = []
        while place < len(pattern) and pattern[place] not in "|)":
            if pattern[place] == "(":
                place = _end(GROUP, pattern, place)
                part = alternatives()
                place += 1
            else:
                start, place = place, _end(ATOM, pattern, place)
                part = (1.0 if pattern[start:place].isascii() else float(LETTER_BYTES), float(LETTER_BYTES))
            while found := REPEAT.match(pattern, place):
                place = found.end()
                count = int(found[2]) if found[2] else int(found[1] == "+")
                part = (part[0] * count, part[1] + part[0] * max(0, count - 1))
            parts.append(part)
        short = far = 0.0
        for one_short, one_far in reversed(parts):
            far = max(far, one_far + short)
            short += one_short
        return short, far

    found = alternatives()
    while place < len(pattern):  # a bracket too many: it is refused elsewhere
        place += 1
        more = alternatives()
        found = (found[0] + more[0], found[1] + more[1])
    return found


def _end(expression: re.Pattern[str], text: str, place: int) -> int:
    match = expression.match(text, place)
    return match.end() if match else place + 1
