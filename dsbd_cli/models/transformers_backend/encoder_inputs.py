"""Requests to an encoder-decoder model: a source for the encoder, and the tokens that its decoder begins with.

Tokenizers name languages in several ways. The tokenizer itself shows which one a checkpoint has; the name of its
architecture is not used.
"""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from dsbd_cli.config.sampling import SamplingConfig
from dsbd_cli.config.token_rules import Timestamps, asked_rules
from dsbd_cli.engine.protocols import EncoderRequest
from dsbd_cli.errors import InvalidRowError, shorten
from dsbd_cli.models.checkpoints.generation import checkpoint_rules
from dsbd_cli.models.tokenizer import HFCodec
from dsbd_cli.requests import Request, Segment, Source

MARKS = (">>{}<<", "<2{}>")  # how a language is marked before a source's text: Marian, MADLAD
MULTILINGUAL = ("m2m_100", "mbart")  # architectures that cannot do without a target language


class Seq2SeqCodec(HFCodec):
    """A codec that turns text into sources and answers into text, through one tokenizer."""

    reads: Source = "text"
    timestamps: Timestamps | None = None

    def __init__(self, tokenizer: Any, eos_ids: tuple[int, ...], start: int, model: Any) -> None:
        """start: the token that every answer begins with. model: the transformers model."""
        super().__init__(tokenizer, eos_ids)
        self._start = start
        self._required = model.config.model_type in MULTILINGUAL
        self._rules = checkpoint_rules(model)
        self._speaks = hasattr(tokenizer, "src_lang")  # the tokenizer knows languages itself
        codes: Any = getattr(tokenizer, "lang_code_to_id", None)  # M2M100 keeps them out of its vocabulary
        self._codes: Mapping[str, int] = codes if isinstance(codes, Mapping) else {}
        self._no_text: Container[int] = frozenset(self._codes.values())  # tokens that are no text

    def encoder_input(self, request: Request) -> EncoderRequest:
        """Return source, decoder prompt and forced token of a request, which has no messages. Raises
        InvalidRowError."""
        asked = request.sampling
        request.check_source(self.reads)
        forced, start = self.begin(asked)
        ids = list(request.prompt_ids) if request.prompt_ids is not None else self._encoder_ids(request)
        return self._joined(torch.tensor(ids, dtype=torch.int64), [start], forced, asked)

    def decode(self, ids: list[int], *, skip_special_tokens: bool = True) -> str:
        """Return the text of generated ids, without special tokens, languages and times; or with special tokens and
        languages."""
        kept = [token for token in ids if token not in self._no_text] if skip_special_tokens else ids
        return super().decode(kept, skip_special_tokens=skip_special_tokens)

    def segments(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> tuple[Segment, ...]:
        """Return no segment, because text has no times."""
        return ()

    def cut(self, encoder_input: Tensor, room: int) -> Tensor | None:
        """Return the last tokens of a source that fit into `room`, after those that every source begins with; None
        where none do."""
        empty = self.encode("")
        begin = 0
        while begin < min(len(empty), len(encoder_input)) and empty[begin] == int(encoder_input[begin]):
            begin += 1
        return (
            torch.cat((encoder_input[:begin], encoder_input[len(encoder_input) - room + begin :]))
            if room > begin
            else None
        )

    def _joined(
        self, encoder_input: Tensor, begin: list[int], forced: int | None, asked: SamplingConfig
    ) -> EncoderRequest:
        """Return the request with the prefix behind the decoder's first tokens. The forced token, if any, comes before
        the prefix: that of the language, else that of the request's token rules."""
        if asked.prefix is None:
            return EncoderRequest(encoder_input, begin, 0, forced)
        prefix = self.encode_pieces([asked.prefix])[0]
        if not prefix:
            raise InvalidRowError(f"prefix is {shorten(asked.prefix)}, which has no tokens: drop it")
        if forced is None and len(begin) == 1:
            forced = asked_rules(asked.token_rules, self._rules, default="checkpoint").forced_bos_token_id
        begin = begin if forced is None else [*begin, forced]
        return EncoderRequest(encoder_input, [*begin, *prefix], len(prefix), None)

    def _encoder_ids(self, request: Request) -> list[int]:
        asked, text = request.sampling, request.prompt or ""
        mark = self._mark(asked.target_lang)
        if mark is None and not self._speaks and asked.source_lang is not None:
            raise InvalidRowError(
                f"source_lang is {shorten(asked.source_lang)}, but the target's tokenizer knows no languages: drop it"
            )
        with self._speaking(asked.source_lang):
            text = text if mark is None else f"{mark} {text}"
            return self.encode(text) if asked.add_special_tokens else self.encode_pieces([text])[0]

    def _mark(self, language: str | None) -> str | None:
        """Return the mark of the target language before a text; None where the tokenizer has no such mark."""
        vocabulary = self._tokenizer.get_vocab() if language is not None and not self._speaks else {}
        return next((mark.format(language) for mark in MARKS if mark.format(language) in vocabulary), None)

    def begin(self, asked: SamplingConfig) -> tuple[int | None, int]:
        """Return the token forced behind the first one, None for that of the checkpoint, and the first one. Raises
        InvalidRowError."""
        language = asked.target_lang
        if language is None:
            forced = self._rules.forced_bos_token_id
            if self._required and self._speaks and forced is None and not self._is_language(self._start):
                raise InvalidRowError(
                    "target_lang is missing: the target translates into many languages: give the one that is wanted"
                )
            return None, self._start
        if not self._speaks:
            if self._mark(language) is None:
                raise InvalidRowError(
                    f"target_lang is {shorten(language)}, which the target's tokenizer does not know: drop it"
                )
            return None, self._start
        token = self._language("target_lang", language)
        return (None, token) if self._is_language(self._start) else (token, self._start)

    def _is_language(self, token: int) -> bool:
        added = self._tokenizer.added_tokens_decoder.get(token)
        special = getattr(self._tokenizer, "extra_special_tokens", None) or ()
        return added is not None and added.content in {str(word) for word in special}

    def _language(self, field: str, name: str) -> int:
        """Return the token of a language. Raises InvalidRowError."""
        vocabulary, added = self._tokenizer.get_vocab(), self._tokenizer.added_tokens_decoder
        if name in self._codes:
            return self._codes[name]
        token_ids = [vocabulary[word] for word in (name, f"__{name}__") if vocabulary.get(word) in added]
        if not token_ids:
            some = ", ".join(list(self._codes)[:3] or [item.content.strip("_") for item in list(added.values())[-3:]])
            raise InvalidRowError(
                f"{field} is {shorten(name)}, which the target's tokenizer does not know: it knows {some} and others"
            )
        return token_ids[0]

    @contextmanager
    def _speaking(self, language: str | None) -> Iterator[None]:
        """Let the tokenizer encode sources as texts of this language."""
        if language is None or not self._speaks:
            yield
            return
        self._language("source_lang", language)
        tokenizer: Any = self._tokenizer
        before = tokenizer.src_lang
        tokenizer.src_lang = language
        try:
            yield
        finally:
            tokenizer.src_lang = before
