"""Files of allowed answers. The compiled form of a large file is kept beside it, or in the user's cache folder, and the
next run maps it into memory.

    line 1       JSON: version, key (hash of the file and of the tokenizer), body (CRC-32 of all arrays in their order),
                 catalogues: [[name, fanout, [counts]], ...]
    then         for each catalogue the arrays keys, nodes, order, starts (int64) and ids (bytes), each at a multiple of
                 64 bytes
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import zlib
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

import numpy as np
import orjson
import torch
from numpy.typing import NDArray

from dsbd_cli.engine.constraints.answers import Catalogue, CatalogueAnswer, CatalogueCompiler
from dsbd_cli.engine.constraints.trie import Trie
from dsbd_cli.engine.planning.memory_limit import free_bytes
from dsbd_cli.engine.protocols import TextCodec
from dsbd_cli.errors import InvalidRowError, UsageError, shorten

VERSION = 2
KEPT_FROM = 10_000  # answers; fewer are compiled in no time, so they are not kept
FIELDS = ("text", "token_ids", "id", "catalogue")
ALIGNED = 64
ANSWER_BYTES = 600  # of memory for one of many short answers at most, while they are compiled (measured)
COUNTED = 1 << 20  # bytes of a file that are read together to count its lines


def open_catalogues(
    path: Path, codec: TextCodec, vocab_size: int, tell: Callable[[str], None] = lambda line: None
) -> dict[str, Catalogue]:
    """Return the catalogues of a file by name, "" for answers without one. vocab_size: V of the target. tell: is given
    a line where a compiled file is damaged, so that the catalogues are compiled anew.

    Raises UsageError where the file cannot be read, or names the line of an answer that the target cannot give.
    """
    compiler = CatalogueCompiler(codec, vocab_size)
    key = _key(path, codec, compiler)
    for place in _compiled_paths(path, key):
        try:
            kept = _read_compiled(place, key, vocab_size, compiler.end)
        except _DamagedError as damaged:
            tell(f"{place} is damaged ({damaged}): {path} is compiled anew")
            kept = None
        if kept is not None:
            return kept
    try:
        found = {name: compiler.compile(answers) for name, answers in read_catalogues(path).items()}
    except InvalidRowError as error:
        raise UsageError(str(error)) from None
    if sum(map(len, found.values())) >= KEPT_FROM:
        for place in _compiled_paths(path, key):
            if _write_compiled(place, key, found):
                break
    return found


def content_hash(path: Path) -> str:
    """Return a hash of a file's bytes, 32 hexadecimal digits. Raises UsageError where it cannot be read."""
    try:
        with path.open("rb") as stream:
            return hashlib.file_digest(stream, lambda: hashlib.blake2b(digest_size=16)).hexdigest()
    except OSError as error:
        raise UsageError(f"allow {path} cannot be read: {error.strerror or error}") from None


def _key(path: Path, codec: TextCodec, compiler: CatalogueCompiler) -> str:
    """Return a digest of what the compiled file depends on; "" where the tokenizer has no fingerprint."""
    content = content_hash(path)
    fingerprint: str | None = getattr(codec, "fingerprint", None)
    if fingerprint is None:
        return ""
    settings = f"{VERSION} {content} {fingerprint} {compiler.vocab_size} {compiler.codec.eos_ids} {path.suffix}"
    return hashlib.blake2b(settings.encode(), digest_size=16).hexdigest()


def _compiled_paths(path: Path, key: str) -> list[Path]:
    """Return where the compiled file may be: beside the file, or in the user's cache. Without a key there is no
    place."""
    if not key:
        return []
    places, cache = [path.with_name(f"{path.name}.{key[:8]}.trie")], os.environ.get("XDG_CACHE_HOME")
    with contextlib.suppress(RuntimeError):  # a user without a home, as in many containers
        places.append(Path(cache or Path.home() / ".cache") / "dsbd" / f"{key}.trie")
    return places


def _write_compiled(place: Path, key: str, catalogues: Mapping[str, Catalogue]) -> bool:
    """Write the compiled file. It appears under its name only when it is complete. Return False where it cannot be
    written."""
    about = [
        (name, one.trie.fanout, [len(one.trie.keys), len(one), len(one), len(one.starts), len(one.ids)])
        for name, one in catalogues.items()
    ]
    arrays = [part for one in catalogues.values() for part in _arrays(one)]
    head = orjson.dumps({"version": VERSION, "key": key, "body": _checksum(arrays), "catalogues": about}) + b"\n"
    unfinished = place.with_name(f"{place.name}.{os.getpid()}.part")
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        with unfinished.open("wb") as stream:
            stream.write(head)
            for part in arrays:
                stream.write(bytes(-stream.tell() % ALIGNED))
                stream.write(np.ascontiguousarray(part).data)
        unfinished.replace(place)
    except OSError:
        return False
    finally:  # whatever ended it: a run that is stopped here leaves no such file either
        with contextlib.suppress(OSError):
            unfinished.unlink(missing_ok=True)
    return True


