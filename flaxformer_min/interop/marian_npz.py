"""Import of Marian's own files: an .npz with its settings inside, and vocab.yml or .spm files.

The tensors get the names of Hugging Face's MarianMTModel, and everything after that is the same.
"""

import math
import re
import zipfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from sentencepiece import SentencePieceProcessor

from flaxformer_min.config import ModelConfig
from flaxformer_min.data.tokenizer import read_processor
from flaxformer_min.interop.marian_settings import Settings
from flaxformer_min.interop.marian_tensors import FINAL_BIAS, PROJECTIONS
from flaxformer_min.interop.run_model import nearest_alpha
from flaxformer_min.interop.vocabulary import SUPPRESSED
from flaxformer_min.interop.yaml import read_mapping, read_settings_text

EPSILON = 1e-6
"""Of Marian's layer norms."""

SETTINGS = "special:model.yml"

LARGEST_RATIO = 20
"""Of a tensor's size and its compressed size: trained numbers hardly shrink, zip bombs do."""

NEEDED = {
    "type": "transformer",
    "layer-normalization": "false",
    "right-left": "false",
    "transformer-decoder-autoreg": "self-attention",
    "transformer-decoder-dim-ffn": "0",
    "transformer-decoder-ffn-depth": "0",
    "transformer-ffn-depth": "2",
    "transformer-no-affine": "false",
    "transformer-no-bias": "false",
    "transformer-no-projection": "false",
    "transformer-pool": "false",
    "transformer-postprocess": "dan",
    "transformer-postprocess-emb": "d",
    "transformer-postprocess-top": "",
    "transformer-preprocess": "",
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


def find_model(folder: Path) -> tuple[Path, list[Path]]:
    """Return the .npz and the vocabularies of source and target, which may be one file.

    Raises ValueError unless decoder.yml names them, within the folder, or there is one of each.
    """
    description = folder / "decoder.yml"
    if description.is_file():
        content = read_settings_text(description.read_bytes(), description)
        names = {key: content.get(key) for key in ("models", "vocabs")}
        for key, value in names.items():
            if not isinstance(value, list) or not value:
                raise ValueError(f"{description} must list {key}; got {value!r}.")
        if len(names["models"]) > 1:
            raise ValueError(f"{description} names an ensemble; import its models one by one.")
        inside = [_inside(folder, name) for name in [*names["models"], *names["vocabs"]]]
        return inside[0], inside[1:]
    models = sorted(folder.glob("*.npz"))
    vocabularies = sorted(folder.glob("*vocab*.yml")) or sorted(folder.glob("vocab*.spm"))
    if len(models) != 1 or len(vocabularies) != 1:
        raise ValueError(
            f"{folder} must have a decoder.yml, or one .npz and one vocabulary; it has "
            f"{len(models)} and {len(vocabularies)}."
        )
    return models[0], vocabularies


def search_settings(folder: Path) -> dict[str, Any]:
    """Return how decoder.yml searches: fields of `Settings`, those that it does not name left out.

    Raises ValueError for a search that this package does not have. Sizes of batches and the like
    have no effect.
    """
    path = folder / "decoder.yml"
    if not path.is_file():
        return {}
    content = read_settings_text(path.read_bytes(), path)
    if re.fullmatch(r"-?0*\.?0*", penalty := str(content.get("word-penalty", "0"))) is None:
        raise ValueError(f"{path}: word-penalty must be 0; got {penalty!r}.")
    found: dict[str, Any] = {}
    if "beam-size" in content:
        found["beam_size"] = _number(content, "beam-size", path)
    if "normalize" in content:
        found["length_penalty"] = nearest_alpha(_float(content, "normalize", path))
    return found


def _inside(folder: Path, name: str) -> Path:
    path = folder / name
    if not path.resolve().is_relative_to(folder.resolve()):
        raise ValueError(f"{folder}/decoder.yml: {name!r} leaves the folder.")
    if not path.is_file():
        raise ValueError(f"{folder} must have a file {name}, which decoder.yml names.")
    return path


def read_npz(path: Path) -> dict[str, np.ndarray]:
    """Return the arrays of an .npz, none of which is unpickled."""
    try:
        with zipfile.ZipFile(path) as archive:
            for entry in archive.infolist():
                if entry.file_size > LARGEST_RATIO * entry.compress_size + 1_000:
                    raise ValueError(
                        f"{entry.filename!r} claims {entry.file_size:,} bytes of "
                        f"{entry.compress_size:,}"
                    )
                with archive.open(entry) as file:
                    _check_claim(file, entry)
        with np.load(path, allow_pickle=False) as arrays:
            content = {name: arrays[name] for name in arrays.files}
        for name, values in content.items():
            if values.dtype.kind not in "fiu":
                raise ValueError(f"{name!r} has the type {values.dtype}")
        return content
    except Exception as error:  # of a dozen types, with which numpy and zipfile meet damage
        reason = str(error).partition("\n")[0] or type(error).__name__
        raise ValueError(f"{path} must be a whole .npz of numbers; {reason}.") from error


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
    content = read_settings_text(arrays[SETTINGS].tobytes().rstrip(b"\0"), path)
    for name, needed in NEEDED.items():
        found = content.get(name, needed)
        if found != needed and not (found == [] and not needed):
            raise ValueError(f"{path}: {name} must be {needed!r}; got {found!r}.")
    sizes = _vocabulary_sizes(arrays, path)
    return Settings(
        model=_model_config(content, arrays, sizes, path),
        vocab_sizes=sizes,
        separate_vocabularies="Wemb" not in arrays,
        languages=("", ""),
        beam_size=4,
        length_penalty=nearest_alpha(1.0),
        pad=sizes[1] - 1,
        eos=0,
        start=sizes[1] - 1,
    )


def _model_config(
    content: dict[str, Any], arrays: dict[str, np.ndarray], sizes: tuple[int, int], path: Path
) -> ModelConfig:
    activation = content.get("transformer-ffn-activation")
    if activation not in ("relu", "swish"):
        raise ValueError(
            f"{path}: transformer-ffn-activation must be relu or swish; got {activation!r}."
        )
    depths = [_number(content, name, path) for name in ("enc-depth", "dec-depth")]
    if depths[0] != depths[1]:
        raise ValueError(
            f"{path}: enc-depth and dec-depth must be equal; got {depths[0]} and {depths[1]}. "
            "Models with a smaller decoder cannot be imported yet."
        )
    shared = "Wemb" in arrays
    tied = not any(name.startswith("decoder_ff_logit_out_W") for name in arrays)
    return ModelConfig(
        vocab_size=sizes[1],
        source_vocab_size=None if shared else sizes[0],
        num_layers=depths[0],
        d_model=_number(content, "dim-emb", path),
        d_ff=_number(content, "transformer-dim-ffn", path),
        num_heads=_number(content, "transformer-heads", path),
        activation=activation,
        norm_epsilon=EPSILON,
        positional_encoding="halves",
        embeddings="shared" if shared else "target_tied" if tied else "separate",
    )


def _number(content: dict[str, Any], name: str, path: Path) -> int:
    value = content.get(name)
    if not isinstance(value, str) or not re.fullmatch(r"[0-9]{1,9}", value):
        raise ValueError(f"{path}: {name} must be a whole number; got {value!r}.")
    return int(value)


def _float(content: dict[str, Any], name: str, path: Path) -> float:
    try:
        value = float(content[name])
    except (TypeError, ValueError):
        value = math.nan
    if not 0 <= value < 1000:
        raise ValueError(f"{path}: {name} must be a number of at least 0; got {content[name]!r}.")
    return value


def _vocabulary_sizes(arrays: dict[str, np.ndarray], path: Path) -> tuple[int, int]:
    """Return the sizes of source and target vocabulary, with <pad> added to each."""
    names = ("Wemb", "Wemb") if "Wemb" in arrays else ("encoder_Wemb", "decoder_Wemb")
    missing = [name for name in names if name not in arrays or arrays[name].ndim != 2]
    if missing:
        raise ValueError(f"{path} must hold the embeddings {missing[0]!r}, [vocab d_model].")
    source, target = (len(arrays[name]) + 1 for name in names)
    if source != target:
        raise ValueError(
            f"{path}: vocabularies must have the same size, because <pad> gets the next id; got "
            f"{source - 1:,} and {target - 1:,}."
        )
    return source, target


def hugging_face_names(arrays: dict[str, np.ndarray], config: ModelConfig) -> dict[str, np.ndarray]:
    """Return the tensors under the names, and in the layouts, of MarianMTModel.

    Matrices are [in out] in Marian, biases and norms [1 n]. Names that are not understood stay.
    """
    rest = {name: values for name, values in arrays.items() if name != SETTINGS}
    if config.num_layers > len(rest):  # before so many names are listed
        raise ValueError(
            f"an .npz must have the {config.num_layers:,} layers of its settings; it has "
            f"{len(rest):,} arrays."
        )
    weights: dict[str, np.ndarray] = {}
    for name, own in _names(config):
        if own in rest:
            values = rest.pop(own).astype(np.float32)
            weights[name] = values.T if values.ndim == 2 and "_W" in own[-4:] else values.squeeze()
    for name, own in (
        ("model.shared.weight", "Wemb"),
        ("model.encoder.embed_tokens.weight", "encoder_Wemb"),
        ("model.decoder.embed_tokens.weight", "decoder_Wemb"),
    ):
        if own in rest:
            weights[name] = _with_row(own, rest.pop(own).astype(np.float32))
    for own, transposed in (("decoder_ff_logit_out_W", True), ("decoder_ff_logit_out_Wt", False)):
        if own in rest:
            values = rest.pop(own).astype(np.float32)
            weights["lm_head.weight"] = _with_row(own, values.T if transposed else values)
    if (bias := rest.pop("decoder_ff_logit_out_b", None)) is not None:
        suppressed = np.full((1, 1), SUPPRESSED, np.float32)  # Marian has no <pad>
        weights[FINAL_BIAS] = np.concatenate([bias.reshape(1, -1), suppressed], axis=1)
    return {**weights, **rest}


def _with_row(name: str, table: np.ndarray) -> np.ndarray:
    """Return embeddings with a row of zeros for <pad>, with which the decoder starts."""
    if table.ndim != 2:
        raise ValueError(f"{name!r} of an .npz must be a matrix; its shape is {table.shape}.")
    return np.concatenate([table, np.zeros((1, table.shape[1]), table.dtype)])


def _names(config: ModelConfig) -> Iterator[tuple[str, str]]:
    """Yield the names in Hugging Face and in Marian of everything within layers."""
    for side in ("encoder", "decoder"):
        for number in range(config.num_layers):
            layer, own = f"model.{side}.layers.{number}", f"{side}_l{number + 1}"
            boxes = [("self_attn", "self"), ("encoder_attn", "context")]
            for box, name in boxes if side == "decoder" else boxes[:1]:
                for letter, projection in zip("qkvo", PROJECTIONS.values(), strict=True):
                    yield f"{layer}.{box}.{projection}.weight", f"{own}_{name}_W{letter}"
                    yield f"{layer}.{box}.{projection}.bias", f"{own}_{name}_b{letter}"
                yield f"{layer}.{box}_layer_norm.weight", f"{own}_{name}_Wo_ln_scale"
                yield f"{layer}.{box}_layer_norm.bias", f"{own}_{name}_Wo_ln_bias"
            for letter in "12":
                yield f"{layer}.fc{letter}.weight", f"{own}_ffn_W{letter}"
                yield f"{layer}.fc{letter}.bias", f"{own}_ffn_b{letter}"
            yield f"{layer}.final_layer_norm.weight", f"{own}_ffn_ffn_ln_scale"
            yield f"{layer}.final_layer_norm.bias", f"{own}_ffn_ffn_ln_bias"


def read_pieces(path: Path) -> dict[str, int]:
    """Return the ids of pieces, of a vocab.yml or a SentencePiece model, without <pad>."""
    if path.suffix == ".spm":
        processor: SentencePieceProcessor = read_processor(path.read_bytes(), path)
        return {processor.id_to_piece(number): number for number in range(len(processor))}
    return read_mapping(path.read_bytes(), path)


def segmenters(folder: Path, vocabularies: Sequence[Path]) -> list[Path]:
    """Return the SentencePiece models of source and target."""
    if all(path.suffix == ".spm" for path in vocabularies):
        return [vocabularies[0], vocabularies[-1]]
    own = [folder / "source.spm", folder / "target.spm"]
    if missing := [path.name for path in own if not path.is_file()]:
        raise ValueError(f"{folder} must have a file {missing[0]}; it is missing.")
    return own
