"""The command line: lines in, lines out, one sentence for every error."""

import bz2
import contextlib
import gzip
import io
import json
import lzma
import math
import os
import pty
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from test_docs import options_of
from tiny_run import make_tiny_run

from flaxformer_min import cli
from flaxformer_min.cli.arguments import make_parser
from flaxformer_min.cli.lines import warn_user, write
from flaxformer_min.config import DataConfig
from flaxformer_min.decoding import batches
from flaxformer_min.decoding.results import Attention, PairScore, Translation
from flaxformer_min.decoding.translator import Translator
from flaxformer_min.plots import figures as plots

COMMAND = [sys.executable, "-m", "flaxformer_min"]
LOADED = {}


@pytest.fixture(scope="module")
def paths(tmp_path_factory):
    """Runs, good and bad, and files of lines."""
    root = tmp_path_factory.mktemp("cli")
    corpus = root / "corpus"
    corpus.mkdir()
    for name, text in {
        "test.en": "the red house\n\nblue doors\n4\n",
        "test.ko": "A\nB\nA A\n \n",
    }.items():
        (corpus / name).write_text(text)
    (root / "folder").mkdir()
    for count, name in enumerate(("none", "one", "two", "three", "four")):
        (root / name).write_text("".join(f"line {n}\n" for n in range(count)))
    (root / "long").write_text("A" * 99 + "\n")
    data = DataConfig(corpus=f"text:{corpus}", languages="en-ko")
    paths = {path.name: path for path in root.iterdir()} | {"missing": root / "missing"}
    paths["run"] = make_tiny_run(root / "run", steps=(1, 2), data=data)
    paths["other"] = make_tiny_run(root / "other", lines=["another vocabulary 0123456789"] * 9)
    paths["untrained"] = make_tiny_run(root / "untrained", steps=())
    paths["unnamed"] = make_tiny_run(root / "unnamed", data=DataConfig(), steps=())
    paths["newer"] = make_tiny_run(root / "newer", steps=())
    config = paths["newer"] / "config.json"
    config.write_text(config.read_text().replace('"format_version": 1', '"format_version": 99'))
    return paths


@pytest.fixture(autouse=True)
def loaded_once(monkeypatch):
    """A run is restored and its programs are compiled once for all tests."""
    load = Translator.load

    def load_once(*runs, step=None, dtype=None):
        key = (*map(str, runs), step, dtype, batches.WIDTHS)
        if key not in LOADED:
            LOADED[key] = load(*runs, step=step, dtype=dtype)
        translator = object.__new__(Translator)
        vars(translator).update(vars(LOADED[key]))
        return translator

    monkeypatch.setattr(Translator, "load", load_once)


@pytest.fixture
def twelve_tokens(monkeypatch):
    """Longer sources are truncated, so that programs are small."""
    monkeypatch.setattr(batches, "WIDTHS", (12,))


@pytest.fixture
def mirror(monkeypatch):
    """A translator that writes lines backwards; returns the list of its calls."""
    asked = []

    def hypotheses(self, lines, prefixes=None, *, first_line, stop, scores):
        config = self.decoding
        asked.append(SimpleNamespace(model=self, lines=lines, config=config, line=first_line))
        found = zip(lines, prefixes or [""] * len(lines), strict=True)
        return [[Translation(prefix + line[::-1], -2.0, -1.0)] for line, prefix in found]

    monkeypatch.setattr(Translator, "hypotheses", hypotheses)
    return asked


@pytest.fixture
def call(paths, capfd, monkeypatch, tmp_path):
    """Runs a command line and returns status, stdout and stderr; `{run}` is one of `paths`."""

    def run(line, given=b""):
        stdin = tmp_path / "stdin"
        stdin.write_bytes(given)
        argv = [word.format(**paths, tmp=tmp_path) for word in line.split(" ") if word]
        with stdin.open() as file:
            monkeypatch.setattr(sys, "stdin", file)
            status = cli.main(argv)
        out, err = capfd.readouterr()
        return status, out, err

    return run


# What is typed


def test_every_option_has_a_test():
    """That each is documented with its default: see test_docs.py."""
    tests = "".join(path.read_text() for path in Path(__file__).parent.glob("test_*.py"))
    for name in {option.option_strings[0] for _, option in options_of(make_parser())}:
        assert re.search(rf"{name}\b(?!-)", tests), name


