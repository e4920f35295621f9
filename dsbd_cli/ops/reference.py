"""Operations in plain torch. They are the specification: kernels are compared with them, and they serve wherever no
kernel does.

Operations of a decoder layer round where the kernels round: to the dtype of the model after each step, as transformers'
modules do.

Letters: m rows (nodes of all requests), H hidden width, I inner width, Q query heads, K kv heads, E head dim, R
requests, n nodes, V vocabulary, o outputs, i inputs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from dsbd_cli.ops import recording

OUTPUTS_STEP = 64  # outputs of a product that kernels compute at once; those of an expert must be a multiple of it
OUTLIERS = 32  # channels that are not quantized; measured: benchmarks/LOG.md, 2026-11-22
# Smaller arguments of exp are raised to this: soon below, exp is subnormal in float32, which takes processors ten times
# as long, and such numbers do not change a float32 sum that has a 1.
LOWEST = -80.0


@dataclass(frozen=True, slots=True)
class Norm:
    """A division of vectors by their root mean square, and a product with a weight [H].

    eps: is added to the mean square. unit_offset: the factor is 1 + weight, in float32, as Gemma has it. wide: the
    product with the weight is made in float32, as Nemotron-H has it. Norms of heads are not wide.
    """

    weight: Tensor
    eps: float
    unit_offset: bool = False
    wide: bool = False

    def to(self, device: torch.device) -> Norm:
        """Return the same norm on a device."""
        return replace(self, weight=self.weight.to(device))


def norm(rms: Norm, x: Tensor, more: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Apply a norm to x (+ more) [..., H]. Return the result and the sum x + more [..., H], which is empty without
    `more`."""
    return recording.compute(lambda: _norm(rms, x, more))


def _norm(rms: Norm, x: Tensor, more: Tensor | None) -> tuple[Tensor, Tensor]:
    summed = x.new_empty(0)
    if more is not None:
        x = summed = x + more
    wide = x.to(torch.float32)
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + rms.eps)
    if rms.unit_offset:
        return (wide * (1.0 + rms.weight.to(torch.float32))).to(x.dtype), summed
    if rms.wide:
        return (wide * rms.weight.to(torch.float32)).to(x.dtype), summed
    return rms.weight * wide.to(x.dtype), summed


@dataclass(frozen=True, slots=True)
class ClampedGLU:
    """The gate of gpt-oss: gate * sigmoid(alpha * gate) * (up + 1), of a gate of at most `limit`, and of up within
    -limit .. limit."""

    limit: float
    alpha: float


def gated(gate_up: Tensor, gelu: bool, clamped: ClampedGLU | None = None) -> Tensor:
    """Return silu(gate) * up [..., I]. gate_up: gate and up side by side [..., 2 I]. gelu: the tanh form of gelu takes
    the place of silu. clamped: takes the place of both; it is computed in float32."""

    def compute() -> Tensor:
        gate, up = gate_up.chunk(2, -1)
        if clamped is not None:
            gate, up = gate.float().clamp(max=clamped.limit), up.float().clamp(-clamped.limit, clamped.limit)
            return (gate * (gate * clamped.alpha).sigmoid() * (up + 1)).to(gate_up.dtype)
        active = nn.functional.gelu(gate, approximate="tanh") if gelu else nn.functional.silu(gate)
        return active * up

    return recording.compute(compute)


def relu2(x: Tensor) -> Tensor:
    """Return the squares [..., I] of the positive numbers of x [..., I], and 0 for the others."""
    return recording.compute(lambda: nn.functional.relu(x).square())


@dataclass(frozen=True, slots=True)
class XIELU:
    """The activation of Apertus: positive * x^2 + beta * x where x is positive, else
    negative * (exp(min(x, most)) - 1 - x) + beta * x."""

    positive: float
    negative: float
    beta: float
    most: float


def xielu(form: XIELU, x: Tensor) -> Tensor:
    """Apply an activation to x [..., I]."""

    def compute() -> Tensor:
        falling = (x.clamp(max=form.most).expm1() - x) * form.negative
        return torch.where(x > 0, form.positive * x * x, falling) + form.beta * x

    return recording.compute(compute)


def output_gate(attended: Tensor, gate: Tensor) -> Tensor:
    """Return attention [R, n, Q, E] times the sigmoid of a gate: [R, n, Q E], a factor for each number, or [R, n, Q],
    one for each head."""

    def compute() -> Tensor:
        factors = gate.sigmoid().unflatten(-1, (attended.shape[2], -1))
        return attended * factors

    return recording.compute(compute)


