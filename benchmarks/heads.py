"""A draft head beside no draft: tokens a second, steps per call, and the share of drafted layers that pass.

    python -m benchmarks.heads --target T --draft HEAD --quantize int8
    python -m benchmarks.heads --target T --draft HEAD --quantize int8 --peer openvino-int8

Prompts are questions of the task sql behind three solved ones, and the conversations that `training.head_prompts` holds
out, one at a time, by each variant in turn: no draft, `--depth auto`, and fixed shapes. Speed is the tokens of the best
answers by the seconds of all answers, prompts included. Decoding counts the seconds of the iterations alone. A variant
whose beams differ from those without a draft ends the run.

--peer: an engine of benchmarks.evidence, without a draft. It gets the token ids of the same prompts and makes as many
tokens as the best answer has. Its decoding is its seconds without those that one token takes, both with the prompt kept
from the call before, if it keeps prompts.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import torch

from benchmarks.common import markdown_table, numbers, publish, whole
from benchmarks.evidence import THEIRS, Child, able
from dsbd_cli import Engine, MethodConfig, Request, RequestResult, SamplingConfig, load
from dsbd_cli.cli.commands.trim import HELD_OUT_EVERY, HELD_OUT_MOST
from dsbd_cli.config.model import ModelSpec
from dsbd_cli.lab.tasks.choose import TASKS
from dsbd_cli.lab.tasks.dataset import with_shots
from dsbd_cli.models.tokenizer import HFCodec
from training.head_prompts import prompts

NONE, AUTO = "no draft", "auto"
SETS = ("sql", "chat")
FIXED = {1: ((1, 3), (2, 2), (3, 3), (4, 2)), 4: ((8, 1), (16, 1), (8, 2))}  # by beams: drafts per layer, layers


def conversations(name: str) -> Iterator[list[dict[str, str]]]:
    """Yield conversations that no head of `training/README.md` has learnt from."""
    if name == "sql":
        for record in with_shots(TASKS["sql"], 3).records():
            yield record.meta["messages"]  # type: ignore[misc]
    every, last = HELD_OUT_EVERY, HELD_OUT_EVERY - 1
    yield from (prompt for at, prompt in enumerate(islice(prompts(0), every * HELD_OUT_MOST)) if at % every == last)


@dataclass
class Variant:
    """One engine and what it has done.

    Attributes:
        seconds: whole and decoding, of each prompt. met: how often each drafted layer was reached. passed: how often it
            passed.
    """

    engine: Engine
    seconds: list[tuple[float, float]] = field(default_factory=list)
    tokens: int = 0
    calls: int = 0
    steps: int = 0
    passed: Counter[int] = field(default_factory=Counter)
    met: Counter[int] = field(default_factory=Counter)

    def answer(self, request: Request) -> RequestResult:
        """Answer one prompt, and count."""
        (result,) = self.engine.run([request])
        result.check()
        stats = result.stats
        self.seconds.append((stats.total_s, stats.draft_s + stats.target_s + stats.verify_s))
        self.tokens += result.hypotheses[0].num_tokens
        self.calls += stats.target_calls
        self.steps += stats.steps
        for step in stats.step_log:
            for layer in step.layers:
                self.met[layer.layer] += 1
                self.passed[layer.layer] += layer.passed
        return result

    def row(self, name: str, base: Variant) -> dict[str, str]:
        """Return its line of the table, beside a variant on the same prompts."""
        layers = ", ".join(f"{self.passed[layer] / count:.0%}" for layer, count in sorted(self.met.items()))
        whole, decoding = zip(*self.seconds, strict=True)
        pairs = list(zip(base.seconds, self.seconds, strict=True))
        ratios = [statistics.median(theirs[part] / ours[part] for theirs, ours in pairs) for part in (0, 1)]
        return {
            "draft": name,
            "tokens/s": f"{self.tokens / sum(whole):.1f}",
            "by no draft": f"{ratios[0]:.2f}",
            "decoding": f"{self.tokens / sum(decoding):.1f}",
            "by no draft ": f"{ratios[1]:.2f}",
            "steps per call": f"{self.steps / self.calls:.2f}",
            "layers passed": layers or "-",
        }


class Peer(Variant):
    """Another engine, without a draft."""

    def __init__(self, child: Child, engine: Engine) -> None:
        super().__init__(engine)
        self.child = child

    def ask(self, messages: list[dict[str, str]], beams: int, tokens: int) -> None:
        """Let it make so many tokens, and count them."""
        codec = self.engine.codec
        assert isinstance(codec, HFCodec)
        ids = [codec.encode_chat(messages)]
        time.sleep(0.5)  # threads of the one before may still spin
        # it may keep the prompt for the next call, so the first call alone reads it
        first, whole, again = (float(self.child.ask(ids, beams, count)["seconds"]) for count in (1, tokens, 1))
        time.sleep(0.5)
        self.seconds.append((first + whole - again, whole - again))
        self.tokens, self.steps, self.calls = self.tokens + tokens, self.steps + tokens, self.calls + tokens


def variants(base: Engine, beams: int, decode: str) -> dict[str, Variant]:
    """Return an engine for each variant, which share their models."""
    rule = {"search": "search", "sample": "coupled"}[decode]
    made = partial(MethodConfig, num_beams=beams, rule=rule)
    methods = {NONE: made(depth=0), AUTO: made()}
    methods |= {f"K = {wide}, D = {deep}": made(drafts_per_layer=wide, depth=deep) for wide, deep in FIXED[beams]}
    return {
        name: Variant(base.replace(method=method, draft=base.draft if method.depth else None, log_steps=True))
        for name, method in methods.items()
    }


def compare(
    base: Engine, beams: int, options: argparse.Namespace, source: str, child: Child | None
) -> tuple[str, list[dict[str, Any]]]:
    """Return a table of all variants on one set of prompts, and a line for each. child: process of the peer."""
    every = variants(base, beams, options.decode)
    peer = None if child is None else Peer(child, base)
    sampling = SamplingConfig(max_new_tokens=options.tokens, n_best=beams)
    # the first prompt warms up: programs of each shape, what --depth auto measures, the examples that all share
    for number, messages in enumerate(islice(conversations(source), options.prompts + 1)):
        request = Request(id=f"{source}-{number}", messages=tuple(messages), sampling=sampling)
        expected: list[tuple[int, ...]] = []
        for name, variant in every.items():
            token_ids = [beam.token_ids for beam in variant.answer(request).hypotheses]
            expected = token_ids if name == NONE else expected
            if token_ids != expected:
                raise SystemExit(f"{request.id}: {name} gives other beams than {NONE}")
            if not number:
                every[name] = Variant(variant.engine)
        if peer is not None:
            peer.ask(messages, beams, len(expected[0]))
            if not number:
                peer = Peer(peer.child, base)
    if peer is not None:
        every[options.peer] = peer
    title = f"**{source}, {beams} beam{'s' * (beams > 1)}, {options.prompts} prompts**"
    runs = [
        {"set": source, "beams": beams, "draft": name, "seconds": variant.seconds, "tokens": variant.tokens,
         "calls": variant.calls, "steps": variant.steps, "met": dict(variant.met), "passed": dict(variant.passed)}
        for name, variant in every.items()
    ]  # fmt: skip
    table = markdown_table([variant.row(name, every[NONE]) for name, variant in every.items()])
    print(f"{title}\n\n{table}\n", flush=True)
    return f"{title}\n\n{table}", runs


def main() -> None:
    """Measure, and write the report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", required=True)
    parser.add_argument("--draft", required=True, help="folder of a head or of a draft")
    parser.add_argument("--quantize", choices=["int8"])
    parser.add_argument("--num-beams", type=numbers, default=[1, 4], metavar="W,W")
    parser.add_argument("--decode", choices=["search", "sample"], default="search")
    parser.add_argument("--prompts", type=whole, default=12, help="of each set, one more warms up")
    parser.add_argument("--tokens", type=whole, default=64)
    parser.add_argument("--peer", choices=THEIRS)
    parser.add_argument("--name", default="heads", help="folder of the results")
    options = parser.parse_args()
    if options.peer and options.decode == "sample":
        parser.error("--peer searches with beams, and takes --decode search")
    if options.peer and not able([options.peer], most := max(options.num_beams)):
        parser.error(f"{options.peer} does not search with {most} beams")
    target = ModelSpec(options.target, dtype="bfloat16", quantize=options.quantize)
    draft = ModelSpec(options.draft, role="draft", dtype="bfloat16", quantize=options.quantize)
    base = load(target, draft, method=MethodConfig(num_beams=max(options.num_beams)))
    child = None if options.peer is None else Child(options.peer, Path(options.target), torch.get_num_threads())
    parts, runs = [], []
    for beams in options.num_beams:
        for source in SETS:
            part, lines = compare(base, beams, options, source, child)
            parts.append(part)
            runs += lines
    if child is not None:
        child.close()
    about = f"{options.decode}, {options.tokens} tokens at most, one prompt at a time. Ratios are medians of prompts."
    publish(options.name, runs, "A draft head beside no draft", about, *parts)


if __name__ == "__main__":
    main()
