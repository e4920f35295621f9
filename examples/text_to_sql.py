"""Text-to-SQL: eight beams of every question, and the first that runs on its database.

    python examples/text_to_sql.py [--target MODEL --draft MODEL] [--records N]

Writes a question file and its databases into a folder, and runs the two commands that you would type:

    dsbd generate -i questions.jsonl --decode search --num-beams 8 --n-best 8 |
        dsbd pick --by exec --database 'databases/{db}.sqlite' > answers.jsonl
"""

from __future__ import annotations

import argparse
import json
import sqlite3
import subprocess
import sys
import tempfile
from contextlib import closing
from itertools import islice
from pathlib import Path

from dsbd_cli.lab.tasks.record import TaskRecord
from dsbd_cli.lab.tasks.sql import SQL

DSBD = [sys.executable, "-m", "dsbd_cli"]


def write(folder: Path, records: list[TaskRecord]) -> None:
    """questions.jsonl, whose rows name their database in metadata, and the databases."""
    with (folder / "questions.jsonl").open("w") as lines:
        for number, record in enumerate(records):
            with closing(sqlite3.connect(folder / f"{number}.sqlite")) as database, database:
                for name, table in record.meta["tables"].items():  # type: ignore[attr-defined]
                    database.execute(f"CREATE TABLE {name} ({', '.join(table['columns'])})")
                    marks = ", ".join("?" * len(table["columns"]))
                    database.executemany(f"INSERT INTO {name} VALUES ({marks})", table["rows"])
            row = {"id": record.id, "prompt": record.prompt, "metadata": {"db": number}}
            lines.write(json.dumps(row) + "\n")


def main() -> None:
    options = argparse.ArgumentParser()
    options.add_argument("--target", default="builtin:target")
    options.add_argument("--draft", default="builtin:draft")
    options.add_argument("--records", type=int, default=20)
    args = options.parse_args()
    records = list(islice(SQL.records(), args.records))
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write(folder, records)
        models = ["--target", args.target, "--draft", args.draft]
        beams = ["--decode", "search", "--num-beams", "8", "--n-best", "8", "--max-new-tokens", "64"]
        generate = [*DSBD, "generate", "-q", "-i", str(folder / "questions.jsonl"), *models, *beams]
        pick = [*DSBD, "pick", "-q", "--by", "exec", "--database", f"{folder}/{{db}}.sqlite"]
        with subprocess.Popen(generate, stdout=subprocess.PIPE) as beaming:
            chosen = subprocess.run(pick, stdin=beaming.stdout, stdout=subprocess.PIPE, check=True).stdout
    answers = [json.loads(line) for line in chosen.splitlines()]
    scores = [SQL.score(record, answer["text"]) for record, answer in zip(records, answers, strict=True)]
    right = sum(score["execution accuracy"] == 1 for score in scores)
    moved = sum(answer["pick"]["beam"] > 0 for answer in answers)
    print(f"{right} of {len(records)} right; for {moved} another beam than the best was the first to run")


if __name__ == "__main__":
    main()
