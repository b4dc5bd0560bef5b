"""Tiny models in Marian's own files: random weights, made-up words, and CTranslate2's reading."""

import json
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import sentencepiece

import flaxformer_min
from flaxformer_min import Translator

WORDS = {
    "source": "the old house stands near river my friend walks to market a small red and two dogs",
    "target": "das alte haus steht am fluss mein freund geht zum markt ein kleines rotes und zwei",
}
PAIRS = [
    ("the old house stands near the river", "das alte haus steht am fluss"),
    ("my friend walks", "mein freund geht"),
    ("two dogs", "zwei"),
]
D_MODEL, D_FF, HEADS = 16, 24, 2

MODEL_YML = """\
dec-depth: {depth}
dim-emb: 16
dim-vocabs: [{sizes[0]}, {sizes[1]}]
enc-depth: {depth}
transformer-dim-ffn: 24
transformer-ffn-activation: {activation}
transformer-decoder-autoreg: self-attention
transformer-guided-alignment-layer: last
transformer-heads: 2
transformer-no-projection: false
transformer-postprocess: {postprocess}
transformer-postprocess-emb: d
transformer-postprocess-top: "{top}"
transformer-preprocess: "{preprocess}"
type: transformer
version: v1.12.0
"""


def train_spm(path: Path, text: str, **options) -> sentencepiece.SentencePieceProcessor:
    """Train a SentencePiece model on words; `options` give the ids of special tokens."""
    options = {"vocab_size": 60, "hard_vocab_limit": False, "minloglevel": 2, **options}
    sentences = [" ".join(words) for words in np.array_split(text.split(), 4)] * 20
    with path.open("wb") as file:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(sentences), model_writer=file, **options
        )
    return sentencepiece.SentencePieceProcessor(str(path))


def pieces_of(spm: sentencepiece.SentencePieceProcessor) -> list[str]:
    """Return the pieces of a SentencePiece model by id."""
    return [spm.id_to_piece(number) for number in range(len(spm))]


def random_arrays(
    sizes: tuple[int, int],
    *,
    shared: bool = False,
    norm: str = "post",
    top: str = "n",
    depth: int = 1,
    activation: str = "relu",
) -> dict[str, np.ndarray]:
    """Return the arrays of a model with as many embeddings, named as Marian names them."""
    rng = np.random.default_rng(0)
    suffix = "_pre" if norm == "pre" else ""
    arrays: dict[str, np.ndarray] = {}

    def add(name: str, *shape: int, mean: float = 0.0) -> None:
        arrays[name] = (rng.normal(mean, 0.3, shape)).astype(np.float32)

    def add_norm(name: str, suffix: str = "") -> None:
        add(f"{name}_ln_scale{suffix}", 1, D_MODEL, mean=1.0)
        add(f"{name}_ln_bias{suffix}", 1, D_MODEL)

    for side, size in zip(("encoder", "decoder"), sizes, strict=True):
        add("Wemb" if shared else f"{side}_Wemb", size, D_MODEL)
        for layer in range(1, depth + 1):
            boxes = ("self", "context") if side == "decoder" else ("self",)
            for box in (f"{side}_l{layer}_{box}" for box in boxes):
                for letter in "qkvo":
                    add(f"{box}_W{letter}", D_MODEL, D_MODEL)
                    add(f"{box}_b{letter}", 1, D_MODEL)
                add_norm(f"{box}_Wo", suffix)
            for letter, widths in (("1", (D_MODEL, D_FF)), ("2", (D_FF, D_MODEL))):
                add(f"{side}_l{layer}_ffn_W{letter}", *widths)
                add(f"{side}_l{layer}_ffn_b{letter}", 1, widths[1])
            add_norm(f"{side}_l{layer}_ffn_ffn", suffix)
        if norm == "pre" and top:
            add_norm(f"{side}_top")
    add("decoder_ff_logit_out_b", 1, sizes[1])
    places = ("da", "n", top) if norm == "pre" else ("dan", "", "")
    settings = MODEL_YML.format(
        depth=depth,
        sizes=sizes,
        activation=activation,
        postprocess=places[0],
        preprocess=places[1],
        top=places[2],
    )
    return {"special:model.yml": np.frombuffer(settings.encode() + b"\0", np.int8), **arrays}


def write_yml(path: Path, pieces: list[str]) -> None:
    """Write a vocabulary as Marian does, every piece in quotes."""
    lines = (f"{json.dumps(piece, ensure_ascii=False)}: {n}\n" for n, piece in enumerate(pieces))
    path.write_text("".join(lines), encoding="utf-8")


