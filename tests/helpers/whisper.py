"""Checkpoints of tiny random Whispers, with tokenizer and feature extractor on disk, as real ones have them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, WhisperFeatureExtractor

SPECIAL = ["<|endoftext|>", "<|startoftranscript|>", "<|en|>", "<|de|>", "<|transcribe|>", "<|translate|>"]
SPECIAL += ["<|notimestamps|>"]
WORDS = 60
END, START, EN, DE, TRANSCRIBE, TRANSLATE, TIMELESS = range(WORDS, WORDS + len(SPECIAL))
FIRST_TIME = TIMELESS + 1
STEP = 0.02  # seconds from one time to the next


def save_whisper(path: Path, model: Any, seconds: int, times: int, suppressed: Sequence[int]) -> None:
    """Save a model whose encoder takes `seconds`, with the tokens of this many times. suppressed: tokens that it never
    writes, besides those that are neither words, times nor the end."""
    config = model.generation_config
    config.decoder_start_token_id, config.eos_token_id, config.pad_token_id = START, END, END
    config.suppress_tokens = [*suppressed, START, EN, DE, TRANSCRIBE, TRANSLATE, TIMELESS]
    config.begin_suppress_tokens = [7, END]
    more = {
        "lang_to_id": {"<|en|>": EN, "<|de|>": DE},
        "_from_model_config": False,
        "is_multilingual": True,
        "task_to_id": {"transcribe": TRANSCRIBE, "translate": TRANSLATE},
        "no_timestamps_token_id": TIMELESS,
    }
    model.save_pretrained(path)
    # as real checkpoints have them; save_pretrained leaves out what it does not know
    settings = path / "generation_config.json"
    settings.write_text(json.dumps({**json.loads(settings.read_text()), **more}))
    words = {f"Ġw{index}": index for index in range(WORDS)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="Ġw0"))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(SPECIAL)
    tokenizer.add_tokens([f"<|{STEP * step:.2f}|>" for step in range(times)])
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|endoftext|>").save_pretrained(path)
    WhisperFeatureExtractor(feature_size=8, chunk_length=seconds).save_pretrained(path)
