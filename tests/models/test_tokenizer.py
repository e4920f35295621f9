"""Text, chats and the bytes behind tokens, on small tokenizers of each kind."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import ByT5Tokenizer, PreTrainedTokenizerFast

from dsbd_cli.config.sampling import SamplingConfig
from dsbd_cli.engine.decoding.results import text_of
from dsbd_cli.errors import InvalidRowError
from dsbd_cli.models.stored_tokenizer import StoredTokenizer, store, stored
from dsbd_cli.models.tokenizer import HFCodec, byte_alphabet
from tests.helpers.checkpoints import CHAT, KINDS, TEXTS, byte_level, numbers, wrap


@pytest.fixture(scope="module", params=KINDS)
def tokenizer(request: pytest.FixtureRequest) -> Any:
    made = wrap(KINDS[request.param](), chat_template=CHAT)
    made.add_tokens(["<extra word>"])
    return made


def test_bytes_join_to_the_text(tokenizer: Any) -> None:
    """Guards stop strings and streaming, which go by bytes: joined bytes of ids are their text up to a leading space.

    For real texts and random ids, special and added tokens included. Runs of byte tokens that are no text are left out:
    how many marks stand for one is the decoder's taste."""
    codec = HFCodec(tokenizer, (2,))
    table = codec.token_bytes()
    rng = random.Random(0)
    samples = [codec.encode(text) for text in [*TEXTS, "wholly unseen: Ωµ漢字 <extra word>!"]]
    ascii_ids = [i for i, piece in enumerate(table) if piece.isascii()]
    samples += [rng.choices(ascii_ids, k=30) for _ in range(200)]
    for ids in samples:
        joined = b"".join(table[i] for i in ids).decode()
        assert codec.decode(ids) in (joined, joined.removeprefix(" "))


class PanicException(BaseException):
    """As the library tokenizers raises it for a regular expression that takes too long."""


@pytest.mark.parametrize("error", [PanicException("Onig: Regex search error"), TypeError("no\nway")])
def test_a_text_on_which_the_tokenizer_fails_fails_alone(error: BaseException) -> None:
    """Guards the other rows of a run."""

    def failing(text: str, **_: Any) -> Any:
        raise error

    codec = HFCodec(failing, (2,))  # type: ignore[arg-type]
    with pytest.raises(InvalidRowError, match=r"the tokenizer fails on this text: (Onig: Regex search error|no way)$"):
        codec.encode("a")
    with pytest.raises(InvalidRowError, match=r"the tokenizer fails on this text: (Onig: Regex search error|no way)$"):
        codec.encode_pieces(["a", "b"])

    def stopped(text: str, **_: Any) -> Any:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        HFCodec(stopped, (2,)).encode("a")  # type: ignore[arg-type]


def test_texts_end_before_the_stop_string_their_bytes_complete(tokenizer: Any) -> None:
    """Stop strings cut from the bytes of real texts, many of which begin with the space that the decoder drops."""
    codec = HFCodec(tokenizer, (2,))
    table, rng, spaced = codec.token_bytes(), random.Random(1), 0
    for text in TEXTS * 30:
        ids = codec.encode(text)
        whole = b"".join(table[i] for i in ids).decode()
        start = rng.choice([0, rng.randrange(len(whole))])
        stop = whole[start : start + rng.randint(1, 6)]
        ended = next(n for n in range(1, len(ids) + 1) if stop.encode() in b"".join(table[i] for i in ids[:n]))
        kept = whole[: whole.index(stop)]
        answer = text_of(ids[:ended], SamplingConfig(stop=(stop, "never there")), codec)
        assert answer in (kept, kept.removeprefix(" "))
        assert answer == codec.decode(ids[:ended])[: len(answer)]
        spaced += stop.startswith(" ") and start == 0
        assert text_of(ids[: ended - 1], SamplingConfig(stop=(stop,)), codec) == codec.decode(ids[: ended - 1])
    assert spaced > 10 or not whole.startswith(" ")


def test_byt5() -> None:
    """Its token for byte 0xE6 is the character æ, which is two other bytes."""
    codec = HFCodec(ByT5Tokenizer(), (1,))
    table, text = codec.token_bytes(), "東京 naïve"
    assert [table[index] for index in codec.encode_pieces([text])[0]] == [bytes([byte]) for byte in text.encode()]
    assert table[:3] == [b""] * 3


def test_a_decoder_that_puts_spaces_between_tokens() -> None:
    """What is cut off does not stand in such a text; the tokens before the stop string do."""
    codec = HFCodec(numbers(), ())
    assert codec.decode([5, 6, 17]) == "w5 w6 w17"
    assert text_of([5, 6, 17], SamplingConfig(stop=("7",)), codec) == "w5 w6 w1"
    assert text_of([5, 6, 17], SamplingConfig(stop=("6w",)), codec) == "w5w"


