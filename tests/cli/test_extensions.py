"""A rule, a drafter and an output format of another package, each one file and one entry point, used from the command
line."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from dsbd_cli.errors import UsageError
from dsbd_cli.variants import DRAFTERS, Drafter, Format, Setting, register

RULE = '''
"""Coupled draws whose drafts are never taken: every layer stops at once."""

import dataclasses

import torch

from dsbd_cli import variants
from dsbd_cli.engine.verify.coupled import Coupled


class Stern(Coupled):
    def verify(self, view):
        draws = super().verify(view)
        return dataclasses.replace(
            draws,
            passed=torch.zeros_like(draws.passed),
            node=torch.full_like(draws.node, -1),
            accepted=torch.zeros_like(draws.accepted),
        )


OFFER = variants.Rule(name="stern", make="extension:Stern", text="takes no draft", exactness="same-text", cold=True)
'''

DRAFTER = '''
"""Drafts one token over and over."""

import torch

from dsbd_cli import variants
from dsbd_cli.engine.drafting.paths import PathDrafter, Paths

TOKEN = variants.Setting(field="echo_token", name="token", kind=int, default=3, text="what is drafted")
OFFER = variants.Drafter(name="echo", make="extension:make", text="one token over and over", settings=(TOKEN,))


class Echo:
    def __init__(self, token):
        self.token = token

    def paths(self, context):
        rows, beams = context.beams.token.shape
        root = torch.arange(beams).expand(rows, -1)
        valid = context.beams.valid
        tokens = torch.full((rows, beams, context.depth), self.token)
        return Paths(root, tokens, torch.where(valid, context.depth, 0), valid.to(torch.float32))


def make(of):
    return PathDrafter(Echo(of.method.value(TOKEN)))
'''

FORMAT = '''
"""id and text with a tab between them."""

from dsbd_cli import variants
from dsbd_cli.job.records.output import row_error

OFFER = variants.Format(name="tsv", make="extension:tsv", text="id, tab, text")


def tsv(row, result, method):
    text = "" if row_error(row, result) else result.hypotheses[0].text
    return f"{row.id}\\t{text}".encode()
'''

ROWS = '{"prompt": "question: what did Kivel paint\\nanswer:", "id": "a"}\n{"prompt": "sql:", "id": "b"}\n'
PLAIN = ("--target", "builtin:target", "--max-new-tokens", "6", "--quiet")


def install(folder: Path, code: str) -> dict[str, str]:
    """A package of one file with one entry point; the environment of a process that finds it."""
    (folder / "extension.py").write_text(code, encoding="utf-8")
    info = folder / "dsbd_extension-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: dsbd-extension\nVersion: 1.0\n", encoding="utf-8")
    (info / "entry_points.txt").write_text("[dsbd]\noffer = extension:OFFER\n", encoding="utf-8")
    paths = [str(folder), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}


def dsbd(environment: dict[str, str], *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "dsbd_cli", *arguments],
        input=ROWS,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )


def texts(done: subprocess.CompletedProcess[str]) -> list[str]:
    assert done.returncode == 0, done.stderr
    return [json.loads(line)["text"] for line in done.stdout.splitlines()]


def test_a_rule_of_another_package(tmp_path: Path) -> None:
    environment = install(tmp_path, RULE)
    coupled = texts(dsbd(environment, "generate", *PLAIN, "--draft", "none"))
    done = dsbd(environment, "generate", *PLAIN, "--draft", "builtin:draft", "--verify", "stern", "--depth", "2")
    assert texts(done) == coupled
    records = [json.loads(line) for line in done.stdout.splitlines()]
    assert all(one["method"]["rule"] == "stern" and one["stats"]["accepted"] == 0 for one in records)
    assert all(one["stats"]["drafted"] > 0 for one in records)


def test_a_drafter_of_another_package_with_a_setting_of_its_own(tmp_path: Path) -> None:
    environment = install(tmp_path, DRAFTER)
    plain = texts(dsbd(environment, "generate", *PLAIN, "--draft", "none"))
    done = dsbd(environment, "generate", *PLAIN, "--drafter", "echo:5", "--depth", "2")
    assert texts(done) == plain
    method = json.loads(done.stdout.splitlines()[0])["method"]
    assert (method["drafter"], method["echo_token"]) == ("echo", 5)
    page = dsbd(environment, "generate", "--help")
    assert "one token over and over" in " ".join(page.stdout.split())
    wrong = dsbd(environment, "generate", *PLAIN, "--drafter", "echo:five")
    assert (wrong.returncode, wrong.stdout) == (2, "")
    assert "token is 'five', but must be an integer" in wrong.stderr


def test_an_output_format_of_another_package(tmp_path: Path) -> None:
    done = dsbd(install(tmp_path, FORMAT), "generate", *PLAIN, "--draft", "none", "--output-format", "tsv")
    assert done.returncode == 0, done.stderr
    assert [line.split("\t")[0] for line in done.stdout.splitlines()] == ["a", "b"]
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    again = dsbd(environment, "generate", "--output-format", "tsv", "--output", "x", "--existing", "resume")
    assert again.returncode == 2
    assert "cannot go on with --output-format tsv" in again.stderr


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        ("raise RuntimeError('no such library')", "no such library"),
        ("OFFER = 3", "is no Rule, Drafter or Format"),
        (DRAFTER.replace('name="echo"', 'name="ngram"'), "there is a drafter ngram already"),
        (DRAFTER.replace('field="echo_token"', 'field="min_width"'), "the field 'min_width' is taken"),
    ],
)
def test_an_extension_that_cannot_be_used_is_named(code: str, reason: str, tmp_path: Path) -> None:
    done = dsbd(install(tmp_path, code), "--version")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.count("\n") == 1
    assert "extension offer of dsbd-extension 1.0 cannot be used" in done.stderr
    assert reason in done.stderr


def test_code_that_is_not_there_is_told_before_models_are_loaded(tmp_path: Path) -> None:
    done = dsbd(
        install(tmp_path, FORMAT.replace("extension:tsv", "extension:csv")), "generate", "--output-format", "tsv"
    )
    assert done.returncode == 2
    assert "tsv cannot be used: extension:csv is not there" in done.stderr


def test_a_name_that_cannot_be_spelled_is_refused() -> None:
    with pytest.raises(UsageError, match="lower-case"):
        register(Format(name="My Format", make="x:y", text=""))
    with pytest.raises(UsageError, match="no identifier"):
        register(Drafter(name="new", text="", settings=(Setting(field="a b", name="a", kind=int, default=1, text=""),)))
    assert "new" not in DRAFTERS
