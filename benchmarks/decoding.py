"""Decoding beside Hugging Face's Marian, at equal sizes and lengths.

    python benchmarks/decoding.py --corpus text:DIR --languages en-de

Both models have the same sizes and random weights. Each translation has exactly as many tokens as
its reference, so that the work is the same, and the sentences of a batch end one after another as
they do in use. With `--lengths source` each has two tokens more than its source, so that they end
almost together. Ours reads and writes text; the peer reads token ids in sorted, padded batches and
returns ids. The peer runs twice: as installed, and with the memory settings of our programs; in
the number of threads and the batch size, ours or twice ours, in which it is fastest. On a GPU it
runs in both batch sizes, and is left out if PyTorch finds none. Without --corpus the sentences are
those of the embedded test set. Needs the extra `benchmarks`.

    python benchmarks/decoding.py --corpus text:DIR --run RUN

A trained run, from text to text, beside CTranslate2 with the same weights (trained.py). Needs the
extra `export`.
"""

import argparse
import tempfile
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import trained
from common import (
    SIZES,
    Contender,
    Run,
    alternate,
    arguments,
    copy_rate,
    cores,
    flops_of_source,
    flops_of_target,
    heaps_of_ours,
    machine,
    make_tokenizer,
    matrix_product_rate,
    peers_of,
    read_split,
    report,
)

EXTRA = 2
"""Tokens of a translation beyond those of its source, with `--lengths source`."""


def main() -> None:
    """Measure and print one table."""
    parser = arguments(__doc__, "test")
    parser.add_argument("--sentences", type=int, default=1000)
    parser.add_argument("--batch-size", type=int, default=64, help="sentences, of ours")
    parser.add_argument("--beam-sizes", type=int, nargs="+", default=[1, 4])
    parser.add_argument("--lengths", choices=("reference", "source"), default="reference")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--run", type=Path, help="a trained run, beside CTranslate2")
    parser.add_argument("--no-peers", action="store_true", help="measure only ours")
    args = parser.parse_args()
    if args.run is not None:
        return trained.main(args)
    with tempfile.TemporaryDirectory() as scratch:
        tokenizer = make_tokenizer(args, Path(scratch))
        lines, references = zip(*read_split(args, "test")[: args.sentences], strict=True)
        sources = tokenizer.encode_batch(lines)
        if args.lengths == "reference":
            lengths = [len(ids) for ids in tokenizer.encode_batch(references)]
        else:
            lengths = [len(ids) + EXTRA for ids in sources]
        rows = [
            row
            for beam in args.beam_sizes
            for row in measure(args, tokenizer, lines, sources, lengths, beam)
        ]
    packages = ["jax", *(["torch", "transformers"] if len(rows) > len(args.beam_sizes) else [])]
    title = (
        f"Decoding {len(lines):,} sentences of {args.corpus} into {sum(lengths):,} tokens, as long "
        f"as the {args.lengths}, size {args.size}, vocabulary {tokenizer.vocab_size:,}, "
        f"{args.dtype}; {machine(*packages)}"
    )
    report(title, rows, args.json)


def measure(
    args: argparse.Namespace,
    tokenizer: Any,
    lines: Sequence[str],
    sources: Sequence[list[int]],
    lengths: Sequence[int],
    beam: int,
) -> list[dict[str, Any]]:
    """Return the rows of one beam size: ours and the peer's, with the machine's bound."""
    # Longest first, so that sentences of similar lengths share a batch.
    ordered = sorted(zip(sources, lengths, strict=True), key=lambda pair: -len(pair[0]))
    settings = beam, args.size, args.batch_size, args.dtype
    mine = partial(Contender, "flaxformer_min", ours, tokenizer, lines, lengths, *settings)
    contenders = [mine(heaps=heaps_of_ours(beam))]
    if not args.no_peers:
        peers = partial(best_peers, args, ordered, tokenizer.vocab_size, beam)
        contenders += peers_of(args.device, peers)
    alternate(contenders, args.rounds)
    rates = [contender.median("tokens_per_second") for contender in contenders]
    best_peer = max(rates[1:], default=None)
    bound = bound_seconds(ordered, beam, tokenizer.vocab_size, args)
    rows = []
    for contender, rate in zip(contenders, rates, strict=True):
        seconds = contender.median("seconds")
        rows.append(
            {
                "who": contender.name,
                "beam": beam,
                "sentences/s": len(lines) / seconds,
                "tokens/s": rate,
                "start and first run, s": contender.first_seconds,
                "ratio to the best peer": rate / best_peer if best_peer else None,
                "share of the bound": bound / seconds,
            }
        )
        contender.close()
    return rows


