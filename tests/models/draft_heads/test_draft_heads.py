"""Draft heads: states of the target in its slots, laws of drafted nodes against a formula over one path, texts that do
not depend on the head."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import cycle, islice
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

import dsbd_cli
from dsbd_cli.cli.app import run
from dsbd_cli.config.method import MethodConfig
from dsbd_cli.config.model import ModelSpec
from dsbd_cli.config.sampling import SamplingConfig
from dsbd_cli.engine.core.forest import Forest
from dsbd_cli.engine.decoding.engine import Engine
from dsbd_cli.engine.drafting.base import DraftContext
from dsbd_cli.engine.iteration.observer import Observer
from dsbd_cli.engine.planning.acceptance import Acceptance
from dsbd_cli.engine.planning.planner import Prospects, Shape
from dsbd_cli.engine.protocols import DraftHeadModel, ForestInput
from dsbd_cli.models.checkpoints.checkpoint import Checkpoint, open_pair
from dsbd_cli.models.decoder.decoder_model import DecoderForestModel
from dsbd_cli.models.draft_heads.model import DecoderDraftHead
from dsbd_cli.models.forest_model import HiddenStateTap
from dsbd_cli.models.load_model import load_model
from dsbd_cli.models.pair import load_pair
from dsbd_cli.ops.cpu.int8 import Int8Product
from dsbd_cli.requests import Request
from tests.helpers.toys import NumberCodec
from tests.models.decoders import V, build_decoder, save_decoder
from tests.models.draft_heads.checkpoints import KEPT, LAYERS, ScalarHead, add_mtp, eagle3
from tests.ops.cpu.test_int8 import any_size, needs_int8  # noqa: F401

ENDS = (2, 3)
COMMON = torch.randint(4, V, (70,), generator=torch.Generator().manual_seed(1)).tolist()
# the last ones need more slots than the first ones, and share a beginning
PROMPTS = [[5], [9, 8, 7], list(range(20, 31)), COMMON[:40], [*COMMON, 4, 5], [*COMMON, 6]]
FORMS: dict[str, dict[str, Any]] = {
    "speculators": {},
    "raw": {},
    "qwen": {},
    "deepseek": {},
    "raw with all tokens": {"kept": None, "own": True},
    "speculators with norms": {"norm_before_fc": True, "norm_output": True, "norm_before_residual": False},
    "raw with norms": {"fc_norm": True, "norm_before_residual": True},
}


def spec_for(source: Path | str, role: Any = "target", dtype: str = "float32", **more: Any) -> ModelSpec:
    return ModelSpec(str(source), role, dtype=dtype, device="cpu", **more)


def save_pair(folder: Path, form: str, dtype: torch.dtype = torch.float32, **changes: Any) -> tuple[Path, str, Any]:
    """Write a target and its head; return both, and transformers' target."""
    theirs = build_decoder("llama", num_hidden_layers=LAYERS, **changes)
    target = save_decoder(folder / "target", theirs, dtype)
    kind = form.split(maxsplit=1)[0]
    if kind in ("qwen", "deepseek"):
        return add_mtp(target, kind), "mtp", theirs
    return target, str(eagle3(folder / "head", kind, **FORMS[form])), theirs


Loads = Callable[[str], tuple[Any, DecoderDraftHead, ScalarHead]]


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> Loads:
    """Pairs by form, each made and loaded once, with the head's formula."""

    @cache
    def load(form: str) -> tuple[Any, DecoderDraftHead, ScalarHead]:
        target, source, theirs = save_pair(tmp_path_factory.mktemp("heads"), form)
        pair = load_pair(*open_pair(spec_for(target), spec_for(source, "draft")))
        head: Any = pair.draft
        assert isinstance(head, DecoderDraftHead)
        folder = target if source == "mtp" else Path(source)
        tensors = load_file(folder / "model.safetensors")
        if source == "mtp":
            tensors = {name: tensor for name, tensor in tensors.items() if name.startswith(("mtp.", "model.layers.4."))}
        config = json.loads((folder / "config.json").read_text())
        tap = head.target._tap
        assert tap is not None
        return pair, head, ScalarHead(tensors, config, theirs, tap.layers)

    return load


@cache
def guide_of(target: str) -> Any:
    """The target once more, to draft in a head's place; loaded once."""
    return load_model(Checkpoint.open(spec_for(target, "draft"))).model


def apart(computed: Tensor, wanted: Tensor) -> float:
    """Root mean square of the difference, in standard deviations of what is wanted."""
    return float((computed - wanted).square().mean().sqrt() / wanted.std().clamp(min=1e-3))


