"""The loop of program.py in numba: it runs kernels, one after another, each on its number of threads.

Addresses are int64. Nothing checks them here; program.py makes sure that they are right.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types

from dsbd_cli.ops.cpu.kernels.compiler import KernelCompiler
from dsbd_cli.ops.cpu.kernels.simd import I32, I64, get_i64, operation, pointer, put_i64
from dsbd_cli.ops.cpu.program import LAYOUT, RUN

compiled = KernelCompiler("programs", seconds=1, layout=LAYOUT)

# `at` is the address of a program.ProgramArguments, whose fields have these offsets.
COUNT, CALLS, TEAM = RUN
CALL, WORD = 24, 8


@operation(types.void, types.int64, types.int64)
def call(builder: Any, kernel: Any, arguments: Any) -> Any:
    kind = ir.FunctionType(ir.VoidType(), [I64])
    builder.call(pointer(builder, kernel, kind), [arguments])


@operation(types.void, types.int64, types.int64, types.int64, types.int64)
def call_together(builder: Any, team: Any, kernel: Any, arguments: Any, threads: Any) -> Any:
    """Call a kernel on several threads. team: the address of GOMP_parallel."""
    kind = ir.FunctionType(ir.VoidType(), [I64, I64, I32, I32])
    call_arguments = [kernel, arguments, builder.trunc(threads, I32), ir.Constant(I32, 0)]
    builder.call(pointer(builder, team, kind), call_arguments)


@compiled.addressed
def run(at):
    """Run the kernels of the table. The two counters that begin a kernel's arguments are set to 0 before it runs."""
    entry = get_i64(at + CALLS)
    for _ in range(get_i64(at + COUNT)):
        kernel, arguments, threads = get_i64(entry), get_i64(entry + WORD), get_i64(entry + 2 * WORD)
        put_i64(arguments, 0)
        put_i64(arguments + WORD, 0)
        if threads == 1:
            call(kernel, arguments)
        else:
            call_together(get_i64(at + TEAM), kernel, arguments, threads)
        entry += CALL
