"""Every kernel of an iteration gives what its tensor function gives: random iterations with ties, impossible tokens,
NaN, dead beams, exhausted supports, late drafts, an idle row. Numbers of int64 and bool are equal, others to 2e-5.

Guards: an order of ties, a state that is read after it was written, a padded place that is drawn.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch

from dsbd_cli.engine.checks.kernels import KERNELS
from dsbd_cli.ops.layout import Tensors
from dsbd_cli.ops.select import ITERATION_KERNELS
from dsbd_cli.ops.triton import commit, differences, draft, verify
from tests.helpers.iterations import OWN_LIMITS, SETTINGS, made
from tests.ops.triton import DEVICE

# triton's interpreter computes the branches that are not taken too
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")


def counted(name: str, module: Any, patch: pytest.MonkeyPatch) -> list[int]:
    """How often an operator was called."""
    calls: list[int] = []
    real: Callable[..., Any] = getattr(module, name)
    patch.setattr(module, name, lambda *arguments: (calls.append(1), real(*arguments))[1])
    return calls


@pytest.mark.usefixtures("once")
@pytest.mark.parametrize("name", SETTINGS)
def test_iterations_are_those_of_tensor_code(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    ran = {
        "draft": counted("extend", draft, monkeypatch),
        "verify": counted("verify", verify, monkeypatch),
        "commit": counted("commit", commit, monkeypatch),
    }
    with torch.inference_mode():
        for kernel in made(*SETTINGS[name]):
            if kernel.name in ran:
                assert list(differences(kernel, DEVICE, seed=2)) == []
                assert ran[kernel.name], "the tensor code ran"


@pytest.mark.parametrize("name", OWN_LIMITS)
def test_tensor_code_verifies_rows_with_limits_of_their_own(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    ran = counted("verify", verify, monkeypatch)
    with torch.inference_mode():
        for kernel in made(*OWN_LIMITS[name]):
            if kernel.name in ("verify", "commit"):
                assert list(differences(kernel, DEVICE, seed=2)) == []
    assert not ran


def test_nan_at_a_dead_beam_does_not_reach_the_pool() -> None:
    """Guards a request that ends without an answer because a node that no beam stands for has NaN."""
    kernel = next(kernel for kernel in made(*SETTINGS["coupled-whole"]) if kernel.name == "verify")
    with torch.inference_mode():
        assert list(differences(kernel, DEVICE, seed=1)) == []


@pytest.mark.parametrize("name", ["candidates", "move"])
def test_others_are_those_of_tensor_code(name: str) -> None:
    (kernel,) = (kernel for kernel in KERNELS if kernel.name == name)
    assert list(differences(kernel, DEVICE)) == []


def test_every_kernel_in_use_has_a_reference() -> None:
    assert {kernel.name for kernel in KERNELS} == {*ITERATION_KERNELS}


@pytest.mark.parametrize("mutant", ["token", "valid"])
def test_a_wrong_walk_is_found(mutant: str, monkeypatch: pytest.MonkeyPatch) -> None:
    real = verify.verify

    def wrong(tensors: Tensors, *arguments: Any) -> None:
        real(tensors, *arguments)
        if mutant == "token":
            tensors["live_token"][:, 0] += 1
        else:
            tensors["live_valid"][:, -1] ^= True

    monkeypatch.setattr(verify, "verify", wrong)
    kernel = next(kernel for kernel in made({"rule": "search"}, {}) if kernel.name == "verify")
    with torch.inference_mode():
        assert list(differences(kernel, DEVICE))


def test_a_kernel_is_compared_with_what_it_should_give() -> None:
    kernel = next(kernel for kernel in KERNELS if kernel.name == "candidates")
    other = dataclasses.replace(kernel, op=lambda logits, count: (kernel.reference(logits, count)[0] + 1, logits))
    assert "in place of" in next(differences(other, DEVICE))
