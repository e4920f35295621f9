"""Text-to-SQL on small schemas never seen in training, scored by execution; the answer is one SELECT."""

from __future__ import annotations

from collections.abc import Mapping
from typing import cast

from dsbd_cli.lab.tasks.dataset import EXECUTION, builtin_dataset, execution_score
from dsbd_cli.lab.tasks.record import TaskRecord
from dsbd_cli.pick.sandbox import STEPS, SqlProcess, StatementResult
from dsbd_cli.pick.sql_child import TableData

TIMEOUT_S = 30.0  # the limit is STEPS; only a statement that it does not stop runs so long
MAX_ROWS = 5000
PROCESS = SqlProcess()


def _execute(record: TaskRecord, text: str) -> StatementResult | None:
    """Run `text` on the record's database and return the result; None where it fails."""
    tables = cast("dict[str, TableData]", record.meta["tables"])
    result = PROCESS.run(tables, text.strip(), seconds=TIMEOUT_S, steps=STEPS, max_rows=MAX_ROWS)
    return result if isinstance(result, StatementResult) else None


def _score(record: TaskRecord, text: str) -> Mapping[str, float]:
    """Return whether `text`, run on the record's database, returns what the gold SQL returns."""
    gold, result = _execute(record, record.reference), _execute(record, text)
    return execution_score(gold, result, ordered=bool(record.meta["ordered"]))


SQL = builtin_dataset("sql", (EXECUTION,), _score, _execute)
