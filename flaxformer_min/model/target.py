"""The devices that a program is traced for, which decide between two ways to compute the same."""

import contextlib
import contextvars
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from flaxformer_min.config import ModelConfig

_TARGET: contextvars.ContextVar[Any] = contextvars.ContextVar("target")


@contextlib.contextmanager
def compiling_for(devices: Sequence[Any] | None) -> Iterator[None]:
    """Let programs traced in the body suit `devices`, attached or not; None changes nothing."""
    if devices is None:
        yield
        return
    before = _TARGET.set(devices[0])
    try:
        yield
    finally:
        _TARGET.reset(before)


def target_platform() -> str:
    """Return the platform that a program is traced for: "cpu", "tpu", "cuda" or "rocm".

    It is that of `compiling_for`, or that of jax's own devices.
    """
    platform = _target().platform
    if platform == "gpu":
        return "cuda" if _cuda_capability() else "rocm"
    return platform


def compute_dtype(config: ModelConfig) -> str:
    """Return the type that layers compute in, "bfloat16" or "float32".

    "auto" is bfloat16 on a TPU and on an NVIDIA GPU that has units for it, from Ampere on.
    """
    if config.dtype != "auto":
        return config.dtype
    return "bfloat16" if target_platform() == "tpu" or _cuda_capability() >= 8 else "float32"


def store_at(stored: Array, new: Array, entries: Int[Array, "batch new"], axis: int) -> Array:
    """Store `new` at entries of `axis` that are each sentence's own."""
    if target_platform() == "tpu":
        return _select_at(stored, new, entries, axis + 1)

    def of_sentence(stored: Array, new: Array, entries: Array) -> Array:
        index = (*[slice(None)] * axis, entries)
        return stored.at[index].set(new, mode="promise_in_bounds", unique_indices=True)

    return jax.vmap(of_sentence)(stored, new, entries)


def _select_at(stored: Array, new: Array, entries: Int[Array, "batch new"], axis: int) -> Array:
    """Store like `store_at`, writing everything: a TPU would store sentence by sentence."""
    shape = [1] * stored.ndim
    shape[0], shape[axis] = stored.shape[0], stored.shape[axis]
    place = jnp.arange(stored.shape[axis], dtype=jnp.int32)[None, :]
    for number in range(new.shape[axis]):
        one = jax.lax.slice_in_dim(new, number, number + 1, axis=axis)
        is_here = place == entries[:, number, None]
        stored = jnp.where(is_here.reshape(shape), one, stored)
    return stored


def _cuda_capability() -> float:
    """Return the compute capability of an NVIDIA GPU, as 9.0, and 0 for other devices."""
    text = str(getattr(_target(), "compute_capability", ""))
    return float(text) if text.replace(".", "", 1).isdigit() else 0.0


def _target() -> Any:
    return _TARGET.get(None) or jax.local_devices()[0]
