"""Requests to token ids, and everything that makes one request impossible to decode."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import takewhile

from dsbd_cli.config import MethodConfig, OnTooLong, check_request
from dsbd_cli.engine.core.grammar import GrammarCompiler
from dsbd_cli.engine.core.protocols import ForestModel, TextCodec
from dsbd_cli.engine.decoding.answers import Answer, Catalogue, Compiler
from dsbd_cli.engine.decoding.budget import least_bytes
from dsbd_cli.engine.decoding.planner import deepest
from dsbd_cli.errors import InvalidRowError, OutOfMemoryRowError, PromptTooLongError, UsageError, shorten
from dsbd_cli.requests import Request

__all__ = ["Encoder"]


@dataclass(frozen=True, slots=True)
class Encoder:
    """What requests are checked against. memory: all bytes of the target's device."""

    target: ForestModel
    draft: ForestModel | None
    codec: TextCodec
    method: MethodConfig
    on_too_long: OnTooLong
    memory: int
    catalogues: Mapping[str, Catalogue]
    grammars: GrammarCompiler

    def catalogue(self, request: Request) -> Catalogue | None:
        """The answers that a request may give, None for any. Raises InvalidRowError."""
        if request.grammar is not None and self.catalogues:
            raise InvalidRowError("grammar is given, but the engine has catalogues of allowed answers: drop one")
        if request.grammar is not None:
            return None
        catalogue, sampling = self._catalogue(request.allow), request.sampling
        if catalogue is None:
            return None
        if sampling.stop:
            given = shorten(list(sampling.stop))
            raise InvalidRowError(f"stop is {given}, but allow says where an answer ends: drop it")
        if sampling.max_new_tokens < catalogue.trie.longest:
            raise InvalidRowError(
                f"max_new_tokens is {sampling.max_new_tokens}, but the longest allowed answer has "
                f"{catalogue.trie.longest} tokens with its end token: raise it"
            )
        return catalogue

    def _catalogue(self, allow: str | tuple[str, ...] | None) -> Catalogue | None:
        if isinstance(allow, tuple):
            answers = [Answer(f"allow[{place}]", text=text) for place, text in enumerate(allow)]
            try:
                return Compiler(self.codec, self.target.vocab_size).compile(answers)
            except UsageError as error:
                raise InvalidRowError(str(error)) from None
        if allow is None and not self.catalogues:
            return None
        if (allow or "") in self.catalogues:
            return self.catalogues[allow or ""]
        names = ", ".join(sorted(filter(None, self.catalogues)))
        if allow is None:
            raise InvalidRowError(f"allow is not given, but the catalogues have names: give one of {shorten(names)}")
        known = f"the catalogues are {names}" if names else "no catalogue has a name"
        raise InvalidRowError(f"allow is {shorten(allow)}, but {known}")

    def encode(self, request: Request, new: int | None = None) -> tuple[list[int], int]:
        """Token ids of the prompt, and how many were dropped. Raises RowError where it cannot be decoded. new: tokens
        that it can generate at most, by default as the request says."""
        new = request.sampling.max_new_tokens if new is None else new
        self._check_length(request, new)
        if request.prompt_ids is not None:
            ids = list(request.prompt_ids)
        elif request.messages is not None:
            ids = self.codec.encode_chat([dict(message) for message in request.messages])
        else:
            ids = self.codec.encode(request.prompt or "")
        self._check(request, ids)
        self._check_memory(new)
        return self._fit(ids, new)

    def _check_memory(self, steps: int) -> None:
        """An iteration as deep as the request lets it be fits into memory. Raises OutOfMemoryRowError."""
        method = self.method
        nodes = deepest(method, steps).nodes(method.num_beams)
        if least_bytes(nodes, self.target.vocab_size) > self.memory:
            raise OutOfMemoryRowError(
                f"depth is {method.depth} and max_new_tokens {steps}: {nodes} nodes in an iteration do not fit into "
                f"{self.memory / 2**30:.1f} GiB: lower depth or drafts_per_layer"
            )

    def _check(self, request: Request, ids: list[int]) -> None:
        """Everything that makes one request impossible to decode. Raises RowError."""
        if not ids:
            raise InvalidRowError("prompt is empty: there is no token to start from")
        if foreign := [token for token in ids if not 0 <= token < self.target.vocab_size]:
            raise InvalidRowError(
                f"prompt holds token id {foreign[0]}, but the target has {self.target.vocab_size} ids"
            )
        for stop in request.sampling.stop:
            if any("\ud800" <= letter <= "\udfff" for letter in stop):
                raise InvalidRowError(f"stop is {stop!r}, which is no valid text: it holds half a surrogate pair")
        if request.grammar is not None:
            try:
                self.grammars.start(request.grammar)
            except UsageError as error:
                raise InvalidRowError(f"grammar cannot be used: {error}") from None
        try:
            check_request(request.sampling, self.method.rule, self.method.num_beams)
        except UsageError as error:
            raise InvalidRowError(str(error)) from error

    def _limit(self) -> tuple[int, str] | None:
        """The fewest positions, and whose; None where there is no limit."""
        limits = [
            (model.max_positions, role)
            for role, model in (("target", self.target), ("draft", self.draft))
            if model is not None and model.max_positions is not None
        ]
        return min(limits, key=lambda pair: pair[0], default=None)

    def _check_length(self, request: Request, new: int) -> None:
        """Refuse a text whose bytes alone prove it too long: megabytes take seconds to tokenize. Where the left is cut,
        the tokens are needed."""
        limit, count = self._limit(), getattr(self.codec, "least_tokens", None)
        if limit is None or count is None or self.on_too_long != "error" or request.prompt_ids is not None:
            return
        asked = request.prompt or "" if request.messages is None else [dict(one) for one in request.messages]
        least = count(asked)
        if least + new > limit[0]:
            raise PromptTooLongError(
                f"prompt has {least} tokens or more and max_new_tokens is {new}, but the {limit[1]} has {limit[0]} "
                "positions"
            )

    def _fit(self, ids: list[int], new: int) -> tuple[list[int], int]:
        """The prompt as the models' positions allow it, and how many tokens were dropped. Raises PromptTooLongError."""
        limit, role = self._limit() or (len(ids) + new, "")
        if len(ids) + new <= limit:
            return ids, 0
        if self.on_too_long == "truncate-left" and (kept := self._cut(ids, limit - new)):
            return kept, len(ids) - len(kept)
        raise PromptTooLongError(
            f"prompt has {len(ids)} tokens and max_new_tokens is {new}, but the {role} has {limit} positions"
        )

    def _cut(self, ids: list[int], room: int) -> list[int]:
        """The last ids that fit into the room, after the tokens that the tokenizer begins every text with."""
        same = takewhile(lambda pair: pair[0] == pair[1], zip(ids, self.codec.encode(""), strict=False))
        begin = len(list(same))
        return ids[:begin] + ids[len(ids) - room + begin :] if room > begin else []
