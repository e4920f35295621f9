"""The file behind the drafter `retrieval`: a corpus of token ids and its suffix array, memory-mapped.

    bytes 0-7    b"dsbdindx"
    8-11         format version (uint32, little endian like everything here)
    12-15        V, ids of the tokenizer (uint32)
    16-31        fingerprint of the tokenizer
    32-39        n, tokens with the separators behind each document (uint64)
    40-47        number of documents (uint64)
    48-51        CRC-32 of bytes 0-47
    64 ...       n token ids (int32; -1 between documents), then n suffix starts (int32)

Suffixes are sorted by their first SORTED tokens. The end of a document or of the corpus sorts before every token. Equal
suffixes keep the order of the corpus.
"""

from __future__ import annotations

import hashlib
import struct
import zlib
from array import array
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import numpy as np
from numpy.typing import NDArray

from dsbd_cli.errors import UsageError

MAGIC, VERSION = b"dsbdindx", 1
HEADER = struct.Struct("<8sII16sQQ")
BODY = 64
SORTED = 32
MOST_TOKENS = 2**31 - 2
SEPARATOR = -1

Ids = NDArray[np.int32]
OnProgress = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class CorpusIndex:
    """A loaded index: tokens [n] int32 and suffixes [n] int32, both read from the file as they are used."""

    tokens: Ids
    suffixes: Ids


def tokenizer_fingerprint(token_bytes: Sequence[bytes]) -> bytes:
    """Return 16 bytes that two tokenizers share only if every id stands for the same bytes."""
    digest = hashlib.blake2b(digest_size=16)
    for token in token_bytes:
        digest.update(len(token).to_bytes(4, "little") + token)
    return digest.digest()


def sort_suffixes(tokens: Ids, progress: OnProgress = lambda line: None) -> Ids:
    """Return the suffix array [n] int32, sorted by prefix doubling up to SORTED tokens. This needs about 28 bytes per
    token beside the tokens themselves."""
    size = len(tokens)
    key = tokens.astype(np.int64)
    order = np.argsort(key, kind="stable")
    length = 1
    while length < SORTED:
        progress(f"sorting suffixes by {2 * length} tokens")
        ranked = key[order]
        del key
        group = np.empty(size, dtype=np.int32)
        group[:1] = 1  # rank 0 is past the end
        np.not_equal(ranked[1:], ranked[:-1], out=group[1:], casting="unsafe")
        del ranked
        np.cumsum(group, out=group)
        rank = np.empty(size, dtype=np.int32)
        rank[order] = group
        distinct = int(group[-1])
        del group, order
        key = rank.astype(np.int64)
        key *= size + 2
        key[:-length] += rank[length:]
        del rank
        order = np.argsort(key, kind="stable")
        length *= 2
        if distinct == size:
            break
    return order.astype(np.int32)


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


def write_index(
    stream: BinaryIO, corpus: CorpusTokens, token_bytes: Sequence[bytes], progress: OnProgress = lambda line: None
) -> None:
    """Sort the suffixes and write the file.

    Raises UsageError for a corpus without tokens or with too many, OSError where the file cannot be written.
    """
    size = len(corpus.ids)
    if size == corpus.documents:
        raise UsageError("the corpus holds no tokens: there is nothing to index")
    if size > MOST_TOKENS:
        raise UsageError(f"the corpus has {size} tokens, but an index holds {MOST_TOKENS}: split it")
    tokens = np.frombuffer(corpus.ids, dtype=np.int32)
    suffixes = sort_suffixes(tokens, progress)
    header = HEADER.pack(MAGIC, VERSION, len(token_bytes), tokenizer_fingerprint(token_bytes), size, corpus.documents)
    header += struct.pack("<I", zlib.crc32(header))
    stream.write(header.ljust(BODY, b"\0"))
    for numbers in (tokens, suffixes):
        stream.write(numbers.astype("<i4").data)  # ndarray.tofile does not say why a disk takes no more
    stream.flush()


def open_index(path: Path, token_bytes: Sequence[bytes]) -> CorpusIndex:
    """Map an index into memory. Raises UsageError where it is missing, no index, damaged, or of another tokenizer."""
    try:
        with path.open("rb") as stream:
            header = stream.read(BODY)
        total = path.stat().st_size
    except OSError as error:
        raise UsageError(f"index {path} cannot be read: {error.strerror or error}") from None
    if header[:8] != MAGIC:
        raise UsageError(f"{path} is no index: dsbd index makes one")
    if len(header) < BODY or zlib.crc32(header[: HEADER.size]) != struct.unpack_from("<I", header, HEADER.size)[0]:
        raise UsageError(f"index {path} is damaged in its header: make it again with dsbd index")
    _, version, _, fingerprint, size, _ = HEADER.unpack_from(header)
    if version != VERSION:
        raise UsageError(f"index {path} has format {version}, but this dsbd reads {VERSION}: make it again")
    if total != BODY + 8 * size:
        raise UsageError(f"index {path} has {total} bytes instead of {BODY + 8 * size}: it is cut off or damaged")
    if fingerprint != tokenizer_fingerprint(token_bytes):
        raise UsageError(f"index {path} was made with another tokenizer: make it again with --target of this run")
    # copy-on-write: nothing is ever written, but a tensor needs memory that could be
    body = np.memmap(path, dtype="<i4", mode="c", offset=BODY, shape=(2, size))
    index = CorpusIndex(body[0], body[1])
    _check(path, index, len(token_bytes))
    return index


def _check(path: Path, index: CorpusIndex, vocabulary: int) -> None:
    """Check that no token id and no suffix start is out of range, because it would be read outside the model's tables.
    Raises UsageError."""
    size = len(index.tokens)
    ids_fit = index.tokens.min() >= SEPARATOR and index.tokens.max() < vocabulary
    ids_fit = ids_fit and index.tokens[-1] == SEPARATOR
    if not ids_fit or index.suffixes.min() < 0 or index.suffixes.max() >= size:
        raise UsageError(f"index {path} is damaged: it holds ids out of range; make it again with dsbd index")
