"""Faults of checkpoints: told by name, before anything large is made or code of a stranger runs."""

from __future__ import annotations

import json
import logging
import pickle
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from dsbd_cli.config.model import ModelSpec
from dsbd_cli.errors import ModelError
from dsbd_cli.models import load_model as loading
from dsbd_cli.models.checkpoints.checkpoint import Checkpoint
from dsbd_cli.models.checkpoints.damage import check_checkpoint, read_headers
from dsbd_cli.models.checkpoints.loader import load
from dsbd_cli.models.checkpoints.stock import check_numbers
from tests.helpers.tiny import V

INFINITE = b'{"w": {"dtype": "F32", "shape": [1], "data_offsets": [0, 1e999]}}'


@pytest.fixture
def folder(checkpoint: Path, tmp_path: Path) -> Path:
    """A copy that may be spoilt."""
    return shutil.copytree(checkpoint, tmp_path / "copy")


def change(folder: Path, **fields: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))


def refused(folder: Path) -> str:
    """The one line that is said of it."""
    with pytest.raises(ModelError) as caught:
        load(Checkpoint.open(ModelSpec(str(folder), device="cpu")))
    said = str(caught.value)
    assert "\n" not in said
    assert said.startswith(f"target model '{folder}'")
    return said.removeprefix(f"target model '{folder}': ")


def test_headers_say_how_large_each_tensor_is(checkpoint: Path) -> None:
    file = checkpoint / "model.safetensors"
    assert read_headers([file], "m") == {name: tuple(tensor.shape) for name, tensor in load_file(file).items()}


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"num_hidden_layers": 0}, r"num_hidden_layers is 0, but must be 1 or more"),
        ({"text_config": {"num_hidden_layers": -1}}, r"text_config\.num_hidden_layers is -1, but must be 1 or more"),
        ({"num_hidden_layers": 10**8}, r"num_hidden_layers is 100000000, but the weights are \d+ tensors"),
        ({"text_config": {"n_layer": 10**6}}, r"text_config\.n_layer is 1000000, but the weights are \d+ tensors"),
        ({"hidden_size": 10**7}, r"hidden_size is 10000000, but no tensor of the weights is wider than \d+"),
        ({"vocab_size": 10**9}, r"vocab_size is 1000000000, but no tensor of the weights is wider than \d+"),
    ],
)
def test_a_config_that_does_not_fit_is_refused_before_it_is_read(
    fields: dict[str, Any], said: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards minutes of building a model that its weights cannot fill; already the config would list the layers."""
    from transformers import AutoConfig

    monkeypatch.setattr(AutoConfig, "from_pretrained", lambda *_, **__: pytest.fail("the config is read"))
    change(folder, **fields)
    assert re.fullmatch(f"config.json (does not fit the weights|is wrong): {said}", refused(folder))


def test_a_weight_of_another_shape_is_named(folder: Path) -> None:
    """Guards "For details look at the above report!", of which nothing is above."""
    change(folder, vocab_size=V - 1)
    assert refused(folder) == (
        f"its config does not fit its weights: lm_head.weight is {V} x 32, but must be {V - 1} x 32 (2 such weights)"
    )


@pytest.mark.parametrize("kind", ["model.safetensors", "pytorch_model.bin"])
@pytest.mark.parametrize("path", ["../x.safetensors", "/tmp/x.safetensors", "a/../../x", "..\\x", "C:\\x"])
def test_an_index_stays_in_its_folder(kind: str, path: str, folder: Path) -> None:
    (folder / f"{kind}.index.json").write_text(json.dumps({"weight_map": {"w": path}}))
    assert refused(folder) == f"{kind}.index.json names '{path}' for 'w': the path leaves the folder".replace(
        f"'{path}'", repr(path)
    )


@pytest.mark.parametrize("text", ["{", "[]", '{"weight_map": 3}', "\xff", "[" * 5000])
def test_an_index_that_is_none_is_one_line(text: str, folder: Path) -> None:
    (folder / "model.safetensors.index.json").write_bytes(text.encode("latin-1"))
    assert refused(folder).startswith("model.safetensors.index.json is no index of weights (")


def test_an_index_names_files(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    for path in (3, ["x"], None):
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"w": path}}))
        said = f"model.safetensors.index.json names {'null' if path is None else path} for 'w', which is no file name"
        with pytest.raises(ModelError) as caught:
            check_checkpoint(folder, "m")
        assert str(caught.value) == f"m: {said}"


def test_a_link_that_leads_nowhere_has_no_size(folder: Path) -> None:
    """Guards a traceback for a folder of the hub's cache whose blobs are gone."""
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors").symlink_to(folder / "gone")
    checkpoint = Checkpoint.open(ModelSpec(str(folder), device="cpu"))
    assert checkpoint.weight_bytes == 0
    with pytest.raises(ModelError, match="cannot be loaded: No such file or directory"):
        loading.load_model(checkpoint)


def test_shards_that_an_index_names_are_read(folder: Path) -> None:
    """Guards a check that refuses whole checkpoints of several files."""
    weights = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    names = sorted(weights)
    places = {name: f"model-{index % 2}.safetensors" for index, name in enumerate(names)}
    for file in set(places.values()):
        part = {name: weights[name] for name in names if places[name] == file}
        save_file(part, folder / file, {"format": "pt"})
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": places}))
    load(Checkpoint.open(ModelSpec(str(folder), device="cpu")))
    change(folder, num_hidden_layers=10**8)
    assert refused(folder).endswith(f"but the weights are {len(names)} tensors")


@pytest.mark.parametrize("left", [0, 5, 100, -1])
def test_a_file_that_is_cut_short_is_named(left: int, folder: Path) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:left])
    assert "model.safetensors is cut short" in refused(folder)


