"""Every drafter through the whole engine: `coupled` and `search` give the very text of plain decoding, `rejection` the
exact distribution, whatever proposes the nodes.

Guards: a node tagged with a distribution it does not have; a draw chosen after looking at it; a draft cache that misses
nodes which another drafter added; contexts of the wrong row or beam.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from dsbd_cli.config.method import MethodConfig
from dsbd_cli.config.sampling import SamplingConfig
from dsbd_cli.engine.core.forest import Forest
from dsbd_cli.engine.core.nodes import DraftDistribution
from dsbd_cli.engine.decoding.engine import Engine
from dsbd_cli.engine.drafting.base import DraftContext, LayerDrafts, record_distribution
from dsbd_cli.engine.drafting.dynamic_tree import DynamicTree
from dsbd_cli.engine.drafting.index import CorpusTokens, write_index
from dsbd_cli.engine.drafting.logits import DraftLogits
from dsbd_cli.engine.drafting.rsd import RowDraws
from dsbd_cli.engine.iteration.observer import Observer
from dsbd_cli.engine.protocols import ForestInput
from dsbd_cli.engine.verify.base import LayerDraws, LayerView
from dsbd_cli.requests import Request, RequestResult
from tests.engine.decoding.test_distribution import ENDING, PLAIN, Results, excess
from tests.engine.decoding.test_same_text import texts
from tests.engine.planning.test_depth import RandomPlanner
from tests.helpers.plain import Settings, results_distribution
from tests.helpers.toy import HashModel
from tests.helpers.toys import NumberCodec, table_pair, table_rows

VOCABULARY = 12
LENGTHS = (2, 9, 5, 14)
DISTRIBUTION_PROMPT = (0, 1, 0, 1, 1, 0)
LONE = Settings(width=1, max_new=3, ends=(2,))

ALONE: list[dict[str, Any]] = [
    {"drafter": "beam"},
    {"drafter": "rsd-c"},
    {"drafter": "rsd-c", "branching": 2},
    {"drafter": "rsd-s"},
    {"drafter": "dynamic-tree"},
    {"drafter": "dynamic-tree", "tree": "top-k"},
    {"drafter": "ngram"},
    {"drafter": "suffix"},
    {"drafter": "retrieval"},
]
FUSED: list[dict[str, Any]] = [
    {"drafter": "beam+ngram"},
    {"drafter": "beam+retrieval", "fusion_top_k": 3},
    {"drafter": "rsd-c+ngram", "fusion_top_k": 0},
    {"drafter": "rsd-s+ngram", "second_drafts": 1},
    {"drafter": "dynamic-tree+retrieval", "fusion_top_k": 0},
    {"drafter": "dynamic-tree+ngram", "tree": "top-k"},
    {"drafter": "retrieval+ngram"},
    {"drafter": "beam+suffix"},
    {"drafter": "ngram+retrieval", "second_drafts": 1},
]


def name_of(options: dict[str, Any]) -> str:
    return "-".join(str(value) for value in options.values())


@pytest.fixture(scope="session")
def index(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Texts that the tables of the tests like to write: decoded by their own target."""
    path = tmp_path_factory.mktemp("index") / "corpus.index"
    engine = make_engine({}, depth=0)
    results = engine.run(request(i, 60) for i in range(40))
    corpus = CorpusTokens(hypothesis.token_ids for result in results for hypothesis in result.hypotheses)
    with path.open("wb") as stream:
        write_index(stream, corpus.tokens, NumberCodec(VOCABULARY).token_bytes())
    return str(path)


def make_engine(
    options: dict[str, Any],
    index: str | None = None,
    *,
    vocabulary: int = VOCABULARY,
    seed: int = 1,
    noise: float = 0.5,
    ends: tuple[int, ...] = (2,),
    batch_size: int = 8,
    **method: Any,
) -> Engine:
    if "retrieval" in options.get("drafter", ""):
        options = {**options, "index": index}
    config = MethodConfig.of({"num_beams": 3, "depth": 4, "width": "fixed", **options, **method})
    target, draft = table_pair(seed, vocabulary, noise)
    codec = NumberCodec(vocabulary, ends)
    return Engine(target, draft if config.needs_draft else None, codec, config, batch_size=batch_size)


def request(i: int, new: int = 16, **sampling: Any) -> Request:
    prompt = tuple((i + step * (i % 3 + 1)) % VOCABULARY for step in range(LENGTHS[i % 4]))
    return Request(id=str(i), seed=i, prompt_ids=prompt, sampling=SamplingConfig(max_new_tokens=new, **sampling))


