"""Folders as people have them: Marian's own after training, Hugging Face's after fine-tuning."""

import json
import os
import zipfile

import numpy as np
import pytest
from marian_models import (
    PAIRS,
    WORDS,
    assert_not_imported,
    assert_values_of_ctranslate2,
    name_a_final_norm,
    our_log_probs,
    train_spm,
    write_model,
)
from tiny_run import make_marian_model

import flaxformer_min
from flaxformer_min.cli import main
from flaxformer_min.config import Config
from flaxformer_min.interop import marian_import, marian_npz
from flaxformer_min.interop.files import read_file
from flaxformer_min.interop.marian_npz import read_npz
from flaxformer_min.interop.run_model import read_run, segmentation_code
from flaxformer_min.interop.safetensors import read_safetensors, write_safetensors
from flaxformer_min.storage.run_folder import RunFolder

BOTH = f"{WORDS['source']} {WORDS['target']}"
EOS_FIRST = {"eos_id": 0, "unk_id": 1, "bos_id": -1}


@pytest.fixture
def spm(tmp_path):
    """The vocabulary of both languages, from which a test makes a model."""
    train_spm(tmp_path / "vocab.spm", BOTH, **EOS_FIRST)
    return ["vocab.spm"]


@pytest.fixture
def trained(tmp_path):
    """A folder in which Marian has trained, with paths of the machine on which it did."""
    folder = tmp_path / "trained"
    folder.mkdir()
    train_spm(folder / "vocab.spm", BOTH, **EOS_FIRST)
    arrays = write_model(folder, ["vocab.spm"], shared=True)
    text = (folder / "decoder.yml").read_text().replace("- ", "- /home/train/run 1/")
    (folder / "decoder.yml").rename(folder / "model.npz.decoder.yml")
    (folder / "model.npz.decoder.yml").write_text(text)
    for name in ("model.npz.best-bleu.npz", "model.iter2000.npz"):
        np.savez(folder / name, **{**arrays, "Wemb": arrays["Wemb"] + 1})
        (folder / f"{name}.decoder.yml").write_text(text.replace("model.npz", name))
    np.savez(folder / "model.npz.optimizer.npz", adam_mt=np.zeros(3, np.float32))
    for name in ("model.npz.yml", "model.npz.progress.yml", "train.log"):
        (folder / name).write_text("seed: 1\n")
    return folder


def test_the_newest_model_of_a_training_folder_is_imported(trained, tmp_path, caplog):
    """The files of the same names are taken, and what was chosen is said."""
    flaxformer_min.import_model(trained, tmp_path / "run")
    assert "; model.npz is imported. Give the path of another to import that" in caplog.text
    assert "names /home/train/run 1/vocab.spm; the file of the same name" in caplog.text
    config = RunFolder(tmp_path / "run").config()
    assert config.decoding.beam_size == 2 and config.data.normalization is None
    assert_values_of_ctranslate2(tmp_path / "run", trained, ["vocab.spm"], ["vocab.spm"])


def test_another_model_of_a_training_folder_is_imported_by_its_path(trained, tmp_path):
    """Its own decoder.yml counts; without one, that of the newest names the vocabularies."""
    best = trained / "model.npz.best-bleu.npz"
    for name in ("with", "without"):
        flaxformer_min.import_model(best, tmp_path / name)
        table = RunFolder(tmp_path / name).params().params["embedding"]["table"]
        np.testing.assert_array_equal(table[3], np.load(best)["Wemb"][0])
        (trained / "model.npz.best-bleu.npz.decoder.yml").unlink(missing_ok=True)


def test_models_of_which_none_is_the_newest_are_listed(trained):
    """With the way out: the path of one."""
    (trained / "model.npz").rename(trained / "other.npz")
    (trained / "model.iter2000.npz").rename(trained / "model.npz")
    assert_not_imported(trained, "one model, an .npz; it has model.npz, .*such as .*npz")


@pytest.mark.parametrize(
    "models, vocabularies, message",
    [
        ("[model.npz]", "['gone/vocab.yml']", "have a file vocab.yml, which .*gone"),
        ('["a\\0b"]', "[v]", r"a name must be text without NUL; got 'a\\x00b'"),
        ('["\\ud800"]', "[v]", "decoder.yml must be YAML"),
        ("['']", "[v]", "a name must be text"),
        ("['..']", "[v]", "must have a file .., which"),
        ("{a: b}", "[v]", "must list models; got {'a': 'b'}"),
        ("[[a]]", "[v]", r"must list models; got \[\['a'\]\]"),
        ("[model.npz]", "[vocab.spm, vocab.spm, vocab.spm]", "source and target"),
        ("[a.npz, b.npz]", "[vocab.spm]", "names an ensemble; import its models one by one"),
        ("&m [model.npz]", "*m", "line 1: an anchor or alias is not understood"),
    ],
)
def test_names_that_lead_nowhere_are_refused(trained, models, vocabularies, message):
    (trained / "decoder.yml").write_text(f"models: {models}\nvocabs: {vocabularies}\n")
    assert_not_imported(trained, message)


