"""Tiny pairs with two tokenizers: models whose distribution is one of bytes, so that a draft in another vocabulary is a
good one."""

from __future__ import annotations

import math
from collections import Counter
from functools import cache

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor

from dsbd_cli.engine.protocols import ForestInput
from dsbd_cli.models.tokenizer import HFCodec, byte_alphabet
from tests.helpers.checkpoints import TEXTS, byte_fallback, byte_level, unigram, wrap
from tests.helpers.toy import HashModel

EMOJI = "🙂👩‍👩‍👧 e\u0301a\u0308 ok 東京 🙂👩‍👩‍👧 e\u0301a\u0308"


def bytes_only() -> Tokenizer:
    """As MambaByte: a token per byte."""
    vocabulary = {"<s>": 0, "</s>": 1} | {char: byte + 2 for char, byte in byte_alphabet().items()}
    tokenizer = Tokenizer(models.BPE(vocabulary, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<s>", "</s>"])
    return tokenizer


def other_level() -> Tokenizer:
    """A byte-level BPE of other merges and other ids than `byte_level`."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=330,
        special_tokens=["<pad>", "</s>", "<s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([EMOJI, *(text[::2] for text in TEXTS), "the quick fox jumps"], trainer)
    return tokenizer


KINDS = {
    "bytes": bytes_only,
    "byte-level": byte_level,
    "other byte-level": other_level,
    "byte-fallback": byte_fallback,
    "unigram": unigram,
}


@cache
def codec(kind: str) -> HFCodec:
    """A tokenizer with one end token."""
    tokenizer = wrap(KINDS[kind]())
    return HFCodec(tokenizer, (tokenizer.convert_tokens_to_ids("</s>"),))


@cache
def _byte_distribution() -> dict[bytes, list[float]]:
    """Log-probabilities of the next byte after up to three bytes, by counting in the texts."""
    counts: dict[bytes, Counter[int]] = {}
    data = "\n".join([*TEXTS, EMOJI, *TEXTS, EMOJI]).encode()
    for position, byte in enumerate(data):
        for length in range(4):
            counts.setdefault(data[max(0, position - length) : position], Counter())[byte] += 1
    return {
        context: [math.log((following[byte] + 0.01) / (following.total() + 2.56)) for byte in range(256)]
        for context, following in counts.items()
    }


class TextModel(HashModel):
    """Goes on with the texts by the last three bytes, in long tokens as a trained model does; and a little of the whole
    path is in it, so that nothing ties."""

    def __init__(self, kind: str) -> None:
        """kind: of the vocabulary."""
        self._kind, self._table = kind, codec(kind).token_bytes()
        super().__init__(len(self._table), sharpness=0.2)

    def _logits(self, batch: ForestInput, stored: Tensor) -> Tensor:
        there = batch.slot_positions.unsqueeze(1)  # [R, 1, S]
        contexts = torch.zeros(*batch.tokens.shape, 3, dtype=torch.int64)
        for back in range(3):
            before = batch.positions - 2 + back
            seen = batch.mask & (there == before.unsqueeze(-1))
            contexts[..., back] = torch.where(seen.any(-1), (seen * stored.unsqueeze(1)).sum(-1), -1)
        lines = [[self._row(tokens) for tokens in row] for row in contexts.tolist()]
        return super()._logits(batch, stored) + torch.stack([torch.stack(line) for line in lines])

    def _row(self, tokens: list[int]) -> Tensor:
        """[V] logits after up to three tokens."""
        context = b"".join(self._table[token] for token in tokens if 0 <= token < len(self._table))[-3:]
        return _scores(self._kind, _known(context))


def _known(context: bytes) -> bytes:
    """The longest end of a context that the distribution knows."""
    distribution = _byte_distribution()
    while context not in distribution:
        context = context[1:]
    return context


@cache
def _scores(kind: str, context: bytes) -> Tensor:
    """[V] logits after a known context."""
    made = torch.tensor([_score(context, piece) for piece in codec(kind).token_bytes()])
    made[list(codec(kind).eos_ids)] = -5.0
    return made


def _score(context: bytes, piece: bytes) -> float:
    distribution, scores = _byte_distribution(), []
    for byte in piece:
        while context not in distribution:
            context = context[1:]
        scores.append(distribution[context][byte])
        context = (context + bytes([byte]))[-3:]
    likely = min(scores, default=-20.0) > -2
    return sum(scores) + likely * 2.0 * (len(piece) - 1) if piece else -20.0
