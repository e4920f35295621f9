"""Token rules of all rows as a constraint (see legal.py). dsbd_cli/config/token_rules.py says what each rule does.

The rules act in the order of transformers and vLLM, biases and penalties first. The exception is what is forced, which
comes last here: transformers suppresses tokens after it, and where both meet it leaves no token at all. A rule looks at
the path alone, so draft and target have the same rules.

Letters: R rows, P prompt tokens kept, L generated tokens, X = P + L, m = R * n nodes, k of them, V vocabulary, B biases
of a row, Q bad words of a row, T tokens of a bad word.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dsbd_cli.config.token_rules import Timestamps, TokenRules
from dsbd_cli.engine.constraints.legal import NO_TOKEN, NodePaths, joined
from dsbd_cli.engine.core.distribution import log_normalise
from dsbd_cli.engine.core.topk import NEG_INF

NO_MATCH, ANY_TOKEN = -2, -3


class RuleTable:
    """Rules of every row, and the decoder's prompts where a rule looks back at them. `begin` sets those of a row."""

    def __init__(self, eos: Tensor, times: Timestamps | None = None) -> None:
        """eos: [V] bool, tokens that end. times: timestamp tokens, where the target has them."""
        self.eos, self.times = eos, times
        self.version = 0  # changes whenever a tensor is replaced
        self.allocate(0)

    def allocate(self, rows: int) -> None:
        """Begin a batch of `rows` rows without rules."""
        self.version += 1
        self.rules = [TokenRules()] * rows
        zeros = torch.zeros(rows, dtype=torch.int64, device=self.eos.device)
        self.prompt, self.lengths = zeros.unsqueeze(1).clone(), zeros.clone()  # [R, P] and [R]
        # [R] each: fewest tokens before an end, place of the last token, n of n-grams
        self.min_generated, self.last_place, self.ngram_size = zeros.clone(), zeros.clone(), zeros.clone()
        self.forced_first, self.forced_last = zeros + NO_TOKEN, zeros + NO_TOKEN  # [R] each
        # [R] each: of repetition, presence and frequency
        self.penalty, self.presence, self.frequency = (zeros.to(torch.float32) + value for value in (1, 0, 0))
        self.on_logits, self.normalised = self.eos.new_zeros(rows), self.eos.new_zeros(rows)  # [R] each
        self.last_normalised, self.timed = self.eos.new_zeros(rows), self.eos.new_zeros(rows)  # [R] each
        # [R, V] each: tokens that are suppressed, always or at the beginning. Without rows until a request has some.
        self.banned = self.eos.new_zeros(0, len(self.eos))
        self.begin_banned = self.banned.clone()
        self.own_eos = self.eos.new_zeros(0, len(self.eos))  # [R, V], where some request has end tokens of its own
        self.biased, self.bias = zeros.new_zeros(rows, 0), self.penalty.new_zeros(rows, 0)  # [R, B] tokens and numbers
        self.words = zeros.new_zeros(rows, 0, 0)  # [R, Q, T], see `_aligned`

    def begin(
        self,
        row: int,
        rules: TokenRules,
        prompt: Sequence[int],
        max_new: int,
        ends: Collection[int] | None = None,
        *,
        on_logits: bool = False,
    ) -> None:
        """Set the rules of a row whose request begins. prompt: tokens of the decoder's prompt. max_new: tokens that it
        generates at most. ends: its end tokens; None: the checkpoint's. on_logits: biases and penalties act on logits,
        as those of vLLM, and of transformers with one beam; with several beams they act on log-probabilities."""
        before, self.rules[row] = self.rules[row], rules
        if not rules.act and not before.act:  # else the rules of the row's last request are undone
            return
        device = self.eos.device
        self.last_normalised[row], self.timed[row] = rules.renormalize_logits, rules.timestamps
        self.min_generated[row] = rules.min_new_tokens or rules.min_length - len(prompt)
        forced = rules.forced_bos_token_id if len(prompt) == 1 else None
        self.forced_first[row] = NO_TOKEN if forced is None else forced
        self.forced_last[row] = NO_TOKEN if rules.forced_eos_token_id is None else rules.forced_eos_token_id
        self.last_place[row] = max_new - 1
        self.ngram_size[row], self.penalty[row] = rules.no_repeat_ngram_size, rules.repetition_penalty
        self.presence[row], self.frequency[row] = rules.presence_penalty, rules.frequency_penalty
        self.on_logits[row], self.normalised[row] = on_logits, on_logits and rules.change_values
        words = [word for word in rules.bad_words_ids if len(word) > 1]
        if rules.no_repeat_ngram_size or rules.repetition_penalty != 1 or words:  # these look back at the prompt
            self._widen("prompt", len(prompt))
            self.prompt[row, : len(prompt)] = torch.tensor(prompt, device=device)
            self.lengths[row] = len(prompt)
        ends = ends if rules.min_length or rules.min_new_tokens else None  # no other rule looks at them
        if ends is not None and not len(self.own_eos):
            self.own_eos = self.eos.repeat(len(self.rules), 1)
            self.version += 1
        if len(self.own_eos):
            self.own_eos[row] = self.eos
        if ends is not None:
            self.own_eos[row] = False
            self.own_eos[row, torch.tensor(sorted(ends), dtype=torch.int64, device=device)] = True
        self._widen("words", len(words), max(map(len, words), default=0))
        self.words[row] = _aligned(words, *self.words.shape[1:]).to(device)
        count = len(rules.logit_bias)
        self._widen("biased", count)
        self._widen("bias", count)
        self.bias[row] = 0
        self.biased[row, :count] = torch.tensor([token for token, _ in rules.logit_bias], dtype=torch.int64)
        self.bias[row, :count] = torch.tensor([number for _, number in rules.logit_bias], dtype=torch.float32)
        self._ban(row, rules)

    def _ban(self, row: int, rules: TokenRules) -> None:
        """Set the tokens that are suppressed in a row."""
        suppressed = [*rules.suppress_tokens, *(word[0] for word in rules.bad_words_ids if len(word) == 1)]
        at_first, allowed = rules.begin_suppress_tokens, rules.allowed_token_ids
        if (suppressed or at_first or allowed) and not len(self.banned):
            self.banned = self.eos.new_zeros(len(self.rules), len(self.eos))
            self.begin_banned = self.banned.clone()
            self.version += 1
        if len(self.banned):
            self.banned[row], self.begin_banned[row] = bool(allowed), False
            for table, ids, value in (
                (self.banned, allowed, False),
                (self.banned, suppressed, True),
                (self.begin_banned, at_first, True),
            ):
                table[row, torch.tensor(ids, dtype=torch.int64, device=self.eos.device)] = value

    def _widen(self, name: str, *sizes: int) -> None:
        """Make the dimensions of a tensor after the first at least as large as these. New entries of all rows have no
        meaning but in `words`, where they are no word."""
        table: Tensor = getattr(self, name)
        more = [max(0, size - have) for size, have in zip(sizes, table.shape[1:], strict=True)]
        if not any(more):
            return
        self.version += 1
        if name == "words":
            kept = torch.nn.functional.pad(table, (more[1], 0), value=ANY_TOKEN)  # the last token stays the last
            setattr(self, name, torch.nn.functional.pad(kept, (0, 0, 0, more[0]), value=NO_TOKEN))
        else:
            setattr(self, name, torch.nn.functional.pad(table, (0, more[0])))

    def select(self, rows: list[int]) -> None:
        """Keep only these rows, in this order."""
        self.version += 1
        self.rules = [self.rules[row] for row in rows]
        index = torch.tensor(rows, device=self.eos.device)
        for name in (
            *("prompt", "lengths", "min_generated", "forced_first", "forced_last", "last_place", "ngram_size"),
            *("penalty", "presence", "frequency", "on_logits", "normalised", "last_normalised", "timed"),
            *("biased", "bias", "words"),
        ):
            setattr(self, name, getattr(self, name)[index])
        if len(self.banned):
            self.banned, self.begin_banned = self.banned[index], self.begin_banned[index]
        if len(self.own_eos):
            self.own_eos = self.own_eos[index]

    def acting(self, starts: Sequence[int | None], generated: int) -> _Rules | None:
        """Return the rules for one iteration; None where no running row has any. generated: tokens that every running
        row has at least."""
        pairs = zip(starts, self.rules, strict=True)
        taken = [rules for start, rules in pairs if start is not None and rules.act]
        if not taken:
            return None
        acts = _ActiveRules(
            biased=any(rules.logit_bias for rules in taken),
            penalty=any(rules.repetition_penalty != 1 for rules in taken),
            counted=any(rules.presence_penalty or rules.frequency_penalty for rules in taken),
            normalised=any(rules.change_values for rules in taken),
            words=self.words.shape[2] > 0 and any(rules.bad_words_ids for rules in taken),
            longest=max(rules.no_repeat_ngram_size for rules in taken),
            no_end_yet=any(max(rules.min_length, rules.min_new_tokens) > generated for rules in taken),
            first=generated == 0 and any(rules.forced_bos_token_id is not None for rules in taken),
            last=any(rules.forced_eos_token_id is not None for rules in taken),
            suppressed=len(self.banned) > 0
            and any(rules.suppress_tokens or rules.bad_words_ids or rules.allowed_token_ids for rules in taken),
            begin=generated <= 1 and any(rules.begin_suppress_tokens for rules in taken),
            timed=any(rules.timestamps for rules in taken),
            last_normalised=any(rules.renormalize_logits for rules in taken),
        )
        return _Rules(self, acts, (self.version, acts))


