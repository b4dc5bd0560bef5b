"""Compile training, evaluation and search for accelerators that are not there, and estimate them.

    python benchmarks/accelerators.py --target v5e:2x4
    python benchmarks/accelerators.py --target h100:1 --rows 200 --model.attention fused
    python benchmarks/accelerators.py --target v5e:2x4 --json new.json --compare old.json

The programs are those of the trainer and the translator, compiled on this machine by the target's
own compiler. The times of a TPU are the estimates of that compiler's cost model and no measurement:
they leave out collectives and what is listed as "not estimated". For a GPU there are only kernels
and bytes. docs/accelerators.md defines every column. Settings of the run may follow, as for
`train.py`, and the compiler's flags are those of LIBTPU_INIT_ARGS. Needs the extra `aot` for a TPU,
and `cuda` for a GPU.
"""

import argparse
import contextlib
import dataclasses
import importlib.util
import json
import os
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import hlo
import numpy as np
from common import flops_of_source, flops_of_target, machine, report_parts

ENVIRONMENT = {
    "JAX_PLATFORMS": "cpu",  # this machine's own device
    "TPU_SKIP_MDS_QUERY": "1",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    "JAX_SKIP_CUDA_CONSTRAINTS_CHECK": "1",
}


class Chip(NamedTuple):
    """Public figures of a chip.

    flops:      bfloat16 products per second.
    clock:      that turns the compiler's cycles to seconds; 0 for a GPU.
    memory:     bytes, and `bandwidth` bytes per second.
    devices:    that jax sees of one chip.
    """

    flops: float
    clock: float
    memory: float
    bandwidth: float
    devices: int = 1


CHIPS = {
    "v4": Chip(275e12, 1.05e9, 32 * 2**30, 1.228e12, 2),
    "v5e": Chip(197e12, 1.5e9, 16 * 2**30, 0.819e12),
    "v5p": Chip(459e12, 1.75e9, 95 * 2**30, 2.765e12),
    "v6e": Chip(918e12, 1.75e9, 32 * 2**30, 1.64e12),
    "h100": Chip(989e12, 0, 80 * 2**30, 3.352e12),
    "a100": Chip(312e12, 0, 80 * 2**30, 2.039e12),
}

GPU = """gpu_device_info {{ threads_per_block_limit: 1024 threads_per_warp: 32
  shared_memory_per_block: 49152 shared_memory_per_core: {shared} threads_per_core_limit: 2048
  core_count: {cores} fpus_per_core: {fpus} block_dim_limit_x: 2147483647 block_dim_limit_y: 65535
  block_dim_limit_z: 65535 memory_bandwidth: {bandwidth} l2_cache_size: {cache}
  clock_rate_ghz: {clock} device_memory_size: {memory}
  shared_memory_per_block_optin: {optin} cuda_compute_capability {{ major: {major} }}
  registers_per_core_limit: 65536 registers_per_block_limit: 65536 }}
runtime_version: {{ major: 12 minor: 8 patch: 0 }} platform_name: "CUDA"
dnn_version_info {{ major: 9 minor: 7 }} device_description_str: "{name}"
"""
"""A description of a GPU for XLA, as openxla/xla keeps them in its `target_config/specs`."""

GPUS = {
    "h100": {
        **{"shared": 233472, "cores": 132, "fpus": 128, "bandwidth": 3352320000000},
        **{"cache": 52428800, "clock": 1.98, "memory": 84929347584, "optin": 232448, "major": 9},
        "name": "NVIDIA H100 80GB HBM3",
    },
    "a100": {
        **{"shared": 167936, "cores": 108, "fpus": 64, "bandwidth": 2039000000000},
        **{"cache": 41943040, "clock": 1.41, "memory": 85198045184, "optin": 166912, "major": 8},
        "name": "NVIDIA A100-SXM4-80GB",
    },
}

PROGRAMS = ("train", "eval", "search")


