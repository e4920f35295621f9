"""Options that say what an answer must look like, shared by generate, bench and profile."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from dsbd_cli.errors import UsageError
from dsbd_cli.grammars import Grammar
from dsbd_cli.job.cli.declare import option

__all__ = ["GrammarOptions", "chosen_grammar"]

ANSWERS = "What may be answered"


@dataclass(frozen=True)
class GrammarOptions:
    """A grammar of every answer, unless the row brings a response_format. One of them at most."""

    json_schema: Annotated[
        Path | None,
        option(
            ANSWERS,
            "--json-schema",
            text="answers are JSON that is valid under the schema in this file (needs dsbd[grammar], as the next two)",
            metavar="FILE",
        ),
    ] = None
    regex: Annotated[
        str | None,
        option(ANSWERS, "--regex", text="answers match this regular expression, in Rust's syntax", metavar="TEXT"),
    ] = None
    grammar: Annotated[
        Path | None,
        option(ANSWERS, "--grammar", text="answers are derived by the Lark grammar in this file", metavar="FILE"),
    ] = None


def chosen_grammar(given: GrammarOptions) -> Grammar | None:
    """The grammar that the options name. Raises UsageError where it cannot be read or cannot be followed."""
    named = [name for name in ("json_schema", "regex", "grammar") if getattr(given, name) is not None]
    options = ["--" + name.replace("_", "-") for name in named]
    if not named:
        return None
    if len(named) > 1:
        raise UsageError(f"{' and '.join(options)} cannot be used together: give one of them")
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
