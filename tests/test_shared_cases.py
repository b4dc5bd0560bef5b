"""Models and text as people sent them, in ../shared/cases: each with the right value or refusal.

A folder that is not there is skipped by name.
"""

import logging
import pwd
import shutil
from functools import partial
from pathlib import Path

import jax
import numpy as np
import pytest
import yaml
from marian_models import PAIRS, our_log_probs, their_log_probs, write_yml
from tiny_run import make_tiny_run

import flaxformer_min
from flaxformer_min.cli import main
from flaxformer_min.config import Config, DataConfig
from flaxformer_min.data.corpora import read_pairs
from flaxformer_min.data.tokenizer import train_tokenizer
from flaxformer_min.experiment.prepare import open_text, prepare
from flaxformer_min.experiment.report import format_example
from flaxformer_min.experiment.run import TrainResult
from flaxformer_min.interop import marian_npz
from flaxformer_min.storage.run_folder import RunFolder
from flaxformer_min.system.compilation import enable_compilation_cache

CASES = Path(__file__).parents[2] / "shared" / "cases"


def case(name, *parts):
    """The folder of a case, or a file in it."""
    if not (CASES / name).is_dir():
        pytest.skip(f"shared/cases/{name} is not there")
    return CASES.joinpath(name, *parts)


def text_of(name, languages, **data):
    """The settings of a run on the text of a case."""
    settings = {"languages": languages, "source_row_length": 40, "target_row_length": 40, **data}
    return Config(DataConfig(f"text:{case(name, 'text')}", **settings))


def refused(capsys, *command):
    """The one sentence with which a command ends."""
    assert main([str(each) for each in command]) == 2
    output = capsys.readouterr()
    assert output.out == "" and len(output.err.splitlines()) == 1
    return output.err


# Models


def listed(path):
    """A vocabulary as the helpers of these tests write it."""
    if path.suffix != ".yml":
        return path.name
    content = yaml.load(path.read_text(encoding="utf-8"), yaml.BaseLoader)
    write_yml(path.with_name("listed.yml"), sorted(content, key=lambda piece: int(content[piece])))
    return "listed.yml"


SPMS = ["source.spm", "target.spm"]
SIDES = ["vocab.src.spm", "vocab.trg.spm"]
OF_MARIAN = [
    ("eos_not_first_npz/MODEL", ["opus.vocab.yml"], SPMS),
    ("evaluate_without_languages/MODEL", ["opus.vocab.yml"], SPMS),
    ("text_vocab/MODEL", ["m.src.vocab", "m.trg.vocab"], SPMS),
    ("sizes_differ/MODEL", SIDES, SIDES),
    ("marian_training_folder/MODEL", SIDES, SIDES),
    ("marian_training_folder/ABSOLUTE", ["vocab.spm"], ["vocab.spm"]),
    ("bpe_sampling/MODEL", ["vocab.spm"], ["vocab.spm"]),
    ("prenorm/MODEL", ["opus.vocab.yml"], SPMS),
]


@pytest.mark.parametrize("name, vocabularies, spms", OF_MARIAN, ids=[each[0] for each in OF_MARIAN])
def test_a_model_of_marian_has_the_log_probabilities_of_ctranslate2(
    tmp_path, monkeypatch, name, vocabularies, spms
):
    """Whose converter refuses a pre-norm model without a final norm, unless it is told of one."""
    from ctranslate2.specs.transformer_spec import TransformerSpec

    folder, _, model = name.partition("/")
    copy = shutil.copytree(case(folder, model), tmp_path / "model")
    monkeypatch.setattr(marian_npz, "EPSILON", 1e-5)  # as that converter leaves it
    flaxformer_min.import_model(copy, tmp_path / "run")
    if folder == "prenorm":
        arrays = dict(np.load(copy / "model.npz"))
        settings = (
            arrays["special:model.yml"].tobytes()[:-1] + b'transformer-postprocess-top: "n"\n\0'
        )
        arrays["special:model.yml"] = np.frombuffer(settings, np.int8)
        np.savez(copy / "model.npz", **arrays)
        monkeypatch.setattr(
            TransformerSpec, "from_config", partial(TransformerSpec.from_config, no_final_norm=True)
        )
    expected = their_log_probs(copy, [listed(copy / each) for each in vocabularies], spms)
    for ours, theirs in zip(our_log_probs(tmp_path / "run"), expected, strict=True):
        np.testing.assert_allclose(ours, theirs, atol=1e-4, rtol=0)


