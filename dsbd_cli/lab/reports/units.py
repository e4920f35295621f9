"""Seconds and bytes as text, with a unit that suits them."""

from __future__ import annotations

DASH = "–"  # what was not measured


def figure(value: float) -> str:
    """Return a number with the digits that count: 0.12, 1.23, 12.3, 1234."""
    return f"{value:.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def seconds_text(value: float) -> str:
    """Return seconds with a unit that suits them: 12.3 ms."""
    for unit, size in (("s", 1.0), ("ms", 1e-3)):
        if value >= size:
            return f"{value / size:.3g} {unit}" if value / size < 1000 else f"{value / size:.0f} {unit}"
    return f"{value * 1e6:.3g} µs"


def bytes_text(count: float | None) -> str:
    """Return bytes with a unit that suits them: 17.2 MiB; a dash for None."""
    if count is None:
        return DASH
    for unit, size in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if count >= size:
            return f"{count / size:.{0 if count >= 100 * size else 1}f} {unit}"
    return f"{count:.0f} B"
