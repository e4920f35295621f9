"""Tokenizers that an earlier load has stored, because transformers takes two seconds to import itself and to make
one."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from dsbd_cli.user_cache import cache_folder, write_whole

METHODS = ("__call__", "_encode_plus", "decode", "_decode", "convert_ids_to_tokens", "get_vocab", "get_chat_template")


class StoredTokenizer:
    """The part of a transformers tokenizer that HFCodec uses, run by the library tokenizers alone.

    The backend is the one that transformers had made, so ids and texts are the same.
    """

    def __init__(self, backend: Any, facts: Mapping[str, Any], load: Callable[[], Any]) -> None:
        """backend: a tokenizers.Tokenizer. facts: as `store` returns them. load: gives transformers' tokenizer."""
        self.backend_tokenizer, self.original = backend, load
        self.special_tokens_map: Mapping[str, Any] = facts["special_tokens_map"]
        self.all_special_ids: list[int] = facts["all_special_ids"]
        self.eos_token_id: int | None = facts["eos_token_id"]
        self.chat_template: str | dict[str, str] | None = facts["chat_template"]
        self.response_template: dict[str, Any] | None = facts["response_template"]

    @property
    def added_tokens_decoder(self) -> Mapping[int, Any]:
        """Tokens outside the trained vocabulary, by id."""
        found: Mapping[int, Any] = self.backend_tokenizer.get_added_tokens_decoder()
        return found

    def get_vocab(self) -> dict[str, int]:
        """Return all tokens with their ids, added ones too."""
        return dict(self.backend_tokenizer.get_vocab(with_added_tokens=True))

    def convert_ids_to_tokens(self, ids: int) -> str:
        """Return the token of an id."""
        return str(self.backend_tokenizer.id_to_token(ids))

    def __call__(
        self, text: str | list[str], *, add_special_tokens: bool = True, **fields_wanted: bool
    ) -> dict[str, Any]:
        """Return the ids of a text or of several."""
        texts = [text] if isinstance(text, str) else text
        found = [one.ids for one in self.backend_tokenizer.encode_batch(texts, add_special_tokens=add_special_tokens)]
        return {"input_ids": found[0] if isinstance(text, str) else found}

    def get_chat_template(self, *, tools: list[Any] | None = None) -> str:
        """Return the chat template; of several that for tools, where some are given and there is one. Raises ValueError
        where there is none."""
        templates = self.chat_template
        if templates is None:
            raise ValueError("there is no chat template")
        if isinstance(templates, str):
            return templates
        return templates["tool_use" if tools is not None and "tool_use" in templates else "default"]

    def decode(self, ids: list[int], *, skip_special_tokens: bool, clean_up_tokenization_spaces: bool) -> str:
        """Return the text of ids, without cleaning up spaces."""
        assert not clean_up_tokenization_spaces
        return str(self.backend_tokenizer.decode(ids, skip_special_tokens=skip_special_tokens))


def store(tokenizer: Any) -> dict[str, Any] | None:
    """Write the backend of a transformers tokenizer to the cache folder. Return the facts that `stored` needs; None
    where the tokenizer does more than its backend, or cannot be written."""
    from transformers import PreTrainedTokenizerFast

    if not isinstance(tokenizer, PreTrainedTokenizerFast) or tokenizer.split_special_tokens:
        return None
    if any(getattr(type(tokenizer), name) is not getattr(PreTrainedTokenizerFast, name) for name in METHODS):
        return None
    template = tokenizer.chat_template or None
    if isinstance(template, dict) and "default" not in template:
        return None
    response = getattr(tokenizer, "response_template", None)
    if not isinstance(response, dict | None):
        return None
    backend = tokenizer.backend_tokenizer
    backend.no_padding()
    backend.no_truncation()
    content = str(backend.to_str()).encode()
    digest = hashlib.sha256(content).hexdigest()
    try:
        place = _path(digest)
        if not place.is_file() or place.read_bytes() != content:
            write_whole(place, content)
    except OSError:
        return None
    return {
        "backend": digest,
        "special_tokens_map": {name: _plain(value) for name, value in tokenizer.special_tokens_map.items()},
        "all_special_ids": [*tokenizer.all_special_ids],
        "eos_token_id": tokenizer.eos_token_id,
        "chat_template": template,
        "response_template": response,
    }


def stored(facts: Mapping[str, Any], load: Callable[[], Any]) -> StoredTokenizer | None:
    """Return a tokenizer that `store` has written; None where its file is missing or has changed. load: loads
    transformers' tokenizer."""
    from tokenizers import Tokenizer

    with suppress(OSError):
        content = _path(facts["backend"]).read_bytes()
        if hashlib.sha256(content).hexdigest() == facts["backend"]:
            return StoredTokenizer(Tokenizer.from_buffer(content), facts, load)
    return None


def _plain(value: object) -> str | list[str]:
    return [*map(str, value)] if isinstance(value, list) else str(value)


def _path(digest: str) -> Path:
    return cache_folder() / "tokenizers" / f"{digest}.json"
