"""Models of Hugging Face's Marian: exported, imported, and the same numbers in both libraries."""

import json
import pickle
import shlex
import struct
import zipfile

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from make_golden_run import EXPECTED, GOLDEN
from marian_models import (
    WORDS,
    assert_not_imported,
    assert_values_of_transformers,
    pieces_of,
    train_spm,
    write_model,
    write_yml,
)
from safetensors.numpy import save
from sentencepiece import sentencepiece_model_pb2
from tiny_run import LINES, make_marian_model, make_tiny_run
from training_jobs import changed

import flaxformer_min
from flaxformer_min import train
from flaxformer_min.config import ModelConfig, SearchConfig
from flaxformer_min.decoding.translator import Translator
from flaxformer_min.interop.marian_import import read_marian
from flaxformer_min.interop.marian_npz import read_npz
from flaxformer_min.interop.marian_search import SPECIAL_IDS
from flaxformer_min.interop.safetensors import read_safetensors, write_safetensors
from flaxformer_min.interop.vocabulary import Specials, make_vocabulary
from flaxformer_min.storage.run_folder import RunFolder
from flaxformer_min.tokens import BOS, Tokens

PAIRS = [(source, target) for source, target in zip(LINES[:12], LINES[12:24], strict=True)]
VARIANTS = [
    {"positional_encoding": "halves"},
    {"positional_encoding": "interleaved", "num_layers": 2, "num_decoder_layers": 1},
    {"embeddings": "target_tied", "activation": "swish"},
    {"embeddings": "separate", "activation": "gelu", "num_heads": 4},
    {"output_bias": True, "positional_encoding": "halves"},
]


def export_and_import(run, folder):
    """Return the folder of Hugging Face, and the run that it becomes again."""
    flaxformer_min.export(run, folder / "marian", format="marian")
    flaxformer_min.import_model(folder / "marian", folder / "again")
    return folder / "marian", folder / "again"


@pytest.mark.parametrize("settings", VARIANTS, ids=lambda each: "-".join(map(str, each.values())))
def test_what_was_exported_comes_back(tmp_path, settings):
    """Every bit of it, where the sines and cosines of ours are halves too."""
    run = make_tiny_run(tmp_path / "run", **settings)
    before = RunFolder(run)
    after = RunFolder(export_and_import(run, tmp_path)[1])
    changed = {"norm_epsilon": 1e-5, "positional_encoding": "halves"}
    expected = {**vars(before.model_config()), **changed}
    assert vars(after.model_config()) == expected
    old, new = (jax.device_get(each.params().params) for each in (before, after))
    if before.config().model.positional_encoding == "halves":
        jax.tree.map(np.testing.assert_array_equal, old, new)
    else:
        jax.tree.map(
            lambda a, b: np.testing.assert_array_equal(np.sort(a, None), np.sort(b, None)), old, new
        )
    for one, other in zip(before.tokenizers(), after.tokenizers(), strict=True):
        assert [one.encode(text) for text in LINES] == [other.encode(text) for text in LINES]


@pytest.mark.parametrize(
    "settings, message",
    [
        ({"norm": "pre"}, "post-norm layers only"),
        ({"positional_encoding": "none"}, "sinusoidal positions only"),
    ],
)
def test_a_model_that_marian_cannot_express_is_refused(tmp_path, settings, message):
    """With the reason, and without a folder."""
    run = make_tiny_run(tmp_path / "run", **settings)
    with pytest.raises(ValueError, match=message):
        flaxformer_min.export(run, tmp_path / "out", format="marian")
    assert not (tmp_path / "out").exists()


@pytest.fixture
def marian(tmp_path):
    """A folder as an export writes it."""
    return make_marian_model(tmp_path / "marian")


def rewrite(path, **changes):
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


CONFIG, GENERATION = "config.json", "generation_config.json"
REFUSED = [
    (CONFIG, {"model_type": "bart"}, "model_type must be 'marian'; got 'bart'"),
    (CONFIG, {"normalize_before": True}, "normalize_before must be False; got True"),
    (CONFIG, {"scale_embedding": False}, "scale_embedding must be True"),
    (CONFIG, {"activation_function": "tanh"}, "activation_function must be one of relu"),
    (CONFIG, {"decoder_ffn_dim": 2}, "encoder_ffn_dim and decoder_ffn_dim must be equal; .* and 2"),
    (CONFIG, {"decoder_layers": 2}, "model.decoder.layers.1"),
    (CONFIG, {"d_model": 32}, "must have the shape .* that the settings give it"),
    (CONFIG, {"d_model": "32"}, "d_model must be a whole number; got '32'"),
    (CONFIG, {"d_model": 10**12}, "model.d_model must be less than 1000000"),
    (CONFIG, {"encoder_attention_heads": 3, "decoder_attention_heads": 3}, "of model.num_heads"),
    (CONFIG, {"encoder_layers": 999, "decoder_layers": 999}, "must have the 999 layers"),
    (CONFIG, {"vocab_size": 9, "decoder_vocab_size": 9}, "must be whole numbers from 0 to 8"),
    (CONFIG, {"vocab_size": 10**9, "decoder_vocab_size": 10**9}, "no piece has the id"),
    (CONFIG, {"decoder_vocab_size": 9.5}, "decoder_vocab_size must be a whole number"),
    (CONFIG, {"pad_token_id": 10**9}, "pad_token_id must be below"),
    (CONFIG, {"forced_bos_token_id": 7}, "no such setting; got 7. .* --ignore forced_bos_token_id"),
    (GENERATION, {"pad_token_id": 7}, "pad_token_id must be the same in config.json and .* and 7"),
    (GENERATION, {"bad_words_ids": [[7, 8]]}, "single tokens only"),
    (GENERATION, {"bad_words_ids": 7}, "bad_words_ids must be a list; got 7"),
    (GENERATION, {"suppress_tokens": [3]}, "other than the end's; got 3"),
    (GENERATION, {"suppress_tokens": [10**9]}, "must be ids below"),
    (GENERATION, {"suppress_tokens": ["7"]}, "got '7'"),
]


