"""Requests and results of an engine, as plain data without tensors."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Literal

from dsbd_cli.config.chat import NO_CHAT, ChatConfig
from dsbd_cli.config.checking import check_types, require
from dsbd_cli.config.grammars import Grammar
from dsbd_cli.config.sampling import SamplingConfig
from dsbd_cli.errors import InvalidRowError, RowError, UsageError, shorten
from dsbd_cli.stats import RequestStats

FinishReason = Literal["stop", "length"]
Source = Literal["text", "audio", "image"]  # what a target reads

# by what a target reads: what it does, and what a request must give it
_READERS: dict[Source, tuple[str, str]] = {
    "text": ("reads text", "a prompt"),
    "audio": ("writes down speech", "audio"),
    "image": ("reads pictures", "an image"),
}


def derive_seed(run_seed: int, request_id: str) -> int:
    """Return the seed of a row, 63 bits, from the run's seed and the row's id, so that batch size and order do not
    matter."""
    digest = hashlib.blake2b(f"{run_seed}:{request_id}".encode("utf-8", "surrogatepass"), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def check_seed(seed: object) -> None:
    """Raise UsageError for a seed, of a run or of a request, that is not an integer from 0 to 2**63 - 1."""
    fits = isinstance(seed, int) and not isinstance(seed, bool) and 0 <= seed < 2**63
    require(fits, "seed", seed, "an integer from 0 to 2**63 - 1")


def check_ends(sampling: SamplingConfig, grammar: Grammar | None) -> None:
    """Raise UsageError where both stop strings and a grammar are given, because each says where a text may end."""
    if grammar is not None and sampling.stop:
        reason = "a grammar alone says where a text may end, and one that was cut would not match it: drop it"
        raise UsageError(f"stop is {shorten(list(sampling.stop))}, but {reason}", field="stop", value=sampling.stop)


@dataclass(frozen=True, slots=True)
class Request:
    """One prompt and the options of its answer.

    Attributes:
        prompt: text to continue. Exactly one of prompt, messages, prompt_ids, audio and image is given; a list may be
            given for a tuple. With an encoder-decoder target it is the source.
        messages: a conversation to answer, each message with role and content, and what else the chat template reads.
        prompt_ids: token ids to continue.
        audio: a file of speech to transcribe or translate.
        image: a file of a picture to read, or its contents as `data:image/png;base64,...`. A prompt may be given with
            it: the decoder's text begins with that prompt.
        id: name of the request. Default: its index among the requests of its run, from 0, as text.
        seed: from 0 to 2**63 - 1. Default: derive_seed of the run's seed and the id.
        sampling: options of this request.
        allow: the only answers that may come out: the name of a catalogue of the engine, or the answers themselves.
            Default: the engine's only catalogue, where it has one.
        grammar: what the whole answer must match.
        chat: settings of the conversation, for a request with messages.
    """

    prompt: str | None = None
    messages: tuple[dict[str, object], ...] | None = field(default=None, kw_only=True)
    prompt_ids: tuple[int, ...] | None = field(default=None, kw_only=True)
    audio: str | None = field(default=None, kw_only=True)
    image: str | None = field(default=None, kw_only=True)
    # None until `with_defaults`, which an engine calls when it reads the request
    id: str = field(default=None, kw_only=True)  # type: ignore[assignment]
    seed: int = field(default=None, kw_only=True)  # type: ignore[assignment]
    sampling: SamplingConfig = field(default_factory=SamplingConfig, kw_only=True)
    allow: str | tuple[str, ...] | None = field(default=None, kw_only=True)
    grammar: Grammar | None = field(default=None, kw_only=True)
    chat: ChatConfig = field(default=NO_CHAT, kw_only=True)

    if TYPE_CHECKING:  # the constructor takes more types than the fields hold

        def __init__(
            self,
            prompt: str | None = ...,
            *,
            messages: list[dict[str, object]] | tuple[dict[str, object], ...] | None = ...,
            prompt_ids: list[int] | tuple[int, ...] | None = ...,
            audio: str | None = ...,
            image: str | None = ...,
            id: str | None = ...,
            seed: int | None = ...,
            sampling: SamplingConfig = ...,
            allow: str | list[str] | tuple[str, ...] | None = ...,
            grammar: Grammar | None = ...,
            chat: ChatConfig = ...,
        ) -> None: ...

    def __post_init__(self) -> None:
        for name in ("messages", "prompt_ids", "allow"):
            if isinstance(value := getattr(self, name), list):
                object.__setattr__(self, name, tuple(value))
        check_types(self, open_=("id", "seed"))
        require(self.messages != (), "messages", [], "a non-empty list of objects")
        if self.messages is not None:
            fits = all(isinstance(message.get("role"), str) for message in self.messages)
            require(fits, "messages", list(self.messages), "a list of objects with role")
        if self.seed is not None:
            check_seed(self.seed)
        sources = ("prompt", "messages", "prompt_ids", "audio", "image")
        sources_set = [name for name in sources if getattr(self, name) is not None]
        if len(sources_set) != 1 and sources_set != ["prompt", "image"]:
            said = " and ".join(sources_set) or "none of them"
            raise UsageError(
                f"a request has {said}, but must have exactly one of prompt, messages, prompt_ids, audio and image"
            )
        if self.messages is None and self.chat is not NO_CHAT and self.chat != NO_CHAT:
            raise UsageError("chat is given, but it is about messages, and there are none: drop it")
        check_ends(self.sampling, self.grammar)
        if self.allow is not None and self.grammar is not None:
            raise UsageError("allow and grammar both say what may be answered: give one of them")
        if self.chat.forces_call:
            self._check_forced_call()

    def _check_forced_call(self) -> None:
        """Raise UsageError where something else says what the answer is, which must be a call of a function."""
        choice = shorten(self.chat.tool_choice)
        for name, value in (("allow", self.allow), ("a grammar", self.grammar), ("stop", self.sampling.stop or None)):
            if value is not None:
                message = f"tool_choice is {choice}, so the answer is a call, but {name} is given too: drop one of them"
                raise UsageError(message, field="tool_choice", value=self.chat.tool_choice)

    def check_source(self, reads: Source) -> None:
        """Refuse audio and images where the target reads something else, and text where it reads audio or images.

        Raises InvalidRowError.
        """
        does, wanted = _READERS[reads]
        for name in ("audio", "image"):
            if name != reads and (value := getattr(self, name)) is not None:
                raise InvalidRowError(f"{name} is {shorten(value)}, but the target {does}: give {wanted}")
        if reads != "text" and getattr(self, reads) is None:
            raise InvalidRowError(f"{reads} is missing: the target {does}, and no text alone")

    def with_defaults(self, number: int, run_seed: int) -> Request:
        """Return the request with an id and a seed. number: its index among the requests of its run."""
        missing = [name for name in ("id", "seed") if getattr(self, name) is None]
        if not missing:
            return self
        own = str(number) if "id" in missing else self.id
        return replace(self, id=own, seed=derive_seed(run_seed, own) if "seed" in missing else self.seed)


@dataclass(frozen=True, slots=True)
class TokenDetail:
    """One generated token. Results hold it where token_logprobs is set.

    Attributes:
        token_id: of the target's vocabulary. text: the bytes that the token adds; empty for a special token.
        logprob: log-probability (nats) of the token, given all tokens before it, under the target as its token rules
            leave it.
        beam: index of the beam that the token was appended to, among the live beams of its step (from 0).
        top: the top_logprobs likeliest tokens at this position as (id, bytes, logprob), best first.
    """

    token_id: int
    text: bytes
    logprob: float
    beam: int
    top: tuple[tuple[int, bytes, float], ...] = ()


@dataclass(frozen=True, slots=True)
class Segment:
    """A segment of transcribed speech. start, end: seconds; end is None where the answer was cut before its end
    time."""

    start: float
    end: float | None
    text: str


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call of a function that a text holds. arguments: an object as JSON text."""

    name: str
    arguments: str


