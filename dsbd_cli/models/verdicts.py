"""Results of the checks at load: where they are kept, and which errors of logits are allowed."""

from __future__ import annotations

import functools
import hashlib
import json
import logging
import os
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

import dsbd_cli
from dsbd_cli.config.model import ModelSpec
from dsbd_cli.ops.processor import current, instructions, on_amd
from dsbd_cli.user_cache import cache_folder, write_whole

_logger = logging.getLogger(__name__)

FORMAT = "dsbd.verdict/4"
KEYS = {
    "architecture", "backends", "copies", "dtype", "eos", "kernels", "outliers", "plain", "spec", "tested", "tokenizer",
    "varies",
}  # fmt: skip
LIBRARIES = ("ONEDNN_", "DNNL_", "MKL_", "OMP_", "KMP_", "ATEN_", "NUMBA_", "OPENBLAS_")  # beginnings of variables
UNASKED = "nobody asked for the work that it takes"


def fingerprint(spec: ModelSpec, *places: Path) -> str:
    """Return a digest of everything that the checks of a checkpoint depend on. places: folders or files of the
    checkpoint and of its adapters."""
    files = [file for place in places for file in ([place] if place.is_file() else sorted(place.iterdir()))]
    facts = {
        "files": [
            (str(path.resolve()), (stat := path.stat()).st_size, stat.st_mtime_ns) for path in files if path.is_file()
        ],
        "code": _code(),
        "processor": (str(current()), on_amd(), sorted(instructions())),
        "threads": torch.get_num_threads(),
        "capability": torch.backends.cpu.get_cpu_capability(),
        "environment": sorted((name, value) for name, value in os.environ.items() if name.startswith(LIBRARIES)),
        "torch": torch.__version__,
        "transformers": version("transformers"),  # without its import, which takes seconds
        "tokenizers": version("tokenizers"),
        "kernels": [_installed(name) for name in ("numba", "llvmlite", "triton")],
        "precision": torch.get_float32_matmul_precision(),
        "spec": {name: value for name, value in asdict(spec).items() if name != "source"},
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
    }
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()


def _installed(name: str) -> str | None:
    """Return the version of a package; None where it is not installed."""
    with suppress(PackageNotFoundError):
        return version(name)
    return None


def read_verdict(digest: str) -> dict[str, Any] | None:
    """Return the results kept under this digest; None where there are none, or they are not what was written: a changed
    digit of a model's settings would be another model."""
    with suppress(OSError, ValueError):
        text, _, checksum = _path(digest).read_text(encoding="utf-8").rpartition("\n")
        if checksum == _checksum(text):
            found: dict[str, Any] = json.loads(text)
            if found.get("format") == FORMAT and _is_complete(found):
                return found
    return None


def _checksum(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _is_complete(found: Mapping[str, Any]) -> bool:
    """Return whether everything is there that a load needs: the reason why our decoder does not serve, or all
    results."""
    return isinstance(found.get("decoder"), str) or ("decoder" in found and found.keys() >= KEYS)


def write_verdict(digest: str, found: Mapping[str, object]) -> None:
    """Keep the results of the checks, whole or not at all. Where the folder cannot be written, later loads check
    again."""
    text = json.dumps({"format": FORMAT, **found})
    try:
        write_whole(_path(digest), f"{text}\n{_checksum(text)}".encode())
    except OSError as error:
        why = error if error.strerror is None else f"{cache_folder()} cannot be written ({error.strerror})"
        _logger.warning("every load checks the model anew: %s", why)


def _path(digest: str) -> Path:
    return cache_folder() / "verdicts" / f"{digest}.json"


@functools.cache
def _code() -> str:
    """Return a digest of the package's files, which decide what a model computes."""
    digest = hashlib.sha256()
    for path in sorted(Path(dsbd_cli.__file__).parent.rglob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()


@dataclass(frozen=True, slots=True)
class Verdict:
    """Result of the check of invariance.

    Attributes:
        varies: why a node's logits may depend on what else is in the forward; None where they do not.
        copies: whether they also stay the same where the beginning of the prompt was copied from another row; None
            where that was not checked.
    """

    varies: str | None
    copies: bool | None = None


# Root mean square of a node's logit error, relative to the spread of its logits. Wrong masks give 0.2 and more at most
# nodes; rounding gives up to a third of the limit at the median, and now and then more (if another expert is chosen).
LIMITS = {torch.float32: 1e-4, torch.float16: 2e-2, torch.bfloat16: 6e-2}
# Some checkpoints round worse in float32 (Qwen2.5-Coder-0.5B: 1.2e-4). Their error may be TIMES_ROUNDING times as large
# as the change of the ordinary forward's logits when PADDING tokens are added on the right, up to CEILING. In half
# types this applies to the worst nodes alone.
TIMES_ROUNDING = 4
PADDING = 21
CEILING = 1e-3


def limit_for(dtype: torch.dtype, error: float, rounding: Callable[[], float]) -> float:
    """Return the largest error that is allowed, relative to the spread of the logits.

    rounding: measures how far padding moves the logits, relative to the spread. It is called only where a float32 model
    is above the limit of its dtype.
    """
    limit = LIMITS[dtype]
    if dtype != torch.float32 or error <= limit:
        return limit
    return min(max(limit, TIMES_ROUNDING * rounding()), CEILING)
