"""A real run on the built-in pair: interleaved, with the engine's own answers, and stopped half-way."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from dsbd_cli import Engine, Request, SamplingConfig, load
from dsbd_cli.config.method import MethodConfig
from dsbd_cli.errors import UsageError
from dsbd_cli.io.records.reader import RowReader
from dsbd_cli.lab.bench.prepare import BenchConfig, prepare
from dsbd_cli.lab.bench.run import Bench, BenchPart
from dsbd_cli.lab.bench.runners import BestAnswer, make_runner
from dsbd_cli.lab.bench.sweep import SweepSetting, plan
from dsbd_cli.lab.bench.tally import Tally
from dsbd_cli.lab.tasks.choose import open_dataset
from dsbd_cli.lab.tasks.lines import jsonl_dataset
from dsbd_cli.requests import derive_seed

SAMPLING = SamplingConfig(max_new_tokens=24)
NAMES = ["greedy", "beam-sampling", "dsbd-coupled", "dsbd-memory-saving", "hf-beam-search", "hf-assisted"]


@pytest.fixture(scope="module")
def pair() -> Engine:
    return load()


def bench(pair: Engine, names: list[str], records: int, rounds: int = 1, tasks: tuple[str, ...] = ("qa",)) -> Bench:
    planned = plan(names, {"num_beams": [3]} if names != ["greedy"] else {})
    datasets = [open_dataset(task, None) for task in tasks]
    bench_config = BenchConfig(datasets, planned.settings, records, rounds, 8, SAMPLING, notes=planned.notes)
    return Bench(pair, bench_config, command=["bench", "--x"])


def test_a_run_measures_every_method_on_the_same_records(pair: Engine) -> None:
    running = bench(pair, NAMES, records=10)
    order: list[str] = []
    report = running.run(lambda done, total, name, left_s: order.append(name))
    assert [name.partition(" ")[2].split()[1] for name in order[: len(NAMES)]] == NAMES, "the warm-up is told, too"
    order = order[len(NAMES) :]
    assert report.complete
    assert [row.method for row in report.rows] == NAMES
    promised = [*["same-text"] * 3, "dynamic-width", None, None]
    assert [row.exactness for row in report.rows] == promised
    # two windows; the second one begins with the second method, so that nobody is always first
    assert [name.split()[1] for name in order[:-1]] == [*NAMES, *NAMES[1:], NAMES[0]]
    rows = {row.method: row for row in report.rows}
    for row in report.rows:
        assert (row.records, row.windows, row.failed) == (10, 2, 0)
        assert set(row.scores) == {"exact match", "F1"}
        assert row.logprob_per_token is not None
        assert row.logprob_per_token < 0
        assert row.tokens_per_s.low <= row.tokens_per_s.value <= row.tokens_per_s.high
    coupled, plain = rows["dsbd-coupled"], rows["beam-sampling"]
    # rule coupled gives the very text of plain beam sampling
    assert (coupled.tokens, coupled.scores) == (plain.tokens, plain.scores)
    assert coupled.logprob_per_token == pytest.approx(plain.logprob_per_token, abs=1e-4)
    assert coupled.steps_per_call is not None
    assert coupled.steps_per_call > 1.2
    assert plain.steps_per_call == 1.0
    # a call yields a step per passed layer and one more, unless the text ends with one of them
    passed = sum(coupled.passed_by_depth)
    assert passed < coupled.steps_per_call <= passed + 1
    assert set(coupled.ratios) == set(coupled.paired) == {"hf-beam-search", "greedy", "beam-sampling"}
    test = coupled.paired["beam-sampling"]
    assert (test.records, test.better, test.worse, test.p) == (10, 0, 0, 1.0)
    assert (rows["hf-assisted"].batch_size, rows["greedy"].batch_size) == (1, 8)
    assert rows["hf-beam-search"].steps_per_call is None
    assert report.environment["command"] == "dsbd bench --x"


def test_the_time_left_is_told_from_the_first_window(pair: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """The clock is moved by the windows alone: greedy takes 2 s, beam sampling 10 s, everything on sql twice that."""
    now = 0.0
    bench_config = bench(pair, ["greedy", "beam-sampling"], records=16, rounds=2, tasks=("qa", "sql"))._bench
    running = Bench(pair, bench_config, command=["bench"], clock=lambda: now)

    def measure(part: BenchPart, setting: SweepSetting, number: int, window: int) -> None:
        nonlocal now
        now += (2 if setting.method == "greedy" else 10) * (2 if part.task == "sql" else 1)

    monkeypatch.setattr(running, "_measure", measure)
    left: dict[int, float | None] = {}
    running.run(lambda done, total, name, left_s: left.setdefault(done, left_s))
    assert left[0] is None
    assert left[1] == 15 * 2, "the first figure stands for all"
    assert left[2] == 7 * 2 + 7 * 10, "then one of each method"
    assert left[4] == (3 * 2 + 3 * 10) * 3, "then one of each on each task"
    assert left[16] == 0


def test_answers_are_those_of_generate(pair: Engine) -> None:
    """Tokens and log-probability are what the engine gives for the same records, seed and settings."""
    (row,) = (row for row in bench(pair, ["dsbd-coupled"], 4).run().rows)
    records = list(zip(range(4), open_dataset("qa", None).records(), strict=False))
    requests = [Request(id=r.id, seed=derive_seed(0, r.id), prompt=r.prompt, sampling=SAMPLING) for _, r in records]
    engine = Engine(pair.target, pair.draft, pair.codec, MethodConfig(num_beams=3, depth=4))
    best = [result.hypotheses[0] for result in engine.run(requests)]
    assert row.tokens == sum(beam.num_tokens for beam in best)
    assert row.logprob_per_token == pytest.approx(sum(beam.logprob for beam in best) / row.tokens)


def test_what_a_row_promises_holds_after_its_last_window(pair: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards a table that says same-text of texts some of which were made after a kernel had failed."""

    def fail(done: int, total: int, name: str, left_s: float | None) -> None:
        if done == 1:  # before the second of two windows
            monkeypatch.setattr(pair.target, "invariant", False)

    assert pair.exactness == "same-text"
    (row,) = bench(pair, ["greedy"], records=9).run(fail).rows
    assert (row.windows, row.exactness) == (2, "same-law")


