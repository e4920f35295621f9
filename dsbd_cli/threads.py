"""Threads of this process: how many it may use, and that idle ones sleep instead of spinning. No torch here."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, MutableMapping
from pathlib import Path

# How often a thread of OpenMP looks at a lock before it sleeps. libgomp's default of 300,000 takes longer than the time
# between two products, so that no thread slept. With other work on the machine that took three to four times the
# processor time (benchmarks/LOG.md).
SPINS = 3_000
# Products of small models end sooner. Threads that sleep after fewer looks then lose nothing, and where another process
# uses their core, they get it back at once.
SMALL_BYTES, SMALL_SPINS = 600_000_000, 700
BLOCK_MS = 1  # the same for LLVM's OpenMP, which counts in milliseconds
SPINNING = {"GOMP_SPINCOUNT": str(SPINS), "KMP_BLOCKTIME": str(BLOCK_MS)}
CHOSEN = ("OMP_WAIT_POLICY", *SPINNING)  # a user who sets one of these variables has decided

MOST_THREADS = 1024  # with some thousands OpenMP hangs or ends the process

CGROUPS, OWN_CGROUPS = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")


def wait_without_spinning(environment: MutableMapping[str, str] = os.environ) -> None:
    """Set the variables that let idle OpenMP threads sleep soon.

    Nothing is done where the user has set one of them. The call must come before torch is imported, because torch reads
    them then.
    """
    if not any(name in environment for name in CHOSEN):
        environment.update(SPINNING)


def sleep_sooner(size: int, environment: MutableMapping[str, str] = os.environ) -> None:
    """Let threads sleep sooner where the weights of a model take fewer than SMALL_BYTES, unless a user has decided.

    size: bytes of the model's files. The call must come before torch is imported, as it does in generate, bench,
    profile and programs; distill, trim-draft and doctor have imported it, so that nothing changes there.
    """
    spins = SMALL_SPINS if size < SMALL_BYTES else SPINS
    ours = [{**SPINNING, "GOMP_SPINCOUNT": str(count)} for count in (SPINS, SMALL_SPINS)]
    if {name: environment[name] for name in CHOSEN if name in environment} in ours:
        environment["GOMP_SPINCOUNT"] = str(spins)


def processors() -> int:
    """Return how many processors this process may use: those of its affinity, at most the quota of its container,
    rounded up."""
    affinity = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1  # macOS
    return max(1, math.ceil(min(affinity, quota())))


def quota(root: Path = CGROUPS, own: Path = OWN_CGROUPS) -> float:
    """Return how many processors the container's control groups allow, in cgroup v2 or v1; inf without a limit."""
    return min(_limits(root, own), default=math.inf)


def _limits(root: Path, own: Path) -> Iterator[float]:
    """Yield the limits, in processors, of this process's control groups and of all groups that contain them."""
    for line in _text(own).splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers and "cpu" not in controllers.split(","):
            continue
        tops = (root, root / "unified") if not controllers else (root / controllers, root / "cpu")
        for top in tops:
            place = top / path.lstrip("/")
            # where a container sees its own group as the root, the path of the host is not there
            for folder in (place, *place.parents):
                yield from _limit(folder, v2=not controllers)
                if folder == top:
                    break


def _limit(folder: Path, *, v2: bool) -> Iterator[float]:
    """Yield the limit of one group: microseconds of processor time in a period, over the microseconds of the period.

    Yield nothing where the group has no limit.
    """
    if v2:
        words = _text(folder / "cpu.max").split()
    else:
        words = [_text(folder / f"cpu.cfs_{name}_us").strip() for name in ("quota", "period")]
    if len(words) == 2 and all(word.isdigit() for word in words) and int(words[0]) and int(words[1]):
        yield int(words[0]) / int(words[1])


def _text(path: Path) -> str:
    """Return the text of a file; empty where it cannot be read: another system, or a group that the container does not
    show."""
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
