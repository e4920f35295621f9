"""Peak memory and the environment's record."""

from __future__ import annotations

import mmap
import subprocess
from pathlib import Path

import pytest
import torch

import dsbd_cli
from dsbd_cli.lab.metrics.environment import PACKAGE, cpu_name, environment, own_commit
from dsbd_cli.lab.metrics.memory import PeakMemory, peak_rss_bytes

MIB = 2**20


def test_the_peak_of_a_window_is_its_own() -> None:
    memory = PeakMemory(torch.device("cpu"))
    memory.start()
    if memory.peak() is None:
        pytest.skip("this system cannot reset a peak")
    with mmap.mmap(-1, 80 * MIB) as held:  # an allocator may keep what it was given back
        for page in range(0, len(held), mmap.PAGESIZE):
            held[page] = 1
        high = memory.peak()
    memory.start()
    low = memory.peak()
    assert high is not None
    assert low is not None
    assert high - low > 60 * MIB
    assert memory.source == "rss"


def test_without_a_way_to_reset_there_is_no_peak_of_a_window(tmp_path: Path) -> None:
    (tmp_path / "status").write_text("Name:\tx\nVmHWM:\t  2048 kB\n")
    memory = PeakMemory(torch.device("cpu"), tmp_path / "missing")
    memory.start()
    assert memory.peak() is None
    assert peak_rss_bytes(tmp_path) == 2 * MIB


def test_the_environment_names_command_versions_and_machine(tmp_path: Path) -> None:
    facts = environment(["bench", "--task", "a b"], "cpu")
    assert facts["command"] == "dsbd bench --task 'a b'"
    assert facts["threads"] == torch.get_num_threads()
    versions = facts["versions"]
    assert isinstance(versions, dict)
    assert {"dsbd", "python", "torch", "transformers"} <= versions.keys()
    (tmp_path / "cpuinfo").write_text("processor : 0\nmodel name\t: Fast One\n")
    assert cpu_name(tmp_path / "cpuinfo") == "Fast One"


def test_the_commit_is_that_of_a_tracked_folder(tmp_path: Path) -> None:
    def git(*arguments: str) -> None:
        identity = ["-c", "user.name=x", "-c", "user.email=x@x"]
        subprocess.run(["git", *identity, "-C", str(tmp_path), *arguments], check=True, capture_output=True)

    git("init")
    (tmp_path / "__init__.py").write_text("")
    assert own_commit(tmp_path) is None
    git("add", "__init__.py")
    git("commit", "-m", "one")
    clean = own_commit(tmp_path)
    assert clean is not None
    assert not clean.endswith("+")
    (tmp_path / "__init__.py").write_text("x = 1\n")
    assert own_commit(tmp_path) == f"{clean}+"
    assert Path(dsbd_cli.__file__).parent == PACKAGE  # a change anywhere in the package counts
