"""Whole processes from their start: to the first record and to the end, beside transformers.

    python -m benchmarks.startup
    python -m benchmarks.startup --target models/qwen2.5-coder-1.5b-instruct --dtype bfloat16
    python -m benchmarks.startup --target models/qwen2.5-coder-1.5b-instruct --dtype bfloat16 --quantize int8

Without a target: the built-in pair on the eight prompts of sample_inputs/prompts.jsonl. With one: one chat prompt, four
beams, no draft. `first`: what checks at load find is not kept yet (each run has a cache folder of its own). `later`: it
is. Kernels are compiled before. transformers loads the same folder in the same dtype and generates as many tokens.
Memory is the process's own (RssAnon), sampled every 20 ms; files that are mapped do not count.

The host of a virtual machine may take free memory back, and give it again page by page when it is used. That takes
seconds for some GB, and counts.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from statistics import median

from benchmarks.common import markdown_table, own_memory, publish

ROOT = Path(__file__).parents[1]
PROMPT = {"messages": [{"role": "user", "content": "Write a haiku about the sea."}]}
TOKENS = 16
THEIRS = """
import sys, torch, transformers
folder, dtype = sys.argv[1:3]
tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype)).eval()
messages = [{"role": "user", "content": "Write a haiku about the sea."}]
inputs = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt", return_dict=True)
with torch.inference_mode():
    found = model.generate(**inputs, max_new_tokens=TOKENS, num_beams=4, do_sample=False)
print(tokenizer.decode(found[0]), flush=True)
""".replace("TOKENS", str(TOKENS))


def measured(command: list[str], stdin: bytes, cache: str) -> dict[str, float]:
    """Run a process: seconds to its first line and to its end, processor seconds, and most memory of its own in GB."""
    start, most = time.perf_counter(), 0
    before = os.times()
    process = subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        cwd=ROOT,
        # an installed package has compiled modules: let Python keep those of a clone, too
        env={**os.environ, "XDG_CACHE_HOME": cache, "PYTHONDONTWRITEBYTECODE": ""},
    )
    assert process.stdin is not None
    assert process.stdout is not None

    def watch() -> None:
        nonlocal most
        while process.poll() is None:
            most = max(most, own_memory(process.pid))
            time.sleep(0.02)

    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    process.stdin.write(stdin)
    process.stdin.close()
    process.stdout.readline()
    first = time.perf_counter() - start
    process.stdout.read()
    if process.wait():
        raise SystemExit(f"{' '.join(command[:6])} ended with {process.returncode}")
    after = os.times()
    watcher.join()
    spent = after.children_user + after.children_system - before.children_user - before.children_system
    return {"first_s": first, "all_s": time.perf_counter() - start, "processor_s": spent, "own_gb": most / 1e9}


def main() -> None:
    """See the module's docstring."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", help="a checkpoint folder; without one the built-in pair")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--quantize", choices=["int8"])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--name", default="startup", help="folder of the results")
    options = parser.parse_args()
    dsbd = [sys.executable, "-m", "dsbd_cli", "generate", "--quiet"]
    stdin = (ROOT / "sample_inputs" / "prompts.jsonl").read_bytes()
    if options.target:
        dsbd += ["--target", options.target, "--draft", "none", "--decode", "search", "--num-beams", "4"]
        dsbd += ["--dtype", options.dtype, "--max-new-tokens", str(TOKENS)]
        dsbd += ["--quantize", options.quantize] if options.quantize else []
        stdin = json.dumps(PROMPT).encode() + b"\n"
    runs = list[dict[str, object]]()
    with tempfile.TemporaryDirectory() as kept:
        measured(dsbd, stdin, kept)  # compiles kernels, reads files
        for number in range(options.rounds):
            with tempfile.TemporaryDirectory() as empty:
                for way, cache in (("first", empty), ("later", kept)):
                    runs.append({"way": way, "round": number, **measured(dsbd, stdin, cache)})
            if options.target:
                theirs = [sys.executable, "-c", THEIRS, options.target, options.dtype]
                runs.append({"way": "transformers", "round": number, **measured(theirs, b"", kept)})
    names = {"first_s": "first record, s", "all_s": "whole process, s", "processor_s": "processor, s"}
    table = []
    for way in dict.fromkeys(run["way"] for run in runs):
        of_way = [run for run in runs if run["way"] == way]
        row = {"load": str(way)}
        for field, title in {**names, "own_gb": "own memory, GB"}.items():
            values = sorted(float(str(run[field])) for run in of_way)
            row[title] = f"{median(values):.2f} ({values[0]:.2f} to {values[-1]:.2f})"
        table.append(row)
    publish(options.name, runs, "Start", f"Median of {options.rounds} (and range).", markdown_table(table))


if __name__ == "__main__":
    main()
