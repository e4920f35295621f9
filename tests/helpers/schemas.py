"""Made-up JSON schemas: nested objects, enumerations, arrays with bounds, numbers, unicode, references. All values are
bounded, so that a model without sense comes to an end."""

from __future__ import annotations

import random
from typing import Any

WORDS = ("name", "größe", "año", "名前", "is ok", 'quo"te', "back\\slash", "слово", "é", "naïve", "a/b", "k~1", "😀")


def schemas(count: int, seed: int = 0) -> list[dict[str, Any]]:
    """Different schemas, each an object at its root."""
    rng = random.Random(seed)
    return [_root(rng) for _ in range(count)]


def _root(rng: random.Random) -> dict[str, Any]:
    definitions = {f"part{number}": _value(rng, 1) for number in range(rng.randint(0, 2))}
    made = _object(rng, 3, tuple(definitions))
    return {**made, "$defs": definitions} if definitions else made


def _object(rng: random.Random, depth: int, parts: tuple[str, ...]) -> dict[str, Any]:
    names = rng.sample(WORDS, rng.randint(1, 3))
    properties = {name: _value(rng, depth - 1, parts) for name in names}
    required = [name for name in names if rng.random() < 0.7]
    return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}


def _value(rng: random.Random, depth: int, parts: tuple[str, ...] = ()) -> dict[str, Any]:
    kinds = [_string, _pattern, _enumeration, _constant, _integer, _number, _boolean, _nothing]
    if parts and rng.random() < 0.3:
        return {"$ref": f"#/$defs/{rng.choice(parts)}"}
    if depth > 0:
        kinds += [_array, _choice] * 2
        if rng.random() < 0.4:
            return _object(rng, depth, parts)
    return rng.choice(kinds)(rng, depth, parts)


def _string(rng: random.Random, *_: object) -> dict[str, Any]:
    least = rng.randint(0, 2)
    return {"type": "string", "minLength": least, "maxLength": least + rng.randint(0, 4)}


def _pattern(rng: random.Random, *_: object) -> dict[str, Any]:
    return {"type": "string", "pattern": rng.choice(("^[a-c]{1,3}$", "^(ja|nein)$", "^[0-9]{2}-[0-9]{2}$", "^é?ü$"))}


def _enumeration(rng: random.Random, *_: object) -> dict[str, Any]:
    return {"enum": rng.sample([*WORDS, 1, -2.5, None, True, "", [1, "x"]], rng.randint(1, 4))}


def _constant(rng: random.Random, *_: object) -> dict[str, Any]:
    return {"const": rng.choice([0, "fix", None, {"a": [1, 2]}, "名前"])}


def _integer(rng: random.Random, *_: object) -> dict[str, Any]:
    least = rng.randint(-50, 50)
    return {
        "type": "integer",
        "minimum": least,
        rng.choice(("maximum", "exclusiveMaximum")): least + rng.randint(1, 99),
    }


def _number(rng: random.Random, *_: object) -> dict[str, Any]:
    least = rng.randint(-9, 9)
    return {"type": "number", "minimum": least, "maximum": least + rng.randint(1, 5), "multipleOf": 0.25}


def _boolean(*_: object) -> dict[str, Any]:
    return {"type": "boolean"}


def _nothing(*_: object) -> dict[str, Any]:
    return {"type": "null"}


def _array(rng: random.Random, depth: int, parts: tuple[str, ...]) -> dict[str, Any]:
    least = rng.randint(0, 2)
    if rng.random() < 0.3:
        items = [_value(rng, depth - 1, parts) for _ in range(2)]
        return {"type": "array", "prefixItems": items, "items": False, "minItems": 2}
    inner = _value(rng, depth - 1, parts)
    return {"type": "array", "items": inner, "minItems": least, "maxItems": least + rng.randint(0, 2)}


def _choice(rng: random.Random, depth: int, parts: tuple[str, ...]) -> dict[str, Any]:
    return {"anyOf": [_value(rng, depth - 1, parts), _integer(rng)]}
