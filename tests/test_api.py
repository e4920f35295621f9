"""The Python interface: every name of `dsbd_cli.__all__` with its signature, as tests/api.txt has it.

`python -m tests.test_api` writes that file. A name, an argument or a field that goes or changes its meaning has been
named under Deprecated in CHANGELOG.md for one minor version.
"""

from __future__ import annotations

import dataclasses
import difflib
import inspect
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import dsbd_cli

API = Path(__file__).with_name("api.txt")


def described(name: str, value: object) -> Iterator[str]:
    """Lines of a public name; those of a class with its public members below."""
    if isinstance(value, type):
        bases = ", ".join(base.__name__ for base in value.__bases__ if base is not object)
        yield f"class {name}({bases})" if bases else f"class {name}"
        if dataclasses.is_dataclass(value) or "__init__" in vars(value):
            yield f"    __init__{signature(value)}"
        own = [base for base in value.__mro__ if base.__module__.startswith("dsbd_cli")]
        members = {member: value for base in reversed(own) for member, value in vars(base).items()}
        fields = {field.name for field in dataclasses.fields(value)} if dataclasses.is_dataclass(value) else set()
        for member in sorted(members.keys() - fields):
            if not member.startswith("_"):
                yield f"    {described_member(member, members[member])}"
    elif callable(value):
        yield f"{name}{signature(value)}"
    else:
        yield f"{name}: {type(value).__name__}"


def described_member(name: str, value: object) -> str:
    """One line of a method, a property or an attribute of a class."""
    if isinstance(value, property):
        assert value.fget is not None
        return f"{name}: {inspect.signature(value.fget).return_annotation}"
    if isinstance(value, classmethod | staticmethod):
        return f"{type(value).__name__} {name}{signature(value.__func__)}"
    return f"{name}{signature(value)}" if callable(value) else f"{name} = {value!r}"


def signature(value: object) -> str:
    """Arguments with types and defaults, one a line where they are many; a default that is an object, without its place
    in memory."""
    assert callable(value)
    text = re.sub(r" at 0x[0-9a-f]+", "", str(inspect.signature(value)))
    if len(text) <= 100:
        return text
    arguments, _, returned = text.removeprefix("(").rpartition(")")
    depth, lines = 0, [""]
    for mark in arguments:
        depth += (mark in "([{") - (mark in ")]}")
        if mark == "," and not depth:
            lines.append("")
        else:
            lines[-1] += mark
    return "".join(["(", *(f"\n        {line.strip()}" for line in lines), "\n    )", returned])


def interface() -> str:
    return "".join(
        f"{line}\n" for name in sorted(dsbd_cli.__all__) for line in described(name, getattr(dsbd_cli, name))
    )


def test_the_interface_is_as_committed() -> None:
    before, now = API.read_text(encoding="utf-8").splitlines(), interface().splitlines()
    changes = list(difflib.unified_diff(before, now, "tests/api.txt", "now", n=1, lineterm=""))
    assert changes == [], "new: python -m tests.test_api; gone or changed: see its docstring\n" + "\n".join(changes)


def test_every_name_is_found_by_name_and_by_dir() -> None:
    assert set(dir(dsbd_cli)) >= set(dsbd_cli.__all__)
    assert all(getattr(dsbd_cli, name) is not None for name in dsbd_cli.__all__)
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        dsbd_cli.nothing  # noqa: B018


@dataclasses.dataclass
class Sample:
    one: int
    two: str = "b"

    def method(self, given: int = 1) -> None: ...
    def _own(self) -> None: ...
    @property
    def value(self) -> float:
        return 1.0

    @classmethod
    def of(cls, text: str) -> Sample:
        return cls(1, text)


def test_what_is_held_of_a_class() -> None:
    Sample.__module__ = "dsbd_cli.sample"
    assert list(described("Sample", Sample)) == [
        "class Sample",
        "    __init__(one: 'int', two: 'str' = 'b') -> None",
        "    method(self, given: 'int' = 1) -> 'None'",
        "    classmethod of(cls, text: 'str') -> 'Sample'",
        "    value: float",
    ]


if __name__ == "__main__":
    API.write_text(interface(), encoding="utf-8")
