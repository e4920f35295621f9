"""The choice of a backend for each operation. Nothing else decides it. `Ops.report` names the choice and the reason."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from subprocess import CalledProcessError
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from dsbd_cli.ops import reference
from dsbd_cli.ops.cpu import attention, int8, iteration, layer, linear, logsumexp, program, prompt_attention, scan
from dsbd_cli.ops.cpu.runtime import FLOATS, compile_beside, unloadable
from dsbd_cli.ops.interface import Linear, OpChoice, Ops, RowsLinear
from dsbd_cli.ops.triton import available
from dsbd_cli.ops.triton.trial import faults

LAYERS = ("norm", "gated", "rotate", "program")
MODEL = ("linear", "path_attention", "prompt_attention", "log_total")
DECODER = (*LAYERS, *MODEL)
ITERATION_KERNELS = ("candidates", "draft", "verify", "commit", "move")
ITERATION = ("log_total", *ITERATION_KERNELS)
GPU_LAYERS = ("norm", "gated", "rotate", "linear")
OpsOf = Callable[[Iterable[str]], dict[str, Any]]  # returns operations by their names
TRITON = (*GPU_LAYERS, "attention", *ITERATION_KERNELS)


@functools.lru_cache(256)
def ops_for(
    device: torch.device,
    dtype: torch.dtype,
    wanted: tuple[str, ...],
    *,
    widths: frozenset[int] = frozenset(),
    kernels: bool | None = None,
) -> Ops:
    """Return the operations for a device and dtype.

    wanted: names of the operations that will be called; the others are plain torch. widths: a decoder's hidden size,
    inner size and half head size. CPU kernels need multiples of `layer.STEP`; kernels of triton have a largest width.
    kernels: whether triton's may serve; None: on a GPU only. Where triton is missing, True has no effect.
    """
    found, report = dict[str, Any](), list[OpChoice]()
    missing = "not wanted" if kernels is False else triton_missing(device, asked=bool(kernels))
    names = [name for name in wanted if name in TRITON] if missing is None else []
    faulty = faults(device) if names and device.type == "cuda" else {}
    by_triton = triton_ops(names) if names else {}
    for name in wanted:
        reason = missing or faulty.get(name) or _triton_unfit(name, dtype, widths)
        if name in by_triton and reason is None:
            found[name], choice = (
                by_triton[name],
                OpChoice(name, "triton", f"its results on {device} are those of torch"),
            )
        elif device.type == "cpu" and name == "linear":
            found[name], choice = packed_linear, _packing(dtype)
        elif device.type == "cpu" and name == "pick" and _packs(linear.Compiled, dtype):
            found[name], choice = pick, OpChoice(name, "numba", "rows are packed from where they lie")
        elif device.type == "cpu" and name in NUMBA and (reason := _numba_missing(name, dtype, widths)) is None:
            found[name], choice = NUMBA[name].op, OpChoice(name, "numba", "it runs on this processor")
        else:
            choice = OpChoice(name, "torch", reason or f"no kernel serves {device}")
        report.append(choice)
    return Ops(**found, report=tuple(report))


# numba, on a CPU


def begin_compiling() -> None:
    """Begin to compile the kernels of iterations in a process of their own, where they are not compiled yet."""
    compile_beside("iteration")


class _Numba(NamedTuple):
    """An operation that CPU kernels serve, what loads them, and the words of a warning if that fails."""

    op: object
    load: Callable[[], object]
    instead: str


def _log_total(values: Tensor, highest: Tensor) -> Tensor:
    total = logsumexp.log_total(values, highest)
    return reference.log_total(values, highest) if total is None else total


def _load_candidates() -> object:
    """Load the kernel of `candidates`, and that of `log_total`, by which tensor code gives a row the same bits where it
    selects."""
    return iteration.compiled(), logsumexp.compiled()


def _draft(rule: str | None = None, *sizes: int) -> ModuleType | None:
    return iteration if rule is None or iteration.fits(rule, recorded=bool(sizes[-1])) else None


def _verify(
    beams: int, roots: int, candidates: int, drafts: int, rule: str, *, own_limits: bool = False
) -> ModuleType | None:
    return iteration if iteration.fits(rule) else None


def _commit(beams: int, window: int) -> ModuleType:
    return iteration


_TORCH_ITERATIONS = "tensor code computes what lies between the forwards"
_TORCH_LAYERS = "torch computes norms, rotations and activations"
NUMBA = {
    "norm": _Numba(layer.norm, layer.compiled, _TORCH_LAYERS),
    "gated": _Numba(layer.gated, layer.compiled, _TORCH_LAYERS),
    "rotate": _Numba(layer.rotate, layer.compiled, _TORCH_LAYERS),
    "program": _Numba(program.loop, program.compiled, "layers are called one by one"),
    "path_attention": _Numba(attention.attend, attention.compiled, "torch computes attention over the suffix"),
    "prompt_attention": _Numba(
        prompt_attention.attend, prompt_attention.compiled, "torch computes attention to prompts"
    ),
    "log_total": _Numba(_log_total, logsumexp.compiled, "torch computes the sums over the vocabulary"),
    "candidates": _Numba(iteration.candidates, _load_candidates, _TORCH_ITERATIONS),
    "draft": _Numba(_draft, iteration.compiled, _TORCH_ITERATIONS),
    "verify": _Numba(_verify, iteration.compiled, _TORCH_ITERATIONS),
    "commit": _Numba(_commit, iteration.compiled, _TORCH_ITERATIONS),
    "scan": _Numba(scan.compiled, scan.compiled, "torch computes recurrent layers"),
}
_unloadable = functools.cache(unloadable)


def _numba_missing(name: str, dtype: torch.dtype, widths: frozenset[int]) -> str | None:
    """Return why the CPU kernel of an operation cannot serve; None where it can."""
    if name in (*LAYERS, "path_attention", "prompt_attention") and dtype not in FLOATS:
        return f"the kernels do not compute in {dtype}"
    if name == "prompt_attention" and not prompt_attention.able(dtype):
        return "the kernel is for processors with AVX-512 and without matrix units"
    if name in LAYERS and any(width % layer.STEP for width in widths):
        return f"a width is not a multiple of {layer.STEP}"
    if name == "program" and (reason := _numba_missing("norm", dtype, widths)) is not None:
        return reason
    return _unloadable(*NUMBA[name][1:])


def packed_linear(weights: Sequence[Tensor], biases: Sequence[Tensor | None]) -> linear.PackedProduct | None:
    """Return layers as one packed product; None where no packed product gives the results of the plain one.

    weights: [o, i] of each layer, of one dtype, on a CPU. biases: [o] or None of each layer.
    """
    for backend in (linear.Compiled, linear.Torch):
        if backend.takes(weights[0]) and _packs(backend, weights[0].dtype):
            return linear.PackedProduct(weights, biases, backend)
    return None


def pick(table: Tensor, dtype: torch.dtype) -> RowsLinear:
    """Return products with picked rows of a table [V, i]. They are packed if the kernel can read the table as it is."""
    if table.dtype != dtype or not linear.Compiled.takes(table) or table.stride(1) != 1:
        return reference.PickedRows(table, dtype)
    return linear.PickedRows(table)


def packing_works(dtype: torch.dtype) -> bool:
    """Return whether our kernel or this build of torch has a packed product here that equals the plain one."""
    return _packs(linear.Compiled, dtype) or _packs(linear.Torch, dtype)


def _packing(dtype: torch.dtype) -> OpChoice:
    if _packs(linear.Compiled, dtype):
        if dtype == torch.bfloat16 and linear.bfloat16_tile() == "amx":
            return OpChoice("linear", "numba", "matrix units read weights as they lie in the checkpoint")
        return OpChoice("linear", "numba", "weights lie in the order in which the kernel reads them")
    return OpChoice(
        "linear", "torch", "weights are packed by oneDNN" if packing_works(dtype) else "nothing packs weights"
    )


@functools.cache
def _packs(backend: type[linear.Compiled] | type[linear.Torch], dtype: torch.dtype) -> bool:
    """Return whether a packed product can serve here and gives the results of the plain one."""
    if dtype not in FLOATS or not backend.able(dtype):
        return False
    if backend is linear.Compiled and _unloadable(linear.compiled, "torch computes linear layers") is not None:
        return False
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(96, 64, generator=generator).to(dtype)
    x, bias = torch.randn(2, 5, 64, generator=generator).to(dtype), torch.randn(96, generator=generator).to(dtype)
    try:
        with torch.inference_mode():
            product = backend([weight])
            ours = product(x, product.bias(bias))
            plain = nn.functional.linear(x, weight, bias)
    except (AttributeError, RuntimeError, NotImplementedError):
        return False
    return ours.shape == plain.shape and torch.allclose(ours, plain, rtol=2e-2, atol=2e-2)


def int8_linear(weights: Sequence[Tensor], biases: Sequence[Tensor | None], outliers: Tensor) -> int8.Int8Product:
    """Return layers as one product in int8. The input channels `outliers` [k] are not quantized.

    weights: [o, i] of each layer, of one dtype, on a CPU. biases: [o] or None of each layer.
    """
    return int8.Int8Product(weights, biases, outliers, _int8_way(), packed_linear)


@functools.cache
def _int8_way() -> type[int8.Compiled] | type[int8.Torch]:
    able = int8.Compiled.able() and _unloadable(int8.compiled, "torch computes products in int8") is None
    return int8.Compiled if able and int8.fault(int8.Compiled, packed_linear) is None else int8.Torch


@functools.cache
def int8_missing() -> str | None:
    """Return why this build of torch on this processor has no exact int8 product; None where it has one."""
    return int8.fault(_int8_way(), packed_linear)


# triton, on a GPU


def triton_missing(device: torch.device, *, asked: bool = True) -> str | None:
    """Return why no kernel of triton runs on a device; None where they may run. For tests, triton's interpreter runs
    kernels that are asked for on any device."""
    if not available():
        return "the package triton is missing"
    if device.type == "cuda" or (asked and os.environ.get("TRITON_INTERPRET") == "1"):
        return None
    return f"triton does not run on {device}"


def triton_ops(names: Iterable[str]) -> dict[str, Any]:
    """Return the named operations by kernels of triton, whether or not their results are those of torch."""
    from dsbd_cli.ops.triton import attention as masked
    from dsbd_cli.ops.triton import candidates, commit, distribution, draft, layers, products, verify

    def product(weights: Sequence[Tensor], biases: Sequence[Tensor | None]) -> Linear | None:
        made = reference.DeviceLinear.of(weights, biases)
        return replace(made, product=products.linear) if products.linear_fits(made.weight, made.bias) else made

    def attend(query: Tensor, key: Tensor, value: Tensor, *more: Any, **named: Any) -> Tensor | None:
        return masked.attention(query, key, value, *more, **named) if masked.attention_fits(query, key, value) else None

    def verifying(*sizes: Any, own_limits: bool = False) -> ModuleType | None:
        return verify if not own_limits and verify.fits(*sizes) else None

    def best(logits: Tensor, count: int) -> tuple[Tensor, Tensor] | None:
        return candidates.candidates(logits, count) if candidates.fits(logits, count) else None

    def drafting(
        rule: str | None = None, nodes: int = 0, count: int = 0, own: int = 0, *_: object
    ) -> ModuleType | None:
        return draft if rule is None or (rule in distribution.RULES and draft.fits(nodes, count, own)) else None

    every = {
        "norm": layers.norm,
        "gated": layers.gated,
        "rotate": layers.rotate,
        "linear": product,
        "attention": attend,
        "candidates": best,
        "draft": drafting,
        "verify": verifying,
        "commit": lambda *sizes: commit if commit.fits(*sizes) else None,
        "move": commit.move,
    }
    return {name: every[name] for name in names}


def _triton_unfit(name: str, dtype: torch.dtype, widths: frozenset[int]) -> str | None:
    if name not in GPU_LAYERS or not widths:
        return None
    from dsbd_cli.ops.triton import layers

    if dtype in layers.DTYPES and max(widths) <= layers.WIDEST:
        return None
    return f"the kernels do not serve rows of {max(widths)} in {dtype}"


def kernel_failed(error: Exception) -> bool:
    """Return whether triton could not compile or launch a kernel, or its C compiler failed."""
    own = type(error).__module__.partition(".")[0] == "triton"
    return own or isinstance(error, CalledProcessError) or "Triton Error" in str(error)


def rejected_kernels(device: torch.device, kernels: bool | None) -> tuple[str, ...]:
    """Return a line for the user per fault of triton's kernels on this device. Tensor code runs in their place."""
    if device.type != "cuda" or kernels is False:
        return ()
    alike: dict[str, list[str]] = {}
    for name, fault in faults(device).items():
        alike.setdefault(fault, []).append(name)
    return tuple(
        f"the kernel {names[0]} is left out, and tensor code runs in its place: it {fault}"
        if len(names) == 1
        else f"the kernels {', '.join(names)} are left out, and tensor code runs in their place: each {fault}"
        for fault, names in alike.items()
    )
