"""The kernel of the suffix against the torch code that specifies it, a float64 reference, and bits in any company."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from dsbd_cli.models.attention.metadata import AttentionMetadata, Split
from dsbd_cli.models.recurrent import states
from dsbd_cli.models.transformers_backend import attention
from dsbd_cli.ops.cpu import attention as cpu_attention
from dsbd_cli.ops.layout import SlotPaths
from dsbd_cli.ops.select import ops_for
from tests.helpers.kernels import CPU, refuse, replaced

DTYPES = [torch.float32, torch.bfloat16]
LIMIT = {torch.float32: 2e-6, torch.bfloat16: 8e-3}  # relative to numbers of about 1


@dataclass(frozen=True)
class Case:
    """One attention over a random forest, as the layers of a model ask for it.

    positions [R, S]; seen [R, n, S]; settled: numbers of the rows' prompts.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    seen: Tensor
    positions: Tensor
    prompt_part: tuple[int, ...]
    softcap: float | None = None
    sinks: Tensor | None = None
    bias: Tensor | None = None

    @property
    def scale(self) -> float:
        return float(self.query.shape[-1] ** -0.5)

    def run(self) -> Tensor:
        """[R, n, H * G, E] by the attention function of the models, with the whole range of slots as suffix."""
        ops = ops_for(CPU, self.query.dtype, ("path_attention",))
        metadata = AttentionMetadata(ops, Split.of(self.prompt_part, self.seen.shape[-1], positions=self.positions))
        whole = bool(self.seen[..., : min(self.prompt_part)].all())
        additive = metadata.add(self.seen, self.query.dtype, whole=whole).additive
        more: dict[str, Any] = {} if self.bias is None else {"position_bias": self.bias}
        with attention.attention_over(metadata):
            module = torch.nn.Module()
            caps = {"softcap": self.softcap, "s_aux": self.sinks}
            return attention.grouped_attention(
                module,
                self.query,
                self.key,
                self.value,
                additive,
                **caps,
                **more,  # type: ignore[arg-type]
            )[0]

    def reference(self) -> Tensor:
        """The same in float64, written out."""
        groups = self.query.shape[1] // self.key.shape[1]
        query, key, value = (states.double() for states in (self.query, self.key, self.value))
        key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
        scores = query @ key.transpose(2, 3) * self.scale
        if self.softcap is not None:
            scores = torch.tanh(scores / self.softcap) * self.softcap
        if self.bias is not None:
            scores = scores + self.bias.double()
        scores = scores.masked_fill(~self.seen[:, None], -math.inf)
        if self.sinks is not None:
            sink = self.sinks.double().view(1, -1, 1, 1).expand(*scores.shape[:3], 1)
            scores = torch.cat((scores, sink), -1)
        weights = torch.softmax(scores, -1)
        weights = weights if self.sinks is None else weights[..., :-1]
        return (weights @ value).transpose(1, 2)


