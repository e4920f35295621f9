"""Encoder-decoder targets against transformers' own `generate(num_beams=W)`: every hypothesis and its score, with and
without a draft, alone and in batches of sources of different lengths.

Guards: a source read by another row, positions by slot, an end rule or a token rule that differs, a draft that changes
a text.
"""

from __future__ import annotations

from copy import deepcopy
from functools import cache
from typing import Any

import pytest
import torch

from dsbd_cli.config.method import MethodConfig
from dsbd_cli.config.sampling import SamplingConfig
from dsbd_cli.engine.decoding.engine import Engine
from dsbd_cli.engine.drafting.text import PromptTable
from dsbd_cli.engine.protocols import ForestInput
from dsbd_cli.models.transformers_backend import positions
from dsbd_cli.models.transformers_backend.causal import CausalForestModel
from dsbd_cli.models.transformers_backend.seq2seq import Seq2SeqForestModel
from dsbd_cli.requests import Request, RequestResult
from tests.engine.decoding.test_transformers import model as scaled
from tests.helpers.pairs import ENDINGS, TEXT, batch_beams, build_pair, pair_codec, perturbed
from tests.helpers.tiny import V
from tests.helpers.toys import NumberCodec

NEW = 12
ENDS = (2, 3, 4, 5)


@cache
def models(family: str) -> tuple[Any, Seq2SeqForestModel, Seq2SeqForestModel]:
    """The transformers model, and target and draft of it."""
    plain = build_pair(family, scale=3.0)
    target, draft = deepcopy(plain), perturbed(plain, 0.03)
    return plain, Seq2SeqForestModel(target, family), Seq2SeqForestModel(draft, family)


def encoder_inputs(count: int, seed: int = 3) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(6, V, (3 + 5 * (index % 4),), generator=generator).tolist() for index in range(count)]


def answers(
    engine: Engine, batch: list[list[int]], sampling: SamplingConfig | list[SamplingConfig]
) -> list[RequestResult]:
    each = sampling if isinstance(sampling, list) else [sampling] * len(batch)
    requests = (
        Request(id=str(index), seed=index, prompt_ids=tuple(ids), sampling=sampling)
        for index, (ids, sampling) in enumerate(zip(batch, each, strict=True))
    )
    results = list(engine.run(requests))
    for result in results:
        result.check()
    return results


def engine(family: str, method: MethodConfig, rows: int) -> Engine:
    _, target, draft = models(family)
    codec = pair_codec(target.module, ENDS)
    return Engine(target, draft if method.needs_draft else None, codec, method, batch_size=rows)


def check(results: list[RequestResult], want: list[list[tuple[list[int], float]]]) -> None:
    ids = [[list(beam.token_ids) for beam in result.hypotheses] for result in results]
    assert ids == [[tokens for tokens, _ in each] for each in want]
    for result, each in zip(results, want, strict=True):
        if len(each) > 1:
            assert [beam.score for beam in result.hypotheses] == pytest.approx([score for _, score in each], abs=2e-4)


PROMPTS = 12  # of four lengths and with six ENDINGS: every length occurs with every penalty
# Beams, drafted layers, rows of a batch. Every pair of two of these occurs, and each with all ENDINGS.
ENGINES = ((4, 0, 5), (4, 3, 5), (1, 3, 5), (1, 0, 1), (8, 0, 5), (8, 3, 1))
EVERYWHERE = ((4, 0, 5), (4, 3, 5))  # the others by turns, and in one family all of them
ALL = "t5"
MORE = ((1, 0, 5), (1, 3, 1), (8, 3, 5))  # there alone


def engines_of(index: int, family: str) -> list[tuple[int, int, int]]:
    others = [shape for shape in ENGINES if shape not in EVERYWHERE]
    return [*ENGINES, *MORE] if family == ALL else [*EVERYWHERE, others[index % len(others)]]


@cache
def wanted(family: str, width: int) -> list[Any]:
    """transformers' answers to the prompts, each with its ENDINGS; those of one setting share a batch."""
    batch, beams = encoder_inputs(PROMPTS), dict[int, Any]()
    for number, (penalty, early) in enumerate(ENDINGS if width > 1 else ENDINGS[:1]):
        which = [index for index in range(PROMPTS) if width == 1 or index % len(ENDINGS) == number]
        settings = {"length_penalty": penalty, "early_stopping": early} if width > 1 else {}
        each = batch_beams(models(family)[0], [batch[index] for index in which], width, list(ENDS), NEW, **settings)
        beams |= dict(zip(which, each, strict=True))
    return [beams[index] for index in range(PROMPTS)]


