"""Random numbers as pure functions of their purpose: a counter-based hash without state or a global generator.

A number belongs to (request seed, token path, token), or to (request seed, iteration, layer, stream, index). So it is
the same in any batch, on any row, with any draft. The mixer is the finaliser of SplitMix64 (Steele, Lea, Flood 2014).
Its arithmetic is that of uint64, because int64 wraps in the same way.
"""

from __future__ import annotations

import torch
from torch import Tensor

from dsbd_cli.ops import layout
from dsbd_cli.ops.layout import STREAMS


def _signed(value: int) -> int:
    return value - (1 << 64) if value >= 1 << 63 else value


_GOLDEN, _MIX_A, _MIX_B, _TOKEN = map(_signed, (layout.GOLDEN, layout.MIX_A, layout.MIX_B, layout.MIX_TOKEN))


def _shift(x: Tensor, bits: int) -> Tensor:
    """Shift int64 to the right logically."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def _mix(x: Tensor) -> Tensor:
    x = (x ^ _shift(x, 30)) * _MIX_A
    x = (x ^ _shift(x, 27)) * _MIX_B
    return x ^ _shift(x, 31)


def seed_key(seeds: Tensor) -> Tensor:
    """Return the key of the empty path for requests with these seeds. [...] int64 -> [...] int64."""
    return _mix(seeds + _GOLDEN)


def extend_path(path: Tensor, token: Tensor) -> Tensor:
    """Return the key of a path with one more token. Both broadcast. int64."""
    return _mix(path * _TOKEN + token + _GOLDEN)


def stream_key(row_key: Tensor, iteration: Tensor, layer: int, stream: int) -> Tensor:
    """Return the key of one stream of one layer of one iteration. row_key, iteration [R] int64 -> [R] int64."""
    return _mix(_mix(row_key + iteration * _TOKEN) + _signed((layer * STREAMS + stream) * _GOLDEN % (1 << 64)))


def stream_keys(row_key: Tensor, iteration: Tensor, layers: int) -> Tensor:
    """Return stream_key for all layers 0 .. L-1 and all streams at once: [R, L, STREAMS] int64."""
    number = torch.arange(layers * STREAMS, device=row_key.device).view(1, layers, STREAMS)
    return _mix(_mix(row_key + iteration * _TOKEN).view(-1, 1, 1) + number * _GOLDEN)


def uniform(key: Tensor, index: Tensor) -> Tensor:
    """Return uniform numbers strictly inside (0, 1), of 52 bits, float64. key and index broadcast."""
    bits = _shift(_mix(key + index * _GOLDEN), 12)
    return (bits.to(torch.float64) + 0.5) * 2.0**-52


def gumbel(key: Tensor, index: Tensor) -> Tensor:
    """Return standard Gumbel numbers, float64, as -log(-log1p(-u)), which resolves both tails."""
    return -torch.log(-torch.log1p(-uniform(key, index)))


def path_gumbel(path: Tensor, tokens: Tensor, greedy_rows: Tensor | None = None) -> Tensor:
    """Return G(x, v), the noise of token v after path x, with 0 in greedy rows. path [R, n], tokens [R, n, C] ->
    [R, n, C] float32.

    greedy_rows: [R] bool.
    """
    noise = gumbel(path.unsqueeze(-1), tokens + 1).to(torch.float32)
    return noise if greedy_rows is None else noise.masked_fill_(greedy_rows[:, None, None], 0.0)
