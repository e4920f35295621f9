"""Models of transformers that cannot run are refused in one line, and none that can ends a run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from dsbd_cli.config.model import ModelSpec
from dsbd_cli.errors import UnsupportedModelError
from dsbd_cli.models import load_transformers
from dsbd_cli.models.checkpoints.checkpoint import Checkpoint
from dsbd_cli.models.checks.invariance import check
from dsbd_cli.models.checks.selftest import self_test
from dsbd_cli.models.forest_model import SelfTestReport
from dsbd_cli.models.load_model import load_model
from dsbd_cli.models.load_transformers import _check_source
from dsbd_cli.models.transformers_backend.causal import CausalForestModel
from dsbd_cli.models.transformers_backend.patching import pack
from tests.helpers.checkpoints import save
from tests.helpers.pairs import WHISPER, build_pair
from tests.helpers.tiny import V, build


def dia() -> Any:
    part = {"vocab_size": V, "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4, "head_dim": 8}
    part |= {"num_key_value_heads": 4, "intermediate_size": 48, "max_position_embeddings": 64}
    across = {"cross_num_attention_heads": 4, "cross_num_key_value_heads": 4, "cross_head_dim": 8}
    decoder = {**part, **across, "cross_hidden_size": 32, "num_channels": 2}
    config = transformers.DiaConfig(encoder_config=part, decoder_config=decoder, delay_pattern=[0, 1])
    return transformers.DiaForConditionalGeneration(config)


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: build_pair("moonshine"), "it reads input_values, which are made from files for Whisper"),
        (lambda: build_pair("speech2text"), "it reads input_features, which are made from files for Whisper"),
        (dia, "a dia has no table of tokens, so that its answer is no text"),
    ],
    ids=["moonshine", "speech2text", "dia"],
)
def test_what_no_row_can_ask_for_is_refused(make: Any, said: str) -> None:
    """Guards a text that reaches an encoder of sound, and answers of several tokens at once."""
    with pytest.raises(UnsupportedModelError, match=said):
        _check_source(make())


@pytest.mark.parametrize("name", ["whisper", "t5"])
def test_sources_that_are_made_pass(name: str) -> None:
    _check_source(build_pair(name))


@pytest.mark.parametrize("part", ["_forest", "check"])
def test_what_a_model_raises_is_told_in_one_line(part: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*args: Any) -> None:
        raise AssertionError("a mask\nthat all heads share")

    monkeypatch.setattr(load_transformers, part, fails)
    said = r"GPT2LMHeadModel cannot hold a tree of tokens \(AssertionError: a mask that all heads share\)"
    with pytest.raises(UnsupportedModelError, match=said):
        load_model(Checkpoint.open(ModelSpec(str(save(tmp_path, "gpt2")), device="cpu")))


@pytest.fixture
def coarse(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Checkpoint:
    """A checkpoint in bfloat16 that fails the self-test by rounding, as it does where attention is sharp."""

    def rounds(forest: Any) -> SelfTestReport:
        if forest.weights_dtype == torch.bfloat16:
            raise UnsupportedModelError("the logits of a packed forest are off by 0.2 of their spread")
        return self_test(forest)

    monkeypatch.setattr(load_transformers, "self_test", rounds)
    return Checkpoint.open(ModelSpec(str(save(tmp_path, "gpt2")), device="cpu", dtype="bfloat16"))


def test_rounding_of_half_precision_is_no_fault(coarse: Checkpoint) -> None:
    """Guards "cannot hold a tree of tokens" for weights that hold it exactly in float32."""
    loaded = load_model(coarse)
    assert loaded.model.weights_dtype == torch.bfloat16
    assert loaded.report.tested.largest_error < 1e-4


def test_a_fault_is_told_in_half_precision_too(coarse: Checkpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CausalForestModel, "move", lambda self, source, target, common_prefix: None)
    with pytest.raises(UnsupportedModelError, match="the logits of a packed forest are off by"):
        load_model(coarse)


def test_a_decoder_of_whisper_alone_takes_as_many_tokens_as_its_table_has() -> None:
    """Guards an index past the table in the check at load."""
    torch.manual_seed(0)
    config = transformers.WhisperConfig(**{**WHISPER[1], "max_target_positions": 256})
    forest = CausalForestModel(transformers.WhisperForCausalLM(config).eval(), "whisper")
    assert forest.max_positions == 256
    assert check(forest).varies != ""


def test_a_router_that_reads_the_weight_of_its_layer_is_packed() -> None:
    """Guards LongCat's router, which a packed layer without numbers gave noise."""
    plain, model, tokens = build("longcat"), build("longcat"), torch.arange(3, 40)[None]
    if not pack(model):
        pytest.skip("this build of torch has no packed products")
    torch.testing.assert_close(model(input_ids=tokens).logits, plain(input_ids=tokens).logits, atol=1e-5, rtol=1e-4)


def test_roberta_counts_from_the_row_behind_that_of_padding() -> None:
    """Guards a text that takes more positions than the table has left."""
    assert CausalForestModel(build("roberta"), "roberta").max_positions == 511
    assert CausalForestModel(build("roberta", pad_token_id=1), "roberta").max_positions == 510


def test_masks_that_differ_by_head_are_attended_by_torch() -> None:
    """Guards an assertion in the check at load: Doge adds a number to each head's scores."""
    forest = CausalForestModel(build("doge"), "doge")
    assert check(forest).varies == "some of its layers do not attend by our function"


def test_doge_takes_no_more_tokens_than_it_keeps() -> None:
    """Guards texts that depend on which of two equal tokens is left out."""
    assert CausalForestModel(build("doge", keep_window_size=300), "doge").max_positions == 300
    assert CausalForestModel(build("doge", keep_window_size=3000), "doge").max_positions == 512
