"""Tokens per second with layers that run as programs, and with the same kernels called layer by layer.

    python -m benchmarks.programs --target models/smollm2-135m-instruct --num-beams 1,4
    python -m benchmarks.programs --target models/qwen2.5-coder-1.5b-instruct --quantize int8
    python -m benchmarks.programs --target models/smollm2-135m-instruct --draft models/smollm2-8 --rule coupled

Chat prompts one at a time (plain ones where the model has no chat template). The two ways take turns at every prompt
after a warm-up; their answers are to be the same bits. The time of reading the prompt counts, and so does that of
building programs.
"""

from __future__ import annotations

import argparse
import itertools
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import dsbd_cli
from benchmarks.common import markdown_table, numbers, publish
from benchmarks.equal import encoded
from benchmarks.instruct_prompts import prompts
from benchmarks.invariance import signature
from dsbd_cli import Engine, MethodConfig, ModelSpec, Request, SamplingConfig
from dsbd_cli.models.decoder.decoder_model import DecoderForestModel

PROGRAMS, CALLED = "programs", "layer by layer"


@contextmanager
def way(name: str, engine: Engine) -> Iterator[None]:
    """How layers of the engine's models run inside."""
    decoders = [model.decoder for model in (engine.target, engine.draft) if isinstance(model, DecoderForestModel)]
    before = [decoder.ops for decoder in decoders]
    for decoder in decoders:
        decoder.ops = replace(decoder.ops, program=decoder.ops.program if name == PROGRAMS else None)
    yield
    for decoder, ops in zip(decoders, before, strict=True):
        decoder.ops = ops


def main() -> None:
    """See the module's docstring."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", required=True, help="folder of the model")
    parser.add_argument("--draft", default="none", help="folder of the draft, or none")
    parser.add_argument("--rule", default="search")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--quantize")
    parser.add_argument("--num-beams", type=numbers, default=[4], help="several, by commas")
    parser.add_argument("--prompts", type=int, default=6)
    parser.add_argument("--max-new-tokens", type=int, default=64)
    parser.add_argument("--name", default="programs", help="folder of the results")
    options = parser.parse_args()
    draft = (
        None if options.draft == "none" else ModelSpec(options.draft, dtype=options.dtype, quantize=options.quantize)
    )
    first = dsbd_cli.load(
        ModelSpec(options.target, dtype=options.dtype, quantize=options.quantize),
        draft,
        method=MethodConfig.of({"rule": options.rule, **({} if draft else {"depth": 0})}),
    )
    if not isinstance(first.target, DecoderForestModel) or first.target.ops.program is None:
        parser.error(f"{options.target} runs no programs here")
    sampling = SamplingConfig(max_new_tokens=options.max_new_tokens)
    runs, lines = list[dict[str, object]](), list[dict[str, str]]()
    for num_beams in options.num_beams:
        method = MethodConfig.of({"rule": options.rule, "num_beams": num_beams, **({} if draft else {"depth": 0})})
        engine = Engine(first.target, first.draft, first.codec, method, batch_size=1)
        seconds, tokens, same = dict.fromkeys((PROGRAMS, CALLED), 0.0), 0, 0
        for number, text in enumerate(itertools.islice(prompts(0), options.prompts + 1)):
            request = Request(prompt_ids=encoded(first.codec, text), sampling=sampling)
            bits = []
            for name in seconds:
                with way(name, engine):
                    start = time.perf_counter()
                    (result,) = engine.run([request])
                    taken = time.perf_counter() - start
                bits.append(signature(result))
                if number:  # the first is a warm-up
                    seconds[name] += taken
                    count = len(result.hypotheses[0].token_ids)
                    line = {"way": name, "num_beams": num_beams, "prompt": number, "seconds": taken, "tokens": count}
                    runs.append(line)
            tokens += count if number else 0
            same += bool(number) and bits[0] == bits[1]
        speeds = {name: tokens / taken for name, taken in seconds.items()}
        lines.append(
            {
                "W": str(num_beams),
                **{f"tokens/s, {name}": f"{speed:.2f}" for name, speed in speeds.items()},
                "ratio": f"{speeds[PROGRAMS] / speeds[CALLED]:.2f}",
                "answers of the same bits": f"{same} of {options.prompts}",
            }
        )
        about = f"One chat prompt at a time, {options.max_new_tokens} new tokens."
        publish(options.name, runs, "Layers as programs", about, markdown_table(lines))


if __name__ == "__main__":
    main()
