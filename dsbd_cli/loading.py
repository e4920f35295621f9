"""Loading of an engine from the names of its models: the one call that joins models, codec and engine."""

from __future__ import annotations

import contextlib
import gc
import json
import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from types import NoneType
from typing import TYPE_CHECKING

from dsbd_cli.config.chat import check_template_kwargs, template_text
from dsbd_cli.config.checking import check_value, refuse, require
from dsbd_cli.config.method import DEFAULT_BATCH_SIZE, MethodConfig, check_engine_options
from dsbd_cli.config.model import BUILTIN_DRAFT, BUILTIN_TARGET, ModelSpec, OnTooLong
from dsbd_cli.config.variants import SUFFIX_CACHE
from dsbd_cli.engine.constraints.answer_files import check_answer_file
from dsbd_cli.errors import UsageError, reading, shorten
from dsbd_cli.models.chat import begin_rendering, check_template
from dsbd_cli.models.checkpoints.checkpoint import Checkpoint, open_pair
from dsbd_cli.ops.ahead import touching
from dsbd_cli.ops.processor import Processor, current
from dsbd_cli.requests import EngineInfo
from dsbd_cli.threads import MOST_THREADS, processors, sleep_sooner, wait_without_spinning

if TYPE_CHECKING:
    from dsbd_cli.engine.decoding.dry_engine import DryEngine
    from dsbd_cli.engine.decoding.engine import Engine
    from dsbd_cli.models.tokenizer import HFCodec

GPU_FILES = ("/dev/nvidiactl", "/dev/kfd", "/dev/dxg")  # of drivers: of NVIDIA, AMD and Windows

ModelRef = str | os.PathLike[str] | ModelSpec


def load(
    target: ModelRef = BUILTIN_TARGET,
    draft: ModelRef | None = "auto",
    *,
    method: MethodConfig | None = None,
    batch_size: int | None = DEFAULT_BATCH_SIZE,
    on_too_long: OnTooLong = "error",
    log_steps: bool = False,
    cuda_graphs: bool | None = None,
    kernels: bool | None = None,
    allow: str | os.PathLike[str] | None = None,
    chat_template: str | os.PathLike[str] | None = None,
    chat_template_kwargs: Mapping[str, object] | None = None,
    threads: int | None = None,
) -> Engine:
    """Load a target, and a draft where there is one, into an engine.

    Args:
        target: alias, folder or hub id; or a ModelSpec, which also holds dtype, device and the other settings of
            loading.
        draft: the same for a draft model or a draft head; or `mtp`, the MTP layer in the target's own checkpoint. A
            draft that is given by its name alone is loaded with the target's settings, but its code is not trusted.
            `auto`: the built-in draft for the built-in target, and None for any other. None: no draft model; a method
            that does not ask for one is then plain decoding.
        method: how to decode; the default is the command's.
        batch_size: requests decoded together at most; None for as many as fit in memory.
        on_too_long: a prompt that does not fit the models' positions fails (`error`), or loses tokens on its left
            (`truncate-left`).
        log_steps: keep a StepStats per iteration in each result.
        cuda_graphs: capture iterations as CUDA graphs; None: capture them if both models lie whole on one GPU.
        kernels: run iterations and the models' layers with kernels; None: on a GPU, with those that pass their checks
            there.
        allow: file with a list of the only answers that may come out, see docs/constraints.md. A grammar stands in a
            Request.
        chat_template: in place of the target's: a file (a Path), or the template's text, as in transformers.
        chat_template_kwargs: variables of the template, such as enable_thinking; those of a Request come before them.
        threads: processor threads for all that torch does in this process; None: OMP_NUM_THREADS, else torch's choice
            within the container's quota of processors.

    Raises UsageError for settings that contradict each other, before anything is loaded; ModelNotFoundError,
    UnsupportedModelError, PairError or ModelError where the checkpoints cannot be used.
    """
    check_engine_options(method, batch_size, on_too_long, log_steps, cuda_graphs, kernels)
    check_value("threads", threads, int | None)
    if threads is not None:
        require(1 <= threads <= MOST_THREADS, "threads", threads, f"between 1 and {MOST_THREADS}")
    if batch_size is not None and batch_size < 1:
        raise UsageError(f"batch_size is {batch_size}, but must be 1 or more")
    _check_place("target", target, ModelSpec)
    _check_place("draft", draft, ModelSpec, NoneType)
    _check_place("allow", allow, NoneType)
    _check_place("chat_template", chat_template, NoneType)
    if chat_template_kwargs is not None:
        check_template_kwargs(chat_template_kwargs)
    spec, draft_spec = _specs(target, draft, kernels)
    method = (method or MethodConfig()).fit_draft(None if draft_spec is None else draft_spec.source)
    if allow is not None:
        _check_list(os.fspath(allow))
    for index in method.index_files:
        with reading(f"index {index}"):
            open(index, "rb").close()
    checkpoint, draft_checkpoint = open_pair(spec, draft_spec)
    wait_without_spinning()
    sleep_sooner(checkpoint.weight_bytes)
    template = None if chat_template is None else template_text(chat_template)
    begin_rendering(*checkpoint.folders)  # it runs during the imports, and memory is touched meanwhile
    with touching(_packed_bytes(checkpoint)):
        # heavy imports only now, so that a wrong name is reported at once
        with _without_collection():
            import torch

            from dsbd_cli.engine.checks.captures import prove_captures
            from dsbd_cli.engine.constraints.catalogues import open_catalogues
            from dsbd_cli.engine.decoding.engine import Engine
            from dsbd_cli.engine.iteration.devices import iteration_ops
            from dsbd_cli.models.pair import load_pair
            from dsbd_cli.ops.select import begin_compiling, rejected_kernels

        _set_threads(threads)
        _check_indexes(method, checkpoint)
        if kernels and spec.device_map is None:  # raise before a large model is loaded
            auto = "cuda" if torch.cuda.is_available() else "cpu"
            if (auto if spec.device == "auto" else spec.device) == "cpu":
                iteration_ops(torch.device("cpu"), kernels)
        if spec.device == "cpu" or (spec.device == "auto" and not torch.cuda.is_available()):
            begin_compiling()  # while models are loaded
        with _without_collection():
            pair = load_pair(checkpoint, draft_checkpoint, bridged=draft_spec is not None and method.bridges)
    _use_template(pair.codec, spec.source, template, chat_template_kwargs)
    width, catalogue_notes = pair.target.vocab_size, list[str]()
    catalogues = {} if allow is None else open_catalogues(Path(allow), pair.codec, width, catalogue_notes.append)
    info = EngineInfo(
        target=spec.source,
        draft=None if draft_spec is None else draft_spec.source,
        dtype=pair.target_dtype,
        device=str(pair.target.device),
        draft_dtype=pair.draft_dtype,
        draft_device=str(pair.draft.device) if pair.draft is not None else None,
        draft_form=pair.draft_form,
        chat=pair.codec.has_template,
        reasoning=pair.codec.form.reasoning is not None,
        notes=(*pair.notes, *rejected_kernels(pair.target.device, kernels), *catalogue_notes),
        ops=pair.target.ops.facts,
        threads=torch.get_num_threads(),
        processor=str(current()),
    )
    engine = Engine(
        pair.target,
        pair.draft,
        pair.codec,
        method,
        batch_size=batch_size,
        info=info,
        log_steps=log_steps,
        on_too_long=on_too_long,
        cuda_graphs=cuda_graphs,
        kernels=kernels,
        catalogues=catalogues,
    )
    prove_captures(engine)
    return engine


