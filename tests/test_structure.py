"""The shape of the house, read from the code itself: layers, what may be imported where, what is public."""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Container, Iterator
from functools import cache
from pathlib import Path

import pytest

import dsbd_cli
from dsbd_cli.config import method as config
from dsbd_cli.config import model

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "dsbd_cli"

# From the lowest to the highest. A unit is a file or a folder with all that is in it and is no unit of its own. It may
# import units of lower lines, and nothing of its own line but itself. tests/test_structure.py is the only place of it.
LAYERS = (
    ("ops.layout", "ops.processor", "ops.ahead", "ops.recording", "user_cache"),
    ("ops.memory", "ops.quantized_weight", "ops.reference"),
    ("errors", "_version", "stats", "threads", "models.chat_child", "ops.cpu"),
    ("config", "lab.metrics", "io.schemas"),
    ("requests", "lab.reports", "models.chat", "ops.interface", "ops.triton"),
    ("answer_forms", "io.records", "ops.select", "models.verdicts"),
    ("engine.protocols",),
    ("io.lines", "engine.core", "models.stored_tokenizer", "models.response_template"),
    ("engine.planning", "models.tokenizer", "models.kv_cache", "models.attention"),
    ("pick", "engine.constraints", "engine.cache", "engine.verify", "models.cache", "models.forest_model"),
    ("models.recurrent",),
    ("engine.drafting", "models.checkpoints", "lab.tasks"),
    ("engine.iteration", "models.transformers_backend", "models.decoder", "models.reward"),
    ("engine.decoding", "models.checks", "models.tensor_parallel", "models.draft_heads"),
    ("engine.checks", "models.load_transformers", "lab.peers"),
    ("models.load_model",),
    ("models.pair",),
    ("loading",),
    ("dropin", "lab.bench", "lab.profiling"),
    ("scale", "train", "lm_eval"),
    ("cli.options",),
    ("cli.run",),
    ("cli.commands",),
    ("cli.app",),
    ("__init__", "__main__"),
)
LAYER_OF = {unit: layer for layer, units in enumerate(LAYERS) for unit in units}
# whole floors, whatever the layers say: nothing of the first imports anything of the second
APART = (
    ("ops", ("config", "engine", "models", "io", "errors", "requests", "stats")),
    ("engine", ("models", "io", "cli", "lab", "train", "loading")),
    ("io", ("engine", "models", "lab", "ops")),
    ("models", ("engine.decoding", "engine.iteration", "engine.planning", "engine.verify", "engine.checks")),
)
# kernels, and who may import them: only ops/select.py says where they serve, and engine.checks compares them
KERNELS = {"ops.cpu": ("ops.cpu", "ops.select"), "ops.triton": ("ops.triton", "ops.select", "engine.checks")}
TORCH = ("torch",)
TRANSFORMERS = ("transformers", "tokenizers", "huggingface_hub", "accelerate", "safetensors")
WITHOUT_TORCH = (
    "answer_forms",
    "cli",
    "io",
    "pick",
    "lab.tasks",
    "config",
    "errors",
    "requests",
    "stats",
    "threads",
    "_version",
    "__init__",
    "__main__",
)
MAY_USE_TRANSFORMERS = (*("dropin", "lm_eval", "models", "train", "lab.peers"),)
MAY_USE_ANY = ("dropin", "models", "ops", "train")  # the seams: to transformers and to numba
MOST_FILES = 18  # of a folder: more must be scrolled
UNFIT_BEGINNINGS = ("What", "Of", "As", "So")  # of a docstring, which begins with a verb or a noun


def sources(package: Path = PACKAGE) -> list[Path]:
    return sorted(package.rglob("*.py"))


def module_name(path: Path, package: Path = PACKAGE) -> str:
    """`engine.core.pool` for dsbd_cli/engine/core/pool.py; a folder's own file has the folder's name."""
    parts = path.relative_to(package).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" and len(parts) > 1 else parts)


def lies_in(name: str, units: Container[str]) -> str | None:
    """The longest of the units that holds a module; None where none does."""
    parts = name.split(".")
    names = (".".join(parts[:count]) for count in range(len(parts), 0, -1))
    return next((name for name in names if name in units), None)


def nodes(path: Path) -> list[ast.AST]:
    """All that a file says, as it is now."""
    return _nodes(path.read_text(encoding="utf-8"))


@cache
def _nodes(text: str) -> list[ast.AST]:
    return list(ast.walk(ast.parse(text)))


def imports(path: Path) -> Iterator[tuple[int, str]]:
    """Line and full name of every import, inside functions too; of `from x import y` both x and x.y."""
    for node in nodes(path):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = "." * node.level + (node.module or "")
            yield node.lineno, base
            yield from ((node.lineno, f"{base}.{alias.name}") for alias in node.names)


