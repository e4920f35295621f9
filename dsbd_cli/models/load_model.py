"""Load one model in stages: config, weights, packing, checks. Each stage has its own errors.

Our own decoder serves what it knows (decoder/), transformers everything else (load_transformers.py). A stage returns
what it has made, and the last one a `Loaded`.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from dsbd_cli.config.token_rules import TokenRules
from dsbd_cli.errors import UnsupportedModelError, one_line, out_of_memory
from dsbd_cli.models import verdicts
from dsbd_cli.models.checkpoints.checkpoint import Checkpoint, Tensors, quiet
from dsbd_cli.models.checkpoints.generation import CheckpointSettings, checkpoint_rules, positions_of
from dsbd_cli.models.checkpoints.hub import ADAPTER_CONFIG
from dsbd_cli.models.checkpoints.lm_head import read_trimmed_lm_head, trimmed_target
from dsbd_cli.models.checkpoints.loader import (
    check_quantize,
    device_of,
    dtype_of,
    import_decoder_code,
    load_network,
)
from dsbd_cli.models.checkpoints.quantized.stock_part import part_config, stock_part
from dsbd_cli.models.checkpoints.registry import parts_of
from dsbd_cli.models.checkpoints.stock import check_numbers
from dsbd_cli.models.checkpoints.text_part import text_tensors
from dsbd_cli.models.decoder.config import DecoderConfig
from dsbd_cli.models.decoder.decoder_model import DecoderForestModel
from dsbd_cli.models.decoder.load import (
    DecoderParts,
    build_decoder,
    decoder_config_or_reason,
    differs,
    first_part,
    layers_of_each_kind,
    pack,
)
from dsbd_cli.models.forest_model import BaseForestModel, Loaded, LoadReport, SelfTestReport, unsupported
from dsbd_cli.models.stored_tokenizer import store, stored
from dsbd_cli.models.tokenizer import AheadCodec, HFCodec, bytes_of_tokens
from dsbd_cli.models.verdicts import LIMITS, Verdict
from dsbd_cli.ops.ahead import end_touching
from dsbd_cli.ops.memory import return_freed
from dsbd_cli.ops.select import GPU_LAYERS, ops_for, quantize_missing

LAYERS_CHECKED = 4  # layers of each kind that are checked: the others are the same operations
MIXTURES_CHECKED = 1  # of mixtures, whose layers are large: one of Qwen3-30B-A3B takes 2.5 GB in float32
TOKENS_CHECKED = 4096  # of a quantised file's vocabulary
AS_STORED = 0.3  # of the spread of logits: how far they may be off where products read a file's levels; noise is 1.4
LARGE_BYTES = 64 << 20  # loading smaller weights is too quick to be logged

_logger = logging.getLogger(__name__)


def load_model(checkpoint: Checkpoint, *, anew: bool = False) -> Loaded:
    """Return a loaded and checked model, its codec and a report. Where `invariant` numerics are asked of a target, they
    are checked.

    A line is logged before and after a large model is loaded. anew: make all checks, on all layers, whatever an earlier
    load has kept. Raises ModelError, UnsupportedModelError and UsageError.
    """
    size, began, source = checkpoint.weight_bytes, time.monotonic(), checkpoint.spec.source
    if size >= LARGE_BYTES:
        _logger.info("loading %s (%s)", source, f"{size / 1e9:.1f} GB" if size >= 1e9 else f"{size / 1e6:.0f} MB")
    loaded = _load(checkpoint, anew=anew).noting(*_notes_on_adapters(checkpoint))
    if size >= LARGE_BYTES:
        _logger.info("loaded %s in %.0f s", source, time.monotonic() - began)
    return loaded


def _notes_on_adapters(checkpoint: Checkpoint) -> list[str]:
    """Return a line for each adapter whose tokenizer or chat template is used, and one where the model's folder holds
    an adapter that nobody has named."""
    spec, path, notes = checkpoint.spec, checkpoint.path, list[str]()
    hint = ": --set tokenizer=base takes the base's" if spec.role == "target" else ""
    for adapter in checkpoint.bringing:
        verb = "is" if len(adapter.brings) == 1 else "are"
        notes.append(f"{adapter.name} brings a {' and a '.join(adapter.brings)}, which {verb} used{hint}")
    merged = [adapter.path.resolve() for adapter in checkpoint.adapters]
    if (path / ADAPTER_CONFIG).is_file() and path.resolve() not in merged:
        base = parts_of(spec.source)[0]
        notes.append(f"the {spec.role}'s folder holds an adapter, too, which is not merged: {base}+{base} merges it")
    return notes


def _load(checkpoint: Checkpoint, *, anew: bool) -> Loaded:
    digest = verdicts.fingerprint(checkpoint.spec, checkpoint.files)
    kept = None if anew else verdicts.read_verdict(digest)
    description = _recalled(kept) if kept is not None and kept.get("plain") else _described(checkpoint)
    if isinstance(description, str):
        return _by_transformers(checkpoint)
    if kept is not None and kept["decoder"] is not None:
        made: Loaded | str = str(kept["decoder"])
    else:
        made = _DecoderLoad(checkpoint, description, digest, kept, whole=anew).load()
    if isinstance(made, Loaded):
        return made
    return _by_transformers(checkpoint).noting(
        f"the {checkpoint.spec.role} runs through transformers: in our own decoder {made}"
    )


@dataclass(frozen=True, slots=True)
class _Description:
    """Facts about a checkpoint that are known before its weights are read.

    Attributes:
        dtype: the dtype that it computes in, None where transformers decides.
        plain: the files hold what a forward computes with, plain or in a quantised form that is read here.
        settings: those of the config, without generation settings.
        recalled: an earlier load has kept these facts, so transformers' config was not read.
        tokenizer: the facts that an earlier load has stored of the tokenizer; None without them.
    """

    decoder_config: DecoderConfig
    dtype: torch.dtype | None
    plain: bool
    settings: CheckpointSettings
    recalled: bool = False
    tokenizer: dict[str, Any] | None = None


def _described(checkpoint: Checkpoint) -> _Description | str:
    """Read a checkpoint's config with transformers' classes. Return the reason where transformers has to run the
    model."""
    config, decoder_config = checkpoint.config, decoder_config_or_reason(checkpoint)
    if isinstance(decoder_config, str):
        return decoder_config
    check_quantize(checkpoint, config, experts=decoder_config.mixture is not None)
    plain, dtype = checkpoint.direct, dtype_of(checkpoint, config)
    if checkpoint.stored_form is not None and device_of(checkpoint.spec).type != "cpu":
        plain = False  # transformers, or its own network, gets dequantised weights
    if dtype == "auto":  # where no dtype of ours is named, transformers finds one
        plain = plain and config.dtype in LIMITS
        dtype = config.dtype if plain else None
    if decoder_config.wide_rotary and dtype != torch.float32:
        return "it keeps its rotary cosines in float32"
    return _Description(decoder_config, dtype, plain, CheckpointSettings.of(config, {}))


def _recalled(kept: dict[str, Any]) -> _Description:
    """Return the description that an earlier load has kept, because transformers' config classes take seconds to
    import."""
    dtype, decoder_config = getattr(torch, kept["dtype"]), DecoderConfig.from_json(kept["spec"])
    settings = CheckpointSettings(kept["architecture"], kept["eos"], {})
    return _Description(decoder_config, dtype, True, settings, recalled=True, tokenizer=kept["tokenizer"])


class _DecoderLoad:
    """A checkpoint on its way into our own decoder: weights, model, packing, checks.

    The order of its stages keeps two budgets.

    Memory: a weight is there once, or twice for a short time.
    - Files are mapped, and each packed product takes the memory that `ahead.touching` has begun to prepare.
    - Where transformers has to read the files, that memory is given back first (`end_touching`). Packing then frees
      each plain weight, so the comparison with transformers, which needs them, comes before it.
    - Where files are read directly, packing comes first, because packed weights do not hold the files' pages. Then
      transformers' model is loaded for the comparison alone and dropped before the next check.
    - Weights are quantized last: the self-test needs plain weights, because its limits are those of the checkpoint's
      own rounding.

    Imports: transformers takes seconds.
    - With kept results it is not imported at all: description, tokenizer and verdict come from the cache.
    - At a first load a second thread imports its modules and makes the tokenizer while this one packs weights. It does
      nothing else, because transformers sets the dtype of the whole process while it loads a model.
    - The checks import transformers' modules, too. Their import stands behind the packing, or this thread would wait
      for the second one.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        description: _Description,
        digest: str,
        kept: dict[str, Any] | None,
        *,
        whole: bool,
    ) -> None:
        """whole: all layers are checked for trees and invariance, not a few of each kind."""
        self._checkpoint, self._description, self._digest, self._kept = checkpoint, description, digest, kept
        self._device, self._whole = device_of(checkpoint.spec), whole
        self._asked_invariant = checkpoint.spec.role == "target" and checkpoint.spec.numerics == "invariant"
        self._network: Any = None  # transformers' model, where it was made for its tensors, until it is compared
        self._state: dict[str, Tensor] = {}  # these tensors

    def load(self) -> Loaded | str:
        """Return the model and its codec, or the reason why transformers has to run it."""
        silence = contextlib.nullcontext() if self._description.tokenizer is not None else quiet()
        with silence, ThreadPoolExecutor(1) as executor:
            tokenizer = executor.submit(self._tokenizer)
            table = executor.submit(lambda: bytes_of_tokens(tokenizer.result()))
            if not self._description.recalled:
                executor.submit(import_decoder_code, self._checkpoint.config)
            made = self._model(tokenizer)
            if isinstance(made, str):
                return made
            model, report = made
            ends = self._checkpoint.end_tokens(model.settings, tokenizer.result())
            return Loaded(model, HFCodec(tokenizer.result(), ends, table.result()), report)

    def _tokenizer(self) -> Any:
        """Return the tokenizer that an earlier load has stored, or else transformers' own, which is stored again where
        its file is gone or damaged."""
        checkpoint = self._checkpoint
        if self._description.tokenizer is None:
            return checkpoint.tokenizer
        tokenizer = stored(self._description.tokenizer, lambda: checkpoint.tokenizer)
        if tokenizer is None:
            store(checkpoint.tokenizer)
            return checkpoint.tokenizer
        return tokenizer

    def _model(self, tokenizer: Future[Any]) -> tuple[DecoderForestModel, LoadReport] | str:
        """Return the model, or the reason why transformers has to run it."""
        parts = self._parts()
        made: tuple[DecoderForestModel, LoadReport] | str = ""
        for kernels in self._attempts():
            try:
                model = build_decoder(parts, self._stock, kernels)
            except (KeyError, ValueError) as error:
                self._stock()  # transformers raises an error of its own where the files are wrong
                made = f"a tensor is not where it should be ({error})"
                break
            try:
                made = self._verified(model, kernels, tokenizer)
            except Exception as failed:
                if not kernels or out_of_memory(failed):  # a shortage may pass, and a verdict stays
                    raise
                # the kernel's trial had other widths
                made = f"a kernel fails ({type(failed).__name__}: {one_line(failed)})"
            if not isinstance(made, str):
                return made
        verdicts.write_verdict(self._digest, {"decoder": made})
        return made

    def _parts(self) -> DecoderParts:
        """Return all that the decoder is made of."""
        checkpoint, of = self._checkpoint, self._description
        if of.plain:
            assert of.dtype is not None
            decoder_config, dtype = of.decoder_config, of.dtype
            tensors, generation = checkpoint.tensors, checkpoint.generation
        else:  # transformers has to make plain weights of pickles, adapters or quantised blocks
            end_touching()
            network = self._network = self._stock()
            self._state = network.state_dict()
            tensors = {name: partial(self._state.__getitem__, name) for name in self._state}
            decoder_config, dtype, generation = of.decoder_config, network.dtype, network.generation_config.to_dict()
            if not network.config.get_text_config(decoder=True).tie_word_embeddings:  # an adapter may bring an LM head
                decoder_config = replace(decoder_config, tied=False)
        lm_head = read_trimmed_lm_head(checkpoint.path) if checkpoint.path.is_dir() else None
        if lm_head is not None and checkpoint.spec.role == "target":
            raise trimmed_target(checkpoint.spec)
        tensors = text_tensors(tensors)
        settings = replace(of.settings, generation=generation)
        return DecoderParts(checkpoint.spec.source, decoder_config, tensors, dtype, self._device, settings, lm_head)

    def _stock(self) -> Any:
        """Return transformers' model of the checkpoint."""
        return load_network(self._checkpoint.like(quantize=None), self._checkpoint.config)

    def _attempts(self) -> list[frozenset[str]]:
        """Return the sets of GPU kernels to try, the best one first: the set that served an earlier load, where one is
        known. On other devices return one empty set."""
        if self._kept is not None:
            return [frozenset(self._kept["kernels"])]
        may = None if self._checkpoint.spec.kernels else False
        allowed = frozenset(ops_for(self._device, torch.float32, GPU_LAYERS, kernels=may).by("triton"))
        without = allowed - {"linear"}
        best = [allowed] if self._asked_invariant else []
        return [*dict.fromkeys((*best, without, frozenset[str]()))]

    def _verified(
        self, model: DecoderForestModel, kernels: frozenset[str], tokenizer: Future[Any]
    ) -> tuple[DecoderForestModel, LoadReport] | str:
        """Pack a model's weights and check it, or apply what an earlier load has kept. Return why it cannot serve where
        it cannot."""
        backends = [[op, backend] for op, backend, _ in model.ops.facts]
        if self._kept is not None and self._kept["backends"] != backends:
            self._kept = None  # kernels that served the checks cannot be loaded now, or the other way round
        if "linear" in kernels:
            model.attention = _attention(model, exact=True)
        model.keep_recurrent_states_in(torch.float64 if self._asked_invariant else torch.float32)
        try:
            if self._kept is not None:
                pack(model, self._checkpoint.spec, self._kept.get("outliers"), self._checkpoint.stored_form)
                tested, verdict = self._kept["tested"], Verdict(self._kept["varies"], self._kept["copies"])
            else:
                results = self._checked(model, kernels)
                if isinstance(results, str):
                    return results
                self._keep({**results, "backends": backends, "kernels": sorted(kernels)}, model, tokenizer.result())
                tested, verdict = results["tested"], Verdict(results["varies"], results["copies"])
        except UnsupportedModelError as error:
            return str(error)
        notes = list[str]()
        if self._asked_invariant and verdict.varies is not None and self._device.type == "cuda" and kernels:
            notes += _try_split_attention(model)
        notes += model.trust(verdict.varies, verdict.copies)
        if not model.invariant:
            model.keep_recurrent_states_in(torch.float32)
        spec, form = self._checkpoint.spec, self._checkpoint.stored_form
        if form is not None and spec.quantize is None and model.stored_form is None:
            why = quantize_missing("stored", model.weights_dtype) or "no large product is quantised"
            if self._device.type != "cpu":
                why = f"{form} is read on a CPU alone"
            notes.append(f"the {spec.role} is {form} and runs dequantised, in the memory of plain weights: {why}")
        return model, LoadReport(SelfTestReport(*tested), tuple(notes))

    def _checked(self, model: DecoderForestModel, kernels: frozenset[str]) -> dict[str, Any] | str:
        """Pack a model's weights and check it. Return the results, or the reason why the model cannot serve."""
        mixture = self._description.decoder_config.mixture is not None
        if self._description.plain and (mixture or self._checkpoint.stored_form is not None):
            return self._checked_by_part(model)
        spec, tested, outliers = self._checkpoint.spec, None, None
        packed_first = self._network is None and not spec.quantizes
        if packed_first:
            pack(model, spec, None)
        # imported behind the packing: meanwhile the second thread imports the modules of transformers that it needs
        from dsbd_cli.models.checks.selftest import self_test

        if spec.quantizes:  # whose limits are those of the checkpoint's own rounding
            tested = self_test(self._checked_layers(model))
        theirs, self._network = self._network or self._stock(), None
        with unsupported(model.architecture):  # settings with which neither of the two can run
            reason = differs(model, theirs)
        del theirs
        if self._device.type == "cpu":  # there is no other attempt: each plain weight is freed as soon as it is packed
            self._state.clear()
        if reason is not None:
            return reason
        if not packed_first:
            outliers = pack(model, spec, None)
        tested = tested or self_test(self._checked_layers(model))
        verdict = _verdict(self._checked_layers(model)) if self._asked_invariant else Verdict(verdicts.UNASKED)
        if verdict.varies is not None and "linear" in kernels:
            return verdict.varies
        errors = [tested.median_error, tested.largest_error, tested.limit]
        return {"varies": verdict.varies, "copies": verdict.copies, "outliers": outliers, "tested": errors}

    def _checked_by_part(self, model: DecoderForestModel) -> dict[str, Any] | str:
        """Do what `_checked` does with a model of a quantised file, or with a mixture of experts.

        Plain weights of all layers would fill the memory, and reading them takes transformers a minute. So the first
        layers, over the first tokens, are compared and tested with plain weights. Those of mixtures are in float32,
        because in half precision two readings choose other experts where scores are near each other.
        """
        spec, whole = self._checkpoint.spec, self._description.decoder_config
        least = LAYERS_CHECKED if whole.mixture is None else MIXTURES_CHECKED
        layers = whole.layers if self._whole else layers_of_each_kind(whole, least)
        vocabulary = whole.vocabulary if self._whole else min(TOKENS_CHECKED, whole.vocabulary)
        from dsbd_cli.models.checks.selftest import self_test

        end_touching()  # a part would take what the whole needs
        parts, form = self._parts(), self._checkpoint.stored_form
        check_numbers(_plain_tensors(parts.tensors), self._checkpoint.name)
        few = first_part(parts, layers, vocabulary)
        if whole.mixture is not None:
            few = replace(few, dtype=torch.float32)
        part = build_decoder(few, self._stock, frozenset())
        pack(part, replace(spec, quantize="none"), None)
        theirs = _stock_part(self._checkpoint, part.weights_dtype, layers, vocabulary)
        with unsupported(model.architecture):
            reason = differs(part, theirs)
        if reason is not None:
            return reason
        if spec.quantize is None and form is not None:  # what was packed otherwise has been compared as it is
            stored = build_decoder(few, self._stock, frozenset())
            pack(stored, spec, None, form)
            if (reason := differs(stored, theirs, AS_STORED)) is not None:
                return f"as the file has its weights {reason}"
            del stored
        del theirs
        tested = self_test(part)
        del part
        return_freed()
        outliers = pack(model, spec, None, form)
        return_freed()
        verdict = _verdict(self._checked_layers(model)) if self._asked_invariant else Verdict(verdicts.UNASKED)
        return_freed()
        errors = [tested.median_error, tested.largest_error, tested.limit]
        return {"varies": verdict.varies, "copies": verdict.copies, "outliers": outliers, "tested": errors}

    def _keep(self, results: dict[str, Any], model: DecoderForestModel, tokenizer: Any) -> None:
        """Keep the results of the checks and the checkpoint's description for later loads."""
        of = self._description
        description: dict[str, Any] = {
            "spec": asdict(of.decoder_config),
            "dtype": str(model.weights_dtype).removeprefix("torch."),
            "plain": of.plain,
            "eos": of.settings.eos,
            "architecture": of.settings.architecture,
            "tokenizer": store(tokenizer),
        }
        verdicts.write_verdict(self._digest, {"decoder": None, **results, **description})

    def _checked_layers(self, model: DecoderForestModel) -> DecoderForestModel:
        """Return a model of the layers that are checked for trees and invariance: on a CPU a few of each kind, unless
        all were asked for.

        The others are the same operations on the same shapes. The comparison with transformers runs all layers.
        """
        return model if self._whole or self._device.type != "cpu" else model.shallow(LAYERS_CHECKED)


