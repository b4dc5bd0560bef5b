"""What a hostile or unlucky user does to the program, and what it does then."""

import copy
import dataclasses
import errno
import gzip
import importlib.util
import json
import logging
import multiprocessing
import os
import pickle
import random
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
import tracemalloc
import urllib.error
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny_run import LINES, make_tiny_run, random_params
from training_jobs import small_config, write_config

import flaxformer_min
from flaxformer_min import cli
from flaxformer_min.cli.train import read_arguments
from flaxformer_min.config import Config, DataConfig, ModelConfig
from flaxformer_min.data.corpora import languages_of, read_pairs
from flaxformer_min.data.tokenizer import train_tokenizer
from flaxformer_min.decoding.translator import Translator
from flaxformer_min.evaluation import bleu
from flaxformer_min.experiment.prepare import prepare
from flaxformer_min.experiment.run import train
from flaxformer_min.experiment.validation import target_language
from flaxformer_min.languages import join_languages, parse_languages
from flaxformer_min.model.transformer import Transformer
from flaxformer_min.storage.run_folder import RunFolder
from flaxformer_min.system.signals import InterruptOnSignal, StopRequest
from flaxformer_min.tokens import Batch, one_sentence_per_row
from flaxformer_min.training.metrics import MetricsLog, Window, read_metrics

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run of random parameters, to translate with; not to be changed."""
    return make_tiny_run(tmp_path_factory.mktemp("tiny") / "run")


def contents(folder):
    """Every file below a folder and what it holds."""
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


# A mistyped --workdir.


@pytest.mark.parametrize(
    "files",
    [
        {"lock": "my own notes"},
        {"lock": "17\n", "thesis.tex": "years of work"},
        {"lock": "my own notes", "config.json": '{"model_type": "bert"}'},
    ],
)
def test_a_mistyped_workdir_leaves_every_file_as_it_was(tmp_path, capsys, files):
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    before = contents(tmp_path)
    assert cli.main(["train", "--workdir", str(tmp_path)]) == 2
    assert capsys.readouterr().err.startswith("flaxformer-min train: error: ")
    assert contents(tmp_path) == before


@pytest.mark.parametrize("name", ["lock", "metrics.jsonl", "config.json", "checkpoints"])
def test_training_follows_no_link_out_of_the_run_folder(tmp_path, capsys, name):
    (tmp_path / "mine").write_text("17\n")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / name).symlink_to(tmp_path / "mine")
    assert cli.main(["train", "--workdir", str(tmp_path / "run")]) == 2
    assert f"{name} is a link to" in capsys.readouterr().err
    assert (tmp_path / "mine").read_text() == "17\n"


@pytest.mark.parametrize("name", ["lock", "metrics.jsonl"])
def test_a_file_that_is_none_is_refused_at_once(tmp_path, name):
    """A named pipe would be waited for without end."""
    os.mkfifo(tmp_path / name)
    with pytest.raises(ValueError, match=f"{name} is a pipe"), RunFolder(tmp_path).locked():
        pass


def test_the_lock_of_an_ended_process_is_taken_over(tmp_path):
    (tmp_path / "lock").write_text("4194303\n")
    with RunFolder(tmp_path).locked():
        assert (tmp_path / "lock").read_text() == f"{os.getpid()}\n"


# A terminal that is closed.


@pytest.fixture
def hangups_arrive():
    """Also under nohup, which ignores them; and so does every handler of ours, then."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


@pytest.mark.usefixtures("hangups_arrive")
def test_a_closed_terminal_requests_a_stop_once_and_for_all():
    """The system sends SIGHUP, and the shell again: the second must not end the process."""
    with StopRequest() as stop:
        for _ in range(3):
            os.kill(os.getpid(), signal.SIGHUP)
        assert stop() and stop.status == 128 + signal.SIGHUP


