"""Choices against hand-made tables and independent computations. Guards: a vote counted twice, a weight that does not
act, another rule of execution than CodeS', a utility of the wrong direction."""

from __future__ import annotations

import math
import sqlite3
import sys
from contextlib import closing
from pathlib import Path

import pytest
from sacrebleu.metrics.bleu import BLEU
from sacrebleu.metrics.chrf import CHRF

from dsbd_cli.errors import InvalidRowError, UsageError
from dsbd_cli.pick.candidate_rows import Candidate, CandidateRow, record_row
from dsbd_cli.pick.choosers import NUMBER, ByRisk, ByScore, ByVote, Choice, normalised
from dsbd_cli.pick.execution import ByExecution

SPIDER = Path(__file__).parents[1] / "lab" / "tasks" / "data" / "spider" / "database"
TEMPLATE = f"{SPIDER}/{{db_id}}/{{db_id}}.sqlite"
ENDLESS = "WITH RECURSIVE t(n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM t) SELECT count(*) FROM t"


def row(*texts: str, scores: tuple[float, ...] | None = None, metadata: object = None) -> CandidateRow:
    marks = scores or tuple(-float(index) for index in range(len(texts)))
    candidates = tuple(Candidate(text, mark, mark, {"text": text}) for text, mark in zip(texts, marks, strict=True))
    return CandidateRow(0, 1, "a", "k", candidates, metadata)


def by_vote(regex: str | None, **settings: object) -> ByVote:
    import re

    return ByVote(None if regex is None else re.compile(regex), **settings)  # type: ignore[arg-type]


VOTES = [
    # regex, texts, chosen, answer, votes
    (None, ("a", "b", "B ", "c"), 1, "b", 2),
    (None, ("a", "b"), 0, "a", 1),  # a draw: the answer that comes first
    (r"answer is (\S+)", ("the answer is 7", "the answer is 12.", "so the answer is 12"), 1, "12", 2),
    (r"answer is (\S+)", ("no idea", "none", "the answer is 3"), 2, "3", 1),  # without an answer, no vote
    (r"-?[\d,.]+", ("1 and 2 make 1,200.0", "1200", "5", "5 to 6"), 0, "1200", 2),  # the last number counts
    (r"#### (.*)", ("#### $1,000", "#### 999", "#### 1000.00"), 0, "1000", 2),
]


@pytest.mark.parametrize(("regex", "texts", "chosen", "answer", "votes"), VOTES)
def test_votes_by_hand(regex: str | None, texts: tuple[str, ...], chosen: int, answer: str, votes: int) -> None:
    choice = by_vote(regex).choose(row(*texts))
    assert (choice.beam, choice.why["answer"], choice.why["votes"]) == (chosen, answer, votes)


def test_votes_weighed_by_score() -> None:
    """One good candidate against two bad ones: exp(-0.1) > 2 exp(-2)."""
    texts, scores = ("x", "y", "y"), (-0.1, -2.0, -2.0)
    assert by_vote(None).choose(row(*texts, scores=scores)).why["answer"] == "y"
    choice = by_vote(None, weights="score").choose(row(*texts, scores=scores))
    assert choice.why["answer"] == "x"
    assert choice.why["share"] == pytest.approx(math.exp(-0.1) / (math.exp(-0.1) + 2 * math.exp(-2)), abs=1e-6)


def test_votes_weighed_by_probability() -> None:
    """Of beams: the score is per token, the logprob of the whole text."""
    candidates = tuple(
        Candidate(text, logprob, score, {}) for text, logprob, score in (("x", -9.0, -0.9), ("y", -2.0, -1.0))
    )
    beams = CandidateRow(0, 1, "a", "k", candidates)
    assert by_vote(None, weights="score").choose(beams).why["answer"] == "x"
    choice = by_vote(None, weights="probability").choose(beams)
    assert (choice.why["answer"], choice.why["share"]) == ("y", pytest.approx(1 / (1 + math.exp(-7)), abs=1e-6))


def test_votes_by_value() -> None:
    """Equal numbers that are written differently are one answer; as texts they are three."""
    texts = ("it is 3", "so $\\frac{1}{2}$", "the result is 0.5", "\\boxed{1/2}", "I do not know")
    choice = by_vote(None, equal="math").choose(row(*texts))
    assert (choice.beam, choice.why["votes"], choice.why["without_answer"]) == (1, 3, 1)
    assert by_vote(None).choose(row(*texts)).why["votes"] == 1
    digits = by_vote(r"is (.*)", equal="math").choose(row("it is 7", "it is 2/4", "it is 0.50"))
    assert (digits.beam, digits.why["votes"]) == (1, 2)


