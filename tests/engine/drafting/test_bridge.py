"""Drafts in another vocabulary: the texts are those of no draft, whatever is cut where; and drafts are of use."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

from dsbd_cli.config.method import MethodConfig
from dsbd_cli.config.sampling import SamplingConfig
from dsbd_cli.engine.decoding.engine import Engine
from dsbd_cli.engine.drafting.bridge.bridged import BridgedDraft
from dsbd_cli.engine.drafting.bridge.drafter import BridgeDrafter
from dsbd_cli.engine.protocols import ForestInput
from dsbd_cli.errors import UsageError
from dsbd_cli.models.checkpoints.vocabulary import markers
from dsbd_cli.ops.interface import Ops
from dsbd_cli.requests import Request, RequestResult
from tests.helpers.bridged import EMOJI, TextModel, codec
from tests.helpers.checkpoints import CHAT, byte_level, wrap

PROMPTS = ["The quick br", "select name, co", EMOJI[:3], "Schöne Grü", EMOJI + " ", "東", "👩‍👩‍👧 e", "\t", "<s>"]


def bridged(target: str, draft: str, model: Any = None) -> BridgedDraft:
    ours, theirs = codec(target), codec(draft)
    return BridgedDraft(model or TextModel(draft), theirs, ours, markers(ours, theirs))


def decode(
    target: str, draft: BridgedDraft | None, rule: str, prompts: list[Any] = PROMPTS, **sampling: Any
) -> list[RequestResult]:
    drafting = {"drafter": "bridge", "depth": 4, "width": "fixed"} if draft else {"depth": 0}
    method = MethodConfig.of({"rule": rule, "num_beams": 3, "depth": 4, **drafting})
    engine = Engine(TextModel(target), draft, codec(target), method, batch_size=4)
    settings = SamplingConfig(**{"max_new_tokens": 10, "top_k": 10, "n_best": 3, **sampling})
    requests = [
        Request(
            id=str(i),
            seed=7,
            sampling=settings,
            **({"prompt": prompt} if isinstance(prompt, str) else {"prompt_ids": prompt}),
        )
        for i, prompt in enumerate(prompts)
    ]
    results = list(engine.run(requests))
    assert [result.error for result in results] == [None] * len(requests)
    return results


def tokens(results: list[RequestResult]) -> list[list[tuple[int, ...]]]:
    return [[beam.token_ids for beam in result.hypotheses] for result in results]


@cache
def plain(target: str, rule: str) -> list[list[tuple[int, ...]]]:
    """Without a draft."""
    return tokens(decode(target, None, rule))


PAIRS = [
    ("bytes", "byte-level"),
    ("bytes", "byte-fallback"),
    ("byte-level", "other byte-level"),
    ("byte-level", "bytes"),
    ("byte-fallback", "unigram"),
    ("other byte-level", "byte-fallback"),
]


@pytest.mark.parametrize(
    ("target", "draft", "rule"), [*((*pair, "coupled") for pair in PAIRS), *((*pair, "search") for pair in PAIRS[::2])]
)
def test_the_text_is_that_of_no_draft(target: str, draft: str, rule: str) -> None:
    """Guards everything a bridge could get wrong: rows of one seed that are told apart by their place alone, more rows
    than the batch, texts that end inside words and characters, special tokens as prompts; and drafts that nothing is
    accepted of."""
    results = decode(target, bridged(target, draft), rule)
    assert tokens(results) == plain(target, rule)
    assert sum(result.stats.accepted for result in results) > 20
    assert sum(result.stats.steps for result in results) > sum(result.stats.target_calls for result in results)


def test_a_draft_of_the_same_bytes_is_nearly_always_right() -> None:
    """Guards the context: draft and target are one model over bytes, so beam search must accept nearly every layer.
    Anything but the very text of each beam would change its hash and lose this."""
    results = decode("bytes", bridged("bytes", "bytes"), "search")
    assert sum(result.stats.steps for result in results) > 4 * sum(result.stats.target_calls for result in results)


def test_ids_that_are_no_text() -> None:
    """Guards prompts of lone bytes, half characters and tokens that decode to nothing, in the middle and at the end."""
    table = codec("byte-level").token_bytes()
    byte = {piece: token for token, piece in enumerate(table)}
    start, end = codec("byte-level").encode("The fox"), 1
    broken = [byte[b"\x99"], byte[b"\xf0"], byte[b"\x9f"]]
    prompts = [(*start, *broken), (0,), (0, end, 0), (*broken[:1],), (*start, 0, *start, end), (*broken[1:],)]
    for rule in ("coupled", "search"):
        results = decode("byte-level", bridged("byte-level", "other byte-level"), rule, prompts)
        assert tokens(results) == tokens(decode("byte-level", None, rule, prompts))


def test_stop_strings_and_ends() -> None:
    """Guards nodes below a stop string: a text that goes on after it was drafted must end where it ends undrafted."""
    for rule in ("coupled", "search"):
        settings = {"stop": ("x j", "e", "\n"), "max_new_tokens": 16}
        results = decode("byte-level", bridged("byte-level", "bytes"), rule, **settings)
        assert tokens(results) == tokens(decode("byte-level", None, rule, **settings))
        assert any(beam.finish_reason == "stop" for result in results for beam in result.hypotheses)


def test_a_draft_that_says_nothing() -> None:
    """Guards NaN in the draft's logits: no drafts, and the target's text."""

    class Broken(TextModel):
        def _logits(self, batch: Any, stored: torch.Tensor) -> torch.Tensor:
            return super()._logits(batch, stored) * float("nan")

    results = decode("bytes", bridged("bytes", "byte-level", Broken("byte-level")), "coupled")
    assert tokens(results) == plain("bytes", "coupled")
    assert sum(result.stats.drafted for result in results) == 0


def test_short_positions_of_the_draft() -> None:
    """Guards prompts longer than the draft's positions: its context loses its beginning, the row does not fail."""
    model = TextModel("byte-level")
    model._max_positions = 40
    prompts = ["The quick brown fox jumps over the lazy dog.\n" * 4, "The"]
    results = decode("bytes", bridged("bytes", "byte-level", model), "coupled", prompts)
    assert tokens(results) == tokens(decode("bytes", None, "coupled", prompts))
    assert sum(result.stats.accepted for result in results) > 0


