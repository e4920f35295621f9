"""Engines over models that the caller has loaded, and may go on training: no weight is copied or packed."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any
from weakref import WeakKeyDictionary

import torch

from dsbd_cli.config.checking import check_processor, check_value
from dsbd_cli.config.method import DEFAULT_BATCH_SIZE, MethodConfig, check_engine_options
from dsbd_cli.config.model import Numerics, OnTooLong
from dsbd_cli.engine.checks.captures import prove_captures
from dsbd_cli.engine.decoding.engine import Engine
from dsbd_cli.errors import UnsupportedModelError, UsageError
from dsbd_cli.models.checkpoints.generation import eos_ids
from dsbd_cli.models.checkpoints.vocabulary import check_pair
from dsbd_cli.models.checks.invariance import check
from dsbd_cli.models.checks.selftest import self_test
from dsbd_cli.models.tokenizer import HFCodec
from dsbd_cli.models.transformers_backend.attention import NAME as GROUPED
from dsbd_cli.models.transformers_backend.causal import CausalForestModel
from dsbd_cli.models.verdicts import Verdict
from dsbd_cli.ops.processor import current
from dsbd_cli.requests import EngineInfo

# results of the tests of a model: (dtype, device, attention) -> verdict on invariance, None where it was not tested
_verdicts: WeakKeyDictionary[object, dict[tuple[str, str, str], Verdict | None]] = WeakKeyDictionary()


def from_models(
    model: Any,
    tokenizer: Any,
    draft_model: Any = None,
    *,
    method: MethodConfig | None = None,
    batch_size: int | None = DEFAULT_BATCH_SIZE,
    on_too_long: OnTooLong = "error",
    log_steps: bool = False,
    cuda_graphs: bool | None = None,
    numerics: Numerics = "invariant",
) -> Engine:
    """Make an engine over loaded transformers models.

    Args:
        model: the target.
        tokenizer: its tokenizer.
        draft_model: a model with the same vocabulary, or None.
        method: as in `load`.
        batch_size: as in `load`.
        on_too_long: as in `load`.
        log_steps: as in `load`.
        cuda_graphs: as in `load`.
        numerics: as in ModelSpec.

    The weights are used where they are, so that the next request is decoded with the weights after a training step.
    Models in training mode are refused: call `eval()` first. The model's attention is replaced by one that supports
    trees; outside of this engine it computes what `sdpa` does. Nothing is packed, so on a CPU `load` is faster.

    Raises UsageError for settings that do not go together, UnsupportedModelError and PairError for models.
    """
    check_engine_options(method, batch_size, on_too_long, log_steps, cuda_graphs, None)
    check_value("numerics", numerics, Numerics)
    check_processor()
    for role, module in (("model", model), ("draft_model", draft_model)):
        if getattr(module, "training", False):
            raise UsageError(f"{role} is in training mode, where dropout acts: call its eval() first")
    method = (method or MethodConfig()).fit_draft(None if draft_model is None else type(draft_model).__name__)
    target = forest_of(model, "target", invariant=numerics == "invariant")
    codec = HFCodec(tokenizer, eos_ids(model, tokenizer))
    draft = None
    if draft_model is not None:
        draft = forest_of(draft_model, "draft")
        check_pair(codec, HFCodec(tokenizer, eos_ids(draft_model, tokenizer)), target.vocab_size, draft.vocab_size)
        draft.fit_width(target.vocab_size)
    info = EngineInfo(
        target=_name(model),
        draft=None if draft_model is None else _name(draft_model),
        dtype=str(target.dtype).removeprefix("torch."),
        device=str(target.device),
        draft_dtype=None if draft is None else str(draft.dtype).removeprefix("torch."),
        draft_device=None if draft is None else str(draft.device),
        processor=str(current()),
    )
    options = {"info": info, "log_steps": log_steps, "on_too_long": on_too_long, "cuda_graphs": cuda_graphs}
    engine = Engine(target, draft, codec, method, batch_size=batch_size, **options)  # type: ignore[arg-type]
    prove_captures(engine)
    return engine


def forest_of(model: Any, role: str, *, invariant: bool = False) -> CausalForestModel:
    """Return a live model as a forest model, tested once per model, dtype, device and attention. invariant: test too
    whether its numerics are invariant. Raises UsageError for what is no transformers model, UnsupportedModelError for
    other models."""
    config = getattr(model, "config", None)
    if config is None or not hasattr(model, "get_input_embeddings"):
        raise UsageError(f"{role} is a {type(model).__name__}, but must be a transformers model")
    if getattr(config, "is_encoder_decoder", False):
        raise UnsupportedModelError(
            f"{role} is a {config.model_type}, an encoder-decoder model: load it by name instead"
        )
    try:
        forest = CausalForestModel(model, _name(model))
        key = (str(forest.dtype), str(forest.device), str(getattr(config, "_attn_implementation", "")))
        verdicts = _verdicts.setdefault(model, {})
        if key not in verdicts:
            self_test(forest)
            verdicts[key] = None
        if invariant and verdicts[key] is None:
            verdicts[key] = check(forest)
    except UnsupportedModelError as error:
        raise UnsupportedModelError(f"{role} {_name(model)}: {error}") from error
    if invariant and (verdict := verdicts[key]) is not None:
        forest.trust(verdict.varies, verdict.copies)
    return forest


def _name(model: Any) -> str:
    return getattr(model, "name_or_path", "") or type(model).__name__


@contextlib.contextmanager
def borrow_models(*models: Any) -> Iterator[None]:
    """Put models in evaluation mode for the block, with an attention that supports trees. Afterwards they are as
    before, whatever was raised.

    Buffers that a forward replaced under inference mode (rotary frequencies that follow the length) are restored too,
    because a training step could not use the new ones.
    """
    with contextlib.ExitStack() as stack:
        for model in models:
            stack.enter_context(_borrow_model(model))
        yield


@contextlib.contextmanager
def _borrow_model(model: Any) -> Iterator[None]:
    modules = list(model.modules())
    modes = [module.training for module in modules]
    buffers = [(module, name, value) for module in modules for name, value in module._buffers.items()]
    attention = getattr(model.config, "_attn_implementation", None)
    marked = "stock_attention" in model.__dict__
    try:
        model.eval()
        if attention not in ("sdpa", "eager", GROUPED) and getattr(model, "_supports_sdpa", False):
            model.set_attn_implementation("sdpa")  # flash attention does not support trees
        yield
    finally:
        if getattr(model.config, "_attn_implementation", None) != attention:
            model.set_attn_implementation(attention)
        if not marked:
            model.__dict__.pop("stock_attention", None)
        for module, training in zip(modules, modes, strict=True):
            module.training = training
        for module, name, value in buffers:
            if isinstance(module._buffers.get(name), torch.Tensor) and module._buffers[name] is not value:
                module._buffers[name] = value
