"""The grammar that options name, read and checked before any model is loaded."""

from __future__ import annotations

from pathlib import Path

from dsbd_cli.errors import UsageError, option_name
from dsbd_cli.grammars import Grammar
from dsbd_cli.job.cli.options import AnswerOptions

__all__ = ["chosen_grammar"]


def chosen_grammar(given: AnswerOptions) -> Grammar | None:
    """The grammar that the options name. Raises UsageError where it cannot be read or cannot be followed."""
    named = [name for name in ("allow", "json_schema", "regex", "grammar") if getattr(given, name) is not None]
    options = [option_name(name) for name in named]
    if len(named) > 1:
        raise UsageError(f"{' and '.join(options)} cannot be used together: give one of them")
    if named in ([], ["allow"]):
        return None
    if given.regex is not None:
        place, grammar = f"--regex {given.regex}", Grammar.regex(given.regex)
    else:
        path = given.json_schema or given.grammar
        assert path is not None
        place, text = f"{options[0]} {path}", _text(options[0], path)
        grammar = Grammar.json_schema(text) if given.json_schema is not None else Grammar.lark(text)
    try:
        grammar.source()
    except UsageError as error:
        raise UsageError(f"{place} cannot be used: {error}") from None
    return grammar


def _text(option: str, path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8-sig")
    except OSError as error:
        raise UsageError(f"{option} {path} cannot be read: {error.strerror or error}") from None
    except UnicodeDecodeError:
        raise UsageError(f"{option} {path} cannot be read: it is not UTF-8") from None
