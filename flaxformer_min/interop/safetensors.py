"""Tensors in the safetensors format, by the package of that name; nothing in it is executed."""

from pathlib import Path

import ml_dtypes  # noqa: F401  (with which numpy knows bfloat16)
import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from flaxformer_min.interop.files import check_regular
from flaxformer_min.system.files import write_atomically

TYPES = ("F64", "F32", "F16", "BF16")
"""The types of numbers that a model's weights have."""


def read_safetensors(path: Path) -> dict[str, np.ndarray]:
    """Return the tensors of a file by name, each as float32.

    Raises ValueError for a file that is not exactly what its header describes.
    """
    check_regular(path)
    tensors = {}
    try:
        with safe_open(path, framework="np") as file:
            for name in file.keys():  # noqa: SIM118  (it cannot be iterated over)
                kind = file.get_slice(name).get_dtype()
                if kind not in TYPES:
                    raise ValueError(
                        f"the type of {name!r} must be one of {', '.join(TYPES)}; got {kind!r}"
                    )
                tensors[name] = file.get_tensor(name).astype(np.float32, copy=False)
    except (SafetensorError, ValueError) as error:
        raise ValueError(
            f"{path} must be a whole safetensors file; {error}. Is it truncated, or another file?"
        ) from error
    return tensors


def write_safetensors(path: Path, tensors: dict[str, np.ndarray]) -> None:
    """Write float32 tensors."""
    contiguous = {name: np.ascontiguousarray(each, "<f4") for name, each in tensors.items()}
    write_atomically(path, save(contiguous, metadata={"format": "pt"}))
