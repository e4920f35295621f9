"""`dsbd pick` as it is typed: pipes, resuming, rows that fail, options that cannot work together."""

from __future__ import annotations

import json
import signal
import sqlite3
import subprocess
import sys
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest
import torch

from dsbd_cli.io.records.row import LongLine
from dsbd_cli.models.checkpoints.checkpoint import Checkpoint
from dsbd_cli.pick.candidate_rows import CandidateRow, group_of_lines
from dsbd_cli.pick.choosers import ByVote, Choice
from tests.cli.conftest import ROOT, Outcome

Dsbd = Callable[..., Outcome]
SPIDER = ROOT / "tests" / "lab" / "tasks" / "data" / "spider" / "database"


def record(name: str, *texts: str, **others: object) -> dict[str, object]:
    beams = [{"text": text, "logprob": -1.0 - i, "score": -0.5 - i} for i, text in enumerate(texts)]
    return {"schema": "dsbd.output/1", "index": 0, "id": name, "key": "k", "beams": beams, **others}


ROWS = [record("a", "x", "y", "y"), record("b", "z", "z"), {"id": "c", "error": {"message": "too long"}}]


def test_one_line_for_every_line(dsbd: Dsbd) -> None:
    done = dsbd("pick", "--by", "vote", lines=[*ROWS, "no record"])
    assert done.code == 3
    assert [line["id"] for line in done.records] == ["a", "b", "c", None]
    assert [line.get("text") for line in done.records] == ["y", "z", None, None]
    assert done.records[0]["pick"] == {
        "by": "vote", "beam": 1, "of": 3, "answer": "y", "votes": 2, "share": 0.666667, "answers": 2,
        "without_answer": 0,
    }  # fmt: skip
    messages = [line["error"]["message"] for line in done.records[2:]]  # type: ignore[index]
    assert messages[0] == "line 3: the row had failed before: 'too long'"
    assert messages[1].startswith("line 4: ")


def test_records_of_generate_go_through_a_pipe(dsbd: Dsbd) -> None:
    for form in ("native", "openai"):
        made = dsbd(
            "generate",
            "--output-format",
            form,
            "--n-best",
            "3",
            lines=[{"id": "q", "prompt": "p", "metadata": {"m": 1}}],
        )
        done = dsbd("pick", "--by", "vote", lines=made.records)
        assert done.code == 0
        assert done.records[0]["text"] == "p!0"
        assert done.records[0]["metadata"] == ({"m": 1} if form == "native" else {"m": "1"})
    assert "score is missing" in dsbd("pick", "--by", "score", lines=made.records).out


