"""Laws, warps and noise. Guards: a warp in the wrong order or scope, ties that split, noise that is not Gumbel or not
reproducible."""

from __future__ import annotations

import math

import pytest
import torch

from dsbd_cli.engine.core.candidates import CandidateCount, top_candidates
from dsbd_cli.engine.core.distribution import pool_distribution
from dsbd_cli.engine.core.noise import extend_path, gumbel, path_gumbel, seed_key, stream_key, stream_keys, uniform
from dsbd_cli.engine.core.topk import BLOCKED_FROM
from dsbd_cli.ops.layout import STREAMS
from tests.helpers.layers import WARPED, warp_of
from tests.oracles.rules import pool_distribution as oracle_pool_distribution


def test_a_node_alone_has_the_bits_of_one_among_others() -> None:
    """Guards log-probabilities against the parallel sum that torch makes of a single long row."""
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        rows = torch.randn(3, 1 << 17, generator=torch.Generator().manual_seed(4)) * 3
        for count in (50, rows.shape[1]):
            together = top_candidates(rows.unsqueeze(0), CandidateCount(count)).logprobs[0]
            for node, row in enumerate(rows):
                assert torch.equal(
                    top_candidates(row.view(1, 1, -1), CandidateCount(count)).logprobs[0, 0], together[node]
                )
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("vocabulary", [BLOCKED_FROM - 7, BLOCKED_FROM, 3 * BLOCKED_FROM + 21])
@pytest.mark.parametrize("far", [-79.0, -95.0, -2000.0, -math.inf])
def test_candidates_of_a_large_vocabulary_equal_a_plain_sort(far: float, vocabulary: int, dtype: torch.dtype) -> None:
    """Guards the search by blocks (what lies past the last block, several of the best in one) and the sum over the
    vocabulary where most of it is far below the best token."""
    generator = torch.Generator().manual_seed(vocabulary)
    logits = torch.randn(2, 3, vocabulary, generator=generator)
    logits[:, 1, 40:] += far
    logits[:, 2, :-5] += far
    candidates = top_candidates(logits.to(dtype), CandidateCount(40))
    exact = torch.log_softmax(logits.to(dtype).double(), -1)
    wanted = exact.sort(-1, descending=True).values[..., :40]
    assert torch.allclose(candidates.logprobs.sort(-1, descending=True).values.double(), wanted, rtol=1e-6, atol=4e-6)
    chosen = exact.gather(-1, candidates.tokens).sort(-1, descending=True).values
    assert torch.allclose(chosen, wanted, rtol=0, atol=0)
    assert all(len(set(row)) == 40 for row in candidates.tokens.flatten(0, 1).tolist())


@pytest.mark.parametrize("scope", ["pool", "beam"])
@pytest.mark.parametrize("settings", [*WARPED, (0.05, 0, 0.9, 0.0), (1.0, 3, 0.5, 0.3)])
@pytest.mark.parametrize("more", [1, 9])
def test_pool_distribution_equals_its_oracle(scope: str, settings: tuple[float, int, float, float], more: int) -> None:
    generator = torch.Generator().manual_seed(3)
    logits = torch.randn(60, 3, 9, generator=generator) * 2
    weight = torch.randn(60, 3, generator=generator)
    live = torch.rand(60, 3, generator=generator) < 0.8
    live[:, 0] = True
    candidates = top_candidates(logits, CandidateCount(settings[1] + more if settings[1] else 9))
    distribution = pool_distribution(candidates, weight, live, warp_of(60, settings, scope))
    logs = torch.log_softmax(logits.double(), -1)
    temperature, top_k, top_p, min_p = settings
    for row in range(60):
        beams = [beam for beam in range(3) if live[row, beam]]
        expected = oracle_pool_distribution(
            {beam: float(weight[row, beam]) for beam in beams},
            {beam: dict(enumerate(logs[row, beam].tolist())) for beam in beams},
            scope,  # type: ignore[arg-type]
            temperature,
            top_k,
            top_p,
            min_p,
        )
        probabilities = distribution.log_p[row].double().exp()
        tokens = candidates.tokens[row]
        pairs = {
            (b, int(tokens[b, c])): float(probabilities[b, c])
            for b in range(3)
            for c in range(tokens.shape[1])
            if probabilities[b, c] > 0
        }
        assert pairs.keys() == {pair for pair, mass in expected.distribution.items() if mass > 1e-40}
        for pair, mass in pairs.items():
            assert mass == pytest.approx(expected.distribution[pair], rel=1e-4)
            column = int((tokens[pair[0]] == pair[1]).nonzero())
            assert float(distribution.weight[row, pair[0], column]) == pytest.approx(expected.weights[pair], abs=1e-4)


def test_a_row_has_the_same_distribution_beside_rows_with_other_settings() -> None:
    """Guards batch-wide cuts: candidates and sorted values are sized by the largest top_k of the batch."""
    logits = torch.randn(1, 2, 12, generator=torch.Generator().manual_seed(1)).expand(2, -1, -1)
    weight, live = torch.zeros(2, 2), torch.ones(2, 2, dtype=torch.bool)
    alone = pool_distribution(
        top_candidates(logits[:1], CandidateCount(12)), weight[:1], live[:1], warp_of(1, (0.7, 4, 0.8, 0.0), "pool")
    )
    both = warp_of(2, (0.7, 4, 0.8, 0.0), "pool")
    both.top_k[1], both.top_p[1], both.all_top_k, both.even_top_k = 0, 1.0, False, False
    mixed = pool_distribution(top_candidates(logits, CandidateCount(12)), weight, live, both)
    assert torch.equal(alone.log_p[0] > -math.inf, mixed.log_p[0] > -math.inf)
    assert torch.allclose(alone.log_p[0].exp(), mixed.log_p[0].exp(), atol=1e-6)
    assert (mixed.log_p[1] > -math.inf).all()