@pytest.mark.parametrize(
    "typed, name, value",
    [
        ("--beam-size 3", "beam_size", 3),
        ("--length-penalty 0.25", "length_penalty", 0.25),
        ("--early-stopping", "early_stopping", True),
        ("--no-early-stopping", "early_stopping", False),
        ("--max-extra-tokens 7", "max_extra_tokens", 7),
        ("--min-length 5", "min_length", 5),
        ("--batch-size 3", "batch_size", 3),
        ("--n-best 2", "n_best", 2),
        ("", "beam_size", 2),
        ("", "max_extra_tokens", 4),
        ("--sample", "sample", True),
        ("--sample --temperature 0.5", "temperature", 0.5),
        ("--sample --top-k 3", "top_k", 3),
        ("--sample --top-p 0.5", "top_p", 0.5),
        ("--sample --seed 8", "seed", 8),
        ("--sample", "beam_size", 1),
        ("--sample --n-best 3", "beam_size", 3),
        ("--sample --beam-size 5", "beam_size", 5),
    ],
)
def test_a_flag_of_the_search_reaches_it(call, mirror, typed, name, value):
    """The default is the run's own setting; for samples, --n-best hypotheses."""
    assert call(f"translate {{run}} {typed}", b"a\n")[0] == 0
    assert getattr(mirror[0].config, name) == value


@pytest.mark.parametrize("typed, step", [("", 2), ("--step 1", 1)])
def test_the_checkpoint_is_chosen_by_its_step(call, mirror, typed, step):
    assert call(f"translate {{run}} {typed}", b"a\n")[0] == 0
    assert [each.step for each in mirror[0].model.restored] == [step]


def test_the_type_is_the_one_typed(call, mirror):
    call("translate {run} --dtype bfloat16", b"a\n")
    params = mirror[0].model.runner.params
    assert params["decoder"]["layer_0"]["feed_forward"]["inner"]["kernel"].dtype == "bfloat16"


ERRORS = [
    ("", "required: COMMAND"),
    ("plot", "required: WHAT"),
    ("translate", "required: RUN"),
    ("translate {missing}", "a run is a folder; there is none at"),
    ("translate {run} {one}",
     "a run is a folder; .*/one is a file. To translate it: --input .*/one"),
    ("translate {folder}", "is not a run: it has no config.json"),
    ("translate {newer}", "has format 99.*Install a newer"),
    ("translate {untrained}", "holds no checkpoint yet"),
    ("translate {run} --step 7", "no checkpoint of step 7; it has 2, 1"),
    ("translate {run} {other}", "must have the same vocabulary"),
    ("translate {run} --input {missing}", "missing: No such file"),
    ("translate {run} --input {folder}", "folder: Is a directory"),
    ("translate {run} --output {missing}/out", "there is no folder .*missing"),
    ("--fast plot positions --output {tmp}/map.png",
     "arguments: --fast. See flaxformer-min --help"),
    ("translate {run} --beam 4", "arguments: --beam 4. See flaxformer-min translate --help"),
    ("plot attention {run} hi --output {tmp}/map.png --beam 4",
     "arguments: --beam 4. See flaxformer-min plot attention --help"),
    ("translate {run} --scores --json", "--json: not allowed with argument --scores"),
    ("translate {run} --beam-size 0",
     "--beam-size: must be a whole number from 1 to 1,073,741,823; got '0'. See flaxformer-min"),
    (f"translate {{run}} --beam-size {'9' * 5_000}", "must be a whole number from 1 to"),
    ("translate {run} --beam-size two", "--beam-size: must be a whole number.*got 'two'"),
    ("translate {run} --beam-size 1000", "must not exceed the vocabulary of [0-9]+,.*got 1,000"),
    ("translate {run} --length-penalty nan", "--length-penalty: must be a number.*got 'nan'"),
    ("translate {run} --max-extra-tokens 0", "--max-extra-tokens: must .* from 1 to 100,000"),
    ("translate {run} --min-length -1", "--min-length: must be a whole number from 0 to"),
    ("translate {run} --batch-size 0", "--batch-size: must .* at least 1"),
    ("translate {run} --temperature 2", "--temperature is for sampling; add --sample"),
    ("translate {run} --sample --temperature 0", "must be a number from 0.000001 to 1,000,000"),
    ("translate {run} --sample --top-p 0", "--top-p: must .* greater than 0 and at most 1"),
    ("translate {run} --sample --seed -1", "--seed: must .* from 0 to 4,294,967,295"),
    ("translate {run} --input {one} --prefix-file {long}", "prefix must be shorter.*prefix 1 has"),
    ("score {run} {four} {three}", "same number of lines; .*four has 4 and .*three has 3"),
    ("score {run} {three}", "required: TARGET"),
    ("inspect text:{corpus} --languages en-ko --samples -1", "--samples: must be .* at least 0"),
    ("inspect text:{corpus} --languages en-ko --write {missing}",
     "belong together:.* got only --write"),
    ("inspect text:{corpus} --languages en-ko --drop empty", "belong together:.* got only --drop"),
    ("inspect text:{corpus} --write {missing} --drop number", "kinds of empty, .* got 'number'"),
    ("evaluate {run} --corpus text:{corpus} --split nope", "nope.*--corpus names another corpus"),
    ("evaluate {run}", "read only if you name it, .* Give --corpus text:.*corpus, or --source"),
    ("evaluate {run} --source {one} --reference {one} --corpus cldr:en-ko", "--corpus has its own"),
    ("evaluate {run} --source {one}", "--source and --reference belong together"),
    ("evaluate {run} --source {one} --reference {one} --split test", "--split has its own"),
    ("evaluate {run} --source {none} --reference {none}", "text on both sides; there is none in"),
    ("evaluate {run} --source {one} --reference {one} --languages en",
     "must be two different languages joined by a hyphen"),
    ("evaluate {run} --corpus text:{corpus} --tokenize moses", "one of .*13a.*; got 'moses'"),
    ("plot attention {run} hi --output {tmp}/map.jpg", "must end in .png, .svg, .pdf or .html"),
    ("plot attention {run} \t --output {tmp}/map.png", r"have text to attend to; got '\\t'"),
    ("plot attention {run} hi --output {tmp}/map.html --layer 1", "a page shows all layers"),
    ("plot attention {run} hi --output {tmp}/map.png --head 3", "--head must be at most 2"),
    ("plot attention {run} hi --output {tmp}/map.png --head x", "must be mean, all or the number"),
    ("plot attention {run} hi", "required: --output"),
    ("plot positions --output {tmp}/map.html", "must end in .png, .svg or .pdf; got"),
    ("plot curves {run} --output {tmp}/map.png", "has no metrics yet"),
    ("translate {run} --split-sentences --prefix-file {one}", "leave out --split-sentences"),
    ("serve {run} --host 0.0.0.0", "needs keys; .* --api-key-file FILE, or --insecure to let"),
    ("serve {run} --host 192.0.2.1 --insecure", "cannot listen on 192.0.2.1, port 5000: "),
    ("serve {run} --api-key-file {none}", "must hold a key on each line; .*none has none"),
    ("serve {run} --port 65536", "--port: must be a whole number from 0 to 65,535"),
    ("serve {run} --queue 0", "--queue: must be a whole number of at least 1"),
    ("serve {run} --char-limit 0 --log-text", "--char-limit: must be a whole number of at least"),
    ("serve {run} --deadline 0", "--deadline: must be a number greater than 0"),
    ("serve {run} {run} --cors https://example.org",
     "each language pair is served once; .*en to ko"),
    ("export {run} {tmp}/out --format onnx", "invalid choice: 'onnx'"),
    ("export {run} {tmp}/out --format marian --quantization int8", "quantization is an option"),
    ("export {run} {tmp}/out --format marian --weights inside", "weights is an option of"),
    ("export {run} {run} --format marian", "must be a new or an empty folder"),
    ("import {tmp}/no {tmp}/out", "a model is a folder, or an .npz of Marian; there is none"),
    ("import {run} {run}", "must be a new or an empty folder"),
    ("import {run} {tmp}/out", "the setting 'data' is not understood"),
    ("import {run} {tmp}/out --ignore data", "the setting 'decoding' is not understood"),
    ("serve {unnamed}", 'must name its languages; .*unnamed does not.*"languages": "en-de"'),
]  # fmt: skip


