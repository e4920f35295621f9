"""Parts that the answers of several OpenAI endpoints share: tokens, ids, metadata."""

from __future__ import annotations

import hashlib

import orjson

from dsbd_cli.io.records.row import Fields
from dsbd_cli.requests import Hypothesis, TokenDetail

CALL_ID_LENGTH = 9  # letters and digits: the only ids that the chat templates of Mistral's models accept


def call_id(key: str, rank: int, index: int) -> str:
    """Return the id of a call. key: of the row. rank: of the text. index: of the call in the text."""
    return hashlib.blake2b(f"{key}:{rank}:{index}".encode(), digest_size=8).hexdigest()[:CALL_ID_LENGTH]


def shown_tokens(beam: Hypothesis) -> list[TokenDetail] | None:
    """Return the tokens of a text; None where they were not asked for.

    The token that ended the text is left out; tokens of a stop string are kept.
    """
    if beam.tokens is None:
        return None
    return [token for index, token in enumerate(beam.tokens) if token.text or index + 1 < len(beam.tokens)]


def chat_token(token: TokenDetail) -> Fields:
    """Return a token with its log-probability and the likeliest tokens at its place."""
    return {
        **_token(token.text, token.logprob),
        "top_logprobs": [_token(text, value) for _, text, value in token.top],
    }


def _token(text: bytes, logprob: float) -> Fields:
    return {"token": shown(text), "logprob": logprob, "bytes": list(text)}


def shown(data: bytes) -> str:
    """Return bytes as text, with a replacement character for half a character; the field `bytes` has the bytes
    themselves."""
    return data.decode(errors="replace")


def string_values(metadata: object) -> dict[str, str]:
    """Return metadata with string values only, as the format demands; any other value is written as JSON."""
    items = metadata if isinstance(metadata, dict) else {"metadata": metadata}
    return {
        str(name): value if isinstance(value, str) else orjson.dumps(value).decode() for name, value in items.items()
    }
