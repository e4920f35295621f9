"""Drafter `suffix` over whole runs: what it looks up in, what it keeps, and what it foresees.

Guards: rows of one run in the text of a seed under `rejection`, a cache that is lost or taken from another tokenizer,
beams that are counted twice, a chance that is not that of the tree.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import cycle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dsbd_cli.config.method import MethodConfig
from dsbd_cli.engine.decoding.engine import Engine
from dsbd_cli.engine.drafting.index import read_index
from dsbd_cli.engine.drafting.suffix import SuffixDrafter
from dsbd_cli.engine.planning.acceptance import Acceptance
from dsbd_cli.engine.planning.planner import DraftWork, Prospects, Shape
from dsbd_cli.errors import UsageError
from dsbd_cli.ops.cpu.suffix import foresee
from dsbd_cli.ops.select import suffix_index
from dsbd_cli.requests import RequestResult
from dsbd_cli.stats import RequestStats
from tests.engine.drafting.test_drafters import VOCABULARY, make_engine, request
from tests.helpers.toys import NumberCodec

SUFFIX: dict[str, Any] = {"drafter": "suffix", "depth": None}
ALWAYS = {**SUFFIX, "depth": 4}  # drafts whatever they cost


def answers(engine: Engine, order: Sequence[int] = range(12)) -> dict[str, RequestResult]:
    asked = (request(number % 6, 16, n_best=engine.method.num_beams) for number in order)
    return {f"{place} {result.request.id}": result for place, result in enumerate(engine.run(asked, ordered=True))}


def summed(results: dict[str, RequestResult]) -> RequestStats:
    stats = RequestStats()
    for result in results.values():
        stats.add(result.stats)
    return stats


def by_row(results: dict[str, RequestResult]) -> dict[str, list[tuple[tuple[int, ...], float]]]:
    """Texts and log-probabilities of all beams by row, which must be the same wherever it stands."""
    rows: dict[str, list[tuple[tuple[int, ...], float]]] = {}
    for result in results.values():
        beams = [(beam.token_ids, beam.logprob) for beam in result.hypotheses]
        assert rows.setdefault(result.request.id, beams) == beams
    return rows


@pytest.mark.parametrize("rule", ["search", "coupled"])
@pytest.mark.parametrize("beams", [1, 3])
def test_beams_are_those_of_no_draft_in_every_order_and_batch(rule: str, beams: int) -> None:
    method = {"rule": rule, "num_beams": beams}
    plain = by_row(answers(make_engine({}, depth=0, **method), range(6)))
    for batch, order in ((1, range(12)), (5, range(11, -1, -1)), (8, [3, 3, 0, 5, 1, 2, 4, 0, 1])):
        engine = make_engine(SUFFIX, batch_size=batch, **method)
        for _ in range(2):  # the second run looks up in the first one
            assert by_row(answers(engine, order)) == plain


def test_rows_that_are_done_are_looked_up() -> None:
    """The second half asks for what the first half has answered."""
    stats = summed(answers(make_engine(ALWAYS, rule="search", num_beams=1, batch_size=1)))
    assert stats.drafters["suffix:rows"].accepted > 40
    own = summed(answers(make_engine({**ALWAYS, "suffix_source": "own"}, rule="search", num_beams=1, batch_size=1)))
    assert own.target_calls > 1.3 * stats.target_calls
    assert own.drafters == {}


@pytest.mark.parametrize("second", ["suffix", "grammar"])
@pytest.mark.parametrize(("rule", "beams", "batch"), [("search", 1, 1), ("coupled", 3, 4), ("search", 3, 8)])
def test_a_draft_model_rests_where_look_ups_draft(
    second: str, rule: str, beams: int, batch: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Iterations with the model, with look-ups and without drafts in turn. The model reads later what it has missed."""
    plain = by_row(answers(make_engine({}, rule=rule, num_beams=beams, depth=0), range(6)))
    engine = make_engine({"drafter": f"beam+{second}", "depth": None}, rule=rule, num_beams=beams, batch_size=batch)
    assert (engine.method.looks_up_first, engine.method.depth) == (True, 16)
    shapes = cycle([(2, True), (3, False), (0, False), (4, True), (1, False), (1, True), (1, True)])

    def cut(shape: Shape, prospects: Prospects, requests: Sequence[Acceptance]) -> Shape:
        depth, looked_up = next(shapes)
        return Shape(depth, 2 * beams, looked_up=looked_up)

    monkeypatch.setattr(engine._planner, "cut", cut)
    monkeypatch.setattr(engine._planner, "observe", lambda seen: None)
    results = answers(engine)
    stats = summed(results)
    assert by_row(results) == plain
    assert 0 < stats.draft_calls < 1.2 * stats.target_calls
    assert stats.drafters["beam"].accepted > 10
    assert (stats.drafters[second].accepted > 20) == (second == "suffix")  # no row has a grammar


