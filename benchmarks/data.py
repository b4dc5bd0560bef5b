"""The data pipeline alone: does it keep up with what it feeds?

    python benchmarks/data.py --corpus text:DIR --languages en-de --pairs 1000000

The training split, repeated to so many pairs, is (a) tokenized and encoded, half of it first, which
shows what memory depends on; (b) planned into the rows of an epoch; (c) delivered by `TrainingBatches`
and split over devices, with and without worker processes, for a few seconds each; where an epoch is
through the next begins, new workers included. The columns "of ..." hold the target tokens delivered
a second against those that training consumes: `--consumes` on this machine, and 500,000 on a large
GPU. Without --corpus the text is the embedded corpus.
"""

import argparse
import dataclasses
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from common import alone, cores, machine, make_tokenizer, peak_memory, read_split, report_parts

GPU = 500_000
"""Target tokens a second, more than which no training on one GPU is expected to consume."""

ROW = (64, 64)


@dataclasses.dataclass(frozen=True)
class Repeated(Sequence):
    """`pairs` again and again, `count` in all."""

    pairs: Sequence[tuple[str, str]]
    count: int

    def __len__(self) -> int:
        """Pairs."""
        return self.count

    def __getitem__(self, places: slice) -> list[tuple[str, str]]:
        """Those of a slice, read where they lie."""
        start, stop, _ = places.indices(self.count)
        found = []
        while start < stop:
            first = start % len(self.pairs)
            part = self.pairs[first : first + stop - start]
            found += part
            start += len(part)
        return found


def main() -> None:
    """Measure, and print three tables."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--corpus", default="cldr:en-ko", help="its training split is read")
    parser.add_argument("--languages", default="", help="of a folder of text, as en-de")
    parser.add_argument("--pairs", type=int, default=200_000)
    parser.add_argument("--vocab-size", type=int, default=8000)
    parser.add_argument("--rows", type=int, nargs="+", default=[64, 400], help="of a batch")
    parser.add_argument("--workers", type=int, nargs="+", default=[0, 2, 4])
    parser.add_argument("--seconds", type=float, default=5, help="of each delivery")
    parser.add_argument("--consumes", type=float, default=4000, help="target tokens/s of training")
    parser.add_argument("--json", type=Path, help="write the rows here")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        alone(make_tokenizer, args, folder)
        encoded = [alone(encode, args, folder, count) for count in (args.pairs // 2, args.pairs)]
        where = encoded[-1].pop("folder")
        encoded[0].pop("folder")
        parts = {"Encoding": encoded, "Planning an epoch": alone(plan, where, args.rows)}
        parts["Delivering"] = [
            alone(deliver, args, where, rows, workers)
            for rows in args.rows
            for workers in args.workers
        ]
    title = f"The data of {args.corpus}, rows of {ROW[0]} and {ROW[1]} places; "
    report_parts(title + machine("grain", "sentencepiece", "numpy"), parts, args.json)


def encode(args: argparse.Namespace, folder: Path, count: int) -> dict[str, Any]:
    """Text to token ids on disk, as the first start of training does it."""
    from flaxformer_min.data.encoding import encode_pairs
    from flaxformer_min.data.tokenizer import Tokenizer

    tokenizer = Tokenizer.load(folder / "tokenizer.model")
    pairs = read_split(args, "train")
    encode_pairs(pairs[:1000], (tokenizer, tokenizer), ROW, folder / "warm", "first")
    before, since = peak_memory(), time.perf_counter()
    encoded = encode_pairs(
        Repeated(pairs, count), (tokenizer, tokenizer), ROW, folder / "cache", f"{count}"
    )
    seconds, counts = time.perf_counter() - since, encoded.counts
    return {
        "pairs": count,
        "s": seconds,
        "pairs/s": count / seconds,
        "tokens/s": (counts.source_pieces + counts.target_pieces) / seconds,
        "peak memory, MB": peak_memory() / 1e6,
        "of it for encoding, MB": (peak_memory() - before) / 1e6,
        "on disk, MB": sum(file.stat().st_size for file in encoded.folder.iterdir()) / 1e6,
        "folder": encoded.folder,
    }


def plan(folder: Path, rows_of_batches: list[int]) -> list[dict[str, Any]]:
    """The first epoch packs; the others only shuffle."""
    from flaxformer_min.data.batches import TrainingBatches
    from flaxformer_min.data.encoding import EncodedPairs

    found = []
    for rows in rows_of_batches:
        for kept in folder.glob("packing_*"):
            kept.unlink()
        times = [time.perf_counter()]
        encoded = EncodedPairs.load(folder)
        times.append(time.perf_counter())
        batches = TrainingBatches(encoded, ROW, rows, seed=0)
        for number in (0, 1):
            epoch = batches.epoch(number)
            times.append(time.perf_counter())
        found.append(
            {
                "rows": rows,
                "pairs": len(encoded),
                "batches": len(epoch),
                "opening, s": times[1] - times[0],
                "first epoch, s": times[2] - times[1],
                "next epoch, s": times[3] - times[2],
                "padding, %": 100 * epoch.padding(),
                "peak memory, MB": peak_memory() / 1e6,
            }
        )
    return found


def deliver(args: argparse.Namespace, folder: Path, rows: int, workers: int) -> dict[str, Any]:
    """Batches as the loop of training takes them, but for training itself."""
    from flaxformer_min.data.batches import TrainingBatches, shard_batch
    from flaxformer_min.data.encoding import EncodedPairs

    devices = max(n for n in range(1, cores() + 1) if rows % n == 0)
    batches = TrainingBatches(EncodedPairs.load(folder), ROW, rows, seed=0, workers=workers)
    epoch = batches.epoch(0)  # planned already when the clock starts
    begin = time.perf_counter()
    shard_batch(next(batches), devices)
    since, delivered = time.perf_counter(), 0
    while time.perf_counter() - since < args.seconds:
        shard_batch(next(batches), devices)
        delivered += 1
    seconds = time.perf_counter() - since
    batches.close()
    tokens = epoch.encoded.target.lengths.sum() / len(epoch) * delivered
    return {
        "rows": rows,
        "workers": workers,
        "first batch after, s": since - begin,
        "batches/s": delivered / seconds,
        "pairs/s": len(epoch.encoded) / len(epoch) * delivered / seconds,
        "target tokens/s": float(tokens / seconds),
        f"of {args.consumes:,.0f}": float(tokens / seconds / args.consumes),
        f"of {GPU:,}": float(tokens / seconds / GPU),
        "peak memory, MB": peak_memory() / 1e6,
    }


if __name__ == "__main__":
    main()