@pytest.mark.parametrize("name, changes, message", REFUSED, ids=lambda each: str(each)[:40])
def test_a_setting_that_is_not_understood_is_named(marian, name, changes, message):
    """And no run is made of it."""
    rewrite(marian / name, **changes)
    assert_not_imported(marian, message)


def test_an_imported_run_knows_the_settings_of_its_model(marian, tmp_path):
    run = tmp_path / "imported"
    flaxformer_min.import_model(marian, run)
    config = json.loads((run / "config.json").read_text())
    config["model"]["activation"] = "gelu" if config["model"]["activation"] == "relu" else "relu"
    (run / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match="activation: .* in the checkpoint"):
        flaxformer_min.Translator.load(run)


def test_tokens_that_may_not_be_produced_stay_so(marian, tmp_path):
    """They go in, count in the search, and go out again."""
    settings = marian / "generation_config.json"
    rewrite(settings, bad_words_ids=[[0], [1], [20], [9]], suppress_tokens=[12])
    flaxformer_min.import_model(marian, tmp_path / "again")
    assert RunFolder(tmp_path / "again").config().decoding.suppressed == (9, 12, 20)
    assert Translator.load(tmp_path / "again").decoding.suppressed == (9, 12, 20)
    flaxformer_min.export(tmp_path / "again", tmp_path / "out", format="marian")
    written = json.loads((tmp_path / "out" / "generation_config.json").read_text())
    assert written["bad_words_ids"] == [[0], [1], [2], [9], [12], [20]]


def test_special_tokens_have_the_ids_of_the_vocabulary(marian):
    for name in ("config.json", "generation_config.json"):
        rewrite(marian / name, eos_token_id=5, forced_eos_token_id=5)
    assert_not_imported(marian, "must give '</s>' the id 5")


@pytest.mark.parametrize("kind", ["float32", "float16", "bfloat16"])
def test_a_stored_table_of_positions_may_be_rounded(marian, tmp_path, kind):
    """As models that were saved in half precision have it; another table is refused."""
    path = marian / "model.safetensors"
    weights = read_safetensors(path)
    positions = [[pos / 10000 ** (2 * (i % 8) / 16) for i in range(16)] for pos in range(512)]
    table = np.where(np.arange(16) < 8, np.sin(positions), np.cos(positions))
    rounded = np.asarray(jnp.asarray(table, kind).astype(jnp.float32))
    name = "model.encoder.embed_positions.weight"
    write_safetensors(path, {**weights, name: rounded})
    flaxformer_min.import_model(marian, tmp_path / "again")
    write_safetensors(path, {**weights, name: rounded + 0.005})
    assert_not_imported(marian, "must hold sines and then cosines")


def test_a_vocabulary_with_repeated_or_missing_ids_is_refused(marian):
    """Each in a sentence that names the id, or the piece that no tokenizer can hold."""
    path = marian / "vocab.json"
    whole = path.read_text()
    pieces = json.loads(whole)
    last = max(pieces, key=pieces.get)
    others = {piece: number for piece, number in pieces.items() if piece != last}
    half = pieces[last] // 2
    damaged = [whole[:-20], "[" * 100_000, f'{whole[:-1]}, "far": {"9" * 5_000}}}']
    for content, message in (
        ({**pieces, last: 7}, "the id 7 belongs to"),
        ({k: v for k, v in pieces.items() if v != 9}, "no piece has the id 9"),
        ({k: v for k, v in pieces.items() if v < half}, f"has the id {half}, of"),
        *(({**pieces, last: number}, "ids must be whole numbers") for number in (-1, True)),
        *(({**others, piece: pieces[last]}, "without NUL") for piece in ("", "a\0b", "\ud800")),
        (whole.replace("{", '{"<pad>": 0,', 1), "'<pad>' comes twice"),
        *((text, "vocab.json must hold complete JSON") for text in damaged),
        ("[]", "must hold a JSON object"),
    ):
        path.write_text(content if isinstance(content, str) else json.dumps(content))
        assert_not_imported(marian, message)


