"""`dsbd_cli.generate` in the place of `model.generate`: the same calls, the same results.

The scripts are written after public ones: what they pass, how they read the answer. Guards: an argument that is taken
and does nothing, weights of before a training step, a model that comes back changed.
"""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import dsbd_cli
from dsbd_cli import MethodConfig, PairError, SamplingConfig, UnsupportedModelError, UsageError
from dsbd_cli.config.model import BUILTIN_TARGET, ModelSpec
from dsbd_cli.models.checkpoints.checkpoint import Checkpoint
from dsbd_cli.models.checkpoints.loader import load
from dsbd_cli.models.checks.invariance import check
from dsbd_cli.ops.processor import on_amd
from tests.engine.decoding.test_transformers import model as tiny
from tests.helpers.tiny import build

ENDS = list(range(2, 14))
IDS = torch.tensor([[0, 0, 5, 6, 7], [9, 8, 7, 6, 5], [0, 11, 12, 13, 14]])
MASK = torch.tensor([[0, 0, 1, 1, 1], [1, 1, 1, 1, 1], [0, 1, 1, 1, 1]])


def made(family: str = "llama", noise: float = 0.0) -> Any:
    model = tiny(family, noise)
    model.generation_config.eos_token_id, model.generation_config.pad_token_id = ENDS, 0
    return model


CALLS: dict[str, dict[str, Any]] = {
    "greedy": {"max_new_tokens": 9},
    "beams": {"num_beams": 4, "max_new_tokens": 10},
    "many": {"num_beams": 6, "num_return_sequences": 5, "max_new_tokens": 8, "length_penalty": 0.0},
    "early": {"num_beams": 3, "early_stopping": True, "max_length": 14, "length_penalty": 2.0},
    "never": {"num_beams": 3, "early_stopping": "never", "max_new_tokens": 9, "length_penalty": 1.5},
    "one end": {"num_beams": 2, "eos_token_id": 7, "pad_token_id": 3, "max_new_tokens": 12},
}


@pytest.mark.parametrize("family", ["llama", "opt", "gpt2"])
@pytest.mark.parametrize("name", CALLS)
def test_without_sampling_it_is_transformers(family: str, name: str) -> None:
    model, options = made(family), {"attention_mask": MASK, "do_sample": False, **CALLS[name]}
    want = model.generate(IDS, **options)
    assert torch.equal(dsbd_cli.generate(model, IDS, **options), want)
    assert torch.equal(model.generate(IDS, custom_generate=dsbd_cli.generate, **options), want)
    draft = made(family, 0.02)
    assert torch.equal(dsbd_cli.generate(model, IDS, assistant_model=draft, **options), want)


def test_scores_and_beam_indices() -> None:
    model = made()
    options = {
        "attention_mask": MASK, "num_beams": 4, "num_return_sequences": 3, "max_new_tokens": 10, "length_penalty": 0.5,
        "return_dict_in_generate": True, "output_scores": True, "do_sample": False,
    }  # fmt: skip
    want = model.generate(IDS, **options)
    for output in (
        dsbd_cli.generate(model, IDS, **options),
        model.generate(IDS, custom_generate=dsbd_cli.generate, **options),
        dsbd_cli.generate(model, IDS, assistant_model=made(noise=0.02), **options),
    ):
        assert torch.equal(output.sequences, want.sequences)
        assert torch.allclose(output.sequences_scores, want.sequences_scores, atol=1e-4)
        assert torch.equal(output.beam_indices, want.beam_indices)
        assert type(output) is type(want)