def test_entries_of_an_npz_that_share_bytes_are_refused(tmp_path):
    """A small file would become any number of large arrays."""
    path = tmp_path / "model.npz"
    np.savez(path, w=np.random.default_rng(0).integers(0, 256, 3_000, np.uint8))
    assert read_npz(path)["w"].shape == (3_000,)
    with zipfile.ZipFile(path, "a") as archive:
        archive.writestr("more.npy", archive.read("w.npy"))
        archive.filelist += archive.filelist * 4
    with pytest.raises(ValueError, match="its entries claim .* bytes of a file of"):
        read_npz(path)


@pytest.mark.parametrize("kind", ["pipe", "device", "folder"])
@pytest.mark.parametrize(
    "name",
    [
        *("trained/model.npz", "trained/vocab.spm", "trained/model.npz.decoder.yml"),
        *("model/config.json", "model/generation_config.json", "model/vocab.json"),
        *("model/source.spm", "model/model.safetensors"),
    ],
)
def test_a_file_that_is_none_is_refused_at_once(trained, hugging_face, tmp_path, name, kind):
    """A pipe would be waited for, and a device has no end."""
    path = tmp_path / name
    path.unlink()
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "device":
        path.symlink_to("/dev/zero")
    else:
        path.mkdir()
    assert_not_imported(path.parent, "must|one model")


@pytest.fixture
def hugging_face(tmp_path):
    """A folder of Hugging Face, as an export writes it."""
    return make_marian_model(tmp_path / "model")


def update(path, **changes):
    content = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps({**content, **changes}))


def test_a_file_that_is_too_large_is_not_read(tmp_path):
    """A hole of a terabyte takes no time, and no memory."""
    path = tmp_path / "vocab.json"
    with path.open("wb") as file:
        file.truncate(10**12)
    with pytest.raises(ValueError, match="at most 100,000,000 bytes; it has 1,000,000,000,000"):
        read_file(path)


def test_limits_and_sampling_are_named_once_and_left_out(hugging_face, tmp_path, caplog):
    """Ordinary fine-tuning writes them; none of them changes a search of this package."""
    generation = hugging_face / "generation_config.json"
    update(generation, max_new_tokens=128, temperature=0.7, top_k=50, cache_implementation="static")
    flaxformer_min.import_model(hugging_face, tmp_path / "run")
    (said,) = [record.getMessage() for record in caplog.records]
    assert "max_new_tokens=128, temperature=0.7." in said and "top_k" not in said
    assert not (tmp_path / "run" / "import.json").exists()


def test_the_shortest_length_is_that_of_this_search(hugging_face, tmp_path):
    """`min_length` counts the decoder's start, `min_new_tokens` does not."""
    generation = hugging_face / "generation_config.json"
    for name, value in (("min_length", 6), ("min_new_tokens", 5)):
        update(generation, min_length=0, min_new_tokens=0)
        update(generation, **{name: value})
        flaxformer_min.import_model(hugging_face, tmp_path / name)
        assert RunFolder(tmp_path / name).config().decoding.min_length == 5


CHANGING = {"no_repeat_ngram_size": 3, "repetition_penalty": 1.3}
CHANGING |= {"forced_bos_token_id": 7, "do_sample": True}


@pytest.mark.parametrize("name, value", CHANGING.items())
def test_what_changes_a_search_is_refused_or_noted(hugging_face, tmp_path, capsys, name, value):
    """By default the model is refused; with --ignore the run says what was left out."""
    update(hugging_face / "generation_config.json", **{name: value})
    command = ["import", str(hugging_face), str(tmp_path / "run")]
    assert main(command) == 2
    assert f"--ignore {name}" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()
    assert main([*command, "--ignore", name]) == 0
    note = json.loads((tmp_path / "run" / "import.json").read_text())
    assert note == {"model": "model", "ignored": {name: value}}
    Config.from_json((tmp_path / "run" / "config.json").read_text())


