"""Draft heads whose LM head is part of the target's: further tokens of each request."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from dsbd_cli.engine.core.forest import Forest
from dsbd_cli.engine.drafting.base import DraftContext
from dsbd_cli.engine.iteration.observer import Observer
from dsbd_cli.engine.protocols import ForestInput
from dsbd_cli.models.checkpoints.checkpoint import open_pair
from dsbd_cli.models.decoder.own_rows import OWN_IDS
from dsbd_cli.models.draft_heads.model import DecoderDraftHead
from dsbd_cli.models.pair import load_pair
from tests.models.decoders import V, build_decoder, save_decoder
from tests.models.draft_heads.checkpoints import KEPT, LAYERS, ScalarHead, eagle3
from tests.models.draft_heads.test_draft_heads import PROMPTS, answers, apart, engine_of, requests, spec_for
from tests.ops.cpu.test_int8 import any_size, needs_int8  # noqa: F401


def save_pair(
    folder: Path, form: str = "speculators", family: str = "llama", dtype: torch.dtype = torch.float32, **changes: Any
) -> tuple[Path, Path, Any]:
    """Write a target and a head whose rows are the target's."""
    theirs = build_decoder(family, num_hidden_layers=LAYERS, **changes)
    target, head = save_decoder(folder / "target", theirs, dtype), eagle3(folder / "head", form)
    tensors = load_file(head / "model.safetensors")
    scale = getattr(theirs.config, "logits_scaling", 1.0)
    tensors["lm_head.weight"] = (theirs.get_output_embeddings().weight.detach()[KEPT] / scale).to(dtype)
    save_file(tensors, head / "model.safetensors")
    return target, head, theirs


class Laws(Observer):
    """Compares the logits of drafted nodes with the formula over one path, in the fixed columns and in own ones."""

    attached = True

    def __init__(self, head: DecoderDraftHead, formula: ScalarHead, monkeypatch: pytest.MonkeyPatch) -> None:
        self.formula, self.logits, self.worst, self.counted, self.own = formula, list[Tensor](), 0.0, 0, 0
        forward = head.forward

        def kept(batch: ForestInput, *, logits: bool = True) -> Tensor | None:
            output = forward(batch, logits=logits)
            if output is not None:
                self.logits.append(output.clone())
            return output

        monkeypatch.setattr(head, "forward", kept)

    def drafted(self, context: DraftContext, forest: Forest) -> None:
        table, beams, own = context.buffer.table, context.beams, context.own_ids
        assert own is not None
        for depth, law in enumerate(self.logits):
            nodes = forest.layers[depth]
            layer_law = law[:, -nodes.token.shape[1] :]
            for row, node in nodes.valid.nonzero().tolist()[::10]:
                root, prefix = int(nodes.root[row, node]), int(table.common_prefix[row])
                slots = [*range(prefix), *(prefix + beams.ancestors[row, root].nonzero().flatten()).tolist()]
                text = table.tokens[row, slots].tolist()
                path = [*text, int(beams.token[row, root]), *nodes.path_tokens[row, node, :depth].tolist()]
                some = own[row][own[row] < V]
                wanted = self.formula.logits(path, len(text))[torch.cat((KEPT, some))]
                here = layer_law[row, node]
                assert bool((here[len(KEPT) + len(some) :] == float("-inf")).all())
                self.worst = max(self.worst, apart(here[: len(wanted)], wanted))
                self.counted, self.own = self.counted + 1, max(self.own, len(some))
        self.logits.clear()


@pytest.mark.parametrize(
    ("form", "family", "rule", "beams"),
    [
        ("speculators", "llama", "rejection", 3),
        ("raw", "llama", "search", 4),
        ("speculators", "llama tied", "coupled", 1),
        ("speculators", "granite", "coupled", 3),
    ],
)
def test_laws_are_those_of_the_whole_lm_head(
    form: str, family: str, rule: str, beams: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards the rows of another token, and a scale of the target's logits that is forgotten or taken twice."""
    wide = {"hidden_size": 64} if family == "granite" else {}
    target, source, theirs = save_pair(tmp_path, form, family, **wide)
    pair = load_pair(*open_pair(spec_for(target), spec_for(source, "draft")))
    head: Any = pair.draft
    assert isinstance(head, DecoderDraftHead)
    assert head.own_ids_below == V
    assert pair.draft_form is not None
    assert pair.draft_form.endswith(f"; {OWN_IDS}")
    tensors = load_file(source / "model.safetensors")
    scale = getattr(theirs.config, "logits_scaling", 1.0)
    tensors["lm_head.weight"] = theirs.get_output_embeddings().weight.detach() / scale
    tap = head.target._tap
    assert tap is not None
    formula = ScalarHead(tensors, json.loads((source / "config.json").read_text()), theirs, tap.layers)
    plain = answers(engine_of(pair.target, None, rule, beams)) if rule != "rejection" else None
    laws = Laws(head, formula, monkeypatch)
    engine = engine_of(pair.target, head, rule, beams)
    engine.observe(laws)
    results = list(engine.run(requests(6, rule)))
    assert [result.error for result in results] == [None] * len(PROMPTS)
    assert (
        plain is None or [[(beam.token_ids, beam.logprob) for beam in result.hypotheses] for result in results] == plain
    )
    assert laws.worst <= 1e-5
    assert laws.counted > 15
    assert laws.own > 10


@pytest.mark.parametrize(("rule", "beams"), [("search", 4), ("coupled", 1), ("coupled", 3)])
def test_no_text_depends_on_own_ids(rule: str, beams: int, tmp_path: Path) -> None:
    target, source, _ = save_pair(tmp_path)
    pair = load_pair(*open_pair(spec_for(target), spec_for(source, "draft")))
    plain = answers(engine_of(pair.target, None, rule, beams, batch=3))
    for batch, more in ((4, {"adaptive_depth": True}), (2, {"drafter": "rsd-s+ngram"})):
        assert answers(engine_of(pair.target, pair.draft, rule, beams, batch=batch, **more)) == plain


@needs_int8
def test_int8_models_have_them(any_size: None, tmp_path: Path) -> None:  # noqa: F811
    wide = {"hidden_size": 64, "intermediate_size": 128}
    target, source, _ = save_pair(tmp_path, "raw", dtype=torch.bfloat16, **wide)
    specs = (
        spec_for(target, dtype="bfloat16", quantize="int8"),
        spec_for(source, "draft", "bfloat16", quantize="int8"),
    )
    pair = load_pair(*open_pair(*specs))
    assert pair.draft.own_ids_below == V  # type: ignore[union-attr]
    for rule, beams in (("search", 4), ("coupled", 1)):
        plain = answers(engine_of(pair.target, None, rule, beams))
        assert answers(engine_of(pair.target, pair.draft, rule, beams)) == plain


def test_a_head_with_rows_of_its_own_has_none(tmp_path: Path) -> None:
    theirs = build_decoder("llama", num_hidden_layers=LAYERS)
    target = save_decoder(tmp_path / "target", theirs)
    pair = load_pair(*open_pair(spec_for(target), spec_for(eagle3(tmp_path / "head", "speculators"), "draft")))
    assert pair.draft.own_ids_below == 0  # type: ignore[union-attr]
    assert pair.draft_form is not None
    assert OWN_IDS not in pair.draft_form
