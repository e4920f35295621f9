"""`dsbd` as a process: pipes, signals, full disks, start-up."""

from __future__ import annotations

import fcntl
import json
import os
import resource
import signal
import subprocess
import sys
import termios
import time
import weakref
from collections.abc import Callable
from pathlib import Path

import pytest

from dsbd_cli import __version__
from dsbd_cli.cli.run.signals import StoppedError, StopSignals
from tests.cli.conftest import pipe, read, terminal

Start = Callable[..., subprocess.Popen[bytes]]

ROOT = Path(__file__).parents[2]
ROW = b'{"prompt": "a"}\n'
DEADLINE = 600  # only so that a fault does not hang the suite


def finish(process: subprocess.Popen[bytes], data: bytes | None = None) -> tuple[int, bytes, bytes]:
    out, err = process.communicate(data, timeout=DEADLINE)
    return process.returncode, out, err


def wait_for(process: subprocess.Popen[bytes], line: bytes) -> bytes:
    """Read standard error up to this line."""
    seen = b""
    for read_line in iter(pipe(process.stderr).readline, b""):
        seen += read_line
        if read_line == line:
            return seen
    raise AssertionError(f"{line!r} never came: {seen!r}")


def test_what_is_printed_is_utf8_whatever_the_locale(start: Start) -> None:
    """Guards a traceback in place of tables, after all has been measured."""
    code, out, _ = finish(start("pick", "--help", env={**os.environ, "PYTHONIOENCODING": "ascii"}))
    assert code == 0
    assert "\u256d" in out.decode()


def test_a_name_of_a_file_is_printed_with_its_bytes(start: Start, tmp_path: Path) -> None:
    own = os.fsencode(tmp_path) + b"/\xff.toml"
    environment = {**os.environ, "DSBD_MODELS_FILE": os.fsdecode(own)}
    code, out, err = finish(start("models", "add", "mine", "org/mine", env=environment))
    assert (code, out.count(own)) == (0, 1), err


def test_a_pipe_through_another_program(start: Start) -> None:
    code, out, err = finish(start("generate"), ROW * 3)
    assert (code, err) == (0, b"")
    assert [json.loads(line)["index"] for line in out.splitlines()] == [0, 1, 2]


def test_every_record_is_written_as_soon_as_it_is_done(start: Start) -> None:
    """Guards against buffering: the producer waits for each answer before it sends the next line."""
    process = start("generate", "--batch-size", "1")
    for line, expected in ((ROW, "text"), (b"broken\n", "error"), (ROW, "text")):
        pipe(process.stdin).write(line)
        pipe(process.stdin).flush()
        assert expected in json.loads(pipe(process.stdout).readline())
    code, out, err = finish(process)
    assert (code, out) == (3, b"")
    assert b"1 failed" in err


def test_a_closed_output_ends_quietly(start: Start) -> None:
    """`dsbd generate | head -1`: far more rows than a pipe holds, and a reader that leaves."""
    process = start("generate", stdin=subprocess.DEVNULL)
    assert finish(process)[0] == 0
    process = start("generate")
    feeder = subprocess.Popen(
        [sys.executable, "-c", f"import sys; sys.stdout.buffer.write({ROW!r} * 2000)"], stdout=process.stdin
    )
    pipe(process.stdin).close()
    process.stdin = None
    assert json.loads(pipe(process.stdout).readline())["index"] == 0
    pipe(process.stdout).close()
    process.stdout = None
    code, _, err = finish(process)
    assert (code, err) == (141, b""), "as every filter that SIGPIPE ends"
    assert feeder.wait(DEADLINE) in (0, 1, 120)


@pytest.mark.parametrize("arguments", ["models", "--help", "generate --help"])
def test_lists_that_nobody_reads_end_quietly(arguments: str) -> None:
    command = [sys.executable, "-m", "dsbd_cli", *arguments.split()]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    pipe(process.stdout).close()  # long before it writes
    process.stdout = None
    code, _, err = finish(process)
    assert (code, err) == (0, b"")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_an_interrupt_keeps_what_is_written(start: Start, number: signal.Signals) -> None:
    """The slow row has many iterations: guards against a run that ends a row or a batch first."""
    process = start("generate", "--batch-size", "1", "--set", "log=verbose")
    pipe(process.stdin).write(ROW + b'{"prompt": "slow"}\n')
    pipe(process.stdin).flush()
    first = pipe(process.stdout).readline()
    begun = wait_for(process, b"fake: slow begins\n")
    process.send_signal(number)
    code, out, err = finish(process)
    err = begun + err
    assert (code, out) == (128 + number, b"")
    assert b"fake: slow ends" not in err
    assert json.loads(first)["index"] == 0
    assert b"dsbd: stopping after this iteration; Ctrl-C or SIGTERM once more stops at once\n" in err
    assert b"dsbd: stopped: 1 row," in err
    assert b"Traceback" not in err