def test_damaged_weights_are_refused(marian):
    """Truncated files, a claim of 2 GB, numbers of other types, and a tensor that is not there."""
    path = marian / "model.safetensors"
    whole, weights = path.read_bytes(), read_safetensors(path)
    huge = struct.pack("<Q", 2 * 10**9) + whole[8:]
    unknown = whole.replace(b'"F32"', b'"F99"', 1)
    for content in (b"", whole[:100], huge, unknown, whole[:-4], whole + b"more"):
        path.write_bytes(content)
        assert_not_imported(marian, "must be a whole safetensors file; .* Is it truncated, or anot")
    table = weights.pop("model.shared.weight")
    path.write_bytes(save({**weights, "model.shared.weight": table.astype("int16")}))
    assert_not_imported(marian, "'model.shared.weight' must be one of F64, F32, F16, BF16; got 'I")
    write_safetensors(path, weights)
    assert_not_imported(marian, "must have the tensor 'model.shared.weight'")


def test_a_tensor_that_is_not_understood_is_named(marian, tmp_path):
    """A repeated tied matrix is; another of its name, an unknown one, and one with NaN are not."""
    path = marian / "model.safetensors"
    weights = read_safetensors(path)
    table = weights["model.shared.weight"]
    write_safetensors(path, {**weights, "lm_head.weight": table})
    flaxformer_min.import_model(marian, tmp_path / "again")
    kernel = weights["model.encoder.layers.0.fc1.weight"].copy()
    kernel[0, 3] = np.nan
    for name, values, message in (
        ("lm_head.weight", table + 1, "is not understood"),
        ("model.encoder.rotary", table, "is not understood"),
        ("model.encoder.layers.0.fc1.weight", kernel, "must be finite"),
    ):
        write_safetensors(path, {**weights, name: values})
        assert_not_imported(marian, f"'{name}' {message}")


def test_what_is_null_counts_as_missing(marian, tmp_path):
    """As in Hugging Face's library: the default of each setting is taken."""
    null = dict.fromkeys(("dropout", "attention_dropout", "tie_word_embeddings", "finetuning_task"))
    rewrite(marian / CONFIG, **null)
    rewrite(marian / GENERATION, **dict.fromkeys(("num_beams", *SPECIAL_IDS)))
    flaxformer_min.import_model(marian, tmp_path / "again")
    config = RunFolder(tmp_path / "again").config()
    assert (config.model.dropout, config.model.attention_dropout) == (0.1, 0)
    assert config.decoding.beam_size == 4


def test_an_added_token_gets_a_name_that_no_piece_has():
    """The decoder starts with <pad>, so BOS is added."""
    pieces = ["</s>", "<unk>", "<s>", "<s2>", "<s4>", "<pad>"]
    vocabulary = make_vocabulary(pieces, Specials(pad=5, unk=1, start=5, eos=0))
    assert vocabulary.pieces == ["<pad>", "<unk>", "<s3>", "</s>", "<s>", "<s2>", "<s4>"]


def test_a_tokenizer_of_another_vocabulary_is_refused(marian, tmp_path, caplog):
    """One that has some further pieces is reported with their number."""
    path = marian / "source.spm"
    content = sentencepiece_model_pb2.ModelProto.FromString(path.read_bytes())
    normal = [piece for piece in content.pieces if piece.type == 1]
    for piece in normal[:2]:
        piece.piece += "x"
    path.write_bytes(content.SerializeToString())
    flaxformer_min.import_model(marian, tmp_path / "again")
    assert f"the vocabulary lacks 2 of its {len(normal)} pieces" in caplog.text
    for piece in normal:
        piece.piece += "y"
    path.write_bytes(content.SerializeToString())
    assert_not_imported(marian, f"lacks {len(normal)} of its {len(normal)} pieces. Is it")


def test_a_tokenizer_that_is_not_utf_8_is_named(marian):
    path = marian / "source.spm"
    model = sentencepiece_model_pb2.ModelProto.FromString(path.read_bytes())
    piece = next(piece.piece for piece in model.pieces if piece.type == 1 and piece.piece.isascii())
    path.write_bytes(path.read_bytes().replace(piece.encode(), b"\xf7" * len(piece), 1))
    assert_not_imported(marian, "source.spm must be a SentencePiece model")


def test_a_pickle_is_not_read(marian, tmp_path):
    """The error says how to convert it."""
    (marian / "model.safetensors").rename(marian / "pytorch_model.bin")
    folder = marian.rename(tmp_path / "it's $HOME")
    with pytest.raises(ValueError, match="a pickle may execute anything. Convert it: ") as error:
        flaxformer_min.import_model(folder, tmp_path / "again")
    command = str(error.value).partition("Convert it: ")[2].removesuffix(".")
    program, flag, code = shlex.split(command)
    assert (program, flag) == ("python", "-c") and repr(str(folder)) in code
    compile(code, "command", "exec")
    (folder / "pytorch_model.bin").rename(folder / "tf_model.h5")
    assert_not_imported(folder, "is missing. It has tf_model.h5, which is not read[.]$")


@pytest.mark.parametrize("kind", ["float16", "bfloat16", "float64"])
def test_numbers_of_other_precisions_are_read(tmp_path, kind):
    path = tmp_path / "half.safetensors"
    path.write_bytes(save({"numbers": np.array([[1.5, -2]], jnp.dtype(kind))}))
    found = read_safetensors(path)["numbers"]
    assert found.dtype == np.float32 and found.tolist() == [[1.5, -2]]