def main() -> None:
    """Compile and print the tables."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--target", required=True, help="v5e:2x4, v4:2x2x2, ..., h100:1, a100:8")
    parser.add_argument("--config", default="configs/wmt14_base.py")
    parser.add_argument("--rows", type=int, help="of a batch of all devices (default: the config)")
    parser.add_argument("--programs", nargs="+", choices=PROGRAMS, default=["train"])
    parser.add_argument("--sentences", type=int, default=256, help="on each device, of a search")
    parser.add_argument("--source", type=int, default=48, help="tokens of a source, of a search")
    parser.add_argument("--json", type=Path, help="write the tables here")
    parser.add_argument("--compare", type=Path, help="an earlier --json")
    parser.add_argument("--hlo", type=Path, help="folder for the optimised programs")
    args, overrides = parser.parse_known_args()
    name = args.target.partition(":")[0]
    if name not in CHIPS:
        parser.error(f"--target must begin with one of {', '.join(CHIPS)}; got {args.target}.")
    os.environ |= ENVIRONMENT
    devices, chip = devices_of(args.target), CHIPS[name]
    config = read_config(args, overrides)
    rows, groups = [], []
    for kind in args.programs:
        row, found = measure(kind, config, args, devices, chip)
        rows.append(row)
        groups += found
    flags = f", {os.environ['LIBTPU_INIT_ARGS']}" if os.environ.get("LIBTPU_INIT_ARGS") else ""
    title = f"{args.target} with {args.config}{flags}, compiled and estimated, not run; "
    parts = {"programs": transposed(rows), "dearest groups": groups}
    printed = {name: part for name, part in parts.items() if part}
    report_parts(title + machine("jax"), printed, args.json)
    if args.compare:
        print("\ncompared:\n")
        report_parts("", {"ratios": compared(json.loads(args.compare.read_text()), parts)}, None)


def devices_of(target: str) -> list[Any]:
    """Return the devices of a TPU topology, or so many GPUs, none of which need exist."""
    name, _, shape = target.partition(":")
    package, extra = ("jax_cuda12_plugin", "cuda") if name in GPUS else ("libtpu", "aot")
    if importlib.util.find_spec(package) is None:
        raise SystemExit(
            f"Compiling for {name} needs {package}; it is not installed. "
            f"pip install 'flaxformer_min[{extra}]'"
        )
    if name in GPUS:
        os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_gpu_autotune_level=0"
    from jax.experimental.topologies import get_topology_desc

    with quiet():
        if name in GPUS:
            text, layout = GPU.format(**GPUS[name]), f"1x1x{shape or 1}"
            found = get_topology_desc(name, "cuda", target_config=text, topology=layout)
        else:
            found = get_topology_desc(platform="tpu", topology_name=target)
    return list(found.devices)


@contextlib.contextmanager
def quiet():
    """Hide what libtpu writes about a TPU that is not attached."""
    sys.stderr.flush()
    kept, nothing = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    os.dup2(nothing, 2)
    try:
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(nothing)


def read_config(args: argparse.Namespace, overrides: list[str]) -> Any:
    """Return the settings of the run as `train.py` reads them."""
    from flaxformer_min.cli.train import read_arguments
    from flaxformer_min.config import Config

    read = read_arguments([args.config, *overrides], "accelerators.py")
    config = Config(*(getattr(read, field.name) for field in dataclasses.fields(Config)))
    rows = args.rows or config.data.rows_per_batch
    return dataclasses.replace(config, data=dataclasses.replace(config.data, rows_per_batch=rows))


def measure(
    kind: str, config: Any, args: argparse.Namespace, devices: list[Any], chip: Chip
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Return one row of the table of programs, and those of its dearest groups."""
    build = {"train": train, "eval": evaluate, "search": search}[kind]
    since = time.perf_counter()
    lowered = build(config, args, devices)
    lowering = time.perf_counter() - since
    with quiet():
        compiled = lowered.compile()
    compiling = time.perf_counter() - since - lowering
    text = compiled.as_text()
    if args.hlo:
        args.hlo.mkdir(parents=True, exist_ok=True)
        (args.hlo / f"{args.target.replace(':', '-')}-{kind}.txt").write_text(text)
    program = hlo.parse(text)
    row = {"program": kind, "lowering, s": lowering, "compiling, s": compiling}
    row |= memory_of(compiled.memory_analysis(), chip, len(devices))
    exchanged = hlo.collectives(program)
    row["collectives"] = sum(count for count, _ in exchanged.values())
    row["exchanged, MB"] = sum(size for _, size in exchanged.values()) / 1e6
    if not chip.clock:
        return row | gpu_figures(program, chip), []
    groups = hlo.cycles_by_group(program)
    seconds = sum(groups.values()) / chip.clock
    row["estimate, ms"] = 1000 * seconds
    row["not estimated"] = len(hlo.without_estimate(program))
    if kind == "search":
        row |= search_figures(program, config, args, chip)
    else:
        row |= rates(kind, config, seconds, chip, len(devices))
    return row, [
        {"program": kind, "group": name, "ms": 1000 * cycles / chip.clock, "share, %": 100 * share}
        for name, cycles in list(groups.items())[:10]
        for share in [cycles / sum(groups.values())]
    ]


