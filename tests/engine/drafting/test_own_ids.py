"""Own ids through whole engines: no text depends on them, and each drafted layer is drawn from the distribution over
exactly the fixed ids and those that the row has had before its iteration."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any

import pytest
import torch
from torch import Tensor

from dsbd_cli import Engine, Request, SamplingConfig
from dsbd_cli.config.method import MethodConfig
from dsbd_cli.engine.core import own_ids
from dsbd_cli.engine.core.candidates import CandidateCount, top_candidates
from dsbd_cli.engine.core.forest import Forest
from dsbd_cli.engine.core.own_ids import OwnIds
from dsbd_cli.engine.core.topk import BLOCKED_FROM
from dsbd_cli.engine.drafting.base import DraftContext
from dsbd_cli.engine.drafting.logits import DraftLogits
from dsbd_cli.engine.iteration import iteration
from dsbd_cli.engine.iteration.observer import Observer
from dsbd_cli.engine.protocols import ForestInput
from dsbd_cli.requests import RequestResult
from tests.engine.decoding.test_distribution import ENDING, excess
from tests.engine.drafting.test_drafters import LONE, distribution_counts, distribution_of
from tests.engine.planning.test_depth import RandomPlanner
from tests.helpers.plain import Settings
from tests.helpers.toy import HashModel
from tests.helpers.toys import NumberCodec, TableLM, table_pair

V = 150
FIXED = (*range(0, V, 6), 2, 5)
BELOW = 140
TRIMMED = torch.tensor(sorted(FIXED))
KEPT = 5  # tokens of a node that are learnt here, so that rows do not have all at once
SEARCH_WANTS = 6  # of a node, with three beams


class Trimmed(HashModel):
    """A draft whose head has the tokens FIXED, with rows of those below BELOW. `whole`: its logits of all tokens, of
    each forward of a layer."""

    lm_head_ids = TRIMMED
    own_ids_below = BELOW

    def forward(self, batch: ForestInput, *, logits: bool = True) -> Tensor | None:
        output = super().forward(batch, logits=logits)
        if output is None:
            return None
        self.__dict__.setdefault("whole", []).append(output)
        kept = output[..., TRIMMED]
        if batch.own_ids is None:
            return kept
        ids = batch.own_ids.unsqueeze(1).expand(-1, output.shape[1], -1)
        own = output.gather(2, ids.clamp(max=V - 1)).masked_fill(ids >= BELOW, -math.inf)
        return torch.cat((kept, own), -1)


class Fixed(Trimmed):
    """The same without rows of other tokens."""

    own_ids_below = 0


def engine_of(draft: Any, batch_size: int = 3, noise: float = 0.3, **method: Any) -> Engine:
    config = MethodConfig.of({"num_beams": 3, "drafts_per_layer": 7, "depth": 3, "width": "fixed", **method})
    made = None if draft is None else draft(V, 1, noise=noise)
    config = config if made else MethodConfig.of({**method, "depth": 0, "num_beams": config.num_beams})
    return Engine(HashModel(V, 1), made, NumberCodec(V, (2,)), config, batch_size=batch_size)


COMMON = tuple(range(1, 69))  # a beginning that is read once


def requests(count: int = 7, beams: int = 3, **sampling: Any) -> list[Request]:
    return [
        Request(
            id=str(i),
            seed=i,
            prompt_ids=((*COMMON, i) if i % 2 else (i, 3, 4)),
            sampling=SamplingConfig(**{"max_new_tokens": 8 + i, "top_k": 6, "n_best": beams, **sampling}),
        )
        for i in range(count)
    ]


def texts(results: list[RequestResult]) -> list[list[tuple[tuple[int, ...], float]]]:
    assert all(result.error is None for result in results)
    return [[(beam.token_ids, beam.logprob) for beam in result.hypotheses] for result in results]


def passed(results: list[RequestResult]) -> int:
    return sum(result.stats.accepted for result in results)


@cache
def plain_texts(rule: str, beams: int) -> list[list[tuple[tuple[int, ...], float]]]:
    return texts(list(engine_of(None, rule=rule, num_beams=beams).run(requests(beams=beams))))


CASES = [
    *(("beam", beams) for beams in (1, 3, 4)),
    *((drafter, 3) for drafter in ("rsd-c", "rsd-s", "dynamic-tree", "beam+ngram", "rsd-s+ngram")),
]


@pytest.mark.parametrize("rule", ["coupled", "search"])
@pytest.mark.parametrize(("drafter", "beams"), CASES)
def test_no_text_depends_on_own_ids(rule: str, drafter: str, beams: int) -> None:
    """Batches with refill, rows that are dropped, shared beginnings, and drafts of any size, none included."""
    method: dict[str, Any] = {"rule": rule, "num_beams": beams}
    plain, counts = plain_texts(rule, beams), []
    for draft in (Fixed, Trimmed):
        engine = engine_of(draft, drafter=drafter, drafts_per_layer=2 * beams, **method)
        results = list(engine.run(requests(beams=beams)))
        assert texts(results) == plain
        counts.append(passed(results))
    assert counts[0] < counts[1]
    engine = engine_of(Trimmed, 2, drafter=drafter, **method)
    engine._planner = RandomPlanner(5, 3, 8)
    assert texts(list(engine.run(requests(5, beams)))) == plain[:5]


@pytest.mark.parametrize("rule", ["coupled", "search", "rejection"])
def test_no_text_depends_on_them_under_constraints(rule: str) -> None:
    """Guards own ids that are illegal among the drafts: they are of the prompt, which no answer need repeat."""
    answers = ("7 8 9 3 ", "7 8 ", "12 13 14 15 16 ", "12 19 ", "50 51 52 53 ", "56 57 58 ")
    asked = [
        Request(id=str(i), seed=i, prompt_ids=(7, 8, 12, i), sampling=SamplingConfig(max_new_tokens=9), allow=answers)
        for i in range(5)
    ]
    results = list(engine_of(Trimmed, rule=rule).run(asked))
    assert {beam.text for result in results for beam in result.hypotheses} <= set(answers)
    if rule != "rejection":
        assert texts(results) == texts(list(engine_of(None, rule=rule).run(asked)))
        assert passed(results) > passed(list(engine_of(Fixed, rule=rule).run(asked)))


@dataclass
class Book(Observer):
    """Keeps, of each request, which ids it should have, from what the target said; and compares.

    room: own ids of a row. own: by request. pending: the last forest, its requests and rows. sizes: of own ids.
    """

    engine: Engine
    room: int
    monkeypatch: pytest.MonkeyPatch
    kept: int = KEPT
    own: dict[int, list[int]] = field(default_factory=dict)
    pending: list[tuple[Forest, list[int], list[int]]] = field(default_factory=list)
    checked: int = 0
    sizes: set[int] = field(default_factory=set)
    attached: bool = True

    def __post_init__(self) -> None:
        self.target: list[Tensor] = []
        for module in (own_ids, iteration):
            self.monkeypatch.setattr(module, "KEPT", self.kept)
        forward = self.engine.target.forward

        def kept(batch: ForestInput, *, logits: bool = True) -> Tensor | None:
            output = forward(batch, logits=logits)
            if output is not None:
                self.target.append(output)
            return output

        self.engine.target.forward = kept  # type: ignore[method-assign]
        self.engine.observe(self)
        self.draft: Any = self.engine.draft

    def take(self, key: int, tokens: list[int]) -> None:
        held = self.own[key]
        for token in sorted(set(tokens)):
            if token < BELOW and token not in FIXED and token not in held and len(held) < self.room:
                held.append(token)

    def settle(self, wanted: int) -> None:
        """Learn what the target has said of the last forest, if it had drafts."""
        for forest, keys, active in self.pending:
            if not forest.depth:
                continue
            logits = self.target[-1]
            for row in active:
                said = list[int]()
                for node in forest.flat.valid[row].nonzero().flatten().tolist():
                    scores = logits[row, node].tolist()
                    ranked = sorted(range(V), key=lambda token: (-scores[token], token))
                    said += ranked[: min(wanted, self.kept)]
                self.take(keys[row], said)
        self.pending.clear()

    def drafted(self, context: DraftContext, forest: Forest) -> None:
        keys, rows = context.row_key.tolist(), context.beams.valid.any(1).nonzero().flatten().tolist()
        random = context.sampler.random
        of_random = context.warp.max_top_k + 8 or V
        self.settle(of_random if random else V)
        table = context.buffer.table
        for row in rows:
            if int(context.iteration[row]) == 0:
                self.own[keys[row]] = []
                length = int(table.used[row])
                self.take(keys[row], [*table.tokens[row, :length].tolist(), int(context.beams.token[row, 0])])
        assert context.own_ids is not None
        for row in rows:
            listed = [token for token in context.own_ids[row].tolist() if token < V]
            assert listed == self.own[keys[row]]
            self.sizes.add(len(listed))
        whole = self.draft.__dict__["whole"][-forest.depth :] if forest.depth else []
        for layer, logits in enumerate(whole):
            nodes, distribution = forest.layers[layer], forest.distributions[layer]
            for row in rows:
                ids = sorted({*FIXED, *self.own[keys[row]]})
                below = forest.layers[layer + 1]
                drafted = below.token[row][below.valid[row]].tolist()
                assert set(drafted) <= set(ids)
                if distribution is not None and random:
                    self.compare(context, nodes, distribution, row, ids, logits[row, -nodes.token.shape[1] :])
        self.pending.append((forest, keys, rows))

    def compare(
        self, context: DraftContext, nodes: Any, distribution: Any, row: int, ids: list[int], logits: Tensor
    ) -> None:
        """Q of a layer of one row, by numbers of Python: softmaxes over `ids`, joined, tempered, cut, normalised."""
        temperature, top_k = float(context.warp.temperature[row]), int(context.warp.top_k[row])
        pool = dict[tuple[int, int], float]()
        for node in range(nodes.token.shape[1]):
            if not nodes.valid[row, node] or nodes.ends[row, node]:
                continue
            values = logits[node, ids].tolist()
            best = max(values)
            total = math.log(math.fsum(math.exp(value - best) for value in values)) + best
            for token, value in zip(ids, values, strict=True):
                pool[node, token] = float(nodes.weight[row, node]) + value - total
        if not pool:
            return
        if distribution.scope == "pool":
            groups = [list(pool)]
        else:
            groups = [[pair for pair in pool if pair[0] == node] for node in {node for node, _ in pool}]
        wanted, best = dict[tuple[int, int], float](), max(pool.values())
        for group in groups:
            least = sorted((pool[pair] for pair in group), reverse=True)[min(top_k or len(group), len(group)) - 1]
            left = {pair: math.exp((pool[pair] - best) / temperature) for pair in group if pool[pair] >= least}
            total = math.fsum(left.values())
            wanted |= {pair: mass / total for pair, mass in left.items()}
        masses = dict[tuple[int, int], float]()
        live = (nodes.valid & ~nodes.ends)[row]
        for node in live.nonzero().flatten().tolist():
            tokens, logs = distribution.candidates.tokens[row, node].tolist(), distribution.log_q[row, node].tolist()
            for token, log in zip(tokens, logs, strict=True):
                if log > -math.inf:
                    assert (node, token) not in masses, "a pair is there twice"
                    masses[node, token] = math.exp(log)
        assert masses.keys() == wanted.keys()
        far = {pair: mass for pair, mass in wanted.items() if abs(masses[pair] - mass) > max(2e-4 * mass, 1e-7)}
        assert not far, {pair: (masses[pair], mass) for pair, mass in far.items()}
        self.checked += 1


DRAWN = [("rejection", drafter) for drafter in ("beam", "rsd-s", "dynamic-tree", "beam+ngram")] + [("coupled", "beam")]


@pytest.mark.parametrize(
    ("rule", "drafter", "top_k", "room"),
    [
        *((*case, top_k, room) for case in DRAWN for top_k, room in ((6, 2048), (0, 7))),
        *((*DRAWN[0], top_k, room) for top_k, room in ((6, 7), (0, 2048))),
    ],
)
def test_q_is_the_distribution_over_the_ids_of_the_row(
    rule: str, drafter: str, top_k: int, room: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards ids that act in the iteration in which they are learnt, those of another row or of the row's last request,
    fixed columns taken for own ones, and rows that are full."""
    monkeypatch.setattr(own_ids.OwnIds, "of", partial(OwnIds.of, most=room))
    engine = engine_of(Trimmed, rule=rule, drafter=drafter)
    book = Book(engine, room, monkeypatch)
    results = list(engine.run(requests(4, top_k=top_k, temperature=1.3)))
    assert passed(results) > 0
    assert book.checked > 30
    assert len(book.sizes) > (1 if room == 7 else 8)
    assert max(book.sizes) <= room


