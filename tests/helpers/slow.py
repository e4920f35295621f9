"""Tests marked `slow`, and the code whose changes make them run.

`make test` leaves a slow test out while this code is, byte for byte, what it was when the test last passed.
`make test-slow` runs all of them and writes tests/slow.json anew.
"""

from __future__ import annotations

import hashlib
import json
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
PASSED = ROOT / "tests" / "slow.json"
ALWAYS = ("constraints.txt", "pyproject.toml", "tests/conftest.py", "tests/helpers")
RAY = ("dsbd_cli/scale", "dsbd_cli/cli", "dsbd_cli/io", "dsbd_cli/config", "dsbd_cli/requests.py", "tests/scale")
TYPES = ("README.md", "examples", "dsbd_cli/__init__.py", "dsbd_cli/config", "dsbd_cli/requests.py")
GRAMMARS = ("dsbd_cli/config", "dsbd_cli/engine/constraints", "dsbd_cli/engine/core", "dsbd_cli/engine/drafting")
PAGES = ("README.md", "docs/constraints.md", "docs/cookbook.md", "docs/index.md")  # with blocks that are run
CODE: dict[str, tuple[str, ...]] = {
    "tests/engine/constraints/test_grammar_ends.py": GRAMMARS,
    "tests/engine/constraints/test_schemas.py": GRAMMARS,
    "tests/models/heads/test_adapted.py": ("dsbd_cli/models", "dsbd_cli/engine"),
    "tests/models/test_tensor_parallel.py": ("dsbd_cli/models", "dsbd_cli/engine/protocols.py"),
    "tests/ops/cpu/test_compiler.py": ("dsbd_cli/ops/cpu",),
    "tests/ops/triton/test_compile.py": ("dsbd_cli/ops/triton",),
    "tests/scale/test_faults.py": (*RAY, "dsbd_cli/models/heads", "tests/models/heads"),
    "tests/scale/test_ray_data.py": RAY,
    "tests/scale/test_ray_deaths.py": RAY,
    "tests/test_docs_run.py": (*PAGES, "dsbd_cli/cli", "dsbd_cli/config", "dsbd_cli/io", "dsbd_cli/pick"),
    "tests/test_python.py": (
        "README.md",
        "examples",
        "dsbd_cli/__init__.py",
        "dsbd_cli/config",
        "dsbd_cli/requests.py",
    ),
}
"""Files with slow tests, and what these guard."""


@cache
def digest(test: str) -> str:
    """Return a digest of all that the slow tests of a file depend on. test: its path from the root. Raises KeyError for
    a file that is not listed, FileNotFoundError for code that is not there."""
    found = hashlib.sha256()
    for name in (test, *CODE[test], *ALWAYS):
        path = ROOT / name
        for file in sorted(path.rglob("*.py")) or [path]:
            found.update(f"{file.relative_to(ROOT)}\0".encode())
            found.update(file.read_bytes())
    return found.hexdigest()


def unchanged(test: str) -> bool:
    """Whether the slow tests of a file have passed with the code as it is."""
    return PASSED.is_file() and json.loads(PASSED.read_text(encoding="utf-8")).get(test) == digest(test)


if __name__ == "__main__":
    PASSED.write_text(json.dumps({test: digest(test) for test in CODE}, indent=2) + "\n", encoding="utf-8")