def test_without_math_verify_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "math_verify", None)
    with pytest.raises(UsageError, match=r"pip install 'dsbd\[math\]'"):
        by_vote(None, equal="math")


def test_no_answer_anywhere_is_the_rows_error() -> None:
    with pytest.raises(InvalidRowError, match="none of 2 candidates holds an answer"):
        by_vote(r"#### (\d+)").choose(row("a", "b"))


@pytest.mark.parametrize(
    ("text", "other"), [("A  b.", "a B"), ("$1,200.50", "1200.5"), ("3.0", "3"), ("-7", "-7."), ("50%", "50.0%")]
)
def test_answers_that_agree(text: str, other: str) -> None:
    assert normalised(text) == normalised(other)


@pytest.mark.parametrize(("text", "other"), [("50%", "50"), ("1.5", "15"), ("a b", "ab"), ("1e3x", "1000")])
def test_answers_that_do_not(text: str, other: str) -> None:
    assert normalised(text) != normalised(other)


@pytest.mark.parametrize("number", ["1e1000000", "1e999999", "-1e-999999", "1" * 1001, "1e1001", "0e1000000"])
def test_the_key_of_a_number_is_short(number: str) -> None:
    """Guards an overflow that ended the run, and keys of a million characters."""
    assert len(normalised(number)) <= max(len(number), 10)


def test_a_number_keeps_all_its_digits() -> None:
    """Guards the 28 digits of Decimal's default context."""
    assert normalised("1" * 40) != normalised("1" * 39 + "2")
    assert normalised("1e3") == normalised("1,000") == "1000"
    assert normalised("0e5") == normalised("-0") == "0"


def test_a_number_is_read_in_one_pass() -> None:
    """Guards the 33 s that 30,000 digits and a letter took: a million would take half a day."""
    assert NUMBER.fullmatch("1" * 1_000_000 + "x") is None
    assert NUMBER.fullmatch("1," * 500_000 + "x") is None
    assert all(NUMBER.fullmatch(text) for text in (",5", "1,.5", "$-1.5e-3%"))
    assert not any(NUMBER.fullmatch(text) for text in ("12,", ".", "1.", "", "-", "e5"))


def test_the_highest_score_wins_and_the_first_of_equal_ones() -> None:
    assert ByScore().choose(row("a", "b", "c", scores=(-2.0, -1.0, -1.0))) == Choice(1, {"score": -1.0})
    lines = record_row(b'{"id":"x","beams":[{"text":"t"}]}', index=0, number=1)
    with pytest.raises(InvalidRowError, match="score is missing"):
        ByScore().choose(lines)


TEXTS = [
    ("the cat sat on the mat", "the cat sat on a mat", "a dog ran", "the cat sat on the red mat"),
    ("", "x", "xy"),
    ("\u6f22\u5b57 na\u00efve", "\u6f22\u5b57", "na\u00efve text"),
    ("same", "same", "other"),
]


@pytest.mark.parametrize("texts", TEXTS)
@pytest.mark.parametrize("metric", ["chrf", "bleu"])
def test_least_risk_is_the_mean_utility_of_sacrebleu(metric: str, texts: tuple[str, ...]) -> None:
    scorer = CHRF() if metric == "chrf" else BLEU(effective_order=True)
    table = [[scorer.sentence_score(a, [b]).score for b in texts] for a in texts]
    means = [math.fsum(line) / len(line) for line in table]
    choice = ByRisk(metric).choose(row(*texts))
    assert means[choice.beam] == pytest.approx(max(means), abs=1e-4)
    assert choice.why["expected_utility"] == pytest.approx(max(means), abs=1e-3)


def test_least_risk_weighs_references_by_score() -> None:
    texts, scores = ("alpha beta", "gamma delta", "gamma delta eta"), (0.0, -50.0, -50.0)
    assert ByRisk().choose(row(*texts, scores=scores)).beam > 0
    assert ByRisk(weights="score").choose(row(*texts, scores=scores)).beam == 0


