"""A byte-level Mamba in the form in which MambaByte is published, that has learnt a few texts in a second."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import MambaConfig, MambaForCausalLM

WIDTH = 160


def byte_mamba(folder: Path, texts: list[tuple[str, str]]) -> Path:
    """A checkpoint folder of the package mamba_ssm: it goes on with each first text as with the second one, surely.

    The layers are random, and only the head is fitted to their outputs: that is a convex problem of a second.
    """
    torch.manual_seed(0)
    config = MambaConfig(hidden_size=WIDTH, num_hidden_layers=2, vocab_size=256, tie_word_embeddings=False)
    model = MambaForCausalLM(config)
    features, following = [], []
    for prompt, text in texts:
        ids, start = torch.tensor([[*(prompt + text).encode()]]), len(prompt.encode())
        with torch.no_grad():
            features.append(model.backbone(ids).last_hidden_state[0, start - 1 : -1])
        following.append(ids[0, start:])
    model.lm_head.weight = nn.Parameter(_fitted(torch.cat(features), torch.cat(following)))
    folder.mkdir()
    weights = {name.replace(".embeddings.", ".embedding."): value for name, value in model.state_dict().items()}
    torch.save(weights, folder / "pytorch_model.bin")
    settings = {"d_model": WIDTH, "n_layer": 2, "vocab_size": 256, "ssm_cfg": {}, "tie_embeddings": False}
    (folder / "config.json").write_text(json.dumps(settings | {"rms_norm": True, "pad_vocab_size_multiple": 8}))
    return folder


def _fitted(features: Tensor, following: Tensor) -> Tensor:
    """[256, C] weights of a head that tells the next byte [m] from features [m, C]."""
    weight = torch.zeros(256, features.shape[1], requires_grad=True)
    optimiser = torch.optim.LBFGS([weight], max_iter=150, line_search_fn="strong_wolfe")

    def loss() -> Tensor:
        optimiser.zero_grad()
        total = nn.functional.cross_entropy(features @ weight.T, following) + 1e-6 * weight.square().sum()
        total.backward()
        return total

    optimiser.step(loss)
    return weight.detach()
