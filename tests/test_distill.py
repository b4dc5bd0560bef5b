"""`distill`: what the student is trained on, each interruption, each error."""

import re
from pathlib import Path

import pytest
from tiny_run import make_tiny_run
from training_jobs import write_config

from benchmarks.crash import newest, write_corpus
from flaxformer_min import cli
from flaxformer_min.cli import distill
from flaxformer_min.cli import train as train_module
from flaxformer_min.config import DataConfig
from flaxformer_min.decoding.translator import Translator
from flaxformer_min.experiment.run import TrainResult
from flaxformer_min.storage.run_folder import RunFolder

SEVERAL = ["--distributed.coordinator", "here:1", "--distributed.num-processes", "2"]
SEVERAL += ["--distributed.process-id", "0"]
"""Options of one of two processes."""
WORDS = "one two three four five six seven eight nine ten".split()


pytestmark = pytest.mark.usefixtures("programs_are_shared")


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch):
    monkeypatch.setattr(distill, "CHUNK", 32)


@pytest.fixture
def untrained(monkeypatch):
    """The command ends where training would begin."""
    ended = lambda config, workdir, **_: TrainResult(RunFolder(workdir), 1, False, {})  # noqa: E731
    monkeypatch.setattr(train_module, "train", ended)


@pytest.fixture(scope="module")
def teacher(tmp_path_factory):
    """A run with random parameters: its translations are odd, and always the same."""
    data = DataConfig(languages="en-es")
    return str(
        make_tiny_run(tmp_path_factory.mktemp("teacher") / "run", lines=WORDS * 9, data=data)
    )


@pytest.fixture
def job(tmp_path):
    """A config of 9 steps and its text of 100 pairs, with empty sides and a split for tests."""
    config = write_config(tmp_path)
    write_corpus(tmp_path / "corpus", {"train": 100, "val": 40, "test": 4})
    replace_line(tmp_path / "corpus" / "train.en", 3, "")
    (tmp_path / "more.en").write_text("one two\n\nthree\n")
    return config


def replace_line(file, number, text):
    lines = file.read_text().splitlines()
    lines[number - 1] = text
    file.write_text("\n".join(lines) + "\n")


def lines_of(file):
    return Path(file).read_text().removesuffix("\n").split("\n")


def run(job, *arguments, workdir="student", steps=1):
    """The exit status of the command."""
    student = str(Path(job).parent / workdir)
    settings = ("--training.steps", str(steps))
    return cli.main(["distill", *arguments, "--config", job, "--workdir", student, *settings])


def text_of(job, workdir="student"):
    """The lines of both sides of the student's training text."""
    text = Path(job).parent / workdir / "distilled" / "text"
    return lines_of(text / "train.en"), lines_of(text / "train.es")


def test_a_student_is_trained_on_the_pairs_and_each_teachers_translations(
    untrained, teacher, job, capsys
):
    """Of runs, which translate further text as well, and of a file, line by line."""
    folder = Path(job).parent
    file = folder / "by_hand.es"
    file.write_text("".join(f"por mano {number}\n" for number in range(1, 101)))
    replace_line(file, 7, " ")
    replace_line(file, 8, lines_of(folder / "corpus" / "train.es")[7])
    more = str(folder / "more.en")
    assert run(job, teacher, str(file), "--monolingual", more, "--beam-size", "1") == 0
    sources, targets = text_of(job)
    corpus = [lines_of(folder / "corpus" / f"train.{language}") for language in ("en", "es")]
    assert [sources[:100], targets[:100]] == corpus
    to_translate = [line for line in [*corpus[0], *lines_of(more)] if line]
    expected = Translator.load(teacher).translate(to_translate, beam_size=1)
    kept = [(s, t) for s, t in zip(to_translate, expected, strict=True) if t.strip()]
    by_hand = [
        pair for pair in zip(corpus[0], lines_of(file), strict=True) if all(map(str.strip, pair))
    ]
    assert list(zip(sources, targets, strict=True))[100:] == kept + by_hand
    printed, errors = capsys.readouterr()
    assert f"98 translations of {file}: 1 equal to the original, 2 empty ones dropped" in printed
    assert f"{len(kept)} translations of {teacher}: 0 equal" in printed
    assert errors == ""


