"""Tables as input, and the Parquet file that is written."""

from __future__ import annotations

import csv
import gzip
import io
import json
import random
from collections.abc import Callable
from datetime import date
from decimal import Decimal
from functools import partial
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from dsbd_cli.errors import OutputError, UsageError
from dsbd_cli.io.lines.line_reader import LineReader
from dsbd_cli.io.lines.parquet_writer import MAX_GROUP_BYTES, TableWriter
from dsbd_cli.io.lines.tables import check_table, count_table_rows, lines_reader, read_csv, table_header
from dsbd_cli.io.records.cells import BY_NAME, ColumnRules, column_rules, columns_of
from dsbd_cli.io.records.reader import RowReader
from dsbd_cli.io.records.row import LongLine, Row, TableRow, readable
from dsbd_cli.requests import Request, derive_seed

COLUMNS = ("id", "rank", "text", "score")


def read(
    text: bytes, *, delimiter: str = ",", limit: int = 1000, rules: ColumnRules = BY_NAME
) -> list[tuple[int, object]]:
    """The rows of a table: the fields and the other cells in one object, or a LongLine's reason or size."""
    lines = read_csv(io.BytesIO(text), name="t.csv", delimiter=delimiter, limit=limit, rules=rules)
    return [
        (number, (line.reason or line.size) if isinstance(line, LongLine) else json.loads(readable(line)))
        for number, line in lines
    ]


def carried(line: object) -> dict[str, object]:
    """The cells of a row that are no fields."""
    assert isinstance(line, TableRow)
    fields: dict[str, object] = json.loads(line.carried)
    return fields


def test_rows_have_the_number_of_their_first_line() -> None:
    text = b'\xef\xbb\xbfid, prompt\r\na,"x\ny ""z"""\r\n\r\nb,\r\n01,"\xc3\xa9,"'
    assert read(text) == [
        (2, {"id": "a", "prompt": 'x\ny "z"'}),
        (5, {"id": "b"}),
        (6, {"id": "01", "prompt": "é,"}),
    ]
    assert read(b"id\tprompt\na\t1,5\n", delimiter="\t") == [(2, {"id": "a", "prompt": "1,5"})]
    assert read(b"") == read(b"prompt\n") == []


def test_a_row_that_cannot_be_read_stands_alone() -> None:
    """The others go on, behind a record that is too long as well: its quotes say where it ends."""
    long = b'"' + b'a ""b""\n' * 200 + b'"'
    text = b"id,prompt\n1,2,3\n4\n5,\xff\n6," + long + b'\n7,"x"y\n8,ok\n9,a\rb\n10,' + b"z" * 2000 + b'\n11,"open\n'
    assert read(text) == [
        (2, "the row has 3 cells, but the header has 2"),
        (3, "the row has 1 cell, but the header has 2"),
        (4, "prompt is not UTF-8: byte 0xff in '\\udcff'"),
        (5, len(long) + 3),
        (206, "not valid CSV: ',' expected after '\"'"),
        (207, {"id": "8", "prompt": "ok"}),
        (208, "not valid CSV: a line end stands in a cell without quotes"),
        (209, 2004),
        (210, "not valid CSV: unexpected end of data"),
    ]
    assert read(b"prompt\n" + b"z" * 999 + b"\n") == [(2, {"prompt": "z" * 999})]
    assert read(b"prompt\n" + b"z" * 1000 + b"\n") == [(2, 1001)]


CELL = st.text(st.characters(codec="utf-8", exclude_characters="\0"), max_size=20)


@given(st.lists(st.tuples(CELL, CELL), max_size=6), st.sampled_from(["\n", "\r\n"]))
@example([('"', "\r"), (",", '",\n"')], "\n")
def test_what_csv_writes_is_read_as_it_was(rows: list[tuple[str, str]], end: str) -> None:
    text = io.StringIO(newline="")
    writer = csv.writer(text, lineterminator=end, quoting=csv.QUOTE_ALL)
    writer.writerows([("id", "prompt"), *rows])
    wanted = [{name: cell for name, cell in zip(("id", "prompt"), row, strict=True) if cell} for row in rows]
    assert [row for _, row in read(text.getvalue().encode())] == wanted