def test_a_hangup_that_is_said_twice_stops_as_one(start: Start) -> None:
    """Guards the footer of a Parquet file and the summary: a shell and the kernel each send one."""
    process = start("generate", "--batch-size", "1")
    pipe(process.stdin).write(b'{"prompt": "slow"}\n')
    pipe(process.stdin).flush()
    wait_for(process, b"fake: slow begins\n")
    process.send_signal(signal.SIGHUP)
    wait_for(process, b"dsbd: stopping after this iteration; Ctrl-C or SIGTERM once more stops at once\n")
    process.send_signal(signal.SIGHUP)
    code, _, err = finish(process)
    assert code == 128 + signal.SIGHUP
    assert b"dsbd: stopped: 0 rows; what is written is complete" in err


def test_under_nohup_the_end_of_a_terminal_stops_nothing(start: Start) -> None:
    """nohup has SIGHUP ignored, which stays so."""
    process = start("generate", "--batch-size", "1", preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_IGN))
    for _ in range(2):
        pipe(process.stdin).write(ROW)
        pipe(process.stdin).flush()
        assert b"text" in pipe(process.stdout).readline()
        process.send_signal(signal.SIGHUP)
    assert finish(process) == (0, b"", b"")


def own_terminal() -> None:
    """Take standard error as the terminal of a process, which hears when it goes away."""
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    fcntl.ioctl(2, termios.TIOCSCTTY, 0)


def test_a_terminal_that_goes_away_leaves_whole_records(start: Start, tmp_path: Path) -> None:
    """Its window is closed while a row is at work: what is written is whole, and the run is gone on with. Standard
    error leads nowhere then, and the live line is drawn on it."""
    output = tmp_path / "out.jsonl"
    with terminal(80) as (ours, theirs):
        process = start(
            "generate", "--batch-size", "1", "-o", str(output),
            stdin=subprocess.PIPE, stderr=theirs, start_new_session=True,
            preexec_fn=own_terminal,
        )  # fmt: skip
        os.close(theirs)
        pipe(process.stdin).write(ROW + b'{"prompt": "slow"}\n')
        pipe(process.stdin).flush()
        read(ours, until="fake: slow begins")
    assert finish(process)[0] == 128 + signal.SIGHUP
    assert [json.loads(line)["index"] for line in output.read_bytes().splitlines()] == [0]
    again = start("generate", "-o", str(output), "--existing", "resume")
    assert finish(again, ROW + b'{"prompt": "b"}\n')[0] == 0
    assert len(output.read_bytes().splitlines()) == 2


def test_a_second_interrupt_ends_at_once(start: Start) -> None:
    process = start("generate", "--batch-size", "1")
    pipe(process.stdin).write(ROW + b'{"prompt": "stubborn"}\n')
    pipe(process.stdin).flush()
    pipe(process.stdout).readline()
    wait_for(process, b"fake: stubborn begins\n")
    process.send_signal(signal.SIGINT)
    wait_for(process, b"dsbd: stopping after this iteration; Ctrl-C or SIGTERM once more stops at once\n")
    assert process.poll() is None
    process.send_signal(signal.SIGINT)
    code, _, err = finish(process)
    assert (code, b"fake: stubborn ends" in err) == (-signal.SIGINT, False)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
@pytest.mark.parametrize("way", ["stdout", "--output"])
def test_a_full_device_is_an_error_of_the_run(start: Start, way: str) -> None:
    with Path("/dev/full").open("wb") as full:
        process = start("generate", stdout=full) if way == "stdout" else start("generate", "-o", "/dev/full")
        code, _, err = finish(process, ROW)
    assert code == 1
    assert err.startswith(b"dsbd: error: cannot write ")
    assert b"No space left on device" in err
    assert err.count(b"\n") == 1


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
@pytest.mark.parametrize("command", ["schema", "models", "--help", "--version", "generate --print-config"])
def test_a_full_device_behind_standard_output_is_an_error_of_every_command(start: Start, command: str) -> None:
    with Path("/dev/full").open("wb") as full:
        code, _, err = finish(start(*command.split(), stdout=full))
    assert (code, err) == (1, b"dsbd: error: cannot write standard output: No space left on device\n")


