"""What every kernel is launched with, without a GPU: the operators run on empty tensors, and the launch is recorded in
place of being made.

As a program it compiles all of it for GPUs that are not here and prints one JSON line per compilation:

    python -m tests.helpers.shapes 80 90

It must run where TRITON_INTERPRET is not set: triton decides at the import of a kernel.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from dsbd_cli.ops.layout import BEGIN, COMMIT, EXTEND, SIZES, VERIFY, KernelTensors, Tensors
from dsbd_cli.ops.triton import attention, candidates, commit, draft, layers, products, verify

READER = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
VOCABULARY = 32_000
TYPES = {
    torch.bool: "i1",
    torch.int32: "i32",
    torch.int64: "i64",
    torch.float16: "fp16",
    torch.bfloat16: "bf16",
    torch.float32: "fp32",
    torch.float64: "fp64",
}


@dataclass(frozen=True)
class Shape:
    """W, K, D, C, the rule, and what the rows ask for: stop strings, top-k, top-p, min-p, greedy rows, scope `beam`."""

    beams: int
    drafts: int
    depth: int
    candidates: int
    rule: str
    flags: tuple[bool, ...] = (False, True, False, False, False, False)


SHAPES = [
    Shape(4, 8, 4, 58, "coupled"),
    Shape(4, 8, 4, 58, "coupled", (True,) * 5 + (False,)),
    Shape(4, 8, 4, 58, "coupled", (True,) * 6),
    Shape(4, 8, 4, 8, "search"),
    Shape(4, 8, 4, 58, "rejection"),
    Shape(8, 16, 6, 58, "coupled"),
    Shape(16, 16, 4, 256, "coupled"),
    Shape(16, 32, 4, 32, "search", (True, False, False, False, False, False)),
    Shape(1, 1, 8, 58, "coupled"),
]
WIDTHS = (1024, 4096, 8192)  # of hidden states


@dataclass
class Launch:
    """One launch: the kernel, its arguments by name, and the constants among them."""

    kernel: Any
    arguments: dict[str, Any]
    warps: int
    registers: int | None
    stages: int = 3


class _Recorded:
    """Stands in for a kernel."""

    def __init__(self, kernel: Any, launches: list[Launch]) -> None:
        self._kernel, self._launches = kernel, launches
        self.arg_names = kernel.arg_names

    def __getitem__(self, grid: Any) -> Any:
        def launched(
            *arguments: Any,
            num_warps: int,
            enable_fp_fusion: bool = True,
            maxnreg: int | None = None,
            num_stages: int = 3,
            **constants: Any,
        ) -> None:
            named = dict(zip(self._kernel.arg_names, arguments, strict=False)) | constants
            self._launches.append(Launch(self._kernel, named, num_warps, maxnreg, num_stages))

        return launched


@contextmanager
def _recorded(modules: dict[ModuleType, str]) -> Iterator[list[Launch]]:
    """Kernels of modules, by their names without `_kernel`, are recorded in place of being launched."""
    recorded: list[Launch] = []
    kept = {}
    for module, names in modules.items():
        for name in (f"{stem}_kernel" for stem in names.split()):
            kept[module, name] = getattr(module, name)
            setattr(module, name, _Recorded(kept[module, name], recorded))
    try:
        yield recorded
    finally:
        for (module, name), kernel in kept.items():
            setattr(module, name, kernel)


def launches(shape: Shape, rows: int = 2) -> list[Launch]:
    """What the operators of an iteration launch for a shape."""
    modules = {candidates: "candidates", draft: "begin extend", verify: "verify", commit: "commit move"}
    with _recorded(modules) as recorded:
        _call(shape, rows)
    return recorded


def layer_launches() -> list[Launch]:
    """What the operators of a layer launch: rows of several widths, 32 heads and 8 of keys, each 128 wide."""
    with _recorded({layers: "norm gated rotate"}) as recorded:
        for dtype in (torch.bfloat16, torch.float32):
            for width in WIDTHS:
                x = torch.empty(2, width, dtype=dtype)
                layers.norm_op._init_fn(x, x, x[0], 1e-5, False)
            for gelu in (False, True):
                layers.gated._init_fn(torch.empty(2, 2 * WIDTHS[-1], dtype=dtype), gelu)
            both, angles = torch.empty(1, 3, (32 + 2 * 8) * 128, dtype=dtype), torch.empty(1, 3, 128, dtype=dtype)
            slots, planes = torch.empty(3, dtype=torch.int64), torch.empty(1, 16, 8, 128, dtype=dtype)
            layers.rotate_op._init_fn(both, angles, angles, slots, planes, planes)
            layers.rotate_op._init_fn(both, angles, angles, slots, planes, planes, angles, angles, 1e-6, False)
    return recorded


def product_launches() -> list[Launch]:
    """What products launch: weights that take one part of the sum, and several."""
    with _recorded({products: "linear summed"}) as recorded:
        for dtype in products.INNER:
            for outer in (4096, 32_000):
                products.linear._init_fn(torch.empty(2, 4096, dtype=dtype), torch.empty(outer, 4096, dtype=dtype), None)
        for outer in (4096, 4096 * 8):
            bias = torch.empty(outer, dtype=torch.bfloat16)
            products.linear._init_fn(bias[None, :4096], torch.empty(outer, 4096, dtype=torch.bfloat16), bias)
    return recorded


def attention_launches() -> list[Launch]:
    """What attention launches: 32 heads and 8 of keys of the widths in use."""
    with _recorded({attention: "prompt suffix"}) as recorded:
        for dtype, widest in attention.WIDEST.items():
            for dim in sorted({64, widest}):
                query, keys = torch.empty(1, 32, 36, dim, dtype=dtype), torch.empty(1, 8, 4096, dim, dtype=dtype)
                seen, prompt = torch.empty(1, 36, 4096, dtype=torch.bool), torch.empty(1, dtype=torch.int64)
                for exact in (True, False):
                    attention.attention._init_fn(query, keys, keys, seen, prompt, 1.0, exact)
    return recorded


def _call(shape: Shape, rows: int) -> None:
    width, drafts, depth, count = shape.beams, shape.drafts, shape.depth, shape.candidates
    nodes, window, slots, history, draft_backlog = width + drafts * depth, 64, 512, 256, 3

    def ints(*size: int) -> Tensor:
        return torch.empty(rows, *size, dtype=torch.int64)

    for dtype in candidates.ROUNDS:
        candidates.candidates._init_fn(torch.empty(rows, nodes, VOCABULARY, dtype=dtype), count)
    sizes = dict.fromkeys(SIZES.values(), 0) | {
        "rows": rows, "roots": width, "beams": width, "drafts": drafts, "depth": depth, "layers": depth,
        "nodes": nodes, "above": nodes, "candidates": count, "draft_candidates": count, "window": window,
        "slots": slots, "table_slots": slots, "history": history, "backlog_nodes": draft_backlog + width,
        "vocabulary": VOCABULARY, "stop_states": 4,
    }  # fmt: skip

    def tensors(kernel: KernelTensors, **changed: int) -> Tensors:
        left_out = {"own"} if shape.rule == "rejection" else {"own", "draft"}
        return {
            tensor.name: torch.empty([dim.of(sizes | changed) for dim in tensor.shape], dtype=tensor.dtype)
            for tensor in kernel.tensors
            if tensor.owner not in left_out
        }

    draft.begin(tensors(BEGIN), slots - 1, 4095)
    draft.extend(tensors(EXTEND, above=drafts), width, 1, drafts, 4095, shape.rule, shape.flags)
    verify.verify(tensors(VERIFY), drafts, shape.rule, shape.flags)
    commit.commit(tensors(COMMIT), width, shape.flags[0])
    commit.move._init_fn(torch.empty(4, rows, slots, 1024, dtype=torch.bfloat16), ints(window), ints(window))


def compiled(launch: Launch, capability: int) -> dict[str, object]:
    """Registers, bytes of stack (what is spilled) and shared memory, read from the machine code of a launch on a GPU of
    this capability."""
    kernel = launch.kernel
    constant = {p.name for p in kernel.params if p.is_constexpr}
    special = {p.name for p in kernel.params if not p.do_not_specialize}  # as triton does at a launch
    signature, fixed, attributes = {}, {}, {}
    for index, name in enumerate(kernel.arg_names):
        value = launch.arguments[name]
        if name in constant:
            signature[name], fixed[(index,)] = "constexpr", value
        elif isinstance(value, Tensor):
            signature[name], attributes[(index,)] = "*" + TYPES[value.dtype], [["tt.divisibility", 16]]
        else:
            signature[name] = "fp32" if isinstance(value, float) else "i32"
            if isinstance(value, int) and value % 16 == 0 and name in special:
                attributes[(index,)] = [["tt.divisibility", 16]]
    source = ASTSource(fn=kernel, signature=signature, constexprs=fixed, attrs=attributes)
    made = triton.compile(
        source,
        target=GPUTarget("cuda", capability, 32),
        options={
            "num_warps": launch.warps,
            "num_stages": launch.stages,
            "enable_fp_fusion": False,
            "maxnreg": launch.registers,
        },
    )
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(made.asm["cubin"])
        file.flush()
        command = [str(READER), "--dump-resource-usage", file.name]
        said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    used = dict(re.findall(r"(\w+):(\d+)", said))
    return {
        "kernel": kernel.__name__,
        "capability": capability,
        "warps": launch.warps,
        "registers": int(used["REG"]),
        "spilled": int(used["STACK"]),
        "shared": made.metadata.shared,
    }


def distinct() -> Iterator[tuple[str, Launch]]:
    """All launches that are compiled apart, and what they are for."""
    seen = set()
    for use, group in (
        *((repr(shape), launches(shape)) for shape in SHAPES),
        ("layer", layer_launches()),
        ("product", product_launches()),
        ("attention", attention_launches()),
    ):
        for launch in group:
            key = (
                launch.kernel.__name__,
                launch.warps,
                *(
                    value.dtype if isinstance(value, Tensor) else value
                    for name, value in launch.arguments.items()
                    if name.isupper() or isinstance(value, Tensor)
                ),
            )
            if key not in seen:
                seen.add(key)
                yield use, launch


def main() -> None:
    for use, launch in distinct():
        for capability in map(int, sys.argv[1:]):
            print(json.dumps({"use": use, **compiled(launch, capability)}), flush=True)


if __name__ == "__main__":
    main()
