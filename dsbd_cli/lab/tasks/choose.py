"""The data set of a task, from the task's name and a path."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial
from pathlib import Path

from dsbd_cli.errors import UsageError, shorten
from dsbd_cli.io.records.cells import BY_NAME, ColumnRules
from dsbd_cli.io.records.reader import RowReader
from dsbd_cli.lab.tasks.dataset import Dataset
from dsbd_cli.lab.tasks.lines import PLAIN_ROWS, jsonl_dataset, mt_bench_dataset
from dsbd_cli.lab.tasks.pairs import PAIRED_TASKS, paired_dataset
from dsbd_cli.lab.tasks.qa import QA
from dsbd_cli.lab.tasks.spider import spider_dataset
from dsbd_cli.lab.tasks.sql import SQL
from dsbd_cli.lab.tasks.squad import squad_dataset

TASKS = {task.name: task for task in (SQL, QA)}
FROM_DISK: dict[str, Callable[[Path], Dataset]] = {
    "squad": squad_dataset,
    "spider": spider_dataset,
    "mt-bench": mt_bench_dataset,
}
OWN_TASK = "jsonl"  # the task of --input; a report has the file's name
OF_LINES: dict[str, Callable[..., Dataset]] = {  # tasks of JSON lines, which may name files
    OWN_TASK: jsonl_dataset,
    **{name: partial(paired_dataset, name) for name in PAIRED_TASKS},
}
TASK_NAMES: tuple[str, ...] = (*TASKS, *FROM_DISK, *OF_LINES)


def open_dataset(
    name: str,
    path: Path | None,
    dev_path: Path | None = None,
    metric: str | None = None,
    files_under: Path | None = None,
    score: str | None = None,
    rows: RowReader = PLAIN_ROWS,
    columns: ColumnRules = BY_NAME,
) -> Dataset:
    """Open the data set of a task. Raises UsageError.

    path: for tasks whose data lie on disk. dev_path: for their dev records, if these lie elsewhere. metric, score: of
    task jsonl, see jsonl_dataset. files_under: the only folder in which lines may name files. rows: what lines inherit
    from the run. columns: which columns of a table are fields.
    """
    own = {option: value for option, value in (("metric", metric), ("score", score)) if value is not None}
    if own and name != OWN_TASK:
        option, value = next(iter(own.items()))
        raise UsageError(f"--{option} {value} is for prompts of --input, but the task is {name}: drop it")
    if name in TASKS:
        for file in (path, dev_path):
            if file is not None:
                raise UsageError(f"task {name} brings its own records: drop the data path {file}")
        return TASKS[name]
    if name not in TASK_NAMES:
        names = ", ".join(task for task in TASK_NAMES if task != OWN_TASK)
        raise UsageError(f"task is {shorten(name)}, but must be one of {names}", field="task", value=name)
    if path is None:
        raise UsageError(f"task {name} needs the path of its data: name it with --data")
    if name in FROM_DISK:
        if files_under is not None:
            raise UsageError(f"--files-under {files_under} would do nothing, because {name} names no files: drop it")
        read = FROM_DISK[name]
    else:
        tabular = {"columns": columns} if name == OWN_TASK else {}
        read = partial(OF_LINES[name], files_under=files_under, rows=rows, **own, **tabular)
    data = read(path)
    if dev_path is None:
        return data
    if dev_path.resolve() == path.resolve():
        raise UsageError(f"the data and --dev-data are both {path}, but records that are shown solved are not asked")
    dev = read(dev_path)
    return dataclasses.replace(data, dev=dataclasses.replace(dev, name=f"{data.name} dev"))
