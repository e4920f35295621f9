"""Answers of the target to the user's prompts, in a file that a later run continues."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import orjson
import torch
from torch import Tensor

from dsbd_cli.config.method import MethodConfig
from dsbd_cli.engine.decoding.encode import Encoder
from dsbd_cli.engine.decoding.engine import Engine
from dsbd_cli.engine.iteration.observer import Observer
from dsbd_cli.engine.iteration.request_state import RequestState
from dsbd_cli.engine.verify.base import LayerDraws, LayerView
from dsbd_cli.errors import RowError, shorten
from dsbd_cli.io.lines.jsonl import BLOCK_BYTES, LineWriter
from dsbd_cli.io.lines.lock import open_locked
from dsbd_cli.io.lines.resume import truncate_at, whole_size
from dsbd_cli.io.schemas.contracts import ANSWERS
from dsbd_cli.requests import Request, RequestResult

TREES = 4  # one in so many prompts is answered with all beams, the others with one
TURN = 512  # prompts of a turn: first those with all beams, then the others


@dataclass(frozen=True, slots=True)
class AnswerTokens:
    """Token ids of a prompt and of the tree of its answers.

    branches: the index in `tokens` that each of its tokens follows, -1 for tokens after the prompt.
    """

    prompt: tuple[int, ...]
    tokens: tuple[int, ...]
    branches: tuple[int, ...]

    @property
    def text(self) -> tuple[int, ...]:
        """All N tokens that the target reads, the prompt's first. Every token comes after the one that it follows."""
        return (*self.prompt, *self.tokens)

    @property
    def learnt(self) -> int:
        """Number of tokens in `text` that are trained on: the last one of the prompt and all after it."""
        return len(self.text) - len(self.prompt) + 1

    @property
    def parents(self) -> list[int]:
        """Index in `text` that each of its tokens follows; -1 for the first."""
        count = len(self.prompt)
        return [*range(-1, count - 1), *(count + index if index >= 0 else count - 1 for index in self.branches)]

    @property
    def positions(self) -> list[int]:
        """Number of tokens before each token of `text` on its path."""
        positions: list[int] = []
        for parent in self.parents:
            positions.append(positions[parent] + 1 if parent >= 0 else 0)
        return positions

    def sees(self, start: int, end: int) -> Tensor:
        """Return [end - start, end] bool: which tokens of `text` the tokens `start` to `end` see, namely those that
        they follow, and themselves."""
        rows = torch.ones(end, end, dtype=torch.bool).tril()
        for index, parent in enumerate(self.parents[len(self.prompt) : end], len(self.prompt)):
            rows[index, :index] = rows[parent, :index]
        return rows[start:]


class LiveBeams(Observer):
    """An observer that keeps the live beams of every step of runs without a draft, as trees."""

    attached = True

    def __init__(self) -> None:
        self._trees: dict[int, tuple[list[int], list[int]]] = {}  # by request: tokens, and the index that each follows
        self._ends: dict[int, list[int]] = {}  # by request: indices of the live beams
        self._draws: list[list[list[int]]] = []

    def verified(self, view: LayerView, draws: LayerDraws) -> None:
        """Keep the beams that were drawn for the next step."""
        self._draws = torch.stack((*view.pair(draws.index), draws.valid.long()), 2).tolist()

    def iterated(self, jobs: Mapping[int, RequestState], nodes: int, seconds: Mapping[str, float]) -> None:
        """Add the beams of the next step to the trees, below those of this step."""
        for row, job in jobs.items():
            if not job.stats.steps:  # the request begins, or begins anew
                self._trees[job.number], self._ends[job.number] = ([], []), [-1]
            (tokens, branches), ends, grown = self._trees[job.number], self._ends[job.number], []
            for beam, token, valid in self._draws[row]:
                if valid:
                    branches.append(ends[beam])
                    grown.append(len(tokens))
                    tokens.append(token)
            self._ends[job.number] = grown

    def take(self, number: int) -> tuple[list[int], list[int]]:
        """Remove the tree of a request that is done, and return its tokens and branches."""
        self._ends.pop(number, None)
        return self._trees.pop(number, ([], []))


