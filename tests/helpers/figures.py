"""Measured figures of a page, and whether a report that is linked beside each holds it.

A *figure* is a number before a unit, or `n of n`. So is every number with decimals in prose that links a report, and in
a table but for its first column; there also every number below a header or behind a label with a unit. Code is skipped.

*Beside* is the same paragraph, list item or table row. A row without a link takes those of the paragraph above its
table. Links count that lead to a file below benchmarks/results, or to a section of benchmarks/README.md or LOG.md.
A figure is *held* where a linked text has its number, or one that is rounded to it. Of `n of n` the text may have the
sum of a column, and of a ratio two numbers that are held and stand beside it.
Left out are paragraphs and tables that say `arithmetic`, and on benchmarks/README.md those that say `in git`.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator
from itertools import permutations
from pathlib import Path

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
RATIO = r"x\b(?! ?\d)|times\b"
UNIT = rf"(?<![\w'])(?:tokens/s|rows/s|seconds|minutes|s|ms|us|[KMG]i?B|steps\s+per\s+call)\b|%(?! int)|{RATIO}"
START, PLAIN = r"(?<![\w.,/-])", r"-?\d+(?:,\d{3})*(?:\.\d+)?"
BETWEEN = r",\s+|\s+(?:and|to|or)\s+|(?<=\d)[-–]"
FIGURE = re.compile(rf"{START}((?:{PLAIN}(?:{BETWEEN}))*{PLAIN})\s*((?<=\d)(?:{RATIO})|{UNIT})")
COUNT = re.compile(rf"(?<!first ){START}({PLAIN}) of ({PLAIN})(?!\d| layers)")
NUMBER = re.compile(rf"{START}{PLAIN}(?!\.?\d|[A-Za-wyz])")
BLOCK = re.compile(r"^(?:[|#].*|(?:- |\d+\. )?\S.*(?:\n(?![|#]|- |\d+\. ) *\S.*)*)", re.MULTILINE)


def plain(text: str) -> str:
    """Return a page without code, comments and targets of links, line by line as it was."""
    for skipped in (r"<!--.*?-->|^```.*?^```$|^ {4}[^\n]*|`[^`\n]*(?:\n[^`\n]+)?`", r"(?<=\])\([^)\s]+\)"):
        text = re.sub(skipped, lambda match: "\n" * match[0].count("\n"), text, flags=re.DOTALL | re.MULTILINE)
    return text


def blocks(page: Path) -> Iterator[tuple[int, str, list[str], list[str], str]]:
    """Yield line, text and links of paragraphs, list items and rows; of a row also its header and the text above."""
    written = page.read_text(encoding="utf-8")
    text, lines, links, intro, header = plain(written), written.splitlines(), list[str](), "", list[str]()
    for match in BLOCK.finditer(text):
        line = text.count("\n", 0, match.start()) + 1
        own = re.findall(r"\]\(([^)\s]+)\)", "\n".join(lines[line - 1 : line + match[0].count("\n")]))
        if not match[0].startswith("|"):
            links, intro, header = own, match[0], []
            yield line, match[0], own, [], ""
        elif header:
            yield line, match[0], own or links, header, intro
        else:
            header = match[0].split("|")[1:-1]


def figures(line: int, text: str, header: list[str]) -> Iterator[tuple[int, str, str]]:
    """Yield line, number and unit of each figure."""
    cells = text.split("|")[1:-1] if header else [text]
    for column, cell in enumerate(cells):
        named = re.search(UNIT, f"{header[column]} {cells[0]}") if column else None
        if named and not COUNT.search(cell):
            yield from ((line, number[0], named[0]) for number in NUMBER.finditer(cell))
            continue
        for match in FIGURE.finditer(cell):
            at = line + cell.count("\n", 0, match.start())
            yield from ((at, number, match[2]) for number in re.split(BETWEEN, match[1]))
        for match in COUNT.finditer(cell):
            yield line + cell.count("\n", 0, match.start()), match[1], f"of {match[2]}"
        rest = FIGURE.sub(lambda match: "\n" * match[0].count("\n"), cell) if column or not header else ""
        for match in NUMBER.finditer(rest):
            if "." in match[0]:
                yield line + rest.count("\n", 0, match.start()), match[0], ""


def linked(page: Path, link: str) -> str:
    """Return the text of a link that counts, else nothing."""
    name, _, anchor = link.partition("#")
    path = (page.parent / name).resolve() if name else page
    if path.is_relative_to(BENCHMARKS / "results") and path.suffix in (".md", ".jsonl"):
        return plain(path.read_text(encoding="utf-8"))
    sections = path.read_text(encoding="utf-8") if path in (BENCHMARKS / "README.md", BENCHMARKS / "LOG.md") else ""
    for section in re.split(r"^(?=#+ )", sections, flags=re.MULTILINE):
        title = re.sub(r"[^\w\- ]", "", section.partition("\n")[0].lstrip("# ").lower())
        if anchor and title.replace(" ", "-") == anchor:
            return plain(section)
    return ""


def span(number: str) -> tuple[float, float]:
    """Return between what a number lies that is rounded to this one."""
    value, half = float(number.replace(",", "")), 0.5 * 10 ** -len(number.partition(".")[2]) + 1e-9
    return value - half, value + half


def counts(text: str) -> set[str]:
    """Return all `n of m`, and the sums of their columns."""
    lines = [(line, re.findall(r"(\d+) of (\d+)", line)) for line in text.splitlines()]
    columns = zip(*[pairs for line, pairs in lines if line.startswith("|") and pairs], strict=False)
    sums = [(sum(int(n) for n, _ in column), sum(int(m) for _, m in column)) for column in columns]
    return {f"{n} of {m}" for n, m in (*sums, *(pair for _, pairs in lines for pair in pairs))}


def faults(page: Path, unmeasured: Collection[str] = ()) -> Iterator[str]:
    """Yield line and figure of what no linked report holds. unmeasured: figures that are no measurements."""
    left_out = ("arithmetic", "in git") if page == BENCHMARKS / "README.md" else ("arithmetic",)
    for first, text, links, header, intro in blocks(page):
        if any(word in " ".join(f"{intro} {text}".lower().split()) for word in left_out):
            continue
        texts = [linked_text for link in links if (linked_text := linked(page, link))]
        values = [float(number[0].replace(",", "")) for text in texts for number in NUMBER.finditer(text)]
        counted = {pair for text in texts for pair in counts(text)}
        spans = {number: span(number) for _, number, _ in figures(first, text, header)}
        held = [number for number, (low, high) in spans.items() if any(low <= value <= high for value in values)]
        pairs = [(spans[a], spans[b]) for a, b in permutations(held, 2) if spans[b][0] > 0]
        for line, number, unit in figures(first, text, header):
            figure, (low, high) = " ".join(f"{number} {unit}".split()), spans[number]
            measured = figure.replace(",", "") in counted if unit.startswith("of ") else number in held
            if re.fullmatch(RATIO, unit):
                measured = measured or any(a[0] / b[1] <= high and low <= a[1] / b[0] for a, b in pairs)
            if not measured and figure not in unmeasured and (unit or texts or header):
                yield f"{page.name}:{line}: {figure} is in no report that is linked beside it ({len(texts)} are)"
