"""Block formats of GGUF against the package of llama.cpp."""

from __future__ import annotations

import gguf
import pytest
import torch
from torch import Tensor

from dsbd_cli import ModelError
from dsbd_cli.models.checkpoints.gguf import formats
from dsbd_cli.models.checkpoints.gguf.formats import FORMATS, GgufWeight
from dsbd_cli.models.checkpoints.gguf.header import BLOCKS, PLAIN, TYPES
from tests.helpers.raw_gguf import HALVES, random_blocks


def weight(kind: str, rows: int = 6, columns: int = 512, seed: int = 0) -> tuple[GgufWeight, Tensor]:
    """A weight, and its values by llama.cpp's package."""
    data = random_blocks(kind, rows, columns, seed)
    values = gguf.dequantize(data, gguf.GGMLQuantizationType[kind])
    return GgufWeight(
        "blk.0.ffn_up.weight", torch.from_numpy(data), kind, "target model 'x': x.gguf"
    ), torch.from_numpy(values)


def test_types_are_ggmls() -> None:
    for number, kind in TYPES.items():
        if kind in gguf.GGMLQuantizationType.__members__:
            assert gguf.GGMLQuantizationType[kind] == number
    assert set(TYPES) >= {int(kind) for kind in gguf.GGMLQuantizationType}
    for kind, sizes in BLOCKS.items():
        assert gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]] == sizes
    assert set(BLOCKS) == set(FORMATS) | set(PLAIN)
    assert set(HALVES) == set(FORMATS)


@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.parametrize("chunk", [formats.CHUNK, 768])
def test_values_are_those_of_llama_cpp(kind: str, chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(formats, "CHUNK", chunk)
    ours, values = weight(kind)
    assert ours.shape == values.shape == (6, 512)
    assert torch.equal(ours.dequantize(), values)


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "MXFP4"])
def test_values_of_what_llama_cpp_has_quantised(kind: str) -> None:
    original = torch.randn(4, 64, generator=torch.Generator().manual_seed(1))
    data = gguf.quantize(original.numpy(), gguf.GGMLQuantizationType[kind])
    ours = GgufWeight("w", torch.from_numpy(data), kind, "x")
    assert torch.equal(ours.dequantize(), torch.from_numpy(gguf.dequantize(data, gguf.GGMLQuantizationType[kind])))
    assert float((ours.dequantize() - original).abs().mean()) < 0.2
    ours.check()


@pytest.mark.parametrize("kind", FORMATS)
def test_a_single_block(kind: str) -> None:
    ours, values = weight(kind, 1, BLOCKS[kind][0])
    assert torch.equal(ours.dequantize(), values)


@pytest.mark.parametrize("kind", FORMATS)
def test_some_rows(kind: str) -> None:
    ours, values = weight(kind)
    order = torch.tensor([5, 0, 0, 3])
    assert torch.equal(ours.dequantize(slice(1, 4)), values[1:4])
    assert torch.equal(ours.dequantize(order), values[order])
    assert torch.equal(ours.take(order).dequantize(slice(1, 3)), values[order][1:3])
    assert ours.dequantize(slice(0, 0)).shape == (0, 512)
    parts = ours.split([4, 2])
    assert [part.shape for part in parts] == [(4, 512), (2, 512)]
    assert torch.equal(torch.cat([part.dequantize() for part in parts]), values)
    taken = ours.take(order)
    assert taken.shape == (4, 512)
    assert torch.equal(taken.take(torch.tensor([3, 1])).dequantize(), values[[3, 0]])
    assert torch.equal(torch.cat([part.dequantize() for part in taken.split([1, 3])]), values[order])


@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.parametrize("number", [float("nan"), float("inf"), float("-inf")])
def test_scales_that_are_no_numbers_are_told(kind: str, number: float) -> None:
    sound, size = random_blocks(kind, 6, 512), BLOCKS[kind][1]
    told = r"^target model 'x': x\.gguf has scales in blk\.0\.ffn_up\.weight that are NaN or infinite"
    for at in HALVES[kind] or (0,):
        data = torch.from_numpy(sound.copy())
        last = data[4].view(-1, size)[-1]
        last[at : at + 2] = torch.tensor([number], dtype=torch.float16).view(torch.uint8)
        if not HALVES[kind]:
            last[0] = 255
        ours = GgufWeight("blk.0.ffn_up.weight", data, kind, "target model 'x': x.gguf")
        for faulty in (ours, ours.take(torch.tensor([0, 4]))):
            with pytest.raises(ModelError, match=told):
                faulty.check()
        ours.take(torch.tensor([0, 5])).check()


def test_the_largest_scales_of_mxfp4_are_finite() -> None:
    data = torch.tensor([[formats.LARGEST_E8M0, *(0x7F,) * 16]], dtype=torch.uint8)  # levels 12 and -12
    largest = GgufWeight("w", data, "MXFP4", "x")
    largest.check()
    assert bool(largest.dequantize().isfinite().all())
    data[0, 0] += 1
    with pytest.raises(ModelError, match="NaN or infinite"):
        largest.check()
