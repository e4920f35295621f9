"""CPU kernels of an iteration: the forest, its verification and the commit.

Tensor code takes some five microseconds for each of its operations, whatever their size, and an iteration of a few
beams has hundreds of them. The kernels do the same work in loops. The tensor code of engine/ is the specification. It
still drafts and verifies for rule `rejection`, a dynamic width and observers, and drafts where a constraint acts or a
backlog is long.

The kernels themselves are in kernels/iteration.py; numba, which compiles them, is imported at their first call. Their
tensors are declared in ops/layout.py.
"""

from __future__ import annotations

import ctypes
import functools
from collections import namedtuple
from collections.abc import Sequence
from typing import Any

import torch

from dsbd_cli.ops import layout as declared
from dsbd_cli.ops.cpu.runtime import CpuKernel, fields, kernels, layout, offsets
from dsbd_cli.ops.layout import BEGIN, COMMIT, EXTEND, SIZES, TENSORS, VERIFY, KernelTensors, Tensors
from dsbd_cli.ops.memory import CACHE_LINE

RULES = ("coupled", "search")
WORK = 16  # multiplications that take as long as a pair of a pool, about
_NUMBERS = ("coupled", "stopping", "by_beam", "work", "work_bytes", *sorted(declared.NUMBERS - set(SIZES.values())))


class Arguments(ctypes.Structure):
    """Arguments of every kernel: sizes, numbers and the addresses of tensors, 0 where a kernel has none. items: R."""

    _fields_ = fields("taken", "threads", "items", *SIZES.values(), *_NUMBERS, *(tensor.name for tensor in TENSORS))


_names = [field[0] for field in Arguments._fields_]
_Offsets: Any = namedtuple("Offsets", _names)  # type: ignore[misc]
AT = _Offsets(*offsets(Arguments))
LAYOUT = layout(Arguments, constants=declared.CONSTANTS)


@functools.cache
def compiled() -> dict[str, CpuKernel]:
    """Return the kernels by their names, made at the first call."""
    return dict(zip(declared.KERNELS, kernels("iteration", *declared.KERNELS), strict=True))


def fits(rule: str, *, recorded: bool = False) -> bool:
    """Return whether the kernels have a rule. recorded: they must record the distribution that drafts are drawn
    from."""
    return rule in RULES and not recorded


def _run(takes: KernelTensors, tensors: Tensors, numbers: dict[str, int], work: int, memory: int = 0) -> None:
    """Run a kernel. numbers: sizes and others. work: multiplications, about. memory: bytes that each thread works
    in."""
    rows, run, addresses, copies = numbers["rows"], compiled()[takes.kernel], {}, []
    for name, dtype, apart, written in takes.checked:
        if (value := tensors.get(name)) is not None:
            assert value.dtype is dtype, (name, value.dtype)
            if not apart and not value.is_contiguous():
                assert not written, (name, value.shape, value.stride())
                value = value.contiguous()
                copies.append(value)  # so that it lives until the kernel has run
            addresses[name] = value.data_ptr()
    if memory:
        memory = -(-memory // CACHE_LINE) * CACHE_LINE  # no two threads share a line of the cache
        room = torch.empty(run.threads(work, rows), memory, dtype=torch.uint8, device="cpu")
        addresses["work"], addresses["work_bytes"] = room.data_ptr(), memory
    run(Arguments(items=rows, **numbers, **addresses), work, rows)


def begin(tensors: Tensors, trash: int, last_position: int) -> None:
    """Write the roots, their slots, positions and mask, and the keys of the streams, as a `TensorBuffer` does.

    The input of the forward that runs the backlog first is written too; there may be no backlog. trash: a slot for its
    tokens that do not exist. last_position: largest position of the models.
    """
    sizes = BEGIN.sizes(tensors)
    work = sizes["rows"] * sizes["roots"] * sizes["slots"]
    _run(BEGIN, tensors, sizes | {"trash": trash, "last_position": last_position}, work)


def extend(
    tensors: Tensors, first: int, layer: int, drafts: int, last_position: int, rule: str, flags: Sequence[bool]
) -> None:
    """Draft one layer as `BeamDrafter.drafts` and drafting.base.children do, and write the slots, positions and mask of
    the new nodes.

    first: the first of the nodes above. layer: theirs. drafts: K. flags: of forest_buffer.warp_flags.
    """
    assert fits(rule, recorded="draft_log_q" in tensors)
    sizes = EXTEND.sizes(tensors)
    rows, above, own = sizes["rows"], sizes["above"], sizes["candidates"]
    sizes |= {"first": first, "layer": layer, "drafts": drafts, "last_position": last_position}
    work = rows * (WORK * above * own + drafts * sizes["slots"])
    _run(EXTEND, tensors, sizes | _of(rule, flags), work, 8 * (3 * above * own + 2 * drafts + 2 * above))


def verify(tensors: Tensors, drafts: int, rule: str, flags: Sequence[bool]) -> None:
    """Do what `verify_forest` does. Finished hypotheses change in place.

    The first counters of `verified.report` are done, invalid, steps and the sum of widths. drafts: K. flags: of
    forest_buffer.warp_flags. `own` may be left out.
    """
    assert fits(rule, recorded="draft_log_q" in tensors)
    sizes = VERIFY.sizes(tensors)
    width, layers, own = sizes["beams"], sizes["layers"], sizes["candidates"]
    assert sizes["nodes"] == sizes["above"] == sizes["roots"] + layers * drafts
    work = WORK * sizes["rows"] * (layers + 1) * width * own
    numbers = sizes | {"drafts": drafts} | _of(rule, flags)
    _run(VERIFY, tensors, numbers, work, 8 * (3 * width * own + 6 * width))


def commit(tensors: Tensors, ran: int, stopping: bool) -> None:
    """Do what `commit_beams` does: tokens of finished hypotheses, slots.compact, and the live beams of the next
    iteration, whose history may be that of the old ones.

    Counters 4 to 6 of `verified.report` become used, common_prefix and drafted. ran: nodes that the draft has run; 0:
    it has run nothing new. stopping: there are stop strings.
    """
    old, sizes = tensors["beam_history"], COMMIT.sizes(tensors)
    assert old[0].is_contiguous()
    width, history = sizes["beams"], sizes["history"]
    sizes |= {"ran": ran, "stopping": stopping, "history_row": old.stride(0)}
    work = sizes["rows"] * width * (sizes["window"] + history)
    _run(COMMIT, tensors, sizes, work, 8 * max(width, sizes["roots"]) * history)


def _of(rule: str, flags: Sequence[bool]) -> dict[str, int]:
    return {"coupled": rule == "coupled", "stopping": flags[0], "by_beam": flags[-1]}
