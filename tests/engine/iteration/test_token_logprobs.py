"""Log-probabilities of single tokens: what is recorded is what a teacher-forced pass gives.

Guards: a token's value taken from another node or another row, a history that loses its order over several iterations,
rows that ask beside rows that do not, and work in an iteration that nobody asked for.
"""

from __future__ import annotations

import math
from itertools import cycle

import pytest
import torch

from dsbd_cli import MethodConfig, Request, SamplingConfig, UsageError
from dsbd_cli.engine.decoding.engine import Engine
from dsbd_cli.models.transformers_backend.causal import CausalForestModel
from tests.engine.decoding.test_transformers import model, prompts
from tests.helpers.tiny import V
from tests.helpers.toys import NumberCodec, TableLM

METHODS = {
    "search": MethodConfig(rule="search", num_beams=4, depth=3, drafts_per_layer=8),
    "coupled": MethodConfig(rule="coupled", num_beams=4, depth=3, drafts_per_layer=8),
    "rejection": MethodConfig(rule="rejection", num_beams=3, depth=2, width="fixed"),
    "memory-saving": MethodConfig(rule="rejection", num_beams=3, depth=2, memory_saving=True),
    "plain": MethodConfig(rule="coupled", num_beams=2, depth=0),
}


def engine(method: MethodConfig, rows: int = 3) -> tuple[Engine, CausalForestModel]:
    target = CausalForestModel(model("llama"), "llama")
    draft = CausalForestModel(model("llama", 0.02), "llama") if method.depth else None
    return Engine(target, draft, NumberCodec(V, tuple(range(2, 14))), method, batch_size=rows), target


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("name", METHODS)
def test_they_are_those_of_a_teacher_forced_pass(name: str, gated: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """gated: some forests end above layers of which the draft is unsure, so they have fewer than were planned."""
    method = METHODS[name]
    made, target = engine(method)
    if gated:
        goes = cycle([True, False, True, True, False, False, True])
        monkeypatch.setattr(made._planner, "gate", lambda *arguments: lambda confidence: next(goes))
    asks = [SamplingConfig(max_new_tokens=12, n_best=2, token_logprobs=True, top_logprobs=k) for k in (3, 0, 5)]
    plain = SamplingConfig(max_new_tokens=12, n_best=2)
    batch = prompts(9, seed=2)
    requests = [Request(prompt_ids=tuple(ids), sampling=([*asks, plain])[i % 4]) for i, ids in enumerate(batch)]
    lengths = set()
    for ids, request, result in zip(batch, requests, made.run(requests), strict=True):
        for beam in result.hypotheses:
            if not request.sampling.token_logprobs:
                assert beam.tokens is None
                continue
            assert beam.tokens is not None
            assert tuple(token.token_id for token in beam.tokens) == beam.token_ids
            assert math.fsum(token.logprob for token in beam.tokens) == pytest.approx(beam.logprob, abs=1e-5)
            logits = target.plain(torch.tensor([[*ids, *beam.token_ids]]))[0, len(ids) - 1 : -1]
            distribution = logits.float().log_softmax(-1)
            want = distribution.gather(1, torch.tensor(beam.token_ids).unsqueeze(1)).squeeze(1)
            assert [token.logprob for token in beam.tokens] == pytest.approx(want.tolist(), abs=1e-4)
            k = request.sampling.top_logprobs
            best = distribution.topk(k) if k else None
            for position, token in enumerate(beam.tokens):
                assert len(token.top) == k
                if best is not None:
                    assert [value for _, _, value in token.top] == pytest.approx(
                        best.values[position].tolist(), abs=1e-4
                    )
                    assert [other for other, _, _ in token.top] == best.indices[position].tolist()
            lengths.add(len(beam.tokens))
    assert len(lengths) > 1


def test_what_is_recorded_stays_when_a_row_that_asks_for_more_joins() -> None:
    """Batch of 2: the third row takes the second's place while the first is under way."""
    asks = [(8, 2), (2, 2), (2, 5)]
    rows = [
        Request(
            prompt_ids=tuple(ids),
            id=str(index),
            seed=index,
            sampling=SamplingConfig(max_new_tokens=new, token_logprobs=True, top_logprobs=tops),
        )
        for index, (ids, (new, tops)) in enumerate(zip(prompts(3, seed=2), asks, strict=True))
    ]
    together = [result.hypotheses[0].tokens or () for result in engine(METHODS["plain"], rows=2)[0].run(rows)]
    alone = [engine(METHODS["plain"], rows=1)[0].generate(row).hypotheses[0].tokens or () for row in rows]
    for tokens, wanted in zip(together, alone, strict=True):
        assert [[other for other, _, _ in token.top] for token in tokens] == [
            [other for other, _, _ in token.top] for token in wanted
        ]
        for token, other in zip(tokens, wanted, strict=True):
            assert [value for _, _, value in token.top] == pytest.approx([value for _, _, value in other.top], abs=1e-4)


def test_an_answer_of_a_list_may_hold_token_0() -> None:
    """Behind the listed tokens of a node stands token 0 again, as impossible."""
    target = CausalForestModel(model("llama"), "llama")
    codec = NumberCodec(V, (2,))
    made = Engine(target, None, codec, MethodConfig(rule="search", num_beams=3, depth=0), batch_size=1)
    sampling = SamplingConfig(max_new_tokens=4, n_best=3, token_logprobs=True)
    result = made.generate(Request(prompt_ids=(5, 6), sampling=sampling, allow=("0 7 ", "0 9 ", "11 0 ")))
    assert len(result.hypotheses) == 3
    for beam in result.hypotheses:
        assert beam.tokens is not None
        assert math.fsum(token.logprob for token in beam.tokens) == pytest.approx(beam.logprob, abs=1e-5)


def test_asking_changes_no_text() -> None:
    batch = prompts(5, seed=4)

    def texts(**asked: object) -> list[object]:
        made, _ = engine(METHODS["coupled"])
        sampling = SamplingConfig(max_new_tokens=10, n_best=4, **asked)  # type: ignore[arg-type]
        results = made.run([Request(prompt_ids=tuple(ids), sampling=sampling) for ids in batch], seed=3)
        return [(beam.token_ids, beam.logprob, beam.score) for result in results for beam in result.hypotheses]

    assert texts() == texts(token_logprobs=True, top_logprobs=2)


@pytest.mark.parametrize("method", ["search", "plain"])
def test_beams_are_those_of_transformers(method: str) -> None:
    """`beam` is transformers' beam_indices: where the beam stood that a token was appended to."""
    config = METHODS["search"] if method == "search" else MethodConfig(rule="search", num_beams=4, depth=0)
    made, _ = engine(config)
    stock = model("llama")
    stock.generation_config.eos_token_id, stock.generation_config.pad_token_id = list(range(2, 14)), 0
    sampling = SamplingConfig(max_new_tokens=12, n_best=4, token_logprobs=True)
    batch = prompts(6, seed=7)
    results = made.run([Request(prompt_ids=tuple(ids), sampling=sampling) for ids in batch])
    moved = 0
    for ids, result in zip(batch, results, strict=True):
        out = stock.generate(
            torch.tensor([ids]), num_beams=4, num_return_sequences=4, do_sample=False, max_new_tokens=12,
            return_dict_in_generate=True, output_scores=True,
        )  # fmt: skip
        for row, beam in zip(out.beam_indices.tolist(), result.hypotheses, strict=True):
            assert beam.tokens is not None
            beams = [token.beam for token in beam.tokens]
            assert beams == row[: len(beams)]
            moved += len(set(beams)) > 2
    assert moved


def test_top_needs_the_tokens() -> None:
    with pytest.raises(UsageError, match="top_logprobs is 3, but token_logprobs is not asked for"):
        SamplingConfig(top_logprobs=3)
    with pytest.raises(UsageError, match="top_logprobs is 21, but must be between 0 and 20"):
        SamplingConfig(token_logprobs=True, top_logprobs=21)


def test_impossible_tokens_are_not_among_the_likeliest() -> None:
    """Of three tokens five were recorded, token 0 several times, and of a token without a chance which one depended on
    the batch."""
    table = torch.tensor([[0.0, 1.0, -math.inf]] * 3).expand(3, 3, 3)
    made = Engine(TableLM(table), None, NumberCodec(3), MethodConfig(num_beams=2, depth=0))
    ask = SamplingConfig(max_new_tokens=2, token_logprobs=True, top_logprobs=5)
    tokens = made.generate(Request("1", sampling=ask)).hypotheses[0].tokens
    assert tokens is not None
    assert [[other for other, _, _ in token.top] for token in tokens] == [[1, 0], [1, 0]]
