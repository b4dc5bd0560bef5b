#!/usr/bin/env bash
# Our best single model of Multi30k: bash benchmarks/multi30k.sh DIR RUNS [SEED ...]
#
# Two runs of configs/multi30k_en_de.py, with and without subword sampling, translate the training
# text. Further runs, one for each SEED (default: 0), begin with the parameters of the first, are
# trained on that text and both translations, and are scored. That is the forward half of data
# diversification (Nguyen et al. 2020), also known as sequence-level distillation (Kim and Rush
# 2016). The result is a single model.
#
# DIR has the files train.en, train.de, val.en, val.de, test2016.en and test2016.de (or .gz).
# LANGUAGES=de-en is the other direction, and OPTIONS are passed to every training. The same command
# continues after an interruption.
set -euo pipefail
if [ $# -lt 2 ]; then
    sed -n '2,/^set/s/^# \{0,1\}//p' "$0" >&2
    exit 2
fi
mkdir -p "$2"
text=$(realpath "$1") runs=$(realpath "$2")
shift 2
languages=${LANGUAGES:-en-de}
source=${languages%-*} target=${languages#*-}
cd "$(dirname "$0")/.."

train() { # NAME FOLDER OPTION ...
    # shellcheck disable=SC2086
    python train.py configs/multi30k_en_de.py --workdir "$runs/$1" --data.corpus "text:$2" \
        --data.languages "$languages" --training.validate-every 4000 "${@:3}" ${OPTIONS:-} |
        tee -a "$runs/$1.log"
}

lines() { # SPLIT LANGUAGE
    if [ -e "$text/$1.$2" ]; then cat "$text/$1.$2"; else zcat "$text/$1.$2.gz"; fi
}

train sampled "$text"
train plain "$text" --data.subword-sampling 0
lines train "$source" > "$runs/train.$source"
for run in sampled plain; do
    test -e "$runs/$run.$target" ||
        flaxformer-min translate "$runs/$run" --input "$runs/train.$source" --output "$runs/$run.$target"
done
if ! [ -e "$runs/text" ]; then # a file that is written again is encoded again
    mkdir -p "$runs/text.part"
    for split in val test2016; do
        for language in "$source" "$target"; do
            lines $split "$language" > "$runs/text.part/$split.$language"
        done
    done
    cat "$runs/train.$source" "$runs/train.$source" "$runs/train.$source" > "$runs/text.part/train.$source"
    { lines train "$target"; cat "$runs/sampled.$target" "$runs/plain.$target"; } > "$runs/text.part/train.$target"
    mv "$runs/text.part" "$runs/text"
fi
for seed in "${@:-0}"; do
    # Random parameters took twice the steps and were not better.
    train "diverse-$seed" "$runs/text" --training.init-from "$runs/sampled" --training.seed "$seed" \
        --training.steps 8000 --training.warmup-steps 1000 --training.learning-rate-scale 0.5 \
        --training.cooldown-steps 7000
    flaxformer-min evaluate "$runs/diverse-$seed" --corpus "text:$runs/text" --lowercase
done
