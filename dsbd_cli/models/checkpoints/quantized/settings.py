"""Settings of checkpoints that are quantised by GPTQ, AWQ or compressed-tensors, as their config.json has them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dsbd_cli.errors import shorten

GPTQ, AWQ, COMPRESSED, MXFP4 = "gptq", "awq", "compressed-tensors", "mxfp4"
INSTEAD = "take its GPTQ, AWQ, compressed-tensors or GGUF form, or its plain weights"
WHOLE = -1  # the size of a group that holds all inputs
MOST_GROUP = 1 << 24  # inputs
PACKED, NAIVE = "pack-quantized", ("int-quantized", "float-quantized", "naive-quantized")
PARTS = {  # names behind that of a layer, the first of which says that the layer is quantised
    GPTQ: ("qweight", "qzeros", "scales", "g_idx"),
    AWQ: ("qweight", "qzeros", "scales"),
    PACKED: ("weight_packed", "weight_scale", "weight_shape", "weight_zero_point", "weight_g_idx"),
    **dict.fromkeys(NAIVE, ("weight_scale", "weight", "weight_zero_point")),
}


@dataclass(frozen=True, slots=True)
class Quantization:
    """Settings by which a checkpoint was quantised.

    Attributes:
        method: gptq, awq, compressed-tensors or mxfp4.
        form: the layout of its tensors: gptq or gptq_v2; gemm or gemv; pack-quantized, int-quantized, float-quantized
            or naive-quantized.
        bits: of a level.
        group_size: inputs that share a scale; WHOLE: all of a layer.
        symmetric: every zero point is in the middle of the levels.
        ordered: groups may hold inputs that are not neighbours.
        floating: levels are floating-point numbers of eight bits.
        shared: all outputs of a layer share one scale, too.
    """

    method: str
    form: str
    bits: int
    group_size: int
    symmetric: bool = False
    ordered: bool = False
    floating: bool = False
    shared: bool = False

    @property
    def parts(self) -> tuple[str, ...]:
        """Names of the tensors of a quantised layer, behind its own; the first is there whatever the settings are."""
        return PARTS[self.form] if self.method == COMPRESSED else PARTS[self.method]


class _UnreadError(Exception):
    """Settings that are not read; its message is the reason."""


def quantization_of(config: Any) -> Quantization | str | None:
    """Return how the weights of a transformers config are quantised, or the reason why they are not read, as a clause
    of one line. None: they are plain."""
    settings = _settings(config)
    if settings is None:
        return None
    try:
        if not isinstance(settings, Mapping):
            raise _UnreadError(f"its quantization_config is {shorten(settings)}, but an object must stand there")
        method = _word(settings, "quant_method", None)
        if method not in READERS:
            said = "that quantization_config does not name" if method is None else f"called {shorten(method)}"
            raise _UnreadError(f"its weights are quantised by a method {said}, which is not read: {INSTEAD}")
        return READERS[method](settings)
    except _UnreadError as reason:
        return str(reason)


def _settings(config: Any) -> Any:
    text = config.get_text_config(decoder=True) if hasattr(config, "get_text_config") else config
    for part in (config, text):
        for name in ("quantization_config", "compression_config"):
            settings = getattr(part, name, None)
            if settings is not None:
                return settings.to_dict() if hasattr(settings, "to_dict") else settings
    return None


def _word(settings: Mapping[str, Any], field: str, default: str | None) -> str | None:
    """Return a word in lower case. Enumerations of transformers count as words."""
    value = settings.get(field)
    value = getattr(value, "value", value)
    if value is None:
        return default
    if not isinstance(value, str):
        raise _UnreadError(f"its quantization_config says {field} = {shorten(value)}, but a word must stand there")
    return value.lower()


def _flag(settings: Mapping[str, Any], field: str, default: bool = False) -> bool:
    value = settings.get(field)
    if not isinstance(value, bool | None):
        raise _UnreadError(
            f"its quantization_config says {field} = {shorten(value)}, but true or false must stand there"
        )
    return default if value is None else value


def _bits(settings: Mapping[str, Any], fields: Sequence[str], read: Sequence[int]) -> int:
    """Return the bits of a level, which is one of those that are read."""
    field, bits = _first(settings, fields)
    if type(bits) is not int or bits not in read:
        raise _UnreadError(f"its weights have {field} = {shorten(bits)}, and {_listed(read)} is read: {INSTEAD}")
    return bits


def _group_size(settings: Mapping[str, Any], fields: Sequence[str]) -> int:
    field, size = _first(settings, fields)
    if type(size) is not int or not (size == WHOLE or 1 <= size <= MOST_GROUP):
        raise _UnreadError(
            f"its quantization_config says {field} = {shorten(size)}, but 1 to {MOST_GROUP} must stand there, or "
            f"{WHOLE} for all inputs"
        )
    return size


def _first(settings: Mapping[str, Any], fields: Sequence[str]) -> tuple[str, Any]:
    """Return the first of these fields that is there, and its value."""
    field = next((field for field in fields if settings.get(field) is not None), fields[0])
    return field, settings.get(field)


def _listed(values: Sequence[int]) -> str:
    *most, last = map(str, values)
    return f"{', '.join(most)} or {last}" if most else last


def _gptq(settings: Mapping[str, Any]) -> Quantization:
    _check_rules(settings)
    form = _word(settings, "checkpoint_format", None) or _word(settings, "format", GPTQ)
    for layout in ("is_marlin_format", "planar"):
        if _flag(settings, layout):
            form = layout
    if form not in (GPTQ, "gptq_v2"):
        raise _UnreadError(f"its GPTQ weights have the layout {shorten(form)}, which is not read: {INSTEAD}")
    if _word(settings, "pack_dtype", "int32") != "int32":
        raise _UnreadError(f"its GPTQ weights are packed into {shorten(settings['pack_dtype'])}, and int32 is read")
    return Quantization(
        GPTQ,
        form,
        _bits(settings, ("bits",), (2, 3, 4, 8)),
        _group_size({"group_size": 128, **settings}, ("group_size",)),
        symmetric=_flag(settings, "sym"),
        ordered=_flag(settings, "desc_act"),
    )


def _check_rules(settings: Mapping[str, Any]) -> None:
    """Refuse rules of GPTQModel that quantise some layers in another way. Layers that it has left out have plain
    tensors."""
    rules = settings.get("dynamic") or {}
    if not isinstance(rules, Mapping) or not all(isinstance(rule, str) for rule in rules):
        raise _UnreadError(f"its quantization_config says dynamic = {shorten(rules)}, but rules must stand there")
    if changed := [rule for rule, changes in rules.items() if not rule.startswith("-:") and changes]:
        raise _UnreadError(
            f"its layers are quantised in several ways (dynamic: {shorten(changed[0])}), and one way is read: {INSTEAD}"
        )


def _awq(settings: Mapping[str, Any]) -> Quantization:
    _check_rules(settings)
    form = next(
        filter(None, (_word(settings, name, None) for name in ("version", "checkpoint_format", "format"))), "gemm"
    )
    if form not in ("gemm", "gemv") or _word(settings, "backend", None) == "llm-awq":
        raise _UnreadError(f"its AWQ weights have the layout {shorten(form)}, and gemm or gemv is read: {INSTEAD}")
    return Quantization(
        AWQ,
        form,
        _bits({"w_bit": 4, **settings}, ("bits", "w_bit"), (4,)),
        _group_size({"q_group_size": 128, **settings}, ("group_size", "q_group_size")),
    )


def _compressed(settings: Mapping[str, Any]) -> Quantization:
    groups = settings.get("config_groups")
    if (
        not isinstance(groups, Mapping)
        or not groups
        or not all(isinstance(group, Mapping) for group in groups.values())
    ):
        raise _UnreadError(
            f"its quantization_config says config_groups = {shorten(groups)}, but groups must stand there"
        )
    for field, said in (("kv_cache_scheme", "keys and values"), ("transform_config", "inputs, by rotations,")):
        if settings.get(field):
            raise _UnreadError(f"its {said} are changed, too ({field}), which is not read: {INSTEAD}")
    sparsity = settings.get("sparsity_config")
    if sparsity and (not isinstance(sparsity, Mapping) or sparsity.get("format") not in (None, "dense")):
        raise _UnreadError(f"its weights are sparse ({shorten(sparsity)}), which is not read: {INSTEAD}")
    ways = {_scheme(group, settings) for group in groups.values()}
    if len(ways) > 1:
        raise _UnreadError(f"its layers are quantised in {len(ways)} ways, and one way is read: {INSTEAD}")
    return ways.pop()


def _scheme(group: Mapping[str, Any], settings: Mapping[str, Any]) -> Quantization:
    """Return one way of compressed-tensors to quantise layers."""
    form = _word(group, "format", None) or _word(settings, "format", None)
    if form not in (PACKED, *NAIVE):
        raise _UnreadError(f"its weights have the layout {shorten(form)} of {COMPRESSED}, which is not read: {INSTEAD}")
    weights = group.get("weights")
    if not isinstance(weights, Mapping):
        raise _UnreadError(f"its quantization_config says weights = {shorten(weights)}, but an object must stand there")
    floating, strategy = _word(weights, "type", "int") == "float", _word(weights, "strategy", None)
    if strategy is None:
        size = weights.get("group_size")
        strategy = "tensor" if size is None else "channel" if size == WHOLE else "group"
    if strategy not in ("tensor", "channel", "group"):
        raise _UnreadError(f"its scales have the strategy {shorten(strategy)}, which is not read: {INSTEAD}")
    if _word(weights, "type", "int") not in ("int", "float") or (floating and form in (PACKED, "int-quantized")):
        raise _UnreadError(
            f"its weights are {form} of the type {shorten(weights['type'])}, which is not read: {INSTEAD}"
        )
    if weights.get("dynamic"):
        raise _UnreadError(f"its quantization_config says dynamic = {shorten(weights['dynamic'])} of weights")
    symmetric, order = _flag(weights, "symmetric", True), weights.get("actorder")
    if floating and not symmetric:
        raise _UnreadError(f"its weights are {form} with zero points, which is not read: {INSTEAD}")
    return Quantization(
        COMPRESSED,
        str(form),
        _bits({"num_bits": 8, **weights}, ("num_bits",), (2, 3, 4, 5, 6, 7, 8) if form == PACKED else (8,)),
        _group_size(weights, ("group_size",)) if strategy == "group" else WHOLE,
        symmetric=symmetric,
        ordered=order is True or _word({"actorder": order or None}, "actorder", None) in ("group", "dynamic"),
        floating=floating,
        shared=strategy == "tensor",
    )


def _mxfp4(settings: Mapping[str, Any]) -> Quantization:
    return Quantization(MXFP4, MXFP4, 4, 32)


READERS: dict[str, Callable[[Mapping[str, Any]], Quantization]] = {
    GPTQ: _gptq,
    AWQ: _awq,
    COMPRESSED: _compressed,
    MXFP4: _mxfp4,
}
