"""Questions about a device that more than one file asks. Where weights lie is asked by the loader alone."""

from __future__ import annotations

import torch


def host_reads(device: torch.device) -> bool:
    """Return whether the host may read a device's numbers in the middle of an iteration: those of the CPU.

    Another device would stop for it. There all iterations of a shape are alike, so that they can be captured.
    """
    return device.type == "cpu"


def captures(device: torch.device) -> bool:
    """Return whether forwards on a device can be captured as CUDA graphs."""
    return device.type == "cuda"


def synchronise(*devices: torch.device) -> None:
    """Wait until the devices have finished the work queued on them."""
    for device in devices:
        if device.type == "cuda":
            torch.cuda.synchronize(device)
