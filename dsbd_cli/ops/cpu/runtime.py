"""Kernels compiled by numba, as the rest of the package sees them: loading, arguments and threads.

numba is imported when the first kernel is loaded, not before.
"""

from __future__ import annotations

import atexit
import ctypes
import functools
import importlib
import importlib.util
import logging
import os
import platform
import stat
import subprocess
import sys
import threading
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dsbd_cli.ops.processor import ON_ARM, Processor, current

SMALL = 2**18  # a call of fewer multiplications runs on one thread: waking another would take longer
# system call arch_prctl of Linux on x86, its request for the permission to use registers, and the number of the tile
# registers (kernel documentation, x86/xstate)
ARCH_PRCTL, REQUEST_REGISTERS, TILE_REGISTERS = 158, 0x1023, 18

KERNELS = Path(__file__).parent / "kernels"
FLOATS = (torch.float32, torch.bfloat16)  # that our kernels compute with
# First fields of the arguments of a product (see `product` of simd.py and `Parts` of linear.py). routes: address of the
# table of `reference.Routes`, where each row has an expert, whose `blocks` blocks it is multiplied by; 0: it has all.
PRODUCT = ("taken", "threads", "items", "rows", "chunk", "blocks", "share", "sums", "sums_bytes", "routes")

_logger = logging.getLogger(__name__)


def fields(*names: str) -> tuple[tuple[str, type[ctypes.c_int64]], ...]:
    """Return int64 fields of these names, for a structure of sizes, addresses and strides in bytes."""
    return tuple((name, ctypes.c_int64) for name in names)


def offsets(kind: type[ctypes.Structure]) -> tuple[int, ...]:
    return tuple(getattr(kind, field[0]).offset for field in kind._fields_)


def layout(*kinds: type[ctypes.Structure], constants: tuple[object, ...] = ()) -> int:
    """Return a number that changes with the fields of structures, and with constants that kernels compute with."""
    return zlib.crc32(repr([constants, *((kind._fields_, offsets(kind)) for kind in kinds)]).encode())


def flattened(x: Tensor) -> tuple[Tensor, int, int]:
    """Return x as [m, width] without gaps inside its rows, m, and the distance from one row to the next in numbers."""
    assert x.is_cpu
    width = x.shape[-1]
    flat = x.reshape(-1, width)
    row, step = flat.stride()
    if step != 1:
        flat, row = flat.contiguous(), width
    return flat, flat.shape[0], row


