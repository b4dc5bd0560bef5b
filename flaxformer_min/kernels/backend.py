"""The devices that a program is traced for, which decide between two ways to compute the same."""

import contextlib
import contextvars
from collections import Counter
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


def in_few_kernels(arrays: Any) -> Any:
    """Return the same values, in a form that an NVIDIA GPU computes in fewer kernels.

    XLA merges operations on different arrays of one shape only if they have an operand in common
    that is not a scalar. Here it is ones, by which float32 arrays are multiplied that share their
    shape with another.
    """
    if target_platform() != "cuda":
        return arrays
    found = Counter(x.shape for x in jax.tree.leaves(arrays) if x.dtype == jnp.float32)
    shapes = {shape for shape, times in found.items() if shape and times > 1}
    # XLA would drop a product with ones, but does not look behind a barrier.
    longest = max((shape[-1] for shape in shapes), default=0)
    ones = jax.lax.optimization_barrier(jnp.ones(longest, jnp.float32))

    def times_one(x: Array) -> Array:
        if x.shape not in shapes or x.dtype != jnp.float32:
            return x
        return x * jnp.broadcast_to(ones[: x.shape[-1]], x.shape)

    return jax.tree.map(times_one, arrays)


def store_at(stored: Array, new: Array, entries: Int[Array, "batch new"], axis: int) -> Array:
    """Store `new` [batch heads ..] at entries of `axis` that are each sentence's own.

    `axis` is 1 or 2 of a sentence's own [heads entries d_k] or [heads d_k entries]. What belongs
    beyond the last entry is not stored.
    """
    if target_platform() == "tpu":
        return _place_at(stored, new, entries, axis)

    def of_sentence(stored: Array, new: Array, entries: Array) -> Array:
        index = (*[slice(None)] * axis, entries)
        # Entries repeat only beyond the last.
        return stored.at[index].set(new, mode="drop", unique_indices=True)

    return jax.vmap(of_sentence)(stored, new, entries)


def _place_at(stored: Array, new: Array, entries: Int[Array, "batch new"], axis: int) -> Array:
    """Store like `store_at`, writing everything: a TPU would store sentence by sentence."""
    numbers = jnp.arange(stored.shape[axis + 1], dtype=jnp.int32)
    is_here = entries[:, :, None] == numbers[None, None, :]
    product, others = ("bhkd,bkn->bhnd", (1, 3)) if axis == 1 else ("bhdk,bkn->bhdn", (1, 2))
    # Exact: each sum has one summand that is not zero.
    placed = jnp.einsum(product, new, is_here.astype(new.dtype), precision="highest")
    return jnp.where(jnp.expand_dims(is_here.any(axis=1), others), placed, stored)


def _cuda_capability() -> float:
    """Return the compute capability of an NVIDIA GPU, as 9.0, and 0 for other devices."""
    text = str(getattr(_target(), "compute_capability", ""))
    return float(text) if text.replace(".", "", 1).isdigit() else 0.0


def _target() -> Any:
    return _TARGET.get(None) or jax.local_devices()[0]
