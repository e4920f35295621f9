"""GGUF files in parts, as llama.cpp splits them: `NAME-00001-of-00004.gguf`. Any part names the whole.

The first part holds config and tokenizer, each part some of the tensors. transformers reads single files, so its
readers are given the tensors of the other parts, too.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from dsbd_cli.errors import ModelError

PART = re.compile(r"(.+)-(\d{5})-of-(\d{5})(\.gguf)", re.IGNORECASE)
_lock = threading.Lock()  # of what is patched


def gguf_parts(file: Path) -> list[Path]:
    """Return the files of the whole that a GGUF file is a part of, the first one first. They may be missing. A file
    that is no part is the whole."""
    match = PART.fullmatch(file.name)
    if match is None:
        return [file]
    name, _, count, suffix = match.groups()
    return [file.with_name(f"{name}-{number:05}-of-{count}{suffix}") for number in range(1, max(1, int(count)) + 1)]


def whole_gguf(file: Path, name: str) -> Path:
    """Return the first part of the whole that a GGUF file is a part of. name: of the model, in an error. Raises
    ModelError where a part is missing."""
    parts = gguf_parts(file)
    if missing := [part.name for part in parts if not part.is_file()]:
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise ModelError(f"{name}: of its {len(parts)} parts {missing[0]}{more} is missing: get it, too")
    return parts[0]


@contextmanager
def reading_parts(file: Path) -> Iterator[None]:
    """Let transformers read all parts of a GGUF file where it reads the first one, within this context."""
    others = gguf_parts(file)[1:]
    if not others:
        yield
        return
    import gguf
    from transformers.integrations import gguf as seam
    from transformers.integrations.gguf.dequant import GGML_BLOCK
    from transformers.integrations.gguf.reader import (
        GgufHeader,
        LazyGgufTensor,
        TensorInfo,
        load_gguf_state_dict,
        read_gguf_metadata,
    )
    from transformers.quantizers import quantizer_gguf as quantizer

    tensors = [tensor for part in others for tensor in gguf.GGUFReader(part).tensors]
    infos = tuple(
        TensorInfo(
            tensor.name, tuple(map(int, reversed(tensor.shape))), int(tensor.tensor_type), 0, int(tensor.n_bytes)
        )
        for tensor in tensors
    )

    def header(path: str) -> Any:
        first = read_header(path)
        return first._replace(tensors=(*first.tensors, *infos))

    def metadata(path: str, *arguments: Any) -> tuple[dict[str, Any], tuple[str, ...]]:
        values, names = read_gguf_metadata(path, *arguments)
        return values, (*names, *(info.name for info in infos))

    def state(whole: Any) -> dict[str, Any]:
        state_dict = load_gguf_state_dict(whole._replace(tensors=whole.tensors[: len(whole.tensors) - len(infos)]))
        for info, tensor in zip(infos, tensors, strict=True):
            shape = tensor.data.shape if info.ggml_type in GGML_BLOCK else info.shape
            state_dict[info.name] = LazyGgufTensor(tensor.data.reshape(-1).view("uint8"), info.ggml_type, shape)
        return state_dict

    class Reader(gguf.GGUFReader):
        """A reader of the first part with the tensors of all."""

        def __init__(self, *arguments: Any, **more: Any) -> None:
            super().__init__(*arguments, **more)
            self.tensors = [*self.tensors, *tensors]

    with _lock, ExitStack() as stack:
        read_header = GgufHeader.from_file
        stack.enter_context(_replaced(GgufHeader, "from_file", staticmethod(header)))
        stack.enter_context(_replaced(seam, "read_gguf_metadata", metadata))
        stack.enter_context(_replaced(quantizer, "load_gguf_state_dict", state))
        stack.enter_context(_replaced(gguf, "GGUFReader", Reader))
        yield


@contextmanager
def _replaced(owner: Any, name: str, value: object) -> Iterator[None]:
    getattr(owner, name)  # transformers' modules may hold it only then
    before = vars(owner)[name]
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)