def draw(
    seed: int,
    dtype: torch.dtype,
    *,
    rows: int = 1,
    heads: int = 2,
    groups: int = 3,
    dim: int = 32,
    out_dim: int | None = None,
    nodes: int = 9,
    slots: int = 200,
    prompts: tuple[int, ...] = (100,),
    window: int | None = None,
    **more: Any,
) -> Case:
    """Each node's path: its prompt, then as many slots as it is deep, drawn anywhere behind the prompt."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(dtype)

    key = normal(rows, slots, heads, dim).transpose(1, 2)  # as the cache holds them
    value = normal(rows, slots, heads, dim if out_dim is None else out_dim).transpose(1, 2)
    positions = torch.arange(slots).repeat(rows, 1)
    seen = torch.zeros(rows, nodes, slots, dtype=torch.bool)
    for row, prompt in enumerate(prompts):
        free = prompt + torch.randperm(slots - prompt, generator=generator)
        depth = min(12, len(free) // 2)
        positions[row, free] = prompt + torch.arange(len(free)) % depth  # siblings everywhere
        seen[row, :, :prompt] = True
        for node in range(nodes):
            for step in range(int(torch.randint(1, depth + 1, (), generator=generator))):
                same = free[torch.arange(len(free)) % depth == step]
                seen[row, node, same[int(torch.randint(len(same), (), generator=generator))]] = True
    if window is not None:
        reach = torch.where(seen, positions[:, None], -1).amax(-1, keepdim=True)
        seen &= positions[:, None] > reach - window
    query = normal(rows, nodes, heads * groups, dim).transpose(1, 2)
    return Case(query, key, value, seen, positions, prompts, **more)


CASES: dict[str, Callable[[torch.dtype], Case]] = {
    "one row": lambda dtype: draw(1, dtype),
    "rows of other lengths": lambda dtype: draw(2, dtype, rows=3, prompts=(100, 70, 161)),
    "no prompt slots": lambda dtype: draw(3, dtype, prompts=(20,), slots=90),
    "one row without prompt slots": lambda dtype: draw(4, dtype, rows=2, prompts=(20, 130)),
    "one node, one head": lambda dtype: draw(5, dtype, nodes=1, heads=1, groups=1),
    "many heads to one": lambda dtype: draw(6, dtype, heads=1, groups=8, dim=64),
    "fifty beams": lambda dtype: draw(7, dtype, nodes=50, slots=400, groups=1),
    "a suffix of one": lambda dtype: draw(8, dtype, prompts=(96,), slots=98),
    "window": lambda dtype: draw(9, dtype, window=40),
    "window past the prompt": lambda dtype: draw(10, dtype, window=4),
    "odd heads": lambda dtype: draw(11, dtype, dim=40, out_dim=24),
    "small heads": lambda dtype: draw(12, dtype, dim=8),
    "wide heads": lambda dtype: draw(13, dtype, dim=192, out_dim=128),
    "softcap": lambda dtype: draw(14, dtype, softcap=5.0),
    "sinks": lambda dtype: draw(15, dtype, sinks=torch.randn(6).to(dtype)),
    "sinks far above all scores": lambda dtype: draw(15, dtype, sinks=torch.linspace(40, 180, 6).to(dtype)),
    "bias": lambda dtype: draw(16, dtype, bias=torch.randn(1, 6, 9, 200).to(dtype)),
    "bias of rows": lambda dtype: draw(17, dtype, rows=2, prompts=(9, 30), bias=torch.randn(2, 6, 9, 200).to(dtype)),
}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", CASES)
def test_it_gives_what_the_torch_code_gives(name: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards every argument of the kernel, in value: against float64, and against the torch code."""
    torch.manual_seed(0)
    case = CASES[name](dtype)
    ours, wanted = case.run(), case.reference()
    assert (ours.double() - wanted).abs().max() <= LIMIT[dtype] * max(1.0, float(wanted.abs().max()))
    monkeypatch.setattr(cpu_attention, "fits", lambda *_: False)
    torch.testing.assert_close(ours, case.run(), rtol=LIMIT[dtype], atol=LIMIT[dtype])


def test_the_kernel_was_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards the test above against comparing the torch code with itself."""
    calls = []
    attend = cpu_attention.attend
    monkeypatch.setattr(cpu_attention, "attend", lambda *a, **k: calls.append(1) or attend(*a, **k))
    draw(1, torch.bfloat16).run()
    assert calls
    assert not cpu_attention.fits(*(torch.zeros(1, 1, 1, 64, dtype=torch.float16),) * 3)
    assert not cpu_attention.fits(*(torch.zeros(1, 1, 64, 1).transpose(2, 3)[..., ::2],) * 3)


def scattered(case: Case, seed: int) -> Case:
    """The same forest with its slots behind the prompt elsewhere, in another order, and others between them."""
    generator = torch.Generator().manual_seed(seed)
    prompt, slots = case.prompt_part[0], case.seen.shape[-1]
    room = 2 * slots
    places = torch.arange(slots)
    places[prompt:] = prompt + torch.randperm(room - prompt, generator=generator)[: slots - prompt]

    def spread(states: Tensor) -> Tensor:
        noise = torch.randn(*states.shape[:2], room, states.shape[3], generator=generator).to(states.dtype)
        return noise.index_copy_(2, places, states)

    seen = torch.zeros(*case.seen.shape[:2], room, dtype=torch.bool).index_copy_(2, places, case.seen)
    positions = torch.full((1, room), prompt).index_copy_(1, places, case.positions)
    return replace(case, key=spread(case.key), value=spread(case.value), seen=seen, positions=positions)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_bits_do_not_depend_on_slots_nodes_or_rows(dtype: torch.dtype) -> None:
    """Guards the order of sums: the same path among scattered slots, without other nodes, and beside other rows."""
    case = draw(21, dtype, groups=4, dim=64)
    wanted = case.run()
    for seed in range(6):
        assert torch.equal(scattered(case, seed).run(), wanted)
    for node in range(case.seen.shape[1]):
        query, seen = case.query[:, :, node : node + 1], case.seen[:, node : node + 1]
        assert torch.equal(replace(case, query=query, seen=seen).run(), wanted[:, node : node + 1])
    other = draw(22, dtype, groups=4, dim=64, prompts=(150,))
    both = {name: torch.cat((getattr(other, name), getattr(case, name))) for name in ("seen", "positions", "query")}
    both |= {name: torch.cat((getattr(other, name), getattr(case, name))) for name in ("key", "value")}
    assert torch.equal(replace(case, **both, prompt_part=(150, 100)).run()[1:], wanted)


def by_slot(monkeypatch: pytest.MonkeyPatch) -> None:
    """Slots in the order in which they lie."""
    listed = cpu_attention.list_slots
    monkeypatch.setattr(
        cpu_attention, "list_slots", lambda seen, starts, width, depths: listed(seen, starts, width, None)
    )


def test_the_order_of_slots_is_what_keeps_the_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    """A mutant that sums by slot is right in value and must move bits; else the test above could not fail."""
    by_slot(monkeypatch)
    case = draw(21, torch.float32, groups=4, dim=64)
    wanted = case.run()
    others = [scattered(case, seed).run() for seed in range(6)]
    assert all((other - wanted).abs().max() < 1e-5 for other in others)
    assert not all(torch.equal(other, wanted) for other in others)


def test_mutants_are_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards the comparison in value: a settled part without its log-sum, and a window that is not kept."""
    case = draw(9, torch.float32, window=40)
    wanted = case.reference()
    attend = cpu_attention.attend

    def unweighed(*arguments: Any, prompt_part: Any, **more: Any) -> Tensor:
        part, sums = prompt_part
        return attend(*arguments, prompt_part=(part, torch.zeros_like(sums)), **more)

    def unbounded(paths: SlotPaths, *arguments: Any, **more: Any) -> Tensor:
        seen = draw(9, torch.float32).seen
        paths = cpu_attention.list_slots(seen, torch.tensor([96]), 104, None)
        return attend(paths, *arguments, **more)

    narrow = draw(10, torch.float32, window=4)
    for mutant, of in ((unweighed, case), (unbounded, narrow)):
        with monkeypatch.context() as patch:
            patch.setattr(cpu_attention, "attend", mutant)
            assert (of.run().double() - of.reference()).abs().max() > 1e-2
    assert (case.run().double() - wanted).abs().max() < 1e-5


