"""How requests end, fail and share a batch. Guards: tokens past an end, a lost row, a row that changes its
neighbours."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from dsbd_cli.config.method import MethodConfig
from dsbd_cli.config.sampling import SamplingConfig
from dsbd_cli.engine.decoding.engine import Engine
from dsbd_cli.engine.protocols import ForestInput
from dsbd_cli.errors import InvalidRowError, NumericalError, OutOfMemoryRowError, PromptTooLongError, UsageError
from dsbd_cli.requests import Request
from tests.helpers.toys import NumberCodec, TableLM, table_pair

VOCABULARY = 12


def engine(rule: str = "coupled", eos: tuple[int, ...] = (2,), batch_size: int = 4, **method: object) -> Engine:
    target, draft = table_pair(1, VOCABULARY, 0.5)
    config = MethodConfig.of({"rule": rule, "depth": 4, "width": "fixed", **method})
    return Engine(target, draft if config.depth else None, NumberCodec(VOCABULARY, eos), config, batch_size=batch_size)


def requests(count: int, **sampling: object) -> list[Request]:
    config = SamplingConfig(**{"max_new_tokens": 10, **sampling})
    return [Request(id=str(i), seed=i, prompt_ids=(1 + i % 4, i % 5), sampling=config) for i in range(count)]


@pytest.mark.parametrize("rule", ["coupled", "search", "rejection", "with-replacement"])
@pytest.mark.parametrize("eos", [(2,), (2, 5, 9, 11)])
def test_nothing_follows_an_end_token(rule: str, eos: tuple[int, ...]) -> None:
    for result in engine(rule, eos, batch_size=12).run(requests(30, n_best=4)):
        assert result.hypotheses
        for hypothesis in result.hypotheses:
            ids = hypothesis.token_ids
            assert not set(ids[:-1]) & set(eos)
            assert (hypothesis.finish_reason == "stop") == (ids[-1] in eos)
            assert len(ids) <= 10
            assert hypothesis.finish_reason == "stop" or len(ids) == 10
            words = hypothesis.text.split()
            assert words == [str(token) for token in ids if token not in eos]


@pytest.mark.parametrize("rule", ["coupled", "search", "rejection", "with-replacement"])
def test_reported_scores_are_the_targets(rule: str) -> None:
    """logprob is recomputed from the table, whatever was drafted; hypotheses come best first."""
    decoder = engine(rule, batch_size=8)
    logs = torch.log_softmax(decoder.target.table.double(), -1)  # type: ignore[attr-defined]
    for result in decoder.run(requests(20, n_best=4, length_penalty=0.5)):
        for hypothesis in result.hypotheses:
            tokens = [*result.request.prompt_ids, *hypothesis.token_ids]  # type: ignore[misc]
            total = sum(float(logs[tokens[i - 2], tokens[i - 1], tokens[i]]) for i in range(2, len(tokens)))
            assert hypothesis.logprob == pytest.approx(total, abs=1e-4)
            assert hypothesis.score == pytest.approx(total / hypothesis.num_tokens**0.5, abs=1e-4)
        scores = [hypothesis.score for hypothesis in result.hypotheses]
        assert scores == sorted(scores, reverse=True)


@pytest.mark.parametrize("rule", ["coupled", "search", "rejection"])
def test_stop_strings_end_beams_inside_an_iteration(rule: str) -> None:
    plain = [r.hypotheses[0].text for r in engine(rule, batch_size=12).run(requests(30))]
    assert any("3 " in text for text in plain)
    stopped = list(engine(rule, batch_size=12).run(requests(30, stop=("3 ", "8 4"))))
    for result in stopped:
        best = result.hypotheses[0]
        assert "3 " not in best.text
        assert "8 4" not in best.text
        if 2 not in best.token_ids and best.finish_reason == "stop":
            assert best.token_ids[-1] == 3 or best.token_ids[-2:] == (8, 4)
    assert any(2 not in r.hypotheses[0].token_ids and r.hypotheses[0].finish_reason == "stop" for r in stopped)


@pytest.mark.parametrize("rule", ["coupled", "search"])
def test_a_stop_string_ends_like_an_end_token(rule: str) -> None:
    """One token as stop string and as end token: the same token ids, with and without a draft."""
    by_eos = list(engine(rule, (2, 3), batch_size=8).run(requests(20, n_best=4)))
    for depth in (0, 4):
        by_stop = list(engine(rule, (2,), batch_size=8, depth=depth).run(requests(20, n_best=4, stop=("3 ",))))
        for a, b in zip(by_eos, by_stop, strict=True):
            assert [h.token_ids for h in a.hypotheses] == [h.token_ids for h in b.hypotheses]


def test_memory_saving_keeps_one_path() -> None:
    for rule in ("coupled", "rejection", "search"):
        decoder = engine(rule, (), num_beams=3, depth=2, drafts_per_layer=6, memory_saving=True)
        decoder.log_steps = True
        for result in decoder.run(requests(10, max_new_tokens=20)):
            assert len(result.hypotheses[0].token_ids) == 20
            for step in result.stats.step_log:
                # the row holds one path: everything but the nodes in flight is common prefix
                assert step.kv_slots - step.nodes <= step.trunk + 3
            ends = result.stats.step_log[:-1]
            assert all(after.trunk == before.trunk + before.steps for before, after in itertools.pairwise(ends))


def test_rows_do_not_change_their_neighbours() -> None:
    """Different settings, lengths and stops in one batch give what each gives alone."""
    mixed = [
        Request(
            id=str(i),
            seed=i,
            prompt_ids=tuple(1 + (i + j) % 9 for j in range(1 + 7 * (i % 3))),
            sampling=SamplingConfig(
                temperature=(0.7, 1.0, 1.5)[i % 3],
                top_k=(4, 0, 9)[i % 3],
                top_p=(1.0, 0.9)[i % 2],
                max_new_tokens=(3, 17, 9)[i % 3],
                stop=(("7 ",), ())[i % 2],
                length_penalty=(1.0, 0.0)[i % 2],
                n_best=2,
            ),
        )
        for i in range(12)
    ]
    for rule in ("coupled", "rejection"):
        together = [r.hypotheses for r in engine(rule, batch_size=5).run(mixed)]
        alone = [next(engine(rule, batch_size=1).run([request])).hypotheses for request in mixed]
        assert [[h.token_ids for h in a] for a in together] == [[h.token_ids for h in b] for b in alone]


def test_results_come_in_input_order_and_are_read_lazily() -> None:
    read = 0

    def source() -> Iterator[Request]:
        nonlocal read
        for request in requests(200):
            read += 1
            yield request

    stream = engine(batch_size=4).run(source())
    first = [next(stream).request.id for _ in range(3)]
    assert first == ["0", "1", "2"]
    assert read < 60
    assert [result.request.id for result in stream] == [str(i) for i in range(3, 200)]


def test_failing_rows_leave_the_others_alone() -> None:
    class Broken(TableLM):
        """NaN for prompts that start with token 9."""

        def forward(self, batch: ForestInput, *, logits: bool = True) -> Tensor | None:
            out = super().forward(batch, logits=logits)
            if out is not None:
                out = out.clone()
                out[self.tokens[:, 0] == 9] = torch.nan
            return out

    table, draft = table_pair(1, VOCABULARY, 0.5)
    decoder = Engine(Broken(table.table), draft, NumberCodec(VOCABULARY, (2,)), MethodConfig(depth=4), batch_size=3)
    good = requests(8)
    bad = [
        Request(id="nan", seed=1, prompt_ids=(9, 1), sampling=good[0].sampling),
        Request(id="empty", seed=1, prompt="", sampling=good[0].sampling),
        Request(id="many", seed=1, prompt_ids=(1,), sampling=SamplingConfig(n_best=5)),
    ]
    results = {r.request.id: r for r in decoder.run([good[0], *bad, *good[1:]])}
    assert isinstance(results["nan"].error, NumericalError)
    assert isinstance(results["empty"].error, InvalidRowError)
    assert isinstance(results["many"].error, InvalidRowError)
    expected = {r.request.id: r.hypotheses for r in engine().run(good)}
    for key, hypotheses in expected.items():
        assert [h.token_ids for h in results[key].hypotheses] == [h.token_ids for h in hypotheses]


class Cramped(TableLM):
    """Runs out of memory with more than `room` rows, or with a prompt that starts with token 9."""

    room = 2
    error: RuntimeError = torch.OutOfMemoryError()

    def reserve(self, rows: int, slots: int, window: int | None = None) -> None:
        if rows > self.room:
            raise self.error
        super().reserve(rows, slots, window)

    def forward(self, batch: ForestInput, *, logits: bool = True) -> Tensor | None:
        if not logits and (batch.tokens[:, 0] == 9).any():
            raise self.error
        return super().forward(batch, logits=logits)


@pytest.mark.parametrize("allocator", ["cuda", "cpu"])
def test_out_of_memory_halves_the_batch_and_goes_on(allocator: str) -> None:
    table, draft = table_pair(1, VOCABULARY, 0.5)
    cramped = Cramped(table.table)
    if allocator == "cpu":  # what the processor's allocator says
        with pytest.raises(RuntimeError) as caught:
            torch.empty(1 << 60, dtype=torch.uint8)
        cramped.error = caught.value
    decoder = Engine(cramped, draft, NumberCodec(VOCABULARY, (2,)), MethodConfig(depth=4), batch_size=9)
    good = requests(14)
    heavy = Request(id="heavy", seed=1, prompt_ids=(9, 1), sampling=good[0].sampling)
    results = list(decoder.run([*good[:5], heavy, *good[5:]]))
    assert [r.request.id for r in results] == [*map(str, range(5)), "heavy", *map(str, range(5, 14))]
    assert isinstance(results.pop(5).error, OutOfMemoryRowError)
    for result, expected in zip(results, engine().run(good), strict=True):
        assert result.hypotheses == expected.hypotheses


class Weighty(TableLM):
    """Takes memory for each slot, and notes the largest cache."""

    most = 0

    def kv_bytes_per_slot(self) -> int:
        return 100

    def reserve(self, rows: int, slots: int, window: int | None = None) -> None:
        self.most = max(self.most, 100 * rows * slots)
        super().reserve(rows, slots, window)


def test_caches_that_the_memory_does_not_hold_are_not_made(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards the whole run on a processor, where the system ends the process for a row that asks for many tokens: a
    long row is answered in a smaller batch, one that never fits gets its error."""
    monkeypatch.setattr("dsbd_cli.engine.cache.caches.free_bytes", lambda _, files: 200_000)
    table, draft = table_pair(1, VOCABULARY, 0.5)
    weighty = Weighty(table.table)
    decoder = Engine(weighty, draft, NumberCodec(VOCABULARY, (2,)), MethodConfig(depth=4), batch_size=8)
    good = requests(6)
    long, longer = (
        Request(id=str(tokens), seed=1, prompt_ids=(3, 1), sampling=SamplingConfig(max_new_tokens=tokens))
        for tokens in (700, 5000)
    )
    results = {result.request.id: result for result in decoder.run([*good[:3], long, longer, *good[3:]])}
    assert weighty.most <= 0.9 * 200_000
    assert isinstance(results.pop("5000").error, OutOfMemoryRowError)
    for expected in engine().run([*good, long]):
        assert results[expected.request.id].hypotheses == expected.hypotheses


