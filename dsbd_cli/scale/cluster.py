"""The Ray that holds the workers: joined or started here, watched, and ended with all its processes.

Ray's library waits for its processes for ever, or ends ours without a word. So a thread watches them. On a Ray of our
own, the log monitor, the autoscaler's monitor and the dashboard may die: nothing here needs them. The two agents of the
raylet end it when they die.
"""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import shutil
import signal
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Generator, Iterator, Mapping
from pathlib import Path

import psutil

from dsbd_cli.errors import DsbdError, UsageError, shorten
from dsbd_cli.scale.quiet import quiet

LOOPBACK = ("127.0.0.1", "::1")
TOKEN_BYTES = 32
OBJECT_STORE_BYTES = 128 << 20  # of a Ray of our own; rows and answers above 100 KB pass through it
LONGEST_TMP = 30
REACH_S = 10.0
VITAL = {"gcs_server": "GCS server", "raylet": "raylet"}  # processes that workers cannot do without, by name
MARK = "RAY_FOLDER_OF_DSBD"  # variable of the environment that all processes of a Ray of our own have
LOOK_S = 0.25  # between two looks at Ray's processes
PROBE_S = 2.0  # between two connections to the GCS server of others
PATIENCE_S = 30.0  # for the GCS server of others, which may be started again by whoever owns it
STUCK_S = 50.0  # after a death, until our process is ended; Ray would end it after 60
ENDED_S = 10.0


class Cluster:
    """A Ray of others, or one that is started here and answers nobody else.

    Attributes:
        death: what of Ray has died, as in `Ray's raylet has died`, since the last `start`; None: nothing.
    """

    def __init__(self, address: str | None, give_up: Callable[[str], None]) -> None:
        """Silence Ray until `close`. address: of a running Ray (`auto`: the one of this machine); None: start one.
        give_up: called in a thread where Ray's library holds the main thread after a death; it has to end the
        process."""
        self.death: str | None = None
        self._address, self._give_up = address, give_up
        self._over = threading.Event()  # of the watch
        self._folder: Path | None = None
        self._vital: dict[str, psutil.Process] = {}  # processes of our Ray, by name
        self._stack = contextlib.ExitStack()
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        os.environ.setdefault("RAY_SCHEDULER_EVENTS", "0")
        if address is None:  # Ray reads these variables when it is imported
            self._stack.enter_context(_environment(_loopback_environment()))
        import ray  # noqa: F401  # sets up loggers

        self._stack.enter_context(quiet())

    def start(self, cpus: int) -> list[dict[str, float]]:
        """Connect to Ray or start it, and return the resources of each of its nodes. May be called again after `stop`.

        cpus: of a Ray that is started. Raises DsbdError where Ray cannot be started or reached.
        """
        import ray

        self.death, self._over, self._vital = None, threading.Event(), {}
        if self._address is None:
            # the folder holds sockets, and a socket's path has 107 bytes at most
            short = len(tempfile.gettempdir()) <= LONGEST_TMP
            self._folder = Path(tempfile.mkdtemp(prefix="dsbd-ray-", dir=None if short else "/tmp"))
            self._watch(self._own_deaths(set(psutil.Process().children())))
            with _environment({MARK: str(self._folder)}):
                where = self._connect(
                    "Ray cannot be started",
                    num_cpus=cpus,
                    object_store_memory=OBJECT_STORE_BYTES,
                    include_dashboard=False,
                    _temp_dir=str(self._folder),
                )
            if (node := where["node_ip_address"]) not in LOOPBACK:
                raise DsbdError(f"Ray listens on {node}, where others reach it; ray 2.60 listens on 127.0.0.1 alone")
        else:
            if self._address != "auto":
                _check_reachable(self._address)
            where = self._connect(f"--workers: Ray at {self._address} cannot be reached")
            self._watch(_deaths_of_others(where["raylet_socket_name"], where["gcs_address"]))
        return [node["Resources"] for node in ray.nodes() if node["Alive"]]  # type: ignore[no-untyped-call]

    def stop(self) -> None:
        """Disconnect from Ray. One that was started here is ended, however few of its processes are left to end the
        others."""
        import ray

        if self.death is None:
            self._over.set()
        below = self._below_raylet()
        ray.shutdown()
        self._over.set()
        self._remove(below)

    def close(self) -> None:
        """Stop, and restore what was changed for Ray. May be called twice."""
        if not self._over.is_set():
            self.stop()
        self._stack.close()

    def _connect(self, failure: str, **options: object) -> dict[str, str]:
        """Call ray.init, and return its addresses. failure: beginning of the message of the DsbdError that is raised
        where it fails."""
        import ray

        quietly = {"log_to_driver": False, "logging_level": logging.CRITICAL, "configure_logging": False}
        try:
            with _handlers_kept():
                context = ray.init(self._address or "local", **quietly, **options)  # type: ignore[arg-type]
        # Ray raises an Exception of no kind where its raylet has died
        except Exception as error:
            token = "; where it asks for a token, RAY_AUTH_TOKEN has to be set here too" if self._address else ""
            raise DsbdError(f"{failure}: {shorten(_last_line(error))}{token}") from error
        return context.address_info  # type: ignore[attr-defined, no-any-return]

    # Deaths

    def _watch(self, deaths: Generator[str | None]) -> None:
        """Take one item of `deaths` after the other in a thread, until one is not None, and set `death` to it."""
        over = self._over
        stuck_s = STUCK_S if self._address is None else STUCK_S - PATIENCE_S

        def watch() -> None:
            with contextlib.closing(deaths):
                death = None
                while death is None:
                    if over.wait(LOOK_S):
                        return
                    self.death = death = next(deaths)
            if not over.wait(stuck_s):
                self._remove(psutil.Process().children(recursive=True))
                self._give_up(death)

        threading.Thread(target=watch, name="dsbd-ray", daemon=True).start()

    def _own_deaths(self, before: set[psutil.Process]) -> Generator[str | None]:
        """Yield at every look which vital process of our Ray has died. They are found as they begin. before: children
        of this process before Ray was started."""
        vital = self._vital
        while True:
            if len(vital) < len(VITAL):
                for child in set(psutil.Process().children()) - before:
                    with contextlib.suppress(psutil.Error):
                        if (name := child.name()) in VITAL:
                            vital.setdefault(name, child)
            yield next((f"Ray's {VITAL[name]} has died" for name, process in vital.items() if _ended(process)), None)

    # Processes of our own Ray

    def _below_raylet(self) -> list[psutil.Process]:
        """Return the processes that the raylet has begun, while they can be told by it: the environment of its agents
        cannot be read."""
        with contextlib.suppress(KeyError, psutil.Error):
            return list(self._vital["raylet"].children(recursive=True))
        return []

    def _remove(self, processes: list[psutil.Process]) -> None:
        """Kill these processes, and all that are left of our Ray, which a dead raylet cannot end, and remove its
        folder."""
        if self._folder is None:
            return
        for process in psutil.process_iter(["environ"]):
            if (process.info["environ"] or {}).get(MARK) == str(self._folder):
                processes.append(process)
        for process in processes:
            with contextlib.suppress(psutil.Error):
                process.kill()
        psutil.wait_procs(processes, timeout=ENDED_S)
        shutil.rmtree(self._folder, ignore_errors=True)


