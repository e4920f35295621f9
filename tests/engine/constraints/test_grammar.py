"""Grammar states: what may follow a text, whether it is whole, and how errors name their place."""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer, models

from dsbd_cli.config.grammars import Grammar
from dsbd_cli.engine.constraints.grammar import GrammarCompiler, GrammarState
from dsbd_cli.errors import UsageError

LETTERS = [b"", *[bytes([byte]) for byte in b'abc{}":, 01'], b"ab", b'{"', b'": ']


class Letters:
    """A codec of a few short tokens; token 0 ends."""

    eos_ids = (0,)

    def token_bytes(self, *, skip_special_tokens: bool = True) -> list[bytes]:
        return LETTERS


def compiler(vocab_size: int = len(LETTERS)) -> GrammarCompiler:
    return GrammarCompiler(Letters(), vocab_size)  # type: ignore[arg-type]


def texts(state: GrammarState, longest: int) -> Iterator[tuple[bytes, bool]]:
    """Every text of up to `longest` tokens that the masks allow, and whether it may end there."""
    yield b"", state.allows(0)
    for token in (state.following(99) or []) if longest else []:
        for rest, ends in texts(state.after(token), longest - 1):
            yield LETTERS[token] + rest, ends


@pytest.mark.parametrize("pattern", ["a(bb)*", "(ab|ba|c){0,3}", "[abc]*c[01]?", "a|"])
def test_a_regex_lets_end_what_it_matches_and_nothing_else(pattern: str) -> None:
    pairs = list(texts(compiler().start(Grammar.regex(pattern)), 4))
    assert {text for text, ends in pairs if ends} == {text for text, _ in pairs if re.fullmatch(pattern, text.decode())}
    assert any(ends for _, ends in pairs)


def test_nothing_that_the_regex_matches_is_lost() -> None:
    matched = {text for text, ends in texts(compiler().start(Grammar.regex("[abc]*c[01]?")), 3) if ends}
    letters = b"abc01"
    every = {bytes([x]) for x in letters} | {bytes([x, y]) for x in letters for y in letters}
    assert {text for text in every if re.fullmatch("[abc]*c[01]?", text.decode())} <= matched


def test_the_masks_do_not_depend_on_how_a_text_was_reached() -> None:
    """Copied matchers that were asked at every step give the masks of one that only consumed the tokens."""
    schema = {"type": "object", "properties": {"a": {"enum": ["ab", "b"]}}, "required": ["a"]}
    grammar = Grammar.json_schema({**schema, "additionalProperties": False})
    made = compiler()
    state, path = made.start(grammar), []
    while tokens := state.following(99):
        path.append(tokens[-1])
        state = state.after(tokens[-1])
        alone = made._known[grammar][0].deep_copy()
        assert alone.consume_tokens(path)
        assert (np.frombuffer(alone.compute_bitmask(), dtype=np.int32) == state.mask).all()
    assert state.complete
    assert len(path) > 5


def test_a_state_is_kept_and_dead_ends_stay_dead() -> None:
    start = compiler().start(Grammar.regex("a[bc]"))
    assert start.after(1) is start.after(1)
    assert start.after(2) is None
    assert start.after(0) is None
    whole = start.after(1).after(2)
    assert whole.complete
    assert whole.allows(0)
    assert not whole.after(0).mask.any()
    assert whole.after(0).after(1) is None


def test_following_counts_no_end_token() -> None:
    state = compiler().start(Grammar.regex("[abc]?"))
    assert state.allows(0)
    assert state.following(3) == [1, 2, 3]
    assert state.following(2) is None


def test_a_vocabulary_wider_than_the_tokens() -> None:
    state = compiler(100).start(Grammar.regex("[abc]+"))
    assert not state.allows(64)


