"""Sentence pairs by number, wherever they lie: `read_pairs(corpus, split)[i] -> (source, target)`.

A corpus is named by a kind and a place:

| corpus                       | is                                                             |
|------------------------------|----------------------------------------------------------------|
| `cldr:en-ko`                 | embedded phrases in any two CLDR locales, made on first use    |
| `text:DIR`                   | `DIR/train.en`, `DIR/train.de`, ..., or `DIR/train.tsv`; `.gz` |
| `tfds:wmt14_translate/de-en` | any translation set of tensorflow_datasets                     |

Pairs are read where they lie, so a corpus may be larger than memory (gzip files excepted), and a
pickled `Pairs` holds names of files, not their content. What comes out is what is in the corpus:
empty sides too (see `is_empty`), for the caller to skip and count.
"""

import abc
import gzip
import hashlib
import json
import mmap
import os
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, overload

import numpy as np

Pair = tuple[str, str]
VALIDATION_NAMES = ("validation", "val", "valid", "dev")


def read_pairs(
    corpus: str, split: str, languages: str = "", cache_dir: str = "", download: bool = False
) -> "Pairs":
    """The sentence pairs of one split.

    corpus:    `cldr:SOURCE-TARGET`, `text:DIR` or `tfds:NAME/CONFIG`, see above.
    split:     `train`, `validation` (also found as val, valid or dev) or `test` (also the only one
               whose name begins so, such as test2016), or any other name of `splits(corpus)`.
    languages: `en-de`, source first. Empty: as the corpus names them; text files have to be told.
    cache_dir: where prepared sets are kept, laid out as tfds does: NAME/CONFIG/VERSION. Empty: sets
               of tfds in its own folder (TFDS_DATA_DIR or ~/tensorflow_datasets), the embedded
               phrases in `cache_folder()`.
    download:  let tfds download and prepare a set that is not prepared.

    Raises ValueError, saying what there is instead, for whatever cannot be read. A line that is not
    UTF-8, or of a .tsv not two columns, is found when it is read.
    """
    return _open(corpus, languages, cache_dir, download).pairs(split)


def splits(
    corpus: str, languages: str = "", cache_dir: str = "", download: bool = False
) -> list[str]:
    """The names of the splits there are, sorted. Arguments and errors as for `read_pairs`."""
    return _open(corpus, languages, cache_dir, download).splits()


def languages_of(
    corpus: str, languages: str = "", cache_dir: str = "", download: bool = False
) -> tuple[str, str]:
    """Source and target language. Arguments and errors as for `read_pairs`.

    >>> languages_of("cldr:en-ko")
    ('en', 'ko')
    """
    return _open(corpus, languages, cache_dir, download).languages


def cache_folder(cache_dir: str = "") -> Path:
    """Where prepared data is kept: `cache_dir`, or `flaxformer_min` in the user's cache folder.

    >>> cache_folder("/data/cache").as_posix()
    '/data/cache'
    """
    if cache_dir:
        return Path(cache_dir).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "flaxformer_min"


def is_empty(pair: Pair) -> bool:
    r"""Whether a side says nothing, so that there is nothing to learn from the pair.

    >>> is_empty(("Hello.", " ")), is_empty(("Hello.", "Hallo."))
    (True, False)
    """
    return not all(side.strip() for side in pair)


