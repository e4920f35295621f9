"""Markers and limits that hold for every test."""

from __future__ import annotations

import contextlib
import gc
import logging
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from tests.helpers.every_process import written_lines

written_lines.watch()

# kernels run in triton's interpreter, which must be asked for before triton is imported
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"

# a shell without job control starts background jobs with interrupts ignored, which all children inherit
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

with contextlib.suppress(ModuleNotFoundError):  # GPU machines run a few files that do not need it
    from hypothesis import HealthCheck, settings

    # The same cases on every run, and no verdict by the clock of a busy machine.
    settings.register_profile("steady", derandomize=True, deadline=None, suppress_health_check=[HealthCheck.too_slow])
    settings.load_profile("steady")


@pytest.fixture(autouse=True, scope="session")
def cache_folder_of_the_tests(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Guards the user's cache folder, from which no test may read a verdict on a model, nor keep one there. Tests that
    load the shipped models ask each once."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(autouse=True, scope="session")
def faults_file(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The file of lines that do not fit their schemas, also of processes that tests start."""
    file = tmp_path_factory.mktemp("lines") / "faults"
    folders = [str(Path(written_lines.__file__).parent), os.environ.get("PYTHONPATH", "")]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join(filter(None, folders)))
        patch.setenv(written_lines.FAULTS_FILE, str(file))
        yield file


@pytest.fixture(autouse=True)
def log_of_the_library() -> None:
    """Begin each test with the library's log as it is at import: a command that ran in this process has taken it."""
    logger = logging.getLogger("dsbd_cli")
    logger.handlers, logger.propagate = [], True
    logger.setLevel(logging.NOTSET)


@pytest.fixture(autouse=True)
def every_line_fits_its_schema(faults_file: Path) -> Iterator[None]:
    """Guards `dsbd schema`: what a test makes any process write, or what it reads as a row, is as the schemas say."""
    yield
    if faults_file.exists():
        faults = faults_file.read_text(encoding="utf-8")
        faults_file.unlink()
        pytest.fail(faults[:4000], pytrace=False)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Imports run without the garbage collector, which would search all that they make again and again."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()


def pytest_collection_finish() -> None:
    """What is imported by now stays, so the collector need not look at it again and again. In a fresh checkout the
    kernels of attention, layers and sums are compiled before any test runs: a command that compiles them says so."""
    from dsbd_cli.ops.cpu import attention as cpu_attention
    from dsbd_cli.ops.cpu import layer as layer_ops
    from dsbd_cli.ops.cpu import linear as packing
    from dsbd_cli.ops.cpu import logsumexp as totals
    from dsbd_cli.ops.cpu import program

    kept = Path(cpu_attention.__file__).parent / "kernels" / "__pycache__"
    loads: tuple[tuple[str, Callable[[], object]], ...] = (
        ("attention.attend", cpu_attention.compiled),
        ("linear.multiply", packing.compiled),
        ("layer.norm", layer_ops.compiled),
        ("logsumexp.totals", totals.compiled),
        ("program.run", program.compiled),
    )
    for kernel, load in loads:
        if not any(kept.glob(f"{kernel}*.nbc")):
            with contextlib.suppress(ModuleNotFoundError):
                load()
    gc.collect()
    gc.freeze()
    gc.set_threshold(100_000, 50, 100)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """A test marked `gpu` is skipped by name where there is no CUDA device."""
    for item in items:
        if item.get_closest_marker("gpu") and not torch.cuda.is_available():
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
