"""Options of `dsbd bench` alone. None means not given."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from dsbd_cli.config import DEFAULT_DEPTH, MethodConfig
from dsbd_cli.job.cli.declare import flag, option
from dsbd_cli.job.cli.options import MAIN
from dsbd_cli.lab.bench.choice import DEFAULT_TOLERANCE
from dsbd_cli.lab.bench.methods import FUZZY_METHODS, METHODS, own_tokens
from dsbd_cli.lab.tasks.choose import TASK_NAMES
from dsbd_cli.lab.tasks.ranking import DEFAULT_METRICS
from dsbd_cli.variants import MIN_WIDTH, WIDTH_THRESHOLD

__all__ = [
    "DEFAULT_RECORDS",
    "DEFAULT_ROUNDS",
    "DEFAULT_TASKS",
    "BenchOutputs",
    "ChoiceOptions",
    "DataOptions",
    "SweepOptions",
]

DATA, METHODS_PANEL, CHOICE, OUTPUT = MAIN, "Methods and their settings", "Choice of a fuzzy threshold", "Output"
DEFAULT_TASKS, DEFAULT_RECORDS, DEFAULT_ROUNDS = "sql,qa", 24, 1
_METHOD = MethodConfig()


@dataclass(frozen=True)
class DataOptions:
    """What is answered."""

    task: Annotated[
        str | None,
        option(
            DATA,
            "--task",
            text=f"{', '.join(TASK_NAMES)}, or both built-in ones with a comma",
            default=DEFAULT_TASKS,
            metavar="TASK",
        ),
    ] = None
    data: Annotated[
        Path | None,
        option(
            DATA,
            "--data",
            text="squad: the official JSON file, v1.1 or v2.0; spider: the folder with dev.json, tables.json and "
            "database; mt-bench: question.jsonl; jsonl: lines with prompt or messages, and reference or relevant if "
            "answers are to be scored",
            metavar="PATH",
        ),
    ] = None
    metric: Annotated[
        str | None,
        option(
            DATA,
            "--metric",
            text="how all answers, best first, are held against relevant, the ids of a line of task jsonl: hit@K, "
            "ndcg@K, mrr",
            default=DEFAULT_METRICS,
            metavar="NAME,...",
        ),
    ] = None
    records: Annotated[
        int | None, option(DATA, "--records", text="records of each task", default=DEFAULT_RECORDS, metavar="N")
    ] = None
    shots: Annotated[
        int | None,
        option(
            METHODS_PANEL,
            "--shots",
            text="solved dev records in front of every prompt, as a conversation where the target has a chat template",
            default=0,
            metavar="N",
        ),
    ] = None
    rounds: Annotated[
        int | None,
        option(DATA, "--rounds", text="times that every record is timed", default=DEFAULT_ROUNDS, metavar="N"),
    ] = None


@dataclass(frozen=True)
class SweepOptions:
    """Methods, and lists of values with commas: every method is run at every point of what acts on it."""

    methods: Annotated[
        str | None,
        option(
            METHODS_PANEL,
            "--methods",
            text=f"all, or some of {', '.join(METHODS)}, with commas",
            default=f"eleven of them; with --fuzzy-threshold {', '.join(FUZZY_METHODS)}",
            metavar="NAMES",
        ),
    ] = None
    num_beams: Annotated[
        str | None,
        option(METHODS_PANEL, "--num-beams", text="W, live beams at most", default=_METHOD.num_beams, metavar="W,..."),
    ] = None
    drafts_per_layer: Annotated[
        str | None,
        option(
            METHODS_PANEL,
            "--drafts-per-layer",
            text="K, drafted nodes per layer",
            default=f"{_METHOD.drafts_per_layer}, or 2W if that is more (W + 32 above W = 32)",
            metavar="K,...",
        ),
    ] = None
    depth: Annotated[
        str | None,
        option(METHODS_PANEL, "--depth", text="D, drafted layers", default=DEFAULT_DEPTH, metavar="D,..."),
    ] = None
    width_threshold: Annotated[
        str | None,
        option(
            METHODS_PANEL,
            "--width-threshold",
            text="wanted chance that a layer yields its width",
            default=WIDTH_THRESHOLD.default,
            metavar="T,...",
        ),
    ] = None
    min_width: Annotated[
        str | None,
        option(
            METHODS_PANEL,
            "--min-width",
            text="least width of a threshold layer",
            default=MIN_WIDTH.default,
            metavar="W,...",
        ),
    ] = None
    drafter: Annotated[
        str | None,
        option(
            METHODS_PANEL,
            "--drafter",
            text=f"who proposes: {', '.join(own_tokens())}, or two joined by +",
            default=_METHOD.drafter,
            metavar="NAME,...",
        ),
    ] = None
    index: Annotated[
        Path | None,
        option(METHODS_PANEL, "--index", text="corpus of drafter retrieval, from dsbd index", metavar="FILE"),
    ] = None
    fuzzy_threshold: Annotated[
        str | None,
        option(
            METHODS_PANEL,
            "--fuzzy-threshold",
            text="divergence up to which method dsbd-fuzzy takes a layer as drafted; of several one is chosen on dev "
            "records",
            default=METHODS["dsbd-fuzzy"].fixed["fuzzy_threshold"],
            metavar="T,...",
        ),
    ] = None


@dataclass(frozen=True)
class ChoiceOptions:
    """How one of several thresholds of rule fuzzy is chosen: on dev records, which are not the ones reported on."""

    dev_records: Annotated[
        int | None,
        option(
            CHOICE,
            "--dev-records",
            text="dev records of each task, on which one of several --fuzzy-threshold is chosen; 0 chooses nothing",
            default="as many as --records",
            metavar="N",
        ),
    ] = None
    dev_data: Annotated[
        Path | None,
        option(
            CHOICE,
            "--dev-data",
            text="dev records, in the form of --data",
            default="the task's own, else every second record of --data, which is then not reported on",
            metavar="PATH",
        ),
    ] = None
    fuzzy_tolerance: Annotated[
        float | None,
        option(
            CHOICE,
            "--fuzzy-tolerance",
            text="by how much the dev score of the chosen threshold may be below that of rejection, from 0 to 1",
            default=DEFAULT_TOLERANCE,
            metavar="X",
        ),
    ] = None


@dataclass(frozen=True)
class BenchOutputs:
    """Where results go besides the tables."""

    json: Annotated[
        Path | None,
        option(OUTPUT, "--json", text="write one JSON line per task, method and setting here", metavar="FILE"),
    ] = None
    markdown: Annotated[Path | None, option(OUTPUT, "--markdown", text="write a page here", metavar="FILE")] = None
    plot: Annotated[
        Path | None,
        option(
            OUTPUT,
            "--plot",
            text="draw speed, quality and acceptance by depth here: .png, .svg or .pdf (needs the extra plots)",
            metavar="FILE",
        ),
    ] = None
    existing: Annotated[
        Literal["error", "overwrite"] | None,
        option(
            OUTPUT,
            "--existing",
            text="where a --json, --markdown or --plot file exists: error or overwrite",
            default="error",
            metavar="WHAT",
        ),
    ] = None
    quiet: Annotated[
        bool | None, flag(OUTPUT, "--quiet", "-q", text="nothing on standard error but errors that end the run")
    ] = None
