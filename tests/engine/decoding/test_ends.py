"""What ends a text, row by row: end tokens of a row's own beside rows with other ends, and what of the end its text
keeps.

A row must get, to the bit, what an engine gives it whose checkpoint has these end tokens, and what the plain decoder
says. Guards: an end of a neighbour, a checkpoint's end that still acts, a stop string that is no longer seen, a token
that is hidden in one of text, streamed text and details and shown in another.
"""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from dsbd_cli.config.grammars import Grammar
from dsbd_cli.config.method import MethodConfig
from dsbd_cli.config.sampling import SamplingConfig
from dsbd_cli.engine.constraints.stops import StopSet
from dsbd_cli.engine.decoding.encode import Encoder
from dsbd_cli.engine.decoding.engine import Engine
from dsbd_cli.engine.decoding.results import text_of
from dsbd_cli.engine.iteration import finished
from dsbd_cli.engine.iteration.batch_state import Limits
from dsbd_cli.errors import InvalidRowError, UsageError
from dsbd_cli.models.tokenizer import HFCodec
from dsbd_cli.models.transformers_backend.causal import CausalForestModel
from dsbd_cli.requests import Request, RequestResult
from tests.engine.decoding.test_same_text import path_noise
from tests.engine.decoding.test_transformers import forest, model, prompts
from tests.helpers.checkpoints import byte_level, wrap
from tests.helpers.plain import Settings, Text, coupled, decode
from tests.helpers.tiny import V
from tests.helpers.toys import NumberCodec, table_pair, table_rows

VOCABULARY, EOS = 12, (2, 5)
SPECIAL = {2: "<end>", 5: "<turn>", 7: "<note>"}


class SpecialCodec(NumberCodec):
    """Some tokens are special, and have a text that is shown on request."""

    def decode(self, ids: list[int], *, skip_special_tokens: bool = True) -> str:
        pieces = self.token_bytes(skip_special_tokens=skip_special_tokens)
        return b"".join(pieces[token] for token in ids).decode()

    def token_bytes(self, *, skip_special_tokens: bool = True) -> list[bytes]:
        return [
            (b"" if skip_special_tokens else SPECIAL[token].encode()) if token in SPECIAL else f"{token} ".encode()
            for token in range(self.vocabulary)
        ]


def engine(rule: str = "coupled", eos: tuple[int, ...] = EOS, batch_size: int = 4, **method: Any) -> Engine:
    target, draft = table_pair(1, VOCABULARY, 0.5)
    config = MethodConfig.of({"rule": rule, "num_beams": 3, "depth": 3, "width": "fixed", **method})
    codec = SpecialCodec(VOCABULARY, eos)
    return Engine(target, draft if config.needs_draft else None, codec, config, batch_size=batch_size)


def ends_of(sampling: SamplingConfig) -> tuple[int, ...]:
    """Oracle: the end tokens of a row."""
    base = EOS if sampling.eos_token_id is None else sampling.eos_token_id
    return tuple({*(() if sampling.ignore_eos else base), *sampling.stop_token_ids})


def mixed_rows(count: int, seed: int, **more: Any) -> list[Request]:
    dice = random.Random(seed)

    def some(most: int) -> tuple[int, ...]:
        return tuple(dice.sample(range(VOCABULARY), dice.randint(1, most)))

    def asked() -> dict[str, Any]:
        kind = dice.choice(("checkpoint", "stop", "own", "ignored", "ignored", "both"))
        return {
            "checkpoint": {},
            "stop": {"stop_token_ids": some(4)},
            "own": {"eos_token_id": some(3)},
            "ignored": {"ignore_eos": True, "stop_token_ids": dice.choice(((), some(2)))},
            "both": {"eos_token_id": some(1), "stop_token_ids": some(2)},
        }[kind]

    return [
        Request(
            id=str(number),
            seed=number,
            prompt_ids=(number % 5, number % 7),
            sampling=SamplingConfig(
                max_new_tokens=dice.randint(3, 9),
                n_best=3,
                stop=dice.choice(((), (), ("3 ",), ("8 4", "9 "))),
                early_stopping=dice.choice((True, False, "never")),
                length_penalty=dice.choice((1.0, 0.0, 2.0, -0.5)),
                **asked(),
                **more,
            ),
        )
        for number in range(count)
    ]


def facts(result: RequestResult) -> list[object]:
    return [
        (beam.token_ids, beam.logprob.hex(), beam.score.hex(), beam.finish_reason, beam.tokens)
        for beam in result.hypotheses
    ]


