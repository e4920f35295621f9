"""Target and draft together: one vocabulary, each loaded and self-tested."""

from __future__ import annotations

from dataclasses import dataclass

from dsbd_cli.engine.drafting.bridge.bridged import AnyDraft, BridgedDraft
from dsbd_cli.errors import PairError
from dsbd_cli.models.checkpoints.checkpoint import Checkpoint
from dsbd_cli.models.checkpoints.generation import settings_notes
from dsbd_cli.models.checkpoints.loader import check_dequantized
from dsbd_cli.models.checkpoints.vocabulary import check_pair, markers
from dsbd_cli.models.decoder.own_rows import OWN_IDS
from dsbd_cli.models.draft_heads.load import load_draft_head, names_draft_head
from dsbd_cli.models.forest_model import BaseForestModel
from dsbd_cli.models.load_model import load_model
from dsbd_cli.models.tokenizer import HFCodec


@dataclass(frozen=True, slots=True)
class LoadedPair:
    """A target, its draft (None without one) and the codec of the target.

    Attributes:
        target_dtype: torch's name without prefix: float32, bfloat16, float16; `int8+bfloat16` where linear layers are
            int8 and the rest is bfloat16, and `int4+bfloat16` or `gguf-q4_k+bfloat16` alike.
        draft_dtype: the same, None without a draft.
        differences: differences that do not matter for the result, for the user to read.
        notes: what the user should know: generation settings that are not applied, kernels of layers that are left out.
        draft_form: a description of a draft head or of a trimmed draft, None for other drafts.
    """

    target: BaseForestModel
    draft: AnyDraft | None
    codec: HFCodec
    target_dtype: str
    draft_dtype: str | None
    differences: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    draft_form: str | None = None


def load_pair(target: Checkpoint, draft: Checkpoint | None, *, bridged: bool = False, anew: bool = False) -> LoadedPair:
    """Load and self-test a target and, unless None, its draft, whose logits are made as wide as the target's.

    bridged: the two need not share a vocabulary, because drafts come through text; the draft's logits stay as they are.
    anew: make all checks, whatever an earlier load has found.
    Raises the ModelError family and UsageError of loader, selftest and check_pair.
    """
    check_dequantized(target, draft)
    loaded = load_model(target, anew=anew)
    model, codec, dtype = loaded.model, loaded.codec, _dtype_name(target, loaded.model)
    notes = (*settings_notes(model.settings), *loaded.report.notes)
    if draft is None:
        return LoadedPair(model, None, codec, dtype, None, notes=notes)
    if names_draft_head(draft):
        if bridged:
            raise PairError("--drafter bridge drafts through text, which a draft head does not write: drop one of them")
        head = load_draft_head(target, draft, model)
        return LoadedPair(model, head, codec, dtype, _dtype_name(draft, head), notes=notes, draft_form=head.form)
    loaded = load_model(draft, anew=anew)
    small, small_codec, dtypes = loaded.model, loaded.codec, (dtype, _dtype_name(draft, loaded.model))
    notes = (*notes, *(f"draft: {line}" for line in loaded.report.notes))
    _check_kinds(model, small, bridged=bridged)
    if bridged:
        bridge = BridgedDraft(small, small_codec, codec, markers(codec, small_codec))
        return LoadedPair(model, bridge, codec, *dtypes, notes=notes)
    differences = check_pair(codec, small_codec, model.vocab_size, small.vocab_size)
    small.fit_width(model.vocab_size)
    if model.has_encoder and small.has_encoder:
        from dsbd_cli.models.transformers_backend.seq2seq import Seq2SeqForestModel

        assert isinstance(model, Seq2SeqForestModel)
        assert isinstance(small, Seq2SeqForestModel)
        if (
            model.encoder_input_name != small.encoder_input_name
            or model.encoder_input_shape != small.encoder_input_shape
        ):
            raise PairError("target and draft read sources of different forms: choose a draft of its family")
        if model.encoder_digest == small.encoder_digest:
            model.share_encoder(small)
            differences += ("the draft's encoder is the target's: it reads each source once for both",)
    return LoadedPair(model, small, codec, *dtypes, differences, notes, _trimmed_form(small))


def _trimmed_form(draft: BaseForestModel) -> str | None:
    if draft.lm_head_ids is None:
        return None
    own = f"; {OWN_IDS}" if draft.own_ids_below else ""
    return f"{len(draft.lm_head_ids)} of {draft.vocab_size} tokens{own}"


def _check_kinds(target: BaseForestModel, draft: BaseForestModel, *, bridged: bool) -> None:
    """Raise PairError unless both models have an encoder or neither has, or where a bridge is to draft for an
    encoder-decoder model."""
    target_has, draft_has = target.has_encoder, draft.has_encoder
    if target_has != draft_has:
        with_encoder, other = ("the target", "the draft") if target_has else ("the draft", "the target")
        raise PairError(f"{with_encoder} has an encoder and {other} has none: choose a draft of the target's kind")
    if bridged and target_has:
        raise PairError("--drafter bridge takes decoder-only models: choose a draft with the target's vocabulary")


def _dtype_name(checkpoint: Checkpoint, model: BaseForestModel) -> str:
    spec, name = checkpoint.spec, str(model.weights_dtype).removeprefix("torch.")
    form = spec.quantize if spec.quantizes else model.stored_form
    return name if form is None else f"{form}+{name}"
