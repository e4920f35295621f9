"""The page of --help: what typer would show of a switch besides its name is left out."""

from __future__ import annotations

import typer
from typer.core import TyperCommand, TyperGroup

__all__ = ["Command", "Group"]


class _Plain:
    """Parameters as a page shows them: a switch takes no value, and its --no- form is told once, not in a column."""

    def get_params(self, ctx: typer.Context) -> list[object]:
        params: list[object] = super().get_params(ctx)  # type: ignore[misc]
        for one in params:
            if getattr(one, "is_flag", False):
                one.metavar = ""  # type: ignore[attr-defined]
        return params

    def format_help(self, ctx: typer.Context, formatter: object) -> None:
        params = self.get_params(ctx)
        negative = [getattr(one, "secondary_opts", []) for one in params]
        for one in params:
            one.secondary_opts = []  # type: ignore[attr-defined]
        try:
            super().format_help(ctx, formatter)  # type: ignore[misc]
        finally:
            for one, names in zip(params, negative, strict=True):
                one.secondary_opts = names  # type: ignore[attr-defined]


class Command(_Plain, TyperCommand):  # type: ignore[misc]
    """A command with such a page."""


class Group(_Plain, TyperGroup):  # type: ignore[misc]
    """A group of commands with such a page."""
