"""Batch size by memory. Guards: a batch that cannot fit, a batch of 0, a limit of the container overlooked."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from dsbd_cli.config.method import MethodConfig
from dsbd_cli.config.sampling import SamplingConfig
from dsbd_cli.engine.decoding.engine import Engine
from dsbd_cli.engine.planning import memory_limit as budget
from dsbd_cli.engine.planning.memory_limit import LOGIT_BYTES, SHARE, fitting_rows, free_bytes
from dsbd_cli.errors import out_of_memory
from dsbd_cli.requests import Request
from tests.helpers.toys import NumberCodec, table_pair


class Sized:
    """As much of a model as a budget looks at."""

    vocab_size, device = 1000, torch.device("cpu")

    def kv_bytes_per_slot(self) -> int:
        return 2048

    def recurrent_bytes(self, window: int) -> int:
        return 1000 + 10 * window


def test_rows_are_those_that_fit() -> None:
    row = 100 * 2 * 2048 + 36 * 1000 * LOGIT_BYTES + 2 * (1000 + 10 * 3 * 36)
    models = [Sized(), Sized()]
    assert fitting_rows(models, 100, 36, free=int(5.5 * row / SHARE)) == 5  # type: ignore[arg-type]
    assert fitting_rows(models, 100, 36, free=10) == 1  # type: ignore[arg-type]
    assert fitting_rows(models, 100, 36, free=1 << 50) == budget.MOST_ROWS["cpu"]  # type: ignore[arg-type]


def test_free_memory_is_less_than_all() -> None:
    assert 0 < free_bytes(torch.device("cpu")) < 1 << 50


def test_memory_that_torch_keeps_on_a_gpu_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards a batch that is small because something large was loaded and dropped before."""
    for name, value in (("mem_get_info", (100, 1000)), ("memory_reserved", 700), ("memory_allocated", 450)):
        monkeypatch.setattr(torch.cuda, name, lambda device, value=value: value)
    assert free_bytes(torch.device("cuda")) == 350


@pytest.mark.parametrize(
    ("error", "memory"),
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB"), True),
        (MemoryError(), True),
        (RuntimeError("CUDA error: out of memory"), True),
        (RuntimeError("Triton Error [CUDA]: out of memory"), True),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"), True),
        (RuntimeError("CUDA error: an illegal memory access was encountered"), False),
        (ValueError("out of memory"), False),
    ],
)
def test_which_errors_are_of_memory(error: Exception, memory: bool) -> None:
    """Guards a run that ends where half the batch would fit: not all libraries raise torch's own error."""
    assert out_of_memory(error) == memory


def test_limit_of_the_container(tmp_path: Path) -> None:
    (tmp_path / "memory.max").write_text("1000\n")
    (tmp_path / "memory.current").write_text("700\n")
    (tmp_path / "memory.stat").write_text("anon 1\ninactive_file 50\n")
    assert budget._left_in_container(tmp_path) == [350]
    (tmp_path / "memory.max").write_text("max\n")
    assert budget._left_in_container(tmp_path) == []
    assert budget._left_in_container(tmp_path / "absent") == []


def test_an_engine_without_a_batch_size_takes_what_fits() -> None:
    """Same results, and the batch is as large as the requests at hand."""
    target, draft = table_pair(1, 12, 0.4)
    sampling = SamplingConfig(max_new_tokens=8, top_k=6)
    requests = [Request(id=str(i), seed=i, prompt_ids=(i % 5, i % 7), sampling=sampling) for i in range(20)]
    method = MethodConfig(num_beams=2, depth=2)
    results = []
    for batch_size in (None, 3):
        engine = Engine(target, draft, NumberCodec(12, (2,)), method, batch_size=batch_size)
        results.append([result.hypotheses for result in engine.run(requests)])
        assert engine.batch_size == (budget.MOST_ROWS["cpu"] if batch_size is None else 3)
    assert results[0] == results[1]
