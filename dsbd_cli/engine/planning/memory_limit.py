"""Estimate of how many requests fit in memory together: `--batch-size auto`. Out of memory still halves the batch."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

from dsbd_cli.config.method import MethodConfig
from dsbd_cli.engine.planning.planner import deepest
from dsbd_cli.engine.protocols import ForestModel
from dsbd_cli.errors import UsageError

CGROUP = Path("/sys/fs/cgroup")
REQUESTS_SEEN = 64  # requests whose lengths are looked at
SHARE = 0.7  # of the free memory; the rest is for activations and fragments
MOST_ROWS = {"cuda": 128, "cpu": 16}  # more rows than this brought no more speed, or were never measured
LOGIT_BYTES = 12  # per node and token of the vocabulary: the model's own logits and two float32 copies


def free_bytes(device: torch.device, *, files: bool = False) -> int:
    """Return the bytes that can still be allocated on a device; on the CPU those that the system, and the container,
    give without swap. files: those too in which a container keeps files that were read lately."""
    if device.type == "cuda":
        kept = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)  # by torch, for later tensors
        return int(torch.cuda.mem_get_info(device)[0]) + kept
    import psutil  # only the CPU path needs it

    available = int(psutil.virtual_memory().available)
    return min([available, *_left_in_container(files=files)])


def memory_bytes(device: torch.device) -> int:
    """Return all bytes of a device, in use or not; on the CPU those of the machine, or of the container."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[1])
    import psutil  # only the CPU path needs it

    total = int(psutil.virtual_memory().total)
    try:
        return min(total, int((CGROUP / "memory.max").read_text()))
    except (OSError, ValueError):  # no such file, or the word max
        return total


def least_bytes(nodes: int, vocab_size: int) -> int:
    """Return the bytes that an iteration of one row takes in any case: float32 logits of its nodes, and a mask of which
    nodes see each other."""
    return nodes * (4 * vocab_size + nodes)


def check_memory(method: MethodConfig, target: ForestModel) -> int:
    """Return the bytes of the target's device. Raises UsageError where they cannot hold an iteration of a single
    row."""
    memory, nodes = memory_bytes(target.device), deepest(method, 1).nodes(method.num_beams)
    if least_bytes(nodes, target.vocab_size) > memory:
        drafts = f" and drafts_per_layer {method.drafts_per_layer}" if method.depth else ""
        raise UsageError(
            f"num_beams is {method.num_beams}{drafts}, but {nodes} nodes in an iteration of a single row do not "
            f"fit into {memory / 2**30:.1f} GiB: lower it"
        )
    return memory


def footprint(method: MethodConfig, models: Sequence[ForestModel]) -> str:
    """Return a sentence on what a row takes: nodes and logits of its largest iteration, and cache per token. models:
    the target first, and the draft model where it has the same cache slots."""
    nodes = deepest(method, 1 << 30).nodes(method.num_beams)
    logits = nodes * models[0].vocab_size * LOGIT_BYTES
    cache = sum(model.kv_bytes_per_slot() for model in models)
    return (
        f"a row takes up to {nodes} nodes and {logits / 2**20:.0f} MiB of logits in an iteration, and "
        f"{cache / 2**10:.0f} KiB of cache per token"
    )


def _left_in_container(folder: Path = CGROUP, *, files: bool = False) -> list[int]:
    """Return the limit minus the use, in bytes, of the control group that holds this process, in a list; an empty list
    where there is no limit."""
    try:
        limit, used = (folder / "memory.max").read_text(), (folder / "memory.current").read_text()
        cache = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
        kept = ("inactive_file", "active_file") if files else ("inactive_file",)
        return [int(limit) - int(used) + sum(int(cache.get(name, 0)) for name in kept)]
    except (OSError, ValueError):  # no such files, or the word max
        return []


def fitting_rows(
    models: Sequence[ForestModel], slots: int, nodes: int, free: int | None = None, *, beside: int = 0
) -> int:
    """Return how many rows of `slots` cache slots and `nodes` nodes per iteration fit into the free memory of the first
    model's device.

    At least 1. free: bytes, measured where None. beside: further bytes of a row, whatever its slots and nodes.
    """
    device = models[0].device
    here = [model for model in models if model.device == device]
    row = slots * sum(model.kv_bytes_per_slot() for model in here) + nodes * models[0].vocab_size * LOGIT_BYTES
    row += sum(model.recurrent_bytes(3 * nodes) for model in here)  # a suffix is seldom longer than that
    row += beside
    available = free_bytes(device) if free is None else free
    return max(1, min(int(SHARE * available) // max(row, 1), MOST_ROWS.get(device.type, 16)))
