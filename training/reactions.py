"""Train an encoder-decoder model on a task like those of chemistry: the answer is the source with a few edits.
`python -m training.reactions --work DIR --minutes 5`

Sources are random molecules in the manner of SMILES, answers what three made-up reactions turn them into: Br becomes N,
an acid chloride an acid, a nitrile an amine. Every other token is copied. Writes DIR/target and DIR/test.jsonl,
`{"prompt": "C C Br", "reference": "C C N"}`. The model is trained narrow and then widened: each feature stands there
several times, and layers that add nothing are put behind the others. So it computes what it has learned at the price of
the larger shape.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import sys
from pathlib import Path

import torch
from torch import Tensor
from transformers import MBartConfig, MBartForConditionalGeneration

from training.grapheme_phoneme import END, make_tokenizer, settings, train

ATOMS = ("C", "C", "C", "C", "N", "O", "S", "F", "Cl", "Br")
RINGS = (["c", "1", "c", "c", "c", "c", "c", "1"], ["c", "1", "c", "c", "n", "c", "c", "1"], ["C", "1", "C", "C", "1"])
GROUPS = (["C", "(", "=", "O", ")", "Cl"], ["C", "#", "N"], ["C", "(", "=", "O", ")"])
TOKENS = sorted({*ATOMS, *"cn1()=#"})
SHORTEST, LONGEST = 24, 44  # tokens of a source, of the 64 that the model takes
LINES = 60_000  # to train on
NARROW, HEADS, LAYERS = 64, 4, 2  # while it learns


def molecule(rng: random.Random, length: int, depth: int = 0) -> list[str]:
    """Tokens of a chain with rings, groups and branches; about `length` of them."""
    tokens: list[str] = []
    while len(tokens) < length:
        kind = rng.random()
        if kind < 0.12:
            tokens += rng.choice(RINGS)
        elif kind < 0.27:
            tokens += rng.choice(GROUPS)
        elif kind < 0.37 and depth < 2 and tokens:
            tokens += ["(", *molecule(rng, rng.randint(1, 4), depth + 1), ")"]
        elif kind < 0.43 and tokens:
            tokens += ["=", rng.choice("CN")]
        else:
            tokens.append(rng.choice(ATOMS))
    return tokens


def product(source: list[str]) -> list[str]:
    """What the reactions turn a molecule into."""
    tokens: list[str] = []
    for position, token in enumerate(source):
        acid = token == "Cl" and source[max(0, position - 3) : position] == ["=", "O", ")"]
        nitrile = token == "#" and source[position + 1 : position + 2] == ["N"]
        if not nitrile:
            tokens.append({"Br": "N"}.get(token, "O" if acid else token))
    return tokens


def line(rng: random.Random) -> tuple[list[str], list[str]]:
    """Source and answer."""
    while True:
        source = molecule(rng, rng.randint(SHORTEST, LONGEST - 6))
        if len(source) <= LONGEST:
            return source, product(source)


def _config(width: int, layers: int, vocab_size: int) -> MBartConfig:
    size = (width, layers, layers)
    return MBartConfig(**settings(size, HEADS, vocab_size), dropout=0.0, scale_embedding=False)


def make_narrow(vocab_size: int, seed: int) -> MBartForConditionalGeneration:
    """A small mBART whose encoder and decoder begin with the same waves as positions: that is half of copying."""
    torch.manual_seed(seed)
    model = MBartForConditionalGeneration(_config(NARROW, LAYERS, vocab_size))
    for side in (model.model.encoder, model.model.decoder):
        table = side.embed_positions.weight.data
        angle = torch.arange(len(table)).unsqueeze(1) * 100 ** (-torch.arange(NARROW // 2) / (NARROW // 2))
        table.copy_(0.1 * torch.cat((angle.sin(), angle.cos()), 1))
    return model


def widen(narrow: MBartForConditionalGeneration, times: int, layers: int) -> MBartForConditionalGeneration:
    """The same function with every feature `times` times, and with layers behind the others that add nothing.

    Raises ValueError where the shape would be smaller.
    """
    config = narrow.config
    if times < 1 or layers < config.decoder_layers:
        raise ValueError(f"{times} times as wide with {layers} layers is smaller than what was trained")
    wide = MBartForConditionalGeneration(_config(times * config.d_model, layers, config.vocab_size))
    old, new = narrow.state_dict(), wide.state_dict()
    for name, value in new.items():
        if name in old:
            value.copy_(_tiled(name, old[name], times, value.shape))
        elif name.endswith(("out_proj.weight", "out_proj.bias", "fc2.weight", "fc2.bias")):
            value.zero_()
    wide.load_state_dict(new)
    return wide


def _tiled(name: str, value: Tensor, times: int, shape: torch.Size) -> Tensor:
    """A parameter of the wide model; shape: what it has there."""
    if name == "final_logits_bias":
        return value
    # heads stay as many, and each holds its own features several times, so that they are repeated one by one
    for axis, size in enumerate(shape):
        if size != value.shape[axis]:
            value = value.repeat_interleave(times, axis)
    if name.endswith("_proj.weight") or (".fc" in name and name.endswith("weight")):
        value = value / times  # a sum over equal features
    if ".q_proj" in name:
        value = value / math.sqrt(times)  # scores are sums over features, divided by the root of their number
    if name in ("model.decoder.layer_norm.weight", "model.decoder.layer_norm.bias"):
        value = value / times  # and so are logits
    return value


def main() -> None:
    """Parse the options, make the lines, train and widen the model."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--minutes", type=float, default=5.0)
    parser.add_argument("--times", type=int, default=4, help="how many times as wide the model that is written is")
    parser.add_argument("--layers", type=int, default=4, help="of the encoder and of the decoder that are written")
    parser.add_argument("--peak", type=float, default=3e-3, help="largest learning rate")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    tokenizer = make_tokenizer({"": [TOKENS]})
    ids = tokenizer.get_vocab()
    rng = random.Random(options.seed)
    options.work.mkdir(parents=True, exist_ok=True)
    with (options.work / "test.jsonl").open("w") as file:
        for _ in range(500):
            source, answer = line(rng)
            file.write(json.dumps({"prompt": " ".join(source), "reference": " ".join(answer)}) + "\n")
    pairs = [
        ([*(ids[token] for token in source), END], [*(ids[token] for token in answer), END])
        for source, answer in (line(rng) for _ in range(LINES))
    ]
    print(f"{len(pairs)} lines", file=sys.stderr)
    narrow = make_narrow(len(ids), options.seed)
    train(narrow, pairs, options.minutes, options.peak, options.seed)
    widen(narrow, options.times, options.layers).save_pretrained(options.work / "target")
    tokenizer.save_pretrained(options.work / "target")


if __name__ == "__main__":
    main()