def own_imports(path: Path) -> Iterator[tuple[int, str]]:
    """Line and name below dsbd_cli of every import of this package."""
    for line, name in imports(path):
        if name.startswith("dsbd_cli."):
            yield line, name.removeprefix("dsbd_cli.")


def layer_faults(package: Path) -> list[str]:
    """Imports from a higher layer, from a neighbour on the same layer, or relative ones."""
    faults = []
    for path in sources(package):
        name = module_name(path, package)
        own = lies_in(name, LAYER_OF)
        if own is None:
            # a folder of units may say in one docstring what they are
            if not any(unit.startswith(f"{name}.") for unit in LAYER_OF) or any(imports(path)):
                faults.append(f"{path}: {name} has no layer")
            continue
        faults += [f"{path}:{line} relative import" for line, other in imports(path) if other.startswith(".")]
        for line, other in own_imports(path):
            unit = lies_in(other, LAYER_OF)
            if unit is not None and unit != own and LAYER_OF[unit] >= LAYER_OF[own]:
                faults.append(f"{path}:{line} {own} imports {other}")
    return faults


def apart_faults(package: Path) -> list[str]:
    """Imports between floors that do not know each other."""
    return [
        f"{path}:{line} {floor} imports {other}"
        for path in sources(package)
        for floor, strangers in APART
        if lies_in(module_name(path, package), (floor,))
        for line, other in own_imports(path)
        if lies_in(other, strangers)
    ]


def kernel_faults(package: Path) -> list[str]:
    """Imports of kernels by anyone who should ask `Ops`."""
    return [
        f"{path}:{line} imports {other}"
        for path in sources(package)
        for line, other in own_imports(path)
        if (kernels := lies_in(other, KERNELS)) and not lies_in(module_name(path, package), KERNELS[kernels])
    ]


def circle_faults(package: Path) -> list[str]:
    """Files that import each other around a circle, also inside functions and for types alone."""
    files = {module_name(path, package): path for path in sources(package)}
    below = {
        name: {other for _, other in own_imports(path) if other in files and other != name}
        for name, path in files.items()
    }
    # leaves are taken away until none is left: what stays lies on circles or above them
    while leaves := {name for name, others in below.items() if not others & below.keys()}:
        below = {name: others for name, others in below.items() if name not in leaves}
    while tops := {name for name in below if not any(name in others for others in below.values())}:
        below = {name: others for name, others in below.items() if name not in tops}
    return [f"{files[name]} is on a circle with {', '.join(sorted(below[name] & below.keys()))}" for name in below]


def size_faults(package: Path) -> list[str]:
    """Folders that hold too many files."""
    folders = {path.parent for path in sources(package)}
    counts = {folder: len([file for file in folder.glob("*.py") if file.name != "__init__.py"]) for folder in folders}
    return [f"{folder} holds {count} files" for folder, count in counts.items() if count > MOST_FILES]


def foreign_faults(package: Path) -> list[str]:
    """torch outside the layers that compute, transformers outside the layer that knows it."""
    faults = []
    for path in sources(package):
        own = module_name(path, package)
        torchless, knows = lies_in(own, WITHOUT_TORCH), lies_in(own, MAY_USE_TRANSFORMERS)
        for line, name in imports(path):
            top = name.split(".")[0]
            if (top in TORCH and torchless) or (top in TRANSFORMERS and not knows):
                faults.append(f"{path}:{line} {own} imports {name}")
    return faults


def any_faults(package: Path) -> list[str]:
    """typing.Any outside the seams."""
    return [
        f"{path}:{line} imports Any"
        for path in sources(package)
        if not lies_in(module_name(path, package), MAY_USE_ANY)
        for line, name in imports(path)
        if name == "typing.Any"
    ]


def print_faults(package: Path) -> list[str]:
    """print() in a library writes into somebody's records."""
    return [
        f"{path}:{node.lineno} print"
        for path in sources(package)
        if not lies_in(module_name(path, package), ("cli",))
        for node in nodes(path)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "print"
    ]


def docstring_faults(package: Path) -> list[str]:
    """Docstrings that begin with a word that is neither a verb nor a noun."""
    kinds = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
    return [
        f"{path}:{getattr(node, 'lineno', 1)} {text.split()[0]}"
        for path in sources(package)
        for node in nodes(path)
        if isinstance(node, kinds) and (text := ast.get_docstring(node))
        if text.split()[0] in UNFIT_BEGINNINGS
    ]


CHECKS = [
    *(layer_faults, apart_faults, kernel_faults, circle_faults, size_faults, foreign_faults, any_faults, print_faults),
    docstring_faults,
]


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_the_package_has_no_faults(check: object) -> None:
    assert callable(check)
    assert check(PACKAGE) == []


