"""Every request field that is honoured has its effect: rows are read as JSON lines, and answered by toy models."""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import pytest
from tokenizers.processors import TemplateProcessing

from dsbd_cli.config.method import MethodConfig
from dsbd_cli.config.sampling import SamplingConfig
from dsbd_cli.engine.decoding.engine import Engine
from dsbd_cli.io.records.reader import AGREEING_FIELDS, RowReader
from dsbd_cli.io.records.request_fields import NAMED
from dsbd_cli.models.tokenizer import HFCodec
from dsbd_cli.requests import RequestResult
from tests.helpers.checkpoints import byte_level, wrap
from tests.helpers.toy import HashModel

BEAMS, ROWS, LENGTH = 3, 8, 10
TEMPLATE = (
    "{# the model thinks between <think> and </think> #}"
    "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
    "{% if tools %}<tools>{{ tools[0].function.name }}{% endif %}"
    "{% if documents %}<documents>{{ documents[0].text }}{% endif %}"
    "{% if note %}<note>{{ note }}{% endif %}{% if reasoning_effort %}<effort>{{ reasoning_effort }}{% endif %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)


@cache
def codec() -> HFCodec:
    tokenizer = copy.deepcopy(byte_level())
    begin = tokenizer.token_to_id("<s>")
    tokenizer.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", begin)])
    return HFCodec(wrap(tokenizer, chat_template=TEMPLATE), (END,))


END = byte_level().token_to_id("</s>")


@cache
def engine() -> Engine:
    size = byte_level().get_vocab_size()
    target, draft = HashModel(size, 1), HashModel(size, 1, noise=0.3)
    method = MethodConfig(num_beams=BEAMS, depth=3, drafts_per_layer=8, width="fixed")
    return Engine(target, draft, codec(), method, batch_size=5)


@cache
def answers(row: str) -> tuple[RequestResult, ...]:
    """Of some rows that differ in their id alone. row: their fields as JSON."""
    reader = RowReader(SamplingConfig(top_k=30, max_new_tokens=LENGTH, n_best=BEAMS), num_beams=BEAMS, strict=True)
    requests = []
    for index in range(ROWS):
        read = reader.read(row.encode(), index=index, number=index + 1)
        assert read.error is None, read.error
        assert read.request is not None
        requests.append(read.request)
    return tuple(engine().run(requests))


Results = Sequence[RequestResult]


def texts(results: Results) -> list[str]:
    return [beam.text for result in results for beam in result.hypotheses]


def ids(results: Results) -> list[tuple[int, ...]]:
    return [beam.token_ids for result in results for beam in result.hypotheses]


def differ(results: Results, plain: Results) -> bool:
    return ids(results) != ids(plain)


def rule_acts(name: str) -> Callable[[Results, Results], bool]:
    return lambda results, plain: differ(results, plain) and all(name in result.token_rules for result in results)


def without(token: int) -> Callable[[Results, Results], bool]:
    return lambda results, plain: (
        any(token in text for text in ids(plain)) and not any(token in text for text in ids(results))
    )


def asked_more(results: Results, plain: Results) -> bool:
    """The prompt is a longer one, and so the answers are others."""
    return differ(results, plain) and results[0].prompt_tokens > plain[0].prompt_tokens


def fails_saying(text: str) -> Callable[[Results, Results], bool]:
    return lambda results, plain: all(text in str(result.error) for result in results)


def told(*, whole: bool) -> Callable[[Results, Results], bool]:
    """Reasoning, which all of the answers are, is split off without the field. whole: with it, it is the text; else it
    is dropped."""

    def check(results: Results, plain: Results) -> bool:
        split = [beam for result in plain for beam in result.hypotheses]
        texts_of = [(beam.reasoning or "" if whole else "") for beam in split]
        kept = [beam for result in results for beam in result.hypotheses]
        return (
            any(beam.reasoning for beam in split)
            and not any(beam.text for beam in split)
            and [beam.text.strip() for beam in kept] == texts_of  # blanks around reasoning are no part of it
            and not any(beam.reasoning for beam in kept)
        )

    return check


@dataclass
class Effect:
    """value: of the field. check: whether its effect is there, of the results with it and without. beside: further
    fields of both."""

    value: Any
    check: Callable[[Results, Results], bool]
    beside: dict[str, Any] = field(default_factory=dict)


THINKS = {"prompt": "ab<think>"}
ENDING = {"logit_bias": {str(END): 9}}  # texts end soon
CHAT = {"messages": [{"role": "user", "content": "hi"}]}
LEFT_OFF = {"messages": [*CHAT["messages"], {"role": "assistant", "content": "We"}]}
TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}]


