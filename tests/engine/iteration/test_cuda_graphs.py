"""Captured iterations: the same results as plain ones, from tensors at fixed addresses; the real capture on a GPU.

Guards: a tensor of the state that replays do not read or write at its home, shapes mixed up, a capture used after the
caches have moved.
"""

from __future__ import annotations

import itertools
import random
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor

from dsbd_cli.config.method import MethodConfig
from dsbd_cli.config.model import ModelSpec
from dsbd_cli.config.sampling import SamplingConfig
from dsbd_cli.engine.decoding.engine import Engine
from dsbd_cli.engine.iteration import cuda_graphs as graphs_module
from dsbd_cli.engine.iteration.cuda_graphs import (
    CaptureError,
    CudaRecorder,
    IterationGraphs,
    Phase,
    Recording,
    StaticBuffers,
)
from dsbd_cli.engine.iteration.iteration import DeviceReport
from dsbd_cli.errors import UsageError
from dsbd_cli.requests import Request
from tests.helpers.toys import NumberCodec, table_pair

VOCABULARY = 12


class Again:
    """A recording that runs its phase again, as a graph does, whatever state the engine now holds."""

    def __init__(self, phase: Phase) -> None:
        self.replay = phase


class FakeRecorder:
    """Records without computing, as a capture does."""

    def __init__(self) -> None:
        self.recorded = 0

    def record(self, phase: Phase) -> Recording:
        self.recorded += 1
        return Again(phase)


def own_limits(number: int) -> dict[str, Any]:
    """Ends and beams of a row's own, for some rows."""
    return {
        "eos_token_id": (3, number % 5) if number % 10 > 7 else None,
        "early_stopping": "never" if number in (5, 6) else False,
        "num_beams": 2 if number in (10, 11) else None,
    }


def decode(
    graphs: IterationGraphs | None,
    rule: str,
    own: Callable[[int], dict[str, Any]] = lambda number: {},
    **method: object,
) -> list[list[tuple[int, ...]]]:
    target, draft = table_pair(1, VOCABULARY, 0.4)
    config = MethodConfig.of(
        {"rule": rule, "num_beams": 3, "drafts_per_layer": 8, "depth": 3, "width": "fixed", **method}
    )
    engine = Engine(target, draft, NumberCodec(VOCABULARY, (2,)), config, batch_size=4)
    engine._stepper.graphs = graphs
    texts = []
    for start in (0, 30):  # two batches after one another: the second uses what the first captured, or drops it
        sampling = [
            SamplingConfig(max_new_tokens=12 + i % 5, top_k=6, stop=("7 7",) if i % 9 == 8 else (), **own(i))
            for i in range(20)
        ]
        requests = (
            Request(id=str(i), seed=start + i, prompt_ids=(i % 5, i % 7), sampling=sampling[i]) for i in range(20)
        )
        texts += [[hypothesis.token_ids for hypothesis in result.hypotheses] for result in engine.run(requests)]
    return texts


@pytest.mark.parametrize("rule", ["coupled", "search", "rejection"])
def test_captured_iterations_give_the_same_texts(rule: str) -> None:
    graphs = IterationGraphs(FakeRecorder())
    assert decode(graphs, rule) == decode(None, rule)
    assert graphs.replays > 20


@pytest.mark.parametrize("rule", ["coupled", "search", "rejection"])
def test_captures_know_rows_with_limits_of_their_own(rule: str) -> None:
    graphs = IterationGraphs(FakeRecorder())
    assert decode(graphs, rule, own_limits) == decode(None, rule, own_limits)
    assert graphs.replays > 5


