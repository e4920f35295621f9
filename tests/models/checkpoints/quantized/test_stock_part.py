"""Transformers' model of a part of a quantised checkpoint."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, Qwen2MoeConfig, Qwen2MoeForCausalLM

from dsbd_cli.errors import ModelError
from dsbd_cli.models.checkpoints.quantized.groupwise import WeightTensors, quantized_tensors
from dsbd_cli.models.checkpoints.quantized.settings import Quantization, quantization_of
from dsbd_cli.models.checkpoints.quantized.stock_part import stock_part
from tests.models.checkpoints.quantized.packing import Layer, checkpoint

NAME, V, PART = "target model 'x'", 96, 64
SETTINGS = {"quant_method": "gptq", "bits": 4, "group_size": 32, "sym": False, "desc_act": True}
TOKENS = torch.arange(5, 25).unsqueeze(0)


def llama(layers: int = 3, *, tied: bool = False, **settings: Any) -> LlamaConfig:
    return LlamaConfig(
        vocab_size=V,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=tied,
        pad_token_id=V - 1,
        rope_parameters={"rope_type": "linear", "factor": 2.0, "rope_theta": 500.0},
        **settings,
    )


def quantised(config: Any, kind: Any = LlamaForCausalLM) -> tuple[Any, dict[str, Callable[[], Tensor]]]:
    """A random model whose linear layers are what their parts in GPTQ's form say, and all tensors of its files."""
    torch.manual_seed(0)
    model = kind(config).eval()
    tensors: dict[str, Callable[[], Tensor]] = {}
    for seed, (name, module) in enumerate(model.named_modules()):
        if isinstance(module, torch.nn.Linear) and name.endswith("_proj"):
            layer = Layer.draw(*module.weight.shape, seed=seed, ordered=True)
            layer.scales /= 100
            module.weight.data = layer.weight
            tensors |= checkpoint(layer.gptq(), name)
    plain = {name: tensor for name, tensor in model.state_dict().items() if f"{name[:-6]}qweight" not in tensors}
    for name in model.all_tied_weights_keys:
        del plain[name]
    return model, tensors | {name: (lambda tensor=tensor: tensor) for name, tensor in plain.items()}


def packed(tensors: dict[str, Callable[[], Tensor]]) -> WeightTensors:
    quantization = quantization_of(LlamaConfig(quantization_config=SETTINGS))
    assert isinstance(quantization, Quantization)
    return quantized_tensors(tensors, quantization, NAME)


@pytest.mark.parametrize("tied", [False, True])
def test_the_whole_model_is_transformers_own(tied: bool) -> None:
    model, tensors = quantised(llama(tied=tied))
    made = stock_part(llama(tied=tied), packed(tensors), torch.float32, 9, V + 1, NAME)
    assert not made.training
    assert not any(weight.requires_grad for weight in made.parameters())
    with torch.inference_mode():
        assert torch.equal(made(TOKENS).logits, model(TOKENS).logits)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_part_is_the_first_layers_and_tokens(dtype: torch.dtype) -> None:
    config = llama(quantization_config=SETTINGS)
    model, tensors = quantised(llama())
    made = stock_part(config, packed(tensors), dtype, 2, PART, NAME)
    assert (config.num_hidden_layers, config.vocab_size, config.quantization_config) == (3, V, SETTINGS)
    assert made.dtype == dtype
    assert made.model.rotary_emb.inv_freq.dtype == torch.float32
    model = model.to(dtype)
    model.model.rotary_emb = made.model.rotary_emb.__class__(model.config)  # `to` has rounded its buffers
    model.model.layers = model.model.layers[:2]
    with torch.inference_mode():
        assert torch.equal(made(TOKENS).logits, model(TOKENS).logits[..., :PART])


def test_experts_are_joined_as_transformers_joins_them() -> None:
    config = Qwen2MoeConfig(
        vocab_size=V,
        hidden_size=64,
        intermediate_size=96,
        moe_intermediate_size=32,
        shared_expert_intermediate_size=32,
        num_experts=4,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    model, tensors = quantised(config, Qwen2MoeForCausalLM)
    experts = model.model.layers[0].mlp.experts
    at = "model.layers.0.mlp.experts"
    del tensors[f"{at}.gate_up_proj"], tensors[f"{at}.down_proj"]
    for number in range(4):
        layers = [Layer.draw(*shape, seed=9 + number) for shape in ((32, 64), (32, 64), (64, 32))]
        for layer, name in zip(layers, ("gate", "up", "down"), strict=True):
            layer.scales /= 100
            tensors |= checkpoint(layer.gptq(), f"{at}.{number}.{name}_proj")
        experts.gate_up_proj.data[number] = torch.cat([layers[0].weight, layers[1].weight])
        experts.down_proj.data[number] = layers[2].weight
    made = stock_part(config, packed(tensors), torch.float32, 1, V, NAME)
    with torch.inference_mode():
        assert torch.equal(made(TOKENS).logits, model(TOKENS).logits)


def refused(tensors: dict[str, Callable[[], Tensor]], layers: int = 3) -> str:
    with pytest.raises(ModelError) as caught:
        stock_part(llama(), packed(tensors), torch.float32, layers, V, NAME)
    return str(caught.value)


def test_missing_tensors_and_other_shapes_are_named() -> None:
    _, tensors = quantised(llama())
    without = {name: read for name, read in tensors.items() if "layers.1.mlp.up_proj" not in name}
    assert refused(without) == (
        f"{NAME}: 1 weights are missing (model.layers.1.mlp.up_proj.weight): get the files again"
    )
    stock_part(llama(), packed(without), torch.float32, 1, V, NAME)
    other = {**tensors, **checkpoint(Layer.draw(32, 64).gptq(), "model.layers.0.mlp.up_proj")}
    said = "model.layers.0.mlp.up_proj.weight is 32 x 64, but must be 96 x 64"
    assert said in refused(other)


def test_biases_that_the_model_lacks_may_be_zero() -> None:
    model, tensors = quantised(llama())
    zeros = {"model.layers.0.mlp.up_proj.bias": lambda: torch.zeros(96)}
    made = stock_part(llama(), packed({**tensors, **zeros}), torch.float32, 3, V, NAME)
    with torch.inference_mode():
        assert torch.equal(made(TOKENS).logits, model(TOKENS).logits)
    ones = {"model.layers.0.mlp.up_proj.bias": lambda: torch.ones(96)}
    assert refused({**tensors, **ones}) == (
        f"{NAME}: the model has no model.layers.0.mlp.up_proj.bias, but the files hold one that is not zero"
    )
