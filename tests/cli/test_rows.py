"""Forms of input and output, and rows that fail."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.cli.conftest import Outcome

Dsbd = Callable[..., Outcome]


def rows(*texts: str) -> list[object]:
    return [{"id": f"r{place}", "prompt": text} for place, text in enumerate(texts)]


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


def test_damaged_input_is_an_error_behind_the_rows_that_came(dsbd: Dsbd, tmp_path: Path) -> None:
    import random

    noise = random.Random(0).randbytes(20000).hex()
    whole = gzip.compress(b'{"prompt": "a"}\n' + f'{{"prompt": "{noise}"}}\n'.encode())
    (tmp_path / "in.gz").write_bytes(whole[:-3000])
    outcome = dsbd("generate", "-i", str(tmp_path / "in.gz"))
    assert outcome.code == 1
    assert outcome.records[0]["text"] == "a!0"
    assert "ends in the middle" in outcome.err


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


@pytest.mark.parametrize(("options", "written"), [("--max-errors 1", 2), ("--max-errors 2", 4)])
@pytest.mark.parametrize("batch", ["1", "8"])
def test_errors_end_the_run_where_they_are_too_many(dsbd: Dsbd, options: str, written: int, batch: str) -> None:
    lines = rows("a", "fail", "c", "fail", "e")
    outcome = dsbd("generate", "--batch-size", batch, *options.split(), lines=lines)
    assert (outcome.code, len(outcome.records)) == (1, written)
    assert "error" in outcome.records[-1]
    assert outcome.err.startswith("dsbd: error: ")
    assert f"failed, the last one at line {written}" in outcome.err
    assert dsbd("generate", "--max-errors", "3", lines=lines).code == 3


def test_metadata_comes_back(dsbd: Dsbd) -> None:
    [record] = dsbd("generate", lines=[{"prompt": "a", "metadata": {"k": [1, None]}}]).records
    assert record["metadata"] == {"k": [1, None]}
