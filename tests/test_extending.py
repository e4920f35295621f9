"""Examples of docs/extending.md: files, entry points, scripts and commands of the page, run as they stand there.

A block of Python that begins with the comment of a file's name is that file. A file of the repository's own is run in
the module that it names, as if its lines stood there. A block without a name is a script. All run in one process, which
imports torch once.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SECTIONS = ("Add a rule", "Add a drafter", "Add an output format", "Add a model family", "Add a kernel")
FENCED = re.compile(r"^( *)```(python|toml)\n(.*?)^\1```$", re.MULTILINE | re.DOTALL)
NAMED = re.compile(r"# (\S+\.py)\n")
COMMAND = re.compile(r"^ {8}dsbd (generate .+)$", re.MULTILINE)
CHILD = """
import importlib, json, shlex, sys, traceback

from dsbd_cli.__main__ import main


def run(kind, code):
    if kind == "command":
        sys.argv = ["dsbd", *shlex.split(code)]
        try:
            main()
        except SystemExit as ended:
            assert not ended.code, ended
    else:
        scope = {"__name__": "example"} if kind == "script" else vars(importlib.import_module(kind))
        exec(compile(code, kind, "exec"), scope)


faults = {}
for section, steps in json.load(sys.stdin).items():
    try:
        for kind, code in steps:
            run(kind, code)
    except BaseException:
        faults[section] = traceback.format_exc()
with open("faults.json", "w") as stream:
    json.dump(faults, stream)
"""


def sections() -> dict[str, str]:
    """The page's sections of the second level, by heading."""
    page = (ROOT / "docs" / "extending.md").read_text(encoding="utf-8")
    _, *parts = re.split(r"^## ", page, flags=re.MULTILINE)
    return {heading: text for heading, _, text in (section.partition("\n") for section in parts)}


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, str], str]:
    """Tracebacks of the sections that failed, and what all printed."""
    folder = tmp_path_factory.mktemp("extending")
    (folder / "sample_inputs").symlink_to(ROOT / "sample_inputs")
    steps: dict[str, list[tuple[str, str]]] = {}
    for heading, text in sections().items():
        for _, language, block in FENCED.findall(text):
            code = textwrap.dedent(block)
            if language == "toml":
                info = folder / "dsbd_example-1.0.dist-info"
                info.mkdir()
                (info / "METADATA").write_text("Metadata-Version: 2.1\nName: dsbd-example\nVersion: 1.0\n")
                points = code.replace("[project.entry-points.dsbd]", "[dsbd]").replace('"', "")
                (info / "entry_points.txt").write_text(points)
            elif (named := NAMED.match(code)) is None:
                steps.setdefault(heading, []).append(("script", code))
            elif "/" in named[1]:
                module = named[1].removesuffix(".py").replace("/", ".")
                steps.setdefault(heading, []).append((module, code))
            else:
                (folder / named[1]).write_text(code)
        steps.setdefault(heading, []).extend(("command", command) for command in COMMAND.findall(text))
    done = subprocess.run(
        [sys.executable, "-c", CHILD],
        input=json.dumps(steps),
        cwd=folder,
        env={**os.environ, "PYTHONPATH": os.pathsep.join((str(folder), str(ROOT)))},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads((folder / "faults.json").read_text()), done.stdout


@pytest.mark.parametrize("section", SECTIONS)
def test_the_example_of_a_section_runs(section: str, ran: tuple[dict[str, str], str]) -> None:
    assert section not in ran[0], ran[0][section]


def test_no_other_section_fails(ran: tuple[dict[str, str], str]) -> None:
    assert ran[0].keys() <= set(SECTIONS)


def test_the_format_writes_its_lines(ran: tuple[dict[str, str], str]) -> None:
    """Guards an example that runs and writes native records."""
    lines = [line for line in ran[1].splitlines() if line.startswith("sql-test-0-0\t")]
    assert len(lines) == 1
    assert "SELECT" in lines[0]


def test_every_section_has_an_example() -> None:
    """Guards a section that is renamed, or loses its blocks."""
    texts = sections()
    assert set(SECTIONS) <= texts.keys()
    assert all("```python" in texts[section] for section in SECTIONS)