@pytest.mark.parametrize(
    "line, message", ERRORS, ids=[line[:99] or "nothing" for line, _ in ERRORS]
)
def test_a_mistake_is_one_sentence_and_status_2(call, watched, tmp_path, line, message):
    status, out, err = call(line, b"hello\n")
    assert (status, out, (tmp_path / "out").exists()) == (2, "", False)
    assert re.fullmatch(rf"flaxformer-min: error: .*{message}.*\n", err)


@pytest.fixture
def watched(monkeypatch):
    """Attention without a model."""
    weights = np.arange(16).reshape(2, 2, 2, 2) / 16
    tokens = (["a", "</s>"], ["b", "</s>"], ["<s>", "b"])
    attention = Attention(weights, weights, weights, *tokens)
    asked = []

    def watch(self, source, target=None):
        asked.append((source, target))
        return attention

    monkeypatch.setattr(Translator, "attention", watch)
    return asked


def test_twelve_dates_on_a_line_give_twelve_dates(call, mirror):
    """Each is a sentence, and what stands between them stays; numbers are sums over a line."""
    pytest.importorskip("sentencex")
    dates = [f"It is May {day}, 2026." for day in range(1, 13)]
    line = "  ".join(dates)
    status, out, _ = call("translate {run} --split-sentences --scores", f"{line}\n\n...\n".encode())
    assert mirror[0].lines == dates
    text = "  ".join(date[::-1] for date in dates)
    rows = ["-12.0000\t-24.0000\t" + text, "0.0000\t0.0000\t", "0.0000\t0.0000\t..."]
    assert (status, out.splitlines()) == (0, rows)


@pytest.mark.parametrize(
    "error, advice",
    [
        (RuntimeError("RESOURCE_EXHAUSTED: Out of memory"), "Choose a smaller --batch-size"),
        (MemoryError(), "error: there is too little memory"),
    ],
)
def test_too_little_memory_is_reported_with_advice(call, mirror, monkeypatch, error, advice):
    def run_out(*args, **settings):
        raise error

    monkeypatch.setattr(Translator, "hypotheses", run_out)
    status, _, err = call("translate {run}", b"a\n")
    assert status == 2
    assert advice in err


