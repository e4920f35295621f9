"""Answers held to a catalogue: brute force, transformers with `prefix_allowed_tokens_fn`, and texts that depend on no
draft.

Guards: a mask after the best tokens were taken, a state that does not follow its beam, an answer that is illegal or
comes twice. No randomness beyond fixed seeds, so no false alarms.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from dsbd_cli.config.method import MethodConfig
from dsbd_cli.config.sampling import SamplingConfig
from dsbd_cli.engine.constraints.answers import Catalogue, CatalogueAnswer, CatalogueCompiler
from dsbd_cli.engine.core.candidates import CandidateCount, Candidates, LegalTokens, top_candidates
from dsbd_cli.engine.decoding.engine import Engine
from dsbd_cli.engine.iteration import iteration as iteration_module
from dsbd_cli.errors import InvalidRowError, UsageError
from dsbd_cli.models.transformers_backend.causal import CausalForestModel
from dsbd_cli.ops.interface import Ops
from dsbd_cli.requests import Request, RequestResult
from tests.engine.decoding.test_distribution import excess, run_engine
from tests.engine.decoding.test_same_text import path_noise
from tests.engine.decoding.test_transformers import FAMILIES, model, prompts
from tests.helpers.plain import Settings, Step, coupled, decode, greedy, results_distribution
from tests.helpers.tiny import V
from tests.helpers.toys import NumberCodec, table_pair, table_rows

Tokens = tuple[int, ...]
VOCABULARY, END = 12, 0
CODEC = NumberCodec(VOCABULARY, (END,))
PROMPT = (1, 2)


def answers(seed: int, count: int, vocabulary: int, longest: int = 4, first: int = 1) -> list[Tokens]:
    """Different answers of 1 to `longest` tokens; some are the beginning of others."""
    rng = random.Random(seed)
    drawn: dict[Tokens, None] = {}
    while len(drawn) < count:
        size = rng.choice((*range(1, longest + 1), longest))
        drawn[tuple(rng.randrange(first, vocabulary) for _ in range(size))] = None
    return list(drawn)


def catalogue(codec: Any, vocabulary: int, allowed: Sequence[Tokens]) -> Catalogue:
    return CatalogueCompiler(codec, vocabulary).compile(
        CatalogueAnswer(f"answer {index}", tokens=tokens, id=str(index).encode())
        for index, tokens in enumerate(allowed)
    )


def engine(allowed: Sequence[Tokens], *, batch: int = 3, noise: float = 0.5, seed: int = 3, **method: Any) -> Engine:
    method = {"depth": 0, **method}
    target, draft = table_pair(seed, VOCABULARY, noise, {END: 1.0})
    config = MethodConfig.of({"width": "fixed", **method})
    catalogues = {"": catalogue(CODEC, VOCABULARY, allowed)} if allowed else {}
    return Engine(target, draft if config.needs_draft else None, CODEC, config, batch_size=batch, catalogues=catalogues)


def asked(count: int, beams: int, **sampling: Any) -> list[Request]:
    settings = SamplingConfig(**{"n_best": beams, "max_new_tokens": 16, "top_k": 0, **sampling})
    return [Request(prompt_ids=(1 + at % 5, 2 + at % 7), sampling=settings) for at in range(count)]


def told(results: Sequence[RequestResult]) -> list[list[tuple[Tokens, float, object]]]:
    return [[(beam.token_ids, beam.logprob, beam.answer_id) for beam in result.hypotheses] for result in results]


@pytest.mark.parametrize("rule", ["search", "coupled", "rejection"])
def test_all_answers_in_the_order_of_their_scores(rule: str) -> None:
    """W = 1,000: every answer of 1,000 comes out once, with the log-probability of direct scoring."""
    allowed = answers(1, 1000, VOCABULARY)
    rows = table_rows(3, VOCABULARY, PROMPT)
    scores = {
        (*tokens, END): sum(rows((*tokens, END)[:at])[token] for at, token in enumerate((*tokens, END)))
        for tokens in allowed
    }
    target, _ = table_pair(3, VOCABULARY, 0.0)
    method = MethodConfig(rule=rule, num_beams=1000, depth=0)
    runner = Engine(target, None, CODEC, method, catalogues={"": catalogue(CODEC, VOCABULARY, allowed)})
    sampling = SamplingConfig(n_best=1000, length_penalty=0.0, top_k=0)
    result = runner.generate(Request(prompt_ids=PROMPT, sampling=sampling), seed=1)
    assert [beam.token_ids for beam in result.hypotheses] == sorted(scores, key=scores.__getitem__, reverse=True)
    logprobs = [beam.logprob for beam in result.hypotheses]
    assert np.allclose(logprobs, [scores[beam.token_ids] for beam in result.hypotheses], rtol=0, atol=1e-5)
    assert [allowed[int(str(beam.answer_id))] for beam in result.hypotheses] == [
        beam.token_ids[:-1] for beam in result.hypotheses
    ]
    assert {beam.finish_reason for beam in result.hypotheses} == {"stop"}


def constrained(
    made: Any,
    prompt: list[int],
    beams: int,
    eos: list[int],
    allowed: Sequence[Tokens],
    penalty: float,
    *,
    early: bool = False,
) -> tuple[list[Tokens], list[float]]:
    """transformers' beams under prefix_allowed_tokens_fn, those that are answers."""
    trie: dict[Tokens, set[int]] = {}
    for tokens in allowed:
        whole = (*tokens, eos[0])
        for at, token in enumerate(whole):
            trie.setdefault(whole[:at], set()).add(token)
    made.generation_config.eos_token_id, made.generation_config.pad_token_id = eos, 0
    out = made.generate(
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
        num_beams=beams,
        num_return_sequences=beams,
        do_sample=False,
        max_new_tokens=8,
        length_penalty=penalty,
        early_stopping=early,
        prefix_allowed_tokens_fn=lambda row, ids: sorted(trie.get(tuple(ids[len(prompt) :].tolist()), {eos[0]})),
        output_scores=True,
        return_dict_in_generate=True,
    )
    rows, scores = [], []
    for row, score in zip(out.sequences[:, len(prompt) :].tolist(), out.sequences_scores.tolist(), strict=True):
        end = next((i + 1 for i, token in enumerate(row) if token in eos), len(row))
        if score > -1e6:  # where there are fewer answers than beams, transformers fills up with impossible ones
            rows.append(tuple(row[:end]))
            scores.append(score)
    return rows, scores


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("beams", [20, 50])
def test_search_is_transformers_with_allowed_tokens(family: str, beams: int) -> None:
    """Token for token and score by score, with ids that are the beginning of others, and with a catalogue that is
    smaller than the number of beams."""
    eos = [2, 5]
    codec = NumberCodec(V, tuple(eos))
    target = CausalForestModel(model(family), family)
    draft = CausalForestModel(model(family, 0.02), family)
    method = MethodConfig(rule="search", num_beams=beams, depth=0)
    drafted = MethodConfig(rule="search", num_beams=beams, depth=2, drafts_per_layer=2 * beams)
    for size, penalty in ((400, 1.0), (30, 0.0)):
        allowed = answers(beams + size, size, V, first=6)
        catalogues = {"": catalogue(codec, V, allowed)}
        batch = prompts(3, seed=beams)
        sampling = SamplingConfig(n_best=beams, max_new_tokens=8, length_penalty=penalty)
        requests = [Request(prompt_ids=tuple(ids), sampling=sampling) for ids in batch]
        want = [constrained(model(family), prompt, beams, eos, allowed, penalty) for prompt in batch]
        for runner in (
            Engine(target, None, codec, method, batch_size=2, catalogues=catalogues),
            Engine(target, draft, codec, drafted, batch_size=3, catalogues=catalogues),
        ):
            for (rows, scores), result in zip(want, runner.generate(requests), strict=True):
                assert [beam.token_ids for beam in result.hypotheses] == rows
                found_scores = [beam.score for beam in result.hypotheses]
                assert np.allclose(found_scores, scores, rtol=3e-6, atol=1e-4)  # sums of 70 in float32
                assert len(rows) == min(beams, size)


