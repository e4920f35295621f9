"""Iterations as CUDA graphs: launched as three replays in place of some ten thousand kernels.

A graph repeats kernels on fixed addresses. So the batch's tensors get one buffer per name and shape (`StaticBuffers`).
Before an iteration they are copied into these buffers, and the last graph of the iteration writes its results back
there. A shape is run plainly before it is captured, which also warms up what libraries set up at their first call.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, fields, is_dataclass
from typing import TYPE_CHECKING, Generic, Protocol, TypeVar

import torch
from torch import Tensor

from dsbd_cli.errors import UnsupportedModelError, one_line, out_of_memory

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

PLAIN_RUNS = 2  # times that a shape runs plainly before it is captured
MOST_GRAPHS = 64  # shapes kept; each holds its own intermediate results

Phase = Callable[[], None]
WorkT = TypeVar("WorkT")


class Recording(Protocol):
    """One captured phase."""

    def replay(self) -> None:
        """Run its kernels again, on the same addresses."""
        ...


class Recorder(Protocol):
    """Captures phases. A capture only records: nothing is computed until replay."""

    def record(self, phase: Phase) -> Recording:
        """Capture the kernels that a phase launches. Raises CaptureError."""
        ...


class CaptureError(Exception):
    """A phase cannot be captured; nothing was computed."""


class CudaRecorder:
    """Recorder of CUDA graphs, which share one memory pool. They are replayed one after another, never at the same
    time."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool = torch.cuda.graph_pool_handle()
        # torch's default capture stream belongs to the device of the first capture
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def record(self, phase: Phase) -> Recording:
        """Capture on the device. Raises CaptureError where a kernel of the phase, or of a model, does not allow it."""
        with torch.cuda.device(self._device):
            graph, before = torch.cuda.CUDAGraph(), torch.cuda.current_stream()
            try:
                # thread_local: calls of the process's other threads to the device do not end the capture
                mode = "thread_local"
                with torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode=mode):
                    phase()
            except RuntimeError as error:
                # the end of a failed capture raises another error, which hides the first one
                first = error.__context__ if isinstance(error.__context__, RuntimeError) else error
                if out_of_memory(first):
                    raise first from None
                raise CaptureError(one_line(first)) from error
            finally:
                torch.cuda.set_stream(before)  # a failed capture leaves its stream the current one
        return graph


class StaticBuffers:
    """One fixed tensor for every name and shape of a batch's state."""

    def __init__(self) -> None:
        self._static_buffers: dict[tuple[str, tuple[int, ...], torch.dtype], Tensor] = {}

    def move_in(self, state: DataclassInstance, *, known: bool = False) -> None:
        """Copy every tensor of a state (a dataclass, nested) into its buffer, unless it is that buffer, and put the
        buffer in its place. known: raise CaptureError where a tensor has no buffer yet, because a buffer made during a
        capture would lie in memory that other captures write."""
        for owner, name, key in _tensors(state):
            value = getattr(owner, name)
            buffer = self._static_buffers.get(key)
            if buffer is None:
                if known:
                    raise CaptureError(f"the iteration makes a new tensor of its state, {key[0]} {list(key[1])}")
                buffer = self._static_buffers[key] = value.detach().clone(memory_format=torch.contiguous_format)
            elif buffer is not value:
                buffer.copy_(value)
            setattr(owner, name, buffer)


def shapes(state: DataclassInstance) -> tuple[Hashable, ...]:
    """Return name, shape and dtype of every tensor of a state. A capture is valid for these alone."""
    return tuple(key for _, _, key in _tensors(state))


def _tensors(
    state: DataclassInstance, prefix: str = ""
) -> list[tuple[object, str, tuple[str, tuple[int, ...], torch.dtype]]]:
    tensors: list[tuple[object, str, tuple[str, tuple[int, ...], torch.dtype]]] = []
    for item in fields(state):
        value, name = getattr(state, item.name), f"{prefix}{item.name}"
        if isinstance(value, Tensor):
            tensors.append((state, item.name, (name, tuple(value.shape), value.dtype)))
        elif is_dataclass(value) and not isinstance(value, type):
            tensors += _tensors(value, f"{name}.")
    return tensors


