"""Generators are deterministic and their splits share no names."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from itertools import islice

import pytest

from dsbd_cli.lab.tasks.choose import TASKS
from dsbd_cli.lab.tasks.record import RECORDS, TaskRecord, shipped
from training.tasks import GENERATORS, SPLITS
from training.tasks.ship import COUNTS, content
from training.tasks.words import split_of


@pytest.mark.parametrize("name", sorted(GENERATORS))
def test_same_seed_same_records(name: str) -> None:
    first, again, other = (list(islice(GENERATORS[name].records("dev", seed), 20)) for seed in (5, 5, 6))
    assert first == again
    assert [r.prompt for r in first] != [r.prompt for r in other]
    assert len({r.id for r in first}) == 20


def test_records_do_not_depend_on_the_process() -> None:
    """Hash randomisation or set order must not reach the records."""
    code = "from training.tasks import GENERATORS as G; print([next(t.records('test', 1)).prompt for t in G.values()])"
    here = str([next(task.records("test", 1)).prompt for task in GENERATORS.values()])
    there = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip()
    assert there == here


@pytest.mark.parametrize("name", sorted(GENERATORS))
def test_unknown_split(name: str) -> None:
    with pytest.raises(ValueError, match="split is 'validation'"):
        next(GENERATORS[name].records("validation", 0))


@pytest.mark.parametrize("split", SPLITS)
def test_schema_names_belong_to_the_split(split: str) -> None:
    for record in islice(GENERATORS["sql"].records(split, 0), 100):
        for table, held in record.meta["tables"].items():
            assert split_of(table) == split
            assert all(split_of(column) == split for column in held["columns"] if not column.endswith("_id"))
            values = {value for row in held["rows"] for value in row if isinstance(value, str)}
            assert all(split_of(value) == split for value in values)


@pytest.mark.parametrize("split", SPLITS)
def test_people_belong_to_the_split(split: str) -> None:
    seen = set()
    for record in islice(GENERATORS["qa"].records(split, 0), 100):
        seen.update(re.findall(r"([A-Z][a-z]+) was a ", record.prompt))
    assert len(seen) > 60
    assert all(split_of(name) == split for name in seen)


@pytest.mark.parametrize("split", sorted(COUNTS))
@pytest.mark.parametrize("name", sorted(TASKS))
def test_the_package_ships_what_the_generators_make(name: str, split: str) -> None:
    """Guards figures that are quoted against records that are not those of the generator any more."""
    made = [TaskRecord(**json.loads(line)) for line in content(name, split).splitlines()]
    assert list(shipped(name, split)) == made
    assert len(made) == COUNTS[split]
    assert made[-1].id == f"{name}-{split}-0-{COUNTS[split] - 1}"


def test_train_records_are_not_shipped() -> None:
    assert not list(RECORDS.glob("*-train*"))


def test_tasks_do_not_import_torch() -> None:
    code = "import sys; import dsbd_cli.lab.tasks; print('torch' in sys.modules, 'transformers' in sys.modules)"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert out.split() == ["False", "False"]