class Pairs(Sequence[Pair], abc.ABC):
    """Sentence pairs of one split: `len`, `[i]`, `[i:j]` (a list) and a fast iteration.

    It can be pickled, and then holds where the data is, not the data.
    """

    languages: tuple[str, str]

    @abc.abstractmethod
    def __len__(self) -> int:
        """How many pairs there are."""

    @abc.abstractmethod
    def identity(self) -> list:
        """What tells this data from other data, as JSON can hold it."""

    def fingerprint(self) -> str:
        """Sixteen hex digits that change when the pairs do: a key for what is computed from them.

        Files are known by path, size and time, prepared sets by name and version.
        """
        return hashlib.sha256(json.dumps(self.identity()).encode()).hexdigest()[:16]

    @abc.abstractmethod
    def _read(self, indices: range) -> list[Pair]:
        """The pairs of these numbers, all of which exist."""

    @overload
    def __getitem__(self, index: int) -> Pair: ...
    @overload
    def __getitem__(self, index: slice) -> list[Pair]: ...
    def __getitem__(self, index):
        """A pair, or the list of pairs of a slice; IndexError where there is none."""
        if isinstance(index, slice):
            return self._read(range(*index.indices(len(self))))
        place = range(len(self))[index]
        return self._read(range(place, place + 1))[0]

    def __iter__(self) -> Iterator[Pair]:
        """All pairs in order, read in portions, which is faster than one by one."""
        for start in range(0, len(self), 16_384):
            yield from self[start : start + 16_384]


def _open(corpus: str, languages: str, cache_dir: str, download: bool) -> Any:
    kind, colon, place = corpus.partition(":")
    if kind not in ("cldr", "text", "tfds") or not place:
        raise ValueError(
            "A corpus must be cldr:SOURCE-TARGET (as cldr:en-ko), text:DIR or tfds:NAME/CONFIG (as "
            f"tfds:wmt14_translate/de-en); got {corpus!r}."
        )
    wanted = _two_languages(languages) if languages else None
    if kind == "text":
        return _TextCorpus(Path(place).expanduser(), wanted)
    if kind == "cldr":
        return _CldrCorpus(place, wanted, cache_dir)
    return _tfds_corpus(place, wanted, cache_dir, download)


def _two_languages(text: str) -> tuple[str, str]:
    parts = text.split("-")
    if len(parts) != 2 or not all(parts) or parts[0] == parts[1]:
        raise ValueError(
            "Languages must be two different ones, the source first, joined by one hyphen, as in "
            f"en-de; got {text!r}."
        )
    return parts[0], parts[1]


def _find_split(wanted: str, known: list[str], where: str) -> str:
    """The split of that name, or the only one that goes by a usual other name for it."""
    if wanted in known:
        return wanted
    if wanted in VALIDATION_NAMES:
        found = [name for name in known if name in VALIDATION_NAMES]
    else:
        found = [name for name in known if wanted == "test" and name.startswith("test")]
    if len(found) > 1:
        raise ValueError(f"{where} has several splits for {wanted!r}: name one of {_list(found)}.")
    if not found:
        raise ValueError(f"{where} has no split {wanted!r}; it has {_list(known) or 'none'}.")
    return found[0]


def _list(names) -> str:
    return ", ".join(sorted(names))


# ----------------------------------------------------------------------------------- text files


class _TextCorpus:
    """A folder of line-aligned files: SPLIT.LANGUAGE, or SPLIT.tsv; each may end in .gz."""

    def __init__(self, folder: Path, languages: tuple[str, str] | None):
        if not folder.is_dir():
            raise ValueError(f"text:DIR must name a folder; there is no folder {folder}.")
        self.folder, self.wanted = folder, languages
        self.files: dict[str, dict[str, list[Path]]] = {}
        for path in sorted(folder.iterdir()):
            split, dot, ending = path.name.removesuffix(".gz").rpartition(".")
            if split and path.is_file():
                self.files.setdefault(split, {}).setdefault(ending, []).append(path)

    def splits(self) -> list[str]:
        return sorted(
            split
            for split, endings in self.files.items()
            if "tsv" in endings
            or (len(endings) > 1 if self.wanted is None else set(self.wanted) <= set(endings))
        )

    @property
    def languages(self) -> tuple[str, str]:
        names = self.splits()
        if not names:
            raise ValueError(self._nothing_here())
        return self._languages_of(names[0])

    def pairs(self, split: str) -> Pairs:
        names = self.splits()
        if not names:
            raise ValueError(self._nothing_here())
        name = _find_split(split, names, str(self.folder))
        languages, endings = self._languages_of(name), self.files[name]
        if "tsv" in endings:
            if self.wanted and set(self.wanted) <= set(endings):
                raise ValueError(
                    f"{self.folder} holds {name!r} twice: as .tsv and as one file a language. "
                    "Move one of them away."
                )
            return _TableOfPairs(self._only(name, "tsv"), languages)
        return _PairOfFiles([self._only(name, ending) for ending in languages], languages)

    def _languages_of(self, split: str) -> tuple[str, str]:
        endings = self.files[split]
        if self.wanted or "tsv" in endings:
            return self.wanted or ("source", "target")
        example = "-".join(sorted(endings)[:2])
        raise ValueError(
            f"{self.folder} holds {split!r} in {_list(endings)}; which is the source is not to be "
            f"guessed. Set data.languages, for example to {example}."
        )

    def _nothing_here(self) -> str:
        names = [path.name for path in sorted(self.folder.iterdir())]
        files = ", ".join(names[:12]) + (", ..." if len(names) > 12 else "")
        source, target = self.wanted or ("en", "de")
        return (
            f"A text corpus needs files like train.{source} and train.{target}, or train.tsv (also "
            f".gz); {self.folder} holds {files or 'nothing'}."
        )

    def _only(self, split: str, ending: str) -> Path:
        paths = self.files[split][ending]
        if len(paths) > 1:
            raise ValueError(
                f"{self.folder} holds {split}.{ending} twice, plain and as .gz. Move one away."
            )
        return paths[0]


