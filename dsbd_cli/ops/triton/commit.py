"""Kernels that keep what survives an iteration.

`commit` makes the final beams the live ones and orders their slots, one program per request. `move` copies the cache
slots that change place.

Letters: R requests, W0 roots, W beams, D layers, N nodes, T suffix window, S slots of the table, L history, F finished
hypotheses kept, P planes of a cache.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from dsbd_cli.ops.layout import COLUMNS, COMMIT, FIRST, Tensors
from dsbd_cli.ops.triton.distribution import child_path
from dsbd_cli.ops.triton.launch import launch, operator

MOST_BITS = 16384  # of the ancestors of a request at most, padding included
TILE = 32  # tokens of a history that are written at a time
CHUNK = 8  # slots that are moved at a time
COLUMNS_MOVED = 512
REPORT_FIRST, REPORT_COLUMNS = tl.constexpr(FIRST), tl.constexpr(COLUMNS)


@triton.jit
def texts(
    old_tokens, old_of, source, row_history, roots, length, paths, row_nodes, node, token, steps, depth, history, column
):
    """Return the tokens [A, B] of sequences at the places `column`. A sequence is an older one (source >= 0), or a
    root's history, followed by the path to a node and a last token."""
    older = tl.load(
        old_tokens + old_of[:, None] * history + column[None, :],
        mask=(source >= 0)[:, None] & (column < history)[None, :],
        other=0,
    )
    behind = column[None, :] - length
    inside = (source < 0)[:, None] & (column < history)[None, :]
    began = tl.load(
        row_history + roots[:, None] * history + column[None, :],
        mask=inside & (behind < 0),
        other=0,
    )
    last = (steps - 1)[:, None]
    path = tl.load(
        paths + (row_nodes + node)[:, None] * depth + behind,
        mask=inside & (behind >= 0) & (behind < last) & (behind < depth),
        other=0,
    )
    new = tl.where(behind < 0, began, tl.where(behind == last, token[:, None], path))
    return tl.where((source >= 0)[:, None], older, new)