def _arrays(one: Catalogue) -> tuple[NDArray[np.int64] | NDArray[np.uint8], ...]:
    """Return the arrays of a catalogue in the order in which they are written."""
    return one.trie.keys, one.nodes, one.order, one.starts, one.ids


def _checksum(arrays: Iterable[NDArray[np.int64] | NDArray[np.uint8]]) -> int:
    found = 0
    for part in arrays:
        found = zlib.crc32(np.ascontiguousarray(part).data, found)
    return found


class _DamagedError(Exception):
    """Damage of a compiled file of this very catalogue. The message says what is wrong."""


def _read_compiled(place: Path, key: str, vocab_size: int, end: int) -> dict[str, Catalogue] | None:
    """Return the catalogues of a compiled file; None where there is no file, or where it was compiled from something
    else. end: token that ends an answer. Raises _DamagedError."""
    ours = False
    try:
        with place.open("rb") as stream:
            line = stream.readline()
        head = orjson.loads(line)
        if head["version"] != VERSION or head["key"] != key:
            return None
        ours, at, found = True, len(line), dict[str, Catalogue]()
        # one map of the whole file: each would keep a file open, and a file may hold thousands of catalogues
        whole = np.memmap(place, np.uint8, "r")
        for name, fanout, counts in head["catalogues"]:
            parts = []
            for count, kind in zip(counts, (np.int64,) * 4 + (np.uint8,), strict=True):
                at += -at % ALIGNED
                past = at + count * np.dtype(kind).itemsize
                if count < 0 or past > len(whole):
                    raise _DamagedError("it is cut off")
                parts.append(whole[at:past].view(kind))
                at = past
            keys, nodes, order, starts, ids = parts
            found[name] = Catalogue(Trie(keys, tuple(fanout), nodes, vocab_size), nodes, order, starts, ids)
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        if ours:
            raise _DamagedError("its first line is wrong") from None
        return None
    if head.get("body") != _checksum(part for one in found.values() for part in _arrays(one)):
        raise _DamagedError("its checksum is another")
    for one in found.values():
        if fault := _fault(one, end):
            raise _DamagedError(fault)
    return found


def _fault(one: Catalogue, end: int) -> str | None:
    """Return what is out of range or out of order in a catalogue that was read from a file; None where nothing is."""
    keys, count = one.trie.keys, len(one.nodes)
    stride = one.trie.vocab_size + 1
    if not len(keys) or keys[0] != -1 or np.any(keys[1:] <= keys[:-1]):
        return "keys do not ascend"
    parents, tokens = np.divmod(keys[1:], stride)
    if np.any(parents > np.arange(len(parents))) or np.any(tokens >= one.trie.vocab_size):
        return "a key names a node or a token that there is not"
    leaves = np.ones(len(keys), dtype=np.bool_)
    leaves[parents] = False
    if not np.array_equal(one.nodes, np.flatnonzero(leaves)) or np.any(tokens[one.nodes - 1] != end):
        return "answers do not end at the leaves"
    if one.trie.fanout != _fanout(parents):
        return "fanout is wrong"
    if not np.array_equal(np.sort(one.order), np.arange(count)):
        return "order is no permutation"
    starts = one.starts
    if len(starts) != count + 1 or starts[0] != 0 or starts[-1] != len(one.ids) or np.any(starts[1:] < starts[:-1]):
        return "starts do not ascend through ids"
    ids = one.ids.tobytes()
    for first, past in zip(starts[:-1].tolist(), starts[1:].tolist(), strict=True):
        try:
            known = orjson.loads(ids[first:past]) if past > first else 0
        except orjson.JSONDecodeError:
            known = None
        if isinstance(known, bool) or not isinstance(known, str | int):
            return "an id is no JSON string or integer"
    return None