PIECES = [b'"', b",", b"\n", b"\r", b"a", b"\xff", b"\0", b"x" * 30]


@given(st.lists(st.sampled_from(PIECES), max_size=40).map(b"".join))
def test_no_bytes_raise_and_every_row_has_its_line(rows: bytes) -> None:
    """A row begins on the line that it names, behind all lines of the row before."""
    lines = list(read_csv(io.BytesIO(b"id,prompt\n" + rows), name="t.csv", limit=50))
    numbers = [number for number, _ in lines]
    assert numbers == sorted(set(numbers))
    assert all(2 <= number <= 2 + rows.count(b"\n") for number in numbers)
    assert not any(isinstance(line, TableRow) and len(json.loads(line.line)) > 2 for _, line in lines)


CELLS: list[tuple[str, str, object]] = [
    ("id", "007", "007"),
    ("prompt", "1.0", "1.0"),
    ("prompt", '["x"]', '["x"]'),
    ("prompt", "true", "true"),
    ("prefix", "[1]", "[1]"),
    ("image", "3", "3"),
    ("source_lang", "1", "1"),
    ("seed", "12", 12),
    ("seed", "9223372036854775807", 2**63 - 1),
    ("seed", "99999999999999999999", "99999999999999999999"),
    ("n_best", "8.0", 8),
    ("max_new_tokens", " 1e2 ", 100),
    ("temperature", "0.7", 0.7),
    ("temperature", "hot", "hot"),
    ("temperature", "1_0", "1_0"),
    ("temperature", "inf", "inf"),
    ("token_logprobs", "TRUE", True),
    ("early_stopping", "False", False),
    ("stop", "5", "5"),
    ("stop", '["a", "b"]', ["a", "b"]),
    ("stop", "[END]", "[END]"),
    ("allow", "true", "true"),
    ("token_rules", '{"min_length": 3}', {"min_length": 3}),
    ("metadata", '{"a": [1]}', {"a": [1]}),
    ("metadata", "5", "5"),
    ("messages", '[{"role": "user", "content": "é"}]', [{"role": "user", "content": "é"}]),
    ("response_format", '{"type": "json_object"}', {"type": "json_object"}),
]


@pytest.mark.parametrize(("name", "cell", "value"), CELLS)
def test_the_type_of_a_cell(name: str, cell: str, value: object) -> None:
    """Types as well: 1 == True."""
    text = io.StringIO()
    csv.writer(text).writerows([("audio", "column"), ("-", cell)])
    [(_, cells)] = read(text.getvalue().encode(), rules=ColumnRules({"audio": "audio", name: "column"}))
    assert json.dumps(cells[name]) == json.dumps(value)  # type: ignore[index]


BUSINESS = ("n", "language", "stop", "max_tokens", "prefix", "allow", "logprobs", "stream", "suffix", "echo", "user")


def test_no_column_costs_a_row_by_an_everyday_name() -> None:
    """What a user's table is made of. Guards a text that ends before the name of a bus stop, and rows that are lost."""
    text = io.StringIO()
    csv.writer(text).writerows([("prompt", *BUSINESS), ("p", *(f"some {name}" for name in BUSINESS))])
    [(number, line)] = read_csv(io.BytesIO(text.getvalue().encode()), name="t.csv")
    row = RowReader(strict=True).read(line, index=0, number=number)
    assert (row.request, row.warnings) == (Request("p", id="0", seed=derive_seed(0, "0")), ())
    assert row.metadata == {name: f"some {name}" for name in BUSINESS}


