"""Checks of settings: the type of every field, and errors that name field, value and what is expected."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from functools import cache
from types import NoneType, UnionType
from typing import Literal, NoReturn, TypeVar, Union, get_args, get_origin, get_type_hints

from dsbd_cli.errors import KINDS, UsageError, shorten
from dsbd_cli.ops.processor import VARIABLE, current

T = TypeVar("T")
Test = Callable[[object], bool]


def require(condition: bool, name: str, value: object, expected: str) -> None:
    if not condition:
        message = f"{name} is {shorten(value)}, but must be {expected}"
        raise UsageError(message, field=name, value=value, expected=expected)


def check_processor() -> None:
    """Check DSBD_CPU where it is set, and begin to keep to it. Raises UsageError."""
    try:
        if os.environ.get(VARIABLE):  # without it nothing is wrong, and to look at the processor may take an import
            current()
    except ValueError as error:
        raise UsageError(str(error)) from None


def refuse(name: str, value: object, reason: str) -> NoReturn:
    """Raise UsageError. reason: why another field does not allow the value, and what to do."""
    raise UsageError(f"{name} is {shorten(value)}, but {reason}", field=name, value=value)


def check_value(name: str, value: object, hint: object) -> None:
    """Check that the value has this type. Raises UsageError."""
    if not _test(hint)(value):
        require(False, name, value, _expected(hint))


def check_types(settings: object, *, open_: tuple[str, ...] = ()) -> None:
    """Check that every field of a dataclass has the type of its annotation. open_: fields that may also be None until
    they are settled. Raises UsageError."""
    kind: type = type(settings)
    for name, hint, exact, fits in _types(kind):
        value = getattr(settings, name)
        if type(value) not in exact and not fits(value) and not (value is None and name in open_):
            require(False, name, value, _expected(hint))


@cache
def _types(kind: type) -> tuple[tuple[str, object, frozenset[type], Test], ...]:
    hints = get_type_hints(kind).items()
    return tuple((name, hint, _exact(hint), _test(hint)) for name, hint in hints if not name.startswith("_"))


def _exact(hint: object) -> frozenset[type]:
    """Return types whose values fit without a test, because every row of a file is tested."""
    if get_origin(hint) in (Union, UnionType):
        return frozenset().union(*map(_exact, get_args(hint)))
    if hint is float:
        return frozenset({int, float})
    return frozenset({hint}) if get_origin(hint) is None and isinstance(hint, type) else frozenset()


@cache
def _test(hint: object) -> Test:
    """Return a function that tests whether a value has this type. It is made once for each type, because every row of a
    file is tested."""
    kind, parts = get_origin(hint), get_args(hint)
    if kind in (Union, UnionType):
        plain = tuple(part for part in parts if isinstance(part, type) and part not in (int, float))
        others = [_test(part) for part in parts if part not in plain]
        return lambda value: isinstance(value, plain) or any(test(value) for test in others)
    if kind is Literal:
        return lambda value: isinstance(value, str) and value in parts
    if kind is tuple and parts[-1] is not ...:
        tests = [_test(part) for part in parts]
        return lambda value: (
            isinstance(value, tuple)
            and len(value) == len(tests)
            and all(test(item) for test, item in zip(tests, value, strict=True))
        )
    if kind in (tuple, Sequence):
        test_item = _test(parts[0])
        return lambda value: isinstance(value, tuple) and all(test_item(item) for item in value)
    if kind is dict:
        key, item_of = map(_test, parts)
        return lambda value: (
            isinstance(value, dict) and all(key(name) and item_of(item) for name, item in value.items())
        )
    if hint in (int, float):  # True is an int in Python, but not in a setting
        numbers = int if hint is int else (int, float)
        return lambda value: isinstance(value, numbers) and not isinstance(value, bool)
    assert isinstance(hint, type)
    return lambda value: isinstance(value, hint)


def _expected(hint: object) -> str:
    kind, parts = get_origin(hint), get_args(hint)
    if kind in (Union, UnionType):
        return " or ".join(map(_expected, parts))
    if kind is Literal:
        return f"one of {', '.join(parts)}"
    if kind in (tuple, Sequence):
        return {str: "a list of strings", int: "a list of integers"}.get(parts[0], "a list of objects")
    assert isinstance(hint, type)
    return "None" if hint is NoneType else KINDS.get(hint, f"a {hint.__name__}")
