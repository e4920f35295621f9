"""How every type of model of the installed transformers runs here, tried with tiny random checkpoints.

    python -m benchmarks.support                    try all (about a quarter of an hour), and write the table
    python -m benchmarks.support qwen3 gpt_oss      try these again, the others stay as they are

The table is `dsbd_cli/models/support.tsv`, which `dsbd models --support` prints. A type is what a config calls
`model_type`. Types are those that transformers lists as causal language models, encoder-decoder models of text, and
models that read text and images or sound, which are tried with text alone. A checkpoint has four layers and random
weights, in float32. Three beams of three prompts are compared with those of transformers' `generate`.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import transformers
from transformers.models.auto import modeling_auto as auto

from dsbd_cli import Engine, MethodConfig, ModelSpec, Request, SamplingConfig, load
from dsbd_cli.errors import DsbdError
from dsbd_cli.models.checkpoints.checkpoint import Checkpoint
from dsbd_cli.models.checkpoints.loader import PICTURE_MODELS
from dsbd_cli.models.checkpoints.support import TABLE, Support, read_table, write_table
from dsbd_cli.models.decoder.decoder_model import DecoderForestModel
from dsbd_cli.models.decoder.load import decoder_config_or_reason
from tests.helpers.checkpoints import numbers

V = 97
LAYERS = 4
PROMPTS = [torch.randint(5, V, (n,), generator=torch.Generator().manual_seed(n)).tolist() for n in (4, 17, 40)]
NEW = 8
MOST = 160  # characters of a reason
TRIED = "in our own decoder "  # in the reason of a type that it knows, but whose checkpoint it does not run
LARGEST = 300_000_000  # weights of a checkpoint that is tried

# Sizes by the names that configs give them.
SIZES: dict[str, int] = {
    **dict.fromkeys("hidden_size d_model n_embd embedding_size embed_dim word_embed_proj_dim".split(), 64),
    **dict.fromkeys("intermediate_size ffn_dim d_ff encoder_ffn_dim decoder_ffn_dim ffn_hidden_size".split(), 96),
    **dict.fromkeys("shared_intermediate_size shared_expert_intermediate_size".split(), 96),
    **dict.fromkeys("moe_intermediate_size expert_ffn_hidden_size".split(), 32),
    **dict.fromkeys("num_hidden_layers n_layer n_layers num_layers num_decoder_layers depth".split(), LAYERS),
    **dict.fromkeys("encoder_layers decoder_layers num_encoder_layers".split(), LAYERS),
    **dict.fromkeys("num_attention_heads n_head n_heads num_heads".split(), 4),
    **dict.fromkeys("encoder_attention_heads decoder_attention_heads".split(), 4),
    **dict.fromkeys("num_key_value_heads num_kv_heads n_head_kv".split(), 2),
    **dict.fromkeys("head_dim d_kv attention_head_dim rotary_dim d_head".split(), 16),
    **dict.fromkeys("num_experts n_routed_experts num_local_experts moe_num_experts".split(), 4),
    **dict.fromkeys("num_experts_per_tok top_k_experts moe_k moe_topk".split(), 2),
    **dict.fromkeys("vocab_size text_vocab_size decoder_vocab_size vocab_size_per_layer_input".split(), V),
    **dict.fromkeys("max_position_embeddings n_positions n_ctx max_target_positions".split(), 512),
    **{"max_source_positions": 512, "image_size": 28, "patch_size": 14, "sliding_window": 16, "window_size": 16},
    **{"n_group": 1, "topk_group": 1, "n_shared_experts": 1, "first_k_dense_replace": 1},
    **{"kv_lora_rank": 16, "q_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 16},
    **{"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16, "linear_value_head_dim": 16},
    **{"mamba_n_heads": 8, "mamba_d_head": 16, "mamba_d_state": 16, "mamba_n_groups": 2, "mamba_chunk_size": 8},
    "mamba_expand": 2,
}
IDS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1}
MAY_BE_NONE = (
    *("num_key_value_heads", "head_dim", "n_routed_experts", "n_shared_experts", "num_experts_per_tok"),
    "moe_intermediate_size",
)
MLA = {"num_key_value_heads": 4, "head_dim": 8, "qk_head_dim": 16}
# Lists and tables with an entry for each layer: the config's class makes them anew.
BY_LAYER = (
    "layer_types",
    "layers_block_type",
    "mlp_layer_types",
    "per_layer_config",
    "block_configs",
    "attention_layers",
)
# What a tiny config of a type needs beside these, and variants of a type (TYPE@VARIANT). A dot leads into a part.
MROPE = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]}
HALF_MROPE = {**MROPE, "partial_rotary_factor": 0.5, "mrope_section": [1, 1, 2]}
HYBRID = ["linear_attention", "full_attention"] * (LAYERS // 2)
CHUNKED = ["chunked_attention", "full_attention"] * (LAYERS // 2)
SLIDING = ["sliding_attention", "full_attention"] * (LAYERS // 2)
ROPES = {kind: {"rope_type": "default", "rope_theta": 1e4} for kind in ("sliding_attention", "full_attention")}
OTHERS: dict[str, Mapping[str, Any]] = {
    "granitemoehybrid@dense": {"num_local_experts": 0, "layer_types": ["full_attention"] * LAYERS},
    "falcon@alibi": {"alibi": True},
    **{name: {"text_config.rope_parameters": MROPE} for name in ("qwen2_vl", "qwen2_5_vl", "paddleocr_vl")},
    **{name: {"text_config.rope_parameters": MROPE} for name in ("qwen2_5_omni_thinker", "qwen3_vl", "cosmos3_omni")},
    **{
        name: {"text_config.rope_parameters": HALF_MROPE}
        for name in ("glm4v", "glm46v", "glmga", "glm_ocr", "glm4v_moe")
    },
    "qwen3_vl_moe": {"text_config.rope_parameters": MROPE},
    "cosmos3_edge": {"text_config.rope_parameters": MROPE},
    "granite4_vision": {
        "deepstack_layer_map": [[-1, 0]],
        "spatial_target_layers": [1],
        "downsample_rate": "1/2",
        "qformer_config.hidden_size": 64,
    },
    "chameleon": {"vocabulary_map": {"<image>": 3}},
    "emu3": {"vocabulary_map": {"<image>": 3}, "vq_config.base_channels": 32},
    "granite_docling": {"vision_config.out_hidden_size": 64},
    "fun_asr_nano": {"adaptor_config.intermediate_size": 16},
    "nemo_speechlm": {"head_config.audio_hidden_size": 64},
    "muse_spark": {"audio_config.out_hidden_size": 64},
    "inkling2": {"vision_config.text_hidden_size": 64},
    "molmo2": {"adapter_config.vision_feature_layer": [3, 2]},
    "gemma3n_text": {
        "intermediate_size": [96] * LAYERS,
        "activation_sparsity_pattern": [0.0] * LAYERS,
        "num_kv_shared_layers": 0,
    },
    "gemma4_text": {"global_head_dim": 32, "hidden_size_per_layer_input": 0, "num_kv_shared_layers": 0},
    "mistral4": {"head_dim": 16},
    "reformer": {"axial_pos_embds_dim": [16, 48], "axial_pos_shape": [16, 32]},
    **{name: {"layer_types": HYBRID} for name in ("granitemoehybrid",)},
    "bamba": {"attn_layer_indices": [1, 3]},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "llama4_text": {"no_rope_layers": [1, 1, 1, 0], "layer_types": CHUNKED},
    "llama4": {"text_config.no_rope_layers": [1, 1, 1, 0], "text_config.layer_types": CHUNKED},
    "laguna": {"num_attention_heads_per_layer": [4] * LAYERS},
    "cohere_compass_text": {"layer_types": SLIDING, "rope_parameters": ROPES},
    "cohere_compass": {"text_config.layer_types": SLIDING, "text_config.rope_parameters": ROPES},
    "gpt_neo": {"attention_types": [[["global", "local"], 2]]},
    "kimi_linear": {"num_experts_per_token": 2},
    "hrm_text": {"num_hidden_layers": 2, "num_layers_per_stack": None},
    "xmod": {"default_language": "en_XX"},
    "zaya": {"num_experts_per_tok": 1},
    "openai-gpt": {"n_positions": 512},
    "gptj": {"n_embd": 64, "rotary_dim": 8},
    "codegen": {"n_embd": 64, "rotary_dim": 8},
    "falcon_h1": {"mamba_d_ssm": 128},
    "mamba2": {"num_heads": 8, "head_dim": 16},
    "xlnet": {"d_head": 16},
    "deepseek_v2": {"topk_method": "greedy", "num_experts_per_tok": 2},
    "nemotron_h": {"moe_intermediate_size": 64},
    "nemotron_h_omni": {"text_config.moe_intermediate_size": 64},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 2},
    "zamba2": {"layers_block_type": ["mamba", "hybrid"] * 2},
}


def types() -> dict[str, tuple[str, Any]]:
    """Return what each type reads, and the transformers class that loads it."""
    text = dict.fromkeys(auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, ("text", transformers.AutoModelForCausalLM))
    paired = dict.fromkeys(
        auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES, ("encoder-decoder", transformers.AutoModelForSeq2SeqLM)
    )
    mixed = dict.fromkeys(
        auto.MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES, ("images or sound", transformers.AutoModelForMultimodalLM)
    )
    return text | paired | mixed


def tiny_config(kind: str) -> Any:
    """Return a small config of a type or of one of its variants."""
    name = kind.partition("@")[0]
    config_class: Any = transformers.CONFIG_MAPPING[name]
    settings = _small(config_class().to_dict())
    for path, value in OTHERS.get(kind, {}).items():
        part, (*steps, last) = settings, path.split(".")
        for step in steps:
            part = part.setdefault(step, {})
        part[last] = value
    return config_class.from_dict(settings)


def _small(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of a config, or of a part of one, with small sizes."""
    small: dict[str, Any] = {}
    for name, value in settings.items():
        if name in BY_LAYER or name in ("transformers_version", "architectures"):
            continue
        number = isinstance(value, int) and not isinstance(value, bool)
        small[name] = value
        if isinstance(value, dict) and (name.endswith("_config") or "model_type" in value):
            small[name] = _small(value)
        elif name in SIZES and (number or (value is None and name in MAY_BE_NONE)):
            small[name] = SIZES[name]
        elif name in IDS and value is not None:
            small[name] = IDS[name]
        elif name.endswith(("_token_id", "_token_index")) and number:
            small[name] = 3
    if "kv_lora_rank" in small:
        small |= {name: size for name, size in MLA.items() if name in small}
    if small.get("is_encoder_decoder"):
        small["decoder_start_token_id"] = IDS["bos_token_id"]
    elif "is_decoder" in small:
        small["is_decoder"] = True
    return small