@dataclass(frozen=True, slots=True)
class UnloadedModel:
    """Facts about a model that its small files tell. vocab_size: V. max_positions: None where there is no limit.
    switch_position: see SwitchingModel."""

    vocab_size: int
    max_positions: int | None
    switch_position: int | None
    token_rules: TokenRules


def read_small_files(checkpoint: Checkpoint) -> tuple[UnloadedModel, AheadCodec]:
    """Return the facts of a decoder-only model and its codec; no weights are loaded, and nothing is fetched.

    Raises ModelError, and UnsupportedModelError for a model with an encoder.
    """
    generation = checkpoint.generation
    kept = verdicts.read_verdict(verdicts.fingerprint(checkpoint.spec, checkpoint.files))
    if kept is not None and kept.get("plain"):
        description = _recalled(kept)
        if (tokenizer := stored(kept["tokenizer"], lambda: checkpoint.tokenizer)) is not None:
            settings, decoder = replace(description.settings, generation=generation), description.decoder_config
            return _unloaded(decoder, settings), AheadCodec(tokenizer, checkpoint.end_tokens(settings, tokenizer))
    config, tokenizer = checkpoint.config, checkpoint.tokenizer
    if getattr(config, "is_encoder_decoder", False):
        raise UnsupportedModelError(
            f"{checkpoint.name} has an encoder, whose input is not made without the model: only a decoder-only target "
            "takes --dry-run"
        )
    text = config.get_text_config(decoder=True)
    settings = CheckpointSettings.of(config, generation)
    codec, decoder_config = (
        AheadCodec(tokenizer, checkpoint.end_tokens(settings, tokenizer)),
        decoder_config_or_reason(checkpoint),
    )
    if isinstance(decoder_config, DecoderConfig):
        return _unloaded(decoder_config, settings), codec
    return UnloadedModel(text.vocab_size, positions_of(text), None, checkpoint_rules(settings)), codec


