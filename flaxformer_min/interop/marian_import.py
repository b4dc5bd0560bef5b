"""Import of Marian models, such as OPUS-MT's, as run folders.

Read are folders in Hugging Face's format, and Marian's own .npz (see marian_npz.py).

Everything in the files must be understood: a setting, tensor or token that is not is an error that
names it. Nothing is executed or unpickled.
"""

import dataclasses
import json
import logging
import shlex
from collections.abc import Collection
from pathlib import Path
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from flaxformer_min.config import Config, DataConfig, ModelConfig, SearchConfig
from flaxformer_min.data.corpora import GIVEN
from flaxformer_min.interop.files import read_file, read_json
from flaxformer_min.interop.marian_folder import MarianFiles, find_files, search_settings
from flaxformer_min.interop.marian_npz import hugging_face_names, read_npz, settings_of
from flaxformer_min.interop.marian_settings import Settings, Tokens, read_settings
from flaxformer_min.interop.marian_tensors import FINAL_BIAS, bias_path, tensors
from flaxformer_min.interop.marian_vocabulary import read_vocabulary
from flaxformer_min.interop.run_model import (
    ParamsTree,
    check_new_folder,
    leaf,
    param_shapes,
)
from flaxformer_min.interop.safetensors import read_safetensors
from flaxformer_min.interop.sentencepiece_models import sentencepiece_model
from flaxformer_min.interop.vocabulary import Specials, Vocabulary, make_vocabulary, pieces_by_id
from flaxformer_min.languages import check_languages, join_languages
from flaxformer_min.model.positions import sinusoidal_encoding
from flaxformer_min.storage.checkpoint import check_path
from flaxformer_min.storage.run_folder import RunFolder
from flaxformer_min.system.files import folder_atomically, write_atomically

LOGGER = logging.getLogger("flaxformer_min")

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


def import_marian(model: Path, run: Path, ignore: Collection[str] = ()) -> None:
    """Make the run folder `run` from a folder of Hugging Face, from one of Marian, or an .npz."""
    run = check_new_folder(run)
    if not model.is_dir() and not (model.suffix == ".npz" and model.exists()):
        raise ValueError(f"a model is a folder, or an .npz of Marian; there is none at {model}.")
    own = ("decoder.yml",) if (model / "config.json").exists() else ("*decoder.yml", "*.npz")
    of_marian = model.suffix == ".npz" or any(any(model.glob(each)) for each in own)
    marian = read_npz_model(model, ignore) if of_marian else read_marian(model, ignore)
    for name in ignore:
        if name not in marian.settings.ignored:
            raise ValueError(
                "only settings of a search, or unknown ones, can be ignored; "
                f"{name!r} is none that {model} sets. Leave it out."
            )
    write_run(marian, run)


def read_marian(folder: Path, ignore: Collection[str] = ()) -> MarianModel:
    """Return the model in a folder of Hugging Face."""
    settings, tokens = read_settings(folder, ignore)
    path = _weights_file(folder)
    weights = read_safetensors(path)
    vocabularies = _vocabularies(folder, settings, tokens)
    segmenters = _segmenters([folder / "source.spm", folder / "target.spm"], vocabularies)
    return MarianModel(settings, weights, path, vocabularies, segmenters)


def read_npz_model(model: Path, ignore: Collection[str] = ()) -> MarianModel:
    """Return the model in a folder with Marian's own files, or of an .npz in such a folder."""
    files = find_files(model)
    path, arrays = files.model, read_npz(files.model)
    settings = settings_of(arrays, path)
    settings = dataclasses.replace(settings, **search_settings(files.description, ignore))
    both = (files.vocabularies[0], files.vocabularies[-1])
    source, target = (
        read_vocabulary(file, size) for file, size in zip(both, settings.vocab_sizes, strict=True)
    )
    if settings.model.embeddings == "shared":
        if source.pieces != target.pieces:
            raise ValueError(
                f"{path} shares one table of embeddings; its vocabularies must be equal."
            )
        target = source
    segmenters = _segmenters(_sentencepiece_files(files), (source, target))
    weights = hugging_face_names(arrays, settings.model)
    return MarianModel(settings, weights, path, (source, target), segmenters)


def _sentencepiece_files(files: MarianFiles) -> list[Path]:
    """Return the files that segment source and target: the vocabularies, or those beside them."""
    own = [files.vocabularies[0], files.vocabularies[-1]]
    names = ("source.spm", "target.spm")
    pairs = zip(own, names, strict=True)
    return [file if file.suffix == ".spm" else files.model.parent / name for file, name in pairs]


def _segmenters(
    files: list[Path], vocabularies: tuple[Vocabulary, Vocabulary]
) -> tuple[bytes, bytes]:
    """Return the SentencePiece models of both sides, with the ids of their vocabularies."""
    source, target = (
        sentencepiece_model(read_file(file), vocabulary, file)
        for file, vocabulary in zip(files, vocabularies, strict=True)
    )
    return source, target


def write_run(marian: MarianModel, run: Path) -> None:
    """Write a run folder that translates with the model: settings, tokenizers and a checkpoint."""
    check_path(run)
    config = _config(marian)
    params = convert_weights(config.model, marian)
    with folder_atomically(run) as scratch:
        folder = RunFolder(scratch)
        write_atomically(scratch / "config.json", config.to_json())
        if marian.settings.ignored:
            note = {"model": marian.path.parent.name, "ignored": marian.settings.ignored}
            write_atomically(scratch / "import.json", json.dumps(note, indent=2) + "\n")
        for side, model in zip(("source", "target"), marian.segmenters, strict=True):
            write_atomically(scratch / f"{side}_tokenizer.model", model)
        folder.tokenizers()
        checkpoints = folder.open_checkpoints(config)
        checkpoints.save(0, {"params": params}, {"identity": folder.identity()})
        del params  # of which Orbax has a copy, while it writes
        checkpoints.close()


