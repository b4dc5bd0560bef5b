"""Text corpora: a folder of line-aligned or tab-separated files."""

import functools
import hashlib
import mmap
import os
from pathlib import Path

import numpy as np

from flaxformer_min.data.corpora.pairs import Pair, Pairs, find_split, list_names
from flaxformer_min.languages import join_languages, parse_languages
from flaxformer_min.system.text_files import (
    COMPRESSIONS,
    SAMPLE,
    check_is_text,
    decode_line,
    decompress,
)


class TextCorpus:
    """A folder of line-aligned files: SPLIT.LANGUAGE, or SPLIT.tsv; each may be compressed."""

    def __init__(self, folder: Path, languages: str):
        """List the files of the folder; `languages` may be empty."""
        if not folder.is_dir():
            raise ValueError(f"text:DIR must name a folder; there is no folder {folder}.")
        self.folder = folder
        self.files: dict[str, dict[str, list[Path]]] = {}
        for path in sorted(folder.iterdir()):
            split, dot, ending = _decompressed_name(path).rpartition(".")
            if split and path.is_file():
                self.files.setdefault(split, {}).setdefault(ending, []).append(path)

        endings = {ending for split in self.files.values() for ending in split}
        self.wanted = parse_languages(languages, endings - {"tsv"}) if languages else None

    def splits(self) -> list[str]:
        """Return the names of the splits, sorted."""
        return sorted(
            split
            for split, endings in self.files.items()
            if "tsv" in endings
            or (len(endings) > 1 if self.wanted is None else set(self.wanted) <= set(endings))
        )

    @property
    def languages(self) -> tuple[str, str]:
        """Source and target language of the training split, or of the first if there is none."""
        names = self.splits()
        if not names:
            raise ValueError(self._no_splits())
        return self._languages_of("train" if "train" in names else names[0])

    def pairs(self, split: str) -> Pairs:
        """Return the sentence pairs of a split."""
        names = self.splits()
        if not names:
            raise ValueError(self._no_splits())
        name = find_split(split, names, str(self.folder))
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
        example = join_languages(*sorted(endings)[:2])
        raise ValueError(
            f"{self.folder} holds {split!r} in {list_names(endings)}, and the source is ambiguous. "
            f"Set data.languages, for example to {example}."
        )

    def _no_splits(self) -> str:
        names = [path.name for path in sorted(self.folder.iterdir())]
        files = ", ".join(names[:12]) + (", ..." if len(names) > 12 else "")
        source, target = self.wanted or ("en", "de")
        return (
            f"A text corpus needs files like train.{source} and train.{target}, or train.tsv (also "
            f".gz, .xz, .bz2 and .zst); {self.folder} holds {files or 'nothing'}."
        )

    def _only(self, split: str, ending: str) -> Path:
        paths = self.files[split][ending]
        if len(paths) > 1:
            names = list_names(path.name for path in paths)
            raise ValueError(f"{self.folder} holds {split}.{ending} twice: {names}. Move one away.")
        return paths[0]


def _decompressed_name(path: Path) -> str:
    return path.stem if path.suffix in COMPRESSIONS else path.name


class _Lines:
    r"""The lines of a file, with random access.

    Only \n ends a line; a \r before it and a BOM are dropped. A plain file is memory-mapped, a
    compressed one is decompressed into memory.
    """

    def __init__(self, path: Path):
        self.path = path
        self._load()

    def _load(self) -> None:
        with self.path.open("rb") as file:
            # Of the open file: the path may name a file that has replaced this one.
            status = os.fstat(file.fileno())
            content = decompress(file, self.path, status.st_size)
            if content is not None:
                self.content = content
            elif status.st_size:
                self.content = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
            else:  # an empty file cannot be mapped
                self.content = b""
        check_is_text(self.content[:SAMPLE], str(self.path), corpus=True)
        size, portion = len(self.content), 1 << 24  # portions bound the memory of the comparison
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
        try:
            return decode_line(self.content[start : int(self.ends[index])], first=not index)
        except UnicodeDecodeError as error:
            raise ValueError(
                f"{self.path}, line {index + 1}: text must be UTF-8; {error.reason} at byte "
                f"{error.start + 1} of the line. Convert the file, for example with iconv."
            ) from error

    @functools.cached_property
    def digest(self) -> str:
        """Digest of the content, because a change may leave size and time of a file unchanged."""
        return hashlib.sha256(self.content).hexdigest()

    def __getstate__(self) -> dict:
        return {"path": self.path}

    def __setstate__(self, state: dict) -> None:
        self.__init__(state["path"])


class _PairOfFiles(Pairs):
    """Pairs of line i of one file and line i of the other."""

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
        return [list(self.languages), *(side.digest for side in self.sides)]

    def _read(self, indices: range) -> list[Pair]:
        source, target = self.sides
        return [(source.read(i), target.read(i)) for i in indices]


class _TableOfPairs(Pairs):
    """Pairs of one file: each line is source, tab, target."""

    def __init__(self, path: Path, languages: tuple[str, str]):
        self.languages = languages
        self.lines = _Lines(path)
        self.count = len(self.lines)
        while self.count and not self.lines.read(self.count - 1).strip(" "):
            self.count -= 1  # blank lines at the end are none
        if not self.count:
            raise ValueError(f"A split must hold at least one pair; {path} is empty.")

    def __len__(self) -> int:
        return self.count

    def identity(self) -> list:
        return [list(self.languages), self.lines.digest]

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