def test_only_settings_of_a_search_can_be_ignored(hugging_face, tmp_path):
    """Unknown ones, too, but none that makes another model, and none that is not there."""
    update(hugging_face / "config.json", frobnicate=1)
    assert_not_imported(hugging_face, "'frobnicate' is not understood. .*--ignore frobnicate")
    for name in ("d_model", "no_repeat_ngram_size"):
        assert_not_imported(
            hugging_face, f"can be ignored; '{name}' is none that", ignore=["frobnicate", name]
        )
    flaxformer_min.import_model(hugging_face, tmp_path / "run", ignore=["frobnicate"])
    update(hugging_face / "config.json", normalize_before=True)
    message, ignored = "normalize_before must be False", ["frobnicate", "normalize_before"]
    assert_not_imported(hugging_face, message, ignore=ignored)


def resize(folder, added, unnamed=0):
    """Add tokens with random embeddings, and embeddings that belong to no token."""
    weights = read_safetensors(folder / "model.safetensors")
    rng = np.random.default_rng(1)
    size = weights["model.shared.weight"].shape[0]
    more = len(added) + unnamed
    for name, axis in (("model.shared.weight", 0), ("final_logits_bias", 1)):
        shape = [more if n == axis else s for n, s in enumerate(weights[name].shape)]
        rows = rng.normal(0, 0.3, shape).astype(np.float32)
        weights[name] = np.concatenate([weights[name], rows], axis)
    write_safetensors(folder / "model.safetensors", weights)
    update(folder / "config.json", vocab_size=size + more, decoder_vocab_size=size + more)
    return {piece: size + number for number, piece in enumerate(added)}


@pytest.mark.parametrize("form", ["added_tokens.json", "tokenizer_config.json"])
def test_added_tokens_and_resized_embeddings_are_imported(hugging_face, tmp_path, form, caplog):
    """Each is one piece wherever it is, the longest of them first."""
    ids = resize(hugging_face, ["<ph>", "[x", "<ph>2"], unnamed=4)
    if form == "added_tokens.json":
        update(hugging_face / form, **ids)
    else:
        listed = {str(number): {"content": piece} for piece, number in ids.items()}
        update(hugging_face / form, added_tokens_decoder=listed)
    flaxformer_min.import_model(hugging_face, tmp_path / "run")
    assert "the last 4 of the model's" in caplog.text
    run = RunFolder(tmp_path / "run")
    size = run.model_config().vocab_size
    assert run.config().decoding.suppressed == tuple(range(size - 4, size))
    source = run.tokenizers()[0]
    for parts in (["the", "<ph>", "house"], ["the", "<ph>2", "[x"], ["a", "<ph>", "<ph>"]):
        expected = []
        for part in parts:
            expected += [part] if part in ids else source._processor.encode(part, out_type=str)
        assert source.pieces(source.encode("".join(parts))[:-1]) == expected
    assert source.decode(source.encode("the <ph> house")).split() == ["the", "<ph>", "house"]
    assert source.encode_segmentations("the <ph> house", 3) == [source.encode("the <ph> house")]
    assert source.encode_batch([]) == []


@pytest.mark.parametrize("symbols", [["<ph>", "__X__"], []])
def test_the_recipes_of_exports_segment_as_the_run_does(hugging_face, tmp_path, symbols):
    """Added tokens and tags included."""
    update(hugging_face / "added_tokens.json", **resize(hugging_face, [*symbols, ">>deu<<"][:2]))
    flaxformer_min.import_model(hugging_face, tmp_path / "run")
    model = read_run(tmp_path / "run")
    tokenizer = model.tokenizers[0]
    lines = ["the <ph> house__X__", "", ">>deu<<a dog", "<ph>>>deu<< a", ">>fra<< nine doors"]
    names = {"source_spm": tokenizer._processor, "lines": lines}
    exec(segmentation_code(model), names)
    encoded = [
        [*(tokenizer._ids.get(piece, 1) for piece in pieces), 3] for pieces in names["pieces"]
    ]
    assert encoded == tokenizer.encode_batch(lines)


def test_an_added_token_must_agree_with_the_vocabulary(hugging_face):
    added = resize(hugging_face, ["<ph>"])["<ph>"]
    word = {str(added): {"content": "<ph>", "single_word": True}}
    for name, changes, message in (
        ("added_tokens.json", {"<ph>": 5}, "the id 5 belongs to"),
        ("added_tokens.json", {"▁h": added}, "must give '▁h' the id of the added token"),
        ("added_tokens.json", {"<ph>": "x"}, "must be text with an id; got '<ph>'"),
        ("tokenizer_config.json", {"added_tokens_decoder": word}, "must not have single_word"),
    ):
        (hugging_face / "added_tokens.json").write_text("{}")
        update(hugging_face / name, **changes)
        assert_not_imported(hugging_face, message)


