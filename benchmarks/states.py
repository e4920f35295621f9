"""Recurrent layers over a forest: bytes of a request, share of the scans, tokens per second.

    python -m benchmarks.states --threads 1
    python -m benchmarks.states --only cost --repeats 3
    python -m benchmarks.states --only speed --rounds 1    # 110 s of one processor, 5.3 GiB
    python -m benchmarks.states --only decoder --rounds 7    # 100 s
    python -m benchmarks.states --shapes mamba2-tiny --nodes 4,12 --repeats 2 --tokens 4 --rounds 1    # a trial

Random weights; time depends on shapes alone. `cost`: `share` is the time of convolution, read, solve and fold (a
forward, and a move after which the common prefix is JOINED tokens longer) over that of the linear layers in the same
forward.

`speed`: transformers' beam search, ours without a draft and ours with one take turns on the same prompts. A few layers
of each full shape, so that three copies fit. The draft is the target's first quarter: the target's other layers add
little, and steps per call say how often the two agree. So this is what a draft of that agreement and of a quarter of
the cost is worth, not what one for a trained model is.

`decoder`: our own decoder and transformers' modules take turns on the same checkpoint, in int8 and without a draft.
"""

from __future__ import annotations

import argparse
import copy
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from tempfile import TemporaryDirectory
from typing import Any

import torch
import transformers

from benchmarks.common import markdown_table, publish
from benchmarks.speed import Outcome, Runner, measure, summarise
from dsbd_cli import Engine, MethodConfig, ModelSpec, Request, SamplingConfig
from dsbd_cli.engine.protocols import ForestInput
from dsbd_cli.models.checkpoints.checkpoint import Checkpoint
from dsbd_cli.models.checks.invariance import check
from dsbd_cli.models.load_model import load_model
from dsbd_cli.models.recurrent import mixers
from dsbd_cli.models.transformers_backend.causal import CausalForestModel
from dsbd_cli.models.transformers_backend.patching import PackedLinear, pack

COMMON = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
# four layers: the whole model would not fit beside its comparators
SHAPES: dict[str, tuple[str, dict[str, Any]]] = {
    "mamba2-1.3b": (
        "Mamba2Config",
        {**COMMON, "hidden_size": 2048, "num_hidden_layers": 4, "state_size": 128, "num_heads": 64, "head_dim": 64,
         "expand": 2, "n_groups": 1, "conv_kernel": 4, "vocab_size": 4096},
    ),
    "qwen3.5-like": (
        "Qwen3_5TextConfig",
        {**COMMON, "hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 4, "vocab_size": 4096,
         "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 256, "linear_num_key_heads": 16,
         "linear_num_value_heads": 32, "linear_key_head_dim": 128, "linear_value_head_dim": 128,
         "linear_conv_kernel_dim": 4,
         "layer_types": ["linear_attention"] * 3 + ["full_attention"]},
    ),
    "mamba2-tiny": (
        "Mamba2Config",
        {**COMMON, "hidden_size": 64, "num_hidden_layers": 2, "state_size": 16, "num_heads": 8, "head_dim": 16,
         "expand": 2, "n_groups": 1, "conv_kernel": 4, "vocab_size": 128},
    ),
}  # fmt: skip
SUFFIX = 24  # slots past the common prefix before a forward
JOINED = 3  # of them join the common prefix after it
PROMPT = 32  # for speed
WIDTH = 4  # beams
PRECISIONS = {"invariant": torch.float64, "fast": torch.float32}  # of states and sums, by --set numerics
OPINIONS = 6.0  # times the head's weights: else all tokens would be about as probable, and no draft would be taken
ECHO = 0.1  # times what the layers that a draft lacks add


