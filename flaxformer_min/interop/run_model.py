"""The trained model of a run as numpy arrays, which every export starts from."""

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from flaxformer_min.config import LENGTH_PENALTY_LIMIT, ModelConfig, SearchConfig
from flaxformer_min.data.imported_tokenizer import LANGUAGE_TAG, ImportedTokenizer
from flaxformer_min.model.positions import sinusoidal_encoding
from flaxformer_min.model.transformer import Transformer
from flaxformer_min.storage.run_folder import RunFolder, Tokenizers
from flaxformer_min.tokens import Batch, Tokens

ParamsTree = dict[str, Any]

TYPICAL_SHARE = 15 / (15 + 5)
"""L / (L + 5) for translations of usual length, for which two length penalties are made equal."""


class RunModel(NamedTuple):
    """What a run translates with.

    params: nested dictionaries of float32 arrays, as `Transformer` names them.
    """

    config: ModelConfig
    decoding: SearchConfig
    params: ParamsTree
    tokenizers: Tokenizers

    @property
    def source_embedding(self) -> ParamsTree:
        """The parameters of the input embedding of the encoder."""
        return self.params[_shared_or("source_embedding", self.config)]

    @property
    def target_embedding(self) -> ParamsTree:
        """The parameters of the input embedding of the decoder."""
        return self.params[_shared_or("target_embedding", self.config)]


def read_run(run: str | Path) -> RunModel:
    """Return the model that a run translates with, its parameters in float32.

    Raises ValueError for a folder that is no run, has no checkpoint, or was trained with a model
    other than this package's Transformer.
    """
    folder = RunFolder(run)
    config = folder.model_config()
    if config.architecture:
        raise ValueError(
            f"only this package's Transformer can be exported; {folder.path} was trained with "
            f"{config.architecture}."
        )
    params = jax.tree.map(np.array, jax.device_get(folder.params().params))
    return RunModel(config, folder.config().decoding, params, folder.tokenizers())


def layers(params: ParamsTree) -> Iterator[ParamsTree]:
    """Yield the parameters of each layer of an encoder or decoder, the lowest first."""
    for number in range(sum(name.startswith("layer_") for name in params)):
        yield params[f"layer_{number}"]


def depth(config: ModelConfig, side: str) -> int:
    """Return the number of layers of the "encoder" or "decoder"."""
    return config.decoder_depth if side == "decoder" else config.num_layers


def decoder_depth(encoder: int, decoder: int) -> int | None:
    """Return `ModelConfig.num_decoder_layers` for these numbers of layers."""
    return None if decoder == encoder else decoder


def leaf(params: ParamsTree, path: tuple[str, ...]) -> Any:
    """Return what nested dictionaries hold under these keys."""
    for name in path:
        params = params[name]
    return params


def param_shapes(config: ModelConfig) -> ParamsTree:
    """Return the shape of each parameter of a model; nothing is computed."""
    row = jax.ShapeDtypeStruct((1, 8), jnp.int32)
    batch = Batch(Tokens(row, row, row), Tokens(row, row, row))
    return jax.eval_shape(Transformer(config).init, jax.random.key(0), batch)["params"]


def position_table(config: ModelConfig, embedding: ParamsTree, positions: int) -> np.ndarray:
    """Return what is added to the embeddings, [positions d_model]; fewer if fewer were learned."""
    if config.positional_encoding == "learned":
        return embedding["positional_encoding"]["table"]
    if config.positional_encoding == "none":
        return np.zeros((positions, config.d_model), np.float32)
    table = sinusoidal_encoding(jnp.arange(positions), config.d_model, config.positional_encoding)
    return np.array(table)


def nearest_length_penalty(decoding: SearchConfig) -> float:
    """Return the exponent of the length that comes nearest to the run's own length penalty.

    CTranslate2 and Hugging Face divide by length ** penalty, we by ((5 + length) / 6) ** alpha.
    Around a length L both weigh one more token alike if penalty = alpha L / (L + 5).

    >>> nearest_length_penalty(SearchConfig(length_penalty=0.6))
    0.45
    """
    return round(decoding.length_penalty * TYPICAL_SHARE, 4)


def nearest_alpha(exponent: float) -> float:
    """Return the inverse of `nearest_length_penalty`, for a model that is imported.

    >>> nearest_alpha(0.45)
    0.6
    """
    return min(round(exponent / TYPICAL_SHARE, 4), LENGTH_PENALTY_LIMIT)


def segmentation_code(model: RunModel) -> str:
    """Return Python code that makes `pieces` of `lines` by `source_spm`, as the run segments them.

    An imported model has pieces for language tags and added tokens, which SentencePiece alone would
    spell.
    """
    tokenizer = model.tokenizers[0]
    if not isinstance(tokenizer, ImportedTokenizer):
        return "pieces = source_spm.encode(lines, out_type=str)"
    if tokenizer.symbols:
        return (
            "import re\n"
            f"symbols = {list(tokenizer.symbols)!r}\n"
            'split = re.compile("(" + "|".join(map(re.escape, symbols)) + ")")\n'
            "def segment(part):\n"
            f'    tag = re.match("{LANGUAGE_TAG.pattern}|", part, re.DOTALL)[0]'
            "  # one piece, such as >>deu<<\n"
            "    return [tag] * bool(tag) + source_spm.encode(part[len(tag) :], out_type=str)\n"
            "pieces = [\n"
            "    [piece for part in split.split(line)\n"
            "     for piece in ([part] if part in symbols else segment(part))]\n"
            "    for line in lines\n"
            "]"
        )
    return (
        "import re\n"
        f'tags = [re.match("{LANGUAGE_TAG.pattern}|", line, re.DOTALL)[0] for line in lines]'
        "  # one piece, such as >>deu<<\n"
        "rests = source_spm.encode(\n"
        "    [line[len(tag) :] for line, tag in zip(lines, tags)], out_type=str\n"
        ")\n"
        "pieces = [[tag, *rest] if tag else rest for tag, rest in zip(tags, rests)]"
    )


def check_new_folder(out: str | Path) -> Path:
    """Return the path of a folder to write. Raises ValueError if it exists and is not empty."""
    path = Path(out)
    if path.exists() and (not path.is_dir() or any(path.iterdir())):
        raise ValueError(f"{path} must be a new or an empty folder; it exists. Choose another.")
    return path


def describe(config: ModelConfig) -> str:
    """Return the model's sizes in a line for people."""
    sizes = {**dataclasses.asdict(config), "num_decoder_layers": config.decoder_depth}
    names = (
        "num_layers",
        "num_decoder_layers",
        "d_model",
        "d_ff",
        "num_heads",
        "norm",
        "embeddings",
        "vocab_size",
    )
    return ", ".join(f"{name} {sizes[name]}" for name in names)


def _shared_or(name: str, config: ModelConfig) -> str:
    return "embedding" if config.embeddings == "shared" else name
