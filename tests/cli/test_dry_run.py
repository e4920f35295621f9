"""generate --dry-run: what it says of an input, beside what a run then does with it."""

from __future__ import annotations

import io
import json
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dsbd_cli.cli.app import run
from dsbd_cli.errors import InvalidRowError
from dsbd_cli.models.tokenizer import AheadCodec
from tests.cli.conftest import ROOT, Outcome
from tests.cli.test_encoder_decoder import pair as encoder_pair  # noqa: F401 - a fixture
from tests.cli.test_real_engine import LINES, Call, generate, pair  # noqa: F401 - fixtures
from tests.helpers.checkpoints import byte_level, wrap

Models = tuple[str, str]


@pytest.fixture
def dry(pair: Models, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:  # noqa: F811
    """dsbd generate --dry-run over checkpoints that have no weights: the document, or the lines."""
    models = []
    for name, folder in zip(("target", "draft"), pair, strict=True):
        copy = shutil.copytree(folder, tmp_path / name)
        (copy / "model.safetensors").unlink()
        models += [f"--{name}", str(copy)]

    def call(*options: str, lines: list[str] = LINES, code: int = 3, text: bool = False) -> Any:
        written = io.TextIOWrapper(io.BytesIO(), encoding="utf-8", write_through=True)
        stdin = io.TextIOWrapper(io.BytesIO("\n".join(lines).encode()), encoding="utf-8")
        with monkeypatch.context() as patch:
            patch.setattr(sys, "stdout", written)
            patch.setattr(sys, "stdin", stdin)
            form = () if text else ("--set", "log=json")
            arguments = ("--max-new-tokens", "8", "--dtype", "float32", *form, *options)
            assert run(["generate", "--dry-run", *models, *arguments]) == code
        assert isinstance(written.buffer, io.BytesIO)
        printed = written.buffer.getvalue().decode()
        return printed if text or not printed else json.loads(printed)

    return call


def test_it_says_what_the_run_then_does(dry: Callable[..., Any], generate: Call) -> None:  # noqa: F811
    """Bad rows and their reasons are those of the run's records, with one draft as with another."""
    schema = {"type": "json_schema", "json_schema": {"schema": {"type": "nothing"}}}
    lines = [*LINES, json.dumps({"id": "g", "prompt": "x", "response_format": schema})]
    for options in ((), ("--draft", "none"), ("--set", "on-too-long=truncate-left")):
        report = dry(*options, lines=lines)
        records = generate(*options, lines=lines)
        failed = [record for record in records if "error" in record]
        wanted = [
            {"index": row["index"], "id": row["id"], **row["error"]}  # type: ignore[dict-item]
            for row in failed
        ]
        assert report["bad_rows"] == wanted
        assert report["rows"]["to_answer"] == len(records) - len(failed)
        counts = [record["usage"]["prompt_tokens"] for record in records if "usage" in record]  # type: ignore[index]
        assert set(counts) <= {
            report["tokens"]["longest"],
            report["tokens"]["median"],
            *range(report["tokens"]["longest"]),
        }
        assert report["tokens"]["total"] >= sum(counts)


def test_the_lines_for_people(dry: Callable[..., Any], tmp_path: Path) -> None:
    lines = [
        '{"id": "a", "prompt": "The quick"}',
        "not json",
        '{"id": "a", "prompt": "The quick fox"}',
        '{"id": "\\u001b[31m", "prompt": "x", "temperature": "hot"}',
        json.dumps({"id": "long", "prompt": "quick " * 30, "max_new_tokens": 500}),
    ]
    (tmp_path / "in.jsonl").write_text("\n".join(lines))
    printed = dry("-i", str(tmp_path / "in.jsonl"), lines=[], text=True)
    document = dry("-i", str(tmp_path / "in.jsonl"), lines=[])
    tokens = document["tokens"]
    assert [" ".join(line.split()) for line in printed.splitlines()[:6]] == [
        f"rows 5 of {tmp_path / 'in.jsonl'}",
        "to answer 2",
        "bad 3",
        f"too long 1 of these, for {tokens['positions']} positions",
        "double ids 1",
        f"prompt tokens {tokens['total']} median {tokens['median']:g}, longest {tokens['longest']} (line 5)",
    ]
    bad = printed.splitlines()[7:]
    assert [line.partition(":")[0] for line in bad] == ["line 2", "line 4", "line 5"]
    assert bad[0].endswith(" (no id)")
    assert bad[1].endswith(r" (id \x1b[31m)"), "no id may move the cursor of a terminal"
    assert "\x1b" not in printed
    many = dry(lines=["x"] * 50, text=True)
    assert many.splitlines()[-1] == "and 30 more bad rows: --set log=json lists them all"
    assert len(dry(lines=["x"] * 50)["bad_rows"]) == 50


def test_what_the_encoder_tells_is_printed_once(
    dry: Callable[..., Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Guards a line that a run prints and --dry-run does not."""
    (tmp_path / "template.jinja").write_text("<think></think>{{ messages[0].content }}")
    row = json.dumps({"prompt": "x<think>", "response_format": {"type": "json_object"}})
    dry("--set", f"chat-template={tmp_path / 'template.jinja'}", "--no-chat", lines=[row, row], code=0)
    assert capsys.readouterr().err.count("a prompt ends with <think>, but a grammar") == 1


def test_a_file_without_faults(dry: Callable[..., Any]) -> None:
    report = dry(lines=['{"prompt": "The quick"}', "", '{"prompt": "fox"}'], code=0)
    assert (report["rows"]["read"], report["rows"]["to_answer"], report["bad_rows"]) == (2, 2, [])
    assert dry(lines=[], code=0)["tokens"] == {
        "total": 0, "median": None, "longest": None, "longest_line": None, "positions": None,
    }  # fmt: skip


def test_what_is_left_to_do_after_a_resume(
    dry: Callable[..., Any],
    generate: Call,  # noqa: F811
    pair: Models,  # noqa: F811
    tmp_path: Path,
) -> None:
    """Nothing of the output changes, torn lines and failed records included."""
    path, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    same = ("--target", pair[0], "--draft", pair[1], "-i", str(path), "-o", str(out))  # with their weights
    path.write_text("\n".join(LINES))
    assert dry(*same, "--existing", "resume")["rows"]["done_before"] == 0
    assert not out.exists()
    generate("-i", str(path), "-o", str(out), lines=[])
    text = out.read_text().splitlines(keepends=True)
    out.write_text("".join(text[:3]) + text[3][:9])
    path.write_text("\n".join(['{"id": "a", "prompt": "changed"}', *LINES[1:]]))
    before = {file.name: file.read_bytes() for file in tmp_path.iterdir() if file.is_file()}
    for existing, done, failed, bad in (("resume", 2, 1, 2), ("retry", 1, 0, 3), ("overwrite", 0, 0, 3)):
        counts = dry(*same, "--existing", existing)["rows"]
        assert (counts["done_before"], counts["failed_before"], counts["bad"]) == (done, failed, bad), existing
        assert counts["read"] == 6
        assert counts["gone"] == (existing != "overwrite")
    assert {file.name: file.read_bytes() for file in tmp_path.iterdir() if file.is_file()} == before
    line = dry(*same, "--existing", "resume", text=True).splitlines()[1]
    assert " ".join(line.split()) == f"done before 2 in {out}, 1 of them failed: --existing retry answers them again"
    assert dry(*same, code=2) == "", "the run would not begin"
    assert dry(*same, "--existing", "resume", "--num-beams", "2", code=2) == ""


def test_tables_shards_job_files_and_answers(dry: Callable[..., Any], tmp_path: Path) -> None:
    path = tmp_path / "in.csv"
    path.write_text("key,question,n\na,The quick,3\nb,fox,2\nc\nd,select name,1\n")
    (tmp_path / "job.toml").write_text('columns = "prompt=question,id=key"\nworkers = 2\nbatch_size = 4\n')
    job = ("--config", str(tmp_path / "job.toml"), "-i", str(path))
    report = dry(*job)
    assert [(bad_row["id"], bad_row["line"]) for bad_row in report["bad_rows"]] == [("c", 4)]
    assert report["rows"]["to_answer"] == 3
    shard = dry(*job, "--shard", "1/2", "-o", str(tmp_path / "out"), code=0)
    assert (shard["rows"]["read"], shard["rows"]["to_answer"]) == (2, 2)
    assert not list(tmp_path.glob("out*"))
    (tmp_path / "answers.txt").write_text(" fox\n the lazy dog\n")
    limited = dry("--allow", str(tmp_path / "answers.txt"), "--max-new-tokens", "1", lines=LINES[:1])
    assert "but the longest allowed answer has" in limited["bad_rows"][0]["message"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--set", "stats=s"), "--set stats would do nothing, because --dry-run answers nothing: drop it"),
        (("--set", "summary=s"), "--set summary would do nothing, because --dry-run answers nothing"),
        (("--print-config",), "--dry-run and --print-config cannot be used together"),
        (("--target", "no-such-model"), "no-such-model"),
    ],
)
def test_what_cannot_act_is_refused(
    dry: Callable[..., Any], capsys: pytest.CaptureFixture[str], options: tuple[str, ...], message: str
) -> None:
    assert dry(*options, code=2 if "target" not in options[0] else 1) == ""
    assert message in capsys.readouterr().err


def test_it_is_for_one_run(dsbd: Callable[..., Outcome], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "job.toml").write_text("dry_run = true\n")
    refused = dsbd("generate", "--config", str(tmp_path / "job.toml"))
    assert (refused.code, "dry_run is no option of a job" in refused.err) == (2, True)
    monkeypatch.setenv("DSBD_DRY_RUN", "1")
    refused = dsbd("generate")
    assert (refused.code, "the variable DSBD_DRY_RUN is set, but" in refused.err) == (2, True)


def test_an_encoder_is_refused(
    encoder_pair: Models,  # noqa: F811
    dry: Callable[..., Any],
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert dry("--target", encoder_pair[0], "--draft", "none", lines=LINES[:1], code=1) == ""
    assert "has an encoder, whose input is not made without the model: only a decoder-only target takes --dry-run" in (
        capsys.readouterr().err
    )


def test_prompts_that_are_tokenized_together_have_the_same_tokens() -> None:
    """Also where the tokenizer fails on one of them."""
    codec = AheadCodec(wrap(byte_level()), (0,))
    prompts = ["The quick", "", "fox", "The quick", "é\x00"]
    alone = [codec.encode(prompt) for prompt in prompts]
    assert codec.read_ahead(prompts) == dict(zip(prompts, alone, strict=True))
    assert [codec.encode(prompt) for prompt in prompts] == alone

    class Failing(AheadCodec):
        def _encoded(self, text: str | list[str], *, add_special_tokens: bool) -> Any:
            if isinstance(text, list):
                raise InvalidRowError("the tokenizer fails on this text")
            return super()._encoded(text, add_special_tokens=add_special_tokens)

    failing = Failing(wrap(byte_level()), (0,))
    assert failing.read_ahead(prompts) == {}
    assert [failing.encode(prompt) for prompt in prompts] == alone


def test_ctrl_c_ends_it() -> None:
    command = [
        sys.executable,
        "-m",
        "dsbd_cli",
        "generate",
        "--dry-run",
        "--target",
        "builtin:target",
        "--set",
        "log=verbose",
    ]
    process = subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdin is not None
    assert process.stderr is not None
    process.stdin.write(b'{"prompt": "a"}\n')
    process.stdin.flush()
    for line in iter(process.stderr.readline, b""):
        if b"the input is read, and nothing is answered" in line:
            break
    process.send_signal(signal.SIGINT)
    out, err = process.communicate()
    assert (process.returncode, out) == (130, b"")
    assert b"dsbd: stopped after " in err
