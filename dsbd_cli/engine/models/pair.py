"""Target and draft together: one vocabulary, each loaded and self-tested."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from dsbd_cli.config import ModelSpec
from dsbd_cli.engine.core.protocols import ForestModel
from dsbd_cli.engine.drafting import AnyDraft, BridgedDraft
from dsbd_cli.engine.models.adapter import TransformersForest
from dsbd_cli.engine.models.causal import CausalForestModel
from dsbd_cli.engine.models.checkpoint_checks import stored_bytes
from dsbd_cli.engine.models.fused import Fused, LayerKernels, fuse, layer_kernels
from dsbd_cli.engine.models.generation import settings_notes
from dsbd_cli.engine.models.head import installed
from dsbd_cli.engine.models.hub import locate
from dsbd_cli.engine.models.invariance import Verdict, check, parting
from dsbd_cli.engine.models.loader import eos_ids, load, load_config, load_extractor
from dsbd_cli.engine.models.packing import pack
from dsbd_cli.engine.models.quantize import LEAST_WEIGHTS, quantize
from dsbd_cli.engine.models.ranks import Ranks, ShardedForestModel, check_ranks, load_slice
from dsbd_cli.engine.models.selftest import LIMITS, SelfTestReport, self_test
from dsbd_cli.engine.models.seq2seq import Seq2SeqForestModel, encoder_digest
from dsbd_cli.engine.models.sources import make_source_codec
from dsbd_cli.engine.models.tokenize import HFCodec
from dsbd_cli.errors import PairError, UnsupportedModelError, UsageError
from dsbd_cli.kernels import available
from dsbd_cli.kernels.trial import faults

__all__ = ["LoadedPair", "check_pair", "load_model", "load_pair", "markers", "trimmed_target"]

TOLD_BYTES = 64 << 20  # loading less takes no time that needs a line

_SHOWN = 3

_logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class LoadedPair:
    """A target, its draft (None without one) and the codec of the target.

    Attributes:
        target_dtype: torch's name without prefix: float32, bfloat16, float16; `int8+bfloat16` where linear layers are
            int8 and the rest is bfloat16.
        draft_dtype: the same, None without a draft.
        notes: differences that do not matter for the result, for the user to read.
        told: what the user should know: generation settings that are not done, kernels of layers that are left out.
    """

    target: ForestModel
    draft: AnyDraft | None
    codec: HFCodec
    target_dtype: str
    draft_dtype: str | None
    notes: tuple[str, ...] = ()
    told: tuple[str, ...] = ()


def check_pair(target: HFCodec, draft: HFCodec, target_width: int, draft_width: int) -> tuple[str, ...]:
    """Require one vocabulary: every id that both tokenizers name, and both models can emit, is the same token.

    Widths of the logits may differ by padding ids, and one side may lack added tokens. Returns notes on differences
    that are harmless. Raises PairError with the first few differing tokens.
    """
    ours, theirs = _tokens(target), _tokens(draft)
    spare = _added(target) | _added(draft)
    excused = {i for i in spare if i not in ours or i not in theirs}
    named = sorted(ours.keys() | theirs.keys())
    wrong = [i for i in named if ours.get(i) != theirs.get(i) and i not in excused]
    if wrong:
        raise PairError(_differing(wrong, ours, theirs))
    notes = _width_notes(ours, spare, target_width, draft_width)
    if target.eos_ids != draft.eos_ids:
        used, left = _ids(target.eos_ids), _ids(draft.eos_ids)
        notes += (f"end tokens differ: the target's ({used}) are used, not the draft's ({left})",)
    return notes


def load_pair(target: ModelSpec, draft: ModelSpec | None, *, bridged: bool = False) -> LoadedPair:
    """Load and self-test a target and, unless None, its draft, whose logits are made as wide as the target's.

    bridged: the two need not share a vocabulary, because drafts come through text; the draft's logits stay as they are.
    Raises the ModelError family and UsageError of loader, selftest and check_pair.
    """
    model, codec = load_model(target)
    told = (*settings_notes(model.module), *model.told)
    if draft is None:
        return LoadedPair(model, None, codec, _dtype_name(model), None, told=told)
    small, small_codec = load_model(draft)
    told = (*told, *(f"draft: {line}" for line in small.told))
    dtypes = _dtype_name(model), _dtype_name(small)
    _check_kinds(model, small, bridged=bridged)
    if bridged:
        return LoadedPair(
            model, BridgedDraft(small, small_codec, codec, markers(codec, small_codec)), codec, *dtypes, told=told
        )
    notes = check_pair(codec, small_codec, model.vocab_size, small.vocab_size)
    small.fit_width(model.vocab_size)
    if isinstance(model, Seq2SeqForestModel) and isinstance(small, Seq2SeqForestModel):
        if model.source_name != small.source_name or model.source_shape != small.source_shape:
            raise PairError("target and draft read sources of different forms: choose a draft of its family")
        if model.encoder_digest == small.encoder_digest:
            model.lead(small)
            notes += ("the draft's encoder is the target's: it reads each source once for both",)
    return LoadedPair(model, small, codec, *dtypes, notes, told)


def _check_kinds(target: TransformersForest, draft: TransformersForest, *, bridged: bool) -> None:
    """Both have an encoder, or neither has. Raises PairError."""
    paired = [isinstance(model, Seq2SeqForestModel) for model in (target, draft)]
    if paired[0] != paired[1]:
        one, other = ("the target", "the draft") if paired[0] else ("the draft", "the target")
        raise PairError(f"{one} has an encoder and {other} has none: choose a draft of the target's kind")
    if bridged and paired[0]:
        raise PairError("--drafter bridge takes decoder-only models: choose a draft with the target's vocabulary")


def markers(target: HFCodec, draft: HFCodec) -> dict[int, int]:
    """Special tokens that both tokenizers have, by name: the target's id -> the draft's."""
    theirs = {token.content: index for index, token in draft.tokenizer.added_tokens_decoder.items() if token.special}
    ours = target.tokenizer.added_tokens_decoder.items()
    return {index: theirs[token.content] for index, token in ours if token.special and token.content in theirs}


def _dtype_name(model: TransformersForest) -> str:
    name = str(model.weights_dtype).removeprefix("torch.")
    return name if model.quantized is None else f"{model.quantized}+{name}"


def load_model(spec: ModelSpec) -> tuple[TransformersForest, HFCodec]:
    """One model, its weights packed where it runs on the CPU, self-tested, and its codec. A target that is to be
    `invariant` is asked whether it is. Of a large one a line is logged before and after."""
    size, began = stored_bytes(locate(spec)), time.monotonic()
    if size < TOLD_BYTES:
        return _load_model(spec)
    _logger.info("loading %s (%s)", spec.source, _size(size))
    loaded = _load_model(spec)
    _logger.info("loaded %s in %.0f s", spec.source, time.monotonic() - began)
    return loaded


def _size(count: int) -> str:
    return f"{count / 1e9:.1f} GB" if count >= 1e9 else f"{count / 1e6:.0f} MB"


def _load_model(spec: ModelSpec) -> tuple[TransformersForest, HFCodec]:
    model, tokenizer, ranks = _loaded(spec)
    paired = bool(getattr(model.config, "is_encoder_decoder", False))
    digest = encoder_digest(model) if paired else None
    try:
        fused = Fused()
        # a draft only proposes: what it computes cannot reach the text
        wanted = spec.role == "target" and spec.numerics == "invariant"
        if ranks is not None:
            forest: TransformersForest = ShardedForestModel(model, spec.source, ranks)
        else:
            fused = Fused(packed=_pack(model, spec, ())) if paired else _fused(model, spec, exact=wanted)
            packed = spec.quantize is not None or fused.packed > 0
            kind = Seq2SeqForestModel if paired else CausalForestModel
            forest = kind(model, spec.source, stock=(lambda: load(spec)[0]) if packed or fused.counts else None)
        if "linear" in fused.counts:
            forest.attention = _attention(forest, exact=True)
        forest.keep_states_in(torch.float64 if wanted else torch.float32)
        forest.tested, forest.fused = _tested(forest, fused), fused
        if spec.quantize is not None:  # after the test, whose limits are those of the checkpoint's own rounding
            _quantize(forest, spec)
        found = _check(forest) if wanted else Verdict("nobody asked for the work that it takes")
        if found.varies is not None and "linear" in fused.counts:  # its work would be for nothing
            fused.undo()
            fused, forest.attention = _fused(model, spec, exact=False), None
            forest.tested, forest.fused = _tested(forest, fused), fused
        if fused.undone:
            forest.told = ("its layers run without kernels: with them a check at load fails",)
        if spec.role == "target" and found.varies is not None and not paired and _gpu(model, spec) is not None:
            _attend_fast(forest)
        forest.trust(found)
        if not forest.invariant:
            forest.keep_states_in(torch.float32)
    except UnsupportedModelError as error:
        raise UnsupportedModelError(f"{spec.role} model {spec.source!r}: {error}") from error
    if trimmed := installed(model):
        if spec.role == "target":
            raise trimmed_target(spec)
        forest.spread(*trimmed)
    ends = eos_ids(model, tokenizer)
    if isinstance(forest, Seq2SeqForestModel):
        forest.encoder_digest = digest
        codec = make_source_codec(model, tokenizer, ends, lambda: load_extractor(locate(spec), spec))
        return forest, codec
    return forest, HFCodec(tokenizer, ends)


def _fused(model: Any, spec: ModelSpec, *, exact: bool) -> Fused:
    """The kernels of layers put to work, where the model lies whole on one GPU or on the CPU. exact: those whose rows
    do not depend on each other take the place of the library's products on a GPU."""
    device = _gpu(model, spec)
    if device is not None:
        return fuse(model, layer_kernels(device, {*faults(device), *(() if exact else ("linear",))}))
    kernels = LayerKernels(None, None, None)
    hooked = any(hasattr(module, "_hf_hook") for module in model.modules())  # accelerate's, which are forwards too
    if not hooked and {parameter.device.type for parameter in model.parameters()} == {"cpu"}:
        kernels = layer_kernels(torch.device("cpu"))
    return fuse(model, kernels, partial(_pack, model, spec))


