"""`--shard`: the rows of one part of an input, answered into a file of their own."""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from dsbd_cli.cli.options.options import STANDARD, FileOptions
from dsbd_cli.cli.run.files import NO_KEY, is_special, output_format
from dsbd_cli.errors import UsageError, reading, shorten
from dsbd_cli.io.lines.compression import compression
from dsbd_cli.io.lines.tables import PARQUET

SHARD_SETTINGS = ("shard", "input_bytes", "input_head", "input_compressed")  # which only a part has
FIRST_BYTES = 1 << 16

# schedulers, with the variables that hold this task's number, the first task's number, and the number of tasks
SCHEDULERS = (
    ("a Slurm array", "SLURM_ARRAY_TASK_ID", "SLURM_ARRAY_TASK_MIN", "SLURM_ARRAY_TASK_COUNT"),
    ("torchrun", "RANK", None, "WORLD_SIZE"),
    ("SkyPilot", "SKYPILOT_JOB_RANK", None, "SKYPILOT_NUM_JOBS"),
)
KUBERNETES = "JOB_COMPLETION_INDEX"


@dataclass(frozen=True, slots=True)
class Shard:
    """One part of an input: the rows whose index modulo `count` is `part`."""

    part: int
    count: int

    def has(self, index: int) -> bool:
        """Return whether a row belongs to this part."""
        return index % self.count == self.part

    def rows(self, count: int) -> int:
        """Return how many of `count` rows of the input belong to this part."""
        return len(range(self.part, count, self.count))

    def path(self, path: Path) -> Path:
        """Return out.jsonl.3-of-16 for out.jsonl."""
        return path.with_name(f"{path.name}.{self.part}-of-{self.count}")

    def settings(self, path: Path) -> dict[str, object]:
        """Return settings that say which part of which input this is, for the part's settings file. Raises
        UsageError."""
        with reading(f"--input {path}"), path.open("rb") as stream:
            beginning = hashlib.blake2b(stream.read(FIRST_BYTES), digest_size=8).hexdigest()
            size = path.stat().st_size
        settings = {"shard": f"{self.part}/{self.count}", "input_bytes": size, "input_head": beginning}
        compressed = compression(path) is not None or path.suffix.lower() == PARQUET
        return {**settings, "input_compressed": True} if compressed else settings


def shard_of(text: str, environment: Mapping[str, str] = os.environ) -> Shard:
    """Return the part that `3/16`, `auto` or `auto/16` names. Raises UsageError."""
    if text == "auto" or text.startswith("auto/"):
        return _from_scheduler(text, environment)
    if match := re.fullmatch(r"(\d{1,9})/(\d{1,9})", text):
        return _checked(f"--shard is {text}", int(match[1]), int(match[2]))
    raise UsageError(
        f"--shard is {shorten(text)}, but must be I/N, such as 0/16 for the first of 16 parts, or auto where a "
        "scheduler has numbered the tasks"
    )


def _from_scheduler(text: str, environment: Mapping[str, str]) -> Shard:
    """Return the shard that the variables of a scheduler name.

    `auto/16` also takes a scheduler that does not say how many tasks there are. Raises UsageError if no variables are
    set, or if they do not agree.
    """
    count = text.partition("/")[2]
    shards: dict[str, Shard] = {}
    for scheduler, part, first, total in SCHEDULERS:
        if part in environment and total in environment:
            origin = f"--shard {text}: {part}={environment[part]} and {total}={environment[total]} of {scheduler}"
            begin = _number(origin, environment.get(first, "0")) if first else 0
            shards[scheduler] = _checked(
                origin, _number(origin, environment[part]) - begin, _number(origin, environment[total])
            )
    if count:
        if KUBERNETES in environment:
            origin = f"--shard {text}: {KUBERNETES}={environment[KUBERNETES]}"
            shards["a Kubernetes job"] = _checked(
                origin, _number(origin, environment[KUBERNETES]), _number(origin, count)
            )
        for scheduler, shard in shards.items():
            if str(shard.count) != count:
                raise UsageError(f"--shard is {text}, but {scheduler} has {shard.count} tasks: use --shard auto")
    elif KUBERNETES in environment and not shards:
        raise UsageError(f"--shard is auto, but {KUBERNETES} does not say how many there are: use --shard auto/N")
    if not shards:
        names = ", ".join([part for _, part, _, _ in SCHEDULERS])
        raise UsageError(f"--shard is {text}, but no scheduler has numbered the tasks ({names}): give I/N")
    if len(set(shards.values())) > 1:
        origin = " and ".join(f"{scheduler} says {shard.part}/{shard.count}" for scheduler, shard in shards.items())
        raise UsageError(f"--shard is {text}, but {origin}: give I/N")
    return next(iter(shards.values()))


def _number(origin: str, text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise UsageError(f"{origin}: {shorten(text)} is no number: give I/N") from None


def _checked(origin: str, part: int, count: int) -> Shard:
    if count < 1 or not 0 <= part < count:
        raise UsageError(f"{origin}, but I of I/N must be from 0 to N - 1")
    return Shard(part, count)


def sharded_files(files: FileOptions, shard: Shard) -> FileOptions:
    """Return the options with the files of one part. Raises UsageError for outputs that could not be merged."""
    if files.input is None or files.input == STANDARD or is_special(files.input):
        raise UsageError("--shard needs a file that all parts read: name it with --input")
    if files.output is None or files.output == STANDARD or is_special(files.output):
        raise UsageError("--shard writes a file of its own: name it with --output, without the part")
    if not output_format(files).resumable:
        raise UsageError(f"--shard cannot write --output-format {files.output_format}{NO_KEY}")
    for option, path in (("--output", files.output), ("--set stats", files.stats)):
        if path is not None and compression(path):
            raise UsageError(f"--shard cannot write {option} {path}, which is compressed: write plain lines")
    own = {
        name: shard.path(path)
        for name, path in (("output", files.output), ("stats", files.stats), ("summary", files.summary))
        if path is not None and path != STANDARD
    }
    return replace(files, **own)  # type: ignore[arg-type]
