"""Conversion of device rows to results: hypotheses to text, counters to statistics. It runs on the host, once per
request or iteration."""

from __future__ import annotations

import time
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from itertools import accumulate
from typing import NamedTuple

import torch

from dsbd_cli.answer_forms import Reasoning
from dsbd_cli.config.sampling import SamplingConfig
from dsbd_cli.engine.constraints.grammar import GrammarCompiler
from dsbd_cli.engine.constraints.legal import FREE
from dsbd_cli.engine.constraints.stops import find_stop
from dsbd_cli.engine.core.beams import Finished
from dsbd_cli.engine.core.report import SOURCE_BITS, LayerCounters, RowCounters
from dsbd_cli.engine.core.topk import NEG_INF
from dsbd_cli.engine.iteration.batch_state import BatchState
from dsbd_cli.engine.iteration.request_state import RequestState
from dsbd_cli.engine.iteration.token_logprobs import TokenTrace, token_details
from dsbd_cli.engine.protocols import AnswerCodec, EncoderDecoderCodec, TextCodec
from dsbd_cli.errors import InvalidRowError, NumericalError, RowError, plural
from dsbd_cli.requests import FinishReason, Hypothesis, RequestResult, ToolCall
from dsbd_cli.stats import DrafterStats, LayerStats, StepStats


@dataclass(frozen=True, slots=True)
class FinishedRow:
    """The F finished hypotheses of a row, on the host, best first, as in `Finished`."""

    score: list[float]
    logprob: list[float]
    length: list[int]
    by_length: list[bool]
    tokens: list[list[int]]


def read_finished(finished: Finished, rows: Sequence[int]) -> list[FinishedRow]:
    """Return the finished hypotheses of these rows, one entry per row."""
    at = torch.tensor(rows, device=finished.score.device)
    columns = (getattr(finished, item.name)[at].tolist() for item in fields(FinishedRow))
    return [FinishedRow(*row) for row in zip(*columns, strict=True)]


def collect(
    finished: FinishedRow,
    row: int,
    job: RequestState,
    codec: TextCodec,
    grammars: GrammarCompiler,
    trace: TokenTrace | None = None,
) -> RequestResult:
    """Return the result of a finished row: its n_best hypotheses, best first. Under a grammar the valid ones come
    before the others. trace: given where the row asks for it."""
    job.stats.total_s = time.perf_counter() - job.started
    sampling = job.request.sampling
    score, logprob, length = finished.score, finished.logprob, finished.length
    prefix = job.prompt[len(job.prompt) - job.prefix :]
    hypotheses = []
    ranks = [rank for rank in range(len(score)) if score[rank] != -torch.inf]
    texts = [finished.tokens[rank][: length[rank]] for rank in ranks]
    shown = [ids if sampling.include_stop_str_in_output else without_end(ids, job, codec) for ids in texts]
    grammar = job.grammar
    whole = [None] * len(shown) if grammar is None else grammars.matches(grammar, shown)
    ranks.sort(key=lambda rank: whole[rank] is False)  # a stable sort: otherwise they stay in the order of their scores
    for rank in ranks[: sampling.n_best]:
        ids, valid = texts[rank], whole[rank]
        text = text_of(shown[rank], sampling, codec, prefix, job.reasoning)
        answer = read_answer(text, job, codec)
        reason: FinishReason = "length" if finished.by_length[rank] else "stop"
        answer_id = None if job.catalogue is None else job.catalogue.id_of(ids)
        details = None
        if sampling.token_logprobs and trace is not None:
            details = token_details(trace, row, rank, ids, sampling, bytes_of(codec, sampling))
        spoken = None
        if job.rules.timestamps and isinstance(codec, EncoderDecoderCodec):
            spoken = codec.segments(shown[rank], skip_special_tokens=sampling.skip_special_tokens)
        hypotheses.append(
            Hypothesis(
                answer.text,
                tuple(ids),
                reason,
                logprob[rank],
                score[rank],
                answer_id,
                valid,
                details,
                spoken,
                None if sampling.reasoning == "drop" else answer.reasoning,
                answer.calls,
                0 if answer.reasoning is None else reasoning_tokens(ids, job, codec),
            )
        )
    error: RowError | None = None
    rules = ", ".join(job.rules.acting)
    if not hypotheses and grammar is not None:
        gave_up = grammars.fault(grammar)
        alone = f"no token of the vocabulary goes on{f' that token_rules ({rules}) leave' if rules else ''}"
        why = alone if gave_up is None else f"llguidance gave up: {gave_up}"
        error = InvalidRowError(f"grammar came to a dead end after {plural(job.stats.steps, 'step')}: {why}")
    elif not hypotheses and job.catalogue is not None and rules:
        error = InvalidRowError(f"token_rules ({rules}) leave none of the allowed answers: switch them off")
    elif not hypotheses and rules:
        error = InvalidRowError(f"token_rules ({rules}) leave no token after {plural(job.stats.steps, 'step')}")
    elif not hypotheses:
        error = NumericalError("no hypothesis has a finite score: the settings of this row are too extreme")
    return result_of(job, hypotheses, error)


