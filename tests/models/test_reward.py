"""Reward models: no reward comes from weights that the checkpoint lacks."""

from __future__ import annotations

from pathlib import Path

import peft
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaForSequenceClassification

from dsbd_cli.config.model import ModelSpec
from dsbd_cli.errors import InvalidRowError, ModelError, NumericalError
from dsbd_cli.models.reward import RewardModel
from tests.helpers.checkpoints import numbers
from tests.helpers.tiny import GROUPED


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    torch.manual_seed(0)
    model = LlamaForSequenceClassification(LlamaConfig(**GROUPED, num_labels=1))
    model.save_pretrained(tmp_path / "reward")
    numbers().save_pretrained(tmp_path / "reward")
    return tmp_path / "reward"


def load(source: object) -> RewardModel:
    return RewardModel(ModelSpec(str(source), device="cpu"))


def change(folder: Path, name: str, by: float | None) -> None:
    """Multiply a weight, or leave it out."""
    weights = load_file(folder / "model.safetensors")
    weight = weights.pop(name)
    if by is not None:
        weights[name] = weight * by
    save_file(weights, folder / "model.safetensors", {"format": "pt"})


@pytest.mark.parametrize("name", ["score.weight", "model.layers.1.mlp.up_proj.weight"])
def test_a_weight_that_is_missing_is_named(name: str, folder: Path) -> None:
    """Guards rewards of random weights, which are other ones in every run."""
    change(folder, name, None)
    with pytest.raises(ModelError, match=rf"1 weights are missing \({name}\)"):
        load(folder)


def test_damaged_weights_are_one_line(folder: Path) -> None:
    change(folder, "score.weight", float("nan"))
    with pytest.raises(ModelError, match=r"32 of 32 numbers in score.weight are NaN"):
        load(folder)
    (folder / "model.safetensors").unlink()
    with pytest.raises(ModelError, match="holds no weights"):
        load(folder)


def test_a_reward_that_is_no_number_fails_its_row(folder: Path) -> None:
    """Guards the choice of the first candidate, whatever the rewards are."""
    change(folder, "score.weight", float("inf"))
    with pytest.raises(NumericalError, match="the reward model returned nan"):
        load(folder).scores("w3 w4", ["w5"])


def test_nothing_has_no_reward(folder: Path) -> None:
    model = load(folder)
    assert len(model.scores("", ["w5", "w6"])) == 2
    with pytest.raises(InvalidRowError, match="prompt and candidate are empty"):
        model.scores("", [""])


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")
def test_its_adapter_is_merged(folder: Path, tmp_path: Path) -> None:
    """Guards the rewards of the base under the name of the adapter."""
    base = LlamaForSequenceClassification.from_pretrained(folder)
    adapted = peft.get_peft_model(base, peft.LoraConfig(r=2, target_modules="all-linear", init_lora_weights=False))
    adapted.save_pretrained(str(tmp_path / "adapter"))
    ids = torch.tensor([[3, 4, 5]])
    want = float(adapted.merge_and_unload()(input_ids=ids).logits[0, 0])
    scores = load(f"{folder}+{tmp_path / 'adapter'}").scores("w3 w4 ", ["w5"])
    assert scores == pytest.approx([want], abs=1e-5)
    assert load(folder).scores("w3 w4 ", ["w5"]) != pytest.approx([want], abs=1e-5)
