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
    found, text = [value + (total or 0.0) for value in logprobs], [*prompt, *generated]
    for token, number in rules.logit_bias:
        found[token] += number
    for token in set(text):
        value, penalty = found[token], rules.repetition_penalty
        found[token] = value * penalty if value < 0 else value / penalty
    for token in set(generated):
        found[token] -= rules.frequency_penalty * generated.count(token)
        found[token] -= rules.presence_penalty
    if total is not None:
        sum_ = math.log(math.fsum(map(math.exp, found))) if rules.change_values else total
        found = [value - sum_ for value in found]
    size = rules.no_repeat_ngram_size
    for start in range(len(text) - size + 1) if size else ():
        gram = text[start : start + size]
        if gram[:-1] == text[len(text) - size + 1 :]:
            found[gram[-1]] = NEG_INF
    for *before, last in rules.bad_words_ids:
        if text[len(text) - len(before) :] == before:
            found[last] = NEG_INF
    for token in range(len(found)):
        if rules.allowed_token_ids and token not in rules.allowed_token_ids:
            found[token] = NEG_INF
    if len(generated) < rules.min_new_tokens or (not rules.min_new_tokens and len(text) < rules.min_length):
        for token in ends:
            found[token] = NEG_INF
    for token in rules.suppress_tokens:
        found[token] = NEG_INF
    begin = 1 if len(prompt) == 1 and rules.forced_bos_token_id is not None else 0
    if len(generated) == begin:
        for token in rules.begin_suppress_tokens:
            found[token] = NEG_INF
    if rules.timestamps and times is not None:
        _time(found, generated, times)
    for forced, here in (
        (rules.forced_bos_token_id, len(text) == 1),
        (rules.forced_eos_token_id, len(generated) == new - 1),
    ):
        if forced is not None and here:
            found = [0.0 if token == forced else NEG_INF for token in range(len(found))]
    mass = math.fsum(map(math.exp, found))
    return [value - math.log(mass) for value in found] if rules.renormalize_logits and mass else found


def _time(found: list[float], generated: Sequence[int], times: Timestamps) -> None:
    """OpenAI's rules, in the order of transformers' processor. found: by token, changed in place."""
    first, size = times.first, len(found)
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
        found[token] = NEG_INF
    together = sum(math.exp(value) for value in found[first:])
    if together > 0 and math.log(together) > max(found[:first]):
        found[:first] = [NEG_INF] * first
