"""Load a model that transformers runs, and its codec. On the CPU its products are packed. It is checked as every model
is."""

from __future__ import annotations

from typing import Any

import torch

from dsbd_cli.errors import ModelError, UnsupportedModelError, UsageError
from dsbd_cli.models import verdicts
from dsbd_cli.models.checkpoints.checkpoint import Checkpoint
from dsbd_cli.models.checkpoints.lm_head import installed, trimmed_target
from dsbd_cli.models.checkpoints.loader import PICTURE_MODELS, load, load_network, load_preprocessor, too_small
from dsbd_cli.models.checks.invariance import check
from dsbd_cli.models.checks.selftest import self_test
from dsbd_cli.models.forest_model import Loaded, LoadReport, SelfTestReport, unsupported
from dsbd_cli.models.tensor_parallel import Ranks, ShardedForestModel, check_ranks, load_slice
from dsbd_cli.models.tokenizer import HFCodec
from dsbd_cli.models.transformers_backend.causal import CausalForestModel
from dsbd_cli.models.transformers_backend.encoder_inputs import Seq2SeqCodec
from dsbd_cli.models.transformers_backend.patching import pack, plain_weights, quantize
from dsbd_cli.models.transformers_backend.seq2seq import Seq2SeqForestModel, encoder_digest
from dsbd_cli.models.verdicts import Verdict

LEAST_NOTED = 0.05  # share of the weights that stay as they are from which on the user is told


def load_transformers(checkpoint: Checkpoint) -> Loaded:
    """Return a model that transformers runs and its codec. Where `invariant` numerics are asked of a target, they are
    checked.

    Raises ModelError, UnsupportedModelError and UsageError.
    """
    spec = checkpoint.spec
    model, tokenizer, ranks = _network(checkpoint)
    # a draft only proposes: what it computes cannot reach the text
    wanted = spec.role == "target" and spec.numerics == "invariant"
    try:
        with unsupported(type(model).__name__):
            forest = _forest(checkpoint, model, ranks)
        forest.keep_recurrent_states_in(torch.float64 if wanted else torch.float32)
        tested = _tested(forest, checkpoint)
        left: tuple[str, ...] = ()
        if spec.quantizes:  # after the test, whose limits are those of the checkpoint's own rounding
            left = _quantize(forest, checkpoint, str(spec.quantize))
        with unsupported(forest.architecture):
            verdict = check(forest) if wanted else Verdict(verdicts.UNASKED)
        notes = left + forest.trust(verdict.varies, verdict.copies)
        if not forest.invariant:
            forest.keep_recurrent_states_in(torch.float32)
    except UnsupportedModelError as error:
        raise UnsupportedModelError(f"{checkpoint.name}: {error}") from error
    if trimmed := installed(model):
        if spec.role == "target":
            raise trimmed_target(spec)
        forest.spread(*trimmed)
    ends = checkpoint.end_tokens(model, tokenizer)
    if isinstance(forest, Seq2SeqForestModel):
        codec: HFCodec = _source_codec(checkpoint, model, tokenizer, ends, forest.vocab_size)
    else:
        codec = HFCodec(tokenizer, ends)
    return Loaded(forest, codec, LoadReport(tested, notes))


def _tested(forest: CausalForestModel | Seq2SeqForestModel, checkpoint: Checkpoint) -> SelfTestReport:
    """Run the self-test and return its report. Where a model in half precision fails, the reason may be rounding: then
    the same weights are loaded and tested in float32.

    Raises UnsupportedModelError where they fail, too, or cannot be loaded.
    """
    try:
        return self_test(forest)
    except UnsupportedModelError as failed:
        if forest.weights_dtype == torch.float32 or checkpoint.spec.tensor_parallel != 1:
            raise
        try:
            wide = checkpoint.like(dtype="float32")
            return self_test(_forest(wide, load_network(wide), None))
        except Exception:  # a model of twice the bytes may not fit into memory, either
            raise failed from None


def _forest(checkpoint: Checkpoint, model: Any, ranks: Ranks | None) -> CausalForestModel | Seq2SeqForestModel:
    """Return transformers' model over a packed forest. On the CPU its products are packed, each in place of its plain
    weights."""
    spec = checkpoint.spec
    if ranks is not None:
        return ShardedForestModel(model, spec.source, ranks)
    has_encoder = bool(getattr(model.config, "is_encoder_decoder", False))
    if has_encoder:
        _check_source(model)
    digest = encoder_digest(model) if has_encoder else None  # of plain weights
    packed = _on_cpu(model) and not spec.quantizes and pack(model) > 0
    stock = (lambda: load_network(checkpoint)) if packed or spec.quantizes else None
    if has_encoder:
        return Seq2SeqForestModel(model, spec.source, stock, digest)
    return CausalForestModel(model, spec.source, stock)


