"""What a batch job meets at night: kill -9, signals, a reader that leaves, a full disk, torn lines, a strange clock.

    python -m benchmarks.faults            2,000 rows, 50 kills; keeps its report under benchmarks/results/
    python -m benchmarks.faults --real     instead 400 rows, 10 kills with the real engine: the built-in pair where it
                                           is there, else random checkpoints made on the spot
    python -m benchmarks.faults --workers 2   instead 50 times kill -9 of a random Ray worker

The first form runs the whole command in processes of its own; only the engine is a stand-in (tests/helpers/fake.py)
whose rows take a set time. After every fault `--existing resume` goes on, and the file must hold every row exactly
once, each record equal to that of an undisturbed run but for measured times, fields that end in _s. With the real
engine other rows share the batch after a resume, and sums are rounded in another order: logprob and score may differ by
1e-4, and now and then the draft proposes another node, which shows in the counters (`stats`) alone. The report counts
both.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import resource
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
FAKE = (sys.executable, "-m", "tests.helpers.fake")
DEADLINE_S = 300

Result = dict[str, object]
Expected = tuple[list[object], list[object]]
UNDISTURBED: dict[object, Expected] = {}


class Fault(Exception):  # noqa: N818
    """The command did not keep its promise."""


def require(condition: bool, message: str) -> None:
    if not condition:
        raise Fault(message)


def prompts(rows: int) -> bytes:
    """Rows of every kind: flat, OpenAI, without an id, with an id twice, broken ones, ones that the engine refuses."""
    lines = []
    for index in range(rows):
        kind = index % 20
        if kind == 3:
            lines.append(json.dumps({"prompt": f"no id {index}", "n": 2}))
        elif kind == 7:
            body = {"model": "m", "prompt": f"envelope {index}", "max_tokens": 4}
            row = {"custom_id": f"o{index}", "method": "POST", "url": "/v1/completions", "body": body}
            lines.append(json.dumps(row))
        elif kind == 11:
            lines.append('{"id": "broken ')
        elif kind == 13:
            lines.append(json.dumps({"id": f"f{index}", "prompt": "fail"}))
        elif kind in (17, 18):  # the same id and content twice, and a third row with that id alone
            lines.append(
                json.dumps({"id": f"twice {index // 40}", "prompt": "the same" if index % 40 < 38 else "other"})
            )
        else:
            lines.append(json.dumps({"id": f"r{index}", "prompt": f"row {index} — größer", "metadata": {"n": index}}))
    return "\n".join(lines).encode() + b"\n"


class Folder:
    """Input, output and stats of one job, and the command that works on them."""

    def __init__(
        self,
        path: Path,
        rows: int,
        *,
        command: tuple[str, ...] = FAKE,
        options: tuple[str, ...] = (),
        slack: float = 0.0,
    ) -> None:
        """slack: how far a number may be from the undisturbed run's."""
        self.path, self.command, self.options, self.slack = path, command, options, slack
        self.pair, self.largest, self.other_counters = "fake engine", 0.0, 0
        self.input, self.output, self.stats = (path / name for name in ("in.jsonl", "out.jsonl", "steps.jsonl"))
        path.mkdir(parents=True, exist_ok=True)
        self.input.write_bytes(prompts(rows))

    def start(self, *more: str, row_s: float = 0.0, **options: object) -> subprocess.Popen[bytes]:
        """The command over this folder's files."""
        files = ("-i", str(self.input), "-o", str(self.output), "--set", f"stats={self.stats}")
        extra = options.pop("environment", {})
        environment = {**os.environ, "FAKE_ROW_S": str(row_s), "PYTHONPATH": str(ROOT), **extra}  # type: ignore[dict-item]
        pipes = {"stdin": subprocess.DEVNULL, "stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE, **options}
        call = [*self.command, "generate", *files, *self.options, *more]
        return subprocess.Popen(call, cwd=ROOT, env=environment, **pipes)  # type: ignore[call-overload, no-any-return]

    def finish(self, *more: str, **options: object) -> tuple[int, str]:
        """Run the command to its end; exit code and standard error."""
        process = self.start(*more, **options)  # type: ignore[arg-type]
        _, err = process.communicate(timeout=DEADLINE_S)
        return process.returncode, err.decode()

    def records(self) -> list[object]:
        return [without_times(json.loads(line)) for line in self.output.read_bytes().splitlines()]

    def steps(self) -> list[object]:
        return [without_times(json.loads(line)) for line in self.stats.read_bytes().splitlines()]

    def alike(self, recorded: object, wanted: object) -> bool:
        """Equal, but for numbers within the slack."""
        if isinstance(recorded, dict) and isinstance(wanted, dict):
            if self.slack and "stats" in recorded and recorded["stats"] != wanted.get("stats"):
                self.other_counters += 1
                recorded, wanted = {**recorded, "stats": None}, {**wanted, "stats": None}
            return recorded.keys() == wanted.keys() and all(self.alike(recorded[name], wanted[name]) for name in wanted)
        if isinstance(recorded, list) and isinstance(wanted, list):
            return len(recorded) == len(wanted) and all(map(self.alike, recorded, wanted))
        if isinstance(recorded, float) and isinstance(wanted, float):
            self.largest = max(self.largest, abs(recorded - wanted))
            return abs(recorded - wanted) <= self.slack
        return recorded == wanted

    @property
    def files(self) -> tuple[Path, ...]:
        """What a run writes."""
        return self.output, self.stats, self.output.with_name("out.jsonl.dsbd-run")

    def clear(self) -> None:
        for path in self.files:
            path.unlink(missing_ok=True)


def without_times(value: object) -> object:
    """A record without the fields that measure time."""
    if isinstance(value, dict):
        return {name: without_times(item) for name, item in value.items() if not name.endswith("_s")}
    return [without_times(item) for item in value] if isinstance(value, list) else value


def undisturbed(folder: Folder) -> Expected:
    """Records and step records of a run that nobody disturbs; one run for the same input and command."""
    key = (folder.command, folder.options, folder.input.read_bytes())
    if key not in UNDISTURBED:
        code, err = folder.finish("--quiet")
        require(code == 3, f"the undisturbed run ended with {code}: {err}")
        UNDISTURBED[key] = (folder.records(), folder.steps())
        folder.clear()
    return UNDISTURBED[key]


def complete(folder: Folder, expected: Expected, *, steps: bool = True) -> None:
    """Resume to the end: every row exactly once, in order, equal to the undisturbed run's."""
    code, err = folder.finish("--existing", "resume", "--quiet")
    require(code == 3, f"the last resume ended with {code}: {err}")
    records = folder.records()
    require(len(records) == len(expected[0]), f"{len(records)} records, not {len(expected[0])}")
    for record, wanted in zip(records, expected[0], strict=True):
        require(folder.alike(record, wanted), f"record {record} is not {wanted}")
    if steps and not folder.slack:
        require(folder.alike(folder.steps(), expected[1]), "step records differ")


def wait_for(folder: Folder, rows: int) -> None:
    """Until so many records are written."""
    limit = time.monotonic() + DEADLINE_S
    while not (folder.output.exists() and folder.output.read_bytes().count(b"\n") >= rows):
        require(time.monotonic() < limit, f"no {rows} records in {DEADLINE_S} s")
        time.sleep(0.005)


def kill_at_random(folder: Folder, kills: int, *, seed: int = 0) -> Result:
    """kill -9 at random moments, each run resumed. A job that gets done before the last kill is begun again."""
    dice, begun = random.Random(seed), time.perf_counter()
    expected = undisturbed(folder)
    whole, begun = time.perf_counter() - begun, time.perf_counter()
    first = folder.start("--existing", "resume", "--quiet", row_s=0.01)
    wait_for(folder, 1)
    start_up = time.perf_counter() - begun
    first.kill()
    first.wait()
    assert first.stderr is not None
    first.stderr.close()
    row_s = min(0.01, 20 / len(expected[0]))
    work = row_s * len(expected[0]) if folder.command == FAKE else max(whole - start_up, 1.0)
    done = torn = idle = jobs = 0
    before = folder.output.stat().st_size
    while done < kills:
        process = folder.start("--existing", "resume", "--quiet", row_s=row_s)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(dice.uniform(0.9 * start_up, start_up + work / kills * 1.6))
        process.kill()
        _, err = process.communicate()
        require(process.returncode in (-signal.SIGKILL, 3), f"ended with {process.returncode}: {err.decode()}")
        if process.returncode == 3:
            complete(folder, expected)
            folder.clear()
            before, jobs = 0, jobs + 1
            continue
        done += 1
        data = folder.output.read_bytes() if folder.output.exists() else b""
        torn += bool(data) and not data.endswith(b"\n")
        idle += len(data) == before
        before = len(data)
    complete(folder, expected)
    return {
        "fault": "kill -9",
        "rows": len(expected[0]),
        "kills": done,
        "kills_before_a_new_row": idle,
        "torn_lines_met": torn,
        "jobs": jobs + 1,
    }


def kill_workers(folder: Folder, kills: int, workers: int, *, seed: int = 0) -> Result:
    """kill -9 of random workers, each when the rows that the one before has hit are written. A job that gets done
    before the last kill is begun again."""
    from tests.scale.conftest import workers_below

    dice = random.Random(seed)
    expected = undisturbed(folder)
    apart = 2 * workers * 16 + 8  # rows: more than the workers hold
    done = jobs = 0
    while done < kills:
        process = folder.start("--workers", str(workers), "--existing", "overwrite", "--quiet", row_s=0.005)
        limit, target = time.monotonic() + DEADLINE_S, 1
        while process.poll() is None and done < kills:
            require(time.monotonic() < limit, f"the run stands still after {done} kills")
            time.sleep(0.02)
            written = folder.output.read_bytes().count(b"\n") if folder.output.exists() else 0
            alive = workers_below(process.pid) if written >= target else []
            if alive:
                os.kill(dice.choice(alive), signal.SIGKILL)
                done, target = done + 1, written + apart
        _, err = process.communicate(timeout=DEADLINE_S)
        require(process.returncode == 3, f"ended with {process.returncode}: {err.decode()}")
        complete(folder, expected)
        folder.clear()
        jobs += 1
    return {"fault": "kill -9 of a worker", "rows": len(expected[0]), "workers": workers, "kills": done, "jobs": jobs}


def stop_by(number: signal.Signals) -> Callable[[Folder], Result]:
    """The first signal ends the run in order and says how to go on; that command is then run."""

    def fault(folder: Folder) -> Result:
        expected = undisturbed(folder)
        process = folder.start(row_s=0.5)  # so long that it cannot end before the signal comes
        wait_for(folder, 3)
        process.send_signal(number)
        _, err = process.communicate(timeout=DEADLINE_S)
        require(process.returncode == 128 + number, f"ended with {process.returncode}: {err.decode()}")
        require(folder.output.read_bytes().endswith(b"\n"), "the last line is torn")
        told = err.decode().split("go on with: dsbd ", 1)
        require(len(told) == 2, f"it is not said how to resume: {err.decode()}")
        rows = len(folder.records())
        again = [*folder.command, *shlex.split(told[1]), "--quiet"]
        code = subprocess.run(again, cwd=ROOT, check=False, env={**os.environ, "PYTHONPATH": str(ROOT)}).returncode
        require(code == 3, f"the command that was told ended with {code}")
        complete(folder, expected)
        return {"fault": number.name, "exit_code": process.returncode, "rows_before": rows}

    return fault


def closed_pipe(folder: Folder) -> Result:
    """`dsbd generate < in.jsonl | head -1`. Rows with an id that was used before are left out: how far ahead the input
    is read, and so whether they are warned of, is up to the clock."""
    once = folder.path / "once.jsonl"
    lines = folder.input.read_bytes().splitlines(keepends=True)
    once.write_bytes(b"".join(line for line in lines if b"twice" not in line))
    command = f"{shlex.join(folder.command)} generate --target builtin:target -i {once}"
    call = f"{command} | head -1; exit ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", call], cwd=ROOT, capture_output=True, check=False, timeout=DEADLINE_S)
    require(done.returncode == 141, f"ended with {done.returncode}: {done.stderr.decode()}")
    require(done.stdout.count(b"\n") == 1 and not done.stderr, f"said {done.stderr.decode()!r}")
    return {"fault": "closed pipe", "exit_code": done.returncode, "standard_error": ""}