@pytest.fixture(scope="module")
def transformers():
    """Hugging Face's library with torch, quiet."""
    pytest.importorskip("torch")
    library = pytest.importorskip("transformers")
    library.logging.set_verbosity_error()
    library.logging.disable_progress_bar()
    return library


pytestmark = pytest.mark.filterwarnings(
    "ignore:Recommended. pip install sacremoses", "ignore::DeprecationWarning"
)


def logits_of(model, batches, epsilon=None, double=False):
    """Logits of a MarianMTModel for [batch length] ids, which have no padding."""
    import torch

    model = model.double() if double else model.float()
    for module in model.eval().modules():
        if epsilon is not None and hasattr(module, "normalized_shape"):
            module.eps = epsilon
    source, target = (torch.tensor(ids) for ids in batches)
    with torch.no_grad():
        return model(input_ids=source, decoder_input_ids=target).logits.numpy()


def ours_of(run, source, target):
    """Our logits for the same: `target` is the decoder's input, from BOS on."""
    from flaxformer_min.tokens import Batch, one_sentence_per_row

    translator = Translator.load(run)
    labels = np.concatenate([target[:, 1:], np.full((len(target), 1), 3)], axis=1)
    batch = Batch(*(one_sentence_per_row(jnp.array(ids, jnp.int32)) for ids in (source, labels)))
    return np.asarray(translator.models[0].apply({"params": translator.runner.params}, batch))


def both_sides(**sizes):
    """The settings of a MarianConfig that encoder and decoder have each."""
    return {f"{side}_{name}": sizes[name] for side in ("encoder", "decoder") for name in sizes}


def random_ids(vocab_size, seed=0, start=BOS):
    rng = np.random.default_rng(seed)
    source = rng.integers(4, vocab_size, (3, 9))
    target = np.concatenate([np.full((3, 1), start), rng.integers(4, vocab_size, (3, 6))], axis=1)
    return source, target


@pytest.mark.parametrize("settings", VARIANTS, ids=lambda each: "-".join(map(str, each.values())))
def test_exported_logits_are_the_same_in_hugging_face(tmp_path, transformers, settings):
    """With our epsilon; float32 rounds logits of up to 30 at about 2e-6."""
    run = make_tiny_run(tmp_path / "run", **settings)
    flaxformer_min.export(run, tmp_path / "out", format="marian")
    model = transformers.MarianMTModel.from_pretrained(tmp_path / "out")
    source, target = random_ids(RunFolder(run).model_config().vocab_size)
    theirs = logits_of(model, (source, target), epsilon=1e-6)
    difference = np.abs(theirs - ours_of(run, source, target)).max()
    print("largest difference of logits:", difference)
    assert difference < 2e-5 * max(1, np.abs(theirs).max())


def test_the_recipe_takes_a_line_beyond_the_longest(tmp_path, transformers):
    """The source is cut at 1,024 tokens, as this package cuts it."""
    decoding = SearchConfig(beam_size=1, max_extra_tokens=4)
    run = make_tiny_run(tmp_path / "run", decoding=decoding, positional_encoding="halves")
    flaxformer_min.export(run, tmp_path / "out", format="marian")
    code = (tmp_path / "out" / "README.md").read_text().split("```python")[1].split("```")[0]
    names = {"FOLDER": str(tmp_path / "out"), "lines": [LINES[0], " ".join(LINES) * 3]}
    exec(code, names)
    assert names["batch"]["input_ids"].shape == (2, 1_024) and len(names["texts"]) == 2


def test_an_export_has_positions_for_the_longest_translation(tmp_path, transformers):
    """Of the longest source, 1,024 tokens, which may become as many as the run adds to it."""
    decoding = SearchConfig(max_extra_tokens=40)
    run = make_tiny_run(tmp_path / "run", decoding=decoding, positional_encoding="halves")
    flaxformer_min.export(run, tmp_path / "out", format="marian")
    model = transformers.MarianMTModel.from_pretrained(tmp_path / "out")
    rng = np.random.default_rng(0)
    source = rng.integers(4, RunFolder(run).model_config().vocab_size, (1, 1064))
    target = np.concatenate([[[BOS]], source[:, 1:]], axis=1)
    theirs = logits_of(model, (source[:, :1024], target), epsilon=1e-6)
    difference = np.abs(theirs - ours_of(run, source[:, :1024], target)).max()
    assert difference < 2e-5 * max(1, np.abs(theirs).max())


