"""What tests of the kernels of an iteration share."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from dsbd_cli.config.method import MethodConfig
from dsbd_cli.config.sampling import SamplingConfig
from dsbd_cli.engine.checks.kernels import IterationCase


@pytest.fixture
def once(monkeypatch: pytest.MonkeyPatch) -> None:
    """What an iteration leaves is computed once for the same kernels: all kernels are compared over the same cases, and
    the reference of one may be another's, or the tensor code alone."""
    made: dict[object, IterationCase] = {}
    left: dict[object, tuple[torch.Tensor, ...]] = {}
    random, run = IterationCase.random, IterationCase.run

    def kept(
        method: MethodConfig, sampling: SamplingConfig, generator: torch.Generator, *more: Any, **named: Any
    ) -> Any:
        case = random(method, sampling, generator, *more, **named)
        return made.setdefault((generator.initial_seed(), *named.items()), case)

    def ran(self: IterationCase, *used: str) -> tuple[torch.Tensor, ...]:
        key = (id(self), frozenset(used))
        if key not in left:
            left[key] = run(self, *used)
        return left[key]

    monkeypatch.setattr(IterationCase, "random", kept)
    monkeypatch.setattr(IterationCase, "run", ran)
