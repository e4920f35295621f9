"""The file of a suffix index: the token ids of texts.

bytes 0-7    b"dsbdindx"
8-11         format version (uint32, little endian like everything here)
12-15        V, ids of the tokenizer (uint32)
16-31        fingerprint of the tokenizer
32-39        n, tokens with the separators behind each document (uint64)
40-47        number of documents (uint64)
48-51        CRC-32 of the token ids
52-55        CRC-32 of bytes 0-51
64 ...       n token ids (int32; -1 between documents)
"""

from __future__ import annotations

import hashlib
import os
import struct
import zlib
from array import array
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import BinaryIO

import numpy as np
from numpy.typing import NDArray

from dsbd_cli.errors import UsageError

MAGIC, VERSION = b"dsbdindx", 2
HEADER = struct.Struct("<8sII16sQQI")
BODY = 64
MOST_TOKENS = 2**30 - 1
SEPARATOR = -1

Ids = NDArray[np.int32]


def tokenizer_fingerprint(token_bytes: Sequence[bytes]) -> bytes:
    """Return 16 bytes that two tokenizers share only if every id stands for the same bytes."""
    digest = hashlib.blake2b(digest_size=16)
    for token in token_bytes:
        digest.update(len(token).to_bytes(4, "little") + token)
    return digest.digest()


class CorpusTokens:
    """Tokens of a corpus while it is read, at 4 bytes per token."""

    def __init__(self, documents: Iterable[Iterable[int]] = ()) -> None:
        self.ids = array("i")
        self.documents = 0
        for document in documents:
            self.extend(document)
            self.end_document()

    def extend(self, ids: Iterable[int]) -> None:
        """Add tokens to the document that is being read."""
        self.ids.extend(ids)

    def end_document(self) -> None:
        """End the document with a separator, so that no match reaches from one document into the next."""
        self.ids.append(SEPARATOR)
        self.documents += 1

    @property
    def tokens(self) -> Ids:
        """All tokens [n], with a separator behind each document."""
        return np.array(self.ids, np.int32)


def write_index(stream: BinaryIO, tokens: Ids, token_bytes: Sequence[bytes]) -> None:
    """Write the file. tokens: [n], with a separator behind each document.

    Raises UsageError for a corpus without tokens or with too many, OSError where the file cannot be written.
    """
    size, documents = len(tokens), int((tokens == SEPARATOR).sum())
    if size == documents:
        raise UsageError("the corpus holds no tokens: there is nothing to index")
    if size > MOST_TOKENS:
        raise UsageError(f"the corpus has {size} tokens, but an index holds {MOST_TOKENS}: split it")
    body = tokens.astype("<i4", copy=False).data  # ndarray.tofile does not say why a disk takes no more
    fingerprint = tokenizer_fingerprint(token_bytes)
    header = HEADER.pack(MAGIC, VERSION, len(token_bytes), fingerprint, size, documents, zlib.crc32(body))
    header += struct.pack("<I", zlib.crc32(header))
    stream.write(header.ljust(BODY, b"\0"))
    stream.write(body)
    stream.flush()


def replace_index(path: Path, token_bytes: Sequence[bytes], tokens: Ids) -> None:
    """Write the file in place of an older one, which stays until the new one is whole. Raises UsageError."""
    new = path.with_name(f".{path.name}.{os.getpid()}.new")
    try:
        try:
            with new.open("xb") as stream:
                write_index(stream, tokens, token_bytes)
                os.fsync(stream.fileno())
            new.replace(path)
        finally:
            new.unlink(missing_ok=True)
    except OSError as error:
        raise UsageError(f"{path} cannot be written: {error.strerror or error}") from None


def read_index(path: Path, token_bytes: Sequence[bytes]) -> Ids:
    """Read the tokens [n] of a file. Raises UsageError where it is missing, no index, damaged, or of another
    tokenizer."""
    try:
        with path.open("rb") as stream:
            header = stream.read(BODY)
            body = stream.read() if header[:8] == MAGIC else b""
    except OSError as error:
        raise UsageError(f"index {path} cannot be read: {error.strerror or error}") from None
    if header[:8] != MAGIC:
        raise UsageError(f"{path} is no index: dsbd index makes one")
    version = int.from_bytes(header[8:12], "little")
    if version != VERSION:
        raise UsageError(f"index {path} has format {version}, but this dsbd reads {VERSION}: make it again")
    if len(header) < BODY or zlib.crc32(header[: HEADER.size]) != struct.unpack_from("<I", header, HEADER.size)[0]:
        raise UsageError(f"index {path} is damaged in its header: make it again with dsbd index")
    *_, fingerprint, size, _, checksum = HEADER.unpack_from(header)
    if len(body) != 4 * size:
        raise UsageError(f"index {path} has {BODY + len(body)} bytes instead of {BODY + 4 * size}: make it again")
    if fingerprint != tokenizer_fingerprint(token_bytes):
        raise UsageError(f"index {path} was made with another tokenizer: make it again with --target of this run")
    tokens = np.frombuffer(body, dtype="<i4").astype(np.int32, copy=False)
    fit = size and tokens.min() >= SEPARATOR and tokens.max() < len(token_bytes) and tokens[-1] == SEPARATOR
    if not fit or zlib.crc32(body) != checksum:
        raise UsageError(f"index {path} is damaged: make it again with dsbd index")
    return tokens
