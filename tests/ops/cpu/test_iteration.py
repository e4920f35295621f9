"""CPU kernels of an iteration give what their tensor functions give: random iterations with ties, impossible tokens,
NaN, dead beams, exhausted supports, late drafts, an idle row. Numbers of int64 and bool are equal, others to 2e-5.

Guards: an order of ties, a state that is read after it was written, NaN of a node that no beam stands for.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from dsbd_cli import MethodConfig, Request
from dsbd_cli.config.sampling import SamplingConfig
from dsbd_cli.engine.checks import kernels as checks
from dsbd_cli.engine.decoding.engine import Engine
from dsbd_cli.ops.cpu import candidates, iteration
from dsbd_cli.ops.interface import Ops
from dsbd_cli.ops.layout import KERNELS, KernelTensors, Tensors
from dsbd_cli.ops.select import ITERATION_KERNELS, TABLE
from dsbd_cli.ops.triton import differences
from tests.helpers.iterations import OWN_LIMITS, SETTINGS, made
from tests.helpers.kernels import CPU, serves
from tests.helpers.toys import NumberCodec, table_pair

pytestmark = pytest.mark.skipif(not serves("verify"), reason="kernels of numba do not run here")
VOCABULARY = 3000
SERVED = [name for name in ITERATION_KERNELS if name not in ("candidates", "move")]


def numba_ops(names: Iterable[str]) -> dict[str, Any]:
    """The named operations by CPU kernels."""
    return {kernel.name: kernel.op for kernel in TABLE if kernel.name in names}


@pytest.fixture
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def counted(patch: pytest.MonkeyPatch) -> list[str]:
    """The names of kernels, in the order in which they are called."""
    calls: list[str] = []

    def watched(name: str) -> None:
        real = getattr(iteration, name)

        def call(*arguments: Any) -> Any:
            calls.append(name)
            return real(*arguments)

        patch.setattr(iteration, name, call)

    for name in ("extend", "verify", "commit"):
        watched(name)
    return calls


@pytest.mark.usefixtures("once")
@pytest.mark.parametrize("name", SETTINGS | OWN_LIMITS)
def test_iterations_are_those_of_tensor_code(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = counted(monkeypatch)
    with torch.inference_mode():
        for kernel in made(*(SETTINGS | OWN_LIMITS)[name], numba_ops):
            if kernel.name in SERVED:
                calls.clear()
                assert [difference for seed in (1, 2) for difference in differences(kernel, CPU, seed)] == []
                served = kernel.name == "commit" or (SETTINGS | OWN_LIMITS)[name][0]["rule"] != "rejection"
                assert bool(calls) == served, "the wrong code ran"


@pytest.mark.parametrize("rule", ["coupled", "search"])
def test_tensors_are_those_of_the_declaration(rule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards a kernel that writes what it is declared to read alone, and a shape that is declared wrong."""
    real, ran = iteration._run, set[str]()

    def watched(takes: KernelTensors, tensors: Tensors, numbers: dict[str, int], *more: int) -> None:
        before, sizes = {name: value.clone() for name, value in tensors.items()}, dict(numbers)
        real(takes, tensors, numbers, *more)
        ran.add(takes.kernel)
        written = {tensors[name].data_ptr() for name in takes.writes & set(tensors)}  # a history may be both
        for tensor in takes.tensors:
            if (value := tensors.get(tensor.name)) is None:
                continue
            sizes["slots"] = value.shape[2] if tensor.owner == "backlog" else numbers.get("slots", 0)  # 0 without one
            assert list(value.shape) == [dim.of(sizes) for dim in tensor.shape], tensor.name
            if value.data_ptr() not in written:
                assert torch.equal(value.nan_to_num(nan=7.0), before[tensor.name].nan_to_num(nan=7.0)), tensor.name

    monkeypatch.setattr(iteration, "_run", watched)
    with torch.inference_mode():
        for kernel in made({"rule": rule}, {"top_k": 5} if rule == "coupled" else {}, numba_ops):
            if kernel.name in SERVED:
                assert list(differences(kernel, CPU)) == []
    assert ran == set(KERNELS)


