"""The kernel of prompts against a float64 reference and torch's attention, and bits in any company.

Guards a sum over slots that a node does not see, a chunk that is not rescaled, and bits that depend on other queries,
on the rows beside, on the threads or on what lies behind the prompt.
"""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from dsbd_cli.models.attention import forest
from dsbd_cli.ops.cpu import prompt_attention
from dsbd_cli.ops.select import ops_for
from tests.helpers.kernels import CPU

DTYPES = [torch.float32, torch.bfloat16]
LIMIT = {torch.float32: 3e-6, torch.bfloat16: 8e-3}  # relative to numbers of about 1
NOTHING = torch.finfo(torch.float32).min


def needs_kernel(dtype: torch.dtype) -> None:
    if ops_for(CPU, dtype, ("prompt_attention",)).prompt_attention is None:
        pytest.skip("torch's attention serves on this processor")


def drawn(dtype: torch.dtype, *, rows: int, heads: int, groups: int, nodes: int, slots: int, dim: int) -> list[Tensor]:
    """Query [R, H * G, n, E], and keys and values as a cache has them, seen as [R, H, S, E]."""
    generator = torch.Generator().manual_seed(dim + slots)
    query = torch.randn(rows, heads * groups, nodes, dim, generator=generator)
    planes = [torch.randn(rows, slots, heads, dim, generator=generator) for _ in range(2)]
    return [query.to(dtype), *(plane.to(dtype).transpose(1, 2) for plane in planes)]


def reference(query: Tensor, key: Tensor, value: Tensor, counts: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """The same in float64, written out."""
    rows, heads, nodes, _ = query.shape
    groups = heads // key.shape[1]
    by_head = query.double().unflatten(1, (-1, groups))
    scores = by_head @ key.double().unsqueeze(2).transpose(3, 4) * scale
    seen = torch.arange(key.shape[2]) < counts.expand(rows, nodes).unsqueeze(-1)
    scores = scores.masked_fill(~seen[:, None, None], -math.inf)
    shares = torch.softmax(scores, -1).masked_fill((scores == -math.inf).all(-1, keepdim=True), 0.0)
    out = shares @ value.double().unsqueeze(2)
    return out.flatten(2, 3), scores.logsumexp(-1).flatten(2)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("rows", "heads", "groups", "nodes", "slots", "dim"),
    [(1, 2, 6, 4, 700, 128), (3, 3, 3, 5, 300, 64), (2, 1, 4, 7, 520, 80), (1, 2, 1, 70, 260, 96),
     (1, 1, 8, 1, 129, 256), (1, 1, 1, 1, 1, 16)],
)  # fmt: skip
def test_numbers_are_those_of_float64(
    dtype: torch.dtype, rows: int, heads: int, groups: int, nodes: int, slots: int, dim: int
) -> None:
    needs_kernel(dtype)
    states = drawn(dtype, rows=rows, heads=heads, groups=groups, nodes=nodes, slots=slots, dim=dim)
    generator = torch.Generator().manual_seed(1)
    for counts in (
        torch.full((rows, 1), slots),
        torch.randint(0, slots + 1, (rows, 1), generator=generator),
        torch.randint(0, slots + 1, (rows, nodes), generator=generator),
    ):
        out, sums = prompt_attention.attend(*states, counts, dim**-0.5)
        wanted, log_sums = reference(*states, counts, dim**-0.5)
        some = log_sums.isfinite()
        assert (out.double() - wanted)[some].abs().max() < LIMIT[dtype]
        assert (sums.double() - log_sums)[some].abs().max() < LIMIT[dtype]
        assert (out[~some] == 0).all()
        assert (sums[~some] == NOTHING).all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_numbers_are_those_of_torch(dtype: torch.dtype) -> None:
    needs_kernel(dtype)
    states = drawn(dtype, rows=2, heads=2, groups=3, nodes=4, slots=200, dim=64)
    out, sums = prompt_attention.attend(*states, torch.tensor([[192], [96]]), 0.125)
    wanted, log_sums = forest.prompt_attention((192, 96), *states, None, 0.125)
    assert torch.allclose(out.float(), wanted.float(), atol=LIMIT[dtype], rtol=0)
    assert torch.allclose(sums, log_sums, atol=LIMIT[dtype], rtol=0)


@pytest.mark.parametrize("dtype", DTYPES)
def test_bits_of_a_query_are_its_own(dtype: torch.dtype) -> None:
    """Alone, beside other nodes that see more or less, beside other rows, and with anything behind the prompt."""
    needs_kernel(dtype)
    nodes, groups, slots = 40, 3, 300
    query, key, value = drawn(dtype, rows=3, heads=2, groups=groups, nodes=nodes, slots=slots, dim=64)
    counts = torch.arange(3 * nodes).view(3, nodes) * 7 % slots + 1
    out, sums = (
        part.unflatten(2, (groups, nodes)) for part in prompt_attention.attend(query, key, value, counts, 0.125)
    )
    for row, node in ((0, 0), (0, 17), (1, 39), (2, 5)):
        states = query[row : row + 1, :, node : node + 1], key[row : row + 1].clone(), value[row : row + 1].clone()
        own = counts[row : row + 1, node : node + 1].contiguous()
        for behind in (0.0, math.nan, math.inf):
            states[1][:, :, int(own) :] = behind
            states[2][:, :, int(own) :] = behind
            alone, alone_sums = prompt_attention.attend(*states, own, 0.125)
            assert torch.equal(alone[0], out[row, :, :, node])
            assert torch.equal(alone_sums[0], sums[row, :, :, node])
    picked = torch.tensor([2, 0])
    some, _ = prompt_attention.attend(query[picked], key, value, counts[picked], 0.125, rows=picked)
    assert torch.equal(some.unflatten(2, (groups, nodes)), out[picked])


@pytest.mark.parametrize("dtype", DTYPES)
def test_threads_and_blocks_do_not_change_bits(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    needs_kernel(dtype)
    states = drawn(dtype, rows=1, heads=1, groups=5, nodes=30, slots=400, dim=64)
    counts, before, runs = torch.full((1, 1), 400), torch.get_num_threads(), list[Tensor]()
    try:
        for threads, queries in ((1, 64), (2, 64), (3, 7), (2, 150)):
            torch.set_num_threads(threads)
            monkeypatch.setattr(prompt_attention, "QUERIES", queries)
            runs.append(prompt_attention.attend(*states, counts, 0.125)[0])
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(run, runs[0]) for run in runs)


def test_heads_of_other_sizes_are_left_to_torch() -> None:
    query, key, value = drawn(torch.float32, rows=1, heads=1, groups=1, nodes=1, slots=3, dim=64)
    assert prompt_attention.fits(query, key, value)
    assert not prompt_attention.fits(query[..., :40], key[..., :40], value[..., :40])
    assert not prompt_attention.fits(query, key, value.bfloat16())
    assert not prompt_attention.fits(query, key.transpose(2, 3), value)