@cache
def often() -> int:
    """A token that plain answers often have, not as their first one."""
    tokens = [token for text in ids(answers(json.dumps({"prompt": "ab"}))) for token in text[1:]]
    return max(set(tokens), key=tokens.count)


def spelled(token: int) -> str:
    return codec().decode([token])


def effects() -> dict[str, Effect]:
    token = often()
    [first] = {text[0] for text in ids(answers(json.dumps({"prompt": "ab", "temperature": 0, "n_best": 1})))}
    a, b = (byte_level().token_to_id(letter) for letter in "ab")
    return {
        "prompt": Effect("xyz", differ),
        "messages": Effect(CHAT["messages"], lambda results, plain: results[0].prompt_tokens > 10),
        "system": Effect("Be brief.", asked_more, CHAT),
        "audio": Effect("a.wav", fails_saying("audio is 'a.wav', but the target reads text")),
        "image": Effect("a.png", fails_saying("image is 'a.png', but the target reads text")),
        "source_lang": Effect("en", fails_saying("source_lang is 'en', but the target has no encoder")),
        "target_lang": Effect("en", fails_saying("target_lang is 'en', but the target has no encoder")),
        "prefix": Effect("ab", lambda results, plain: all(text.startswith("ab") for text in texts(results))),
        "add_special_tokens": Effect(
            False,
            lambda results, plain: results[0].prompt_tokens == plain[0].prompt_tokens - 1 and differ(results, plain),
        ),
        "truncate_prompt_tokens": Effect(
            3,
            lambda results, plain: results[0].prompt_tokens == 3 and results[0].truncated_tokens > 0,
            {"prompt": "a b c d e f g"},
        ),
        "max_new_tokens": Effect(3, lambda results, plain: {len(text) for text in ids(results)} == {3}),
        "min_new_tokens": Effect(
            6,
            lambda results, plain: min(map(len, ids(results))) >= 6 > min(map(len, ids(plain))),
            ENDING,
        ),
        "min_length": Effect(
            8,
            lambda results, plain: (
                min(map(len, ids(results))) + plain[0].prompt_tokens >= 8 > min(map(len, ids(plain)))
            ),
            ENDING,
        ),
        "stop": Effect(
            spelled(token),
            lambda results, plain: (
                differ(results, plain) and not any(spelled(token) in text for text in texts(results))
            ),
        ),
        "include_stop_str_in_output": Effect(
            True, lambda results, plain: any(text.endswith("e") for text in texts(results)), {"stop": "e"}
        ),
        "stop_token_ids": Effect(
            [token],
            lambda results, plain: differ(results, plain) and not any(token in text[:-1] for text in ids(results)),
        ),
        "eos_token_id": Effect(
            token,
            lambda results, plain: (
                any(END in text[:-1] for text in ids(results)) and not any(token in text[:-1] for text in ids(results))
            ),
            ENDING,
        ),
        "ignore_eos": Effect(
            True,
            lambda results, plain: (
                {len(text) for text in ids(results)} == {LENGTH} != {len(text) for text in ids(plain)}
            ),
            ENDING,
        ),
        "skip_special_tokens": Effect(
            False,
            lambda results, plain: any("</s>" in text for text in texts(results)) and "</s>" not in str(texts(plain)),
            {**ENDING, "ignore_eos": True},
        ),
        "temperature": Effect(0, differ),
        "top_k": Effect(3, differ),
        "top_p": Effect(0.2, differ),
        "min_p": Effect(0.5, differ),
        "seed": Effect(5, differ),
        "n_best": Effect(2, lambda results, plain: {len(result.hypotheses) for result in results} == {2}),
        "num_beams": Effect(2, differ, {"n_best": 2}),
        "length_penalty": Effect(
            0.0, lambda results, plain: all(beam.score == beam.logprob for beam in results[0].hypotheses)
        ),
        "early_stopping": Effect(True, differ, {**ENDING, "length_penalty": 3.0}),
        "repetition_penalty": Effect(5.0, rule_acts("repetition_penalty")),
        "presence_penalty": Effect(2.0, rule_acts("presence_penalty")),
        "frequency_penalty": Effect(2.0, rule_acts("frequency_penalty")),
        "no_repeat_ngram_size": Effect(
            1,
            lambda results, plain: all(len(set(text)) == len(text) for text in ids(results)),
            {"allowed_token_ids": [*range(20, 40)]},
        ),
        "logit_bias": Effect({str(token): -100}, without(token)),
        "allowed_token_ids": Effect([a, b], lambda results, plain: {*sum(ids(results), ())} == {a, b}),
        "bad_words": Effect(
            ["a"],
            lambda results, plain: differ(results, plain) and "a" not in "".join(texts(results)),
            {"allowed_token_ids": [a, b]},
        ),
        "bad_words_ids": Effect([[token]], without(token)),
        "suppress_tokens": Effect([token], without(token)),
        "begin_suppress_tokens": Effect(
            [first],
            lambda results, plain: (
                {text[0] for text in ids(plain)} == {first} and first not in {text[0] for text in ids(results)}
            ),
            {"temperature": 0, "n_best": 1},
        ),
        "forced_bos_token_id": Effect(
            a,
            lambda results, plain: {text[0] for text in ids(results)} == {a},
            {"prompt": "a", "add_special_tokens": False},
        ),
        "forced_eos_token_id": Effect(END, lambda results, plain: {text[-1] for text in ids(results)} == {END}),
        "renormalize_logits": Effect(
            True,
            lambda results, plain: results[0].hypotheses[0].logprob != plain[0].hypotheses[0].logprob,
            {"allowed_token_ids": [a, b]},
        ),
        "token_rules": Effect({"min_new_tokens": 6}, lambda results, plain: min(map(len, ids(results))) >= 6, ENDING),
        "allow": Effect(["ab", "ba"], lambda results, plain: set(texts(results)) <= {"ab", "ba"}),
        "guided_choice": Effect(["ab", "ba"], lambda results, plain: set(texts(results)) <= {"ab", "ba"}),
        "response_format": Effect(
            {"type": "regex", "value": "[ab]{2}"},
            lambda results, plain: all(re.fullmatch("[ab]{2}", text) for text in texts(results)),
        ),
        "guided_json": Effect({"enum": ["ab"]}, lambda results, plain: set(texts(results)) == {'"ab"'}),
        "guided_json_object": Effect(
            True, lambda results, plain: all(text[0] == "{" for text in texts(results)), {"max_new_tokens": 2}
        ),
        "guided_regex": Effect(
            "[ab]{2}", lambda results, plain: all(re.fullmatch("[ab]{2}", text) for text in texts(results))
        ),
        "guided_grammar": Effect('start: "ab"', lambda results, plain: set(texts(results)) == {"ab"}),
        "grammar": Effect('root ::= "a" "b"', lambda results, plain: set(texts(results)) == {"ab"}),
        "structured_outputs": Effect({"choice": ["ab"]}, lambda results, plain: set(texts(results)) == {"ab"}),
        "reasoning": Effect("keep", told(whole=True), THINKS),
        "separate_reasoning": Effect(False, told(whole=True), THINKS),
        "include_reasoning": Effect(False, told(whole=False), THINKS),
        "tools": Effect(TOOLS, asked_more, CHAT),
        "tool_choice": Effect(
            "none",
            lambda results, plain: ids(results) == ids(answers(json.dumps(CHAT))) != ids(plain),
            {**CHAT, "tools": TOOLS},
        ),
        "documents": Effect([{"text": "a"}], asked_more, CHAT),
        "chat_template_kwargs": Effect({"note": "a"}, asked_more, CHAT),
        "reasoning_effort": Effect("low", asked_more, CHAT),
        "continue_final_message": Effect(
            True, lambda results, plain: results[0].prompt_tokens < plain[0].prompt_tokens, LEFT_OFF
        ),
        "add_generation_prompt": Effect(
            False, lambda results, plain: ids(results) == ids(plain), {**LEFT_OFF, "continue_final_message": True}
        ),
        "token_logprobs": Effect(True, lambda results, plain: results[0].hypotheses[0].tokens is not None),
        "logprobs": Effect(2, lambda results, plain: len((results[0].hypotheses[0].tokens or ())[0].top) == 2),
        "top_n_tokens": Effect(2, lambda results, plain: len((results[0].hypotheses[0].tokens or ())[0].top) == 2),
        "top_logprobs": Effect(
            2, lambda results, plain: len((results[0].hypotheses[0].tokens or ())[0].top) == 2, {"token_logprobs": True}
        ),
    }


# Of these a row says nothing about its text.
APART = {"id", "metadata", "parallel_tool_calls", *AGREEING_FIELDS}
FIELDS = sorted({field.name for field in NAMED.values()} - APART)


def test_every_field_has_an_effect_here() -> None:
    assert sorted(effects()) == FIELDS


@pytest.mark.parametrize("name", FIELDS)
def test_a_field_has_its_effect(name: str) -> None:
    effect = effects()[name]
    asked = effect.beside
    if "messages" not in asked and name not in ("messages", "audio", "image"):
        asked = {"prompt": "ab", **asked}
    plain = answers(json.dumps(asked if {"messages", "prompt"} & asked.keys() else {"prompt": "ab", **asked}))
    assert effect.check(answers(json.dumps({**asked, name: effect.value})), plain)
