"""A trial of the kernels on this device, once per machine and before anything relies on them: each is compared with its
reference.

On a GPU a kernel that reads or writes out of bounds makes every later call of its process fail. So the trial is a
process of its own, which prints a line per kernel. Where it dies, the kernel that it was trying is to blame, and
another process tries the others. The results are kept for the versions and the device that they were found with, unless
they may come from a passing state of the machine.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib
import json
import logging
import os
import queue
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import IO

import torch

from dsbd_cli.ops.triton import KernelCheck, available, differences
from dsbd_cli.user_cache import cache_folder, write_whole

# Each module has a tuple KERNELS. The last one is in a higher package, where the references of an iteration's kernels
# are, so it is imported by name alone.
MODULES = (
    "dsbd_cli.ops.triton.layers",
    "dsbd_cli.ops.triton.products",
    "dsbd_cli.ops.triton.attention",
    "dsbd_cli.engine.checks.kernels",
)
LIMIT_S = 120.0  # for one kernel, which compiles in seconds, and for the start of the process
TOTAL_S = 300.0  # for all of them: half a minute of compiling, on a processor core of today
CAPABILITY = (8, 0)  # of a GPU at least: triton is made for these
MAX_ERROR_CHARS = 160  # characters of an error that are kept
HANGS = "does not end within"  # in the fault of a kernel that ran past its time
SLOW_START = "does not start within"  # in that of a process which printed nothing in time: the machine was busy
# parts of faults that may be gone the next time: memory was short, the device was in use by others, the process did not
# start, a compiler was missing
PASSING = (
    "out of memory",
    "busy or unavailable",
    "cannot be tried",
    "was not tried",
    "C compiler",
    "CalledProcessError",
)


def kernels() -> dict[str, KernelCheck]:
    """Return all kernels by name. Imports triton."""
    modules = (importlib.import_module(name) for name in MODULES)
    return {kernel.name: kernel for module in modules for kernel in module.KERNELS}


def tried(kernel: KernelCheck, device: torch.device) -> str | None:
    """Try a kernel on a device. Return what is wrong with it, in one line; None where its results are those of
    its reference."""
    try:
        with torch.inference_mode():
            for difference in differences(kernel, device):
                return f"differs from the tensor code: {difference}"
            if device.type == "cuda":
                torch.cuda.synchronize(device)
    except Exception as error:
        text = " ".join(f"{type(error).__name__}: {error}".split())
        return f"fails: {text[:MAX_ERROR_CHARS]}"
    return None


@functools.cache
def faults(device: torch.device, command: tuple[str, ...] | None = None) -> dict[str, str]:
    """Return the kernels that must not run on a device, each with the reason; nothing where all may run.

    command: runs the trial in another process; None: that of this module.
    """
    if not available():
        return {}  # none runs
    if device.type == "cuda" and (has := torch.cuda.get_device_capability(device)) < CAPABILITY:
        needed, own = (".".join(map(str, pair)) for pair in (CAPABILITY, has))
        return dict.fromkeys(kernels(), f"needs a GPU of compute capability {needed}, and this one has {own}")
    file = _results_file(device)
    try:
        faults_by_name: dict[str, str] = json.loads("" if file is None else file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        kept = os.environ.get("TRITON_CACHE_DIR") or os.path.expanduser("~/.triton/cache")
        logging.getLogger("dsbd_cli").warning(
            "compiling %d GPU kernels (once, %.0f minutes at most; kept in %s)", len(kernels()), TOTAL_S / 60, kept
        )
        faults_by_name = _try_all(device, command or (sys.executable, "-P", "-m", __name__, str(device)))
        passing = any(word in fault for fault in faults_by_name.values() for word in PASSING)
        hung = any(HANGS in fault for fault in faults_by_name.values())  # every load would wait again
        if file is not None and (hung or not passing):
            _write_results(file, faults_by_name)
    return faults_by_name


def _try_all(device: torch.device, command: Sequence[str]) -> dict[str, str]:
    left, faults_by_name, deadline = list(kernels()), dict[str, str](), time.monotonic() + TOTAL_S
    while left:
        results, end = _run([*command, *left], deadline)
        for line in results:
            name, fault = line
            if name in left:
                left.remove(name)
                if fault is not None:
                    faults_by_name[name] = fault
        if left and time.monotonic() >= deadline:
            faults_by_name |= dict.fromkeys(left, f"was not tried: all of them together took {TOTAL_S:.0f} s")
            break
        if left and end is not None and not results:  # the process did not start: what all kernels need is missing
            faults_by_name |= dict.fromkeys(left, f"cannot be tried, its process {end}")
            break
        if left and end is not None:
            faults_by_name[left.pop(0)] = end
        elif left:
            faults_by_name |= dict.fromkeys(left, "was not tried")
            break
    return faults_by_name


def _run(command: Sequence[str], deadline: float) -> tuple[list[tuple[str, str | None]], str | None]:
    """Run another process until `deadline`, a moment of time.monotonic, in seconds. Return the names and faults that it
    prints, and how it ended if it failed."""
    results: list[tuple[str, str | None]] = []
    with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as errors:
        # the same packages as here: this process may have other folders to import from, in another order
        paths = os.pathsep.join(path or os.getcwd() for path in sys.path if isinstance(path, str))
        environment = os.environ | {"PYTHONPATH": paths}
        try:
            process = subprocess.Popen(
                command, stdout=subprocess.PIPE, stderr=errors, text=True, errors="replace", env=environment
            )
        except OSError as failed:
            return results, f"cannot be tried: {failed.strerror}"
        lines: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        reader = threading.Thread(target=_read, args=(process.stdout, lines), daemon=True)
        reader.start()
        line_deadline = min(deadline, time.monotonic() + LIMIT_S)
        try:
            while True:
                try:
                    line = lines.get(timeout=max(0.0, line_deadline - time.monotonic()))
                except queue.Empty:
                    return results, f"{HANGS if results else SLOW_START} {LIMIT_S:.0f} s"
                if line is None:
                    break
                try:
                    name, fault = json.loads(line)
                except (TypeError, ValueError):  # a line that a library printed
                    continue
                results.append((str(name), None if fault is None else str(fault)))
                line_deadline = min(deadline, time.monotonic() + LIMIT_S)
            code = process.wait()
        finally:  # where it hangs, or this process is interrupted
            process.kill()
            process.wait()
        errors.seek(0)
        return results, None if code == 0 else _exit_fault(errors.read(), code)


def _read(stream: IO[str] | None, lines: queue.SimpleQueue[str | None]) -> None:
    """Put all lines of a stream into a queue, then None."""
    assert stream is not None
    with stream:
        for line in stream:
            lines.put(line)
    lines.put(None)


def _exit_fault(text: str, code: int) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return f"ends its process (exit {code}): {lines[-1][:MAX_ERROR_CHARS] if lines else 'nothing was said'}"


def _results_file(device: torch.device) -> Path | None:
    """Return the file that keeps the results for these versions and kernels and this device; None for a user without a
    home."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    parts = [name, str(torch.__version__), _version("triton"), *(_text(path) for path in _modules())]
    key = hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]
    with contextlib.suppress(FileNotFoundError):
        return cache_folder() / f"kernels-{key}.json"
    return None


def _modules() -> list[Path]:
    """Return the files that kernels, their cases and their references are made from."""
    package = Path(__file__).parents[2]
    return sorted(path for folder in ("engine", "ops") for path in (package / folder).rglob("*.py"))


def _text(path: Path) -> str:
    return path.read_text(encoding="utf-8")


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "none"


def _write_results(file: Path, faults_by_name: dict[str, str]) -> None:
    """Write the results for the next run. Where nothing can be written, that run tries the kernels again."""
    with contextlib.suppress(OSError):
        write_whole(file, json.dumps(faults_by_name).encode())


def _main(arguments: Sequence[str]) -> None:
    """Try the kernels of the arguments DEVICE NAME... and print a line of JSON for each, [name, fault or null], as soon
    as it is tried. A first line without a name says that kernels and device are available."""
    device, every = torch.device(arguments[0]), kernels()
    torch.zeros(1, device=device)
    sys.stdout.write(json.dumps(["", None]) + "\n")
    sys.stdout.flush()
    for name in arguments[1:]:
        sys.stdout.write(json.dumps([name, tried(every[name], device)]) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    _main(sys.argv[1:])
