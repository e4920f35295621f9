"""A node's logits do not depend on its company, and the check at load knows a model whose logits do."""

from __future__ import annotations

import random
from functools import cache
from typing import Any

import pytest
import torch

from dsbd_cli.config.method import MethodConfig
from dsbd_cli.config.model import ModelSpec
from dsbd_cli.config.sampling import SamplingConfig
from dsbd_cli.engine.cache import prefill
from dsbd_cli.engine.core.slots import PREFIX_STEP
from dsbd_cli.engine.decoding.engine import Engine
from dsbd_cli.engine.protocols import ForestModel
from dsbd_cli.models.attention import forest, metadata, views
from dsbd_cli.models.checkpoints.checkpoint import Checkpoint, open_pair
from dsbd_cli.models.checks.invariance import Surroundings, _logits, check
from dsbd_cli.models.load_model import load_model
from dsbd_cli.models.pair import LoadedPair, load_pair
from dsbd_cli.models.recurrent import recurrences
from dsbd_cli.models.recurrent.linear_state import LinearState
from dsbd_cli.models.recurrent.states import RecurrentCache
from dsbd_cli.models.transformers_backend import patching
from dsbd_cli.models.transformers_backend.causal import CausalForestModel
from dsbd_cli.models.transformers_backend.patching import pack
from dsbd_cli.ops.cpu import attention, prompt_attention
from dsbd_cli.requests import Request
from tests.helpers.tiny import FIT, build

# one of each kind of attention: full, one kv head, windows, caps, sinks
KINDS = (
    "llama",
    "llama one kv head",
    "opt",
    "gpt2",
    "gptj",
    "gpt-neo window",
    "mistral window",
    "gemma2 window",
    "gemma3 window",
    "phi3 window",
)


def wide(name: str, dtype: torch.dtype, *, packed: bool = True, **more: Any) -> CausalForestModel:
    """A tiny model, wide enough that its products are packed."""
    settings = FIT[name][1]
    changes: dict[str, Any] = {"n_embd": 256} if "n_embd" in settings else {"hidden_size": 256}
    changes |= {"intermediate_size": 192} if "intermediate_size" in settings else {}
    changes |= {"head_dim": 64} if "head_dim" in settings else {}
    changes |= {"ffn_dim": 192, "word_embed_proj_dim": 256} if "ffn_dim" in settings else {}
    model = build(name, **changes, **more).to(dtype)
    if packed:
        pack(model)
    return CausalForestModel(model, name)


@pytest.fixture(params=["kernel", "torch"])
def code(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """The suffix by the kernel, and by the torch code that serves where it does not fit."""
    if request.param == "torch":
        in_torch(monkeypatch)


def in_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "fits", lambda *_: False)


@pytest.mark.usefixtures("code")
@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_bits_do_not_depend_on_the_company(name: str, dtype: torch.dtype) -> None:
    """Guards each kind of attention against sums whose order goes by slot, by row or by the number of nodes."""
    assert check(wide(name, dtype)).varies is None


WIDE = {"hidden_size": 128, "vocab_size": 256, "mamba_n_heads": 8, "mamba_d_head": 32, "mamba_d_state": 32}
DELTA = {"intermediate_size": 192, "head_dim": 32, "linear_num_key_heads": 4, "linear_num_value_heads": 8,
         "linear_key_head_dim": 16, "linear_value_head_dim": 16, "hidden_size": 128}  # fmt: skip
RECURRENT_SIZES: dict[str, dict[str, Any]] = {
    "mamba2": {"hidden_size": 128, "num_heads": 16, "head_dim": 16, "expand": 2},
    "lfm2": {"hidden_size": 128, "intermediate_size": 192},
    "bamba": WIDE | {"intermediate_size": 192},
    "falcon-h1": WIDE | {"intermediate_size": 192, "head_dim": 32, "mamba_d_ssm": 256},
    "granite-hybrid": WIDE | {"intermediate_size": 192, "shared_intermediate_size": 128},
    "qwen3.5": DELTA,
    "qwen3.5-moe": DELTA,
    "qwen3-next": DELTA,
    "olmo-hybrid": DELTA,
    "kimi-linear": {"hidden_size": 128, "intermediate_size": 192, "linear_head_dim": 16},
    "lfm2-moe": {"hidden_size": 128, "intermediate_size": 192},
    "lfm3": {"hidden_size": 128, "intermediate_size": 192},
    "linearised": {"hidden_size": 128, "intermediate_size": 192},
}


