"""Speed of training, compared with PyTorch's own Transformer of equal size, loss and optimizer.

    python benchmarks/training.py --corpus text:DIR --languages en-de
    python benchmarks/training.py --size wide --tokens 2048 --steps 3 --rounds 3
    python benchmarks/training.py --device gpu --size base --tokens 25000

Speed is real target tokens per second, without padding. Dropout is equal, too. We read packed
rows; the peer reads padded batches of sentences of similar length, as its users make them: eager,
in the number of threads that suits it best, and compiled in as many, if it is ready after
`--patience` minutes. On a GPU both compute in bfloat16 (the peer by autocast), and the peer is left
out if PyTorch finds no GPU. The default text is the embedded corpus. Needs the extra `benchmarks`.
"""

import argparse
import itertools
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
from common import (
    SIZES,
    Contender,
    Run,
    alternate,
    arguments,
    cores,
    flops_of_source,
    flops_of_target,
    machine,
    make_tokenizer,
    matrix_product_rate,
    peak_memory,
    peers_of,
    read_split,
    report,
)

Pairs = list[tuple[list[int], list[int]]]


def main() -> None:
    """Measure, and print one table."""
    parser = arguments(__doc__, "training")
    parser.add_argument("--tokens", type=int, default=4096, help="positions of a side in a batch")
    parser.add_argument(
        "--row-lengths",
        type=int,
        nargs=2,
        default=[64, 68],
        metavar=("SOURCE", "TARGET"),
        help="positions of a packed row",
    )
    parser.add_argument(
        "--tokenizer-size",
        type=int,
        help="pieces of the tokenizer, where the text is too little for --vocab-size",
    )
    parser.add_argument("--dropout", type=float, default=0.3)
    parser.add_argument("--steps", type=int, default=6, help="of each run")
    parser.add_argument("--patience", type=float, default=6, help="minutes for PyTorch to compile")
    parser.add_argument("--attention", choices=("explicit", "fused"), default="explicit")
    parser.add_argument("--no-peers", action="store_true", help="measure only ours")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        pairs = prepare(args, Path(scratch))
    dtype = "float32" if args.device == "cpu" else "bfloat16"
    contenders = [Contender("flaxformer_min", ours, pairs, vars(args), dtype)]
    if not args.no_peers:
        contenders += peers_of(args.device, lambda: best_peers(pairs, vars(args), dtype))
    alternate(contenders, args.rounds)
    rate = matrix_product_rate(dtype=dtype, size=2048 if args.device == "cpu" else 8192)
    packages = ["jax", "torch"] if len(contenders) > 1 else ["jax"]
    pieces = f" (the text has {args.tokenizer_size:,} pieces)" if args.tokenizer_size else ""
    title = (
        f"Training on {args.corpus}, size {args.size}, vocabulary {args.vocab_size:,}{pieces}, "
        f"{args.tokens:,} target positions a batch, dropout {args.dropout}, {dtype}, "
        f"{args.attention} attention; matrix "
        f"products {rate / 1e9:,.0f} GFLOP/s; {machine(*packages)}"
    )
    report(title, table_of(contenders, rate), args.json)


def table_of(contenders: list[Contender], rate: float) -> list[dict[str, Any]]:
    """Return the rows, each compared with the best peer and the machine's own rate."""
    speeds = [contender.median("tokens_per_second") for contender in contenders]
    rows = []
    for contender, speed in zip(contenders, speeds, strict=True):
        run = contender.runs[0]
        flops = run["flops"] / run["tokens"] * speed
        rows.append(
            {
                "who": contender.name,
                "target tokens/s": speed,
                "ms a step": 1000 * contender.median("seconds") / run["steps"],
                "ratio to the best peer": speed / max(speeds[1:]) if speeds[1:] else None,
                "share of matrix products": flops / rate,
                "padding, %": 100 * run["padding"],
                "start and first run, s": contender.first_seconds,
                "memory, GB": run["memory"] / 1e9,
                "hours for 100k steps of 25k": 100_000 * 25_000 / speed / 3600,
            }
        )
        contender.close()
    return rows


def best_peers(pairs: Pairs, settings: dict[str, Any], dtype: str) -> list[Contender]:
    """Start the peer eager, in its faster number of threads, and compiled, if ready in time.

    On a GPU, the threads make no difference.
    """
    tried = {
        n: Contender(f"PyTorch eager, {n} threads", theirs, pairs, settings, dtype, False, n)
        for n in sorted({1, cores()} if settings["device"] == "cpu" else {1})
    }
    alternate(list(tried.values()), 1)
    threads = min(tried, key=lambda n: tried[n].runs[0]["seconds"])
    for n, contender in tried.items():
        contender.runs.clear()
        if n != threads:
            contender.close()
    name, patience = f"PyTorch compiled, {threads} threads", 60 * settings["patience"]
    arguments = theirs, pairs, settings, dtype, True, threads
    peers = [tried[threads]]
    try:
        peers.append(Contender(name, *arguments, patience=patience))
    except (TimeoutError, RuntimeError) as error:
        print(f"Left out: {error}", file=sys.stderr)
    return peers


