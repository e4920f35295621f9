"""A packed forest gives the logits of its separate paths, whatever is written, moved or grown on the way."""

from __future__ import annotations

import gc
import random
import weakref
from dataclasses import replace
from typing import Any

import pytest
import torch

from dsbd_cli.engine.protocols import ForestInput, ForestModel
from dsbd_cli.models.attention.metadata import AttentionMetadata, LayerMask
from dsbd_cli.models.transformers_backend.attention import NAME, same_logits
from dsbd_cli.models.transformers_backend.causal import CausalForestModel
from tests.helpers.tiny import FIT, Row, build, forest_input, plain_logits, worst

SLOTS = 64
TRASH = SLOTS - 1


def prompts(rng: random.Random, free: list[list[int]], lengths: list[int]) -> tuple[list[Row], list[list[int]]]:
    rows = [Row() for _ in lengths]
    nodes = []
    for row, length, slots in zip(rows, lengths, free, strict=True):
        nodes.append([row.add(rng, len(row.tokens) - 1, slots) for _ in range(length)])
    return rows, nodes


def grow(rng: random.Random, row: Row, free: list[int], count: int) -> list[int]:
    """New nodes: several roots on the last prompt token, then anywhere below."""
    last, new = len(row.tokens) - 1, []
    for index in range(count):
        new.append(row.add(rng, last if index < 3 else rng.choice(new), free))
    return new


@pytest.mark.parametrize("name", FIT)
def test_forest_equals_separate_paths(name: str) -> None:
    """Guards masks, positions and windows of every family: a bool mask added by eager, a window by slot or not applied,
    one mask for layers of two kinds, positions by slot. Prompts are longer than the windows; prefill by rows; absent
    nodes in the trash slot."""
    rng = random.Random(3)
    model = build(name)
    plain = build(name)  # apart, so that the reference does not run through the attention function under test
    forest = CausalForestModel(model, name)
    forest.reserve(2, SLOTS)
    free = [list(range(TRASH)) for _ in range(2)]
    rows, nodes = prompts(rng, free, [9, 6])
    for index in (1, 0):  # one row at a time, the second first: `rows` must be obeyed
        batch = forest_input([rows[index]], [nodes[index]], SLOTS, TRASH, chosen=[index])
        assert worst(forest, plain, [rows[index]], [nodes[index]], batch) < 1e-4
    nodes = [grow(rng, rows[0], free[0], 11), grow(rng, rows[1], free[1], 7)]
    assert worst(forest, plain, rows, nodes, forest_input(rows, nodes, SLOTS, TRASH)) < 1e-4


@pytest.mark.parametrize("name", ["llama", "opt", "mistral window", "gemma3 window"])
@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_both_attentions(name: str, attention: str) -> None:
    """Guards the form of the mask: what is right for sdpa (bool) is silently wrong for eager."""
    rng = random.Random(4)
    forest, plain = CausalForestModel(build(name, attention=attention), name), build(name, attention=attention)
    forest.reserve(1, SLOTS)
    free = list(range(TRASH))
    rows, nodes = prompts(rng, [free], [8])
    nodes[0] += grow(rng, rows[0], free, 8)
    assert worst(forest, plain, rows, nodes, forest_input(rows, nodes, SLOTS, TRASH)) < 1e-4


@pytest.mark.parametrize("name", ["llama", "gpt2", "qwen2 window", "gemma2 window", "mistral window"])
def test_life_of_a_cache(name: str) -> None:
    """Random forwards, moves, growth and row selection, then the logits of a recomputation. Guards moves that write
    before they read, growth that loses slots, rows that get each other's keys, the trash slot leaking into a row."""
    for seed in range(4):
        rng = random.Random(seed)
        forest, plain = CausalForestModel(build(name), name), build(name)
        slots = 40
        forest.reserve(3, slots)
        free = [list(range(slots - 1)) for _ in range(3)]
        rows, nodes = prompts(rng, free, [5, 9, 3])
        forest.forward(forest_input(rows, nodes, slots, slots - 1), logits=False)
        for step in range(4):
            nodes = [grow(rng, row, spare, rng.randrange(1, 6)) for row, spare in zip(rows, free, strict=True)]
            assert worst(forest, plain, rows, nodes, forest_input(rows, nodes, slots, slots - 1)) < 1e-4
            permute(rng, forest, rows, free, slots - 1)
            if step == 1:
                slots = 72
                forest.reserve(3, slots)
                free = [[*spare, *range(39, slots - 1)] for spare in free]  # the old trash slot is an ordinary one now
            if step == 2:
                forest.select_rows(torch.tensor([2, 0]))
                rows, free = [rows[2], rows[0]], [free[2], free[0]]


