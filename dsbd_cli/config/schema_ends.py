"""Ends of JSON texts under a schema: the texts that shortest completions consist of, and bounds on their growth.

A completion grows where a text chooses: an item that an array need not have, an optional property, a longer one of
several forms of a value, a letter that a pattern goes on after. In each place it grows by the shortest text of what
was chosen.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Protocol

from dsbd_cli.config.end_bounds import EndBounds, pattern_ends
from dsbd_cli.config.schemas import ONE_SUBSCHEMA, SUBSCHEMA_LISTS, SUBSCHEMAS_BY_NAME, dict_of, list_of, resolve

Schema = dict[str, object]

MOST_TEXT = 4096  # letters of a shortest text
MOST_PIECES = 200_000  # letters of all pieces
MOST_SCALARS = 200  # different scalars whose shortest text is searched
FORMAT_LETTERS = 64  # of a string of some format, at most
LETTER_REST = 5  # bytes of a letter in a string after its first one, at most: `\\uXXXX`
NUMBER_REST = 2  # letters of a number after its first one that it must have, beside the digits of its bounds
PLAIN = {"string": '""', "integer": "0", "number": "0", "boolean": "true", "null": "null"}
NUMBERS = ("integer", "number")
NUMBER_BOUNDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")
RESTRICTING = frozenset((*NUMBER_BOUNDS, "minLength", "maxLength", "pattern", "format"))
UNIONS = ("anyOf", "oneOf")


class SpellingBounds(Protocol):
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


class SchemaEnds:
    """Shortest texts of all subschemas of a schema whose objects are closed."""

    def __init__(
        self,
        schema: Mapping[str, object] | bool,
        separators: tuple[str, str],
        scalar: Callable[[Schema], str | None],
    ) -> None:
        """separators: between items, and after keys. scalar: finds the shortest text of a schema of one scalar type."""
        self._root = dict(schema) if isinstance(schema, Mapping) else {}
        (self._comma, self._colon), self._find_scalar = separators, scalar
        self._nodes = list(_all_subschemas(self._root))
        self._scalars: dict[str, str | None] = {}
        self._texts: dict[int, str | None] = {}
        for _ in self._nodes:  # each round settles a node or more, most of them many
            before = dict(self._texts)
            for node in reversed(self._nodes):  # parts first
                self._texts[id(node)] = self._shortest_of(node)
            if self._texts == before:
                break

    def pieces(self) -> tuple[list[str], list[str]]:
        """Return texts that shortest completions consist of, each list by length: what ends a container, and
        values."""
        ends, values = {"}": None, "]": None}, dict.fromkeys(text for text in self._texts.values() if text is not None)
        letters = 0
        for node in self._nodes:
            for parts, closing in (self._object_parts(node), self._array_parts(node)):
                for index in range(len(parts or ())):
                    rest = self._comma.join((parts or [])[index:]) + closing
                    letters += len(rest)
                    if letters <= MOST_PIECES:
                        ends |= {rest: None, self._comma + rest: None}
        return sorted(ends, key=len), sorted(values, key=len)

    def bounds(self, spelling: SpellingBounds) -> EndBounds:
        """Return the bounds of the whole schema. One token chooses in each container that it opens, and before the
        first of them. Each time it may choose an item or a property, and a form of it. Where it may choose something
        that has no text there is no bound."""
        return _Bounds(self, spelling).bounds()

    def text(self, node: object) -> str | None:
        """Return the shortest text of a subschema; None where none is known."""
        if isinstance(node, dict):
            return self._texts.get(id(node)) if node else "0"
        return None if node is False else "0"

    def _shortest_of(self, node: Schema) -> str | None:
        """Return the same, from the texts that are known of its parts."""
        if "const" in node or "enum" in node:
            return _shortest(map(self.written, values_of(node)))
        merged = [self.resolved(node)] if "$ref" in node else []
        merged += list_of(node.get("allOf"))
        texts = [self.text(part) for part in merged]
        texts += [_shortest(map(self.text, list_of(node[name]))) for name in UNIONS if isinstance(node.get(name), list)]
        if kinds := kinds_of(node):
            texts.append(_shortest(self.of_kind(node, kind) for kind in kinds))
        if any(text is None for text in texts):
            return None
        return max((text for text in texts if text is not None), key=len, default="0")

    def of_kind(self, node: Schema, kind: str) -> str | None:
        """Return the shortest text of this type under a subschema."""
        if kind in ("object", "array"):
            parts, closing = self._object_parts(node) if kind == "object" else self._array_parts(node)
            if parts is None or sum(map(len, parts)) > MOST_TEXT:
                return None
            return ("{" if kind == "object" else "[") + self._comma.join(parts) + closing
        if not RESTRICTING & node.keys():
            return PLAIN.get(kind)
        alone: Schema = {name: node[name] for name in sorted(RESTRICTING & node.keys())} | {"type": kind}
        key = json.dumps(alone)
        if key not in self._scalars:
            self._scalars[key] = self._find_scalar(alone) if len(self._scalars) < MOST_SCALARS else None
        return self._scalars[key]

    def _object_parts(self, node: Schema) -> tuple[list[str] | None, str]:
        """Return the properties of the shortest object in the order in which they are written, and its end. None
        instead of the properties where one of them has no text."""
        named, required = dict_of(node.get("properties")), dict.fromkeys(list_of(node.get("required")))
        names = [*(name for name in named if name in required), *(name for name in required if name not in named)]
        others = node.get("additionalProperties", True)
        parts = [(name, self.text(named.get(str(name), others))) for name in names]
        more = count_of(node, "minProperties") - len(parts)
        parts += [(str(number), self.text(others)) for number in range(int(min(max(more, 0), MOST_TEXT)))]
        if any(text is None for _, text in parts):
            return None, "}"
        return [f"{self.key(str(name))}{text}" for name, text in parts], "}"

    def _array_parts(self, node: Schema) -> tuple[list[str] | None, str]:
        items, count = self.items(node), int(min(count_of(node, "minItems"), MOST_TEXT))
        texts = [self.text(items[min(index, len(items) - 1)]) for index in range(count)]
        parts = [text for text in texts if text is not None]
        return (parts if len(parts) == count else None), "]"

    def resolved(self, node: Schema) -> object:
        """Return what a subschema refers to."""
        reference = node.get("$ref")
        return resolve(self._root, reference) if isinstance(reference, str) else None

    def items(self, node: Schema) -> list[object]:
        """Return the subschemas of an array's items by place; the last one is that of all later items."""
        items = node.get("items", True)
        first = [*list_of(node.get("prefixItems")), *(items if isinstance(items, list) else [])]
        return [*first, node.get("additionalItems", True) if isinstance(items, list) else items]

    def key(self, name: str) -> str:
        """Return a key as it is written."""
        return json.dumps(name, ensure_ascii=False) + self._colon

    def written(self, value: object) -> str:
        """Return a constant as it is written."""
        return json.dumps(value, ensure_ascii=False, separators=(self._comma, self._colon))

    @property
    def comma(self) -> str:
        """Separator between items."""
        return self._comma

    @property
    def nodes(self) -> list[Schema]:
        """All subschemas."""
        return self._nodes


