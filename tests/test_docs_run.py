"""Blocks of the pages that are marked as runnable run, in order, with a small checkpoint in the place of a real one.

`<!-- run -->` before a block: it is run by bash (by Python where the block says so), and fails if a command in it
fails. `<!-- file: NAME -->`: it is the content of a file that later blocks use. Blocks of one page share a folder, in
which `sample_inputs` is that of the repository and MODEL is a checkpoint. `jq` is that of the package on PyPI.
"""

from __future__ import annotations

import csv
import json
import os
import re
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import pyarrow.parquet
import pytest

import dsbd_cli.models

ROOT = Path(__file__).parents[1]
MODEL = "smol"  # as the pages name their own checkpoint
TEMPLATE = "{% for message in messages %}{{ message.content }}\nsql:{% endfor %}"
BLOCK = re.compile(
    r"^<!-- (?:run|file: (?P<name>[\w.]+)) -->\n\n"
    r"(?:```(?P<language>\w*)\n(?P<fenced>(?:(?!```).*\n)+)```$|(?P<indented>(?:(?: {4}.*)?\n)+))",
    re.MULTILINE,
)
MARKED = re.compile(r"^\s*<!-- *(?:run|file)\b", re.MULTILINE)
PAGES = [
    path for path in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))) if MARKED.search(path.read_text())
]


def blocks(text: str) -> list[tuple[str | None, str]]:
    """The marked blocks of a page: the name of a file, or None of commands, and the text."""
    return [(match["name"], _commands(match)) for match in BLOCK.finditer(text)]


def _commands(match: re.Match[str]) -> str:
    text = match["fenced"] or textwrap.dedent(match["indented"]).strip() + "\n"
    return f"python - << 'END'\n{text}END\n" if match["language"] == "python" and not match["name"] else text


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Where a page's commands run."""
    (tmp_path / "sample_inputs").symlink_to(ROOT / "sample_inputs")
    builtin = Path(dsbd_cli.models.__file__).parent / "builtin" / "target"
    shutil.copytree(builtin, tmp_path / MODEL)
    (tmp_path / MODEL / "chat_template.jinja").write_text(TEMPLATE)
    programs = tmp_path / "bin"
    programs.mkdir()
    for name, command in (("python", ""), ("dsbd", "-m dsbd_cli"), ("jq", "-m tests.helpers.jq")):
        (programs / name).write_text(f'#!/bin/sh\nexec "{sys.executable}" {command} "$@"\n')
        (programs / name).chmod(0o755)
    return tmp_path


def run_page(text: str, folder: Path) -> None:
    """Run the marked blocks of a page. Fails with what a block printed."""
    path = os.pathsep.join((str(folder / "bin"), os.environ["PATH"]))
    environment = {**os.environ, "PATH": path, "PYTHONPATH": str(ROOT)}
    for name, block in blocks(text):
        if name is not None:
            (folder / name).write_text(block)
            continue
        done = subprocess.run(
            ["bash", "-euo", "pipefail", "-c", block],
            cwd=folder,
            env=environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, f"{block}\nended with {done.returncode}:\n{done.stdout}{done.stderr}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_marked_blocks_run(page: Path, folder: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert len(blocks(text)) == len(MARKED.findall(text)), "a mark stands before no block"
    run_page(text, folder)


def test_the_recipes_of_tables(folder: Path) -> None:
    """The section by itself, with an engine that needs no model: what the recipes write is what they say."""
    program = folder / "bin" / "dsbd"
    program.write_text(program.read_text().replace("dsbd_cli", "tests.helpers.fake"))
    page = (ROOT / "docs" / "cookbook.md").read_text(encoding="utf-8")
    [section] = re.findall(r"^## Tables.*?(?=^## )", page, re.MULTILINE | re.DOTALL)
    run_page(section, folder)
    prompts = [json.loads(line) for line in (ROOT / "sample_inputs" / "prompts.jsonl").read_text().splitlines()]
    best = {(row["id"], row["prompt"], f"{row['prompt']}!0") for row in prompts}

    def rows(name: str) -> list[list[str]]:
        with (folder / name).open(newline="", encoding="utf-8") as stream:
            return list(csv.reader(stream))

    lengths = [[row["id"], str(rank), "3", f"{row['prompt']}!{rank - 1}"] for row in prompts for rank in (1, 2)]
    assert rows("lengths.csv") == lengths
    assert [json.loads(line)["id"] for line in (folder / "rows.jsonl").read_text().splitlines()] == [1, 2]
    assert rows("prompts.csv") == [["id", "prompt"], *[list(row.values()) for row in prompts]]
    assert {tuple(row) for row in rows("joined.csv")} == best | {("id", "prompt", "text")}
    joined = pyarrow.parquet.read_table(folder / "joined.parquet").to_pylist()
    assert {(row["id"], row["prompt"], row["text"]) for row in joined} == best
    assert {row["score"] for row in joined} == {-1.25 / 3}
    assert (folder / "failed.csv").read_text() == "id,error\n"


def test_a_block_that_fails_is_found(folder: Path) -> None:
    page = "<!-- file: a.txt -->\n\n```text\nx\n```\n\n<!-- run -->\n\n    grep -q x a.txt\n{}\n\nText.\n\n    exit 9\n"
    run_page(page.format(""), folder)
    for broken in ("    false | cat", "    grep -q y a.txt\n    true"):
        with pytest.raises(AssertionError, match="ended with 1"):
            run_page(page.format(broken), folder)
