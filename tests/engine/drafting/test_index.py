"""The index file: read back as written, replaced whole, and refused where it cannot be used.

Guards: a file cut off by a full disk, ids of another tokenizer, an older file lost while a new one is written.
"""

from __future__ import annotations

import resource
from collections.abc import Callable
from io import BufferedWriter
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from dsbd_cli.engine.drafting.index import BODY, CorpusTokens, read_index, replace_index, write_index
from dsbd_cli.errors import OutputError, UsageError
from dsbd_cli.io.lines.replace import replacing

TOKENS = [f"{number} ".encode() for number in range(50)]


def tokens_of(documents: list[list[int]]) -> NDArray[np.int32]:
    return CorpusTokens(documents).tokens


def written(path: Path, documents: list[list[int]]) -> Path:
    with replacing(path) as stream:
        buffered = BufferedWriter(stream)
        write_index(buffered, tokens_of(documents), TOKENS)
        buffered.detach()
    stream.close()
    return path


def test_what_is_written_is_read_back(tmp_path: Path) -> None:
    tokens = read_index(written(tmp_path / "i", [[1, 2, 3], [], [2, 3]]), TOKENS)
    assert tokens.tolist() == [1, 2, 3, -1, -1, 2, 3, -1]
    assert tokens.dtype == np.int32
    assert [path.name for path in tmp_path.iterdir()] == ["i"]


def test_a_file_that_is_replaced_stays_until_the_new_one_is_whole(tmp_path: Path) -> None:
    path = written(tmp_path / "i", [[1, 2]])
    old = path.read_bytes()
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2 * BODY, hard))
    try:
        with pytest.raises(UsageError, match=r"i cannot be written: File too large"):
            replace_index(path, TOKENS, tokens_of([[1, 2, 3] * 999]))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert path.read_bytes() == old
    replace_index(path, TOKENS, tokens_of([[4]]))
    assert read_index(path, TOKENS).tolist() == [4, -1]
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


def other_token(data: bytes) -> bytes:
    return data[:BODY] + b"\x02\0\0\0" + data[BODY + 4 :]


def older(data: bytes) -> bytes:
    return data[:8] + b"\x01" + data[9:]


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (cut, "has 80 bytes instead of 84"),
        (longer, "has 88 bytes instead of 84"),
        (other_magic, "is no index"),
        (other_count, "damaged in its header"),
        (wild_token, "is damaged"),
        (other_token, "is damaged"),
        (older, "has format 1, but this dsbd reads 2"),
        (lambda data: b"", "is no index"),
        (lambda data: data[:20], "damaged in its header"),
    ],
)
def test_a_damaged_file_is_refused(damage: Callable[[bytes], bytes], message: str, tmp_path: Path) -> None:
    path = written(tmp_path / "i", [[1, 2, 3, 4]])
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(UsageError, match=message):
        read_index(path, TOKENS)


def test_another_tokenizer_or_no_file_is_refused(tmp_path: Path) -> None:
    path = written(tmp_path / "i", [[1, 2]])
    with pytest.raises(UsageError, match="another tokenizer"):
        read_index(path, [*TOKENS[:-1], b"else"])
    with pytest.raises(UsageError, match="cannot be read: No such file"):
        read_index(tmp_path / "nothing", TOKENS)


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