def permute(rng: random.Random, forest: ForestModel, rows: list[Row], free: list[list[int]], trash: int) -> None:
    """Move every held slot somewhere else, cycles included; shorter rows are padded with pairs aimed at the trash
    slot."""
    pairs = []
    for row, spare in zip(rows, free, strict=True):
        places = [*row.slots, *spare]
        rng.shuffle(places)
        new = places[: len(row.slots)]
        pairs.append(list(zip(row.slots, new, strict=True)))
        row.slots[:] = new
        spare[:] = places[len(new) :]
    width = max(map(len, pairs))
    padded = torch.tensor([[*p, *[(trash, trash)] * (width - len(p))] for p in pairs])  # [R, T, 2]
    forest.move(padded[..., 0], padded[..., 1], torch.zeros(len(padded), dtype=torch.int64))


def test_grouped_attention_is_used_and_equal() -> None:
    """Guards the fast path: that it runs at all, and that it pairs query heads with their own kv head."""
    forest = CausalForestModel(build("llama"), "llama")
    assert forest.module.config._attn_implementation == NAME  # type: ignore[union-attr]
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    from dsbd_cli.models.transformers_backend.attention import grouped_attention

    torch.manual_seed(0)
    query, key, value = torch.randn(2, 6, 5, 8), torch.randn(2, 3, 11, 8), torch.randn(2, 3, 11, 4)
    seen = torch.rand(2, 1, 5, 11) > 0.4
    seen[..., 0] = True
    mask = torch.zeros(seen.shape).masked_fill(~seen, torch.finfo(torch.float32).min)
    module: Any = torch.nn.Module()
    module.num_key_value_groups = 2
    fast, _ = grouped_attention(module, query, key, value, mask, scaling=0.3)
    slow, _ = sdpa_attention_forward(module, query, key, value, mask, scaling=0.3)
    torch.testing.assert_close(fast, slow, atol=1e-6, rtol=1e-5)


def test_float16_logits_are_held_to_the_limit_of_float16() -> None:
    before = torch.randn(64, generator=torch.Generator().manual_seed(0)).half()
    assert same_logits(before, before * 1.01)
    assert not same_logits(before, before * 1.04)
    assert same_logits(before.bfloat16(), before.bfloat16() * 1.04)


def test_no_logits_writes_the_same_cache() -> None:
    """Guards logits=False: the head must not run, and the keys must be the same."""
    rng = random.Random(5)
    model, plain = build("gpt2"), build("gpt2")
    forest = CausalForestModel(model, "gpt2")
    forest.reserve(1, SLOTS)
    free = list(range(TRASH))
    rows, nodes = prompts(rng, [free], [6])
    runs: list[int] = []
    handle = model.lm_head.register_forward_hook(lambda *_: runs.append(1))
    assert forest.forward(forest_input(rows, nodes, SLOTS, TRASH), logits=False) is None
    handle.remove()
    assert not runs
    nodes = [grow(rng, rows[0], free, 5)]
    assert worst(forest, plain, rows, nodes, forest_input(rows, nodes, SLOTS, TRASH)) < 1e-4


