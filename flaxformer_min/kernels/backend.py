"""The backend that a program is traced for, which decides between two ways to compute the same."""

import contextlib
import contextvars
from collections.abc import Iterator, Sequence
from typing import Any

import jax

_DEVICE: contextvars.ContextVar[Any] = contextvars.ContextVar("device")


@contextlib.contextmanager
def compiling_for(devices: Sequence[Any] | None) -> Iterator[None]:
    """Trace programs in the body for `devices`, attached or not; None changes nothing."""
    if devices is None:
        yield
        return
    before = _DEVICE.set(devices[0])
    try:
        yield
    finally:
        _DEVICE.reset(before)


def backend() -> str:
    """Return the backend that a program is traced for: "cpu", "tpu", "cuda" or "rocm"."""
    platform = _device().platform
    if platform == "gpu":
        return "cuda" if _cuda_capability() else "rocm"
    return platform


def compute_dtype(dtype: str) -> str:
    """Return the type that layers compute in, "bfloat16" or "float32", for `ModelConfig.dtype`.

    "auto" is bfloat16 on a TPU and on an NVIDIA GPU that has units for it, from Ampere on.
    """
    if dtype != "auto":
        return dtype
    return "bfloat16" if backend() == "tpu" or _cuda_capability() >= 8 else "float32"


def _cuda_capability() -> float:
    """Return the compute capability of an NVIDIA GPU, as 9.0, and 0 for other devices."""
    text = str(getattr(_device(), "compute_capability", ""))
    return float(text) if text.replace(".", "", 1).isdigit() else 0.0


def _device() -> Any:
    return _DEVICE.get(None) or jax.local_devices()[0]