def full_disk(folder: Folder) -> Result:
    """A file system that is too small (or, without the right to make one, a limit); then room is made."""
    expected = undisturbed(folder)
    limit = 60_000
    with disk(folder.path / "disk", f"size={limit}") as mount:
        ordinary, folder.output = folder.output, mount / "out.jsonl"
        cap = None if mount != folder.path else lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
        code, err = folder.finish("--quiet", preexec_fn=cap)
        require(code == 1 and err.count("\n") == 1, f"ended with {code}: {err}")
        require("cannot write" in err, f"said {err}")
        data = folder.output.read_bytes()
        require(data.endswith(b"\n"), "the last line is torn")
        rows = len(folder.records())
        for path in mount.glob("out.jsonl*"):
            if path.parent != ordinary.parent:
                shutil.copy(path, ordinary.parent)
        folder.output = ordinary
    complete(folder, expected)
    how = "tmpfs" if cap is None else "RLIMIT_FSIZE"
    return {
        "fault": f"full disk ({how})",
        "exit_code": code,
        "rows_before": rows,
        "said": err.strip().replace(str(mount), "DISK"),
    }


@contextlib.contextmanager
def disk(mount: Path, options: str) -> Iterator[Path]:
    """A file system of its own, or the parent folder where none can be mounted."""
    mount.mkdir()
    call = ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(mount)]
    mounted = (
        shutil.which("mount") is not None and subprocess.run(call, capture_output=True, check=False).returncode == 0
    )
    try:
        yield mount if mounted else mount.parent
    finally:
        if mounted:
            subprocess.run(["umount", str(mount)], check=True)


