"""Checkpoints in the forms of GPTQ, AWQ and compressed-tensors, made field by field from their definitions."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from dsbd_cli.ops.quantized_weight import FourBit

AWQ = [0, 2, 4, 6, 1, 3, 5, 7]


def pack(fields: Tensor, bits: int) -> Tensor:
    """Fields [n, c] in words [n, w] int32: field k begins at bit k * bits of its row."""
    rows = []
    for values in fields.tolist():
        number = sum(value << place * bits for place, value in enumerate(values))
        words = [number >> 32 * word & 0xFFFFFFFF for word in range(-(-len(values) * bits // 32))]
        rows.append([word - (1 << 32) if word >> 31 else word for word in words])
    return torch.tensor(rows, dtype=torch.int32)


def awq_packed(fields: Tensor) -> Tensor:
    """Fields [n, o] in words [n, o / 8] of AWQ: nibble k of a word is output AWQ[k] of its eight."""
    return pack(fields.view(len(fields), -1, 8)[:, :, AWQ].flatten(1), 4)


def of_fourbit(packed: FourBit) -> Tensor:
    """The weight [o, i] in float32, as FourBit says that it is stored."""
    assert packed.words.dtype == torch.int32
    assert packed.scales.dtype == packed.offsets.dtype == torch.float32
    outputs, words = packed.words.shape
    assert packed.scales.shape == packed.offsets.shape == (outputs, words * 8 // 32)
    weight = torch.empty(outputs, words * 8)
    order = list(range(words * 8)) if packed.order is None else packed.order.tolist()
    assert sorted(order) == list(range(words * 8))
    for output in range(outputs):
        for word in range(words):
            number = int(packed.words[output, word]) & 0xFFFFFFFF
            for k in range(8):
                place = 8 * word + k
                level = number >> 8 * (k % 4) + 4 * (k // 4) & 15
                scale, offset = packed.scales[output, place // 32], packed.offsets[output, place // 32]
                weight[output, order[place]] = scale * level + offset
    return weight


@dataclass
class Layer:
    """A random quantised layer.

    levels: [o, i], zeros: [o, g], from 0 on. scales: [o, g]. group_of: [i].
    """

    levels: Tensor
    zeros: Tensor
    scales: Tensor
    group_of: Tensor
    bits: int
    group: int
    parts: dict[str, Tensor] = field(default_factory=dict)

    @classmethod
    def draw(
        cls,
        outputs: int,
        inputs: int,
        group: int = 32,
        bits: int = 4,
        *,
        seed: int = 0,
        symmetric: bool = False,
        ordered: bool = False,
        dtype: torch.dtype = torch.float16,
    ) -> Layer:
        torch.manual_seed(seed)
        size = inputs if group == -1 else group
        groups = inputs // size
        zeros = torch.randint(0, 1 << bits, (outputs, groups))
        group_of = torch.arange(inputs) // size
        return cls(
            torch.randint(0, 1 << bits, (outputs, inputs)),
            torch.full_like(zeros, 1 << bits - 1) if symmetric else zeros,
            (torch.rand(outputs, groups) + 0.1).to(dtype),
            group_of[torch.randperm(inputs)] if ordered else group_of,
            bits,
            group,
        )

    @property
    def weight(self) -> Tensor:
        """The weight [o, i] in float32."""
        weight = torch.empty(self.levels.shape)
        for input_, group in enumerate(self.group_of.tolist()):
            weight[:, input_] = self.scales[:, group].float() * (self.levels[:, input_] - self.zeros[:, group])
        return weight

    def gptq(self, form: str = "gptq") -> dict[str, Tensor]:
        zeros = pack(self.zeros.T, self.bits)
        if form == "gptq":
            if self.bits == 3:
                zeros = pack((self.zeros.T - 1) % 8, 3)
            else:  # the words as one number each, less one in each field
                ones = sum(1 << low for low in range(0, 32, self.bits))
                less = ((zeros.long() - ones) & 0xFFFFFFFF).tolist()
                signed = [[word - (1 << 32) if word >> 31 else word for word in row] for row in less]
                zeros = torch.tensor(signed, dtype=torch.int32)
        return {
            "qweight": pack(self.levels, self.bits).T.contiguous(),
            "qzeros": zeros,
            "scales": self.scales.T.contiguous(),
            "g_idx": self.group_of.to(torch.int32),
        }

    def awq(self) -> dict[str, Tensor]:
        return {
            "qweight": awq_packed(self.levels.T),
            "qzeros": awq_packed(self.zeros.T),
            "scales": self.scales.T.contiguous(),
        }

    def gemv(self) -> dict[str, Tensor]:
        outputs, groups = self.zeros.shape
        width = -(-groups // 8) + 1  # the format pads it
        zeros, scales = torch.zeros(outputs, width * 8).long(), torch.zeros(outputs, width * 8).to(self.scales.dtype)
        zeros[:, :groups], scales[:, :groups] = self.zeros, self.scales
        return {"qweight": pack(self.levels, 4), "qzeros": pack(zeros, 4), "scales": scales}

    def compressed(self, *, symmetric: bool, ordered: bool = False) -> dict[str, Tensor]:
        parts = {
            "weight_packed": pack(self.levels, self.bits),
            "weight_scale": self.scales,
            "weight_shape": torch.tensor(self.levels.shape),
        }
        if not symmetric:
            parts["weight_zero_point"] = pack(self.zeros.T, self.bits).T.contiguous()
        if ordered:
            parts["weight_g_idx"] = self.group_of.to(torch.int32)
        return parts


def checkpoint(parts: dict[str, Tensor], layer: str = "model.x") -> dict[str, Callable[[], Tensor]]:
    return {f"{layer}.{part}": partial(lambda tensor: tensor, tensor) for part, tensor in parts.items()}


def config(method: str, **settings: Any) -> Any:
    return SimpleNamespace(quantization_config={"quant_method": method, **settings})


def compressed_config(
    bits: int = 4,
    group: int | None = 32,
    strategy: str = "group",
    *,
    symmetric: bool = True,
    form: str = "pack-quantized",
    kind: str = "int",
    **weights: Any,
) -> Any:
    scheme = {"num_bits": bits, "type": kind, "symmetric": symmetric, "strategy": strategy, "group_size": group}
    groups = {"group_0": {"targets": ["Linear"], "weights": {**scheme, **weights}, "input_activations": None}}
    return config("compressed-tensors", config_groups=groups, format=form, ignore=["lm_head"], kv_cache_scheme=None)
