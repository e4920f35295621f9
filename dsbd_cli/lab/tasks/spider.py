"""Spider (Yu et al. 2018) from its official folder, scored by execution on its databases."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

from dsbd_cli.errors import UsageError
from dsbd_cli.lab.tasks.dataset import EXECUTION, Dataset, execution_scorer
from dsbd_cli.lab.tasks.record import TaskRecord
from dsbd_cli.lab.tasks.task_files import field, items, read_json
from dsbd_cli.pick.sandbox import SqlProcess, StatementResult, UnreadableDatabaseError

QUESTIONS, SCHEMAS = "dev.json", "tables.json"  # files of the folder
TIMEOUT_S = 30.0
PROCESS = SqlProcess()


def spider_dataset(folder: Path) -> Dataset:
    """Read the questions of dev.json with the schemas of tables.json and database/<id>/<id>.sqlite.

    A statement may run TIMEOUT_S seconds. Raises UsageError naming a missing file or a wrong field, and, when its
    record is reached, for a gold statement that fails on its database.
    """
    if not folder.is_dir():
        raise UsageError(f"{folder} is no folder: --task spider takes the one with dev.json, tables.json and database")
    schemas = _schemas(folder / SCHEMAS)
    questions = items({"dev": read_json(folder / QUESTIONS)}, "dev", str(folder))
    if not questions:
        raise UsageError(f"{folder / QUESTIONS} holds no question")

    def records() -> Iterator[TaskRecord]:
        for number, (where, asked) in enumerate(questions):
            yield _record(folder, number, asked, where, schemas)

    return Dataset("spider", (EXECUTION,), records, score_spider, execute=_execute)


def _schemas(path: Path) -> dict[str, str]:
    """Return for each database id its schema, written as in the built-in SQL task."""
    schemas = {}
    for where, schema in items({"tables": read_json(path)}, "tables", str(path.parent)):
        tables = field(schema, "table_names_original", list, where)
        columns: list[list[str]] = [[] for _ in tables]
        for column_place, column in items(schema, "column_names_original", where):
            match column:
                case [int(table), str(name)] if -1 <= table < len(tables):
                    if table >= 0:  # -1 belongs to the column *
                        columns[table].append(name)
                case _:
                    raise UsageError(f"{column_place} is {column!r}, but must be [table number, name]")
        shown = [f"{name} ( {', '.join(names)} )" for name, names in zip(tables, columns, strict=True)]
        schemas[field(schema, "db_id", str, where)] = "; ".join(shown)
    return schemas


def _record(folder: Path, number: int, asked: object, where: str, schemas: Mapping[str, str]) -> TaskRecord:
    name = field(asked, "db_id", str, where)
    question, gold = (" ".join(field(asked, key, str, where).split()) for key in ("question", "query"))
    if name not in schemas:
        raise UsageError(f"{where}.db_id is {name!r}, which tables.json does not hold")
    path = folder / "database" / name / f"{name}.sqlite"
    if not path.is_file():
        raise UsageError(f"{where}: the database {path} does not exist")
    result = _ran(path, gold)
    if result is None:
        raise UsageError(f"{where}.query fails on {path}: {gold}")
    prompt = f"schema: {schemas[name]}\nquestion: {question}\nsql:"
    return TaskRecord(f"spider-{number}", prompt, gold, {"database": path, "result": result})


def _ran(path: Path, sql: str) -> StatementResult | None:
    try:
        result = PROCESS.run(path, sql, seconds=TIMEOUT_S)
    except UnreadableDatabaseError as error:
        raise UsageError(f"{path} cannot be opened: {error}") from None
    return result if isinstance(result, StatementResult) else None


def _execute(record: TaskRecord, text: str) -> StatementResult | None:
    """Run `text` on the record's database and return the result; None where it fails."""
    path = record.meta["database"]
    assert isinstance(path, Path)
    return _ran(path, text.strip())


score_spider = execution_scorer(_execute)
