"""Beam search by dsbd and by transformers on the same prompts of real models: the same hypotheses, in order?

    python -m benchmarks.equal --target models/smollm2-135m-instruct --target models/gemma-3-270m
        --target models/qwen2.5-coder-0.5b-instruct --prompts 200 --seconds 600

In float32, with W beams and without a draft; transformers answers by `generate(num_beams=W, num_return_sequences=W)`
in batches padded on the left. After every batch its lines are appended to runs.jsonl and the report is written anew:
the same command on the same day, or on any day where --name is an absolute path, goes on after what it finds there.
`--seconds` ends a call after the batch that it is in.

Where the best text differs, the raw log-probabilities of both under the target tell which is better: a tie that
rounding decided has a gap of about 1e-5 nats.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import torch

import dsbd_cli
from benchmarks.common import markdown_table, results_folder, write_results
from benchmarks.instruct_prompts import prompts
from dsbd_cli import MethodConfig, ModelSpec, Request, SamplingConfig
from dsbd_cli.errors import InvalidRowError
from dsbd_cli.lab.peers.base import sequence_logprob
from dsbd_cli.lab.peers.config import PeerConfig
from dsbd_cli.lab.peers.transformers_generate import TransformersPeer
from dsbd_cli.models.forest_model import BaseForestModel
from dsbd_cli.models.tokenizer import HFCodec

SETTINGS = ("num_beams", "max_new_tokens")  # that all lines of a file share


def encoded(codec: HFCodec, text: str) -> tuple[int, ...]:
    """As a turn of a conversation where the tokenizer has a chat template, else as text."""
    try:
        return tuple(codec.encode_chat([{"role": "user", "content": text}]))
    except InvalidRowError:
        return tuple(codec.encode(text))


def compared(target: str, todo: Sequence[tuple[int, str]], options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """One line for every prompt."""
    method = MethodConfig(rule="search", num_beams=options.num_beams)
    engine = dsbd_cli.load(ModelSpec(target, dtype="float32"), None, method=method, batch_size=options.batch_size)
    model, codec = engine.target, engine.codec
    assert isinstance(model, BaseForestModel)
    assert isinstance(codec, HFCodec)
    sampling = SamplingConfig(max_new_tokens=options.max_new_tokens, n_best=options.num_beams)
    config = PeerConfig("beam-search", options.num_beams)
    peer = TransformersPeer(config, model, None, codec, sampling, options.batch_size)
    for first in range(0, len(todo), options.batch_size):
        some = todo[first : first + options.batch_size]
        ids = [encoded(codec, text) for _, text in some]
        requests = [Request(prompt_ids=prompt, sampling=sampling) for prompt in ids]
        ours = list(engine.run(requests))
        for (number, text), prompt, result, theirs in zip(some, ids, ours, peer.run(ids, 0), strict=True):
            if result.error is not None:
                raise result.error
            mine = [tuple(beam.token_ids) for beam in result.hypotheses]
            line = {"target": Path(target).name, "number": number, "prompt": text, "tokens": len(mine[0])}
            line |= {name: getattr(options, name) for name in SETTINGS}
            line |= {"best": mine[0] == theirs.token_ids, "all": mine == list(theirs.ranked)}
            if not line["best"]:
                asked = torch.tensor(prompt)
                gap = sequence_logprob(model, asked, mine[0]) - sequence_logprob(model, asked, theirs.token_ids)
                line |= {"ours": result.text, "transformers": theirs.text, "gap_nats": gap}
            yield line


def report(runs: Sequence[dict[str, Any]], options: argparse.Namespace) -> str:
    """A table of counts, and what differs."""
    rows, differing = [], []
    for name in dict.fromkeys(run["target"] for run in runs):
        some = [run for run in runs if run["target"] == name]
        counts = {key: sum(run[key] for run in some) for key in ("best", "all")}
        rows.append(
            {
                "model": name,
                "prompts": str(len(some)),
                "tokens of the best": str(sum(run["tokens"] for run in some)),
                "best text equal": f"{counts['best']} of {len(some)}",
                f"all {options.num_beams} in order": f"{counts['all']} of {len(some)}",
            }
        )
        differing += [
            f"- {name}, prompt {run['number']}: the log-probability of ours is above that of transformers by "
            f"{run['gap_nats']:.1e} nats"
            for run in some
            if not run["best"]
        ]
    return (
        f"# Beam search beside transformers\n\nfloat32, W = {options.num_beams}, {options.max_new_tokens} new tokens "
        f"at most, batches of {options.batch_size}, no draft; token ids are compared.\n\n{markdown_table(rows)}"
        + ("\nWhere the best differs:\n\n" + "\n".join(differing) + "\n" if differing else "")
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", action="append", required=True)
    parser.add_argument("--prompts", type=int, default=200, help="of each model")
    parser.add_argument("--num-beams", type=int, default=4)
    parser.add_argument("--max-new-tokens", type=int, default=24)
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--seconds", type=float, help="of this call, about; default: no end")
    parser.add_argument("--name", default="equal", help="of the folder of results, or its absolute path")
    options = parser.parse_args()
    folder, began = results_folder(options.name), time.monotonic()
    path = folder / "runs.jsonl"
    runs = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()] if path.is_file() else []
    if any(run.get(name, getattr(options, name)) != getattr(options, name) for run in runs for name in SETTINGS):
        parser.error(f"{path} holds lines of other settings ({', '.join(SETTINGS)}): give another --name")
    texts = list(enumerate(islice(prompts(0), options.prompts)))
    for target in options.target:
        done = {run["number"] for run in runs if run["target"] == Path(target).name}
        todo = [item for item in texts if item[0] not in done]
        for count, line in enumerate(compared(target, todo, options) if todo else (), 1):
            runs.append(line)
            if count % options.batch_size == 0 or count == len(todo):
                write_results(folder, runs, report(runs, options))
                print(f"{line['target']}: {len(done) + count} of {len(texts)}", flush=True)
                if options.seconds is not None and time.monotonic() - began > options.seconds:
                    return


if __name__ == "__main__":
    main()
