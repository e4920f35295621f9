"""Memory that is touched during imports: its parts are the callers' own, and what no part uses goes back."""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

import dsbd_cli
from dsbd_cli import ModelSpec, loading
from dsbd_cli.errors import ModelError
from dsbd_cli.models import load_model, load_transformers
from dsbd_cli.models.checkpoints.checkpoint import Checkpoint
from dsbd_cli.ops import ahead, memory
from dsbd_cli.ops.ahead import HUGE, LEAST, TouchedMemory
from dsbd_cli.ops.processor import Processor
from tests.helpers.checkpoints import save


@pytest.fixture
def begun() -> Iterator[TouchedMemory]:
    """A block of LEAST bytes whose thread has touched all of them."""
    with ahead.touching(LEAST):
        (block,) = ahead._begun
        block._thread.join()
        yield block


def test_weights_lie_in_touched_memory_while_there_is_some(begun: TouchedMemory) -> None:
    begin = begun._address
    sizes = [1, 64, 65, HUGE + 1, 9 * HUGE]
    parts = [memory.allocate_weights(size) for size in sizes]
    for number, part in enumerate(parts):
        assert not part.any()
        assert begin <= part.data_ptr() <= begin + len(begun.memory) - len(part)
        assert part.data_ptr() % memory.CACHE_LINE == 0
        part.fill_(number + 1)
    for number, (size, part) in enumerate(zip(sizes, parts, strict=True)):
        assert len(part) == size
        assert part.eq(number + 1).all()
    beyond = memory.allocate_weights(LEAST)
    assert not begin <= beyond.data_ptr() < begin + len(begun.memory)
    assert not beyond.any()


def test_what_no_weight_uses_goes_back_to_the_system(begun: TouchedMemory) -> None:
    part = memory.allocate_weights(HUGE + 5)
    part.fill_(3)
    rest = torch.frombuffer(begun.memory, dtype=torch.uint8, offset=begun._used)
    rest.fill_(7)
    ahead.end_touching()
    assert part.eq(3).all()
    assert ahead.cut_touched(1) is None
    assert not rest[HUGE : LEAST - 2 * HUGE].any()  # behind the page that a part may share
    assert begun.cut(1) is None


def test_memory_can_be_used_and_given_back_while_the_thread_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ahead, "PIECE", 4096)
    cut = 0
    for _ in range(20):
        block = TouchedMemory(LEAST)
        while block._touched == block._used:
            time.sleep(0)
        offset = block.cut(4096)
        assert offset is not None
        cut += block._thread.is_alive()
        part = torch.frombuffer(block.memory, dtype=torch.uint8, count=4096, offset=offset)
        part.fill_(1)
        block.give_back()
        assert not block._thread.is_alive()
        assert part.all()
    assert cut


def test_engines_that_are_loaded_in_threads_do_not_lose_each_others_weights() -> None:
    """Guards pages that one load gives back while another one cuts them."""

    def load(number: int) -> bool:
        held = []
        for _ in range(20):
            with ahead.touching(LEAST):
                for size in (HUGE, HUGE // 2, 100):
                    part = memory.allocate_weights(size)
                    assert not part.any()
                    held.append(part.fill_(number))
        return all(bool(part.eq(number).all()) for part in held)

    with ThreadPoolExecutor(4) as executor:
        assert all(executor.map(load, range(1, 5)))
    assert ahead._begun == []


def test_little_memory_is_not_worth_a_thread() -> None:
    with ahead.touching(LEAST - 1):
        assert ahead._begun == []


@pytest.mark.parametrize("early", [False, True])
def test_a_load_that_fails_gives_its_memory_back(early: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """early: before a model is loaded."""
    begun = []

    def fails(threads: int | None) -> None:
        begun.extend(ahead._begun)
        if early:
            raise ModelError("early")

    monkeypatch.setattr(loading, "_packed_bytes", lambda checkpoint: LEAST)
    monkeypatch.setattr(loading, "_set_threads", fails)
    (tmp_path / "config.json").write_text('{"model_type": "llama", "architectures": ["LlamaForCausalLM"]}')
    with pytest.raises(ModelError):
        dsbd_cli.load(str(tmp_path), None)
    assert (len(begun), ahead._begun) == (1, [])


def test_a_model_that_transformers_runs_gives_the_memory_back_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards memory that is held twice: for weights that are never packed, and for those that transformers reads."""
    target = save(tmp_path)
    monkeypatch.setattr(load_model, "decoder_config_or_reason", lambda checkpoint: "a reason")
    begun = []
    real = load_transformers.load_transformers

    def noting(checkpoint: Checkpoint) -> Any:
        begun.append(list(ahead._begun))
        return real(checkpoint)

    monkeypatch.setattr(load_transformers, "load_transformers", noting)
    monkeypatch.setattr(loading, "_packed_bytes", lambda checkpoint: LEAST)
    dsbd_cli.load(target, None)
    assert begun == [[]]


def test_no_more_is_touched_than_a_model_packs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "model.safetensors").write_bytes(bytes(1000))
    (tmp_path / "consolidated.safetensors").write_bytes(bytes(1000))  # the same once more
    (tmp_path / "gpu").touch()

    def packed(
        config: str = '{"torch_dtype": "bfloat16"}',
        processor: Processor = Processor.AVX512,
        gpu: str = "none",
        **spec: Any,
    ) -> int:
        (tmp_path / "config.json").write_text(config)
        monkeypatch.setattr(loading, "GPU_FILES", (str(tmp_path / gpu),))
        monkeypatch.setattr(loading, "current", lambda: processor)
        return loading._packed_bytes(Checkpoint(ModelSpec(str(tmp_path), **spec), tmp_path))

    assert packed() == packed(device="cpu", gpu="gpu") == 1000
    assert packed('{"dtype": "float32"}') == 500  # which may be packed in bfloat16
    assert packed(processor=Processor.AVX2) == 1000
    assert packed(processor=Processor.AMX) == packed(processor=Processor.BASE) == 0
    for one in (Processor.AVX2, Processor.AVX512, Processor.AMX):
        assert packed(quantize="int8", processor=one) == 500
        assert packed(quantize="int4", processor=one) == 250
    assert packed(quantize="int8", processor=Processor.BASE) == 0
    assert packed("[]") == packed("{") == packed("[" * 100_000) == 0
    assert packed(gpu="gpu") == packed(device="cuda") == packed(tensor_parallel=2) == 0
