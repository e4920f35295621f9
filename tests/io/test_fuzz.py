"""Broken input of every kind: nothing crashes, every line is one row and one record, and memory is bounded."""

from __future__ import annotations

import io
import json
import random
import subprocess
import sys
from pathlib import Path

import orjson
from hypothesis import given, settings
from hypothesis import strategies as st

from dsbd_cli.config.method import MethodConfig
from dsbd_cli.config.sampling import SamplingConfig
from dsbd_cli.io.lines.jsonl import read_lines
from dsbd_cli.io.records.native_record import native_record, text_record
from dsbd_cli.io.records.openai_record import openai_record
from dsbd_cli.io.records.reader import RowReader
from dsbd_cli.io.records.record_parts import MethodRecord
from dsbd_cli.io.records.row import Row
from dsbd_cli.requests import Hypothesis, RequestResult
from dsbd_cli.stats import RequestStats

ROOT = Path(__file__).parents[2]
MUTATED_LINES = 20_000
METHOD = MethodRecord(MethodConfig(), "t", None)
CONTROLS = [*map(chr, range(0x20)), *map(chr, range(0x7F, 0xA0)), "\u2028", "\u2029"]

CHAT = {
    "model": "m",
    "messages": [
        {"role": "system", "content": "Antworte kurz: \u00e4\u2028\x85"},
        {"role": "user", "content": [{"type": "text", "text": "hi: \U0001f600"}]},
    ],
    "max_tokens": 7,
    "stream": False,
    "stop": ["\n\n", "END"],
    "metadata": {"k": "v:w"},
}
SEEDS: list[object] = [
    {"prompt": "p"},
    {"id": 7, "prompt": "a: b\x00\x1b[31m\x7f", "metadata": {"a": {"b": [1.5, None, True]}}},
    {"custom_id": "x", "messages": CHAT["messages"], "temperature": 0.5, "top_k": 3, "top_p": 0.5, "min_p": 0.1},
    {"prompt": "p", "seed": 2**63 - 1, "n": 2, "max_new_tokens": 3, "length_penalty": 1e-3, "early_stopping": True},
    {"prompt": "p", "temprature": 1, "logit_bias": {}, "stop": "x", "user": "u"},
    {"custom_id": "x", "method": "POST", "url": "/v1/chat/completions", "body": CHAT},
    {"custom_id": "y", "method": "POST", "url": "/v1/completions", "body": {"prompt": "p", "best_of": 1, "n": 1}},
]
LINES = [form for seed in SEEDS for form in (orjson.dumps(seed), orjson.dumps(seed, option=orjson.OPT_INDENT_2))]
PIECES = [
    *(b"\xff", b"\x00", b"\xed\xa0\x80", b"\xc0\x80", b"\xef\xbb\xbf", b"\xc2\x9b", b"\r", b"\x1b[2J"),
    *(b"\\ud800", b"\\u0000", b"\\udc00\\ud800", b"\\u003a", b"\\n", b"\\", b'"', b"'", b"/*", b"#"),
    *(b"NaN", b"-Infinity", b"1e999", b"-0.0", b"1e308", b"9" * 30, b"18446744073709551616", b"0x1", b"00", b"-1"),
    *(b"{", b"}", b"[", b"]", b":", b",", b"null", b"true", b"[" * 70 + b"]" * 70, b"[" * 2_000, b'{"a":' * 90),
    *(b'"prompt":"q",', b'"id":null,', b'"n":1,', b'"messages":[],', b'"url":"/v1/completions",', b'"body":{},'),
    *(b'"temperature":0,', b'"seed":-1,', b'"metadata":{"a":1,"a":2},', b'"tools":[1],', b'"\\u0070rompt":"r",'),
]


def mutated(rng: random.Random) -> bytes:
    """A line with one to four things done to it; never a line end inside."""
    line = bytearray(rng.choice(LINES).replace(b"\n", b" "))
    for _ in range(rng.choice([1, 1, 1, 2, 3, 4])):
        at = rng.randrange(len(line) + 1)
        end = min(len(line), at + rng.choice([1, 1, 2, 8, 40]))
        kind = rng.randrange(6)
        if kind == 0 and line:
            line[at % len(line)] = rng.randrange(256)
        elif kind == 1:
            line[at:at] = rng.choice(PIECES)
        elif kind == 2:
            line[at:end] = rng.choice(PIECES)
        elif kind == 3:
            del line[at:end]
        elif kind == 4:
            line[at:at] = line[at:end]
        else:
            line[at:] = rng.choice(LINES)[at:]
    return bytes(line).replace(b"\n", b" ")


def check(row: Row) -> None:
    """A row and its records: in all forms, with an answer that gives the prompt back."""
    assert (row.request is None) is not (row.error is None)
    assert len(row.key) == 32
    result = None
    if row.request is not None:
        text = row.request.prompt or "".join(str(message["content"]) for message in row.request.messages or ())
        result = RequestResult(row.request, (Hypothesis(text, (1,), "stop", -1.0, -1.0),), 1, RequestStats())
    else:
        message = str(row.error)
        assert message.startswith(f"line {row.number}: ")
        assert len(message) < 450  # it lists the fields that there are
    native, openai = native_record(row, result, METHOD), openai_record(row, result, METHOD)
    for record in (native, openai, text_record(row, result, METHOD)):
        shown = record.decode()
        assert record.isascii() or not any(control in shown for control in CONTROLS)
        assert not any(control in shown for control in CONTROLS[:33])
    parsed = orjson.loads(native)
    assert parsed["id"] == row.id == orjson.loads(openai)["custom_id"]
    assert parsed.get("metadata") == row.metadata
    assert ("error" in parsed) is (row.error is not None)
    if result is not None:
        assert parsed["text"] == result.hypotheses[0].text


