"""A few configurations of benchmarks/fuzz.py, which runs for hours: rows of random batches get what they get alone."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.fuzz import FILE, Fuzzer, Said
from dsbd_cli import Request, SamplingConfig
from dsbd_cli.engine.decoding.engine import Engine
from dsbd_cli.ops.select import quantize_missing

FAMILIES = ("llama", "phi3")


@pytest.mark.filterwarnings("ignore")
def test_rows_of_random_batches_get_what_they_get_alone(tmp_path: Path) -> None:
    fuzzer = Fuzzer(tmp_path, families=FAMILIES, most_beams=5)
    for number in range(6):
        fuzzer.run(5, number)
    assert fuzzer.differences == []
    assert fuzzer.refused == {}
    assert fuzzer.rows > 15


@pytest.mark.skipif(quantize_missing("int4") is not None, reason="no kernel of int4 on this processor")
@pytest.mark.filterwarnings("ignore")
def test_rows_of_quantised_files_get_what_they_get_alone(tmp_path: Path) -> None:
    fuzzer = Fuzzer(tmp_path, families=(FILE,), most_beams=3)
    for number in range(2):
        fuzzer.run(1, number)
    assert fuzzer.differences == []
    assert (fuzzer.refused, fuzzer.unpromised) == ({}, 0)
    assert fuzzer.rows > 5


@pytest.mark.filterwarnings("ignore")
def test_a_row_that_differs_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards a comparison that compares nothing: here another prompt is answered alone."""
    fuzzer = Fuzzer(tmp_path, families=("llama",), most_beams=3)
    alone = fuzzer._alone

    def elsewhere(engine: Engine, request: Request) -> Said:
        return alone(
            engine, Request(id=request.id, seed=1, prompt_ids=(9, 9), sampling=SamplingConfig(max_new_tokens=1))
        )

    monkeypatch.setattr(fuzzer, "_alone", elsewhere)
    fuzzer.run(5, 0)
    assert len(fuzzer.differences) > 1
    assert "python -m benchmarks.fuzz --seed 5 --configurations 1" in fuzzer.differences[0]
    assert f"{fuzzer.rows} rows compared, {len(fuzzer.differences)} differ" in fuzzer.line(0.0)
