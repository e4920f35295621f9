"""The index file: sorted rightly, mapped back as written, and refused where it cannot be used.

Guards: suffixes that compare past a document's end, a file cut off by a full disk, ids of another tokenizer.
"""

from __future__ import annotations

import random
import resource
import tracemalloc
from collections.abc import Callable
from io import BufferedWriter
from pathlib import Path

import numpy as np
import pytest

from dsbd_cli.engine.drafting.index import BODY, SORTED, CorpusTokens, open_index, sort_suffixes, write_index
from dsbd_cli.errors import OutputError, UsageError
from dsbd_cli.io.lines.replace import replacing

TOKENS = [f"{number} ".encode() for number in range(50)]


@pytest.mark.parametrize(("size", "letters"), [(1, 1), (2, 1), (70, 1), (300, 2), (300, 40), (33, 2)])
def test_suffixes_are_sorted_by_their_first_tokens(size: int, letters: int) -> None:
    draw = random.Random(size + letters)
    tokens = [draw.choice([-1, *range(letters)]) for _ in range(size)]
    order = sort_suffixes(np.array(tokens, dtype=np.int32))
    assert order.tolist() == sorted(range(size), key=lambda start: (tokens[start : start + SORTED], start))


def test_sorting_stays_in_the_memory_that_is_documented_and_says_what_it_does() -> None:
    """32 bytes per token: 4 of the tokens, at most 4 that argsort takes by itself, and 24 that numpy tells of."""
    tokens = np.random.default_rng(0).integers(0, 2000, 400_000, dtype=np.int32)
    said: list[str] = []
    tracemalloc.start()
    sort_suffixes(tokens, said.append)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak <= 24 * len(tokens) + 100_000
    assert said[0] == "sorting suffixes by 2 tokens"


def written(path: Path, documents: list[list[int]]) -> Path:
    with replacing(path) as stream:
        buffered = BufferedWriter(stream)
        write_index(buffered, CorpusTokens(documents), TOKENS)
        buffered.detach()
    stream.close()
    return path


def test_what_is_written_is_read_back(tmp_path: Path) -> None:
    index = open_index(written(tmp_path / "i", [[1, 2, 3], [], [2, 3]]), TOKENS)
    assert index.tokens.tolist() == [1, 2, 3, -1, -1, 2, 3, -1]
    assert index.tokens.dtype == index.suffixes.dtype == np.int32
    assert index.suffixes.tolist() == sort_suffixes(np.array(index.tokens)).tolist()
    assert isinstance(index.tokens, np.memmap)
    assert [path.name for path in tmp_path.iterdir()] == ["i"]


def cut(data: bytes) -> bytes:
    return data[:-4]


def longer(data: bytes) -> bytes:
    return data + b"\0" * 4


def other_magic(data: bytes) -> bytes:
    return b"x" + data[1:]


def other_count(data: bytes) -> bytes:
    return data[:32] + bytes([data[32] + 1]) + data[33:]


def wild_token(data: bytes) -> bytes:
    return data[:BODY] + b"\x33\0\0\0" + data[BODY + 4 :]


def wild_suffix(data: bytes) -> bytes:
    return data[:-4] + b"\xff\xff\xff\x7f"


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (cut, "cut off or damaged"),
        (longer, "cut off or damaged"),
        (other_magic, "is no index"),
        (other_count, "damaged in its header"),
        (wild_token, "ids out of range"),
        (wild_suffix, "ids out of range"),
        (lambda data: b"", "is no index"),
        (lambda data: data[:20], "damaged in its header"),
    ],
)
def test_a_damaged_file_is_refused(damage: Callable[[bytes], bytes], message: str, tmp_path: Path) -> None:
    path = written(tmp_path / "i", [[1, 2, 3, 4]])
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(UsageError, match=message):
        open_index(path, TOKENS)


def test_another_tokenizer_or_no_file_is_refused(tmp_path: Path) -> None:
    path = written(tmp_path / "i", [[1, 2]])
    with pytest.raises(UsageError, match="another tokenizer"):
        open_index(path, [*TOKENS[:-1], b"else"])
    with pytest.raises(UsageError, match="cannot be read: No such file"):
        open_index(tmp_path / "nothing", TOKENS)


def test_an_empty_corpus_and_a_bad_place_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no tokens"):
        written(tmp_path / "i", [[], []])
    with pytest.raises(OutputError, match="cannot write"):
        written(tmp_path / "no folder" / "i", [[1]])
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk_is_called_so(tmp_path: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2 * BODY, hard))
    try:
        with pytest.raises(OutputError, match=r"cannot write .*i: File too large"):
            written(tmp_path / "i", [[1, 2, 3] * 9999])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert list(tmp_path.iterdir()) == []