def _ended(process: psutil.Process) -> bool:
    try:
        return bool(process.status() == psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return True


def _deaths_of_others(raylet: str, gcs: str) -> Generator[str | None]:
    """Yield at every look whether the raylet of this machine or the GCS server of its cluster has died.

    raylet: path of its socket. One connection to it is kept, because it logs each that is closed. gcs: its address. It
    closes idle connections, so each look opens one.
    """
    host, _, port = gcs.rpartition(":")
    answered = probed = time.monotonic()
    with socket.socket(socket.AF_UNIX) as kept:
        kept.setblocking(False)
        with contextlib.suppress(OSError):
            kept.connect(raylet)
        while not _closed(kept):
            if time.monotonic() - probed >= PROBE_S:
                probed = time.monotonic()
                with contextlib.suppress(OSError):
                    socket.create_connection((host, int(port)), timeout=PROBE_S).close()
                    answered = time.monotonic()
            silence = time.monotonic() - answered
            yield None if silence < PATIENCE_S else f"Ray's GCS server at {gcs} has not answered for {silence:.0f} s"
    yield "the raylet of this machine has died"


def _closed(connection: socket.socket) -> bool:
    """Return whether the other end of a connection, which sends nothing, is gone."""
    try:
        return not connection.recv(1)
    except BlockingIOError:
        return False
    except OSError:
        return True


def _loopback_environment() -> dict[str, str]:
    """Return environment variables for a Ray of our own, whose ports are all on loopback, and which answers nobody
    without the token.

    The first is Ray's switch for clusters of several machines, which it reads on every system. The token is in no file;
    it goes to Ray's processes with their environment, which other users cannot read.
    """
    token = secrets.token_hex(TOKEN_BYTES)
    return {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0", "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": token}


@contextlib.contextmanager
def _environment(values: Mapping[str, str]) -> Iterator[None]:
    """Set these environment variables for the block, and restore what was there before."""
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


@contextlib.contextmanager
def _handlers_kept() -> Iterator[None]:
    """Restore our signal handlers after the block, in which Ray replaces them by its own."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    kept = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in kept.items():
            signal.signal(number, handler)


def _check_reachable(address: str) -> None:
    """Check that something answers at this address, because Ray itself tries for many minutes. Raises UsageError for a
    wrong address, DsbdError where nobody answers."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal() or not int(port) < 1 << 16:
        raise UsageError(f"--workers: ray is {shorten(address)}, but must be auto or HOST:PORT")
    try:
        socket.create_connection((host, int(port)), timeout=REACH_S).close()
    except OSError as error:
        raise DsbdError(f"--workers: Ray at {address} cannot be reached: {error.strerror or error}") from error


def _last_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[-1] if lines else type(error).__name__
