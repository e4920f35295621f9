"""Prompts that candidates answer, for choosers that must see them. They are read from the input file of dsbd
generate."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import BinaryIO

from dsbd_cli.errors import InvalidRowError
from dsbd_cli.io.lines.jsonl import ReadLines
from dsbd_cli.io.records.reader import RowReader
from dsbd_cli.pick.candidate_rows import CandidateRow
from dsbd_cli.pick.choosers import Choice

Asked = str | Sequence[Mapping[str, str]]


class PromptsById:
    """Prompts by id. The file is read as far as the rows need. Prompts of rows that are passed over stay in memory."""

    def __init__(self, stream: BinaryIO, name: str, read: ReadLines) -> None:
        """name: name of the file, for messages. read: read_lines, or a function that reads a table as such lines."""
        self._name, reader = name, RowReader()
        self._rows = (reader.read(line, index=i, number=number) for i, (number, line) in enumerate(read(stream)))
        self._seen: dict[str, Asked] = {}

    def of(self, row_id: str) -> Asked:
        """Return the prompt of a row, and forget it. Raises InvalidRowError where no row has this id."""
        while row_id not in self._seen:
            row = next(self._rows, None)
            if row is None:
                raise InvalidRowError(f"id is {row_id!r}, which {self._name} does not hold")
            if row.request is not None:
                self._seen[row.id] = row.request.messages or row.request.prompt or ""
        return self._seen.pop(row_id)


class ByReward:
    """A chooser of the candidate that a reward model gives the highest score; of equal ones the first."""

    def __init__(self, scores: Callable[[Asked, Sequence[str]], list[float]], prompts: PromptsById) -> None:
        """scores: returns the reward of each text as an answer to a prompt."""
        self._scores, self._prompts = scores, prompts

    def choose(self, row: CandidateRow) -> Choice:
        """Choose by reward. Raises InvalidRowError where the prompt is missing or too long."""
        rewards = self._scores(self._prompts.of(row.id), [one.text for one in row.candidates])
        best = max(range(len(rewards)), key=lambda place: rewards[place])
        return Choice(best, {"reward": rewards[best], "rewards": [round(value, 6) for value in rewards]})