class _Lines:
    r"""The lines of a file, by number. Only \n ends a line; a \r before it and a BOM are dropped.

    Nothing of a plain file is kept in memory but where its lines begin; a gzip file is unpacked.
    """

    def __init__(self, path: Path):
        self.path = path
        self._load()

    def _load(self) -> None:
        with self.path.open("rb") as file:
            # Of what is read here, or another text that takes its place would be known by it.
            self.status = os.fstat(file.fileno())
            if self.path.suffix == ".gz":
                try:
                    self.content = gzip.decompress(file.read())
                except (OSError, EOFError, zlib.error) as error:
                    raise ValueError(f"{self.path} must be a gzip file; {error}.") from error
            elif self.status.st_size:
                self.content = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
            else:  # nothing cannot be mapped
                self.content = b""
        size, portion = len(self.content), 1 << 24  # portions: a comparison takes memory of its own
        ends = [
            start + np.flatnonzero(np.frombuffer(self.content[start : start + portion], "u1") == 10)
            for start in range(0, size, portion)
        ]
        if size and self.content[size - 1] != ord("\n"):
            ends.append(np.array([size]))
        self.ends = np.concatenate([np.zeros(0, np.int64), *ends])

    def __len__(self) -> int:
        return len(self.ends)

    def read(self, index: int) -> str:
        start = int(self.ends[index - 1]) + 1 if index else 0
        line = self.content[start : int(self.ends[index])]
        if not index:
            line = line.removeprefix(b"\xef\xbb\xbf")
        try:
            return line.removesuffix(b"\r").decode()
        except UnicodeDecodeError as error:
            raise ValueError(
                f"{self.path}, line {index + 1}: text must be UTF-8; {error.reason} at byte "
                f"{error.start + 1} of the line. Convert the file, for example with iconv."
            ) from error

    def identity(self) -> list:
        return [str(self.path.resolve()), self.status.st_size, self.status.st_mtime_ns]

    def __getstate__(self) -> dict:
        return {"path": self.path}

    def __setstate__(self, state: dict) -> None:
        self.__init__(state["path"])


class _PairOfFiles(Pairs):
    """Line i of one file and line i of the other."""

    def __init__(self, paths: list[Path], languages: tuple[str, str]):
        self.languages = languages
        self.sides = [_Lines(path) for path in paths]
        counts = [len(side) for side in self.sides]
        if counts[0] != counts[1]:
            raise ValueError(
                f"Both sides must have the same number of lines, line i translating line i; "
                f"{paths[0]} has {counts[0]}, {paths[1]} has {counts[1]}."
            )
        if not counts[0]:
            raise ValueError(f"A split must hold at least one pair; {paths[0]} is empty.")

    def __len__(self) -> int:
        return len(self.sides[0])

    def identity(self) -> list:
        return [list(self.languages), *(side.identity() for side in self.sides)]

    def _read(self, indices: range) -> list[Pair]:
        source, target = self.sides
        return [(source.read(i), target.read(i)) for i in indices]