@pytest.mark.parametrize("rule", ["coupled", "search"])
def test_captured_iterations_walk_the_tries_of_their_rows(rule: str) -> None:
    """Every row has a list of its own, so the table of tries is written, outgrown and reused between replays."""

    def texts(graphs: IterationGraphs | None) -> list[list[tuple[int, ...]]]:
        target, draft = table_pair(1, VOCABULARY, 0.4)
        method = MethodConfig(rule, 3, 8, 2, width="fixed")
        engine = Engine(target, draft, NumberCodec(VOCABULARY, (2,)), method, batch_size=2)
        engine._stepper.graphs = graphs
        sampling = SamplingConfig(max_new_tokens=12, n_best=3, top_k=6)
        requests, rng = [], random.Random(1)
        for i in range(40):
            many = (" ".join(str(rng.randrange(3, VOCABULARY)) for _ in range(10)) + " " for _ in range(40 + 8 * i))
            allow = tuple(dict.fromkeys(many))
            requests.append(Request(id=str(i), seed=i, prompt_ids=(i % 5, 3), sampling=sampling, allow=allow))
        results = engine.generate(requests)
        for request, result in zip(requests, results, strict=True):
            assert {beam.text for beam in result.hypotheses} <= set(request.allow or ())
        return [[beam.token_ids for beam in result.hypotheses] for result in results]

    graphs = IterationGraphs(FakeRecorder())
    assert texts(graphs) == texts(None)
    assert graphs.replays > 10


def test_every_tensor_of_the_state_is_at_its_home_before_and_after() -> None:
    """Guards a field that the last phase rebinds and nobody writes back."""

    @dataclass
    class Inner:
        x: Tensor

    @dataclass
    class State:
        a: Tensor
        inner: Inner
        note: list[str] = field(default_factory=list)

    homes = StaticBuffers()
    first = State(torch.tensor([1.0]), Inner(torch.zeros(1).expand(3)))
    homes.move_in(first)
    a, x = first.a, first.inner.x
    assert x.is_contiguous()
    second = State(torch.tensor([5.0]), Inner(torch.arange(3.0)))
    homes.move_in(second)
    assert second.a is a
    assert second.inner.x is x
    assert (a.item(), x.tolist()) == (5.0, [0.0, 1.0, 2.0])
    wider = State(torch.tensor([5.0, 6.0]), Inner(x))
    homes.move_in(wider)
    assert wider.a is not a
    assert a.tolist() == [5.0]


def test_a_shape_runs_plainly_first_and_is_captured_once() -> None:
    recorder, laps = FakeRecorder(), []
    graphs = IterationGraphs(recorder)

    @dataclass
    class State:
        count: Tensor

    class Work:
        result: Tensor

    state = State(torch.zeros(1))
    for turn in range(6):
        work = Work()

        def phase(work: Work = work) -> None:
            state.count = state.count + 1
            work.result = state.count * 10

        work = graphs.run("shape", state, work, (phase,), laps.append)
        assert state.count.item() == turn + 1
        assert work.result.item() == 10 * (turn + 1)
    assert (recorder.recorded, graphs.replays, laps) == (1, 4, [0] * 6)
    graphs.forget()
    graphs.run("shape", state, Work(), (phase,), laps.append)
    assert recorder.recorded == 1


def test_forgotten_captures_leave_no_memory_behind() -> None:
    """Guards buffers of earlier batches, which would stay for the engine's life."""

    @dataclass
    class State:
        x: Tensor

    graphs, state = IterationGraphs(FakeRecorder()), State(torch.zeros(1))

    def phase() -> None:
        state.x = state.x + 1

    for _ in range(4):
        graphs.run("shape", state, None, (phase,), lambda number: None)
    buffer = weakref.ref(state.x)
    graphs.forget()
    graphs.run("shape", state, None, (phase,), lambda number: None)
    assert state.x.item() == 5
    assert buffer() is None


def test_a_plain_run_before_a_capture_has_the_tensors_of_the_capture() -> None:
    """Guards kernels that are compiled inside a capture, for other strides or alignments than the plain runs had."""

    @dataclass
    class State:
        x: Tensor

    graphs, seen = IterationGraphs(FakeRecorder()), []
    for _ in range(5):
        state = State(torch.arange(8.0)[1::2])

        def phase(state: State = state) -> None:
            seen.append((state.x.data_ptr(), state.x.stride()))
            state.x = state.x + 1

        graphs.run("shape", state, None, (phase,), lambda number: None)
        assert state.x.tolist() == [2.0, 4.0, 6.0, 8.0]
    assert graphs.replays == 3
    assert len(set(seen)) == 1


