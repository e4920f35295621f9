"""Each kernel of the table against its reference, on every processor that this machine can be.

Guards a kernel that no other test runs on this machine, a rest of a width that is left out, bits that depend on other
rows or on the threads, and a number that is none and leaves its row. What this machine is runs here, the others in a
process each, `DSBD_CPU=avx2 python -m tests.ops.test_kernels`, which prints a line for each case.
"""

from __future__ import annotations

import functools
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
from dsbd_cli.ops.run import Arena

ROOT = Path(__file__).parents[2]
THREADS = 1, 2, 3
WIDTHS = frozenset({64})
# of float32: sums in another order, and exp2 of our own; of bfloat16: a rounding that falls the other way
CLOSE = {torch.float32: 1e-5, torch.bfloat16: 2.0**-7}


def normal(dtype: torch.dtype, *shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def check_rows(
    run: Callable[[Tensor], Tensor], x: Tensor, wanted: Tensor, limit: float, *, ours: bool = True, at: int = 5
) -> None:
    """Numbers, and the bits of a row alone, beside others and by any number of threads. ours: not torch's, whose bits
    may change with the number of threads. at: the place of a number that is none, which stays in its row."""
    before = torch.get_num_threads()
    kept: Tensor | None = None
    try:
        for threads in THREADS:
            torch.set_num_threads(threads)
            found = run(x)
            if kept is None or not ours:
                torch.testing.assert_close(found.double(), wanted.double(), rtol=limit, atol=limit)
                kept = found
            for first, last in ((0, len(x)), (0, 1), (3, 8), (len(x) - 1, len(x))):
                assert torch.equal(run(x[first:last]), kept[first:last]), (threads, first, last)
            for strange in (math.nan, math.inf, -math.inf):
                bad = x.clone()
                bad[1, at] = strange
                found = run(bad)
                assert strange in (math.inf, -math.inf) or not found[1].isfinite().all()
                assert torch.equal(found[[0, 2, 7]], kept[[0, 2, 7]]), (threads, strange)
    finally:
        torch.set_num_threads(before)


def norm(op: Any, dtype: torch.dtype) -> None:
    for width, adds, unit_offset in itertools.product((48, 272), (False, True), (False, True)):
        x, rms = normal(dtype, 150, 2 * width) * 3, reference.Norm(normal(dtype, width, seed=2), 1e-5, unit_offset)

        def run(rows: Tensor, norm: Any = op, width: int = width, adds: bool = adds, rms: Any = rms) -> Tensor:
            normed, summed = norm(rms, rows[:, :width], rows[:, width:] if adds else None)
            return torch.cat((normed, summed), 1) if adds else normed

        check_rows(run, x, run(x, reference.norm), CLOSE[dtype])


def gated(op: Any, dtype: torch.dtype) -> None:
    both = normal(dtype, 150, 600) * 8
    both[0, 8:12] = torch.tensor([-400.0, 400.0, 0.0, -90.0])
    for gelu in (False, True):
        run = functools.partial(lambda gelu, rows: op(rows[:, :544], gelu), gelu)
        check_rows(run, both, reference.gated(both[:, :544], gelu), CLOSE[dtype])


def rotate(op: Any, dtype: torch.dtype) -> None:
    """Rows of two nodes, with and without norms of heads, and angles of each row or of all."""
    rows, heads, kv_heads, dim = 40, 6, 2, 96
    width = (heads + 2 * kv_heads) * dim
    both, turns = normal(dtype, rows, 2 * width + 32), normal(torch.float32, rows, 2, dim, seed=1)
    pair = [reference.Norm(normal(dtype, dim, seed=seed), 1e-5, True) for seed in (3, 4)]
    slots = torch.randperm(9 * rows, generator=torch.Generator().manual_seed(2))[: 2 * rows]
    for more, shared in itertools.product(((), (pair,)), (False, True)):

        def run(x: Tensor, rotate: Any = op, more: Any = more, shared: bool = shared) -> Tensor:
            count = len(x)
            cos, sin = (turn(turns[:1] if shared else turns[:count]).to(dtype) for turn in (torch.cos, torch.sin))
            planes = [torch.zeros(rows, 9, kv_heads, dim, dtype=dtype) for _ in range(2)]
            qkv = (
                x[:, : 2 * width].view(count, 2, width)
                if x.is_contiguous()
                else x[:, : 2 * width].unflatten(1, (2, width))
            )
            queries = rotate(qkv, cos, sin, slots[: 2 * count].contiguous(), *planes, more)
            stored = [plane.flatten(0, 1)[slots[: 2 * count]].reshape(count, -1) for plane in planes]
            return torch.cat((queries.flatten(1), *stored), 1)

        wanted = run(both, reference.rotate)
        if shared:
            check_rows(run, both, wanted, CLOSE[dtype])
        else:  # the first rows have the first angles
            torch.testing.assert_close(run(both), wanted, rtol=CLOSE[dtype], atol=CLOSE[dtype])
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
    """Two layers as one product: fewer outputs than a block, rows beyond a chunk, inputs beyond a piece."""
    for rows, inputs, outputs in ((9, 64, (3, 5)), (111, 160, (72, 58)), (111, 4500, (64, 36))):
        weights = [normal(dtype, count, inputs, seed=count) / inputs**0.5 for count in outputs]
        bias, x = normal(dtype, sum(outputs), seed=1), normal(dtype, rows, inputs + 8, seed=2)
        product = op(weights)
        own = product.bias(bias)
        wanted = x[:, :inputs].double() @ torch.cat(weights).double().t() + bias.double()
        limit = {torch.float32: 1e-5, torch.bfloat16: 3e-2}[dtype]
        run = functools.partial(lambda product, own, inputs, x: product(x[:, :inputs], own), product, own, inputs)
        check_rows(run, x, wanted, limit, ours=op is select.linear.Compiled)


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
    ours = op is select.int8.Compiled
    for rows, inputs, outputs, count in ((9, 160, 72, 1), (130, 160, 130, 3), (130, 4800, 100, 32), (9, 5000, 3, 2)):
        weight, bias = normal(dtype, outputs, inputs, seed=1), normal(dtype, outputs, seed=2)
        outliers = torch.arange(5, inputs, inputs // count - 1)[:count]
        x = normal(dtype, rows, inputs, seed=3)
        x[:, outliers] *= 100
        product = op([weight], outliers, bias, select.packed_linear)
        wanted = int8_reference(weight, bias, x, outliers)
        spread = float(wanted.std())
        limit = 1e-5 if dtype == torch.float32 else 1.6e-2
        run = functools.partial(lambda product, spread, x: product(x) / spread, product, spread)
        for at in (5, 6):  # an outlier, one of the integers
            check_rows(run, x, wanted / spread, limit, ours=ours, at=at)


def pick(op: Any, dtype: torch.dtype) -> None:
    """Rows of the batch with rows of the table of their own, picked anew in other numbers."""
    table, picked = normal(dtype, 200, 160), op(normal(dtype, 200, 160), dtype)
    assert not isinstance(picked, reference.PickedRows)
    for batch, count, nodes in ((3, 70, 9), (3, 70, 37), (1, 130, 9), (2, 1, 8)):
        ids = torch.randint(200, (batch, count), generator=torch.Generator().manual_seed(count))
        x = normal(dtype, batch, nodes, 160, seed=nodes)
        picked.take(ids)
        wanted = torch.einsum("rnh,roh->rno", x.double(), table[ids].double())
        limit = {torch.float32: 1e-4, torch.bfloat16: 0.1}[dtype]
        torch.testing.assert_close(picked.compute(x).double(), wanted, rtol=limit, atol=limit)
        if batch == 1:
            check_rows(lambda rows: picked.compute(rows[None])[0], x[0], wanted[0], limit)


def path_attention(op: Any, dtype: torch.dtype) -> None:
    from tests.ops.cpu.test_attention import CASES as FORESTS
    from tests.ops.cpu.test_attention import LIMIT

    torch.manual_seed(0)
    before = torch.get_num_threads()
    try:
        for forest in FORESTS.values():
            case, found = forest(dtype), []
            for threads in THREADS:
                torch.set_num_threads(threads)
                found.append(case.run())
            wanted = case.reference()
            assert (found[0].double() - wanted).abs().max() <= LIMIT[dtype] * max(1.0, float(wanted.abs().max()))
            if case.seen.shape[1] > 1 and case.bias is None and case.sinks is None:
                query = case.query.clone()
                query[:, :, 1] = math.nan
                strange = replace(case, query=query).run()
                assert strange[:, 1].isnan().all()
                assert torch.equal(strange[:, 0], found[-1][:, 0])
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
            found = attend(query, key, value, torch.full((1, 1), key.shape[2]), dim**-0.5)
            return torch.cat([one[0].unflatten(1, (groups, len(x))).movedim(2, 0).flatten(1) for one in found], 1)

        check_rows(
            run, query[0].transpose(0, 1).flatten(1), run(query[0].transpose(0, 1).flatten(1), attention), LIMIT[dtype]
        )


def log_total(op: Any, dtype: torch.dtype) -> None:
    for vocabulary in (16, 67, 4096 + 64 + 21, 70_001):
        values = normal(dtype, 9, vocabulary, seed=vocabulary) * 4
        values[6] -= 3e4
        values[7, 9:] = -math.inf
        run = lambda rows: op(rows, rows.float().amax(-1, keepdim=True))  # noqa: E731
        exact = torch.logsumexp(values.double() - values.double().amax(-1, keepdim=True), -1, keepdim=True)
        check_rows(run, values, exact, 3e-7)
        values[1, -1] = math.nan
        assert op(values, values.float().amax(-1, keepdim=True)).isnan().flatten().tolist() == [
            at == 1 for at in range(9)
        ]


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
        found = top_candidates(logits, CandidateCount(count), ops=Ops(candidates=op, log_total=total.op))
        wanted = top_candidates(logits, CandidateCount(count), ops=Ops(log_total=total.op))
        some = wanted.logprobs > -math.inf  # among tokens of -inf any may be chosen
        assert torch.equal(found.tokens[some], wanted.tokens[some])
        assert torch.equal(found.logprobs.nan_to_num(nan=7.0), wanted.logprobs.nan_to_num(nan=7.0))
        assert bool((found.tokens.diff(dim=2) > 0).all())
    for threads in THREADS:
        torch.set_num_threads(threads)
        assert all(map(torch.equal, op(logits[:1, :1].repeat(8, 5, 1), 8), op(logits[:1, :1].repeat(8, 5, 1), 8)))


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
    **{(name, ""): part_of_iteration(name) for name in ("draft", "verify", "commit")},
    ("linear", "plain"): linear,
    ("linear", "int8"): int8,
}
# what LLVM makes of the same code for a processor between AVX2 and this one is not compiled for the tests
VARIED = {
    (one.name, one.weights)
    for one in select.TABLE
    if one.beside or (one.least, one.most) != (Processor.AVX2, Processor.AMX)
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
    mine = (one for one in select.TABLE if (one.name, one.weights) == (name, weights) and one.fits(processor))
    return next((one for one in mine if not one.dtypes or dtype in one.dtypes), None)


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
        for one in select.TABLE:
            if (one.name, one.weights) == (name, weights) and select._missing(one, dtype, WIDTHS) is None:
                with torch.inference_mode():
                    CASES[name, weights](one.op, dtype)
    except Exception:
        return traceback.format_exc()
    return None


@functools.cache
def faults(processor: Processor) -> dict[tuple[str, str, str], str | None]:
    """The faults of all kernels on a smaller processor."""
    command, environment = [sys.executable, "-m", __name__], {**os.environ, VARIABLE: str(processor)}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return {tuple(row): found for *row, found in map(json.loads, done.stdout.splitlines())}  # type: ignore[misc]


def test_every_kernel_has_a_case() -> None:
    assert {(kernel.name, kernel.weights) for kernel in select.TABLE} == CASES.keys()


@pytest.mark.parametrize(("processor", "name", "weights", "dtype"), ROWS, ids=lambda value: str(value) or "-")
def test_a_kernel_is_its_reference(processor: Processor, name: str, weights: str, dtype: torch.dtype) -> None:
    here = processor == current()
    found = fault(name, weights, dtype) if here else faults(processor)[name, weights, str(dtype)]
    if found is not None:
        pytest.fail(found, pytrace=False)


if __name__ == "__main__":
    from dsbd_cli.ops.cpu.kernels import config  # before any function of numba

    assert (config.CPU_FEATURES is None) == (current() == possible()[-1])
    for _, *row, dtype in (one for one in ROWS if one[0] == current()):
        print(json.dumps([*row, str(dtype), fault(*row, dtype)]), flush=True)