def build(kind: str, loads: Any) -> Any:
    """Return a tiny random model in evaluation mode."""
    config = tiny_config(kind)
    with torch.device("meta"):
        count = sum(parameter.numel() for parameter in loads.from_config(config).parameters())
    if count > LARGEST:
        raise ValueError(f"even a small one has {count} weights")
    torch.manual_seed(0)
    model = loads.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.add_(0.2 * torch.randn_like(parameter))
            elif parameter.ndim == 2:
                parameter.mul_(2)
    return model.eval().requires_grad_(False)


@contextmanager
def suppress_missing_files() -> Iterator[None]:
    """Suppress the errors of models that do not run without an image or sound."""
    try:
        yield
    except (TypeError, ValueError) as error:
        if not any(word in str(error) for word in ("pixel", "image", "input_features", "state", "Bbox")):
            raise


def try_type(kind: str, reads: str, loads: Any) -> Support:
    """Make a checkpoint and run it."""
    if kind in PICTURE_MODELS:
        return Support(kind, reads, "not tried", why="it reads images alone")
    try:
        model = build(kind, loads)
        if reads != "encoder-decoder":
            with suppress_missing_files():
                model(input_ids=torch.tensor(PROMPTS[:1]), use_cache=False)
    except Exception as error:
        return Support(kind, reads, "not tried", why=f"a tiny one cannot be made: {_line(error)}")
    with tempfile.TemporaryDirectory() as folder:
        try:
            model.save_pretrained(folder)
            numbers().save_pretrained(folder)
            model = loads.from_pretrained(folder, dtype=torch.float32).eval()  # some weights are not saved
        except Exception as error:
            return Support(kind, reads, "not tried", why=f"a tiny one cannot be saved: {_line(error)}")
        spec = ModelSpec(folder, dtype="float32", device="cpu")
        try:
            engine = load(spec, None, method=MethodConfig(rule="search", num_beams=3, depth=0))
        except DsbdError as error:
            return Support(kind, reads, "refused", why=_line(error).replace(f"target model {folder!r}", "it"))
        except Exception as error:
            return Support(kind, reads, "crash", why=_line(error))
        assert isinstance(engine, Engine)
        own = isinstance(engine.target, DecoderForestModel)
        why = "" if own or reads == "encoder-decoder" else _reason(engine, Checkpoint.open(spec))
        try:
            equal = f"{_equal(engine, model)}/{len(PROMPTS)}"
        except Exception as error:
            equal, why = "", f"{why}; no beams to compare: {_line(error)}".removeprefix("; ")
        return Support(kind, reads, "decoder" if own else "adapted", engine.exactness, equal, why)


