"""Load a decoder in stages: config, tensors, comparison with transformers, packing. Each stage has its own errors.

The model that answers is the model that was named: at a first load its logits are compared with those of transformers'
own model of the same folder. What was found is kept (verdicts.py).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from dsbd_cli.config.model import ModelSpec
from dsbd_cli.models.checkpoints.checkpoint import Checkpoint, Tensors
from dsbd_cli.models.checkpoints.generation import CheckpointSettings
from dsbd_cli.models.checkpoints.lm_head import TrimmedLMHead
from dsbd_cli.models.checkpoints.loader import device_of, too_small
from dsbd_cli.models.decoder.config import DecoderConfig
from dsbd_cli.models.decoder.decoder_model import DecoderForestModel
from dsbd_cli.models.decoder.families import decoder_config_of
from dsbd_cli.models.decoder.forward import Decoder
from dsbd_cli.models.decoder.own_rows import OwnRows
from dsbd_cli.models.decoder.pack import find_outliers, pack_as_stored, pack_decoder, quantize_decoder
from dsbd_cli.models.decoder.weights import LAYER_NAMES, PREFIXES, read_weights
from dsbd_cli.models.forest_model import calibration_tokens
from dsbd_cli.ops.interface import Ops
from dsbd_cli.ops.quantized_weight import QuantizedWeight
from dsbd_cli.ops.select import DECODER, EXPERTS, MIXERS, ops_for, quantize_missing

TOKENS = 24  # of a text that is compared with transformers
SEED = 20  # of its random tokens


@dataclass(frozen=True, slots=True)
class DecoderParts:
    """All that our own decoder is made of.

    Attributes:
        name: of the model, as the user wrote it.
        dtype: that it computes in. device: that it lies on.
        lm_head: rows that take the place of the checkpoint's LM head.
    """

    name: str
    config: DecoderConfig
    tensors: Tensors
    dtype: torch.dtype
    device: torch.device
    settings: CheckpointSettings
    lm_head: TrimmedLMHead | None = None


def decoder_config_or_reason(checkpoint: Checkpoint) -> DecoderConfig | str:
    """Return the config of a checkpoint, or the reason why transformers runs it."""
    spec, config = checkpoint.spec, checkpoint.config
    if spec.tensor_parallel > 1:
        return "it is split over several processes"
    if spec.device_map is not None:
        return "a device map spreads it"
    if spec.trust_remote_code and getattr(config, "auto_map", None):
        return "it brings its own code"
    made = decoder_config_of(config)
    if isinstance(made, DecoderConfig) and made.mixture is not None and device_of(spec).type != "cpu":
        return "its experts run on a CPU alone"
    return made


def build_decoder(parts: DecoderParts, stock: Callable[[], Any], kernels: frozenset[str]) -> DecoderForestModel:
    """Return a model whose products still have the checkpoint's plain weights.

    stock: loads the model as transformers runs it. kernels: names of the kernels that a GPU may run. Raises KeyError
    and ValueError for tensors that are missing or have other shapes.
    """
    lm_head = parts.lm_head
    weights = read_weights(parts.config, parts.tensors, parts.dtype, lm_head)
    weights.to(parts.device)
    ops = decoder_ops(parts.config, parts.device, parts.dtype, kernels)
    model = DecoderForestModel(Decoder(parts.config, weights, ops), parts.name, parts.settings, stock)
    if lm_head is not None:
        model.spread(lm_head.ids, lm_head.vocab_size)
        if lm_head.bias is None:
            model.decoder.own_rows = OwnRows.of(lm_head.weight, lm_head.ids, weights.table, parts.dtype)
    return model


@torch.inference_mode()
def differs(model: DecoderForestModel, theirs: Any, limit: float | None = None) -> str | None:
    """Compare the logits of a short text with those of transformers' model. Return the difference in words; None: they
    agree. limit: of the difference, relative to the spread of the logits; None: what rounding may do.

    The tokens are random, because rounding grows beyond all limits on some texts in half precision: the first 24 tokens
    of SmolLM2's vocabulary, which are marks, move by 0.7 of the spread.
    """
    from dsbd_cli.models.verdicts import PADDING, limit_for

    count = min(TOKENS, model.max_positions or TOKENS)
    drawn = torch.randint(0, model.vocab_size, (1, count), generator=torch.Generator().manual_seed(SEED))
    tokens = drawn.to(model.device)

    def logits(ids: Tensor) -> Tensor:
        result: Tensor = theirs(input_ids=ids, use_cache=False).logits[:, :count].float()
        return result

    wanted, ours = logits(tokens), model.plain(tokens).float()
    if ours.shape != wanted.shape:
        return f"its logits have {ours.shape[-1]} columns and transformers' {wanted.shape[-1]}"

    def apart(result: Tensor) -> float:
        return float((result - wanted).square().mean().sqrt() / wanted.std())

    error = apart(ours)
    limit = limit or limit_for(
        model.weights_dtype, error, lambda: apart(logits(torch.nn.functional.pad(tokens, (0, PADDING))))
    )
    return None if error <= limit else f"its logits are off by {error:.1g} of their spread"


def pack(
    model: DecoderForestModel, spec: ModelSpec, outliers: dict[str, list[int]] | None, stored_form: str | None = None
) -> dict[str, list[int]] | None:
    """Pack the weights, or quantize them. outliers: channels that an earlier load has found, by product; None:
    find them. stored_form: name of the form of a quantised file's weights.

    Returns the outliers, None where nothing is quantized. Raises UsageError where no product is large enough.
    """
    decoder, weight_format = model.decoder, spec.quantize
    model.stored_form = stored_form if weight_format is None and runs_as_stored(decoder, model.device) else None
    if weight_format == "none" or (weight_format is None and model.stored_form is None):
        decoder.weights.dequantize()
        pack_decoder(decoder, model.device)
        model.forget_programs()
        return None
    tokens = calibration_tokens(len(model.embeddings), model.max_positions)
    if outliers is not None:
        channels = {name: torch.tensor(numbers, dtype=torch.int64) for name, numbers in outliers.items()}
    elif weight_format is None:
        channels = pack_as_stored(decoder, lambda: model.plain(tokens))
    else:
        channels = find_outliers(decoder, lambda: model.plain(tokens))
    if not quantize_decoder(decoder, channels, weight_format) and weight_format is not None:
        raise too_small(spec, f"the {spec.role} model {spec.source!r}")
    model.forget_programs()
    return {name: numbers.tolist() for name, numbers in channels.items()}


def runs_as_stored(decoder: Decoder, device: torch.device) -> bool:
    """Return whether a decoder has weights of a quantised file, and the kernels that multiply them as they are."""
    return (
        device.type == "cpu"
        and quantize_missing("stored", decoder.weights.dtype) is None
        and any(
            isinstance(weight, QuantizedWeight)
            for _, owner, name in decoder.plain_products()
            for weight in getattr(owner, name).weights
        )
    )


def first_part(parts: DecoderParts, layers: int, vocabulary: int) -> DecoderParts:
    """Return what the first layers of a decoder are made of, over the first tokens."""
    config, tensors = parts.config, dict(parts.tensors)
    layers, vocabulary = min(layers, config.layers), min(vocabulary, config.vocabulary)
    rows = torch.arange(vocabulary)
    table = config.names.get("table", LAYER_NAMES["table"])
    for name in (*(f"{prefix}{table}.weight" for prefix in PREFIXES), "lm_head.weight"):
        if name in tensors:
            tensors[name] = partial(_first_rows, tensors[name], rows)
    few = replace(config.with_layers(range(layers)), vocabulary=vocabulary)
    return replace(parts, config=few, tensors=tensors, lm_head=None)


def _first_rows(read: Callable[[], Any], rows: Tensor) -> Any:
    weight = read()
    return weight.take(rows) if isinstance(weight, QuantizedWeight) else weight[: len(rows)]


def layers_of_each_kind(config: DecoderConfig, least: int) -> int:
    """Return the number of layers, from the first on, among which every kind of layer is, `least` or more."""
    kinds = config.layer_kinds
    return max(least, *(kinds.index(kind) + 1 for kind in set(kinds)))


def decoder_ops(
    decoder_config: DecoderConfig, device: torch.device, dtype: torch.dtype, kernels: frozenset[str] = frozenset()
) -> Ops:
    """Return the operations of a decoder. kernels: names of the kernels that a GPU may run."""
    inner = {decoder_config.inner_of(layer) for layer in range(decoder_config.layers)}  # a config may say one unused
    widths = {decoder_config.hidden, decoder_config.head_dim // 2, *inner}
    wanted: tuple[str, ...] = DECODER
    if decoder_config.mixture is not None:
        widths.add(decoder_config.mixture.inner)
        wanted = (*DECODER, *EXPERTS)
    if decoder_config.norms_over_all_heads:
        widths |= {decoder_config.heads * decoder_config.head_dim, decoder_config.kv_heads * decoder_config.head_dim}
    if decoder_config.mixer is not None:
        wanted = (*wanted, *MIXERS)
    ops = ops_for(device, dtype, wanted, widths=frozenset(widths), kernels=None if kernels else False)
    return ops.without(*(set(ops.by("triton")) - kernels))
