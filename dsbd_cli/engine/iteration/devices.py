"""Services that an engine takes from the device it runs on: marks of time, the current stream, captured iterations,
operations."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial

import torch

from dsbd_cli.engine.iteration.cuda_graphs import CudaRecorder, IterationGraphs
from dsbd_cli.engine.iteration.iteration import DeviceReport
from dsbd_cli.engine.planning.timing import Event
from dsbd_cli.engine.protocols import ForestModel
from dsbd_cli.errors import UsageError
from dsbd_cli.ops.interface import Ops
from dsbd_cli.ops.select import ITERATION, ops_for, triton_missing


def events(device: torch.device) -> Callable[[], Event] | None:
    """Marks on the device's own time line; None for the wall clock."""
    if device.type != "cuda":
        return None
    return partial(torch.cuda.Event, enable_timing=True)  # type: ignore[return-value]


def current(device: torch.device) -> AbstractContextManager[object]:
    """Make a CUDA device the current one: events go to its stream."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def captures(models: Sequence[ForestModel], on_host: bool, wanted: bool | None) -> IterationGraphs[DeviceReport] | None:
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


def iteration_ops(device: torch.device, kernels: bool | None) -> Ops:
    """Return what serves the iterations of an engine. kernels: of a GPU; None: where there is one.

    Raises UsageError where they are asked for and cannot be.
    """
    if kernels and triton_missing(device) is not None:
        raise UsageError(
            f"kernels cannot be had: they need a GPU and the package triton, and the target is on {device}",
            field="kernels",
            value=kernels,
        )
    return ops_for(device, torch.float32, ITERATION, kernels=kernels)
