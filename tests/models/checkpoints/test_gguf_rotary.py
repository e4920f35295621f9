"""Scaled rotary positions of GGUF files: the model is the one that was put into the file."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGUFWriter, RopeScalingType
from torch import Tensor
from transformers import Gemma3TextConfig, LlamaConfig, Phi3Config, Qwen2Config
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from dsbd_cli import ModelError, ModelSpec, UnsupportedModelError
from dsbd_cli.models.checkpoints.checkpoint import Checkpoint
from dsbd_cli.models.decoder.families import decoder_config_of
from dsbd_cli.models.load_model import load_model
from tests.helpers.gguf_models import random_model, write_model

Writes = Callable[[GGUFWriter], object]

SIZES: dict[str, Any] = {
    "vocab_size": 260, "hidden_size": 128, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 512, "bos_token_id": None, "eos_token_id": 259,
    "pad_token_id": 258, "tie_word_embeddings": False, "rms_norm_eps": 1e-6,
}  # fmt: skip
LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 500_000.0, "factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 128,
}  # fmt: skip
LONGROPE = {
    "rope_type": "longrope", "rope_theta": 10_000.0, "short_factor": [1.0 + 0.125 * i for i in range(12)],
    "long_factor": [2.0 + 0.25 * i for i in range(12)], "original_max_position_embeddings": 256,
    "partial_rotary_factor": 0.75,
}  # fmt: skip
LAYERS = ["sliding_attention", "full_attention"] + ["sliding_attention"] * 4
GEMMA3 = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 5_000.0},
    "full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0},
}


def llama3_factors() -> list[float]:
    """As llama.cpp's converter computes them, frequency by frequency."""
    factors = []
    for frequency in (1 / LLAMA3["rope_theta"] ** (torch.arange(0, 32, 2, dtype=torch.float32) / 32)).tolist():
        wavelength, original, factor = 2 * math.pi / frequency, 128, 32.0
        if wavelength < original / 4:
            factors.append(1.0)
        elif wavelength > original:
            factors.append(factor)
        else:
            smooth = (original / wavelength - 1) / 3
            factors.append(1 / ((1 - smooth) / factor + smooth))
    assert {1.0, 32.0} < set(factors), "some are between"
    return factors


def table(name: str, factors: list[float]) -> Writes:
    return lambda writer: writer.add_tensor(name, np.array(factors, np.float32))


def both(*writes: Writes) -> Writes:
    return lambda writer: [write(writer) for write in writes]


def linear(factor: float) -> Writes:
    return both(
        lambda writer: writer.add_rope_scaling_type(RopeScalingType.LINEAR),
        lambda writer: writer.add_rope_scaling_factor(factor),
    )


def yarn(**more: float) -> Writes:
    def write(writer: GGUFWriter) -> None:
        writer.add_rope_scaling_type(RopeScalingType.YARN)
        writer.add_rope_scaling_factor(4.0)
        writer.add_rope_scaling_orig_ctx_len(128)
        for key, value in more.items():
            writer.add_float32(f"{writer.arch}.rope.scaling.{key}", value)

    return write


YARN = {"rope_type": "yarn", "rope_theta": 10_000.0, "factor": 4.0, "original_max_position_embeddings": 128}
PHI_TABLES = both(
    table("rope_factors_short.weight", LONGROPE["short_factor"]),  # type: ignore[arg-type]
    table("rope_factors_long.weight", LONGROPE["long_factor"]),  # type: ignore[arg-type]
    lambda writer: writer.add_rope_scaling_orig_ctx_len(256),
)