@pytest.mark.parametrize("drafter", ["beam", "rsd-c"])
@pytest.mark.parametrize("idle", [False, True])
def test_best_pairs_are_of_the_ids_of_the_row(drafter: str, idle: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """`search`, where the rule itself wants fewer tokens of a node than are learnt. idle: many iterations draft nothing
    and learn no more than the rule wants."""
    engine = engine_of(Trimmed, rule="search", drafter=drafter)
    if idle:
        engine._planner = RandomPlanner(5, 3, 8, gated=False)
    book = Book(engine, 2048, monkeypatch, kept=2 * SEARCH_WANTS)
    assert passed(list(engine.run(requests(5)))) > 0
    assert len(book.sizes) > 8


class TrimmedTable(TableLM):
    """A draft of tables that lacks all tokens but one or two."""

    lm_head_ids = torch.tensor([1])

    @property
    def own_ids_below(self) -> int:  # type: ignore[override]
        return self.vocab_size

    def forward(self, batch: ForestInput, *, logits: bool = True) -> Tensor | None:
        output = super().forward(batch, logits=logits)
        if output is None:
            return None
        assert batch.own_ids is not None
        ids = batch.own_ids.unsqueeze(1).expand(-1, output.shape[1], -1)
        own = output.gather(2, ids.clamp(max=self.vocab_size - 1)).masked_fill(ids >= self.vocab_size, -math.inf)
        return torch.cat((output[..., self.lm_head_ids], own), -1)


@pytest.mark.parametrize(("settings", "drafter"), [(LONE, "beam"), (ENDING, "beam"), (ENDING, "rsd-s")])
def test_rejection_has_the_exact_distribution(settings: Settings, drafter: str) -> None:
    """Chi-square at alpha = 1e-5 over whole results, with fixed seeds."""
    target, draft = table_pair(7, 3, 1.0)
    method = MethodConfig.of(
        {
            "rule": "rejection",
            "num_beams": settings.width,
            "depth": 2,
            "drafts_per_layer": 4,
            "width": "fixed",
            "drafter": drafter,
        }
    )
    engine = Engine(target, TrimmedTable(draft.table), NumberCodec(3, tuple(settings.ends)), method, batch_size=2000)
    counts, accepted = distribution_counts(engine, settings)
    assert accepted > 0
    assert excess(counts, distribution_of(settings, 3)) < 1


# Logits


def logits_of(vocabulary: int, seed: int) -> tuple[DraftLogits, list[list[int]]]:
    """Random logits of two rows, of which the second has fewer own ids, and their tokens."""
    rng = torch.Generator().manual_seed(seed)
    order = torch.randperm(vocabulary, generator=rng)
    ids, rest = order[: vocabulary // 2].sort().values, order[vocabulary // 2 :]
    own = torch.full((2, len(rest) // 2), vocabulary)
    for row, count in enumerate((len(rest) // 2, 3)):
        own[row, :count] = rest[torch.randperm(len(rest), generator=rng)[:count]]
    values = 3 * torch.randn(2, 3, len(ids) + own.shape[1], generator=rng)
    values[..., len(ids) :].masked_fill_((own == vocabulary).unsqueeze(1), -math.inf)
    made = DraftLogits.of(values, ids, vocabulary, own)
    assert made.values is values
    return made, [[*ids.tolist(), *(token for token in row if token < vocabulary)] for row in own.tolist()]


@pytest.mark.parametrize("vocabulary", [50, BLOCKED_FROM + 100, 3 * BLOCKED_FROM])
@pytest.mark.parametrize("count", [1, 7, 20, 30, 40])
def test_candidates_are_those_of_the_whole_vocabulary(vocabulary: int, count: int) -> None:
    logits, tokens = logits_of(vocabulary, count)
    wanted, candidates = top_candidates(logits.wide(), CandidateCount(count)), logits.candidates(CandidateCount(count))
    real, wanted_real = (each.logprobs > -math.inf for each in (candidates, wanted))
    assert torch.equal(candidates.tokens[real], wanted.tokens[wanted_real])  # in order of token id, none twice
    assert torch.allclose(candidates.logprobs[real], wanted.logprobs[wanted_real], rtol=0, atol=2e-6)
    assert int(candidates.tokens.max()) < vocabulary
    for row, some in enumerate(tokens):
        assert set(candidates.tokens[row][real[row]].tolist()) <= set(some)
        column = {token: index for index, token in enumerate(logits.ids.tolist() + logits.own_ids[row].tolist())}  # type: ignore[union-attr]
        law = logits.values[row].double().log_softmax(-1)
        for node in range(3):
            for token, logprob in zip(
                candidates.tokens[row, node].tolist(), candidates.logprobs[row, node].tolist(), strict=True
            ):
                if logprob > -math.inf:
                    assert logprob == pytest.approx(float(law[node, column[token]]), abs=2e-6)


def test_wide_logits_have_each_number_in_its_place() -> None:
    logits, tokens = logits_of(50, 3)
    wide = logits.wide()
    assert wide.shape == (2, 3, 50)
    assert logits.width == 50
    for row, some in enumerate(tokens):
        there = torch.isfinite(wide[row, 0]).nonzero().flatten().tolist()
        assert there == sorted(some)
        assert torch.equal(wide[row][:, torch.tensor(some)], logits.values[row][:, : len(some)])


def test_columns_of_a_wider_head_are_left_out() -> None:
    """A draft with tokens past the target's vocabulary."""
    ids, own = torch.tensor([1, 5]), torch.tensor([[3, 8, 10]])
    values = torch.arange(6.0).view(1, 1, 6)  # of 1, 5, 11 and three own ids
    logits = DraftLogits.of(values, ids, 10, own)
    assert logits.values.tolist() == [[[0.0, 1.0, 3.0, 4.0, 5.0]]]


def test_of_equal_tokens_the_lower_one_comes_first() -> None:
    logits = DraftLogits(torch.zeros(1, 1, 6), torch.tensor([4, 9, 20]), 30, torch.tensor([[12, 7, 1]]))
    assert logits.candidates(CandidateCount(2)).tokens.tolist() == [[[4, 9]]]
    assert logits.wide().isfinite().sum() == 6
