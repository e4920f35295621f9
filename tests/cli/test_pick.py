"""`dsbd pick` as it is typed: pipes, resuming, rows that fail, options that cannot work together."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.cli.conftest import ROOT, Outcome

Dsbd = Callable[..., Outcome]
SPIDER = ROOT / "tests" / "tasks" / "data" / "spider" / "database"


def record(name: str, *texts: str, **others: object) -> dict[str, object]:
    beams = [{"text": text, "logprob": -1.0 - i, "score": -0.5 - i} for i, text in enumerate(texts)]
    return {"schema": "dsbd.output/1", "index": 0, "id": name, "key": "k", "beams": beams, **others}


ROWS = [record("a", "x", "y", "y"), record("b", "z", "z"), {"id": "c", "error": {"message": "too long"}}]


def test_one_line_for_every_line(dsbd: Dsbd) -> None:
    done = dsbd("pick", "--by", "vote", lines=[*ROWS, "no record"])
    assert done.code == 3
    assert [line["id"] for line in done.records] == ["a", "b", "c", "3"]
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
    assert "by was 'vote' and is 'mbr'" in other.err
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
    (("--by", "vote", "--output-format", "text", "--existing", "resume", "-o", "x"), "cannot go on with"),
]


@pytest.mark.parametrize(("options", "message"), WRONG)
def test_options_that_cannot_work(dsbd: Dsbd, options: tuple[str, ...], message: str) -> None:
    done = dsbd("pick", *options, lines=ROWS)
    assert done.code == 2
    assert message in done.err


def test_a_reward_model_chooses(dsbd: Dsbd, tmp_path: Path) -> None:
    """Its scores are those of transformers on prompt + text; prompts are found by id, in whatever order."""
    from transformers import LlamaConfig, LlamaForSequenceClassification

    from dsbd_cli.config import BUILTIN_TARGET, ModelSpec
    from dsbd_cli.engine.models.hub import locate
    from dsbd_cli.engine.models.loader import load_tokenizer

    spec = ModelSpec(BUILTIN_TARGET)
    tokenizer = load_tokenizer(locate(spec), spec)
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
    found = done.records[0]["pick"]
    assert isinstance(found, dict)
    assert found["rewards"] == pytest.approx(want, abs=1e-5)
    assert done.records[0]["text"] == texts[want.index(max(want))]
    assert "but the reward model has 64 positions" in done.records[1]["error"]["message"]  # type: ignore[index]
    assert "id is 'c'" in done.records[2]["error"]["message"]  # type: ignore[index]
    model.config.num_labels = 2
    LlamaForSequenceClassification(model.config).save_pretrained(tmp_path / "reward")
    done = dsbd("pick", "--by", "model", *options, lines=rows)
    assert done.code == 1
    assert "is no reward model" in done.err


def test_choices_come_as_the_records_come() -> None:
    """Line by line, while the producer still runs, and without torch."""
    code = (
        "import sys; from dsbd_cli.job.cli.app import run; code = run(sys.argv[1:]); assert 'torch' not in sys.modules"
    )
    command = [sys.executable, "-c", code, "pick", "--by", "mbr"]
    with subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(json.dumps(ROWS[0]).encode() + b"\n")
        process.stdin.flush()
        assert json.loads(process.stdout.readline())["id"] == "a"
        process.stdin.close()
        assert process.wait(60) == 0
