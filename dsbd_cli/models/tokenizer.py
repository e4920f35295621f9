"""A transformers tokenizer as a TextCodec. Only this module knows chat templates and the bytes behind tokens."""

from __future__ import annotations

import hashlib
import json
import logging
import re
from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol

from dsbd_cli.answer_forms import AnswerForm, form_of
from dsbd_cli.config.chat import NO_CHAT, ChatConfig
from dsbd_cli.errors import InvalidRowError, one_line
from dsbd_cli.models.chat import ChatTemplate
from dsbd_cli.models.response_template import template_reader
from dsbd_cli.models.stored_tokenizer import StoredTokenizer

_logger = logging.getLogger(__name__)

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_SPACE_MARK = "\u2581"
IDS_ALONE = {"return_attention_mask": False, "return_token_type_ids": False}  # takes half the time on a long text
# steps of a tokenizer that drop no byte of a text; NFC shortens one to a quarter at most, a Kelvin sign to a third
KEEPING = {"Prepend", "Replace", "ByteLevel", "Metaspace", "Split", "Digits", "NFC"}
NFC_SHRINKS = 4
MOST_BYTES = 256  # of text per token, on average; a tokenizer's own bound may be as large as its longest run of spaces
UTF8_BYTES = [byte for byte in range(256) if byte not in (0xC0, 0xC1) and byte < 0xF5]


def byte_alphabet() -> dict[str, int]:
    """Return the characters that stand for bytes in byte-level vocabularies (GPT-2's table): character -> byte."""
    shown = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [byte for byte in range(256) if byte not in set(shown)]
    return {chr(byte): byte for byte in shown} | {chr(256 + rank): byte for rank, byte in enumerate(hidden)}


class AddedToken(Protocol):
    """A token outside the trained vocabulary."""

    content: str
    special: bool


class Tokenizer(Protocol):
    """The part of a transformers tokenizer that is used here."""

    @property
    def all_special_ids(self) -> list[int]: ...

    @property
    def added_tokens_decoder(self) -> Mapping[int, AddedToken]: ...

    def get_vocab(self) -> dict[str, int]: ...

    def convert_ids_to_tokens(self, ids: int) -> str: ...

    def __call__(
        self, text: str | list[str], *, add_special_tokens: bool = True, **fields_wanted: bool
    ) -> Mapping[str, Any]: ...

    @property
    def special_tokens_map(self) -> Mapping[str, Any]: ...

    def get_chat_template(self, *, tools: list[Any] | None = None) -> str: ...

    def decode(self, ids: list[int], *, skip_special_tokens: bool, clean_up_tokenization_spaces: bool) -> str: ...