class _Bounds:
    """Bounds of a schema in tokens."""

    def __init__(self, ends: SchemaEnds, spelling: SpellingBounds) -> None:
        self._ends, self._spelling = ends, spelling
        self._cost, self._letter = spelling.least, spelling.least("0")

    def bounds(self) -> EndBounds:
        """Return the bounds of the whole schema."""
        nodes = self._ends.nodes
        added = max([self._property("") + self._letter, *(size for node in nodes for size in self._added(node))])
        added += max((size for node in nodes for size in self._forms(node)), default=0.0)
        anything: list[Schema] = [{"type": "string"}, {"type": "number"}]
        inside = max(size for node in anything + nodes for size in self._inside(node))
        inside = max(inside, self._spelling.most("false"))
        opened = self._spelling.opened(nested=any(map(self._has_arrays_in_arrays, nodes)))
        ambiguous = [container for node in nodes for container in self._ambiguous(node)]
        level = max(ambiguous) + added + inside if ambiguous else 0.0
        return EndBounds(inside + (1 + opened) * added, level, opened)

    def _min(self, node: object) -> float:
        """Return the length of a subschema's shortest text; infinite where none is known."""
        text = self._ends.text(node)
        return math.inf if text is None else self._cost(text)

    def _property(self, name: str) -> float:
        return self._cost(self._ends.key(name)) + self._cost(self._ends.comma)

    def _added(self, node: Schema) -> Iterator[float]:
        """Yield how much each item and property adds that a text need not have."""
        kinds, others = kinds_of(node), node.get("additionalProperties", True)
        for name, inner in dict_of(node.get("properties")).items():
            if name not in list_of(node.get("required")):
                yield self._property(name) + self._min(inner)
        for pattern, inner in dict_of(node.get("patternProperties")).items():
            yield self._property("") + pattern_ends(pattern)[0] + self._min(inner)
        if "object" in kinds and others is not False:
            yield self._property("") + self._min(others)
        if "array" in kinds:
            items = (item for item in self._ends.items(node) if item is not False)
            yield from (self._cost(self._ends.comma) + self._min(item) for item in items)

    def _forms(self, node: Schema) -> Iterator[float]:
        """Yield the lengths of the forms of a value that has several."""
        for name in UNIONS:
            yield from (self._min(branch) for branch in list_of(node.get(name)) if branch is not False)
        if "enum" in node:
            yield from (self._cost(self._ends.written(value)) for value in values_of(node))
        elif len(kinds := kinds_of(node)) > 1:
            texts = [self._ends.of_kind(node, kind) for kind in kinds]
            yield from (math.inf if text is None else self._cost(text) for text in texts)

    def _inside(self, node: Schema) -> Iterator[float]:
        """Yield how long a scalar of this subschema, or a key, can still be from any place in it on."""
        most, kinds = self._spelling.most, kinds_of(node)
        yield from (most(self._ends.key(name)) for name in dict_of(node.get("properties")))
        patterns = [*dict_of(node.get("patternProperties")), node.get("pattern", "")]
        far = max(pattern_ends(pattern)[1] for pattern in patterns if isinstance(pattern, str))
        if "const" in node or "enum" in node:
            yield from (most(self._ends.written(value)) for value in values_of(node))
        elif "string" in kinds or "object" in kinds:
            letters = count_of(node, "minLength") + far + (FORMAT_LETTERS if "format" in node else 0)
            yield self._letter * (letters + LETTER_REST) + most(self._ends.key(""))
        elif set(NUMBERS) & set(kinds):
            bounds = [len(json.dumps(node[name])) for name in NUMBER_BOUNDS if isinstance(node.get(name), int | float)]
            yield self._letter * (NUMBER_REST + sum(bounds))

    def _ambiguous(self, node: Schema) -> Iterator[float]:
        """Yield the lengths of those forms of this subschema that can be told apart only within a container."""
        for name in UNIONS:
            containers = [container for container in list_of(node.get(name)) if self._is_container(container)]
            yield from map(self._min, containers if len(containers) > 1 else [])

    def _has_arrays_in_arrays(self, node: Schema) -> bool:
        return "array" in kinds_of(node) and any(
            self._is_container(item, ("array",)) for item in self._ends.items(node)
        )

    def _is_container(self, node: object, kinds: Iterable[str] = ("object", "array")) -> bool:
        """Return whether a value of a subschema may be of one of these types."""
        seen, waiting = set[int](), [node]
        while waiting:
            inner = waiting.pop()
            if inner is True or inner == {}:
                return True
            if isinstance(inner, dict) and id(inner) not in seen:
                seen.add(id(inner))
                if set(kinds) & set(kinds_of(inner)):
                    return True
                waiting.append(self._ends.resolved(inner))
                waiting += [part for name in ("allOf", *UNIONS) for part in list_of(inner.get(name))]
        return False


