"""Prompts that a draft is made from, or that something is measured on."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

from dsbd_cli.cli.run.files import check_columns, check_files_under, check_rows_file
from dsbd_cli.cli.run.messages import warn
from dsbd_cli.config.sampling import ReasoningMode
from dsbd_cli.errors import UsageError, plural, reading
from dsbd_cli.io.lines.compression import open_input
from dsbd_cli.io.lines.line_reader import LineReader
from dsbd_cli.io.lines.tables import is_table, lines_reader, table_header
from dsbd_cli.io.records.cells import column_rules
from dsbd_cli.io.records.file_roots import files_root
from dsbd_cli.io.records.reader import RowReader
from dsbd_cli.io.records.row import held_bytes
from dsbd_cli.requests import EngineInfo, Request

CHAT_OR_NOT = (
    "the target has a chat template, but prompts are given to it as they stand: --chat puts each through the template, "
    "--no-chat ends this line"
)
NOT_CONTINUED = (
    "some chats end with a message of the assistant, and a new turn opens behind it: continue_final_message, or prefix "
    "in place of that message, continues it"
)
HELD_OUT_EVERY, HELD_OUT_MOST = 8, 64


def read_prompts(
    option: str,
    path: Path,
    rows: RowReader,
    *,
    most: int | None = None,
    seen: Callable[[bytes], object] | None = None,
    files_under: Path | None = None,
    columns: str | None = None,
) -> list[Request]:
    """Return the requests of a file as generate reads it, the first `most` of them.

    Fields that are not used are warned of. seen: called with every line. files_under: the only folder that rows may
    name files in. columns: of a table, as --set columns names them. Raises UsageError with the first bad line, and if
    the file cannot be read.
    """
    check_files_under(files_under)
    check_columns(columns, path)
    rules = column_rules(columns, strict=rows.strict)
    rows = replace(rows, files_root=files_root(files_under, path))
    requests: list[Request] = []
    with reading(f"{option} {path}"), ExitStack() as stack:
        check_rows_file(path, rules)
        if is_table(path) and path.is_file() and (header := table_header(path, rules)) is not None:
            for note in header.notes(path):
                warn(note)
        stream = stack.enter_context(open_input(path))
        reader = stack.enter_context(LineReader(stream, str(path), read=lines_reader(path, rules)))
        for number, line in itertools.islice(filter(None, reader), most):
            row = rows.read(line, index=len(requests), number=number)
            if row.request is None:
                raise UsageError(f"{option} {path}: {row.error}")
            requests.append(row.request)
            for warning in row.warnings:
                warn(f"{option} {path}: {warning}")
            if seen is not None:
                seen(held_bytes(line))
    return requests


def hold_out(prompts: Sequence[Request]) -> tuple[list[Request], list[Request]]:
    """Split prompts into those to measure on, which are every eighth one, 64 at most, and all others."""
    places = range(HELD_OUT_EVERY - 1, len(prompts), HELD_OUT_EVERY)[:HELD_OUT_MOST]
    return [prompts[index] for index in places], [prompt for index, prompt in enumerate(prompts) if index not in places]


def warn_left_out(failed: Sequence[str], kind: str = "prompt") -> None:
    """Warn of prompts that cannot be answered. failed: for each its id and why."""
    if failed:
        warn(f"left out, because they cannot be answered: {plural(len(failed), kind)}, the first with {failed[0]}")


def check_chat(chat: bool | None, info: EngineInfo | None) -> None:
    """Raise UsageError where --chat is given and the target has no chat template."""
    if chat and info is not None and not info.chat:
        raise UsageError(f"--chat: target {info.target} has no chat template: drop it")


def check_reasoning(mode: ReasoningMode, info: EngineInfo | None) -> None:
    """Raise UsageError where --set reasoning could not act."""
    if mode != "split" and info is not None and not info.reasoning:
        raise UsageError(
            f"--set reasoning={mode} would do nothing, because target {info.target} marks no reasoning in a known way: "
            "drop it"
        )


def is_left_off(request: Request) -> bool:
    """Return whether a conversation ends with a message of the assistant that is not continued."""
    last = request.messages[-1] if request.messages else {}
    ended = last.get("role") == "assistant" and not last.get("tool_calls")
    return ended and not request.chat.continue_final_message and request.sampling.prefix is None


def warn_plain(chat: bool | None, info: EngineInfo | None, requests: Sequence[Request]) -> None:
    """Warn where a request is a plain prompt although the target has a chat template, and nobody has said which, and
    where a last message of the assistant is not continued.

    chat: of --chat and --no-chat; None: neither is given. Raises UsageError as `check_chat` does.
    """
    check_chat(chat, info)
    if any(map(is_left_off, requests)):
        warn(NOT_CONTINUED)
    if chat is None and info is not None and info.chat and any(request.prompt is not None for request in requests):
        warn(CHAT_OR_NOT)
