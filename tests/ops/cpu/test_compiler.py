"""Kernels of numba: made once, kept where there is room, and told."""

from __future__ import annotations

import ctypes
import json
import os
import re
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from numba import types
from numba.core.caching import IndexDataCacheFile

from dsbd_cli.ops.cpu import runtime
from dsbd_cli.ops.cpu.kernels import compiler as compiled
from dsbd_cli.ops.cpu.kernels.compiler import KernelCompiler, lock_of
from dsbd_cli.ops.cpu.kernels.simd import get_i64, put_i32
from dsbd_cli.ops.cpu.runtime import CpuKernel, compile_beside, compiled_folder, distrust
from dsbd_cli.ops.processor import VARIABLE, Processor, on_amd, possible

ROOT = Path(__file__).parents[3]
COMPILING = "compiling the kernels of tests (about 1 s)"


def answer(kernel: CpuKernel) -> int:
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
    compiled._told.clear()  # as in another process
    compiler = KernelCompiler("tests", seconds=1)
    counts = compiler(types.int64(types.int64))(names["more"])
    return [counts(3), answer(CpuKernel(compiler.addressed(names["put"]).address))]


KERNELS = """
def more(n):
    return n + 1

def put(at):
    put_i32(at + 16, get_i64(at) + 7)
"""


@pytest.fixture(autouse=True)
def _nothing_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiled, "_reasons", set())
    monkeypatch.setattr(compiled, "_told", set())


@pytest.fixture
def told(caplog: pytest.LogCaptureFixture) -> Any:
    return lambda: [record.getMessage() for record in caplog.records]


def test_what_is_compiled_is_told_once_and_kept(tmp_path: Path, told: Any, caplog: pytest.LogCaptureFixture) -> None:
    """Guards a silent wait, and a line about what is only loaded."""
    kernels = tmp_path / "kernels.py"
    kernels.write_text(KERNELS)
    once = f"compiling the kernels of tests (once, kept in {tmp_path / '__pycache__'}, about 1 s)"
    for lines in ([once], []):
        caplog.clear()
        assert made(kernels) == [4, 7]
        assert told() == lines


def test_files_that_share_a_name_are_told_once(tmp_path: Path, told: Any) -> None:
    """Guards a line for each file of the kernels of recurrent layers."""
    for name in ("first", "second"):
        source = tmp_path / f"{name}.py"
        source.write_text("def more(n):\n    return n + 1\n")
        kernel = KernelCompiler("tests", seconds=1)(types.int64(types.int64))(runpy.run_path(str(source))["more"])
        assert kernel(3) == 4
    assert told() == [f"compiling the kernels of tests (once, kept in {tmp_path / '__pycache__'}, about 1 s)"]


