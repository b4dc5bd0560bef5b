"""The report on a corpus finds each kind in the lines that a person marked, and nowhere else."""

import json

import pytest

from flaxformer_min import cli
from flaxformer_min.data.corpora.pairs import as_pairs
from flaxformer_min.data.inspection import find_usual, inspect_pairs

OBJECTS = ("file", "파일"), ("table", "표"), ("chart", "차트"), ("sheet", "시트"), ("page", "쪽")
ACTIONS = ("Opens the {}.", "{} 열기를 합니다."), ("Deletes the {}.", "{} 삭제를 합니다.")
PLAIN = [(a.format(x), b.format(y)) for a, b in ACTIONS for x, y in OBJECTS]
"""Ten pairs in which nothing is unusual."""

GERMAN = [
    ("A man sees the red house.", "Ein Mann sieht das rote Haus."),
    ("A dog sees the red ball.", "Ein Hund sieht das rote Auto."),
    ("A boy sees the red door.", "Ein Junge sieht das rote Tor."),
] * 30


def kinds(pairs, held_out=None):
    """Return line, kind and detail of all findings."""
    pairs = as_pairs(pairs, "pairs")
    held_out = {name: as_pairs(split, name) for name, split in (held_out or {}).items()}
    return [tuple(found) for found in inspect_pairs(pairs, find_usual(pairs), held_out)]


def test_ordinary_pairs_are_not_found():
    assert kinds(PLAIN) == []


@pytest.mark.parametrize(
    ("kind", "detail", "source", "target"),
    [
        ("empty", "", "Opens it.", " "),
        ("identical", "", "= A1 + B2", "=  a1 + b2"),
        (
            "untranslated",
            "press the red key",
            "Press the red key now.",
            "press the red key 합니다.",
        ),
        ("script", "target: 0% HANGUL", "Opens the box.", "Opens the box now"),
        ("script", "source: 0% LATIN", "대화 상자를 열게 합니다.", "상자 열기를 합니다."),
        # (25 + 10) / (5 + 10) beside the median (11 + 10) / (17 + 10) of "Deletes the file."
        ("length", "the target is 3.0 times as long as usual", "Stop.", 6 * "멈춤을 " + "끝"),
        ("truncated", "3 | 1 sentences", "Stops it. Deletes the page. Ends.", "열기를 합니다."),
        ("truncated", "ends in . | ,", "Opens the door.", "쪽 열기를 하고,"),
        ("numbers", "12 | 13", "Opens page 12 of 1,000.", "쪽 13 열기를 1000 합니다."),
        ("numbers", "none | 20", "Opens the door.", "쪽 20 열기를 합니다."),
        ("words", "target: DataPilot", "Opens the data pivot.", "DataPilot 열기를 합니다."),
        ("characters", "source: U+0092", "Opens the\x92 page.", "쪽의 열기를 합니다."),
        ("characters", "target: U+E000 U+FFFD", "Opens the door.", "쪽 열기를\ue000\ufffd 합니다."),
        ("normalization", "source", "Opens the cafe\u0301.", "카페 열기를 합니다."),
    ],
)
def test_each_kind_is_found_in_its_line(kind, detail, source, target):
    """After ten ordinary pairs; nothing else is found, also not in these."""
    assert kinds([*PLAIN, (source, target)]) == [(11, kind, detail)]


def test_a_digit_or_month_that_the_other_side_writes_as_a_word_is_no_finding():
    assert kinds([*PLAIN, ("Opens two pages.", "쪽 2 열기를 합니다.")]) == []
    assert kinds([*PLAIN, ("Opens page ٤.", "쪽 4 열기를 합니다.")]) == []
    assert kinds([*PLAIN, ("Stops on October 12.", "10월 12일에 멈춥니다.")]) == []


@pytest.mark.parametrize("text", [99_999 * "." + "x", 99_999 * "1" + "월", 33_333 * "a b "])
def test_a_line_of_a_hundred_thousand_characters_takes_no_minutes(text):
    """As it would if the time grew with the square of its length."""
    assert kinds([*PLAIN, (text, "쪽 열기를 합니다.")])[0][0] == 11


