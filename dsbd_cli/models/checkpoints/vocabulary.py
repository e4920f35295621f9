"""Check that the tokenizers of two models have one vocabulary."""

from __future__ import annotations

from dsbd_cli.errors import PairError
from dsbd_cli.models.tokenizer import HFCodec

_SHOWN = 3


def check_pair(target: HFCodec, draft: HFCodec, target_width: int, draft_width: int) -> tuple[str, ...]:
    """Require one vocabulary: every id that both tokenizers name, and both models can emit, is the same token.

    Widths of the logits may differ by padding ids, and one side may lack added tokens. Returns notes on differences
    that are harmless. Raises PairError with the first few differing tokens.
    """
    ours, theirs = ({index: token for token, index in codec.vocabulary.items()} for codec in (target, draft))
    spare = {*target.added_tokens, *draft.added_tokens}
    excused = {i for i in spare if i not in ours or i not in theirs}
    named = sorted(ours.keys() | theirs.keys())
    wrong = [i for i in named if ours.get(i) != theirs.get(i) and i not in excused]
    if wrong:
        raise PairError(_differing(wrong, ours, theirs))
    notes = _width_notes(ours, spare, target_width, draft_width)
    if target.eos_ids != draft.eos_ids:
        used, left = (", ".join(map(str, codec.eos_ids)) or "none" for codec in (target, draft))
        notes += (f"end tokens differ: the target's ({used}) are used, not the draft's ({left})",)
    return notes


def markers(target: HFCodec, draft: HFCodec) -> dict[int, int]:
    """Return the special tokens that both tokenizers have by the same name: the target's id -> the draft's."""
    theirs = {token.content: index for index, token in draft.added_tokens.items() if token.special}
    ours = target.added_tokens.items()
    return {index: theirs[token.content] for index, token in ours if token.special and token.content in theirs}


def _differing(wrong: list[int], ours: dict[int, str], theirs: dict[int, str]) -> str:
    def name(token: str | None, role: str) -> str:
        return f"nothing in the {role}" if token is None else f"{token!r} in the {role}"

    shown = "; ".join(f"id {i}: {name(ours.get(i), 'target')}, {name(theirs.get(i), 'draft')}" for i in wrong[:_SHOWN])
    return (
        f"target and draft have different vocabularies: {shown}; {len(wrong)} differ; "
        "choose a draft of its family, or --drafter bridge, which drafts through text"
    )


def _width_notes(named: dict[int, str], spare: set[int], target_width: int, draft_width: int) -> tuple[str, ...]:
    """Return a note where the widths of the logits differ. Raises PairError when ordinary tokens of the target lie
    beyond one model's logits."""
    needed = max((i for i in named if i not in spare), default=-1) + 1
    for role, width in (("target", target_width), ("draft", draft_width)):
        if width < needed:
            raise PairError(f"the {role} has {width} logits for a vocabulary of {needed} tokens: choose another {role}")
    if target_width == draft_width:
        return ()
    return (f"logits differ in padding only: {target_width} in the target, {draft_width} in the draft",)
