"""Mixtures of experts: the kernels beside their reference, which is checked by a loop over tokens in float64.

Guards a token that gets another expert than its scores say, an expert's row at the wrong place, a sum in another order,
and bits that depend on the tokens beside it.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from dsbd_cli.models.decoder.weights import PlainLinear
from dsbd_cli.ops import reference, select
from dsbd_cli.ops.cpu.program import loop
from dsbd_cli.ops.recording import Arena
from dsbd_cli.ops.reference import Router, Routes
from tests.helpers.kernels import normal, serves

KERNELS = pytest.mark.skipif(not serves("norm"), reason="kernels of numba do not run here")
EXPERTS = 16
ROUTERS = {
    "softmax": Router(4),
    "not normalised": Router(4, normalised=False),
    "one": Router(1),
    "all": Router(EXPERTS),
    "sigmoid": Router(3, sigmoid=True, correction=normal(torch.float32, EXPERTS, seed=9), scale=2.5),
    "least sum": Router(2, sigmoid=True, least_sum=1.5),
    "eps": Router(2, sigmoid=True, sum_eps=0.25),
    "groups": Router(4, sigmoid=True, correction=normal(torch.float32, EXPERTS, seed=8), groups=4, chosen_groups=2,
                     group_size=2),
    "groups by their best": Router(2, normalised=False, groups=8, chosen_groups=3, scale=16.0),
}  # fmt: skip


def entries(routes: Routes) -> list[list[int]]:
    """Number, first row and end of rows of each expert that has rows."""
    rows: list[list[int]] = routes.table[1:].view(-1, 3)[: int(routes.table[0])].tolist()
    return rows


def chosen(router: Router, logits: list[float]) -> dict[int, float]:
    """The experts of one token and their weights, in float64, in ascending order."""
    scores = [1 / (1 + math.exp(-logit)) for logit in logits]
    if not router.sigmoid:
        scores = [math.exp(logit) / sum(map(math.exp, logits)) for logit in logits]
    correction = [0.0] * len(logits) if router.correction is None else router.correction.double().tolist()
    ranked = [score + more for score, more in zip(scores, correction, strict=True)]
    size = len(logits) // router.groups
    groups = [sorted(ranked[group * size : (group + 1) * size], reverse=True) for group in range(router.groups)]
    of_groups = [sum(group[: router.group_size]) for group in groups]
    kept = sorted(range(router.groups), key=lambda group: -of_groups[group])[: router.chosen_groups]
    able = [expert for expert in range(len(logits)) if expert // size in kept]
    experts = sorted(sorted(able, key=lambda expert: -ranked[expert])[: router.chosen])
    summed = 1.0
    if router.normalised:
        summed = max(sum(scores[expert] for expert in experts), router.least_sum) + router.sum_eps
    return {expert: scores[expert] / summed * router.scale for expert in experts}


def check_experts(op: Any, dtype: torch.dtype) -> None:
    """Choice, rows and sums, for any number of tokens. The case of test_kernels."""
    for router in ROUTERS.values():
        logits = normal(dtype, 70, EXPERTS, seed=1) * 2
        logits[3, 5:9] = logits[3, 4]  # of equal scores the first counts
        for count in (1, 2, 70):
            ours, wanted = op.route(router, logits[:count]), reference.route(router, logits[:count])
            assert entries(ours) == entries(wanted)
            assert torch.equal(ours.rows, wanted.rows)
            torch.testing.assert_close(ours.weights, wanted.weights, rtol=1e-5, atol=1e-6)
            # in another place of memory that is not contiguous
            wide = torch.nn.functional.pad(logits[:count], (0, 3))[:, :EXPERTS]
            assert torch.equal(op.route(router, wide).weights, ours.weights)
        alone = [op.route(router, row).weights for row in logits.split(1)]
        assert torch.equal(op.route(router, logits).weights, torch.cat(alone))
        for strange in (math.nan, math.inf, -math.inf):  # the other tokens stay as they were
            broken = logits[:3].clone()
            broken[1, 2] = strange
            routes = op.route(router, broken)
            assert torch.equal(routes.weights[[0, 2]], torch.cat(alone[:1] + alone[2:3]))
            assert sum(end - begin for _, begin, end in entries(routes)) == 3 * router.chosen
        x, shared, gate = normal(dtype, 70, 96, seed=2), normal(dtype, 70, 96, seed=3), normal(dtype, 70, 1, seed=4)
        routes = op.route(router, logits)
        rows = op.spread(x, routes)
        assert torch.equal(rows, reference.spread(x, routes))
        for more in ((), (shared,), (shared, gate)):
            summed, wanted_sum = op.combine(rows, routes, *more), reference.combine(rows, routes, *more)
            limit = {torch.float32: 1e-6, torch.bfloat16: 2.0**-7}[dtype]
            torch.testing.assert_close(summed, wanted_sum, rtol=limit, atol=limit)
            assert len(more) == 2 or torch.equal(summed, wanted_sum)


@pytest.mark.parametrize("name", ROUTERS)
def test_the_reference_chooses_by_scores(name: str) -> None:
    router, logits = ROUTERS[name], normal(torch.float32, 20, EXPERTS, seed=5)
    routes = reference.route(router, logits)
    assert sorted(routes.rows.flatten().tolist()) == list(range(20 * router.chosen))
    expert_of = {row: expert for expert, begin, end in entries(routes) for row in range(begin, end)}
    for token, (rows, weights) in enumerate(zip(routes.rows.tolist(), routes.weights.tolist(), strict=True)):
        wanted = chosen(router, logits[token].double().tolist())
        assert [expert_of[row] for row in rows] == [*wanted]
        assert weights == pytest.approx([*wanted.values()], rel=1e-5)


def test_the_reference_adds_up_experts_in_ascending_order() -> None:
    """Of a large number, a small one and the large one's opposite only one order keeps nothing of the small one."""
    routes = Routes(torch.zeros(1 + 9, dtype=torch.int64), torch.tensor([[0, 1, 2]]), torch.ones(1, 3))
    outputs = torch.tensor([[1e8], [1.0], [-1e8]])
    assert reference.combine(outputs, routes).item() == 0.0
    assert reference.combine(outputs[[0, 2, 1]], routes).item() == 1.0
    assert reference.combine(outputs, routes, torch.tensor([[4.0]]), torch.tensor([[0.0]])).item() == 2.0