@pytest.mark.parametrize("seconds, status", [(0, 0), (0.01, 0), (0.6, 143)])
def test_a_signal_sent_twice_at_once_is_one_request(seconds, status):
    """As `timeout train.py` sends it. Only one that comes later ends the process at once."""
    program = (
        "import os, signal, time; from flaxformer_min.system.signals import StopRequest\n"
        "with StopRequest() as stop:\n"
        "    os.kill(os.getpid(), signal.SIGTERM)\n"
        f"    time.sleep({seconds})\n"
        "    os.kill(os.getpid(), signal.SIGTERM)\n"
        "    assert stop.status == 143\n"
    )
    assert subprocess.run([sys.executable, "-c", program]).returncode == status


@pytest.mark.usefixtures("hangups_arrive")
def test_a_closed_terminal_interrupts_only_once():
    with InterruptOnSignal() as stop:
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGHUP)
        os.kill(os.getpid(), signal.SIGHUP)
        assert stop.status == 129


@pytest.mark.usefixtures("hangups_arrive")
def test_under_nohup_a_closed_terminal_changes_nothing():
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    with StopRequest() as stop:
        os.kill(os.getpid(), signal.SIGHUP)
        assert not stop()
    assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN


@pytest.mark.slow
@pytest.mark.usefixtures("hangups_arrive")
def test_training_saves_when_its_terminal_is_closed(tmp_path):
    """A terminal of its own, controlling: only such a one sends SIGHUP when it is closed."""
    workdir = tmp_path / "run"
    names = ("steps", "save-every", "validate-every")
    forever = [word for name in names for word in (f"--training.{name}", "100000")]
    command = [sys.executable, "train.py", write_config(tmp_path), "--workdir", str(workdir)]
    controlling = (
        "import fcntl, os, sys, termios; fcntl.ioctl(0, termios.TIOCSCTTY, 0); "
        "os.execv(sys.argv[1], sys.argv[1:])"
    )
    ours, theirs = os.openpty()
    with subprocess.Popen(
        [sys.executable, "-c", controlling, *command, *forever],
        cwd=ROOT,
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        start_new_session=True,
    ) as process:
        os.close(theirs)
        deadline = time.monotonic() + 120
        while len(read_metrics(workdir / "metrics.jsonl")) < 2 and time.monotonic() < deadline:
            time.sleep(0.05)
        os.close(ours)
        status = process.wait(timeout=60)
    assert status == 128 + signal.SIGHUP
    saved = [int(path.name) for path in (workdir / "checkpoints").iterdir()]
    assert max(saved) >= 8 and max(saved) % 100_000


# Metrics of steps that learned nothing.


def strict_json(line):
    """A record of metrics, which must be JSON as its standard says: without NaN and Infinity."""
    return json.loads(line, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))


NOTHING = dict.fromkeys(("loss", "accuracy", "gradient_norm"), float("nan"))
COUNTS = {"positions": 8.0, "real": 6.0, "tokens": 3.0, "learning_rate": 0.1}


def test_a_window_of_skipped_steps_has_no_loss_instead_of_a_perfect_one():
    window = Window()
    for _ in range(2):
        window.add({**NOTHING, **COUNTS, "skipped": 1.0})
    line = window.close()
    assert [line[name] for name in NOTHING] == [None] * 3
    assert line["skipped"] == 2 and line["padding"] == 0.25
    window.add({**dict.fromkeys(NOTHING, 0.5), **COUNTS, "skipped": 0.0})
    window.add({**NOTHING, **COUNTS, "skipped": 1.0})
    assert window.close()["loss"] == 0.5


def test_metrics_are_json_whatever_was_measured(tmp_path):
    file = tmp_path / "metrics.jsonl"
    file.write_text('{"step": 1, "loss": NaN}\n')
    log = MetricsLog(file, tmp_path / "events", 1)
    log.write(2, {"validation_loss": float("nan"), "perplexity": float("inf"), "bleu": 2.5})
    log.close()
    before, after = map(strict_json, file.read_text().splitlines())
    assert before == {"step": 1, "loss": None}
    assert after == {"step": 2, "validation_loss": None, "perplexity": None, "bleu": 2.5}


# A run folder from a stranger.


def rewrite_config(run, group, **settings):
    """Edit config.json as a text, as a stranger or an absent-minded user would."""
    content = json.loads((run / "config.json").read_text())
    content[group].update(settings)
    (run / "config.json").write_text(json.dumps(content))


