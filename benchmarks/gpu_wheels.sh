#!/usr/bin/env bash
# Prepare the packages that a bare CUDA machine lacks: bash benchmarks/gpu_wheels.sh DIR [PYTHON]
#
# The machine has PYTHON (default: 3.12), jax for CUDA, flax, optax, orbax-checkpoint, sentencepiece,
# sacrebleu, tqdm, pyarrow, psutil and requests. Copy DIR there (20 MB), and name it as WHEELS for
# benchmarks/gpu.sh.
set -euo pipefail
dir=${1:?the folder for the wheels} version=${2:-3.12}
needed=(
    grain "tensorflow-datasets>=4.9.10,<5" importlib-resources jaxtyping wadler-lindig
    "babel>=2.18,<2.19" tyro docstring-parser typeguard tensorboardX protobuf array-record dm-tree
    etils cloudpickle more-itertools attrs wrapt portpicker simple-parsing termcolor toml immutabledict
    tensorflow-metadata googleapis-common-protos six
)
mkdir -p "$dir"
python -m pip wheel --quiet --no-deps --wheel-dir "$dir" promise # the only one without a wheel
python -m pip download --quiet --no-deps --only-binary :all: --python-version "$version" \
    --platform manylinux2014_x86_64 --platform manylinux_2_27_x86_64 \
    --platform manylinux_2_28_x86_64 --dest "$dir" "${needed[@]}"
ls "$dir"