PRODUCTS = {
    "plain": lambda weights, dtype: select.packed_linear(weights, [None] * len(weights), EXPERTS),
    "int8": lambda weights, dtype: select.quantized_linear(
        weights, [None] * len(weights), torch.tensor([3, 40]), "int8"
    ),
    "int4": lambda weights, dtype: select.quantized_linear(
        weights, [None] * len(weights), torch.empty(0, dtype=torch.int64), "int4"
    ),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("form", PRODUCTS)
def test_rows_are_multiplied_by_the_weights_of_their_experts(form: str, dtype: torch.dtype) -> None:
    """Two weights of each expert. The bits are those of the product with all experts' weights."""
    if select.choose("linear", dtype, form)[0] is None or select.choose("experts", dtype)[0] is None:
        pytest.skip("no kernel serves experts here")
    weights = [normal(dtype, count, 160, seed=count + number) for number in range(EXPERTS) for count in (24, 40)]
    product: Any = PRODUCTS[form](weights, dtype)
    if product is None or not product.compiled:
        pytest.skip("no kernel serves experts here")
    for tokens in (1, 3, 40, 250):
        routes = reference.route(ROUTERS["softmax"], normal(dtype, tokens, EXPERTS, seed=tokens) * 3)
        rows = reference.spread(normal(dtype, tokens, 160, seed=6), routes)
        with torch.inference_mode():
            ours: Tensor = product.compute_routed(rows, routes)
            every = product.compute(rows)
        assert ours.shape == (tokens * 4, 64)
        for expert, begin, end in entries(routes):
            assert torch.equal(ours[begin:end], every[begin:end, expert * 64 : (expert + 1) * 64])


@KERNELS
def test_plain_experts_wait_for_their_rows_in_a_program() -> None:
    """While a program is built, no expert has rows: its memory holds anything."""
    weights = [normal(torch.float32, 64, 32, seed=number) for number in range(4)]
    product = PlainLinear(weights, [None] * 4, experts=4)
    routes = reference.route(Router(2), normal(torch.float32, 5, 4, seed=9))
    x = normal(torch.float32, 10, 32, seed=8)
    later = Routes(torch.full_like(routes.table, -1), routes.rows, routes.weights)
    program, ours = Arena().record(loop, lambda: product.compute_routed(x, later))
    later.table.copy_(routes.table)
    program.run()
    assert torch.equal(ours, product.compute_routed(x, routes))
