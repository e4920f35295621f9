"""A draft head in training: EAGLE-3 in float32, unrolled on its own guesses over trees of answers, and written in the
format of `speculators`.

A node's input is its own token and the state of its parent. Step 0 of the unrolling reads hidden states computed by the
target. Step s reads the head's own outputs of step s - 1, as the head does for the s-th layer that is drafted.

Letters: B trees, N nodes of a tree with its prompt, m nodes that are trained on (the last of the prompt and those of
the answer), H hidden width, T layers whose states are taken, Q query heads, K kv heads, E head dim, C tokens of the
head, V tokens of the target.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from dsbd_cli._version import __version__
from dsbd_cli.config.model import ModelSpec
from dsbd_cli.errors import ModelError, UnsupportedModelError, UsageError, one_line
from dsbd_cli.models.checkpoints.checkpoint import Checkpoint
from dsbd_cli.models.checkpoints.loader import load_network
from dsbd_cli.models.checkpoints.text_part import text_tensors
from dsbd_cli.models.decoder.config import DecoderConfig
from dsbd_cli.models.decoder.load import decoder_config_or_reason
from dsbd_cli.models.decoder.weights import WeightReader
from dsbd_cli.models.draft_heads.formats import LAYER_IDS, SPECULATORS, VERSION, layer_config
from dsbd_cli.train.target_answers import AnswerTokens

SPECULATED = 4  # tokens that other engines draft, as the folder's config asks
VOCABULARY, LEAST_VOCABULARY = 8192, 64  # tokens of a head: by default, and at least
SMALL = 0.1  # scale of the random part of the first linear layer, `fc`
FILE = "model.safetensors"
HIDDEN = -1e9  # attention score of a key that a query does not see


@dataclass(frozen=True, slots=True)
class Trees:
    """Trees of answers, padded.

    Attributes:
        tokens, positions, parent: [B, N] int64; the parent of a first token is 0.
        states: [B, N, T * H] float32, hidden states that the target computed for each node, of T layers side by side.
        nodes: [B, m] int64, indices in N. above: [B, m] int64, index in m of the parent, -1 where the parent is not
            among them.
        real: [B, m] bool, False for padding. sees: [B, m, N] bool, ancestors and the node itself.
    """

    tokens: Tensor
    positions: Tensor
    parent: Tensor
    states: Tensor
    nodes: Tensor
    above: Tensor
    real: Tensor
    sees: Tensor

    @classmethod
    def of(cls, answers: Sequence[AnswerTokens], states: Sequence[Tensor]) -> Trees:
        """Pad trees to one batch. states: [N, T * H] of each tree's nodes."""
        count = len(answers)
        most = max(len(answer.text) for answer in answers)
        learnt = max(answer.learnt for answer in answers)
        width = states[0].shape[-1]
        tokens, positions, parent = (torch.zeros(count, most, dtype=torch.int64) for _ in range(3))
        nodes, above = (torch.zeros(count, learnt, dtype=torch.int64) for _ in range(2))
        real, sees = torch.zeros(count, learnt, dtype=torch.bool), torch.zeros(count, learnt, most, dtype=torch.bool)
        padded = torch.zeros(count, most, width)
        for row, (answer, tree_states) in enumerate(zip(answers, states, strict=True)):
            size, last = len(answer.text), len(answer.prompt) - 1
            tokens[row, :size], positions[row, :size] = torch.tensor(answer.text), torch.tensor(answer.positions)
            parent[row, :size], padded[row, :size] = torch.tensor(answer.parents).clamp(min=0), tree_states.float()
            nodes[row, : size - last] = torch.arange(last, size)
            nodes[row, size - last :] = last
            above[row] = parent[row, nodes[row]] - last
            above[row, 0] = -1
            real[row, : size - last] = True
            sees[row, : size - last, :size] = answer.sees(last, size)
        above = torch.where(real, above, -1)
        # the first token has no state before it: it is seen only where nothing else is, as when the head drafts
        sees[..., 0] &= sees.sum(-1) == 1
        return cls(tokens, positions, parent, padded, nodes, above, real, sees)

    def to(self, device: torch.device) -> Trees:
        """Return the same trees on another device."""
        return Trees(*(getattr(self, name).to(device) for name in self.__slots__))


