"""Encoding of requests to token ids, and all checks of whether a request can be decoded."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import takewhile

from torch import Tensor

from dsbd_cli.config.method import MethodConfig, check_request
from dsbd_cli.config.model import OnTooLong
from dsbd_cli.engine.constraints.answers import MOST_LETTERS, Catalogue, CatalogueAnswer, CatalogueCompiler
from dsbd_cli.engine.constraints.grammar import GrammarCompiler
from dsbd_cli.engine.decoding.row_rules import RowRules
from dsbd_cli.engine.iteration.request_state import RequestState
from dsbd_cli.engine.planning.memory_limit import least_bytes
from dsbd_cli.engine.planning.planner import deepest
from dsbd_cli.engine.protocols import EncoderDecoderCodec, EncoderDecoderModel, ForestModel, SizedCodec, TextCodec
from dsbd_cli.errors import (
    InvalidRowError,
    OutOfMemoryRowError,
    PromptTooLongError,
    UsageError,
    is_utf8,
    shorten,
    shown_names,
)
from dsbd_cli.requests import Request


class Encoder:
    """Encoder and checker of requests, and what they are checked against."""

    def __init__(
        self,
        target: ForestModel,
        draft: ForestModel | None,
        codec: TextCodec,
        method: MethodConfig,
        on_too_long: OnTooLong,
        memory: int,
        catalogues: Mapping[str, Catalogue],
        grammars: GrammarCompiler,
    ) -> None:
        """memory: all bytes of the target's device."""
        self.target, self.draft, self.codec, self.method = target, draft, codec, method
        self.on_too_long, self.memory, self.catalogues, self.grammars = on_too_long, memory, catalogues, grammars
        self._rules = RowRules(target, codec)
        # found once, because isinstance with a protocol reads every property
        self.encoder_inputs = codec if isinstance(codec, EncoderDecoderCodec) else None
        self.sized = codec if isinstance(codec, SizedCodec) else None
        roles = ((target, "target"), (draft, "draft"))
        self.readers = [(model, role) for model, role in roles if isinstance(model, EncoderDecoderModel)]

    @classmethod
    def alone(
        cls, target: ForestModel, codec: TextCodec, method: MethodConfig, draft: ForestModel | None = None
    ) -> Encoder:
        """Return an encoder without catalogues and bounds of memory. draft: prompts must fit its positions, too."""
        grammars = GrammarCompiler(codec, target.vocab_size)
        return cls(target, draft, codec, method, "error", sys.maxsize, {}, grammars)

    def catalogue(self, request: Request) -> Catalogue | None:
        """Return the answers that a request may give, None for any. Raises InvalidRowError."""
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
            if (letters := sum(map(len, allow))) > MOST_LETTERS:
                raise InvalidRowError(f"allow has {letters} letters in all, but a row's allow may have {MOST_LETTERS}")
            answers = [CatalogueAnswer(f"allow[{place}]", text=text) for place, text in enumerate(allow)]
            try:
                return CatalogueCompiler(self.codec, self.target.vocab_size).compile(answers)
            except UsageError as error:
                raise InvalidRowError(str(error)) from None
        if allow is None and not self.catalogues:
            return None
        if (allow or "") in self.catalogues:
            return self.catalogues[allow or ""]
        names = shown_names(sorted(filter(None, self.catalogues)))
        if allow is None:
            raise InvalidRowError(f"allow is not given, but the catalogues have names: give one of {names}")
        known = f"the catalogues are {names}" if names else "no catalogue has a name"
        raise InvalidRowError(f"allow is {shorten(allow)}, but {known}")

    def job(self, number: int, request: Request) -> RequestState:
        """Return the state of a request that can be decoded. Raises RowError where it cannot be."""
        for name, text in _texts(request):
            if not is_utf8(text):
                raise InvalidRowError(f"{name} is {shorten(text)}, which is no valid text: half a surrogate pair")
        job = RequestState(number, request, [], catalogue=self.catalogue(request))
        if self.encoder_inputs is not None:
            self._read_encoder_input(job, self.encoder_inputs)
        else:
            self._refuse_encoder_settings(request)
            job.prompt, job.truncated = self.encode(request, job.max_new)
            job.rules = self._rules.of(request.sampling, "none", job.prompt)
        if job.rules.renormalize_logits and (job.catalogue is not None or request.grammar is not None):
            bound = "allow" if job.catalogue is not None else "grammar"
            raise InvalidRowError(
                f"token_rules: renormalize_logits is 1, which does not go with {bound}: switch it off with "
                "renormalize_logits=none"
            )
        job.started = time.perf_counter()
        return job

    def _read_encoder_input(self, job: RequestState, codec: EncoderDecoderCodec) -> None:
        """Fill the state of a request to a model with an encoder. The lengths of source and answer are checked
        separately."""
        request = job.request
        is_image = request.image is not None  # a prompt is then the decoder's, which is never cut
        limit, role = self._limit() if is_image else self._encoder_limit()
        most = self._most_characters(request, limit, f"{role}'s {'decoder' if is_image else 'encoder'} takes {limit}")
        cut = most is not None and request.prompt is not None and not is_image
        if (letters := len(request.sampling.prefix or "")) > MOST_LETTERS:
            raise InvalidRowError(f"prefix has {letters} letters, but it may have {MOST_LETTERS}")
        self._check_source_ids(request.prompt_ids or ())  # first, because a tensor holds no larger ones
        asked = codec.encoder_input(replace(request, prompt=(request.prompt or "")[-(most or 0) :]) if cut else request)
        encoder_input, prompt, dropped = asked.encoder_input, asked.prompt, 0
        self._check(request, prompt)
        if not encoder_input.is_floating_point():
            if not len(encoder_input):
                raise InvalidRowError("prompt is empty: there is nothing for the encoder to read")
            self._check_source_ids(encoder_input.tolist())
            encoder_input, dropped = self._fit_encoder_input(encoder_input, codec)
            dropped = self._dropped(request, len(encoder_input), dropped) if cut else dropped
        self._check_memory(job.max_new)
        new, (limit, role) = job.max_new, self._limit()
        if limit is not None and len(prompt) + new > limit:
            raise PromptTooLongError(
                f"the answer's first {len(prompt)} tokens and max_new_tokens {new} make {len(prompt) + new}, but the "
                f"{role}'s decoder has {limit} positions"
            )
        job.prompt, job.truncated, job.encoder_input, job.prefix = prompt, dropped, encoder_input, asked.prefix
        job.listen = asked.listen
        job.source_tokens = self.readers[0][0].encoder_places(encoder_input) if is_image else encoder_input.shape[-1]
        job.rules = self._rules.of(request.sampling, "checkpoint", prompt, asked.forced)
        forced = job.rules.forced_bos_token_id
        if forced is not None and len(prompt) == 1 and (job.catalogue is not None or request.grammar is not None):
            given = "allow" if job.catalogue is not None else "grammar"
            raise InvalidRowError(
                f"{given} says how an answer begins, but so does token_rules (forced_bos_token_id {forced}): switch it "
                "off with forced_bos_token_id=none"
            )

    def _check_source_ids(self, ids: Sequence[int]) -> None:
        """Raise InvalidRowError for an id that some encoder does not have. Encoders of speech and pictures have
        none."""
        for model, role in self.readers:
            foreign = [token for token in ids if not 0 <= token < model.encoder_vocab_size]
            if foreign and model.encoder_vocab_size:
                why = f"the {role}'s encoder has {model.encoder_vocab_size} ids"
                raise InvalidRowError(f"prompt holds token id {foreign[0]}, but {why}")

    def _encoder_limit(self) -> tuple[int | None, str]:
        """Return the smallest number of source tokens that an encoder takes, and the role of its model. The number is
        None where there is no limit."""
        return _smallest((model.max_encoder_input, role) for model, role in self.readers)

    def _fit_encoder_input(self, encoder_input: Tensor, codec: EncoderDecoderCodec) -> tuple[Tensor, int]:
        """Return the source, cut to what both encoders take, and how many tokens were dropped. Raises
        PromptTooLongError."""
        limit, role = self._encoder_limit()
        if limit is None or len(encoder_input) <= limit:
            return encoder_input, 0
        if self.on_too_long == "truncate-left" and (kept := codec.cut(encoder_input, limit)) is not None:
            return kept, len(encoder_input) - len(kept)
        raise PromptTooLongError(f"the source has {len(encoder_input)} tokens, but the {role}'s encoder takes {limit}")

    def _refuse_encoder_settings(self, request: Request) -> None:
        """Raise InvalidRowError for settings that only a target with an encoder can use."""
        request.check_source("text")
        for name in ("source_lang", "target_lang", "prefix"):
            if (value := getattr(request.sampling, name)) is not None:
                raise InvalidRowError(f"{name} is {shorten(value)}, but the target has no encoder: drop it")

    def encode(self, request: Request, new: int | None = None) -> tuple[list[int], int]:
        """Return the token ids of the prompt, and how many were dropped. Raises RowError where it cannot be decoded.
        new: most tokens that it can generate, by default as the request says."""
        new = request.sampling.max_new_tokens if new is None else new
        limit, role = self._limit()
        most = self._most_characters(request, limit, f"{role} has {limit} positions", new)
        cut = () if most is None else (most,)  # not every codec cuts
        if request.prompt_ids is not None:
            ids = list(request.prompt_ids)
        elif request.messages is not None:
            ids = self.codec.encode_chat([dict(message) for message in request.messages], *cut)
        else:
            ids = self.codec.encode(request.prompt or "", *cut)
        self._check(request, ids)
        self._check_memory(new)
        kept, dropped = self._fit(ids, new)
        return kept, self._dropped(request, len(kept), dropped) if cut else dropped

    def _dropped(self, request: Request, kept: int, dropped: int) -> int:
        """Return the least number of tokens that a prompt has lost, where only its last characters were tokenized."""
        assert self.sized is not None
        return max(1, dropped, self.sized.least_tokens(_prompt_or_messages(request)) - kept)

    def _check_memory(self, steps: int) -> None:
        """Raise OutOfMemoryRowError where an iteration as deep as the request allows does not fit into memory."""
        method = self.method
        nodes = deepest(method, steps).nodes(method.num_beams)
        if least_bytes(nodes, self.target.vocab_size) > self.memory:
            raise OutOfMemoryRowError(
                f"depth is {method.depth} and max_new_tokens {steps}: {nodes} nodes in an iteration do not fit into "
                f"{self.memory / 2**30:.1f} GiB: lower depth or drafts_per_layer"
            )

    def _check(self, request: Request, ids: list[int]) -> None:
        """Raise RowError where a request cannot be decoded because of its prompt, stop strings, grammar or sampling
        settings."""
        if not ids:
            raise InvalidRowError("prompt is empty: there is no token to start from")
        if foreign := [token for token in ids if not 0 <= token < self.target.vocab_size]:
            raise InvalidRowError(
                f"prompt holds token id {foreign[0]}, but the target has {self.target.vocab_size} ids"
            )
        if request.grammar is not None:
            try:
                self.grammars.start(request.grammar)
            except UsageError as error:
                raise InvalidRowError(f"grammar cannot be used: {error}") from None
        try:
            check_request(request.sampling, self.method.rule, self.method.num_beams)
        except UsageError as error:
            raise InvalidRowError(str(error)) from error

    def _limit(self) -> tuple[int | None, str]:
        """Return the smallest number of positions of the models, and the role of its model. The number is None where
        there is no limit."""
        draft_limit = None if self.draft is None else self.draft.max_positions
        return _smallest(((self.target.max_positions, "target"), (draft_limit, "draft")))

    def _most_characters(self, request: Request, limit: int | None, limit_text: str, new: int = 0) -> int | None:
        """Return how many of its last characters are enough of a text that is cut on its left; None: all. A text whose
        bytes alone prove it too long is refused, because megabytes of text take seconds, and gigabytes of memory, to
        tokenize. limit: tokens that fit. limit_text: whose limit that is, for messages. new: tokens of the limit that
        are to be generated. Raises PromptTooLongError."""
        codec = self.sized
        if limit is None or codec is None or (request.prompt is None and request.messages is None):
            return None
        asked = _prompt_or_messages(request)
        size, most = codec.size(asked), limit * codec.bytes_per_token
        if self.on_too_long == "truncate-left":
            return most if size > most else None
        generated = f" and max_new_tokens is {new}" if new else ""
        least = codec.least_tokens(asked)
        if least + new > limit:
            raise PromptTooLongError(f"prompt has {least} tokens or more{generated}, but the {limit_text}")
        if size > most:
            raise PromptTooLongError(
                f"prompt has {size} bytes, more than {codec.bytes_per_token} for each token that fits: the {limit_text}"
            )
        return None

    def _fit(self, ids: list[int], new: int) -> tuple[list[int], int]:
        """Return the prompt, cut to the models' positions, and how many tokens were dropped. Raises
        PromptTooLongError."""
        limit, role = self._limit()
        if limit is None or len(ids) + new <= limit:
            return ids, 0
        if self.on_too_long == "truncate-left" and (kept := self._cut(ids, limit - new)):
            return kept, len(ids) - len(kept)
        raise PromptTooLongError(
            f"prompt has {len(ids)} tokens and max_new_tokens is {new}, but the {role} has {limit} positions"
        )

    def _cut(self, ids: list[int], room: int) -> list[int]:
        """Return the last ids that fit into `room` tokens, behind the tokens that the tokenizer begins every text with;
        an empty list where none fit."""
        same = takewhile(lambda pair: pair[0] == pair[1], zip(ids, self.codec.encode(""), strict=False))
        begin = len(list(same))
        return ids[:begin] + ids[len(ids) - room + begin :] if room > begin else []


def _smallest(limits: Iterable[tuple[int | None, str]]) -> tuple[int | None, str]:
    """Return the smallest limit and the role of its model; (None, "") where there is no limit."""
    known = ((limit, role) for limit, role in limits if limit is not None)
    return min(known, key=lambda pair: pair[0], default=(None, ""))


def _texts(request: Request) -> Iterator[tuple[str, str]]:
    """Yield the names and values of a request's texts, apart from its grammar."""
    if request.prompt is not None:
        yield "prompt", request.prompt
    for message in request.messages or ():
        for name, value in message.items():
            yield f"{name} of a message", value
    if isinstance(request.allow, tuple):
        yield from (("allow", text) for text in request.allow)
    for name, texts in (("stop", request.sampling.stop), ("bad_words", request.sampling.bad_words)):
        yield from ((name, text) for text in texts)
    for name in ("prefix", "source_lang", "target_lang"):
        if (text := getattr(request.sampling, name)) is not None:
            yield name, text


def _prompt_or_messages(request: Request) -> str | list[dict[str, str]]:
    """Return the text of a prompt, or a conversation."""
    return request.prompt or "" if request.messages is None else [dict(one) for one in request.messages]