def best_peers(
    args: argparse.Namespace, ordered: Sequence[Any], vocab_size: int, beam: int
) -> list[Contender]:
    """Start the peer twice, in the batch size and number of threads that suit it best.

    On a GPU, threads and memory settings make no difference: it starts once for each batch size.
    """
    peer = (marian, ordered, vocab_size, beam, args.size, args.device, args.dtype)
    sizes = args.batch_size, 2 * args.batch_size
    if args.device != "cpu":
        return [Contender(f"Marian, {size} sentences", *peer, size, 1) for size in sizes]
    tried = {
        (size, n): Contender(f"Marian with our memory settings{_in(size, n)}", *peer, size, n)
        for size in sizes
        for n in {1, cores()}
    }
    alternate(list(tried.values()), 1)
    best = min(tried, key=lambda setting: tried[setting].median("seconds"))
    fastest = tried.pop(best)
    for slower in tried.values():
        slower.close()
    name = f"Marian as installed{_in(*best)}"
    return [fastest, Contender(name, *peer, *best, heaps=0)]


def _in(size: int, threads: int) -> str:
    return f", {size} in {threads} threads"


def ours(
    tokenizer: Any,
    lines: Sequence[str],
    lengths: Sequence[int],
    beam: int,
    size: str,
    batch_size: int,
    dtype: str,
) -> Run:
    """Text to text with `Translator.translate`, as a user calls it, except for the lengths."""
    import jax
    import jax.numpy as jnp

    from flaxformer_min.system.devices import configure_cpu_devices

    configure_cpu_devices()  # as the command line does

    from flaxformer_min import Batch, ModelConfig, SearchConfig, Transformer, one_sentence_per_row
    from flaxformer_min.decoding.batches import BatchRunner
    from flaxformer_min.decoding.models import prepare_for_decoding
    from flaxformer_min.decoding.translator import Translator
    from flaxformer_min.tokens import PAD

    config = ModelConfig(vocab_size=tokenizer.vocab_size, dtype=dtype, **SIZES[size])
    one = one_sentence_per_row(jnp.array([[4, 3]]))
    params = jax.jit(Transformer(config).init)(jax.random.key(0), Batch(one, one))["params"]
    decoding = SearchConfig(batch_size=batch_size, length_penalty=1.0)

    class Limited(BatchRunner):
        """Every hypothesis ends at the limit of its line, and not before."""

        def _program(self, key, program, arrays):
            limits = np.array([lengths[line - 1] for line in arrays["line"]], np.int32)
            return super()._program(key, program, arrays | {"max_length": limits})

        def search(self, *arguments):
            for batch, found in super().search(*arguments):
                found_lengths = (found.ids[:, 0] != PAD).sum(1)
                assert found_lengths.tolist() == [lengths[line - 1] for line in batch]
                yield batch, found

    tokenizers = tokenizer, tokenizer
    model, params = prepare_for_decoding(Transformer(config), params)  # as `Translator.load` does
    translator = Translator([model], [params], tokenizers, decoding)
    translator.runner = Limited(translator.models[0], params)

    def run() -> dict[str, float]:
        since = time.perf_counter()
        translator.translate(lines, beam_size=beam, min_length=1 << 20)
        seconds = time.perf_counter() - since
        return {"seconds": seconds, "tokens_per_second": sum(lengths) / seconds}

    return run


