"""What the schemas promise under their numbers, and which changes keep a promise.

tests/io/schemas.lock.json holds every field of every number: its place, whether it must be there, its type and its
meaning. Under one number a field may be added that need not be there. All else needs a new number, and a field that
goes has been marked `deprecated`, with `x-deprecated-since`, in a version before.
`python -m tests.helpers.schema_lock` notes what was added, and refuses what breaks a promise.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dsbd_cli._version import __version__
from dsbd_cli.io.schemas.contracts import CONTRACTS

LOCK = Path(__file__).parents[1] / "io" / "schemas.lock.json"
SINCE = "x-deprecated-since"
FORMS = ("anyOf", "oneOf")  # each is one of several
STRUCTURE = {
    "$schema",
    "$id",
    "$defs",
    "$ref",
    "title",
    "properties",
    "required",
    "items",
    "prefixItems",
    "allOf",
    *FORMS,
}
STRUCTURE |= {"additionalProperties", "unevaluatedProperties", "description", "deprecated", SINCE}
Fields = dict[str, str]  # place -> what stands there


def fields_of(schema: Mapping[str, Any]) -> Fields:
    """Return every field of a schema by its place, as in `answered.beams[].text`, with all that is promised of it."""
    found: Fields = {}
    parts = schema.get("$defs", {})

    open_parts: list[str] = []  # that hold the place: a part that refers to itself is described once

    def put(place: str, node: Mapping[str, Any], *, required: bool) -> None:
        merged = dict(node)
        if "$ref" in node:
            merged = {**parts[node["$ref"].rsplit("/", 1)[1]], **{k: v for k, v in node.items() if k != "$ref"}}
        words = ["required" if required else "optional"]
        words += [f"{name} {json.dumps(merged[name])}" for name in sorted(merged.keys() - STRUCTURE)]
        if merged.get("additionalProperties") is False or merged.get("unevaluatedProperties") is False:
            words.append("closed")
        text = f"{', '.join(words)}: {merged.get('description', '')}".rstrip(": ")
        found[place] = text + (f" [deprecated since {merged[SINCE]}]" if merged.get("deprecated") else "")
        below(place, merged)

    def below(place: str, node: Mapping[str, Any]) -> None:
        for one in node.get("allOf", ()):
            name = one["$ref"].rsplit("/", 1)[1] if "$ref" in one else ""
            if name not in open_parts:
                open_parts.append(name)
                below(place, parts[name] if name else one)
                open_parts.pop()
        for name, one in node.get("properties", {}).items():
            if isinstance(one, dict):
                put(f"{place}.{name}".lstrip("."), one, required=name in node.get("required", ()))
        for kind in FORMS:
            for number, one in enumerate(node.get(kind, ())):
                name = one["$ref"].rsplit("/", 1)[1] if "$ref" in one else str(number)
                put(f"{place}<{name}>", one, required=False)
        for name, mark in (("items", "[]"), ("additionalProperties", ".*"), ("unevaluatedProperties", ".*")):
            if isinstance(node.get(name), dict):
                put(place + mark, node[name], required=False)
        for number, one in enumerate(node.get("prefixItems", ())):
            put(f"{place}[{number}]", one, required=True)

    put("", schema, required=True)
    return found


def broken_promises(lock: Mapping[str, Fields], now: Mapping[str, Fields], version: str) -> list[str]:
    """Return what may not be, a line each. lock, now: fields by name and number, as dsbd.output/1. version: of dsbd."""
    found = []
    for name, fields in now.items():
        before, number = name.rsplit("/", 1)
        if name in lock:
            found += [f"{name}: {one}" for one in _under_one_number(lock[name], fields)]
        elif (older := f"{before}/{int(number) - 1}") in lock:
            found += [f"{name}: {one}" for one in _under_the_next(lock[older], fields, version)]
        elif number != "1":
            found.append(f"{name}: there is no {older} before it")
    kinds = {name.rsplit("/", 1)[0] for name in now}
    return found + [f"{name} is gone" for name in lock if name.rsplit("/", 1)[0] not in kinds]


def _under_one_number(locked: Fields, now: Fields) -> list[str]:
    found = [f"{place or 'line'} is gone ({text})" for place, text in locked.items() if place not in now]
    for place, text in now.items():
        if place in locked and text != locked[place] and not text.startswith(f"{locked[place]} [deprecated since "):
            found.append(f"{place or 'line'} was ({locked[place]}) and is ({text})")
        if place not in locked and text.startswith("required") and _holder(place, now) in locked:
            found.append(f"{place} is new and required: lines that were written before lack it")
    return found


def _holder(place: str, known: Fields) -> str:
    """Return the place of the object that a field is in."""
    return max((one for one in known if one != place and _lies_in(place, one)), key=len, default="")


def _lies_in(place: str, holder: str) -> bool:
    return not holder or (place.startswith(holder) and place[len(holder)] in ".[<")


def _under_the_next(locked: Fields, now: Fields, version: str) -> list[str]:
    """Faults of what goes with a new number."""
    gone = {place: text for place, text in locked.items() if place not in now and _holder(place, locked) in now}
    return [
        f"{place} goes without a version of warning: mark it deprecated, with {SINCE}, in a version before"
        for place, text in gone.items()
        if not _warned(text, version)
    ]


def _warned(text: str, version: str) -> bool:
    _, marked, since = text.rpartition(" [deprecated since ")
    return bool(marked) and _minor(since.rstrip("]")) < _minor(version)


def _minor(version: str) -> tuple[int, ...]:
    return tuple(map(int, version.split(".")[:2]))


def promised() -> dict[str, Fields]:
    """Return the fields of all schemas as they are."""
    return {one.id: fields_of(one.schema()) for one in CONTRACTS.values()}


def read_lock() -> dict[str, Fields]:
    """Return the fields of all numbers that there ever were."""
    found: dict[str, Fields] = json.loads(LOCK.read_text(encoding="utf-8")) if LOCK.exists() else {}
    return found


if __name__ == "__main__":
    if faults := broken_promises(read_lock(), promised(), __version__):
        sys.exit("\n".join(faults))
    LOCK.write_text(json.dumps(read_lock() | promised(), indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
