"""Every option, declared once, in groups that commands share. None means not given: defaults are the library's."""

from __future__ import annotations

import dataclasses
import inspect
import typing
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import typer

from dsbd_cli.config import (
    BUILTIN_DRAFT,
    BUILTIN_TARGET,
    DEFAULT_BATCH_SIZE,
    DTYPES,
    RULES,
    MethodConfig,
    RuleName,
    SamplingConfig,
    WarpScope,
    WidthName,
)
from dsbd_cli.records import RowReader

__all__ = [
    "DeviceOptions",
    "FileOptions",
    "MethodOptions",
    "PairOptions",
    "SamplingOptions",
    "TalkOptions",
    "grouped",
]

FILES, MODELS, METHOD = "Input and output", "Models", "Method"
SAMPLING, ENDING, DEVICES, TALK = "Sampling", "Ending and ranking", "Devices", "Messages"

DtypeName = Literal["auto", "float32", "bfloat16", "float16"]
_METHOD, _SAMPLING = MethodConfig(), SamplingConfig()


def _option(panel: str, *names: str, text: str, metavar: str | None = None, default: object = None) -> object:
    """A declaration; `default` is only shown, because the library fills it in."""
    shown = text if default is None else f"{text} (default: {default})"
    return typer.Option(*names, help=shown, rich_help_panel=panel, show_default=False, metavar=metavar)


def _flag(panel: str, *names: str, text: str) -> object:
    return typer.Option(*names, help=text, rich_help_panel=panel, show_default=False, metavar="")


@dataclass(frozen=True)
class FileOptions:
    """Where lines come from and go to."""

    input: Annotated[
        Path | None,
        _option(FILES, "--input", "-i", text="JSONL file to read; - is standard input", default="-", metavar="FILE"),
    ] = None
    output: Annotated[
        Path | None,
        _option(FILES, "--output", "-o", text="file to write; - is standard output", default="-", metavar="FILE"),
    ] = None
    overwrite: Annotated[bool, _flag(FILES, "--overwrite", text="replace the --output and --stats files")] = False
    stats: Annotated[
        Path | None, _option(FILES, "--stats", text="write one line per iteration to this file", metavar="FILE")
    ] = None


@dataclass(frozen=True)
class PairOptions:
    """The two models."""

    target: Annotated[
        str | None,
        _option(MODELS, "--target", text="alias, folder or hub id", default=BUILTIN_TARGET, metavar="MODEL"),
    ] = None
    draft: Annotated[
        str | None,
        _option(
            MODELS, "--draft", text="alias, folder or hub id; none: no draft", default=BUILTIN_DRAFT, metavar="MODEL"
        ),
    ] = None


@dataclass(frozen=True)
class MethodOptions:
    """How beams are drafted and verified."""

    num_beams: Annotated[
        int | None,
        _option(METHOD, "--num-beams", text="W, live beams at most", default=_METHOD.num_beams, metavar="W"),
    ] = None
    drafts_per_layer: Annotated[
        int | None,
        _option(
            METHOD,
            "--drafts-per-layer",
            text="K, drafted nodes per layer",
            default=f"{_METHOD.drafts_per_layer}, or 2W if that is more",
            metavar="K",
        ),
    ] = None
    depth: Annotated[
        int | None,
        _option(METHOD, "--depth", text="D, drafted layers; 0: no draft", default=_METHOD.depth, metavar="D"),
    ] = None
    rule: Annotated[
        RuleName | None,
        _option(METHOD, "--rule", text=f"verification: {', '.join(RULES)}", default=_METHOD.rule, metavar="RULE"),
    ] = None
    width: Annotated[
        WidthName | None,
        _option(
            METHOD,
            "--width",
            text="live beams a layer must yield: fixed (W), or threshold (as many as are likely)",
            default="fixed; threshold for rejection and with-replacement",
            metavar="POLICY",
        ),
    ] = None
    width_threshold: Annotated[
        float | None,
        _option(
            METHOD,
            "--width-threshold",
            text="wanted chance that a layer yields its width",
            default=_METHOD.width_threshold,
            metavar="T",
        ),
    ] = None
    min_width: Annotated[
        int | None,
        _option(METHOD, "--min-width", text="least width of a threshold layer", default=_METHOD.min_width, metavar="W"),
    ] = None
    warp_scope: Annotated[
        WarpScope | None,
        _option(
            METHOD,
            "--warp-scope",
            text="warp the joint law of the beams (pool), or each beam's row (beam)",
            default=_METHOD.warp_scope,
            metavar="SCOPE",
        ),
    ] = None
    memory_saving: Annotated[
        bool, _flag(METHOD, "--memory-saving", text="keep only the best beam between iterations")
    ] = False


