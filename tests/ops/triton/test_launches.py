"""What an iteration launches outside the models, kernels on: operations at dispatch, no kernel run, at
W = 4, K = 8, D = 4. Views and allocations launch nothing. Tensor code takes 1,360 for `coupled`, 1,036 for `search` and
2,670 for `rejection` (tests/engine/iteration/test_operations.py).

Guards: a tensor operation that slips back into the iteration. A target whose bits do not depend on the drafts is given
the lengths of the prompts, which is one more.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.operations import VIEWS
from dsbd_cli.config.method import MethodConfig
from dsbd_cli.config.sampling import SamplingConfig
from dsbd_cli.engine.checks import kernels as twins
from dsbd_cli.engine.checks.kernels import HISTORY, VOCABULARY, IterationCase
from dsbd_cli.engine.iteration import stepper as step_module
from dsbd_cli.engine.protocols import ForestInput
from dsbd_cli.ops import layout
from dsbd_cli.ops.select import ITERATION_KERNELS
from dsbd_cli.ops.triton import commit, draft, verify

LAYERS = 4
LAUNCHES = 2 * LAYERS + 4
MOVES = 2  # one per cache; the toy models have none
MOST = {"coupled": 16, "search": 16, "rejection": 30}


@pytest.mark.parametrize(
    ("kernel", "takes"),
    [
        (draft.begin_kernel, layout.BEGIN),
        (draft.extend_kernel, layout.EXTEND),
        (verify.verify_kernel, layout.VERIFY),
        (commit.commit_kernel, layout.COMMIT),
    ],
    ids=layout.KERNELS,
)
def test_parameters_are_those_of_the_declaration(kernel: Any, takes: layout.KernelTensors) -> None:
    """Guards a tensor that a kernel of a GPU lacks, and a parameter that nothing fills."""
    declared = {tensor.name for tensor in takes.tensors if tensor.owner != "own"}
    named = {name for name in kernel.arg_names if not name.isupper()}
    assert declared <= named
    assert named - declared <= {*layout.SIZES.values(), *layout.NUMBERS}


class Launches(TorchDispatchMode):
    """Counts operations that are no views and not of the toy models."""

    def __init__(self) -> None:
        super().__init__()
        self.seen = Counter[str]()

    def __torch_dispatch__(self, operation: Any, types: Any, arguments: Any = (), named: Any = None) -> Any:
        name = operation.overloadpacket.__name__
        if name not in VIEWS and name != "new_empty":
            self.seen[name] += 1
        return operation(*arguments, **(named or {}))


def forward(model: object, batch: ForestInput, *, logits: bool = True) -> Tensor:
    prompts.append(batch.prompt)
    return torch.empty(*batch.tokens.shape, VOCABULARY, device="meta")


prompts: list[Tensor | None] = []


@pytest.mark.parametrize("prompt_slots", [None, (0, 0, 0)], ids=["fast", "same text"])
@pytest.mark.parametrize("rule", ["coupled", "search", "rejection"])
def test_an_iteration_launches_so_little(
    rule: str, prompt_slots: tuple[int, ...] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    method = MethodConfig.of({"rule": rule, "num_beams": 4, "drafts_per_layer": 8, "depth": LAYERS, "width": "fixed"})
    sampling = SamplingConfig(max_new_tokens=HISTORY, top_k=0 if rule == "search" else 5)
    generator = torch.Generator().manual_seed(1)
    iteration = IterationCase.random(method, sampling, generator, torch.device("meta"), roots=4, draft_backlog=2)
    launches, stepper, state = Launches(), iteration.stepper(*ITERATION_KERNELS), iteration.state
    common_prefix = state.table.common_prefix

    class Counted(Exception):  # noqa: N818
        pass

    def told(*arguments: Any) -> None:
        raise Counted

    monkeypatch.setattr(step_module, "read_report", told)
    monkeypatch.setattr(twins._TableModel, "forward", forward)
    prompts.clear()
    with torch.no_grad(), launches, pytest.raises(Counted):
        stepper.step(state, replace(iteration.shape, prompt_slots=prompt_slots))
    extra = Counter() if prompt_slots is None else Counter({"sub": 1})
    assert launches.seen.total() == LAUNCHES + extra.total(), launches.seen
    assert launches.seen.total() + MOVES <= MOST[rule]
    assert set(launches.seen) == {"begin", "candidates", "extend", "verify", "commit", *extra}
    *drafts, target = prompts
    assert drafts == [None] * LAYERS
    assert target is not None
    assert (target is common_prefix) == (prompt_slots is None)
