"""Users' mistakes, one row each: the error they read, or the result in spite of it.

More settings are in test_config.py, the command line in test_cli.py.
"""

import gzip
import os
import re
import shutil
from functools import partial

import pytest
from make_golden_run import GOLDEN
from marian_models import train_spm
from tiny_run import LINES, make_tiny_run
from training_jobs import changed

from flaxformer_min.config import Config, DataConfig, ModelConfig, SearchConfig, TrainingConfig
from flaxformer_min.data.batches import TrainingBatches
from flaxformer_min.data.encoding import Counts
from flaxformer_min.data.tokenizer import Tokenizer
from flaxformer_min.decoding.translator import Translator
from flaxformer_min.experiment.prepare import encode, make_tokenizers, open_split
from flaxformer_min.storage.run_folder import RunFolder
from flaxformer_min.training.metrics import read_metrics


def assert_refused(call, error):
    """The error is a sentence or two for a person, not a traceback."""
    with pytest.raises(ValueError) as raised:
        call()
    assert re.fullmatch(error, str(raised.value)), str(raised.value)


# Corpora

ONE, TWO = "a b\n", "c d\n"
LONG = "word " * 200_000 + "\n"
CORPORA = [
    # what is in train.en, in train.de, and (pairs read, with an empty side, too long), or the error
    ("one pair", ONE, TWO, (1, 0, 0)),
    ("no end of the last line", "a\nb", "c\nd", (2, 0, 0)),
    ("Windows line ends", "a\r\nb\r\n", "c\nd\n", (2, 0, 0)),
    ("byte order marks", "\ufeffa\n", "\ufeffc\n", (1, 0, 0)),
    ("empty lines", "a\n\n b\n\n", "c\n\nd\ne\n", (4, 2, 0)),
    ("a line of 1 MB", ONE + LONG, TWO + TWO, (2, 0, 1)),
    ("NUL bytes", "a\0b\n\0\n", "c\n\0d\0\n", (2, 0, 0)),
    ("only punctuation", "...\n?!\n", "—\n¿¡\n", (2, 0, 0)),
    ("other line separators", "a\u2028b\x85c\n", "d\x0be\x0cf\n", (1, 0, 0)),
    ("names of control tokens", "<s> </s>\n", "<pad> <unk>\n", (1, 0, 0)),
    ("the sign for spaces", "▁\n▁a▁ ▁\n", "a\n▁b\n", (2, 1, 0)),
    ("text that normalization removes", "\u200b\nb\n\ufeff \u00ad\n", "a\nb\nc\n", (3, 2, 0)),
    ("line ends of old Macs", "a\nb\n", "c\rd\r",
     r"the lines of a text must end in \\n; those of .*/train\.de end in \\r\. Convert it: "
     r"tr '\\r' '\\n' < FILE > TEXT\."),
    ("UTF-16 without a mark", "a\nb\n", "c\nd ein Satz\n".encode("utf-16-le"),
     r"text must be UTF-8; .*/train\.de is UTF-16LE\. Convert it: iconv -f utf-16le -t utf-8\."),
    ("only long pairs", LONG, LONG,
     r"A tokenizer needs at least one line of text that is neither empty nor longer than 16 kB; "
     r"got none\. Check the text, or split its lines into sentences\."),
    ("a side that is all empty", "a\nb\n", "\n  \n",
     r"the train split must have at least one usable pair; got 2 pairs read, 2 with an empty side "
     r"and 0 longer than a row dropped; .*\. Check the text, or raise data.source_row_length and "
     r"data.target_row_length\."),
    ("empty files", "", "", r"A split must hold at least one pair; .*/train\.en is empty\."),
    ("unequal numbers of lines", "a\nb\n", "c\n",
     r"Both sides must have the same number of lines, line i translating line i; "
     r".*/train\.en has 2, .*/train\.de has 1\."),
    ("no UTF-8", "a\nb\n", b"c\n\xfc\n",
     r".*/train\.de, line 2: text must be UTF-8; .* at byte 1 of the line\. Convert the file, for "
     r"example with iconv\."),
    ("UTF-16", "a\n", "c".encode("utf-16"),
     r"text must be UTF-8; .*/train\.de is UTF-16\. Convert it: iconv -f utf-16 -t utf-8\."),
    ("compressed text without .gz", "a\nb\n", gzip.compress(b"c\nd\n"),
     r"text must not be compressed; .*/train\.de is compressed \(gzip\)\. Decompress it, or add "
     r"\.gz to its name\."),
    ("a missing file", ONE, None,
     r"A text corpus needs files like train\.en and train\.de, or train\.tsv \(also \.gz, "
     r"\.xz, \.bz2 and \.zst\); .* holds train\.en\."),
    ("no file", None, None,
     r"A text corpus needs files like train\.en and train\.de, or train\.tsv \(also \.gz, "
     r"\.xz, \.bz2 and \.zst\); .* holds nothing\."),
]  # fmt: skip


