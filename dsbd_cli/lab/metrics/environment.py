"""The origin of a measured number: versions, device, processor, threads, commit, command line."""

from __future__ import annotations

import platform
import shlex
import subprocess
from collections.abc import Sequence
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from dsbd_cli._version import __version__
from dsbd_cli.errors import as_utf8

PACKAGES = ("torch", "transformers", "tokenizers", "numpy")
CPUINFO = Path("/proc/cpuinfo")
PACKAGE = Path(__file__).parents[2]  # the folder of dsbd_cli


def environment(command: Sequence[str], device: str) -> dict[str, object]:
    """Return what is stored with a result so that it can be interpreted later.

    command: the arguments as typed, without the program. device: as torch names it.
    """
    import torch

    on_gpu = device.startswith("cuda")
    return {
        "command": as_utf8(shlex.join(["dsbd", *command])),
        "date": datetime.now(UTC).isoformat(timespec="seconds").replace("+00:00", "Z"),
        "commit": own_commit(),
        "versions": versions(),
        "device": torch.cuda.get_device_name(device) if on_gpu else cpu_name(),
        "device_kind": "gpu" if on_gpu else "cpu",
        "cpu": cpu_name(),
        "threads": torch.get_num_threads(),
        "system": f"{platform.system()} {platform.machine()}",
    }


def versions() -> dict[str, str | None]:
    """Return the installed version of each package; None for a package that is not installed."""
    versions_of: dict[str, str | None] = {"dsbd": __version__, "python": platform.python_version()}
    return versions_of | {name: installed(name) for name in PACKAGES}


def installed(package: str) -> str | None:
    """Return the version of a package; None where it is not installed."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def cpu_name(cpuinfo: Path = CPUINFO) -> str:
    """Return the processor's name as the system reports it."""
    if cpuinfo.is_file():
        for line in cpuinfo.read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


def own_commit(folder: Path = PACKAGE) -> str | None:
    """Return the short commit of the git tree this code runs from; None outside one. A `+` is added where tracked files
    in `folder` differ from it.

    An installed copy that merely lies inside somebody's tree does not have that tree's commit.
    """
    tracked = _git(folder, "ls-files", "--error-unmatch", "__init__.py")
    commit = _git(folder, "rev-parse", "--short", "HEAD") if tracked is not None else None
    if commit is None:
        return None
    return commit + ("+" if _git(folder, "status", "--porcelain", "--untracked-files=no", ".") else "")


def _git(folder: Path, *arguments: str) -> str | None:
    try:
        done = subprocess.run(
            ["git", "-C", str(folder), *arguments], capture_output=True, text=True, check=True, timeout=10
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()
