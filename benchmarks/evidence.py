"""The table of README: dsbd beside other engines on the same token ids.

They are OpenVINO GenAI, CTranslate2, llama.cpp, ONNX Runtime GenAI and transformers.

    benchmarks/peers/setup models/qwen2.5-coder-1.5b-instruct models/smollm2-135m-instruct   # once: some minutes
    python -m benchmarks.evidence --target models/qwen2.5-coder-1.5b-instruct --equal models/smollm2-135m-instruct

`make evidence` does both, and then four bits. Every engine runs in a process of its own (benchmarks/peers/child.py), on
the same threads. A cell is a number of beams, of prompts decoded together, of their tokens, and of new tokens, which
all answers have. Each round gives every engine a cell in turn, on prompts that no round before had; the median of its
rounds counts, of the comparison too. Speed is new tokens of the best answers by the seconds of the whole call, the
prompt's included.

llama.cpp's Q8_0 counts as int8 weights. It has no beam search, so its cells with beams say `-`. ONNX Runtime GenAI has
32 beams at most.

--weights int4: four bits in place of eight. dsbd and llama.cpp read the same GGUF file (Q4_K_M), OpenVINO and ONNX
Runtime have what their own tools make; dsbd's own int4 and int8 are beside them.

--equal: the best answers of float32 weights, computed in float32, beside those of transformers.

--cpu avx2: all engines do what they do on a processor with AVX2 alone. llama.cpp and ONNX Runtime cannot be limited,
and are left out.

The whole took an hour on two cores with all engines. What a stopped run has measured is kept and not measured again.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.common import device_name, markdown_table, own_memory, results_folder, write_results

ROOT = Path(__file__).parents[1]
PEERS = ROOT / "models" / "peers"
OWN = {kind: ROOT / f".venv-{kind}" / "bin" / "python" for kind in ("openvino", "onnxruntime")}  # environments
CHILD = Path(__file__).parent / "peers" / "child.py"
OURS = {"int8": "dsbd-int8", "int4": "dsbd-gguf"}
PEERS_NAMED = {
    "openvino": "OpenVINO",
    "ctranslate2": "CTranslate2",
    "llama.cpp": "llama.cpp",
    "onnxruntime": "ONNX Runtime",
}
MOST_BEAMS = {"llama.cpp": 1, "onnxruntime": 32}  # ONNX Runtime GenAI 0.18 refuses more
PLAIN = "transformers-bfloat16"
ENGINES = {
    "int8": (OURS["int8"], *(f"{peer}-int8" for peer in PEERS_NAMED), "dsbd-bfloat16", PLAIN),
    "int4": (OURS["int4"], "openvino-int4", "llama.cpp-gguf", "onnxruntime-int4", "dsbd-int4", "dsbd-int8"),
}
LIMITS = {  # of every engine that can be limited to a smaller processor
    "avx2": {
        "DSBD_CPU": "avx2", "ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2", "CT2_FORCE_CPU_ISA": "AVX2",
    }
}  # fmt: skip
UNLIMITED = ("llama.cpp", "onnxruntime")
EQUAL = ("transformers-float32", "dsbd-float32", "openvino-strict")
EQUAL_PROMPTS, EQUAL_TOKENS = 24, 32
WARM = 2000  # tokens of prompts at most in the call before a cell, if one prompt has fewer
LARGE = 1600  # tokens of all prompts of a cell of one round, from which on an engine is alone in memory
START = 4, 1, 50, 16  # beams, prompts, their tokens, new tokens: what the first answer of a process has
TEXTS = ("docs/algorithm.md", "docs/beams-and-drafts.md", "docs/hardware.md", "docs/models.md", "docs/constraints.md")


class Cell(NamedTuple):
    """What every engine is asked."""

    beams: int
    prompts: int
    length: int
    tokens: int
    rounds: int

    @property
    def name(self) -> str:
        together = "1 prompt" if self.prompts == 1 else f"{self.prompts} prompts together"
        first = ", first token" if self.tokens == 1 else ""
        return f"{self.beams} beam{'s' * (self.beams > 1)}, {together} of {self.length}{first}"


CELLS = (
    Cell(1, 1, 50, 64, 3),
    Cell(4, 1, 50, 64, 3),
    Cell(10, 1, 50, 64, 3),
    Cell(50, 1, 50, 16, 3),
    Cell(1, 8, 50, 64, 3),
    Cell(4, 8, 50, 64, 3),
    Cell(4, 32, 50, 64, 1),
    Cell(4, 8, 500, 32, 1),
    Cell(4, 1, 500, 1, 3),
    Cell(4, 1, 2500, 1, 3),
)
GRID = tuple(
    Cell(beams, prompts, length, 16 if beams == 50 else 32, 1)
    for length in (50, 500, 2500)
    for prompts in (1, 8, 32)
    for beams in (1, 4, 10, 50)
)


def chosen(text: str | None) -> Sequence[Cell]:
    """Return the cells that `--cells` names: places from 1 in CELLS, or BEAMSxPROMPTSxLENGTH of GRID, by commas; `grid`
    is all of GRID, None all of CELLS. A cell that is named twice has twice its rounds, where none was run before.
    Raises SystemExit for others."""
    if text is None or text == "grid":
        return CELLS if text is None else GRID
    named = {f"{cell.beams}x{cell.prompts}x{cell.length}": cell for cell in GRID}
    named |= {str(number): cell for number, cell in enumerate(CELLS, 1)}
    if unknown := [name for name in text.split(",") if name not in named]:
        raise SystemExit(f"--cells {unknown[0]} is no cell: they are {', '.join(named)}")
    return [named[name] for name in text.split(",")]


class Child:
    """An engine in its process.

    Attributes:
        memory: most memory of its own so far, in bytes (RssAnon, sampled every 0.1 s).
    """

    def __init__(self, engine: str, model: Path, threads: int) -> None:
        kind, _, form = engine.partition("-")
        python, folder = str(OWN.get(kind, sys.executable)), model
        if kind in ("openvino", "ctranslate2", "onnxruntime"):
            folder = PEERS / ("openvino-fp32" if form == "strict" else engine) / model.name
        elif form == "gguf" or kind == "llama.cpp":
            folder = model.parent / f"{model.name}{'' if form == 'gguf' else '-q8_0'}.gguf"
        if not folder.exists():
            raise SystemExit(f"{folder} is missing: run benchmarks/peers/setup {model}")
        self.memory, self._name = 0, f"{python} {CHILD} {engine} {folder} {threads}"
        self._process = subprocess.Popen(
            self._name.split(),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={**_environment(), **({"PYTHONPATH": str(ROOT)} if kind == "dsbd" else {})},
            text=True,
        )
        threading.Thread(target=self._watch, daemon=True).start()

    def ask(self, ids: list[list[int]], beams: int, tokens: int) -> dict[str, Any]:
        """Return its answer, with the number of its best texts that ended early as `short`. Raises SystemExit where the
        process ends instead."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps({"ids": ids, "beams": beams, "tokens": tokens}) + "\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit(f"{self._name} ended with {self._process.wait()}: run its command by hand to see why")
        answer: dict[str, Any] = json.loads(line)
        lengths = [len(text) for text in answer["best"]]
        if len(lengths) != len(ids) or max(lengths) > tokens:
            raise SystemExit(f"{self._name} answered with {lengths} tokens in place of {len(ids)} times {tokens}")
        answer["short"] = sum(length < tokens for length in lengths)
        return answer

    def close(self) -> None:
        """End the process."""
        self._process.terminate()
        self._process.wait()

    def _watch(self) -> None:
        while self._process.poll() is None:
            self.memory = max(self.memory, own_memory(self._process.pid))
            time.sleep(0.1)


