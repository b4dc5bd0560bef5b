"""Cost of a step as a function of sentence length, batch, vocabulary, depth and devices.

    python benchmarks/scaling.py --json scaling.json --picture scaling.png

One size grows at a time, from a model of 2+2 layers of 128 and 32 sentences of 64 tokens on each
side. Longer sentences are fewer, at an equal number of tokens. Each point is measured in a process
of its own: the median time of a few steps of training and of decoding (beam 4, with a capacity of
as many tokens as the source has), the memory that XLA needs on each device for a step of training
beside parameters and batch, and the peak of the process.

The table compares times with the expected law, the number of multiplications, and gives the
exponents of both: the slope of the straight line through all points with logarithmic axes. A
constant and a linear part are fitted, too; "off by" is the deviation of the worst point from them.
A picture needs the extra `plots`.
"""

import argparse
import dataclasses
import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from common import (
    alone,
    cores,
    flops_of_source,
    flops_of_target,
    machine,
    peak_memory,
    report_parts,
)

BEAM = 4
TOKENS = 2048
"""On each side of a batch, unless the batch grows."""


@dataclasses.dataclass(frozen=True)
class Point:
    """The sizes that may grow."""

    length: int = 64
    batch: int = TOKENS // 64
    vocabulary: int = 8000
    depth: int = 2
    devices: int = 1

    @property
    def sizes(self) -> dict[str, int]:
        """The fields of ModelConfig."""
        return {"num_layers": self.depth, "d_model": 128, "d_ff": 256, "num_heads": 4}


