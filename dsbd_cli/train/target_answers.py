"""Answers of the target to the user's prompts, in a file that a later run goes on with."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import orjson

from dsbd_cli.engine.decoding.encode import Encoder
from dsbd_cli.engine.decoding.engine import Engine
from dsbd_cli.errors import RowError
from dsbd_cli.io.lines.jsonl import LineWriter
from dsbd_cli.io.lines.lock import open_locked
from dsbd_cli.io.lines.resume import truncate_at, whole_size
from dsbd_cli.requests import Request, RequestResult


@dataclass(frozen=True, slots=True)
class AnswerTokens:
    """Token ids of one answer and of the prompt before it."""

    prompt: tuple[int, ...]
    tokens: tuple[int, ...]


@contextmanager
def open_answers(path: Path) -> Iterator[tuple[int, LineWriter]]:
    """How many prompts the file has answers to, and what writes further lines. A torn last line is dropped.

    Raises OutputError where it cannot be written, or another run writes it.
    """
    stream = open_locked(path, create_only=False)
    truncate_at(stream, whole_size(stream))
    stream.seek(0)
    lines = sum(1 for _ in stream)
    writer = LineWriter(stream, str(path), owned=True)
    with writer:
        yield lines, writer


def make_answers(
    engine: Engine, requests: Sequence[Request], writer: LineWriter, on_answer: Callable[[int], None]
) -> list[RowError]:
    """Answer the requests and write a line for each; ends early where the engine is stopped. on_answer: after each, how
    many are done. Returns the errors of those that cannot be answered."""
    encoder = Encoder.alone(engine.target, engine.codec, engine.method)
    failed = []
    for number, result in enumerate(engine.run(requests), 1):
        if result.error is not None:
            failed.append(result.error)
        writer.write(orjson.dumps(_line(encoder, result)))
        on_answer(number)
    return failed


def _line(encoder: Encoder, result: RequestResult) -> dict[str, object]:
    """`text` is for `dsbd trim-draft --texts`, which counts what the target says."""
    if result.error is not None:
        return {"id": result.request.id, "error": str(result.error)}
    return {
        "id": result.request.id,
        "text": result.text,
        "prompt_ids": encoder.job(0, result.request).prompt,
        "answers": [list(one.token_ids) for one in result.hypotheses],
    }


def read_answers(path: Path) -> list[AnswerTokens]:
    """All answers of the file, in its order; each text of a prompt once."""
    found = []
    with path.open("rb") as stream:
        for line in stream:
            record = orjson.loads(line)
            prompt = tuple(record.get("prompt_ids", ()))
            texts = dict.fromkeys(tuple(tokens) for tokens in record.get("answers", ()))
            found += [AnswerTokens(prompt, tokens) for tokens in texts if prompt and tokens]
    return found