ROLES: list[tuple[str, str | None, str, str, str]] = [
    # header, --set columns, fields, carried columns, how the carried ones become fields
    ("id,prompt,ticket", None, "id,prompt", "ticket", ""),
    ("custom_id,prompt", None, "custom_id,prompt", "", ""),
    ("custom_id,id,prompt", None, "id,prompt", "custom_id", ""),
    ("prompt,n,stop,temperature,seed", None, "prompt,seed,temperature", "n,stop", "n_best=n,stop"),
    ("prompt,n,n_best", None, "prompt,n_best", "n", ""),
    ("prompt,n,stop", "prompt", "prompt", "n,stop", ""),
    ("prompt,n,stop", "stop,n_best=n", "stop,n_best=n,prompt", "", ""),
    ("prompt,temperature", "temperature=", "prompt", "temperature", ""),
    ("prompt,question,id,key", "prompt=question,id=key", "prompt=question,id=key", "prompt,id", ""),
    ("text,reference", "prompt=text", "prompt=text,reference", "reference", ""),
    ("prompt,messages,audio,image", None, "prompt,image", "messages,audio", "messages,audio"),
    ("prompt,image", None, "prompt,image", "", ""),
    ("prompt,messages", "messages", "messages", "prompt", ""),
    ("prompt,image", "image", "image,prompt", "", ""),
    ('prompt,"a, b"', '"prompt=a, b"', '"prompt=a, b"', "prompt", ""),
    ("custom_id,method,url,body,ticket", None, "custom_id,method,url,body", "ticket", ""),
    ("prompt,url,body", None, "prompt", "url,body", ""),
    ("prompt,metadata,ticket", None, "prompt,metadata", "ticket", ""),
]


@pytest.mark.parametrize(("header", "rules", "fields", "others", "unused"), ROLES)
def test_which_columns_are_fields(header: str, rules: str | None, fields: str, others: str, unused: str) -> None:
    [names], [wanted] = csv.reader([header], skipinitialspace=True), csv.reader([fields])
    columns = columns_of(names, column_rules(rules))
    pairs = [item.partition("=") for item in wanted]
    assert dict(columns.fields) == {name: column if equals else name for name, equals, column in pairs}
    assert ",".join(columns.carried) == others
    assert ",".join(columns.unused.values()) == unused


BAD_RULES = [
    ("ticket=x", "names 'ticket', which is no field: sample_inputs/README.md lists them"),
    ("promt=x", "names 'promt', which is no field: did you mean prompt?"),
    ("stream=x", "names 'stream', which is no field"),
    ("max_tokens=x", "a table's field max_tokens is called max_new_tokens"),
    ("id=a,id=b", "names id twice: drop one"),
    ("", "names '', which is no field"),
    ('"id=a', "is no list with commas"),
]


@pytest.mark.parametrize(("rules", "message"), BAD_RULES)
def test_rules_of_columns_that_cannot_be_used(rules: str, message: str) -> None:
    with pytest.raises(UsageError, match="--set columns") as refused:
        column_rules(rules)
    assert message in str(refused.value)


@pytest.mark.parametrize(
    ("rules", "strict", "message"),
    [
        (
            "prompt=text",
            False,
            "it has no column 'text', which --set columns names for prompt; there are 'question, id'",
        ),
        (None, False, "there are 'question, id'; --set columns=prompt=NAME names the column of the prompts"),
        ("prompt=", False, "no column is called prompt, messages, audio or image"),
        ("prompt=question,id=", True, "the column 'id' is no field, which --input-format strict refuses"),
    ],
)
def test_columns_that_no_row_can_be_made_of(rules: str | None, strict: bool, message: str) -> None:
    with pytest.raises(UsageError) as refused:
        columns_of(["question", "id"], column_rules(rules, strict=strict))
    assert message in str(refused.value)


def test_other_cells_are_metadata_and_ask_for_nothing(tmp_path: Path) -> None:
    """So a changed note is no reason to answer a row again. They stand beside the row's own metadata."""
    for name, note in (("a.csv", "x"), ("b.csv", "changed")):
        (tmp_path / name).write_text(
            f'prompt,metadata,note,empty\np,"{{""note"": 1, ""k"": 2}}",{note},\nq,text,{note},\n'
        )
    rows, other = rows_of(tmp_path / "a.csv"), rows_of(tmp_path / "b.csv")
    assert [row.metadata for row in rows] == [{"note": "x", "k": 2}, {"metadata": "text", "note": "x"}]
    assert [row.key for row in rows] == [row.key for row in other]
    (tmp_path / "c.jsonl").write_text('{"prompt": "p", "metadata": {"note": 1, "k": 2}}\n')
    assert rows_of(tmp_path / "c.jsonl")[0].key == rows[0].key