@dataclass(frozen=True, slots=True)
class Hypothesis:
    """A finished text.

    Attributes:
        text: the answer, without its reasoning where that is split off.
        reasoning: what the model wrote between its marks of reasoning, where it is split off; None where that is
            nothing.
        reasoning_tokens: how many of the tokens are its reasoning, with its marks.
        tool_calls: calls of functions that the text holds, where the request gave tools. They are no part of `text`.
        logprob: the raw log-probability (nats) of its tokens, the end token included, under the target as it was
            loaded: a forward in bfloat16 gives another value than one in float32.
        score: logprob / num_tokens ** length_penalty; `num_tokens` counts the end token.
        answer_id: the id of an allowed answer in its catalogue; None where it has none.
        valid: whether the whole text matches the request's grammar, which a text cut by max_new_tokens may not; None
            without a grammar.
        tokens: the details of each token, where token_logprobs is set. Their log-probabilities sum to `logprob`, up to
            its float32 rounding.
        segments: the text with times, where timestamps were asked for.
    """

    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    logprob: float
    score: float
    answer_id: str | int | None = None
    valid: bool | None = None
    tokens: tuple[TokenDetail, ...] | None = None
    segments: tuple[Segment, ...] | None = None
    reasoning: str | None = None
    tool_calls: tuple[ToolCall, ...] = ()
    reasoning_tokens: int = 0

    @property
    def num_tokens(self) -> int:
        """Number of generated tokens, the end token included."""
        return len(self.token_ids)


