"""transformers' recurrent layers over a packed forest: their own forward, with the scans it calls replaced by ours.

Every recurrent mixer of transformers 5.23 calls a convolution and one of a few scans by a name of its module, with the
same arguments in all model families. Here each mixer of a loaded model gets a copy of its own forward in which those
names mean our functions. No other model and no module of transformers changes. Outside a forest forward ours call the
stock functions, so that `plain` and comparators run what transformers wrote.

To add a family: docs/extending.md.
"""

from __future__ import annotations

import inspect
import types
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from dsbd_cli.models.recurrent import recurrences
from dsbd_cli.models.recurrent.mixer_cache import MixerCache

CONVOLUTION = "causal_conv1d_fn"
STRENGTHS = ("b_proj", "in_proj_b", "in_proj_ba")  # products of the delta rule that become beta by a sigmoid

# Kinds of models whose recurrence is known and not offered, and why.
REFUSED = {
    "rwkv": "its recurrence keeps a running maximum that no sum over ancestors gives",
    "xlstm": "its recurrence keeps a running maximum that no sum over ancestors gives",
    "recurrent_gemma": "its recurrence is code of its own, with a cache inside the layers",
    "minimax": "its linear attention is code of its own, with a cache class of its own",
    "zaya": "its convolution is code of its own",
    "retnet": "its retention is code that comes with the checkpoint",
    "qwen4_exp_text": "its embeddings depend on the last tokens by slot",
    "inkling": "its position terms go by slot",
    "inkling_text": "its position terms go by slot",
}


def has_mixers(model: nn.Module) -> bool:
    """Return whether a model has recurrent layers that `bind` can run."""
    return any(_code(module) is not None for module in model.modules())


def bind(model: nn.Module) -> int:
    """Make the recurrent layers of a model use the cache of the forest forward that is under way; return how many."""
    count = 0
    for module in model.modules():
        forward = _code(module)
        if forward is None:
            continue
        names = dict(forward.__globals__)
        for name, ours in SCANS.items():
            if name in names:
                names[name] = _ours_or_stock(ours, names[name])
        if names.get("F") is nn.functional:
            names["F"] = _Functions()
        bound = types.FunctionType(forward.__code__, names, forward.__name__, forward.__defaults__, forward.__closure__)
        bound.__kwdefaults__ = forward.__kwdefaults__
        # accelerate keeps the forward that its hook wraps under another name
        attribute = "_old_forward" if hasattr(module, "_hf_hook") else "forward"
        corrects = any(hasattr(module, name) for name in STRENGTHS)
        setattr(module, attribute, types.MethodType(bound, _WideStrengths(module) if corrects else module))
        count += 1
    return count


def _code(module: nn.Module) -> Any:
    """Return the forward of a recurrent mixer as transformers wrote it; None for any other module."""
    forward: Any = inspect.unwrap(type(module).forward)
    return forward if CONVOLUTION in getattr(getattr(forward, "__code__", None), "co_names", ()) else None


