"""Checks of a checkpoint before its weights are loaded or used: of config.json, the index and the headers of its
safetensors files. No weight is read.

All checks raise ModelError. Its message begins with `name`, as in "target model 'x'".
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from pathlib import Path, PurePosixPath, PureWindowsPath

from dsbd_cli.errors import ModelError, shorten
from dsbd_cli.models.checkpoints.gguf.file import GgufFile
from dsbd_cli.models.checkpoints.gguf.parts import gguf_parts

MOST_POINTER = 1024  # bytes; pointers of Git LFS have fewer
LONGEST_HEADER = 100_000_000  # bytes; the limit of safetensors
PARTS = ("text_config", "decoder", "encoder")  # of a config.json
LAYERS = ("num_hidden_layers", "num_layers", "n_layer", "n_layers", "encoder_layers", "decoder_layers",
          "num_decoder_layers")  # fmt: skip
WIDTHS = ("hidden_size", "d_model", "n_embd", "vocab_size")


def check_checkpoint(folder: Path, name: str) -> None:
    """Check that the indices of a checkpoint folder stay inside it, that its safetensors files are whole, and that its
    config fits their tensors. Without this a model of 10^8 layers would be built first, and its weights found missing
    minutes later."""
    for index in sorted(folder.glob("*.index.json")):
        _check_index(index, name)
    files = _weight_files(folder)
    for file in (*(files or sorted(folder.glob("pytorch_model*.bin"))), folder / "tokenizer.json"):
        _check_pointer(file, name)
    if files:
        _check_config(folder, read_headers(files, name), name)


def check_gguf(file: Path, name: str) -> GgufFile:
    """Open a GGUF file. Checks that it is no pointer, and that it, or all of its parts, are whole."""
    for part in gguf_parts(file):
        _check_pointer(part, name)
    return GgufFile.open(file, name)


def read_headers(files: Iterable[Path], name: str) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the tensors of safetensors files, by name."""
    return {tensor: shape for file in files for tensor, shape in _header(file, name)}


def _weight_files(folder: Path) -> list[Path]:
    """Return the safetensors files that transformers reads: one, or those that the index names."""
    if (whole := folder / "model.safetensors").is_file():
        return [whole]
    index = folder / "model.safetensors.index.json"
    if not index.is_file():
        return []
    files = {folder / file for file in json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()}
    return sorted(file for file in files if file.is_file())


def _check_pointer(file: Path, name: str) -> None:
    """Check that a file is not what a clone without Git LFS has in the place of a large one."""
    if not file.is_file() or file.stat().st_size > MOST_POINTER:
        return
    if file.read_bytes().startswith(b"version https://git-lfs.github.com/spec/"):
        raise ModelError(
            f"{name}: {file.name} is a pointer of Git LFS, not the file itself: run git lfs pull, or get it again"
        )


def _check_index(index: Path, name: str) -> None:
    try:
        names = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        places = [*names.items()]
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ModelError(f"{name}: {index.name} is no index of weights ({type(error).__name__})") from None
    for tensor, file in places:
        if not isinstance(file, str):
            raise ModelError(f"{name}: {index.name} names {shorten(file)} for {shorten(tensor)}, which is no file name")
        for path in (PurePosixPath(file), PureWindowsPath(file)):
            if path.is_absolute() or path.drive or ".." in path.parts:
                raise ModelError(
                    f"{name}: {index.name} names {shorten(file)} for {shorten(tensor)}: the path leaves the folder"
                )


def _header(file: Path, name: str) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yield the names and shapes of the tensors in a file, and check that it holds all of their bytes."""
    size = file.stat().st_size
    with file.open("rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
        if length > min(LONGEST_HEADER, size - 8):
            raise ModelError(f"{name}: {file.name} is cut short or no safetensors file: get it again")
        text, start = stream.read(length), 8 + length
    tensors: list[tuple[str, tuple[int, ...], int, int]] = []
    try:
        for tensor, entry in json.loads(text).items():
            if tensor != "__metadata__":
                _, shape, offsets = (entry[field] for field in ("dtype", "shape", "data_offsets"))
                begin, end = map(int, offsets)
                tensors.append((tensor, tuple(map(int, shape)), begin, end))
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError, OverflowError):
        raise ModelError(f"{name}: {file.name} is no safetensors file: its header cannot be read") from None
    for tensor, shape, begin, end in tensors:
        if not 0 <= begin <= end <= size - start:
            raise ModelError(
                f"{name}: {file.name} is cut short: {tensor} ends at byte {start + end} of {size}: get it again"
            )
        yield tensor, shape


def _check_config(folder: Path, tensors: dict[str, tuple[int, ...]], name: str) -> None:
    """Check that a config has layers, no more than there are tensors, and no width that is wider than every tensor.
    Config classes are not used for this, because they list all layers."""
    try:
        whole = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return  # the error is raised when the config is read
    if not isinstance(whole, dict):
        return
    widest = max((length for shape in tensors.values() for length in shape), default=0)
    for part in ("", *PARTS):
        config = whole if not part else whole.get(part)
        if not isinstance(config, dict):
            continue
        limits = [(field, len(tensors), f"the weights are {len(tensors)} tensors") for field in LAYERS]
        if "quantization_config" not in whole:  # whose tensors may hold several numbers in one
            limits += [(field, widest, f"no tensor of the weights is wider than {widest}") for field in WIDTHS]
        for field, most, reason in limits:
            value, path = config.get(field), f"{part}.{field}" if part else field
            if field == "num_hidden_layers" and type(value) is int and value < 1:
                raise ModelError(f"{name}: config.json is wrong: {path} is {value}, but must be 1 or more")
            if type(value) is int and value > most:
                raise ModelError(f"{name}: config.json does not fit the weights: {path} is {value}, but {reason}")
