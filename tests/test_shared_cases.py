"""Models as people sent them, in ../shared/cases: each with the right values.

A folder that is not there is skipped by name.
"""

import shutil
from pathlib import Path

import pytest
import yaml
from marian_models import (
    assert_values_of_ctranslate2,
    assert_values_of_transformers,
    name_a_final_norm,
    write_yml,
)

import flaxformer_min
from flaxformer_min.cli import main
from flaxformer_min.interop import marian_npz

CASES = Path(__file__).parents[2] / "shared" / "cases"


def case(name, *parts):
    """The folder of a case, or a file in it."""
    if not (CASES / name).is_dir():
        pytest.skip(f"shared/cases/{name} is not there")
    return CASES.joinpath(name, *parts)


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
    folder, _, model = name.partition("/")
    copy = shutil.copytree(case(folder, model), tmp_path / "model")
    monkeypatch.setattr(marian_npz, "EPSILON", 1e-5)  # as that converter leaves it
    flaxformer_min.import_model(copy, tmp_path / "run")
    if folder == "prenorm":
        name_a_final_norm(copy / "model.npz", monkeypatch)
    vocabularies = [listed(copy / each) for each in vocabularies]
    assert_values_of_ctranslate2(tmp_path / "run", copy, vocabularies, spms)


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
    theirs = transformers.MarianMTModel.from_pretrained(model)
    tokenizer = transformers.MarianTokenizer.from_pretrained(model)
    assert_values_of_transformers(tmp_path / "run", theirs, tokenizer)


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
