"""The server under load: requests a second and latencies, beside CTranslate2 in the same server.

Each client sends one line a request and waits for its translation before it sends the next one, on
a connection of its own. The clients are a process beside the server, so they share its cores. Both
servers alternate, and so does `Translator.translate` of all lines at once in the process of the
first one, which is what a server can reach at best.
"""

import argparse
import asyncio
import json
import math
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from common import Contender, Run, alone, cores, machine, peak_memory, report
from trained import describe, settings_of

CLIENTS = (1, 4, 16, 64)


def main() -> None:
    """Measure and print a table for each number of clients."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--run", type=Path, required=True, help="a trained run")
    parser.add_argument("--source", type=Path, required=True, help="file of lines to translate")
    parser.add_argument("--requests", type=int, default=1000, help="at most, of all clients")
    parser.add_argument("--clients", type=int, nargs="+", default=CLIENTS)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--no-peers", action="store_true", help="without CTranslate2")
    parser.add_argument("--json", type=Path, help="write the rows here")
    args = parser.parse_args()
    from flaxformer_min import RunFolder

    lines = args.source.read_text(encoding="utf-8").splitlines()[: args.requests]
    with tempfile.TemporaryDirectory() as scratch:
        contenders = [Contender("flaxformer_min", ours, args.run, lines)]
        if not args.no_peers:
            folder = Path(scratch) / "exported"
            contenders.append(Contender("CTranslate2", ctranslate2, args.run, folder))
        rows = [
            row for clients in args.clients for row in measure(args, contenders, lines, clients)
        ]
        for contender in contenders:
            contender.close()
    title = (
        f"{len(lines):,} lines, one a request, {describe(RunFolder(args.run).config())}, beam "
        f"{RunFolder(args.run).config().decoding.beam_size}; {machine('jax', 'uvicorn')}"
    )
    report(title, rows, args.json)


def measure(
    args: argparse.Namespace, contenders: Sequence[Contender], lines: Sequence[str], clients: int
) -> list[dict[str, Any]]:
    """Return a row for each server with so many clients: medians of the rounds."""
    # A few clients cannot make use of batches, and would take long for all lines.
    lines = lines[: max(math.ceil(len(lines) * min(clients / 16, 1)), clients)]
    found: dict[str, list[dict[str, Any]]] = {each.name: [] for each in contenders}
    for number in range(args.rounds + 1):
        for contender in contenders:
            contender.run()
            address = contender.runs[-1]["address"]
            figures = alone(load, address, list(lines), clients)
            if number:  # the first round compiles what is missing
                found[contender.name].append({**contender.runs[-1], **figures})
    rows = []
    for name, runs in found.items():
        ratios = [run["requests/s"] / run["at once"] for run in runs if run["at once"]]
        row = {"clients": clients, "who": name}
        for figure in ("requests/s", "p50, ms", "p99, ms"):
            row[figure] = statistics.median(run[figure] for run in runs)
        row["of one call"] = statistics.median(ratios) if ratios else None
        row["peak MB"] = runs[-1]["peak"] / 1e6
        rows.append(row)
        print(row, file=sys.stderr, flush=True)
    return rows


def ours(run: Path, lines: Sequence[str]) -> Run:
    """Our server; a run of it translates all lines at once, to compare with."""
    from flaxformer_min.system.compilation import enable_compilation_cache
    from flaxformer_min.system.devices import configure_cpu_devices
    from flaxformer_min.system.files import cache_folder

    configure_cpu_devices()
    enable_compilation_cache(cache_folder())
    from flaxformer_min import Translator
    from flaxformer_min.server.pair import Pair

    class Ours(Pair):
        def programs(self):  # the first round compiles those that are needed
            yield partial(self.best, lines[:1])

    translator = Translator.load(run)
    address = serve(Ours(translator, "xx", "yy"))
    translator.translate(lines)

    def timed() -> dict[str, Any]:
        since = time.perf_counter()
        translator.translate(lines)
        at_once = len(lines) / (time.perf_counter() - since)
        return {"seconds": 0.0, "address": address, "at once": at_once, "peak": peak_memory()}

    return timed


def ctranslate2(run: Path, folder: Path) -> Run:
    """The same server, with CTranslate2 in place of our search."""
    import ctranslate2
    import sentencepiece

    from flaxformer_min import RunFolder, export
    from flaxformer_min.decoding.results import Translation
    from flaxformer_min.server.pair import Pair

    export(run, folder, format="ctranslate2")
    beam = RunFolder(run).config().decoding.beam_size
    penalty, extra = settings_of((folder / "README.md").read_text(encoding="utf-8"))
    translator = ctranslate2.Translator(str(folder), inter_threads=cores(), intra_threads=1)
    source, target = (
        sentencepiece.SentencePieceProcessor(str(folder / f"{side}.model"))
        for side in ("source", "target")
    )

    class Peer(Pair):
        source, target, most = "xx", "yy", 64

        def __init__(self) -> None:
            pass

        def best(self, sentences: list[str]) -> list[list[Translation]]:
            pieces = source.encode(sentences, out_type=str)
            found = translator.translate_batch(
                pieces,
                beam_size=beam,
                length_penalty=penalty,
                disable_unk=True,
                max_batch_size=32,
                max_decoding_length=max(map(len, pieces)) + extra,
            )
            texts = target.decode([each.hypotheses[0] for each in found])
            return [[Translation(text, 0.0, 0.0)] for text in texts]

        def too_long(self, sentences: Sequence[str]) -> None:
            return None

        def programs(self):
            yield partial(self.best, ["x"])

    address = serve(Peer())
    return lambda: {"seconds": 0.0, "address": address, "at once": None, "peak": peak_memory()}


def serve(pair: Any) -> str:
    """Start a server of one pair, which ends with the process, and return its address."""
    from flaxformer_min.server.app import Access
    from flaxformer_min.server.requests import Limits
    from flaxformer_min.server.run import Server

    server = Server([pair], Access(), Limits(deadline=600.0))  # for what is compiled meanwhile
    server.start("127.0.0.1", 0)
    return server.address


def load(address: str, lines: list[str], clients: int) -> dict[str, float]:
    """Return requests a second and latencies of clients that share the lines."""
    host, port = urlsplit(address).netloc.split(":")
    seconds: list[float] = []
    waiting = iter(lines)

    async def client() -> None:
        reader, writer = await asyncio.open_connection(host, int(port))
        for line in waiting:
            body = json.dumps({"q": line, "source": "xx", "target": "yy"}).encode()
            head = f"POST /translate HTTP/1.1\r\nHost: {host}\r\nContent-Length: {len(body)}\r\n"
            since = time.perf_counter()
            writer.write(head.encode() + b"Content-Type: application/json\r\n\r\n" + body)
            answer = await reader.readuntil(b"\r\n\r\n")
            assert answer.startswith(b"HTTP/1.1 200"), answer
            length = answer.lower().split(b"content-length:")[1].split(b"\r\n")[0]
            content = json.loads(await reader.readexactly(int(length)))
            seconds.append(time.perf_counter() - since)
            assert content["translatedText"], content
        writer.close()

    async def all_clients() -> None:
        await asyncio.gather(*(client() for _ in range(clients)))

    since = time.perf_counter()
    asyncio.run(all_clients())
    total = time.perf_counter() - since
    seconds.sort()
    return {
        "requests/s": len(lines) / total,
        "p50, ms": 1000 * seconds[len(seconds) // 2],
        "p99, ms": 1000 * seconds[math.ceil(len(seconds) * 0.99) - 1],
    }


if __name__ == "__main__":
    main()