@pytest.mark.parametrize(
    "sampling",
    [
        pytest.param((), id="best"),
        pytest.param(("--sample", "--seed", "3"), id="samples", marks=pytest.mark.slow),
    ],
)
def test_translations_continue_as_if_there_had_been_no_interruption(
    untrained, teacher, job, monkeypatch, capsys, sampling
):
    """Also after a kill in the middle of a write; two translations of each line."""
    options = (teacher, "--n-best", "2", *sampling)
    assert run(job, *options, workdir="uncut") == 0
    chunks, hypotheses = iter(range(2)), Translator.hypotheses

    def interrupted(self, *arguments, **settings):
        if next(chunks, None) is None:
            raise KeyboardInterrupt
        return hypotheses(self, *arguments, **settings)

    with monkeypatch.context() as patch:
        patch.setattr(Translator, "hypotheses", interrupted)
        run(job, *options)
    assert "Stopped. The same command continues." in capsys.readouterr().err
    unfinished = Path(job).parent / "student" / "distilled" / "teacher-1.es.unfinished"
    assert len(lines_of(unfinished)) == 2 * 32 * 2
    with unfinished.open("a") as file:
        file.write("half a chu")
    assert run(job, *options) == 0
    assert f"{teacher}: 64 lines are translated." in capsys.readouterr().out
    assert text_of(job) == text_of(job, "uncut")


def test_training_continues_as_of_any_run_and_nothing_is_translated_or_written_twice(
    teacher, job, monkeypatch, capsys
):
    """The text keeps its time of change; if written again, it would be encoded again."""
    student = Path(job).parent / "student"
    sizes = ("--model.vocab-size", "400")
    assert run(job, teacher, "--beam-size", "1", *sizes) == 0
    assert "4 sentences" in capsys.readouterr().out  # of the split for tests
    assert RunFolder(student).config().data.corpus == f"text:{student}/distilled/text"
    written = (student / "distilled" / "text" / "train.es").stat().st_mtime_ns
    monkeypatch.setattr(distill, "load", None)
    assert run(job, teacher, "--beam-size", "1", *sizes, steps=2) == 0
    assert "Continuing from step 1." in capsys.readouterr().out
    assert newest(student)[0] == 2
    assert (student / "distilled" / "text" / "train.es").stat().st_mtime_ns == written


@pytest.mark.slow
def test_an_ensemble_is_one_teacher_and_runs_by_themselves_are_several(
    untrained, teacher, job, tmp_path
):
    data = DataConfig(languages="en-es")
    other = str(make_tiny_run(tmp_path / "other", lines=WORDS * 9, data=data, seed=5))
    made = {}
    for workdir, options in {"one": ("--ensemble",), "two": ()}.items():
        assert run(job, teacher, other, "--beam-size", "1", *options, workdir=workdir) == 0
        files = sorted((tmp_path / workdir / "distilled").glob("teacher-*.es"))
        made[workdir] = [lines_of(file) for file in files]
    (together,), apart = made.values()
    sources = lines_of(tmp_path / "corpus" / "train.en")
    assert together == Translator.load(teacher, other).translate(sources, beam_size=1)
    assert len(apart) == 2 and together not in apart and apart[0] != apart[1]


@pytest.mark.parametrize(
    "arguments, expected",
    [
        (["none"], "a run is a folder; there is none at none."),
        (["short.es"], r"one line for each training pair; short.es has 2, text:\S+ has 100 pairs"),
        (["short.es", "--monolingual", "more.en"], "got files of translations only. Name a run"),
        (["TEACHER", "--n-best", "3"], "n_best must be at most beam_size, .* got 3 and 2"),
        (["TEACHER", "--seed", "3"], "--seed is for sampling; add --sample"),
        (["TEACHER", "--n-bset", "3"], "unrecognized arguments: --n-bset"),
        (["TEACHER", *SEVERAL], "distill runs in one process"),
        (["TEACHER", "--monolingual", "none.en"], "none.en"),
    ],
    ids=lambda each: " ".join(each) if isinstance(each, list) else "",
)
def test_an_error_names_the_rule_what_was_found_and_the_way_out(
    teacher, job, monkeypatch, capsys, arguments, expected
):
    monkeypatch.chdir(Path(job).parent)
    Path("short.es").write_text("uno\ndos\n")
    assert run(job, *(teacher if each == "TEACHER" else each for each in arguments)) == 2
    printed, errors = capsys.readouterr()
    assert re.search(rf"^flaxformer-min distill: error: .*{expected}", errors), errors
    assert "Translating" not in printed


def test_translations_made_otherwise_are_not_mixed(untrained, teacher, job, capsys):
    assert run(job, teacher, "--beam-size", "1") == 0
    assert run(job, teacher, "--beam-size", "2") == 2
    error = capsys.readouterr().err
    assert "holds translations that were made otherwise:\n  search: {'beam_size': 1" in error
    assert "choose another --workdir, or remove" in error
