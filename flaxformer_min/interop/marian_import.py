"""Import of Marian models, such as OPUS-MT's, as run folders.

Read are folders in Hugging Face's format, and Marian's own .npz (see marian_npz.py).

Everything in the files must be understood: a setting, tensor or token that is not is an error that
names it. Nothing is executed or unpickled.
"""

import dataclasses
import shlex
from pathlib import Path
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from flaxformer_min.config import Config, DataConfig, ModelConfig, SearchConfig
from flaxformer_min.data.corpora import GIVEN
from flaxformer_min.interop.marian_npz import (
    find_model,
    hugging_face_names,
    read_npz,
    read_pieces,
    search_settings,
    segmenters,
    settings_of,
)
from flaxformer_min.interop.marian_settings import Settings, read_settings
from flaxformer_min.interop.marian_tensors import FINAL_BIAS, bias_path, tensors
from flaxformer_min.interop.run_model import (
    ParamsTree,
    check_new_folder,
    leaf,
    param_shapes,
)
from flaxformer_min.interop.safetensors import parse_json, read_safetensors
from flaxformer_min.interop.vocabulary import (
    Vocabulary,
    make_vocabulary,
    read_vocabulary,
    sentencepiece_model,
)
from flaxformer_min.languages import check_languages, join_languages
from flaxformer_min.model.positions import sinusoidal_encoding
from flaxformer_min.storage.checkpoint import check_path
from flaxformer_min.storage.run_folder import RunFolder
from flaxformer_min.system.files import folder_atomically, write_atomically

WEIGHTS = "model.safetensors"

PICKLED = "pytorch_model.bin"
"""Weights in a format that can execute code when it is read."""

OTHER_WEIGHTS = ("rust_model.ot", "tf_model.h5", "flax_model.msgpack")
"""Weights of other libraries."""

TOLERANCE = 4e-3
"""Of a saved table of positions: more than half a step of bfloat16, in which it may be stored."""


class MarianModel(NamedTuple):
    """A Marian model as read.

    weights:      by the names of `MarianMTModel`, as float32.
    path:         the file that has them.
    vocabularies: of source and target; one object where they share it.
    segmenters:   the bytes of both SentencePiece models.
    """

    settings: Settings
    weights: dict[str, np.ndarray]
    path: Path
    vocabularies: tuple[Vocabulary, Vocabulary]
    segmenters: tuple[bytes, bytes]


def import_marian(folder: Path, run: Path) -> None:
    """Make the run folder `run` from a folder of Hugging Face, or of Marian itself."""
    run = check_new_folder(run)
    if not folder.is_dir():
        raise ValueError(f"a model is a folder; there is none at {folder}.")
    of_marian = not (folder / "config.json").exists() and any(folder.glob("*.npz"))
    of_marian = of_marian or (folder / "decoder.yml").exists()
    write_run(read_npz_model(folder) if of_marian else read_marian(folder), run)


def read_marian(folder: Path) -> MarianModel:
    """Return the model in a folder of Hugging Face."""
    settings = read_settings(folder)
    path = _weights_file(folder)
    weights = read_safetensors(path)
    source = _read_vocabulary(folder / "vocab.json", settings, settings.vocab_sizes[0])
    target = source
    if settings.separate_vocabularies:
        target = _read_vocabulary(folder / "target_vocab.json", settings, settings.vocab_sizes[1])
    segmenters = tuple(
        sentencepiece_model(read_file(folder / name), vocabulary, folder / name)
        for name, vocabulary in (("source.spm", source), ("target.spm", target))
    )
    return MarianModel(settings, weights, path, (source, target), segmenters)


