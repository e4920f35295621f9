"""Forms of a checkpoint's answers: marks around its reasoning, and how a text calls functions.

A form is chosen at load from the chat template and the tokenizer (`form_of`), or comes from the tokenizer's own
response template. Nothing here imports transformers.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache

from dsbd_cli.config.chat import ChatConfig
from dsbd_cli.config.grammars import LAYOUT, Grammar
from dsbd_cli.errors import UsageError, shorten
from dsbd_cli.requests import ToolCall

WHITESPACE = " \t\r\n"
WHITESPACE_BYTES = WHITESPACE.encode()
NO_PARAMETERS = {"type": "object", "properties": {}, "additionalProperties": False}
Tools = Sequence[Mapping[str, object]]
# (text, calls) of an answer that calls functions; raises ValueError where the answer is not of the form
TemplateReader = Callable[[str, Tools], tuple[str, tuple[ToolCall, ...]]]


@dataclass(frozen=True, slots=True)
class ReasoningMarks:
    """Marks between which a model reasons before it answers.

    Attributes:
        begin: mark that the reasoning begins with; empty: every answer begins in its reasoning.
        ends: marks that the answer follows.
        calls: marks that end the reasoning too, and are a part of the answer.
        message: mark behind `ends` and `calls` that the content follows, where a header stands before it; empty: the
            content follows at once.
        divider: regular expression of what stands before and between parts of the reasoning and is no text, `begin`
            among it; empty: only `begin` is no text.
    """

    begin: str
    ends: tuple[str, ...]
    calls: tuple[str, ...] = ()
    message: str = ""
    divider: str = ""

    @property
    def closing(self) -> tuple[bytes, ...]:
        """All marks that end the reasoning."""
        return tuple(mark.encode() for mark in (*self.ends, *self.calls))


@dataclass(frozen=True, slots=True)
class Reasoning:
    """Reasoning of one answer.

    Attributes:
        marks: its marks.
        opened: the answer begins behind the first mark, which then stands in the prompt.
        before: end of what was written before the text, with the mark in which the text begins, or behind which nothing
            but whitespace stands; it belongs to an opened reasoning.
    """

    marks: ReasoningMarks
    opened: bool
    before: bytes = b""

    def answer_at(self, text: bytes) -> int | None:
        """Return the byte that the answer begins at, behind the mark that ends the reasoning; 0 for a text without
        reasoning, None for a text that is still in its reasoning."""
        written = self.before + text
        begin = self._begin(written)
        if begin is None:
            return 0
        end = self._end(written, begin)
        return None if end is None or end[1] is None else max(0, end[1] - len(self.before))

    def stops_at(self, text: bytes) -> int | None:
        """Return the byte from which on stop strings count, behind the whitespace before the answer; 0 for a text
        without reasoning, None for a text that is still in its reasoning."""
        at = self.answer_at(text)
        if at is None or self._begin(self.before + text) is None:
            return at
        return len(text) - len(text[at:].lstrip(WHITESPACE_BYTES))

    def split(self, text: str) -> tuple[str | None, str]:
        """Return the reasoning and the answer of a text. The reasoning is None where there is none. Without reasoning
        the text stays as it is; behind it the answer loses the whitespace before it."""
        written = self.before + text.encode()
        begin = self._begin(written)
        if begin is None:
            return None, text
        marks, end = self.marks, self._end(written, begin)
        stop, answer = (len(written), None) if end is None else end
        reasoning = written[max(begin, len(self.before)) : stop].decode(errors="replace").strip()
        if marks.divider:
            reasoning = "\n\n".join(filter(None, map(str.strip, re.split(marks.divider, reasoning))))
        reasoning = reasoning.removeprefix(marks.begin).strip()
        if written.startswith(tuple(call.encode() for call in marks.calls), stop):
            answer = stop
        kept = b"" if answer is None else written[answer:]
        return reasoning or None, kept.decode(errors="replace").lstrip(WHITESPACE)

    def certain(self, text: str) -> str:
        """Return the beginning of an answer that cannot change, whatever follows this text; empty while the text is in
        its reasoning, or may be in its first mark."""
        lead = text.lstrip(WHITESPACE)
        if not self.opened and self.marks.begin and self.marks.begin.startswith(lead):
            return ""
        return self.split(text)[1]

    def after(self, prefix: bytes) -> Reasoning | None:
        """Return the reasoning of what follows a beginning of the answer; None where the answer itself has begun."""
        written = self.before + prefix
        if not written.strip(WHITESPACE_BYTES):
            return self
        begin = self._begin(written)
        if begin is None:
            return None
        end = self._end(written, begin)
        if end is None:  # a mark may have begun
            closing, longest = self.marks.closing, max(map(len, self.marks.closing)) - 1
            tails = (written[start:] for start in range(max(begin, len(written) - longest), len(written)))
            tail = next((tail for tail in tails if any(mark.startswith(tail) for mark in closing)), b"")
            return Reasoning(self.marks, True, tail)
        stop, answer = end
        if answer is not None and written[answer:].strip(WHITESPACE_BYTES):
            return None
        return Reasoning(self.marks, True, written[stop:answer])

    def _begin(self, written: bytes) -> int | None:
        """Return the byte that the reasoning begins at, with its mark; None where the answer has no reasoning."""
        if self.opened:
            return 0
        lead = len(written) - len(written.lstrip(WHITESPACE_BYTES))
        return lead if written.startswith(self.marks.begin.encode(), lead) else None

    def _end(self, written: bytes, begin: int) -> tuple[int, int | None] | None:
        """Return where the mark that ends the reasoning begins, and where the content behind it does, None while its
        header stands there alone; None where there is no such mark yet."""
        marks = [(written.find(mark, begin), len(mark)) for mark in self.marks.closing]
        ends = [(start + size, start) for start, size in marks if start >= 0]
        if not ends:
            return None
        (end, start), message = min(ends), self.marks.message.encode()
        at = written.find(message, end)
        return start, None if at < 0 else at + len(message)


@dataclass(frozen=True, slots=True)
class CallForm:
    """A form in which texts call functions. What follows `before` is JSON: the arguments where `before` has a group
    `name`, else one call or a list of calls, objects with a name and arguments.

    Attributes:
        template: texts that a chat template of this form holds, all of them. foreign: texts that it does not hold.
        marks: texts that may be special tokens.
        before, after: regular expressions of what stands before and behind the JSON of a call.
        arguments: key of the arguments.
        bare: nothing marks a call, so that a text counts only if all of it is calls of functions that were given.
        call: how the model writes one call, with {name}, the name as in JSON, and {arguments}. between: what stands
            between two calls; None: a text has one call at most. begin, end: what stands around all calls.
    """

    template: tuple[str, ...]
    marks: tuple[str, ...]
    before: str
    call: str
    after: str = ""
    foreign: tuple[str, ...] = ()
    arguments: str = "arguments"
    bare: bool = False
    between: str | None = None
    begin: str = ""
    end: str = ""


REASONING: tuple[ReasoningMarks, ...] = (
    # gpt-oss: messages of several channels, the last of which is the answer
    ReasoningMarks(
        begin="<|channel|>",
        ends=("<|channel|>final",),
        calls=("<|channel|>commentary to=functions.", "<|start|>assistant to=functions."),
        message="<|message|>",
        # a header of a message, which the text may end in
        divider=r"(?:<\|end\|>)?(?:<\|start\|>[^<]*)?(?:<\|channel\|>[^<]*)?(?:<\|constrain\|>[^<]*)?(?:<\|message\|>|\Z)"
        r"|<\|end\|>(?:<\|start\|>assistant)?",
    ),
    ReasoningMarks("<think>", ("</think>",)),
    ReasoningMarks("[THINK]", ("[/THINK]",)),
    ReasoningMarks("<seed:think>", ("</seed:think>",)),
    ReasoningMarks("<|START_THINKING|>", ("<|END_THINKING|>",)),
)
CALLS: tuple[CallForm, ...] = (
    # gpt-oss
    CallForm(
        template=("<|channel|>", "to=functions."),
        marks=("<|channel|>", "<|constrain|>", "<|message|>", "<|call|>"),
        # the name stands behind the channel, or behind the role as in the template; the role may stand in the prompt
        before=r"(?:(?:<\|channel\|>commentary|<\|start\|>assistant) |\A\s*)to=functions\.(?P<name>[\w.-]+)[^<]*"
        r"(?:<\|channel\|>commentary[^<]*)?(?:<\|constrain\|>[^<]*)?<\|message\|>",
        after=r"(?:<\|call\|>)?",
        call="<|channel|>commentary to=functions.{plain_name} <|constrain|>json<|message|>{arguments}",
    ),
    # Hermes, Qwen
    CallForm(
        template=("<tool_call>", "arguments"),
        foreign=("<function=", "<arg_key>"),
        marks=("<tool_call>", "</tool_call>"),
        before=r"<tool_call>\s*",
        after=r"\s*</tool_call>",
        call='<tool_call>\n{{"name": {name}, "arguments": {arguments}}}\n</tool_call>',
        between="\n",
    ),
    # Mistral from its tokenizer v11 on
    CallForm(
        template=("[TOOL_CALLS]", "[ARGS]"),
        marks=("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"),
        before=r"\[TOOL_CALLS\](?P<name>[\w.-]+)(?:\[CALL_ID\]\w+)?\[ARGS\]",
        call="[TOOL_CALLS]{plain_name}[ARGS]{arguments}",
        between="",
    ),
    # Mistral before
    CallForm(
        template=("[TOOL_CALLS]",),
        foreign=("[ARGS]",),
        marks=("[TOOL_CALLS]",),
        before=r"\[TOOL_CALLS\]\s*",
        begin="[TOOL_CALLS][",
        call='{{"name": {name}, "arguments": {arguments}}}',
        between=", ",
        end="]",
    ),
    # Llama 3
    CallForm(
        template=("ipython", "parameters"),
        marks=("<|python_tag|>",),
        before=r"(?:\A\s*(?:<\|python_tag\|>)?|;)\s*(?=\{)",
        arguments="parameters",
        bare=True,
        call='{{"name": {name}, "parameters": {arguments}}}',
    ),
)


@dataclass(frozen=True, slots=True)
class AnswerForm:
    """Form of a checkpoint's answers.

    Attributes:
        reasoning: marks of its reasoning; None: it marks none, or in a way that is not known.
        calls: how its texts call functions; None: in no known form.
        read_template: reader of calls by the tokenizer's own response template, which comes first where there is one.
        tokens: added tokens that the marks hold, by their text.
    """

    reasoning: ReasoningMarks | None = None
    calls: CallForm | None = None
    read_template: TemplateReader | None = None
    tokens: Mapping[str, int] = field(default_factory=dict)

    def read_calls(self, text: str, tools: Tools) -> tuple[str, tuple[ToolCall, ...]]:
        """Return the text without the calls that it holds, and the calls. What is no whole call stays in the text."""
        if self.read_template is not None:
            try:
                rest, calls = self.read_template(text, tools)
            except (ValueError, KeyError, RecursionError):
                return text, ()
            return (rest, calls) if calls else (text, ())
        return (text, ()) if self.calls is None else _read_calls(self.calls, text, _named(tools))

    def grammar(self, chat: ChatConfig) -> Grammar | None:
        """Return the grammar of answers that call the functions which tool_choice demands; None where it demands
        none. Raises UsageError where there is no such grammar."""
        if not chat.forces_call:
            return None
        if self.calls is None:
            raise UsageError(
                f"tool_choice is {shorten(chat.tool_choice)}, but the form in which the target calls functions is not "
                "known, so no call can be demanded: use auto"
            )
        tools = json.dumps(chat.tools)
        return _call_grammar(self.calls, tools, chat.tool_choice, tuple(sorted(self.tokens.items())))


NO_FORM = AnswerForm()


def form_of(
    template: str,
    added: Mapping[str, tuple[int, bool]],
    response: Mapping[str, object] | None = None,
    read_template: TemplateReader | None = None,
) -> AnswerForm:
    """Return the form of a checkpoint's answers.

    template: the chat template, or "". added: tokens outside the trained vocabulary by their text: id, and whether it
    is special. response: the tokenizer's response template, which transformers reads. read_template: reads calls by it.
    """

    def is_known(mark: str) -> bool:
        return mark in added or mark in template

    marks = _template_marks(response) or next(
        (form for form in REASONING if is_known(form.begin) and all(map(is_known, form.ends))), None
    )
    calls = next(
        (
            form
            for form in CALLS
            if all(text in template for text in form.template) and not any(text in template for text in form.foreign)
        ),
        None,
    )
    texts = [] if marks is None else [marks.begin, *marks.ends, *marks.calls, marks.divider.replace("\\", "")]
    texts += [] if calls is None else calls.marks
    tokens = {
        text: token
        for text, (token, special) in added.items()
        if text in texts or (special and any(text in mark for mark in texts))
    }
    reader = read_template if "tool_calls" in _fields(response) else None
    return AnswerForm(marks, calls, reader, tokens)


def _fields(response: Mapping[str, object] | None) -> Mapping[str, Mapping[str, object]]:
    """Return the fields of a response template; none where it is malformed."""
    fields = None if response is None else response.get("fields")
    if not isinstance(fields, Mapping):
        return {}
    return {name: value for name, value in fields.items() if isinstance(value, Mapping)}


def _template_marks(response: Mapping[str, object] | None) -> ReasoningMarks | None:
    """Return the marks of reasoning of a response template; None where it has none, or has patterns for them."""
    fields = _fields(response)
    names = ("thinking", "reasoning_content", "reasoning")
    thinking = next((fields[name] for name in names if name in fields), None)
    if thinking is None:
        return None
    begins, ends = _literals(thinking.get("open")), _literals(thinking.get("close"))
    pattern = thinking.get("open_pattern")
    if isinstance(pattern, str) and re.match(pattern, ""):  # it matches where the answer begins, so it is always open
        begins = ("",)
    answer = fields.get("content", {})
    ends = _literals(answer.get("open")) or ends  # an answer with a mark of its own begins there
    return ReasoningMarks(begins[0], ends) if len(begins) == 1 and ends else None


def _literals(value: object) -> tuple[str, ...]:
    values = [value] if isinstance(value, str) else value
    if not isinstance(values, list):
        return ()
    return tuple(value for value in values if isinstance(value, str) and value)


def _named(tools: Tools) -> dict[str, Mapping[str, object]]:
    """Return the functions of tools by name. A tool is a function, or holds one."""
    named: dict[str, Mapping[str, object]] = {}
    for tool in tools:
        inner = tool.get("function")
        function = inner if isinstance(inner, Mapping) else tool
        name = function.get("name")
        if isinstance(name, str) and name:
            named[name] = function
    return named


def _read_calls(form: CallForm, text: str, names: Iterable[str]) -> tuple[str, tuple[ToolCall, ...]]:
    """Return the text without its whole calls, and the calls. names: those of the functions that were given."""
    calls: list[ToolCall] = []
    kept: list[str] = []
    decoder = json.JSONDecoder(parse_constant=_refuse_constant)
    at = taken = 0
    while (start := re.compile(form.before).search(text, at)) is not None:
        at = max(start.end(), start.start() + 1)  # it may be empty
        try:
            value, end = decoder.raw_decode(text, start.end())
            some = _calls_of(form, value, start.groupdict().get("name"))
        except (ValueError, RecursionError):
            continue
        tail = re.compile(form.after).match(text, end)
        if some and tail is not None:
            kept.append(text[taken : start.start()])
            calls += some
            at = taken = tail.end()
    kept.append(text[taken:])
    rest = [part for part in (part.strip() for part in kept) if part]
    if form.bare and (rest or not {call.name for call in calls} <= set(names)):
        return text, ()
    return ("\n\n".join(rest), tuple(calls)) if calls else (text, ())


def _calls_of(form: CallForm, value: object, name: str | None) -> list[ToolCall]:
    """Return the calls that one JSON value stands for. Raises ValueError where it is none."""
    if name is not None:
        return [ToolCall(name, _arguments(value))]
    calls = []
    for call in value if isinstance(value, list) else [value]:
        if not isinstance(call, dict) or not isinstance(named := call.get("name"), str) or not named:
            raise ValueError("no name")
        calls.append(ToolCall(named, _arguments(call.get(form.arguments, call.get("arguments", {})))))
    return calls


def _arguments(value: object) -> str:
    """Return the arguments of a call as JSON text. Raises ValueError for what is no JSON object."""
    if isinstance(value, str):  # some models write JSON inside of a string
        value = json.loads(value, parse_constant=_refuse_constant)
    if not isinstance(value, dict):
        raise ValueError("no object")
    return json.dumps(value, ensure_ascii=False)


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is no JSON")


@lru_cache(maxsize=256)
def _call_grammar(form: CallForm, tools: str, choice: str, tokens: tuple[tuple[str, int], ...]) -> Grammar:
    """Return the Lark grammar of calls. tools: as JSON. tokens: added tokens by their text."""
    functions = _named(json.loads(tools))
    if choice != "required" and choice not in functions:
        raise UsageError(f"tool_choice is {shorten(choice)}, but the tools are {shorten(', '.join(functions))}")
    chosen = functions if choice == "required" else {choice: functions[choice]}
    rules, names = [], []
    for index, (name, function) in enumerate(chosen.items()):
        schema = _schema(function.get("parameters"), name)
        call = form.call.format(name=json.dumps(name), plain_name=name, arguments="\0")
        before, _, behind = call.partition("\0")
        names.append(f"call_{index}")
        rules.append(f"call_{index}: {_lark(before, tokens)} arguments_{index} {_lark(behind, tokens)}")
        rules.append(f"arguments_{index}: %json {json.dumps({'x-guidance': LAYOUT, **schema})}")
    several = form.between is not None and choice == "required"
    more = f" ({_lark(form.between or '', tokens)} call)*" if several else ""
    start = f"start: {_lark(form.begin, tokens)} call{more} {_lark(form.end, tokens)}"
    return Grammar.lark("\n".join([start, f"call: {' | '.join(names)}", *rules, ""]))


def _schema(parameters: object, name: str) -> dict[str, object]:
    """Return the schema of a function's arguments as a grammar enforces it. Raises UsageError where it cannot enforce
    all of it."""
    if parameters is not None and not isinstance(parameters, Mapping):
        raise UsageError(f"parameters of the tool {shorten(name)} are {shorten(parameters)}, but must be a JSON schema")
    schema = {"type": "object", **(parameters or NO_PARAMETERS)}
    try:
        enforced = Grammar.json_schema(schema, strict=True).enforced
    except UsageError as error:
        raise UsageError(f"parameters of the tool {shorten(name)} cannot be used: {error}") from None
    assert isinstance(enforced, Mapping), "it has a type"
    return dict(enforced)


def _lark(text: str, tokens: tuple[tuple[str, int], ...]) -> str:
    """Return a text as Lark writes it, in which added tokens stand by their ids. Empty for an empty text."""
    ids = dict(tokens)
    pattern = "|".join(map(re.escape, sorted(ids, key=len, reverse=True)))
    parts = re.split(f"({pattern})", text) if ids else [text]
    return " ".join(
        f"<[{ids[part]}]>" if part in ids else json.dumps(part, ensure_ascii=False) for part in parts if part
    )
