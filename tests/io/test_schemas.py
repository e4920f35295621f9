"""`dsbd schema`: schemas that are whole, that fit what is written, and that keep what a number promises.

That every line of the suite fits is held in tests/conftest.py.
"""

from __future__ import annotations

import copy
import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jsonschema
import orjson
import pytest

from dsbd_cli._version import __version__
from dsbd_cli.cli.commands import trim as trim_command
from dsbd_cli.cli.commands.pick import _record as pick_record
from dsbd_cli.cli.run import messages
from dsbd_cli.cli.run.dry_run import RowTally, dry_run_document
from dsbd_cli.cli.run.summary import Totals
from dsbd_cli.config.method import MethodConfig
from dsbd_cli.config.model import QUANTIZE, ModelSpec
from dsbd_cli.config.variants import DRAFTERS, FUSION, RULES, WIDTHS
from dsbd_cli.errors import PromptTooLongError
from dsbd_cli.io.lines.resume import DoneRows
from dsbd_cli.io.records.native_record import native_record, step_records
from dsbd_cli.io.records.openai_record import openai_record
from dsbd_cli.io.records.reader import RowReader
from dsbd_cli.io.records.record_parts import MethodRecord
from dsbd_cli.io.records.row import Row
from dsbd_cli.io.schemas.contracts import ANSWERS, CONTRACTS, DRY_RUN, OUTPUT, SHARED, STEP, TRIM
from dsbd_cli.lab.reports.bench_json import json_lines
from dsbd_cli.models.checkpoints.gguf.formats import FORMATS
from dsbd_cli.models.checkpoints.quantized.settings import READERS
from dsbd_cli.pick.candidate_rows import record_row
from dsbd_cli.pick.choosers import ByVote
from dsbd_cli.requests import Hypothesis, RequestResult, Segment, TokenDetail
from dsbd_cli.stats import DrafterStats, LayerStats, RequestStats, StepStats
from dsbd_cli.train.compare import Sums
from dsbd_cli.train.run_record import DraftAcceptance, Measurement, Milestone, Record, Speed, TrainingPlan
from dsbd_cli.train.target_answers import _line as answer_line
from dsbd_cli.train.trim import TrimReport
from tests.helpers.every_process import written_lines
from tests.helpers.schema_lock import SINCE, Fields, broken_promises, fields_of, promised, read_lock
from tests.lab.reports.test_bench_reports import report

GOLDEN = Path(__file__).with_name("golden.json")


# Schemas


@pytest.mark.parametrize("name", CONTRACTS)
def test_a_schema_is_whole_and_says_its_number(name: str) -> None:
    contract = CONTRACTS[name]
    schema = contract.schema()
    jsonschema.Draft202012Validator.check_schema(schema)
    assert (schema["title"], schema["$id"]) == (contract.id, f"urn:{contract.id.replace('.', ':').replace('/', ':')}")
    assert SHARED not in json.dumps(schema), "a validator needs no other file"
    assert str(schema["description"]).endswith(".")


def test_every_setting_of_a_rule_or_a_drafter_is_in_the_schema_of_records() -> None:
    method = OUTPUT.schema()["$defs"]["method"]["properties"]  # type: ignore[index]
    every = (*RULES.values(), *WIDTHS.values(), *DRAFTERS.values(), FUSION)
    assert {setting.field for variant in every for setting in variant.settings} <= method.keys()
    forms = [form for form in QUANTIZE if form != "none"]
    assert method["quantize"]["enum"] == [*forms, *READERS, *(f"gguf-{kind.lower()}" for kind in FORMATS), None]


def open_objects(schema: Any) -> list[str]:
    """Return places of objects whose other fields nothing is said of. Parts count as what they are parts of."""
    paths: list[str] = []

    def whole(node: Any) -> Any:
        return {**schema["$defs"][node["$ref"].rsplit("/", 1)[1]], **node} if "$ref" in node else node

    def walk(path: str, node: Any, closed: bool) -> None:
        node = whole(node)
        others = node.get("unevaluatedProperties", node.get("additionalProperties"))
        parts = [whole(part) for part in node.get("allOf", ())]
        closed = closed or others is not None or any("additionalProperties" in part for part in parts)
        if not closed and "properties" in node:
            paths.append(path)
        for part in ("allOf", "anyOf", "oneOf"):
            for child in node.get(part, ()):
                walk(path, child, closed)
        for name, child in node.get("properties", {}).items():
            if isinstance(child, dict):
                walk(f"{path}.{name}", child, False)
        for below in (node.get("items"), others):
            if isinstance(below, dict):
                walk(f"{path}[]", below, False)

    walk("", schema, False)
    return paths