class HFCodec:
    """Text to ids and back through one tokenizer."""

    def __init__(self, tokenizer: Tokenizer, eos_ids: tuple[int, ...], table: list[bytes] | None = None) -> None:
        """eos_ids: tokens that end a sequence. table: what `bytes_of_tokens` gives for the tokenizer, where it is
        known."""
        self._tokenizer = tokenizer
        self._original: Any = None
        self._eos_ids = eos_ids
        self._bytes = table
        self._all_bytes: list[bytes] | None = None  # with those of special tokens
        self._shown_bytes: list[bytes] | None = None  # with those of marks
        self._cover: _Cover | None = None
        self._chat = ChatTemplate(tokenizer)
        self._bos: tuple[str, int] | None = None  # set at the first plain prompt, see `_bos_token`
        self._told_bos = False

    @property
    def tokenizer(self) -> Any:
        """The transformers tokenizer, for code that hands it on. Where a stored tokenizer serves, it is loaded at its
        first use."""
        if self._original is None:
            made = self._tokenizer
            self._original = made.original() if isinstance(made, StoredTokenizer) else made
        return self._original

    @property
    def vocabulary(self) -> dict[str, int]:
        """Tokens with their ids, added ones included."""
        return self._tokenizer.get_vocab()

    @property
    def added_tokens(self) -> Mapping[int, AddedToken]:
        """Tokens outside the trained vocabulary, by id."""
        return self._tokenizer.added_tokens_decoder

    @property
    def eos_ids(self) -> tuple[int, ...]:
        """Tokens that end a sequence."""
        return self._eos_ids

    @property
    def has_template(self) -> bool:
        """Whether there is a chat template."""
        return self._chat.exists

    def use_template(self, text: str | None, kwargs: Mapping[str, object] | None) -> None:
        """Render conversations with this template in place of the tokenizer's, where one is given, and with these
        variables beside those of each conversation."""
        self._chat = ChatTemplate(self._tokenizer, text, kwargs)
        for name in ("form", "_mark_ids"):  # another template may have other marks
            self.__dict__.pop(name, None)
        self._shown_bytes = None

    @property
    def fingerprint(self) -> str | None:
        """32 hexadecimal digits that two tokenizers share only if they tokenise alike; None for a slow tokenizer, which
        cannot be serialised."""
        backend = getattr(self._tokenizer, "backend_tokenizer", None)
        if backend is None:
            return None
        return hashlib.blake2b(backend.to_str().encode(), digest_size=16).hexdigest()

    def encode(self, prompt: str) -> list[int]:
        """Return the token ids of a plain prompt, with the special tokens that the tokenizer adds by itself. A prompt
        that begins with the text of the BOS token does not get a second one. Raises InvalidRowError where the tokenizer
        fails."""
        ids = self._ids(prompt, add_special_tokens=True)
        bos, token = self._bos_token
        if not bos or not prompt.startswith(bos) or ids[:2] != [token, token]:
            return ids
        if not self._told_bos:
            self._told_bos = True
            _logger.warning(
                "some prompts begin with %s, which the tokenizer puts before every text: they get no second one", bos
            )
        return ids[1:]

    @property
    def _bos_token(self) -> tuple[str, int]:
        """The token that the tokenizer puts before every text, where that is its BOS: text and id, else "" and -1."""
        if self._bos is None:
            bos = str(self._tokenizer.special_tokens_map.get("bos_token") or "")
            own = self._ids(bos, add_special_tokens=False) if bos else []
            begins = len(own) == 1 and self._ids("", add_special_tokens=True)[:1] == own
            self._bos = (bos, own[0]) if begins else ("", -1)
        return self._bos

    def least_tokens(self, text: str) -> int:
        """Return a lower bound of the tokens of a text; 0 where there is none. The tokenizer is not run, because it
        would take long on a long text."""
        return self._covering.least(text.encode("utf-8", "surrogatepass"))

    @property
    def bytes_per_token(self) -> int:
        """Most bytes of a text that one token covers: a bound of the tokenizer, or one that no natural text reaches."""
        return min(self._covering.longest or MOST_BYTES, MOST_BYTES)

    @property
    def _covering(self) -> _Cover:
        if self._cover is None:
            self._cover = _cover_of(self._tokenizer, self.token_bytes())
        return self._cover

    def encode_pieces(self, texts: list[str]) -> list[list[int]]:
        """Return the token ids of pieces of text, nothing added. Raises InvalidRowError where the tokenizer fails."""
        return [list(ids) for ids in self._encoded(texts, add_special_tokens=False)]

    def render_chat(self, messages: Sequence[Mapping[str, object]], chat: ChatConfig = NO_CHAT) -> str:
        """Return the text of a conversation, ready for the assistant's answer. Raises InvalidRowError where there is no
        chat template, or it refuses the conversation."""
        return self._chat.render(messages, chat)

    def encode_chat(self, messages: Sequence[Mapping[str, object]], chat: ChatConfig = NO_CHAT) -> list[int]:
        """Return the token ids of a conversation: those of its text, with nothing added. Raises InvalidRowError."""
        return self._ids(self.render_chat(messages, chat), add_special_tokens=False)

    def _ids(self, text: str, *, add_special_tokens: bool) -> list[int]:
        return list(self._encoded(text, add_special_tokens=add_special_tokens))

    def _encoded(self, text: str | list[str], *, add_special_tokens: bool) -> Any:
        """Return the token ids of a text, or of several texts. Raises InvalidRowError where the tokenizer fails."""
        try:
            return self._tokenizer(text, add_special_tokens=add_special_tokens, **IDS_ALONE)["input_ids"]
        except MemoryError:
            raise
        except BaseException as error:
            # the library tokenizers panics where a regular expression takes too long, and its panic is no Exception
            if isinstance(error, Exception) or type(error).__name__ == "PanicException":
                raise InvalidRowError(f"the tokenizer fails on this text: {one_line(error)}") from error
            raise

    @cached_property
    def form(self) -> AnswerForm:
        """Form of the checkpoint's answers, chosen from the chat template, the added tokens and the tokenizer's own
        response template."""
        tokenizer, special = self._tokenizer, _special_texts(self._tokenizer)
        added = {token.content: (index, index in special) for index, token in tokenizer.added_tokens_decoder.items()}
        response = getattr(tokenizer, "response_template", None)
        return form_of(self._chat.texts, added, response, None if response is None else template_reader(response))

    @cached_property
    def _mark_ids(self) -> frozenset[int]:
        """Special tokens that are marks of reasoning or of calls. They are text, so that a text can be read by them."""
        special = _special_texts(self._tokenizer)
        return frozenset(token for token in self.form.tokens.values() if token in special) - {*self._eos_ids}

    def decode(self, ids: list[int], *, skip_special_tokens: bool = True) -> str:
        """Return the text of generated ids, without special tokens or with them. Marks of reasoning and of calls are
        text."""
        if skip_special_tokens and not self._mark_ids.isdisjoint(ids):
            hidden = _special_texts(self._tokenizer).keys() - self._mark_ids
            ids, skip_special_tokens = [token for token in ids if token not in hidden], False
        named = {"skip_special_tokens": skip_special_tokens, "clean_up_tokenization_spaces": False}
        return self._tokenizer.decode(ids, **named)

    def tokenizer_json(self) -> str | None:
        """Return the tokenizer as the library tokenizers serialises it, without padding and truncation; None for a slow
        one."""
        backend = getattr(self._tokenizer, "backend_tokenizer", None)
        if backend is None:
            return None
        plain = copy(backend)
        plain.no_padding()
        plain.no_truncation()
        return str(plain.to_str())

    def token_bytes(self, *, skip_special_tokens: bool = True) -> list[bytes]:
        """Return for every id of the tokenizer the bytes that it adds in mid-sentence; b"" for unused ids, and for
        special tokens where they are left out. Marks of reasoning and of calls have bytes.

        Lists are made once and kept: do not change them. Model logits may be wider than a list (padding ids).
        """
        if self._bytes is None:
            self._bytes = bytes_of_tokens(self._tokenizer)
        if skip_special_tokens and not self._mark_ids:
            return self._bytes
        if skip_special_tokens:
            if self._shown_bytes is None:
                marks = {token: text.encode() for text, token in self.form.tokens.items() if token in self._mark_ids}
                self._shown_bytes = [marks.get(token, piece) for token, piece in enumerate(self._bytes)]
            return self._shown_bytes
        if self._all_bytes is None:
            texts = _special_texts(self._tokenizer)
            self._all_bytes = [
                texts[token].encode() if token in texts else piece for token, piece in enumerate(self._bytes)
            ]
        return self._all_bytes


