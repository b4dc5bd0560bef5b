"""Every benchmark runs: each is called at a tiny size, with peers where they are installed.

Those that are not here have a test file of their own, or a test in test_faults.py.
"""

import sys

import pytest
from tiny_run import LINES, make_tiny_run

from benchmarks.crash import write_corpus
from flaxformer_min.config import DataConfig, SearchConfig

pytestmark = pytest.mark.slow

TINY = "--size", "tiny", "--rounds", "1"


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    """The options that name a small corpus, and a vocabulary that suits it."""
    corpus = write_corpus(tmp_path_factory.mktemp("corpus"), {"train": 200, "val": 8, "test": 20})
    return "--corpus", corpus, "--languages", "en-es", "--vocab-size", "280"


@pytest.fixture
def call(monkeypatch, capsys):
    """Run the main function of a benchmark with these options, and return what it prints."""

    def call(name, *options):
        monkeypatch.setattr(sys, "argv", [f"{name}.py", *map(str, options)])
        assert not __import__(name).main()
        return capsys.readouterr().out

    return call


@pytest.fixture(params=["alone", "beside PyTorch"])
def peers(request):
    """The options to measure with and without peers."""
    if request.param == "alone":
        return ("--no-peers",)
    pytest.importorskip("torch")
    pytest.importorskip("transformers")
    return ()


def test_decoding_gives_each_translation_the_length_of_its_reference(call, text, peers):
    options = "--sentences", "20", "--batch-size", "16", "--beam-sizes", "4"
    out = call("decoding", *text, *TINY, *options, *peers)
    assert "| flaxformer_min " in out
    assert ("Marian" in out) == (not peers)


def test_training_runs(call, text, peers):
    options = "--tokens", "64", "--row-lengths", "16", "16", "--steps", "2", "--patience", "0.02"
    out = call("training", *text, *TINY, *options, *peers)
    assert ("PyTorch eager" in out) == (not peers)


def test_a_trained_run_is_measured_beside_ctranslate2(call, text, tmp_path):
    pytest.importorskip("ctranslate2")
    decoding = SearchConfig(max_extra_tokens=4)
    run = make_tiny_run(tmp_path / "run", decoding=decoding, data=DataConfig(languages="en-es"))
    out = call("decoding", *text[:2], *TINY, "--run", run, "--beam-sizes", "1")
    for row in ("flaxformer_min", "bfloat16", "CTranslate2 float32", "CTranslate2 int8"):
        assert row in out


def test_a_server_is_measured_beside_ctranslate2(call, tmp_path):
    pytest.importorskip("ctranslate2")
    pytest.importorskip("uvicorn")
    decoding = SearchConfig(beam_size=2, max_extra_tokens=4)
    run = make_tiny_run(tmp_path / "run", decoding=decoding, data=DataConfig(languages="en-es"))
    (tmp_path / "lines").write_text("\n".join(LINES[:8]))
    options = "--source", tmp_path / "lines", "--clients", "1", "4", "--rounds", "1"
    out = call("serving", "--run", run, *options)
    assert out.count("| flaxformer_min ") == out.count("| CTranslate2 ") == 2


def test_an_imported_model_is_measured_beside_hugging_face(call, text):
    pytest.importorskip("torch")
    pytest.importorskip("transformers")
    out = call("opus", *text, *TINY, "--sentences", "2", "--beam-sizes", "2")
    assert "generate" in out


def test_a_device_agrees_with_a_cpu(call):
    out = call("correctness", "--device", "cpu", "--size", "tiny", "--steps", "1")
    assert out.count(" yes ") == 3


def test_the_data_pipeline_is_measured(call, text):
    options = "--pairs", "400", "--rows", "4", "--workers", "0", "2", "--seconds", "0.1"
    assert "Delivering" in call("data", *text, *options)


def test_starts_are_measured(call, text):
    sizes = "--model.vocab-size", "280", "--model.num-layers", "1", "--model.d-ff", "32"
    data = "--data.corpus", text[1], "--data.languages", "en-es"
    assert "programs compiled" in call("startup", "--rounds", "1", *data, *sizes)


