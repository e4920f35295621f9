"""Settings of one request: a frozen dataclass, validated once. Each default is written once, here."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from dsbd_cli.config.checking import check_types, refuse, require
from dsbd_cli.config.token_rules import TokenRules, asked_rules
from dsbd_cli.errors import MOST_INTEGER

MAX_TOP_LOGPROBS = 20  # as in the OpenAI API
MIN_TEMPERATURE, MAX_TEMPERATURE = 1e-38, 1e6  # below it is 0 in float32; above, all tokens are equally likely


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
        early_stopping: end as soon as num_beams hypotheses are finished.
        n_best: hypotheses reported, best first.
        token_logprobs: report the raw log-probability of every token of every reported hypothesis.
        top_logprobs: together with token_logprobs, the N likeliest tokens at every place; 0 to 20.
        source_lang, target_lang: for an encoder-decoder target that knows languages, as its tokenizer names them
            (eng_Latn, en, fr_XX). For a speech model source_lang is the language spoken, and target_lang en translates
            it.
        prefix: text that the answer begins with, for an encoder-decoder target.
        token_rules: rules of tokens, see token_rules.asked_rules: `checkpoint`, `none`, NAME=VALUE,... Default: those
            of the checkpoint for an encoder-decoder target, none for a decoder-only one.
    """

    temperature: float = 1.0
    top_k: int = 50
    top_p: float = 1.0
    min_p: float = 0.0
    max_new_tokens: int = 128
    stop: Sequence[str] = ()
    length_penalty: float = 1.0
    early_stopping: bool = False
    n_best: int = 1
    token_logprobs: bool = False
    top_logprobs: int = 0
    source_lang: str | None = None
    target_lang: str | None = None
    prefix: str | None = None
    token_rules: str | None = None

    def __post_init__(self) -> None:
        stop: object = self.stop
        if isinstance(stop, str | list):
            object.__setattr__(self, "stop", (stop,) if isinstance(stop, str) else tuple(stop))
        listed = isinstance(self.stop, tuple) and all(isinstance(one, str) and one for one in self.stop)
        require(listed, "stop", stop, "a non-empty string or a list of them")
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
        asked_rules(self.token_rules, TokenRules(), default="none")