def nan_result(job: RequestState) -> RequestResult:
    """Return the result of a row whose model returned NaN: an error."""
    error = NumericalError(
        f"the target returned NaN after {job.stats.steps} steps: the checkpoint may need another dtype (try float32)"
    )
    return result_of(job, (), error)


def result_of(job: RequestState, hypotheses: Sequence[Hypothesis], error: RowError | None) -> RequestResult:
    """Return the result of a request that was encoded: its hypotheses, or an error."""
    return RequestResult(
        job.request,
        tuple(hypotheses),
        len(job.prompt) + (job.source_tokens or 0),
        job.stats,
        error,
        truncated_tokens=job.truncated,
        source_tokens=job.source_tokens,
        token_rules=job.rules.acting,
        language=job.language,
    )


def without_end(ids: list[int], job: RequestState, codec: TextCodec) -> list[int]:
    """Return the tokens of a text without the end token that ended it."""
    ends = codec.eos_ids if job.ends.tokens is None else job.ends.tokens
    return ids[:-1] if ids[-1] in ends else ids


def bytes_of(codec: TextCodec, sampling: SamplingConfig) -> list[bytes]:
    """Return the bytes that each token adds to the text of a request."""
    return codec.token_bytes() if sampling.skip_special_tokens else codec.token_bytes(skip_special_tokens=False)


class AnswerParts(NamedTuple):
    """A text, read by the form of the checkpoint's answers."""

    text: str
    reasoning: str | None
    calls: tuple[ToolCall, ...]


def read_answer(text: str, job: RequestState, codec: TextCodec) -> AnswerParts:
    """Return the parts of a text: the answer, its reasoning and the calls of functions that it holds."""
    reasoning: str | None = None
    calls: tuple[ToolCall, ...] = ()
    if job.reasoning is not None:
        reasoning, text = job.reasoning.split(text)
    if job.request.chat.reads_calls and isinstance(codec, AnswerCodec):
        text, calls = codec.form.read_calls(text, job.request.chat.tools)
    return AnswerParts(text, reasoning, calls)


def reasoning_tokens(ids: list[int], job: RequestState, codec: TextCodec) -> int:
    """Return how many of the generated tokens are reasoning, with its marks."""
    token_bytes = bytes_of(codec, job.request.sampling)
    prefix = job.request.sampling.prefix or ""
    reasoning = None if job.reasoning is None else job.reasoning.after(prefix.encode())
    at = 0 if reasoning is None else reasoning.answer_at(joined_bytes(ids, token_bytes))
    if at is None:
        return len(ids)
    ends = list(accumulate(len(joined_bytes([token], token_bytes)) for token in ids))
    return bisect_left(ends, at) + 1 if at else 0


def joined_bytes(ids: Iterable[int], token_bytes: Sequence[bytes]) -> bytes:
    """Return the bytes of a text. Tokens past the table have none."""
    return b"".join(token_bytes[token] if token < len(token_bytes) else b"" for token in ids)


def text_of(
    ids: list[int],
    sampling: SamplingConfig,
    codec: TextCodec,
    prefix: Sequence[int] = (),
    reasoning: Reasoning | None = None,
) -> str:
    """Return the text of the prefix and of the tokens, up to the stop string that the last token completed, or up to
    its end where it is included.

    prefix: the tokens that hold the text of sampling.prefix; the first of them may hold an end of the prompt, too.

    The stop string is found in the tokens' bytes, as the automaton finds it. A decoder may change the text (most drop a
    leading space), but what follows that place is at the end of both. reasoning: of the prefix and the tokens; stop
    strings are looked for behind it alone.
    """

    def decode(some: list[int]) -> str:
        return codec.decode(some) if sampling.skip_special_tokens else codec.decode(some, skip_special_tokens=False)

    if prefix:
        begun = sampling.prefix or ""
        rest = None if reasoning is None else reasoning.after(begun.encode())
        text = text_of(ids, sampling, codec, (), rest)
        shown, whole = decode([*prefix]), decode([*prefix, *ids])
        if not whole.startswith(shown):  # some tokenizers decode a run of byte tokens as a whole: this one is no text
            return begun + text
        stopped = _stopped(ids, sampling, codec, rest)
        if stopped is not None and whole.endswith(stopped.behind):
            whole = whole.removesuffix(stopped.behind)
        else:
            whole = whole[: len(whole) - len(decode(ids)) + len(text)]
        at = shown.rfind(begun)  # -1 where the decoder changes the prefix
        return whole[at:] if at >= 0 else begun + whole[len(shown) :]
    text, stopped = decode(ids), _stopped(ids, sampling, codec, reasoning)
    if stopped is None:
        return text
    if text.endswith(stopped.behind):
        return text.removesuffix(stopped.behind)
    if stopped.behind.endswith(text):
        return ""
    # the decoder changes the end, too: decode the tokens before the one in which the cut is, add the rest
    ends = list(accumulate(map(len, stopped.pieces)))
    count = bisect_right(ends, stopped.cut)
    begin = ends[count - 1] if count else 0
    return decode(ids[:count]) + b"".join(stopped.pieces)[begin : stopped.cut].decode(errors="replace")