def test_rounds_time_again_and_score_once(pair: Engine) -> None:
    (row,) = bench(pair, ["greedy"], records=3, rounds=3).run().rows
    assert (row.windows, row.records) == (3, 3)


def test_an_answer_that_failed_is_wrong_whatever_its_score() -> None:
    tally = Tally("jsonl", plan(["greedy"], {}).settings[0], 8)
    answers = [BestAnswer("", 0, None, None, None, error="too long"), BestAnswer("", 0, None, None, None)]
    tally.add_answers(answers, [{"exact match": 1.0}] * 2, [0.0, 0.0])
    assert tally.main_scores == [0.0, 1.0]


def test_records_without_an_answer_are_noted(pair: Engine, tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    path.write_text('{"prompt": "question:"}\n{"id": "b", "prompt": "question:", "token_rules": "timestamps=1"}\n')
    settings = plan(["greedy", "beam-search"], {}).settings
    bench_config = BenchConfig([jsonl_dataset(path, rows=RowReader(SAMPLING))], settings, 2, 1, 8, SAMPLING)
    report = Bench(pair, bench_config, command=["bench"]).run()
    assert [row.failed for row in report.rows] == [1, 1]
    assert (
        "x.jsonl: records without an answer, which count as wrong: greedy 1, beam-search 1; the first: record b: "
        "token_rules: timestamps is 1, but the target has no tokens of times: drop it"
    ) in report.notes


def test_a_run_that_is_stopped_reports_what_it_has(pair: Engine) -> None:
    running = bench(pair, ["greedy", "beam-sampling"], records=16, tasks=("sql", "qa"))

    def stop_later(done: int, total: int, name: str, left_s: float | None) -> None:
        if done == 3:
            running.stop()

    report = running.run(stop_later)
    assert running.units == 8
    assert not report.complete
    # three windows were done; the fourth was cut off, and its time says nothing
    assert [(row.task, row.method, row.windows) for row in report.rows] == [
        ("sql", "greedy", 1),
        ("sql", "beam-sampling", 1),
        ("qa", "greedy", 1),
    ]


OWN_OPTIONS = (
    {"id": "short", "prompt": "question: who met", "max_tokens": 3},
    {"prompt": "question: what did", "stop": " the", "temperature": 0.5, "n": 2, "logprobs": True},
    {"prompt": "question: where is", "seed": 77, "top_k": 5},
    {"prompt": "question: when was", "allow": ["one", "two"]},
    {"prompt": "question: why"},
)


@pytest.mark.parametrize("name", ["beam-sampling", "dsbd-coupled", "greedy"])
def test_lines_are_answered_as_generate_answers_them(pair: Engine, name: str, tmp_path: Path) -> None:
    """Options of a line take the place of the run's, also its seed and its allowed answers."""
    path = tmp_path / "x.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in OWN_OPTIONS))
    rows = RowReader(SAMPLING, seed=3)
    dataset = jsonl_dataset(path, rows=rows)
    (setting,) = plan([name], {}).settings
    bench_config = BenchConfig([dataset], [setting], 9, 1, 8, SAMPLING, seed=3)
    (prompts,) = prepare(dataset, pair.codec, 9, 8, None, SAMPLING).windows
    answers = make_runner(pair, setting, bench_config).run(prompts)
    lines = path.read_bytes().splitlines()
    requests = [rows.read(line, index=index, number=index + 1).request for index, line in enumerate(lines)]
    assert isinstance(setting.config, MethodConfig)
    engine = Engine(pair.target, pair.draft if setting.drafts else None, pair.codec, setting.config)
    wanted = list(
        engine.run([replace(request, sampling=replace(request.sampling, n_best=1)) for request in requests if request])
    )
    assert [answer.text for answer in answers] == [answer.text for answer in wanted]
    assert answers[0].tokens <= 3
    assert answers[3].text in ("one", "two")


def test_transformers_keeps_to_a_line_s_own_options(pair: Engine, tmp_path: Path) -> None:
    """Each sampling has a comparator of its own; answers come back in the order of the lines."""
    path = tmp_path / "x.jsonl"
    some = [row for row in OWN_OPTIONS if "allow" not in row]
    path.write_text("".join(json.dumps(row) + "\n" for row in some))
    dataset = jsonl_dataset(path, rows=RowReader(SAMPLING))
    (setting,) = plan(["hf-greedy"], {}).settings
    bench_config = BenchConfig([dataset], [setting], 9, 1, 8, SAMPLING)
    (prompts,) = prepare(dataset, pair.codec, 9, 8, None, SAMPLING).windows
    runner = make_runner(pair, setting, bench_config)
    answers = runner.run(prompts)
    greedy = Engine(pair.target, None, pair.codec, MethodConfig(rule="search", num_beams=1, depth=0))
    options = [replace(prompt.sampling(SAMPLING, {}), temperature=1.0, top_k=50) for prompt in prompts]
    asked = [Request(str(row["prompt"]), sampling=sampling) for row, sampling in zip(some, options, strict=True)]
    wanted = [result.hypotheses[0] for result in greedy.run(asked)]
    assert [answer.text for answer in answers] == [answer.text for answer in wanted]
    assert answers[0].tokens <= 3
    assert runner.logprobs(prompts, answers) == pytest.approx([answer.logprob for answer in wanted], abs=1e-3)


def test_a_line_that_asks_for_much_leaves_less_room_for_its_prompt(pair: Engine, tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    path.write_text('{"prompt": "question: who met whom", "max_tokens": 90}\n{"prompt": "question: who met whom"}\n')
    prepared = prepare(jsonl_dataset(path, rows=RowReader(SAMPLING)), pair.codec, 5, 8, 50, SAMPLING)
    assert [prompt.record.id for window in prepared.windows for prompt in window] == ["1"]
    assert prepared.notes[0] == "x.jsonl: left out, because prompt and new tokens do not fit the models: 1 record"


def test_records_that_do_not_fit_are_left_out_and_told(pair: Engine, tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    path.write_text('{"prompt": "%s"}\n{"prompt": "question: who"}\n' % ("word " * 900))
    prepared = prepare(jsonl_dataset(path), pair.codec, 5, 8, 100, SamplingConfig())
    assert [len(window) for window in prepared.windows] == [1]
    assert "left out, because prompt and new tokens do not fit the models: 1 record" in prepared.notes[0]
    for room in (1, -99_000):  # the second where --max-new-tokens alone is too much
        with pytest.raises(UsageError, match=r"no record of x\.jsonl fits: prompt and new tokens .* lower --max-new"):
            prepare(jsonl_dataset(path), pair.codec, 5, 8, room, SamplingConfig())


def test_conversations_need_a_template_unless_they_can_be_plain(pair: Engine, tmp_path: Path) -> None:
    """The built-in tokenizer has no chat template."""
    path = tmp_path / "x.jsonl"
    path.write_text('{"messages": [{"role": "user", "content": "hello"}]}\n')
    with pytest.raises(UsageError, match=r"record 0: .* chat template"):
        prepare(jsonl_dataset(path), pair.codec, 5, 8, None, SamplingConfig())
    data = Path(__file__).parents[2] / "lab" / "tasks" / "data" / "question.jsonl"
    prepared = prepare(open_dataset("mt-bench", data), pair.codec, 2, 8, None, SamplingConfig())
    assert "given as plain text" in prepared.notes[-1]
