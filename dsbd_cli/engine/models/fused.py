"""Decoder layers whose small operations run as kernels, with q, k, v and gate, up as one product each.

No architecture is named. A module is taken for what it computes: it is run on noise, and only one that gives what the
formula gives is changed; everything else stays as transformers has it. Then the whole model must give its own logits
again, or all is undone. The check at load (selftest.py) compares the packed forest with the model's plain way after
that.

Shape letters: R rows, n nodes, B sequences, T tokens, H hidden width, E head dim.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface

from dsbd_cli.engine.models import layer_ops
from dsbd_cli.engine.models.cache import ForestCache
from dsbd_cli.engine.models.packing import Product, whole
from dsbd_cli.engine.models.recorder import serves
from dsbd_cli.engine.models.replay import queued
from dsbd_cli.engine.models.selftest import PADDING, limit_for
from dsbd_cli.kernels.twins import gated_twin, norm_twin, rotate_fits, rotate_twin

__all__ = ["Fused", "LayerKernels", "fuse", "layer_kernels"]

RECORDING = "dsbd_recording"
TOKENS = 24
LIMITS = {torch.float32: 1e-5}  # of what a module computes; else half a last bit, about
QKV = ("q_proj", "k_proj", "v_proj")
HEAD_NORMS = ("q_norm", "k_norm")


@dataclass(frozen=True, slots=True)
class LayerKernels:
    """The kernels, or their twins; None for one that is not to be used.

    Attributes:
        linear: x W^T + b; None leaves products to the library, or to what they are packed as.
        dtypes: of models that the kernels take.
        step: widths of rows, of gates and of half heads are multiples of it.
        widest: a row that is normalised has so many numbers at most.
        merges: weights of one input become one; else they wait for being packed as one.
    """

    norm: Callable[..., tuple[Tensor, Tensor]] | None
    gated: Callable[..., Tensor] | None
    rotate: Callable[..., Tensor] | None
    linear: Callable[..., Tensor] | None = None
    dtypes: tuple[torch.dtype, ...] = (torch.float32, torch.bfloat16, torch.float16)
    step: int = 1
    widest: int = 2**31
    merges: bool = True

    @property
    def present(self) -> bool:
        """Whether there is one."""
        return any(one is not None for one in (self.norm, self.gated, self.rotate, self.linear))

    @property
    def product(self) -> Callable[..., Tensor]:
        """x W^T + b."""
        return self.linear or nn.functional.linear

    def take(self, width: int, *tensors: Tensor) -> bool:
        """Whether rows of this width are taken, of tensors of one dtype."""
        kinds = {one.dtype for one in tensors}
        return width % self.step == 0 and len(kinds) == 1 and kinds <= {*self.dtypes}


def layer_kernels(device: torch.device, without: Collection[str] = ()) -> LayerKernels:
    """The kernels for a device, but those named: in triton, which is imported, or for the CPU in numba, which has none
    of products."""
    if device.type == "cpu":
        if not layer_ops.serves():
            return LayerKernels(None, None, None)
        return LayerKernels(
            layer_ops.norm,
            layer_ops.gated,
            layer_ops.rotate,
            dtypes=layer_ops.DTYPES,
            step=layer_ops.STEP,
            merges=False,
        )
    from dsbd_cli.kernels import layers, products

    found: dict[str, Any] = {
        "norm": layers.norm,
        "gated": layers.gated,
        "rotate": layers.rotate,
        "linear": products.linear,
    }
    chosen: dict[str, Any] = {name: None if name in without else kernel for name, kernel in found.items()}
    return LayerKernels(**chosen, dtypes=layers.DTYPES, widest=layers.WIDEST)


@dataclass(slots=True)
class Fused:
    """What was changed, by kind; `undo` takes all of it back, and `undone` says so. kinds: of the modules that were
    changed. joined: modules, and the names of their products that are handed one input, and wait for being packed as
    one. misfits: modules that turn out to be given what their kernel does not take."""

    counts: dict[str, int] = field(default_factory=dict)
    forwards: dict[nn.Module, Callable[..., Any]] = field(default_factory=dict)
    kinds: dict[nn.Module, str] = field(default_factory=dict)
    undone: bool = False
    joined: list[tuple[nn.Module, tuple[str, ...]]] = field(default_factory=list)
    packed: int = 0
    misfits: set[nn.Module] = field(default_factory=set)

    def undo(self) -> None:
        """The modules run as transformers has them; merged weights stay merged, as parts of one buffer or product."""
        self.undone = self.undone or bool(self.forwards)
        self._rest()
        self.forwards.clear()
        self.counts.clear()

    @contextmanager
    def away(self) -> Iterator[None]:
        """The modules run as transformers has them inside."""
        self._rest()
        try:
            yield
        finally:
            for module, forward in self.forwards.items():
                module.forward = forward

    def _rest(self) -> None:
        for module in self.forwards:
            module.__dict__.pop("forward", None)

    def _leave(self, kind: str, modules: set[nn.Module]) -> None:
        for module in modules & {*self.forwards}:
            del module.__dict__["forward"], self.forwards[module]
            self.counts[kind] -= 1
        if self.counts.get(kind) == 0:
            del self.counts[kind]

    def _replace(self, kind: str, module: nn.Module, forward: Callable[..., Any]) -> None:
        module.forward = self.forwards[module] = forward
        self.kinds[module] = kind
        self.counts[kind] = self.counts.get(kind, 0) + 1


Pack = Callable[[list[tuple[nn.Module, tuple[str, ...]]]], int]


@torch.inference_mode()
def fuse(model: Any, kernels: LayerKernels, pack: Pack | None = None) -> Fused:
    """Change a model of one device in place: its norms, gated products, attentions, layers and products, where they
    compute what the kernels do.

    pack: packs the model's products, those of one input as one, and says how many; on the CPU. Products stay the
    library's where they are at fault. Nothing is changed where the model's logits would not be the same even then, up
    to rounding, or a kernel cannot run. Hooks on what a layer is made of are not called afterwards.
    """
    fused = _tried(model, kernels, pack)
    return _tried(model, replace(kernels, linear=None)) if fused.undone and kernels.linear is not None else fused


def _tried(model: Any, kernels: LayerKernels, pack: Pack | None = None) -> Fused:
    """All of the kernels, or nothing."""
    fused = Fused()
    with suppress(Exception), _cheap(model if kernels.present else None):
        norms = _norms(model, kernels, fused)
        _gated(model, kernels, fused)
        _attentions(model, kernels, fused, norms)
        _layers(model, kernels, fused, norms)
    if pack is not None:
        fused.packed = pack(fused.joined)
    with suppress(Exception):
        _products(model, kernels, fused)
        if not fused.counts or _same_logits(model, fused):
            fused._leave("rotate", fused.misfits)
            if not kernels.merges:
                _queue(model, fused)
            return fused
    fused.undo()
    return fused


def _same_logits(model: Any, fused: Fused) -> bool:
    """Up to what padding changes, or the rounding of the dtype."""

    def logits(ids: Tensor) -> Tensor:
        found: Tensor = model(input_ids=ids, use_cache=False).logits[:, :TOKENS].float()
        return found

    tokens = torch.arange(TOKENS, device=model.device).remainder(model.config.get_text_config().vocab_size)[None]
    after = logits(tokens)
    with fused.away():
        before = logits(tokens)
        error = _apart(after, before)
        padded = nn.functional.pad(tokens, (0, PADDING))
        return error <= limit_for(model.dtype, error, lambda: _apart(logits(padded), before))


@contextmanager
def _cheap(model: nn.Module | None) -> Iterator[None]:
    """Plain products on the CPU give some of their inputs inside, with signs: what stands between them can be asked
    without reading the weights, which takes seconds."""
    generator = torch.Generator().manual_seed(23)
    modules = () if model is None else model.modules()
    linears: list[Any] = [
        one
        for one in modules
        if _plain_linear(one) and "forward" not in vars(one) and next(one.parameters()).device.type == "cpu"
    ]
    for linear in linears:
        linear.forward = _chosen(linear, generator)
    try:
        yield
    finally:
        for linear in linears:
            linear.__dict__.pop("forward", None)


def _chosen(linear: Any, generator: torch.Generator) -> Callable[[Tensor], Tensor]:
    inputs, outputs = linear.in_features, linear.out_features
    places = torch.randint(inputs, (outputs,), generator=generator)
    signs = torch.randint(2, (outputs,), generator=generator).mul_(2).sub_(1).to(linear.weight.dtype)

    def forward(input: Tensor) -> Tensor:
        found = input[..., places] * signs
        return found if linear.bias is None else found + linear.bias

    return forward


def _apart(found: Tensor, wanted: Tensor) -> float:
    """Root mean square of the error, relative to the spread."""
    return float((found - wanted).square().mean().sqrt() / wanted.std())


def _close(found: Tensor, wanted: Tensor) -> bool:
    """Equal up to rounding, where the wanted one is no constant."""
    if found.shape != wanted.shape or found.dtype != wanted.dtype:
        return False
    limit = LIMITS.get(found.dtype, 2.0**-8)
    found, wanted = found.float(), wanted.float()
    error = (found - wanted).square().mean().sqrt()
    return bool(error <= limit * wanted.square().mean().sqrt()) and bool(wanted.abs().max() > 0)


def _nearest(forms: dict[bool, Tensor], wanted: Tensor) -> bool:
    """Which of two forms gives what is wanted, or less far from it."""
    return _apart(forms[True].float(), wanted.float()) < _apart(forms[False].float(), wanted.float())


def _noise(module: nn.Module, *shape: int) -> Tensor:
    weight = next(module.parameters())
    generator = torch.Generator().manual_seed(22)
    return torch.randn(*shape, generator=generator).to(weight.dtype).to(weight.device)


def _plain_linear(module: object) -> bool:
    return type(module) is nn.Linear and not module._forward_hooks and not module._forward_pre_hooks


# Products


def _products(model: nn.Module, kernels: LayerKernels, fused: Fused) -> None:
    """Replace the plain products, the head's too. Those that were merged call the kernel by themselves."""
    if kernels.linear is None:
        return
    from dsbd_cli.kernels.products import linear_fits

    for module in model.modules():
        linear: Any = module
        if _plain_linear(module) and linear_fits(linear.weight, linear.bias):
            fused._replace("linear", module, _product_forward(kernels.linear, linear))


