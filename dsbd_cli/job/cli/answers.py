"""What --allow names: a list of answers, or a grammar, which is read and checked before any model is loaded."""

from __future__ import annotations

from pathlib import Path

from dsbd_cli.errors import UsageError
from dsbd_cli.grammars import Grammar

__all__ = ["allowed"]

REGEX = "regex:"


def allowed(given: str | None) -> tuple[Path | None, Grammar | None]:
    """The file of a list of answers, or a grammar; at most one of both. Raises UsageError where it cannot be read or
    cannot be followed."""
    if given is None:
        return None, None
    if given.startswith(REGEX):
        grammar = Grammar.regex(given.removeprefix(REGEX))
    elif given.endswith(".json"):
        grammar = Grammar.json_schema(_text(given))
    elif given.endswith(".lark"):
        grammar = Grammar.lark(_text(given))
    else:
        if not Path(given).is_file():
            raise UsageError(f"--allow {given} is no file")
        return Path(given), None
    try:
        grammar.source()
    except UsageError as error:
        raise UsageError(f"--allow {given} cannot be used: {error}") from None
    return None, grammar


def _text(given: str) -> str:
    try:
        return Path(given).read_text(encoding="utf-8-sig")
    except OSError as error:
        raise UsageError(f"--allow {given} cannot be read: {error.strerror or error}") from None
    except UnicodeDecodeError:
        raise UsageError(f"--allow {given} cannot be read: it is not UTF-8") from None
