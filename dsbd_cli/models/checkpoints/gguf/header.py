"""Headers of GGUF files, read and checked before anything is made of them: a damaged file leads to one line, and to no
more memory than the file is large. torch is not needed.
"""

from __future__ import annotations

import mmap
import struct
from array import array
from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Any, NoReturn

from dsbd_cli.errors import ModelError, one_line, shorten

VERSIONS = (2, 3)
ALIGNMENT = 32  # bytes, where the file names none
MOST_ENTRIES = 1 << 20  # of tensors, and of metadata
MOST_ITEMS = 1 << 22  # of an array of metadata; vocabularies have less than a million
MOST_DIMENSIONS = 4
PLAIN = {"F32": "float32", "F16": "float16", "BF16": "bfloat16", "F64": "float64"}

BLOCKS = {  # of the types that are read: numbers of a block, and its bytes
    "F32": (1, 4), "F16": (1, 2), "BF16": (1, 2), "F64": (1, 8), "Q4_0": (32, 18), "Q4_1": (32, 20), "Q5_0": (32, 22),
    "Q5_1": (32, 24), "Q8_0": (32, 34), "Q2_K": (256, 84), "Q3_K": (256, 110), "Q4_K": (256, 144), "Q5_K": (256, 176),
    "Q6_K": (256, 210), "IQ4_NL": (32, 18), "IQ4_XS": (256, 136), "MXFP4": (32, 17),
}  # fmt: skip
FOUR_BITS = ("Q4_0", "Q4_1", "Q4_K", "IQ4_NL", "IQ4_XS", "MXFP4")
TYPES = {  # ggml's numbers
    0: "F32", 1: "F16", 2: "Q4_0", 3: "Q4_1", 4: "Q4_2", 5: "Q4_3", 6: "Q5_0", 7: "Q5_1", 8: "Q8_0", 9: "Q8_1",
    10: "Q2_K", 11: "Q3_K", 12: "Q4_K", 13: "Q5_K", 14: "Q6_K", 15: "Q8_K", 16: "IQ2_XXS", 17: "IQ2_XS", 18: "IQ3_XXS",
    19: "IQ1_S", 20: "IQ4_NL", 21: "IQ3_S", 22: "IQ2_S", 23: "IQ4_XS", 24: "I8", 25: "I16", 26: "I32", 27: "I64",
    28: "F64", 29: "IQ1_M", 30: "BF16", 31: "Q4_0_4_4", 32: "Q4_0_4_8", 33: "Q4_0_8_8", 34: "TQ1_0", 35: "TQ2_0",
    36: "IQ4_NL_4_4", 37: "IQ4_NL_4_8", 38: "IQ4_NL_8_8", 39: "MXFP4", 40: "NVFP4", 41: "Q1_0",
}  # fmt: skip

TEXT, ARRAY = 8, 9  # types of metadata
SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}

_UINT32, _UINT64 = struct.Struct("<I"), struct.Struct("<Q")


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """A tensor in a file.

    Attributes:
        name: in GGUF.
        kind: ggml's name of its type, one of BLOCKS.
        shape: in torch's order.
        file, offset, size: where its bytes are.
    """

    name: str
    kind: str
    shape: tuple[int, ...]
    file: Path
    offset: int
    size: int

    @property
    def number(self) -> int:
        """ggml's number of its type."""
        return next(number for number, kind in TYPES.items() if kind == self.kind)


@dataclass(frozen=True, slots=True)
class GgufHeader:
    """The metadata and the tensors of one file."""

    metadata: dict[str, Any]
    types: dict[str, tuple[int, ...]]
    tensors: list[GgufTensor]


def read_header(file: Path, name: str) -> GgufHeader:
    """Read and check one file up to its data."""
    try:
        with file.open("rb") as stream:
            if not file.stat().st_size:
                raise ModelError(f"{name}: {file.name} is empty: get it again")
            with mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) as data:
                return _Reader(data, file, name).header()
    except (OSError, ValueError) as error:
        raise ModelError(f"{name}: {file.name} cannot be read: {one_line(error)}") from error