def test_a_full_disk_is_one_sentence(call, mirror):
    status, _, err = call("translate {run} --output /dev/full", b"a\n")
    assert (status, err) == (2, "flaxformer-min: error: /dev/full: No space left on device\n")


# Lines in, lines out


@pytest.mark.parametrize(
    "given, lines",
    [
        (b"", []),
        (b"ab\ncd\n", ["ba", "dc"]),
        (b"ab\ncd", ["ba", "dc"]),
        (b"ab\r\ncd\r\n", ["ba", "dc"]),
        (b"ab\n\n\ncd\n", ["ba", "", "", "dc"]),
        (b"\xef\xbb\xbfab\n", ["ba"]),
        ("a\u2028b\x0bc\x0cd\x85\n".encode(), ["\x85d\x0cc\x0bb\u2028a"]),
        ("한국어\n".encode(), ["어국한"]),
        (b"a\rb\n", ["b a"]),
    ],
)
def test_there_are_as_many_lines_out_as_in(call, mirror, given, lines):
    r"""Only \n ends a line; what a model spells never does."""
    status, out, err = call("translate {run}", given)
    assert (status, err) == (0, "")
    assert out == "".join(f"{line}\n" for line in lines)


def test_invalid_utf8_is_replaced_and_named(call, mirror):
    status, out, err = call("translate {run}", b"ok\nb\xff\n")
    assert (status, out) == (0, "ko\n\ufffdb\n")
    assert err.startswith("flaxformer-min: warning: stdin, line 2 is not UTF-8 from byte 2 on")


GARBAGE = {
    "gzip": (gzip.compress(b"the red house\n"), r"compressed \(gzip\).* first: zcat FILE > TEXT"),
    "UTF-16": ("the red house\n".encode("utf-16"), "UTF-16. Convert it: iconv -f utf-16 -t utf-8"),
    "UTF-16 without a mark": (
        "집 a\n".encode("utf-16-be"),
        "UTF-16BE. Convert it: iconv -f utf-16",
    ),
    "UTF-32": ("the house\n".encode("utf-32"), "UTF-32. Convert it: iconv"),
    "UTF-32 without a mark": ("a b\n".encode("utf-32-le"), "UTF-32LE. Convert it: iconv"),
    "bzip2": (bz2.compress(b"the red house\n"), r"compressed \(bzip2\).* bzcat FILE"),
    "xz": (lzma.compress(b"the red house\n"), r"compressed \(xz\).* first: xzcat FILE"),
    "Zstandard": (b"\x28\xb5\x2f\xfd\4\0\1\2\3", r"compressed \(Zstandard\).*: zstdcat FILE"),
    "zip": (b"PK\3\4\x14\0\0\0\b\0", "a zip archive. Unpack it first: unzip -p FILE > TEXT"),
    "parquet": (b"PAR1\x15\4\x15\x10", r"a table \(parquet\). Write its texts into a file"),
    "PDF": (b"%PDF-1.7\n%\xb5\xed\n", "a PDF. Extract its text first"),
    "tar": (b"a" + bytes(256) + b"ustar\x0000", "a tar archive. Unpack it first"),
    "CR": (b"the red house\rnine doors\r", r"those of .* end in \\r. Convert it: tr .*TEXT"),
}


READERS = [
    "translate {run} --input {tmp}/garbage --output {tmp}/out",
    "translate {run} --input {one} --prefix-file {tmp}/garbage",
    "score {run} {one} {tmp}/garbage",
    "evaluate {run} --source {one} --reference {tmp}/garbage",
]


@pytest.mark.parametrize(
    "line, content, message",
    [
        *(("translate {run}", *each) for each in GARBAGE.values()),
        *((line, *GARBAGE["UTF-16"]) for line in READERS),
    ],
    ids=[*GARBAGE, *READERS],
)
def test_text_that_is_compressed_or_utf16_is_refused_not_read_as_lines(
    call, mirror, tmp_path, line, content, message
):
    (tmp_path / "garbage").write_bytes(content)
    status, out, err = call(line, content)
    assert (status, out, (tmp_path / "out").exists()) == (2, "", False)
    assert re.fullmatch(f"flaxformer-min: error: .*text.* must .*{message}.*\n", err), err
    assert "stdin" in err or "garbage" in err


def test_control_characters_do_not_reach_a_terminal(capsys):
    """They would clear the screen, or hide what is before them; a file gets them as they are."""
    warn_user("one\r two\x1b[2J\x9b three")
    assert capsys.readouterr().err.endswith("warning: one\\r two\\x1b[2J\\x9b three\n")
    written = io.BytesIO()
    write(written, ["a\x1bb"])
    assert written.getvalue() == b"a\x1bb\n"
    terminal = io.BytesIO()
    terminal.isatty = lambda: True
    write(terminal, ["a\x1bb"])
    assert terminal.getvalue() == b"a\\x1bb\n"


