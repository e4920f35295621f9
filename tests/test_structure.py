"""The shape of the house, read from the code itself: layers, what may be imported where, what is public."""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import dsbd_cli
from dsbd_cli import config

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "dsbd_cli"

LAYERS = {
    0: (
        "errors",
        "variants",
        "grammars",
        "grammar_trial",
        "schemas",
        "token_rules",
        "config",
        "records",
        "stats",
        "requests",
        "_version",
        "threads",
    ),
    1: ("kernels",),
    2: ("core",),
    3: ("drafting", "verify"),
    4: ("models",),
    5: ("decoding",),
    6: ("dropin", "metrics", "data", "tasks", "reports", "peers", "scale"),
    7: ("pick",),
    8: ("bench", "profiling"),
    9: ("distillation",),
    10: ("cli", "lm_eval"),
    11: ("__main__", "__init__"),
}
LAYER_OF = {name: layer for layer, names in LAYERS.items() for name in names}
TORCH = ("torch",)
TRANSFORMERS = ("transformers", "tokenizers", "huggingface_hub", "accelerate", "safetensors")
WITHOUT_TORCH = {"cli", "data", "pick", "tasks", "__init__", "__main__", *LAYERS[0]}
MAY_USE_TRANSFORMERS = {"dropin", "lm_eval", "models", "peers"}

WINGS = ("engine", "job", "lab")


def sources(package: Path = PACKAGE) -> list[Path]:
    return sorted(package.rglob("*.py"))


def house(path: Path, package: Path = PACKAGE) -> str:
    """`core` for dsbd_cli/engine/core/pool.py, `errors` for dsbd_cli/errors.py, `__init__` for a wing's own file."""
    parts = path.relative_to(package).parts
    return (parts[1] if parts[0] in WINGS and len(parts) > 1 else parts[0]).removesuffix(".py")


def imported_house(name: str) -> str | None:
    """The house that a dotted name of this package lies in; None for a name of others, of the package or of a wing."""
    parts = name.split(".")
    if parts[0] != "dsbd_cli" or len(parts) < 2:
        return None
    if parts[1] in WINGS:
        return parts[2] if len(parts) > 2 else None
    return parts[1]


def imports(path: Path) -> Iterator[tuple[int, str]]:
    """Line and full name of every import, inside functions too; of `from x import y` both x and x.y."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = "." * node.level + (node.module or "")
            yield node.lineno, base
            yield from ((node.lineno, f"{base}.{alias.name}") for alias in node.names)


def layer_faults(package: Path) -> list[str]:
    """Imports from a higher layer, from a neighbour on the same layer, or relative ones."""
    faults = []
    for path in sources(package):
        own = house(path, package)
        if own not in LAYER_OF:
            faults.append(f"{path}: {own} has no layer")
            continue
        for line, name in imports(path):
            if name.startswith("."):
                faults.append(f"{path}:{line} relative import")
            other = imported_house(name)
            if other in (None, own, "__version__"):
                continue
            allowed = LAYER_OF.get(other, 99) < LAYER_OF[own] or LAYER_OF[own] == LAYER_OF.get(other) == 0
            if not allowed:
                faults.append(f"{path}:{line} {own} imports {name}")
    return faults


def foreign_faults(package: Path) -> list[str]:
    """torch outside the layers that compute, transformers outside the layer that knows it."""
    faults = []
    for path in sources(package):
        own = house(path, package)
        for line, name in imports(path):
            top = name.split(".")[0]
            if (top in TORCH and own in WITHOUT_TORCH) or (top in TRANSFORMERS and own not in MAY_USE_TRANSFORMERS):
                faults.append(f"{path}:{line} {own} imports {name}")
    return faults


def any_faults(package: Path) -> list[str]:
    """typing.Any outside the seam to transformers."""
    return [
        f"{path}:{line} imports Any"
        for path in sources(package)
        if house(path, package) not in ("dropin", "models")
        for line, name in imports(path)
        if name == "typing.Any"
    ]


def print_faults(package: Path) -> list[str]:
    """print() in a library writes into somebody's records."""
    return [
        f"{path}:{node.lineno} print"
        for path in sources(package)
        if house(path, package) != "cli"
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "print"
    ]