def _fields(state: DataclassInstance) -> list[tuple[object, str]]:
    """Return every field of a state and of the dataclasses in it, because a phase may rebind any of them."""
    tensor_fields: list[tuple[object, str]] = []
    for item in fields(state):
        value = getattr(state, item.name)
        tensor_fields.append((state, item.name))
        if is_dataclass(value) and not isinstance(value, type):
            tensor_fields += _fields(value)
    return tensor_fields


@dataclass(slots=True)
class _Entry(Generic[WorkT]):
    """Captured phases of one shape, and what they write outside of the state."""

    recordings: list[Recording]
    work: WorkT


class IterationGraphs(Generic[WorkT]):
    """Captured iterations by shape. Only the MOST_GRAPHS replayed last are kept.

    A failed capture ends all capturing: this iteration and all further ones run plainly, with the same results.

    Attributes:
        replays: iterations that were replayed. steady: the last one replayed an earlier capture, or nothing is captured
            any more; so it took the time that its shape will take again.
        failed: why nothing is captured any more; None while captures work. tell: receives the line that reports a
            failed capture.
    """

    def __init__(self, recorder: Recorder, *, required: bool = False) -> None:
        """required: a failed capture is an error."""
        self._recorder, self._static_buffers = recorder, StaticBuffers()
        self.required = required
        self.tell: Callable[[str], None] = lambda line: None
        self.failed: str | None = None
        self._entries: dict[Hashable, _Entry[WorkT]] = {}
        self._seen: dict[Hashable, int] = {}
        self.replays = 0
        self.steady = False

    def forget(self) -> None:
        """Drop all captures and the state's buffers, because the models' caches have moved and no captured address is
        valid any more."""
        self._entries.clear()
        self._seen.clear()
        self._static_buffers = StaticBuffers()

    def run(
        self, key: Hashable, state: DataclassInstance, work: WorkT, phases: Sequence[Phase], lap: Callable[[int], None]
    ) -> WorkT:
        """Run the phases, which read and rebind the tensors of `state` and leave other results in `work`.

        Return the work that holds the results: the given one, or that of the capture, whose tensors are written again
        by every replay. lap: called with the number of each phase as it ends.
        """
        entry = self._entries.pop(key, None)
        self.steady = entry is not None or self.failed is not None
        # before a plain run, too: kernels that it compiles for these strides and alignments then serve the capture
        self._move_in(state)
        if entry is None and self.failed is None and self._seen.get(key, 0) >= PLAIN_RUNS:
            while len(self._entries) >= MOST_GRAPHS:
                del self._entries[next(iter(self._entries))]
            entry = self._try(state, work, phases)
        if entry is None:
            self._seen[key] = self._seen.get(key, 0) + 1
            for number, phase in enumerate(phases):
                phase()
                lap(number)
            self._move_in(state)
            return work
        self._entries[key] = entry  # most recently used
        for number, recording in enumerate(entry.recordings):
            recording.replay()
            lap(number)
        self.replays += 1
        return entry.work

    def _move_in(self, state: DataclassInstance) -> None:
        if self.failed is None:
            self._static_buffers.move_in(state)

    def _try(self, state: DataclassInstance, work: WorkT, phases: Sequence[Phase]) -> _Entry[WorkT] | None:
        """Capture the phases. Return None where that fails, with the state as it was. Raises UnsupportedModelError
        where captures are required."""
        before = [(owner, name, getattr(owner, name)) for owner, name in _fields(state)]
        try:
            return self._capture(state, work, phases)
        except CaptureError as error:
            if self.required:
                raise UnsupportedModelError(
                    f"these models cannot be captured as CUDA graphs ({error}): leave graphs out of --set gpu"
                ) from error
            self.failed = str(error)
            self.forget()
            for owner, name, value in before:
                if getattr(owner, name) is not value:  # frozen parts never change
                    setattr(owner, name, value)
            self.tell(f"iterations run plainly, because they cannot be captured as CUDA graphs ({error})")
            return None

    def _capture(self, state: DataclassInstance, work: WorkT, phases: Sequence[Phase]) -> _Entry[WorkT]:
        def last() -> None:
            phases[-1]()
            self._static_buffers.move_in(state, known=True)

        return _Entry([self._recorder.record(phase) for phase in (*phases[:-1], last)], work)
