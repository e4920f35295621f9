"""VocabTrim (Goel et al. 2025, arXiv 2506.22694): a draft whose LM head has only the rows of frequent tokens.

A draft with a large vocabulary spends much of its time in the LM head. The target's distribution does not depend on the
draft's, so tokens that are not proposed cost acceptance, never exactness.
"""

from __future__ import annotations

import shutil
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError

from dsbd_cli.config.model import DTYPES, ModelSpec
from dsbd_cli.errors import ModelError, OutputError, UsageError, writing
from dsbd_cli.models.checkpoints.checkpoint import Checkpoint
from dsbd_cli.models.checkpoints.generation import eos_ids
from dsbd_cli.models.checkpoints.lm_head import LM_HEAD_FILE, TrimmedLMHead, lm_head_keys, plain_lm_head, write_lm_head
from dsbd_cli.models.checkpoints.loader import load
from dsbd_cli.models.draft_heads.load import names_draft_head

# not copied to the folder of the trimmed draft
_WRITTEN = ("config.json", "generation_config.json")
_COPIED = ("*.json", "*.model", "*.txt", "*.jinja", "*.tiktoken", "*.py")
_BATCH = 256


@dataclass(frozen=True, slots=True)
class TrimReport:
    """Report of a trimmed head: rows kept of `vocab_size`, the share of the counted tokens that they cover, and the
    bytes of the LM head."""

    kept: int
    vocab_size: int
    special: int
    counted: int
    distinct: int
    coverage: float
    head_bytes_before: int
    head_bytes_after: int


def count_texts(spec: ModelSpec, texts: Iterable[str]) -> Counter[int]:
    """Count how often each token of the draft's vocabulary occurs in the texts."""
    tokenizer = Checkpoint.open(spec).tokenizer
    counts: Counter[int] = Counter()
    batch: list[str] = []
    for text in texts:
        batch.append(text)
        if len(batch) == _BATCH:
            _count(tokenizer, batch, counts)
            batch = []
    _count(tokenizer, batch, counts)
    return counts


def _count(tokenizer: Any, texts: list[str], counts: Counter[int]) -> None:
    if texts:
        for ids in tokenizer(texts, add_special_tokens=False)["input_ids"]:
            counts.update(ids)


def choose_ids(
    counts: Counter[int], always: Iterable[int], vocab_size: int, *, size: int | None, coverage: float | None
) -> list[int]:
    """Return the ids to keep, ascending: `always`, and the most frequent ones until there are `size` in all, or until
    they cover the share `coverage` of all counts.

    Tokens that were never counted come last, lower ids first, because merges are learnt in order of frequency. Raises
    UsageError for a size or coverage that makes no sense.
    """
    kept = {token for token in always if 0 <= token < vocab_size}
    seen = [(token, count) for token, count in counts.items() if 0 <= token < vocab_size]
    total = sum(count for _, count in seen)
    if not total:
        raise UsageError("no tokens were counted: the texts are empty, or not of this draft's vocabulary")
    ranked = [token for token, _ in sorted(seen, key=lambda item: (-item[1], item[0]))]
    if size is not None:
        _check_size(size, len(kept), vocab_size)
        rest = (token for token in range(vocab_size) if token not in counts)
        for token in (*ranked, *rest):
            if len(kept) >= size:
                break
            kept.add(token)
        return sorted(kept)
    assert coverage is not None, "check() has seen to it"
    covered = sum(counts[token] for token in kept)
    for token in ranked:
        if covered >= coverage * total:
            break
        if token not in kept:
            kept.add(token)
            covered += counts[token]
    if len(kept) >= vocab_size:
        raise UsageError(f"--coverage {coverage} keeps all {vocab_size} tokens, so nothing would be trimmed: lower it")
    return sorted(kept)


def _check_size(size: int, special: int, vocab_size: int) -> None:
    if size >= vocab_size:
        raise UsageError(f"--size is {size}, but the draft has only {vocab_size} logits: give less")
    if size <= special:
        raise UsageError(f"--size is {size}, but {special} special and end tokens are always kept: give more")