def test_a_full_folder_costs_only_time(tmp_path: Path, told: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards a first forward that fails because the folder of compiled kernels is full, and a promise that nothing
    keeps."""

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(compiled._Files, "save", full)
    kernels = tmp_path / "kernels.py"
    kernels.write_text(KERNELS)
    assert made(kernels) == [4, 7]
    once = f"compiling the kernels of tests (once, kept in {tmp_path / '__pycache__'}, about 1 s)"
    assert told() == [
        once,
        "every run compiles the kernels of tests: they cannot be kept ([Errno 28] No space left on device)",
    ]


def test_a_write_that_failed_leaves_no_old_kernel_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards the machine code of an older version, which has the same name: it ran in place of the new one, if the disk
    was full when that was to be written."""
    kernels = tmp_path / "kernels.py"
    kernels.write_text(KERNELS)
    assert made(kernels) == [4, 7]
    kernels.write_text(KERNELS.replace("+ 1\n", "+ 2\n").replace("+ 7)", "+ 8)"))
    monkeypatch.setattr(compiled, "folder_stamp", lambda: 1)  # as when a file of kernels has changed

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(IndexDataCacheFile, "_save_data", full)
        assert made(kernels) == [5, 8]
    assert made(kernels) == [5, 8]


@pytest.mark.parametrize("kind", ["nbi", "nbc"])
def test_damaged_files_are_made_anew(kind: str, tmp_path: Path, told: Any, caplog: pytest.LogCaptureFixture) -> None:
    """As a power cut leaves them."""
    kernels = tmp_path / "kernels.py"
    kernels.write_text(KERNELS)
    assert made(kernels) == [4, 7]
    for file in (tmp_path / "__pycache__").glob(f"*.{kind}"):
        file.write_bytes(b"")
    assert made(kernels) == [4, 7]
    caplog.clear()
    assert made(kernels) == [4, 7]
    assert told() == []


def test_no_folder_to_write_to_costs_only_time(told: Any) -> None:
    """Guards an install that nobody may write to."""
    assert made(KERNELS) == [4, 7]
    kept, compiling = told()
    assert re.fullmatch(r"every run compiles the kernels of tests: they cannot be kept \(cannot cache .*\)", kept)
    assert compiling == COMPILING


@pytest.mark.parametrize("fault", ["folder", "index", "kernel"])
def test_a_cache_that_others_may_write_to_is_not_read(fault: str, tmp_path: Path, told: Any) -> None:
    """numba's index is a pickle. Guards code of another user that runs as this one."""
    kernels, kept = tmp_path / "kernels.py", tmp_path / "__pycache__"
    kernels.write_text(KERNELS)
    made(kernels)
    open_one = {"folder": kept, "index": min(kept.glob("*.nbi")), "kernel": min(kept.glob("*.nbc"))}[fault]
    for index in kept.glob("*.nbi"):
        index.write_bytes(b"never read")
    open_one.chmod(0o777)
    assert made(kernels) == [4, 7]
    refused = f"{open_one} may be written by others: chmod go-w {open_one}"
    assert told()[1:] == [
        f"every run compiles the kernels of tests: they cannot be kept ({refused})",
        COMPILING,
    ]
    assert {index.read_bytes() for index in kept.glob("*.nbi")} == {b"never read"}
    made(kernels)
    assert told()[3:] == [COMPILING], "the reason is told once"


def test_a_cache_of_another_user_is_not_trusted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source, folder = tmp_path / "code" / "kernels.py", tmp_path / "cache"
    source.parent.mkdir()
    source.write_text("")
    folder.mkdir(mode=0o755)
    assert distrust(folder, source) is None
    stat: Any = Path.stat

    def owned(path: Path, **options: Any) -> Any:
        values = list(stat(path, **options))
        values[4] = 4242 if path == folder else 0
        return os.stat_result(values)

    monkeypatch.setattr(Path, "stat", owned)
    reason = f"{folder} belongs to another user: remove it, or name a folder of your own by NUMBA_CACHE_DIR"
    assert distrust(folder, source) == reason


def test_a_group_that_may_write_the_code_may_write_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A shared installation of a team; guards a run that compiles again where that protects nothing."""
    monkeypatch.setattr(runtime, "_private", lambda group: False)
    source, folder = tmp_path / "kernels.py", tmp_path / "__pycache__"
    source.write_text("")
    folder.mkdir()
    folder.chmod(0o775)
    source.chmod(0o664)
    assert distrust(folder, source) is None
    source.chmod(0o644)
    assert distrust(folder, source) == f"{folder} may be written by others: chmod go-w {folder}"


def test_kernels_are_looked_up_and_kept_by_one_process_at_a_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards two first starts at once: numba counts the files that it finds, so one process would overwrite a kernel
    that the other's index names."""
    fcntl = pytest.importorskip("fcntl")
    held: list[bool] = []
    kernels = tmp_path / "kernels.py"
    kernels.write_text(KERNELS)

    def noting(name: str) -> None:
        real = getattr(IndexDataCacheFile, name)

        def noted(file: Any, *arguments: Any) -> Any:
            with lock_of(tmp_path / "__pycache__", kernels).open("ab") as other:
                try:
                    fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    held.append(False)
                except BlockingIOError:
                    held.append(True)
            return real(file, *arguments)

        monkeypatch.setattr(IndexDataCacheFile, name, noted)

    noting("load")
    noting("save")
    made(kernels)
    made(kernels)
    assert held
    assert all(held)


PARTS = """
import os
import sys
from numba import njit
from dsbd_cli.ops.cpu.kernels.compiler import KernelCompiler
from dsbd_cli.ops.cpu.kernels.simd import get_i64, put_i64
from dsbd_cli.ops.cpu.runtime import CpuKernel
from tests.ops.cpu.test_compiler import answer

def part(value):
    def work(at):
        LINES

    return njit(work)

first, second = part(1), part(2)

def one(at):
    first(at)

def two(at):
    second(at)

for names in sys.argv[1:]:
    child = os.fork()
    if child:
        _, ended = os.waitpid(child, 0)
        assert ended == 0
        continue
    compiler = KernelCompiler("tests", seconds=1)
    print([answer(CpuKernel(compiler.addressed(globals()[name]).address)) for name in names.split()], flush=True)
    break
""".replace("LINES", "\n        ".join(f"put_i64(at + 16, (get_i64(at + 16) ^ {n}) * 3 + value)" for n in range(99)))


def test_kernels_of_two_processes_do_not_share_their_parts(tmp_path: Path) -> None:
    """Guards wrong numbers: a closure of a kernel that one run compiled, and one of the same name of another run's.

    Each line of answers comes from a process of its own, forked when everything is imported and nothing compiled.
    """
    kernels = tmp_path / "kernels.py"
    kernels.write_text(PARTS)
    ran = subprocess.run(
        [sys.executable, kernels, "one", "two", "one two", "two one"],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=True,
    )
    (one,), (two,), together, turned = (json.loads(line) for line in ran.stdout.splitlines())
    assert one != two
    assert (together, turned) == ([one, two], [two, one])


@pytest.mark.parametrize("name", ["coverage.py", "coverage/report.html"])
def test_a_program_may_have_files_named_coverage(name: str, tmp_path: Path) -> None:
    """Guards all kernels: numba cannot be imported where such a file, or folder, takes the place of the package."""
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).touch()
    code = """
import dsbd_cli.ops.cpu.kernels.simd, coverage, sys
print(coverage.__path__[0] if hasattr(coverage, "__path__") else coverage.__file__, "numba" in sys.modules)
"""
    ran = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert ran.stdout.split() == [str(tmp_path / Path(name).parts[0]), "True"]


