"""Choice by execution: SQL candidates run on a database that may only be read, in a process with limits."""

from __future__ import annotations

import glob
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from dsbd_cli.errors import InvalidRowError, UsageError, shorten
from dsbd_cli.pick.candidate_rows import CandidateRow
from dsbd_cli.pick.choosers import Choice
from dsbd_cli.pick.sandbox import SqlProcess, StatementResult, UnreadableDatabaseError, is_ordered

Otherwise = Literal["first", "error"]

DEFAULT_TIMEOUT_S = 30.0
SQLITE = b"SQLite format 3\0"  # the beginning of a database
FIELD = re.compile(r"\{([^{}]*)\}")


def databases(template: str) -> list[str]:
    """Return the SQLite files that rows may name by a template."""
    texts = FIELD.split(template)[::2]  # those between the fields
    return [path for path in glob.glob("*".join(map(glob.escape, texts))) if _is_database(Path(path))]


def _is_database(path: Path) -> bool:
    try:
        if not path.is_file():  # a pipe would wait for a writer
            return False
        with path.open("rb") as stream:
            return stream.read(len(SQLITE)) == SQLITE
    except OSError:  # whoever opens it for a row says why
        return False


def database_path(template: str, metadata: object) -> Path:
    """Return the path of the database that a row is about. `{field}` in the template stands for a field of the row's
    metadata. Raises InvalidRowError where the metadata lacks a field, or the file does not exist."""
    fields = metadata if isinstance(metadata, Mapping) else {}

    def value(match: re.Match[str]) -> str:
        held = fields.get(match[1])
        if isinstance(held, bool) or not isinstance(held, str | int) or held == "":
            raise InvalidRowError(
                f"metadata.{match[1]} is {shorten(held)}, but the database {template} needs a string there"
            )
        text = str(held)
        if text in (".", "..") or "/" in text or "\\" in text or "\0" in text:
            raise InvalidRowError(f"metadata.{match[1]} is {shorten(text)}, but must be a name without folders")
        return text

    path = Path(FIELD.sub(value, template))
    try:
        if path.is_file():
            return path
        there = path.exists()
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise InvalidRowError(f"the database {shorten(str(path))} cannot be opened: {reason}") from None
    raise InvalidRowError(f"the database {path} {'is no ordinary file' if there else 'does not exist'}")


@dataclass(frozen=True, slots=True)
class ByExecution:
    """A chooser of the first candidate that runs (the rule of CodeS), or of the first of those whose results most
    candidates agree on.

    Attributes:
        database: template of the path, see database_path.
        majority: choose by the results; else the first candidate that runs.
        timeout_s: seconds that one candidate may run.
        otherwise: where none runs, `first` chooses the first candidate, and the record says so; `error` is an error of
            the row.
    """

    database: str
    majority: bool = False
    timeout_s: float = DEFAULT_TIMEOUT_S
    otherwise: Otherwise = "first"
    process: SqlProcess = field(default_factory=SqlProcess, repr=False, compare=False)

    def check(self, option: str) -> None:
        """Open a database that is the same for all rows, to see whether it can be read. option: the option that names
        it. Raises UsageError."""
        if FIELD.search(self.database):
            return
        try:
            self.run(database_path(self.database, None), "SELECT 1")
        except InvalidRowError as error:
            raise UsageError(f"{option}: {str(error).removeprefix('the database ')}") from None

    def choose(self, row: CandidateRow) -> Choice:
        """Run the candidates and choose one. Raises InvalidRowError where there is no database to run on, or where none
        runs and that is an error; SqlStoppedError once `stop` was called."""
        path, texts = database_path(self.database, row.metadata), [candidate.text for candidate in row.candidates]
        results: list[StatementResult | str] = []
        for text in texts:
            results.append(self.run(path, text))
            if not self.majority and isinstance(results[-1], StatementResult):
                break
        ran = {index: result for index, result in enumerate(results) if isinstance(result, StatementResult)}
        errors = [result for result in results if isinstance(result, str)]
        why = {"ran": len(ran), "failed": len(errors), **({"first_error": errors[0]} if errors else {})}
        if not ran:
            if self.otherwise == "error":
                raise InvalidRowError(f"none of {len(texts)} candidates runs; the first: {errors[0]}")
            return Choice(0, why)
        if not self.majority:
            return Choice(min(ran), why)
        groups = _groups(ran, texts)
        most = max(groups, key=len)
        return Choice(most[0], {**why, "votes": len(most), "results": len(groups)})

    def stop(self) -> None:
        """End the statement that runs. It may be called from a signal handler."""
        self.process.stop()

    def run(self, path: Path, text: str) -> StatementResult | str:
        """Run a candidate: return its result, or why it failed. Raises InvalidRowError for a file that is no
        database."""
        try:
            return self.process.run(path, text.strip(), seconds=self.timeout_s)
        except UnreadableDatabaseError as error:
            raise InvalidRowError(f"the database {path} cannot be read: {error}") from None


def _groups(ran: Mapping[int, StatementResult], texts: list[str]) -> list[list[int]]:
    """Group the places of candidates with equal rows. The order of rows counts where both statements order them."""
    ordered = {index: is_ordered(texts[index]) for index in ran}
    groups: list[list[int]] = []
    for index, result in ran.items():
        for group in groups:
            if result.same(ran[group[0]], ordered=ordered[index] and ordered[group[0]]):
                group.append(index)
                break
        else:
            groups.append([index])
    return groups
