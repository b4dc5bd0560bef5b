"""`inspect`: a report on the text of a corpus, and a copy without the kinds that a user names."""

import argparse
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from flaxformer_min.cli.lines import Stop, append_pairs, open_output, write
from flaxformer_min.system.files import folder_atomically

LINE_NUMBERS = 10
"""Most line numbers that are printed for a kind; --json has all."""

WIDTH = 160
"""Most characters of a text that are printed."""


def inspect(args: argparse.Namespace, stop: Stop) -> int:
    """Run the command, and return its exit status."""
    from flaxformer_min.data.corpora import open_corpus
    from flaxformer_min.data.inspection import KINDS

    if unknown := [kind for kind in args.drop if kind not in KINDS]:
        raise ValueError(f"--drop must name kinds of {', '.join(KINDS)}; got {unknown[0]!r}.")
    if bool(args.write) != bool(args.drop):
        raise ValueError(
            "--write DIR and --drop KIND belong together: the folder for the text, and what it is "
            f"to be without; got only --{'write' if args.write else 'drop'}."
        )
    corpus = open_corpus(args.corpus, args.languages or "", "", download=False)
    splits = {name: corpus.pairs(name) for name in corpus.splits()}
    if not splits:
        corpus.languages  # noqa: B018 - raises the error that says what is missing
    training = "train" if "train" in splits else next(iter(splits))
    found = _find(splits, training)
    with open_output(None) as output:
        for name, findings in found.items():
            lines = _json if args.json else _report
            write(output, list(lines(name, splits[name], findings, args.samples)))
    if args.write:
        _write_clean(Path(args.write), splits, training, found[training], args.drop)
    return 0


def _find(splits: Mapping[str, Any], training: str) -> dict[str, list[Any]]:
    """Return what is found in each split, the training split first."""
    from flaxformer_min.data.inspection import find_usual, inspect_pairs

    usual = find_usual(splits[training])
    others = {name: pairs for name, pairs in splits.items() if name != training}
    found = {training: list(inspect_pairs(splits[training], usual, others))}
    return found | {name: list(inspect_pairs(others[name], usual, {})) for name in others}


def _report(name: str, pairs: Any, findings: Sequence[Any], samples: int) -> Iterator[str]:
    """Yield the lines for a split: a summary, then each kind with samples."""
    from flaxformer_min.data.inspection import KINDS

    by_kind = {kind: [each for each in findings if each.kind == kind] for kind in KINDS}
    marked = len({each.line for each in findings})
    yield f"{name}: {len(pairs):,} pairs, {' to '.join(pairs.languages)}; {marked:,} with findings"
    for kind, found in by_kind.items():
        if not found:
            continue
        yield f"\n{kind}: {len(found):,} ({len(found) / len(pairs):.2%}); {KINDS[kind]}"
        numbers = ", ".join(f"{each.line}" for each in found[:LINE_NUMBERS])
        yield f"  lines {numbers}" + (", ..." if len(found) > LINE_NUMBERS else "")
        for each in found[:: -(-len(found) // samples)] if samples else ():
            yield f"  {each.line}" + (f" ({printable(each.detail)})" if each.detail else "")
            yield from (f"    {printable(text)}" for text in pairs[each.line - 1])
    if absent := [kind for kind, found in by_kind.items() if not found]:
        yield f"\nnone: {', '.join(absent)}"
    yield ""


def _json(name: str, pairs: Any, findings: Sequence[Any], samples: int) -> Iterator[str]:
    for each in findings:
        source, target = pairs[each.line - 1]
        content = {"split": name} | each._asdict() | {"source": source, "target": target}
        yield json.dumps(content, ensure_ascii=False)


def printable(text: str) -> str:
    r"""Return the beginning of a text, with escapes for characters that would not be seen.

    >>> printable("red\x1b[2J \u202edoor\n")
    'red<U+001B>[2J <U+202E>door<U+000A>'
    """
    from flaxformer_min.data.inspection import odd_characters

    text = text if len(text) <= WIDTH else text[: WIDTH - 3] + "..."
    return text.translate({ord(c): f"<U+{ord(c):04X}>" for c in odd_characters(text)})


def _write_clean(
    folder: Path, splits: Mapping[str, Any], training: str, found: Sequence[Any], drop: Any
) -> None:
    """Write all splits as text, the training split without the lines of these kinds."""
    dropped = {each.line for each in found if each.kind in drop}
    with folder_atomically(folder) as scratch:
        for name, pairs in splits.items():
            omitted = dropped if name == training else ()
            kept_pairs = (pair for line, pair in enumerate(pairs, 1) if line not in omitted)
            append_pairs(scratch, name, pairs.languages, kept_pairs)
    kept = len(splits[training]) - len(dropped)
    message = (
        f"{folder}: {training} has {kept:,} pairs, without {len(dropped):,}; other splits have all"
    )
    print(message, file=sys.stderr)
