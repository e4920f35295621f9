"""MT-Bench's questions, the user's lines, and the choice of a task."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import islice
from pathlib import Path

import pytest

from dsbd_cli.config.sampling import SamplingConfig
from dsbd_cli.errors import UsageError
from dsbd_cli.io.records.reader import RowReader
from dsbd_cli.lab.tasks.choose import TASK_NAMES, open_dataset
from dsbd_cli.lab.tasks.lines import jsonl_dataset, mt_bench_dataset

DATA = Path(__file__).parent / "data"


def write(folder: Path, *rows: object) -> Path:
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_mt_bench_gives_the_first_turn_as_a_conversation() -> None:
    dataset = mt_bench_dataset(DATA / "question.jsonl")
    first, second = dataset.records()
    assert (first.id, second.id, dataset.metrics) == ("mt-bench-81", "mt-bench-101", ())
    assert first.meta["messages"] == [{"role": "user", "content": "Write a short travel note about a harbour town."}]
    assert dataset.score(first, "text") == {}


def test_lines_with_references_are_met_exactly(tmp_path: Path) -> None:
    path = write(tmp_path, {"id": "a", "prompt": "2 + 2 =", "reference": "4"}, {"prompt": "x", "reference": " y "})
    dataset = jsonl_dataset(path)
    first, second = dataset.records()
    assert (first.id, second.id, dataset.metrics) == ("a", "1", ("exact match",))
    assert dataset.score(first, " 4\n") == {"exact match": 1.0}
    assert dataset.score(first, "4.") == {"exact match": 0.0}
    assert dataset.score(second, "y") == {"exact match": 1.0}
    assert dataset.score(second, "Y") == {"exact match": 0.0}


def test_a_table_of_rows_with_references(tmp_path: Path) -> None:
    path = tmp_path / "rows.csv"
    path.write_text('id,prompt,reference\n01,2 + 2 =,4\n,"x\n", y \n')
    first, second = jsonl_dataset(path).records()
    assert [(record.id, record.prompt, record.reference) for record in (first, second)] == [
        ("01", "2 + 2 =", "4"),
        ("1", "x\n", " y "),
    ]
    path.write_text('prompt,relevant\nx,"[""a"", ""b""]"\n')
    assert [record.meta["relevant"] for record in jsonl_dataset(path).records()] == [{"a", "b"}]
    path.write_text("prompt\nx\ny,z\n")
    with pytest.raises(UsageError, match=r"line 3: the row has 2 cells, but the header has 1$"):
        list(jsonl_dataset(path).records())


def test_lines_without_references_are_for_speed(tmp_path: Path) -> None:
    message = [{"role": "user", "content": "hello"}]
    dataset = jsonl_dataset(write(tmp_path, {"prompt": "a", "temperature": 2}, {"messages": message}))
    assert dataset.metrics == ()
    assert [record.meta.get("messages") for record in dataset.records()] == [None, message]
    assert dataset.notes == ()


def test_lines_are_those_of_generate_with_their_own_options(tmp_path: Path) -> None:
    """The same ids and seeds as `dsbd generate` gives them, so the same texts."""
    openai = {"model": "m", "max_tokens": 7, "messages": [{"role": "user", "content": "hello"}]}
    rows = [
        {"prompt": "a", "temperature": 2, "max_tokens": 5, "stop": "\n", "n": 3, "logprobs": True},
        {"custom_id": "x", "method": "POST", "url": "/v1/chat/completions", "body": openai},
        {"prompt": "b", "seed": 3, "temperatur": 0, "allow": ["c"], "metadata": {"db": "d"}},
    ]
    path = write(tmp_path, *rows)
    run = RowReader(SamplingConfig(top_k=9), seed=4)
    dataset = jsonl_dataset(path, rows=run)
    first, second, third = (record.request for record in dataset.records())
    assert first is not None
    assert second is not None
    assert third is not None
    assert first.sampling == SamplingConfig(temperature=2.0, top_k=9, max_new_tokens=5, stop=("\n",))
    assert (second.id, second.sampling) == ("x", SamplingConfig(top_k=9, max_new_tokens=7))
    assert (third.seed, third.allow, third.sampling) == (3, ("c",), SamplingConfig(top_k=9))
    for index, (line, record) in enumerate(zip(path.read_bytes().splitlines(), (first, second, third), strict=True)):
        asked = replace(run, num_beams=3).read(line, index=index, number=index + 1).request
        assert asked is not None
        assert (asked.id, asked.seed) == (record.id, record.seed)
    assert dataset.asks == {"seed", "allow"}
    assert "line 3: unknown field 'temperatur' (value 0): did you mean temperature?; not used" in dataset.notes[0]
    assert [dict(record.meta).get("metadata") for record in dataset.records()] == [None, None, {"db": "d"}]


def test_a_prefix_is_asked_of_our_engine_alone(tmp_path: Path) -> None:
    dataset = jsonl_dataset(write(tmp_path, {"prompt": "a", "prefix": "b"}, {"prompt": "a"}))
    assert dataset.asks == {"prefix"}


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        (["x"], "line 1: not a JSON object"),
        ([{"prompt": "a"}, {}], "line 2: neither prompt nor messages is given"),
        ([{"prompt": "a", "top_k": -2}], "line 1: top_k is -2"),
        ([{"prompt": 3}], "line 1: prompt is 3"),
        ([{"prompt": ""}], "line 1: prompt is ''"),
        ([{"messages": [{"role": "user"}]}], r"line 1: messages\[0\] is"),
        ([{"prompt": "a", "reference": 4}], "line 1: reference is 4, but must be a text"),
        ([{"prompt": "a", "reference": "4"}, {"prompt": "b"}], "line 2: reference is on some lines only"),
        ([{"prompt": "a", "id": []}], r"line 1: id is \[\]"),
        ([], "holds no line"),
    ],
)
def test_a_wrong_line_is_told_by_number_and_field(rows: list[object], message: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=message):
        list(jsonl_dataset(write(tmp_path, *rows)).records())


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"question_id": 1, "turns": []}, r"line 1: turns is \[\]"),
        ({"question_id": 1, "turns": "a"}, "line 1: turns is 'a'"),
        ({"turns": ["a"]}, "line 1: question_id is null"),
    ],
)
def test_a_wrong_question_is_told(row: object, message: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=message):
        mt_bench_dataset(write(tmp_path, row))


def test_every_task_opens_by_its_name(tmp_path: Path) -> None:
    paths = {
        "squad": DATA / "squad-v1.json",
        "spider": DATA / "spider",
        "mt-bench": DATA / "question.jsonl",
        **dict.fromkeys(
            ("jsonl", "translation", "summary", "words"), write(tmp_path, {"prompt": "a", "reference": "b"})
        ),
    }
    for name in TASK_NAMES:
        dataset = open_dataset(name, paths.get(name))
        assert dataset.name == (paths[name].name if name == "jsonl" else name)
        assert next(iter(dataset.records())).prompt


def test_built_in_tasks_score_their_own_answers() -> None:
    for name, metrics in (("sql", ("execution accuracy",)), ("qa", ("exact match", "F1"))):
        dataset = open_dataset(name, None)
        assert dataset.metrics == metrics
        for record in islice(dataset.records(), 3):
            assert dataset.score(record, record.reference) == dict.fromkeys(metrics, 1.0)
            assert dataset.score(record, "zzz") == dict.fromkeys(metrics, 0.0)


@pytest.mark.parametrize(
    ("name", "path", "message"),
    [
        ("sql", DATA, "brings its own records"),
        ("squad", None, "needs the path of its data"),
        ("bleu", None, "task is 'bleu', but must be one of sql, qa, squad"),
    ],
)
def test_a_choice_that_cannot_be_is_refused(name: str, path: Path | None, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        open_dataset(name, path)


def test_dev_records_from_a_file_of_their_own_are_left_apart(tmp_path: Path) -> None:
    paths = [tmp_path / name for name in ("dev.jsonl", "test.jsonl")]
    for path in paths:
        path.write_text(f'{{"id": "{path.stem}", "prompt": "p", "reference": "r"}}\n')
    dataset = open_dataset("jsonl", paths[1], paths[0])
    assert dataset.dev is not None
    assert ([record.id for record in dataset.records()], [record.id for record in dataset.dev.records()]) == (
        ["test"],
        ["dev"],
    )
    assert (dataset.name, dataset.dev.name, dataset.notes) == (paths[1].name, f"{paths[1].name} dev", ())
    with pytest.raises(UsageError, match="brings its own records"):
        open_dataset("qa", None, paths[0])


def test_answers_are_scored_by_the_libraries_of_papers(tmp_path: Path) -> None:
    """Guards a score that is upside down, or of another scale."""
    data = write(tmp_path, {"prompt": "a", "reference": "the cat sat on the mat"})
    wanted = {
        "translation": ("chrF", "BLEU"),
        "summary": ("ROUGE-1", "ROUGE-2", "ROUGE-L"),
        "words": ("1 - WER",),
    }
    for name, metrics in wanted.items():
        dataset = open_dataset(name, data)
        record = next(iter(dataset.records()))
        assert dataset.metrics == metrics
        assert dataset.score(record, record.reference) == dict.fromkeys(metrics, 1.0), "not 1.0000000000000004"
        assert all(value < 0.2 for value in dataset.score(record, "zzz").values())
        half = dataset.score(record, "the cat sat on a rug")
        assert all(0.2 < value < 0.9 for value in half.values())


def test_a_task_with_scores_needs_references(tmp_path: Path) -> None:
    for row in ({"prompt": "a"}, {"prompt": "a", "relevant": ["b"]}):
        with pytest.raises(UsageError, match="task words scores against a reference"):
            open_dataset("words", write(tmp_path, row))