def memory_of(found: Any, chip: Chip, devices: int) -> dict[str, float]:
    """Return the memory of one device in GB."""
    arguments, temporary = found.argument_size_in_bytes, found.temp_size_in_bytes
    results = found.output_size_in_bytes - found.alias_size_in_bytes
    total = arguments + temporary + results + found.generated_code_size_in_bytes
    return {
        "arguments, GB": arguments / 1e9,
        "temporary, GB": temporary / 1e9,
        "headroom, GB": (chip.memory / chip.devices - total) / 1e9,
    }


def model_flops(config: Any) -> float:
    """Return the model FLOPs of the forward pass of one batch, of rows that a sentence fills."""
    sizes = dataclasses.asdict(config.model)
    rows = config.data.rows_per_batch * config.training.gradient_accumulation
    source = np.full(rows, config.data.source_row_length)
    target = np.full(rows, config.data.target_row_length)
    return flops_of_source(sizes, source) + flops_of_target(
        sizes, config.model.vocab_size, target, source
    )


def rates(kind: str, config: Any, seconds: float, chip: Chip, devices: int) -> dict[str, float]:
    """Return tokens per second and the share of the peak, of training or evaluation."""
    flops = model_flops(config) * (3 if kind == "train" else 1)
    accumulated = config.training.gradient_accumulation
    tokens = config.data.rows_per_batch * config.data.target_row_length * accumulated
    found = {
        "model TFLOP": flops / 1e12,
        "target tokens/s": tokens / seconds,
        "MFU, %": 100 * flops / seconds / (chip.flops / chip.devices * devices),
    }
    if kind == "train":
        found["hours for 100k steps of 25k"] = 100_000 * 25_000 / tokens * seconds / 3600
    return found


def gpu_figures(program: hlo.Program, chip: Chip) -> dict[str, float]:
    """Return kernels and bytes, and the time that the bytes take at the chip's bandwidth."""
    kernels = [(each, times) for each, times in hlo.executed(program) if hlo.is_kernel(each)]
    moved = hlo.bytes_moved(program)

    def count(opcode: str) -> int:
        return sum(times for each, times in kernels if each.opcode == opcode)

    return {
        "kernels": sum(times for _, times in kernels),
        "fusions": count("fusion"),
        "custom calls": count("custom-call"),
        "moved, GB": moved / 1e9,
        "moved at bandwidth, ms": 1000 * moved / chip.bandwidth,
    }


def train(config: Any, args: argparse.Namespace, devices: list[Any]) -> Any:
    """Lower the training step."""
    from flaxformer_min.training.step import make_train_step

    model, state = model_and_state(config)
    return make_train_step(model, config, devices=devices).lower(state, batch(config, devices))


def evaluate(config: Any, args: argparse.Namespace, devices: list[Any]) -> Any:
    """Lower the evaluation step."""
    from flaxformer_min.training.step import make_eval_step

    model, state = model_and_state(config)
    return make_eval_step(model, devices).lower(state.params, batch(config, devices))


