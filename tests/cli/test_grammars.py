"""Grammars on the command line: files that are read, what is refused, and what stands in a record."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from dsbd_cli.cli.app import run
from dsbd_cli.config.grammars import Grammar
from tests.cli.conftest import Outcome

Dsbd = Callable[..., Outcome]

SCHEMA = {
    "type": "object",
    "properties": {"a": {"enum": ["x", "yy"]}},
    "required": ["a"],
    "additionalProperties": False,
}


@pytest.fixture
def files(tmp_path: Path) -> Path:
    (tmp_path / "good.json").write_text(json.dumps(SCHEMA))
    (tmp_path / "bad.json").write_text('{"properties": {"a": {"not": {}}}}')
    (tmp_path / "broken.json").write_text("{")
    (tmp_path / "list.lark").write_text('start: "a" ("b" | "c")+\n')
    (tmp_path / "bad.lark").write_text("start: other\n")
    (tmp_path / "latin.lark").write_bytes(b"start: \xe9")
    (tmp_path / "zero.json").symlink_to("/dev/zero")
    with (tmp_path / "huge.json").open("wb") as huge:
        huge.truncate(1 << 40)
    return tmp_path


REFUSED = [
    ("--allow {}/none.json", "--allow {}/none.json cannot be read: No such file"),
    ("--allow {}/broken.json", "cannot be used: not valid JSON"),
    ("--allow {}/bad.json --set schema=strict", 'cannot be used: unsupported keywords ["not"] (at /properties/a)'),
    ("--allow {}/bad.lark", 'cannot be used: at 1(8): unknown name: "other"'),
    ("--allow {}/latin.lark", "cannot be read: it is not UTF-8"),
    ("--allow {}/zero.json", "--allow {}/zero.json is no file"),
    ("--allow {}/huge.json", "has 1099511627776 bytes, but a grammar must have at most 16777216"),
    ("--allow regex:a(b", "--allow regex:a(b cannot be used: unclosed group"),
    ("--allow regex:a --stop b", "--stop is ['b'], but a grammar alone says where a text may end"),
    ("--allow regex:a --set gpu=graphs", "--set gpu=graphs cannot be had with a grammar"),
]


@pytest.mark.parametrize(("options", "message"), REFUSED, ids=[options for options, _ in REFUSED])
def test_what_is_refused_before_anything_is_loaded(dsbd: Dsbd, files: Path, options: str, message: str) -> None:
    words = [word.replace("{}", str(files)) for word in options.split()]
    outcome = dsbd("generate", *words, lines=[{"prompt": "a"}])
    assert (outcome.code, outcome.out, outcome.loads) == (2, "", [])
    assert message.replace("{}", str(files)) in outcome.err
    assert outcome.err.count("\n") == 1


@pytest.mark.parametrize("decode", ["search", "sample"])
def test_without_a_draft_the_grammar_drafts(dsbd: Dsbd, files: Path, decode: str) -> None:
    grammar = ["--allow", str(files / "good.json"), "--decode", decode, "--draft", "none"]
    call = dsbd("generate", *grammar, lines=[{"prompt": "a"}]).loads[-1]
    assert (call["method"].drafter, call["draft"]) == ("grammar", None)  # type: ignore[attr-defined]
    call = dsbd("generate", *grammar[2:], lines=[{"prompt": "a"}]).loads[-1]
    assert call["method"].drafter == "suffix"  # type: ignore[attr-defined]


def test_a_rule_that_takes_no_such_drafts_decodes_plainly(dsbd: Dsbd) -> None:
    options = ["--allow", "regex:a", "--draft", "none", "--verify", "with-replacement"]
    [call] = dsbd("generate", *options, lines=[{"prompt": "a"}]).loads
    assert call["method"].depth == 0  # type: ignore[attr-defined]


def test_the_built_in_target_answers_in_json(files: Path) -> None:
    """The command of README and of docs/constraints.md, at a smaller size."""
    lines = [
        {"prompt": "sql:", "n_best": 2},
        {"prompt": "sql:", "response_format": {"type": "json_schema", "json_schema": {"schema": {"const": 5}}}},
        {"prompt": "sql:", "response_format": {"type": "json_object"}, "max_new_tokens": 3},
        {"prompt": "sql:", "response_format": {"type": "text"}, "max_new_tokens": 3},
    ]
    (files / "in.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    options = ["--allow", str(files / "good.json"), "--num-beams", "2", "--draft", "none", "--decode", "search"]
    named = ["-i", str(files / "in.jsonl"), "-o", str(files / "out.jsonl"), "--quiet"]
    assert run(["generate", *options, *named]) == 0
    first, second, third, fourth = map(json.loads, (files / "out.jsonl").read_text().splitlines())
    assert sorted(json.loads(beam["text"])["a"] for beam in first["beams"]) == ["x", "yy"]
    assert [beam["valid"] for beam in first["beams"]] == [True, True]
    assert (second["text"], second["valid"]) == ("5", True)
    assert (third["valid"], isinstance(json.loads(third["text"]), dict)) == (True, True)  # three tokens are enough
    assert "valid" not in fourth
    assert first["stats"]["steps_per_call"] > 2


def test_rows_that_were_cut_are_counted_and_fail_on_demand(files: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The one text needs more tokens than one of the rows has."""
    lines = [{"prompt": "sql:", "max_new_tokens": 2}, {"prompt": "sql:"}]
    (files / "in.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    options = ["--allow", "regex:SELECTED AND ORDERED", "--draft", "none", "--num-beams", "1"]
    options += ["-i", str(files / "in.jsonl")]
    for more, code, failed in (([], 0, 0), (["--set", "require-valid=true"], 3, 1)):
        out = files / f"out{code}.jsonl"
        told = files / f"summary{code}.json"
        assert run(["generate", *options, *more, "-o", str(out), "--quiet", "--set", f"summary={told}"]) == code
        summary = json.loads(told.read_text())
        assert (summary["rows"]["invalid"], summary["rows"]["failed"], summary["exit_code"]) == (1, failed, code)
        first, second = map(json.loads, out.read_text().splitlines())
        assert second["valid"] is True
        if code:
            assert "max_new_tokens is 2, which cut the text before it matched its grammar" in first["error"]["message"]
        else:
            assert first["valid"] is False
    capsys.readouterr()
    run(["generate", *options, "-o", str(files / "out.jsonl")])
    assert "1 cut before they matched their grammar (raise --max-new-tokens)" in capsys.readouterr().err


def test_what_a_grammar_cannot_enforce_is_told_counted_and_refused_on_demand(
    files: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A list of two digits of which the model knows nothing. Of its beams those that hold come first."""
    schema = {"type": "array", "items": {"enum": [1, 2]}, "minItems": 2, "maxItems": 2, "uniqueItems": True}
    (files / "set.json").write_text(json.dumps(schema))
    twins = {**schema, "items": {"const": 1}}
    asked = {"type": "json_schema", "json_schema": {"schema": twins}}
    lines = [{"prompt": "sql:", "n_best": 4}, {"prompt": "sql:", "response_format": asked}]
    (files / "in.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    options = ["--allow", str(files / "set.json"), "--draft", "none", "--num-beams", "4", "--decode", "search"]
    options += ["-i", str(files / "in.jsonl")]
    for more, code in (([], 0), (["--set", "require-valid=true"], 3), (["--set", "schema=strict"], 2)):
        out = files / f"out{code}.jsonl"
        assert run(["generate", *options, *more, "-o", str(out)]) == code
        told = capsys.readouterr().err
        if code == 2:
            assert 'unsupported keywords ["uniqueItems"] (at the root)' in told
            continue
        first, second = map(json.loads, out.read_text().splitlines())
        valid = [beam["valid"] for beam in first["beams"]]
        assert valid == sorted(valid, reverse=True)
        assert {True, False} == set(valid)
        assert [beam["text"] in ("[1, 2]", "[2, 1]") for beam in first["beams"]] == valid
        assert first["beams"][0]["score"] < max(beam["score"] for beam in first["beams"]), "a better one does not hold"
        if code:
            assert "not valid under its schema" in second["error"]["message"]
        else:
            assert (second["text"], second["valid"], second["finish_reason"]) == ("[1, 1]", False, "stop")
            assert "1 not valid under their schema" in told
    assert run(["generate", *options[2:], "--set", "schema=strict", "-o", str(files / "rows.jsonl"), "--quiet"]) == 3
    first, second = map(json.loads, (files / "rows.jsonl").read_text().splitlines())
    assert "error" not in first
    assert 'unsupported keywords ["uniqueItems"]' in second["error"]["message"]


def test_a_schema_that_would_take_the_process_is_an_error_of_its_row(files: Path) -> None:
    links = {f"a{at}": {"allOf": [{"$ref": f"#/$defs/a{at + 1}"}]} for at in range(3_000)}
    schema = {"$defs": {**links, "a3000": {}}, "$ref": "#/$defs/a0"}
    asked = {"type": "json_schema", "json_schema": {"schema": schema}}
    lines = [{"prompt": "sql:", "response_format": asked}, {"prompt": "sql:", "max_new_tokens": 2}]
    (files / "in.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    named = ["-i", str(files / "in.jsonl"), "-o", str(files / "out.jsonl"), "--quiet"]
    assert run(["generate", "--draft", "none", "--num-beams", "1", *named]) == 3
    first, second = map(json.loads, (files / "out.jsonl").read_text().splitlines())
    assert "references lead through more than 500 levels" in first["error"]["message"]
    assert second["text"]


def test_runs_with_other_grammars_are_told_apart() -> None:
    assert Grammar.regex("a").name != Grammar.regex("b").name
    assert Grammar.regex("a").name != Grammar.lark("a").name
    assert re.fullmatch("regex [0-9a-f]{16}", Grammar.regex("a").name)
