"""Grow the target from the draft: `python -m training.grow --work DIR`.

The target starts as the same function: widths and heads are doubled, new layers add nothing at first.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from transformers import AutoTokenizer, LlamaForCausalLM

from training.scores import load
from training.settings import OLD_LAYERS, ROLES, llama_config


def tall(weight: torch.Tensor) -> torch.Tensor:
    """Every output twice.  # [A, B] -> [2A, B]"""
    return torch.cat([weight, weight])


def wide(weight: torch.Tensor) -> torch.Tensor:
    """Every input twice, its weight split at random so that the halves learn different things.  # [A, B] -> [A, 2B]"""
    share = torch.empty_like(weight).uniform_(0.2, 0.8)
    return torch.cat([weight * share, weight * (1.0 - share)], dim=1)


@torch.no_grad()
def grow(draft: LlamaForCausalLM, eos: int, seed: int) -> LlamaForCausalLM:
    """A target with the draft's logits."""
    torch.manual_seed(seed)
    target = LlamaForCausalLM(llama_config(ROLES["target"].size, eos))
    target.get_input_embeddings().weight.copy_(tall(draft.get_input_embeddings().weight.T).T)
    target.model.norm.weight.copy_(tall(draft.model.norm.weight) / 2)
    for layer in target.model.layers:
        layer.self_attn.o_proj.weight.zero_()
        layer.mlp.down_proj.weight.zero_()
    for old, index in zip(draft.model.layers, OLD_LAYERS, strict=True):
        new = target.model.layers[index]
        for name, weight in old.named_parameters():
            grown = tall(wide(weight)) if weight.ndim == 2 else tall(weight)
            new.get_parameter(name).copy_(grown)
    return target


def main() -> None:
    """Parse the options, grow and save."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--work", type=Path, required=True, help="folder of the draft; `grown` goes there")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    draft, _ = load(options.work / "draft")
    tokenizer = AutoTokenizer.from_pretrained(options.work / "tokenizer")
    grow(draft, tokenizer.eos_token_id, options.seed).save_pretrained(options.work / "grown")
    tokenizer.save_pretrained(options.work / "grown")


if __name__ == "__main__":
    main()
