"""The settings of a Marian model in Hugging Face's format, each of which must be understood."""

import dataclasses
from pathlib import Path
from typing import Any

from flaxformer_min.config import ModelConfig
from flaxformer_min.interop.marian import EPSILON
from flaxformer_min.interop.run_model import nearest_alpha
from flaxformer_min.interop.safetensors import parse_json
from flaxformer_min.interop.vocabulary import Specials

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
    "forced_bos_token_id": None,
    "tie_encoder_decoder": False,
    "add_cross_attention": False,
    "pruned_heads": {},
    "begin_suppress_tokens": None,
    "no_repeat_ngram_size": 0,
    "encoder_no_repeat_ngram_size": 0,
    "min_length": 0,
    "repetition_penalty": 1.0,
    "num_beam_groups": 1,
    "diversity_penalty": 0.0,
    "do_sample": False,
    "prefix": None,
}
"""Settings that may be missing, or have this value."""

SPECIAL_IDS = ("pad_token_id", "eos_token_id", "decoder_start_token_id")

SIZES = {
    f"{side}_{name}"
    for side in ("encoder", "decoder")
    for name in ("layers", "ffn_dim", "attention_heads")
} | {"d_model", "vocab_size", *SPECIAL_IDS}
"""Settings that must be whole numbers."""

READ = {
    "activation_function",
    "activation_dropout",
    "attention_dropout",
    "bad_words_ids",
    "decoder_vocab_size",
    "dropout",
    "forced_eos_token_id",
    "length_penalty",
    "num_beams",
    "share_encoder_decoder_embeddings",
    "suppress_tokens",
    "tie_word_embeddings",
}
"""Other settings that are heeded."""

WITHOUT_EFFECT = {
    *("_from_model_config", "_name_or_path", "_num_labels", "add_bias_logits", "architectures"),
    *("bos_token_id", "chunk_size_feed_forward", "classif_dropout", "classifier_dropout"),
    *("decoder_layerdrop", "dtype", "early_stopping", "encoder_layerdrop", "extra_pos_embeddings"),
    *("force_bos_token_to_be_generated", "gradient_checkpointing", "id2label", "init_std"),
    *("label2id", "max_length", "max_position_embeddings", "num_hidden_layers"),
    *("num_return_sequences", "output_attentions", "output_hidden_states", "output_past"),
    *("output_scores", "problem_type", "return_dict", "return_dict_in_generate", "temperature"),
    *("task_specific_params", "tokenizer_class", "top_k", "top_p", "torch_dtype", "torchscript"),
    *("transformers_version", "use_bfloat16", "use_cache", "renormalize_logits"),
}
"""Settings of training, of the library or of sampling. Positions have no limit here. What is null
has no effect either, whatever it is."""

TOKENS = {"eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<pad>"}


@dataclasses.dataclass(frozen=True)
class Settings:
    """What config.json, generation_config.json and tokenizer_config.json say.

    model:       with the vocabulary sizes of the files; see `with_vocabulary`.
    vocab_sizes: of source and target, as imported.
    languages:   of source and target; empty where they are not named.
    suppressed:  imported ids that the search may not produce, special tokens among them.
    """

    model: ModelConfig
    vocab_sizes: tuple[int, int]
    separate_vocabularies: bool
    languages: tuple[str, str]
    beam_size: int
    length_penalty: float
    pad: int
    eos: int
    start: int
    suppressed: frozenset[int] = frozenset()

    @property
    def named_specials(self) -> dict[str, int]:
        """The ids that vocab.json must repeat."""
        return {"<pad>": self.pad, "</s>": self.eos}

    def specials(self, unk: int) -> Specials:
        """Return the ids of all special tokens."""
        return Specials(pad=self.pad, unk=unk, start=self.start, eos=self.eos)

    def with_vocabulary(self, sizes: list[int], output_bias: bool) -> ModelConfig:
        """Return the model's settings for vocabularies of these sizes."""
        source = None if self.model.source_vocab_size is None else sizes[0]
        return dataclasses.replace(
            self.model,
            vocab_size=sizes[1],
            source_vocab_size=source,
            output_bias=output_bias,
        )


def read_settings(folder: Path) -> Settings:
    """Return the settings of a model. Raises ValueError for one that is not understood."""
    path = folder / "config.json"
    if not path.is_file():
        raise ValueError(f"{folder} must be a model of Hugging Face; it has no config.json.")
    config = parse_json(path.read_bytes(), path)
    generation = _optional(folder / "generation_config.json")
    tokenizer = _optional(folder / "tokenizer_config.json")
    search, config = _without_nulls({**config, **generation}), _without_nulls(config)
    _check_settings(config, path)
    _check_settings(search, folder / "generation_config.json")
    _check_tokenizer(tokenizer, folder)
    start, pad = config["decoder_start_token_id"], config["pad_token_id"]
    source_size = config["vocab_size"]
    target_size = config.get("decoder_vocab_size") or source_size
    if type(target_size) is not int or target_size < 0:
        raise ValueError(f"{path}: decoder_vocab_size must be a whole number; got {target_size!r}.")
    shared = _flag(config, "share_encoder_decoder_embeddings", path)
    if shared and source_size != target_size:
        raise ValueError(f"{path}: shared embeddings need one vocab_size; got two.")
    _check_id_range(config, target_size, path)
    _check_same_specials(config, search, folder)
    suppressed = _suppressed(search, target_size, folder)
    return Settings(
        model=_model_config(config, shared, (source_size, target_size), path),
        vocab_sizes=(source_size, target_size),
        separate_vocabularies=not shared,
        languages=_languages(tokenizer),
        beam_size=_number(search, "num_beams", 4, folder),
        length_penalty=_length_penalty(search, folder),
        pad=pad,
        eos=config["eos_token_id"],
        start=start,
        suppressed=suppressed,
    )


