"""A row beside neighbours has, to the bit, what it has alone: candidates, cuts, distributions, noise, draws, scores and
recorded tokens, over thousands of random distributions.

Guards: a sum over the candidates of the batch, whose order or width the neighbours decide; a function that gives the
last few numbers of a tensor other bits than the others; candidates or cuts that go by another row's settings; what is
recorded of tokens when a neighbour asks for more.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, cast

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from dsbd_cli.config.method import MethodConfig
from dsbd_cli.config.sampling import SamplingConfig
from dsbd_cli.engine.constraints.stops import StopSet, StopTable
from dsbd_cli.engine.core.beams import Beams, Finished
from dsbd_cli.engine.core.candidates import Candidates, LegalTokens
from dsbd_cli.engine.core.distribution import pool_distribution, row_distribution
from dsbd_cli.engine.core.forest import Forest
from dsbd_cli.engine.core.forest_buffer import ForestSizes, TensorBuffer
from dsbd_cli.engine.core.noise import extend_path, path_gumbel, stream_keys
from dsbd_cli.engine.core.topk import NEG_INF
from dsbd_cli.engine.drafting.base import Endings
from dsbd_cli.engine.drafting.beam import NoDrafter
from dsbd_cli.engine.iteration.batch_state import BatchState, NewRow
from dsbd_cli.engine.iteration.iteration import IterationShape
from dsbd_cli.engine.iteration.stepper import Stepper
from dsbd_cli.engine.iteration.token_logprobs import TokenTrace
from dsbd_cli.engine.iteration.verify_forest import verify_forest
from dsbd_cli.engine.planning.timing import PhaseTimer
from dsbd_cli.engine.verify.rules import make_rule

CPU = torch.device("cpu")
HISTORY, TOPS = 40, 5
ENDS = 3  # tokens below it
WORDS = [f"{token},".encode() for token in range(1500)]


@dataclass(frozen=True)
class Row:
    """A request in the middle of its way.

    Attributes:
        live: [W] bool, the first beam among them. weight, logprob: [W]. logits: [W, V]. legal: [V] bool, the only
            tokens that may follow; None: any. kept: scores of what has finished, best first.
    """

    sampling: SamplingConfig
    seed: int
    length: int
    live: Tensor
    weight: Tensor
    logprob: Tensor
    logits: Tensor
    legal: Tensor | None
    kept: Tensor

    @property
    def one_root(self) -> bool:
        """It has its first beam alone."""
        return int(self.live.sum()) == 1


class Only(LegalTokens):
    """What may follow the nodes of rows [R, V], which all have n nodes. lists: as a trie's rows, where all have one."""

    def __init__(self, rows: Sequence[Row], nodes: int, *, lists: bool) -> None:
        free = torch.ones(rows[0].logits.shape[1], dtype=torch.bool)
        self._allowed = torch.stack([free if row.legal is None else row.legal for row in rows])
        self._allowed, self._lists = self._allowed.repeat_interleave(nodes, 0), lists

    def apply(self, logprobs: Tensor, part: slice, total: Tensor) -> None:
        logprobs.masked_fill_(~self._allowed[part], NEG_INF)

    def listed(self, part: slice) -> tuple[Tensor, Tensor] | None:
        if not self._lists:
            return None
        allowed = self._allowed[part]
        width = int(self._allowed.sum(1).max())
        tokens = torch.sort(~allowed, dim=1, stable=True).indices[:, :width]
        real = torch.arange(width) < allowed.sum(1, keepdim=True)
        return torch.where(real, tokens, 0), real


