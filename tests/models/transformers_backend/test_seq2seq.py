"""Encoder-decoder models hold a forest below two sources; what cannot is refused, and so are our own mistakes."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from dsbd_cli.errors import UnsupportedModelError
from dsbd_cli.models.checks.invariance import COMPANIES, Surroundings, _logits, check
from dsbd_cli.models.checks.selftest import self_test
from dsbd_cli.models.transformers_backend import positions
from dsbd_cli.models.transformers_backend.crossing import CrossCache
from dsbd_cli.models.transformers_backend.patching import pack
from dsbd_cli.models.transformers_backend.seq2seq import Seq2SeqForestModel, encoder_digest, sample_encoder_input
from dsbd_cli.ops.processor import on_amd
from tests.helpers.pairs import FIT, UNFIT, build_pair, perturbed


@pytest.mark.parametrize("name", FIT)
def test_accepts(name: str) -> None:
    report = self_test(Seq2SeqForestModel(build_pair(name), name))
    assert report.median_error < report.limit / 20


@pytest.mark.parametrize("name", ["t5", "bart", "whisper"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bfloat16", "float16"])
def test_accepts_half_precision(name: str, dtype: torch.dtype) -> None:
    report = self_test(Seq2SeqForestModel(build_pair(name).to(dtype), name))
    assert report.median_error < report.limit / 2


@pytest.mark.parametrize("name", UNFIT)
def test_refuses(name: str) -> None:
    with pytest.raises(UnsupportedModelError) as caught:
        self_test(Seq2SeqForestModel(build_pair(name), name))
    assert "\n" not in str(caught.value)


def bias_by_slot(model: Seq2SeqForestModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """Distances of slots, as transformers takes them."""
    for module in model.module.modules():
        module.__dict__.pop("compute_bias", None)


def table_not_hooked(model: Seq2SeqForestModel, monkeypatch: pytest.MonkeyPatch) -> None:
    del model.module.get_decoder().embed_positions.__dict__["forward"]


def rows_swapped(model: Seq2SeqForestModel, monkeypatch: pytest.MonkeyPatch) -> None:
    view = CrossCache.view
    monkeypatch.setattr(CrossCache, "view", lambda self, stored: view(self, stored).flip(0))


def rows_not_moved(model: Seq2SeqForestModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CrossCache, "select_rows", lambda self, rows: None)


def mask_missing(model: Seq2SeqForestModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """The shorter source sees the empty places behind it."""

    def across(self: Any, batch: Any, width: int, metadata: Any) -> torch.Tensor:
        return torch.zeros(len(batch.tokens), 1, batch.tokens.shape[1], width)

    monkeypatch.setattr(Seq2SeqForestModel, "_source_mask", across)


@pytest.mark.parametrize(
    ("name", "break_it"),
    [
        ("t5", bias_by_slot),
        ("umt5", bias_by_slot),
        ("bart", table_not_hooked),
        ("m2m100", table_not_hooked),
        *((name, mutant) for name in ("t5", "marian") for mutant in (rows_swapped, rows_not_moved, mask_missing)),
    ],
)
def test_mutants_are_refused(name: str, break_it: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    model = Seq2SeqForestModel(build_pair(name), name)
    break_it(model, monkeypatch)
    with pytest.raises(UnsupportedModelError):
        self_test(model)


def test_positions_come_in_the_ways_that_are_known() -> None:
    kinds = {name: Seq2SeqForestModel(build_pair(name), name)._positions.kinds for name in ("t5", "bart", "whisper")}
    assert kinds == {"t5": ["bias"], "bart": ["table"], "whisper": ["argument"]}
    assert positions.ARGUMENT == "decoder_position_ids"


def test_the_stock_model_stays_as_it_was() -> None:
    """Guards comparators that run on the same module: outside a forest our positions do nothing."""
    for name in ("t5", "bart"):
        plain = build_pair(name)
        encoder_input, tokens = torch.randint(5, 90, (1, 9)), torch.randint(5, 90, (1, 6))
        want = plain(input_ids=encoder_input, decoder_input_ids=tokens).logits
        Seq2SeqForestModel(plain, name)
        assert torch.allclose(plain(input_ids=encoder_input, decoder_input_ids=tokens).logits, want, atol=1e-5)


# Wide enough that the kernels of real models are taken.
WIDE = {
    "t5": {"d_model": 128, "d_kv": 64, "d_ff": 256, "num_heads": 2},
    "marian": {
        "d_model": 128,
        "encoder_attention_heads": 2,
        "decoder_attention_heads": 2,
        "max_position_embeddings": 512,
    },
    # sources of 64 tokens, the most it takes, have no suffix
    "bart": {"d_model": 128, "encoder_attention_heads": 2, "decoder_attention_heads": 2},
    "whisper": {"d_model": 128, "decoder_attention_heads": 2, "max_target_positions": 448, "max_source_positions": 150},
}


@pytest.mark.parametrize("packed", [True, False], ids=["packed", "plain"])
@pytest.mark.parametrize("name", WIDE)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_logits_do_not_depend_on_their_company(name: str, dtype: torch.dtype, packed: bool) -> None:
    """Cross attention too: neighbours with other sources, other nodes, other slots."""
    model = build_pair(name, **WIDE[name]).to(dtype)
    if packed:
        pack(model)
    elif dtype == torch.float32 and not on_amd():
        pytest.skip("torch's own products in float32 go by the number of rows on other processors than AMD's")
    forest = Seq2SeqForestModel(model, name)
    # torch's own products in half precision are not trusted, though these companies move no bit
    trusted = packed or dtype == torch.float32
    assert (check(forest).varies is None) == trusted
    if trusted and name != "t5":  # the check compares as the lines below do
        return
    with torch.inference_mode():
        alone = _logits(forest, Surroundings())
        assert all(torch.equal(_logits(forest, company), alone) for company in COMPANIES)


@pytest.mark.parametrize("name", ["t5", "marian"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_a_source_does_not_depend_on_those_that_are_read_with_it(name: str, dtype: torch.dtype) -> None:
    """Guards padding that reaches the bits of what is kept, and a source that stands alone without any."""
    wide = {"encoder_ffn_dim": 64, "decoder_ffn_dim": 64} if name == "marian" else {}
    module = build_pair(name, **WIDE[name], **wide).to(dtype)
    if not pack(module):
        pytest.skip("this processor does not multiply bfloat16 itself")
    model = Seq2SeqForestModel(module, name)
    assert model._rows_alike
    encoder_inputs = [sample_encoder_input(model, size, seed) for seed, size in enumerate((9, 31, 32, 33, 100, 140))]
    runs = []
    model._encoder.register_forward_hook(lambda *_: runs.append(1))

    def kept(rows: list[int], together: bool) -> list[torch.Tensor]:
        model.release()
        model.reserve(len(encoder_inputs), 8)
        for part in [rows] if together else [[row] for row in rows]:
            model.encode(part, [encoder_inputs[row] for row in part])
        return [
            stored[row, :, : len(encoder_inputs[row])].clone()
            for layer in model._cross._own
            for stored in layer.stored
            for row in range(len(encoder_inputs))
        ]

    apart = kept([0, 1, 2, 3, 4, 5], together=False)
    assert len(runs) == len(encoder_inputs)
    assert all(map(torch.equal, apart, kept([3, 1, 5, 0, 4, 2], together=True)))
    assert len(runs) == len(encoder_inputs) + 4  # of 32, 64 and 128 places, and one that stands alone
    assert check(model).varies is None


def test_a_bias_of_the_logits_goes_with_the_product() -> None:
    """Guards a bias that is left out or added twice; models made at random have zeros there."""
    module = build_pair("marian", **WIDE["marian"])
    module.final_logits_bias.normal_(generator=torch.Generator().manual_seed(3))
    if not pack(module):
        pytest.skip("this build of torch has no packed products")
    model = Seq2SeqForestModel(module, "marian")
    assert model._lm_head is not None
    assert self_test(model).median_error < 1e-4


@pytest.mark.parametrize("name", ["longt5", "switch"])
def test_eager_families_with_a_function_by_name_are_switched(name: str) -> None:
    """Guards `same-text` for them; their sources are read one by one."""
    module = build_pair(name, **WIDE["t5"])
    pack(module)  # products of experts that are not packed go by the number of rows
    model = Seq2SeqForestModel(module, name)
    assert not model._rows_alike
    assert self_test(model).median_error < 1e-4
    assert check(model).varies is None


@pytest.mark.parametrize("name", ["t5", "marian"])
def test_the_plain_way_depends_on_it(name: str) -> None:
    """The check would prove little if the ordinary attention passed it."""
    model = Seq2SeqForestModel(build_pair(name, **WIDE[name]), name)
    alone = _logits(model, Surroundings(), by_parts=False)
    assert not all(torch.equal(_logits(model, company, by_parts=False), alone) for company in COMPANIES)


def test_the_draft_takes_over_what_the_targets_encoder_read() -> None:
    """Guards a second encoder where the two are the same, and sources that reach the wrong rows."""
    target, other = build_pair("bart"), build_pair("bart")
    draft = perturbed(target, 0.1)
    draft.get_encoder().load_state_dict(target.get_encoder().state_dict())
    assert encoder_digest(target) == encoder_digest(draft) == encoder_digest(other)
    assert encoder_digest(target) != encoder_digest(perturbed(target, 0.1))
    leader, follower, alone = (Seq2SeqForestModel(model, "bart") for model in (target, draft, perturbed(draft, 0.0)))
    leader.share_encoder(follower)
    ran = []
    draft.get_encoder().register_forward_hook(lambda *_: ran.append(1))
    for model in (leader, follower, alone):
        model.reserve(3, 8)
    encoder_inputs = [sample_encoder_input(leader, size, seed) for seed, size in enumerate((9, 40))]
    for model in (leader, follower, alone):
        model.encode([2, 0], encoder_inputs)
    assert not ran
    for mine, theirs in zip(follower._cross._own, alone._cross._own, strict=True):
        for tensor, another in zip(mine.stored, theirs.stored, strict=True):
            assert torch.allclose(tensor, another, atol=1e-5)
    assert follower._cross.lengths == alone._cross.lengths == [40, 1, 9]