def test_resume_and_retry(dsbd: Dsbd, tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    options = ("pick", "--by", "vote", "-o", str(out))
    assert dsbd(*options, lines=ROWS[:1]).code == 0
    first = out.read_bytes()
    with out.open("ab") as stream:
        stream.write(b'{"schema": "dsbd.pick/1", "torn')
    done = dsbd(*options, "--existing", "resume", lines=ROWS)
    assert done.code == 3
    assert "was torn" in done.err
    assert out.read_bytes().startswith(first)
    assert [json.loads(line)["id"] for line in out.read_text().splitlines()] == ["a", "b", "c"]
    whole = out.read_bytes()
    assert dsbd(*options, "--existing", "resume", lines=ROWS).code == 3
    assert out.read_bytes() == whole
    other = dsbd("pick", "--by", "mbr", "-o", str(out), "--existing", "resume", lines=ROWS)
    assert other.code == 2
    assert "made with other settings: --by was 'vote' and is 'mbr'" in other.err
    assert dsbd(*options, "--existing", "retry", lines=ROWS).code == 3
    assert out.read_bytes() == whole


def test_candidates_as_lines_and_back(dsbd: Dsbd) -> None:
    """The file form of mbrs: a candidate a line, as many for every row. An empty candidate is a line too."""
    rows = [record("a", "one two", "one\ntwo", "three"), record("b", "", "b", "b")]
    lines = dsbd("pick", "--output-format", "lines", "--candidates", "3", lines=rows)
    assert lines.out == "one two\none two\nthree\n\nb\nb\n"
    back = dsbd("pick", "--by", "mbr", "--input-format", "lines", "--candidates", "3", lines=lines.out.encode())
    assert [line["text"] for line in back.records] == ["one two", "b"]
    short = dsbd("pick", "--by", "vote", "--input-format", "lines", "--candidates", "4", lines=lines.out.encode())
    assert short.code == 3
    assert "2 lines are left, but a row has 4" in short.out
    for text, kept in ((b"a\nb\n\n\n", ["a", ""]), (b"\n\n", [""]), (b"a\n\n", ["a"])):
        blank = dsbd("pick", "--by", "vote", "--input-format", "lines", "--candidates", "2", lines=text)
        assert (blank.code, [line["text"] for line in blank.records]) == (0, kept), "blank lines at the end count, too"
    uneven = dsbd("pick", "--output-format", "lines", "--candidates", "2", lines=rows[:1])
    assert (uneven.code, uneven.out) == (3, "\n\n")


def test_text_alone(dsbd: Dsbd) -> None:
    assert dsbd("pick", "--by", "vote", "--output-format", "text", lines=ROWS).out == "y\nz\n\n"


def test_sql_that_runs(dsbd: Dsbd) -> None:
    rows = [
        record("a", "SELECT nme FROM singer", "SELECT name FROM singer", metadata={"db_id": "concert"}),
        record("b", "SELECT 1", metadata={"db_id": "gone"}),
    ]
    done = dsbd("pick", "--by", "exec", "--database", f"{SPIDER}/{{db_id}}/{{db_id}}.sqlite", lines=rows)
    assert done.code == 3
    assert done.records[0]["text"] == "SELECT name FROM singer"
    assert done.records[0]["pick"] == {
        "by": "exec", "beam": 1, "of": 2, "ran": 1, "failed": 1, "first_error": "no such column: nme",
    }  # fmt: skip
    assert "gone.sqlite does not exist" in done.out


@pytest.mark.parametrize("terminals", [("stderr",), ()])
def test_nothing_that_runs_is_counted_or_an_error(dsbd: Dsbd, terminals: tuple[str, ...]) -> None:
    """On a terminal, and in a pipe, which says nothing of runs where all went well."""
    rows = [record("a", "x", metadata={"db_id": "concert"}), record("b", "SELECT 1", metadata={"db_id": "pets"})]
    options = ("pick", "--by", "exec", "--database", f"{SPIDER}/{{db_id}}/{{db_id}}.sqlite")
    done = dsbd(*options, lines=rows, terminals=terminals)
    assert (done.code, done.records[0]["text"]) == (0, "x")
    assert "1 row with nothing that runs (--else error makes them fail)" in done.err.replace("\n      ", " ")
    strict = dsbd(*options, "--else", "error", lines=rows)
    assert strict.code == 3
    assert "line 1: none of 1 candidates runs" in strict.records[0]["error"]["message"]  # type: ignore[index]
    assert "nothing that runs" not in strict.err


def test_a_constant_database_is_opened_before_the_input_is_read(dsbd: Dsbd, tmp_path: Path) -> None:
    (tmp_path / "x.sqlite").write_text("no database" * 100)
    missing = str(tmp_path / "no-such-input.jsonl")
    for name, said in (("x.sqlite", "cannot be read: file is not a database"), ("y.sqlite", "does not exist")):
        done = dsbd("pick", "--by", "exec", "--database", str(tmp_path / name), "-i", missing)
        assert (done.code, done.out) == (2, "")
        assert f"--database: {tmp_path}" in done.err
        assert said in done.err


def test_any_exception_in_a_choice_is_the_error_of_its_row(dsbd: Dsbd, monkeypatch: pytest.MonkeyPatch) -> None:
    def choose(self: ByVote, row: CandidateRow) -> Choice:
        if row.id == "a":
            raise OverflowError("too large\nfor a number")
        why = {"answer": "y", "votes": 1, "share": 1.0, "answers": 1, "without_answer": 0}
        return Choice(0, why)

    monkeypatch.setattr(ByVote, "choose", choose)
    done = dsbd("pick", "--by", "vote", lines=[record("a", "x"), record("b", "y")])
    assert (done.code, done.records[1]["text"]) == (3, "y")
    assert done.records[0]["error"] == {
        "type": "RowError", "message": "line 1: OverflowError: too large for a number", "line": 1,
    }  # fmt: skip


@pytest.mark.parametrize("answer", ["1e1000000", "1e999999", "9" * 30_000 + "x"])
def test_a_vote_for_an_absurd_number(dsbd: Dsbd, answer: str) -> None:
    done = dsbd("pick", "--by", "vote", lines=[record("a", answer, answer), record("b", "1")])
    assert done.code == 0
    assert done.records[0]["pick"]["answer"] == answer  # type: ignore[index]


def test_failed_rows_are_named_in_the_end(dsbd: Dsbd, tmp_path: Path) -> None:
    rows = [record("a", "x", "y"), *({"id": f"f\x1b{number}", "error": {"message": "no"}} for number in range(5))]
    out = tmp_path / "out.jsonl"
    done = dsbd("pick", "--by", "vote", "-o", str(out), lines=rows)
    told = done.err.splitlines()
    assert told[:3] == [
        f"dsbd: warning: row {n} (id f\\x1b{n - 1}): line {n + 1}: the row had failed before: 'no'" for n in (1, 2, 3)
    ]
    assert told[3] == f'dsbd: 2 more rows failed: records with "error" in {out}'
    assert told[4].startswith("dsbd: 6 rows, ")
    text = dsbd("pick", "--by", "vote", "--output-format", "text", lines=rows)
    assert text.err.splitlines()[3] == "dsbd: 2 more rows failed: empty lines in standard output"
    assert dsbd("pick", "--by", "vote", "-q", lines=rows).err == ""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_statement_that_never_ends_does_not_keep_a_run_from_stopping(number: signal.Signals) -> None:
    """Guards a statement that was deaf to signals; its row is not written, so a run that goes on chooses for it."""
    endless = "WITH RECURSIVE t(n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM t) SELECT count(*) FROM t"
    rows = [record("a", "SELECT 1"), record("b", endless)]
    options = ["--by", "exec", "--database", str(SPIDER / "pets" / "pets.sqlite"), "--timeout", "1e6"]
    command = [sys.executable, "-m", "dsbd_cli", "pick", *options]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(command, cwd=ROOT, **pipes) as process:  # type: ignore[call-overload]
        process.stdin.write("".join(json.dumps(row) + "\n" for row in rows).encode())
        process.stdin.flush()
        assert json.loads(process.stdout.readline())["id"] == "a"
        process.send_signal(number)
        out, err = process.communicate(timeout=600)
    assert (process.returncode, out) == (128 + number, b"")
    assert b"stopped: 1 row" in err


WRONG = [
    ((), "--by is missing"),
    (("--by", "vote", "--metric", "chrf"), "--metric would do nothing without --by mbr: drop it"),
    (("--by", "score", "--weights", "score"), "--weights would do nothing without --by vote or mbr"),
    (("--by", "exec"), "--by exec needs --database"),
    (("--by", "model", "--model", "m"), "--by model needs --prompts"),
    (("--by", "mbr", "--metric", "comet"), "--metric is 'comet', but must be one of chrf, bleu"),
    (("--by", "vote", "--answer-regex", "("), "--answer-regex is '(', but must be a regex"),
    (("--by", "vote", "--candidates", "3"), "--candidates 3 would do nothing without a format lines"),
    (("--by", "vote", "--input-format", "lines"), "a format lines needs --candidates N"),
    (("--by", "score", "--input-format", "lines", "--candidates", "2"), "but --by score needs records"),
    (("--by", "vote", "--output-format", "lines", "--candidates", "2"), "--by vote would do nothing"),
    (("--by", "exec", "--database", "d", "--timeout", "0"), "--timeout is 0, but must be"),
    (("--by", "vote", "--else", "error"), "--else would do nothing without --by exec: drop it"),
    (("--by", "vote", "--output-format", "text", "--existing", "resume", "-o", "x"), "cannot go on with"),
]


@pytest.mark.parametrize(("options", "message"), WRONG)
def test_options_that_cannot_work(dsbd: Dsbd, options: tuple[str, ...], message: str) -> None:
    done = dsbd("pick", *options, lines=ROWS)
    assert done.code == 2
    assert message in done.err


def test_files_that_a_run_reads_are_not_overwritten(dsbd: Dsbd, tmp_path: Path) -> None:
    """Guards a database, a list of answers or a file of options that its own run replaces."""
    texts = dict.fromkeys(("p.jsonl", "answers.jsonl"), '{"text": "x"}\n') | {
        "schema.json": '{"type": "string"}',
        "job.toml": "num-beams = 2\n",
    }
    kept = {name: tmp_path / name for name in ("a.sqlite", *texts)}
    for name, text in texts.items():
        kept[name].write_text(text)
    with closing(sqlite3.connect(kept["a.sqlite"])) as made:
        made.execute("create table t (a)")
    before = {name: path.read_bytes() for name, path in kept.items()}
    for command, name in (
        ("pick --by exec --database", "a.sqlite"),
        ("pick --by model --model m --prompts", "p.jsonl"),
        ("generate --allow", "answers.jsonl"),
        ("generate --allow", "schema.json"),
        ("generate --config", "job.toml"),
    ):
        done = dsbd(*command.split(), str(kept[name]), "-o", str(kept[name]), "--existing", "overwrite", lines=ROWS)
        assert (done.code, f"--output {kept[name]} is the input" in done.err) == (2, True), done.err
    replaced = ("--database", str(tmp_path / "{name}.sqlite"), "-o", str(kept["a.sqlite"]), "--existing", "overwrite")
    done = dsbd("pick", "--by", "exec", *replaced, lines=ROWS)
    assert (done.code, f"--output {kept['a.sqlite']} is the input" in done.err) == (2, True), done.err
    assert {name: path.read_bytes() for name, path in kept.items()} == before
    # what matches the template and is no database may be gone on with
    (tmp_path / "records.sqlite").write_text("")
    done = dsbd(
        "pick", *replaced[:2], "--by", "exec", "-o", str(tmp_path / "records.sqlite"), *replaced[4:], lines=ROWS
    )
    assert done.code == 3, done.err


def test_a_reward_model_chooses(dsbd: Dsbd, tmp_path: Path) -> None:
    """Its scores are those of transformers on prompt + text; prompts are found by id, in whatever order."""
    from transformers import LlamaConfig, LlamaForSequenceClassification

    from dsbd_cli.config.model import BUILTIN_TARGET, ModelSpec

    spec = ModelSpec(BUILTIN_TARGET)
    tokenizer = Checkpoint.open(spec).tokenizer
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=2, num_labels=1, max_position_embeddings=64, pad_token_id=0,
    )  # fmt: skip
    model = LlamaForSequenceClassification(config).eval()
    model.save_pretrained(tmp_path / "reward")
    tokenizer.save_pretrained(tmp_path / "reward")
    texts = [" moved a boat", " sold", " the harbor"]
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"id": "b", "prompt": "who"}\n{"id": "a", "prompt": "what did Nesen do"}\n')
    rows = [record("a", *texts), record("b", "x" * 2000), record("c", "x")]
    options = ("--model", str(tmp_path / "reward"), "--prompts", str(prompts))
    done = dsbd("pick", "--by", "model", *options, lines=rows)
    assert done.code == 3

    def reward(text: str) -> float:
        ids = tokenizer("what did Nesen do" + text, return_tensors="pt")["input_ids"]
        with torch.no_grad():
            return float(model(input_ids=ids).logits[0, 0])

    want = [reward(text) for text in texts]
    choice = done.records[0]["pick"]
    assert isinstance(choice, dict)
    assert choice["rewards"] == pytest.approx(want, abs=1e-5)
    assert done.records[0]["text"] == texts[want.index(max(want))]
    assert "but the reward model has 64 positions" in done.records[1]["error"]["message"]  # type: ignore[index]
    assert "id is 'c'" in done.records[2]["error"]["message"]  # type: ignore[index]
    done = dsbd("pick", "--by", "model", *options, "--device", "cuda:99", lines=rows)
    assert done.code == 2
    assert "device 'cuda:99' is not there" in done.err
    model.config.num_labels = 2
    LlamaForSequenceClassification(model.config).save_pretrained(tmp_path / "reward")
    done = dsbd("pick", "--by", "model", *options, lines=rows)
    assert done.code == 1
    assert "is no reward model" in done.err