def gated_norm(rms: Norm | None, x: Tensor, gate: Tensor, groups: int, gate_first: bool) -> Tensor:
    """Return x [..., H] normalised in `groups` groups and multiplied by silu of a gate [..., H]. rms: has a weight [H];
    None: there is no norm. gate_first: the product comes before the norm."""

    def compute() -> Tensor:
        y, factor = x.to(torch.float32), nn.functional.silu(gate.to(torch.float32))
        if gate_first or rms is None:
            y = y * factor
        if rms is not None:
            y = y.unflatten(-1, (groups, -1))
            y = (y * torch.rsqrt(y.square().mean(-1, keepdim=True) + rms.eps)).flatten(-2)
            y = rms.weight * y.to(x.dtype)
            if not gate_first:
                y = y * factor
        return y.to(x.dtype)

    return recording.compute(compute)


def delta_inputs(
    x: Tensor, betas: Tensor, steps: Tensor, decay: Tensor, bias: Tensor, groups: int, dim: int, factor: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return what the gated delta rule takes beside its values: queries and keys [R, n, G, N] of length 1, queries
    divided by the root of N; log-decays and betas [R, n, H]. All are float32.

    x [R, n, C]: queries and keys [R, n, 2 G N] come first. betas, steps: [R, n, H], before sigmoid and softplus. decay:
    [H], of a step of size 1. bias: [H], added to steps. groups, dim: G and N. factor: of the betas. Sums and
    exponentials are computed in float64, so that their order does not show.
    """

    def compute() -> tuple[Tensor, Tensor, Tensor, Tensor]:
        heads = x[..., : 2 * groups * dim].unflatten(-1, (2, groups, dim)).to(torch.float64)
        heads = heads * torch.rsqrt(heads.square().sum(-1, keepdim=True) + 1e-6)
        query, key = heads[..., 0, :, :] * dim**-0.5, heads[..., 1, :, :]
        decays, beta = decay * _softplus(steps + bias), betas.to(torch.float64).sigmoid().float() * factor
        return query.float().contiguous(), key.float().contiguous(), decays, beta

    return recording.compute(compute)


def step_sizes(steps: Tensor, decay: Tensor, bias: Tensor, limits: tuple[float, float]) -> tuple[Tensor, Tensor]:
    """Return the step sizes of a Mamba-2 scan and its log-decays, [R, n, H] float32 each. steps: [R, n, H], before
    softplus. decay, bias: as in `delta_inputs`. limits: least and largest size."""

    def compute() -> tuple[Tensor, Tensor]:
        sizes = _softplus(steps + bias).clamp(*limits)
        return sizes, decay * sizes

    return recording.compute(compute)


def _softplus(x: Tensor) -> Tensor:
    return nn.functional.softplus(x.to(torch.float64)).to(torch.float32)


def rotate(
    qkv: Tensor,
    cos: Tensor,
    sin: Tensor,
    slots: Tensor,
    keys: Tensor,
    values: Tensor,
    norms: tuple[Norm, Norm] | None = None,
) -> Tensor:
    """Rotate queries and keys, write keys and values to their slots, and return the queries [R, Q, n, E].

    qkv [R, n, (Q + 2 K) E]: queries, keys and values side by side. cos, sin [R or 1, n, E]. slots [R n] int64: indices
    into keys and values [rows, slots, K, E] with rows and slots flattened. norms: those [E] of queries and of
    keys, which they go through before they are rotated; they differ in their weights alone.
    """

    def compute() -> Tensor:
        kv_heads, dim = keys.shape[-2:]
        states = qkv.unflatten(-1, (-1, dim))  # [R, n, Q + 2 K, E]
        heads = states.shape[2] - 2 * kv_heads
        turning, resting = states[:, :, : heads + kv_heads], states[:, :, heads + kv_heads :]
        if norms is not None:
            parts = zip(norms, turning.split((heads, kv_heads), 2), strict=True)
            turning = torch.cat([_norm(rms, part, None)[0] for rms, part in parts], 2)
        first, second = turning.chunk(2, -1)
        turned = turning * cos.unsqueeze(2) + torch.cat((-second, first), -1) * sin.unsqueeze(2)
        keys.flatten(0, 1).index_copy_(0, slots, turned[:, :, heads:].flatten(0, 1))
        values.flatten(0, 1).index_copy_(0, slots, resting.flatten(0, 1))
        return turned[:, :, :heads].transpose(1, 2).contiguous()

    return recording.compute(compute)


@dataclass(frozen=True, slots=True)
class Router:
    """The choice of a token's experts by their scores.

    Attributes:
        chosen: experts of a token.
        sigmoid: scores are sigmoids of the logits; False: their softmax.
        correction: [E] float32, is added to the scores for the choice alone; None: nothing is.
        groups, chosen_groups: experts are chosen from so many groups of neighbouring ones. group_size: a group's score
            is the sum of its so many highest scores.
        normalised: the weights of a token's experts are divided by their sum, or by `least_sum` if that is more, plus
            `sum_eps`.
        scale: factor of the weights.
    """

    chosen: int
    sigmoid: bool = False
    correction: Tensor | None = None
    groups: int = 1
    chosen_groups: int = 1
    group_size: int = 1
    normalised: bool = True
    least_sum: float = 1e-20
    sum_eps: float = 0.0
    scale: float = 1.0

    def to(self, device: torch.device) -> Router:
        """Return the same router on a device."""
        return self if self.correction is None else replace(self, correction=self.correction.to(device))


@dataclass(frozen=True, slots=True)
class Routes:
    """Experts of the rows of one forward. Rows of experts are ordered by expert, so that each expert's are together.

    Attributes:
        table: [1 + 3 E] int64: how many experts have rows, and for each of these its number, its first row and the end
            of its rows.
        rows: [m, k] int64, the row of each of a token's k experts, in ascending order of the experts.
        weights: [m, k] float32, of these experts.
    """

    table: Tensor
    rows: Tensor
    weights: Tensor

    @property
    def experts(self) -> int:
        """Number of experts."""
        return len(self.table) // 3


def route(router: Router, logits: Tensor) -> Routes:
    """Choose experts of tokens by logits [m, E]. Of equal scores the first expert's counts as higher."""

    def compute() -> tuple[Tensor, Tensor, Tensor]:
        count = logits.shape[-1]
        wide = logits.float()
        scores = wide.sigmoid() if router.sigmoid else wide.softmax(-1)
        ranked = scores if router.correction is None else scores + router.correction
        if router.groups > 1:
            by_group = ranked.unflatten(-1, (router.groups, -1))
            of_groups = by_group.sort(dim=-1, descending=True).values[..., : router.group_size].sum(-1)
            kept = of_groups.sort(dim=-1, descending=True, stable=True).indices[:, : router.chosen_groups]
            left_out = torch.ones_like(of_groups, dtype=torch.bool).scatter_(1, kept, False)
            ranked = by_group.masked_fill(left_out.unsqueeze(-1), float("-inf")).flatten(-2)
        experts = ranked.sort(dim=-1, descending=True, stable=True).indices[:, : router.chosen].sort(-1).values
        weights = scores.gather(1, experts)
        if router.normalised:
            weights = weights / (weights.sum(-1, keepdim=True).clamp_min(router.least_sum) + router.sum_eps)
        order = experts.flatten().argsort(dim=0, stable=True)
        rows = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))
        ends = torch.nn.functional.one_hot(experts.flatten(), count).sum(0).cumsum(0)
        starts = torch.cat((ends.new_zeros(1), ends[:-1]))
        spans = torch.stack((torch.arange(count, device=ends.device), starts, ends), 1)
        first = (starts < ends).long().argsort(dim=0, descending=True, stable=True)
        table = torch.cat(((starts < ends).sum().view(1), spans[first].flatten()))
        return table, rows.view_as(experts), weights * router.scale

    return Routes(*recording.compute(compute))


