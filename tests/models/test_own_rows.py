"""Drafts that lack tokens, and the rows of a whole table from which each request adds its own ids."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from dsbd_cli.config.model import ModelSpec
from dsbd_cli.engine.protocols import ForestInput
from dsbd_cli.models.checkpoints.checkpoint import Checkpoint, open_pair
from dsbd_cli.models.decoder.decoder_model import DecoderForestModel
from dsbd_cli.models.decoder.own_rows import OWN_IDS, OwnRows
from dsbd_cli.models.load_model import load_model
from dsbd_cli.models.pair import load_pair
from dsbd_cli.train.trim import trim
from tests.helpers.checkpoints import save
from tests.models.decoders import V, build_decoder, save_decoder

COUNTS = Counter(dict.fromkeys(range(5, 25), 1))
OWN = torch.tensor([[90, 3, V, 60], [40, V, V, V]])


def spec_of(folder: Path, role: Any = "draft", **more: Any) -> ModelSpec:
    return ModelSpec(str(folder), role, device="cpu", **{"dtype": "float32", **more})


def batch_of(own: Tensor | None, rows: int = 2, nodes: int = 5) -> ForestInput:
    tokens = torch.randint(4, V, (rows, nodes), generator=torch.Generator().manual_seed(3))
    places = torch.arange(nodes).expand(rows, -1)
    mask = (places[0] <= places[0][:, None]).expand(rows, -1, -1)
    return ForestInput(tokens, places, places, mask, places, own_ids=own)


def forward(model: Any, own: Tensor | None, **sizes: int) -> Tensor:
    model.reserve(2, 9)
    with torch.inference_mode():
        logits: Tensor = model.forward(batch_of(own, **sizes))
    model.release()
    return logits


Pairs = Callable[..., tuple[Any, Any]]


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> Pairs:
    """A tied decoder and the trimmed draft made of it, by family and dtype."""

    @cache
    def made(family: str, dtype: str = "float32") -> tuple[Any, Any]:
        root = tmp_path_factory.mktemp("own")
        folder = save_decoder(root / "full", build_decoder(family, tie_word_embeddings=True), getattr(torch, dtype))
        trim(spec_of(folder), root / "small", COUNTS, size=20)
        return tuple(load_model(Checkpoint.open(spec_of(path, dtype=dtype))).model for path in (folder, root / "small"))  # type: ignore[return-value]

    return made


@pytest.mark.parametrize("family", ["llama", "gemma", "gemma2", "granite", "qwen2"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_logits_of_own_ids_are_the_full_head_s(family: str, dtype: str, pairs: Pairs) -> None:
    """Guards a scale, a cap or a column forgotten, and what is said of no token: -inf, not the cap."""
    full, small = pairs(family, dtype)
    assert isinstance(small, DecoderForestModel)
    assert small.own_ids_below == V
    assert full.own_ids_below == 0
    wanted, logits, bare = forward(full, None), forward(small, OWN), forward(small, None)
    count = len(small.lm_head_ids)
    assert logits.shape == (2, 5, count + 4)
    assert torch.equal(logits[..., :count], bare)
    for row, own in enumerate(OWN.tolist()):
        for column, token in enumerate(own, count):
            if token == V:
                assert bool((logits[row, :, column] == float("-inf")).all())
            else:
                limit = 1e-5 if dtype == "float32" else 3e-2
                torch.testing.assert_close(logits[row, :, column], wanted[row, :, token], rtol=limit, atol=limit)


def test_rows_are_picked_once_for_the_same_ids(pairs: Pairs, monkeypatch: pytest.MonkeyPatch) -> None:
    _, small = pairs("llama")
    rows, picks, ids = small.decoder.own_rows.rows, [], OWN.clone()
    take = rows.take
    monkeypatch.setattr(rows, "take", lambda ids: picks.append(ids) or take(ids))
    first = forward(small, ids)
    assert torch.equal(forward(small, ids), first)
    assert len(picks) == 1
    ids = OWN.clone()
    ids[0, 0] = 91
    assert not torch.equal(forward(small, ids), first)
    assert len(picks) == 2


def test_a_forward_of_few_nodes_is_filled_up(pairs: Pairs) -> None:
    _, small = pairs("llama")
    assert forward(small, OWN, nodes=1).shape == (2, 1, len(small.lm_head_ids) + 4)


def test_a_target_s_narrower_vocabulary_cuts_the_fixed_columns_alone(pairs: Pairs) -> None:
    full, small = pairs("llama")
    ids = small.lm_head_ids
    small.fit_width(20)
    wanted, logits = forward(full, None), forward(small, torch.tensor([[19, 3], [20, 20]]))
    kept = ids[ids < 20]
    assert logits.shape[-1] == len(kept) + 2
    torch.testing.assert_close(logits[0][..., :-2], wanted[0][..., kept])
    torch.testing.assert_close(logits[0][..., -2:], wanted[0][..., [19, 3]])
    small.spread(ids, V)


def test_a_draft_without_a_tied_table_has_no_own_ids(tmp_path: Path) -> None:
    """Guards embeddings taken for rows of an LM head."""
    folder = save_decoder(tmp_path / "full", build_decoder("llama"))
    trim(spec_of(folder), tmp_path / "small", COUNTS, size=20)
    pair = load_pair(*open_pair(spec_of(folder, "target"), spec_of(tmp_path / "small")))
    assert pair.draft.own_ids_below == 0  # type: ignore[union-attr]
    assert pair.draft_form == f"20 of {V} tokens"


def test_what_was_read_of_a_trimmed_draft_says_so(tmp_path: Path) -> None:
    folder = save_decoder(tmp_path / "full", build_decoder("llama tied"))
    trim(spec_of(folder), tmp_path / "small", COUNTS, size=20)
    pair = load_pair(*open_pair(spec_of(folder, "target"), spec_of(tmp_path / "small")))
    assert pair.draft_form == f"20 of {V} tokens; {OWN_IDS}"
    assert not pair.notes
    assert load_pair(*open_pair(spec_of(folder, "target"), spec_of(folder))).draft_form is None


def test_a_draft_of_the_transformers_backend_has_none(tmp_path: Path) -> None:
    folder = save(tmp_path / "full", "gpt2", tie_word_embeddings=True)
    trim(spec_of(folder), tmp_path / "small", COUNTS, size=20)
    small = load_model(Checkpoint.open(spec_of(tmp_path / "small"))).model
    assert small.lm_head_ids is not None
    assert small.own_ids_below == 0


TABLE = torch.randn(3000, 16, generator=torch.Generator().manual_seed(5))
SOME = torch.arange(0, 3000, 2)


@pytest.mark.parametrize("scale", [1.0, 3.0])
def test_rows_are_recognised_but_for_rounding(scale: float) -> None:
    rows = TABLE[SOME] / scale
    assert OwnRows.of(rows, SOME, TABLE, torch.float32, scale) is not None
    assert OwnRows.of(rows.bfloat16(), SOME, TABLE, torch.float32, scale) is not None
    assert OwnRows.of(rows, SOME, TABLE.bfloat16(), torch.float32, scale) is not None


def test_rows_of_their_own_are_told_apart() -> None:
    rows = TABLE[SOME]
    trained = rows + 0.05 * torch.randn(rows.shape, generator=torch.Generator().manual_seed(6))
    for other in (trained, rows.roll(1, 0), 1.05 * rows, rows[:, :8]):
        assert OwnRows.of(other, SOME, TABLE, torch.float32) is None
    assert OwnRows.of(rows, SOME + 2, TABLE, torch.float32) is None  # one past the table
    assert OwnRows.of(rows / 2, SOME, TABLE, torch.float32, 1.0) is None
