"""Token rules of requests through whole engines: against the plain decoder over the rules' reference, against
transformers' `generate`, and against vLLM's formulas.

Guards: a rule that acts on a drafted node by another node's history, a text that depends on draft, depth or batch, a
rule of one row in another, and log-probabilities that are not those of the distribution that was drawn from.
"""

from __future__ import annotations

import itertools
import math
import random
from collections import Counter
from functools import cache
from typing import Any

import pytest
import torch

import dsbd_cli
from dsbd_cli import MethodConfig, Request, SamplingConfig
from dsbd_cli.config.token_rules import TokenRules
from dsbd_cli.engine.decoding.engine import Engine
from dsbd_cli.requests import RequestResult
from tests.helpers.plain import Path, Rows, Settings, coupled, decode, results_distribution
from tests.helpers.tiny import V
from tests.helpers.toys import NumberCodec, TableLM, _table, table_pair
from tests.oracles.token_rules import ruled

from .test_distribution import excess
from .test_same_text import VOCABULARY, path_noise
from .test_transformers import FAMILIES, forest, model, prompts

RULES: dict[str, dict[str, Any]] = {
    "nothing": {},
    "repetition": {"repetition_penalty": 1.7},
    "presence": {"presence_penalty": 1.5},
    "frequency": {"frequency_penalty": -1.2},
    "bias": {"logit_bias": {3: 4.0, 4: -9.0, 7: 1.5}},
    "allowed": {"allowed_token_ids": (2, 3, 4, 6, 8, 9, 10)},
    "words": {"bad_words_ids": ((3, 3), (6, 4), (9,), (1, 8), (10, 6, 10))},
    "n-grams": {"no_repeat_ngram_size": 2},
    "least": {"min_new_tokens": 4},
    "length": {"min_length": 6},
    "normalised": {"token_rules": "renormalize_logits=1,suppress_tokens=3+4+6", "presence_penalty": -1.0},
    "text": {"token_rules": "presence_penalty=0.5,suppress_tokens=3+9", "frequency_penalty": 0.5},
    "together": {
        "repetition_penalty": 0.8,
        "presence_penalty": -0.7,
        "frequency_penalty": 0.4,
        "logit_bias": {5: 2.0},
        "bad_words_ids": ((4, 4), (5, 5)),
        "min_new_tokens": 2,
    },
}
SEED = 1
WIDE = Settings(width=3, max_new=7, ends=(2, 5))
SINGLE = Settings(width=1, max_new=7, ends=(2,))


def table_rows(seed: int, vocabulary: int, prompt: Path, rules: TokenRules, settings: Settings) -> Rows:
    """The target of table_pair under rules, as the plain decoder takes it. With one beam they act on logits."""
    table = _table(seed, vocabulary).double()

    @cache
    def rows(path: Path) -> dict[int, float]:
        tokens = (*prompt, *path)
        logits = table[tokens[-2] if len(tokens) > 1 else 0, tokens[-1]]
        total = float(logits.logsumexp(0))
        raw, taken = (logits - total).tolist(), total if settings.width == 1 else None
        return dict(enumerate(ruled(raw, rules, prompt, path, set(settings.ends), settings.max_new, total=taken)))

    return rows


def requests(settings: Settings, count: int, **more: Any) -> list[Request]:
    """Rows with the rules of RULES in turn."""
    kinds = itertools.cycle(RULES.values())
    return [
        Request(
            id=str(i),
            seed=i,
            prompt_ids=(i % 5, i % 7, 6)[: 1 + i % 3],
            sampling=SamplingConfig(
                top_k=0, max_new_tokens=settings.max_new, n_best=settings.width, **next(kinds), **more
            ),
        )
        for i in range(count)
    ]


def run(settings: Settings, rule: str, rows: list[Request], size: int = 8, **method: Any) -> list[RequestResult]:
    target, draft = table_pair(SEED, VOCABULARY, 0.7)
    config = MethodConfig(rule=rule, num_beams=settings.width, **{"depth": 3, **method})
    codec = NumberCodec(VOCABULARY, tuple(settings.ends))
    engine = Engine(target, draft if config.needs_draft else None, codec, config, batch_size=size)
    return list(engine.run(rows))


