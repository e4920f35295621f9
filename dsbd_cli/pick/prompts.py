"""Prompts that candidates answer, for choosers that must see them. They are read from the input file of dsbd
generate."""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Callable, Sequence
from typing import BinaryIO

from dsbd_cli.errors import InvalidRowError
from dsbd_cli.io.lines.jsonl import ReadLines
from dsbd_cli.io.records.reader import Prompt, RowReader
from dsbd_cli.pick.candidate_rows import CandidateRow
from dsbd_cli.pick.choosers import Choice


class PromptsById:
    """Prompts by id. Rows with the same id get their prompts in order. The file is read as far as the rows need, and
    prompts of rows that nobody asked for stay in memory."""

    def __init__(self, stream: BinaryIO, name: str, read: ReadLines, *, chat: bool = False) -> None:
        """name: name of the file, for messages. read: read_lines, or a function that reads a table as such lines. chat:
        a prompt is the single message of a user."""
        self._name, reader = name, RowReader(chat=chat)
        self._rows = (
            (number, *reader.read_prompt(line, index=index)) for index, (number, line) in enumerate(read(stream))
        )
        self._seen: defaultdict[str, deque[Prompt | InvalidRowError]] = defaultdict(deque)
        self._passed_over = Counter[str]()  # by id, rows whose prompts are still to come and are not wanted

    def of(self, row_id: str) -> Prompt:
        """Return the prompt of a row, and forget it. Raises InvalidRowError where no row has this id, or none that can
        be read."""
        fault: InvalidRowError | None = None
        while (entry := self._next(row_id)) is not None:
            if not isinstance(entry, InvalidRowError):
                return entry
            fault = entry  # another line may have this id
        raise fault or InvalidRowError(f"id is {row_id!r}, which {self._name} does not hold")

    def pass_over(self, row_id: str) -> None:
        """Forget the prompt of a row that is not chosen for."""
        if self._seen.get(row_id):
            self._next(row_id)
        else:
            self._passed_over[row_id] += 1

    def _next(self, row_id: str) -> Prompt | InvalidRowError | None:
        """Return the next prompt of this id, or why its line cannot be read; None at the end of the file."""
        while not self._seen.get(row_id):
            row = next(self._rows, None)
            if row is None:
                return None
            number, seen_id, prompt = row
            if seen_id is None:
                continue
            if self._passed_over[seen_id] > 0:
                self._passed_over[seen_id] -= 1
                continue
            if isinstance(prompt, InvalidRowError):
                prompt = InvalidRowError(f"{self._name} line {number}: {prompt}")
            self._seen[seen_id].append(prompt)
        entry = self._seen[row_id].popleft()
        if not self._seen[row_id]:
            del self._seen[row_id]
        return entry


class ByReward:
    """A chooser of the candidate that a reward model gives the highest score; of equal ones the first."""

    def __init__(
        self,
        scores: Callable[[Prompt, Sequence[str]], list[float]],
        prompts: PromptsById,
        on_plain: Callable[[], None] | None = None,
    ) -> None:
        """scores: returns the reward of each text as an answer to a prompt. on_plain: called at the first plain
        prompt."""
        self._scores, self._prompts, self._on_plain = scores, prompts, on_plain

    def choose(self, row: CandidateRow) -> Choice:
        """Choose by reward. Raises InvalidRowError where the prompt is missing or too long."""
        assert row.id is not None, "a row with candidates has an id"
        prompt = self._prompts.of(row.id)
        if prompt and isinstance(prompt, str) and self._on_plain is not None:
            self._on_plain()
            self._on_plain = None
        rewards = self._scores(prompt, [candidate.text for candidate in row.candidates])
        best = max(range(len(rewards)), key=lambda index: rewards[index])
        return Choice(best, {"reward": rewards[best], "rewards": [round(value, 6) for value in rewards]})

    def pass_over(self, row: CandidateRow) -> None:
        """Go on without a choice for this row."""
        if row.id is not None:
            self._prompts.pass_over(row.id)
