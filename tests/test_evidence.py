"""README's first table, from runs as they are kept: no engine is started here."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from benchmarks import evidence
from benchmarks.evidence import CELLS

MODEL = Path("models/some")
ENGINES = evidence.ENGINES["int8"]
ONE, FOUR = CELLS[0], CELLS[1]


def runs(engines: tuple[str, ...] = ENGINES, **seconds: float) -> list[dict[str, Any]]:
    """Return a run of each engine in each of two cells, but of llama.cpp only in that with one beam."""
    return [
        {"model": MODEL.name, "engine": engine, **cell._asdict(), "seconds": seconds.get(engine, 10.0), "memory": 10**9}
        for cell in (ONE, FOUR)
        for engine in evidence.able(engines, cell.beams)
    ]


def test_engines_are_asked_for_beams_that_they_have() -> None:
    assert evidence.able(ENGINES, 1) == list(ENGINES)
    assert "onnxruntime-int8" not in evidence.able(ENGINES, 50)
    assert evidence.able(ENGINES, 4) == [engine for engine in ENGINES if engine != "llama.cpp-int8"]


def test_cells_are_named_by_place_or_by_what_is_asked() -> None:
    assert evidence.chosen(None) == CELLS
    assert [(cell.beams, cell.prompts, cell.length) for cell in evidence.chosen("2,50x8x2500")] == [
        (4, 1, 50),
        (50, 8, 2500),
    ]
    assert len({(cell.beams, cell.prompts, cell.length) for cell in evidence.chosen("grid")}) == 36
    with pytest.raises(SystemExit, match="--cells 4x7x50 is no cell: they are 1x1x50"):
        evidence.chosen("4x7x50")


def test_a_cell_that_an_engine_lacks_is_a_dash_and_no_peer() -> None:
    records = runs(**{"dsbd-int8": 4.0, "llama.cpp-int8": 8.0})
    records += [{"model": MODEL.name, "engine": "dsbd-int8", "start": 2.5}]
    text, readme = evidence.report(MODEL, records, ENGINES, (ONE, FOUR), "int8")
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in text.splitlines() if line.startswith("|")]
    column = rows[0].index("llama.cpp-int8")
    of = {row[0]: row for row in rows}
    assert (of[ONE.name][column], of[FOUR.name][column]) == ("8.0", "-")
    assert (of[ONE.name][-1], of[FOUR.name][-1]) == ("2.00", "2.50")
    assert (of["dsbd-int8"], of["llama.cpp-int8"]) == (["dsbd-int8", "2.5", "1.0"], ["llama.cpp-int8", "-", "1.0"])
    assert [line.split("|")[3].strip() for line in readme.splitlines()[2:]] == ["llama.cpp 8.0", "OpenVINO 6.4"]


def test_answers_that_ended_early_are_told() -> None:
    records = runs()
    assert "ended early" not in evidence.report(MODEL, records, ENGINES, (ONE, FOUR), "int8")[0]
    records[1]["short"] = 2
    assert f"not: 2 of {records[1]['engine']}." in evidence.report(MODEL, records, ENGINES, (ONE, FOUR), "int8")[0]


def test_a_cell_that_no_peer_has_is_told_all_the_same() -> None:
    text, readme = evidence.report(MODEL, runs(), ("dsbd-int8", "llama.cpp-int8"), (ONE, FOUR), "int8")
    assert f"| {FOUR.name} " in text
    assert FOUR.name not in readme
    assert evidence.report(MODEL, runs(), ("dsbd-int8",), (ONE,), "int8")[1] == ""


def test_the_picture_is_drawn_without_it(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    evidence.figure(tmp_path / "speed.png", MODEL, runs(), ENGINES, (ONE, FOUR))
    assert (tmp_path / "speed.png").stat().st_size > 0
    evidence.figure(tmp_path / "none.png", MODEL, runs(), ENGINES, (FOUR._replace(prompts=8),))
    assert not (tmp_path / "none.png").exists()


def test_engines_are_compared_round_by_round() -> None:
    """Memory was slower in the middle round, and the medians would say that the peer is ahead."""
    records = []
    for mine, theirs in ((1.8, 2.4), (2.8, 3.1), (2.7, 2.5)):
        records += runs(**{"dsbd-int8": mine, "openvino-int8": theirs})
    assert evidence.middle(records, "openvino-int8", ONE) == 2.5
    text, _ = evidence.report(MODEL, records, ENGINES, (ONE,), "int8")
    assert next(line for line in text.splitlines() if line.startswith(f"| {ONE.name} ")).endswith(" 1.11 |")
    assert "Behind: no cell." in text


def test_a_file_of_four_bits_is_compared_with_peers_of_four_bits() -> None:
    """Not with our own other forms, which are in the table all the same."""
    engines = evidence.ENGINES["int4"]
    records = runs(engines, **{"dsbd-gguf": 4.0, "llama.cpp-gguf": 6.0, "dsbd-int4": 2.0})
    text, readme = evidence.report(MODEL, records, engines, (ONE, FOUR), "int4")
    rows = {line.split("|")[1].strip(): line.split("|") for line in text.splitlines() if line.startswith("|")}
    assert [rows[cell.name][-2].strip() for cell in (ONE, FOUR)] == ["1.50", "2.50"]
    assert "dsbd-gguf by the best int4 peer" in text
    assert "dsbd-int4" in text
    assert "llama.cpp 10.7" in readme
