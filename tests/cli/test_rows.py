"""Forms of input and output, and rows that fail."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from pathlib import Path

import pytest

from dsbd_cli.io.lines.compression import frame_maker
from tests.cli.conftest import Outcome

Dsbd = Callable[..., Outcome]


def rows(*texts: str) -> list[object]:
    return [{"id": f"r{number}", "prompt": text} for number, text in enumerate(texts)]


def test_lines_of_text_in_and_out(dsbd: Dsbd) -> None:
    outcome = dsbd("generate", "--input-format", "text", "--output-format", "text", lines=b'a "b"\n\n\xc3\xa9\tc\r\n')
    assert (outcome.code, outcome.out) == (0, 'a \\"b\\"!0\né\\tc!0\n')


def test_an_openai_batch_in_and_out(dsbd: Dsbd) -> None:
    body = {"model": "m", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 3}
    line = {"custom_id": "c", "method": "POST", "url": "/v1/chat/completions", "body": body}
    outcome = dsbd("generate", "--output-format", "openai", lines=[line, {"id": "f", "prompt": "fail"}])
    assert outcome.code == 3
    good, bad = outcome.records
    assert (good["custom_id"], good["response"]["status_code"]) == ("c", 200)
    assert good["response"]["body"]["choices"][0]["message"]["content"] == "hi!0"
    assert (bad["custom_id"], bad["response"]["status_code"]) == ("f", 400)


def test_a_compressed_file_in_and_out(dsbd: Dsbd, tmp_path: Path) -> None:
    (tmp_path / "in.gz").write_bytes(gzip.compress(b'{"prompt": "a"}\n{"prompt": "b"}\n'))
    assert dsbd("generate", "-i", str(tmp_path / "in.gz"), "-o", str(tmp_path / "out.gz")).code == 0
    lines = gzip.decompress((tmp_path / "out.gz").read_bytes()).splitlines()
    assert [json.loads(line)["text"] for line in lines] == ["a!0", "b!0"]


@pytest.mark.parametrize("suffix", [".gz", ".zst"])
def test_a_cut_input_is_told_before_a_model_is_loaded(dsbd: Dsbd, tmp_path: Path, suffix: str) -> None:
    import random

    noise = random.Random(0).randbytes(20000).hex()
    source = tmp_path / f"in{suffix}"
    compress = frame_maker(source)
    assert compress is not None
    whole = compress(b'{"prompt": "a"}\n' + f'{{"prompt": "{noise}"}}\n'.encode())
    source.write_bytes(whole[:-3000])
    outcome = dsbd("generate", "-i", str(source))
    assert (outcome.code, outcome.out, outcome.loads) == (2, "", [])
    assert f"--input {source} cannot be read: the compressed data ends in the middle" in outcome.err
    source.write_bytes(whole)
    assert dsbd("generate", "-i", str(source)).records[0]["text"] == "a!0"


NEEDS_NONE: dict[str, tuple[bytes, int]] = {
    "no row": (b"", 0),
    "blank lines": (b"\n \n", 0),
    "rows that cannot be read": (b'broken\n{"prompt": 5}\n{"id": "x"}\n', 3),
}


@pytest.mark.parametrize(("lines", "failed"), NEEDS_NONE.values(), ids=NEEDS_NONE)
def test_without_a_row_to_answer_no_model_is_loaded(dsbd: Dsbd, tmp_path: Path, lines: bytes, failed: int) -> None:
    output = tmp_path / "out.jsonl"
    outcome = dsbd("generate", "-o", str(output), "--set", f"summary={tmp_path / 's'}", lines=lines)
    assert (outcome.code, outcome.loads) == (3 if failed else 0, [])
    assert ["error" in json.loads(line) for line in output.read_bytes().splitlines()] == [True] * failed
    again = dsbd("generate", "-o", str(output), "--existing", "retry", lines=lines)
    assert (again.code, again.loads) == (3 if failed else 0, []), "retried rows fail again without a model"
    assert len(output.read_bytes().splitlines()) == failed
    assert json.loads((tmp_path / "s").read_bytes())["ending"] == "complete"


def test_the_model_is_loaded_at_the_first_row_that_needs_it(dsbd: Dsbd) -> None:
    outcome = dsbd("generate", lines=b'broken\n{"prompt": "a"}\nbroken\n')
    assert (outcome.code, len(outcome.loads)) == (3, 1)
    assert ["error" in record for record in outcome.records] == [True, False, True]
    assert [record["index"] for record in outcome.records] == [0, 1, 2]
    ended = dsbd("generate", "--set", "max-errors=1", lines=b'broken\n{"prompt": "a"}\n')
    assert (ended.code, len(ended.loads), len(ended.records)) == (1, 1, 1), "no load after the one before"


def test_what_cannot_be_written_is_told_before_a_model_is_loaded(dsbd: Dsbd) -> None:
    for options in (
        ("-o", "/proc/out.jsonl"),
        ("--set", "stats=/proc/steps.jsonl"),
        ("--set", "summary=/proc/summary.json"),
    ):
        outcome = dsbd("generate", *options)
        assert (outcome.code, outcome.out, outcome.loads) == (1, "", [])
        assert f"cannot write {options[1].split('=')[-1]}: " in outcome.err


def test_an_unknown_field_is_warned_of_once_or_refused(dsbd: Dsbd) -> None:
    lines = [{"prompt": "a", "temprature": 2}, {"prompt": "b", "temprature": 3}]
    outcome = dsbd("generate", lines=lines)
    assert outcome.code == 0
    assert outcome.err.startswith("dsbd: warning: line 1: unknown field 'temprature'")
    assert outcome.err.count("\n") == 1
    assert dsbd("generate", "-q", lines=lines).err == ""
    strict = dsbd("generate", "--input-format", "strict", lines=lines)
    assert strict.code == 3
    assert ["error" in record for record in strict.records] == [True, True]


@pytest.mark.parametrize(("options", "written"), [("--set max-errors=1", 2), ("--set max-errors=2", 4)])
@pytest.mark.parametrize("batch", ["1", "8"])
def test_errors_end_the_run_where_they_are_too_many(dsbd: Dsbd, options: str, written: int, batch: str) -> None:
    lines = rows("a", "fail", "c", "fail", "e")
    outcome = dsbd("generate", "--batch-size", batch, *options.split(), lines=lines)
    assert (outcome.code, len(outcome.records)) == (1, written)
    assert "error" in outcome.records[-1]
    assert outcome.err.startswith("dsbd: error: ")
    assert f"failed, the last one at line {written}" in outcome.err
    assert dsbd("generate", "--set", "max-errors=3", lines=lines).code == 3


def test_metadata_comes_back(dsbd: Dsbd) -> None:
    [record] = dsbd("generate", lines=[{"prompt": "a", "metadata": {"k": [1, None]}}]).records
    assert record["metadata"] == {"k": [1, None]}


@pytest.mark.parametrize("form", ["auto", "text"])
def test_rows_in_a_wide_encoding_are_refused_and_nothing_is_changed(dsbd: Dsbd, tmp_path: Path, form: str) -> None:
    """Each of them would be an error record. A pipe is told of as well as a file."""
    output, path, data = tmp_path / "out", tmp_path / "in.jsonl", '{"prompt": "x"}\n'.encode("utf-16")
    output.write_text("before")
    path.write_bytes(data)
    arguments = ("generate", "--input-format", form, "-o", str(output), "--existing", "overwrite")
    for more, message in (
        ((), "standard input is UTF-16, but must be UTF-8: put iconv -f UTF-16 -t UTF-8 before it in the pipe"),
        (("-i", str(path)), f"UTF-8; convert it with: iconv -f UTF-16 -t UTF-8 {path} > {tmp_path / 'in.utf8.jsonl'}"),
    ):
        outcome = dsbd(*arguments, *more, lines=data)
        assert (outcome.code, outcome.loads, outcome.err.count("\n")) == (2, [], 1)
        assert message in outcome.err
        assert output.read_text() == "before"


def test_a_search_tells_once_and_counts_the_rows_that_ask_for_sampling(dsbd: Dsbd) -> None:
    rows = [{"prompt": "a", "temperature": 0.7}, {"prompt": "b", "top_p": 0.9}, {"prompt": "c", "temperature": 1}]
    done = dsbd("generate", "--decode", "search", lines=rows)
    assert done.code == 0, done.err
    assert done.err.count("of rows are not used: this run searches") == 1
    assert "2 asked for sampling (not used: --decode search)" in done.err
    assert "asked for sampling" not in dsbd("generate", lines=rows).err
