"""The share of phrases that the default job translates exactly, by kind.

    python benchmarks/phrases.py runs/cldr_en_ko --json phrases.json

Translates a split of the embedded corpus with a run that was trained on it, and counts the phrases
whose translation equals that of CLDR: one row for each kind of phrase. All others are printed.
"""

import argparse
import collections
from pathlib import Path
from typing import Any

from common import machine, report


def main() -> None:
    """Translate, and print the wrong translations and one table."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("run", help="folder of a run with a corpus `cldr:...`")
    parser.add_argument("--split", default="test")
    parser.add_argument("--json", type=Path, help="write the rows here")
    args = parser.parse_args()

    from flaxformer_min import Translator
    from flaxformer_min.data.corpora.cldr import phrases
    from flaxformer_min.storage.run_folder import RunFolder
    from flaxformer_min.system.devices import configure_cpu_devices
    from flaxformer_min.system.memory import tune_malloc

    configure_cpu_devices()
    tune_malloc()
    data = RunFolder(args.run).config().data
    if not data.corpus.startswith("cldr:"):
        parser.error(f"the run must have been trained on a corpus `cldr:...`; got {data.corpus}.")
    expected = phrases(*data.languages.split("-"), args.split)
    found = Translator.load(args.run).translate([phrase.source for phrase in expected])
    right = [phrase.target == text for phrase, text in zip(expected, found, strict=True)]
    for phrase, text, is_right in zip(expected, found, right, strict=True):
        if not is_right:
            print(f"{phrase.kind}: {phrase.source}\n    {text}\n   ({phrase.target})")
    title = f"Exact translations of {data.corpus}, {args.split}, by {args.run}; {machine('jax')}"
    report(title, rows_of([phrase.kind for phrase in expected], right), args.json)


def rows_of(kinds: list[str], right: list[bool]) -> list[dict[str, Any]]:
    """Return a row for each kind, most missed first, then one for all.

    A kind is named by what precedes its colon.

    >>> rows_of(["date:full", "date:yM", "money:USD"], [False, True, True])[0]
    {'kind': 'date', 'phrases': 2, 'missed': 1, 'right, %': 50.0}
    """
    counts: dict[str, list[int]] = collections.defaultdict(lambda: [0, 0])
    for kind, is_right in zip(kinds, right, strict=True):
        for name in (kind.partition(":")[0], "all"):
            counts[name][0] += 1
            counts[name][1] += not is_right
    ordered = sorted(counts.items(), key=lambda item: (item[0] == "all", -item[1][1], item[0]))
    return [
        {"kind": kind, "phrases": n, "missed": missed, "right, %": 100 * (1 - missed / n)}
        for kind, (n, missed) in ordered
    ]


if __name__ == "__main__":
    main()