class AheadCodec(HFCodec):
    """HFCodec that tokenizes the plain prompts to come together, which takes less time than one by one."""

    _ahead: Mapping[str, list[int]] = {}

    def read_ahead(self, prompts: list[str]) -> dict[str, list[int]]:
        """Tokenize prompts and return their ids, those of a prompt that is its own text. Prompts that the tokenizer
        fails on are left to `encode`."""
        try:
            ids = self._encoded(prompts, add_special_tokens=True) if prompts else []
        except InvalidRowError:
            ids = []
        self._ahead = encoded = dict(zip(prompts, ids, strict=False))
        return encoded

    def _ids(self, text: str, *, add_special_tokens: bool) -> list[int]:
        if add_special_tokens and text in self._ahead:
            return list(self._ahead[text])
        return super()._ids(text, add_special_tokens=add_special_tokens)


def bytes_of_tokens(tokenizer: Tokenizer) -> list[bytes]:
    """Return the bytes of every token, as HFCodec.token_bytes does."""
    vocabulary = tokenizer.get_vocab()
    table = [b""] * (max(vocabulary.values(), default=-1) + 1)
    added, special = tokenizer.added_tokens_decoder, _special_texts(tokenizer)
    style = _style(tokenizer, vocabulary)
    alphabet, shown = byte_alphabet(), tokenizer.convert_ids_to_tokens
    letters = frozenset(alphabet)
    for token, index in vocabulary.items():
        if index in special:
            continue
        if index in added:
            # a normalized added token is kept, and decoded, in its normalized form
            table[index] = _marked(shown(index)) if style == "marked" else added[index].content.encode()
        elif style == "byte-level" and letters.issuperset(token):
            table[index] = bytes(map(alphabet.__getitem__, token))
        elif style == "marked":
            table[index] = _marked(token)
        elif style == "bytes":
            table[index] = bytes([ord(token)])
        elif style == "wordpiece":
            table[index] = token[2:].encode() if token.startswith("##") else b" " + token.encode()
        else:
            table[index] = token.encode()
    return table


def _special_texts(tokenizer: Tokenizer) -> dict[int, str]:
    """Return the special tokens by their ids, as they stand in a text."""
    added = tokenizer.added_tokens_decoder
    special = set(tokenizer.all_special_ids) | {index for index, token in added.items() if token.special}
    return {
        index: added[index].content if index in added else tokenizer.convert_ids_to_tokens(index) for index in special
    }