def test_repeats_and_second_translations_are_found_in_the_rarer_lines():
    """ "b" is the usual translation of "a", because it stands twice; the first of "c" is."""
    pairs = [("a", "x"), ("a", "b"), ("A ", "b"), ("c", "d"), ("c", "e"), ("f", "d"), ("g", "h")]
    found = [(line, kind) for line, kind, _ in kinds(pairs) if kind not in ("length", "language")]
    assert found == [(1, "translations"), (3, "repeated"), (5, "translations"), (6, "sources")]


def test_training_text_that_is_also_held_out_is_found():
    held_out = {"test": [PLAIN[1], ("Stop.", PLAIN[2][1])], "val": [(PLAIN[3][0].upper(), "끝")]}
    assert kinds(PLAIN, held_out) == [
        (2, "overlap", "both sides in test"),
        (3, "overlap", "target in test"),
        (4, "overlap", "source in val"),
    ]


def test_a_line_in_the_other_language_of_the_same_script_is_found():
    """ "xyz" stands on both sides, and "it" only once; the others are typical of their side."""
    pairs = [*GERMAN, ("Ein Hund sieht xyz.", "A dog sees xyz."), ("A dog sees.", "A dog sees it.")]
    found = [each for each in kinds(pairs) if each[1] == "language"]
    assert found == [
        (91, "language", "source: 3 words of the other side, 0 of this one"),
        (91, "language", "target: 3 words of the other side, 0 of this one"),
        (92, "language", "target: 3 words of the other side, 0 of this one"),
    ]


@pytest.fixture
def corpus(tmp_path):
    """Twelve pairs of training text, of which one is repeated and one has an escape; one test."""
    folder = tmp_path / "corpus"
    folder.mkdir()
    pairs = [*PLAIN, PLAIN[0], ("Opens\x1b[2J it.", "그것 열기를 합니다.")]
    for split, lines in {"train": pairs, "test": [("Stops it.", "멈추기를 합니다.")]}.items():
        for language, side in zip(("en", "ko"), zip(*lines, strict=True), strict=True):
            (folder / f"{split}.{language}").write_text("".join(f"{line}\n" for line in side))
    return folder


@pytest.fixture
def call(corpus, capfd):
    """Run the command on the corpus; return status, stdout and stderr."""

    def run(*options):
        status = cli.main(["inspect", f"text:{corpus}", "--languages", "en-ko", *map(str, options)])
        out, err = capfd.readouterr()
        return status, out, err

    return run


def test_the_report_names_lines_and_shows_no_control_character(call):
    status, out, _ = call()
    assert status == 0
    assert "train: 12 pairs, en to ko; 2 with findings" in out
    assert "repeated: 1 (8.33%)" in out and "  lines 11\n" in out
    assert "Opens<U+001B>[2J it." in out and "\x1b" not in out
    assert "test: 1 pairs, en to ko; 0 with findings" in out
    assert "Opens" not in call("--samples", 0)[1]


def test_json_has_every_finding(call):
    found = [json.loads(line) for line in call("--json")[1].splitlines()]
    assert [(each["split"], each["line"], each["kind"]) for each in found] == [
        ("train", 11, "repeated"),
        ("train", 12, "characters"),
    ]
    assert found[1]["source"] == "Opens\x1b[2J it."


def test_a_clean_copy_lacks_the_named_kinds_of_the_training_text_only(call, corpus, tmp_path):
    clean = tmp_path / "clean"
    status, _, err = call("--write", clean, "--drop", "repeated", "script")
    assert status == 0 and "train has 11 pairs, without 1" in err
    for name in ("train.en", "train.ko"):
        lines = (corpus / name).read_text().splitlines()
        assert (clean / name).read_text().splitlines() == lines[:10] + lines[11:]
    for name in ("test.en", "test.ko"):
        assert (clean / name).read_bytes() == (corpus / name).read_bytes()
