"""--shard and dsbd merge: the parts together are the file of one run, or it is said why not."""

from __future__ import annotations

import gzip
import json
import os
import resource
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from dsbd_cli.cli.commands import merge
from dsbd_cli.cli.run.shard import Shard, shard_of
from dsbd_cli.errors import OutputError, UsageError
from dsbd_cli.io.lines.lock import open_locked
from dsbd_cli.models.checkpoints import registry
from tests.cli.conftest import Outcome

Dsbd = Callable[..., Outcome]
ROWS = [{"prompt": "fail" if n == 5 else f"row {n}", **({"id": f"r{n}"} if n % 2 else {})} for n in range(11)]


class Folder:
    """An input, and parts of its output."""

    def __init__(self, path: Path, dsbd: Dsbd) -> None:
        self.path, self.dsbd = path, dsbd
        self.input = path / "in.jsonl"
        self.input.write_text("".join(json.dumps(row) + "\n" for row in ROWS))

    def run(self, *more: str, output: str = "out.jsonl") -> Outcome:
        return self.dsbd("generate", "-i", str(self.input), "-o", str(self.path / output), "--quiet", *more)

    def shards(self, count: int, *more: str) -> list[str]:
        """Answer all parts; their names."""
        for part in range(count):
            assert self.run("--shard", f"{part}/{count}", *more).code in (0, 3)
        return [str(self.path / f"out.jsonl.{part}-of-{count}") for part in range(count)]

    def merge(self, *more: str) -> Outcome:
        return self.dsbd("merge", *more, "-o", str(self.path / "all.jsonl"))

    def lines(self, name: str) -> list[object]:
        records = []
        for line in (self.path / name).read_text().splitlines():
            record = json.loads(line)
            for key in [key for key in record.get("stats", {}) if key.endswith("_s")]:
                del record["stats"][key]
            records.append(record)
        return records


@pytest.fixture
def folder(tmp_path: Path, dsbd: Dsbd) -> Folder:
    return Folder(tmp_path, dsbd)


@pytest.mark.parametrize("count", [1, 3, 13])
def test_the_parts_together_are_one_run(folder: Folder, count: int) -> None:
    """Indices, ids, seeds and line numbers are those of the whole input."""
    assert folder.run(output="one.jsonl").code == 3
    done = folder.merge(*reversed(folder.shards(count)))
    assert done.code == 3  # a row has failed
    assert "11 records" in done.err
    assert folder.lines("all.jsonl") == folder.lines("one.jsonl")
    # what is merged can be gone on with as if one run had written it
    assert folder.run("--existing", "retry", output="all.jsonl").code == 3


def test_parts_that_were_retried_or_written_as_done_are_sorted(folder: Folder) -> None:
    names = folder.shards(3)
    lines = Path(names[1]).read_text().splitlines(keepends=True)
    Path(names[1]).write_text("".join(reversed(lines)))
    assert folder.merge(*names).code == 3
    assert [record["index"] for record in folder.lines("all.jsonl")] == list(range(11))  # type: ignore[index]


def test_openai_parts_stand_one_after_the_other(folder: Folder) -> None:
    names = folder.shards(2, "--output-format", "openai")
    assert folder.merge(*names).code == 3
    ids = [record["custom_id"] for record in folder.lines("all.jsonl")]  # type: ignore[index]
    assert ids == [f"r{n}" if n % 2 else f"{n}" for n in (*range(0, 11, 2), *range(1, 11, 2))]


def test_a_part_is_resumed(folder: Folder) -> None:
    names = folder.shards(2)
    whole = Path(names[0]).read_text().splitlines(keepends=True)
    Path(names[0]).write_text("".join(whole[:2]) + whole[2][:9])
    assert folder.merge(*names).err.endswith("line 3, the last one, is torn: go on with that part first\n")
    assert folder.run("--shard", "0/2", "--existing", "resume").code == 0
    assert folder.merge(*names).code == 3


def break_holes(folder: Folder, names: list[str]) -> list[str]:
    lines = Path(names[1]).read_text().splitlines(keepends=True)
    Path(names[1]).write_text("".join(lines[:1] + lines[2:]))
    return names


def break_last(folder: Folder, names: list[str]) -> list[str]:
    Path(names[1]).write_text("".join(Path(names[1]).read_text().splitlines(keepends=True)[:-1]))
    return names


