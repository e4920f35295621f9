"""Minimum Bayes risk: of 16 samples of every prompt the one that agrees most with all others (chrF).

    python examples/mbr_translation.py --target MODEL < prompts.jsonl

A line is {"prompt": "..."}: a translation prompt of your model. Samples of one prompt are rows of their own, so that
they are independent; beams are different texts by design, and would need --weights probability. By hand:

    dsbd pick --by mbr --metric chrf --input-format lines --candidates 16 < candidates.txt
"""

from __future__ import annotations

import argparse
import json
import sys

import dsbd_cli
from dsbd_cli import MethodConfig, Request, SamplingConfig
from dsbd_cli.pick.candidate_rows import Candidate, CandidateRow
from dsbd_cli.pick.choosers import ByRisk


def main() -> None:
    options = argparse.ArgumentParser()
    options.add_argument("--target", default="builtin:target")
    options.add_argument("--draft", default="none")
    options.add_argument("--samples", type=int, default=16)
    options.add_argument("--max-new-tokens", type=int, default=64)
    args = options.parse_args()
    draft = None if args.draft == "none" else args.draft
    engine = dsbd_cli.load(args.target, draft, method=MethodConfig(num_beams=1), batch_size=args.samples)
    # early_stopping: a sample of one beam ends with the first end token that it draws
    sampling = SamplingConfig(max_new_tokens=args.max_new_tokens, early_stopping=True, top_k=0)
    for number, line in enumerate(sys.stdin):
        prompt = json.loads(line)["prompt"]
        samples = [Request(prompt, id=f"{number}/{sample}", sampling=sampling) for sample in range(args.samples)]
        texts = [result.text for result in engine.generate(samples)]
        row = CandidateRow(
            number, number + 1, str(number), "", tuple(Candidate(text, None, None, {}) for text in texts)
        )
        choice = ByRisk("chrf").choose(row)
        print(json.dumps({"id": str(number), "text": texts[choice.beam], **choice.why}), flush=True)


if __name__ == "__main__":
    main()
