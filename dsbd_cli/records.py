"""JSONL records: one input line to one Request, one result to one output line.

In   {"id"? | "custom_id"?, "prompt" | "messages", overrides of the run's sampling options}; `null` means not given.
Out  dsbd.output/1, one record per input row, and dsbd.step/1, one record per iteration.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterator
from dataclasses import dataclass, field, fields, replace

import orjson

from dsbd_cli.config import MethodConfig, RuleName, SamplingConfig
from dsbd_cli.errors import DsbdError, InvalidRowError, NumericalError, UsageError
from dsbd_cli.requests import Hypothesis, Request, RequestResult, derive_seed
from dsbd_cli.stats import RequestStats, StepStats

__all__ = [
    "OUTPUT_SCHEMA",
    "ROW_FIELDS",
    "STEP_SCHEMA",
    "FailedRow",
    "MethodRecord",
    "RowReader",
    "checked",
    "error_record",
    "output_record",
    "step_records",
]

OUTPUT_SCHEMA = "dsbd.output/1"
STEP_SCHEMA = "dsbd.step/1"

ALIASES = {"custom_id": "id", "max_tokens": "max_new_tokens", "n": "n_best"}
WARP_FIELDS = ("temperature", "top_k", "top_p", "min_p")
ROW_FIELDS = ("id", "prompt", "messages", "seed", *(item.name for item in fields(SamplingConfig)))
MAX_SHOWN = 60

Row = dict[str, object]


def shorten(value: object) -> str:
    """A value as it stands in an error message: one line, at most MAX_SHOWN characters."""
    text = repr(value[:MAX_SHOWN] if isinstance(value, str | list) else value)
    return text if len(text) <= MAX_SHOWN else f"{text[: MAX_SHOWN - 1]}…"


@dataclass(frozen=True, slots=True)
class FailedRow:
    """A row that failed before it reached the model."""

    id: str
    error: DsbdError


@dataclass(frozen=True, slots=True)
class RowReader:
    """Turns input lines into requests; holds what a row inherits from the run."""

    sampling: SamplingConfig = field(default_factory=SamplingConfig)
    seed: int = 0
    rule: RuleName = "coupled"
    num_beams: int = 4

    def read(self, line: bytes, *, index: int, number: int) -> Request | FailedRow:
        """The request of row `index` (from 0), found on line `number` (from 1). What is in the line never raises."""
        row_id = str(index)
        try:
            raw = _parse_object(line)
            row_id = _row_id(raw, row_id)
            return self._request(_named(raw), row_id)
        except (InvalidRowError, UsageError) as error:
            return FailedRow(row_id, InvalidRowError(f"line {number}: {error}"))

    def _request(self, row: Row, row_id: str) -> Request:
        prompt, messages = _prompt(row)
        seed = _integer(row, "seed", -1)
        if "seed" in row and not 0 <= seed < 2**63:
            raise InvalidRowError(f"seed is {seed}, but must be from 0 to 2**63 - 1")
        return Request(
            id=row_id,
            seed=seed if "seed" in row else derive_seed(self.seed, row_id),
            prompt=prompt,
            messages=messages,
            sampling=self._sampling(row),
        )

    def _sampling(self, row: Row) -> SamplingConfig:
        unused = [name for name in WARP_FIELDS if name in row]
        if unused and self.rule == "search":
            raise InvalidRowError(
                f"{unused[0]} is {shorten(row[unused[0]])}, but the rule search draws nothing: drop it"
            )
        run = self.sampling
        sampling = SamplingConfig(
            temperature=_number(row, "temperature", run.temperature),
            top_k=_integer(row, "top_k", run.top_k),
            top_p=_number(row, "top_p", run.top_p),
            min_p=_number(row, "min_p", run.min_p),
            max_new_tokens=_integer(row, "max_new_tokens", run.max_new_tokens),
            stop=_strings(row, "stop", run.stop),
            length_penalty=_number(row, "length_penalty", run.length_penalty),
            early_stopping=_boolean(row, "early_stopping", run.early_stopping),
            n_best=_integer(row, "n_best", run.n_best),
        )
        if sampling.n_best > self.num_beams:
            raise InvalidRowError(
                f"n_best is {sampling.n_best}, but the run has num_beams {self.num_beams}: lower n_best"
            )
        return sampling


# Fields of a row


def _parse_object(line: bytes) -> Row:
    try:
        row: object = orjson.loads(line)
    except orjson.JSONDecodeError as error:
        raise InvalidRowError(f"not valid JSON: {error.msg} at character {error.pos + 1}: {_shown(line)}") from None
    if not isinstance(row, dict):
        raise InvalidRowError(f"not a JSON object: {_shown(line)}")
    return row


def _shown(line: bytes) -> str:
    return shorten(line[: 4 * MAX_SHOWN].decode("utf-8", "replace"))


def _row_id(raw: Row, default: str) -> str:
    value = next((raw[name] for name in ("id", "custom_id") if raw.get(name) is not None), default)
    if type(value) is int:
        return str(value)
    if not isinstance(value, str) or not value:
        raise InvalidRowError(f"id is {shorten(value)}, but must be a non-empty string or an integer")
    return value


def _named(raw: Row) -> Row:
    """The row under its fields' own names, without those that are null."""
    row: Row = {}
    for name, value in raw.items():
        known = ALIASES.get(name, name)
        if known not in ROW_FIELDS:
            near = difflib.get_close_matches(name[:MAX_SHOWN], (*ROW_FIELDS, *ALIASES), n=1)
            hint = f"did you mean {near[0]}?" if near else f"the fields are {', '.join(ROW_FIELDS)}"
            raise InvalidRowError(f"unknown field {shorten(name)} (value {shorten(value)}): {hint}")
        if value is None:
            continue
        if known in row:
            raise InvalidRowError(f"{name} is {shorten(value)}, but {known} is given under another name too: drop one")
        row[known] = value
    return row


