"""Makes a run folder as training leaves it, in a second: real tokenizers, random parameters."""

import functools
import json
import os
import shutil
import tempfile
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

import flaxformer_min
from flaxformer_min.config import Config, DataConfig, ModelConfig, SearchConfig, TrainingConfig
from flaxformer_min.data.tokenizer import train_tokenizer
from flaxformer_min.model.transformer import Transformer
from flaxformer_min.storage.run_folder import RunFolder, fit_vocabulary
from flaxformer_min.tokens import Batch, Tokens

LINES = [f"the {color} house has {n} doors" for n in range(9) for color in ("red", "blue", "green")]
"""The text that the tokenizers of a tiny run are trained on."""


def random_params(config: ModelConfig, seed: int = 0):
    """Return random parameters with the names and shapes of the model; nothing is compiled."""
    row = jax.ShapeDtypeStruct((1, 8), jnp.int32)
    batch = Batch(Tokens(row, row, row), Tokens(row, row, row))
    shapes = jax.eval_shape(Transformer(config).init, jax.random.key(0), batch)["params"]
    rng = np.random.default_rng(seed)
    return jax.tree.map(
        lambda leaf: jnp.asarray(rng.normal(0, 0.5, leaf.shape), leaf.dtype), shapes
    )


def make_tiny_run(folder: str | Path, *, lines: list[str] = LINES, **options) -> Path:
    """Make the run and return its folder: a copy of the one that `_make_once` has made.

    lines:   the training text of the tokenizers; equal lines give equal vocabularies.
    options: the other arguments of `_make_once`.
    """
    made = _make_once(tuple(lines), **options)
    folder = RunFolder(folder).path
    shutil.copytree(made, folder, dirs_exist_ok=True)
    return folder


@functools.cache
def _make_once(
    lines: tuple[str, ...],
    *,
    seed: int = 0,
    steps: tuple[int, ...] = (1,),
    separate: bool = False,
    continues: bool = False,
    data: DataConfig | None = None,
    decoding: SearchConfig | None = None,
    **settings,
) -> Path:
    """Make a run once a process and return its folder, which must stay as it is.

    seed:      of the parameters; each of `steps` gets different ones.
    steps:     of the checkpoints; empty for a run without any.
    separate:  two vocabularies, the target's from the reversed lines.
    continues: its checkpoints record where in the text training continues.
    settings:  of the model, in place of those of a very small one.
    """
    separate |= settings.get("embeddings", "shared") != "shared"
    small = {
        "vocab_size": 284,
        "source_vocab_size": 284 if separate else None,
        "embeddings": "separate" if separate else "shared",
        "num_layers": 1,
        "d_model": 16,
        "d_ff": 16,
        "num_heads": 2,
    }
    model = ModelConfig(**{**small, **settings})
    config = Config(
        data=data or DataConfig(languages="en-ko", normalization="identity"),
        model=model,
        training=TrainingConfig(save_every=1),
        decoding=decoding or SearchConfig(beam_size=2, max_extra_tokens=4, batch_size=8),
    )

    def make_tokenizers(paths):
        source, target = paths
        rule = {"normalization": config.data.normalization, "symbols": config.data.symbols}
        train_tokenizer(lines, model.vocab_size, source, **rule)
        if separate:
            train_tokenizer([line[::-1] for line in lines], model.vocab_size, target, **rule)

    run = RunFolder(tempfile.mkdtemp(dir=os.environ.get("FLAXFORMER_TEST_CACHE")))
    tokenizers = run.begin(config, make_tokenizers)
    checkpoints = run.open_checkpoints(config) if steps else None
    for step in steps:
        params = random_params(fit_vocabulary(model, tokenizers), seed + step)
        position = {"batches": {"epoch": 0, "batch": step}} if continues else {}
        checkpoints.save(step, {"params": params}, position)
    if checkpoints is not None:
        checkpoints.close()
    return run.path


def make_marian_model(folder: Path) -> Path:
    """Make a model of Hugging Face's Marian, as an export of a tiny run writes it."""
    return Path(shutil.copytree(_export_once(), folder))


@functools.cache
def _export_once() -> Path:
    folder = Path(tempfile.mkdtemp(dir=os.environ.get("FLAXFORMER_TEST_CACHE")))
    flaxformer_min.export(
        _make_once(tuple(LINES), positional_encoding="halves"), folder, format="marian"
    )
    return folder


TAGGED = [">>deu<< the red house", ">>fra<< nine doors", "the >>deu<< house", ">>deu<<", " "]
"""Texts for `make_imported_run`, with a tag that it knows and one that it does not."""


def make_imported_run(folder: Path) -> Path:
    """Make a run of an imported model that has >>deu<< in place of its tokenizers' piece ▁h."""
    decoding = SearchConfig(beam_size=1, max_extra_tokens=4)
    run = make_tiny_run(folder / "tiny", positional_encoding="halves", decoding=decoding)
    flaxformer_min.export(run, folder / "marian", format="marian")
    path = folder / "marian" / "vocab.json"
    pieces = json.loads(path.read_text())
    pieces[">>deu<<"] = pieces.pop("▁h")
    path.write_text(json.dumps(pieces))
    flaxformer_min.import_model(folder / "marian", folder / "imported")
    return folder / "imported"
