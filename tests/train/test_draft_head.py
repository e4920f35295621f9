"""Draft heads in training: what each unrolled step sees, trees of live beams, and the folder that is written."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from dsbd_cli import Engine, MethodConfig, Request, SamplingConfig
from dsbd_cli.config.model import ModelSpec
from dsbd_cli.engine.protocols import ForestInput
from dsbd_cli.errors import ModelError
from dsbd_cli.io.lines.jsonl import LineWriter
from dsbd_cli.models.checkpoints.checkpoint import Checkpoint, open_pair
from dsbd_cli.models.draft_heads.load import load_draft_head
from dsbd_cli.models.load_model import load_model
from dsbd_cli.train.compare import with_draft
from dsbd_cli.train.distributions import Teacher, divergence, likely_tokens
from dsbd_cli.train.draft_head import DraftHeadStudent, Trees, new_draft_head, read_draft_head, tapped_layers
from dsbd_cli.train.target_answers import AnswerTokens, make_answers, read_answers
from dsbd_cli.train.training import UNROLLED, Recipe, Training
from tests.helpers.answers import chain
from tests.helpers.toys import NumberCodec, table_pair
from tests.models.decoders import V, build_decoder, save_decoder
from tests.models.draft_heads.checkpoints import LAYERS, ScalarHead

IDS = torch.tensor([*range(1, 30), *range(40, 80)])
# a tree: 7 and 8 follow the prompt, 9 and 10 the 7, 11 the 8, 12 the 10, 13 the 12; and an answer of a short prompt
TREE = AnswerTokens((5, 9, 11), (7, 8, 9, 10, 11, 12, 13), (-1, -1, 0, 0, 1, 3, 5))
ANSWERS = [TREE, chain((4,), (20, 21, 22, 23)), chain((30, 31, 32, 33, 34), (40,))]


@pytest.fixture(scope="module")
def spec(tmp_path_factory: pytest.TempPathFactory) -> ModelSpec:
    folder = save_decoder(tmp_path_factory.mktemp("target"), build_decoder("llama", num_hidden_layers=LAYERS))
    return ModelSpec(str(folder), dtype="float32", device="cpu")


@pytest.fixture
def target(spec: ModelSpec) -> Any:
    return load_model(Checkpoint.open(spec)).model


def shaken(spec: ModelSpec) -> DraftHeadStudent:
    """A head whose weights all matter: a new one does not read tokens."""
    head, made = new_draft_head(spec, IDS, 0), torch.Generator().manual_seed(1)
    with torch.no_grad():
        for weights in head.parameters():
            spread = 0.3 * weights.std(correction=0).clamp(min=0.1)
            weights.add_(spread * torch.randn(weights.shape, generator=made))
    return head


def path_to(answer: AnswerTokens, node: int) -> list[int]:
    """The tokens of `text` up to one of them."""
    parents, path = answer.parents, [node]
    while parents[path[0]] >= 0:
        path.insert(0, parents[path[0]])
    return [answer.text[node] for node in path]


@pytest.mark.parametrize("together", [True, False])
def test_each_step_is_the_layer_that_a_running_head_drafts(spec: ModelSpec, target: Any, together: bool) -> None:
    """Guards which states and keys a step sees, parents in trees, prompts of one token and padding: against a formula
    over one path that keeps nothing."""
    head = shaken(spec)
    config = {"transformer_layer_config": head.layer}
    plain = ScalarHead(dict(head.state_dict()), config, build_decoder("llama", num_hidden_layers=LAYERS), head.taps)
    teacher, compared = Teacher(target, head.taps, IDS), [0] * UNROLLED
    for some in [ANSWERS] if together else [[answer] for answer in ANSWERS]:
        trees = Trees.of(some, [teacher.distribution(answer).states for answer in some])
        for step, (logits, real) in enumerate(head.unrolled(trees, UNROLLED)):
            for row, answer in enumerate(some):
                last = len(answer.prompt) - 1
                for node in range(last, len(answer.text)):
                    path = path_to(answer, node)
                    drafted = len(path) - len(answer.prompt)
                    assert bool(real[row, node - last]) is (drafted >= step)
                    if drafted < step:
                        continue
                    wanted = plain.logits(path, len(path) - 1 - step)
                    torch.testing.assert_close(logits[row, node - last], wanted, atol=2e-4, rtol=2e-4)
                    compared[step] += 1
                assert not bool(real[row, len(answer.text) - last :].any())
    assert compared == [8 + 5 + 2, 7 + 4 + 1, 5 + 3, 2 + 2]


def test_what_is_written_is_what_was_trained(spec: ModelSpec, target: Any, tmp_path: Path) -> None:
    """Our own reader gives the trained head's logits; what other engines ask of such a folder is there."""
    head = shaken(spec)
    head.write(tmp_path, "float32")
    loaded = load_draft_head(*open_pair(spec, ModelSpec(str(tmp_path), "draft", dtype="float32", device="cpu")), target)
    assert loaded.lm_head_ids is not None
    assert loaded.lm_head_ids.tolist() == IDS.tolist()
    assert target._tap.layers == head.taps, "as written, whatever the states of other layers would give"
    text = ANSWERS[1].text
    places = torch.arange(len(text))
    batch = ForestInput(
        tokens=torch.tensor([text]),
        positions=places[None],
        slots=places[None],
        mask=(places <= places[:, None])[None],
        slot_positions=places[None],
        rows=torch.zeros(1, dtype=torch.int64),
        chain=True,
    )
    loaded.reserve(1, len(text) + 1)
    target.forward(batch, logits=False)
    logits = loaded.forward(batch)
    target.tap(None)
    states = Teacher(target, head.taps, IDS).distribution(ANSWERS[1]).states
    assert logits is not None
    wanted, _ = next(head.unrolled(Trees.of(ANSWERS[1:2], [states]), 1))
    torch.testing.assert_close(logits, wanted.detach(), atol=2e-4, rtol=2e-4)
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["speculators_model_type"] == "eagle3"
    assert config["speculators_config"]["proposal_methods"][0]["speculative_tokens"] > 0
    assert config["speculators_config"]["verifier"]["name_or_path"] == spec.source
    assert isinstance(config["transformer_layer_config"], dict)
    assert config["norm_before_residual"] is False
    assert config["draft_vocab_size"] == len(IDS)
    assert config["eagle_aux_hidden_state_layer_ids"] == list(head.taps)
    again = read_draft_head(tmp_path, spec)
    for name, weights in head.state_dict().items():
        assert torch.equal(again.state_dict()[name], weights), name
    assert torch.equal(again.table, head.table)


