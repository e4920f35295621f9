"""An encoder-decoder checkpoint through the command: generate, bench and profile find out by themselves what it is."""

from __future__ import annotations

import io
import json
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForSeq2SeqLM

from dsbd_cli.cli.app import run
from dsbd_cli.models.checkpoints.lm_head import TrimmedLMHead, write_lm_head
from tests.helpers.checkpoints import numbers, save
from tests.helpers.pairs import beams, build_pair, perturbed

NEW = 10
LINES = [
    {"id": "a", "prompt": "w7 w8 w9 w10 w11 w12"},
    {"id": "b", "prompt": "w20 w30", "prefix": "w50 w51"},
    {"id": "c", "prompt": "w20 w30", "target_lang": "xx"},
    {"id": "d", "prompt": "w20 w30 w31", "token_rules": {"no_repeat_ngram_size": 1, "forced_bos_token_id": None}},
    {"id": "e", "prompt": " ".join(["w9"] * 70)},
    {"id": "f", "audio": "speech.wav", "language": "en"},
]


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    """A BART with the settings that bart-large-cnn has, and a draft of it."""
    folder = tmp_path_factory.mktemp("pair")
    target = build_pair("bart", scale=3.0)
    config = target.generation_config
    config.eos_token_id, config.pad_token_id, config.num_beams = [2, 3, 4, 5], 1, 4
    config.forced_bos_token_id, config.forced_eos_token_id, config.min_length = 9, 2, 5
    config._from_model_config = False
    for name, model in (("target", target), ("draft", perturbed(target, 0.03))):
        model.save_pretrained(folder / name)
        numbers().save_pretrained(folder / name)
    return str(folder / "target"), str(folder / "draft")


def call(monkeypatch: pytest.MonkeyPatch, arguments: list[str], lines: list[dict[str, Any]], code: int) -> list[Any]:
    written = io.TextIOWrapper(io.BytesIO(), encoding="utf-8", write_through=True)
    stdin = io.TextIOWrapper(io.BytesIO("\n".join(map(json.dumps, lines)).encode()), encoding="utf-8")
    with monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", written)
        patch.setattr(sys, "stdin", stdin)
        assert run(arguments) == code
    assert isinstance(written.buffer, io.BytesIO)
    return [json.loads(line) for line in written.buffer.getvalue().splitlines() if line.startswith(b"{")]


@pytest.mark.parametrize("draft", [True, False])
def test_generate(
    pair: tuple[str, str], draft: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["generate", "--target", pair[0], "--draft", pair[1] if draft else "none", "--decode", "search"]
    records = call(monkeypatch, [*options, "--max-new-tokens", str(NEW)], LINES, code=3)
    stock = AutoModelForSeq2SeqLM.from_pretrained(pair[0])
    stock.generation_config.num_beams = None
    encoder_input = torch.tensor([7, 8, 9, 10, 11, 12])
    ((ids, score),) = beams(stock, encoder_input, 4, [2, 3, 4, 5], NEW)[:1]
    assert records[0]["text"].split() == [f"w{token}" for token in ids if token > 5]
    assert records[0]["score"] == pytest.approx(score, abs=1e-4)
    assert records[0]["usage"]["source_tokens"] == 6
    rules = {"forced_bos_token_id": 9, "forced_eos_token_id": 2, "min_length": 5}
    assert rules.items() <= records[0]["token_rules"].items()
    assert records[1]["text"].startswith("w50 w51 ")
    assert "target_lang is 'xx'" in records[2]["error"]["message"]
    words = records[3]["text"].split()
    assert len(words) == len(set(words)) > 1
    assert "forced_bos_token_id" not in records[3]["token_rules"]
    assert records[4]["error"]["message"] == "line 5: the source has 70 tokens, but the target's encoder takes 64"
    assert "the target reads text" in records[5]["error"]["message"]
    told = " ".join(capsys.readouterr().err.split())
    assert "generation settings ask for num_beams 4: options of the run decide" in told


def test_a_trimmed_draft(pair: tuple[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards BART's bias beside the head, which has the width of the whole vocabulary."""
    folder = shutil.copytree(pair[1], tmp_path / "trimmed")
    head = AutoModelForSeq2SeqLM.from_pretrained(folder).get_output_embeddings()
    ids = torch.arange(0, 97, 2)
    write_lm_head(folder, TrimmedLMHead(ids, head.weight[ids].clone(), None, 97))
    options = ["generate", "--target", pair[0], "--decode", "search", "--max-new-tokens", str(NEW), "--draft"]
    want = call(monkeypatch, [*options, "none"], LINES[:2], code=0)
    records = call(monkeypatch, [*options, str(folder), "--depth", "2"], LINES[:2], code=0)
    assert [record["text"] for record in records] == [record["text"] for record in want]
    assert records[0]["stats"]["accepted"] > 0


def test_a_draft_of_another_kind_is_refused(
    pair: tuple[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    llama = str(save(tmp_path / "llama"))
    assert call(monkeypatch, ["generate", "--target", pair[0], "--draft", llama], LINES[:1], code=1) == []
    assert "the target has an encoder and the draft has none" in " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize(("task", "metric"), [("translation", "chrF"), ("summary", "ROUGE-L"), ("words", "1 - WER")])
def test_bench(pair: tuple[str, str], task: str, metric: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data, report = tmp_path / "data.jsonl", tmp_path / "found.jsonl"
    rows = [{"prompt": f"w{n} w{n + 1} w{n + 2}", "reference": f"w{n} w9 w{n + 2}"} for n in range(10, 14)]
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    methods = "beam-search,dsbd-search,hf-beam-search" if task == "translation" else "dsbd-search"
    options = ["bench", "--target", pair[0], "--draft", pair[1], "--task", task, "--data", str(data)]
    options += ["--methods", methods, "--max-new-tokens", "6", "--records", "4", "--rounds", "1", "--json", str(report)]
    call(monkeypatch, options, [], code=0)
    lines = [json.loads(line) for line in report.read_text().splitlines()]
    measured = [line for line in lines if "method" in line]
    assert len(measured) >= methods.count(",") + 1
    assert metric in report.read_text()


def test_profile(pair: tuple[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = tmp_path / "data.jsonl"
    data.write_text("".join(json.dumps({"prompt": f"w{n} w{n + 1}"}) + "\n" for n in range(10, 14)))
    options = ["profile", "--target", pair[0], "--draft", pair[1], "--input", str(data), "--max-new-tokens", "6"]
    call(monkeypatch, [*options, "--seconds", "3"], [], code=0)
