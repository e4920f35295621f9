"""Digests of checkpoints: whatever a run reads changes them, and nothing else does."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from dsbd_cli.config.model import ModelSpec
from dsbd_cli.models.checkpoints.checkpoint import Checkpoint
from dsbd_cli.models.checkpoints.digest import SAMPLES
from tests.models.checkpoints.test_adapters import adapt
from tests.models.checkpoints.test_loader import cache_as, hub_cache  # noqa: F401
from tests.models.decoders import build_decoder, save_decoder

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")  # of peft
PARTS = ("config", "tokenizer", "weights")


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_decoder(tmp_path_factory.mktemp("digest"), build_decoder("llama"))


@pytest.fixture
def folder(saved: Path, tmp_path: Path) -> Path:
    return shutil.copytree(saved, tmp_path / "copy")


def changed(before: dict[str, str], source: object) -> set[str]:
    now = Checkpoint.open(ModelSpec(str(source))).digests
    return {part for part in PARTS if now[part] != before[part]}


def test_a_copy_is_the_same(saved: Path, folder: Path) -> None:
    """Other files beside it do not count."""
    (folder / "README.md").write_text("read me", encoding="utf-8")
    before = Checkpoint.open(ModelSpec(str(saved))).digests
    assert tuple(before) == PARTS
    assert all(len(digest) == 16 for digest in before.values())
    assert changed(before, folder) == set()


def test_a_change_is_of_its_part(saved: Path, folder: Path) -> None:
    """Also one that leaves the size of the weights as it is, in any of the tensors."""
    before = Checkpoint.open(ModelSpec(str(saved))).digests
    settings = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    (folder / "config.json").write_text(json.dumps({**settings, "rms_norm_eps": 0.5}), encoding="utf-8")
    assert changed(before, folder) == {"config"}
    (folder / "tokenizer.json").write_bytes((folder / "tokenizer.json").read_bytes() + b" ")
    assert changed(before, folder) == {"config", "tokenizer"}
    tensors = load_file(folder / "model.safetensors")
    for name in tensors:
        other = shutil.copytree(saved, folder.parent / "other", dirs_exist_ok=True)
        save_file({**tensors, name: tensors[name] + 1}, other / "model.safetensors", {"format": "pt"})
        assert changed(before, other) == {"weights"}, name


def test_more_tensors_than_blocks(tmp_path: Path, saved: Path) -> None:
    """Blocks lie all over the file."""
    for name in ("one", "two", "three"):
        shutil.copytree(saved, tmp_path / name)
    many = {f"t{number}": torch.full((4096,), float(number)) for number in range(SAMPLES + 1)}
    save_file(many, tmp_path / "one" / "model.safetensors")
    save_file({**many, "t0": many["t0"] + 1}, tmp_path / "two" / "model.safetensors")
    save_file({name: tensor + 1 for name, tensor in many.items()}, tmp_path / "three" / "model.safetensors")
    before = Checkpoint.open(ModelSpec(str(tmp_path / "one"))).digests
    assert changed(before, tmp_path / "three") == {"weights"}
    assert changed(before, tmp_path / "one") == set()


def headed(text: bytes) -> bytes:
    return len(text).to_bytes(8, "little") + text


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"1234567",
        b"\xff" * 8,
        headed(b"{}"),
        b"\x09" + b"0" * 40,
        headed(b"[" * 5000),
        headed(b'{"w": {"data_offsets": [0, 1e999]}}'),
        headed(b'{"w": {"data_offsets": [0, %d]}}' % 10**30),
    ],
)
def test_a_damaged_file_has_one(text: bytes, folder: Path, saved: Path) -> None:
    """That it is damaged is told when it is loaded."""
    (folder / "model.safetensors").write_bytes(text)
    assert changed(Checkpoint.open(ModelSpec(str(saved))).digests, folder) == {"weights"}


def test_adapters_count(saved: Path, tmp_path: Path) -> None:
    before = Checkpoint.open(ModelSpec(str(saved))).digests
    for number in (1, 2):
        adapt(build_decoder("llama"), tmp_path / f"{number}", seed=number)
    single, both, turned = (f"{saved}+{'+'.join(str(tmp_path / n) for n in names)}" for names in ("1", "12", "21"))
    assert changed(before, single) == {"weights"}
    assert changed(Checkpoint.open(ModelSpec(single)).digests, both) == {"weights"}
    assert changed(Checkpoint.open(ModelSpec(both)).digests, turned) == {"weights"}
    before = Checkpoint.open(ModelSpec(single)).digests
    for name in ("README.md", "optimizer.pt"):  # which peft and a trainer leave there, and no run reads
        (tmp_path / "1" / name).write_text("other", encoding="utf-8")
    assert changed(before, single) == set()
    (tmp_path / "1" / "adapter_config.json").write_text("{}", encoding="utf-8")
    assert changed(before, single) == {"weights"}


def test_the_commit_of_a_hub_model(hub_cache: Path, saved: Path) -> None:  # noqa: F811
    cache_as(hub_cache, "org/model", saved)
    assert Checkpoint.open(ModelSpec("org/model")).commit == "0" * 40
    assert Checkpoint.open(ModelSpec(str(saved))).commit is None
    assert Checkpoint.open(ModelSpec("org/model")).digests == Checkpoint.open(ModelSpec(str(saved))).digests
