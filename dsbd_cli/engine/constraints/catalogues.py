"""Files of allowed answers. The compiled form of a large file is kept beside it, or in the user's cache folder."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import orjson
import torch

from dsbd_cli.engine.constraints.answer_files import FIELDS, check_answer_file, is_answer_table, table_answers
from dsbd_cli.engine.constraints.answers import Catalogue, CatalogueAnswer, CatalogueCompiler
from dsbd_cli.engine.constraints.compiled import VERSION, DamagedError, compiled_paths, read_compiled, write_compiled
from dsbd_cli.engine.planning.memory_limit import free_bytes
from dsbd_cli.engine.protocols import TextCodec
from dsbd_cli.errors import InvalidRowError, UsageError, shorten

KEPT_FROM = 10_000  # answers; fewer are compiled in no time, so they are not kept
ANSWER_BYTES = 600  # of memory for one of many short answers at most, while they are compiled (measured)
COUNTED = 1 << 20  # bytes of a file that are read together to count its lines


def open_catalogues(
    path: Path, codec: TextCodec, vocab_size: int, tell: Callable[[str], None] = lambda line: None
) -> dict[str, Catalogue]:
    """Return the catalogues of a file by name, "" for answers without one. vocab_size: V of the target. tell: is given
    a line where a compiled file is damaged, so that the catalogues are compiled anew, and where two answers look alike.

    Raises UsageError where the file cannot be read, or names the line of an answer that the target cannot give.
    """
    compiler = CatalogueCompiler(codec, vocab_size)
    key = _key(path, codec, compiler)
    for compiled in compiled_paths(path, key):
        try:
            kept = read_compiled(compiled, key, vocab_size, compiler.end)
        except DamagedError as damaged:
            tell(f"{compiled} is damaged ({damaged}): {path} is compiled anew")
            kept = None
        if kept is not None:
            return kept
    try:
        answers = read_catalogues(path)
        for line in _notes(answers):
            tell(line)
        catalogues = {name: compiler.compile(some) for name, some in answers.items()}
    except InvalidRowError as error:
        raise UsageError(str(error)) from None
    if sum(map(len, catalogues.values())) >= KEPT_FROM:
        for compiled in compiled_paths(path, key):
            if write_compiled(compiled, key, catalogues):
                break
    return catalogues


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
    table = " table" if is_answer_table(path) else ""
    settings = f"{VERSION} {content} {fingerprint} {compiler.vocab_size} {compiler.codec.eos_ids} {path.suffix}{table}"
    return hashlib.blake2b(settings.encode(), digest_size=16).hexdigest()


def read_catalogues(path: Path) -> Mapping[str, list[CatalogueAnswer]]:
    """Return the answers of a file by catalogue, "" for answers without one. A file that ends in .jsonl holds objects,
    one in .csv or .tsv is a table of the same fields, any other one holds an answer per line. Raises UsageError naming
    the line, or where the answers do not fit into memory."""
    answers: dict[str, list[CatalogueAnswer]] = {}
    check_answer_file(path)
    lines = path.suffix == ".jsonl"
    try:
        _check_room(path, free_bytes(torch.device("cpu")))
        data = b"" if is_answer_table(path) else path.read_bytes()
    except OSError as error:
        raise UsageError(f"allow {path} cannot be read: {error.strerror or error}") from None
    for number, raw in enumerate(data.removeprefix(b"\xef\xbb\xbf").split(b"\n"), 1):
        line = raw.removesuffix(b"\r")
        if not line.strip():
            continue
        where = f"{path} line {number}"
        name, answer = _read_object(where, line) if lines else ("", CatalogueAnswer(where, text=_decoded(where, line)))
        answers.setdefault(name, []).append(answer)
    for number, row in table_answers(path) if is_answer_table(path) else ():
        name, answer = _answer(f"{path} line {number}", row)
        answers.setdefault(name, []).append(answer)
    if not answers:
        raise UsageError(f"{path} holds no answer")
    return answers


def _notes(catalogues: Mapping[str, list[CatalogueAnswer]]) -> Iterator[str]:
    """Yield a line about answers of a catalogue that differ by blanks at their ends alone."""
    for answers in catalogues.values():
        ending = {text.rstrip(): text for answer in answers if (text := answer.text or "") != text.rstrip()}
        alike = [
            answer
            for answer in answers
            if ending and answer.text != ending.get((answer.text or "").rstrip(), answer.text)
        ]
        if alike:
            text = alike[0].text or ""
            more = "" if len(alike) == 1 else f" ({len(alike)} answers are like this)"
            yield (
                f"{alike[0].place}: the answer {shorten(text)} differs from {shorten(ending[text.rstrip()])}, which is "
                f"allowed too, by blanks at the end alone{more}"
            )


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


def _decoded(where: str, line: bytes) -> str:
    if line.startswith(b"{") and _holds_an_answer(line):
        raise UsageError(f"{where} is an object, but objects are read only from a file that ends in .jsonl: rename it")
    try:
        return line.decode()
    except UnicodeDecodeError as bad:
        raise UsageError(f"{where}: not UTF-8: byte 0x{line[bad.start]:02x} at byte {bad.start + 1}") from None


def _holds_an_answer(line: bytes) -> bool:
    """Return whether this line is an object as a .jsonl file of answers has them."""
    try:
        row = orjson.loads(line)
    except orjson.JSONDecodeError:
        return False
    return ("text" in row or "token_ids" in row) and set(row) <= set(FIELDS)


def _read_object(where: str, line: bytes) -> tuple[str, CatalogueAnswer]:
    """Return the catalogue and the answer of a line of JSON. Raises UsageError."""
    try:
        row = orjson.loads(line)
    except orjson.JSONDecodeError as error:
        raise UsageError(f"{where}: not JSON: {error}") from None
    if not isinstance(row, dict):
        raise UsageError(f"{where} is {shorten(row)}, but must be an object with text or token_ids")
    return _answer(where, row)


def _answer(where: str, row: Mapping[str, object]) -> tuple[str, CatalogueAnswer]:
    """Return the catalogue and the answer of an object or of a row of a table. Raises UsageError."""
    if unknown := [name for name in row if name not in FIELDS]:
        raise UsageError(f"{where}: unknown field {shorten(unknown[0])}: the fields are {', '.join(FIELDS)}")
    text, tokens, own, name = (row.get(field) for field in FIELDS)
    if (text is None) == (tokens is None):
        raise UsageError(f"{where}: give text or token_ids, one of them")
    if text is not None and not (isinstance(text, str) and text):
        raise UsageError(f"{where}: text is {shorten(text)}, but must be a non-empty string")
    if tokens is not None and not (isinstance(tokens, list) and all(type(token) is int for token in tokens)):
        raise UsageError(f"{where}: token_ids is {shorten(tokens)}, but must be a list of integers")
    if own is not None and (isinstance(own, bool) or not isinstance(own, str | int)):
        raise UsageError(f"{where}: id is {shorten(own)}, but must be a string or an integer")
    if name is not None and not (isinstance(name, str) and name):
        raise UsageError(f"{where}: catalogue is {shorten(name)}, but must be a non-empty string")
    answer = CatalogueAnswer(
        where, text, None if tokens is None else tuple(tokens), b"" if own is None else orjson.dumps(own)
    )
    return name or "", answer
