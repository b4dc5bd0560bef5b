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
import functools
import importlib.metadata
import io
import logging
import random
import re
import zlib
from collections.abc import Callable, Hashable, Iterator, Sequence
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from pathlib import Path
from typing import Any, NamedTuple

import absl.logging
import tensorflow_datasets as tfds
from babel import Locale, UnknownLocaleError, dates, lists, localedata, numbers, units

LOGGER = logging.getLogger("flaxformer_min")

SIZES = {"test": 1_000, "validation": 1_000, "train": 50_000}
"""Pairs in each split. The order matters: a later split avoids the source texts of an earlier."""

DATE_LENGTHS = ("full", "long", "medium", "short")
DATE_SKELETONS = "yMMMEd yMEd yMMMd yMd yMMMM yMMM yM MMMMd MMMd MMMEd Md MEd Ed yQQQQ yQQQ".split()
DATE_INTERVALS = "yMMMEd yMEd yMMMd yMd yMMMM yMMM yM MMMEd MMMd MEd Md".split()
TIME_SKELETONS = "hms hm Hms Hm".split()
TIME_INTERVALS = "hm Hm".split()
WEEKDAY_TIME_SKELETONS = "Ehms Ehm EHms EHm".split()
PLURAL_PROBES = tuple(map(Decimal, ("1", "2", "5", "11", "21", "1.5")))
"""Numbers of different plural categories, to see whether two units are ever written alike."""


class Phrase(NamedTuple):
    """One meaning in two languages, and the kind of phrase it is, such as `date:full`."""

    kind: str
    source: str
    target: str


class Kind(NamedTuple):
    """A way to make phrases: draw a value, then render it in a locale.

    weight: share of this kind, relative to the others.
    draw:   a random value.
    key:    what of the value decides on the split; None: training alone.
    render: the value in a locale's words; empty where the locale lacks it.
    """

    name: str
    weight: float
    draw: Callable[[random.Random], Any]
    key: Callable[[Any], Hashable]
    render: Callable[[Any, Locale], str]


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
    kinds = _kinds(*pair)
    rivals = _rivals(kinds, *pair)
    seen: set[str] = set()
    for current, full_size in SIZES.items():
        rng = random.Random(f"{seed} {current}")
        wanted = full_size if size is None or current != split else size
        found = _alone(*pair)[:wanted] if current == "train" else []
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


def _say(kind: Kind, value: Any, locale: Locale) -> str:
    """The value in the locale's words; empty where the locale or Babel lacks the means."""
    try:
        return plain_spaces(kind.render(value, locale))
    except (KeyError, NotImplementedError):
        return ""  # a pattern that CLDR does not have, or of a field that Babel does not know


def split_of(key: Hashable) -> str:
    """Which split a value belongs to: 2% to test and to validation each; None to training.

    >>> [split_of(number) for number in (None, 100, 116, 138)]
    ['train', 'train', 'test', 'validation']
    """
    if key is None:
        return "train"
    return {0: "test", 1: "validation"}.get(zlib.crc32(repr(key).encode()) % 50, "train")


def plain_spaces(text: str) -> str:
    r"""Typographic spaces as people type them.

    >>> plain_spaces("2:07\u202fPM\u2009–\u20093:00\u202fPM")
    '2:07 PM – 3:00 PM'
    """
    return re.sub("[\u00a0\u2009\u202f]", " ", text).strip()


# ---------------------------------------------------------------------- the prepared data set


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


# ------------------------------------------------------------------------------------ the kinds


@functools.lru_cache(maxsize=2)  # comparing the units takes a second, and there are three splits
def _kinds(source: Locale, target: Locale) -> tuple[Kind, ...]:
    """Every kind of phrase that both locales have."""
    return (
        *_date_kinds(source, target),
        *_clock_kinds(source, target),
        *_measure_kinds(source, target),
        *_money_kinds(source, target),
        *_name_kinds(source, target),
    )


def _in_both(source: Locale, target: Locale, table: str, skeletons: list[str]) -> list[str]:
    """The skeletons that neither locale would replace by a near one, which may say less."""
    return [s for s in skeletons if all(s in getattr(where, table) for where in (source, target))]


