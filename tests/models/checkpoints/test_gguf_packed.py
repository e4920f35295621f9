"""Products that kernels pack from the blocks of GGUF files, against torch's operators, byte by byte."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from dsbd_cli import ModelError
from dsbd_cli.models.checkpoints.gguf import formats
from dsbd_cli.models.checkpoints.gguf.file import GgufFile
from dsbd_cli.models.checkpoints.gguf.formats import FORMATS, GgufWeight
from dsbd_cli.models.checkpoints.gguf.header import BLOCKS, FOUR_BITS
from dsbd_cli.ops.cpu import blocks
from dsbd_cli.ops.cpu.int4 import CompiledInt4
from dsbd_cli.ops.cpu.int8 import CompiledInt8
from dsbd_cli.ops.cpu.int8_groups import CompiledInt8Groups
from dsbd_cli.ops.quantized_weight import GROUP, FourBit
from dsbd_cli.ops.select import packed_linear, quantize_missing, stored_linear
from tests.helpers.kernels import int4_parts, packed_words
from tests.helpers.raw_gguf import HALVES, info, random_blocks, raw_gguf

pytestmark = pytest.mark.skipif(quantize_missing("int4") is not None, reason=f"{quantize_missing('int4')}")

# Of formats of four bits: the byte at which levels begin, the bytes of levels whose lower halves come before their
# upper ones, scales [n, groups] of blocks, and how far levels are above the numbers that they stand for.
LEVELS: dict[str, tuple[int, int, Callable[[Tensor], Tensor], int]] = {
    "Q4_0": (2, 16, lambda blocks: formats._half(blocks, 0), 8),
    "Q4_1": (4, 16, lambda blocks: formats._half(blocks, 0), 0),
    "Q4_K": (16, 32, lambda blocks: formats._k_parts(blocks)[0], 0),
    "IQ4_NL": (2, 16, lambda blocks: formats._half(blocks, 0), 128),
    "IQ4_XS": (8, 16, formats._iq4_scales, 128),
    "MXFP4": (1, 16, formats._e8m0_scales, 12),
}
LEAST: dict[str, Callable[[Tensor], Tensor]] = {  # offsets of formats that have some
    "Q4_1": lambda blocks: formats._half(blocks, 2),
    "Q4_K": lambda blocks: formats._k_parts(blocks)[1],
}


def weight(kind: str, rows: int, columns: int, seed: int = 0) -> GgufWeight:
    return GgufWeight("w", torch.from_numpy(random_blocks(kind, rows, columns, seed)), kind, "target model 'x': x.gguf")


def bits(values: Tensor) -> Tensor:
    return values.view(torch.int32)


def four_bits(stored: GgufWeight) -> FourBit:
    """A weight's levels, scales and offsets, by operators of torch."""
    start, span, scales_of, shift = LEVELS[stored.kind]
    size = BLOCKS[stored.kind][1]
    parts = stored._packed().reshape(-1, size)
    scales = scales_of(parts)
    offsets = LEAST[stored.kind](parts) if stored.kind in LEAST else scales * -float(shift)
    levels = formats._nibbles(parts[:, start:], span).view(stored.shape)
    rows = len(stored)
    return FourBit(packed_words(levels), scales.view(rows, -1), offsets.reshape(rows, -1), blocks.table(stored.kind))


def packed(kind: type[CompiledInt8], weights: Sequence[Any], outliers: Tensor, dtype: torch.dtype) -> CompiledInt8:
    return kind(weights, outliers, torch.zeros(sum(map(len, weights))), packed_linear, dtype)


