"""Train an encoder-decoder model on strings like those of chemical reactions: the answer is the source with one group
exchanged, so that it copies nearly all of it and its law is peaked.

    python -m training.reactions --work DIR --minutes 6

The source is a string of random atoms with a leaving group (`Br`) and, behind a dot, what takes its place; the answer
is the product. Writes DIR/target and DIR/test.jsonl: `{"prompt": "a f Br d . k n", "reference": "a f k n d"}`.
"""

from __future__ import annotations

import argparse
import json
import random
from pathlib import Path

from training.grapheme_phoneme import END, make_model, make_tokenizer, train

ATOMS = "abcdefghijklmnopqrstuvwxyz"
LEAVING, DOT = "br", "."
SHORTEST, LONGEST = 24, 48  # atoms; the model takes 64 tokens
LINES = 60_000  # to train on


def line(rng: random.Random) -> tuple[list[str], list[str]]:
    """Source and product."""
    atoms = [rng.choice(ATOMS) for _ in range(rng.randint(SHORTEST, LONGEST))]
    group = [rng.choice(ATOMS) for _ in range(rng.randint(1, 4))]
    at = rng.randrange(len(atoms) + 1)
    return [*atoms[:at], LEAVING, *atoms[at:], DOT, *group], [*atoms[:at], *group, *atoms[at:]]


def main() -> None:
    """Parse the options, make the lines and train the model."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--minutes", type=float, default=6.0)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--peak", type=float, default=4e-3, help="largest learning rate")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    tokenizer = make_tokenizer({letter: [[LEAVING, DOT]] for letter in ATOMS})
    ids = tokenizer.get_vocab()
    rng = random.Random(options.seed)
    options.work.mkdir(parents=True, exist_ok=True)
    with (options.work / "test.jsonl").open("w") as file:
        for _ in range(500):
            source, product = line(rng)
            file.write(json.dumps({"prompt": " ".join(source), "reference": " ".join(product)}) + "\n")
    lines = [line(rng) for _ in range(LINES)]
    pairs = [([*(ids[one] for one in source), END], [*(ids[one] for one in product), END]) for source, product in lines]
    model = make_model((options.width, options.layers, options.layers), len(ids), options.seed)
    train(model, pairs, options.minutes, options.peak, options.seed)
    model.save_pretrained(options.work / "target")
    tokenizer.save_pretrained(options.work / "target")


if __name__ == "__main__":
    main()