@dataclass
class Clock:
    """Seconds spent in functions, by kind."""

    spent: dict[str, float] = field(default_factory=dict)

    def timed(self, kind: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """The same function, whose time is added up."""

        def call(*arguments: Any, **options: Any) -> Any:
            start = time.perf_counter()
            result = function(*arguments, **options)
            self.spent[kind] = self.spent.get(kind, 0.0) + time.perf_counter() - start
            return result

        return call

    @contextmanager
    def over_scans(self) -> Iterator[None]:
        """Models made inside have the time of their scans added up."""
        stock = dict(mixers.SCANS)
        mixers.SCANS.update({name: self.timed("scans", function) for name, function in stock.items()})
        try:
            yield
        finally:
            mixers.SCANS.update(stock)


def build(name: str, layers: int) -> Any:
    """A random model of a shape, as transformers makes it."""
    kind, settings = SHAPES[name]
    kinds = settings.get("layer_types")
    more = {} if kinds is None else {"layer_types": [kinds[index % len(kinds)] for index in range(layers)]}
    torch.manual_seed(0)
    config = getattr(transformers, kind)(**{**settings, **more, "num_hidden_layers": layers})
    made = transformers.AutoModelForCausalLM.from_config(config).eval().requires_grad_(False)
    made.generation_config.eos_token_id = None
    return made


def forward_of(tokens: torch.Tensor, branches: int, common_prefix: int, first: int) -> ForestInput:
    """Nodes [1, n] in slots from common prefix + first on, dealt to branches; each hangs on the last one of its
    branch."""
    count = tokens.shape[1]
    slots = torch.arange(common_prefix + first + count)
    at = slots[common_prefix + first :]
    same = (slots[common_prefix:] - at.unsqueeze(1)) % branches == 0
    mask = torch.cat(
        (torch.ones(count, common_prefix, dtype=torch.bool), same & (slots[common_prefix:] <= at.unsqueeze(1))), 1
    )
    positions = torch.where(slots < common_prefix, slots, common_prefix + (slots - common_prefix) // branches)
    return ForestInput(tokens, positions[at][None], at[None], mask[None], positions[None])


def costs(name: str, precision: str, length: int, nodes: list[int], repeats: int) -> list[dict[str, Any]]:
    """One line per number of nodes, after a prompt of this length."""
    clock = Clock()
    made = build(name, 4)
    pack(made)
    with clock.over_scans():
        model = CausalForestModel(made, name)
    model.keep_recurrent_states_in(PRECISIONS[precision])
    for path, module in made.named_modules():
        if isinstance(module, torch.nn.Linear | PackedLinear) and "lm_head" not in path:
            module.forward = clock.timed("products", module.forward)  # type: ignore[method-assign]
    prompt, suffix = torch.randint(3, model.vocab_size, (1, length)), torch.randint(3, model.vocab_size, (1, SUFFIX))
    places = torch.arange(length)[None]
    seen = torch.ones(1, length, length, dtype=torch.bool).tril()
    chain = ForestInput(prompt, places, places, seen, places, torch.tensor([0]), chain=True)
    same = torch.arange(length, length + SUFFIX)[None]
    lines = []
    with torch.inference_mode():
        for count in nodes:
            batch = forward_of(torch.randint(3, model.vocab_size, (1, count)), WIDTH, length, SUFFIX)
            model.reserve(1, length + SUFFIX + count + 1, SUFFIX + count)
            times: list[dict[str, float]] = []
            for _ in range(repeats + 1):
                model.clear(0)
                model.forward(chain, logits=False)
                model.forward(forward_of(suffix, 1, length, 0), logits=False)
                clock.spent.clear()
                clock.timed("forward", model.forward)(batch)
                clock.timed("scans", model.move)(same, same, torch.tensor([length + JOINED]))
                times.append(dict(clock.spent))
            middle = {kind: 1e3 * statistics.median(run[kind] for run in times[1:]) for kind in times[0]}
            lines.append(
                {
                    "shape": name,
                    "numerics": precision,
                    "prompt": length,
                    "nodes": count,
                    **{f"{kind}_ms": value for kind, value in middle.items()},
                    "share": statistics.median(run["scans"] / run["products"] for run in times[1:]),
                    # one state whatever W; transformers holds W
                    "state_bytes": model.recurrent_bytes(0),
                    "suffix_bytes": model.recurrent_bytes(SUFFIX + count) - model.recurrent_bytes(0),
                }
            )
            model.release()
    return lines


def pair(name: str, layers: int) -> tuple[Any, Any]:
    """A target, and a draft that is its first layers; the other layers of the target add little."""
    target, first = build(name, layers), max(1, layers // 4)
    target.get_output_embeddings().weight.mul_(OPINIONS)
    for key, weight in target.named_parameters():
        index = next((int(part) for part in key.split(".") if part.isdigit()), 0)
        if index >= first and key.endswith(("out_proj.weight", "o_proj.weight", "down_proj.weight")):
            weight.mul_(ECHO)
    draft = build(name, first)
    draft.load_state_dict(target.state_dict(), strict=False)
    return target, draft


def speeds(name: str, layers: int, depth: int, count: int, tokens: int, rounds: int) -> dict[str, list[Outcome]]:
    """Rounds of each method."""
    from tests.helpers.toys import NumberCodec

    plain, small = pair(name, layers)
    large = copy.deepcopy(plain)
    for made in (large, small):
        pack(made)
    target, draft = CausalForestModel(large, name), CausalForestModel(small, f"{name}, first layers")
    target.keep_recurrent_states_in(torch.float64)
    target.invariant = check(target).varies is None
    if not target.invariant:
        target.keep_recurrent_states_in(torch.float32)
    generator = torch.Generator().manual_seed(1)
    prompts = torch.randint(3, target.vocab_size, (count, PROMPT), generator=generator)
    texts: dict[str, list[tuple[int, ...]]] = {}

    def ours(label: str, **settings: Any) -> Runner:
        method = MethodConfig.of({"rule": "search", "num_beams": WIDTH, **settings})
        engine = Engine(target, draft if method.depth else None, NumberCodec(target.vocab_size), method, batch_size=1)
        sampling = SamplingConfig(max_new_tokens=tokens)
        requests = [
            Request(id=str(row), seed=row, prompt_ids=tuple(ids.tolist()), sampling=sampling)
            for row, ids in enumerate(prompts)
        ]

        def run() -> Outcome:
            start = time.perf_counter()
            results = list(engine.run(requests))
            seconds = time.perf_counter() - start
            texts[label] = [tuple(result.hypotheses[0].token_ids) for result in results]
            steps, calls, drafted = (
                sum(getattr(result.stats, key) for result in results) for key in ("steps", "target_calls", "drafted")
            )
            return Outcome(seconds, sum(map(len, texts[label])), steps / calls, drafted / calls)

        return run

    def theirs(label: str) -> Runner:
        def run() -> Outcome:
            start = time.perf_counter()
            out = [
                plain.generate(
                    ids[None],
                    attention_mask=torch.ones(1, PROMPT, dtype=torch.int64),
                    num_beams=WIDTH,
                    do_sample=False,
                    max_new_tokens=tokens,
                )[0, PROMPT:]
                for ids in prompts
            ]
            seconds = time.perf_counter() - start
            texts[label] = [tuple(ids.tolist()) for ids in out]
            return Outcome(seconds, sum(map(len, texts[label])))

        return run

    stock = "transformers beam search"
    runners = {
        stock: theirs(stock),
        "dsbd search, no draft": ours("none", depth=0),
        "dsbd search, draft": ours("draft", depth=depth, drafts_per_layer=2 * WIDTH),
        "dsbd search, auto": ours("auto", depth=8, drafts_per_layer=2 * WIDTH, adaptive_depth=True),
    }
    with torch.inference_mode():
        outcomes = measure(runners, rounds, name)
    same = {label: sum(a == b for a, b in zip(texts["none"], other, strict=True)) for label, other in texts.items()}
    print(f"{name}: of {count} texts as without a draft: {same}; same-text: {target.invariant}", flush=True)
    return outcomes


def decoders(name: str, layers: int, count: int, tokens: int, rounds: int) -> dict[str, list[Outcome]]:
    """Rounds of both ways to run a checkpoint: by our own decoder, and by transformers' modules."""
    from dsbd_cli.models.load_transformers import load_transformers
    from tests.helpers.checkpoints import numbers
    from tests.helpers.toys import NumberCodec

    with TemporaryDirectory() as folder:
        build(name, layers).to(torch.bfloat16).save_pretrained(folder)
        numbers().save_pretrained(folder)
        checkpoint = Checkpoint.open(ModelSpec(folder, dtype="float32", device="cpu", quantize="int8"))
        models = {"decoder": load_model(checkpoint).model, "transformers' modules": load_transformers(checkpoint).model}
    prompts = torch.randint(
        3, models["decoder"].vocab_size, (count, PROMPT), generator=torch.Generator().manual_seed(1)
    )

    def runner(model: Any) -> Runner:
        method = MethodConfig.of({"rule": "search", "num_beams": WIDTH, "depth": 0})
        engine = Engine(model, None, NumberCodec(model.vocab_size), method, batch_size=1)
        requests = [
            Request(id=str(row), prompt_ids=tuple(ids.tolist()), sampling=SamplingConfig(max_new_tokens=tokens))
            for row, ids in enumerate(prompts)
        ]

        def run() -> Outcome:
            start = time.perf_counter()
            made = sum(len(result.hypotheses[0].token_ids) for result in engine.run(requests))
            return Outcome(time.perf_counter() - start, made)

        return run

    runners = {way: runner(model) for way, model in models.items()}
    for run in runners.values():
        run()  # programs are built
    return measure(runners, rounds, name)


def decoder_line(name: str, outcomes: dict[str, list[Outcome]]) -> dict[str, Any]:
    """Medians of `decoders`, and the median of the ratios within a round."""
    speed = {way: [outcome.tokens / outcome.seconds for outcome in rounds] for way, rounds in outcomes.items()}
    ours, theirs = speed.values()
    ratio = statistics.median(own / other for own, other in zip(ours, theirs, strict=True))
    return {"shape": name, **{way: statistics.median(rates) for way, rates in speed.items()}, "ratio": ratio}


def cost_table(runs: Sequence[dict[str, Any]]) -> str:
    """Of `costs`."""
    return markdown_table(
        [
            {
                "shape": run["shape"],
                "numerics": run["numerics"],
                "prompt": str(run["prompt"]),
                "nodes": str(run["nodes"]),
                "linear layers": f"{run['products_ms']:.1f} ms",
                "conv, read, solve, fold": f"{run['scans_ms']:.1f} ms ({run['share']:.0%})",
                "forward": f"{run['forward_ms']:.1f} ms",
                "state, any W": f"{run['state_bytes'] / 2**20:.2f} MiB",
                "suffix": f"{run['suffix_bytes'] / 2**20:.2f} MiB",
            }
            for run in runs
        ]
    )


def main() -> None:
    parser = argparse.ArgumentParser(description="Cost, memory and speed of recurrent layers over a forest.")
    parser.add_argument("--shapes", default="mamba2-1.3b,qwen3.5-like")
    parser.add_argument("--only", default="cost,speed")
    parser.add_argument("--nodes", default="4,36", help="nodes of a forward, for cost: W, and W + D*K")
    parser.add_argument("--prompts", default="32,38", help="tokens of a prompt, for cost (models/recurrent/states.py)")
    parser.add_argument("--repeats", type=int, default=9, help="of a forward, for cost")
    parser.add_argument("--layers", type=int, default=4, help="of the target, for speed")
    parser.add_argument("--depth", type=int, default=4, help="of the draft, for speed")
    parser.add_argument("--requests", type=int, default=2, help="for speed")
    parser.add_argument("--tokens", type=int, default=32, help="of each text, for speed")
    parser.add_argument("--rounds", type=int, default=3, help="of all methods in turn, for speed")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--name", default="states")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    nodes, shapes = [int(item) for item in options.nodes.split(",")], options.shapes.split(",")
    only = options.only.split(",")
    runs, parts = list[dict[str, Any]](), list[str]()
    if "cost" in only:
        lengths = [int(item) for item in options.prompts.split(",")]
        asked = [(name, kind, length) for name in shapes for kind in PRECISIONS for length in lengths]
        runs += [line for case in asked for line in costs(*case, nodes, options.repeats)]
        about = f"Four layers of each full shape, medians of {options.repeats}."
        parts.append(f"## Cost\n\n{about}\n\n{cost_table(runs)}")
    for name in shapes if "speed" in only else ():
        summaries, rows = summarise(
            speeds(name, options.layers, options.depth, options.requests, options.tokens, options.rounds)
        )
        runs += [{"shape": name, "layers": options.layers, **run} for run in summaries]
        about = (
            f"{options.layers} layers of the full shape, the draft is the first {max(1, options.layers // 4)}; "
            f"W = {WIDTH}, one request at a time, {options.tokens} tokens each."
        )
        parts.append(f"## Speed: {name}\n\n{about}\n\n{markdown_table(rows)}")
    if "decoder" in only:
        lines = [
            decoder_line(name, decoders(name, options.layers, options.requests, options.tokens, options.rounds))
            for name in shapes
        ]
        runs += lines
        shown = [
            {key: value if isinstance(value, str) else f"{value:.2f}" for key, value in line.items()} for line in lines
        ]
        about = f"Tokens/s, int8, {options.layers} layers of the full shape, W = {WIDTH}, one request at a time."
        parts.append(f"## Our own decoder beside transformers' modules\n\n{about}\n\n{markdown_table(shown)}")
    publish(options.name, runs, "Recurrent layers over a forest", "", *parts)


if __name__ == "__main__":
    main()