def torn_line(folder: Folder) -> Result:
    """Half a record at the end, and zeros, as a crash of the machine leaves them."""
    expected = undisturbed(folder)
    require(folder.finish("--quiet")[0] == 3, "the run failed")
    whole = {path: path.read_bytes() for path in folder.files}
    lines = whole[folder.output].splitlines(keepends=True)
    for tail in (b'{"schema": "dsbd.output/1", "index": 4, "te', b"\0" * 700, b'{"id": "\0\0\0\n'):
        for path, content in whole.items():
            path.write_bytes(content)
        folder.output.write_bytes(b"".join(lines[: len(lines) // 2]) + tail)
        complete(folder, expected, steps=False)
        folder.clear()
    return {"fault": "torn last line", "tails": 3}


def read_only_folder(folder: Folder) -> Result:
    """A folder that may not be written to is one line and exit code 1. Root may write anywhere but there."""
    with disk(folder.path / "disk", "ro") as mount:
        if mount == folder.path:
            mount.chmod(0o555)
        folder.output = mount / "out.jsonl"
        code, err = folder.finish()
        mount.chmod(0o755) if mount == folder.path else None
    require(code == 1 and err.count("\n") == 1, f"ended with {code}: {err}")
    require("cannot write" in err and ("Permission denied" in err or "Read-only" in err), f"said {err}")
    return {"fault": "read-only folder", "exit_code": 1, "said": err.strip().replace(str(mount), "DISK")}


def clock_backwards(folder: Folder) -> Result:
    """The time of day loses an hour at every look: times stay positive, log lines come at their pace."""
    summary = folder.path / "summary.json"
    clock = {"FAKE_CLOCK": "backwards", "FAKE_LOG_S": "0.05"}
    begun = time.perf_counter()
    code, err = folder.finish("--set", f"summary={summary}", row_s=0.01, environment=clock)
    seconds = time.perf_counter() - begun
    require(code == 3, f"ended with {code}: {err}")
    said = json.loads(summary.read_bytes())
    logged = [line for line in err.splitlines() if " rows, " in line and line.startswith("dsbd: 2")]
    total = said["seconds"]["total_s"]
    require(0 < total <= seconds, f"total_s is {total} of {seconds:.1f}")
    require(said["ended"] < said["started"], "the clock did not go backwards")
    require(1 <= len(logged) <= total / 0.05 + 1, f"{len(logged)} log lines in {total} s")
    folder.clear()
    return {"fault": "clock going backwards", "total_s": round(total, 1), "log_lines": len(logged)}


def second_writer(folder: Folder) -> Result:
    """A second process on the same output is refused at once; the first one goes on, and its end frees the file."""
    expected = undisturbed(folder)
    process = folder.start("--existing", "resume", "--quiet", row_s=0.5)
    wait_for(folder, 1)
    process.send_signal(signal.SIGSTOP)  # it keeps the file, however long the others take
    for more in ("resume", "overwrite"):
        code, err = folder.finish("--existing", more)
        require(code == 1 and "is being written by another process" in err, f"{more} ended with {code}: {err}")
    process.kill()
    process.communicate()
    complete(folder, expected)
    return {"fault": "second writer", "exit_code": 1}


FAULTS: dict[str, Callable[[Folder], Result]] = {
    "SIGINT": stop_by(signal.SIGINT),
    "SIGTERM": stop_by(signal.SIGTERM),
    "closed pipe": closed_pipe,
    "full disk": full_disk,
    "torn last line": torn_line,
    "read-only folder": read_only_folder,
    "clock going backwards": clock_backwards,
    "second writer": second_writer,
}


def real_engine(root: Path, rows: int) -> Folder:
    """A job for the real command, with the built-in pair or with random checkpoints."""
    from dsbd_cli.errors import ModelError
    from dsbd_cli.models.checkpoints.registry import BUILTIN, resolve

    names, pair = list(BUILTIN), "built-in"
    try:
        for name in BUILTIN:
            resolve(name)
    except ModelError:
        from tests.helpers.checkpoints import byte_level, save, wrap

        pair, tokenizer = "random", wrap(byte_level())
        for seed, role in enumerate(("target", "draft")):
            names[seed] = str(save(root / role, tokenizer=tokenizer, vocab_size=len(tokenizer), seed=seed))
    options = ("--target", names[0], "--draft", names[1], "--max-new-tokens", "24", "--dtype", "float32")
    folder = Folder(root / "kill", rows, command=(sys.executable, "-m", "dsbd_cli"), options=options, slack=1e-4)
    folder.pair = pair
    return folder


def main() -> None:
    """Run all faults and keep the report."""
    from benchmarks.common import environment, results_folder, write_results

    parser = argparse.ArgumentParser()
    parser.add_argument("--rows", type=int)
    parser.add_argument("--kills", type=int)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--real", action="store_true")
    parser.add_argument("--workers", type=int, help="kill workers on Ray, so many of them at work")
    chosen = parser.parse_args()
    rows, kills = chosen.rows or (400 if chosen.real else 2000), chosen.kills or (10 if chosen.real else 50)
    runs: list[Result] = []
    with tempfile.TemporaryDirectory(prefix="dsbd-faults-") as name:
        root = Path(name)
        root.chmod(0o755)
        begun = time.perf_counter()
        folder = real_engine(root, rows) if chosen.real else Folder(root / "kill", rows)
        if chosen.workers:
            runs.append(kill_workers(folder, kills, chosen.workers, seed=chosen.seed))
        else:
            runs.append(kill_at_random(folder, kills, seed=chosen.seed))
        runs[-1] |= {
            "pair": folder.pair,
            "largest_difference": folder.largest,
            "rows_with_other_counters": folder.other_counters,
        }
        runs[-1]["wall_s"] = round(time.perf_counter() - begun, 1)
        print(json.dumps(runs[-1]), flush=True)
        for number, fault in enumerate([] if chosen.real or chosen.workers else FAULTS.values()):
            begun = time.perf_counter()
            runs.append(fault(Folder(root / str(number), 200)))
            runs[-1]["wall_s"] = round(time.perf_counter() - begun, 1)
            print(json.dumps(runs[-1], ensure_ascii=False), flush=True)
    command = environment()["command"]
    lines = "\n".join(json.dumps(run, ensure_ascii=False) for run in runs)
    report = f"# Faults\n\n{__doc__.strip()}\n\n    {command}\n\n```\n{lines}\n```\n"
    name = "faults-real" if chosen.real else "faults-workers" if chosen.workers else "faults"
    write_results(results_folder(name), runs, report)
    print("every row exactly once, each equal to the undisturbed run's")


if __name__ == "__main__":
    main()