def codes_rule(texts: tuple[str, ...], database: Path) -> int:
    """CodeS (Li et al. 2024), text2sql_zero_shot.py: the first generated statement without an execution error, else the
    first of all."""
    for index, text in enumerate(texts):
        with closing(sqlite3.connect(database)) as connection:
            try:
                if text.strip() == "":
                    continue
                connection.execute(text).fetchall()
                return index
            except sqlite3.Error:
                continue
    return 0


RUNS = [
    ("SELECT nme FROM singer", "SELECT name FROM singer", "SELECT age FROM singer"),
    ("", "SELECT FROM", "select count(*) from concert where year > 2014"),
    ("SELECT 1", "SELECT 2"),
    ("nothing", "runs", "here"),
    ("SELECT a FROM nowhere", "SELECT singer_id FROM concert ORDER BY price", "SELECT 1"),
]


@pytest.mark.parametrize("texts", RUNS)
def test_execution_is_the_rule_of_codes(texts: tuple[str, ...]) -> None:
    chooser = ByExecution(TEMPLATE)
    pick = chooser.choose(row(*texts, metadata={"db_id": "concert"}))
    assert pick.beam == codes_rule(texts, SPIDER / "concert" / "concert.sqlite")


def test_most_equal_results() -> None:
    texts = (
        "SELECT count(*) FROM concert",
        "SELECT nme FROM singer",
        "SELECT name FROM singer ORDER BY age, name",
        "SELECT name FROM singer",  # the same rows; their order counts only where both are ordered
        "SELECT name FROM singer ORDER BY name DESC",
    )
    choice = ByExecution(TEMPLATE, majority=True).choose(row(*texts, metadata={"db_id": "concert"}))
    assert choice.beam == 2
    assert (choice.why["ran"], choice.why["failed"], choice.why["votes"]) == (4, 1, 2)


def test_what_cannot_run() -> None:
    """Endless, writing and broken statements fail alone; the database is as it was."""
    path = SPIDER / "pets" / "pets.sqlite"
    before = path.read_bytes()
    texts = (ENDLESS, "DELETE FROM pet", "ATTACH '/tmp/x' AS x", "PRAGMA writable_schema = 1", "SELECT kind FROM pet")
    choice = ByExecution(TEMPLATE, timeout_s=0.2).choose(row(*texts, metadata={"db_id": "pets"}))
    assert (choice.beam, choice.why["failed"], choice.why["first_error"]) == (4, 4, "it ran longer than 0.2 s")
    assert path.read_bytes() == before


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        (None, "metadata.db_id is null"),
        ({"db_id": 2.5}, r"metadata.db_id is 2.5, but the database .* needs a string there"),
        ({"db_id": "../pets"}, "must be a name without folders"),
        ({"db_id": ".."}, "must be a name without folders"),
        ({"db_id": "nowhere"}, "nowhere.sqlite does not exist"),
        ({"db_id": "n" * 300}, "cannot be opened: File name too long"),
    ],
)
def test_a_row_without_a_database(metadata: object, message: str) -> None:
    with pytest.raises(InvalidRowError, match=message):
        ByExecution(TEMPLATE).choose(row("SELECT 1", metadata=metadata))


def test_a_file_that_is_no_database(tmp_path: Path) -> None:
    (tmp_path / "x.sqlite").write_text("no database" * 100)
    chooser = ByExecution(str(tmp_path / "x.sqlite"))
    with pytest.raises(InvalidRowError, match="cannot be read: file is not a database"):
        chooser.choose(row("SELECT 1"))
    with pytest.raises(UsageError, match=r"--database: .*x.sqlite cannot be read: file is not a database"):
        chooser.check("--database")


def test_nothing_runs_as_an_error() -> None:
    chooser = ByExecution(TEMPLATE, otherwise="error")
    with pytest.raises(InvalidRowError, match="none of 2 candidates runs; the first: no such column: nme"):
        chooser.choose(row("SELECT nme FROM singer", "nothing", metadata={"db_id": "concert"}))


def test_an_order_in_a_comment_is_none() -> None:
    """Guards a wrong answer: equal rows in another order were two results."""
    texts = ("SELECT age FROM singer ORDER BY age", "SELECT age FROM singer -- order by age", "SELECT 1", "SELECT 1")
    choice = ByExecution(TEMPLATE, majority=True).choose(row(*texts, metadata={"db_id": "concert"}))
    assert (choice.beam, choice.why["votes"], choice.why["results"]) == (0, 2, 2)
