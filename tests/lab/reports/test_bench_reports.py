"""One table that fits, JSON lines, and a picture in which nothing is cut."""

from __future__ import annotations

import dataclasses
import io
import json
import warnings
from pathlib import Path

import pytest
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.text import Annotation
from matplotlib.text import Text as PlotText
from rich.table import Table
from rich.text import Text

from dsbd_cli.config.method import MethodConfig
from dsbd_cli.config.sampling import SamplingConfig
from dsbd_cli.errors import UsageError
from dsbd_cli.io.records.record_parts import sampling_fields
from dsbd_cli.lab.bench.methods import METHODS
from dsbd_cli.lab.bench.sweep import SweepSetting
from dsbd_cli.lab.reports.bench_data import BenchReport, BenchRow, Energy, Interval, pareto_front
from dsbd_cli.lab.reports.bench_json import json_lines
from dsbd_cli.lab.reports.bench_plot import (
    FAMILIES,
    INK,
    MUTED,
    bench_figure,
    picture_bytes,
    require_plots,
    spread_labels,
)
from dsbd_cli.lab.reports.bench_table import print_report
from dsbd_cli.lab.reports.screen import Screen


def row(task: str, method: str, index: int, setting: str = "") -> BenchRow:
    drafts = method.startswith("dsbd")
    scores = {} if task == "mt-bench" else {"exact match": Interval(0.5 + index / 60, 0.4, 0.7)}
    if task == "qa":
        scores["F1"] = Interval(0.66, 0.6, 0.7)
    return BenchRow(
        task=task,
        method=method,
        setting=setting,
        settings={"rule": "coupled"},
        batch_size=8,
        exactness="same-text",
        records=200,
        failed=0,
        windows=25,
        tokens=5000,
        seconds=50.0,
        scores=scores,
        logprob_per_token=-0.123,
        tokens_per_s=Interval(150.0 - 7 * index, 90.0, 110.0),
        ratios={"beam-sampling": Interval(1.25, 1.2, 1.31), "greedy": Interval(0.5, 0.45, 0.55)},
        steps_per_call=2.5 if drafts else 1.0,
        passed_by_depth=(0.8, 0.5, 0.3, 0.1) if drafts else (),
        kv_peak_bytes=3 * 2**20,
        peak_memory_bytes=2**30,
        energy=Energy("nvml", 0.25, 0.125, 30.0, 90.0) if index else Energy(),
    )


ENVIRONMENT = {
    "command": "dsbd bench --num-beams 4",
    "date": "2026-11-23T00:00:00Z",
    "commit": "abc1234",
    "versions": {"dsbd": "0.1.0", "triton": None},
    "device": "Fast One",
    "device_kind": "cpu",
    "cpu": "Fast One",
    "threads": 2,
    "system": "Linux x86_64",
}
RUN = {
    **{"target": "builtin:target", "draft": "builtin:draft", "dtype": "float32", "torch_device": "cpu"},
    **{"batch_size": 8, "window_records": 8, "rounds": 2, "seed": 0, "grammar": None},
    **{"data": "built in", "notes": [], **sampling_fields(SamplingConfig())},
}


def report(tasks: tuple[str, ...] = ("qa",), settings: tuple[str, ...] = ("",)) -> BenchReport:
    rows = [
        row(task, name, index, setting) for task in tasks for index, name in enumerate(METHODS) for setting in settings
    ]
    return BenchReport(rows, ENVIRONMENT, RUN, ["a note"], complete=True)


class Gone(io.StringIO):
    """A pipe whose reader has gone."""

    def write(self, text: str) -> int:
        raise BrokenPipeError

    def flush(self) -> None:
        raise BrokenPipeError


def test_a_reader_who_has_gone_ends_the_command_and_not_the_interpreter() -> None:
    with pytest.raises(BrokenPipeError):
        print_report(report(), Gone())


class Terminal(io.StringIO):
    """A stream that takes itself for a terminal; rich asks COLUMNS for its width."""

    def isatty(self) -> bool:
        return True


SWEPT = ("W=4 K=8 D=4 t=0.7", "W=4 K=12 D=4 t=0.95")


