"""A worker for Ray Data: a class for `map_batches` that answers the rows of a column.

This file does not import Ray: Ray Data makes one object in each of its actors and calls it with batches.
"""

from __future__ import annotations

import asyncio
import hashlib
import itertools
import logging
import threading
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import replace
from functools import partial

from dsbd_cli.config.chat import ChatConfig
from dsbd_cli.config.method import DEFAULT_BATCH_SIZE, MethodConfig, check_request
from dsbd_cli.config.model import BUILTIN_TARGET, ModelSpec, OnTooLong
from dsbd_cli.config.sampling import SamplingConfig
from dsbd_cli.errors import DsbdError, InvalidRowError, UsageError, shorten
from dsbd_cli.io.records.cells import cell_value
from dsbd_cli.io.records.fields import messages as checked_messages
from dsbd_cli.io.records.record_parts import calls_text
from dsbd_cli.requests import Request, RequestResult, derive_seed
from dsbd_cli.scale.worker import Failure, Worker, WorkerSetup

_logger = logging.getLogger(__name__)

Batch = Mapping[str, Sequence[object]]
NEW_COLUMNS = (
    *("text", "reasoning", "tool_calls", "logprob", "score", "finish_reason", "num_tokens", "prompt_tokens", "error"),
)


class Answer:
    """A worker that answers batches of rows with one engine. It answers several batches at a time, so that the engine's
    batch stays full.

        dataset.map_batches(Answer, fn_constructor_kwargs={"target": "my-llama"},
                            concurrency=8, num_gpus=1, batch_size=64)

    A row has `prompt` or `messages`, and may have `id`. Its seed comes from the run's and its id. Without an id it
    comes from the prompt, because Ray Data promises no order. Every row is returned with all its columns and those of
    NEW_COLUMNS; `tool_calls` is JSON text. `error` says why a row has no text, and is null where it has one. `beams` is
    added for an n_best above 1. Lines that the user should know go to the log `dsbd_cli`.
    """

    def __init__(
        self,
        target: str | ModelSpec = BUILTIN_TARGET,
        draft: str | ModelSpec | None = "auto",
        *,
        method: MethodConfig | None = None,
        sampling: SamplingConfig | None = None,
        seed: int = 0,
        batch_size: int = DEFAULT_BATCH_SIZE,
        on_too_long: OnTooLong = "error",
        chat_template: str | None = None,
        chat_template_kwargs: Mapping[str, object] | None = None,
    ) -> None:
        """Load an engine. The arguments are those of dsbd_cli.load and Request; a template is given as
        text, because the actors may run elsewhere. Raises what `load` raises."""
        from dsbd_cli import loading

        self._sampling, self._seed = sampling or SamplingConfig(), seed
        chosen = method or MethodConfig()
        check_request(self._sampling, chosen.rule, chosen.num_beams)
        load = partial(
            loading.load,
            target,
            draft,
            method=method,
            batch_size=batch_size,
            on_too_long=on_too_long,
            chat_template=chat_template,
            chat_template_kwargs=chat_template_kwargs,
        )
        self._worker = Worker(WorkerSetup(load, (), batch_size), owns_process=False)
        while (greeting := self._worker.hello()) is None:
            continue
        if isinstance(greeting, Failure):
            raise greeting.error or DsbdError(str(greeting))
        self._numbers = itertools.count()
        self._requests: dict[int, Request] = {}
        self._results: dict[int, RequestResult] = {}
        self._changed = threading.Condition()
        self._failure: Failure | None = None
        threading.Thread(target=self._collect, name="dsbd-answers", daemon=True).start()

    async def __call__(self, batch: Batch) -> AsyncIterator[dict[str, list[object]]]:
        """Yield the batch, a mapping of columns, with the new columns. Raises UsageError for unfit columns."""
        yield await asyncio.to_thread(self.answer, batch)

    def answer(self, batch: Batch) -> dict[str, list[object]]:
        """Return the batch with the new columns, in the thread that calls. May be called from several."""
        if taken := [name for name in (*NEW_COLUMNS, "beams") if name in batch]:
            raise UsageError(f"the rows have a column {taken[0]} already: rename it before")
        if "prompt" not in batch and "messages" not in batch:
            raise UsageError(f"the rows have neither prompt nor messages: their columns are {', '.join(batch)}")
        columns = {name: list(column) for name, column in batch.items()}
        count = len(next(iter(columns.values())))
        rows = [{name: column[index] for name, column in columns.items()} for index in range(count)]
        results = self._answers([self._request(row) for row in rows])
        made = [self._columns(result) for result in results]
        names = [*NEW_COLUMNS, *(["beams"] if self._sampling.n_best > 1 else [])]
        return {**columns, **{name: [row[name] for row in made] for name in names}}

    def _request(self, row: Mapping[str, object]) -> Request | InvalidRowError:
        """Return the request of one row, or the error that says why it cannot be answered."""
        # Ray Data hands over integers as floats where a column has empty cells, which are NaN
        prompt, messages, own = row.get("prompt"), row.get("messages"), cell_value("id", row.get("id"))
        try:
            if prompt is None and messages is None:
                raise InvalidRowError("neither prompt nor messages is given")
            if prompt is not None and (not isinstance(prompt, str) or not prompt):
                raise InvalidRowError(f"prompt is {shorten(prompt)}, but must be a non-empty string")
            chat, continued = None, False
            if messages is not None:
                chat, continued = checked_messages([dict(message) for message in messages])  # type: ignore[attr-defined]
            content = f"{prompt}\0{chat}".encode("utf-8", "surrogatepass")
            name = str(own) if own is not None else hashlib.blake2b(content, digest_size=16).hexdigest()
            seed = derive_seed(self._seed, name)
            settings = ChatConfig(continue_final_message=continued)
            return Request(prompt, messages=chat, id=name, seed=seed, sampling=self._sampling, chat=settings)
        except (InvalidRowError, UsageError, TypeError, ValueError) as error:
            return InvalidRowError(str(error))

    def _answers(self, requests: Sequence[Request | InvalidRowError]) -> list[RequestResult | InvalidRowError]:
        with self._changed:
            rows = {next(self._numbers): request for request in requests if isinstance(request, Request)}
            self._requests |= rows
            self._worker.put(list(rows.items()))
            self._changed.wait_for(lambda: self._failure is not None or rows.keys() <= self._results.keys())
            if self._failure is not None:
                raise self._failure.error or DsbdError(str(self._failure))
            done = iter([self._results.pop(number) for number in rows])
        return [next(done) if isinstance(request, Request) else request for request in requests]

    def _collect(self) -> None:
        """Pass on what the engine has answered. This is the work of the thread."""
        while self._failure is None:
            exchange = self._worker.exchange(())
            for line in exchange.lines:
                _logger.warning("%s", line)
            with self._changed:
                for number, answer in exchange.answers:
                    self._results[number] = replace(answer, request=self._requests.pop(number))
                self._failure = exchange.failure
                self._changed.notify_all()

    def _columns(self, result: RequestResult | InvalidRowError) -> dict[str, object]:
        error = result if isinstance(result, InvalidRowError) else result.error
        if isinstance(result, InvalidRowError) or error is not None:
            made: dict[str, object] = dict.fromkeys((*NEW_COLUMNS, "beams"))
            return made | {"error": f"{type(error).__name__}: {error}"}
        best = result.hypotheses[0]
        return {
            "text": best.text,
            "reasoning": best.reasoning,
            "tool_calls": calls_text(best),
            "logprob": best.logprob,
            "score": best.score,
            "finish_reason": best.finish_reason,
            "num_tokens": best.num_tokens,
            "prompt_tokens": result.prompt_tokens,
            "error": None,
            "beams": [
                {
                    "text": beam.text,
                    "reasoning": beam.reasoning,
                    "tool_calls": calls_text(beam),
                    "logprob": beam.logprob,
                    "score": beam.score,
                }
                for beam in result.hypotheses
            ],
        }