@pytest.mark.parametrize(("beams", "count"), [(2, 2), (4, 3)])
def test_no_more_answers_than_beams_with_early_stopping(beams: int, count: int) -> None:
    """All answers come out, in the order of direct scoring. transformers counts beams without a legal token as
    finished, and so may stop before it has found the better ones."""
    family, eos, penalty = "llama", [2, 5], 2.0
    codec, target = NumberCodec(V, tuple(eos)), CausalForestModel(model(family), family)
    method = MethodConfig(rule="search", num_beams=beams, depth=0)
    sampling = SamplingConfig(n_best=beams, max_new_tokens=8, length_penalty=penalty, early_stopping=True)
    stopped_early = 0
    for seed in range(12):
        allowed, [prompt] = answers(seed, count, V, longest=6, first=6), prompts(1, seed=seed)
        scores = {answer: score_of(family, prompt, (*answer, eos[0]), penalty) for answer in allowed}
        expected = sorted(scores, key=scores.__getitem__, reverse=True)
        runner = Engine(target, None, codec, method, catalogues={"": catalogue(codec, V, allowed)})
        result = runner.generate(Request(prompt_ids=tuple(prompt), sampling=sampling))
        assert [beam.token_ids[:-1] for beam in result.hypotheses] == expected
        assert np.allclose([text.score for text in result.hypotheses], [scores[text] for text in expected], atol=1e-4)
        theirs, _ = constrained(model(family), prompt, beams, eos, allowed, penalty, early=True)
        stopped_early += theirs[0] != result.hypotheses[0].token_ids
    assert stopped_early