@dataclass(frozen=True, slots=True)
class _ActiveRules:
    """Flags of the rules that some row has. longest: the largest n of n-grams, 0 for none. counted: presence or
    frequency. normalised: a row may be normalised after its values have changed. words: bad words of several tokens.
    last_normalised: a row is normalised after all rules."""

    biased: bool
    penalty: bool
    counted: bool
    normalised: bool
    words: bool
    longest: int
    no_end_yet: bool
    first: bool
    last: bool
    suppressed: bool
    begin: bool
    timed: bool
    last_normalised: bool


@dataclass(frozen=True, slots=True)
class _Rules:
    """Rules of all rows in one iteration."""

    table: RuleTable
    acts: _ActiveRules
    key: Hashable
    on_host: bool = False
    changes: bool = True

    def step(self, state: Tensor, tokens: Tensor) -> Tensor:
        """Return the states as they are. A rule has no states: a token that it forbids has no probability."""
        return state

    def of(self, nodes: NodePaths) -> _NodeRules:
        """Return the rules at these nodes."""
        table = self.table
        rows, count = nodes.nodes.token.shape
        generated, length = nodes.generated()
        row = torch.arange(rows, device=length.device).unsqueeze(1).expand(-1, count)
        text = counted = time_facts = None
        if self.acts.penalty or self.acts.longest or self.acts.words:
            text = joined(table.prompt, table.lengths, generated, length).flatten(0, 1)
        if self.acts.counted:
            past = torch.arange(generated.shape[2], device=length.device) >= length.unsqueeze(2)
            counted = generated.masked_fill(past, NO_TOKEN).flatten(0, 1)
        if self.acts.timed and table.times is not None:
            time_facts = _time_facts(generated.flatten(0, 1), length.flatten(), table.times.first)
        return _NodeRules(table, self.acts, row.flatten(), length.flatten(), text, counted, time_facts)