def alone(request: Request, rule: str, **method: Any) -> RequestResult:
    """The row in an engine whose checkpoint has its end tokens."""
    sampling = replace(request.sampling, stop_token_ids=(), eos_token_id=None, ignore_eos=False)
    (result,) = engine(rule, ends_of(request.sampling), 1, **method).run([replace(request, sampling=sampling)])
    return result


RULES = ("coupled", "search", "rejection", "with-replacement")


@pytest.mark.parametrize("kernels", [True, False], ids=["kernels", "tensors"])
@pytest.mark.parametrize("depth", [0, 3])
@pytest.mark.parametrize("rule", RULES)
def test_rows_with_other_ends_get_what_such_a_checkpoint_gives(rule: str, depth: int, kernels: bool) -> None:
    rows = mixed_rows(30, seed=depth)
    decoder = engine(rule, batch_size=7, depth=depth)
    if not kernels:
        decoder.stepper.ops = decoder.stepper.ops.without("draft", "verify", "commit")
    for request, result in zip(rows, decoder.run(rows), strict=True):
        assert facts(result) == facts(alone(request, rule, depth=depth))
        ends = ends_of(request.sampling)
        for beam in result.hypotheses:
            assert not set(beam.token_ids[:-1]) & set(ends)
    assert any(2 in result.hypotheses[0].token_ids[:-1] for result in decoder.run(rows)), "an end token was passed"


def mistaken(right: Callable[..., StopSet], change: Callable[[StopSet], StopSet]) -> Callable[..., StopSet]:
    return lambda self, request, catalogue: change(right(self, request, catalogue))


MUTANTS: dict[str, Callable[[StopSet], StopSet]] = {
    "the checkpoint's": lambda ends: replace(ends, tokens=None),
    "the checkpoint's, too": lambda ends: replace(ends, tokens=ends.tokens and ends.tokens | set(EOS)),
    "without one": lambda ends: replace(ends, tokens=ends.tokens and frozenset(sorted(ends.tokens)[1:])),
    "without strings": lambda ends: replace(ends, strings=()),
}


@pytest.mark.parametrize("change", MUTANTS.values(), ids=MUTANTS)
def test_wrong_ends_are_found(change: Callable[[StopSet], StopSet], monkeypatch: pytest.MonkeyPatch) -> None:
    rows = mixed_rows(30, seed=3)
    expected = [facts(alone(request, "coupled")) for request in rows]
    monkeypatch.setattr(Encoder, "_ends", mistaken(Encoder._ends, change))
    assert [facts(result) for result in engine(batch_size=7).run(rows)] != expected


def plain_texts(request: Request, rule: str) -> tuple[Text, ...]:
    """The hypotheses of a row by the plain decoder."""
    sampling, number = request.sampling, int(request.id)
    settings = Settings(
        width=3,
        max_new=sampling.max_new_tokens,
        ends=ends_of(sampling),
        top_k=sampling.top_k,
        length_penalty=sampling.length_penalty,
        early=sampling.early_stopping,
    )
    noise = coupled(lambda path, token: path_noise(number, path, token), settings)
    assert request.prompt_ids is not None
    table = table_rows(1, VOCABULARY, (request.prompt_ids[0], request.prompt_ids[1]))
    return decode(table, settings, noise if rule == "coupled" else None)


@pytest.mark.parametrize("rule", ["coupled", "search"])
def test_rows_get_the_text_of_the_plain_decoder(rule: str) -> None:
    rows = [row for row in mixed_rows(60, seed=5) if not row.sampling.stop]
    for request, result in zip(rows, engine(rule, batch_size=9).run(rows), strict=True):
        expected = plain_texts(request, rule)
        assert [beam.token_ids for beam in result.hypotheses] == [text.tokens for text in expected]
        reasons = ["length" if text.by_length else "stop" for text in expected]
        assert [beam.finish_reason for beam in result.hypotheses] == reasons


@pytest.mark.parametrize("drafter", ["ngram", "rsd-c", "rsd-s", "dynamic-tree"])
def test_drafts_of_other_drafters_know_the_ends(drafter: str) -> None:
    rows = mixed_rows(20, seed=7)
    for request, result in zip(rows, engine(batch_size=6, drafter=drafter).run(rows), strict=True):
        assert facts(result) == facts(alone(request, "coupled", depth=0))