def break_twice(folder: Folder, names: list[str]) -> list[str]:
    lines = Path(names[1]).read_text().splitlines(keepends=True)
    Path(names[1]).write_text("".join([*lines[:-1], lines[0]]))
    return names


def break_settings(folder: Folder, names: list[str]) -> list[str]:
    assert folder.run("--shard", "2/3", "--seed", "7", "--existing", "overwrite").code == 3
    return names


def break_input(folder: Folder, names: list[str]) -> list[str]:
    with folder.input.open("a") as stream:
        stream.write('{"prompt": "more"}\n')
    assert folder.run("--shard", "2/3", "--existing", "overwrite").code == 3
    return names


def break_middle(folder: Folder, names: list[str]) -> list[str]:
    """As many bytes, and the same beginning."""
    folder.input.write_text(folder.input.read_text().replace("row 9", "row 8"))
    assert folder.run("--shard", "2/3", "--existing", "overwrite").code == 3
    return names


def break_resumed(folder: Folder, names: list[str]) -> list[str]:
    """The input was changed while the part had not come to its end."""
    lines = Path(names[0]).read_text().splitlines(keepends=True)
    Path(names[0]).write_text("".join(lines[:-1]))
    folder.input.write_text(folder.input.read_text().replace("row 9", "row 8"))
    assert folder.run("--shard", "0/3", "--existing", "resume").code == 0
    return names


def break_unfinished(folder: Folder, names: list[str]) -> list[str]:
    side = Path(names[0] + ".dsbd-run")
    content = json.loads(side.read_text())
    del content["rows"]
    side.write_text(json.dumps(content))
    return names


def break_place(folder: Folder, names: list[str]) -> list[str]:
    Path(names[0]).write_text(Path(names[1]).read_text())
    return names


def break_index(folder: Folder, names: list[str]) -> list[str]:
    """As large as would take all memory for its place."""
    with Path(names[0]).open("a") as stream:
        stream.write('{"index": 3000000000000}\n')
    return names


BROKEN = [
    (lambda folder, names: names[:2], 2, "part 2 of 3 is missing: give all parts, or take --partial"),
    (lambda folder, names: [names[0], *names], 2, "are both part 0 of 3"),
    (break_holes, 1, "lacks 1 of its 4 rows, the first one row 4: go on with that part first"),
    (break_last, 1, "lacks 1 of its 4 rows, the first one row 10: go on with that part first"),
    (break_twice, 1, "line 4 is row 1, which stands there twice"),
    (break_settings, 2, "do not belong together: --seed was 0 and is 7"),
    (break_input, 2, "do not belong together: the input's size was"),
    (break_middle, 2, "do not belong together: the input was changed between them"),
    (break_resumed, 2, "do not belong together: the input was changed between them"),
    (break_unfinished, 2, "has not come to its end: go on with that part first"),
    (break_index, 1, "line 5 is row 3000000000000, but the input had 11 rows"),
    (break_place, 1, "line 1 is row 1, which belongs to part 1 of 3"),
    (lambda folder, names: [*names, str(folder.input)], 2, "was made with: give parts, with the file beside each"),
    (lambda folder, names: [str(folder.path / "one.jsonl")], 2, "is no part: it was written without --shard"),
]


