"""The settings of a Marian model in Hugging Face's format, each of which must be understood."""

import dataclasses
import shlex
from collections.abc import Collection
from pathlib import Path
from typing import Any

from flaxformer_min.config import ModelConfig
from flaxformer_min.interop.files import read_json
from flaxformer_min.interop.marian import EPSILON
from flaxformer_min.interop.marian_search import NAMES, SPECIAL_IDS, read_search
from flaxformer_min.interop.run_model import decoder_depth

ACTIVATIONS = {"relu": "relu", "swish": "swish", "silu": "swish", "gelu": "gelu"}

REQUIRED = {
    "model_type": "marian",
    "is_encoder_decoder": True,
    "scale_embedding": True,
}
"""Settings without which a model is another one."""

OPTIONAL = {
    "static_position_embeddings": True,
    "normalize_before": False,
    "normalize_embedding": False,
    "add_final_layer_norm": False,
    "is_decoder": False,
    "tie_encoder_decoder": False,
    "add_cross_attention": False,
    "pruned_heads": {},
}
"""Settings of the model that may be missing, or have this value."""

SIZES = {
    f"{side}_{name}"
    for side in ("encoder", "decoder")
    for name in ("layers", "ffn_dim", "attention_heads")
} | {"d_model", "vocab_size", *SPECIAL_IDS}
"""Settings that must be whole numbers."""

HEEDED = {
    "activation_function",
    "activation_dropout",
    "attention_dropout",
    "decoder_vocab_size",
    "dropout",
    "share_encoder_decoder_embeddings",
    "tie_word_embeddings",
}
"""Other settings of the model that are heeded."""

WITHOUT_EFFECT = {
    *("_name_or_path", "_num_labels", "add_bias_logits", "architectures", "_commit_hash"),
    *("_attn_implementation_autoset", "chunk_size_feed_forward", "classif_dropout"),
    *("classifier_dropout", "cross_attention_hidden_size", "decoder_layerdrop", "dtype"),
    *("encoder_layerdrop", "extra_pos_embeddings", "finetuning_task"),
    *("force_bos_token_to_be_generated", "gradient_checkpointing", "id2label", "init_std"),
    *("label2id", "max_position_embeddings", "num_hidden_layers", "output_past"),
    *("problem_type", "return_dict", "sep_token_id", "task_specific_params", "tf_legacy_loss"),
    *("tokenizer_class", "torch_dtype", "torchscript", "use_bfloat16"),
}
"""Settings of training or of the library. Positions have no limit here. What is null has no effect
either, whatever it is."""

KNOWN = {*REQUIRED, *OPTIONAL, *SIZES, *HEEDED, *WITHOUT_EFFECT, *NAMES}

TOKENS = {
    "pad": ("pad_token", "<pad>"),
    "unk": ("unk_token", "<unk>"),
    "eos": ("eos_token", "</s>"),
}
"""Settings of tokenizer_config.json that name the special tokens, and the usual names."""


@dataclasses.dataclass(frozen=True)
class Settings:
    """What the files of a model say besides weights and vocabularies.

    model:       with the vocabulary sizes of the files; see `with_vocabulary`.
    vocab_sizes: numbers of embeddings of source and target, as imported.
    languages:   of source and target; empty where they are not named.
    suppressed:  imported ids that the search may not produce, special tokens among them.
    ignored:     settings that were left out because the user said so.
    """

    model: ModelConfig
    vocab_sizes: tuple[int, int]
    languages: tuple[str, str]
    beam_size: int
    length_penalty: float
    min_length: int = 0
    suppressed: frozenset[int] = frozenset()
    ignored: dict[str, Any] = dataclasses.field(default_factory=dict)

    def with_vocabulary(self, sizes: list[int], output_bias: bool) -> ModelConfig:
        """Return the model's settings for vocabularies of these sizes."""
        source = None if self.model.source_vocab_size is None else sizes[0]
        return dataclasses.replace(
            self.model,
            vocab_size=sizes[1],
            source_vocab_size=source,
            output_bias=output_bias,
        )


@dataclasses.dataclass(frozen=True)
class Tokens:
    """The special and the added tokens of Hugging Face's tokenizer.

    pad, unk, eos: their pieces.
    ids:           of pad, eos and the decoder's start in the target's vocabulary.
    added:         ids of pieces that are not in vocab.json, or are split off a text all the same.
    """

    pad: str
    unk: str
    eos: str
    ids: dict[str, int]
    added: dict[str, int]


