"""`plot`: figures of a model and of its training."""

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

from flaxformer_min.cli.lines import Stop, open_output, warn_user
from flaxformer_min.cli.options import load

FIGURES = (".png", ".svg", ".pdf")


def plot_attention(args: argparse.Namespace, stop: Stop) -> int:
    """Draw a figure of one layer, or a page of all layers; return the exit status."""
    page = Path(args.output).suffix.lower() == ".html"
    _check_suffix(args.output, (*FIGURES, ".html"))
    if not args.sentence.strip():
        raise ValueError(f"the sentence must have text to attend to; got {args.sentence!r}.")
    if page and (args.layer or args.head):
        raise ValueError("a page shows all layers and heads; leave out --layer and --head.")
    translator = load(args)
    attention = translator.attention(args.sentence, args.target)
    if page:
        _save_page(args, attention)
    else:
        _save_figure(args.output, lambda plots: _attention_figure(plots, args, attention))
    return 0


def _attention_figure(plots: Any, args: argparse.Namespace, attention: Any) -> Any:
    layers, heads = attention.cross.shape[:2]
    layer, head = args.layer or layers, args.head or "all"
    for flag, number, most in (("layer", layer, layers), ("head", head, heads)):
        if isinstance(number, int) and number > most:
            raise ValueError(f"--{flag} must be at most {most}, as the model has; got {number}.")
    weights = attention.cross[layer - 1]
    if head != "all":
        weights = weights.mean(0) if head == "mean" else weights[head - 1]
    which = {"all": "", "mean": ", mean of all heads"}.get(head, f", head {head}")
    tokens = (attention.source_tokens, attention.target_tokens)
    return plots.attention_figure(weights, *tokens, title=f"layer {layer} of {layers}{which}")


def _save_page(args: argparse.Namespace, attention: Any) -> None:
    from flaxformer_min.languages import parse_languages
    from flaxformer_min.plots.attention_page import attention_page
    from flaxformer_min.storage.run_folder import RunFolder

    languages = RunFolder(args.runs[0]).config().data.languages
    source, target = parse_languages(languages) if languages else ("", "")
    page = attention_page(
        {"cross": attention.cross, "encoder": attention.encoder, "decoder": attention.decoder},
        attention.source_tokens,
        attention.target_tokens,
        read_tokens=attention.read_tokens,
        source_language=source.replace("_", "-"),
        target_language=target.replace("_", "-"),
    )
    with open_output(args.output) as output:
        output.write(page.encode())


def plot_positions(args: argparse.Namespace, stop: Stop) -> int:
    """Draw the encodings of 20 positions with d_model 512, the base model's."""
    _check_suffix(args.output, FIGURES)
    import jax.numpy as jnp

    from flaxformer_min.model.positions import sinusoidal_encoding

    both = [
        sinusoidal_encoding(jnp.arange(20), 512, layout) for layout in ("interleaved", "halves")
    ]
    _save_figure(args.output, lambda plots: plots.positions_figure(*both))
    return 0


def plot_curves(args: argparse.Namespace, stop: Stop) -> int:
    """Draw loss, BLEU, learning rate and speed by step."""
    _check_suffix(args.output, FIGURES)
    from flaxformer_min.storage.run_folder import RunFolder
    from flaxformer_min.training.metrics import read_metrics

    run = RunFolder(args.runs[0])
    run.config()
    records = read_metrics(run.metrics)
    if not records:
        raise ValueError(f"{run.path} has no metrics yet. Train it until it has logged some.")
    _save_figure(args.output, lambda plots: plots.curves_figure(records))
    return 0


def _check_suffix(path: str, known: tuple[str, ...]) -> None:
    if Path(path).suffix.lower() not in known:
        *others, last = known
        raise ValueError(f"--output must end in {', '.join(others)} or {last}; got {path!r}.")


def _save_figure(path: str, draw: Callable[[Any], Any]) -> None:
    import warnings

    from flaxformer_min.plots import figures as plots

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", UserWarning)
        plots.save(draw(plots), path)
    for warning in caught:
        warn_user(warning.message)
