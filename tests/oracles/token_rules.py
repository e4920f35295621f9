"""Token rules again, over Python floats: log-probabilities of the tokens that may follow one text, after transformers'
processors in their order (bias, repetition penalty, n-grams, bad words, early end, suppressed, times), what is forced
last. After the repetition penalty come vLLM's frequency and presence penalties.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from dsbd_cli.config.token_rules import Timestamps, TokenRules

NEG_INF = float("-inf")


def ruled(
    logprobs: Sequence[float],
    rules: TokenRules,
    prompt: Sequence[int],
    generated: Sequence[int],
    ends: set[int],
    new: int,
    times: Timestamps | None = None,
    total: float | None = None,
) -> list[float]:
    """logprobs: by token, before the rules. prompt: of the decoder; generated: tokens behind it. new: most tokens.
    total: what was taken from the logits, where biases and penalties act on them; None: on log-probabilities."""
    ruled_logprobs, text = [value + (total or 0.0) for value in logprobs], [*prompt, *generated]
    for token, number in rules.logit_bias:
        ruled_logprobs[token] += number
    for token in set(text):
        value, penalty = ruled_logprobs[token], rules.repetition_penalty
        ruled_logprobs[token] = value * penalty if value < 0 else value / penalty
    for token in set(generated):
        ruled_logprobs[token] -= rules.frequency_penalty * generated.count(token)
        ruled_logprobs[token] -= rules.presence_penalty
    if total is not None:
        sum_ = math.log(math.fsum(map(math.exp, ruled_logprobs))) if rules.change_values else total
        ruled_logprobs = [value - sum_ for value in ruled_logprobs]
    size = rules.no_repeat_ngram_size
    for start in range(len(text) - size + 1) if size else ():
        gram = text[start : start + size]
        if gram[:-1] == text[len(text) - size + 1 :]:
            ruled_logprobs[gram[-1]] = NEG_INF
    for *before, last in rules.bad_words_ids:
        if text[len(text) - len(before) :] == before:
            ruled_logprobs[last] = NEG_INF
    for token in range(len(ruled_logprobs)):
        if rules.allowed_token_ids and token not in rules.allowed_token_ids:
            ruled_logprobs[token] = NEG_INF
    if len(generated) < rules.min_new_tokens or (not rules.min_new_tokens and len(text) < rules.min_length):
        for token in ends:
            ruled_logprobs[token] = NEG_INF
    for token in rules.suppress_tokens:
        ruled_logprobs[token] = NEG_INF
    begin = 1 if len(prompt) == 1 and rules.forced_bos_token_id is not None else 0
    if len(generated) == begin:
        for token in rules.begin_suppress_tokens:
            ruled_logprobs[token] = NEG_INF
    if rules.timestamps and times is not None:
        _time(ruled_logprobs, generated, times)
    for forced, here in (
        (rules.forced_bos_token_id, len(text) == 1),
        (rules.forced_eos_token_id, len(generated) == new - 1),
    ):
        if forced is not None and here:
            ruled_logprobs = [0.0 if token == forced else NEG_INF for token in range(len(ruled_logprobs))]
    mass = math.fsum(map(math.exp, ruled_logprobs))
    return [value - math.log(mass) for value in ruled_logprobs] if rules.renormalize_logits and mass else ruled_logprobs


def _time(ruled_logprobs: list[float], generated: Sequence[int], times: Timestamps) -> None:
    """OpenAI's rules, in the order of transformers' processor. found: by token, changed in place."""
    first, size = times.first, len(ruled_logprobs)
    banned = {first - 1}
    last = bool(generated) and generated[-1] >= first
    before = len(generated) < 2 or generated[-2] >= first
    if last:
        banned |= set(range(first, size)) if before else set(range(times.end))
    told = [token for token in generated if token >= first]
    if told:
        banned |= set(range(first, told[-1] + (0 if last and not before else 1)))
    if not generated:
        banned |= set(range(first))
        banned |= set() if times.latest is None else set(range(first + times.latest + 1, size))
    for token in banned:
        ruled_logprobs[token] = NEG_INF
    together = sum(math.exp(value) for value in ruled_logprobs[first:])
    if together > 0 and math.log(together) > max(ruled_logprobs[:first]):
        ruled_logprobs[:first] = [NEG_INF] * first
