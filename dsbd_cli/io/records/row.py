"""One input row, answered or not: what readers return and writers take."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Literal

from dsbd_cli.errors import RowError
from dsbd_cli.requests import Request

Form = Literal["flat", "openai-completions", "openai-chat", "text"]
Fields = dict[str, object]

MAX_LINE_BYTES = 16 << 20  # parsed, a line of brackets takes 25 times its size


@dataclass(frozen=True, slots=True)
class LongLine:
    """Stands for a line that cannot be held, or a table's row that cannot be read.

    Attributes:
        size: its bytes. head: its first bytes.
        reason: why it cannot be read; the empty text: it is too long.
    """

    size: int
    head: bytes = b""
    reason: str = ""


@dataclass(frozen=True, slots=True)
class Row:
    """An input row. Exactly one of `request` and `error` is given.

    Attributes:
        index: place among the rows, from 0.
        number: line in the input, from 1; blank lines count here, though they are no rows.
        id: `id` or `custom_id` of the row, else its index.
        request: what goes to the engine.
        error: why the row cannot be answered; the message begins with `line <number>: `.
        form: how the row was written.
        metadata: any JSON value that came with the row, given back in its record.
        key: hash of what the row asks for, in whatever form it is written. The index counts only where it is the id.
        warnings: what was not used of the row; a field name is warned of once per reader.
    """

    index: int
    number: int
    id: str
    request: Request | None
    error: RowError | None
    form: Form
    metadata: object | None
    key: str
    warnings: tuple[str, ...] = ()


def content_key(content: bytes) -> str:
    """32 hexadecimal digits for the bytes that say what is asked, the id among them."""
    return hashlib.blake2b(content, digest_size=16).hexdigest()