def decode(engine: Engine, count: int = 6) -> list[RequestResult]:
    return list(engine.run(request(i, 6 + i, n_best=engine.method.num_beams) for i in range(count)))


SHAPES = [
    {"num_beams": 1, "drafts_per_layer": 2, "depth": 4, "batch_size": 5},
    {"num_beams": 3, "drafts_per_layer": 7, "depth": 2, "batch_size": 8},
    {"num_beams": 2, "drafts_per_layer": 12, "depth": 5, "batch_size": 1},
]


@cache
def plain_texts(rule: str, num_beams: int) -> list[list[tuple[int, ...]]]:
    return texts(decode(make_engine({}, rule=rule, depth=0, num_beams=num_beams)))


@pytest.mark.parametrize("rule", ["coupled", "search"])
@pytest.mark.parametrize("options", [*ALONE, *FUSED], ids=name_of)
def test_the_text_is_the_same_with_every_drafter(options: dict[str, Any], rule: str, index: str) -> None:
    """Under `search`, where the draft's nodes are its best pairs, two of the shapes."""
    accepted = 0
    for shape in SHAPES if rule == "coupled" else SHAPES[:2]:
        results = decode(make_engine(options, index, rule=rule, **shape))
        assert texts(results) == plain_texts(rule, shape["num_beams"])
        accepted += sum(result.stats.accepted for result in results)
    assert accepted > 0


@pytest.mark.parametrize("options", [*ALONE, *FUSED], ids=name_of)
def test_the_text_is_the_same_when_shapes_change_from_iteration_to_iteration(
    options: dict[str, Any], index: str
) -> None:
    """`--depth auto` with every drafter: any D and K, and none at all, after one another; and layers that are kept from
    the target."""
    engine = make_engine(options, index, rule="coupled", num_beams=3, drafts_per_layer=8, depth=5, batch_size=3)
    engine._planner = planner = RandomPlanner(5, 5, 8)
    assert texts(decode(engine)) == plain_texts("coupled", 3)
    assert len(planner.used) > 5
    assert len(planner.cuts) > 1


# As in tests/engine/decoding/test_distribution.py: alpha = 1e-5 per case with fixed seeds.
DISTRIBUTION = [
    ({"drafter": "rsd-c"}, ENDING),
    ({"drafter": "rsd-s"}, ENDING),
    ({"drafter": "rsd-s"}, LONE),
    ({"drafter": "dynamic-tree"}, ENDING),
    ({"drafter": "dynamic-tree", "tree": "top-k"}, ENDING),
    ({"drafter": "ngram"}, ENDING),
    ({"drafter": "retrieval"}, PLAIN),
    ({"drafter": "ngram"}, LONE),
    ({"drafter": "beam+ngram", "fusion_top_k": 0}, ENDING),
    ({"drafter": "rsd-s+retrieval", "fusion_top_k": 2}, PLAIN),
    ({"drafter": "dynamic-tree+ngram", "fusion_top_k": 0}, ENDING),
    ({"drafter": "retrieval+ngram"}, ENDING),
]


@pytest.mark.parametrize(("options", "settings"), DISTRIBUTION, ids=[name_of(options) for options, _ in DISTRIBUTION])
def test_rejection_has_the_exact_distribution_with_every_drafter(
    options: dict[str, Any], settings: Settings, tmp_path: Path
) -> None:
    vocabulary = 4 if settings is PLAIN else 3
    index = tmp_path / "index"
    corpus = [[a, b, c, b, a] for a in range(vocabulary) for b in range(vocabulary) for c in range(vocabulary)]
    with index.open("wb") as stream:
        write_index(stream, CorpusTokens(corpus).tokens, NumberCodec(vocabulary).token_bytes())
    engine = make_engine(
        options,
        str(index),
        vocabulary=vocabulary,
        seed=7,
        noise=1.0,
        ends=tuple(settings.ends),
        batch_size=2000,
        rule="rejection",
        num_beams=settings.width,
        depth=2,
        drafts_per_layer=4,
    )
    counts, accepted = distribution_counts(engine, settings)
    assert accepted > 0
    assert excess(counts, distribution_of(settings, vocabulary)) < 1


def distribution_counts(engine: Engine, settings: Settings, requests: int = 4000) -> tuple[Counter[Results], int]:
    """What comes of a prompt that repeats itself, so that there is something to look up."""
    sampling = SamplingConfig(max_new_tokens=settings.max_new, n_best=settings.width, top_k=0)
    stream = (Request(id=str(i), seed=i, prompt_ids=DISTRIBUTION_PROMPT, sampling=sampling) for i in range(requests))
    results = list(engine.run(stream))
    counts = Counter(tuple(h.token_ids for h in result.hypotheses) for result in results)
    return counts, sum(result.stats.accepted for result in results)


