"""Token rules of all rows as a constraint (see legal.py). dsbd_cli/config/token_rules.py says what each rule does.

The rules act in transformers' order, the penalty first. The exception is what is forced, which comes last here:
transformers suppresses tokens after it, and where both meet it leaves no token at all. A rule looks at the path alone,
so draft and target have the same rules.

Letters: R rows, P prompt tokens kept, L generated tokens, X = P + L, m = R * n nodes, k of them, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dsbd_cli.config.token_rules import Timestamps, TokenRules
from dsbd_cli.engine.constraints.legal import NO_TOKEN, NodePaths, joined
from dsbd_cli.engine.core.topk import NEG_INF

NO_MATCH = -2


class RuleTable:
    """Rules of every row, and the decoder's prompts where a rule looks back at them. `begin` sets those of a row."""

    def __init__(self, eos: Tensor, times: Timestamps | None = None, *, on_logits: bool = False) -> None:
        """eos: [V] bool, tokens that end. times: timestamp tokens, where the target has them. on_logits: the penalty
        acts on logits, as transformers does it with one beam; with several it acts on log-probabilities."""
        self.eos, self.times, self.on_logits = eos, times, on_logits
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
        self.penalty = torch.ones_like(zeros, dtype=torch.float32)  # [R]
        self.timed = self.eos.new_zeros(rows)  # [R], rows with timestamps
        # [R, V] each: tokens that are suppressed, always or at the beginning. Without rows until a request has some.
        self.banned, self.begin_banned = (self.eos.new_zeros(0, len(self.eos)) for _ in "ab")
        self.own_eos = self.eos.new_zeros(0, len(self.eos))  # [R, V], where some request has end tokens of its own

    def begin(
        self, row: int, rules: TokenRules, prompt: Sequence[int], max_new: int, ends: Collection[int] | None = None
    ) -> None:
        """Set the rules of a row whose request begins. prompt: tokens of the decoder's prompt. max_new: tokens that it
        generates at most. ends: its end tokens; None: the checkpoint's."""
        before, self.rules[row] = self.rules[row], rules
        if not rules.acting and not before.acting:  # else the rules of the row's last request are undone
            return
        device = self.eos.device
        self.timed[row] = rules.timestamps
        self.min_generated[row] = max(rules.min_length - len(prompt), rules.min_new_tokens)
        forced = rules.forced_bos_token_id if len(prompt) == 1 else None
        self.forced_first[row] = NO_TOKEN if forced is None else forced
        self.forced_last[row] = NO_TOKEN if rules.forced_eos_token_id is None else rules.forced_eos_token_id
        self.last_place[row] = max_new - 1
        self.ngram_size[row], self.penalty[row] = rules.no_repeat_ngram_size, rules.repetition_penalty
        if rules.no_repeat_ngram_size or rules.repetition_penalty != 1:  # these look back at the prompt
            if (more := len(prompt) - self.prompt.shape[1]) > 0:
                self.prompt = torch.nn.functional.pad(self.prompt, (0, more))
                self.version += 1
            self.prompt[row, : len(prompt)] = torch.tensor(prompt, device=device)
            self.lengths[row] = len(prompt)
        if ends is not None and not len(self.own_eos):
            self.own_eos = self.eos.repeat(len(self.rules), 1)
            self.version += 1
        if len(self.own_eos):
            self.own_eos[row] = self.eos
        if ends is not None:
            self.own_eos[row] = False
            self.own_eos[row, torch.tensor(sorted(ends), dtype=torch.int64, device=device)] = True
        suppressed = (*rules.suppress_tokens, *rules.bad_words_ids)
        at_first = rules.begin_suppress_tokens
        if (suppressed or at_first) and not len(self.banned):
            self.banned, self.begin_banned = (self.eos.new_zeros(len(self.rules), len(self.eos)) for _ in "ab")
            self.version += 1
        for table, ids in ((self.banned, suppressed), (self.begin_banned, at_first)):
            if len(table):
                table[row] = False
                table[row, torch.tensor(ids, dtype=torch.int64, device=device)] = True

    def select(self, rows: list[int]) -> None:
        """Keep only these rows, in this order."""
        self.version += 1
        self.rules = [self.rules[row] for row in rows]
        index = torch.tensor(rows, device=self.eos.device)
        for name in (
            *("prompt", "lengths", "min_generated", "forced_first", "forced_last"),
            *("last_place", "ngram_size", "penalty", "timed"),
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
        taken = [rules for start, rules in pairs if start is not None and rules.acting]
        if not taken:
            return None
        acts = _ActiveRules(
            penalty=any(rules.repetition_penalty != 1 for rules in taken),
            longest=max(rules.no_repeat_ngram_size for rules in taken),
            no_end_yet=any(max(rules.min_length, rules.min_new_tokens) > generated for rules in taken),
            first=generated == 0 and any(rules.forced_bos_token_id is not None for rules in taken),
            last=any(rules.forced_eos_token_id is not None for rules in taken),
            suppressed=any(rules.suppress_tokens or rules.bad_words_ids for rules in taken),
            begin=generated <= 1 and any(rules.begin_suppress_tokens for rules in taken),
            timed=any(rules.timestamps for rules in taken),
        )
        return _Rules(self, acts, (self.version, acts))


@dataclass(frozen=True, slots=True)
class _ActiveRules:
    """Flags of the rules that some row has. longest: the largest n of n-grams, 0 for none."""

    penalty: bool
    longest: int
    no_end_yet: bool
    first: bool
    last: bool
    suppressed: bool
    begin: bool
    timed: bool


@dataclass(frozen=True, slots=True)
class _Rules:
    """Rules of all rows in one iteration."""

    table: RuleTable
    acts: _ActiveRules
    key: Hashable
    on_host: bool = False

    def step(self, state: Tensor, tokens: Tensor) -> Tensor:
        """Return the states as they are. A rule has no states: a token that it forbids has no probability."""
        return state

    def of(self, nodes: NodePaths) -> _NodeRules:
        """Return the rules at these nodes."""
        table = self.table
        rows, count = nodes.nodes.token.shape
        generated, length = nodes.generated()
        row = torch.arange(rows, device=length.device).unsqueeze(1).expand(-1, count)
        text = None
        if self.acts.penalty or self.acts.longest:
            text = joined(table.prompt, table.lengths, generated, length).flatten(0, 1)
        time_facts = None
        if self.acts.timed and table.times is not None:
            time_facts = _time_facts(generated.flatten(0, 1), length.flatten(), table.times.first)
        return _NodeRules(table, self.acts, row.flatten(), length.flatten(), text, time_facts)


@dataclass(frozen=True, slots=True)
class _NodeRules:
    """Rules at m nodes.

    Attributes:
        row, length: [m] int64, row and number of generated tokens of each node.
        text: [m, X], the decoder's text, NO_TOKEN past its end; None where no rule looks at it.
        time_facts: [m, 3], what `_time_facts` returns; None where no rule looks at it.
    """

    table: RuleTable
    acts: _ActiveRules
    row: Tensor
    length: Tensor
    text: Tensor | None
    time_facts: Tensor | None = None

    def listed(self, part: slice) -> tuple[Tensor, Tensor] | None:
        """Return None: a rule forbids some tokens, and the others are too many to be listed."""
        return None

    def apply(self, logprobs: Tensor, part: slice, total: Tensor) -> None:
        """Apply the rules in place. logprobs: [k, V] float32 of the nodes `part`, or fewer columns. total: [k, 1], what
        was taken from the logits."""
        table, acts, row, length = self.table, self.acts, self.row[part], self.length[part]
        size = logprobs.shape[1]
        if self.text is not None:
            text = self.text[part]
            if acts.penalty:
                _penalise(logprobs, text, table.penalty[row].unsqueeze(1), total if table.on_logits else None)
            if acts.longest:
                logprobs.masked_fill_(_repeats(text, table.ngram_size[row].unsqueeze(1), acts.longest, size), NEG_INF)
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


def _penalise(logprobs: Tensor, text: Tensor, penalty: Tensor, total: Tensor | None) -> None:
    """Apply the penalty [k, 1] to all tokens in the text [k, X]: values below 0 are multiplied by it, others divided.
    The values are log-probabilities or, with `total` [k, 1] that was taken from them, logits."""
    known = torch.where((text >= 0) & (text < logprobs.shape[1]), text, text[:, :1])
    known = known.clamp(0, logprobs.shape[1] - 1)
    before = logprobs.gather(1, known)
    value = before if total is None else before + total
    value = torch.where(value < 0, value * penalty, value / penalty)
    if total is not None:  # a row without a penalty keeps its bits
        value = torch.where(penalty == 1, before, value - total)
    logprobs.scatter_(1, known, value)


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


def _time_facts(text: Tensor, length: Tensor, first: int) -> Tensor:
    """Return three facts about generated tokens [k, L], of which `length` [k] are there: [k, 3] int64. They are whether
    the last one is a time, whether the one before it is (true where there is none), and the last time, -1 without one.
    first: the first timestamp token."""
    at = torch.arange(text.shape[1], device=text.device)
    times = (text >= first) & (at < length.unsqueeze(1))
    place = torch.where(times, at, -1).amax(1, keepdim=True)
    latest = torch.where(place < 0, NO_TOKEN, text.gather(1, place.clamp(min=0))).squeeze(1)
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