@pytest.mark.parametrize(
    "source, target, expected", [row[1:] for row in CORPORA], ids=[row[0] for row in CORPORA]
)
def test_a_corpus_becomes_rows_or_an_error(tmp_path, source, target, expected):
    """The stages of train.py: read, train a tokenizer, encode, pack."""
    folder = tmp_path / "corpus"
    folder.mkdir()
    for language, content in (("en", source), ("de", target)):
        if content is not None:
            data = content if isinstance(content, bytes) else content.encode()
            (folder / f"train.{language}").write_bytes(data)
    config = Config(
        data=DataConfig(corpus=f"text:{folder}", languages="en-de", cache_dir=str(tmp_path)),
        model=ModelConfig(vocab_size=300),
    )

    def prepare():
        pairs = open_split(config, "train")
        tokenizers = RunFolder(tmp_path / "run").begin(
            config, lambda paths: make_tokenizers(config, pairs, paths)
        )
        encoded = encode(config, "train", pairs, tokenizers)
        rows = TrainingBatches(encoded, (64, 64), rows=4, seed=0)
        batch = next(rows)
        rows.close()
        assert batch.source.segments.max() > 0
        return encoded.counts

    if isinstance(expected, str):
        assert_refused(prepare, expected)
    else:
        counts = prepare()
        assert isinstance(counts, Counts)
        assert (counts.read, counts.empty, counts.too_long) == expected


def as_pipe(path):
    """A pipe that nobody writes to: whoever reads it waits forever."""
    path.unlink()
    os.mkfifo(path)


def as_zeros(path):
    """A link to a device that never ends."""
    path.unlink()
    path.symlink_to("/dev/zero")


def as_huge(path):
    """A sparse file of 1 TB."""
    path.unlink()
    with path.open("wb") as file:
        file.truncate(1 << 40)


OURS = {"pad_id": 0, "unk_id": 1, "bos_id": 2, "eos_id": 3}
"""The special ids of our tokenizers."""


@pytest.mark.parametrize("damage", [as_pipe, as_zeros, as_huge])
@pytest.mark.parametrize("name", ["config.json", "tokenizer.model"])
def test_a_file_without_end_is_refused_not_read(tmp_path, name, damage):
    run = make_tiny_run(tmp_path / "run")
    damage(run / name)
    with pytest.raises(ValueError, match=f"{name}.*must be a regular file of at most 256 MB"):
        Translator.load(run)


@pytest.mark.parametrize("damage", [as_pipe, as_zeros])
@pytest.mark.parametrize("name", ["meta/metadata", "state/_METADATA", "state/manifest.ocdbt"])
def test_a_checkpoint_with_a_file_without_end_is_damaged(tmp_path, name, damage, caplog):
    run = make_tiny_run(tmp_path / "run", steps=(1, 2))
    damage(run / "checkpoints" / "2" / name)
    assert RunFolder(run).params().step == 1
    assert "checkpoint 2 in" in caplog.text and "is a pipe or a device" in caplog.text


@pytest.mark.parametrize("symbols", [("a b",), ("",), ("▁",), ("\n",), ("x", "x")])
def test_symbols_that_are_no_pieces_are_refused(symbols):
    with pytest.raises(ValueError, match="data.symbols must"):
        DataConfig(symbols=symbols)


@pytest.mark.parametrize("damage", [as_pipe, as_huge])
def test_a_log_without_end_is_refused_not_read(tmp_path, damage):
    (tmp_path / "metrics.jsonl").touch()
    damage(tmp_path / "metrics.jsonl")
    with pytest.raises(OSError, match="must be a regular file"):
        read_metrics(tmp_path / "metrics.jsonl")