@pytest.fixture
def planted(tmp_path, monkeypatch):
    """A dataset whose features are a class of the working directory, and a place for its mark."""
    (tmp_path / "planted.py").write_text("open('executed', 'w').close()\nclass Feature: ...\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    yield tmp_path / "executed"
    sys.modules.pop("planted", None)


def plant_dataset(folder, features):
    dataset = folder / "planted_set" / "1.0.0"
    dataset.mkdir(parents=True)
    (dataset / "features.json").write_text(json.dumps(features))
    (dataset / "dataset_info.json").write_text(
        json.dumps({"name": "planted_set", "version": "1.0.0", "fileFormat": "array_record"})
    )
    return str(folder)


FOREIGN = [
    {"type": "planted.Feature"},
    {"pythonClassName": "planted.Feature"},
    {
        "type": "tensorflow_datasets.core.features.features_dict.FeaturesDict",
        "content": {"features": {"type": {"type": "planted.Feature"}}},
    },
]


@pytest.mark.parametrize("linked", [False, True])
@pytest.mark.parametrize("features", FOREIGN)
def test_a_dataset_imports_no_class_from_elsewhere(planted, tmp_path, features, linked):
    """Even if the user names its folder: tfds would import whatever module features.json names."""
    folder = plant_dataset(tmp_path / "data", features)
    if linked:
        (tmp_path / "other" / "planted_set").mkdir(parents=True)
        version = tmp_path / "data" / "planted_set" / "1.0.0"
        (tmp_path / "other" / "planted_set" / "1.0.0").symlink_to(version)
        folder = str(tmp_path / "other")
    with pytest.raises(ValueError, match="names 'planted.Feature'"):
        read_pairs("tfds:planted_set", "test", "en-de", folder)
    assert not planted.exists()


@pytest.mark.parametrize(
    "name", ["huggingface:wmt", "PlantedSet", "planted_set/data_dir=x", "../x"]
)
def test_a_dataset_has_a_plain_name(name):
    """A namespace would be code, and an argument could lead elsewhere."""
    with pytest.raises(ValueError, match="tfds:NAME must be"):
        read_pairs(f"tfds:{name}", "test", "en-de")


@pytest.mark.parametrize("command", [["evaluate", "RUN"], ["train", "RUN/config.json"]])
def test_a_run_folder_executes_nothing_that_it_names(planted, tmp_path, capsys, command):
    run = make_tiny_run(tmp_path / "run", steps=())
    folder = plant_dataset(run / "data", FOREIGN[0])
    rewrite_config(run, "data", corpus="tfds:planted_set", cache_dir=folder, download=True)
    (run / "lock").unlink(missing_ok=True)
    before = contents(run)
    assert cli.main([word.replace("RUN", str(run)) for word in command]) == 2
    assert "Traceback" not in capsys.readouterr().err
    assert not planted.exists()
    (run / "lock").unlink(missing_ok=True)
    assert contents(run) == before


def test_a_run_chooses_no_folder_for_caches(tmp_path, caplog):
    """Nor for compiled programs, which are executed; the user's own word and config do."""
    run = make_tiny_run(tmp_path / "run", steps=())
    elsewhere = str(tmp_path / "elsewhere")
    rewrite_config(run, "data", cache_dir=elsewhere, download=True)
    config = RunFolder(run).config()
    assert (config.data.cache_dir, config.data.download) == ("", False)
    with caplog.at_level(logging.INFO, "flaxformer_min"):
        settings = read_arguments([str(run / "config.json")], "train.py")
    assert (settings.data.cache_dir, settings.data.download) == ("", False)
    assert f"names {elsewhere} for caches" in caplog.text
    typed = [str(run / "config.json"), "--data.cache-dir", elsewhere]
    assert read_arguments(typed, "train.py").data.cache_dir == elsewhere
    (tmp_path / "own.py").write_text(
        "from flaxformer_min.config import *\nconfig = Config(DataConfig(cache_dir='here'))\n"
    )
    assert read_arguments([str(tmp_path / "own.py")], "train.py").data.cache_dir == "here"


def test_a_run_chooses_no_text_to_be_read(tmp_path, capsys, monkeypatch):
    run = make_tiny_run(tmp_path / "run", steps=())
    rewrite_config(run, "data", corpus=f"text:{tmp_path}/my diary")
    monkeypatch.setattr("flaxformer_min.data.corpora.read_pairs", lambda *_: 1 / 0)
    assert cli.main(["evaluate", str(run)]) == 2
    assert f"Give --corpus 'text:{tmp_path}/my diary'" in capsys.readouterr().err


# A tokenizer or config.json that is not the run's own.


@pytest.fixture(scope="module")
def described(tmp_path_factory):
    """A run whose checkpoint says what it belongs to, as training writes it."""
    folder = make_tiny_run(tmp_path_factory.mktemp("described") / "run", steps=())
    run = RunFolder(folder)
    checkpoints = run.open_checkpoints(run.config())
    checkpoints.save(1, {"params": random_params(run.model_config())}, {"identity": run.identity()})
    checkpoints.close()
    return folder


@pytest.fixture
def copied(described, tmp_path):
    return shutil.copytree(described, tmp_path / "copy")


@pytest.mark.parametrize(
    "setting, value",
    [("norm", "pre"), ("positional_encoding", "halves"), ("num_heads", 4), ("num_heads", 1)],
)
def test_an_edited_setting_of_the_model_is_an_error_that_names_it(copied, setting, value):
    """All of these have parameters of the same shapes, or use them, but compute something else."""
    rewrite_config(copied, "model", **{setting: value})
    with pytest.raises(ValueError, match=f"model.{setting}: .* in the checkpoint, {value!r} in"):
        RunFolder(copied).params()


@pytest.mark.parametrize("setting, value", [("dropout", 0.3), ("dtype", "bfloat16")])
def test_a_setting_that_parameters_do_not_depend_on_may_change(copied, setting, value):
    rewrite_config(copied, "model", **{setting: value})
    assert RunFolder(copied).params().step == 1


def test_another_tokenizer_of_equal_size_is_an_error_that_names_it(copied, capsys):
    """Its ids would be read by parameters that were trained with others."""
    reversed_lines = [line[::-1] for line in LINES]
    size = RunFolder(copied).tokenizers()[0].vocab_size
    train_tokenizer(reversed_lines, size, copied / "tokenizer.model")
    with pytest.raises(ValueError, match="tokenizer.model: .* in the checkpoint"):
        RunFolder(copied).params()
    assert cli.main(["plot", "attention", str(copied), "a", "--output", "none.svg"]) == 2
    assert "tokenizer.model" in capsys.readouterr().err


# Codes of languages.


@pytest.mark.parametrize(
    "text, known, expected",
    [
        ("en-de", [], ("en", "de")),
        ("zh-CN-en", [], ("zh-CN", "en")),
        ("zh-Hans-zh-Hant", [], ("zh-Hans", "zh-Hant")),
        ("pt-br-en", ["pt-br", "en", "train"], ("pt-br", "en")),
        ("pt-BR-en", ["pt_BR", "en"], ("pt_BR", "en")),
        ("EN-DE", ["en", "de"], ("en", "de")),
        ("zh-CN-en", ["zh-CN", "zh-cn", "en"], ("zh-CN", "en")),
        ("pt-br:en", [], ("pt-br", "en")),
        ("source-target", [], ("source", "target")),
    ],
)
def test_two_codes_are_told_apart_though_they_have_hyphens(text, known, expected):
    assert parse_languages(text, known) == expected
    assert parse_languages(join_languages(*expected), known) == expected


@pytest.mark.parametrize("text", ["pt-br-en", "en", "en-en", "zh-CN:zh_cn", "-en", "a:b:c", ""])
def test_what_cannot_be_told_apart_is_an_error(text):
    with pytest.raises(ValueError, match="languages must"):
        parse_languages(text)


def test_a_text_corpus_has_files_of_any_language_code(tmp_path):
    """And the languages that are proposed where none are named are accepted."""
    (tmp_path / "train.en").write_text("one\n")
    (tmp_path / "train.zh-CN").write_text("一\n")
    with pytest.raises(ValueError) as error:
        read_pairs(f"text:{tmp_path}", "train")
    proposed = re.search("for example to (.*)\\.", str(error.value))[1]
    for languages in (proposed, "en-zh-CN", "en:zh-CN", "zh-CN-en"):
        pair = read_pairs(f"text:{tmp_path}", "train", languages)[0]
        of_language = dict(zip(parse_languages(languages), pair, strict=True))
        assert of_language == {"en": "one", "zh-CN": "一"}


@pytest.mark.parametrize("name", ["en-pt-BR", "en-pt_BR", "en:pt-br"])
def test_the_embedded_corpus_takes_codes_of_bcp_47(name):
    """Not en-PT and br, Breton, which are locales, too."""
    assert languages_of(f"cldr:{name}") == ("en", "pt_BR")


def test_bleu_is_that_of_the_target_language():
    """Chinese is compared character by character; the last part of zh-CN is no language."""
    assert target_language(Config(DataConfig(languages="en-zh-CN"))) == "zh-CN"


# Text that changes behind its name.


@pytest.mark.parametrize("names", [("train.en", "train.de"), ("train.tsv",)])
def test_changed_text_of_equal_path_size_and_time_is_other_text(tmp_path, names):
    def fingerprint(text):
        for name in names:
            (tmp_path / name).write_text(f"{text}\tzwei\n" if name.endswith("tsv") else text)
            os.utime(tmp_path / name, (1, 1))
        return read_pairs(f"text:{tmp_path}", "train", "en-de").fingerprint()

    before = fingerprint("one")
    assert fingerprint("two") != before
    assert fingerprint("one") == before


EMPTIED = """
import sys
from flaxformer_min import Config, train
config = Config.from_json(open(sys.argv[1]).read())
result = train(config, sys.argv[2], stop=lambda: bool(open(sys.argv[3], "w").close()))
print(result.step, result.example)
"""


@pytest.mark.slow
def test_validation_text_that_is_emptied_while_training_does_not_end_it(tmp_path):
    """In place: what is read of a file that is no longer there ends the process with SIGBUS."""
    config = small_config(tmp_path, steps=3)
    (tmp_path / "config.json").write_text(config.to_json())
    text = tmp_path / "corpus" / "val.en"
    first = text.read_text().split("\n")[0]
    files = [str(path) for path in (tmp_path / "config.json", tmp_path / "run", text)]
    command = [sys.executable, "-c", EMPTIED, *files]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert (done.returncode, done.stdout) == (0, f"3 {first}\n"), done.stderr
    assert text.read_text() == ""


# Worker processes.


@pytest.mark.slow
def test_worker_processes_leave_no_shared_memory_behind(tmp_path):
    command = ["train.py", write_config(tmp_path), "--workdir", str(tmp_path / "run")]
    few = ["--data.workers", "2", "--training.steps", "3"]
    found = subprocess.run(
        [sys.executable, *command, *few], cwd=ROOT, capture_output=True, text=True, timeout=300
    )
    assert found.returncode == 0, found.stderr
    assert "shared_memory" not in found.stderr and "leaked" not in found.stderr


# A process whose peers never come.

ALONE = """
import sys
from flaxformer_min.system import distributed, signals
distributed.WAITING_SECONDS, distributed.CONNECT_SECONDS = 1, int(sys.argv[3])
settings = distributed.Distributed(sys.argv[1], 2, int(sys.argv[2]))
with signals.InterruptOnSignal(), distributed.distributed_session(settings):
    print("connected")
"""


def start_alone(process, seconds):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    command = [sys.executable, "-c", ALONE, address, str(process), str(seconds)]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return subprocess.Popen(command, cwd=ROOT, text=True, **pipes)


@pytest.mark.slow
@pytest.mark.parametrize("process, number", [(1, signal.SIGTERM), (0, signal.SIGINT)])
def test_who_waits_for_the_other_processes_ends_at_a_signal(process, number):
    with start_alone(process, 60) as waiting:
        assert waiting.stderr.readline().startswith("waiting for ")
        waiting.send_signal(number)
        since = time.monotonic()
        out, err = waiting.communicate(timeout=30)
    assert waiting.returncode == 128 + number
    assert time.monotonic() - since < 10
    assert "Traceback" not in err and "stack trace" not in err and "connected" not in out


@pytest.mark.slow
@pytest.mark.parametrize("process", [0, 1])
def test_who_waits_in_vain_ends_with_a_sentence(process):
    with start_alone(process, 3) as waiting:
        out, err = waiting.communicate(timeout=60)
    assert waiting.returncode == 2
    *told, error = err.splitlines()
    assert len(told) >= 2 and all(line.startswith("waiting for ") for line in told)
    assert error.startswith("error: the processes of a run must all start within 3 s")


# All of it, mutated at random.


@pytest.mark.slow
def test_sixty_hostile_cases_end_with_a_sentence_or_a_result():
    """The first of the 2,000 of benchmarks/fuzz.py."""
    command = [sys.executable, "benchmarks/fuzz.py", "--cases", "60"]
    found = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600)
    assert found.stdout.splitlines()[-1].endswith("0 failed"), found.stdout
    assert found.stdout.splitlines()[-1].startswith("60 cases")


