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
from torch import Tensor

from dsbd_cli.ops import reference
from dsbd_cli.ops.cpu import (
    attention,
    blocks,
    candidates,
    experts,
    int4,
    int8,
    int8_groups,
    iteration,
    layer,
    linear,
    logsumexp,
    program,
    prompt_attention,
    scan,
    suffix,
)
from dsbd_cli.ops.cpu.runtime import FLOATS, compile_beside, may_use_matrix_units, team, unloadable
from dsbd_cli.ops.interface import Backend, Linear, OpChoice, Ops, RowsLinear, TextIndex
from dsbd_cli.ops.processor import ON_ARM, Processor, current
from dsbd_cli.ops.quantized_weight import GROUP, Blocks, FourBit, QuantizedWeight
from dsbd_cli.ops.triton import available
from dsbd_cli.ops.triton.trial import faults

LAYERS = ("norm", "gated", "rotate", "program")
MIXERS = ("output_gate", "gated_norm", "delta_inputs", "step_sizes", "scan")  # of a decoder with recurrent layers
MODEL = ("linear", "path_attention", "prompt_attention", "log_total")
DECODER = (*LAYERS, *MODEL)
EXPERTS = ("experts",)  # of a decoder with mixtures
SUFFIX_BYTES, MOST_MATCH, SKIPPED = suffix.BYTES, suffix.MOST_MATCH, suffix.SKIPPED
foresee, look_back = suffix.foresee, suffix.look_back
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
    operations, report = dict[str, Any](), list[OpChoice]()
    missing = "not wanted" if kernels is False else triton_missing(device, asked=bool(kernels))
    names = [name for name in wanted if name in TRITON] if missing is None else []
    faulty = faults(device) if names and device.type == "cuda" else {}
    by_triton = triton_ops(names) if names else {}
    for name in wanted:
        reason = missing or faulty.get(name) or _triton_unfit(name, dtype, widths)
        if name in by_triton and reason is None:
            operations[name], choice = (
                by_triton[name],
                OpChoice(name, "triton", f"its results on {device} are those of torch"),
            )
        elif device.type == "cpu":
            kernel, why = choose(name, dtype, "plain" if name == "linear" else "", widths)
            backend = "torch" if kernel is None else kernel.backend
            choice = OpChoice(name, backend, why or reason or f"no kernel serves {device}")
            if name == "linear":
                operations[name] = packed_linear
            elif kernel is not None:
                operations[name] = kernel.op
        else:
            choice = OpChoice(name, "torch", reason or f"no kernel serves {device}")
        report.append(choice)
    return Ops(**operations, report=tuple(report))


# kernels of the CPU


def begin_compiling() -> None:
    """Begin to compile the kernels of iterations in processes of their own, where they are not compiled yet."""
    for module in ("iteration", "candidates", "suffix"):
        compile_beside(module)


class Kernel(NamedTuple):
    """A kernel for an operation on the CPU, and where it serves.

    name: the operation. op: what `Ops` holds for it, or the class of a product. load: compiles it. instead: what a
    warning says that happens where it cannot be loaded. least, most: processors; an ARM counts as AVX2. dtypes: of the
    model; empty: any. weights: their format: `plain`, in the dtype of the model, `int8`, `int4` or `int8_groups`; empty
    for an operation without weights. step: widths must be multiples of it. needs: what must be true, each with the
    reason where it is not. trial: returns what is wrong with its results. beside: an operation, and its weights, that a
    kernel must serve, too. reason: why it serves. elsewhere: why it does not serve on other processors.
    """

    name: str
    op: Any
    load: Callable[[], object] = lambda: None
    instead: str = ""
    least: Processor = Processor.AVX2
    most: Processor = Processor.AMX
    dtypes: tuple[torch.dtype, ...] = ()
    weights: str = ""
    step: int = 1
    needs: tuple[tuple[Callable[[], object], str], ...] = ()
    trial: Callable[[Any, torch.dtype], str | None] | None = None
    beside: tuple[str, str] | None = None
    reason: str = "it runs on this processor"
    elsewhere: str = "the processor does not multiply and add in one step"
    backend: Backend = "numba"

    def fits(self, processor: Processor) -> bool:
        """Return whether the kernel is for this processor."""
        return self.least <= processor <= self.most or (self.least == Processor.AVX2 and ON_ARM)


