#!/usr/bin/env bash
# Everything on a machine with a GPU, Python, torch, transformers and this tree: GPU tests, overhead, speed, scaling.
# Under eight minutes on one H100; results go to benchmarks/results/<date>-gpu/. Nothing is installed or downloaded.
#
#   bash benchmarks/gpu.sh [python]
set -uo pipefail
cd "$(dirname "$0")/.."
PYTHON=${1:-python3}
export PYTHONPATH=$PWD
OUT=benchmarks/results/$(date +%F)-gpu
mkdir -p "$OUT"

part() { # part SECONDS NAME COMMAND...: one measurement under a time limit; a failure does not stop the others
    local limit=$1 name=$2
    shift 2
    echo "== $name: $*"
    timeout "$limit" "$@" 2>&1 | tee "$OUT/$name.log" | tail -40
    echo "== $name: exit ${PIPESTATUS[0]}"
}

"$PYTHON" -c 'import torch; assert torch.cuda.is_available(), "no CUDA device"; print(torch.cuda.get_device_name())' || exit 1
if "$PYTHON" -c 'import pytest' 2>/dev/null; then
    part 150 gpu-tests "$PYTHON" -m pytest -q -m gpu -p no:cacheprovider \
        tests/engine/test_graphs.py tests/models/test_forest.py tests/models/test_loader.py tests/drafting/test_no_reads.py
else
    echo "== gpu-tests: pytest is not installed here; not run"
fi
part 90 overhead "$PYTHON" -m benchmarks.overhead --shape llama-7b --requests 2 --rounds 2 --shapes 0x8,4x8 --name overhead-llama-7b
part 150 speed "$PYTHON" -m benchmarks.speed --shape llama-7b --dtype bfloat16 --requests 4 --rounds 2 --num-beams 4 \
    --only "transformers beam,no draft,dsbd coupled,dsbd search,auto" --name speed-llama-7b
part 60 speed-batch "$PYTHON" -m benchmarks.speed --shape llama-7b --dtype bfloat16 --requests 32 --rounds 1 --num-beams 4 \
    --batch-size 1,32 --only "dsbd coupled" --name speed-llama-7b-batch
part 60 scaling "$PYTHON" -m benchmarks.scaling --shape llama-7b --dtype bfloat16 --rows 1,8,32 --lengths 64 --widths 4
