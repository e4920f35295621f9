"""Load one model in stages: locate, config and tokenizer, weights, packing, checks. Each stage has its own errors.

Our own decoder serves what it knows (decoder/), transformers everything else.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dsbd_cli.config.model import ModelSpec
from dsbd_cli.config.token_rules import TokenRules
from dsbd_cli.errors import UnsupportedModelError, one_line, out_of_memory
from dsbd_cli.models import verdicts
from dsbd_cli.models.checkpoints.adapters import notes_on_tokenizer
from dsbd_cli.models.checkpoints.catalog import local_folder
from dsbd_cli.models.checkpoints.generation import (
    CheckpointSettings,
    checkpoint_rules,
    positions_of,
    read_generation,
)
from dsbd_cli.models.checkpoints.gguf_parts import gguf_parts
from dsbd_cli.models.checkpoints.head import read_head, trimmed_target
from dsbd_cli.models.checkpoints.hub import ADAPTER_CONFIG, locate, locate_adapters, stored_bytes
from dsbd_cli.models.checkpoints.loader import (
    check_quantize,
    dtype_of,
    eos_ids,
    import_decoder_code,
    is_plain,
    load_config,
    load_network,
    load_tokenizer,
    quiet,
)
from dsbd_cli.models.checkpoints.placement import device_of
from dsbd_cli.models.checkpoints.registry import parts_of
from dsbd_cli.models.decoder.decoder_model import DecoderForestModel
from dsbd_cli.models.decoder.load import DecoderCheckpoint, build_decoder, differs, pack, spec_or_reason, tensors_of
from dsbd_cli.models.decoder.spec import DecoderSpec
from dsbd_cli.models.forest_model import BaseForestModel, SelfTestReport, unsupported
from dsbd_cli.models.stored_tokenizer import store, stored
from dsbd_cli.models.tokenizer import AheadCodec, HFCodec, bytes_of_tokens
from dsbd_cli.models.verdicts import LIMITS, Verdict
from dsbd_cli.ops.ahead import end_touching
from dsbd_cli.ops.select import GPU_LAYERS, ops_for

LAYERS_CHECKED = 4  # layers of each kind that are checked: the others are the same operations
LARGE_BYTES = 64 << 20  # loading smaller weights is too quick to be logged

_logger = logging.getLogger(__name__)


def load_model(spec: ModelSpec, *, anew: bool = False) -> tuple[BaseForestModel, HFCodec]:
    """Return a loaded and checked model and its codec. Where `invariant` numerics are asked of a target, they are
    checked.

    A line is logged before and after a large model is loaded. anew: make all checks, on all layers, whatever an earlier
    load has kept. Raises ModelNotFoundError, ModelError, UnsupportedModelError and UsageError.
    """
    size, began = stored_bytes(locate(spec)), time.monotonic()
    if size < LARGE_BYTES:
        return _with_note(_loaded(spec, anew=anew), spec)
    _logger.info("loading %s (%s)", spec.source, f"{size / 1e9:.1f} GB" if size >= 1e9 else f"{size / 1e6:.0f} MB")
    loaded = _loaded(spec, anew=anew)
    _logger.info("loaded %s in %.0f s", spec.source, time.monotonic() - began)
    return _with_note(loaded, spec)


def _with_note(loaded: tuple[BaseForestModel, HFCodec], spec: ModelSpec) -> tuple[BaseForestModel, HFCodec]:
    """Return the model with notes: where an adapter's tokenizer is used, and where its folder holds an adapter that
    nobody has named."""
    place = locate(spec)
    loaded[0].notes = (*loaded[0].notes, *notes_on_tokenizer(spec))
    if (place / ADAPTER_CONFIG).is_file() and place.resolve() not in [one.resolve() for one in locate_adapters(spec)]:
        base = parts_of(spec.source)[0]
        note = f"the {spec.role}'s folder holds an adapter, too, which is not merged: {base}+{base} merges it"
        loaded[0].notes = (*loaded[0].notes, note)
    return loaded


def _loaded(spec: ModelSpec, *, anew: bool) -> tuple[BaseForestModel, HFCodec]:
    place = locate(spec)
    digest = verdicts.fingerprint(spec, *gguf_parts(place), *locate_adapters(spec))
    known = None if anew else verdicts.read_verdict(digest)
    found = _described(spec, place) if known is None or not known.get("plain") else _recalled(known)
    if isinstance(found, str):
        return _adapted(spec)
    loaded = _DecoderLoad(spec, place, found, digest, known, whole=anew).load()
    if isinstance(loaded, str):
        model, codec = _adapted(spec)
        model.notes = (*model.notes, f"the {spec.role} runs through transformers: in our own decoder {loaded}")
        return model, codec
    return loaded


@dataclass(frozen=True, slots=True)
class _Description:
    """Facts about a checkpoint that are known before its weights are read.

    Attributes:
        dtype: the dtype that it computes in, None where transformers decides.
        plain: the weights are safetensors files that hold what a forward computes with.
        config: the config that transformers has read; None where an earlier load has kept these facts.
        tokenizer: the facts that an earlier load has stored of the tokenizer; None without them.
    """

    decoder_spec: DecoderSpec
    dtype: torch.dtype | None
    plain: bool
    architecture: str
    eos: Any
    config: Any = None
    tokenizer: dict[str, Any] | None = None


def _described(spec: ModelSpec, place: Path) -> _Description | str:
    """Read a checkpoint's config with transformers' classes. Return the reason where transformers has to run the
    model."""
    with quiet():
        config = load_config(place, spec)
    decoder_spec = spec_or_reason(spec, config)
    if isinstance(decoder_spec, str):
        return decoder_spec
    check_quantize(spec, config)
    plain = is_plain(place, config) and not locate_adapters(spec)
    dtype = dtype_of(spec, config, place)
    if dtype == "auto":  # where no dtype of ours is named, transformers finds one
        plain = plain and config.dtype in LIMITS
        dtype = config.dtype if plain else None
    if decoder_spec.wide_rotary and dtype != torch.float32:
        return "it keeps its rotary cosines in float32"
    settings = CheckpointSettings.of(config, {})
    return _Description(decoder_spec, dtype, plain, settings.architecture, settings.eos, config)


def _recalled(known: dict[str, Any]) -> _Description:
    """Return the description that an earlier load has kept, because transformers' config classes take seconds to
    import."""
    decoder_spec = DecoderSpec.from_json(known["spec"])
    dtype = getattr(torch, known["dtype"])
    return _Description(decoder_spec, dtype, True, known["architecture"], known["eos"], tokenizer=known["tokenizer"])


class _DecoderLoad:
    """A checkpoint on its way into our own decoder."""

    def __init__(
        self,
        spec: ModelSpec,
        place: Path,
        description: _Description,
        digest: str,
        known: dict[str, Any] | None,
        *,
        whole: bool,
    ) -> None:
        """whole: all layers are checked for trees and invariance, not a few of each kind."""
        self._spec, self._place, self._description, self._digest, self._known = spec, place, description, digest, known
        self._device, self._whole = device_of(spec), whole
        self._transformers_model: Any = None  # a model that transformers had to make, and its tensors
        self._state: dict[str, Tensor] = {}
        self._backends: list[list[str]] = []  # operations and what serves them
        self._asked_invariant = spec.role == "target" and spec.numerics == "invariant"

    def load(self) -> tuple[BaseForestModel, HFCodec] | str:
        """Return the model and its codec, or the reason why transformers has to run it."""
        if self._known is not None and self._known["decoder"] is not None:
            return str(self._known["decoder"])
        # A second thread imports modules and makes the tokenizer while this one packs weights. It does nothing else,
        # because transformers sets the dtype of the whole process while it loads a model.
        known = self._description.tokenizer is not None
        silence = contextlib.nullcontext() if known else quiet()  # which imports transformers
        with silence, ThreadPoolExecutor(1) as executor:
            tokenizer = executor.submit(self._tokenizer)
            table = executor.submit(lambda: bytes_of_tokens(tokenizer.result()))
            if self._description.config is not None:
                executor.submit(import_decoder_code, self._description.config)
            found = self._loaded(tokenizer)
            if isinstance(found, str):
                return found
            return found, HFCodec(
                tokenizer.result(), eos_ids(found.settings, tokenizer.result(), self._spec), table.result()
            )

    def _loaded(self, tokenizer: Future[Any]) -> BaseForestModel | str:
        """Return the model, or the reason why transformers has to run it."""
        decoder_spec, dtype = self._description.decoder_spec, self._description.dtype
        if self._description.plain:
            tensors, generation = tensors_of(self._place, self._spec), read_generation(self._place)
        else:  # transformers has to make plain weights of pickles, adapters or quantised blocks
            end_touching()
            theirs = self._transformers_model = self._stock()
            self._state = theirs.state_dict()
            tensors = {name: partial(self._state.__getitem__, name) for name in self._state}
            generation, dtype = theirs.generation_config.to_dict(), theirs.dtype
            if not theirs.config.get_text_config(decoder=True).tie_word_embeddings:  # an adapter may bring a head
                decoder_spec = replace(decoder_spec, tied=False)
            del theirs
        assert dtype is not None
        settings = CheckpointSettings(self._description.architecture, self._description.eos, generation)
        checkpoint, reason = DecoderCheckpoint(decoder_spec, tensors, dtype, self._device), None
        head = read_head(self._place) if self._place.is_dir() else None
        if head is not None and self._spec.role == "target":
            raise trimmed_target(self._spec)
        for kernels in self._attempts():
            try:
                model = build_decoder(self._spec, checkpoint, settings, head, self._stock, kernels)
            except (KeyError, ValueError) as error:
                self._stock()  # transformers raises an error of its own where the files are wrong
                reason = f"a tensor is not where it should be ({error})"
                break
            try:
                reason = self._verified(model, kernels, tokenizer)
            except Exception as failed:
                if not kernels or out_of_memory(failed):  # a shortage may pass, and a verdict stays
                    raise
                # the kernel's trial had other widths
                reason = f"a kernel fails ({type(failed).__name__}: {one_line(failed)})"
            if reason is None:
                return model
        assert reason is not None
        verdicts.write_verdict(self._digest, {"decoder": reason})
        return reason

    def _tokenizer(self) -> Any:
        """Return the tokenizer that an earlier load has stored, or else transformers' own, which is stored again where
        its file is gone or damaged."""
        load = partial(_load_quietly, self._place, self._spec)
        if self._description.tokenizer is None:
            return load_tokenizer(self._place, self._spec)
        found = stored(self._description.tokenizer, load)
        if found is None:
            store(made := load())
            return made
        return found

    def _keep(self, found: Mapping[str, object], model: BaseForestModel, tokenizer: Any) -> None:
        """Keep the results of the checks and the checkpoint's description for later loads."""
        name = str(model.weights_dtype).removeprefix("torch.")
        what: dict[str, object] = {
            "spec": asdict(self._description.decoder_spec),
            "dtype": name,
            "plain": self._description.plain,
            "eos": self._description.eos,
        }
        what |= {"architecture": self._description.architecture, "tokenizer": store(tokenizer)}
        what["backends"] = self._backends
        verdicts.write_verdict(self._digest, {"decoder": None, **found, **what})

    def _stock(self) -> Any:
        """Return transformers' model of the checkpoint."""
        return load_network(replace(self._spec, quantize=None))

    def _attempts(self) -> list[frozenset[str]]:
        """Return the sets of GPU kernels to try, the best one first: the set that served an earlier load, where one is
        known. On other devices return one empty set."""
        if self._known is not None:
            return [frozenset(self._known["kernels"])]
        may = None if self._spec.kernels else False
        allowed = frozenset(ops_for(self._device, torch.float32, GPU_LAYERS, kernels=may).by("triton"))
        without = allowed - {"linear"}
        best = [allowed] if self._asked_invariant else []
        return [*dict.fromkeys((*best, without, frozenset[str]()))]

    def _verified(self, model: Any, kernels: frozenset[str], tokenizer: Future[Any]) -> str | None:
        """Pack a model's weights and check it, or apply what an earlier load has kept. Return why it cannot serve;
        None: it can."""
        backends = [[op, backend] for op, backend, _ in model.ops.facts]
        if self._known is not None and self._known["backends"] != backends:
            self._known = None  # kernels that served the checks cannot be loaded now, or the other way round
        self._backends = backends
        if "linear" in kernels:
            model.attention = _attention(model, exact=True)
        try:
            if self._known is None:
                found = self._checked(model, kernels, tokenizer)
                if isinstance(found, str):
                    return found
            else:
                pack(model, self._spec, self._known.get("outliers"))
                model.tested = SelfTestReport(*self._known["tested"])
                found = Verdict(self._known["varies"], self._known["copies"])
        except UnsupportedModelError as error:
            return str(error)
        if self._asked_invariant and found.varies is not None and self._device.type == "cuda" and kernels:
            _try_split_attention(model)
        model.trust(found.varies, found.copies)
        return None

    def _checked(self, model: Any, kernels: frozenset[str], tokenizer: Future[Any]) -> Verdict | str:
        """Pack a model's weights, check it and keep the results. Return the verdict, or the reason why the model cannot
        serve."""
        tested = outliers = None
        quantized = self._spec.quantize is not None
        packed = self._transformers_model is None and not quantized
        if packed:
            pack(model, self._spec, None)
        # imported behind the packing: meanwhile the second thread imports the modules of transformers that it needs
        from dsbd_cli.models.checks.selftest import self_test

        if quantized:  # before it is int8, because the limits are those of the checkpoint's own rounding
            tested = self_test(self._checked_layers(model))
        theirs, self._transformers_model = self._transformers_model or self._stock(), None
        with unsupported(model.architecture):  # settings with which neither of the two can run
            reason = differs(model, theirs)
        del theirs
        if self._device.type == "cpu":  # there is no other attempt: each plain weight is freed as soon as it is packed
            self._state.clear()
        if reason is not None:
            return reason
        if not packed:
            outliers = pack(model, self._spec, None)
        model.tested = tested = tested or self_test(self._checked_layers(model))
        found = _verdict(self._checked_layers(model)) if self._asked_invariant else Verdict(verdicts.UNASKED)
        if found.varies is not None and "linear" in kernels:
            return found.varies
        report = [tested.median_error, tested.largest_error, tested.limit]
        made = {"varies": found.varies, "copies": found.copies, "outliers": outliers, "tested": report}
        self._keep({**made, "kernels": sorted(kernels)}, model, tokenizer.result())
        return found

    def _checked_layers(self, model: DecoderForestModel) -> DecoderForestModel:
        """Return a model of the layers that are checked for trees and invariance: on a CPU a few of each kind, unless
        all were asked for.

        The others are the same operations on the same shapes. The comparison with transformers runs all layers.
        """
        return model if self._whole or self._device.type != "cpu" else model.shallow(LAYERS_CHECKED)