def test_special_and_added_tokens(tokenizer: Any) -> None:
    """Guards markers that leak into texts, and added words that vanish from them."""
    table = HFCodec(tokenizer, ()).token_bytes()
    assert table[tokenizer.convert_tokens_to_ids("</s>")] == b""
    assert table[tokenizer.convert_tokens_to_ids("<extra word>")].strip() == b"<extra word>"
    assert len(table) == len(tokenizer)


def test_every_byte_has_a_character() -> None:
    """Guards the table of the byte alphabet: GPT-2's known entries, one character per byte."""
    table = byte_alphabet()
    assert sorted(table.values()) == list(range(256))
    assert (table["Ġ"], table["Ċ"], table["ĉ"], table["A"], table["Ń"]) == (32, 10, 9, 65, 173)


def test_no_clean_up() -> None:
    """Guards texts against the clean-up that joins " ." and " n't" (old default of some checkpoints)."""
    codec = HFCodec(wrap(KINDS["byte-level"](), clean_up_tokenization_spaces=True), ())
    text = "do n't , x ."
    assert codec.decode(codec.encode(text)) == text


def test_chat(tokenizer: Any) -> None:
    """Guards chat prompts: the template's special tokens are single ids and stand once, the answer is opened."""
    codec = HFCodec(tokenizer, ())
    ids = codec.encode_chat([{"role": "user", "content": "hi"}])
    assert ids.count(tokenizer.bos_token_id) == 1
    assert tokenizer.decode(ids, skip_special_tokens=True).rstrip().endswith("assistant:")


def test_chat_refusals(tokenizer: Any) -> None:
    """Guards the other rows of a file: a refused conversation is an error of its row, in one line."""
    with pytest.raises(InvalidRowError, match="no such role"):
        HFCodec(tokenizer, ()).encode_chat([{"role": "system", "content": "x"}])
    with pytest.raises(InvalidRowError, match="no chat template"):
        HFCodec(wrap(KINDS["byte-level"]()), ()).encode_chat([{"role": "user", "content": "x"}])


@pytest.mark.parametrize("kind", KINDS)
def test_a_text_has_as_many_tokens_as_is_told_before(kind: str) -> None:
    """Guards against refusing a prompt that fits: the bound holds for any text, or there is none."""
    made = wrap(KINDS[kind](), chat_template=CHAT)
    made.add_tokens(["<extra word>"])
    codec = HFCodec(made, ())
    rng = random.Random(1)
    words = [*TEXTS, " " * 40, "<extra word>", "</s>", "é漢🙂", "\n\n", "\x00", "a" * 300, "1234567890"]
    for _ in range(200):
        text = "".join(rng.choices(words, k=rng.randint(0, 20)))
        assert codec.least_tokens(text) <= len(codec.encode(text))
    chat = [{"role": "user", "content": "fox " * 500}]
    assert codec.least_tokens(codec.render_chat(chat)) <= len(codec.encode_chat(chat))


def test_bytes_tell_how_long_a_text_is_where_no_token_can_swallow_them() -> None:
    codec = HFCodec(wrap(KINDS["byte-level"]()), ())
    assert codec.least_tokens("x" * 100_000) > 1000
    spaces = wrap(KINDS["byte-level"]())
    spaces.add_tokens([AddedToken("<wide>", lstrip=True)])
    assert HFCodec(spaces, ()).least_tokens("x" * 100_000) == 0, "it takes any number of spaces"