def _without_nulls(settings: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in settings.items() if value is not None}


def _optional(path: Path) -> dict[str, Any]:
    return parse_json(path.read_bytes(), path) if path.is_file() else {}


def _check_settings(config: dict[str, Any], path: Path) -> None:
    known = {*REQUIRED, *OPTIONAL, *SIZES, *READ, *WITHOUT_EFFECT}
    if unknown := sorted(set(config) - known):
        raise ValueError(f"{path}: the setting {unknown[0]!r} is not understood.")
    for name, needed in REQUIRED.items():
        if config.get(name) != needed:
            raise ValueError(f"{path}: {name} must be {needed!r}; got {config.get(name)!r}.")
    for name, needed in OPTIONAL.items():
        if config.get(name, needed) != needed:
            raise ValueError(f"{path}: {name} must be {needed!r}; got {config[name]!r}.")
    for name in sorted(SIZES):
        if type(config.get(name)) is not int or config[name] < 0:
            raise ValueError(f"{path}: {name} must be a whole number; got {config.get(name)!r}.")
    for name in ("layers", "ffn_dim", "attention_heads"):
        encoder, decoder = config[f"encoder_{name}"], config[f"decoder_{name}"]
        if encoder != decoder:
            raise ValueError(
                f"{path}: encoder_{name} and decoder_{name} must be equal; got {encoder} and "
                f"{decoder}. Models with a smaller decoder cannot be imported yet."
            )


def _check_tokenizer(tokenizer: dict[str, Any], folder: Path) -> None:
    path = folder / "tokenizer_config.json"
    for name, needed in TOKENS.items():
        token = tokenizer.get(name, needed)
        token = token.get("content") if isinstance(token, dict) else token
        if token != needed:
            raise ValueError(f"{path}: {name} must be {needed!r}; got {token!r}.")
    if tokenizer.get("sp_model_kwargs"):
        raise ValueError(f"{path}: sp_model_kwargs are not understood; they must be empty.")
    if (folder / "added_tokens.json").exists():
        raise ValueError(f"{folder}: added_tokens.json is not understood.")


def _suppressed(search: dict[str, Any], size: int, folder: Path) -> frozenset[int]:
    """Return the imported ids that the search may not produce."""
    eos = search["eos_token_id"]
    if search.get("forced_eos_token_id", eos) != eos:
        raise ValueError(f"{folder}: forced_eos_token_id must be eos_token_id.")
    bad, tokens = search.get("bad_words_ids", []), search.get("suppress_tokens", [])
    for name, value in (("bad_words_ids", bad), ("suppress_tokens", tokens)):
        if not isinstance(value, list):
            raise ValueError(f"{folder}: {name} must be a list; got {value!r}.")
    words = [*bad, *([number] for number in tokens)]
    for each in words:
        if not isinstance(each, list) or len(each) != 1:
            raise ValueError(f"{folder}: bad_words_ids may hold single tokens only; got {each!r}.")
        if type(each[0]) is not int or not 0 <= each[0] < size or each[0] == eos:
            raise ValueError(
                f"{folder}: bad_words_ids and suppress_tokens must be ids below {size:,} other "
                f"than that of the end; got {each[0]!r}."
            )
    return frozenset(number for (number,) in words)


def _check_same_specials(config: dict[str, Any], search: dict[str, Any], folder: Path) -> None:
    for name in SPECIAL_IDS:
        if search[name] != config[name]:
            raise ValueError(
                f"{folder}: {name} must be the same in config.json and generation_config.json; got "
                f"{config[name]} and {search[name]}."
            )


def _check_id_range(config: dict[str, Any], size: int, path: Path) -> None:
    for name in SPECIAL_IDS:
        if config[name] >= size:
            raise ValueError(f"{path}: {name} must be below {size:,}; got {config[name]:,}.")
    if config["eos_token_id"] in (config["pad_token_id"], config["decoder_start_token_id"]):
        raise ValueError(f"{path}: eos_token_id must not be that of <pad> or the decoder's start.")


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


def _number(search: dict[str, Any], name: str, default: float, folder: Path) -> Any:
    value = search.get(name, default)
    if type(value) not in (int, float) or not 0 <= value < 1000:
        raise ValueError(f"{folder}: {name} must be a number of at least 0; got {value!r}.")
    return value


def _length_penalty(search: dict[str, Any], folder: Path) -> float:
    """Return our alpha that comes nearest to Hugging Face's exponent of the length."""
    return nearest_alpha(_number(search, "length_penalty", 1.0, folder))


def _languages(tokenizer: dict[str, Any]) -> tuple[str, str]:
    names = [tokenizer.get(f"{side}_lang") for side in ("source", "target")]
    return (names[0], names[1]) if all(isinstance(name, str) for name in names) else ("", "")
