"""Quantised checkpoints of a small Llama in all forms that are read, large enough that kernels serve their products."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, GgufConfig, LlamaConfig

from dsbd_cli import Engine, ModelSpec, Request, SamplingConfig, load
from tests.helpers.checkpoints import byte_level, wrap
from tests.helpers.gguf_models import random_model, write_model
from tests.models.checkpoints.quantized.packing import Layer, compressed_config, config

SETTINGS: dict[str, Any] = {
    "vocab_size": 400, "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 256, "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 1,
    "tie_word_embeddings": False, "architectures": ["LlamaForCausalLM"],
}  # fmt: skip
GGUF = {  # type -> scale of its random blocks, with which a weight is about 0.05
    "Q4_0": 0.01, "Q4_1": 0.005, "Q4_K": 1e-4, "Q8_0": 7e-4, "IQ4_NL": 7e-4, "MXFP4": 2.0**-6,
}  # fmt: skip
OTHER_GGUF = {
    "Q5_0": 0.005, "Q5_1": 0.003, "Q2_K": 0.004, "Q3_K": 0.001, "Q5_K": 5e-5, "Q6_K": 4e-5, "IQ4_XS": 4e-5,
}  # fmt: skip
MIXED = dict.fromkeys(("attn_v", "ffn_down", "output"), ("Q6_K", OTHER_GGUF["Q6_K"]))  # as in Q4_K_M
SAFETENSORS: dict[str, Any] = {
    "gptq": config("gptq", bits=4, group_size=32, sym=False, desc_act=True),
    "awq": config("awq", bits=4, group_size=32, version="gemm", zero_point=True),
    "compressed-tensors": compressed_config(symmetric=False),
}
FORMS = (*(f"gguf-{kind.lower()}" for kind in GGUF), *SAFETENSORS)
ALL_FORMS = (*FORMS, *(f"gguf-{kind.lower()}" for kind in OTHER_GGUF), "gguf-q4_k_m")
TOKENS = torch.arange(5, 45).unsqueeze(0)
PROMPTS = ("The quick brown fox", "select name", "def f(x):", "over the lazy dog", "a")


def write_quantized(folder: Path, form: str) -> tuple[Path, Any]:
    """Write a checkpoint. Returns its path and transformers' model of the same weights, dequantised, in float32."""
    path, model = write_form(folder, form)
    if form in SAFETENSORS:
        return path, model
    plain = AutoModelForCausalLM.from_pretrained(
        folder, gguf_file=path.name, dtype=torch.float32, quantization_config=GgufConfig(dequantize=True)
    )
    return path, plain.eval()


def write_form(folder: Path, form: str) -> tuple[Path, Any]:
    """Write a checkpoint in one of ALL_FORMS. Returns its path and the model, which has the checkpoint's weights where
    that is not GGUF."""
    model = random_model(LlamaConfig, **SETTINGS)
    if form in SAFETENSORS:
        return folder, write_safetensors(folder, form, model)
    kind, others = form.removeprefix("gguf-").upper(), {}
    if kind == "Q4_K_M":
        kind, others = "Q4_K", MIXED
    path = folder / "model.gguf"
    write_model(path, model, "llama", kind=kind, scale=(GGUF | OTHER_GGUF)[kind], others=others)
    return path, model


def write_safetensors(folder: Path, form: str, model: Any) -> Any:
    """Write a model whose linear layers, without the LM head, get random weights in a form of SAFETENSORS. Returns it
    with these weights."""
    tensors: dict[str, Tensor] = {}
    orders: dict[tuple[str, int], Tensor] = {}
    for seed, (name, module) in enumerate(model.named_modules()):
        if isinstance(module, torch.nn.Linear) and name != "lm_head":
            layer = Layer.draw(*module.weight.shape, seed=seed, ordered=form == "gptq")
            layer.scales /= 64
            # layers with the same input have the same order
            layer.group_of = orders.setdefault((name.rpartition(".")[0], layer.levels.shape[1]), layer.group_of)
            module.weight.data = layer.weight
            if form == "compressed-tensors":
                parts = layer.compressed(symmetric=False)
            else:
                parts = layer.gptq() if form == "gptq" else layer.awq()
            tensors |= {f"{name}.{part}": tensor.contiguous() for part, tensor in parts.items()}
    for name, tensor in model.state_dict().items():
        layer_name = name.removesuffix(".weight")
        if not any(other.startswith(f"{layer_name}.") for other in tensors):
            tensors[name] = tensor.half() if tensor.dim() > 1 else tensor
            tensor.copy_(tensors[name])
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    settings = model.config.to_dict() | {"dtype": "float16"} | vars(SAFETENSORS[form])
    (folder / "config.json").write_text(json.dumps(settings))
    wrap(byte_level()).save_pretrained(folder)
    return model


def loaded(path: Path, draft: ModelSpec | None = None, batch_size: int = 1, **settings: Any) -> Any:
    return load(ModelSpec(str(path), dtype="float32", **settings), draft, batch_size=batch_size)


def requests() -> list[Request]:
    sampling = SamplingConfig(max_new_tokens=12)
    return [Request(prompt, id=str(number), sampling=sampling) for number, prompt in enumerate(PROMPTS)]


def texts(engine: Engine) -> list[tuple[int, ...]]:
    return [tuple(result.hypotheses[0].token_ids) for result in engine.generate(requests())]


def logits(engine: Any) -> torch.Tensor:
    with torch.inference_mode():
        result: torch.Tensor = engine.target.plain(TOKENS).float()
    return result


def apart(computed: torch.Tensor, plain: Any) -> float:
    """Root mean square of the difference, in standard deviations of what is wanted."""
    with torch.inference_mode():
        wanted = plain(input_ids=TOKENS, use_cache=False).logits
    return float((computed - wanted).square().mean().sqrt() / wanted.std())
