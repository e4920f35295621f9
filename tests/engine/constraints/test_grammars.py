"""Answers held to a grammar: brute force over all legal strings, the distribution of sampling, texts that depend on no
draft.

Guards: a mask after the best tokens were taken, a state that does not follow its beam, an end where the text is not
whole, a forced run that costs more than one call. What is legal is found by enumerating the language with Python's
`re`, not from the masks. No randomness beyond fixed seeds.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Mapping
from functools import cache
from typing import Any

import pytest

from dsbd_cli.config.grammars import Grammar
from dsbd_cli.config.method import MethodConfig
from dsbd_cli.config.sampling import SamplingConfig
from dsbd_cli.engine.decoding.engine import Engine
from dsbd_cli.engine.decoding.loop import Loop
from dsbd_cli.engine.drafting.grammar import certain
from dsbd_cli.engine.planning.acceptance import Acceptance
from dsbd_cli.engine.planning.planner import ProspectPlanner, Shape
from dsbd_cli.errors import InvalidRowError, UsageError
from dsbd_cli.requests import Request, RequestResult
from tests.engine.decoding.test_distribution import excess, run_engine
from tests.helpers.plain import Path, Rows, Settings, decode, results_distribution
from tests.helpers.toys import NumberCodec, table_pair, table_rows

END, LETTERS = 0, "abcde"
V = 1 + len(LETTERS)
LONGEST = 6  # tokens, the end token included


class LetterCodec(NumberCodec):
    """One letter per token; token 0 ends."""

    def __init__(self) -> None:
        super().__init__(V, (END,))

    def decode(self, ids: list[int], *, skip_special_tokens: bool = True) -> str:
        return "".join(LETTERS[token - 1] for token in ids)

    def token_bytes(self, *, skip_special_tokens: bool = True) -> list[bytes]:
        return [b"", *[letter.encode() for letter in LETTERS]]


@cache
def language(pattern: str) -> frozenset[Path]:
    """All texts of up to LONGEST - 1 tokens that match, as tokens with an end token."""
    texts = ("".join(text) for size in range(LONGEST) for text in itertools.product(LETTERS, repeat=size))
    return frozenset(
        (*(LETTERS.index(letter) + 1 for letter in text), END) for text in texts if re.fullmatch(pattern, text)
    )


def legal_rows(seed: int, pattern: str, limit: int = LONGEST) -> Rows:
    """The target of table_pair, raw log-probabilities, with what leads to no text of the language left out, or only to
    texts of more than `limit` tokens without their end token."""
    rows = table_rows(seed, V)
    texts = [text for text in language(pattern) if len(text) - 1 <= limit]
    legal = {text[:size] for text in texts for size in range(len(text) + 1)}

    def allowed(path: Path) -> Mapping[int, float]:
        return {token: logprob for token, logprob in rows(path).items() if (*path, token) in legal}

    return allowed


def engine(*, noise: float = 0.7, seed: int = 3, batch: int = 3, **method: Any) -> Engine:
    target, draft = table_pair(seed, V, noise)
    config = MethodConfig.of({"depth": 0, "width": "fixed", **method})
    return Engine(target, draft if config.needs_draft else None, LetterCodec(), config, batch_size=batch)


def request(pattern: str | None, seed: int = 0, **sampling: Any) -> Request:
    settings = SamplingConfig(**{"max_new_tokens": LONGEST, "top_k": 0, **sampling})
    grammar = None if pattern is None else Grammar.regex(pattern)
    return Request(prompt_ids=(0,), id=str(seed), seed=seed, sampling=settings, grammar=grammar)


# All texts of these have at most LONGEST - 1 tokens, so nothing is cut. `abc` is a run that is forced.
PATTERNS = ["a(b|cc)[de]?", "[abcde]{0,5}", "(ab|ba){1,2}c?", "abc(d|e)", "a?b?c?d?e?", "(abcde|abc|a)"]


@pytest.mark.parametrize("pattern", [pattern for pattern in PATTERNS if len(language(pattern)) < 1000])
def test_search_gives_all_texts_in_the_order_of_their_scores(pattern: str) -> None:
    """W = all texts: each comes out once, with the log-probability of direct scoring."""
    rows = table_rows(3, V)
    texts = language(pattern)
    scores = {text: sum(rows(text[:at])[token] for at, token in enumerate(text)) for text in texts}
    result = engine(rule="search", num_beams=len(texts)).generate(
        request(pattern, n_best=len(texts), length_penalty=0.0), seed=1
    )
    assert [beam.token_ids for beam in result.hypotheses] == sorted(scores, key=scores.__getitem__, reverse=True)
    for beam in result.hypotheses:
        assert beam.logprob == pytest.approx(scores[beam.token_ids], abs=1e-5)
        assert (beam.finish_reason, beam.valid) == ("stop", True)


@pytest.mark.parametrize("pattern", PATTERNS)
@pytest.mark.parametrize("beams", [1, 2, 5])
@pytest.mark.parametrize("method", [{}, {"depth": 3, "drafts_per_layer": 10}, {"drafter": "grammar", "depth": 16}])
def test_search_is_plain_beam_search_over_legal_pairs(pattern: str, beams: int, method: dict[str, Any]) -> None:
    expected = decode(legal_rows(3, pattern), Settings(width=beams, max_new=LONGEST, ends=(END,)))
    result = engine(rule="search", num_beams=beams, **method).generate(request(pattern, n_best=beams))
    assert [beam.token_ids for beam in result.hypotheses] == [text.tokens for text in expected]
    assert [beam.score for beam in result.hypotheses] == pytest.approx([text.score for text in expected], abs=1e-5)


def test_the_best_then_filtered_is_not_what_comes_out() -> None:
    """The wrong way, the best 2W of all tokens and then those that are legal, loses texts that are found here."""
    wrong = 0
    for pattern, seed in itertools.product(PATTERNS, range(4)):
        legal, rows = legal_rows(seed, pattern), table_rows(seed, V)

        def filtered(path: Path, legal: Rows = legal, rows: Rows = rows) -> Mapping[int, float]:
            best = sorted(rows(path), key=rows(path).__getitem__, reverse=True)[:2]
            return {token: logprob for token, logprob in legal(path).items() if token in best}

        settings = Settings(width=1, max_new=LONGEST, ends=(END,))
        result = engine(rule="search", num_beams=1, seed=seed).generate(request(pattern))
        assert [beam.token_ids for beam in result.hypotheses] == [text.tokens for text in decode(legal, settings)]
        wrong += [text.tokens for text in decode(filtered, settings)] != [beam.token_ids for beam in result.hypotheses]
    assert wrong > 3


@pytest.mark.parametrize(("rule", "drafter"), [("coupled", "beam"), ("rejection", "beam"), ("rejection", "grammar")])
def test_the_distribution_of_sampling_is_that_of_plain_decoding_over_legal_pairs(rule: str, drafter: str) -> None:
    """Chi-square as in test_distribution.py: alpha = 1e-5 per case, fixed seeds. With `coupled` the text is the same
    with every draft, as another test says."""
    pattern, settings = "[abc](b|cd|add)[de]?", Settings(width=2, max_new=3, ends=(END,))
    rows = legal_rows(3, pattern, 3)  # which leaves no `add`, and after `cd` nothing
    distribution = results_distribution(rows, settings)
    assert len(distribution) > 10
    runner = engine(rule=rule, num_beams=2, batch=2000, depth=2, drafter=drafter, drafts_per_layer=4)
    run, grammar = runner.run, Grammar.regex(pattern)

    def constrained(stream: Any) -> Any:
        return run(
            Request(id=request.id, seed=request.seed, prompt_ids=(0,), sampling=request.sampling, grammar=grammar)
            for request in stream
        )

    runner.run = constrained  # type: ignore[method-assign]
    assert excess(run_engine(runner, settings, 1500), distribution) < 1


@pytest.mark.parametrize("limit", [1, 2, 3, 4])
@pytest.mark.parametrize("pattern", PATTERNS)
@pytest.mark.parametrize("method", [{}, {"depth": 3, "drafts_per_layer": 10}, {"drafter": "grammar", "depth": 16}])
def test_search_near_the_limit_is_plain_beam_search_over_what_leaves_an_end(
    pattern: str, limit: int, method: dict[str, Any]
) -> None:
    """No text is cut in two where the language has one that fits."""
    rows = legal_rows(3, pattern, limit if any(len(text) - 1 <= limit for text in language(pattern)) else LONGEST)
    expected = decode(rows, Settings(width=3, max_new=limit, ends=(END,)))
    [result] = engine(rule="search", num_beams=3, **method).run([request(pattern, n_best=3, max_new_tokens=limit)])
    valid = {beam.token_ids: beam.valid for beam in result.hypotheses}
    assert list(valid) == sorted((text.tokens for text in expected), key=lambda tokens: not valid[tokens])
    if any(len(text) - 1 <= limit for text in language(pattern)):
        assert all(valid.values())


def test_a_valid_text_goes_before_a_better_one_that_was_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a way to the end, as where none is found: some texts end in time, and better ones are cut."""
    monkeypatch.setattr("dsbd_cli.engine.core.grammar_ends.EndFinder.find", lambda *_: None)
    turned = 0
    for seed in range(12):
        runner = engine(rule="search", num_beams=4, seed=seed)
        asked = request("[abcde]{0,1}|[abcde]{5}", n_best=4, max_new_tokens=3)
        pieces = list(runner.stream([asked]))
        result = pieces[-1].result
        assert result is not None
        validity = [bool(beam.valid) for beam in result.hypotheses]
        assert validity == sorted(validity, reverse=True)
        scores = [beam.score for beam in result.hypotheses]
        turned += scores != sorted(scores, reverse=True)
        assert "".join(piece.text for piece in pieces) == result.text
    assert turned


