"""Jobs of benchmarks/suffix.py, and its tables with the built-in target. Guards ratios of unequal answers."""

from __future__ import annotations

import pytest

from benchmarks import suffix
from benchmarks.suffix import NONE, Variant, arguments, compare, spelled
from benchmarks.suffix_jobs import JOBS
from dsbd_cli import Engine, load
from dsbd_cli.requests import Request, RequestResult

TEMPLATE = "{% for message in messages %}{{ message.content }}\n{% endfor %}"


@pytest.fixture(scope="module")
def base() -> Engine:
    return load(draft=None, batch_size=1, chat_template=TEMPLATE, on_too_long="truncate-left")


def test_jobs_are_the_same_every_time_and_repeat_no_prompt() -> None:
    for name, rows in {"sql": 200, "sql-again": 200, "json": 100, "edit": 24, "chat": 100}.items():
        prompts = [str(messages) for messages in JOBS[name].conversations()]
        assert prompts == [str(messages) for messages in JOBS[name].conversations()]
        assert len(prompts) == len(set(prompts)) == rows + 1


def test_a_day_later_every_question_has_other_literals_on_the_same_tables() -> None:
    pairs = zip(JOBS["sql"].conversations(), JOBS["sql-again"].conversations(), strict=True)
    for today, later in ([messages[-1]["content"].split("\n\n") for messages in pair] for pair in pairs):
        assert today[0] == later[0]
        assert today[1] != later[1]


@pytest.mark.parametrize("beams", [1, 3])
def test_every_variant_has_its_line(base: Engine, beams: int) -> None:
    options = arguments().parse_args(
        ["--rows", "2", "--new-tokens", "json=12,sql-again=12", "--drafters", "ngram:2,none"]
    )
    for name, variants in {"json": [NONE, "grammar", "ngram:2"], "sql-again": [NONE, "ngram:2"]}.items():
        table, runs = compare(base, name, beams, options)
        assert [run["draft"] for run in runs] == variants
        assert all(len(run["seconds"]) == 2 and run["tokens"] == runs[0]["tokens"] for run in runs)
        assert f"{name}, {beams} beam" in table
        assert table.count("\n|") == len(variants) + 2


def test_a_drafter_that_keeps_rows_answers_the_day_before_first(base: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    answer, answered = Variant.answer, dict[str, list[str]]()

    def note(variant: Variant, requests: list[Request]) -> list[RequestResult]:
        answered.setdefault(variant.engine.method.drafter, []).extend(request.id for request in requests)
        return answer(variant, requests)

    monkeypatch.setattr(Variant, "answer", note)
    monkeypatch.setattr(suffix, "KEEPS_ROWS", "ngram")
    options = arguments().parse_args(["--rows", "1", "--new-tokens", "sql=2,sql-again=2"])
    _, runs = compare(base, "sql-again", 1, options)
    assert answered["ngram"] == ["sql-0", "sql-1", "sql-again-0", "sql-again-1"]
    assert answered["beam"] == ["sql-again-0", "sql-again-1"]
    assert [len(run["seconds"]) for run in runs] == [1, 1]


def test_other_beams_end_the_run(base: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    answer = Variant.answer

    def cut(variant: Variant, requests: list[Request]) -> list[RequestResult]:
        results = answer(variant, requests)
        if variant.engine.method.depth:
            object.__setattr__(results[0].hypotheses[0], "logprob", 0.0)
        return results

    monkeypatch.setattr(Variant, "answer", cut)
    options = arguments().parse_args(["--rows", "1", "--new-tokens", "chat=4"])
    with pytest.raises(SystemExit, match="chat-1: ngram gives other beams than none"):
        compare(base, "chat", 1, options)


def test_a_comma_before_a_setting_does_not_split() -> None:
    assert spelled("retrieval:a.bin+ngram:4,share=2,ngram,none") == ["retrieval:a.bin+ngram:4,share=2", "ngram", "none"]
