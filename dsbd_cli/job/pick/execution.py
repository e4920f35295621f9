"""Choosing by execution: SQL candidates run on a database that may only be read, each within a budget of time."""

from __future__ import annotations

import re
import sqlite3
from collections.abc import Mapping
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from dsbd_cli.errors import InvalidRowError, shorten
from dsbd_cli.job.pick.candidates import CandidateRow
from dsbd_cli.job.pick.choosers import Choice
from dsbd_cli.lab.tasks.execute import Rows, attempt, budget_of_time, is_ordered, same_rows
from dsbd_cli.lab.tasks.spider import open_database

__all__ = ["DEFAULT_TIMEOUT_S", "ByExecution", "Databases"]

Agree = Literal["first", "majority"]

DEFAULT_TIMEOUT_S = 30.0
MAX_ROWS = 1_000_000
FIELD = re.compile(r"\{([^{}]*)\}")


@dataclass(frozen=True, slots=True)
class Databases:
    """Which database a row is about: a path, in which `{field}` stands for a field of the row's metadata."""

    template: str

    def path(self, metadata: object) -> Path:
        """Raises InvalidRowError where the metadata lacks a field, or the file does not exist."""
        known = metadata if isinstance(metadata, Mapping) else {}

        def value(found: re.Match[str]) -> str:
            held = known.get(found[1])
            if isinstance(held, bool) or not isinstance(held, str | int) or held == "":
                raise InvalidRowError(
                    f"metadata.{found[1]} is {shorten(held)}, but --database {self.template} needs a string there"
                )
            text = str(held)
            if text in (".", "..") or "/" in text or "\\" in text or "\0" in text:
                raise InvalidRowError(f"metadata.{found[1]} is {shorten(text)}, but must be a name without folders")
            return text

        path = Path(FIELD.sub(value, self.template))
        if not path.is_file():
            raise InvalidRowError(f"the database {path} does not exist")
        return path


@dataclass(frozen=True, slots=True)
class ByExecution:
    """The first candidate that runs (the rule of CodeS), or the first of those whose results most candidates agree on.

    Where none runs, the first candidate is chosen, and the record says so.

    Attributes:
        agree: `first` or `majority`.
        timeout_s: of one candidate.
    """

    databases: Databases
    agree: Agree = "first"
    timeout_s: float = DEFAULT_TIMEOUT_S

    def choose(self, row: CandidateRow) -> Choice:
        """Raises InvalidRowError where there is no database to run on."""
        texts = [candidate.text for candidate in row.candidates]
        return _chosen_run(self.databases.path(row.metadata), texts, self.agree, self.timeout_s)


def _chosen_run(path: Path, texts: list[str], agree: Agree, timeout_s: float) -> Choice:
    """The choice among statements. Raises InvalidRowError for a file that is no database."""
    try:
        with closing(open_database(path)) as database:
            database.execute("SELECT count(*) FROM sqlite_master").fetchone()
            results: list[Rows | None] = []
            errors: list[str] = []
            for text in texts:
                rows, error = attempt(database, text.strip(), over=budget_of_time(timeout_s), max_rows=MAX_ROWS)
                results.append(rows)
                errors += [] if error is None else [error]
                if rows is not None and agree == "first":
                    break
    except sqlite3.Error as error:
        raise InvalidRowError(f"the database {path} cannot be read: {error}") from None
    ran = [place for place, rows in enumerate(results) if rows is not None]
    why = {"ran": len(ran), "failed": len(errors), **({"first_error": errors[0]} if errors else {})}
    if not ran:
        return Choice(0, why)
    if agree == "first":
        return Choice(ran[0], why)
    groups: list[list[int]] = []
    for place in ran:
        group = next((one for one in groups if _agree(results, texts, one[0], place)), None)
        if group is None:
            groups.append([place])
        else:
            group.append(place)
    most = max(groups, key=len)
    return Choice(most[0], {**why, "votes": len(most), "results": len(groups)})


def _agree(results: list[Rows | None], texts: list[str], one: int, other: int) -> bool:
    """Equal rows; their order counts where both statements order them."""
    first, second = results[one], results[other]
    assert first is not None
    assert second is not None
    return same_rows(first, second, is_ordered(texts[one]) and is_ordered(texts[other]))