@dataclass(frozen=True)
class SamplingOptions:
    """What each row asks for, unless the row says otherwise."""

    temperature: Annotated[
        float | None,
        _option(SAMPLING, "--temperature", text="above 0", default=_SAMPLING.temperature, metavar="X"),
    ] = None
    top_k: Annotated[
        int | None,
        _option(SAMPLING, "--top-k", text="keep the N likeliest; 0: all", default=_SAMPLING.top_k, metavar="N"),
    ] = None
    top_p: Annotated[
        float | None,
        _option(SAMPLING, "--top-p", text="keep the likeliest of this mass", default=_SAMPLING.top_p, metavar="X"),
    ] = None
    min_p: Annotated[
        float | None,
        _option(SAMPLING, "--min-p", text="drop below X times the likeliest", default=_SAMPLING.min_p, metavar="X"),
    ] = None
    seed: Annotated[
        int | None,
        _option(
            SAMPLING,
            "--seed",
            text="a row's seed comes from this one and its id",
            default=RowReader().seed,
            metavar="N",
        ),
    ] = None
    max_new_tokens: Annotated[
        int | None,
        _option(
            ENDING, "--max-new-tokens", text="generated tokens at most", default=_SAMPLING.max_new_tokens, metavar="N"
        ),
    ] = None
    stop: Annotated[
        list[str] | None,
        _option(ENDING, "--stop", text="end a text before this string; may be repeated", metavar="TEXT"),
    ] = None
    length_penalty: Annotated[
        float | None,
        _option(
            ENDING,
            "--length-penalty",
            text="score = logprob / num_tokens ** X",
            default=_SAMPLING.length_penalty,
            metavar="X",
        ),
    ] = None
    early_stopping: Annotated[
        bool, _flag(ENDING, "--early-stopping", text="end a row as soon as W hypotheses are finished")
    ] = False
    n_best: Annotated[
        int | None,
        _option(ENDING, "--n-best", text="hypotheses to report per row", default=_SAMPLING.n_best, metavar="N"),
    ] = None


@dataclass(frozen=True)
class DeviceOptions:
    """How the models are loaded and run."""

    batch_size: Annotated[
        int | None,
        _option(DEVICES, "--batch-size", text="rows decoded together", default=DEFAULT_BATCH_SIZE, metavar="N"),
    ] = None
    dtype: Annotated[
        DtypeName | None,
        _option(DEVICES, "--dtype", text=f"of both models: {', '.join(DTYPES)}", default="auto", metavar="DTYPE"),
    ] = None
    device: Annotated[
        str | None, _option(DEVICES, "--device", text="cpu, cuda, cuda:1, ...", default="auto", metavar="DEVICE")
    ] = None
    device_map: Annotated[
        str | None, _option(DEVICES, "--device-map", text="spread the target over devices, as in auto", metavar="MAP")
    ] = None
    draft_device: Annotated[
        str | None,
        _option(DEVICES, "--draft-device", text="of the draft", default="the target's", metavar="DEVICE"),
    ] = None
    trust_remote_code: Annotated[
        bool, _flag(DEVICES, "--trust-remote-code", text="run code that a checkpoint brings with it")
    ] = False
    allow_pickle: Annotated[
        bool, _flag(DEVICES, "--allow-pickle", text="load .bin weights where there are no safetensors")
    ] = False


@dataclass(frozen=True)
class TalkOptions:
    """What is said on standard error."""

    quiet: Annotated[
        bool, _flag(TALK, "--quiet", "-q", text="nothing on standard error but errors that end the run")
    ] = False
    verbose: Annotated[bool, _flag(TALK, "--verbose", "-v", text="settings, failed rows and a summary")] = False
    debug: Annotated[bool, _flag(TALK, "--debug", text="show the traceback of an error; also DSBD_DEBUG=1")] = False


def grouped(function: Callable[..., None]) -> Callable[..., None]:
    """Make `f(files: FileOptions, pair: PairOptions, ...)` a command whose options are the fields of its groups."""
    groups = {name: kind for name, kind in typing.get_type_hints(function).items() if name != "return"}
    parameters = [
        inspect.Parameter(item.name, inspect.Parameter.KEYWORD_ONLY, default=item.default, annotation=hints[item.name])
        for kind in groups.values()
        for hints in [typing.get_type_hints(kind, include_extras=True)]
        for item in dataclasses.fields(kind)
    ]

    def command(**given: object) -> None:
        function(
            **{
                name: kind(**{item.name: given[item.name] for item in dataclasses.fields(kind)})
                for name, kind in groups.items()
            }
        )

    command.__name__, command.__doc__ = function.__name__, function.__doc__
    command.__annotations__ = {item.name: item.annotation for item in parameters}
    command.__dict__["__signature__"] = inspect.Signature(parameters)
    return command