@pytest.mark.parametrize("family", ["llama", "gpt2", "opt"])
def test_end_tokens_are_those_of_transformers(family: str) -> None:
    """Each prompt with end tokens of its own, all in one batch."""
    made, batch, dice = model(family), prompts(8, seed=2), random.Random(family)
    own = [dice.choice(((), tuple(dice.sample(range(2, V), 9)))) for _ in batch]
    target, draft = forest(family), CausalForestModel(model(family, 0.02), family)
    method = MethodConfig(rule="search", num_beams=4, depth=3)
    decoder = Engine(target, draft, NumberCodec(V, (2,)), method, batch_size=8)
    rows = [
        Request(
            id=str(number),
            prompt_ids=tuple(ids),
            sampling=SamplingConfig(
                max_new_tokens=12, n_best=4, **({"eos_token_id": eos} if eos else {"ignore_eos": True})
            ),
        )
        for number, (ids, eos) in enumerate(zip(batch, own, strict=True))
    ]
    token_ids = [[list(beam.token_ids) for beam in result.hypotheses] for result in decoder.run(rows)]
    for ids, eos, texts in zip(batch, own, token_ids, strict=True):
        made.generation_config.eos_token_id, made.generation_config.pad_token_id = list(eos) or None, 0
        out = made.generate(
            torch.tensor([ids]), num_beams=4, num_return_sequences=4, do_sample=False, max_new_tokens=12
        )[:, len(ids) :].tolist()
        ends = [next((at + 1 for at, token in enumerate(row) if token in eos), len(row)) for row in out]
        assert texts == [row[:end] for row, end in zip(out, ends, strict=True)]


def never_rows(count: int) -> list[Request]:
    """Rows that early_stopping "never" keeps going, beside others."""
    dice = random.Random(21)
    return [
        replace(
            request,
            sampling=SamplingConfig(
                max_new_tokens=dice.randint(6, 14),
                n_best=3,
                stop_token_ids=(7, 9),
                early_stopping=dice.choice(("never", "never", False)),
                length_penalty=dice.choice((0.5, 1.0, 2.0, 0.0, -0.5, -1.0)),
            ),
        )
        for request in mixed_rows(count, seed=21)
    ]


def best_tokens(results: Iterable[RequestResult]) -> list[list[tuple[int, ...]]]:
    return [[beam.token_ids for beam in result.hypotheses] for result in results]


@pytest.mark.parametrize("kernels", [True, False], ids=["kernels", "tensors"])
@pytest.mark.parametrize("rule", ["coupled", "search"])
def test_never_goes_on_while_a_beam_can_become_better(rule: str, kernels: bool) -> None:
    rows, longer = never_rows(60), 0
    decoder = engine(rule, batch_size=7)
    if not kernels:
        decoder.stepper.ops = decoder.stepper.ops.without("draft", "verify", "commit")
    for request, result in zip(rows, decoder.run(rows), strict=True):
        assert best_tokens([result])[0] == [text.tokens for text in plain_texts(request, rule)]
        default = replace(request, sampling=replace(request.sampling, early_stopping=False))
        longer += [text.tokens for text in plain_texts(default, rule)] != best_tokens([result])[0]
    assert longer > 3, "the two rules differ"