def _product_forward(kernel: Callable[..., Tensor], module: Any) -> Callable[[Tensor], Tensor]:
    def forward(input: Tensor) -> Tensor:
        return kernel(input, module.weight, module.bias)

    return forward


# Norms


@dataclass(frozen=True, slots=True)
class _Norm:
    """x over its root mean square, times weight or (1 + weight)."""

    weight: Tensor
    eps: float
    one_more: bool

    @property
    def form(self) -> tuple[float, bool]:
        return self.eps, self.one_more


def _norms(model: Any, kernels: LayerKernels, fused: Fused) -> dict[nn.Module, _Norm]:
    """Replace the root mean square norms; what each computes."""
    found: dict[nn.Module, _Norm] = {}
    for module in model.modules():
        norm = None if kernels.norm is None else _as_norm(module)
        if kernels.norm is None or norm is None or norm.weight.dtype != model.dtype:
            continue
        if not kernels.take(len(norm.weight), norm.weight):
            continue
        if len(norm.weight) > kernels.widest:
            continue
        found[module] = norm
        fused._replace("norm", module, _norm_forward(kernels.norm, norm))
    return found


def _norm_forward(kernel: Callable[..., tuple[Tensor, Tensor]], norm: _Norm) -> Callable[[Tensor], Tensor]:
    def forward(hidden_states: Tensor) -> Tensor:
        return kernel(hidden_states, None, norm.weight, norm.eps, norm.one_more)[0]

    return forward


