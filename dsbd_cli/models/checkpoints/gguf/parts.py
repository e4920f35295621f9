"""GGUF files in parts, as llama.cpp splits them: `NAME-00001-of-00004.gguf`. Any part names the whole.

The first part holds config and tokenizer, each part some of the tensors.
"""

from __future__ import annotations

import re
from pathlib import Path

from dsbd_cli.errors import ModelError

PART = re.compile(r"(.+)-(\d{5})-of-(\d{5})(\.gguf)", re.IGNORECASE)


def gguf_parts(file: Path) -> list[Path]:
    """Return the files of the whole that a GGUF file is a part of, the first one first. They may be missing. A file
    that is no part is the whole."""
    match = PART.fullmatch(file.name)
    if match is None:
        return [file]
    name, _, count, suffix = match.groups()
    return [file.with_name(f"{name}-{number:05}-of-{count}{suffix}") for number in range(1, max(1, int(count)) + 1)]


def whole_gguf(file: Path, name: str) -> Path:
    """Return the first part of the whole that a GGUF file is a part of. name: of the model, in an error. Raises
    ModelError where a part is missing."""
    parts = gguf_parts(file)
    if missing := [part.name for part in parts if not part.is_file()]:
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise ModelError(f"{name}: of its {len(parts)} parts {missing[0]}{more} is missing: get it, too")
    return parts[0]
