"""The embedded corpus: dates, times, measures, amounts of money and names in two languages.

Babel renders each value in both languages from the data of the Unicode CLDR. So every pair is
correct by construction, and any two of the 700 locales form a corpus without a download. The task
is a small translation task: words are reordered, numbers copied or regrouped, names of months
looked up, and clock times converted between 12 and 24 hours.

Rules:

* A source text has exactly one translation. If two formats coincide in the source (English
  "May 5, 2031" is both long and medium) and differ in the target, only the first one is used.
* The splits have different values. No date, clock time or number from 100 up of a validation or
  test phrase occurs in training, nor does its source text. A number below 100 is only new in
  combination with its unit, a name with the other names of its list, and the start of a time
  interval with its end, because training must contain the words themselves.
* A phrase is dropped if CLDR lacks it in either language (Babel then returns a key such as
  "duration-minute").
* No-break and thin spaces are replaced by plain ones.

This module imports Babel and tensorflow_datasets, so import it only where the corpus is used.
"""

import contextlib
import difflib
import importlib.metadata
import io
import logging
import random
import re
import shutil
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
    names_alone,
    phrase_kinds,
    render_phrase,
    rivals_of,
)
from flaxformer_min.data.corpora.pairs import Pairs, find_split, list_names
from flaxformer_min.data.corpora.tfds import RecordPairs
from flaxformer_min.languages import parse_languages
from flaxformer_min.system.files import cache_folder

LOGGER = logging.getLogger("flaxformer_min")


SIZES = {"test": 1_000, "validation": 1_000, "train": 50_000}
"""Pairs in each split. The order matters: a split avoids the source texts of earlier ones."""


