"""Pages of people: every relative link leads somewhere, and the picture is that of its trace. And what else a
contributor meets: forms and hooks."""

from __future__ import annotations

import json
import re
import runpy
from pathlib import Path
from xml.etree import ElementTree

import pytest
import yaml

ROOT = Path(__file__).parents[1]
LINK = re.compile(r"\]\(([^)\s]+)\)")
HEADING = re.compile(r"^#+ (.+)$", re.MULTILINE)
FORMS = ROOT / ".github" / "ISSUE_TEMPLATE"
PAGES = sorted(ROOT.glob("*.md"))
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


def test_issue_forms_ask_for_the_doctor() -> None:
    forms = {path.stem: yaml.safe_load(path.read_text(encoding="utf-8")) for path in FORMS.glob("*.yml")}
    assert forms.pop("config") == {"blank_issues_enabled": False}, "without a form nobody is asked"
    assert forms.keys() == {"fault", "speed", "wish"}
    for name, form in forms.items():
        asked = {field["id"]: field for field in form["body"] if field["type"] != "markdown"}
        doctor = asked["doctor"]
        assert "`dsbd doctor --json" in doctor["attributes"]["description"]
        assert doctor["attributes"]["render"] == "json"
        assert doctor.get("validations", {}).get("required", False) is (name != "wish")


def test_hooks_run_what_ci_runs() -> None:
    """Guards a change that passes here and fails there."""
    [local] = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text(encoding="utf-8"))["repos"]
    ci = [line for line in (ROOT / ".ci" / "run").read_text(encoding="utf-8").splitlines() if line.startswith("make ")]
    assert [hook["entry"] for hook in local["hooks"]] == ci
    assert all(hook["always_run"] and not hook["pass_filenames"] for hook in local["hooks"])


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


def test_the_first_table_of_readme_is_that_of_its_report() -> None:
    """The rows between the marks are those that benchmarks.evidence wrote beside the first report that is linked."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    marked = re.search(r"<!-- evidence -->\n(.+?)\n<!-- end -->", text, re.DOTALL)
    assert marked is not None
    report = re.findall(r"\]\((benchmarks/results/\S+/evidence/)report\.md\)", text)[0]
    assert marked[1].strip() == (ROOT / report / "readme.md").read_text(encoding="utf-8").strip()
