"""Self-consistency: eight samples of every question, and the answer that most of them give.

    python examples/self_consistency.py --target MODEL --answer-regex '#### (.*)' < questions.jsonl

The samples of a question are rows of one input with ids of their own, answered by `dsbd generate --num-beams 1`; their
records are joined by question, and `dsbd pick --by vote` chooses.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections import defaultdict

DSBD = [sys.executable, "-m", "dsbd_cli"]


def main() -> None:
    options = argparse.ArgumentParser()
    options.add_argument("--target", default="builtin:target")
    options.add_argument("--draft", default="none")
    options.add_argument("--samples", type=int, default=8)
    options.add_argument("--max-new-tokens", default="64")
    options.add_argument("--answer-regex", default=None)
    args = options.parse_args()
    questions = [json.loads(line) for line in sys.stdin]
    rows = [
        {"id": f"{number}/{sample}", "prompt": question["prompt"], "metadata": {"question": number}}
        for number, question in enumerate(questions)
        for sample in range(args.samples)
    ]
    # early-stopping: a sample of one beam ends with the first end token that it draws
    models = ["--target", args.target, "--draft", args.draft, "--num-beams", "1", "--set", "early-stopping=true"]
    generate = [*DSBD, "generate", "-q", *models, "--max-new-tokens", args.max_new_tokens]
    made = subprocess.run(generate, input=lines(rows), stdout=subprocess.PIPE, check=True).stdout
    beams: defaultdict[int, list[object]] = defaultdict(list)
    for line in made.splitlines():
        record = json.loads(line)
        beams[record["metadata"]["question"]] += record["beams"]
    joined: list[dict[str, object]] = [{"id": str(number), "beams": beams[number]} for number in sorted(beams)]
    regex = [] if args.answer_regex is None else ["--answer-regex", args.answer_regex]
    subprocess.run([*DSBD, "pick", "-q", "--by", "vote", *regex], input=lines(joined), check=True)


def lines(rows: list[dict[str, object]]) -> bytes:
    """JSON lines."""
    return "".join(json.dumps(row) + "\n" for row in rows).encode()


if __name__ == "__main__":
    main()
