"""The distribution of an iteration with kernels on, every branch enumerated, against plain beam sampling.

Kernels make their own noise. In triton's interpreter a chooser stands in for it: where a kernel asks for perturbed
log-probabilities, it takes each possible order in turn, with the probability that the kernel's own numbers give it, and
so it does with the test of a draft. What follows that iteration is drawn by the oracle.

Guards: draws from another distribution than the one that drafts are tested against; beams, weights or ends of the wrong
node.
"""

from __future__ import annotations

import copy
import math
import sys
from collections import defaultdict
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch

from dsbd_cli.config.method import MethodConfig
from dsbd_cli.config.sampling import SamplingConfig
from dsbd_cli.engine.checks.kernels import IterationCase
from dsbd_cli.engine.constraints.stops import StopTable
from dsbd_cli.engine.core.forest_buffer import KernelBuffer
from dsbd_cli.engine.drafting.base import Endings
from dsbd_cli.engine.iteration.batch_state import BatchState, NewRow
from dsbd_cli.engine.iteration.iteration import Iteration, IterationShape
from dsbd_cli.engine.iteration.iteration_kernels import verification_kernel
from dsbd_cli.ops.layout import COMPLETION, DRAFT, RESIDUAL
from dsbd_cli.ops.triton import draft, rejection, verify
from tests.exact.trees import ROOT, Beam, Model, Path, child
from tests.ops.triton import DEVICE
from tests.oracles.rules import Chooser, beam_step, enumerate_distribution, total_variation

pytestmark = [
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),
    pytest.mark.skipif(DEVICE.type == "cuda", reason="noise can be chosen in triton's interpreter alone"),
]

VOCABULARY, PROMPT, END, DRAFTS = 3, 0, 2, 2
WIDTH = {"coupled": 2, "rejection": 1}  # of two beams, rejection has a thousand branches
STEPS = 2  # of an iteration with one drafted layer, if that passes
CLOSE = 1e-6  # of a probability: kernels have float32
Outcome = tuple[tuple[Path, ...], frozenset[Path]]
"""Live beams in order, and the two best texts that have ended."""


class Table(Model):
    """Rows go by the last token."""

    def row(self, path: Path) -> dict[int, float]:
        return super().row(path[-1:] or (PROMPT,))

    def table(self) -> torch.Tensor:
        return torch.tensor([list(self.row((token,)).values()) for token in range(self.tokens)])


# top-k cuts the second step of two beams to three pairs, so that there are fewer branches
WARP: dict[str, object] = {"temperature": 0.7, "top_k": 3}
TARGET, PROPOSER = Table(1, VOCABULARY, warp=WARP), Table(5, VOCABULARY, warp=WARP)


class Noise:
    """Stands in for the noise of kernels."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.chooser: Chooser | None = None
        self.streams: dict[int, int] = {}  # key -> stream
        for module in (draft, rejection, verify):
            monkeypatch.setattr(module, "perturbed", self.perturbed)
        monkeypatch.setattr(verify, "uniform", lambda key, index: (index >= 0).to(verify.tl.float64))
        monkeypatch.setattr(rejection, "passes", self.passes)

    def perturbed(self, logs: Any, key: Any, index: Any) -> Any:
        """Numbers whose order is that of the draws, chosen one by one; what is not drawn comes last."""
        assert self.chooser is not None
        wanted, of_live = self._wanted(key, sys._getframe(1).f_locals)
        x = logs.handle.data.astype(np.float64)
        token = (np.broadcast_to(index.handle.data, x.shape) & 0xFFFFFFFF).ravel() - 1
        distribution = {(0, int(at)): math.exp(x.flat[at]) for at in np.flatnonzero(x > -np.inf)}
        places, rank = np.where(x > -np.inf, 0, -np.inf), float(x.size)
        while distribution and wanted:
            drawn = self.chooser.draw(distribution, "kernel")
            places.flat[drawn[1]], rank = rank, rank - 1
            wanted -= not of_live or token[drawn[1]] != END
            distribution = {pair: mass for pair, mass in distribution.items() if pair != drawn}
        return type(logs)(type(logs.handle)(places.astype(logs.handle.data.dtype), logs.handle.dtype), logs.type)

    def passes(self, bound: Any, level: Any) -> Any:
        """Whether a draft is taken. bound: what the draft's distribution gives it, for the uniform number is 1."""
        assert self.chooser is not None
        limit = bound.handle.data.item()
        chance = level.handle.data.item() / limit if limit > 0 else 0.0
        return level >= 0 if self.chooser.accept(chance, 0) else level < 0

    def _wanted(self, key: Any, local: dict[str, Any]) -> tuple[int, bool]:
        """How many draws the kernel will look at, and whether ends do not count. local: its variables."""

        def number(name: str) -> int:
            return int(local[name].handle.data.item())

        if key.shape:  # noise of paths, of which drafts only propose
            return (number("beams"), True) if "beams" in local else (0, False)
        stream = self.streams.get(key.handle.data.item(), DRAFT)
        if stream == DRAFT:
            return number("drafts"), False
        return (number("missing"), True) if stream == COMPLETION else (int(number("may_draw")), False)


