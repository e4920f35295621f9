"""From requests to token ids: prefixes of decoder-only targets, special tokens and truncation, with real tokenizers."""

from __future__ import annotations

from functools import cache
from types import SimpleNamespace
from typing import Any

import pytest
from tokenizers import processors

from dsbd_cli.config.chat import ChatConfig
from dsbd_cli.config.grammars import Grammar
from dsbd_cli.config.method import MethodConfig
from dsbd_cli.config.model import OnTooLong
from dsbd_cli.config.sampling import SamplingConfig
from dsbd_cli.engine.constraints.answers import MOST_LETTERS
from dsbd_cli.engine.decoding.encode import COUNTED, Encoder
from dsbd_cli.engine.decoding.engine import Engine
from dsbd_cli.engine.decoding.results import text_of
from dsbd_cli.errors import InvalidRowError, PromptTooLongError
from dsbd_cli.models.tokenizer import HFCodec
from dsbd_cli.models.transformers_backend.causal import CausalForestModel
from dsbd_cli.models.transformers_backend.encoder_inputs import Seq2SeqCodec
from dsbd_cli.models.transformers_backend.seq2seq import Seq2SeqForestModel
from dsbd_cli.requests import Request, RequestResult
from tests.helpers.checkpoints import CHAT, KINDS, TEXTS, numbers, wrap
from tests.helpers.pairs import build_pair
from tests.helpers.tiny import build

WIDTH = 480  # ids of the model; the tokenizers have fewer
SEARCH = MethodConfig(rule="search", num_beams=3, depth=0)
USER = {"role": "user", "content": "The quick brown"}


def tokenizer_of(kind: str, *, bos: bool = False) -> Any:
    made: Any = wrap(KINDS[kind](), chat_template=CHAT)
    if bos:
        made._tokenizer.post_processor = processors.TemplateProcessing(
            "<s> $A", special_tokens=[("<s>", made.bos_token_id)]
        )
    return made


@cache
def engine_of(kind: str) -> Engine:
    tokenizer = tokenizer_of(kind)
    model = CausalForestModel(build("llama", vocab_size=WIDTH), "llama")
    return Engine(model, None, HFCodec(tokenizer, (tokenizer.eos_token_id,)), SEARCH, batch_size=2)


def answered(kind: str, request: Request) -> RequestResult:
    [result] = engine_of(kind).run([request])
    assert result.error is None
    return result


def sampling(**more: Any) -> SamplingConfig:
    return SamplingConfig(**{"max_new_tokens": 6, "n_best": 3, **more})


# at a space, inside of a word, inside of a run of bytes, before a line end
PREFIXES = [(" brown fox", "The quick"), ("ick brown", "The qu"), ("ße aus 東京 🙂", "Schöne Grü"), ("\n", "a b")]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("prefix", "prompt"), PREFIXES)
def test_an_answer_continues_its_prefix(kind: str, prefix: str, prompt: str) -> None:
    """Tokens, log-probabilities and scores are those of the prompt with the prefix behind it, the prefix is a part of
    the text alone, and the rest of the text is what the tokens add to it."""
    got = answered(kind, Request(prompt, sampling=sampling(prefix=prefix)))
    want = answered(kind, Request(prompt + prefix, sampling=sampling()))
    codec = engine_of(kind).codec
    assert got.prompt_tokens == want.prompt_tokens
    whole = codec.encode(prompt + prefix)
    for mine, other in zip(got.hypotheses, want.hypotheses, strict=True):
        assert (mine.token_ids, mine.logprob, mine.score) == (other.token_ids, other.logprob, other.score)
        ids = [token for token in mine.token_ids if token not in codec.eos_ids]
        added = codec.decode([*whole, *ids])[len(codec.decode(whole)) :]
        if codec.decode([*whole, *ids]).startswith(codec.decode(whole)):
            assert mine.text == prefix + added
        else:  # bytes that are no text, and take the character before them with them
            assert mine.text == prefix + codec.decode(ids)