def read_settings(folder: Path, ignore: Collection[str] = ()) -> tuple[Settings, Tokens]:
    """Return the settings of a model. Raises ValueError for one that is not understood.

    ignore: settings to leave out.
    """
    path = folder / "config.json"
    if not path.exists():
        raise ValueError(f"{folder} must be a model of Hugging Face; it has no config.json.")
    config, generation = read_json(path), _optional(folder / "generation_config.json")
    search, config = _without_nulls({**config, **generation}), _without_nulls(config)
    search = {**search, **_single_ends(search)}
    config = {**config, **_single_ends(config)}
    search = {**{name: config[name] for name in SPECIAL_IDS if name in config}, **search}
    unknown = _check_known(config, search, folder, ignore)
    _check_model(config, path)
    sizes = _vocabulary_sizes(config, path)
    shared = _flag(config, "share_encoder_decoder_embeddings", path)
    if shared and sizes[0] != sizes[1]:
        raise ValueError(f"{path}: shared embeddings need one vocab_size; got two.")
    _check_ids(config, search, sizes[1], folder)
    found = read_search(search, sizes[1], folder, {*ignore} - {*unknown})
    tokenizer = _optional(folder / "tokenizer_config.json")
    settings = Settings(
        model=_model_config(config, shared, sizes, path),
        vocab_sizes=sizes,
        languages=_languages(tokenizer),
        beam_size=found.beam_size,
        length_penalty=found.length_penalty,
        min_length=found.min_length,
        suppressed=found.suppressed,
        ignored={**found.ignored, **unknown},
    )
    return settings, _tokens(tokenizer, config, folder)


def _without_nulls(settings: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in settings.items() if value is not None}


def _single_ends(settings: dict[str, Any]) -> dict[str, int]:
    """Return the ends that are lists of one, as newer versions of transformers may write them."""
    names = ("eos_token_id", "forced_eos_token_id")
    values = {name: settings[name] for name in names if isinstance(settings.get(name), list)}
    return {name: value[0] for name, value in values.items() if len(value) == 1}


def _optional(path: Path) -> dict[str, Any]:
    return read_json(path) if path.exists() else {}


def _check_known(
    config: dict[str, Any], search: dict[str, Any], folder: Path, ignore: Collection[str]
) -> dict[str, Any]:
    """Return the unknown settings to ignore. Raises ValueError for one that is not to be."""
    settings = {**config, **search}
    unknown = {name: settings[name] for name in sorted({*settings} - KNOWN)}
    for name in unknown:
        if name not in ignore:
            file = "config.json" if name in config else "generation_config.json"
            raise ValueError(
                f"{folder / file}: the setting {name!r} is not understood. To import the model "
                f"without it: --ignore {shlex.quote(name)}."
            )
    return unknown


def _check_model(config: dict[str, Any], path: Path) -> None:
    for name, needed in REQUIRED.items():
        if config.get(name) != needed:
            raise ValueError(f"{path}: {name} must be {needed!r}; got {config.get(name)!r:.80}.")
    for name, needed in OPTIONAL.items():
        if config.get(name, needed) != needed:
            raise ValueError(f"{path}: {name} must be {needed!r}; got {config[name]!r:.80}.")
    for name in sorted(SIZES):
        if type(config.get(name)) is not int or config[name] < 0:
            raise ValueError(
                f"{path}: {name} must be a whole number; got {config.get(name)!r:.80}."
            )
    for name in ("ffn_dim", "attention_heads"):
        encoder, decoder = config[f"encoder_{name}"], config[f"decoder_{name}"]
        if encoder != decoder:
            raise ValueError(
                f"{path}: encoder_{name} and decoder_{name} must be equal; got {encoder} and "
                f"{decoder}. A decoder may have fewer layers, but no narrower ones."
            )


def _vocabulary_sizes(config: dict[str, Any], path: Path) -> tuple[int, int]:
    """Return the numbers of embeddings of source and target."""
    source = config["vocab_size"]
    target = config.get("decoder_vocab_size") or source
    if type(target) is not int or target < 0:
        raise ValueError(f"{path}: decoder_vocab_size must be a whole number; got {target!r:.80}.")
    return source, target


