"""Conversion of input lines to rows. Every line gives a Row, and nothing in a line raises."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import orjson

from dsbd_cli.config.grammars import Grammar
from dsbd_cli.config.method import check_request
from dsbd_cli.config.sampling import SamplingConfig
from dsbd_cli.config.token_rules import written_rules
from dsbd_cli.config.variants import RULES
from dsbd_cli.errors import InvalidRowError, UsageError, shorten
from dsbd_cli.io.records.fields import messages, response_format, text
from dsbd_cli.io.records.file_roots import file_of_row
from dsbd_cli.io.records.input_forms import ParsedRow, as_written, other_names, parsed_row
from dsbd_cli.io.records.parse import decoded, parse_object
from dsbd_cli.io.records.row import Fields, Form, LongLine, Row, content_key, readable
from dsbd_cli.requests import Request, check_ends, check_seed, derive_seed

WARP_FIELDS = {"temperature": None, "top_k": 0, "top_p": 1, "min_p": 0}  # by name: the value that rule search accepts
SAMPLING_FIELDS = frozenset(SamplingConfig.__dataclass_fields__)
NUMBERS = ("temperature", "top_p", "min_p", "length_penalty")

# Larger numbers would break a whole batch, not one row.
MAX_NEW_TOKENS = 1 << 20
MAX_STOPS, MAX_STOP_BYTES = 16, 256
MAX_WARNED = 100
MAX_KNOWN = 256  # checked option sets, and names of checked grammars, that are kept
MAX_KNOWN_BYTES = 4096  # of an option set that is kept

Prompt = str | tuple[dict[str, str], ...]  # of text, or messages


@dataclass(frozen=True, slots=True)
class RowReader:
    """A converter of input lines to rows. It holds and checks the settings that rows inherit from the run. Raises
    UsageError.

    Attributes:
        sampling: options of rows that do not set their own.
        seed: of the run; with a row's id it makes the row's seed.
        rule: the run's rule; under `search` a row must not ask for sampling.
        num_beams: of the run; the largest `n` that a row may ask for.
        grammar: of rows that do not bring a response_format.
        strict: an unknown field makes the row fail instead of causing a warning.
        chat: a prompt becomes the single message of a user, for the target's chat template.
        files_root: the folder that rows may read files from, with links resolved; None: files anywhere, as rows name
            them.
    """

    sampling: SamplingConfig = field(default_factory=SamplingConfig)
    seed: int = 0
    rule: str = "coupled"
    num_beams: int = 4
    strict: bool = False
    grammar: Grammar | None = None
    chat: bool = False
    files_root: str | None = None
    _warned: set[int] = field(default_factory=set, init=False, repr=False, compare=False)
    _listed: set[str] = field(default_factory=set, init=False, repr=False, compare=False)
    _known_sampling: dict[bytes, SamplingConfig] = field(default_factory=dict, init=False, repr=False, compare=False)
    _known_grammars: dict[str, str | None] = field(default_factory=dict, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        check_seed(self.seed)
        check_request(self.sampling, self.rule, self.num_beams)
        check_ends(self.sampling, self.grammar)

    def read(self, line: bytes | LongLine, *, index: int, number: int) -> Row:
        """Return the row of a line of JSON, flat or in an OpenAI batch envelope.

        index: of the row, from 0. number: of the line, from 1. Nothing in the line raises.
        """
        row_id = str(index)
        raw: Fields = {}
        metadata: object | None = None
        warnings: tuple[str, ...] = ()
        form: Form = "flat"
        try:
            raw = parse_object(readable(line))
            row_id = own_id(raw, row_id, "id", "custom_id")
            parsed = parsed_row(raw)
            form = parsed.form
            metadata = parsed.fields.get("metadata")
            warnings = self._warnings(parsed, number)
            request = self._request(parsed.fields, row_id)
        except (InvalidRowError, UsageError) as error:
            failure = InvalidRowError(f"line {number}: {as_written(str(error), raw)}")
            return Row(index, number, row_id, None, failure, metadata, _raw_key(row_id, line), warnings, (), form)
        parsed.fields["id"] = row_id
        if "response_format" in parsed.fields:  # unsorted: the order of a schema's properties is the answer's
            parsed.fields["response_format"] = orjson.dumps(parsed.fields["response_format"]).decode()
        key = content_key(orjson.dumps(parsed.fields, option=orjson.OPT_SORT_KEYS))
        return Row(index, number, row_id, request, None, metadata, key, warnings, other_names(raw), form)

    def read_prompt(self, line: bytes | LongLine, *, index: int) -> tuple[str, Prompt | InvalidRowError]:
        """Return a row's id and its prompt or messages, whatever options it has, or why they cannot be read. For speech
        or a picture it is the text beside it, or ""."""
        row_id = str(index)
        raw: Fields = {}
        try:
            raw = parse_object(readable(line))
            row_id = own_id(raw, row_id, "id", "custom_id")
            prompt, chat = self._asked(parsed_row(raw).fields)
        except (InvalidRowError, UsageError) as error:
            return row_id, InvalidRowError(as_written(str(error), raw))
        return row_id, chat or prompt or ""

    def read_text(self, line: bytes | LongLine, *, index: int, number: int) -> Row:
        """Return the row of a line of plain text, which is the prompt."""
        row_id = str(index)
        key = _raw_key(row_id, line)
        try:
            prompt = decoded(readable(line))
        except InvalidRowError as error:
            failure = InvalidRowError(f"line {number}: {error}")
            return Row(index, number, row_id, None, failure, None, key)
        seed = derive_seed(self.seed, row_id)
        asked, chat = self._as_chat(prompt, None)
        request = Request(
            id=row_id, seed=seed, prompt=asked, messages=chat, sampling=self.sampling, grammar=self.grammar
        )
        return Row(index, number, row_id, request, None, None, key)

    def _warnings(self, parsed: ParsedRow, number: int) -> tuple[str, ...]:
        """Return warnings about unknown fields, once per name and reader. Raises InvalidRowError under `strict`."""
        if not parsed.unused:
            return ()
        if self.strict:
            raise InvalidRowError(parsed.explain(*parsed.unused[0]))
        warnings = []
        for name, value in parsed.unused:
            if len(self._warned) > MAX_WARNED:
                break
            if hash(name) not in self._warned:
                full = len(self._warned) == MAX_WARNED
                self._warned.add(hash(name))  # a name can have megabytes
                said = "more unknown fields: not named any more"
                warnings.append(said if full else f"{parsed.explain(name, value, self._listed)}; not used")
        return tuple([f"line {number}: {message}" for message in warnings])

    def _asked(self, row: Fields) -> tuple[str | None, tuple[dict[str, str], ...] | None]:
        """Return the prompt or the messages of a row; neither for speech or a picture alone. Raises
        InvalidRowError."""
        given = [name for name in ("prompt", "messages", "audio", "image") if name in row]
        if len(given) > 1 and given != ["prompt", "image"]:
            raise InvalidRowError(f"{given[0]} and {given[1]} are both given: give one of them")
        if not given:
            raise InvalidRowError("neither prompt nor messages is given")
        prompt = text(row, "prompt") if "prompt" in row else None
        chat = messages(row["messages"]) if "messages" in row else None
        if self.chat and "image" not in row:  # a prompt given with a picture is the decoder's, not a message
            prompt, chat = self._as_chat(prompt, chat)
        return prompt, chat

    def _request(self, row: Fields, row_id: str) -> Request:
        prompt, chat = self._asked(row)
        return Request(
            id=row_id,
            seed=row.get("seed", derive_seed(self.seed, row_id)),  # type: ignore[arg-type] # it checks the type
            prompt=prompt,
            messages=chat,
            audio=self._file(row, "audio") if "audio" in row else None,
            image=self._file(row, "image") if "image" in row else None,
            sampling=self._sampling(row),
            allow=_allow(row["allow"]) if "allow" in row else None,
            grammar=self._grammar(row),
        )

    def _file(self, row: Fields, name: str) -> str:
        """Return the path of the file that a row names, or a picture's inline data.

        The path is checked where this run reads files. Raises InvalidRowError.
        """
        path = text(row, name)
        return path if self.files_root is None else file_of_row(self.files_root, name, path)

    def _as_chat(
        self, prompt: str | None, chat: tuple[dict[str, str], ...] | None
    ) -> tuple[str | None, tuple[dict[str, str], ...] | None]:
        """Return prompt and messages. Under `chat` a prompt becomes the single message of a user."""
        if not self.chat or prompt is None:
            return prompt, chat
        return None, ({"role": "user", "content": prompt},)

    def _grammar(self, row: Fields) -> Grammar | None:
        if "response_format" not in row:
            return self.grammar
        grammar = response_format(row["response_format"])
        if grammar is not None:
            fault = self._grammar_fault(grammar)
            if fault is not None:
                raise InvalidRowError(f"response_format.json_schema.schema cannot be used: {fault}")
        return grammar

    def _grammar_fault(self, grammar: Grammar) -> str | None:
        """Return why a grammar cannot be followed; None where it can. Most rows of a file have the same one."""
        if grammar.name not in self._known_grammars:
            if len(self._known_grammars) >= MAX_KNOWN:
                self._known_grammars.clear()
            try:
                grammar.source()
            except UsageError as error:
                self._known_grammars[grammar.name] = str(error)
            else:
                self._known_grammars[grammar.name] = None
        return self._known_grammars[grammar.name]

    def _sampling(self, row: Fields) -> SamplingConfig:
        own = {name: value for name, value in row.items() if name in SAMPLING_FIELDS}
        if not own:
            return self.sampling
        # most rows of a file ask for the same; the key is JSON, because 1 and True are equal as keys of a dict
        written = orjson.dumps(own)
        known = self._known_sampling.get(written)
        if known is None:
            known = self._checked_sampling(own)
            if len(self._known_sampling) >= MAX_KNOWN:
                self._known_sampling.clear()
            if len(written) <= MAX_KNOWN_BYTES:
                self._known_sampling[written] = known
        return known

    def _checked_sampling(self, row: Fields) -> SamplingConfig:
        if not RULES[self.rule].samples:
            row = _without_warps(row)
        given: Fields = {
            name: float(value) if name in NUMBERS and type(value) is int else value for name, value in row.items()
        }
        if "token_rules" in row:
            given["token_rules"] = _rules(row["token_rules"])
        sampling = replace(self.sampling, **given)  # type: ignore[arg-type] # it checks their types
        check_request(sampling, self.rule, self.num_beams)
        _check_limits(row, sampling)
        return sampling


def _rules(value: object) -> str:
    """Return token rules as --set token-rules spells them, from such a string or from an object of names and values."""
    if isinstance(value, str):
        return value
    if not isinstance(value, dict):
        raise InvalidRowError(f"token_rules is {shorten(value)}, but must be an object or a string")
    return written_rules(value)


def _allow(value: object) -> str | tuple[str, ...]:
    """Return the name of a catalogue, or the allowed answers of a list. Raises InvalidRowError."""
    if isinstance(value, str) and value:
        return value
    if not isinstance(value, list) or not value or not all(isinstance(item, str) and item for item in value):
        raise InvalidRowError(f"allow is {shorten(value)}, but must be a catalogue's name or a list of answers")
    return tuple(value)


def _check_limits(row: Fields, sampling: SamplingConfig) -> None:
    """Raise InvalidRowError for a field above its limit, if the row itself sets the field."""
    if "max_new_tokens" in row and sampling.max_new_tokens > MAX_NEW_TOKENS:
        given = shorten(row["max_new_tokens"])
        raise InvalidRowError(f"max_new_tokens is {given}, but must be at most {MAX_NEW_TOKENS}")
    if "stop" in row and (fault := stops_fault(sampling.stop)):
        raise InvalidRowError(f"stop is {fault}")


def stops_fault(stops: Sequence[str]) -> str | None:
    """Return what is wrong with the number or the length of stop strings; None where they are within the limits. Their
    automaton takes memory for each byte and each token of the vocabulary."""
    if len(stops) > MAX_STOPS:
        return f"a list of {len(stops)} strings, but must be of at most {MAX_STOPS}"
    if (size := sum(len(item.encode("utf-8", "surrogatepass")) for item in stops)) > MAX_STOP_BYTES:
        return f"{shorten(list(stops))}, {size} bytes in all, but must be at most {MAX_STOP_BYTES}"
    return None


def _without_warps(row: Fields) -> Fields:
    """Return the row without its sampling options, for rule search.

    A temperature of 0 describes what the rule does, and the other options then have no effect. Without it an option
    that would have an effect is refused. Raises InvalidRowError.
    """
    kept = {name: value for name, value in row.items() if name not in WARP_FIELDS}
    temperature = row.get("temperature")
    if type(temperature) in (int, float) and temperature == 0:
        return kept
    for name, neutral in WARP_FIELDS.items():
        value = row.get(name)
        if value is not None and (isinstance(value, bool) or value != neutral):
            raise InvalidRowError(f"{name} is {shorten(value)}, but the rule search draws nothing: drop it")
    return kept


def own_id(raw: Fields, default: str, *names: str) -> str:
    """Return the row's id, which the first of these fields that is not null gives; `default` where all are null. Raises
    InvalidRowError."""
    value = next((raw[name] for name in names if raw.get(name) is not None), None)
    if value is None:
        return default
    if type(value) is int:
        return str(value)
    if not isinstance(value, str) or not value:
        raise InvalidRowError(f"id is {shorten(value)}, but must be a non-empty string or an integer")
    return value


def _raw_key(row_id: str, line: bytes | LongLine) -> str:
    if isinstance(line, LongLine):
        line = b"%d:%b" % (line.size, line.head)
    return content_key(orjson.dumps(row_id) + line)
