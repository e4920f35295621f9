"""Rows with beams of their own in one batch: each gets, to the bit, what an engine of that width gives it.

Guards: a beam or a finished hypothesis beyond a row's width, an end that ranks by the engine's width, a width of a
neighbour.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from dsbd_cli.config.grammars import Grammar
from dsbd_cli.config.method import MethodConfig
from dsbd_cli.config.sampling import SamplingConfig
from dsbd_cli.engine.decoding.engine import Engine
from dsbd_cli.engine.iteration import finished
from dsbd_cli.engine.verify import base
from dsbd_cli.errors import InvalidRowError, UsageError
from dsbd_cli.models.transformers_backend.causal import CausalForestModel
from dsbd_cli.requests import Request, RequestResult
from tests.engine.decoding.test_distribution import ENDING, exact_distribution, excess
from tests.engine.decoding.test_transformers import expected, forest, model, prompts
from tests.helpers.tiny import V
from tests.helpers.toys import NumberCodec, table_pair

VOCABULARY, WIDTH = 12, 5


def engine(rule: str = "coupled", beams: int = WIDTH, batch_size: int = 4, **method: Any) -> Engine:
    target, draft = table_pair(1, VOCABULARY, 0.5)
    shape = {"rule": rule, "num_beams": beams, "depth": 3, "drafts_per_layer": 10, "width": "fixed"}
    config = MethodConfig.of({**shape, **method})
    return Engine(
        target, draft if config.needs_draft else None, NumberCodec(VOCABULARY, (2, 5)), config, batch_size=batch_size
    )


def mixed_rows(count: int, seed: int, *, samples: bool = True, **more: Any) -> list[Request]:
    dice, rows = random.Random(seed), []
    for number in range(count):
        beams = dice.choice((1, 2, 3, 4, WIDTH, None))
        warp: dict[str, Any] = {
            "temperature": dice.choice((1.0, 0.7)),
            "top_k": dice.choice((0, 4, 9)),
            "top_p": dice.choice((1.0, 0.9)),
        }
        sampling = SamplingConfig(
            max_new_tokens=dice.randint(3, 12),
            num_beams=beams,
            n_best=beams or WIDTH,
            stop=dice.choice(((), (), ("3 ",))),
            stop_token_ids=dice.choice(((), (), (7,))),
            early_stopping=dice.choice((True, False, "never")),
            length_penalty=dice.choice((1.0, 0.0, 2.0)),
            **(warp if samples else {}),
            **more,
        )
        rows.append(Request(id=str(number), seed=number, prompt_ids=(number % 5, number % 7), sampling=sampling))
    return rows


def facts(result: RequestResult) -> list[object]:
    return [
        (beam.token_ids, beam.logprob.hex(), beam.score.hex(), beam.finish_reason, beam.text, beam.tokens, beam.valid)
        for beam in result.hypotheses
    ]


def alone(request: Request, rule: str, **method: Any) -> list[object]:
    """The row in an engine of its width."""
    sampling = replace(request.sampling, num_beams=None)
    decoder = engine(rule, request.sampling.num_beams or WIDTH, 1, **method)
    (result,) = decoder.run([replace(request, sampling=sampling)])
    return facts(result)


@pytest.mark.parametrize("kernels", [True, False], ids=["kernels", "tensors"])
@pytest.mark.parametrize("depth", [0, 3])
@pytest.mark.parametrize("rule", ["coupled", "search", "rejection"])
def test_rows_get_what_an_engine_of_their_width_gives(rule: str, depth: int, kernels: bool) -> None:
    rows = mixed_rows(40, seed=depth, samples=rule != "search", token_logprobs=True, top_logprobs=2)
    decoder = engine(rule, batch_size=7, depth=depth)
    if not kernels:
        decoder.stepper.ops = decoder.stepper.ops.without("draft", "verify", "commit")
    accepted = 0
    for request, result in zip(rows, decoder.run(rows), strict=True):
        assert facts(result) == alone(request, rule, depth=depth)
        assert len(result.hypotheses) <= (request.sampling.num_beams or WIDTH)
        accepted += result.stats.accepted
    assert (accepted > 0) == (depth > 0)


METHODS: list[dict[str, Any]] = [
    {"drafter": "ngram"},
    {"drafter": "rsd-c"},
    {"drafter": "rsd-s"},
    {"drafter": "dynamic-tree"},
    {"drafter": "beam+ngram"},
    {"warp_scope": "beam"},
    {"memory_saving": True},
    {"adaptive_depth": True},
]


@pytest.mark.parametrize("method", METHODS, ids=lambda method: "-".join(map(str, method.values())))
def test_any_drafter_and_scope_serves_rows_of_any_width(method: dict[str, Any]) -> None:
    kept = {name: value for name, value in method.items() if name != "drafter"}
    # what is kept between iterations depends on where they end
    same = kept if "memory_saving" in kept else {"depth": 0, **{n: v for n, v in kept.items() if n != "adaptive_depth"}}
    rows = mixed_rows(20, seed=5)
    for request, result in zip(rows, engine(batch_size=6, **method).run(rows), strict=True):
        assert facts(result) == alone(request, "coupled", **same)


def test_greedy_rows_of_other_widths() -> None:
    rows = [replace(row, sampling=replace(row.sampling, temperature=0.0)) for row in mixed_rows(30, seed=6)]
    for request, result in zip(rows, engine(batch_size=9).run(rows), strict=True):
        assert facts(result) == alone(request, "coupled")


def test_token_rules_are_those_of_the_rows_width() -> None:
    """Penalties act on logits with one beam and on log-probabilities with several, as in transformers."""
    rules = {"repetition_penalty": 1.6, "presence_penalty": 0.5, "min_new_tokens": 2}
    rows, single = mixed_rows(40, seed=7, **rules), 0
    for request, result in zip(rows, engine(batch_size=6).run(rows), strict=True):
        assert facts(result) == alone(request, "coupled")
        single += request.sampling.num_beams == 1
    assert single > 1


def test_grammars_sort_the_hypotheses_of_a_rows_own_width() -> None:
    """A valid text beyond a row's width is none of its hypotheses."""
    grammar = Grammar.regex(r"(3 |4 |1 ){1,5}(8 9 )")
    rows = [
        replace(row, grammar=grammar, sampling=replace(row.sampling, stop=(), stop_token_ids=(4,)))
        for row in mixed_rows(20, seed=8)
    ]
    valid = Counter[bool | None]()
    for request, result in zip(rows, engine(batch_size=6).run(rows), strict=True):
        assert facts(result) == alone(request, "coupled")
        valid.update(beam.valid for beam in result.hypotheses)
    assert min(valid[True], valid[False]) > 0