METHODS: list[dict[str, Any]] = [
    {"depth": 2, "drafts_per_layer": 5},
    {"depth": 5, "drafts_per_layer": 12},
    {"depth": None},
    {"depth": 3, "drafter": "rsd-s"},
    {"depth": 3, "drafter": "rsd-c"},
    {"depth": 3, "drafter": "dynamic-tree"},
    {"depth": 3, "drafter": "ngram"},
    {"depth": None, "drafter": "grammar"},
    {"depth": 2, "drafter": "grammar"},
    {"depth": 3, "drafter": "ngram+grammar"},
    {"depth": 3, "drafter": "beam+grammar"},
]


def several(count: int, **sampling: Any) -> list[Request]:
    """Requests with different grammars in one batch, and some with none."""
    patterns = [*PATTERNS, None, "(ab?c)*", "a.*", "(ab?c){4}"]
    return [request(patterns[index % len(patterns)], index, **sampling) for index in range(count)]


def told(results: list[RequestResult]) -> list[object]:
    return [[(beam.token_ids, beam.logprob, beam.valid) for beam in result.hypotheses] for result in results]


@pytest.mark.parametrize("rule", ["search", "coupled"])
def test_the_same_text_with_any_draft_and_batch(rule: str) -> None:
    asked = several(12, max_new_tokens=20, n_best=3)
    plain = told(list(engine(rule=rule, num_beams=3, batch=1).run(asked)))
    assert told(list(engine(rule=rule, num_beams=3, batch=7).run(asked))) == plain
    for method in METHODS:
        assert told(list(engine(rule=rule, num_beams=3, batch=5, **method).run(asked))) == plain, method


