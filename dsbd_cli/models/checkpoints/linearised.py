"""LLaMA with linear attention in place of softmax: the published linearised models (You et al., ICML 2024, arXiv
2406.07368, "augmented" and "grouped" linear attention).

Queries and keys are unit vectors after their rotation. A token reads those of its own group of G = 64 positions with
the weight relu(q . k)^2, and all earlier groups with q . k, which is a state. A depthwise convolution over the last
values, one kernel per head, is added. Its published kernel is centred, and the half that would see later tokens is
masked. Here that half is left out.

The config.json of such a checkpoint says "llama". The names of its weights tell that it is linearised. Where its sizes
are not the published ones, its config names them as `linear_group_size` and `linear_kernel_size`, which also declare a
model that has none of these weights. linearised_model.py has the model itself.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from dsbd_cli.errors import ModelError, shorten

GROUP, KERNEL = 64, 63
PARTS = ("dwconv", "global_factor", "local_factor")


def mark(folder: Path, config: Any) -> None:
    """Record in a config that its checkpoint's attention is linear, and which parts it has. Leave any other config as
    it is. Raises ModelError for sizes that make no sense."""
    if config.model_type != "llama":
        return
    names = _weight_names(folder)
    parts = [part for part in PARTS if any(f"self_attn.{part}" in name for name in names)]
    for name in ("linear_group_size", "linear_kernel_size"):
        value = getattr(config, name, None)
        if value is not None and (type(value) is not int or value < 1):
            raise ModelError(f"{folder}/config.json: {name} is {shorten(value)}, but must be a whole number from 1 on")
    if parts or getattr(config, "linear_group_size", None):
        config.linear_group_size = getattr(config, "linear_group_size", None) or GROUP
        config.linear_kernel_size = getattr(config, "linear_kernel_size", None) or KERNEL
        config.linear_parts = parts
        config.base_model_tp_plan = None  # a rank would hold some heads of a state that is made for all


def unread(config: Any, names: Iterable[str]) -> list[str]:
    """Return which weights of linear attention are among these names, which a model of this config has not read."""
    marked = getattr(config, "linear_parts", ())
    return sorted(name for name in names if any(f"self_attn.{part}" in name for part in PARTS if part not in marked))


def _weight_names(folder: Path) -> set[str]:
    """Return the names of weights in safetensors, or in an index beside them.

    Broken files give no names: the loader reports them.
    """
    names: set[str] = set()
    try:
        for index in folder.glob("*.index.json"):
            names |= set(json.loads(index.read_text(encoding="utf-8")).get("weight_map") or ())
        for file in folder.glob("*.safetensors") if not names else ():
            with safe_open(file, framework="pt") as stored:
                names |= set(stored.keys())
    except (OSError, ValueError, SafetensorError):
        return set()
    return names
