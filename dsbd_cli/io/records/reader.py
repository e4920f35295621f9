"""Conversion of input lines to rows. Every line gives a Row, and nothing in a line raises."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import orjson

from dsbd_cli.config.chat import NO_CHAT, ChatConfig
from dsbd_cli.config.grammars import Grammar
from dsbd_cli.config.method import check_request
from dsbd_cli.config.sampling import SamplingConfig
from dsbd_cli.config.token_rules import SEPARATOR, named_rules, without_rules, written_rules
from dsbd_cli.config.variants import RULES
from dsbd_cli.errors import MOST_INTEGER, InvalidRowError, UsageError, is_utf8, shorten, shown_name
from dsbd_cli.io.records.fields import Messages, has_functions, messages, response_format, text
from dsbd_cli.io.records.file_roots import file_of_row
from dsbd_cli.io.records.input_forms import SOURCES, ParsedRow, as_written, other_names, parsed_row
from dsbd_cli.io.records.parse import decoded, parse_object, readable_fields
from dsbd_cli.io.records.request_fields import MAX_NEW_TOKENS, MAX_STOP_BYTES, MAX_STOPS
from dsbd_cli.io.records.row import Fields, Form, Line, LongLine, Row, TableRow, content_key, readable, with_carried
from dsbd_cli.requests import Request, check_ends, check_seed, derive_seed

WARP_FIELDS = {"temperature": 1, "top_k": 0, "top_p": 1, "min_p": 0}  # by name: the value that asks for no warp
# Token rules that are fields of a row, and none of SamplingConfig: name -> JSON types of their values, in words.
RULE_FIELDS = {
    **dict.fromkeys(("suppress_tokens", "begin_suppress_tokens"), "a list of token ids"),
    **dict.fromkeys(("forced_bos_token_id", "forced_eos_token_id"), "a token id"),
    "renormalize_logits": "true or false",
}
AGREEING_FIELDS = frozenset("do_sample use_beam_search best_of".split())  # say what the run does anyway, or fail
SAMPLING_FIELDS = frozenset(SamplingConfig.__dataclass_fields__) | RULE_FIELDS.keys() | AGREEING_FIELDS
CHAT_FIELDS = frozenset(
    (
        *("tools", "tool_choice", "documents", "chat_template_kwargs", "reasoning_effort", "continue_final_message"),
        *("add_generation_prompt", "parallel_tool_calls"),
    )
)
# Fields of which the order of names is asked for too: of the properties of a schema, of what a template writes.
ORDERED_FIELDS = frozenset("response_format tools documents chat_template_kwargs".split())
# Fields that a row's key does not hold as they are written.
KEYED_APART = ORDERED_FIELDS | AGREEING_FIELDS
NUMBERS = (
    *("temperature", "top_p", "min_p", "length_penalty"),
    *("repetition_penalty", "presence_penalty", "frequency_penalty"),
)
NO_SOURCE = "neither prompt nor messages is given"
MAX_WARNED = 100
MAX_KNOWN = 256  # checked option sets, and names of checked grammars, that are kept
MAX_KNOWN_BYTES = 4096  # of an option set that is kept

Prompt = str | Messages


@dataclass(frozen=True, slots=True)
class RowReader:
    """A converter of input lines to rows. It holds and checks the settings that rows inherit from the run. Raises
    UsageError.

    Attributes:
        sampling: options of rows that do not set their own.
        seed: of the run; with a row's id it makes the row's seed.
        rule: the run's rule; under `search` it wins over the sampling that a row asks for.
        num_beams: of the run; the largest `n` that a row may ask for.
        grammar: of rows that do not bring a response_format.
        strict: an unknown field makes the row fail instead of causing a warning.
        strict_schemas: keywords of a row's JSON schema that a grammar cannot enforce make the row fail.
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
    strict_schemas: bool = False
    _searches: bool = field(default=False, init=False, repr=False, compare=False)
    _warned: set[int] = field(default_factory=set, init=False, repr=False, compare=False)
    _known_sampling: dict[bytes, SamplingConfig] = field(default_factory=dict, init=False, repr=False, compare=False)
    _known_grammars: dict[str, str | None] = field(default_factory=dict, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        check_seed(self.seed)
        check_request(self.sampling, self.rule, self.num_beams)
        check_ends(self.sampling, self.grammar)
        object.__setattr__(self, "_searches", not RULES[self.rule].samples)

    def read(self, line: Line, *, index: int, number: int) -> Row:
        """Return the row of a line of JSON, flat or in an OpenAI batch envelope.

        index: of the row, from 0. number: of the line, from 1. Nothing in the line raises.
        """
        raw: Fields = {}
        metadata: object | None = None
        warnings: tuple[str, ...] = ()
        form: Form = "flat"
        overruled = False
        try:
            raw = parse_object(readable(line))
            row_id = own_id(raw, str(index), "id", "custom_id")
            parsed = parsed_row(raw)
            form, row = parsed.form, parsed.fields
            metadata = with_carried(row.get("metadata"), line)
            warnings = self._warnings(parsed, number)
            request = self._request(row, row_id)
            overruled = self._searches and _asks_for_sampling(row)
            if overruled:
                warnings += self._overruled(number)
        except (InvalidRowError, UsageError) as error:
            failure = InvalidRowError(f"line {number}: {_as_written(str(error), raw, line)}")
            failed_id = id_of_failed(raw, line, index, "id", "custom_id")
            return Row(index, number, failed_id, None, failure, metadata, _raw_key(failed_id, line), warnings, (), form)
        row["id"] = row_id
        key = content_key(_asked_for(row))
        written = _other_names(raw, line)
        return Row(index, number, row_id, request, None, metadata, key, warnings, written, form, overruled)

    def read_prompt(self, line: Line, *, index: int) -> tuple[str | None, Prompt | InvalidRowError]:
        """Return a row's id and its prompt or messages, whatever options it has, or why they cannot be read. For speech
        or a picture it is the text beside it, or "". The id is that of a Row."""
        raw: Fields = {}
        try:
            raw = parse_object(readable(line))
            row_id = own_id(raw, str(index), "id", "custom_id")
            prompt, chat, _ = self._asked(parsed_row(raw).fields)
        except (InvalidRowError, UsageError) as error:
            return id_of_failed(raw, line, index, "id", "custom_id"), InvalidRowError(as_written(str(error), raw))
        return row_id, chat or prompt or ""

    def read_text(self, line: Line, *, index: int, number: int) -> Row:
        """Return the row of a line of plain text, which is the prompt."""
        row_id = str(index)
        key = _raw_key(row_id, line)
        try:
            prompt = decoded(readable(line))
        except InvalidRowError as error:
            failure = InvalidRowError(f"line {number}: {error}")
            return Row(index, number, row_id, None, failure, None, key)
        seed = derive_seed(self.seed, row_id)
        chat: Messages | None = ({"role": "user", "content": prompt},) if self.chat else None
        request = Request(
            None if self.chat else prompt,
            id=row_id,
            seed=seed,
            messages=chat,
            sampling=self.sampling,
            grammar=self.grammar,
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
                warnings.append(said if full else f"{parsed.explain(name, value)}; not used")
        return tuple([f"line {number}: {message}" for message in warnings])

    def _overruled(self, number: int) -> tuple[str, ...]:
        """Return the warning that a search does not sample, once per reader."""
        if hash(OVERRULED) in self._warned:
            return ()
        self._warned.add(hash(OVERRULED))
        return (f"line {number}: {OVERRULED}",)

    def _asked(self, row: Fields) -> tuple[str | None, Messages | None, bool]:
        """Return the prompt or the messages of a row, and whether its last message says that the answer continues it;
        neither for speech or a picture alone. Raises InvalidRowError."""
        sources = [name for name in SOURCES if name in row]
        if len(sources) > 1 and sources != ["prompt", "image"]:
            raise InvalidRowError(f"{sources[0]} and {sources[1]} are both given: give one of them")
        if not sources:
            raise InvalidRowError(NO_SOURCE)
        prompt = text(row, "prompt") if "prompt" in row else None
        chat, continued = messages(row["messages"]) if "messages" in row else (None, False)
        if self.chat and prompt is not None and "image" not in row:  # beside a picture it is the decoder's, no message
            prompt, chat = None, ({"role": "user", "content": prompt},)
        if "system" in row:
            chat = _with_system(text(row, "system"), chat)
        return prompt, chat, continued

    def _request(self, row: Fields, row_id: str) -> Request:
        prompt, chat, continued = self._asked(row)
        return Request(
            id=row_id,
            seed=row.get("seed", derive_seed(self.seed, row_id)),  # type: ignore[arg-type] # it checks the type
            prompt=prompt,
            messages=chat,
            audio=self._file(row, "audio") if "audio" in row else None,
            image=self._file(row, "image") if "image" in row else None,
            sampling=self._sampling(row, chat is not None),
            allow=_allow(row["allow"]) if "allow" in row else None,
            grammar=self._grammar(row),
            chat=_chat(row, chat, continued) if continued or not CHAT_FIELDS.isdisjoint(row) else NO_CHAT,
        )

    def _file(self, row: Fields, name: str) -> str:
        """Return the path of the file that a row names, or a picture's inline data.

        The path is checked where this run reads files. Raises InvalidRowError.
        """
        path = text(row, name)
        return path if self.files_root is None else file_of_row(self.files_root, name, path)

    def _grammar(self, row: Fields) -> Grammar | None:
        if "response_format" not in row:
            return self.grammar
        value = row["response_format"]
        grammar = response_format(value)
        if grammar is not None:
            grammar = replace(grammar, strict=self.strict_schemas)
            fault = self._grammar_fault(grammar)
            if fault is not None:
                assert isinstance(value, dict), "else it is refused"
                inner = ".json_schema.schema" if value.get("json_schema") is not None else ""
                raise InvalidRowError(f"response_format{inner} cannot be used: {fault}")
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

    def _sampling(self, row: Fields, chat: bool) -> SamplingConfig:
        own = {name: value for name, value in row.items() if name in SAMPLING_FIELDS}
        if not own:
            return self.sampling
        if chat and "add_special_tokens" in own:
            _check_special_tokens(own.pop("add_special_tokens"))
        # most rows of a file ask for the same; the key is JSON, because 1 and True are equal as keys of a dict
        written = orjson.dumps(own)
        sampling = self._known_sampling.get(written)
        if sampling is None:
            sampling = self._checked_sampling(own)
            if len(self._known_sampling) >= MAX_KNOWN:
                self._known_sampling.clear()
            if len(written) <= MAX_KNOWN_BYTES:
                self._known_sampling[written] = sampling
        return sampling

    def _checked_sampling(self, row: Fields) -> SamplingConfig:
        values: Fields = {
            name: float(value) if name in NUMBERS and type(value) is int else value
            for name, value in row.items()
            if name not in AGREEING_FIELDS and name not in RULE_FIELDS
        }
        values["token_rules"] = without_rules(
            self.sampling.token_rules, values
        )  # a row's own fields go before the run's
        if "token_rules" in row:
            values["token_rules"] = _rules(row["token_rules"])
        if row.get("bad_words_ids") == []:  # switches off those of the checkpoint, too
            values["token_rules"] = _joined(values["token_rules"], "bad_words_ids=none")
        if not RULE_FIELDS.keys().isdisjoint(row):
            values["token_rules"] = _with_rules(values["token_rules"], row)
        if "logit_bias" in row:
            values["logit_bias"] = _logit_bias(row["logit_bias"])
        sampling = replace(self.sampling, **values)  # type: ignore[arg-type] # it checks their types
        if self._searches:  # which draws nothing, whatever a row says
            sampling = replace(sampling, **{name: getattr(self.sampling, name) for name in WARP_FIELDS})
        check_request(sampling, self.rule, self.num_beams)
        _check_limits(row, sampling)
        self._check_agreement(row, sampling)
        return sampling

    def _check_agreement(self, row: Fields, sampling: SamplingConfig) -> None:
        """Raise InvalidRowError for a field that says what the run does, and says something else."""
        samples = not self._searches and sampling.temperature != 0
        for name in ("do_sample", "use_beam_search"):
            if name not in row:
                continue
            value = row[name]
            if not isinstance(value, bool):
                raise InvalidRowError(f"{name} is {shorten(value)}, but must be true or false")
            draws = value is (name == "do_sample")
            if draws is not samples and not self._searches:  # a search overrules it, as it does temperature
                does = "the run samples: give temperature 0, or --decode search" if samples else "temperature is 0"
                raise InvalidRowError(f"{name} is {shorten(value)}, but {does}")
        beams = self.num_beams if sampling.num_beams is None else sampling.num_beams
        if "best_of" in row and (type(row["best_of"]) is not int or row["best_of"] != beams):
            raise InvalidRowError(
                f"best_of is {shorten(row['best_of'])}, but the number of beams is {beams} (--num-beams): drop it"
            )


OVERRULED = (
    "temperature, top_k, top_p, min_p and do_sample of rows are not used: this run searches (--decode search), which "
    "draws nothing"
)


def _asked_for(row: Fields) -> bytes:
    """Return what a row asks for as JSON, from which its key is made. It is the same for all forms of a row."""
    called = "messages" in row and has_functions(row["messages"])
    if not called and KEYED_APART.isdisjoint(row):  # most rows
        return orjson.dumps(row, option=orjson.OPT_SORT_KEYS)
    asked = {
        name: orjson.dumps(value).decode() if name in ORDERED_FIELDS else value
        for name, value in row.items()
        if name not in AGREEING_FIELDS
    }
    if called:
        asked["messages"] = orjson.dumps(row["messages"]).decode()  # of their arguments and parameters as well
    return orjson.dumps(asked, option=orjson.OPT_SORT_KEYS)


def _asks_for_sampling(row: Fields) -> bool:
    """Return whether a row asks for draws. A temperature of 0 asks for none, whatever stands beside it."""
    if row.get("temperature") == 0:
        return False
    return row.get("do_sample") is True or any(row.get(name, plain) != plain for name, plain in WARP_FIELDS.items())


def _with_system(system: str, chat: Messages | None) -> Messages:
    """Return messages with one of the system before them. Raises InvalidRowError."""
    if chat is None:
        reason = "a plain prompt has no such message: give messages, or run with --chat"
        raise InvalidRowError(f"system is {shorten(system)}, but {reason}")
    if chat[0]["role"] in ("system", "developer"):
        raise InvalidRowError(f"system is {shorten(system)}, but messages[0] is one too: drop one")
    return ({"role": "system", "content": system}, *chat)


def _chat(row: Fields, chat: Messages | None, continued: bool) -> ChatConfig:
    """Return the settings of a conversation. continued: its last message says so. Raises InvalidRowError and
    UsageError."""
    chat_fields = {name: value for name, value in row.items() if name in CHAT_FIELDS}
    if chat is None:
        chat_fields = {
            name: value for name, value in chat_fields.items() if (name, value) != ("reasoning_effort", "none")
        }
        for name, value in chat_fields.items():
            reason = "it is about a chat, and the row has none: give messages, or run with --chat"
            raise InvalidRowError(f"{name} is {shorten(value)}, but {reason}")
        return NO_CHAT
    if chat_fields.get("parallel_tool_calls", True) is not True and "tools" in chat_fields:
        reason = "whether a model calls one function or several is not decided here: drop it"
        raise InvalidRowError(f"parallel_tool_calls is {shorten(chat_fields['parallel_tool_calls'])}, but {reason}")
    if continued and chat_fields.get("continue_final_message") is False:
        raise InvalidRowError("continue_final_message is false, but the last message has prefix: drop one of them")
    continues = chat_fields.get("continue_final_message", continued)
    _check_turn(chat_fields, chat, continues)
    return ChatConfig(
        tools=tuple(chat_fields.get("tools", ())),  # type: ignore[arg-type] # it is a list
        tool_choice=chat_fields.get("tool_choice", "auto"),  # type: ignore[arg-type] # it is a text
        documents=chat_fields.get("documents", ()),  # type: ignore[arg-type] # it checks the types of the rest
        template_kwargs=_template_kwargs(chat_fields),
        continue_final_message=continues,  # type: ignore[arg-type]
    )


def _check_turn(fields: Fields, chat: Messages, continues: object) -> None:
    """Check what fields say of the last message and of a new turn behind it. Raises InvalidRowError."""
    opens = fields.get("add_generation_prompt", True)
    if not isinstance(opens, bool):
        raise InvalidRowError(f"add_generation_prompt is {shorten(opens)}, but must be true or false")
    if not opens and continues is not True:
        reason = "an answer is a new turn, unless continue_final_message is true: drop it"
        raise InvalidRowError(f"add_generation_prompt is false, but {reason}")
    last = chat[-1]
    if continues is True and (last["role"] != "assistant" or not last["content"] or "tool_calls" in last):
        reason = f"the last message is {shorten(last)}: it must be the assistant's, with a content"
        raise InvalidRowError(f"continue_final_message is true, but {reason}")


def _template_kwargs(fields: Fields) -> dict[str, object] | None:
    """Return the variables of the template. Raises InvalidRowError."""
    kwargs, effort = fields.get("chat_template_kwargs"), fields.get("reasoning_effort")
    if not isinstance(kwargs, dict | None):
        raise InvalidRowError(f"chat_template_kwargs is {shorten(kwargs)}, but must be an object")
    if effort is None:
        return kwargs
    if not isinstance(effort, str) or not effort:
        raise InvalidRowError(f"reasoning_effort is {shorten(effort)}, but must be a non-empty string")
    kwargs = dict(kwargs or {})
    if kwargs.setdefault("reasoning_effort", effort) != effort:
        reason = f"chat_template_kwargs has {shorten(kwargs['reasoning_effort'])}: drop one"
        raise InvalidRowError(f"reasoning_effort is {shorten(effort)}, but {reason}")
    if effort == "none":
        kwargs.setdefault("enable_thinking", False)
    return kwargs


def _check_special_tokens(value: object) -> None:
    """Raise InvalidRowError unless a chat's add_special_tokens is false, as it is anyway."""
    if value is not False:
        raise InvalidRowError(f"add_special_tokens is {shorten(value)}, but a chat template adds its own: drop it")


def _with_rules(rules: object, row: Fields) -> str:
    """Return token rules, as --set token-rules spells them, with those that are fields of the row. Raises
    InvalidRowError and UsageError."""
    text = "" if rules is None else str(rules)
    rule_fields = {name: value for name, value in row.items() if name in RULE_FIELDS}
    for name, value in rule_fields.items():
        expected = RULE_FIELDS[name]
        if not _is_rule(value, expected):
            raise InvalidRowError(f"{name} is {shorten(value)}, but must be {expected}")
        if "token_rules" in row and name in named_rules(text):
            raise InvalidRowError(f"{name} is {shorten(value)}, but token_rules has it too: drop one")
    return _joined(text, written_rules(rule_fields))


def _joined(rules: object, more: str) -> str:
    """Return token rules, which may be None, with others behind them."""
    return SEPARATOR.join([str(rules), more]) if rules else more


def _is_rule(value: object, expected: str) -> bool:
    if expected == "true or false":
        return isinstance(value, bool)
    if expected == "a list of token ids":
        return isinstance(value, list) and all(_is_rule(item, "a token id") for item in value)
    return type(value) is int and 0 <= value <= MOST_INTEGER


def _logit_bias(value: object) -> object:
    """Return numbers by token id, from an object whose names are ids. Raises InvalidRowError."""
    if not isinstance(value, dict):
        raise InvalidRowError(f"logit_bias is {shorten(value)}, but must be an object of token ids and numbers")
    for name in value:
        if not (name.isascii() and name.isdigit() and str(int(name[:20])) == name):
            raise InvalidRowError(f"logit_bias has {shorten(name)}, but must have token ids")
    return {int(name): float(number) if type(number) is int else number for name, number in value.items()}


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
        tokens = shorten(row["max_new_tokens"])
        raise InvalidRowError(f"max_new_tokens is {tokens}, but must be at most {MAX_NEW_TOKENS}")
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


def _as_written(message: str, raw: Fields, line: Line) -> str:
    """Return a message that begins with a field's name, with the name that the row or its table uses."""
    message = as_written(message, raw)
    if not isinstance(line, TableRow):
        return message
    if message == NO_SOURCE:
        source = next(name for name in (*SOURCES, "body") if name in line.names)
        return f"{shown_name(line.names[source])} is empty"
    name = re.split(r"[ .\[]", message, maxsplit=1)[0]
    column = line.names.get(name, name)
    return message if column == name else shown_name(column) + message[len(name) :]


def _other_names(raw: Fields, line: Line) -> tuple[tuple[str, str], ...]:
    """Return our name and the row's, of each option that a row gives under another name."""
    if not isinstance(line, TableRow):
        return other_names(raw)
    return tuple((name, shown_name(column)) for name, column in line.names.items() if name not in (column, "id"))


def id_of_failed(raw: Fields, line: Line, index: int, *names: str) -> str | None:
    """Return the id of a row that failed, as `own_id` does; None where it cannot be read.

    raw: the row's fields; empty where the line was refused before they were known.
    """
    fields = line.fields if isinstance(line, LongLine) else raw or readable_fields(readable(line))
    if fields is None:
        return None
    try:
        row_id = own_id(fields, str(index), *names)
    except InvalidRowError:
        return None
    return row_id if is_utf8(row_id) else None


def _raw_key(row_id: str | None, line: Line) -> str:
    if isinstance(line, LongLine):
        return content_key(orjson.dumps(row_id) + b"%d:%b%b" % (line.size, line.beginning, line.reason.encode()))
    return content_key(orjson.dumps(row_id) + readable(line))
