"""--allow from the command line to the record, with a tiny checkpoint on disk; and the compiled file beside a large
catalogue."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import orjson
import psutil
import pytest

from dsbd_cli.engine.constraints import catalogues, compiled
from dsbd_cli.engine.constraints.answers import CatalogueAnswer, CatalogueCompiler
from dsbd_cli.errors import UsageError
from dsbd_cli.models.tokenizer import HFCodec
from tests.cli.conftest import Outcome
from tests.cli.test_real_engine import Call, generate, pair  # noqa: F401 - fixtures
from tests.helpers.checkpoints import byte_level, wrap

ROWS = ['{"id": "a", "prompt": "The quick"}', '{"id": "b", "prompt": "select name", "n_best": 4}']


def lines(path: Path, *rows: object) -> Path:
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return path


def beams(record: dict[str, object]) -> list[tuple[object, object]]:
    entries = record["beams"]
    assert isinstance(entries, list)
    return [(entry["text"], entry.get("answer_id")) for entry in entries]


def test_records_hold_allowed_answers_and_their_ids(generate: Call, tmp_path: Path) -> None:  # noqa: F811
    path = lines(tmp_path / "c.jsonl", {"text": " fox", "id": 7}, {"text": " foxes", "id": "f"}, {"text": " dog"})
    first, second = generate("--allow", str(path), lines=ROWS, code=0)
    expected = {" fox": 7, " foxes": "f", " dog": None}
    assert len(beams(first)) == 1
    assert sorted(str(text) for text, _ in beams(second)) == sorted(expected)
    assert all(expected[str(text)] == answer for text, answer in beams(first) + beams(second))
    assert first["answer_id" if first.get("answer_id") is not None else "text"] == (first.get("answer_id") or " dog")
    plain = lines(tmp_path / "c.txt", " fox", "", " foxes", " dog")
    for options in ((), ("--decode", "search"), ("--verify", "rejection")):
        for record in generate("--allow", str(plain), *options, lines=ROWS, code=0):
            assert {text for text, _ in beams(record)} <= set(expected)


def test_rows_choose_a_catalogue_or_bring_their_own(generate: Call, tmp_path: Path) -> None:  # noqa: F811
    rows = [{"text": " fox", "catalogue": "animals", "id": 1}, {"text": " red", "catalogue": "colours", "id": 1}]
    path = lines(tmp_path / "c.jsonl", *rows)
    asked = [
        '{"prompt": "x", "allow": "animals"}',
        '{"prompt": "x", "allow": "colours"}',
        '{"prompt": "x", "allow": [" one", " two"], "n_best": 3}',
        '{"prompt": "x"}',
        '{"prompt": "x", "allow": "films"}',
        '{"prompt": "x", "allow": [" one", ""]}',
        '{"prompt": "x", "allow": "animals", "stop": "e"}',
    ]
    records = generate("--allow", str(path), lines=asked, code=3)
    assert [beams(record) for record in records[:2]] == [[(" fox", 1)], [(" red", 1)]]
    assert {text for text, _ in beams(records[2])} == {" one", " two"}
    told = [str(record["error"]["message"]) for record in records[3:]]  # type: ignore[index]
    assert "line 4: allow is not given, but the catalogues have names: give one of animals, colours" in told[0]
    assert "line 5: allow is 'films', but the catalogues are animals, colours" in told[1]
    assert "line 6: allow is [' one', ''], but must be a catalogue's name or a list of answers" in told[2]
    assert "line 7: stop is ['e'], but allow says where an answer ends" in told[3]


WRONG: dict[str, tuple[list[object], str]] = {
    "double": ([{"text": " a"}, {"text": " b"}, {"text": " a"}], "line 3 has the same tokens as .* line 1"),
    "json": (['{"text": " a"}', "{"], "line 2: not JSON"),
    "both": ([{"text": " a", "token_ids": [1]}], "line 1: give text or token_ids, one of them"),
    "field": ([{"text": " a", "name": 1}], "line 1: unknown field 'name'"),
    "id": ([{"text": " a", "id": [1]}], r"line 1: id is \[1\], but must be a string or an integer"),
    "empty": ([{"text": ""}], "line 1: text is '', but must be a non-empty string"),
    "tokens": ([{"token_ids": ["a"]}], "line 1: token_ids is .* but must be a list of integers"),
    "nothing": ([" "], "holds no answer"),
}


TABLE = 'note,text,id,catalogue\n"a, b", fox,7,\n,"says ""no""\nor not",,\n\n,red,r,colours\n'


def test_answers_of_a_table(tmp_path: Path) -> None:
    """As its reader sees them, header and quotes included."""
    wanted = {"": [(" fox", b'"7"'), ('says "no"\nor not', b"")], "colours": [("red", b'"r"')]}
    for name, text in (("c.csv", TABLE), ("c.tsv", "text\tid\tcatalogue\n fox\t7\n"), ("c.CSV", "\ufeff" + TABLE)):
        (tmp_path / name).write_text(text, encoding="utf-8")
        if name == "c.tsv":
            with pytest.raises(UsageError, match=r"c.tsv line 2: the row has 2 cells, but the header has 3"):
                catalogues.read_catalogues(tmp_path / name)
            continue
        by_name = catalogues.read_catalogues(tmp_path / name)
        assert {name: [(answer.text, answer.id) for answer in some] for name, some in by_name.items()} == wanted
        assert [answer.place.rpartition(" ")[2] for some in by_name.values() for answer in some] == ["2", "3", "6"]
    (tmp_path / "t.csv").write_text('token_ids\n"[1, 2]"\n')
    assert [answer.tokens for answer in catalogues.read_catalogues(tmp_path / "t.csv")[""]] == [(1, 2)]


@pytest.mark.parametrize(
    ("name", "data", "message"),
    [
        ("c.csv", b"yes\nno\n", "no column is called text or token_ids; there are 'yes': rename the column of the"),
        ("c.csv", b"text,text\na,b\n", "the column text stands twice"),
        ("c.csv", b'text\n"a"b\n', "line 2: not valid CSV"),
        ("c.csv", b"text\n\xff\n", "c.csv is not UTF-8"),
        ("c.parquet", b"PAR1", "c.parquet is Parquet, which is not read"),
        ("c.txt.gz", b"\x1f\x8b", "c.txt.gz is compressed, which is not read"),
        (
            "c.txt",
            "yes\nno\n".encode("utf-16"),
            "c.txt is UTF-16, but must be UTF-8; convert it with: iconv -f UTF-16 -t",
        ),
        (
            "c.lark",
            "start: x".encode("utf-32"),
            "c.lark is UTF-32, but must be UTF-8; convert it with: iconv -f UTF-32",
        ),
    ],
)
def test_a_file_that_holds_no_answers_is_refused_before_a_model_is_loaded(
    dsbd: Callable[..., Outcome], tmp_path: Path, name: str, data: bytes, message: str
) -> None:
    (tmp_path / name).write_bytes(data)
    outcome = dsbd("generate", "--allow", str(tmp_path / name))
    assert (outcome.code, outcome.out, outcome.loads, outcome.err.count("\n")) == (2, "", [], 1)
    assert message in outcome.err


def test_answers_that_differ_by_blanks_at_the_end_are_told(tmp_path: Path) -> None:
    told: list[str] = []
    rows = [{"text": text, "catalogue": name} for name, text in (("a", " x"), ("a", " y"), ("b", " x "))]
    catalogues.open_catalogues(lines(tmp_path / "c.jsonl", *rows), codec(), 400, told.append)
    assert told == []
    path = lines(tmp_path / "c.txt", " x", " y", " x  ", " z", " x ")
    catalogues.open_catalogues(path, codec(), 400, told.append)
    assert told == [
        f"{path} line 1: the answer ' x' differs from ' x ', which is allowed too, by blanks at the end alone "
        "(2 answers are like this)"
    ]


def codec() -> HFCodec:
    return HFCodec(wrap(byte_level()), (0,))


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_line_is_named(name: str, tmp_path: Path) -> None:
    rows, message = WRONG[name]
    with pytest.raises(UsageError, match=message):
        catalogues.open_catalogues(lines(tmp_path / "c.jsonl", *rows), codec(), 400)


def test_a_text_that_the_tokenizer_cannot_say(tmp_path: Path) -> None:
    class Lossy(HFCodec):
        def encode_pieces(self, texts: list[str]) -> list[list[int]]:
            return super().encode_pieces([text.lower() for text in texts])

    with pytest.raises(Exception, match="line 1 is ' Fox', but the target's tokenizer can only say ' fox'"):
        CatalogueCompiler(Lossy(wrap(byte_level()), (0,)), 400).compile([CatalogueAnswer("line 1", text=" Fox")])


def test_a_catalogue_that_memory_does_not_hold_is_refused_before_it_is_held(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    huge = tmp_path / "huge.txt"
    with huge.open("wb") as stream:
        stream.truncate(1 << 43)
    with pytest.raises(UsageError, match=r"huge.txt does not fit into memory: 8192.0 GiB, which takes about .* split"):
        catalogues.read_catalogues(huge)
    many = tmp_path / "many.txt"
    many.write_text("a\n" * 1000)
    monkeypatch.setattr(catalogues, "free_bytes", lambda device: 500_000)
    with pytest.raises(UsageError, match="1,000 lines, which takes about"):
        catalogues.read_catalogues(many)
    monkeypatch.setattr(catalogues, "free_bytes", lambda device: 700_000)
    assert len(catalogues.read_catalogues(many)[""]) == 1000


def test_a_large_catalogue_is_kept_beside_its_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(catalogues, "KEPT_FROM", 3)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    rows = [{"text": f" {at}", "id": at, "catalogue": "ab"[at % 2]} for at in range(9)]
    path = lines(tmp_path / "c.jsonl", *rows)
    first = catalogues.open_catalogues(path, codec(), 400)
    [kept] = tmp_path.glob("c.jsonl.*.trie")
    monkeypatch.setattr(catalogues, "read_catalogues", lambda path: pytest.fail("compiled again"))
    again = catalogues.open_catalogues(path, codec(), 400)
    tokens = codec().encode_pieces([" 5"])[0]
    for by_name in (first, again):
        assert {name: len(catalogue) for name, catalogue in by_name.items()} == {"a": 5, "b": 4}
        assert by_name["b"].id_of([*tokens, 0]) == 5
        assert by_name["b"].trie.longest == len(tokens) + 1
    monkeypatch.undo()
    monkeypatch.setattr(catalogues, "KEPT_FROM", 3)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    kept.write_bytes(kept.read_bytes()[:-20])  # cut off: made again
    assert len(catalogues.open_catalogues(path, codec(), 400)["a"]) == 5
    lines(path, *rows[:7])  # another content: another file
    assert len(catalogues.open_catalogues(path, codec(), 400)["a"]) == 4
    assert len(list(tmp_path.glob("c.jsonl.*.trie"))) == 2


def _first_line(kept: Path) -> tuple[dict[str, Any], int]:
    line = kept.read_bytes().partition(b"\n")[0]
    return orjson.loads(line), len(line) + 1


@pytest.mark.parametrize("array", range(5), ids=["keys", "nodes", "order", "starts", "ids"])
@pytest.mark.parametrize("signed", [False, True], ids=["as it is", "with a checksum that fits"])
def test_a_damaged_compiled_file_is_compiled_anew(
    array: int, signed: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One number of one array is another; a checksum that fits leaves the ranges and the order to find it."""
    monkeypatch.setattr(catalogues, "KEPT_FROM", 1)
    path = lines(tmp_path / "c.jsonl", *({"text": f" {at}", "id": at} for at in range(9)))
    first, told = catalogues.open_catalogues(path, codec(), 400), []
    [kept] = tmp_path.glob("c.jsonl.*.trie")
    whole = kept.read_bytes()
    head, at = _first_line(kept)
    for array_index, count in enumerate(head["catalogues"][0][2]):
        at += -at % compiled.ALIGNED
        size = count * (8 if array_index < 4 else 1)
        if array_index == array:
            data = bytearray(whole)
            second = at + (8 if array < 4 else 1)
            data[second : 2 * second - at] = b"\xff" * (second - at)
            kept.write_bytes(bytes(data))
        at += size
    if signed:
        monkeypatch.setattr(compiled, "_checksum", lambda arrays: head["body"])
    by_name = catalogues.open_catalogues(path, codec(), 400, told.append)
    assert len(told) == 1
    assert "is damaged (" in told[0]
    assert "is compiled anew" in told[0]
    for at in range(9):
        tokens = [*codec().encode_pieces([f" {at}"])[0], 0]
        assert by_name[""].id_of(tokens) == first[""].id_of(tokens) == at
    assert kept.read_bytes() == whole


