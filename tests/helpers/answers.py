"""Answers as training reads them."""

from __future__ import annotations

from dsbd_cli.train.target_answers import AnswerTokens


def chain(prompt: tuple[int, ...], tokens: tuple[int, ...]) -> AnswerTokens:
    """One answer, in which each token follows the one before."""
    return AnswerTokens(prompt, tokens, tuple(range(-1, len(tokens) - 1)))
