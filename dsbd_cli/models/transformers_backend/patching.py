"""Linear layers of transformers' models replaced on a CPU, in place: by packed ones, or by quantized ones.

Letters: o output channels, i input channels of a layer; t tokens, k experts of a token.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear
from torch.overrides import TorchFunctionMode
from transformers.pytorch_utils import Conv1D

from dsbd_cli.ops import interface
from dsbd_cli.ops.interface import LEAST_WEIGHTS, Linear
from dsbd_cli.ops.reference import outlier_channels
from dsbd_cli.ops.select import packed_linear, quantized_linear

# layers that int4 makes int8: queries, keys and values, and LM heads, as models name them
INT8_IN_INT4 = frozenset(
    "q_proj k_proj v_proj qkv_proj kv_proj qkv query_key_value c_attn Wqkv q k v query key value query_proj key_proj"
    " value_proj q_a_proj q_b_proj kv_a_proj_with_mqa kv_b_proj in_proj_qkvz lm_head embed_out proj_out".split()
)
LEAST_FEATURES = 64  # of inputs and of outputs: smaller layers are not quantized
MULTIPLIED = ("dt_proj",)  # layers whose weights Mamba and Jamba multiply by themselves
ROUTERS = {"LongcatFlashTopkRouter": "classifier"}  # routers that multiply by the weight of a layer of this name
SAME_FORWARD = ("FalconLinear",)  # subclasses whose own forward computes what that of nn.Linear does


class PackedLinear(nn.Module):
    """A layer x W^T + b with a packed W. Inference only: the weight is no parameter and has no gradient.

    `weight` tells shape and dtype to models that look at it (T5, Mamba) and holds no numbers: it lies on `meta`.
    """

    def __init__(self, linear: nn.Linear | Conv1D, product: interface.BiasableLinear) -> None:
        super().__init__()
        self.out_features, self.in_features = weight_of(linear).shape
        self.bias: Tensor | None = None if linear.bias is None else linear.bias.detach()
        self.product = product
        self.weight = torch.empty_like(linear.weight, device="meta", requires_grad=False)

    @classmethod
    def of(cls, linear: nn.Linear | Conv1D) -> PackedLinear | None:
        """Pack a layer; return None where nothing packs such weights."""
        product = packed_linear([weight_of(linear).detach()], [None if linear.bias is None else linear.bias.detach()])
        return None if product is None else cls(linear, product)

    @property
    def packed(self) -> Sequence[Tensor]:
        """The weights as they are stored."""
        return self.product.weights

    @property
    def compiled(self) -> bool:
        """Whether a kernel of our own computes it."""
        return self.product.compiled

    def forward(self, x: Tensor) -> Tensor:
        """Return x W^T + b [..., out_features] of x [..., in_features]."""
        return self.product.compute(x)

    def with_bias(self, bias: Tensor) -> PackedLinear:
        """Return a layer of the same weights with this bias [out_features], which costs nothing in addition to the
        product."""
        other = copy.copy(self)
        other.bias, other.product = bias, self.product.with_bias(bias)
        return other


class PackedExperts:
    """The forward of a mixture's experts with packed weights. Inference only.

    It uses the module's own gate, activation and norm. The module's weights are then on `meta`.
    """

    def __init__(self, experts: Any, first: list[Linear], second: list[Linear]) -> None:
        """first, second: products before and after the activation, one for each expert."""
        self._experts, self._first, self._second = experts, first, second
        for name in _weights_of_experts(experts):
            held = getattr(experts, name)
            delattr(experts, name)
            setattr(experts, name, torch.empty_like(held, device="meta", requires_grad=False))

    @classmethod
    def of(cls, experts: Any) -> PackedExperts | None:
        """Pack the experts of a module and free their weights; return None where nothing packs such weights."""
        first, second = (_expert_products(experts, name) for name in _weights_of_experts(experts))
        return None if first is None or second is None else cls(experts, first, second)

    @property
    def packed(self) -> list[Tensor]:
        """The weights as they are stored, of each product of each expert."""
        return [weight for product in (*self._first, *self._second) for weight in product.weights]

    def __call__(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """Return the weighted sum of the experts' outputs [t, i], in the dtype of the tokens [t, i]. top_k_index: [t,
        k] int64, the experts of each token. top_k_weights: [t, k], the weights of these."""
        chosen, order = top_k_index.flatten().sort(stable=True)
        counts = torch.bincount(chosen, minlength=len(self._first))[: len(self._first)].tolist()
        inputs = hidden_states[order // top_k_index.shape[1]].split([*counts, len(order) - sum(counts)])
        made = [self._expert(expert, x) for expert, x in enumerate(inputs[:-1]) if len(x)]
        outputs = hidden_states.new_zeros(len(order), hidden_states.shape[1])  # ids past the last expert stand for none
        if made:
            outputs[order[: sum(counts)]] = torch.cat(made)
        parts = (outputs.view(*top_k_index.shape, -1) * top_k_weights.unsqueeze(2)).float().unbind(1)
        total = parts[0]
        for part in parts[1:]:  # one after another, because torch's sum chooses an order by shape
            total = total + part
        return total.to(hidden_states.dtype)

    def _expert(self, number: int, x: Tensor) -> Tensor:
        """Return the output [s, i] of one expert for tokens [s, i]."""
        experts = self._experts
        inner = self._first[number].compute(x)
        inner = experts._apply_gate(inner) if experts.has_gate else experts.act_fn(inner)
        output = self._second[number].compute(inner)
        return experts.post_expert_norm(output) if experts.has_post_expert_norm else output


class PackedRouter(TorchFunctionMode):
    """The forward of a router of experts, in which a product with its weight is a packed one."""

    def __init__(self, router: nn.Module) -> None:
        super().__init__()
        self._forward = router.forward
        self._products: dict[torch.dtype, Linear | None] = {}  # many routers multiply in float32

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Return what the router returns."""
        with self:
            return self._forward(*args, **kwargs)

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is not nn.functional.linear or kwargs:
            return func(*args, **kwargs)
        x, weight, *bias = args
        if weight.dtype not in self._products:
            self._products[weight.dtype] = packed_linear([weight.detach()], bias or [None])
        product = self._products[weight.dtype]
        return func(*args) if product is None else product.compute(x)