def test_a_capture_makes_no_tensor_that_outlives_it() -> None:
    """Guards a home in memory that other captures write, because they share one pool."""

    @dataclass
    class State:
        x: Tensor

    told: list[str] = []
    graphs, state = IterationGraphs(FakeRecorder()), State(torch.zeros(1))
    graphs.tell = told.append
    for turn in range(4):
        state.x = torch.zeros(1)

        def phase(turn: int = turn) -> None:
            state.x = torch.full((turn + 2,), 1.0)

        class Now(FakeRecorder):
            def record(self, phase: Phase) -> Recording:
                phase()
                return super().record(phase)

        graphs._recorder = Now()
        graphs.run("shape", state, None, (phase,), lambda number: None)
        assert state.x.tolist() == [1.0] * (turn + 2)
    (line,) = told
    assert "a new tensor of its state, x [4]" in line


def test_a_capture_keeps_the_counters_alone() -> None:
    """Guards logits [R, N, V] of every shape, which would fill the memory."""
    graphs: IterationGraphs[DeviceReport] = IterationGraphs(FakeRecorder())
    decode(graphs, "coupled")
    kept = [entry.work for entry in graphs._entries.values()]
    assert kept
    assert all(set(vars(work)) == {"counters", "draft_calls"} for work in kept)


class Cuda:
    """Stands in for torch.cuda: streams by name, and the end of a capture that failed, which raises once more and does
    not give the stream back (torch 2.13)."""

    def __init__(self, device: str = "cuda:0") -> None:
        self.stream, self.device_now, self.asked = "default", device, dict[str, object]()

    def patch(self, monkeypatch: pytest.MonkeyPatch) -> None:
        for name in ("graph_pool_handle", "Stream", "CUDAGraph", "current_stream", "set_stream", "device", "graph"):
            monkeypatch.setattr(torch.cuda, name, getattr(self, name, None) or (lambda *arguments: "something"))

    def Stream(self, device: object) -> str:  # noqa: N802
        return f"of {device}"

    def current_stream(self) -> str:
        return self.stream

    def set_stream(self, stream: str) -> None:
        self.stream = stream

    @contextmanager
    def device(self, device: torch.device) -> Iterator[None]:
        before, self.device_now = self.device_now, str(device)
        yield
        self.device_now = before

    @contextmanager
    def graph(self, graph: object, *, stream: str, **asked: object) -> Iterator[None]:
        self.asked, before, self.stream = asked, self.stream, stream
        assert self.device_now in stream, "a capture of another device records nothing"
        try:
            yield
        except RuntimeError:
            message = "operation failed due to a previous error during capture"
            raise RuntimeError(message)  # noqa: B904  # as torch does
        self.stream = before


