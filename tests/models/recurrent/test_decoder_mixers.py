"""Recurrent mixers of our own decoder: kernels and tensor code, memory, programs, quantized products."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import NemotronHConfig

from dsbd_cli.models.checks.invariance import check
from dsbd_cli.models.checks.selftest import self_test
from dsbd_cli.models.decoder.config import DecoderConfig
from dsbd_cli.models.decoder.decoder_model import DecoderForestModel
from dsbd_cli.models.decoder.families import decoder_config_of
from dsbd_cli.models.recurrent.states import RecurrentCache
from dsbd_cli.models.transformers_backend.causal import CausalForestModel
from dsbd_cli.ops import recording
from tests.models.decoders import DECODERS, build_decoder, save_decoder
from tests.models.test_decoder import KERNELS, ON_CPU, SEARCH, answers, decoder_of, prompt
from tests.ops.cpu.test_int8 import any_size, needs_int8  # noqa: F401

KINDS = ("qwen3.5", "mamba2", "lfm2", "falcon-h1")  # one of each kind of mixer, and of both side by side
PROMPTS = [prompt(40), prompt(9)]


@pytest.mark.parametrize("name", KINDS)
def test_tensor_code_keeps_bits_and_texts(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU, and on processors without our kernels."""
    made = decoder_of(save_decoder(tmp_path / "model", build_decoder(name)))
    wanted = answers(made, PROMPTS, SEARCH)
    monkeypatch.setattr(RecurrentCache, "has_kernel", staticmethod(lambda device: False))
    model = DecoderForestModel(made.decoder, name, made.settings)
    model.keep_recurrent_states_in(torch.float64)
    assert self_test(model).largest_error < 1e-5
    assert check(model).varies is None
    texts = [[ids for ids, _ in row] for row in answers(model, PROMPTS, SEARCH)]
    assert texts == [[ids for ids, _ in row] for row in wanted]


@pytest.mark.parametrize("by_kernel", [True, False])
@pytest.mark.parametrize("name", [*KINDS, "olmo hybrid", "granite hybrid", "lfm3 plain", "nemotron-h"])
def test_the_memory_of_a_row_is_known_before_a_forward(
    name: str, by_kernel: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is that of the same layers as transformers' modules. Guards the number of rows that fit."""
    theirs = build_decoder(name)
    made = decoder_of(save_decoder(tmp_path / "model", theirs))
    monkeypatch.setattr(RecurrentCache, "has_kernel", staticmethod(lambda device: by_kernel))
    model, other = DecoderForestModel(made.decoder, name, made.settings), CausalForestModel(theirs, name)
    for precision in (torch.float32, torch.float64):
        for forest in (model, other):
            forest.keep_recurrent_states_in(precision)
        for window in (0, 24):
            assert model.recurrent_bytes(window) == other.recurrent_bytes(window) > 0
    assert model.kv_bytes_per_slot() == other.kv_bytes_per_slot()
    assert not model.copies_prefixes


def test_the_pattern_of_a_config_names_its_layers() -> None:
    """As released files of Nemotron-H have it."""
    settings = {name: value for name, value in DECODERS["nemotron-h"][1].items() if name != "layers_block_type"}
    config = decoder_config_of(NemotronHConfig(**settings, hybrid_override_pattern="M-*E"))
    assert isinstance(config, DecoderConfig)
    assert config.mixers == ("recurrent", "none", "attention", "none")
    assert config.mixtures == (False, False, False, True)
    assert [config.inner_of(layer) for layer in range(4)] == [0, 96, 0, 96]
    config = decoder_config_of(NemotronHConfig(**settings, hybrid_override_pattern="**"))
    assert isinstance(config, DecoderConfig)
    assert (config.mixer, config.inner_of(1)) == (None, 0)


@ON_CPU
@KERNELS
@pytest.mark.parametrize("name", KINDS)
def test_a_program_is_built_without_a_step_of_the_states(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards prompts that would be read twice: a mutant reads them when their program is built, too."""
    model = decoder_of(save_decoder(tmp_path / "model", build_decoder(name)))
    wanted = answers(model, PROMPTS, SEARCH)
    model.release()
    postpone = recording.postpone

    def twice(shape: tuple[int, ...], dtype: torch.dtype, function: Callable[[], Tensor]) -> Tensor:
        if recording._thread.program is not None:
            with torch.inference_mode(), recording._recording(None):
                function()
        return postpone(shape, dtype, function)

    monkeypatch.setattr(recording, "postpone", twice)
    assert answers(model, PROMPTS, SEARCH) != wanted


@needs_int8
@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("form", ["int8", "int4"])
def test_products_of_mixers_are_quantized(name: str, form: str, any_size: None, tmp_path: Path) -> None:  # noqa: F811
    """They take part of the memory of plain ones, and a later load makes the same of them."""
    folder = save_decoder(tmp_path / "model", build_decoder(name))
    plain, model, again = (decoder_of(folder, quantize=wanted) for wanted in (None, form, form))
    mixer = model.decoder.weights.layers[0].mixer
    assert mixer is not None
    before = plain.decoder.weights.layers[0].mixer
    assert before is not None
    for field in ("into", "out"):
        held, whole = (sum(part.nbytes for part in getattr(of, field).weights) for of in (mixer, before))
        assert held < 0.8 * whole
    assert model.invariant, model.varies
    assert answers(model, PROMPTS, SEARCH) == answers(again, PROMPTS, SEARCH)
