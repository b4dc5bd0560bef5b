"""The embedded corpus: one meaning in two languages, and splits that do not leak."""

import logging
import os
import re
import subprocess
import sys
import zlib
from datetime import date, datetime

import pytest
from babel import Locale

from flaxformer_min.data.corpora import cldr, cldr_kinds, read_pairs

MONTHS = (
    "January February March April May June July August September October November December".split()
)


@pytest.fixture
def small(monkeypatch):
    """A corpus that is made in a moment."""
    monkeypatch.setattr(cldr, "SIZES", {"test": 60, "validation": 50, "train": 900})


@pytest.fixture(scope="module")
def everything():
    """The default corpus in full size: split -> phrases. About ten seconds."""
    return {split: cldr.phrases("en", "ko", split) for split in cldr.SIZES}


@pytest.mark.slow
def test_there_are_fifty_thousand_training_pairs_and_a_thousand_of_each_other(everything):
    """No source text occurs twice: no text is in two splits, and none has two translations."""
    sizes = {split: len(found) for split, found in everything.items()}
    assert sizes == {"train": 50_000, "validation": 1_000, "test": 1_000}
    sources = {phrase.source for found in everything.values() for phrase in found}
    assert len(sources) == 52_000


@pytest.mark.slow
def test_a_date_belongs_to_one_split(everything):
    """Read back from the English, as the formats with a full year write it."""

    def dates(split):
        return {
            datetime.strptime(phrase.source, pattern).date()
            for phrase in everything[split]
            for kind, pattern in {
                "date:long": "%B %d, %Y",
                "date:full": "%A, %B %d, %Y",
                "date:medium": "%b %d, %Y",
                "date:yMd": "%m/%d/%Y",
            }.items()
            if phrase.kind == kind
        }

    assert len(dates("test")) > 50 and len(dates("train")) > 2_000
    assert not dates("test") & dates("train")
    assert not dates("validation") & (dates("train") | dates("test"))
    assert date(1970, 1, 1) <= min(dates("train")) and max(dates("train")) < date(2070, 1, 1)


@pytest.mark.slow
def test_a_number_from_100_up_belongs_to_one_split(everything):
    def numbers(split):
        return {
            round(float(re.search(r"\d[\d,.]*", phrase.source)[0].replace(",", "")))
            for phrase in everything[split]
            if phrase.kind in ("measure:long", "money:name")
        }

    large = {split: {n for n in numbers(split) if n > 100} for split in everything}
    assert len(large["test"]) > 30
    assert not large["test"] & large["train"] and not large["validation"] & large["train"]


@pytest.mark.slow
def test_a_full_date_means_the_same_on_both_sides(everything):
    """Read with expressions written here, not with Babel."""
    checked = 0
    for phrase in everything["test"] + everything["train"]:
        if phrase.kind != "date:full":
            continue
        weekday, month, day, year = re.fullmatch(
            r"(\w+), (\w+) (\d+), (\d+)", phrase.source
        ).groups()
        korean = re.fullmatch(r"(\d+)년 (\d+)월 (\d+)일 (.)요일", phrase.target).groups()
        assert korean[:3] == (year, str(MONTHS.index(month) + 1), day)
        there = date(int(year), MONTHS.index(month) + 1, int(day))
        assert korean[3] == "월화수목금토일"[there.weekday()]
        assert weekday == there.strftime("%A")
        checked += 1
    assert checked > 1_000


@pytest.mark.slow
def test_nothing_is_a_key_a_pattern_or_a_typographic_space(everything):
    for found in everything.values():
        for kind, *texts in found:
            for text in texts:
                assert text and text == text.strip()
                assert not re.search("[{}\u00a0\u2009\u202f\n\t]", text), (kind, text)
                assert not re.search(
                    "(duration|length|mass|volume|pressure|concentr)-[a-z]", text
                ), (kind, text)
    # Korean has no long pattern for minutes in Babel 2.18, which then shows the unit's key.
    long = [p.source for p in everything["train"] if p.kind == "measure:long"]
    assert any(text.endswith(" kilograms") for text in long)
    assert not any(text.endswith(" minutes") for text in long)


def test_the_same_seed_gives_the_same_phrases_and_another_others(small):
    assert cldr.phrases("en", "de", "train") == cldr.phrases("en", "de", "train")
    assert cldr.phrases("en", "de", "train") != cldr.phrases("en", "de", "train", seed=1)


def test_phrases_do_not_depend_on_the_process():
    """Not on the order of sets of text, which differs from run to run."""
    program = (
        "from flaxformer_min.data.corpora.cldr import phrases; import zlib;"
        "print(zlib.crc32(repr(phrases('en', 'fr', 'test', size=60)).encode()))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={
            "PYTHONHASHSEED": "2" if os.environ.get("PYTHONHASHSEED") == "1" else "1",
            "PYTHONPATH": ":".join(sys.path),
        },
        capture_output=True,
        text=True,
        check=True,
    )
    here = zlib.crc32(repr(cldr.phrases("en", "fr", "test", size=60)).encode())
    assert done.stdout == f"{here}\n"


@pytest.mark.parametrize("pair", ["pt_BR-ja", "he-zh_Hant"])
def test_any_two_locales_make_a_corpus(small, pair):
    found = cldr.phrases(*pair.split("-"), "train")
    assert len(found) == 900
    assert len({phrase.kind.partition(":")[0] for phrase in found}) > 10
    assert all(re.search(r"\w", text) for phrase in found for text in phrase[1:])