def _load_candidates() -> object:
    """Load the kernel of `candidates`, and that of `log_total`, by which tensor code gives a row the same bits where it
    selects."""
    return candidates.compiled(), logsumexp.compiled()


def _draft(rule: str | None = None, *sizes: int) -> ModuleType | None:
    return iteration if rule is None or iteration.fits(rule, recorded=bool(sizes[-1])) else None


def _verify(
    beams: int, roots: int, candidates: int, drafts: int, rule: str, *, own_limits: bool = False
) -> ModuleType | None:
    return iteration if iteration.fits(rule) else None


def _commit(beams: int, window: int) -> ModuleType:
    return iteration


def pick(table: Tensor, dtype: torch.dtype) -> RowsLinear:
    """Return products with picked rows of a table [V, i]. They are packed if the kernel can read the table as it is."""
    if table.dtype != dtype or not linear.CompiledLinear.fits(table) or table.stride(1) != 1:
        return reference.PickedRows(table, dtype)
    return linear.CompiledPickedRows(table)


def _int8_fault(backend: type[int8.CompiledInt8] | type[int8.TorchInt8], dtype: torch.dtype) -> str | None:
    return int8.fault(backend, packed_linear)


def _int4_fault(backend: type[int4.CompiledInt4], dtype: torch.dtype) -> str | None:
    return int4.fault(backend, packed_linear)


def _int8_groups_fault(backend: type[int8_groups.CompiledInt8Groups], dtype: torch.dtype) -> str | None:
    return int4.fault(backend, packed_linear, limit=0.02)


def _load_int4() -> object:
    """Load the kernels of int4, and those of int8, which quantize rows for both."""
    return int8.compiled(), int4.compiled()


