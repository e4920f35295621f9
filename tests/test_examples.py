"""The examples run, and do what they say."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]


def example(name: str, *options: str, given: str = "") -> str:
    command = [sys.executable, str(ROOT / "examples" / f"{name}.py"), *options]
    done = subprocess.run(command, cwd=ROOT, input=given, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


PROMPTS = "".join(
    json.dumps({"prompt": f"passage: {name} moved a boat in Tarn.\nquestion: what did {name} do\nanswer:"}) + "\n"
    for name in ("Nesen", "Olu")
)


def test_text_to_sql() -> None:
    said = example("text_to_sql", "--records", "3")
    assert re.fullmatch(r"[0-3] of 3 right; for [0-3] another beam than the best was the first to run\n", said)


def test_mbr() -> None:
    records = list(
        map(
            json.loads,
            example("mbr_translation", "--samples", "3", "--max-new-tokens", "6", given=PROMPTS).splitlines(),
        )
    )
    assert [record["id"] for record in records] == ["0", "1"]
    assert all(0 <= record["expected_utility"] <= 100 for record in records)


def test_self_consistency() -> None:
    records = list(
        map(
            json.loads,
            example("self_consistency", "--samples", "3", "--max-new-tokens", "6", given=PROMPTS).splitlines(),
        )
    )
    assert [record["pick"]["of"] for record in records] == [3, 3]


def test_rollouts_learn() -> None:
    rewards = [float(line.split()[-1]) for line in example("rollouts", "--steps", "12").splitlines()]
    assert len(rewards) == 12
    assert sum(rewards[-3:]) > sum(rewards[:3])
