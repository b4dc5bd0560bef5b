#!/usr/bin/env bash
# Measure all that fits in ten minutes on one GPU: bash benchmarks/gpu.sh [OUT]
#
# OUT (default: gpu-results) gets a JSON file for each measurement, report.md with all tables, and a
# run of TRAIN_STEPS (default: 800) steps with a profile. Nothing is downloaded. Where packages are
# missing, `benchmarks/gpu_wheels.sh` prepares them on another machine, and WHEELS names the folder.
# PyTorch and CTranslate2, where they find the GPU, are measured in turn with ours; PEERS=no leaves
# PyTorch out, which saves minutes. An error in one part does not stop the rest; the exit
# status is 1 then. What does not fit in LIMIT seconds (default: 600) is left out; a second run in
# the same folder fits in, because it compiles little.
#
# CORPUS=text:DIR LANGUAGES=en-de measures on other text than the embedded corpus. To try the script
# without a GPU: DEVICE=cpu SIZES=multi30k TOKENS=512 STEPS=2 TRAIN_STEPS=40 ROUNDS=1 SENTENCES=16
set -uo pipefail
out=$(mkdir -p "${1:-gpu-results}" && realpath "${1:-gpu-results}")
corpus=${CORPUS:-cldr:en-ko}
if [ "${corpus#text:}" != "$corpus" ]; then corpus=text:$(realpath "${corpus#text:}"); fi
wheels=${WHEELS:+$(realpath "$WHEELS")}
cd "$(dirname "$0")/.." || exit 2
device=${DEVICE:-gpu} sizes=${SIZES:-base big} tokens=${TOKENS:-25600}
steps=${STEPS:-20} train_steps=${TRAIN_STEPS:-800} rounds=${ROUNDS:-5}
sentences=${SENTENCES:-1000} limit=${LIMIT:-600}
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
    if [[ $status =~ ^(124|137)$ ]] && [ $left -lt "$2" ]; then
        echo "left out: $limit seconds are over" | tee -a "$out/report.md"
    elif [ "$status" -ne 0 ]; then
        echo "failed, or took more than $2 seconds; see $1.log" | tee -a "$out/report.md"
        failed=1
    fi
}

peers=--no-peers
if [ "$device" = gpu ] && [ "${PEERS:-yes}" = yes ] &&
    "$python" -c 'import torch; torch.zeros(1, device="cuda")' 2> /dev/null
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
rm -rf "$out/run"
part train 180 "$python" train.py --workdir "$out/run" --profile 5 --data.cache-dir "$out/data" \
    --data.corpus "$corpus" --data.languages "${LANGUAGES:-}" --data.rows-per-batch $((tokens / 128)) \
    --data.source-row-length 128 --data.target-row-length 128 --model.vocab-size "${PIECES:-8000}" \
    $("$python" benchmarks/common.py "$first") --model.dropout 0.3 --model.attention fused \
    --training.steps "$train_steps" --training.warmup-steps $((train_steps / 4)) \
    --training.cooldown-steps $((train_steps / 2)) --training.learning-rate-scale 0.5 \
    --training.validate-every "$train_steps" --training.save-every "$train_steps"
part trained 150 "$python" benchmarks/decoding.py "${text[@]}" --sentences "$sentences" \
    --run "$out/run" --beam-sizes 4 1 --json "$out/trained.json"
part correctness 200 "$python" benchmarks/correctness.py --device "$device" \
    --size "$([ "$device" = cpu ] && echo multi30k || echo wide)" --json "$out/correctness.json"
for size in ${sizes#"$first"}; do
    part "training-$size" 120 "${training[@]}" --size "$size" --attention fused --no-peers \
        --json "$out/training-$size.json"
done
part training-explicit 120 "${training[@]}" --size "$first" --attention explicit --no-peers \
    --json "$out/training-explicit.json"
part decoding-float32 120 "${decoding[@]}" --dtype float32 --no-peers --json "$out/decoding-float32.json"
echo "Tables: $out/report.md"
exit $failed