def score_of(family: str, prompt: list[int], tokens: Tokens, penalty: float) -> float:
    """Log-probability of an answer with its end token, divided by a power of its length."""
    with torch.no_grad():
        logits = model(family)(torch.tensor([[*prompt, *tokens]])).logits[0, len(prompt) - 1 : -1]
    logprobs = torch.log_softmax(logits.double(), dim=-1)
    return float(logprobs[torch.arange(len(tokens)), torch.tensor(tokens)].sum()) / len(tokens) ** penalty


def follows(allowed: Sequence[Tokens]) -> Callable[[Tokens], set[int]]:
    """Tokens that may follow the beginning of an answer."""
    trie: dict[Tokens, set[int]] = {}
    for tokens in allowed:
        whole = (*tokens, END)
        for at, token in enumerate(whole):
            trie.setdefault(whole[:at], set()).add(token)
    return lambda path: trie.get(path, set())


TWINS = [
    Settings(width=3, max_new=9, ends=(END,), temperature=0.8, top_k=5),
    Settings(width=4, max_new=9, ends=(END,), length_penalty=0.0, early=True),
    Settings(width=2, max_new=9, ends=(END,), temperature=1.4, scope="beam", top_k=4),
    Settings(width=3, max_new=9, ends=(END,), temperature=0.0, top_k=5),
]


@pytest.mark.parametrize("settings", TWINS, ids=["warped", "early", "beam-scope", "cold"])
@pytest.mark.parametrize("rule", ["coupled", "search"])
def test_the_engine_equals_the_plain_decoder(settings: Settings, rule: str) -> None:
    """The scalar reference knows nothing of tries: it is told which tokens may follow a path."""
    allowed = answers(9, 120, VOCABULARY)
    settings = replace(settings, legal=follows(allowed))
    if rule == "search":
        settings = replace(settings, temperature=1.0, top_k=0, scope="pool")
    sampling = SamplingConfig(
        temperature=settings.temperature,
        top_k=settings.top_k,
        max_new_tokens=settings.max_new,
        length_penalty=settings.length_penalty,
        early_stopping=settings.early,
        n_best=settings.width,
    )
    for method in ({"depth": 0}, {"depth": 2, "drafts_per_layer": 9}):
        target, draft = table_pair(1, VOCABULARY, 0.7)
        config = MethodConfig(
            rule=rule,
            num_beams=settings.width,
            warp_scope=settings.scope,
            **method,
        )
        catalogues = {"": catalogue(CODEC, VOCABULARY, allowed)}
        runner = Engine(target, draft if config.needs_draft else None, CODEC, config, catalogues=catalogues)
        requests = [Request(id=str(i), seed=i, prompt_ids=(i % 5, i % 7), sampling=sampling) for i in range(16)]
        for i, result in enumerate(runner.generate(requests)):
            step: Step | None = None
            if rule == "coupled":
                step = coupled(lambda path, token, i=i: path_noise(i, path, token), settings)  # type: ignore[misc]
                step = greedy(settings) if settings.temperature == 0 else step
            texts = decode(table_rows(1, VOCABULARY, (i % 5, i % 7)), settings, step)
            assert [beam.token_ids for beam in result.hypotheses] == [text.tokens for text in texts]
            assert [beam.logprob for beam in result.hypotheses] == pytest.approx([t.logprob for t in texts], abs=1e-4)


