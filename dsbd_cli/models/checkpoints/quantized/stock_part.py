"""Transformers' model of a checkpoint whose weights are packed, with plain weights.

Our own forward is compared with a part of it, because the whole is several times as large as the file. Families that
our decoder does not know run as the whole.
"""

from __future__ import annotations

import copy
import re
from typing import Any

import torch
from torch import Tensor

from dsbd_cli.errors import ModelError, UnsupportedModelError
from dsbd_cli.models.checkpoints.checkpoint import quiet
from dsbd_cli.models.checkpoints.quantized.groupwise import WeightTensors
from dsbd_cli.models.checkpoints.quantized.mxfp4 import Mxfp4Weight
from dsbd_cli.models.checkpoints.stock import attention_of, check_report
from dsbd_cli.models.checkpoints.text_part import of_text, other_parts
from dsbd_cli.ops.quantized_weight import QuantizedWeight

_LAYER = re.compile(r"(?:^|\.)(?:layers|h|blocks)\.(\d+)\.")
_VOCABULARY = re.compile(r"(?:^|\.)(?:embed_tokens|embeddings|embed_in|wte|lm_head|embed_out)\.(?:weight|bias)$")


def plain_state(tensors: WeightTensors, dtype: torch.dtype, layers: int, vocabulary: int) -> dict[str, Tensor]:
    """Return the plain weights of the first layers and of the first rows of embedding table and LM head, in a dtype.

    A weight that is not packed is a view of its file where it has the dtype. Raises ModelError for scales that are NaN
    or infinite.
    """
    state, text = {}, of_text(tensors)
    for name, read in tensors.items():
        layer = _LAYER.search(name)
        if layer is not None and int(layer[1]) >= layers and name in text:
            continue
        rows = slice(0, vocabulary if _VOCABULARY.search(name) else None)
        weight = read()
        if isinstance(weight, QuantizedWeight):
            weight.check()
        plain = (
            weight.stacked()
            if isinstance(weight, Mxfp4Weight)
            else weight.dequantize(rows)
            if isinstance(weight, QuantizedWeight)
            else weight[rows]
            if weight.ndim
            else weight
        )
        state[name] = plain.to(dtype) if plain.is_floating_point() else plain
    return state


def stock_part(config: Any, tensors: WeightTensors, dtype: torch.dtype, layers: int, vocabulary: int, name: str) -> Any:
    """Return transformers' model of the first layers of a checkpoint, ready for inference.

    config: of the whole checkpoint, which stays as it is. layers, vocabulary: of the part; more than there are make the
    whole. Inputs must be ids below `vocabulary`. name: of the checkpoint, for messages. Raises ModelError for tensors
    that are missing, have another shape than the config says, or would not be used.
    """
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_FOR_MULTIMODAL_LM_MAPPING

    classes = MODEL_FOR_MULTIMODAL_LM_MAPPING if other_parts(config) else MODEL_FOR_CAUSAL_LM_MAPPING
    kind: Any = classes.get(type(config), None)
    if kind is None:
        raise UnsupportedModelError(f"{name} is a {config.model_type}, which is no causal language model")
    part, state = part_config(config, layers, vocabulary), plain_state(tensors, dtype, layers, vocabulary)
    with quiet():
        model, report = kind.from_pretrained(
            None,
            config=part,
            state_dict={**state},
            dtype=dtype,
            attn_implementation=attention_of(part),
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # check_report names them
        )
    check_report(report, name, set())
    for key in sorted(map(str, report.get("unexpected_keys") or ())):
        # tools for GPTQ add biases of zeros to all layers
        if key.endswith(".bias") and key in state and bool(state[key].any()):
            raise ModelError(f"{name}: the model has no {key}, but the files hold one that is not zero")
    model.eval()
    model.requires_grad_(False)
    return model


def part_config(config: Any, layers: int, vocabulary: int) -> Any:
    """Return the config of a model's first layers with the first ids of its vocabulary, and with plain weights."""
    part = copy.deepcopy(config)
    text = part.get_text_config(decoder=True)
    whole = text.num_hidden_layers
    for field, value in list(vars(text).items()):
        if isinstance(value, list | tuple) and len(value) == whole:
            setattr(text, field, value[:layers])
    text.num_hidden_layers, text.vocab_size = min(layers, whole), min(vocabulary, text.vocab_size)
    if isinstance(text.pad_token_id, int) and text.pad_token_id >= text.vocab_size:
        text.pad_token_id = None
    for settings in (part, text):
        for field in ("quantization_config", "compression_config"):
            if hasattr(settings, field):
                delattr(settings, field)
    return part
