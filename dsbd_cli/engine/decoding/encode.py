"""Encoding of requests to token ids, and all checks of whether a request can be decoded."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import takewhile

from torch import Tensor

from dsbd_cli.answer_forms import NO_FORM, WHITESPACE_BYTES, Reasoning
from dsbd_cli.config.chat import NO_CHAT
from dsbd_cli.config.grammars import Grammar
from dsbd_cli.config.method import MethodConfig, check_request
from dsbd_cli.config.model import OnTooLong
from dsbd_cli.engine.constraints.answers import MOST_LETTERS, Catalogue, CatalogueAnswer, CatalogueCompiler
from dsbd_cli.engine.constraints.grammar import GrammarCompiler
from dsbd_cli.engine.constraints.stops import StopSet
from dsbd_cli.engine.decoding.results import joined_bytes
from dsbd_cli.engine.decoding.row_rules import RowRules
from dsbd_cli.engine.iteration.request_state import RequestState
from dsbd_cli.engine.planning.memory_limit import least_bytes
from dsbd_cli.engine.planning.planner import deepest
from dsbd_cli.engine.protocols import (
    AnswerCodec,
    EncoderDecoderCodec,
    EncoderDecoderModel,
    ForestModel,
    SizedCodec,
    TextCodec,
)
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

BEGINNING = 256  # first characters of a text, encoded to find the tokens that begin every text
COUNTED = 1 << 16  # bytes of a text whose tokens are all counted, where a request asks for its last tokens
MOST_MARK = 64  # last tokens of a prompt, in which a mark of reasoning may stand


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
        tell: Callable[[str], None] = lambda line: None,
    ) -> None:
        """memory: all bytes of the target's device. tell: receives lines that the user should know."""
        self.target, self.draft, self.codec, self.method = target, draft, codec, method
        self.on_too_long, self.memory, self.catalogues, self.grammars = on_too_long, memory, catalogues, grammars
        self._rules = RowRules(target, codec)
        self.form = codec.form if isinstance(codec, AnswerCodec) else NO_FORM
        self._told = set[str]()
        self._tell = tell
        # found once, because isinstance with a protocol reads every property
        self.encoder_inputs = codec if isinstance(codec, EncoderDecoderCodec) else None
        self.sized = codec if isinstance(codec, SizedCodec) else None
        roles = ((target, "target"), (draft, "draft"))
        self.readers = [(model, role) for model, role in roles if isinstance(model, EncoderDecoderModel)]
        self._switch_position: int | None = getattr(target, "switch_position", None)  # of a SwitchingModel

    def tell(self, line: str) -> None:
        """Tell the user a line, once."""
        if line not in self._told:
            self._told.add(line)
            self._tell(line)

    @classmethod
    def alone(
        cls, target: ForestModel, codec: TextCodec, method: MethodConfig, draft: ForestModel | None = None
    ) -> Encoder:
        """Return an encoder without catalogues and bounds of memory. draft: prompts must fit its positions, too."""
        grammars = GrammarCompiler(codec, target.vocab_size)
        return cls(target, draft, codec, method, "error", sys.maxsize, {}, grammars)

    def catalogue(self, request: Request) -> Catalogue | None:
        """Return the answers that a request may give, None for any. Raises InvalidRowError."""
        demands = [f"tool_choice is {shorten(request.chat.tool_choice)}"] if request.chat.forces_call else []
        demands += ["grammar is given"] if request.grammar is not None else []
        if demands and self.catalogues:
            raise InvalidRowError(f"{demands[0]}, but the engine has catalogues of allowed answers: drop one")
        if demands:
            return None
        catalogue, sampling = self._catalogue(request.allow), request.sampling
        if catalogue is None:
            return None
        if sampling.stop:
            stops = shorten(list(sampling.stop))
            raise InvalidRowError(f"stop is {stops}, but allow says where an answer ends: drop it")
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
            answers = [CatalogueAnswer(f"allow[{number}]", text=text) for number, text in enumerate(allow)]
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
        available = f"the catalogues are {names}" if names else "no catalogue has a name"
        raise InvalidRowError(f"allow is {shorten(allow)}, but {available}")

    def job(self, number: int, request: Request) -> RequestState:
        """Return the state of a request that can be decoded. Raises RowError where it cannot be."""
        for name, text in _texts(request):
            if not is_utf8(text):
                raise InvalidRowError(f"{name} is {shorten(text)}, which is no valid text: half a surrogate pair")
        if (letters := len(request.sampling.prefix or "")) > MOST_LETTERS:
            raise InvalidRowError(f"prefix has {letters} letters, but it may have {MOST_LETTERS}")
        job = RequestState(number, request, [], catalogue=self.catalogue(request), grammar=self._grammar(request))
        job.ends = self._ends(request, job)
        if self.encoder_inputs is not None:
            self._read_encoder_input(job, self.encoder_inputs)
        else:
            self._refuse_encoder_settings(request)
            job.prompt, job.truncated = self.encode(request, job.max_new)
            job.prefix = min(self._prefix_tokens(request.sampling.prefix), len(job.prompt))
            job.rules = self._rules.of(request.sampling, "none", job.prompt)
        bound = _binding(job)
        if bound is not None and request.sampling.prefix is not None:
            raise InvalidRowError(
                f"prefix is {shorten(request.sampling.prefix)}, but {bound} says how the whole answer reads: drop one "
                "of them"
            )
        if bound is not None and job.rules.renormalize_logits:
            raise InvalidRowError(
                f"token_rules: renormalize_logits is 1, which does not go with {bound}: switch it off with "
                "renormalize_logits=none"
            )
        self._read_reasoning(job)
        job.started = time.perf_counter()
        return job

    def _read_encoder_input(self, job: RequestState, codec: EncoderDecoderCodec) -> None:
        """Fill the state of a request to a model with an encoder. The lengths of source and answer are checked
        separately."""
        request = self._as_prompt(job.request)
        asked, text = request.sampling, request.prompt or ""
        is_image = request.image is not None  # a prompt is then the decoder's, which is never cut
        if asked.truncate_prompt_tokens is not None and (is_image or request.audio is not None):
            reads = "an image" if is_image else "audio"
            raise InvalidRowError(
                f"truncate_prompt_tokens is {asked.truncate_prompt_tokens}, but the row gives {reads}, which is not "
                "cut: drop it"
            )
        limit, role = self.limit() if is_image else self._encoder_limit()
        limit_text = f"{role}'s {'decoder' if is_image else 'encoder'} takes {limit}"
        most = self._most_characters(text, limit, limit_text, asked.truncate_prompt_tokens)
        cut = most is not None and request.prompt is not None and not is_image
        self._check_source_ids(request.prompt_ids or ())  # first, because a tensor holds no larger ones
        encoded = codec.encoder_input(replace(request, prompt=text[-(most or 0) :]) if cut else request)
        encoder_input, prompt, dropped = encoded.encoder_input, encoded.prompt, 0
        self._check(request, prompt)
        if not encoder_input.is_floating_point():
            if not len(encoder_input):
                raise InvalidRowError("prompt is empty: there is nothing for the encoder to read")
            self._check_source_ids(encoder_input.tolist())
            encoder_input, dropped = self._fit_encoder_input(encoder_input, codec, asked.truncate_prompt_tokens)
            dropped = self._dropped(text, len(encoder_input), dropped) if cut else dropped
        self._check_memory(job.max_new)
        new, (limit, role) = job.max_new, self.limit()
        if limit is not None and len(prompt) + new > limit:
            raise PromptTooLongError(
                f"the answer's first {len(prompt)} tokens and max_new_tokens {new} make {len(prompt) + new}, but the "
                f"{role}'s decoder has {limit} positions"
            )
        job.prompt, job.truncated, job.encoder_input, job.prefix = prompt, dropped, encoder_input, encoded.prefix
        job.listen = encoded.listen
        job.source_tokens = self.readers[0][0].encoder_places(encoder_input) if is_image else encoder_input.shape[-1]
        job.rules = self._rules.of(request.sampling, "checkpoint", prompt, encoded.forced)
        if encoded.windows is not None:
            if (bound := _binding(job)) is not None:
                raise InvalidRowError(
                    f"{bound} says how the whole answer reads, but the audio is so long that it is read in windows: "
                    "drop one of them"
                )
            job.windows, job.rules = encoded.windows, job.rules.having("timestamps", True)
        forced = job.rules.forced_bos_token_id
        if forced is not None and len(prompt) == 1 and (job.catalogue is not None or job.grammar is not None):
            field = "allow" if job.catalogue is not None else "grammar"
            raise InvalidRowError(
                f"{field} says how an answer begins, but so does token_rules (forced_bos_token_id {forced}): switch it "
                "off with forced_bos_token_id=none"
            )

    def _grammar(self, request: Request) -> Grammar | None:
        """Return what the whole answer must match: its grammar, or that of the calls which tool_choice demands. Raises
        InvalidRowError."""
        try:
            grammar = request.grammar if not request.chat.forces_call else self.form.grammar(request.chat)
            if grammar is not None:
                self.grammars.start(grammar)
        except UsageError as error:
            message = str(error) if request.chat.forces_call else f"grammar cannot be used: {error}"
            raise InvalidRowError(message) from None
        return grammar

    def _read_reasoning(self, job: RequestState) -> None:
        """Note how the answers of a request are told from their reasoning. Raises InvalidRowError where the request
        asks for it and the target marks none."""
        asked, marks = job.request.sampling.reasoning, self.form.reasoning
        if marks is None or self.encoder_inputs is not None:
            if asked != "split":
                raise InvalidRowError(
                    f"reasoning is {asked}, but the target marks no reasoning in a known way: drop it"
                )
            return
        end = len(job.prompt) - job.prefix
        before = joined_bytes(job.prompt[max(0, end - MOST_MARK) : end], self.codec.token_bytes())
        opened = before.rstrip(WHITESPACE_BYTES).endswith(marks.begin.encode())
        if job.grammar is not None or job.catalogue is not None:
            if opened and marks.begin:
                self.tell(
                    f"a prompt ends with {marks.begin}, but a grammar, --allow or tool_choice says how the whole "
                    "answer reads: such rows answer without reasoning"
                )
            return
        if asked == "keep":
            return
        job.reasoning = Reasoning(marks, opened)
        if job.request.chat.continue_final_message and not opened:
            # the continued message may have begun its reasoning, or be the answer already
            last = (job.request.messages or ({},))[-1].get("content")
            job.reasoning = Reasoning(marks, False).after(last.encode() if isinstance(last, str) else b"")
        if job.ends.strings and job.reasoning is not None:
            prefix = (job.request.sampling.prefix or "").encode()
            job.ends = replace(job.ends, reasoning=job.reasoning.after(prefix))

    def _ends(self, request: Request, job: RequestState) -> StopSet:
        """Return what ends the text of a request. Raises InvalidRowError."""
        sampling, strings = request.sampling, tuple(request.sampling.stop)
        special = bool(strings) and not sampling.skip_special_tokens
        asked = {"eos_token_id": sampling.eos_token_id or (), "stop_token_ids": sampling.stop_token_ids}
        if not any(asked.values()) and not sampling.ignore_eos:
            return StopSet(strings, special=special)
        for name, ids in asked.items():
            if foreign := [token for token in ids if token >= self.target.vocab_size]:
                raise InvalidRowError(
                    f"{name} holds token id {foreign[0]}, but the target has {self.target.vocab_size} ids"
                )
        checkpoint = frozenset(token for token in self.codec.eos_ids if token < self.target.vocab_size)
        ends = frozenset(asked["eos_token_id"]) or checkpoint
        ends = frozenset(sampling.stop_token_ids) | (frozenset() if sampling.ignore_eos else ends)
        if ends == checkpoint:
            return StopSet(strings, special=special)
        # under a grammar further tokens may end a text early, as stop strings may
        bound = _binding(job)
        if bound is not None and (bound == "allow" or not ends > checkpoint):
            options = {"ignore_eos": sampling.ignore_eos, **{name: list(ids) for name, ids in asked.items()}}
            name = next(name for name, value in options.items() if value)
            raise InvalidRowError(f"{name} is {shorten(options[name])}, but {bound} says where an answer ends: drop it")
        return StopSet(strings, ends, special)

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

    def _fit_encoder_input(
        self, encoder_input: Tensor, codec: EncoderDecoderCodec, truncate: int | None
    ) -> tuple[Tensor, int]:
        """Return the source, cut to what both encoders take and to `truncate` tokens, and how many tokens were dropped.
        Raises PromptTooLongError, and InvalidRowError where no token would be left."""
        count, (limit, role) = len(encoder_input), self._encoder_limit()
        if truncate is not None and 0 < truncate < count:
            kept = codec.cut(encoder_input, truncate)
            if kept is None:
                raise _nothing_left(truncate)
            encoder_input = kept
        if limit is None or len(encoder_input) <= limit:
            return encoder_input, count - len(encoder_input)
        cuts = self.on_too_long == "truncate-left" or truncate == -1
        if cuts and (kept := codec.cut(encoder_input, limit)) is not None:
            return kept, count - len(kept)
        raise PromptTooLongError(f"the source has {len(encoder_input)} tokens, but the {role}'s encoder takes {limit}")

    def _refuse_encoder_settings(self, request: Request) -> None:
        """Raise InvalidRowError for settings that only a target with an encoder can use."""
        request.check_source("text")
        for name in ("source_lang", "target_lang"):
            if (value := getattr(request.sampling, name)) is not None:
                raise InvalidRowError(f"{name} is {shorten(value)}, but the target has no encoder: drop it")

    def encode(self, request: Request, new: int | None = None) -> tuple[list[int], int]:
        """Return the token ids of the prompt, and how many were dropped. Raises RowError where it cannot be decoded.
        new: most tokens that it can generate, by default as the request says."""
        asked = request.sampling
        new = asked.max_new_tokens if new is None else new
        limit, role = self.limit()
        text, most = "", None
        if request.prompt_ids is not None:
            ids = [*request.prompt_ids, *(self.codec.encode_pieces([asked.prefix])[0] if asked.prefix else ())]
        else:
            request = self._as_prompt(request)
            text = (request.prompt or "") + (asked.prefix or "")
            most = self._most_characters(
                text, limit, f"{role} has {limit} positions", asked.truncate_prompt_tokens, new
            )
            ids = self._ids(text, most, add_special_tokens=request.sampling.add_special_tokens)
        self._check(request, ids)
        self._check_memory(new)
        kept, dropped = self._fit(ids, new, asked.truncate_prompt_tokens)
        return kept, dropped if most is None else self._dropped(text, len(kept), dropped)

    def _as_prompt(self, request: Request) -> Request:
        """Return a request with the text of its conversation as its prompt, to which the tokenizer adds nothing. Others
        are returned as they are."""
        if request.messages is None:
            return request
        text = self.codec.render_chat(request.messages, request.chat)
        sampling = replace(request.sampling, add_special_tokens=False)
        return replace(request, messages=None, chat=NO_CHAT, prompt=text, sampling=sampling)

    def _ids(self, text: str, most: int | None, *, add_special_tokens: bool) -> list[int]:
        """Return the token ids of a text. most: read only so many of its last characters; the tokens that the tokenizer
        begins every text with come before them, where the whole text begins with them."""
        end = text if most is None else text[-most:]
        if add_special_tokens:
            return self.codec.encode(end)
        [ids] = self.codec.encode_pieces([end])
        if len(end) == len(text):
            return ids
        [beginning] = self.codec.encode_pieces([text[:BEGINNING]])
        return [*beginning[: self._begin(beginning)], *ids]

    def _begin(self, ids: list[int]) -> int:
        """Return how many of the first ids are those that the tokenizer begins every text with."""
        return len(list(takewhile(lambda pair: pair[0] == pair[1], zip(ids, self.codec.encode(""), strict=False))))

    def _prefix_tokens(self, prefix: str | None) -> int:
        """Return how many tokens the text has that an answer begins with. Raises InvalidRowError where it has none."""
        if prefix is None:
            return 0
        [ids] = self.codec.encode_pieces([prefix])
        if not ids:
            raise InvalidRowError(f"prefix is {shorten(prefix)}, which has no tokens: drop it")
        return len(ids)

    def _dropped(self, text: str, kept: int, dropped: int) -> int:
        """Return the least number of tokens that a prompt has lost, where only its last characters were tokenized."""
        assert self.sized is not None
        return max(1, dropped, self.sized.least_tokens(text) - kept)

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
        """Raise RowError where a request cannot be decoded because of its prompt or sampling settings."""
        if not ids:
            raise InvalidRowError("prompt is empty: there is no token to start from")
        if foreign := [token for token in ids if not 0 <= token < self.target.vocab_size]:
            raise InvalidRowError(
                f"prompt holds token id {foreign[0]}, but the target has {self.target.vocab_size} ids"
            )
        try:
            check_request(request.sampling, self.method.rule, self.method.num_beams)
        except UsageError as error:
            raise InvalidRowError(str(error)) from error
        if self.method.dynamic and (beams := request.sampling.num_beams) not in (None, self.method.num_beams):
            raise InvalidRowError(
                f"num_beams is {beams}, but the run has {self.method.num_beams}, and with width {self.method.width} "
                "all rows have as many: use width fixed"
            )

    def limit(self) -> tuple[int | None, str]:
        """Return the smallest number of positions of the models, and the role of its model. The number is None where
        there is no limit."""
        draft_limit = None if self.draft is None else self.draft.max_positions
        return _smallest(((self.target.max_positions, "target"), (draft_limit, "draft")))

    def _most_characters(
        self, text: str, limit: int | None, limit_text: str, truncate: int | None, new: int = 0
    ) -> int | None:
        """Return how many of its last characters are enough of a text that is cut on its left; None: all. A text whose
        bytes alone prove it too long is refused, because megabytes of text take seconds, and gigabytes of memory, to
        tokenize. limit: tokens that fit. limit_text: whose limit that is, for messages. truncate: of the request, see
        SamplingConfig. new: tokens of the limit that are to be generated. Raises PromptTooLongError."""
        codec, most = self.sized, truncate if truncate != -1 else None
        if codec is None or (limit is None and most is None):
            return None
        size = len(text.encode("utf-8", "surrogatepass"))
        if limit is not None and (self.on_too_long == "truncate-left" or truncate == -1):
            most = limit if most is None else min(most, limit)
        elif limit is not None and (most is None or most + new > limit):
            most = None  # what is left would not fit
            generated = f" and max_new_tokens is {new}" if new else ""
            least = codec.least_tokens(text)
            if least + new > limit:
                raise PromptTooLongError(f"prompt has {least} tokens or more{generated}, but the {limit_text}")
            if size > limit * codec.bytes_per_token:
                raise PromptTooLongError(
                    f"prompt has {size} bytes, more than {codec.bytes_per_token} for each token that fits: the "
                    f"{limit_text}"
                )
        if most is None:
            return None
        characters = most * codec.bytes_per_token
        if truncate is not None:
            characters = max(characters, COUNTED)
        return characters if size > characters else None

    def _fit(self, ids: list[int], new: int, truncate: int | None) -> tuple[list[int], int]:
        """Return the prompt, cut to the models' positions and to `truncate` tokens, and how many tokens were dropped.
        Raises PromptTooLongError, and InvalidRowError where no token would be left."""
        count = len(ids)
        if truncate is not None and 0 < truncate < count:
            ids = self._cut(ids, truncate)
            if not ids:
                raise _nothing_left(truncate)
        while True:
            limit, has = self._limit_of(len(ids))
            if limit is None or len(ids) + new <= limit:
                return ids, count - len(ids)
            cuts = self.on_too_long == "truncate-left" or truncate == -1
            kept = self._cut(ids, limit - new) if cuts else []
            if not kept:
                raise PromptTooLongError(f"prompt has {len(ids)} tokens and max_new_tokens is {new}, but the {has}")
            ids = kept

    def _limit_of(self, tokens: int) -> tuple[int | None, str]:
        """Return how many tokens a text may have whose prompt has so many, and why, as the end of a message. The number
        is None where there is no limit."""
        (limit, role), switch = self.limit(), self._switch_position
        if switch is None or tokens > switch or (limit is not None and limit <= switch):
            return limit, f"{role} has {limit} positions"
        why = f"target has other rotary factors (longrope) in texts whose prompt has more than {switch} tokens"
        return switch, f"{why}, and a text keeps those that it begins with"

    def _cut(self, ids: list[int], room: int) -> list[int]:
        """Return the last ids that fit into `room` tokens, behind the tokens that the tokenizer begins every text with;
        an empty list where none fit."""
        begin = self._begin(ids)
        return ids[:begin] + ids[len(ids) - room + begin :] if room > begin else []