def test_ends_may_be_lists_of_one(hugging_face, tmp_path):
    """As newer versions of transformers may write them; two ends are another search."""
    update(hugging_face / "generation_config.json", eos_token_id=[3], forced_eos_token_id=[3])
    flaxformer_min.import_model(hugging_face, tmp_path / "run")
    update(hugging_face / "generation_config.json", eos_token_id=[3, 5])
    assert_not_imported(hugging_face, "eos_token_id must be the same in")


def test_too_little_memory_is_told_in_a_sentence(hugging_face, monkeypatch):
    """Not as damage of a good file."""

    def too_large(path):
        raise MemoryError("Unable to allocate")

    monkeypatch.setattr(marian_import, "read_safetensors", too_large)
    assert_not_imported(hugging_face, "too little memory to import .*model: it takes about")


def test_a_table_of_both_languages_may_not_be_the_output(spm, tmp_path):
    """--tied-embeddings-src without the output: one table for both inputs, another behind."""
    arrays = write_model(tmp_path, spm, shared=True)
    output = np.random.default_rng(2).normal(0, 0.3, arrays["Wemb"].T.shape).astype(np.float32)
    np.savez(tmp_path / "model.npz", **arrays, decoder_ff_logit_out_W=output)
    flaxformer_min.import_model(tmp_path, tmp_path / "run")
    assert RunFolder(tmp_path / "run").model_config().embeddings == "separate"
    assert_values_of_ctranslate2(tmp_path / "run", tmp_path, spm, spm)


@pytest.mark.parametrize("suffix, activation", [("_pre", "relu"), ("", "swish")])
def test_pre_norm_models_have_the_values_of_ctranslate2(spm, tmp_path, suffix, activation):
    """With a norm behind each stack; older files name the norms of layers without `_pre`."""
    arrays = write_model(tmp_path, spm, norm="pre", depth=2, activation=activation)
    np.savez(tmp_path / "model.npz", **{k.replace("_pre", suffix): v for k, v in arrays.items()})
    flaxformer_min.import_model(tmp_path, tmp_path / "run")
    config = RunFolder(tmp_path / "run").model_config()
    assert (config.norm, config.num_layers, config.activation) == ("pre", 2, activation)
    assert_values_of_ctranslate2(tmp_path / "run", tmp_path, spm, spm)


@pytest.mark.parametrize("top", ["n", ""])
def test_a_pre_norm_import_goes_out_to_ctranslate2(spm, tmp_path, top):
    """And scores there as here, with and without a norm behind each stack."""
    import ctranslate2

    write_model(tmp_path, spm, norm="pre", top=top)
    flaxformer_min.import_model(tmp_path, tmp_path / "run")
    flaxformer_min.export(tmp_path / "run", tmp_path / "out", format="ctranslate2")
    source, target = RunFolder(tmp_path / "run").tokenizers()
    found = ctranslate2.Translator(str(tmp_path / "out")).score_batch(
        [source.pieces(source.encode(text)[:-1]) for text, _ in PAIRS],
        [target.pieces(target.encode(text)[:-1]) for _, text in PAIRS],
    )
    for ours, theirs in zip(our_log_probs(tmp_path / "run"), found, strict=True):
        np.testing.assert_allclose(ours, theirs.log_probs, atol=1e-4, rtol=0)


def test_a_pre_norm_without_a_final_norm_has_the_values_of_ctranslate2(spm, tmp_path, monkeypatch):
    """A norm in the file that the settings do not name is refused."""
    arrays = write_model(tmp_path, spm, norm="pre", top="", depth=2)
    monkeypatch.setattr(marian_npz, "EPSILON", 1e-5)  # as its converter leaves it
    flaxformer_min.import_model(tmp_path, tmp_path / "run")
    config = RunFolder(tmp_path / "run").model_config()
    assert (config.norm, config.final_norm) == ("pre", False)
    name_a_final_norm(tmp_path / "model.npz", monkeypatch)
    assert_values_of_ctranslate2(tmp_path / "run", tmp_path, spm, spm)
    np.savez(tmp_path / "model.npz", **arrays, encoder_top_ln_scale=np.ones((1, 16), np.float32))
    assert_not_imported(tmp_path, "'encoder_top_ln_scale' is not understood")