@functools.lru_cache(1024)
def shares(rows: int, threads: int) -> tuple[int, int]:
    """Return the number of parts that threads take, and the rows of each part."""
    share = max(1, -(-rows // (4 * threads)))
    return -(-rows // share), share


class CpuKernel:
    """A compiled kernel that runs on torch's threads. Its arguments begin with two counters, which must be 0 at the
    start: the items that threads have taken, and the threads that have begun."""

    def __init__(self, address: int) -> None:
        self.address, self._team = address, team()
        self._call = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(address)

    def __call__(self, arguments: ctypes.Structure, work: int, items: int) -> None:
        """Run the kernel. work: multiplications, about. items: parts that threads can take."""
        threads = self.threads(work, items)
        if threads == 1 or self._team is None:
            self.run_here(arguments)
        else:
            self._team(self.address, ctypes.addressof(arguments), threads, 0)

    def threads(self, work: int, items: int) -> int:
        """Return how many threads a call uses."""
        return 1 if work < SMALL or self._team is None else min(torch.get_num_threads(), items)

    def run_here(self, arguments: ctypes.Structure) -> None:
        """Run the kernel on this thread alone."""
        self._call(ctypes.addressof(arguments))


def kernels(module: str, *names: str) -> list[CpuKernel]:
    """Return kernels of a module of `kernels`, which compiles them at its first import (kernels/compiler.py)."""
    module_of_kernels = importlib.import_module(f"{__package__}.kernels.{module}")
    return [CpuKernel(getattr(module_of_kernels, name).address) for name in names]


@functools.cache
def folder_stamp() -> int:
    """Return a checksum of the files of the kernels, which is the same for all line endings."""
    files = sorted(KERNELS.glob("*.py"))
    return zlib.crc32("".join(f"{file.name}\n{file.read_text(encoding='utf-8')}" for file in files).encode())


def compiled_folder() -> Path:
    """Return the folder where numba keeps the kernels if it may write there, and nothing names another."""
    return KERNELS / "__pycache__"


def compile_beside(module: str) -> None:
    """Begin to compile the kernels of a module in a process of their own, unless that has been done or they cannot be
    kept. `kernels` waits for those that it is compiling."""
    folder = compiled_folder()
    done = folder / f"dsbd-{module}-{current()}-{folder_stamp()}-{sys.implementation.cache_tag}.done"
    if done.exists() or not _may_keep(folder):
        return
    paths = [path for path in sys.path if isinstance(path, str)]  # what is no string means nothing to an import
    code = f"import sys; sys.path[:] = {paths!r}; import {__package__}.kernels.{module}"
    code += f"; from pathlib import Path; Path({str(done)!r}).touch()"
    nothing = subprocess.DEVNULL
    try:
        child = subprocess.Popen([sys.executable, "-P", "-c", code], stdin=nothing, stdout=nothing, stderr=nothing)
    except OSError:  # no memory, no interpreter: this process will compile them
        return
    threading.Thread(target=child.wait, daemon=True).start()
    atexit.register(child.kill)


def _may_keep(folder: Path) -> bool:
    """Return whether kernels can run here and be kept in this folder, and a second process finds them there."""
    elsewhere = "NUMBA_CACHE_DIR" in os.environ or Path(".numba_config.yaml").exists()
    able = (
        (current() >= Processor.AVX2 or ON_ARM)
        and importlib.util.find_spec("numba") is not None
        and hasattr(os, "getuid")
    )
    if elsewhere or not able or not sys.executable:
        return False
    if not folder.is_dir():
        return os.access(folder.parent, os.W_OK)
    return os.access(folder, os.W_OK) and distrust(folder, KERNELS / "compiler.py") is None


def distrust(folder: Path, source: Path) -> str | None:
    """Return why the compiled kernels of this folder cannot be trusted; None where they can.

    numba reads them as pickles, which can run any code, so whoever may write to the folder may run code here. source:
    the file of the kernels. Its owner, and its group if that may write to it, could run code here anyway.
    """
    if not hasattr(os, "getuid"):  # a system without owners
        return None
    source_status = source.stat() if source.exists() else None
    owners = {0, os.getuid(), *(() if source_status is None else (source_status.st_uid,))}
    groups = {source_status.st_gid} if source_status is not None and source_status.st_mode & stat.S_IWGRP else set()
    for file in (folder, *sorted(folder.glob("*.nb[ci]"))):
        status = file.stat()
        own = status.st_gid in groups or _private(status.st_gid)
        writers = stat.S_IWOTH if own else stat.S_IWOTH | stat.S_IWGRP
        if status.st_uid not in owners:
            return f"{file} belongs to another user: remove it, or name a folder of your own by NUMBA_CACHE_DIR"
        if status.st_mode & writers:
            return f"{file} may be written by others: chmod go-w {file}"
    return None


def _private(group: int) -> bool:
    """Return whether a group is this user's own. It has the user's name where each user gets a group."""
    import grp
    import pwd

    try:
        return bool(grp.getgrgid(group).gr_name == pwd.getpwuid(os.getuid()).pw_name)
    except KeyError:  # a container that knows no names
        return False


@functools.cache
def team() -> Callable[..., object] | None:
    """Return GOMP_parallel of the OpenMP library that torch itself runs on, so that one team of threads serves both;
    None where that library has no such function (macOS)."""
    for library in sorted((Path(torch.__file__).parent / "lib").glob("libtorch_cpu.*")):
        try:
            parallel = ctypes.CDLL(str(library)).GOMP_parallel  # looked up in what the library depends on, too
        except (OSError, AttributeError):
            return None
        parallel.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint)
        parallel.restype = None
        return parallel
    return None


@functools.cache
def team_address() -> int:
    """Return the address of `team`; 0 where there is none."""
    parallel: Any = team()
    return 0 if parallel is None else ctypes.cast(parallel, ctypes.c_void_p).value or 0


@functools.cache
def may_use_matrix_units() -> bool:
    """Ask Linux to save the registers of matrix units for this process, and return whether it does."""
    if current() != Processor.AMX or platform.system() != "Linux":
        return False
    return int(ctypes.CDLL(None).syscall(ARCH_PRCTL, REQUEST_REGISTERS, TILE_REGISTERS)) == 0


def unloadable(load: Callable[[], object], instead: str) -> str | None:
    """Return why kernels of numba cannot be loaded; None where they are.

    A warning says what happens `instead` where they cannot be loaded. One cause: numba refuses to be imported together
    with a numpy that is newer than it supports.
    """
    try:
        load()
    except Exception as error:  # of numba, llvmlite or the system
        message = " ".join(f"{type(error).__name__}: {error}".split())[:160]
        _logger.warning("%s, because the kernels cannot be loaded (%s)", instead, message)
        return f"the kernels cannot be loaded ({message})"
    return None
