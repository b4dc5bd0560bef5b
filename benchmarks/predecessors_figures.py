"""The pictures of docs/why_attention.md, drawn from the numbers of benchmarks/predecessors.py."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

COLORS = {"fixed vector": "#c2571a", "attention": "#2563a8", "Transformer": "#2e8b57"}
MARKERS = {"fixed vector": "s", "attention": "o", "Transformer": "^"}
NAMES = {
    "fixed vector": "recurrent, one fixed vector",
    "attention": "recurrent, with attention",
    "Transformer": "Transformer",
}

FARTHEST = 80
"""Recurrent steps; only the few longest sentences have tokens that are farther from each other."""


def new_figure(width: float, height: float, panels: int, **settings: Any) -> tuple[Figure, Any]:
    """Return a figure and its panels, side by side."""
    figure = Figure(figsize=(width, height), layout="constrained")
    return figure, figure.subplots(1, panels, squeeze=False, **settings)[0]


def finish(axes: Axes, title: str, xlabel: str, ylabel: str = "") -> None:
    """Give a panel its texts and the style of all pictures."""
    axes.set_title(title, loc="left", fontsize=11)
    axes.set(xlabel=xlabel, ylabel=ylabel)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(color="#e3e8ee", linewidth=0.7)
    axes.set_axisbelow(True)


def legend(figure: Figure, axes: Axes) -> None:
    """Show the models' names once, above all panels."""
    handles, names = axes.get_legend_handles_labels()
    figure.legend(handles, names, loc="outside upper center", ncols=len(names), frameon=False)


def draw_line(axes: Axes, model: str, x: Sequence[float], runs: Sequence[Sequence[float]]) -> None:
    """Draw the mean of the seeds, and a band from the lowest to the highest."""
    values, color = np.array(runs, float), COLORS[model]
    style = {"marker": MARKERS[model], "markersize": 5, "linewidth": 1.8}
    axes.plot(x, values.mean(axis=0), color=color, label=NAMES[model], **style)
    if len(values) > 1:
        axes.fill_between(x, values.min(axis=0), values.max(axis=0), color=color, alpha=0.18)


def plain_log(axes: Axes, which: str, ticks: Sequence[float]) -> None:
    """Make an axis logarithmic, with these numbers written out."""
    axis = getattr(axes, f"{which}axis")
    getattr(axes, f"set_{which}scale")("log")
    axis.set_major_locator(FixedLocator(list(ticks)))
    axis.set_minor_locator(NullLocator())
    axis.set_major_formatter(FuncFormatter(lambda number, _: f"{number:g}"))


def quality_figure(tasks: Mapping[str, Mapping[str, Any]]) -> Figure:
    """Return the validation loss over the steps, a panel for each task."""
    figure, panels = new_figure(11, 3.9, len(tasks))
    for axes, task in zip(panels, tasks.values(), strict=True):
        for model, found in task["models"].items():
            steps = [step for step, _ in found["curves"][0]]
            losses = [[loss for _, loss in curve] for curve in found["curves"]]
            draw_line(axes, model, steps, losses)
        finish(axes, task["title"], "training step")
        axes.set_ylim(bottom=0)
    panels[0].set_ylabel("validation loss, nats a token")
    legend(figure, panels[0])
    return figure


def bottleneck_figure(tasks: Mapping[str, Mapping[str, Any]]) -> Figure:
    """Return BLEU by source length, a panel for each task."""
    figure, panels = new_figure(11, 3.9, len(tasks), sharey=True)
    for axes, task in zip(panels, tasks.values(), strict=True):
        edges = task["edges"]
        names = [f"{low}-{high - 1}" for low, high in zip(edges, edges[1:], strict=False)]
        for model, found in task["models"].items():
            draw_line(axes, model, range(len(names)), found["by_length"])
        finish(axes, task["title"], "tokens of the source, five bins")
        axes.set_xticks(range(len(names)), names)
        axes.set_ylim(0, 103)
    panels[0].set_ylabel("BLEU of the test sentences")
    legend(figure, panels[0])
    return figure


def gradients_figure(norms: Mapping[str, Mapping[str, list[dict[str, float]]]]) -> Figure:
    """Return the gradient's norm against the distance, before and after training."""
    figure, panels = new_figure(11, 4.2, 2)
    for axes, (when, models) in zip(panels, norms.items(), strict=True):
        for model, runs in models.items():
            if runs:
                distances = sorted(int(each) for each in runs[0] if int(each) <= FARTHEST)
                draw_line(axes, model, distances, [[r[str(d)] for d in distances] for r in runs])
        axes.set_yscale("log")
        steps = "recurrent steps from the source to the target token"
        finish(axes, f"{when} training", steps, "median norm of the gradient")
    panels[1].set_title("after training (a scale of its own)", loc="left", fontsize=11)
    panels[1].set_ylim(1e-3, 0.2)
    legend(figure, panels[0])
    return figure


def parallel_figure(
    seconds: Mapping[str, Mapping[str, float]], chains: Mapping[str, Mapping[str, int]]
) -> Figure:
    """Return the time of a step, and the chain of products that wait for each other."""
    figure, panels = new_figure(11, 4.2, 2)
    titles = "time of a training step, 4,096 tokens a side", "matrix products one after the other"
    for axes, numbers, title in zip(panels, (seconds, chains), titles, strict=True):
        for model, by_length in numbers.items():
            lengths = sorted(int(each) for each in by_length)
            draw_line(axes, model, lengths, [[by_length[str(each)] for each in lengths]])
        plain_log(axes, "x", lengths)
        finish(axes, title, "tokens of a sentence")
    panels[0].set_ylabel("seconds")
    panels[0].set_ylim(bottom=0)
    plain_log(panels[1], "y", (10, 20, 50, 100, 200, 500, 1000))
    legend(figure, panels[0])
    return figure


def looks_figure(found: Mapping[str, Mapping[str, Any]]) -> Figure:
    """Return the attention of each model for the same sentence, side by side."""
    figure, panels = new_figure(11, 5.6, len(found), sharey=True)
    for axes, (model, one) in zip(panels, found.items(), strict=True):
        image = axes.imshow(one["weights"], cmap="Blues", vmin=0, vmax=1, aspect="auto")
        source, target = ([text.replace("▁", "␣") for text in one[s]] for s in ("source", "target"))
        axes.set_xticks(range(len(source)), source, rotation=90, fontsize=9)
        axes.set_yticks(range(len(target)), target, fontsize=9)
        axes.tick_params(length=0)
        axes.set_title(NAMES[model] + (", last layer" if model == "Transformer" else ""),
            loc="left", fontsize=11)  # fmt: skip
        axes.spines[:].set_visible(False)
    panels[0].set_ylabel("target")
    figure.supxlabel("source", fontsize=10)
    figure.colorbar(image, ax=panels, label="attention weight", shrink=0.7, pad=0.02)
    return figure