def prepare(args: argparse.Namespace, folder: Path) -> Pairs:
    """Return the training split as token ids, without pairs that do not fit a row of 64."""
    if (args.tokenizer_size or 0) > args.vocab_size:
        raise SystemExit("--tokenizer-size must be at most --vocab-size.")
    tokenizer = make_tokenizer(args, folder, args.tokenizer_size)
    pairs = read_split(args, "train")[:30_000]
    sides = [tokenizer.encode_batch([pair[side] for pair in pairs]) for side in (0, 1)]
    return [pair for pair in zip(*sides, strict=True) if max(map(len, pair)) <= 64]


def flops_of_training(sizes: dict[str, int], vocab_size: int, pairs: Pairs) -> float:
    """Return the floating-point operations of a step: three times those of the forward pass."""
    source, target = (np.array([len(pair[side]) for pair in pairs]) for side in (0, 1))
    return 3 * (flops_of_source(sizes, source) + flops_of_target(sizes, vocab_size, target, source))


def ours(pairs: Pairs, settings: dict[str, Any], dtype: str) -> Run:
    """Return a run of `make_train_step` on packed rows, as the training loop calls it."""
    import jax

    from flaxformer_min.config import Config, ModelConfig
    from flaxformer_min.data.batches import TrainingBatches, shard_batch
    from flaxformer_min.data.encoding import encode_pairs
    from flaxformer_min.model.transformer import Transformer
    from flaxformer_min.system.devices import configure_cpu_devices
    from flaxformer_min.training.step import init_state, make_train_step

    class Ids:
        """A tokenizer of texts that are token ids already; see `prepare`."""

        fingerprint, vocab_size = "ids", settings["vocab_size"]

        def encode_batch(self, texts: list[str]) -> list[list[int]]:
            return [list(map(int, text.split())) for text in texts]

    sizes, row = SIZES[settings["size"]], tuple(settings["row_lengths"])
    rows_per_batch = -(-settings["tokens"] // row[0])
    configure_cpu_devices(rows_per_batch)  # as train.py does
    with tempfile.TemporaryDirectory() as scratch:
        texts = [tuple(" ".join(map(str, ids)) for ids in pair) for pair in pairs]
        encoded = encode_pairs(texts, (Ids(), Ids()), row, Path(scratch), "benchmark")
        rows = TrainingBatches(encoded, row, rows_per_batch, seed=0)
        batches = list(itertools.islice(rows, settings["steps"]))
        rows.close()
    config = Config(
        model=ModelConfig(
            vocab_size=settings["vocab_size"],
            dropout=settings["dropout"],
            dtype=dtype,
            attention=settings["attention"],
            **sizes,
        )
    )
    model = Transformer(config.model)
    state, step = init_state(model, config), make_train_step(model, config)
    tokens = sum(np.count_nonzero(batch.target.segments) for batch in batches)
    real = tokens + sum(np.count_nonzero(batch.source.segments) for batch in batches)
    positions = sum(side.ids.size for batch in batches for side in batch)
    done = {
        "steps": len(batches),
        "tokens": int(tokens),
        "padding": 1 - real / positions,
        "flops": sum(
            flops_of_training(sizes, settings["vocab_size"], sentences(batch)) for batch in batches
        ),
    }

    def run() -> dict[str, float]:
        nonlocal state
        since = time.perf_counter()
        for batch in batches:
            state, metrics = step(state, shard_batch(batch, jax.local_device_count()))
        jax.block_until_ready(state)
        seconds = time.perf_counter() - since
        memory = jax.local_devices()[0].memory_stats()
        memory = memory["peak_bytes_in_use"] if memory else peak_memory()
        return {**done, "seconds": seconds, "tokens_per_second": tokens / seconds, "memory": memory}

    return run


def sentences(batch: Any) -> Pairs:
    """Return the pairs of a packed batch, with zeros for ids: only their lengths are used."""
    found = []
    for row in range(len(batch.source.ids)):
        counts = [np.bincount(side.segments[row])[1:] for side in batch]
        found += [([0] * a, [0] * b) for a, b in zip(*counts, strict=True)]
    return found


def theirs(pairs: Pairs, settings: dict[str, Any], dtype: str, compiled: bool, threads: int) -> Run:
    """Return a run of torch.nn.Transformer with shared embeddings, positions and Adam."""
    import torch
    import torch.fx.experimental._config
    from torch import nn

    torch.set_num_threads(threads)
    torch.manual_seed(0)
    sizes, vocab_size = SIZES[settings["size"]], settings["vocab_size"]
    d, device = sizes["d_model"], "cpu" if settings["device"] == "cpu" else "cuda"

    class Model(nn.Module):
        """One table for source, target and output, as in ours."""

        def __init__(self):
            super().__init__()
            self.table = nn.Embedding(vocab_size, d)
            nn.init.normal_(self.table.weight, std=d**-0.5)
            angle = torch.arange(64)[:, None] / 10_000 ** (torch.arange(0, d, 2) / d)
            positions = torch.stack([angle.sin(), angle.cos()], dim=-1).reshape(64, d)
            self.register_buffer("positions", positions)
            self.dropout = nn.Dropout(settings["dropout"])
            self.inner = nn.Transformer(
                d,
                sizes["num_heads"],
                sizes["num_layers"],
                sizes["num_layers"],
                sizes["d_ff"],
                settings["dropout"],
                batch_first=True,
            )
            mask = nn.Transformer.generate_square_subsequent_mask(64)
            self.register_buffer("mask", mask.isinf())

        def embed(self, ids: torch.Tensor) -> torch.Tensor:
            return self.dropout(self.table(ids) * d**0.5 + self.positions[: ids.shape[1]])

        def forward(self, source: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
            length = target.shape[1]
            hidden = self.inner(
                self.embed(source),
                self.embed(target),
                tgt_mask=self.mask[:length, :length],
                src_key_padding_mask=source == 0,
                tgt_key_padding_mask=target == 0,
                memory_key_padding_mask=source == 0,
                tgt_is_causal=True,
            )
            return hidden @ self.table.weight.T

    model = Model().to(device)
    loss_of = nn.CrossEntropyLoss(ignore_index=0, label_smoothing=0.1)
    fused = device == "cuda"  # the fastest there
    adam = torch.optim.Adam(model.parameters(), lr=1e-4, betas=(0.9, 0.98), eps=1e-9, fused=fused)
    if compiled:
        # The whole model takes many minutes, most of them in g++; layers of one kind share a
        # program. By default, torch takes sizes that are equal in the first batch for one size.
        torch.fx.experimental._config.use_duck_shape = False
        for layers in (model.inner.encoder.layers, model.inner.decoder.layers):
            for i, layer in enumerate(layers):
                layers[i] = torch.compile(layer, dynamic=True)
    chosen = length_sorted(pairs, settings["tokens"], settings["steps"])
    batches = [tuple(torch.tensor(side, device=device) for side in padded(each)) for each in chosen]
    tokens = sum(int((target != 0).sum()) for _, target in batches)
    positions = sum(source.numel() + target.numel() for source, target in batches)
    real = tokens + sum(int((source != 0).sum()) for source, _ in batches)
    done = {
        "steps": len(batches),
        "tokens": tokens,
        "padding": 1 - real / positions,
        "flops": sum(flops_of_training(sizes, vocab_size, batch) for batch in chosen),
    }

    def run() -> dict[str, float]:
        since = time.perf_counter()
        for source, target in batches:
            shifted = torch.cat([torch.full_like(target[:, :1], 2), target[:, :-1]], dim=1)
            with torch.autocast(device, torch.bfloat16, enabled=dtype == "bfloat16"):
                logits = model(source, shifted)
                loss = loss_of(logits.flatten(0, 1), target.flatten())
            adam.zero_grad(set_to_none=True)
            loss.backward()
            adam.step()
        if device == "cuda":
            torch.cuda.synchronize()
        seconds = time.perf_counter() - since
        memory = torch.cuda.max_memory_allocated() if device == "cuda" else peak_memory()
        rate = tokens / seconds
        return {**done, "seconds": seconds, "tokens_per_second": rate, "memory": memory}

    return run


def length_sorted(pairs: Pairs, tokens: int, steps: int) -> list[Pairs]:
    """Return batches of about `tokens` target tokens, each of sentences of similar length."""
    ordered = sorted(pairs, key=lambda pair: (len(pair[1]), len(pair[0])))
    batches, batch = [], []
    for pair in ordered:
        if batch and len(pair[1]) * (len(batch) + 1) > tokens:
            batches.append(batch)
            batch = []
        batch.append(pair)
    middle = [round((i + 0.5) * len(batches) / steps) for i in range(steps)]
    return [batches[min(i, len(batches) - 1)] for i in middle]


def padded(batch: Pairs) -> list[np.ndarray]:
    """Return source and target ids, padded with 0."""
    sides = []
    for side in (0, 1):
        ids = np.zeros((len(batch), max(len(pair[side]) for pair in batch)), np.int64)
        for row, pair in zip(ids, batch, strict=True):
            row[: len(pair[side])] = pair[side]
        sides.append(ids)
    return sides


if __name__ == "__main__":
    main()
