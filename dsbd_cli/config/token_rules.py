"""Token rules: which tokens may come where, and whose log-probabilities change. A request asks for them, or the
checkpoint's generation settings do.

With several beams they act on log-probabilities that are normalised over the vocabulary, as transformers' beam search
applies them, and nothing is normalised again. With one beam, penalties and biases act on logits. All rules depend on
the preceding tokens alone.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, fields, replace

from dsbd_cli.errors import MAX_SHOWN, MOST_INTEGER, UsageError, shorten

BASES = ("checkpoint", "none")
OFF = "none"
FLAG_VALUES = {"0": False, "1": True}
SEPARATOR, IDS, WORD, BIAS = ",", "+", "-", ":"  # between rules, ids or words, ids of a word, an id and its bias
MOST_NGRAM = 256  # each node looks back at the whole text once for each token of an n-gram, or of a bad word
LEAST_PENALTY, MOST_PENALTY = 1e-30, 1e30  # products with logits stay numbers in float32
MOST_SUBTRACTED = 2.0  # of presence_penalty and frequency_penalty, as in the OpenAI API
MOST_BIAS = 100.0  # of logit_bias, as in the OpenAI API


@dataclass(frozen=True, slots=True)
class TokenRules:
    """Rules under the names and with the meaning that they have in transformers' GenerationConfig, or else in vLLM's
    SamplingParams. The defaults do nothing.

    Attributes:
        suppress_tokens: tokens that are never generated.
        begin_suppress_tokens: tokens that are never generated first.
        bad_words_ids: sequences of tokens whose last token does not come where it would complete them. The decoder's
            prompt counts as text before it.
        allowed_token_ids: the only tokens that are generated, end tokens among them only where they are listed. Empty:
            all.
        min_length: no end token comes before the decoder's prompt and the answer have so many tokens together.
        min_new_tokens: no end token comes before the answer has so many tokens. It acts in place of min_length.
        forced_bos_token_id: the first generated token, where the decoder's prompt is one token. It counts as generated,
            and its log-probability as 0.
        forced_eos_token_id: the last token that max_new_tokens allows, with log-probability 0.
        no_repeat_ngram_size: no n-gram of this size occurs twice; 0: any may.
        logit_bias: numbers that are added to tokens, as (token id, number).
        repetition_penalty: values of tokens that occur in the decoder's text are multiplied by it if they are below 0,
            else divided. The values are log-probabilities, with one beam logits.
        presence_penalty: is subtracted from tokens that were generated before; the prompt does not count.
        frequency_penalty: the same, once for each time that a token was generated.
        renormalize_logits: log-probabilities are normalised again after all other rules.
        timestamps: Whisper writes when words are spoken, by its rules of timestamp tokens; no checkpoint asks for it.
    """

    suppress_tokens: tuple[int, ...] = ()
    begin_suppress_tokens: tuple[int, ...] = ()
    bad_words_ids: tuple[tuple[int, ...], ...] = ()
    allowed_token_ids: tuple[int, ...] = ()
    min_length: int = 0
    min_new_tokens: int = 0
    forced_bos_token_id: int | None = None
    forced_eos_token_id: int | None = None
    no_repeat_ngram_size: int = 0
    logit_bias: tuple[tuple[int, float], ...] = ()
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    renormalize_logits: bool = False
    timestamps: bool = False

    @property
    def act(self) -> bool:
        """True where some rule does something."""
        return self != NOTHING

    @property
    def acting(self) -> dict[str, object]:
        """Rules that do something, by name, as plain JSON values."""
        if not self.act:
            return {}
        values = {name: getattr(self, name) for name in NAMES}
        return {name: _plain(name, value) for name, value in values.items() if value != getattr(NOTHING, name)}

    @property
    def change_values(self) -> bool:
        """True where log-probabilities of possible tokens change: by a bias or a penalty."""
        subtracted = self.presence_penalty, self.frequency_penalty
        return bool(self.logit_bias) or self.repetition_penalty != 1 or subtracted != (0, 0)

    def having(self, name: str, value: object) -> TokenRules:
        """Return the same rules with another value of one rule."""
        return replace(self, **{name: value})  # type: ignore[arg-type]

    def tokens(self, name: str) -> tuple[int, ...]:
        """Return the token ids that a rule names."""
        if name in LISTS:
            return tuple(getattr(self, name))
        if name in FORCED:
            forced = getattr(self, name)
            return () if forced is None else (forced,)
        if name == "logit_bias":
            return tuple(token for token, _ in self.logit_bias)
        return tuple(token for word in self.bad_words_ids for token in word) if name == "bad_words_ids" else ()

    def within(self, vocab_size: int) -> TokenRules:
        """Return the rules without tokens that a vocabulary lacks."""
        if not self.act:
            return self
        lists = {name: tuple(token for token in getattr(self, name) if token < vocab_size) for name in LISTS}
        forced = {name: getattr(self, name) for name in FORCED}
        in_vocabulary = {
            name: token if token is not None and token < vocab_size else None for name, token in forced.items()
        }
        words = tuple(word for word in self.bad_words_ids if max(word) < vocab_size)
        bias = tuple(pair for pair in self.logit_bias if pair[0] < vocab_size)
        return replace(self, **lists, **in_vocabulary, bad_words_ids=words, logit_bias=bias)  # type: ignore[arg-type]


@dataclass(frozen=True, slots=True)
class Timestamps:
    """Timestamp tokens of a speech model.

    Attributes:
        first: token of 0 seconds; each one after it is `seconds` later. The token before it says that there are no
            timestamps.
        latest: how many steps of `seconds` the first time of an answer may be at most; None: any.
        end: the end token; tokens of text are below it.
    """

    first: int
    seconds: float
    latest: int | None
    end: int


NOTHING = TokenRules()
NAMES = tuple(item.name for item in fields(TokenRules))
LISTS = ("suppress_tokens", "begin_suppress_tokens", "allowed_token_ids")
FORCED = ("forced_bos_token_id", "forced_eos_token_id")
FLAGS = ("renormalize_logits", "timestamps")
LEAST = frozenset(("min_length", "min_new_tokens"))
NUMBERS = {  # the least and the largest value
    "repetition_penalty": (LEAST_PENALTY, MOST_PENALTY),
    "presence_penalty": (-MOST_SUBTRACTED, MOST_SUBTRACTED),
    "frequency_penalty": (-MOST_SUBTRACTED, MOST_SUBTRACTED),
}
# rules that transformers' GenerationConfig does not have
OF_REQUESTS = ("allowed_token_ids", "logit_bias", "presence_penalty", "frequency_penalty", "timestamps")


def asked_rules(text: str | None, checkpoint: TokenRules, *, default: str) -> TokenRules:
    """Return the rules that a request asks for.

    text: `checkpoint` or `none`, then NAME=VALUE for rules that differ from it, joined by commas. A value `none`
    switches a rule off; ids of a list are joined by +, and so are bad words, whose ids are joined by -, and biases,
    which are ID:NUMBER. checkpoint: the target's rules. default: the one of BASES that a text without one begins from.
    Raises UsageError.
    """
    base, values = _parts(text)
    rules = checkpoint if (base or default) == "checkpoint" else NOTHING
    for name, value in values.items():
        rules = rules.having(name, value)
    return rules


def without_rules(text: str | None, names: Collection[str]) -> str | None:
    """Return a text that asked_rules reads, without what it says of these rules, and of those that act in place of
    them."""
    dropped = {*names, *(() if LEAST.isdisjoint(names) else LEAST)}
    items = [item for item in (text or "").split(SEPARATOR) if item.partition("=")[0].strip() not in dropped]
    return SEPARATOR.join(items) or None


def named_rules(text: str | None) -> dict[str, object]:
    """Return the values of the rules that a text names, by name. Raises UsageError."""
    return _parts(text)[1]


def _parts(text: str | None) -> tuple[str | None, dict[str, object]]:
    """Return the one of BASES that a text begins with, None without one, and the values of the rules that it names.
    Raises UsageError."""
    items = [item.strip() for item in (text or "").split(SEPARATOR) if item.strip()]
    base = items.pop(0) if items and items[0] in BASES else None
    values = {}
    for item in items:
        name, sign, value = item.partition("=")
        if name not in NAMES or not sign:
            message = (
                f"token_rules has {shorten(item)}, but must be checkpoint, none, or NAME=VALUE, NAME one of "
                f"{', '.join(NAMES)}"
            )
            raise UsageError(message, field="token_rules", value=item, expected="a rule")
        values[name] = _value(name, value)
    return base, values


def written_rules(rules: Mapping[str, object]) -> str:
    """Return rules as a row writes them, {"no_repeat_ngram_size": 3, "forced_bos_token_id": null}, in the form that
    asked_rules reads. Raises UsageError."""
    words = []
    for name, value in rules.items():
        written = _written(name, value)
        if written is None:
            expected = "a number, a list of token ids, for bad_words_ids a list of lists, for logit_bias an object"
            message = f"token_rules.{name[:MAX_SHOWN]} is {shorten(value)}, but must be {expected}, or null"
            raise UsageError(message, field="token_rules", value=value, expected="a number, a list or null")
        words.append(f"{name}={written or OFF}")
    text = SEPARATOR.join(words)
    asked_rules(text, TokenRules(), default="none")
    return text


def _written(name: str, value: object) -> str | None:
    """Return a rule's value as text, an empty one for a rule that is switched off; None for what is no value."""
    if value is None:
        return ""
    if isinstance(value, int | float) and (name in FLAGS or not isinstance(value, bool)):
        return str(int(value) if isinstance(value, bool) else value)
    if name == "logit_bias" and isinstance(value, Mapping):
        return IDS.join(f"{token}{BIAS}{number}" for token, number in value.items())
    if not isinstance(value, list):
        return None
    words = [item if isinstance(item, list) and name == "bad_words_ids" else [item] for item in value]
    if not all(word and all(type(token) is int for token in word) for word in words):
        return None
    return IDS.join(WORD.join(map(str, word)) for word in words)


