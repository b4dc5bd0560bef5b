"""The embedded corpus: the same dates, times, measures, money and names, said in two languages.

Every phrase is rendered twice from one value by Babel, out of the Unicode CLDR, so that a pair is
right by construction and any two of its 700 locales make a corpus, without a download. It is
translation in the small: words move, numbers are copied or regrouped, month names are looked up,
and clocks change between 12 and 24 hours.

What keeps it honest:

* A source text has exactly one translation. Where two formats look alike in the source (English
  "May 5, 2031" is both long and medium) and differ in the target, only the first of them is used.
* A value belongs to one split. No date, clock time or number from 100 up that a validation or test
  phrase starts from is one that a training phrase starts from, and no source text of theirs occurs
  in training. A number below 100 is new only together with its unit, a name only with its company,
  the first time of a span only with its last: the words themselves have to be learnt somewhere.
* A phrase that CLDR lacks in either language (Babel then shows a key such as "duration-minute") is
  left out.
* No-break and thin spaces are written as plain ones, as people type them.

This module imports Babel and tensorflow_datasets: import it where the corpus is wanted.
"""

import contextlib
import difflib
import importlib.metadata
import io
import logging
import random
import re
import zlib
from collections.abc import Hashable, Iterator, Sequence
from pathlib import Path
from typing import Any

import absl.logging
import tensorflow_datasets as tfds
from babel import Locale, UnknownLocaleError, localedata

from flaxformer_min.data.corpora.cldr_kinds import (
    Kind,
    Phrase,
    _say,
    names_alone,
    phrase_kinds,
    rivals_of,
)
from flaxformer_min.data.corpora.pairs import Pairs, _list, find_split
from flaxformer_min.data.corpora.tfds import RecordPairs
from flaxformer_min.languages import parse_languages
from flaxformer_min.runtime.files import cache_folder

LOGGER = logging.getLogger("flaxformer_min")


SIZES = {"test": 1_000, "validation": 1_000, "train": 50_000}
"""Pairs in each split. The order matters: a later split avoids the source texts of an earlier."""


def parse_locale(name: str) -> Locale:
    """The CLDR locale of a name like `ko` or `pt_BR`; ValueError if there is none.

    >>> parse_locale("pt_BR").english_name
    'Portuguese (Brazil)'
    """
    try:
        return Locale.parse(name)
    except (UnknownLocaleError, ValueError, TypeError) as error:
        near = difflib.get_close_matches(name, localedata.locale_identifiers(), n=3, cutoff=0.5)
        hint = f" Did you mean {', '.join(near)}?" if near else ""
        raise ValueError(
            "A cldr corpus must name two locales of the Unicode CLDR, as in cldr:en-ko or "
            f"cldr:pt_BR-ja; got {name!r}.{hint}"
        ) from error


def phrases(
    source: str, target: str, split: str = "train", seed: int = 0, size: int | None = None
) -> list[Phrase]:
    """The phrases of a split in the order in which the corpus holds them.

    A pure function of its arguments and of Babel's version. `size` overrides SIZES for this split.
    Raises ValueError for an unknown locale or split, twice the same locale, or locales with too
    little in common.

    >>> tuple(phrases("en", "ko", "test", seed=1, size=1)[0])
    ('date:medium', 'Aug 31, 2002', '2002. 8. 31.')
    """
    if split not in SIZES:
        raise ValueError(f"The cldr corpus has the splits {', '.join(SIZES)}; got {split!r}.")
    pair = parse_locale(source), parse_locale(target)
    if pair[0] == pair[1]:
        raise ValueError(f"A corpus needs two different languages; got {source!r} twice.")
    kinds = phrase_kinds(*pair)
    rivals = rivals_of(kinds, *pair)
    seen: set[str] = set()
    for current, full_size in SIZES.items():
        rng = random.Random(f"{seed} {current}")
        wanted = full_size if size is None or current != split else size
        found = names_alone(*pair)[:wanted] if current == "train" else []
        seen.update(phrase.source for phrase in found)
        _sample(found, wanted, kinds, rivals, pair, current, seen, rng)
        if current == split:
            rng.shuffle(found)  # names alone come first, and a reader may take the first thousand
            return found
    raise AssertionError("unreachable: the split was checked above")


def _sample(
    found: list[Phrase],
    wanted: int,
    kinds: Sequence[Kind],
    rivals: dict[str, list[Kind]],
    pair: tuple[Locale, Locale],
    split: str,
    seen: set[str],
    rng: random.Random,
) -> None:
    """Append phrases of this split to `found` until there are `wanted`, each source text once."""
    left, failures = list(kinds), dict.fromkeys((kind.name for kind in kinds), 0)
    weights = [kind.weight for kind in left]
    while len(found) < wanted:
        if not left:
            raise ValueError(
                f"CLDR has too few phrases in common for {pair[0]} and {pair[1]}: {len(found)} of "
                f"{wanted} in {split}. Choose locales that it covers better."
            )
        kind = rng.choices(left, weights)[0]
        phrase = _one(kind, rivals[kind.name], pair, split, rng)
        if phrase is None or phrase.source in seen:
            failures[kind.name] += 1
            if failures[kind.name] > 200:  # in a row: the kind is used up
                left.remove(kind)
                weights = [kind.weight for kind in left]
            continue
        failures[kind.name] = 0
        seen.add(phrase.source)
        found.append(phrase)


