"""One model, in stages: locate, config and tokenizer, weights, packing, checks. Each stage has its own errors.

Our own decoder serves what it knows (decoder/), transformers everything else.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dsbd_cli.config.model import ModelSpec
from dsbd_cli.errors import UnsupportedModelError
from dsbd_cli.models import verdicts
from dsbd_cli.models.checkpoints.damage import stored_bytes
from dsbd_cli.models.checkpoints.generation import CheckpointSettings, read_generation
from dsbd_cli.models.checkpoints.head import read_head, trimmed_target
from dsbd_cli.models.checkpoints.hub import locate
from dsbd_cli.models.checkpoints.loader import (
    check_quantize,
    device_of,
    dtype_of,
    eos_ids,
    is_plain,
    load,
    load_config,
    load_tokenizer,
    quiet,
)
from dsbd_cli.models.decoder.load import DecoderSource, decoder_forest, differs, pack, sort_of, tensors_of
from dsbd_cli.models.decoder.spec import DecoderSpec
from dsbd_cli.models.forest import Forest, SelfTestReport
from dsbd_cli.models.tokenizer import HFCodec
from dsbd_cli.ops.triton import available

__all__ = ["load_model"]

LAYER_KERNELS = ("norm", "gated", "rotate", "linear")
TOLD_BYTES = 64 << 20  # loading less takes no time that needs a line

_logger = logging.getLogger(__name__)


def load_model(spec: ModelSpec, *, anew: bool = False) -> tuple[Forest, HFCodec]:
    """Return one model, checked, and its codec. A target that is to be `invariant` is asked whether it is.

    Of a large one a line is logged before and after. anew: make all checks, whatever an earlier load has found. Raises
    ModelNotFoundError, ModelError, UnsupportedModelError and UsageError.
    """
    size, began = stored_bytes(locate(spec)), time.monotonic()
    if size < TOLD_BYTES:
        return _loaded(spec, anew=anew)
    _logger.info("loading %s (%s)", spec.source, f"{size / 1e9:.1f} GB" if size >= 1e9 else f"{size / 1e6:.0f} MB")
    loaded = _loaded(spec, anew=anew)
    _logger.info("loaded %s in %.0f s", spec.source, time.monotonic() - began)
    return loaded


def _loaded(spec: ModelSpec, *, anew: bool) -> tuple[Forest, HFCodec]:
    place = locate(spec)
    digest = verdicts.fingerprint(spec, place)
    known = None if anew else verdicts.kept(digest)
    found = _described(spec, place) if known is None or not known.get("plain") else _recalled(known)
    if isinstance(found, str):
        return _adapted(spec)
    loaded = _Own(spec, place, found, digest, known).load()
    if isinstance(loaded, str):
        forest, codec = _adapted(spec)
        forest.told = (*forest.told, f"the {spec.role} runs through transformers: in our own decoder {loaded}")
        return forest, codec
    return loaded


@dataclass(frozen=True, slots=True)
class _Description:
    """Description of a checkpoint.

    Attributes:
        dtype: what it computes in, None where transformers decides.
        plain: the weights are safetensors files that hold what a forward computes with.
        tokenizer: module and name of its class, where known.
    """

    sort: DecoderSpec
    dtype: torch.dtype | None
    plain: bool
    architecture: str
    eos: Any
    tokenizer: tuple[str, str] | None = None


def _described(spec: ModelSpec, place: Path) -> _Description | str:
    """Read a checkpoint's config by transformers' classes, or say why transformers has to run it."""
    with quiet():
        config = load_config(place, spec)
    sort = sort_of(spec, config)
    if isinstance(sort, str):
        return sort
    check_quantize(spec, config)
    plain, dtype = is_plain(place, config), dtype_of(spec, config, place)
    if dtype == "auto":
        dtype = config.dtype if plain else None
    if sort.wide_rotary and dtype != torch.float32:
        return "its angles stay float32"
    settings = CheckpointSettings.of(config, {})
    return _Description(sort, dtype, plain, settings.architecture, settings.eos)


def _recalled(known: dict[str, Any]) -> _Description:
    """Return what an earlier load has read: transformers' config classes take seconds to import."""
    sort = DecoderSpec.from_json(known["spec"])
    module, name = known["tokenizer"]
    dtype = getattr(torch, known["dtype"])
    named = (str(module), str(name)) if module.partition(".")[0] == "transformers" else None
    return _Description(sort, dtype, True, known["architecture"], known["eos"], named)


