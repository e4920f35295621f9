"""Kernels of the suffix index in numba: insertion of tokens, and look-up of what followed the last tokens of a text.

A *position* is the number of tokens that were inserted before, modulo 2^31. Position p lies at p mod N of the ring
`tokens` [N], N a power of two. For each length of LENGTHS the positions behind equal contexts of that length are a
chain: `heads` holds the last one, `before` the one before each, both plus 1, and 0 ends a chain.
"""

from __future__ import annotations

import math

import numpy as np
from numba import njit, types

from dsbd_cli.ops.cpu.kernels.compiler import KernelCompiler
from dsbd_cli.ops.cpu.suffix import DECAY, HITS, LENGTHS, MOST_MATCH, NO_TOKEN, POSITIONS, SKIPPED

compiled = KernelCompiler("look-ups", seconds=4)

_I1, _I2, _I3 = types.int32[::1], types.int32[:, ::1], types.int32[:, :, ::1]
_F1, _F2 = types.float32[::1], types.float32[:, ::1]
_LENGTHS = np.array(LENGTHS)
_LAST = POSITIONS - 1
_TURN, _MIX = np.uint64(29), np.uint64(0x9E3779B97F4A7C15)


@njit(error_model="numpy")
def _mixed(state, token):
    state = (state + types.uint64(token) + types.uint64(1)) * _MIX
    return state ^ (state >> _TURN)


@njit(error_model="numpy")
def _hash(tokens, end, length, last):
    """Return the place in `heads` of the `length` tokens before `end`. last: N - 1."""
    state = types.uint64(length)
    for back in range(1, length + 1):
        state = _mixed(state, tokens[(end - back) & last])
    return types.int64((state >> types.uint64(16)) & types.uint64(last))


@compiled(types.int64(_I1, _I2, _I2, types.int64, _I1))
def insert(tokens, before, heads, end, document):
    """Insert a document, and NO_TOKEN behind it. end: position behind the last token. Return the new one."""
    last, run = len(tokens) - 1, 0
    for at in range(len(document) + 1):
        token = document[at] if at < len(document) else NO_TOKEN
        tokens[end & last] = token
        if token == NO_TOKEN:
            run = 0
        else:
            for level in range(len(_LENGTHS)):
                if run >= _LENGTHS[level]:
                    head = _hash(tokens, end, _LENGTHS[level], last)
                    before[level, end & last] = heads[level, head]
                    heads[level, head] = end + 1
            run += 1
        end = (end + 1) & _LAST
    return end


@njit(error_model="numpy")
def _path(tokens, start, most, paths, count):
    """Write the `most` tokens from a position on, or those before NO_TOKEN, as path `count`. Return the number of the
    first equal path, -1 where there is no token."""
    last, depth = len(tokens) - 1, paths.shape[1]
    paths[count] = NO_TOKEN
    for step in range(most):
        token = tokens[(start + step) & last]
        if token == NO_TOKEN:
            break
        paths[count, step] = token
    if paths[count, 0] == NO_TOKEN:
        return -1
    for other in range(count):
        same = True
        for step in range(depth):
            if paths[other, step] != paths[count, step]:
                same = False
                break
        if same:
            return other
    return count


@compiled(types.void(_I1, _I2, _I2, types.int64, _I2, types.int64, _I3, _F2, _F1))
def look_up(tokens, before, heads, end, texts, longest, paths, weight, match):
    """Write what followed earlier positions whose context is like the end of each text.

    end: position behind the last token. texts: [B, X], last tokens of each text, NO_TOKEN before the first. longest:
    most tokens that are compared. paths: [B, S, D], distinct continuations, NO_TOKEN behind their end. weight: [B, S],
    of each, 0 where there is none. match: [B], tokens of the best context, 0 where there is none.

    The context is the longest of LENGTHS that occurs; its last HITS positions count. It may end up to SKIPPED tokens
    before the end of the text, where these differ.
    """
    last, width = len(tokens) - 1, texts.shape[1]
    room, depth = paths.shape[1], paths.shape[2]
    inverse = 1 / math.log(DECAY)
    for b in range(len(texts)):
        count, match[b] = 0, 0
        weight[b] = 0
        paths[b] = NO_TOKEN
        for skipped in range(SKIPPED + 1):
            behind = width - skipped  # place of the text behind the context
            for level in range(len(_LENGTHS)):
                length = _LENGTHS[level]
                if length > longest or behind < length or texts[b, behind - length] == NO_TOKEN:
                    continue
                state = types.uint64(length)
                for back in range(1, length + 1):
                    state = _mixed(state, texts[b, behind - back])
                position = heads[level, types.int64((state >> types.uint64(16)) & types.uint64(last))] - 1
                hits, steps, younger = 0, 0, 0
                while position >= 0 and steps < HITS:
                    steps += 1
                    age = (end - position) & _LAST
                    if age <= younger or age + length > len(tokens):
                        break  # it was overwritten
                    younger, equal = age, 0
                    while equal < longest and age + equal < len(tokens) and equal < behind:
                        token = tokens[(position - 1 - equal) & last]
                        if token == NO_TOKEN or token != texts[b, behind - 1 - equal]:
                            break
                        equal += 1
                    start = position
                    position = before[level, position & last] - 1
                    if equal < length:
                        continue  # another context of the same hash
                    score, real = DECAY**skipped * (1 - DECAY**equal) / (1 - DECAY), age > skipped
                    for step in range(skipped):
                        token = tokens[(start + step) & last]
                        if token == NO_TOKEN or (step == 0 and token == texts[b, behind]):
                            real = False  # a document ends here, or a longer context was found already
                        elif token == texts[b, behind + step]:
                            score += DECAY ** (skipped - 1 - step)
                    if not real:
                        continue
                    hits += 1
                    alike = min(types.float64(MOST_MATCH), math.log(1 - score * (1 - DECAY)) * inverse)
                    most = min(depth, age - skipped)
                    place = _path(tokens, start + skipped, most, paths[b], count)
                    if place < 0:
                        continue
                    if place == count:
                        if count == room - 1:  # the last one only served to compare
                            paths[b, count] = NO_TOKEN
                            continue
                        count += 1
                    weight[b, place] += types.float32(2**alike)
                    match[b] = max(match[b], types.float32(alike))
                if hits:
                    break
        paths[b, count:] = NO_TOKEN