SMALL = ((1,), (1, 2), (2, 1), (2, 2, 1))


@pytest.mark.parametrize(("rule", "depth"), [("coupled", 2), ("rejection", 0), ("rejection", 2)])
def test_distribution_of_the_answers(rule: str, depth: int) -> None:
    """Chi-square against the enumerated distribution as in test_distribution, alpha 1e-5. With `coupled` the text is
    the same with a draft and without, as another test says."""
    settings = Settings(width=2, max_new=4, ends=(END,), legal=follows(SMALL))
    target, draft = table_pair(7, 4, 1.0)
    method = MethodConfig(rule=rule, num_beams=2, depth=depth, drafts_per_layer=4, width="fixed")
    codec = NumberCodec(4, (END,))
    catalogues = {"": catalogue(codec, 4, SMALL)}
    runner = Engine(target, draft if depth else None, codec, method, batch_size=2000, catalogues=catalogues)
    distribution = results_distribution(table_rows(7, 4), settings)
    assert len(distribution) > 4
    assert excess(run_engine(runner, settings, 4000), distribution) < 1


def test_a_late_mask_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Mutant: the best tokens of all first, then the legal ones of them."""

    def draft_backlog(logits: torch.Tensor, room: CandidateCount, legal: LegalTokens | None, ops: Ops) -> Candidates:
        candidates = top_candidates(logits, CandidateCount(min(room.count, 4)))
        assert legal is not None
        whole = torch.zeros_like(logits).flatten(0, -2)
        legal.apply(whole, slice(0, len(whole)), whole[:, :1])
        candidates.logprobs = candidates.logprobs + whole.view_as(logits).gather(-1, candidates.tokens)
        return candidates

    allowed = answers(9, 40, VOCABULARY)
    requests = asked(12, 2)
    want = told(engine(allowed, rule="search", num_beams=2).generate(requests))
    monkeypatch.setattr(iteration_module, "top_candidates", draft_backlog)
    got = told(list(engine(allowed, rule="search", num_beams=2).run(requests)))
    assert sum(a != b for a, b in zip(want, got, strict=True)) > 3


DRAFTED: list[dict[str, Any]] = [
    {"depth": 2, "drafts_per_layer": 12},
    {"depth": 3, "drafts_per_layer": 6, "drafter": "rsd-c"},
    {"depth": 2, "drafts_per_layer": 9, "drafter": "rsd-s"},
    {"depth": 3, "drafts_per_layer": 8, "drafter": "dynamic-tree"},
    {"depth": 2, "drafts_per_layer": 8, "drafter": "ngram"},
    {"depth": 2, "drafts_per_layer": 8, "drafter": "beam+ngram"},
]


@pytest.mark.parametrize("rule", ["search", "coupled"])
def test_the_text_depends_on_no_draft(rule: str) -> None:
    allowed = answers(4, 300, VOCABULARY)
    requests = asked(12, 4, **({} if rule == "search" else {"temperature": 1.3, "top_k": 5}))
    want = told(engine(allowed, rule=rule, batch=1).generate(requests, seed=5))
    assert len({tuple(row) for row in want}) > 8
    for at, method in enumerate(DRAFTED):
        got = engine(allowed, rule=rule, batch=1 + at % 4, **method).generate(requests, seed=5)
        assert told(got) == want, method
        if method.get("drafter", "beam") == "beam":
            assert sum(result.stats.steps - result.stats.target_calls for result in got) > 10  # drafts were of use


LOOSE: list[dict[str, Any]] = [
    {"rule": rule, "width": width, "warp_scope": scope}
    for rule in ("rejection", "with-replacement", "coupled")
    for width in ("fixed", "threshold")
    for scope in ("pool", "beam")
]
LOOSE.append({"rule": "fuzzy:0.5"})


@pytest.mark.parametrize("method", LOOSE, ids=lambda method: "-".join(map(str, method.values())))
def test_no_rule_leaves_the_catalogue(method: dict[str, Any]) -> None:
    allowed = answers(4, 60, VOCABULARY)
    legal = {(*tokens, END) for tokens in allowed}
    runner = engine(allowed, depth=2, drafts_per_layer=8, noise=1.5, **method)
    accepted = 0
    for result in runner.generate(asked(24, 4, top_k=6), seed=2):
        texts = [beam.token_ids for beam in result.hypotheses]
        assert set(texts) <= legal
        assert method["rule"] == "with-replacement" or len(set(texts)) == len(texts)
        accepted += result.stats.accepted
    assert accepted > 20


def test_rows_choose_and_rows_without_a_catalogue_stay_free() -> None:
    """In one batch: a named catalogue, a list of the row's own, and rows that may say anything, whose text is that of a
    run without any catalogue."""
    first, second = answers(6, 40, VOCABULARY), answers(7, 40, VOCABULARY)
    own = ("3 4 ", "5 ", "5 6 7 ")
    for method in ({"depth": 0}, {"depth": 2, "drafts_per_layer": 10}):
        target, draft = table_pair(3, VOCABULARY, 0.5, {END: 1.0})
        config = MethodConfig.of({"rule": "coupled", **method})
        runner = Engine(
            target,
            draft if config.needs_draft else None,
            CODEC,
            config,
            batch_size=4,
            catalogues={"a": catalogue(CODEC, VOCABULARY, first), "b": catalogue(CODEC, VOCABULARY, second)},
        )
        sampling = SamplingConfig(n_best=4, max_new_tokens=9)
        allow: list[Any] = ["a", own, "b", "a", own, "b", own]
        requests = [
            Request(prompt_ids=(1, 2 + at), allow=allowed, sampling=sampling) for at, allowed in enumerate(allow)
        ]
        results = runner.generate(requests, seed=3)
        legal = {"a": first, "b": second, own: [(3, 4), (5,), (5, 6, 7)]}
        for request, result in zip(requests, results, strict=True):
            assert {beam.token_ids[:-1] for beam in result.hypotheses} <= set(legal[request.allow])  # type: ignore[index]
        assert len(results[1].hypotheses) == 3  # fewer answers than beams: what there is
        free = Engine(target, draft if config.needs_draft else None, CODEC, config, batch_size=4)
        alone = [Request(prompt_ids=(1, 2 + at), sampling=sampling, id=f"free {at}") for at in range(7)]
        want = told(free.generate(alone, seed=3))
        both = [row for request in alone for row in (request, Request(prompt_ids=(1, 3), allow=own, sampling=sampling))]
        assert told(free.generate(both, seed=3))[::2] == want
        assert len(free._tables.tries.table._tries) == 0  # a row's own list is forgotten with the row


def test_what_is_wrong_is_said() -> None:
    compiler = CatalogueCompiler(CODEC, VOCABULARY)
    with pytest.raises(Exception, match="line 2 has the same tokens as line 1"):
        compiler.compile([CatalogueAnswer("line 1", tokens=(1, 2)), CatalogueAnswer("line 2", text="1 2 ")])
    with pytest.raises(Exception, match="line 1 is empty"):
        compiler.compile([CatalogueAnswer("line 1", tokens=(END,))])
    with pytest.raises(Exception, match="line 1 holds token id 0, where decoding ends"):
        compiler.compile([CatalogueAnswer("line 1", tokens=(1, END, 2))])
    with pytest.raises(Exception, match="line 1 holds token id 12, but the target has 12 ids"):
        compiler.compile([CatalogueAnswer("line 1", tokens=(12,))])
    with pytest.raises(UsageError, match="an end token"):
        CatalogueCompiler(NumberCodec(VOCABULARY), VOCABULARY)
    runner = engine(answers(1, 20, VOCABULARY, longest=5), num_beams=2)
    short, cut = SamplingConfig(max_new_tokens=3), SamplingConfig(stop="x")
    for request, message in (
        (Request(prompt_ids=PROMPT, sampling=short), "max_new_tokens is 3, but the longest allowed answer has 6"),
        (Request(prompt_ids=PROMPT, sampling=cut), "stop is .* but allow says where an answer ends"),
        (Request(prompt_ids=PROMPT, allow="films"), "allow is 'films', but no catalogue has a name"),
        (Request(prompt_ids=PROMPT, allow=("1 ", "1 ")), r"allow\[1\] has the same tokens as allow\[0\]"),
    ):
        [result] = runner.run([request])
        assert result.error is not None
        with pytest.raises(Exception, match=message):
            result.check()


def test_token_rules_that_leave_no_answer_are_named() -> None:
    [result] = engine(answers(1, 20, VOCABULARY), num_beams=2).run(asked(1, 2, token_rules="min_new_tokens=9"))
    assert isinstance(result.error, InvalidRowError)
    assert "token_rules (min_new_tokens) leave none of the allowed answers" in str(result.error)


@pytest.mark.parametrize("drafted", [False, True])
def test_a_first_iteration_has_one_root_per_row(drafted: bool) -> None:
    """One live beam needs no W nodes; the iterations after it have W. The text is that of W roots."""
    method: dict[str, Any] = {"depth": 2, "drafts_per_layer": 12} if drafted else {"depth": 0}
    requests = asked(5, 6, max_new_tokens=5)
    for allowed in ([], answers(4, 300, VOCABULARY)):
        runner = engine(allowed, batch=2, rule="coupled", num_beams=6, **method)
        runner.log_steps = True
        results = runner.generate(requests, seed=1)
        first, second = ([step.nodes for step in result.stats.step_log] for result in results[:2])
        assert first[0] == second[0] == 1 + (24 if drafted else 0)
        assert set(first[1:] + second[1:]) <= {6 + (24 if drafted else 0)}
        assert len(first) > 1
        wide = engine(allowed, batch=2, rule="coupled", num_beams=6, **method)
        wide._stepper.graphs = _Plainly()  # type: ignore[assignment]
        assert told(wide.generate(requests, seed=1)) == told(results)


def test_a_profile_may_ask_for_iterations_of_w_roots() -> None:
    runner = engine([], rule="coupled", num_beams=6)
    runner.log_steps, runner.one_root = True, False
    [result] = runner.generate(asked(1, 6, max_new_tokens=5))
    assert {step.nodes for step in result.stats.step_log} == {6}


class _Plainly:
    """Graphs that are never captured: the engine must not narrow a shape that it may capture."""

    steady = True

    def run(self, key: Any, state: Any, work: Any, phases: Any, lap: Any) -> Any:
        assert state.beams.token.shape[1] == 6
        for number, phase in enumerate(phases):
            phase()
            lap(number)
        return work

    def forget(self) -> None: ...


@pytest.mark.parametrize("beams", [1, 2, 50, 1024])
def test_any_width_works(beams: int) -> None:
    """More beams than answers, and more than the vocabulary; every answer comes once."""
    allowed = answers(2, 40, VOCABULARY)
    method = MethodConfig(rule="search", num_beams=beams)
    assert method.drafts_per_layer * method.depth <= max(512, method.drafts_per_layer)
    assert method.drafts_per_layer >= beams
    [result] = engine(allowed, rule="search", num_beams=beams).generate(asked(1, beams))
    texts = [beam.token_ids[:-1] for beam in result.hypotheses]
    assert len(texts) == len(set(texts)) == min(beams, 40)
    assert set(texts) <= set(allowed)