def test_a_slow_producer_gets_its_answers_before_the_next_row_is_ready() -> None:
    done: list[str] = []

    def source() -> Iterator[Request | None]:
        for request in requests(4):
            yield request
            while len(done) <= int(request.id):
                yield None

    for result in engine().run(source()):
        done.append(result.request.id)
    assert done == ["0", "1", "2", "3"]


def test_prompts_past_the_positions_are_refused() -> None:
    decoder = engine()
    decoder.target.max_positions = 12  # type: ignore[misc]
    result = next(
        decoder.run([Request(id="a", seed=1, prompt_ids=(1, 2, 3), sampling=SamplingConfig(max_new_tokens=10))])
    )
    assert isinstance(result.error, PromptTooLongError)
    assert "3 tokens" in str(result.error)
    assert "12 positions" in str(result.error)


def test_a_long_prompt_is_prefilled_in_chunks() -> None:
    prompt = tuple(1 + (i * i) % 11 for i in range(1300))
    sampling = SamplingConfig(max_new_tokens=6)
    long = next(engine().run([Request(id="a", seed=3, prompt_ids=prompt, sampling=sampling)]))
    short = next(engine().run([Request(id="a", seed=3, prompt_ids=prompt[-2:], sampling=sampling)]))
    assert long.hypotheses[0].token_ids == short.hypotheses[0].token_ids
    assert long.prompt_tokens == 1300


def test_a_broken_draft_costs_speed_not_text() -> None:
    target, _ = table_pair(1, VOCABULARY, 0.5)
    draft = TableLM(torch.full((VOCABULARY,) * 3, torch.nan))
    decoder = Engine(target, draft, NumberCodec(VOCABULARY, (2,)), MethodConfig(depth=4), batch_size=3)
    for a, b in zip(decoder.run(requests(6)), engine(depth=0).run(requests(6)), strict=True):
        assert a.hypotheses[0].token_ids == b.hypotheses[0].token_ids
        assert a.stats.accepted == 0


def test_contradicting_methods_are_refused() -> None:
    target, draft = table_pair(1, VOCABULARY, 0.5)
    codec = NumberCodec(VOCABULARY)
    with pytest.raises(UsageError, match="depth"):
        Engine(target, None, codec, MethodConfig(depth=3))
    with pytest.raises(UsageError, match="depth"):
        Engine(target, draft, codec, MethodConfig(depth=0))
    with pytest.raises(UsageError, match="batch_size"):
        Engine(target, draft, codec, batch_size=0)