@pytest.mark.parametrize("settings", [("",), SWEPT])
@pytest.mark.parametrize(("columns", "last"), [(80, "tokens/s"), (120, "speed by"), (400, "0.125")])
def test_one_table_a_task_has_as_many_columns_as_fit(
    columns: int, last: str, settings: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """No cell is cut, and what is left out is named."""
    monkeypatch.setenv("COLUMNS", str(columns))
    monkeypatch.setenv("TERM", "xterm")
    stream = Terminal()
    print_report(report(("sql", "qa", "mt-bench"), settings), stream)
    lines = [line.rstrip() for line in Text.from_ansi(stream.getvalue()).plain.splitlines()]
    text = "\n".join(lines)
    assert max(map(len, lines)) <= columns
    assert "…" not in text
    assert all(text.count(f"{task}, 200 records\n") == 1 for task in ("sql", "qa", "mt-bench"))
    assert all(text.count(cell) == 3 * len(METHODS) for cell in settings if cell)
    assert sum(line.startswith("greedy") for line in lines) == 3 * len(settings)
    assert "66.0 (60–70)" in text or columns < 400
    assert last in " ".join(text.split("Left out for width")[0].split())
    assert ("Left out for width, and in --json: " in text) == (columns < 400)
    assert "note: a note" in text


def test_columns_without_a_measurement_are_left_out() -> None:
    def said(bench_report: BenchReport) -> str:
        stream = Terminal()
        print_report(bench_report, stream)
        return stream.getvalue()

    assert "J/token" not in said(BenchReport([row("sql", "greedy", 0)], {}, {}))
    assert "draft calls" not in said(report())
    assert "J/token" in said(report())


def test_a_table_that_cannot_fit_is_wider_than_the_screen_and_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    stream, table = Terminal(), Table()
    table.add_column("name", no_wrap=True)
    table.add_row("x" * 100)
    Screen(stream).show(table)
    assert "x" * 100 in stream.getvalue()


def test_titles_and_ranges_say_what_there_is() -> None:
    bench_row = dataclasses.replace(row("sql", "greedy", 0), records=1, ratios={"greedy": Interval(0.47, 0.47, 0.47)})
    stream = io.StringIO()
    print_report(BenchReport([bench_row], {"threads": 1}, {}), stream)
    text = stream.getvalue()
    assert "sql, 1 record  " in text
    assert "1 thread;" in text
    assert "0.47x" in text
    assert "0.47x (" not in text


def test_one_is_not_plural() -> None:
    stream = io.StringIO()
    print_report(dataclasses.replace(report(), run={**RUN, "max_new_tokens": 1}), stream)
    assert "batches of 8, at most 1 new token\n" in stream.getvalue()


def test_every_json_line_is_complete_by_itself() -> None:
    lines = [json.loads(line) for line in json_lines(report(("sql", "qa"))).splitlines()]
    assert len(lines) == 2 * len(METHODS)
    first, second = lines[0], lines[1]
    for line in lines:
        assert {"schema", "task", "method", "settings", "command", "device", "commit", "run", "scores"} <= line.keys()
    assert (first["energy_source"], first["energy"]["j_per_token"]) == ("unavailable", None)
    assert (second["energy_source"], second["energy"]["j_per_token"]) == ("nvml", 0.25)
    assert first["tokens_per_s_pooled"] == 100.0


def test_settings_that_do_not_act_are_null() -> None:
    def written(**changed: object) -> dict[str, object]:
        config = MethodConfig.of(changed)
        bench_row = dataclasses.replace(row("sql", "greedy", 0), settings=SweepSetting("greedy", "", config).fields())
        settings: dict[str, object] = json.loads(json_lines(BenchReport([bench_row], ENVIRONMENT, RUN)))["settings"]
        return settings

    plain = written(depth=0)
    acting = {name for name, value in plain.items() if value is not None}
    assert acting == {"rule", "num_beams", "depth", "warp_scope", "memory_saving"}
    beam = written()
    assert (beam["drafter"], beam["ngram"], beam["tree"], beam["fusion_top_k"]) == ("beam", None, None, None)
    assert beam["width_threshold"] is None
    both = written(drafter="beam+ngram", width="threshold")
    assert (both["ngram"], both["fusion_top_k"], both["width_threshold"]) == (12, 16, 0.7)


def test_a_run_that_was_stopped_says_so_everywhere() -> None:
    stopped, stream = dataclasses.replace(report(("sql",)), complete=False), io.StringIO()
    print_report(stopped, stream)
    caption = bench_figure(stopped)._supxlabel  # type: ignore[attr-defined]
    for text in (stream.getvalue(), caption.get_text()):
        assert "Stopped early: this is what was measured until then." in text
    whole = io.StringIO()
    print_report(report(("sql",)), whole)
    assert "Stopped early" not in whole.getvalue()


def test_the_front_is_what_nothing_beats_in_both() -> None:
    points = [(1.0, 5.0), (2.0, 4.0), (2.0, 3.0), (3.0, 4.5), (4.0, 1.0), (0.5, 5.0), (4.0, 0.5)]
    assert pareto_front(points) == [0, 3, 4]
    assert pareto_front([]) == []


@pytest.mark.parametrize("settings", [("",), tuple(f"W=4 K={k} D={d} t=0.7" for k in (8, 12) for d in (2, 4))])
@pytest.mark.parametrize("tasks", [("qa",), ("sql", "mt-bench")])
def test_nothing_of_the_picture_is_cut(tasks: tuple[str, ...], settings: tuple[str, ...]) -> None:
    assert_whole(bench_figure(report(tasks, settings)))


def panel(figure: Figure, title: str) -> Axes:
    (matched,) = [axes for axes in figure.axes if title in axes.get_title("left")]
    return matched


def test_scores_of_zero_are_drawn_at_zero() -> None:
    rows = [
        dataclasses.replace(bench_row, scores={"exact match": Interval(0.0, 0.0, 0.0)}) for bench_row in report().rows
    ]
    axes = panel(bench_figure(dataclasses.replace(report(), rows=rows)), "quality")
    assert axes.get_ylim()[0] == 0
    assert axes.get_ylim()[1] >= 5


def test_every_method_has_a_point_with_both_intervals_and_its_name() -> None:
    """Guards a name at another point, and a key of twenty marks."""
    bench_report = report(("sql",))
    axes = panel(bench_figure(bench_report), "quality against speed")
    points = {line.get_label(): line.get_xydata()[0].tolist() for line in axes.get_lines()}
    bars = [path.vertices.tolist() for bar in axes.collections for path in bar.get_paths()]
    named = {text.get_text(): text for text in axes.texts if isinstance(text, Annotation)}
    assert named.keys() == points.keys() == set(METHODS)
    for bench_row in bench_report.rows:
        assert bench_row.quality is not None
        x, y = bench_row.tokens_per_s.value, 100 * bench_row.quality.value
        assert points[bench_row.name] == [x, y]
        assert list(named[bench_row.name].xy) == [x, y]
        assert [[bench_row.tokens_per_s.low, y], [bench_row.tokens_per_s.high, y]] in bars
        assert [[x, 100 * bench_row.quality.low], [x, 100 * bench_row.quality.high]] in bars
    bold = {name for name, text in named.items() if text.get_fontweight() == "bold"}
    assert bold == set(METHODS), "each is slower and better than the one before"
    assert all(axes.get_legend() is None for axes in bench_figure(bench_report).axes)


def test_the_title_is_the_file_the_models_and_the_machine() -> None:
    run = {**RUN, "data": "/data/questions.jsonl", "target": "./models/big", "draft": None}
    rows = [row("jsonl", "greedy", 0), row("jsonl", "hf-beam-search", 1)]
    figure = bench_figure(BenchReport(rows, ENVIRONMENT, run))
    assert figure.get_suptitle() == "questions.jsonl: big, on Fast One"
    assert [axes.get_title("left") for axes in figure.axes] == ["jsonl, 200 records: quality against speed"]
    assert_whole(figure)
    both = bench_figure(BenchReport([*rows, row("sql", "dsbd-search", 2)], ENVIRONMENT, RUN))
    assert both.get_suptitle() == "built in: builtin:target with builtin:draft, on Fast One"
    assert [axes.get_title("left") for axes in both.axes if axes.get_visible()] == [
        "jsonl, 200 records: quality against speed",
        "sql, 200 records: quality against speed",
    ]


def test_families_have_one_colour_and_no_two_labels_overlap() -> None:
    figure = bench_figure(report(("sql",)))
    axes = panel(figure, "speed")
    hues = {
        str(line.get_label()): line.get_color() for line in axes.get_lines() if line.get_color() not in (INK, MUTED)
    }
    families = {family: {hue for name, hue in hues.items() if name.startswith(family)} for family in FAMILIES}
    assert all(len(hues) == 1 for hues in families.values())
    assert len({hue for hues in families.values() for hue in hues}) == len(set(FAMILIES.values()))
    figure.draw_without_rendering()
    boxes = [PlotText.get_window_extent(text) for text in axes.texts if text.get_text()]
    assert len(boxes) > 8
    assert not any(a.overlaps(b) for index, a in enumerate(boxes) for b in boxes[:index])


def test_a_large_sweep_shows_the_best_settings_of_each_method() -> None:
    rows = [row("sql", name, index + step, f"D={step}") for index, name in enumerate(METHODS) for step in range(3)]
    slower = [dataclasses.replace(row("sql", "dsbd-coupled", 0, "D=9"), tokens_per_s=Interval(1.0, 1.0, 1.0))]
    axes = panel(bench_figure(BenchReport([*rows, *slower], {}, {})), "speed")
    names = [text.get_text() for text in axes.texts]
    assert len(names) <= 40
    assert "dsbd-coupled D=9" not in names
    assert f"best {len(names)} of {len(rows) + 1} settings" in axes.get_xlabel()


def test_labels_stand_apart_in_their_order() -> None:
    assert spread_labels([10, 10, 50, 11], 5, 0, 100) == [10, 15, 50, 20]
    assert spread_labels([99, 98, 97], 5, 0, 100) == [100, 95, 90]
    assert spread_labels([], 5, 0, 100) == []


def test_settings_of_a_sweep_and_drafters_are_told_apart() -> None:
    names = "W=4 drafter=beam", "W=4 drafter=ngram"
    rows = [
        dataclasses.replace(row("sql", "dsbd-coupled", index, name), settings={"drafter": name.partition("r=")[2]})
        for index, name in enumerate(names)
    ]
    figure = bench_figure(BenchReport(rows, {}, {}))
    shown = {text.get_text() for text in panel(figure, "speed").texts}
    assert shown == {f"dsbd-coupled {name}" for name in names}
    assert_whole(figure)


def assert_whole(figure: Figure) -> None:
    """No artist reaches over the edge."""
    figure.draw_without_rendering()
    whole = figure.bbox
    for text in (figure._suptitle, figure._supxlabel):  # type: ignore[attr-defined]
        assert text.get_window_extent().x1 <= whole.x1 + 1, text
    for axes in (axes for axes in figure.axes if axes.get_visible()):
        for artist in (axes.title, axes.xaxis.label, axes.yaxis.label, axes.get_legend(), *axes.texts):
            if artist is None or not artist.get_visible() or (hasattr(artist, "get_text") and not artist.get_text()):
                continue
            box = artist.get_window_extent()
            assert box.x0 >= whole.x0 - 1, artist
            assert box.x1 <= whole.x1 + 1, artist
            assert box.y0 >= whole.y0 - 1, artist
            assert box.y1 <= whole.y1 + 1, artist


@pytest.mark.parametrize(("suffix", "start"), [(".png", b"\x89PNG"), (".svg", b"<?xml"), (".pdf", b"%PDF")])
def test_pictures_are_of_the_kind_that_their_name_says(suffix: str, start: bytes) -> None:
    assert picture_bytes(bench_figure(report()), suffix).startswith(start)


def test_any_name_of_a_file_can_be_drawn() -> None:
    """Guards names that matplotlib takes for a formula, or has no letters for. A warning is an error."""
    task = "a$b_$c 数据.jsonl"
    named = dataclasses.replace(report((task,)), run={**RUN, "data": f"/x/{task}"})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert picture_bytes(bench_figure(named))


def test_a_picture_that_cannot_be_drawn_is_refused_before(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UsageError, match=r"must end in .png"):
        require_plots("--plot", Path("x.jpeg"))

    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(UsageError, match=r"pip install 'dsbd\[plots\]'"):
        require_plots("--plot", Path("x.png"))
