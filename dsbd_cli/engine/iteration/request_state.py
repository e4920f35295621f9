"""Requests on their way in, and results on their way out. The only tensors are encoder inputs."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Protocol, TypeVar

from torch import Tensor

from dsbd_cli.answer_forms import Reasoning
from dsbd_cli.config.grammars import Grammar
from dsbd_cli.config.token_rules import TokenRules
from dsbd_cli.engine.constraints.answers import Catalogue
from dsbd_cli.engine.constraints.stops import StopSet
from dsbd_cli.engine.planning.acceptance import Acceptance
from dsbd_cli.engine.protocols import SourceWindows
from dsbd_cli.requests import Request, RequestResult, derive_seed
from dsbd_cli.stats import RequestStats

Item_co = TypeVar("Item_co", covariant=True)


@dataclass(slots=True)
class RequestState:
    """A request on its way through the engine.

    `used`, `common_prefix` and `drafted` are the row's slots after the last iteration. `truncated` tokens of the prompt
    were dropped. `retried`: it ran out of memory alone once. `prefilled`: the draft has read the prompt. `acceptance`:
    what the planner has observed of it. `catalogue`: the answers that it may give, None for any. `rules`: its token
    rules. `ends`: what ends its text. `grammar`: what the whole answer must match, its own or that of the calls that
    it must make. `reasoning`: that of its answers, None where it is not told apart.

    The last `prefix` tokens of the prompt hold the text that the answer begins with; the first of them may hold an end
    of the text before it, too.

    With an encoder-decoder target `prompt` is what the decoder begins with, and `encoder_input` is what the encoder
    reads: `source_tokens` tokens, frames of audio or places of a picture. `listen`: of EncoderRequest, until the
    language is known. `language`: the language that was recognised. `windows`: of a source that is read in several;
    `answers` are those to its windows before this one.
    """

    number: int
    request: Request
    prompt: list[int]
    stats: RequestStats = field(default_factory=RequestStats)
    started: float = 0.0
    used: int = 0
    common_prefix: int = 0
    drafted: int = 0
    truncated: int = 0
    retried: bool = False
    prefilled: bool = False
    acceptance: Acceptance = field(default_factory=Acceptance)
    catalogue: Catalogue | None = None
    encoder_input: Tensor | None = None
    source_tokens: int | None = None
    prefix: int = 0
    listen: Callable[[Tensor], tuple[list[int], str]] | None = None
    language: str | None = None
    rules: TokenRules = field(default_factory=TokenRules)
    ends: StopSet = field(default_factory=StopSet)
    grammar: Grammar | None = None
    reasoning: Reasoning | None = None
    windows: SourceWindows | None = None
    answers: tuple[RequestResult, ...] = ()

    @property
    def seed(self) -> int:
        """Seed of the noise; each window of a source has its own."""
        seed, number = self.request.seed, len(self.answers)
        return derive_seed(seed, f"window {number}") if number else seed

    @property
    def max_new(self) -> int:
        """Most tokens that it can generate."""
        return self.request.sampling.max_new_tokens if self.catalogue is None else self.catalogue.trie.longest


class Results(Protocol[Item_co]):
    """Receiver of an engine's results, which decides when they may go out."""

    def put(self, number: int, result: RequestResult) -> None:
        """Hand in a result."""
        ...

    def progress(self, job: RequestState, tokens: Callable[[], list[int]]) -> None:
        """Receive the news that a running request went on. tokens: reads from the device the tokens that can no longer
        change."""
        ...

    @property
    def held(self) -> int:
        """Number of results that wait for an earlier one."""
        ...

    def ready(self) -> Iterator[Item_co]:
        """Yield what may go out now."""
        ...


class CompletionOrder:
    """Results in the order in which they are done."""

    held = 0

    def __init__(self) -> None:
        self._out: deque[RequestResult] = deque()

    def put(self, number: int, result: RequestResult) -> None:
        """Hand in a result."""
        self._out.append(result)

    def progress(self, job: RequestState, tokens: Callable[[], list[int]]) -> None:
        """Do nothing, because nothing goes out before a request is done."""

    def ready(self) -> Iterator[RequestResult]:
        """Yield the results whose turn has come."""
        while self._out:
            yield self._out.popleft()


class ResultOrder(CompletionOrder):
    """Results in input order: a result waits until all earlier ones are out."""

    def __init__(self) -> None:
        super().__init__()
        self._waiting: dict[int, RequestResult] = {}
        self._next = 0

    def put(self, number: int, result: RequestResult) -> None:
        """Hand in a result."""
        self._waiting[number] = result
        while self._next in self._waiting:
            self._out.append(self._waiting.pop(self._next))
            self._next += 1
        self.held = len(self._waiting)
