"""Short convolutions of recurrent layers on a CPU, in float32."""

from __future__ import annotations

import numpy as np
from numba import njit, types

from dsbd_cli.ops.cpu.kernels import simd as lanes
from dsbd_cli.ops.cpu.kernels.compiler import KernelCompiler

compiled = KernelCompiler("recurrent layers", seconds=21)

_F1, _F2 = types.float32[::1], types.float32[:, ::1]
_I1, _I2 = types.int64[::1], types.int64[:, ::1]
_LOG2E, _LOG2E_REST, _LN2 = np.float32(1.44269502), np.float32(1.92596299e-8), np.float32(0.693147181)
_SIDE = 4 * lanes.LANES  # channels of a convolution at a time
_NEAR = 16 * _SIDE  # channels whose weights stay in the cache


@njit(error_model="numpy", nogil=True)
def _silu(x):
    """Return x / (1 + exp(-x)), within a few units in the last place."""
    least = lanes.larger(lanes.splat(-87), lanes.smaller(lanes.sub(lanes.splat(0), x), lanes.splat(87)))
    power = lanes.mul(least, lanes.splat(_LOG2E))
    rest = lanes.fma(least, lanes.splat(_LOG2E), lanes.sub(lanes.splat(0), power))  # the rounding error of that product
    rest = lanes.fma(least, lanes.splat(_LOG2E_REST), rest)
    grown = lanes.exp2(power)
    grown = lanes.fma(grown, lanes.mul(rest, lanes.splat(_LN2)), grown)
    return lanes.divide(x, lanes.add(lanes.splat(1), grown))


@compiled(types.void(_F1, types.int64, _F2, _I1, _I2, _F2, _F1, types.boolean, _F2))
def convolve(x, step, plane, at, back, weight, bias, smooth, out):
    """Convolve as `scans.convolve` does, and apply silu if `smooth` is set.

    x: inputs of n nodes, `step` numbers apart, which are stored in plane [places, C] at the places `at` [n]. back:
    [J - 1, n] places of the tokens before each node, the oldest first. weight: [C, J]. bias: [C], or [0] for none.
    out: [n, C].
    """
    channels, taps = weight.shape
    turned, starts = np.empty((taps, channels), np.float32), np.empty(taps, np.int64)
    for tap in range(taps):
        for c in range(channels):
            turned[tap, c] = weight[c, tap]
    whole, line, area = channels // _SIDE * _SIDE, channels * lanes.WORD, lanes.LANES * lanes.WORD
    for first in range(0, whole, _NEAR):
        count = min(_NEAR, whole - first) // _SIDE
        for i in range(len(at)):
            source = x.ctypes.data + (i * step + first) * lanes.WORD
            target = plane.ctypes.data + at[i] * line + first * lanes.WORD
            for past in range(0, count * 4 * area, area):
                lanes.store_f32(target + past, lanes.load_f32(source + past))
        for i in range(len(at)):
            for tap in range(taps):
                place = back[tap, i] if tap < taps - 1 else at[i]
                starts[tap] = plane.ctypes.data + place * line + first * lanes.WORD
            for number in range(count):
                past = number * 4 * area
                factors = turned.ctypes.data + first * lanes.WORD + past
                here = starts[0] + past
                a = lanes.mul(lanes.load_f32(here), lanes.load_f32(factors))
                b = lanes.mul(lanes.load_f32(here + area), lanes.load_f32(factors + area))
                c = lanes.mul(lanes.load_f32(here + 2 * area), lanes.load_f32(factors + 2 * area))
                d = lanes.mul(lanes.load_f32(here + 3 * area), lanes.load_f32(factors + 3 * area))
                for tap in range(1, taps):
                    factors += line
                    here = starts[tap] + past
                    a = lanes.add(a, lanes.mul(lanes.load_f32(here), lanes.load_f32(factors)))
                    b = lanes.add(b, lanes.mul(lanes.load_f32(here + area), lanes.load_f32(factors + area)))
                    c = lanes.add(c, lanes.mul(lanes.load_f32(here + 2 * area), lanes.load_f32(factors + 2 * area)))
                    d = lanes.add(d, lanes.mul(lanes.load_f32(here + 3 * area), lanes.load_f32(factors + 3 * area)))
                if len(bias):
                    here = bias.ctypes.data + first * lanes.WORD + past
                    a, b = lanes.add(a, lanes.load_f32(here)), lanes.add(b, lanes.load_f32(here + area))
                    c = lanes.add(c, lanes.load_f32(here + 2 * area))
                    d = lanes.add(d, lanes.load_f32(here + 3 * area))
                if smooth:
                    a, b, c, d = _silu(a), _silu(b), _silu(c), _silu(d)
                here = out.ctypes.data + i * line + first * lanes.WORD + past
                lanes.store_f32(here, a)
                lanes.store_f32(here + area, b)
                lanes.store_f32(here + 2 * area, c)
                lanes.store_f32(here + 3 * area, d)
    for i in range(len(at)):
        plane[at[i], whole:] = x[i * step + whole : i * step + channels]
    for i in range(len(at)):
        for c in range(whole, channels):
            total = plane[back[0, i] if taps > 1 else at[i], c] * turned[0, c]
            for tap in range(1, taps):
                total += plane[back[tap, i] if tap < taps - 1 else at[i], c] * turned[tap, c]
            if len(bias):
                total += bias[c]
            out[i, c] = lanes.first(_silu(lanes.splat(total))) if smooth else total