def test_a_forward_leaves_no_large_masks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards the mask of a long prompt, hundreds of megabytes, and those of a forest in a model that is given back."""
    rng = random.Random(6)
    forest = CausalForestModel(build("mistral window"), "mistral")
    forest.reserve(1, SLOTS)
    rows, nodes = prompts(rng, [list(range(TRASH))], [6])
    masks: list[weakref.ref[LayerMask]] = []
    add = AttentionMetadata.add

    def noted(*arguments: Any, **more: Any) -> LayerMask:
        mask = add(*arguments, **more)
        masks.append(weakref.ref(mask))
        return mask

    monkeypatch.setattr(AttentionMetadata, "add", noted)
    for chain in (True, False):
        batch = forest_input(rows, nodes, SLOTS, TRASH)
        forest.forward(replace(batch, prompt_slots=(0,), suffix=SLOTS, chain=chain))
        if not chain:
            assert forest.by_parts
            forest.release()
        gc.collect()
        assert masks
        assert not any(mask() for mask in masks)


def test_facts_and_clear() -> None:
    """Guards the numbers that the engine plans memory with, and NaN that a failed row leaves behind."""
    forest = CausalForestModel(build("qwen3"), "qwen3")
    assert (forest.vocab_size, forest.max_positions, forest.device.type) == (97, 512, "cpu")
    assert forest.kv_bytes_per_slot() == 2 * 2 * 2 * 8 * 4  # layers, keys and values, heads, dim, float32
    forest.reserve(2, 8)
    assert forest.kv_bytes_per_slot() == 256
    for layer in forest._cache.layers:
        layer.keys[1].fill_(float("nan"))
    forest.clear(1)
    assert all(layer.keys.isfinite().all() for layer in forest._cache.layers)


def test_width_is_fitted() -> None:
    """Guards drafts whose logits are padded to another width than the target's: no id may shift, no padding may win."""
    forest, plain = CausalForestModel(build("llama"), "llama"), build("llama")
    forest.reserve(1, 4)
    row = Row([5], [-1], [0])
    batch = forest_input([row], [[0]], 4, 3)
    expected = plain_logits(plain, row, 0)
    for width in (90, 104):
        forest.fit_width(width)
        logits = forest.forward(batch)
        assert logits is not None
        assert logits.shape == (1, 1, width) == (1, 1, forest.vocab_size)
        torch.testing.assert_close(logits[0, 0, :97], expected[:width], atol=1e-5, rtol=1e-4)
        assert logits[0, 0].argmax() < 97


@pytest.mark.parametrize("name", ["llama", "gemma3 window", "opt"])
def test_forward_does_not_depend_on_unseen_slots(name: str) -> None:
    """Guards the active length: more slots than needed, filled with other keys, change nothing."""
    rng = random.Random(6)
    forest = CausalForestModel(build(name), name)
    forest.reserve(2, SLOTS)
    free = [list(range(20)), list(range(20))]
    rows, nodes = prompts(rng, free, [6, 6])
    short = forest.forward(forest_input(rows, nodes, 24, 23))
    forest.forward(forest_input([Row([7], [-1], [40])] * 2, [[0]] * 2, SLOTS, TRASH))
    long = forest.forward(forest_input(rows, nodes, SLOTS, TRASH))
    assert short is not None
    torch.testing.assert_close(short, long, atol=1e-5, rtol=1e-4)


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["llama", "opt", "gpt2", "qwen3", "mistral window", "gemma2 window", "phi3"])
def test_forest_on_cuda(name: str) -> None:
    """Guards what the CPU cannot show: strides that a CUDA kernel refuses, and reads back to the host inside a
    forward."""
    rng = random.Random(7)
    forest, plain = CausalForestModel(build(name).cuda(), name), build(name)
    forest.reserve(2, SLOTS)
    free = [list(range(TRASH)) for _ in range(2)]
    rows, nodes = prompts(rng, free, [9, 6])
    nodes = [held + grow(rng, row, spare, 8) for held, row, spare in zip(nodes, rows, free, strict=True)]
    batch = on_cuda(forest_input(rows, nodes, SLOTS, TRASH))
    assert worst(forest, plain, rows, nodes, batch) < 1e-3
    torch.cuda.set_sync_debug_mode("error")
    try:
        forest.forward(batch)
        forest.move(batch.slots, batch.slots, batch.slots[:, 0])
    finally:
        torch.cuda.set_sync_debug_mode("default")


def on_cuda(batch: ForestInput) -> ForestInput:
    tensors = (batch.tokens, batch.positions, batch.slots, batch.mask, batch.slot_positions)
    return ForestInput(*(tensor.cuda() for tensor in tensors))


def test_a_forward_that_reads_the_host_is_seen() -> None:
    """Guards a CUDA graph of rotary embeddings that look at the largest position."""
    dynamic = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
    assert CausalForestModel(build("llama", rope_parameters=dynamic), "x")._waits_for_host
    assert not CausalForestModel(build("llama"), "x")._waits_for_host
