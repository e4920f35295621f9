"""Arithmetic for a draft head on a GPU: the table of docs/hardware.md. Nothing of it was measured.

    python -m benchmarks.gpu_arithmetic

A target call reads all weights once, whatever its nodes are, up to 64: our kernel of linear layers has tiles of so many
rows. So beams and drafts per layer cost nothing up to there. A drafted layer reads the head. Keys and values are left
out: after 1,000 tokens they are 0.13 GB beside 15 GB of weights.
"""

from __future__ import annotations

from benchmarks.common import markdown_table

# NVIDIA's data sheet of the H200: 4.8 TB/s. The share is what docs/hardware.md expects of our kernels, 73 to 79 %.
BYTES_PER_S, SHARE = 4.8e12, 0.75
# Launches, and what else takes time beside reading weights: assumed, not known.
CALL_S, LAYER_S = 0.6e-3, 0.25e-3
# config.json of Llama-3.1-8B; keys: the width of keys, and of values. The head's ids are those of published EAGLE-3
# heads for it. bfloat16 has 2 bytes.
HIDDEN, KEYS, MLP, LAYERS, IDS, HEAD_IDS, WIDTH = 4096, 1024, 14336, 32, 128_256, 32_000, 2
RATES = (0.4, 0.6, 0.65, 0.8)
DEPTHS = (1, 2, 3, 4)


def layer(inputs: int) -> int:
    """Return the weights of a decoder layer whose queries, keys and values read so many inputs."""
    return inputs * (HIDDEN + 2 * KEYS) + HIDDEN * HIDDEN + 3 * HIDDEN * MLP


def seconds(weights: int) -> float:
    """Return how long it takes to read them."""
    return weights * WIDTH / (BYTES_PER_S * SHARE)


def call(depth: int) -> float:
    """Return the seconds of a target call with its drafts. The head reads token and state side by side."""
    target = CALL_S + seconds(LAYERS * layer(HIDDEN) + IDS * HIDDEN)
    return target + depth * (LAYER_S + seconds(layer(2 * HIDDEN) + HEAD_IDS * HIDDEN))


def steps(rate: float, depth: int) -> float:
    """Return the steps per call if this share of the layers passes, of those that are reached."""
    return sum(rate**passed for passed in range(depth + 1))


def table() -> str:
    """Return the rows of docs/hardware.md."""
    rows = []
    for depth in DEPTHS:
        dearer = call(depth) / call(0)
        row = {
            "D": f"{depth}",
            "ms per call": f"{1000 * call(depth):.1f}",
            "pays from, steps per call": f"{dearer:.2f}",
        }
        rows.append(row | {f"{100 * rate:.0f} % pass": f"{steps(rate, depth) / dearer:.2f}x" for rate in RATES})
    return markdown_table(rows)


if __name__ == "__main__":
    print(table(), end="")