@dataclass(frozen=True, slots=True)
class _NodeRules:
    """Rules at m nodes.

    Attributes:
        row, length: [m] int64, row and number of generated tokens of each node.
        text: [m, X], the decoder's text, NO_TOKEN past its end; None where no rule looks at it.
        counted: [m, L], the generated tokens, in the same way.
        time_facts: [m, 3], what `_time_facts` returns; None where no rule looks at it.
    """

    table: RuleTable
    acts: _ActiveRules
    row: Tensor
    length: Tensor
    text: Tensor | None
    counted: Tensor | None
    time_facts: Tensor | None

    def listed(self, part: slice) -> tuple[Tensor, Tensor] | None:
        """Return None: a rule forbids some tokens, and the others are too many to be listed."""
        return None

    def apply(self, logprobs: Tensor, part: slice, total: Tensor) -> None:
        """Apply the rules in place. logprobs: [k, V] float32 of the nodes `part`, or fewer columns. total: [k, 1], what
        was taken from the logits."""
        table, acts, row, length = self.table, self.acts, self.row[part], self.length[part]
        size, text = logprobs.shape[1], None if self.text is None else self.text[part]
        self._change_values(logprobs, part, total)
        if text is not None and acts.longest:
            logprobs.masked_fill_(_repeats(text, table.ngram_size[row].unsqueeze(1), acts.longest, size), NEG_INF)
        if text is not None and acts.words:
            logprobs.masked_fill_(_completions(text, table.words, row, size), NEG_INF)
        if acts.no_end_yet:
            no_end_yet = (length < table.min_generated[row]).unsqueeze(1)
            eos = table.own_eos[row] if len(table.own_eos) else table.eos
            logprobs.masked_fill_(no_end_yet & _columns(eos, size), NEG_INF)
        if acts.suppressed:
            logprobs.masked_fill_(_columns(table.banned, size)[row], NEG_INF)
        if acts.begin:
            # after a forced first token the rule is about the second one
            at = torch.where(table.forced_first[row] >= 0, 1, 0)
            begins = (length == at).unsqueeze(1)
            logprobs.masked_fill_(begins & _columns(table.begin_banned, size)[row], NEG_INF)
        if self.time_facts is not None and table.times is not None:
            _restrict_times(logprobs, table.times, table.timed[row].unsqueeze(1), length, self.time_facts[part])
        if acts.first:
            _force(logprobs, torch.where(length == 0, table.forced_first[row], NO_TOKEN))
        if acts.last:
            _force(logprobs, torch.where(length == table.last_place[row], table.forced_last[row], NO_TOKEN))
        if acts.last_normalised:
            _normalise(logprobs, table.last_normalised[row])

    def _change_values(self, logprobs: Tensor, part: slice, total: Tensor) -> None:
        """Apply biases and penalties in place. Rows where they act on logits are then normalised again."""
        table, acts, row = self.table, self.acts, self.row[part]
        if acts.biased:
            _add(logprobs, table.biased[row], table.bias[row])
        if acts.penalty and self.text is not None:
            shift = torch.where(table.on_logits[row].unsqueeze(1), total, 0.0)
            _penalise(logprobs, self.text[part], table.penalty[row].unsqueeze(1), shift)
        if self.counted is not None:
            presence, frequency = table.presence[row].unsqueeze(1), table.frequency[row].unsqueeze(1)
            _subtract(logprobs, self.counted[part], presence, frequency)
        if acts.normalised:
            _normalise(logprobs, table.normalised[row])