@pytest.mark.parametrize("name", sorted(CONTRACTS.keys() - {"input"}))
def test_what_is_written_has_no_field_that_the_schema_does_not_know(name: str) -> None:
    """Guards documents whose every key is not held against fixed values: of profile and doctor."""
    assert open_objects(CONTRACTS[name].schema()) == []


# Every line


BAD = "from dsbd_cli.io.schemas.contracts import STEP; STEP.line({'schema': 'dsbd.step/1', 'id': 5})"


@pytest.mark.parametrize("here", [True, False], ids=["this process", "another process"])
def test_a_line_that_does_not_fit_fails_the_test_that_wrote_it(here: bool, faults_file: Path) -> None:
    assert not faults_file.exists()
    if here:
        STEP.line({"schema": "dsbd.step/1", "id": 5})
    else:
        subprocess.run([sys.executable, "-c", BAD], check=True)
    faults = faults_file.read_text(encoding="utf-8")
    faults_file.unlink()  # else this test would fail
    assert "not as `dsbd schema step` says" in faults
    assert '"iteration" is a required property' in faults


def test_a_row_that_the_reader_takes_and_the_schema_does_not_is_found(
    faults_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dsbd_cli.io.records.reader._check_limits", lambda row, sampling: None)
    RowReader().read(b'{"prompt": "a", "max_new_tokens": 2000000}', index=0, number=1)
    assert "max_new_tokens: 2000000 is greater" in faults_file.read_text(encoding="utf-8")
    faults_file.unlink()
    RowReader().read(b'{"prompt": "a", "unknown": 2000000}', index=0, number=1)
    assert not faults_file.exists(), "a field that is told and not used is no fault"


FLAT_FAULTS: list[dict[str, object]] = [
    *({"prompt": value} for value in ("", 5, ["a"], None)),
    {},
    {"prompt": "a", "messages": [{"role": "user", "content": "b"}]},
    {"messages": []},
    {"messages": [{"role": "user"}]},
    {"messages": [{"role": "user", "content": "a", "tool_calls": [1]}]},
    {"messages": [{"role": "user", "content": None}]},
    {"messages": [{"role": "user", "content": "a", "audio": {"id": "x"}}]},
    {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": "x"}]}]},
    *(
        {"prompt": "a", name: value}
        for name, values in {
            "id": ("", 1.5, ["a"], True),
            "temperature": (-1, "hot", True, 1e7),
            "top_k": (-2, 1.5, "5", True),
            "top_p": (0, 1.1, "x"),
            "min_p": (-0.1, 2),
            "max_new_tokens": (0, 1.5, 1 << 21, "8"),
            "max_tokens": (0,),
            "stop": (5, ["a", 3], [""], ["x"] * 17),
            "seed": (-1, 2**63, "z", 1.5),
            "n_best": (0, "2", 1.5),
            "n": (0,),
            "length_penalty": (11, -11, "x"),
            "early_stopping": (1, "yes"),
            "token_logprobs": (1,),
            "top_logprobs": (21, -1),
            "logprobs": (21, "yes", 1.5),
            "allow": ("", [], [""], [5], 5),
            "response_format": ("json", {}, {"type": "xml"}, {"type": "json_schema"}, {"type": "text", "more": 1}),
            "source_lang": ("", 5),
            "prefix": ("",),
            "token_rules": (5, ["a"]),
            "stream": (True,),
            "tools": ([{}], [{"type": "web_search"}], "f"),
            "tool_choice": ("any", {"type": "x"}),
            "logit_bias": ({"a": 1}, {"5": 101}, [1]),
            "presence_penalty": (2.5, "x"),
            "guided_json": (5, ["a"]),
            "guided_regex": ("", 5),
            "structured_outputs": ({}, {"structural_tag": "x"}, {"regex": "a", "choice": ["b"]}),
            "extra_body": ({"top_k": "5"}, [1], {"stream": True}),
            "max_length": (5,),
            "temprature": (1,),
        }.items()
        for value in values
    ),
]
CHAT = [{"role": "user", "content": "a"}]
ENVELOPE: dict[str, object] = {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {"prompt": "a"}}
ENVELOPE_FAULTS: list[dict[str, object]] = [
    {**ENVELOPE, "method": "GET"},
    {**ENVELOPE, "url": "/v1/embeddings"},
    {**ENVELOPE, "body": None},
    {**ENVELOPE, "body": {"messages": [{"role": "user", "content": "a"}]}},
    {**ENVELOPE, "body": {"prompt": "a", "n": 0}},
    {**ENVELOPE, "body": {"prompt": "a", "unknown": 1}},
    {**ENVELOPE, "url": "/v1/chat/completions"},
    {**ENVELOPE, "more": 1},
    {**ENVELOPE, "url": "/v1/responses", "body": {"prompt": "a"}},
    {**ENVELOPE, "url": "/v1/responses", "body": {"input": [1]}},
    {**ENVELOPE, "url": "/v1/responses", "body": {"input": "a", "conversation": "c"}},
]


@pytest.mark.parametrize("row", [*FLAT_FAULTS, *ENVELOPE_FAULTS], ids=lambda row: json.dumps(row)[:60])
def test_what_the_reader_refuses_by_its_form_the_schema_refuses(row: dict[str, object]) -> None:
    line = json.dumps(row).encode()
    assert RowReader(strict=True).read(line, index=0, number=1).error is not None
    assert written_lines.faults("input", orjson.loads(line))


def test_rows_of_every_form_fit() -> None:
    rows = [
        {"prompt": "a", "id": 5, "stop": None, "unknown": None, "stream": False, "user": {"any": 1}, "logprobs": 3},
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}], "tool_calls": None}]},
        {"prompt": "a", "response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "object"}}}},
        {"prompt": "a", "metadata": [1, {"deep": None}], "token_rules": {"no_repeat_ngram_size": 3}},
        ENVELOPE,
        {**ENVELOPE, "body": {"prompt": "a", "logprobs": 2, "metadata": {"a": "b"}}},
        {**ENVELOPE, "url": "/v1/chat/completions", "body": {"messages": CHAT, "logprobs": True}},
        {**ENVELOPE, "url": "/v1/responses", "body": {"input": "a", "max_output_tokens": 5}},
    ]
    for row in rows:
        line = json.dumps(row).encode()
        assert RowReader(strict=True).read(line, index=0, number=1).error is None, row
        assert written_lines.faults("input", orjson.loads(line)) == []


