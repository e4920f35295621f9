"""Make the built-in pair from a seed: `python -m training.train_pair --work DIR`."""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

from training.export import BUILTIN


def stages(work: Path, seed: int, threads: int, to: Path) -> list[list[str]]:
    """The module and options of every stage, in order."""
    here, by, run = ["--work", str(work)], ["--seed", str(seed)], ["--threads", str(threads)]
    return [
        ["training.tokenizer", *here, *by],
        ["training.train_gold", "draft", *here, *by, *run],
        ["training.grow", *here, *by],
        ["training.train_gold", "target", "--warm", str(work / "grown"), *here, *by, *run],
        ["training.generate", *here, *by, *run],
        ["training.distill", *here, *by, *run],
        ["training.export", *here, "--to", str(to)],
        ["training.scores", str(to / "target")],
        ["training.scores", str(to / "draft")],
        ["training.agreement", str(to / "target"), str(to / "draft")],
    ]


def main() -> None:
    """Parse the options and run the stages one after another; a failed stage ends the run."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--work", type=Path, required=True, help="folder for checkpoints and text")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--to", type=Path, default=BUILTIN, help="where the pair is written")
    options = parser.parse_args()
    options.work.mkdir(parents=True, exist_ok=True)
    for stage in stages(options.work, options.seed, options.threads, options.to):
        print("python -m", *stage, file=sys.stderr)
        subprocess.run([sys.executable, "-m", *stage], check=True)


if __name__ == "__main__":
    main()
