"""Recurrent layers over a packed forest: tensor functions of one layer, no model and no cache.

A recurrent layer carries a state from token to token. In a forest each node has a state of its own, so a state per node
would be as many states as nodes. Instead one state per row is kept, S at the end of the common prefix, together with
the inputs of the suffix's tokens: a node reads S through the decay of its path and its ancestors one by one, as
attention does. With log-decays g_a, c_t their sum over the suffix's part of t's path (t included), and s over t and its
ancestors:

    y_t = exp(c_t) q_t S + sum_s exp(c_t - c_s) (q_t . k_s) u_s
    Mamba-2, linear attention:  u_t is the layer's input (dt x, or v)
    gated delta rule:           u_t = beta_t (v_t - exp(c_t) k_t S - sum_{s != t} exp(c_t - c_s) (k_t . k_s) u_s)
    fold:                       S <- exp(c_F) S + sum_s exp(c_F - c_s) k_s u_s^T   over the slots that joined the common
    prefix

u_t depends on t's path alone, so it is computed once and kept. Among the nodes of one forward the delta rule is
(I + A) u = r with A strictly lower triangular (`solve`).

Letters: R rows, n nodes, T places of the suffix, G key heads, H value heads (a multiple of G), N key dim, P value dim,
E = H / G * P, C channels, J taps of a convolution, I channels of a Mamba-1 layer. A state is [R, G, N, E]: the value
heads of a key head lie side by side and share a product. Sums are in the dtype of the state; c is float64.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

PART = 64  # tokens of a chain that are read against each other; the state carries over to the next part
SELECTIVE_PART = 16  # places of a Mamba-1 layer that are folded at once, each with a factor per channel and state
BLOCK = 1 << 22  # numbers of a product over nodes, places and channels that are held at once


def convolve(taps: Sequence[Tensor], weight: Tensor, bias: Tensor | None) -> Tensor:
    """Return each node's causal convolution [R, n, C], in float32 at least. taps: J times [R, n, C], inputs of its last
    J ancestors, the oldest first and its own last. weight: [C, J]. bias: [C] or None.

    Taps are added one after another, each product and each sum rounded by itself. So the bits of a number do not depend
    on its place in the tensor.
    """
    dtype = torch.promote_types(taps[0].dtype, torch.float32)
    kernel = weight.to(dtype).t().contiguous()
    total = taps[0].to(dtype) * kernel[0]
    for tap, values in enumerate(taps[1:], 1):
        total += values.to(dtype) * kernel[tap]
    return total if bias is None else total.add_(bias.to(dtype))


def weights(
    queries: Sequence[Tensor], k: Tensor, c_q: Tensor, c_k: Tensor, seen: Tensor, dtype: torch.dtype
) -> list[Tensor]:
    """Return exp(c_t - c_s) (q_t . k_s) where t sees s, else 0, for each q of the queries: [R, H, n, T].

    q: [R, n, G, N]. k: [R, T, G, N]. c_q, c_k: [R, n, H] and [R, T, H], or with a dim N where each key channel has a
    decay of its own (then G = H). seen: [R, n, T] bool. Sums of log-decays only fall along a path, so c_t is larger
    than c_s only where t does not see s.
    """
    k = k.to(dtype).transpose(1, 2)
    wanted = [q.to(dtype).transpose(1, 2) for q in queries]
    unseen = ~seen.unsqueeze(1)
    c_q, c_k = c_q.transpose(1, 2).contiguous(), c_k.transpose(1, 2).contiguous()  # [R, H, n(, N)]
    if c_q.dim() == 3:
        decay = (c_q.unsqueeze(3) - c_k.unsqueeze(2)).clamp_(max=0).to(dtype).exp_()
        decay = _grouped(decay, k.shape[1])  # [R, G, H / G, n, T]
        scores = [(q @ k.transpose(2, 3)).masked_fill_(unseen, 0).unsqueeze(2) for q in wanted]
        more = [(decay * score).flatten(1, 2) for score in scores[1:]]
        return [decay.mul_(scores[0]).flatten(1, 2), *more]
    rows, heads, count, dim = c_q.shape
    step = max(1, BLOCK // (rows * count * c_k.shape[2] * dim))
    listed: list[list[Tensor]] = [[] for _ in wanted]
    for first in range(0, heads, step):
        part = slice(first, first + step)
        decay = (c_q[:, part].unsqueeze(3) - c_k[:, part].unsqueeze(2)).clamp_(max=0).to(dtype).exp_()
        decay *= k[:, part].unsqueeze(2)  # [R, h, n, T, N]
        for q, parts in zip(wanted, listed, strict=True):
            parts.append((decay @ q[:, part].unsqueeze(4)).squeeze(4).masked_fill_(unseen, 0))
    return [torch.cat(parts, 1) for parts in listed]


def carried(q: Tensor, c: Tensor, state: Tensor) -> Tensor:
    """Return exp(c_t) q_t S [R, n, H, P], which the nodes read from the common prefix's state. q [R, n, G, N], c [R, n,
    H] or [R, n, H, N], state [R, G, N, E]."""
    q, decay = q.to(state.dtype), c.to(state.dtype).exp()
    if c.dim() == 4:
        return ((q * decay).transpose(1, 2) @ state).transpose(1, 2)
    y = q.transpose(1, 2) @ state  # [R, G, n, E]: one product for all heads of a group
    groups = state.shape[1]
    rows, count, heads = c.shape
    y = y.transpose(1, 2).view(rows, count, groups, heads // groups, -1)
    return y.mul_(decay.view(rows, count, groups, -1, 1)).flatten(2, 3)


def solve(a: Tensor, r: Tensor) -> Tensor:
    """Return (I + a)^-1 r for strictly lower triangular a [R, H, n, n], r [R, H, n, P], by forward substitution.

    The inverse is also a finite product of powers of a, which needs no solver. But these grow and cancel each other:
    where keys are alike, no digit of the sum is right.
    """
    return torch.linalg.solve_triangular(a, r, upper=False, unitriangular=True)


def fold(state: Tensor, k: Tensor, u: Tensor, c: Tensor, count: Tensor) -> Tensor:
    """Advance the state [R, G, N, E] over the first `count` [R] places, which follow one another, in place; return it.

    k: [R, T, G, N]. u: [R, T, H, P]. c: [R, T, H] or [R, T, H, N], sums of log-decays from the state on.
    """
    dtype = state.dtype
    rows, groups, dim, width = state.shape
    outside = torch.arange(c.shape[1], device=c.device) >= count.unsqueeze(1)
    end = last_sums(c, count)
    left = (end.unsqueeze(1) - c).masked_fill_(outside.view(*outside.shape, *[1] * (c.dim() - 2)), float("-inf"))
    left, kept = left.to(dtype).exp_(), end.to(dtype).exp()  # [R, T, H(, N)], [R, H(, N)]
    if c.dim() == 4:
        k, u = k * left, u.to(dtype)
        state *= kept.unsqueeze(3)
    else:
        k, u = k.to(dtype), u * left.unsqueeze(3)
        state.view(rows, groups, dim, -1, u.shape[3]).mul_(kept.view(rows, groups, 1, -1, 1))
    keys, inputs = k.permute(0, 2, 3, 1).flatten(0, 1), u.reshape(rows, -1, groups, width).transpose(1, 2).flatten(0, 1)
    state.view(-1, dim, width).baddbmm_(keys, inputs)
    return state


def last_sums(c: Tensor, count: Tensor) -> Tensor:
    """Return the sums of log-decays [R, T, H(, N)] at the last of the first `count` [R] places, 0 where there is
    none."""
    index = (count - 1).clamp(min=0).view(-1, *[1] * (c.dim() - 1)).expand(-1, 1, *c.shape[2:])
    return c.gather(1, index).squeeze(1) * (count > 0).view(-1, *[1] * (c.dim() - 2))


def chain(q: Tensor, k: Tensor, u: Tensor, g: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """Run tokens that follow one another, from a state on. Return y [R, n, H, P] and the state after the last token.

    Shapes as in `weights`; u [R, n, H, P], g [R, n, H] or [R, n, H, N]. Padding at the end has u = g = 0.
    """
    outs, state = [], state.clone()
    for first in range(0, g.shape[1], PART):
        part = slice(first, first + PART)
        c = g[:, part].to(torch.float64).cumsum(1)
        (weight,) = weights((q[:, part],), k[:, part], c, c, _causal(c), state.dtype)
        y = (weight @ u[:, part].to(state.dtype).transpose(1, 2)).transpose(1, 2)
        outs.append(y + carried(q[:, part], c, state))
        state = fold(state, k[:, part], u[:, part], c, _all(c))
    return torch.cat(outs, 1), state


def delta_chain(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """Run `chain` by the gated delta rule: v [R, n, H, P], beta [R, n, H]. Padding has beta = g = 0."""
    outs, state = [], state.clone()
    for first in range(0, g.shape[1], PART):
        part = slice(first, first + PART)
        keys, c = k[:, part], g[:, part].to(torch.float64).cumsum(1)
        alike, weight = weights((keys, q[:, part]), keys, c, c, _causal(c), state.dtype)
        scale = beta[:, part].to(state.dtype).unsqueeze(3)
        r = (v[:, part].to(state.dtype) - carried(keys, c, state)) * scale
        u = solve(alike.tril(-1) * scale.transpose(1, 2), r.transpose(1, 2))
        outs.append((weight @ u).transpose(1, 2) + carried(q[:, part], c, state))
        state = fold(state, keys, u.transpose(1, 2), c, _all(c))
    return torch.cat(outs, 1), state


def _all(c: Tensor) -> Tensor:
    """Return for each row the number of places of c [R, T, ...]: [R] int64."""
    return torch.full((c.shape[0],), c.shape[1], device=c.device)


def _grouped(values: Tensor, groups: int) -> Tensor:
    """Reshape [R, H, ...] to [R, G, H / G, ...]."""
    return values.reshape(values.shape[0], groups, -1, *values.shape[2:])


def _causal(c: Tensor) -> Tensor:
    """Return which tokens each token sees, [R, n, n] bool: those before it and itself."""
    rows, count = c.shape[:2]
    return torch.ones(count, count, dtype=torch.bool, device=c.device).tril().expand(rows, -1, -1)


def selective_read(
    dt: Tensor, u: Tensor, b: Tensor, a: Tensor, parent: Tensor, order: Tensor, state: Tensor, at: Tensor, out: Tensor
) -> Tensor:
    """Run a Mamba-1 layer over the suffix. Return the sum over N of h times `out` at the nodes: [R, n, I].

    Its decays differ by channel and state and so do not factor: h_t = exp(dt_t a) h_parent + u_t b_t is computed place
    by place.

    dt, u: [R, T, I]. b: [R, T, N]. a: [I, N]. parent: [R, T] int64, place of each place's parent; T for the common
    prefix's state [R, I, N]. order: [R, m] int64, places with parents first, all that a node sees. at: [R, n] places of
    the nodes, T where a node is absent. out: [R, n, N].
    """
    rows, places, _ = dt.shape
    index = torch.arange(rows, device=dt.device)
    states = state.new_zeros(places + 1, *state.shape)  # [T + 1, R, I, N]
    states[places] = state
    a = a.to(state.dtype)
    dt, u, b = (_ordered(part, order).to(state.dtype) for part in (dt, u, b))
    before = parent.gather(1, order)
    for step in range(order.shape[1]):
        held = states[before[:, step], index]
        states[order[:, step], index] = _selective_step(held, dt[:, step], u[:, step], b[:, step], a)
    read = states[at, index.unsqueeze(1)]  # [R, n, I, N]
    return (read @ out.to(state.dtype).unsqueeze(3)).squeeze(3)


def selective_fold(state: Tensor, dt: Tensor, u: Tensor, b: Tensor, a: Tensor, count: Tensor) -> Tensor:
    """Return the state [R, I, N] after the first `count` [R] places, which follow one another."""
    inside = (torch.arange(dt.shape[1], device=dt.device) < count.unsqueeze(1)).unsqueeze(2)
    dt, u = (torch.where(inside, part.to(state.dtype), 0.0) for part in (dt, u))
    b, a = b.to(state.dtype), a.to(state.dtype)
    for first in range(0, dt.shape[1], SELECTIVE_PART):
        part = slice(first, first + SELECTIVE_PART)
        c = dt[:, part].to(torch.float64).cumsum(1)
        later = (c[:, -1:] - c).to(state.dtype).unsqueeze(3)  # [R, t, I, 1]
        added = (later * a).exp_() * (u[:, part].unsqueeze(3) * b[:, part].unsqueeze(2))
        state = (c[:, -1].to(state.dtype).unsqueeze(2) * a).exp_() * state + added.sum(1)
    return state


def selective_chain(dt: Tensor, u: Tensor, b: Tensor, a: Tensor, state: Tensor, out: Tensor) -> tuple[Tensor, Tensor]:
    """Run tokens that follow one another. Return y [R, n, I] and the state after the last. Padding at the end has dt =
    u = 0."""
    dt, u, b, a, out = (part.to(state.dtype) for part in (dt, u, b, a, out))
    read = []
    for step in range(dt.shape[1]):
        state = _selective_step(state, dt[:, step], u[:, step], b[:, step], a)
        read.append((state @ out[:, step].unsqueeze(2)).squeeze(2))
    return torch.stack(read, 1), state


def _selective_step(state: Tensor, dt: Tensor, u: Tensor, b: Tensor, a: Tensor) -> Tensor:
    """Return the next state [R, I, N] from state [R, I, N], dt and u [R, I], b [R, N] and a [I, N]."""
    return (dt.unsqueeze(2) * a).exp_().mul_(state).addcmul_(u.unsqueeze(2), b.unsqueeze(1))


def _ordered(states: Tensor, order: Tensor) -> Tensor:
    """Return the places [R, m] of states [R, T, I]: [R, m, I]."""
    return states.gather(1, order.unsqueeze(2).expand(-1, -1, states.shape[2]))
