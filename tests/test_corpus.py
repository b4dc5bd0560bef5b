"""Pairs by number from text files, tfds sets and the embedded phrases."""

import bz2
import gzip
import json
import lzma
import os
import pickle
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from flaxformer_min.data.corpora import languages_of, read_pairs, splits
from flaxformer_min.data.corpora.pairs import is_empty
from flaxformer_min.system import text_files
from flaxformer_min.system.files import cache_folder


def fingerprint(*arguments, **where):
    return read_pairs(*arguments, **where).fingerprint()


ENGLISH = "Hello.\nHow are you?\n\nBye."
GERMAN = "Hallo.\nWie geht's?\nLeer.\nTschüss."
PAIRS = [("Hello.", "Hallo."), ("How are you?", "Wie geht's?"), ("", "Leer."), ("Bye.", "Tschüss.")]


PACK = {"gz": gzip.compress, "xz": lzma.compress, "bz2": bz2.compress}


def write(folder, **files):
    """Files by name, with __ for the dot; a name that ends as one of PACK is packed."""
    for name, content in files.items():
        content = content if isinstance(content, bytes) else content.encode()
        name = name.replace("__", ".")
        pack = PACK.get(name.rpartition(".")[2], bytes)
        (folder / name).write_bytes(pack(content))
    return f"text:{folder}"


@pytest.fixture(params=["plain", "gz", "xz", "bz2", "tsv", "tsv.gz"])
def corpus(request, tmp_path):
    """The same four pairs in every form."""
    table = "\n".join("\t".join(pair) for pair in PAIRS)
    return write(
        tmp_path,
        **{
            "plain": {"train__en": ENGLISH, "train__de": GERMAN + "\n"},
            "gz": {"train__en__gz": ENGLISH, "train__de__gz": GERMAN},
            "xz": {"train__en__xz": ENGLISH, "train__de__xz": GERMAN},
            "bz2": {"train__en__bz2": ENGLISH, "train__de": GERMAN},
            "tsv": {"train__tsv": table},
            "tsv.gz": {"train__tsv__gz": table + "\n"},
        }[request.param],
    )


def test_pairs_are_read_by_number_and_in_order(corpus):
    """And pickled without their content."""
    pairs = read_pairs(corpus, "train", "en-de")
    pickled = pickle.dumps(pairs)
    assert b"How are you" not in pickled
    for each in (pairs, pickle.loads(pickled)):
        assert len(each) == 4 and each.languages == ("en", "de")
        assert [each[i] for i in range(4)] == list(each) == PAIRS
    assert pairs[-1] == PAIRS[3]
    assert pairs[1:3] == PAIRS[1:3] and pairs[::-2] == PAIRS[::-2] and pairs[4:] == []
    for index in (4, -5):
        with pytest.raises(IndexError):
            pairs[index]


def test_the_first_language_is_the_source(tmp_path):
    corpus = write(tmp_path, train__en=ENGLISH, train__de=GERMAN, train__fr="a\nb\nc\nd")
    assert list(read_pairs(corpus, "train", "de-en")) == [(de, en) for en, de in PAIRS]
    assert read_pairs(corpus, "train", "fr-en")[0] == ("a", "Hello.")
    assert languages_of(corpus, "de-en") == ("de", "en")


def test_a_table_has_a_source_and_a_target_column(tmp_path):
    corpus = write(tmp_path, train__tsv="안녕\tHello\n", test__tsv="잘 가\tBye\r\n")
    assert languages_of(corpus) == ("source", "target")
    assert read_pairs(corpus, "train")[0] == ("안녕", "Hello")
    assert read_pairs(corpus, "test", "ko-en").languages == ("ko", "en")


def test_windows_line_ends_and_byte_order_marks_are_dropped(tmp_path):
    corpus = write(
        tmp_path, train__en=b"\xef\xbb\xbfone\r\ntwo\r\n", train__de="\ufeffeins\n\ufeffzwei\n"
    )
    assert list(read_pairs(corpus, "train", "en-de")) == [("one", "eins"), ("two", "\ufeffzwei")]