def test_a_line_break_that_a_model_spells_becomes_a_space(call, monkeypatch):
    def hypotheses(*args, **settings):
        return [[Translation("a\nb\r", -2.0, -1.0)]]

    monkeypatch.setattr(Translator, "hypotheses", hypotheses)
    assert call("translate {run}", b"x\n")[1] == "a b \n"


def test_many_lines_come_in_chunks_and_keep_their_numbers(call, mirror):
    given = "".join(f"{n}\n" for n in range(2_500)).encode()
    _, out, _ = call("translate {run}", given)
    assert out.split() == [str(n)[::-1] for n in range(2_500)]
    assert [(len(chunk.lines), chunk.line) for chunk in mirror] == [
        (1_024, 1),
        (1_024, 1_025),
        (452, 2_049),
    ]


def test_n_best_gives_n_lines_for_every_line_and_scores_come_before_the_text(call, mirror):
    """Where fewer were found, and for an empty line, empty ones follow."""
    _, out, _ = call("translate {run} --n-best 2", b"ab\n\n")
    assert out == "ba\n\n\n\n"
    _, out, _ = call("translate {run} --scores --n-best 2", b"ab\n")
    assert out == "-1.0000\t-2.0000\tba\n-inf\t-inf\t\n"


def test_json_is_one_object_a_line(call, mirror, monkeypatch):
    _, out, _ = call("translate {run} --json", "ü\nab\n".encode())
    assert [json.loads(line) for line in out.splitlines()] == [
        {
            "line": number,
            "source": source,
            "hypotheses": [{"text": source[::-1], "log_prob": -2.0, "score": -1.0}],
        }
        for number, source in [(1, "ü"), (2, "ab")]
    ]
    assert "ü" in out
    nothing = [[Translation("", -math.inf, -math.inf)]]
    monkeypatch.setattr(Translator, "hypotheses", lambda *args, **settings: nothing)
    assert "Infinity" not in call("translate {run} --json", b"a\n")[1]


def test_input_and_output_may_be_files_and_one_file(call, mirror, tmp_path):
    file = tmp_path / "text"
    file.write_text("ab\n")
    status, out, _ = call("translate {run} --input {tmp}/text --output {tmp}/text")
    assert (status, out, file.read_text()) == (0, "", "ba\n")


def test_a_device_is_written_to_and_not_replaced(call, mirror):
    assert call("translate {run} --output /dev/null", b"a\n")[0] == 0
    assert not Path("/dev/null").is_file()


def test_each_translation_begins_as_its_prefix_says(call, mirror, tmp_path):
    (tmp_path / "prefixes").write_text("X\n\n")
    _, out, _ = call("translate {run} --prefix-file {tmp}/prefixes", b"ab\ncd\n")
    assert out == "Xba\ndc\n"


@pytest.mark.parametrize("prefixes", ["X\n", "X\nY\nZ\n"])
def test_prefixes_of_another_number_leave_no_file(call, mirror, tmp_path, prefixes):
    (tmp_path / "prefixes").write_text(prefixes)
    line = "translate {run} --prefix-file {tmp}/prefixes --output {tmp}/out"
    status, _, err = call(line, b"ab\ncd\n")
    assert status == 2
    assert f"stdin has 2 and {tmp_path}/prefixes has {len(prefixes) // 2}." in err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["prefixes", "stdin"]


def test_verbose_prints_speed_compilations_and_sizes(call, mirror):
    _, _, err = call("translate {run} --verbose", b"ab\n\n")
    assert re.search("2 sentences, .* sentences/s, .* tokens/s .*compilations", err)
    assert f"padded to {', '.join(map(str, batches.WIDTHS))} tokens" in err
    assert "at most 8 sentences on each device" in err