def _prompt(row: Row) -> tuple[str | None, tuple[dict[str, str], ...] | None]:
    prompt, messages = row.get("prompt"), row.get("messages")
    if prompt is not None and messages is not None:
        raise InvalidRowError("prompt and messages are both given: give one of them")
    if messages is not None:
        return None, _messages(messages)
    if prompt is None:
        raise InvalidRowError("neither prompt nor messages is given")
    if not isinstance(prompt, str) or not prompt:
        raise InvalidRowError(f"prompt is {shorten(prompt)}, but must be a non-empty string")
    return prompt, None


def _messages(value: object) -> tuple[dict[str, str], ...]:
    if not isinstance(value, list) or not value:
        raise InvalidRowError(f"messages is {shorten(value)}, but must be a non-empty list of objects")
    messages: list[dict[str, str]] = []
    for place, message in enumerate(value):
        if not isinstance(message, dict) or set(message) != {"role", "content"}:
            raise InvalidRowError(
                f"messages[{place}] is {shorten(message)}, but must be an object with role and content"
            )
        for name, text in message.items():
            if not isinstance(text, str):
                raise InvalidRowError(f"messages[{place}].{name} is {shorten(text)}, but must be a string")
        messages.append({"role": message["role"], "content": message["content"]})
    return tuple(messages)


def _number(row: Row, name: str, default: float) -> float:
    value = row.get(name, default)
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise InvalidRowError(f"{name} is {shorten(value)}, but must be a number")
    return float(value)


def _integer(row: Row, name: str, default: int) -> int:
    value = row.get(name, default)
    if isinstance(value, bool) or not isinstance(value, int):
        raise InvalidRowError(f"{name} is {shorten(value)}, but must be an integer")
    return value


def _boolean(row: Row, name: str, default: bool) -> bool:
    value = row.get(name, default)
    if not isinstance(value, bool):
        raise InvalidRowError(f"{name} is {shorten(value)}, but must be true or false")
    return value


def _strings(row: Row, name: str, default: tuple[str, ...]) -> tuple[str, ...]:
    value = row.get(name, default)
    items = [value] if isinstance(value, str) else value
    if not isinstance(items, list | tuple) or not all(isinstance(item, str) and item for item in items):
        raise InvalidRowError(f"{name} is {shorten(value)}, but must be a non-empty string or a list of them")
    return tuple(items)