def said(results: list[RequestResult]) -> list[list[tuple[tuple[int, ...], float]]]:
    """Tokens and log-probabilities, to the bit."""
    return [[(beam.token_ids, beam.logprob) for beam in result.hypotheses] for result in results]


@pytest.mark.parametrize("depth", [0, 3])
@pytest.mark.parametrize("rule", ["coupled", "search"])
@pytest.mark.parametrize("settings", [SINGLE, WIDE], ids=["one beam", "three beams"])
def test_rules_are_those_of_the_plain_decoder(settings: Settings, rule: str, depth: int) -> None:
    rows = requests(settings, 48)
    for request, result in zip(rows, run(settings, rule, rows, depth=depth), strict=True):
        rules = request.sampling.rules(TokenRules(), "none")
        assert request.prompt_ids is not None
        table = table_rows(SEED, VOCABULARY, request.prompt_ids, rules, settings)
        seed = request.seed
        step = coupled(lambda path, token, seed=seed: path_noise(seed, path, token), settings)
        want = decode(table, settings, step if rule == "coupled" else None)
        assert [beam.token_ids for beam in result.hypotheses] == [text.tokens for text in want], rules.acting
        for beam, text in zip(result.hypotheses, want, strict=True):
            assert beam.logprob == pytest.approx(text.logprob, abs=1e-4)
        assert result.token_rules == rules.acting


@pytest.mark.parametrize("rule", ["coupled", "search"])
@pytest.mark.parametrize("settings", [SINGLE, WIDE], ids=["one beam", "three beams"])
def test_a_row_depends_on_no_draft_and_no_neighbour(settings: Settings, rule: str) -> None:
    rows = requests(settings, 36)
    alone = [answer for row in rows for answer in said(run(settings, rule, [row], 1, depth=0))]
    for size, method in (
        (36, {"depth": 0}),
        (7, {"depth": 4, "drafts_per_layer": 5}),
        (3, {"depth": 1, "drafts_per_layer": 12}),
        (5, {"drafter": "ngram"}),
    ):
        results = run(settings, rule, rows, size, **method)
        assert said(results) == alone
    assert len({str(answer) for answer in alone[:: len(RULES)]}) > 1


@pytest.mark.parametrize("settings", [SINGLE, WIDE], ids=["one beam", "three beams"])
def test_each_rule_changes_texts(settings: Settings) -> None:
    """Guards the tests above against rules that do nothing."""
    common = {"top_k": 0, "max_new_tokens": settings.max_new, "n_best": settings.width}

    def texts(rules: dict[str, Any]) -> list[list[tuple[tuple[int, ...], float]]]:
        sampling = SamplingConfig(**common, **rules)
        prompts = [(i % 5, i % 7, 6)[: 1 + i % 3] for i in range(40)]
        rows = [Request(id=str(i), seed=i, prompt_ids=ids, sampling=sampling) for i, ids in enumerate(prompts)]
        return said(run(settings, "coupled", rows, 40))

    plain = texts({})
    for name, rules in RULES.items():
        assert (texts(rules) == plain) == (name == "nothing"), name


