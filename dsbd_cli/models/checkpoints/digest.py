"""Digests of a checkpoint's files, by which a later run notices that a name means another model."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from hashlib import blake2b
from pathlib import Path

from dsbd_cli.models.checkpoints.gguf.parts import gguf_parts
from dsbd_cli.models.checkpoints.hub import ADAPTER_CONFIG, ADAPTER_WEIGHTS

SAMPLES = 512  # blocks of a file of weights that are read
BLOCK = 4096  # bytes
HEADER = 1 << 24  # bytes of a safetensors header that are read
WEIGHTS = (".safetensors", ".bin", ".gguf")
TOKENIZERS = (".model", ".jinja", ".txt", ".tiktoken")
TOKENIZER_FILES = ("tokenizer", "vocab", "merges", "special_tokens", "added_tokens", "chat_template")


def digests(path: Path, adapters: Sequence[tuple[Path, bool]]) -> dict[str, str]:
    """Return digests of 16 hex digits of a checkpoint's `config`, `tokenizer` and `weights`. The last two hold those of
    adapters, too: folders, and whether the tokenizer or the template of each is used.

    They depend on the content alone, so a copy in another folder has the same digests. Of weights the size, the header
    and a block of each tensor are read, or 512 blocks of a file with more tensors. A model that was trained further has
    changed in all of them.
    """
    parts = {part: blake2b(digest_size=8) for part in ("config", "tokenizer", "weights")}
    for number, (folder, brings) in enumerate([(path, True), *adapters]):
        for file in sorted(folder.iterdir()) if folder.is_dir() else gguf_parts(folder):
            part = _part(file) if number == 0 else _part_of_adapter(file, brings)
            if part is None or not file.is_file():
                continue
            named = file.name if folder.is_dir() else file.suffix  # a GGUF file may have any name
            parts[part].update(f"{number} {named} {file.stat().st_size}\0".encode())
            for block in _blocks(file):
                parts[part].update(block)
    return {part: digest.hexdigest() for part, digest in parts.items()}


def _part(path: Path) -> str | None:
    """Return the part of a checkpoint that a file belongs to; None for a file that no run reads."""
    if path.suffix.lower() in WEIGHTS or path.name.endswith(".index.json"):
        return "weights"
    if path.suffix in TOKENIZERS or (path.suffix == ".json" and path.name.startswith(TOKENIZER_FILES)):
        return "tokenizer"
    return "config" if path.suffix in (".json", ".py") else None


def _part_of_adapter(path: Path, brings: bool) -> str | None:
    """Return the part of a checkpoint that a file of an adapter belongs to; None for a file that no run reads."""
    if path.name in (ADAPTER_CONFIG, ADAPTER_WEIGHTS):
        return "weights"
    return "tokenizer" if brings and _part(path) == "tokenizer" else None


def _blocks(path: Path) -> Iterator[bytes]:
    """Yield the bytes of a small file, or blocks of a file of weights."""
    if path.suffix.lower() not in WEIGHTS:
        yield path.read_bytes()
        return
    size = path.stat().st_size
    with path.open("rb") as file:
        offsets = [size * number // SAMPLES for number in range(SAMPLES)]
        if path.suffix == ".safetensors":
            start = 8 + min(int.from_bytes(file.read(8), "little"), HEADER)
            header = file.read(start - 8)
            yield header
            offsets = [offset for offset in _middles(header, start) if 0 <= offset < size] or offsets
        for offset in offsets:
            file.seek(offset)
            yield file.read(BLOCK)


def _middles(header: bytes, start: int) -> list[int]:
    """Return where the middle of each tensor is, in bytes of the file. The list is empty where there are too many
    tensors, or the header is damaged."""
    try:
        tensors = [entry["data_offsets"] for name, entry in json.loads(header).items() if name != "__metadata__"]
        middles = sorted(start + (int(first) + int(last)) // 2 for first, last in tensors)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError, OverflowError):
        return []
    return middles if len(middles) <= SAMPLES else []
