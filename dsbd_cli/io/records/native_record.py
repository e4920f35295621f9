"""Native records, one per input row and one per iteration, and the plain text of a row."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from dsbd_cli.io.records.record_parts import MethodRecord, call_fields, calls_text, row_error
from dsbd_cli.io.records.row import Fields, Row
from dsbd_cli.io.schemas.contracts import OUTPUT, STEP, dump_line
from dsbd_cli.requests import Hypothesis, RequestResult
from dsbd_cli.stats import DrafterStats, RequestStats, StepStats


def native_record(row: Row, result: RequestResult | None, method: MethodRecord) -> bytes:
    """Return the record of a row: its best text and then its n best, or its error.

    result: the engine's answer; None for a row with an error of its own.
    """
    record: Fields = {"schema": OUTPUT.id, "index": row.index, "id": row.id}
    if row.metadata is not None:
        record["metadata"] = row.metadata
    record["key"] = row.key
    error = row_error(row, result)
    if error is not None or result is None:
        record["error"] = {"type": type(error).__name__, "message": str(error), "line": row.number}
        return OUTPUT.line(record)
    beams = [_beam(beam) for beam in result.hypotheses]
    record.update({name: value for name, value in beams[0].items() if name not in _OF_TOKENS})
    record["beams"] = beams
    record["usage"] = usage(result)
    record["seed"] = result.request.seed
    record["exactness"] = method.exactness or method.method.exactness
    if result.language is not None:
        record["language"] = result.language
    if result.token_rules:
        record["token_rules"] = result.token_rules
    record["method"] = method.encoded
    record["stats"] = _stats(result.stats)
    return OUTPUT.line(record)


def text_record(row: Row, result: RequestResult | None, method: MethodRecord) -> bytes:
    """Return the best text on one line, escaped as inside a JSON string, or the calls of functions where there is no
    other text, as JSON; an empty line for a row that failed."""
    if row_error(row, result) is not None or result is None:
        return b""
    best = result.hypotheses[0]
    return dump_line(best.text or calls_text(best) or "")[1:-1]


def step_records(steps: list[StepStats]) -> Iterator[bytes]:
    """Yield one record per iteration of a request."""
    for step in steps:
        record: Fields = {"schema": STEP.id}
        record.update((name, getattr(step, name)) for name in _STEP_FIELDS)
        record["layers"] = [
            {name: getattr(layer, name) for name in _LAYER_FIELDS} | _drafter_fields(layer.drafters)
            for layer in step.layers
        ]
        yield STEP.line({**record, **phase_seconds(step)})


_OF_TOKENS = ("token_ids", "token_logprobs", "top_logprobs")  # long, so they are written in the beams only
_STEP_FIELDS = ("id", "iteration", "passed_layers", "steps", "nodes", "kv_slots", "trunk")
_LAYER_FIELDS = ("layer", "drafted", "live_parents", "width", "accepted", "passed")


def usage(result: RequestResult) -> Fields:
    """Return the numbers of tokens: of the prompt, and of all returned texts together."""
    completion = sum([beam.num_tokens for beam in result.hypotheses])
    counts: Fields = {
        "prompt_tokens": result.prompt_tokens,
        "completion_tokens": completion,
        "total_tokens": result.prompt_tokens + completion,
    }
    if reasoning := sum([beam.reasoning_tokens for beam in result.hypotheses]):
        counts["completion_tokens_details"] = {"reasoning_tokens": reasoning}
    if result.source_tokens is not None:
        counts["source_tokens"] = result.source_tokens
    if result.truncated_tokens:
        counts["truncated_tokens"] = result.truncated_tokens
    return counts


def _beam(beam: Hypothesis) -> Fields:
    fields: Fields = {
        "text": beam.text,
        **({} if beam.reasoning is None else {"reasoning": beam.reasoning}),
        **({"tool_calls": call_fields(beam)} if beam.tool_calls else {}),
        **({} if beam.answer_id is None else {"answer_id": beam.answer_id}),
        "finish_reason": beam.finish_reason,
        "logprob": beam.logprob,
        "score": beam.score,
        "num_tokens": beam.num_tokens,
        **({} if beam.valid is None else {"valid": beam.valid}),
    }
    if beam.segments is not None:
        fields["segments"] = [{"start": part.start, "end": part.end, "text": part.text} for part in beam.segments]
    if beam.tokens is not None:
        fields["token_ids"] = beam.token_ids
        fields["token_logprobs"] = [token.logprob for token in beam.tokens]
        if any(token.top for token in beam.tokens):
            fields["top_logprobs"] = [[[other, value] for other, _, value in token.top] for token in beam.tokens]
    return fields


def _stats(stats: RequestStats) -> Fields:
    return {
        "target_calls": stats.target_calls,
        "draft_calls": stats.draft_calls,
        "steps": stats.steps,
        "steps_per_call": round(stats.steps_per_call, 6),
        **draft_fields(stats),
        "mean_width": round(stats.mean_width, 6),
        "kv_peak_slots": stats.kv_peak_slots,
        "prompt_tokens_reused": stats.prompt_tokens_reused,
        **phase_seconds(stats),
        "total_s": round(stats.total_s, 6),
    }


def draft_fields(stats: RequestStats) -> Fields:
    """Return the numbers of drafted and accepted nodes and their share, of all drafters and of each."""
    record = _acceptance(stats)
    if stats.drafters:
        record |= _drafter_fields(stats.drafters)
    return record


def _drafter_fields(drafters: Mapping[str, DrafterStats]) -> Fields:
    """Return the acceptance by drafter where there are two, else nothing."""
    record = {name: _acceptance(part) for name, part in drafters.items()}
    return {"drafters": record} if record else {}


def _acceptance(counts: DrafterStats | RequestStats) -> Fields:
    rate = None if counts.acceptance_rate is None else round(counts.acceptance_rate, 6)
    return {"drafted": counts.drafted, "accepted": counts.accepted, "acceptance_rate": rate}


def phase_seconds(stats: RequestStats | StepStats) -> Fields:
    """Return the seconds of drafting, of target calls and of verification."""
    return {
        "draft_s": round(stats.draft_s, 6),
        "target_s": round(stats.target_s, 6),
        "verify_s": round(stats.verify_s, 6),
    }
