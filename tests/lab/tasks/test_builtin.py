"""The built-in pair: size, loading, tokenizer."""

from __future__ import annotations

from itertools import islice
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import dsbd_cli.models
from dsbd_cli.lab.tasks.choose import TASKS

BUILTIN = Path(dsbd_cli.models.__path__[0]) / "builtin"
FOLDERS = [BUILTIN / "target", BUILTIN / "draft"]
LARGEST_BYTES = 16 * 2**20


def test_together_within_the_size_limit() -> None:
    assert sum(file.stat().st_size for file in BUILTIN.rglob("*") if file.is_file()) <= LARGEST_BYTES


def test_one_tokenizer() -> None:
    target, draft = ((folder / "tokenizer.json").read_bytes() for folder in FOLDERS)
    assert target == draft


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)
def test_loads_and_answers(folder: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert model.config.eos_token_id == model.generation_config.eos_token_id == tokenizer.eos_token_id
    assert model.config.vocab_size == len(tokenizer)
    assert model.config.tie_word_embeddings
    prompt = next(TASKS["sql"].records()).prompt
    inputs = tokenizer(prompt, return_tensors="pt")
    assert set(inputs) <= {"input_ids", "attention_mask"}
    with torch.inference_mode():
        ids = model.generate(**inputs, max_new_tokens=64, do_sample=False)[0]
    assert ids[-1] == tokenizer.eos_token_id
    assert tokenizer.decode(ids[inputs["input_ids"].shape[1] :]).startswith(" SELECT ")


@pytest.mark.parametrize(
    "text",
    [
        "",
        " ",
        "  two  spaces \n\n and\ttabs \r\n",
        "snake_case_name, x_1 __init__ 1234 56.7 'quoted' \"both\"",
        "naïve café, 東京, 🙂, e\u0301",
        "don't .'s ,'' ( * )",
        "\x00\x1f",
    ],
)
def test_tokenizer_round_trip(text: str) -> None:
    tokenizer = AutoTokenizer.from_pretrained(FOLDERS[0])
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_tokenizer_round_trip_on_records() -> None:
    tokenizer = AutoTokenizer.from_pretrained(FOLDERS[0])
    for task in TASKS.values():
        for record in islice(task.records(), 50):
            text = f"{record.prompt} {record.reference}"
            assert tokenizer.decode(tokenizer.encode(text)) == text


def test_digits_stand_alone() -> None:
    tokenizer = AutoTokenizer.from_pretrained(FOLDERS[0])
    assert len(tokenizer.encode(" 1987")) == 4