def _date_kinds(source: Locale, target: Locale) -> list[Kind]:
    in_full = [
        Kind(
            f"date:{length}",
            3,
            _date,
            _itself,
            lambda day, locale, length=length: dates.format_date(day, length, locale=locale),
        )
        for length in DATE_LENGTHS
    ]
    by_skeleton = [
        Kind(f"date:{skeleton}", 1, _date, _itself, _skeleton(skeleton))
        for skeleton in _in_both(source, target, "datetime_skeletons", DATE_SKELETONS)
    ]
    intervals = [
        Kind(f"date-interval:{skeleton}", 1.2, _date_span, _first, _date_interval(skeleton))
        for skeleton in _in_both(source, target, "interval_formats", DATE_INTERVALS)
    ]
    return in_full + by_skeleton + intervals


def _clock_kinds(source: Locale, target: Locale) -> list[Kind]:
    times = [
        Kind(
            f"time:{length}",
            1,
            _moment,
            datetime.time,
            lambda when, locale, length=length: dates.format_time(when, length, locale=locale),
        )
        for length in ("medium", "short")
    ]
    times += [
        Kind(f"time:{skeleton}", 0.7, _moment, datetime.time, _skeleton(skeleton))
        for skeleton in _in_both(source, target, "datetime_skeletons", TIME_SKELETONS)
    ]
    both = [
        Kind(
            f"datetime:{length}",
            weight,
            _moment,
            datetime.date,
            lambda when, locale, length=length: dates.format_datetime(when, length, locale=locale),
        )
        for length, weight in (("full", 1), ("long", 1), ("medium", 3), ("short", 3))
    ]
    both += [
        Kind(f"weekday-time:{skeleton}", 0.7, _moment, datetime.time, _skeleton(skeleton))
        for skeleton in _in_both(source, target, "datetime_skeletons", WEEKDAY_TIME_SKELETONS)
    ]
    intervals = [
        Kind(f"time-interval:{skeleton}", 1.5, _time_span, _both_times, _time_interval(skeleton))
        for skeleton in _in_both(source, target, "interval_formats", TIME_INTERVALS)
    ]
    return times + both + intervals


def _measure_kinds(source: Locale, target: Locale) -> list[Kind]:
    names = [
        name
        for name in source._data["unit_patterns"]
        # "2 days" of a person's age and "2 days" are written alike almost everywhere.
        if name in target._data["unit_patterns"] and not name.endswith("-person")
    ]
    items = _written_apart(
        [(name, length) for length in ("long", "short") for name in names], _unit, source, target
    )
    kinds = [
        Kind(
            f"measure:{length}",
            weight,
            lambda rng, some=some: (rng.choice(some), _number(rng)),
            _number_key,
            lambda value, locale: _unit(value[0], value[1], locale),
        )
        for length, weight in (("long", 9), ("short", 4))
        if (some := [item for item in items if item[1] == length])
    ]
    time_units = ("second", "minute", "hour", "day", "week", "month", "year")
    kinds.append(
        Kind(
            "relative-time",
            4,
            lambda rng: ((rng.choice(time_units), rng.random() < 0.5), _whole_number(rng)),
            _number_key,
            _relative_time,
        )
    )
    kinds.append(Kind("duration", 4, _two_counts, _itself, _duration))
    return kinds


def _money_kinds(source: Locale, target: Locale) -> list[Kind]:
    # The date is fixed so that the corpus does not change when a country changes its money.
    day = date(2025, 1, 1)
    current = sorted(
        {
            code
            for territory in numbers.get_global("territory_currencies")
            for code in numbers.get_territory_currencies(territory, day, day)
        }
    )
    items = _written_apart(
        [(code, style) for style in ("name", "standard") for code in current],
        _money,
        source,
        target,
    )
    return [
        Kind(
            f"money:{style}",
            weight,
            lambda rng, some=some: (rng.choice(some), _amount(rng)),
            _number_key,
            lambda value, locale: _money(value[0], value[1], locale),
        )
        for style, weight in (("name", 7), ("standard", 4))
        if (some := [item for item in items if item[1] == style])
    ]