def test_streams_of_an_iteration_are_not_those_of_a_later_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Look-ups are foreseen and not drafted, rows end, and then the model drafts with look-ups beside it."""
    method = {"rule": "search", "num_beams": 3}
    plain = by_row(answers(make_engine({}, depth=0, **method), range(6)))
    engine = make_engine({"drafter": "beam+suffix", "depth": None}, batch_size=4, **method)
    turns = cycle([True, True, False])

    def choose(requests: Sequence[Acceptance], reading: DraftWork) -> Shape:
        engine._planner.foresees = next(turns)
        return Shape(0 if engine._planner.foresees else 2, 6)

    monkeypatch.setattr(engine._planner, "choose", choose)
    monkeypatch.setattr(engine._planner, "cut", lambda shape, prospects, requests: shape)
    monkeypatch.setattr(engine._planner, "observe", lambda seen: None)
    assert by_row(answers(engine)) == plain
    drafter: Any = engine._drafter
    assert drafter._second._ahead is None


def test_counts_of_sources_add_up() -> None:
    for result in answers(make_engine(SUFFIX, rule="search", num_beams=2)).values():
        stats = result.stats
        assert sum(part.drafted for part in stats.drafters.values()) == stats.drafted
        assert sum(part.accepted for part in stats.drafters.values()) == stats.accepted


def test_other_rows_are_not_looked_up_where_a_text_may_depend_on_drafts() -> None:
    engine = make_engine({"drafter": "suffix"}, rule="rejection", num_beams=2, batch_size=1)
    assert by_row(answers(engine)) == by_row(answers(engine, [5, 4, 3, 2, 1, 0]))
    assert isinstance(engine._drafter, SuffixDrafter)
    assert engine._drafter._history is None


def test_a_cache_goes_from_run_to_run(tmp_path: Path) -> None:
    path = tmp_path / "rows"
    method = {**ALWAYS, "suffix_cache": str(path), "rule": "search", "num_beams": 1}
    cold = summed(answers(make_engine(method, batch_size=1), range(6)))
    held = read_index(path, NumberCodec(VOCABULARY).token_bytes())
    assert (held == -1).sum() >= 6
    warm = summed(answers(make_engine(method, batch_size=1), range(6)))
    assert warm.target_calls < 0.7 * cold.target_calls
    assert [file.name for file in tmp_path.iterdir()] == ["rows"]
    with pytest.raises(UsageError, match="another tokenizer"):
        make_engine(method, vocabulary=VOCABULARY + 1)
    path.write_bytes(path.read_bytes()[:-3])
    with pytest.raises(UsageError, match="make it again"):
        make_engine(method)


def test_a_cache_that_cannot_be_written_loses_no_row(tmp_path: Path) -> None:
    method = {**SUFFIX, "suffix_cache": str(tmp_path / "none" / "rows"), "rule": "search"}
    run = make_engine(method).run([request(0)])
    assert next(run).error is None
    with pytest.raises(UsageError, match="rows cannot be written: No such file"):
        next(run)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"suffix_source": "own", "suffix_memory": 3}, "source own looks up in no other row"),
        ({"suffix_source": "own", "suffix_cache": "x"}, "source own looks up in no other row"),
        ({"suffix_cache": "x", "rule": "rejection"}, "other rows are not looked up"),
        ({"suffix_context": 1}, "must be 2 or more"),
        ({"suffix_memory": 0}, "must be 1 or more"),
    ],
)
def test_settings_that_do_nothing_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        MethodConfig.of({"drafter": "suffix", **settings})


def test_a_row_is_kept_once() -> None:
    """Of a prompt what the one before has not, and of a beam what no better one has, each behind 16 tokens of it."""
    history = suffix_index(1000)
    drafter, prompt = SuffixDrafter({"own": None}, 20, history=history), list(range(40))
    drafter.row_ended(prompt, [[50, 51, 52], [50, 60]])
    drafter.row_ended([*prompt[:30], 99], [[70]])
    documents = " ".join(map(str, history.tokens.tolist())).split(" -1")
    assert documents[0] == " ".join(map(str, [*prompt, 50, 51, 52]))
    assert documents[1].strip() == " ".join(map(str, [*prompt[25:], 50, 60]))
    assert documents[2].strip() == " ".join(map(str, [*prompt[14:30], 99, 70]))


def tree_chances(paths: Sequence[Sequence[int]], weight: Sequence[float], doubt: float, count: int) -> list[float]:
    """Sum of the chances of the best `count` nodes of each layer, below those of the layer above."""
    above, chances, trust = {(): 1.0}, [], 1 - doubt
    for layer in range(len(paths[0])):
        pairs: dict[tuple[int, ...], float] = {}
        for node, chance in above.items():
            led = [
                (path, w)
                for path, w in zip(paths, weight, strict=True)
                if w > 0 and tuple(path[:layer]) == node and path[layer] >= 0
            ]
            for path, w in led:
                key = tuple(path[: layer + 1])
                pairs[key] = pairs.get(key, 0.0) + chance * trust * w / sum(w for _, w in led)
        above = dict(sorted(pairs.items(), key=lambda pair: -pair[1])[:count])
        chances.append(sum(above.values()))
        trust = 1 - (1 - trust) * 0.8
    return chances


@settings(max_examples=200, deadline=None)
@given(
    paths=st.lists(st.lists(st.integers(0, 2), min_size=4, max_size=4), min_size=1, max_size=10),
    count=st.integers(1, 4),
    doubt=st.floats(0, 1),
    seed=st.integers(0, 99),
)
def test_chances_are_those_of_the_tree(paths: list[list[int]], count: int, doubt: float, seed: int) -> None:
    draw = np.random.default_rng(seed)
    weight = draw.uniform(0.1, 3, len(paths)).astype(np.float32)
    for path in paths:  # some end early
        end = int(draw.integers(1, 5))
        path[end:] = [-1] * (4 - end)
    tokens = np.array([paths], np.int32)
    chances = foresee(tokens, weight[None], np.array([doubt], np.float32), 0.8, np.array([count], np.int32))
    assert chances[0, 0].tolist() == pytest.approx(tree_chances(paths, weight.tolist(), doubt, count), abs=1e-4)