def _ours_or_stock(ours: Callable[..., Any], stock: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        cache = MixerCache.current()
        return stock(*args, **kwargs) if cache is None else ours(cache, *args, **kwargs)

    return call


def _convolution(
    cache: MixerCache,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str | None = None,
    **kwargs: Any,
) -> Tensor:
    # x: [R, C, n]; weight: [C, J]
    memory = cache.convolution(x.device, weight.shape[-1])
    return memory.run(x.transpose(1, 2), weight, bias, activation).transpose(1, 2).to(x.dtype)


def _mamba2(
    cache: MixerCache,
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    *args: Any,
    D: Tensor | None = None,
    dt_bias: Tensor | None = None,
    dt_softplus: bool = False,
    dt_limit: tuple[float, float] = (0.0, float("inf")),
    return_final_states: bool = False,
    **kwargs: Any,
) -> Any:
    # x: [R, n, H, P]; dt: [R, n, H]; A: [H]; B, C: [R, n, G, N]
    steps = _steps(cache, dt, dt_bias, dt_softplus).clamp(*dt_limit)
    y = recurrences.mamba2(cache.linear(x.device), x, steps, A, B, C, D)
    return (y, y) if return_final_states else y


def _delta(
    cache: MixerCache,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    g: Tensor,
    beta: Tensor,
    *args: Any,
    use_qk_l2norm_in_kernel: bool = False,
    **kwargs: Any,
) -> tuple[Tensor, Tensor]:
    # query, key: [R, n, G, N]; value: [R, n, H, P]; g: [R, n, H] or [R, n, H, N]; beta: [R, n, H]
    y = recurrences.delta(cache.linear(query.device), query, key, value, g, beta, unit=use_qk_l2norm_in_kernel)
    return y, y


def _mamba(
    cache: MixerCache,
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    *args: Any,
    D: Tensor | None = None,
    z: Tensor | None = None,
    delta_bias: Tensor | None = None,
    delta_softplus: bool = False,
    return_last_state: bool = False,
    **kwargs: Any,
) -> Any:
    # x, dt, z: [R, I, n]; A: [I, N]; B, C: [R, N, n]
    steps = _steps(cache, dt.transpose(1, 2), delta_bias, delta_softplus).float()
    inputs = x.transpose(1, 2).float()
    y = cache.selective(x.device).run(
        steps, steps * inputs, B.transpose(1, 2).float(), A.float(), C.transpose(1, 2).float()
    )
    y = y.to(torch.float32).transpose(1, 2)
    if D is not None:
        y = y + x * D.view(1, -1, 1)
    if z is not None:
        y = y * nn.functional.silu(z)
    y = y.to(x.dtype)
    return (y, y) if return_last_state else y


def _grouped(
    cache: MixerCache, q: Tensor, k: Tensor, v: Tensor, group: int, near: Tensor | None, far: Tensor | None
) -> Tensor:
    # q, k, v: [R, n, H, P]; near, far: [1]
    y = cache.grouped(q.device, group).grouped(
        q.float(), k.float(), v.float(), 1.0 if near is None else near.float(), 1.0 if far is None else far.float()
    )
    return y.to(q.dtype)


def _steps(cache: MixerCache, dt: Tensor, bias: Tensor | None, softplus: bool) -> Tensor:
    dt = dt if bias is None else dt + bias.to(dt.dtype)
    return recurrences.softplus(dt, cache.precision) if softplus else dt


class _WideStrengths:
    """A mixer of the gated delta rule whose beta is computed in float64 in a forest, where the model is float32.

    In float32 torch computes the last few numbers of a tensor with another exp, as `_steps` says.
    """

    def __init__(self, mixer: Any) -> None:
        self._mixer = mixer

    def __getattr__(self, name: str) -> Any:
        part = getattr(self._mixer, name)
        return self._widened(part) if name in STRENGTHS and MixerCache.current() is not None else part

    @staticmethod
    def _widened(product: Any) -> Callable[[Tensor], Tensor]:
        def compute(x: Tensor) -> Tensor:
            out: Tensor = product(x)
            return out.double() if out.dtype == torch.float32 else out

        return compute


class _Functions:
    """torch.nn.functional for mixers of the gated delta rule, with the softplus of recurrences.py."""

    def __getattr__(self, name: str) -> Any:
        return getattr(nn.functional, name)

    def softplus(self, x: Tensor) -> Tensor:
        cache = MixerCache.current()
        return nn.functional.softplus(x) if cache is None else recurrences.softplus(x, cache.precision)


# Our functions by the names that mixers call, with the arguments of the stock ones after the cache. Mixers also want a
# last state, which they only hand to the cache; ours keeps its own, so any tensor will do.
SCANS: dict[str, Callable[..., Any]] = {
    CONVOLUTION: _convolution,
    "mamba2_chunk_scan": _mamba2,
    "mamba_selective_scan": _mamba,
    "torch_chunk_gated_delta_rule": _delta,
    "chunk_kimi_delta_attention": _delta,
    "grouped_linear_attention": _grouped,
}
