"""Decoding of a trained run beside CTranslate2, from text to text on both sides.

CTranslate2 has the same weights, through this package's own export, and is given what suits it:
sentences sorted by length, the better number of threads and batch size, and for each batch a limit
of its own. On a GPU ours computes in bfloat16, CTranslate2 in float16; it is left out if it fails
there. `benchmarks/decoding.py --run RUN` calls it.
"""

import argparse
import re
import tempfile
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from common import (
    Contender,
    Run,
    alternate,
    cores,
    fastest,
    heaps_of_ours,
    machine,
    peak_memory,
    peers_of,
    ratio,
    report,
)

OURS = "flaxformer_min"

TYPES = {"cpu": ("float32", "int8"), "gpu": ("float16", "int8_float16")}
"""Types that CTranslate2 is measured with; ratios are to the first."""

BATCHES = {"cpu": (32, 64), "gpu": (128, 256, 512)}
"""Batch sizes of CTranslate2; the fastest counts."""


def main(args: argparse.Namespace) -> None:
    """Measure and print one table."""
    from flaxformer_min import RunFolder, export
    from flaxformer_min.data.corpora import read_pairs

    config = RunFolder(args.run).config()
    corpus, languages = args.corpus, args.languages
    if not languages and corpus.startswith("text:"):
        languages = config.data.languages
    pairs = read_pairs(corpus, "test", languages)[: args.sentences]
    lines, references = zip(*pairs, strict=True)
    with tempfile.TemporaryDirectory() as scratch:
        folder, compiled = Path(scratch) / "exported", Path(scratch) / "compiled"
        export(args.run, folder, format="ctranslate2")
        rows = []
        for beam in args.beam_sizes:
            rows += measure(args, folder, compiled, lines, references, beam)
    title = (
        f"{len(lines):,} lines of {corpus}, text to text, {describe(config)}; "
        f"{machine('jax', 'ctranslate2')}"
    )
    report(title, rows, args.json)


def describe(config: Any) -> str:
    """Return the sizes of a run's model in words."""
    model = config.model
    return f"{model.num_layers} layers, d_model {model.d_model}, vocabulary {model.vocab_size:,}"


def measure(
    args: argparse.Namespace,
    folder: Path,
    compiled: Path,
    lines: Sequence[str],
    references: Sequence[str],
    beam: int,
) -> list[dict[str, Any]]:
    """Return the rows of one beam size: ours, and CTranslate2's in two types."""
    from sacrebleu.metrics import BLEU

    contenders, uncompiled = _ours_with_programs(args, lines, beam, compiled)
    peers = peers_of(args.device, partial(_peers, args.device, folder, lines, beam))
    alternate(contenders + peers, args.rounds)
    rows = []
    for contender in contenders + peers:
        last, first = contender.runs[-1], contenders[0]
        rows.append(
            {
                "who": contender.name,
                "beam": beam,
                "seconds": contender.median("seconds"),
                "fastest": min(run["seconds"] for run in contender.runs),
                "slowest": max(run["seconds"] for run in contender.runs),
                "sentences/s": len(lines) / contender.median("seconds"),
                f"it : {TYPES[args.device][0]}, same round": (
                    ratio(peers[0], contender) if peers else None
                ),
                "start and first run, s": contender.first_seconds,
                "nothing compiled, s": uncompiled.get(contender.name),
                "peak MB": last["peak"] / 1e6,
                "BLEU": BLEU().corpus_score(last["found"], [list(references)]).score,
                "equal": sum(map(str.__eq__, last["found"], first.runs[-1]["found"])),
            }
        )
        contender.close()
    return rows


def _peers(device: str, folder: Path, lines: Sequence[str], beam: int) -> list[Contender]:
    """Start CTranslate2 in each type, in the batch size and number of threads that suit it best."""
    threads = sorted({(cores(), 1), (1, cores())}) if device == "cpu" else [(1, 1)]
    peers = []
    for kind in TYPES[device]:
        tried = [
            Contender(f"CTranslate2 {kind}{_in(size, inter, intra)}", ctranslate2, *peer)
            for size in BATCHES[device]
            for inter, intra in threads
            for peer in [(folder, device, kind, lines, beam, size, inter, intra)]
        ]
        peers.append(fastest(tried))
    return peers


