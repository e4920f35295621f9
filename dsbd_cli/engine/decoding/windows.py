"""Sources that are read in several windows: from the answer to one window to the next window, or to the result of all.
Host side."""

from __future__ import annotations

import time
from dataclasses import replace
from itertools import chain

from dsbd_cli.engine.decoding.results import without_end
from dsbd_cli.engine.iteration.request_state import RequestState
from dsbd_cli.engine.protocols import SourceWindows, TextCodec
from dsbd_cli.errors import RowError
from dsbd_cli.requests import Hypothesis, RequestResult
from dsbd_cli.stats import RequestStats


def next_window(job: RequestState, result: RequestResult, codec: TextCodec) -> RequestState | RequestResult:
    """Return the state that the request goes on with in its next window, or its result where there is none.

    result: of the present window; of the whole source where that has no windows.
    """
    if job.windows is None:
        return result
    answers = (*job.answers, result)
    if result.error is not None:
        return replace(result, stats=_sum(answers))
    try:
        window = job.windows.advance(without_end(list(result.hypotheses[0].token_ids), job, codec))
    except RowError as error:
        return replace(result, hypotheses=(), stats=_sum(answers), error=error)
    if window is None:
        return _joined(answers, job.windows)
    now = time.perf_counter()
    return replace(job, stats=RequestStats(), started=now, retried=False, encoder_input=window, answers=answers)


def _joined(answers: tuple[RequestResult, ...], windows: SourceWindows) -> RequestResult:
    """Return one result of all windows. Its tokens are those of all windows as they were generated, because its
    log-probability is the sum of theirs."""
    last, best = answers[-1], [answer.hypotheses[0] for answer in answers]
    ids = tuple(chain.from_iterable(part.token_ids for part in best))
    logprob = sum(part.logprob for part in best)
    details = tuple(chain.from_iterable(part.tokens or () for part in best))
    whole = Hypothesis(
        windows.text,
        ids,
        "length" if any(part.finish_reason == "length" for part in best) else "stop",
        logprob,
        logprob / len(ids) ** last.request.sampling.length_penalty,
        tokens=details or None,
        segments=windows.segments,
    )
    return replace(
        last,
        hypotheses=(whole,),
        prompt_tokens=sum(answer.prompt_tokens for answer in answers),
        stats=_sum(answers),
        source_tokens=sum(answer.source_tokens or 0 for answer in answers),
    )


def _sum(answers: tuple[RequestResult, ...]) -> RequestStats:
    """Return the sums of the statistics of all windows. Their iterations are numbered from 1 on."""
    stats = RequestStats.total(answer.stats for answer in answers)
    for number, step in enumerate(stats.step_log, 1):
        step.iteration = number
    return stats
