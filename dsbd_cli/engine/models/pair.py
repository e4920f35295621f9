"""Target and draft together: one vocabulary, each loaded and self-tested."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from dsbd_cli.config import ModelSpec
from dsbd_cli.engine.core.protocols import ForestModel
from dsbd_cli.engine.drafting import AnyDraft, BridgedDraft
from dsbd_cli.engine.models.forest import Forest
from dsbd_cli.engine.models.generation import settings_notes
from dsbd_cli.engine.models.load_model import load_model
from dsbd_cli.engine.models.tokenize import HFCodec
from dsbd_cli.errors import PairError

__all__ = ["LoadedPair", "check_pair", "load_pair", "markers"]

_SHOWN = 3


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


def load_pair(target: ModelSpec, draft: ModelSpec | None, *, bridged: bool = False, anew: bool = False) -> LoadedPair:
    """Load and self-test a target and, unless None, its draft, whose logits are made as wide as the target's.

    bridged: the two need not share a vocabulary, because drafts come through text; the draft's logits stay as they are.
    anew: make all checks, whatever an earlier load has found.
    Raises the ModelError family and UsageError of loader, selftest and check_pair.
    """
    model, codec = load_model(target, anew=anew)
    told = (*settings_notes(model.settings), *model.told)
    if draft is None:
        return LoadedPair(model, None, codec, _dtype_name(model), None, told=told)
    small, small_codec = load_model(draft, anew=anew)
    told = (*told, *(f"draft: {line}" for line in small.told))
    dtypes = _dtype_name(model), _dtype_name(small)
    _check_kinds(model, small, bridged=bridged)
    if bridged:
        return LoadedPair(
            model, BridgedDraft(small, small_codec, codec, markers(codec, small_codec)), codec, *dtypes, told=told
        )
    notes = check_pair(codec, small_codec, model.vocab_size, small.vocab_size)
    small.fit_width(model.vocab_size)
    if model.paired and small.paired:
        from dsbd_cli.engine.models.seq2seq import Seq2SeqForestModel

        assert isinstance(model, Seq2SeqForestModel)
        assert isinstance(small, Seq2SeqForestModel)
        if model.source_name != small.source_name or model.source_shape != small.source_shape:
            raise PairError("target and draft read sources of different forms: choose a draft of its family")
        if model.encoder_digest == small.encoder_digest:
            model.lead(small)
            notes += ("the draft's encoder is the target's: it reads each source once for both",)
    return LoadedPair(model, small, codec, *dtypes, notes, told)


def _check_kinds(target: Forest, draft: Forest, *, bridged: bool) -> None:
    """Both have an encoder, or neither has. Raises PairError."""
    paired = [model.paired for model in (target, draft)]
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


def _dtype_name(model: Forest) -> str:
    name = str(model.weights_dtype).removeprefix("torch.")
    return name if model.quantized is None else f"{model.quantized}+{name}"


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