# Papercuts.


@pytest.fixture(scope="module")
def translator(run):
    return Translator.load(run)


def without_type_checks(name):
    """A module of decoding whose types are not checked, as a user has it: under another name."""
    path = Path(flaxformer_min.__file__).with_name("decoding") / f"{name}.py"
    spec = importlib.util.spec_from_file_location(f"unchecked_{name}", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def unchecked(run):
    return without_type_checks("translator").Translator.load(run)


def test_reading_a_gzip_file_takes_no_more_memory_than_its_text(tmp_path):
    """Not as much as the limit allows, which a system may refuse to allocate."""
    content = random.Random(0).randbytes(2_000_000).hex().encode()
    (tmp_path / "train.tsv.gz").write_bytes(gzip.compress(b"a\t" + content, 1))
    tracemalloc.start()
    try:
        pairs = read_pairs(f"text:{tmp_path}", "train", "en-de")
        assert tracemalloc.get_traced_memory()[1] < 20 * len(content)
    finally:
        tracemalloc.stop()
    assert pairs[0] == ("a", content.decode())


def test_text_that_repeats_itself_is_no_bomb(tmp_path):
    content = b"the same again and again\n" * 10_000
    for language in ("en", "de"):
        (tmp_path / f"train.{language}.gz").write_bytes(gzip.compress(content))
    assert len(read_pairs(f"text:{tmp_path}", "train", "en-de")) == 10_000


@pytest.mark.parametrize("name", ["lr[0.1]", "*x?", "a\\b", "gs:", os.fsdecode(b"\xff")])
def test_a_folder_whose_name_means_another_is_refused_before_anything_is_written(tmp_path, name):
    r"""Orbax takes *x? for a pattern, and /home/gs:/run for a bucket; TensorStore a\b for a/b.

    A folder whose name is a pattern can still be read.
    """
    run = make_tiny_run(tmp_path / "run", steps=(7,), continues=True)
    config, moved = RunFolder(run).config(), tmp_path / name / "run"
    moved.parent.mkdir()
    with pytest.raises(ValueError, match=r"must (not have|be).*Choose another"):
        train(config, moved)
    assert list(moved.parent.iterdir()) == []
    shutil.copytree(run, moved)
    before = contents(moved)
    refused = [
        lambda: train(config, moved),
        lambda: RunFolder(moved).keep_average(random_params(config.model), step=7),
    ]
    if {*"[*?"} & {*name}:
        assert Translator.load(moved).translate(LINES) == Translator.load(run).translate(LINES)
    else:
        refused.append(lambda: Translator.load(moved))
    for use in refused:
        with pytest.raises(ValueError, match=r"must (not have|be).* got .*run"):
            use()
    assert contents(moved) == before


def test_a_disk_that_is_full_when_a_run_starts_is_named(tmp_path, monkeypatch):
    def write(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "pwrite", write)
    with pytest.raises(OSError) as raised, RunFolder(tmp_path).locked():
        pass
    assert str(raised.value) == (
        f"a run needs a folder to write in; {tmp_path}: No space left on device. Free some space, "
        "or choose another --workdir."
    )


def test_a_worker_that_imports_a_script_which_trains_says_what_the_script_lacks(
    tmp_path, monkeypatch
):
    """The process that trains is the one that started it."""
    monkeypatch.setattr(os, "getppid", os.getpid)
    with RunFolder(tmp_path).locked():
        rule = "a script must call train below `if __name__ == "
        with pytest.raises(ValueError, match=rule), RunFolder(tmp_path).locked():
            pass


def test_a_finished_run_is_not_shortened(tmp_path):
    run = make_tiny_run(tmp_path / "run", steps=(7,), continues=True)
    before = contents(run)
    config = RunFolder(run).config()
    shorter = dataclasses.replace(config, training=dataclasses.replace(config.training, steps=6))
    with pytest.raises(ValueError, match="at step 7, got 6"):
        RunFolder(run).begin(shorter, lambda paths: pytest.fail("it has its tokenizers"))
    assert contents(run) == before


def test_a_cache_that_cannot_be_written_names_the_option(tmp_path):
    (tmp_path / "file").write_text("")
    config = small_config(tmp_path, data={"cache_dir": f"{tmp_path}/file/cache"})
    with pytest.raises(OSError, match="--data.cache-dir"):
        prepare(RunFolder(tmp_path / "run"), config)


@pytest.mark.parametrize("number", ["1" + "0" * 5_000, "1e999", "NaN"])
def test_an_impossible_number_in_a_config_names_the_file(number):
    rate = '"learning_rate_scale": '
    text = Config().to_json().replace(f"{rate}1.0", rate + number)
    assert number in text
    with pytest.raises(ValueError, match="^RUN/config.json"):
        Config.from_json(text, "RUN/config.json")


def test_numbers_of_numpy_are_numbers():
    config = ModelConfig(num_layers=np.int64(2), dropout=np.float32(0.25))
    assert type(config.num_layers) is int and type(config.dropout) is float
    assert Config.from_json(Config(model=config).to_json()).model == config


def test_a_setting_that_a_search_cannot_have_is_refused(translator):
    size = translator.target_tokenizer.vocab_size
    for settings, error, message in (
        ({"beam": 4}, TypeError, "no search setting 'beam', only batch_size, beam_size, "),
        ({"beam_size": 2, "n_best": 2}, ValueError, "n_best=2. For several, call hypotheses"),
        ({"suppressed": (4, size)}, ValueError, f"below {size:,}; got {size:,}"),
    ):
        with pytest.raises(error, match=message):
            translator.translate(["the house"], **settings)


@pytest.mark.parametrize(
    "method, values",
    [
        ("translate", [None, 3, (line for line in ["a"]), ["a", None], [b"a"]]),
        ("score", [[None], [("a", None)], [3], ["ab"], [("a",)]]),
    ],
)
def test_what_is_no_list_of_texts_or_pairs_is_refused_by_name(unchecked, method, values):
    for value in values:
        with pytest.raises(ValueError, match="(lines|pairs) must be"):
            getattr(unchecked, method)(value)


@pytest.mark.parametrize(
    "changes, error",
    [
        ({"models": Transformer(ModelConfig())}, "must be lists, .* got Transformer and "),
        ({"params": {"a": 1}}, "must be lists, .* and dict. For one, give .model. and .params."),
        ({"params": []}, "got 1 models and 0 parameters"),
        ({"models": [], "params": []}, "at least one model, .* got 0 models and 0 parameters"),
        ({"tokenizers": object()}, "tokenizers must be two, .* got object. For one of both, give"),
    ],
)
def test_a_translator_takes_lists_of_models_and_parameters_and_two_tokenizers(
    unchecked, changes, error
):
    tokenizers = unchecked.source_tokenizer, unchecked.target_tokenizer
    parts = {"models": unchecked.models, "params": [unchecked.runner.params]}
    with pytest.raises(ValueError, match=error):
        type(unchecked)(**{**parts, "tokenizers": tokenizers, **changes})


def test_parameters_that_are_refused_leave_a_translator_as_it_was(translator, unchecked):
    other = copy.deepcopy(translator)
    with pytest.raises(ValueError, match="got 1 models and 0 parameters"):
        other.use_params([])
    assert pickle.loads(pickle.dumps(other)).restored[0].step == translator.restored[0].step
    with pytest.raises(ValueError, match="must be lists, .* got list and dict"):
        unchecked.use_params(unchecked.restored[0].params)
    assert unchecked.__reduce__()[1] == translator.__reduce__()[1]


def test_a_prefix_of_an_empty_line_is_told(translator, caplog):
    with caplog.at_level(logging.WARNING, "flaxformer_min"):
        found = translator.hypotheses(["", ""], ["the " * 9, ""], first_line=5, beam_size=1)
    assert [each[0].text for each in found] == ["", ""]
    assert [text for text in caplog.messages if "prefix" in text] == [
        "line 5 is empty, and so is its translation; its prefix is not used."
    ]


def test_a_loaded_translator_is_pickled_by_its_folder(translator):
    """One without a folder says why it cannot be."""
    for other in (pickle.loads(pickle.dumps(translator)), copy.deepcopy(translator)):
        assert other.restored[0].step == translator.restored[0].step
        same = jax.tree.map(np.array_equal, other.runner.params, translator.runner.params)
        assert all(jax.tree.leaves(same))
    tokenizers = translator.source_tokenizer, translator.target_tokenizer
    own = Translator(translator.models, [translator.runner.params], tokenizers)
    with pytest.raises(TypeError, match="only a translator that Translator.load returned"):
        pickle.dumps(own)


@pytest.mark.parametrize("ids", [[[5, 10]], [[-1, 5]]])
def test_an_id_outside_the_vocabulary_is_an_error_outside_jit(ids):
    model = Transformer(ModelConfig(10, num_layers=1, d_model=8, d_ff=8, num_heads=2))
    inside = one_sentence_per_row(jnp.array([[5, 9]]))
    params = model.init(jax.random.key(0), Batch(inside, inside))
    tokens = one_sentence_per_row(jnp.array(ids))
    with pytest.raises(ValueError, match="token ids must be from 0 to 9"):
        model.apply(params, Batch(tokens, inside))
    jax.eval_shape(model.apply, params, Batch(tokens, inside))  # traced, it cannot be known


def test_positions_do_not_wrap_with_the_type_of_the_ids():
    tokens = one_sentence_per_row(jnp.ones((1, 300), jnp.int8))
    assert tokens.positions[0, -1] == 299
    assert {column.dtype for column in tokens} == {jnp.dtype("int32")}


def test_a_tokenizer_that_cannot_be_downloaded_is_told(monkeypatch):
    def offline(*_, **__):
        raise urllib.error.URLError("no network")

    monkeypatch.setattr("sacrebleu.metrics.BLEU.__init__", offline)
    with pytest.raises(ValueError, match="downloads a model on first use, which failed"):
        bleu(["a"], ["a"], tokenize="flores200")


# Inside another program.


@pytest.mark.slow
def test_threads_share_a_translator(translator):
    """Each thread gets the translations of its own lines, whoever compiles the program."""
    lines = [[f"the {color} house has {n} doors" for n in range(5)] for color in ("red", "blue")]
    options = {"beam_size": 1, "max_extra_tokens": 4}
    expected = [translator.translate(each, **options) for each in lines]
    fresh = copy.deepcopy(translator)
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda each: fresh.translate(each, **options), lines * 4))
    assert found == expected * 4


def names_of(translator):
    return [str(translator.restored[0].step), *translator.target_tokenizer.pieces([4, 5])]


@pytest.mark.slow
def test_a_translator_is_sent_to_a_spawned_process(translator):
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=context) as pool:
        assert pool.submit(names_of, translator).result(timeout=120) == names_of(translator)