def test_a_capture_is_of_its_own_device_and_leaves_the_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards a second GPU, on which torch's own stream of captures is that of the first one, and a failed capture,
    after which all else would run on the stream of the capture."""
    cuda = Cuda()
    cuda.patch(monkeypatch)
    recorder = CudaRecorder(torch.device("cuda:1"))
    seen: list[str] = []
    recorder.record(lambda: seen.append(cuda.stream))
    assert seen == ["of cuda:1"]
    assert (cuda.stream, cuda.asked["capture_error_mode"]) == ("default", "thread_local")

    def failing(error: Exception) -> None:
        raise error

    with pytest.raises(CaptureError, match=r"^operation not permitted when stream is capturing$"):
        recorder.record(lambda: failing(RuntimeError("operation not permitted when stream is capturing")))
    assert cuda.stream == "default"
    for memory in (torch.OutOfMemoryError("CUDA out of memory."), RuntimeError("Triton Error [CUDA]: out of memory")):
        with pytest.raises(type(memory), match="out of memory"):
            recorder.record(lambda memory=memory: failing(memory))
        assert cuda.stream == "default"


def test_asking_for_graphs_without_a_gpu_is_refused() -> None:
    target, draft = table_pair(1, VOCABULARY, 0.4)
    with pytest.raises(UsageError, match="cuda_graphs cannot be had: they need both models"):
        Engine(target, draft, NumberCodec(VOCABULARY), MethodConfig(num_beams=2, depth=2), cuda_graphs=True)


@pytest.mark.parametrize("drafter", ["beam+grammar", "ngram+grammar", "grammar+ngram"])
def test_graphs_are_refused_where_one_of_two_drafters_works_on_the_host(drafter: str) -> None:
    target, draft = table_pair(1, VOCABULARY, 0.4)
    method = MethodConfig(num_beams=2, depth=2, drafter=drafter)
    with pytest.raises(UsageError, match="cuda_graphs cannot be had: the drafter works on the host"):
        Engine(target, draft if method.needs_draft else None, NumberCodec(VOCABULARY), method, cuda_graphs=True)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("rule", ["coupled", "search", "rejection"])
def test_the_captured_path_ran_and_gave_the_same_texts(rule: str) -> None:
    from dsbd_cli import load
    from training.tasks import GENERATORS

    texts = []
    for captured in (False, True):
        method = MethodConfig(rule=rule, num_beams=4, drafts_per_layer=8, depth=3, width="fixed")
        engine = load(ModelSpec("builtin:target", device="cuda"), method=method, batch_size=4)
        if not captured:
            engine._stepper.graphs = None
        assert (engine._stepper.graphs is not None) == captured
        records = list(itertools.islice(GENERATORS["sql"].records("test", 1), 12))
        sampling = SamplingConfig(max_new_tokens=48)
        requests = [Request(id=r.id, seed=i, prompt=r.prompt, sampling=sampling) for i, r in enumerate(records)]
        texts.append([result.hypotheses[0].token_ids for result in engine.run(requests)])
        if captured:
            assert engine._stepper.graphs is not None
            assert engine._stepper.graphs.replays > 10
    assert texts[0] == texts[1]


def test_shapes_of_an_adaptive_depth_are_captured_one_by_one() -> None:
    graphs = IterationGraphs(FakeRecorder())
    assert decode(graphs, "coupled", adaptive_depth=True) == decode(None, "coupled")
    assert graphs.replays > 0


def test_old_captures_make_room_for_new_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards captures that can never be replayed again and keep others out."""
    monkeypatch.setattr(graphs_module, "MOST_GRAPHS", 2)

    @dataclass
    class State:
        count: Tensor

    recorder = FakeRecorder()
    graphs, state = IterationGraphs(recorder), State(torch.zeros(1))
    for key in ("a", "b", "c", "c", "b", "a"):
        for _ in range(4):
            graphs.run(key, state, None, (lambda: None,), lambda number: None)
        assert graphs.steady
    assert recorder.recorded == 4  # a, b, c, and a once more, which c had driven out


def test_stop_strings_of_its_own_for_every_request_do_not_prevent_replays() -> None:
    graphs = IterationGraphs(FakeRecorder())
    target, draft = table_pair(1, VOCABULARY, 0.4)
    method = MethodConfig(num_beams=3, drafts_per_layer=8, depth=3)
    engine = Engine(target, draft, NumberCodec(VOCABULARY, (2,)), method, batch_size=2)
    engine._stepper.graphs = graphs
    stops = [(f"{i} {i + 1} {i % 7}",) for i in range(40)]
    requests = [
        Request(id=str(i), seed=i, prompt_ids=(i % 5, 3), sampling=SamplingConfig(max_new_tokens=12, stop=stop))
        for i, stop in enumerate(stops)
    ]
    calls = sum(result.stats.target_calls for result in engine.run(requests))
    assert graphs.replays > calls / 4
