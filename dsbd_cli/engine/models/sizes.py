"""How large a loaded model is, and how much of it a forward reads."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from dsbd_cli.engine.core.protocols import ForestModel
from dsbd_cli.engine.models.adapter import TransformersForest
from dsbd_cli.engine.models.packing import PackedLinear
from dsbd_cli.engine.models.quantize import Int8Linear

__all__ = ["ModelSize", "size_of"]


@dataclass(frozen=True, slots=True)
class ModelSize:
    """Of one model. held_bytes: parameters and buffers in memory; read_bytes: what a forward reads of them;
    flops_per_node: a multiplication and an addition per parameter that it reads."""

    held_bytes: int
    read_bytes: int
    flops_per_node: int


def size_of(model: ForestModel) -> ModelSize | None:
    """Sizes of a transformers model; None of any other. An embedding table that is no output head too is looked up,
    not read. Experts of a mixture all count as read."""
    if not isinstance(model, TransformersForest):
        return None
    module: Any = model.module
    # weights in the processor's own order are no parameters
    layers = [one for one in module.modules() if isinstance(one, PackedLinear | Int8Linear)]
    packed = {id(one.packed): one.packed for one in layers}.values()
    weights = [*{one.data_ptr(): one for one in module.parameters()}.values(), *packed]
    buffers = {one.data_ptr(): one for one in module.buffers()}.values()
    held = sum(one.numel() * one.element_size() for one in (*weights, *buffers))
    count = sum(one.numel() for one in weights)
    table = module.get_input_embeddings().weight
    head = getattr(module.get_output_embeddings(), "weight", None)
    if head is not None and head.data_ptr() == table.data_ptr():
        return ModelSize(held, held, 2 * count)
    return ModelSize(held, held - table.numel() * table.element_size(), 2 * (count - table.numel()))