@pytest.mark.parametrize("layout", ["interleaved", "halves"])
def test_exported_logits_are_those_of_the_papers_formulas_in_float64(
    tmp_path, transformers, layout
):
    """Loops over single numbers on one side, Hugging Face's double precision on the other."""
    import reference
    import torch

    from flaxformer_min.interop.marian import marian_weights

    sizes = {"vocab_size": 11, "num_layers": 2, "d_model": 8, "d_ff": 12, "num_heads": 2}
    tiny = reference.tiny(ModelConfig(**sizes, positional_encoding=layout))
    config = transformers.MarianConfig(
        **both_sides(layers=2, ffn_dim=12, attention_heads=2),
        vocab_size=11,
        d_model=8,
        activation_function="relu",
        scale_embedding=True,
        pad_token_id=0,
        eos_token_id=3,
        forced_eos_token_id=3,
        decoder_start_token_id=2,
        max_position_embeddings=16,
    )
    model = transformers.MarianMTModel(config).double()
    params = jax.tree.map(np.float64, tiny.params["params"])
    weights = marian_weights(tiny.config, params)
    missing, unknown = model.load_state_dict(
        {name: torch.tensor(values) for name, values in weights.items()}, strict=False
    )
    assert not unknown and {name.split(".")[-2] for name in missing} <= {
        "lm_head",
        "embed_positions",
        "embed_tokens",
    }
    model.tie_weights()
    positions = torch.tensor(reference.sinusoidal_encoding(range(16), 8, "halves"))
    model.model.encoder.embed_positions.weight.data = positions
    model.model.decoder.embed_positions.weight.data = positions
    row = Tokens(jnp.array([5, 9, 4, 3]), jnp.arange(4), jnp.ones(4, jnp.int32))
    expected = reference.transformer(params, tiny.config, row, row)["logits"]
    theirs = logits_of(model, ([[5, 9, 4, 3]], [[2, 5, 9, 4]]), epsilon=1e-6, double=True)[0]
    print("largest difference of logits:", np.abs(theirs - expected).max())
    assert np.abs(theirs - expected).max() < 1e-12