def load_dry(
    target: ModelSpec,
    draft: ModelSpec | None,
    *,
    method: MethodConfig,
    tell: Callable[[str], None],
    on_too_long: OnTooLong = "error",
    allow: Path | None = None,
    chat_template: str | None = None,
    chat_template_kwargs: Mapping[str, object] | None = None,
) -> DryEngine:
    """Return an engine that checks requests as the one of `load` does, with the tokenizer and no model.

    tell: receives lines that the user should know. chat_template: the text of one. The other arguments are those of
    `load`. Nothing is downloaded. Raises ModelNotFoundError, ModelError, UnsupportedModelError and UsageError.
    """
    from dsbd_cli.engine.constraints.catalogues import open_catalogues
    from dsbd_cli.engine.constraints.grammar import GrammarCompiler
    from dsbd_cli.engine.decoding.dry_engine import DryEngine
    from dsbd_cli.engine.decoding.encode import Encoder
    from dsbd_cli.models.draft_heads.formats import is_draft_head
    from dsbd_cli.models.load_model import read_small_files

    checkpoint = Checkpoint.open(target, fetch=False)
    begin_rendering(*checkpoint.folders)
    facts, codec = read_small_files(checkpoint)
    _use_template(codec, target.source, chat_template, chat_template_kwargs)
    drafted = None  # a head has the target's positions, and one that bridges has its own cache
    if draft is not None and not draft.in_target and not method.bridges:
        small = Checkpoint.open(draft, fetch=False)
        drafted = None if is_draft_head(small.path) else read_small_files(small)[0]
    notes: list[str] = []
    catalogues = {} if allow is None else open_catalogues(allow, codec, facts.vocab_size, notes.append)
    grammars = GrammarCompiler(codec, facts.vocab_size)
    encoder = Encoder(
        facts,  # type: ignore[arg-type] # an encoder asks a model for these facts alone
        drafted,  # type: ignore[arg-type]
        codec,
        method,
        on_too_long,
        sys.maxsize,
        catalogues,
        grammars,
        tell,
    )
    info = EngineInfo(
        target.source, None if draft is None else draft.source, "", "", chat=codec.has_template, notes=tuple(notes)
    )
    return DryEngine(encoder, codec.read_ahead, info)