BASE, AVX512_BF16, AMX = Processor.BASE, Processor.AVX512_BF16, Processor.AMX
F32, BF16 = (torch.float32,), (torch.bfloat16,)
_ITERATIONS = "tensor code computes what lies between the forwards"
_LAYERS = "torch computes norms, rotations and activations"
_X86 = (lambda: not ON_ARM, "the kernel was never measured on an ARM")
_TEAM = (team, "torch has no team of threads that kernels can share")
_UNITS = (may_use_matrix_units, "the system does not let this process use matrix units")
_LINEAR = functools.partial(
    Kernel, load=linear.compiled, instead="torch computes linear layers", needs=(_X86, _TEAM), trial=linear.fault
)
_LINES = "weights lie in the order in which the kernel reads them"
_INT8 = functools.partial(
    Kernel, "linear", int8.CompiledInt8, int8.compiled, "torch computes products in int8", weights="int8",
    trial=_int8_fault,
)  # fmt: skip
# For an operation the first kernel serves that can; torch's plain code where none can. Nothing else chooses.
TABLE = (
    Kernel("norm", layer.norm, layer.compiled, _LAYERS, dtypes=FLOATS, step=layer.STEP),
    Kernel("gated", layer.gated, layer.compiled, _LAYERS, dtypes=FLOATS, step=layer.STEP),
    Kernel("experts", experts, experts.compiled, "torch chooses experts", dtypes=FLOATS, step=layer.STEP),
    Kernel("rotate", layer.rotate, layer.compiled, _LAYERS, dtypes=FLOATS, step=layer.STEP),
    Kernel("output_gate", layer.output_gate, layer.compiled, _LAYERS, dtypes=FLOATS, step=layer.STEP),
    Kernel("gated_norm", layer.gated_norm, layer.compiled, _LAYERS, dtypes=FLOATS, step=layer.STEP),
    Kernel("delta_inputs", layer.delta_inputs, layer.compiled, _LAYERS),
    Kernel("step_sizes", layer.step_sizes, layer.compiled, _LAYERS),
    Kernel("program", program.loop, program.compiled, "layers are called one by one", dtypes=FLOATS, step=layer.STEP,
           beside=("norm", "")),
    _LINEAR("linear", linear.CompiledLinear, dtypes=F32, weights="plain", reason=_LINES),
    _LINEAR("linear", linear.CompiledLinear, most=AVX512_BF16, dtypes=BF16, weights="plain", reason=_LINES),
    _LINEAR("linear", linear.CompiledLinear, least=AMX, dtypes=BF16, weights="plain", needs=(_TEAM, _UNITS),
            reason="matrix units read weights as they lie in the checkpoint"),
    Kernel("linear", linear.TorchLinear, least=BASE, weights="plain", trial=linear.fault, backend="torch",
           reason="weights are packed by oneDNN"),
    _INT8(most=AVX512_BF16, needs=(_X86, _TEAM)),
    _INT8(least=AMX, needs=(_TEAM, _UNITS)),
    Kernel("linear", int8.TorchInt8, least=BASE, weights="int8", trial=_int8_fault, backend="torch"),
    Kernel("linear", int4.CompiledInt4, _load_int4, "nothing computes products in int4", dtypes=FLOATS, weights="int4",
           needs=(_X86, _TEAM), trial=_int4_fault, elsewhere="int4 needs x86 with AVX2"),
    Kernel("linear", int8_groups.CompiledInt8Groups, int8_groups.compiled, "quantised files are dequantised",
           dtypes=FLOATS, weights="int8_groups", needs=(_X86, _TEAM), trial=_int8_groups_fault,
           elsewhere="groups of bytes need x86 with AVX2"),
    Kernel("pick", pick, beside=("linear", "plain"), reason="rows are packed from where they lie",
           elsewhere="torch computes products with picked rows"),
    Kernel("path_attention", attention, attention.compiled, "torch computes attention over the suffix",
           dtypes=FLOATS),
    Kernel("prompt_attention", prompt_attention, prompt_attention.compiled,
           "torch computes attention to prompts", most=AVX512_BF16, dtypes=FLOATS, needs=(_X86, _TEAM),
           elsewhere="the kernel is for processors with AVX2 and without matrix units"),
    Kernel("log_total", logsumexp.log_total, logsumexp.compiled, "torch computes the sums over the vocabulary"),
    Kernel("candidates", candidates.candidates, _load_candidates, _ITERATIONS),
    Kernel("draft", _draft, iteration.compiled, _ITERATIONS),
    Kernel("verify", _verify, iteration.compiled, _ITERATIONS),
    Kernel("commit", _commit, iteration.compiled, _ITERATIONS),
    Kernel("scan", scan.compiled, scan.compiled, "torch computes recurrent layers"),
)  # fmt: skip
_SUFFIX = Kernel("suffix", suffix, suffix.compiled, "nothing is looked up", least=BASE)
_UNPACK = Kernel("unpack", blocks, blocks.compiled, "torch unpacks the blocks of GGUF files", needs=(_X86, _TEAM))
_unloadable = functools.cache(unloadable)


def choose(
    name: str, dtype: torch.dtype, weights: str = "", widths: frozenset[int] = frozenset()
) -> tuple[Kernel | None, str]:
    """Return the kernel of TABLE that serves an operation on this processor, and why; None, and why not, which is empty
    for an operation without kernels."""
    reason = ""
    for kernel in TABLE:
        if (kernel.name, kernel.weights) == (name, weights):
            missing = _missing(kernel, dtype, widths)
            if missing is None:
                return kernel, kernel.reason
            reason = missing
    return None, reason


@functools.cache
def _missing(kernel: Kernel, dtype: torch.dtype, widths: frozenset[int]) -> str | None:
    """Return why a kernel cannot serve here; None where it can."""
    if kernel.dtypes and dtype not in kernel.dtypes:
        return f"the kernels do not compute in {dtype}"
    if not kernel.fits(current()):
        return kernel.elsewhere
    for need, why in kernel.needs:
        if not need():
            return why
    if any(width % kernel.step for width in widths):
        return f"a width is not a multiple of {kernel.step}"
    if kernel.beside is not None:
        name, weights = kernel.beside
        other, why = choose(name, dtype, weights, widths)
        if other is None or other.backend == "torch":
            return why if not weights else kernel.elsewhere if dtype in FLOATS else ""
    if (reason := _unloadable(kernel.load, kernel.instead)) is not None:
        return reason
    return None if kernel.trial is None else kernel.trial(kernel.op, dtype)