def _one(
    kind: Kind, rivals: list[Kind], pair: tuple[Locale, Locale], split: str, rng: random.Random
) -> Phrase | None:
    for _ in range(500):
        value = kind.draw(rng)
        if split_of(kind.key(value)) == split:
            break
    else:
        return None
    texts = [_say(kind, value, locale) for locale in pair]
    if not all(texts) or any("{" in text for text in texts):
        return None
    # A rival that reads the same in the source owns the text: its translation is the one.
    if any(_say(rival, value, pair[0]) == texts[0] for rival in rivals):
        return None
    return Phrase(kind.name, *texts)


def split_of(key: Hashable) -> str:
    """Which split a value belongs to: 2% to test and to validation each; None to training.

    >>> [split_of(number) for number in (None, 100, 116, 138)]
    ['train', 'train', 'test', 'validation']
    """
    if key is None:
        return "train"
    return {0: "test", 1: "validation"}.get(zlib.crc32(repr(key).encode()) % 50, "train")


def _version(babel: str) -> str:
    """Babel's version as the second and third part of ours, for tfds wants three numbers.

    >>> _version("2.18.0"), _version("2.9")
    ('1.218.0', '1.209.0')
    """
    major, minor, patch = [*map(int, re.findall(r"\d+", babel)), 0][:3]
    return f"1.{major}{minor:02}.{patch}"


class CldrConfig(tfds.core.BuilderConfig):
    """Which two locales, the source first; `en-ko` by name."""

    def __init__(self, source: str, target: str):
        """Name the config after the locales, which must exist and differ."""
        if parse_locale(source) == parse_locale(target):
            raise ValueError(f"A corpus needs two different languages; got {source!r} twice.")
        super().__init__(name=f"{source}-{target}", description=f"{source} to {target}")
        self.locales = (source, target)


class CldrPhrases(tfds.core.GeneratorBasedBuilder):
    """Phrases of the Unicode CLDR in two locales, as a translation set of tfds.

    The version holds Babel's, whose CLDR data the phrases come from: 1.218.0 is Babel 2.18.0.
    """

    VERSION = tfds.core.Version(_version(importlib.metadata.version("babel")))

    def _info(self) -> tfds.core.DatasetInfo:
        return tfds.core.DatasetInfo(
            builder=self,
            features=tfds.features.Translation(languages=self.builder_config.locales),
            supervised_keys=self.builder_config.locales,
            homepage="https://cldr.unicode.org",
            license="Unicode-3.0",
            disable_shuffling=True,  # record i is phrase i, which keeps its kind recoverable
        )

    def _split_generators(self, dl_manager: Any) -> dict[str, Iterator]:
        return {split: self._generate_examples(split) for split in ("train", "validation", "test")}

    def _generate_examples(self, split: str) -> Iterator[tuple[int, dict[str, str]]]:
        source, target = self.builder_config.locales
        for index, phrase in enumerate(phrases(source, target, split)):
            yield index, {source: phrase.source, target: phrase.target}


def prepare(source: str, target: str, cache: Path) -> tfds.core.DatasetBuilder:
    """The prepared data set of two locales in a cache folder, made now if it is not there.

    Takes seconds the first time. Two processes may prepare at once: each writes a folder of its own
    and the first to finish wins.
    """
    config = CldrConfig(source, target)
    with _quiet_tfds():
        builder = CldrPhrases(config=config, data_dir=cache, file_format="array_record")
        if builder.is_prepared():
            return builder
        LOGGER.info("Rendering the phrases of %s into %s, once.", config.name, builder.data_dir)
        try:
            builder.download_and_prepare()
        except Exception:
            # Another process has moved its folder into place meanwhile; its bytes are the same.
            builder = CldrPhrases(config=config, data_dir=cache, file_format="array_record")
            if not builder.is_prepared():
                raise
        return builder


@contextlib.contextmanager
def _quiet_tfds() -> Iterator[None]:
    """Without tfds's talk of downloads, its progress bars and its warnings of our own config."""
    verbosity = absl.logging.get_verbosity()
    absl.logging.set_verbosity(absl.logging.ERROR)
    try:
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            yield
    finally:
        absl.logging.set_verbosity(verbosity)


class CldrCorpus:
    """The embedded phrases in two locales; they are prepared when pairs are wanted."""

    def __init__(self, place: str, wanted: tuple[str, str] | None, cache_dir: str):
        """Check the locales; nothing is prepared yet."""
        languages = parse_languages(place)
        if wanted and set(wanted) != set(languages):
            raise ValueError(
                f"cldr:{place} is in {_list(languages)}; got languages {'-'.join(wanted)!r}. Write "
                f"cldr:{'-'.join(wanted)}, and leave data.languages empty."
            )
        # Never a set read backwards: a text has one translation in the direction it was made for.
        self.languages = wanted or languages
        CldrConfig(*self.languages)  # there are such locales
        self.cache = cache_folder(cache_dir)

    def splits(self) -> list[str]:
        """Return the names of the splits, sorted."""
        return sorted(SIZES)

    def pairs(self, split: str) -> Pairs:
        """Return the sentence pairs of a split."""
        name = find_split(split, self.splits(), f"cldr:{'-'.join(self.languages)}")
        return RecordPairs(prepare(*self.languages, self.cache), name, self.languages)
