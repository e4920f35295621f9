"""GGUF files byte by byte, also such as no writer would write; and blocks of random bytes."""

from __future__ import annotations

import struct
from collections.abc import Iterable
from math import log2

import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

# bytes of a block at which its float16 scales begin
HALVES = {
    "Q4_0": (0,), "Q4_1": (0, 2), "Q5_0": (0,), "Q5_1": (0, 2), "Q8_0": (0,), "Q2_K": (80, 82), "Q3_K": (108,),
    "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,), "IQ4_NL": (0,), "IQ4_XS": (0,), "MXFP4": (),
}  # fmt: skip


def random_blocks(kind: str, rows: int, columns: int, seed: int = 0, scale: float = 1.0) -> np.ndarray:
    """The bytes [rows, bytes of a row] of a weight whose levels are random and whose scales are about `scale`."""
    generator = np.random.default_rng(seed)
    numbers, size = GGML_QUANT_SIZES[GGMLQuantizationType[kind]]
    blocks = generator.integers(0, 256, (rows * columns // numbers, size), dtype=np.uint8)
    for at in HALVES[kind]:
        scales = generator.normal(scale=scale, size=(len(blocks), 1))
        blocks[:, at : at + 2] = scales.astype(np.float16).view(np.uint8)
    if not HALVES[kind]:
        blocks[:, 0] = generator.integers(*((100, 150) if scale == 1 else (125, 130)), len(blocks)) + round(log2(scale))
    return blocks.reshape(rows, -1)


def text(value: str | bytes) -> bytes:
    value = value if isinstance(value, bytes) else value.encode()
    return struct.pack("<Q", len(value)) + value


def entry(key: str | bytes, kind: int, value: bytes) -> bytes:
    """An entry of metadata."""
    return text(key) + struct.pack("<I", kind) + value


def texts(*values: str | bytes, count: int | None = None) -> bytes:
    """An array of texts. count: what it says of their number, where that is not true."""
    return struct.pack("<IQ", 8, len(values) if count is None else count) + b"".join(map(text, values))


def numbers(kind: int, layout: str, *values: float) -> bytes:
    return struct.pack(f"<IQ{len(values)}{layout}", kind, len(values), *values)


def info(name: str | bytes, dims: Iterable[int], kind: int, offset: int) -> bytes:
    """An entry of the table of tensors. dims: the innermost first."""
    dims = [*dims]
    return text(name) + struct.pack(f"<I{len(dims)}QIQ", len(dims), *dims, kind, offset)


ARCHITECTURE = entry("general.architecture", 8, text("llama"))


def raw_gguf(
    metadata: Iterable[bytes] = (ARCHITECTURE,),
    tensors: Iterable[bytes] = (),
    data: bytes = b"",
    *,
    magic: bytes = b"GGUF",
    version: int = 3,
    counts: tuple[int, int] | None = None,
    alignment: int = 32,
) -> bytes:
    """A file. counts: what it says of its tensors and its metadata, where that is not true."""
    metadata, tensors = [*metadata], [*tensors]
    counts = counts or (len(tensors), len(metadata))
    head = magic + struct.pack("<IQQ", version, *counts) + b"".join((*metadata, *tensors))
    return head + bytes(-len(head) % alignment) + data