def test_messages_name_the_column(tmp_path: Path) -> None:
    (tmp_path / "in.csv").write_text("question,my heat\np,hot\n")
    [row] = rows_of(tmp_path / "in.csv", column_rules("prompt=question,temperature=my heat"))
    assert str(row.error) == "line 2: 'my heat' is 'hot', but must be a number"
    (tmp_path / "empty.csv").write_text("question,url,body\n,x,\n")
    [row] = rows_of(tmp_path / "empty.csv", column_rules("prompt=question"))
    assert str(row.error) == "line 2: question is empty"
    (tmp_path / "empty.csv").write_text("url,body,id\n,,x\n")
    [row] = rows_of(tmp_path / "empty.csv")
    assert str(row.error) == "line 2: body is empty"
    [row] = rows_of(tmp_path / "in.csv", column_rules("messages=question"))
    assert str(row.error).startswith("line 2: question is 'p', but must be a non-empty list")


@pytest.mark.parametrize(
    ("header", "rows", "ids"),
    [
        ("id,prompt", ["a,b,c", "d", '"e"x,f', "g,\udcff", "\udcff,h", ",i,j"], ["a", "d", None, "g", None, "5"]),
        ("prompt,id", ["a,b,c", "d", "\udcff,e"], [None, None, "e"]),
        ("prompt,note", ["a,b,c", '"d"x'], ["0", "1"]),
        ("prompt,key", ["\udcff,a"], ["0"]),
    ],
)
def test_a_row_that_cannot_be_read_has_its_own_id_or_none(
    tmp_path: Path, header: str, rows: list[str], ids: list[str | None]
) -> None:
    """The first cell is surely that of its column. Without a column of ids a row's number is its id."""
    path = tmp_path / "in.csv"
    path.write_bytes("\n".join((header, *rows, "")).encode("utf-8", "surrogateescape"))
    read_rows = rows_of(path)
    assert [row.id for row in read_rows] == ids
    assert not any(row.request for row in read_rows)
    assert len({row.key for row in read_rows}) == len(read_rows)


def test_a_row_of_parquet_that_cannot_be_read_has_its_id(tmp_path: Path) -> None:
    path = tmp_path / "in.parquet"
    texts = pyarrow.array([b"a", b"\xff"], pyarrow.binary()).view(pyarrow.string())
    pyarrow.parquet.write_table(pyarrow.table({"prompt": texts, "id": [1, 7]}), path)
    assert [(row.id, row.error is None) for row in rows_of(path)] == [("1", True), ("7", False)]
    pyarrow.parquet.write_table(pyarrow.table({"prompt": ["p", "q"], "id": texts}), path)
    assert [(row.id, row.error is None) for row in rows_of(path)] == [("a", True), (None, False)]


HEADERS: list[tuple[bytes, str]] = [
    (b"id,question\n1,x\n", "no column is called prompt, messages, audio or image; there are 'id, question'"),
    (b"id;prompt\n1;x\n", "there are 'id;prompt'; .csv has commas between cells"),
    (b"prompt,id,id\n", "the column 'id' stands twice in it: drop one"),
    (b"prompt" + b",x" * 1000, "it has 1001 columns, but may have 1000"),
    (b"\xff\xfep\0r\0\n", "is not UTF-8"),
    (b'"prompt', "cannot be read: not valid CSV: unexpected end of data"),
    (b"prompt" * 2000, "cannot be read: it is too long"),
]


@pytest.mark.parametrize(("text", "reason"), HEADERS)
def test_a_header_that_cannot_be_used(text: bytes, reason: str) -> None:
    with pytest.raises(UsageError, match=r"^the header of t.csv ") as refused:
        read(text, limit=9000)
    assert reason in str(refused.value)
    assert "\n" not in str(refused.value)
    # a pipe's header is read by the reader's thread
    source = LineReader(io.BytesIO(text), "t.csv", read=partial(read_csv, name="t.csv", limit=9000))
    with pytest.raises(UsageError, match=r"^the header of t.csv "), source as reader:
        assert not [line for line in reader if line is not None]


def rows_of(path: Path, rules: ColumnRules = BY_NAME) -> list[Row]:
    reader = RowReader(files_root="/")
    with path.open("rb") as stream:
        lines = list(lines_reader(path, rules)(stream))
    return [reader.read(line, index=index, number=number) for index, (number, line) in enumerate(lines)]


