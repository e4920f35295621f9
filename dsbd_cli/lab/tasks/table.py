"""Tasks: records and scorers of answers. Nothing here imports torch."""

from dsbd_cli.lab.tasks.qa import QaTask
from dsbd_cli.lab.tasks.record import Task
from dsbd_cli.lab.tasks.sql import SqlTask

TASKS: dict[str, Task] = {task.name: task for task in (SqlTask(), QaTask())}

__all__ = ["TASKS"]
