"""Requests on their way in, and results on their way out: no tensors but sources."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Protocol, TypeVar

from torch import Tensor

from dsbd_cli.engine.decoding.acceptance import Acceptance
from dsbd_cli.engine.decoding.answers import Catalogue
from dsbd_cli.errors import RowError, UsageError, shorten
from dsbd_cli.requests import Request, RequestResult, check_seed
from dsbd_cli.stats import RequestStats
from dsbd_cli.token_rules import TokenRules

__all__ = ["AsDone", "Job", "ResultOrder", "Results", "Source"]

Item_co = TypeVar("Item_co", covariant=True)


@dataclass(slots=True)
class Job:
    """A request on its way through the engine. `used`, `trunk` and `drafted` are the row's slots after the last
    iteration; `truncated` tokens of the prompt were dropped; `retried`: it ran out of memory alone once; `prefilled`:
    the draft has read the prompt; `acceptance`: what the planner has seen of it; `catalogue`: the answers that it may
    give, None for any.

    Of an encoder-decoder target `prompt` is what the decoder begins with and `source` what the encoder reads; the last
    `prefix` tokens of the prompt are text of the answer. `rules`: of tokens."""

    number: int
    request: Request
    prompt: list[int]
    stats: RequestStats = field(default_factory=RequestStats)
    started: float = 0.0
    used: int = 0
    trunk: int = 0
    drafted: int = 0
    truncated: int = 0
    retried: bool = False
    prefilled: bool = False
    acceptance: Acceptance = field(default_factory=Acceptance)
    catalogue: Catalogue | None = None
    source: Tensor | None = None
    prefix: int = 0
    rules: TokenRules = field(default_factory=TokenRules)

    @property
    def source_tokens(self) -> int | None:
        """Tokens or frames that the encoder reads; None where there is none."""
        return None if self.source is None else self.source.shape[-1]

    @property
    def max_new(self) -> int:
        """Tokens that it can generate at most."""
        return self.request.sampling.max_new_tokens if self.catalogue is None else self.catalogue.trie.longest


class Source:
    """Numbered requests with an id and a seed, read one at a time. An item None says that nothing is ready yet."""

    def __init__(self, requests: Iterable[Request | str | RowError | None], seed: int = 0) -> None:
        """seed: of the run. Raises UsageError for what is no collection of requests."""
        # the letters of a prompt and the keys of a dict would be taken for prompts
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
        """The end of the input has been seen."""
        return self._exhausted

    def next(self) -> tuple[int, Request | RowError] | None:
        """The next request, or the error of one that has failed, and its number; None at the end, or where nothing is
        ready. Raises UsageError for an item that is none of these."""
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
        return number, request.settled(number, self._seed)


class Results(Protocol[Item_co]):
    """Where an engine puts what it has, and takes what may go out."""

    def put(self, number: int, result: RequestResult) -> None:
        """Hand in a result."""
        ...

    def progress(self, job: Job, tokens: Callable[[], list[int]]) -> None:
        """A running request went on. tokens: reads those that can no longer change, from the device."""
        ...

    @property
    def held(self) -> int:
        """Results that wait for an earlier one."""
        ...

    def ready(self) -> Iterator[Item_co]:
        """What may go out now."""
        ...


class ResultOrder:
    """Gives results back in input order: a result waits until all earlier ones are out."""

    def __init__(self) -> None:
        self._waiting: dict[int, RequestResult] = {}
        self._next = 0
        self._out: deque[RequestResult] = deque()

    def put(self, number: int, result: RequestResult) -> None:
        """Hand in a result."""
        self._waiting[number] = result
        while self._next in self._waiting:
            self._out.append(self._waiting.pop(self._next))
            self._next += 1

    def progress(self, job: Job, tokens: Callable[[], list[int]]) -> None:
        """Nothing goes out before a request is done."""

    @property
    def held(self) -> int:
        """Results that wait for an earlier one."""
        return len(self._waiting)

    def ready(self) -> Iterator[RequestResult]:
        """Results whose turn has come."""
        while self._out:
            yield self._out.popleft()


class AsDone:
    """Gives results back as they are done."""

    held = 0

    def __init__(self) -> None:
        self._out: deque[RequestResult] = deque()

    def put(self, number: int, result: RequestResult) -> None:
        """Hand in a result."""
        self._out.append(result)

    def progress(self, job: Job, tokens: Callable[[], list[int]]) -> None:
        """Nothing goes out before a request is done."""

    def ready(self) -> Iterator[RequestResult]:
        """Results that are done."""
        while self._out:
            yield self._out.popleft()
