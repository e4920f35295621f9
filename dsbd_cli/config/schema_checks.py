"""Keywords of JSON schemas that llguidance does not know: those that others can say are said by these, the rest is left
out of the grammar and checked of whole texts."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property, lru_cache

from dsbd_cli.config.child import checked_in_child, holds, validator
from dsbd_cli.config.schemas import ONE_SUBSCHEMA, SUBSCHEMA_LISTS, SUBSCHEMAS_BY_NAME, extent, resolve
from dsbd_cli.errors import UsageError, one_line

Schema = dict[str, object]

CHECKED = frozenset(
    "contains dependencies dependentRequired dependentSchemas else if maxContains minContains not propertyNames then "
    "unevaluatedItems unevaluatedProperties uniqueItems".split()
)
# Keywords whose properties count as evaluated
EVALUATING = frozenset(
    "$dynamicRef $recursiveRef $ref allOf anyOf dependencies dependentSchemas else if oneOf then".split()
)
# Keywords that may have a value tried in several ways. In a schema that refers to itself the ways multiply.
BRANCHING = frozenset("allOf anyOf dependencies dependentSchemas else if not oneOf then".split())
MOST_NODES = 5_000  # of a schema that this process checks by


def rewritten(schema: Schema) -> Schema:
    """Return the same schema without a false `uniqueItems`, `propertyNames` that list names and
    `unevaluatedProperties`, where other keywords can say the same."""
    return _mapped(schema, lambda node: _node_rewritten(node, schema))


def relaxed(schema: Schema, knows: Callable[[str, str], bool]) -> Schema:
    """Return a schema that holds for whatever this one holds for, without the keywords that a grammar cannot enforce.
    Its objects are closed before, as what is left out may name properties. knows: whether a `pattern` or a `format`, by
    keyword and value, can be enforced."""
    return _mapped(schema, lambda node: _node_relaxed(node, knows))


def _mapped(node: Schema, change: Callable[[Schema], Schema]) -> Schema:
    """Return the schema with each subschema changed."""
    mapped: Schema = {}
    for name, value in change(node).items():
        if name in SUBSCHEMAS_BY_NAME and isinstance(value, dict):
            mapped[name] = {
                key: _mapped(inner, change) if isinstance(inner, dict) else inner for key, inner in value.items()
            }
        elif name in SUBSCHEMA_LISTS and isinstance(value, list):
            mapped[name] = [_mapped(inner, change) if isinstance(inner, dict) else inner for inner in value]
        elif name in ONE_SUBSCHEMA and isinstance(value, dict):
            mapped[name] = _mapped(value, change)
        else:
            mapped[name] = value
    return mapped


def _node_rewritten(node: Schema, root: Schema) -> Schema:
    rewritten = dict(node)
    if rewritten.get("uniqueItems") is False:
        del rewritten["uniqueItems"]
    if "unevaluatedProperties" in rewritten and not rewritten.keys() & EVALUATING:
        others = rewritten.pop("unevaluatedProperties")
        rewritten.setdefault("additionalProperties", others)
    names = None if "patternProperties" in rewritten else _listed_names(rewritten.get("propertyNames"), root)
    if names is not None:
        del rewritten["propertyNames"]
        named, others = rewritten.get("properties", {}), rewritten.get("additionalProperties", True)
        named = named if isinstance(named, dict) else {}
        rewritten["properties"] = {name: named.get(name, others) for name in names}
        rewritten["additionalProperties"] = False
    return rewritten


def _listed_names(node: object, root: Schema) -> list[str] | None:
    """Return the names that a subschema lists; None where it does not."""
    if isinstance(node, dict) and isinstance(reference := node.get("$ref"), str):
        node = resolve(root, reference)
    if not isinstance(node, dict):
        return None
    values = [node["const"]] if "const" in node else node.get("enum")
    only = node.keys() <= {"const", "enum", "type", "title", "description"}
    names = [name for name in values if isinstance(name, str)] if isinstance(values, list) else []
    return names if only and isinstance(values, list) and len(names) == len(values) else None


def _node_relaxed(node: Schema, knows: Callable[[str, str], bool]) -> Schema:
    left_out = {
        name
        for name, value in node.items()
        if name in CHECKED or (name in ("pattern", "format") and isinstance(value, str) and not knows(name, value))
    }
    return {name: value for name, value in node.items() if name not in left_out}


class SchemaCheck:
    """A check of whole texts under a schema."""

    def __init__(self, schema: Schema) -> None:
        """Raises UsageError for a schema that texts cannot be checked by."""
        self._schema = schema
        try:
            self._validator = validator(schema)
        except ValueError as error:
            raise UsageError(f"texts cannot be checked by it: {one_line(error)}") from None

    @cached_property
    def costly(self) -> bool:
        """True where a short text may take very long."""
        size = extent(self._schema)
        return size.nodes > MOST_NODES or (size.recursive and bool(size.keys & BRANCHING))

    def hold(self, texts: Sequence[bytes]) -> list[bool]:
        """Return for each text whether it is valid. One that takes too long is not."""
        if not self.costly or not texts:
            return [holds(self._validator, text) for text in texts]
        return checked_in_child(self._schema, [text.decode("utf-8", "surrogateescape") for text in texts])


@lru_cache(64)
def schema_check(text: str) -> SchemaCheck:
    """Return the check of a schema that is given as JSON."""
    schema = json.loads(text)
    assert isinstance(schema, Mapping), "it was compiled"
    return SchemaCheck(dict(schema))


def is_checkable(schema: Schema) -> bool:
    """Return whether texts can be checked by a schema."""
    try:
        SchemaCheck(schema)
    except UsageError:
        return False
    return True