def _aligned(words: Sequence[Sequence[int]], count: int, size: int) -> Tensor:
    """Return bad words as [Q, T] int64: each with ANY_TOKEN before it, then words that end with NO_TOKEN, which is
    never completed. count, size: Q and T."""
    rows = [[ANY_TOKEN] * (size - len(word)) + list(word) for word in words]
    nothing = [ANY_TOKEN] * (size - 1) + [NO_TOKEN] if size else []
    rows += [nothing] * (count - len(words))
    return torch.tensor(rows, dtype=torch.int64).view(count, size)


def _columns(mask: Tensor, size: int) -> Tensor:
    """Return a mask [..., V] with `size` columns, cut or padded."""
    more = size - mask.shape[-1]
    return mask[..., :size] if more <= 0 else torch.nn.functional.pad(mask, (0, more))


def _force(logprobs: Tensor, token: Tensor) -> None:
    """Set the log-probability of the token [k] int64 to 0 and all others to -inf, in rows where it is not NO_TOKEN. A
    draft may lack the token."""
    forced = (token >= 0).unsqueeze(1)
    logprobs.masked_fill_(forced, NEG_INF)
    here = forced & (torch.arange(logprobs.shape[1], device=token.device) == token.unsqueeze(1))
    logprobs.masked_fill_(here, 0.0)


def _normalise(logprobs: Tensor, which: Tensor) -> None:
    """Normalise the rows where `which` [k] is true, in place."""
    logprobs.copy_(torch.where(which.unsqueeze(1), log_normalise(logprobs), logprobs))


def _add(logprobs: Tensor, token: Tensor, number: Tensor) -> None:
    """Add numbers [k, B] to tokens [k, B] in place. A token occurs once with a number other than 0. Tokens that a draft
    lacks are left out."""
    in_vocabulary = (token >= 0) & (token < logprobs.shape[1])
    logprobs.scatter_add_(1, torch.where(in_vocabulary, token, 0), torch.where(in_vocabulary, number, 0.0))


def _penalise(logprobs: Tensor, text: Tensor, penalty: Tensor, shift: Tensor) -> None:
    """Apply the penalty [k, 1] to all tokens in the text [k, X]: values below 0 are multiplied by it, others divided.
    shift: [k, 1], what makes values of log-probabilities: 0, or what was taken from the logits."""
    tokens = torch.where((text >= 0) & (text < logprobs.shape[1]), text, text[:, :1])
    tokens = tokens.clamp(0, logprobs.shape[1] - 1)
    before = logprobs.gather(1, tokens)
    value = before + shift
    value = torch.where(value < 0, value * penalty, value / penalty)
    # a row without a penalty keeps its bits
    logprobs.scatter_(1, tokens, torch.where(penalty == 1, before, value - shift))


