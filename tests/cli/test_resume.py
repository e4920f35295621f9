"""--existing resume, retry and overwrite over a fake engine."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from dsbd_cli.models.checkpoints import registry
from tests.cli.conftest import Outcome, pipe

Dsbd = Callable[..., Outcome]

ROWS: list[object] = [{"id": name, "prompt": name} for name in ("a", "fail", "c", "d")]


@pytest.fixture
def job(dsbd: Dsbd, tmp_path: Path) -> Callable[..., Outcome]:
    """dsbd generate from and to the same two files."""

    def call(*options: str, lines: list[object] | None = None) -> Outcome:
        if lines is not None:
            (tmp_path / "in").write_text("".join(json.dumps(line) + "\n" for line in lines))
        return dsbd("generate", "-i", str(tmp_path / "in"), "-o", str(tmp_path / "out"), *options)

    return call


def records(tmp_path: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in (tmp_path / "out").read_text().splitlines()]


def test_a_finished_job_is_not_done_again_and_needs_no_model(job: Callable[..., Outcome], tmp_path: Path) -> None:
    assert job("--existing", "resume", lines=ROWS).code == 3
    before = (tmp_path / "out").read_bytes()
    again = job("--existing", "resume")
    assert (again.code, len(again.loads)) == (3, 1), "an earlier failure still counts, and nothing is loaded for it"
    assert "4 done before, 1 of them failed (--existing retry answers them again)" in again.err
    assert (tmp_path / "out").read_bytes() == before
    clean = [row for row in ROWS if row["id"] != "fail"]  # type: ignore[index]
    assert job("--existing", "overwrite", lines=clean).code == 0
    done = job("--existing", "resume")
    assert (done.code, done.err) == (0, "")


def test_rows_are_known_by_what_they_ask_not_by_where_they_stand(job: Callable[..., Outcome], tmp_path: Path) -> None:
    job(lines=ROWS[:2])
    changed = [{"id": "new", "prompt": "n"}, ROWS[1], {"id": "a", "prompt": "another text"}, ROWS[2]]
    outcome = job("--existing", "resume", lines=changed)
    assert outcome.code == 3
    assert [record["id"] for record in records(tmp_path)] == ["a", "fail", "new", "a", "c"]
    assert "1 failed record" not in outcome.err
    assert "holds 1 record of rows that are not in the input any more" in outcome.err


@pytest.mark.parametrize("form", ["native", "openai"])
def test_failed_records_whose_row_is_gone_or_mended_are_dropped(
    job: Callable[..., Outcome], tmp_path: Path, form: str
) -> None:
    """They do not fail the job any more. A row that stands there as it was, and failed, does."""
    key = ("--output-format", form)
    name = "custom_id" if form == "openai" else "id"
    (tmp_path / "in").write_text('{"id": "a", "prompt": "a"}\n{"id": "b", "prompt": 3}\nno json\nno json\n')
    assert job(*key).code == 3
    assert [record[name] for record in records(tmp_path)] == ["a", "b", None, None]
    again = job(*key, "--existing", "resume")
    assert (again.code, len(records(tmp_path)), "dropped" in again.err) == (3, 4, False)
    (tmp_path / "in").write_text('{"id": "b", "prompt": "mended"}\n{"id": "a", "prompt": "a"}\nno json\n')
    partly = job(*key, "--existing", "resume")
    assert (partly.code, [record[name] for record in records(tmp_path)]) == (3, ["a", None, "b"])
    assert "out: 2 failed records dropped, whose rows are gone or mended" in partly.err
    (tmp_path / "in").write_text('{"id": "b", "prompt": "mended"}\n{"id": "a", "prompt": "a"}\n')
    before = len(partly.loads)
    whole = job(*key, "--existing", "resume")
    assert (whole.code, len(whole.loads) - before) == (0, 0)
    assert [record[name] for record in records(tmp_path)] == ["a", "b"]
    done = job(*key, "--existing", "resume")
    assert (done.code, done.err) == (0, "")


def test_nothing_is_dropped_by_a_run_that_does_not_see_all_rows(
    job: Callable[..., Outcome], dsbd: Dsbd, tmp_path: Path
) -> None:
    """One that ends at an error, and one whose input ends in the middle."""
    job(lines=[{"id": "x", "prompt": "fail"}])
    before = (tmp_path / "out").read_bytes()
    stopped = job("--existing", "resume", "--set", "max-errors=1", lines=[{"id": "y", "prompt": "fail"}, ROWS[0]])
    assert stopped.code == 1
    assert (tmp_path / "out").read_bytes().startswith(before)
    (tmp_path / "in.csv").write_text("question\nx\n")
    os.mkfifo(tmp_path / "pipe.csv")
    writer = subprocess.Popen(["cp", str(tmp_path / "in.csv"), str(tmp_path / "pipe.csv")])
    cut = dsbd("generate", "-i", str(tmp_path / "pipe.csv"), "-o", str(tmp_path / "out"), "--existing", "resume")
    writer.wait()
    assert (cut.code, "no column is called prompt" in cut.err) == (2, True), cut.err
    assert (tmp_path / "out").read_bytes().startswith(before)


def test_failed_rows_are_answered_again_on_demand(
    job: Callable[..., Outcome], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job(lines=ROWS)
    outcome = job("--existing", "retry")
    assert outcome.code == 3, "it fails once more"
    assert [record["id"] for record in records(tmp_path)] == ["a", "c", "d", "fail"]
    monkeypatch.setattr("tests.helpers.fake.FAILING", "none")
    assert job("--existing", "retry").code == 0
    assert ["text" in record for record in records(tmp_path)] == [True] * 4


def test_other_settings_are_refused_by_name(job: Callable[..., Outcome], tmp_path: Path) -> None:
    job("--seed", "1", lines=ROWS)
    before = (tmp_path / "out").read_bytes()
    outcome = job("--existing", "resume", "--seed", "2", "--num-beams", "2")
    assert (outcome.code, len(outcome.loads)) == (2, 1)
    assert "made with other settings: --num-beams was 4 and is 2, " in outcome.err
    assert "--seed was 1 and is 2" in outcome.err
    for same in (
        "--batch-size 3",
        "--set max-errors=9",
        "--set log=verbose",
        "--device cpu",
        "--set summary=" + str(tmp_path / "s"),
    ):
        assert job("--existing", "resume", "--seed", "1", *same.split()).code == 3
    assert (tmp_path / "out").read_bytes() == before
    for other in (
        "--input-format strict",
        "--set on-too-long=truncate-left",
        "--dtype float32",
        "--output-format openai",
    ):
        refused = job("--existing", "resume", "--seed", "1", *other.split())
        assert (refused.code, "other settings" in refused.err) == (2, True)


BUILTIN = Path(registry.__file__).parents[1] / "builtin" / "target"


def test_another_checkpoint_under_the_same_name_is_refused(job: Callable[..., Outcome], tmp_path: Path) -> None:
    """A config, a tokenizer or weights that have changed are told apart; a copy in another folder is the same model."""
    model = shutil.copytree(BUILTIN, tmp_path / "model")
    target = ("--target", str(model), "--draft", "none")
    assert job(*target, lines=ROWS[:1]).code == 0
    assert job(*target, "--existing", "resume").code == 0
    copy = shutil.copytree(model, tmp_path / "copy")
    assert job("--target", str(copy), "--draft", "none", "--existing", "resume").code == 0
    before = (tmp_path / "out").read_bytes()
    for part, file in (("config", "config.json"), ("tokenizer", "tokenizer.json"), ("weights", "model.safetensors")):
        other = shutil.copytree(BUILTIN, tmp_path / part)
        (other / file).write_bytes((other / file).read_bytes() + b" ")
        shutil.rmtree(model)
        shutil.copytree(other, model)
        outcome = job(*target, "--existing", "resume")
        assert outcome.code == 2
        [line] = outcome.err.splitlines()
        assert f"made with other settings: the digest of the target's {part} was '" in line
        assert line.count(" was ") == 2  # of the sentence, and one difference
        assert (tmp_path / "out").read_bytes() == before


def test_a_file_without_records_may_be_begun_with_other_settings(job: Callable[..., Outcome], tmp_path: Path) -> None:
    """Nothing was made with the old settings, so nothing of them may stay: no record, no step, no settings."""
    stats = ("--set", f"stats={tmp_path / 'steps'}")
    job("--seed", "1", *stats, lines=ROWS)
    old = (tmp_path / "steps").read_text()
    (tmp_path / "out").write_bytes(b"")  # killed before the first record, steps first
    assert job("--existing", "resume", "--seed", "2", "--num-beams", "2", *stats).code == 3
    assert {record["method"]["num_beams"] for record in records(tmp_path) if "method" in record} == {2}  # type: ignore[index]
    settings = json.loads((tmp_path / "out.dsbd-run").read_bytes())["settings"]
    assert (settings["seed"], settings["num_beams"]) == (2, 2)
    assert len((tmp_path / "steps").read_text().splitlines()) == len(old.splitlines())
    refused = job("--existing", "resume", "--seed", "1", *stats)
    assert (refused.code, "--seed was 2 and is 1" in refused.err) == (2, True)


def test_a_file_of_unknown_origin_is_refused(job: Callable[..., Outcome], tmp_path: Path) -> None:
    """Guards against cutting the last line of a file that is not ours."""
    for content in ('{"id": "a"}\n', '{"id": "a"}\nmy notes', "my notes"):
        (tmp_path / "out").write_text(content)
        outcome = job("--existing", "resume", lines=ROWS)
        assert (outcome.code, outcome.loads) == (2, [])
        assert "out.dsbd-run is missing" in outcome.err
        assert (tmp_path / "out").read_text() == content
    (tmp_path / "out").unlink()
    job()
    (tmp_path / "out").write_text('{"id": "a"}\nmy notes')
    outcome = job("--existing", "resume")
    assert "line 1 of" in outcome.err
    assert (outcome.code, (tmp_path / "out").read_text()) == (2, '{"id": "a"}\nmy notes')


def test_steps_of_another_run_stay(job: Callable[..., Outcome], tmp_path: Path) -> None:
    """Guards the steps of yesterday, where a new output is begun with --existing resume."""
    stats = ("--set", f"stats={tmp_path / 'steps'}")
    job(*stats, lines=ROWS)
    held = (tmp_path / "steps").read_text()
    assert held
    for name in ("out", "out.dsbd-run"):
        (tmp_path / name).unlink()
    outcome = job(*stats, "--existing", "resume", lines=ROWS)
    assert outcome.code == 2
    said = f"steps holds no step of a row in {tmp_path / 'out'}: name another file, or remove it"
    assert said in outcome.err
    assert not (tmp_path / "out").exists()
    others = [{**row, "id": f"other{number}"} for number, row in enumerate(ROWS)]
    (tmp_path / "steps").unlink()
    job(lines=others)
    (tmp_path / "steps").write_text(held)
    answers = (tmp_path / "out").read_text()
    outcome = job(*stats, "--existing", "retry", lines=others)
    assert outcome.code == 2
    assert said in outcome.err
    assert (tmp_path / "out").read_text() == answers
    assert (tmp_path / "steps").read_text() == held


@pytest.mark.parametrize("left", [b"", b'{"schema": "dsbd.out'])
def test_a_run_that_was_killed_before_its_first_record_is_begun(
    job: Callable[..., Outcome], tmp_path: Path, left: bytes
) -> None:
    if left:
        job(lines=ROWS)
    (tmp_path / "out").write_bytes(left)
    assert job("--existing", "resume", lines=ROWS).code == 3
    assert len(records(tmp_path)) == 4


def test_duplicate_ids_are_told_and_every_row_is_answered_once(job: Callable[..., Outcome], tmp_path: Path) -> None:
    rows = [ROWS[0], ROWS[0], {"id": "a", "prompt": "other"}, ROWS[0], *ROWS]
    outcome = job(lines=rows)
    assert outcome.err.count("warning: line") == 3
    assert "line 2: the id 'a' has been used before" in outcome.err
    whole = records(tmp_path)
    assert whole[0]["seed"] == whole[1]["seed"] == whole[2]["seed"]
    lines = (tmp_path / "out").read_text().splitlines(keepends=True)
    for kept in range(len(lines)):
        (tmp_path / "out").write_text("".join(lines[:kept]))
        assert job("--existing", "resume").code == 3
        assert records(tmp_path) == whole
    (tmp_path / "out").write_text("".join(lines[1::2]))
    job("--existing", "resume")
    assert sorted(map(json.dumps, records(tmp_path))) != []
    assert sorted(record["key"] for record in records(tmp_path)) == sorted(record["key"] for record in whole)


def test_openai_output_can_be_resumed_and_keeps_its_date(job: Callable[..., Outcome], tmp_path: Path) -> None:
    options = ("--output-format", "openai")
    job(*options, lines=ROWS)
    whole = (tmp_path / "out").read_bytes()
    sidecar = tmp_path / "out.dsbd-run"
    kept = json.loads(sidecar.read_bytes())
    sidecar.write_text(json.dumps({**kept, "created": 1_000_000}))
    (tmp_path / "out").write_bytes(b"".join(whole.splitlines(keepends=True)[:2]))
    assert job(*options, "--existing", "resume").code == 3
    written = records(tmp_path)
    assert [record["custom_id"] for record in written] == ["a", "fail", "c", "d"]
    assert written[3]["response"]["body"]["created"] == 1_000_000
    assert job(*options, "--existing", "retry").code == 3
    assert [record["custom_id"] for record in records(tmp_path)] == ["a", "c", "d", "fail"]


def test_stats_are_appended(job: Callable[..., Outcome], tmp_path: Path) -> None:
    stats = tmp_path / "steps"
    options = ("--set", f"stats={stats}")
    job(*options, lines=ROWS)
    steps, lines = stats.read_text(), (tmp_path / "out").read_text().splitlines(keepends=True)
    (tmp_path / "out").write_text("".join(lines[:2]))
    assert job(*options, "--existing", "resume").code == 3
    assert stats.read_text() == steps, "steps of rows without a record are written again, not twice"


def test_overwrite_replaces_only_when_the_models_are_loaded(
    job: Callable[..., Outcome], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import dsbd_cli

    job(lines=ROWS)
    before = (tmp_path / "out").read_bytes()
    with monkeypatch.context() as patch:
        patch.setattr(dsbd_cli.__dict__["loading"], "load", lambda *_, **__: 1 / 0)
        assert job("--existing", "overwrite").code == 1
    assert (tmp_path / "out").read_bytes() == before
    assert job("--existing", "overwrite", lines=ROWS[:1]).code == 0
    assert len(records(tmp_path)) == 1


def test_text_output_has_no_settings_beside_it(job: Callable[..., Outcome], tmp_path: Path) -> None:
    job(lines=ROWS)
    assert (tmp_path / "out.dsbd-run").exists()
    job("--output-format", "text", "--existing", "overwrite")
    assert (tmp_path / "out").read_text() == "a!0\n\nc!0\nd!0\n"
    assert not (tmp_path / "out.dsbd-run").exists()


def test_a_run_that_was_killed_anywhere_is_gone_on_with(job: Callable[..., Outcome], tmp_path: Path) -> None:
    """Records are only ever appended, so a kill leaves a beginning of them: in the middle of a line, of a character, at
    its end. All rows are there once in the end, and lines that were whole are not touched."""
    rows: list[object] = [{"id": f"r{n}", "prompt": "fail" if n == 1 else "ä€𝄞" * (n + 1)} for n in range(4)]
    assert job("--set", f"stats={tmp_path / 'steps'}", lines=rows).code == 3
    whole, steps = (tmp_path / "out").read_bytes(), (tmp_path / "steps").read_bytes()
    ends = [n + 1 for n, byte in enumerate(whole) if byte == ord("\n")]
    cuts = {*range(0, len(whole), 101), *(end + more for end in (0, *ends) for more in (-1, 0, 1))}
    for cut in sorted(cut for cut in cuts if 0 <= cut <= len(whole)):
        (tmp_path / "out").write_bytes(whole[:cut])
        (tmp_path / "steps").write_bytes(steps)  # a row's stand there before its record
        (tmp_path / ".out.tmp").write_bytes(b"what a kill left\n")
        outcome = job("--set", f"stats={tmp_path / 'steps'}", "--existing", "retry" if cut % 2 else "resume")
        assert outcome.code == 3, outcome.err
        written = records(tmp_path)
        assert sorted(str(record["id"]) for record in written) == ["r0", "r1", "r2", "r3"], cut
        kept = [line for line in whole[:cut].splitlines(keepends=True) if line.endswith(b"\n")]
        kept = [line for line in kept if cut % 2 == 0 or json.loads(line).get("error") is None]
        assert (tmp_path / "out").read_bytes().startswith(b"".join(kept)), cut
        logged = [json.loads(line)["id"] for line in (tmp_path / "steps").read_text().splitlines()]
        assert sorted(logged) == ["r0", "r2", "r3"], cut


def test_nothing_replaces_the_settings_file(job: Callable[..., Outcome], tmp_path: Path) -> None:
    """Guards records that cannot be gone on with, because another file of the run took the name."""
    settings = tmp_path / "out.dsbd-run"
    for name in ("stats", "summary"):
        outcome = job("--set", f"{name}={settings}", lines=ROWS)
        assert (outcome.code, outcome.loads) == (2, [])
        assert f"--set {name} and the settings file of --output are both {settings}" in outcome.err
    settings.symlink_to(tmp_path / "in")
    outcome = job()
    assert (outcome.code, f"the settings file of --output {settings} is the input" in outcome.err) == (2, True)


def test_a_file_is_kept_where_no_settings_can_stand_beside_it(dsbd: Dsbd, tmp_path: Path) -> None:
    (tmp_path / "in").write_text(json.dumps(ROWS[0]) + "\n")
    out = tmp_path / ("x" * 250)
    out.write_text("before")
    outcome = dsbd("generate", "-i", str(tmp_path / "in"), "-o", str(out), "--existing", "overwrite")
    assert (outcome.code, outcome.loads, out.read_text()) == (2, [], "before")
    assert "File name too long" in outcome.err


@pytest.mark.parametrize("link", [os.link, os.symlink], ids=["hard", "soft"])
def test_the_input_under_another_name_is_not_overwritten(
    job: Callable[..., Outcome], tmp_path: Path, link: Callable[[Path, Path], None]
) -> None:
    (tmp_path / "in").write_text(json.dumps(ROWS[0]) + "\n")
    link(tmp_path / "in", tmp_path / "out")
    outcome = job("--existing", "overwrite")
    assert (outcome.code, "is the input" in outcome.err) == (2, True), outcome.err
    assert json.loads((tmp_path / "in").read_text()) == ROWS[0]


@pytest.mark.parametrize("existing", ["resume", "retry", "overwrite"])
def test_a_second_run_on_one_output_changes_nothing(
    job: Callable[..., Outcome], start: Callable[..., subprocess.Popen[bytes]], tmp_path: Path, existing: str
) -> None:
    """The first one is at work. Guards records that two runs mix, and a file that is emptied under a run."""
    process = start("generate", "-o", str(tmp_path / "out"), "--batch-size", "1")
    pipe(process.stdin).write(b'{"prompt": "a"}\n{"prompt": "fail"}\n{"prompt": "stubborn"}\n')
    pipe(process.stdin).flush()
    for line in iter(pipe(process.stderr).readline, b""):
        if line == b"fake: stubborn begins\n":
            break
    before = (tmp_path / "out").read_bytes()
    assert before.count(b"\n") == 2
    outcome = job("--existing", existing, lines=ROWS)
    assert (outcome.code, outcome.loads) == (1, [])
    assert "is being written by another process" in outcome.err
    assert (tmp_path / "out").read_bytes() == before
    process.kill()
    process.communicate()