def search(config: Any, args: argparse.Namespace, devices: list[Any]) -> Any:
    """Lower the search of a batch that halves, as `BatchRunner` runs it."""
    import jax

    from flaxformer_min.decoding.batches import BatchRunner, SentenceBatch
    from flaxformer_min.kernels.backend import compiling_for
    from flaxformer_min.system.devices import on_each_device
    from flaxformer_min.tokens import EOS

    class Lowering(BatchRunner):
        """Takes shapes in place of parameters, and lowers a program instead of running it."""

        def use_params(self, params):
            self.params = params

        def _program(self, key, program, arrays):
            rows = args.sentences
            arrays = jax.tree.map(lambda each: each.reshape(-1, rows, *each.shape[1:]), arrays)
            return on_each_device(program, devices, 1).lower(self.params, arrays)

    lines = list(range(args.sentences * len(devices)))
    sources = {line: [EOS] * args.source for line in lines}
    batch = SentenceBatch(lines, len(lines), args.source)
    with compiling_for(devices):
        runner = Lowering(*suited_model(config, devices))
        runner.devices = devices
        return runner._prepare(sources, {}, 0, config.decoding, True, False, batch)


def suited_model(config: Any, devices: list[Any]) -> tuple[Any, Any]:
    """Return the model and the shapes of its parameters as `Translator.load` suits them."""
    import jax

    from flaxformer_min.decoding.models import prepare_for_decoding

    model, state = model_and_state(config)
    zeros = jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype), state.params)
    model, params = prepare_for_decoding(model, zeros)
    return model, jax.eval_shape(lambda: params)


def search_figures(
    program: hlo.Program, config: Any, args: argparse.Namespace, chip: Chip
) -> dict[str, float]:
    """Return the dearest turn of a loop, which is a step of decoding, and its lower bound.

    It is a step of the whole batch, before it halves. It reads the weights of the decoder and, of
    each sentence, the keys and values of the source and of the tokens so far: here, of as many as
    the source has.
    """
    sizes, beam = config.model, config.decoding.beam_size
    d, layers = sizes.d_model, sizes.num_layers
    weights = layers * (6 * d**2 + 2 * d * sizes.d_ff) + sizes.vocab_size * d
    cached = 2 * d * layers * args.sentences * args.source * (1 + beam)
    width, bandwidth = 4 if sizes.dtype == "float32" else 2, chip.bandwidth / chip.devices
    steps = [cycles for _, turns, cycles in hlo.loops(program) if turns is None]
    step = max(steps, default=0) / chip.clock
    return {
        "a step, ms": 1000 * step,
        "its reads at bandwidth, ms": 1000 * width * (weights + cached) / bandwidth,
        "hypotheses/s": args.sentences * beam / step if step else 0.0,
    }


def model_and_state(config: Any) -> tuple[Any, Any]:
    """Return the model, and the shapes of a state of training."""
    import jax

    from flaxformer_min.model.transformer import Transformer
    from flaxformer_min.training.step import initial_state

    model = Transformer(config.model)
    start = partial(initial_state, model, config)
    return model, jax.eval_shape(start, jax.ShapeDtypeStruct((), np.uint32))


def batch(config: Any, devices: list[Any]) -> Any:
    """Return the shapes of a batch, as `shard_batch` divides it."""
    import jax

    from flaxformer_min.tokens import Batch, Tokens

    data, number = config.data, len(devices)
    if data.rows_per_batch % number:
        raise SystemExit(f"--rows must be a multiple of {number}, the number of devices.")
    rows = number, config.training.gradient_accumulation, data.rows_per_batch // number
    source, target = (
        jax.ShapeDtypeStruct((*rows, length), np.int32)
        for length in (data.source_row_length, data.target_row_length)
    )
    return Batch(Tokens(source, source, source), Tokens(target, target, target))


def transposed(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return a row for each figure, with a column for each program."""
    names = dict.fromkeys(name for row in rows for name in row if name != "program")
    return [{"figure": name, **{row["program"]: row.get(name) for row in rows}} for name in names]


def compared(old: dict[str, Any], new: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the figures of both, and what they changed by."""
    before = {row["figure"]: row for row in old["programs"]}
    return [
        {
            "figure": f"{program} {row['figure']}",
            "before": earlier,
            "now": value,
            "ratio": value / earlier if earlier else None,
        }
        for row in new["programs"]
        for program, value in row.items()
        if program != "figure" and value is not None
        for earlier in [before.get(row["figure"], {}).get(program)]
        if earlier is not None
    ]


if __name__ == "__main__":
    main()