def _nothing_left(truncate: int) -> InvalidRowError:
    return InvalidRowError(
        f"truncate_prompt_tokens is {truncate}, but the tokenizer begins every text with as many tokens: raise it"
    )


def _smallest(limits: Iterable[tuple[int | None, str]]) -> tuple[int | None, str]:
    """Return the smallest limit and the role of its model; (None, "") where there is no limit."""
    bounds = ((limit, role) for limit, role in limits if limit is not None)
    return min(bounds, key=lambda pair: pair[0], default=(None, ""))


def _binding(job: RequestState) -> str | None:
    """Return the name of the field that says what an answer may hold; None where there is none."""
    if job.catalogue is not None:
        return "allow"
    if job.grammar is not None:
        return "tool_choice" if job.request.grammar is None else "grammar"
    return None


def _texts(request: Request) -> Iterator[tuple[str, str]]:
    """Yield the names and values of a request's texts, apart from its grammar."""
    if request.prompt is not None:
        yield "prompt", request.prompt
    chat = request.chat
    for message in request.messages or ():
        yield from ((f"{name} of a message", text) for name, value in message.items() for text in _strings(value))
    for name in ("tools", "documents", "template_kwargs"):
        yield from ((name, text) for text in _strings(getattr(chat, name)))
    if isinstance(request.allow, tuple):
        yield from (("allow", text) for text in request.allow)
    for name, texts in (("stop", request.sampling.stop), ("bad_words", request.sampling.bad_words)):
        yield from ((name, text) for text in texts)
    for name in ("prefix", "source_lang", "target_lang"):
        if (text := getattr(request.sampling, name)) is not None:
            yield name, text


def _strings(value: object) -> Iterator[str]:
    """Yield the texts and names in a value of JSON, which may be nested as deep as memory allows."""
    rest = [value]
    while rest:
        item = rest.pop()
        if isinstance(item, str):
            yield item
        elif isinstance(item, Mapping):
            rest += [*item.keys(), *item.values()]
        elif isinstance(item, list | tuple):
            rest += item