AXES = {
    "length": [Point(length=n, batch=TOKENS // n) for n in (16, 32, 64, 128, 256, 512, 1024)],
    "batch": [Point(batch=n) for n in (8, 16, 32, 64, 128)],
    "vocabulary": [Point(vocabulary=n) for n in (1000, 4000, 8000, 16_000, 32_000)],
    "depth": [Point(depth=n) for n in (1, 2, 4, 8)],
    "devices": [Point(devices=n) for n in (1, 2, 4, 8)],
}


def main() -> None:
    """Measure, fit, print and draw."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--axes", choices=AXES, nargs="+", default=list(AXES))
    parser.add_argument("--steps", type=int, default=5, help="of which the median is taken")
    parser.add_argument("--quick", action="store_true", help="only the ends of each axis, 2 steps")
    parser.add_argument("--json", type=Path, help="write the rows here")
    parser.add_argument("--picture", type=Path, help="draw them here, as .png, .svg or .pdf")
    args = parser.parse_args()
    measured: dict[Point, dict[str, float]] = {}
    parts, fits = {}, []
    for axis in args.axes:
        points = [AXES[axis][0], AXES[axis][-1]] if args.quick else AXES[axis]
        for point in points:
            if point not in measured:
                measured[point] = alone(measure, point, 2 if args.quick else args.steps)
                print(point, measured[point], flush=True)
        parts[axis] = rows_of(axis, points, measured)
        fits += fits_of(axis, parts[axis])
    parts["laws"] = fits
    report_parts(f"Steps of 2+2 layers of 128; {machine('jax')}", parts, args.json)
    if args.picture:
        draw({axis: parts[axis] for axis in args.axes}, args.picture)


def measure(point: Point, steps: int) -> dict[str, float]:
    """Return the seconds and bytes of one point, measured in this process."""
    import jax

    from flaxformer_min import Batch, Config, ModelConfig, Transformer
    from flaxformer_min.data.batches import shard_batch
    from flaxformer_min.tokens import Tokens
    from flaxformer_min.training.step import init_state, make_train_step

    jax.config.update("jax_num_cpu_devices", point.devices)
    config = Config(model=ModelConfig(vocab_size=point.vocabulary, **point.sizes))
    model, rng = Transformer(config.model), np.random.default_rng(0)
    shape = point.batch, point.length

    def sentences() -> Tokens:
        positions = np.broadcast_to(np.arange(point.length, dtype=np.int32), shape)
        ids = rng.integers(4, point.vocabulary, shape, np.int32)
        return Tokens(ids, positions, np.ones(shape, np.int32))

    source, target = sentences(), sentences()
    state = init_state(model, config)
    batch = shard_batch(Batch(source, target), point.devices)
    step = make_train_step(model, config).lower(state, batch).compile()
    temporary = step.memory_analysis().temp_size_in_bytes

    def train() -> Any:
        nonlocal state
        state, metrics = step(state, batch)
        return metrics

    found = {"training": median_seconds(train, steps), "temporary": temporary}
    found["peak"] = peak_memory()
    if point.devices == 1:
        decode = decoding_step(model, state.params, source)
        found["decoding"] = median_seconds(decode, 4 * steps)
    return found


def decoding_step(model: Any, params: Any, source: Any) -> Callable[[], Any]:
    """Return a decoding step with a capacity of as many tokens as the source has."""
    import jax
    import jax.numpy as jnp

    apply = partial(model.apply, {"params": params})
    encoded = jax.jit(partial(apply, method="encode"))(source)
    cross = jax.jit(partial(apply, method="precompute_cross_attention"))(encoded, source)
    length = source.ids.shape[1]
    cache, _ = jax.jit(lambda cross: apply(cross, BEAM, BEAM * length, method="prefill"))(cross)
    tokens = jnp.full((len(source.ids), BEAM), 4)

    def forward(variables: Any, tokens: Any, cross: Any, before: Any) -> Any:
        logits, cache = model.apply(variables, tokens, cross, before, method="decode_step")
        # As if nothing had been stored: each step costs the same, whatever is in the cache.
        return logits, cache._replace(visible=before.visible, positions=before.positions)

    step = jax.jit(forward, donate_argnums=3)

    def decode() -> Any:
        nonlocal cache
        logits, cache = step({"params": params}, tokens, cross, cache)
        return logits

    return decode


def median_seconds(run: Callable[[], Any], times: int) -> float:
    """Return the median of `times` runs, after two that are not counted."""
    import jax

    seconds = []
    for _ in range(times + 2):
        since = time.perf_counter()
        jax.block_until_ready(run())
        seconds.append(time.perf_counter() - since)
    return statistics.median(seconds[2:])


def expected(point: Point) -> dict[str, float]:
    """Return the multiplications of a training and a decoding step, per core in use.

    Masked ones are counted, because they are computed, too: half of the target's self-attention,
    and, because the hypotheses of a sentence share one cache, the positions of the others.
    """
    sizes, vocabulary, length = point.sizes, point.vocabulary, point.length
    lengths, alive = np.full(point.batch, length), np.full(point.batch * BEAM, length)
    attend = 4 * sizes["d_model"] * sizes["num_layers"]  # of one position to another
    forward = flops_of_source(sizes, lengths)
    forward += flops_of_target(sizes, vocabulary, lengths, lengths)
    forward += attend * point.batch * length * (length - 1) / 2
    last = flops_of_target(sizes, vocabulary, alive, alive)
    last -= flops_of_target(sizes, vocabulary, alive - 1, alive)
    last += attend * len(alive) * (BEAM - 1) * length
    return {"training": 3 * forward / min(point.devices, cores()), "decoding": last}


def rows_of(
    axis: str, points: list[Point], measured: dict[Point, dict[str, float]]
) -> list[dict[str, Any]]:
    """Return the table of one axis; the law is scaled to the first point."""
    first, rows = points[0], []
    for point in points:
        found, row = measured[point], {axis: getattr(point, axis)}
        for kind, name in (("training", "training, ms"), ("decoding", "decoding, ms")):
            if "decoding" in measured[points[-1]] or kind == "training":
                row[name] = 1000 * found[kind]
                law = expected(point)[kind] / expected(first)[kind]
                row[name.replace("ms", "law")] = 1000 * measured[first][kind] * law
        row["temporary, MB"] = found["temporary"] / 1e6
        row["peak of the process, MB"] = found["peak"] / 1e6
        rows.append(row)
    return rows


def fits_of(axis: str, rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the exponents of one axis, and its fit of a constant and a linear part."""
    x = np.array([row[axis] for row in rows], float)
    found = []
    for name in ("training, ms", "decoding, ms", "temporary, MB"):
        if name not in rows[0]:
            continue
        y = np.array([row[name] for row in rows])
        law = [row[name.replace("ms", "law")] for row in rows] if "ms" in name else None
        linear_in, grows = axis, x
        if axis == "devices" and "MB" in name:
            linear_in, grows = "1 / devices", 1 / x
        elif axis == "devices":
            linear_in, grows = "1 / cores used", 1 / np.minimum(x, cores())
        elif (axis, name) == ("length", "decoding, ms"):  # as many tokens are fewer sentences
            linear_in, grows = "1 / length", 1 / x
        # Weighted by 1/y: a point counts by its ratio to the line.
        columns = np.stack([np.ones_like(x), grows], axis=1) / y[:, None]
        (constant, slope), *_ = np.linalg.lstsq(columns, np.ones_like(x), rcond=None)
        off = np.abs((constant + slope * grows) / y - 1).max()
        found.append(
            {
                "axis": axis,
                "of": name,
                "exponent": exponent(x, y),
                "exponent of the law": None if law is None else exponent(x, np.array(law)),
                "linear in": linear_in,
                "constant part": float(constant),
                "linear part, at most": float((slope * grows).max()),
                "off by, %": float(100 * off),
            }
        )
    return found


def exponent(x: np.ndarray, y: np.ndarray) -> float:
    """Return the exponent of the power law that fits best with logarithmic axes.

    >>> exponent(np.array([1.0, 2.0, 4.0]), np.array([3.0, 12.0, 48.0]))
    2.0
    """
    return round(float(np.polyfit(np.log(x), np.log(y), 1)[0]), 6)


def draw(parts: dict[str, list[dict[str, Any]]], file: Path) -> None:
    """Draw time above and memory below, a column for each axis; the law is dashed."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import NullLocator

    from flaxformer_min.plots.figures import save

    figure = Figure(figsize=(2.2 * len(parts), 6), layout="constrained")
    panels = figure.subplots(2, len(parts), squeeze=False, sharex="col", sharey="row")
    curves = [("training, ms", "#2563a8", 0), ("decoding, ms", "#d9641e", 0)]
    curves += [("temporary, MB", "#2563a8", 1), ("peak of the process, MB", "#8a8f98", 1)]
    for column, (axis, rows) in zip(panels.T, parts.items(), strict=True):
        x = [row[axis] for row in rows]
        for name, color, place in curves:
            if name in rows[0]:
                column[place].plot(x, [row[name] for row in rows], "o-", color=color, label=name)
            law = name.replace("ms", "law")
            if law in rows[0] and law != name:
                column[place].plot(x, [row[law] for row in rows], "--", color=color)
        for axes in column:
            axes.set(xscale="log", yscale="log")
            axes.grid(color="#dfe3e8", linewidth=0.7)
            axes.yaxis.set_major_formatter("{x:,g}")
        column[0].set_title(axis)
        column[1].set_xticks(x, [f"{value:,}" for value in x], rotation=90)
        column[1].xaxis.set_minor_locator(NullLocator())
    for axes, unit in zip(panels[:, 0], ("milliseconds", "megabytes"), strict=True):
        axes.set_ylabel(unit)
        handles, labels = axes.get_legend_handles_labels()
        names = [label.partition(",")[0] for label in labels]
        above = {"loc": "outside upper left" if axes is panels[0, 0] else "outside lower left"}
        figure.legend(handles, names, ncols=len(names), frameon=False, **above)
    save(figure, file)


if __name__ == "__main__":
    main()
