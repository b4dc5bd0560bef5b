"""The kinds of phrases of the embedded corpus: their values, and how they are rendered."""

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
"""Numbers of different plural categories, to find units that are ever rendered alike."""


class Phrase(NamedTuple):
    """A phrase in two languages, and its kind, such as `date:full`."""

    kind: str
    source: str
    target: str


class Kind(NamedTuple):
    """A kind of phrase: values that are drawn at random and rendered in a locale.

    weight: relative frequency of this kind.
    draw:   returns a random value.
    key:    returns the part of a value that selects its split; None: training only.
    render: returns the text of a value in a locale; empty if the locale lacks it.
    """

    name: str
    weight: float
    draw: Callable[[random.Random], Any]
    key: Callable[[Any], Hashable]
    render: Callable[[Any, Locale], str]


def render_phrase(kind: Kind, value: Any, locale: Locale) -> str:
    """Return the text of a value in a locale; empty if CLDR or Babel lacks it."""
    try:
        return plain_spaces(kind.render(value, locale))
    except (KeyError, NotImplementedError):
        return ""  # CLDR lacks the pattern, or Babel does not support one of its fields


def plain_spaces(text: str) -> str:
    r"""Return the text with plain spaces instead of typographic ones, stripped.

    >>> plain_spaces("2:07\u202fPM\u2009–\u20093:00\u202fPM")
    '2:07 PM – 3:00 PM'
    """
    return re.sub("[\u00a0\u2009\u202f]", " ", text).strip()


@functools.lru_cache(maxsize=2)  # comparing units takes a second, and there are three splits
def phrase_kinds(source: Locale, target: Locale) -> tuple[Kind, ...]:
    """Return all kinds of phrases that both locales have."""
    return (
        *_date_kinds(source, target),
        *_clock_kinds(source, target),
        *_measure_kinds(source, target),
        *_money_kinds(source, target),
        *_name_kinds(source, target),
    )


def _in_both(source: Locale, target: Locale, table: str, skeletons: list[str]) -> list[str]:
    """Return the skeletons that both locales have; Babel would replace a missing one."""
    both = (source, target)
    return [s for s in skeletons if all(s in getattr(locale, table) for locale in both)]


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
        # "2 days" as a person's age and as a duration are written alike in most languages.
        if name in target._data["unit_patterns"] and not name.endswith("-person")
    ]
    items = _unambiguous(
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
    # A fixed date, so that the corpus does not change when a country changes its currency.
    day = date(2025, 1, 1)
    current = sorted(
        {
            code
            for territory in numbers.get_global("territory_currencies")
            for code in numbers.get_territory_currencies(territory, day, day)
        }
    )
    items = _unambiguous(
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
    """Return the rivals of each kind: earlier kinds with equal source but different target texts.

    They are found with 48 random values. Whether the texts of rivals coincide depends on the value.
    """
    rivals: dict[str, list[Kind]] = {kind.name: [] for kind in kinds}
    texts: dict[str, list[tuple[str, str]]] = {}
    for kind in kinds:
        if kind.draw not in (_date, _date_span, _moment, _time_span):
            continue
        rng = random.Random(0)
        values = [kind.draw(rng) for _ in range(48)]
        texts[kind.name] = [
            (render_phrase(kind, value, source), render_phrase(kind, value, target))
            for value in values
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


def _unambiguous(
    items: list[tuple[str, str]],
    render: Callable[[tuple[str, str], Decimal, Locale], str],
    source: Locale,
    target: Locale,
) -> list[tuple[str, str]]:
    """Return the items that both locales have, without source texts of two translations."""
    translations: dict[str, str] = {}
    unambiguous = []
    for item in items:
        texts = [
            tuple(plain_spaces(render(item, number, locale)) for locale in (source, target))
            for number in PLURAL_PROBES
        ]
        if all(s and t and translations.get(s, t) == t for s, t in texts):
            translations.update(texts)
            unambiguous.append(item)
    return unambiguous


def _date(rng: random.Random) -> date:
    # 100 years, so that two digits identify a year.
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
    # Small numbers are frequent, as in real text; 1 has its own word form in many languages.
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
        return None  # the word form after 1 cannot be inferred from other numbers
    # Rounded, as amounts are in currencies without a minor unit.
    return round(number) if number >= 100 else (item, number)


def _skeleton(skeleton: str) -> Callable[[date, Locale], str]:
    return lambda value, locale: dates.format_skeleton(skeleton, value, fuzzy=False, locale=locale)


def _date_interval(skeleton: str) -> Callable[[tuple[date, date], Locale], str]:
    def render(span: tuple[date, date], locale: Locale) -> str:
        first, last = span
        one_month = (first.year, first.month) == (last.year, last.month)
        # Two dates of one month need a day, and those of two years a year.
        if ("d" not in skeleton and one_month) or ("y" not in skeleton and first.year != last.year):
            return ""
        return dates.format_interval(first, last, skeleton, fuzzy=False, locale=locale)

    return render


def _time_interval(skeleton: str) -> Callable[[tuple[datetime, datetime], Locale], str]:
    return lambda span, locale: dates.format_interval(*span, skeleton, fuzzy=False, locale=locale)


def _unit(item: tuple[str, str], number: Decimal, locale: Locale) -> str:
    name, length = item
    text = units.format_unit(number, name, length, locale=locale)
    return "" if name in text else text  # Babel returns the key if CLDR has no pattern


def _relative_time(value: tuple[tuple[str, bool], Decimal], locale: Locale) -> str:
    (unit, ago), number = value
    seconds = dict(dates.TIMEDELTA_UNITS)[unit] * int(number)
    return dates.format_timedelta(
        -seconds if ago else seconds,
        granularity=unit,
        threshold=10**9,  # never convert to a larger unit: "in 40 days"
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

NOT_TERRITORIES = {"EU", "EZ", "QO", "UN", "XA", "XB", "ZZ"}


def _name(name: tuple[str, str], locale: Locale) -> str:
    kind, code = name
    return getattr(locale, NAME_TABLES[kind]).get(code, "")


def _names(source: Locale, target: Locale) -> list[tuple[str, str]]:
    """Return the two-letter languages and territories with unambiguous names in both locales."""
    names = [
        (kind, code)
        for kind, table in NAME_TABLES.items()
        for code in sorted(getattr(source, table))
        if re.fullmatch("[A-Za-z]{2}", code) and code not in NOT_TERRITORIES
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
    """Return a phrase for each name, for training, because a model cannot infer its translation."""
    texts: dict[str, Phrase] = {}
    for name in _names(source, target):
        sides = [plain_spaces(_name(name, locale)) for locale in (source, target)]
        texts.setdefault(sides[0], Phrase(name[0], *sides))
    return list(texts.values())