def test_mutated_lines() -> None:
    """Through the reader of lines and the reader of rows: as many rows as lines, each with its own number."""
    rng = random.Random(20_000)
    lines = [mutated(rng) for _ in range(MUTATED_LINES)]
    reader, strict = RowReader(num_beams=4), RowReader(strict=True, rule="search")
    expected = [number for number, line in enumerate(lines, start=1) if line.strip()]
    got: list[int] = []
    answered = 0
    for index, (number, line) in enumerate(read_lines(io.BytesIO(b"\n".join(lines)))):
        row = reader.read(line, index=index, number=number)
        got.append(row.number)
        answered += row.error is None
        check(row)
        check((strict.read if index % 2 else strict.read_text)(line, index=index, number=number))
    assert got == expected
    assert len(got) > MUTATED_LINES * 0.99
    assert MUTATED_LINES * 0.1 < answered < MUTATED_LINES * 0.7  # neither all broken nor all whole


NAMES = st.sampled_from(
    "id custom_id prompt messages body url method metadata temperature n seed stop stream tools role content x".split()
)
TREES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.sampled_from(["POST", "/v1/completions"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(NAMES | st.text(), inner, max_size=5),
    max_leaves=12,
)


@settings(max_examples=500)
@given(st.dictionaries(NAMES, TREES, max_size=6), st.booleans())
def test_trees_of_json(tree: dict[str, object], strict: bool) -> None:
    try:
        line = orjson.dumps(tree)
    except TypeError:  # an integer of more than 64 bits or a lone surrogate: as Python's own encoder writes them
        line = json.dumps(tree).encode()
    check(RowReader(strict=strict).read(line, index=0, number=1))


@settings(max_examples=1_000)
@given(st.binary(max_size=300))
def test_bytes(line: bytes) -> None:
    check(RowReader().read(line, index=0, number=1))
    check(RowReader().read_text(line, index=0, number=1))


@settings(max_examples=300)
@given(st.text(), st.text(), st.dictionaries(st.text(), st.text(), max_size=3))
def test_whole_rows_are_read_as_they_are(row_id: str, prompt: str, metadata: dict[str, str]) -> None:
    """No whole row is taken for a broken one, in either way to write characters."""
    tree = {"id": row_id or "i", "prompt": prompt or "p", "metadata": metadata}
    for line in (orjson.dumps(tree), json.dumps(tree).encode()):
        row = RowReader(SamplingConfig()).read(line, index=0, number=1)
        assert row.request is not None, row.error
        assert (row.id, row.request.prompt, row.metadata) == (tree["id"], tree["prompt"], metadata)
        check(row)


CHILD = """
import resource
from dsbd_cli.io.lines.jsonl import read_lines
from dsbd_cli.config.method import MethodConfig
from dsbd_cli.io.records.record_parts import MethodRecord
from dsbd_cli.io.records.reader import RowReader
from dsbd_cli.io.records.native_record import native_record
import io
SIZE = 10_000_000
resource.setrlimit(resource.RLIMIT_AS, (1 << 30, 1 << 30))
def lines():
    yield b'{"prompt":"' + b"x" * SIZE + b'"}', True
    yield b'{"prompt":"' + b"a: " * (SIZE // 3) + b'"}', True
    yield b'{"prompt":"' + b"\\\\u003a" * (SIZE // 6) + b'"}', True
    yield b'{"prompt":"' + b"x" * SIZE + b'\\xff"}', False
    yield b'{"prompt":"' + b"x" * SIZE, False
    yield b"[" * SIZE, False
    yield b'{"prompt":"p","metadata":[' + b"[]," * (SIZE // 3) + b"1]}", True
    yield b'{"prompt":"p","x":[' + b"{}," * (SIZE // 3) + b"1]}", True
    yield b'{"prompt":"p"' + b"".join(b',"%d":1' % n for n in range(SIZE // 12)) + b"}", True
    yield b'{"prompt":"p"' + b',"a":1' * (SIZE // 6) + b"}", False
    yield b'{"prompt":"p","seed":' + b"1" * SIZE + b"}", False
    yield b'{"prompt":"p","metadata":0.' + b"1" * SIZE + b"}", True
    yield b'{"prompt":"p","stop":["' + b'a","' * (SIZE // 4) + b'"]}', False
    yield b'{"messages":[' + b'{"role":"u","content":""},' * (SIZE // 26) + b"1]}", False
    yield b"\\x00" * SIZE, False
reader = RowReader()
method = MethodRecord(MethodConfig(), "t", None)
for index, (line, whole) in enumerate(lines()):
    got = list(read_lines(io.BytesIO(line)))
    assert len(got) == 1, index
    row = reader.read(got[0][1], index=index, number=1)
    assert (row.error is None) is whole, (index, row.error)
    if row.error is not None:
        assert len(native_record(row, None, method)) < 2_000, index
# not ru_maxrss, which a process inherits from the one that started it
print(next(int(line.split()[1]) // 1024 for line in open("/proc/self/status") if line.startswith("VmHWM:")))
"""


def test_lines_of_ten_megabytes() -> None:
    """In a process that may take a gigabyte; its peak is told in MiB."""
    child = subprocess.run([sys.executable, "-c", CHILD], cwd=ROOT, capture_output=True, text=True, check=False)
    assert child.stderr == ""
    assert int(child.stdout) < 700
