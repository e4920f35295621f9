"""Ways to choose one of several candidates. Each returns which one it chooses, and why."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from decimal import Context, Decimal, InvalidOperation
from typing import Literal, Protocol

from dsbd_cli.errors import InvalidRowError, UsageError, require_package
from dsbd_cli.io.records.row import Fields
from dsbd_cli.pick.candidate_rows import Candidate, CandidateRow

Weights = Literal["uniform", "score", "probability"]
Equal = Literal["text", "math"]
Utility = Callable[[Sequence[str]], list[list[float]]]

METRICS: tuple[str, ...] = ("chrf", "bleu")
# possessive quantifiers look at no character twice; digits and commas end with a digit
NUMBER = re.compile(r"[-+]?[$€£]?[-+]?[\d,]*+(?:\.\d++)?(?<=\d)(?:e[-+]?\d++)?%?", re.IGNORECASE)
MAX_NUMBER = 1000  # characters; a longer answer is a text
MAX_EXPONENT = 1000


@dataclass(frozen=True, slots=True)
class Choice:
    """A choice. `beam`: place of the chosen candidate, from 0. `why`: JSON values for the record."""

    beam: int
    why: Fields


class Chooser(Protocol):
    """Interface of what chooses one of the candidates of a row."""

    def choose(self, row: CandidateRow) -> Choice:
        """Choose a candidate. Raises InvalidRowError where none can be chosen for this row."""
        ...


@dataclass(frozen=True, slots=True)
class ByScore:
    """A chooser of the candidate of the highest score; of equal ones the first."""

    def choose(self, row: CandidateRow) -> Choice:
        """Choose by score. Raises InvalidRowError where a record holds no scores."""
        scores = _values(row.candidates, "score")
        best = max(range(len(scores)), key=lambda index: scores[index])
        return Choice(best, {"score": scores[best]})


@dataclass(frozen=True, slots=True)
class ByVote:
    """A chooser of the first candidate of the answer with the most votes (self-consistency). Of answers with equal
    votes it takes the one that comes first.

    Attributes:
        answer: finds the answer in a text: the last match, or its first group if it has one. None: the whole text.
        weights: what a vote counts, see _weights_of.
        equal: which answers count as one: those with the same `text` once normalised, or with the same value in
            mathematics (`math`: 1/2 and 0.5 agree, by math-verify).
    """

    answer: re.Pattern[str] | None = None
    weights: Weights = "uniform"
    equal: Equal = "text"

    def __post_init__(self) -> None:
        if self.equal == "math":
            require_package("--equal math", "math_verify", "math")

    def choose(self, row: CandidateRow) -> Choice:
        """Choose by vote. A candidate without an answer has no vote. Raises InvalidRowError where none has an
        answer."""
        answers = [self._answer(candidate.text) for candidate in row.candidates]
        if self.equal == "math":
            answers = _same_values(answers)
        votes: dict[str, float] = {}
        for answer, weight in zip(answers, _weights_of(row.candidates, self.weights), strict=True):
            if answer is not None:
                votes[answer] = votes.get(answer, 0.0) + weight
        if not votes:
            pattern = self.answer.pattern if self.answer is not None else ""
            raise InvalidRowError(f"none of {len(answers)} candidates holds an answer (--answer-regex {pattern!r})")
        won = max(votes, key=lambda answer: votes[answer])
        total = math.fsum(votes.values())
        why = {
            "answer": won,
            "votes": sum(answer == won for answer in answers),
            "share": round(votes[won] / total, 6) if total else 0.0,
            "answers": len(votes),
            "without_answer": sum(answer is None for answer in answers),
        }
        return Choice(answers.index(won), why)

    def _answer(self, text: str) -> str | None:
        comparable = normalised if self.equal == "text" else str
        if self.answer is None:
            return comparable(text)
        answer = last_answer(self.answer, text)
        return None if answer is None else comparable(answer)


def read_regex(option: str, text: str) -> re.Pattern[str]:
    """Return a pattern that finds answers in texts. option: the option that gave it, for messages. Raises
    UsageError."""
    try:
        return re.compile(text, re.DOTALL)
    except re.error as error:
        raise UsageError(f"{option} is {text!r}, but must be a regex: {error}") from None


def last_answer(pattern: re.Pattern[str], text: str) -> str | None:
    """Return the last match in a text, or its first group if the pattern has one; None where nothing matches."""
    matches = list(pattern.finditer(text))
    return (matches[-1][1 if pattern.groups else 0] or "") if matches else None


def _same_values(answers: Sequence[str | None]) -> list[str | None]:
    """Return every answer as the first one of the same value is written; None where no value is found in the text."""
    from math_verify import parse, verify

    representatives: list[tuple[list[object], str]] = []
    values: list[str | None] = []
    for answer in answers:
        value = [] if answer is None else parse(answer)
        if not value:
            values.append(None)
            continue
        same = next((shown for other, shown in representatives if verify(other, value)), None)
        if same is None:
            same = str(value[-1])
            representatives.append((value, same))
        values.append(same)
    return values


def normalised(answer: str) -> str:
    """Return an answer as votes compare it. Case, repeated spaces and a full stop at the end do not count, and a number
    becomes its value (`$1,200.50` and `1200.5` agree). An answer of over MAX_NUMBER characters, or of 10 to a power
    beyond MAX_EXPONENT, stays a text."""
    text = " ".join(answer.casefold().split()).removesuffix(".")
    if len(text) > MAX_NUMBER or not NUMBER.fullmatch(text):
        return text
    try:
        value = Decimal(re.sub(r"[,$€£%]", "", text))
    except InvalidOperation:
        return text
    if value and abs(value.adjusted()) > MAX_EXPONENT:
        return text
    exact = value.normalize(Context(prec=MAX_NUMBER)) if value else Decimal(0)
    return f"{exact:f}" + ("%" if text.endswith("%") else "")


@dataclass(frozen=True, slots=True)
class ByRisk:
    """A chooser by minimum Bayes risk: it takes the candidate of the highest mean utility against all candidates,
    itself among them; of equal ones the first.

    Attributes:
        metric: name of the utility, one of METRICS.
        weights: what a candidate counts as a reference, see _weights_of.
    """

    metric: str = "chrf"
    weights: Weights = "uniform"

    def __post_init__(self) -> None:
        _utility(self.metric)

    def choose(self, row: CandidateRow) -> Choice:
        """Choose by mean utility. Raises InvalidRowError where weights need scores that a record does not hold."""
        weights = _weights_of(row.candidates, self.weights)
        total = math.fsum(weights)
        matrix = _utility(self.metric)([candidate.text.strip() for candidate in row.candidates])
        expected = [math.fsum(w * u for w, u in zip(weights, line, strict=True)) / total for line in matrix]
        best = max(range(len(expected)), key=lambda index: expected[index])
        return Choice(best, {"metric": self.metric, "expected_utility": round(expected[best], 6)})


def _utility(metric: str) -> Utility:
    """Return a function of the pairwise utility of texts: hypotheses down, references across, 0 to 100. Raises
    UsageError where its package is missing."""
    require_package(f"--metric {metric}", "fastchrf" if metric == "chrf" else "sacrebleu", "pick")
    if metric == "chrf":
        import fastchrf

        return lambda texts: fastchrf.pairwise_chrf([list(texts)], [list(texts)])[0]
    from sacrebleu.metrics.bleu import BLEU

    bleu = BLEU(effective_order=True)
    return lambda texts: [[float(bleu.sentence_score(a, [b]).score) for b in texts] for a in texts]


def _weights_of(candidates: Sequence[Candidate], weights: Weights) -> list[float]:
    """Return the weight of each candidate: 1; or exp(score), or exp(logprob), scaled so that the best has 1.

    `uniform` is for independent samples, where the number of equal ones says how likely they are. Beams are all
    different texts, so what counts is their `probability`. Raises InvalidRowError where there are no scores.
    """
    if weights == "uniform":
        return [1.0] * len(candidates)
    scores = _values(candidates, "score" if weights == "score" else "logprob")
    return [math.exp(score - max(scores)) for score in scores]


def _values(candidates: Sequence[Candidate], name: Literal["score", "logprob"]) -> list[float]:
    values: list[float] = [value for candidate in candidates if (value := getattr(candidate, name)) is not None]
    if len(values) < len(candidates):
        raise InvalidRowError(f"{name} is missing: only native records hold it (dsbd generate --output-format native)")
    return values