def _fanout(parents: NDArray[np.int64]) -> tuple[int, ...]:
    """Return the most children of a node in each layer. parents: [S - 1] of all nodes but the root, ascending."""
    found, start, past = [], 0, 1  # nodes of a layer
    while start < past:
        first, last = np.searchsorted(parents, (start, past))  # their children, which make the next layer
        if first < last:
            found.append(int(np.unique(parents[first:last], return_counts=True)[1].max()))
        start, past = past, past + int(last - first)
    return tuple(found)


def read_catalogues(path: Path) -> Mapping[str, list[CatalogueAnswer]]:
    """Return the answers of a file by catalogue, "" for answers without one. A file that ends in .jsonl holds objects,
    any other one answer per line. Raises UsageError naming the line, or where the answers do not fit into memory."""
    found: dict[str, list[CatalogueAnswer]] = {}
    lines = path.suffix == ".jsonl"
    try:
        _check_room(path, free_bytes(torch.device("cpu")))
        data = path.read_bytes()
    except OSError as error:
        raise UsageError(f"allow {path} cannot be read: {error.strerror or error}") from None
    for number, raw in enumerate(data.removeprefix(b"\xef\xbb\xbf").split(b"\n"), 1):
        line = raw.removesuffix(b"\r")
        if not line.strip():
            continue
        place = f"{path} line {number}"
        name, answer = _read_object(place, line) if lines else ("", CatalogueAnswer(place, text=_decoded(place, line)))
        found.setdefault(name, []).append(answer)
    if not found:
        raise UsageError(f"{path} holds no answer")
    return found


def _check_room(path: Path, free: int) -> None:
    """Refuse a file whose answers would take more than the free bytes, before they are read. Raises OSError,
    UsageError."""
    size, count = path.stat().st_size, 0
    if size <= free:
        with path.open("rb") as stream:
            while data := stream.read(COUNTED):
                count += data.count(b"\n")
    needed = size + ANSWER_BYTES * count
    if needed > free:
        lines = f", {count:,} lines" if count else ""
        raise UsageError(
            f"allow {path} does not fit into memory: {size / 2**30:.1f} GiB{lines}, which takes about "
            f"{needed / 2**30:.1f} GiB, but {free / 2**30:.1f} GiB are free: split it"
        )


def _decoded(place: str, line: bytes) -> str:
    if line.startswith(b"{") and _holds_an_answer(line):
        raise UsageError(f"{place} is an object, but objects are read only from a file that ends in .jsonl: rename it")
    try:
        return line.decode()
    except UnicodeDecodeError as bad:
        raise UsageError(f"{place}: not UTF-8: byte 0x{line[bad.start]:02x} at byte {bad.start + 1}") from None


def _holds_an_answer(line: bytes) -> bool:
    """Return whether this line is an object as a .jsonl file of answers has them."""
    try:
        row = orjson.loads(line)
    except orjson.JSONDecodeError:
        return False
    return ("text" in row or "token_ids" in row) and set(row) <= set(FIELDS)


def _read_object(place: str, line: bytes) -> tuple[str, CatalogueAnswer]:
    """Return the catalogue and the answer of a line of JSON. Raises UsageError."""
    try:
        row = orjson.loads(line)
    except orjson.JSONDecodeError as error:
        raise UsageError(f"{place}: not JSON: {error}") from None
    if not isinstance(row, dict):
        raise UsageError(f"{place} is {shorten(row)}, but must be an object with text or token_ids")
    if unknown := [name for name in row if name not in FIELDS]:
        raise UsageError(f"{place}: unknown field {shorten(unknown[0])}: the fields are {', '.join(FIELDS)}")
    text, tokens, own, name = (row.get(field) for field in FIELDS)
    if (text is None) == (tokens is None):
        raise UsageError(f"{place}: give text or token_ids, one of them")
    if text is not None and not (isinstance(text, str) and text):
        raise UsageError(f"{place}: text is {shorten(text)}, but must be a non-empty string")
    if tokens is not None and not (isinstance(tokens, list) and all(type(token) is int for token in tokens)):
        raise UsageError(f"{place}: token_ids is {shorten(tokens)}, but must be a list of integers")
    if own is not None and (isinstance(own, bool) or not isinstance(own, str | int)):
        raise UsageError(f"{place}: id is {shorten(own)}, but must be a string or an integer")
    if name is not None and not (isinstance(name, str) and name):
        raise UsageError(f"{place}: catalogue is {shorten(name)}, but must be a non-empty string")
    answer = CatalogueAnswer(
        place, text, None if tokens is None else tuple(tokens), b"" if own is None else orjson.dumps(own)
    )
    return name or "", answer