def _subtract(logprobs: Tensor, counted: Tensor, presence: Tensor, frequency: Tensor) -> None:
    """Subtract presence [k, 1], and frequency [k, 1] once for each time, from all tokens in `counted` [k, L]."""
    token = counted.sort(1).values
    first = torch.searchsorted(token, token)
    times = torch.searchsorted(token, token, right=True) - first
    once = first == torch.arange(token.shape[1], device=token.device)
    _add(logprobs, token, torch.where(once, -(frequency * times + presence), 0.0))


def _repeats(text: Tensor, size: Tensor, longest: int, columns: int) -> Tensor:
    """Return the tokens that would end an n-gram which is in the text [k, X] already: [k, V] bool. size: [k, 1], n, 0
    where n-grams may repeat. longest: the largest n. columns: V."""
    real = text >= 0
    total = real.sum(1, keepdim=True)
    run = torch.zeros_like(text)  # how many tokens before each place equal the last ones of the text
    alive = real
    width = text.shape[1]
    for back in range(1, min(longest, width + 1)):
        last = text.gather(1, (total - back).clamp(min=0))
        before = torch.nn.functional.pad(text, (back, 0), value=NO_MATCH)[:, :width]
        alive = alive & (before == last) & (total >= back)
        run = run + alive
    banned = real & (size > 0) & (run >= size - 1) & (text < columns)
    marks = torch.zeros(len(text), columns + 1, dtype=torch.bool, device=text.device)
    return marks.scatter_(1, torch.where(banned, text, columns), True)[:, :columns]


def _completions(text: Tensor, words: Tensor, row: Tensor, columns: int) -> Tensor:
    """Return the tokens that would complete a bad word at the end of the text [k, X]: [k, V] bool. words: [R, Q, T] of
    all rows, see `_aligned`. row: [k]. columns: V."""
    total = (text >= 0).sum(1, keepdim=True)
    token = words[:, :, -1][row]
    banned = (token >= 0) & (token < columns)
    for back in range(1, words.shape[2]):
        wanted, last = words[:, :, -1 - back][row], text.gather(1, (total - back).clamp(min=0))
        banned = banned & ((wanted == ANY_TOKEN) | ((wanted == last) & (total >= back)))
    marks = torch.zeros(len(text), columns + 1, dtype=torch.bool, device=text.device)
    return marks.scatter_(1, torch.where(banned, token, columns), True)[:, :columns]


def _time_facts(text: Tensor, length: Tensor, first: int) -> Tensor:
    """Return three facts about generated tokens [k, L], of which `length` [k] are there: [k, 3] int64. They are whether
    the last one is a time, whether the one before it is (true where there is none), and the last time, -1 without one.
    first: the first timestamp token."""
    at = torch.arange(text.shape[1], device=text.device)
    times = (text >= first) & (at < length.unsqueeze(1))
    position = torch.where(times, at, -1).amax(1, keepdim=True)
    latest = torch.where(position < 0, NO_TOKEN, text.gather(1, position.clamp(min=0))).squeeze(1)
    ends = torch.stack((length - 1, length - 2), 1)
    last, before = times.gather(1, ends.clamp(min=0)).unbind(1)
    return torch.stack((last & (length > 0), before | (length < 2), latest), 1)


def _restrict_times(logprobs: Tensor, times: Timestamps, timed: Tensor, length: Tensor, time_facts: Tensor) -> None:
    """Apply transformers' WhisperTimeStampLogitsProcessor in rows where `timed` [k, 1] is true. Times come in pairs and
    never go back, and an answer begins with one. Where all of them together are likelier than any other token, one of
    them follows.

    logprobs [k, V]; length [k] generated tokens; time_facts: see _time_facts.
    """
    token = torch.arange(logprobs.shape[1], device=logprobs.device)
    time = token >= times.first
    last, before, latest = time_facts.unsqueeze(2).unbind(1)  # [k, 1] each
    opened, closed = (last == 1) & (before == 1), (last == 1) & (before == 0)
    banned = (token == times.first - 1) | (opened & time) | (closed & (token < times.end))
    banned = banned | (time & (token < torch.where(closed, latest, latest + 1)))
    late = token < times.first if times.latest is None else ~time | (token > times.first + times.latest)
    banned = banned | ((length == 0).unsqueeze(1) & late)
    logprobs.masked_fill_(timed & banned, NEG_INF)
    share = logprobs[:, times.first :].to(torch.float64).logsumexp(1, keepdim=True)
    text = logprobs[:, : times.first]
    text.masked_fill_(timed & (share > text.amax(1, keepdim=True)), NEG_INF)