class _TableOfPairs(Pairs):
    """A line of one file: the source, a tab, the target."""

    def __init__(self, path: Path, languages: tuple[str, str]):
        self.languages = languages
        self.lines = _Lines(path)
        if not len(self.lines):
            raise ValueError(f"A split must hold at least one pair; {path} is empty.")

    def __len__(self) -> int:
        return len(self.lines)

    def identity(self) -> list:
        return [list(self.languages), self.lines.identity()]

    def _read(self, indices: range) -> list[Pair]:
        return [self._columns(i) for i in indices]

    def _columns(self, index: int) -> Pair:
        columns = self.lines.read(index).split("\t")
        if len(columns) != 2:
            raise ValueError(
                f"{self.lines.path}, line {index + 1}: a line must be source, tab, target; it has "
                f"{len(columns) - 1} tabs."
            )
        return columns[0], columns[1]


# ----------------------------------------------------------------------------------------- tfds


class _TfdsCorpus:
    """A prepared data set of tensorflow_datasets and the direction to read it in."""

    def __init__(self, builder: Any, languages: tuple[str, str]):
        self.builder, self.languages = builder, languages

    def splits(self) -> list[str]:
        return sorted(self.builder.info.splits)

    def pairs(self, split: str) -> Pairs:
        name = _find_split(split, self.splits(), self.builder.info.full_name)
        return _RecordPairs(self.builder, name, self.languages)


class _RecordPairs(Pairs):
    """Records of an array_record file, each a tf.train.Example with one text for each language.

    They are parsed here: tfds decodes the features of 20,000 records a second, this 80,000.
    """

    def __init__(self, builder: Any, split: str, languages: tuple[str, str]):
        import tensorflow_datasets as tfds

        self.languages = languages
        info = builder.info
        self._identity = [info.full_name, split, info.splits[split].num_examples, list(languages)]
        source = builder.as_data_source(
            split, deserialize_method=tfds.decode.DeserializeMethod.RAW_BYTES
        )
        self.records = source.data_source  # without the builder, which is slow to pickle

    def __len__(self) -> int:
        return len(self.records)

    def identity(self) -> list:
        return self._identity

    def _read(self, indices: range) -> list[Pair]:
        from tensorflow_datasets.proto.tf_example_generated_pb2 import Example

        if len(indices) == 1:
            records = [self.records[indices[0]]]  # a list of one takes four times as long
        else:
            records = self.records.__getitems__(list(indices)) if indices else []
        pairs = []
        for record in records:
            features = Example.FromString(record).features.feature
            source, target = (features[name].bytes_list.value[0] for name in self.languages)
            pairs.append((source.decode(), target.decode()))
        return pairs


class _CldrCorpus:
    """The embedded phrases in two locales; they are prepared when pairs are wanted."""

    def __init__(self, place: str, wanted: tuple[str, str] | None, cache_dir: str):
        from flaxformer_min.data import cldr

        languages = _two_languages(place)
        if wanted and set(wanted) != set(languages):
            raise ValueError(
                f"cldr:{place} is in {_list(languages)}; got languages {'-'.join(wanted)!r}. Write "
                f"cldr:{'-'.join(wanted)}, and leave data.languages empty."
            )
        # Never a set read backwards: a text has one translation in the direction it was made for.
        self.languages = wanted or languages
        cldr.CldrConfig(*self.languages)  # there are such locales
        self.cache = cache_folder(cache_dir)

    def splits(self) -> list[str]:
        from flaxformer_min.data import cldr

        return sorted(cldr.SIZES)

    def pairs(self, split: str) -> Pairs:
        from flaxformer_min.data import cldr

        name = _find_split(split, self.splits(), f"cldr:{'-'.join(self.languages)}")
        return _RecordPairs(cldr.prepare(*self.languages, self.cache), name, self.languages)


