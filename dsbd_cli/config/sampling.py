"""Settings of one request: a frozen dataclass, validated once. Each default is written once, here."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from dsbd_cli.config.checking import check_types, refuse, require
from dsbd_cli.config.token_rules import MOST_BIAS, MOST_NGRAM, NUMBERS, TokenRules, asked_rules, named_rules
from dsbd_cli.errors import MOST_INTEGER, shorten

ReasoningMode = Literal["split", "keep", "drop"]

MAX_TOP_LOGPROBS = 20  # as in the OpenAI API
MIN_TEMPERATURE, MAX_TEMPERATURE = 1e-38, 1e6  # below it is 0 in float32; above, all tokens are equally likely
# fields that are token rules of the same name, with the values that ask for nothing
OWN_RULES: dict[str, object] = {
    **dict.fromkeys(("repetition_penalty", "no_repeat_ngram_size", "min_new_tokens", "min_length")),
    **dict.fromkeys(("presence_penalty", "frequency_penalty"), 0.0),
    **dict.fromkeys(("logit_bias", "bad_words_ids"), ()),
    "allowed_token_ids": None,
}


@dataclass(frozen=True, slots=True)
class SamplingConfig:
    """Settings that one request asks for.

    Attributes:
        temperature: divides log-probabilities. 0 is the limit: the most probable pairs are taken, without noise (rules
            `coupled` and `search` only).
        top_k: keep the k most probable pairs of the pool (or tokens of a row, see warp_scope); 0 keeps all.
        top_p: keep the smallest set of most probable pairs whose mass reaches top_p; 1 keeps all.
        min_p: drop pairs less probable than min_p times the most probable; 0 keeps all.
        max_new_tokens: generated tokens at most, the end token included.
        stop: strings that end a text; the text is cut before the string. One string, or a list of them, may be given;
            it is kept as a tuple.
        length_penalty: score = logprob / num_tokens ** length_penalty.
        early_stopping: true: end as soon as num_beams hypotheses are finished; false: end when no live beam, scored at
            its present length, is better than they are; "never": when none can become better at any length. As in
            transformers.
        n_best: hypotheses reported, best first.
        token_logprobs: report the raw log-probability of every token of every reported hypothesis.
        top_logprobs: together with token_logprobs, the N likeliest tokens at every place; 0 to 20.
        source_lang, target_lang: for an encoder-decoder target that knows languages, as its tokenizer names them
            (eng_Latn, en, fr_XX). For a speech model source_lang is the language spoken, and target_lang en translates
            it.
        prefix: text that the answer begins with.
        token_rules: rules of tokens, see token_rules.asked_rules: `checkpoint`, `none`, NAME=VALUE,... Default: those
            of the checkpoint for an encoder-decoder target, none for a decoder-only one.
        repetition_penalty, presence_penalty, frequency_penalty, logit_bias: rules of that name, see TokenRules, in
            place of those of token_rules and of the checkpoint. Their defaults leave those. logit_bias is pairs (token
            id, number); a mapping may be given.
        no_repeat_ngram_size, min_new_tokens, min_length, allowed_token_ids, bad_words_ids: the same.
        bad_words: texts that do not occur in the answer, with and without a blank before them: further bad_words_ids.
        stop_token_ids: tokens that end a text, in addition to the checkpoint's.
        eos_token_id: tokens that end a text in place of the checkpoint's; one or a list may be given.
        ignore_eos: the checkpoint's end tokens do not end a text.
        include_stop_str_in_output: the text keeps the stop string, or the stop token, that ended it.
        add_special_tokens: the tokenizer adds its special tokens to a plain prompt.
        skip_special_tokens: special tokens are left out of the text.
        truncate_prompt_tokens: keep so many of the prompt's last tokens; -1: as many as fit. None: all.
        num_beams: W of this request, at most the engine's. None: the engine's.
        reasoning: split: what a model writes between its marks of reasoning is told apart from the answer; keep: the
            text holds it, with the marks; drop: it is left out.
    """

    temperature: float = 1.0
    top_k: int = 50
    top_p: float = 1.0
    min_p: float = 0.0
    max_new_tokens: int = 128
    stop: Sequence[str] = ()
    length_penalty: float = 1.0
    early_stopping: bool | Literal["never"] = False
    n_best: int = 1
    token_logprobs: bool = False
    top_logprobs: int = 0
    source_lang: str | None = None
    target_lang: str | None = None
    prefix: str | None = None
    token_rules: str | None = None
    repetition_penalty: float | None = None
    no_repeat_ngram_size: int | None = None
    min_new_tokens: int | None = None
    min_length: int | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Sequence[tuple[int, float]] = ()
    allowed_token_ids: Sequence[int] | None = None
    bad_words: Sequence[str] = ()
    bad_words_ids: Sequence[Sequence[int]] = ()
    stop_token_ids: Sequence[int] = ()
    eos_token_id: Sequence[int] | None = None
    ignore_eos: bool = False
    include_stop_str_in_output: bool = False
    add_special_tokens: bool = True
    skip_special_tokens: bool = True
    truncate_prompt_tokens: int | None = None
    num_beams: int | None = None
    reasoning: ReasoningMode = "split"

    def __post_init__(self) -> None:
        stop: object = self.stop
        if isinstance(stop, str | list):
            object.__setattr__(self, "stop", (stop,) if isinstance(stop, str) else tuple(stop))
        listed = isinstance(self.stop, tuple) and all(isinstance(stop, str) and stop for stop in self.stop)
        require(listed, "stop", stop, "a non-empty string or a list of them")
        self._take_token_lists()
        check_types(self)
        temperature, expected = self.temperature, f"0, or from {MIN_TEMPERATURE:g} to {MAX_TEMPERATURE:.0f}"
        fits = temperature == 0 or MIN_TEMPERATURE <= temperature <= MAX_TEMPERATURE
        require(fits, "temperature", temperature, expected)
        require(self.top_k >= 0, "top_k", self.top_k, "0 (keep all) or more")
        require(0 < self.top_p <= 1, "top_p", self.top_p, "above 0 and at most 1")
        require(0 <= self.min_p <= 1, "min_p", self.min_p, "between 0 and 1")
        require(self.max_new_tokens >= 1, "max_new_tokens", self.max_new_tokens, "1 or more")
        require(-10 <= self.length_penalty <= 10, "length_penalty", self.length_penalty, "between -10 and 10")
        require(self.n_best >= 1, "n_best", self.n_best, "1 or more")
        most = MAX_TOP_LOGPROBS
        require(0 <= self.top_logprobs <= most, "top_logprobs", self.top_logprobs, f"between 0 and {most}")
        if self.top_logprobs and not self.token_logprobs:
            refuse("top_logprobs", self.top_logprobs, "token_logprobs is not asked for: ask for both")
        for name in ("source_lang", "target_lang", "prefix"):
            require(getattr(self, name) != "", name, "", "a non-empty string")
        for name in ("top_k", "max_new_tokens", "n_best"):
            require(getattr(self, name) <= MOST_INTEGER, name, getattr(self, name), f"at most {MOST_INTEGER}")
        self._check_rules()

    @property
    def own_rules(self) -> dict[str, object]:
        """Token rules that fields of their own ask for, by name."""
        values = {name: getattr(self, name) for name in OWN_RULES}
        return {name: value for name, value in values.items() if value != OWN_RULES[name]}

    def rules(self, checkpoint: TokenRules, default: str) -> TokenRules:
        """Return the token rules of the request, apart from bad_words, which are no tokens yet. checkpoint, default: of
        asked_rules."""
        rules = asked_rules(self.token_rules, checkpoint, default=default)
        own = self.own_rules
        if "min_new_tokens" in own:  # also 0 takes the place of another's min_length, as in transformers
            own.setdefault("min_length", 0)
        return replace(rules, **own) if own else rules  # type: ignore[arg-type]

    def _take_token_lists(self) -> None:
        """Store lists of tokens and words as tuples. Raises UsageError."""
        if isinstance(self.logit_bias, Mapping):
            object.__setattr__(self, "logit_bias", tuple(self.logit_bias.items()))
        eos: object = self.eos_token_id
        if type(eos) is int:
            object.__setattr__(self, "eos_token_id", (eos,))
        lists = ("logit_bias", "allowed_token_ids", "bad_words", "bad_words_ids", "stop_token_ids", "eos_token_id")
        for name in lists:
            value: object = getattr(self, name)
            if isinstance(value, list):
                inner = tuple(tuple(item) if isinstance(item, list) else item for item in value)
                object.__setattr__(self, name, inner)
        for name in ("allowed_token_ids", "stop_token_ids", "eos_token_id"):
            value = getattr(self, name)
            fits = value is None or _are_ids(value)
            require(fits, name, value, "a list of token ids")
        for name in ("allowed_token_ids", "eos_token_id"):
            require(getattr(self, name) != (), name, [], "a non-empty list of token ids, or not be given")
        if self.ignore_eos and self.eos_token_id is not None:
            refuse("ignore_eos", True, "eos_token_id says which tokens end a text: drop one of them")
        words = self.bad_words
        fits = isinstance(words, tuple) and all(isinstance(word, str) and word for word in words)
        require(fits, "bad_words", words, "a list of non-empty strings")
        sequences = self.bad_words_ids
        fits = isinstance(sequences, tuple) and all(_are_ids(ids) and ids for ids in sequences)
        require(fits, "bad_words_ids", sequences, "a list of non-empty lists of token ids")
        fits = isinstance(self.logit_bias, tuple) and all(_is_bias(pair) for pair in self.logit_bias)
        fits = fits and len({token for token, _ in self.logit_bias}) == len(self.logit_bias)
        expected = f"token ids, each once, with numbers from {-MOST_BIAS:g} to {MOST_BIAS:g}"
        require(fits, "logit_bias", self.logit_bias, expected)

    def _check_rules(self) -> None:
        """Raise UsageError for token rules that are outside their limits, or asked for twice in different ways."""
        named = named_rules(self.token_rules)
        for name, value in self.own_rules.items() if named else ():
            if named.get(name, value) != value:
                refuse(name, value, f"token_rules has {name} {shorten(named[name])}: drop one")
        least = self.min_length or named.get("min_length")
        if least and (self.min_new_tokens or named.get("min_new_tokens")):
            refuse("min_length", least, "min_new_tokens is given, which acts in its place: drop one")
        for name, (least, most) in NUMBERS.items():
            if (number := getattr(self, name)) is not None:
                require(least <= number <= most, name, number, f"from {least:g} to {most:g}")
        for name in ("no_repeat_ngram_size", "min_new_tokens", "min_length"):
            most = MOST_NGRAM if name == "no_repeat_ngram_size" else MOST_INTEGER
            if (value := getattr(self, name)) is not None:
                require(0 <= value <= most, name, value, f"from 0 to {most}")
        if (kept := self.truncate_prompt_tokens) is not None:
            fits = kept == -1 or 1 <= kept <= MOST_INTEGER
            require(fits, "truncate_prompt_tokens", kept, f"-1, or from 1 to {MOST_INTEGER}")
        if self.num_beams is not None:
            require(self.num_beams >= 1, "num_beams", self.num_beams, "1 or more")
            if self.n_best > self.num_beams:
                refuse("n_best", self.n_best, f"num_beams is {self.num_beams}: lower it, or raise that")


def _are_ids(value: object) -> bool:
    """Return whether a value is a tuple of token ids."""
    return isinstance(value, tuple) and all(type(item) is int and 0 <= item <= MOST_INTEGER for item in value)


def _is_bias(pair: object) -> bool:
    """Return whether a value is a token id with a number that may be added to its logit."""
    if not (isinstance(pair, tuple) and len(pair) == 2 and _are_ids(pair[:1])):
        return False
    return type(pair[1]) in (int, float) and -MOST_BIAS <= pair[1] <= MOST_BIAS