# one of each kind of state, and of many heads: scan of Mamba-2, convolution alone, delta rules, linear attention
SUMMED = ("mamba2", "lfm2", "qwen3.5", "qwen3-next", "kimi-linear", "linearised")


@pytest.mark.parametrize(
    ("name", "by_kernel"),
    [*((name, True) for name in RECURRENT_SIZES), *((name, False) for name in SUMMED)],
    ids=[*(f"{name} walked" for name in RECURRENT_SIZES), *(f"{name} summed" for name in SUMMED)],
)
def test_recurrent_layers_keep_their_bits(name: str, by_kernel: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards states against the times at which the common prefix was folded, which depend on the drafts.

    In kernels of a CPU, and in the tensor code of a GPU, of which each kind of state needs one family.
    """
    monkeypatch.setattr(RecurrentCache, "has_kernel", staticmethod(lambda device: by_kernel))
    model = build(name, **RECURRENT_SIZES[name])
    pack(model)
    forest = CausalForestModel(model, name)
    forest.keep_recurrent_states_in(torch.float64)
    assert check(forest).varies is None


def corrections_in_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    """A node's u as its own forward has it, and rounded in the next one."""
    write = LinearState.write

    def rounded(self: LinearState, name: str, values: torch.Tensor, dtype: torch.dtype) -> None:
        write(self, name, values.float(), dtype)

    monkeypatch.setattr(LinearState, "write", rounded)


def narrow_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """softplus as the library has it in float32."""
    monkeypatch.setattr(recurrences, "softplus", lambda x, _: torch.nn.functional.softplus(x))


@pytest.mark.parametrize("break_it", [corrections_in_float32, narrow_steps])
def test_mutants_of_recurrent_layers_are_found(break_it: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards the check at load, and both cures: without them the bits of Qwen3.5 move."""
    monkeypatch.setattr(RecurrentCache, "has_kernel", staticmethod(lambda device: False))
    break_it(monkeypatch)
    model = build("qwen3.5", **DELTA)
    pack(model)
    forest = CausalForestModel(model, "qwen3.5")
    forest.keep_recurrent_states_in(torch.float64)
    assert check(forest).varies is not None


@pytest.mark.usefixtures("code")
@pytest.mark.parametrize("name", ["llama one kv head", "gpt2", "gemma2 window", "gemma3 window"])
def test_bits_do_not_depend_on_any_company(name: str) -> None:
    """Guards what the few companies at load do not meet: odd numbers of nodes, rows and slots."""
    model, chance = wide(name, torch.float32), random.Random(5)
    with torch.inference_mode():
        alone = _logits(model, Surroundings())
        for _ in range(8):
            others, rows = chance.randrange(60), chance.choice([1, 2, 3])
            company = Surroundings(
                rows=rows,
                row=chance.randrange(rows),
                others=others,
                ahead=chance.randrange(others + 1),
                spread=chance.randrange(1, 7),
                at_once=chance.randrange(1, 6),
                slots=512,
            )
            assert torch.equal(_logits(model, company), alone), company


@pytest.mark.parametrize("name", ["falcon rotary", "bloom"])
def test_a_model_with_attention_of_its_own_is_not_trusted(name: str) -> None:
    """Guards against luck: such a model's bits may stay in this one text."""
    assert check(wide(name, torch.float32)).varies is not None


@pytest.mark.parametrize("packed", [True, False])
def test_experts_of_the_library_are_not_trusted(packed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against luck in bfloat16: rounding hides what moves, from the companies of the check but not from all."""
    if not packed:
        monkeypatch.setattr(patching, "_has_experts", lambda _: False)
    model = build("qwen3-next").to(torch.bfloat16)
    pack(model)
    forest = CausalForestModel(model, "qwen3-next")
    forest.keep_recurrent_states_in(torch.float64)
    assert (check(forest).varies is None) == packed


def all_slots_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The fused kernel over all slots, gaps included."""

    def fused(mask, query, key, value, scoring):  # type: ignore[no-untyped-def]
        groups = query.shape[1] // key.shape[1]
        key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
        arguments = {"attn_mask": mask.additive, "scale": scoring.scale}
        return torch.nn.functional.scaled_dot_product_attention(query, key, value, **arguments).transpose(1, 2)

    monkeypatch.setattr(views, "by_parts", fused)
    in_torch(monkeypatch)


def narrow_sums(monkeypatch: pytest.MonkeyPatch) -> None:
    """The suffix in float32, by slot."""
    in_torch(monkeypatch)
    monkeypatch.setattr(forest.torch, "float64", torch.float32)


def by_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch's fused kernel attends to prompts."""
    monkeypatch.setattr(prompt_attention, "fits", lambda *_: False)


def odd_remainders(monkeypatch: pytest.MonkeyPatch) -> None:
    """As many queries in torch's fused kernel as there happen to be."""
    by_torch(monkeypatch)
    monkeypatch.setattr(metadata, "QUERY_STEP", 1)


def test_torch_may_attend_to_prompts(monkeypatch: pytest.MonkeyPatch) -> None:
    """As it does where our kernel does not serve."""
    by_torch(monkeypatch)
    assert check(wide("opt", torch.float32)).varies is None


@pytest.mark.parametrize("break_it", [all_slots_at_once, narrow_sums, odd_remainders])
def test_mutants_are_found(break_it: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards the check itself: each way to sum that was found to move bits must fail it."""
    model = wide("opt", torch.float32)
    assert check(model).varies is None
    break_it(monkeypatch)
    assert check(model).varies is not None


def test_parts_give_what_the_fused_kernel_gives() -> None:
    """Guards the joining of the two parts: wrong weights would be the same in every company."""
    for name in KINDS:
        model = wide(name, torch.float32)
        company = Surroundings(others=32, ahead=9, spread=5, slots=512)
        with torch.inference_mode():
            ours = _logits(model, company)
            plain = _logits(model, company, by_parts=False)
        torch.testing.assert_close(ours, plain, rtol=1e-4, atol=1e-4)


def texts(target: ForestModel, draft: ForestModel | None, codec: Any, batch: int, **method: Any) -> list[Any]:
    """Ids and log-probabilities of all hypotheses, to the last bit."""
    engine = Engine(target, draft, codec, MethodConfig.of(method), batch_size=batch)
    prompt = "schema: road ( road_id, forest_id, late_area ); forest ( forest_id, first_street )\nquestion: find "
    requests = [
        Request(
            id=str(row),
            seed=row,
            prompt=prompt * (1 + row % 3) + "the road " * row,
            sampling=SamplingConfig(max_new_tokens=24, n_best=4),
        )
        for row in range(6)
    ]
    return [[(item.token_ids, item.logprob) for item in result.hypotheses] for result in engine.run(requests)]


@cache
def builtin(dtype: str) -> LoadedPair:
    """Loaded and checked once."""
    return load_pair(
        *open_pair(ModelSpec("builtin:target", dtype=dtype), ModelSpec("builtin:draft", "draft", dtype=dtype))
    )


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("rule", ["coupled", "search"])
def test_texts_and_logprobs_to_the_last_bit(rule: str, dtype: str) -> None:
    """Guards the promise `same-text`: not the draft, the depth, the batch nor the neighbours may move a bit."""
    pair = builtin(dtype)
    assert pair.target.invariant
    alone = texts(pair.target, None, pair.codec, 1, rule=rule, depth=0)
    assert texts(pair.target, None, pair.codec, 6, rule=rule, depth=0) == alone
    assert texts(pair.target, pair.draft, pair.codec, 4, rule=rule, depth=3) == alone
    assert texts(pair.target, None, pair.codec, 3, rule=rule, depth=4, drafter="ngram") == alone


def test_fast_numerics_promise_less() -> None:
    """Guards the record: where the check was not made or failed, `same-text` is not said."""
    target, codec, _ = load_model(Checkpoint.open(ModelSpec("builtin:target", numerics="fast")))
    engine = Engine(target, None, codec, MethodConfig(depth=0))
    assert not target.invariant
    assert engine.exactness == "same-law"
    target.invariant = True
    assert engine.exactness == "same-text"


LONG = 700  # tokens of a prompt: two chunks, and more keys than torch's kernel takes at a time


def read(model: CausalForestModel, text: list[int], cuts: tuple[int, ...]) -> list[torch.Tensor]:
    """Keys and values after a prompt was read up to each of the cuts, and then on."""
    model.release()
    model.reserve(1, LONG + 36)
    cached = 0
    with torch.inference_mode():
        for cut in (*cuts, len(text) - 1):
            prefill.prefill(model, [0], [text[: cut + 1]], LONG + 35, apart=True, known=[cached])
            cached = cut
    return [slab[:, 0, : len(text) - 1].clone() for slab in model._cache._slabs.values()]


def equal(tensors: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(tensors, other, strict=True))


def long_model(name: str, dtype: torch.dtype) -> CausalForestModel:
    positions = {"n_positions": 1024} if "n_positions" in FIT[name][1] else {"max_position_embeddings": 1024}
    return wide(name, dtype, **positions)


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_a_prompt_may_be_read_from_any_block_on(name: str, dtype: torch.dtype) -> None:
    """Guards copied beginnings: torch's kernels go by the number of queries and of keys."""
    model, chance = long_model(name, dtype), random.Random(4)
    text = [chance.randrange(model.vocab_size) for _ in range(LONG)]
    whole = read(model, text, ())
    for cuts in ((64,), (192, 256), (448,), (512, 640)):
        assert equal(read(model, text, cuts), whole), cuts
    for length in (100, 290, 520):  # what begins so is another prompt
        part = read(model, text[:length], ())
        blocks = (length - 1) // PREFIX_STEP * PREFIX_STEP
        assert equal([slab[:, :blocks] for slab in part], [slab[:, :blocks] for slab in whole]), length


def test_mutants_of_a_reading_in_blocks_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards the test above: a cut inside a block, and a reading without blocks, move bits."""
    model, chance = long_model("llama", torch.float32), random.Random(4)
    text = [chance.randrange(model.vocab_size) for _ in range(LONG)]
    whole = read(model, text, ())
    assert not all(equal(read(model, text, (cut,)), whole) for cut in (32, 96, 256 + 32))
    monkeypatch.setattr(forest, "by_blocks", lambda first, *states: forest.by_mask(*states))
    monkeypatch.setattr(views, "by_blocks", lambda first, *states: forest.by_mask(*states))
    whole = read(model, text, ())
    assert not all(equal(read(model, text, (cut,)), whole) for cut in (64, 192, 256, 448))


def trust(model: CausalForestModel) -> tuple[str, ...]:
    """Ask a model whether it is invariant, and tell it."""
    verdict = check(model)
    return model.trust(verdict.varies, verdict.copies)


def test_a_model_whose_bits_a_copy_moves_does_not_share(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards the check at load, and that it says so."""
    good = wide("llama", torch.float32)
    assert trust(good) == ()
    assert (good.invariant, good.copies_prefixes) == (True, True)
    copy = CausalForestModel.copy_prefixes

    def less(self: CausalForestModel, copies: list[tuple[int, int, int]]) -> None:
        copy(self, [(source, target, count - 1) for source, target, count in copies])

    monkeypatch.setattr(CausalForestModel, "copy_prefixes", less)
    bad = wide("llama", torch.float32)
    notes = trust(bad)
    assert (bad.invariant, bad.copies_prefixes) == (True, False)
    assert notes == ("prompts that begin alike are each read whole: a copied beginning would change bits here",)
    few = wide("llama", torch.float32, max_position_embeddings=PREFIX_STEP + 4)
    notes = trust(few)
    assert (few.invariant, few.copies_prefixes) == (True, False)
    assert notes == (
        "prompts that begin alike are each read whole: the model takes too few tokens to check whether a copied "
        "beginning changes bits",
    )
    recurrent = CausalForestModel(build("mamba2"), "mamba2")
    assert not recurrent.copies_prefixes
    assert recurrent.trust(None, None) == ()


def test_a_prompt_is_read_the_same_way_beside_a_longer_one() -> None:
    """Guards prefill: a chunk as wide as the longest neighbour's would move bits."""
    parts = {0: [1] * 30, 1: [1] * 33, 2: [1] * 64, 3: [1] * 5}
    first = dict.fromkeys(parts, 0)
    assert prefill._together(parts, first, apart=True) == [(32, [0, 3]), (64, [1, 2])]
    assert prefill._together(parts, first | {2: 64}, apart=True) == [(32, [0, 3]), (64, [1]), (64, [2])]
    assert prefill._together(parts, first, apart=False) == [(64, [0, 1, 2, 3])]
