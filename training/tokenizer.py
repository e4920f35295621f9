"""The pair's tokenizer, byte-level BPE of the train split: `python -m training.tokenizer --work DIR`."""

from __future__ import annotations

import argparse
from itertools import chain, islice
from pathlib import Path

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from training.settings import EOS, MAX_POSITIONS, TOKENIZER_RECORDS, VOCAB_SIZE
from training.tasks import GENERATORS

# Digits stand alone; "_word" is one piece, so that a column's last word has a token of its own.
PIECES = r" ?[0-9]| ?[A-Za-z]+|_[A-Za-z]+|\n| ?[^\sA-Za-z0-9_']+| ?'|\s"


def train_tokenizer(seed: int, records: int) -> PreTrainedTokenizerFast:
    """A tokenizer trained on so many records of each task."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PIECES), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=[EOS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    texts = chain.from_iterable(
        (f"{record.prompt} {record.reference}" for record in islice(task.records("train", seed), records))
        for task in GENERATORS.values()
    )
    tokenizer.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=EOS,
        pad_token=EOS,
        model_max_length=MAX_POSITIONS,
        clean_up_tokenization_spaces=False,
    )


def main() -> None:
    """Parse the options, train and save."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--work", type=Path, required=True, help="the tokenizer goes to its folder `tokenizer`")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    train_tokenizer(options.seed, TOKENIZER_RECORDS).save_pretrained(options.work / "tokenizer")


if __name__ == "__main__":
    main()
