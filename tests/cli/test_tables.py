"""Tables in and out: CSV and Parquet."""

from __future__ import annotations

import csv
import gzip
import io
import json
import os
import resource
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest

from tests.cli.conftest import Outcome, pipe
from tests.cli.test_processes import finish, wait_for

Dsbd = Callable[..., Outcome]
Start = Callable[..., subprocess.Popen[bytes]]

HEADER = "id,rank,answer_id,text,logprob,score,error,reasoning,tool_calls"
ROWS: list[object] = [
    {"id": "a", "prompt": 'x, "y"\r\nz', "n_best": 2},
    {"id": "b", "prompt": "fail"},
    {"id": "c", "prompt": "nan"},
]
TABLE = [
    {"id": "a", "rank": 1, "text": 'x, "y"\r\nz!0', "logprob": -1.25, "score": -1.25 / 3},
    {"id": "a", "rank": 2, "text": 'x, "y"\r\nz!1', "logprob": -2.25, "score": -0.75},
    {"id": "b", "error": "line 2: prompt has 900 tokens, but the target has 512 positions"},
    {"id": "c", "error": "line 3: logprob is nan and score is nan: not finite numbers"},
]
PARQUET = ("generate", "--output-format", "parquet")


def as_csv(rows: list[dict[str, object]]) -> list[dict[str, str]]:
    """Rows as a reader of CSV sees them."""
    return [{name: str(row.get(name, "")) for name in HEADER.split(",")} for row in rows]


def parquet_rows(path: Path) -> list[dict[str, object]]:
    """Rows without what is null."""
    rows = pyarrow.parquet.read_table(path).to_pylist()
    return [{name: cell for name, cell in row.items() if cell is not None} for row in rows]


def test_a_line_of_csv_per_beam(dsbd: Dsbd, tmp_path: Path) -> None:
    outcome = dsbd("generate", "--output-format", "csv", lines=ROWS)
    assert outcome.code == 3
    assert outcome.out.startswith(f'{HEADER}\na,1,,"x, ""y""\r\nz!0",-1.25,-0.4166')
    assert outcome.out.endswith("finite numbers,,\n")
    assert list(csv.DictReader(io.StringIO(outcome.out, newline=""))) == as_csv(TABLE)
    path = tmp_path / "out.csv.gz"
    path.write_bytes(b"older")
    arguments = ("generate", "--output-format", "csv", "-o", str(path), "--existing", "overwrite")
    assert dsbd(*arguments, lines=ROWS).code == 3
    assert gzip.decompress(path.read_bytes()).decode() == outcome.out
    assert dsbd("generate", "--output-format", "csv", lines=b"").out == f"{HEADER}\n"


def test_the_same_rows_in_parquet(dsbd: Dsbd, tmp_path: Path) -> None:
    path = tmp_path / "out.parquet"
    path.write_bytes(b"older and longer than nothing" * 1000)
    assert dsbd(*PARQUET, "-o", str(path), "--existing", "overwrite", lines=ROWS).code == 3
    assert parquet_rows(path) == TABLE
    assert ",".join(pyarrow.parquet.read_schema(path).names) == HEADER
    assert dsbd(*PARQUET, "-o", str(path), "--existing", "overwrite", lines=b"").code == 0
    assert pyarrow.parquet.read_table(path).num_rows == 0


def write_table(path: Path, rows: list[dict[str, object]]) -> None:
    if path.suffix == ".parquet":
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
        return
    text = io.StringIO()
    writer = csv.DictWriter(text, list(rows[0]), delimiter="\t" if path.name.startswith("in.tsv") else ",")
    writer.writeheader()
    writer.writerows(rows)
    data = text.getvalue().encode()
    path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)


