"""From a line to a record through real checkpoints on disk: tiny random ones, so the texts are noise."""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from dsbd_cli.cli.app import run
from tests.cli.conftest import of_rule
from tests.helpers.checkpoints import byte_level, save, wrap

LINES = [
    '{"id": "a", "prompt": "The quick"}',
    "not json",
    '{"id": "b", "prompt": "select name", "max_new_tokens": 5, "n_best": 2}',
    '{"id": "too long", "prompt": "def", "max_new_tokens": 100000}',
    '{"id": "chat", "messages": [{"role": "user", "content": "hi"}]}',
    '{"id": "c", "prompt": "fox", "stop": ["e", "a"]}',
]

Call = Callable[..., list[dict[str, object]]]


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    folder = tmp_path_factory.mktemp("pair")
    tokenizer = wrap(byte_level())
    models = (
        save(folder / name, tokenizer=tokenizer, vocab_size=len(tokenizer), seed=seed)
        for seed, name in enumerate(("target", "draft"))
    )
    target, draft = (str(path) for path in models)
    return target, draft


@pytest.fixture
def generate(pair: tuple[str, str], monkeypatch: pytest.MonkeyPatch) -> Call:
    target, draft = pair

    def call(
        *options: str, draft_name: str = draft, lines: list[str] = LINES, code: int = 3
    ) -> list[dict[str, object]]:
        written = io.TextIOWrapper(io.BytesIO(), encoding="utf-8", write_through=True)
        stdin = io.TextIOWrapper(io.BytesIO("\n".join(lines).encode()), encoding="utf-8")
        with monkeypatch.context() as patch:
            patch.setattr(sys, "stdout", written)
            patch.setattr(sys, "stdin", stdin)
            models = ["--target", target, "--draft", draft_name, "--max-new-tokens", "8", "--dtype", "float32"]
            assert run(["generate", *models, *options]) == code
        buffer = written.buffer
        assert isinstance(buffer, io.BytesIO)
        return [json.loads(line) for line in buffer.getvalue().splitlines()]

    return call


def texts(records: list[dict[str, object]]) -> list[object]:
    return [(record["id"], record.get("text"), record.get("num_tokens")) for record in records]


def test_the_text_depends_on_neither_draft_nor_batch_nor_shape(generate: Call) -> None:
    plain = texts(generate(draft_name="none"))
    assert [text is None for _, text, _ in plain] == [False, True, False, True, True, False]
    for options in (
        "",
        "--batch-size 1",
        "--depth 2 --drafts-per-layer 5",
        "--depth auto",
        "--batch-size auto",
        "--seed 0",
    ):
        assert texts(generate(*options.split())) == plain
    assert texts(generate("--seed", "1")) != plain


@pytest.mark.parametrize("rule", ["coupled", "search"])
def test_the_text_does_not_depend_on_the_drafter(generate: Call, rule: str) -> None:
    plain = texts(generate(*of_rule(rule), draft_name="none"))
    for drafter in ("rsd-c", "rsd-s", "dynamic-tree", "dynamic-tree:top-k", "beam+ngram", "rsd-s+ngram"):
        assert texts(generate(*of_rule(rule), "--drafter", drafter, "--batch-size", "3")) == plain
    assert texts(generate(*of_rule(rule), "--drafter", "ngram", draft_name="none")) == plain


@pytest.mark.parametrize(
    "options",
    [
        "--decode search --set early-stopping=true",
        "--verify rejection",
        "--verify with-replacement --set width=threshold:min=2",
        "--set width=threshold --set memory-saving=true",
        "--set warp-scope=beam --top-p 0.9",
        "--num-beams 2 --n-best 2 --set length-penalty=0 --set min-p=0.01",
    ],
)
def test_every_method_answers(generate: Call, options: str, tmp_path: Path) -> None:
    stats = tmp_path / "steps.jsonl"
    records = generate(*options.split(), "--set", f"stats={stats}")
    assert [record["index"] for record in records] == list(range(6))
    assert [record["id"] for record in records if "error" in record] == [None, "too long", "chat"]
    errors = [record["error"]["type"] for record in records if "error" in record]
    assert errors == ["InvalidRowError", "PromptTooLongError", "InvalidRowError"]
    assert all(str(record["error"]["message"]).startswith("line ") for record in records if "error" in record)
    steps = [json.loads(line) for line in stats.read_text().splitlines()]
    for record in records:
        if "stats" in record:
            own = [step for step in steps if step["id"] == record["id"]]
            assert len(own) == record["stats"]["target_calls"]
            assert sum(step["steps"] for step in own) == record["stats"]["steps"]