def test_all_forms_of_a_row_ask_for_the_same(tmp_path: Path) -> None:
    """By the key, from which a resumed run knows a row. pandas writes integers beside empty cells as floats."""
    lines = [
        {"id": "a", "prompt": "1", "max_new_tokens": 8, "stop": ["x", "y"], "metadata": {"k": [1, 2]}},
        {"id": "b", "prompt": "p\nq", "temperature": 0.5, "seed": 2**62 + 1, "token_logprobs": True},
    ]
    columns = ["id", "prompt", "max_new_tokens", "stop", "metadata", "temperature", "seed", "token_logprobs"]
    path = tmp_path / "in.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    with (tmp_path / "in.csv").open("w", newline="") as stream:
        writer = csv.DictWriter(stream, columns)
        writer.writeheader()
        for line in lines:
            writer.writerow(
                {name: json.dumps(cell) if isinstance(cell, list | dict) else cell for name, cell in line.items()}
            )
    table = pyarrow.Table.from_pylist([{name: line.get(name) for name in columns} for line in lines])
    floats = pyarrow.array([8.0, None])
    table = table.set_column(columns.index("max_new_tokens"), "max_new_tokens", floats)
    pyarrow.parquet.write_table(table, tmp_path / "in.parquet")
    wanted = [(row.key, row.metadata) for row in rows_of(path)]
    stops = ColumnRules({"stop": "stop"})
    assert [(row.key, row.metadata) for row in rows_of(tmp_path / "in.csv", stops)] == wanted
    assert [(row.key, row.metadata) for row in rows_of(tmp_path / "in.parquet", stops)] == wanted
    assert [row.number for row in rows_of(tmp_path / "in.parquet")] == [1, 2]


@pytest.mark.parametrize(
    ("cell", "message"),
    [
        ('{""a"": 1, ""a"": 2}', "line 2: duplicate field 'a'"),
        ('{""a"": 99999999999999999999}', "is an integer of more than 64 bits"),
        ("[" * 100 + "]" * 100, "nested deeper than 64 levels"),
    ],
)
def test_json_in_a_cell_is_checked_as_that_of_a_line(tmp_path: Path, cell: str, message: str) -> None:
    (tmp_path / "in.csv").write_text(f'prompt,metadata\nx,"{cell}"\n')
    [row] = rows_of(tmp_path / "in.csv")
    assert message in str(row.error)


def test_rows_of_csv_are_counted_as_they_are_read(tmp_path: Path) -> None:
    path = tmp_path / "in.tsv.gz"
    for text, rows in ((b"", 0), (b"prompt\n", 0), (b'prompt\tid\n"a\nb"\t1\n\nbad\nc\t"2', 3)):
        path.write_bytes(gzip.compress(text))
        assert count_table_rows(path) == rows


def test_values_of_parquet_that_no_field_takes_are_the_errors_of_their_rows(tmp_path: Path) -> None:
    path = tmp_path / "in.parquet"
    columns = {
        "prompt": [b"bytes", b"", None],
        "other": [Decimal("1.5"), Decimal("2.5"), None],
        "metadata": [date(2026, 1, 2), None, None],
        "temperature": [float("nan"), 0.5, 0.5],
    }
    pyarrow.parquet.write_table(pyarrow.table(columns), path)
    messages = [str(row.error) for row in rows_of(path)]
    assert messages == [
        "line 1: prompt is b'bytes' of type bytes, which no field takes",
        "line 2: prompt is b'' of type bytes, which no field takes",
        "line 3: prompt is empty",
    ]
    assert count_table_rows(path) == 3


def test_decimals_are_numbers_where_nothing_is_lost(tmp_path: Path) -> None:
    path = tmp_path / "in.parquet"
    columns = {
        "prompt": ["a", "b"],
        "temperature": [Decimal("0.50"), Decimal("1.00")],
        "seed": [Decimal(9007199254740993), None],
        "metadata": [Decimal("0.10"), Decimal("12345678901234567891.12")],
    }
    pyarrow.parquet.write_table(pyarrow.table(columns), path)
    first, second = rows_of(path)
    assert first.request is not None
    assert (first.request.sampling.temperature, first.request.seed) == (0.5, 9007199254740993)
    assert "metadata is Decimal('12345678901234567891.12')" in str(second.error)