ODD, EVEN = list(range(15, 97, 6)), list(range(14, 97, 4))
RULES: dict[str, dict[str, Any]] = {
    "penalty": {"repetition_penalty": 1.6},
    "reward": {"repetition_penalty": 0.4},
    "n-grams": {"no_repeat_ngram_size": 2},
    "least": {"min_new_tokens": 9},
    "length": {"min_length": 15},
    "together": {"repetition_penalty": 1.3, "no_repeat_ngram_size": 3, "min_new_tokens": 3, "min_length": 10},
    "bad words": {
        "bad_words_ids": [[token] for token in ODD] + [[a, b] for a in range(15, 97, 2) for b in EVEN] + [[2]]
    },
    "bias": {"sequence_bias": [[[20], 5.0], [[41], -3.0], [[60], 4.0], [[3], -2.0]]},
    "suppressed": {"suppress_tokens": EVEN},
    "at first": {"begin_suppress_tokens": EVEN},
    "last": {"forced_eos_token_id": 2},
    "last, no end": {"forced_eos_token_id": 50},
    "normalised": {"renormalize_logits": True, "repetition_penalty": 1.4, "suppress_tokens": EVEN},
}
# no token of the answers is the padding's, which transformers' n-grams count
PROMPTS = torch.tensor([[0, 0, 5, 6, 7, 6], [9, 8, 7, 6, 5, 8], [0, 11, 12, 13, 14, 11]])
PADDED = (PROMPTS > 0).long()


@pytest.mark.parametrize("family", ["llama", "opt", "gpt2"])
@pytest.mark.parametrize("beams", [1, 4])
@pytest.mark.parametrize("name", RULES)
def test_token_rules_are_transformers(family: str, beams: int, name: str) -> None:
    """Greedy decoding is penalised on logits, beams on log-probabilities. Without a draft, and with one."""
    model = made(family)
    plain = {"attention_mask": PADDED, "do_sample": False, "num_beams": beams, "max_new_tokens": 10}
    options = {**plain, **RULES[name], "synced_gpus": False}
    want = model.generate(PROMPTS, **options)
    assert torch.equal(model.generate(PROMPTS, custom_generate=dsbd_cli.generate, **options), want)
    assert torch.equal(dsbd_cli.generate(model, PROMPTS, assistant_model=made(family, 0.02), **options), want)


@pytest.mark.parametrize("beams", [1, 4])
def test_each_token_rule_acts(beams: int) -> None:
    """Guards the test above against prompts on which nothing changes."""
    options = {"attention_mask": PADDED, "do_sample": False, "num_beams": beams, "max_new_tokens": 10}
    models = [made(family) for family in ("llama", "opt", "gpt2")]
    plain = [dsbd_cli.generate(model, PROMPTS, **options).tolist() for model in models]
    for rules in RULES.values():
        assert [dsbd_cli.generate(model, PROMPTS, **options, **rules).tolist() for model in models] != plain, rules


def test_a_row_without_a_penalty_keeps_its_bits_beside_one_that_has_it() -> None:
    """With one beam the penalty takes the sum over the vocabulary off and puts it back, which rounds."""
    from dsbd_cli.engine.constraints.token_rules import _penalise

    logprobs = torch.randn(64, 50).log_softmax(-1)
    total, text = torch.randn(64, 1) * 9, torch.randint(0, 50, (64, 8))
    penalty = torch.tensor([1.0, 1.5]).repeat(32).unsqueeze(1)
    penalised = logprobs.clone()
    _penalise(penalised, text, penalty, total)
    assert torch.equal(penalised[::2], logprobs[::2])
    assert (penalised[1::2] != logprobs[1::2]).any(1).all()


@pytest.mark.parametrize("family", ["llama", "opt", "gpt2"])
@pytest.mark.parametrize("rules", [{}, {"repetition_penalty": 1.4, "min_new_tokens": 6}], ids=["plain", "rules"])
def test_scores_of_one_beam(family: str, rules: dict[str, Any]) -> None:
    """The processed logits of every step, as transformers' own loop keeps them."""
    model = made(family)
    options = {
        "attention_mask": PADDED, "do_sample": False, "max_new_tokens": 8, "return_dict_in_generate": True,
        "output_scores": True, **rules,
    }  # fmt: skip
    want = model.generate(PROMPTS, **options)
    for output in (
        dsbd_cli.generate(model, PROMPTS, **options),
        model.generate(PROMPTS, custom_generate=dsbd_cli.generate, **options),
    ):
        assert type(output) is type(want)
        assert torch.equal(output.sequences, want.sequences)
        assert len(output.scores) == len(want.scores)
        for step, (ours, theirs) in enumerate(zip(output.scores, want.scores, strict=True)):
            assert ours.dtype == theirs.dtype
            assert torch.allclose(ours, theirs, atol=1e-3), step
        gained = [model.compute_transition_scores(result.sequences, result.scores) for result in (output, want)]
        assert torch.allclose(*gained, atol=1e-3)