def test_months_and_clocks_are_those_of_the_locale():
    """By hand: 24 hours in German, 12 in English; German months and decimal commas."""
    german, english = Locale.parse("de"), Locale.parse("en_US")
    kinds = {kind.name: kind for kind in cldr.phrase_kinds(german, english)}
    noon = datetime(2031, 3, 5, 14, 7, 9)

    def both(kind, value):
        return [cldr_kinds.plain_spaces(kinds[kind].render(value, w)) for w in (german, english)]

    assert both("date:full", noon.date()) == ["Mittwoch, 5. März 2031", "Wednesday, March 5, 2031"]
    assert both("time:medium", noon) == ["14:07:09", "2:07:09 PM"]
    assert both("relative-time", (("day", True), 3)) == ["vor 3 Tagen", "3 days ago"]
    assert both("duration", (("hour", 3), ("minute", 20))) == ["3 Std., 20 Min.", "3 hr, 20 min"]
    names = [("territory", "FR"), ("territory", "DE")]
    assert both("territory-list:or", names) == ["Frankreich oder Deutschland", "France or Germany"]
    assert both("measure:long", (("mass-kilogram", "long"), 1234.5)) == [
        "1.234,5 Kilogramm",
        "1,234.5 kilograms",
    ]


def test_units_that_are_written_alike_are_told_apart_or_left_out():
    """A short "m" is a metre; where a locale writes two units so, the second goes."""
    texts = {
        ("first", "long"): ("5 m", "fünf Meter"),
        ("second", "long"): ("5 m", "fünf Minuten"),
        ("third", "long"): ("5 m", "fünf Meter"),
        ("lacking", "long"): ("5 x", ""),
    }
    source, target = Locale.parse("en"), Locale.parse("de")

    def render(item, number, locale):
        return texts[item][locale == target]

    kept = cldr_kinds._unambiguous(list(texts), render, source, target)
    assert kept == [("first", "long"), ("third", "long")]


def test_other_mistakes_are_errors_that_say_what_there_is():
    with pytest.raises(ValueError, match="splits test, validation, train; got 'dev'"):
        cldr.phrases("en", "ko", "dev")
    with pytest.raises(ValueError, match="two different languages; got 'en' twice"):
        cldr.phrases("en", "en")


def test_locales_with_too_little_in_common_are_an_error(small, monkeypatch):
    day = cldr.Kind(
        "date:one", 1, lambda rng: date(2020, 1, 1), lambda value: None, lambda v, w: "x"
    )
    monkeypatch.setattr(cldr, "phrase_kinds", lambda source, target: [day])
    with pytest.raises(
        ValueError, match="too few phrases in common for en and ko: 0 of 60 in test"
    ):
        cldr.phrases("en", "ko", "test")


def test_the_prepared_set_holds_the_phrases_in_their_order(small, tmp_path, capfd):
    """So that its number identifies a phrase's kind; and preparing prints nothing."""
    for split, size in cldr.SIZES.items():
        pairs = read_pairs("cldr:en-ko", split, cache_dir=str(tmp_path))
        assert len(pairs) == size
        assert list(pairs) == [phrase[1:] for phrase in cldr.phrases("en", "ko", split)]
    assert capfd.readouterr() == ("", "")


def test_a_set_is_prepared_once_and_the_first_time_is_told(
    small, tmp_path, monkeypatch, capsys, caplog
):
    """Where tfds is silent, stdout is not."""
    caplog.set_level(logging.INFO, "flaxformer_min")
    handler = logging.Handler()
    handler.emit = lambda record: print(record.getMessage())
    monkeypatch.setattr(cldr.LOGGER, "handlers", [handler])

    first = cldr.prepare("en", "ko", tmp_path)
    assert "Rendering the phrases" in capsys.readouterr().out
    monkeypatch.setattr(cldr, "phrases", None)
    assert cldr.prepare("en", "ko", tmp_path).info.full_name == first.info.full_name


@pytest.mark.slow
def test_two_processes_may_prepare_at_once(tmp_path):
    program = (
        "from flaxformer_min.data.corpora import cldr; from pathlib import Path; import sys;"
        "cldr.SIZES = {'test': 20, 'validation': 20, 'train': 500};"
        "sys.stdin.readline();"  # both have imported, and start together
        f"print(cldr.prepare('en', 'ko', Path({str(tmp_path)!r})).info.splits.total_num_examples)"
    )
    racers = [
        subprocess.Popen(
            [sys.executable, "-c", program],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for _ in range(2)
    ]
    for racer in racers:
        racer.stdin.write("go\n")
        racer.stdin.flush()
    results = [racer.communicate(timeout=120) for racer in racers]
    assert [out for out, _ in results] == ["540\n", "540\n"], results
    assert len(list((tmp_path / "cldr_phrases" / "en-ko").iterdir())) == 1


def test_a_failed_preparation_is_not_taken_for_anothers_success(small, tmp_path, monkeypatch):
    def fail(*arguments):
        raise OSError("no space left on device")

    monkeypatch.setattr(cldr, "phrases", fail)
    with pytest.raises(OSError, match="no space left"):
        cldr.prepare("en", "ko", tmp_path)