def spread(x: Tensor, routes: Routes) -> Tensor:
    """Return the row of x [m, H] of each of its experts, [m k, H], in the order of `routes.rows`."""

    def compute() -> Tensor:
        out = x.new_empty(routes.rows.numel(), x.shape[-1])
        return out.index_copy_(0, routes.rows.flatten(), x.repeat_interleave(routes.rows.shape[1], 0))

    shape = routes.rows.numel(), x.shape[-1]
    return recording.postpone(shape, x.dtype, compute)  # while a program is built, routes are undefined


def combine(outputs: Tensor, routes: Routes, shared: Tensor | None = None, gate: Tensor | None = None) -> Tensor:
    """Return the weighted sums [m, H] of the experts' outputs [m k, H], expert by expert in ascending order, in
    float32. shared: [m, H], of an expert that all tokens have, is added last. gate: [m, 1], logits of its weights."""

    def compute() -> Tensor:
        summed = torch.zeros(len(routes.rows), outputs.shape[-1], device=outputs.device)
        for rows, weights in zip(routes.rows.t(), routes.weights.t(), strict=True):
            summed += outputs[rows].float() * weights.unsqueeze(1)
        if shared is not None:
            summed += shared.float() if gate is None else shared.float() * gate.float().sigmoid()
        return summed.to(outputs.dtype)

    return recording.postpone((len(routes.rows), outputs.shape[-1]), outputs.dtype, compute)


