"""Parts that every output format shares: the names of the run, and which rows failed."""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field

import orjson

from dsbd_cli.config.method import MethodConfig
from dsbd_cli.config.sampling import SamplingConfig
from dsbd_cli.config.variant import Exactness
from dsbd_cli.config.variants import MIN_WIDTH, RULES, WIDTH_THRESHOLD
from dsbd_cli.errors import NumericalError, RowError, shorten, shown_name
from dsbd_cli.io.records.reader import WARP_FIELDS, RowReader
from dsbd_cli.io.records.row import Fields, Row
from dsbd_cli.requests import Hypothesis, RequestResult


@dataclass(frozen=True, slots=True)
class CarriedColumn:
    """A column of the input table that an output table has, too.

    Attributes:
        name: in the output. source: in the input, and so in the rows' metadata.
        kind: type of numbers and booleans, as pyarrow spells it; None: text.
    """

    name: str
    source: str
    kind: str | None = None


@dataclass(frozen=True, slots=True)
class MethodRecord:
    """Facts that are the same in every output record of a run: the method, the names of the models, and the columns
    that an output table takes from its input."""

    method: MethodConfig
    target: str
    draft: str | None
    created: int = 0  # Unix time at which the run began, in seconds; the same when it is resumed
    quantize: str | None = None  # form of the target's weights, once it is loaded; None: plain
    exactness: Exactness | None = None  # of this run, once the target is loaded; None: the method's
    threads: int | None = None  # of the processor, once the target is loaded; a resumed run may have another number
    carried: tuple[CarriedColumn, ...] = ()
    encoded: orjson.Fragment = field(init=False, repr=False, compare=False)  # fields() and threads, as JSON
    fingerprint: str = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        # a folder's name may hold bytes that are not UTF-8
        object.__setattr__(self, "target", _escape_bad_bytes(self.target))
        object.__setattr__(self, "draft", None if self.draft is None else _escape_bad_bytes(self.draft))
        encoded = orjson.dumps({**self.fields(), "threads": self.threads})
        object.__setattr__(self, "encoded", orjson.Fragment(encoded))
        object.__setattr__(self, "fingerprint", f"fp_{hashlib.blake2b(encoded, digest_size=5).hexdigest()}")

    def fields(self) -> Fields:
        """Return the `method` object of a record without its threads. A setting that does not act in this run is
        null."""
        method = self.method
        drafted = method.depth > 0
        dynamic = drafted and method.dynamic
        return {
            "rule": method.rule,
            "num_beams": method.num_beams,
            "drafts_per_layer": method.drafts_per_layer if drafted else None,
            "depth": "auto" if method.adaptive_depth else method.depth,
            "width": method.width,
            "width_threshold": method.value(WIDTH_THRESHOLD) if dynamic else None,
            "min_width": method.value(MIN_WIDTH) if dynamic else None,
            "warp_scope": method.warp_scope,
            "memory_saving": method.memory_saving,
            "drafter": method.drafter if drafted else None,
            **self._settings(),
            "target": self.target,
            "draft": self.draft,
            "quantize": self.quantize,
        }

    def _settings(self) -> Fields:
        """Return the settings of drafters and rule. One that another setting keeps from acting is null."""
        method, values = self.method, self.method.resolved
        variants = (*method.drafters, RULES[method.rule])
        names = [setting.field for variant in variants for setting in variant.settings]
        return {name: _escape_bad_bytes(value) if isinstance(value := values[name], str) else value for name in names}


def _escape_bad_bytes(name: str) -> str:
    return name.encode("utf-8", "backslashreplace").decode()


def row_error(row: Row, result: RequestResult | None) -> RowError | None:
    """Return why a row has no answer, or None. A score that is not finite is an error, so that NaN is never written."""
    if row.error is not None:
        return row.error
    assert result is not None, "a row without an error has a result"
    if result.error is not None:
        message = str(result.error)
        for name, written in row.written:
            message = re.sub(rf"\b{name}\b", written.replace("\\", r"\\"), message)
        return type(result.error)(f"line {row.number}: {message}")
    for beam in result.hypotheses:
        if not (math.isfinite(beam.logprob) and math.isfinite(beam.score)):
            return NumericalError(
                f"line {row.number}: logprob is {beam.logprob} and score is {beam.score}: not finite numbers"
            )
    return None


