"""Whatever a config or a tensor holds, a reason or a ModelError comes out."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from dsbd_cli.errors import ModelError
from dsbd_cli.models.checkpoints.quantized.groupwise import quantized_tensors
from dsbd_cli.models.checkpoints.quantized.settings import Quantization, quantization_of
from dsbd_cli.ops.quantized_weight import QuantizedWeight
from tests.models.checkpoints.quantized.packing import Layer, checkpoint, compressed_config

EXAMPLES = 400
WORDS = [
    *("gptq", "gptq_v2", "awq", "gemm", "GEMV", "compressed-tensors", "pack-quantized", "int-quantized", "marlin"),
    *("float-quantized", "group", "channel", "tensor", "block", "int", "float", "int32", "\n", "\ud800", "", "x" * 500),
]
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-2, 9) | st.just(10**400) | st.floats() | st.sampled_from(WORDS),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(WORDS), inner, max_size=3),
    max_leaves=5,
)
FIELDS = [
    *("quant_method", "bits", "w_bit", "group_size", "q_group_size", "sym", "desc_act", "checkpoint_format", "format"),
    *("dynamic", "version", "backend", "modules_to_not_convert", "ignore", "kv_cache_scheme", "sparsity_config"),
    *("config_groups", "pack_dtype", "is_marlin_format", "transform_config"),
]
GROUP_FIELDS = ["num_bits", "type", "symmetric", "strategy", "group_size", "actorder", "dynamic"]
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 32, "sym": False, "desc_act": False}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemm"}
DTYPES = [torch.int32, torch.int64, torch.int8, torch.float16, torch.float32, torch.uint8, torch.float8_e4m3fn]


@settings(max_examples=EXAMPLES, deadline=None)
@given(
    st.sampled_from(["gptq", "awq", "compressed", None]),
    st.dictionaries(st.sampled_from(FIELDS), VALUES, max_size=3),
    st.dictionaries(st.sampled_from(GROUP_FIELDS), VALUES, max_size=2),
)
def test_any_settings_are_read_or_a_reason_is_given(
    base: str | None, changes: dict[str, Any], of_weights: dict[str, Any]
) -> None:
    compressed = compressed_config(**{"form": "pack-quantized"}).quantization_config
    compressed["config_groups"]["group_0"]["weights"].update(of_weights)
    whole = {**{"gptq": GPTQ, "awq": AWQ, "compressed": compressed, None: {}}[base], **changes}
    read = quantization_of(SimpleNamespace(quantization_config=whole))
    assert isinstance(read, Quantization | str)
    if isinstance(read, str):
        assert read == " ".join(read.split())
        assert len(read) < 400


@st.composite
def damaged(draw: st.DrawFn) -> tuple[Quantization, dict[str, Tensor]]:
    """A checkpoint of one layer with up to two damages, and settings that may be others than it was made with."""
    forms = ["gptq", "gptq_v2", "gemm", "gemv", "pack-quantized", "int-quantized", "float-quantized"]
    form, group = draw(st.sampled_from(forms)), draw(st.sampled_from([16, 32, 64, -1]))
    bits = draw(st.sampled_from([2, 3, 4, 8])) if form in ("gptq", "gptq_v2", "pack-quantized") else 4
    flags = {"symmetric": draw(st.booleans()), "ordered": draw(st.booleans())}
    layer = Layer.draw(draw(st.sampled_from([8, 32])), 64, group, bits, **flags)
    method, parts = "compressed-tensors", layer.compressed(**flags)
    if form.startswith("gptq"):
        method, parts = "gptq", layer.gptq(form)
    elif form.startswith("gem"):
        method, parts = "awq", layer.awq() if form == "gemm" else layer.gemv()
    elif form != "pack-quantized":
        bits, stored = 8, torch.randint(-128, 128, layer.levels.shape).to(torch.int8)
        parts = {"weight": stored, "weight_scale": layer.scales}
        if form == "float-quantized":
            parts["weight"] = torch.randn(stored.shape).to(torch.float8_e4m3fn)
    floating, shared = form == "float-quantized", draw(st.booleans()) and method == "compressed-tensors"
    if draw(st.booleans()):
        group = draw(st.sampled_from([1, 24, 128, 1 << 24, -1]))
    for _ in range(draw(st.integers(0, 2))):
        _damage(draw, parts)
    return Quantization(method, form, bits, group, **flags, floating=floating, shared=shared), parts


def _damage(draw: st.DrawFn, parts: dict[str, Tensor]) -> None:
    names = ["qweight", "qzeros", "g_idx", "weight_zero_point", "weight_g_idx", "weight_scale", "bias", "weight"]
    part = draw(st.sampled_from(sorted({*parts, *names})))
    tensor = parts.get(part, torch.zeros(4, 4))
    match draw(st.sampled_from(["drop", "cut", "flat", "empty", "dtype", "bits", "value"])):
        case "drop":
            parts.pop(part, None)
        case "cut":
            parts[part] = tensor[1:] if tensor.ndim else tensor
        case "flat":
            parts[part] = tensor.reshape(-1)
        case "empty":
            parts[part] = tensor.new_empty(draw(st.sampled_from([(0,), (0, 8), (8, 0), ()])))
        case "dtype":
            parts[part] = tensor.float().to(draw(st.sampled_from(DTYPES)))
        case "bits":
            noise = torch.randint(0, 256, (tensor.numel() * tensor.dtype.itemsize,), dtype=torch.uint8)
            parts[part] = noise.view(tensor.dtype).reshape(tensor.shape) if tensor.numel() else tensor
        case "value":
            value = draw(st.sampled_from([-1, 0, 7, 100]))
            parts[part] = torch.full_like(tensor.float(), value).to(tensor.dtype)


@settings(max_examples=EXAMPLES, deadline=None)
@given(damaged())
def test_damaged_layers_raise_model_errors_alone(case: tuple[Quantization, dict[str, Tensor]]) -> None:
    quantization, parts = case
    try:
        made = quantized_tensors(checkpoint(parts, "x"), quantization, "target model 'm'")
        weight = made["x.weight"]()
    except ModelError as error:
        said = str(error)
        assert said.startswith("target model 'm': ")
        assert said == " ".join(said.split())
        assert len(said) < 300
        return
    assert isinstance(weight, QuantizedWeight)
    plain = weight.dequantize()
    assert plain.shape == weight.shape
    assert bool(plain.isfinite().all())
    packed = weight.fourbit()
    if packed is not None:
        assert packed.words.shape == (weight.shape[0], weight.shape[1] // 8)
        assert packed.scales.shape == packed.offsets.shape == (weight.shape[0], weight.shape[1] // 32)


def test_a_file_that_cannot_be_read_is_named() -> None:
    def fail() -> Tensor:
        raise OSError("cut short")

    parts = dict.fromkeys(("x.qweight", "x.qzeros", "x.scales"), fail)
    made = quantized_tensors(parts, Quantization("awq", "gemm", 4, 32), "m")
    with pytest.raises(ModelError, match=r"^m: x\.qweight cannot be read: cut short: get the files again$"):
        made["x.weight"]()