@triton.jit(do_not_specialize=["nodes", "roots", "depth", "ran", "beams", "window", "table_slots", "history"])
def commit_kernel(
    live_parent, live_token, live_valid, live_weight, live_logprob, node_path, node_stop_state, node_root,
    node_path_tokens, node_ancestors, endings_stops, state_active, table_used, table_common_prefix, table_drafted,
    table_positions, table_tokens, beam_history, beam_length, beam_depth, state_iteration, finished_length,
    finished_origin, finished_node, finished_token, finished_tokens, next_valid, next_token, next_weight,
    next_logprob, next_path, next_stop_state, next_ancestors, next_history, moved_source, moved_target,
    verified_report, history_row, nodes, roots, depth, ran, beams, window, table_slots, history, vocabulary,
    WP: tl.constexpr, TP: tl.constexpr, TILE: tl.constexpr, STOPS: tl.constexpr,
):  # fmt: skip
    """Commit one request. Every value is read before its place is written. A barrier separates the two where different
    warps do them."""
    row = tl.program_id(0).to(tl.int64)
    w = tl.arange(0, WP)
    t = tl.arange(0, TP)
    kept = w < beams
    mine = row * beams + w
    row_nodes = row * nodes
    row_report = verified_report + row * (REPORT_FIRST + depth * REPORT_COLUMNS)
    done = tl.load(row_report + 0) != 0
    steps = tl.load(row_report + 2)
    going = (tl.load(state_active + row) != 0) & (done == 0)
    n_parent = tl.load(live_parent + mine, mask=kept, other=0)
    n_token = tl.load(live_token + mine, mask=kept, other=0)
    alive = (tl.load(live_valid + mine, mask=kept, other=0) != 0) & going
    begun = tl.load(beam_length + row)
    # the tokens of finished hypotheses, then those of live beams
    h_origin = tl.load(finished_origin + mine, mask=kept, other=0)
    h_node = tl.minimum(tl.maximum(tl.load(finished_node + mine, mask=kept, other=0), 0), nodes - 1)
    h_token = tl.load(finished_token + mine, mask=kept, other=0)
    h_steps = tl.load(finished_length + mine, mask=kept, other=1) - begun
    h_steps = tl.minimum(tl.maximum(h_steps, 1), depth + 1)
    h_root = tl.load(node_root + row_nodes + h_node, mask=kept, other=0)
    h_old = row * beams + tl.maximum(h_origin, 0)
    n_root = tl.load(node_root + row_nodes + n_parent, mask=kept, other=0)
    none = n_root * 0 - 1
    row_history = beam_history + row * history_row
    end = tl.minimum(begun + depth + 1, history)
    tile = tl.arange(0, TILE)
    for start in tl.range(0, end, TILE):
        column = start + tile
        finished = texts(
            finished_tokens, h_old, h_origin, row_history, h_root, begun, node_path_tokens, row_nodes, h_node,
            h_token, h_steps, depth, history, column,
        )  # fmt: skip
        live = texts(
            finished_tokens, h_old, none, row_history, n_root, begun, node_path_tokens, row_nodes, n_parent, n_token,
            steps + n_root * 0, depth, history, column,
        )  # fmt: skip
        tl.debug_barrier()
        some = kept[:, None] & (column < end)[None, :]
        tl.store(finished_tokens + mine[:, None] * history + column[None, :], finished, mask=some)
        tl.store(next_history + mine[:, None] * history + column[None, :], live, mask=some)
        tl.debug_barrier()
    tl.store(finished_origin + mine, w.to(tl.int64), mask=kept)
    # slots: the ancestors of live beams stay, in order
    base = tl.load(table_common_prefix + row)
    held = tl.load(table_used + row)
    run = tl.where(ran > 0, held + ran, tl.load(table_drafted + row))
    inside = kept[:, None] & (t < window)[None, :]
    bits = tl.load(node_ancestors + (row_nodes + n_parent)[:, None] * window + t[None, :], mask=inside, other=0) != 0
    bits = bits & alive[:, None]
    keep = tl.max(bits.to(tl.int32), 0) > 0
    rank = tl.cumsum(keep.to(tl.int32), 0) - 1
    count = tl.sum(keep.to(tl.int32), 0)
    shared = tl.min((bits | (alive == 0)[:, None]).to(tl.int32), 0) > 0
    parted = tl.min(tl.where(keep & (shared == 0), t, TP), 0)
    common = tl.sum((keep & (t < parted)).to(tl.int32), 0)
    before = base + t
    kept_positions = tl.load(table_positions + row * table_slots + before, mask=keep, other=0)
    kept_tokens = tl.load(table_tokens + row * table_slots + before, mask=keep, other=0)
    o_bits = next_ancestors + mine[:, None] * window
    tl.store(o_bits + t[None, :], w[:, None] + t[None, :] < 0, mask=inside)
    still = tl.minimum(before, table_slots - 1)
    tl.store(moved_source + row * window + t, still, mask=t < window)
    tl.store(moved_target + row * window + t, still, mask=t < window)
    tl.debug_barrier()
    tl.store(table_positions + row * table_slots + base + rank, kept_positions, mask=keep)
    tl.store(table_tokens + row * table_slots + base + rank, kept_tokens, mask=keep)
    tl.store(moved_source + row * window + rank, before, mask=keep)
    tl.store(o_bits + (rank - common)[None, :], bits, mask=kept[:, None] & (keep & (rank >= common))[None, :])
    still_run = tl.minimum(run, base) + tl.sum((keep & (before < run)).to(tl.int32), 0)
    tl.store(table_used + row, base + count)
    tl.store(table_common_prefix + row, base + common)
    tl.store(table_drafted + row, still_run)
    tl.store(row_report + 4, base + count)
    tl.store(row_report + 5, base + common)
    tl.store(row_report + 6, still_run)
    # beams
    tl.store(next_valid + mine, alive, mask=kept)
    tl.store(next_token + mine, n_token, mask=kept)
    tl.store(next_weight + mine, tl.load(live_weight + mine, mask=kept, other=0.0), mask=kept)
    tl.store(next_logprob + mine, tl.load(live_logprob + mine, mask=kept, other=0.0), mask=kept)
    above = row_nodes + n_parent
    tl.store(next_path + mine, child_path(tl.load(node_path + above, mask=kept, other=0), n_token), mask=kept)
    state = tl.load(node_stop_state + above, mask=kept, other=1)
    if STOPS:
        state = tl.load(endings_stops + state * vocabulary + n_token, mask=kept, other=1).to(tl.int64)
    else:
        state = state * 0 + 1
    tl.store(next_stop_state + mine, state, mask=kept)
    tl.store(beam_length + row, begun + steps)
    tl.store(beam_depth + row, tl.load(beam_depth + row) + steps)
    tl.store(state_iteration + row, tl.load(state_iteration + row) + 1)


