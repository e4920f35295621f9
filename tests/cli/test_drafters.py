"""`--drafter` and `dsbd index` from the command line: what is refused, and that it works with the built-in target."""

from __future__ import annotations

import gzip
import json
import os
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from dsbd_cli.config.variants import DRAFTERS, runs_model
from dsbd_cli.errors import InvalidRowError
from dsbd_cli.io.lines.replace import replacing
from dsbd_cli.models.tokenizer import HFCodec
from tests.cli.conftest import ROOT, Outcome, of_rule

Dsbd = Callable[..., Outcome]

REFUSED = [
    ("--drafter nosuch", "must be one of beam"),
    ("--drafter beam+ngram+retrieval", "must be one of beam"),
    ("--drafter beam+beam", "the same one drafts the same nodes"),
    ("--drafter ngram+ngram", "the same one drafts the same nodes"),
    ("--drafter ngram+beam", "must be beam+ngram: the one that runs the draft model stands first"),
    ("--drafter rsd-s+bridge", "fuses with none"),
    ("--drafter beam+rsd-s", "the second of two must be one of ngram, suffix, retrieval, grammar"),
    ("--drafter rsd-c+dynamic-tree", "the second of two must be one of ngram, suffix, retrieval, grammar"),
    ("--drafter beam+ngram --draft none", "needs a draft model"),
    ("--drafter rsd-s+ngram --set width=threshold", "use width fixed"),
    ("--drafter ngram --draft builtin:draft", "runs no model"),
    ("--drafter rsd-c --draft none", "needs a draft model"),
    ("--drafter ngram --depth 0", "--depth is 0, but must be 1 or more"),
    ("--drafter retrieval", "--drafter retrieval: index is missing: it is spelled retrieval:INDEX"),
    ("--drafter retrieval:", "index is missing"),
    ("--drafter beam:x", "--drafter beam:x: it has no settings: it is spelled beam"),
    ("--drafter ngram:index=x", "there is no setting 'index': it is spelled ngram[:LONGEST]"),
    ("--drafter ngram --set width=threshold", "use width fixed"),
    ("--drafter rsd-s --set width=threshold --verify rejection", "use width fixed"),
    ("--drafter dynamic-tree+ngram --set width=threshold", "use width fixed"),
    ("--drafter rsd-s --verify with-replacement", "only drafter beam"),
    ("--drafter beam+ngram --verify with-replacement", "only drafter beam"),
    ("--drafter rsd-c:top-k", "branching is 'top-k', but must be an integer, 0 (as many as fit) or more"),
    ("--drafter ngram:share=2", "there is no setting 'share': it is spelled ngram[:LONGEST]"),
    ("--drafter beam:share=2+ngram", "--drafter beam:share=2+ngram: it has no settings: it is spelled beam"),
    (
        "--drafter retrieval:x+ngram:top-k=2",
        "there is no setting 'top-k': it is spelled retrieval+ngram[:LONGEST[,share=...]]",
    ),
    ("--drafter beam+ngram:share=8", "share of --drafter is 8, but must be between 1 and 7 (K - 1)"),
    ("--drafter beam+ngram --drafts-per-layer 1 --num-beams 1", "2 or more for two drafters"),
    ("--drafter rsd-c:-1", "branching is -1, but must be 0 (as many as fit) or more"),
    (
        "--drafter ngram:0",
        "--drafter ngram:0: longest is 0, but must be 1 or more and at most 1000: it is spelled ngram[:LONGEST]",
    ),
    ("--drafter ngram:1000000000", "longest is 1000000000, but must be 1 or more and at most 1000"),
    (f"--drafter rsd-c:{10**30}", f"branching is {10**30}, but must be 0 (as many as fit) or more and at most 2147483"),
    ("--drafter ngram:3,longest=2", "longest is given twice"),
    ("--drafter ngram:3,2", "longest is '3,2', but must be an integer, 1 or more"),
    ("--drafter dynamic-tree:threshold", "tree is 'threshold', but must be one of greedy, top-k"),
    ("--drafter beam+ngram:top-k=-1", "top-k is -1, but must be 0 (keep all) or more"),
]


@pytest.mark.parametrize(("options", "message"), REFUSED, ids=[options for options, _ in REFUSED])
def test_what_cannot_work_together_is_refused(dsbd: Dsbd, options: str, message: str) -> None:
    outcome = dsbd("generate", *options.split(), lines=[{"prompt": "a"}])
    assert (outcome.code, outcome.out, outcome.loads) == (2, "", [])
    assert message in outcome.err
    assert outcome.err.count("\n") == 1


