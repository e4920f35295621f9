"""Scaling of the rotary positions of GGUF files. transformers reads their base alone, so that it would run another
model where the frequencies are scaled.

llama.cpp has these ways:
- `rope_freqs.weight`: each frequency is divided by a factor of its own (Llama 3.1 to 3.3);
- `rope_factors_short.weight` and `rope_factors_long.weight`: the same, with one of two lists (Phi-3, Phi-4-mini);
- `rope.scaling.type` linear: all are divided by `rope.scaling.factor` (Gemma 3). So, too, where no type is named;
- `rope.scaling.type` yarn (Qwen with 128K).
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, NoReturn

from dsbd_cli.errors import ModelError, UnsupportedModelError, shorten
from dsbd_cli.models.checkpoints.gguf.names import FACTORS, LONG, ROTARY, SHORT

if TYPE_CHECKING:
    from dsbd_cli.models.checkpoints.gguf.file import GgufFile

READ = frozenset(  # keys of rope.scaling
    "type factor original_context_length attn_factor finetuned yarn_beta_fast yarn_beta_slow yarn_ext_factor "
    "yarn_attn_factor".split()
)


def scale_rotary(config: Any, file: GgufFile) -> None:
    """Give a config that transformers has made of a GGUF file the scaling of the file's rotary positions, in place.

    Where layers differ in their rotary positions, those of full attention are scaled. A scaling that transformers has
    set by itself stays. Raises ModelError for damaged values, and UnsupportedModelError for a way that is not read.
    """
    rope = getattr(config, "rope_parameters", None) or {}
    full = rope.get("full_attention", rope)
    if full.get("rope_type", "default") != "default":
        return
    if not full:
        if any(table in file.tensors for table in ROTARY) or _kind(file) not in ("none", "linear"):
            _refuse(file, f"scales rotary positions, and transformers' {config.model_type} has none")
        return
    if "partial_rotary_factor" in full and (rotated := _number(file, "rope.dimension_count", 0.0)):
        full["partial_rotary_factor"] = min(1.0, rotated / _head_dim(config))
    if "sliding_attention" in rope and (base := _number(file, "rope.freq_base_swa", 0.0)):
        rope["sliding_attention"]["rope_theta"] = base
    scaling = _scaling(config, file, full)
    full.update(scaling)
    if "original_max_position_embeddings" in scaling and hasattr(config, "original_max_position_embeddings"):
        config.original_max_position_embeddings = scaling["original_max_position_embeddings"]  # Phi-3 reads it there


def _scaling(config: Any, file: GgufFile, full: dict[str, Any]) -> dict[str, Any]:
    """Return the scaling as transformers' rope_parameters have it; nothing without one. full: those of full
    attention."""
    start, kind = f"{file.architecture}.rope.scaling.", _kind(file)
    if unknown := [key for key in file.metadata if key.startswith(start) and key.removeprefix(start) not in READ]:
        _refuse(file, f"says {unknown[0]} = {shorten(file.metadata[unknown[0]])}, which is not read")
    count = int(_head_dim(config) * (full.get("partial_rotary_factor") or 1.0)) // 2
    tables = {name: _table(file, name, count) for name in ROTARY if name in file.tensors}
    factor = _number(file, "rope.scaling.factor", 0.0) or _number(file, "rope.scale_linear", 1.0)
    attention = _number(file, "rope.scaling.attn_factor", 1.0)
    positions = config.max_position_embeddings
    original = int(_number(file, "rope.scaling.original_context_length", positions))
    if tables.keys() == {SHORT, LONG} and (kind in ("none", "longrope") or (factor == 1.0 and kind == "linear")):
        named = f"{start}attn_factor" in file.metadata  # without it, it follows from the lengths
        return _longrope(tables[SHORT], tables[LONG], original) | ({"attention_factor": attention} if named else {})
    if kind == "yarn" and not tables:
        for key in ("yarn_ext_factor", "yarn_attn_factor"):
            if (value := _number(file, f"rope.scaling.{key}", 1.0)) != 1.0:
                _refuse(file, f"says {start}{key} = {value}, and 1 is read")
        return {
            "rope_type": "yarn",
            "factor": factor,
            "original_max_position_embeddings": original,
            "attention_factor": attention * (1.0 + 0.1 * math.log(max(1.0, factor))),
            "beta_fast": _number(file, "rope.scaling.yarn_beta_fast", 32.0),
            "beta_slow": _number(file, "rope.scaling.yarn_beta_slow", 1.0),
        }
    if kind not in ("none", "linear") or not tables.keys() <= {FACTORS}:
        _refuse(file, f"scales rotary positions by {', '.join((kind, *tables))}, which is not read")
    if attention != 1.0:
        _refuse(file, f"says {start}attn_factor = {attention}, which is not read with {kind}")
    factor = factor if kind == "linear" else 1.0
    if set(tables.get(FACTORS, [1.0])) == {1.0}:
        return {} if factor == 1.0 else {"rope_type": "linear", "factor": factor}
    factors = [own * factor for own in tables[FACTORS]]  # in both lists, so that they serve every length
    return _longrope(factors, factors, positions) | {"attention_factor": 1.0}


def _longrope(short: list[float], long: list[float], original: int) -> dict[str, Any]:
    """Return transformers' way in which each frequency has its own factor. original: the length from which on `long`
    serves."""
    lists = {"short_factor": short, "long_factor": long}
    return {"rope_type": "longrope", **lists, "original_max_position_embeddings": original}


def _kind(file: GgufFile) -> str:
    """Return the type of scaling."""
    kind = file.metadata.get(key := f"{file.architecture}.rope.scaling.type", "linear")
    if not isinstance(kind, str):
        raise ModelError(f"{file.name}: {file.path.name} says {key} = {shorten(kind)}, but a word must stand there")
    return kind


def _head_dim(config: Any) -> int:
    return int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)


def _number(file: GgufFile, key: str, default: float) -> float:
    """Return a number above 0 of the file's metadata. key: without the architecture."""
    key = f"{file.architecture}.{key}"
    value = file.metadata.get(key, default)
    if key in file.metadata and not (type(value) in (int, float) and 0 < value < math.inf):
        raise ModelError(
            f"{file.name}: {file.path.name} says {key} = {shorten(value)}, but a number above 0 must stand there"
        )
    return float(value)


def _table(file: GgufFile, name: str, count: int) -> list[float]:
    """Return the factors of `count` frequencies."""
    values, where = file.read(name), f"{file.name}: {file.tensors[name].file.name}"
    factors: list[float] = values.tolist() if len(file.tensors[name].shape) == 1 else []  # type: ignore[union-attr]
    if len(factors) != count:
        shape = " x ".join(map(str, file.tensors[name].shape))
        raise ModelError(f"{where} says that {name} is {shape}, but the model has {count} rotary frequencies")
    if min(factors) <= 0:
        raise ModelError(f"{where} has {min(factors)} in {name}, but factors are above 0: get it again")
    return factors


def _refuse(file: GgufFile, what: str) -> NoReturn:
    raise UnsupportedModelError(f"{file.name}: {file.path.name} {what}: take its safetensors")