@dataclass(frozen=True)
class Trial:
    """What an iteration without drafts computes of each row, by (beam, token), by rank, or by token."""

    row_facts: list[dict[object, object]]

    @classmethod
    def of(cls, rows: Sequence[Row], method: MethodConfig, *, roots: int, lists: bool) -> Trial:
        """All rows in one batch. roots: of the forest, W or 1."""
        width, vocabulary = method.num_beams, rows[0].logits.shape[1]
        stops = StopTable(WORDS, vocabulary, CPU, range(ENDS))
        state = _state(rows, method, stops)
        endings = Endings(stops)
        rule = make_rule(method)
        logits = torch.stack([row.logits[:roots] for row in rows])
        legal = Only(rows, roots, lists=lists) if any(row.legal is not None for row in rows) else None
        no_models = cast(Any, SimpleNamespace(models=[]))
        stepper = Stepper(no_models, NoDrafter(), rule, endings, PhaseTimer())
        iteration = stepper.begin(
            state, IterationShape(slots=0, depth=0, drafts_per_layer=1, draft_backlog=0, beams=roots)
        )
        iteration.forest = forest = _roots(state)
        iteration.logits, iteration.legal_tokens = logits, legal
        candidates = iteration.best_tokens()
        distribution = pool_distribution(candidates, state.beams.weight, state.beams.valid, state.warp)
        beam_distribution = row_distribution(candidates, state.warp)
        noise = path_gumbel(state.beams.path, candidates.tokens, state.warp.greedy_rows)
        outcome = verify_forest(
            state, forest, candidates, rule, endings, stream_keys(state.row_key, state.iteration, 1)
        )
        assert state.trace is not None
        assert outcome.before is not None
        state_parts = (state.beams, state.finished, forest, candidates, outcome.before)
        likeliest = iteration._likeliest(state.trace.tops)
        state.trace.follow(*state_parts, likeliest, outcome.live.parent, outcome.live.token, outcome.steps)
        row_facts = []
        for at, row in enumerate(rows):
            there = row.live[:roots].tolist()
            facts: dict[object, object] = {"done": bool(outcome.done[at]), "steps": int(outcome.steps[at])}
            distributions = {
                "raw": candidates.logprobs,
                "law": distribution.log_p,
                "weight": distribution.weight,
                "row": beam_distribution,
                "noise": noise,
            }
            places = _possible(candidates, at, there)
            facts |= {name: _bits_by(places, value[at]) for name, value in distributions.items()}
            live, ended = outcome.live, state.finished
            facts["live"] = [
                (int(live.parent[at, w]), int(live.token[at, w]), _bits(live.weight[at, w]), _bits(live.logprob[at, w]))
                for w in range(width)
                if live.valid[at, w]
            ]
            facts["ended"] = [
                (
                    _bits(ended.score[at, f]),
                    _bits(ended.logprob[at, f]),
                    int(ended.length[at, f]),
                    int(ended.token[at, f]),
                )
                for f in range(width)
                if ended.score[at, f] > NEG_INF
            ]
            facts["trace"] = _traced(state.trace, at, row, outcome.live.valid[at])
            row_facts.append(facts)
        return cls(row_facts)


def _bits(x: Tensor) -> int:
    return int(x.contiguous().view(torch.int32))


def _possible(candidates: Candidates, row: int, live: Sequence[bool]) -> list[tuple[tuple[int, int], int]]:
    """Beam and token of the candidates that are possible, and their places in a flat [beam, candidate]."""
    tokens, possible = candidates.tokens[row].tolist(), (candidates.logprobs[row] > NEG_INF).tolist()
    width = candidates.tokens.shape[2]
    return [
        ((beam, tokens[beam][at]), beam * width + at)
        for beam, real in enumerate(live)
        if real
        for at, some in enumerate(possible[beam])
        if some
    ]


def _bits_by(places: list[tuple[tuple[int, int], int]], value: Tensor) -> dict[object, int]:
    """Bits of numbers [beam, candidate] by beam and token."""
    bits = value.contiguous().view(torch.int32).flatten().tolist()
    return {pair: bits[at] for pair, at in places}


def _traced(trace: TokenTrace, at: int, row: Row, valid: Tensor) -> list[object]:
    tops = row.sampling.top_logprobs
    marks, length = trace.live, row.length
    alternatives: list[object] = []
    for w in valid.nonzero().flatten().tolist():
        pairs = zip(marks.top_logprob[at, w, length].tolist(), marks.top[at, w, length].tolist(), strict=True)
        best = sorted(pairs, key=lambda pair: (-pair[0], pair[1]))[:tops]
        alternatives.append((_bits(marks.logprob[at, w, length]), best))
    return alternatives


def _state(rows: Sequence[Row], method: MethodConfig, stops: StopTable) -> BatchState:
    """As an engine has it after some iterations."""
    state = BatchState.empty(method, len(rows), 32, 16, HISTORY, CPU)
    entries = {
        index: NewRow([5, 6], row.seed, row.sampling, stops.start(_ends(row.sampling)))
        for index, row in enumerate(rows)
    }
    state.admit(entries)
    beams, finished = state.beams, state.finished
    beams.valid = torch.stack([row.live for row in rows])
    beams.weight = torch.stack([row.weight for row in rows])
    beams.logprob = torch.stack([row.logprob for row in rows])
    beams.length = torch.tensor([row.length for row in rows])
    beams.path = extend_path(beams.path, torch.arange(method.num_beams))
    finished.score = torch.stack([row.kept for row in rows])
    finished.logprob = finished.score.clone()
    finished.length = beams.length.unsqueeze(1).expand_as(finished.score).clone()
    return state


def _ends(sampling: SamplingConfig) -> StopSet:
    own = None if sampling.eos_token_id is None else frozenset(sampling.eos_token_id)
    return StopSet(tuple(sampling.stop), own)


def _roots(state: BatchState) -> Forest:
    """The forest of an iteration without drafts."""
    sizes = ForestSizes(state.beams.token.shape[1], 1, 0, state.table.positions.shape[1])
    return Forest(TensorBuffer(sizes, state.beams, state.table, (state.row_key, state.iteration)))