@pytest.mark.parametrize("kind", KINDS)
def test_a_chat_continues_its_prefix_as_a_last_message(kind: str) -> None:
    """The prefix stands where continue_final_message puts the beginning of an answer, and is then in the text, too."""
    chat = engine_of(kind).codec.render_chat([USER], ChatConfig())
    begun = answered(kind, Request(messages=[USER], sampling=sampling(prefix="fox ju")))
    plain = answered(kind, Request(f"{chat}fox ju", sampling=sampling(add_special_tokens=False)))
    assert [beam.token_ids for beam in begun.hypotheses] == [beam.token_ids for beam in plain.hypotheses]
    assert all(beam.text.startswith("fox ju") for beam in begun.hypotheses)
    assert begun.prompt_tokens == plain.prompt_tokens


@pytest.mark.parametrize("kind", KINDS)
def test_a_prefix_stands_behind_ids_as_ids(kind: str) -> None:
    codec = engine_of(kind).codec
    ids = codec.encode("The quick")
    [prefix] = codec.encode_pieces([" brown"])
    got = answered(kind, Request(prompt_ids=ids, sampling=sampling(prefix=" brown")))
    want = answered(kind, Request(prompt_ids=[*ids, *prefix], sampling=sampling()))
    assert [beam.token_ids for beam in got.hypotheses] == [beam.token_ids for beam in want.hypotheses]
    assert all(beam.text.startswith(" brown") for beam in got.hypotheses)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("prefix", "prompt"), PREFIXES)
def test_streamed_pieces_join_to_the_text_with_its_prefix(kind: str, prefix: str, prompt: str) -> None:
    request = Request(prompt, sampling=sampling(prefix=prefix, n_best=1, stop=("zz",)))
    pieces = list(engine_of(kind).stream([request]))
    assert pieces[-1].result is not None
    assert "".join(piece.text for piece in pieces) == pieces[-1].result.text
    assert pieces[-1].result.text.startswith(prefix)


def test_a_stop_string_is_looked_for_behind_the_prefix() -> None:
    free = answered("byte-level", Request("The", sampling=sampling(prefix=" quick", n_best=1)))
    added = free.text.removeprefix(" quick")
    assert len(added) > 2
    stopped = answered("byte-level", Request("The", sampling=sampling(prefix=" quick", n_best=1, stop=(added[1:3],))))
    assert stopped.text == " quick" + added[: added.index(added[1:3])]
    kept = answered("byte-level", Request("The", sampling=sampling(prefix=" quick", n_best=1, stop=("quick",))))
    assert kept.text == free.text


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"prefix": "a" * (MOST_LETTERS + 1)}, f"prefix has {MOST_LETTERS + 1} letters, but it may have"),
        ({"prefix": "\ud800"}, "prefix is .*, which is no valid text"),
        (
            {"truncate_prompt_tokens": 1},
            "truncate_prompt_tokens is 1, but the tokenizer begins every text with as many",
        ),
    ],
)
def test_rows_that_cannot_be_answered_say_why(settings: dict[str, Any], said: str) -> None:
    with pytest.raises(InvalidRowError, match=said):
        encoder("byte-level", bos=True).job(
            0, Request("The quick", id="a", seed=1, sampling=SamplingConfig(**settings))
        )


# Special tokens and truncation


def test_a_stop_string_may_begin_with_a_blank_that_a_decoder_drops() -> None:
    """Guards a blank of the stop string that stays behind the prefix, as with decoders of sentencepiece."""
    words = ["a", " ", "c"]
    codec: Any = SimpleNamespace(
        decode=lambda ids: "".join(words[token] for token in ids).removeprefix(" "),
        token_bytes=lambda: [word.encode() for word in words],
    )
    assert text_of([1, 2], SamplingConfig(prefix="a", stop=" c"), codec, [0]) == "a"
    assert text_of([1, 2], SamplingConfig(prefix="a", stop="c"), codec, [0]) == "a "
    assert text_of([2, 1, 2], SamplingConfig(prefix="a", stop=" c"), codec, [0]) == "ac"