@pytest.mark.parametrize("name", ["together", "presence", "frequency", "repetition", "words"])
@pytest.mark.parametrize("width", [1, 2])
def test_the_distribution_of_rejection(name: str, width: int) -> None:
    """Of whole results with a draft, chi-square against the enumerated one; see test_distribution.py."""
    settings, vocabulary = Settings(width=width, max_new=3, ends=(2,)), 3
    asked = {
        "together": {"repetition_penalty": 1.5, "presence_penalty": 0.6, "logit_bias": {1: 0.8}},
        "words": {"bad_words_ids": ((1, 1), (0, 0, 1))},
    }.get(name, RULES[name])
    sampling = SamplingConfig(top_k=0, max_new_tokens=settings.max_new, n_best=width, **asked)
    target, draft = table_pair(7, vocabulary, noise=1.0)
    method = MethodConfig(rule="rejection", num_beams=width, depth=2, drafts_per_layer=3, width="fixed")
    engine = Engine(target, draft, NumberCodec(vocabulary, (2,)), method, batch_size=2000)
    stream = (Request(id=str(i), seed=i, prompt_ids=(0, 1), sampling=sampling) for i in range(4000))
    counts = Counter(tuple(beam.token_ids for beam in result.hypotheses) for result in engine.run(stream))
    rules = sampling.rules(TokenRules(), "none")
    right = results_distribution(table_rows(7, vocabulary, (0, 1), rules, settings), settings)
    plain = results_distribution(table_rows(7, vocabulary, (0, 1), TokenRules(), settings), settings)
    assert excess(counts, right) < 1
    assert excess(counts, plain) > 1


def vllm(logits: list[float], generated: Path, prompt: Path, asked: dict[str, Any]) -> list[float]:
    """vLLM's penalties as its documentation gives them, then the log of the softmax."""
    for token in range(len(logits)):
        logits[token] += asked.get("logit_bias", {}).get(token, 0.0)
        if token in prompt or token in generated:
            penalty = asked.get("repetition_penalty", 1.0)
            logits[token] = logits[token] / penalty if logits[token] > 0 else logits[token] * penalty
        logits[token] -= asked.get("frequency_penalty", 0.0) * generated.count(token)
        logits[token] -= asked.get("presence_penalty", 0.0) * (token in generated)
    total = math.log(math.fsum(map(math.exp, logits)))
    return [logit - total for logit in logits]


@pytest.mark.parametrize("name", ["repetition", "presence", "frequency", "bias"])
def test_samples_have_vllms_log_probabilities(name: str) -> None:
    """With one beam: of every token, and of the likeliest ones at its place."""
    asked = RULES[name]
    sampling = SamplingConfig(top_k=0, max_new_tokens=9, token_logprobs=True, top_logprobs=4, **asked)
    rows = [Request(id=str(i), seed=i, prompt_ids=(i % 5, 3, 6), sampling=sampling) for i in range(12)]
    table, seen = _table(SEED, VOCABULARY), 0
    for request, result in zip(rows, run(SINGLE, "coupled", rows), strict=True):
        assert request.prompt_ids is not None
        best = result.hypotheses[0]
        assert best.tokens is not None
        for position, token in enumerate(best.tokens):
            generated = best.token_ids[:position]
            text = (*request.prompt_ids, *generated)
            want = vllm(table[text[-2], text[-1]].tolist(), generated, request.prompt_ids, asked)
            assert token.logprob == pytest.approx(want[token.token_id], abs=1e-4)
            likeliest = sorted(range(VOCABULARY), key=want.__getitem__, reverse=True)[:4]
            assert [other for other, _, _ in token.top] == likeliest
            assert [value for _, _, value in token.top] == pytest.approx([want[other] for other in likeliest], abs=1e-4)
            seen += 1
    assert seen > 60


ENDS = tuple(range(2, 12))
# one rule, as transformers' generate takes it and as we do
PAIRS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "penalty": ({"repetition_penalty": 1.6}, {"repetition_penalty": 1.6}),
    "reward": ({"repetition_penalty": 0.5}, {"repetition_penalty": 0.5}),
    "n-grams": ({"no_repeat_ngram_size": 2}, {"no_repeat_ngram_size": 2}),
    "least": ({"min_new_tokens": 6}, {"min_new_tokens": 6}),
    "length": ({"min_length": 12}, {"min_length": 12}),
    "bias": (
        {"sequence_bias": [[[20], 6.0], [[21], -4.0], [[40], 3.0], [[3], -2.0]]},
        {"logit_bias": {20: 6.0, 21: -4.0, 40: 3.0, 3: -2.0}},
    ),
    "suppressed": ({"suppress_tokens": list(range(12, 60, 3))}, {"token_rules": None}),
    "normalised": (
        {"renormalize_logits": True, "suppress_tokens": list(range(12, 97, 4)), "repetition_penalty": 1.3},
        {"repetition_penalty": 1.3},
    ),
    "at first": ({"begin_suppress_tokens": list(range(12, 97, 2))}, {"token_rules": None}),
}