@pytest.mark.filterwarnings(
    "ignore:Recommended. pip install sacremoses", "ignore::DeprecationWarning"
)
@pytest.mark.parametrize(
    "name", ["generation_config/MODEL", "s_in_vocab_hf/MODEL", "s_in_vocab_hf/CONTROL"]
)
def test_a_model_of_hugging_face_is_imported_as_transformers_reads_it(tmp_path, caplog, name):
    """A limit has no effect here, and is named."""
    folder, _, model = name.partition("/")
    model = case(folder, model)
    flaxformer_min.import_model(model, tmp_path / "run")
    assert ("max_new_tokens" in caplog.text) == (folder == "generation_config")
    transformers = pytest.importorskip("transformers")
    import torch

    theirs = transformers.MarianMTModel.from_pretrained(model).eval()
    tokenizer = transformers.MarianTokenizer.from_pretrained(model)
    for (source, target), found in zip(PAIRS, our_log_probs(tmp_path / "run"), strict=True):
        batch = tokenizer(source, text_target=target, return_tensors="pt")
        with torch.no_grad():
            logits = theirs(**batch).logits[0]
        expected = logits.log_softmax(-1).gather(1, batch["labels"].T)[:, 0]
        np.testing.assert_allclose(found, expected.numpy(), atol=1e-4, rtol=0)


def test_an_imported_bpe_model_is_not_sampled_from(tmp_path, monkeypatch, capsys):
    """Said before a folder is begun."""
    flaxformer_min.import_model(case("bpe_sampling", "MODEL"), tmp_path / "run")
    monkeypatch.chdir(case("bpe_sampling"))
    said = refused(
        capsys,
        *("train", tmp_path / "run" / "config.json", "--workdir", tmp_path / "fine"),
        *("--training.init-from", tmp_path / "run", "--data.corpus", "text:text"),
        *("--data.languages", "en-de", "--data.subword-sampling", "0.3"),
    )
    assert "data.subword_sampling needs tokenizers that know the probability" in said
    assert "such as BPE. Leave it at 0." in said
    assert not (tmp_path / "fine").exists()


def test_a_run_without_languages_is_scored_in_the_one_that_is_named(tmp_path, capsys):
    """Japanese by its characters or words, not as one word."""
    folder = case("evaluate_without_languages")
    flaxformer_min.import_model(folder / "MODEL", tmp_path / "run")
    texts = ["--source", folder / "e.en", "--reference", folder / "e.ja"]
    command = ["evaluate", tmp_path / "run", *texts, "--beam-size", "1", "--max-extra-tokens", "1"]
    assert main([*map(str, command), "--languages", "en-ja"]) == 0
    output = capsys.readouterr()
    assert "tok:ja-mecab" in output.out or "tok:char" in output.out
    assert main([*map(str, command)]) == 0
    output = capsys.readouterr()
    assert "--languages" in output.err + output.out and "tok:13a" not in output.out


# Text


def test_a_blank_last_line_of_a_table_is_its_end():
    pairs = read_pairs(f"text:{case('blank_line_in_tsv', 'text')}", "train", "en-de")
    assert len(pairs) == 120 and all(all(pair) for pair in pairs)


@pytest.mark.parametrize("ending", ["bz2", "parquet", "xz", "zip", "zst"])
def test_a_compressed_file_is_no_input(tmp_path, capsys, ending):
    """Whose format is named, before anything is written."""
    path, out = case("compressed_input", f"a.{ending}"), tmp_path / "out"
    run = make_tiny_run(tmp_path / "run")
    said = refused(capsys, "translate", run, "--input", path, "--output", out)
    assert (
        str(path) in said
        and ("compressed" in said or "lines of UTF-8" in said)
        and not out.exists()
    )