def parse_locale(name: str) -> Locale:
    """Return the CLDR locale of a name such as `ko` or `pt_BR`. Raises ValueError if unknown.

    >>> parse_locale("pt_BR").english_name
    'Portuguese (Brazil)'
    """
    try:
        return Locale.parse(name.replace("-", "_"))
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
    """Return the phrases of a split, in the order of the corpus.

    A pure function of its arguments and of Babel's version. `size` overrides SIZES for this split.
    Raises ValueError for an unknown locale or split, equal locales, or locales with too few phrases
    in common.

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
            rng.shuffle(found)  # otherwise all names come first
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
        phrase = _draw_phrase(kind, rivals[kind.name], pair, split, rng)
        if phrase is None or phrase.source in seen:
            failures[kind.name] += 1
            if failures[kind.name] > 200:  # in a row: the kind is exhausted
                left.remove(kind)
                weights = [kind.weight for kind in left]
            continue
        failures[kind.name] = 0
        seen.add(phrase.source)
        found.append(phrase)


def _draw_phrase(
    kind: Kind, rivals: list[Kind], pair: tuple[Locale, Locale], split: str, rng: random.Random
) -> Phrase | None:
    """Return a random phrase of a kind, or None if it is not usable."""
    for _ in range(500):
        value = kind.draw(rng)
        if split_of(kind.key(value)) == split:
            break
    else:
        return None
    texts = [render_phrase(kind, value, locale) for locale in pair]
    if not all(texts) or any("{" in text for text in texts):
        return None
    # If a rival has the same source text, only the rival's translation is used.
    if any(render_phrase(rival, value, pair[0]) == texts[0] for rival in rivals):
        return None
    return Phrase(kind.name, *texts)


def split_of(key: Hashable) -> str:
    """Return the split of a value: 2% go to test, 2% to validation, None to training.

    >>> [split_of(number) for number in (None, 100, 116, 138)]
    ['train', 'train', 'test', 'validation']
    """
    if key is None:
        return "train"
    return {0: "test", 1: "validation"}.get(zlib.crc32(repr(key).encode()) % 50, "train")


def _version(babel: str) -> str:
    """Return a version of three numbers, as tfds requires, that contains Babel's.

    >>> _version("2.18.0"), _version("2.9")
    ('1.218.0', '1.209.0')
    """
    major, minor, patch = [*map(int, re.findall(r"\d+", babel)), 0][:3]
    return f"1.{major}{minor:02}.{patch}"


class CldrConfig(tfds.core.BuilderConfig):
    """Two locales, the source first; its name is such as `en-ko`."""

    def __init__(self, source: str, target: str):
        """Name the config after the locales, which must exist and differ."""
        if parse_locale(source) == parse_locale(target):
            raise ValueError(f"A corpus needs two different languages; got {source!r} twice.")
        super().__init__(name=f"{source}-{target}", description=f"{source} to {target}")
        self.locales = (source, target)


class CldrPhrases(tfds.core.GeneratorBasedBuilder):
    """Phrases of the Unicode CLDR in two locales, as a translation dataset of tfds.

    The version contains Babel's version, the source of the CLDR data: 1.218.0 is Babel 2.18.0.
    """

    VERSION = tfds.core.Version(_version(importlib.metadata.version("babel")))

    def _info(self) -> tfds.core.DatasetInfo:
        return tfds.core.DatasetInfo(
            builder=self,
            features=tfds.features.Translation(languages=self.builder_config.locales),
            supervised_keys=self.builder_config.locales,
            homepage="https://cldr.unicode.org",
            license="Unicode-3.0",
            disable_shuffling=True,  # so that record i is phrase i, and its kind can be recovered
        )

    def _split_generators(self, dl_manager: Any) -> dict[str, Iterator]:
        return {split: self._generate_examples(split) for split in ("train", "validation", "test")}

    def _generate_examples(self, split: str) -> Iterator[tuple[int, dict[str, str]]]:
        source, target = self.builder_config.locales
        for index, phrase in enumerate(phrases(source, target, split)):
            yield index, {source: phrase.source, target: phrase.target}


def prepare(source: str, target: str, cache: Path) -> tfds.core.DatasetBuilder:
    """Return the prepared dataset of two locales from a cache folder; prepare it if necessary.

    This takes seconds the first time. Two processes may prepare it at once: each writes its own
    folder, and the first to finish wins.
    """
    config = CldrConfig(source, target)
    with _quiet_tfds():
        builder = _open(config, cache)
    if builder.is_prepared():
        return builder
    LOGGER.info("Rendering the phrases of %s into %s, once.", config.name, builder.data_dir)
    with _quiet_tfds():
        try:
            builder.download_and_prepare()
        except Exception:
            # Another process may have finished an equal dataset in the meantime.
            builder = _open(config, cache)
            if not builder.is_prepared():
                raise
        return builder


def _open(config: CldrConfig, cache: Path) -> tfds.core.DatasetBuilder:
    """Return the dataset, without what is prepared of it if its description is damaged."""
    try:
        builder = CldrPhrases(config=config, data_dir=cache, file_format="array_record")
        if builder.info.splits or not Path(builder.data_dir).exists():
            return builder
    except Exception:  # of protobuf
        pass
    shutil.rmtree(cache / CldrPhrases.name / config.name, ignore_errors=True)
    return CldrPhrases(config=config, data_dir=cache, file_format="array_record")


@contextlib.contextmanager
def _quiet_tfds() -> Iterator[None]:
    """Suppress tfds' messages, progress bars and warnings of our config."""
    verbosity = absl.logging.get_verbosity()
    absl.logging.set_verbosity(absl.logging.ERROR)
    try:
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            yield
    finally:
        absl.logging.set_verbosity(verbosity)


class CldrCorpus:
    """The embedded phrases in two locales, prepared on first use of `pairs`."""

    def __init__(self, name: str, languages: str, cache_dir: str):
        """Check the locales; nothing is prepared yet."""
        known = localedata.locale_identifiers()
        own = parse_languages(name, known)
        wanted = parse_languages(languages, known) if languages else own
        if set(wanted) != set(own):
            raise ValueError(
                f"cldr:{name} is in {list_names(own)}; got languages {'-'.join(wanted)!r}. "
                f"Write cldr:{'-'.join(wanted)}, and leave data.languages empty."
            )
        # Never read a dataset backwards: a text has one translation only in the direction it was
        # made for.
        self.languages = wanted
        CldrConfig(*self.languages)  # raises for unknown locales
        self.cache = cache_folder(cache_dir)

    def splits(self) -> list[str]:
        """Return the names of the splits, sorted."""
        return sorted(SIZES)

    def pairs(self, split: str) -> Pairs:
        """Return the sentence pairs of a split."""
        name = find_split(split, self.splits(), f"cldr:{'-'.join(self.languages)}")
        builder = prepare(*self.languages, self.cache)
        try:
            pairs = RecordPairs(builder, name, self.languages)
            pairs[0]  # because files are opened on use
            return pairs
        except ValueError:  # damaged, and only a cache
            shutil.rmtree(builder.data_dir, ignore_errors=True)
            return RecordPairs(prepare(*self.languages, self.cache), name, self.languages)
