"""Kernels run in triton's interpreter here, unless there is a GPU (see tests/conftest.py)."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from unittest.mock import patch

import pytest

pytest.importorskip("triton", reason="triton is not installed", exc_type=ImportError)

import triton.language as tl
from triton.runtime import interpreter

from tests.helpers.interpreter import own_products

__all__ = ["own_products"]


def _patched_once(real: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """triton's `_patch_lang` without its repetitions. The interpreter puts its functions in the place of the language's
    at a launch, takes them back at its end, and looks through the whole language again at every call of a function of a
    kernel, where everything is in its place already."""
    done: set[frozenset[int]] = set()

    @functools.cache
    def languages(function: Any) -> frozenset[int]:
        return frozenset(id(value) for value in function.__globals__.values() if value is tl or value is tl.core)

    def call(function: Any) -> Any:
        if languages(function) in done:
            return interpreter._LangPatchScope()
        done.add(languages(function))
        scope = real(function)
        restore = scope.restore

        def restored() -> None:
            done.clear()
            restore()

        scope.restore = restored
        return scope

    return call


def _remembered(real: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """triton's `_get_np_dtype`, which makes its whole table at each call; a block has the type of its elements."""
    types: dict[str, Any] = {}

    def call(kind: Any) -> Any:
        name = kind.scalar.name
        if name not in types:
            types[name] = real(kind)
        return types[name]

    return call


def _shaped_once(shape: Sequence[Any], shapes: dict[tuple[int, ...], Any], make: Callable[[], Any]) -> Any:
    """What belongs to a shape, made once. shape: of integers, or of constants that stand for them."""
    key = tuple(size.value if isinstance(size, tl.constexpr) else size for size in shape)
    if key not in shapes:
        shapes[key] = make()
    return shapes[key]


def _typed_once(real: Callable[..., None]) -> Callable[..., None]:
    """triton's `block_type.__init__`, which checks and spells a shape at each call."""
    shapes: dict[tuple[int, ...], Any] = {}

    def call(self: Any, element_ty: Any, shape: Any) -> None:
        def make() -> tuple[Any, int, str]:
            real(self, element_ty, shape)
            return self.shape, self.numel, str(self.shape)

        self.shape, self.numel, text = _shaped_once(shape, shapes, make)
        self.element_ty, self.name = element_ty, f"<{text}, {element_ty}>"

    return call


def _constants_once(real: Callable[..., None]) -> Callable[..., None]:
    """triton's `tensor.__init__`, which makes constants of a shape at each call."""
    shapes: dict[tuple[int, ...], Any] = {}

    def call(self: Any, handle: Any, type: Any) -> None:
        def make() -> tuple[Any, Any]:
            real(self, handle, type)
            return self.shape, self.numel

        self.handle, self.type, self.dtype = handle, type, type.scalar
        self.shape, self.numel = _shaped_once(type.shape if type.is_block() else (), shapes, make)

    return call


@pytest.fixture(scope="session", autouse=True)
def _fewer_repetitions() -> Iterator[None]:
    """Most of the interpreter's time goes to finding out the same again."""
    with (
        patch.object(interpreter, "_patch_lang", _patched_once(interpreter._patch_lang)),
        patch.object(interpreter, "_get_np_dtype", _remembered(interpreter._get_np_dtype)),
        patch.object(tl.block_type, "__init__", _typed_once(tl.block_type.__init__)),
        patch.object(tl.tensor, "__init__", _constants_once(tl.tensor.__init__)),
    ):
        yield
