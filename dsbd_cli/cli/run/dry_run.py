"""`--dry-run`: what a run would find in its input, counted without a model, and shown."""

from __future__ import annotations

import statistics
from array import array
from collections import Counter
from dataclasses import dataclass, field

from dsbd_cli.cli.run.messages import visible
from dsbd_cli.cli.run.summary import Totals
from dsbd_cli.errors import PromptTooLongError, plural
from dsbd_cli.io.lines.resume import DoneRows
from dsbd_cli.io.records.record_parts import row_error
from dsbd_cli.io.records.row import Row
from dsbd_cli.io.schemas.contracts import DRY_RUN
from dsbd_cli.requests import RequestResult

SHOWN = 20  # bad rows that are printed


@dataclass(slots=True)
class RowTally:
    """Counts of the rows that a run would answer, and of those that it could not.

    Attributes:
        tokens: of each prompt that was tokenized. longest: tokens and line of the longest one.
        bad: for each row that cannot be answered its index, line, id, and the type and message of its error.
    """

    tokens: array[int] = field(default_factory=lambda: array("Q"))
    longest: tuple[int, int] = 0, 0
    bad: list[dict[str, object]] = field(default_factory=list)
    errors: Counter[str] = field(default_factory=Counter)

    def record(self, row: Row, result: RequestResult | None) -> bytes:
        """Count a row, and return no record."""
        if result is not None and result.prompt_tokens:
            if result.prompt_tokens > self.longest[0]:
                self.longest = result.prompt_tokens, row.number
            self.tokens.append(result.prompt_tokens)
        error = row_error(row, result)
        if error is not None:
            kind = type(error).__name__
            self.errors[kind] += 1
            self.bad.append({"index": row.index, "line": row.number, "id": row.id, "type": kind, "message": str(error)})
        return b""


def dry_run_document(
    tally: RowTally, totals: Totals, done: DoneRows, *, source: str, output: str | None, limit: int | None
) -> dict[str, object]:
    """Return what was found as the document of its schema.

    totals, done: of the rows that were read. source: name of the input. output: the file whose records say what is
    done. limit: positions that a prompt and its answer must fit into.
    """
    tokens = tally.tokens
    return {
        "schema": DRY_RUN.id,
        "input": source,
        "output": output,
        "rows": {
            "read": totals.rows + totals.skipped,
            "to_answer": totals.rows - totals.failed,
            "bad": totals.failed,
            "done_before": totals.skipped,
            "failed_before": totals.skipped_failed,
            "gone": done.answered.total(),
            "failed_gone": done.failed.total(),
            "duplicate_ids": totals.duplicates,
            "too_long": tally.errors[PromptTooLongError.__name__],
            "truncated": totals.truncated_rows,
        },
        "tokens": {
            "total": sum(tokens),
            "median": statistics.median(tokens) if tokens else None,
            "longest": tally.longest[0] or None,
            "longest_line": tally.longest[1] or None,
            "positions": limit,
        },
        "errors": dict(sorted(tally.errors.items())),
        "bad_rows": tally.bad,
    }


def dry_run_lines(document: dict[str, object]) -> list[str]:
    """Return the document as lines for people."""
    rows, tokens, bad = document["rows"], document["tokens"], document["bad_rows"]
    assert isinstance(rows, dict)
    assert isinstance(tokens, dict)
    assert isinstance(bad, list)
    facts: list[tuple[str, object, str]] = [("rows", rows["read"], f"of {document['input']}")]
    if document["output"] is not None:
        failed = rows["failed_before"]
        more = f", {failed} of them failed: --existing retry answers them again" if failed else ""
        facts.append(("done before", rows["done_before"], f"in {document['output']}{more}"))
    facts += [("to answer", rows["to_answer"], ""), ("bad", rows["bad"], "")]
    if rows["too_long"]:
        facts.append(("too long", rows["too_long"], f"of these, for {tokens['positions']:,} positions"))
    if rows["truncated"]:
        facts.append(("cut", rows["truncated"], f"on their left, to fit into {tokens['positions']:,} positions"))
    if rows["duplicate_ids"]:
        facts.append(("double ids", rows["duplicate_ids"], ""))
    if rows["failed_gone"]:
        facts.append(("dropped", rows["failed_gone"], "failed records, whose rows are gone or mended"))
    if rows["gone"]:
        facts.append(("gone", rows["gone"], "records of rows that are not in the input any more"))
    if tokens["median"] is not None:
        longest = f"longest {tokens['longest']:,} (line {tokens['longest_line']})"
        facts.append(("prompt tokens", tokens["total"], f"median {tokens['median']:,g}, {longest}"))
    counts = [f"{count:,}" for _, count, _ in facts]
    left, right = max(len(name) for name, _, _ in facts), max(map(len, counts))
    lines = [
        f"{name:<{left}}  {count:>{right}}  {more}".rstrip()
        for (name, _, more), count in zip(facts, counts, strict=True)
    ]
    if bad:
        lines.append("")
    for failure in bad[:SHOWN]:
        lines.append(visible(f"{failure['message']} ({'no id' if failure['id'] is None else 'id ' + failure['id']})"))
    if len(bad) > SHOWN:
        lines.append(f"and {plural(len(bad) - SHOWN, 'more bad row')}: --set log=json lists them all")
    return lines
