"""Weights of GPTQ, AWQ and compressed-tensors equal their definitions."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from dsbd_cli.errors import ModelError
from dsbd_cli.models.checkpoints.quantized.groupwise import quantized_tensors
from dsbd_cli.models.checkpoints.quantized.settings import Quantization, quantization_of
from dsbd_cli.ops.quantized_weight import QuantizedWeight
from tests.models.checkpoints.quantized.packing import Layer, checkpoint, compressed_config, config, of_fourbit

NAME = "target model 'x'"


def read(settings: Any, parts: dict[str, Tensor]) -> QuantizedWeight:
    quantization = quantization_of(settings)
    assert isinstance(quantization, Quantization), quantization
    tensors = quantized_tensors(checkpoint(parts), quantization, NAME)
    assert [*tensors] == ["model.x.weight"]
    weight = tensors["model.x.weight"]()
    assert isinstance(weight, QuantizedWeight)
    assert weight.name == "model.x.weight"
    return weight


def agrees(weight: QuantizedWeight, layer: Layer, *, four: bool) -> None:
    """A weight is the layer's: whole, by rows, and in four bits where it can be."""
    assert weight.shape == layer.levels.shape
    assert torch.equal(weight.dequantize(), layer.weight)
    assert torch.equal(weight.dequantize(slice(1, 5)), layer.weight[1:5])
    rows = torch.tensor([7, 0, 7, 3])
    assert torch.equal(weight.dequantize(rows), layer.weight[rows])
    assert torch.equal(weight.take(rows).dequantize(), layer.weight[rows])
    packed = weight.fourbit()
    assert (packed is not None) == four
    if packed is not None:
        assert torch.equal(of_fourbit(packed), layer.weight)


@pytest.mark.parametrize("form", ["gptq", "gptq_v2"])
@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize("group", [32, 64, -1])
def test_gptq(form: str, bits: int, group: int) -> None:
    layer = Layer.draw(32, 128, group, bits)
    settings = config("gptq", bits=bits, group_size=group, sym=False, desc_act=False, checkpoint_format=form)
    agrees(read(settings, layer.gptq(form)), layer, four=bits == 4)


@pytest.mark.parametrize("group", [32, 128, -1])
def test_gptq_with_act_order(group: int) -> None:
    layer = Layer.draw(16, 128, group, ordered=True)
    weight = read(config("gptq", bits=4, group_size=group, sym=False, desc_act=True), layer.gptq())
    agrees(weight, layer, four=True)
    packed = weight.fourbit()
    assert packed is not None
    assert (packed.order is not None) == (group == 32)
    if packed.order is not None:  # stable: inputs of a group ascend
        assert bool((packed.order.view(-1, group).diff(dim=1) > 0).all())


def test_gptq_of_groups_that_are_no_blocks_has_no_four_bits() -> None:
    layer = Layer.draw(16, 64, 32)
    layer.group_of = (torch.arange(64) >= 31).long()
    weight = read(config("gptq", bits=4, group_size=32, sym=False, desc_act=True), layer.gptq())
    agrees(weight, layer, four=False)


@pytest.mark.parametrize("group", [16, 8])
def test_small_groups_have_no_four_bits(group: int) -> None:
    layer = Layer.draw(16, 64, group)
    agrees(read(config("awq", bits=4, group_size=group, version="gemm"), layer.awq()), layer, four=False)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_dtypes_of_scales(dtype: torch.dtype) -> None:
    layer = Layer.draw(8, 32, dtype=dtype)
    weight = read(config("awq", bits=4, group_size=32, version="GEMM"), layer.awq())
    assert torch.equal(weight.dequantize(), layer.weight)


@pytest.mark.parametrize("group", [32, 64, -1])
@pytest.mark.parametrize("version", ["gemm", "gemv"])
def test_awq(group: int, version: str) -> None:
    layer = Layer.draw(24, 128, group)
    parts = layer.awq() if version == "gemm" else layer.gemv()
    agrees(read(config("awq", bits=4, group_size=group, version=version), parts), layer, four=True)


@pytest.mark.parametrize("bits", [2, 3, 4, 5, 8])
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize(("strategy", "group"), [("group", 32), ("channel", -1)])
def test_compressed_tensors(bits: int, symmetric: bool, strategy: str, group: int) -> None:
    layer = Layer.draw(9, 96, group, bits, symmetric=symmetric)
    settings = compressed_config(bits, group if strategy == "group" else None, strategy, symmetric=symmetric)
    agrees(read(settings, layer.compressed(symmetric=symmetric)), layer, four=bits == 4)


def test_compressed_tensors_with_act_order() -> None:
    layer = Layer.draw(9, 96, ordered=True)
    settings = compressed_config(symmetric=False, actorder="group")
    agrees(read(settings, layer.compressed(symmetric=False, ordered=True)), layer, four=True)


@pytest.mark.parametrize("bits", [4, 5, 8])
def test_compressed_tensors_of_odd_inputs(bits: int) -> None:
    layer = Layer.draw(9, 53, -1, bits)
    settings = compressed_config(bits, None, "channel", symmetric=False)
    agrees(read(settings, layer.compressed(symmetric=False)), layer, four=False)