@dataclass(slots=True)
class DeviceLinear:
    """A product with plain weights [o, i] and biases [o] on a GPU. parts: number of outputs of each layer in it."""

    weight: Tensor
    bias: Tensor | None
    parts: list[int]
    product: Callable[..., Tensor] = nn.functional.linear
    compiled: bool = False

    @property
    def weights(self) -> list[Tensor]:
        """The weights as they are stored."""
        return [self.weight]

    @staticmethod
    def of(weights: Sequence[Tensor], biases: Sequence[Tensor | None]) -> DeviceLinear:
        """Join the weights [o, i] of the layers, one below the other. biases: [o] of every layer, or all None."""
        some = [bias for bias in biases if bias is not None]
        return DeviceLinear(
            torch.cat([*weights]), torch.cat(some) if some else None, [len(weight) for weight in weights]
        )

    def compute(self, x: Tensor) -> Tensor:
        """Compute the product: x [..., i] -> [..., o]."""
        return self.product(x, self.weight, self.bias)


def linear(weights: Sequence[Tensor], biases: Sequence[Tensor | None], experts: int = 1) -> DeviceLinear | None:
    """Return one product of layers with the same input, as `DeviceLinear.of` joins them. Return None for experts, and
    on a CPU, where the weights stay as they are, in a memory-mapped file."""
    return None if weights[0].is_cpu or experts > 1 else DeviceLinear.of(weights, biases)


class PickedRows:
    """Products, in a dtype, of each row of a batch with its own rows of a table [V, i]."""

    def __init__(self, table: Tensor, dtype: torch.dtype) -> None:
        self._table, self._dtype = table, dtype

    def take(self, ids: Tensor) -> None:
        """Use the rows ids [R, o] int64 of the table as weights from now on."""
        self._weights = self._table[ids].to(self._dtype)

    def compute(self, x: Tensor) -> Tensor:
        """Compute the products: x [R, n, i] -> [R, n, o]."""
        return x @ self._weights.transpose(1, 2)


def outlier_channels(largest: Tensor) -> Tensor:
    """Return the k input channels with the largest magnitudes, ascending. largest: [i], a magnitude of each channel."""
    return largest.topk(min(OUTLIERS, len(largest) // 2)).indices.sort().values


def int4_sums(
    x: Tensor, steps: Tensor, levels: Tensor, scales: Tensor, offsets: Tensor, table: Tensor | None = None
) -> Tensor:
    """Return the product [r, o] float32 of step * x with weights scale * level + offset.

    x: integers [r, i]. levels [o, i]: 0 .. 15. table: [16] uint8, the numbers in place of the levels. steps [r, g]
    float32, scales and offsets [o, g], of 11 bits: one for each i / g inputs. Group by group the sum of products and
    the sum of x are multiplied by the step, and rounded. Scale times the one and offset times the other are added to
    the result, which is rounded once after each.
    """
    groups = scales.shape[1]
    levels = levels if table is None else table[levels.long()]
    x, levels = (side.double().unflatten(1, (groups, -1)) for side in (x, levels))
    result = x.new_zeros(len(x), len(levels))
    for group in range(groups):
        of_x, dot = x[:, group].sum(1, keepdim=True), x[:, group] @ levels[:, group].t()
        for factor, number in ((scales, dot), (offsets, of_x)):  # float64 holds each product, and nearly each sum
            stepped = (number.float() * steps[:, group, None]).double()
            result = (result + factor[:, group].double() * stepped).float().double()
    return result.float()


def log_total(values: Tensor, highest: Tensor) -> Tensor:
    """Return the log of the sum over v of exp(values[:, v] - highest), [m, 1] float32.

    values [m, V], a small number of rows; highest [m, 1] float32, the largest value of each row.
    """
    shares = (values - highest).clamp_(min=LOWEST).exp_()
    # torch would sum a single row in parts, by all threads, and so in another order than a row of several
    return (shares if len(shares) > 1 else shares.repeat(2, 1)).sum(-1, keepdim=True).log_()[: len(values)]


def move(slab: Tensor, source: Tensor, target: Tensor) -> None:
    """Copy slots within each row of each plane of a slab [P, R', S, width], in place. source, target: [R, T]. All
    sources are read before a target is written.

    On a CPU only the slots that move are copied, about one in fourteen, because finding them needs no transfer there.
    """
    if slab.device.type == "cpu" and torch.equal(source, target):
        return
    base = torch.arange(source.shape[0], device=source.device)[:, None] * slab.shape[2]
    source, target = (base + source).flatten(), (base + target).flatten()
    if slab.device.type == "cpu":
        moving = torch.from_numpy((source != target).numpy().nonzero()[0])
        source, target = source[moving], target[moving]
    flat = slab.flatten(1, 2)  # [P, R' * S, width], a view
    flat.index_copy_(1, target, flat.index_select(1, source))
