"""Kernels of numba that are compiled when their file is imported, and kept on disk where that is possible."""

from __future__ import annotations

import contextlib
import itertools
import logging
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from llvmlite import binding
from numba import njit, types
from numba.core import caching
from numba.core.bytecode import FunctionIdentity
from numba.core.caching import FunctionCache
from numba.core.ccallback import CFunc
from numba.core.event import Event, Listener, install_listener
from numba.core.runtime import _nrt_python

from dsbd_cli.ops.cpu.runtime import distrust, folder_stamp
from dsbd_cli.ops.processor import current, on_amd

_logger = logging.getLogger(__name__)
_reasons: set[str] = set()  # why kernels cannot be kept, as far as a warning has said so
_told: set[str] = set()  # kernels, as `KernelCompiler.what` names them, whose compilation a warning has told


class KernelCompiler:
    """A maker of kernels from the functions of one file. It warns when the first of them is not found on disk and has
    to be compiled, and when they cannot be kept.

    what: what the kernels compute, for these warnings; files that are used together share it, and are told once.
    seconds: about how long it takes to compile them, all of these files. layout: a number that changes with the fields
    of the kernels' arguments.
    """

    def __init__(self, what: str, seconds: int, layout: int = 0) -> None:
        self.what, self._layout = what, layout
        self._kept, self._listener = True, _CompileListener(what, seconds)

    def __call__(self, signature: Any) -> Callable[[Any], Any]:
        """Return a decorator that makes a kernel with this signature, to be called from Python. It releases the GIL."""
        return lambda function: self._made(_called, signature, function, nogil=True)

    def addressed(self, function: Any) -> Any:
        """Make a kernel for `runtime.CpuKernel`: a function of the address of its arguments."""
        return self._made(_callback, types.void(types.int64), function)

    def _made(self, decorator: Any, signature: Any, function: Any, **options: Any) -> Any:
        options["error_model"] = "numpy"
        function.stamp = folder_stamp(), self._layout
        FunctionIdentity._unique_ids = _names_of(function)
        with install_listener("numba:run_pass", self._listener):
            if self._kept:
                try:
                    folder, source = Path(FunctionCache(function).cache_path), Path(function.__code__.co_filename)
                    if (reason := distrust(folder, source)) is not None:
                        raise OSError(reason)
                    with _alone(lock_of(folder, source)):
                        self._listener.folder = folder
                        return self._from_disk(decorator, signature, function, options)
                except (OSError, RuntimeError) as error:  # a full folder; no folder that numba may write to
                    self._kept, self._listener.folder = False, None
                    reason = " ".join(str(error).split())[:300]
                    if reason not in _reasons:  # one warning for a folder that is not trusted, not one per file
                        _reasons.add(reason)
                        _logger.warning(
                            "every run compiles the kernels of %s: they cannot be kept (%s)", self.what, reason
                        )
            return decorator(signature, **options)(function)

    def _from_disk(self, decorator: Any, signature: Any, function: Any, options: dict[str, Any]) -> Any:
        """Return a kernel that is kept on disk. Where its files are damaged, as after a power cut, it is made anew."""
        try:
            return decorator(signature, cache=True, **options)(function)
        except (OSError, RuntimeError):
            raise
        except Exception:  # whatever a damaged pickle raises
            _KernelCache(function).forget()
            return decorator(signature, cache=True, **options)(function)


def _names_of(function: Any) -> Iterator[int]:
    """Return the numbers that numba puts into the names of the functions of a kernel, beginning at one of its own.

    The names are weak symbols: a process uses the first function of a name for all of its kernels. numba counts from 1
    in each process, so kernels that two processes compiled would share names, and one would run parts of the other.
    """
    return itertools.count(zlib.crc32(f"{function.__module__}.{function.__qualname__}".encode()) << 20)


def _callback(signature: Any, *, cache: bool = False, **options: Any) -> Callable[[Any], Any]:
    """Return a decorator that does what numba.cfunc does. It loads kernels from disk without the registries of numba's
    compiler, which saves half a second."""

    def make(function: Any) -> Any:
        made: Any = CFunc(function, (signature.args, signature.return_type), locals={}, options=options)
        if cache:
            made._cache = _QuickCache(function)
        made.compile()
        return made

    return make