# Options of rows that every record of a run's settings has. Others are in it where they differ from their default, so
# that runs of versions without them can be resumed.
FIRST_OPTIONS = frozenset(
    (
        *("temperature", "top_k", "top_p", "min_p", "max_new_tokens", "stop", "length_penalty", "early_stopping"),
        *("n_best", "token_logprobs", "top_logprobs", "source_lang", "target_lang", "prefix", "token_rules"),
    )
)


def call_fields(beam: Hypothesis) -> list[Fields]:
    """Return the calls of functions that a text holds. The arguments are JSON text, as in the OpenAI API."""
    return [{"name": call.name, "arguments": call.arguments} for call in beam.tool_calls]


def calls_text(beam: Hypothesis) -> str | None:
    """Return the calls of functions as JSON text; None where there are none."""
    return orjson.dumps(call_fields(beam)).decode() if beam.tool_calls else None


def sampling_fields(sampling: SamplingConfig) -> Fields:
    """Return the options of rows as plain JSON values, later ones only where they ask for something."""
    values = {name: (getattr(sampling, name), field.default) for name, field in sampling.__dataclass_fields__.items()}
    return {name: _plain(value) for name, (value, no) in values.items() if name in FIRST_OPTIONS or value != no}


def run_fingerprint(method: MethodRecord, rows: RowReader, **others: str | int | float | bool | None) -> Fields:
    """Return the settings that a row's result depends on besides the row itself, as plain JSON values in a fixed order.

    A setting that does not act is null (the seed and the warps under rule search). Batch size and devices are left out,
    because they change no result. others: further settings of the run that matter, such as dtype and on_too_long.
    """
    searching = not RULES[rows.rule].samples
    settings = {**method.fields(), **sampling_fields(rows.sampling)}
    if searching:
        settings.update(dict.fromkeys(WARP_FIELDS))
    settings["seed"] = None if searching else rows.seed
    settings.update(others)
    return settings


def fingerprint_difference(
    old: Mapping[str, object], new: Mapping[str, object], typed: Mapping[str, str] | None = None
) -> str | None:
    """Describe how two fingerprints differ, as in `temperature was 0.7 and is 1.0, seed was 0 and is 3`.

    Return None if they do not differ. typed: names of settings as the user types them. A model of another name counts
    as the same if its files have the same digests.
    """
    same = {role for role in ("target", "draft") if _same_files(role, old, new)}
    differences = []
    for name in dict.fromkeys([*new, *old]):
        before, now = old.get(name), new.get(name)
        # a run whose workers are on other machines keeps no digests
        if name in same or (name in DIGESTS and None in (before, now)):
            continue
        if before != now or isinstance(before, bool) is not isinstance(now, bool):
            shown = (typed or {}).get(name, shown_name(name))
            differences.append(f"{shown} was {_shown_value(before)} and is {_shown_value(now)}")
    return ", ".join(differences) or None


def _plain(value: object) -> object:
    """Return a value as it comes back from JSON."""
    return [_plain(item) for item in value] if isinstance(value, tuple) else value


PARTS = "config", "tokenizer", "weights"  # of a checkpoint, each with a digest
DIGESTS = {  # by setting: its name in a message
    f"{role}_{part}": f"the digest of the {role}'s {part}" for role in ("target", "draft") for part in PARTS
}


def _same_files(role: str, old: Mapping[str, object], new: Mapping[str, object]) -> bool:
    digests = [(old.get(f"{role}_{part}"), new.get(f"{role}_{part}")) for part in PARTS]
    return all(before is not None and before == now for before, now in digests)


def _shown_value(value: object) -> str:
    return "not set" if value is None else shorten(value)
