"""`dsbd doctor`: what a user pastes into an issue is whole, fits the page, and says what is broken."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from dsbd_cli.cli.commands import doctor as command
from dsbd_cli.engine.decoding.engine import Engine
from dsbd_cli.lab.profiling import checkup
from dsbd_cli.ops.processor import current
from tests.cli.conftest import Outcome
from tests.helpers.checkpoints import byte_fallback, byte_level, save, wrap

Dsbd = Callable[..., Outcome]
WIDE = {"hidden_size": 256, "intermediate_size": 192, "head_dim": 64}  # wide enough for batch-invariant forwards
PARTS = "versions machine GPU pair models forest numerics graphs kernels memory texts speed".split()


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(command, "SECONDS", 0.2)
    monkeypatch.setattr(checkup, "TOKENS", 6)
    monkeypatch.setattr(checkup, "NVIDIA", tmp_path / "no driver")
    monkeypatch.delenv("DSBD_TARGET", raising=False)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str, str]:
    """A target, a draft that fits, and one that does not."""
    root = tmp_path_factory.mktemp("models")
    alike, other = wrap(byte_level()), wrap(byte_fallback())
    made = [
        save(root / name, tokenizer=tokenizer, vocab_size=len(tokenizer) + more, seed=1, **WIDE)
        for name, tokenizer, more in (("target", alike, 0), ("draft", alike, 5), ("stranger", other, 0))
    ]
    target, draft, stranger = (str(folder) for folder in made)
    return target, draft, stranger


def states(text: str) -> dict[str, str]:
    """State by part, of the picture."""
    return {line.split()[1]: line.split()[0] for line in text.splitlines() if line[:1].strip() and line[8:9].strip()}


def test_the_picture(dsbd: Dsbd, folders: tuple[str, str, str]) -> None:
    target, draft, _ = folders
    outcome = dsbd("doctor", "--target", target, "--draft", draft)
    assert (outcome.code, outcome.err) == (0, "")
    lines = outcome.out.splitlines()
    assert [line[8:18].strip() for line in lines if line[:8].strip() in ("ok", "note", "off")] == PARTS
    assert max(len(line) for line in lines if target not in line) <= 80
    assert "\x1b" not in outcome.out
    assert "logits differ in padding only" in " ".join(outcome.out.split())
    assert lines[-1] == "nothing broken in 12 parts"


def test_the_document(dsbd: Dsbd, folders: tuple[str, str, str]) -> None:
    outcome = dsbd("doctor", "--target", folders[0], "--json")
    assert (outcome.code, outcome.err) == (0, "")
    document = json.loads(outcome.out)
    assert document["broken"] == []
    assert list(document["checks"]) == [part for part in PARTS if part != "pair"]
    facts = {name: check["facts"] for name, check in document["checks"].items()}
    assert facts["models"]["target"]["dtype"] == "float32"
    assert facts["speed"]["tokens_per_s"] > 0
    assert facts["machine"]["processor"] == str(current())
    steps = facts["texts"].pop("steps_per_call")
    assert steps >= 1
    assert facts["texts"] == {"equal": 2, "same_tokens": 2, "prompts": 2}


def test_a_draft_that_does_not_fit_leaves_the_target_to_be_tried(dsbd: Dsbd, folders: tuple[str, str, str]) -> None:
    outcome = dsbd("doctor", "--target", folders[0], "--draft", folders[2])
    assert outcome.code == 1
    parts = states(outcome.out)
    assert (parts["pair"], parts["models"], parts["texts"]) == ("BROKEN", "ok", "ok")
    assert "target and draft have different vocabularies" in " ".join(outcome.out.split())
    assert outcome.out.endswith("1 of 12 parts broken: pair\n")


def test_a_pair_without_weights_is_told_to_fit_and_nothing_is_fetched(
    dsbd: Dsbd, folders: tuple[str, str, str], tmp_path: Path
) -> None:
    for name, source in zip(("target", "draft"), folders, strict=False):
        (tmp_path / name).mkdir()
        for file in Path(source).iterdir():
            if file.suffix != ".safetensors":
                (tmp_path / name / file.name).write_bytes(file.read_bytes())
    outcome = dsbd("doctor", "--target", str(tmp_path / "target"), "--draft", str(tmp_path / "draft"))
    assert outcome.code == 1
    assert states(outcome.out)["pair"] == "ok"
    assert "its weights are not on this machine" in " ".join(outcome.out.split())
    assert dsbd("doctor", "--target", folders[0], "--draft", "nothing-like-it").code == 1
    absent = dsbd("doctor", "--target", "org/absent")
    assert (absent.code, states(absent.out)["models"]) == (1, "BROKEN")
    said = " ".join(absent.out.split())
    assert "hf download org/absent" in said
    assert "is not on this machine" in said


def test_other_texts_with_a_draft_are_broken_where_the_same_are_promised(
    dsbd: Dsbd, folders: tuple[str, str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = Engine.generate

    def other(self: Engine, requests: object, **more: object) -> object:
        results = plain(self, requests, **more)  # type: ignore[call-overload]
        return results[::-1] if isinstance(results, list) and self.method.depth else results

    monkeypatch.setattr(Engine, "generate", other)
    outcome = dsbd("doctor", "--target", folders[0])
    assert outcome.code == 1
    assert states(outcome.out)["texts"] == "BROKEN"
    assert "0 of 2 prompts" in " ".join(outcome.out.split())


def test_a_part_that_fails_leaves_the_others(
    dsbd: Dsbd, folders: tuple[str, str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails() -> str:
        raise OSError("no such file")

    monkeypatch.setattr(checkup, "cpu_name", fails)
    monkeypatch.setattr(checkup, "NVIDIA", Path(__file__))
    outcome = dsbd("doctor", "--target", folders[0])
    parts = states(outcome.out)
    assert (outcome.code, parts["machine"], parts["GPU"], parts["speed"]) == (1, "BROKEN", "BROKEN", "ok")
    assert "OSError: no such file (unexpected)" in outcome.out
    refused = dsbd("doctor", "--target", "x" * 300)
    assert refused.code == 1
    assert "cannot be used: File name too long\n" in refused.out


def test_ctrl_c_is_not_called_broken(
    dsbd: Dsbd, folders: tuple[str, str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards a library that turns the interrupt of its import into an error of its own."""

    def interrupted() -> None:
        try:
            os.kill(os.getpid(), signal.SIGINT)
        except BaseException as error:
            raise ImportError("interrupted") from error

    monkeypatch.setattr(checkup, "_gpu", interrupted)
    outcome = dsbd("doctor", "--target", folders[0])
    assert (outcome.code, "BROKEN" in outcome.out) == (130, False)
    assert outcome.err == "dsbd: stopped before there was a result\n"


def test_wrong_usage(dsbd: Dsbd) -> None:
    assert dsbd("doctor", "--dtype", "float8").code == 2
    assert dsbd("doctor", "--target", "/no/such/folder").code == 1