@pytest.mark.parametrize("bound", [{"grammar": Grammar.regex("fox b+")}, {"allow": ("ab",)}], ids=["grammar", "allow"])
def test_a_prefix_does_not_go_with_what_says_the_whole_answer(bound: dict[str, Any]) -> None:
    """Guards a text that is told as valid although its prefix is no part of what the grammar saw."""
    [name] = bound
    [result] = engine_of("byte-level").run([Request("The", sampling=sampling(prefix="fox", n_best=1), **bound)])
    assert str(result.error) == f"prefix is 'fox', but {name} says how the whole answer reads: drop one of them"


def encoder(kind: str, *, bos: bool, positions: int | None = None, on_too_long: OnTooLong = "error") -> Encoder:
    """An encoder without models."""
    target: Any = SimpleNamespace(vocab_size=WIDTH, max_positions=positions)
    made = Encoder.alone(target, HFCodec(tokenizer_of(kind, bos=bos), ()), MethodConfig(depth=0, num_beams=1))
    made.on_too_long = on_too_long
    return made


def encoded(made: Encoder, text: str | None = None, **more: Any) -> tuple[list[int], int]:
    source = {name: more.pop(name) for name in ("messages", "prompt_ids") if name in more}
    asked = SamplingConfig(**{"max_new_tokens": 4, **more})
    return made.encode(Request(text, **source, id="a", seed=1, sampling=asked))


@pytest.mark.parametrize("kind", KINDS)
def test_special_tokens_are_added_unless_the_row_says_otherwise(kind: str) -> None:
    made, tokenizer = encoder(kind, bos=True), tokenizer_of(kind, bos=True)
    for text in (TEXTS[0], f"<s>{TEXTS[0]}"):
        plain = tokenizer(text, add_special_tokens=False)["input_ids"]
        assert encoded(made, text, add_special_tokens=False) == (plain, 0)
        assert encoded(made, text)[0].count(tokenizer.bos_token_id) == 1
    assert encoded(made, prompt_ids=(0, 0, 5)) == ([0, 0, 5], 0), "ids are taken as they are"


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("bos", [False, True])
def test_the_last_tokens_of_a_prompt_are_kept(kind: str, bos: bool) -> None:
    """Behind the token that begins every text; what is dropped is counted."""
    made = encoder(kind, bos=bos)
    whole = encoded(made, TEXTS[0])[0]
    for kept in (2, 5, len(whole) - 1):
        ids, dropped = encoded(made, TEXTS[0], truncate_prompt_tokens=kept)
        assert ids == [*whole[:bos], *whole[len(whole) - kept + bos :]]
        assert (len(ids), dropped) == (kept, len(whole) - kept)
    for more in (len(whole), 10**6, -1):
        assert encoded(made, TEXTS[0], truncate_prompt_tokens=more) == (whole, 0)
    text_ids = tuple(whole[bos:])
    assert encoded(made, prompt_ids=text_ids, truncate_prompt_tokens=2) == ([*text_ids[-2:]], len(text_ids) - 2)


@pytest.mark.parametrize("kind", KINDS)
def test_chats_are_truncated_as_texts_are(kind: str) -> None:
    made, messages = encoder(kind, bos=True), [{"role": "user", "content": TEXTS[0]}]
    whole = encoded(made, messages=messages)[0]
    assert encoded(made, messages=messages, truncate_prompt_tokens=7) == ([*whole[:1], *whole[-6:]], len(whole) - 7)


def test_as_many_tokens_as_fit_are_kept() -> None:
    """-1 is truncate-left for one row, and a number counts before the positions do."""
    made = encoder("byte-level", bos=True, positions=12)
    whole = encoded(encoder("byte-level", bos=True), TEXTS[0])[0]
    assert len(whole) > 8
    cut = [*whole[:1], *whole[-7:]], len(whole) - 8
    assert encoded(made, TEXTS[0], truncate_prompt_tokens=-1) == cut
    assert encoded(made, TEXTS[0], truncate_prompt_tokens=8) == cut
    with pytest.raises(PromptTooLongError, match="prompt has 9 tokens and max_new_tokens is 4, but"):
        encoded(made, TEXTS[0], truncate_prompt_tokens=9)
    made.on_too_long = "truncate-left"
    assert encoded(made, TEXTS[0], truncate_prompt_tokens=9) == cut