def _reason(engine: Engine, checkpoint: Checkpoint) -> str:
    """Return why our own decoder does not run a checkpoint."""
    reason = decoder_config_or_reason(checkpoint)
    if isinstance(reason, str):
        return reason
    (note,) = (note for note in engine.info.notes if TRIED in note)
    return note.partition(": ")[2]


def _equal(engine: Engine, model: Any) -> int:
    """Return for how many prompts all beams are transformers' own."""
    sampling = SamplingConfig(max_new_tokens=NEW, n_best=3, ignore_eos=True)
    results = engine.run([Request(prompt_ids=tuple(prompt), sampling=sampling) for prompt in PROMPTS])
    equal = 0
    for prompt, result in zip(PROMPTS, results, strict=True):
        if result.error is not None:
            raise result.error
        whole = model.generate(
            torch.tensor([prompt]), do_sample=False, num_beams=3, num_return_sequences=3, max_new_tokens=NEW,
            min_new_tokens=None, eos_token_id=-1, pad_token_id=0,
        )  # fmt: skip
        wanted = whole[:, -NEW:].tolist()
        equal += [list(beam.token_ids)[-NEW:] for beam in result.hypotheses] == wanted
    return equal


def _line(error: BaseException) -> str:
    said = " ".join(f"{'' if isinstance(error, DsbdError) else type(error).__name__ + ': '}{error}".split())
    return said if len(said) <= MOST else f"{said[: MOST - 1]}…"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("types", nargs="*", help="without any: all")
    chosen = parser.parse_args().types
    transformers.utils.logging.set_verbosity(50)
    transformers.utils.logging.disable_progress_bar()
    known = types()
    variants = {kind: known[kind.partition("@")[0]] for kind in OTHERS if "@" in kind}
    known |= variants
    torch.set_num_threads(1)
    if unknown := [kind for kind in chosen if kind not in known]:
        sys.exit(f"{unknown[0]} is no type of transformers {transformers.__version__}")
    rows = {row.type: row for row in read_table()} if chosen else {}
    for kind in chosen or known:
        rows[kind] = row = try_type(kind, *known[kind])
        print(json.dumps(row.cells()), flush=True)
    write_table([rows[kind] for kind in sorted(rows) if kind in known], transformers.__version__)
    print(f"{TABLE} is written")


if __name__ == "__main__":
    main()