@pytest.mark.parametrize("rule", ["coupled", "rejection", "search"])
@pytest.mark.parametrize("drafter", [*DRAFTERS, "beam+ngram", "rsd-c+retrieval", "ngram+retrieval"])
def test_every_drafter_is_settled(dsbd: Dsbd, drafter: str, rule: str) -> None:
    spelled = drafter.replace("retrieval", "retrieval:x")
    outcome = dsbd("generate", "--drafter", spelled, *of_rule(rule), lines=[{"prompt": "a"}])
    assert (outcome.code, outcome.err) == (0, "")
    [call] = outcome.loads
    method = call["method"]
    assert method.drafter == drafter
    deep = drafter == "grammar" or (drafter == "suffix" and rule != "rejection")
    depth = 16 if deep else 4 if rule == "rejection" else 8
    assert (method.depth, method.adaptive_depth) == (depth, rule != "rejection")
    pool = drafter.startswith("beam")
    assert method.width == ("threshold" if rule == "rejection" and pool else "fixed")
    assert (call["draft"] is not None) == runs_model(drafter) == method.needs_draft
    [record] = outcome.records
    assert record["method"]["drafter"] == drafter
    assert ("ngram" in record["method"]) == ("ngram" in drafter)
    if "+" in drafter:
        assert (record["method"]["fusion_top_k"] is None) == (drafter == "ngram+retrieval")


SPELLED: list[tuple[str, dict[str, object]]] = [
    ("ngram:7", {"drafter": "ngram", "ngram": 7}),
    ("ngram:longest=7", {"drafter": "ngram", "ngram": 7}),
    ("rsd-c:2+ngram:3,share=2,top-k=0", {"branching": 2, "ngram": 3, "second_drafts": 2, "fusion_top_k": 0}),
    ("beam+ngram:share=3", {"drafter": "beam+ngram", "second_drafts": 3}),
    ("dynamic-tree:top-k", {"tree": "top-k"}),
    ("retrieval:my corpus,v=2+x.index", {"drafter": "retrieval", "index": "my corpus,v=2+x.index"}),
    ("beam+retrieval:a+b.index,share=2", {"drafter": "beam+retrieval", "index": "a+b.index", "second_drafts": 2}),
    ("retrieval:x+ngram:2", {"drafter": "retrieval+ngram", "index": "x", "ngram": 2}),
]


@pytest.mark.parametrize(("spelled", "fields"), SPELLED, ids=[spelled for spelled, _ in SPELLED])
def test_a_drafter_is_spelled_with_its_settings(
    dsbd: Dsbd, spelled: str, fields: dict[str, object], tmp_path: Path
) -> None:
    job = tmp_path / "job.toml"
    job.write_text(f"drafter = {json.dumps(spelled)}\n")
    for words in (("--drafter", spelled), ("--config", str(job))):
        outcome = dsbd("generate", *words)
        assert (outcome.code, outcome.err) == (0, "")
        method = outcome.loads[-1]["method"]
        resolved = {**asdict(method), **method.resolved}
        assert {name: resolved[name] for name in fields} == fields


LINES = (ROOT / "sample_inputs" / "prompts.jsonl").read_bytes().splitlines(keepends=True)[:2]


@pytest.fixture
def builtin(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Outcome]:
    """`dsbd` in this process with the real engine."""
    import io
    import sys

    from dsbd_cli.cli.app import run

    def call(*arguments: str) -> Outcome:
        streams = {
            name: io.TextIOWrapper(io.BytesIO(), encoding="utf-8", write_through=True) for name in ("out", "err")
        }
        with monkeypatch.context() as patch:
            patch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"".join(LINES)), encoding="utf-8"))
            patch.setattr(sys, "stdout", streams["out"])
            patch.setattr(sys, "stderr", streams["err"])
            code = run(arguments)
        out, err = (stream.buffer.getvalue().decode() for stream in streams.values())  # type: ignore[attr-defined]
        return Outcome(code, out, err)

    return call


def texts(outcome: Outcome) -> list[object]:
    assert outcome.code == 0, outcome.err
    return [record["text"] for record in outcome.records]


def test_no_draft_model_at_all(builtin: Callable[..., Outcome], tmp_path: Path) -> None:
    """An index of the right answers saves calls; the text is what it is without any drafter."""
    options = ("generate", "--max-new-tokens", "16", "--decode", "search", "--num-beams", "2")
    plain = builtin(*options, "--draft", "none")
    looked_up = builtin(*options, "--draft", "none", "--drafter", "ngram", "--depth", "4")
    assert texts(looked_up) == texts(plain)
    [*stats] = [record["stats"] for record in looked_up.records]
    assert all(entry["draft_calls"] == 0 < entry["drafted"] for entry in stats)
    corpus = tmp_path / "answers.jsonl.gz"
    answers = [
        {"answer": json.loads(line)["prompt"] + str(text)} for line, text in zip(LINES, texts(plain), strict=True)
    ]
    corpus.write_bytes(gzip.compress("\n".join(map(json.dumps, answers)).encode()))
    index = str(tmp_path / "index")
    made = builtin("index", str(corpus), "--field", "answer", "-o", index)
    assert (made.code, made.out) == (0, "")
    assert "2 documents" in made.err
    assert builtin("index", str(corpus), "-o", index).code == 2  # it exists
    retrieved = builtin(*options, "--drafter", f"retrieval:{index}", "--depth", "4")
    assert texts(retrieved) == texts(plain)
    assert sum(r["stats"]["accepted"] for r in retrieved.records) > sum(entry["accepted"] for entry in stats)