class _Reader:
    """A reader of one file's header, from its start to its end."""

    def __init__(self, data: mmap.mmap, file: Path, name: str) -> None:
        self.data, self.file, self.name, self.at = data, file, name, 0

    def header(self) -> GgufHeader:
        """Read all of it. Raises ModelError, as all that follows."""
        if self.data[:4] != b"GGUF":
            self.fail("is no GGUF file: get it again")
        self.at = 4
        version = self.number(_UINT32)
        if version not in VERSIONS:
            swapped = int.from_bytes(version.to_bytes(4, "little"), "big")
            end = "its bytes are in the order of big-endian processors" if swapped in VERSIONS else "versions 2, 3 are"
            self.fail(f"is GGUF of version {min(version, swapped)}, which is not read ({end}): convert it again")
        count, entries = self.number(_UINT64), self.number(_UINT64)
        for what, number in (("tensors", count), ("entries of metadata", entries)):
            if number > MOST_ENTRIES:
                self.fail(f"says that it has {number} {what}, more than {MOST_ENTRIES}: get it again")
        metadata: dict[str, Any] = {}
        types: dict[str, tuple[int, ...]] = {}
        for _ in range(entries):
            key = self.text("a key")
            if key in metadata:
                self.fail(f"has the key {shorten(key)} a second time: get it again")
            types[key], metadata[key] = self.value(key, self.number(_UINT32))
        alignment = self.alignment(types, metadata)
        table = [self.entry() for _ in range(count)]
        start = -(-self.at // alignment) * alignment
        return GgufHeader(metadata, types, self.placed(table, start, alignment))

    def alignment(self, types: Mapping[str, tuple[int, ...]], metadata: Mapping[str, Any]) -> int:
        """Return the bytes of which the start of each tensor is a multiple."""
        alignment = metadata.get("general.alignment", ALIGNMENT)
        if types.get("general.alignment", (4,)) != (4,) or alignment < 8 or alignment & (alignment - 1):
            self.fail(f"has the alignment {shorten(alignment)}, but it must be a power of two from 8: get it again")
        return int(alignment)

    def value(self, key: str, kind: int) -> tuple[tuple[int, ...], Any]:
        """Return the type of a value and the value."""
        if kind == TEXT:
            return (kind,), self.text(shorten(key))
        if kind in SCALARS:
            return (kind,), self.number(struct.Struct(f"<{SCALARS[kind]}"))
        if kind != ARRAY:
            self.fail(f"has a value of the unknown type {kind} for {shorten(key)}: get it again")
        item, count = self.number(_UINT32), self.number(_UINT64)
        if count > MOST_ITEMS:
            self.fail(f"says that {shorten(key)} has {count} items, more than {MOST_ITEMS}: get it again")
        if item == TEXT:
            return (kind, item), self.texts(shorten(key), count)
        if item not in SCALARS:
            self.fail(f"has an array of items of type {item} for {shorten(key)}, which is not read: get it again")
        items = array(SCALARS[item].replace("?", "B"))
        items.frombytes(self.take(count * items.itemsize, shorten(key)))
        return (kind, item), items

    def number(self, layout: struct.Struct) -> Any:
        """Read a number."""
        try:
            (number,) = layout.unpack_from(self.data, self.at)
        except struct.error:
            self.cut_short(f"byte {self.at}")
        self.at += layout.size
        return number

    def take(self, size: int, what: str) -> bytes:
        """Read some bytes. what: they are, for a message."""
        if size > len(self.data) - self.at:
            self.cut_short(what)
        self.at += size
        return self.data[self.at - size : self.at]

    def text(self, what: str) -> str:
        """Read a text."""
        return self.decoded(self.take(self.number(_UINT64), what), what)

    def texts(self, what: str, count: int) -> list[str]:
        """Read an array of texts, of which vocabularies have hundreds of thousands."""
        data, at, size, read = self.data, self.at, len(self.data), _UINT64.unpack_from
        texts = []
        try:
            for _ in range(count):
                (length,) = read(data, at)
                start, at = at + 8, at + 8 + length
                if at > size:
                    self.cut_short(what)
                texts.append(data[start:at].decode())
        except struct.error:
            self.cut_short(what)
        except UnicodeDecodeError:
            self.decoded(data[start:at], what)
        self.at = at
        return texts

    def decoded(self, text: bytes, what: str) -> str:
        """Return bytes as a text."""
        try:
            return text.decode()
        except UnicodeDecodeError:
            self.fail(f"has a text that is not UTF-8 ({what}): get it again")

    def entry(self) -> GgufTensor:
        """Read what the table says of a tensor. Its offset counts from the start of the data."""
        name = self.text("a tensor's name")
        count = self.number(_UINT32)
        if not 1 <= count <= MOST_DIMENSIONS:
            self.fail(f"says that {shorten(name)} has {count} dimensions, not 1 to {MOST_DIMENSIONS}: get it again")
        shape = tuple(self.number(_UINT64) for _ in range(count))[::-1]
        number, offset = self.number(_UINT32), self.number(_UINT64)
        kind = TYPES.get(number, f"type {number}")
        if kind not in BLOCKS:
            self.fail(
                f"has {shorten(name)} in {kind}, which is not read: get it as Q4_K_M or in any of {', '.join(BLOCKS)}"
            )
        if 0 in shape:
            self.fail(f"says that {shorten(name)} is {' x '.join(map(str, shape))}: get it again")
        if shape[-1] % BLOCKS[kind][0]:
            self.fail(
                f"says that {shorten(name)} has rows of {shape[-1]} numbers, but blocks of {kind} have "
                f"{BLOCKS[kind][0]}: get it again"
            )
        numbers, size = BLOCKS[kind]
        return GgufTensor(name, kind, shape, self.file, offset, prod(shape) // numbers * size)

    def placed(self, table: list[GgufTensor], start: int, alignment: int) -> list[GgufTensor]:
        """Return the tensors of a table, with offsets from the start of the file. start: of the data.

        Checks that they lie in the file, and each in a place of its own.
        """
        for tensor in table:
            if tensor.offset % alignment:
                self.fail(f"has {shorten(tensor.name)} off its alignment of {alignment}: get it again")
        tensors = [replace(tensor, offset=start + tensor.offset) for tensor in table]
        end, size = start, len(self.data)
        for tensor in sorted(tensors, key=lambda tensor: tensor.offset):
            if tensor.offset < end:
                self.fail(f"has {shorten(tensor.name)} where another tensor is: get it again")
            end = tensor.offset + tensor.size
            if end > size:
                self.fail(f"is cut short: {shorten(tensor.name)} ends at byte {end} of {size}: get it again")
        return tensors

    def cut_short(self, what: str) -> NoReturn:
        """Raise the error of a file that ends too early."""
        self.fail(f"is cut short or damaged: {what} goes beyond its {len(self.data)} bytes: get it again")

    def fail(self, what: str) -> NoReturn:
        """Raise an error. what: is said of the file."""
        raise ModelError(f"{self.name}: {self.file.name} {what}")