def test_a_new_head_is_the_targets_last_layer(spec: ModelSpec) -> None:
    """Its logits are the target's, but for what the fc adds and what no state of the parent can know."""
    model = build_decoder("llama", num_hidden_layers=LAYERS).state_dict()
    head, at = new_draft_head(spec, IDS, 0).state_dict(), f"model.layers.{LAYERS - 1}."
    for name in ("q_proj", "k_proj", "v_proj"):
        mine, theirs = head[f"layers.0.self_attn.{name}.weight"], model[f"{at}self_attn.{name}.weight"]
        assert torch.equal(mine, torch.cat((torch.zeros_like(theirs), theirs), 1))
    for mine, theirs in [
        ("self_attn.o_proj", "self_attn.o_proj"),
        ("mlp.gate_proj", "mlp.gate_proj"),
        ("mlp.up_proj", "mlp.up_proj"),
        ("mlp.down_proj", "mlp.down_proj"),
        ("hidden_norm", "input_layernorm"),
        ("post_attention_layernorm", "post_attention_layernorm"),
    ]:
        assert torch.equal(head[f"layers.0.{mine}.weight"], model[f"{at}{theirs}.weight"]), mine
    assert torch.equal(head["norm.weight"], model["model.norm.weight"])
    rows = model.get("lm_head.weight", model["model.embed_tokens.weight"])
    assert torch.equal(head["lm_head.weight"], rows[IDS])
    deep = head["fc.weight"][:, -64:] - torch.eye(64)
    assert deep.abs().max() < 0.1 * 192**-0.5 + 1e-6
    assert not new_draft_head(spec, IDS, 0).lm_head.weight.requires_grad