@contextmanager
def open_answers(path: Path) -> Iterator[tuple[int, LineWriter]]:
    """Yield how many prompts the file has answers to, and a writer of further lines. A torn last line is dropped.

    Raises OutputError where it cannot be written, or another run writes it.
    """
    stream = open_locked(path, create_only=False)
    truncate_at(stream, whole_size(stream))
    stream.seek(0)
    lines = sum(block.count(b"\n") for block in iter(partial(stream.read, BLOCK_BYTES), b""))
    writer = LineWriter(stream, str(path), owned=True)
    with writer:
        yield lines, writer


def make_answers(
    engine: Engine,
    requests: Sequence[Request],
    writer: LineWriter,
    on_answer: Callable[[int], None],
) -> list[str]:
    """Answer the requests and write a line for each, with the live beams of every step. This ends early where the
    engine is stopped. on_answer: called after each with how many are done. Returns, for each request that cannot be
    answered, its id and why."""
    encoder = Encoder.alone(engine.target, engine.codec, engine.method)
    failed, beams = list[str](), LiveBeams()
    engine.observe(beams)
    for number, result in enumerate(engine.run(requests), 1):
        if result.error is not None:
            failed.append(_told(result.request, result.error))
        tokens, branches = beams.take(number - 1)
        tree = {"tree": tokens, "branches": branches} if tokens else {}
        writer.write(ANSWERS.line(_line(encoder, result) | tree))
        on_answer(number)
    engine.observe(Observer())
    return failed


def answering_turns(engine: Engine, requests: Sequence[Request]) -> list[tuple[Engine, list[Request]]]:
    """Return engines, each with prompts that it answers, in order.

    The engine itself answers every TREES-th prompt with all beams, and another one the others with one sampled beam.
    They take turns, so that the time of the answers so far tells that of the rest.
    """
    requests = [replace(request, sampling=replace(request.sampling, n_best=1)) for request in requests]
    if engine.method.num_beams == 1:
        return [(engine, requests)]
    single = engine.replace(method=MethodConfig(num_beams=1, depth=0))
    turns: list[tuple[Engine, list[Request]]] = []
    for start in range(0, len(requests), TURN):
        some = requests[start : start + TURN]
        turns += [(engine, some[::TREES]), (single, [row for index, row in enumerate(some) if index % TREES])]
    return turns


def answerable(engine: Engine, requests: Sequence[Request]) -> tuple[list[Request], list[str]]:
    """Return the requests that fit the engine's models, and for each other one its id and why it does not. Memory is
    not looked at, and no catalogue is known."""
    draft = next(iter(engine.models[1:]), None)
    encoder = Encoder.alone(engine.target, engine.codec, engine.method, draft)
    kept, failed = list[Request](), list[str]()
    for request in requests:
        try:
            encoder.job(0, request)
        except RowError as error:
            failed.append(_told(request, error))
        else:
            kept.append(request)
    return kept, failed


def _told(request: Request, error: RowError) -> str:
    return f"id {shorten(request.id)}: {error}"


def _line(encoder: Encoder, result: RequestResult) -> dict[str, object]:
    """Return the fields of a line. `text` is for `dsbd trim-draft --texts`, which counts the tokens of texts."""
    if result.error is not None:
        return {"schema": ANSWERS.id, "id": result.request.id, "error": str(result.error)}
    return {
        "schema": ANSWERS.id,
        "id": result.request.id,
        "text": result.text,
        "prompt_ids": encoder.job(0, result.request).prompt,
        "answers": [list(beam.token_ids) for beam in result.hypotheses],
    }


def read_answers(path: Path) -> list[AnswerTokens]:
    """Read the trees of all answered prompts of the file, in its order."""
    with path.open("rb") as stream:
        lines = [orjson.loads(line) for line in stream]
    return [
        AnswerTokens(tuple(line["prompt_ids"]), tuple(line["tree"]), tuple(line["branches"]))
        for line in lines
        if line.get("prompt_ids") and "tree" in line
    ]