def opus_like(transformers, folder, spm):
    """Write an OPUS-MT-shaped model with transformers: random weights, its ids and its files."""
    import torch

    words = [each for each in pieces_of(spm) if each not in ("<pad>", "<unk>", "<s>", "</s>")]
    vocabulary = ["</s>", "<unk>", *words[::-1], ">>deu<<", "漢", "<pad>"]
    size = len(vocabulary)
    torch.manual_seed(0)
    config = transformers.MarianConfig(
        **both_sides(layers=2, ffn_dim=48, attention_heads=4),
        vocab_size=size,
        d_model=32,
        activation_function="swish",
        scale_embedding=True,
        pad_token_id=size - 1,
        eos_token_id=0,
        forced_eos_token_id=0,
        decoder_start_token_id=size - 1,
        max_position_embeddings=128,
    )
    model = transformers.MarianMTModel(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.normal_(0, 0.3)
        model.model.shared.weight[-1] = 0
        model.final_logits_bias.normal_(0, 1)
        model.final_logits_bias[0, -1] = 0
    model.generation_config.bad_words_ids = [[size - 1]]
    model.generation_config.num_beams = 4
    model.save_pretrained(folder)
    (folder / "vocab.json").write_text(json.dumps({p: i for i, p in enumerate(vocabulary)}))
    for name in ("source.spm", "target.spm"):
        (folder / name).write_bytes(spm.serialized_model_proto())
    (folder / "tokenizer_config.json").write_text('{"source_lang": "eng", "target_lang": "deu"}')
    return model.eval()


@pytest.fixture
def opus(tmp_path, transformers):
    """An OPUS-MT-shaped folder, its model, and the run that it becomes."""
    spm = train_spm(tmp_path / "spm.model", " ".join(LINES) + " Ä Ö ü é")
    model = opus_like(transformers, tmp_path / "opus", spm)
    flaxformer_min.import_model(tmp_path / "opus", tmp_path / "run")
    return tmp_path / "opus", model, tmp_path / "run"


def test_a_model_that_transformers_wrote_has_the_same_logits(opus):
    """In its own order of ids, which ours is permuted from; BOS never gets a probability."""
    folder, model, run = opus
    order = read_marian(folder).vocabularies[1].order
    source, target = random_ids(len(order))
    theirs = logits_of(model, (order[source], order[target]))
    ours = ours_of(run, source, target)
    difference = np.abs(ours - theirs[:, :, order])[:, :, np.arange(len(order)) != BOS].max()
    print("largest difference of logits:", difference, "of", np.abs(theirs).max())
    assert difference < 2e-5 * max(1, np.abs(theirs).max())
    assert np.exp(ours[:, :, BOS] - ours.max(-1)).max() < 1e-30


TEXTS = [
    *LINES,
    "",
    " ",
    "two  spaces ",
    "Ärger über Öl",
    "unknown: \u4e16\u754c \U0001f600",
    "漢",
    "a漢b",
    ">>deu<< the red house",
    ">>fra<< the red house",
    ">>deu<<the house",
    "the >>deu<< house",
    "tab\there",
    "ﬁne ① ½ Ａ",
    "▁",
    "the▁house",
    "\u200b",
    "e\u0301",
]


def test_texts_become_the_ids_that_marian_tokenizer_gives_them(opus, transformers):
    """Unknown characters, pieces of the other side, tags, normalization: all as there."""
    folder, _, run = opus
    order = read_marian(folder).vocabularies[0].order
    theirs = transformers.MarianTokenizer.from_pretrained(folder)
    ours = RunFolder(run).tokenizers()[0]
    rng = np.random.default_rng(0)
    letters = [*"abcdefghij klmnop rst uvwxyz ", "é", "漢", "Ä", "½", "\u3000", ">", "<"]
    random_texts = ["".join(rng.choice(letters, rng.integers(1, 30))) for _ in range(2000)]
    for text in [*TEXTS, *random_texts]:
        assert order[ours.encode(text)].tolist() == theirs(text).input_ids, text


def test_added_tokens_of_transformers_are_imported(opus, transformers, tmp_path):
    """Added to tokenizer and model: the same ids of texts, and the same log-probabilities."""
    import torch

    folder, model, _ = opus
    tokenizer = transformers.MarianTokenizer.from_pretrained(folder)
    tokenizer.add_tokens(["<ph>", "<ph1>"])
    tokenizer.add_tokens(["__X__"], special_tokens=True)
    torch.manual_seed(1)
    model.resize_token_embeddings(len(tokenizer), mean_resizing=False)
    with torch.no_grad():
        model.model.shared.weight[-3:].normal_(0, 0.3)
    model.save_pretrained(tmp_path / "tuned")
    tokenizer.save_pretrained(tmp_path / "tuned")
    flaxformer_min.import_model(tmp_path / "tuned", tmp_path / "again")
    pairs = [("the <ph> house", "a __X__ <ph1>"), ("red", ">>deu<< house <ph>")]
    assert_values_of_transformers(tmp_path / "again", model, tokenizer, pairs)
    flaxformer_min.export(tmp_path / "again", tmp_path / "out", format="marian")
    exported = transformers.MarianTokenizer.from_pretrained(tmp_path / "out")
    order = read_marian(tmp_path / "tuned").vocabularies[1].order
    ours = RunFolder(tmp_path / "again").tokenizers()[0]
    texts = [*TEXTS, "the <ph> house", "<ph1>", "a<ph>__X__ b", "__X__>>deu<< the", "__ X__"]
    for text in texts:
        assert order[ours.encode(text)].tolist() == tokenizer(text).input_ids, text
        assert exported(text).input_ids == ours.encode(text), text


@pytest.mark.parametrize("place", [2, -2])
def test_the_end_may_be_anywhere_and_a_piece_may_be_called_s(opus, transformers, tmp_path, place):
    """The newer generation of OPUS-MT sorts its vocabulary: same scores as `transformers`."""
    import torch

    folder, model, _ = opus
    pieces = list(json.loads((folder / "vocab.json").read_text()))
    pieces[pieces.index("漢")] = "<s>"
    order = np.arange(len(pieces))[1:]
    order = np.insert(order, place % len(order), 0)
    with torch.no_grad():
        model.model.shared.weight[:] = model.model.shared.weight[order].clone()
        model.final_logits_bias[:] = model.final_logits_bias[:, order].clone()
    end = order.tolist().index(0)
    for settings in (model.config, model.generation_config):
        settings.eos_token_id = settings.forced_eos_token_id = end
    model.save_pretrained(tmp_path / "sorted")
    for name in ("source.spm", "target.spm", "tokenizer_config.json"):
        (tmp_path / "sorted" / name).write_bytes((folder / name).read_bytes())
    vocabulary = {pieces[old]: new for new, old in enumerate(order)}
    (tmp_path / "sorted" / "vocab.json").write_text(json.dumps(vocabulary))
    tokenizer = transformers.MarianTokenizer.from_pretrained(tmp_path / "sorted")
    assert tokenizer(LINES[0]).input_ids[-1] == end
    flaxformer_min.import_model(tmp_path / "sorted", tmp_path / "again")
    assert_values_of_transformers(tmp_path / "again", model, tokenizer, PAIRS[:2])


def test_an_imported_tokenizer_samples_pickles_and_decodes(of_marian, tmp_path):
    """As the package's own does: the first segmentation is the best, and all decode to the text."""
    flaxformer_min.import_model(of_marian[0], tmp_path / "run")
    run = RunFolder(tmp_path / "run")
    source, target = run.tokenizers()
    copied = pickle.loads(pickle.dumps(source))
    assert copied == source and hash(copied) == hash(source) and copied != object()
    text = ">>deu<<the old house"
    segmentations = source.encode_segmentations(text, 4)
    assert segmentations[0] == source.encode(text)
    assert len(set(map(tuple, segmentations))) == 4
    assert {source.decode(ids[1:]) for ids in segmentations} == {"the old house"}
    assert source.encode_segmentations(text, 1) == [source.encode(text)]
    assert {ids[0] for ids in segmentations} == {source.encode(">>deu<<")[0]}
    assert target.vocab_size == len(target.log_probs()) == run.config().model.vocab_size
    assert (source.log_probs() <= 0).all()
    with pytest.raises(ValueError, match="lone surrogate"):
        source.encode("\ud800")


@pytest.mark.slow
def test_a_trained_model_is_searched_by_beam_as_generate_does(transformers, tmp_path):
    """Without a length penalty, where both mean the same by a score: every translation is equal."""
    import torch

    lines = [each["source"] for each in json.loads(EXPECTED.read_text())]
    folder, run = export_and_import(GOLDEN, tmp_path)
    ours = Translator.load(run).translate(lines, beam_size=4, length_penalty=0.0)
    model = transformers.MarianMTModel.from_pretrained(folder).eval()
    tokenizer = transformers.MarianTokenizer.from_pretrained(folder)
    with torch.inference_mode():
        found = model.generate(
            **tokenizer(lines, return_tensors="pt", padding=True),
            num_beams=4,
            length_penalty=0.0,
            max_new_tokens=90,
            max_length=None,
        )
    theirs = tokenizer.batch_decode(found, skip_special_tokens=True)
    assert [text.strip() for text in ours] == [text.strip() for text in theirs]


def test_a_suppressed_token_is_suppressed_in_both(opus, transformers, tmp_path):
    """The likeliest one at first: both continue with the same other tokens."""
    folder, model, run = opus
    batch = transformers.MarianTokenizer.from_pretrained(folder)([LINES[0]], return_tensors="pt")
    size = model.config.vocab_size
    options = {"num_beams": 1, "max_new_tokens": 6, "max_length": None}
    options["forced_eos_token_id"] = None

    def generated(*more):
        bad = [[size - 1], [1], *([number] for number in more)]
        return model.generate(**batch, **options, bad_words_ids=bad)[0].tolist()[1:]

    first = generated()[0]
    other = generated(first)
    assert first not in other
    rewrite(folder / "generation_config.json", bad_words_ids=[[size - 1]], suppress_tokens=[first])
    flaxformer_min.import_model(folder, tmp_path / "suppressed")
    translator = Translator.load(tmp_path / "suppressed")
    order = read_marian(folder).vocabularies[1].order
    ids = translator.source_tokenizer.encode(LINES[0])
    config = translator.search_config(beam_size=1)
    (found,) = (each for line, each in translator.runner.search({1: ids}, {1: []}, config) if line)
    assert order[found.ids[0, 0]].tolist()[:6] == other


@pytest.mark.slow
def test_an_imported_run_can_be_fine_tuned_and_exported(marian, tmp_path):
    """Its settings and tokenizers go on; the run that starts from it learns, and is exported."""
    run = tmp_path / "run"
    flaxformer_min.import_model(marian, run)
    config = changed(RunFolder(run).config(), "data", rows_per_batch=4)
    config = changed(config, "data", source_row_length=32, target_row_length=32)
    config = changed(config, "training", init_from=str(run), steps=4, warmup_steps=2)
    config = changed(config, "training", validation_sentences=0)
    pairs = {"train": PAIRS * 4, "validation": PAIRS[:4]}
    result = train(config, tmp_path / "fine", pairs=pairs)
    before = [each.log_probs for each in Translator.load(run).score(PAIRS[:4])]
    assert result.step == 4 and result.validation["loss"] < -np.mean(np.concatenate(before))
    flaxformer_min.export(tmp_path / "fine", tmp_path / "out", format="marian")
    assert (tmp_path / "out" / "model.safetensors").exists()
    assert config.data.normalization is None  # the rules of its own .spm
    with pytest.raises(ValueError, match="data.tokenizers must be 'imported'"):
        wrong = changed(config, "data", tokenizers="trained", normalization="nmt_nfkc")
        train(wrong, tmp_path / "wrong", pairs=pairs)
    with pytest.raises(ValueError, match="'imported' needs the run .* with training.init_from"):
        alone = changed(config, "training", init_from="")
        train(alone, tmp_path / "alone", pairs=pairs)
    with pytest.raises(ValueError, match=r"an imported model\. .*--training.init-from .*/run"):
        train(alone, run, pairs=pairs)  # its other settings do not matter, for it cannot go on
    with pytest.raises(ValueError, match="its model was imported. Pass pairs, or .*--data.corpus"):
        train(config, tmp_path / "other")


@pytest.fixture
def of_marian(tmp_path):
    """A folder in Marian's own format, and the arrays of its model."""
    own = tmp_path / "of_marian"
    own.mkdir()
    spm = train_spm(own / "source.spm", f"{WORDS['source']} {WORDS['target']}")
    (own / "target.spm").write_bytes((own / "source.spm").read_bytes())
    write_yml(own / "opus.vocab.yml", sorted([*pieces_of(spm), ">>deu<<"]))
    return own, write_model(own, ["opus.vocab.yml"], shared=True, depth=2)


def test_an_import_searches_as_decoder_yml_says(of_marian, tmp_path):
    """A score is divided by length ** normalize, which our alpha comes nearest to."""
    own = of_marian[0]
    path = own / "decoder.yml"
    text = path.read_text()
    path.write_text(f"{text}normalize: 0.6\nword-penalty: 0\nmini-batch: 1\n")
    flaxformer_min.import_model(own, tmp_path / "again")
    decoding = RunFolder(tmp_path / "again").config().decoding
    assert (decoding.beam_size, decoding.length_penalty) == (2, pytest.approx(0.6 * 20 / 15))
    for line, message in (
        ("word-penalty: 0.3", "word-penalty must be 0, .*; got '0.3'. .*--ignore word-penalty"),
        ("normalize: x", "normalize must be a number of at least 0; got 'x'"),
    ):
        path.write_text(f"{text}{line}\n")
        assert_not_imported(own, message)


def test_marians_settings_that_are_not_understood_are_named(of_marian):
    """A recurrent decoder, norms in unknown places, other depths; and a file without settings."""
    own, arrays = of_marian
    text = arrays["special:model.yml"].tobytes().decode()
    for old, new, message in (
        ("self-attention", "rnn", "autoreg must be 'self-attention'; got 'rnn'"),
        ('ss: ""', "ss: n", "'n', 'da' and 'n' .*; got .*preprocess='n'"),
        ("dec-depth: 2", "dec-depth: 1", "decoder_l2"),
        ("dim-emb: 16", "dim-emb: x", "dim-emb must be a whole number"),
        ("relu", "gelu", "activation must be relu or swish; got 'gelu'"),
        ("dim-emb", "  dim-emb", "must be YAML; .* line 2"),
        ("type:", "transformer-tied-layers:\n  - 1\ntype:", "tied-layers must be ''"),
    ):
        assert old in text
        changed = np.frombuffer(text.replace(old, new).encode(), np.int8)
        np.savez(own / "model.npz", **{**arrays, "special:model.yml": changed})
        assert_not_imported(own, message)
    for name, shape, message in (
        ("Wtype", (2, 2), "'Wtype' is not understood"),
        ("encoder_l1_ffn_W1", (16, 7), "must have the shape"),
    ):
        np.savez(own / "model.npz", **{**arrays, name: np.zeros(shape, np.float32)})
        assert_not_imported(own, message)
    del arrays["special:model.yml"]
    np.savez(own / "model.npz", **arrays)
    assert_not_imported(own, "must hold 'special:model.yml'")


def test_an_npz_holds_numbers_and_nothing_else(tmp_path):
    """Headers that numpy parses as Python, impossible shapes, missing bytes, and other types."""
    path = tmp_path / "model.npz"
    headers = ["(((", "{'descr': ',f4,', 'fortran_order': False, 'shape': (1,)}", "-" * 9_000]
    headers += ["{'descr': '<f4', 'fortran_order': False, 'shape': (0, 1" + "0" * 30 + "), }"]
    entries = [
        b"\x93NUMPY\x01\x00" + struct.pack("<H", max(len(text), 118)) + text.ljust(118).encode()
        for text in headers
    ]
    for content in (*entries, bytes(100)):
        with zipfile.ZipFile(path, "w") as archive:
            archive.writestr("Wemb.npy", content)
        if content == bytes(100):
            whole = bytearray(path.read_bytes())
            whole[whole.index(b"PK\x01\x02") + 20] = 200  # its compressed size
            path.write_bytes(whole)
        with pytest.raises(ValueError, match=r"must be a whole .npz of numbers; .+\."):
            read_npz(path)
    for values in (np.zeros((4, 4), np.complex64), np.array(["a"]), np.zeros(4, "datetime64[s]")):
        np.savez(path, Wemb=values)
        with pytest.raises(ValueError, match="'Wemb' has the type"):
            read_npz(path)


def test_hostile_files_of_marian_are_refused(of_marian, tmp_path):
    """A pickle, a claim of 2 GB, a zip bomb, a truncated file, a path that leaves the folder."""
    own = of_marian[0]
    model, vocabulary = own / "model.npz", own / "opus.vocab.yml"
    whole = model.read_bytes()
    model.write_bytes(whole[:-100])
    assert_not_imported(own, "must be a whole .npz")
    np.savez(model, Wemb=np.array([{"a": 1}], object))
    assert_not_imported(own, "must be a whole .npz")
    header = b"\x93NUMPY\x01\x00\x76\x00" + b"{'descr': '<f4', 'fortran_order': False, "
    header += b"'shape': (1000000000, 2), }".ljust(0x76 - len(header) + 10 - 1) + b"\n"
    with zipfile.ZipFile(model, "w") as archive:
        archive.writestr("Wemb.npy", header)
    assert_not_imported(own, "claims 8,000,000,000 bytes")
    with zipfile.ZipFile(model, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("Wemb.npy", bytes(10_000_000))
    assert_not_imported(own, "claims 10,000,000 bytes of")
    model.write_bytes(whole)
    outside = tmp_path / "outside.yml"
    outside.write_bytes(vocabulary.read_bytes())
    for name in ("../outside.yml", str(outside)):
        (own / "decoder.yml").write_text(f"models: [model.npz]\nvocabs: [{name}]\n")
        assert_not_imported(own, "must have a file outside.yml, which decoder.yml names as '")
    (own / "decoder.yml").write_text("models: [model.npz]\nvocabs: [opus.vocab.yml]\n")
    lines = vocabulary.read_text().splitlines(keepends=True)
    for content, message in (
        ([*lines, lines[5]], "comes twice"),
        ([*lines[:9], *lines[10:]], "no piece has the id 9"),
        ([*lines, "nothing\n"], r"must be YAML; while scanning a simple key line \d+"),
    ):
        vocabulary.write_text("".join(content))
        assert_not_imported(own, message)