def test_a_beam_scored_at_its_present_length_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Mutants of the rule: the present length always, and the largest length in rows that do not ask for it."""
    rows = never_rows(100)

    def search() -> list[list[tuple[int, ...]]]:
        decoder = engine("search", batch_size=50)
        decoder.stepper.ops = decoder.stepper.ops.without("draft", "verify", "commit")
        return best_tokens(decoder.run(rows))

    expected = search()

    def in_all_rows(limits: Limits, scale: Tensor) -> Tensor:
        longest = finished._power(limits.max_new, limits.length_penalty).unsqueeze(1)
        return torch.where((limits.length_penalty > 0).unsqueeze(1), longest, scale)

    for mutant in (lambda limits, scale: scale, in_all_rows):
        monkeypatch.setattr(finished, "_best_scale", mutant)
        assert search() != expected


@pytest.mark.parametrize("penalty", [0.5, 1.0, 2.0, 0.0, -1.0])
@pytest.mark.parametrize("family", ["llama", "gpt2", "opt"])
def test_never_is_that_of_transformers(family: str, penalty: float) -> None:
    made, batch, eos = model(family), prompts(8, seed=3), list(range(2, 12))
    made.generation_config.eos_token_id, made.generation_config.pad_token_id = eos, 0
    decoder = Engine(
        forest(family),
        CausalForestModel(model(family, 0.02), family),
        NumberCodec(V, tuple(eos)),
        MethodConfig(rule="search", num_beams=3, depth=3),
    )
    sampling = SamplingConfig(max_new_tokens=14, n_best=3, length_penalty=penalty, early_stopping="never")
    best = best_tokens(decoder.run(Request(prompt_ids=tuple(ids), sampling=sampling) for ids in batch))
    for ids, texts in zip(batch, best, strict=True):
        out = made.generate(
            torch.tensor([ids]),
            num_beams=3,
            num_return_sequences=3,
            do_sample=False,
            max_new_tokens=14,
            length_penalty=penalty,
            early_stopping="never",
        )[:, len(ids) :].tolist()
        ends = [next((at + 1 for at, token in enumerate(row) if token in eos), len(row)) for row in out]
        assert texts == [tuple(row[:end]) for row, end in zip(out, ends, strict=True)]


def test_least_lengths_hold_back_a_rows_own_ends() -> None:
    rows = [
        replace(row, sampling=replace(row.sampling, stop=(), token_rules="min_new_tokens=3"))
        for row in mixed_rows(40, seed=9)
    ]
    passed = 0
    for request, result in zip(rows, engine(batch_size=6).run(rows), strict=True):
        ends = set(ends_of(request.sampling))
        assert facts(result) == facts(alone(request, "coupled"))
        for beam in result.hypotheses:
            assert not set(beam.token_ids[:3]) & ends
            passed += bool(set(beam.token_ids[:3]) & set(EOS))
    assert passed, "the checkpoint's ends are free for the other rows"


@pytest.mark.parametrize("include", [False, True])
@pytest.mark.parametrize("skip", [False, True])
def test_texts_show_what_they_are_asked_to_show(include: bool, skip: bool) -> None:
    shown = {"include_stop_str_in_output": include, "skip_special_tokens": skip}
    plain = mixed_rows(60, seed=11, token_logprobs=True)
    rows = [replace(row, sampling=replace(row.sampling, **shown)) for row in plain]
    codec, kinds = SpecialCodec(VOCABULARY, EOS), set[str]()
    pieces = codec.token_bytes(skip_special_tokens=skip)
    decoder = engine(batch_size=8)
    for request, result in zip(rows, decoder.run(rows), strict=True):
        ends, stops = ends_of(request.sampling), request.sampling.stop
        for beam in result.hypotheses:
            ids, text = beam.token_ids, b"".join(pieces[token] for token in beam.token_ids).decode()
            by_string = min((stop for stop in stops if stop in text), key=text.find, default=None)
            if beam.token_ids[-1] in ends:
                kinds.add("token")
                wanted = b"".join(pieces[token] for token in (ids if include else ids[:-1])).decode()
            elif by_string is not None:
                kinds.add("string")
                end = text.find(by_string) + len(by_string) * include
                wanted = text[:end]
            else:
                wanted = text
            assert beam.text == wanted
            assert beam.finish_reason == ("length" if beam.token_ids[-1] not in ends and by_string is None else "stop")
            assert beam.tokens is not None
            assert [token.text for token in beam.tokens] == [pieces[token] for token in ids]
    assert kinds == {"token", "string"}
    # what is streamed is the same text
    texts = defaultdict[str, str](str)
    for piece in decoder.stream(rows):
        texts[piece.request.id] += piece.text
    assert texts == {result.request.id: result.text for result in decoder.run(rows)}


def test_stop_strings_are_found_in_special_tokens_that_are_shown() -> None:
    def texts(**asked: Any) -> list[tuple[str, tuple[int, ...], str]]:
        sampling = SamplingConfig(max_new_tokens=12, n_best=3, ignore_eos=True, **asked)
        rows = [replace(row, sampling=sampling) for row in mixed_rows(40, seed=13)]
        hypotheses = [beam for result in engine(batch_size=10).run(rows) for beam in result.hypotheses]
        return [(beam.text, beam.token_ids, beam.finish_reason) for beam in hypotheses]

    hidden = texts(stop=("<note>",))
    assert hidden == texts(), "a token without text stops nothing"
    with_note = sum(7 in ids for _, ids, _ in hidden)
    assert with_note
    shown = texts(stop=("<note>",), skip_special_tokens=False)
    ended = [(text, ids) for text, ids, reason in shown if reason == "stop"]
    assert len(ended) >= with_note // 2
    assert all(
        ids.index(7) == len(ids) - 1 and "<" not in text.replace("<turn>", "") for text, ids in ended if 2 not in ids
    )
    assert all(7 not in ids for _, ids, reason in shown if reason == "length")


def test_a_tokenizers_special_tokens_are_shown() -> None:
    tokenizer = wrap(byte_level())
    codec = HFCodec(tokenizer, (tokenizer.eos_token_id,))
    end, text = tokenizer.eos_token, "over the lazy dog"
    ids = [*codec.encode_pieces([text])[0], tokenizer.eos_token_id]
    assert codec.decode(ids) in (text, f" {text}")
    assert codec.decode(ids, skip_special_tokens=False).endswith(f"dog{end}")
    shown = codec.token_bytes(skip_special_tokens=False)
    assert shown[tokenizer.eos_token_id] == end.encode()
    hidden = codec.token_bytes()
    assert hidden[tokenizer.eos_token_id] == b""
    assert sum(text != other for text, other in zip(shown, hidden, strict=True)) == len(set(tokenizer.all_special_ids))
    asked = SamplingConfig(stop=f"g{end}", skip_special_tokens=False)
    assert text_of(ids, asked, codec).lstrip() == "over the lazy do"
    kept = SamplingConfig(stop="lazy", include_stop_str_in_output=True)
    assert text_of(ids, kept, codec).lstrip() == "over the lazy"


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"stop_token_ids": (12,)}, "stop_token_ids holds token id 12, but the target has 12 ids"),
    ({"eos_token_id": (3, 99)}, "eos_token_id holds token id 99, but the target has 12 ids"),
]


@pytest.mark.parametrize(("asked", "message"), WRONG, ids=["stop", "eos"])
def test_tokens_that_the_target_lacks_fail_the_row(asked: dict[str, Any], message: str) -> None:
    good, bad = Request(prompt_ids=(1,)), Request(prompt_ids=(1,), sampling=SamplingConfig(**asked))
    first, second = engine().run([bad, good])
    assert isinstance(first.error, InvalidRowError)
    assert str(first.error) == message
    assert second.error is None


BOUND: list[tuple[dict[str, Any], str | None, str | None]] = [
    ({"ignore_eos": True}, "ignore_eos is true", "ignore_eos is true"),
    ({"eos_token_id": (4,)}, "eos_token_id is [4]", "eos_token_id is [4]"),
    ({"stop_token_ids": (4,)}, "stop_token_ids is [4]", None),
    ({"eos_token_id": (5, 2)}, None, None),
    ({"stop_token_ids": (5,)}, None, None),
]


@pytest.mark.parametrize(("asked", "allow", "grammar"), BOUND, ids=[str(asked) for asked, _, _ in BOUND])
def test_allowed_answers_and_grammars_say_where_an_answer_ends(
    asked: dict[str, Any], allow: str | None, grammar: str | None
) -> None:
    sampling = SamplingConfig(max_new_tokens=8, **asked)
    rows = [
        Request(prompt_ids=(1,), allow=("3 4 ", "1 "), sampling=sampling),
        Request(prompt_ids=(1,), grammar=Grammar.regex(r"(3 |4 ){1,4}"), sampling=sampling),
    ]
    for result, wanted, name in zip(engine().run(rows), (allow, grammar), ("allow", "grammar"), strict=True):
        message = None if wanted is None else f"{wanted}, but {name} says where an answer ends: drop it"
        assert (None if result.error is None else str(result.error)) == message


def test_a_token_that_ends_a_grammars_text_early_is_told() -> None:
    """A text without the rest that the grammar wants is not valid; a text that is whole without the token is."""
    sampling = SamplingConfig(max_new_tokens=8, stop_token_ids=(4,), n_best=3)
    seen = set[bool]()
    for pattern in (r"(3 ){1,2}(4 1 )", r"(3 ){1,2}(4 )?"):
        row = Request(prompt_ids=(1,), grammar=Grammar.regex(pattern), sampling=sampling)
        (result,) = engine().run([row])
        for beam in result.hypotheses:
            assert beam.valid == (beam.text in ("3 ", "3 3 ") and pattern.endswith("?"))
            seen.add(bool(beam.valid))
    assert seen == {True, False}


def test_ignore_eos_beside_an_end_token_is_refused() -> None:
    with pytest.raises(UsageError, match="ignore_eos is true, but eos_token_id says which tokens end a text"):
        SamplingConfig(ignore_eos=True, eos_token_id=(3,))
