"""Checkpoints of the package mamba_ssm: the same model as in transformers' form, refusals by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from dsbd_cli.config.model import ModelSpec
from dsbd_cli.errors import ModelError, UnsupportedModelError
from dsbd_cli.models.checkpoints.checkpoint import Checkpoint
from dsbd_cli.models.checkpoints.loader import load
from dsbd_cli.models.checkpoints.mamba_ssm import byte_tokenizer
from dsbd_cli.models.tokenizer import HFCodec
from tests.helpers.tiny import build

MAMBA = {"d_model": 32, "n_layer": 3, "vocab_size": 250, "ssm_cfg": {"d_state": 8}, "pad_vocab_size_multiple": 16}
LAYER2 = {"layer": "Mamba2", "d_state": 16, "headdim": 8, "ngroups": 2, "chunk_size": 8}


def write(folder: Path, family: str, **changes: Any) -> Any:
    """A checkpoint, and the model it was made from."""
    model = build(family, vocab_size=256, tie_word_embeddings=True)
    weights = {key.replace(".embeddings.", ".embedding."): value for key, value in model.state_dict().items()}
    save_file(
        {key: value.clone() for key, value in weights.items() if "lm_head" not in key}, folder / "model.safetensors"
    )
    (folder / "config.json").write_text(json.dumps({**MAMBA, **changes}))
    return model


@pytest.mark.parametrize(("family", "layer"), [("mamba", {"d_state": 8}), ("mamba2", LAYER2)])
def test_the_model_is_the_same(family: str, layer: dict[str, Any], tmp_path: Path) -> None:
    """Guards names of settings and weights, and the padded vocabulary. The folder has no tokenizer, and 250 tokens are
    not bytes: one must be put there."""
    made = write(tmp_path, family, ssm_cfg=layer)
    with pytest.raises(ModelError, match="put a tokenizer beside its weights"):
        load(Checkpoint.open(ModelSpec(str(tmp_path))))
    (tmp_path / "config.json").write_text(json.dumps({**MAMBA, "ssm_cfg": layer, "vocab_size": 256}))
    model, tokenizer = load(Checkpoint.open(ModelSpec(str(tmp_path))))
    ids = torch.tensor([[*"naïve".encode()]])
    assert tokenizer("naïve")["input_ids"] == ids[0].tolist()
    assert torch.equal(model(ids).logits, made(ids).logits)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"ssm_cfg": {"layer": "Mamba2", "D_has_hdim": True}}, "D_has_hdim"),
        ({"ssm_cfg": {"layer": "Mamba3"}}, "layer = Mamba3"),
        ({"attn_layer_idx": [1]}, "attn_layer_idx"),
        ({"d_intermediate": 64}, "d_intermediate"),
        ({"rms_norm": False}, "rms_norm = false"),
    ],
)
def test_what_transformers_lacks_is_refused(changes: dict[str, Any], named: str, tmp_path: Path) -> None:
    """Guards a checkpoint that loads and writes noise."""
    (tmp_path / "config.json").write_text(json.dumps({**MAMBA, **changes}))
    with pytest.raises(UnsupportedModelError, match=named):
        load(Checkpoint.open(ModelSpec(str(tmp_path))))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"d_model": "wide"}, "d_model is 'wide', which must be a whole number from 1 on"),
        ({"n_layer": 2.5}, "n_layer is 2.5, which"),
        ({"vocab_size": 0}, "vocab_size is 0, which"),
        ({"pad_vocab_size_multiple": True}, "pad_vocab_size_multiple is true, which"),
        ({"tie_embeddings": "no"}, "tie_embeddings is 'no', which must be true or false"),
        ({"ssm_cfg": [1]}, r"ssm_cfg is \[1\], which must be an object"),
        ({"ssm_cfg": {"dt_rank": "many"}}, r"ssm_cfg\.dt_rank is 'many', which"),
        ({"ssm_cfg": LAYER2 | {"headdim": 7}}, "headdim is 7, which does not divide"),
    ],
)
def test_settings_that_make_no_sense(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    """Guards raw errors of Python, and of transformers, which name neither the field nor its value."""
    (tmp_path / "config.json").write_text(json.dumps({**MAMBA, **changes}))
    with pytest.raises(ModelError, match=message):
        load(Checkpoint.open(ModelSpec(str(tmp_path))))


def test_tokens_are_bytes(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**MAMBA, "vocab_size": 256}))
    codec = HFCodec(byte_tokenizer(tmp_path), ())
    assert codec.token_bytes() == [bytes([byte]) for byte in range(256)]
    text = " 東京 🙂\n\tx"
    assert codec.encode(text) == [*text.encode()]
    assert codec.decode([*text.encode()]) == text
