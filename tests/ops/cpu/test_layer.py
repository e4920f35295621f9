"""What stands between products, by kernels for the CPU: equal to the references, the same bits for any rows and
threads, and put to work in whole models."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from dsbd_cli.config.model import ModelSpec
from dsbd_cli.models.checkpoints.checkpoint import Checkpoint
from dsbd_cli.models.load_model import load_model
from dsbd_cli.models.transformers_backend.causal import CausalForestModel
from dsbd_cli.ops.cpu import layer as layer_ops
from dsbd_cli.ops.interface import Ops
from dsbd_cli.ops.recording import Program
from dsbd_cli.ops.select import LAYERS, ops_for
from tests.helpers.kernels import replaced, serves
from tests.models.decoders import build_decoder, save_decoder

pytestmark = [
    pytest.mark.skipif(not serves("norm"), reason="kernels of numba do not run here"),
    pytest.mark.skipif(torch.cuda.is_available(), reason="models of these tests are on the CPU"),
]
# of float32: sums in another order, and exp2 of our own; of bfloat16: a rounding that falls the other way


def test_what_the_kernels_do_not_take_is_left_to_torch() -> None:
    """Heads of 8 numbers, gates of 50, half precision."""
    cpu = torch.device("cpu")
    selected = ops_for(cpu, torch.float32, LAYERS, widths=frozenset({64, 96, 16}))
    assert selected.by("numba") == ("gated", "norm", "program", "rotate")
    for dtype, widths in ((torch.float32, {64, 96, 4}), (torch.float32, {64, 50, 16}), (torch.float16, {64, 96, 16})):
        left = ops_for(cpu, dtype, LAYERS, widths=frozenset(widths))
        assert left.by("torch") == selected.by("numba")
        assert replace(left, report=()) == Ops()


def test_kernels_of_the_cpu_need_no_triton() -> None:
    """Guards machines without a GPU, where torch brings none."""
    code = (
        "import sys; sys.modules['triton'] = None; import torch; "
        "from dsbd_cli.ops.select import LAYERS, ops_for; "
        "print(ops_for(torch.device('cpu'), torch.float32, LAYERS).by('numba'))"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (out.returncode, out.stdout) == (0, "('gated', 'norm', 'program', 'rotate')\n"), out.stderr


@pytest.mark.parametrize("broken", ["norm", "gated", "rotate"])
def test_a_wrong_kernel_serves_no_model(broken: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards answers by a kernel that gives something else on this processor: transformers runs the model then."""
    right = getattr(layer_ops, broken)

    def wrong(*arguments: Any, **named: Any) -> Any:
        result = right(*arguments, **named)
        return (result[0] * 1.5, result[1]) if isinstance(result, tuple) else result * 1.5

    folder = save_decoder(tmp_path / "model", build_decoder("gemma3" if broken == "norm" else "llama"))
    with replaced(monkeypatch, broken, op=wrong):
        loaded = load_model(Checkpoint.open(ModelSpec(str(folder), dtype="float32", device="cpu")))
    assert isinstance(loaded.model, CausalForestModel)
    (line,) = loaded.report.notes
    assert "in our own decoder its logits are off by" in line


def test_a_wrong_program_serves_no_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Plain forwards, which are compared with transformers, run none: the self-test finds it."""
    monkeypatch.setattr(Program, "run", lambda self: None)
    folder = save_decoder(tmp_path / "model", build_decoder("llama"))
    loaded = load_model(Checkpoint.open(ModelSpec(str(folder), dtype="float32", device="cpu")))
    assert isinstance(loaded.model, CausalForestModel)
    assert len(loaded.report.notes) == 1