def _environment() -> dict[str, str]:
    return {**os.environ, "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "PYTHONDONTWRITEBYTECODE": ""}


def prompts(model: Path) -> Iterator[int]:
    """Yield the ids of this project's pages, over and over, each time from another place."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    ids = tokenizer("\n".join((ROOT / name).read_text(encoding="utf-8") for name in TEXTS)).input_ids
    start = 0
    while True:
        yield from ids[start:]
        start = (start + 17) % 1000


def take(source: Iterator[int], cell: Cell) -> list[list[int]]:
    """Return the ids of a cell's prompts."""
    return [[next(source) for _ in range(cell.length)] for _ in range(cell.prompts)]


def able(engines: Sequence[str], beams: int) -> list[str]:
    """Return the engines that search with so many beams."""
    return [engine for engine in engines if beams <= MOST_BEAMS.get(engine.partition("-")[0], beams)]


def measured(
    model: Path, engines: Sequence[str], cells: Sequence[Cell], threads: int, runs: list[dict[str, Any]]
) -> Iterator[Cell]:
    """Append a run for each engine and round of a cell, and yield the cell.

    All processes stay from cell to cell. But in a large cell the engines have the memory to themselves, one after the
    other.
    """
    source, children = prompts(model), dict[str, Child]()

    def ask(engine: str, ids: list[list[int]], cell: Cell, tokens: int) -> dict[str, Any]:
        if engine not in children:
            children[engine] = Child(engine, model, threads)
        return children[engine].ask(ids, cell.beams, tokens)

    def close() -> None:
        for child in children.values():
            child.close()
        children.clear()

    try:
        for cell in cells:
            few = cell._replace(prompts=min(cell.prompts, max(1, WARM // cell.length)))
            warm, asked = take(source, few), able(engines, cell.beams)
            alone = cell.rounds == 1 and cell.prompts * cell.length >= LARGE
            if alone:
                close()
            for number in range(cell.rounds):
                ids = take(source, cell)
                # the first call builds things, of a large cell all but those for its whole batch
                for engine in asked if number == 0 and not alone else ():
                    ask(engine, warm, cell, min(cell.tokens, 4))
                for engine in asked if number % 2 == 0 else asked[::-1]:
                    if alone:
                        ask(engine, warm, cell, min(cell.tokens, 4))
                    time.sleep(0.5)  # threads of the one before may still spin
                    answer = ask(engine, ids, cell, cell.tokens)
                    seconds, memory = answer["seconds"], children[engine].memory
                    run = {"model": model.name, "engine": engine, **cell._asdict(), "seconds": seconds}
                    runs.append({**run, "short": answer["short"], "memory": memory})
                    print(f"{model.name} {cell.name}: {engine} {seconds:.2f} s", file=sys.stderr, flush=True)
                    if alone:
                        close()
            yield cell
    finally:
        close()


def started(model: Path, engines: Sequence[str], threads: int, rounds: int, runs: list[dict[str, Any]]) -> None:
    """Append the seconds from a process's start to its first answer."""
    cell, source = Cell(*START, rounds), prompts(model)
    engines = able(engines, cell.beams)
    for number in range(rounds):
        ids = take(source, cell)
        for engine in engines if number % 2 == 0 else engines[::-1]:
            begin = time.perf_counter()
            child = Child(engine, model, threads)
            child.ask(ids, cell.beams, cell.tokens)
            seconds = time.perf_counter() - begin
            child.close()
            runs.append({"model": model.name, "engine": engine, "start": seconds})
            print(f"{model.name} start: {engine} {seconds:.2f} s", file=sys.stderr, flush=True)


def equal(model: Path, threads: int, runs: list[dict[str, Any]]) -> None:
    """Append of how many prompts an engine's best answer in float32 is that of transformers: with 1 beam and with 4."""
    cell = Cell(4, EQUAL_PROMPTS, 50, EQUAL_TOKENS, 1)
    ids, answers = take(prompts(model), cell), dict[str, list[list[list[int]]]]()
    for engine in EQUAL:
        child = Child(engine, model, threads)
        answers[engine] = [child.ask(ids, beams, cell.tokens)["best"] for beams in (1, 4)]
        child.close()
    for engine in EQUAL[1:]:
        one, four = (
            sum(a == b for a, b in zip(mine, theirs, strict=True))
            for mine, theirs in zip(answers[engine], answers[EQUAL[0]], strict=True)
        )
        runs.append({"model": model.name, "engine": engine, "equal": [one, four]})


def seconds_of(runs: Sequence[dict[str, Any]], engine: str, cell: Cell) -> list[float]:
    """Return the seconds of a cell, round by round."""
    asked = cell._asdict()
    return [
        run["seconds"] for run in runs
        if run["engine"] == engine and "seconds" in run and all(run[name] == asked[name] for name in asked)
    ]  # fmt: skip


def middle(runs: Sequence[dict[str, Any]], engine: str, cell: Cell) -> float | None:
    """Return the median seconds of a cell; None where it was not run."""
    seconds = seconds_of(runs, engine, cell)
    return statistics.median(seconds) if seconds else None


def times_as_fast(runs: Sequence[dict[str, Any]], ours: str, engine: str, cell: Cell) -> float | None:
    """Return how many times as fast as an engine ours is: the median over the rounds, as the memory of a machine may be
    much slower in one round than in the next."""
    # an engine may have come later than the first rounds: the last ones are those that both were in
    pairs = zip(reversed(seconds_of(runs, engine, cell)), reversed(seconds_of(runs, ours, cell)), strict=False)
    ratios = [theirs / mine for theirs, mine in pairs]
    return statistics.median(ratios) if ratios else None


def most(runs: Sequence[dict[str, Any]], engine: str) -> int:
    """Return the most memory that an engine took in all cells."""
    return max((run["memory"] for run in runs if run["engine"] == engine and "memory" in run), default=0)


def shown(cell: Cell, seconds: float | None) -> str:
    """Seconds to the first token, or tokens/s."""
    if seconds is None:
        return "-"
    return f"{seconds:.2f} s" if cell.tokens == 1 else f"{cell.prompts * cell.tokens / seconds:.1f}"


def report(
    model: Path, runs: Sequence[dict[str, Any]], engines: Sequence[str], cells: Sequence[Cell], weights: str
) -> tuple[str, str]:
    """Return the report, and the rows of README's table."""
    ours = OURS[weights]
    rows, behind, first = list[dict[str, str]](), list[str](), list[dict[str, str]]()
    for cell in cells:
        seconds = {engine: middle(runs, engine, cell) for engine in engines}
        if not any(seconds.values()):
            continue
        times = {
            engine: times_faster
            for engine in engines
            if (times_faster := times_as_fast(runs, ours, engine, cell)) is not None
        }
        theirs_here = [engine for engine in times if engine.partition("-")[0] in PEERS_NAMED]
        best = min(theirs_here, key=lambda engine: times[engine], default=None)
        row = {"tokens/s, or s to the first token": cell.name}
        row |= {engine: shown(cell, seconds[engine]) for engine in engines}
        if PLAIN in engines:
            row[f"{ours} by transformers"] = f"{times[PLAIN]:.2f}" if PLAIN in times else "-"
        row[f"{ours} by the best {weights} peer"] = f"{times[best]:.2f}" if best is not None else "-"
        if best is not None:
            ratio = times[best]
            if ratio < 1:
                behind.append(f"{cell.name}: {best} is {1 / ratio:.2f} times as fast")
            theirs = times.get(PLAIN)
            mine = shown(cell, seconds[ours])
            first.append({
                model.name: cell.name,
                f"`dsbd` {weights}": mine if cell.tokens == 1 else f"{mine} tokens/s",
                f"best peer in {weights}": f"{PEERS_NAMED[best.partition('-')[0]]} {shown(cell, seconds[best])}",
                "transformers, bfloat16": shown(cell, seconds.get(PLAIN)),
                "times as fast": f"{ratio:.1f}, {theirs:.1f}" if theirs else f"{ratio:.1f}",
            })  # fmt: skip
        rows.append(row)
    begun = {engine: [run["start"] for run in runs if run["engine"] == engine and "start" in run] for engine in engines}
    starts = [
        {
            "engine": engine,
            "start to the first answer, s": f"{statistics.median(start_seconds):.1f}" if start_seconds else "-",
            "own memory at most, GB": f"{memory / 1e9:.1f}" if (memory := most(runs, engine)) else "-",
        }
        for engine, start_seconds in begun.items()
    ]
    parts = [
        "# Beside other engines",
        f"{device_name()}, {model.name}; medians of rounds in turn, one process for each engine. Comparisons are "
        "medians of rounds, too.",
        markdown_table(rows),
    ]
    if any(begun.values()):
        beams, _, length, tokens = START
        told = f"Start: a process of its own, {beams} beams, a prompt of {length}, {tokens} new tokens."
        parts += [told, markdown_table(starts)]
    early = Counter[str]()
    for run in runs:
        early[run["engine"]] += run.get("short", 0)
    if told := ", ".join(f"{count} of {engine}" for engine, count in early.items() if count):
        parts.append(f"Answers that ended early, and count as if they had not: {told}.")
    parts.append("Behind: " + ("; ".join(behind) if behind else "no cell") + ".")
    if counts := [run for run in runs if "equal" in run]:
        told = ", ".join(f"{run['engine'].partition('-')[0]} {run['equal'][0]} and {run['equal'][1]}" for run in counts)
        parts.append(
            f"Best answers equal to those of transformers in float32, {counts[0]['model']}, {EQUAL_PROMPTS} prompts, "
            f"{EQUAL_TOKENS} tokens, 1 and 4 beams: {told}."
        )
    kept = [row for row in first if row[model.name] in README_ROWS]
    return "\n\n".join(parts) + "\n", markdown_table(kept) if kept else ""


README_ROWS = tuple(cell.name for cell in (CELLS[0], CELLS[1], CELLS[5], CELLS[3], CELLS[9]))


def figure(
    path: Path, model: Path, runs: Sequence[dict[str, Any]], engines: Sequence[str], cells: Sequence[Cell]
) -> None:
    """Draw tokens/s against beams, one prompt of the shortest length at a time, a line for each engine.

    Nothing is drawn where no cell has one prompt.
    """
    alone = [cell for cell in cells if cell.prompts == 1 and cell.tokens > 1]
    wide = [cell for cell in alone if cell.length == min(cell.length for cell in alone)]
    if not wide:
        return
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    drawn, axes = plt.subplots(figsize=(6.4, 4))
    for engine in engines:
        points = [(cell.beams, cell.tokens / seconds) for cell in wide if (seconds := middle(runs, engine, cell))]
        if points:
            axes.plot(
                *zip(*points, strict=True), marker="o", label=engine, linewidth=2.4 if engine in OURS.values() else 1.2
            )
    axes.set_xscale("log")
    axes.set_xticks([cell.beams for cell in wide], [str(cell.beams) for cell in wide])
    axes.minorticks_off()
    axes.set_ylim(bottom=0)
    axes.set_xlabel("beams")
    axes.set_ylabel("tokens/s of the best answer")
    axes.set_title(f"{model.name}, one prompt of {wide[0].length} tokens at a time\n{device_name()}", fontsize=10)
    axes.legend(frameon=False, fontsize=8)
    axes.spines[["top", "right"]].set_visible(False)
    drawn.tight_layout()
    drawn.savefig(path, dpi=110)
    plt.close(drawn)


def main() -> None:
    """See the module's docstring."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", type=Path, default=ROOT / "models" / "qwen2.5-coder-1.5b-instruct")
    parser.add_argument("--equal", type=Path, help="a small model whose answers in float32 are compared")
    parser.add_argument("--weights", choices=OURS, default="int8", help="bits of the weights")
    parser.add_argument("--engines", help="by commas; default: all")
    parser.add_argument("--cpu", choices=LIMITS, help="a smaller processor than this one")
    parser.add_argument("--cells", help="see `chosen`: 1,2 or 4x8x500 or grid; default: those of README")
    parser.add_argument("--starts", type=int, default=3, help="starts of each engine")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--name", default="evidence", help="folder of the results")
    options = parser.parse_args()
    limit = LIMITS.get(options.cpu, {})
    os.environ.update(limit)
    fitting = [engine for engine in ENGINES[options.weights] if not (limit and engine.startswith(UNLIMITED))]
    engines = options.engines.split(",") if options.engines else fitting
    if others := set(engines) - {*fitting}:
        parser.error(f"these engines are unknown, or cannot be limited: {', '.join(sorted(others))}")
    cells = chosen(options.cells)
    folder = results_folder(options.name)
    runs = (
        [json.loads(line) for line in kept.read_text().splitlines()] if (kept := folder / "runs.jsonl").exists() else []
    )
    if options.equal is not None and not any("equal" in run for run in runs):
        equal(options.equal, options.threads, runs)
    if options.starts and not any("start" in run for run in runs):
        started(options.target, engines, options.threads, options.starts, runs)
    missing = [
        cell for cell in cells if any(middle(runs, engine, cell) is None for engine in able(engines, cell.beams))
    ]
    for _ in measured(options.target, engines, missing, options.threads, runs) if missing else ():
        write_results(folder, runs, report(options.target, runs, engines, dict.fromkeys(cells), options.weights)[0])
    cells = tuple(dict.fromkeys(cells))
    text, rows = report(options.target, runs, engines, cells, options.weights)
    write_results(folder, runs, text)
    (folder / "readme.md").write_text(rows + "\n", encoding="utf-8")
    figure(folder / "speed.png", options.target, runs, engines, cells)
    print(text, flush=True)


if __name__ == "__main__":
    main()