def test_a_header_that_is_none_is_one_line(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    for text in (b"[1]", b"{}{", b'{"w": {"dtype": "F32"}}', b"[" * 3000, INFINITE):
        file.write_bytes(len(text).to_bytes(8, "little") + text)
        with pytest.raises(ModelError, match="is no safetensors file: its header cannot be read"):
            check_checkpoint(tmp_path, "m")


def test_the_weight_that_holds_nan_is_named(folder: Path) -> None:
    """Guards "cannot hold a tree of tokens", and a row of an embedding that only some prompts reach."""
    weights = load_file(folder / "model.safetensors")
    weights["model.embed_tokens.weight"][40, 3] = float("nan")
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    count = weights["model.embed_tokens.weight"].numel()
    assert refused(folder) == f"1 of {count} numbers in model.embed_tokens.weight are NaN: get the files again"


def test_numbers_that_are_no_nan_pass() -> None:
    tensors = {"inf": torch.tensor([float("inf"), -1.0]), "whole": torch.arange(3), "empty": torch.empty(0)}
    check_numbers([*tensors.items(), ("meta", torch.empty(3, device="meta"))], "m")


@pytest.mark.parametrize("name", ["model.safetensors", "pytorch_model.bin", "tokenizer.json"])
def test_a_clone_without_its_large_files_is_told_as_such(name: str, folder: Path) -> None:
    """Guards "a pickle of more than tensors, which could run code"."""
    pointer = f"version https://git-lfs.github.com/spec/v1\noid sha256:{'0' * 64}\nsize 12345\n"
    if name == "pytorch_model.bin":
        (folder / name).write_text(pointer)
        load(Checkpoint.open(ModelSpec(str(folder), device="cpu")))  # which is not read beside safetensors
        (folder / "model.safetensors").unlink()
    (folder / name).write_text(pointer)
    assert refused(folder).startswith(f"{name} is a pointer of Git LFS, not the file itself: run git lfs pull")


class Runs:
    """Asks a pickle to run something."""

    def __reduce__(self) -> Any:
        return print, ("it runs",)


def test_a_pickle_of_code_is_refused_in_our_words(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Guards torch's advice to switch weights_only off."""
    (folder / "model.safetensors").unlink()
    torch.save({"lm_head.weight": Runs()}, folder / "pytorch_model.bin")
    assert refused(folder) == (
        "pytorch_model.bin is a pickle of more than tensors, which could run code and is not loaded: get the weights "
        "as safetensors"
    )
    (folder / "pytorch_model.bin").write_bytes(pickle.dumps({"w": Runs()}))
    assert "weights_only" not in refused(folder)
    assert "it runs" not in capsys.readouterr().out


def test_a_large_model_is_told_before_and_after(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Guards a minute of silence, and lines about what takes no time."""
    opened = Checkpoint.open(ModelSpec(str(checkpoint), device="cpu"))
    size = opened.weight_bytes
    assert size == (checkpoint / "model.safetensors").stat().st_size
    with caplog.at_level(logging.INFO, "dsbd_cli.models.load_model"):
        loading.load_model(opened)
        assert caplog.messages == []
        monkeypatch.setattr(loading, "LARGE_BYTES", size)
        real, seen = loading._load, []

        def noting(checkpoint: Checkpoint, **more: Any) -> Any:
            seen.extend(caplog.messages)
            return real(checkpoint, **more)

        monkeypatch.setattr(loading, "_load", noting)
        loading.load_model(opened)
    assert seen == [f"loading {checkpoint} (0 MB)"]
    assert len(caplog.messages) == 2
    assert caplog.messages[1].startswith(f"loaded {checkpoint} in ")
    caplog.clear()
    monkeypatch.setattr(Checkpoint, "weight_bytes", 3_100_000_000)
    with caplog.at_level(logging.INFO, "dsbd_cli.models.load_model"):
        loading.load_model(opened)
    assert caplog.messages[0] == f"loading {checkpoint} (3.1 GB)"
