"""Distil the draft from the target: `python -m training.distill --work DIR`."""

from __future__ import annotations

import argparse
import random
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

from dsbd_cli.lab.tasks.record import TaskRecord
from training.batches import Batch, gold_groups, make_batches
from training.fit import Progress, fit, start
from training.generate import FULL_LEVEL, read_groups
from training.scores import load
from training.settings import DISTILL_RATE, DISTILL_STEPS
from training.train_gold import weighted_logits

BATCH_TOKENS = 3000


def mixed(seed: int, generated: Iterator[list[TaskRecord]]) -> Iterator[list[TaskRecord]]:
    """Gold groups and generated groups, half and half."""
    rng = random.Random(seed)
    gold = gold_groups(seed, lambda: FULL_LEVEL)
    while True:
        yield next(gold if rng.random() < 0.5 else generated)


def distill(
    target: LlamaForCausalLM,
    draft: LlamaForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    generated: Path,
    seed: int,
    progress: Progress,
    folder: Path,
) -> None:
    """Train the draft on KL(target || draft) at every weighted position."""
    target_hidden = torch.compile(target.model, dynamic=True)
    draft_hidden = torch.compile(draft.model, dynamic=True)

    def loss(_: nn.Module, batch: Batch) -> torch.Tensor:
        with torch.no_grad():
            wanted = weighted_logits(target_hidden, target, batch).log_softmax(-1)
        draft_logprobs = weighted_logits(draft_hidden, draft, batch).log_softmax(-1)
        losses = functional.kl_div(draft_logprobs, wanted, reduction="none", log_target=True).sum(-1)
        return (losses * batch.weights[batch.weights > 0]).sum() / batch.weights.sum()

    groups = mixed(seed, read_groups(generated))
    data = make_batches(groups, tokenizer, seed, lambda: BATCH_TOKENS)
    fit(draft, data, loss, progress, DISTILL_RATE, folder)


def main() -> None:
    """Parse the options and distil."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--work", type=Path, required=True, help="folder of target, draft and generated.jsonl")
    parser.add_argument("--seed", type=int, default=2)
    parser.add_argument("--steps", type=int, default=DISTILL_STEPS)
    parser.add_argument("--minutes", type=float, help="wall-clock limit; the schedule shortens to fit it")
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    target, tokenizer = load(options.work / "target")
    draft, _ = load(options.work / "draft")
    folder = options.work / "distilled"
    tokenizer.save_pretrained(folder)
    progress = start(options.steps, options.minutes)
    distill(target, draft, tokenizer, options.work / "generated.jsonl", options.seed, progress, folder)


if __name__ == "__main__":
    main()