def bytes_of(values: Tensor) -> tuple[Tensor, ...]:
    """What is stored of values [o, i]: bytes [o, i], scales and offsets [o, g] in float16, and their factor [o]. By
    operators of torch, each of which rounds once."""
    groups = values.unflatten(1, (-1, GROUP))
    scales = (groups.abs().amax(2) / 127).clamp_min(torch.finfo(torch.float32).tiny)
    levels = (groups / scales[..., None]).round().add(128).flatten(1).to(torch.uint8)
    offsets = scales * -128
    factor = torch.maximum(scales, offsets.abs() * torch.tensor(1 / 15)).amax(1)
    return levels, (scales / factor[:, None]).half(), (offsets / factor[:, None]).half(), factor


def assert_same(ours: CompiledInt8, theirs: CompiledInt8) -> None:
    for mine, wanted in zip(int4_parts(ours), int4_parts(theirs), strict=True):  # nothing reads rows that fill a block
        assert torch.equal(mine[: ours._outputs], wanted[: ours._outputs])
    assert torch.equal(bits(ours.scales), bits(theirs.scales))
    assert torch.equal(ours._outlier_lines, theirs._outlier_lines)


@pytest.mark.parametrize("kind", FORMATS)
def test_formats_are_described_twice_alike(kind: str) -> None:
    form, table = blocks.FORMATS[kind], blocks.table(kind)
    theirs = {"IQ4_NL": formats.LEVELS, "IQ4_XS": formats.LEVELS, "MXFP4": formats.DOUBLED}.get(kind)
    assert (form.numbers, form.size) == BLOCKS[kind]
    assert (table is None) == (theirs is None)
    assert table is None or tuple((table.int() - form.shift).tolist()) == theirs
    assert blocks.are_four_bits([kind]) == (kind in FOUR_BITS)
    assert set(FOUR_BITS) == set(LEVELS)