@pytest.mark.parametrize(
    ("family", "width", "depth", "rows"),
    [(family, *shape) for index, family in enumerate(TEXT) for shape in engines_of(index, family)],
)
def test_search_is_transformers_beam_search(family: str, width: int, depth: int, rows: int) -> None:
    """Every hypothesis and score of 12 prompts; one row at a time takes long, so that there each ending has one."""
    count = PROMPTS if rows > 1 else len(ENDINGS)
    method = MethodConfig(rule="search", num_beams=width, depth=depth, drafts_per_layer=2 * width)
    endings = [ENDINGS[index % len(ENDINGS)] for index in range(count)]
    asked = [
        SamplingConfig(max_new_tokens=NEW, length_penalty=penalty, early_stopping=early, n_best=width)
        for penalty, early in endings
    ]
    results = answers(engine(family, method, rows), encoder_inputs(PROMPTS)[:count], asked)
    check(results, wanted(family, width)[:count])
    assert (sum(result.stats.steps - result.stats.target_calls for result in results) > 0) == (depth > 0)


@pytest.mark.parametrize("family", TEXT)
def test_one_row_at_a_time_is_transformers_beam_search(family: str) -> None:
    method = MethodConfig(rule="search", depth=3, drafts_per_layer=8)
    asked = [SamplingConfig(max_new_tokens=NEW, length_penalty=p, early_stopping=e, n_best=4) for p, e in ENDINGS[:2]]
    check(answers(engine(family, method, 1), encoder_inputs(PROMPTS)[:2], asked), wanted(family, 4)[:2])


def test_an_answer_may_begin_with_padding_which_has_no_position(monkeypatch: pytest.MonkeyPatch) -> None:
    """M2M100's padding stands nowhere. Guards a position for it."""
    plain = build_pair("m2m100", scale=3.0, decoder_start_token_id=1)
    assert plain.config.pad_token_id == 1
    batch, method = encoder_inputs(2), MethodConfig(rule="search", depth=0)
    want = batch_beams(plain, batch, 4, list(ENDS), NEW)

    def search() -> list[RequestResult]:
        target = Seq2SeqForestModel(deepcopy(plain), "m2m100")
        made = Engine(target, None, pair_codec(target.module, ENDS), method, batch_size=2)
        return answers(made, batch, SamplingConfig(max_new_tokens=NEW, n_best=4))

    check(search(), want)
    monkeypatch.setattr(positions, "_padding", lambda *_: None)
    with pytest.raises(AssertionError):
        check(search(), want)


ALL_DRAFTERS = ("t5", "bart", "m2m100")  # one family of each kind of positions


@pytest.mark.parametrize("family", TEXT)
def test_coupled_text_does_not_depend_on_the_draft(family: str) -> None:
    batch, sampling = encoder_inputs(4, seed=8), SamplingConfig(max_new_tokens=NEW, n_best=4)

    def texts(method: MethodConfig, rows: int) -> list[Any]:
        return [
            [beam.token_ids for beam in result.hypotheses]
            for result in answers(engine(family, method, rows), batch, sampling)
        ]

    want = texts(MethodConfig(depth=0), 1)
    assert texts(MethodConfig(depth=3, drafts_per_layer=10), 3) == want
    if family in ALL_DRAFTERS:
        assert texts(MethodConfig(depth=4, drafts_per_layer=6, drafter="ngram"), 2) == want


# As in the checkpoints' generation_config, with numbers that fit the tiny vocabulary and length.
SETTINGS: dict[str, tuple[str, dict[str, Any]]] = {
    "bart-large-cnn": (
        "bart",
        {
            "min_length": 6,
            "no_repeat_ngram_size": 2,
            "forced_bos_token_id": 0,
            "forced_eos_token_id": 2,
            "length_penalty": 2.0,
            "early_stopping": True,
        },
    ),
    "nllb": ("m2m100", {"forced_bos_token_id": 90}),
    "marian": ("marian", {"bad_words_ids": [[40], [41, 42], [2]], "forced_eos_token_id": 2}),
    "whisper's lists": ("mbart", {"suppress_tokens": [7, 8, 9, 42], "begin_suppress_tokens": [20, 2, 3]}),
    "penalty": ("t5", {"repetition_penalty": 1.7, "min_new_tokens": 5}),
}


