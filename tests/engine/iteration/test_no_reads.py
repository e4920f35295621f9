"""Inside an iteration nothing is read back to the host, but for one small tensor of counters at its end.

Guards: a tensor used as a Python number or a condition, a boolean mask used as an index, a shape that depends on data.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from dsbd_cli.config.method import MethodConfig
from dsbd_cli.config.sampling import SamplingConfig
from dsbd_cli.engine.decoding.engine import Engine
from dsbd_cli.engine.iteration import stepper as step_module
from dsbd_cli.models.transformers_backend.host_reads import HostReadCounter
from dsbd_cli.requests import Request
from tests.helpers.toys import NumberCodec, table_pair

METHODS = [
    MethodConfig(rule=rule, num_beams=3, drafts_per_layer=6, depth=3, width=width, warp_scope=scope)  # type: ignore[arg-type]
    for rule, width, scope in (
        ("coupled", "fixed", "pool"),
        ("coupled", "threshold", "beam"),
        ("rejection", "threshold", "pool"),
        ("with-replacement", "fixed", "pool"),
        ("search", "fixed", "pool"),
    )
]


ANSWERS = ("5 6 7 ", "5 6 ", "8 9 10 3 ", "3 ", "4 4 4 4 4 ")


@pytest.mark.parametrize(
    ("method", "allowed"),
    [
        *((method, some) for method in METHODS for some in ("none", "all")),
        *((method, "some") for method in METHODS[:3]),
        (METHODS[-1], "some"),
    ],
    ids=lambda value: value if isinstance(value, str) else f"{value.rule}-{value.width}-{value.warp_scope}",
)
def test_one_read_per_iteration(method: MethodConfig, allowed: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """allowed: which rows have a list of answers; in a batch of such rows alone another code looks at candidates."""
    target, draft = table_pair(1, 12, 0.5)
    engine = Engine(target, draft, NumberCodec(12, (2,)), method, batch_size=3)
    reads, reports = HostReadCounter(), []
    step, report = engine._stepper.step, step_module.read_report

    def watched(*arguments: Any) -> Any:
        with reads:
            return step(*arguments)

    def counted(*arguments: Any) -> Any:
        reports.append(arguments[0].shape)
        return report(*arguments)

    monkeypatch.setattr(engine._stepper, "step", watched)
    monkeypatch.setattr(step_module, "read_report", counted)
    sampling = SamplingConfig(max_new_tokens=10, top_k=5, top_p=0.95, min_p=0.01)
    sampling = sampling if allowed == "all" else replace(sampling, stop=("7 7",))
    warped = SamplingConfig(max_new_tokens=10) if method.rule == "search" else sampling
    lists = [ANSWERS if allowed == "all" or (allowed == "some" and i % 2) else None for i in range(6)]
    requests = [
        Request(id=str(i), seed=i, prompt_ids=(1, i), sampling=replace(warped, stop=()) if own else warped, allow=own)
        for i, own in enumerate(lists)
    ]
    if allowed == "none":  # rows with ends and beams of their own
        own = {"ignore_eos": True, "early_stopping": "never"}
        beams = 2 if method.rule in ("coupled", "search") and method.width == "fixed" else None
        requests[::2] = [replace(row, sampling=replace(row.sampling, **own, num_beams=beams)) for row in requests[::2]]
    results = list(engine.run(requests))
    assert all(result.hypotheses for result in results)
    assert reads.operations > (500 if allowed == "all" else 1000)
    assert not reads.counts, reads.counts
    assert len(reports) >= max(result.stats.target_calls for result in results)


def test_the_counter_counts() -> None:
    with HostReadCounter() as reads:
        x = torch.arange(4)
        float(x.sum())
        x[x > 2]
        x.nonzero()
    assert sum(reads.counts.values()) >= 3