def test_streamed_text_of_a_rows_own_width() -> None:
    rows = mixed_rows(30, seed=9)
    decoder, texts = engine(batch_size=6), Counter[str]()
    streamed: dict[str, str] = {}
    for piece in decoder.stream(rows):
        streamed[piece.request.id] = streamed.get(piece.request.id, "") + piece.text
        texts[piece.request.id] += 1
    assert streamed == {result.request.id: result.text for result in decoder.run(rows)}
    assert max(texts.values()) > 2


@pytest.mark.parametrize("rule", ["coupled", "rejection"])
def test_the_law_of_a_narrow_row_is_that_of_its_width(rule: str) -> None:
    """Every second row has two beams of three: its results have the distribution that is enumerated for two."""
    target, draft = table_pair(7, 3, noise=1.0)
    method = MethodConfig(rule=rule, num_beams=3, depth=2, drafts_per_layer=4, width="fixed")
    decoder = Engine(target, draft, NumberCodec(3, tuple(ENDING.ends)), method, batch_size=2000)
    rows = (
        Request(
            id=str(number),
            seed=number,
            prompt_ids=(0,),
            sampling=SamplingConfig(
                top_k=0, max_new_tokens=ENDING.max_new, num_beams=2 + number % 2, n_best=2 + number % 2
            ),
        )
        for number in range(8_000)
    )
    counts = [Counter[tuple[tuple[int, ...], ...]](), Counter[tuple[tuple[int, ...], ...]]()]
    for result in decoder.run(rows):
        counts[int(result.request.id) % 2][tuple(beam.token_ids for beam in result.hypotheses)] += 1
    narrow, wide = exact_distribution(7, 3, ENDING), exact_distribution(7, 3, replace(ENDING, width=3))
    assert excess(counts[0], narrow) < 1
    assert excess(counts[1], wide) < 1
    first = Counter[tuple[tuple[int, ...], ...]]()
    for texts, count in counts[1].items():
        first[texts[:2]] += count
    assert excess(first, narrow) > 1, "the two best of three beams have another law"