@pytest.mark.parametrize(
    ("rule", "width"),
    [("search", "fixed"), *itertools.product(("coupled", "rejection", "with-replacement"), ("fixed", "threshold"))],
)
def test_what_stopped_matches_and_what_was_cut_says_so(rule: str, width: str) -> None:
    asked = several(30, max_new_tokens=5, n_best=3)
    reasons = set()
    runner = engine(rule=rule, num_beams=3, depth=2, drafts_per_layer=6, width=width)
    for row, result in zip(asked, runner.run(asked), strict=True):
        assert result.hypotheses
        for beam in result.hypotheses:
            matches = None if row.grammar is None else bool(re.fullmatch(row.grammar.text, beam.text))
            assert beam.valid == matches
            assert beam.finish_reason == "length" or matches is not False
            reasons.add((beam.finish_reason, beam.valid))
    assert {("stop", True), ("length", False), ("length", True)} <= reasons


def test_a_forced_run_costs_one_call() -> None:
    """One beam, five forced letters and the end: one target call writes all but the last token."""
    runner = engine(rule="search", num_beams=1, drafter="grammar", depth=16, drafts_per_layer=8)
    result = runner.generate(request("abcde"))
    assert (result.text, result.stats.steps, result.stats.target_calls) == ("abcde", 6, 1)
    assert engine(rule="search", num_beams=1).generate(request("abcde")).stats.target_calls == 6


