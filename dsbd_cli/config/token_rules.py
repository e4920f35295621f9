"""Token rules that a checkpoint's generation settings ask for. They say which tokens may come where, and whose
log-probabilities change.

They act on log-probabilities that are normalised over the vocabulary, as transformers' beam search applies them:
nothing is normalised again. All of them depend on the preceding tokens alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace

from dsbd_cli.errors import MAX_SHOWN, MOST_INTEGER, UsageError, shorten

BASES = ("checkpoint", "none")
OFF = "none"
FLAGS = {"0": False, "1": True}
SEPARATOR, IDS = ",", "+"
MOST_NGRAM = 256  # each node looks back at the whole text once for each token of an n-gram
LEAST_PENALTY, MOST_PENALTY = 1e-30, 1e30  # products with logits stay numbers in float32


@dataclass(frozen=True, slots=True)
class TokenRules:
    """Rules under the names and with the meaning that they have in transformers' GenerationConfig. The defaults do
    nothing.

    Attributes:
        suppress_tokens: tokens that are never generated.
        begin_suppress_tokens: tokens that are never generated first.
        bad_words_ids: single tokens that are never generated either.
        min_length: no end token comes before the decoder's prompt and the answer have so many tokens together.
        min_new_tokens: no end token comes before the answer has so many tokens.
        forced_bos_token_id: the first generated token, where the decoder's prompt is one token. It counts as generated,
            and its log-probability as 0.
        forced_eos_token_id: the last token that max_new_tokens allows, with log-probability 0.
        no_repeat_ngram_size: no n-gram of this size occurs twice; 0: any may.
        repetition_penalty: log-probabilities of tokens that occur in the decoder's text are multiplied by it. With one
            beam it acts on logits, as in transformers: those below 0 are multiplied, others divided.
        timestamps: Whisper writes when words are spoken, by its rules of timestamp tokens; no checkpoint asks for it.
    """

    suppress_tokens: tuple[int, ...] = ()
    begin_suppress_tokens: tuple[int, ...] = ()
    bad_words_ids: tuple[int, ...] = ()
    min_length: int = 0
    min_new_tokens: int = 0
    forced_bos_token_id: int | None = None
    forced_eos_token_id: int | None = None
    no_repeat_ngram_size: int = 0
    repetition_penalty: float = 1.0
    timestamps: bool = False

    @property
    def acting(self) -> dict[str, object]:
        """Rules that do something, by name, as plain JSON values."""
        if self == NOTHING:  # at once, because it is asked of every row in every iteration
            return {}
        found = {name: getattr(self, name) for name in NAMES}
        return {
            name: list(value) if isinstance(value, tuple) else value
            for name, value in found.items()
            if value != getattr(NOTHING, name)
        }

    def having(self, name: str, value: object) -> TokenRules:
        """Return the same rules with another value of one rule."""
        return replace(self, **{name: value})  # type: ignore[arg-type]

    def within(self, vocab_size: int) -> TokenRules:
        """Return the rules without tokens that a vocabulary lacks."""
        if self == NOTHING:
            return self
        lists = {name: tuple(token for token in getattr(self, name) if token < vocab_size) for name in LISTS}
        forced = {name: getattr(self, name) for name in FORCED}
        known = {name: token if token is not None and token < vocab_size else None for name, token in forced.items()}
        return replace(self, **lists, **known)  # type: ignore[arg-type]


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
LISTS = ("suppress_tokens", "begin_suppress_tokens", "bad_words_ids")
FORCED = ("forced_bos_token_id", "forced_eos_token_id")


def asked_rules(text: str | None, checkpoint: TokenRules, *, default: str) -> TokenRules:
    """Return the rules that a request asks for.

    text: `checkpoint` or `none`, then NAME=VALUE for rules that differ from it, joined by commas. A value `none`
    switches a rule off; ids of a list are joined by +. checkpoint: the target's rules. default: the one of BASES that a
    text without one begins from. Raises UsageError.
    """
    items = [item.strip() for item in (text or "").split(SEPARATOR) if item.strip()]
    base = items.pop(0) if items and items[0] in BASES else default
    rules = checkpoint if base == "checkpoint" else NOTHING
    for item in items:
        name, found, value = item.partition("=")
        if name not in NAMES or not found:
            message = (
                f"token_rules has {shorten(item)}, but must be checkpoint, none, or NAME=VALUE, NAME one of "
                f"{', '.join(NAMES)}"
            )
            raise UsageError(message, field="token_rules", value=item, expected="a rule")
        rules = rules.having(name, _value(name, value))
    return rules


def written_rules(rules: Mapping[str, object]) -> str:
    """Return rules as a row writes them, {"no_repeat_ngram_size": 3, "forced_bos_token_id": null}, in the form that
    asked_rules reads. Raises UsageError."""
    words = []
    for name, value in rules.items():
        plain = isinstance(value, int | float) and (name == "timestamps" or not isinstance(value, bool))
        listed = isinstance(value, list) and all(type(item) is int for item in value)
        if value is not None and not plain and not listed:
            message = (
                f"token_rules.{name[:MAX_SHOWN]} is {shorten(value)}, but must be a number, a list of token ids or null"
            )
            raise UsageError(message, field="token_rules", value=value, expected="a number, a list or null")
        shown = IDS.join(map(str, value)) if isinstance(value, list) else value
        shown = int(shown) if isinstance(shown, bool) else shown
        words.append(f"{name}={OFF if shown is None or shown == '' else shown}")
    text = SEPARATOR.join(words)
    asked_rules(text, TokenRules(), default="none")
    return text


def _value(name: str, text: str) -> object:
    """Return the value of a rule that a text stands for. Raises UsageError."""
    default = getattr(TokenRules(), name)
    if text == OFF:
        return default
    try:
        if name in LISTS:
            ids = tuple(int(part) for part in text.split(IDS))
            if min(ids) >= 0:
                return ids
        elif name == "timestamps":
            if text in FLAGS:
                return FLAGS[text]
        elif name == "repetition_penalty":
            number = float(text)
            if LEAST_PENALTY <= number <= MOST_PENALTY:
                return number
        elif 0 <= int(text) <= (MOST_NGRAM if name == "no_repeat_ngram_size" else MOST_INTEGER):
            return int(text)
    except ValueError:
        pass
    expected = {
        **dict.fromkeys(LISTS, "token ids joined by +"),
        "repetition_penalty": f"a number from {LEAST_PENALTY:g} to {MOST_PENALTY:g}",
        "timestamps": "0 or 1",
        "no_repeat_ngram_size": f"an integer from 0 to {MOST_NGRAM}",
    }
    wanted = f"{expected.get(name, f'an integer from 0 to {MOST_INTEGER}')}, or none"
    message = f"token_rules: {name} is {shorten(text)}, but must be {wanted}"
    raise UsageError(message, field="token_rules", value=text, expected=wanted)
