"""The request's own ids: how many layers a trimmed draft can hold with them, and what they cost.

    python -m benchmarks.own_ids coverage --target T
    python -m benchmarks.own_ids cost --target T --draft HEAD

coverage: answers of a target without a draft, `search`. A layer is held where the tokens of its W best pairs are all
among the ids: fixed ones, of most mass under the target's distributions on the prompts to learn from, and own ones, of
the prompt and of the target's best at the nodes before. Prompts are those of training.head_prompts; layers are counted
on those that are held out. Nothing is timed.
cost: forwards of a draft over the nodes of a layer, with own ids and without, in turn, in processor time.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from typing import Any

import torch
from torch import Tensor

from benchmarks.common import environment, markdown_table, results_folder, write_results
from dsbd_cli import Engine, MethodConfig, Request, SamplingConfig, load
from dsbd_cli.cli.commands.trim import HELD_OUT_EVERY, HELD_OUT_MOST
from dsbd_cli.config.model import ModelSpec
from dsbd_cli.engine.core.candidates import CandidateCount, Candidates, top_candidates
from dsbd_cli.engine.core.own_ids import OwnIds
from dsbd_cli.engine.drafting.logits import DraftLogits
from dsbd_cli.engine.iteration.observer import Observer
from dsbd_cli.engine.protocols import ForestInput
from dsbd_cli.engine.verify.base import LayerDraws, LayerView
from training.head_prompts import prompts

FIXED = (4096, 8192)
OWN = (0, 1024, 2048, 4096)
KEPT = (8, 16, 64)


def requests_of(held_out: bool, count: int, tokens: int) -> Iterator[Request]:
    """Conversations that are held out, or those to learn from."""
    sampling = SamplingConfig(max_new_tokens=tokens)
    for number, messages in enumerate(islice(prompts(0), HELD_OUT_EVERY * HELD_OUT_MOST)):
        if (number % HELD_OUT_EVERY == HELD_OUT_EVERY - 1) == held_out:
            count -= 1
            if count < 0:
                return
            yield Request(id=str(number), messages=tuple(messages), sampling=sampling)


class Said(Observer):
    """Keeps the logits of the target's last forest, and calls `layer` with them and the tokens that won."""

    attached = True

    def __init__(self, engine: Engine, layer: Callable[[Tensor, Tensor], None]) -> None:
        target, self._layer = engine.target, layer
        forward = target.forward

        def kept(batch: ForestInput, *, logits: bool = True) -> Tensor | None:
            output = forward(batch, logits=logits)
            self._logits = output
            return output

        target.forward = kept  # type: ignore[method-assign]
        engine.observe(self)

    def verified(self, view: LayerView, draws: LayerDraws) -> None:
        """One layer: of each row its nodes' logits [n, V], and the tokens [w] that go on."""
        assert self._logits is not None
        _, tokens = view.pair(draws.index)
        for row in view.valid.any(1).nonzero().flatten().tolist():
            nodes = view.node[row][view.valid[row]]
            self._layer(self._logits[row, nodes], tokens[row][draws.valid[row]])


def most_mass(engine: Engine, count: int, tokens: int) -> Tensor:
    """Tokens [V] by their mass under the target's distributions, the largest first."""
    mass = torch.zeros(engine.target.vocab_size, dtype=torch.float64)

    def add(logits: Tensor, _: Tensor) -> None:
        mass.add_(logits.double().softmax(-1).sum(0))

    method = MethodConfig(num_beams=1, depth=0)
    engine = engine.replace(method=method, batch_size=8)
    Said(engine, add)
    for result in engine.run(requests_of(False, count, tokens)):
        result.check()
    return mass.argsort(descending=True)


class Coverage:
    """Layers of one request after another, by fixed ids, own ids and tokens learnt of a node."""

    def __init__(self, order: Tensor) -> None:
        self.rank = torch.empty_like(order)
        self.rank[order] = torch.arange(len(order))
        self.held: dict[tuple[int, int, int, str], int] = {}
        self.sizes: dict[tuple[int, int], list[int]] = {}
        self.layers = 0
        self.begin([])

    def begin(self, prompt: Sequence[int]) -> None:
        """A request begins."""
        distinct = list(dict.fromkeys(prompt))
        self.own = {(fixed, kept): dict.fromkeys(self._further(distinct, fixed)) for fixed in FIXED for kept in KEPT}

    def _further(self, tokens: Sequence[int], fixed: int) -> list[int]:
        return [token for token in tokens if self.rank[token] >= fixed]

    def layer(self, logits: Tensor, won: Tensor) -> None:
        """Count a layer, then learn from it."""
        self.layers += 1
        best = logits.topk(max(KEPT)).indices
        for (fixed, kept), own in self.own.items():
            wanted, held = set(self._further(won.tolist(), fixed)), list(own)
            for room in OWN:
                for way, some in (("first", held[:room]), ("last", held[len(held) - min(room, len(held)) :])):
                    key = fixed, room, kept, way
                    self.held[key] = self.held.get(key, 0) + (wanted <= set(some))
            for token in self._further(best[:, :kept].flatten().tolist(), fixed):
                if token not in own:
                    own[token] = None

    def end(self) -> None:
        """Note how many own ids a request came to."""
        for key, own in self.own.items():
            self.sizes.setdefault(key, []).append(len(own))


