"""GGUF files, read without llama.cpp's package: metadata, and tensors over the mapped bytes of the file.

torch is imported when a tensor is read.
"""

from __future__ import annotations

import mmap
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dsbd_cli.errors import ModelError, one_line, shorten
from dsbd_cli.models.checkpoints.gguf.header import FOUR_BITS, PLAIN, GgufHeader, GgufTensor, read_header
from dsbd_cli.models.checkpoints.gguf.parts import gguf_parts

if TYPE_CHECKING:
    from torch import Tensor

    from dsbd_cli.models.checkpoints.gguf.names import Architecture
    from dsbd_cli.ops.quantized_weight import QuantizedWeight


@dataclass(frozen=True, slots=True)
class GgufFile:
    """A GGUF file, or all of its parts.

    Attributes:
        name: of the model, in messages.
        path: the first part.
        metadata: values by key, of the first part. Arrays are lists of str, or arrays of numbers.
        types: for each key the type of its value: (number,), or (ARRAY, number of the items' type).
        tensors: by their names in GGUF, of all parts, in order.
        maps: [size] uint8, the bytes of each file that has been read from.
    """

    name: str
    path: Path
    metadata: dict[str, Any]
    types: dict[str, tuple[int, ...]]
    tensors: dict[str, GgufTensor]
    maps: dict[Path, Tensor] = field(default_factory=dict, compare=False, repr=False)

    @classmethod
    def open(cls, path: Path, name: str) -> GgufFile:
        """Read the headers of a file and of all parts that it is one of. name: of the model, in messages.

        Raises ModelError for a file that is damaged or cut short, parts that do not belong together, and types of
        tensors that are not read.
        """
        parts = gguf_parts(path)
        headers = [read_header(part, name) for part in parts]
        _check_parts(parts, headers, name)
        tensors: dict[str, GgufTensor] = {}
        for header in headers:
            for tensor in header.tensors:
                if tensor.name in tensors:
                    raise ModelError(f"{name}: {tensor.file.name} has {shorten(tensor.name)} a second time")
                tensors[tensor.name] = tensor
        first = headers[0]
        if not isinstance(first.metadata.get("general.architecture"), str):
            raise ModelError(f"{name}: {parts[0].name} names no architecture: get it again")
        file = cls(name, parts[0], first.metadata, first.types, tensors)
        file._check_counts()
        return file

    @property
    def architecture(self) -> str:
        """llama.cpp's name of the architecture."""
        return str(self.metadata["general.architecture"])

    def mapped(self, tensor: GgufTensor) -> Tensor:
        """Return the bytes of a tensor, mapped: [size] uint8. Pages that are written to become copies, so the file does
        not change. Raises ModelError where the file has gone or has shrunk."""
        import torch

        if tensor.file not in self.maps:
            try:
                with tensor.file.open("rb") as stream:
                    data = mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_COPY)
            except (OSError, ValueError) as error:
                raise ModelError(f"{self.name}: {tensor.file.name} cannot be read: {one_line(error)}") from error
            self.maps[tensor.file] = torch.frombuffer(data, dtype=torch.uint8)
        whole, end = self.maps[tensor.file], tensor.offset + tensor.size
        if end > len(whole):
            raise ModelError(f"{self.name}: {tensor.file.name} cannot be read: it has shrunk to {len(whole)} bytes")
        return whole[tensor.offset : end]

    def read(self, name: str) -> Tensor | QuantizedWeight:
        """Return a tensor by its name in GGUF.

        Matrices in blocks are GgufWeights, whose scales are not checked yet. Those of several experts are one
        [E o, i]. Matrices of plain numbers are mapped in their own dtype, those of float64 are float32. Vectors are
        float32. Raises ModelError for a vector with NaN or infinity.
        """
        import torch

        from dsbd_cli.models.checkpoints.gguf.formats import GgufWeight

        tensor, origin = self.tensors[name], f"{self.name}: {self.tensors[name].file.name}"
        data = self.mapped(tensor)
        if tensor.kind in PLAIN:
            values = data.view(getattr(torch, PLAIN[tensor.kind])).view(tensor.shape)
            if values.dtype == torch.float64 or values.dim() == 1:
                values = values.to(torch.float32)
        else:
            weight = GgufWeight(tensor.name, data.view(prod(tensor.shape[:-1]), -1), tensor.kind, origin)
            if len(tensor.shape) > 1:
                return weight
            weight.check()
            values = weight.dequantize().view(tensor.shape)
        if values.dim() == 1 and not bool(values.isfinite().all()):
            raise ModelError(f"{origin} has numbers in {tensor.name} that are NaN or infinite: get it again")
        return values

    def _check_counts(self) -> None:
        """Check numbers that transformers divides by, or builds as many layers of."""
        heads = ("attention.head_count", "attention.head_count_kv") if self._architecture is not None else ()
        for key in (*heads, "block_count"):
            count, most = self.metadata.get(f"{self.architecture}.{key}"), len(self.tensors)
            if type(count) is int and (count < 1 or (key == "block_count" and count > most)):
                limit = f"1 to {most}, the number of its tensors" if key == "block_count" else "1 or more"
                raise ModelError(
                    f"{self.name}: {self.path.name} says {self.architecture}.{key} = {count}, but must say {limit}: "
                    "get it again"
                )

    @property
    def form(self) -> str | None:
        """The type of most of its weights, such as gguf-q4_k; None where they are plain."""
        sizes = Counter[str]()
        for tensor in self.tensors.values():
            sizes[tensor.kind] += prod(tensor.shape) if len(tensor.shape) > 1 else 0
        kind = max(sizes, key=lambda kind: sizes[kind], default="F32")
        return None if kind in PLAIN else f"gguf-{kind.lower()}"

    @property
    def packed_bytes(self) -> int:
        """Bytes of the products that are packed from blocks, at least: four bits, or bytes, and two factors of a
        group. An embedding table stays in the file; 0 where the weights are plain."""
        if self.form is None:
            return 0
        table = {"token_embd.weight"} if "output.weight" in self.tensors else set[str]()
        sizes = [
            prod(tensor.shape) * (5 if tensor.kind in FOUR_BITS else 9) // 8
            for tensor in self.tensors.values()
            if len(tensor.shape) > 1 and tensor.kind not in PLAIN and tensor.name not in table
        ]
        return sum(sizes)

    def reads(self, family: str) -> bool:
        """Return whether `decoder_tensors` has all tensors of a model of this transformers family."""
        architecture = self._architecture
        return architecture is not None and family in architecture.families and None not in self._names().values()

    @property
    def decoder_tensors(self) -> dict[str, Callable[[], Tensor | QuantizedWeight]]:
        """For transformers' name of each tensor, a function that reads it as `read` does, with llama.cpp's changes
        undone. Factors of rotary frequencies are left out, which are parts of the config (rotary.py), and tensors that
        are not known. Raises ModelError."""
        architecture, key = self._architecture, f"{self.architecture}.attention.head_count"
        if architecture is None:
            return {}
        heads = self.metadata.get(key)
        kv_heads = self.metadata.get(f"{key}_kv", heads)
        if type(heads) is not int or type(kv_heads) is not int:
            wrong = (key, heads) if type(heads) is not int else (f"{key}_kv", kv_heads)
            raise ModelError(f"{self.name}: {self.path.name} says {wrong[0]} = {shorten(wrong[1])}: get it again")

        def read(name: str) -> Tensor | QuantizedWeight:
            origin = f"{self.name}: {self.tensors[name].file.name}"
            return architecture.restored(name, self.read(name), (heads, kv_heads), origin)

        return {theirs: partial(read, name) for name, theirs in self._names().items() if theirs is not None}

    @property
    def _architecture(self) -> Architecture | None:
        from dsbd_cli.models.checkpoints.gguf.names import ARCHITECTURES

        return ARCHITECTURES.get(self.architecture)

    def _names(self) -> dict[str, str | None]:
        """Return transformers' names of the tensors by those in GGUF; None for those that are not known."""
        from dsbd_cli.models.checkpoints.gguf.names import ROTARY

        assert self._architecture is not None
        return {name: self._architecture.renamed(name) for name in self.tensors if name not in ROTARY}


def _check_parts(parts: list[Path], headers: list[GgufHeader], name: str) -> None:
    """Check that parts are what their names say."""
    if len(parts) == 1:
        number, count = (headers[0].metadata.get(f"split.{key}") for key in ("no", "count"))
        if isinstance(number, int) and isinstance(count, int) and count > 1:
            raise ModelError(
                f"{name}: {parts[0].name} is part {number + 1} of {count}: name it, and the others beside it, "
                f"as in {parts[0].stem}-{number + 1:05}-of-{count:05}.gguf"
            )
        return
    for number, (part, header) in enumerate(zip(parts, headers, strict=True)):
        if header.metadata.get("split.no") != number:
            raise ModelError(f"{name}: {part.name} is another part than its name says: get it again")
        if (count := header.metadata.get("split.count")) != len(parts):
            raise ModelError(
                f"{name}: {part.name} is of {shorten(count)} parts, but its name says {len(parts)}: get it again"
            )
    count, expected = sum(len(header.tensors) for header in headers), headers[0].metadata.get("split.tensors.count")
    if count != expected:
        raise ModelError(f"{name}: its parts hold {count} tensors, but should hold {shorten(expected)}: get them again")