def _plain(name: str, value: object) -> object:
    """Return a rule's value as JSON has it, in the form that a row writes."""
    if name == "logit_bias":
        assert isinstance(value, tuple)
        return {str(token): number for token, number in value}
    return [_plain("", item) for item in value] if isinstance(value, tuple) else value


def _value(name: str, text: str) -> object:
    """Return the value of a rule that a text stands for. Raises UsageError."""
    if text == OFF:
        return getattr(NOTHING, name)
    try:
        if name in LISTS:
            return _ids(text.split(IDS))
        if name == "bad_words_ids":
            return tuple(_ids(word.split(WORD)) for word in text.split(IDS))
        if name == "logit_bias":
            return _biases([pair.split(BIAS) for pair in text.split(IDS)])
        if name in NUMBERS:
            return _number(text, *NUMBERS[name])
        if name in FLAGS:
            return FLAG_VALUES[text]
        return int(_number(text, 0, _most(name), kind=int))
    except (ValueError, KeyError):
        pass
    expected = {
        **dict.fromkeys(LISTS, "token ids joined by +"),
        **{rule: f"a number from {least:g} to {most:g}" for rule, (least, most) in NUMBERS.items()},
        "bad_words_ids": "words joined by +, the token ids of a word joined by -",
        "logit_bias": f"ID:NUMBER joined by +, each ID once, numbers from {-MOST_BIAS:g} to {MOST_BIAS:g}",
        **dict.fromkeys(FLAGS, "0 or 1"),
    }
    wanted = f"{expected.get(name, f'an integer from 0 to {_most(name)}')}, or none"
    message = f"token_rules: {name} is {shorten(text)}, but must be {wanted}"
    raise UsageError(message, field="token_rules", value=text, expected=wanted)


def _most(name: str) -> int:
    """Return the largest value of a rule that is an integer."""
    return MOST_NGRAM if name == "no_repeat_ngram_size" else MOST_INTEGER


def _ids(words: Sequence[str]) -> tuple[int, ...]:
    """Return token ids. Raises ValueError."""
    return tuple(int(_number(word, 0, MOST_INTEGER, kind=int)) for word in words)


def _biases(pairs: Sequence[Sequence[str]]) -> tuple[tuple[int, float], ...]:
    """Return token ids with numbers, each id once. Raises ValueError."""
    biases = {_ids([token])[0]: _number(number, -MOST_BIAS, MOST_BIAS) for token, number in pairs}
    if len(biases) < len(pairs):
        raise ValueError(pairs)
    return tuple(biases.items())


def _number(text: str, least: float, most: float, kind: type[int] | type[float] = float) -> float:
    """Return a number between two others. Raises ValueError."""
    number = kind(text)
    if not least <= number <= most:
        raise ValueError(text)
    return number