def read_npz_model(folder: Path) -> MarianModel:
    """Return the model in a folder with Marian's own files."""
    path, files = find_model(folder)
    arrays = read_npz(path)
    settings = dataclasses.replace(settings_of(arrays, path), **search_settings(folder))
    vocabularies = []
    for file, size in zip((files[0], files[-1]), settings.vocab_sizes, strict=True):
        content = read_pieces(file)
        if "<pad>" in content:
            raise ValueError(f"{file}: '<pad>' is not understood; Marian has none.")
        vocabularies.append(_vocabulary(file, {**content, "<pad>": size - 1}, settings, size))
    source, target = vocabularies
    if not settings.separate_vocabularies and source.pieces != target.pieces:
        raise ValueError(f"{path} shares one table of embeddings; its vocabularies must be equal.")
    models = tuple(
        sentencepiece_model(read_file(file), vocabulary, file)
        for file, vocabulary in zip(segmenters(folder, files), vocabularies, strict=True)
    )
    weights = hugging_face_names(arrays, settings.model)
    return MarianModel(settings, weights, path, (source, target), models)


def write_run(marian: MarianModel, run: Path) -> None:
    """Write a run folder that translates with the model: settings, tokenizers and a checkpoint."""
    check_path(run)
    config = _config(marian)
    params = convert_weights(config.model, marian)
    with folder_atomically(run) as scratch:
        folder = RunFolder(scratch)
        write_atomically(scratch / "config.json", config.to_json())
        for side, model in zip(("source", "target"), marian.segmenters, strict=True):
            write_atomically(scratch / f"{side}_tokenizer.model", model)
        folder.tokenizers()
        checkpoints = folder.open_checkpoints(config)
        checkpoints.save(0, {"params": params}, {"identity": folder.identity()})
        checkpoints.close()


def convert_weights(config: ModelConfig, marian: MarianModel) -> ParamsTree:
    """Return our parameters. Raises ValueError for missing, unknown or misshapen tensors."""
    if config.num_layers > len(marian.weights):  # before a model of so many layers is laid out
        raise ValueError(
            f"{marian.path} must have the {config.num_layers:,} layers that the settings give it; "
            f"it has {len(marian.weights):,} tensors."
        )
    source, target = marian.vocabularies
    weights = dict(marian.weights)
    shapes = param_shapes(config)
    params: ParamsTree = {}
    for each in tensors(config):
        vocabulary, axis = None, 0
        if each.path[-1] == "table":
            vocabulary = source if "source" in each.path[0] else target
        elif each.path[0] == "output_projection":
            vocabulary, axis = target, 1
        shape = list(leaf(shapes, each.path).shape)
        if vocabulary is not None:
            shape[axis] -= vocabulary.added
        shape = shape[::-1] if each.is_kernel else shape
        values = _take(weights, each.name, shape, marian.path)
        values = values.T if each.is_kernel else values
        if vocabulary is not None:
            values = vocabulary.reorder(values, axis)
        _set(params, each.path, np.ascontiguousarray(values))
    weights.setdefault(FINAL_BIAS, np.zeros((1, _imported_size(target)), np.float32))
    bias = _take(weights, FINAL_BIAS, [1, _imported_size(target)], marian.path)
    if (path := bias_path(config)) is not None:
        _set(params, path, target.reorder_bias(bias[0]))
    _check_rest(weights, marian)
    return params


def _imported_size(vocabulary: Vocabulary) -> int:
    return len(vocabulary.pieces) - vocabulary.added


def _take(weights: dict[str, np.ndarray], name: str, shape: list[int], path: Path) -> np.ndarray:
    if name not in weights:
        raise ValueError(f"{path} must have the tensor {name!r}; it is missing.")
    values = weights.pop(name)
    if list(values.shape) != shape:
        raise ValueError(
            f"{path}: {name!r} must have the shape {shape} that the settings give it; it has "
            f"{list(values.shape)}."
        )
    if not np.isfinite(values).all():
        raise ValueError(f"{path}: {name!r} must be finite; some of its numbers are not.")
    return values


def read_file(path: Path) -> bytes:
    """Return a file's bytes. Raises ValueError if there is none."""
    if not path.is_file():
        raise ValueError(f"{path.parent} must have a file {path.name}; it is missing.")
    return path.read_bytes()