@cache
def distribution_of(settings: Settings, vocabulary: int) -> dict[Results, float]:
    return results_distribution(table_rows(7, vocabulary, DISTRIBUTION_PROMPT), settings)


class MisTagged(DynamicTree):
    """Mutant: deterministic nodes that claim to have been drawn."""

    def drafts(
        self, context: DraftContext, forest: Forest, layer: int, logits: DraftLogits, count: int
    ) -> tuple[LayerDrafts, DraftDistribution | None]:
        drafts, _ = super().drafts(context, forest, layer, logits, count)
        rows = RowDraws(context, forest, layer, logits)
        drafts.sampled = drafts.valid
        index = drafts.above * logits.width + drafts.token
        return drafts, record_distribution(rows.candidates, rows.log_q, index, drafts.valid, "parent")


def test_deterministic_nodes_with_a_distribution_are_found() -> None:
    """Mixing up the kinds biases the distribution by far more than the test needs to see."""
    options: dict[str, Any] = {"drafter": "dynamic-tree", "tree": "top-k"}
    method: dict[str, Any] = {"rule": "rejection", "num_beams": 1, "depth": 2, "drafts_per_layer": 2}
    engine = make_engine(options, vocabulary=3, seed=7, noise=1.0, batch_size=2000, **method)
    assert engine.draft is not None
    engine._drafter = engine._stepper.drafter = MisTagged(engine.draft, 3, "top-k")
    assert excess(distribution_counts(engine, LONE, 2000)[0], distribution_of(LONE, 3)) > 1


class Watched(HashModel):
    """Keeps what it returns. Its logits depend on every token of a node's path, so a hole in its cache shows."""

    def forward(self, batch: ForestInput, *, logits: bool = True) -> Tensor | None:
        output = super().forward(batch, logits=logits)
        self.__dict__.setdefault("seen", []).append(output)
        return output


@pytest.mark.parametrize("changing", [False, True])
@pytest.mark.parametrize("drafter", ["beam+ngram", "rsd-s+retrieval", "dynamic-tree+ngram"])
def test_a_fused_draft_has_run_all_that_survives(drafter: str, changing: bool, index: str) -> None:
    """With one model as target and draft, both must say the same of every node, also behind added ones, and after
    iterations without drafts. No node is run twice."""
    target, draft = Watched(VOCABULARY, 3), Watched(VOCABULARY, 3)
    settings = {"second_drafts": 5, **({"index": index} if "retrieval" in drafter else {})}
    method = MethodConfig(drafter=drafter, num_beams=3, drafts_per_layer=8, depth=3, settings=settings)
    engine = Engine(target, draft, NumberCodec(VOCABULARY, (2,)), method, batch_size=4)
    if changing:
        engine._planner = RandomPlanner(3, 3, 8)
    propose, checked, added = engine._drafter.propose, 0, 0

    def step(*arguments: Any) -> Any:
        nonlocal checked, added
        seen.clear()
        draft.__dict__["seen"] = []
        report = plain_step(*arguments)
        [forest], [verified] = seen, target.__dict__["seen"][-1:]
        # tokens of the backlog alone give none
        drafted = [output for output in draft.__dict__["seen"] if output is not None]
        assert len(drafted) == forest.layers_run
        for layer, output in enumerate(drafted):
            nodes, start = forest.layers[layer], forest.offset(layer)
            count = nodes.token.shape[1]
            expected = verified[:, start : start + count]
            assert torch.equal(output[:, -count:][nodes.valid], expected[nodes.valid])
            checked += int(nodes.valid.sum())
            added += int((nodes.valid & ~nodes.sampled).sum()) if layer else 0
        return report

    seen: list[Forest] = []
    plain_step = engine._stepper.step
    engine._stepper.step = step  # type: ignore[method-assign]
    engine._drafter.propose = lambda context: seen.append(propose(context)) or seen[-1]  # type: ignore[method-assign]
    results = list(engine.run(request(i, 10 + i, temperature=1.5) for i in range(8)))
    assert sum(result.stats.accepted for result in results) > 0
    assert min(checked, added) > (4 if changing else 40)