def check(spec: ModelSpec, output: Path, *, size: int | None, coverage: float | None) -> Checkpoint:
    """Return the checkpoint of a draft that can be trimmed. Raises UsageError or ModelError for all that can be
    refused before anything is counted."""
    if size is None and coverage is None:
        raise UsageError("--size or --coverage is missing: say how many rows to keep, or which share they shall cover")
    if size is not None and coverage is not None:
        raise UsageError("--size and --coverage say the same in two ways: give one of them")
    if size is not None and size < 1:
        raise UsageError(f"--size is {size}, but must be 1 or more")
    if coverage is not None and not 0 < coverage <= 1:
        raise UsageError(f"--coverage is {coverage}, but must be above 0 and at most 1")
    if output.exists():
        raise UsageError(f"--output {output} exists: name a new folder")
    if not output.parent.is_dir():
        raise UsageError(f"--output {output}: the folder {output.parent} does not exist")
    draft = None if spec.in_target else Checkpoint.open(spec)
    if draft is None or names_draft_head(draft):
        raise UsageError(
            f"--draft {spec.source} is a draft head, whose tokens are chosen when it is made: give a draft model"
        )
    if draft.is_gguf:
        raise ModelError(f"draft model {spec.source!r} is GGUF, whose head cannot be taken apart: use the original")
    if (draft.path / LM_HEAD_FILE).is_file():
        raise UsageError(f"{spec.source} is trimmed already: give the draft that it was made from")
    if size is not None:
        _check_size(size, 0, draft.config.get_text_config(decoder=True).vocab_size)
    if getattr(draft.config, "quantization_config", None) is not None:
        raise ModelError(
            f"draft model {spec.source!r} is quantized, so its head cannot be taken apart: use the original"
        )
    return draft


def trim(
    spec: ModelSpec,
    output: Path,
    counts: Counter[int],
    *,
    size: int | None = None,
    coverage: float | None = None,
    end_tokens: Sequence[int] = (),
) -> TrimReport:
    """Write the draft of `spec` with a smaller LM head to the folder `output`, which must not exist.

    end_tokens: the target's, always kept, as are all special tokens and the draft's own end tokens. Raises UsageError,
    OutputError, and the ModelError family of the loader.
    """
    draft = check(spec, output, size=size, coverage=coverage)
    model, tokenizer = load(draft.like(dtype=stored_dtype(draft.config), device="cpu"))
    lm_head = plain_lm_head(model)
    always = _special(tokenizer) | set(eos_ids(model, tokenizer)) | set(end_tokens)
    ids = choose_ids(counts, always, lm_head.out_features, size=size, coverage=coverage)
    index = torch.tensor(ids)
    bias = None if lm_head.bias is None else lm_head.bias.data[index]
    small = TrimmedLMHead(index, lm_head.weight.data[index], bias, lm_head.out_features)
    _write(model, small, draft.path, output)
    total = sum(counts.values())
    row = lm_head.in_features * lm_head.weight.element_size()
    return TrimReport(
        kept=len(ids),
        vocab_size=lm_head.out_features,
        special=len([token for token in always if token < lm_head.out_features]),
        counted=total,
        distinct=len(counts),
        coverage=sum(counts[token] for token in ids) / total,
        head_bytes_before=lm_head.out_features * row,
        head_bytes_after=len(ids) * row,
    )


def stored_dtype(config: Any) -> str:
    """Return the dtype of a checkpoint's weights by its config, in which its draft is stored too; float32 where that is
    none that we load."""
    dtype = str(getattr(config, "dtype", None)).removeprefix("torch.")
    return dtype if dtype in DTYPES and dtype != "auto" else "float32"


def copy_beside(folder: Path, to: Path) -> None:
    """Copy what a checkpoint folder holds besides config and weights: the tokenizer's files, templates, code."""
    for pattern in _COPIED:
        for path in folder.glob(pattern):
            if path.name not in _WRITTEN and not path.name.endswith(".index.json"):
                shutil.copyfile(path, to / path.name)


def _special(tokenizer: Any) -> set[int]:
    added = tokenizer.added_tokens_decoder
    return set(tokenizer.all_special_ids) | {index for index, token in added.items() if token.special}


def _write(model: Any, lm_head: TrimmedLMHead, folder: Path, output: Path) -> None:
    """Write all files under another name first, so that an interrupted run leaves no folder that looks whole."""
    unfinished = output.with_name(f".{output.name}.unfinished")
    try:
        with writing(output):
            shutil.rmtree(unfinished, ignore_errors=True)
            unfinished.mkdir()
            copy_beside(folder, unfinished)
            dropped = lm_head_keys(model)
            state = {name: tensor for name, tensor in model.state_dict().items() if name not in dropped}
            model.save_pretrained(unfinished, state_dict=state)
            write_lm_head(unfinished, lm_head)
            unfinished.replace(output)
    except SafetensorError as error:  # of a full disk, too
        raise OutputError(f"cannot write {output}: {error}") from error
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
