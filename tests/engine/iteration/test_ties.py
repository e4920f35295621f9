"""Models whose logits are often equal: what a row keeps and draws of equal tokens depends on the row alone.

Guards: candidates cut by the batch's largest top_k, an order of ties that changes with the size or the kind of the
candidate set, draws that topk breaks ties of as it likes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache

import pytest
import torch

from dsbd_cli.config.method import MethodConfig
from dsbd_cli.config.sampling import SamplingConfig
from dsbd_cli.engine.core import candidates
from dsbd_cli.engine.core.candidates import CandidateCount, top_candidates
from dsbd_cli.engine.core.topk import BLOCKED_FROM, best_first
from dsbd_cli.engine.decoding.engine import Engine
from dsbd_cli.requests import Request, RequestResult
from tests.helpers.toy import TableModel
from tests.helpers.toys import NumberCodec


@cache
def tables(vocabulary: int) -> list[torch.Tensor]:
    """Of target and draft: logits are one of four numbers."""
    generator = torch.Generator().manual_seed(3)
    return [torch.randint(4, (vocabulary, vocabulary), generator=generator).float() for _ in range(2)]


def tied_engine(rule: str, vocabulary: int, batch_size: int, width: int = 4, eos: tuple[int, ...] = (2,)) -> Engine:
    method = MethodConfig(rule=rule, num_beams=width, drafts_per_layer=8, depth=2)  # type: ignore[arg-type]
    models = [TableModel(table) for table in tables(vocabulary)]
    return Engine(*models, NumberCodec(vocabulary, eos), method, batch_size=batch_size)


def requests(vocabulary: int, samplings: Sequence[SamplingConfig]) -> list[Request]:
    return [
        Request(id=str(i), seed=i, prompt_ids=(3 + i % (vocabulary - 3), 1 + i % 2), sampling=sampling)
        for i, sampling in enumerate(samplings)
    ]


def facts(results: Sequence[RequestResult]) -> list[object]:
    return [[(text.token_ids, text.logprob) for text in result.hypotheses] for result in results]


def beside_and_alone(rule: str, vocabulary: int, samplings: Sequence[SamplingConfig]) -> tuple[list[object], ...]:
    rows = requests(vocabulary, samplings)
    together = facts(list(tied_engine(rule, vocabulary, len(rows)).run(rows)))
    # one engine for rows with stop strings and one for those without, where the code is another
    engines = {stop: tied_engine(rule, vocabulary, 1) for stop in {row.sampling.stop for row in rows}}
    alone = [facts(list(engines[row.sampling.stop].run([row])))[0] for row in rows]
    return together, alone


@pytest.mark.parametrize("vocabulary", [60, BLOCKED_FROM + 77])
@pytest.mark.parametrize("rule", ["coupled", "rejection", "with-replacement"])
@pytest.mark.parametrize("others", [(3, 40), (3, 5, 0)], ids=["another top_k", "no top_k"])
def test_ties_at_the_top_k_cut_do_not_depend_on_the_batch(rule: str, vocabulary: int, others: tuple[int, ...]) -> None:
    samplings = [SamplingConfig(top_k=others[i % len(others)], max_new_tokens=5, n_best=4) for i in range(12)]
    together, alone = beside_and_alone(rule, vocabulary, samplings)
    assert together == alone


@pytest.mark.parametrize("vocabulary", [60, BLOCKED_FROM + 77])
def test_search_does_not_depend_on_a_neighbours_stop_string(vocabulary: int) -> None:
    plain = SamplingConfig(max_new_tokens=6, n_best=4)
    samplings = [replace(plain, stop=("7 ", "11 ")) if i % 4 == 1 else plain for i in range(12)]
    together, alone = beside_and_alone("search", vocabulary, samplings)
    assert together == alone


@pytest.mark.parametrize("vocabulary", [60, BLOCKED_FROM + 77])
def test_search_takes_the_lower_token_of_a_tie(vocabulary: int) -> None:
    """One beam without end tokens: every step is the first of the best tokens."""
    engine = tied_engine("search", vocabulary, 4, width=1, eos=())
    table = engine.target.table  # type: ignore[attr-defined]
    for result in engine.run(requests(vocabulary, [SamplingConfig(max_new_tokens=8)] * 4)):
        last = result.request.prompt_ids[-1]  # type: ignore[index]
        for token in result.hypotheses[0].token_ids:
            best = (table[last] == table[last].max()).nonzero().flatten().tolist()
            assert token == best[0]
            last = token


@pytest.mark.parametrize("vocabulary", [40, 700, BLOCKED_FROM, 5 * BLOCKED_FROM + 21])
@pytest.mark.parametrize("levels", [1, 3, 50])
def test_candidates_are_the_best_in_one_order_whatever_their_number(vocabulary: int, levels: int) -> None:
    """By value, then by token id; against a stable sort."""
    generator = torch.Generator().manual_seed(levels)
    logits = torch.randint(levels, (2, 3, vocabulary), generator=generator).float() - levels // 2
    logits[0, 1] *= -0.0  # zeros of both signs are equal
    order = torch.sort(logits, dim=-1, descending=True, stable=True).indices
    whole = top_candidates(logits, CandidateCount(vocabulary))
    for count in (1, 2, 9, 33, vocabulary - 1):
        few = top_candidates(logits, CandidateCount(count))
        assert torch.equal(few.tokens, order[..., :count].sort(-1).values)
        assert torch.equal(few.logprobs, whole.logprobs.gather(-1, few.tokens))
        own = torch.tensor([[count], [vocabulary]])
        masked = top_candidates(logits, CandidateCount(vocabulary, own, count)).logprobs
        assert torch.equal((masked[0] > -torch.inf).nonzero()[:, 1].view(3, count), few.tokens[0])
        assert torch.equal(masked[1], whole.logprobs[1])
        if count > 1:
            fewer = top_candidates(logits, CandidateCount(count, torch.tensor([[1], [count]]), count)).logprobs
            assert ((fewer > -torch.inf).sum(-1) == torch.tensor([[1], [count]])).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_large_vocabulary_gives_a_row_the_same_bits_in_parts_of_any_size(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    vocabulary = 5 * BLOCKED_FROM + 21
    logits = (4 * torch.randn(7, vocabulary, generator=torch.Generator().manual_seed(3))).to(dtype)
    alone = [top_candidates(row.view(1, 1, -1), CandidateCount(9)) for row in logits]
    wanted = torch.log_softmax(logits.to(torch.float64), -1)
    for swept in (1, 3 * vocabulary, 1 << 20):  # two rows, three rows or more, and all
        monkeypatch.setattr(candidates, "SWEEP_LOGITS_PER_THREAD", swept)
        whole = top_candidates(logits.view(1, 7, -1), CandidateCount(9))
        assert torch.equal(whole.tokens[0], torch.cat([part.tokens[0] for part in alone]))
        assert torch.equal(whole.logprobs[0], torch.cat([part.logprobs[0] for part in alone]))
        torch.testing.assert_close(
            whole.logprobs[0], wanted.gather(1, whole.tokens[0]).to(torch.float32), rtol=0, atol=1e-5
        )


@pytest.mark.parametrize("size", [30, 5000])
def test_of_equal_numbers_the_first_comes_first(size: int) -> None:
    x = torch.randint(-2, 3, (4, size), generator=torch.Generator().manual_seed(1)).float()
    for scale in (1.0, 1e-42, 1e38):  # subnormal and huge ones as well
        values, index = best_first(x * scale, 25)
        assert torch.equal(index, torch.sort(x, descending=True, stable=True).indices[:, :25])
        assert torch.equal(values, (x * scale).gather(1, index))
