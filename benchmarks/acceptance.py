"""Several drafts of one target on the same prompts, by counts alone: which layers pass, and steps per call.

    python -m benchmarks.acceptance --target T --draft D1 --draft D2 --prompts FILE

Nothing is timed, so the machine may be busy.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from itertools import islice
from pathlib import Path

from dsbd_cli import MethodConfig, Request, SamplingConfig, load
from dsbd_cli.config.model import ModelSpec
from dsbd_cli.io.records.reader import RowReader
from dsbd_cli.train.compare import with_draft
from dsbd_cli.train.draft_acceptance import measure_acceptance


def requests_of(path: Path, skip: int, count: int, tokens: int) -> list[Request]:
    """Rows of a file of prompts."""
    reader = RowReader(SamplingConfig(max_new_tokens=tokens), num_beams=1)
    found = []
    with path.open("rb") as stream:
        for number, line in enumerate(islice(stream, skip, skip + count), skip + 1):
            row = reader.read(line, index=number - 1, number=number)
            assert row.request is not None, row.error
            found.append(row.request)
    return found


def main() -> None:
    """One JSON line for every draft, rule and W."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--target", required=True)
    parser.add_argument("--draft", action="append", required=True)
    parser.add_argument("--prompts", type=Path, required=True)
    parser.add_argument("--skip", type=int, default=0, help="lines of the file that were trained on")
    parser.add_argument("--count", type=int, default=32)
    parser.add_argument("--max-new-tokens", type=int, default=48)
    parser.add_argument("--num-beams", type=int, action="append", help="default: 1 and 4")
    parser.add_argument("--rule", action="append", help="default: coupled and search")
    parser.add_argument("--depth", type=int, default=4)
    parser.add_argument("--dtype", default="auto")
    options = parser.parse_args()
    requests = requests_of(options.prompts, options.skip, options.count, options.max_new_tokens)
    plain = load(ModelSpec(options.target, dtype=options.dtype), None)
    for num_beams in options.num_beams or (1, 4):
        for rule in options.rule or ("coupled", "search"):
            method = MethodConfig(rule=rule, num_beams=num_beams, depth=options.depth)
            for draft in options.draft:
                spec = ModelSpec(draft, "draft", dtype=options.dtype)
                found = measure_acceptance(with_draft(plain, spec, method), requests)
                told = {"draft": draft, "rule": rule, "num_beams": num_beams, "drafts": method.drafts_per_layer}
                told |= {"depth": options.depth, "prompts": len(requests)}
                print(json.dumps(told | (asdict(found) if found is not None else {})), flush=True)


if __name__ == "__main__":
    main()
