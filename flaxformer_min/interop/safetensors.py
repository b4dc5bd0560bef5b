"""Tensors in the safetensors format: a JSON header and raw bytes, of which nothing is executed."""

import json
import math
import struct
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from flaxformer_min.system.files import write_atomically

TYPES = {"F64": np.float64, "F32": np.float32, "F16": np.float16, "BF16": jnp.bfloat16}
"""The types of numbers that a model's weights have."""

MOST_AXES = 32
"""What every version of numpy can hold, and far more than weights have."""

LONGEST_HEADER = 100_000_000
"""Bytes: the limit of the format itself."""


def read_safetensors(path: Path) -> dict[str, np.ndarray]:
    """Return the tensors of a file by name, each as float32.

    Raises ValueError for a file that is not exactly what its header describes.
    """
    size = path.stat().st_size
    with path.open("rb") as file:
        prefix = file.read(8)
        length = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else 0
        if not 2 <= length <= min(size - 8, LONGEST_HEADER):
            raise ValueError(
                f"{path} must be a safetensors file; its header claims {length:,} bytes of a file "
                f"of {size:,}. Is it truncated, or another file?"
            )
        header = parse_json(file.read(length), path)
        header.pop("__metadata__", None)
        tensors = {name: _Tensor(name, entry, path) for name, entry in header.items()}
        _check_layout(tensors, size - 8 - length, path)
        content = {}
        for name, tensor in tensors.items():
            file.seek(8 + length + tensor.begin)
            values = np.frombuffer(file.read(tensor.end - tensor.begin), tensor.type)
            content[name] = values.reshape(tensor.shape).astype(np.float32)
    return content


def write_safetensors(path: Path, tensors: dict[str, np.ndarray]) -> None:
    """Write float32 tensors."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    begin = 0
    for name, tensor in tensors.items():
        end = begin + tensor.size * 4
        header[name] = {"dtype": "F32", "shape": tensor.shape, "data_offsets": [begin, end]}
        begin = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    parts = [np.ascontiguousarray(tensor, "<f4").tobytes() for tensor in tensors.values()]
    write_atomically(path, struct.pack("<Q", len(text)) + text + b"".join(parts))


def parse_json(text: bytes, path: Path) -> dict[str, Any]:
    """Return the object that a JSON text holds; a name that comes twice is a ValueError."""

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        content = dict(pairs)
        if len(content) < len(pairs):
            seen: set[str] = set()
            twice = next(name for name, _ in pairs if name in seen or seen.add(name))
            raise ValueError(f"{twice!r} comes twice")
        return content

    try:
        content = json.loads(text.decode("utf-8"), object_pairs_hook=unique)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} must hold complete JSON, each name once; {error}.") from error
    if not isinstance(content, dict):
        raise ValueError(f"{path} must hold a JSON object; got {type(content).__name__}.")
    return content


class _Tensor:
    """One entry of the header, with every claim checked that needs no other entry."""

    def __init__(self, name: str, entry: Any, path: Path):
        entry = entry if isinstance(entry, dict) else {}
        shape, offsets = entry.get("shape"), entry.get("data_offsets")
        if not (_are_sizes(shape) and _are_sizes(offsets) and len(offsets) == 2):
            raise ValueError(f"{path}: {name!r} must have a shape and two data_offsets.")
        if len(shape) > MOST_AXES:
            raise ValueError(
                f"{path}: {name!r} must have at most {MOST_AXES} axes; it has {len(shape)}."
            )
        kind = entry.get("dtype")
        if not isinstance(kind, str) or kind not in TYPES:
            raise ValueError(
                f"{path}: the type of {name!r} must be one of {', '.join(TYPES)}; got {kind!r}."
            )
        self.type = np.dtype(TYPES[kind])
        self.shape, (self.begin, self.end) = tuple(shape), offsets
        if self.end - self.begin != math.prod(shape) * self.type.itemsize:
            raise ValueError(
                f"{path}: {name!r} has the shape {shape}, which does not fit into its "
                f"{self.end - self.begin:,} bytes."
            )


def _are_sizes(values: Any) -> bool:
    return isinstance(values, list) and all(type(each) is int and each >= 0 for each in values)


def _check_layout(tensors: dict[str, _Tensor], size: int, path: Path) -> None:
    """Tensors lie one after the other and fill the file: none overlaps, no byte is left."""
    end = 0
    for name, tensor in sorted(tensors.items(), key=lambda item: (item[1].begin, item[1].end)):
        if tensor.begin != end or tensor.end > size:
            raise ValueError(
                f"{path}: {name!r} lies in bytes {tensor.begin:,} to {tensor.end:,}; expected it "
                f"from {end:,}, within {size:,}. The file is damaged or truncated."
            )
        end = tensor.end
    if end != size:
        raise ValueError(f"{path} has {size - end:,} bytes that belong to no tensor.")