def test_a_tokenizer_file_that_llguidance_does_not_understand() -> None:
    """Its tokens are spelled with the longest that fit, as those of a tokenizer without a file."""

    class WordLevel(Letters):
        def tokenizer_json(self) -> str:
            return str(Tokenizer(models.WordLevel({"a": 0}, unk_token="a")).to_str())

    made = GrammarCompiler(WordLevel(), len(LETTERS))  # type: ignore[arg-type]
    assert list(texts(made.start(Grammar.regex("ab|c")), 3)) == list(texts(compiler().start(Grammar.regex("ab|c")), 3))


def test_a_grammar_is_compiled_once() -> None:
    made = compiler()
    made.start(Grammar.regex("a+"))
    first = made._known[Grammar.regex("a+")]
    made.start(Grammar.regex("a+"))
    assert made._known[Grammar.regex("a+")] is first


FAULTS = [
    (
        Grammar.json_schema({"properties": {"a": {"items": {"uniqueItems": True, "type": "array"}}}}, strict=True),
        r'"uniqueItems"\] \(at /properties/a/items\)',
    ),
    (Grammar.json_schema({"properties": {"a": {"type": "strng"}}}), r"strng \(at /properties/a\)"),
    (
        Grammar.json_schema({"properties": {"a": {"anyOf": [{}, {"not": {}}]}}}, strict=True),
        r"\(at /properties/a/anyOf/1\)",
    ),
    (Grammar.json_schema({"properties": {"a/b": {"$ref": "#/$defs/x"}}}), r"/\$defs/x.*\(at /properties/a~1b\)"),
    (
        Grammar.json_schema(
            {"$defs": {"x": {"type": "string", "pattern": "(["}}, "properties": {"a": {"$ref": "#/$defs/x"}}}
        ),
        r"unclosed character class \(at /\$defs/x\)",
    ),
    (
        Grammar.json_schema({"properties": {"a": True, "b": {"not": {}}}, "additionalProperties": False}, strict=True),
        r'"not"\] \(at /properties/b\)',
    ),
    (Grammar.json_schema("false"), "schema is false"),
    (Grammar.json_schema('{"const": 1e400}'), "not valid JSON"),
    (Grammar.json_schema('{"const": "\\ud800"}'), "not valid JSON: unexpected end of hex"),
    (Grammar.regex("\ud800"), "half a surrogate pair"),
    (Grammar.json_schema("[1]"), "must be an object"),
    (Grammar.json_schema("{"), "not valid JSON"),
    (Grammar.json_schema(f'{{"const": {"9" * 5000}}}'), "a value has too many digits or levels"),
    (Grammar.regex("a(b"), "unclosed group"),
    (Grammar.regex("a" + 3 * "\\"), "a backslash at its end escapes nothing"),
    (Grammar.lark("start: a"), 'unknown name: "a"'),
    (Grammar.lark('begin: "a"'), "no start rule"),
]


@pytest.mark.parametrize(("grammar", "told"), FAULTS, ids=[told for _, told in FAULTS])
def test_a_fault_names_its_place(grammar: Grammar, told: str) -> None:
    with pytest.raises(UsageError, match=told) as caught:
        grammar.source()
    assert "\n" not in str(caught.value)


def test_a_grammar_needs_no_extra() -> None:
    """The line of the README works after `pip install .`."""
    project = tomllib.loads((Path(__file__).parents[3] / "pyproject.toml").read_text())["project"]
    assert any(requirement.startswith("llguidance") for requirement in project["dependencies"])
    assert "grammar" not in project["optional-dependencies"]


def test_a_grammar_that_no_token_can_begin() -> None:
    with pytest.raises(UsageError, match="no token"):
        compiler().start(Grammar.regex("z"))


def test_json_is_written_as_python_writes_it() -> None:
    """So that what lies between two values is forced. `x-guidance` of a schema changes it."""
    values = {"a": {"const": 1}, "b": {"const": 0}}
    schema = {"type": "object", "properties": values, "required": ["a", "b"], "additionalProperties": False}
    tight = {"whitespace_flexible": False, "item_separator": ",", "key_separator": ":"}
    for variant, expected in ((schema, '{"a": 1, "b": 0}'), ({**schema, "x-guidance": tight}, '{"a":1,"b":0}')):
        state, text = compiler().start(Grammar.json_schema(variant)), b""
        while tokens := state.following(1):
            text, state = text + LETTERS[tokens[0]], state.after(tokens[0])
        assert text.decode() == expected
        assert state.complete
        assert json.loads(expected) == {"a": 1, "b": 0}


