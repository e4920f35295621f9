"""Services that an engine takes from the device it runs on: marks of time, the current stream, captured iterations."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from subprocess import CalledProcessError

import torch

from dsbd_cli.engine.iteration.cuda_graphs import CudaRecorder, IterationGraphs
from dsbd_cli.engine.iteration.iteration import DeviceReport
from dsbd_cli.engine.planning.timing import Event
from dsbd_cli.engine.protocols import ForestModel
from dsbd_cli.errors import UsageError
from dsbd_cli.ops.triton import available
from dsbd_cli.ops.triton.trial import faults

__all__ = ["captures", "current", "events", "kernel_failed", "kernels_for", "left_out"]


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


KERNELS = frozenset({"candidates", "commit", "draft", "move", "walk"})


def kernels_for(device: torch.device, wanted: bool | None) -> frozenset[str]:
    """Names of the kernels that an engine on this device runs; none without triton. wanted: None where there is a GPU.

    Raises UsageError where they are asked for and cannot be. triton's interpreter runs them on any device, for tests.
    """
    possible = available() and (device.type == "cuda" or os.environ.get("TRITON_INTERPRET") == "1")
    if wanted and not possible:
        raise UsageError(
            f"kernels cannot be had: they need a GPU and the package triton, and the target is on {device}",
            field="kernels",
            value=wanted,
        )
    if not possible or wanted is False or (wanted is None and device.type != "cuda"):
        return frozenset()
    return KERNELS - faults(device).keys() if device.type == "cuda" else KERNELS


def kernel_failed(error: Exception) -> bool:
    """triton could not compile or launch a kernel, or its C compiler failed."""
    own = type(error).__module__.partition(".")[0] == "triton"
    return own or isinstance(error, CalledProcessError) or "Triton Error" in str(error)


def left_out(device: torch.device, wanted: bool | None) -> tuple[str, ...]:
    """Which kernels do not run because they do not do on this device what their twins do; a line per kind of fault."""
    if device.type != "cuda" or wanted is False:
        return ()
    alike: dict[str, list[str]] = {}
    for name, fault in faults(device).items():
        alike.setdefault(fault, []).append(name)
    return tuple(
        f"the kernel {names[0]} is left out, and tensor code runs in its place: it {fault}"
        if len(names) == 1
        else f"the kernels {', '.join(names)} are left out, and tensor code runs in their place: each {fault}"
        for fault, names in alike.items()
    )
