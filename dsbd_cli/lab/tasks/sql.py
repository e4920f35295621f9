"""Text-to-SQL on small schemas, scored by execution."""

from __future__ import annotations

from contextlib import closing
from typing import cast

from dsbd_cli.lab.tasks.execute import Rows, TableData, connect, run, same_rows
from dsbd_cli.lab.tasks.record import Task, TaskRecord


class SqlTask(Task):
    """Questions about schemas never seen in training; the answer is one SELECT."""

    name = "sql"
    metric = "execution accuracy"

    def execute(self, record: TaskRecord, text: str) -> Rows | None:
        """The rows that `text` returns on the record's database; None where it fails."""
        with closing(connect(cast("dict[str, TableData]", record.meta["tables"]))) as database:
            return run(database, text.strip())

    def score(self, record: TaskRecord, text: str) -> bool:
        """Whether `text`, run on the record's database, returns what the gold SQL returns."""
        tables = cast("dict[str, TableData]", record.meta["tables"])
        with closing(connect(tables)) as database:
            gold = run(database, record.reference)
            found = run(database, text.strip())
        return gold is not None and found is not None and same_rows(found, gold, bool(record.meta["ordered"]))