def pack(model: nn.Module) -> int:
    """Replace the plain linear layers of a model on the CPU by packed ones, in place; return how many. Experts and
    routers of mixtures get a forward with packed products.

    Each original weight is freed as soon as it is packed, unless something else shares it (tied embeddings) or the
    packed layer reads it where it lies.
    """
    # small ones too, because the bits of a row in torch's own products depend on the other rows
    made, replaced = 0, [(parent, name) for parent, name, _ in plain_linears(model, 1, 1)]
    for parent, name in replaced:
        if (packed := PackedLinear.of(getattr(parent, name))) is not None:
            setattr(parent, name, packed)
            made += 1
    for module in model.modules():
        if _is_router(module):
            module.forward = PackedRouter(module)
        elif _has_experts(module) and (experts := PackedExperts.of(module)) is not None:
            module.forward = experts
            made += 1
    return made


def plain_linears(
    model: nn.Module, least: int = LEAST_FEATURES, inputs: int = LEAST_FEATURES
) -> Iterator[tuple[nn.Module, str, nn.Linear | Conv1D]]:
    """Yield the linear layers on the CPU that do nothing but x W^T + b, with their parents and names. least, inputs:
    fewest outputs and inputs."""
    for parent in model.modules():
        for name, child in parent.named_children():
            read = name in MULTIPLIED or ROUTERS.get(type(parent).__name__) == name
            if isinstance(child, nn.Linear | Conv1D) and not read and _suits(child, least, inputs):
                yield parent, name, child


def weight_of(linear: nn.Linear | Conv1D) -> Tensor:
    """Return the weight of a layer [out, in]; GPT-2's layers hold theirs the other way round."""
    weight: Tensor = linear.weight.t() if isinstance(linear, Conv1D) else linear.weight
    return weight


def _suits(linear: nn.Linear | Conv1D, least: int, fewest: int) -> bool:
    weight, bias = linear.weight, linear.bias
    hooked = bool(linear._forward_hooks or linear._forward_pre_hooks or hasattr(linear, "_hf_hook"))
    hooked |= not _multiplies(type(linear)) or "forward" in vars(linear)
    plain = _plain(weight, 2) and not hooked and (bias is None or bias.dtype == weight.dtype)
    outputs, inputs = weight_of(linear).shape
    return plain and weight.is_floating_point() and inputs >= fewest and outputs >= least


