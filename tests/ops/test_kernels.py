"""Each kernel of the table against its reference, on every processor that this machine can be.

Guards a kernel that no other test runs on this machine, a rest of a width that is left out, bits that depend on other
rows or on the threads, and a number that is none and leaves its row. What this machine is runs here, the others in a
process each, `DSBD_CPU=avx2 python -m tests.ops.test_kernels`, which prints a line for each case.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import json
import math
import os
import subprocess
import sys
import traceback
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from dsbd_cli.ops import reference, select
from dsbd_cli.ops.cpu import layer
from dsbd_cli.ops.cpu.runtime import FLOATS
from dsbd_cli.ops.processor import VARIABLE, Processor, current, possible
from dsbd_cli.ops.recording import Arena
from tests.helpers.kernels import int4_parts, normal
from tests.ops.cpu.test_experts import check_experts

ROOT = Path(__file__).parents[2]
THREADS = 1, 2, 3
WIDTHS = frozenset({64})
NOTHING = slice(0, 0)
# of float32: sums in another order, and exp2 of our own; of bfloat16: a rounding that falls the other way
CLOSE = {torch.float32: 1e-5, torch.bfloat16: 2.0**-7}


def check_rows(
    run: Callable[[Tensor], Tensor],
    reference: Callable[[Tensor], Tensor],
    x: Tensor,
    limit: float,
    atol: float | None = None,
    *,
    ours: bool = True,
    at: int = 5,
    exact: slice = NOTHING,
    counts: tuple[int, ...] = THREADS,
    infinite: bool = True,
) -> None:
    """Numbers, and the bits of a row alone, beside others and by any number of threads; and what a number that is none
    makes of its row, and that it stays there.

    limit, atol: of the difference from the reference. ours: not torch's, whose bits may change with the number of
    threads. at: the place of a number that is none. exact: columns with the bits of the reference. counts: of threads.
    infinite: what an infinity makes of its row is that of the reference, too.
    """
    limits, before = (
        {"rtol": limit, "atol": limit if atol is None else atol, "equal_nan": True},
        torch.get_num_threads(),
    )
    bad = {strange: x.clone() for strange in (math.nan, math.inf, -math.inf)}
    for strange, rows in bad.items():
        rows[1, at] = strange
    wanted, spoilt = reference(x), {strange: reference(rows)[1] for strange, rows in bad.items()}
    assert wanted.isfinite().all()
    alone: Tensor | None = None
    try:
        for threads in counts:
            torch.set_num_threads(threads)
            if alone is None or not ours:
                alone = torch.cat([run(row) for row in x.split(1)]) if ours else run(x)
                torch.testing.assert_close(alone.double(), wanted.double(), **limits)
                assert torch.equal(alone[:, exact], wanted[:, exact])
            more = ((0, 6), (7, len(x))) if ours else ()
            for first, last in ((0, len(x)), (0, 1), (3, 8), (len(x) - 1, len(x)), *more):
                assert torch.equal(run(x[first:last]), alone[first:last]), (threads, first, last)
            for strange, rows in bad.items():
                result, row = run(rows), spoilt[strange]
                assert torch.equal(result[[0, 2, 7]], alone[[0, 2, 7]]), (threads, strange)
                if math.isinf(strange) and not infinite:
                    continue
                assert torch.equal(result[1].isfinite(), row.isfinite()), (threads, strange)
                if math.isnan(strange):
                    assert torch.equal(result[1].isnan(), row.isnan())
                finite = row.isfinite()
                torch.testing.assert_close(result[1][finite].double(), row[finite].double(), **limits)
    finally:
        torch.set_num_threads(before)


def norm(op: Any, dtype: torch.dtype) -> None:
    """The sum has the bits of the reference. Rows of any strides, of tensors with three dimensions."""
    wide = normal(dtype, 3, 5, 112) * 3
    kinds = ({}, {"unit_offset": True}, {"wide": True})
    for width, adds, kind in itertools.product((48, 272), (False, True), kinds):
        x, rms = normal(dtype, 150, 2 * width) * 3, reference.Norm(normal(dtype, width, seed=2), 1e-5, **kind)

        def run(rows: Tensor, norm: Any = op, width: int = width, adds: bool = adds, rms: Any = rms) -> Tensor:
            normed, summed = norm(rms, rows[:, :width], rows[:, width:] if adds else None)
            return torch.cat((normed, summed), 1) if adds else normed

        exact = slice(width, None) if adds else NOTHING
        check_rows(run, functools.partial(run, norm=reference.norm), x, CLOSE[dtype], exact=exact)
        for x in (wide[..., :96], wide[:1, :1, 16:112], wide.transpose(0, 1)[..., :32]):
            more = normal(dtype, *x.shape, seed=1) if adds else None
            rms = reference.Norm(normal(dtype, x.shape[-1], seed=2), 1e-5, **kind)
            (normed, summed), wanted = op(rms, x, more), reference.norm(rms, x, more)
            torch.testing.assert_close(normed, wanted[0], rtol=CLOSE[dtype], atol=CLOSE[dtype])
            assert torch.equal(summed, wanted[1])


def gated(op: Any, dtype: torch.dtype) -> None:
    both = normal(dtype, 150, 600) * 8
    both[0, 8:12] = torch.tensor([-400.0, 400.0, 0.0, -90.0])
    for form in ((False,), (True,), (False, reference.ClampedGLU(7.0, 1.702))):
        run, plain = (lambda x, gated=gated, form=form: gated(x[:, 8:552], *form) for gated in (op, reference.gated))
        check_rows(run, plain, both, CLOSE[dtype], at=13)
        cube = both[:6].view(2, 3, 600)[..., 8:552]
        assert torch.equal(op(cube, *form).flatten(0, 1), run(both[:6]))


def output_gate(op: Any, dtype: torch.dtype) -> None:
    """A factor of each number, and one of each head."""
    heads, dim = 3, 48
    both = normal(dtype, 150, 2 * heads * dim + 5) * 4
    both[0, -8:-4] = torch.tensor([-400.0, 400.0, 0.0, -90.0])
    for width in (heads * dim, heads):

        def run(rows: Tensor, gate: Any = op, width: int = width) -> Tensor:
            attended = rows[:, : heads * dim].contiguous().view(1, len(rows), heads, dim)
            return gate(attended, rows[:, -width:].unsqueeze(0)).flatten(2)[0]

        check_rows(run, functools.partial(run, gate=reference.output_gate), both, CLOSE[dtype])


def gated_norm(op: Any, dtype: torch.dtype) -> None:
    """Either order, and no norm; groups of one vector and of several."""
    for groups, first, normed in itertools.product((1, 3), (False, True), (False, True)):
        width = groups * 48
        both = normal(dtype, 150, 2 * width + 8) * 3
        rms = reference.Norm(normal(dtype, width, seed=2), 1e-5) if normed else None

        def run(
            rows: Tensor, norm: Any = op, rms: Any = rms, width: int = width, groups: int = groups, first: bool = first
        ) -> Tensor:
            return norm(rms, rows[:, :width], rows[:, -width:], groups, first)

        check_rows(run, functools.partial(run, norm=reference.gated_norm), both, 2 * CLOSE[dtype], infinite=False)


def delta_inputs(op: Any, dtype: torch.dtype) -> None:
    """Always in float32. The last columns are betas and steps."""
    groups, dim, heads = 3, 48, 6
    both = normal(torch.float32, 150, 2 * groups * dim + 40 + 2 * heads) * 4
    both[0, -2:] = torch.tensor([-100.0, 100.0])
    decay, bias = -normal(torch.float32, heads, seed=1).exp(), normal(torch.float32, heads, seed=2)

    def run(rows: Tensor, inputs: Any = op) -> Tensor:
        parts = rows[:, : -2 * heads], rows[:, -2 * heads : -heads], rows[:, -heads:]
        made = inputs(*(part.unsqueeze(0) for part in parts), decay, bias, groups, dim, 2.0)
        return torch.cat([part.flatten(2)[0] for part in made], 1)

    check_rows(run, functools.partial(run, inputs=reference.delta_inputs), both, CLOSE[torch.float32], infinite=False)


def step_sizes(op: Any, dtype: torch.dtype) -> None:
    """Always in float32, with and without limits."""
    heads = 11
    steps = normal(torch.float32, 150, heads + 3) * 4
    decay, bias = -normal(torch.float32, heads, seed=1).exp(), normal(torch.float32, heads, seed=2)
    for limits in ((0.0, math.inf), (0.01, 2.0)):

        def run(rows: Tensor, sizes: Any = op, limits: tuple[float, float] = limits) -> Tensor:
            return torch.cat([part[0] for part in sizes(rows[None, :, :heads], decay, bias, limits)], 1)

        plain = functools.partial(run, sizes=reference.step_sizes)
        check_rows(run, plain, steps, CLOSE[torch.float32], infinite=False)


def rotate(op: Any, dtype: torch.dtype) -> None:
    """Rows of two nodes, with and without norms of heads, and angles of each row or of all. Values are stored as they
    are; slots of no node stay as they were."""
    rows, heads, kv_heads, dim = 40, 6, 2, 96
    width = (heads + 2 * kv_heads) * dim
    both, turns = normal(dtype, rows, 2 * width + 32), normal(torch.float32, rows, 2, dim, seed=1)
    pairs = [
        tuple(reference.Norm(normal(dtype, dim, seed=seed), 1e-5, unit_offset) for seed in (3, 4))
        for unit_offset in (False, True)
    ]
    slots = torch.randperm(9 * rows, generator=torch.Generator().manual_seed(2))[: 2 * rows]
    for norms, shared in itertools.product((None, *pairs), (False, True)):

        def turned(x: Tensor, rotate: Any = op, norms: Any = norms, shared: bool = shared) -> list[Tensor]:
            """Queries, and the planes of keys and values."""
            count = len(x)
            cos, sin = (turn(turns[:1] if shared else turns[:count]).to(dtype) for turn in (torch.cos, torch.sin))
            planes = [normal(dtype, rows, 9, kv_heads, dim, seed=seed) for seed in (5, 6)]
            qkv = (
                x[:, : 2 * width].view(count, 2, width)
                if x.is_contiguous()
                else x[:, : 2 * width].unflatten(1, (2, width))
            )
            return [rotate(qkv, cos, sin, slots[: 2 * count].contiguous(), *planes, norms), *planes]

        def run(x: Tensor, rotate: Any = op, turned: Any = turned) -> Tensor:
            queries, *planes = turned(x, rotate)
            stored = [plane.flatten(0, 1)[slots[: 2 * len(x)]].reshape(len(x), -1) for plane in planes]
            return torch.cat((queries.flatten(1), *stored), 1)

        plain = functools.partial(run, rotate=reference.rotate)
        rotated, wanted = turned(both), turned(both, reference.rotate)
        for ours, theirs in zip(rotated, wanted, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=CLOSE[dtype], atol=CLOSE[dtype])
        assert torch.equal(rotated[2], wanted[2])
        if shared:
            check_rows(run, plain, both, CLOSE[dtype], exact=slice(-2 * kv_heads * dim, None))
        else:  # the first rows have the first angles
            assert torch.equal(run(both[:3]), run(both)[:3])


def program(op: Any, dtype: torch.dtype) -> None:
    """What is recorded, run twice, on other numbers the second time."""
    x, rms = normal(dtype, 150, 288), reference.Norm(normal(dtype, 288, seed=1), 1e-5)
    recorded, out = Arena().record(op, lambda: layer.gated(layer.norm(rms, x)[0], False))
    for seed in (2, 3):
        x.copy_(normal(dtype, 150, 288, seed=seed))
        recorded.run()
        assert torch.equal(out, layer.gated(layer.norm(rms, x)[0], False))


def linear(op: Any, dtype: torch.dtype) -> None:
    """Two layers as one product: fewer outputs than a block, rows beyond a chunk, inputs beyond a piece, outputs for
    many threads."""
    ours = op is select.linear.CompiledLinear
    shapes = ((9, 64, (3, 5)), (111, 160, (72, 58)), (111, 4500, (64, 36)), (111, 2600, (1300,)))
    for rows, inputs, outputs in shapes if ours else shapes[:3]:
        weights = [normal(dtype, count, inputs, seed=count) / inputs**0.5 for count in outputs]
        bias, x = normal(dtype, sum(outputs), seed=1), normal(dtype, rows, inputs + 8, seed=2)
        product = op(weights)
        own, exact_weight = product.bias(bias), torch.cat(weights).double().t()

        def run(x: Tensor, product: Any = product, own: Tensor = own, inputs: int = inputs) -> Tensor:
            result: Tensor = product(x[:, :inputs], own)
            return result

        def plain(x: Tensor, weight: Tensor = exact_weight, bias: Tensor = bias, inputs: int = inputs) -> Tensor:
            return x[:, :inputs].double() @ weight + bias.double()

        limit = {torch.float32: 1e-5, torch.bfloat16: 3e-2}[dtype]
        check_rows(run, plain, x, limit, ours=ours, counts=(*THREADS, 7) if ours else THREADS)
        if ours:
            exact, limit = plain(x), {torch.float32: 1e-5, torch.bfloat16: 1e-2}[dtype]
            assert (run(x).double() - exact).abs().max() <= limit * exact.abs().max()


def int8_reference(weight: Tensor, bias: Tensor | None, x: Tensor, outliers: Tensor) -> Tensor:
    """The product [r, o] in float64: integers of weights [o, i] and inputs [r, i], and the outliers beside them."""
    kept = torch.ones(weight.shape[1], dtype=torch.bool)
    kept[outliers] = False
    ordinary_weight, ordinary = weight.float() * kept, x.float() * kept
    scales = ordinary_weight.abs().amax(1) / 127
    steps = ordinary.abs().amax(-1, keepdim=True) / 127
    levels = torch.floor(ordinary / steps + 128.5).sub(128).long()
    integers = levels @ torch.round(ordinary_weight / scales[:, None]).long().t()
    few = x.double()[:, outliers] @ weight.double()[:, outliers].t()
    return integers.double() * scales.double() * steps.double() + few + (0 if bias is None else bias.double())


def int8(op: Any, dtype: torch.dtype) -> None:
    """Rows with a few channels a hundred times as large as the others. Any number of outliers."""
    for rows, inputs, outputs, count in ((9, 160, 72, 1), (130, 160, 130, 3), (130, 4800, 700, 32), (9, 5000, 3, 2)):
        weight, bias = normal(dtype, outputs, inputs, seed=1), normal(dtype, outputs, seed=2)
        outliers = torch.arange(5, inputs, inputs // count - 1)[:count]
        x = normal(dtype, rows, inputs, seed=3)
        x[:, outliers] *= 100
        product = op([weight], outliers, bias, select.packed_linear)
        spread = float(int8_reference(weight, bias, x, outliers).std())
        limit = 1e-5 if dtype == torch.float32 else 1.6e-2

        def run(x: Tensor, product: Any = product, spread: float = spread) -> Tensor:
            result: Tensor = product(x) / spread
            return result

        def plain(
            x: Tensor, weight: Tensor = weight, bias: Tensor = bias, outliers: Tensor = outliers, spread: float = spread
        ) -> Tensor:
            return int8_reference(weight, bias, x, outliers) / spread

        for at in (5, 6):  # an outlier, one of the integers
            check_rows(run, plain, x, limit, at=at)
        assert product(x[:0]).shape == (0, outputs)


QUANTIZED = {kernel.weights: kernel.op for kernel in select.TABLE if kernel.weights.startswith("int")}
QUANTIZED["int8"] = select.int8.CompiledInt8  # not torch's
# the largest bytes, whose sums need the most bits, and those of no order
TABLE = torch.tensor([255, 254, 255, 0, 128, 127, 241, 1, 255, 255, 3, 64, 200, 90, 255, 253], dtype=torch.uint8)


def in_groups(tables: tuple[Tensor | None, ...], error: float, op: Any, dtype: torch.dtype) -> None:
    """The bits of the reference without outliers, with and without a table. Equal weights, and rows of zeros."""
    for rows, inputs, outputs, count in ((9, 160, 72, 1), (37, 170, 130, 3), (130, 2400, 200, 32)):
        weight, bias = normal(dtype, outputs, inputs, seed=1) / 50, normal(dtype, outputs, seed=2)
        weight[3, :64], weight[5] = 0.25, 0
        outliers = torch.arange(5, inputs, inputs // count - 1)[:count]
        x = normal(dtype, rows, inputs, seed=3)
        x[:, outliers] *= 100
        product = op([weight], outliers, bias, select.packed_linear)
        levels, scales, offsets = int4_parts(product)
        stored = (levels.unflatten(1, (-1, 32)) * scales.double()[..., None] + offsets.double()[..., None]).flatten(1)
        stored = (stored * product.scales.double()[:, None])[:outputs, :inputs]
        wanted = weight.double()
        wanted[:, outliers] = 0
        assert (stored - wanted).norm() < error * wanted.norm()
        assert torch.equal(stored[5], torch.zeros(inputs).double())
        alike = wanted[3, 32:64] != 0  # but for outliers, whose x is 0
        torch.testing.assert_close(stored[3, 32:64][alike], wanted[3, 32:64][alike], rtol=1e-3, atol=0)

        for strange in (math.nan, math.inf):
            broken = weight.clone()
            broken[7, 40] = strange  # of one output, whose results are none
            finite = op([broken], outliers, bias, select.packed_linear)(x).isfinite()
            assert not finite[:, 7].any()
            assert finite.sum() == rows * (outputs - 1)
        zero_bias = op([weight], outliers, torch.zeros_like(bias), select.packed_linear)
        x_levels, steps, outlier_x, sums = product.levels(x)
        assert torch.equal(sums[..., 0], x_levels.float().unflatten(1, (-1, 32)).sum(2) * sums[..., 1])
        x_levels[0], sums[0, :, 0], sums[0, :, 1] = 127, 127 * 32, 1  # the largest sums
        parts = x_levels, steps, torch.zeros_like(outlier_x), sums
        for table in tables:
            zero_bias.table = table
            exact = reference.int4_sums(x_levels, sums[..., 1], levels, scales, offsets, table) * product.scales
            for some in {rows, *range(1, 15)}:  # each size of a tile
                ours = zero_bias.multiply(*(part[:some] for part in parts))
                assert torch.equal(ours, exact.to(dtype)[:some, :outputs])

        def plain(x: Tensor, stored: Tensor = stored, weight: Tensor = weight, bias: Tensor = bias,
                  outliers: Tensor = outliers) -> Tensor:  # fmt: skip
            ordinary, few = x.float().clone(), x.double()[:, outliers] @ weight.double()[:, outliers].t()
            ordinary[:, outliers] = 0
            groups = torch.nn.functional.pad(ordinary, (0, -ordinary.shape[1] % 32)).unflatten(1, (-1, 32))
            steps = groups.abs().amax(2, keepdim=True).div(127).clamp_min(1e-30)
            integers = torch.floor(groups / steps + 128.5).sub(128).double()
            return (integers * steps.double()).flatten(1)[:, : x.shape[1]] @ stored.t() + few + bias.double()

        spread = float(plain(x).std())
        limit = 1e-5 if dtype == torch.float32 else 1.6e-2
        for at in (5, 6):  # an outlier, one of the integers
            check_rows(lambda x: product(x) / spread, lambda x: plain(x) / spread, x, limit, at=at)  # noqa: B023
        assert product(x[:0]).shape == (0, outputs)


def bits(weights: str, dtype: torch.dtype) -> str:
    """A checksum of the results of our quantized products."""
    kind = QUANTIZED[weights]
    digest = hashlib.sha256()
    for rows, inputs, outputs in ((1, 160, 64), (4, 2048, 200), (37, 5000, 70)):
        weight, bias, x = (normal(dtype, *shape) for shape in ((outputs, inputs), (outputs,), (rows, inputs)))
        x[:, 3:90:29] *= 100
        with torch.inference_mode():
            product = kind([weight], torch.tensor([3, 32, 61]), bias, select.packed_linear)
            for product.table in (None, TABLE) if weights == "int4" else (None,):
                digest.update(product(x).contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def pick(op: Any, dtype: torch.dtype) -> None:
    """Rows of the batch with rows of the table of their own, picked anew in other numbers. A product's bits are its own
    beside any others, in any order of rows of the table. The reference is checked, too."""
    rng = torch.Generator().manual_seed(1)
    table = normal(dtype, 200, 160)
    picked, plain = op(table, dtype), reference.PickedRows(table, dtype)
    assert not isinstance(picked, reference.PickedRows)
    limits = {
        torch.float32: {"rtol": 1e-5, "atol": 1e-4},
        torch.bfloat16: {"rtol": 3e-2, "atol": 0.1},
    }[dtype]

    def product(ids: Tensor, x: Tensor) -> Tensor:
        picked.take(ids)
        result: Tensor = picked.compute(x)
        return result

    for batch, count, nodes in itertools.product((3, 1), (1, 64, 70, 128, 130), (1, 8, 9, 37)):
        ids, x = torch.randint(200, (batch, count), generator=rng), normal(dtype, batch, nodes, 160, seed=nodes)
        wanted = torch.einsum("rnh,roh->rno", x.double(), table[ids].double())
        products = product(ids, x)
        plain.take(ids)
        for result in (products, plain.compute(x)):
            torch.testing.assert_close(result.double(), wanted, **limits)
        order = torch.randperm(count, generator=rng)
        assert torch.equal(product(ids[:, order], x), products[..., order])
        for row in range(batch):
            assert torch.equal(product(ids[row : row + 1], x[row : row + 1])[0], products[row])
            assert torch.equal(product(ids[row : row + 1], x[row : row + 1, -1:])[0, 0], products[row, -1])
        if batch == 1 and nodes > 8:
            run = lambda rows: picked.compute(rows[None])[0]  # noqa: E731
            exact = functools.partial(torch.matmul, other=table[ids[0]].double().t())
            check_rows(run, lambda rows, exact=exact: exact(rows.double()), x[0], limits["rtol"], limits["atol"])


def path_attention(op: Any, dtype: torch.dtype) -> None:
    from tests.ops.cpu.test_attention import CASES as FORESTS
    from tests.ops.cpu.test_attention import LIMIT

    torch.manual_seed(0)
    before = torch.get_num_threads()
    try:
        for forest in FORESTS.values():
            case, runs = forest(dtype), []
            for threads in THREADS:
                torch.set_num_threads(threads)
                runs.append(case.run())
            wanted = case.reference()
            assert (runs[0].double() - wanted).abs().max() <= LIMIT[dtype] * max(1.0, float(wanted.abs().max()))
            if case.seen.shape[1] > 1 and case.bias is None and case.sinks is None:
                query = case.query.clone()
                query[:, :, 1] = math.nan
                strange = replace(case, query=query).run()
                assert strange[:, 1].isnan().all()
                assert torch.equal(strange[:, 0], runs[-1][:, 0])
    finally:
        torch.set_num_threads(before)


def prompt_attention(op: Any, dtype: torch.dtype) -> None:
    from tests.ops.cpu.test_prompt_attention import LIMIT, drawn
    from tests.ops.cpu.test_prompt_attention import reference as attention

    for heads, groups, nodes, slots, dim in (
        (2, 6, 9, 700, 128),
        (3, 3, 70, 300, 64),
        (1, 4, 8, 129, 80),
        (1, 1, 9, 1, 16),
    ):
        query, key, value = drawn(dtype, rows=1, heads=heads, groups=groups, nodes=nodes, slots=slots, dim=dim)

        def run(
            x: Tensor,
            attend: Any = op.attend,
            groups: int = groups,
            dim: int = dim,
            key: Tensor = key,
            value: Tensor = value,
        ) -> Tensor:
            """x: [n, H * G * E]; attention and log-sums of each node."""
            query = x.unflatten(1, (-1, dim)).transpose(0, 1)[None]
            parts = attend(query, key, value, torch.full((1, 1), key.shape[2]), dim**-0.5)
            return torch.cat([part[0].unflatten(1, (groups, len(x))).movedim(2, 0).flatten(1) for part in parts], 1)

        plain = functools.partial(run, attend=attention)
        check_rows(run, plain, query[0].transpose(0, 1).flatten(1), LIMIT[dtype], infinite=False)


def log_total(op: Any, dtype: torch.dtype) -> None:
    """Fewer numbers than a vector, rows with gaps between them, NaN in any part of a row."""

    def run(rows: Tensor) -> Tensor:
        total: Tensor = op(rows, rows.float().amax(-1, keepdim=True))
        return total

    def exact(rows: Tensor) -> Tensor:
        return torch.logsumexp(rows.double() - rows.double().amax(-1, keepdim=True), -1, keepdim=True)

    for vocabulary in (5, 16, 64, 67, 4096, 4096 + 64 + 21, 58_101, 70_001):
        values = normal(dtype, 9, vocabulary, seed=vocabulary) * 4
        values[6] -= 3e4
        values[7, 3:] = -math.inf
        check_rows(run, exact, values, 3e-7, at=min(5, vocabulary - 1))
        wide = torch.full((9, vocabulary + 79), 50.0, dtype=dtype)
        wide[:, :vocabulary] = values
        check_rows(
            lambda rows, last=vocabulary: run(rows[:, :last]),
            lambda rows, last=vocabulary: exact(rows[:, :last]),
            wide,
            3e-7,
            at=min(5, vocabulary - 1),
        )
        assert torch.equal(run(wide[:, :vocabulary]), run(values))
        for token in {0, 63, 64, 98, vocabulary - 1} & {*range(vocabulary)}:
            spoilt = values.clone()
            spoilt[1, token] = math.nan
            assert run(spoilt).isnan().flatten().tolist() == [row == 1 for row in range(9)]


def candidates(op: Any, dtype: torch.dtype) -> None:
    """The bits of tensor code, with ties, impossible tokens and NaN; rows without gaps between their numbers alone."""
    from dsbd_cli.engine.core.candidates import CandidateCount, top_candidates
    from dsbd_cli.ops.interface import Ops

    total = select.choose("log_total", dtype)[0]
    assert total is not None
    wide = normal(torch.float32, 2, 7, 3030) * 3
    wide[0, 1] = wide[0, 1].round()
    wide[0, 2, 4:] = -math.inf
    wide[1, 3, 77] = math.nan
    wide[1, 4] = -math.inf
    logits = wide.to(dtype)[:, :5, :3000]
    for count in (1, 8, 200):
        candidates = top_candidates(logits, CandidateCount(count), ops=Ops(candidates=op, log_total=total.op))
        wanted = top_candidates(logits, CandidateCount(count), ops=Ops(log_total=total.op))
        some = wanted.logprobs > -math.inf  # among tokens of -inf any may be chosen
        assert torch.equal(candidates.tokens[some], wanted.tokens[some])
        assert torch.equal(candidates.logprobs.nan_to_num(nan=7.0), wanted.logprobs.nan_to_num(nan=7.0))
        assert bool((candidates.tokens.diff(dim=2) > 0).all())
    many, before = logits[:1, :1].repeat(8, 5, 1), torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        alone = op(many, 8)
        for threads in THREADS:
            torch.set_num_threads(threads)
            assert all(map(torch.equal, op(many, 8), alone))
    finally:
        torch.set_num_threads(before)


def part_of_iteration(name: str) -> Callable[[Any, torch.dtype], None]:
    """Random iterations with ties, impossible tokens, NaN, dead beams, exhausted supports, late drafts, an idle row."""

    def check(op: Any, dtype: torch.dtype) -> None:
        from dsbd_cli.ops.triton import differences
        from tests.helpers.iterations import SETTINGS, made

        cpu = torch.device("cpu")
        before = torch.get_num_threads()
        try:
            for setting in ("coupled-all", "search-stops", "coupled-ends"):
                with torch.inference_mode():
                    for kernel in made(*SETTINGS[setting], lambda names: dict.fromkeys({name} & {*names}, op)):
                        if kernel.name == name:
                            for threads in THREADS:
                                torch.set_num_threads(threads)
                                assert list(differences(kernel, cpu, threads)) == [], setting
        finally:
            torch.set_num_threads(before)

    return check


def scan(op: Any, dtype: torch.dtype) -> None:
    """Trees whose branches are longer than what is read token by token, along each node's own path."""
    from tests.models.recurrent.test_scans import Tree
    from tests.ops.cpu.test_scan import CASES as LAYERS
    from tests.ops.cpu.test_scan import Layer, inputs, recurrence

    before = torch.get_num_threads()
    try:
        for (seed, width, channels, delta), threads in zip(LAYERS, itertools.cycle(THREADS), strict=False):
            torch.set_num_threads(threads)
            tree, data = Tree.random(seed, 90, places=100), inputs(seed, 90, channels, width)
            y = Layer(data, 100, delta).forest(tree, list(range(90)))
            for token in (0, 40, 89):
                expected = recurrence(data, tree.path(token), delta=delta)[0]
                torch.testing.assert_close(torch.from_numpy(y[token]).double(), expected, atol=2e-5, rtol=2e-5)
    finally:
        torch.set_num_threads(before)


