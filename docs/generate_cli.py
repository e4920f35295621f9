"""Write docs/cli.md from the commands themselves: `python docs/generate_cli.py`, or `--check` that it is current."""

from __future__ import annotations

import sys
import textwrap
from pathlib import Path

import typer

from dsbd_cli.cli.app import app

PAGE = Path(__file__).parent / "cli.md"
SET = "what is seldom typed, may be repeated: [settings](#settings)"
MAIN = "generate"  # explains the options that it shares with other commands
HEAD = """# Command line

Made by `make docs` from the commands themselves; do not edit. Jobs and pipes: [cookbook](cookbook.md).

Every option of `dsbd generate` may also stand in a file (`--config job.toml`, by its long name with - or _) or in a
variable (`DSBD_NUM_BEAMS=6`; a switch takes 1 or 0). The command line wins over the file, the file over the
environment, the environment over the default. A value means the same wherever it stands. A switch `--x` has a `--no-x`
that takes it back. What other commands share with `generate` is explained [there](#dsbd-generate).
"""

SETTINGS = """## Settings

What is seldom typed: `--set NAME=VALUE`, as often as you like, or `NAME = VALUE` in the file of `--config`, or a
variable.
"""


def page() -> str:
    """The whole page as markdown."""
    root = typer.main.get_command(app)
    explained = {_row(option) for option in _shown(root.commands[MAIN])}
    parts = [HEAD, _section("dsbd", root, set())]
    parts += _commands("dsbd", root, explained)
    parts.append(_settings(root))
    return "\n".join(parts)


def _commands(title: str, group, explained: set[str]) -> list[str]:
    """Sections of the commands of a group, and of theirs. Only `MAIN` explains the options that are `explained`."""
    parts = []
    for name, command in sorted(group.commands.items()):
        parts.append(_section(f"{title} {name}", command, set() if name == MAIN else explained))
        parts += _commands(f"{title} {name}", command, explained) if hasattr(command, "commands") else []
    return parts


def _section(title: str, command, explained: set[str]) -> str:
    """One command: its text, a table of options per panel, then the names of those that are explained elsewhere."""
    panels: dict[str, list[str]] = {}
    shared = []
    for option in _shown(command):
        panel = "Arguments" if option.param_type_name == "argument" else option.rich_help_panel or "Options"
        row = _row(option)
        if row in explained:
            shared.append(f"`{option.opts[0]}`")
        else:
            panels.setdefault(panel, []).append(row)
    lines = [f"## {title}", "", *_paragraphs(command.help or ""), ""]
    for panel, rows in panels.items():
        kind = "argument" if panel == "Arguments" else "option"
        lines += [f"### {panel}", "", f"| {kind} | meaning |", "|---|---|", *rows, ""]
    if shared:
        lines += [*_paragraphs(f"As of [`dsbd {MAIN}`](#dsbd-{MAIN}): {', '.join(shared)}."), ""]
    return "\n".join(lines)


def _shown(command) -> list:
    """The options and arguments that `--help` lists."""
    return [one for one in command.params if not getattr(one, "hidden", False)]


def _settings(root) -> str:
    """One table of what --set takes, with the commands that take it."""
    users: dict[str, list[str]] = {}
    meaning: dict[str, tuple[str, str]] = {}
    for command_name, command in sorted(root.commands.items()):
        for option in (one for one in command.params if one.opts[0].startswith("--set ")):
            users.setdefault(option.name, []).append(command_name)
            meaning[option.name] = (option.metavar or "true or false", _cell(option.help))
    rows = [
        f"| `{name.replace('_', '-')}` | {meaning[name][0]} | {', '.join(users[name])} | {meaning[name][1]} |"
        for name in sorted(meaning)
    ]
    return "\n".join([SETTINGS, "| setting | value | commands | meaning |", "|---|---|---|---|", *rows, ""])


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n\n", "<br>")


def _row(option) -> str:
    argument = option.param_type_name == "argument"
    names = f"`{option.metavar}`" if argument else ", ".join(f"`{name}`" for name in option.opts)
    value = f" {option.metavar}" if option.metavar and not argument else ""
    help_text = SET if option.name == "set" else _cell(option.help or "")
    mark = " (required)" if option.required and not argument else ""
    return f"| {names}{value} | {help_text}{mark} |"


def _paragraphs(text: str) -> list[str]:
    lines = (textwrap.wrap(part, 120, break_long_words=False, break_on_hyphens=False) for part in text.split("\n"))
    return [line for some in lines for line in some or [""]]


def main() -> None:
    """Write the page, or with --check fail if the file differs from it."""
    text = page()
    if "--check" not in sys.argv[1:]:
        PAGE.write_text(text, encoding="utf-8")
    elif not PAGE.is_file() or PAGE.read_text(encoding="utf-8") != text:
        sys.exit("docs/cli.md is not what the commands say: run make docs")


if __name__ == "__main__":
    main()
