"""Checkpoints and tokenizers on disk, made once per session from code; nothing is downloaded."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, wraps
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from tests.helpers.tiny import V, build

TEXTS = [
    "The quick brown fox jumps over the lazy dog.\n",
    "select name, count(*) from t where x <= 3.14 and y != 'naïve café';\n",
    "Schöne Grüße aus Zürich — 東京 🙂 and\ttabs  and   spaces",
    "def f(x):\n    return [x ** 2 for _ in range(10)]\n",
]
CHAT = (
    "{% for m in messages %}"
    "{% if m['role'] not in ['user', 'assistant'] %}{{ raise_exception('no such role') }}{% endif %}"
    "<s>{{ m['role'] }}: {{ m['content'] }}</s>{% endfor %}{% if add_generation_prompt %}assistant:{% endif %}"
)


def _once(train: Callable[[], Tokenizer]) -> Callable[[], Tokenizer]:
    """Train once in a process; every call gives a tokenizer of its own."""
    trained = cache(lambda: train().to_str())
    return wraps(train)(lambda: Tokenizer.from_str(trained()))


@_once
def byte_level() -> Tokenizer:
    """As GPT-2, Llama 3, Qwen: BPE over the byte alphabet."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=380, special_tokens=["<s>", "</s>"], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(TEXTS, trainer)
    return tokenizer


@_once
def byte_fallback() -> Tokenizer:
    """As Llama 2 and Mistral: BPE over marked words with bytes for what is unknown."""
    trained = Tokenizer(models.BPE())
    trained.normalizer = normalizers.Replace(" ", "▁")
    trainer = trainers.BpeTrainer(vocab_size=200, special_tokens=["<unk>", "<s>", "</s>"], show_progress=False)
    trained.train_from_iterator(["the quick brown fox", "select name from t where x", "def f(x): return x"], trainer)
    pieces = [token for token, _ in sorted(trained.get_vocab().items(), key=lambda item: item[1])]
    pieces = pieces[:3] + [f"<0x{byte:02X}>" for byte in range(256)] + pieces[3:]
    vocabulary = {token: index for index, token in enumerate(pieces)}
    merges = [(a, b) for a, b in _merges(trained)]
    tokenizer = Tokenizer(models.BPE(vocabulary, merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>"])
    return tokenizer


def _merges(tokenizer: Tokenizer) -> list[tuple[str, str]]:
    import json

    return [tuple(pair) for pair in json.loads(tokenizer.to_str())["model"]["merges"]]


@_once
def unigram() -> Tokenizer:
    """As T5, XGLM and Gemma's first: Unigram with Metaspace."""
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    trainer = trainers.UnigramTrainer(
        vocab_size=120, special_tokens=["<unk>", "<s>", "</s>"], unk_token="<unk>", show_progress=False
    )
    tokenizer.train_from_iterator(TEXTS, trainer)
    return tokenizer


KINDS = {"byte-level": byte_level, "byte-fallback": byte_fallback, "unigram": unigram}


def wrap(tokenizer: Tokenizer, **settings: Any) -> PreTrainedTokenizerFast:
    """As AutoTokenizer would give it."""
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", **settings)


def numbers(width: int = V, changed: dict[int, str] | None = None) -> PreTrainedTokenizerFast:
    """A word per id, `width` ids."""
    words = {f"w{index}" if index > 2 else ("<pad>", "<s>", "</s>")[index]: index for index in range(width)}
    for index, word in (changed or {}).items():
        words = {(word if i == index else w): i for w, i in words.items()}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return wrap(tokenizer, pad_token="<pad>")


def save(folder: Path, family: str = "llama", *, tokenizer: Any = None, **changes: Any) -> Path:
    """A checkpoint folder."""
    build(family, **changes).to(torch.bfloat16).save_pretrained(folder)
    (tokenizer or numbers()).save_pretrained(folder)
    return folder


@pytest.fixture(autouse=True)
def checks_are_made_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards tests that break something against verdicts of others."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Llama in bfloat16 with its tokenizer."""
    return save(tmp_path_factory.mktemp("llama"))
