"""GGUF files as transformers reads them, in a fraction of the time: its readers are given what ours has read.

transformers reads with the package gguf, which takes ten seconds for a vocabulary of 150,000 tokens, or with a reader
of its own for newer architectures. Neither reads files in parts.
"""

from __future__ import annotations

import threading
from collections.abc import Container, Iterator
from contextlib import ExitStack, contextmanager
from functools import cached_property
from math import prod
from types import SimpleNamespace
from typing import Any

from dsbd_cli.models.checkpoints.gguf.file import GgufFile
from dsbd_cli.models.checkpoints.gguf.header import ARRAY, BLOCKS, PLAIN, TEXT, GgufTensor

BOOL = 7  # type of metadata
CUT = ("token_embd.weight", "output.weight", "output.bias")  # tensors with a row for each token

_lock = threading.RLock()  # of what is replaced


@contextmanager
def read_by_transformers(
    file: GgufFile | None, layers: int | None = None, vocabulary: int | None = None
) -> Iterator[None]:
    """Give transformers a file, all its parts included, wherever it reads a GGUF file within this context.

    file: None changes nothing. layers, vocabulary: transformers sees the tensors of the first layers only, and the rows
    of the first tokens, for a config with as many. Metadata stay those of the whole.
    """
    if file is None:
        yield
        return
    import gguf
    from transformers import modeling_gguf_pytorch_utils as legacy
    from transformers.integrations import gguf as seam
    from transformers.integrations.gguf import reader
    from transformers.quantizers import quantizer_gguf as quantizer

    shown = _Shown(file, [*_part(file, layers, vocabulary)])
    with _lock, ExitStack() as stack:
        replacements: list[tuple[Any, str, Any]] = [
            (gguf, "GGUFReader", shown.reader),
            (legacy, "_gguf_parse_value", _parsed),
            (reader.GgufHeader, "from_file", staticmethod(shown.header)),
            (quantizer, "load_gguf_state_dict", shown.state_dict),
            (seam, "read_gguf_metadata", shown.metadata),
            (reader, "read_gguf_metadata", shown.metadata),
            (quantizer, "read_gguf_metadata", shown.metadata),
            (legacy, "TENSOR_PROCESSORS", legacy.TENSOR_PROCESSORS | {"gpt-oss": _GptOss}),
        ]
        for owner, name, value in replacements:
            stack.enter_context(_replaced(owner, name, value))
        yield


def _part(file: GgufFile, layers: int | None, vocabulary: int | None) -> Iterator[_Tensor]:
    """Yield the tensors of the first layers and tokens."""
    for tensor in file.tensors.values():
        block, _, rest = tensor.name.partition(".")
        layer = rest.partition(".")[0]
        if layers is not None and block == "blk" and layer.isdecimal() and int(layer) >= layers:
            continue
        rows = tensor.shape[0] if vocabulary is None or tensor.name not in CUT else min(vocabulary, tensor.shape[0])
        yield _Tensor(file, tensor, (rows, *tensor.shape[1:]))


class _Tensor:
    """A tensor as the package gguf has it. shape: in torch's order."""

    def __init__(self, file: GgufFile, tensor: GgufTensor, shape: tuple[int, ...]) -> None:
        from gguf import GGMLQuantizationType

        numbers, size = BLOCKS[tensor.kind]
        self.name, self.torch_shape, self.tensor_type = tensor.name, shape, GGMLQuantizationType(tensor.number)
        self.n_elements, self.n_bytes = prod(shape), prod(shape) // numbers * size
        self._file, self._tensor = file, tensor

    @property
    def shape(self) -> Any:
        import numpy as np

        return np.array(self.torch_shape[::-1], dtype=np.uint64)

    @property
    def bytes(self) -> Any:
        """The bytes [n_bytes], mapped."""
        return self._file.mapped(self._tensor)[: self.n_bytes].numpy()

    @cached_property
    def data(self) -> Any:
        """The numbers, or rows of bytes for types that numpy lacks."""
        kind = self._tensor.kind
        numbers = self.bytes.view(PLAIN[kind]) if kind in ("F32", "F16", "F64") else self.bytes
        return numbers.reshape(*self.torch_shape[:-1], -1)


