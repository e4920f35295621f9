"""Products that kernels pack from the blocks of GGUF files, against torch's operators, byte by byte."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from dsbd_cli import ModelError
from dsbd_cli.models.checkpoints.gguf.file import GgufFile
from dsbd_cli.models.checkpoints.gguf.formats import FORMATS, GgufWeight
from dsbd_cli.models.checkpoints.gguf.header import BLOCKS, FOUR_BITS
from dsbd_cli.ops.cpu import blocks
from dsbd_cli.ops.cpu.int4 import CompiledInt4
from dsbd_cli.ops.cpu.int8 import CompiledInt8
from dsbd_cli.ops.select import packed_linear, quantize_missing, stored_linear
from tests.helpers.raw_gguf import HALVES, info, random_blocks, raw_gguf

pytestmark = pytest.mark.skipif(quantize_missing("int4") is not None, reason=f"{quantize_missing('int4')}")


def weight(kind: str, rows: int, columns: int, seed: int = 0) -> GgufWeight:
    return GgufWeight("w", torch.from_numpy(random_blocks(kind, rows, columns, seed)), kind, "target model 'x': x.gguf")


def bits(values: Tensor) -> Tensor:
    return values.view(torch.int32)


def packed(kind: type[CompiledInt8], weights: Sequence[Any], outliers: Tensor, dtype: torch.dtype) -> CompiledInt8:
    return kind(weights, outliers, torch.zeros(sum(map(len, weights))), packed_linear, dtype)


def assert_same(ours: CompiledInt8, theirs: CompiledInt8) -> None:
    assert torch.equal(ours.weights, theirs.weights)
    assert torch.equal(bits(ours.scales), bits(theirs.scales))
    assert torch.equal(ours._outlier_lines, theirs._outlier_lines)


@pytest.mark.parametrize("kind", FORMATS)
def test_formats_are_described_twice_alike(kind: str) -> None:
    form, table = blocks.FORMATS[kind], blocks.table(kind)
    theirs = FORMATS[kind].table
    assert (form.numbers, form.size) == BLOCKS[kind]
    assert (table is None) == (theirs is None)
    assert table is None or theirs is None or torch.equal(table, theirs)
    assert blocks.are_four_bits([kind]) == (FORMATS[kind].parts is not None) == (kind in FOUR_BITS)


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
    theirs = packed(CompiledInt4, [part.fourbit() for part in weights], outliers, dtype)
    assert_same(ours, theirs)
    tables = [None if product.table is None else product.table.tolist() for product in (ours, theirs)]  # type: ignore[attr-defined]
    assert tables[0] == tables[1]
    x = torch.randn(3, columns, generator=torch.Generator().manual_seed(1)).to(dtype)
    assert torch.equal(ours(x), theirs(x))


@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_int8_is_that_of_the_dequantised_weight(kind: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    weights = [weight(kind, 130, 768), weight("Q6_K", 7, 768, 1)]
    outliers = torch.tensor([0, 31, 32, 255, 767])
    theirs = packed(CompiledInt8, [part.dequantize_by_torch() for part in weights], outliers, dtype)
    assert_same(packed(CompiledInt8, [part.blocks() for part in weights], outliers, dtype), theirs)
    monkeypatch.setattr("dsbd_cli.ops.cpu.int8.AT_ONCE", 768 * 64)  # in pieces, as other files' weights are
    assert_same(packed(CompiledInt8, weights, outliers, dtype), theirs)


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
    """From the header alone: of blocks with four bits, of others, and not of the table of an untied model."""
    kinds = {"token_embd.weight": 14, "output.weight": 14, "blk.0.ffn_up.weight": 12, "blk.0.attn_norm.weight": 0}
    data, infos = b"", []
    for name, kind in kinds.items():
        shape = (256,) if kind == 0 else (256, 64)
        infos.append(info(name, shape, kind, len(data)))
        size = 1024 if kind == 0 else 64 * (210 if kind == 14 else 144)
        data += bytes(-(-size // 32) * 32)
    path = tmp_path / "x.gguf"
    path.write_bytes(raw_gguf(tensors=infos, data=data))
    made = [
        packed(kind, [weight(form, 64, 256).blocks()], torch.tensor([0]), torch.float32).weights
        for kind, form in ((CompiledInt8, "Q6_K"), (CompiledInt4, "Q4_K"))
    ]
    assert GgufFile.open(path, "x").packed_bytes == sum(part.numel() * part.element_size() for part in made)
