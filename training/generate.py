"""Text that the target writes for the draft to learn from: `python -m training.generate --work DIR`."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from dataclasses import replace
from itertools import cycle, islice
from pathlib import Path

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from dsbd_cli.lab.tasks.record import TaskRecord
from training.batches import gold_groups
from training.scores import answers, load
from training.settings import GENERATED_GROUPS

GROUPS_PER_CALL = 16
FULL_LEVEL = [0.0, 0.0, 1.0]


def generated_groups(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, seed: int
) -> Iterator[list[TaskRecord]]:
    """Endless groups of the train split whose answers the target drew at temperature 1."""
    torch.manual_seed(seed)
    gold = gold_groups(seed, lambda: FULL_LEVEL)
    while True:
        groups = sorted(islice(gold, GROUPS_PER_CALL * 8), key=lambda group: len(group[0].prompt))
        for begin in range(0, len(groups), GROUPS_PER_CALL):
            part = groups[begin : begin + GROUPS_PER_CALL]
            prompts = [record.prompt for group in part for record in group]
            drawn = iter(answers(model, tokenizer, prompts, temperature=1.0))
            for group in part:
                yield [
                    replace(record, reference=tokenizer.decode(next(drawn), skip_special_tokens=True).strip())
                    for record in group
                ]


def write_groups(groups: Iterator[list[TaskRecord]], count: int, file: Path) -> None:
    """So many groups as JSON lines of [prompt, answer] pairs, each written as soon as it is made."""
    with file.open("w", encoding="utf-8") as out:
        for group in islice(groups, count):
            print(json.dumps([[record.prompt, record.reference] for record in group]), file=out, flush=True)


def read_groups(file: Path) -> Iterator[list[TaskRecord]]:
    """The groups of a file, over and over."""
    lines = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
    for line in cycle(lines):
        yield [TaskRecord("", prompt, answer, {}) for prompt, answer in line]


def main() -> None:
    """Parse the options and write the text."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--work", type=Path, required=True, help="folder of the target; text goes there too")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--groups", type=int, default=GENERATED_GROUPS)
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    model, tokenizer = load(options.work / "target")
    groups = generated_groups(model, tokenizer, options.seed)
    write_groups(groups, options.groups, options.work / "generated.jsonl")


if __name__ == "__main__":
    main()