def test_subword_sampling_of_tokenizers_without_probabilities_is_refused(tmp_path):
    """BPE has no n best segmentations; SentencePiece says so in words of its own, and later."""
    run = make_tiny_run(tmp_path / "run")
    options = {"model_type": "bpe", "byte_fallback": True, "vocab_size": 284, **OURS}
    train_spm(run / "tokenizer.model", " ".join(LINES), **options)
    config = Config(
        data=DataConfig(subword_sampling=0.3, normalization="identity"),
        model=RunFolder(run).config().model,
        training=TrainingConfig(init_from=str(run)),
    )
    paths = tmp_path / "a", tmp_path / "a"
    for setting in ({"normalization": "nfkc"}, {"symbols": ("<ph>",)}):
        assert_refused(
            partial(make_tokenizers, changed(config, "data", **setting), [], paths),
            rf"data\.{[*setting][0]} must be .*, as those of .* Begin with .* of that run\.",
        )
    assert_refused(
        lambda: make_tokenizers(config, [], paths),
        r"data\.subword_sampling needs tokenizers that know the probability .* Leave it at 0\.",
    )
    assert not paths[0].exists()


# Run folders


def replace(name, content):
    """Replace a file by another one; None: by a folder, which cannot be read as a file."""

    def damage(folder):
        path = folder / name
        shutil.rmtree(path) if path.is_dir() else path.unlink()
        if content is None:
            path.mkdir()
        else:
            path.write_bytes(content if isinstance(content, bytes) else content.encode())

    return damage


def remove(name):
    return lambda folder: [
        shutil.rmtree(path) if path.is_dir() else path.unlink() for path in folder.glob(name)
    ]


def other_vocabulary(folder):
    other = make_tiny_run(folder / "other", steps=(), lines=["ab ba"] * 9)
    shutil.move(other / "tokenizer.model", folder / "tokenizer.model")


def spoil_checkpoints(folder):
    for path in (folder / "checkpoints").rglob("*"):
        if path.is_file():
            path.write_bytes(b"")


RUNS = [
    # damage to an intact run folder, and the error
    ("not there", shutil.rmtree, r"a run is a folder; there is none at .*\."),
    ("empty", remove("*"), r".* is not a run: it has no config\.json\. `flaxformer-min train` "
     r"creates one\."),
    ("of a newer format", replace("config.json", '{"format_version": 99}'),
     r".*config\.json has format 99; this flaxformer_min reads formats up to 1\. Install a newer "
     r"flaxformer_min\."),
    ("settings truncated", replace("config.json", '{"format_version": 1, "mod'),
     r".*config\.json must be JSON; .*\. Restore it from a backup\."),
    ("settings in no UTF-8", replace("config.json", b"\xff\xfe{}"),
     r".*config\.json cannot be read: .* Make it readable, or restore it from a backup\."),
    ("settings that cannot be read", replace("config.json", None),
     r".*config\.json cannot be read: .*Is a directory.*\. Make it readable, or restore .*"),
    ("settings nested too deep", replace("config.json", '{"a":' * 100_000),
     r".*config\.json must be JSON; .*\. Restore it from a backup\."),
    ("a setting of no range", replace("config.json", '{"format_version": 1, "model": {"d_ff": 0}}'),
     r".*config\.json: model\.d_ff must be at least 1; got 0\."),
    ("no tokenizer", remove("tokenizer.model"),
     r".* is incomplete: it has no tokenizer\.model\. Restore it from a backup\."),
    ("a tokenizer truncated", replace("tokenizer.model", b"\x0a\x0e"),
     r".*tokenizer\.model must be a SentencePiece model, .* Is it another file, or truncated\?"),
    ("a tokenizer that cannot be read", replace("tokenizer.model", None),
     r"A tokenizer must be a readable file; .*tokenizer\.model: Is a directory\."),
    ("the tokenizer of another run", other_vocabulary,
     r"settings, tokenizers and checkpoint must be those of one run; .* \(\d+, 16\).* Restore "
     r"the files that belong together\."),
    ("no checkpoints", remove("checkpoints"),
     r".* holds no checkpoint yet\. Train it until it has saved\."),
    ("checkpoints are a file", replace("checkpoints", b"x"),
     r".* holds no checkpoint yet\. Train it until it has saved\."),
    ("no intact checkpoint", spoil_checkpoints,
     r"no checkpoint in .*checkpoints is intact\. Restore one from a backup\."),
]  # fmt: skip