def convert_weights(config: ModelConfig, marian: MarianModel) -> ParamsTree:
    """Return our parameters. Raises ValueError for missing, unknown or misshapen tensors.

    Each of `marian.weights` is removed once it is converted, or both would be in memory.
    """
    deepest = max(config.num_layers, config.decoder_depth)
    if deepest > len(marian.weights):  # before the model is laid out
        raise ValueError(
            f"{marian.path} must have the {deepest:,} layers that the settings give it; "
            f"it has {len(marian.weights):,} tensors."
        )
    source, target = marian.vocabularies
    weights = marian.weights
    weights.setdefault(FINAL_BIAS, np.zeros((1, target.size), np.float32))
    _check_names({each.name for each in tensors(config)}, marian)
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
            shape[axis] = vocabulary.size
        shape = shape[::-1] if each.is_kernel else shape
        values = _take(weights, each.name, shape, marian.path)
        values = values.T if each.is_kernel else values
        if vocabulary is not None:
            values = vocabulary.reorder(values, axis)
        _set(params, each.path, np.ascontiguousarray(values))
    bias = _take(weights, FINAL_BIAS, [1, target.size], marian.path)
    if (path := bias_path(config)) is not None:
        _set(params, path, target.reorder_bias(bias[0]))
    return params


def _take(weights: dict[str, np.ndarray], name: str, shape: list[int], path: Path) -> np.ndarray:
    values = weights.pop(name)
    if list(values.shape) != shape:
        raise ValueError(
            f"{path}: {name!r} must have the shape {shape} that the settings give it; it has "
            f"{list(values.shape)}."
        )
    if not np.isfinite(values).all():
        raise ValueError(f"{path}: {name!r} must be finite; some of its numbers are not.")
    return values


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


def _vocabularies(
    folder: Path, settings: Settings, tokens: Tokens
) -> tuple[Vocabulary, Vocabulary]:
    """Return source and target vocabulary; one object if they share a table of embeddings."""
    shared = settings.model.embeddings == "shared"
    path = folder / ("vocab.json" if shared else "target_vocab.json")
    content = _content(path, settings.vocab_sizes[1], tokens)
    for name, role in ((tokens.pad, "pad"), (tokens.eos, "eos")):
        if content.get(name) != tokens.ids[role]:
            raise ValueError(
                f"{path} must give {name!r} the id {tokens.ids[role]}, as the model's settings do; "
                f"got {content.get(name)!r:.80}."
            )
    start = next((name for name, number in content.items() if number == tokens.ids["start"]), None)
    target = _vocabulary(path, content, settings.vocab_sizes[1], tokens, tokens.ids["start"])
    if shared:
        return target, target
    path = folder / "vocab.json"
    content = _content(path, settings.vocab_sizes[0], tokens)
    source_start = content.get(start) if start is not None else None
    return _vocabulary(path, content, settings.vocab_sizes[0], tokens, source_start), target


def _content(path: Path, size: int, tokens: Tokens) -> dict[str, Any]:
    """Return the ids of a vocab.json and of the added tokens that have an embedding."""
    content = read_json(path)
    for piece, number in tokens.added.items():
        if content.get(piece, number) != number:
            raise ValueError(
                f"{path} must give {piece!r} the id of the added token, {number}; got "
                f"{content[piece]!r:.80}."
            )
        if number < size:
            content[piece] = number
    return content


def _vocabulary(
    path: Path, content: dict[str, Any], size: int, tokens: Tokens, start: int | None
) -> Vocabulary:
    pieces = pieces_by_id(content, path, size)
    for name in (tokens.unk, tokens.eos):
        if name not in content:
            raise ValueError(f"{path} must have the piece {name!r}; it is missing.")
    specials = Specials(content.get(tokens.pad), content[tokens.unk], start, content[tokens.eos])
    return make_vocabulary(pieces, specials, [piece for piece in tokens.added if piece in content])


def _config(marian: MarianModel) -> Config:
    settings, target = marian.settings, marian.vocabularies[1]
    bias = marian.weights.get(FINAL_BIAS)
    tied = settings.model.embeddings != "separate"
    has_bias = bool(target.added) or (bias is not None and bool(bias.any()))
    return Config(
        data=DataConfig(
            corpus=GIVEN,
            languages=_languages(settings.languages),
            tokenizers="imported",
            normalization=None,
        ),
        model=settings.with_vocabulary(
            [len(each.pieces) for each in marian.vocabularies], output_bias=tied and has_bias
        ),
        decoding=SearchConfig(
            beam_size=settings.beam_size,
            length_penalty=settings.length_penalty,
            min_length=settings.min_length,
            suppressed=tuple(sorted({*target.our_ids(settings.suppressed), *target.unnamed})),
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


def _check_names(needed: Collection[str], marian: MarianModel) -> None:
    """Raise ValueError for a tensor that is missing, or one too many.

    Some files repeat tied weights or hold the table of positions; anything else is unknown.
    """
    for name in sorted({*needed} - {*marian.weights}):
        raise ValueError(f"{marian.path} must have the tensor {name!r}; it is missing.")
    for name in sorted({*marian.weights} - {*needed, FINAL_BIAS}):
        values = marian.weights.pop(name)
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