def random_row(seed: int, width: int, vocabulary: int, rule: str, kind: str) -> Row:
    """kind: `any`, or `trie` where few tokens may follow."""
    generator = torch.Generator().manual_seed(seed)

    def pick(*values: Any) -> Any:
        return values[int(torch.randint(len(values), (1,), generator=generator))]

    def normal(*size: int) -> Tensor:
        return torch.randn(*size, generator=generator)

    live = torch.rand(width, generator=generator) < 0.7
    live[0] = True
    if pick(True, False):
        live[1:] = False
    samples = {
        "temperature": pick(1.0, 1.0, 0.6, 1.7, 0.0),
        "top_k": pick(50, 20, 3, 0, 0),
        "top_p": pick(1.0, 0.9, 0.5),
        "min_p": pick(0.0, 0.0, 0.05),
    }
    length, beams = 1 + pick(*range(30)), pick(None, None, 1 + pick(*range(width)))
    live[beams or width :] = False
    sampling = SamplingConfig(
        max_new_tokens=length + pick(1, 1, 5),
        length_penalty=pick(1.0, 0.7, 2.0, 0.0, -0.3),
        early_stopping=pick(True, False, "never"),
        stop=pick((), (), ("7,", "11,")),
        eos_token_id=pick(None, None, (5,), (3, 4, 8, 10)),
        num_beams=beams,
        token_logprobs=True,
        top_logprobs=pick(0, 2, TOPS),
        **(samples if rule == "coupled" else {}),
    )
    logits = normal(width, vocabulary) * pick(1.0, 3.0)
    if pick(True, False):
        logits = logits.to(torch.bfloat16).to(torch.float32)  # ties
    legal = None
    if kind == "trie" or pick(True, False, False):
        legal = torch.rand(vocabulary, generator=generator) < pick(0.5, 4 / vocabulary)
        legal[int(torch.randint(vocabulary, (1,), generator=generator))] = True
    kept = normal(width).sub(2).sort(descending=True).values
    kept[min(pick(0, width // 2, width), beams or width) :] = NEG_INF
    weight = normal(width) - 1
    return Row(sampling, seed, length, live, weight, weight - 0.25, logits, legal, kept)


@settings(max_examples=300)
@given(
    seed=st.integers(0, 2**40),
    count=st.integers(1, 5),
    width=st.sampled_from([1, 2, 4, 10]),
    vocabulary=st.sampled_from([11, 97, 1300]),
    drawn=st.sampled_from([("coupled", "pool"), ("coupled", "beam"), ("search", "pool")]),
    trie=st.booleans(),
)
def test_a_row_has_the_bits_that_it_has_alone(
    seed: int, count: int, width: int, vocabulary: int, drawn: tuple[str, str], trie: bool
) -> None:
    rule, scope = drawn
    method = MethodConfig.of({"rule": rule, "num_beams": width, "depth": 0, "width": "fixed", "warp_scope": scope})
    kind = "trie" if trie else "any"
    rows = [random_row(seed + 1000 * index, width, vocabulary, rule, kind) for index in range(count)]
    together = Trial.of(rows, method, roots=width, lists=False).row_facts
    listed = Trial.of(rows, method, roots=width, lists=True).row_facts if trie else together
    for index, row in enumerate(rows):
        alone = Trial.of([row], method, roots=1 if row.one_root else width, lists=trie).row_facts[0]
        for name, value in alone.items():
            assert together[index][name] == value, (index, name)
            assert listed[index][name] == value, (index, name, "listed")


def test_what_was_recorded_stays_where_a_neighbour_asks_for_more() -> None:
    """`fit` makes room for a row that joins: the two likeliest tokens of the first row stay the two likeliest."""
    beams, finished = Beams.empty(1, 1, 16, 4, CPU), Finished.empty(1, 1, 4, CPU)
    trace = TokenTrace.empty(beams, finished)
    trace.fit(4, 2)
    trace.live.top[0, 0, 0], trace.live.top_logprob[0, 0, 0] = torch.tensor([7, 9]), torch.tensor([-0.5, -2.0])
    trace.fit(6, 5)
    best = trace.live.top_logprob[0, 0, 0].argsort(descending=True)[:2]
    assert trace.live.top[0, 0, 0, best].tolist() == [7, 9]


def test_rows_of_a_batch_are_not_all_alike() -> None:
    """The distributions of the test above reach what they are meant to: several settings, one root beside W,
    constraints."""
    rows = [random_row(seed, 4, 97, "coupled", "any") for seed in range(200)]
    assert {row.one_root for row in rows} == {True, False} == {row.legal is None for row in rows}
    assert len({row.sampling.top_k for row in rows}) == 4
    assert all(row.live[0] for row in rows)