class _Own:
    """A checkpoint on its way into our own decoder."""

    def __init__(
        self, spec: ModelSpec, place: Path, description: _Description, digest: str, known: dict[str, Any] | None
    ) -> None:
        self._spec, self._place, self._is, self._digest, self._known = spec, place, description, digest, known
        self._device = device_of(spec)
        self._wanted = spec.role == "target" and spec.numerics == "invariant"

    def load(self) -> tuple[Forest, HFCodec] | str:
        """Return model and codec; why transformers has to run it."""
        if self._known is not None and self._known["decoder"] is not None:
            return str(self._known["decoder"])
        with quiet():
            tokenizer = load_tokenizer(self._place, self._spec, self._is.tokenizer)
        theirs, dtype = None, self._is.dtype
        if self._is.plain:
            tensors, generation = tensors_of(self._place, self._spec), read_generation(self._place)
        else:  # pickles, or blocks that transformers makes plain weights
            theirs = self._stock()
            state = theirs.state_dict()
            tensors = {name: partial(state.__getitem__, name) for name in state}
            generation, dtype = theirs.generation_config.to_dict(), theirs.dtype
        assert dtype is not None
        settings = CheckpointSettings(self._is.architecture, self._is.eos, generation)
        source, reason = DecoderSource(self._is.sort, tensors, dtype, self._device), None
        head = read_head(self._place) if self._place.is_dir() else None
        if head is not None and self._spec.role == "target":
            raise trimmed_target(self._spec)
        for kernels in self._attempts():
            try:
                forest = decoder_forest(self._spec, source, settings, head, self._stock, kernels)
            except (KeyError, ValueError) as error:
                self._stock()  # says in its words what is wrong with the files
                reason = f"a tensor is not where it should be ({error})"
                break
            try:
                reason = self._verified(forest, theirs, kernels, type(tokenizer))
            except Exception as failed:
                if not kernels:
                    raise
                reason = f"a kernel fails ({_said(failed)})"  # at a width that was not tried
            if reason is None:
                return forest, HFCodec(tokenizer, eos_ids(forest.settings, tokenizer))
        assert reason is not None
        verdicts.keep(self._digest, {"decoder": reason})
        return reason

    def _keep(self, found: Mapping[str, object], forest: Forest, tokenizer: type) -> None:
        """Keep what was found, and what the checkpoint is."""
        name = str(forest.weights_dtype).removeprefix("torch.")
        what = {"spec": asdict(self._is.sort), "dtype": name, "plain": self._is.plain, "eos": self._is.eos}
        classes = {"architecture": self._is.architecture, "tokenizer": (tokenizer.__module__, tokenizer.__name__)}
        verdicts.keep(self._digest, {"decoder": None, **found, **what, **classes})

    def _stock(self) -> Any:
        """Return transformers' model of the checkpoint."""
        return load(replace(self._spec, quantize=None))[0]

    def _attempts(self) -> list[frozenset[str]]:
        """Sets of kernels of a GPU, the best one first; one without any elsewhere."""
        if self._known is not None:
            return [frozenset(self._known["kernels"])]
        if self._device.type != "cuda" or not self._spec.kernels or not available():
            return [frozenset()]
        from dsbd_cli.ops.triton.trial import faults

        allowed = frozenset(LAYER_KERNELS) - faults(self._device).keys()
        without = allowed - {"linear"}
        return [*dict.fromkeys((allowed, without, frozenset[str]()) if self._wanted else (without, frozenset[str]()))]

    def _verified(self, forest: Any, theirs: Any, kernels: frozenset[str], tokenizer: type) -> str | None:
        """Compare, pack and check a forest; return why it cannot serve."""
        known = self._known
        if known is None:
            theirs = self._stock() if theirs is None else theirs
            reason = differs(forest, theirs)
            del theirs
            if reason is not None:
                return reason
        if "linear" in kernels:
            forest.attention = _attention(forest, exact=True)
        try:
            tested = None
            if known is None and self._spec.quantize is not None:  # its limits are those of the checkpoint's rounding
                tested = _self_test(forest)
            outliers = pack(forest, self._spec, None if known is None else known.get("outliers"))
            if known is None:
                forest.tested = tested or _self_test(forest)
                found = _verdict(forest) if self._wanted else (verdicts.UNASKED, None)
                if found[0] is not None and "linear" in kernels:
                    return found[0]
                tested = forest.tested
                report = [tested.median_error, tested.largest_error, tested.limit]
                made = {"varies": found[0], "copies": found[1], "outliers": outliers, "tested": report}
                made["kernels"] = sorted(kernels)
                self._keep(made, forest, tokenizer)
            else:
                forest.tested, found = SelfTestReport(*known["tested"]), (known["varies"], known["copies"])
        except UnsupportedModelError as error:
            return str(error)
        if self._wanted and found[0] is not None and self._device.type == "cuda" and kernels:
            _attend_fast(forest)
        forest.trust(*found)
        return None


def _adapted(spec: ModelSpec) -> tuple[Forest, HFCodec]:
    """Return a model that transformers runs."""
    from dsbd_cli.models.load_adapted import load_adapted

    return load_adapted(spec)


def _self_test(forest: Forest) -> Any:
    from dsbd_cli.models.checks.selftest import self_test

    return self_test(forest)


def _verdict(forest: Forest) -> tuple[str | None, bool | None]:
    """Ask whether a node's logits depend on its company; a kernel that fails at the sizes of this model gives none."""
    from dsbd_cli.models.checks.invariance import check

    try:
        found = check(forest)
    except Exception as failed:
        if forest.attention is None:
            raise
        return f"a kernel fails ({_said(failed)})", None
    return found.varies, found.copies


def _attention(forest: Forest, *, exact: bool) -> Callable[..., Tensor] | None:
    """Return the kernel of attention, where it does what it should. exact: its bits do not depend on the drafts."""
    from dsbd_cli.ops.triton.attention import attention
    from dsbd_cli.ops.triton.trial import faults

    return None if "attention" in faults(forest.device) else partial(attention, exact=exact)


def _attend_fast(forest: Forest) -> None:
    """Have the kernel of attention serve long prompts, where the logits of a text stay what they are with it."""
    from dsbd_cli.models.checks.invariance import parting
    from dsbd_cli.models.verdicts import LIMITS

    forest.attention = _attention(forest, exact=False)
    if forest.attention is None:
        return
    try:
        error = parting(forest)
        fault = None if error <= LIMITS[forest.weights_dtype] else f"its logits are off by {error:.1g} of their spread"
    except Exception as failed:
        fault = f"the kernel fails ({_said(failed)})"
    if fault is not None:
        forest.attention = None
        forest.told = (*forest.told, f"torch's attention serves long prompts, too: with the kernel {fault}")


def _said(error: Exception) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())[:160]