def _all_subschemas(root: Schema) -> Iterator[Schema]:
    """Yield all subschemas of a schema that are objects."""
    waiting = list[object]([root])
    while waiting:
        node = waiting.pop()
        if isinstance(node, dict):
            yield node
            waiting += [value for name, value in node.items() if name in ONE_SUBSCHEMA]
            waiting += [inner for name, value in node.items() if name in SUBSCHEMA_LISTS for inner in list_of(value)]
            waiting += [inner for name in SUBSCHEMAS_BY_NAME for inner in dict_of(node.get(name)).values()]


def kinds_of(node: Schema) -> list[str]:
    """Return the types of a subschema that says them, or whose keywords do."""
    kinds = node.get("type")
    if kinds is None:
        said = {"properties": "object", "required": "object", "items": "array", "prefixItems": "array"}
        return list(dict.fromkeys(kind for name, kind in said.items() if name in node))
    return [kind for kind in (kinds if isinstance(kinds, list) else [kinds]) if isinstance(kind, str)]


def values_of(node: Schema) -> list[object]:
    """Return the constants of a subschema."""
    return [node["const"]] if "const" in node else list_of(node.get("enum"))


def count_of(node: Schema, name: str) -> float:
    """Return the value of a keyword that counts; 0 where it is not there."""
    value = node.get(name)
    return value if isinstance(value, int | float) and not isinstance(value, bool) else 0


def _shortest(texts: Iterable[str | None]) -> str | None:
    return min((text for text in texts if text is not None), key=len, default=None)