def bad_words(family: str) -> list[list[int]]:
    """Words of one to four tokens that the family writes."""
    texts = [text for text in our_texts(family, SamplingConfig(max_new_tokens=12), 4, BATCH, 0) if len(text) > 4]
    dice = random.Random(family)
    words = []
    for size in (1, 2, 2, 2, 3, 3, 4):
        text = dice.choice(texts)
        begin = dice.randrange(len(text) - size)
        words.append(list(text[begin : begin + size]))
    return [word for word in words if word != [word[0]] or word[0] not in ENDS]


@cache
def both(family: str, names: tuple[str, ...]) -> tuple[dict[str, Any], SamplingConfig]:
    """Arguments of transformers' generate, and our settings."""
    theirs: dict[str, Any] = {}
    ours: dict[str, Any] = {}
    rules = []
    for name in names:
        if name == "words":
            words = bad_words(family)
            theirs["bad_words_ids"], ours["bad_words_ids"] = words, tuple(map(tuple, words))
            continue
        asked, own = PAIRS[name]
        theirs |= asked
        ours |= own
        rules += [f"{key}={'+'.join(map(str, ids))}" for key, ids in asked.items() if "suppress" in key]
        rules += ["renormalize_logits=1"] if "renormalize_logits" in asked else []
    ours["token_rules"] = ",".join(rules) or None
    return theirs, SamplingConfig(max_new_tokens=12, n_best=4, **ours)


NAMES = (*PAIRS, "words")
# pairs that ask for one rule in two ways, or of which one acts in place of the other
SAME = (
    ("penalty", "reward"),
    ("least", "length"),
    ("suppressed", "normalised"),
    ("penalty", "normalised"),
    ("reward", "normalised"),
)
EACH = [(name,) for name in NAMES]
TWO = [pair for pair in itertools.combinations(NAMES, 2) if pair not in SAME]


BATCH = prompts(4, seed=9)


def transformers_texts(family: str, theirs: dict[str, Any], beams: int, batch: list[list[int]]) -> list[list[int]]:
    """The best text of every prompt, one after another, because transformers counts padding as text."""
    made = model(family)
    made.generation_config.eos_token_id, made.generation_config.pad_token_id = list(ENDS), 0
    texts = []
    for ids in batch:
        out = made.generate(torch.tensor([ids]), num_beams=beams, do_sample=False, max_new_tokens=12, **theirs)
        row = out[0, len(ids) :].tolist()
        end = next((position + 1 for position, token in enumerate(row) if token in ENDS), len(row))
        texts.append(row[:end])
    return texts


@cache
def plain_texts(family: str, beams: int) -> list[list[int]]:
    """transformers' texts without rules."""
    return transformers_texts(family, {}, beams, BATCH)


def our_texts(family: str, sampling: SamplingConfig, beams: int, batch: list[list[int]], depth: int) -> list[list[int]]:
    method = MethodConfig(rule="search", num_beams=beams, depth=depth, drafts_per_layer=2 * beams if depth else None)
    draft = forest(family, 0.02) if depth else None
    engine = Engine(forest(family), draft, NumberCodec(V, ENDS), method, batch_size=3)
    settings = SamplingConfig(**{**as_dict(sampling), "n_best": 1})
    results = engine.run([Request(prompt_ids=tuple(ids), sampling=settings) for ids in batch])
    return [list(result.hypotheses[0].token_ids) for result in results]


