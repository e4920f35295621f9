#!/usr/bin/env bash
# Everything on a machine with a GPU, Python, torch, transformers and this tree: what runs how, kernels against tensor
# code, races, engines with and without kernels, overhead, speed, wide beams. Results go to
# benchmarks/results/<date>-gpu/; docs/hardware.md has what is expected. Nothing is installed or downloaded. Each part has a
# time limit of its own, with the five seconds to end it nine minutes in all, and one that fails does not stop the
# others. The exit code says whether all that ran have passed; what was not run is named.
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

has() { # has MODULE: it can be imported
    "$PYTHON" -c "import $1" 2>/dev/null
}

"$PYTHON" -c '
import sys, torch
sys.exit(print(torch.cuda.get_device_name()) if torch.cuda.is_available() else "no CUDA device: nothing is measured")' || exit 1

part 100 doctor "$PYTHON" -m dsbd_cli doctor
if ! has pytest; then
    skip kernels "pytest is not installed"
    skip gpu-tests "pytest is not installed"
else
    if has triton; then
        # A few settings of each kernel: every other one is compiled anew, a minute and a half of one processor where
        # nothing is kept. The doctor has compiled a third of them, and several processes share the rest.
        side_by_side=()
        has xdist && side_by_side=(-n 4)
        part 80 kernels "$PYTHON" -m pytest -q -p no:cacheprovider ${side_by_side[@]+"${side_by_side[@]}"} \
            tests/ops/triton/test_layers.py tests/ops/triton/test_products.py tests/ops/triton/test_attention.py \
            tests/ops/triton/test_references.py -k "not cold and not whole and not beam and not stops and not exhausted"
    else
        skip kernels "triton is not installed"
    fi
    part 35 gpu-tests "$PYTHON" -m pytest -q -m gpu -p no:cacheprovider \
        tests/engine/iteration/test_cuda_graphs.py tests/models/transformers_backend/test_forest.py tests/models/checkpoints/test_loader.py tests/engine/drafting/test_no_reads.py
fi
if ! command -v compute-sanitizer >/dev/null; then
    skip racecheck "compute-sanitizer is not installed (it is part of the CUDA toolkit)"
elif ! has triton; then
    skip racecheck "triton is not installed"
else
    names=$("$PYTHON" -c 'from dsbd_cli.ops.triton.trial import kernels; print(*kernels())' 2>"$OUT/racecheck.err")
    # where the names cannot be read the part fails
    # shellcheck disable=SC2086  # a word per kernel
    part 30 racecheck compute-sanitizer --tool racecheck --error-exitcode 1 \
        "$PYTHON" -m dsbd_cli.ops.triton.trial cuda ${names:-none}
fi
part 55 same-texts "$PYTHON" -m benchmarks.gpu_texts --records 8
part 50 overhead "$PYTHON" -m benchmarks.overhead --shape llama-7b --requests 2 --rounds 2 --shapes 0x8,4x8 --name overhead-llama-7b
part 50 speed-7b "$PYTHON" -m benchmarks.speed --shape llama-7b --dtype bfloat16 --requests 2 --rounds 2 --num-beams 4 \
    --only "transformers beam,no draft,dsbd coupled,dsbd search,auto" --name speed-llama-7b
part 30 speed-7b-batch "$PYTHON" -m benchmarks.speed --shape llama-7b --dtype bfloat16 --requests 32 --rounds 1 --num-beams 4 \
    --batch-size 32 --only "dsbd coupled" --name speed-llama-7b-batch
part 30 speed-13b "$PYTHON" -m benchmarks.speed --shape llama-13b --dtype bfloat16 --requests 2 --rounds 1 --num-beams 4 \
    --only "no draft,dsbd coupled" --name speed-llama-13b
# the shape of Qwen3-1.7B, 256 beams, 3 tokens after 1,000: published for an H100 33.5 ms (SGLang), 17.6 (SID-GR)
WIDE=$(mktemp -d)
part 30 wide bash -c '"$0" -m benchmarks.inflate --shape qwen3-1.7b --role target --out "$1" &&
    "$0" -m benchmarks.wide --target "$1" --num-beams 256 --prompt-tokens 1000 --new-tokens 3 --alone' "$PYTHON" "$WIDE"
rm -rf "$WIDE"

if [ ${#failed[@]} -gt 0 ]; then
    echo "== failed: ${failed[*]}"
    exit 1
fi
echo "== all parts passed${skipped[*]:+, but not run: ${skipped[*]}}; results in $OUT"
