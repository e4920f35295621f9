"""Preparation of JSON schemas before they are compiled: how far their references lead is measured, and their objects
are closed.

Nothing here recurses along references, so that no schema can exhaust the stack.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from urllib.parse import unquote

from dsbd_cli.errors import UsageError

MOST_NESTING = 128  # containers in containers; llguidance reads no more
MOST_LEVELS = 500  # containers and references below one another
Node = dict[str, object] | list[object]


@dataclass(frozen=True, slots=True)
class Extent:
    """Size of a schema with its references followed.

    Attributes:
        nodes: number of containers. Those behind a reference count once for each way that leads there.
        keys: all keys of its objects. largest: the largest bound on a length or a count.
        recursive: whether a part refers back to where it came from.
    """

    nodes: int
    keys: frozenset[str]
    largest: float
    recursive: bool


COUNTS = frozenset("minLength maxLength minItems maxItems minProperties maxProperties".split())


def extent(schema: Mapping[str, object]) -> Extent:
    """Measure how far a schema leads. A reference back to where it came from is not followed again. Raises UsageError
    where it leads too far to be compiled."""
    root = dict(schema)
    keys: set[str] = set()
    largest = 0.0
    levels: dict[int, int] = {}
    nodes: dict[int, int] = {}
    opened: set[int] = set()
    recursive = False
    stack: list[tuple[Node, bool]] = [(root, False)]
    while stack:
        node, children_done = stack.pop()
        if children_done:
            every = [id(inner) for inner in _below(node, root)]
            below = [inner for inner in every if inner in levels]
            recursive = recursive or len(below) < len(every)
            levels[id(node)] = 1 + max((levels[inner] for inner in below), default=0)
            nodes[id(node)] = 1 + sum(nodes[inner] for inner in below)
            if levels[id(node)] > MOST_LEVELS:
                raise UsageError(f"its references lead through more than {MOST_LEVELS} levels")
            continue
        if id(node) in opened:
            continue
        opened.add(id(node))
        if isinstance(node, dict):
            keys.update(node)
            counts = [value for name, value in node.items() if name in COUNTS and isinstance(value, int | float)]
            largest = max(largest, *counts) if counts else largest
        stack.append((node, True))
        stack += [(inner, False) for inner in _below(node, root) if id(inner) not in opened]
    _check_nesting(root)
    return Extent(nodes[id(root)], frozenset(keys), largest, recursive)


def _check_nesting(root: Node) -> None:
    layer: list[Node] = [root]
    for _ in range(MOST_NESTING):
        layer = [inner for node in layer for inner in _inside(node)]
        if not layer:
            return
    raise UsageError(f"it is nested more than {MOST_NESTING} levels deep")


def _inside(node: Node) -> Iterator[Node]:
    """Yield the containers directly in this one."""
    for value in node.values() if isinstance(node, dict) else node:
        if isinstance(value, dict | list):
            yield value


def _below(node: Node, root: dict[str, object]) -> Iterator[Node]:
    """Yield the containers directly in this one, and the container that it refers to."""
    yield from _inside(node)
    if isinstance(node, dict) and isinstance(reference := node.get("$ref"), str):
        target = resolve(root, reference)
        if isinstance(target, dict | list):
            yield target


def resolve(root: object, reference: str) -> object:
    """Return what a reference within the schema leads to; None where it leads nowhere, or out of the schema."""
    if not reference.startswith("#"):
        return None
    here = root
    for step in reference[1:].split("/")[1:]:
        name = unquote(step).replace("~1", "/").replace("~0", "~")
        if isinstance(here, dict) and name in here:
            here = here[name]
        elif isinstance(here, list) and name.isascii() and name.isdigit() and int(name) < len(here):
            here = here[int(name)]
        else:
            return None
    return here


# Keywords by what their value holds: one subschema, a list of them, or some by name
ONE_SUBSCHEMA = frozenset("additionalProperties items".split())
SUBSCHEMA_LISTS = frozenset("allOf anyOf oneOf prefixItems items".split())
SUBSCHEMAS_BY_NAME = frozenset("$defs definitions properties patternProperties".split())
BRANCHES = ("anyOf", "oneOf")
# Keywords that apply subschemas to the same value only sometimes
CONDITIONS = ("if", "then", "else")
CONDITIONS_BY_NAME = ("dependentSchemas", "dependencies")
MOST_ADDED = 200_000  # names of properties, counted in each object and each part that is merged with it
OPEN = "dsbd-open-"  # begins the name of a definition's open variant
# Keywords beside a reference that do not restrict a value
NOT_RESTRICTING = frozenset("$ref $defs definitions $schema $id title description default x-guidance".split())


def close_objects(schema: Mapping[str, object]) -> dict[str, object]:
    """Return the same schema, in which an object that names its properties has no others, unless it says so itself by
    `additionalProperties`.

    What is merged is closed as a whole: with `allOf`, and with keywords beside `$ref` or `anyOf`, the properties of
    every part are allowed, and those of subschemas that apply only sometimes, as `then` does. A required property that
    is nowhere described is allowed too. Raises UsageError where the parts have too many properties to be told to each
    other.
    """
    return _Closing(dict(schema)).result()


class _Closing:
    """A schema whose objects are being closed. A definition that is merged with other parts gets an open variant, which
    is queued when it is first referred to."""

    def __init__(self, root: dict[str, object]) -> None:
        self._root = root
        self._variants: dict[str, str] = {}  # reference -> name of its open variant
        self._waiting: list[str] = []
        self._added = 0

    def result(self) -> dict[str, object]:
        """Return the whole schema, closed, with the open variants among its definitions."""
        closed = self._closed(self._root, {})
        variants: dict[str, object] = {}
        while self._waiting:
            reference = self._waiting.pop()
            target = resolve(self._root, reference)
            assert isinstance(target, dict)
            alone = {name: value for name, value in target.items() if name not in ("$defs", "definitions")}
            variants[self._variants[reference]] = self._open(alone)
        if variants:
            definitions = closed.get("$defs")
            closed["$defs"] = {**(definitions if isinstance(definitions, dict) else {}), **variants}
        return closed

    def _closed(
        self, node: dict[str, object], outer: Mapping[str, None], conditional: Sequence[object] = ()
    ) -> dict[str, object]:
        """Return a subschema that allows its own properties and those of `outer`, which come from the parts that it is
        merged with. conditional: subschemas further out that sometimes apply to the same value."""
        own, sometimes = self._parts(node), self._conditional(node, conditional)
        if not _may_be_object(node):
            return self._inner(node, sometimes)
        if any(_says_what_else(part) for part in own) or any(_allows_else(part) for part in sometimes):
            return self._open(node, sometimes)
        outer = {**outer, **_names(sometimes)}
        if "$ref" in node and not outer and node.keys() <= NOT_RESTRICTING:
            return self._inner(node)  # the definition that it refers to is closed
        names = {**outer, **_names(own)}
        self._added += len(names)
        if self._added > MOST_ADDED:
            raise UsageError(
                f"its objects, and the parts that they are merged with, name more than {MOST_ADDED:,} properties"
            )
        patterns = [name for part in (*own, *sometimes) for name in dict_of(part.get("patternProperties"))]
        branches = [name for name in BRANCHES if isinstance(node.get(name), list)]
        if len(branches) == 1 and not patterns:
            of = list_of(node[branches[0]])
            of = [self._closed(branch, names, sometimes) if isinstance(branch, dict) else branch for branch in of]
            return {**self._open({**node, branches[0]: None}, sometimes), branches[0]: of}
        for branch in (branch for name in branches for branch in list_of(node[name]) if isinstance(branch, dict)):
            names |= _names([*self._parts(branch), *self._conditional(branch)])
        opened = self._open(node, sometimes)
        if names or patterns:
            for keyword, all_of in (("properties", names), ("patternProperties", patterns)):
                described = dict_of(opened.get(keyword))
                if every := {**described, **{name: True for name in all_of if name not in described}}:
                    opened[keyword] = every
            opened["additionalProperties"] = False
        return opened

    def _open(self, node: dict[str, object], conditional: Sequence[dict[str, object]] = ()) -> dict[str, object]:
        """Return a subschema that is merged with others: open itself, closed further in."""
        merged = [name for name in ("allOf", *BRANCHES) if isinstance(node.get(name), list)]
        opened = self._inner({**node, **dict.fromkeys(merged)}, conditional)  # each part is read once, below
        reference = node.get("$ref")
        if isinstance(reference, str) and isinstance(resolve(self._root, reference), dict):
            opened["$ref"] = f"#/$defs/{self._variant(reference)}"
        for name in merged:
            opened[name] = [
                self._open(branch, conditional) if isinstance(branch, dict) else branch
                for branch in list_of(node[name])
            ]
        return opened

    def _inner(self, node: dict[str, object], conditional: Sequence[dict[str, object]] = ()) -> dict[str, object]:
        """Return a subschema with its properties and parts closed, each for itself."""
        inner: dict[str, object] = {}
        for name, value in node.items():
            if name in SUBSCHEMAS_BY_NAME and isinstance(value, dict):
                inner[name] = {
                    key: self._closed(value_of_key, {}, _below_conditions(conditional, name, key))
                    if isinstance(value_of_key, dict)
                    else value_of_key
                    for key, value_of_key in value.items()
                }
            elif name in SUBSCHEMA_LISTS and isinstance(value, list):
                beside = conditional if name in ("allOf", *BRANCHES) else _below_conditions([node, *conditional], name)
                inner[name] = [
                    self._closed(branch, {}, beside) if isinstance(branch, dict) else branch for branch in value
                ]
            elif name in ONE_SUBSCHEMA and isinstance(value, dict):
                parts = [node, *conditional] if name == "items" else conditional
                inner[name] = self._closed(value, {}, _below_conditions(parts, name))
            else:
                inner[name] = value
        return inner

    def _variant(self, reference: str) -> str:
        if reference not in self._variants:
            self._variants[reference] = f"{OPEN}{len(self._variants)}"
            self._waiting.append(reference)
        return self._variants[reference]

    def _parts(self, node: dict[str, object]) -> list[dict[str, object]]:
        """Return the subschema, the definition that it refers to, the parts of its `allOf`, and theirs in turn."""
        parts, waiting, seen = list[dict[str, object]](), [node], set[int]()
        while waiting:
            part = waiting.pop(0)
            if id(part) in seen:
                continue
            seen.add(id(part))
            parts.append(part)
            reference = part.get("$ref")
            target = resolve(self._root, reference) if isinstance(reference, str) else None
            waiting += [part for part in (target, *list_of(part.get("allOf"))) if isinstance(part, dict)]
        return parts

    def _conditional(self, node: dict[str, object], further: Sequence[object] = ()) -> list[dict[str, object]]:
        """Return the subschemas that sometimes apply to the value of this one, with all that these apply."""
        waiting = [condition for part in self._parts(node) for condition in _conditions(part)]
        conditions, waiting, seen = list[dict[str, object]](), [*waiting, *further], set[int]()
        while waiting:
            condition = waiting.pop(0)
            if not isinstance(condition, dict) or id(condition) in seen:
                continue
            seen.add(id(condition))
            conditions.append(condition)
            if isinstance(reference := condition.get("$ref"), str):
                waiting.append(resolve(self._root, reference))
            waiting += [part for name in ("allOf", *BRANCHES) for part in list_of(condition.get(name))]
            waiting += _conditions(condition)
        return conditions


def _conditions(node: dict[str, object]) -> list[object]:
    """Return the subschemas that a subschema itself applies sometimes to the same value. Names of properties that are
    required sometimes count as one."""
    conditions = [node[name] for name in CONDITIONS if name in node]
    conditions += [condition for name in CONDITIONS_BY_NAME for condition in dict_of(node.get(name)).values()]
    required = [*conditions, *dict_of(node.get("dependentRequired")).values()]
    names = [name for names_of_key in required for name in list_of(names_of_key)]
    return [*conditions, {"required": names}] if names else conditions


def _below_conditions(parts: Sequence[dict[str, object]], keyword: str, key: str | None = None) -> list[object]:
    """Return what subschemas say of the values below a keyword: of the properties (of one, by its name), or of the
    items. Those that always apply say it by `contains` alone."""
    below: list[object] = []
    if keyword in ("properties", "patternProperties", "additionalProperties"):
        for part in parts:
            named = dict_of(part.get("properties"))
            below += [named[key]] if keyword == "properties" and key in named else []
            below += [] if keyword == "properties" else named.values()
            below += dict_of(part.get("patternProperties")).values()
            below.append(part.get("additionalProperties"))
    elif keyword in ("items", "prefixItems"):
        below = [part.get("contains") for part in parts]
        for part in parts[1:]:
            items = part.get("items")
            below += [*list_of(part.get("prefixItems")), *(list_of(items) or [items])]
    return below


def _says_what_else(node: dict[str, object]) -> bool:
    """Return whether a subschema says which other properties an object may have. That it has no unevaluated ones is
    what closing says."""
    return "additionalProperties" in node or node.get("unevaluatedProperties", False) is not False


def _allows_else(node: dict[str, object]) -> bool:
    return any(node.get(name, False) is not False for name in ("additionalProperties", "unevaluatedProperties"))


def _names(parts: Sequence[dict[str, object]]) -> dict[str, None]:
    """Return the properties that subschemas describe or require, in their order."""
    names: dict[str, None] = {}
    for part in parts:
        names |= dict.fromkeys(dict_of(part.get("properties")))
        names |= dict.fromkeys(name for name in list_of(part.get("required")) if isinstance(name, str))
    return names


def list_of(value: object) -> list[object]:
    """Return a list, or an empty one in place of anything else."""
    return value if isinstance(value, list) else []


def dict_of(value: object) -> dict[str, object]:
    """Return an object, or an empty one in place of anything else."""
    return value if isinstance(value, dict) else {}


def _may_be_object(node: dict[str, object]) -> bool:
    kinds = node.get("type", "object")
    return kinds == "object" or (isinstance(kinds, list) and "object" in kinds)