Row = tuple[str, str]  # an operation, and the format of its weights
CASES: dict[Row, Callable[[Any, torch.dtype], None]] = {
    **{(case.__name__, ""): case for case in (norm, gated, rotate, program, pick, path_attention, prompt_attention)},
    **{(case.__name__, ""): case for case in (log_total, candidates, scan)},
    **{(case.__name__, ""): case for case in (output_gate, gated_norm, delta_inputs, step_sizes)},
    **{(name, ""): part_of_iteration(name) for name in ("draft", "verify", "commit")},
    ("experts", ""): check_experts,
    ("linear", "plain"): linear,
    ("linear", "int8"): int8,
    ("linear", "int4"): functools.partial(in_groups, (None, TABLE), 0.1),
    ("linear", "int8_groups"): functools.partial(in_groups, (None,), 0.01),
}
# what LLVM makes of the same code for a processor between AVX2 and this one is not compiled for the tests
VARIED = {
    (kernel.name, kernel.weights)
    for kernel in select.TABLE
    if kernel.beside or (kernel.least, kernel.most) != (Processor.AVX2, Processor.AMX)
}
ROWS = [
    (processor, *row, dtype)
    for processor in possible()
    if processor <= current()
    for row in CASES
    if processor <= Processor.AVX2 or processor == possible()[-1] or row in VARIED - {("program", "")}
    for dtype in FLOATS
]