def test_rejection_keeps_the_targets_distribution() -> None:
    """Guards deterministic nodes that are tested as if they had been drawn: the first two tokens of 1500 texts against
    plain sampling of 1500 others; chi-squared over the frequent pairs, false alarms below 1e-5."""
    counts = []
    for draft, seed in ((bridged("byte-level", "other byte-level"), 0), (None, 10**6)):
        drafting = {"drafter": "bridge", "depth": 2, "drafts_per_layer": 3} if draft else {"depth": 0}
        method = MethodConfig.of({"rule": "rejection", "num_beams": 1, "depth": 4, "width": "fixed", **drafting})
        engine = Engine(TextModel("byte-level"), draft, codec("byte-level"), method, batch_size=500)
        settings = SamplingConfig(max_new_tokens=2, top_k=4, temperature=2.0)
        requests = (Request(id=str(i), seed=seed + i, prompt="The fo", sampling=settings) for i in range(1500))
        results = list(engine.run(requests))
        if draft:
            assert sum(result.stats.accepted for result in results) > 400
        counts.append(Counter(result.hypotheses[0].token_ids for result in results))
    first, other = counts
    frequent = [pair for pair in first | other if first[pair] + other[pair] >= 20]
    assert len(frequent) >= 5
    value = sum((first[pair] - other[pair]) ** 2 / (first[pair] + other[pair]) for pair in frequent)
    assert value < len(frequent) + 4.5 * (2 * len(frequent)) ** 0.5 + 10


class Failing(TextModel):
    """Fails once, as a kernel does that cannot be launched at a shape."""

    failed = False

    def forward(self, batch: ForestInput, *, logits: bool = True) -> Tensor | None:
        if self.forwards == 3 and not self.failed:
            self.failed = True
            raise RuntimeError("Triton Error [CUDA]: invalid argument")
        return super().forward(batch, logits=logits)


class WithKernels(TextModel):
    left = 0

    def use_ops(self, ops: Ops) -> None:
        """Slots are moved as ever."""

    def leave_kernels(self) -> bool:
        self.left += 1
        return True


def test_a_kernel_that_fails_is_left_by_the_draft_too() -> None:
    """Guards a draft with tokens of its own that goes on with the kernels of its layers."""
    draft = WithKernels("bytes")
    method = MethodConfig(rule="search", num_beams=2, drafter="bridge", depth=3, drafts_per_layer=4)
    engine = Engine(Failing("byte-level"), bridged("byte-level", "bytes", draft), codec("byte-level"), method)
    told: list[str] = []
    engine.tell = told.append
    rows = [Request("the quick", id="0", sampling=SamplingConfig(max_new_tokens=8))]
    (result,) = engine.run(rows)
    alone = Engine(TextModel("byte-level"), None, codec("byte-level"), replace(method, drafter="beam", depth=0))
    assert [beam.token_ids for beam in result.hypotheses] == [
        beam.token_ids for beam in next(alone.run(rows)).hypotheses
    ]
    assert draft.left == 1
    assert [line.startswith("the run goes on without kernels, because one of them fails here") for line in told] == [
        True
    ]


def test_markers_join_chats() -> None:
    """Guards chat prompts: special tokens that both have stand in the draft's context under its own ids, its own
    beginning stands once, and those that only the target has are left out."""
    chat = wrap(byte_level(), chat_template=CHAT)
    chat.add_special_tokens({"additional_special_tokens": ["<only target>"]})
    ours = type(codec("bytes"))(chat, (1,))
    theirs = codec("other byte-level")
    joined = markers(ours, theirs)
    assert joined == {0: theirs.tokenizer.get_vocab()["<s>"], 1: theirs.tokenizer.get_vocab()["</s>"]}
    drafter = BridgeDrafter(BridgedDraft(TextModel("other byte-level"), theirs, ours, joined), 381)
    extra = chat.convert_tokens_to_ids("<only target>")
    prompt = drafter._prompt([*ours.encode_chat([{"role": "user", "content": "fox"}]), extra])
    assert codec("other byte-level").tokenizer.decode(prompt.base) == "<s>user: fox</s>"
    assert prompt.text == b"assistant:"


def test_what_does_not_go_together() -> None:
    model, draft = TextModel("bytes"), bridged("bytes", "byte-level")
    with pytest.raises(UsageError, match="bridge builds whole trees"):
        MethodConfig(drafter="bridge+ngram")
    with pytest.raises(UsageError, match="drafter beam takes a plain draft"):
        Engine(model, draft, codec("bytes"), MethodConfig())
    with pytest.raises(UsageError, match="drafter bridge takes a BridgedDraft"):
        Engine(model, TextModel("bytes"), codec("bytes"), MethodConfig(drafter="bridge"))
    with pytest.raises(UsageError, match="use width fixed"):
        MethodConfig(drafter="bridge", width="threshold", rule="rejection")
