"""Names of models."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from dsbd_cli.config.model import ModelSpec
from dsbd_cli.errors import ModelNotFoundError, UsageError
from dsbd_cli.models.checkpoints.checkpoint import Checkpoint
from dsbd_cli.models.checkpoints.registry import ALIASES, Location, known_names, resolve, user_file


@pytest.fixture(autouse=True)
def no_user_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("DSBD_MODELS_FILE", raising=False)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))


def test_alias_hub_id_and_folder(tmp_path: Path) -> None:
    """Guards the order of resolution: alias, then folder, then hub id of the form org/name."""
    assert resolve("llama-68m") == Location("hub", "JackFram/llama-68m")
    assert resolve("someone/some-model.v1") == Location("hub", "someone/some-model.v1")
    assert resolve("someone/some-model@v1.2") == Location("hub", "someone/some-model", "v1.2")
    assert resolve("someone/some-model@refs/pr/1+./adapter") == Location("hub", "someone/some-model", "refs/pr/1")
    assert resolve("llama-68m@v2") == Location("hub", "JackFram/llama-68m", "v2")
    assert resolve(str(tmp_path)) == Location("folder", str(tmp_path))
    assert all(resolve(name).kind == "hub" for name in ALIASES)


@pytest.mark.parametrize("name", ["llama-2-13", "Llama-2-13B", "lama-2-13b"])
def test_near_matches(name: str) -> None:
    """Guards typing errors: the right name is in the message, and it is no network timeout."""
    with pytest.raises(ModelNotFoundError, match=r"draft model .*did you mean .*llama-2-13b"):
        resolve(name, "draft")


@pytest.mark.parametrize("path", ["~no-such-user/model", "./none", "../none", "/none/here", "~/none-here", "a/b/c"])
def test_missing_path_is_told_with_the_role(path: str) -> None:
    """Guards the misleading "not a valid repo id" for a folder that is not there."""
    with pytest.raises(ModelNotFoundError, match=r"draft model .*there is no such folder"):
        resolve(path, "draft")


def test_unknown_name_builtin_and_file(tmp_path: Path) -> None:
    """Guards one-line messages for the other ways to be wrong."""
    file = tmp_path / "model.txt"
    file.touch()
    for source, said in [("zzzzzz", "org/name"), ("builtin:other", "builtin:target"), (str(file), "is a file")]:
        with pytest.raises(ModelNotFoundError, match=said) as caught:
            resolve(source)
        assert "\n" not in str(caught.value)


def test_gguf_is_a_file_or_the_only_one_of_a_folder(tmp_path: Path) -> None:
    """Guards "holds no config.json", which does not say that the form is the reason."""
    file = tmp_path / "model.Q4.gguf"
    file.touch()
    (tmp_path / "config.json").write_text("{}")
    assert Checkpoint.open(ModelSpec(str(file))).path == Checkpoint.open(ModelSpec(str(tmp_path))).path == file
    (tmp_path / "model.Q8.GGUF").touch()
    (tmp_path / "other.gguf").touch()
    with pytest.raises(ModelNotFoundError, match=r"holds 2 GGUF files: give one of model\.Q4\.gguf, other\.gguf"):
        Checkpoint.open(ModelSpec(str(tmp_path)))
    with pytest.raises(ModelNotFoundError, match="there is no such file"):
        Checkpoint.open(ModelSpec("gone.gguf"))


def test_user_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Guards the user's own names: both places of the file, relative folders, precedence over ours, suggestions."""
    (tmp_path / "mine").mkdir()
    file = tmp_path / "models.toml"
    file.write_text('[models]\nmine = "./mine"\n"opt-13b" = "me/opt"\n', encoding="utf-8")
    monkeypatch.setenv("DSBD_MODELS_FILE", str(file))
    assert resolve("mine") == Location("folder", str(tmp_path / "mine"))
    assert resolve("opt-13b").path == "me/opt"
    assert "mine" in known_names()
    monkeypatch.delenv("DSBD_MODELS_FILE")
    assert user_file() == tmp_path / "config" / "dsbd" / "models.toml"
    user_file().parent.mkdir(parents=True)
    user_file().write_text('[models]\nhome = "me/home"\n', encoding="utf-8")
    assert resolve("home").path == "me/home"


def test_bad_user_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Guards a broken or absent file: the file is named, no traceback."""
    file = tmp_path / "models.toml"
    monkeypatch.setenv("DSBD_MODELS_FILE", str(file))
    deep, long = f"[models]\nx = {'[' * 3000}\n", f"[models]\nx = {'9' * 5000}\n"
    for text in (None, "[models", "[models]\nx = 3\n", "models = 1\n", 'mine = "x"\n', deep, long):
        if text is not None:
            file.write_text(text, encoding="utf-8")
        with pytest.raises(UsageError, match=r"models\.toml"):
            resolve("mine")


def test_no_torch() -> None:
    """Guards the start-up time of commands that only list names."""
    code = "import sys, dsbd_cli.models.checkpoints.registry as r; r.known_names(); print('torch' in sys.modules)"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "False"