class _Stopped(NamedTuple):
    """A text that a stop string ends: the bytes of its tokens, the byte that it is cut at, and the text behind it."""

    pieces: list[bytes]
    cut: int
    behind: str


def _stopped(
    ids: list[int], sampling: SamplingConfig, codec: TextCodec, reasoning: Reasoning | None
) -> _Stopped | None:
    """Return where a stop string ends the text of these tokens; None where none does."""
    if not sampling.stop:
        return None
    token_bytes = bytes_of(codec, sampling)
    pieces = [token_bytes[token] if token < len(token_bytes) else b"" for token in ids]
    joined = b"".join(pieces)
    begin = 0 if reasoning is None else reasoning.stops_at(joined)
    if begin is None or (begin_of_stop := find_stop(joined[begin:], sampling.stop)) is None:
        return None
    cut = begin + begin_of_stop[1 if sampling.include_stop_str_in_output else 0]
    return _Stopped(pieces, cut, joined[cut:].decode(errors="replace"))


def common_tokens(state: BatchState, row: int) -> list[int]:
    """Return the generated tokens of a running row that its best hypothesis will certainly begin with.

    The final best hypothesis is the best of those that are finished now, or it continues a live beam. So these are the
    tokens that all live beams and the best finished hypothesis share. Where several finished hypotheses have the best
    score, all of them count. Under a grammar all finished ones count, because a valid one comes before a better one
    that is not valid. This reads the device, so it is called only between iterations.
    """
    beams, finished = state.beams, state.finished
    score = finished.score[row]
    start = state.legal_starts[row]
    under_grammar = start is not None and start < FREE
    best = (score > NEG_INF) & ((score == score.amax()) | under_grammar)
    able = torch.cat((beams.history[row], finished.tokens[row]))[torch.cat((beams.valid[row], best))]
    length = torch.where(best, finished.length[row], beams.length[row]).amin()
    count = (able == able[:1]).all(0)[: int(length)].to(torch.int64).cumprod(0).sum()
    tokens: list[int] = able[0, : int(count)].tolist()
    return tokens


def record_iteration(
    job: RequestState,
    counters: RowCounters,
    layers: Sequence[LayerCounters],
    seconds: dict[str, float],
    num_requests: int,
    nodes: int,
    log: bool,
    drafters: tuple[str, ...] = (),
) -> None:
    """Add one iteration to a request's statistics. seconds: of the whole iteration, shared by `num_requests` requests.
    drafters: names that drafted nodes are counted by, if they are."""
    stats = job.stats
    for layer in layers if drafters else ():
        for name, part in _by_drafter(layer, drafters).items():
            part.accepted *= layer.reached
            stats.drafters.setdefault(name, DrafterStats()).add(part)
    times = {name: value / num_requests for name, value in seconds.items()}
    stats.target_calls += 1
    stats.steps += counters.steps
    stats.drafted += sum(layer.drafted for layer in layers)
    stats.accepted += sum(layer.accepted for layer in layers if layer.reached)
    stats.width_sum += counters.width_sum
    stats.kv_peak_slots = max(stats.kv_peak_slots, job.used + nodes)
    stats.draft_s += times["draft"]
    stats.target_s += times["target"]
    stats.verify_s += times["verify"]
    if log:
        reached = [
            LayerStats(
                layer=number,
                drafted=layer.drafted,
                live_parents=layer.live_parents,
                width=layer.width,
                accepted=layer.accepted,
                passed=bool(layer.passed),
                drafters=_by_drafter(layer, drafters),
            )
            for number, layer in enumerate(layers, 1)
            if layer.reached
        ]
        stats.step_log.append(
            StepStats(
                id=job.request.id,
                iteration=stats.target_calls,
                passed_layers=sum(layer.passed for layer in reached),
                steps=counters.steps,
                nodes=nodes,
                kv_slots=job.used + nodes,
                trunk=job.common_prefix,
                layers=reached,
                draft_s=times["draft"],
                target_s=times["target"],
                verify_s=times["verify"],
            )
        )


def _by_drafter(layer: LayerCounters, drafters: tuple[str, ...]) -> dict[str, DrafterStats]:
    """Return the drafted and accepted nodes of a layer by drafter or source, as `LayerNodes.drafter_id` numbers them.
    The first has those that no other has. An empty name has none."""
    if not drafters:
        return {}
    counts = {}
    drafted, accepted = layer.drafted, layer.accepted
    for number, name in enumerate(drafters[1:]):
        shift, mask = SOURCE_BITS * number, (1 << SOURCE_BITS) - 1
        if name:
            counts[name] = DrafterStats((layer.drafted_by >> shift) & mask, (layer.accepted_by >> shift) & mask)
            drafted, accepted = drafted - counts[name].drafted, accepted - counts[name].accepted
    return {drafters[0]: DrafterStats(drafted, accepted), **counts}
