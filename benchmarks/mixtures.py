"""Mixtures of experts with random weights of real shapes: tokens/s beside what the memory's bandwidth allows.

    python -m benchmarks.mixtures --shape qwen3-30b-a3b --quantize int4 --layers 48

Layers share their plain weights, which are packed for each layer, so that packed weights alone take memory. Texts mean
nothing, but each token is routed by its own scores, as in a trained model with balanced experts. The bound: the bytes
that one token reads, over the rate at which both threads read a block of memory, measured before and after.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import transformers
from torch import Tensor

from benchmarks.common import markdown_table, own_memory, publish
from dsbd_cli import Engine, MethodConfig, Request, SamplingConfig
from dsbd_cli.config.model import ModelSpec
from dsbd_cli.models.checkpoints.generation import CheckpointSettings
from dsbd_cli.models.decoder.config import DecoderConfig
from dsbd_cli.models.decoder.decoder_model import DecoderForestModel
from dsbd_cli.models.decoder.families import decoder_config_of
from dsbd_cli.models.decoder.load import DecoderParts, build_decoder, pack
from tests.helpers.toys import NumberCodec

SHAPES: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3-30b-a3b": (
        "Qwen3MoeConfig",
        {
            "hidden_size": 2048, "num_hidden_layers": 48, "num_attention_heads": 32, "num_key_value_heads": 4,
            "head_dim": 128, "intermediate_size": 6144, "moe_intermediate_size": 768, "num_experts": 128,
            "num_experts_per_tok": 8, "norm_topk_prob": True, "vocab_size": 151936,
        },
    ),
}  # fmt: skip
BLOCK = 1 << 31  # bytes that are read to measure the memory


def bandwidth() -> float:
    """Bytes per second that all threads read, the best of five."""
    block = torch.ones(BLOCK // 8, dtype=torch.int64)
    seconds = []
    for _ in range(5):
        start = time.perf_counter()
        block.sum()
        seconds.append(time.perf_counter() - start)
    return BLOCK / min(seconds)


def random_tensors(model_config: Any, config: DecoderConfig) -> dict[str, Callable[[], Tensor]]:
    """The tensors of a checkpoint, by name. Those of one shape are parts of one tensor."""
    with torch.device("meta"):
        network = transformers.AutoModelForCausalLM.from_config(model_config)
    tensors: dict[str, Callable[[], Tensor]] = {}
    made: dict[tuple[int, ...], Tensor] = {}

    def tensor(shape: tuple[int, ...]) -> Tensor:
        if shape not in made:
            spread = 1.0 if len(shape) == 1 else shape[-1] ** -0.5
            made[shape] = torch.randn(shape, generator=torch.Generator().manual_seed(0)).mul_(spread).bfloat16()
        return made[shape]

    for name, parameter in network.state_dict().items():
        tensors[name] = lambda shape=tuple(parameter.shape): tensor(shape)  # type: ignore[misc]
    return tensors


def built(shape: str, layers: int | None, quantize: str | None) -> DecoderForestModel:
    """A packed decoder with random weights."""
    kind, settings = SHAPES[shape]
    model_config = getattr(transformers, kind)(**settings)
    if layers is not None:
        model_config.num_hidden_layers = layers
    config = decoder_config_of(model_config)
    assert isinstance(config, DecoderConfig), config
    tensors = random_tensors(model_config, config)
    parts = DecoderParts(
        shape, config, tensors, torch.bfloat16, torch.device("cpu"), CheckpointSettings(kind, (), {}), None
    )
    model = build_decoder(parts, lambda: None, frozenset())
    few = torch.arange(64)[None]
    channels = {}
    if quantize is not None:  # channels of few tokens: which ones they are changes no time
        from dsbd_cli.models.decoder.pack import find_outliers

        shallow = model.shallow(1)
        found = find_outliers(shallow.decoder, lambda: shallow.plain(few))
        channels = {
            name: found.get(name, found.get(name.replace(name.split(".")[0], "0", 1))).tolist()
            for name, *_ in model.decoder.plain_products()
        }
    pack(model, ModelSpec(shape, quantize=quantize), channels or None)
    return model


def rate(model: DecoderForestModel, beams: int, rows: int, tokens: int) -> float:
    """Tokens per second of the rows' best beams, without the prompt's forward."""
    seconds = []
    for new in (1, tokens + 1):
        method = MethodConfig(rule="search", num_beams=beams, depth=0)
        engine = Engine(model, None, NumberCodec(model.vocab_size, ()), method, batch_size=rows)
        sampling = SamplingConfig(max_new_tokens=new)
        requests = [
            Request(prompt_ids=tuple(range(100 * row, 100 * row + 16)), sampling=sampling) for row in range(rows)
        ]
        start = time.perf_counter()
        for result in engine.run(requests):
            if result.error is not None:
                raise result.error
        seconds.append(time.perf_counter() - start)
    return rows * tokens / (seconds[1] - seconds[0])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, required=True)
    parser.add_argument("--layers", type=int, help="in place of all")
    parser.add_argument("--quantize", choices=("int8", "int4"))
    parser.add_argument("--tokens", type=int, default=24)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--name", default="mixtures", help="of the folder of results")
    options = parser.parse_args()
    start = time.perf_counter()
    model = built(options.shape, options.layers, options.quantize)
    packed_in, before, size = time.perf_counter() - start, bandwidth(), model.size
    cases, runs = ((1, 1), (4, 1), (4, 8)), list[dict[str, Any]]()
    for number in range(options.rounds + 1):
        for beams, rows in cases:
            runs.append({"beams": beams, "rows": rows, "tokens_per_s": rate(model, beams, rows, options.tokens)})
        if not number:
            runs.clear()  # a warm-up
    after = bandwidth()
    bound = (before + after) / 2 / size.read_bytes
    table = []
    for beams, rows in cases:
        rates = [run["tokens_per_s"] for run in runs if (run["beams"], run["rows"]) == (beams, rows)]
        middle = statistics.median(rates)
        share = f"{middle / bound:.2f}" if rows == 1 else "-"
        table.append({"beams": f"{beams}", "rows": f"{rows}", "tokens/s": f"{middle:.2f}", "of the bound": share})
    about = (
        f"{options.shape}, {model.layer_count} layers, {options.quantize or 'bfloat16'}, random weights: "
        f"{size.held_bytes / 1e9:.1f} GB in memory, {size.read_bytes / 1e9:.2f} GB read for a token; memory gives "
        f"{before / 1e9:.1f} and {after / 1e9:.1f} GB/s, which allows {bound:.1f} tokens/s. Packed in "
        f"{packed_in:.0f} s; the process takes {own_memory(os.getpid()) / 1e9:.1f} GB."
    )
    publish(options.name, runs, f"A mixture of experts: {options.shape}", about, markdown_table(table))


if __name__ == "__main__":
    main()
