"""`dsbd generate --workers`: whatever dies, the records are those of one process."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.scale.conftest import Job, prompts, workers_below

pytest.importorskip("ray")
pytestmark = pytest.mark.slow

MakeJob = Callable[..., Job]
Undisturbed = Callable[[int], list[object]]
MOST = 240  # rows of a test


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], list[object]]:
    """undisturbed(count): the records of so many rows that one process writes whom nobody disturbs."""
    made = Job(tmp_path_factory.mktemp("undisturbed"), "", prompts(MOST))
    code, _, err = made.finish(workers=None)
    assert code == 3, err
    records = made.records()
    assert len(records) == MOST
    return lambda count: records[:count]


def test_two_workers_write_what_one_process_does(job: MakeJob, undisturbed: Undisturbed) -> None:
    made = job(60)
    code, out, err = made.finish()
    assert (code, out) == (3, ""), err
    assert made.records() == undisturbed(60)
    assert "failed" in err
    assert all(line.startswith("dsbd: ") for line in err.splitlines()), err


def test_killed_workers(job: MakeJob, undisturbed: Undisturbed) -> None:
    """Five SIGKILLs, each when the rows that the one before has hit are answered; their rows are sent again."""
    made = job(240)
    summary = made.folder / "summary.json"
    process = made.start("--summary", str(summary), row_s=0.015)
    for kill in range(5):
        made.wait_for(process, 5 + 40 * kill)
        limit = time.monotonic() + 60
        while not (workers := workers_below(os.getpid())):
            assert time.monotonic() < limit
            time.sleep(0.02)
        os.kill(workers[kill % len(workers)], signal.SIGKILL)
    code, out, err = made.end(process)
    assert (code, out) == (3, ""), err
    assert made.records() == undisturbed(240)
    said = json.loads(summary.read_text())
    assert sum(worker["deaths"] for worker in said["workers"]) == 5
    assert sum(worker["rows"] for worker in said["workers"]) == 240
    assert all(line.startswith("dsbd: ") for line in err.splitlines()), err
    assert "of its rows are sent again" in err


def test_killed_driver_and_resume(job: MakeJob, undisturbed: Undisturbed) -> None:
    made = job(100)
    process = made.start(row_s=0.03)
    made.wait_for(process, 20)
    process.kill()
    made.end(process)
    assert 20 <= made.output.read_bytes().count(b"\n") < 100
    code, _, err = made.finish()
    assert code == 3, err
    assert made.records() == undisturbed(100)


def test_interrupt_and_resume_without_ray(job: MakeJob, undisturbed: Undisturbed) -> None:
    """SIGINT to the process group, as a terminal sends it."""
    made = job(100)
    process = made.start(row_s=0.03, start_new_session=True)
    made.wait_for(process, 20)
    os.killpg(process.pid, signal.SIGINT)
    code, out, err = made.end(process)
    assert (code, out) == (130, ""), err
    assert "go on with: dsbd generate" in err
    assert "Traceback" not in err
    code, _, err = made.finish(workers=None)
    assert code == 3, err
    assert made.records() == undisturbed(100)


def test_a_poisonous_row_and_a_hung_worker(job: MakeJob) -> None:
    """A row that kills its worker fails; its neighbours do not. A worker that is stopped is replaced."""
    rows: list[dict[str, object]] = [{"id": f"r{n}", "prompt": f"row {n}"} for n in range(60)]
    rows[9]["prompt"] = "die"
    made = job(rows)
    process = made.start(row_s=0.03, workers="2,timeout=3")
    made.wait_for(process, 30)
    os.kill(workers_below(os.getpid())[0], signal.SIGSTOP)
    code, _, err = made.end(process)
    assert code == 3, err
    records = [json.loads(line) for line in made.output.read_text().splitlines()]
    assert [record["index"] for record in records] == list(range(60))
    assert [record["index"] for record in records if record.get("error")] == [9]
    assert records[9]["error"]["type"] == "WorkerLostError"
    assert "3 workers died on this row" in records[9]["error"]["message"]
    assert "no sign of life" in err


def test_an_error_of_the_engine_ends_the_run_with_one_line(job: MakeJob) -> None:
    made = job([{"prompt": "a"}, {"prompt": "no memory"}])
    code, out, err = made.finish()
    assert (code, out) == (1, "")
    assert err.splitlines() == ["dsbd: error: the device is out of memory"]


def test_a_node_that_goes(cluster: Any, job: MakeJob, undisturbed: Undisturbed) -> None:
    """Three workers, one of them on a node that is taken away: the records are the same, the others go on."""
    made = job(100)
    node = cluster.add_node(num_cpus=1, object_store_memory=80 << 20)
    try:
        process = made.start(row_s=0.03, workers="3")
        made.wait_for(process, 20)
    finally:
        cluster.remove_node(node, allow_graceful=False)
    code, _, err = made.end(process)
    assert code == 3, err
    assert made.records() == undisturbed(100)
    assert "its process died" in err


def test_one_worker_on_a_ray_of_its_own(job: MakeJob, undisturbed: Undisturbed, ray_folder: Path) -> None:
    """Records on standard output, and on standard error our lines alone, though the worker dies. Nothing is left."""
    made = job(60)
    options = ("-o", "-", "--existing", "error", "--workers", "1", "--log", "verbose")
    own = ray_folder / "own"
    own.mkdir()
    with made.output.open("wb") as output:
        process = made.start(*options, workers=None, row_s=0.05, environment={"TMPDIR": str(own)}, stdout=output)
    made.wait_for(process, 10)
    os.kill(workers_below(process.pid)[0], signal.SIGKILL)
    code, _, err = made.end(process)
    assert code == 3, err
    assert made.records() == undisturbed(60)
    assert "its process died" in err
    assert all(line.startswith("dsbd: ") for line in err.splitlines()), err
    assert not list(own.iterdir())


def test_done_order(job: MakeJob) -> None:
    """A slow row holds no other back."""
    rows: list[dict[str, object]] = [{"id": f"r{n}", "prompt": f"row {n}"} for n in range(30)]
    rows[0]["prompt"] = "pause"
    made = job(rows)
    code, _, err = made.finish("--order", "done")
    assert code == 0, err
    records = [json.loads(line) for line in made.output.read_text().splitlines()]
    assert sorted(record["index"] for record in records) == list(range(30))
    assert records[0]["index"] != 0
    assert all(record["id"] == f"r{record['index']}" for record in records)


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
def test_a_full_disk_ends_the_run_and_its_workers(job: MakeJob) -> None:
    made = job(5)
    with open("/dev/full", "wb") as full:
        code, _, err = made.finish("-o", "-", "--existing", "error", stdout=full)
    assert code == 1
    assert "cannot write" in err
