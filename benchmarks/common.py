"""What the benchmarks share: arguments and text, contenders that run in turn, costs, tables."""

import argparse
import contextlib
import json
import multiprocessing
import multiprocessing.connection
import os
import platform
import resource
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
    "multi30k": {"num_layers": 4, "d_model": 128, "d_ff": 256, "num_heads": 4},
    "wide": {"num_layers": 2, "d_model": 512, "d_ff": 2048, "num_heads": 8},
    "base": {"num_layers": 6, "d_model": 512, "d_ff": 2048, "num_heads": 8},
    "big": {"num_layers": 6, "d_model": 1024, "d_ff": 4096, "num_heads": 16},
}
"""That of configs/multi30k_en_de.py, two layers as wide as the paper's, for a CPU, and the paper's
own; all but the vocabulary."""

Run = Callable[[], Mapping[str, Any]]
"""One timed run of a contender: gives what it did ("tokens", ...) and "seconds"."""


def _serve(connection: Any, make: Callable[..., Run], arguments: tuple, keeps_memory: bool) -> None:
    """The child: prepare once, then one run for each word that comes through the pipe."""
    _begin_group(keeps_memory)
    since = time.perf_counter()
    run = make(*arguments)
    run()
    connection.send(time.perf_counter() - since)
    while connection.recv():
        connection.send(run())


def _begin_group(keeps_memory: bool = True) -> None:
    """With what it starts, such as compilers, a child is ended as one."""
    from flaxformer_min.runtime.memory import tune_malloc

    os.setpgrp()
    if keeps_memory:
        tune_malloc()
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    """Also in the middle of a run, and when the parent is killed."""
    multiprocessing.connection.wait([multiprocessing.parent_process().sentinel])
    os.killpg(0, signal.SIGKILL)


class Contender:
    """A program to be timed, in a process of its own, so that threads and memory are its own.

    `make(*arguments)` prepares and gives the `Run`. The first run, compiling included, is over when
    the constructor returns; `first_seconds` says how long that took. The process ends when this one
    does, however that happens. It has the memory settings that our programs have, for they help the
    peers, too; without `keeps_memory` it has those of any Python program.
    """

    def __init__(
        self,
        name: str,
        make: Callable[..., Run],
        *arguments: Any,
        patience: float | None = None,
        keeps_memory: bool = True,
    ):
        """Start the process and wait for its first run, or raise TimeoutError after `patience` s.

        RuntimeError where it fails.
        """
        self.name, self.runs = name, []
        self._process, self._connection = _start(True, _serve, make, arguments, keeps_memory)
        if not self._connection.poll(patience):
            _kill(self._process)
            raise TimeoutError(f"{name} was not ready after {patience:.0f} s.")
        self.first_seconds: float = _received(self._connection, name)

    def run(self) -> None:
        """One more timed run; the process sleeps before and after."""
        self._connection.send(True)
        self.runs.append(_received(self._connection, self.name))

    def median(self, name: str) -> float:
        """Of all runs."""
        return statistics.median(run[name] for run in self.runs)

    def close(self) -> None:
        """End the process."""
        self._connection.send(False)
        self._process.join()
        _kill(self._process)


def alone(function: Callable, *arguments: Any) -> Any:
    """What `function(*arguments)` gives, in a process of its own: its peak of memory is its own.

    RuntimeError where it fails, or is killed, as for want of memory.
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
    """A new process, and this end of the pipe whose other end is its first argument.

    One that is a `daemon` is ended at exit, whatever happens, and must not have workers.
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
        raise RuntimeError(f"{name} failed; its own message stands above.") from None


def _kill(process: BaseProcess) -> None:
    """The process, if it lives, and what it started."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.kill()
    process.join()


def peak_memory() -> int:
    """Bytes this process had resident at most."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def alternate(contenders: Sequence[Contender], rounds: int) -> None:
    """Run all in turn, so that a slow moment of the machine meets each of them alike."""
    for number in range(rounds):
        for contender in contenders:
            contender.run()
        seconds = "  ".join(f"{c.name} {c.runs[-1]['seconds']:.2f} s" for c in contenders)
        print(f"round {number + 1}: {seconds}", file=sys.stderr, flush=True)


def arguments(doc: str, split: str) -> argparse.ArgumentParser:
    """A parser with what every comparison asks for: text of this split, sizes, rounds, device."""
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
    """The pairs that `--corpus` and `--languages` name."""
    from flaxformer_min.data.corpora import read_pairs

    return read_pairs(args.corpus, split, args.languages)


def make_tokenizer(args: argparse.Namespace, folder: Path) -> Any:
    """Learned from the first pairs of the training split."""
    from flaxformer_min.data.tokenizer import train_tokenizer

    texts = (text for pair in read_split(args, "train")[:30_000] for text in pair)
    return train_tokenizer(texts, args.vocab_size, folder / "tokenizer.model")


def flops_of_source(sizes: Mapping[str, int], lengths: np.ndarray) -> float:
    """Floating-point operations of encoding sentences, and of their keys and values for the target.

    Here and below a product of [a b] and [b c] counts 2abc; softmax, norms, dropout and embeddings
    count none, nor does attention to what is masked.
    """
    d = sizes["d_model"]
    return float(
        (lengths * _flops_of_token(sizes) + 4 * d * sizes["num_layers"] * lengths**2).sum()
    )


def flops_of_target(
    sizes: Mapping[str, int], vocab_size: int, lengths: np.ndarray, source_lengths: np.ndarray
) -> float:
    """The same of reading, or writing one by one, the translations of such sources."""
    d = sizes["d_model"]
    looked_at = lengths * (lengths + 1) / 2 + lengths * source_lengths
    per_token = _flops_of_token(sizes) + 2 * d * vocab_size
    return float((lengths * per_token + 4 * d * sizes["num_layers"] * looked_at).sum())


def _flops_of_token(sizes: Mapping[str, int]) -> int:
    """Self-attention 8 d², feed forward 4 d d_ff; of cross-attention keys and values for a source
    token, query and output for a target token, 4 d² either way."""
    d = sizes["d_model"]
    return sizes["num_layers"] * (12 * d**2 + 4 * d * sizes["d_ff"])


def cores() -> int:
    """Cores this process may use."""
    return len(os.sched_getaffinity(0))


def machine(*packages: str) -> str:
    """One line: processor, cores, load, Python, versions, date."""
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
    """FLOP/s of a product of two square matrices in jax, the best of `repeats`."""
    import jax
    import jax.numpy as jnp

    x = jnp.ones((size, size), dtype)
    return 2 * size**3 / _best(jax.jit(jnp.matmul), (x, x), repeats)


def copy_rate(size: int = 1 << 26, repeats: int = 10) -> float:
    """Bytes/s, read and written together, of adding 1 to `size` float32 numbers in jax."""
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
    """Rows of one kind as a Markdown table; a column is as wide as its widest cell.

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
    """Print the table; write title and rows as JSON where a file was asked for."""
    report_parts(title, {"rows": rows}, file)


def report_parts(
    title: str, parts: Mapping[str, Sequence[Mapping[str, Any]]], file: Path | None
) -> None:
    """The same for several tables, each under its name."""
    print(f"\n{title}")
    for name, rows in parts.items():
        print(f"\n{name}:\n\n{table(rows)}" if len(parts) > 1 else f"\n{table(rows)}")
    if file is not None:
        file.write_text(json.dumps({"title": title, **parts}, indent=2) + "\n")
