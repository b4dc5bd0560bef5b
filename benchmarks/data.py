"""The speed of the data pipeline alone, compared with what training consumes.

    python benchmarks/data.py --corpus text:DIR --languages en-de --pairs 1000000

The training split, repeated up to `--pairs` pairs, is (a) tokenized and encoded, first half of it
and then all, which shows whether memory depends on its size; (b) packed into the rows of an epoch;
(c) delivered by `TrainingBatches` and sharded over devices, with and without worker processes, for
a few seconds each. An epoch that ends in this time is followed by the next, with new workers. The
columns "of ..." are the target tokens delivered per second divided by those that training consumes:
`--consumes` on this machine, and 500,000 on a large GPU. The default text is the embedded corpus.
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
"""Target tokens per second that training on one GPU is expected to consume at most."""

ROW = (64, 64)


@dataclasses.dataclass(frozen=True)
class Repeated(Sequence):
    """`pairs`, repeated until there are `count`."""

    pairs: Sequence[tuple[str, str]]
    count: int

    def __len__(self) -> int:
        """Number of pairs."""
        return self.count

    def __getitem__(self, wanted: slice) -> list[tuple[str, str]]:
        """Return the pairs of a slice."""
        start, stop, _ = wanted.indices(self.count)
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
    title = f"The data of {args.corpus}, rows of {ROW[0]} and {ROW[1]} tokens; "
    report_parts(title + machine("grain", "sentencepiece", "numpy"), parts, args.json)


def encode(args: argparse.Namespace, folder: Path, count: int) -> dict[str, Any]:
    """Encode text to token ids on disk, as the first start of training does."""
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
    """Plan two epochs. The first one packs the pairs; the others only shuffle rows."""
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
    """Take batches as the training loop does, without training."""
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
