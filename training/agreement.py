"""How often draft and target agree: `python -m training.agreement TARGET DRAFT`."""

from __future__ import annotations

import argparse
import json
from itertools import islice
from pathlib import Path

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from training.scores import answers, load
from training.tasks import GENERATORS, Generator


@torch.inference_mode()
def agreement(
    target: PreTrainedModel, draft: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, task: Generator, records: int
) -> float:
    """The mean over answer tokens of sum(min(p, q)) at temperature 1, on text that the target drew."""
    torch.manual_seed(0)
    prompts = [record.prompt for record in islice(task.records("dev", 0), records)]
    drawn = answers(target, tokenizer, prompts, temperature=1.0)
    total, count = 0.0, 0
    for prompt, answer in zip(prompts, drawn, strict=True):
        context = tokenizer(prompt)["input_ids"]
        ids = torch.tensor([context + answer])
        p, q = (model(ids).logits[0, len(context) - 1 : -1].softmax(-1) for model in (target, draft))
        total += torch.minimum(p, q).sum().item()
        count += len(answer)
    return total / count


def main() -> None:
    """Parse the options and print one JSON line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("target", type=Path)
    parser.add_argument("draft", type=Path)
    parser.add_argument("--records", type=int, default=200)
    options = parser.parse_args()
    target, tokenizer = load(options.target)
    draft, _ = load(options.draft)
    print(json.dumps({n: agreement(target, draft, tokenizer, t, options.records) for n, t in GENERATORS.items()}))


if __name__ == "__main__":
    main()