def _unloaded(config: DecoderConfig, settings: CheckpointSettings) -> UnloadedModel:
    return UnloadedModel(config.vocabulary, config.positions, config.switch_position, checkpoint_rules(settings))


def _plain_tensors(tensors: Tensors) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of a quantised checkpoint that are not quantised, with their names."""
    for name, read in tensors.items():
        if isinstance(tensor := read(), Tensor):
            yield name, tensor


def _stock_part(checkpoint: Checkpoint, dtype: torch.dtype, layers: int, vocabulary: int) -> Any:
    """Return transformers' model of the first layers of a quantised decoder, over the first tokens, with plain weights.

    transformers reads a GGUF file by itself, so that its reading and ours are compared. Weights of other forms are
    dequantised by our readers. Raises ModelError.
    """
    if checkpoint.gguf is not None:
        return load_network(checkpoint.like(quantize=None), part_config(checkpoint.config, layers, vocabulary))
    return stock_part(checkpoint.config, checkpoint.tensors, dtype, layers, vocabulary, checkpoint.name)


def _by_transformers(checkpoint: Checkpoint) -> Loaded:
    """Return a model that transformers runs, which takes other memory for its weights."""
    end_touching()
    from dsbd_cli.models.load_transformers import load_transformers

    loaded, form, spec = load_transformers(checkpoint), checkpoint.stored_form, checkpoint.spec
    if form is None or spec.quantize is not None:
        return loaded
    return loaded.noting(f"the {spec.role} is {form} and runs dequantised, in the memory of plain weights")


def _verdict(model: DecoderForestModel) -> Verdict:
    """Check whether a node's logits depend on what else is in the forward. A kernel that fails at the model's sizes
    counts as a reason why they may."""
    from dsbd_cli.models.checks.invariance import check

    try:
        return check(model)
    except Exception as failed:
        if model.attention is None:
            raise
        return Verdict(f"a kernel fails ({type(failed).__name__}: {one_line(failed)})")


def _attention(model: BaseForestModel, *, exact: bool) -> Callable[..., Tensor | None] | None:
    """Return the attention kernel for a model's device and dtype; None without one. exact: its bits do not depend on
    the drafts."""
    attention = ops_for(model.device, model.weights_dtype, ("attention",)).attention
    return None if attention is None else partial(attention, exact=exact)


def _try_split_attention(model: BaseForestModel) -> tuple[str, ...]:
    """Let the attention kernel serve long prompts, unless it moves the logits of a text by more than rounding does.
    Return a line for the user where it does."""
    from dsbd_cli.models.checks.invariance import shift_by_splitting

    model.attention = _attention(model, exact=False)
    if model.attention is None:
        return ()
    try:
        error = shift_by_splitting(model)
        fault = None if error <= LIMITS[model.weights_dtype] else f"its logits are off by {error:.1g} of their spread"
    except Exception as failed:
        fault = f"the kernel fails ({type(failed).__name__}: {one_line(failed)})"
    if fault is None:
        return ()
    model.attention = None
    return (f"torch's attention serves long prompts, too: with the kernel {fault}",)
