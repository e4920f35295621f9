"""A rule, a drafter and an output format of another package, each one file and one entry point, used from the command
line."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from dsbd_cli.config.variant import DrafterSpec, Format, Setting
from dsbd_cli.config.variants import DRAFTERS, register
from dsbd_cli.errors import UsageError

RULE = '''
"""Coupled draws whose drafts are never taken: every layer stops at once."""

import dataclasses

import torch

from dsbd_cli.config import variant
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


OFFER = variant.RuleSpec(
    name="stern", make="extension:Stern", text="takes no draft", exactness="same-text", greedy=True
)
'''

DRAFTER = '''
"""Drafts one token over and over."""

from dsbd_cli.config import variant

TOKEN = variant.Setting(field="echo_token", name="token", kind=int, default=3, text="what is drafted")
OFFER = variant.DrafterSpec(name="echo", make="extension:make", text="one token over and over", settings=(TOKEN,))
'''

ECHO = """
import torch

from dsbd_cli.engine.drafting.paths import PathDrafter, Paths


class Echo(PathDrafter):
    def __init__(self, token):
        self.token = token

    def paths(self, context):
        rows, beams = context.beams.token.shape
        root = torch.arange(beams).expand(rows, -1)
        valid = context.beams.valid
        tokens = torch.full((rows, beams, context.depth), self.token)
        return Paths(root, tokens, torch.where(valid, context.depth, 0), valid.to(torch.float32))


def make(of):
    return Echo(of.method.value(TOKEN))
"""

FORMAT = '''
"""id and text with a tab between them."""

from dsbd_cli.config import variant
from dsbd_cli.io.records.record_parts import row_error

OFFER = variant.Format(name="tsv", make="extension:tsv", text="id, tab, text")


def tsv(row, result, method):
    text = "" if row_error(row, result) else result.hypotheses[0].text
    return f"{row.id}\\t{text}".encode()
'''

ROWS = '{"prompt": "question: what did Kivel paint\\nanswer:", "id": "a"}\n{"prompt": "sql:", "id": "b"}\n'
PLAIN = ("--target", "builtin:target", "--max-new-tokens", "6", "--quiet")


SEVERAL = """
import io, json, sys
from dsbd_cli.__main__ import main

rows, commands = json.load(sys.stdin)
theirs, done = sys.stdout, []
for arguments in commands:
    sys.argv = ["dsbd", *arguments]
    sys.stdin = io.TextIOWrapper(io.BytesIO(rows.encode()), encoding="utf-8")
    streams = [io.TextIOWrapper(io.BytesIO(), encoding="utf-8", write_through=True) for _ in range(2)]
    sys.stdout, sys.stderr = streams
    try:
        main()
    except SystemExit as ended:
        done.append([arguments, ended.code, *(stream.buffer.getvalue().decode() for stream in streams)])