@pytest.mark.parametrize("name", SETTINGS)
def test_token_rules_of_the_checkpoint_are_transformers(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    family, settings = SETTINGS[name]
    plain, target, _ = models(family)
    batch = encoder_inputs(5, seed=11)
    want = batch_beams(plain, batch, 4, list(ENDS), NEW, **settings)
    search = {key: settings[key] for key in ("length_penalty", "early_stopping") if key in settings}
    rules = {key: value for key, value in settings.items() if key not in search}
    for key, value in rules.items():
        monkeypatch.setattr(target.module.generation_config, key, value)
    sampling = SamplingConfig(max_new_tokens=NEW, n_best=4, **search)
    check(answers(engine(family, MethodConfig(rule="search", depth=0), 3), batch, sampling), want)
    drafted = engine(family, MethodConfig(rule="search", depth=3, drafts_per_layer=8), 3)
    results = answers(drafted, batch, sampling)
    check(results, want)
    # transformers leaves out an end token alone
    shown = {**rules, "bad_words_ids": [[40], [41, 42]]} if name == "marian" else rules
    assert shown.items() <= dict(results[0].token_rules).items()
    off = SamplingConfig(max_new_tokens=NEW, n_best=4, token_rules="none", **search)
    assert [result.text for result in answers(drafted, batch, off)] != [result.text for result in results]
    # the rules depend on the path alone, so a sampled text does not depend on the draft under them either
    texts = [
        [result.text for result in answers(engine(family, method, rows), batch, sampling)]
        for method, rows in ((MethodConfig(depth=0), 1), (MethodConfig(depth=3, drafts_per_layer=10), 3))
    ]
    assert texts[0] == texts[1]


def test_token_rules_of_a_decoder_only_target(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards rules that look back into the prompt, and that act unasked where they did not before."""
    made = scaled("llama")
    monkeypatch.setattr(made.generation_config, "repetition_penalty", 1.4)
    target, draft = CausalForestModel(made, "llama"), CausalForestModel(scaled("llama", 0.02), "llama")
    batch = [ids * 2 for ids in encoder_inputs(4)]
    asked = {"repetition_penalty": 1.4, "no_repeat_ngram_size": 3, "min_new_tokens": 4}
    engines = [
        Engine(target, None, NumberCodec(V, ENDS), MethodConfig(rule="search", depth=0), batch_size=3),
        Engine(target, draft, NumberCodec(V, ENDS), MethodConfig(rule="search", depth=3), batch_size=2),
    ]
    plain = scaled("llama")
    plain.generation_config.eos_token_id, plain.generation_config.pad_token_id = list(ENDS), 0
    for settings, text in (
        ({"repetition_penalty": 1.0}, None),
        (asked, "checkpoint,no_repeat_ngram_size=3,min_new_tokens=4"),
    ):
        want = [
            plain.generate(torch.tensor([ids]), num_beams=4, do_sample=False, max_new_tokens=NEW, **settings)
            for ids in batch
        ]
        sampling = SamplingConfig(max_new_tokens=NEW, token_rules=text)
        for decoder in engines:
            token_ids = [list(result.hypotheses[0].token_ids) for result in answers(decoder, batch, sampling)]
            rows = [out[0, len(ids) :].tolist() for out, ids in zip(want, batch, strict=True)]
            assert [row[: len(own)] for row, own in zip(rows, token_ids, strict=True)] == token_ids


def test_a_prefix_begins_the_answer() -> None:
    """As transformers with decoder_input_ids; the text holds the prefix, the count of tokens does not."""
    plain = models("m2m100")[0]
    batch = encoder_inputs(3, seed=5)
    plain.generation_config.eos_token_id = list(ENDS)
    start = plain.generation_config.decoder_start_token_id
    sampling = SamplingConfig(max_new_tokens=NEW, prefix="50 60", target_lang=None)
    results = answers(engine("m2m100", MethodConfig(rule="search", depth=0), 2), batch, sampling)
    for ids, result in zip(batch, results, strict=True):
        out = plain.generate(
            torch.tensor([ids]),
            decoder_input_ids=torch.tensor([[start, 50, 60]]),
            num_beams=4,
            do_sample=False,
            max_new_tokens=NEW,
        )
        own = list(result.hypotheses[0].token_ids)
        assert out[0, 3 : 3 + len(own)].tolist() == own
        assert result.text.startswith("50 60 ")
        assert result.hypotheses[0].num_tokens == len(own)
        assert (result.source_tokens, result.prompt_tokens) == (len(ids), len(ids) + 3)


@pytest.mark.parametrize("error", [None, torch.OutOfMemoryError()])
def test_a_row_that_fails_counts_its_source(error: Exception | None) -> None:
    """Guards records of failed rows whose counts are of other tokens than those of good rows."""

    class Broken(Seq2SeqForestModel):
        def forward(self, batch: ForestInput, *, logits: bool = True) -> torch.Tensor | None:
            if error is not None:
                raise error
            output = super().forward(batch, logits=logits)
            return output if output is None else torch.full_like(output, torch.nan)

    target = Broken(models("bart")[1].module, "bart")
    codec = pair_codec(target.module, ENDS)
    decoder = Engine(
        *(target, None, codec, MethodConfig(rule="search", depth=0)), batch_size=1, on_too_long="truncate-left"
    )
    rules = "no_repeat_ngram_size=3"
    sampling = SamplingConfig(max_new_tokens=4, token_rules=rules)
    (result,) = decoder.run([Request(prompt_ids=tuple(range(6, 80)), sampling=sampling)])
    assert result.error is not None
    assert (result.source_tokens, result.prompt_tokens, result.truncated_tokens) == (64, 65, 10)
    assert result.token_rules["no_repeat_ngram_size"] == 3


def failure(request: Request, **settings: Any) -> str:
    _, target, _ = models("bart")
    decoder = Engine(
        target, None, pair_codec(target.module, ENDS), MethodConfig(rule="search", depth=0), batch_size=1, **settings
    )
    (result,) = decoder.run([request])
    assert result.error is not None
    return str(result.error)


def test_lengths_are_checked_apart() -> None:
    long = Request(prompt_ids=tuple(range(6, 80)), sampling=SamplingConfig(max_new_tokens=4))
    assert failure(long) == "the source has 74 tokens, but the target's encoder takes 64"
    answer = Request(prompt_ids=(6, 7), sampling=SamplingConfig(max_new_tokens=64))
    assert "max_new_tokens 64 make 65, but the target's decoder has 64 positions" in failure(answer)
    _, target, _ = models("bart")
    codec = pair_codec(target.module, ENDS)
    method = MethodConfig(rule="search", depth=0)
    short = Engine(target, None, codec, method, batch_size=1, on_too_long="truncate-left")
    (result,) = short.run([long])
    assert (result.truncated_tokens, result.source_tokens) == (10, 64)


@pytest.mark.parametrize(
    ("request_", "told"),
    [
        (Request(prompt_ids=(6, V)), "prompt holds token id 97, but the target's encoder has 97 ids"),
        (Request(prompt_ids=(6, 10**30)), f"prompt holds token id {10**30}, but the target's encoder has 97 ids"),
        (Request(audio="x.wav"), "the target reads text"),
        (Request("6", sampling=SamplingConfig(source_lang="de")), "source_lang is 'de'"),
        (Request("6", sampling=SamplingConfig(target_lang="de")), "target_lang is 'de'"),
        (
            Request("6", sampling=SamplingConfig(max_new_tokens=9, token_rules="suppress_tokens=97")),
            "suppress_tokens has token id 97",
        ),
    ],
)
def test_rows_that_cannot_be_answered_say_why(request_: Request, told: str) -> None:
    assert told in failure(request_)


def test_a_source_is_checked_against_every_encoder() -> None:
    """Guards a token that only the target's encoder knows: the draft's embedding would be read beside its end."""

    class Narrow(Seq2SeqForestModel):
        encoder_vocab_size = property(lambda self: 50)  # type: ignore[assignment]

    _, target, draft = models("bart")
    codec = pair_codec(target.module, ENDS)
    narrow = Narrow(draft.module, "draft")
    decoder = Engine(target, narrow, codec, MethodConfig(rule="search", depth=2), batch_size=1)
    right, wrong = decoder.run(
        [Request(prompt_ids=(6, ids), sampling=SamplingConfig(max_new_tokens=2)) for ids in (49, 50)]
    )
    assert right.error is None
    assert str(wrong.error) == "prompt holds token id 50, but the draft's encoder has 50 ids"


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"source_lang": "de"}, "source_lang is 'de', but the target has no encoder"),
        ({"token_rules": "forced_bos_token_id=3"}, "forced_bos_token_id is 3, but the target has no encoder"),
    ],
)
def test_a_decoder_only_target_refuses_what_has_no_use(settings: dict[str, Any], told: str) -> None:
    target = CausalForestModel(scaled("llama"), "llama")
    plain = Engine(target, None, NumberCodec(V, ENDS), MethodConfig(rule="search", depth=0), batch_size=1)
    (result,) = plain.run([Request(prompt_ids=(6, 7), sampling=SamplingConfig(max_new_tokens=4, **settings))])
    assert told in str(result.error)


def test_sources_are_stored_once_whatever_the_width() -> None:
    """Guards repeated keys and values of the source, which is what wide beams cost elsewhere."""
    sizes = []
    for width in (1, 16):
        decoder = engine("t5", MethodConfig(rule="search", num_beams=width, depth=0), 2)
        answers(decoder, encoder_inputs(4), SamplingConfig(max_new_tokens=3))
        target = models("t5")[1]
        sizes.append(sum(stored.nbytes for layer in target._cross._own for stored in layer.stored))
        target.release()
    assert sizes[0] == sizes[1] > 0


def test_a_shared_encoder_gives_the_same_texts() -> None:
    """Guards a draft that is given sources while nobody drafts with it, and rows that are refilled."""
    plain = build_pair("bart", scale=3.0)
    copy = perturbed(plain, 0.03)
    copy.get_encoder().load_state_dict(plain.get_encoder().state_dict())
    target, draft = Seq2SeqForestModel(plain, "bart"), Seq2SeqForestModel(copy, "bart")
    target.share_encoder(draft)
    codec, batch = pair_codec(plain, ENDS), encoder_inputs(7)
    sampling = SamplingConfig(max_new_tokens=NEW, n_best=4)

    def texts(method: MethodConfig, rows: int) -> list[Any]:
        decoder = Engine(target, draft if method.needs_draft else None, codec, method, batch_size=rows)
        results = answers(decoder, batch, sampling)
        return [[beam.token_ids for beam in result.hypotheses] for result in results]

    want = texts(MethodConfig(rule="search", depth=0), 2)
    assert texts(MethodConfig(rule="search", depth=3, drafts_per_layer=8), 3) == want
    assert texts(MethodConfig(rule="search", depth=0), 7) == want


def test_streamed_pieces_join_to_the_text_with_its_prefix() -> None:
    decoder = engine("m2m100", MethodConfig(rule="search", num_beams=1, depth=2, drafts_per_layer=4), 2)
    sampling = SamplingConfig(max_new_tokens=NEW, prefix="50 60")
    joined: dict[str, str] = {}
    whole: dict[str, str] = {}
    for piece in decoder.stream([Request(prompt_ids=tuple(ids), sampling=sampling) for ids in encoder_inputs(3)]):
        joined[piece.request.id] = joined.get(piece.request.id, "") + piece.text
        if piece.result is not None:
            whole[piece.request.id] = piece.result.text
    assert joined == whole
    assert all(text.startswith("50 60 ") for text in whole.values())


def test_lookups_read_the_source(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards drafts by ngram that know the answer alone."""
    kept: list[list[int]] = []
    put = PromptTable.put
    monkeypatch.setattr(
        PromptTable, "put", lambda self, row, prompt: (kept.append(list(prompt)), put(self, row, prompt))[1]
    )
    decoder = engine("t5", MethodConfig(rule="search", depth=2, drafter="ngram"), 1)
    answers(decoder, [[6, 7, 8]], SamplingConfig(max_new_tokens=4))
    assert kept[-1] == [0, 6, 7, 8, 0]


def test_a_catalogue_and_a_forced_beginning_are_refused_together() -> None:
    request = Request(
        prompt_ids=(6, 7),
        allow=("8 9",),
        sampling=SamplingConfig(max_new_tokens=8, token_rules="forced_bos_token_id=9"),
    )
    assert "allow says how an answer begins, but so does token_rules" in failure(request)
    target = models("bart")[1]
    free = Engine(target, None, pair_codec(target.module, ENDS), MethodConfig(rule="search", depth=0), batch_size=1)
    (result,) = free.run(
        [Request(prompt_ids=(6, 7), allow=("8 9", "8 10 11"), sampling=SamplingConfig(max_new_tokens=8))]
    )
    result.check()
    assert list(result.hypotheses[0].token_ids)[:-1] in ([8, 9], [8, 10, 11])
