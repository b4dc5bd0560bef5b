"""Common parts of the benchmarks: arguments and text, contenders, costs, tables."""

import argparse
import contextlib
import json
import multiprocessing
import multiprocessing.connection
import os
import platform
import re
import signal
import statistics
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from importlib import metadata
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import numpy as np

SIZES = {
    "tiny": {"num_layers": 1, "d_model": 16, "d_ff": 32, "num_heads": 2},
    "multi30k": {"num_layers": 4, "d_model": 128, "d_ff": 256, "num_heads": 4},
    "wide": {"num_layers": 2, "d_model": 512, "d_ff": 2048, "num_heads": 8},
    "base": {"num_layers": 6, "d_model": 512, "d_ff": 2048, "num_heads": 8},
    "big": {"num_layers": 6, "d_model": 1024, "d_ff": 4096, "num_heads": 16},
}
"""Sizes without the vocabulary: one to try a benchmark, the model of configs/multi30k_en_de.py, two
layers as wide as the paper's, for a CPU, and the paper's models."""

Run = Callable[[], Mapping[str, Any]]
"""One timed run of a contender: returns "seconds" and its work, as "tokens"."""


def _serve(connection: Any, make: Callable[..., Run], arguments: tuple, heaps: int) -> None:
    """In the child: prepare once, then run once for each message of the pipe."""
    _begin_group(heaps)
    since = time.perf_counter()
    run = make(*arguments)
    run()
    connection.send(time.perf_counter() - since)
    while connection.recv():
        connection.send(run())


def _begin_group(heaps: int = 1) -> None:
    """Make the child the leader of a group, which ends together with all that it starts."""
    from flaxformer_min.system.memory import tune_malloc

    os.setpgrp()
    if heaps:
        tune_malloc(heaps)
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    """End the group when the parent has ended, even if it was killed."""
    multiprocessing.connection.wait([multiprocessing.parent_process().sentinel])
    os.killpg(0, signal.SIGKILL)


def heaps_of_ours(beam: int) -> int:
    """Return the heaps that the command line gives a search with so many hypotheses."""
    return cores() if beam == 1 else 1


class Contender:
    """A program to be timed, in a process of its own with its own threads and memory.

    `make(*arguments)` prepares and returns the `Run`. The constructor returns after the first run,
    compilation included, which took `first_seconds`. The process ends with this one, in any case.
    It has the memory settings of our programs, with so many `heaps`, which help PyTorch, too; with
    none, those of any Python program.
    """

    def __init__(
        self,
        name: str,
        make: Callable[..., Run],
        *arguments: Any,
        patience: float | None = None,
        heaps: int = 1,
    ):
        """Start the process and wait for its first run.

        Raises TimeoutError after `patience` seconds, RuntimeError if the run fails.
        """
        self.name, self.runs = name, []
        self._process, self._connection = _start(True, _serve, make, arguments, heaps)
        if not self._connection.poll(patience):
            _kill(self._process)
            raise TimeoutError(f"{name} was not ready after {patience:.0f} s.")
        self.first_seconds: float = _received(self._connection, name)

    def run(self) -> None:
        """Take one more timed run; the process sleeps before and after."""
        self._connection.send(True)
        self.runs.append(_received(self._connection, self.name))

    def median(self, name: str) -> float:
        """Return the median of a measure over all runs."""
        return statistics.median(run[name] for run in self.runs)

    def close(self) -> None:
        """End the process."""
        self._connection.send(False)
        self._process.join()
        _kill(self._process)


def peers_of(device: str, start: Callable[[], list[Contender]]) -> list[Contender]:
    """Return the peers that `start` starts; on a GPU, none if they fail, with a line that says why.

    A machine may have a GPU, but no PyTorch that can use it.
    """
    try:
        return start()
    except RuntimeError as error:
        if device == "cpu":
            raise
        print(f"Left out: {error}", file=sys.stderr)
        return []


def alone(function: Callable, *arguments: Any) -> Any:
    """Return `function(*arguments)`, computed in a process of its own with its own memory peak.

    Raises RuntimeError if it fails or is killed, as for lack of memory.
    """
    process, connection = _start(False, _answer, function, arguments)
    try:
        found = _received(connection, function.__name__)
        process.join()
        return found
    finally:
        _kill(process)


def _answer(connection: Any, function: Callable, arguments: tuple) -> None:
    _begin_group()
    connection.send(function(*arguments))