@dataclass(frozen=True, slots=True)
class _Cover:
    """Bounds on how many bytes of a text its tokens cover.

    Attributes:
        longest: most bytes that one token covers; 0 where there is no bound.
        dropped: bytes that no token stands for, so that the tokenizer may leave them out.
    """

    longest: int = 0
    dropped: bytes = b""

    def least(self, text: bytes) -> int:
        """Return a lower bound of the tokens of a text; 0 where there is none."""
        return -(-len(text.translate(None, self.dropped)) // self.longest) if self.longest else 0


def _cover_of(tokenizer: Tokenizer, table: list[bytes]) -> _Cover:
    """Return bounds for a tokenizer where every byte of a text ends up in a token, or is one that the vocabulary lacks;
    no bounds for others.

    This holds for byte-level BPE, some of whose vocabularies lack bytes that were not in their training text, and for
    byte fallback. A normalizer may shorten a text (NFC to a quarter), an unknown token may stand for any length, and a
    special token may take the spaces next to it.
    """
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        return _Cover()
    steps = [*_steps(_part(backend.normalizer)), *_steps(_part(backend.pre_tokenizer))]
    keeps = all(step.get("type") in KEEPING and step.get("behavior") != "Removed" for step in steps)
    replaced = [step for step in steps if step.get("type") == "Replace"]
    keeps = keeps and all(
        (step.get("pattern"), step.get("content")) == ({"String": " "}, _SPACE_MARK) for step in replaced
    )
    by_bytes = any(step.get("type") == "ByteLevel" for step in steps)
    added = tokenizer.added_tokens_decoder.values()
    greedy = any(getattr(token, "lstrip", False) or getattr(token, "rstrip", False) for token in added)
    held = set(table)
    dropped = bytes(byte for byte in UTF8_BYTES if bytes([byte]) not in held)
    whole = by_bytes or (_falls_back(backend.model) and not dropped)
    shrinks = any(step.get("type") == "NFC" for step in steps)
    if not (keeps and whole) or greedy or (shrinks and dropped):  # NFC may make bytes that are then dropped
        return _Cover()
    longest = max((*map(len, table), *(len(token.content.encode()) for token in added)), default=0)
    return _Cover(longest * NFC_SHRINKS if shrinks else longest, dropped)


def _falls_back(model: Any) -> bool:
    """Return whether a tokenizer's model writes text that it has no tokens for as bytes."""
    if hasattr(model, "byte_fallback"):
        return bool(model.byte_fallback)
    return bool(json.loads(model.__getstate__()).get("byte_fallback"))  # a Unigram model, which shows it nowhere else


def _part(part: Any) -> object:
    """Return one part of a tokenizer as the library tokenizers serialises it. Serialising the whole would take longer,
    mostly for the vocabulary."""
    return None if part is None else json.loads(part.__getstate__())


def _steps(part: object) -> list[dict[str, Any]]:
    """Return the steps of a serialised normalizer or pre-tokenizer, which is none, one, or a sequence of several."""
    if not isinstance(part, dict):
        return []
    inner = part.get("normalizers") or part.get("pretokenizers")
    return [part] if inner is None else [step for inner_step in inner for step in _steps(inner_step)]


def _marked(token: str) -> bytes:
    """Return the bytes of a sentencepiece-style token: a mark is a space, <0xAB> is one byte."""
    byte = _BYTE_TOKEN.fullmatch(token)
    return bytes([int(byte.group(1), 16)]) if byte else token.replace(_SPACE_MARK, " ").encode()


def _style(tokenizer: Tokenizer, vocabulary: dict[str, int]) -> str:
    """Return how tokens stand for text, read from the decoder of a fast tokenizer, or else from the form of the
    vocabulary."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is not None:
        kinds = _decoder_kinds(_part(backend.decoder))
        if "ByteLevel" in kinds:
            return "byte-level"
        if kinds & {"Metaspace", "ByteFallback", "Replace"}:
            return "marked"
        if "WordPiece" in kinds:
            return "wordpiece"
    elif type(tokenizer).__name__ == "ByT5Tokenizer":
        return "bytes"  # the character of a token is a byte of the text
    if any(token.startswith(_SPACE_MARK) for token in vocabulary):
        return "marked"
    return "byte-level" if any(token.startswith("\u0120") for token in vocabulary) else "plain"


def _decoder_kinds(decoder: object) -> set[str]:
    """Return the types in a serialised decoder, which is one or a sequence of several."""
    if not isinstance(decoder, dict):
        return set()
    inner = decoder.get("decoders") or []
    return {str(decoder.get("type"))}.union(*(_decoder_kinds(part) for part in inner))
