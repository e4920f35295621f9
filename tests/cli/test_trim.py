"""dsbd trim-draft on tiny checkpoints: what it writes, shows and refuses; the folder as a draft of dsbd generate."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from dsbd_cli import Engine, Request
from dsbd_cli.cli.app import run
from dsbd_cli.config.model import ModelSpec
from dsbd_cli.errors import UnsupportedModelError
from dsbd_cli.models.checkpoints.catalog import fit
from dsbd_cli.models.checkpoints.checkpoint import Checkpoint
from dsbd_cli.stats import RequestStats
from dsbd_cli.train import compare
from tests.helpers.checkpoints import byte_level, save, wrap

PROMPTS = [json.dumps({"id": str(n), "prompt": "The quick fox " * (1 + n % 3), "seed": n}) for n in range(16)]
LOADING = ["--dtype", "float32", "--device", "cpu"]
OPTIONS = [*LOADING, "--max-new-tokens", "6", "--num-beams", "2"]


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
def prompts(tmp_path: Path) -> str:
    path = tmp_path / "prompts.jsonl"
    path.write_text("\n".join(PROMPTS) + "\n")
    return str(path)


def trim(pair: tuple[str, str], *options: str, code: int = 0) -> None:
    common = LOADING if "--texts" in options and "--held-out" not in options else OPTIONS
    assert run(["trim-draft", "--target", pair[0], "--draft", pair[1], *common, *options]) == code


def generate(pair: tuple[str, str], prompts: str, output: Path, *options: str, draft: str | None = None) -> Any:
    models = ["--target", pair[0], "--draft", draft or pair[1]]
    assert run(["generate", *models, *OPTIONS, "-i", prompts, "-o", str(output), *options]) == 0
    return [json.loads(line) for line in output.read_text().splitlines()]


def test_from_prompts_to_a_draft(
    pair: tuple[str, str], prompts: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Guards the whole way: answers are counted, the two drafts measured on what was held out, and the folder serves
    generate with the same text."""
    small = tmp_path / "small"
    trim(pair, "--input", prompts, "--size", "120", "-o", str(small), "--json")
    record = json.loads(capfd.readouterr().out)
    assert (record["schema"], record["kept"], record["held_out_prompts"]) == ("dsbd.trim/1", 120, 2)
    assert 0 < record["counted"] <= 14 * 6
    assert record["coverage"] == 1.0
    assert record["head_bytes_after"] < record["head_bytes_before"]
    for side in ("before", "after"):
        assert record[side]["target_calls"] > 0
        assert record[side]["draft_s"] > 0
        assert record[side]["steps_per_call"] == pytest.approx(
            record[side]["steps"] / record[side]["target_calls"], abs=1e-6
        )
    assert record["before"]["steps"] == record["after"]["steps"]  # the same text
    full = generate(pair, prompts, tmp_path / "full.jsonl")
    again = generate(pair, prompts, tmp_path / "small.jsonl", draft=str(small))
    assert [row["text"] for row in full] == [row["text"] for row in again]


