"""The texts of an output file, read back: what the target said, for those who learn from it."""

from __future__ import annotations

import orjson

from dsbd_cli.errors import InvalidRowError

__all__ = ["answer_text"]


def answer_text(line: bytes) -> str | None:
    """The best text of a native or OpenAI record; None for a row that failed. Raises InvalidRowError for a line that
    is no record."""
    try:
        record = orjson.loads(line)
    except orjson.JSONDecodeError as error:
        raise InvalidRowError(f"it is not JSON: {error}") from None
    if not isinstance(record, dict):
        raise InvalidRowError("it is not a JSON object")
    if record.get("error") is not None:
        return None
    text = record.get("text") if "response" not in record else _openai_text(record["response"])
    if not isinstance(text, str):
        raise InvalidRowError("it holds no text: give a file that dsbd generate wrote (native or openai)")
    return text


def _openai_text(response: object) -> object:
    """choices[0] of a completion or of a chat completion."""
    try:
        choice = response["body"]["choices"][0]  # type: ignore[index]
        return choice["message"]["content"] if "message" in choice else choice["text"]
    except (KeyError, IndexError, TypeError):
        return None
