"""Settings far beyond what a run can use. Guards: layers that nothing can take, an iteration that nothing stops, a row
that is blamed for a method that fits into no memory."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from dsbd_cli.config.method import MethodConfig
from dsbd_cli.config.sampling import SamplingConfig
from dsbd_cli.engine.decoding.engine import Engine
from dsbd_cli.engine.planning.planner import LEAST_DEPTH, Shape
from dsbd_cli.engine.protocols import ForestInput
from dsbd_cli.errors import OutOfMemoryRowError, UsageError
from dsbd_cli.requests import Request
from tests.helpers.toys import NumberCodec, TableLM, table_pair

VOCABULARY = 12


def engine(depth: int, batch_size: int = 4, rule: str = "coupled", drafts: int = 4) -> Engine:
    target, draft = table_pair(1, VOCABULARY, 0.5)
    method = MethodConfig(rule=rule, num_beams=3, drafts_per_layer=drafts, depth=depth)
    return Engine(target, draft, NumberCodec(VOCABULARY, (2,)), method, batch_size=batch_size)


def requests(count: int, *lengths: int) -> list[Request]:
    samplings = [SamplingConfig(max_new_tokens=length, n_best=3) for length in lengths]
    return [
        Request(id=str(i), seed=i, prompt_ids=(i % 5, i % 7), sampling=samplings[i % len(lengths)])
        for i in range(count)
    ]


def texts(decoder: Engine, rows: list[Request]) -> list[object]:
    return [[text.token_ids for text in result.hypotheses] for result in decoder.run(rows)]


def test_depths_are_few_and_cover_what_is_left() -> None:
    depths = [Shape(1000, 8).within(left).depth for left in range(1, 3000)]
    assert all(depth >= min(left, 1000) for left, depth in enumerate(depths, 1))
    assert all(depth <= max(LEAST_DEPTH, 2 * left) for left, depth in enumerate(depths, 1))
    assert set(depths) == {8, 16, 32, 64, 128, 256, 512, 1000}
    assert {Shape(5, 8).within(left).depth for left in range(1, 99)} == {5}


def test_no_layers_are_drafted_that_nothing_can_take() -> None:
    deep = engine(1000)
    results = list(deep.run(requests(6, 5)))
    assert max(result.stats.kv_peak_slots for result in results) < 5 + 3 + 2 * LEAST_DEPTH * 4
    assert all(result.stats.draft_calls <= LEAST_DEPTH * result.stats.target_calls for result in results)
    assert texts(engine(1000), requests(6, 5)) == texts(engine(5), requests(6, 5))


@pytest.mark.parametrize("rule", ["coupled", "rejection"])
def test_how_much_the_rows_beside_it_have_left_does_not_matter(rule: str) -> None:
    rows = requests(12, 3, 11, 30)
    together = texts(engine(20, 7, rule), rows)
    assert together == [texts(engine(20, 1, rule), [row])[0] for row in rows]


class Interrupted(TableLM):
    """A draft in whose third forward somebody stops the engine."""

    engine: Engine | None = None
    forwards = 0

    def forward(self, batch: ForestInput, *, logits: bool = True) -> Tensor | None:
        self.forwards += logits
        if self.forwards == 3:
            assert self.engine is not None
            self.engine.stop()
        return super().forward(batch, logits=logits)


@pytest.mark.parametrize("drafter", ["beam", "rsd-s", "beam+ngram"])
def test_a_stop_ends_an_iteration_between_two_layers(drafter: str) -> None:
    target, draft = table_pair(1, VOCABULARY, 0.5)
    interrupted = Interrupted(draft.table)
    method = MethodConfig(num_beams=3, drafts_per_layer=4, depth=50, drafter=drafter)
    decoder = Engine(target, interrupted, NumberCodec(VOCABULARY), method)
    interrupted.engine = decoder
    assert list(decoder.run(requests(3, 200))) == []
    assert interrupted.forwards == 3


class Huge(TableLM):
    """A target that must not be run."""

    def forward(self, batch: ForestInput, *, logits: bool = True) -> Tensor | None:
        raise AssertionError


def huge(**method: object) -> Engine:
    target = Huge(torch.zeros(VOCABULARY, VOCABULARY, VOCABULARY))
    draft = target if method.get("depth") else None
    return Engine(target, draft, NumberCodec(VOCABULARY), MethodConfig.of(method))


def test_a_method_that_fits_into_no_memory_is_told_before_anything_is_allocated() -> None:
    with pytest.raises(UsageError, match=r"^num_beams is 100000000, but 100000000 nodes in an iteration of"):
        huge(num_beams=10**8, depth=0)
    with pytest.raises(UsageError, match=r"^num_beams is 4 and drafts_per_layer 100000000, but 100000004 nodes"):
        huge(drafts_per_layer=10**8, depth=1)


def test_a_depth_that_fits_into_no_memory_is_told_of_the_rows_that_would_use_it() -> None:
    decoder = huge(depth=10**6)
    row = requests(1, 10**6)
    (result,) = decoder.run(row)
    assert isinstance(result.error, OutOfMemoryRowError)
    assert str(result.error).startswith("depth is 1000000 and max_new_tokens 1000000: 8000004 nodes in an iteration do")


def test_rows_whose_requests_have_ended_are_not_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are dropped as soon as a quarter of the rows is free and no request waits."""
    target, _ = table_pair(1, VOCABULARY, 0.5)
    method, seen = MethodConfig(rule="coupled", num_beams=3, depth=0), list[int]()
    decoder = Engine(target, None, NumberCodec(VOCABULARY, ()), method, batch_size=8)
    forward = TableLM.forward

    def counted(self: TableLM, batch: ForestInput, *, logits: bool = True) -> Tensor | None:
        if logits:
            seen.append(len(batch.tokens))
        return forward(self, batch, logits=logits)

    monkeypatch.setattr(TableLM, "forward", counted)
    rows = [
        Request(prompt_ids=(1, 1), sampling=SamplingConfig(max_new_tokens=most)) for most in (2, 5, 5, 9, 9, 9, 9, 12)
    ]
    assert [len(result.hypotheses[0].token_ids) for result in decoder.run(rows)] == [2, 5, 5, 9, 9, 9, 9, 12]
    assert seen == [8] * 5 + [5] * 4 + [1] * 3