def test_a_user_without_a_home_has_no_cache_and_no_error(monkeypatch, caplog):
    """The optional cache of programs is left out, with a warning."""
    case("no_home")

    def no_entry(number):
        raise KeyError(number)

    monkeypatch.setattr(pwd, "getpwuid", no_entry)
    for name in ("HOME", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    names = ("jax_compilation_cache_dir", "jax_enable_compilation_cache")
    before = {name: getattr(jax.config, name) for name in names}
    jax.config.update("jax_compilation_cache_dir", None)
    try:
        enable_compilation_cache()
        assert not jax.config.jax_enable_compilation_cache
    finally:
        for name, value in before.items():
            jax.config.update(name, value)
    assert "not cached: a cache needs a folder, and this user has no home. Set X" in caplog.text


def test_lines_that_end_in_cr_alone_are_refused(tmp_path, capsys, monkeypatch):
    """As input and as training text, before anything is written."""
    folder = case("cr_only")
    run = make_tiny_run(tmp_path / "run")
    assert "\\r" in refused(capsys, "translate", run, "--input", folder / "cr.txt")
    monkeypatch.chdir(folder)
    command = ["train", "--workdir", tmp_path / "new", "--data.corpus", "text:text"]
    assert "\\r" in refused(capsys, *command, "--data.languages", "en-de")
    assert not (tmp_path / "new").exists()


def test_control_characters_of_a_text_are_shown_as_escapes(tmp_path, monkeypatch, capsys):
    """In the example of a validation and in the command to copy."""
    folder = case("control_characters")
    config = text_of("control_characters", "en-de")

    def train(*arguments, **options):
        pair = open_text(config, None)[1]["validation"][0]
        assert {"\r", "\x1b"} <= {*pair[0]}
        logging.getLogger("flaxformer_min").info(format_example(pair, pair[1]))
        return TrainResult(RunFolder(tmp_path / "run"), 1, False, {}, example=pair[0])

    monkeypatch.setattr("flaxformer_min.cli.train.train", train)
    monkeypatch.chdir(folder)
    assert main(["train", "--workdir", str(tmp_path / "run")]) == 0
    shown = capsys.readouterr().out
    assert "one\\r two\\x1b[2Jthree" in shown and not {"\r", "\x1b"} & {*shown}


def test_text_without_spaces_has_pieces_per_character(tmp_path, caplog):
    """Of which one character has about one, or less; the other side has words."""
    caplog.set_level(logging.INFO)
    config = text_of("zh_pieces_per_word", "en-zh")
    model = flaxformer_min.ModelConfig(vocab_size=800, num_layers=1, d_model=16, num_heads=2)
    prepared = prepare(RunFolder(tmp_path / "run"), Config(config.data, model))
    counts = prepared.encoded["train"].counts
    rate = (counts.target_pieces - counts.kept) / counts.target_characters
    assert rate < 1.2 and f"pieces per character: {rate:.2f} target" in caplog.text
    assert "pieces per word: 1.00 source" in caplog.text


def test_the_same_text_in_other_characters_is_the_same_input(tmp_path):
    """Lines of the case by their numbers; a capital and a full stop are other text."""
    lines = case("unicode_input", "in.txt").read_bytes().decode().split("\n")
    tokenizer = train_tokenizer(lines * 9, 400, tmp_path / "tokenizer.model")
    ids = [tuple(tokenizer.encode(line)) for line in lines]
    same = [range(0, 11), (13, 14), (16, 18, 19), (24, 25)]
    for group in same:
        assert len({ids[number] for number in group}) == 1
    different = [0, 11, 12, 13, 15, 16, 17, 20, 21, 22, 23, 24]
    assert len({ids[number] for number in different}) == len(different)
    assert tokenizer.decode(ids[14]) == "C\u00f4te d\u2019Ivoire"
