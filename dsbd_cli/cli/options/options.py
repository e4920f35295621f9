"""Declarations of every option, in groups that commands share. None means not given: the library has the defaults."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from dsbd_cli.cli.options.declare import flag, option, switch
from dsbd_cli.cli.options.precedence import read_job
from dsbd_cli.config.method import DEFAULT_BATCH_SIZE, DEFAULT_DEPTH, MethodConfig, WarpScope
from dsbd_cli.config.model import (
    BUILTIN_DRAFT,
    BUILTIN_TARGET,
    DTYPES,
    ON_TOO_LONG,
    Dtype,
    Numerics,
    OnTooLong,
    Quantize,
    TokenizerOf,
)
from dsbd_cli.config.sampling import ReasoningMode, SamplingConfig
from dsbd_cli.config.spelling import help_lines
from dsbd_cli.config.variants import DRAFTERS, FORMATS, FUSION, WIDTHS, sampling_rules
from dsbd_cli.io.records.reader import RowReader
from dsbd_cli.threads import MOST_THREADS

MAIN = "Main options"  # what most runs set; they stand first on the page
FILES, ROWS, METHOD = "Input and output", "Rows that fail", "How drafts are made and verified"
SAMPLING, ENDING, DEVICES = "Sampling", "Ending and ranking", "Devices and loading"
SOURCES = "Encoder-decoder targets"
CHATS = "Chats and prompts"
JOB = "Options from a file"
STANDARD = Path("-")
CHAT = "put each prompt through the target's chat template, as one message of a user; --no-chat: as it stands"
COLUMNS = (
    "of an input table: FIELD=COLUMN,... takes fields from columns of other names (prompt=question,id=key), FIELD "
    "alone from the column of its name, and FIELD= from none"
)
MAX_ERRORS = "end the run with exit code 1 when N rows have failed"

InputFormat = Literal["auto", "strict", "text"]
Existing = Literal["error", "overwrite", "resume", "retry"]
Decode = Literal["search", "sample"]
Trusted = Literal["target", "draft", "both"]
_METHOD, _SAMPLING = MethodConfig(), SamplingConfig()


@dataclass(frozen=True)
class StreamOptions:
    """Options of what is read and what is written."""

    input: Path | None = option(
        MAIN, "file to read, compressed if it ends in .gz or .zst; - is standard input", "-i", default="-"
    )
    output: Path | None = option(
        MAIN, "file to write, compressed if it ends in .gz or .zst; - is standard output", "-o", default="-"
    )


@dataclass(frozen=True)
class RowFileOptions:
    """Options of how a file of rows is read: the columns of a table, and where the files are that rows name."""

    columns: str | None = option(FILES, COLUMNS, metavar="NAMES")
    files_under: Path | None = option(
        FILES,
        "the only folder, with those inside, that rows may name files in (audio, image); their paths begin there",
        default="the folder of the file with the rows",
        metavar="DIR",
    )


@dataclass(frozen=True)
class FileOptions(RowFileOptions, StreamOptions):
    """Options of where lines come from and go to."""

    input_format: InputFormat | None = option(
        FILES,
        "auto: JSON lines, flat or of the OpenAI batch form, told apart line by line; a table where --input ends in "
        ".csv, .tsv or .parquet; strict: the same, and a row with an unknown field fails; text: every line is a prompt",
        default="auto",
        metavar="FORM",
    )
    chat: bool | None = flag(MAIN, CHAT)
    output_format: str | None = option(
        FILES,
        "; ".join(f"{variant.name}: {variant.text}" for variant in FORMATS.values()),
        default="native",
        metavar="FORM",
    )
    existing: Existing | None = option(
        MAIN,
        "where --output exists: error; overwrite (also --set stats and --set summary); resume: answer only the rows "
        "that it does not hold; retry: resume, and answer its failed rows again",
        default="error",
        metavar="WHAT",
    )
    stats: Path | None = option(FILES, "write one line per iteration to this file")
    summary: Path | None = option(FILES, "write counts, times, versions and settings as JSON here")


@dataclass(frozen=True)
class RowOptions:
    """Options of rows that cannot be answered as they stand."""

    on_too_long: OnTooLong | None = option(
        ROWS, f"a prompt that does not fit the models: {' or '.join(ON_TOO_LONG)}", default="error", metavar="WHAT"
    )
    max_errors: int | None = option(ROWS, MAX_ERRORS, least=1)
    require_valid: bool | None = switch(
        ROWS, "a row whose best text does not match its grammar is an error; without, it is counted"
    )
    schema: Literal["check", "strict"] | None = option(
        ROWS,
        "what a JSON schema asks and a grammar cannot enforce: check: whole texts are checked, and `valid` tells; "
        "strict: an error",
        default="check",
        metavar="HOW",
    )


@dataclass(frozen=True)
class JobOptions:
    """Options of a file that holds options."""

    config: Path | None = option(
        JOB, "TOML file with any of these options and settings by their long names", callback=read_job
    )
    print_config: bool | None = switch(JOB, "print the options as such a file, and answer nothing")
    dry_run: bool | None = switch(
        MAIN,
        "read the whole input with the tokenizer and no model, and print what a run would do: rows to answer, bad rows "
        "with reasons, tokens; write nothing; with --set log=json print it as JSON",
    )


@dataclass(frozen=True)
class TargetOptions:
    """Options of the target."""

    target: str | None = option(
        MAIN, "alias, folder or hub id; @REVISION and +ADAPTER may follow", default=BUILTIN_TARGET, metavar="MODEL"
    )


@dataclass(frozen=True)
class PairOptions(TargetOptions):
    """Options of the two models."""

    draft: str | None = option(
        MAIN,
        "alias, folder or hub id of a model or a draft head; mtp: the target's own MTP layer; none: no draft",
        default=f"{BUILTIN_DRAFT} with the built-in target, else none",
        metavar="MODEL",
    )


@dataclass(frozen=True)
class DecodeOptions:
    """Options of how the target is decoded."""

    num_beams: int | None = option(MAIN, "W, live beams at most", default=_METHOD.num_beams, metavar="W")
    decode: Decode | None = option(MAIN, "search: beam search; sample: beam sampling", default="sample", metavar="HOW")


@dataclass(frozen=True)
class MethodOptions(DecodeOptions):
    """Options of how beams are drafted and verified."""

    drafts_per_layer: int | None = option(
        METHOD,
        "K, drafted nodes per layer",
        default=f"{_METHOD.drafts_per_layer}, or 2W if that is more (W + 32 above W = 32)",
        metavar="K",
    )
    depth: str | None = option(
        METHOD,
        "D, drafted layers; auto: what measures fastest, with K as upper bound",
        default=f"auto where the text does not depend on it (--decode search or --verify coupled, width fixed, "
        f"no --set memory-saving), else {DEFAULT_DEPTH}",
        metavar="D",
    )
    verify: str | None = option(
        METHOD,
        f"how drafts are checked when sampling (default: {_METHOD.rule}):{help_lines(sampling_rules().values())}",
        metavar="RULE",
    )
    drafter: str | None = option(
        METHOD,
        f"who proposes the drafts (default: {_METHOD.drafter}):{help_lines((*DRAFTERS.values(), FUSION))}",
        metavar="NAME",
    )
    width: str | None = option(
        METHOD,
        "live beams that a layer must yield (default: threshold for --verify rejection and with-replacement "
        f"where drafter beam stands first, else fixed):{help_lines(WIDTHS.values())}",
        metavar="POLICY",
    )
    warp_scope: WarpScope | None = option(
        METHOD,
        "warp the joint distribution of the beams (pool), or each beam's row (beam)",
        default=_METHOD.warp_scope,
        metavar="SCOPE",
    )
    memory_saving: bool | None = flag(METHOD, "keep only the best beam between iterations")


@dataclass(frozen=True)
class DrawOptions:
    """Options of how one text is drawn, ended and ranked."""

    temperature: float | None = option(MAIN, "0: the likeliest, no noise", default=_SAMPLING.temperature)
    top_k: int | None = option(SAMPLING, "keep the N likeliest; 0: all", default=_SAMPLING.top_k)
    top_p: float | None = option(SAMPLING, "keep the likeliest of this mass", default=_SAMPLING.top_p)
    min_p: float | None = option(SAMPLING, "drop below X times the likeliest", default=_SAMPLING.min_p)
    seed: int | None = option(MAIN, "a row's seed comes from this one and its id", default=RowReader().seed)
    max_new_tokens: int | None = option(MAIN, "generated tokens at most", default=_SAMPLING.max_new_tokens)
    stop: list[str] | None = option(
        ENDING, "end a text before this string; may be repeated, up to 16 strings of 256 bytes in all", metavar="TEXT"
    )
    length_penalty: float | None = option(ENDING, "score = logprob / num_tokens ** X", default=_SAMPLING.length_penalty)
    early_stopping: bool | None = flag(ENDING, "end a row as soon as W hypotheses are finished")
    source_lang: str | None = option(SOURCES, "language of the rows, as the tokenizer names it", metavar="NAME")
    target_lang: str | None = option(SOURCES, "language to translate into", metavar="NAME")
    prefix: str | None = option(CHATS, "text that every answer begins with", metavar="TEXT")
    token_rules: str | None = option(
        ENDING,
        "checkpoint: as its generation settings ask; none; and NAME=VALUE,... beside "
        "(no_repeat_ngram_size=3, forced_bos_token_id=none)",
        default="checkpoint with an encoder-decoder target, else none",
        metavar="RULES",
    )


@dataclass(frozen=True)
class SamplingOptions(DrawOptions):
    """Options of sampling that each row asks for, unless the row says otherwise."""

    n_best: int | None = option(ENDING, "hypotheses to report per row", default=_SAMPLING.n_best)
    reasoning: ReasoningMode | None = option(
        ENDING,
        "what a model writes between its marks of reasoning: split: a field beside the text; keep: in the text; drop: "
        "left out",
        default=_SAMPLING.reasoning,
        metavar="WHAT",
    )
    token_logprobs: bool | None = flag(ENDING, "report the id and log-probability of every token of every beam")


@dataclass(frozen=True)
class AnswerOptions:
    """Options of what an answer may be."""

    allow: str | None = option(
        MAIN,
        "the only answers that may come out: FILE.json, a JSON schema; FILE.lark, a Lark grammar; "
        "regex:PATTERN, in Rust's syntax; any other file, a list: one answer per line, or in a .jsonl or a .csv "
        "text or token_ids, and id and catalogue if wanted",
        metavar="WHAT",
    )


@dataclass(frozen=True)
class TemplateOptions:
    """Options of how conversations become text."""

    chat_template: Path | None = option(CHATS, "Jinja file in place of the model's chat template")
    chat_template_kwargs: str | None = option(
        CHATS,
        'variables of the chat template, a JSON object such as {"enable_thinking": false}; those of a row come before '
        "them",
        metavar="JSON",
    )


@dataclass(frozen=True)
class LoadOptions:
    """Options of how models are loaded, in every command that loads some."""

    dtype: Dtype | None = option(DEVICES, f"of both models: {', '.join(DTYPES)}", default="auto", metavar="DTYPE")
    device: str | None = option(
        DEVICES,
        "cpu, cuda, cuda:1, ...; with a comma the target's and the draft's; or how the target is spread over "
        "several: balanced, sequential, or a device map as JSON",
        default="auto",
        metavar="DEVICE",
    )
    trust_remote_code: Trusted | None = option(
        DEVICES, "run code that this model's checkpoint brings with it: target, draft or both", metavar="MODEL"
    )
    tokenizer: TokenizerOf | None = option(
        DEVICES,
        "base: the target's own tokenizer and chat template, where an adapter brings others",
        default="the adapter's",
        metavar="base",
    )


@dataclass(frozen=True)
class DeviceOptions(TemplateOptions, LoadOptions):
    """Options of how models are loaded and run."""

    batch_size: str | None = option(
        DEVICES, "rows decoded together; auto: what fits in memory", default=DEFAULT_BATCH_SIZE, metavar="N"
    )
    quantize: Quantize | None = option(
        DEVICES,
        "int8 or int4: the linear layers of both models in 8 or 4 bits, on the CPU; none: a quantised file is "
        "dequantised (docs/hardware.md)",
        metavar="FORMAT",
    )
    numerics: Numerics | None = option(
        DEVICES,
        "invariant: no text depends on the draft or the batch, to the last bit; fast: without that work",
        default="invariant",
        metavar="HOW",
    )
    tensor_parallel: int | None = option(
        DEVICES,
        "processes that share every layer of the target, each on a GPU of its own where there are any; for "
        "models that do not fit one",
        default=1,
        metavar="T",
    )
    threads: int | None = option(
        DEVICES,
        "processor threads of each process",
        default="OMP_NUM_THREADS, else torch's choice within the container's quota of processors",
        least=1,
        most=MOST_THREADS,
    )
    gpu: Literal["graphs,kernels", "graphs", "kernels", "plain"] | None = option(
        DEVICES,
        "what of a GPU is used: CUDA graphs of iterations; kernels in place of tensor code; plain: "
        "neither. What is named must be there",
        default="what works there",
        metavar="WHAT",
    )

    @property
    def cuda_graphs(self) -> bool | None:
        """Whether iterations must be captured as CUDA graphs; None: they are captured where that is possible."""
        return None if self.gpu is None else "graphs" in self.gpu

    @property
    def wanted_kernels(self) -> bool | None:
        """Whether kernels must run; None: they run where that is possible."""
        return None if self.gpu is None else "kernels" in self.gpu


TALK = "Messages"


@dataclass(frozen=True)
class TalkOptions:
    """Options of what is printed on standard error."""

    quiet: bool | None = flag(TALK, "nothing on standard error but errors that end the run", "-q")
    log: Literal["brief", "verbose", "json"] | None = option(
        TALK,
        "on standard error, brief: what needs attention and one line a minute; verbose: also the models that are "
        "loaded, settings, failed rows and a summary; json: the same as JSON lines",
        default="brief",
        metavar="FORM",
    )


# groups of generate, whose variables may be set for other commands in the same pipe, too
PIPED = (PairOptions, MethodOptions, SamplingOptions, DeviceOptions, RowOptions)
