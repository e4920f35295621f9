"""Checkpoints as the package mamba_ssm writes them: state-spaces/mamba-*, state-spaces/mamba2-*, MambaByte.

Their config.json has no model type and other names, one weight is called otherwise, and no tokenizer comes along.
Mamba and Mamba-2 of transformers run them as they are.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from dsbd_cli.errors import ModelError, UnsupportedModelError, shorten
from dsbd_cli.models.tokenizer import byte_alphabet

KEY_MAPPING = {r"^backbone\.embedding\.": "backbone.embeddings."}  # of the weights, for from_pretrained
BYTES = 256

# settings of a layer: name in mamba_ssm -> name in transformers
_MAMBA = {"d_state": "state_size", "d_conv": "conv_kernel", "expand": "expand", "dt_rank": "time_step_rank"}
_MAMBA2 = {
    "d_state": "state_size",
    "d_conv": "conv_kernel",
    "expand": "expand",
    "headdim": "head_dim",
    "ngroups": "n_groups",
    "chunk_size": "chunk_size",
}
_BOTH = {"bias": "use_bias", "conv_bias": "use_conv_bias"}
# settings that only say how weights were drawn, or which kernel runs
_IDLE = {"layer", "dt_min", "dt_max", "dt_init", "dt_scale", "dt_init_floor", "A_init_range", "use_fast_path"}


def read_config(folder: Path) -> Any:
    """Return transformers' config for a checkpoint of mamba_ssm; None for any other folder.

    Raises UnsupportedModelError for what transformers' two models lack, ModelError for settings that make no sense.
    """
    stored = stored_config(folder)
    if stored is None:
        return None
    from transformers import Mamba2Config, MambaConfig

    layer = stored["ssm_cfg"]
    if not isinstance(layer, dict):
        raise _wrong(folder, "ssm_cfg", layer, "an object")
    kind = layer.get("layer", "Mamba1")
    second = kind == "Mamba2"
    names = (_MAMBA2 if second else _MAMBA) | _BOTH
    unknown = sorted(set(layer) - set(names) - _IDLE)
    if kind not in ("Mamba1", "Mamba2"):
        unknown.append(f"layer = {kind}")
    if stored.get("attn_layer_idx"):
        unknown.append("attn_layer_idx")
    if stored.get("d_intermediate"):
        unknown.append("d_intermediate")
    if not stored.get("rms_norm", True):
        unknown.append("rms_norm = false")
    if unknown:
        raise UnsupportedModelError(
            f"{folder}/config.json is a mamba_ssm checkpoint with {', '.join(unknown)}, which no model of transformers "
            "has: use a plain Mamba or Mamba-2"
        )
    for key in ("d_model", "n_layer", "vocab_size", "pad_vocab_size_multiple"):
        _check(folder, key, stored.get(key, 1), int)
    for key in ("residual_in_fp32", "tie_embeddings"):
        _check(folder, key, stored.get(key, True), bool)
    for key in sorted(set(layer) & set(names)):
        if (key, layer[key]) != ("dt_rank", "auto"):
            _check(folder, f"ssm_cfg.{key}", layer[key], bool if key in _BOTH else int)
    multiple = stored.get("pad_vocab_size_multiple", 8)
    width, vocab = stored["d_model"], -(-stored["vocab_size"] // multiple) * multiple
    settings = {
        "hidden_size": width,
        "num_hidden_layers": stored["n_layer"],
        "vocab_size": vocab,
        "layer_norm_epsilon": 1e-5,
        "residual_in_fp32": stored.get("residual_in_fp32", True),
        "tie_word_embeddings": stored.get("tie_embeddings", True),
        # which token ends a text is for the tokenizer to say
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
        **{names[key]: value for key, value in layer.items() if key in names},
    }
    if not second:
        return MambaConfig(**settings)
    settings = {"head_dim": 64, "n_groups": 1, "state_size": 128, "chunk_size": 256, "expand": 2} | settings
    inner = settings["expand"] * width
    heads, rest = divmod(inner, settings["head_dim"])
    if rest:
        raise ModelError(
            f"{folder}/config.json: headdim is {settings['head_dim']}, which does not divide expand * d_model = {inner}"
        )
    return Mamba2Config(**settings, num_heads=heads)


def _check(folder: Path, key: str, value: object, kind: type) -> None:
    """Raise ModelError for a setting that is not true or false, or not a whole number from 1 on."""
    if type(value) is not kind or (kind is int and value < 1):  # type: ignore[operator]
        raise _wrong(folder, key, value, "true or false" if kind is bool else "a whole number from 1 on")


def _wrong(folder: Path, key: str, value: object, expected: str) -> ModelError:
    return ModelError(f"{folder}/config.json: {key} is {shorten(value)}, which must be {expected}")


def byte_tokenizer(folder: Path) -> Any:
    """Return the tokenizer of a model over bytes, whose tokens are the bytes themselves (MambaByte). None for any other
    folder, and for one that brings a tokenizer."""
    stored = stored_config(folder)
    if stored is None or stored["vocab_size"] != BYTES or any(folder.glob("tokenizer*")):
        return None
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE(byte_alphabet(), []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, clean_up_tokenization_spaces=False)


def stored_config(folder: Path) -> dict[str, Any] | None:
    """Return the config.json of a checkpoint of mamba_ssm; None for any other folder."""
    try:
        stored = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return None
    if (
        not isinstance(stored, dict)
        or "model_type" in stored
        or not {"d_model", "n_layer", "vocab_size"} <= set(stored)
    ):
        return None
    return stored | {"ssm_cfg": stored.get("ssm_cfg") or {}}