# What a number promises


def test_the_schemas_keep_what_their_numbers_promise() -> None:
    faults = broken_promises(read_lock(), promised(), __version__)
    assert faults == [], "move the number (dsbd_cli/io/schemas), or take the change back:\n" + "\n".join(faults)
    new = {name: fields.keys() - read_lock()[name].keys() for name, fields in promised().items() if name in read_lock()}
    assert promised().items() <= read_lock().items(), f"note what is new: python -m tests.helpers.schema_lock ({new})"


def changed(change: Callable[[Any], None], number: int = 1, schema: dict[str, Any] | None = None) -> dict[str, Fields]:
    """Fields of step/N after a change of its schema."""
    schema = copy.deepcopy(schema or STEP.schema())
    change(schema)
    return {f"dsbd.step/{number}": fields_of(schema)}


def deprecate(schema: Any) -> None:
    schema["properties"]["trunk"] |= {"deprecated": True, SINCE: "0.1.0"}


def drop(schema: Any) -> None:
    del schema["properties"]["trunk"]
    schema["required"].remove("trunk")


CHANGES: list[tuple[str, Callable[[Any], object], str]] = [
    ("a field goes", drop, "trunk is gone"),
    ("a meaning", lambda s: s["properties"]["trunk"].update(description="slots of the prompt"), "trunk was (required"),
    ("a type", lambda s: s["properties"]["id"].update(type=["string", "null"]), "id was (required"),
    ("a bound", lambda s: s["properties"]["nodes"].update(minimum=0), "nodes was (required"),
    ("a unit, in a shared part", lambda s: s["$defs"]["phases"]["properties"]["draft_s"].update(description="ms"),
     "draft_s was (required"),
    ("no longer there", lambda s: s["required"].remove("id"), "id was (required"),
    ("deeper", lambda s: s["properties"]["layers"]["items"]["properties"].pop("width"), "layers[].width is gone"),
    ("open", lambda s: s.pop("unevaluatedProperties"), "line was (required, type"),
    ("new and required", lambda s: (s["properties"].update(new={"type": "string"}), s["required"].append("new")),
     "new is new and required"),
]  # fmt: skip


