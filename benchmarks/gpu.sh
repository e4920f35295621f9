#!/usr/bin/env bash
# Everything on a machine with a GPU, Python, torch, transformers and this tree: what runs how, kernels against tensor
# code, races, engines with and without kernels, overhead, speed, wide beams. Results go to
# benchmarks/results/<date>-gpu/; docs/gpu.md has what is expected. Nothing is installed or downloaded. Each part has a
# time limit of its own, together nine minutes, and one that fails does not stop the others. The exit code says whether
# all that ran have passed; what was not run is named.
#
#   bash benchmarks/gpu.sh [python]
set -uo pipefail
cd "$(dirname "$0")/.."
PYTHON=${1:-python3}
export PYTHONPATH=$PWD
OUT=${OUT:-benchmarks/results/$(date +%F)-gpu}
mkdir -p "$OUT"
failed=()
skipped=()

part() { # part SECONDS NAME COMMAND...: one measurement under a time limit
    local limit=$1 name=$2 code
    shift 2
    echo "== $name: $*"
    timeout --kill-after=5 "$limit" "$@" 2>&1 | tee "$OUT/$name.log" | tail -40
    code=${PIPESTATUS[0]}
    echo "== $name: exit $code"
    [ "$code" = 0 ] || failed+=("$name")
}

skip() { # skip NAME REASON: a part that needs what is not here
    echo "== $1: not run: $2" | tee "$OUT/$1.log"
    skipped+=("$1")
}

"$PYTHON" -c 'import torch; assert torch.cuda.is_available(), "no CUDA device"; print(torch.cuda.get_device_name())' || exit 1

part 110 doctor "$PYTHON" -m dsbd_cli doctor
if "$PYTHON" -c 'import pytest' 2>/dev/null; then
    # a few settings of each kernel: every other one is compiled anew
    part 60 kernels "$PYTHON" -m pytest -q -p no:cacheprovider tests/kernels/test_layers.py tests/kernels/test_products.py \
        tests/kernels/test_attention.py tests/kernels/test_twins.py \
        -k "not cold and not whole and not beam and not stops and not exhausted"
    part 45 gpu-tests "$PYTHON" -m pytest -q -m gpu -p no:cacheprovider \
        tests/engine/test_graphs.py tests/models/test_forest.py tests/models/test_loader.py tests/drafting/test_no_reads.py
else
    skip kernels "pytest is not installed"
    skip gpu-tests "pytest is not installed"
fi
if command -v compute-sanitizer >/dev/null; then
    names=$("$PYTHON" -c 'from dsbd_cli.kernels.trial import kernels; print(*kernels())')
    # without names (no triton) the part fails
    # shellcheck disable=SC2086  # a word per kernel
    part 45 racecheck compute-sanitizer --tool racecheck --error-exitcode 1 \
        "$PYTHON" -m dsbd_cli.kernels.trial cuda ${names:-none}
else
    skip racecheck "compute-sanitizer is not installed (it is part of the CUDA toolkit)"
fi
part 45 same-texts "$PYTHON" -m benchmarks.gpu_texts --records 24
part 55 overhead "$PYTHON" -m benchmarks.overhead --shape llama-7b --requests 2 --rounds 2 --shapes 0x8,4x8 --name overhead-llama-7b
part 60 speed-7b "$PYTHON" -m benchmarks.speed --shape llama-7b --dtype bfloat16 --requests 2 --rounds 2 --num-beams 4 \
    --only "transformers beam,no draft,dsbd coupled,dsbd search,auto" --name speed-llama-7b
part 40 speed-7b-batch "$PYTHON" -m benchmarks.speed --shape llama-7b --dtype bfloat16 --requests 32 --rounds 1 --num-beams 4 \
    --batch-size 32 --only "dsbd coupled" --name speed-llama-7b-batch
part 40 speed-13b "$PYTHON" -m benchmarks.speed --shape llama-13b --dtype bfloat16 --requests 2 --rounds 1 --num-beams 4 \
    --only "no draft,dsbd coupled" --name speed-llama-13b
# the shape of Qwen3-1.7B, 256 beams, 3 tokens after 1,000: published for an H100 33.5 ms (SGLang), 17.6 (SID-GR)
WIDE=$(mktemp -d)
part 40 wide bash -c '"$0" -m benchmarks.inflate --shape qwen3-1.7b --role target --out "$1" &&
    "$0" -m benchmarks.wide --target "$1" --num-beams 256 --prompt-tokens 1000 --new-tokens 3 --alone' "$PYTHON" "$WIDE"
rm -rf "$WIDE"

if [ ${#failed[@]} -gt 0 ]; then
    echo "== failed: ${failed[*]}"
    exit 1
fi
echo "== all parts passed${skipped[*]:+, but not run: ${skipped[*]}}; results in $OUT"