@pytest.mark.parametrize("groups", [1, 5])
def test_threads_do_not_change_bits(groups: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards how work is shared out: threads that each take a part of the nodes, and several callers at once."""
    case = draw(30, torch.bfloat16, heads=1, groups=groups, dim=64, nodes=60, slots=300)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        wanted = case.run()
        monkeypatch.setattr(cpu_attention, "SMALL", 0)
        monkeypatch.setattr(cpu_attention, "FEW", 1)
        for threads in (2, 3, 7):
            torch.set_num_threads(threads)
            assert all(torch.equal(case.run(), wanted) for _ in range(4))
        with ThreadPoolExecutor(3) as pool:
            assert all(torch.equal(output, wanted) for output in pool.map(lambda _: case.run(), range(12)))
    finally:
        torch.set_num_threads(before)


def test_what_is_not_a_number_stays_so_and_stays_where_it_is() -> None:
    """Guards failed rows, which are found by their logits: a NaN must reach those who see it, and nobody else."""
    case = draw(31, torch.bfloat16)
    seen = case.seen[0]
    slot = int((seen.sum(0) * (torch.arange(200) >= 100)).bool().logical_and(~seen.all(0)).nonzero()[0])
    key = case.key.clone()
    key[:, :, slot] = math.nan
    outputs, wanted = replace(case, key=key).run(), case.run()
    assert outputs[0, seen[:, slot]].isnan().all()
    assert torch.equal(outputs[0, ~seen[:, slot]], wanted[0, ~seen[:, slot]])


def test_a_node_that_sees_nothing_gives_zeros() -> None:
    """Guards padding under a window: NaN would spread through the cache."""
    case = draw(32, torch.float32, prompts=(20,))
    seen = case.seen.clone()
    seen[0, 3] = False
    assert not replace(case, seen=seen).run()[0, 3].any()


def test_torch_serves_where_numba_cannot_be_loaded(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Guards a numpy that is newer than numba knows: one line, for attention and for recurrent layers, and no crash."""
    case = draw(1, torch.float32)
    with caplog.at_level(logging.WARNING), replaced(monkeypatch, "path_attention", "scan", load=refuse):
        assert (case.run().double() - case.reference()).abs().max() < 1e-5
        assert not any(states.RecurrentCache.has_kernel(torch.device("cpu")) for _ in range(2))
        case.run()
    told = [record.getMessage() for record in caplog.records]
    assert len(told) == 2
    assert all("Numba needs NumPy 2.4 or less" in line for line in told)
