"""Files in UTF-16 and UTF-32, known by their first bytes. They are refused as a whole, because every line would
fail."""

from __future__ import annotations

import shlex
from pathlib import Path

from dsbd_cli.errors import UsageError
from dsbd_cli.io.lines.compression import compression, open_input
from dsbd_cli.io.lines.jsonl import FIRST_BYTES

# marks at the beginning of a file; that of UTF-32 begins with that of UTF-16
MARKS = (
    (b"\xff\xfe\0\0", "UTF-32"),
    (b"\0\0\xfe\xff", "UTF-32"),
    (b"\xff\xfe", "UTF-16"),
    (b"\xfe\xff", "UTF-16"),
)
# places of the zeros among the first four bytes, where two letters of ASCII begin a file without a mark
ZEROS = {
    (False, True, True, True): "UTF-32LE",
    (True, True, True, False): "UTF-32BE",
    (False, True, False, True): "UTF-16LE",
    (True, False, True, False): "UTF-16BE",
}
UNPACKERS = {".gz": "gzip -dc", ".zst": "zstd -dc"}


def wide_encoding(begin: bytes) -> str | None:
    """Return the name, as iconv takes it, of the encoding of a text with these first bytes; None for UTF-8 and for
    anything else."""
    for mark, name in MARKS:
        if begin.startswith(mark):
            return name
    zeros = tuple(byte == 0 for byte in begin[:4])
    return ZEROS.get(zeros) if len(zeros) == 4 else None


def check_text_file(path: Path) -> bytes:
    """Return the first bytes of an ordinary file, unpacked. Raises UsageError as `check_encoding` does, and OSError."""
    with open_input(path) as stream:
        begin = stream.read(FIRST_BYTES)
    check_encoding(begin, str(path), path)
    return begin


def check_encoding(begin: bytes, name: str, path: Path | None = None) -> None:
    """Refuse a text that is UTF-16 or UTF-32, with the command that converts it. Raises UsageError.

    begin: its first bytes. name: of the file or stream. path: of an ordinary file; None for a pipe.
    """
    encoding = wide_encoding(begin)
    if encoding is None:
        return
    iconv = f"iconv -f {encoding} -t UTF-8"
    if path is None:
        raise UsageError(f"{name} is {encoding}, but must be UTF-8: put {iconv} before it in the pipe")
    packed = compression(path)
    plain = path.with_suffix("") if packed else path
    source, target = shlex.quote(str(path)), shlex.quote(str(plain.with_suffix(f".utf8{plain.suffix}")))
    command = f"{iconv} {source} > {target}"
    if packed:
        command = f"{UNPACKERS[packed]} {source} | {iconv} > {target}"
    raise UsageError(f"{name} is {encoding}, but must be UTF-8; convert it with: {command}")