@pytest.mark.parametrize("change", ["key", "fanout", "counts", "head"])
def test_a_compiled_file_whose_numbers_do_not_fit(change: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(catalogues, "KEPT_FROM", 1)
    path, told = lines(tmp_path / "c.jsonl", *({"text": f" {at}"} for at in range(9))), []
    catalogues.open_catalogues(path, codec(), 400)
    [kept] = tmp_path.glob("c.jsonl.*.trie")
    head, begin = _first_line(kept)
    [[name, fanout, counts]] = head["catalogues"]
    body = bytearray(kept.read_bytes()[begin + -begin % compiled.ALIGNED :])
    if change == "key":
        body[8:16] = (399 + 401 * 5).to_bytes(8, "little")
        monkeypatch.setattr(compiled, "_checksum", lambda arrays: head["body"])
    elif change == "fanout":
        fanout[0] += 1
    elif change == "counts":
        counts[0] += 1
    else:
        head["catalogues"] = [name]
    line = orjson.dumps(head) + b"\n"
    kept.write_bytes(line + bytes(-len(line) % compiled.ALIGNED) + bytes(body))
    assert len(catalogues.open_catalogues(path, codec(), 400, told.append)[""]) == 9
    assert len(told) == 1
    assert "is damaged (" in told[0]


def test_an_answer_that_no_target_could_say_is_refused_before_the_trie(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dsbd_cli.engine.constraints.answers.build_trie", lambda *_: pytest.fail("a trie was made"))
    asked = [{"token_ids": [5]}, {"token_ids": [5] * 1_000_000}]
    with pytest.raises(UsageError, match=r"c.jsonl line 2 has 1000000 tokens, but an answer may have 32768"):
        catalogues.open_catalogues(lines(tmp_path / "c.jsonl", *asked), codec(), 400)
    with pytest.raises(UsageError, match=r"c.jsonl line 1 has 2000000 letters, but an answer may have 1048576"):
        catalogues.open_catalogues(lines(tmp_path / "c.jsonl", {"text": "a" * 2_000_000}), codec(), 400)


def test_many_catalogues_keep_one_file_open(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(catalogues, "KEPT_FROM", 1)
    path = lines(tmp_path / "c.jsonl", *({"text": " a", "id": at, "catalogue": f"{at}"} for at in range(40)))
    catalogues.open_catalogues(path, codec(), 400)
    monkeypatch.setattr(catalogues, "read_catalogues", lambda path: pytest.fail("compiled again"))
    process = psutil.Process()
    before = process.num_fds()
    by_name = catalogues.open_catalogues(path, codec(), 400)
    assert [catalogue.id_of([*codec().encode_pieces([" a"])[0], 0]) for catalogue in by_name.values()] == list(
        range(40)
    )
    assert process.num_fds() - before <= 1


def test_a_run_that_is_stopped_while_it_keeps_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def stopped(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(catalogues, "KEPT_FROM", 1)
    monkeypatch.setattr(compiled.np, "ascontiguousarray", stopped)
    path = lines(tmp_path / "c.txt", " a")
    with pytest.raises(KeyboardInterrupt):
        catalogues.open_catalogues(path, codec(), 400)
    assert list(tmp_path.iterdir()) == [path]


def test_objects_in_a_file_of_another_name(tmp_path: Path) -> None:
    """They would be taken for texts, and the model would write JSON."""
    with pytest.raises(UsageError, match=r"c.json line 2 is an object, but .* ends in .jsonl: rename it"):
        catalogues.open_catalogues(lines(tmp_path / "c.json", " a", {"text": " b", "id": 1}), codec(), 400)
    by_name = catalogues.open_catalogues(lines(tmp_path / "c.txt", {"answer": "b"}, "{a"), codec(), 400)
    assert len(by_name[""]) == 2


def test_a_user_without_a_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def nobody() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(Path, "home", nobody)
    assert len(catalogues.open_catalogues(lines(tmp_path / "c.txt", " a"), codec(), 400)[""]) == 1


def test_a_folder_that_cannot_be_written_sends_it_to_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(catalogues, "KEPT_FROM", 1)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    path = lines(tmp_path / "c.txt", " a", " b")
    keep = catalogues.write_compiled
    monkeypatch.setattr(
        catalogues, "write_compiled", lambda path, *rest: False if path.parent == tmp_path else keep(path, *rest)
    )
    assert len(catalogues.open_catalogues(path, codec(), 400)[""]) == 2
    assert len(list((tmp_path / "cache" / "dsbd").glob("*.trie"))) == 1
    assert len(catalogues.open_catalogues(path, codec(), 400)[""]) == 2


def test_options_that_cannot_act_are_refused(dsbd: Callable[..., Outcome], tmp_path: Path) -> None:
    path = lines(tmp_path / "c.txt", " a")
    for options, message in (
        (("--allow", str(tmp_path / "none.txt")), "none.txt is no file"),
        (("--allow", str(path), "--stop", "x"), "--stop 'x' would cut answers, but --allow says where one ends"),
        (("--allow", str(path), "--drafter", "beam+grammar"), "--drafter beam+grammar would do nothing"),
    ):
        outcome = dsbd("generate", *options, lines=[{"prompt": "x"}])
        assert outcome.code == 2
        assert message in outcome.err