def as_dict(sampling: SamplingConfig) -> dict[str, Any]:
    return {name: getattr(sampling, name) for name in SamplingConfig.__dataclass_fields__}


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("names", EACH, ids="-".join)
def test_each_rule_is_transformers(names: tuple[str, ...], family: str) -> None:
    """With several beams and with one, without a draft and with one; and the rule changes some text."""
    theirs, sampling = both(family, names)
    changed = False
    for beams in (4, 1):
        want = transformers_texts(family, theirs, beams, BATCH)
        changed |= want != plain_texts(family, beams)
        for depth in (0, 3):
            assert our_texts(family, sampling, beams, BATCH, depth) == want, (beams, depth)
    assert changed


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("names", TWO, ids="-".join)
def test_two_rules_are_transformers(names: tuple[str, ...], family: str) -> None:
    theirs, sampling = both(family, names)
    assert our_texts(family, sampling, 4, BATCH[:2], 3) == transformers_texts(family, theirs, 4, BATCH[:2])


def failure(**asked: Any) -> str:
    """The error of a row that the target of a table model cannot answer."""
    (result,) = run(SINGLE, "search", [Request(prompt_ids=(1,), sampling=SamplingConfig(**asked))], depth=0)
    assert result.error is not None
    return str(result.error)


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"logit_bias": {12: 1.0}}, "logit_bias has token id 12, but the target has 12 ids"),
        ({"allowed_token_ids": (3, 99)}, "allowed_token_ids has token id 99, but the target has 12 ids"),
        ({"bad_words_ids": ((3, 12),)}, "bad_words_ids has token id 12, but the target has 12 ids"),
        ({"bad_words": ("3 12",)}, "bad_words has token id 12, but the target has 12 ids"),
        ({"bad_words": ("3", "  ")}, "bad_words has '  ', but a word must have more than blanks"),
        ({"bad_words": ("2",)}, "bad_words has an end token alone, which is no word: name it in suppress_tokens"),
        ({"bad_words_ids": ((2,), (3, 4))}, "bad_words_ids has an end token alone"),
        ({"bad_words_ids": ((1,) * 257,)}, "bad_words_ids has a word of 257 tokens, but a word may have 256"),
        (
            {"bad_words_ids": ((1,) * 256, *((1, 3, *map(int, f"{i:04}")) for i in range(1024)))},
            "bad_words_ids has 1025 words of up to 256 tokens: all as long as the longest, they have 262400 tokens",
        ),
        ({"token_rules": "logit_bias=12:1"}, "token_rules: logit_bias has token id 12, but the target has 12 ids"),
    ],
)
def test_a_rule_that_cannot_act_is_the_rows_error(asked: dict[str, Any], message: str) -> None:
    assert message in failure(**asked)


def test_bad_words_are_texts() -> None:
    """With and without a blank before them, and of several tokens."""
    engine = dsbd_cli.load(draft=None, method=MethodConfig(rule="search", num_beams=3))
    prompt = "question: what did Nesen do\nanswer:"

    def answer(*words: str) -> str:
        sampling = SamplingConfig(max_new_tokens=12, bad_words=words)
        return engine.generate(Request(prompt, sampling=sampling)).text

    said_ = answer()
    for word in said_.split()[:2]:
        assert word in said_.split()
        assert word not in answer(word).split()
        assert word not in answer(f"  {word}").split()
    both_ = said_.split()[:2]
    assert not set(both_) & set(answer(*both_).split())


def test_rows_without_rules_keep_no_table() -> None:
    """Guards memory of the vocabulary's size for rows that do not need it."""
    target, _ = table_pair(SEED, VOCABULARY, 0.7)
    assert isinstance(target, TableLM)
    engine = Engine(target, None, NumberCodec(VOCABULARY, (2,)), MethodConfig(rule="search", depth=0), batch_size=2)
    light = SamplingConfig(max_new_tokens=3, presence_penalty=1.0, logit_bias={3: 1.0}, bad_words_ids=((3, 4),))
    list(engine.run([Request(prompt_ids=(1,), sampling=light)]))
    rules = engine._tables.rules
    assert (len(rules.banned), tuple(rules.bias.shape[1:]), tuple(rules.words.shape[1:])) == (0, (1,), (1, 2))