LED = [
    *(
        "a(bb)*",
        "(ab|ba|c){0,3}",
        "[abc]*c[01]?",
        "a|",
        "a{2,4}",
        "(a|bbbb)c*",
        "(abc|a)(0|111)?",
        "[abc]+(:[abc]){0,2}",
    ),
    *("c*b", "(a|b(c|aaaaaaaa))*0", "[ac]{5}"),
]


def distances(state: GrammarState, depth: int) -> int:
    """Tokens to the nearest whole text, by trying all of up to `depth` tokens; depth + 1 where there is none."""
    if state.complete:
        return 0
    if not depth:
        return 1
    near = [distances(state.after(token), depth - 1) for token in state.following(99) or []]
    return 1 + min(near, default=depth)


@pytest.mark.parametrize("limit", [1, 3, 5])
@pytest.mark.parametrize("pattern", LED)
def test_near_the_limit_only_what_leaves_an_end_may_follow(pattern: str, limit: int) -> None:
    """Against distances from all texts: what may follow is exactly what can still be whole within the limit."""
    made, looked = compiler(), 0
    free, led = made.start(Grammar.regex(pattern)), made.start(Grammar.regex(pattern), limit)
    reachable = distances(free, limit) <= limit
    waiting = [(free, led, limit)]
    while waiting:
        free, led, left = waiting.pop()
        tokens = set(free.following(99) or [])
        if reachable and left:
            tokens = {token for token in tokens if distances(free.after(token), left - 1) <= left - 1}
            assert led.allows(0) == free.complete
        if left:
            assert set(led.following(99) or []) == tokens
            looked += 1
            waiting += [(free.after(token), led.after(token), left - 1) for token in tokens]
        else:
            assert free.complete or not reachable
    assert looked


def test_a_text_whose_end_is_out_of_reach_is_not_led() -> None:
    """Nothing within the limit is whole, so the limit cuts it, as it would without."""
    made = compiler()
    led, free = made.start(Grammar.regex("[ab]{5}"), 2), made.start(Grammar.regex("[ab]{5}"))
    assert led.following(99) == free.following(99)
    assert not led.led


def test_what_follows_does_not_depend_on_what_was_asked_before() -> None:
    """The same text reached token by token, and after everything beside it was looked at."""
    grammar = Grammar.regex("(a|bbbb)[abc]*(0|1c)")
    for limit in (4, 6, 8):
        plain, busy = compiler().start(grammar, limit), compiler().start(grammar, limit)
        while plain is not None and (tokens := plain.following(99)):
            for token in reversed(busy.following(99) or []):
                after = busy.after(token)
                assert after is not None
                after.following(99)
            assert busy.following(99) == tokens
            plain, busy = plain.after(tokens[-1]), busy.after(tokens[-1])  # type: ignore[assignment]


def test_of_many_tokens_the_likeliest_are_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dsbd_cli.engine.constraints.grammar.MOST_CHECKED", 2)
    state = compiler().start(Grammar.regex("[abc]c{0,3}0"), 3)
    assert state.mask_within_limit is None
    tokens = {text: LETTERS.index(text) for text in (b"a", b"b", b"c", b"ab")}
    logprobs = np.full(len(LETTERS), -np.inf, dtype=np.float32)
    logprobs[[tokens[b"a"], tokens[b"b"], tokens[b"c"]]] = (-3.0, -1.0, -2.0)
    fitting = {LETTERS[token] for token in np.flatnonzero(state.fitting(logprobs))}
    assert fitting >= {b"b", b"c"}
    assert state._completion is not None
    assert fitting <= {b"b", b"c", LETTERS[state._completion[0]]}
    assert not state.fitting(logprobs[:1]).any()  # of a draft that lacks the others