AVX2 = "+avx,+avx2,+bmi,+bmi2,+f16c,+fma,+lzcnt,+popcnt,+sse,+sse2,+sse3,+sse4.1,+sse4.2,+ssse3,+xsave"
AVX512 = f"{AVX2},+avx512f,+avx512bw,+avx512cd,+avx512dq,+avx512vl"
PROCESSORS = {
    "haswell": ("avx2", AVX2),
    "alderlake": ("avx2_vnni", f"{AVX2},+avxvnni"),
    "skylake-avx512": ("avx512", AVX512),
    "cascadelake": ("avx512_vnni", f"{AVX512},+avx512vnni"),
    "znver4": ("avx512_bf16", f"{AVX512},+avx512vnni,+avx512bf16"),
    "cooperlake": ("avx512_bf16", f"{AVX512},+avx512vnni,+avx512bf16"),
    "sapphirerapids": ("amx", f"{AVX512},+avx512vnni,+avx512bf16,+amx-tile,+amx-bf16,+amx-int8"),
}
# tests/ops/test_kernels.py runs the others here; the instructions of its tiles are those of AMD's
ELSEWHERE = [
    name
    for name, (word, _) in PROCESSORS.items()
    if Processor[word.upper()] not in possible() or (name == "znver4" and not on_amd())
]
COMPILE_ALL = """
import importlib
import os
import sys
from pathlib import Path
from dsbd_cli.ops import processor

flags = [flag.strip("+") for flag in os.environ["NUMBA_CPU_FEATURES"].split(",")]
facts = frozenset(map(processor.plain, flags)), os.environ["NUMBA_CPU_NAME"].startswith("znver")
processor._facts = lambda: facts
print(processor.current())
from dsbd_cli.ops.cpu import kernels  # which tells numba
for file in sorted(Path(kernels.__file__).parent.glob("*.py")):
    if "from dsbd_cli.ops.processor import" in file.read_text():
        importlib.import_module(f"{kernels.__name__}.{file.stem}")
"""