def test_phrases_are_counted_by_kind(call, tmp_path):
    data = DataConfig("cldr:en-ko", languages="en-ko")
    decoding = SearchConfig(beam_size=1, max_extra_tokens=1)
    run = make_tiny_run(tmp_path / "run", data=data, decoding=decoding)
    assert "| all " in call("phrases", run)


def test_scaling_is_measured_and_drawn(call, tmp_path, monkeypatch):
    import scaling

    points = [scaling.Point(length=8, batch=n, vocabulary=50, depth=1) for n in (2, 4)]
    monkeypatch.setattr(scaling, "AXES", {"batch": points})
    picture = tmp_path / "scaling.svg"
    assert "exponent" in call("scaling", "--steps", "1", "--picture", picture)
    assert picture.exists()


def test_a_recurrent_model_is_trained_translates_and_is_looked_into(tmp_path, monkeypatch):
    """The parts of predecessors.py that its own tests replace by stand-ins."""
    import predecessors_study as study

    monkeypatch.setattr(study, "COPIES", {"train": 200, "validation": 24, "test": 2})
    monkeypatch.setattr(study.Study, "pairs", lambda self, task, split: study.copies(split))
    monkeypatch.setattr(study, "best_rate", lambda *_: 0.005)
    some = study.Study("", "", tmp_path, lambda: False)
    job = study.job_of(some, "copy", "attention", 0, steps=2)
    assert len(job.measure(some)["translations"]) == 2
    assert study.gradients_of(some, job)["after"]
    source, target = study.copies("test")[0]
    looked = study.cross_attention(study.restored(some, job), source, target)
    assert len(looked["weights"]) == len(looked["target"])


@pytest.fixture
def help_packages(tmp_path):
    """Two unpacked packages of help: a page in each split, and one with all that is left out."""
    pages = ("page 28", "page 42", "page 0")  # test, val, train; see the test
    texts = {
        page: [(f"Opens file {i} of {page}.", f"{page}의 파일 {i}") for i in range(9)]
        for page in pages
    }
    control = '<span class="MAC"><b>Command</b></span><span>Ctrl</span>+<br>A'
    texts["page 0"] += [
        ("Never <b>translated</b> &lt;text&gt;.", "Never translated &lt;text&gt;."),
        ("Only here.", None),
        (texts["page 28"][0][0].upper(), "대문자"),  # in the test
        texts["page 0"][0],  # a repetition
        (f"Press {control}\n now.", "Ctrl+A 누름"),
    ]
    for side, language in enumerate(("en-US", "ko")):
        folder = tmp_path / language / "usr/share/libreoffice/help" / language / "text" / "calc"
        folder.mkdir(parents=True)
        for page, pairs in texts.items():
            parts = [
                f'<p id="par_id{i}" class="x">{pair[side]}</p><p>No id.</p>'
                for i, pair in enumerate(pairs)
                if pair[side] is not None
            ]
            (folder / f"{page}.html").write_text("".join(["<p id='bm_1'>No.</p>", *parts]))
    return tmp_path / "en-US", tmp_path / "ko"


def test_packages_of_help_become_parallel_text_and_a_model(call, help_packages, tmp_path):
    """Paragraphs are aligned by page and id, and nothing of the test is in the training text."""
    import libreoffice

    for page, split in (("page 28", "test"), ("page 42", "val"), ("page 0", "train")):
        assert libreoffice.split_of(f"text/calc/{page}.html") == split
    folder, run = tmp_path / "text", tmp_path / "run"
    settings = "model.vocab-size 320 model.num-layers 1 model.d-ff 32 model.d-model 16 "
    settings += "model.num-heads 2 training.steps 1 training.cooldown-steps 1 "
    settings += "training.warmup-steps 1 decoding.beam-size 1"
    options = [word if word.isdigit() else f"--{word}" for word in settings.split()]
    options += "--data.cache-dir", tmp_path, "--workdir", run
    out = call("libreoffice", *help_packages, folder, "--train", *options)
    for line in ("not translated: 1", "on one side only: 1", "repeated: 2", "train: 10", "test: 9"):
        assert f"{line}\n" in out
    english = (folder / "train.en").read_text().splitlines()
    assert english[8:] == ["Opens file 8 of page 0.", "Press Ctrl+A now."]
    assert (folder / "train.ko").read_text().splitlines()[-1] == "Ctrl+A 누름"
    assert (run / "config.json").exists()