def iteration(rule: str, drafts: int) -> Iteration:
    """One request before its first iteration."""
    method = MethodConfig.of(
        {"rule": rule, "num_beams": WIDTH[rule], "drafts_per_layer": drafts, "depth": STEPS - 1, "width": "fixed"}
    )
    cpu = torch.device("cpu")
    state = BatchState.empty(method, 1, 16, 16, 8, cpu)
    sampling = SamplingConfig(max_new_tokens=8, length_penalty=0.0, **WARP)  # type: ignore[arg-type]
    state.admit({0: NewRow([1, PROMPT], 0, sampling, stop_state=1)})
    stops = StopTable([bytes([65 + token]) for token in range(VOCABULARY)], VOCABULARY, cpu, [END])
    endings = Endings(stops)
    shape = IterationShape(15, STEPS - 1, drafts, 0, beams=1)
    case = IterationCase(method, state, shape, TARGET.table(), PROPOSER.table(), endings)
    return case.stepper("draft", "verify").begin(state, shape)


def drafted(rule: str, drafts: int) -> Iteration:
    made = iteration(rule, drafts)
    made.draft()
    assert isinstance(made.context.buffer, KernelBuffer), "the kernel drafts"
    return made


def verified(drafted: Iteration) -> tuple[tuple[Beam, ...], frozenset[Path]]:
    """Live beams and ended texts that the kernel leaves."""
    made, forest = copy.copy(drafted), drafted.forest
    width = made.state.method.num_beams
    made.state = state = replace(made.state, finished=replace(made.state.finished))
    for name in ("score", "logprob", "length", "by_length", "origin", "node", "token"):
        setattr(state.finished, name, getattr(drafted.state.finished, name).clone())
    made.target()
    made.verify()
    assert verification_kernel(made.ops, made.state, made.forest, made.candidates) is not None, "the kernel walks"
    outcome = made.outcome
    live, ended, steps = outcome.live, state.finished, int(outcome.steps)

    def path(node: torch.Tensor, before: int, token: torch.Tensor) -> Path:
        return (*forest.flat.path_tokens[0, int(node), :before].tolist(), int(token))

    beams = tuple(
        Beam(path(live.parent[0, w], steps - 1, live.token[0, w]), float(live.weight[0, w]))
        for w in range(width)
        if live.valid[0, w]
    )
    texts = frozenset(
        path(ended.node[0, f], int(ended.length[0, f]) - 1, ended.token[0, f])
        for f in range(width)
        if ended.score[0, f] > -math.inf
    )
    return beams, texts


def logprob(path: Path) -> float:
    return math.fsum(TARGET.row(path[:at])[token] for at, token in enumerate(path))


@cache
def plain(beams: tuple[Beam, ...], texts: frozenset[Path], steps: int, width: int) -> dict[Outcome, float]:
    """The distribution of what `steps` more steps of plain beam sampling leave."""

    def run(chooser: Chooser) -> Outcome:
        live, ended = beams, set(texts)
        for _ in range(steps):
            pool = TARGET.pool(dict(enumerate(live)))
            drawn = [
                child(dict(enumerate(live)), pool, pair) for pair in beam_step(pool.distribution, {END}, width, chooser)
            ]
            ended |= {beam.path for beam in drawn if beam.path[-1] == END}
            live = tuple(beam for beam in drawn if beam.path[-1] != END)
        best = sorted(ended, key=logprob, reverse=True)[:width]
        return tuple(beam.path for beam in live), frozenset(best)

    return enumerate_distribution(run)


def distribution_of(rule: str, noise: Noise, drafts: int = DRAFTS) -> dict[Outcome, float]:
    """What an iteration leaves, and plain steps after it where it took fewer than two."""
    forests: list[Iteration] = []

    def propose(chooser: Chooser) -> int:
        noise.chooser = chooser
        forests.append(drafted(rule, drafts))
        return len(forests) - 1

    distribution: defaultdict[Outcome, float] = defaultdict(float)
    for number, chance in enumerate_distribution(propose).items():
        keys = forests[number].context.keys[0]
        noise.streams = {int(layer[stream]): stream for layer in keys for stream in (RESIDUAL, COMPLETION)}

        def verify_down(chooser: Chooser, number: int = number) -> tuple[tuple[Beam, ...], frozenset[Path]]:
            noise.chooser = chooser
            return verified(forests[number])

        for (beams, texts), share in enumerate_distribution(verify_down).items():
            for beam in beams:
                assert beam.weight == pytest.approx(logprob(beam.path), abs=1e-5)
            for outcome, mass in plain(beams, texts, STEPS - len(beams[0].path), WIDTH[rule]).items():
                distribution[outcome] += chance * share * mass
        noise.streams = {}
    return distribution


@pytest.mark.parametrize("rule", ["coupled", "rejection"])
def test_an_iteration_has_the_distribution_of_plain_beam_sampling(rule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    distribution = distribution_of(rule, Noise(monkeypatch))
    wanted = plain(tuple(ROOT.values()), frozenset(), STEPS, WIDTH[rule])
    assert len(wanted) > 5
    assert total_variation(distribution, wanted) < CLOSE


def test_a_wrong_test_of_drafts_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Mutant: a draft is taken half as often as it should be."""
    noise = Noise(monkeypatch)
    monkeypatch.setattr(rejection, "passes", lambda bound, level: noise.passes(2 * bound, level))
    assert (
        total_variation(
            distribution_of("rejection", noise, drafts=1), plain(tuple(ROOT.values()), frozenset(), STEPS, 1)
        )
        > 0.01
    )
