#!/usr/bin/env bash
# Measure all that fits in ten minutes on one GPU: bash benchmarks/gpu.sh [OUT]
#
# OUT (default: gpu-results) gets a JSON file for each measurement, a profile, and report.md with
# all tables. Nothing is downloaded. Where packages are missing, `benchmarks/gpu_wheels.sh` prepares
# them on another machine, and WHEELS names the folder. If PyTorch is installed and finds the GPU,
# it is measured in turn with ours. An error in one part does not stop the rest; the exit status is
# 1 then. What does not fit in LIMIT seconds (default: 600) is left out; a second run in the same
# folder fits in, because it compiles little.
#
# CORPUS=text:DIR LANGUAGES=en-de measures on other text than the embedded corpus.
# DEVICE=cpu SIZES=multi30k TOKENS=512 STEPS=2 ROUNDS=1 SENTENCES=16 tries the script without a GPU.
set -uo pipefail
out=$(mkdir -p "${1:-gpu-results}" && realpath "${1:-gpu-results}")
corpus=${CORPUS:-cldr:en-ko}
if [ "${corpus#text:}" != "$corpus" ]; then corpus=text:$(realpath "${corpus#text:}"); fi
wheels=${WHEELS:+$(realpath "$WHEELS")}
cd "$(dirname "$0")/.." || exit 2
device=${DEVICE:-gpu} sizes=${SIZES:-base big} tokens=${TOKENS:-25600}
steps=${STEPS:-20} rounds=${ROUNDS:-5} sentences=${SENTENCES:-1000} limit=${LIMIT:-600}
python=${PYTHON:-python} failed=0
export PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH} XLA_PYTHON_CLIENT_PREALLOCATE=false
export JAX_COMPILATION_CACHE_DIR=$out/cache JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS=0.5
if [ "$device" = cpu ]; then export JAX_PLATFORMS=cpu; fi
if [ -n "$wheels" ]; then
    "$python" -m pip install --quiet --no-index --no-deps "$wheels"/*.whl || exit 2
fi
: > "$out/report.md"

part() { # NAME SECONDS COMMAND ...
    printf '\n## %s\n' "$1" | tee -a "$out/report.md"
    rm -f "$out/$1.json"
    local left=$((limit - SECONDS))
    if [ $left -lt 30 ]; then
        echo "left out: $limit seconds are nearly over" | tee -a "$out/report.md"
        return
    fi
    timeout -k 10 "$(($2 < left ? $2 : left))" "${@:3}" 2> "$out/$1.log" | tee -a "$out/report.md"
    local status=${PIPESTATUS[0]}
    if [ "$status" -eq 124 ] && [ $left -lt "$2" ]; then
        echo "left out: $limit seconds are over" | tee -a "$out/report.md"
    elif [ "$status" -ne 0 ]; then
        echo "failed, or took more than $2 seconds; see $1.log" | tee -a "$out/report.md"
        failed=1
    fi
}

peers=--no-peers
if [ "$device" = gpu ] && "$python" -c 'import torch; torch.zeros(1, device="cuda")' 2> /dev/null
then peers=''; fi
first=${sizes%% *}
text=(--device "$device" --corpus "$corpus" --languages "${LANGUAGES:-}" --rounds "$rounds")
training=("$python" benchmarks/training.py "${text[@]}" --tokens "$tokens" --steps "$steps"
    --dropout 0.1 --patience 2 --row-lengths 128 128
    --vocab-size "${VOCABULARY:-37000}" --tokenizer-size "${PIECES:-8000}")
decoding=("$python" benchmarks/decoding.py "${text[@]}" --sentences "$sentences"
    --batch-size "${BATCH:-256}" --size "$first" --vocab-size "${PIECES:-8000}")

{ nvidia-smi -L; git rev-parse HEAD; } 2> /dev/null | tee -a "$out/report.md"
part "training-$first" 240 "${training[@]}" --size "$first" --attention fused $peers \
    --json "$out/training-$first.json"
part decoding 200 "${decoding[@]}" --dtype bfloat16 --beam-sizes 4 $peers --json "$out/decoding.json"
part correctness 200 "$python" benchmarks/correctness.py --device "$device" \
    --size "$([ "$device" = cpu ] && echo multi30k || echo wide)" --json "$out/correctness.json"
for size in ${sizes#"$first"}; do
    part "training-$size" 120 "${training[@]}" --size "$size" --attention fused --no-peers \
        --json "$out/training-$size.json"
done
part training-explicit 120 "${training[@]}" --size "$first" --attention explicit --no-peers \
    --json "$out/training-explicit.json"
part decoding-float32 120 "${decoding[@]}" --dtype float32 --no-peers --json "$out/decoding-float32.json"
rm -rf "$out/profiled-run"
part profile 100 "$python" train.py --workdir "$out/profiled-run" --training.steps 30 --profile 5 \
    --training.validate-every 30 --training.save-every 30 --data.cache-dir "$out/data"
echo "Tables: $out/report.md"
exit $failed