def _as_norm(module: nn.Module) -> _Norm | None:
    """What a norm computes; None for any other module."""
    weight = getattr(module, "weight", None)
    eps = getattr(module, "variance_epsilon", getattr(module, "eps", None))
    named = [name for name, _ in module.named_parameters()]
    if named != ["weight"] or not isinstance(weight, Tensor) or weight.ndim != 1 or not isinstance(eps, float):
        return None
    if len(inspect.signature(module.forward).parameters) != 1:  # one that is given a gate, too (Mamba-2)
        return None
    x = _noise(module, 3, len(weight)) * 3 + 1  # a mean, so that a norm which subtracts it (Cohere) differs
    with suppress(Exception):
        wanted = module(x)
        ours = {one_more: norm_twin(x, None, weight, eps, one_more)[0] for one_more in (False, True)}
        one_more = _nearest(ours, wanted)  # weights of hundreds (Gemma 3) make the forms alike
        return _Norm(weight, eps, one_more) if _close(ours[one_more], wanted) else None
    return None


# Products of one input


class _Joined:
    """Several products of one input: their outputs side by side."""

    def __init__(self, kernels: LayerKernels, fused: Fused, parent: nn.Module, names: tuple[str, ...]) -> None:
        self._parent, self._names = parent, names
        self._product: Callable[..., Tensor] | None = None
        self._known: list[Any] = []
        self._whole: Product | None = None
        linears = tuple(getattr(parent, name) for name in names)
        if not kernels.merges:
            fused.joined.append((parent, names))
            return
        from dsbd_cli.kernels.products import linear_fits

        self._weight, self._bias = _merged(linears)
        fits = linear_fits(self._weight, self._bias)
        self._product = kernels.product if fits else nn.functional.linear

    def __call__(self, x: Tensor) -> Tensor:
        """x [..., i] -> [..., sum of the outputs]."""
        if self._product is not None:
            return self._product(x, self._weight, self._bias)
        layers: list[Any] = [self._parent._modules[name] for name in self._names]
        if layers != self._known:  # they have been packed, or made int8
            self._whole = whole(layers)
            self._known = (
                [] if self._whole is None else layers
            )  # plain ones are not held: their weights are to be freed
        return torch.cat([layer(x) for layer in layers], -1) if self._whole is None else self._whole.compute(x)