def _tfds_corpus(
    place: str, wanted: tuple[str, str] | None, cache_dir: str, download: bool
) -> _TfdsCorpus:
    builder = _tfds_builder(place, cache_dir)
    known = _translation_languages(builder, place)
    languages = wanted or _order(builder, known)
    missing = [language for language in languages if language not in known]
    if missing:
        raise ValueError(f"tfds:{place} has no language {missing[0]!r}; it has {_list(known)}.")
    if not builder.is_prepared():
        if not download:
            raise ValueError(_how_to_prepare(place, languages, cache_dir, builder))
        _download(builder, place)
    return _TfdsCorpus(builder, languages)


def _tfds_builder(place: str, cache_dir: str) -> Any:
    import tensorflow_datasets as tfds
    import tensorflow_datasets.translate  # noqa: F401 (the WMT sets are registered by this alone)

    data_dir = str(Path(cache_dir).expanduser()) if cache_dir else None
    try:
        return tfds.builder(place, data_dir=data_dir, file_format="array_record")
    except tfds.core.registered.DatasetNotFoundError as error:
        raise ValueError(
            f"tfds:NAME must be a data set of tensorflow_datasets, or one prepared in "
            f"data.cache_dir; there is no {place!r}."
        ) from error
    except (ValueError, AssertionError, TypeError) as error:
        if "file format" in str(error).lower():
            raise ValueError(
                f"tfds:{place} must be prepared as array_record, the format that tfds reads at "
                f"random without TensorFlow; it lies in {data_dir or 'the folder of tfds'} in "
                "another one. Choose another data.cache_dir, and prepare it there with "
                "data.download."
            ) from error
        # An unknown config or version, above all.
        raise ValueError(f"tfds:{place} cannot be opened; {_first_line(error)}") from error


def _translation_languages(builder: Any, place: str) -> tuple[str, ...]:
    import tensorflow_datasets as tfds

    features = builder.info.features
    if not isinstance(features, tfds.features.Translation):
        raise ValueError(
            f"A tfds corpus must have the features of a translation, one text for each language; "
            f"tfds:{place} has {type(features).__name__}({_list(features or ())}). Write what you "
            "need of it into text files, and name them with text:DIR."
        )
    return tuple(features.languages)


def _order(builder: Any, languages: tuple[str, ...]) -> tuple[str, str]:
    """Source and target as the set declares them: of de-en, de is the source."""
    supervised = builder.info.supervised_keys
    if supervised and len(supervised) == 2 and set(supervised) <= set(languages):
        return supervised
    if len(languages) == 2:
        return languages[0], languages[1]
    raise ValueError(
        f"{builder.info.full_name} has {_list(languages)}: set data.languages to two of them, the "
        "source first, joined by one hyphen."
    )


def _how_to_prepare(place: str, languages: tuple[str, str], cache_dir: str, builder: Any) -> str:
    arguments = f"'tfds:{place}', 'train', '{'-'.join(languages)}', '{cache_dir}', True"
    return (
        f"tfds:{place} must be prepared before it is read; it is not there in {builder.data_dir}. "
        "Download and prepare it by setting data.download (train.py --data.download), or with\n"
        f'python -c "from flaxformer_min.data.corpus import read_pairs; read_pairs({arguments})"'
    )


def _download(builder: Any, place: str) -> None:
    try:
        builder.download_and_prepare()
    except Exception as error:
        # Servers, sockets, checksums, disks and the set's own code: every way to fail is tfds's.
        raise ValueError(
            f"tfds:{place} could not be downloaded and prepared in {builder.data_dir}; "
            f"{type(error).__name__}: {_first_line(error)} Check the network and the disk, and try "
            "again; what was downloaded is kept."
        ) from error


def _first_line(error: Exception) -> str:
    return (str(error).strip() or "no reason given").splitlines()[0]
