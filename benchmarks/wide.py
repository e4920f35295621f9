r"""Many beams on a long prompt, free or held to a catalogue: seconds of ours and of transformers, whether the beams are
the same, memory of the cache, and what the catalogue's mask takes.

    python -m benchmarks.wide --target PATH --num-beams 4,20,50,256 --prompt-tokens 300,1500,2500 --new-tokens 4
    python -m benchmarks.wide --target PATH --num-beams 50 --prompt-tokens 2500 --answers 1500000
    python -m benchmarks.wide --target builtin:target --num-beams 50 --prompt-tokens 40 --answers 20000 \
        --rows 10000 --alone

All W hypotheses are asked for and compared in order. transformers computes and stores the prompt W times, ours once.
--answers N: random ids of --new-tokens - 1 tokens and the end token; transformers gets them by
prefix_allowed_tokens_fn. --rows N: so many random prompts more, of ours alone; counts answers that are illegal or come
twice.
"""

from __future__ import annotations

import argparse
import itertools
import random
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

import dsbd_cli
from benchmarks.common import markdown_table, numbers, publish
from benchmarks.invariance import PROMPTS
from dsbd_cli import Engine, MethodConfig, ModelSpec, Request, SamplingConfig
from dsbd_cli.engine.constraints import trie
from dsbd_cli.engine.constraints.answers import Catalogue, CatalogueAnswer, CatalogueCompiler
from dsbd_cli.lab.peers.transformers_generate import stock_attention

Catalogues = dict[str, Catalogue]


def prompt_of(codec: Any, length: int) -> tuple[int, ...]:
    """A text of exactly so many tokens."""
    text = "\n".join(itertools.islice(itertools.cycle(PROMPTS), length))
    return tuple(codec.encode(text)[:length])


def catalogue_of(loaded: Engine, count: int, tokens: int) -> tuple[Catalogues, float]:
    """So many different random answers, and seconds to compile them. No catalogue for 0."""
    if not count:
        return {}, 0.0
    rng, drawn = random.Random(0), dict[tuple[int, ...], None]()
    free = [token for token in range(loaded.target.vocab_size) if token not in loaded.codec.eos_ids]
    while len(drawn) < count:
        drawn[tuple(rng.choices(free, k=tokens))] = None
    start = time.perf_counter()
    answers = (CatalogueAnswer(f"answer {at}", tokens=tokens, id=b"%d" % at) for at, tokens in enumerate(drawn))
    compiled = CatalogueCompiler(loaded.codec, loaded.target.vocab_size).compile(answers)
    return {"": compiled}, time.perf_counter() - start


