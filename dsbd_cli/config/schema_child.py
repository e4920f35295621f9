"""Validation of JSON texts under a schema, whole and after the fact, by jsonschema-rs.

A schema of others may make it take very long. So this file is also a program, which a child process runs with limits.
It imports nothing of this package.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from jsonschema_rs import Validator

CPU_SECONDS, ADDRESS_SPACE = 3, 2 << 30
# Keywords that draft 7 would ignore
NOT_IN_7 = frozenset("dependentRequired dependentSchemas maxContains minContains prefixItems unevaluatedItems".split())


def validator(schema: object) -> Validator:
    """Return a validator of a schema: of the draft that it names, else of 2020-12, or of 7 where it is none of that.
    Nothing is fetched. Raises ValueError for a schema that belongs to neither."""
    from jsonschema_rs import Draft7Validator, ReferencingError, ValidationError, validator_for

    first: Exception | None = None
    for make in (validator_for, *(() if NOT_IN_7 & _keys(schema) else (Draft7Validator,))):
        try:
            made: Validator = make(schema, validate_formats=True, retriever=_retrieve)
        except (ValidationError, ReferencingError, ValueError, TypeError) as error:
            first = first or error
        else:
            return made
    raise ValueError(str(first).partition("\n")[0])


def _keys(node: object) -> set[str]:
    """Return all keys of an object and of those in it."""
    if isinstance(node, list):
        return set().union(*map(_keys, node))
    return set(node).union(*map(_keys, node.values())) if isinstance(node, dict) else set()


def _retrieve(address: str) -> object:
    raise ValueError(f"{address} is outside of the schema")


def holds(by: Validator, text: bytes) -> bool:
    """Return whether a text is JSON that is valid. What cannot be read, or takes too much, is not."""
    try:
        return by.is_valid(json.loads(text))
    except (ValueError, RecursionError):
        return False


def _main() -> None:
    """Read a schema and texts, a line of JSON each; write whether each is valid, as 0 and 1."""
    try:
        import resource
    except ImportError:  # Windows: the parent's clock alone limits it
        pass
    else:
        resource.setrlimit(resource.RLIMIT_CPU, (CPU_SECONDS, CPU_SECONDS))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        resource.setrlimit(resource.RLIMIT_AS, (ADDRESS_SPACE, ADDRESS_SPACE))
    schema, *texts = (json.loads(line) for line in sys.stdin.buffer)
    by = validator(schema)
    for text in texts:
        sys.stdout.write("1" if holds(by, text.encode("utf-8", "surrogateescape")) else "0")
        sys.stdout.flush()


def command() -> Sequence[str]:
    """Return the command of a child."""
    return [sys.executable, "-P", __file__]


if __name__ == "__main__":
    _main()
