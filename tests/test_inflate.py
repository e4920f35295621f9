"""The inflated model computes the small one's function. Guards: benchmarks with the acceptance of another model."""

from __future__ import annotations

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.inflate import Shape, inflate


def small(kv_heads: int = 4) -> LlamaForCausalLM:
    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=60,
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=kv_heads,
            max_position_embeddings=128,
            tie_word_embeddings=True,
        )
    ).eval()
    for parameter in model.parameters():
        if parameter.dim() > 1:
            parameter.data.normal_(0, 0.2)
    return model


@pytest.mark.parametrize("shape", [Shape(64, 3, 8, 8, 16, 80, 90), Shape(96, 2, 8, 4, 32, 48, 60)])
def test_logits_are_the_small_models(shape: Shape) -> None:
    model = small()
    large = inflate(model, shape)
    tokens = torch.randint(0, 60, (2, 40), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        wanted, logits = model(tokens).logits, large(tokens).logits
    assert float((wanted - logits[..., :60]).abs().max()) < 1e-4 * float(wanted.abs().max())
    if shape.vocabulary > 60:
        assert float(logits[..., 60:].max()) < float(wanted.min()) - 20
    for name in ("q_proj", "k_proj", "v_proj"):
        weight = getattr(large.model.layers[-1].self_attn, name).weight
        assert float((weight == 0).double().mean()) < 0.6, "mostly random, so that it costs what real weights cost"


def test_positions_are_as_exact_in_bfloat16() -> None:
    """Guards rotary frequencies that are rounded with the weights: the model of long texts would be another one."""
    model, shape = small(), Shape(64, 3, 8, 8, 16, 80, 90)
    exact, rounded = inflate(model, shape), inflate(model, shape, torch.bfloat16)
    assert next(rounded.parameters()).dtype == torch.bfloat16
    assert torch.equal(rounded.model.rotary_emb.inv_freq, exact.model.rotary_emb.inv_freq)


def test_what_does_not_fit_is_refused() -> None:
    with pytest.raises(ValueError, match="does not fit"):
        inflate(small(), Shape(32, 2, 4, 4, 8, 48, 60))
    with pytest.raises(ValueError, match="does not fit"):
        inflate(small(kv_heads=2), Shape(64, 3, 8, 8, 16, 80, 90))
