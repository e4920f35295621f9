"""Services that depend on the device of an engine: time marks, the current device, captured iterations, operations."""

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
    """Return the factory of events that mark times on the device; None where the wall clock serves."""
    if device.type != "cuda":
        return None
    return partial(torch.cuda.Event, enable_timing=True)  # type: ignore[return-value]


def current(device: torch.device) -> AbstractContextManager[object]:
    """Make a CUDA device the current one: events go to its stream."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def captures(models: Sequence[ForestModel], on_host: bool, wanted: bool | None) -> IterationGraphs[DeviceReport] | None:
    """Return an empty store of captured iterations, or None where iterations run plainly. models: those that run the
    forest. on_host: the drafter works on the host. wanted: None captures where it is possible.

    Raises UsageError where captures are asked for and impossible.
    """
    whole = all(model.capturable for model in models)
    possible = whole and len({model.device for model in models}) == 1 and not on_host
    if wanted and not possible:
        reason = "they need both models whole on one and the same GPU, and forwards that read nothing back to the host"
        if on_host:
            reason = "the drafter works on the host"
        raise UsageError(f"cuda_graphs cannot be had: {reason}", field="cuda_graphs", value=wanted)
    if not possible or wanted is False:
        return None
    return IterationGraphs(CudaRecorder(models[0].device), required=bool(wanted))


def iteration_ops(device: torch.device, kernels: bool | None) -> Ops:
    """Return the operations that serve the iterations of an engine. kernels: use GPU kernels; None: where there is a
    GPU.

    Raises UsageError where kernels are asked for and impossible.
    """
    if kernels and triton_missing(device) is not None:
        raise UsageError(
            f"kernels cannot be had: they need a GPU and the package triton, and the target is on {device}",
            field="kernels",
            value=kernels,
        )
    return ops_for(device, torch.float32, ITERATION, kernels=kernels)
