"""Reasoning and calls of functions, told from the answer: in results, in streams, with stop strings, beside other rows.

The numbers of a row must not change with what is told apart. Guards: a stop string in the reasoning that ends the text,
one in the answer that is not seen, a mark that is streamed, a row that is read by the settings of its neighbour.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from dsbd_cli.answer_forms import CALLS, REASONING, AnswerForm, Reasoning
from dsbd_cli.config.chat import ChatConfig
from dsbd_cli.config.grammars import Grammar
from dsbd_cli.config.method import MethodConfig
from dsbd_cli.config.sampling import SamplingConfig
from dsbd_cli.engine.decoding.engine import Engine
from dsbd_cli.errors import InvalidRowError
from dsbd_cli.requests import Request, RequestResult, ToolCall
from tests.helpers.toys import NumberCodec, TableLM, table_pair

PARTS = (b"a", b"b", b"", b"<think>", b"</think>", b" ", b"\n", b"c", b"</th", b"ink>", b"<th", b"ink>a")
VOCABULARY, EOS = len(PARTS), 2
THINK = next(marks for marks in REASONING if marks.begin == "<think>")


class PartsCodec(NumberCodec):
    """Tokens are texts, marks among them."""

    form: AnswerForm
    parts: Sequence[bytes]

    def encode_pieces(self, texts: list[str]) -> list[list[int]]:
        return [self.encode(text) for text in texts]

    def encode(self, prompt: str, *_: object) -> list[int]:
        ids, rest = list[int](), prompt.encode()
        while rest:
            ids.append(max(range(len(self.parts)), key=lambda i: len(self.parts[i]) * rest.startswith(self.parts[i])))
            rest = rest[len(self.parts[ids[-1]]) :]
        return ids

    def decode(self, ids: list[int], *, skip_special_tokens: bool = True) -> str:
        return b"".join(self.parts[token] for token in ids).decode()

    def token_bytes(self, *, skip_special_tokens: bool = True) -> list[bytes]:
        return list(self.parts)


class ThinkingCodec(PartsCodec):
    """Marks of reasoning, whole and in pieces."""

    form, parts = AnswerForm(THINK), PARTS


def make(batch_size: int = 5, ends: dict[int, float] | None = None, codec: Any = None, **method: Any) -> Engine:
    target, draft = table_pair(3, VOCABULARY, 0.5, ends=ends or {2: -1.0, 3: 1.0, 4: 1.0, 6: 0.5, 7: 0.5})
    config = MethodConfig.of({"num_beams": 3, "depth": 3, **method})
    own = codec or ThinkingCodec(VOCABULARY, (EOS,))
    return Engine(target, draft if config.needs_draft else None, own, config, batch_size=batch_size)


def rows(count: int = 40, **sampling: Any) -> list[Request]:
    settings = SamplingConfig(**{"max_new_tokens": 16, "n_best": 2, **sampling})
    return [
        Request(prompt_ids=(i % 7, i % 12, 3 if i % 3 == 0 else 1), id=str(i), seed=i, sampling=settings)
        for i in range(count)
    ]


def opened(result: RequestResult) -> bool:
    """Whether the prompt ends with the mark that opens the reasoning."""
    assert result.request.prompt_ids is not None
    return result.request.prompt_ids[-1] == 3


METHODS: list[dict[str, Any]] = [
    {"rule": "coupled"},
    {"rule": "coupled", "depth": 0},
    {"rule": "search"},
]


@pytest.mark.parametrize("method", METHODS, ids=lambda method: "-".join(map(str, method.values())))
def test_split_changes_the_text_alone(method: dict[str, Any]) -> None:
    counts = defaultdict(int)
    texts = list(make(**method).run(rows(reasoning="keep")))
    for mode in ("split", "drop"):
        for whole, told in zip(texts, make(**method).run(rows(reasoning=mode)), strict=True):
            for kept, beam in zip(whole.hypotheses, told.hypotheses, strict=True):
                reasoning, text = Reasoning(THINK, opened(whole)).split(kept.text)
                expected = replace(kept, text=text, reasoning=reasoning if mode == "split" else None)
                assert replace(beam, reasoning_tokens=0) == expected
                assert 0 < beam.reasoning_tokens <= len(beam.token_ids) if reasoning else beam.reasoning_tokens >= 0
                counts["cut" if reasoning and not text else "both" if reasoning else "none"] += 1
    assert min(counts.values()) > 8, counts
    assert len(counts) == 3


def plain_stop(written: str, opens: bool, stop: str) -> str | None:
    """Oracle: the text up to the stop string in the answer; None where there is none."""
    lead = written.lstrip()
    if not opens and not lead.startswith("<think>"):
        position = written.find(stop)
        return None if position < 0 else written[:position]
    _, mark, answer = written.partition("</think>")
    answer = answer.lstrip()
    position = answer.find(stop) if mark else -1
    return None if position < 0 else written[: len(written) - len(answer) + position]


@pytest.mark.parametrize("method", [METHODS[0], METHODS[2]], ids=["coupled", "search"])
def test_a_stop_string_ends_the_answer_alone(method: dict[str, Any]) -> None:
    """Every text ends at the first token that completes the stop string in its answer, and there alone."""
    engine, codec, ended = make(**method), ThinkingCodec(VOCABULARY, (EOS,)), defaultdict[bool, int](int)
    for stop in ("a", "c", "bc", ">", "\n", "ink", "<th", "k>a", "b\n", " ", "\n\n", "\nb"):
        for result in engine.run(rows(60, stop=stop)):
            opens = opened(result)
            for beam in result.hypotheses:
                ids = [token for token in beam.token_ids if token != EOS]
                written, before = codec.decode(ids), codec.decode(ids[:-1])
                cut = plain_stop(written, opens, stop)
                undecided = not opens and "<think>".startswith(before.lstrip())
                assert undecided or plain_stop(before, opens, stop) is None, "it would have ended before"
                assert Reasoning(THINK, opens).split(written if cut is None else cut)[1] == beam.text
                assert cut is None or (beam.finish_reason == "stop" and stop not in beam.text)
                ended[beam.reasoning is not None] += cut is not None
    assert min(ended.values()) > 10, "both with and without reasoning"


@pytest.mark.parametrize(
    "sampling", [{}, {"stop": "bc"}, {"stop": ("\n", "ab")}, {"reasoning": "drop"}, {"reasoning": "keep"}]
)
def test_the_pieces_joined_are_the_answer(sampling: dict[str, Any]) -> None:
    plain = list(make(batch_size=40).run(rows(**sampling)))
    texts: dict[str, str] = defaultdict(str)
    pieces, early = list(make().stream(rows(**sampling))), 0
    for piece in pieces:
        texts[piece.request.id] += piece.text
        early += piece.result is None and bool(piece.text)
    assert {result.request.id: result.text for result in plain} == texts
    assert early > 5


def test_rows_do_not_change_each_other() -> None:
    """One row is told apart, its neighbour is kept, a third has a stop string."""
    modes: list[dict[str, Any]] = [{}, {"reasoning": "keep"}, {"stop": "a"}, {"stop": "a", "reasoning": "keep"}]
    mixed = [replace(row, sampling=replace(row.sampling, **modes[i % 4])) for i, row in enumerate(rows())]
    alone = make(batch_size=1, depth=0)
    for request, result in zip(mixed, make().run(mixed), strict=True):
        [expected] = alone.run([request])
        assert result.hypotheses == expected.hypotheses


def forced(tokens: list[int], prompt: tuple[int, ...] = (0, 0), vocabulary: int = VOCABULARY) -> Engine:
    """An engine that writes these tokens, which must differ from each other in the two tokens before."""
    table = torch.zeros(vocabulary, vocabulary, vocabulary)
    path = [*prompt, *tokens, EOS]
    for position in range(len(prompt), len(path)):
        table[path[position - 2], path[position - 1], path[position]] = 30.0
    return Engine(TableLM(table), None, ThinkingCodec(vocabulary, (EOS,)), MethodConfig(num_beams=1), batch_size=1)


@pytest.mark.parametrize(
    ("tokens", "prompt", "expected"),
    [
        ([3, 0, 4, 6, 1, 7], (0, 5), ("a", "bc", 3)),
        ([0, 4, 6, 1, 7], (3, 5), ("a", "bc", 2)),  # the template has opened it
        ([0, 8, 9, 6, 1, 7], (3, 5), ("a", "bc", 3)),  # the mark is two tokens
        ([0, 8, 11, 1, 7], (3, 5), ("a", "abc", 3)),  # the mark ends inside of a token
        ([3, 0, 1, 7], (0, 5), ("abc", "", 5)),  # cut in its reasoning: the end token is its as well
        ([0, 1, 3, 7, 4], (0, 5), (None, "ab<think>c</think>", 0)),  # a mark later on is text
        ([6, 3, 4, 1], (0, 5), (None, "b", 0)),  # no reasoning between the marks
    ],
)
def test_parts(tokens: list[int], prompt: tuple[int, ...], expected: tuple[str | None, str, int]) -> None:
    result = forced(tokens, prompt).generate(Request(prompt_ids=prompt, sampling=SamplingConfig(temperature=0.0)))
    best = result.hypotheses[0]
    assert list(best.token_ids) == [*tokens, EOS]
    assert (best.reasoning, best.text, best.reasoning_tokens) == expected


@pytest.mark.parametrize(
    ("prefix", "tokens", "stop", "expected"),
    [
        (None, [3, 0, 4, 6, 1, 7], "\n", ("a", "bc")),  # an answer was empty: whitespace behind the mark ended it
        (None, [3, 0, 4, 6, 1, 6, 7], "\n", ("a", "b")),
        (None, [3, 0, 4, 6, 1, 7], "\nb", ("a", "bc")),
        (None, [3, 0, 8, 9, 5, 6, 1, 7], " ", ("a", "bc")),
        (None, [3, 0, 4, 6, 5, 6], "\n", ("a", "")),
        (None, [6, 1, 7], "\n", (None, "")),  # without reasoning, whitespace at the beginning counts
        (None, [5, 1, 6, 7], "\n", (None, " b")),
        ("<think>b</think>", [6, 0, 6, 7], "\n", ("b", "a")),  # the mark is in the prefix
        ("<think>b</think>\n", [6, 0, 6, 7], "\n", ("b", "a")),
        ("<think>b</th", [9, 6, 0, 6, 7], "\n", ("b", "a")),  # the prefix ends inside of it
    ],
)
def test_whitespace_before_the_answer_is_no_stop_string(
    prefix: str | None, tokens: list[int], stop: str, expected: tuple[str | None, str]
) -> None:
    codec = ThinkingCodec(VOCABULARY, (EOS,))
    prompt = (0, 5, *codec.encode(prefix or ""))
    settings = SamplingConfig(temperature=0.0, stop=(stop,), prefix=prefix)
    request = Request(prompt_ids=(0, 5), sampling=settings)
    engine = forced(tokens, prompt)
    best = engine.generate(request).hypotheses[0]
    assert list(best.token_ids) == [*tokens, EOS][: len(best.token_ids)]
    assert (best.reasoning, best.text) == expected
    [*pieces] = engine.stream([request])
    assert "".join(piece.text for piece in pieces) == best.text


def test_a_target_without_marks_refuses_what_would_do_nothing() -> None:
    engine = make(codec=NumberCodec(VOCABULARY, (EOS,)))
    for mode in ("keep", "drop"):
        with pytest.raises(InvalidRowError, match=f"reasoning is {mode}, but the target marks no reasoning"):
            engine.generate(replace(rows(1)[0], sampling=SamplingConfig(reasoning=mode)))  # type: ignore[arg-type]
    assert engine.generate(rows(1)[0]).hypotheses[0].reasoning is None


def test_a_grammar_leaves_no_reasoning_and_says_so_once() -> None:
    engine, told = make(), list[str]()
    engine.tell = told.append
    asked = [replace(row, grammar=Grammar.regex("[abc]{2}(</think>)?")) for row in rows(9)]
    for result in engine.run(asked):
        assert result.hypotheses[0].reasoning is None
        assert result.hypotheses[0].valid
    assert len(told) == 1
    assert told[0].startswith("a prompt ends with <think>, but a grammar")
    allowed = engine.generate(replace(rows(1)[0], allow=("ab</think>c",)))
    assert (allowed.text, allowed.hypotheses[0].reasoning) == ("ab</think>c", None)


# Calls of functions: tokens are single letters, and the marks of Hermes are tokens

LETTERS = [bytes([code]) for code in range(32, 127)] + [b"\n"]
CALLING = [b"", b"<tool_call>", b"</tool_call>", *LETTERS]
ADD = {"type": "object", "properties": {"n": {"enum": [7, 8]}}, "required": ["n"]}
TOOLS = (
    {"type": "function", "function": {"name": "add", "parameters": ADD}},
    {"type": "function", "function": {"name": "now"}},
)


class CallingCodec(PartsCodec):
    form, parts = AnswerForm(None, CALLS[1], None, {"<tool_call>": 1, "</tool_call>": 2}), CALLING


def caller(**method: Any) -> Engine:
    target, draft = table_pair(5, len(CALLING), 0.5)
    config = MethodConfig.of({"num_beams": 3, "depth": 3, **method})
    return Engine(target, draft if config.needs_draft else None, CallingCodec(len(CALLING), (0,)), config, batch_size=4)


def call_rows(choice: str, count: int = 6, **sampling: Any) -> list[Request]:
    chat = ChatConfig(tools=TOOLS, tool_choice=choice)
    settings = SamplingConfig(**{"max_new_tokens": 90, "n_best": 3, **sampling})
    return [
        Request(messages=[{"role": "user", "content": f"q{i}"}], id=str(i), sampling=settings, chat=chat)
        for i in range(count)
    ]


@pytest.mark.parametrize("choice", ["required", "add", "now"])
@pytest.mark.parametrize("method", METHODS, ids=lambda method: "-".join(map(str, method.values())))
def test_a_demanded_call_is_exact_in_every_beam(choice: str, method: dict[str, Any]) -> None:
    names = set()
    for result in caller(**method).run(call_rows(choice)):
        assert result.error is None
        for beam in result.hypotheses:
            assert (beam.valid, beam.text, beam.finish_reason) == (True, "", "stop")
            assert beam.tool_calls
            assert choice == "required" or len(beam.tool_calls) == 1
            for call in beam.tool_calls:
                names.add(call.name)
                assert call.arguments in {"add": ('{"n": 7}', '{"n": 8}'), "now": ("{}",)}[call.name]
    assert names <= {choice} or (choice == "required" and names <= {"add", "now"})


def test_the_demand_does_not_depend_on_the_draft() -> None:
    asked = call_rows("required")
    for drafted, plain in zip(caller().run(asked), caller(depth=0).run(asked), strict=True):
        assert drafted.hypotheses == plain.hypotheses
        assert drafted.request is plain.request or drafted.request == plain.request


def test_a_request_is_handed_back_as_it_came() -> None:
    """Whoever hands requests in finds them again by their identity."""
    [request] = [replace(row, seed=1) for row in call_rows("required", 1)]
    [result] = caller().run([request])
    assert result.request is request


def written_call(text: str, chat: ChatConfig | None = None) -> RequestResult:
    """The result of a text that the target is made to write, one beam."""
    codec = CallingCodec(len(CALLING), (0,))
    request = Request(messages=[{"role": "user", "content": "q"}], chat=chat or ChatConfig(tools=TOOLS))
    allowed = replace(request, allow=(text,), sampling=SamplingConfig(max_new_tokens=len(text) + 1))
    target, _ = table_pair(5, len(CALLING), 0.5)
    engine = Engine(target, None, codec, MethodConfig(num_beams=1), batch_size=1)
    return engine.generate(allowed)


CALL = '<tool_call>\n{"name": "add", "arguments": {"n": 7}}\n</tool_call>'


def test_calls_are_read_where_the_request_has_tools() -> None:
    called = ToolCall("add", '{"n": 7}')
    best = written_call(f"ok {CALL}").hypotheses[0]
    assert (best.text, best.tool_calls) == ("ok", (called,))
    for chat in (ChatConfig(tools=TOOLS, tool_choice="none"), ChatConfig()):
        best = written_call(CALL, chat).hypotheses[0]
        assert (best.text, best.tool_calls) == (CALL, ())


def test_a_stream_with_tools_ends_with_its_text() -> None:
    """Nothing is streamed that may turn out to be a call."""
    asked = [replace(row, sampling=SamplingConfig(max_new_tokens=9)) for row in call_rows("auto")]
    for piece in caller().stream(asked):
        assert piece.result is not None
        assert piece.text == piece.result.text


@pytest.mark.parametrize(
    ("choice", "more", "message"),
    [
        ("required", {"sampling": SamplingConfig(eos_token_id=(3,))}, r"eos_token_id is \[3\], but tool_choice says"),
        ("required", {"sampling": SamplingConfig(ignore_eos=True)}, "ignore_eos is true, but tool_choice says"),
    ],
)
def test_pairs_that_cannot_work(choice: str, more: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidRowError, match=message):
        caller().generate(replace(call_rows(choice, 1)[0], **more))


def test_a_demand_needs_a_form_and_a_tool() -> None:
    target, _ = table_pair(5, len(CALLING), 0.5)
    codec = CallingCodec(len(CALLING), (0,))
    with pytest.raises(InvalidRowError, match="tool_choice is 'what', but the tools are 'add, now'"):
        caller().generate(call_rows("what", 1))
    codec.form = AnswerForm()
    engine = Engine(target, None, codec, MethodConfig(num_beams=1), batch_size=1)
    with pytest.raises(InvalidRowError, match="the form in which the target calls functions is not known"):
        engine.generate(call_rows("required", 1))
