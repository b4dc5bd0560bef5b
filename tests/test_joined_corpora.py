"""Several corpora in one run: weights, splits, and a run equal to one on written-out copies."""

import logging
import pickle
from pathlib import Path

import jax
import numpy as np
import pytest
from tiny_run import make_tiny_run
from training_jobs import changed, small_config

from flaxformer_min.cli import main
from flaxformer_min.config import DataConfig
from flaxformer_min.data.batches import TrainingBatches
from flaxformer_min.data.corpora import languages_of, read_pairs, splits
from flaxformer_min.experiment.prepare import prepare
from flaxformer_min.storage.run_folder import RunFolder


def write(folder: Path, **files: str) -> Path:
    """Write text files of one line a character, named by split and language."""
    folder.mkdir(parents=True)
    for name, lines in files.items():
        (folder / name.replace("_", ".")).write_text("".join(f"{each}\n" for each in lines))
    return folder


@pytest.fixture
def corpora(tmp_path):
    """Two corpora and the text that names both, the second three times."""
    write(tmp_path / "a,b", train_en="abc", train_de="ABC", val_en="v", val_de="V")
    write(tmp_path / "mine", train_en="xy", train_de="XY", dev_en="d", dev_de="D")
    write(tmp_path / "last", train_en="z", train_de="Z", test_en="t", test_de="T")
    return f"text:{tmp_path}/a,b,text:{tmp_path}/mine*3, text:{tmp_path}/last"


def test_each_pair_comes_as_often_as_the_weight_of_its_corpus(corpora):
    pairs = read_pairs(corpora, "train", "en-de")
    expected = [(each, each.upper()) for each in "abcxyxyxyz"]
    assert [*pairs] == expected and [pairs[i] for i in range(-10, 10)] == expected * 2
    for part in (slice(2, 9), slice(None, None, 3), slice(8, 1, -2), slice(5, 5), slice(4, 6)):
        assert pairs[part] == expected[part]
    assert [*pickle.loads(pickle.dumps(pairs))] == expected
    assert pairs.languages == languages_of(corpora, "en-de") == ("en", "de")


def test_a_weight_is_part_of_what_identifies_the_text(corpora):
    found = {
        read_pairs(each, "train", "en-de").fingerprint()
        for each in (corpora, corpora.replace("*3", "*2"), corpora.replace("*3", ""))
    }
    assert len(found) == 3


def test_other_splits_are_those_of_the_first_corpus_that_has_them(corpora, tmp_path, caplog):
    """Whatever each calls its validation split; which one it is, is logged."""
    caplog.set_level(logging.INFO)
    assert [*read_pairs(corpora, "validation", "en-de")] == [("v", "V")]
    assert f"validation: of text:{tmp_path}/a,b, the first" in caplog.text
    assert [*read_pairs(corpora, "test", "en-de")] == [("t", "T")]
    assert f"test: of text:{tmp_path}/last, the first" in caplog.text
    assert splits(corpora, "en-de") == ["dev", "test", "train", "val"]
    with pytest.raises(ValueError, match="mine.* has no split 'other'; it has dev, test, train"):
        read_pairs(corpora, "other", "en-de")


@pytest.mark.parametrize("weight", ["0", "1.5", "", "1001", "٣"])
def test_a_weight_is_a_whole_number(corpora, weight):
    with pytest.raises(ValueError, match="weight of a corpus must be a whole number from 1 to 1,0"):
        read_pairs(corpora.replace("*3", f"*{weight}"), "train", "en-de")


def test_a_star_may_belong_to_a_folder(tmp_path):
    """With a slash at the end."""
    write(tmp_path / "a*2", train_en="a", train_de="A")
    assert len(read_pairs(f"text:{tmp_path}/a*2/", "train", "en-de")) == 1
    assert len(read_pairs(f"text:{tmp_path}/a*2/*4", "train", "en-de")) == 4


def test_corpora_that_cannot_be_joined_are_refused(corpora, tmp_path):
    with pytest.raises(ValueError, match="comes twice. Give it a weight, as in text:.*mine"):
        read_pairs(f"{corpora},text:{tmp_path}/mine", "train", "en-de")
    (tmp_path / "table").mkdir()
    (tmp_path / "table" / "train.tsv").write_text("a\tA\n")
    with pytest.raises(ValueError, match="cldr:en-ko is en-ko, .*table is source-target. Name"):
        read_pairs(f"cldr:en-ko,text:{tmp_path}/table", "train")
    (tmp_path / "last" / "train.en").unlink()
    with pytest.raises(ValueError, match="last has no split 'train'; it has test"):
        read_pairs(corpora, "train", "en-de")


def test_a_run_of_weighted_corpora_reads_written_out_copies(tmp_path, caplog):
    """With the same tokenizer and the same batches, also where it continues within an epoch."""
    caplog.set_level(logging.INFO)
    config = small_config(tmp_path)
    first = Path(config.data.corpus.removeprefix("text:"))
    second, copies = tmp_path / "second", tmp_path / "copies"
    for folder in (second, copies):
        folder.mkdir()
    for language in ("en", "es"):
        lines = (first / f"train.{language}").read_text().splitlines(keepends=True)
        (second / f"train.{language}").write_text("".join(lines[:20]))
        (copies / f"train.{language}").write_text("".join([*lines, *lines[:20] * 2]))
        (copies / f"val.{language}").write_text((first / f"val.{language}").read_text())
    weighted, written = (
        prepare(RunFolder(tmp_path / name), changed(config, "data", corpus=corpus))
        for name, corpus in (
            ("weighted", f"text:{first},text:{second}*2"),
            ("written", f"text:{copies}"),
        )
    )
    assert f"train: 1 x 100 pairs of text:{first}, 2 x 20 pairs of text:{second}." in caplog.text
    assert "train: 140 pairs read" in caplog.text
    assert weighted.tokenizers == written.tokenizers
    found, expected = (
        TrainingBatches(each.encoded["train"], (24, 24), rows=4, seed=0)
        for each in (weighted, written)
    )
    batches = [next(expected) for _ in range(7)]
    found.set_state({**found.get_state(), "epoch": 0, "batch": 2})
    for batch in batches[2:]:
        jax.tree.map(np.testing.assert_array_equal, next(found), batch)
    assert found.get_state() == expected.get_state()
    found.close()
    expected.close()


def test_text_that_a_run_names_behind_another_corpus_is_not_read(tmp_path, capsys):
    """A run may come from a stranger, and name any file of this machine."""
    data = DataConfig(corpus=f"cldr:en-ko,text:{tmp_path}", languages="en-ko")
    run = make_tiny_run(tmp_path / "run", data=data)
    assert main(["evaluate", str(run)]) == 2
    assert "text outside of the run is read only if you name it" in capsys.readouterr().err