def _multiplies(kind: type[nn.Module]) -> bool:
    """Return whether the layers of a class do nothing but x W^T + b."""
    if kind is NonDynamicallyQuantizableLinear:  # its parent reads the weight
        return False
    return kind.forward in (nn.Linear.forward, Conv1D.forward) or kind.__name__ in SAME_FORWARD


def _has_experts(module: nn.Module) -> bool:
    """Return whether a module has the experts of a mixture in the form that transformers' own kernels take, so that it
    is known what they compute."""
    if "forward" in vars(module) or getattr(module, "_is_expert_parallel", True) or not hasattr(module, "_apply_gate"):
        return False
    return all(_plain(getattr(module, name, None), 3) for name in _weights_of_experts(module))


def _weights_of_experts(experts: Any) -> tuple[str, str]:
    """Return the names of the weights that come before and after the activation."""
    return ("gate_up_proj" if experts.has_gate else "up_proj"), "down_proj"


def _expert_products(experts: Any, name: str) -> list[Linear] | None:
    """Return products with the weights of this name, [experts, o, i] or the other way round; None where nothing packs
    them."""
    weights = getattr(experts, name).detach()
    weights = weights.transpose(1, 2) if experts.is_transposed else weights
    biases = getattr(experts, f"{name}_bias").detach() if experts.has_bias else [None] * len(weights)
    made = [packed_linear([weight], [bias]) for weight, bias in zip(weights, biases, strict=True)]
    products: list[Linear] = [product for product in made if product is not None]
    return products if len(products) == len(made) else None


def _is_router(module: nn.Module) -> bool:
    """Return whether a module is a router that multiplies by a weight itself. A linear layer that a router calls is
    packed by itself."""
    kind = type(module).__name__
    layer = getattr(module, ROUTERS[kind]) if kind in ROUTERS else module
    return kind.endswith("Router") and "forward" not in vars(module) and _plain(getattr(layer, "weight", None), 2)


def _plain(weight: Any, dims: int) -> bool:
    """Return whether a weight is a plain parameter on the CPU, [o, i] or one for each expert."""
    plain = isinstance(weight, nn.Parameter) and type(weight.data) is Tensor and weight.dim() == dims
    return plain and weight.device.type == "cpu"


class SharedProduct:
    """A product of layers that are handed the same input one after the other."""

    def __init__(self, linear: Linear) -> None:
        self.linear = linear
        self._kept: tuple[Tensor, Tensor, int] | None = None  # input, result, and layers that have yet to ask for it

    def compute(self, x: Tensor) -> Tensor:
        """Return the product [..., o] of x [..., i]. It is computed once per tensor and kept until each layer has asked
        for it."""
        count = len(self.linear.parts)
        if count == 1:
            return self.linear.compute(x)
        kept = self._kept  # read once: another thread may change it
        result, left = (self.linear.compute(x), count) if kept is None or kept[0] is not x else kept[1:]
        self._kept = (x, result, left - 1) if left > 1 else None
        return result


