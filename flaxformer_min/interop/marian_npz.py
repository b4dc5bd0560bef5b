"""Marian's own weights: an .npz with the settings of its model inside.

The tensors get the names of Hugging Face's MarianMTModel, and everything after that is the same.
"""

import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from flaxformer_min.config import ModelConfig
from flaxformer_min.interop.files import check_regular
from flaxformer_min.interop.marian_folder import number
from flaxformer_min.interop.marian_settings import Settings
from flaxformer_min.interop.marian_tensors import FINAL_BIAS, PROJECTIONS
from flaxformer_min.interop.run_model import decoder_depth, depth, nearest_alpha
from flaxformer_min.interop.yaml import read_mapping

EPSILON = 1e-6
"""Of Marian's layer norms."""

SIDES = ("encoder", "decoder")

SETTINGS = "special:model.yml"

LARGEST_RATIO = 20
"""Of a tensor's size and its compressed size: trained numbers hardly shrink, zip bombs do."""

NEEDED = {
    "type": "transformer",
    "layer-normalization": "false",
    "right-left": "false",
    "transformer-attention-mask": "default",
    "transformer-decoder-autoreg": "self-attention",
    "transformer-decoder-dim-ffn": "0",
    "transformer-decoder-ffn-depth": "0",
    "transformer-ffn-depth": "2",
    "transformer-no-affine": "false",
    "transformer-no-bias": "false",
    "transformer-no-projection": "false",
    "transformer-pool": "false",
    "transformer-rnn-projection": "false",
    "transformer-tied-layers": "",
    "transformer-train-position-embeddings": "false",
    "transformer-disable-position-embeddings": "false",
    "output-omit-bias": "false",
    "factors-combine": "sum",
    "lemma-dim-emb": "0",
    "ulr-dim-emb": "0",
}
"""Settings of model.yml that may be missing, or must have this value."""

OPERATIONS = {
    "transformer-preprocess": "",
    "transformer-postprocess": "dan",
    "transformer-postprocess-emb": "d",
    "transformer-postprocess-top": "",
}
"""Settings that are the letters of operations around layers: dropout, add, normalize."""

NORMS = {
    ("", "an", "", ""): ("post", True),
    ("n", "a", "", "n"): ("pre", True),
    ("n", "a", "", ""): ("pre", False),
}
"""The settings `norm` and `final_norm` by the operations of `OPERATIONS`, dropout left out."""


def read_npz(path: Path) -> dict[str, np.ndarray]:
    """Return the arrays of an .npz, none of which is unpickled."""
    check_regular(path)
    try:
        with path.open("rb") as file:
            with zipfile.ZipFile(file) as archive:
                _check_entries(archive, path.stat().st_size)
            file.seek(0)
            with np.load(file, allow_pickle=False) as arrays:
                content = {name: arrays[name] for name in arrays.files}
        for name, values in content.items():
            if values.dtype.kind not in "fiu":
                raise ValueError(f"{name!r} has the type {values.dtype}")
        return content
    except MemoryError:
        raise
    except Exception as error:  # of a dozen types, with which numpy and zipfile meet damage
        reason = str(error).partition("\n")[0] or type(error).__name__
        raise ValueError(f"{path} must be a whole .npz of numbers; {reason}.") from error


def _check_entries(archive: zipfile.ZipFile, size: int) -> None:
    """Raise ValueError for an entry that is larger than it can be in a file of `size` bytes."""
    compressed = sum(entry.compress_size for entry in archive.infolist())
    if compressed > size:  # entries that share bytes, each of which would be unpacked
        raise ValueError(f"its entries claim {compressed:,} bytes of a file of {size:,}")
    for entry in archive.infolist():
        if entry.file_size > LARGEST_RATIO * entry.compress_size + 1_000:
            raise ValueError(
                f"{entry.filename!r} claims {entry.file_size:,} bytes of {entry.compress_size:,}"
            )
        try:
            with archive.open(entry) as file:
                _check_claim(file, entry)
        except MemoryError as error:  # how Python's parser refuses what is nested too deeply
            raise ValueError(f"{entry.filename!r} has no header of numpy") from error


