"""More beams where none is good: questions of which no SQL runs are answered again with more beams.

    python examples/more_beams.py --database 'databases/{db}.sqlite' --num-beams 4 16 < questions.jsonl > answers.jsonl

Every round is the pipe that you would type, over the rows that have no good answer yet:

    dsbd generate -i rows.jsonl --decode search --num-beams W --n-best W |
        dsbd pick --by exec --database 'databases/{db}.sqlite'

The answers come out in the order of the questions; `pick.of` in a record is the number of beams that it took.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

DSBD = [sys.executable, "-m", "dsbd_cli"]


def answer(rows: list[dict[str, str]], width: int, args: argparse.Namespace) -> list[dict[str, dict[str, int]]]:
    """One record per row, in order: the first of `width` beams that runs, or the best one where none runs."""
    models = ["--target", args.target, "--draft", args.draft, "--max-new-tokens", args.max_new_tokens]
    beams = ["--decode", "search", "--num-beams", str(width), "--n-best", str(width)]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "rows.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        generate = [*DSBD, "generate", "-q", "-i", str(path), *models, *beams]
        pick = [*DSBD, "pick", "-q", "--by", "exec", "--database", args.database]
        with subprocess.Popen(generate, stdout=subprocess.PIPE) as beaming:
            chosen = subprocess.run(pick, stdin=beaming.stdout, stdout=subprocess.PIPE, check=False).stdout
    return [json.loads(line) for line in chosen.splitlines()]


def main() -> None:
    options = argparse.ArgumentParser()
    options.add_argument("--target", default="builtin:target")
    options.add_argument("--draft", default="none")
    options.add_argument("--database", required=True)
    options.add_argument("--num-beams", type=int, nargs="+", default=[4, 16])
    options.add_argument("--max-new-tokens", default="64")
    args = options.parse_args()
    rows = [{"id": str(i), **json.loads(line)} for i, line in enumerate(sys.stdin)]
    left = list(range(len(rows)))
    answers: dict[int, dict[str, dict[str, int]]] = {}
    for width in args.num_beams:
        answers.update(zip(left, answer([rows[i] for i in left], width, args), strict=True))
        left = [i for i in left if "pick" in answers[i] and not answers[i]["pick"]["ran"]]
        if not left:
            break
    for i in range(len(rows)):
        print(json.dumps({**answers[i], "index": i}, ensure_ascii=False))


if __name__ == "__main__":
    main()