@pytest.mark.parametrize("number, status", [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_lets_the_chunk_end_and_leaves_what_is_done(
    call, mirror, monkeypatch, number, status
):
    """A model is slow: what it has just done is written before the end."""
    mirrored = Translator.hypotheses

    def hypotheses(self, lines, *args, **settings):
        os.kill(os.getpid(), number)
        return mirrored(self, lines, *args, **settings)

    monkeypatch.setattr(Translator, "hypotheses", hypotheses)
    assert call("translate {run}", b"ab\n" * 2_000) == (status, "ba\n" * 1_024, "")


class Unbuffered(io.RawIOBase):
    """A stream that takes seven bytes at once, as a full pipe may without a buffer."""

    def __init__(self):
        self.taken = b""

    def writable(self):
        return True

    def write(self, content):
        self.taken += bytes(content[:7])
        return len(content[:7])


def test_output_without_a_buffer_is_written_whole():
    output = Unbuffered()
    write(output, ["eine Zeile", "", "noch eine"])
    assert output.taken == b"eine Zeile\n\nnoch eine\n"


def test_a_signal_leaves_no_half_of_a_file(call, mirror, monkeypatch, tmp_path):
    def hypotheses(self, lines, *args, stop, **settings):
        os.kill(os.getpid(), signal.SIGINT)
        assert stop()
        raise KeyboardInterrupt

    monkeypatch.setattr(Translator, "hypotheses", hypotheses)
    assert call("translate {run} --output {tmp}/out", b"ab\n")[0] == 130
    assert [path.name for path in tmp_path.iterdir()] == ["stdin"]


def test_a_second_signal_does_not_wait(call, mirror, monkeypatch):
    def hypotheses(self, lines, *args, **settings):
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)
        raise AssertionError("it waited")

    monkeypatch.setattr(Translator, "hypotheses", hypotheses)
    assert call("translate {run}", b"ab\n")[:2] == (130, "")


# With a real model


def test_a_model_translates_lines(call, twelve_tokens):
    """Duplicates agree, an empty line stays empty, a long one is truncated and named."""
    status, out, err = call(
        "translate {run} --scores --beam-size 1", b"red\n\nred\n" + b"4 " * 20 + b"\n"
    )
    first, empty, third, long = out.split("\n")[:-1]
    assert (status, empty) == (0, "0.0000\t0.0000\t")
    assert first == third and float(long.split("\t")[1]) < 0
    assert re.fullmatch(
        r"flaxformer-min: warning: line 4 has \d+ tokens; only its first 11 are read.\n", err
    )


def test_two_models_translate_together(call, paths, mirror):
    assert call("translate {run} {run}", b"ab\n")[:2] == (0, "ba\n")
    assert len(mirror[0].model.models) == 2


def test_scores_are_those_of_the_translator(call, paths):
    sides = [
        (paths["corpus"] / f"test.{each}").read_text().split("\n")[:-1] for each in ("en", "ko")
    ]
    found = Translator.load(paths["run"]).score(list(zip(*sides, strict=True)))
    _, out, err = call("score {run} {corpus}/test.en {corpus}/test.ko")
    assert out == "".join(f"{one.log_prob:.4f}\n" for one in found)
    tokens = sum(len(one.tokens) for one in found)
    perplexity = math.exp(-sum(one.log_prob for one in found) / tokens)
    assert err == (
        f"4 pairs, {tokens} target tokens, EOS included: perplexity {perplexity:.4f} per token\n"
    )


@pytest.fixture
def one_nat(monkeypatch):
    """A model that gives every letter one nat."""

    def score(self, pairs, *, first_line, stop):
        return [PairScore([*target, "</s>"], [-1.0] * (len(target) + 1)) for _, target in pairs]

    monkeypatch.setattr(Translator, "score", score)


def test_each_token_has_its_score(call, one_nat):
    _, out, _ = call("score {run} {one} {one} --per-token")
    assert out.split("\t")[:3] == ["-7.0000", "l", "-1.0000"]
    assert out.endswith("</s>\t-1.0000\n")
    _, out, _ = call("score {run} {one} {one} --json")
    tokens = [*"line 0", "</s>"]
    assert json.loads(out) == {"line": 1, "log_prob": -7, "tokens": tokens, "log_probs": [-1] * 7}


def test_an_infinite_perplexity_is_inf_for_people_and_null_in_json(call, mirror, monkeypatch):
    """As `score` prints it: "inf"."""
    endless = lambda self, pairs, **_: [PairScore(["</s>"], [-math.inf])] * len(pairs)  # noqa: E731
    monkeypatch.setattr(Translator, "score", endless)
    line = "evaluate {run} --source {one} --reference {one} --beam-size 1"
    assert "perplexity = inf per target token" in call(line)[1]
    assert json.loads(call(f"{line} --json")[1])["perplexity"] is None


def test_no_pairs_have_no_perplexity(call, one_nat):
    assert call("score {run} {none} {none}") == (0, "", "0 pairs, 0 target tokens, EOS included\n")


def test_files_that_cannot_be_read_twice_are_scored_too(call, one_nat, tmp_path):
    """A named pipe, as `<(zcat ...)` is one; inequality shows at the end then."""
    os.mkfifo(tmp_path / "pipe")
    writer = subprocess.Popen(["sh", "-c", f"echo a > {tmp_path}/pipe"])
    status, _, err = call("score {run} {tmp}/pipe {two}")
    writer.wait()
    assert status == 2
    assert "pipe has 1 and" in err


def test_evaluation_measures_and_names_what_was_used(call, paths, mirror, one_nat, tmp_path):
    """Two pairs of four have an empty side; they keep their lines in the output."""
    of_corpus = "evaluate {run} --corpus text:{corpus} --json"
    status, out, _ = call(of_corpus + " --output {tmp}/out --beam-size 1 --min-length 2")
    report = json.loads(out)
    assert status == 0
    assert (tmp_path / "out").read_text() == "esuoh der eht\n\nsrood eulb\n\n"
    expected = {"sentences": 2, "skipped": 2, "steps": [2], "means": [False], "beam_size": 1}
    expected |= {"languages": "en-ko", "target_tokens": 6, "lowercase": False}
    expected |= {"exact_match": 0.0, "min_length": 2}
    assert {name: report[name] for name in expected} == expected
    assert report["perplexity"] == pytest.approx(math.e, abs=1e-5)
    assert report["bleu"]["signature"].startswith("BLEU|nrefs:1|case:mixed|eff:no|tok:")
    assert report["tokenize"] in ("char", "ko-mecab")
    assert {"sentences_per_second", "tokens_per_second", "compilations", "device"} <= set(report)


def test_evaluation_for_people_names_model_data_search_and_signatures(call, mirror, one_nat):
    line = "evaluate {run} --source {four} --reference {four} --tokenize char --lowercase --step 1"
    _, out, _ = call(line)
    for part in ("run, step 1", "4 pairs; 0 with", "beam size 2", "early stopping on",
                 "tokenizer: char, as requested", "|case:lc|", "chrF2|",
                 "exact match = 0.0 % of 4", "perplexity = 2.718",
                 "sentences/s", "tokens/s"):  # fmt: skip
        assert part in out, part


def test_evaluation_of_another_split(call, mirror, one_nat, paths):
    for language in ("en", "ko"):
        (paths["corpus"] / f"dev.{language}").write_text("otto\n")
    _, out, _ = call(
        "evaluate {run} --corpus text:{corpus} --split validation --json --tokenize char"
    )
    assert json.loads(out)["exact_match"] == 1
    assert json.loads(out)["data"].startswith("validation of text:")


# Plots


def test_attention_becomes_a_figure(call, watched, tmp_path):
    pytest.importorskip("matplotlib")
    line = "plot attention {run} hi --output {tmp}/map.svg --target b --step 1"
    assert call(line) == (0, "", "")
    assert watched == [("hi", "b")]
    assert "<svg" in (tmp_path / "map.svg").read_text()


@pytest.mark.parametrize(
    "typed, top_left",
    [
        ("", [8, 12]),
        ("--layer 1", [0, 4]),
        ("--layer 1 --head 2", 4),
        ("--head mean", 10),
        ("--head all", [8, 12]),
    ],
)
def test_a_figure_shows_the_layer_and_head_asked_for(call, watched, monkeypatch, typed, top_left):
    """By default all heads of the highest layer."""
    shown = []
    monkeypatch.setattr(plots, "attention_figure", lambda weights, *_, title: shown.append(weights))
    monkeypatch.setattr(plots, "save", lambda figure, path: None)
    assert call(f"plot attention {{run}} hi --output {{tmp}}/map.png {typed}")[0] == 0
    assert (shown[0][..., 0, 0] * 16).tolist() == top_left


def test_a_named_pipe_is_written_to_and_stays_one(call, watched, tmp_path):
    os.mkfifo(tmp_path / "map.html")
    with subprocess.Popen(["cat", tmp_path / "map.html"], stdout=subprocess.PIPE) as reader:
        assert call("plot attention {run} hi --output {tmp}/map.html") == (0, "", "")
        assert len(reader.stdout.read()) > 1_000
    assert (tmp_path / "map.html").is_fifo()


def test_attention_becomes_a_page(call, tmp_path):
    """With a real model: of the encoder, and of the decoder while "A" is written."""
    assert call("plot attention {run} red --target A --output {tmp}/map.html") == (0, "", "")
    page = (tmp_path / "map.html").read_text()
    assert all(f'"{name}"' in page for name in ("encoder", "decoder", "cross", "ko"))


@pytest.mark.parametrize("what", ["positions", "curves {tmp}/run"])
def test_positions_and_metrics_become_figures(call, tmp_path, what):
    pytest.importorskip("matplotlib")
    run = make_tiny_run(tmp_path / "run", steps=())
    (run / "metrics.jsonl").write_text('{"step": 1, "loss": 5.0}\n{"step": 2, "loss": 4.0}\n')
    assert call(f"plot {what} --output {{tmp}}/map.png") == (0, "", "")
    assert (tmp_path / "map.png").read_bytes().startswith(b"\x89PNG")


# A process of its own


@pytest.fixture(scope="module")
def environment(tmp_path_factory):
    """Without the second virtual device, and with a cache for what is compiled."""
    cache = str(tmp_path_factory.mktemp("cache"))
    return {**os.environ, "XLA_FLAGS": "", "XDG_CACHE_HOME": cache}


@contextlib.contextmanager
def process(command, environment, **settings):
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(command, env=environment, **{**pipes, **settings}) as running:
        try:
            yield running
        finally:
            running.kill()


def test_a_program_that_waits_for_each_answer_gets_it(paths, environment):
    """And a signal while there is nothing to do ends it at once, without a traceback."""
    with process([*COMMAND, "translate", str(paths["run"])], environment) as running:
        for line in (b"the red house\n", b"\n"):
            running.stdin.write(line)
            running.stdin.flush()
            assert running.stdout.readline().endswith(b"\n")
        running.send_signal(signal.SIGINT)
        assert running.wait(timeout=60) == 130
        assert running.stderr.read() == b""
        assert running.stdout.read() == b""


def test_a_signal_that_does_not_break_the_wait_for_a_line_ends_it_too(environment):
    """As one does that comes just before the wait begins, or is delivered to another thread."""
    program = (
        "import signal, threading; from flaxformer_min.cli.lines import *;\n"
        "send = lambda: signal.pthread_kill(threading.get_ident(), signal.SIGINT)\n"
        "with Stop() as stop:\n"
        "    threading.Timer(0.3, send).start()\n"
        "    try:\n"
        "        Lines(sys.stdin, 'stdin').take(1)\n"
        "    except KeyboardInterrupt:\n"
        "        sys.exit(stop.status)\n"
    )
    with process([sys.executable, "-c", program], environment) as running:
        assert running.wait(timeout=60) == 130
        assert running.stderr.read() == b""


@pytest.mark.parametrize(
    "command",
    [["translate", "no-run"], pytest.param(["train", "--help"], marks=pytest.mark.slow)],
    ids=" ".join,
)
def test_ctrl_c_while_libraries_are_imported_ends_the_process_quietly(environment, command):
    program = (
        "import os, signal, sys;"
        "signal.signal(signal.SIGINT, signal.default_int_handler);"
        "stop = lambda: os.kill(os.getpid(), signal.SIGINT);"
        "find = lambda name, *_: stop() if name == 'jax' else None;"
        "sys.meta_path.insert(0, type('Finder', (), {'find_spec': staticmethod(find)}));"
        "from flaxformer_min import cli; sys.exit(cli.main())"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, *command], env=environment, capture_output=True
    )
    assert (done.returncode, done.stderr) == (-signal.SIGINT, b"")


