"""Files in UTF-16 and UTF-32, which are refused as a whole."""

from __future__ import annotations

import gzip
import shlex
import subprocess
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dsbd_cli.errors import UsageError
from dsbd_cli.io.lines.encoding import check_text_file, wide_encoding

WIDE = ("utf-16", "utf-32", "utf-16-le", "utf-16-be", "utf-32-le", "utf-32-be")
TEXT = '{"prompt": "Grüße, 你好"}\n'


@pytest.mark.parametrize("name", WIDE)
@pytest.mark.parametrize("ending", [".jsonl", ".csv.gz", ""])
def test_the_command_that_is_named_converts_the_file(tmp_path: Path, name: str, ending: str) -> None:
    path = tmp_path / f"my rows{ending}"
    data = TEXT.encode(name)
    path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)
    with pytest.raises(UsageError) as refused:
        check_text_file(path)
    message, _, command = str(refused.value).partition("; convert it with: ")
    assert message == f"{path} is {name.upper().replace('-LE', 'LE').replace('-BE', 'BE')}, but must be UTF-8"
    subprocess.run(command, shell=True, check=True)
    target = Path(shlex.split(command)[-1])
    assert target.read_text(encoding="utf-8") == TEXT
    assert target.name == f"my rows.utf8{ending.removesuffix('.gz')}"


@pytest.mark.parametrize("mark", [b"\xff\xfe", b"\xfe\xff", b"\xff\xfe\0\0", b"\0\0\xfe\xff"])
def test_a_mark_is_enough(mark: bytes) -> None:
    assert wide_encoding(mark + "你".encode()) is not None


@given(st.text(min_size=2))
def test_no_text_in_utf_8_is_taken_for_a_wide_one(text: str) -> None:
    """Unless it holds a zero at its beginning, which no row and no prompt does."""
    data = text.encode("utf-8", "surrogatepass")
    if b"\0" not in data[:4]:
        assert wide_encoding(data) is None
        assert wide_encoding(b"\xef\xbb\xbf" + data) is None
