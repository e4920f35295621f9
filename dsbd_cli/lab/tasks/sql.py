"""Text-to-SQL on small schemas, scored by execution."""

from __future__ import annotations

from typing import cast

from dsbd_cli.lab.tasks.record import Task, TaskRecord
from dsbd_cli.pick.sandbox import STEPS, Ran, SqlProcess
from dsbd_cli.pick.sql_child import TableData

TIMEOUT_S = 30.0  # STEPS are the limit; only a statement that is deaf to them runs so long
MAX_ROWS = 5000
PROCESS = SqlProcess()


class SqlTask(Task):
    """Questions about schemas never seen in training; the answer is one SELECT."""

    name = "sql"
    metric = "execution accuracy"

    def execute(self, record: TaskRecord, text: str) -> Ran | None:
        """Return what `text` returns on the record's database; None where it fails."""
        tables = cast("dict[str, TableData]", record.meta["tables"])
        found = PROCESS.run(tables, text.strip(), seconds=TIMEOUT_S, steps=STEPS, max_rows=MAX_ROWS)
        return found if isinstance(found, Ran) else None

    def score(self, record: TaskRecord, text: str) -> bool:
        """Whether `text`, run on the record's database, returns what the gold SQL returns."""
        gold, found = self.execute(record, record.reference), self.execute(record, text)
        return gold is not None and found is not None and gold.same(found, ordered=bool(record.meta["ordered"]))