def test_empty_sides_are_kept_for_the_caller_to_count(tmp_path):
    pairs = read_pairs(write(tmp_path, train__en=ENGLISH, train__de=GERMAN), "train", "en-de")
    assert [is_empty(pair) for pair in pairs] == [False, False, True, False]
    assert is_empty(("a", "\u3000 \t"))
    assert list(read_pairs(write(tmp_path, dev__en="\n", dev__de="\n"), "dev", "en-de")) == [
        ("", "")
    ]


def test_a_file_of_more_than_one_portion_is_cut_at_every_line(tmp_path):
    """Line ends are looked for 16 MiB at a time."""
    lines = [f"{i} " + "x" * 1_000 for i in range(18_000)]
    text = "\n".join(lines)
    assert len(text) > 1 << 24
    pairs = read_pairs(write(tmp_path, train__en=text, train__de=text), "train", "en-de")
    assert len(pairs) == 18_000
    assert [source for source, _ in pairs] == lines


@pytest.mark.parametrize("name", ["val", "valid", "dev", "validation"])
def test_validation_goes_by_its_usual_names(tmp_path, name):
    corpus = write(tmp_path, **{f"{name}__en": ENGLISH, f"{name}__de": GERMAN, "train__en": "x"})
    for wanted in ("validation", "val"):
        assert list(read_pairs(corpus, wanted, "en-de")) == PAIRS


def test_test_finds_the_only_split_that_begins_so(tmp_path):
    corpus = write(tmp_path, test2016__en=ENGLISH, test2016__de=GERMAN)
    assert list(read_pairs(corpus, "test", "en-de")) == PAIRS
    write(tmp_path, test2017__en="a", test2017__de="b")
    with pytest.raises(
        ValueError, match="several splits for 'test': name one of test2016, test2017"
    ):
        read_pairs(corpus, "test", "en-de")
    assert read_pairs(corpus, "test2017", "en-de")[0] == ("a", "b")
    assert splits(corpus, "en-de") == ["test2016", "test2017"]


@pytest.mark.parametrize(
    "folder, split, languages, error",
    [
        ("", "test", "en-de", r"no split 'test'; it has train, val\."),
        ("", "train", "", "'train' in de, en.* Set data.languages, for example to de-en."),
        ("", "train", "en-ko", r"like train\.en and train\.ko.*train\.de, train\.en"),
        ("", "train", "en-de-fr", "'en-de-fr' may be en:de-fr or en-de:fr"),
        ("nowhere", "train", "en-de", "there is no folder .*nowhere"),
    ],
)
def test_text_that_is_not_there_is_an_error_that_lists_what_is(
    tmp_path, folder, split, languages, error
):
    write(tmp_path, train__en=ENGLISH, train__de=GERMAN, val__en="a", val__de="b")
    write(tmp_path, README__md="about", alone__en="no German")
    with pytest.raises(ValueError, match=error):
        read_pairs(f"text:{tmp_path / folder}", split, languages)


def test_other_files_beside_the_tables_of_a_corpus_are_no_languages(tmp_path):
    for name in ("train.tsv", "validation.tsv", "prepare.py", "prepare.sh"):
        (tmp_path / name).write_text("one\ttwo\n")
    corpus = f"text:{tmp_path}"
    assert languages_of(corpus) == ("source", "target") == read_pairs(corpus, "train").languages


@pytest.mark.parametrize("corpus", ["foo:bar", "cldr", "text:", ""])
def test_an_unknown_kind_is_an_error_that_names_the_three(corpus):
    with pytest.raises(ValueError, match="cldr:SOURCE-TARGET .* text:DIR or tfds:NAME/CONFIG"):
        read_pairs(corpus, "train")


def test_a_folder_without_its_kind_is_answered_with_the_name_that_reads_it(tmp_path, monkeypatch):
    (tmp_path / "text1").mkdir()
    monkeypatch.chdir(tmp_path)
    for corpus in ("text1", str(tmp_path / "text1")):
        with pytest.raises(ValueError, match=rf"got '{corpus}'\. Did you mean text:{corpus}\?$"):
            read_pairs(corpus, "train")
    with pytest.raises(ValueError, match=r"got 'text2'\.$"):
        read_pairs("text2", "train")


