"""One linear layer by our kernel and by torch's packed product, in turn, by dtype and rows.

    python -m benchmarks.products
    python -m benchmarks.products --shapes 8960x1536 --rows 4,36 --rounds 20

Each time is of several layers one after another, so that no weights are in the cache; the best of all rounds counts,
because other users of a shared machine only ever slow it down.
"""

from __future__ import annotations

import argparse
import time

import torch
from torch import Tensor

from benchmarks.common import markdown_table, numbers, publish
from dsbd_cli.ops import select
from dsbd_cli.ops.cpu import linear as packing
from dsbd_cli.ops.processor import bfloat16_tile

COLD_BYTES = 512 << 20  # of weights that take turns: more than a cache holds
WAYS = {"ours": packing.CompiledLinear, "torch": packing.TorchLinear}


def timed(layers: list[packing.CompiledLinear | packing.TorchLinear], x: Tensor) -> float:
    """Seconds of one layer."""
    start = time.perf_counter()
    for layer in layers:
        layer(x, None)
    return (time.perf_counter() - start) / len(layers)


@torch.inference_mode()
def main() -> None:
    """See the module's docstring."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", default="8960x1536,1536x8960,1536x576", help="outputs x inputs, by commas")
    parser.add_argument("--dtypes", default="bfloat16,float32")
    parser.add_argument("--rows", type=numbers, default=[1, 4, 8, 36, 256])
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--name", default="products", help="folder of the results")
    options = parser.parse_args()
    runs, lines = list[dict[str, object]](), list[dict[str, str]]()
    for dtype in (getattr(torch, name) for name in options.dtypes.split(",")):
        kernel, _ = select.choose("linear", dtype, "plain")
        if kernel is None or kernel.op is not packing.CompiledLinear:
            raise SystemExit(f"no kernel of ours serves {dtype} on this processor")
        for shape in options.shapes.split(","):
            outputs, inputs = map(int, shape.split("x"))
            count = max(2, COLD_BYTES // (outputs * inputs * dtype.itemsize))
            weights = [torch.randn(outputs, inputs, dtype=dtype) for _ in range(count)]
            layers = {name: [way([weight]) for weight in weights] for name, way in WAYS.items()}
            for rows in options.rows:
                x, best = torch.randn(rows, inputs, dtype=dtype), dict.fromkeys(WAYS, float("inf"))
                for number in range(options.rounds + 1):
                    for name in WAYS:
                        seconds = timed(layers[name], x)
                        if number:  # the first is a warm-up
                            best[name] = min(best[name], seconds)
                            line = {"way": name, "dtype": str(dtype), "shape": shape, "rows": rows, "seconds": seconds}
                            runs.append(line)
                lines.append(
                    {
                        "dtype": str(dtype).removeprefix("torch."),
                        "outputs x inputs": shape,
                        "rows": str(rows),
                        **{f"{name}, ms": f"{seconds * 1e3:.2f}" for name, seconds in best.items()},
                        "torch / ours": f"{best['torch'] / best['ours']:.2f}",
                        "ours, GB/s of weights": f"{weights[0].nbytes / best['ours'] / 1e9:.1f}",
                        "ours, GFLOP/s": f"{2 * rows * outputs * inputs / best['ours'] / 1e9:.0f}",
                    }
                )
                about = f"Best of {options.rounds} rounds; bfloat16 by the tile '{bfloat16_tile()}'."
                publish(options.name, runs, "Linear layers", about, markdown_table(lines))


if __name__ == "__main__":
    main()
