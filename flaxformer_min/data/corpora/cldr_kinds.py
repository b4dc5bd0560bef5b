"""The kinds of phrases of the embedded corpus: their values, and how they are written."""

import functools
import random
import re
from collections.abc import Callable, Hashable, Sequence
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from typing import Any, NamedTuple

from babel import Locale, dates, lists, numbers, units

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


def _say(kind: Kind, value: Any, locale: Locale) -> str:
    """The value in the locale's words; empty where the locale or Babel lacks the means."""
    try:
        return plain_spaces(kind.render(value, locale))
    except (KeyError, NotImplementedError):
        return ""  # a pattern that CLDR does not have, or of a field that Babel does not know


def plain_spaces(text: str) -> str:
    r"""Typographic spaces as people type them.

    >>> plain_spaces("2:07\u202fPM\u2009–\u20093:00\u202fPM")
    '2:07 PM – 3:00 PM'
    """
    return re.sub("[\u00a0\u2009\u202f]", " ", text).strip()


@functools.lru_cache(maxsize=2)  # comparing the units takes a second, and there are three splits
def phrase_kinds(source: Locale, target: Locale) -> tuple[Kind, ...]:
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


def rivals_of(kinds: Sequence[Kind], source: Locale, target: Locale) -> dict[str, list[Kind]]:
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


def names_alone(source: Locale, target: Locale) -> list[Phrase]:
    """Every name by itself, for training: a name that was never seen cannot be translated."""
    texts: dict[str, Phrase] = {}
    for name in _names(source, target):
        sides = [plain_spaces(_name(name, locale)) for locale in (source, target)]
        texts.setdefault(sides[0], Phrase(name[0], *sides))
    return list(texts.values())