@contextmanager
def masks_timed() -> Iterator[list[float]]:
    """Seconds that the mask takes, one entry per call, while this is open. Of the CPU only: nothing waits for a GPU."""
    spent: list[float] = []
    places = ((trie.TrieStep, "step"), (trie.TrieStep, "of"), (trie._Children, "_tokens"))
    kept = [(owner, name, getattr(owner, name)) for owner, name in places]

    def timed(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            start = time.perf_counter()
            result = function(*arguments)
            spent.append(time.perf_counter() - start)
            return result

        return call

    try:
        for owner, name, function in kept:
            setattr(owner, name, timed(function))
        yield spent
    finally:
        for owner, name, function in kept:
            setattr(owner, name, function)


def engine_of(loaded: Engine, beams: int, catalogues: Catalogues) -> Engine:
    method = MethodConfig(rule="search", num_beams=beams, depth=0)
    return loaded.replace(draft=None, method=method, catalogues=catalogues)


def sampling_of(beams: int, tokens: int) -> SamplingConfig:
    return SamplingConfig(max_new_tokens=tokens, n_best=beams, length_penalty=0.0)


def ours(
    loaded: Engine, prompt: tuple[int, ...], beams: int, tokens: int, catalogues: Catalogues
) -> tuple[list[tuple[int, ...]], float, float, int]:
    """Token ids of all beams, seconds, seconds of the mask, and the cache's slots at the peak."""
    engine = engine_of(loaded, beams, catalogues)
    with masks_timed() as spent:
        start = time.perf_counter()
        [result] = engine.run([Request(prompt_ids=prompt, sampling=sampling_of(beams, tokens))])
        seconds = time.perf_counter() - start
    result.check()
    return [beam.token_ids for beam in result.hypotheses], seconds, sum(spent), result.stats.kv_peak_slots


def theirs(
    loaded: Any, prompt: tuple[int, ...], beams: int, tokens: int, catalogues: Catalogues
) -> tuple[list[tuple[int, ...]], float]:
    """The same of transformers' generate, on the model as transformers loads it."""
    model = loaded.target.stock()
    inputs, options = torch.tensor([prompt]), {}
    if catalogues:
        followers, end = prefixes(catalogues[""]), [loaded.codec.eos_ids[0]]
        options["prefix_allowed_tokens_fn"] = lambda row, ids: followers(tuple(ids[len(prompt) :].tolist())) or end
    with torch.inference_mode(), stock_attention(model):
        start = time.perf_counter()
        rows = model.generate(
            inputs,
            attention_mask=torch.ones_like(inputs),
            num_beams=beams,
            num_return_sequences=beams,
            do_sample=False,
            max_new_tokens=tokens,
            length_penalty=0.0,
            eos_token_id=list(loaded.codec.eos_ids),
            pad_token_id=0,
            **options,
        )
        seconds = time.perf_counter() - start
    return [tuple(row[len(prompt) :].tolist()) for row in rows], seconds


def prefixes(catalogue: Catalogue) -> Callable[[tuple[int, ...]], list[int]]:
    """What may follow a path: a dictionary, as users write it, filled as it is asked."""
    children: dict[tuple[int, ...], list[int]] = {}

    def follow(path: tuple[int, ...]) -> list[int]:
        if path not in children:
            node = catalogue.trie.find(path)
            children[path] = [] if node is None else catalogue.trie.children(node)
        return children[path]

    return follow


def check_rows(
    loaded: Engine, rows: int, length: int, beams: int, tokens: int, catalogues: Catalogues
) -> dict[str, int]:
    """Answers of random prompts: how many there are, how many are illegal, and how many come twice in a row."""
    rng, ends = random.Random(1), set(catalogues[""].nodes.tolist())
    engine, counts = engine_of(loaded, beams, catalogues), {"returned": 0, "illegal": 0, "twice": 0}
    size = loaded.target.vocab_size
    requests = (
        Request(prompt_ids=tuple(rng.randrange(size) for _ in range(length)), sampling=sampling_of(beams, tokens))
        for _ in range(rows)
    )
    for result in engine.run(requests):
        result.check()
        token_ids = [beam.token_ids for beam in result.hypotheses]
        counts["returned"] += len(token_ids)
        counts["illegal"] += sum(catalogues[""].trie.find(ids) not in ends for ids in token_ids)
        counts["twice"] += len(token_ids) - len(set(token_ids))
    return counts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", required=True)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--num-beams", type=numbers, default=[4, 20, 50, 256])
    parser.add_argument("--prompt-tokens", type=numbers, default=[300, 1500, 2500])
    parser.add_argument("--new-tokens", type=int, default=4)
    parser.add_argument("--answers", type=int, default=0, help="of a random catalogue; 0: anything may be answered")
    parser.add_argument("--rows", type=int, default=0, help="random prompts whose answers are checked")
    parser.add_argument("--rounds", type=int, default=2, help="of ours; transformers runs once")
    parser.add_argument("--alone", action="store_true", help="without transformers")
    parser.add_argument("--name", default="wide")
    options = parser.parse_args()
    if options.rows and not options.answers:
        parser.error("--rows checks answers of a catalogue: give --answers")
    loaded = dsbd_cli.load(ModelSpec(options.target, dtype=options.dtype), None)
    catalogues, compiled_s = catalogue_of(loaded, options.answers, options.new_tokens - 1)
    trie_mib = catalogues[""].trie.keys.nbytes / 2**20 if catalogues else 0.0
    runs, rows = [], []
    for beams, length in itertools.product(options.num_beams, options.prompt_tokens):
        prompt = prompt_of(loaded.codec, length)
        rounds = [ours(loaded, prompt, beams, options.new_tokens, catalogues) for _ in range(options.rounds)]
        token_ids, seconds, mask_s, slots = min(rounds, key=lambda round_: round_[1])
        sequence = length + options.new_tokens
        run: dict[str, Any] = {"beams": beams, "prompt": length, "seconds": seconds, "mask_s": mask_s, "slots": slots}
        run |= {"kv_bytes": slots * loaded.target.kv_bytes_per_slot(), "sequence_slots": sequence}
        run |= {"answers": options.answers, "compiled_s": compiled_s, "trie_mib": trie_mib}
        if not options.alone:
            other, run["transformers_s"] = theirs(loaded, prompt, beams, options.new_tokens, catalogues)
            # transformers pads what ended early
            run["equal"] = sum(a == b[: len(a)] for a, b in zip(token_ids, other, strict=False))
        if options.rows:
            run |= check_rows(loaded, options.rows, length, beams, options.new_tokens, catalogues)
        runs.append({**vars(options), **run})
        rows.append(
            {
                "beams": str(beams),
                "prompt tokens": str(length),
                "dsbd": f"{seconds:.2f} s",
                "transformers": "" if options.alone else f"{run['transformers_s']:.2f} s",
                "ratio": "" if options.alone else f"{run['transformers_s'] / seconds:.1f}x",
                "same beams in order": "" if options.alone else f"{run['equal']} of {len(token_ids)}",
                "cache slots": f"{slots} ({slots / sequence:.2f} sequences)",
                "mask": f"{100 * mask_s / seconds:.1f} %" if catalogues else "",
                "illegal, twice": f"{run['illegal']}, {run['twice']} of {run['returned']}" if options.rows else "",
            }
        )
        held = f" Catalogue: {options.answers} answers, compiled in {compiled_s:.1f} s, {trie_mib:.1f} MiB."
        title = f"Many beams, long prompts: {options.dtype}, {options.new_tokens} new tokens"
        about = f"Ours: best of {options.rounds}.{held if catalogues else ''}"
        publish(options.name, runs, title, about, markdown_table(rows))


if __name__ == "__main__":
    main()