@pytest.mark.parametrize("form", ["prompt", "messages"])
@pytest.mark.parametrize("truncate", [-1, 6])
def test_of_a_long_text_only_the_end_is_tokenized(form: str, truncate: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards the seconds that megabytes of text take, and the token that begins every text."""
    text = "x" * 300_000 + TEXTS[0]
    made = encoder("byte-level", bos=True, positions=12)
    request: dict[str, Any] = {"text": text} if form == "prompt" else {"messages": [{**USER, "content": text}]}
    end = TEXTS[0] if form == "prompt" else f"{TEXTS[0]}</s>assistant:"
    [plain] = made.codec.encode_pieces([end])
    longest, call = [], HFCodec._encoded

    def counting(codec: HFCodec, asked: Any, **more: bool) -> Any:
        longest.append(max(map(len, [asked] if isinstance(asked, str) else asked)))
        return call(codec, asked, **more)

    monkeypatch.setattr(HFCodec, "_encoded", counting)
    kept = 8 if truncate == -1 else truncate
    ids, dropped = encoded(made, **request, truncate_prompt_tokens=truncate)
    assert ids == [made.codec.encode("")[0], *plain[1 - kept :]]
    assert max(longest) == COUNTED
    assert dropped > 1000


# Sources of encoder-decoder targets


@cache
def sources() -> Engine:
    """A BART whose tokenizer reads a word per id, between <s> and </s>."""
    model, tokenizer = build_pair("bart"), numbers()
    tokenizer.chat_template = CHAT
    special = [("<s>", tokenizer.bos_token_id), ("</s>", tokenizer.eos_token_id)]
    tokenizer._tokenizer.post_processor = processors.TemplateProcessing("<s> $A </s>", special_tokens=special)
    codec = Seq2SeqCodec(tokenizer, (2,), model.generation_config.decoder_start_token_id, model)
    return Engine(Seq2SeqForestModel(model, "bart"), None, codec, SEARCH, batch_size=1)


def source_of(text: str | None = None, *, on_too_long: OnTooLong = "error", **more: Any) -> tuple[list[int], int]:
    """The ids that the encoder reads, and how many were dropped."""
    fields = {name: more.pop(name) for name in ("messages", "prompt_ids", "image") if name in more}
    made = sources()._encoder
    made.on_too_long = on_too_long
    asked = SamplingConfig(**{"max_new_tokens": 4, **more})
    job = made.job(0, Request(text, **fields, id="a", seed=1, sampling=asked))
    assert job.encoder_input is not None
    return job.encoder_input.tolist(), job.truncated


def test_sources_have_special_tokens_unless_the_row_says_otherwise() -> None:
    assert source_of("w5 w6") == ([1, 5, 6, 2], 0)
    assert source_of("<s> w5 w6") == ([1, 5, 6, 2], 0), "and one <s> at most"
    assert source_of("w5 w6", add_special_tokens=False) == ([5, 6], 0)
    messages = [{"role": "user", "content": " w5 w6 "}]
    ids = sources().codec.encode_pieces([sources().codec.render_chat(messages, ChatConfig())])[0]
    assert source_of(messages=messages) == (ids, 0)


def test_sources_are_truncated() -> None:
    """Behind the token that begins every source; -1 keeps what the encoder takes."""
    words = " ".join(f"w{number}" for number in range(5, 90))
    assert source_of("w5 w6 w7 w8", truncate_prompt_tokens=4) == ([1, 7, 8, 2], 2)
    assert source_of(prompt_ids=(5, 6, 7, 8), truncate_prompt_tokens=3) == ([6, 7, 8], 1)
    whole = [1, *range(5, 90), 2]
    cut = [1, *whole[-63:]], len(whole) - 64
    assert source_of(words, truncate_prompt_tokens=-1) == cut == source_of(words, on_too_long="truncate-left")
    with pytest.raises(InvalidRowError, match="begins every text with as many tokens: raise it"):
        source_of("w5 w6 w7 w8", truncate_prompt_tokens=1)
    with pytest.raises(PromptTooLongError, match="the source has 70 tokens, but the target's encoder takes 64"):
        source_of(words, truncate_prompt_tokens=70)