def kernel_of(processor: Processor, name: str, weights: str, dtype: torch.dtype) -> select.Kernel | None:
    """The first kernel that is for this processor."""
    mine = (
        kernel for kernel in select.TABLE if (kernel.name, kernel.weights) == (name, weights) and kernel.fits(processor)
    )
    return next((kernel for kernel in mine if not kernel.dtypes or dtype in kernel.dtypes), None)


def fault(name: str, weights: str, dtype: torch.dtype) -> str | None:
    """What is wrong with the kernels of an operation on the current processor, also with those that another precedes.
    torch's products may be missing."""
    wanted, (kernel, reason) = kernel_of(current(), name, weights, dtype), select.choose(name, dtype, weights, WIDTHS)
    ours = wanted is not None and wanted.backend == "numba"
    if wanted is not None and wanted.beside is not None:
        other, _ = select.choose(wanted.beside[0], dtype, wanted.beside[1], WIDTHS)
        ours = other is not None and other.backend == "numba"
    if (kernel is not None and kernel.backend == "numba") != ours:
        return f"{wanted} should serve, but {kernel} does: {reason}"
    try:
        for candidate in select.TABLE:
            if (candidate.name, candidate.weights) == (name, weights) and select._missing(
                candidate, dtype, WIDTHS
            ) is None:
                with torch.inference_mode():
                    CASES[name, weights](candidate.op, dtype)
    except Exception:
        return traceback.format_exc()
    return None


