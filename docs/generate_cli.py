"""Write docs/cli.md from the commands themselves: `python docs/generate_cli.py`, or `--check` that it is current."""

from __future__ import annotations

import sys
from pathlib import Path

import typer

from dsbd_cli.cli.app import app

PAGE = Path(__file__).parent / "cli.md"
HEAD = "# Command line\n\nMade by `make docs` from the commands themselves; do not edit.\n"


def page() -> str:
    """The whole page as markdown."""
    root = typer.main.get_command(app)
    parts = [HEAD, _section("dsbd", root)]
    parts += [_section(f"dsbd {name}", command) for name, command in sorted(root.commands.items())]
    return "\n".join(parts)


def _section(title: str, command) -> str:
    """One command: its text, then a table of options per panel."""
    panels: dict[str, list[str]] = {}
    for option in command.params:
        panels.setdefault(option.rich_help_panel or "Options", []).append(_row(option))
    lines = [f"## {title}", "", *_paragraphs(command.help or ""), ""]
    for panel, rows in panels.items():
        lines += [f"### {panel}", "", "| option | meaning |", "|---|---|", *rows, ""]
    return "\n".join(lines)


def _row(option) -> str:
    names = ", ".join(f"`{name}`" for name in option.opts)
    value = f" {option.metavar}" if option.metavar else ""
    help_text = (option.help or "").replace("|", "\\|")
    return f"| {names}{value} | {help_text} |"


def _paragraphs(text: str) -> list[str]:
    return [" ".join(part.split()) if part.strip() else "" for part in text.strip().split("\n")]


def main() -> None:
    """Write the page, or with --check fail if the file differs from it."""
    text = page()
    if "--check" not in sys.argv[1:]:
        PAGE.write_text(text, encoding="utf-8")
    elif not PAGE.is_file() or PAGE.read_text(encoding="utf-8") != text:
        sys.exit("docs/cli.md is not what the commands say: run make docs")


if __name__ == "__main__":
    main()