def _merged(linears: tuple[Any, ...]) -> tuple[Tensor, Tensor | None]:
    """Weights and biases of several products of one input in one buffer; the modules' own become parts of it."""
    weight = torch.cat([linear.weight for linear in linears])
    bias = None if linears[0].bias is None else torch.cat([linear.bias for linear in linears])
    start = 0
    for linear in linears:
        end = start + linear.out_features
        linear.weight.data = weight[start:end]
        if bias is not None:
            linear.bias.data = bias[start:end]
        start = end
    return weight, bias


# Gated products


def _gated(model: nn.Module, kernels: LayerKernels, fused: Fused) -> None:
    """Replace down(silu(gate(x)) * up(x)), and the same with gelu."""
    for module in list(model.modules()):
        parts = {name: child for name, child in module.named_children() if any(True for _ in child.parameters())}
        if kernels.gated is None or set(parts) != {"gate_proj", "up_proj", "down_proj"}:
            continue
        gate, up, down = parts["gate_proj"], parts["up_proj"], parts["down_proj"]
        biased = {getattr(linear, "bias", None) is not None for linear in (gate, up)}
        if not (_plain_linear(gate) and _plain_linear(up)) or len(biased) != 1:
            continue
        x = _noise(module, 3, gate.in_features) * 4  # type: ignore[arg-type]  # small ones tell too little apart
        if not kernels.take(gate.out_features, x):  # type: ignore[arg-type]
            continue
        with suppress(Exception):
            wanted = module(x)
            both = torch.cat((gate(x), up(x)), -1)
            ours = {gelu: down(gated_twin(both, gelu)) for gelu in (False, True)}
            gelu = _nearest(ours, wanted)
            if _close(ours[gelu], wanted):
                joined = _Joined(kernels, fused, module, ("gate_proj", "up_proj"))
                fused._replace("gated", module, _gated_forward(kernels.gated, joined, gelu, module))


def _gated_forward(
    kernel: Callable[..., Tensor], joined: _Joined, gelu: bool, module: Any
) -> Callable[[Tensor], Tensor]:
    def forward(x: Tensor) -> Tensor:
        result: Tensor = module.down_proj(kernel(joined(x), gelu))
        return result

    return forward


# Attention


@dataclass(slots=True)
class _Call:
    """What a module has asked of the attention function."""

    query: Tensor
    key: Tensor
    value: Tensor
    more: dict[str, object]


_calls: list[_Call] = []


def _recording(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: object, **more: object
) -> tuple[Tensor, None]:
    """An attention that gives the queries back and notes what it was asked."""
    _calls.append(_Call(query, key, value, more))
    return query.transpose(1, 2).contiguous(), None


AttentionInterface.register(RECORDING, _recording)


@contextmanager
def _noted(config: Any) -> Iterator[list[_Call]]:
    before = config._attn_implementation
    _calls.clear()
    config._attn_implementation = RECORDING
    try:
        yield _calls
    finally:
        config._attn_implementation = before