@pytest.mark.parametrize("change", ["token", "valid", "score"])
def test_a_wrong_walk_is_found(change: str, monkeypatch: pytest.MonkeyPatch) -> None:
    real = iteration.verify

    def wrong(tensors: Tensors, *arguments: Any) -> None:
        real(tensors, *arguments)
        if change == "token":
            tensors["live_token"][:, 0] += 1
        elif change == "valid":
            tensors["live_valid"][:, -1] ^= True
        else:
            tensors["finished_score"][:, 0] += 0.1

    monkeypatch.setattr(iteration, "verify", wrong)
    kernel = next(kernel for kernel in made({"rule": "search"}, {}, numba_ops) if kernel.name == "verify")
    with torch.inference_mode():
        assert list(differences(kernel, CPU))


@pytest.mark.parametrize("mutant", ["ran", "stopping"])
def test_a_wrong_commit_is_found(mutant: str, monkeypatch: pytest.MonkeyPatch) -> None:
    real = iteration.commit

    def wrong(*arguments: Any) -> None:
        *others, ran, stopping = arguments
        real(*others, ran - 1 if mutant == "ran" else ran, not stopping if mutant == "stopping" else stopping)

    monkeypatch.setattr(iteration, "commit", wrong)
    kernel = next(
        kernel for kernel in made({"rule": "search"}, {"stop": ("AB",)}, numba_ops) if kernel.name == "commit"
    )
    with torch.inference_mode():
        assert list(differences(kernel, CPU))


@pytest.mark.parametrize("kept", [0, 1, 2])
@pytest.mark.parametrize("rule", ["coupled", "search"])
def test_a_gate_ends_the_forest_as_it_ends_that_of_tensor_code(rule: str, kept: int) -> None:
    """Guards sizes that are taken from a forest of all layers, and a gate that is told something else."""
    method = MethodConfig.of({"rule": rule, "num_beams": 3, "drafts_per_layer": 4, "depth": 2, "width": "fixed"})
    sampling = SamplingConfig(max_new_tokens=checks.HISTORY, top_k=0 if rule == "search" else 5)
    generator = torch.Generator().manual_seed(0)
    case = checks.IterationCase.random(method, sampling, generator, CPU, roots=3, draft_backlog=2)
    case.ops_of = numba_ops

    def left(*used: str) -> tuple[list[list[float]], object, object]:
        seen: list[list[float]] = []

        def gate(confidence: list[float]) -> bool:
            seen.append(confidence)
            return len(seen) <= kept

        state = copy.deepcopy(case.state)
        report = case.stepper(*used).step(state, case.shape, gate)
        alive = state.beams.valid
        reached = [[layer for layer in layers if layer.reached] for layers in report.layers]
        return seen, (report.rows, reached), [value[alive].tolist() for value in (state.beams.token, state.beams.path)]

    with torch.inference_mode():
        (mine, *numbers), (other, *wanted) = left(*SERVED), left()
    assert numbers == wanted
    assert [pytest.approx(confidence, abs=1e-5) for confidence in other] == mine
    assert len(mine) == min(kept + 1, 2)


def answers(rule: str, sampling: dict[str, Any], *, kernels: bool, batch_size: int = 3) -> list[object]:
    """Texts, scores and counters of an engine with random tables."""
    method = MethodConfig.of({"rule": rule, "num_beams": 3, "drafts_per_layer": 4, "depth": 2, "width": "fixed"})
    target, draft = table_pair(1, 60, 0.5, {2: 1.0})
    engine = Engine(target, draft, NumberCodec(60, (2,)), method, batch_size=batch_size)
    assert engine.stepper.ops.by("numba")
    if not kernels:
        engine.stepper.ops = Ops()
    stops = [(), ("7 7",), ()]
    rows = [
        Request(
            id=str(i),
            seed=i,
            prompt_ids=(1, i, i),
            sampling=SamplingConfig(max_new_tokens=6 + i, n_best=3, stop=stops[i], **sampling),
        )
        for i in range(3)
    ]
    return [
        [
            [(beam.token_ids, beam.logprob, beam.score) for beam in result.hypotheses],
            [result.stats.steps, result.stats.target_calls, result.stats.drafted, result.stats.accepted],
        ]
        for result in engine.run(rows)
    ]


