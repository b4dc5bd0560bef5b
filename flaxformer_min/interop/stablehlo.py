"""Export of the whole search as one StableHLO program, which runs with jax alone.

`jax.export` keeps the number of sentences and their length symbolic, and lowers for CPU, CUDA and
TPU at once. The program is data: to load it, nothing of this package is needed.
"""

import string
from collections.abc import Callable
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from flax import traverse_util
from jax import export

from flaxformer_min.decoding.batches import LONGEST_SOURCE
from flaxformer_min.decoding.models import with_explicit_attention
from flaxformer_min.decoding.search import search
from flaxformer_min.interop.run_model import ParamsTree, RunModel, describe, segmentation_code
from flaxformer_min.model.transformer import Transformer
from flaxformer_min.tokens import PAD

PROGRAM, WEIGHTS = "translate.stablehlo", "weights.npz"

PLATFORMS = ("cpu", "cuda", "tpu")

MOST_SENTENCES = 1024
"""Sentences of a call. The longest of them may have LONGEST_SOURCE tokens, as in this package."""


def write_stablehlo(model: RunModel, folder: Path, weights_inside: bool = False) -> None:
    """Write the program, its weights (inside of it, or beside it), tokenizers and a README.md."""
    flat = traverse_util.flatten_dict(model.params, sep="/")
    program = make_program(model)
    longest = model.config.max_positions or LONGEST_SOURCE
    constraints = ("sentences >= 1", f"sentences <= {MOST_SENTENCES}")
    constraints += ("length >= 1", f"length <= {longest}")
    shape = export.symbolic_shape("sentences, length", constraints=constraints)
    source = jax.ShapeDtypeStruct(shape, jnp.int32)
    if weights_inside:
        exported = export.export(jax.jit(partial(program, flat)), platforms=PLATFORMS)(source)
    else:
        np.savez(folder / WEIGHTS, **flat)
        shapes = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), flat)
        exported = export.export(jax.jit(program), platforms=PLATFORMS)(shapes, source)
    (folder / PROGRAM).write_bytes(exported.serialize())
    for name, tokenizer in zip(("source", "target"), model.tokenizers, strict=True):
        (folder / f"{name}.model").write_bytes(tokenizer.model)
    (folder / "README.md").write_text(_readme(model, longest, weights_inside), encoding="utf-8")


def make_program(model: RunModel) -> Callable[[ParamsTree, jax.Array], tuple]:
    """Return the search as a function of flat weights and source ids [sentences length].

    It returns the ids of the best translations, which end in EOS and then PAD, and their
    log-probabilities in nats.
    """
    # A fused attention may be of one platform alone.
    transformer = with_explicit_attention(Transformer(model.config))
    config, most = model.decoding, model.config.max_positions

    def translate(flat: ParamsTree, source: jax.Array) -> tuple[jax.Array, jax.Array]:
        params = traverse_util.unflatten_dict(flat, sep="/")
        limits = (source != PAD).sum(1) + config.max_extra_tokens
        limits = jnp.minimum(limits, most) if most else limits
        found = search(transformer, params, source, config, max_length=limits)
        return found.ids[:, 0], found.log_prob[:, 0]

    return translate


def _readme(model: RunModel, longest: int, weights_inside: bool) -> str:
    template = Path(__file__).with_name("stablehlo_readme.md").read_text(encoding="utf-8")
    load = f'weights = dict(np.load(f"{{FOLDER}}/{WEIGHTS}"))\n'
    return string.Template(template).substitute(
        sizes=describe(model.config),
        program=PROGRAM,
        pieces=segmentation_code(model),
        source_size=model.tokenizers[0].vocab_size,
        load="" if weights_inside else load,
        arguments="source" if weights_inside else "weights, source",
        beam_size=model.decoding.beam_size,
        alpha=model.decoding.length_penalty,
        extra=model.decoding.max_extra_tokens,
        sentences=MOST_SENTENCES,
        longest=longest,
        jax=jax.__version__,
    )
