"""Checks at load that were made before: the shipped models are loaded by hundreds of tests of the command."""

from __future__ import annotations

from collections.abc import Iterator
from unittest.mock import patch

import pytest
import torch

from dsbd_cli.engine.models import invariance, pair
from dsbd_cli.engine.models.adapter import TransformersForest

_known: dict[object, invariance.Verdict] = {}


def _check(model: TransformersForest) -> invariance.Verdict:
    """`check`, asked once in a process of the same shipped model; of any other model each time."""
    if not model.name.startswith("builtin:"):
        return invariance.check(model)
    key = (model.name, model.weights_dtype, model.quantized, model.by_parts, torch.get_num_threads())
    if key not in _known:
        _known[key] = invariance.check(model)
    return _known[key]


@pytest.fixture(autouse=True)
def shipped_models_are_checked_once() -> Iterator[None]:
    """For folders whose tests are of the command; tests/models and tests/engine ask again at every load."""
    with patch.object(pair, "check", _check):
        yield
