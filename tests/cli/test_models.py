"""`dsbd models`, and completion."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from dsbd_cli.io.lines.replace import replacing
from tests.cli.conftest import ROOT, Outcome
from tests.helpers.checkpoints import byte_fallback, byte_level, save, wrap

Dsbd = Callable[..., Outcome]


@pytest.fixture(autouse=True)
def own_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.delenv("DSBD_MODELS_FILE", raising=False)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    return tmp_path / "config" / "dsbd" / "models.toml"


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str, str]:
    """A target, a draft that fits, and one that does not; without weights."""
    root = tmp_path_factory.mktemp("models")
    alike, other = wrap(byte_level()), wrap(byte_fallback())
    made = [
        save(root / name, tokenizer=tokenizer, vocab_size=len(tokenizer) + more, seed=1)
        for name, tokenizer, more in (("target", alike, 0), ("draft", alike, 5), ("stranger", other, 0))
    ]
    for folder in made:
        for weights in Path(folder).glob("*.safetensors"):
            weights.unlink()
    target, draft, stranger = (str(folder) for folder in made)
    return target, draft, stranger


def test_the_list(dsbd: Dsbd, folders: tuple[str, str, str]) -> None:
    assert dsbd("models", "add", "mine", folders[0]).code == 0
    outcome = dsbd("models")
    assert (outcome.code, outcome.err) == (0, "")
    lines = {line.split()[0]: line.split() for line in outcome.out.splitlines()}
    assert lines["builtin:target"][-1] == "built-in"
    assert lines["mine"][1:] == [folders[0], "partly", "here", "yours"]
    assert lines["gpt2"][1:2] == ["openai-community/gpt2"]


def test_one_damaged_folder_leaves_the_others_listed(dsbd: Dsbd, tmp_path: Path) -> None:
    """Guards a list that ends in an error for every name, because of one index."""
    for text in ("{", '{"weight_map": {"w": 3}}'):
        (tmp_path / "config.json").write_text("{}")
        (tmp_path / "model.safetensors.index.json").write_text(text)
        dsbd("models", "add", "damaged", str(tmp_path))
        outcome = dsbd("models")
        assert (outcome.code, outcome.err) == (0, "")
        assert "gpt2 " in outcome.out


def test_a_gguf_file_has_a_name(dsbd: Dsbd, own_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards a path that counts from wherever the command is run, and a file that is listed as absent."""
    (tmp_path / "m.gguf").touch()
    monkeypatch.chdir(tmp_path)
    assert dsbd("models", "add", "file", "m.gguf").code == 0
    assert dsbd("models", "add", "folder", ".").code == 0
    assert own_file.read_text() == f'[models]\nfolder = "{tmp_path}"\nfile = "{tmp_path}/m.gguf"\n'
    listed = {line.split()[0]: line.split()[2:] for line in dsbd("models").out.splitlines()}
    assert listed["file"] == listed["folder"] == ["here", "yours"]


def test_a_name_that_another_command_adds_now_is_not_lost(dsbd: Dsbd, own_file: Path) -> None:
    """Guards a file that two commands read and write at once: the second is told to try again."""
    own_file.parent.mkdir(parents=True, exist_ok=True)
    own_file.write_text('[models]\nfirst = "org/model"\n')
    with replacing(own_file) as stream:
        refused = dsbd("models", "add", "second", "org/other")
    stream.close()
    assert (refused.code, "is being written by another process" in refused.err) == (1, True)
    own_file.write_text('[models]\nfirst = "org/model"\n')
    own_file.chmod(0o600)
    assert dsbd("models", "add", "second", "org/other").code == 0
    assert own_file.read_text() == '[models]\nsecond = "org/other"\nfirst = "org/model"\n'
    assert own_file.stat().st_mode & 0o777 == 0o600


def test_a_name_keeps_its_revision(dsbd: Dsbd, own_file: Path) -> None:
    """Guards a run of the main branch where another one was named."""
    assert dsbd("models", "add", "old", "org/model@v1").code == 0
    assert own_file.read_text() == '[models]\nold = "org/model@v1"\n'


def test_a_link_to_the_users_file_stays_a_link(dsbd: Dsbd, own_file: Path, tmp_path: Path) -> None:
    """Guards a file that is kept elsewhere: it would have had no new names any more."""
    kept = tmp_path / "kept.toml"
    kept.write_text("[models]\n")
    own_file.parent.mkdir(parents=True)
    own_file.symlink_to(kept)
    assert dsbd("models", "add", "x", "org/x").code == 0
    assert own_file.is_symlink()
    assert kept.read_text() == '[models]\nx = "org/x"\n'


