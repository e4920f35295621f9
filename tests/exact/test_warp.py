"""Order and ties of the warp, by hand-made numbers. No randomness."""

from __future__ import annotations

import math

import pytest

from tests.oracles.rules import pool_distribution, warp


def logs(*masses: float) -> dict[int, float]:
    return {token: math.log(mass) if mass else -math.inf for token, mass in enumerate(masses)}


def test_temperature_divides_logs() -> None:
    assert warp(logs(0.8, 0.2), temperature=0.5) == pytest.approx({0: 0.64 / 0.68, 1: 0.04 / 0.68})


def test_top_k_keeps_ties_with_the_last_one_kept() -> None:
    assert set(warp(logs(0.4, 0.2, 0.2, 0.2), top_k=2)) == {0, 1, 2, 3}
    assert set(warp(logs(0.5, 0.3, 0.2), top_k=2)) == {0, 1}
    assert set(warp(logs(0.5, 0.5), top_k=9)) == {0, 1}


def test_top_p_keeps_the_entry_that_reaches_it_and_its_ties() -> None:
    assert set(warp(logs(0.5, 0.3, 0.2), top_p=0.51)) == {0, 1}
    assert set(warp(logs(0.5, 0.3, 0.2), top_p=0.49)) == {0}
    assert set(warp(logs(0.5, 0.25, 0.25), top_p=0.6)) == {0, 1, 2}
    assert set(warp(logs(0.5, 0.3, 0.2), top_p=1e-9)) == {0}


def test_top_p_counts_what_top_k_left() -> None:
    """0.4 / (0.4 + 0.3) = 0.57 reaches 0.5; of the whole, 0.4 would not."""
    assert set(warp(logs(0.4, 0.3, 0.2, 0.1), top_k=2, top_p=0.5)) == {0}
    assert set(warp(logs(0.4, 0.3, 0.2, 0.1), top_p=0.5)) == {0, 1}


def test_cuts_come_after_temperature() -> None:
    assert set(warp(logs(0.5, 0.3, 0.2), temperature=0.2, top_p=0.9)) == {0}


def test_min_p_is_relative_to_the_most_probable() -> None:
    assert set(warp(logs(0.5, 0.25, 0.2, 0.05), min_p=0.4)) == {0, 1, 2}
    assert set(warp(logs(0.5, 0.5), min_p=1.0)) == {0, 1}


def test_impossible_tokens_and_empty_distributions() -> None:
    assert set(warp(logs(0.5, 0.0, 0.5), top_k=3)) == {0, 2}
    assert warp({}) == {} == warp(logs(0.0, 0.0), temperature=0.3)


def test_extreme_weights_do_not_underflow() -> None:
    assert warp({0: -5000.0, 1: -5000.0 + math.log(3.0)}) == pytest.approx({0: 0.25, 1: 0.75})


def test_pool_scope_warps_the_joint_distribution_and_keeps_raw_weights() -> None:
    rows = {0: logs(0.9, 0.1), 1: logs(0.5, 0.5)}
    pool = pool_distribution({0: math.log(0.75), 1: math.log(0.25)}, rows, temperature=0.5)
    raw = {(0, 0): 0.675, (0, 1): 0.075, (1, 0): 0.125, (1, 1): 0.125}
    total = sum(mass**2 for mass in raw.values())
    assert pool.distribution == pytest.approx({pair: mass**2 / total for pair, mass in raw.items()})
    assert pool.weights == pytest.approx({pair: math.log(mass) for pair, mass in raw.items()})


def test_beam_scope_warps_rows_and_accumulates_their_logs() -> None:
    rows = {0: logs(0.6, 0.4), 1: logs(0.3, 0.7)}
    pool = pool_distribution({0: math.log(0.75), 1: math.log(0.25)}, rows, "beam", top_k=1)
    assert pool.distribution == pytest.approx({(0, 0): 0.75, (1, 1): 0.25})
    assert pool.weights == pytest.approx({(0, 0): math.log(0.75), (1, 1): math.log(0.25)})