def test_scores_of_samples() -> None:
    """Every drawn token is possible under the scores of its step, several samples of a prompt each with its own."""
    model = made()
    options = {"do_sample": True, "top_k": 5, "num_return_sequences": 2, "max_new_tokens": 6}
    output = dsbd_cli.generate(
        model, PROMPTS, attention_mask=PADDED, **options, return_dict_in_generate=True, output_scores=True
    )
    begin = PROMPTS.shape[1]
    assert len(output.scores) == output.sequences.shape[1] - begin
    ended = torch.zeros(6, dtype=torch.bool)
    for step, scores in enumerate(output.scores):
        token = output.sequences[:, begin + step]
        assert ((scores > float("-inf")).sum(1) == 5).all()
        assert (scores.gather(1, token[:, None])[:, 0][~ended] > float("-inf")).all()
        ended |= torch.isin(token, torch.tensor(ENDS))


def test_a_penalty_that_passes_over_prompts_is_refused() -> None:
    from transformers import LogitsProcessorList, RepetitionPenaltyLogitsProcessor

    processors = LogitsProcessorList([RepetitionPenaltyLogitsProcessor(1.2, prompt_ignore_length=6)])
    with pytest.raises(UsageError, match="prompt_ignore_length is not the padding"):
        dsbd_cli.generate(made(), PROMPTS, attention_mask=PADDED, logits_processor=processors, max_new_tokens=3)


def test_the_assistant_drafts() -> None:
    """transformers hands it to no callable; ours takes it all the same."""
    calls = []
    model, draft = made(), made(noise=0.02)
    hook = draft.register_forward_hook(lambda *_: calls.append(1))
    options = {"attention_mask": MASK, "max_new_tokens": 8, "do_sample": False}
    model.generate(IDS, custom_generate=dsbd_cli.generate, assistant_model=draft, **options)
    assert calls
    calls.clear()
    model.generate(IDS, custom_generate=partial(dsbd_cli.generate, assistant_model=draft), **options)
    assert calls
    hook.remove()


def test_samples_of_one_beam_have_transformers_distribution() -> None:
    """Two tokens, each against its distribution; a false alarm at 5 sigma, with some ten classes once in 100,000."""
    from transformers import LogitsProcessorList, TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

    warps = LogitsProcessorList([TemperatureLogitsWarper(1.3), TopKLogitsWarper(9), TopPLogitsWarper(0.95)])
    model, count = made(), 3000
    ids = torch.tensor([[5, 6, 7]])
    options = {"do_sample": True, "temperature": 1.3, "top_k": 9, "top_p": 0.95, "max_new_tokens": 2}
    torch.manual_seed(1)
    ours = dsbd_cli.generate(model, ids.expand(count, -1), **options)[:, 3:]

    def check(drawn: Any, before: Any) -> None:
        distribution = warps(before, model(before).logits[:1, -1].float())[0].softmax(-1)
        shares = torch.bincount(drawn, minlength=len(distribution)) / len(drawn)
        assert (distribution[drawn] > 0).all()
        assert (
            (shares - distribution).abs() <= 5 * (distribution * (1 - distribution) / len(drawn)).sqrt() + 1e-9
        ).all()

    check(ours[:, 0], ids)
    ended = torch.isin(ours[:, 0], torch.tensor(ENDS))
    assert ended.any()
    assert (ours[ended, 1] == 0).all()
    first = int(ours[~ended, 0].mode().values)
    after = ours[ours[:, 0] == first, 1]
    check(after, torch.tensor([[5, 6, 7, first]]))
    last = dsbd_cli.generate(model, ids.expand(count, -1), **{**options, "max_new_tokens": 1})[:, 3]
    check(last, ids)  # an end in the last step counts as any other
    assert torch.isin(last, torch.tensor(ENDS)).any()


def test_sampling_follows_torchs_seed() -> None:
    model = made()

    def drawn(seed: int) -> Any:
        torch.manual_seed(seed)
        return dsbd_cli.generate(
            model, IDS, attention_mask=MASK, do_sample=True, num_return_sequences=3, max_new_tokens=6
        )

    assert torch.equal(drawn(1), drawn(1))
    assert not torch.equal(drawn(1), drawn(2))
    assert len({tuple(row) for row in drawn(1).tolist()}) > 3
    torch.manual_seed(0)
    beams = dsbd_cli.generate(
        model, IDS, attention_mask=MASK, do_sample=True, num_beams=3, num_return_sequences=2, max_new_tokens=6
    )
    assert beams.shape[0] == 6