@pytest.fixture(scope="module")
def intact_run(tmp_path_factory):
    return make_tiny_run(tmp_path_factory.mktemp("runs") / "intact")


@pytest.mark.usefixtures("failed_transfers")
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("damage, error", [row[1:] for row in RUNS], ids=[row[0] for row in RUNS])
def test_a_damaged_run_folder_is_refused(intact_run, tmp_path, caplog, damage, error):
    folder = shutil.copytree(intact_run, tmp_path / "run")
    Translator.load(folder)  # it is intact until now
    assert caplog.messages == []
    damage(folder)
    assert_refused(lambda: Translator.load(folder).translate(["the red house"]), error)


# Tokenizer files

GOLDEN_TOKENIZER = (GOLDEN / "tokenizer.model").read_bytes()
TOKENIZERS = [
    # the file's content, or options of SentencePiece to make it with, and the error
    ("empty", b"", r".* must be a SentencePiece model, .* Is it another file, or truncated\?"),
    ("truncated", GOLDEN_TOKENIZER[:2_000], r".* must be a SentencePiece model, .*"),
    ("other special ids", dict(byte_fallback=True),
     r".* must have the ids PAD=0, UNK=1, BOS=2, EOS=3; it has PAD=-1, UNK=0, BOS=1, EOS=2\. Train "
     r"it with train_tokenizer, or with SentencePiece's options .*"),
    ("swapped special ids", dict(byte_fallback=True, pad_id=0, unk_id=1, bos_id=3, eos_id=2),
     r".*; it has PAD=0, UNK=1, BOS=3, EOS=2\. Train it .*"),
    ("no pieces for bytes", OURS,
     r".* must be able to spell any text in bytes; it has no byte pieces\. Train it with "
     r"train_tokenizer, or with SentencePiece's option --byte_fallback\."),
]  # fmt: skip


@pytest.mark.parametrize(
    "content, error", [row[1:] for row in TOKENIZERS], ids=[row[0] for row in TOKENIZERS]
)
def test_a_tokenizer_that_is_not_ours_is_refused(tmp_path, content, error):
    path = tmp_path / "tokenizer.model"
    if isinstance(content, bytes):
        path.write_bytes(content)
    else:
        train_spm(path, " ".join(LINES), vocab_size=300, **content)
    assert_refused(lambda: Tokenizer.load(path), error)


# Settings: test_config.py has more of them

SETTINGS = [
    (ModelConfig, dict(dropout=1.0), "model.dropout must be less than 1; got 1.0."),
    (ModelConfig, dict(d_model=10, num_heads=3),
     "model.d_model must be a multiple of model.num_heads, so that the heads share it evenly; got "
     "d_model=10, num_heads=3."),
    (ModelConfig, dict(d_model=9, num_heads=3),
     "model.d_model must be even, because sines and cosines come in pairs; got 9."),
    (ModelConfig, dict(final_norm=False),
     "model.final_norm=False is for norm='pre', because 'post' has no norm at the end; got "
     "norm='post'. Leave it out, or choose norm='pre'."),
    (TrainingConfig, dict(clip_norm=float("inf")), "training.clip_norm must be finite; got inf."),
    (DataConfig, dict(source_row_length=7), "data.source_row_length must be at least 8; got 7."),
    (DataConfig, dict(normalization=None),
     "data.normalization must be None for imported tokenizers, which keep their rules, and only "
     "for them; got None with data.tokenizers='trained'."),
    (Config, dict(model=ModelConfig(vocab_size=4), decoding=SearchConfig(beam_size=5)),
     "decoding.beam_size must not exceed the vocabulary of 4, the number of continuations; got 5."),
]  # fmt: skip


@pytest.mark.parametrize("group, settings, error", SETTINGS, ids=[str(row[1]) for row in SETTINGS])
def test_an_impossible_setting_is_refused(group, settings, error):
    assert_refused(lambda: group(**settings), re.escape(error))