CIRCLE = {
    "engine/core/a.py": "from dsbd_cli.engine.core.b import x",
    "engine/core/b.py": "import dsbd_cli.engine.core.a",
}
LONG_CIRCLE = {
    "config/a.py": "from dsbd_cli.config import b",
    "config/b.py": "def f():\n    from dsbd_cli.config.c import x",
    "config/c.py": "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from dsbd_cli.config.a import X",
    "errors.py": "from dsbd_cli.config.a import X",
}
PLANTED = [
    (layer_faults, {"engine/core/pool.py": "from dsbd_cli.models.transformers_backend import toy"}),
    (layer_faults, {"engine/core/pool.py": "def f():\n    import dsbd_cli.engine.decoding.engine"}),
    (layer_faults, {"engine/verify/base.py": "from dsbd_cli.engine.drafting.base import Drafter"}),
    (layer_faults, {"engine/verify/base.py": "from dsbd_cli.engine.cache.caches import Caches"}),
    (layer_faults, {"errors.py": "from dsbd_cli.engine.core import pool"}),
    (layer_faults, {"io/lines/jsonl.py": "from dsbd_cli.lab.tasks import sql"}),
    (layer_faults, {"engine/decoding/engine.py": "from dsbd_cli.cli.app import main"}),
    (layer_faults, {"cli/run/files.py": "from dsbd_cli.cli.commands.generate import generate"}),
    (layer_faults, {"models/transformers_backend/causal.py": "from dsbd_cli.models.checks.selftest import self_test"}),
    (layer_faults, {"engine/core/pool.py": "from . import mask"}),
    (layer_faults, {"unknown/x.py": ""}),
    (layer_faults, {"engine/__init__.py": "from dsbd_cli.engine.core import pool"}),
    (apart_faults, {"engine/checks/kernels.py": "from dsbd_cli.models.cache import ForestCache"}),
    (apart_faults, {"ops/cpu/linear.py": "from dsbd_cli.errors import UsageError"}),
    (apart_faults, {"models/pair.py": "def f():\n    from dsbd_cli.engine.decoding import engine"}),
    (kernel_faults, {"models/kv_cache.py": "from dsbd_cli.ops.cpu.runtime import team"}),
    (kernel_faults, {"ops/reference.py": "def f():\n    from dsbd_cli.ops.cpu import layer"}),
    (kernel_faults, {"engine/core/pool.py": "from dsbd_cli.ops import triton"}),
    (circle_faults, CIRCLE),
    (circle_faults, LONG_CIRCLE),
    (size_faults, {f"engine/core/f{number}.py": "" for number in range(MOST_FILES + 1)}),
    (foreign_faults, {"io/records/row.py": "import torch"}),
    (foreign_faults, {"cli/commands/generate.py": "def f():\n    from torch import nn"}),
    (foreign_faults, {"engine/decoding/engine.py": "from transformers import AutoModel"}),
    (foreign_faults, {"engine/core/pool.py": "import tokenizers.models"}),
    (any_faults, {"engine/core/pool.py": "from typing import Any"}),
    (print_faults, {"engine/decoding/engine.py": "def f():\n    print(1)"}),
    (docstring_faults, {"engine/core/pool.py": '"""What a pool is."""'}),
    (docstring_faults, {"engine/core/pool.py": 'class A:\n    def f(self):\n        """As g does."""'}),
]


@pytest.mark.parametrize(("check", "files"), PLANTED, ids=[f"{c.__name__}-{next(iter(f))}" for c, f in PLANTED])
def test_a_planted_fault_is_found(check: object, files: dict[str, str], tmp_path: Path) -> None:
    assert callable(check)
    for name, code in files.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(code)
    assert len(check(tmp_path)) >= 1
    for name in files:
        (tmp_path / name).write_text("")
    if check is not size_faults:
        assert check(tmp_path) == [] or "unknown/x.py" in files


def test_a_circle_names_its_files_alone(tmp_path: Path) -> None:
    for name, code in LONG_CIRCLE.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(code)
    faults = circle_faults(tmp_path)
    assert len(faults) == 3
    assert not any("errors.py is on" in fault for fault in faults)


@pytest.mark.parametrize(("name", "form"), [("CHANGELOG.md", r"^## \[(.*?)\]"), ("CITATION.cff", r"^version: (.*)$")])
def test_changelog_citation_and_version_agree(name: str, form: str) -> None:
    match = re.search(form, (ROOT / name).read_text(encoding="utf-8"), re.MULTILINE)
    assert match is not None
    assert match[1] == dsbd_cli.__version__


def test_load_has_the_defaults_of_the_command() -> None:
    parameters = inspect.signature(dsbd_cli.load).parameters
    assert parameters["target"].default == model.BUILTIN_TARGET
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
