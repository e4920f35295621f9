"""Which divergence a draft should be trained on: forward KL, reverse KL, total variation; by counts, nothing is timed.

    dsbd distill --target T -i prompts.jsonl -o FOLDER     # makes FOLDER/answers.jsonl
    python -m benchmarks.objectives --target T --answers FOLDER/answers.jsonl --prompts held_out.jsonl

The drafts are the target's own first layers, or small Llamas with --hidden-size.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import get_args

from benchmarks.acceptance import requests_of
from dsbd_cli import MethodConfig, load
from dsbd_cli.config.model import ModelSpec
from dsbd_cli.train.acceptance import measure_acceptance
from dsbd_cli.train.answers import read_answers
from dsbd_cli.train.compare import with_draft
from dsbd_cli.train.laws import Objective, Teacher
from dsbd_cli.train.student import new_student, save_student, student_shape
from dsbd_cli.train.training import Recipe, Training


def main() -> None:
    """One JSON line for every divergence, rule and W."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--target", required=True)
    parser.add_argument("--answers", type=Path, required=True)
    parser.add_argument("--prompts", type=Path, required=True, help="that the answers do not belong to")
    parser.add_argument("--count", type=int, default=32)
    parser.add_argument("--layers", type=int)
    parser.add_argument("--hidden-size", type=int)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--learning-rate", type=float, default=5e-4)
    parser.add_argument("--max-new-tokens", type=int, default=32)
    parser.add_argument("--objective", action="append", choices=get_args(Objective), help="default: all")
    options = parser.parse_args()
    spec = ModelSpec(options.target)
    requests = requests_of(options.prompts, 0, options.count, options.max_new_tokens)
    plain, answers = load(spec, None), read_answers(options.answers)
    assert plain.info is not None
    shape = student_shape(spec, options.layers, options.hidden_size)
    teacher = Teacher(plain.target)
    objectives: tuple[Objective, ...] = options.objective or get_args(Objective)
    for objective in objectives:
        recipe = Recipe(options.steps, options.learning_rate, 0, plain.info.dtype == "bfloat16", objective)
        training = Training(new_student(spec, shape, 0), teacher, answers, recipe)
        losses = [training.run_step() for _ in range(options.steps)]
        told = {"objective": objective, "steps": options.steps, "loss": sum(losses[-20:]) / len(losses[-20:])}
        with tempfile.TemporaryDirectory() as folder:
            draft = Path(folder) / "draft"
            save_student(training.student, spec, draft, "float32")
            for num_beams in (1, 4):
                for rule in ("coupled", "search"):
                    method = MethodConfig(rule=rule, num_beams=num_beams, depth=4)
                    found = measure_acceptance(with_draft(plain, ModelSpec(str(draft), "draft"), method), requests)
                    passed = {} if found is None else asdict(found)
                    print(json.dumps(told | {"rule": rule, "num_beams": num_beams} | passed), flush=True)


if __name__ == "__main__":
    main()