def packed_linear(
    weights: Sequence[Tensor], biases: Sequence[Tensor | None], experts: int = 1
) -> linear.PackedProduct | None:
    """Return layers as one packed product; None where no packed product gives the results of the plain one.

    weights: [o, i] of each layer, of one dtype, on a CPU. biases: [o] or None of each layer. experts: of a mixture, to
    which the same number of weights each belongs.
    """
    like = weights[0]
    for kernel in TABLE:
        mine = (kernel.name, kernel.weights) == ("linear", "plain") and kernel.op.fits(like)
        if mine and (experts == 1 or kernel.backend == "numba") and _missing(kernel, like.dtype, frozenset()) is None:
            return linear.PackedProduct(weights, biases, kernel.op, experts)
    return None


def packing_works(dtype: torch.dtype) -> bool:
    """Return whether our kernel or this build of torch has a packed product here that equals the plain one."""
    return choose("linear", dtype, "plain")[0] is not None


def quantized_linear(
    weights: Sequence[Tensor], biases: Sequence[Tensor | None], outliers: Tensor, weight_format: str
) -> int8.Int8Product:
    """Return layers as one product in int8 or int4. The input channels `outliers` [k] are not quantized.

    weights: [o, i] of each layer, of one dtype, on a CPU. biases: [o] or None of each layer.
    """
    kernel, reason = choose("linear", weights[0].dtype, weight_format)
    assert kernel is not None, reason
    return int8.Int8Product(weights, biases, outliers, kernel.op, packed_linear)


def stored_linear(
    weights: Sequence[QuantizedWeight], biases: Sequence[Tensor | None], outliers: Tensor, dtype: torch.dtype
) -> int8.Int8Product:
    """Return layers of a quantised file as one product: in four bits if all of them have no more, else in bytes. The
    input channels `outliers` [k] are not quantized.

    weights: [o, i] of each layer. biases: [o] or None of each layer. dtype: of inputs and results. Raises ModelError
    where scales are NaN or infinite.
    """
    sources, four_bits = _sources(weights)
    kernel, reason = choose("linear", dtype, "int4" if four_bits else "int8_groups")
    assert kernel is not None, reason
    product = int8.Int8Product(sources, biases, outliers, kernel.op, packed_linear, dtype)
    if not bool(product.backend.scales.isfinite().all()):
        for weight in weights:
            weight.check()
    return product


def _sources(weights: Sequence[QuantizedWeight]) -> tuple[Sequence[Any], bool]:
    """Return what a product of several weights is packed from, and whether that has four bits in all of them."""
    if weights[0].shape[1] % GROUP:
        return [weight.plain(torch.float32) for weight in weights], False
    stored = [form for form in (weight.blocks() for weight in weights) if form is not None]
    if len(stored) == len(weights):
        return stored, blocks.are_four_bits([form.kind for form in stored])
    levels = list[FourBit]()
    for weight in weights:
        form = weight.fourbit()
        if form is None or (levels and not form.like(levels[0])):
            return weights, False
        levels.append(form)
    return levels, True


def unpacked_blocks(rows: Blocks) -> Tensor | None:
    """Return rows [o, i] float32 of a GGUF file; None where no kernel unpacks its blocks."""
    return blocks.dequantize(rows) if _missing(_UNPACK, torch.float32, frozenset()) is None else None


def suffix_missing() -> str | None:
    """Return why no suffix index can be had on this machine; None where one can."""
    return _missing(_SUFFIX, torch.float32, frozenset())


def suffix_index(room: int) -> TextIndex:
    """Return an empty suffix index. room: tokens that it may hold, each with SUFFIX_BYTES of memory."""
    return suffix.SuffixIndex(room)


def quantize_missing(weight_format: str, dtype: torch.dtype = torch.float32, *, experts: bool = False) -> str | None:
    """Return why there are no exact products in int8, or none in int4, on this processor and with this build of torch;
    None where there are. weight_format: `int8`, `int4`, or `stored` for quantised files. dtype: of inputs and
    results. experts: products have experts, too."""
    more = "int8_groups" if weight_format == "stored" else "int8"  # int4 leaves some layers to int8
    for weights in dict.fromkeys(("int4" if weight_format == "stored" else weight_format, more)):
        kernel, reason = choose("linear", dtype, weights)
        if kernel is None:
            return reason
        if experts and kernel.backend == "torch":
            return "quantized experts need x86 with AVX2"
    return None


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