def _load_quietly(place: Path, spec: ModelSpec) -> Any:
    with quiet():
        return load_tokenizer(place, spec)


@dataclass(frozen=True, slots=True)
class UnloadedModel:
    """Facts about a model that its small files tell. vocab_size: V. max_positions: None where there is no limit."""

    vocab_size: int
    max_positions: int | None
    token_rules: TokenRules


def read_small_files(spec: ModelSpec) -> tuple[UnloadedModel, AheadCodec]:
    """Return the facts of a decoder-only model and its codec; no weights are loaded, and nothing is fetched.

    Raises ModelNotFoundError, ModelError, and UnsupportedModelError for a model with an encoder.
    """
    place = local_folder(spec)
    generation = read_generation(place) if place.is_dir() else {}
    known = verdicts.read_verdict(verdicts.fingerprint(spec, place, *locate_adapters(spec)))
    if known is not None and known.get("plain"):
        found = _recalled(known)
        if (tokenizer := stored(known["tokenizer"], partial(_load_quietly, place, spec))) is not None:
            settings = CheckpointSettings(found.architecture, found.eos, generation)
            decoder = found.decoder_spec
            facts = UnloadedModel(decoder.vocabulary, decoder.positions, checkpoint_rules(settings))
            return facts, AheadCodec(tokenizer, eos_ids(settings, tokenizer, spec))
    with quiet():
        config = load_config(place, spec)
        tokenizer = load_tokenizer(place, spec)
    if getattr(config, "is_encoder_decoder", False):
        raise UnsupportedModelError(
            f"{spec.role} model {spec.source!r} has an encoder, whose input is not made without the model: only a "
            "decoder-only target takes --dry-run"
        )
    text = config.get_text_config(decoder=True)
    settings = CheckpointSettings.of(config, generation)
    facts = UnloadedModel(text.vocab_size, positions_of(text), checkpoint_rules(settings))
    return facts, AheadCodec(tokenizer, eos_ids(settings, tokenizer, spec))


def _adapted(spec: ModelSpec) -> tuple[BaseForestModel, HFCodec]:
    """Return a model that transformers runs, which takes other memory for its weights."""
    end_touching()
    from dsbd_cli.models.load_adapted import load_adapted

    return load_adapted(spec)


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


def _try_split_attention(model: BaseForestModel) -> None:
    """Let the attention kernel serve long prompts, unless it moves the logits of a text by more than rounding does."""
    from dsbd_cli.models.checks.invariance import shift_by_splitting

    model.attention = _attention(model, exact=False)
    if model.attention is None:
        return
    try:
        error = shift_by_splitting(model)
        fault = None if error <= LIMITS[model.weights_dtype] else f"its logits are off by {error:.1g} of their spread"
    except Exception as failed:
        fault = f"the kernel fails ({type(failed).__name__}: {one_line(failed)})"
    if fault is not None:
        model.attention = None
        model.notes = (*model.notes, f"torch's attention serves long prompts, too: with the kernel {fault}")