def coverage(options: argparse.Namespace) -> None:
    """Print and write the shares of layers that are held."""
    runs: list[dict[str, Any]] = []
    order = None
    for beams in (1, 4):
        spec = ModelSpec(options.target, dtype=options.dtype)
        engine = load(spec, None, method=MethodConfig(rule="search", num_beams=beams, depth=0), batch_size=1)
        if order is None:
            order = most_mass(engine, options.learnt, options.tokens)
            del engine.target.forward  # type: ignore[method-assign]
        covered = Coverage(order)
        Said(engine, covered.layer)
        for request in requests_of(True, options.count, options.tokens):
            prompt = engine.codec.encode_chat(list(request.messages or ()))
            covered.begin(prompt)
            engine.generate(request)
            covered.end()
            print(f"W = {beams}: {covered.layers} layers", file=sys.stderr, flush=True)
        for (fixed, room, kept, way), held in covered.held.items():
            sizes = covered.sizes[fixed, kept]
            line = {"beams": beams, "fixed": fixed, "own": room, "kept": kept, "way": way, "layers": covered.layers}
            runs.append(line | {"held": held / covered.layers, "own_at_end": [statistics.median(sizes), max(sizes)]})
            print(runs[-1], flush=True)
    write_results(results_folder(options.name), runs, _report(runs))


def _report(runs: Sequence[dict[str, Any]]) -> str:
    rows = []
    for fixed in FIXED:
        for room in OWN:
            for way in ("first", "last"):
                row = {"fixed": str(fixed), "own": str(room), "full row keeps": way}
                for beams in (1, 4):
                    for kept in KEPT:
                        measured = next(
                            run for run in runs
                            if [run[name] for name in ("beams", "fixed", "own", "kept", "way")]
                            == [beams, fixed, room, kept, way]
                        )  # fmt: skip
                        row[f"W = {beams}, {kept} of a node"] = f"{100 * measured['held']:.1f}"
                rows.append(row)
    about = environment()
    layers = ", ".join(f"W = {run['beams']}: {run['layers']}" for run in runs[:: len(runs) // 2])
    return (
        f"# Layers whose W tokens are all among the ids, %\n\n`{about['command']}`, commit {about['commit']}. Layers: "
        f"{layers}.\n\n{markdown_table(rows)}"
    )


def cost(options: argparse.Namespace) -> None:
    """Print milliseconds of processor time of a drafted layer, and of learning, in turn."""
    torch.set_num_threads(options.threads)
    spec, draft_spec = ModelSpec(options.target, dtype=options.dtype), ModelSpec(options.draft, "draft")
    engine = load(spec, draft_spec, method=MethodConfig(rule="search", num_beams=4, depth=1))
    draft: Any = engine.draft
    rows, nodes, slots = options.rows, options.nodes, 256
    generator = torch.Generator().manual_seed(0)
    draft.reserve(rows, slots)
    places = torch.arange(nodes).expand(rows, -1)
    mask = torch.eye(slots, dtype=torch.bool)[:nodes].expand(rows, -1, -1)
    tokens = torch.randint(engine.target.vocab_size, (rows, nodes), generator=generator)
    index = torch.arange(slots).expand(rows, -1)
    wanted, ids = CandidateCount(58), draft.lm_head_ids
    vocabulary, times = engine.target.vocab_size, dict[str, list[float]]()

    def forward(own: Tensor | None) -> Candidates:
        batch = ForestInput(tokens, places, places, mask, index, own_ids=own)
        return DraftLogits.of(draft.forward(batch), ids, vocabulary, own).candidates(wanted)

    def learn(own: OwnIds) -> None:
        said = top_candidates(torch.randn(rows, 12, vocabulary, generator=generator), CandidateCount(64))
        nodes = torch.ones(rows, 12, dtype=torch.bool)
        began = time.process_time()
        own.learn(argparse.Namespace(valid=nodes), said)  # type: ignore[arg-type]
        times.setdefault("learn", []).append(time.process_time() - began)

    with torch.inference_mode():
        for number in range(options.repeats + 3):
            for room in (0, 1024, 2048, 4096):
                made = OwnIds.of(draft, vocabulary, rows, torch.device("cpu"), room) if room else None
                if made is not None:
                    made.places[:, :-1] = (~made.lacking[:-1]).nonzero().flatten()[: made.places.shape[1] - 1]
                forward(None if made is None else made.tokens)  # as many ids as before, so their memory is there
                own = None if made is None else made.tokens
                for name in ("first", "further"):
                    began = time.process_time()
                    forward(own)
                    times.setdefault(f"{room} {name}", []).append(time.process_time() - began)
            fresh = OwnIds.of(draft, vocabulary, rows, torch.device("cpu"))
            assert fresh is not None
            learn(fresh)
            if number == 2:
                times.clear()
    for name, seconds in times.items():
        print(f"{name}: {1e3 * statistics.median(seconds):.3f} ms", flush=True)


def main() -> None:
    """Run one of the two."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=["coverage", "cost"])
    parser.add_argument("--target", required=True)
    parser.add_argument("--draft")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--count", type=int, default=24, help="held-out prompts")
    parser.add_argument("--learnt", type=int, default=48, help="prompts that the fixed ids are from")
    parser.add_argument("--tokens", type=int, default=40)
    parser.add_argument("--nodes", type=int, default=8)
    parser.add_argument("--rows", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=200)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--name", default="own-ids")
    options = parser.parse_args()
    (coverage if options.what == "coverage" else cost)(options)


if __name__ == "__main__":
    main()