class TrainedNorm(nn.Module):
    """An RMS norm."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(width)), eps

    def forward(self, x: Tensor) -> Tensor:
        """Normalise x [..., width] in float32."""
        y = x.float()
        return y * torch.rsqrt(y.square().mean(-1, keepdim=True) + self.eps) * self.weight


class DraftHeadLayer(nn.Module):
    """The layer of an EAGLE-3 head, with tensors named as in a checkpoint."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        hidden, size = config.hidden, config.heads * config.head_dim
        kv = config.kv_heads * config.head_dim
        self.input_layernorm = TrainedNorm(hidden, config.eps)
        self.hidden_norm = TrainedNorm(hidden, config.eps)
        self.post_attention_layernorm = TrainedNorm(hidden, config.eps)
        self.self_attn = nn.ModuleDict({
            "q_proj": _linear(2 * hidden, size), "k_proj": _linear(2 * hidden, kv), "v_proj": _linear(2 * hidden, kv),
            "o_proj": _linear(size, hidden),
        })  # fmt: skip
        self.mlp = nn.ModuleDict({
            "gate_proj": _linear(hidden, config.inner), "up_proj": _linear(hidden, config.inner),
            "down_proj": _linear(config.inner, hidden),
        })  # fmt: skip


class DraftHeadStudent(nn.Module):
    """An EAGLE-3 head in training. All its weights are trained except its LM head, whose rows are the target's own.

    Attributes:
        taps: numbers of target layers after which hidden states are taken. ids: [C] int64, ascending, token ids of the
            columns of its logits. layer: config of its layer. target: config entry that names its target.
    """

    d2t: Tensor
    t2d: Tensor

    def __init__(
        self, layer: dict[str, Any], taps: Sequence[int], ids: Tensor, table: Tensor, target: dict[str, Any]
    ) -> None:
        """table: [V, H], the target's embeddings."""
        super().__init__()
        self.layer, self.taps, self.target = layer, tuple(taps), target
        self.config = config = layer_config(layer)
        self.fc = _linear(len(self.taps) * config.hidden, config.hidden)
        self.layers = nn.ModuleList([DraftHeadLayer(config)])
        self.norm = TrainedNorm(config.hidden, config.eps)
        self.lm_head = _linear(config.hidden, len(ids))
        self.lm_head.weight.requires_grad_(False)
        kept = torch.zeros(config.vocabulary, dtype=torch.bool)
        kept[ids] = True
        self.register_buffer("d2t", ids - torch.arange(len(ids)))  # offset from column to token id
        self.register_buffer("t2d", kept)
        self.register_buffer("table", table, persistent=False)

    @property
    def ids(self) -> Tensor:
        """Token ids [C] of the columns of its logits."""
        return self.d2t + torch.arange(len(self.d2t), device=self.d2t.device)

    @property
    def _block(self) -> Any:
        """Its only layer."""
        return self.layers[0]

    def unrolled(self, trees: Trees, steps: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield, for each step, logits [B, m, C] after the nodes that are trained on, and which of these nodes count,
        [B, m].

        In step s a node sees keys made of the target's hidden states for its ancestors at distance s and more. For
        ancestors at distance d < s, and in steps after 0 for itself (d = 0), it sees keys made of what the head guessed
        in step s - d.
        """
        fused = self.fc(trees.states)
        states = _take(fused, trees.parent)
        states = states.masked_fill((trees.positions == 0)[..., None], 0)  # a first token has no state before it
        keys, values = self._keys(self._joined(trees.tokens, states), self._angles(trees.positions))
        tokens, positions = trees.tokens.gather(1, trees.nodes), trees.positions.gather(1, trees.nodes)
        state, above, real, sees = _take(states, trees.nodes), trees.above.clamp(min=0), trees.real, trees.sees
        # for each step after 0, keys and values [B, m, K, E] of the ancestor that a node sees from that step
        guessed: list[tuple[Tensor, Tensor]] = []
        for step in range(steps):
            residual, query, key, value = self._project(tokens, state, positions)
            if step:
                guessed.append((key, value))
            state, logits = self._output(residual, self._attend(query, keys, values, sees, guessed))
            yield logits, real
            # the next step reads, for each node, what this step computed for its parent
            state, guessed = _take(state, above), [(_take(key, above), _take(value, above)) for key, value in guessed]
            real = real.gather(1, above) & (trees.above >= 0)
            sees = sees.gather(1, above[..., None].expand_as(sees))
            sees[..., 0] = False

    def _project(self, tokens: Tensor, states: Tensor, positions: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return the residual stream [B, n, H], queries [B, n, Q, E], keys and values [B, n, K, E]."""
        x, angles = self._joined(tokens, states), self._angles(positions)
        return states, _rotated(self._heads("q", x), *angles), *self._keys(x, angles)

    def _joined(self, tokens: Tensor, states: Tensor) -> Tensor:
        """Return the input of the layer: normalised embeddings and states side by side, [B, n, 2H]."""
        embedded = nn.functional.embedding(tokens, self.table).float()  # type: ignore[arg-type]
        return torch.cat((self._block.input_layernorm(embedded), self._block.hidden_norm(states)), -1)

    def _keys(self, x: Tensor, angles: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """Return keys and values [B, n, K, E]."""
        return _rotated(self._heads("k", x), *angles), self._heads("v", x)

    def _heads(self, name: str, x: Tensor) -> Tensor:
        projected: Tensor = self._block.self_attn[f"{name}_proj"](x).unflatten(-1, (-1, self.config.head_dim))
        return projected

    def _angles(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Return cosines and sines [B, n, 1, E]."""
        tables = self.config.rotaries[0].table(int(positions.max()) + 1, self.config.head_dim)
        cos, sin = (table.to(positions.device)[positions][:, :, None] for table in tables)
        return cos, sin

    def _attend(
        self, query: Tensor, keys: Tensor, values: Tensor, sees: Tensor, guessed: list[tuple[Tensor, Tensor]]
    ) -> Tensor:
        """Return the attention's output [B, m, Q * E]. keys, values: [B, N, K, E], of all nodes. guessed: further keys
        and values, [B, m, K, E], one for each query."""
        config = self.config
        query = query.reshape(*query.shape[:2], config.kv_heads, -1, config.head_dim) * config.scale
        scores = torch.einsum("bmkge,bnke->bkgmn", query, keys).float().masked_fill(~sees[:, None, None], HIDDEN)
        own = [(query * key[:, :, :, None]).sum(-1).permute(0, 2, 3, 1)[..., None].float() for key, _ in guessed]
        weights = torch.cat((scores, *own), -1).softmax(-1).to(values.dtype)
        count = keys.shape[1]
        attended = torch.einsum("bkgmn,bnke->bmkge", weights[..., :count], values)
        for column, (_, value) in enumerate(guessed, count):
            attended = attended + weights[..., column].permute(0, 3, 1, 2)[..., None] * value[:, :, :, None]
        return attended.flatten(2)

    def _output(self, residual: Tensor, attended: Tensor) -> tuple[Tensor, Tensor]:
        """Return states [B, m, H], which the children read, and logits [B, m, C]."""
        layer = self._block
        y = residual + layer.self_attn["o_proj"](attended)
        x = layer.post_attention_layernorm(y)
        y = y + layer.mlp["down_proj"](nn.functional.silu(layer.mlp["gate_proj"](x)) * layer.mlp["up_proj"](x))
        return y, self.lm_head(self.norm(y))

    def write(self, folder: Path, dtype: str) -> None:
        """Write config and weights in the format of `speculators`. Raises OSError and SafetensorError."""
        kind: torch.dtype = getattr(torch, dtype)
        state = {
            name: (tensor.to(kind) if tensor.is_floating_point() else tensor).detach().cpu().contiguous()
            for name, tensor in self.state_dict().items()
        }
        save_file(state, folder / FILE, metadata={"format": "pt"})
        proposed = {
            "proposal_type": "greedy", "speculative_tokens": SPECULATED, "verifier_accept_k": 1,
            "accept_tolerance": 0.0,
        }  # fmt: skip
        config = {
            "architectures": ["Eagle3Speculator"],
            SPECULATORS: "eagle3",
            VERSION: __version__,
            "speculators_config": {
                "algorithm": "eagle3",
                "default_proposal_method": "greedy",
                "proposal_methods": [proposed],
                "verifier": self.target,
            },
            "draft_vocab_size": len(self.d2t),
            "target_hidden_size": self.config.hidden,
            "norm_before_residual": False,
            LAYER_IDS: list(self.taps),
            "transformer_layer_config": self.layer,
            "torch_dtype": dtype,
        }
        (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def draft_head_vocabulary(spec: ModelSpec, wanted: int | None) -> int:
    """Return the number of tokens of a head for the target of `spec`, from the target's config alone. wanted: None:
    VOCABULARY.

    Raises UsageError for too few, UnsupportedModelError and ModelError for a target that no head is made of.
    """
    target = Checkpoint.open(spec)
    config = target.config
    if getattr(config, "is_encoder_decoder", False):
        raise UnsupportedModelError(
            f"target model {spec.source!r} has an encoder: drafts are made of decoder-only targets alone"
        )
    if getattr(config, "quantization_config", None) is not None:
        raise ModelError(
            f"target model {spec.source!r} is quantized, and quantized layers cannot be trained: "
            "distil from the original; its draft serves both"
        )
    decoder = decoder_config_or_reason(target)
    if isinstance(decoder, str):
        raise UnsupportedModelError(
            f"a head begins as a layer of a standard decoder, but {decoder}: "
            "give generate a smaller model of the family as --draft, or --drafter ngram"
        )
    if wanted is not None and wanted < LEAST_VOCABULARY:
        raise UsageError(f"--vocab is {wanted}, but must be {LEAST_VOCABULARY} or more")
    return min(wanted or VOCABULARY, decoder.vocabulary)


def new_draft_head(spec: ModelSpec, ids: Tensor, seed: int) -> DraftHeadStudent:
    """Make an untrained head over the tokens `ids` [C] for the target of `spec`. Its layer begins as the target's last
    layer and reads the deepest of the states that are taken. Raises ModelError."""
    reader, config = _target(spec)
    target_config = reader.config
    text = config.get_text_config(decoder=True)
    taps = tapped_layers(target_config.layers)
    layer = {
        "model_type": "llama", "vocab_size": target_config.vocabulary, "hidden_size": target_config.hidden,
        "intermediate_size": target_config.inner, "num_hidden_layers": 1, "num_attention_heads": target_config.heads,
        "num_key_value_heads": target_config.kv_heads, "head_dim": target_config.head_dim, "hidden_act": "silu",
        "max_position_embeddings": target_config.positions or getattr(text, "max_position_embeddings", None) or 2048,
        "rms_norm_eps": target_config.eps, "rope_theta": _rope_theta(text), "attention_bias": False, "mlp_bias": False,
    }  # fmt: skip
    named = {"name_or_path": spec.source, "architectures": list(getattr(config, "architectures", None) or ())}
    rows, table, norm = _ends(reader)
    head = DraftHeadStudent(layer, taps, ids, table, named)
    with torch.random.fork_rng(), torch.no_grad():
        torch.manual_seed(seed)
        head.fc.reset_parameters()
        head.fc.weight.mul_(SMALL)
        head.fc.weight[:, -target_config.hidden :] += torch.eye(target_config.hidden)
        head.lm_head.weight.copy_(rows[ids])
        head.norm.weight.copy_(norm)
        _copy_layer(head.layers[0], reader)
    return head


def read_draft_head(folder: Path, spec: ModelSpec) -> DraftHeadStudent:
    """Read the head that `DraftHeadStudent.write` has written. Raises ModelError where the files are damaged."""
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        state = load_file(folder / FILE)
        ids = state["d2t"] + torch.arange(len(state["d2t"]))
        _, table, _ = _ends(_target(spec)[0])
        named = config["speculators_config"]["verifier"]
        head = DraftHeadStudent(config["transformer_layer_config"], config[LAYER_IDS], ids, table, named)
        head.load_state_dict(state)
    except (OSError, SafetensorError, ValueError, KeyError, RuntimeError) as error:
        reason = one_line(error)
        raise ModelError(f"{folder} cannot be read ({reason}): remove it to begin anew") from None
    return head


def tapped_layers(layers: int) -> tuple[int, ...]:
    """Return the numbers of layers, of `layers` in all, after which states are taken. They are those of the EAGLE-3
    paper. A target that is too small for these has the inputs of its last layers taken."""
    if layers >= 7:
        return 2, layers // 2, layers - 3
    return tuple(range(max(0, layers - 3), layers))


def _target(spec: ModelSpec) -> tuple[WeightReader, Any]:
    """Return a reader of the target's tensors, however they are stored, and the target's config. Raises ModelError."""
    target = Checkpoint.open(spec)
    config, config_or_text = target.config, decoder_config_or_reason(target)
    if isinstance(config_or_text, str):
        raise ModelError(f"target model {spec.source!r} is no standard decoder: {config_or_text}")
    if target.plain:
        return WeightReader(config_or_text, text_tensors(target.tensors), torch.float32), config
    model = load_network(target.like(device="cpu", device_map=None))
    state = model.state_dict()
    if not model.config.get_text_config(decoder=True).tie_word_embeddings:  # an adapter may bring a head
        config_or_text = replace(config_or_text, tied=False)
    tensors = text_tensors({name: partial(state.__getitem__, name) for name in state})
    return WeightReader(config_or_text, tensors, torch.float32), config


def _ends(reader: WeightReader) -> tuple[Tensor, Tensor, Tensor]:
    """Return the LM head's rows [V, H] in float32, the embeddings [V, H] as they are stored, and the final norm [H]."""
    config = reader.config
    table = reader.tensor(f"{reader.name('table')}.weight", config.vocabulary, config.hidden)
    rows = table if config.tied else reader.tensors["lm_head.weight"]()
    norm = reader.norm(f"{reader.name('norm')}.weight", config.hidden).weight + float(config.unit_offset)
    return rows.float() / config.logit_scale, table, norm


def _copy_layer(layer: Any, reader: WeightReader) -> None:
    """Copy the target's last layer with attention, which reads states and no tokens. Weights for the embeddings begin
    as zeros. An MLP without a gate is not copied."""
    config = reader.config
    last = reader.layer(max(number for number in range(config.layers) if config.attends(number)))
    linears = dict(last.linears)
    for name, weight in zip("qkv", linears["qkv"].weights[:3], strict=True):
        layer.self_attn[f"{name}_proj"].weight.copy_(torch.cat((torch.zeros_like(weight), weight), 1))
    layer.self_attn["o_proj"].weight.copy_(linears["out"].weights[0])
    if not config.ungated:
        layer.mlp["down_proj"].weight.copy_(linears["down"].weights[0])
        gate_up = torch.cat([weight.float() for weight in linears["gate_up"].weights])
        for name, weight in zip(("gate_proj", "up_proj"), gate_up.chunk(2), strict=True):
            layer.mlp[name].weight.copy_(weight)
    offset = float(config.unit_offset)
    for norm, source in ((layer.hidden_norm, last.input_norm), (layer.post_attention_layernorm, last.mlp_norm)):
        if source is not None:
            norm.weight.copy_(source.weight + offset)


def _rope_theta(text: Any) -> float:
    """Return the base of a target's rotary positions. Where there are several kinds, it is that of full attention."""
    rope = getattr(text, "rope_parameters", None) or {}
    rope = rope.get("full_attention", rope)
    return float(rope.get("rope_theta") or 10000.0)


def _linear(inputs: int, outputs: int) -> nn.Linear:
    return nn.Linear(inputs, outputs, bias=False)


def _take(x: Tensor, index: Tensor) -> Tensor:
    """Gather x [B, n, ...] at the indices [B, m] and return [B, m, ...]."""
    return x.gather(1, index.view(*index.shape, *(1,) * (x.dim() - 2)).expand(*index.shape, *x.shape[2:]))


def _rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, -1)
    return x * cos + torch.cat((-second, first), -1) * sin
