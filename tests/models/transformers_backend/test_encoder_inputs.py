"""How requests become sources: languages as NLLB, mBART and marked tokenizers name them, and prefixes.

Guards: a source in another language than the row says, a language left over from the row before, an answer that begins
in no language at all.
"""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import sentencepiece
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoTokenizer, M2M100Config, M2M100Tokenizer, MBartTokenizer, NllbTokenizer

from dsbd_cli import Request, SamplingConfig
from dsbd_cli.config.model import ModelSpec
from dsbd_cli.errors import InvalidRowError, ModelError
from dsbd_cli.models.checkpoints.checkpoint import Checkpoint
from dsbd_cli.models.load_transformers import _source_codec
from dsbd_cli.models.transformers_backend.encoder_inputs import Seq2SeqCodec
from tests.helpers.checkpoints import wrap

PIECES = ["<s>", "<pad>", "</s>", "<unk>", "▁a", "▁b", "▁"]


def codec(tokenizer: Any, kind: str, start: int = 2, forced: int | None = None) -> Seq2SeqCodec:
    settings = SimpleNamespace(decoder_start_token_id=start, forced_bos_token_id=forced)
    model = SimpleNamespace(config=SimpleNamespace(model_type=kind), generation_config=settings)
    return Seq2SeqCodec(tokenizer, (2,), start, model)


def nllb() -> Any:
    return NllbTokenizer(vocab={piece: index for index, piece in enumerate(PIECES)}, merges=[])


def asked(**settings: Any) -> Request:
    return Request("a b", sampling=SamplingConfig(**settings))


def test_nllb_says_the_source_language_and_forces_the_other() -> None:
    tokenizer = nllb()
    hf_codec = codec(tokenizer, "m2m_100")
    made = hf_codec.encoder_input(asked(source_lang="fra_Latn", target_lang="deu_Latn"))
    assert tokenizer.convert_ids_to_tokens(made.encoder_input.tolist())[0] == "fra_Latn"
    assert (made.prompt, made.prefix) == ([2], 0)
    assert tokenizer.convert_ids_to_tokens([made.forced]) == ["deu_Latn"]
    # the next row, without a language of its own, has the tokenizer's
    plain = hf_codec.encoder_input(asked(target_lang="deu_Latn"))
    assert tokenizer.convert_ids_to_tokens(plain.encoder_input.tolist())[0] == "eng_Latn"


def test_a_prefix_stands_behind_the_forced_language() -> None:
    tokenizer = nllb()
    made = codec(tokenizer, "m2m_100").encoder_input(asked(target_lang="deu_Latn", prefix="b"))
    language = tokenizer.convert_tokens_to_ids("deu_Latn")
    assert made.prompt[:2] == [2, language]
    assert (made.forced, made.prefix) == (None, len(made.prompt) - 2)
    # that of the checkpoint, where the row names none
    hf_codec = codec(tokenizer, "m2m_100", forced=language)
    for rules, begin in (
        ("none", [2]),
        ("forced_bos_token_id=none", [2]),
        ("forced_bos_token_id=4", [2, 4]),
        ("min_length=3", [2, language]),
    ):
        made = hf_codec.encoder_input(asked(prefix="b", token_rules=rules))
        assert made.prompt[: -made.prefix] == begin, "token rules that switch the forced token off, or set it"
    own = codec(tokenizer, "m2m_100", forced=language).encoder_input(asked(prefix="b"))
    assert own.prompt == made.prompt


def test_mbart_begins_with_the_language() -> None:
    tokenizer = MBartTokenizer(vocab=[(piece, -1.0) for piece in PIECES], src_lang="en_XX")
    romanian, french = tokenizer.convert_tokens_to_ids(["ro_RO", "fr_XX"])
    made = codec(tokenizer, "mbart", start=romanian).encoder_input(asked(target_lang="fr_XX"))
    assert (made.prompt, made.forced) == ([french], None)
    assert codec(tokenizer, "mbart", start=romanian).encoder_input(asked()).prompt == [romanian]