def _pack(model: Any, spec: ModelSpec, joined: Collection[tuple[nn.Module, Sequence[str]]]) -> int:
    """The products are packed, but those that are to become int8 ones."""
    return 0 if spec.quantize is not None else pack(model, joined)


def _gpu(model: Any, spec: ModelSpec) -> torch.device | None:
    """The GPU on which the model lies whole, where kernels may run; else None."""
    devices = {parameter.device for parameter in model.parameters()}
    if not spec.kernels or not available() or len(devices) != 1 or (device := devices.pop()).type != "cuda":
        return None
    return device


def _attention(forest: TransformersForest, *, exact: bool) -> Callable[..., Tensor] | None:
    """The kernel of attention, where it does what it should. exact: its bits do not depend on the drafts."""
    from dsbd_cli.kernels.attention import attention

    return None if "attention" in faults(forest.device) else partial(attention, exact=exact)


def _attend_fast(forest: TransformersForest) -> None:
    """The kernel of attention serves long prompts, where the logits of a text stay what they are with it."""
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


def _check(forest: TransformersForest) -> Verdict:
    """As check; a kernel that fails at the sizes of this model gives no bits at all."""
    try:
        return check(forest)
    except Exception as failed:
        if forest.attention is None:
            raise
        return Verdict(f"a kernel fails ({_said(failed)})")