def _check_claim(file: Any, entry: zipfile.ZipInfo) -> None:
    version = np.lib.format.read_magic(file)
    readers = {
        (1, 0): np.lib.format.read_array_header_1_0,
        (2, 0): np.lib.format.read_array_header_2_0,
    }
    if version not in readers:
        raise ValueError(f"{entry.filename!r} has an unknown version")
    shape, _, dtype = readers[version](file)
    claimed = dtype.itemsize
    for size in shape:
        claimed *= int(size)
    if file.tell() + claimed != entry.file_size:
        raise ValueError(f"{entry.filename!r} claims {claimed:,} bytes of {entry.file_size:,}")


def settings_of(arrays: dict[str, np.ndarray], path: Path) -> Settings:
    """Return the settings that an .npz holds. Raises ValueError for those not understood."""
    if SETTINGS not in arrays:
        raise ValueError(f"{path} must hold {SETTINGS!r}, as Marian writes it; it is missing.")
    content = read_mapping(arrays[SETTINGS].tobytes().rstrip(b"\0"), path)
    for name, needed in NEEDED.items():
        found = content.get(name, needed)
        if found != needed and not (found == [] and not needed):
            raise ValueError(f"{path}: {name} must be {needed!r}; got {found!r}.")
    sizes = _vocabulary_sizes(arrays, path)
    return Settings(
        model=_model_config(content, arrays, sizes, path),
        vocab_sizes=sizes,
        languages=("", ""),
        beam_size=4,
        length_penalty=nearest_alpha(1.0),
    )


def _model_config(
    content: dict[str, Any], arrays: dict[str, np.ndarray], sizes: tuple[int, int], path: Path
) -> ModelConfig:
    activation = content.get("transformer-ffn-activation")
    if activation not in ("relu", "swish"):
        raise ValueError(
            f"{path}: transformer-ffn-activation must be relu or swish; got {activation!r}."
        )
    depths = [number(content, name, path) for name in ("enc-depth", "dec-depth")]
    norm, final_norm = _norms(content, path)
    tied = not any(name.startswith("decoder_ff_logit_out_W") for name in arrays)
    shared = tied and "Wemb" in arrays
    return ModelConfig(
        vocab_size=sizes[1],
        source_vocab_size=None if shared else sizes[0],
        num_layers=depths[0],
        num_decoder_layers=decoder_depth(*depths),
        d_model=number(content, "dim-emb", path),
        d_ff=number(content, "transformer-dim-ffn", path),
        num_heads=number(content, "transformer-heads", path),
        activation=activation,
        norm=norm,
        final_norm=final_norm,
        norm_epsilon=EPSILON,
        positional_encoding="halves",
        embeddings="shared" if shared else "target_tied" if tied else "separate",
    )


def _norms(content: dict[str, Any], path: Path) -> tuple[str, bool]:
    """Return where the layer norms are. Raises ValueError for other places than those known."""
    found = {name: content.get(name, letters) or "" for name, letters in OPERATIONS.items()}
    operations = tuple(str(letters).replace("d", "") for letters in found.values())
    if operations not in NORMS:
        raise ValueError(
            f"{path}: transformer-preprocess, -postprocess and -postprocess-top must be '', 'dan' "
            "and '' (post-norm), or 'n', 'da' and 'n' or '' (pre-norm), without a norm of the "
            f"embeddings; got {', '.join(f'{name}={each!r}' for name, each in found.items())}."
        )
    return NORMS[operations]


def _vocabulary_sizes(arrays: dict[str, np.ndarray], path: Path) -> tuple[int, int]:
    """Return the numbers of embeddings of source and target."""
    names = ("Wemb", "Wemb") if "Wemb" in arrays else ("encoder_Wemb", "decoder_Wemb")
    missing = [name for name in names if name not in arrays or arrays[name].ndim != 2]
    if missing:
        raise ValueError(f"{path} must hold the embeddings {missing[0]!r}, [vocab d_model].")
    return len(arrays[names[0]]), len(arrays[names[1]])