@pytest.mark.parametrize("sampling", [{}, {"top_k": 5}, {"top_p": 0.8, "temperature": 1.3}], ids=str)
@pytest.mark.parametrize("rule", ["coupled", "search", "rejection"])
def test_texts_are_those_of_tensor_code(rule: str, sampling: dict[str, Any]) -> None:
    if rule == "search" and sampling:
        pytest.skip("rule search does not sample")
    texts, wanted = (answers(rule, sampling, kernels=kernels) for kernels in (True, False))
    for mine, other in zip(texts, wanted, strict=True):
        assert mine[1] == other[1]
        assert [beam[0] for beam in mine[0]] == [beam[0] for beam in other[0]]
        assert [beam[1:] for beam in mine[0]] == [pytest.approx(beam[1:], abs=1e-4) for beam in other[0]]


@pytest.mark.parametrize("rule", ["coupled", "search"])
def test_bits_do_not_depend_on_the_batch(rule: str) -> None:
    sampling = {} if rule == "search" else {"top_p": 0.8}
    assert answers(rule, sampling, kernels=True, batch_size=1) == answers(rule, sampling, kernels=True)


def logits(dtype: torch.dtype) -> Tensor:
    """Logits [2, 5, V] without gaps between the numbers of a row alone, with ties, impossible tokens, and a NaN."""
    wide = torch.randn(2, 7, VOCABULARY + 30, generator=torch.Generator().manual_seed(0)) * 3
    wide[0, 1] = wide[0, 1].round()
    wide[0, 2, 4:] = float("-inf")
    wide[1, 3, 77] = float("nan")
    wide[1, 4] = float("-inf")
    return wide.to(dtype)[:, :5, :VOCABULARY]


@pytest.mark.usefixtures("threads")
def test_candidates_do_not_depend_on_threads() -> None:
    x = logits(torch.float32).repeat(8, 1, 1)
    torch.set_num_threads(1)
    alone = candidates.candidates(x, 8)
    torch.set_num_threads(2)
    shared = candidates.candidates(x, 8)
    assert alone is not None
    assert shared is not None
    for tensor, other in zip(alone, shared, strict=True):
        assert torch.equal(tensor.nan_to_num(nan=7.0), other.nan_to_num(nan=7.0))


def test_candidates_that_the_kernel_does_not_read_are_left_to_tensor_code() -> None:
    assert candidates.candidates(logits(torch.float32), candidates.MOST_CANDIDATES + 1) is None
    assert candidates.candidates(logits(torch.float16), 4) is None
    assert candidates.candidates(logits(torch.float32).transpose(1, 2), 4) is None


def test_a_large_pool_is_drawn_as_tensor_code_draws_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards the bound by which most pairs of a large vocabulary get no noise."""
    monkeypatch.setattr(checks, "VOCABULARY", 150)
    with torch.inference_mode():
        for seed in range(20):
            settings = {"rule": "coupled", "num_beams": 1, "drafts_per_layer": 2}, {"top_k": 0, "temperature": 1.5}
            for kernel in made(*settings, numba_ops):
                if kernel.name in SERVED:
                    assert list(differences(kernel, CPU, 100 + seed)) == []


def test_a_top_p_that_is_zero_in_float32_keeps_the_best_pair() -> None:
    with torch.inference_mode():
        for kernel in made({"rule": "coupled"}, {"top_p": 1e-46}, numba_ops):
            if kernel.name in SERVED:
                assert list(differences(kernel, CPU, 3)) == []
