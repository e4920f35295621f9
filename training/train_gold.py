"""Train one model of the pair on gold answers: `python -m training.train_gold target --work DIR`."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional
from transformers import AutoTokenizer, LlamaForCausalLM, PreTrainedTokenizerFast

from training.batches import Batch, gold_groups, make_batches
from training.fit import Progress, fit, start
from training.scores import load
from training.settings import ROLES, Role, llama_config

EASY_PART = 0.2


def levels(fraction: float) -> list[float]:
    """The chances of levels 0, 1 and 2: easy records first."""
    if fraction < 0.08:
        return [0.6, 0.2, 0.2]
    if fraction < EASY_PART:
        return [0.2, 0.4, 0.4]
    return [0.05, 0.1, 0.85]


def batch_tokens(fraction: float) -> int:
    """Tokens in a batch: few at first, for more steps."""
    return 2000 if fraction < 0.5 else 4000


def weighted_logits(hidden: Callable[..., object], model: LlamaForCausalLM, batch: Batch) -> torch.Tensor:
    """The logits of the positions that have a weight.  # [P, V] float32"""
    with torch.autocast("cpu", torch.bfloat16):
        states = hidden(
            input_ids=batch.ids, attention_mask=batch.seen, position_ids=batch.positions, use_cache=False
        ).last_hidden_state
        return model.lm_head(states[batch.weights > 0]).float()


def train_gold(
    role: Role,
    tokenizer: PreTrainedTokenizerFast,
    seed: int,
    progress: Progress,
    folder: Path,
    warm: LlamaForCausalLM | None = None,
) -> LlamaForCausalLM:
    """A model trained on answers, and a little on questions; `warm` is where it starts, else a fresh model."""
    torch.manual_seed(seed)
    model = warm or LlamaForCausalLM(llama_config(role.size, tokenizer.eos_token_id))
    hidden = torch.compile(model.model, dynamic=True)

    def loss(_: nn.Module, batch: Batch) -> torch.Tensor:
        keep = batch.weights > 0
        losses = functional.cross_entropy(weighted_logits(hidden, model, batch), batch.labels[keep], reduction="none")
        return (losses * batch.weights[keep]).sum() / batch.weights.sum()

    easy = 0.0 if warm is None else EASY_PART
    groups = gold_groups(seed, lambda: levels(max(easy, progress.fraction())))
    data = make_batches(groups, tokenizer, seed, lambda: batch_tokens(progress.fraction()))
    fit(model, data, loss, progress, role.rate, folder)
    return model


def main() -> None:
    """Parse the options and train."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("role", choices=sorted(ROLES))
    parser.add_argument("--work", type=Path, required=True, help="folder of the tokenizer; checkpoints go there too")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, help="default: the role's")
    parser.add_argument("--minutes", type=float, help="wall-clock limit; the schedule shortens to fit it")
    parser.add_argument("--rate", type=float, help="peak learning rate; default: the role's")
    parser.add_argument("--warm", type=Path, help="checkpoint to start from")
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    role = ROLES[options.role]
    role = replace(role, rate=options.rate or role.rate)
    tokenizer = AutoTokenizer.from_pretrained(options.work / "tokenizer")
    warm = load(options.warm)[0] if options.warm else None
    folder = options.work / options.role
    tokenizer.save_pretrained(folder)
    progress = start(options.steps or role.steps, options.minutes)
    train_gold(role, tokenizer, options.seed, progress, folder, warm)


if __name__ == "__main__":
    main()
