"""An engine that encodes and checks requests as Engine does, and answers none: it has no model."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from dsbd_cli.engine.decoding.encode import Encoder
from dsbd_cli.errors import PromptTooLongError, RowError
from dsbd_cli.requests import EngineInfo, Request, RequestResult
from dsbd_cli.stats import RequestStats

BATCH = 1024  # prompts that are tokenized together
MOST_CHARACTERS = 1 << 16  # of a prompt that is: a longer one may be refused for its size alone


class DryEngine:
    """Interface of an engine, whose results have the number of prompt tokens, or the request's error, and no text."""

    def __init__(
        self, encoder: Encoder, read_ahead: Callable[[list[str]], dict[str, list[int]]], info: EngineInfo
    ) -> None:
        """read_ahead: tokenizes prompts together; the encoder's codec then knows them."""
        self._encoder, self._read_ahead, self.info = encoder, read_ahead, info
        self.exactness = encoder.method.exactness
        self.allowed: str | None = None
        self.steps = 0
        self._stopped = False

    @property
    def limit(self) -> int | None:
        """Positions that a prompt and its answer must fit into; None where there is no limit."""
        return self._encoder.limit()[0]

    def stop(self) -> None:
        """End the run after the present batch."""
        self._stopped = True

    def run(self, requests: Iterable[Request | RowError | None], *, ordered: bool = True) -> Iterator[RequestResult]:
        """Yield a result without a text for every request, in order. None among the requests: none is ready yet."""
        batch: list[Request | RowError] = []
        for request in requests:
            if request is not None:
                batch.append(request)
            if len(batch) == BATCH or request is None:
                yield from self._results(batch)
                batch = []
            if self._stopped:
                return
        yield from self._results(batch)

    def _results(self, batch: list[Request | RowError]) -> Iterator[RequestResult]:
        prompts = [request.prompt for request in batch if isinstance(request, Request) and request.prompt is not None]
        encoded = self._read_ahead([prompt for prompt in prompts if len(prompt) <= MOST_CHARACTERS])
        for number, request in enumerate(batch):
            if isinstance(request, RowError):
                yield RequestResult(Request(""), (), 0, RequestStats(), request)
                continue
            tokens, cut = 0, 0
            error: RowError | None = None
            try:
                job = self._encoder.job(number, request)
                tokens, cut = len(job.prompt), job.truncated
            except PromptTooLongError as failed:
                error, tokens = failed, len(encoded.get(request.prompt or "", ()))
            except RowError as failed:
                error = failed
            yield RequestResult(request, (), tokens, RequestStats(), error, cut)