@pytest.mark.parametrize(("change", "said"), [change[1:] for change in CHANGES], ids=[change[0] for change in CHANGES])
def test_a_change_of_meaning_needs_a_new_number(change: Callable[[Any], None], said: str) -> None:
    lock = {STEP.id: fields_of(STEP.schema())}
    [fault] = broken_promises(lock, changed(change), "0.2.0")
    assert fault.startswith(f"dsbd.step/1: {said}")
    later = broken_promises(lock, changed(change, number=2), "0.2.0")
    assert [line for line in later if "without a version of warning" not in line] == []
    assert bool(later) == ("is gone" in said)


def test_what_may_change_under_one_number_and_with_the_next() -> None:
    lock = {STEP.id: fields_of(STEP.schema())}

    def add(schema: Any) -> None:
        inner = {"type": "object", "properties": {"inner": {"type": "string"}}, "required": ["inner"]}
        schema["properties"]["more"] = inner

    assert broken_promises(lock, changed(add), "0.2.0") == []
    assert broken_promises(lock, changed(deprecate), "0.2.0") == []
    assert broken_promises(lock, changed(lambda s: None, number=3), "0.2.0") == [
        "dsbd.step/3: there is no dsbd.step/2 before it"
    ]
    warned = changed(deprecate)
    assert broken_promises(warned, changed(drop, number=2), "0.2.0") == []
    assert "without a version of warning" in broken_promises(warned, changed(drop, number=2), "0.1.5")[0]
    assert broken_promises({"dsbd.old/1": {}}, {}, "0.2.0") == ["dsbd.old/1 is gone"]


# What the fields mean


SETTINGS = {
    **{"num_beams": 2, "drafter": "beam+ngram", "depth": 3, "drafts_per_layer": 8, "width": "threshold"},
    **{"width_threshold": 0.7, "min_width": 1, "ngram": 12, "second_drafts": 2, "fusion_top_k": 16},
}
METHOD = MethodRecord(MethodConfig.of(SETTINGS), "t", "d", created=1_700_000_000, threads=2)


def _result(row: Row) -> RequestResult:
    """Everything that a result can hold, each number another one."""
    assert row.request is not None
    tokens = (
        TokenDetail(7, b"a", -0.25, 0, ((7, b"a", -0.25), (8, b"b", -1.5))),
        TokenDetail(9, "é".encode()[:1], -0.5, 1, ((9, b"\xc3", -0.5),)),
        TokenDetail(2, b"", -0.125, 0, ((2, b"", -0.125),)),
    )
    best = Hypothesis("a", (7, 9, 2), "stop", -0.875, -0.4375, 5, True, tokens, (Segment(0.5, 2.0, "a"),))
    second = Hypothesis("b", (8,), "length", -1.5, -1.5, None, False, None, (Segment(0.5, None, "b"),))
    drafters = {"beam": DrafterStats(12, 3), "ngram": DrafterStats(0, 0)}
    layer = LayerStats(1, 8, 4, 2, 3, True, drafters)
    step = StepStats("x", 1, 1, 2, 12, 40, 7, [layer], 0.125, 0.25, 0.5)
    stats = RequestStats(4, 3, 10, 16, 4, 20, 99, 1.125, 2.25, 3.5, 8.0, 6, drafters, [step])
    return RequestResult(
        row.request, (best, second), 11, stats, None, 4, 13, {"no_repeat_ngram_size": 3}, "en"
    )  # fmt: skip


class _Encoder:
    def job(self, number: int, request: object) -> Any:
        return SimpleNamespace(prompt=[5, 6])


def _dry_run(row: Row, failed: RequestResult) -> dict[str, object]:
    tally, totals, done = RowTally(), Totals(), DoneRows()
    tally.record(row, replace(failed, error=None, prompt_tokens=4))
    tally.record(row, failed)
    totals.rows, totals.failed, totals.skipped, totals.skipped_failed = 2, 1, 3, 1
    done.add("gone", "k", failed=True)
    return dry_run_document(tally, totals, done, source="in", output="out", limit=8)