def test_a_long_prompt_may_lose_its_beginning(generate: Call) -> None:
    """The tiny models have 512 positions. What is left is answered as if it stood alone."""
    words = " ".join(str(number) for number in range(1000, 1400))
    line = json.dumps({"id": "a", "prompt": words})
    [refused] = generate(lines=[line])
    assert refused["error"]["type"] == "PromptTooLongError"
    [cut] = generate("--set", "on-too-long=truncate-left", lines=[line], code=0)
    usage = cut["usage"]
    assert usage["prompt_tokens"] == 512 - 8
    assert usage["truncated_tokens"] > 0
    [openai] = generate("--set", "on-too-long=truncate-left", "--output-format", "openai", lines=[line], code=0)
    assert openai["response"]["body"]["usage"] == usage


def test_a_resumed_file_equals_an_undisturbed_one(generate: Call, tmp_path: Path) -> None:
    """Other rows share the batch after a resume: texts are the same, scores up to rounding; counters need not be."""
    output = tmp_path / "out.jsonl"
    lines = [json.dumps({"id": str(n), "prompt": "the fox " * (1 + n % 5), "max_new_tokens": 3 + n}) for n in range(12)]
    generate("-o", str(output), lines=lines, code=0)
    whole = output.read_text().splitlines(keepends=True)
    for kept in (0, 1, 5, 11):
        output.write_text("".join(whole[:kept]) + whole[kept][:50])
        generate("-o", str(output), "--existing", "resume", lines=lines, code=0)
        again = output.read_text().splitlines(keepends=True)
        assert again[:kept] == whole[:kept]
        for ours, other in zip(map(json.loads, again), map(json.loads, whole), strict=True):
            assert ours["logprob"] == pytest.approx(other["logprob"], abs=1e-4)
            assert ours["score"] == pytest.approx(other["score"], abs=1e-4)
            names = ("id", "index", "key", "text", "num_tokens", "usage", "seed", "method")
            assert [ours[name] for name in names] == [other[name] for name in names]


def test_records_summary_and_the_line_of_settings_say_the_threads(
    generate: Call, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Another number of threads may round differently. So it is said, and a run may go on with another one."""
    before, lines = torch.get_num_threads(), ['{"id": 1, "prompt": "a"}', '{"id": 2, "prompt": "b"}']
    summary, output = tmp_path / "summary.json", tmp_path / "out.jsonl"
    again = ("--output", str(output), "--set", "log=verbose", "--set", f"summary={summary}", "--existing")
    try:
        generate("--threads", "3", *again, "overwrite", lines=lines[:1], code=0)
        assert ", cpu, 3 threads)" in capsys.readouterr().err
        assert json.loads(summary.read_bytes())["device"]["threads"] == 3
        generate("--threads", "1", *again, "resume", lines=lines, code=0)
        assert ", cpu, 1 thread)" in capsys.readouterr().err
    finally:
        torch.set_num_threads(before)
    records = [json.loads(line) for line in output.read_bytes().splitlines()]
    assert [record["method"]["threads"] for record in records] == [3, 1]


@pytest.mark.parametrize(("words", "told"), [([], False), (["--set", "log=verbose"], True), (["--quiet"], False)])
def test_loading_a_large_model_is_told(
    words: list[str], told: bool, generate: Call, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Guards a minute of silence where somebody looks, and mail from cron where nobody does."""
    monkeypatch.setattr("dsbd_cli.models.load_model.LARGE_BYTES", 1)
    generate(*words, lines=['{"id": 1, "prompt": "a"}'], code=0)
    said = [line.split()[1] for line in capsys.readouterr().err.splitlines() if "load" in line]
    assert said == (["loading", "loaded"] * 2 if told else [])


def test_a_resumed_run_looks_up_what_the_earlier_one_has_written(tmp_path: Path) -> None:
    prompts, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    rows = [{"id": str(number), "prompt": f"sql:\n{'x' * (number // 3)}"} for number in range(6)]
    options = ("--decode", "search", "--num-beams", "1", "--max-new-tokens", "24", "-o", str(output))
    drafts = ("--drafter", "suffix", "--depth", "4")  # the default goes by what they cost

    def answers(count: int, existing: str) -> list[dict[str, Any]]:
        prompts.write_text("".join(json.dumps(row) + "\n" for row in rows[:count]))
        asked = [
            "generate",
            "--draft",
            "none",
            "-i",
            str(prompts),
            "--quiet",
            "--existing",
            existing,
            *drafts,
            *options,
        ]
        assert run(asked) == 0
        return [json.loads(line) for line in output.read_text().splitlines()]

    first = answers(1, "error")
    [old, new] = answers(2, "resume")
    assert (new["text"], old["text"]) == (first[0]["text"],) * 2
    assert new["stats"]["drafters"]["suffix:rows"]["accepted"] > 3
    assert not old["stats"]["drafters"]["suffix:rows"]["drafted"]