def _attentions(model: nn.Module, kernels: LayerKernels, fused: Fused, norms: dict[nn.Module, _Norm]) -> None:
    """Replace attentions of one product each for queries, keys and values and a rotation of whole heads, which may be
    normalised before."""
    for module in list(model.modules()):
        parts = {name: child for name, child in module.named_children() if any(True for _ in child.parameters())}
        if kernels.rotate is None or set(parts) - {*HEAD_NORMS} != {*QKV, "o_proj"}:
            continue
        heads = _head_norms(module, [parts[name] for name in HEAD_NORMS if name in parts], norms)
        linears = tuple(parts[name] for name in QKV)
        biased = {getattr(linear, "bias", None) is not None for linear in linears}
        if heads is None or not all(map(_plain_linear, linears)) or len(biased) != 1:
            continue
        more = _asked(module, kernels, linears, heads)
        if more is not None:
            joined = _Joined(kernels, fused, module, QKV)
            fused._replace("rotate", module, _attention_forward(kernels.rotate, fused, joined, module, heads, more))


def _head_norms(module: Any, found: list[nn.Module], norms: dict[nn.Module, _Norm]) -> tuple[Any, ...] | None:
    """What the kernel is told of norms of queries and keys, of which a module has two or none; None where they are
    norms of another kind."""
    if not found:
        return ()
    known = [norms[one] for one in found if one in norms]
    if len(known) != 2 or any(len(one.weight) != getattr(module, "head_dim", None) for one in known):
        return None
    query, key = known
    return (query.weight, key.weight, key.eps, key.one_more) if query.form == key.form else None


