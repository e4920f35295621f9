"""Pages of people: every relative link leads somewhere, and the picture is that of its trace."""

from __future__ import annotations

import json
import re
import runpy
from pathlib import Path
from xml.etree import ElementTree

import pytest

ROOT = Path(__file__).parents[1]
LINK = re.compile(r"\]\(([^)\s]+)\)")
HEADING = re.compile(r"^#+ (.+)$", re.MULTILINE)
PAGES = [ROOT / "README.md", ROOT / "CHANGELOG.md"]
PAGES += sorted(
    path for folder in ("docs", "benchmarks", "sample_inputs", "training") for path in (ROOT / folder).glob("*.md")
)


def anchors(page: Path) -> set[str]:
    """Names of the headings, as GitHub makes them: lower case, spaces as hyphens, without punctuation."""
    headings = HEADING.findall(page.read_text(encoding="utf-8"))
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def dead_links(page: Path) -> list[str]:
    """Relative links of a page whose file or heading is not there."""
    dead = []
    for link in LINK.findall(page.read_text(encoding="utf-8")):
        name, _, anchor = link.partition("#")
        if re.match(r"[a-z]+:", link):
            continue
        target = page.parent / name if name else page
        if not target.exists() or (anchor and anchor not in anchors(target)):
            dead.append(link)
    return dead


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_relative_links_lead_somewhere(page: Path) -> None:
    assert dead_links(page) == []


def test_a_dead_link_is_found(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("# Of it\n\n[a](page.md) [b](#of-it) [c](https://x.y/z) [d](gone.md) [e](page.md#gone)\n")
    assert dead_links(page) == ["gone.md", "page.md#gone"]


def test_the_picture_is_that_of_its_trace() -> None:
    """Guards a picture that was changed by hand, or is not drawn anew. The statistics and the forest, which were kept
    apart, tell the same of every layer."""
    script = runpy.run_path(str(ROOT / "docs" / "site" / "iteration_picture.py"))
    for path, text in script["pictures"]().items():
        assert path.read_text(encoding="utf-8") == text, "run make docs"
        assert len(text) < 200_000
        ElementTree.fromstring(text)
        assert ("animation:" in text) == (path.name == "iteration.svg")
    traced = json.loads(script["TRACE"].read_text(encoding="utf-8"))
    step, nodes = traced["step"], traced["forest"]["nodes"]
    for layer in step["layers"]:
        states = [node["state"] for node in nodes if node["layer"] == layer["layer"]]
        drafted = [state for state in states if state not in ("completed", "finished")]
        assert (len(drafted), states.count("accepted")) == (layer["drafted"], layer["accepted"])
        assert ("completed" in states) != layer["passed"]
    assert step["steps"] == traced["forest"]["verified"] == step["passed_layers"] + 1
    assert step["nodes"] == sum(node["state"] != "completed" for node in nodes)
