"""Defects that a review found, each as the smallest run that showed it."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from dsbd_cli.config.method import MethodConfig
from dsbd_cli.config.sampling import SamplingConfig
from dsbd_cli.config.token_rules import MOST_NGRAM
from dsbd_cli.engine.decoding.engine import Engine
from dsbd_cli.engine.protocols import ForestInput
from dsbd_cli.errors import InvalidRowError, UsageError
from dsbd_cli.models.transformers_backend.causal import CausalForestModel
from dsbd_cli.ops.interface import Ops
from dsbd_cli.requests import Request
from tests.helpers.tiny import build
from tests.helpers.toys import NumberCodec, TableLM, table_pair

VOCABULARY = 12


def engine(batch_size: int = 4, eos: tuple[int, ...] = (2,), **method: object) -> Engine:
    target, draft = table_pair(1, VOCABULARY, 0.5)
    config = MethodConfig.of({"depth": 4, "width": "fixed", **method})
    return Engine(target, draft, NumberCodec(VOCABULARY, eos), config, batch_size=batch_size)


def test_one_token_prompts_that_end_early_beside_late_rows() -> None:
    """A row without common prefix that kept nothing pointed at slot -1."""
    rows = [
        Request(id=str(i), seed=i, prompt_ids=(1 + i % 9,), sampling=SamplingConfig(max_new_tokens=1 + 13 * (i % 2)))
        for i in range(24)
    ]
    for rule in ("coupled", "search"):
        results = list(engine(rule=rule, drafts_per_layer=12, depth=3).run(rows))
        assert all(result.error is None for result in results)


def test_a_draft_narrower_than_its_target() -> None:
    """Ids that only the target knows ran past the draft's embedding."""
    target = CausalForestModel(build("llama"), "target")
    draft = CausalForestModel(build("llama", vocab_size=60, seed=1), "draft")
    draft.fit_width(target.vocab_size)
    decoder = Engine(target, draft, NumberCodec(97, (2,)), MethodConfig(depth=4))
    plain = Engine(target, None, NumberCodec(97, (2,)), MethodConfig(depth=0))
    rows = [Request(id="a", seed=1, prompt_ids=(96, 5, 90), sampling=SamplingConfig(max_new_tokens=12))]
    texts = [result.hypotheses[0].token_ids for result in decoder.run(rows)]
    assert texts == [result.hypotheses[0].token_ids for result in plain.run(rows)]


def test_half_a_surrogate_pair_costs_its_row_alone() -> None:
    """Tokenizers raise a TypeError for it, which ended the run."""
    half = "1 \ud800"
    rows = [
        Request("1 2"),
        Request(half),
        Request(messages=[{"role": "user", "content": half}]),
        Request("1", allow=["2", half]),
        Request("1", sampling=SamplingConfig(stop=(half,))),
        Request("1", sampling=SamplingConfig(prefix=half)),
        Request("3"),
    ]
    results = list(engine(rule="search").run(rows))
    named = ("prompt", "content of a message", "allow", "stop", "prefix")
    assert [result.error is None for result in results] == [True, *(False for _ in named), True]
    for name, result in zip(named, results[1:-1], strict=True):
        assert str(result.error).startswith(f"{name} is '1 \\ud800', which is no valid text")


def test_numbers_out_of_bounds_are_refused_before_a_tensor_meets_them() -> None:
    """One row's 1e300 or 10**20 ended the run."""
    for rule in ("repetition_penalty=1e300", "repetition_penalty=1e-300", f"min_new_tokens={10**20}"):
        with pytest.raises(UsageError, match="token_rules"):
            SamplingConfig(token_rules=rule)
    for name in ("top_k", "max_new_tokens", "n_best"):
        with pytest.raises(UsageError, match=f"{name} is 100000000000000000000, but must be at most 2147483647"):
            SamplingConfig(**{name: 10**20})


