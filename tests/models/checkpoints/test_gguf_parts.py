"""GGUF files in parts: any part names the whole, and all of them count."""

from __future__ import annotations

import shutil
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from transformers import Qwen2ForCausalLM
from transformers.integrations.gguf.reader import GgufHeader

from dsbd_cli import ModelError, ModelNotFoundError, ModelSpec
from dsbd_cli.models import verdicts
from dsbd_cli.models.checkpoints.catalog import _state
from dsbd_cli.models.checkpoints.checkpoint import Checkpoint
from dsbd_cli.models.checkpoints.gguf.parts import gguf_parts
from dsbd_cli.models.checkpoints.loader import load as load_checkpoint
from tests.helpers.tiny_gguf import WORDS, tiny_qwen2, write_gguf


@pytest.fixture(scope="module")
def original() -> Qwen2ForCausalLM:
    return tiny_qwen2()


@pytest.fixture(scope="module")
def made(original: Qwen2ForCausalLM, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("parts")
    write_gguf(original, folder / "tiny.gguf", most_tensors=8)
    return folder


@pytest.fixture
def folder(made: Path, tmp_path: Path) -> Path:
    """A copy that a test may damage."""
    return Path(shutil.copytree(made, tmp_path / "model"))


def part(folder: Path, number: int) -> Path:
    [path] = folder.glob(f"tiny-{number:05}-of-*.gguf")
    return path


def last(folder: Path) -> int:
    return len(list(folder.glob("*.gguf")))


@pytest.mark.parametrize("named", ["first", "middle", "last", "folder"])
def test_any_part_is_the_model_that_was_put_into_all(made: Path, original: Qwen2ForCausalLM, named: str) -> None:
    count = last(made)
    assert count > 3
    source = {"first": part(made, 1), "middle": part(made, 2), "last": part(made, count), "folder": made}[named]
    model, tokenizer = load_checkpoint(Checkpoint.open(ModelSpec(str(source), dtype="float32")))
    ids = torch.tensor([[1, 5, 9, 22]])
    with torch.no_grad():
        assert torch.equal(model(ids).logits, original(ids).logits)
    assert tokenizer.decode([0, 1, 2]) == "".join(WORDS[:3])


def test_nothing_is_left_replaced(made: Path) -> None:
    reader, header = gguf.GGUFReader, vars(GgufHeader)["from_file"]
    load_checkpoint(Checkpoint.open(ModelSpec(str(part(made, 1)), dtype="float32")))
    assert gguf.GGUFReader is reader
    assert vars(GgufHeader)["from_file"] is header


def test_half_precision_in_parts(original: Qwen2ForCausalLM, tmp_path: Path) -> None:
    (tmp_path / "one").mkdir()
    write_gguf(original, tmp_path / "one" / "tiny.gguf", dtype=np.float16)
    write_gguf(original, tmp_path / "tiny.gguf", most_tensors=5, dtype=np.float16)
    ids = torch.tensor([[1, 5, 9, 22]])
    sources = (tmp_path / "one" / "tiny.gguf", part(tmp_path, 1))
    models = [load_checkpoint(Checkpoint.open(ModelSpec(str(source), dtype="float32")))[0] for source in sources]
    with torch.no_grad():
        assert torch.equal(models[0](ids).logits, models[1](ids).logits)


def test_digests_and_verdicts_see_all_parts(folder: Path) -> None:
    spec = ModelSpec(str(part(folder, 1)))
    opened = Checkpoint.open(spec)
    before, verdict = opened.digests, verdicts.fingerprint(spec, opened.files)
    assert Checkpoint.open(ModelSpec(str(part(folder, 2)))).digests == before
    assert opened.weight_bytes == sum(file.stat().st_size for file in folder.iterdir())
    changed = part(folder, last(folder))
    content = bytearray(changed.read_bytes())
    content[-64:] = bytes(64)
    changed.write_bytes(content)
    assert opened.digests["weights"] != before["weights"]
    assert verdicts.fingerprint(spec, opened.files) != verdict


@pytest.mark.parametrize("missing", [[1], [2], [3, 4]])
def test_a_missing_part_is_named(folder: Path, missing: list[int]) -> None:
    names = [part(folder, number).name for number in missing]
    for name in names:
        (folder / name).unlink()
    more = " and 1 more" if len(names) == 2 else ""
    for source in (next(folder.glob("*.gguf")), folder):
        with pytest.raises(ModelError, match=f"of its 4 parts {names[0]}{more} is missing"):
            load_checkpoint(Checkpoint.open(ModelSpec(str(source))))
        assert _state(str(source)) == "partly here"


def test_damage_in_any_part_is_told(folder: Path) -> None:
    spec = ModelSpec(str(part(folder, 1)))
    damaged = part(folder, 3)
    content = damaged.read_bytes()
    for bad, told in (
        (content[:-100], "is cut short"),
        (b"GGUX" + content[4:], "is no GGUF file"),
        (b"version https://git-lfs.github.com/spec/v1\n", "pointer of Git LFS"),
        (part(folder, 2).read_bytes(), "another part than its name says"),
    ):
        damaged.write_bytes(bad)
        with pytest.raises(ModelError, match=told) as caught:
            load_checkpoint(Checkpoint.open(spec))
        assert damaged.name in str(caught.value) or "its parts" in str(caught.value)
        assert "\n" not in str(caught.value)


def test_a_name_that_is_no_part(tmp_path: Path) -> None:
    for name in ("a-1-of-2.gguf", "a.gguf", "a-00001-of-00002.gguf.gguf"):
        assert gguf_parts(tmp_path / name) == [tmp_path / name]
    assert [part.name for part in gguf_parts(tmp_path / "a-00002-of-00002.GGUF")] == [
        "a-00001-of-00002.GGUF",
        "a-00002-of-00002.GGUF",
    ]
    with pytest.raises(ModelNotFoundError, match="there is no such file"):
        Checkpoint.open(ModelSpec(str(tmp_path / "a-00001-of-00002.gguf")))