def _check_source(model: Any) -> None:
    """Raise UnsupportedModelError for a model with an encoder whose source is not made here, or whose answer is no
    text."""
    kind, source = model.config.model_type, model.main_input_name
    if source != "input_ids" and kind not in ("whisper", *PICTURE_MODELS):
        raise UnsupportedModelError(f"it reads {source}, which are made from files for Whisper and for pictures alone")
    try:
        model.get_input_embeddings()
    except NotImplementedError:
        raise UnsupportedModelError(f"a {kind} has no table of tokens, so that its answer is no text") from None


def _source_codec(
    checkpoint: Checkpoint, model: Any, tokenizer: Any, ends: tuple[int, ...], width: int
) -> Seq2SeqCodec:
    """Return the codec of an encoder-decoder model for text, speech or pictures. width: ids of the decoder. Raises
    ModelError where the checkpoint names no first token of answers."""
    sources = (model.generation_config, model.config)
    named = [getattr(source, name, None) for source in sources for name in ("decoder_start_token_id", "bos_token_id")]
    start = next((token for token in named if isinstance(token, int)), None)
    if start is None:
        message = "the checkpoint names no decoder_start_token_id: its answers have no first token"
        raise ModelError(f"{checkpoint.name}: {message}")
    if not 0 <= start < width:
        message = f"answers begin with token {start} (decoder_start_token_id), but its decoder has {width} ids"
        raise ModelError(f"{checkpoint.name}: {message}")
    if model.config.model_type == "whisper":
        from dsbd_cli.models.transformers_backend.speech import WhisperCodec

        return WhisperCodec(tokenizer, ends, start, model, load_preprocessor(checkpoint, pictures=False))
    if model.config.model_type in PICTURE_MODELS:
        from dsbd_cli.models.transformers_backend.pictures import PictureCodec

        return PictureCodec(tokenizer, ends, start, model, load_preprocessor(checkpoint, pictures=True))
    return Seq2SeqCodec(tokenizer, ends, start, model)


def _on_cpu(model: Any) -> bool:
    """Return whether a model lies on the CPU as a whole and accelerate does not move its parts."""
    hooked = any(hasattr(module, "_hf_hook") for module in model.modules())
    return not hooked and {parameter.device.type for parameter in model.parameters()} == {"cpu"}


def _quantize(
    forest: CausalForestModel | Seq2SeqForestModel, checkpoint: Checkpoint, weight_format: str
) -> tuple[str, ...]:
    """Quantize the large linear layers to `int8` or `int4`, and pack the small ones. Return a line for the user where
    many weights stay as they are. Raises UsageError where all layers are small."""
    if not quantize(forest.module, forest.calibrate, weight_format):
        raise too_small(checkpoint.spec, f"the {checkpoint.name}")
    share, kinds = plain_weights(forest.module)  # before the others are packed, whose weights are no parameters then
    pack(forest.module)
    forest.layers_replaced()
    if share < LEAST_NOTED:
        return ()
    dtype = str(forest.weights_dtype).removeprefix("torch.")
    role = checkpoint.spec.role
    return (f"{share:.0%} of the {role}'s weights stay in {dtype}, not {weight_format}: those of {', '.join(kinds)}",)


def _network(checkpoint: Checkpoint) -> tuple[Any, Any, Ranks | None]:
    """Return model and tokenizer, and the other ranks of a model that is split (None where it is not)."""
    spec = checkpoint.spec
    if spec.tensor_parallel == 1:
        return *load(checkpoint), None
    if getattr(checkpoint.config, "is_encoder_decoder", False):
        parts = spec.tensor_parallel
        message = f"tensor_parallel is {parts}, but the {spec.role} has an encoder, which is not split: drop it"
        raise UsageError(message, field="tensor_parallel", value=parts)
    check_ranks(checkpoint)
    ranks = Ranks(spec)
    try:
        return *load_slice(checkpoint), ranks
    except BaseException:
        ranks.close()
        raise