def lacking() -> Any:
    """As SmolLM2: byte-level BPE whose alphabet is that of its training text; other bytes vanish."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=300, special_tokens=["<s>", "</s>"], show_progress=False)
    tokenizer.train_from_iterator(TEXTS, trainer)
    return wrap(tokenizer)


def composing() -> Any:
    """As Qwen: every byte has a token, and texts are composed first."""
    tokenizer = byte_level()
    tokenizer.normalizer = normalizers.NFC()
    return wrap(tokenizer)


@pytest.mark.parametrize("make", [lacking, composing])
def test_a_bound_holds_where_bytes_vanish_or_characters_are_composed(make: Any) -> None:
    """Guards the refusal of megabytes before they are tokenized, which was off for SmolLM2 and Qwen."""
    codec, rng = HFCodec(make(), ()), random.Random(2)
    assert codec.least_tokens("the quick brown fox " * 10_000) > 1000
    words = [
        *TEXTS,
        "\x00\x01" * 20,
        "\u212a" * 50,
        "e\u0301" * 40,
        "\u1112\u1161\u11ab" * 30,
        "\u2126\u0313\u0300\u0345" * 9,
    ]
    vanished = 0
    for word in [*words, *("".join(rng.choices(words, k=rng.randint(0, 20))) for _ in range(200))]:
        count = len(codec.encode(word))
        assert codec.least_tokens(word) <= count
        vanished += count == 0 and word != ""
    assert vanished or make is composing


def beginning(tokenizer: Any) -> Any:
    """The tokenizer with its BOS before every text, as Llama's and Gemma's."""
    bos = tokenizer.bos_token_id
    tokenizer._tokenizer.post_processor = processors.TemplateProcessing("<s> $A", special_tokens=[("<s>", bos)])
    return tokenizer


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("kept", [False, True], ids=["transformers", "stored"])
def test_a_prompt_that_begins_with_bos_gets_no_second_one(
    kind: str, kept: bool, cache: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tokenizer: Any = beginning(wrap(KINDS[kind]()))
    bos, theirs = tokenizer.bos_token_id, lambda text: tokenizer(text)["input_ids"]
    codec = HFCodec(through_disk(tokenizer) if kept else tokenizer, ())
    assert codec.encode(TEXTS[0]) == theirs(TEXTS[0])
    assert codec.encode("a <s> b") == theirs("a <s> b")
    assert codec.encode("") == [bos]
    assert not caplog.records
    assert codec.encode(f"<s>{TEXTS[0]}") == theirs(f"<s>{TEXTS[0]}")[1:]
    assert codec.encode(f"<s>{TEXTS[0]}").count(bos) == 1
    assert codec.encode("<s>") == [bos]
    assert codec.encode("<s><s>fox").count(bos) == 2, "those of the prompt itself stay"
    assert [record.getMessage() for record in caplog.records] == [
        "some prompts begin with <s>, which the tokenizer puts before every text: they get no second one"
    ]


def test_a_tokenizer_that_adds_no_bos_leaves_those_of_a_prompt(
    tokenizer: Any, caplog: pytest.LogCaptureFixture
) -> None:
    assert HFCodec(tokenizer, ()).encode("<s><s>fox").count(tokenizer.bos_token_id) == 2
    assert not caplog.records


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "dsbd" / "tokenizers"


def through_disk(tokenizer: Any) -> StoredTokenizer:
    facts = store(tokenizer)
    restored = stored(json.loads(json.dumps(facts)), lambda: tokenizer)
    assert restored is not None
    return restored


def test_a_stored_tokenizer_does_what_transformers_does(tokenizer: Any, cache: Path) -> None:
    """Ids, texts, bytes, bounds, conversations and special tokens; padding of an earlier call is not stored."""
    tokenizer("a", padding="max_length", truncation=True, max_length=3) if tokenizer.pad_token else None
    mine, theirs = HFCodec(through_disk(tokenizer), (2,)), HFCodec(tokenizer, (2,))
    for text in [*TEXTS, "", " ", "wholly unseen: Ωµ漢字 <extra word></s> <s>!\n"]:
        assert mine.encode(text) == theirs.encode(text)
        assert mine.encode_pieces([text, "a b"]) == theirs.encode_pieces([text, "a b"])
        assert mine.least_tokens(text) == theirs.least_tokens(text)
        messages = [{"role": "user", "content": text}]
        assert mine.encode_chat(messages) == theirs.encode_chat(messages)
    rng = random.Random(3)
    for _ in range(200):
        ids = rng.choices(range(len(theirs.vocabulary)), k=12)
        assert mine.decode(ids) == theirs.decode(ids)
    for name in ("token_bytes", "tokenizer_json"):
        assert getattr(mine, name)() == getattr(theirs, name)()
    for name in ("vocabulary", "bytes_per_token", "has_template", "tokenizer"):
        assert getattr(mine, name) == getattr(theirs, name)
    assert {i: (t.content, t.special) for i, t in mine.added_tokens.items()} == {
        i: (t.content, t.special) for i, t in theirs.added_tokens.items()
    }


def test_a_tokenizer_without_a_template_is_stored_without_one(cache: Path) -> None:
    assert not HFCodec(through_disk(wrap(byte_level())), ()).has_template


class Overriding(PreTrainedTokenizerFast):
    def _decode(self, *args: Any, **options: Any) -> str:
        return "another text"


@pytest.mark.parametrize(
    "made",
    [
        lambda: Overriding(tokenizer_object=byte_level()),
        ByT5Tokenizer,
        lambda: wrap(byte_level(), split_special_tokens=True),
        lambda: wrap(byte_level(), chat_template={"one": "a", "two": "b"}),
    ],
)
def test_a_tokenizer_that_does_more_than_its_backend_is_not_stored(made: Any, cache: Path) -> None:
    assert store(made()) is None
    assert not cache.exists()


def test_a_changed_file_is_no_stored_tokenizer(cache: Path) -> None:
    facts = store(wrap(byte_level()))
    assert facts is not None
    (file,) = cache.iterdir()
    file.write_bytes(file.read_bytes().replace(b"byte_fallback", b"byte-fallback"))
    assert stored(facts, object) is None
    file.unlink()
    assert stored(facts, object) is None


def test_a_cache_that_cannot_be_written_stores_nothing(cache: Path) -> None:
    cache.parent.write_text("no folder", encoding="utf-8")
    assert store(wrap(byte_level())) is None