def test_what_is_no_ordinary_file_is_left_alone(dsbd: Dsbd, own_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards DSBD_MODELS_FILE=/dev/null, whose place a file took."""
    own_file.parent.mkdir(parents=True)
    own_file.touch()
    monkeypatch.setattr(Path, "is_file", lambda path: path != own_file)
    refused = dsbd("models", "add", "x", "org/x")
    assert refused.code == 2
    assert "is no ordinary file" in refused.err
    assert own_file.read_text() == ""


def test_a_path_that_is_not_utf8_is_one_line(dsbd: Dsbd, own_file: Path, tmp_path: Path) -> None:
    folder = tmp_path / os.fsdecode(b"\xff")
    folder.mkdir()
    refused = dsbd("models", "add", "x", str(folder))
    assert refused.code == 2
    assert "whose name is not UTF-8" in refused.err
    assert not own_file.exists()


def test_a_user_without_a_home(dsbd: Dsbd, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("XDG_CONFIG_HOME")
    monkeypatch.setattr(os.path, "expanduser", lambda path: path)
    monkeypatch.chdir(tmp_path)
    assert dsbd("models").code == 0
    refused = dsbd("models", "add", "x", "org/x")
    assert refused.code == 2
    assert "there is no such home folder" in refused.err
    assert not (tmp_path / "~").exists()


def test_names_are_added_to_the_users_file(dsbd: Dsbd, folders: tuple[str, str, str], own_file: Path) -> None:
    own_file.parent.mkdir(parents=True)
    own_file.write_text('# mine\n[models]  # names\nold = "org/old"\n\n[other]\nx = 1')
    assert dsbd("models", "add", "a.b-1", "org/new").out == f"a.b-1 = org/new, in {own_file}\n"
    assert dsbd("models", "add", "here", folders[0]).code == 0
    assert own_file.read_text() == (
        f'# mine\n[models]  # names\nhere = "{folders[0]}"\n"a.b-1" = "org/new"\nold = "org/old"\n\n[other]\nx = 1'
    )
    for name, source, message in (
        ("old", "org/x", "old is there already and means org/old"),
        ("a/b", "org/x", "NAME is 'a/b'"),
        ("builtin:x", "org/x", "NAME is 'builtin:x'"),
        ("new", "no such thing", "is not known"),
        ("new", "./no-such-folder", "there is no such folder"),
    ):
        refused = dsbd("models", "add", name, source)
        assert refused.code in (1, 2)
        assert message in refused.err


def test_the_first_name_makes_the_file(
    dsbd: Dsbd, own_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert dsbd("models", "add", "x", "./no-such-folder").code == 1
    assert not own_file.exists(), "what is refused leaves no file"
    assert dsbd("models", "add", "x", "org/x").code == 0
    assert own_file.read_text() == '[models]\nx = "org/x"\n'
    monkeypatch.setenv("DSBD_MODELS_FILE", str(tmp_path / "named.toml"))
    assert dsbd("models", "add", "y", "org/y").code == 0
    assert (tmp_path / "named.toml").read_text() == '[models]\ny = "org/y"\n'
    (tmp_path / "link.toml").symlink_to(tmp_path / "named.toml")
    monkeypatch.setenv("DSBD_MODELS_FILE", str(tmp_path / "link.toml"))
    assert dsbd("models", "add", "z", "org/z").code == 0
    assert (tmp_path / "link.toml").is_symlink()
    assert (tmp_path / "named.toml").read_text() == '[models]\nz = "org/z"\ny = "org/y"\n'


def test_a_file_that_cannot_take_a_line_is_left_alone(dsbd: Dsbd, own_file: Path) -> None:
    own_file.parent.mkdir(parents=True)
    own_file.write_text('models = {old = "org/old"}\n')
    refused = dsbd("models", "add", "new", "org/new")
    assert refused.code == 2
    assert "by hand" in refused.err
    assert own_file.read_text() == 'models = {old = "org/old"}\n'


@pytest.mark.parametrize("before", ["", "--set min-p ", "--set no-setting=1 "])
def test_the_shell_completes(before: str) -> None:
    """Also behind a setting that the command would refuse."""
    words = f"dsbd generate {before}--num-"
    environment = {
        **os.environ,
        "_DSBD_COMPLETE": "complete_bash",
        "COMP_WORDS": words,
        "COMP_CWORD": str(len(words.split()) - 1),
    }
    done = subprocess.run(
        [sys.executable, "-m", "dsbd_cli"], env=environment, cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert (done.stdout.split(), done.stderr) == (["--num-beams"], "")


def test_how_types_of_models_run(dsbd: Dsbd) -> None:
    outcome = dsbd("models", "--support")
    assert (outcome.code, outcome.err) == (0, "")
    tried, columns, *lines = outcome.out.splitlines()
    assert tried.startswith("# tried with tiny random models of transformers 5.")
    assert columns.split() == ["type", "reads", "runs", "exactness", "beams", "why"]
    rows = {line.split()[0]: line for line in lines}
    assert rows["llama"].split() == ["llama", "text", "decoder", "same-text", "3/3"]
    assert " refused " in rows["mpt"]
