"""One model, in stages: locate, config and tokenizer, weights, packing, checks. Each stage has its own errors.

Our own decoder serves what it knows (decoder/), transformers everything else.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dsbd_cli.config import ModelSpec
from dsbd_cli.engine.models import verdicts
from dsbd_cli.engine.models.checkpoint_checks import stored_bytes
from dsbd_cli.engine.models.decoder.load import DecoderSource, decoder_forest, differs, pack, sort_of, tensors_of
from dsbd_cli.engine.models.decoder.spec import DecoderSpec
from dsbd_cli.engine.models.forest import Forest
from dsbd_cli.engine.models.generation import CheckpointSettings
from dsbd_cli.engine.models.head import read_head
from dsbd_cli.engine.models.hub import locate
from dsbd_cli.engine.models.loader import (
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
from dsbd_cli.engine.models.tokenize import HFCodec
from dsbd_cli.errors import UnsupportedModelError
from dsbd_cli.kernels import available

__all__ = ["load_model", "trimmed_target"]

LAYER_KERNELS = ("norm", "gated", "rotate", "linear")
TOLD_BYTES = 64 << 20  # loading less takes no time that needs a line
UNASKED = "nobody asked for the work that it takes"

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
    with quiet():
        place = locate(spec)
        config = load_config(place, spec)
    sort = sort_of(spec, config)
    if isinstance(sort, DecoderSpec) and sort.wide_rotary and dtype_of(spec, config, place) != torch.float32:
        sort = "its angles stay float32"
    if isinstance(sort, str):
        return _adapted(spec)
    found = _Own(spec, place, config, sort, anew=anew).load()
    if isinstance(found, str):
        forest, codec = _adapted(spec)
        forest.told = (*forest.told, f"the {spec.role} runs through transformers: in our own decoder {found}")
        return forest, codec
    return found


class _Own:
    """A checkpoint on its way into our own decoder."""

    def __init__(self, spec: ModelSpec, place: Path, config: Any, sort: DecoderSpec, *, anew: bool) -> None:
        self._spec, self._place, self._config, self._sort = spec, place, config, sort
        self._device = device_of(spec)
        self._wanted = spec.role == "target" and spec.numerics == "invariant"
        check_quantize(spec, config)
        self._digest = verdicts.fingerprint(spec, place)
        self._known = None if anew else verdicts.kept(self._digest)

    def load(self) -> tuple[Forest, HFCodec] | str:
        """Return model and codec; why transformers has to run it."""
        if self._known is not None and self._known["decoder"] is not None:
            return str(self._known["decoder"])
        with quiet():
            tokenizer = load_tokenizer(self._place, self._spec)
        theirs: Any = None
        if is_plain(self._place, self._config):
            tensors = tensors_of(self._place, self._spec)
            settings = CheckpointSettings.read(self._place, self._config)
            dtype = dtype_of(self._spec, self._config, self._place)
        else:  # pickles, or blocks that transformers makes plain weights
            theirs = self._stock()
            state = theirs.state_dict()
            tensors = {name: partial(state.__getitem__, name) for name in state}
            settings = CheckpointSettings(theirs.config, theirs.generation_config, type(theirs).__name__)
            dtype = theirs.dtype
        if dtype == "auto":
            dtype = self._config.dtype or torch.float32
        source, reason = DecoderSource(self._sort, tensors, dtype, self._device), None
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
            reason = self._verified(forest, theirs, kernels)
            if reason is None:
                return forest, HFCodec(tokenizer, eos_ids(forest.settings, tokenizer))
        assert reason is not None
        verdicts.keep(self._digest, {"decoder": reason})
        return reason

    def _stock(self) -> Any:
        """Return transformers' model of the checkpoint."""
        return load(replace(self._spec, quantize=None))[0]

    def _attempts(self) -> list[frozenset[str]]:
        """Sets of kernels of a GPU, the best one first; one without any elsewhere."""
        if self._device.type != "cuda" or not self._spec.kernels or not available():
            return [frozenset()]
        from dsbd_cli.kernels.trial import faults

        allowed = frozenset(LAYER_KERNELS) - faults(self._device).keys()
        without = allowed - {"linear"}
        return [*dict.fromkeys((allowed, without, frozenset[str]()) if self._wanted else (without, frozenset[str]()))]

    def _verified(self, forest: Any, theirs: Any, kernels: frozenset[str]) -> str | None:
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
                found = _verdict(forest) if self._wanted else (UNASKED, None)
                if found[0] is not None and "linear" in kernels:
                    return found[0]
                verdicts.keep(self._digest, {
                    "decoder": None, "varies": found[0], "copies": found[1], "outliers": outliers,
                    "tested": [forest.tested.median_error, forest.tested.largest_error, forest.tested.limit],
                })  # fmt: skip
            else:
                forest.tested, found = _report(known["tested"]), (known["varies"], known["copies"])
        except UnsupportedModelError as error:
            return str(error)
        if self._wanted and found[0] is not None and self._device.type == "cuda" and kernels:
            _attend_fast(forest)
        forest.trust(*found)
        return None


def _adapted(spec: ModelSpec) -> tuple[Forest, HFCodec]:
    """Return a model that transformers runs."""
    from dsbd_cli.engine.models.adapted_load import load_adapted

    return load_adapted(spec)


def _self_test(forest: Forest) -> Any:
    from dsbd_cli.engine.models.selftest import self_test

    return self_test(forest)


def _report(numbers: list[float]) -> Any:
    from dsbd_cli.engine.models.selftest import SelfTestReport

    return SelfTestReport(*numbers)


def _verdict(forest: Forest) -> tuple[str | None, bool | None]:
    """Ask whether a node's logits depend on its company; a kernel that fails at the sizes of this model gives none."""
    from dsbd_cli.engine.models.invariance import check

    try:
        found = check(forest)
    except Exception as failed:
        if forest.attention is None:
            raise
        return f"a kernel fails ({_said(failed)})", None
    return found.varies, found.copies


def _attention(forest: Forest, *, exact: bool) -> Callable[..., Tensor] | None:
    """Return the kernel of attention, where it does what it should. exact: its bits do not depend on the drafts."""
    from dsbd_cli.kernels.attention import attention
    from dsbd_cli.kernels.trial import faults

    return None if "attention" in faults(forest.device) else partial(attention, exact=exact)


def _attend_fast(forest: Forest) -> None:
    """Have the kernel of attention serve long prompts, where the logits of a text stay what they are with it."""
    from dsbd_cli.engine.models.invariance import parting
    from dsbd_cli.engine.models.selftest import LIMITS

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


def trimmed_target(spec: ModelSpec) -> UnsupportedModelError:
    """Return the refusal of a target whose head lacks tokens."""
    return UnsupportedModelError(f"target model {spec.source!r} is a trimmed draft: only a draft may lack tokens")