@pytest.mark.slow
def test_a_second_signal_does_not_even_wait_for_the_batch(paths, environment):
    """Nor for the thread that runs it, as Python would at its end."""
    program = (
        "import sys, time; from flaxformer_min import cli;"
        "from flaxformer_min.decoding.batches import BatchRunner;"
        "say = lambda: print('running', file=sys.stderr, flush=True);"
        "BatchRunner._prepare = lambda *_: lambda: (say(), time.sleep(600));"
        "sys.argv[1:] = ['translate', sys.argv[1]]; sys.exit(cli.main())"
    )
    command = [sys.executable, "-c", program, str(paths["run"])]
    with process(command, environment) as running:
        running.stdin.write(b"red\n")
        running.stdin.flush()
        assert running.stderr.readline() == b"running\n"
        deadline = time.monotonic() + 30
        while running.poll() is None and time.monotonic() < deadline:
            running.send_signal(signal.SIGINT)
            time.sleep(0.5)  # two at once are one, and on a busy machine half a second is at once
        assert running.poll() == 130
        assert running.stderr.read() == b""


@pytest.mark.slow
@pytest.mark.parametrize(
    "line, status, errors",
    [
        ("yes | {} | head -n 1; exit ${{PIPESTATUS[1]}}", 141, ""),
        ("echo a | {} > /dev/full", 2, "flaxformer-min: error: No space left on device\n"),
    ],
)
def test_output_that_cannot_be_written_ends_it_without_a_traceback(
    paths, environment, line, status, errors
):
    """A closed pipe quietly. Python would flush once more at its end, and end with 120."""
    line = line.format(" ".join([*COMMAND, "translate", str(paths["run"])]))
    done = subprocess.run(
        ["bash", "-c", line], env=environment, capture_output=True, text=True, timeout=300
    )
    assert (done.returncode, done.stderr) == (status, errors)
    assert done.stdout.count("\n") == (status == 141)


@pytest.mark.slow
def test_at_a_terminal_it_prompts_and_answers_line_by_line(paths, environment):
    ours, theirs = pty.openpty()
    with process([*COMMAND, "translate", str(paths["run"])], environment, stdin=theirs) as running:
        os.write(ours, b"the red house\n")
        assert running.stdout.readline().endswith(b"\n")
        os.write(ours, b"\x04")  # Ctrl-D
        assert running.wait(timeout=60) == 0
        assert running.stderr.read() == b"> > "
    os.close(ours)
    os.close(theirs)


def test_an_exported_run_is_imported_again(call, tmp_path):
    """Each command names what to do next, on stderr."""
    status, out, err = call("export {run} {tmp}/marian --format marian")
    assert (status, out) == (0, "") and "README.md" in err
    status, out, err = call("import {tmp}/marian {tmp}/again")
    assert (status, out) == (0, "") and f"flaxformer-min translate {tmp_path}/again" in err
    assert (tmp_path / "again" / "config.json").exists()