def test_a_cell_that_python_cannot_hold_costs_its_row_alone(tmp_path: Path) -> None:
    """A moment past the year 9999, and a text that is not UTF-8. Either would end the batch, and with it the input."""
    path, count = tmp_path / "in.parquet", 2500  # three batches
    moments, texts = [0] * count, [b"a"] * count
    moments[2100], texts[7] = 2**62, b"\xff"
    columns = {
        "prompt": pyarrow.array(texts, pyarrow.binary()).view(pyarrow.string()),
        "metadata": pyarrow.array(moments, pyarrow.timestamp("us")),
        "created": pyarrow.array(moments, pyarrow.timestamp("us")),  # no field, so it is carried as text
    }
    pyarrow.parquet.write_table(pyarrow.table(columns), path)
    rows = rows_of(path)
    assert len(rows) == count
    failed = {number: str(row.error) for number, row in enumerate(rows, 1) if row.error is not None}
    assert failed.keys() == {8, 2101}
    assert "line 8: prompt cannot be read as string: 'utf-8' codec can't decode" in failed[8]
    assert "line 2101: metadata cannot be read as timestamp[us]: " in failed[2101]
    columns["metadata"] = pyarrow.array(moments, pyarrow.int64())
    pyarrow.parquet.write_table(pyarrow.table(columns), path)
    rows = rows_of(path)
    assert [number for number, row in enumerate(rows, 1) if row.error is not None] == [8]
    assert rows[2100].metadata == {"metadata": 2**62, "created": f"<value out of range: {2**62}>"}
    assert rows[2099].metadata == {"metadata": 0, "created": "1970-01-01T00:00:00"}


BAD_FILES: dict[str, tuple[str, Callable[[], bytes], str]] = {
    "no parquet": ("in.parquet", lambda: b"PAR1 and more", "cannot be read: no Parquet that can be read: "),
    "an empty file": ("in.parquet", lambda: b"", "cannot be read: no Parquet that can be read: "),
    "compressed": ("in.parquet.gz", lambda: gzip.compress(b"x"), "is compressed inside: unpack it"),
    "csv": ("in.CSV.gz", lambda: gzip.compress(b"question\nx\n"), "no column is called prompt"),
}


@pytest.mark.parametrize(("name", "content", "reason"), BAD_FILES.values(), ids=BAD_FILES)
def test_a_file_that_is_no_table_is_refused(
    name: str, content: Callable[[], bytes], reason: str, tmp_path: Path
) -> None:
    (tmp_path / name).write_bytes(content())
    with pytest.raises(UsageError, match=reason) as refused:
        check_table(tmp_path / name)
    assert "\n" not in str(refused.value)


def table_rows(path: Path) -> list[dict[str, object]]:
    rows: list[dict[str, object]] = pyarrow.parquet.read_table(path).to_pylist()
    return rows


def line_of(number: int, text: str) -> bytes:
    return json.dumps([{"id": str(number), "rank": 1, "text": text, "score": -number / 3}, {"id": "e"}]).encode()