def test_prompts_that_do_not_fit_are_left_out(
    pair: tuple[str, str], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Guards a folder that is written though its measurement fails, and one long prompt that ends the run of others."""
    path, alone = tmp_path / "prompts.jsonl", tmp_path / "alone.jsonl"
    long = [json.dumps({"id": f"long-{n}", "prompt": "fox " * 2000, "max_token": 3}) for n in range(2)]
    path.write_text("\n".join([long[0], *PROMPTS[:6], long[1], *PROMPTS[8:]]) + "\n")
    alone.write_text(long[0] + "\n")
    trim(pair, "--input", str(path), "--size", "120", "-o", str(tmp_path / "small"))
    out, err = capfd.readouterr()
    for kind, name in (("prompt", "long-0"), ("held-out prompt", "long-1")):
        assert f"left out, because they cannot be answered: 1 {kind}, the first with id '{name}': prompt has" in err
    assert "measured on 1 held-out prompt" in out
    told = f"warning: --input {path}: line 1: unknown field 'max_token' (value 3): did you mean max_tokens?; not used"
    assert err.count("unknown field") == err.count(told) == 1
    trim(pair, "--input", str(alone), "--size", "120", "-o", str(tmp_path / "none"), code=1)
    assert f"no prompt of {alone} can be answered" in capfd.readouterr().err
    assert not (tmp_path / "none").exists()


def test_a_signal_after_the_draft_is_written(
    pair: tuple[str, str],
    prompts: str,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def stop(engine: Engine, requests: Sequence[Request], sums: compare.Sums) -> None:
        os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(compare, "_round", stop)
    small = tmp_path / "small"
    trim(pair, "--input", prompts, "--size", "120", "-o", str(small), code=143)
    assert capfd.readouterr().err == f"dsbd: stopped: {small} is written, but not measured\n"
    assert (small / "config.json").is_file()


def test_whether_a_pair_fits_knows_a_trimmed_head(pair: tuple[str, str], prompts: str, tmp_path: Path) -> None:
    small = str(tmp_path / "small")
    native = tmp_path / "native.jsonl"
    generate(pair, prompts, native)
    trim(pair, "--texts", str(native), "--size", "120", "-o", small, "--quiet")
    assert "the draft is trimmed: its head has 120 rows" in " ".join(
        fit(Checkpoint.open(ModelSpec(pair[0])), Checkpoint.open(ModelSpec(small, "draft"))).notes
    )
    with pytest.raises(UnsupportedModelError, match="is a trimmed draft: only a draft may lack tokens"):
        fit(Checkpoint.open(ModelSpec(small)), Checkpoint.open(ModelSpec(pair[1], "draft")))


def test_from_texts(pair: tuple[str, str], prompts: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Guards both record forms, several files, the table, and silence."""
    native, openai = tmp_path / "native.jsonl", tmp_path / "openai.jsonl"
    generate(pair, prompts, native)
    generate(pair, prompts, openai, "--output-format", "openai")
    texts = ["--texts", str(native), "--texts", str(openai)]
    trim(pair, *texts, "--coverage", "0.9", "-o", str(tmp_path / "a"), "--held-out", prompts)
    shown = capfd.readouterr().out
    for word in ("before", "after", "head rows", "drafts accepted", "steps per target call", "16 held-out prompts"):
        assert word in shown
    assert "100.00%" in shown
    assert "100 %" not in shown
    trim(pair, *texts, "--coverage", "0.9", "-o", str(tmp_path / "b"))
    out, err = capfd.readouterr()
    assert "drafts accepted" not in out
    assert "nothing is measured" in err
    trim(pair, *texts, "--coverage", "0.9", "-o", str(tmp_path / "c"), "--quiet")
    assert capfd.readouterr() == ("", "")


def test_a_draft_that_got_worse_is_told(
    prompts: str, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The draft is the target itself, so every draft is accepted; with few rows left hardly one is. Times are made
    equal, because they prove nothing here."""
    tokenizer = wrap(byte_level())
    model = str(save(tmp_path / "model", tokenizer=tokenizer, vocab_size=len(tokenizer), seed=1))
    native = tmp_path / "native.jsonl"
    generate((model, model), prompts, native)
    plain = compare._round

    def timeless(engine: Engine, requests: Sequence[Request], sums: compare.Sums) -> None:
        plain(engine, requests, sums)
        sums.stats.draft_s = sums.stats.target_s = 1.0

    monkeypatch.setattr(compare, "_round", timeless)
    words = ["--texts", str(native), "--held-out", prompts]
    capfd.readouterr()
    trim((model, model), *words, "--size", "4", "-o", str(tmp_path / "few"))
    said = capfd.readouterr().err
    assert "warning: the trimmed draft is worse than the full one: 1." in said
    assert "steps per target call instead of" in said
    assert "a larger --size or --coverage keeps more rows" in said
    trim((model, model), *words, "--size", "4", "-o", str(tmp_path / "quiet"), "--quiet")
    assert capfd.readouterr().err == ""
    trim((model, model), *words, "--size", "379", "-o", str(tmp_path / "all"))
    assert "worse" not in capfd.readouterr().err


def test_what_is_called_worse() -> None:
    def measure(steps: int, seconds: float) -> compare.Sums:
        stats = RequestStats(steps=steps, target_calls=100, draft_s=seconds / 2, target_s=seconds / 2)
        return compare.Sums(stats, tokens=100)

    assert compare.worse(measure(200, 1.0), measure(199, 1.04)) is None
    assert compare.worse(measure(200, 1.0), measure(220, 0.5)) is None
    assert compare.worse(measure(200, 1.0), measure(150, 1.0)) == (
        "1.50 steps per target call instead of 2.00, 10.00 ms per token in both models instead of 10.00"
    )
    assert compare.worse(measure(200, 1.0), measure(200, 1.2)) == "12.00 ms per token in both models instead of 10.00"
    assert compare.worse(compare.Sums(), measure(1, 1.0)) is None


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--size 9 --input {p}", "--output is missing"),
        ("--size 9 -o {o}", "give either --texts or --input"),
        ("--size 9 -o {o} --input {p} --texts {p}", "give either --texts or --input"),
        ("-o {o} --texts {n}", "--size or --coverage is missing"),
        ("-o {o} --texts {n} --size 0", "--size is 0, but must be 1 or more"),
        ("-o {o} --texts {n} --size -3", "--size is -3, but must be 1 or more"),
        (
            "-o {o} --texts {n} --size 50 --coverage 0.5",
            "--size and --coverage say the same in two ways: give one of them",
        ),
        ("-o {o} --input {p} --size 4000", "--size is 4000, but the draft has only 380 logits"),
        ("-o {o} --texts {p} --size 50", "prompts.jsonl, line 1: beams is missing"),
        ("-o {o} --texts {o}.csv --size 50", "--texts {o}.csv is a table, whose texts are not counted"),
        ("-o {o} --texts {o}.none --size 50", "error: --texts {o}.none cannot be read: No such file"),
        ("-o {o} --input {o}.none --size 50", "error: --input {o}.none cannot be read: No such file"),
        ("-o {o} --input {p} --held-out {o}.none --size 50", "--held-out {o}.none cannot be read: No such file"),
        ("-o {o} --input {e} --size 50", "holds no prompts"),
        ("-o {o} --input {p} --held-out {p} --size 50", "--input and --held-out are both {p}"),
        ("-o {o}\udcff --input {p} --size 50", "--output is '{o}\\udcff', which is not UTF-8"),
        ("-o {p} --input {p} --size 50", "exists: name a new folder"),
        ("-o {o} --input {p} --size 50 --json -q", "--json and --quiet cannot be used together"),
        ("-o {o} --texts {n} --size 50 --num-beams 2", "--num-beams 2 would do nothing, because --texts are counted"),
        ("-o {o} --texts {n} --size 50 --chat", "--chat would do nothing, because --texts are counted"),
        ("-o {o} --texts {n} --size 50 --no-chat", "--no-chat would do nothing, because --texts are counted"),
        ("-o {o} --input {p} --size 50 --chat", "error: --chat: target {t} has no chat template: drop it"),
        ("-o {o} --texts {n} --size 50 --decode search", "--decode search would do nothing, because --texts are"),
    ],
)
def test_refusals(
    pair: tuple[str, str], prompts: str, tmp_path: Path, options: str, message: str, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "empty.jsonl").write_text("")
    (tmp_path / "native.jsonl").write_text('{"text": "The fox"}\n{"error": {"type": "x"}}\n')
    names = {
        "t": pair[0],
        "p": prompts,
        "o": tmp_path / "new",
        "e": tmp_path / "empty.jsonl",
        "n": tmp_path / "native.jsonl",
    }
    trim(pair, *options.format(**names).split(), code=2)
    assert message.format(**names) in capfd.readouterr().err
    assert not (tmp_path / "new").exists()


def test_a_head_is_no_draft_to_trim(
    pair: tuple[str, str], prompts: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    head = tmp_path / "head"
    head.mkdir()
    (head / "config.json").write_text('{"speculators_model_type": "eagle3"}')
    for name in ("mtp", str(head)):
        assert run(["trim-draft", "--target", pair[0], "--draft", name, "-i", prompts, "--size", "9", "-o", "x"]) == 2
        assert f"--draft {name} is a draft head" in capfd.readouterr().err
    assert run(["generate", "--target", str(head), "-i", prompts]) == 1
    assert f"target model '{head}' is a draft head, and no model" in capfd.readouterr().err


def test_no_draft_to_trim(
    pair: tuple[str, str], prompts: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    arguments = [
        "--target",
        pair[0],
        "--draft",
        "none",
        "--input",
        prompts,
        "--size",
        "50",
        "-o",
        str(tmp_path / "x"),
    ]
    assert run(["trim-draft", *arguments]) == 2
    assert "there is no draft to trim: name one with --draft" in capfd.readouterr().err
