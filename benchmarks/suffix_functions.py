"""Functions that the job `edit` of benchmarks/suffix.py shows to a model, and what it asks to change in each."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Mapping, Sequence


def summarise_requests(lines: Iterable[str], slow_ms: float = 500.0) -> dict[str, dict[str, float]]:
    """Summarise the lines of an access log by path.

    A line holds a method, a path, a status and a time in milliseconds, split by spaces.
    """
    summary: dict[str, dict[str, float]] = {}
    for number, line in enumerate(lines, start=1):
        text = line.strip()
        if not text or text.startswith("#"):
            continue
        parts = text.split()
        if len(parts) != 4:
            raise ValueError(f"line {number} has {len(parts)} fields, but must have 4")
        _, path, status, taken = parts
        path = path.split("?")[0]
        entry = summary.setdefault(path, {"count": 0, "errors": 0, "slow": 0, "total_ms": 0.0, "max_ms": 0.0})
        milliseconds = float(taken)
        entry["count"] += 1
        entry["total_ms"] += milliseconds
        entry["max_ms"] = max(entry["max_ms"], milliseconds)
        if int(status) >= 500:
            entry["errors"] += 1
        if milliseconds > slow_ms:
            entry["slow"] += 1
    for entry in summary.values():
        entry["mean_ms"] = entry["total_ms"] / entry["count"]
        entry["error_rate"] = entry["errors"] / entry["count"]
    return summary


def free_slots(meetings: Sequence[tuple[int, int]], opens: int = 540, closes: int = 1020) -> list[tuple[int, int]]:
    """Find the times of a day in which nobody has a meeting.

    Times are minutes since midnight. Meetings may overlap and come in any order.
    """
    merged: list[list[int]] = []
    for start, end in sorted(meetings):
        if end <= start:
            raise ValueError(f"meeting ends at {end}, before it starts at {start}")
        if end <= opens or start >= closes:
            continue
        first = max(start, opens)
        last = min(end, closes)
        if merged and first <= merged[-1][1]:
            merged[-1][1] = max(merged[-1][1], last)
        else:
            merged.append([first, last])
    slots: list[tuple[int, int]] = []
    cursor = opens
    for first, last in merged:
        if first - cursor >= 15:
            slots.append((cursor, first))
        cursor = last
    if closes - cursor >= 15:
        slots.append((cursor, closes))
    return slots


def format_invoice(customer: str, items: Sequence[tuple[str, int, float]], tax_rate: float = 0.19) -> str:
    """Format an invoice as text.

    Each item has a description, a quantity and the price of one piece.
    """
    width = 60
    lines = ["INVOICE".center(width), "=" * width, f"Customer: {customer}", ""]
    header = f"{'Description':<30}{'Qty':>6}{'Price':>12}{'Amount':>12}"
    lines.append(header)
    lines.append("-" * width)
    subtotal = 0.0
    for description, quantity, price in items:
        if quantity <= 0:
            raise ValueError(f"quantity of {description} must be positive")
        amount = quantity * price
        subtotal += amount
        name = description if len(description) <= 28 else description[:25] + "..."
        lines.append(f"{name:<30}{quantity:>6}{price:>12.2f}{amount:>12.2f}")
    discount = subtotal * 0.05 if subtotal > 1000 else 0.0
    tax = (subtotal - discount) * tax_rate
    total = subtotal - discount + tax
    lines.append("-" * width)
    lines.append(f"{'Subtotal':<48}{subtotal:>12.2f}")
    if discount:
        lines.append(f"{'Discount':<48}{-discount:>12.2f}")
    lines.append(f"{'Tax':<48}{tax:>12.2f}")
    lines.append(f"{'Total':<48}{total:>12.2f}")
    return "\n".join(lines)


def read_settings(text: str) -> dict[str, dict[str, object]]:
    """Read settings in sections, as in an INI file.

    Values become booleans, integers or floats where they look like them. Other values stay text.
    """
    settings: dict[str, dict[str, object]] = {"general": {}}
    section = "general"
    for number, line in enumerate(text.splitlines(), start=1):
        stripped = line.strip()
        if not stripped or stripped[0] in "#;":
            continue
        if stripped.startswith("["):
            if not stripped.endswith("]"):
                raise ValueError(f"line {number}: section is not closed")
            section = stripped[1:-1].strip().lower()
            settings.setdefault(section, {})
            continue
        key, separator, raw = stripped.partition("=")
        if not separator:
            raise ValueError(f"line {number}: expected key = value")
        key, raw = key.strip(), raw.strip()
        value: object = raw
        if raw.lower() in ("true", "yes", "on"):
            value = True
        elif raw.lower() in ("false", "no", "off"):
            value = False
        else:
            for convert in (int, float):
                try:
                    value = convert(raw)
                    break
                except ValueError:
                    continue
        settings[section][key] = value
    return settings


def edit_script(source: str, target: str) -> tuple[int, list[str]]:
    """Compute the edit distance of two texts and the edits that turn one into the other."""
    rows, columns = len(source) + 1, len(target) + 1
    table = [[0] * columns for _ in range(rows)]
    for row in range(rows):
        table[row][0] = row
    for column in range(columns):
        table[0][column] = column
    for row in range(1, rows):
        for column in range(1, columns):
            cost = 0 if source[row - 1] == target[column - 1] else 1
            table[row][column] = min(
                table[row - 1][column] + 1,
                table[row][column - 1] + 1,
                table[row - 1][column - 1] + cost,
            )
    script: list[str] = []
    row, column = rows - 1, columns - 1
    while row > 0 or column > 0:
        if row > 0 and column > 0 and source[row - 1] == target[column - 1]:
            row, column = row - 1, column - 1
        elif row > 0 and column > 0 and table[row][column] == table[row - 1][column - 1] + 1:
            script.append(f"replace {source[row - 1]} at {row - 1} by {target[column - 1]}")
            row, column = row - 1, column - 1
        elif row > 0 and table[row][column] == table[row - 1][column] + 1:
            script.append(f"delete {source[row - 1]} at {row - 1}")
            row -= 1
        else:
            script.append(f"insert {target[column - 1]} at {row}")
            column -= 1
    script.reverse()
    return table[-1][-1], script


def wrap_paragraphs(text: str, width: int = 72) -> str:
    """Wrap paragraphs to a width.

    Empty lines split paragraphs. Lines that begin with four spaces are code and stay as they are.
    """
    wrapped: list[str] = []
    words: list[str] = []
    length = 0

    def flush() -> None:
        nonlocal length
        if words:
            wrapped.append(" ".join(words))
            words.clear()
        length = 0

    for line in text.splitlines():
        if line.startswith("    "):
            flush()
            wrapped.append(line.rstrip())
            continue
        if not line.strip():
            flush()
            if wrapped and wrapped[-1]:
                wrapped.append("")
            continue
        for word in line.split():
            needed = len(word) + (1 if words else 0)
            if length + needed > width:
                flush()
                needed = len(word)
            words.append(word)
            length += needed
    flush()
    while wrapped and not wrapped[-1]:
        wrapped.pop()
    return "\n".join(wrapped)


def cheapest_route(roads: Mapping[str, Mapping[str, float]], start: str, goal: str) -> tuple[float, list[str]]:
    """Find the cheapest route between two places.

    The roads of a place lead to other places, each at a cost. Raises KeyError where a place is unknown.
    """
    for place in (start, goal):
        if place not in roads:
            raise KeyError(f"unknown place {place}")
    best = {start: 0.0}
    previous: dict[str, str] = {}
    queue = [(0.0, start)]
    visited: set[str] = set()
    while queue:
        cost, place = heapq.heappop(queue)
        if place in visited:
            continue
        visited.add(place)
        if place == goal:
            break
        for neighbour, length in roads[place].items():
            if length < 0:
                raise ValueError(f"road from {place} to {neighbour} has a negative cost")
            candidate = cost + length
            if candidate < best.get(neighbour, float("inf")):
                best[neighbour] = candidate
                previous[neighbour] = place
                heapq.heappush(queue, (candidate, neighbour))
    if goal not in visited:
        return float("inf"), []
    route = [goal]
    while route[-1] != start:
        route.append(previous[route[-1]])
    route.reverse()
    return best[goal], route


def group_report(rows: Sequence[Mapping[str, str]], group_by: str, value: str) -> str:
    """Make a table of count, sum, mean and range of one column for each group of rows.

    Rows without a number in that column count as missing.
    """
    groups: dict[str, list[float]] = {}
    missing: dict[str, int] = {}
    for row in rows:
        name = row.get(group_by, "").strip() or "(none)"
        raw = row.get(value, "").strip().replace(",", "")
        numbers = groups.setdefault(name, [])
        try:
            numbers.append(float(raw))
        except ValueError:
            missing[name] = missing.get(name, 0) + 1
    header = ["group", "count", "missing", "sum", "mean", "min", "max"]
    lines = [header]
    for name in sorted(groups):
        numbers = groups[name]
        count = len(numbers)
        skipped = missing.get(name, 0)
        if count == 0:
            lines.append([name, "0", str(skipped), "-", "-", "-", "-"])
            continue
        total = sum(numbers)
        mean = total / count
        cells = [f"{total:.2f}", f"{mean:.2f}", f"{min(numbers):.2f}", f"{max(numbers):.2f}"]
        lines.append([name, str(count), str(skipped), *cells])
    widths = [max(len(line[column]) for line in lines) for column in range(len(header))]
    padded = [[cell.rjust(width) for cell, width in zip(line, widths, strict=True)] for line in lines]
    return "\n".join("  ".join(line) for line in padded)


EDITS: dict[Callable[..., object], tuple[str, str, str]] = {
    summarise_requests: (
        "Rename the variable `entry` to `record` everywhere.",
        "Add a parameter `separator: str | None = None`, and split each line at it.",
        "Change the default of `slow_ms` from 500.0 to 250.0.",
    ),
    free_slots: (
        "Add a parameter `shortest: int = 15`, and use it in place of the constant 15.",
        "Rename the variable `cursor` to `position` everywhere.",
        "Change the default of `closes` from 1020 to 1080.",
    ),
    format_invoice: (
        "Change the discount from 5 % to 8 %, for subtotals over 2000.",
        "Add a parameter `currency: str`, and write it behind the total.",
        "Rename the variable `amount` to `line_total` everywhere.",
    ),
    read_settings: (
        "Rename the variable `stripped` to `content` everywhere.",
        "Add a parameter `default_section: str = \"general\"`, and use it in place of the constant.",
        "Let lines that begin with `//` be comments too.",
    ),
    edit_script: (
        "Add a parameter `replace_cost: int = 1`, and use it as the cost of a replacement.",
        "Rename the variable `table` to `distances` everywhere.",
        "Return the number of edits as a third value.",
    ),
    wrap_paragraphs: (
        "Change the default width from 72 to 100.",
        "Rename the variable `needed` to `room` everywhere.",
        "Add a parameter `indent: str = \"\"`, and put it in front of every wrapped line.",
    ),
    cheapest_route: (
        "Rename the variable `candidate` to `new_cost` everywhere.",
        "Add a parameter `most: float = float(\"inf\")`, and skip routes that cost more.",
        "Raise a ValueError in place of returning an infinite cost.",
    ),
    group_report: (
        "Add a parameter `digits: int = 2`, and use it for all numbers.",
        "Rename the variable `skipped` to `absent` everywhere.",
        "Change the label of groups without a name from (none) to (unknown).",
    ),
}  # fmt: skip