def _weights_file(folder: Path) -> Path:
    path = folder / WEIGHTS
    if path.is_file():
        return path
    if (folder / f"{WEIGHTS}.index.json").exists():
        raise ValueError(f"{folder} holds its weights in parts; save it with one {WEIGHTS}.")
    if not (folder / PICKLED).exists():
        found = [name for name in OTHER_WEIGHTS if (folder / name).exists()]
        other = f" It has {found[0]}, which is not read." if found else ""
        raise ValueError(f"{folder} must have a file {WEIGHTS}; it is missing.{other}")
    name = repr(str(folder))
    code = "from transformers import MarianMTModel as M; "
    code += f"M.from_pretrained({name}).save_pretrained({name})"
    raise ValueError(
        f"{folder} has its weights as {PICKLED}, which is not read, because a pickle may execute "
        f"anything. Convert it: python -c {shlex.quote(code)}."
    )


def _read_vocabulary(path: Path, settings: Settings, size: int) -> Vocabulary:
    return _vocabulary(path, parse_json(read_file(path), path), settings, size)


def _vocabulary(path: Path, content: dict[str, Any], settings: Settings, size: int) -> Vocabulary:
    pieces = read_vocabulary(content, path, size)
    for name, number in settings.named_specials.items():
        if content.get(name) != number:
            raise ValueError(
                f"{path} must give {name!r} the id {number}, as the model's settings do; got "
                f"{content.get(name)!r}."
            )
    if "<unk>" not in content:
        raise ValueError(f"{path} must have the piece '<unk>'; it is missing.")
    return make_vocabulary(pieces, settings.specials(content["<unk>"]))


def _config(marian: MarianModel) -> Config:
    settings, target = marian.settings, marian.vocabularies[1]
    bias = marian.weights.get(FINAL_BIAS)
    tied = settings.model.embeddings != "separate"
    has_bias = target.added or (bias is not None and bool(bias.any()))
    return Config(
        data=DataConfig(
            corpus=GIVEN, languages=_languages(settings.languages), tokenizers="imported"
        ),
        model=settings.with_vocabulary(
            [len(each.pieces) for each in marian.vocabularies], output_bias=tied and has_bias
        ),
        decoding=SearchConfig(
            beam_size=settings.beam_size,
            length_penalty=settings.length_penalty,
            suppressed=target.our_ids(settings.suppressed),
        ),
    )


def _languages(pair: tuple[str, str]) -> str:
    """Return the languages as a setting, or nothing where they are not two names."""
    languages = join_languages(*pair)
    try:
        check_languages(languages)
    except ValueError:
        return ""
    return languages


def _set(params: ParamsTree, path: tuple[str, ...], values: np.ndarray) -> None:
    for name in path[:-1]:
        params = params.setdefault(name, {})
    params[path[-1]] = values


def _check_rest(weights: dict[str, np.ndarray], marian: MarianModel) -> None:
    """Some files repeat tied weights or hold the table of positions; anything else is unknown."""
    for name, values in weights.items():
        if name.endswith("embed_positions.weight"):
            _check_positions(name, values, marian)
            continue
        tied = ("model.shared.weight", "model.decoder.embed_tokens.weight")
        twins = [marian.weights[one] for one in tied if one in marian.weights and one != name]
        repeated = name == "lm_head.weight" or name.endswith("embed_tokens.weight")
        if not repeated or not any(np.array_equal(values, twin) for twin in twins):
            raise ValueError(f"{marian.path}: the tensor {name!r} is not understood.")


def _check_positions(name: str, values: np.ndarray, marian: MarianModel) -> None:
    d_model = marian.settings.model.d_model
    if values.ndim == 2 and values.shape[1] == d_model:
        expected = sinusoidal_encoding(jnp.arange(len(values)), d_model, "halves")
        if np.abs(values - np.asarray(expected)).max(initial=0) < TOLERANCE:
            return
    raise ValueError(f"{marian.path}: {name!r} must hold sines and then cosines; it holds others.")
