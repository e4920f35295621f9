"""Kernels of numba: made once, kept where there is room, and told."""

from __future__ import annotations

import ctypes
import re
import runpy
from pathlib import Path
from typing import Any

import pytest
from numba import types

from dsbd_cli.engine.models.compiled import Compiler
from dsbd_cli.engine.models.lanes import get_i64, put_i32
from dsbd_cli.engine.models.native import Kernel

COMPILING = "compiling the kernels of tests"


def answer(kernel: Kernel) -> int:
    """Of a kernel that puts its answer into the third number."""
    arguments = (ctypes.c_int64 * 3)(0, 0, 0)
    kernel(arguments, 0, 1)  # type: ignore[arg-type]
    return arguments[2]


def made(source: str | Path) -> list[int]:
    """What kernels of both kinds answer."""
    names: dict[str, Any] = {"get_i64": get_i64, "put_i32": put_i32}
    if isinstance(source, Path):
        names = runpy.run_path(str(source), names)
    else:
        exec(source, names)
    compiled = Compiler("tests")
    counts = compiled(types.int64(types.int64))(names["more"])
    return [counts(3), answer(Kernel(compiled.addressed(names["put"]).address))]


KERNELS = """
def more(n):
    return n + 1

def put(at):
    put_i32(at + 16, get_i64(at) + 7)
"""


@pytest.fixture
def told(caplog: pytest.LogCaptureFixture) -> Any:
    return lambda: [record.getMessage() for record in caplog.records]


def test_what_is_compiled_is_told_once_and_kept(tmp_path: Path, told: Any, caplog: pytest.LogCaptureFixture) -> None:
    """Guards a silent wait, and a line about what is only loaded."""
    kernels = tmp_path / "kernels.py"
    kernels.write_text(KERNELS)
    for lines in ([COMPILING], []):
        caplog.clear()
        assert made(kernels) == [4, 7]
        assert told() == lines


def test_a_full_folder_costs_only_time(tmp_path: Path, told: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards a first forward that fails because the folder of compiled kernels is full, and a promise that nothing
    keeps."""

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("numba.core.caching.IndexDataCacheFile.save", full)
    kernels = tmp_path / "kernels.py"
    kernels.write_text(KERNELS)
    assert made(kernels) == [4, 7]
    assert told() == [
        COMPILING,
        "every run compiles the kernels of tests: they cannot be kept ([Errno 28] No space left on device)",
    ]


def test_no_folder_to_write_to_costs_only_time(told: Any) -> None:
    """Guards an install that nobody may write to."""
    assert made(KERNELS) == [4, 7]
    kept, compiling = told()
    assert re.fullmatch(r"every run compiles the kernels of tests: they cannot be kept \(cannot cache .*\)", kept)
    assert compiling == COMPILING