def _trimmed(stats: RequestStats) -> dict[str, object]:
    settings, draft = SimpleNamespace(target=ModelSpec("t")), ModelSpec("d")
    command = trim_command._Trimming(trim_command.TrimOptions(), settings, draft, Path("out"))  # type: ignore[arg-type]
    return command._record(TrimReport(3, 8, 1, 20, 4, 0.75, 64, 24), 2, (Sums(stats, 16), Sums()))


_MEASURED = Measurement(DraftAcceptance(2.5, (0.75, 0.5)), Speed(10.0, 12.5, "K = 4, D = 2"))
_DISTILLED = Record(
    TrainingPlan("t", 200, 40, 1e-3, "sample", 2, 64, 5, "float32", "ab12"), True, 21, 24,
    [Milestone(0, None, Measurement(None)), Milestone(40, 1.25, _MEASURED, _MEASURED)],
)  # fmt: skip


def written(monkeypatch: pytest.MonkeyPatch) -> dict[str, object]:
    """A line of each form, of fixed results."""
    rows = RowReader(num_beams=2)
    flat = rows.read(b'{"id": "x", "prompt": "p", "metadata": {"a": 1}, "seed": 5}', index=3, number=7)
    chat = rows.read(b'{"id": "x", "messages": [{"role": "user", "content": "p"}]}', index=3, number=7)
    result = _result(flat)
    failed = RequestResult(flat.request, (), 0, RequestStats(), PromptTooLongError("too long"))  # type: ignore[arg-type]
    native = native_record(flat, result, METHOD)
    candidates = record_row(native, index=0, number=1)
    monkeypatch.setattr(Totals, "seconds", 2.0)
    totals = Totals()
    totals.rows, totals.failed, totals.skipped = 3, 1, 2
    totals.errors["PromptTooLongError"] += 1
    totals.add(result)
    lines = {
        "output": native,
        "failed": native_record(flat, failed, METHOD),
        "openai, completion": openai_record(flat, result, METHOD),
        "openai, chat": openai_record(chat, replace(result, request=chat.request), METHOD),  # type: ignore[arg-type]
        "openai, failed": openai_record(flat, failed, METHOD),
        "step": next(step_records(result.stats.step_log)),
        "pick": pick_record(candidates, ByVote().choose(candidates), "vote", None),
        "summary": orjson.dumps(totals.numbers()),
        "bench": json_lines(report()).splitlines()[1],
        "trim": TRIM.line(_trimmed(result.stats)),
        "distill": _DISTILLED.page(),
        "dry-run": DRY_RUN.line(_dry_run(flat, failed)),
        "answers": ANSWERS.line(answer_line(_Encoder(), result)),
    }
    monkeypatch.setattr(messages, "utc_now", lambda: "2026-01-02T03:04:05Z")
    monkeypatch.setattr(messages, "_json", True)
    lines["log, words"] = messages._formatted("é\n ü", "warning", "row_failed", {}).encode()
    lines["log, numbers"] = messages._formatted("", "info", "summary", totals.numbers()).encode()
    records: dict[str, Any] = {name: orjson.loads(line) for name, line in lines.items()}
    for name in ("openai, completion", "openai, chat"):
        del records[name]["response"]["body"]["system_fingerprint"]  # of all settings, new ones too
    return records


def same_as_before(before: object, now: object, path: str) -> list[str]:
    """Return where a value is not what it was. What is new is nothing of it."""
    if isinstance(before, dict) and isinstance(now, dict):
        changes = [f"{path}.{name} is gone" for name in before.keys() - now.keys()]
        for name in before.keys() & now.keys():
            changes += same_as_before(before[name], now[name], f"{path}.{name}")
        return changes
    if isinstance(before, list) and isinstance(now, list) and len(before) == len(now):
        pairs = enumerate(zip(before, now, strict=True))
        return [change for number, pair in pairs for change in same_as_before(*pair, f"{path}[{number}]")]
    return [] if before == now and type(before) is type(now) else [f"{path} was {before!r} and is {now!r}"]


def test_a_field_means_what_it_meant_under_this_number(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards readers against a unit, a sign or a count that changes while its description does not."""
    records = written(monkeypatch)
    golden = json.loads(GOLDEN.read_text(encoding="utf-8"))
    assert golden.keys() == records.keys()
    assert same_as_before(golden, records, "") == []


if __name__ == "__main__":  # after a number has moved
    with pytest.MonkeyPatch.context() as patch:
        GOLDEN.write_text(json.dumps(written(patch), indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
