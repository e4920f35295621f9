"""`dsbd generate --workers`: whatever dies, the records are those of one process."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.engine.core.test_schemas import chain
from tests.models.decoders import build_decoder, save_decoder
from tests.models.draft_heads.checkpoints import LAYERS, eagle3
from tests.models.draft_heads.transformers_targets import save_target
from tests.scale.conftest import Job, kill, wait_until_ended

pytest.importorskip("ray")

MakeJob = Callable[..., Job]
Undisturbed = Callable[[int], list[object]]


@pytest.mark.parametrize("workers", ["1", "2"])
def test_workers_write_what_one_process_does(workers: str, job: MakeJob, undisturbed: Undisturbed) -> None:
    made = job(60)
    made.output.write_text("what was here before\n")
    code, out, err = made.finish("--existing", "overwrite", workers=workers)
    assert (code, out) == (3, ""), err
    assert made.records() == undisturbed(60)
    assert "failed" in err
    assert all(line.startswith("dsbd: ") for line in err.splitlines()), err


def test_killed_workers(job: MakeJob, undisturbed: Undisturbed) -> None:
    """Five SIGKILLs, each when the rows that the one before has hit are answered; their rows are sent again."""
    made = job(240)
    summary = made.folder / "summary.json"
    made.gate.hold(5)
    process = made.start("--set", f"summary={summary}")
    for number in range(5):
        made.reach(process, 5 + 40 * number, os.getpid())
        workers = made.holders(process, os.getpid())
        kill(workers[number % len(workers)])
    made.gate.release()
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
    made.gate.hold(20)
    process = made.start()
    made.wait_for(process, 20)
    process.kill()
    made.end(process)
    made.gate.release()
    assert 20 <= made.written() < 100
    code, _, err = made.finish()
    assert code == 3, err
    assert made.records() == undisturbed(100)


def test_interrupt_and_resume_without_ray(job: MakeJob, undisturbed: Undisturbed) -> None:
    """SIGINT to the process group, as a terminal sends it."""
    made = job(100)
    made.gate.hold(20)
    process = made.start(start_new_session=True)
    made.wait_for(process, 20)
    os.killpg(process.pid, signal.SIGINT)
    code, out, err = made.end(process)
    made.gate.release()
    assert (code, out) == (130, ""), err
    assert "go on with: dsbd generate" in err
    assert "Traceback" not in err
    code, _, err = made.finish(workers=None)
    assert code == 3, err
    assert made.records() == undisturbed(100)


def test_a_poisonous_row(job: MakeJob) -> None:
    """A row that kills its worker fails; its neighbours do not."""
    rows: list[dict[str, object]] = [{"id": f"r{n}", "prompt": f"row {n}"} for n in range(60)]
    rows[9]["prompt"] = "die"
    made = job(rows)
    code, _, err = made.finish()
    assert code == 3, err
    records = [json.loads(line) for line in made.output.read_text().splitlines()]
    assert [record["index"] for record in records] == list(range(60))
    assert [record["index"] for record in records if record.get("error")] == [9]
    assert records[9]["error"]["type"] == "WorkerLostError"
    assert "3 workers died on this row" in records[9]["error"]["message"]


def test_schemas_that_would_end_a_worker(cluster: Any, tmp_path: Path) -> None:
    """Real engines. A chain of 3,000 references exhausted the stack of whoever compiled it, the product of six primes
    its memory: now each is the error of its row, at first and on resume, and no worker dies."""
    explosion = {"allOf": [{"type": "integer", "multipleOf": prime} for prime in (7, 11, 13, 17, 19, 23)]}
    rows: list[dict[str, object]] = [{"prompt": "a", "max_new_tokens": 4} for _ in range(6)]
    for index, schema in ((1, chain("defs", 3_000)), (2, chain("allOf", 3_000)), (4, explosion)):
        rows[index]["response_format"] = {"type": "json_schema", "json_schema": {"schema": schema}}
    made, summary = Job(tmp_path, cluster.address, rows, module="dsbd_cli"), tmp_path / "summary.json"
    code, _, err = made.finish("--set", f"summary={summary}", workers="1")
    assert code == 3, err
    records = [json.loads(line) for line in made.output.read_text().splitlines()]
    assert [record["index"] for record in records] == list(range(6))
    assert [record["index"] for record in records if record.get("error")] == [1, 2, 4]
    assert "its references lead through more than" in records[1]["error"]["message"]
    assert "to compile it takes more than" in records[4]["error"]["message"]
    assert [worker["deaths"] for worker in json.loads(summary.read_text())["workers"]] == [0]
    before = made.records()
    code, _, err = made.finish(workers="1")
    assert (code, made.records()) == (3, before), err


@pytest.mark.parametrize("head", ["mtp", "eagle3"])
def test_workers_with_a_draft_head(head: str, cluster: Any, tmp_path: Path) -> None:
    """Real engines; the MTP layer lies in the checkpoint of a hybrid, the EAGLE-3 head in a folder of its own."""
    if head == "mtp":
        target, _ = save_target(tmp_path / "target", "qwen3.5")
    else:
        target = save_decoder(tmp_path / "target", build_decoder("llama", num_hidden_layers=LAYERS))
        head = str(eagle3(tmp_path / "head", "speculators"))
    prompts = [" ".join(f"w{5 + (7 * row + number) % 90}" for number in range(2 + row)) for row in range(8)]
    texts = []
    for name, draft, workers in (
        ("none", ("none",), None),
        ("one", (head, "--depth", "2"), None),
        ("two", (head, "--depth", "2"), "2"),
    ):
        (tmp_path / name).mkdir()
        made = Job(tmp_path / name, cluster.address, [{"prompt": prompt} for prompt in prompts], module="dsbd_cli")
        options = ("--target", str(target), "--decode", "search", "--max-new-tokens", "8", "--draft", *draft)
        code, _, err = made.finish(*options, workers=workers)
        assert code == 0, err
        assert "warning" not in err
        records = [json.loads(line) for line in made.output.read_text().splitlines()]
        texts.append([(record["text"], record["logprob"], record["beams"]) for record in records])
        assert all(record["stats"]["drafted"] > 0 for record in records) == (name != "none")
    assert texts[0] == texts[1] == texts[2]
    assert len(texts[0]) == len(prompts)


def test_a_hung_worker(job: MakeJob, undisturbed: Undisturbed) -> None:
    """A worker that is stopped is replaced, and ended. On a busy machine another one may be taken for stopped, too:
    rows are given up after three deaths only."""
    made = job(60)
    made.gate.hold(30)
    process = made.start(workers="2,timeout=3")
    made.wait_for(process, 30)
    stopped = made.holders(process, os.getpid())[0]
    os.kill(stopped, signal.SIGSTOP)
    made.gate.release()
    code, _, err = made.end(process)
    assert code == 3, err
    assert made.records() == undisturbed(60)
    assert "no sign of life" in err
    wait_until_ended(stopped)


def test_an_error_of_the_engine_ends_the_run_with_one_line(job: MakeJob) -> None:
    made = job([{"prompt": "a"}, {"prompt": "no memory"}])
    code, out, err = made.finish()
    assert (code, out) == (1, "")
    assert err.splitlines() == ["dsbd: error: the device is out of memory"]


def test_a_node_that_goes(cluster: Any, job: MakeJob, undisturbed: Undisturbed) -> None:
    """Three workers, one of them on a node that is taken away: the records are the same, the others go on."""
    made = job(100)
    made.gate.hold(20)
    node = cluster.add_node(num_cpus=1, object_store_memory=80 << 20)
    try:
        process = made.start(workers="3")
        made.wait_for(process, 20)
        [raylet] = node.all_processes["raylet"]
        [worker] = made.holders(process, raylet.process.pid)
    finally:
        cluster.remove_node(node, allow_graceful=False)
    wait_until_ended(worker)  # it outlives its node, as it would not on another machine, and answers until it notices
    made.gate.release()
    code, _, err = made.end(process)
    assert code == 3, err
    assert made.records() == undisturbed(100)
    assert "its process died" in err
    assert "of its rows are sent again" in err


def test_one_worker_on_a_ray_of_its_own(job: MakeJob, undisturbed: Undisturbed, ray_folder: Path) -> None:
    """Records on standard output, and on standard error our lines alone, though the worker dies. Nothing is left."""
    made = job(60)
    made.gate.hold(10)
    options = ("-o", "-", "--existing", "error", "--workers", "1", "--set", "log=verbose")
    own = ray_folder / "own"
    own.mkdir()
    with made.output.open("wb") as output:
        process = made.start(*options, workers=None, environment={"TMPDIR": str(own)}, stdout=output)
    made.wait_for(process, 10)
    kill(made.holders(process, process.pid)[0])
    made.gate.release()
    code, _, err = made.end(process)
    assert code == 3, err
    assert made.records() == undisturbed(60)
    assert "its process died" in err
    assert all(line.startswith("dsbd: ") for line in err.splitlines()), err
    assert not list(own.iterdir())


def test_a_ray_of_its_own_is_closed_to_others(job: MakeJob, ray_folder: Path) -> None:
    """All its processes listen on loopback alone, and who has no token, or a wrong one, is not answered. No token is
    written to the home folder."""
    import psutil

    made = job(4)
    made.gate.hold(0)
    home = made.folder / "home"
    home.mkdir()
    own = {"TMPDIR": str(ray_folder), "HOME": str(home), "RAY_AUTH_MODE": "disabled"}
    process = made.start("--workers", "1", workers=None, environment=own)
    made.holders(process, process.pid)
    tree = [psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True)]
    listening = [
        (process.name(), connection.laddr)
        for process in tree
        for connection in process.net_connections(kind="inet")
        if connection.status == psutil.CONN_LISTEN
    ]
    names = {name for name, _ in listening}
    assert {"gcs_server", "raylet"} <= names, names
    assert any(name.startswith("ray::Worker") for name in names), names
    assert {address.ip.removeprefix("::ffff:") for _, address in listening} <= {"127.0.0.1", "::1"}, listening
    [gcs] = {address.port for name, address in listening if name == "gcs_server"}
    [server] = [process for process in tree if process.name() == "gcs_server"]
    token = server.environ()["RAY_AUTH_TOKEN"]
    asked = f"from ray._raylet import GcsClient; GcsClient(address='127.0.0.1:{gcs}').internal_kv_keys(b'', None)"
    for mode, sent, answered in (("disabled", "", False), ("token", "0" * 64, False), ("token", token, True)):
        environment = {**os.environ, "HOME": str(home), "RAY_AUTH_MODE": mode, "RAY_AUTH_TOKEN": sent}
        call = [sys.executable, "-c", asked]
        told = subprocess.run(call, env=environment, capture_output=True, text=True, check=False)
        assert (told.returncode == 0) is answered, told.stderr
        assert ("AuthenticationError" in told.stderr) is not answered, told.stderr
    made.gate.release()
    code, _, err = made.end(process)
    assert code == 0, err
    assert not list(home.rglob("*token*"))


def test_done_order(job: MakeJob) -> None:
    """A slow row holds no other back."""
    made = job([{"id": f"r{n}", "prompt": f"row {n}"} for n in range(30)])
    made.gate.hold(0, 1)
    process = made.start("--set", "order=done")
    made.wait_for(process, 1)
    made.gate.release()
    code, _, err = made.end(process)
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