def test_acceptance_is_counted_by_drafter(index: str) -> None:
    """What the nodes, their tokens and the texts say: a node that both proposed is the first one's; what only the
    second one proposed stands behind."""
    options = {"drafter": "beam+retrieval", "fusion_top_k": 0, "second_drafts": 5}
    engine = make_engine(options, index, depth=3, ends=())
    engine.log_steps = True
    watched = Counting(engine, 15)
    results = list(engine.run(request(i, 15) for i in range(10)))
    names, drafted, accepted = ("beam", "retrieval"), Counter[str](), Counter[str]()
    for result in results:
        stats = result.stats
        assert tuple(stats.drafters) == names
        assert sum(part.drafted for part in stats.drafters.values()) == stats.drafted
        assert sum(part.accepted for part in stats.drafters.values()) == stats.accepted
        logged = [layer for step in stats.step_log for layer in step.layers]
        for name in names:
            drafted[name] += sum(layer.drafters[name].drafted for layer in logged)
            accepted[name] += stats.drafters[name].accepted
            assert sum(layer.drafters[name].accepted for layer in logged) == stats.drafters[name].accepted
    assert (drafted, accepted) == (watched.nodes, watched.accepted)
    assert min(accepted.values()) > 5


class Looking(Observer):
    """Looks at everything and does nothing."""

    attached = True


class Counting(Observer):
    """Counts by drafter what an engine of drafter beam+retrieval drafts and accepts in the layers it reaches. All texts
    have `length` tokens."""

    attached = True

    def __init__(self, engine: Engine, length: int) -> None:
        self.nodes, self.accepted, self.length = Counter[str](), Counter[str](), length
        engine.observe(self)

    def drafted(self, context: DraftContext, forest: Forest) -> None:
        self.going, self.left = context.beams.valid.any(1), self.length - context.beams.length

    def verified(self, view: LayerView, draws: LayerDraws) -> None:
        if view.drafts is None:
            return
        for row in torch.nonzero(self.going).flatten().tolist():
            for node in range(view.drafts.token.shape[1]):
                if view.drafts.valid[row, node]:
                    name = "beam" if view.drafts.sampled[row, node] else "retrieval"
                    self.nodes[name] += 1
                    self.accepted[name] += int((draws.node[row][draws.valid[row]] == view.drafts.offset + node).sum())
        self.left = self.left - 1
        self.going = self.going & draws.passed & (self.left > 0)


def told_of(results: Iterable[RequestResult]) -> dict[str, tuple[object, ...]]:
    return {r.request.id: (r.hypotheses, r.stats.steps, r.stats.target_calls, r.stats.accepted) for r in results}


@pytest.mark.parametrize("seed", range(4))
def test_of_two_equal_requests_the_later_one_knows_nothing_of_the_first(seed: int) -> None:
    """Under `rejection` a proposal that goes by what the other row has seen gives another text."""
    engine = make_engine({"drafter": "ngram"}, rule="rejection", drafts_per_layer=6, depth=3, batch_size=2, seed=seed)
    first, short = replace(request(3, 24), id="first"), replace(request(2, 2), id="short")
    counters = told_of(engine.run([first, short, replace(first, id="second")]))
    assert counters["first"] == counters["second"]


@pytest.mark.parametrize("seed", range(4))
def test_what_ngram_remembers_goes_with_its_row(seed: int) -> None:
    """Guards rows that move when the last requests are left, and a row that goes by those beside it: with `rejection`
    its text tells. Requests of one batch have top_k or none."""
    requests = [request(i, new, top_k=top) for i, new, top in ((0, 3, 0), (1, 3, 5), (3, 24, 5), (2, 2, 0))]
    first_counters = {}
    for size in (1, 4):
        engine = make_engine(
            {"drafter": "ngram"}, rule="rejection", drafts_per_layer=6, depth=3, batch_size=size, seed=seed
        )
        counters = told_of(engine.run(requests))
        assert first_counters.setdefault("alone", counters) == counters


@pytest.mark.parametrize("rule", ["search", "rejection"])
def test_looking_at_an_engine_changes_no_text(rule: str) -> None:
    """Guards an observer that keeps `ngram` from what it remembers."""
    requests, runs = [request(i, 24) for i in range(4)], []
    for watched in (False, True):
        engine = make_engine({"drafter": "ngram"}, rule=rule, drafts_per_layer=6, depth=3, batch_size=2)
        if watched:
            engine.observe(Looking())
        runs.append(told_of(engine.run(requests)))
    assert runs[0] == runs[1]


def test_requests_do_not_see_each_other() -> None:
    """The order and the batch of requests change neither text nor counters of the drafters that read the text."""
    runs = []
    for batch_size, order in ((1, 1), (4, -1), (8, 1)):
        engine = make_engine({"drafter": "ngram"}, drafts_per_layer=6, depth=3, batch_size=batch_size)
        results = engine.run([request(i, 9 + i) for i in range(8)][::order])
        runs.append({r.request.id: (r.hypotheses, r.stats.target_calls, r.stats.accepted) for r in results})
    assert runs[0] == runs[1] == runs[2]
