"""Target and draft together."""

from __future__ import annotations

from pathlib import Path

import pytest

from dsbd_cli.config.model import ModelSpec
from dsbd_cli.engine.protocols import ForestModel, TextCodec
from dsbd_cli.errors import PairError, UnsupportedModelError
from dsbd_cli.models.checkpoints.checkpoint import Checkpoint, open_pair
from dsbd_cli.models.checkpoints.vocabulary import check_pair
from dsbd_cli.models.pair import load_pair
from dsbd_cli.models.tokenizer import HFCodec
from tests.helpers.checkpoints import numbers, save


def codec(*args: object, eos: tuple[int, ...] = (2,)) -> HFCodec:
    return HFCodec(numbers(*args), eos)  # type: ignore[arg-type]


def test_same_vocabulary() -> None:
    """Guards false alarms, padding of the logits included (OPT, Qwen 2.5)."""
    assert check_pair(codec(), codec(), 97, 97) == ()
    (note,) = check_pair(codec(), codec(), 104, 128)
    assert "104 in the target, 128 in the draft" in note


def test_differing_tokens_are_named() -> None:
    """Guards drafts of another family, which would draft nonsense: the first differing tokens and their number."""
    with pytest.raises(PairError, match=r"id 5: 'foo' in the target, 'w5' in the draft; id 9: .*; 2 differ"):
        check_pair(codec(97, {5: "foo", 9: "bar"}), codec(), 97, 97)


def test_other_size_is_no_padding() -> None:
    """Guards vocabularies of which one is a part of the other: real tokens are not padding."""
    with pytest.raises(PairError, match=r"id 90: 'w90' in the target, nothing in the draft; .*; 7 differ"):
        check_pair(codec(97), codec(90), 97, 97)
    with pytest.raises(PairError, match="draft has 90 logits"):
        check_pair(codec(97), codec(97), 97, 90)


def test_added_tokens_may_be_absent() -> None:
    """Guards instruct targets with base drafts: chat markers that only one side names are padding of the other."""
    chat = numbers()
    chat.add_special_tokens({"additional_special_tokens": ["<|user|>"]})
    check_pair(HFCodec(chat, (2,)), codec(), 104, 104)
    other = numbers()
    other.add_special_tokens({"additional_special_tokens": ["<|tool|>"]})
    with pytest.raises(PairError, match=r"id 97: '<\|user\|>' in the target, '<\|tool\|>' in the draft; 1 differ"):
        check_pair(HFCodec(chat, (2,)), HFCodec(other, (2,)), 104, 104)


def test_end_tokens_are_reported() -> None:
    """Guards a draft with other end tokens: harmless, but said."""
    (note,) = check_pair(codec(eos=(2, 5)), codec(), 97, 97)
    assert "(2, 5)" in note


def test_load_pair(checkpoint: Path, tmp_path: Path) -> None:
    """Guards the whole way: two folders in, two forest models of one width and a codec out."""
    draft = save(tmp_path / "draft", vocab_size=104, num_hidden_layers=1)
    pair = load_pair(
        *open_pair(ModelSpec(str(checkpoint), device="cpu"), ModelSpec(str(draft), "draft", "bfloat16", "cpu"))
    )
    target: ForestModel = pair.target
    text: TextCodec = pair.codec
    assert pair.draft is not None
    assert target.vocab_size == pair.draft.vocab_size == 97
    assert (pair.target_dtype, pair.draft_dtype) == ("float32", "bfloat16")
    assert text.eos_ids == (2,)
    assert len(pair.differences) == 1
    alone = load_pair(Checkpoint.open(ModelSpec(str(checkpoint), device="cpu")), None)
    assert (alone.draft, alone.draft_dtype, alone.differences) == (None, None, ())


def test_unfit_draft_is_named(checkpoint: Path, tmp_path: Path) -> None:
    """Guards the message of a refusal: role and name of the model."""
    draft = save(tmp_path / "mpt", "mpt")
    with pytest.raises(UnsupportedModelError, match=r"draft model '.*mpt': MptForCausalLM"):
        load_pair(
            *open_pair(ModelSpec(str(checkpoint), device="cpu"), ModelSpec(str(draft), role="draft", device="cpu"))
        )
