"""Export to Hugging Face: a folder that MarianMTModel and MarianTokenizer open.

Marian has the paper's post-norm layers with sines and cosines as halves. The basis of the residual
stream is free, so a model with interleaved ones becomes that by permuting all weights alike.
"""

import json
import string
from pathlib import Path
from typing import Any

import numpy as np

from flaxformer_min.config import ModelConfig
from flaxformer_min.data.imported_tokenizer import LANGUAGE_TAG, ImportedTokenizer
from flaxformer_min.decoding.batches import LONGEST_SOURCE
from flaxformer_min.interop.marian_tensors import (
    FINAL_BIAS,
    Tensor,
    bias_path,
    halves_order,
    tensors,
)
from flaxformer_min.interop.run_model import (
    ParamsTree,
    RunModel,
    describe,
    leaf,
    nearest_length_penalty,
)
from flaxformer_min.interop.safetensors import write_safetensors
from flaxformer_min.tokens import BOS, EOS, PAD, UNK

EPSILON = 1e-5
"""Of MarianMTModel's layer norms, which no setting changes."""

TAGS_ARE_TEXT = (
    "tokenizer.remove_language_code = lambda text: ([], text)"
    "  # tags such as >>deu<< are read by the .spm\n"
)
"""In the recipe for own symbols: a space precedes the tag that MarianTokenizer takes off a text."""


def write_marian(model: RunModel, folder: Path) -> None:
    """Write model.safetensors, the tokenizer's files, the settings and a README.md.

    Raises ValueError for a model that Marian cannot express.
    """
    _check(model.config)
    write_safetensors(folder / "model.safetensors", marian_weights(model.config, model.params))
    for name, tokenizer in zip(("source", "target"), model.tokenizers, strict=True):
        (folder / f"{name}.spm").write_bytes(tokenizer.model)
    vocabularies = [_vocabulary(tokenizer) for tokenizer in model.tokenizers]
    _write_json(folder / "vocab.json", vocabularies[0])
    if model.config.embeddings != "shared":
        _write_json(folder / "target_vocab.json", vocabularies[1])
    _write_json(folder / "config.json", _config(model, vocabularies[0]))
    _write_json(folder / "generation_config.json", _generation_config(model))
    _write_json(folder / "tokenizer_config.json", _tokenizer_config(model, vocabularies[1]))
    (folder / "README.md").write_text(_readme(model), encoding="utf-8")


def marian_weights(config: ModelConfig, params: ParamsTree) -> dict[str, np.ndarray]:
    """Return Marian's tensors of a model by name."""
    permuted = config.positional_encoding == "interleaved"
    order = halves_order(config.d_model) if permuted else None
    weights = {each.name: _convert(each, params, order) for each in tensors(config)}
    path = bias_path(config)
    bias = np.zeros(config.vocab_size, np.float32) if path is None else leaf(params, path)
    return {FINAL_BIAS: bias[None, :], **weights}


def _convert(tensor: Tensor, params: ParamsTree, order: np.ndarray | None) -> np.ndarray:
    values = leaf(params, tensor.path)
    for axis in tensor.stream if order is not None else ():
        values = np.take(values, order, axis)
    return values.T if tensor.is_kernel else values


def _check(config: ModelConfig) -> None:
    if config.norm != "post":
        raise ValueError(
            "MarianMTModel has post-norm layers only; the run has model.norm='pre'. Export it as "
            "ctranslate2 or stablehlo."
        )
    if config.positional_encoding not in ("interleaved", "halves"):
        raise ValueError(
            "MarianMTModel has sinusoidal positions only; the run has "
            f"model.positional_encoding={config.positional_encoding!r}. Export it as ctranslate2 "
            "or stablehlo."
        )


def _vocabulary(tokenizer: Any) -> dict[str, int]:
    pieces = tokenizer.pieces(range(tokenizer.vocab_size))
    return {piece: number for number, piece in enumerate(pieces)}


def _config(model: RunModel, source_vocabulary: dict[str, int]) -> dict[str, Any]:
    config = model.config
    both = {"ffn_dim": config.d_ff}
    both |= {"attention_heads": config.num_heads, "layerdrop": 0.0}
    sides = {f"{side}_{k}": v for side in ("encoder", "decoder") for k, v in both.items()}
    return {
        "model_type": "marian",
        "architectures": ["MarianMTModel"],
        "is_encoder_decoder": True,
        "d_model": config.d_model,
        **sides,
        "encoder_layers": config.num_layers,
        "decoder_layers": config.decoder_depth,
        "activation_function": config.activation,
        "dropout": config.dropout,
        "attention_dropout": config.attention_dropout,
        "activation_dropout": config.feed_forward_dropout,
        "scale_embedding": True,
        "static_position_embeddings": True,
        "max_position_embeddings": LONGEST_SOURCE + model.decoding.max_extra_tokens,
        "vocab_size": len(source_vocabulary),
        "decoder_vocab_size": config.vocab_size,
        "share_encoder_decoder_embeddings": config.embeddings == "shared",
        "tie_word_embeddings": config.embeddings != "separate",
        "pad_token_id": PAD,
        "eos_token_id": EOS,
        "forced_eos_token_id": EOS,
        "decoder_start_token_id": BOS,
        "dtype": "float32",
    }


def _generation_config(model: RunModel) -> dict[str, Any]:
    decoding = model.decoding
    return {
        "num_beams": decoding.beam_size,
        "length_penalty": nearest_length_penalty(decoding),
        "max_length": 1 + LONGEST_SOURCE + decoding.max_extra_tokens,  # the decoder's start counts
        "bad_words_ids": [[number] for number in (PAD, UNK, BOS, *decoding.suppressed)],
        "pad_token_id": PAD,
        "eos_token_id": EOS,
        "forced_eos_token_id": EOS,
        "decoder_start_token_id": BOS,
    }


def _tokenizer_config(model: RunModel, target: dict[str, int]) -> dict[str, Any]:
    pieces = list(target)
    return {
        "tokenizer_class": "MarianTokenizer",
        "separate_vocabs": model.config.embeddings != "shared",
        "model_max_length": LONGEST_SOURCE,
        "pad_token": pieces[PAD],
        "unk_token": pieces[UNK],
        "eos_token": pieces[EOS],
        "clean_up_tokenization_spaces": False,
        **_added_tokens(model.tokenizers[1], target),
    }


def _added_tokens(tokenizer: Any, target: dict[str, int]) -> dict[str, Any]:
    """Return the tokens that an imported model splits off a text, as MarianTokenizer lists them."""
    symbols = tokenizer.symbols if isinstance(tokenizer, ImportedTokenizer) else ()
    listed = {str(target[each]): {"content": each, "normalized": False} for each in symbols}
    return {"added_tokens_decoder": listed} if listed else {}


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _readme(model: RunModel) -> str:
    tokenizer = model.tokenizers[0]
    own_symbols = () if isinstance(tokenizer, ImportedTokenizer) else tokenizer.symbols
    template = Path(__file__).with_name("marian_readme.md").read_text(encoding="utf-8")
    return string.Template(template).substitute(
        sizes=describe(model.config),
        tags=TAGS_ARE_TEXT if any(map(LANGUAGE_TAG.fullmatch, own_symbols)) else "",
        epsilon=model.config.norm_epsilon,
        theirs=EPSILON,
        extra=model.decoding.max_extra_tokens,
    )
