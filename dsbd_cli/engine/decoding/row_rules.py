"""Token rules of a request, from its settings and its target's checkpoint, with all checks of whether they can act."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from dsbd_cli.config.sampling import SamplingConfig
from dsbd_cli.config.token_rules import MOST_NGRAM, TokenRules, named_rules
from dsbd_cli.engine.protocols import ForestModel, TextCodec
from dsbd_cli.errors import InvalidRowError, shorten

MOST_WORD_TOKENS = 1 << 18  # that the table of a row's bad words may have


class RowRules:
    """Maker of the rules of requests to one target."""

    def __init__(self, target: ForestModel, codec: TextCodec) -> None:
        self._target, self._codec, self._vocab_size = target, codec, target.vocab_size

    def of(self, sampling: SamplingConfig, base: str, prompt: Sequence[int], forced: int | None = None) -> TokenRules:
        """Return the token rules of a request. base: the rules to start from, `checkpoint` or `none`. prompt: of the
        decoder. forced: first token in place of theirs. Raises InvalidRowError."""
        rules = sampling.rules(getattr(self._target, "token_rules", None) or TokenRules(), base)
        if base == "none" and rules.forced_bos_token_id is not None and len(prompt) > 1:
            raise InvalidRowError(
                f"token_rules: forced_bos_token_id is {rules.forced_bos_token_id}, but the target has no encoder, so "
                "that its prompt decides how an answer begins: drop it"
            )
        if forced is not None:
            rules = rules.having("forced_bos_token_id", forced)
        if not rules.act and not sampling.bad_words:
            return rules
        if rules.timestamps and getattr(self._codec, "timestamps", None) is None:
            raise InvalidRowError("token_rules: timestamps is 1, but the target has no tokens of times: drop it")
        # a checkpoint may name tokens that its head lacks, and end tokens as bad words; a request may not
        named, words = named_rules(sampling.token_rules), rules.bad_words_ids
        for name in {**named, **sampling.own_rules}:
            self._check_ids(f"token_rules: {name}" if name in named else name, rules.tokens(name))
        if "bad_words_ids" not in named and not sampling.bad_words_ids:
            words = tuple(word for word in words if not self._ends(word))
        rules = rules.having("bad_words_ids", words).within(self._vocab_size)
        words = tuple(dict.fromkeys((*rules.bad_words_ids, *self._encoded(sampling.bad_words))))
        self._check_words(words, "bad_words" if sampling.bad_words else "bad_words_ids")
        return rules.having("bad_words_ids", words)

    def _encoded(self, words: Sequence[str]) -> list[tuple[int, ...]]:
        """Return the token ids of bad words, with and without a blank before them. Raises InvalidRowError."""
        if blank := next((word for word in words if not word.strip()), None):
            raise InvalidRowError(f"bad_words has {shorten(blank)}, but a word must have more than blanks")
        texts = [text for word in words for text in (word.lstrip(), f" {word.lstrip()}")]
        encoded = [tuple(ids) for ids in self._codec.encode_pieces(texts)] if texts else []
        self._check_ids("bad_words", [token for ids in encoded for token in ids])
        return [ids for ids in encoded if ids]

    def _check_ids(self, name: str, ids: Iterable[int]) -> None:
        """Raise InvalidRowError for ids that the target does not have. name: of the rule that they belong to."""
        if (largest := max(ids, default=0)) >= self._vocab_size:
            raise InvalidRowError(f"{name} has token id {largest}, but the target has {self._vocab_size} ids")

    def _ends(self, word: Sequence[int]) -> bool:
        """Return whether a bad word is an end token alone, which transformers leaves out."""
        return len(word) == 1 and word[0] in self._codec.eos_ids

    def _check_words(self, words: Sequence[Sequence[int]], name: str) -> None:
        """Raise InvalidRowError for bad words that are none, or too many. name: of the field."""
        if any(map(self._ends, words)):
            raise InvalidRowError(f"{name} has an end token alone, which is no word: name it in suppress_tokens")
        longest = max(map(len, words), default=0)
        if longest > MOST_NGRAM:
            raise InvalidRowError(f"{name} has a word of {longest} tokens, but a word may have {MOST_NGRAM}")
        if (size := longest * sum(len(word) > 1 for word in words)) > MOST_WORD_TOKENS:
            raise InvalidRowError(
                f"{name} has {len(words)} words of up to {longest} tokens: all as long as the longest, they have "
                f"{size} tokens, but {MOST_WORD_TOKENS} is the most"
            )