def test_a_full_disk_leaves_whole_lines(start: Start, tmp_path: Path) -> None:
    """The limit cuts the second record in the middle; its half must not stay in the file."""
    output = tmp_path / "out.jsonl"
    _, record, _ = finish(start("generate"), ROW)
    finish(start("generate", "-o", str(tmp_path / "first.jsonl")), ROW)
    settings = next(tmp_path.glob("first.jsonl.*")).stat().st_size  # written first, and must fit
    limit = max(len(record) + 50, settings + 50)
    assert limit < 2 * len(record)
    process = start(
        "generate",
        "-o",
        str(output),
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit)),
    )
    code, _, err = finish(process, ROW * 3)
    assert code == 1
    assert b"File too large; the lines before are complete" in err
    assert output.read_bytes().count(b"\n") == 1
    assert json.loads(output.read_bytes())["index"] == 0


def test_start_up_imports_neither_torch_nor_transformers() -> None:
    """One process for all command lines: what one of them imports is not there before it."""
    lines = (
        "--help",
        "generate --help",
        "--version",
        "generate --top-p 2",
        "generate --print-config",
        "models",
        "models --help",
    )
    code = (
        "import sys, runpy\n"
        "codes, names = [], {'torch', 'transformers', 'numpy', 'dsbd_cli.engine.decoding.engine'}\n"
        f"for line in {lines!r}:\n"
        "    sys.argv[1:] = line.split()\n"
        "    try: runpy.run_module('dsbd_cli', run_name='__main__')\n"
        "    except SystemExit as ended: codes.append(ended.code)\n"
        "    heavy = names & set(sys.modules)\n"
        "    if heavy: sys.exit(f'{line} imported {heavy}')\n"
        "sys.exit(0 if codes == [0, 0, 0, 2, 0, 0, 0] else f'ended with {codes}')\n"
    )
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, check=False, capture_output=True, text=True, cwd=ROOT, stdin=subprocess.DEVNULL)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("module", ["dsbd_cli.cli.app", "typer", "torch", "transformers"])
def test_an_interrupt_during_start_is_one_line(module: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The signal comes as the module begins to be imported; transformers only at a first load."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    code = (
        "import runpy, signal, sys\n"
        "class Interrupting:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        f"        if name == {module!r}:\n"
        "            sys.meta_path.remove(self)\n"
        "            signal.raise_signal(signal.SIGINT)\n"
        "sys.meta_path.insert(0, Interrupting())\n"
        "runpy.run_module('dsbd_cli', run_name='__main__')\n"
    )
    command = [sys.executable, "-c", code, "generate"]
    done = subprocess.run(command, check=False, capture_output=True, text=True, cwd=ROOT, input='{"prompt": "a"}\n')
    assert (done.returncode, done.stdout) == (130, "")
    assert done.stderr == "dsbd: stopped before there was a result\n"


def test_an_interrupt_that_a_library_turns_into_an_error_is_still_one() -> None:

    def load() -> None:
        with StopSignals():
            try:
                signal.raise_signal(signal.SIGINT)
            except StoppedError:
                raise RuntimeError("failed to import") from None

    with pytest.raises(StoppedError) as stopped:
        load()
    assert stopped.value.exit_code == 130


def test_version_and_bare_command(start: Start) -> None:
    assert finish(start("--version"))[:2] == (0, f"dsbd {__version__}\n".encode())
    code, out, _ = finish(start())
    assert code == 2
    assert b"generate" in out


def test_closed_standard_streams_are_named(start: Start) -> None:
    shell = "exec {python} -m tests.helpers.fake generate {redirect}"
    for redirect, message in (("<&-", b"standard input is closed"), (">&- </dev/null", b"standard output is closed")):
        command = shell.format(python=sys.executable, redirect=redirect)
        done = subprocess.run(["/bin/sh", "-c", command], capture_output=True, check=False, cwd=ROOT)
        assert done.returncode in (1, 2)
        assert message in done.stderr


class _Gone:
    pass


def test_a_signal_in_a_callback_is_not_lost(capsys: pytest.CaptureFixture[str]) -> None:
    """Guards Ctrl-C while LLVM compiles: Python drops an exception that a callback raises."""
    gone = [_Gone()]
    kept = weakref.ref(gone[0], lambda _: os.kill(os.getpid(), signal.SIGINT))

    def stopped() -> None:
        with StopSignals() as signals:
            gone.clear()
            assert kept() is None
            assert signals.number == signal.SIGINT
            time.sleep(DEADLINE)

    with pytest.raises(StoppedError):
        stopped()
    assert capsys.readouterr().err == ""
    assert signal.getitimer(signal.ITIMER_REAL) == (0, 0)
