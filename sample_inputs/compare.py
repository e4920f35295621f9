"""The same prompts by `dsbd` and by transformers' own beam search: `python compare.py prompts.jsonl [MODEL]`.

MODEL: a folder; without one it is the built-in target with its draft. Both run in float32.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import dsbd_cli
from dsbd_cli.config.model import BUILTIN_DRAFT, BUILTIN_TARGET
from dsbd_cli.models.checkpoints.registry import resolve

BEAMS, NEW_TOKENS = 8, 64


def transformers_texts(target: str, prompts: list[str]) -> tuple[list[str], float]:
    """Texts and seconds of `generate(num_beams=8)` in one batch, padded on the left."""
    folder = resolve(target).path
    tokenizer = AutoTokenizer.from_pretrained(folder, padding_side="left")
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    inputs = tokenizer(prompts, return_tensors="pt", padding=True)
    start = time.perf_counter()
    with torch.inference_mode():
        found = model.generate(**inputs, num_beams=BEAMS, do_sample=False, max_new_tokens=NEW_TOKENS)
    seconds = time.perf_counter() - start
    answers = found[:, inputs["input_ids"].shape[1] :]
    return tokenizer.batch_decode(answers, skip_special_tokens=True), seconds


def dsbd_texts(target: str, prompts: list[str]) -> tuple[list[str], float]:
    """Texts and seconds of `--decode search` in one batch."""
    draft = BUILTIN_DRAFT if target == BUILTIN_TARGET else None
    method = dsbd_cli.MethodConfig(rule="search", num_beams=BEAMS)
    spec = dsbd_cli.ModelSpec(target, dtype="float32")
    engine = dsbd_cli.load(spec, draft, method=method, batch_size=len(prompts))
    sampling = dsbd_cli.SamplingConfig(max_new_tokens=NEW_TOKENS)
    start = time.perf_counter()
    results = list(engine.run([dsbd_cli.Request(prompt, sampling=sampling) for prompt in prompts]))
    return [result.text for result in results], time.perf_counter() - start


def main() -> None:
    """Print the seconds of both and how many texts are equal."""
    rows = [json.loads(line) for line in Path(sys.argv[1]).read_text(encoding="utf-8").splitlines() if line.strip()]
    prompts = [row["prompt"] for row in rows]
    target = sys.argv[2] if len(sys.argv) > 2 else BUILTIN_TARGET
    ours, our_seconds = dsbd_texts(target, prompts)
    theirs, their_seconds = transformers_texts(target, prompts)
    equal = sum(a == b for a, b in zip(ours, theirs, strict=True))
    sys.stdout.write(
        f"\n── the same {len(prompts)} prompts by beam search, {BEAMS} beams, one batch\n"
        f"transformers  {their_seconds:5.2f} s\n"
        f"dsbd          {our_seconds:5.2f} s, {equal} of {len(prompts)} texts equal\n"
    )


if __name__ == "__main__":
    main()
