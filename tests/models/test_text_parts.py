"""Models that also read images or sound run for their text: on our own decoder where it knows the text part."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from dsbd_cli import MethodConfig, ModelSpec, Request, SamplingConfig, load
from dsbd_cli.engine.decoding.engine import Engine
from dsbd_cli.errors import InvalidRowError
from dsbd_cli.models.checkpoints.checkpoint import Checkpoint
from dsbd_cli.models.checkpoints.text_part import of_text, text_name
from dsbd_cli.models.decoder.decoder_model import DecoderForestModel
from dsbd_cli.models.load_model import load_model
from dsbd_cli.models.transformers_backend.causal import CausalForestModel
from dsbd_cli.ops.select import quantize_missing
from tests.helpers.quantized_files import SETTINGS, write_safetensors
from tests.models.decoders import DECODERS, V, save_decoder

VISION = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 4}
TOWER = {**VISION, "image_size": 28, "patch_size": 14}
QWEN = {"depth": 1, "num_heads": 4, "patch_size": 14}
MROPE = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [4, 6, 6]}

# name -> (config class, text part: a name of DECODERS, changes of its settings, vision_config and other settings)
KNOWN: dict[str, tuple[str, str, Mapping[str, Any], Mapping[str, Any]]] = {
    "gemma3": ("Gemma3Config", "gemma3", {}, {"vision_config": TOWER, "mm_tokens_per_image": 4}),
    "mistral3": ("Mistral3Config", "ministral3", {"model_type": "ministral3"}, {"vision_config": TOWER}),
    "llava": ("LlavaConfig", "llama", {"model_type": "llama"}, {"vision_config": TOWER}),
    "idefics3": ("Idefics3Config", "llama", {"model_type": "llama"}, {"vision_config": TOWER}),
    "glm4v": (
        "Glm4vConfig",
        "glm4",
        {"hidden_size": 128, "rope_parameters": {**MROPE, "partial_rotary_factor": 0.5, "mrope_section": [2, 3, 3]}},
        {"vision_config": {**QWEN, "hidden_size": 32, "intermediate_size": 48, "out_hidden_size": 128}},
    ),
    "qwen2-vl": (
        "Qwen2VLConfig",
        "qwen2",
        {"rope_parameters": MROPE},
        {"vision_config": {**QWEN, "embed_dim": 32, "hidden_size": 128}},
    ),
    "qwen3-vl": (
        "Qwen3VLConfig",
        "qwen3",
        {"rope_parameters": MROPE},
        {
            "vision_config": {
                **QWEN, "hidden_size": 32, "intermediate_size": 48, "out_hidden_size": 64,
                "num_position_embeddings": 16, "deepstack_visual_indexes": [0],
            }
        },
    ),
}  # fmt: skip


def build(name: str, **changes: Any) -> Any:
    """Return a random model in evaluation mode, whose text part is that of a decoder's test."""
    kind, text, own, others = KNOWN[name]
    torch.manual_seed(0)
    config = getattr(transformers, kind)(text_config={**DECODERS[text][1], **own, **changes}, **others)
    model: Any = transformers.AutoModelForMultimodalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.add_(0.2 * torch.randn_like(parameter))
            else:
                parameter.mul_(4)
    return model.eval().requires_grad_(False)


def engine_of(folder: Path) -> Engine:
    method = MethodConfig(rule="search", num_beams=3, depth=0)
    engine = load(ModelSpec(str(folder), dtype="float32", device="cpu"), None, method=method)
    assert isinstance(engine, Engine)
    assert not any("through transformers" in note for note in engine.info.notes)
    return engine


@pytest.mark.parametrize("name", KNOWN)
def test_known_text_parts_run_on_our_own_decoder(name: str, tmp_path: Path) -> None:
    """All beams of transformers' whole model, for a short and a long prompt. A row with an image fails alone."""
    theirs = build(name)
    engine = engine_of(save_decoder(tmp_path, theirs))
    assert isinstance(engine.target, DecoderForestModel)
    assert engine.target.architecture == type(theirs).__name__
    prompts = [torch.randint(5, V, (length,), generator=torch.Generator().manual_seed(length)) for length in (6, 200)]
    sampling = SamplingConfig(max_new_tokens=8, n_best=3, ignore_eos=True)
    requests = [Request(prompt_ids=tuple(prompt.tolist()), sampling=sampling) for prompt in prompts]
    seen, *results = engine.run([Request(image="a.png", sampling=sampling), *requests])
    assert isinstance(seen.error, InvalidRowError)
    assert "the target reads text" in str(seen.error)
    for prompt, result in zip(prompts, results, strict=True):
        wanted = theirs.generate(
            prompt[None], do_sample=False, num_beams=3, num_return_sequences=3, max_new_tokens=8, eos_token_id=-1,
            pad_token_id=0,
        )  # fmt: skip
        assert [list(beam.token_ids) for beam in result.hypotheses] == wanted[:, len(prompt) :].tolist()


