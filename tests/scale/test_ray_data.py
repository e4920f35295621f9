"""`Answer` under Ray Data itself."""

from __future__ import annotations

from typing import Any

import pytest

from dsbd_cli import MethodConfig, SamplingConfig
from dsbd_cli.scale import Answer
from dsbd_cli.scale.cluster import _handlers_kept

ray = pytest.importorskip("ray")
pytest.importorskip("pyarrow", reason="needs ray[data]")
pytest.importorskip("pandas", reason="needs ray[data]")
pytestmark = pytest.mark.filterwarnings("ignore")


def test_every_row_of_a_data_set_has_an_answer_or_an_error(cluster: Any) -> None:
    """The text is that of the same id in any other run; a row without a prompt costs no other."""
    import ray.data

    options = {"method": MethodConfig(num_beams=2), "sampling": SamplingConfig(max_new_tokens=6)}
    rows = [{"id": f"r{n}", "prompt": f"question: what {n}" if n != 5 else "", "n": n} for n in range(12)]
    with _handlers_kept():
        ray.init(cluster.address, log_to_driver=False)
    try:
        ray.data.DataContext.get_current().enable_progress_bars = False
        made = ray.data.from_items(rows).map_batches(
            Answer, fn_constructor_kwargs=options, concurrency=1, batch_size=4, num_cpus=1
        )
        by_number = {row["n"]: row for row in made.take_all()}
    finally:
        ray.shutdown()
    assert sorted(by_number) == list(range(12))
    assert [n for n, row in by_number.items() if row["error"] is not None] == [5]
    wanted = Answer(**options).answer({"id": ["r3"], "prompt": ["question: what 3"]})  # type: ignore[arg-type]
    assert by_number[3]["text"] == wanted["text"][0]