@dataclass(frozen=True, slots=True)
class RequestResult:
    """Hypotheses of one request, best first, or the error that stopped this request alone.

    Attributes:
        prompt_tokens: tokens of the prompt that were read. With an encoder-decoder target they include source_tokens.
        truncated_tokens: tokens that were dropped on the prompt's left.
        source_tokens: with an encoder-decoder target, the tokens, frames of audio or encoder positions of a picture
            that its encoder read; None with other targets.
        token_rules: the rules of tokens that acted, by name.
        language: the language that a speech model recognised, where the request names none.
    """

    request: Request
    hypotheses: tuple[Hypothesis, ...]
    prompt_tokens: int
    stats: RequestStats
    error: RowError | None = None
    truncated_tokens: int = 0
    source_tokens: int | None = None
    token_rules: Mapping[str, object] = field(default_factory=dict)
    language: str | None = None

    @property
    def text(self) -> str:
        """Best text of the request. Raises the error of a request that failed."""
        self.check()
        return self.hypotheses[0].text

    @property
    def invalid(self) -> bool:
        """Whether the best text does not match the request's grammar. No other text does either then."""
        return bool(self.hypotheses) and self.hypotheses[0].valid is False

    def check(self) -> None:
        """Raise the error of a request that failed."""
        if self.error is not None:
            raise type(self.error)(f"request {self.request.id}: {self.error}")


@dataclass(frozen=True, slots=True)
class Piece:
    """Text that was added to one request and can no longer change. The last piece of a request holds its result."""

    request: Request
    text: str
    result: RequestResult | None = None


@dataclass(frozen=True, slots=True)
class EngineInfo:
    """Names, dtypes and devices of the models that run, for records and reports.

    Attributes:
        draft_form: what was read of a draft head or a trimmed draft. notes: what the user should know about the models.
        drafts: False where look-ups that nobody asked for do not serve the device, so that nothing is drafted.
        ops: (operation, backend, reason) for the operations of the target and of iterations.
        threads: processor threads. processor: what kernels are chosen by, such as avx2. chat: whether the target has a
            chat template. reasoning: whether it marks its reasoning in a known way.
    """

    target: str
    draft: str | None
    dtype: str
    device: str
    draft_dtype: str | None = None
    draft_device: str | None = None
    draft_form: str | None = None
    drafts: bool = True
    notes: tuple[str, ...] = ()
    ops: tuple[tuple[str, str, str], ...] = ()
    threads: int | None = None
    processor: str | None = None
    chat: bool = False
    reasoning: bool = False

    @property
    def quantize(self) -> str | None:
        """The form of the target's quantised weights, such as int8 or gguf-q4_k; None where they are plain."""
        form, plus, _ = self.dtype.partition("+")
        return form if plus else None


MOST_FAILED = 256  # requests that cannot be decoded, of those read at a time, before their results go out


class NumberedRequests:
    """An input of requests that are read one at a time, each numbered and given an id and a seed.

    An item None of the input says that nothing is ready yet.
    """

    def __init__(self, requests: Iterable[Request | str | RowError | None], seed: int = 0) -> None:
        """seed: of the run. Raises UsageError where `requests` is no collection of requests."""
        # iterating over a string or a dict would take its letters or its keys for prompts
        if isinstance(requests, Request | str | Mapping) or not isinstance(requests, Iterable):
            raise UsageError(
                f"requests is {shorten(requests)}, but must be a list, or an iterator, of requests or prompts"
            )
        check_seed(seed)
        self._requests = iter(requests)
        self._seed = seed
        self._number = 0
        self._exhausted = False

    def exhausted(self) -> bool:
        """Return whether the end of the input was reached."""
        return self._exhausted

    def next(self) -> tuple[int, Request | RowError] | None:
        """Return the number of the next request with the request, or with the error of one that has failed.

        Return None at the end of the input, and where nothing is ready. Raises UsageError for an item that is neither a
        request, a prompt, an error nor None.
        """
        if self._exhausted:
            return None
        try:
            request = next(self._requests)
        except StopIteration:
            self._exhausted = True
            return None
        if request is None:
            return None
        number = self._number
        self._number += 1
        if isinstance(request, RowError):
            return number, request
        if isinstance(request, str):
            request = Request(request)
        if not isinstance(request, Request):
            raise UsageError(f"requests[{number}] is {shorten(request)}, but must be a Request or a prompt")
        return number, request.with_defaults(number, self._seed)