BAD = [
    ("a.txt", b"\xff\xfe", "line 1 is not UTF-8"),
    ("a.jsonl", b'{"text": "a"}\n{"txt": 1}\n', "line 2 has no text in its field 'text'"),
    ("a.jsonl", b"[1]\n", "line 1 has no text in its field 'text'"),
    ("a.jsonl", b"{\n", "line 1 is not JSON"),
    ("a.txt", b"", "no tokens"),
    ("a.txt.gz", b"no gzip", "cannot be read"),
    ("", b"", "is no file"),
]


@pytest.mark.parametrize(("name", "data", "message"), BAD, ids=[message for _, _, message in BAD])
def test_a_bad_corpus_is_refused(
    builtin: Callable[..., Outcome], name: str, data: bytes, message: str, tmp_path: Path
) -> None:
    path = tmp_path / name
    if name:
        path.write_bytes(data)
    outcome = builtin("index", str(path), "-q", "-o", str(tmp_path / "out"))
    assert outcome.code == 2
    assert message in outcome.err
    assert outcome.err.count("\n") == 1
    assert not (tmp_path / "out").exists()


def test_an_index_replaces_files_only(builtin: Callable[..., Outcome], tmp_path: Path) -> None:
    """Guards /dev/null of a root user, in whose place a file would stand."""
    (tmp_path / "texts").write_text("a b a b")
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    made = builtin("index", str(tmp_path / "texts"), "-o", str(pipe), "--existing", "overwrite")
    assert (made.code, "is no ordinary file" in made.err) == (2, True), made.err
    assert pipe.is_fifo()


def test_a_text_that_the_tokenizer_refuses_names_its_file(
    builtin: Callable[..., Outcome], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> Any:
        raise InvalidRowError("the tokenizer fails on this text: no")

    (tmp_path / "texts").write_text("a b")
    monkeypatch.setattr(HFCodec, "encode_pieces", fail)
    made = builtin("index", str(tmp_path / "texts"), "-o", str(tmp_path / "out"))
    assert made.code == 2
    assert f"{tmp_path / 'texts'}, document 1 of all: the tokenizer fails on this text: no" in made.err
    assert not (tmp_path / "out").exists()


def test_a_second_index_of_one_name_is_refused_before_it_reads(builtin: Callable[..., Outcome], tmp_path: Path) -> None:
    """Guards a file that two commands write into at once, and hours of sorting that end in an error."""
    (tmp_path / "texts").write_text("a b a b")
    output = tmp_path / "out"
    with replacing(output) as stream:
        refused = builtin("index", str(tmp_path / "texts"), "-o", str(output))
    stream.close()
    assert (refused.code, f"{output} is being written by another process" in refused.err) == (1, True), refused.err


def test_an_index_does_not_replace_its_corpus(builtin: Callable[..., Outcome], tmp_path: Path) -> None:
    corpus = tmp_path / "texts.jsonl"
    corpus.write_text('{"text": "a b a b"}\n')
    (tmp_path / "link").symlink_to(corpus)
    (tmp_path / "model.gguf").write_text('{"text": "a b a b"}\n')
    made = builtin(
        "index", str(corpus), "-o", str(tmp_path / "model.gguf"), "--target", str(tmp_path / "model.gguf"),
        "--existing", "overwrite",
    )  # fmt: skip
    assert (made.code, "model.gguf is the input: name another file" in made.err) == (2, True), made.err
    for output in (corpus, tmp_path / "link"):
        made = builtin("index", str(corpus), "-o", str(output), "--existing", "overwrite")
        assert (made.code, f"--output {output} is the input: name another file" in made.err) == (2, True), made.err
    assert corpus.read_text() == '{"text": "a b a b"}\n'


def test_an_index_leaves_its_neighbours_alone(builtin: Callable[..., Outcome], tmp_path: Path) -> None:
    """Guards a corpus that is called as the index is while it is written; and a link, which stays one."""
    corpus = tmp_path / "texts.part"
    corpus.write_text("a b a b")
    (tmp_path / "texts").symlink_to(tmp_path / "index")
    (tmp_path / "index").write_text("old")
    made = builtin("index", str(corpus), "-o", str(tmp_path / "texts"), "--existing", "overwrite")
    assert made.code == 0, made.err
    assert corpus.read_text() == "a b a b"
    assert (tmp_path / "texts").is_symlink()
    assert sorted(path.name for path in tmp_path.iterdir() if path.name.startswith(("texts", "index", ".texts"))) == [
        "index",
        "texts",
        "texts.part",
    ]


@pytest.mark.parametrize(
    ("output", "message"),
    [
        ("-", "--output needs a file, but - is standard output"),
        (".", "is a folder"),
        ("nowhere/x", "nowhere does not exist"),
        ("x" * 255, "File name too long"),
    ],
)
def test_an_index_that_cannot_be_written_is_found_before_the_corpus_is_read(
    builtin: Callable[..., Outcome], tmp_path: Path, output: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "texts.jsonl").write_text("no JSON")
    made = builtin("index", "texts.jsonl", "-o", output)
    assert message in made.err
    assert made.err.count("\n") == 1