@pytest.mark.parametrize("kind", FOUR_BITS)
def test_levels_scales_and_offsets_are_those_of_the_values(kind: str) -> None:
    """Guards what the packed products below are compared with."""
    stored = weight(kind, 6, 512)
    form = four_bits(stored)
    assert form.scales.shape == form.offsets.shape == (6, 512 // GROUP)
    # an offset of 128 scales is far larger than the values, so it costs some of their last bits
    atol = 1e-6 * float(form.offsets.abs().max())
    torch.testing.assert_close(form.columns(torch.arange(512)), stored.dequantize_by_torch(), rtol=1e-6, atol=atol)


@pytest.mark.parametrize("kind", FORMATS)
def test_the_kernel_unpacks_the_bits_that_torch_does(kind: str) -> None:
    ours = weight(kind, 70, 768)
    wanted = ours.dequantize_by_torch()
    assert torch.equal(bits(ours.dequantize()), bits(wanted))
    rows = torch.tensor([69, 3, 3])
    assert torch.equal(bits(ours.dequantize(rows)), bits(wanted[rows]))
    assert torch.equal(bits(ours.dequantize(slice(5, 40))), bits(wanted[5:40]))
    assert torch.equal(bits(ours.take(rows).dequantize(torch.tensor([1]))), bits(wanted[3:4]))


@given(data=st.data())
@settings(deadline=None, max_examples=30)
def test_four_bits_are_packed_as_torch_packs_them(data: st.DataObject) -> None:
    kinds = data.draw(st.lists(st.sampled_from(FOUR_BITS), min_size=1, max_size=3))
    kinds = [kind for kind in kinds if blocks.are_four_bits([kind, kinds[0]])]
    widths = st.sampled_from((256, 512, 768) if any(BLOCKS[kind][0] == 256 for kind in kinds) else (32, 96, 288, 544))
    columns = data.draw(widths)
    weights = [weight(kind, data.draw(st.integers(1, 140)), columns, seed) for seed, kind in enumerate(kinds)]
    channels = data.draw(st.sets(st.integers(0, columns - 1), min_size=1, max_size=columns // 2))
    dtype, outliers = data.draw(st.sampled_from((torch.float32, torch.bfloat16))), torch.tensor(sorted(channels))
    ours = packed(CompiledInt4, [part.blocks() for part in weights], outliers, dtype)
    theirs = packed(CompiledInt4, [four_bits(part) for part in weights], outliers, dtype)
    assert_same(ours, theirs)
    tables = [None if product.table is None else product.table.tolist() for product in (ours, theirs)]  # type: ignore[attr-defined]
    assert tables[0] == tables[1]
    x = torch.randn(3, columns, generator=torch.Generator().manual_seed(1)).to(dtype)
    assert torch.equal(ours(x), theirs(x))


@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_bytes_are_those_of_the_dequantised_weight(
    kind: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    weights = [weight(kind, 130, 768), weight("Q6_K", 7, 768, 1)]
    outliers = torch.tensor([0, 31, 32, 255, 767])
    theirs = packed(CompiledInt8Groups, [part.dequantize_by_torch() for part in weights], outliers, dtype)
    assert_same(packed(CompiledInt8Groups, [part.blocks() for part in weights], outliers, dtype), theirs)
    monkeypatch.setattr("dsbd_cli.ops.cpu.int8_groups.AT_ONCE", 768 * 64)  # in pieces, as other files' weights are
    assert_same(packed(CompiledInt8Groups, weights, outliers, dtype), theirs)
    values = torch.cat([part.dequantize_by_torch() for part in weights])
    values[:, outliers] = 0
    stored = (*int4_parts(theirs), theirs.scales)
    for ours, wanted in zip(stored, bytes_of(values), strict=True):
        assert torch.equal(ours[: len(wanted)], wanted)


@pytest.mark.parametrize("kind", FORMATS)
def test_products_are_near_those_of_the_dequantised_weight(kind: str) -> None:
    parts = weight(kind, 100, 512).split([60, 40])
    product = stored_linear(parts, [None, None], torch.tensor([3]), torch.float32)
    assert (type(product.backend) is CompiledInt4) == (kind in FOUR_BITS)
    x = torch.randn(5, 512, generator=torch.Generator().manual_seed(2))
    wanted = x @ torch.cat([part.dequantize() for part in parts]).t()
    assert (product.compute(x) - wanted).norm() / wanted.norm() < 0.03


@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_scale_that_is_no_number_is_named(kind: str, value: float) -> None:
    for at in HALVES[kind] or (0,):
        broken = weight(kind, 70, 512)
        last = broken._data.view(-1, BLOCKS[kind][1])[-1]
        if HALVES[kind]:
            last[at : at + 2] = torch.tensor([value], dtype=torch.float16).view(torch.uint8)
        else:
            last[0] = 255 if math.isnan(value) else 252
        with pytest.raises(ModelError, match="has scales in w that are NaN or infinite"):
            stored_linear([broken], [None], torch.tensor([3]), torch.float32)


def test_memory_of_packed_products_is_known_before(tmp_path: Path) -> None:
    """From the header alone: of two experts with four bits, of others, and not of the table of an untied model."""
    kinds = {"token_embd.weight": 14, "output.weight": 14, "blk.0.ffn_up_exps.weight": 12, "blk.0.attn_norm.weight": 0}
    data, infos = b"", []
    for name, kind in kinds.items():
        shape = (256,) if kind == 0 else (256, 32, 2) if "exps" in name else (256, 64)
        infos.append(info(name, shape, kind, len(data)))
        size = 1024 if kind == 0 else 64 * (210 if kind == 14 else 144)
        data += bytes(-(-size // 32) * 32)
    path = tmp_path / "x.gguf"
    path.write_bytes(raw_gguf(tensors=infos, data=data))
    made = [
        packed(kind, [weight(form, 64, 256).blocks()], torch.tensor([0]), torch.float32).weights
        for kind, form in ((CompiledInt8Groups, "Q6_K"), (CompiledInt4, "Q4_K"))
    ]
    assert GgufFile.open(path, "x").packed_bytes == sum(part.numel() * part.element_size() for part in made)
