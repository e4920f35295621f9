"""Words that go with numbers."""

from __future__ import annotations

__all__ = ["plural"]


def plural(count: object, name: str) -> str:
    """1 record, 2 records."""
    return f"{count} {name}" if count == 1 else f"{count} {name}s"