@pytest.mark.parametrize("line, tabs", [("no tab", 0), ("a\tb\tc", 2), ("", 0)])
def test_a_table_line_without_exactly_one_tab_is_an_error(tmp_path, line, tabs):
    pairs = read_pairs(write(tmp_path, train__tsv=f"a\tb\n{line}\nc\td\n"), "train")
    with pytest.raises(ValueError, match=rf"line 2: .* source, tab, target.* it has {tabs} tabs"):
        pairs[1]


def test_blank_lines_at_the_end_of_a_table_are_none(tmp_path):
    for end in ("\n", "\n\n", "\r\n\r\n", "\n \n"):
        pairs = read_pairs(write(tmp_path, train__tsv=f"a\tb\n\tc{end}"), "train")
        assert list(pairs) == [("a", "b"), ("", "c")]


def test_an_empty_split_is_an_error(tmp_path):
    corpus = write(
        tmp_path, train__en="", train__de="", test__tsv="", val__en__gz="", val__de__gz=""
    )
    for split in ("train", "test", "val"):
        with pytest.raises(ValueError, match=f"at least one pair; .*{split}.* is empty"):
            read_pairs(corpus, split, "en-de")


def test_what_is_there_twice_is_an_error(tmp_path):
    corpus = write(tmp_path, train__en=ENGLISH, train__en__gz=ENGLISH, train__de=GERMAN)
    with pytest.raises(ValueError, match=r"train\.en twice: train\.en, train\.en\.gz"):
        read_pairs(corpus, "train", "en-de")
    write(tmp_path, val__en="a", val__de="b", val__tsv="a\tb")
    with pytest.raises(ValueError, match="'val' twice: as .tsv"):
        read_pairs(corpus, "val", "en-de")


def test_a_zst_file_is_read_where_a_package_can(tmp_path, monkeypatch):
    zstd = pytest.importorskip("backports.zstd")
    corpus = write(tmp_path, train__en=ENGLISH, train__de__zst=zstd.compress(GERMAN.encode()))
    assert list(read_pairs(corpus, "train", "en-de")) == PAIRS
    for package in ("backports", "compression"):
        monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ValueError, match=r"train\.de\.zst needs Python 3\.14 or the package"):
        read_pairs(corpus, "train", "en-de")