@pytest.mark.parametrize(("name", "out"), [("arcee", "2.self_attn.o_proj"), ("nemotron-h", "2.mixer.o_proj")])
def test_a_new_head_of_a_target_without_gates_has_its_attention(name: str, out: str, tmp_path: Path) -> None:
    model = build_decoder(name)
    spec = ModelSpec(str(save_decoder(tmp_path, model)), dtype="float32", device="cpu")
    head = new_draft_head(spec, IDS, 0)
    assert torch.equal(head.layers[0].self_attn["o_proj"].weight, model.get_parameter(f"model.layers.{out}.weight"))


@pytest.mark.parametrize("autocast", [False, True])
def test_a_head_learns_and_its_rows_stay(autocast: bool, spec: ModelSpec, target: Any) -> None:
    head = new_draft_head(spec, IDS, 0)
    rows = head.lm_head.weight.clone()
    run = Training(head, Teacher(target, head.taps, IDS), ANSWERS, Recipe(60, 3e-3, 0, autocast=autocast))
    losses = [run.run_step() for _ in range(60)]
    assert losses[-1] < 0.3 * losses[0]
    assert torch.equal(head.lm_head.weight, rows)


def test_a_step_of_a_head_does_not_depend_on_how_its_answers_are_put_together(
    spec: ModelSpec, target: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from dsbd_cli.train import training

    monkeypatch.setattr(training, "BATCH", len(ANSWERS))
    losses = []
    for most in (1 << 30, 1):
        monkeypatch.setattr(training, "CHUNK_BYTES", most)
        head = shaken(spec)
        run = Training(head, Teacher(target, head.taps, IDS), ANSWERS, Recipe(10, 1e-3, 0, autocast=False))
        assert len(run._parts(list(ANSWERS))) == (1 if most > 1 else len(ANSWERS))
        losses.append(run.run_step())
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
    head, total, weights = shaken(spec), 0.0, 0.0
    laws = [Teacher(target, head.taps, IDS).distribution(answer) for answer in ANSWERS]
    for answer, law in zip(ANSWERS, laws, strict=True):
        for step, (logits, real) in enumerate(head.unrolled(Trees.of([answer], [law.states]), UNROLLED)):
            apart = divergence(logits[0], law.ids, law.logs)[real[0]]
            total, weights = total + 0.8**step * apart.sum().item(), weights + 0.8**step * len(apart)
    assert losses[0] == pytest.approx(total / weights, rel=1e-5)


def test_long_prompts_go_through_a_head_one_by_one(
    spec: ModelSpec, target: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards memory that grows with the prompts: of attention scores, and of the target's states."""
    from dsbd_cli.train import training

    monkeypatch.setattr(training, "CHUNK_BYTES", 600_000)
    head = shaken(spec)
    run = Training(head, Teacher(target, head.taps, IDS), ANSWERS, Recipe(10, 1e-3, 0, autocast=False))
    for length, parts in ((4, 1), (400, 4)):
        answers = [chain(tuple(range(length)), (20, 21 + number)) for number in range(4)]
        assert len(run._parts(answers)) == parts


def test_a_damaged_checkpoint_is_named(spec: ModelSpec, tmp_path: Path) -> None:
    shaken(spec).write(tmp_path, "float32")
    (tmp_path / "model.safetensors").write_bytes(b"x" * 40)
    with pytest.raises(ModelError, match=r"cannot be read .*: remove it to begin anew"):
        read_draft_head(tmp_path, spec)


def test_a_head_is_measured_with_the_targets_own_ids(tmp_path: Path) -> None:
    """Guards targets whose LM head is a table of its own: the head takes rows of it, not of itself."""
    folder = save_decoder(tmp_path / "t", build_decoder("llama", num_hidden_layers=LAYERS, tie_word_embeddings=False))
    spec = ModelSpec(str(folder), dtype="float32", device="cpu")
    (tmp_path / "h").mkdir()
    new_draft_head(spec, IDS, 0).write(tmp_path / "h", "float32")
    plain, draft = (
        Engine(load_model(Checkpoint.open(spec)).model, None, NumberCodec(V)),
        ModelSpec(str(tmp_path / "h"), "draft", "float32", "cpu"),
    )
    pair = with_draft(plain, draft, spec, MethodConfig())
    assert pair.draft is not None
    assert pair.draft.own_ids_below == V


def test_the_teacher_of_a_head(spec: ModelSpec, target: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Distributions over the head's tokens and raw states of every path of a tree, in chunks too; the same bits
    whenever they are computed; tokens of most mass."""
    from dsbd_cli.train import distributions

    model, taps = build_decoder("llama", num_hidden_layers=LAYERS), tapped_layers(LAYERS)
    teacher = Teacher(target, taps, IDS, kept_bytes=0)
    mass = torch.zeros(V, dtype=torch.float64)
    for answer in ANSWERS:
        distribution, again = teacher.distribution(answer), teacher.distribution(answer)
        for name in ("ids", "logs", "states"):
            assert torch.equal(getattr(distribution, name), getattr(again, name))
        last = len(answer.prompt) - 1
        assert len(distribution.ids) == answer.learnt == len(answer.text) - last
        for node in range(len(answer.text)):
            said = model(input_ids=torch.tensor([path_to(answer, node)]), output_hidden_states=True, use_cache=False)
            taken = torch.cat([said.hidden_states[layer][0, -1] for layer in taps])
            torch.testing.assert_close(distribution.states[node], taken, atol=2e-4, rtol=2e-4)
            if node >= last:
                logs = said.logits[0, -1, IDS].log_softmax(-1).topk(distributions.TOP).values
                torch.testing.assert_close(distribution.logs[node - last], logs, atol=2e-4, rtol=2e-4)
                mass += said.logits[0, -1].double().softmax(-1)
    wanted = mass.topk(10).indices.sort().values
    assert likely_tokens(target, ANSWERS, 10).tolist() == wanted.tolist()
    whole = Teacher(target, taps, IDS).distribution(TREE)
    monkeypatch.setattr(distributions, "CHUNK", 3)
    parts = Teacher(target, taps, IDS).distribution(TREE)
    torch.testing.assert_close(parts.logs, whole.logs, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize("width", [1, 3])
@pytest.mark.parametrize("rule", ["coupled", "search"])
def test_trees_hold_the_live_beams(
    width: int, rule: str, fails: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards rows that change places, refilled ones, those that begin anew where memory is short, and the beams that
    tokens are appended to: each text, and with it each live beam at its time, is a path of its request's tree."""
    target, _ = table_pair(1, 12, 0.6)
    calls, forward = [0], target.forward

    def failing(batch: Any, **named: Any) -> Any:
        calls[0] += 1
        if fails and calls[0] == 7:
            raise torch.OutOfMemoryError
        return forward(batch, **named)

    monkeypatch.setattr(target, "forward", failing)
    method = MethodConfig(rule=rule, num_beams=width, depth=0)
    engine = Engine(target, None, NumberCodec(12, (3,)), method, batch_size=3)
    sampling = SamplingConfig(top_k=0, max_new_tokens=9, n_best=width)
    requests = [Request(id=str(i), seed=i, prompt_ids=(i % 5, i % 7), sampling=sampling) for i in range(8)]
    path = tmp_path / "answers.jsonl"
    with path.open("ab") as stream:
        assert not make_answers(engine, requests, LineWriter(stream, str(path), owned=False), lambda number: None)
    lines, answers = [json.loads(line) for line in path.read_text().splitlines()], read_answers(path)
    assert len(answers) == len(requests)
    for line, answer in zip(lines, answers, strict=True):
        assert answer.prompt == tuple(line["prompt_ids"])
        paths = {tuple(path_to(answer, node)) for node in range(len(answer.text))}
        for tokens in line["answers"]:
            assert (*answer.prompt, *tokens[:-1]) in paths
        assert len(paths) == len(answer.text), "no token stands there twice"
        depths = answer.positions[len(answer.prompt) :]
        assert depths == sorted(depths)
        counts = [depths.count(depth) for depth in sorted(set(depths))]
        assert max(counts) <= width
        if width > 1:
            assert counts[1] == width


def test_layers_whose_states_are_taken() -> None:
    assert tapped_layers(30) == (2, 15, 27)
    assert tapped_layers(7) == (2, 3, 4)
    assert [tapped_layers(count) for count in (1, 2, 3, 6)] == [(0,), (0, 1), (0, 1, 2), (3, 4, 5)]