def _name_kinds(source: Locale, target: Locale) -> list[Kind]:
    names = _names(source, target)
    by_kind = {kind: [name for name in names if name[0] == kind] for kind in NAME_TABLES}
    kinds = [
        Kind(
            f"{kind}-list:{style}",
            weight,
            lambda rng, some=some: rng.sample(some, rng.choice((2, 2, 3, 3, 4))),
            tuple,
            lambda value, locale, style=style: lists.format_list(
                [_name(one, locale) for one in value], style, locale=locale
            ),
        )
        for kind, some in by_kind.items()
        for style, weight in (("standard", 4), ("or", 2))
        if len(some) > 4
    ]
    if all(by_kind.values()):
        kinds.append(
            Kind(
                "language-of-territory",
                4,
                lambda rng: tuple(rng.choice(some) for some in by_kind.values()),
                _itself,
                lambda value, locale: "{} ({})".format(*(_name(one, locale) for one in value)),
            )
        )
    return kinds


def _rivals(kinds: Sequence[Kind], source: Locale, target: Locale) -> dict[str, list[Kind]]:
    """For each kind, the earlier ones that say the same value alike in the source, not the target.

    Found on 48 values of each draw; which of the rivals' texts coincide is seen value by value.
    """
    rivals: dict[str, list[Kind]] = {kind.name: [] for kind in kinds}
    texts: dict[str, list[tuple[str, str]]] = {}
    for kind in kinds:
        if kind.draw not in (_date, _date_span, _moment, _time_span):
            continue
        rng = random.Random(0)
        values = [kind.draw(rng) for _ in range(48)]
        texts[kind.name] = [
            (_say(kind, value, source), _say(kind, value, target)) for value in values
        ]
        rivals[kind.name] = [
            earlier
            for earlier in kinds[: kinds.index(kind)]
            if earlier.draw is kind.draw
            and any(
                mine[0] == theirs[0] and mine[1] != theirs[1]
                for mine, theirs in zip(texts[kind.name], texts[earlier.name], strict=True)
            )
        ]
    return rivals


def _written_apart(
    items: list[tuple[str, str]],
    render: Callable[[tuple[str, str], Decimal, Locale], str],
    source: Locale,
    target: Locale,
) -> list[tuple[str, str]]:
    """The items that both locales have and no earlier item is written like in the source."""
    owners: dict[str, str] = {}
    kept = []
    for item in items:
        texts = [
            tuple(plain_spaces(render(item, number, locale)) for locale in (source, target))
            for number in PLURAL_PROBES
        ]
        if all(s and t and owners.get(s, t) == t for s, t in texts):
            owners.update(texts)
            kept.append(item)
    return kept


# ------------------------------------------------------------------------------------ the values


def _date(rng: random.Random) -> date:
    # 100 years, so that a year of two digits is one year.
    return date(1970, 1, 1) + timedelta(days=rng.randrange(36_524))


def _moment(rng: random.Random) -> datetime:
    return datetime.combine(_date(rng), time()) + timedelta(seconds=rng.randrange(86_400))


def _date_span(rng: random.Random) -> tuple[date, date]:
    first = _date(rng)
    return first, first + timedelta(days=rng.randint(1, rng.choice((25, 300))))


def _time_span(rng: random.Random) -> tuple[datetime, datetime]:
    first, last = sorted(rng.sample(range(0, 24 * 60, 5), 2))
    day = datetime(2025, 1, 1)
    return day + timedelta(minutes=first), day + timedelta(minutes=last)


def _whole_number(rng: random.Random) -> Decimal:
    # Small ones are as frequent as people use them; 1 needs its own word form in many languages.
    return Decimal(
        rng.choices((1, rng.randint(2, 20), rng.randint(21, 99), rng.randint(100, 999)), _SHARES)[0]
    )


_SHARES = (10, 35, 30, 25)


def _number(rng: random.Random) -> Decimal:
    chance = rng.random()
    if chance < 0.5:
        return _whole_number(rng)
    if chance < 0.7:
        return Decimal(rng.randint(1_000, 9_999))
    return Decimal(rng.randint(1, 999) * 10 + rng.randint(1, 9)) / 10


def _amount(rng: random.Random) -> Decimal:
    return Decimal(rng.randint(100, 10 ** rng.randint(3, 6))) / 100


