"""Options of `dsbd bench` alone. None means not given."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from dsbd_cli.cli.options.declare import flag, option
from dsbd_cli.cli.options.options import CHAT, MAIN, RowFileOptions
from dsbd_cli.config.method import DEFAULT_DEPTH, MethodConfig
from dsbd_cli.config.variants import MIN_WIDTH, WIDTH_THRESHOLD
from dsbd_cli.lab.bench.methods import FUZZY_METHODS, METHODS, bench_drafters
from dsbd_cli.lab.tasks.choose import OWN_TASK, TASK_NAMES
from dsbd_cli.lab.tasks.ranking import DEFAULT_METRICS
from dsbd_cli.lab.tasks.scores import DEFAULT_SCORE, KINDS

METHODS_PANEL, OUTPUT = "Methods and their settings", "Output"
DEFAULT_TASKS, DEFAULT_RECORDS, DEFAULT_ROUNDS = "sql,qa", 24, 1
_METHOD = MethodConfig()


@dataclass(frozen=True)
class RecordOptions:
    """Options of the records that are answered and scored."""

    input: Path | None = option(
        MAIN,
        "prompts of your own, as generate reads them, with reference or relevant where answers are to be scored",
        "-i",
    )
    chat: bool | None = flag(MAIN, CHAT)
    task: str | None = option(
        MAIN,
        f"{', '.join(name for name in TASK_NAMES if name != OWN_TASK)}, or both built-in ones with a comma",
        default=f"{DEFAULT_TASKS}, or what is in --input",
        metavar="TASK",
    )
    data: Path | None = option(
        MAIN,
        "squad: the official JSON file, v1.1 or v2.0; spider: the folder with dev.json, tables.json and "
        "database; mt-bench: question.jsonl",
        metavar="PATH",
    )
    metric: str | None = option(
        MAIN,
        "how all answers, best first, are held against relevant, the ids of a line of --input: hit@K, ndcg@K, mrr",
        default=DEFAULT_METRICS,
        metavar="NAME,...",
    )
    score: str | None = option(
        MAIN,
        f"how answers are scored against `reference` of each line of --input: {', '.join(KINDS)} (docs/cookbook.md)",
        default=DEFAULT_SCORE,
        metavar="KIND",
    )
    records: int | None = option(MAIN, "records of each task", default=DEFAULT_RECORDS, least=1)
    shots: int | None = option(
        METHODS_PANEL,
        "solved dev records in front of every prompt, as a conversation where the target has a chat template",
        default=0,
        least=0,
    )
    dev_data: Path | None = option(
        METHODS_PANEL,
        "dev records for --shots, in the form of --input or --data",
        default="the task's own",
        metavar="PATH",
    )
    rounds: int | None = option(MAIN, "times that every record is timed", default=DEFAULT_ROUNDS, least=1)


@dataclass(frozen=True)
class DataOptions(RowFileOptions, RecordOptions):
    """Options of the data that is answered."""


@dataclass(frozen=True)
class SweepOptions:
    """Options of the methods, and of the values that they run with.

    A list has commas between its values. Every method runs at every combination of the values that act on it.
    """

    methods: str | None = option(
        METHODS_PANEL,
        f"all that run on the loaded models, or some of {', '.join(METHODS)}, with commas; all may be one of them",
        default=f"eleven of them; with --fuzzy-threshold {', '.join(FUZZY_METHODS)}",
        metavar="NAMES",
    )
    num_beams: str | None = option(METHODS_PANEL, "W, live beams at most", default=_METHOD.num_beams, metavar="W,...")
    drafts_per_layer: str | None = option(
        METHODS_PANEL,
        "K, drafted nodes per layer",
        default=f"{_METHOD.drafts_per_layer}, or 2W if that is more (W + 32 above W = 32)",
        metavar="K,...",
    )
    depth: str | None = option(METHODS_PANEL, "D, drafted layers", default=DEFAULT_DEPTH, metavar="D,...")
    width_threshold: str | None = option(
        METHODS_PANEL, "wanted chance that a layer yields its width", default=WIDTH_THRESHOLD.default, metavar="T,..."
    )
    min_width: str | None = option(
        METHODS_PANEL, "least width of a threshold layer", default=MIN_WIDTH.default, metavar="W,..."
    )
    drafter: str | None = option(
        METHODS_PANEL,
        f"who proposes: {', '.join(bench_drafters())}, or two joined by +",
        default=_METHOD.drafter,
        metavar="NAME,...",
    )
    index: Path | None = option(METHODS_PANEL, "corpus of drafter retrieval, from dsbd index")
    fuzzy_threshold: str | None = option(
        METHODS_PANEL,
        "divergence up to which method dsbd-fuzzy takes a layer as drafted",
        default=METHODS["dsbd-fuzzy"].fixed["fuzzy_threshold"],
        metavar="T,...",
    )


@dataclass(frozen=True)
class BenchOutputs:
    """Options of where results go besides the table."""

    json: Path | None = option(OUTPUT, "write one JSON line per task, method and setting here")
    plot: Path | None = option(OUTPUT, "draw quality against speed here: .png, .svg or .pdf (needs the extra plots)")
    existing: Literal["error", "overwrite"] | None = option(
        OUTPUT, "where a --json or --plot file exists: error or overwrite", default="error", metavar="WHAT"
    )
    quiet: bool | None = flag(OUTPUT, "nothing on standard error but errors that end the run", "-q")
