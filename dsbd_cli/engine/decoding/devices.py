"""What an engine takes from the device it runs on: marks of time, the current stream, captured iterations."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial

import torch

from dsbd_cli.engine.core.protocols import ForestModel
from dsbd_cli.engine.decoding.graphs import CudaRecorder, IterationGraphs
from dsbd_cli.engine.decoding.step import Work
from dsbd_cli.engine.decoding.timing import Event
from dsbd_cli.errors import UsageError

__all__ = ["captures", "current", "events", "out_of_memory"]


def events(device: torch.device) -> Callable[[], Event] | None:
    """Marks on the device's own time line; None for the wall clock."""
    if device.type != "cuda":
        return None
    return partial(torch.cuda.Event, enable_timing=True)  # type: ignore[return-value]


def current(device: torch.device) -> AbstractContextManager[object]:
    """Make a CUDA device the current one: events go to its stream."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def captures(models: Sequence[ForestModel], on_host: bool, wanted: bool | None) -> IterationGraphs[Work] | None:
    """Captured iterations where they can be. models: that run the forest; on_host: the drafter works on the host.

    Raises UsageError where they are asked for and cannot be.
    """
    whole = all(model.capturable for model in models)
    possible = whole and len({model.device for model in models}) == 1 and not on_host
    if wanted and not possible:
        reason = (
            "the drafter works on the host"
            if on_host
            else (
                "they need both models whole on one and the same GPU, and forwards that read nothing back to the host"
            )
        )
        raise UsageError(f"cuda_graphs cannot be had: {reason}", field="cuda_graphs", value=wanted)
    return (
        IterationGraphs(CudaRecorder(models[0].device), required=bool(wanted))
        if possible and wanted is not False
        else None
    )


def out_of_memory(error: RuntimeError | MemoryError) -> bool:
    """An allocation failed. The processor's allocator has no error class of its own."""
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or "can't allocate memory" in str(error)