@pytest.fixture(scope="module")
def reward(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny reward model with the built-in tokenizer and a chat template."""
    from transformers import LlamaConfig, LlamaForSequenceClassification

    from dsbd_cli.config.model import BUILTIN_TARGET, ModelSpec

    spec, folder = ModelSpec(BUILTIN_TARGET), tmp_path_factory.mktemp("reward")
    tokenizer = Checkpoint.open(spec).tokenizer
    tokenizer.chat_template = "{% for one in messages %}{{ one.role }}: {{ one.content }}\n{% endfor %}"
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=2, num_labels=1, max_position_embeddings=64, pad_token_id=0,
    )  # fmt: skip
    LlamaForSequenceClassification(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def test_a_reward_model_reads_prompts_as_generate_was_asked(dsbd: Dsbd, reward: Path, tmp_path: Path) -> None:
    """With --chat a prompt is a message. Options of a row do not matter, and rows may have the same id."""
    prompts = tmp_path / "prompts.jsonl"
    asked = [
        {"id": 17, "prompt": "who", "n": 8, "temperature": 0},
        {"id": 17, "prompt": "where"},
        {"id": "m", "messages": [{"role": "user", "content": "who"}]},
        {"id": "bad", "prompt": 3},
    ]
    prompts.write_text("".join(json.dumps(request) + "\n" for request in asked))
    rows = [{**record("x", "he", "she"), "id": request["id"]} for request in asked]
    options = ("--by", "model", "--model", str(reward), "--prompts", str(prompts))
    rewards = {}
    for chat in ("--chat", "--no-chat", "--quiet"):
        done = dsbd("pick", *options, chat, lines=rows)
        assert done.code == 3
        assert [line["id"] for line in done.records] == ["17", "17", "m", "bad"]
        message = done.records[3]["error"]["message"]  # type: ignore[index]
        assert f"{prompts} line 4: prompt is 3" in message
        rewards[chat] = [line["pick"]["rewards"] for line in done.records[:3]]  # type: ignore[index]
    first, second, messages = rewards["--chat"]
    assert first == messages != second
    assert rewards["--no-chat"][0] != first
    assert rewards["--no-chat"] == rewards["--quiet"]
    for chat, warned in (("--chat", False), ("--no-chat", False), ("", True)):
        done = dsbd("pick", *options, *filter(None, [chat]), lines=rows[:1])
        assert ("the reward model has a chat template" in done.err) == warned


def test_a_reward_model_reads_a_template_of_the_run(dsbd: Dsbd, reward: Path, tmp_path: Path) -> None:
    prompts, template = tmp_path / "prompts.jsonl", tmp_path / "own.jinja"
    prompts.write_text('{"id": "a", "prompt": "who"}\n')
    template.write_text("{% for one in messages %}{{ one.content }}{{ mark }}{% endfor %}")
    options = ("--by", "model", "--model", str(reward), "--prompts", str(prompts))

    def rewards(*more: str) -> object:
        done = dsbd("pick", *options, *more, lines=[record("a", "he", "she")])
        assert done.code == 0, done.err
        return done.records[0]["pick"]["rewards"]  # type: ignore[index]

    own = ("--chat", "--set", f"chat-template={template}")
    assert rewards(*own) == rewards("--no-chat") != rewards("--chat")
    assert rewards(*own, "--set", 'chat-template-kwargs={"mark": "!"}') != rewards(*own)
    done = dsbd("pick", "--by", "score", "--set", f"chat-template={template}", lines=[record("a", "he")])
    assert done.code == 2
    assert "--set chat-template would do nothing without --by model: drop it" in done.err


def test_rows_of_one_id_get_their_own_prompts(dsbd: Dsbd, reward: Path, tmp_path: Path) -> None:
    """Whatever became of the rows before: failed, chosen for by an earlier run, or a line that is none and whose number
    is another row's id."""
    prompts = tmp_path / "prompts.jsonl"
    asked = [{"id": "a", "prompt": "who"}, {"id": "a", "prompt": "where"}, {"id": "2", "prompt": "when"}]
    lines = [json.dumps(request) for request in asked]
    prompts.write_text("\n".join([*lines[:2], "not json", lines[2]]))
    options = ("--by", "model", "--model", str(reward), "--prompts", str(prompts), "--no-chat")
    rows: list[dict[str, object]] = [record("a", "he", "she"), record("a", "up", "down"), record("2", "now", "then")]
    whole = dsbd("pick", *options, lines=rows)
    assert whole.code == 0
    failed = dsbd("pick", *options, lines=[{"id": "a", "error": {"message": "too long"}}, *rows[1:]])
    assert [line.get("pick") for line in failed.records[1:]] == [line["pick"] for line in whole.records[1:]]
    out = tmp_path / "out.jsonl"
    assert dsbd("pick", *options, "-o", str(out), lines=rows[:1]).code == 0
    assert dsbd("pick", *options, "-o", str(out), "--existing", "resume", lines=rows).code == 0
    resumed = [json.loads(line) for line in out.read_text().splitlines()]
    assert [line["pick"] for line in resumed] == [line["pick"] for line in whole.records]


@pytest.mark.parametrize("bad", [1.5, "", [1]])
def test_ids_are_read_as_generate_reads_them(dsbd: Dsbd, bad: object) -> None:
    """pandas makes integers of ids. Guards a row's number in place of its id, which joins the wrong rows."""
    done = dsbd("pick", "--by", "score", lines=[{**ROWS[1], "id": 17}, {**ROWS[1], "id": bad}, ROWS[1]])
    assert [line["id"] for line in done.records] == ["17", None, "b"]
    assert "must be a non-empty string or an integer" in done.records[1]["error"]["message"]  # type: ignore[index]


def test_choices_come_as_the_records_come() -> None:
    """Line by line, while the producer still runs, and without torch."""
    code = "import sys; from dsbd_cli.cli.app import run; code = run(sys.argv[1:]); assert 'torch' not in sys.modules"
    command = [sys.executable, "-c", code, "pick", "--by", "mbr"]
    with subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(json.dumps(ROWS[0]).encode() + b"\n")
        process.stdin.flush()
        assert json.loads(process.stdout.readline())["id"] == "a"
        process.stdin.close()
        assert process.wait(60) == 0


def test_a_line_that_is_too_long_is_no_candidate() -> None:
    """Guards its first bytes, which would stand for it."""
    row = group_of_lines([b"a", LongLine(20 << 20, b"aa")], index=0, number=1)
    assert row.candidates == ()
    assert "line 1: one of 2 lines from here on: the line has 20971520 bytes" in str(row.error)