def _called(signature: Any, *, cache: bool = False, **options: Any) -> Callable[[Any], Any]:
    """Return a decorator that does what numba.njit does."""

    def make(function: Any) -> Any:
        made: Any = njit(**options)(function)
        if cache:
            made._cache = _KernelCache(function)
        made.compile(signature)
        made.disable_compile()
        return made

    return make


class _Files(caching.IndexDataCacheFile):  # type: ignore[misc]
    """The index of a kernel and its machine code.

    numba writes the index first. Where the disk is full, or the process is killed, before the machine code is written
    too, the index names a file of an older version of the kernel.
    """

    def save(self, key: Any, data: Any) -> None:
        """Write machine code, and then the index that names it. Raises OSError."""
        overloads = self._load_index()
        name = overloads.get(key) or self._data_name(len(overloads) + 1)
        self._save_data(name, data)
        self._save_index({**overloads, key: name})


class _KernelCache(FunctionCache):  # type: ignore[misc]
    """A cache of a kernel on disk."""

    def __init__(self, function: Any) -> None:
        super().__init__(function)
        self._cache_file: Any = _Files(
            self._cache_path, self._impl.filename_base, self._impl.locator.get_source_stamp()
        )

    def _index_key(self, sig: Any, codegen: Any) -> Any:
        """Return the key of a kernel. Its code depends on the processor, besides what LLVM makes of it."""
        return str(current()), on_amd(), super()._index_key(sig, codegen)

    def forget(self) -> None:
        """Drop the index, so that the kernel is compiled anew."""
        Path(self._cache_file._index_path).unlink(missing_ok=True)


class _QuickCache(_KernelCache):
    """A cache of kernels on disk that loads them without the registries of numba's compiler."""

    def load_overload(self, sig: Any, target_context: Any) -> Any:
        """Return the kernel of a signature, None where there is none."""
        for name, address in _nrt_python.c_helpers.items():  # an object file names these functions but calls none
            binding.add_symbol(name if name.startswith("_") else f"NRT_{name}", address)
        with self._guard_against_spurious_io_errors():
            return self._load_overload(sig, target_context)


class _Stamped:
    """A locator of numba for kernels of `KernelCompiler`. A kept kernel is used only while no file of this folder and
    no field of the kernel's arguments has changed."""

    def __init__(self, function: Any, file: str) -> None:
        super().__init__(function, file)  # type: ignore[call-arg]
        self._stamp = function.stamp

    def get_source_stamp(self) -> object:
        """Return the stamp of the folder and of the layout of the arguments."""
        return self._stamp

    @classmethod
    def from_function(cls, function: Any, file: str) -> Any:
        """Return the locator of a function of `KernelCompiler`; None for other functions."""
        parent: Any = super()
        return parent.from_function(function, file) if hasattr(function, "stamp") else None


def _stamped(locator: Any) -> Any:
    return type(f"Stamped{locator.__name__}", (_Stamped, locator), {})


caching.CacheImpl._locator_classes[:0] = map(
    _stamped, (caching.UserProvidedCacheLocator, caching.InTreeCacheLocator, caching.UserWideCacheLocator)
)


class _CompileListener(Listener):  # type: ignore[misc]
    """A listener that warns when numba compiles, which it does not do if the kernel is on disk.

    folder: where the kernels will be kept.
    """

    def __init__(self, what: str, seconds: int) -> None:
        self._what, self._seconds = what, seconds
        self.folder: Path | None = None

    def on_start(self, event: Event) -> None:
        if self._what not in _told:
            _told.add(self._what)
            kept = "" if self.folder is None else f"once, kept in {self.folder}, "
            _logger.warning("compiling the kernels of %s (%sabout %d s)", self._what, kept, self._seconds)

    def on_end(self, event: Event) -> None:
        pass


def lock_of(folder: Path, source: Path) -> Path:
    """Return the file that a process locks while it looks up, compiles and keeps the kernels of a source file."""
    return folder / f"dsbd-{source.stem}.lock"


@contextlib.contextmanager
def _alone(lock: Path) -> Iterator[None]:
    """Keep other processes from reading or writing the kernels of one source file.

    numba names a kernel's file by counting those that it has found. So of two processes that begin at once, one would
    overwrite a file that the other's index names, perhaps with a kernel for another processor that shares the folder.
    """
    try:
        import fcntl
    except ImportError:  # Windows
        yield
        return
    with lock.open("ab") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