class QuantizedLinear(nn.Module):
    """A layer x W^T + b with W in int8 or int4, except for its columns of outliers. Layers with one input are parts of
    one product. Inference only.

    `weight` tells shape and dtype to models that look at it and holds no numbers: it lies on `meta`.
    """

    def __init__(self, linear: nn.Linear | Conv1D, product: SharedProduct, part: int) -> None:
        super().__init__()
        self.out_features, self.in_features = weight_of(linear).shape
        self.product = product
        self._first = sum(product.linear.parts[:part])
        self.weight = torch.empty_like(linear.weight, device="meta", requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        """Return x W^T + b [..., out_features] of x [..., in_features], in the same dtype."""
        return self.product.compute(x).narrow(-1, self._first, self.out_features).contiguous()

    @property
    def packed(self) -> Sequence[Tensor]:
        """The weights of the whole product as they are stored."""
        return self.product.linear.weights

    @property
    def compiled(self) -> bool:
        """Whether kernels of our own compute it."""
        return self.product.linear.compiled


@dataclass(slots=True)
class _Seen:
    """Observations of one layer during calibration.

    Attributes:
        largest: [i] float32, the largest magnitude in each input channel.
        first: the first layer of the same parent that was handed the same tensor, or the layer itself.
    """

    largest: Tensor
    first: nn.Module


@dataclass(slots=True)
class _Watch:
    """A hook that observes the inputs of layers while `calibrate` runs the model."""

    seen: dict[nn.Module, _Seen] = field(default_factory=dict)
    last: dict[nn.Module, tuple[Tensor, Tensor, nn.Module]] = field(default_factory=dict)  # of each parent

    def __call__(self, parent: nn.Module, layer: nn.Module, x: Tensor) -> None:
        largest = x.detach().reshape(-1, x.shape[-1]).abs().amax(0).float()
        same, copy, first = self.last.get(parent, (None, None, layer))
        if same is not x or copy is None or not torch.equal(copy, x):
            first = layer
        self.last[parent] = x, x.clone(), first
        before = self.seen.get(layer)
        if before is None:
            self.seen[layer] = _Seen(largest, first)
        else:
            before.largest = torch.maximum(before.largest, largest)
            before.first = layer if before.first is not first else first


def quantize(model: nn.Module, calibrate: Callable[[], object], weight_format: str, least: int = LEAST_WEIGHTS) -> int:
    """Replace the plain linear layers of a model on the CPU by quantized ones, in place; return how many have
    the format that is asked for.

    calibrate: runs tokens through the model. weight_format: `int8` or `int4`, of which INT8_IN_INT4 are in
    int8. Layers that `calibrate` does not reach stay as they are. So do products of fewer than `least` weights, which
    would gain nothing: the work around the product takes longer than the product.
    """
    linears = list(plain_linears(model))
    watch = _Watch()
    hooks = [
        child.register_forward_pre_hook(lambda layer, inputs, parent=parent: watch(parent, layer, inputs[0]))
        for parent, _, child in linears
    ]
    try:
        with torch.inference_mode():
            calibrate()
    finally:
        for hook in hooks:
            hook.remove()
    watch.last.clear()
    together: dict[nn.Module, list[tuple[nn.Module, str, nn.Linear | Conv1D]]] = {}
    for item in linears:
        if item[2] in watch.seen:
            together.setdefault(watch.seen[item[2]].first, []).append(item)
    del linears
    made = 0
    while together:  # each original weight is freed as soon as it is converted
        first, layers = together.popitem()
        largest = watch.seen[first].largest
        if sum(child.weight.numel() for _, _, child in layers) < least:
            continue
        weights = [weight_of(child).detach() for _, _, child in layers]
        biases = [None if child.bias is None else child.bias.detach() for _, _, child in layers]
        own = "int8" if any(name in INT8_IN_INT4 for _, name, _ in layers) else weight_format
        product = SharedProduct(quantized_linear(weights, biases, outlier_channels(largest), own))
        del weights
        for *_, child in layers:
            watch.seen.pop(child)
        for part, (parent, name, child) in enumerate(layers):
            setattr(parent, name, QuantizedLinear(child, product, part))
        made += len(layers) if own == weight_format else 0
    return made


def plain_weights(model: nn.Module) -> tuple[float, tuple[str, ...]]:
    """Return which share of a model's weights is not quantized, and the classes that hold most of these. Tables of
    embeddings, which are looked up, and small weights do not count."""
    quantized, plain = 0, dict[str, int]()
    for module in model.modules():
        if isinstance(module, QuantizedLinear):
            quantized += module.weight.numel()
        elif not isinstance(module, nn.Embedding):
            sizes = (weight.numel() for weight in module.parameters(recurse=False) if weight.dim() > 1)
            count = sum(size for size in sizes if size >= LEAST_WEIGHTS)
            kind = type(module).__name__
            plain[kind] = plain.get(kind, 0) + count
    left = sum(plain.values())
    most = sorted((kind for kind, count in plain.items() if count > left / 10), key=plain.__getitem__, reverse=True)
    return left / max(1, quantized + left), tuple(most)