json.dump(done, theirs)
"""


def install(folder: Path, code: str, name: str = "extension") -> dict[str, str]:
    """A package of one file with one entry point; the environment of a process that finds it."""
    (folder / f"{name}.py").write_text(code.replace("extension:", f"{name}:"), encoding="utf-8")
    info = folder / f"dsbd_{name}-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: dsbd-{name}\nVersion: 1.0\n", encoding="utf-8")
    (info / "entry_points.txt").write_text(f"[dsbd]\noffer = {name}:OFFER\n", encoding="utf-8")
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


@pytest.fixture(scope="module")
def calls(tmp_path_factory: pytest.TempPathFactory) -> dict[str, subprocess.CompletedProcess[str]]:
    """Three packages, and what calls that use them print. One process makes all calls: it imports torch once."""
    folder = tmp_path_factory.mktemp("installed")
    for name, code in (("rule", RULE), ("drafter", DRAFTER + ECHO), ("format", FORMAT)):
        environment = install(folder, code, f"{name}_extension")
    commands = {
        "plain": ("generate", *PLAIN, "--draft", "none"),
        "rule": ("generate", *PLAIN, "--draft", "builtin:draft", "--verify", "stern", "--depth", "2"),
        "drafter": ("generate", *PLAIN, "--drafter", "echo:5", "--depth", "2"),
        "page": ("generate", "--help"),
        "wrong setting": ("generate", *PLAIN, "--drafter", "echo:five"),
        "format": ("generate", *PLAIN, "--draft", "none", "--output-format", "tsv"),
        "resumed": ("generate", "--output-format", "tsv", "--output", "x", "--existing", "resume"),
    }
    done = subprocess.run(
        [sys.executable, "-c", SEVERAL],
        input=json.dumps([ROWS, list(commands.values())]),
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    processes = [subprocess.CompletedProcess(*process) for process in json.loads(done.stdout)]
    return dict(zip(commands, processes, strict=True))


def texts(done: subprocess.CompletedProcess[str]) -> list[str]:
    assert done.returncode == 0, done.stderr
    return [json.loads(line)["text"] for line in done.stdout.splitlines()]


def test_a_rule_of_another_package(calls: dict[str, subprocess.CompletedProcess[str]]) -> None:
    done = calls["rule"]
    assert texts(done) == texts(calls["plain"])
    records = [json.loads(line) for line in done.stdout.splitlines()]
    assert all(record["method"]["rule"] == "stern" and record["stats"]["accepted"] == 0 for record in records)
    assert all(record["stats"]["drafted"] > 0 for record in records)


def test_a_drafter_of_another_package_with_a_setting_of_its_own(
    calls: dict[str, subprocess.CompletedProcess[str]],
) -> None:
    done = calls["drafter"]
    assert texts(done) == texts(calls["plain"])
    method = json.loads(done.stdout.splitlines()[0])["method"]
    assert (method["drafter"], method["echo_token"]) == ("echo", 5)
    assert "one token over and over" in " ".join(calls["page"].stdout.split())
    wrong = calls["wrong setting"]
    assert (wrong.returncode, wrong.stdout) == (2, "")
    assert "token is 'five', but must be an integer" in wrong.stderr


def test_an_output_format_of_another_package(calls: dict[str, subprocess.CompletedProcess[str]]) -> None:
    done = calls["format"]
    assert done.returncode == 0, done.stderr
    assert [line.split("\t")[0] for line in done.stdout.splitlines()] == ["a", "b"]
    again = calls["resumed"]
    assert again.returncode == 2
    assert "cannot go on with --output-format tsv" in again.stderr


def test_the_command_finds_an_extension_at_its_start(tmp_path: Path) -> None:
    page = dsbd(install(tmp_path, DRAFTER), "generate", "--help")
    assert (page.returncode, page.stderr) == (0, "")
    assert "one token over and over" in " ".join(page.stdout.split())


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        ("raise RuntimeError('no such library')", "no such library"),
        ("OFFER = 3", "is no Rule, Drafter or Format"),
        (DRAFTER.replace('name="echo"', 'name="ngram"'), "there is a drafter ngram already"),
        (DRAFTER.replace('field="echo_token"', 'field="min_width"'), "the field 'min_width' is taken"),
        (DRAFTER.replace('field="echo_token"', 'field="second_drafts"'), "the field 'second_drafts' is taken"),
        (DRAFTER.replace('field="echo_token"', 'field="quantize"'), "the field 'quantize' is taken"),
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
    assert "tsv cannot be used: extension:csv cannot be imported" in done.stderr


def test_a_name_that_cannot_be_spelled_is_refused() -> None:
    with pytest.raises(UsageError, match="lower-case"):
        register(Format(name="My Format", make="x:y", text=""))
    with pytest.raises(UsageError, match="no identifier"):
        register(
            DrafterSpec(name="new", text="", settings=(Setting(field="a b", name="a", kind=int, default=1, text=""),))
        )
    assert "new" not in DRAFTERS