def _check_ids(config: dict[str, Any], search: dict[str, Any], size: int, folder: Path) -> None:
    for name in SPECIAL_IDS:
        if config[name] >= size:
            raise ValueError(
                f"{folder / 'config.json'}: {name} must be below {size:,}; got {config[name]:,}."
            )
        if search[name] != config[name]:
            raise ValueError(
                f"{folder}: {name} must be the same in config.json and generation_config.json; got "
                f"{config[name]} and {search[name]!r:.80}."
            )


def _tokens(tokenizer: dict[str, Any], config: dict[str, Any], folder: Path) -> Tokens:
    path = folder / "tokenizer_config.json"
    if tokenizer.get("sp_model_kwargs"):
        raise ValueError(f"{path}: sp_model_kwargs are not understood; they must be empty.")
    names = {}
    for role, (setting, usual) in TOKENS.items():
        token = tokenizer.get(setting) or usual
        names[role] = token.get("content") if isinstance(token, dict) else token
        if not isinstance(names[role], str):
            raise ValueError(f"{path}: {setting} must be a piece; got {token!r:.80}.")
    ids = {"pad": "pad_token_id", "eos": "eos_token_id", "start": "decoder_start_token_id"}
    added = _added_tokens(tokenizer, folder)
    return Tokens(
        **names,
        ids={role: config[name] for role, name in ids.items()},
        added={piece: number for piece, number in added.items() if piece not in names.values()},
    )


def _added_tokens(tokenizer: dict[str, Any], folder: Path) -> dict[str, int]:
    """Return the ids of tokens that were added to the tokenizer, by their pieces."""
    path = folder / "tokenizer_config.json"
    listed = tokenizer.get("added_tokens_decoder") or {}
    if not isinstance(listed, dict):
        raise ValueError(f"{path}: added_tokens_decoder must be an object; got {listed!r:.80}.")
    added = _optional(folder / "added_tokens.json")
    for number, token in listed.items():
        piece = token.get("content") if isinstance(token, dict) else None
        if not isinstance(piece, str) or not number.isdecimal() or len(number) > 9:
            raise ValueError(
                f"{path}: an added token must have an id and content; got {token!r:.80}"
            )
        if token.get("single_word"):
            raise ValueError(
                f"{path}: the added token {piece!r} must not have single_word; this package splits "
                "it off wherever it is in a text."
            )
        added[piece] = int(number)
    for piece, number in added.items():
        if not piece or type(number) is not int:
            raise ValueError(
                f"{folder}: an added token must be text with an id; got {piece!r:.80}."
            )
    return added


def _model_config(
    config: dict[str, Any], shared: bool, sizes: tuple[int, int], path: Path
) -> ModelConfig:
    activation = config.get("activation_function")
    if not isinstance(activation, str) or activation not in ACTIVATIONS:
        raise ValueError(
            f"{path}: activation_function must be one of {', '.join(ACTIVATIONS)}; got "
            f"{activation!r}."
        )
    tied = _flag(config, "tie_word_embeddings", path)
    if shared and not tied:
        raise ValueError(f"{path}: embeddings that are shared must be tied to the output, too.")
    unshared = "target_tied" if tied else "separate"
    try:
        return ModelConfig(
            vocab_size=sizes[1],
            source_vocab_size=None if shared else sizes[0],
            num_layers=config["encoder_layers"],
            num_decoder_layers=decoder_depth(config["encoder_layers"], config["decoder_layers"]),
            d_model=config["d_model"],
            d_ff=config["encoder_ffn_dim"],
            num_heads=config["encoder_attention_heads"],
            dropout=config.get("dropout", 0.1),
            attention_dropout=config.get("attention_dropout", 0.0),
            feed_forward_dropout=config.get("activation_dropout", 0.0),
            activation=ACTIVATIONS[activation],
            norm_epsilon=EPSILON,
            positional_encoding="halves",
            embeddings="shared" if shared else unshared,
        )
    except (ValueError, ZeroDivisionError) as error:
        raise ValueError(f"{path}: {error}") from error


def _flag(config: dict[str, Any], name: str, path: Path) -> bool:
    value = config.get(name, True)
    if not isinstance(value, bool):
        raise ValueError(f"{path}: {name} must be true or false; got {value!r}.")
    return value


def _languages(tokenizer: dict[str, Any]) -> tuple[str, str]:
    names = [tokenizer.get(f"{side}_lang") for side in ("source", "target")]
    return (names[0], names[1]) if all(isinstance(name, str) for name in names) else ("", "")
