"""Figures of attention weights, positional encodings and training curves.

They need matplotlib (`pip install 'flaxformer_min[plots]'`), but not pyplot and its global state.
"""

import importlib.resources
import importlib.util
import math
import unicodedata
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from flaxformer_min.plots.fonts import with_fonts
from flaxformer_min.plots.weights import check_weights, readable
from flaxformer_min.system.files import open_atomically

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_BLUE, _ORANGE, _GREEN, _VIOLET, _GREY = "#2563a8", "#d9641e", "#2e8b57", "#7a4fa3", "#8a8f98"

MOST_PIXELS = 6_000
"""Longest side of an image: one of 8 heads of 50 tokens fits; the memory grows with its square."""

MOST_WEIGHTS = 200_000
"""Most weights in one figure: half a minute to draw, and tokens of the smallest size to read."""

_DPI = 150

_SUFFIXES = (".png", ".svg", ".pdf")


def attention_figure(
    weights: Any, source_tokens: Sequence[str], target_tokens: Sequence[str], title: str = ""
) -> "Figure":
    """Return a figure of attention weights, with one panel per head.

    weights: [heads target source] or [target source], from 0 to 1; pass `weights.mean(0)` for the
             mean of all heads, and the same tokens twice for self-attention. All panels share one
             colour scale, from 0 to the largest weight.

    A space (`▁` in the pieces of SentencePiece) is drawn as `␣`. Characters that no installed font
    has are drawn as `□`, with a warning that names packages of fonts. Raises ValueError if shapes
    and tokens disagree or there are more than `MOST_WEIGHTS`, and ImportError without matplotlib.
    """
    _need_matplotlib()
    shape = "[heads target source]"
    weights = check_weights(
        "weights", weights, shape, len(target_tokens), len(source_tokens), (2, 3)
    )
    weights = weights[None] if weights.ndim == 2 else weights
    _check_number(weights)
    labels = [readable(token) for token in (*source_tokens, *target_tokens)]
    (*labels, title), families = with_fonts([*labels, title])
    sources, targets = labels[: len(source_tokens)], labels[len(source_tokens) :]
    figure, panels, fontsize, rotation = _panels(len(weights), sources, targets)
    text = {"fontsize": fontsize, "fontfamily": families, "parse_math": False}
    for head, (axes, panel) in enumerate(zip(panels, weights, strict=True), start=1):
        image = axes.imshow(panel, cmap="Blues", vmin=0, vmax=weights.max() or 1)
        axes.set_xticks(range(len(sources)), sources, rotation=rotation, **text)
        axes.set_yticks(range(len(targets)), targets, **text)
        _separate_cells(axes, panel.shape)
        if len(weights) > 1:
            axes.set_title(f"head {head}", fontsize=11)
    figure.colorbar(image, ax=panels, label="attention weight", shrink=0.8, aspect=30, pad=0.02)
    if title:
        figure.suptitle(title, fontfamily=families, parse_math=False, fontsize=13)
    return figure


def positions_figure(encoding_interleaved: Any, encoding_halves: Any) -> "Figure":
    """Return a figure of the positional encoding in both layouts (section 3.5).

    Both are [positions d_model]: alternating sines and cosines, and all sines before all cosines.
    Raises ValueError unless they are such arrays of equal shape, and ImportError without
    matplotlib.
    """
    both = {
        "interleaved: alternating sines and cosines": np.asarray(encoding_interleaved, np.float32),
        "halves: all sines, then all cosines": np.asarray(encoding_halves, np.float32),
    }
    shapes = [encoding.shape for encoding in both.values()]
    if len(shapes[0]) != 2 or shapes[0] != shapes[1] or 0 in shapes[0]:
        raise ValueError(
            "Both encodings must be [positions d_model] and of equal shape; got "
            f"{shapes[0]} and {shapes[1]}."
        )
    figure = _new_figure(figsize=(15, 4.5), layout="constrained")
    panels = figure.subplots(1, 2, sharey=True)
    as_is = {"aspect": "auto", "interpolation": "nearest"}
    for axes, (name, encoding) in zip(panels, both.items(), strict=True):
        image = axes.imshow(encoding, cmap="RdBu_r", vmin=-1, vmax=1, **as_is)
        axes.set(title=name, xlabel="dimension of the vector")
        axes.locator_params(integer=True)
    panels[0].set_ylabel("position in the sentence")
    figure.colorbar(image, ax=panels, label="value", pad=0.02)
    return figure


def curves_figure(metrics: Iterable[Mapping[str, Any]]) -> "Figure":
    """Return a figure of loss, BLEU, learning rate and tokens per second over the steps.

    metrics: the records of a run's metrics.jsonl (see `read_metrics`). Those of training have
             "step", "loss", "learning_rate" and "tokens_per_second", those of validation "step",
             "validation_loss" and "validation_bleu"; any of them may be missing. The last record
             of a step is used.

    Raises ImportError without matplotlib.
    """
    records = list(metrics)
    figure = _new_figure(figsize=(10.5, 6.5), layout="constrained")
    figure.get_layout_engine().set(w_pad=0.1, h_pad=0.1)
    (loss, score), (rate, speed) = figure.subplots(2, 2, sharex=True)
    _draw_curve(loss, records, "loss", _BLUE, label="training")
    _draw_curve(loss, records, "validation_loss", _ORANGE, label="validation")
    _draw_curve(score, records, "validation_bleu", _ORANGE, label="validation")
    _draw_curve(rate, records, "learning_rate", _GREEN)
    _draw_curve(speed, records, "tokens_per_second", _VIOLET)
    _finish_curves(loss, "loss (nats a token)", from_zero=False)
    _finish_curves(score, "BLEU")
    _finish_curves(rate, "learning rate")
    _finish_curves(speed, "tokens per second")
    for axes in (rate, speed):
        axes.set_xlabel("step")
    return figure