# Output


@dataclass(frozen=True, slots=True)
class MethodRecord:
    """What is the same in every output record of a run: the method and the names of the models."""

    method: MethodConfig
    target: str
    draft: str | None

    def fields(self) -> Row:
        """The `method` object of a record; what does not act in this run is null."""
        method = self.method
        drafted = method.depth > 0
        dynamic = drafted and method.width == "threshold"
        return {
            "rule": method.rule,
            "num_beams": method.num_beams,
            "drafts_per_layer": method.drafts_per_layer if drafted else None,
            "depth": method.depth,
            "width": method.width,
            "width_threshold": method.width_threshold if dynamic else None,
            "min_width": method.min_width if dynamic else None,
            "warp_scope": method.warp_scope,
            "memory_saving": method.memory_saving,
            "target": self.target,
            "draft": self.draft,
        }


def error_record(index: int, row_id: str, error: DsbdError) -> bytes:
    """The record of a row that failed."""
    kind = type(error).__name__
    return orjson.dumps(
        {"schema": OUTPUT_SCHEMA, "index": index, "id": row_id, "error": {"type": kind, "message": str(error)}}
    )


def checked(result: RequestResult) -> RequestResult:
    """The result itself, or a failed one where a score is not a finite number: NaN is never written."""
    broken = [beam for beam in result.hypotheses if not (math.isfinite(beam.logprob) and math.isfinite(beam.score))]
    if result.error is not None or not broken:
        return result
    message = f"logprob is {broken[0].logprob} and score is {broken[0].score}: not finite numbers"
    return replace(result, error=NumericalError(message))


def output_record(index: int, result: RequestResult, method: MethodRecord) -> bytes:
    """The record of a `checked` result without an error: its best text first, then its n best."""
    request, beams = result.request, result.hypotheses
    completion = sum(beam.num_tokens for beam in beams)
    return orjson.dumps(
        {
            "schema": OUTPUT_SCHEMA,
            "index": index,
            "id": request.id,
            **_beam(beams[0]),
            "beams": [_beam(beam) for beam in beams],
            "usage": {
                "prompt_tokens": result.prompt_tokens,
                "completion_tokens": completion,
                "total_tokens": result.prompt_tokens + completion,
            },
            "seed": request.seed,
            "exactness": method.method.exactness,
            "method": method.fields(),
            "stats": _stats(result.stats),
        }
    )


def _beam(beam: Hypothesis) -> Row:
    return {
        "text": beam.text,
        "finish_reason": beam.finish_reason,
        "logprob": beam.logprob,
        "score": beam.score,
        "num_tokens": beam.num_tokens,
    }


def _stats(stats: RequestStats) -> Row:
    rate = stats.acceptance_rate
    return {
        "target_calls": stats.target_calls,
        "draft_calls": stats.draft_calls,
        "steps": stats.steps,
        "steps_per_call": round(stats.steps_per_call, 6),
        "drafted": stats.drafted,
        "accepted": stats.accepted,
        "acceptance_rate": rate if rate is None else round(rate, 6),
        "mean_width": round(stats.mean_width, 6),
        "kv_peak_slots": stats.kv_peak_slots,
        **_seconds(stats),
        "total_s": round(stats.total_s, 6),
    }


def _seconds(stats: RequestStats | StepStats) -> Row:
    return {name: round(getattr(stats, name), 6) for name in ("draft_s", "target_s", "verify_s")}


def step_records(steps: list[StepStats]) -> Iterator[bytes]:
    """One record per iteration of a request."""
    for step in steps:
        record = {name: getattr(step, name) for name in _STEP_FIELDS}
        record["layers"] = [{name: getattr(layer, name) for name in _LAYER_FIELDS} for layer in step.layers]
        yield orjson.dumps({"schema": STEP_SCHEMA, **record, **_seconds(step)})


_STEP_FIELDS = ("id", "iteration", "passed_layers", "steps", "nodes", "kv_slots", "trunk", "layers")
_LAYER_FIELDS = ("layer", "drafted", "live_parents", "width", "accepted", "passed")
