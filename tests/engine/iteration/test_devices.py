"""Models that are not on the CPU: no operation mixes devices, and an iteration takes nothing from the host.

Guards: a mask, an index or a noise key made on the CPU; a table of the host copied over inside an iteration, which a
CUDA graph would freeze. A run on the CPU supplies the counters that a pretended run cannot compute.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

from dsbd_cli.config.method import MethodConfig
from dsbd_cli.config.sampling import SamplingConfig
from dsbd_cli.engine.core.report import Report
from dsbd_cli.engine.decoding import loop as loop_module
from dsbd_cli.engine.decoding.engine import Engine
from dsbd_cli.engine.iteration import stepper as step_module
from dsbd_cli.engine.iteration.cuda_graphs import IterationGraphs
from dsbd_cli.engine.protocols import ForestInput
from dsbd_cli.models.attention import metadata
from dsbd_cli.models.transformers_backend import base
from dsbd_cli.models.transformers_backend.causal import CausalForestModel
from dsbd_cli.requests import Request, RequestResult
from tests.engine.iteration.test_cuda_graphs import FakeRecorder
from tests.helpers.pretend import DEVICE, SameDevice, one_device, pretend
from tests.helpers.tiny import FIT
from tests.helpers.toys import NumberCodec, TableLM, table_pair
from tests.helpers.worlds import RandomPlanner

VOCABULARY = 12


class PretendedLM(TableLM):
    """Takes inputs on its own device only."""

    def __init__(self) -> None:
        self.vocab_size, self.device, self.generation = VOCABULARY, DEVICE, 0
        self.release()

    def reserve(self, rows: int, slots: int, window: int | None = None) -> None:
        self.generation += 1
        self.tokens = torch.zeros(rows, slots, dtype=torch.int64, device=DEVICE)

    def release(self) -> None:
        self.reserve(0, 0)

    def forward(self, batch: ForestInput, *, logits: bool = True) -> Tensor | None:
        inputs = (batch.tokens, batch.positions, batch.slots, batch.mask, batch.slot_positions)
        assert all(item.device == DEVICE for item in inputs)
        return torch.zeros(*batch.tokens.shape, VOCABULARY, device=DEVICE) if logits else None


def requests(method: MethodConfig) -> list[Request]:
    new = 6 if method == CAPTURED else 4  # a shape is replayed after it was run three times
    plain = SamplingConfig(max_new_tokens=new, stop=("7 7",))
    warped = SamplingConfig(max_new_tokens=new, top_k=5, top_p=0.95, min_p=0.01, stop=("7 7",))
    sampling = plain if method.rule == "search" else warped
    return [Request(id=str(i), seed=i, prompt_ids=(1, i, i), sampling=sampling) for i in range(3)]


def reports_of(method: MethodConfig, patch: pytest.MonkeyPatch) -> list[Report]:
    """Counters of all iterations of a run on the CPU."""
    target, draft = table_pair(1, VOCABULARY, 0.5)
    engine = Engine(target, draft if method.needs_draft else None, NumberCodec(VOCABULARY, (2,)), method, batch_size=2)
    _plan(engine, method)
    seen: list[Report] = []
    real = step_module.read_report
    with patch.context() as inner:
        inner.setattr(step_module, "read_report", lambda *arguments: (seen.append(real(*arguments)), seen[-1])[1])
        assert all(result.hypotheses for result in engine.run(requests(method)))
    return seen


def _plan(engine: Engine, method: MethodConfig) -> None:
    """The same shapes in both runs: those of --depth auto depend on the clock."""
    if method.adaptive_depth:
        engine._planner = RandomPlanner(1, method.depth, method.drafts_per_layer, gated=False)


def decode(
    engine: Engine, method: MethodConfig, reports: Iterator[Report], mode: SameDevice, patch: pytest.MonkeyPatch
) -> int:
    """Results of a pretended run; its counters are those of the real one."""

    def told(counters: Tensor, calls: int) -> Report:
        assert counters.device == DEVICE
        return next(reports)

    def read_finished(finished: Any, rows: list[int]) -> list[None]:
        return [None] * len(rows)

    def collected(finished: None, row: int, job: Any, *more: Any) -> RequestResult:
        return RequestResult(job.request, (), len(job.prompt), job.stats)

    _plan(engine, method)
    step = engine.stepper.step

    def watched(*arguments: Any) -> Report:
        with one_device(mode):
            return step(*arguments)

    patch.setattr(step_module, "read_report", told)
    patch.setattr(loop_module, "read_finished", read_finished)
    patch.setattr(loop_module, "collect", collected)
    patch.setattr(engine.stepper, "step", watched)
    return len(list(engine.run(requests(method))))


SHAPE = {"num_beams": 3, "drafts_per_layer": 4, "depth": 2, "width": "fixed"}
CAPTURED = MethodConfig.of({**SHAPE, "rule": "coupled"})
CASES: list[dict[str, Any]] = [
    {"rule": "coupled", "captured": True},
    {"rule": "coupled", "width": "threshold", "warp_scope": "beam"},
    {"rule": "coupled", "memory_saving": True},
    {"rule": "coupled", "adaptive_depth": True},
    {"rule": "search"},
    {"rule": "with-replacement"},
    {"rule": "fuzzy", "fuzzy_threshold": 0.5},
    {"rule": "rejection", "width": "threshold"},
    *({"rule": "rejection", "drafter": drafter} for drafter in ("beam", "rsd-c", "rsd-s", "dynamic-tree")),
    *({"rule": "rejection", "drafter": drafter} for drafter in ("ngram", "beam+ngram")),
    {"rule": "rejection", "drafter": "dynamic-tree", "tree": "top-k"},
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(map(str, case.values())))
def test_everything_is_on_the_models_device(case: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    captured = "captured" in case
    case = {name: value for name, value in case.items() if name != "captured"}
    method = MethodConfig.of({**SHAPE, **case})
    reports = reports_of(method, monkeypatch)
    with pretend() as mode:
        draft = PretendedLM() if method.needs_draft else None
        engine = Engine(PretendedLM(), draft, NumberCodec(VOCABULARY, (2,)), method, batch_size=2)
        engine.stepper.graphs = IterationGraphs(FakeRecorder()) if captured else None
        assert decode(engine, method, iter(reports), mode, monkeypatch) == 3
        assert not captured or engine.stepper.graphs.replays > 0


@pytest.mark.parametrize(
    ("family", "split"),
    [
        *((family, "") for family in ("llama", "qwen2 window", "opt")),
        *itertools.product(("llama", "qwen2 window"), ("exact", "fast")),
        ("llama", "by parts"),
    ],
)
def test_transformers_models_too(family: str, split: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """split: attention by the kernel, or by tensor code where no kernel serves, as on a GPU."""
    method = MethodConfig(rule="coupled", num_beams=3, drafts_per_layer=4, depth=2)
    reports = reports_of(method, monkeypatch)
    monkeypatch.setattr(base, "_input_device", lambda model: DEVICE)
    kind, settings = FIT[family]
    config = getattr(transformers, kind)(**settings)
    # made before it is pretended: from_config in here would leave later models of this process with rotary tables of
    # whatever their memory holds
    loaded = [transformers.AutoModelForCausalLM.from_config(config).eval().to(DEVICE) for _ in range(2)]
    with pretend() as mode:
        models = [CausalForestModel(model, family) for model in loaded]
        for model in models:
            model.fit_width(VOCABULARY)
        models[0].invariant = split in ("exact", "by parts")
        if split in ("exact", "fast"):
            kernels = pytest.importorskip("dsbd_cli.ops.triton.attention", reason="triton is not installed")
            models[0].attention = partial(kernels.attention, exact=split == "exact")
            monkeypatch.setattr(metadata, "LONG", 0)
        engine = Engine(models[0], models[1], NumberCodec(VOCABULARY, (2,)), method, batch_size=2)
        assert decode(engine, method, iter(reports), mode, monkeypatch) == 3


def test_the_pretended_device_bites() -> None:
    with pretend() as mode:
        x = torch.zeros(3, device=DEVICE)
        with pytest.raises(RuntimeError, match="same device"):
            x + torch.zeros(3)
        with one_device(mode), pytest.raises(AssertionError, match="on cpu"):
            torch.zeros(3)
        with one_device(mode), pytest.raises(AssertionError, match="on cpu"):
            torch.tensor([1.0], device=DEVICE)
        for mixed in (
            lambda: x.gather(0, torch.zeros(2, dtype=torch.int64)),
            lambda: x.index_copy(0, torch.zeros(3, dtype=torch.int64, device=DEVICE), torch.zeros(3)),
            lambda: torch.cat((x, torch.zeros(3))),
            lambda: x[torch.zeros(2, dtype=torch.int64)],
            lambda: torch.where(x > 0, x, torch.zeros(3)),
            lambda: torch.nn.functional.embedding(torch.zeros(2, dtype=torch.int64), x.unsqueeze(1)),
        ):
            with pytest.raises(RuntimeError, match="same device"):
                mixed()
        for read in (x.tolist, x.sum().item, x.nonzero, lambda: x[x > 0], lambda: bool(x.any())):
            with pytest.raises((RuntimeError, NotImplementedError)):
                read()
