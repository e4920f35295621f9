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
    fields: Fields = {}
    parts = schema.get("$defs", {})

    open_parts: list[str] = []  # that hold the place: a part that refers to itself is described once

    def put(path: str, node: Mapping[str, Any], *, required: bool) -> None:
        merged = dict(node)
        if "$ref" in node:
            merged = {**parts[node["$ref"].rsplit("/", 1)[1]], **{k: v for k, v in node.items() if k != "$ref"}}
        words = ["required" if required else "optional"]
        words += [f"{name} {json.dumps(merged[name])}" for name in sorted(merged.keys() - STRUCTURE)]
        if merged.get("additionalProperties") is False or merged.get("unevaluatedProperties") is False:
            words.append("closed")
        text = f"{', '.join(words)}: {merged.get('description', '')}".rstrip(": ")
        fields[path] = text + (f" [deprecated since {merged[SINCE]}]" if merged.get("deprecated") else "")
        below(path, merged)

    def below(path: str, node: Mapping[str, Any]) -> None:
        for child in node.get("allOf", ()):
            name = child["$ref"].rsplit("/", 1)[1] if "$ref" in child else ""
            if name not in open_parts:
                open_parts.append(name)
                below(path, parts[name] if name else child)
                open_parts.pop()
        for name, child in node.get("properties", {}).items():
            if isinstance(child, dict):
                put(f"{path}.{name}".lstrip("."), child, required=name in node.get("required", ()))
        for kind in FORMS:
            for number, child in enumerate(node.get(kind, ())):
                name = child["$ref"].rsplit("/", 1)[1] if "$ref" in child else str(number)
                put(f"{path}<{name}>", child, required=False)
        for name, mark in (("items", "[]"), ("additionalProperties", ".*"), ("unevaluatedProperties", ".*")):
            if isinstance(node.get(name), dict):
                put(path + mark, node[name], required=False)
        for number, child in enumerate(node.get("prefixItems", ())):
            put(f"{path}[{number}]", child, required=True)

    put("", schema, required=True)
    return fields


def broken_promises(lock: Mapping[str, Fields], now: Mapping[str, Fields], version: str) -> list[str]:
    """Return what may not be, a line each. lock, now: fields by name and number, as dsbd.output/1. version: of dsbd."""
    broken = []
    for name, fields in now.items():
        before, number = name.rsplit("/", 1)
        if name in lock:
            broken += [f"{name}: {promise}" for promise in _under_one_number(lock[name], fields)]
        elif (older := f"{before}/{int(number) - 1}") in lock:
            broken += [f"{name}: {promise}" for promise in _under_the_next(lock[older], fields, version)]
        elif number != "1":
            broken.append(f"{name}: there is no {older} before it")
    kinds = {name.rsplit("/", 1)[0] for name in now}
    return broken + [f"{name} is gone" for name in lock if name.rsplit("/", 1)[0] not in kinds]


def _under_one_number(locked: Fields, now: Fields) -> list[str]:
    broken = [f"{path or 'line'} is gone ({text})" for path, text in locked.items() if path not in now]
    for path, text in now.items():
        if path in locked and text != locked[path] and not text.startswith(f"{locked[path]} [deprecated since "):
            broken.append(f"{path or 'line'} was ({locked[path]}) and is ({text})")
        if path not in locked and text.startswith("required") and _holder(path, now) in locked:
            broken.append(f"{path} is new and required: lines that were written before lack it")
    return broken


def _holder(path: str, paths: Fields) -> str:
    """Return the place of the object that a field is in."""
    return max((holder for holder in paths if holder != path and _lies_in(path, holder)), key=len, default="")


def _lies_in(path: str, holder: str) -> bool:
    return not holder or (path.startswith(holder) and path[len(holder)] in ".[<")


def _under_the_next(locked: Fields, now: Fields, version: str) -> list[str]:
    """Faults of what goes with a new number."""
    gone = {path: text for path, text in locked.items() if path not in now and _holder(path, locked) in now}
    return [
        f"{path} goes without a version of warning: mark it deprecated, with {SINCE}, in a version before"
        for path, text in gone.items()
        if not _warned(text, version)
    ]


def _warned(text: str, version: str) -> bool:
    _, marked, since = text.rpartition(" [deprecated since ")
    return bool(marked) and _minor(since.rstrip("]")) < _minor(version)


def _minor(version: str) -> tuple[int, ...]:
    return tuple(map(int, version.split(".")[:2]))


def promised() -> dict[str, Fields]:
    """Return the fields of all schemas as they are."""
    return {contract.id: fields_of(contract.schema()) for contract in CONTRACTS.values()}


def read_lock() -> dict[str, Fields]:
    """Return the fields of all numbers that there ever were."""
    lock: dict[str, Fields] = json.loads(LOCK.read_text(encoding="utf-8")) if LOCK.exists() else {}
    return lock


if __name__ == "__main__":
    if faults := broken_promises(read_lock(), promised(), __version__):
        sys.exit("\n".join(faults))
    LOCK.write_text(json.dumps(read_lock() | promised(), indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