def marian(
    ordered: Sequence[tuple[list[int], int]],
    vocab_size: int,
    beam: int,
    size: str,
    device: str,
    dtype: str,
    batch_size: int,
    threads: int,
) -> Run:
    """`generate` of a MarianMTModel for batches of these sources, each to its own length."""
    import torch
    from transformers import MarianConfig, MarianMTModel
    from transformers.generation import LogitsProcessor, LogitsProcessorList
    from transformers.utils import logging

    logging.set_verbosity_error()
    torch.set_num_threads(threads)
    sizes = SIZES[size]
    config = MarianConfig(
        vocab_size=vocab_size,
        d_model=sizes["d_model"],
        encoder_layers=sizes["num_layers"],
        decoder_layers=sizes["num_layers"],
        encoder_ffn_dim=sizes["d_ff"],
        decoder_ffn_dim=sizes["d_ff"],
        encoder_attention_heads=sizes["num_heads"],
        decoder_attention_heads=sizes["num_heads"],
        activation_function="relu",
        scale_embedding=True,
        pad_token_id=0,
        bos_token_id=2,
        decoder_start_token_id=2,
        eos_token_id=3,
        forced_eos_token_id=None,
        max_position_embeddings=2048,
    )
    device = "cpu" if device == "cpu" else "cuda"
    model = MarianMTModel(config).eval().to(device, getattr(torch, dtype))

    class EndAtLimit(LogitsProcessor):
        """EOS at the limit of each sentence, and not before."""

        def __init__(self, limits: torch.Tensor):
            self.limits = limits.repeat_interleave(beam)

        def __call__(self, ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
            at_limit = ids.shape[1] >= self.limits
            if at_limit.any():
                scores = scores.masked_fill(at_limit[:, None], -torch.inf)
            scores[:, 3] = torch.where(at_limit, 0.0, -torch.inf)
            return scores

    batches = []
    for first in range(0, len(ordered), batch_size):
        batch = ordered[first : first + batch_size]
        ids = torch.zeros(len(batch), len(batch[0][0]), dtype=torch.long)
        for row, (sentence, _) in zip(ids, batch, strict=True):
            row[: len(sentence)] = torch.tensor(sentence)
        limits = torch.tensor([length for _, length in batch], device=device)
        batches.append((ids.to(device), limits))
    tokens = sum(length for _, length in ordered)

    def run() -> dict[str, float]:
        results, since = [], time.perf_counter()
        for ids, limits in batches:
            with torch.inference_mode():
                found = model.generate(
                    input_ids=ids,
                    attention_mask=(ids != 0).long(),
                    num_beams=beam,
                    do_sample=False,
                    length_penalty=1.0,
                    max_new_tokens=int(limits.max()),
                    logits_processor=LogitsProcessorList([EndAtLimit(limits)]),
                )
            results.append(found)
        if device == "cuda":
            torch.cuda.synchronize()
        seconds = time.perf_counter() - since
        for found, (_, limits) in zip(results, batches, strict=True):
            assert torch.equal((found[:, 1:] == 3).int().argmax(1) + 1, limits)
        return {"seconds": seconds, "tokens_per_second": tokens / seconds}

    return run


def bound_seconds(
    ordered: Sequence[tuple[list[int], int]], beam: int, vocab_size: int, args: argparse.Namespace
) -> float:
    """Return the seconds that these sentences take at the rates of the machine.

    The longer of two times: that of all multiplications at the rate of a matrix product, and that
    of all memory traffic at the rate of a copy.
    """
    read, length = np.array([(len(source), length) for source, length in ordered]).T
    sizes = SIZES[args.size]
    d, layers = sizes["d_model"], sizes["num_layers"]
    flops = flops_of_source(sizes, read)
    flops += beam * flops_of_target(sizes, vocab_size, length, read)
    on_cpu = args.device == "cpu"
    weight_bytes = 2 if args.dtype == "bfloat16" else 4
    cache_bytes = 4 if on_cpu else weight_bytes
    # 6 d² a layer: query, key, value and output of self-attention, two of cross-attention
    weights = layers * (6 * d**2 + 2 * d * sizes["d_ff"]) + vocab_size * d
    moved = 0
    for first in range(0, len(ordered), args.batch_size):
        batch = slice(first, first + args.batch_size)
        for step in range(1, length[batch].max() + 1):
            alive = read[batch][length[batch] >= step]
            cached = 2 * d * layers * (beam * step * len(alive) + alive.sum())
            moved += int(weight_bytes * weights + cache_bytes * cached)
            moved += 8 * len(alive) * beam * vocab_size
    rate = matrix_product_rate(2048 if on_cpu else 8192, dtype="float32" if on_cpu else args.dtype)
    return max(flops / rate, moved / copy_rate())


if __name__ == "__main__":
    main()
