#!/usr/bin/env bash
# Everything that one GPU can tell in ten minutes: bash benchmarks/gpu.sh [OUT]
#
# OUT (default: gpu-results) gets a JSON file for each measurement, a profile, and report.md with
# all tables. Nothing is downloaded. Where packages are missing, `benchmarks/gpu_wheels.sh` prepares
# them on another machine, and WHEELS names the folder. If PyTorch is installed and finds the GPU,
# it is measured in turn with ours, which takes longer. An error in one part does not stop the rest;
# the exit status is 1 then.
#
# DEVICE=cpu SIZES=multi30k TOKENS=512 STEPS=2 ROUNDS=1 SENTENCES=16 tries the script without a GPU.
set -uo pipefail
out=$(mkdir -p "${1:-gpu-results}" && realpath "${1:-gpu-results}")
cd "$(dirname "$0")/.." || exit 2
device=${DEVICE:-gpu} sizes=${SIZES:-base big} tokens=${TOKENS:-25000}
steps=${STEPS:-20} rounds=${ROUNDS:-3} sentences=${SENTENCES:-1000}
python=${PYTHON:-python} failed=0
export PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH} XLA_PYTHON_CLIENT_PREALLOCATE=false
if [ "$device" = cpu ]; then export JAX_PLATFORMS=cpu; fi
if [ -n "${WHEELS:-}" ]; then
    "$python" -m pip install --quiet --no-index --no-deps "$WHEELS"/*.whl || exit 2
fi
: > "$out/report.md"

part() { # NAME SECONDS COMMAND ...
    printf '\n## %s\n' "$1" | tee -a "$out/report.md"
    if ! timeout "$2" "${@:3}" 2> "$out/$1.log" | tee -a "$out/report.md"; then
        echo "failed; see $1.log" | tee -a "$out/report.md"
        failed=1
    fi
}

peers=--no-peers limit=150
if [ "$device" = gpu ] && "$python" -c 'import torch; torch.zeros(1, device="cuda")' 2> /dev/null
then peers='' limit=600; fi

{ nvidia-smi -L; git rev-parse HEAD; } 2> /dev/null | tee -a "$out/report.md"
part correctness 120 "$python" benchmarks/correctness.py --device "$device" \
    --size "$([ "$device" = cpu ] && echo multi30k || echo wide)" --json "$out/correctness.json"
for size in $sizes; do
    for attention in explicit fused; do
        part "training-$size-$attention" "$limit" "$python" benchmarks/training.py --device "$device" \
            --size "$size" --tokens "$tokens" --steps "$steps" --rounds "$rounds" \
            --vocab-size "${VOCABULARY:-8000}" --attention "$attention" --patience 2 \
            $([ "$attention" = fused ] && echo "$peers" || echo --no-peers) \
            --json "$out/training-$size-$attention.json"
    done
done
for dtype in float32 bfloat16; do
    part "decoding-$dtype" "$limit" "$python" benchmarks/decoding.py --device "$device" --size "${sizes%% *}" \
        --sentences "$sentences" --batch-size "${BATCH:-256}" --dtype "$dtype" --rounds "$rounds" \
        --vocab-size "${VOCABULARY:-8000}" $peers --json "$out/decoding-$dtype.json"
done
part profile 100 "$python" train.py --workdir "$out/run" --training.steps 30 --profile 5 \
    --training.validate-every 30 --training.save-every 30 --data.cache-dir "$out/cache"
echo "Tables: $out/report.md"
exit $failed