def _start(daemon: bool, target: Callable, *arguments: Any) -> tuple[BaseProcess, Any]:
    """Return a new process and our end of the pipe whose other end is its first argument.

    A `daemon` is ended at exit in any case, and must not have workers.
    """
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=target, args=(theirs, *arguments), daemon=daemon)
    process.start()
    theirs.close()
    return process, ours


def _received(connection: Any, name: str) -> Any:
    try:
        return connection.recv()
    except EOFError:
        raise RuntimeError(f"{name} failed; see its own message above.") from None


def _kill(process: BaseProcess) -> None:
    """Kill the process, if it is alive, and all that it started."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.kill()
    process.join()


def peak_memory() -> int:
    """Return the peak of this process's resident memory in bytes.

    `resource.getrusage` would return the parent's peak at the start of this process, if it is more.
    """
    status = Path("/proc/self/status").read_text()
    return 1024 * int(re.search(r"VmHWM:\s+(\d+) kB", status)[1])


def alternate(contenders: Sequence[Contender], rounds: int) -> None:
    """Run all in turn, so that slow moments of the machine affect them equally."""
    for number in range(rounds):
        for contender in contenders:
            contender.run()
        seconds = "  ".join(f"{c.name} {c.runs[-1]['seconds']:.2f} s" for c in contenders)
        print(f"round {number + 1}: {seconds}", file=sys.stderr, flush=True)


def fastest(tried: Sequence[Contender]) -> Contender:
    """Return the fastest of these, without its runs so far; the others end.

    By the median of three rounds, because a single one would choose by noise.
    """
    alternate(tried, 3)
    best, *slower = sorted(tried, key=lambda contender: contender.median("seconds"))
    for contender in slower:
        contender.close()
    best.runs.clear()
    return best


def ratio(peer: Contender, ours: Contender) -> float:
    """Return how many times as long the peer takes: the median over the rounds."""
    return statistics.median(
        slow["seconds"] / fast["seconds"] for fast, slow in zip(ours.runs, peer.runs, strict=True)
    )


def arguments(doc: str, split: str) -> argparse.ArgumentParser:
    """Return a parser of the common options: text of this split, sizes, rounds, device."""
    parser = argparse.ArgumentParser(description=doc.split("\n")[0])
    parser.add_argument("--corpus", default="cldr:en-ko", help=f"its {split} split is used")
    parser.add_argument("--languages", default="", help="of a folder of text, as en-de")
    parser.add_argument("--size", choices=SIZES, default="multi30k")
    parser.add_argument("--vocab-size", type=int, default=8000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--device", choices=("cpu", "gpu"), default="cpu")
    parser.add_argument("--json", type=Path, help="write the rows here")
    return parser


def read_split(args: argparse.Namespace, split: str) -> Sequence[tuple[str, str]]:
    """Return the pairs of `--corpus` and `--languages`."""
    from flaxformer_min.data.corpora import read_pairs

    return read_pairs(args.corpus, split, args.languages)


def make_tokenizer(args: argparse.Namespace, folder: Path, pieces: int | None = None) -> Any:
    """Return a tokenizer of `pieces` or `--vocab-size` pieces, trained on the first pairs."""
    from flaxformer_min.data.tokenizer import train_tokenizer

    texts = (text for pair in read_split(args, "train")[:30_000] for text in pair)
    return train_tokenizer(texts, pieces or args.vocab_size, folder / "tokenizer.model")


def flops_of_source(sizes: Mapping[str, int], lengths: np.ndarray) -> float:
    """Return the FLOPs of encoding sentences, and of their keys and values for the target.

    Here and below a product of [a b] and [b c] counts as 2abc; softmax, norms, dropout, embeddings
    and attention to masked keys count as nothing.
    """
    d = sizes["d_model"]
    return float(
        (lengths * _flops_of_token(sizes) + 4 * d * sizes["num_layers"] * lengths**2).sum()
    )


def flops_of_target(
    sizes: Mapping[str, int], vocab_size: int, lengths: np.ndarray, source_lengths: np.ndarray
) -> float:
    """Return the FLOPs of reading, or generating, the translations of such sources."""
    d = sizes["d_model"]
    attended = lengths * (lengths + 1) / 2 + lengths * source_lengths
    per_token = _flops_of_token(sizes) + 2 * d * vocab_size
    return float((lengths * per_token + 4 * d * sizes["num_layers"] * attended).sum())


def _flops_of_token(sizes: Mapping[str, int]) -> int:
    """Return the FLOPs of a token in all layers, without attention to other tokens.

    Self-attention takes 8 d², the feed-forward network 4 d d_ff, cross-attention 4 d²: keys and
    values of a source token, query and output of a target token.
    """
    d = sizes["d_model"]
    return sizes["num_layers"] * (12 * d**2 + 4 * d * sizes["d_ff"])


def cores() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0))


def machine(*packages: str) -> str:
    """Describe the machine in a line: processor, cores, load, Python, versions, date."""
    model = next(
        (
            line.split(":")[1].strip()
            for line in Path("/proc/cpuinfo").read_text().splitlines()
            if line.startswith("model name")
        ),
        platform.machine(),
    )
    versions = ", ".join(f"{name} {metadata.version(name)}" for name in packages)
    return (
        f"{cores()} cores of {model}, load {os.getloadavg()[0]:.1f}, Python "
        f"{platform.python_version()}, {versions}, {time.strftime('%Y-%m-%d')}"
    )


def matrix_product_rate(size: int = 2048, repeats: int = 10, dtype: str = "float32") -> float:
    """Return the best FLOP/s of a product of two square matrices of random numbers in jax.

    A GPU multiplies ones faster than random numbers, which take more power.
    """
    import jax
    import jax.numpy as jnp

    x = jax.random.normal(jax.random.key(0), (size, size), dtype)
    return 2 * size**3 / _best(jax.jit(jnp.matmul), (x, x), repeats)


def copy_rate(size: int = 1 << 26, repeats: int = 10) -> float:
    """Return the bytes/s, read and written, of adding 1 to `size` float32 numbers in jax."""
    import jax
    import jax.numpy as jnp

    x = jnp.ones(size)
    return 8 * size / _best(jax.jit(lambda x: x + 1), (x,), repeats)


def _best(function: Callable, arguments: tuple, repeats: int) -> float:
    import jax

    jax.block_until_ready(function(*arguments))
    seconds = []
    for _ in range(repeats):
        since = time.perf_counter()
        jax.block_until_ready(function(*arguments))
        seconds.append(time.perf_counter() - since)
    return min(seconds)


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return rows with the same keys as a Markdown table.

    >>> print(table([{"who": "ours", "tokens/s": 1234.5}, {"who": "peer", "tokens/s": 99}]))
    | who  | tokens/s |
    |------|---------:|
    | ours |    1,234 |
    | peer |       99 |
    """
    names = list(rows[0])
    cells = [[_cell(row.get(name)) for name in names] for row in rows]
    widths = [max(map(len, column)) for column in zip(names, *cells, strict=True)]
    numeric = [not isinstance(rows[0][name], str) for name in names]

    def line(texts: Sequence[str]) -> str:
        padded = [
            text.rjust(width) if right else text.ljust(width)
            for text, width, right in zip(texts, widths, numeric, strict=True)
        ]
        return "| " + " | ".join(padded) + " |"

    rule = [
        "-" * (width + 1) + (":" if right else "-")
        for width, right in zip(widths, numeric, strict=True)
    ]
    return "\n".join([line(names), "|" + "|".join(rule) + "|", *map(line, cells)])


def _cell(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:,.2f}" if abs(value) < 100 else f"{value:,.0f}"
    return "" if value is None else f"{value:,}" if isinstance(value, int) else str(value)


def report(title: str, rows: Sequence[Mapping[str, Any]], file: Path | None) -> None:
    """Print the table, and write title and rows as JSON if a file is given."""
    report_parts(title, {"rows": rows}, file)


def report_parts(
    title: str, parts: Mapping[str, Sequence[Mapping[str, Any]]], file: Path | None
) -> None:
    """Report several tables, each with its name."""
    print(f"\n{title}")
    for name, rows in parts.items():
        print(f"\n{name}:\n\n{table(rows)}" if len(parts) > 1 else f"\n{table(rows)}")
    if file is not None:
        file.write_text(json.dumps({"title": title, **parts}, indent=2) + "\n")


if __name__ == "__main__":
    # The options of train.py for a size: python benchmarks/common.py base
    print(*(f"--model.{name.replace('_', '-')} {n}" for name, n in SIZES[sys.argv[1]].items()))
