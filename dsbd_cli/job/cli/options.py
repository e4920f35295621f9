"""Every option, declared once, in groups that commands share. None means not given: defaults are the library's."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from dsbd_cli.config import (
    BUILTIN_DRAFT,
    BUILTIN_TARGET,
    DEFAULT_BATCH_SIZE,
    DEFAULT_DEPTH,
    DTYPES,
    ON_TOO_LONG,
    MethodConfig,
    OnTooLong,
    SamplingConfig,
    WarpScope,
)
from dsbd_cli.job.cli.declare import flag, option, switch
from dsbd_cli.job.records import RowReader
from dsbd_cli.variants import DRAFTERS, FORMATS, FUSION, WIDTHS, help_lines, sampling_rules

__all__ = [
    "AnswerOptions",
    "DeviceOptions",
    "DrawOptions",
    "FileOptions",
    "JobOptions",
    "MethodOptions",
    "PairOptions",
    "RowOptions",
    "SamplingOptions",
]

MAIN = "Main options"  # what most runs set; they stand first on the page
FILES, ROWS, METHOD = "Input and output", "Rows that fail", "How drafts are made and verified"
SAMPLING, ENDING, DEVICES = "Sampling", "Ending and ranking", "Devices and loading"
SOURCES = "Encoder-decoder targets"
JOB = "Options from a file"

InputFormat = Literal["auto", "strict", "text"]
Existing = Literal["error", "overwrite", "resume", "retry"]
Decode = Literal["search", "sample"]
DtypeName = Literal["auto", "float32", "bfloat16", "float16"]
NumericsName = Literal["invariant", "fast"]
Input = Annotated[
    Path | None,
    option(
        MAIN,
        "--input",
        "-i",
        text="file to read, compressed if it ends in .gz or .zst; - is standard input",
        default="-",
        metavar="FILE",
    ),
]
Output = Annotated[
    Path | None,
    option(
        MAIN,
        "--output",
        "-o",
        text="file to write, compressed if it ends in .gz or .zst; - is standard output",
        default="-",
        metavar="FILE",
    ),
]
_METHOD, _SAMPLING = MethodConfig(), SamplingConfig()


@dataclass(frozen=True)
class FileOptions:
    """Where lines come from and go to."""

    input: Input = None
    input_format: Annotated[
        InputFormat | None,
        option(
            FILES,
            "--input-format",
            text="auto: JSON lines, flat or of the OpenAI batch form, told apart line by line; "
            "strict: the same, and a line with an unknown field fails; text: every line is a prompt",
            default="auto",
            metavar="FORM",
        ),
    ] = None
    output: Output = None
    output_format: Annotated[
        str | None,
        option(
            FILES,
            "--output-format",
            text="; ".join(f"{one.name}: {one.text}" for one in FORMATS.values()),
            default="native",
            metavar="FORM",
        ),
    ] = None
    existing: Annotated[
        Existing | None,
        option(
            MAIN,
            "--existing",
            text="where --output exists: error; overwrite (also --stats and --summary); resume: answer only the rows "
            "that it does not hold; retry: resume, and answer its failed rows again",
            default="error",
            metavar="WHAT",
        ),
    ] = None
    stats: Annotated[
        Path | None, option(FILES, "--stats", text="write one line per iteration to this file", metavar="FILE")
    ] = None
    summary: Annotated[
        Path | None,
        option(FILES, "--summary", text="write counts, times, versions and settings as JSON here", metavar="FILE"),
    ] = None


@dataclass(frozen=True)
class RowOptions:
    """What happens to rows that cannot be answered as they stand."""

    on_too_long: Annotated[
        OnTooLong | None,
        option(
            ROWS,
            "--on-too-long",
            text=f"a prompt that does not fit the models: {' or '.join(ON_TOO_LONG)}",
            default="error",
            metavar="WHAT",
        ),
    ] = None
    max_errors: Annotated[
        int | None,
        option(ROWS, "--max-errors", text="end the run with exit code 1 when N rows have failed", metavar="N"),
    ] = None


@dataclass(frozen=True)
class JobOptions:
    """Options from a file."""

    config: Annotated[
        Path | None,
        option(JOB, "--config", text="TOML file with any of these options by their long names", metavar="FILE"),
    ] = None
    print_config: Annotated[
        bool | None, switch(JOB, "--print-config", text="print the options as such a file, and answer nothing")
    ] = None


@dataclass(frozen=True)
class PairOptions:
    """The two models."""

    target: Annotated[
        str | None,
        option(MAIN, "--target", text="alias, folder or hub id", default=BUILTIN_TARGET, metavar="MODEL"),
    ] = None
    draft: Annotated[
        str | None,
        option(MAIN, "--draft", text="alias, folder or hub id; none: no draft", default=BUILTIN_DRAFT, metavar="MODEL"),
    ] = None


@dataclass(frozen=True)
class MethodOptions:
    """How beams are drafted and verified."""

    num_beams: Annotated[
        int | None,
        option(MAIN, "--num-beams", text="W, live beams at most", default=_METHOD.num_beams, metavar="W"),
    ] = None
    drafts_per_layer: Annotated[
        int | None,
        option(
            METHOD,
            "--drafts-per-layer",
            text="K, drafted nodes per layer",
            default=f"{_METHOD.drafts_per_layer}, or 2W if that is more (W + 32 above W = 32)",
            metavar="K",
        ),
    ] = None
    depth: Annotated[
        str | None,
        option(
            METHOD,
            "--depth",
            text="D, drafted layers; auto: what measures fastest, with K as upper bound",
            default=f"auto where the text does not depend on it (--decode search or --verify coupled, width fixed, "
            f"no --memory-saving), else {DEFAULT_DEPTH}",
            metavar="D",
        ),
    ] = None
    decode: Annotated[
        Decode | None,
        option(MAIN, "--decode", text="search: beam search; sample: beam sampling", default="sample", metavar="HOW"),
    ] = None
    verify: Annotated[
        str | None,
        option(
            METHOD,
            "--verify",
            text=f"how drafts are checked when sampling (default: {_METHOD.rule}):"
            f"{help_lines(sampling_rules().values())}",
            metavar="RULE",
        ),
    ] = None
    drafter: Annotated[
        str | None,
        option(
            METHOD,
            "--drafter",
            text=f"who proposes the drafts (default: {_METHOD.drafter}):{help_lines((*DRAFTERS.values(), FUSION))}",
            metavar="NAME",
        ),
    ] = None
    width: Annotated[
        str | None,
        option(
            METHOD,
            "--width",
            text="live beams that a layer must yield (default: threshold for --verify rejection and with-replacement "
            f"where drafter beam stands first, else fixed):{help_lines(WIDTHS.values())}",
            metavar="POLICY",
        ),
    ] = None
    warp_scope: Annotated[
        WarpScope | None,
        option(
            METHOD,
            "--warp-scope",
            text="warp the joint law of the beams (pool), or each beam's row (beam)",
            default=_METHOD.warp_scope,
            metavar="SCOPE",
        ),
    ] = None
    memory_saving: Annotated[
        bool | None, flag(METHOD, "--memory-saving", text="keep only the best beam between iterations")
    ] = None


@dataclass(frozen=True)
class DrawOptions:
    """How one text is drawn, ended and ranked."""

    temperature: Annotated[
        float | None,
        option(MAIN, "--temperature", text="0: the likeliest, no noise", default=_SAMPLING.temperature, metavar="X"),
    ] = None
    top_k: Annotated[
        int | None,
        option(SAMPLING, "--top-k", text="keep the N likeliest; 0: all", default=_SAMPLING.top_k, metavar="N"),
    ] = None
    top_p: Annotated[
        float | None,
        option(SAMPLING, "--top-p", text="keep the likeliest of this mass", default=_SAMPLING.top_p, metavar="X"),
    ] = None
    min_p: Annotated[
        float | None,
        option(SAMPLING, "--min-p", text="drop below X times the likeliest", default=_SAMPLING.min_p, metavar="X"),
    ] = None
    seed: Annotated[
        int | None,
        option(
            MAIN,
            "--seed",
            text="a row's seed comes from this one and its id",
            default=RowReader().seed,
            metavar="N",
        ),
    ] = None
    max_new_tokens: Annotated[
        int | None,
        option(
            MAIN, "--max-new-tokens", text="generated tokens at most", default=_SAMPLING.max_new_tokens, metavar="N"
        ),
    ] = None
    stop: Annotated[
        list[str] | None,
        option(ENDING, "--stop", text="end a text before this string; may be repeated", metavar="TEXT"),
    ] = None
    length_penalty: Annotated[
        float | None,
        option(
            ENDING,
            "--length-penalty",
            text="score = logprob / num_tokens ** X",
            default=_SAMPLING.length_penalty,
            metavar="X",
        ),
    ] = None
    early_stopping: Annotated[
        bool | None, flag(ENDING, "--early-stopping", text="end a row as soon as W hypotheses are finished")
    ] = None
    source_lang: Annotated[
        str | None,
        option(SOURCES, "--source-lang", text="language of the rows, as the tokenizer names it", metavar="NAME"),
    ] = None
    target_lang: Annotated[
        str | None, option(SOURCES, "--target-lang", text="language to translate into", metavar="NAME")
    ] = None
    prefix: Annotated[
        str | None, option(SOURCES, "--prefix", text="text that every answer begins with", metavar="TEXT")
    ] = None
    token_rules: Annotated[
        str | None,
        option(
            ENDING,
            "--token-rules",
            text="checkpoint: as its generation settings ask; none; and NAME=VALUE,... beside "
            "(no_repeat_ngram_size=3, forced_bos_token_id=none)",
            default="checkpoint with an encoder-decoder target, else none",
            metavar="RULES",
        ),
    ] = None


@dataclass(frozen=True)
class SamplingOptions(DrawOptions):
    """What each row asks for, unless the row says otherwise."""

    n_best: Annotated[
        int | None,
        option(ENDING, "--n-best", text="hypotheses to report per row", default=_SAMPLING.n_best, metavar="N"),
    ] = None
    token_logprobs: Annotated[
        bool | None,
        flag(ENDING, "--token-logprobs", text="report the id and log-probability of every token of every beam"),
    ] = None


@dataclass(frozen=True)
class AnswerOptions:
    """What an answer may be."""

    allow: Annotated[
        str | None,
        option(
            MAIN,
            "--allow",
            text="the only answers that may come out: FILE.json, a JSON schema; FILE.lark, a Lark grammar; "
            "regex:PATTERN, in Rust's syntax; any other file, a list: one answer per line, or in a .jsonl objects with "
            "text or token_ids, and id and catalogue if wanted",
            metavar="WHAT",
        ),
    ] = None


@dataclass(frozen=True)
class DeviceOptions:
    """How the models are loaded and run."""

    batch_size: Annotated[
        str | None,
        option(
            DEVICES,
            "--batch-size",
            text="rows decoded together; auto: what fits in memory",
            default=DEFAULT_BATCH_SIZE,
            metavar="N",
        ),
    ] = None
    dtype: Annotated[
        DtypeName | None,
        option(DEVICES, "--dtype", text=f"of both models: {', '.join(DTYPES)}", default="auto", metavar="DTYPE"),
    ] = None
    numerics: Annotated[
        NumericsName | None,
        option(
            DEVICES,
            "--numerics",
            text="invariant: no text depends on the draft or the batch, to the last bit; fast: without that work",
            default="invariant",
            metavar="HOW",
        ),
    ] = None
    device: Annotated[
        str | None,
        option(
            DEVICES,
            "--device",
            text="cpu, cuda, cuda:1, ...; with a comma the target's and the draft's; or how the target is spread over "
            "several: balanced, sequential, or a device map as JSON",
            default="auto",
            metavar="DEVICE",
        ),
    ] = None
    tensor_parallel: Annotated[
        int | None,
        option(
            DEVICES,
            "--tensor-parallel",
            text="processes that share every layer of the target, each on a GPU of its own where there are any; for "
            "models that do not fit one",
            default=1,
            metavar="T",
        ),
    ] = None
    cuda_graphs: Annotated[
        bool | None,
        flag(
            DEVICES, "--cuda-graphs", text="capture iterations on the GPU (default: where both models lie on one GPU)"
        ),
    ] = None
    trust_remote_code: Annotated[
        bool | None, flag(DEVICES, "--trust-remote-code", text="run code that a checkpoint brings with it")
    ] = None
