"""`--quantize int8` and `int4` beside the checkpoint's own weights: error of the log-probabilities, and tokens/s.

    python -m benchmarks.quantize error --target models/qwen2.5-coder-0.5b-instruct
    python -m benchmarks.quantize decode --target models/qwen2.5-coder-1.5b-instruct --ctranslate2
    python -m benchmarks.quantize sql --target models/qwen2.5-coder-1.5b-instruct --file models/NAME.gguf

error: KL divergence from float32 and agreement of the most probable token, of bfloat16, int8 and int4 beside bfloat16.
Of a quantised file (GGUF, GPTQ, ..): as the file is, beside its own weights dequantised to float32.
decode: tokens/s of the best answer, one chat prompt at a time, beam search without a draft; every prompt is answered by
all in turn, and the time of its own forward counts. The results are written after every prompt; `--seconds` ends it.
sql: execution accuracy on the built-in task `sql`, with 1 and 4 beams, of bfloat16, int8, int4 and a quantised file as
it is; exact McNemar tests by bfloat16, and of the file by the same file dequantised.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.common import markdown_table, publish, results_folder, write_results
from benchmarks.instruct_prompts import prompts
from benchmarks.peers.engines import CTranslateConfig, CTranslatePeer
from dsbd_cli import Engine, MethodConfig, Request, SamplingConfig
from dsbd_cli.config.model import ModelSpec
from dsbd_cli.lab.bench.statistics import paired_tests, wilson
from dsbd_cli.lab.peers.config import PeerConfig
from dsbd_cli.lab.peers.transformers_generate import TransformersPeer
from dsbd_cli.lab.tasks.choose import TASKS
from dsbd_cli.lab.tasks.dataset import EXECUTION, with_shots
from dsbd_cli.models.checkpoints.checkpoint import Checkpoint
from dsbd_cli.models.checkpoints.loader import load
from dsbd_cli.models.checkpoints.registry import resolve
from dsbd_cli.models.load_model import load_model

TEXTS = ("README.md", "docs/algorithm.md", "dsbd_cli/ops/cpu/int8.py", "sample_inputs/prompts.jsonl")


def logprobs(target: str, dtype: str, quantize: Any, tokens: int) -> Tensor:
    """[places, V] log-probabilities after every token of the texts, in float32."""
    run: Callable[[Tensor], Tensor]
    if quantize is None and Checkpoint.open(ModelSpec(target)).stored_form is None:
        network, tokenizer = load(Checkpoint.open(ModelSpec(target, device="cpu", dtype=dtype)))
        run = lambda tokens: network(tokens, use_cache=False).logits  # noqa: E731
    else:
        spec = ModelSpec(target, device="cpu", dtype=dtype, quantize=quantize, numerics="fast")
        model, codec, _ = load_model(Checkpoint.open(spec))
        run, tokenizer = model.plain, codec.tokenizer
    root = Path(__file__).parents[1]
    logprobs = []
    with torch.inference_mode():
        for name in TEXTS:
            ids = tokenizer((root / name).read_text(encoding="utf-8")[: 8 * tokens]).input_ids[:tokens]
            logprobs.append(run(torch.tensor([ids]))[0].float().log_softmax(-1))
    return torch.cat(logprobs)


def error(target: str, tokens: int) -> None:
    """KL in nats per place: mean, 99th percentile; share of places with the same most probable token."""
    form = Checkpoint.open(ModelSpec(target)).stored_form
    exact = logprobs(target, "float32", None if form is None else "none", tokens)
    plain = [("bfloat16", None)] if form is None else [("bfloat16", "none"), (f"{form}+bfloat16", None)]
    for name, quantize in (*plain, ("int8+bfloat16", "int8"), ("int4+bfloat16", "int4")):
        approximate = logprobs(target, "bfloat16", quantize, tokens)
        divergence = (exact.exp() * (exact - approximate)).sum(-1)
        top = exact.argmax(-1, keepdim=True)
        off = (approximate.gather(1, top) - exact.gather(1, top)).abs().mean()
        agree = (approximate.argmax(-1, keepdim=True) == top).float().mean()
        print(
            f"{name}: KL {divergence.mean():.5f}, 99 % below {divergence.quantile(0.99):.4f}; log-probability of the "
            f"most probable token off by {off:.4f}; the same one at {agree:.1%} of {len(exact)} places",
            flush=True,
        )


def sql(options: argparse.Namespace) -> None:
    """Answer the records in every form of the weights, and compare the scores record by record."""
    forms: list[tuple[str, str, Any]] = [(name, options.target, name) for name in ("int8", "int4")]
    forms = [("bfloat16", options.target, None), *forms]
    if options.file is not None:
        forms += [("file, dequantised", options.file, "none"), ("file, as it is", options.file, None)]
    data = with_shots(TASKS["sql"], options.shots)
    records = list(islice(data.records(), options.prompts))
    scores: dict[tuple[str, int], list[float]] = {}
    for name, target, quantize in forms:
        spec = ModelSpec(target, device="cpu", dtype="bfloat16", quantize=quantize)
        model, codec, _ = load_model(Checkpoint.open(spec))
        prompts_ids = [tuple(codec.encode_chat(record.meta["messages"])) for record in records]
        for beams in (1, 4):
            engine = Engine(model, None, codec, MethodConfig(rule="search", num_beams=beams, depth=0), batch_size=8)
            sampling = SamplingConfig(max_new_tokens=options.max_new_tokens)
            requests = [Request(prompt_ids=ids, sampling=sampling) for ids in prompts_ids]
            answers: list[str] = []
            for number, result in enumerate(engine.run(requests)):
                if result.error is not None:
                    raise result.error
                answers.append(result.hypotheses[0].text)
                if number % 40 == 39:
                    print(f"{name}, {beams} beams: {number + 1} records", flush=True)
            scored = zip(records, answers, strict=True)
            scores[name, beams] = [data.score(record, text)[EXECUTION] for record, text in scored]
        del model, engine
        publish(
            options.name,
            [{"form": form, "num_beams": beams, "scores": row} for (form, beams), row in scores.items()],
            "SQL by execution, by form of the weights",
            f"{Path(options.target).name}, {len(records)} records of the task sql behind {options.shots} solved ones, "
            f"{options.max_new_tokens} new tokens at most, beam search without a draft.",
            sql_table(scores),
        )


def sql_table(scores: dict[tuple[str, int], list[float]]) -> str:
    """Accuracy of each form, and records that it answers better and worse than its baseline."""
    rows = []
    for (name, beams), row in scores.items():
        baseline = "file, dequantised" if name == "file, as it is" else "bfloat16"
        share = wilson(round(sum(row)), len(row))
        accuracy = f"{share.value:.1%} ({share.low:.1%} to {share.high:.1%})"
        compared = "-"
        if name != baseline:
            (test,) = paired_tests([(baseline, row, scores[baseline, beams])])
            compared = f"{test.better} / {test.worse} ({test.p:.2f}), by {baseline}"
        rows.append({"weights": name, "beams": f"{beams}", "accuracy": accuracy, "better / worse (p)": compared})
    return markdown_table(rows)


Answering = Callable[[list[int]], tuple[int, ...]]


def ours(model: Any, codec: Any, sampling: SamplingConfig, num_beams: int) -> Answering:
    """Our beam search without a draft."""
    method = MethodConfig(rule="search", num_beams=num_beams, depth=0)
    engine = Engine(model, None, codec, method, batch_size=1)

    def answer(prompt: list[int]) -> tuple[int, ...]:
        (result,) = engine.run([Request(prompt_ids=tuple(prompt), sampling=sampling)])
        if result.error is not None:
            raise result.error
        return tuple(result.hypotheses[0].token_ids)

    return answer


def answering(options: argparse.Namespace) -> tuple[dict[str, Answering], Any]:
    """What answers a prompt, by name, and the codec."""
    sampling, beams = SamplingConfig(max_new_tokens=options.max_new_tokens), options.num_beams
    kind = "beam-search" if beams > 1 else "greedy"
    plain, codec, _ = load_model(Checkpoint.open(ModelSpec(options.target, device="cpu", dtype="bfloat16")))
    answers = {"bfloat16": ours(plain, codec, sampling, beams)}
    for quantize in ("int8", "int4"):
        spec = ModelSpec(options.target, device="cpu", dtype="bfloat16", quantize=quantize)
        answers[quantize] = ours(load_model(Checkpoint.open(spec)).model, codec, sampling, beams)
    peers: dict[str, Any] = {}
    if options.transformers:
        config = PeerConfig(kind, beams)
        peers["transformers bfloat16"] = TransformersPeer(config, plain, None, codec, sampling, 1)
    if options.ctranslate2:
        converted, folder = CTranslateConfig(kind, beams, "int8"), Path(resolve(options.target).path)
        peers["CTranslate2 int8"] = CTranslatePeer(converted, folder, plain, codec, sampling, 1)
    for name, peer in peers.items():
        answers[name] = lambda prompt, peer=peer: next(iter(peer.run([prompt], 0))).token_ids
    return answers, codec


def decode(options: argparse.Namespace) -> None:
    """Every prompt by all of them in turn."""
    answers, codec = answering(options)
    folder, began, runs = results_folder(options.name), time.monotonic(), list[dict[str, Any]]()
    for number, text in enumerate(islice(prompts(0), options.prompts + 1)):
        prompt = codec.encode_chat([{"role": "user", "content": text}])
        texts = {}
        for name, answer in answers.items():
            start = time.perf_counter()
            texts[name] = answer(prompt)
            if number:  # the first prompt is a warm-up
                seconds = time.perf_counter() - start
                same = texts[name] == texts["bfloat16"]
                runs.append(
                    {"prompt": number, "method": name, "seconds": seconds, "tokens": len(texts[name]), "same": same}
                )
        if number:
            table = decode_table(runs, list(answers))
            about = (
                f"{Path(options.target).name}, W = {options.num_beams}, one chat prompt at a time, {number} prompts, "
            )
            about += f"{options.max_new_tokens} new tokens at most, {torch.get_num_threads()} threads, no draft"
            write_results(folder, runs, f"# int8 and int4 beside bfloat16\n\n{about}.\n\n{table}")
            print(f"{number} of {options.prompts} prompts", flush=True)
        if options.seconds is not None and time.monotonic() - began > options.seconds:
            break
    if runs:
        print(table)


def decode_table(runs: list[dict[str, Any]], names: list[str]) -> str:
    """tokens/s over all prompts, and the medians of ratios over the prompts."""
    rows = []
    for name in names:
        some = [run for run in runs if run["method"] == name]
        rates = [run["tokens"] / run["seconds"] for run in some]
        row = {"": name, "tokens/s": f"{sum(run['tokens'] for run in some) / sum(run['seconds'] for run in some):.2f}"}
        for other in names:
            against = [run["tokens"] / run["seconds"] for run in runs if run["method"] == other]
            row[f"x {other}"] = f"{statistics.median(a / b for a, b in zip(rates, against, strict=True)):.2f}"
        row["texts as in bfloat16"] = f"{sum(run['same'] for run in some)} of {len(some)}"
        rows.append(row)
    return markdown_table(rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("error", "decode", "sql"))
    parser.add_argument("--target", required=True)
    parser.add_argument("--tokens", type=int, default=250, help="of each text")
    parser.add_argument("--file", help="of sql: a quantised file of the same model")
    parser.add_argument("--shots", type=int, default=1, help="of sql: solved records in front of every prompt")
    parser.add_argument("--prompts", type=int, default=8, help="or records of sql")
    parser.add_argument("--max-new-tokens", type=int, default=64)
    parser.add_argument("--num-beams", type=int, default=4, help="of decode, as all that follow")
    parser.add_argument("--transformers", action="store_true", help="compare with it: a second copy of the weights")
    parser.add_argument("--ctranslate2", action="store_true", help="compare with its int8; it must be installed")
    parser.add_argument("--seconds", type=float, help="ends after the prompt that is under way")
    parser.add_argument("--name", help="of the folder of results; quantize-decode, quantize-sql")
    options = parser.parse_args()
    options.name = options.name or f"quantize-{options.what}"
    if options.what == "error":
        error(options.target, options.tokens)
    elif options.what == "sql":
        sql(options)
    else:
        decode(options)


if __name__ == "__main__":
    main()
