"""Threads: a container's quota of processors counts, and who waits sleeps, unless the user has decided."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import dsbd_cli
from dsbd_cli import threads
from dsbd_cli.errors import UsageError
from dsbd_cli.threads import (
    SMALL_BYTES,
    SMALL_SPINS,
    SPINNING,
    SPINS,
    processors,
    quota,
    sleep_sooner,
    wait_without_spinning,
)
from tests.helpers.checkpoints import save


def write(root: Path, **files: str) -> None:
    """Files of a group, `/` in a name written as `__`."""
    for name, text in files.items():
        path = root / name.replace("__", "/").replace("_max", ".max").replace("cpu_cfs", "cpu.cfs")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def groups(folder: Path, text: str) -> Path:
    own = folder / "cgroup"
    own.write_text(text)
    return own


def test_the_lowest_quota_of_cgroup_v2_counts(tmp_path: Path) -> None:
    """Guards a container of two processors on a machine of 64, and a limit of the group around it."""
    own = groups(tmp_path, "0::/pod/container\n")
    write(tmp_path, pod__container__cpu_max="max 100000\n")
    assert quota(tmp_path, own) == math.inf
    write(tmp_path, pod__cpu_max="350000 100000\n")
    assert quota(tmp_path, own) == 3.5
    write(tmp_path, pod__container__cpu_max="150000 100000\n")
    assert quota(tmp_path, own) == 1.5


def test_a_container_that_sees_its_own_group_as_the_root(tmp_path: Path) -> None:
    own = groups(tmp_path, "0::/somewhere/on/the/host\n")
    write(tmp_path, cpu_max="200000 100000\n")
    assert quota(tmp_path, own) == 2.0


def test_a_quota_of_cgroup_v1_counts(tmp_path: Path) -> None:
    own = groups(tmp_path, "4:memory:/a\n3:cpu,cpuacct:/a\n0::/\n")
    write(tmp_path, cpu__a__cpu_cfs_quota_us="-1\n", cpu__a__cpu_cfs_period_us="100000\n")
    assert quota(tmp_path, own) == math.inf
    write(tmp_path, cpu__a__cpu_cfs_quota_us="400000\n")
    assert quota(tmp_path, own) == 4.0


def test_no_groups_are_no_limit(tmp_path: Path) -> None:
    assert quota(tmp_path, tmp_path / "none") == math.inf


@pytest.mark.parametrize(("limit", "expected"), [(math.inf, 8), (2.5, 3), (0.2, 1), (40.0, 8)])
def test_processors_are_those_of_affinity_and_quota(
    limit: float, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(8)), raising=False)
    monkeypatch.setattr(threads, "quota", lambda: limit)
    assert processors() == expected


def test_waiting_is_left_to_a_user_who_has_decided() -> None:
    for chosen in ({"OMP_WAIT_POLICY": "active"}, {"GOMP_SPINCOUNT": "9"}, {"KMP_BLOCKTIME": "9"}):
        environment = dict(chosen)
        wait_without_spinning(environment)
        assert environment == chosen
    environment = {"OMP_NUM_THREADS": "2"}
    wait_without_spinning(environment)
    assert environment == {"OMP_NUM_THREADS": "2", **SPINNING}


def test_threads_of_small_models_sleep_sooner() -> None:
    environment = dict(SPINNING)
    for size, spins in ((SMALL_BYTES - 1, SMALL_SPINS), (SMALL_BYTES, SPINS), (0, SMALL_SPINS)):
        sleep_sooner(size, environment)
        assert environment == {**SPINNING, "GOMP_SPINCOUNT": str(spins)}
    for chosen in (
        {},
        {"GOMP_SPINCOUNT": str(SPINS)},
        {**SPINNING, "OMP_WAIT_POLICY": "passive"},
        {"KMP_BLOCKTIME": "1"},
    ):
        environment = dict(chosen)
        sleep_sooner(0, environment)
        assert environment == chosen


def test_the_command_decides_before_torch_is_imported() -> None:
    """Guards an import that comes first: OpenMP reads the variable once."""
    code = (
        "import sys, os\n"
        "from dsbd_cli import __main__\n"
        "from dsbd_cli.cli import app\n"
        "app.main = lambda: print('torch' in sys.modules, os.environ.get('GOMP_SPINCOUNT'))\n"
        "__main__.main()\n"
    )
    environment = {name: value for name, value in os.environ.items() if name not in threads.CHOSEN}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", SPINNING["GOMP_SPINCOUNT"]]


@pytest.mark.parametrize("command", ["generate", "bench", "profile"])
def test_commands_load_before_torch_is_imported(command: str, tmp_path: Path) -> None:
    """Guards an import that comes first: the size of the model would decide nothing."""
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "a"}\n')
    code = (
        "import sys\n"
        "from dsbd_cli import loading\n"
        "def asked(size):\n"
        "    print('torch' in sys.modules, size > 0)\n"
        "    raise KeyboardInterrupt\n"
        "loading.sleep_sooner = asked\n"
        f"sys.argv = ['dsbd', {command!r}, '--input', {str(prompts)!r}]\n"
        "from dsbd_cli.cli import app\n"
        "app.main()\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stdout.split() == ["False", "True"], done.stderr


def test_an_engine_takes_the_threads_that_it_is_given(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a tiny model, because each number of threads has checks of its own."""
    target = save(tmp_path)
    before = torch.get_num_threads()
    try:
        engine = dsbd_cli.load(target, None, threads=3)
        assert engine.info is not None
        assert (torch.get_num_threads(), engine.info.threads) == (3, 3)
        monkeypatch.setenv("OMP_NUM_THREADS", "3")
        monkeypatch.setattr("dsbd_cli.loading.processors", lambda: 2)
        assert dsbd_cli.load(target, None).info.threads == 3  # type: ignore[union-attr]
        monkeypatch.delenv("OMP_NUM_THREADS")
        assert dsbd_cli.load(target, None).info.threads == 2  # type: ignore[union-attr]
    finally:
        torch.set_num_threads(before)


def test_no_threads_are_refused() -> None:
    with pytest.raises(UsageError, match="threads is 0, but must be between 1 and 1024"):
        dsbd_cli.load(draft=None, threads=0)
