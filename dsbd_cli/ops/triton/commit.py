"""Kernels that keep what survives an iteration.

`commit` makes the final beams the live ones and orders their slots, one program per request. `move` copies the cache
slots that change place.

Letters: R requests, W0 roots, W beams, D layers, N nodes, T suffix window, S slots of the table, L history, F finished
hypotheses kept, P planes of a cache.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from dsbd_cli.ops.layout import COLUMNS, FIRST
from dsbd_cli.ops.triton.distribution import child_path

MOST_BITS = 16384  # of the ancestors of a request at most, padding included
TILE = 32  # tokens of a history that are written at a time
CHUNK = 8  # slots that are moved at a time
COLUMNS_MOVED = 512
HEAD, WIDE = tl.constexpr(FIRST), tl.constexpr(COLUMNS)


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


@triton.jit(do_not_specialize=["nodes", "roots", "depth", "drafts", "beams", "window", "table_slots", "history"])
def commit_kernel(
    parent,
    token,
    valid,
    weight,
    logprob,
    path,
    stop_state,
    root,
    paths,
    ancestors,
    stops,
    active,
    used,
    common_prefix,
    drafted,
    table_positions,
    table_tokens,
    old_history,
    length,
    depths,
    iteration,
    f_length,
    f_origin,
    f_node,
    f_token,
    f_tokens,
    o_valid,
    o_token,
    o_weight,
    o_logprob,
    o_path,
    o_stop_state,
    o_ancestors,
    o_history,
    o_src_slots,
    o_target,
    report,
    history_stride,
    nodes,
    roots,
    depth,
    drafts,
    beams,
    window,
    table_slots,
    history,
    vocabulary,
    WP: tl.constexpr,
    TP: tl.constexpr,
    TILE: tl.constexpr,
    STOPS: tl.constexpr,
):
    """Commit one request. Every value is read before its place is written. A barrier separates the two where different
    warps do them."""
    row = tl.program_id(0).to(tl.int64)
    w = tl.arange(0, WP)
    t = tl.arange(0, TP)
    kept = w < beams
    mine = row * beams + w
    row_nodes = row * nodes
    row_report = report + row * (HEAD + depth * WIDE)
    done = tl.load(row_report + 0) != 0
    steps = tl.load(row_report + 2)
    going = (tl.load(active + row) != 0) & (done == 0)
    n_parent = tl.load(parent + mine, mask=kept, other=0)
    n_token = tl.load(token + mine, mask=kept, other=0)
    alive = (tl.load(valid + mine, mask=kept, other=0) != 0) & going
    begun = tl.load(length + row)
    # the tokens of finished hypotheses, then those of live beams
    h_origin = tl.load(f_origin + mine, mask=kept, other=0)
    h_node = tl.minimum(tl.maximum(tl.load(f_node + mine, mask=kept, other=0), 0), nodes - 1)
    h_token = tl.load(f_token + mine, mask=kept, other=0)
    h_steps = tl.load(f_length + mine, mask=kept, other=1) - begun
    h_steps = tl.minimum(tl.maximum(h_steps, 1), depth + 1)
    h_root = tl.load(root + row_nodes + h_node, mask=kept, other=0)
    h_old = row * beams + tl.maximum(h_origin, 0)
    n_root = tl.load(root + row_nodes + n_parent, mask=kept, other=0)
    none = n_root * 0 - 1
    row_history = old_history + row * history_stride
    end = tl.minimum(begun + depth + 1, history)
    tile = tl.arange(0, TILE)
    for start in tl.range(0, end, TILE):
        column = start + tile
        found = texts(
            f_tokens,
            h_old,
            h_origin,
            row_history,
            h_root,
            begun,
            paths,
            row_nodes,
            h_node,
            h_token,
            h_steps,
            depth,
            history,
            column,
        )
        live = texts(
            f_tokens,
            h_old,
            none,
            row_history,
            n_root,
            begun,
            paths,
            row_nodes,
            n_parent,
            n_token,
            steps + n_root * 0,
            depth,
            history,
            column,
        )
        tl.debug_barrier()
        some = kept[:, None] & (column < end)[None, :]
        tl.store(f_tokens + mine[:, None] * history + column[None, :], found, mask=some)
        tl.store(o_history + mine[:, None] * history + column[None, :], live, mask=some)
        tl.debug_barrier()
    tl.store(f_origin + mine, w.to(tl.int64), mask=kept)
    # slots: the ancestors of live beams stay, in order
    base = tl.load(common_prefix + row)
    held = tl.load(used + row)
    run = tl.where(depth > 0, held + nodes - drafts, tl.load(drafted + row))
    inside = kept[:, None] & (t < window)[None, :]
    bits = tl.load(ancestors + (row_nodes + n_parent)[:, None] * window + t[None, :], mask=inside, other=0) != 0
    bits = bits & alive[:, None]
    keep = tl.max(bits.to(tl.int32), 0) > 0
    place = tl.cumsum(keep.to(tl.int32), 0) - 1
    count = tl.sum(keep.to(tl.int32), 0)
    shared = tl.min((bits | (alive == 0)[:, None]).to(tl.int32), 0) > 0
    parted = tl.min(tl.where(keep & (shared == 0), t, TP), 0)
    common = tl.sum((keep & (t < parted)).to(tl.int32), 0)
    before = base + t
    kept_positions = tl.load(table_positions + row * table_slots + before, mask=keep, other=0)
    kept_tokens = tl.load(table_tokens + row * table_slots + before, mask=keep, other=0)
    o_bits = o_ancestors + mine[:, None] * window
    tl.store(o_bits + t[None, :], w[:, None] + t[None, :] < 0, mask=inside)
    still = tl.minimum(before, table_slots - 1)
    tl.store(o_src_slots + row * window + t, still, mask=t < window)
    tl.store(o_target + row * window + t, still, mask=t < window)
    tl.debug_barrier()
    tl.store(table_positions + row * table_slots + base + place, kept_positions, mask=keep)
    tl.store(table_tokens + row * table_slots + base + place, kept_tokens, mask=keep)
    tl.store(o_src_slots + row * window + place, before, mask=keep)
    tl.store(o_bits + (place - common)[None, :], bits, mask=kept[:, None] & (keep & (place >= common))[None, :])
    ran = tl.minimum(run, base) + tl.sum((keep & (before < run)).to(tl.int32), 0)
    tl.store(used + row, base + count)
    tl.store(common_prefix + row, base + common)
    tl.store(drafted + row, ran)
    tl.store(row_report + 4, base + count)
    tl.store(row_report + 5, base + common)
    tl.store(row_report + 6, ran)
    # beams
    tl.store(o_valid + mine, alive, mask=kept)
    tl.store(o_token + mine, n_token, mask=kept)
    tl.store(o_weight + mine, tl.load(weight + mine, mask=kept, other=0.0), mask=kept)
    tl.store(o_logprob + mine, tl.load(logprob + mine, mask=kept, other=0.0), mask=kept)
    above = row_nodes + n_parent
    tl.store(o_path + mine, child_path(tl.load(path + above, mask=kept, other=0), n_token), mask=kept)
    state = tl.load(stop_state + above, mask=kept, other=1)
    if STOPS:
        state = tl.load(stops + state * vocabulary + n_token, mask=kept, other=1).to(tl.int64)
    else:
        state = state * 0 + 1
    tl.store(o_stop_state + mine, state, mask=kept)
    tl.store(length + row, begun + steps)
    tl.store(depths + row, tl.load(depths + row) + steps)
    tl.store(iteration + row, tl.load(iteration + row) + 1)


@triton.jit(do_not_specialize=["moving", "rows", "slots", "pairs"])
def move_kernel(
    slab,
    source,
    target,
    moving,
    rows,
    slots,
    width,
    pairs,
    CHUNK: tl.constexpr,
    BLOCK: tl.constexpr,
):
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


@torch.library.custom_op("dsbd::commit", mutates_args="unknown")
def commit(
    live: Sequence[Tensor],
    nodes: Sequence[Tensor],
    stops: Tensor,
    active: Tensor,
    table: Sequence[Tensor],
    beams: Sequence[Tensor],
    finished: Sequence[Tensor],
    out: Sequence[Tensor],
    moved: Sequence[Tensor],
    report: Tensor,
    ran: int,
    stopping: bool,
) -> None:
    """Do what `commit_beams` does: tokens of finished hypotheses, slots.compact, and the live beams of the next
    iteration.

    live: parent, token, valid, weight, logprob [R, W]. nodes: path, stop_state, root [R, N], path_tokens [R, N, D],
    ancestors [R, N, T]. table: used, common_prefix, drafted, positions, tokens, which change. beams: history [R, W0,
    L], and length, depth, iteration [R], which change. finished: length, and origin, node, token, tokens, which change.
    out: valid, token, weight, logprob, path, stop_state, ancestors, history [R, W, ..]; the history may be that of
    `beams`. moved: source and destination slots [R, T], to be written. report: of `verify`; 4 to 6 become used,
    common_prefix and drafted. ran: nodes that the draft has run; not read without drafts. stopping: there are stop
    strings.
    """
    rows, width = live[0].shape
    count, window = nodes[4].shape[1:]
    roots, history = beams[0].shape[1:]
    depth = nodes[3].shape[2]
    with torch.cuda.device_of(report):
        commit_kernel[(rows,)](
            *(*live, *nodes, stops, active, *table, *beams, *finished, *out, *moved, report, beams[0].stride(0)),
            *(
                count,
                roots,
                depth,
                count - ran if depth else 0,
                width,
                window,
                table[3].shape[1],
                history,
                stops.shape[1],
            ),
            WP=triton.next_power_of_2(width),
            TP=triton.next_power_of_2(window),
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


@commit.register_fake
def _(*arguments: object) -> None:
    return None


@move.register_fake
def _(slab: Tensor, source: Tensor, target: Tensor) -> None:
    return None