def write_model(folder: Path, vocabularies: list[str], **settings) -> dict[str, np.ndarray]:
    """Write model.npz, whose vocabularies are in the folder, and its decoder.yml."""
    names = [vocabularies[0], vocabularies[-1]]
    sizes = tuple(len(vocabulary_of(folder / name)) for name in names)
    arrays = random_arrays(sizes, **settings)
    np.savez(folder / "model.npz", **arrays)
    listed = "".join(f"  - {name}\n" for name in names)
    (folder / "decoder.yml").write_text(f"models:\n  - model.npz\nvocabs:\n{listed}beam-size: 2\n")
    return arrays


def vocabulary_of(path: Path) -> list[str]:
    """Return the pieces of a vocabulary by id, which these helpers or a test wrote."""
    if path.suffix == ".spm":
        return pieces_of(sentencepiece.SentencePieceProcessor(str(path)))
    text = path.read_text(encoding="utf-8").removesuffix("\n")
    if path.suffix != ".yml":
        return text.split("\n")
    return [json.loads(line.rpartition(": ")[0]) for line in text.split("\n")]


def their_log_probs(folder: Path, vocabularies: list[str], spms: list[str]) -> list[list[float]]:
    """Return the log-probability of each token of PAIRS by CTranslate2's converter of Marian."""
    import ctranslate2
    from ctranslate2.converters import MarianConverter

    files = []
    for side, name in zip("st", (vocabularies[0], vocabularies[-1]), strict=True):
        files.append(str(folder / f"{side}.of_ctranslate2"))
        write_yml(Path(files[-1]), vocabulary_of(folder / name))
    MarianConverter(str(folder / "model.npz"), files).convert(str(folder / "ct2"))
    source, target = (
        sentencepiece.SentencePieceProcessor(str(folder / name)) for name in (spms[0], spms[-1])
    )
    found = ctranslate2.Translator(str(folder / "ct2")).score_batch(
        [source.encode(text, out_type=str) for text, _ in PAIRS],
        [target.encode(text, out_type=str) for _, text in PAIRS],
    )
    return [list(each.log_probs) for each in found]


def our_log_probs(run: Path) -> list[list[float]]:
    """Return the log-probability of each token of PAIRS by an imported run."""
    return [list(each.log_probs) for each in Translator.load(run).score(PAIRS)]


def assert_not_imported(model: Path, message: str, **options) -> None:
    """The import of a model is refused with this message, and makes no run."""
    run = model.parent / "refused"
    with pytest.raises(ValueError, match=message):
        flaxformer_min.import_model(model, run, **options)
    assert not run.exists()


def assert_values_of_ctranslate2(
    run: Path, folder: Path, vocabularies: list[str], spms: list[str]
) -> None:
    """The run gives each token of PAIRS the log-probability that CTranslate2 reads from there."""
    expected = their_log_probs(folder, vocabularies, spms)
    for ours, theirs in zip(our_log_probs(run), expected, strict=True):
        np.testing.assert_allclose(ours, theirs, atol=1e-4, rtol=0)


def name_a_final_norm(model: Path, monkeypatch) -> None:
    """Let CTranslate2's converter take a pre-norm model without one: told of it, it reads none."""
    from ctranslate2.specs.transformer_spec import TransformerSpec

    with np.load(model) as file:
        arrays = dict(file)
    settings = arrays["special:model.yml"].tobytes().rstrip(b"\0")
    settings = settings.replace(b'transformer-postprocess-top: ""\n', b"")
    settings += b'transformer-postprocess-top: "n"\n\0'
    np.savez(model, **{**arrays, "special:model.yml": np.frombuffer(settings, np.int8)})
    whole = TransformerSpec.from_config
    monkeypatch.setattr(TransformerSpec, "from_config", partial(whole, no_final_norm=True))


def assert_values_of_transformers(run: Path, model, tokenizer, pairs=PAIRS) -> None:
    """The run gives each token of the targets the log-probability of Hugging Face's model."""
    import torch

    for (source, target), ours in zip(pairs, Translator.load(run).score(pairs), strict=True):
        batch = tokenizer(source, text_target=target, return_tensors="pt")
        with torch.inference_mode():
            logits = model.eval()(**batch).logits[0]
        theirs = logits.log_softmax(-1).gather(1, batch["labels"].T)[:, 0]
        np.testing.assert_allclose(ours.log_probs, theirs.numpy(), atol=1e-4, rtol=0)