@pytest.mark.parametrize(("broken", "code", "message"), BROKEN, ids=[message[-30:] for _, _, message in BROKEN])
def test_what_does_not_belong_together_is_told(
    folder: Folder,
    broken: Callable[[Folder, list[str]], list[str]],
    code: int,
    message: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("dsbd_cli.cli.run.shard.FIRST_BYTES", 64)  # of the input, which is short here
    assert folder.run(output="one.jsonl").code == 3
    done = folder.merge(*broken(folder, folder.shards(3)))
    assert (done.code, done.err.count("\n")) == (code, 1), done.err
    assert message in done.err
    assert not (folder.path / "all.jsonl").exists()
    assert not list(folder.path.glob(".*.tmp"))


def test_parts_of_two_checkpoints_do_not_belong_together(folder: Folder, tmp_path: Path) -> None:
    """Under one name; copies in several folders do."""
    builtin = Path(registry.__file__).parents[1] / "builtin" / "target"
    models = [shutil.copytree(builtin, tmp_path / name) for name in ("one", "two", "three")]
    tokenizer = models[2] / "tokenizer.json"
    tokenizer.write_bytes(tokenizer.read_bytes() + b" ")
    parts = [str(folder.path / f"out.jsonl.{part}-of-2") for part in range(2)]
    for second, code in ((models[1], 3), (models[2], 2)):
        for part, model in enumerate((models[0], second)):
            options = ("--shard", f"{part}/2", "--target", str(model), "--draft", "none", "--existing", "overwrite")
            assert folder.run(*options).code == 3 - 3 * (part == 0)
        outcome = folder.merge(*parts, "--existing", "overwrite")
        assert outcome.code == code, outcome.err
    assert "the digest of the target's tokenizer was '" in outcome.err


def test_a_row_that_the_input_cannot_have(folder: Folder) -> None:
    """Guards against an index as long as a damaged record says, where no part says how many rows there are."""
    names = break_index(folder, folder.shards(3))
    for name in names:
        break_unfinished(folder, [name])
    done = folder.merge("--partial", *names)
    size = folder.input.stat().st_size
    assert done.code == 1
    assert f"line 5 is row 3000000000000, but the input had {size} rows at the most" in done.err


def test_compressed_bytes_do_not_bound_the_rows(folder: Folder) -> None:
    """400 rows in fewer bytes, of which no part has come to the end. Guards a bound by the size of the packed file."""
    folder.input = folder.path / "in.jsonl.gz"
    folder.input.write_bytes(gzip.compress(b'{"prompt": "same"}\n' * 400))
    assert folder.input.stat().st_size < 200
    names = folder.shards(3)
    for name in names:
        break_unfinished(folder, [name])
    done = folder.merge("--partial", *names)
    assert (done.code, done.err.count("\n")) == (3, 2), done.err
    assert "no part has come to its end, so nobody knows how many rows the input has" in done.err
    assert [record["index"] for record in folder.lines("all.jsonl")] == list(range(400))  # type: ignore[index]
    # an index beyond reason takes the memory of one record
    break_index(folder, names)
    done = folder.merge("--partial", "--existing", "overwrite", *names)
    assert done.code == 3
    assert "lacks 999999999866 of its 1000000000001 rows, the first one row 402" in done.err
    assert len(folder.lines("all.jsonl")) == 401


@pytest.mark.parametrize(
    "damage", [{"shard": 3}, {"shard": "auto"}, {"input_bytes": "many"}, {"input_bytes": None}], ids=str
)
def test_a_damaged_file_beside_a_part_is_told(folder: Folder, damage: dict[str, object]) -> None:
    names = folder.shards(2)
    for name in names:
        break_unfinished(folder, [name])
        side = Path(name + ".dsbd-run")
        content = json.loads(side.read_text())
        content["settings"] |= damage
        side.write_text(json.dumps(content))
    done = folder.merge("--partial", *names)
    assert (done.code, done.err.count("\n")) == (2, 1), done.err
    assert f"{names[0]}.dsbd-run is not what dsbd wrote: give parts" in done.err


@pytest.mark.parametrize("form", ["native", "openai"])
def test_an_empty_input_has_parts_that_are_complete(folder: Folder, form: str) -> None:
    """Guards against no rows being taken for an unknown number of rows."""
    folder.input.write_text("")
    done = folder.merge(*folder.shards(2, "--output-format", form))
    assert (done.code, done.err.count("\n")) == (0, 1), done.err
    assert "0 records of 2 parts" in done.err
    assert folder.lines("all.jsonl") == []


def test_openai_parts_without_an_end_are_merged_too(folder: Folder) -> None:
    names = folder.shards(2, "--output-format", "openai")
    for name in names:
        break_unfinished(folder, [name])
    assert folder.merge("--partial", *names).code == 3
    assert len(folder.lines("all.jsonl")) == 11


def test_partial_writes_what_there_is(folder: Folder) -> None:
    names = break_holes(folder, folder.shards(3))
    done = folder.merge("--partial", *names[:2])
    assert done.code == 3
    assert "part 2 of 3 is missing" in done.err
    assert [record["index"] for record in folder.lines("all.jsonl")] == [0, 1, 3, 6, 7, 9, 10]  # type: ignore[index]


@pytest.mark.parametrize("form", ["native", "openai"])
def test_a_part_that_was_not_given_lacks_all_its_rows(folder: Folder, form: str) -> None:
    """Its rows count, though nothing is missing in the parts that were given, and none of their rows has failed."""
    names = folder.shards(3, "--output-format", form)
    done = folder.merge("--partial", *names[:2])
    assert (done.code, "part 2 of 3 is missing" in done.err) == (3, True), done.err
    folder.input.write_text('{"prompt": "one"}\n')  # which has no row for another part
    names = folder.shards(2, "--output-format", form, "--existing", "overwrite")
    assert folder.merge("--partial", "--existing", "overwrite", names[0]).code == 0


@pytest.mark.parametrize("step", ["write_settings", "settings_file"])
def test_a_merge_that_is_killed_leaves_no_file_with_the_settings_of_another(
    folder: Folder, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    """Killed around the moment in which the file takes its name. Guards records that are gone on with under settings
    that they were not made with."""
    assert folder.run("--seed", "7", output="all.jsonl").code == 3
    names = folder.shards(2)

    def killed(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(f"dsbd_cli.cli.commands.merge.{step}", killed)
        assert folder.merge("--existing", "overwrite", *names).code == 130
    seeds = {record["seed"] for record in folder.lines("all.jsonl") if "seed" in record}  # type: ignore[operator, index]
    again = folder.run("--existing", "resume", "--seed", "7", output="all.jsonl")
    if again.code == 3:  # the old file, with its own settings
        assert folder.lines("all.jsonl")[0] != folder.lines("out.jsonl.0-of-2")[0], seeds
    else:
        assert (again.code, "dsbd-run is missing" in again.err) == (2, True), again.err
    assert folder.merge("--existing", "overwrite", *names).code == 3
    assert folder.run("--existing", "resume", output="all.jsonl").code == 3


def test_what_is_being_written_is_not_merged(folder: Folder) -> None:
    """Guards a part whose lines move while it is read, two merges into one file, and a run that writes into a file
    that has lost its name."""
    names = folder.shards(2)
    for held, existing in ((Path(names[1]), "error"), (folder.path / "all.jsonl", "overwrite")):
        with open_locked(held, create_only=False):
            done = folder.merge("--existing", existing, *names)
        assert (done.code, done.err.count("\n")) == (1, 1), done.err
        assert f"{held} is being written by another process" in done.err
    (folder.path / "all.jsonl").unlink()
    temporary = folder.path / ".all.jsonl.tmp"
    with open_locked(temporary, create_only=False):
        assert folder.merge(*names).code == 1
    assert temporary.exists(), "it is the other merge's"
    assert folder.merge(*names).code == 3, "what a killed merge has left is in nobody's way"
    assert not temporary.exists()


def test_a_merge_replaces_files_only_and_keeps_links(folder: Folder) -> None:
    """Guards /dev/null of a root user, in whose place a file would stand."""
    names = folder.shards(2)
    pipe = folder.path / "pipe"
    os.mkfifo(pipe)
    done = folder.dsbd("merge", *names, "-o", str(pipe))
    assert (done.code, "is no ordinary file" in done.err) == (2, True), done.err
    assert pipe.is_fifo()
    settings = Path(names[0] + ".dsbd-run")
    before = settings.read_bytes()
    done = folder.dsbd("merge", *names, "-o", str(settings), "--existing", "overwrite")
    assert (done.code, f"--output {settings} is the input" in done.err) == (2, True), done.err
    assert settings.read_bytes() == before
    done = folder.dsbd("merge", *names, "-o", "-")
    assert (done.code, "--output needs a file, but - is standard output" in done.err) == (2, True), done.err
    (folder.path / "there.jsonl").touch()
    (folder.path / "all.jsonl").symlink_to("there.jsonl")
    assert folder.merge("--existing", "overwrite", *names).code == 3
    assert (folder.path / "all.jsonl").is_symlink()
    assert len(folder.lines("there.jsonl")) == 11


REFUSED = [
    (("--shard", "3/3"), "--shard is 3/3, but I of I/N must be from 0 to N - 1"),
    (("--shard", "1-3"), "--shard is '1-3', but must be I/N"),
    (("--shard", "auto"), "no scheduler has numbered the tasks"),
    (("--shard", "0/2", "--output-format", "text"), "cannot write --output-format text"),
    (("--shard", "0/2", "--set", "stats=x.gz"), "cannot write --set stats x.gz, which is compressed"),
]


@pytest.mark.parametrize(("options", "message"), REFUSED, ids=[" ".join(options) for options, _ in REFUSED])
def test_what_cannot_be_sharded(folder: Folder, options: tuple[str, ...], message: str) -> None:
    done = folder.run(*options)
    assert done.code == 2
    assert message in done.err


def test_a_shard_needs_files(dsbd: Dsbd, tmp_path: Path) -> None:
    assert "name it with --input" in dsbd("generate", "--shard", "0/2", lines=[]).err
    assert "name it with --output" in dsbd("generate", "--shard", "0/2", "-i", str(tmp_path / "x")).err


SLURM = {"SLURM_ARRAY_TASK_ID": "7", "SLURM_ARRAY_TASK_MIN": "4", "SLURM_ARRAY_TASK_COUNT": "16"}
TORCHRUN = {"RANK": "3", "WORLD_SIZE": "16"}


@pytest.mark.parametrize(
    ("shard", "environment", "wanted"),
    [
        ("auto", SLURM, (3, 16)),
        ("auto", TORCHRUN, (3, 16)),
        ("auto", {"SKYPILOT_JOB_RANK": "0", "SKYPILOT_NUM_JOBS": "2"}, (0, 2)),
        ("auto/16", {"JOB_COMPLETION_INDEX": "5"}, (5, 16)),
        ("auto", SLURM | TORCHRUN, (3, 16)),
        ("auto", {"JOB_COMPLETION_INDEX": "5"}, "use --shard auto/N"),
        ("auto", SLURM | {"RANK": "0", "WORLD_SIZE": "2"}, "a Slurm array says 3/16 and torchrun says 0/2: give I/N"),
        ("auto", {"RANK": "a", "WORLD_SIZE": "2"}, "'a' is no number"),
        ("auto", {"RANK": "2", "WORLD_SIZE": "2"}, "must be from 0 to N - 1"),
        ("auto/8", TORCHRUN, "torchrun has 16 tasks"),
    ],
)
def test_the_schedulers_variables(shard: str, environment: dict[str, str], wanted: tuple[int, int] | str) -> None:
    if isinstance(wanted, str):
        with pytest.raises(UsageError, match=wanted):
            shard_of(shard, environment)
    else:
        assert shard_of(shard, environment) == Shard(*wanted)


def test_many_small_records_are_merged_in_little_memory(tmp_path: Path) -> None:
    """200,000 records of 2 parts; 16 MB more than without any would hold their lines. Guards against lists of lines."""
    rows, line = 200_000, '{"schema": "dsbd.output/1", "index": %d, "text": "' + "x" * 100 + '"}\n'
    peaks = []
    for count in (2, rows):
        for part in range(2):
            path = tmp_path / f"{count}.jsonl.{part}-of-2"
            with path.open("w") as stream:
                stream.writelines(line % index for index in range(part, count, 2))
            settings = {"shard": f"{part}/2", "input_bytes": 1, "input_head": ""}
            run = {"schema": "dsbd.run/1", "created": 1, "settings": settings, "rows": count, "input_digest": ""}
            Path(f"{path}.dsbd-run").write_text(json.dumps(run))
        names = [str(tmp_path / f"{count}.jsonl.{part}-of-2") for part in range(2)]
        command = [sys.executable, "-m", "dsbd_cli", "merge", *names, "-o", str(tmp_path / f"{count}.all"), "-q"]
        wrapper = (
            "import resource, subprocess, sys; c = subprocess.run(sys.argv[1:]).returncode; "
            "print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss); sys.exit(c)"
        )
        done = subprocess.run([sys.executable, "-c", wrapper, *command], capture_output=True, text=True, check=True)
        peaks.append(int(done.stdout))
        with (tmp_path / f"{count}.all").open() as stream:
            assert sum(1 for _ in stream) == count
    assert peaks[1] - peaks[0] < 16 << 10  # KiB


def test_a_merge_on_a_full_disk_changes_nothing(tmp_path: Path) -> None:
    """Guards the message of a run, whose lines before are there."""
    path = tmp_path / "all.jsonl"
    path.write_bytes(b"old")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, hard))
    try:
        with pytest.raises(OutputError, match=r"all.jsonl: File too large; nothing is changed"):
            merge._write(path, [b"x" * 3000] * 2, {}, 0)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert [(item.name, item.read_bytes()) for item in tmp_path.iterdir()] == [("all.jsonl", b"old")]