def test_compressed_tensors_with_plain_zero_points() -> None:
    layer = Layer.draw(9, 64, -1)
    parts = {**layer.compressed(symmetric=False), "weight_zero_point": (layer.zeros - 8).to(torch.int8)}
    agrees(read(compressed_config(4, None, "channel", symmetric=False), parts), layer, four=True)


def test_compressed_tensors_with_one_scale() -> None:
    layer = Layer.draw(9, 64, -1, symmetric=True)
    layer.scales = layer.scales[:1].expand(9, 1)
    parts = {**layer.compressed(symmetric=True), "weight_scale": layer.scales[0]}
    agrees(read(compressed_config(4, None, "tensor"), parts), layer, four=True)


@pytest.mark.parametrize(
    ("form", "kind"),
    [("int-quantized", "int"), ("naive-quantized", "int"), ("float-quantized", "float"), ("naive-quantized", "float")],
)
@pytest.mark.parametrize(("strategy", "columns"), [("tensor", 1), ("channel", 1), ("group", 3)])
def test_numbers_of_eight_bits(form: str, kind: str, strategy: str, columns: int) -> None:
    torch.manual_seed(0)
    stored = torch.randint(-128, 128, (9, 96)).to(torch.int8)
    if kind == "float":
        stored = torch.randn(9, 96).to(torch.float8_e4m3fn)
    scales = torch.rand(1 if strategy == "tensor" else 9, columns) + 0.1
    settings = compressed_config(8, 32 if strategy == "group" else None, strategy, form=form, kind=kind)
    parts = {"weight": stored, "weight_scale": scales[0] if strategy == "tensor" else scales, "input_scale": scales}
    weight = read(settings, parts)
    wanted = stored.float() * scales.expand(9, columns).repeat_interleave(96 // columns, 1)
    assert torch.equal(weight.dequantize(), wanted)
    assert torch.equal(weight.dequantize(torch.tensor([3, 1])), wanted[[3, 1]])
    assert weight.fourbit() is None


def test_zero_points_of_symmetric_weights_are_checked() -> None:
    stored, scales = torch.zeros(4, 32), torch.ones(4, 1)
    for form, kind, dtype in (("int-quantized", "int", torch.int8), ("float-quantized", "float", torch.float8_e4m3fn)):
        settings = compressed_config(8, None, "channel", form=form, kind=kind)
        parts = {"weight": stored.to(dtype), "weight_scale": scales}
        read(settings, {**parts, "weight_zero_point": torch.zeros(4, 1).to(dtype)})
        with pytest.raises(ModelError, match=r"holds the zero point 1, but symmetric weights have 0: get"):
            read(settings, {**parts, "weight_zero_point": torch.ones(4, 1).to(dtype)})
    with pytest.raises(ModelError, match="weight holds NaN: get the files again"):
        read(settings, {**parts, "weight": torch.full((4, 32), float("nan")).to(dtype)})


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize(("bits", "strategy", "group"), [(4, "group", 32), (8, "channel", None), (4, "channel", None)])
def test_compressed_tensors_equal_their_package(bits: int, strategy: str, group: int | None, symmetric: bool) -> None:
    quantization = pytest.importorskip("compressed_tensors.quantization")
    compressors = pytest.importorskip("compressed_tensors.compressors")
    torch.manual_seed(0)
    arguments = {"num_bits": bits, "symmetric": symmetric, "strategy": strategy, "group_size": group}
    scheme = quantization.QuantizationScheme(targets=["Linear"], weights=quantization.QuantizationArgs(**arguments))
    groups = 96 // (group or 96)
    state = {
        "weight": torch.randn(40, 96),
        "weight_scale": torch.rand(40, groups) + 0.1,
        "weight_zero_point": torch.randint(-3, 4, (40, groups)).to(torch.int8) * (not symmetric),
    }
    compressor = compressors.BaseCompressor.get_value_from_registry("pack-quantized")
    parts = compressor.compress(state, scheme)
    wanted = compressor.decompress(parts, scheme)["weight"]
    weight = read(compressed_config(bits, group, strategy, symmetric=symmetric), parts)
    assert torch.allclose(weight.dequantize(), wanted, rtol=1e-6, atol=0)


def test_other_tensors_pass_and_nothing_is_read_before_it_is_asked_for() -> None:
    def fail() -> Tensor:
        raise AssertionError("read")

    layer = Layer.draw(8, 32)
    tensors = dict.fromkeys((f"a.{part}" for part in layer.gptq()), fail) | {"a.bias": fail, "norm.weight": fail}
    quantization = Quantization("gptq", "gptq", 4, 32)
    made = quantized_tensors(tensors, quantization, NAME)
    assert {*made} == {"a.weight", "a.bias", "norm.weight"}
    assert made["norm.weight"] is fail
    whole = quantized_tensors({**checkpoint(layer.gptq(), "a"), "b": lambda: torch.ones(1)}, quantization, NAME)
    assert torch.equal(whole["b"](), torch.ones(1))


def gptq(**changes: Tensor) -> dict[str, Tensor]:
    return {**Layer.draw(8, 64, symmetric=True).gptq(), **changes}


NAN = torch.full((2, 8), 1.0).index_fill(1, torch.tensor([3]), float("nan")).half()
DAMAGED = [
    ({"qweight": torch.zeros(8, 8)}, {}, "qweight is float32, but must be int32"),
    ({"qweight": torch.zeros(8).int()}, {}, "qweight is 8, but must be a matrix"),
    ({"qweight": torch.zeros(0, 8).int()}, {}, "qweight is 0 x 8, but must be a matrix"),
    ({"scales": torch.ones(2, 9).half()}, {}, "scales is 2 x 9, but must be 2 x 8 beside the layer's other tensors"),
    ({"scales": torch.ones(2, 8).int()}, {}, "scales is int32, but must be float16 or bfloat16 or float32"),
    ({"scales": NAN}, {}, "scales holds 2 scales that are NaN, infinite or too large"),
    ({"qzeros": torch.zeros(2, 2).int()}, {}, "qzeros is 2 x 2, but must be 2 x 1 beside the layer's other tensors"),
    ({"qzeros": torch.zeros(2, 1).int()}, {}, "qzeros holds the zero point 1, but symmetric weights have 8"),
    ({"g_idx": torch.arange(64).int()}, {}, "g_idx names groups from 0 to 63, but there are 2"),
    ({"g_idx": torch.arange(-1, 63).int() // 32}, {}, "g_idx names groups from -1 to 1, but there are 2"),
    ({"g_idx": torch.zeros(63).int()}, {}, "g_idx is 63, but must be 64 beside the layer's other tensors"),
    ({}, {"group_size": 48}, "qweight has 64 inputs, which groups of 48 do not divide (group_size in config.json)"),
    ({"qweight": torch.zeros(8, 8).int()}, {"bits": 3}, "qweight has 8 rows, which 3 bits do not fill"),
]  # fmt: skip


@pytest.mark.parametrize(("changes", "settings", "said"), DAMAGED)
def test_damaged_parts_are_named(changes: dict[str, Tensor], settings: dict[str, Any], said: str) -> None:
    quantization = quantization_of(config("gptq", **{"bits": 4, "group_size": 32, "sym": True, **settings}))
    assert isinstance(quantization, Quantization)
    made = quantized_tensors(checkpoint(gptq(**changes)), quantization, NAME)
    with pytest.raises(ModelError) as caught:
        made["model.x.weight"]()
    assert str(caught.value) == f"{NAME}: model.x.{said}: get the files again"


def test_damaged_compressed_tensors_are_named() -> None:
    parts = Layer.draw(8, 64, -1).compressed(symmetric=False)
    settings = compressed_config(4, None, "channel", symmetric=False)

    def refused(**changes: Tensor) -> str:
        with pytest.raises(ModelError) as caught:
            read(settings, {**parts, **changes})
        return str(caught.value).removeprefix(f"{NAME}: model.x.").removesuffix(": get the files again")

    huge = torch.tensor([8, 10**15])
    assert refused(weight_shape=huge) == "weight_packed is 8 x 8, which is not 8 x 1000000000000000 in 4 bits"
    assert refused(weight_zero_point=torch.full((8, 1), 8).to(torch.int8)) == (
        "weight_zero_point has zero points from 8 to 8, which 4 bits cannot hold"
    )
    assert refused(weight_g_idx=torch.full((64,), 1).int()) == "weight_g_idx names groups from 1 to 1, but there are 1"


def test_missing_parts_are_named() -> None:
    ordered = Quantization("gptq", "gptq", 4, 32, ordered=True)

    def refused(tensors: dict[str, Any], quantization: Quantization = ordered) -> str:
        with pytest.raises(ModelError) as caught:
            quantized_tensors(tensors, quantization, NAME)
        return str(caught.value).removeprefix(f"{NAME}: ").removesuffix(": get the files again")

    whole = checkpoint(gptq())
    for part in ("qzeros", "scales", "g_idx"):
        left = {tensor: read for tensor, read in whole.items() if not tensor.endswith(part)}
        assert refused(left) == f"model.x.{part} is missing beside model.x.qweight"
    left = {tensor: read for tensor, read in whole.items() if not tensor.endswith("g_idx")}
    quantized_tensors(left, Quantization("gptq", "gptq", 4, 32), NAME)
    assert (
        refused({**whole, "y.scales": whole["model.x.scales"]})
        == "y.scales is not read without y.qweight, which is not there"
    )
    twice = {**whole, "model.x.weight": whole["model.x.scales"]}
    assert refused(twice) == "model.x.weight is there twice, plain and as model.x.qweight"
    said = "config.json says that its weights are gptq (gptq), but no tensor ends in qweight"
    assert refused({"a.weight": whole["model.x.scales"]}) == said