# name -> (config class, settings, architecture, what is written of the scaling)
CASES: dict[str, tuple[type, dict[str, Any], str, Writes]] = {
    "llama 3": (LlamaConfig, {"rope_parameters": LLAMA3}, "llama", table("rope_freqs.weight", llama3_factors())),
    "llama linear": (
        LlamaConfig,
        {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}},
        "llama",
        linear(2.0),
    ),
    "llama linear without its name": (
        LlamaConfig,
        {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}},
        "llama",
        lambda writer: writer.add_rope_scaling_factor(2.0),
    ),
    "qwen2 yarn": (Qwen2Config, {"rope_parameters": YARN}, "qwen2", yarn()),
    "qwen2 yarn with all keys": (
        Qwen2Config,
        {"rope_parameters": {**YARN, "beta_fast": 16.0, "beta_slow": 2.0, "attention_factor": 1.25}},
        "qwen2",
        yarn(yarn_beta_fast=16.0, yarn_beta_slow=2.0, attn_factor=1.25 / (1 + 0.1 * math.log(4))),
    ),
    "phi3 long": (
        Phi3Config,
        {"rope_parameters": LONGROPE, "original_max_position_embeddings": 256},
        "phi3",
        both(PHI_TABLES, lambda writer: writer.add_rope_scaling_attn_factors(math.sqrt(1 + 1 / 8))),
    ),
    "phi3 long without its factor": (
        Phi3Config,
        {"rope_parameters": LONGROPE, "original_max_position_embeddings": 256},
        "phi3",
        PHI_TABLES,
    ),
    "gemma3": (
        Gemma3TextConfig,
        {
            "rope_parameters": GEMMA3,
            "head_dim": 32,
            "sliding_window": 16,
            "num_hidden_layers": 6,
            "query_pre_attn_scalar": 256,
            "tie_word_embeddings": True,
        },
        "gemma3",
        both(linear(8.0), lambda writer: writer.add_rope_freq_base_swa(5_000.0)),
    ),
    "ones": (
        LlamaConfig,
        {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}},
        "llama",
        both(table("rope_freqs.weight", [1.0] * 16), lambda w: w.add_rope_scaling_type(RopeScalingType.NONE)),
    ),
}


def opened(path: Path) -> Checkpoint:
    return Checkpoint.open(ModelSpec(str(path), dtype="float32"))


def rotaries(config: Any) -> list[tuple[Tensor, float]]:
    """Frequencies and scales of each kind of layer."""
    rope = config.rope_parameters
    kinds = [kind for kind in rope if isinstance(rope[kind], dict)]
    results = []
    for kind in kinds or [None]:
        own = rope if kind is None else rope[kind]
        if own["rope_type"] == "default":
            results.append((torch.tensor(own["rope_theta"]), own.get("partial_rotary_factor", 1.0)))
        else:
            more = {} if kind is None else {"layer_type": kind}
            results.append(ROPE_INIT_FUNCTIONS[own["rope_type"]](config, torch.device("cpu"), **more))
    return results


@pytest.mark.parametrize("name", CASES)
def test_the_model_is_the_one_that_was_put_into_the_file(tmp_path: Path, name: str) -> None:
    kind, settings, architecture, more = CASES[name]
    original = random_model(kind, **{**SIZES, **settings})
    write_model(tmp_path / "x.gguf", original, architecture, more=more)
    checkpoint = opened(tmp_path / "x.gguf")
    for ours, theirs in zip(rotaries(checkpoint.config), rotaries(original.config), strict=True):
        assert torch.allclose(ours[0], theirs[0], rtol=1e-6, atol=0)
        assert ours[1] == pytest.approx(theirs[1], rel=1e-6)
    assert not isinstance(decoder_config_of(checkpoint.config), str)
    loaded = load_model(checkpoint)
    assert type(loaded.model).__name__ == "DecoderForestModel"
    ids = torch.randint(0, 250, (1, 40), generator=torch.Generator().manual_seed(1))
    with torch.inference_mode():
        wanted = original(input_ids=ids, use_cache=False).logits
        assert (loaded.model.plain(ids) - wanted).abs().max() <= 1e-5 * wanted.std()
    assert loaded.model.max_positions == 512
    assert loaded.model.switch_position == (256 if "phi3" in name else None)  # type: ignore[attr-defined]