@compiled(types.void(_I2, _I1, _I1, _I3, _F2, _F1))
def look_back(texts, lengths, scores, paths, weight, match):
    """Write what followed in each text itself behind places whose last tokens are most like its end.

    texts: [B, X], the last lengths [B] tokens of each line. scores: [n], of an equal last token and of those before it.
    paths, weight, match: as for `look_up`, but paths may be equal. A path that reaches the end goes on from its own
    beginning, because the text has repeated itself so far. Of equal places the later one comes first.
    """
    room, depth = paths.shape[1], paths.shape[2]
    best, starts = np.empty(room, np.int64), np.empty(room, np.int64)
    inverse = 1 / math.log(DECAY)
    for b in range(len(texts)):
        length, held = lengths[b], 0
        text = texts[b, texts.shape[1] - length :]
        for start in range(length - 1, 0, -1):
            score = 0
            for back in range(1, min(len(scores), start) + 1):
                if text[start - back] == text[length - back]:
                    score += scores[back - 1]
            if score == 0 or (held == room and score <= best[room - 1]):
                continue
            place = min(held, room - 1)
            while place > 0 and best[place - 1] < score:
                best[place], starts[place] = best[place - 1], starts[place - 1]
                place -= 1
            best[place], starts[place] = score, start
            held = min(held + 1, room)
        match[b] = 0
        weight[b] = 0
        paths[b] = NO_TOKEN
        for place in range(held):
            rest = 1 - types.float64(best[place]) / scores[0] * (1 - DECAY)
            alike = min(types.float64(MOST_MATCH), math.log(max(rest, DECAY**MOST_MATCH)) * inverse)
            weight[b, place] = types.float32(2**alike)
            match[b] = max(match[b], types.float32(alike))
            period = length - starts[place]
            for step in range(depth):
                paths[b, place, step] = text[starts[place] + step % period]


@compiled(types.void(_I2, _F1, types.float32, types.float32, _I1, _F2))
def foresee(tokens, weight, doubt, decay, counts, chances):
    """Write the chance that the next tokens of a text are drafted: chances [C, D], down to each depth, if a layer has
    the best counts [C] nodes of the tree that the streams make.

    tokens: [p, D], streams, NO_TOKEN behind their end. weight: [p], 0 where there is none. A token has the share of the
    streams that guess it, times 1 - doubt. With each token that a path agrees in, doubt is multiplied by decay.
    """
    streams, depth = tokens.shape
    most = 0
    for count in counts:
        most = max(most, count)
    led, led_below = np.empty((most, streams), np.bool_), np.empty((most, streams), np.bool_)  # of the tree's nodes
    sure, sure_below = np.empty(most, np.float32), np.empty(most, np.float32)
    guess, share = np.empty(most * streams, np.int64), np.empty(most * streams, np.float32)
    parent = np.empty(most * streams, np.int64)
    for c in range(len(counts)):
        chances[c] = 0
        nodes, trust, sure[0] = 1, 1 - doubt, 1
        for p in range(streams):
            led[0, p] = weight[p] > 0
        for layer in range(depth):
            pairs = 0
            for node in range(nodes):
                begin, total = pairs, types.float32(0)
                for p in range(streams):
                    token = tokens[p, layer]
                    if not led[node, p] or token == NO_TOKEN:
                        continue
                    total += weight[p]
                    pair = begin
                    while pair < pairs and guess[pair] != token:
                        pair += 1
                    if pair == pairs:
                        guess[pair], share[pair], parent[pair] = token, 0, node
                        pairs += 1
                    share[pair] += weight[p]
                for pair in range(begin, pairs):
                    share[pair] *= sure[node] * trust / total
            below, chance = 0, types.float32(0)
            while below < counts[c] and below < pairs:
                best = 0
                for pair in range(1, pairs):
                    if share[pair] > share[best]:
                        best = pair
                if share[best] <= 0:
                    break
                for p in range(streams):
                    led_below[below, p] = led[parent[best], p] and tokens[p, layer] == guess[best]
                sure_below[below] = share[best]
                chance += share[best]
                share[best] = 0
                below += 1
            chances[c, layer] = chance
            if below == 0:
                break
            led, led_below, sure, sure_below, nodes = led_below, led, sure_below, sure, below
            trust = 1 - (1 - trust) * decay