@pytest.mark.parametrize("name", ["in.csv", "in.tsv.gz", "in.parquet"])
def test_a_table_is_known_by_its_ending(dsbd: Dsbd, tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    write_table(path, [{"id": "01", "prompt": "a\nb", "ticket": "5"}, {"id": "2", "prompt": "fail", "ticket": ""}])
    outcome = dsbd("generate", "-i", str(path))
    assert (outcome.code, [row["id"] for row in outcome.records]) == (3, ["01", "2"])
    assert outcome.records[0]["text"] == "a\nb!0"
    assert outcome.records[1]["error"]["line"] == (2 if name == "in.parquet" else 4)  # type: ignore[index]
    assert [row.get("metadata") for row in outcome.records] == [{"ticket": "5"}, None]
    strict = dsbd("generate", "--input-format", "strict", "-i", str(path))
    assert (strict.code, strict.out, strict.err.count("\n")) == (2, "", 1)
    assert "the column 'ticket' is no field, which --input-format strict refuses" in strict.err
    assert dsbd("generate", "--shard", "1/2", "-i", str(path), "-o", str(tmp_path / "o")).code == 3
    assert json.loads((tmp_path / "o.1-of-2").read_bytes())["id"] == "2"


def test_columns_of_a_users_table_cost_no_row(dsbd: Dsbd, tmp_path: Path) -> None:
    """Guards 197 of 200 rows, which failed because of what their columns are called."""
    path = tmp_path / "in.csv"
    rows = [{"key": f"k{n}", "prompt": f"p{n}", "n": n, "language": "de", "stop": f"Stop {n}"} for n in range(200)]
    write_table(path, rows)  # type: ignore[arg-type]
    outcome = dsbd("generate", "-i", str(path))
    assert (outcome.code, outcome.err.count("\n")) == (0, 1)
    assert f"{path}: the columns n, language, stop are carried, and no field of the rows (--set columns=n_best=n," in (
        outcome.err
    )
    assert outcome.records[7]["metadata"] == {"key": "k7", "n": "7", "language": "de", "stop": "Stop 7"}
    assert outcome.records[7]["text"] == "p7!0"
    named = dsbd("generate", "-i", str(path), "--set", "columns=id=key,stop")
    assert (named.code, named.err) == (0, "")
    assert (named.records[7]["id"], named.records[7]["metadata"]) == ("k7", {"n": "7", "language": "de"})


CARRIED = [
    {"id": "a", "prompt": "x", "text": "t, 1", "score": 1.5, "count": 3, "open": True},
    {"id": "b", "prompt": "fail", "text": "", "score": None, "count": None, "open": False},
]


@pytest.mark.parametrize("name", ["in.csv", "in.parquet"])
def test_a_table_carries_the_columns_of_its_input(dsbd: Dsbd, tmp_path: Path, name: str) -> None:
    """Behind its own. One with the name of another column is told from it."""
    write_table(tmp_path / name, CARRIED)
    out = tmp_path / f"out{name[2:]}"
    form = name.removeprefix("in.")
    command = ("generate", "-i", str(tmp_path / name), "-o", str(out), "--output-format")
    assert dsbd(*command, form, "--n-best", "2").code == 3
    header = f"{HEADER},input_text,input_score,count,open"
    if form == "csv":
        records = list(csv.DictReader(io.StringIO(out.read_text(), newline="")))
        assert ",".join(records[0]) == header
        cells = [[row[column] for column in header.split(",")[-4:]] for row in records]
        assert cells == [["t, 1", "1.5", "3", "True"]] * 2 + [["", "", "", "False"]]
        return
    table = pyarrow.parquet.read_table(out)
    assert ",".join(table.column_names) == header
    assert [str(kind) for kind in table.schema.types[-4:]] == ["string", "double", "int64", "bool"]
    cells = [list(row.values())[-4:] for row in table.to_pylist()]
    assert cells == [["t, 1", 1.5, 3, True]] * 2 + [[None, None, None, False]]
    as_text = dsbd("generate", "-i", str(tmp_path / name), "--output-format", "csv")
    assert as_text.out.splitlines()[1].endswith('"t, 1",1.5,3,true')


def test_a_table_of_a_pipe_cannot_carry_columns(dsbd: Dsbd, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "in.csv")
    (tmp_path / "rows").write_text("prompt,ticket\nx,5\n")
    arguments = ("generate", "-i", str(tmp_path / "in.csv"))
    with subprocess.Popen(["cp", str(tmp_path / "rows"), str(tmp_path / "in.csv")]):
        assert dsbd(*arguments).records[0]["metadata"] == {"ticket": "5"}
    with subprocess.Popen(["cp", str(tmp_path / "rows"), str(tmp_path / "in.csv")]):
        refused = dsbd(*arguments, "--output-format", "csv")
    assert (refused.code, refused.out, refused.err.count("\n")) == (2, "", 1)
    assert "in.csv, which is no ordinary file: they are not known before it is read" in refused.err


def test_a_table_is_gone_on_with_and_merged_as_lines_are(dsbd: Dsbd, tmp_path: Path) -> None:
    """A cell that is carried may change, because it asks for nothing. Other columns as fields are other settings."""
    path, out = tmp_path / "in.csv", tmp_path / "out.jsonl"
    path.write_text("key,question,note\na,x,1\nb,y,1\nc,z,1\n")
    columns = ("--set", "columns=id=key,prompt=question")
    arguments = ("generate", "-i", str(path), "-o", str(out), "--existing", "resume")
    assert dsbd(*arguments, *columns).code == 0
    whole = [(record["id"], record["metadata"]) for record in map(json.loads, out.read_text().splitlines())]
    path.write_text("key,question,note\na,x,2\nc,z,2\nb,other,2\n")
    assert dsbd(*arguments, *columns).code == 0
    records = [json.loads(line) for line in out.read_text().splitlines()]
    assert [(record["id"], record["text"], record["metadata"]["note"]) for record in records] == [
        ("a", "x!0", "1"), ("b", "y!0", "1"), ("c", "z!0", "1"), ("b", "other!0", "2"),
    ]  # fmt: skip
    other = dsbd(*arguments, "--set", "columns=prompt=question")
    assert (other.code, "--set columns was 'id=key,prompt=question' and is 'prompt=question'" in other.err) == (2, True)
    path.write_text("key,question,note\na,x,1\nb,y,1\nc,z,1\n")
    for part in ("0/2", "1/2"):
        shard = ("--shard", part, "-o", str(tmp_path / "parts.jsonl"))
        assert dsbd("generate", "-i", str(path), *shard, *columns).code == 0
    parts = [str(path) for path in sorted(tmp_path.glob("parts.jsonl.*-of-2"))]
    assert dsbd("merge", *parts, "-o", str(tmp_path / "merged.jsonl")).code == 0
    merged = [json.loads(line) for line in (tmp_path / "merged.jsonl").read_text().splitlines()]
    assert [(record["id"], record["metadata"]) for record in merged] == whole


def test_a_mapping_of_columns_needs_a_table(dsbd: Dsbd, tmp_path: Path) -> None:
    (tmp_path / "in.jsonl").write_text('{"prompt": "x"}\n')
    (tmp_path / "in.csv").write_text("question\nx\n")
    columns = ("--set", "columns=prompt=question")
    for arguments in (
        (),
        ("-i", str(tmp_path / "in.jsonl")),
        ("-i", str(tmp_path / "in.csv"), "--input-format", "text"),
    ):
        refused = dsbd("generate", *arguments, *columns)
        assert (refused.code, refused.out, refused.err.count("\n")) == (2, "", 1)
        assert "--set columns=prompt=question would do nothing, because the input is no table" in refused.err


@pytest.mark.parametrize("name", ["in.csv", "in.parquet"])
def test_a_table_without_prompts_is_told_before_anything_is_changed(dsbd: Dsbd, tmp_path: Path, name: str) -> None:
    write_table(tmp_path / name, [{"id": "1", "question": "x"}])
    output = tmp_path / "out.jsonl"
    output.write_bytes(b"kept")
    outcome = dsbd("generate", "-i", str(tmp_path / name), "-o", str(output), "--existing", "overwrite")
    assert (outcome.code, outcome.loads, output.read_bytes()) == (2, [], b"kept")
    assert "cannot be used: no column is called prompt" in outcome.err
    assert outcome.err.count("\n") == 1


@pytest.mark.parametrize("text", ['[\n {"prompt": "a"}\n]', '\ufeff\n  [{"prompt": "a"}, {"prompt": "b"}]'])
def test_a_json_array_gets_a_hint(dsbd: Dsbd, tmp_path: Path, text: str) -> None:
    path = tmp_path / "in.json"
    path.write_text(text, encoding="utf-8")
    outcome = dsbd("generate", "-i", str(path))
    assert (outcome.code, outcome.out, outcome.loads) == (2, "", [])
    assert "holds a JSON array, but rows are lines with an object each: jq -c '.[]' makes lines" in outcome.err
    piped = dsbd("generate", lines=text.removeprefix("\ufeff").strip().encode())
    assert "jq -c '.[]' makes lines of a JSON array" in piped.records[0]["error"]["message"]  # type: ignore[index]
    assert dsbd("generate", "--input-format", "text", "-i", str(path)).records[0]["text"].endswith("!0")  # type: ignore[attr-defined]


NO_KEY = "whose lines do not say what was asked: native and openai lines have a key that does"
REFUSED: list[tuple[str, str]] = [
    (f"generate --output-format {form} {rest}", message)
    for form in ("csv", "parquet")
    for rest, message in (
        ("-o x --existing resume", f"--existing resume cannot go on with --output-format {form}, {NO_KEY}"),
        ("-i in.csv -o x --shard 0/2", f"--shard cannot write --output-format {form}, {NO_KEY}"),
    )
] + [
    ("generate --output-format parquet", "--output-format parquet needs an ordinary file, which a pipe is not"),
    ("generate --output-format parquet -o -", "--output-format parquet needs an ordinary file"),
    ("generate --output-format parquet -o /dev/null", "--output-format parquet needs an ordinary file"),
    ("generate --output-format parquet -o x.gz", "compressed inside: name --output without .gz"),
    ("merge in.csv -o x", f"merge takes parts of native or openai lines, but in.csv is a table, {NO_KEY}"),
    ("pick --by score -i in.csv", "records, which hold the key of their row, not a table such as in.csv"),
    ("pick --by score --output-format csv", "--output-format is 'csv', but must be one of native, text, lines"),
]


@pytest.mark.parametrize(("arguments", "message"), REFUSED)
def test_what_tables_cannot_do_is_one_line(
    dsbd: Dsbd, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: str, message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("in.csv").write_text("prompt\nx\n")
    outcome = dsbd(*arguments.split())
    assert (outcome.code, outcome.out, outcome.loads) == (2, "", [])
    assert message in outcome.err
    assert outcome.err.count("\n") == 1
    assert [path.name for path in tmp_path.iterdir()] == ["in.csv"]


def test_lines_of_csv_that_are_piped_to_pick_are_refused(dsbd: Dsbd) -> None:
    table = dsbd("generate", "--output-format", "csv", lines=ROWS).out.encode()
    picked = dsbd("pick", "--by", "score", lines=table)
    assert (picked.code, picked.out, picked.err.count("\n")) == (2, "", 1)
    assert "which hold the key of their row, not lines of --output-format csv" in picked.err


def test_an_output_that_is_only_called_a_table_is_told_of(dsbd: Dsbd, tmp_path: Path) -> None:
    outcome = dsbd("generate", "-o", str(tmp_path / "out.csv"))
    assert (outcome.code, outcome.err.count("\n")) == (0, 1)
    assert "out.csv gets lines of native: --output-format csv or parquet writes a table" in outcome.err


WITHOUT_PYARROW = """
import sys
class Missing:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "pyarrow":
            raise ModuleNotFoundError("No module named 'pyarrow'")
sys.meta_path.insert(0, Missing())
import importlib.util
find_spec = importlib.util.find_spec
importlib.util.find_spec = lambda name, *rest: None if name == "pyarrow" else find_spec(name, *rest)
from dsbd_cli.__main__ import main
main()
"""


def test_pyarrow_is_imported_for_parquet_alone(tmp_path: Path) -> None:
    (tmp_path / "in.csv").write_text("prompt,temperature\n,hot\n")
    (tmp_path / "in.parquet").write_bytes(b"")

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-c", WITHOUT_PYARROW, "generate", *arguments]
        return subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)

    table = run("-i", "in.csv", "--output-format", "csv")
    assert (table.returncode, table.stdout.splitlines()[0]) == (3, HEADER)
    for arguments in (("-i", "in.parquet"), ("-i", "in.csv", "--output-format", "parquet", "-o", "x")):
        refused = run(*arguments)
        assert (refused.returncode, refused.stdout) == (2, "")
        assert refused.stderr.endswith("needs pyarrow: pip install 'dsbd[parquet]'\n")
        assert refused.stderr.count("\n") == 1


def test_an_interrupted_parquet_file_can_be_read(start: Start, tmp_path: Path) -> None:
    path, summary = tmp_path / "out.parquet", tmp_path / "summary.json"
    process = start(*PARQUET, "-o", str(path), "--set", f"summary={summary}", "--batch-size", "1")
    pipe(process.stdin).write(b'{"prompt": "a"}\n{"prompt": "slow"}\n')
    pipe(process.stdin).flush()
    wait_for(process, b"fake: slow begins\n")
    process.send_signal(signal.SIGINT)
    code, _, err = finish(process)
    assert (code, [row["text"] for row in parquet_rows(path)]) == (130, ["a!0"])
    assert b"what is written is complete, but only a plain native or openai --output FILE can be resumed" in err
    assert json.loads(summary.read_bytes())["ending"] == "stopped"


def test_a_parquet_file_that_could_not_be_ended_is_not_called_complete(start: Start, tmp_path: Path) -> None:
    """All rows are answered, and only then is the file written."""
    path, summary = tmp_path / "out.parquet", tmp_path / "summary.json"

    def small_files() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (2700, 2700))

    process = start(*PARQUET, "-o", str(path), "--set", f"summary={summary}", preexec_fn=small_files)
    row = json.dumps({"prompt": "".join(map(chr, range(0x4E00, 0x5200)))}).encode()
    code, _, err = finish(process, row)
    assert code == 1
    assert err.count(b"\n") == 1
    assert b"File too large; the file is cut and cannot be read" in err
    assert json.loads(summary.read_bytes())["ending"] == "failed"
    with pytest.raises(pyarrow.ArrowInvalid):
        pyarrow.parquet.read_table(path)
