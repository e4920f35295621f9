"""Settings for loading one model: where it comes from, its dtype and device, and how it is computed."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal, get_args

from dsbd_cli.config.checking import check_types, refuse, require
from dsbd_cli.errors import UsageError

OnTooLong = Literal["error", "truncate-left"]
Numerics = Literal["invariant", "fast"]
Quantize = Literal["int8", "int4", "none"]
TokenizerOf = Literal["base"]
Dtype = Literal["auto", "float32", "bfloat16", "float16"]

ON_TOO_LONG, QUANTIZE, NUMERICS, DTYPES = map(get_args, (OnTooLong, Quantize, Numerics, Dtype))

BUILTIN_TARGET = "builtin:target"
BUILTIN_DRAFT = "builtin:draft"  # draft of the built-in target; other targets have no draft unless one is named

MTP_DRAFT = "mtp"  # the head in the target's own checkpoint


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """Place of a checkpoint and how to load it.

    Attributes:
        source: alias, folder or hub id, as the user wrote it, with `@revision` of a hub id and `+adapter` for each
            adapter; `builtin:target` and `builtin:draft` are the shipped pair.
        role: `target` or `draft`; named in errors. `load` sets it.
        dtype: auto, float32, bfloat16 or float16.
        device: torch device string, or `auto`.
        device_map: accelerate's device map (`auto`, ...), exclusive with device.
        trust_remote_code: run code from the checkpoint's repository.
        numerics: for a target. `invariant` computes every node the same way whatever else is in a forward, so that a
            text cannot depend on the draft or the batch; `fast` saves that work.
        tensor_parallel: for a target. Processes, each with a GPU where there are any, that share every layer.
        kernels: on a GPU, layers whose small operations are known run as kernels; False: as transformers has them.
        quantize: `int8` or `int4`: linear layers are made so at load, on the CPU. `none`: a quantised file is
            dequantised. None: weights stay as the file has them.
        adapters: folders or hub ids of peft adapters, merged at load after those that `source` names.
        tokenizer: `base`: the tokenizer and the chat template are the model's own, whatever its adapters bring. None:
            those of the last adapter that brings some.
    """

    source: str
    role: Literal["target", "draft"] = "target"
    dtype: str = "auto"
    device: str = "auto"
    device_map: str | None = None
    trust_remote_code: bool = False
    numerics: Numerics = "invariant"
    tensor_parallel: int = 1
    kernels: bool = True
    quantize: Quantize | None = None
    adapters: tuple[str, ...] = ()
    tokenizer: TokenizerOf | None = None

    def __post_init__(self) -> None:
        processes, expected = self.tensor_parallel, "1 or more, and 1 of a draft"
        several = self.role == "target" and processes > 1
        require(processes == 1 or several, "tensor_parallel", processes, expected)
        require(self.quantize in (None, *QUANTIZE), "quantize", self.quantize, f"one of {', '.join(QUANTIZE)}")
        check_types(self)
        require(self.dtype in DTYPES, f"{self.role} dtype", self.dtype, f"one of {', '.join(DTYPES)}")
        if self.device_map is not None and self.device != "auto":
            raise UsageError("device and device_map cannot be used together: give one of them")
        if self.quantizes and self.device_map is not None:
            refuse(
                "quantize", self.quantize, f"device_map is {self.device_map!r}: {self.quantize} runs on the CPU only"
            )
        if self.quantizes and self.dtype == "float16":
            refuse("quantize", self.quantize, "dtype is float16, which kernels cannot read: use bfloat16 or float32")
        if self.quantizes and self.tensor_parallel > 1:
            refuse("quantize", self.quantize, f"tensor_parallel is {self.tensor_parallel}: drop one of them")

    @property
    def quantizes(self) -> bool:
        """Whether plain weights are quantised at load."""
        return self.quantize not in (None, "none")

    @property
    def in_target(self) -> bool:
        """True where this draft is the MTP layer of the target's own checkpoint, so that there is no other
        checkpoint."""
        return self.role == "draft" and self.source == MTP_DRAFT

    def of_draft(self, source: str, device: str | None = None) -> ModelSpec:
        """Return the settings of a draft that is loaded as this target is, except that its code is not trusted and it
        has no adapters. device: the draft's own one, if it has one."""
        target_device = device or (self.device if self.device_map is None else "auto")
        alike = replace(self, source=source, role="draft", device=target_device, device_map=None, tensor_parallel=1)
        return replace(alike, trust_remote_code=False, adapters=(), tokenizer=None)