def test_scaling_matters(tmp_path: Path) -> None:
    """Or the test above could not fail."""
    original = random_model(LlamaConfig, **SIZES, rope_parameters=LLAMA3)
    write_model(tmp_path / "x.gguf", original, "llama")
    ids = torch.randint(0, 250, (1, 40), generator=torch.Generator().manual_seed(1))
    with torch.inference_mode():
        wanted = original(input_ids=ids, use_cache=False).logits
        computed = load_model(opened(tmp_path / "x.gguf")).model.plain(ids)  # type: ignore[attr-defined]
    assert (computed - wanted).abs().max() > 1e-3 * wanted.std()


@pytest.mark.parametrize(("layers", "scalar"), [(62, 32), (61, 256)])
def test_the_attention_of_gemma_27b(tmp_path: Path, layers: int, scalar: int) -> None:
    """No key of GGUF tells it; 256 is the scalar of all other sizes."""
    settings = {**SIZES, "num_hidden_layers": layers, "head_dim": 16, "tie_word_embeddings": True}
    write_model(tmp_path / "x.gguf", random_model(Gemma3TextConfig, **settings, sliding_window=16), "gemma3")
    assert opened(tmp_path / "x.gguf").config.query_pre_attn_scalar == scalar


def word(key: str, value: Any) -> Writes:
    return lambda writer: writer.add_key_value(f"llama.{key}", value, _type_of(value))


def _type_of(value: Any) -> Any:
    from gguf import GGUFValueType

    return {str: GGUFValueType.STRING, float: GGUFValueType.FLOAT32, int: GGUFValueType.INT32}[type(value)]


BAD: dict[str, tuple[Writes, type, str]] = {
    "an unknown type": (word("rope.scaling.type", "ntk"), UnsupportedModelError, "scales rotary positions by ntk"),
    "an unknown key": (word("rope.scaling.alpha", 2.0), UnsupportedModelError, r"says llama.rope.scaling.alpha = 2.0"),
    "no word": (word("rope.scaling.type", 7), ModelError, "says llama.rope.scaling.type = 7, but a word"),
    "no factor": (word("rope.scaling.factor", "x"), ModelError, "says llama.rope.scaling.factor = 'x', but a number"),
    "a factor of 0": (word("rope.scaling.factor", 0.0), ModelError, "rope.scaling.factor = 0.0, but a number above 0"),
    "infinity": (word("rope.scaling.factor", math.inf), ModelError, "rope.scaling.factor = inf, but a number above 0"),
    "a factor of attention": (word("rope.scaling.attn_factor", 2.0), UnsupportedModelError, "attn_factor = 2.0, which"),
    "another ramp": (yarn(yarn_ext_factor=0.5), UnsupportedModelError, "yarn_ext_factor = 0.5, and 1 is read"),
    "yarn and a table": (
        both(yarn(), table("rope_freqs.weight", [2.0] * 16)),
        UnsupportedModelError,
        "by yarn, rope_freqs.weight, which is not read",
    ),
    "one of two tables": (
        table("rope_factors_long.weight", [2.0] * 16),
        UnsupportedModelError,
        "by linear, rope_factors_long.weight, which is not read",
    ),
    "a short table": (
        table("rope_freqs.weight", [2.0] * 8),
        ModelError,
        "is 8, but the model has 16",
    ),
    "a table of zeros": (table("rope_freqs.weight", [0.0] * 16), ModelError, "has 0.0 in rope_freqs.weight"),
    "a table with NaN": (table("rope_freqs.weight", [math.nan] * 16), ModelError, "in rope_freqs.weight that are NaN"),
}


@pytest.mark.parametrize("name", BAD)
def test_what_cannot_be_read_is_one_line(tmp_path: Path, name: str) -> None:
    more, kind, message = BAD[name]
    write_model(tmp_path / "x.gguf", random_model(LlamaConfig, **SIZES), "llama", more=more)
    with pytest.raises(kind, match=message) as raised:
        _ = opened(tmp_path / "x.gguf").config
    assert str(raised.value).startswith("target model ")
    assert "\n" not in str(raised.value)