def _ours_with_programs(
    args: argparse.Namespace, lines: Sequence[str], beam: int, compiled: Path
) -> tuple[list[Contender], dict[str, float]]:
    """Return our contenders, and the seconds to the end of the first run of a process before each.

    The command line keeps compiled programs, so most processes find those of an earlier one.
    """
    if args.device == "gpu":
        kinds = {OURS: (True, "bfloat16"), "  exact search": (False, "bfloat16")}
    else:
        kinds = {
            OURS: (True, None),
            "  bfloat16 products": (True, "bfloat16"),
            "  exact search": (False, None),
            "  exact search, bfloat16 products": (False, "bfloat16"),
        }
    contenders, uncompiled = [], {}
    for name, (early_stopping, dtype) in kinds.items():
        if beam == 1 and not early_stopping:
            continue
        ours_so = ours, args.run, lines, beam, compiled, early_stopping, dtype
        start = partial(Contender, name, *ours_so, heaps=heaps_of_ours(beam))
        earlier = start()
        earlier.close()
        uncompiled[name] = earlier.first_seconds
        contenders.append(start())
    return contenders, uncompiled


def _in(size: int, inter: int, intra: int) -> str:
    return f", {size} a batch, {inter} × {intra} threads"


def ours(
    run: Path,
    lines: Sequence[str],
    beam: int,
    compiled: Path,
    early_stopping: bool,
    dtype: str | None,
) -> Run:
    """`Translator.translate`, as the command line calls it."""
    from flaxformer_min.system.compilation import enable_compilation_cache
    from flaxformer_min.system.devices import configure_cpu_devices

    configure_cpu_devices()
    enable_compilation_cache(compiled)

    from flaxformer_min.decoding.translator import Translator

    translator = Translator.load(run, dtype=dtype)

    def timed() -> dict[str, Any]:
        since = time.perf_counter()
        found = translator.translate(lines, beam_size=beam, early_stopping=early_stopping)
        return {"seconds": time.perf_counter() - since, "found": found, "peak": peak_memory()}

    return timed


def settings_of(readme: str) -> tuple[float, int]:
    """Return the length penalty of an export's README.md, and how much longer translations get."""
    penalty = re.search(r"length_penalty=([\d.]+)", readme)
    extra = re.search(r"max_decoding_length=.*\+ (\d+)", readme)
    return float(penalty[1]), int(extra[1])


def ctranslate2(
    folder: Path,
    device: str,
    compute_type: str,
    lines: Sequence[str],
    beam: int,
    batch_size: int,
    inter_threads: int,
    intra_threads: int,
) -> Run:
    """Tokenizing, `translate_batch` with the settings of the export's README.md, detokenizing.

    Without what it suppresses, which this model never prefers, and which would cost the peer time.
    """
    import ctranslate2
    import sentencepiece

    translator = ctranslate2.Translator(
        str(folder),
        device="cpu" if device == "cpu" else "cuda",
        compute_type=compute_type,
        inter_threads=inter_threads,
        intra_threads=intra_threads,
    )
    source, target = (
        sentencepiece.SentencePieceProcessor(str(folder / f"{side}.model"))
        for side in ("source", "target")
    )
    penalty, extra = settings_of((folder / "README.md").read_text(encoding="utf-8"))

    def run() -> dict[str, Any]:
        since = time.perf_counter()
        pieces = source.encode(list(lines), out_type=str)
        order = sorted(range(len(lines)), key=lambda number: -len(pieces[number]))
        found, waiting = [""] * len(lines), []
        for first in range(0, len(order), batch_size):
            numbers = order[first : first + batch_size]
            results = translator.translate_batch(
                [pieces[number] for number in numbers],
                beam_size=beam,
                length_penalty=penalty,
                min_decoding_length=0,
                disable_unk=True,
                max_input_length=1024,
                max_decoding_length=len(pieces[numbers[0]]) + extra,
                asynchronous=True,
            )
            waiting.append((numbers, results))
        for numbers, results in waiting:
            best = [result.result().hypotheses[0] for result in results]
            for number, text in zip(numbers, target.decode(best), strict=True):
                found[number] = text
        seconds = time.perf_counter() - since
        return {"seconds": seconds, "found": found, "peak": peak_memory()}

    return run