def test_an_ngram_longer_than_the_text_takes_no_time_and_bans_nothing() -> None:
    """The rule looks back once for each length of an n-gram."""
    sampling = SamplingConfig(max_new_tokens=4, token_rules=f"no_repeat_ngram_size={MOST_NGRAM}")
    rows = [
        Request(prompt_ids=(1, 2, 1, 2), sampling=settings) for settings in (sampling, SamplingConfig(max_new_tokens=4))
    ]
    first, second = engine(rule="search").run(rows)
    assert first.hypotheses[0].token_ids == second.hypotheses[0].token_ids


class Only(TableLM):
    """A draft that can say two tokens only."""

    def forward(self, batch: ForestInput, *, logits: bool = True) -> Tensor | None:
        out = super().forward(batch, logits=logits)
        if out is not None:
            out = out.clone()
            out[..., 2:] = -torch.inf
        return out


def test_impossible_tokens_of_the_draft_stay_impossible() -> None:
    """-inf became a finite number and made drafts that Q never held: the distribution was wrong by half."""
    distribution = torch.tensor([0.05, 0.05, 0.30, 0.20, 0.20, 0.20])
    target = TableLM(distribution.log().expand(6, 6, 6).contiguous())
    decoder = Engine(
        target,
        Only(torch.zeros(6, 6, 6)),
        NumberCodec(6),
        MethodConfig(rule="rejection", num_beams=1, depth=4, width="fixed"),
        batch_size=500,
    )
    count = 6000
    sampling = SamplingConfig(max_new_tokens=1, top_k=0)
    rows = (Request(id=str(i), seed=i, prompt_ids=(0,), sampling=sampling) for i in range(count))
    seen = torch.bincount(torch.tensor([r.hypotheses[0].token_ids[0] for r in decoder.run(rows)]), minlength=6) / count
    assert float((seen - distribution).abs().max()) < 5 * (0.25 / count) ** 0.5  # 5 standard errors


def test_ties_at_a_cut_do_not_depend_on_the_neighbours() -> None:
    """top-p measured its mass over as many entries as the largest top_k of the batch."""
    table = (torch.randn(40, 40, 40, generator=torch.Generator().manual_seed(3)) * 8).round() / 4
    codec = NumberCodec(40, (2,))
    rows = [
        Request(id=str(i), seed=i, prompt_ids=(i % 9,), sampling=SamplingConfig(top_k=5, top_p=0.9, max_new_tokens=8))
        for i in range(40)
    ]
    wide = Request(id="wide", seed=1, prompt_ids=(1,), sampling=SamplingConfig(top_k=12, max_new_tokens=8))
    method = MethodConfig(depth=0)
    alone = [r.hypotheses[0].token_ids for r in Engine(TableLM(table), None, codec, method, batch_size=1).run(rows)]
    beside = list(Engine(TableLM(table), None, codec, method, batch_size=41).run([wide, *rows]))
    assert [r.hypotheses[0].token_ids for r in beside[1:]] == alone


def test_impossible_requests_fail_alone() -> None:
    good = Request(id="good", seed=1, prompt_ids=(1, 2), sampling=SamplingConfig(max_new_tokens=4))
    bad = [
        Request(id="id", seed=1, prompt_ids=(1, VOCABULARY), sampling=good.sampling),
        Request(id="negative", seed=1, prompt_ids=(-1,), sampling=good.sampling),
        Request(id="stop", seed=1, prompt_ids=(1,), sampling=SamplingConfig(stop=("\ud800",))),
    ]
    results = list(engine().run([*bad, good]))
    assert all(isinstance(result.error, InvalidRowError) for result in results[:3])
    assert results[3].hypotheses


def test_a_nan_in_the_draft_does_not_outlive_its_request() -> None:
    class Broken(TableLM):
        """Keeps what it saw: NaN once token 9 stands in the row."""

        def forward(self, batch: ForestInput, *, logits: bool = True) -> Tensor | None:
            out = super().forward(batch, logits=logits)
            bad = (self.tokens == 9).any(1)
            return out if out is None else torch.where(bad[:, None, None], torch.nan, out)

    target, draft = table_pair(1, VOCABULARY, 0.1, ends={9: -40.0})
    decoder = Engine(target, Broken(draft.table), NumberCodec(VOCABULARY), MethodConfig(depth=4), batch_size=1)
    sampling = SamplingConfig(max_new_tokens=20)
    prompts = [(9, 1), (1, 3), (4, 5), (3, 3)]
    results = list(
        decoder.run(Request(id=str(i), seed=i, prompt_ids=p, sampling=sampling) for i, p in enumerate(prompts))
    )
    assert results[0].stats.accepted == 0
    assert all(result.stats.accepted > 0 for result in results[1:])