@pytest.mark.parametrize(
    "ending, kind", [("gz", "gzip"), ("xz", "xz"), ("bz2", "bzip2"), ("zst", "Zstandard")]
)
def test_a_broken_compressed_file_is_an_error_that_names_it(tmp_path, ending, kind):
    pack = PACK.get(ending) or pytest.importorskip("backports.zstd").compress
    corpus, whole = write(tmp_path, train__de="x"), pack(ENGLISH.encode())
    altered = whole[:12] + b"\xff\xff" + whole[14:]
    if ending == "zst":  # which has no checksum by default
        altered = whole[:4]
    for broken in (b"no gzip", whole[: len(whole) // 2], altered):
        (tmp_path / f"train.en.{ending}").write_bytes(broken)
        with pytest.raises(ValueError, match=rf"train\.en\.{ending} must be a {kind} file"):
            read_pairs(corpus, "train", "en-de")


def test_a_file_that_becomes_much_larger_than_text_would_is_an_error(tmp_path, monkeypatch):
    monkeypatch.setattr(text_files, "SMALL", 1_000)
    corpus = write(tmp_path, train__en__xz=" " * 1_000_000, train__de="x")
    with pytest.raises(ValueError, match="more than 100 times as large"):
        read_pairs(corpus, "train", "en-de")


def test_a_fingerprint_changes_when_the_data_does(tmp_path):
    """And only then: not with the time of a file, nor with its folder."""
    corpus = write(tmp_path, train__en=ENGLISH, train__de=GERMAN, val__en="a", val__de="b")
    first = fingerprint(corpus, "train", "en-de")
    assert first == fingerprint(corpus, "train", "en-de") and len(first) == 16
    os.utime(tmp_path / "train.de", ns=(1, 1))
    (tmp_path / "copy").mkdir()
    copy = write(tmp_path / "copy", train__en=ENGLISH, train__de=GERMAN)
    assert first == fingerprint(corpus, "train", "en-de") == fingerprint(copy, "train", "en-de")
    prints = [
        first,
        fingerprint(corpus, "train", "de-en"),
        fingerprint(corpus, "val", "en-de"),
        fingerprint(write(tmp_path, train__en=ENGLISH + "!"), "train", "en-de"),
    ]
    assert len(set(prints)) == len(prints)


def test_the_cache_is_where_the_user_keeps_caches(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", "/xdg")
    assert cache_folder() == Path("/xdg/flaxformer_min")
    assert cache_folder(str(tmp_path)) == tmp_path
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")  # which XDG says to ignore
    monkeypatch.setenv("HOME", "/home/me")
    assert cache_folder() == Path("/home/me/.cache/flaxformer_min")
    assert cache_folder("~/data") == Path("/home/me/data")
    monkeypatch.delenv("HOME")
    monkeypatch.setattr(os, "getuid", lambda: 54321)
    with pytest.raises(ValueError, match="this user has no home. Set XDG_CACHE_HOME"):
        cache_folder()


def test_a_cache_that_others_can_write_is_refused_as_ssh_does(monkeypatch, tmp_path):
    """Also through a link, and in a folder above; /tmp with its sticky bit may be above."""
    (tmp_path / "shared" / "mine").mkdir(parents=True)
    (tmp_path / "link").symlink_to(tmp_path / "shared" / "mine")
    for name in ("shared", "shared/mine", "shared/mine/new", "link"):
        assert cache_folder(str(tmp_path / name)) == tmp_path / name
    (tmp_path / "shared").chmod(0o777)
    for name in ("shared", "shared/mine", "shared/mine/new", "link"):
        with pytest.raises(ValueError, match=r"others can write .*shared\."):
            cache_folder(str(tmp_path / name))
    (tmp_path / "shared").chmod(0o1777)
    assert cache_folder(str(tmp_path / "link")) == tmp_path / "link"
    with pytest.raises(ValueError, match=r"others can write .*shared\."):
        cache_folder(str(tmp_path / "shared"))
    if os.getuid() == 0:  # what belongs to root is safe for others, too
        os.chown(tmp_path / "shared" / "mine", 54321, -1)
    monkeypatch.setattr(os, "getuid", lambda: 12345)
    with pytest.raises(ValueError, match="only this user"):
        cache_folder(str(tmp_path / "link"))


# ----------------------------------------------------------------------------------------- tfds


@pytest.fixture(scope="module")
def prepared(tmp_path_factory):
    """A data_dir with sets that a builder of somebody else's prepared."""
    import tensorflow_datasets as tfds

    class Greetings(tfds.core.GeneratorBasedBuilder):
        """Four pairs, and a wrong order of features and languages."""

        VERSION = tfds.core.Version("1.2.0")
        BUILDER_CONFIGS = [
            tfds.core.BuilderConfig(name=name) for name in ("en-de", "de-en", "de-en-fr", "text")
        ]

        def _info(self):
            names = tuple(self.builder_config.name.split("-"))
            features = tfds.features.Translation(languages=names)
            if names == ("text",):
                features = tfds.features.FeaturesDict({"text": tfds.features.Text()})
            keys = names if len(names) == 2 else None
            return tfds.core.DatasetInfo(
                builder=self, features=features, supervised_keys=keys, disable_shuffling=True
            )

        def _split_generators(self, dl_manager):
            return {
                "train": self._generate_examples(PAIRS),
                "dev": self._generate_examples(PAIRS[3:]),
            }

        def _generate_examples(self, pairs):
            for index, (english, german) in enumerate(pairs):
                texts = {"en": english, "de": german, "fr": "oui", "text": ""}
                yield index, {name: texts[name] for name in self.info.features}

    folder = tmp_path_factory.mktemp("tfds")
    for config in Greetings.BUILDER_CONFIGS:
        Greetings(
            config=config.name, data_dir=folder, file_format="array_record"
        ).download_and_prepare()
    return str(folder)


def test_a_prepared_set_is_read_in_its_own_direction(prepared):
    forth = read_pairs("tfds:greetings/en-de", "train", cache_dir=prepared)
    back = read_pairs("tfds:greetings/de-en", "train", cache_dir=prepared)
    assert forth.languages == ("en", "de") and list(forth) == PAIRS
    assert back.languages == ("de", "en") and list(back) == [(de, en) for en, de in PAIRS]
    assert forth[1] == forth[-3] == PAIRS[1] and forth[1:3] == PAIRS[1:3] and forth[9:] == []
    assert list(pickle.loads(pickle.dumps(forth))) == PAIRS


def test_languages_override_the_direction_of_a_set(prepared):
    pairs = read_pairs("tfds:greetings/en-de", "train", "de-en", prepared)
    assert list(pairs) == [(de, en) for en, de in PAIRS]
    pairs = read_pairs("tfds:greetings/de-en-fr", "validation", "fr-de", prepared)
    assert list(pairs) == [("oui", "Tschüss.")]


@pytest.mark.parametrize("ending", ["", ".gz"])
def test_a_fingerprint_is_of_the_text_that_is_read(tmp_path, ending):
    """Not of a file that has replaced it since."""
    pack = gzip.compress if ending else bytes
    for language in ("en", "de"):
        (tmp_path / f"train.{language}{ending}").write_bytes(pack(b"old\n"))
    pairs = read_pairs(f"text:{tmp_path}", "train", "en-de")
    before = fingerprint(f"text:{tmp_path}", "train", "en-de")
    for language in ("en", "de"):
        (tmp_path / "new").write_bytes(pack(b"newer\n"))
        os.replace(tmp_path / "new", tmp_path / f"train.{language}{ending}")
    assert pairs[0] == ("old", "old")
    assert pairs.fingerprint() == before
    assert fingerprint(f"text:{tmp_path}", "train", "en-de") != before


def test_fingerprints_of_sets_tell_name_and_direction(prepared):
    found = {
        fingerprint(*arguments, cache_dir=prepared)
        for arguments in (
            ("tfds:greetings/en-de", "train"),
            ("tfds:greetings/de-en", "train"),
            ("tfds:greetings/en-de", "train", "de-en"),
            ("tfds:greetings/en-de", "validation"),
        )
    }
    assert len(found) == 4


@pytest.mark.parametrize(
    "corpus, split, languages, message",
    [
        ("greetings/en-de", "test", "", "no split 'test'; it has dev, train"),
        ("greetings/en-de", "train", "en-fr", "has no language 'fr'; it has de, en"),
        ("greetings/de-en-fr", "train", "", "has de, en, fr: set data.languages to two of them"),
        ("greetings/text", "train", "", r"features of a translation.* FeaturesDict\(text\)"),
        ("greetings/none", "train", "", "tfds:greetings/none cannot be opened"),
        ("no_such_set", "train", "", "there is no 'no_such_set'"),
    ],
)
def test_what_a_set_does_not_have_is_an_error(prepared, corpus, split, languages, message):
    with pytest.raises(ValueError, match=message):
        read_pairs(f"tfds:{corpus}", split, languages, prepared)


def test_a_set_is_found_without_its_class_and_refused_in_another_format(prepared, tmp_path):
    folder = shutil.copytree(prepared, tmp_path / "sets") / "greetings" / "en-de" / "1.2.0"
    info = json.loads((folder / "dataset_info.json").read_text())
    (folder / "dataset_info.json").write_text(json.dumps(info | {"fileFormat": "tfrecord"}))
    there = str(tmp_path / "sets")
    with pytest.raises(ValueError, match="must be prepared as array_record.* data.cache_dir"):
        read_pairs("tfds:greetings/en-de", "train", "", there)
    # Where its class is not at hand, tfds finds that out in another place.
    program = (
        "from flaxformer_min.data.corpora import read_pairs; import sys;"
        f"print(read_pairs('tfds:greetings/en-de', 'train', '', {prepared!r})[0],"
        "'tensorflow' in sys.modules);"
        f"read_pairs('tfds:greetings/en-de', 'train', '', {there!r})"
    )
    output = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert output.stdout == "('Hello.', 'Hallo.') False\n", output.stderr
    assert "must be prepared as array_record" in output.stderr


def test_a_set_that_is_not_prepared_is_an_error_with_the_command_that_prepares_it(tmp_path):
    with pytest.raises(ValueError) as error:
        read_pairs("tfds:wmt14_translate/de-en", "train", cache_dir=str(tmp_path))
    assert "flaxformer-min train --data.download" in str(error.value)
    code = str(error.value).partition('python -c "')[2].rstrip('"')
    compile(code, "the command", "exec")
    assert f"'tfds:wmt14_translate/de-en', 'train', 'de-en', '{tmp_path}', True" in code


def test_a_failed_download_is_an_error_in_words(tmp_path, monkeypatch):
    import tensorflow_datasets as tfds

    def fail(self):
        raise ConnectionError("Name or service not known\nand forty lines more")

    monkeypatch.setattr(tfds.core.DatasetBuilder, "download_and_prepare", fail)
    with pytest.raises(ValueError) as error:
        read_pairs("tfds:wmt14_translate/de-en", "train", "", str(tmp_path), download=True)
    assert "could not be downloaded and prepared" in str(error.value)
    assert "ConnectionError: Name or service not known" in str(error.value)
    assert "forty" not in str(error.value)


# ----------------------------------------------------------------------------------------- cldr


@pytest.fixture
def small(monkeypatch):
    from flaxformer_min.data.corpora import cldr

    monkeypatch.setattr(cldr, "SIZES", {"test": 30, "validation": 20, "train": 500})


def test_the_embedded_phrases_are_made_for_the_direction_that_is_wanted(small, tmp_path):
    pairs = read_pairs("cldr:en-ko", "test", "ko-en", str(tmp_path))
    assert pairs.languages == ("ko", "en")
    assert list(pairs) == list(read_pairs("cldr:ko-en", "test", cache_dir=str(tmp_path)))


@pytest.mark.parametrize(
    "name, damage",
    [
        ("*array_record*", lambda file: file.write_bytes(b"{")),
        ("dataset_info.json", lambda file: file.write_bytes(b"{")),
        ("dataset_info.json", Path.unlink),
    ],
)
def test_damaged_phrases_in_the_cache_are_made_again(small, tmp_path, name, damage):
    """array_record and protobuf raise errors of their own."""
    whole = list(read_pairs("cldr:en-ko", "test", cache_dir=str(tmp_path)))
    for file in tmp_path.rglob(name):
        damage(file)
    assert list(read_pairs("cldr:en-ko", "test", cache_dir=str(tmp_path))) == whole


@pytest.mark.parametrize(
    "corpus, languages, message",
    [
        ("cldr:en", "", "got 'en'"),
        ("cldr:en-en", "", "two different languages"),
        ("cldr:en-klingon", "", "two locales of the Unicode CLDR.*got 'klingon'"),
        ("cldr:pt_BX-en", "", "'pt_BX'.*pt_BR"),
        ("cldr:en-ko", "en-de", "cldr:en-ko is in en, ko; got languages 'en-de'"),
    ],
)
def test_locales_that_make_no_corpus_are_an_error(corpus, languages, message):
    with pytest.raises(ValueError, match=message):
        read_pairs(corpus, "train", languages)


def test_an_unknown_split_of_the_phrases_is_an_error_before_they_are_made(tmp_path):
    with pytest.raises(
        ValueError, match="cldr:en-ko has no split 'trian'; it has test, train, val"
    ):
        read_pairs("cldr:en-ko", "trian", cache_dir=str(tmp_path))
    assert os.listdir(tmp_path) == []
