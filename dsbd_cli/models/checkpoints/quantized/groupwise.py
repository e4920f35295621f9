"""Weights of checkpoints that are quantised by GPTQ, AWQ or compressed-tensors, packed as their safetensors hold them.

All of them define a weight as `scale * (level - zero point)` of a group of inputs. They differ in how levels and zero
points are packed into int32:

| | weights | zero points |
|---|---|---|
| GPTQ | `qweight` [i * bits / 32, o], along the inputs | `qzeros` [g, o * bits / 32], along the outputs |
| AWQ gemm | `qweight` [i, o / 8], along the outputs, in the order AWQ_ORDER | `qzeros` [g, o / 8], the same |
| AWQ gemv | `qweight` [o, i / 8], along the inputs | `qzeros` [o, g / 8], along the groups, padded |
| pack-quantized | `weight_packed` [o, i * bits / 32], along the inputs | `weight_zero_point` [o * bits / 32, g] |

Fields lie one behind the other from the lowest bit on, also across words where bits is not 2, 4 or 8. GPTQ's first form
has stored each zero point less one: 2, 4 and 8 bits by subtracting from the whole word, with borrows, and 3 bits by
fields. compressed-tensors adds 2 ** (bits - 1) to levels and zero points that it packs. Its other forms hold levels of
eight bits as they are.

Scales of activations are not read, because products of quantised weights round activations in their own way.

Letters: o outputs, i inputs, g groups of inputs, r rows.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from safetensors import SafetensorError
from torch import Tensor, nn

from dsbd_cli.errors import ModelError, one_line
from dsbd_cli.models.checkpoints.quantized.settings import COMPRESSED, GPTQ, NAIVE, PACKED, WHOLE, Quantization
from dsbd_cli.ops.quantized_weight import GROUP, FourBit, QuantizedWeight

AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # outputs whose levels are in one word of AWQ gemm, from the lowest bits on
SCALES = (torch.float16, torch.bfloat16, torch.float32)
ACTIVATIONS = ("input_scale", "input_zero_point", "output_scale", "output_zero_point")

WeightTensors = Mapping[str, Callable[[], Tensor | QuantizedWeight]]
"""For the name of each tensor of a checkpoint, a function that reads the tensor, or the weight that stays packed."""


def quantized_tensors(
    tensors: Mapping[str, Callable[[], Tensor]], quantization: Quantization, name: str
) -> WeightTensors:
    """Return the tensors of a checkpoint with `X.weight`, a QuantizedWeight, in the place of the parts of each
    quantised layer X. No tensor is read before it is asked for; a weight is checked when it is.

    name: of the checkpoint, for messages. Raises ModelError where parts are missing or no layer is quantised. The
    functions of the weights raise it where parts do not fit each other or hold values that cannot be.
    """
    parts = quantization.parts
    layers = {tensor.removesuffix(f".{parts[0]}") for tensor in tensors if tensor.endswith(f".{parts[0]}")}
    if not layers:
        said = f"{quantization.method} ({quantization.form})"
        raise ModelError(f"{name}: config.json says that its weights are {said}, but no tensor ends in {parts[0]}")
    held: dict[str, dict[str, Callable[[], Tensor]]] = {layer: {} for layer in layers}
    plain: dict[str, Callable[[], Tensor | QuantizedWeight]] = {}
    for tensor, read in tensors.items():
        layer, _, part = tensor.rpartition(".")
        if layer in layers and part in ACTIVATIONS:
            continue
        if part in parts and (layer in layers or part != "weight"):
            if layer not in layers:
                raise ModelError(f"{name}: {tensor} is not read without {layer}.{parts[0]}, which is not there")
            held[layer][part] = read
        else:
            plain[tensor] = read
    for layer, has in held.items():
        if missing := [part for part in _needed(quantization) if part not in has]:
            raise ModelError(f"{name}: {layer}.{missing[0]} is missing beside {layer}.{parts[0]}: get the files again")
        if (weight := f"{layer}.weight") in plain:
            raise ModelError(f"{name}: {weight} is there twice, plain and as {layer}.{parts[0]}")
        plain[weight] = partial(_WEIGHTS[quantization.form], _Parts(f"{name}: {layer}", has), quantization, weight)
    return plain


def _needed(quantization: Quantization) -> list[str]:
    """Return the parts that each quantised layer must have."""
    left_out = set[str]()
    if quantization.symmetric and quantization.method == COMPRESSED:
        left_out.add("weight_zero_point")
    if not quantization.ordered:
        left_out |= {"g_idx", "weight_g_idx"}
    return [part for part in quantization.parts if part not in left_out]


@dataclass(frozen=True, slots=True)
class _Parts:
    """The tensors of a quantised layer.

    layer: the beginning of messages. read: by the part's name, see PARTS.
    """

    layer: str
    read: Mapping[str, Callable[[], Tensor]]

    def __contains__(self, part: str) -> bool:
        return part in self.read

    def tensor(self, part: str, *dtypes: torch.dtype) -> Tensor:
        """Return a tensor that is of one of these dtypes. Raises ModelError."""
        try:
            tensor = self.read[part]()
        except (SafetensorError, OSError, ValueError) as error:
            raise ModelError(f"{self.layer}.{part} cannot be read: {one_line(error)}: get the files again") from None
        if tensor.dtype not in dtypes:
            wanted = " or ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
            self.wrong(part, f"is {str(tensor.dtype).removeprefix('torch.')}, but must be {wanted}")
        return tensor

    def shaped(self, part: str, shape: Sequence[int], *dtypes: torch.dtype) -> Tensor:
        """Return a tensor that is of this shape and of one of these dtypes. Raises ModelError."""
        tensor = self.tensor(part, *dtypes)
        if tensor.shape != tuple(shape):
            self.wrong(part, f"is {_by(tensor.shape)}, but must be {_by(shape)} beside the layer's other tensors")
        return tensor

    def matrix(self, part: str, *dtypes: torch.dtype) -> Tensor:
        """Return a matrix that is not empty. Raises ModelError."""
        tensor = self.tensor(part, *dtypes)
        if tensor.ndim != 2 or not tensor.numel():
            self.wrong(part, f"is {_by(tensor.shape)}, but must be a matrix")
        return tensor

    def wrong(self, part: str, what: str) -> None:
        """Raise ModelError about a tensor."""
        raise ModelError(f"{self.layer}.{part} {what}: get the files again")


def _by(shape: Sequence[int]) -> str:
    return " x ".join(map(str, shape)) or "one number"


class GroupwiseWeight(QuantizedWeight):
    """A weight of levels that have one scale and one zero point in each group of inputs: scale * (level - zero
    point)."""

    def __init__(
        self,
        name: str,
        bits: int,
        levels: Callable[[Tensor | slice], Tensor],
        scales: Tensor,
        zeros: Tensor,
        inputs: int,
        group_of: Tensor | None = None,
    ) -> None:
        """bits: of a level. levels: returns levels [r, i] of some rows. scales, zeros: [o, g]. group_of: [i] int64, the
        group of each input; None: inputs of a group are neighbours."""
        super().__init__(name, (len(scales), inputs))
        self._bits, self._levels, self._scales, self._zeros, self._group_of = bits, levels, scales, zeros, group_of

    def dequantize(self, rows: Tensor | slice = slice(None)) -> Tensor:
        levels, scales, zeros = self._levels(rows).float(), self._scales[rows].float(), self._zeros[rows].float()
        if self._group_of is not None:
            return levels.sub_(zeros[:, self._group_of]).mul_(scales[:, self._group_of])
        groups = levels.view(*scales.shape, self.shape[1] // scales.shape[1])
        groups.sub_(zeros.unsqueeze(-1)).mul_(scales.unsqueeze(-1))
        return levels

    def fourbit(self) -> FourBit | None:
        inputs, groups = self.shape[1], self._scales.shape[1]
        if self._bits != 4 or inputs % GROUP or (self._group_of is None and inputs // groups % GROUP):
            return None
        levels, order = self._levels(slice(None)), None
        if self._group_of is None:
            group_of = torch.arange(inputs // GROUP) * GROUP // (inputs // groups)
        else:
            order = self._group_of.argsort(stable=True)
            blocks = self._group_of[order].view(-1, GROUP)
            group_of = blocks[:, 0]
            if bool((blocks != group_of.unsqueeze(1)).any()):
                return None
            levels = levels[:, order]
        scales = self._scales.float()
        offsets = -scales * self._zeros.float()
        return FourBit(words_of(levels), scales[:, group_of], offsets[:, group_of], order=order)


def words_of(levels: Tensor) -> Tensor:
    """Return levels [o, i] uint8 as words of FourBit."""
    halves = levels.view(len(levels), -1, 2, 4)
    return (halves[:, :, 0] | halves[:, :, 1] << 4).view(torch.int32).squeeze(-1)


def _unpacked(words: Tensor, bits: int, count: int) -> Tensor:
    """Return the first fields [n, count] uint8 of words [n, w] int32, from the lowest bit on."""
    packed = words.clone(memory_format=torch.contiguous_format).view(torch.uint8)  # also a single column is copied
    if bits == 8:
        return packed[:, :count]
    if bits == 4:
        fields = torch.stack((packed & 15, packed >> 4), -1)
    else:  # eight fields fill as many bytes as each has bits
        packed = nn.functional.pad(packed, (0, -packed.shape[1] % bits)).view(len(packed), -1, bits)
        fields = packed.new_empty(*packed.shape[:2], 8)
        for field in range(8):
            byte, low = divmod(field * bits, 8)
            value = packed[..., byte] >> low
            if low + bits > 8:
                value |= packed[..., byte + 1] << (8 - low)
            fields[..., field] = value & (1 << bits) - 1
    return fields.view(len(packed), -1)[:, :count].contiguous()


def _width(count: int, bits: int) -> int:
    """Return how many words hold so many fields."""
    return -(-count * bits // 32)


def _gptq_weight(parts: _Parts, quantization: Quantization, name: str) -> QuantizedWeight:
    bits = quantization.bits
    packed = parts.matrix("qweight", torch.int32)
    inputs, outputs = packed.shape[0] * 32 // bits, packed.shape[1]
    if inputs * bits % 32:
        parts.wrong("qweight", f"has {len(packed)} rows, which {bits} bits do not fill")
    groups = _group_count(parts, quantization, inputs)
    scales = _finite(parts, "scales", parts.shaped("scales", (groups, outputs), *SCALES))
    stored = parts.shaped("qzeros", (groups, _width(outputs, bits)), torch.int32)
    if quantization.form == GPTQ and bits != 3:
        stored = stored + sum(1 << low for low in range(0, 32, bits))
    zeros = _unpacked(stored, bits, outputs)
    if quantization.form == GPTQ and bits == 3:
        zeros = zeros + 1 & 7
    _check_middle(parts, "qzeros", zeros, quantization)
    levels = _packed_rows(packed.T, bits, inputs)
    return GroupwiseWeight(name, bits, levels, scales.T, zeros.T, inputs, _group_of(parts, "g_idx", inputs, groups))


def _awq_weight(parts: _Parts, quantization: Quantization, name: str) -> QuantizedWeight:
    packed = parts.matrix("qweight", torch.int32)
    if quantization.form == "gemv":
        outputs, inputs = len(packed), packed.shape[1] * 8
        groups = _group_count(parts, quantization, inputs)
        width = parts.matrix("qzeros", torch.int32).shape[1]
        if width * 8 < groups:
            parts.wrong("qzeros", f"has {width} columns, but {groups} groups must be in them")
        zeros = _unpacked(parts.shaped("qzeros", (outputs, width), torch.int32), 4, groups)
        scales = parts.shaped("scales", (outputs, width * 8), *SCALES)[:, :groups]
        levels = _packed_rows(packed, 4, inputs)
    else:
        inputs, outputs = len(packed), packed.shape[1] * 8
        groups = _group_count(parts, quantization, inputs)
        scales = parts.shaped("scales", (groups, outputs), *SCALES).T
        stored = parts.shaped("qzeros", (groups, packed.shape[1]), torch.int32)
        zeros, levels = _awq_rows(stored, slice(None)), partial(_awq_rows, packed)
    return GroupwiseWeight(name, 4, levels, _finite(parts, "scales", scales), zeros, inputs)


def _awq_rows(packed: Tensor, rows: Tensor | slice) -> Tensor:
    """Return fields [r, n] uint8 of words [n, o / 8] of AWQ gemm, for some of the outputs."""
    outputs = torch.arange(packed.shape[1] * 8)[rows]
    field = torch.tensor(AWQ_ORDER).argsort()[outputs % 8]
    columns = packed.contiguous().view(torch.uint8).T
    if isinstance(rows, slice):
        columns = columns.contiguous()
    return columns[outputs // 8 * 4 + field // 2] >> (field % 2 * 4).to(torch.uint8).unsqueeze(1) & 15


def _compressed_weight(parts: _Parts, quantization: Quantization, name: str) -> QuantizedWeight:
    bits, packed = quantization.bits, quantization.form == PACKED
    if packed:
        stored = parts.matrix("weight_packed", torch.int32)
        outputs, inputs = parts.shaped("weight_shape", (2,), torch.int64, torch.int32).tolist()
        if outputs != len(stored) or inputs < 1 or stored.shape[1] != _width(inputs, bits):
            parts.wrong("weight_packed", f"is {_by(stored.shape)}, which is not {outputs} x {inputs} in {bits} bits")
        levels = _packed_rows(stored, bits, inputs)
    else:
        stored = parts.matrix("weight", torch.float8_e4m3fn if quantization.floating else torch.int8)
        outputs, inputs = stored.shape
        if quantization.floating and bool((stored.view(torch.uint8) & 127 == 127).any()):
            parts.wrong("weight", "holds NaN")
        levels = _plain_rows(stored)
    groups = _group_count(parts, quantization, inputs)
    scales = _finite(
        parts, "weight_scale", _scale_matrix(parts, "weight_scale", quantization, outputs, groups, *SCALES)
    )
    zeros = torch.tensor([[_middle(quantization)]])
    if "weight_zero_point" in parts:
        zeros = _zero_points(parts, quantization, outputs, groups)
        _check_middle(parts, "weight_zero_point", zeros, quantization)
    order = _group_of(parts, "weight_g_idx", inputs, groups) if packed else None
    return GroupwiseWeight(
        name,
        bits if packed else 8,
        levels,
        scales.expand(outputs, groups),
        zeros.expand(outputs, groups),
        inputs,
        order,
    )


def _scale_matrix(
    parts: _Parts, part: str, quantization: Quantization, outputs: int, groups: int, *dtypes: torch.dtype
) -> Tensor:
    """Return one number for each output and group, as a matrix that can be expanded to [o, g]."""
    if quantization.shared:
        tensor = parts.tensor(part, *dtypes)
        if tensor.numel() != 1:
            parts.wrong(part, f"is {_by(tensor.shape)}, but must be one number")
        return tensor.reshape(1, 1)
    return parts.shaped(part, (outputs, groups), *dtypes)


def _zero_points(parts: _Parts, quantization: Quantization, outputs: int, groups: int) -> Tensor:
    """Return zero points of compressed-tensors, packed ones or plain ones, with what is added to levels."""
    part, bits = "weight_zero_point", quantization.bits
    if quantization.floating:
        return _scale_matrix(
            parts, part, quantization, outputs, groups, torch.int8, torch.float8_e4m3fn, *SCALES
        ).float()
    stored = parts.tensor(part, torch.int8, torch.int32)
    if stored.dtype == torch.int32:
        return _unpacked(parts.shaped(part, (_width(outputs, bits), groups), torch.int32).T, bits, outputs).T
    zeros = _scale_matrix(parts, part, quantization, outputs, groups, torch.int8).to(torch.int32)
    half = 1 << bits - 1
    if bool(((zeros < -half) | (zeros >= half)).any()):
        parts.wrong(
            part, f"has zero points from {int(zeros.min())} to {int(zeros.max())}, which {bits} bits cannot hold"
        )
    return zeros + half if quantization.form == PACKED else zeros


_WEIGHTS: dict[str, Callable[[_Parts, Quantization, str], QuantizedWeight]] = {
    GPTQ: _gptq_weight,
    "gptq_v2": _gptq_weight,
    "gemm": _awq_weight,
    "gemv": _awq_weight,
    **dict.fromkeys((PACKED, *NAIVE), _compressed_weight),
}


def _packed_rows(words: Tensor, bits: int, inputs: int) -> Callable[[Tensor | slice], Tensor]:
    """Return a function that unpacks some rows of words [o, w]."""
    return lambda rows: _unpacked(words[rows], bits, inputs)


def _plain_rows(levels: Tensor) -> Callable[[Tensor | slice], Tensor]:
    return lambda rows: levels[rows]


def _group_count(parts: _Parts, quantization: Quantization, inputs: int) -> int:
    """Return g. Raises ModelError where groups do not divide the inputs."""
    size = quantization.group_size
    if size == WHOLE:
        return 1
    if inputs % size:
        part = quantization.parts[0]
        parts.wrong(part, f"has {inputs} inputs, which groups of {size} do not divide (group_size in config.json)")
    return inputs // size


def _group_of(parts: _Parts, part: str, inputs: int, groups: int) -> Tensor | None:
    """Return the group of each input [i]; None where groups are neighbours."""
    if part not in parts:
        return None
    index = parts.shaped(part, (inputs,), torch.int32, torch.int64).long()
    if part == "weight_g_idx" and bool((index == -1).all()):  # which says that it is not used
        return None
    if int(index.min()) < 0 or int(index.max()) >= groups:
        parts.wrong(part, f"names groups from {int(index.min())} to {int(index.max())}, but there are {groups}")
    return None if torch.equal(index, torch.arange(inputs) // (inputs // groups)) else index


def _finite(parts: _Parts, part: str, scales: Tensor) -> Tensor:
    """Return scales, or raise ModelError where a number of the layer would be NaN or infinite."""
    if wrong := int((~(scales.float() * 512).isfinite()).sum()):
        parts.wrong(part, f"holds {wrong} scales that are NaN, infinite or too large")
    return scales


def _middle(quantization: Quantization) -> int:
    """Return the zero point of symmetric weights."""
    return 0 if quantization.form in NAIVE else 1 << quantization.bits - 1


def _check_middle(parts: _Parts, part: str, zeros: Tensor, quantization: Quantization) -> None:
    """Raise ModelError where the config says that zero points are in the middle, and one is not."""
    other = zeros != _middle(quantization)
    if (quantization.symmetric or quantization.floating) and bool(other.any()):
        parts.wrong(
            part, f"holds the zero point {zeros[other][0].item():g}, but symmetric weights have {_middle(quantization)}"
        )