def wide_rank(view: base.LayerView, *arguments: Any) -> Any:
    return RIGHT_ENDS(replace(view, row_beams=None), *arguments)


def all_beams(view: base.LayerView, *arguments: Any) -> Any:
    wide = torch.full_like(view.width, view.num_beams)
    return RIGHT_PASSING(replace(view, width=wide, row_beams=None), *arguments)


RIGHT_ENDS, RIGHT_PASSING = base._ends, base.passing
MUTANTS: dict[str, tuple[Any, str, Callable[..., Any]]] = {
    "ends rank by the engine's width": (base, "_ends", wide_rank),
    "as many beams as the engine": (base, "passing", all_beams),
    "as many hypotheses as the engine": (
        finished,
        "_best_of_row",
        lambda score, row_beams: (score, score[:, :, -1]),
    ),
    "the worst of the engine's hypotheses": (
        finished,
        "_best_of_row",
        lambda score, row_beams: (finished_right(score, row_beams)[0], score[:, :, -1]),
    ),
}
finished_right = finished._best_of_row


@pytest.mark.parametrize("mutant", MUTANTS.values(), ids=MUTANTS)
def test_wrong_widths_are_found(mutant: tuple[Any, str, Callable[..., Any]], monkeypatch: pytest.MonkeyPatch) -> None:
    rows = mixed_rows(60, seed=11, samples=False)

    def search() -> list[list[object]]:
        decoder = engine("search", batch_size=20)
        decoder.stepper.ops = decoder.stepper.ops.without("draft", "verify", "commit")
        return [facts(result) for result in decoder.run(rows)]

    right = search()
    monkeypatch.setattr(*mutant)
    assert search() != right


@pytest.mark.parametrize("family", ["llama", "gpt2", "opt"])
def test_rows_of_other_widths_are_those_of_transformers(family: str) -> None:
    batch, eos = prompts(12, seed=4), list(range(2, 8))
    draft = CausalForestModel(model(family, 0.02), family)
    method = MethodConfig(rule="search", num_beams=4, depth=3)
    decoder = Engine(forest(family), draft, NumberCodec(V, tuple(eos)), method, batch_size=6)
    widths = [1 + number % 4 for number in range(len(batch))]
    rows = [
        Request(
            prompt_ids=tuple(ids),
            sampling=SamplingConfig(max_new_tokens=10, num_beams=beams, n_best=beams, early_stopping=beams == 1),
        )
        for ids, beams in zip(batch, widths, strict=True)
    ]
    for ids, beams, result in zip(batch, widths, decoder.run(rows), strict=True):
        want = expected(model(family), [ids], beams, eos, 1.0, False, 10)
        assert [list(beam.token_ids) for beam in result.hypotheses] == want[0]


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"rule": "with-replacement"}, "num_beams is 2, but the run has 5, and with rule with-replacement all rows have"),
    ({"rule": "fuzzy", "fuzzy_threshold": 0.5}, "num_beams is 2, but the run has 5, and with rule fuzzy all rows have"),
    ({"width": "threshold"}, "num_beams is 2, but the run has 5, and with width threshold all rows have as many"),
]


@pytest.mark.parametrize(("method", "message"), REFUSED, ids=["replacement", "fuzzy", "threshold"])
def test_what_cannot_be_narrow_fails_the_row(method: dict[str, Any], message: str) -> None:
    rows = [Request(prompt_ids=(1,), sampling=SamplingConfig(num_beams=beams)) for beams in (2, WIDTH, None)]
    first, *others = engine(**method).run(rows)
    assert isinstance(first.error, InvalidRowError)
    assert str(first.error).startswith(message)
    assert all(result.error is None for result in others)


def test_more_beams_than_the_run_has_fail_the_row() -> None:
    row = Request(prompt_ids=(1,), sampling=SamplingConfig(num_beams=WIDTH + 1))
    (result,) = engine().run([row])
    assert "num_beams is 6, but the run has 5: lower it, or raise that" in str(result.error)
    with pytest.raises(UsageError, match="n_best is 3, but num_beams is 2"):
        SamplingConfig(num_beams=2, n_best=3)