def test_nothing_is_drafted_where_nothing_is_certain() -> None:
    """A grammar that leaves everything open drafts nothing, and neither do rows without one."""
    runner = engine(rule="coupled", num_beams=2, drafter="grammar", depth=None, drafts_per_layer=4)
    for result in runner.run([request("[abcde]*"), request(None, 1)]):
        assert result.stats.drafted == 0
        assert result.stats.steps_per_call == 1


def test_a_free_row_of_the_batch_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """The planner is told of rows that run; one that is free would make drafts look less worth than they are."""
    runner = engine(rule="coupled", num_beams=2, batch=4, drafter="grammar", depth=4, drafts_per_layer=4)
    cut, iterate, told, running = runner._planner.cut, Loop._iterate, [], []
    monkeypatch.setattr(runner._planner, "cut", lambda *arguments: (told.append(len(arguments[2])), cut(*arguments))[1])
    monkeypatch.setattr(
        Loop, "_iterate", lambda *arguments: (running.append(len(arguments[1].running)), iterate(*arguments))[1]
    )
    runner.generate([request(None if size else "a", size, max_new_tokens=1 + 7 * size) for size in (0, 1, 1, 1)])
    assert told == running
    assert 3 in running


@pytest.mark.parametrize(
    ("sizes", "expected"),
    [
        ([[1, 1, 1]], Shape(3, 1)),
        ([[]], Shape(0, 8)),
        ([[], [], [], [], [], [], [], [2] * 9], Shape(0, 8)),
        ([[1] * 4, [1] * 4], Shape(4, 1)),
        ([], Shape(0, 8)),
    ],
)
def test_how_deep_is_worth_it(sizes: list[list[int]], expected: Shape) -> None:
    """Several rows share a forest, so the run of one must not cost the others more than it saves."""
    planner = ProspectPlanner(MethodConfig(num_beams=4, drafts_per_layer=8, drafter="grammar"))
    assert planner.cut(Shape(16, 8), certain(sizes), [Acceptance() for _ in sizes]) == expected


def test_texts_that_are_behind_are_forgotten() -> None:
    runner = engine(rule="coupled", num_beams=3, depth=2, drafts_per_layer=6)
    runner.generate(request("[abcde]{200}", max_new_tokens=300))
    table = runner._tables.grammars
    assert table._last < -300  # states had numbers
    assert len(table._now) + len(table._before) < 100


def test_dead_ends_and_faults_are_errors_of_their_rows() -> None:
    asked = [
        request("ax"),
        Request(prompt_ids=(0,), grammar=Grammar.json_schema({"not": {}}, strict=True), id="1"),
        request("ab", 2),
        Request(prompt_ids=(0,), grammar=Grammar.regex("x"), id="3"),
    ]
    told = [result.error for result in engine(rule="search", num_beams=2).run(asked)]
    assert isinstance(told[0], InvalidRowError)
    assert "dead end after 2 steps" in str(told[0])
    assert "unsupported keywords" in str(told[1])
    assert told[2] is None
    assert "no token" in str(told[3])


def test_a_dead_end_names_the_token_rules_beside_it() -> None:
    """A forced end where the text is not whole; without the rule it would be cut."""
    [result] = engine(rule="search", num_beams=2).run(
        [request("abcde", max_new_tokens=4, token_rules="forced_eos_token_id=0")]
    )
    assert "goes on that token_rules (forced_eos_token_id) leave" in str(result.error)


def test_what_a_grammar_does_not_go_with() -> None:
    with pytest.raises(UsageError, match="stop is"):
        request("ab", stop="b")
    with pytest.raises(UsageError, match="allow and grammar"):
        Request("a", allow=("x",), grammar=Grammar.regex("a"))


def test_log_probabilities_are_raw() -> None:
    """Legal tokens keep the log-probability that they have without the grammar: it is not normalised again."""
    rows = table_rows(3, V)
    beam = engine(rule="coupled", num_beams=1).generate(request("[ab]{4}")).hypotheses[0]
    expected = math.fsum(rows(beam.token_ids[:at])[token] for at, token in enumerate(beam.token_ids))
    assert beam.logprob == pytest.approx(expected, abs=1e-5)
