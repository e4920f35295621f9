"""Memory that is touched during imports: its parts are the callers' own, and what no part uses goes back."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from dsbd_cli.ops.cpu import ahead, runtime
from dsbd_cli.ops.cpu.ahead import HUGE, LEAST, TouchedMemory


@pytest.fixture
def begun() -> Iterator[TouchedMemory]:
    """A block of LEAST bytes whose thread has touched all of them."""
    ahead.begin_touching(LEAST)
    block = ahead.touched_memory()
    assert block is not None
    block._thread.join()
    yield block
    ahead.end_touching()


def test_weights_lie_in_touched_memory_while_there_is_some(begun: TouchedMemory) -> None:
    begin = begun._address
    sizes = [1, 64, 65, HUGE + 1, 9 * HUGE]
    parts = [runtime.allocate_weights(size) for size in sizes]
    for number, part in enumerate(parts):
        assert not part.any()
        assert begin <= part.data_ptr() <= begin + len(begun.memory) - len(part)
        assert part.data_ptr() % runtime.CACHE_LINE == 0
        part.fill_(number + 1)
    for number, (size, part) in enumerate(zip(sizes, parts, strict=True)):
        assert len(part) == size
        assert part.eq(number + 1).all()
    beyond = runtime.allocate_weights(LEAST)
    assert not begin <= beyond.data_ptr() < begin + len(begun.memory)
    assert not beyond.any()


def test_what_no_weight_uses_goes_back_to_the_system(begun: TouchedMemory) -> None:
    part = runtime.allocate_weights(HUGE + 5)
    part.fill_(3)
    rest = torch.frombuffer(begun.memory, dtype=torch.uint8, offset=begun._used)
    rest.fill_(7)
    ahead.end_touching()
    assert part.eq(3).all()
    assert ahead.touched_memory() is None
    whole = begun._touched + HUGE - begun._used  # from here on no page holds a part, whatever the size of pages
    assert not rest[whole : LEAST - 2 * HUGE].any()
    assert begun.cut(1) is None


def test_memory_can_be_used_and_given_back_while_the_thread_runs() -> None:
    for _ in range(20):
        block = TouchedMemory(LEAST)
        place = block.cut(HUGE)
        if place is not None:
            part = torch.frombuffer(block.memory, dtype=torch.uint8, count=HUGE, offset=place)
            part.fill_(1)
        block.give_back()
        assert not block._thread.is_alive()
        assert place is None or part.all()


def test_little_memory_is_not_worth_a_thread() -> None:
    ahead.begin_touching(LEAST - 1)
    assert ahead.touched_memory() is None


def test_a_load_that_fails_gives_its_memory_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import dsbd_cli
    from dsbd_cli import loading
    from dsbd_cli.errors import ModelError

    monkeypatch.setattr(loading, "stored_bytes", lambda place: 2 * LEAST)
    begun = list[int]()

    def begin(size: int) -> None:
        begun.append(size)
        ahead.begin_touching(size)

    monkeypatch.setattr(loading, "begin_touching", begin)
    (tmp_path / "config.json").write_text('{"model_type": "llama", "architectures": ["LlamaForCausalLM"]}')
    with pytest.raises(ModelError):
        dsbd_cli.load(str(tmp_path), None)
    assert begun == [LEAST]
    assert ahead.touched_memory() is None


def test_no_more_is_touched_than_a_model_packs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from dsbd_cli import ModelSpec, loading

    (tmp_path / "model.safetensors").write_bytes(bytes(1000))
    (tmp_path / "gpu").touch()
    real = Path.read_text

    def packed(
        config: str = '{"torch_dtype": "bfloat16"}', flags: str = "avx512f", gpu: str = "none", **spec: Any
    ) -> int:
        (tmp_path / "config.json").write_text(config)
        monkeypatch.setattr(loading, "GPU_FILES", (str(tmp_path / gpu),))
        monkeypatch.setattr(
            Path, "read_text", lambda path, **how: flags if path == Path("/proc/cpuinfo") else real(path, **how)
        )
        return loading._packed_bytes(ModelSpec(str(tmp_path), **spec), tmp_path)

    assert packed() == packed(device="cpu", gpu="gpu") == 1000
    assert packed(quantize="int8") == packed(quantize="int8", flags="fma amx_bf16") == 500
    assert packed('{"dtype": "float32"}') == packed("[]") == packed("{") == 500  # which may be packed in bfloat16
    assert packed(flags="fma amx_bf16") == 0
    assert packed(gpu="gpu") == packed(device="cuda") == packed(tensor_parallel=2) == 0