def _asked(
    module: Any, kernels: LayerKernels, linears: tuple[Any, ...], heads: tuple[Any, ...]
) -> dict[str, object] | None:
    """The constants that a module gives to its attention function; None where it computes something else."""
    dim, count = getattr(module, "head_dim", None), 5
    if not isinstance(dim, int) or not hasattr(module, "layer_idx") or not hasattr(module, "config"):
        return None
    if dim % 2 or not kernels.take(dim // 2, linears[0].weight):
        return None
    x = _noise(module, 1, count, linears[0].in_features) * 64  # large, so that a clamp (OLMo) acts
    angles = _noise(module, 1, count, dim).float()
    cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
    with suppress(Exception), _noted(module.config) as calls:
        result = module(hidden_states=x, position_embeddings=(cos, sin), attention_mask=None, past_key_values=None)
        if (
            len(calls) != 1
            or not isinstance(result, tuple)
            or any(isinstance(v, Tensor) for v in calls[0].more.values())
        ):
            return None
        call = calls[0]
        both = torch.cat([linear(x) for linear in linears], -1)
        keys = x.new_zeros(1, count, linears[1].out_features // dim, dim)
        values = torch.zeros_like(keys)
        query = rotate_twin(both, cos, sin, torch.arange(count, device=x.device), keys, values, *heads)
        same = _close(query, call.query)
        same = same and _close(keys.transpose(1, 2), call.key) and _close(values.transpose(1, 2), call.value)
        if same and _close(module.o_proj(query.transpose(1, 2).reshape(1, count, -1)), result[0]):
            return dict(call.more)
    return None


def _attention_forward(
    kernel: Callable[..., Tensor],
    fused: Fused,
    joined: _Joined,
    module: Any,
    heads: tuple[Any, ...],
    more: dict[str, object],
) -> Callable[..., Any]:
    """The module's forward over a packed forest; anything else goes the stock way. Where the model's angles are of
    another dtype (OLMo), or of a part of a head, the module is noted as a misfit."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    stock = module.forward
    serving: list[Callable[..., Any] | None] = []  # looked up once: a forest's model keeps its attention

    def forward(
        hidden_states: Tensor,
        position_embeddings: tuple[Tensor, Tensor] | None = None,
        attention_mask: Tensor | None = None,
        past_key_values: object = None,
        **kwargs: object,
    ) -> Any:
        planes = past_key_values.planes(module.layer_idx) if isinstance(past_key_values, ForestCache) else None
        if planes is not None and not serving:
            serving.append(ALL_ATTENTION_FUNCTIONS.get(module.config._attn_implementation))
        cos = None if position_embeddings is None else position_embeddings[0]
        if cos is not None and (cos.dtype != hidden_states.dtype or cos.shape[-1] != module.head_dim):
            fused.misfits.add(module)
            planes = None
        if planes is None or position_embeddings is None or (attend := serving[0]) is None:
            return stock(
                hidden_states=hidden_states,
                position_embeddings=position_embeddings,
                attention_mask=attention_mask,
                past_key_values=past_key_values,
                **kwargs,
            )
        keys, values, slots = planes
        cos, sin = position_embeddings
        both = joined(hidden_states)
        assert rotate_fits(both, cos, keys, values), "one dtype for weights, angles and cache"
        query = kernel(both, cos, sin, slots, keys, values, *heads)
        assert isinstance(past_key_values, ForestCache)
        key, value = past_key_values.seen(keys), past_key_values.seen(values)
        attended, weights = attend(module, query, key, value, attention_mask, **{**kwargs, **more})
        return module.o_proj(attended.reshape(*hidden_states.shape[:-1], -1)), weights

    return forward


# Layers


def _layers(model: nn.Module, kernels: LayerKernels, fused: Fused, norms: dict[nn.Module, _Norm]) -> None:
    """Replace h + attention(norm(h)), then h + mlp(norm(h)): the first sum is the second norm's."""
    names = {"input_layernorm", "self_attn", "post_attention_layernorm", "mlp"}
    for module in list(model.modules()):
        parts = dict(module.named_children())
        if kernels.norm is None or set(parts) != names or not hasattr(parts["self_attn"], "config"):
            continue
        first, second = parts["input_layernorm"], parts["post_attention_layernorm"]
        dim = getattr(parts["self_attn"], "head_dim", None)
        if first not in norms or second not in norms or not isinstance(dim, int):
            continue
        forward = _layer_forward(kernels.norm, parts, norms[first], norms[second])
        x = _noise(module, 1, 5, len(norms[first].weight)) / 16  # small, so that a factor of the sums (Granite) shows
        angles = _noise(module, 1, 5, dim).float()
        places = (angles.cos().to(x.dtype), angles.sin().to(x.dtype))
        with suppress(Exception), _noted(parts["self_attn"].config):
            wanted = module(x, attention_mask=None, position_embeddings=places, past_key_values=None)
            ours = forward(x, attention_mask=None, position_embeddings=places, past_key_values=None)
            if isinstance(wanted, Tensor) and _close(ours, wanted):
                fused._replace("layer", module, forward)


def _layer_forward(
    kernel: Callable[..., tuple[Tensor, Tensor]], parts: dict[str, nn.Module], first: _Norm, second: _Norm
) -> Callable[..., Tensor]:
    attention, mlp = parts["self_attn"], parts["mlp"]

    def forward(hidden_states: Tensor, **kwargs: object) -> Tensor:
        # forwards, past torch's call of a module: it takes as long as a kernel with few rows
        normed, _ = kernel(hidden_states, None, first.weight, first.eps, first.one_more)
        attended, _ = attention.forward(hidden_states=normed, **kwargs)
        normed, summed = kernel(attended, hidden_states, second.weight, second.eps, second.one_more)
        result: Tensor = summed + mlp.forward(normed)
        return result

    return forward


# Recordings


def _queue(model: Any, fused: Fused) -> None:
    """Have the layers recorded, where the parts of all run as kernels and the model runs each once."""
    stacks = [one for one in model.modules() if isinstance(one, nn.ModuleList)]
    if len(stacks) != 1 or len({*stacks[0]}) != len(stacks[0]) or not serves():
        return
    (layers,) = stacks
    whole = len(layers) == model.config.get_text_config().num_hidden_layers
    if whole and all(_of_kernels(layer, fused) for layer in layers):
        for number, layer in enumerate(layers):
            fused._replace("recorded", layer, queued(len(layers), number, layer.forward))


def _of_kernels(layer: nn.Module, fused: Fused) -> bool:
    """One attention, one gated product, and norms; no hooks."""
    kinds = sorted(fused.kinds.get(part, "") for part in layer.children() if part in fused.forwards)
    others = [kind for kind in kinds if kind != "norm"]
    whole = len(kinds) == len([*layer.children()]) and others == ["gated", "rotate"]
    return whole and not layer._forward_hooks and not layer._forward_pre_hooks