def _check_indexes(method: MethodConfig, checkpoint: Checkpoint) -> None:
    """Check the files that drafts are looked up in, before a large model is loaded. Raises UsageError."""
    cache = method.value(SUFFIX_CACHE)
    if cache is not None and not Path(cache).absolute().parent.is_dir():
        raise UsageError(f"cache {cache} cannot be written: there is no folder {Path(cache).parent}")
    files = [Path(name) for name in method.index_files]
    files += [Path(cache)] if cache is not None and Path(cache).exists() else []
    if files:
        from dsbd_cli.engine.drafting.index import read_index
        from dsbd_cli.models.load_model import read_small_files

        token_bytes = read_small_files(checkpoint)[1].token_bytes()
        for path in files:
            read_index(path, token_bytes)


def _use_template(codec: HFCodec, target: str, template: str | None, kwargs: Mapping[str, object] | None) -> None:
    """Set the chat template of a run and its variables. target: name for messages. Raises UsageError."""
    if template is not None:
        check_template(template)
    codec.use_template(template, kwargs)
    if kwargs and not codec.has_template:
        refuse("chat_template_kwargs", kwargs, f"target {target} has no chat template: drop it")


def _specs(target: ModelRef, draft: ModelRef | None, kernels: bool | None) -> tuple[ModelSpec, ModelSpec | None]:
    """Return how target and draft are loaded, from these arguments of `load`."""
    spec = replace(target, role="target") if isinstance(target, ModelSpec) else ModelSpec(os.fspath(target))
    if draft == "auto":
        draft = BUILTIN_DRAFT if spec.source == BUILTIN_TARGET else None
    draft_spec = None
    if isinstance(draft, ModelSpec):
        draft_spec = replace(draft, role="draft")
    elif draft is not None:
        draft_spec = spec.of_draft(os.fspath(draft))
    if kernels is False:
        spec = replace(spec, kernels=False)
        draft_spec = None if draft_spec is None else replace(draft_spec, kernels=False)
    return spec, draft_spec


def _packed_bytes(checkpoint: Checkpoint) -> int:
    """Return how many bytes our kernels' packed weights take at least, as far as one can tell without torch; 0 where
    there may be none."""
    spec, size = checkpoint.spec, checkpoint.weight_bytes
    if spec.device != "cpu" and (spec.device != "auto" or any(map(os.path.exists, GPU_FILES))):
        return 0
    if spec.device_map is not None or spec.tensor_parallel > 1:
        return 0
    if checkpoint.gguf is not None:
        return checkpoint.gguf.packed_bytes if spec.quantize is None and current() >= Processor.AVX2 else 0
    try:
        config = json.loads((checkpoint.path / "config.json").read_bytes())
        halves = config.get("dtype", config.get("torch_dtype")) in ("bfloat16", "float16")
    except (OSError, ValueError, AttributeError, RecursionError):  # what the load will report
        return 0
    if spec.quantizes:
        return size // (2 if spec.quantize == "int8" else 4) if current() >= Processor.AVX2 else 0
    if not Processor.AVX2 <= current() < Processor.AMX:  # with matrix units bfloat16 stays in its file
        return 0
    return size if halves else size // 2


def _check_place(name: str, value: object, *others: type) -> None:
    """Check that an argument is a name, a path or of one of the other types. Raises UsageError."""
    if not isinstance(value, (str, os.PathLike, *others)):
        raise UsageError(f"{name} is {shorten(value)}, but must be a name or a path", field=name, value=value)


def _check_list(allow: str) -> None:
    """Check that `allow` is a file with a list of answers. Raises UsageError."""
    if re.search(r"^regex:|[.](json|lark)$", allow):
        message = f"allow is {shorten(allow)}, a grammar and no list of answers: give it to each Request"
        raise UsageError(message, field="allow", value=allow)
    if not os.path.isfile(allow):
        raise UsageError(f"allow is {shorten(allow)}, which is no file", field="allow", value=allow)
    check_answer_file(Path(allow))


@contextlib.contextmanager
def _without_collection() -> Iterator[None]:
    """Switch the garbage collector off, which would search all objects that the imports make again and again."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def _set_threads(wanted: int | None) -> None:
    """Set the number of torch's threads, which the kernels share.

    None: keep what OMP_NUM_THREADS says, else lower torch's choice to the processors that this process may use, because
    torch does not know the quota of a container.
    """
    import torch

    if wanted is None and "OMP_NUM_THREADS" not in os.environ and torch.get_num_threads() > processors():
        wanted = processors()
    if wanted is not None:
        torch.set_num_threads(wanted)