def test_ties_at_the_cut_all_stay() -> None:
    logits = torch.tensor([[[1.0, 1.0, 1.0, 0.0]]])
    distribution = pool_distribution(
        top_candidates(logits, CandidateCount(4)),
        torch.zeros(1, 1),
        torch.ones(1, 1, dtype=torch.bool),
        warp_of(1, (1.0, 2, 1.0, 0.0), "pool"),
    )
    assert (distribution.log_p[0, 0] > -math.inf).tolist() == [True, True, True, False]


def test_uniforms_are_uniform() -> None:
    """Kolmogorov-Smirnov at alpha 1e-6 on 200,000 numbers: the largest gap of the empirical distribution stays under
    2.7 / sqrt(n)."""
    count = 200_000
    values = uniform(seed_key(torch.tensor([5])), torch.arange(count)).sort().values
    grid = (torch.arange(count) + 0.5) / count
    assert float((values - grid).abs().max()) < 2.7 / math.sqrt(count)
    assert float(values.min()) > 0
    assert float(values.max()) < 1


def test_gumbel_tails_are_finite_and_wide() -> None:
    values = gumbel(seed_key(torch.tensor([1])), torch.arange(2_000_000))
    assert torch.isfinite(values).all()
    assert float(values.max()) > 12
    assert float(values.min()) < -2.4


def test_keys_of_all_streams_are_those_of_each() -> None:
    rows = torch.arange(5) * (1 << 60) + 17
    iteration = torch.arange(5) * 31
    keys = stream_keys(seed_key(rows), iteration, 6)
    for layer in range(6):
        for stream in range(STREAMS):
            assert torch.equal(keys[:, layer, stream], stream_key(seed_key(rows), iteration, layer, stream))


def test_neighbouring_keys_do_not_correlate() -> None:
    """|r| of 100,000 pairs stays under 5 standard errors."""
    index = torch.arange(100_000)
    key = seed_key(torch.tensor([9]))
    pairs = [
        (uniform(key, index), uniform(key, index + 1)),
        (uniform(seed_key(index), torch.tensor([3])), uniform(seed_key(index + 1), torch.tensor([3]))),
        (uniform(extend_path(seed_key(index), index), index), uniform(extend_path(seed_key(index), index + 1), index)),
        (
            uniform(stream_key(seed_key(index), index, 0, 1), index),
            uniform(stream_key(seed_key(index), index, 1, 1), index),
        ),
    ]
    for a, b in pairs:
        r = torch.corrcoef(torch.stack((a, b)))[0, 1]
        assert abs(float(r)) < 5 / math.sqrt(100_000)


def test_path_noise_depends_on_path_and_token_only() -> None:
    path = extend_path(seed_key(torch.tensor([[4, 4]])), torch.tensor([[8, 8]]))
    tokens = torch.tensor([[[1, 2, 3], [3, 2, 1]]])
    noise = path_gumbel(path, tokens)
    assert torch.equal(noise[0, 0].flip(0), noise[0, 1])


@pytest.mark.parametrize("vocabulary", [4096, 5000, 33000])
@pytest.mark.parametrize("count", [1, 8, 58, 700])
def test_candidates_of_a_large_vocabulary_are_the_best_ones(vocabulary: int, count: int) -> None:
    """Guards blocks: a best token in the last, incomplete block, several in one block, lost probability mass."""
    generator = torch.Generator().manual_seed(vocabulary + count)
    logits = 3 * torch.randn(2, 9, vocabulary, generator=generator)
    logits[0, 0, -1] = logits[0, 0, 70:75] = 20.0  # the last token, and neighbours of one block
    logits[1, 3, 100:] = float("-inf")
    logits[1, 4, 7] = float("nan")
    before = logits.clone()
    candidates = top_candidates(logits, CandidateCount(count))
    assert not candidates.full
    assert torch.equal(logits.nan_to_num(), before.nan_to_num())
    expected = torch.log_softmax(logits.double(), -1)
    best = expected.topk(count).values
    assert candidates.logprobs[1, 4].isnan().all()
    real = torch.ones(2, 9, dtype=torch.bool)
    real[1, 4] = False
    ranked = candidates.logprobs.sort(-1, descending=True).values
    torch.testing.assert_close(ranked[real].double(), best[real], rtol=1e-5, atol=1e-5)
    chosen = expected.gather(-1, candidates.tokens).sort(-1, descending=True).values
    torch.testing.assert_close(chosen[real], best[real])
    assert all(len(set(row.tolist())) == count for row in candidates.tokens.flatten(0, 1))


def test_candidates_do_not_depend_on_the_rows_beside_them() -> None:
    logits = torch.randn(3, 20, 8192, generator=torch.Generator().manual_seed(1)).bfloat16()
    whole, alone = top_candidates(logits, CandidateCount(20)), top_candidates(logits[1:2, 5:6], CandidateCount(20))
    assert torch.equal(whole.tokens[1, 5], alone.tokens[0, 0])
    assert torch.equal(whole.logprobs[1, 5], alone.logprobs[0, 0])
