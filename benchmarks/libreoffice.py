"""Parallel text of LibreOffice's help, which Debian packages in some thirty languages.

    apt-get download libreoffice-help-en-us libreoffice-help-ko
    for name in en-us ko; do dpkg-deb -x libreoffice-help-${name}_*.deb help-$name; done
    python benchmarks/libreoffice.py help-en-us help-ko data/libreoffice_en_ko --train

The first folder is the source's, the second the target's. Paragraphs are aligned by page and id.
Every page belongs to one split (of 100 pages, about 3 are for validation and 5 for the test), and
no source or target of these two is in the training text, also in another case. Left out and
counted: paragraphs of one side only, untranslated ones, and repeated pairs. Without --train only
the text is written. Options after --train are passed to train.py with
configs/libreoffice_en_ko.py. The same command continues a training that was stopped.
"""

import argparse
import collections
import subprocess
import sys
import zlib
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path

from flaxformer_min.languages import join_languages
from flaxformer_min.system.files import write_atomically

ROOT = Path(__file__).parents[1]
PARAGRAPHS = ("p", "h1", "h2", "h3", "h4", "h5", "h6")


class _Page(HTMLParser):
    """Collects the text of each paragraph of a page by its id."""

    def __init__(self, page: str):
        super().__init__()
        self.texts: dict[str, str] = {}
        self.open, self.hidden = "", 0  # the paragraph; open tags of a part for another system
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = dict(attrs)
        name = found.get("id") or ""
        if tag in PARAGRAPHS and name.startswith(("par_", "hd_")) and name not in self.texts:
            self.open, self.hidden, self.texts[name] = name, 0, ""
        elif tag == "span" and (self.hidden or found.get("class") == "MAC"):
            self.hidden += 1  # as "Command", before "Ctrl" for all other systems

    def handle_endtag(self, tag: str) -> None:
        if tag in PARAGRAPHS:
            self.open = ""
        elif tag == "span" and self.hidden:
            self.hidden -= 1

    def handle_data(self, data: str) -> None:
        if self.open and not self.hidden:
            self.texts[self.open] += data


def find_help(folder: Path) -> Path:
    """Return the folder of the pages in an unpacked package."""
    found = [
        path for path in folder.glob("usr/share/libreoffice/help/*") if (path / "text").is_dir()
    ]
    if len(found) != 1:
        raise ValueError(
            f"{folder} must hold one unpacked package libreoffice-help-LANG; it has "
            f"{len(found)} folders usr/share/libreoffice/help/LANG/text. Unpack one: dpkg-deb -x "
            "PACKAGE.deb FOLDER."
        )
    return found[0]


def language_of(folder: Path) -> str:
    """Return the language of the pages in a folder of that name; American English is en."""
    return "en" if folder.name == "en-US" else folder.name


def split_of(page: str) -> str:
    """Return the split of a page, which depends on nothing but its name."""
    share = zlib.crc32(page.encode()) % 100
    return "val" if share < 3 else "test" if share < 8 else "train"


def read_pairs(source: Path, target: Path, count: collections.Counter) -> Iterator[tuple]:
    """Yield page, source and target of each translated paragraph; count the others."""
    for path in sorted(source.rglob("text/**/*.html")):
        page = path.relative_to(source)
        sides = [
            _Page(file.read_text(encoding="utf-8")).texts if file.is_file() else {}
            for file in (path, target / page)
        ]
        for name in sides[0]:
            texts = [" ".join(side.get(name, "").split()) for side in sides]
            if not all(texts):
                count["on one side only"] += 1
            elif texts[0].replace(" ", "") == texts[1].replace(" ", ""):
                count["not translated"] += 1
            else:
                yield str(page), *texts


def make_corpus(source: Path, target: Path, folder: Path) -> collections.Counter:
    """Write SPLIT.LANGUAGE of both languages and all splits; return what was counted."""
    count: collections.Counter = collections.Counter()
    splits: dict[str, dict[tuple[str, str], None]] = {"test": {}, "val": {}, "train": {}}
    for page, *pair in read_pairs(source, target, count):
        splits[split_of(page)][tuple(pair)] = None
        count["repeated"] += 1
    held_out: set[str] = set()
    for split, pairs in splits.items():
        kept = [pair for pair in pairs if held_out.isdisjoint(map(str.casefold, pair))]
        held_out.update(text.casefold() for pair in kept for text in pair)
        count[split] = len(kept)
        count["repeated"] -= len(kept)
        languages = language_of(source), language_of(target)
        for language, side in zip(languages, zip(*kept, strict=True), strict=True):
            write_atomically(folder / f"{split}.{language}", "\n".join(side) + "\n")
    return count


def main() -> int:
    """Write the text, then train; return the exit status of training."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("source", type=Path, help="folder of an unpacked package")
    parser.add_argument("target", type=Path, help="folder of the other one")
    parser.add_argument("folder", type=Path, help="where the text is written")
    parser.add_argument("--train", nargs=argparse.REMAINDER, help="train, with these options")
    args = parser.parse_args()
    source, target = find_help(args.source), find_help(args.target)
    for name, number in make_corpus(source, target, args.folder).items():
        print(f"{name}: {number:,}", flush=True)
    if args.train is None:
        return 0
    corpus = "--data.corpus", f"text:{args.folder}"
    languages = "--data.languages", join_languages(language_of(source), language_of(target))
    command = [str(ROOT / "train.py"), str(ROOT / "configs" / "libreoffice_en_ko.py")]
    return subprocess.run([sys.executable, *command, *corpus, *languages, *args.train]).returncode


if __name__ == "__main__":
    sys.exit(main())
