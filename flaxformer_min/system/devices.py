"""The devices that jax computes on."""

import contextlib
import os
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

MOST_CPU_DEVICES = 8
"""Each device has its own copy of the parameters in training, and its own batch in decoding."""


def cpu_cores() -> int:
    """Return the number of CPU cores to compute on, up to eight."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return min(cores or 1, MOST_CPU_DEVICES)


def configure_cpu_devices(rows: int = 0) -> None:
    """Make each CPU core a jax device, up to eight; with `rows`, only as many as divide it evenly.

    XLA leaves cores idle in small programs: on two cores, two devices train 1.3 times as fast as
    one, and decoding runs a batch on each. Has no effect once jax has computed anything, if the
    user chose a number of devices, or on accelerators.
    """
    if "xla_force_host_platform_device_count" in os.environ.get("XLA_FLAGS", ""):
        return
    if "JAX_NUM_CPU_DEVICES" in os.environ:
        return
    devices = next(n for n in range(cpu_cores(), 0, -1) if rows % n == 0)
    with contextlib.suppress(RuntimeError):  # jax is initialized already
        jax.config.update("jax_num_cpu_devices", devices)


def replicated(devices: Sequence[jax.Device]) -> jax.sharding.NamedSharding:
    """Return the sharding of arrays that are replicated on `devices`, as `pmap` uses it."""
    return _sharding(devices, jax.sharding.PartitionSpec())


def sharded(devices: Sequence[jax.Device]) -> jax.sharding.NamedSharding:
    """Return the sharding of arrays [devices ...], one for each, as `pmap` uses it."""
    return _sharding(devices, jax.sharding.PartitionSpec("devices"))


def _sharding(devices: Sequence[jax.Device], spec: Any) -> jax.sharding.NamedSharding:
    return jax.sharding.NamedSharding(jax.sharding.Mesh(np.array(devices), ("devices",)), spec)


def on_each_device(program: Callable[..., Any], devices: Sequence[jax.Device], trees: int) -> Any:
    """Return `program(params, *trees)` for all devices, each with its part of the trees.

    As `jax.pmap`, but the compiled program is freed with those who use it; pmap's caches keep it.

    trees: how many arguments follow the parameters. Outside, all their arrays and those of the
           result are [devices ...]; inside, without that axis.
    """

    def of_device(params: Any, *trees: Any) -> Any:
        result = program(params, *jax.tree.map(lambda array: array[0], trees))
        return jax.tree.map(lambda array: array[None], result)

    same, divided = replicated(devices), sharded(devices)
    inputs = same, *[divided] * trees
    mapped = jax.shard_map(
        of_device,
        mesh=same.mesh,
        in_specs=tuple(each.spec for each in inputs),
        out_specs=divided.spec,
        check_vma=False,
    )
    return jax.jit(mapped, in_shardings=inputs, out_shardings=divided)


def replicate(tree: Any, devices: list[jax.Device]) -> Any:
    """Return the arrays, copied to each of `devices`."""
    return jax.device_put(tree, replicated(devices))


def on_all_processes(tree: Any) -> Any:
    """Return arrays replicated on this process's devices as replicated on those of all processes.

    Nothing is copied or sent: every process must have the same values.
    """
    everywhere = replicated(jax.devices())

    def widen(leaf: jax.Array) -> jax.Array:
        shards = [shard.data for shard in leaf.addressable_shards]
        return jax.make_array_from_single_device_arrays(leaf.shape, everywhere, shards)

    return jax.tree.map(widen, tree)


def describe_devices() -> str:
    """Return the devices that jax uses, with a hint if the machine has a GPU that it does not."""
    devices = jax.devices()
    text = f"{len(devices)} {devices[0].platform} device{'s' if len(devices) > 1 else ''}"
    text += f" ({devices[0].device_kind})"
    if jax.process_count() > 1:
        text += f" of {jax.process_count()} processes"
    if devices[0].platform == "cpu" and (gpus := _nvidia_gpus()):
        text += (
            f"; there is {', '.join(gpus)}, which this jax does not use: "
            "pip install 'flaxformer_min[cuda]'"
        )
    return text


def _nvidia_gpus() -> list[str]:
    """Return the NVIDIA devices of the system, whether or not their driver works."""
    if os.environ.get("JAX_PLATFORMS") == "cpu" or os.environ.get("CUDA_VISIBLE_DEVICES") == "":
        return []
    nodes = sorted(Path("/dev").glob("nvidia[0-9]*"))
    if not nodes and not shutil.which("nvidia-smi"):
        return []
    return [f"an NVIDIA GPU ({node})" for node in nodes]
