"""What stands between products, by kernels for the CPU: equal to the references, the same bits for any rows and
threads, and put to work in whole models."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from dsbd_cli.config.model import ModelSpec
from dsbd_cli.models.adapted.causal import CausalForestModel
from dsbd_cli.models.checkpoints.checkpoint import Checkpoint
from dsbd_cli.models.load_model import load_model
from dsbd_cli.ops import reference
from dsbd_cli.ops.cpu import layer as layer_ops
from dsbd_cli.ops.cpu.runtime import FLOATS
from dsbd_cli.ops.interface import Ops
from dsbd_cli.ops.run import Program
from dsbd_cli.ops.select import LAYERS, ops_for
from tests.helpers.kernels import replaced, serves
from tests.models.decoders import build_decoder, save_decoder

pytestmark = [
    pytest.mark.skipif(not serves("norm"), reason="kernels of numba do not run here"),
    pytest.mark.skipif(torch.cuda.is_available(), reason="models of these tests are on the CPU"),
]
DTYPES = pytest.mark.parametrize("dtype", FLOATS, ids=["float32", "bfloat16"])
# of float32: sums in another order, and exp2 of our own; of bfloat16: a rounding that falls the other way
CLOSE = {torch.float32: {"rtol": 1e-5, "atol": 1e-5}, torch.bfloat16: {"rtol": 2.0**-7, "atol": 2.0**-7}}


@pytest.fixture
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def normal(dtype: torch.dtype, *shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@DTYPES
@pytest.mark.parametrize("unit_offset", [False, True])
@pytest.mark.parametrize("adds", [False, True])
def test_norm(dtype: torch.dtype, unit_offset: bool, adds: bool) -> None:
    wide = normal(dtype, 3, 5, 112) * 3
    for x in (wide[..., :96], wide[:1, :1, 16:112], wide.transpose(0, 1)[..., :32]):
        more = normal(dtype, *x.shape, seed=1) if adds else None
        weight = normal(dtype, x.shape[-1], seed=2)
        rms = reference.Norm(weight, 1e-5, unit_offset)
        found, wanted = (how(rms, x, more) for how in (layer_ops.norm, reference.norm))
        torch.testing.assert_close(found[0], wanted[0], **CLOSE[dtype])
        assert torch.equal(found[1], wanted[1])


@DTYPES
@pytest.mark.parametrize("gelu", [False, True])
def test_gated(dtype: torch.dtype, gelu: bool) -> None:
    both = normal(dtype, 2, 3, 200) * 8
    both[0, 0, :4] = torch.tensor([-400.0, 400.0, 0.0, -90.0])
    found = layer_ops.gated(both[..., 8:168], gelu)
    torch.testing.assert_close(found, reference.gated(both[..., 8:168], gelu), **CLOSE[dtype])


@DTYPES
@pytest.mark.parametrize("norms", [None, False, True])
@pytest.mark.parametrize("angles", [1, 3])
def test_rotate(dtype: torch.dtype, norms: bool | None, angles: int) -> None:
    """norms: of heads, times weight or (1 + weight)."""
    rows, nodes, heads, kv_heads, dim = 3, 4, 6, 2, 96
    both = normal(dtype, rows, nodes, (heads + 2 * kv_heads) * dim + 32)[..., :-32]
    turns = torch.randn(angles, nodes, dim, generator=torch.Generator().manual_seed(1))
    slots = torch.randperm(rows * 9, generator=torch.Generator().manual_seed(2))[: rows * nodes]
    pair = None if norms is None else [reference.Norm(normal(dtype, dim, seed=seed), 1e-5, norms) for seed in (3, 4)]
    planes = []
    cos, sin = turns.cos().to(dtype), turns.sin().to(dtype)
    for how in (layer_ops.rotate, reference.rotate):
        keys, values = normal(dtype, rows, 9, kv_heads, dim, seed=5), normal(dtype, rows, 9, kv_heads, dim, seed=6)
        planes.append((how(both, cos, sin, slots, keys, values, pair), keys, values))
    for found, wanted in zip(*planes, strict=True):
        torch.testing.assert_close(found, wanted, **CLOSE[dtype])
    assert torch.equal(planes[0][2], planes[1][2])


@DTYPES
@pytest.mark.usefixtures("threads")
def test_bits_of_a_row_do_not_depend_on_rows_and_threads(dtype: torch.dtype) -> None:
    """Guards a row whose last numbers, or whose sum, go by its place. Large enough that threads share the work."""
    x, more, weight = normal(dtype, 140, 512), normal(dtype, 140, 512, seed=1), normal(dtype, 512, seed=2)
    both = normal(dtype, 140, 512, seed=3)
    turns = normal(dtype, 1, 140, 64, seed=4)
    slots = torch.arange(140)

    def all_of(rows: slice) -> list[Tensor]:
        keys, values = torch.zeros(1, 140, 2, 64, dtype=dtype), torch.zeros(1, 140, 2, 64, dtype=dtype)
        normed, summed = layer_ops.norm(reference.Norm(weight, 1e-6), x[rows], more[rows])
        turned = layer_ops.rotate(both[None, rows], turns[:, rows], turns[:, rows], slots[rows], keys, values)
        gated = [layer_ops.gated(both[rows], gelu) for gelu in (False, True)]
        norms = reference.Norm(turns[0, 0], 1e-6, True), reference.Norm(turns[0, 1], 1e-6, True)
        others = torch.zeros_like(keys), torch.zeros_like(values), norms
        normal_heads = layer_ops.rotate(both[None, rows], turns[:, rows], turns[:, rows], slots[rows], *others)
        heads = [one[0].transpose(0, 1) for one in (turned, normal_heads)]
        return [normed, summed, *gated, *heads, keys[0, rows], values[0, rows], others[0][0, rows]]

    results = []
    for count in (1, 2, 3):
        torch.set_num_threads(count)
        results.append(all_of(slice(0, 140)))
    for many in results[1:]:
        assert all(map(torch.equal, many, results[0]))
    for row in (0, 7, 139):
        for one, many in zip(all_of(slice(row, row + 1)), results[0], strict=True):
            assert torch.equal(one[0], many[row])


@DTYPES
def test_what_is_no_number_stays_in_its_row(dtype: torch.dtype) -> None:
    """Guards failed rows, which are found by their logits."""
    x = normal(dtype, 3, 64)
    x[1, 5] = float("nan")
    for found in (
        layer_ops.norm(reference.Norm(x[0], 1e-6), x)[0],
        layer_ops.gated(x, False),
        layer_ops.gated(x, True),
    ):
        assert found[1].isnan().any()
        assert not found[[0, 2]].isnan().any()


def test_what_the_kernels_do_not_take_is_left_to_torch() -> None:
    """Heads of 8 numbers, gates of 50, half precision."""
    cpu = torch.device("cpu")
    found = ops_for(cpu, torch.float32, LAYERS, widths=frozenset({64, 96, 16}))
    assert found.by("numba") == ("gated", "norm", "program", "rotate")
    for dtype, widths in ((torch.float32, {64, 96, 4}), (torch.float32, {64, 50, 16}), (torch.float16, {64, 96, 16})):
        left = ops_for(cpu, dtype, LAYERS, widths=frozenset(widths))
        assert left.by("torch") == found.by("numba")
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