def _two_counts(rng: random.Random) -> tuple[tuple[str, int], tuple[str, int]]:
    names = ("year", "month", "week", "day", "hour", "minute", "second")
    first = rng.randrange(len(names) - 1)
    return (names[first], rng.randint(1, 60)), (names[first + 1], rng.randint(1, 60))


def _itself(value: Hashable) -> Hashable:
    return value


def _first(value: tuple) -> Hashable:
    return value[0]


def _both_times(value: tuple[datetime, datetime]) -> Hashable:
    return value[0].time(), value[1].time()


def _number_key(value: tuple[Hashable, Decimal]) -> Hashable:
    item, number = value
    if number == 1:
        return None  # one of anything is a word form of its own: there is nothing to infer it from
    # Rounded, as money is in currencies without a minor unit.
    return round(number) if number >= 100 else (item, number)


# --------------------------------------------------------------------------------- the renderings


def _skeleton(skeleton: str) -> Callable[[date, Locale], str]:
    return lambda value, locale: dates.format_skeleton(skeleton, value, fuzzy=False, locale=locale)


def _date_interval(skeleton: str) -> Callable[[tuple[date, date], Locale], str]:
    def render(span: tuple[date, date], locale: Locale) -> str:
        first, last = span
        one_month = (first.year, first.month) == (last.year, last.month)
        # Without a day two dates of one month, and without a year those of two years, say less.
        if ("d" not in skeleton and one_month) or ("y" not in skeleton and first.year != last.year):
            return ""
        return dates.format_interval(first, last, skeleton, fuzzy=False, locale=locale)

    return render


def _time_interval(skeleton: str) -> Callable[[tuple[datetime, datetime], Locale], str]:
    return lambda span, locale: dates.format_interval(*span, skeleton, fuzzy=False, locale=locale)


def _unit(item: tuple[str, str], number: Decimal, locale: Locale) -> str:
    name, length = item
    text = units.format_unit(number, name, length, locale=locale)
    return "" if name in text else text  # Babel shows the key where CLDR has no pattern


def _relative_time(value: tuple[tuple[str, bool], Decimal], locale: Locale) -> str:
    (unit, ago), number = value
    seconds = dict(dates.TIMEDELTA_UNITS)[unit] * int(number)
    return dates.format_timedelta(
        -seconds if ago else seconds,
        granularity=unit,
        threshold=10**9,  # never go over to a larger unit: "in 40 days"
        add_direction=True,
        locale=locale,
    )


def _duration(value: tuple[tuple[str, int], ...], locale: Locale) -> str:
    parts = [_unit((f"duration-{unit}", "short"), Decimal(n), locale) for unit, n in value]
    return lists.format_list(parts, "unit", locale=locale) if all(parts) else ""


def _money(item: tuple[str, str], amount: Decimal, locale: Locale) -> str:
    code, style = item
    text = numbers.format_currency(amount, code, locale=locale, format_type=style)
    return "" if code in text else text


NAME_TABLES = {"language": "languages", "territory": "territories"}
NOT_PLACES = {"EU", "EZ", "QO", "UN", "XA", "XB", "ZZ"}


def _name(name: tuple[str, str], locale: Locale) -> str:
    kind, code = name
    return getattr(locale, NAME_TABLES[kind]).get(code, "")


def _names(source: Locale, target: Locale) -> list[tuple[str, str]]:
    """Languages and territories of two-letter codes that both locales name, each unmistakably."""
    names = [
        (kind, code)
        for kind, table in NAME_TABLES.items()
        for code in sorted(getattr(source, table))
        if re.fullmatch("[A-Za-z]{2}", code) and code not in NOT_PLACES
    ]
    named = [
        name
        for name in names
        if all(_name(name, locale) not in ("", name[1]) for locale in (source, target))
    ]
    meanings: dict[str, set[str]] = {}
    for name in named:
        meanings.setdefault(_name(name, source), set()).add(_name(name, target))
    return [name for name in named if len(meanings[_name(name, source)]) == 1]


def _alone(source: Locale, target: Locale) -> list[Phrase]:
    """Every name by itself, for training: a name that was never seen cannot be translated."""
    texts: dict[str, Phrase] = {}
    for name in _names(source, target):
        sides = [plain_spaces(_name(name, locale)) for locale in (source, target)]
        texts.setdefault(sides[0], Phrase(name[0], *sides))
    return list(texts.values())