def test_m2m100_knows_languages_that_its_vocabulary_lacks(tmp_path: Path) -> None:
    """Its tokenizer is transformers' slow one; it does not call languages special, so they came out as text."""
    lines = ["the house is small", "a small dog", "houses and dogs are here", "wo ist das haus"] * 20
    prefix = tmp_path / "sentencepiece.bpe"
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(lines), model_prefix=str(prefix), vocab_size=60, hard_vocab_limit=False, minloglevel=2
    )
    pieces = sentencepiece.SentencePieceProcessor(model_file=f"{prefix}.model")
    words = dict.fromkeys(["<s>", "<pad>", "</s>", "<unk>", *map(pieces.id_to_piece, range(pieces.get_piece_size()))])
    (tmp_path / "vocab.json").write_text(json.dumps({word: index for index, word in enumerate(words)}))
    M2M100Tokenizer(str(tmp_path / "vocab.json"), f"{prefix}.model").save_pretrained(tmp_path / "saved")
    M2M100Config().save_pretrained(tmp_path / "saved")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "saved")
    hf_codec = codec(tokenizer, "m2m_100")
    made = hf_codec.encoder_input(Request("the dog", sampling=SamplingConfig(source_lang="de", target_lang="fr")))
    assert tokenizer.convert_ids_to_tokens(made.encoder_input.tolist())[0] == "__de__"
    assert made.forced == tokenizer.get_lang_id("fr")
    assert hf_codec.decode([made.forced, *made.encoder_input.tolist()[1:]]) == "the dog"
    assert b" dog" in hf_codec.token_bytes()
    with pytest.raises(InvalidRowError, match=r"target_lang is 'xx', .* it knows af, am, ar and others"):
        hf_codec.encoder_input(asked(target_lang="xx"))


def test_marks_stand_before_the_text() -> None:
    words = {word: index for index, word in enumerate(["<pad>", "<s>", "</s>", "a", "b", ">>fra<<"])}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    hf_codec = codec(wrap(tokenizer), "marian")
    assert hf_codec.encoder_input(asked(target_lang="fra")).encoder_input.tolist() == [5, 3, 4]
    with pytest.raises(InvalidRowError, match="target_lang is 'deu'"):
        hf_codec.encoder_input(asked(target_lang="deu"))


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({}, "target_lang is missing"),
        ({"target_lang": "xx"}, "target_lang is 'xx', which the target's tokenizer does not know"),
        ({"target_lang": "deu_Latn", "source_lang": "</s"}, "source_lang is '</s', which"),
    ],
)
def test_languages_that_are_missing_or_unknown_are_told(settings: dict[str, str], told: str) -> None:
    with pytest.raises(InvalidRowError, match=told):
        codec(nllb(), "m2m_100").encoder_input(asked(**settings))


def test_a_source_is_cut_behind_its_language() -> None:
    hf_codec = codec(nllb(), "m2m_100")
    encoder_input = hf_codec.encoder_input(asked(target_lang="deu_Latn")).encoder_input
    kept = hf_codec.cut(encoder_input, 3)
    assert kept is not None
    assert kept.tolist() == [int(encoder_input[0]), *encoder_input[-2:].tolist()]
    assert hf_codec.cut(encoder_input, 0) is None


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({}, "the checkpoint names no decoder_start_token_id"),
        ({"decoder_start_token_id": 97}, r"answers begin with token 97 \(decoder_start_token_id\), but .* has 97 ids"),
        ({"decoder_start_token_id": -1}, "answers begin with token -1"),
    ],
)
def test_a_checkpoint_without_a_first_token_is_refused(settings: dict[str, int], said: str) -> None:
    """Guards "prompt holds token id 97" for every row, whose prompts hold no such token."""
    model = SimpleNamespace(config=SimpleNamespace(model_type="bart"), generation_config=SimpleNamespace(**settings))
    with pytest.raises(ModelError, match=f"target model 'x': {said}"):
        _source_codec(Checkpoint(ModelSpec("x"), Path()), model, nllb(), (2,), 97)