@dataclass
class Watch(Observer):
    """Compares the states of all live beams and the laws of all drafted nodes with formulas.

    logits: of the head, of each forward of a layer in this iteration. worst: largest differences of states and laws.
    passed: layers that were drafted and that passed. before: key, length and layers of each row's last iteration.
    """

    head: DecoderDraftHead
    formula: ScalarHead
    logits: list[Tensor] = field(default_factory=list)
    worst: list[float] = field(default_factory=lambda: [0.0, 0.0])
    counted: list[int] = field(default_factory=lambda: [0, 0])
    passed: set[tuple[int, int]] = field(default_factory=set)
    before: dict[int, tuple[tuple[int, int], int]] = field(default_factory=dict)
    attached: bool = True

    def drafted(self, context: DraftContext, forest: Forest) -> None:
        table, beams = context.buffer.table, context.beams
        states = self.head.target.hidden_states
        texts: dict[tuple[int, int], list[int]] = {}
        for row, root in beams.valid.nonzero().tolist():
            prefix = int(table.common_prefix[row])
            slots = [*range(prefix), *(prefix + beams.ancestors[row, root].nonzero().flatten()).tolist()]
            text = texts[row, root] = table.tokens[row, slots].tolist()
            assert table.positions[row, slots].tolist() == [*range(len(text))]
            if text:
                self.note(0, apart(states[row, slots], self.formula.truth(text)))
        for row, text in enumerate(zip(context.row_key.tolist(), beams.length.tolist(), strict=True)):
            before, depth = self.before.get(row, ((0, 0), 0))
            if before[0] == text[0]:
                self.passed.add((depth, text[1] - before[1] - 1))
            self.before[row] = text, forest.depth
        laws = list(self.logits)
        assert len(laws) == (0 if context.looked_up else forest.layers_run)
        for depth, law in enumerate(laws):
            nodes = forest.layers[depth]
            layer_law = law[:, -nodes.token.shape[1] :]
            for row, node in nodes.valid.nonzero().tolist():
                text = texts[row, int(nodes.root[row, node])]
                start = int(beams.token[row, int(nodes.root[row, node])])
                path = (*text, start, *nodes.path_tokens[row, node, :depth].tolist())
                self.note(1, apart(layer_law[row, node], self.formula.logits(path, len(text))))
        self.logits.clear()

    def note(self, kind: int, error: float) -> None:
        self.worst[kind] = max(self.worst[kind], error)
        self.counted[kind] += 1


def follow(head: DecoderDraftHead, guide: Any, watch: Watch, monkeypatch: pytest.MonkeyPatch) -> None:
    """Note the head's logits, and hand out those of a guide, the target itself, so that drafts pass."""
    forward = head.forward

    def both(batch: ForestInput, *, logits: bool = True) -> Tensor | None:
        output, better = forward(batch, logits=logits), guide.forward(batch, logits=logits)
        if logits:
            watch.logits.append(output.clone())
            better[..., ::7] = float("-inf")  # which some layers fail for
            better = better if head.lm_head_ids is None else better[..., head.lm_head_ids]
        return better

    monkeypatch.setattr(head, "forward", both)

    def of_both(name: str) -> Callable[..., None]:
        calls = getattr(head, name), getattr(guide, name)

        def call(*arguments: Any, **more: Any) -> None:
            for hook in calls:
                hook(*arguments, **more)

        return call

    for name in ("reserve", "release", "select_rows", "clear", "copy_prefixes", "move"):
        monkeypatch.setattr(head, name, of_both(name))


def requests(new: int, rule: str) -> Iterator[Request]:
    for number, prompt in enumerate(PROMPTS):
        sampling = SamplingConfig(max_new_tokens=new + 3 * number, n_best=1, temperature=0.4 if rule != "search" else 1)
        yield Request(id=str(number), seed=number, prompt_ids=tuple(prompt), sampling=sampling)


def answers(engine: Engine, new: int = 6) -> list[list[tuple[tuple[int, ...], float]]]:
    results = list(engine.run(requests(new, engine.method.rule)))
    assert [result.error for result in results] == [None] * len(PROMPTS)
    return [[(beam.token_ids, beam.logprob) for beam in result.hypotheses] for result in results]