@pytest.mark.parametrize("kernels", [True, False])
@pytest.mark.parametrize("rule", ["coupled", "search"])
def test_nan_at_a_draft_that_no_beam_reaches_changes_nothing(rule: str, kernels: bool) -> None:
    """It ended the request, so that success depended on the draft. NaN at a beam still ends it, at the same step."""
    target, draft = table_pair(1, VOCABULARY, 0.5)
    sampling = SamplingConfig(max_new_tokens=12)
    request = Request(seed=1, prompt_ids=(1,), sampling=sampling)
    outcomes = set[bool]()
    for token in range(VOCABULARY):
        broken = target.table.clone()
        broken[:, token] = torch.nan  # whatever follows this token
        answers = []
        for depth in (0, 1, 3):
            config = MethodConfig(rule=rule, num_beams=2, depth=depth, drafts_per_layer=8)
            decoder = Engine(TableLM(broken), draft if depth else None, NumberCodec(VOCABULARY, (2,)), config)
            if not kernels:
                decoder.stepper.ops = Ops()
            (result,) = decoder.run([request])
            answers.append(str(result.error) if result.error else [beam.token_ids for beam in result.hypotheses])
        assert answers[0] == answers[1] == answers[2]
        outcomes.add(isinstance(answers[0], str))
    assert outcomes == {True, False}


@pytest.mark.parametrize("beams", [2, 4])
def test_search_finds_all_beams_when_many_tokens_complete_a_stop(beams: int) -> None:
    """Candidates were counted for end tokens only. The same ten tokens as end tokens and as one stop string."""

    class Words(NumberCodec):
        def token_bytes(self, *, skip_special_tokens: bool = True) -> list[bytes]:
            return [b"." if 2 <= token < 12 else b"a" for token in range(self.vocabulary)]

        def decode(self, ids: list[int], *, skip_special_tokens: bool = True) -> str:
            return "".join("." if 2 <= token < 12 else "a" for token in ids)

    target, draft = table_pair(5, 24, 0.5)
    config = MethodConfig(rule="search", num_beams=beams, depth=4)
    settings = {"max_new_tokens": 10, "n_best": beams}

    def run(codec: NumberCodec, stop: tuple[str, ...]) -> list[list[tuple[int, ...]]]:
        sampling = SamplingConfig(stop=stop, **settings)
        rows = (Request(id=str(i), seed=i, prompt_ids=(i % 24, i % 7), sampling=sampling) for i in range(30))
        return [[h.token_ids for h in r.hypotheses] for r in Engine(target, draft, codec, config).run(rows)]

    assert run(Words(24), (".",)) == run(NumberCodec(24, tuple(range(2, 12))), ())


def test_one_run_at_a_time() -> None:
    decoder = engine()
    first = decoder.run(
        [Request(id=str(i), seed=i, prompt_ids=(1,), sampling=SamplingConfig(max_new_tokens=4)) for i in range(9)]
    )
    next(first)
    with pytest.raises(UsageError, match="in use"):
        next(decoder.run([Request(id="b", seed=1, prompt_ids=(1,))]))
    first.close()
    assert next(
        decoder.run([Request(id="c", seed=1, prompt_ids=(1,), sampling=SamplingConfig(max_new_tokens=4))])
    ).hypotheses


def test_a_tiny_temperature_is_not_an_overflow() -> None:
    sampling = SamplingConfig(temperature=1e-38, max_new_tokens=6)
    for rule in ("coupled", "rejection"):
        assert next(engine(rule=rule).run([Request(id="a", seed=1, prompt_ids=(1,), sampling=sampling)])).hypotheses