def save(figure: "Figure", path: str | Path) -> None:
    """Write a figure atomically, in the format of the suffix: .png, .svg or .pdf.

    An image has 150 dots per inch, or fewer if its longer side would exceed `MOST_PIXELS`. Raises
    ValueError for another suffix or a missing folder.
    """
    path = Path(path)
    if path.suffix.lower() not in _SUFFIXES:
        raise ValueError(f"A figure must be saved as .png, .svg or .pdf; got {str(path)!r}.")
    # Without a date, so that equal figures are equal files.
    metadata = {".svg": {"Date": None}, ".pdf": {"CreationDate": None}}.get(path.suffix.lower())
    dpi = min(_DPI, MOST_PIXELS / max(figure.get_size_inches()))
    with open_atomically(path) as file:
        figure.savefig(file, format=path.suffix.lower()[1:], dpi=dpi, metadata=metadata)


def _check_number(weights: np.ndarray) -> None:
    if weights.size > MOST_WEIGHTS:
        heads, targets, sources = weights.shape
        raise ValueError(
            f"a figure shows at most {MOST_WEIGHTS:,} weights; got {heads} heads of {targets:,} "
            f"target by {sources:,} source tokens. Draw one head (--head N), a page (--output "
            "x.html), or a shorter sentence."
        )


def _need_matplotlib() -> None:
    if importlib.util.find_spec("matplotlib") is None:
        raise ImportError(
            "Figures need matplotlib; install it with: pip install 'flaxformer_min[plots]'"
        )


def _new_figure(**settings: Any) -> "Figure":
    _need_matplotlib()
    from matplotlib.figure import Figure

    return Figure(**settings)


def _panels(
    count: int, sources: list[str], targets: list[str]
) -> tuple["Figure", list["Axes"], float, int]:
    """Return a figure of about 16:10, its `count` panels of square cells, and the font size.

    The last value is the rotation of the source tokens: 0 if each is narrower than its cell.
    """
    longest = max(len(sources), len(targets))
    cell = max(0.15, min(0.36, 8 / longest), 2 / longest)
    fontsize = min(10, 56 * cell)
    em = fontsize / 72
    left, widest = (max(map(_width, side)) * em for side in (targets, sources))
    rotation = 90 if widest > cell else 0
    left, top = left + 0.1, (widest if rotation else em) + 0.1
    width, height = len(sources) * cell + 0.25, len(targets) * cell + top + 0.45
    across = min(
        range(1, count + 1), key=lambda n: max(n * width, 1.6 * math.ceil(count / n) * height)
    )
    down = math.ceil(count / across)
    figure = _new_figure(
        figsize=(left + across * width + 1.2, down * height + 0.6), layout="compressed"
    )
    grid = figure.subplots(down, across, squeeze=False, sharey=True)
    for axes in grid.flat[count:]:
        axes.remove()
    return figure, list(grid.flat[:count]), fontsize, rotation


def _separate_cells(axes: "Axes", shape: tuple[int, int]) -> None:
    axes.tick_params(top=False, labeltop=True, bottom=False, labelbottom=False, left=False)
    rows, columns = (np.arange(size + 1) - 0.5 for size in shape)
    # Two collections draw ten times faster than a grid of minor ticks.
    axes.hlines(rows, columns[0], columns[-1], color="#e3e8ee", linewidth=0.6)
    axes.vlines(columns, rows[0], rows[-1], color="#e3e8ee", linewidth=0.6)
    axes.set(xlim=columns[[0, -1]], ylim=rows[[-1, 0]])
    axes.spines[:].set_visible(False)


def _width(text: str) -> float:
    """Return an estimate of the width in ems: 1 for a Hangul or CJK character, 0.62 for others."""
    return sum(1.0 if unicodedata.east_asian_width(c) in "WF" else 0.62 for c in text)


def _draw_curve(
    axes: "Axes", records: list[Mapping[str, Any]], name: str, color: str, label: str | None = None
) -> None:
    points = {
        record["step"]: record[name]
        for record in records
        if record.get("step") is not None and record.get(name) is not None
    }
    if points:
        steps = sorted(points)
        few = {"marker": "o", "markersize": 4} if len(steps) <= 40 else {"linewidth": 1.2}
        axes.plot(steps, [points[step] for step in steps], color=color, label=label, **few)


def _finish_curves(axes: "Axes", title: str, from_zero: bool = True) -> None:
    from matplotlib.ticker import EngFormatter

    axes.set_title(title, loc="left", fontsize=11)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(color="#dfe3e8", linewidth=0.7)
    axes.set_axisbelow(True)
    axes.xaxis.set_major_formatter(EngFormatter(sep=""))
    axes.yaxis.set_major_formatter(EngFormatter(sep="") if "tokens" in title else "{x:g}")
    if not axes.lines:
        middle = {"ha": "center", "va": "center", "transform": axes.transAxes}
        axes.text(0.5, 0.5, "not recorded", color=_GREY, **middle)
        axes.set_yticks([])
        return
    axes.locator_params(axis="x", integer=True)
    if from_zero:
        axes.update_datalim([(axes.lines[0].get_xdata()[0], 0)])
        axes.autoscale_view()
        axes.set_ylim(bottom=0)
    if not axes.lines[0].get_label().startswith("_"):
        # matplotlib's search for the best position is slow for long runs.
        axes.legend(frameon=False, loc="lower right" if from_zero else "upper right")