@pytest.mark.parametrize("name", ELSEWHERE)
def test_kernels_compile_for_every_processor(name: str, tmp_path: Path) -> None:
    """Guards processors that the one at hand cannot be: LLVM ends the process at an instruction that the processor
    lacks, as it did for the matrix units of others. Nothing of what is compiled is run. Files that do not ask for the
    processor use the same instructions on all."""
    processor, flags = PROCESSORS[name]
    kept = {"NUMBA_CPU_NAME": name, "NUMBA_CPU_FEATURES": flags, "NUMBA_CACHE_DIR": str(tmp_path)}
    command = [
        sys.executable,
        "-c",
        COMPILE_ALL,
    ]
    env = {**os.environ, **kept, VARIABLE: ""}
    done = subprocess.run(command, env=env, cwd=ROOT, capture_output=True, text=True, check=False, timeout=600)
    assert (done.returncode, done.stdout.split()) == (0, [processor]), done.stderr[-2000:]
    assert any(tmp_path.rglob("*.nbc")), "the kernels of this folder were taken, not compiled"


def test_kernels_that_were_never_compiled_are_compiled_beside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Until that has been done once. Guards a child that runs files of the current folder."""
    begun: list[list[str]] = []

    class Child:
        def __init__(self, command: list[str], **_: Any) -> None:
            begun.append(command)

        def kill(self) -> None: ...

        def wait(self) -> None: ...

    folder = tmp_path / "kept" / "__pycache__"
    folder.mkdir(parents=True)
    monkeypatch.setattr(runtime, "compiled_folder", lambda: folder)
    monkeypatch.delenv("NUMBA_CACHE_DIR", raising=False)
    with monkeypatch.context() as replaced:
        replaced.setattr(runtime.subprocess, "Popen", Child)
        compile_beside("linear")
    (command,) = begun
    (tmp_path / "numba.py").write_text("raise SystemExit(3)")
    subprocess.run(command, check=True, cwd=tmp_path, timeout=100)
    monkeypatch.setattr(runtime.subprocess, "Popen", lambda *_, **__: pytest.fail("it has been done"))
    compile_beside("linear")


def cannot_start(*_: object, **__: object) -> None:
    raise BlockingIOError


@pytest.mark.parametrize("why", ["another folder", "others may write", "no process", "no numba"])
def test_kernels_that_would_not_be_kept_are_not_compiled_beside(
    why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "__pycache__"
    folder.mkdir()
    monkeypatch.setattr(runtime, "compiled_folder", lambda: folder)
    monkeypatch.delenv("NUMBA_CACHE_DIR", raising=False)
    waited: list[object] = []
    monkeypatch.setattr(runtime.atexit, "register", waited.append)
    monkeypatch.setattr(
        runtime.subprocess, "Popen", cannot_start if why == "no process" else lambda *_, **__: pytest.fail("a child")
    )
    if why == "another folder":
        monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path))
    elif why == "others may write":
        folder.chmod(0o777)
    elif why == "no numba":
        monkeypatch.setattr(runtime.importlib.util, "find_spec", lambda name: None)
    compile_beside("linear")
    assert not waited


def test_the_folder_of_compiled_kernels_is_the_one_that_has_them() -> None:
    made = runtime.kernels("layer", "run")
    assert made
    if "NUMBA_CACHE_DIR" not in os.environ and os.access(compiled_folder().parent, os.W_OK):
        assert list(compiled_folder().glob("layer.*.nbi"))
