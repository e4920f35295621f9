"""Options of several processes that cannot be used are refused before anything starts; and how many rows are read."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path

import pytest

from dsbd_cli.cli.options.options import TalkOptions
from dsbd_cli.cli.run.progress import Reporter
from dsbd_cli.errors import InvalidRowError
from dsbd_cli.requests import MOST_FAILED, NumberedRequests
from dsbd_cli.scale.window import Window
from dsbd_cli.scale.workers import RayEngine, cpus_each
from tests.cli.conftest import Outcome, dsbd

__all__ = ["dsbd"]

Dsbd = Callable[..., Outcome]

REFUSED = [
    (("--workers", "0"), "--workers is '0', but must be a number from 1, a range such as 4..32, or auto"),
    (("--workers", "4..2"), "--workers is '4..2', but must be"),
    (("--workers", "many"), "--workers is 'many', but must be"),
    (("--workers", "2,ray=ray://head:10001"), "the command has to run inside the cluster"),
    (("--workers", "2,ray=head"), "ray is 'head', but must be auto or HOST:PORT"),
    (("--workers", "2,timeout=0"), "timeout is 0, but must be 1 or more"),
    (("--workers", "2,gpus=0"), "gpus is 0, but must be 1 or more"),
    (("--workers", "2", "--device", "cuda:1"), "each worker has GPUs of its own, counted from 0: drop it"),
    (("--workers", "2,gpus=1", "--device", "cpu"), "would do nothing with --device cpu"),
    (("--workers", "2,gpus=1", "--set", "tensor-parallel=2"), "give as many or more"),
    (("--workers", "2", "--batch-size", "auto"), "--batch-size auto cannot be used with --workers"),
    (("--workers", "2,nodes=1"), "there is no setting 'nodes': it is spelled NUMBER[,ray=...,gpus=...,timeout=...]"),
]


@pytest.mark.parametrize(("options", "message"), REFUSED, ids=[" ".join(options) for options, _ in REFUSED])
def test_a_pair_of_options_that_cannot_work(dsbd: Dsbd, options: tuple[str, ...], message: str) -> None:
    pytest.importorskip("ray")
    done = dsbd("generate", *options, lines=[{"prompt": "a"}])
    assert (done.code, done.out) == (2, "")
    assert message in done.err


def test_without_ray_the_extra_is_named(dsbd: Dsbd, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    done = dsbd("generate", "--workers", "2", lines=[{"prompt": "a"}])
    assert done.code == 2
    assert "--workers needs ray: pip install 'dsbd[ray]'" in done.err


def test_a_ray_that_is_not_there_is_one_line(dsbd: Dsbd) -> None:
    """Guards against Ray's own attempts, which last ten minutes."""
    pytest.importorskip("ray")
    done = dsbd("generate", "--workers", "2,ray=127.0.0.1:1", lines=[{"prompt": "a"}])
    assert done.code == 1
    assert "Ray at 127.0.0.1:1 cannot be reached: Connection refused" in done.err


def test_the_line_of_progress_has_the_workers() -> None:
    made = Reporter(TalkOptions(quiet=True), Path("out.jsonl"), says_why=True)
    made.note = lambda: "2 of 2 workers, 1 death"
    assert made._progress_line().endswith(", 2 of 2 workers, 1 death")


@pytest.mark.parametrize(
    ("nodes", "workers", "each"),
    [([8], 2, 4), ([8], 3, 2), ([2, 1], 1, 2), ([6, 2], 2, 3), ([6, 2], 4, 2), ([4, 4, 4], 3, 4), ([1], 4, 1)],
)
def test_a_worker_asks_for_no_more_than_a_node_has(nodes: list[int], workers: int, each: int) -> None:
    """Guards runs on several nodes: a worker that asked for its share of all of them waited for ever."""
    assert cpus_each(nodes, workers) == each
    assert sum(node // each for node in nodes) >= workers or each == 1


@pytest.mark.parametrize("ahead", [None, 10_000])
def test_results_of_rows_that_have_failed_go_out_before_all_are_read(ahead: int | None) -> None:
    engine, window = RayEngine.__new__(RayEngine), Window(8, ahead)
    window.join(0)
    engine._window = window
    assert engine._read(NumberedRequests(InvalidRowError("bad") for _ in range(2000)))
    assert len(list(window.ready())) == MOST_FAILED
