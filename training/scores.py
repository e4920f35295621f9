"""Greedy scores of a checkpoint: `python -m training.scores FOLDER --split dev --records 200`."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerFast

from dsbd_cli.lab.tasks.choose import TASKS
from dsbd_cli.lab.tasks.dataset import Dataset
from dsbd_cli.lab.tasks.record import TaskRecord
from training.tasks import GENERATORS

MAX_NEW_TOKENS = 64
BATCH = 50


def load(folder: Path) -> tuple[PreTrainedModel, PreTrainedTokenizerFast]:
    """A checkpoint in float32 with its tokenizer."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    return model.eval(), AutoTokenizer.from_pretrained(folder)


@torch.inference_mode()
def answers(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, prompts: list[str], temperature: float = 0.0
) -> list[list[int]]:
    """The new tokens of every prompt, the end token (if reached) included; greedy at temperature 0."""
    inputs = tokenizer(prompts, return_tensors="pt", padding=True, padding_side="left", return_token_type_ids=False)
    sampling = {"do_sample": True, "temperature": temperature, "top_k": 0, "top_p": 1.0} if temperature else {}
    outputs = model.generate(
        **inputs,
        max_new_tokens=MAX_NEW_TOKENS,
        pad_token_id=tokenizer.pad_token_id,
        **({"do_sample": False} | sampling),
    )
    cut = []
    for row in outputs[:, inputs["input_ids"].shape[1] :].tolist():
        length = row.index(tokenizer.eos_token_id) + 1 if tokenizer.eos_token_id in row else len(row)
        cut.append(row[:length])
    return cut


def answered(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, records: list[TaskRecord]
) -> Iterator[tuple[TaskRecord, str]]:
    """Every record with its greedy answer."""
    for begin in range(0, len(records), BATCH):
        part = records[begin : begin + BATCH]
        for record, tokens in zip(part, answers(model, tokenizer, [r.prompt for r in part]), strict=True):
            yield record, tokenizer.decode(tokens, skip_special_tokens=True)


def score(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, task: Dataset, records: list[TaskRecord], shown: int = 0
) -> float:
    """The share of records answered right; prints the first `shown` wrong answers."""
    right = 0
    for record, text in answered(model, tokenizer, records):
        good = bool(task.score(record, text)[task.metrics[0]])
        right += good
        if not good and shown > 0:
            shown -= 1
            print(f"{record.prompt}\n  gold {record.reference}\n  got {text}\n")
    return right / len(records)


def main() -> None:
    """Parse the options and print one JSON line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--split", default="dev")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--records", type=int, default=200)
    parser.add_argument("--show", type=int, default=0, help="wrong answers to print per task")
    options = parser.parse_args()
    model, tokenizer = load(options.folder)
    scores = {
        name: score(
            model,
            tokenizer,
            task,
            list(islice(GENERATORS[name].records(options.split, options.seed), options.records)),
            options.show,
        )
        for name, task in TASKS.items()
    }
    print(json.dumps({"folder": str(options.folder), "split": options.split, "records": options.records, **scores}))


if __name__ == "__main__":
    main()
