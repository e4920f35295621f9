"""Compiled catalogues in a file, which the next run maps into memory: how it is written, and how it is read and
checked.

    line 1       JSON: version, key (hash of the file and of the tokenizer), body (CRC-32 of all arrays in their order),
                 catalogues: [[name, fanout, [counts]], ...]
    then         for each catalogue the arrays keys, nodes, order, starts (int64) and ids (bytes), each at a multiple of
                 64 bytes
"""

from __future__ import annotations

import contextlib
import os
import zlib
from collections.abc import Iterable, Mapping
from pathlib import Path

import numpy as np
import orjson
from numpy.typing import NDArray

from dsbd_cli.engine.constraints.answers import Catalogue
from dsbd_cli.engine.constraints.trie import Trie
from dsbd_cli.user_cache import cache_folder

VERSION = 2
ALIGNED = 64


def compiled_paths(path: Path, key: str) -> list[Path]:
    """Return where the compiled file may be: beside the file, or in the user's cache. Without a key there is no
    place."""
    if not key:
        return []
    places = [path.with_name(f"{path.name}.{key[:8]}.trie")]
    with contextlib.suppress(FileNotFoundError):  # a user without a home
        places.append(cache_folder() / f"{key}.trie")
    return places


def write_compiled(file: Path, key: str, catalogues: Mapping[str, Catalogue]) -> bool:
    """Write the compiled file. It appears under its name only when it is complete. Return False where it cannot be
    written."""
    about = [
        (
            name,
            catalogue.trie.fanout,
            [len(catalogue.trie.keys), len(catalogue), len(catalogue), len(catalogue.starts), len(catalogue.ids)],
        )
        for name, catalogue in catalogues.items()
    ]
    arrays = [part for catalogue in catalogues.values() for part in _arrays(catalogue)]
    header = orjson.dumps({"version": VERSION, "key": key, "body": _checksum(arrays), "catalogues": about}) + b"\n"
    unfinished = file.with_name(f"{file.name}.{os.getpid()}.part")
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with unfinished.open("wb") as stream:
            stream.write(header)
            for part in arrays:
                stream.write(bytes(-stream.tell() % ALIGNED))
                stream.write(np.ascontiguousarray(part).data)
        unfinished.replace(file)
    except OSError:
        return False
    finally:  # whatever ended it: a run that is stopped here leaves no such file either
        with contextlib.suppress(OSError):
            unfinished.unlink(missing_ok=True)
    return True


def _arrays(catalogue: Catalogue) -> tuple[NDArray[np.int64] | NDArray[np.uint8], ...]:
    """Return the arrays of a catalogue in the order in which they are written."""
    return catalogue.trie.keys, catalogue.nodes, catalogue.order, catalogue.starts, catalogue.ids


def _checksum(arrays: Iterable[NDArray[np.int64] | NDArray[np.uint8]]) -> int:
    checksum = 0
    for part in arrays:
        checksum = zlib.crc32(np.ascontiguousarray(part).data, checksum)
    return checksum


class DamagedError(Exception):
    """Damage of a compiled file of this very catalogue. The message says what is wrong."""


def read_compiled(file: Path, key: str, vocab_size: int, end: int) -> dict[str, Catalogue] | None:
    """Return the catalogues of a compiled file; None where there is no file, or where it was compiled from something
    else. end: token that ends an answer. Raises DamagedError."""
    ours = False
    try:
        with file.open("rb") as stream:
            line = stream.readline()
        header = orjson.loads(line)
        if header["version"] != VERSION or header["key"] != key:
            return None
        ours, at, catalogues = True, len(line), dict[str, Catalogue]()
        # one map of the whole file: each would keep a file open, and a file may hold thousands of catalogues
        whole = np.memmap(file, np.uint8, "r")
        for name, fanout, counts in header["catalogues"]:
            parts = []
            for count, kind in zip(counts, (np.int64,) * 4 + (np.uint8,), strict=True):
                at += -at % ALIGNED
                past = at + count * np.dtype(kind).itemsize
                if count < 0 or past > len(whole):
                    raise DamagedError("it is cut off")
                parts.append(whole[at:past].view(kind))
                at = past
            keys, nodes, order, starts, ids = parts
            catalogues[name] = Catalogue(Trie(keys, tuple(fanout), nodes, vocab_size), nodes, order, starts, ids)
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        if ours:
            raise DamagedError("its first line is wrong") from None
        return None
    if header.get("body") != _checksum(part for catalogue in catalogues.values() for part in _arrays(catalogue)):
        raise DamagedError("its checksum is another")
    for catalogue in catalogues.values():
        if fault := _fault(catalogue, end):
            raise DamagedError(fault)
    return catalogues


def _fault(catalogue: Catalogue, end: int) -> str | None:
    """Return what is out of range or out of order in a catalogue that was read from a file; None where nothing is."""
    keys, count = catalogue.trie.keys, len(catalogue.nodes)
    stride = catalogue.trie.vocab_size + 1
    if not len(keys) or keys[0] != -1 or np.any(keys[1:] <= keys[:-1]):
        return "keys do not ascend"
    parents, tokens = np.divmod(keys[1:], stride)
    if np.any(parents > np.arange(len(parents))) or np.any(tokens >= catalogue.trie.vocab_size):
        return "a key names a node or a token that there is not"
    leaves = np.ones(len(keys), dtype=np.bool_)
    leaves[parents] = False
    if not np.array_equal(catalogue.nodes, np.flatnonzero(leaves)) or np.any(tokens[catalogue.nodes - 1] != end):
        return "answers do not end at the leaves"
    if catalogue.trie.fanout != _fanout(parents):
        return "fanout is wrong"
    if not np.array_equal(np.sort(catalogue.order), np.arange(count)):
        return "order is no permutation"
    starts = catalogue.starts
    if (
        len(starts) != count + 1
        or starts[0] != 0
        or starts[-1] != len(catalogue.ids)
        or np.any(starts[1:] < starts[:-1])
    ):
        return "starts do not ascend through ids"
    ids = catalogue.ids.tobytes()
    for first, past in zip(starts[:-1].tolist(), starts[1:].tolist(), strict=True):
        try:
            answer_id = orjson.loads(ids[first:past]) if past > first else 0
        except orjson.JSONDecodeError:
            answer_id = None
        if isinstance(answer_id, bool) or not isinstance(answer_id, str | int):
            return "an id is no JSON string or integer"
    return None


def _fanout(parents: NDArray[np.int64]) -> tuple[int, ...]:
    """Return the most children of a node in each layer. parents: [S - 1] of all nodes but the root, ascending."""
    fanout, start, past = [], 0, 1  # nodes of a layer
    while start < past:
        first, last = np.searchsorted(parents, (start, past))  # their children, which make the next layer
        if first < last:
            fanout.append(int(np.unique(parents[first:last], return_counts=True)[1].max()))
        start, past = past, past + int(last - first)
    return tuple(fanout)