def test_a_text_part_that_is_not_known_runs_through_transformers(tmp_path: Path) -> None:
    text = {**DECODERS["llama"][1], "model_type": "cohere2", "layer_types": ["full_attention"] * 3}
    config = transformers.AyaVisionConfig(
        text_config=text, vision_config={**TOWER, "model_type": "siglip_vision_model"}
    )
    model = transformers.AutoModelForMultimodalLM.from_config(config)
    engine = engine_of(save_decoder(tmp_path, model))
    assert isinstance(engine.target, CausalForestModel)
    sampling = SamplingConfig(max_new_tokens=4, ignore_eos=True)
    seen, told = engine.run([Request(image="a.png", sampling=sampling), Request("5 6", sampling=sampling)])
    assert "the target reads text" in str(seen.error)
    assert len(told.hypotheses[0].token_ids) == 4


def test_tensors_of_today_and_of_earlier_files(tmp_path: Path) -> None:
    """Files of `language_model.model` and of `model.language_model` hold the same model."""
    folder = save_decoder(tmp_path, build("llava"))
    file, bits = folder / "model.safetensors", list[Any]()
    weights = load_file(file)
    for old, new in (("", ""), ("language_model.model.", "model.language_model."), ("language_model.lm_", "lm_")):
        weights = {name.replace(old, new) if old and name.startswith(old) else name: weights[name] for name in weights}
        save_file(weights, file, metadata={"format": "pt"})
        engine = engine_of(folder)
        assert isinstance(engine.target, DecoderForestModel)
        bits.append(engine.target.plain(torch.arange(5, 40)[None]))
    assert all(torch.equal(bits[0], other) for other in bits)


@pytest.mark.parametrize(
    ("name", "alone"),
    [
        ("language_model.model.layers.0.mlp.up_proj.weight", "model.layers.0.mlp.up_proj.weight"),
        ("model.language_model.norm.weight", "model.norm.weight"),
        ("language_model.backbone.norm_f.weight", "model.norm_f.weight"),
        ("model.text_model.embed_tokens.weight", "model.embed_tokens.weight"),
        ("language_model.lm_head.weight", "lm_head.weight"),
        ("lm_head.weight", None),
        ("model.layers.0.mlp.up_proj.weight", None),
        ("vision_tower.vision_model.encoder.layers.0.mlp.fc1.weight", None),
    ],
)
def test_names_of_the_text_part(name: str, alone: str | None) -> None:
    assert text_name(name) == alone


def test_tensors_of_the_text_part() -> None:
    assert of_text(["language_model.norm.weight", "vision.norm.weight"]) == {"language_model.norm.weight"}
    assert of_text(["model.norm.weight", "visual.norm.weight"]) == {"model.norm.weight"}
    assert of_text(["model.norm.weight", "lm_head.weight"]) == {"model.norm.weight", "lm_head.weight"}


@pytest.mark.parametrize("name", ["llava", "qwen2-vl"])
@pytest.mark.skipif(quantize_missing("stored") is not None, reason="no kernel of stored weights on this processor")
def test_quantised_files(name: str, tmp_path: Path) -> None:
    """The text part runs as the file is. The other part's layers are not cut with its own."""
    sizes = {key: value for key, value in SETTINGS.items() if key != "architectures"} | {"num_hidden_layers": 6}
    torch.manual_seed(0)
    if name == "llava":
        tower = {**TOWER, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 6}
        config: Any = transformers.LlavaConfig(text_config={"model_type": "llama", **sizes}, vision_config=tower)
    else:
        tower = {**QWEN, "depth": 5, "embed_dim": 64, "hidden_size": 256}
        rope = {**MROPE, "mrope_section": [8, 12, 12]}
        config = transformers.Qwen2VLConfig(text_config={**sizes, "rope_parameters": rope}, vision_config=tower)
    model = transformers.AutoModelForMultimodalLM.from_config(config, dtype=torch.float32).eval()
    theirs = write_safetensors(tmp_path, "gptq", model)
    for quantize, limit in ((None, 0.1), ("none", 1e-5)):
        spec = ModelSpec(str(tmp_path), dtype="float32", device="cpu", quantize=quantize)
        forest = load_model(Checkpoint.open(spec)).model
        assert isinstance(forest, DecoderForestModel)
        assert (forest.stored_form is None) == (quantize == "none")
        ids = torch.arange(5, 45)[None]
        with torch.inference_mode():
            wanted = theirs(input_ids=ids, use_cache=False).logits
        assert float((forest.plain(ids) - wanted).square().mean().sqrt() / wanted.std()) <= limit