def engine_of(target: Any, draft: Any, rule: str, beams: int, depth: int = 3, batch: int = 2, **more: Any) -> Engine:
    count = 2 * beams if beams > 1 else 3
    method = MethodConfig.of(
        {"rule": rule, "num_beams": beams, "depth": depth if draft else 0, "drafts_per_layer": count, **more}
    )
    return Engine(target, draft, NumberCodec(V, ENDS), method, batch_size=batch)


def choose(engine: Engine, depths: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Draft so many layers, iteration by iteration."""
    turns, count = cycle(depths), engine.method.drafts_per_layer
    monkeypatch.setattr(engine._planner, "choose", lambda *arguments: Shape(next(turns), count))


def watched(
    loaded: tuple[Any, DecoderDraftHead, ScalarHead],
    rule: str,
    beams: int,
    depths: list[int],
    monkeypatch: pytest.MonkeyPatch,
) -> Watch:
    """Run requests with drafts of these depths in turn, see that no text depends on them, and return what was seen."""
    pair, head, formula = loaded
    guide = guide_of(pair.target.name)
    plain = answers(engine_of(pair.target, None, rule, beams), 5)
    watch = Watch(head, formula)
    follow(head, guide, watch, monkeypatch)
    engine = engine_of(pair.target, head, rule, beams, max(depths))
    choose(engine, depths, monkeypatch)
    engine.observe(watch)
    outcomes = []
    for result in engine.run(requests(5, rule)):
        assert result.error is None
        outcomes.append([(beam.token_ids, beam.logprob) for beam in result.hypotheses])
    assert outcomes == plain
    assert min(watch.counted) > 20
    assert {depth for depth, _ in watch.passed} == set(depths)
    assert len({count for depth, count in watch.passed if depth}) > 2
    return watch


@pytest.mark.parametrize(
    ("form", "rule", "beams", "depths"),
    [
        ("speculators", "search", 4, [3]),
        ("speculators", "coupled", 1, [3, 0, 0, 1, 2]),
        ("raw", "coupled", 3, [2, 0, 3]),
        ("qwen", "search", 4, [3, 1]),
        ("qwen", "coupled", 1, [4]),
        ("deepseek", "coupled", 3, [0, 0, 0, 0, 0, 0, 2, 3]),
        ("raw with all tokens", "search", 4, [4, 0]),
        ("speculators with norms", "search", 1, [3]),
        ("raw with norms", "coupled", 1, [2]),
    ],
)
def test_states_and_laws_are_those_of_a_formula(
    form: str, rule: str, beams: int, depths: list[int], loaded: Loads, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards the plane of states through prompts, forests, moves, refill, prefixes that are shared and growth, and the
    head's laws after iterations in which some layers, none or all passed and after iterations without drafts."""
    watch = watched(loaded(form), rule, beams, depths, monkeypatch)
    assert watch.worst[0] <= 1e-5, "states"
    assert watch.worst[1] <= 1e-5, "laws"


@pytest.mark.parametrize(("form", "rule", "beams"), [("speculators", "search", 3), ("qwen", "coupled", 1)])
def test_states_and_laws_after_look_ups(
    form: str, rule: str, beams: int, loaded: Loads, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A second drafter drafts some iterations alone, of texts that it knows from an earlier run. The head rests, and
    must count none of their nodes as run."""
    pair, head, formula = loaded(form)
    guide = guide_of(pair.target.name)
    plain, watch = answers(engine_of(pair.target, None, rule, beams)), Watch(head, formula)
    follow(head, guide, watch, monkeypatch)
    engine = engine_of(pair.target, head, rule, beams, drafter="beam+suffix", adaptive_depth=True)
    shapes = cycle([(3, True), (2, False), (0, False), (2, True), (3, False), (1, True), (1, True)])

    def cut(shape: Shape, prospects: Prospects, requests: Sequence[Acceptance]) -> Shape:
        depth, looked_up = next(shapes)
        return Shape(depth, shape.drafts_per_layer, looked_up=looked_up)

    monkeypatch.setattr(engine._planner, "cut", cut)
    monkeypatch.setattr(engine._planner, "observe", lambda seen: None)
    assert answers(engine) == plain
    watch.logits.clear()
    engine.observe(watch)
    results = list(engine.run(requests(6, rule)))
    assert [[(beam.token_ids, beam.logprob) for beam in result.hypotheses] for result in results] == plain
    assert watch.worst[0] <= 1e-5, "states"
    assert watch.worst[1] <= 1e-5, "laws"
    assert min(watch.counted) > 20
    assert sum(result.stats.drafters["suffix"].accepted for result in results) > 20


@pytest.mark.parametrize("form", ["speculators", "qwen"])
@pytest.mark.parametrize(("rule", "beams"), [("search", 4), ("coupled", 1), ("rejection", 3)])
def test_states_and_laws_after_layers_that_did_not_go_to_the_target(
    form: str, rule: str, beams: int, loaded: Loads, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The head has run the nodes above such a layer, and must count them as run and no others."""
    pair, head, formula = loaded(form)
    guide = guide_of(pair.target.name)
    watch, goes = Watch(head, formula), cycle([True, True, False, True, True, True, False, True, False])
    follow(head, guide, watch, monkeypatch)
    engine = engine_of(pair.target, head, rule, beams)
    monkeypatch.setattr(engine._planner, "gate", lambda *arguments: lambda confidence: next(goes))
    engine.observe(watch)
    assert all(result.error is None for result in engine.run(requests(6, rule)))
    assert watch.worst[0] <= 1e-5, "states"
    assert watch.worst[1] <= 1e-5, "laws"
    assert {depth for depth, _ in watch.passed} == {0, 1, 2, 3}


@pytest.mark.parametrize(
    ("form", "rule", "beams"),
    [
        *(("speculators", rule, beams) for rule in ("search", "coupled") for beams in (1, 3, 4)),
        ("qwen", "search", 4),
        ("qwen", "coupled", 1),
        ("qwen", "coupled", 3),
    ],
)
def test_no_text_depends_on_the_head(form: str, rule: str, beams: int, loaded: Loads) -> None:
    """Rows decoded one by one with one beam, and with several in one form."""
    pair, head, _ = loaded(form)
    plain = answers(engine_of(pair.target, None, rule, beams, batch=3))
    for batch, more in ((1 if beams == 1 or form == "qwen" else 2, {}), (4, {"adaptive_depth": True})):
        engine = engine_of(pair.target, head, rule, beams, batch=batch, **more)
        assert answers(engine) == plain


def test_no_text_depends_on_the_taps(loaded: Loads) -> None:
    pair, head, _ = loaded("speculators")
    untapped = load_model(Checkpoint.open(spec_for(pair.target.name))).model
    plain = answers(engine_of(untapped, None, "search", 4))
    assert answers(engine_of(pair.target, head, "search", 4)) == plain
    assert isinstance(untapped, DecoderForestModel)
    untapped.tap(HiddenStateTap((2,), 64, lambda taken: taken[0]))  # programs that were built without it are dropped
    assert answers(engine_of(untapped, None, "search", 4)) == plain
    assert untapped.hidden_states.any()
    untapped.tap(None)
    untapped.tap(HiddenStateTap((2,), 32, lambda taken: taken[0][..., :32]))
    cache = untapped._cache
    held = sum(slab.nbytes for slab in cache._slabs.values())
    assert held == untapped.kv_bytes_per_slot() * cache.rows * cache.slots, "the former states are freed"


@needs_int8
@pytest.mark.parametrize("form", ["raw", "qwen"])
def test_no_text_of_an_int8_target_depends_on_the_head(form: str, any_size: None, tmp_path: Path) -> None:  # noqa: F811
    wide = {"hidden_size": 64, "intermediate_size": 128}
    target, source, _ = save_pair(tmp_path, form, torch.bfloat16, **wide)
    pair = load_pair(
        *open_pair(
            spec_for(target, dtype="bfloat16", quantize="int8"), spec_for(source, "draft", "bfloat16", quantize="int8")
        )
    )
    assert pair.target_dtype == "int8+bfloat16"
    assert pair.draft_dtype == "int8+bfloat16"
    decoder: Any = pair.draft.decoder  # type: ignore[union-attr]
    assert {type(layer) for layer in (decoder.parts.fc, decoder.weights.layers[0].qkv)} == {Int8Product}
    for rule, beams in (("search", 4), ("coupled", 1)):
        plain = answers(engine_of(pair.target, None, rule, beams))
        assert answers(engine_of(pair.target, pair.draft, rule, beams)) == plain


@pytest.mark.parametrize("drafter", ["beam", "rsd-s", "dynamic-tree", "beam+ngram"])
def test_all_rules_and_drafters_run(drafter: str, loaded: Loads) -> None:
    pair, head, _ = loaded("speculators")
    for rule, width in (("rejection", "fixed"), ("rejection", "threshold"), ("coupled", "fixed")):
        for beams in (1, 3) if width == "fixed" or drafter.startswith("beam") else ():
            engine = engine_of(pair.target, head, rule, beams, 2, drafter=drafter, width=width)
            for result in engine.run(islice(requests(2, rule), 3)):
                assert result.error is None
                assert all(beam.token_ids for beam in result.hypotheses)


def test_what_the_engine_sees(loaded: Loads) -> None:
    pair, head, _ = loaded("speculators")
    assert isinstance(head, DraftHeadModel)
    assert not isinstance(pair.target, DraftHeadModel)
    assert head.lm_head_ids is not None
    assert head.lm_head_ids.tolist() == KEPT.tolist()
    assert (head.vocab_size, head.max_positions) == (V, pair.target.max_positions)
    assert pair.target.kv_bytes_per_slot() == 4 * (LAYERS * 2 * 2 * 32 + 64)
    assert pair.target._cache.attending == LAYERS
    assert head.kv_bytes_per_slot() == 4 * 2 * 2 * 32
    assert head.size.held_bytes < pair.target.size.held_bytes / 2  # the embeddings are the target's
    pair.target.release()
    head.reserve(1, 8)  # alone, as `dsbd profile` runs a draft
    assert pair.target.hidden_states.shape[1:] == (8, 64)
    head.release()
    assert pair.draft_form.startswith("EAGLE-3, speculators form, 78 of 97 tokens, norm_before_residual; ")
    assert not any("EAGLE" in note for note in pair.notes)  # which are warnings of each run


def test_a_state_goes_where_its_slot_goes(loaded: Loads) -> None:
    """Guards select_rows, clear and copies, of which a text alone would not tell."""
    pair, _, formula = loaded("qwen")
    target = pair.target
    target.release()
    target.reserve(3, 20)
    tokens = torch.tensor([[7, 9, 11], [30, 31, 32]])
    places = torch.arange(3).expand(2, -1)
    mask = (torch.arange(3) <= torch.arange(3)[:, None]).expand(2, -1, -1)
    target.forward(ForestInput(tokens, places, places, mask, places, torch.tensor([0, 2]), chain=True), logits=False)
    truth = [formula.truth(text) for text in tokens.tolist()]
    assert apart(target.hidden_states[0, :3], truth[0]) <= 1e-5
    assert apart(target.hidden_states[2, :3], truth[1]) <= 1e-5
    target.copy_prefixes([(2, 1, 2)])
    assert torch.equal(target.hidden_states[1, :2], target.hidden_states[2, :2])
    target.reserve(4, 40)
    assert apart(target.hidden_states[2, :3], truth[1]) <= 1e-5
    target.move(torch.tensor([[2], [0], [0], [0]]), torch.tensor([[1], [0], [0], [0]]), torch.zeros(4))
    assert torch.equal(target.hidden_states[0, 1], target.hidden_states[0, 2])
    target.select_rows(torch.tensor([2, 0]))
    assert apart(target.hidden_states[0, :3], truth[1]) <= 1e-5
    target.clear(0, 1)
    assert apart(target.hidden_states[0, :1], truth[1][:1]) <= 1e-5
    assert not target.hidden_states[0, 1:].any()
    target.release()


def test_the_one_call_takes_a_head(tmp_path: Path) -> None:
    target, source, _ = save_pair(tmp_path, "qwen")
    method = MethodConfig(rule="search", num_beams=2, depth=2)
    for draft in (source, ModelSpec(source, device="cpu", dtype="float32")):
        engine = dsbd_cli.load(spec_for(target), draft, method=method)
        assert engine.info is not None
        assert engine.info.draft == "mtp"
        assert engine.info.draft_form == "MTP layer (mtp.*); it reads the states after the final norm"
        assert not engine.info.notes
        assert engine.generate("w5 w6").hypotheses


def test_what_was_read_of_a_head_is_no_warning(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target, source, _ = save_pair(tmp_path, "qwen")
    prompts, output, summary = (tmp_path / name for name in ("in.jsonl", "out.jsonl", "summary.json"))
    prompts.write_text('{"prompt": "w5 w6"}\n')
    form = "MTP layer (mtp.*); it reads the states after the final norm"
    for log in ("brief", "verbose"):
        files = ["-i", str(prompts), "-o", str(output), "--existing", "overwrite", "--set", f"summary={summary}"]
        models = ["--target", str(target), "--draft", source, "--max-new-tokens", "4", "--dtype", "float32"]
        assert run(["generate", *files, *models, "--set", f"log={log}"]) == 0
        said = capsys.readouterr().err
        assert "warning" not in said
        assert (form in said) == (log == "verbose")
        assert json.loads(summary.read_bytes())["device"]["draft_form"] == form