def _said(error: Exception) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())[:160]


def _tested(forest: TransformersForest, fused: Fused) -> SelfTestReport:
    """The check at load; where it fails with fused layers, or one of them cannot run, they are given up, and it is made
    again."""
    try:
        return self_test(forest)
    except Exception:
        if not fused.counts:
            raise
    fused.undo()
    return self_test(forest)


def _quantize(forest: TransformersForest, spec: ModelSpec) -> None:
    """The linear layers become int8 ones, but small ones, which are packed. Raises UsageError where all are small."""
    if not quantize(forest.module, forest.calibrate):
        reason = (
            f"the {spec.role} model {spec.source!r} has no linear layer of {LEAST_WEIGHTS} weights or more: drop it"
        )
        raise UsageError(f"quantize is {spec.quantize}, but {reason}", field="quantize", value=spec.quantize)
    pack(forest.module, () if forest.fused is None else forest.fused.joined)
    forest.layers_replaced()
    forest.quantized = spec.quantize


def _loaded(spec: ModelSpec) -> tuple[Any, Any, Ranks | None]:
    """Model and tokenizer, and the other ranks of a model that is split."""
    if spec.tensor_parallel == 1:
        return *load(spec), None
    if getattr(load_config(locate(spec), spec), "is_encoder_decoder", False):
        parts = spec.tensor_parallel
        message = f"tensor_parallel is {parts}, but the {spec.role} has an encoder, which is not split: drop it"
        raise UsageError(message, field="tensor_parallel", value=parts)
    check_ranks(spec)
    ranks = Ranks(spec)
    try:
        return *load_slice(spec), ranks
    except BaseException:
        ranks.close()
        raise


def trimmed_target(spec: ModelSpec) -> UnsupportedModelError:
    """The refusal of a target whose head lacks tokens."""
    return UnsupportedModelError(f"target model {spec.source!r} is a trimmed draft: only a draft may lack tokens")


def _tokens(codec: HFCodec) -> dict[int, str]:
    return {index: token for token, index in codec.tokenizer.get_vocab().items()}


def _added(codec: HFCodec) -> set[int]:
    return set(codec.tokenizer.added_tokens_decoder)


def _differing(wrong: list[int], ours: dict[int, str], theirs: dict[int, str]) -> str:
    def name(token: str | None, role: str) -> str:
        return f"nothing in the {role}" if token is None else f"{token!r} in the {role}"

    shown = "; ".join(f"id {i}: {name(ours.get(i), 'target')}, {name(theirs.get(i), 'draft')}" for i in wrong[:_SHOWN])
    return (
        f"target and draft have different vocabularies: {shown}; {len(wrong)} differ; "
        "choose a draft of its family, or --drafter bridge, which drafts through text"
    )


def _width_notes(named: dict[int, str], spare: set[int], target_width: int, draft_width: int) -> tuple[str, ...]:
    """Raises PairError when ordinary tokens of the target lie beyond one model's logits."""
    needed = max((i for i in named if i not in spare), default=-1) + 1
    for role, width in (("target", target_width), ("draft", draft_width)):
        if width < needed:
            raise PairError(f"the {role} has {width} logits for a vocabulary of {needed} tokens: choose another {role}")
    if target_width == draft_width:
        return ()
    return (f"logits differ in padding only: {target_width} in the target, {draft_width} in the draft",)


def _ids(ids: Sequence[int]) -> str:
    return ", ".join(map(str, ids)) or "none"