def test_row_groups_are_written_as_they_come(tmp_path: Path) -> None:
    """Guards against a writer that holds the whole file, and against one group for each record."""
    path = tmp_path / "out.parquet"
    writer = TableWriter(io.FileIO(path, "wb"), str(path), COLUMNS)
    text = "x" * (MAX_GROUP_BYTES // 4)
    for number in range(6):
        writer.write(line_of(number, text + str(number)))
        writer.flush()
        if number == 3:
            held = path.stat().st_size
    assert held > 4
    writer.close()
    writer.close()
    written = table_rows(path)
    assert [(row["text"], row["score"]) for row in written[::2]] == [(f"{text}{n}", -n / 3) for n in range(6)]
    assert written[1] == {"id": "e", "rank": None, "text": None, "score": None}
    assert pyarrow.parquet.ParquetFile(path).num_row_groups == 2
    empty = TableWriter(io.FileIO(path, "wb"), str(path), COLUMNS)
    empty.close()
    assert table_rows(path) == []


class FullDisk(io.FileIO):
    """Has room for so many bytes."""

    def __init__(self, path: Path, room: int) -> None:
        super().__init__(path, "wb")
        self.room = room

    def write(self, data: object) -> int:
        if self.room <= 0:
            raise OSError(28, "No space left on device")
        self.room -= len(bytes(data))  # type: ignore[call-overload]
        return super().write(data)  # type: ignore[arg-type]


@pytest.mark.parametrize("room", [0, 4, 6_000_000])
def test_after_a_full_disk_the_file_has_no_end(tmp_path: Path, room: int) -> None:
    """So nobody takes it for whole: not even where there is room for the end again."""
    path = tmp_path / "out.parquet"
    stream = FullDisk(path, room)
    writer = TableWriter(stream, str(path), COLUMNS)
    writing = pytest.raises(OutputError, match=r"No space left on device; the file is cut and cannot be read$")
    with writing:
        for number in range(16):
            writer.write(line_of(number, random.Random(number).randbytes(1 << 19).hex()))
        writer.close()
    stream.room = 1_000_000_000
    writer.close()
    with pytest.raises(pyarrow.ArrowInvalid):
        table_rows(path)


def test_a_carried_column_may_hold_anything(tmp_path: Path) -> None:
    """Pictures as the hub stores them and blobs are not read; whatever else there is has a form in JSON."""
    path = tmp_path / "in.parquet"
    columns = {
        "prompt": ["a", "b"],
        "photo": [{"bytes": b"x", "path": "p"}, None],
        "parts": [[b"x"], [b"y"]],
        "prices": [[Decimal("1.5")], []],
        "blob": [b"x" * (8 << 20), b""],
        "when": [date(2026, 1, 2), None],
        "price": [Decimal("1.50"), None],
        "share": [float("nan"), 0.25],
        "count": [3.0, None],
        "relevant": [["r"], None],
    }
    pyarrow.parquet.write_table(pyarrow.table(columns), path)
    assert [(row.error, row.request and row.request.prompt) for row in rows_of(path)] == [(None, "a"), (None, "b")]
    lines = [line for _, line in lines_reader(path)(io.BytesIO())]
    assert [json.loads(readable(line)) for line in lines] == [{"prompt": "a", "relevant": ["r"]}, {"prompt": "b"}]
    assert [carried(line) for line in lines] == [
        {"prices": ["1.5"], "when": "2026-01-02", "price": "1.50", "count": 3, "relevant": ["r"]},
        {"prices": [], "share": 0.25},
    ]
    header = table_header(path)
    assert header is not None
    assert header.left_out == ("photo", "parts", "blob")
    assert header.kinds == {"share": "double", "count": "double"}
    assert header.notes(path) == [f"{path}: left out, because bytes are not carried: photo, parts, blob"]


def test_a_map_is_an_object(tmp_path: Path) -> None:
    """As Spark and DuckDB write metadata. A name that it has twice costs its row alone."""
    path = tmp_path / "in.parquet"
    maps = pyarrow.array([[("db", "x")], [("db", "x"), ("db", "y")]], pyarrow.map_(pyarrow.string(), pyarrow.string()))
    pyarrow.parquet.write_table(pyarrow.table({"prompt": ["a", "b"], "metadata": maps}), path)
    first, second = rows_of(path)
    assert first.metadata == {"db": "x"}
    assert "metadata cannot be read as map" in str(second.error)
    maps = pyarrow.array([[(1, "x")]], pyarrow.map_(pyarrow.int32(), pyarrow.string()))
    pyarrow.parquet.write_table(pyarrow.table({"prompt": ["a"], "metadata": maps}), path)
    assert [row.metadata for row in rows_of(path)] == [{"1": "x"}]


def test_a_cell_of_many_digits_is_read_once() -> None:
    """Guards a process that took hours, signals included: each digit was tried in two places of a number."""
    cell = "1" * 1_000_000 + "x"
    assert read(f"prompt,seed\np,{cell}\n".encode(), limit=2_000_000) == [(2, {"prompt": "p", "seed": cell})]
