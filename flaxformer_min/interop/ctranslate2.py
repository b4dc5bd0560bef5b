"""Export to CTranslate2, which translates on CPUs and GPUs without jax.

CTranslate2's own `TransformerSpec` writes the files, so it must be installed (the extra `export`).
"""

import importlib.util
import string
from pathlib import Path
from typing import Any

import numpy as np

from flaxformer_min.decoding.batches import LONGEST_SOURCE
from flaxformer_min.interop.run_model import (
    ParamsTree,
    RunModel,
    describe,
    layers,
    nearest_length_penalty,
    position_table,
    segmentation_code,
)
from flaxformer_min.tokens import BOS, EOS, PAD, UNK


def write_ctranslate2(model: RunModel, folder: Path, quantization: str | None = None) -> None:
    """Write a folder that `ctranslate2.Translator` opens, with tokenizers and a README.md."""
    if importlib.util.find_spec("ctranslate2") is None:
        raise ImportError(
            "An export for CTranslate2 needs ctranslate2; install it with: "
            "pip install 'flaxformer_min[export]'"
        )
    spec = _specification(model)
    spec.validate()
    spec.optimize(quantization=quantization)
    spec.save(str(folder))
    for name, tokenizer in zip(("source", "target"), model.tokenizers, strict=True):
        (folder / f"{name}.model").write_bytes(tokenizer.model)
    (folder / "README.md").write_text(_readme(model, quantization), encoding="utf-8")


def _specification(model: RunModel) -> Any:
    """Return CTranslate2's description of the model, with all weights."""
    from ctranslate2.specs import transformer_spec
    from ctranslate2.specs.common_spec import Activation

    config = model.config
    activations = {"relu": Activation.RELU, "swish": Activation.SWISH, "gelu": Activation.GELU}
    spec = transformer_spec.TransformerSpec.from_config(
        (config.num_layers, config.decoder_depth),
        config.num_heads,
        pre_norm=config.norm == "pre",
        no_final_norm=not config.final_norm,
        activation=activations[config.activation],
    )
    positions = LONGEST_SOURCE + model.decoding.max_extra_tokens
    for side, embedding in (
        (spec.encoder, model.source_embedding),
        (spec.decoder, model.target_embedding),
    ):
        side.scale_embeddings = True
        side.position_encodings.encodings = position_table(config, embedding, positions)
    spec.encoder.embeddings[0].weight = model.source_embedding["table"]
    spec.decoder.embeddings.weight = model.target_embedding["table"]
    _set_stack(spec.encoder, model.params["encoder"], model)
    _set_stack(spec.decoder, model.params["decoder"], model)
    _set_projection(spec.decoder.projection, model)
    _set_vocabularies(spec, model)
    return spec


def _set_stack(spec: Any, params: ParamsTree, model: RunModel) -> None:
    for layer, own in zip(spec.layer, layers(params), strict=True):
        _set_self_attention(layer.self_attention, own["self_attention"])
        _set_norm(layer.self_attention.layer_norm, own["self_attention_norm"]["norm"])
        if "cross_attention" in own:
            _set_cross_attention(layer.attention, own["cross_attention"])
            _set_norm(layer.attention.layer_norm, own["cross_attention_norm"]["norm"])
        _set_linear(layer.ffn.linear_0, own["feed_forward"]["inner"])
        _set_linear(layer.ffn.linear_1, own["feed_forward"]["outer"])
        _set_norm(layer.ffn.layer_norm, own["feed_forward_norm"]["norm"])
    if model.config.has_final_norm:
        _set_norm(spec.layer_norm, params["final_norm"])


def _set_self_attention(spec: Any, params: ParamsTree) -> None:
    _set_linear(spec.linear[0], params["query"], params["key"], params["value"])
    _set_linear(spec.linear[1], params["output"])


def _set_cross_attention(spec: Any, params: ParamsTree) -> None:
    _set_linear(spec.linear[0], params["query"])
    _set_linear(spec.linear[1], params["key"], params["value"])
    _set_linear(spec.linear[2], params["output"])


def _set_linear(spec: Any, *params: ParamsTree) -> None:
    """Set one linear layer, or several fused to one: CTranslate2's weights are [out in]."""
    spec.weight = np.concatenate([each["kernel"].T for each in params])
    spec.bias = np.concatenate([each["bias"] for each in params])


def _set_norm(spec: Any, params: ParamsTree) -> None:
    spec.gamma, spec.beta = params["scale"], params["bias"]


def _set_projection(spec: Any, model: RunModel) -> None:
    if model.config.embeddings == "separate":
        _set_linear(spec, model.params["output_projection"])
        return
    spec.weight = model.target_embedding["table"]
    if model.config.output_bias:
        spec.bias = model.params["output_bias"]


def _set_vocabularies(spec: Any, model: RunModel) -> None:
    source, target = (
        tokenizer.pieces(range(tokenizer.vocab_size)) for tokenizer in model.tokenizers
    )
    spec.register_source_vocabulary(source)
    spec.register_target_vocabulary(target)
    spec.config.unk_token = target[UNK]
    spec.config.bos_token = target[BOS]
    spec.config.eos_token = target[EOS]
    spec.config.decoder_start_token = target[BOS]
    spec.config.add_source_bos = False
    spec.config.add_source_eos = True
    spec.config.add_attribute("layer_norm_epsilon", model.config.norm_epsilon)


def _readme(model: RunModel, quantization: str | None) -> str:
    decoding = model.decoding
    positions = model.config.max_positions or LONGEST_SOURCE
    longest = f"min(max(map(len, pieces), default=0) + 1, {positions})"
    longest += f" + {decoding.max_extra_tokens}"
    if model.config.max_positions:
        longest = f"min({longest}, {positions})"
    # An imported model may give <pad> a high probability, because nobody lets it be produced.
    suppressed = model.tokenizers[1].pieces((PAD, BOS, *decoding.suppressed))
    options = (
        f"min_decoding_length=0, disable_unk=True, max_input_length={positions},\n"
        f"    suppress_sequences={[[piece] for piece in suppressed]},\n"
        f"    max_decoding_length={longest},"
    )
    template = Path(__file__).with_name("ctranslate2_readme.md").read_text(encoding="utf-8")
    return string.Template(template).substitute(
        sizes=describe(model.config),
        pieces=segmentation_code(model),
        weights=quantization or "float32",
        beam_size=decoding.beam_size,
        hypotheses=2 * decoding.beam_size if decoding.beam_size > 1 else 1,
        penalty=nearest_length_penalty(decoding),
        alpha=decoding.length_penalty,
        options=options,
    )