@functools.cache
def faults(processor: Processor) -> dict[tuple[str, str, str], str | None]:
    """The faults of all kernels on a smaller processor."""
    command, environment = [sys.executable, "-m", __name__], {**os.environ, VARIABLE: str(processor)}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return {tuple(row): fault for *row, fault in map(json.loads, done.stdout.splitlines())}  # type: ignore[misc]


def test_every_kernel_has_a_case() -> None:
    assert {(kernel.name, kernel.weights) for kernel in select.TABLE} == CASES.keys()


@pytest.mark.parametrize(("processor", "name", "weights", "dtype"), ROWS, ids=lambda value: str(value) or "-")
def test_a_kernel_is_its_reference(processor: Processor, name: str, weights: str, dtype: torch.dtype) -> None:
    here = processor == current()
    problem = fault(name, weights, dtype) if here else faults(processor)[name, weights, str(dtype)]
    if problem is not None:
        pytest.fail(problem, pytrace=False)


@pytest.mark.parametrize("processor", [p for p in possible() if Processor.AVX2 <= p < current()], ids=str)
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("weights", QUANTIZED)
def test_the_bits_are_the_same_on_every_processor(processor: Processor, dtype: torch.dtype, weights: str) -> None:
    assert faults(processor)["bits", weights, str(dtype)] == bits(weights, dtype)


if __name__ == "__main__":
    from dsbd_cli.ops.cpu.kernels import config  # before any function of numba

    assert (config.CPU_FEATURES is None) == (current() == possible()[-1])
    for weights, dtype in itertools.product(QUANTIZED, FLOATS if current() >= Processor.AVX2 else ()):
        print(json.dumps(["bits", weights, str(dtype), bits(weights, dtype)]))
    for _, *row, dtype in (row for row in ROWS if row[0] == current()):
        print(json.dumps([*row, str(dtype), fault(*row, dtype)]), flush=True)
