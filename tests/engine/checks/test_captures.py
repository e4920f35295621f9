"""Captures that fail or lie: iterations run plainly then, with the same texts, and one line says so."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from dsbd_cli.config.method import MethodConfig
from dsbd_cli.config.sampling import SamplingConfig
from dsbd_cli.engine.checks import captures as trial
from dsbd_cli.engine.checks.captures import captured_otherwise, prove_captures
from dsbd_cli.engine.decoding import engine as engine_module
from dsbd_cli.engine.decoding.engine import Engine
from dsbd_cli.engine.iteration.cuda_graphs import CaptureError, IterationGraphs, Phase, Recorder, Recording
from dsbd_cli.errors import UnsupportedModelError
from dsbd_cli.requests import EngineInfo, Request
from tests.engine.iteration.test_cuda_graphs import Again, FakeRecorder
from tests.helpers.toys import NumberCodec, table_pair

VOCABULARY = 12


class Breaking(FakeRecorder):
    """Fails at a certain phase of a certain capture, after the phase has rebound the state, as a phase does that runs
    into what cannot be captured."""

    def __init__(self, at: int) -> None:
        super().__init__()
        self.at = at

    def record(self, phase: Phase) -> Recording:
        recording = super().record(phase)
        if self.recorded == self.at:
            raise CaptureError("operation not permitted when stream is capturing")
        return recording


class Lying(FakeRecorder):
    """Replays whose last phase is run twice, as where an address is written again."""

    def record(self, phase: Phase) -> Recording:
        recording = super().record(phase)
        if self.recorded % 3:
            return recording

        def twice() -> None:
            phase()
            phase()

        return Again(twice)


class Dying(FakeRecorder):
    """Replays that raise, as where a kernel is launched with what a graph cannot hold."""

    def record(self, phase: Phase) -> Recording:
        super().record(phase)

        def raises() -> None:
            raise RuntimeError("CUDA error: invalid argument")

        return Again(raises)


def capturing(monkeypatch: pytest.MonkeyPatch, recorder: Callable[[], Recorder]) -> None:
    """Engines capture by such recorders unless they are told not to."""
    monkeypatch.setattr(
        engine_module,
        "captures",
        lambda models, on_host, wanted: None if wanted is False else IterationGraphs(recorder(), required=bool(wanted)),
    )


def engine(rule: str = "search", **more: object) -> Engine:
    target, draft = table_pair(1, VOCABULARY, 0.4)
    method = MethodConfig(rule, 3, 8, 3)
    info = EngineInfo("toy", "toy", "float32", "cpu", notes=("something else",))
    return Engine(target, draft, NumberCodec(VOCABULARY, (2,)), method, batch_size=4, info=info, **more)  # type: ignore[arg-type]


def texts(engine: Engine) -> list[list[tuple[int, ...]]]:
    sampling = SamplingConfig(max_new_tokens=20, n_best=2)
    requests = [Request(prompt_ids=(i % 5, i % 7), seed=i, sampling=sampling) for i in range(6)]
    return [[beam.token_ids for beam in result.hypotheses] for result in engine.generate(requests)]


@pytest.mark.parametrize(("rule", "at"), [("coupled", 1), ("search", 2), ("rejection", 3), ("search", 5)])
def test_a_capture_that_fails_leaves_the_texts(rule: str, at: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """at: of the first three phases, or of later ones, after replays."""
    expected = texts(engine(rule))
    capturing(monkeypatch, lambda: Breaking(at))
    tried, told = engine(rule), []
    tried.tell = told.append
    graphs = tried.stepper.graphs
    assert graphs is not None
    for _ in range(4):  # the caches move in between, so that shapes are captured anew
        assert texts(tried) == expected
    assert graphs.failed is not None
    assert (graphs.replays > 0) == (at > 3)
    assert len(told) == 1
    assert "iterations run plainly" in told[0]
    assert "not permitted when stream is capturing" in told[0]


def test_a_capture_that_was_asked_for_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    capturing(monkeypatch, lambda: Breaking(2))
    asked = engine(cuda_graphs=True)
    prove_captures(asked)
    with pytest.raises(UnsupportedModelError, match="leave graphs out of --set gpu"):
        texts(asked)


def test_without_a_listener_the_line_is_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    capturing(monkeypatch, lambda: Breaking(1))
    with pytest.warns(RuntimeWarning, match="iterations run plainly"):
        texts(engine())


def test_captures_that_can_be_trusted_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[FakeRecorder] = []

    def recorder() -> Recorder:
        made.append(FakeRecorder())
        return made[-1]

    capturing(monkeypatch, recorder)
    tried = engine()
    prove_captures(tried)
    assert tried.stepper.graphs is not None
    assert tried.info is not None
    assert tried.info.notes == ("something else",)
    assert made[1].recorded >= 3, "nothing was captured in the trial"


@pytest.mark.parametrize(
    ("recorder", "said"),
    [
        (lambda: Breaking(1), "a capture fails"),
        (Lying, "a captured iteration gives other"),
        (Dying, "a captured iteration fails (CUDA error: invalid argument)"),
    ],
    ids=["fails", "lies", "raises"],
)
def test_captures_that_cannot_be_trusted_are_left_out_with_one_line(
    recorder: Callable[[], Recorder], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = texts(engine())
    capturing(monkeypatch, recorder)
    tried = engine()
    assert said in (captured_otherwise(tried) or "")
    prove_captures(tried)
    assert tried.stepper.graphs is None
    assert tried.info is not None
    assert len(tried.info.notes) == 2
    assert said in tried.info.notes[1]
    assert texts(tried) == expected


def test_a_gpu_that_answers_nothing_any_more_ends_the_load(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards a run that goes on plainly after an error which ends all that its process may ask of the GPU."""
    capturing(monkeypatch, Dying)
    monkeypatch.setattr(trial, "_answers", lambda device: False)
    with pytest.raises(UnsupportedModelError, match="with --set gpu=kernels"):
        prove_captures(engine())


def test_a_failed_capture_restores_every_field() -> None:
    @dataclass
    class Inner:
        x: Tensor
        note: str

    @dataclass
    class State:
        inner: Inner
        spare: Tensor | None

    class Never:
        def record(self, phase: Phase) -> Recording:
            with pytest.MonkeyPatch.context() as patch:  # a capture rebinds, and writes nothing
                patch.setattr(Tensor, "copy_", lambda home, value: home)
                phase()
            raise CaptureError("no")

    told: list[str] = []
    graphs = IterationGraphs(Never())
    graphs.tell = told.append
    state = State(Inner(torch.zeros(2), "a"), None)

    def phase() -> None:
        state.inner.x = state.inner.x + 1
        state.inner.note += "b"
        state.spare = state.inner.x

    for turn in range(1, 5):
        graphs.run("shape", state, None, (phase,), lambda number: None)
        assert state.inner.x.tolist() == [turn, turn]
        assert state.inner.note == "a" + turn * "b"
    assert len(told) == 1
    assert graphs.steady