@triton.jit(do_not_specialize=["moving", "rows", "slots", "pairs"])
def move_kernel(
    slab, source, target, moving, rows, slots, width, pairs, CHUNK: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Move slots of one row of one plane, in order. No target is behind its source, so each slot is read before it is
    written."""
    program = tl.program_id(0).to(tl.int64)
    row = program % moving
    plane_row = program // moving * rows + row
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    base = slab + plane_row * slots * width
    chunk = tl.arange(0, CHUNK)
    for start in tl.range(0, pairs, CHUNK):
        i = start + chunk
        here = tl.load(source + row * pairs + i, mask=i < pairs, other=0)
        there = tl.load(target + row * pairs + i, mask=i < pairs, other=0)
        moves = here != there
        if tl.max(moves.to(tl.int32), 0) > 0:
            some = moves[:, None] & (column < width)[None, :]
            x = tl.load(base + here[:, None] * width + column[None, :], mask=some)
            tl.debug_barrier()
            tl.store(base + there[:, None] * width + column[None, :], x, mask=some)
            tl.debug_barrier()


def fits(beams: int, window: int) -> bool:
    """Return whether `commit` supports these numbers of beams and of slots of the suffix."""
    return triton.next_power_of_2(beams) * triton.next_power_of_2(window) <= MOST_BITS


@operator(COMMIT, "int ran, bool stopping")
def commit(tensors: Tensors, ran: int, stopping: bool) -> None:
    """Do what `commit` of ops/cpu/iteration.py does."""
    sizes = COMMIT.sizes(tensors)
    width = sizes["beams"]
    launch(
        commit_kernel,
        tensors,
        sizes | {"ran": ran, "history_row": tensors["beam_history"].stride(0)},
        WP=triton.next_power_of_2(width),
        TP=triton.next_power_of_2(sizes["window"]),
        TILE=TILE,
        STOPS=stopping,
        num_warps=4 if width < 8 else 8,
    )


@torch.library.custom_op("dsbd::move", mutates_args="unknown")
def move(slab: Tensor, source: Tensor, target: Tensor) -> None:
    """Copy slots within each row of each plane of a slab [P, R', S, width], in place.

    source, target: [R, T] int64, R <= R'. No target is larger than its source, and both ascend among the pairs that
    differ.
    """
    planes, rows, slots, width = slab.shape
    moving, pairs = source.shape
    block = min(COLUMNS_MOVED, triton.next_power_of_2(width))
    grid = (planes * moving, triton.cdiv(width, block))
    with torch.cuda.device_of(slab):
        move_kernel[grid](
            slab, source, target, moving, rows, slots, width, pairs, CHUNK=CHUNK, BLOCK=block, num_warps=4
        )


@move.register_fake
def _(slab: Tensor, source: Tensor, target: Tensor) -> None:
    return None
