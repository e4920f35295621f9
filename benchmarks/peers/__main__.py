"""`dsbd bench` with the methods of CTranslate2 and llama.cpp beside its own:

    python -m benchmarks.peers --target models/smollm2-135m-instruct --draft none --task sql --batch-size 1 \\
        --methods greedy,beam-search,ct2-beam-search,ct2-int8-beam-search

CTranslate2 (`pip install ctranslate2`) converts a folder of safetensors; llama.cpp (`pip install xllamacpp`) reads a
GGUF file, as `python -m benchmarks.real --q8` writes it. All options are those of `dsbd bench`.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from benchmarks.peers.engines import METHODS as PEER_METHODS
from dsbd_cli.lab.bench.methods import METHODS

__all__ = ["main"]


def main(arguments: Sequence[str]) -> int:
    """Run bench with more methods; returns its exit code."""
    METHODS.update(PEER_METHODS)
    from dsbd_cli.cli.app import run  # its --help lists the methods that are known by now

    return run(["bench", *arguments])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
