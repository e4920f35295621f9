"""Every measured figure of README, docs and benchmarks/README.md stands in a report that is linked beside it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from benchmarks import gpu_arithmetic
from tests.helpers.figures import BENCHMARKS, faults

ROOT = Path(__file__).parents[1]
# docs/cli.md is made from the options: its figures are settings
PAGES = [
    ROOT / "README.md",
    *(page for page in sorted((ROOT / "docs").glob("*.md")) if page.name != "cli.md"),
    BENCHMARKS / "README.md",
]
UNMEASURED = {
    "docs/algorithm.md": ["13 of 11", "0.08"],  # beams and answers of an example; what tests/exact finds
    "docs/architecture.md": ["1 %"],  # what the planner spends
    "docs/beams-and-drafts.md": ["1 %", "256 MiB"],  # settings
    "docs/constraints.md": ["3 s", "2 GiB", "30 s"],  # limits of a child process
    "docs/index.md": ["3 GB"],  # memory to have
    "docs/models.md": ["30 seconds", "256 MiB", "4 GiB", "1 GB", "0.8 GB"],  # limits
    "docs/pick.md": ["1 GiB", "256 MiB", "64 MB", "1 MB"],  # limits of a child process
    "docs/scale.md": ["600 seconds"],  # a setting
    "benchmarks/README.md": ["1.5 times", "2.5 times", "0.7"],  # the paper's, and its threshold
}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_figures_stand_in_linked_reports(page: Path) -> None:
    """A figure that is no measurement belongs into UNMEASURED, and leaves it when the page drops it."""
    unmeasured = UNMEASURED.get(str(page.relative_to(ROOT)), [])
    assert list(faults(page, unmeasured)) == []
    told = "\n".join(faults(page))
    assert [figure for figure in unmeasured if f": {figure} is in no report" not in told] == []


def test_each_report_is_cited_and_each_citation_exists() -> None:
    """Guards reports that nobody reads. What scripts write beside a report is ignored by git."""
    pages = [*PAGES, BENCHMARKS / "LOG.md", ROOT / "CHANGELOG.md", *(ROOT / "training").glob("*.md")]
    links = [
        (page.parent / link).resolve()
        for page in pages
        for link in re.findall(r"\]\(([^)\s#]+)", page.read_text(encoding="utf-8"))
        if "://" not in link
    ]
    cited = {link for link in links if link.is_relative_to(BENCHMARKS / "results")}
    kept = {path for path in (BENCHMARKS / "results").rglob("*.md") if path.name != "readme.md"}
    assert kept == cited


REPORT = "[report](results/2026-11-22-cpu/speech/report.md)"
SECTION = "[figures](README.md#wide-beams-constraints-encoder-decoder-2026-11-22)"


@pytest.mark.parametrize(
    ("said", "missed"),
    [
        (f"It took 9.4 s, theirs 21.79 s: 2.3 times, 8 of 8 texts {REPORT}.", []),
        (f"It took 9.4 s and 8.8 s {SECTION}, with `1.1 s` as a setting.", []),
        ("Two texts took 9.4 s.", ["1: 9.4 s"]),
        (f"It took\n8.4 and 8.77 s {REPORT}.", ["2: 8.4 s"]),
        (f"It took 9.4 s, theirs 21.8 s: 2.4 times, 8 of 9 texts {REPORT}.", ["1: 2.4 times", "1: 8 of 9"]),
        (f"- It took 9.4 s {REPORT}.\n- It took 9.4 s.", ["2: 9.4 s"]),
        (f"Beside {REPORT}:\n\n| | seconds |\n|---|---:|\n| ours | 9.42 |\n| theirs | 22 |\n| its | 23 |", ["7: 23 s"]),
        ("By arithmetic it takes 9.5 s.", []),
    ],
)
def test_a_wrong_figure_and_a_missing_link_are_found(said: str, missed: list[str], tmp_path: Path) -> None:
    """Guards a test that holds nothing. A page in another folder, with links as on benchmarks/README.md."""
    for name in ("README.md", "results"):
        (tmp_path / name).symlink_to(BENCHMARKS / name)
    page = tmp_path / "page.md"
    page.write_text(said + "\n", encoding="utf-8")
    missing = [fault.removeprefix("page.md:").partition(" is in")[0] for fault in faults(page)]
    assert len(missing) == len(missed)
    assert all(fault.startswith(other) for fault, other in zip(missing, missed, strict=True)), missing


def test_the_table_of_a_gpu_is_what_its_script_prints() -> None:
    """Guards a number that was changed by hand."""
    _, _, rest = (ROOT / "docs" / "hardware.md").read_text(encoding="utf-8").partition("<!-- gpu_arithmetic -->\n")
    assert rest.partition("<!-- end -->")[0] == gpu_arithmetic.table()