UNSUPPORTED: dict[str, tuple[dict[str, Any], str]] = {
    "bias": ({"sequence_bias": [[[5, 6], 2.0]]}, "sequence_bias has a sequence of several tokens"),
    "too much": ({"sequence_bias": [[[5], 200.0]]}, "sequence_bias has 200.0, but must be from -100 to 100"),
    "forced": ({"forced_eos_token_id": [5, 6]}, r"forced_eos_token_id is \[5, 6\], but only one token"),
    "normalised": (
        {"renormalize_logits": True, "prefix_allowed_tokens_fn": lambda batch, ids: [20] if len(ids) == 5 else [2]},
        "renormalize_logits does not go with prefix_allowed_tokens_fn",
    ),
    "decay": ({"exponential_decay_length_penalty": (2, 1.5)}, "exponential_decay_length_penalty asks for"),
    "synced": ({"synced_gpus": True}, "synced_gpus is true"),
    "endless": (
        {"prefix_allowed_tokens_fn": lambda batch, ids: [15]},
        r"it allows 3 tokens \(max_new_tokens\) without",
    ),
    "nothing": ({"prefix_allowed_tokens_fn": lambda batch, ids: []}, "it allows no sequence"),
    "at once": ({"prefix_allowed_tokens_fn": lambda batch, ids: [2]}, "it allows an end token at once"),
    "two ends": (
        {"prefix_allowed_tokens_fn": lambda batch, ids: [20] if len(ids) == 5 else [2, 3]},
        "end with different tokens",
    ),
    "time": ({"max_time": 3.0}, "max_time is 3.0"),
    "hidden": ({"output_hidden_states": True, "return_dict_in_generate": True}, "output_hidden_states is true"),
    "logits": ({"output_logits": True, "return_dict_in_generate": True}, "output_logits is true"),
    "right": ({"attention_mask": MASK.flip(1)}, "pad on the left"),
    "streamer": ({"streamer": SimpleNamespace(put=lambda ids: None)}, "streamer is given, but num_beams is 2"),
    "stop": ({"stop_strings": ["x"]}, "tokenizer is not"),
    "positions": ({"position_ids": torch.arange(5)[None] + 3}, "position_ids do not count"),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", UNSUPPORTED)
def test_what_is_not_supported_is_refused(name: str) -> None:
    options, message = UNSUPPORTED[name]
    options = {"attention_mask": MASK, "num_beams": 2, "do_sample": False, "max_new_tokens": 3, **options}
    with pytest.raises(UsageError, match=message):
        dsbd_cli.generate(made(), IDS, **options)


def test_criteria_and_caches_of_others_are_refused() -> None:
    from transformers import DynamicCache, StoppingCriteria, StoppingCriteriaList

    class Never(StoppingCriteria):
        def __call__(self, *_: object, **__: object) -> Any:
            return torch.zeros(3, dtype=torch.bool)

    model = made()
    with pytest.raises(UsageError, match="stopping_criteria has Never"):
        dsbd_cli.generate(model, IDS, stopping_criteria=StoppingCriteriaList([Never()]), max_new_tokens=3)
    cache = DynamicCache(config=model.config)
    model(IDS[:, :2], past_key_values=cache, use_cache=True)
    with pytest.raises(UsageError, match="past_key_values holds tokens"):
        dsbd_cli.generate(model, IDS, past_key_values=cache, max_new_tokens=3)


def test_criteria_and_processors_that_ask_for_something_else_are_refused() -> None:
    """Guards objects whose class is known and whose numbers nobody reads."""
    from transformers import (
        EosTokenCriteria,
        LogitsProcessorList,
        MaxLengthCriteria,
        MinLengthLogitsProcessor,
        MinNewTokensLengthLogitsProcessor,
        StoppingCriteriaList,
    )

    model, new = made(), 3
    for criterion, message in (
        (MaxLengthCriteria(9), r"MaxLengthCriteria\(9\), but max_length is 8: raise that"),
        (MaxLengthCriteria(5), r"MaxLengthCriteria\(5\), no more than a prompt has"),
    ):
        with pytest.raises(UsageError, match=message):
            dsbd_cli.generate(model, IDS, stopping_criteria=StoppingCriteriaList([criterion]), max_new_tokens=new)
    others = StoppingCriteriaList([EosTokenCriteria(20)])
    with pytest.raises(UsageError, match="other end tokens or another prompt: give min_length and eos_token_id"):
        dsbd_cli.generate(model, IDS, stopping_criteria=others, min_new_tokens=2, max_new_tokens=new)
    for processor, message in (
        (MinLengthLogitsProcessor(20, eos_token_id=20), "other end tokens or another prompt: give min_length and"),
        (MinNewTokensLengthLogitsProcessor(2, 9, eos_token_id=ENDS), "another prompt: give min_new_tokens"),
    ):
        with pytest.raises(UsageError, match=message):
            dsbd_cli.generate(model, IDS, logits_processor=LogitsProcessorList([processor]), max_new_tokens=new)
    # those that say what the config says act as ever
    same = {
        "stopping_criteria": StoppingCriteriaList([MaxLengthCriteria(8), EosTokenCriteria(ENDS)]),
        "logits_processor": LogitsProcessorList([MinNewTokensLengthLogitsProcessor(5, 2, eos_token_id=ENDS)]),
        "attention_mask": MASK,
        "max_new_tokens": new,
        "num_beams": 2,
    }
    assert torch.equal(dsbd_cli.generate(model, IDS, **same), model.generate(IDS, **same))


@pytest.mark.parametrize("beams", [1, 3])
@pytest.mark.parametrize("family", ["llama", "opt", "gpt2"])
def test_stopping_criteria_are_transformers(family: str, beams: int) -> None:
    """Each of them alone, and that it changes what comes out."""
    from transformers import EosTokenCriteria, MaxLengthCriteria, StoppingCriteriaList

    model = made(family)
    options = {"attention_mask": MASK, "do_sample": False, "num_beams": beams, "max_new_tokens": 12}
    plain = dsbd_cli.generate(model, IDS, **options)
    for criterion in (MaxLengthCriteria(8), EosTokenCriteria(list(range(14, 97, 3)))):
        asked = {**options, "stopping_criteria": StoppingCriteriaList([criterion])}
        want = model.generate(IDS, **asked)
        assert torch.equal(dsbd_cli.generate(model, IDS, **asked), want)
        assert torch.equal(model.generate(IDS, custom_generate=dsbd_cli.generate, **asked), want)
        assert plain.tolist() != want.tolist()


@pytest.mark.parametrize("beams", [1, 2])
def test_a_criterion_of_stop_strings_ends_a_text(beams: int) -> None:
    """It does not hold its tokenizer, so that has to be given."""
    from transformers import StoppingCriteriaList, StopStringCriteria

    model, tokenizer = load(Checkpoint.open(ModelSpec(BUILTIN_TARGET)))
    inputs = tokenizer("question: what did Nesen do\nanswer:", return_tensors="pt")
    options = {"num_beams": beams, "max_new_tokens": 12, "do_sample": False}
    words = tokenizer.decode(dsbd_cli.generate(model, **inputs, **options)[0], skip_special_tokens=True).split()
    asked = {**options, "stopping_criteria": StoppingCriteriaList([StopStringCriteria(tokenizer, [words[-1]])])}
    want = model.generate(**inputs, **asked)
    assert torch.equal(dsbd_cli.generate(model, **inputs, **asked, tokenizer=tokenizer), want)
    ours = partial(dsbd_cli.generate, tokenizer=tokenizer)
    assert torch.equal(model.generate(**inputs, **asked, custom_generate=ours), want)
    with pytest.raises(UsageError, match="stop strings are given, but tokenizer is not"):
        dsbd_cli.generate(model, **inputs, **asked)


@pytest.mark.parametrize("family", ["llama", "opt", "gpt2"])
def test_a_forced_first_token(family: str) -> None:
    """As transformers, where a prompt is one token. Behind a longer one the argument does nothing."""
    model, ids = made(family), torch.tensor([[5], [9], [40]])
    asked = {"forced_bos_token_id": 33, "begin_suppress_tokens": EVEN, "max_new_tokens": 6, "do_sample": False}
    for beams in (1, 3):
        want = model.generate(ids, attention_mask=torch.ones_like(ids), num_beams=beams, **asked)
        output = dsbd_cli.generate(model, ids, attention_mask=torch.ones_like(ids), num_beams=beams, **asked)
        assert torch.equal(output, want)
        assert (output[:, 1] == 33).all()
        longer = {"attention_mask": MASK, "num_beams": beams, **asked}
        assert torch.equal(dsbd_cli.generate(model, IDS, **longer), model.generate(IDS, **longer))


def test_a_forced_last_token_of_samples() -> None:
    model = made()
    options = {"do_sample": True, "max_new_tokens": 4, "eos_token_id": 2, "num_return_sequences": 20}
    ids = dsbd_cli.generate(model, PROMPTS, attention_mask=PADDED, forced_eos_token_id=50, **options)
    begin = PROMPTS.shape[1]
    ended = (ids[:, begin:-1] == 2).any(1)
    assert ids.shape[1] == begin + 4
    assert (ids[~ended, -1] == 50).all()


class Collected:
    """A streamer that keeps what it gets, and how often the model had run by then."""

    def __init__(self) -> None:
        self.tokens: list[list[int]] = []
        self.at: list[int] = []
        self.calls = self.ends = 0

    def put(self, value: Any) -> None:
        self.tokens.append(value.tolist())
        self.at.append(self.calls)

    def end(self) -> None:
        self.ends += 1


@pytest.mark.parametrize("rows", [1, 3])
def test_a_streamer_gets_tokens_as_they_come(rows: int) -> None:
    model = made()
    options = {"attention_mask": MASK[:rows], "max_new_tokens": 9, "do_sample": False}
    want = Collected()
    model.generate(IDS[:rows], streamer=want, **options)
    for call in (
        lambda streamer: dsbd_cli.generate(model, IDS[:rows], streamer=streamer, **options),
        lambda streamer: model.generate(IDS[:rows], streamer=streamer, custom_generate=dsbd_cli.generate, **options),
    ):
        streamer = Collected()

        def count(*_: object, streamer: Collected = streamer) -> None:
            streamer.calls += 1

        hook = model.register_forward_hook(count)
        call(streamer)
        hook.remove()
        assert (streamer.tokens, streamer.ends) == (want.tokens, 1)
        assert len(set(streamer.at)) > 2, "tokens come while the model runs"


@pytest.mark.parametrize("rules", [{}, {"repetition_penalty": 1.4, "min_new_tokens": 6}], ids=["plain", "rules"])
def test_transition_scores_of_beams(rules: dict[str, Any]) -> None:
    model = made()
    options = {
        "attention_mask": PADDED, "num_beams": 4, "num_return_sequences": 3, "max_new_tokens": 8, "do_sample": False,
        "return_dict_in_generate": True, "output_scores": True, **rules,
    }  # fmt: skip
    output, want = dsbd_cli.generate(model, PROMPTS, **options), model.generate(PROMPTS, **options)
    assert torch.equal(output.sequences, want.sequences)
    gained = [
        model.compute_transition_scores(result.sequences, result.scores, result.beam_indices)
        for result in (output, want)
    ]
    assert torch.allclose(*gained, atol=1e-3)
    assert [scores.shape for scores in output.scores] == [scores.shape for scores in want.scores][: len(output.scores)]


@pytest.mark.parametrize(("ends", "beams"), [([], 1), (torch.tensor(ENDS), 2)], ids=["none", "a tensor"])
def test_end_tokens_of_any_form(ends: Any, beams: int) -> None:
    """transformers itself cannot search with an empty list."""
    asked = {"attention_mask": MASK, "max_new_tokens": 6, "num_beams": beams, "do_sample": False, "eos_token_id": ends}
    model = made()
    assert torch.equal(dsbd_cli.generate(model, IDS, **asked), model.generate(IDS, **asked))


def test_train_generate_train_sees_fresh_weights() -> None:
    """And the model is as it was: mode, attention, gradients."""
    torch.manual_seed(3)
    with torch.enable_grad():
        model = build("llama").requires_grad_(True).train()
        model.generation_config.eos_token_id = None
        optimiser = torch.optim.SGD(model.parameters(), lr=0.5)
        attention, texts = model.config._attn_implementation, []
        for _ in range(3):
            texts.append(dsbd_cli.generate(model, IDS[1:2], num_beams=3, max_new_tokens=6, do_sample=False))
            assert torch.equal(
                texts[-1], model.eval().generate(IDS[1:2], num_beams=3, max_new_tokens=6, do_sample=False)
            )
            model.train()
            loss = model(IDS[1:2], labels=IDS[1:2]).loss
            loss.backward()
            assert all(p.grad is not None for p in model.parameters() if p.requires_grad)
            optimiser.step()
            optimiser.zero_grad()
    assert len({tuple(text[0].tolist()) for text in texts}) > 1
    assert all(module.training for module in model.modules())
    assert model.config._attn_implementation == attention
    assert "stock_attention" not in model.__dict__


def test_stop_strings_end_a_text() -> None:
    """Given as an argument, in a generation config or in the model's; the first of these counts."""
    from transformers import GenerationConfig

    model, tokenizer = load(Checkpoint.open(ModelSpec(BUILTIN_TARGET)))
    inputs = tokenizer("question: what did Nesen do\nanswer:", return_tensors="pt")
    options = {"num_beams": 2, "max_new_tokens": 12, "do_sample": False}
    whole = tokenizer.decode(dsbd_cli.generate(model, **inputs, **options)[0])
    cut = dsbd_cli.generate(model, **inputs, **options, stop_strings="ed a", tokenizer=tokenizer)[0]
    assert "ed a" in whole
    assert tokenizer.decode(cut, skip_special_tokens=True).endswith("ed a")
    config = GenerationConfig(stop_strings=["no such text"], **options)
    stops = {"generation_config": config, "stop_strings": "ed a"}
    assert torch.equal(dsbd_cli.generate(model, **inputs, **stops, tokenizer=tokenizer)[0], cut)
    assert config.stop_strings == ["no such text"]
    config.stop_strings = ["ed a"]
    assert torch.equal(dsbd_cli.generate(model, **inputs, generation_config=config, tokenizer=tokenizer)[0], cut)
    model.generation_config.stop_strings = ["ed a"]
    assert torch.equal(dsbd_cli.generate(model, **inputs, **options, tokenizer=tokenizer)[0], cut)
    with pytest.raises(UsageError, match="tokenizer is not"):
        dsbd_cli.generate(model, **inputs, **options)


@pytest.mark.parametrize("end", ["text", "token"])
def test_stop_strings_wait_for_the_end_of_the_reasoning(end: str) -> None:
    """Guards lm-eval's think_end_token: a stop string in the reasoning ends nothing."""
    model, tokenizer = load(Checkpoint.open(ModelSpec(BUILTIN_TARGET)))
    inputs = tokenizer("question: what did Nesen do\nanswer:", return_tensors="pt")
    options = {"num_beams": 1, "max_new_tokens": 12, "do_sample": False}
    begin = inputs["input_ids"].shape[1]
    new = dsbd_cli.generate(model, **inputs, **options)[0, begin:]
    words = [tokenizer.decode(token) for token in new]
    mark = words.index(" S")
    before = words.index("at")
    behind = words.index("at", mark)
    assert before < mark < behind
    end_token = int(new[mark]) if end == "token" else " S"
    asked = {**options, "tokenizer": tokenizer, "stop_strings": "at"}
    assert dsbd_cli.generate(model, **inputs, **asked)[0, begin:].equal(new[: before + 1])
    waited = dsbd_cli.generate(model, **inputs, **asked, think_end_token=end_token)[0, begin:]
    assert waited.equal(new[: behind + 1])
    with pytest.raises(UsageError, match="think_end_token is given, but no stop_strings"):
        dsbd_cli.generate(model, **inputs, **options, think_end_token=end_token)


def test_an_engine_over_live_models() -> None:
    model, tokenizer = load(Checkpoint.open(ModelSpec(BUILTIN_TARGET)))
    engine = dsbd_cli.from_models(model, tokenizer, method=MethodConfig(rule="search", num_beams=3))
    short = SamplingConfig(max_new_tokens=8)
    prompt = "question: what did Nesen do\nanswer:"
    text = engine.generate(dsbd_cli.Request(prompt, sampling=short)).text
    by_name = dsbd_cli.load(draft=None, method=MethodConfig(rule="search", num_beams=3))
    assert text == by_name.generate(dsbd_cli.Request(prompt, sampling=short)).text
    assert by_name.exactness == "same-text"
    # the live model's layers are not packed, and torch's own products keep a row's bits on AMD's processors alone
    kept = on_amd() or check(engine.target).varies is None
    assert engine.exactness == ("same-text" if kept else "same-law")
    with pytest.raises(UsageError, match="model is in training mode"):
        dsbd_cli.from_models(model.train(), tokenizer)
    model.eval()
    with pytest.raises((PairError, UnsupportedModelError)):
        dsbd_cli.from_models(model, tokenizer, tiny("llama"))


ITEMS = [(20, 30, 40), (20, 30, 41), (20, 31, 50), (21, 30, 40), (22, 60, 61), (22, 60, 62), (23, 30, 44), (24, 33, 45)]


@pytest.mark.parametrize("beams", [1, 3, 6])
def test_an_allowed_prefix_function_is_a_trie(beams: int) -> None:
    """As MiniOneRec's evaluate.py: item ids of three tokens, the n best of them. Other items for the last prompt."""
    calls = []

    def allowed(batch: int, ids: Any) -> list[int]:
        calls.append(batch)
        path = tuple(ids[5:].tolist())
        items = ITEMS if batch < 2 else ITEMS[2:]
        return sorted({item[len(path)] if len(path) < 3 else 2 for item in items if item[: len(path)] == path}) or [2]

    model = made()
    options = {
        "attention_mask": MASK, "num_beams": beams, "num_return_sequences": beams, "max_new_tokens": 6,
        "do_sample": False, "prefix_allowed_tokens_fn": allowed, "return_dict_in_generate": True,
        "output_scores": beams > 1, "eos_token_id": 2,
    }  # fmt: skip
    if beams > 1:
        options["length_penalty"] = 0.0
    want = model.generate(IDS, **options)
    steps = len(calls)
    output = dsbd_cli.generate(model, IDS, **options)
    assert torch.equal(output.sequences, want.sequences)
    assert {tuple(row[5:8]) for row in output.sequences.tolist()} <= set(ITEMS)
    if beams > 1:
        assert torch.allclose(output.sequences_scores, want.sequences_scores, atol=1e-4)
    assert len(calls) > steps


def test_scripts_of_others_run_but_for_one_line() -> None:
    """The calls of CodeS (text2sql_zero_shot.py), sqlcoder (inference.py, through a pipeline) and MiniOneRec
    (evaluate.py), on the built-in model."""
    from transformers import GenerationConfig, pipeline

    model, tokenizer = load(Checkpoint.open(ModelSpec(BUILTIN_TARGET)))
    prompt = "question: what did Nesen do\nanswer:"
    inputs = tokenizer(prompt, return_tensors="pt")
    codes = {"max_new_tokens": 12, "num_beams": 4, "num_return_sequences": 4, "use_cache": True}
    rec = GenerationConfig(
        num_beams=3,
        length_penalty=0.0,
        num_return_sequences=3,
        pad_token_id=0,
        max_new_tokens=8,
        top_k=None,
        top_p=None,
    )
    pipe = pipeline(
        "text-generation", model=model, tokenizer=tokenizer, max_new_tokens=10, return_full_text=False, num_beams=5
    )
    eos = tokenizer.eos_token_id
    results = []
    for more in ({}, {"custom_generate": dsbd_cli.generate}):
        texts = pipe(prompt, num_return_sequences=1, eos_token_id=eos, pad_token_id=eos, do_sample=False, **more)
        first = model.generate(**inputs, **codes, do_sample=False, **more)
        second = model.generate(
            **inputs, generation_config=rec, return_dict_in_generate=True, output_scores=True, **more
        )
        results.append((texts, first, second))
    want, ours = results
    assert ours[0] == want[0]
    assert torch.equal(ours[1], want[1])
    assert torch.equal(ours[2].sequences, want[2].sequences)
    assert torch.allclose(ours[2].sequences_scores, want[2].sequences_scores, atol=1e-4)