CHECKS = [layer_faults, foreign_faults, any_faults, print_faults]


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_the_package_has_no_faults(check: object) -> None:
    assert callable(check)
    assert check(PACKAGE) == []


PLANTED = [
    (layer_faults, "engine/core/pool.py", "from dsbd_cli.engine.models import toy"),
    (layer_faults, "engine/core/pool.py", "def f():\n    import dsbd_cli.engine.decoding.engine"),
    (layer_faults, "engine/verify/base.py", "from dsbd_cli.engine.drafting.base import Drafter"),
    (layer_faults, "errors.py", "from dsbd_cli.engine import core"),
    (layer_faults, "job/data/jsonl.py", "from dsbd_cli.lab.tasks import sql"),
    (layer_faults, "engine/decoding/engine.py", "from dsbd_cli.job.cli.app import main"),
    (layer_faults, "engine/core/pool.py", "from . import mask"),
    (layer_faults, "unknown/x.py", ""),
    (foreign_faults, "records.py", "import torch"),
    (foreign_faults, "job/cli/generate.py", "def f():\n    from torch import nn"),
    (foreign_faults, "engine/decoding/engine.py", "from transformers import AutoModel"),
    (foreign_faults, "engine/core/pool.py", "import tokenizers.models"),
    (any_faults, "engine/core/pool.py", "from typing import Any"),
    (print_faults, "engine/decoding/engine.py", "def f():\n    print(1)"),
]


@pytest.mark.parametrize(("check", "name", "code"), PLANTED, ids=[f"{c.__name__}-{n}" for c, n, _ in PLANTED])
def test_a_planted_fault_is_found(check: object, name: str, code: str, tmp_path: Path) -> None:
    path = tmp_path / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(code)
    assert callable(check)
    assert len(check(tmp_path)) >= 1
    path.write_text("from dsbd_cli.errors import UsageError\nx = 1\n")
    assert check(tmp_path) == [] or name.startswith("unknown")


def test_changelog_and_version_agree() -> None:
    found = re.search(r"^## \[(\d+\.\d+\.\d+)\]", (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert found is not None
    assert found[1] == dsbd_cli.__version__


def test_the_public_names() -> None:
    assert sorted(dsbd_cli.__all__) == [
        "DsbdError",
        "Engine",
        "Hypothesis",
        "InvalidRowError",
        "MethodConfig",
        "ModelError",
        "ModelNotFoundError",
        "ModelSpec",
        "NumericalError",
        "OutputError",
        "PairError",
        "Piece",
        "PromptTooLongError",
        "Request",
        "RequestResult",
        "RowError",
        "SamplingConfig",
        "TokenDetail",
        "UnsupportedModelError",
        "UsageError",
        "__version__",
        "from_models",
        "generate",
        "load",
    ]
    assert set(dir(dsbd_cli)) >= set(dsbd_cli.__all__)
    for name in dsbd_cli.__all__:
        assert getattr(dsbd_cli, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        dsbd_cli.nothing  # noqa: B018


def test_load_has_the_defaults_of_the_command() -> None:
    parameters = inspect.signature(dsbd_cli.load).parameters
    assert parameters["target"].default == config.BUILTIN_TARGET
    assert parameters["draft"].default == "auto", "the built-in draft with the built-in target, else none"
    assert parameters["batch_size"].default == config.DEFAULT_BATCH_SIZE


def test_every_module_says_what_is_in_it() -> None:
    silent = [
        str(path)
        for path in sources()
        if (text := path.read_text(encoding="utf-8")).strip() and ast.get_docstring(ast.parse(text)) is None
    ]
    assert silent == []


def test_no_merge_was_left_half_done() -> None:
    """A conflict's marks in a page or a table would go unseen by every other test."""
    marks = re.compile(r"^(<{7}|>{7}) ", re.MULTILINE)
    texts = [
        path for folder in ("docs", "sample_inputs", ".ci") for path in (ROOT / folder).rglob("*") if path.is_file()
    ]
    texts += [path for path in ROOT.iterdir() if path.suffix in (".md", ".toml", ".txt") or path.name == "Makefile"]
    assert len(texts) > 20
    assert [path.name for path in texts if marks.search(path.read_text(encoding="utf-8", errors="replace"))] == []