def hugging_face_names(arrays: dict[str, np.ndarray], config: ModelConfig) -> dict[str, np.ndarray]:
    """Return the tensors under the names, and in the layouts, of MarianMTModel.

    Matrices are [in out] in Marian, biases and norms [1 n]. Names that are not understood stay.
    """
    rest = {name: values for name, values in arrays.items() if name != SETTINGS}
    deepest = max(config.num_layers, config.decoder_depth)
    if deepest > len(rest):  # before all names are listed
        raise ValueError(
            f"an .npz must have the {deepest:,} layers of its settings; it has "
            f"{len(rest):,} arrays."
        )
    weights: dict[str, np.ndarray] = {}
    for name, own in _names(config):
        own = own if own in rest else own.removesuffix("_pre")  # some files have no suffix
        if own in rest:
            values = rest.pop(own).astype(np.float32, copy=False)
            is_matrix = values.ndim == 2 and "_W" in own[-4:]
            weights[name] = values.T if is_matrix else values.squeeze()
    tables = [("model.shared.weight", "Wemb")]
    if config.embeddings != "shared":
        tables = [(f"model.{each}.embed_tokens.weight", f"{each}_Wemb") for each in SIDES]
        if "Wemb" in rest:  # of both languages, but not of the output
            tables = [(name, "Wemb") for name, _ in tables]
    tables.append(("lm_head.weight", "decoder_ff_logit_out_Wt"))
    for name, own in tables:
        if own in rest:
            weights[name] = rest[own].astype(np.float32, copy=False)
    if (output := rest.pop("decoder_ff_logit_out_W", None)) is not None:
        weights["lm_head.weight"] = output.astype(np.float32, copy=False).T
    if (bias := rest.pop("decoder_ff_logit_out_b", None)) is not None:
        weights[FINAL_BIAS] = bias.astype(np.float32, copy=False).reshape(1, -1)
    used = {own for _, own in tables}
    return {**weights, **{name: values for name, values in rest.items() if name not in used}}


def _names(config: ModelConfig) -> Iterator[tuple[str, str]]:
    """Yield the names in Hugging Face and in Marian of everything within the stacks of layers."""
    for side in SIDES:
        for layer_number in range(depth(config, side)):
            layer, own = f"model.{side}.layers.{layer_number}", f"{side}_l{layer_number + 1}"
            boxes = [("self_attn", "self"), ("encoder_attn", "context")]
            for box, name in boxes if side == "decoder" else boxes[:1]:
                for letter, projection in zip("qkvo", PROJECTIONS.values(), strict=True):
                    yield f"{layer}.{box}.{projection}.weight", f"{own}_{name}_W{letter}"
                    yield f"{layer}.{box}.{projection}.bias", f"{own}_{name}_b{letter}"
                yield from _norm_names(f"{layer}.{box}_layer_norm", f"{own}_{name}_Wo", config)
            for letter in "12":
                yield f"{layer}.fc{letter}.weight", f"{own}_ffn_W{letter}"
                yield f"{layer}.fc{letter}.bias", f"{own}_ffn_b{letter}"
            yield from _norm_names(f"{layer}.final_layer_norm", f"{own}_ffn_ffn", config)
        if config.has_final_norm:
            yield f"model.{side}.layer_norm.weight", f"{side}_top_ln_scale"
            yield f"model.{side}.layer_norm.bias", f"{side}_top_ln_bias"


def _norm_names(name: str, own: str, config: ModelConfig) -> Iterator[tuple[str, str]]:
    suffix = "_pre" if config.norm == "pre" else ""
    yield f"{name}.weight", f"{own}_ln_scale{suffix}"
    yield f"{name}.bias", f"{own}_ln_bias{suffix}"