class _Shown:
    """The answers of transformers' readers for a file with these tensors."""

    def __init__(self, file: GgufFile, tensors: list[_Tensor]) -> None:
        self.file, self.tensors = file, tensors

    def reader(self, *_: Any, **__: Any) -> Any:
        """Return what transformers uses of gguf.GGUFReader."""
        fields = {key: _field(self.file.types[key], value) for key, value in self.file.metadata.items()}
        return SimpleNamespace(fields=fields, tensors=self.tensors)

    def metadata(self, _: str, whole: Container[str] = ()) -> tuple[dict[str, Any], tuple[str, ...]]:
        """Return the metadata and the tensors' names. whole: arrays of text that are not only counted."""
        values = {key: _listed(self.file.types[key], value) for key, value in self.file.metadata.items()}
        for key, types in self.file.types.items():
            if types == (ARRAY, TEXT) and key not in whole:
                values[key] = len(values[key])
        return values, tuple(tensor.name for tensor in self.tensors)

    def header(self, path: str) -> Any:
        """Return a GgufHeader. Raises ValueError for a type of tensors that transformers would take for another."""
        from transformers.integrations.gguf.dequant import GGML_BLOCK
        from transformers.integrations.gguf.reader import GgufHeader, TensorInfo

        infos = []
        for tensor in self.tensors:
            kind = tensor.tensor_type
            if int(kind) not in GGML_BLOCK and kind.name not in ("F32", "F16", "BF16"):
                raise ValueError(f"{tensor.name} is in {kind.name}, which transformers does not read here")
            infos.append(TensorInfo(tensor.name, tensor.torch_shape, int(kind), 0, tensor.n_bytes))
        return GgufHeader(path, self.file.architecture, tuple(infos), 0)

    def state_dict(self, _: Any) -> dict[str, Any]:
        """Return the tensors, none of which is read yet."""
        from transformers.integrations.gguf.dequant import GGML_BLOCK
        from transformers.integrations.gguf.reader import LazyGgufTensor

        return {
            tensor.name: LazyGgufTensor(
                tensor.bytes,
                int(tensor.tensor_type),
                tensor.data.shape if tensor.tensor_type in GGML_BLOCK else tensor.torch_shape,
            )
            for tensor in self.tensors
        }


class _GptOss:
    """Processor of the tensors of gpt-oss, in the place of transformers' own, which looks for names that no file has.

    In transformers the experts' weights are [E, i, o], and gates and values of the first product alternate.
    """

    def __init__(self, config: object = None) -> None:
        pass

    def preprocess_name(self, name: str) -> str:
        """Return transformers' name of a tensor as it is looked up."""
        return name

    def perform_fallback_tensor_mapping(self, names: dict[str, str], suffix: str, before: str, name: str) -> None:
        """Add a tensor's name to those by names in GGUF, where it is one of experts' biases or of gates and values."""
        layer, _, part = name.removeprefix("model.layers.").partition(".mlp.experts.")
        kind = "bias" if part.endswith("_bias") else "weight"
        for side in {"gate_up_proj": ("gate", "up"), "down_proj": ("down",)}.get(part.removesuffix("_bias"), ()):
            names[f"blk.{layer}.ffn_{side}_exps.{kind}"] = f"{before}{name}"

    def process(
        self,
        weights: Any,
        name: str,
        tensor_key_mapping: dict[str, str],
        parsed_parameters: dict[str, Any],
        **more: Any,
    ) -> Any:
        """Return the numbers of a tensor and the name by which transformers' name is looked up."""
        import numpy as np
        import torch

        stem, _, kind = name.rpartition(".")
        if not stem.endswith("_exps"):
            return SimpleNamespace(weights=weights, name=stem if stem.endswith("attn_sinks") else name)
        whole = weights.swapaxes(1, 2) if kind == "weight" else weights
        if stem.endswith("ffn_down_exps"):
            return SimpleNamespace(weights=whole, name=stem if kind == "weight" else name)
        tensors, theirs = parsed_parameters["tensors"], tensor_key_mapping[name]
        if theirs not in tensors:
            tensors[theirs] = torch.zeros(*whole.shape[:-1], 2 * whole.shape[-1])
        tensors[theirs][..., int(stem.endswith("ffn_up_exps")) :: 2] = torch.from_numpy(np.ascontiguousarray(whole))
        return SimpleNamespace(weights=None, name=None)


def _field(types: tuple[int, ...], value: Any) -> Any:
    """Return what transformers uses of gguf.ReaderField. Its parts are values, which `_parsed` leaves as they are."""
    parts = _listed(types, value) if types[0] == ARRAY else [value]
    return SimpleNamespace(parts=parts, data=range(len(parts)), types=types)


def _parsed(value: Any, _: object) -> Any:
    """Take the place of what makes values of bytes, one by one."""
    return value


def _listed(types: tuple[int, ...], value: Any) -> Any:
    """Return arrays of numbers as lists, other values as they are."""
    if types[0] != ARRAY or types[1] == TEXT:
        return value
    return [*map(bool, value)] if types[1] == BOOL else [*value]


@contextmanager
def _replaced(owner: Any, name: str, value: object) -> Iterator[None]:
    getattr(owner, name)  # transformers' modules may hold it only then
    before = vars(owner)[name]
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)
