"""What may be typed: every command, its options, and what `--help` says of them."""

import argparse
import math
from collections.abc import Callable
from typing import Any

from flaxformer_min.cli.evaluate import evaluate
from flaxformer_min.cli.plot import plot_attention, plot_curves, plot_positions
from flaxformer_min.cli.score import score
from flaxformer_min.cli.translate import translate
from flaxformer_min.config import LENGTH_PENALTY_LIMIT

DESCRIPTION = "Train translation models; translate, score, evaluate and plot with them."
OWN = "default: the run's own setting"


class _Parser(argparse.ArgumentParser):
    """Tells a mistake as this program tells all of them, and takes no flag that is cut short."""

    def __init__(self, **settings: Any):
        """Of argparse's own settings."""
        super().__init__(allow_abbrev=False, **settings)

    def error(self, message: str) -> None:
        raise ValueError(f"{message}. See {self.prog} --help.")


def make_parser() -> argparse.ArgumentParser:
    """The commands, their arguments and what `--help` says of them."""
    parser = _Parser(prog="flaxformer-min", description=DESCRIPTION)
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    # Its options are generated from the settings: see cli/train.py.
    _add_command(commands, "train", "train a model, or continue a run")
    _add_translate(commands)
    _add_score(commands)
    _add_evaluate(commands)
    plots = _add_command(commands, "plot", "draw attention, positions or the curves of training")
    plots = plots.add_subparsers(title="what to plot", metavar="WHAT", required=True)
    _add_plots(plots)
    return parser


# fmt: off
def _add_command(commands: Any, name: str, purpose: str, run: Callable | None = None) -> _Parser:
    parser = commands.add_parser(name, help=purpose, description=f"{purpose.capitalize()}.")
    parser.set_defaults(command=run)
    return parser


def _add_translate(commands: Any) -> None:
    purpose = "translate lines of text, from stdin to stdout"
    parser = _add_command(commands, "translate", purpose, translate)
    add = parser.add_argument
    _add_runs(parser)
    add("--input", metavar="FILE", help="read lines from here (default: stdin)")
    add("--output", metavar="FILE", help="write here, whole or not at all (default: stdout)")
    _add_search(parser)
    add("--n-best", type=_number(int, at_least=1), default=1, metavar="N",
        help="translations of each line; always N lines for one, the last of them empty where "
        "fewer were found (default: 1)")
    add("--prefix-file", metavar="FILE",
        help="how each translation must begin, line by line, empty where it need not "
        "(default: no prefixes)")
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--scores", action="store_true",
        help="write score, log-probability in nats and text, separated by tabs "
        "(default: the text)")
    form.add_argument("--json", action="store_true",
        help="write one JSON object a line: line, source and hypotheses, each of them with text, "
        "log_prob and score (default: the text)")
    _add_sampling(parser)
    _add_device(parser)
    add("--verbose", action="store_true",
        help="tell speed and compilations on stderr at the end (default: warnings only)")


def _add_score(commands: Any) -> None:
    purpose = "tell how likely given translations are: log-probability in nats, pair by pair"
    parser = _add_command(commands, "score", purpose, score)
    add = parser.add_argument
    add("runs", metavar="RUN", nargs=1, help="the folder of a run")
    add("source", metavar="SOURCE", help="file of sentences")
    add("target", metavar="TARGET", help="file of their translations, line by line")
    add("--per-token", action="store_true",
        help="behind the log-probability of the pair write each token and its log-probability, "
        "separated by tabs (default: of the pair alone)")
    add("--json", action="store_true",
        help="write one JSON object a line: line, log_prob, tokens, log_probs "
        "(default: the number alone)")
    _add_device(parser)


def _add_evaluate(commands: Any) -> None:
    purpose = "translate a test set and measure BLEU, chrF, exact match, perplexity and speed"
    parser = _add_command(commands, "evaluate", purpose, evaluate)
    add = parser.add_argument
    _add_runs(parser)
    add("--split", metavar="NAME", help="split of the run's own corpus (default: test)")
    add("--source", metavar="FILE", help="sentences to translate (default: those of the split)")
    add("--reference", metavar="FILE",
        help="their translations, line by line (default: those of the split)")
    add("--tokenize", metavar="NAME",
        help="sacreBLEU's tokenizer for BLEU (default: one that fits the target language)")
    add("--lowercase", action="store_true",
        help="ignore case in BLEU and chrF (default: heed it)")
    add("--output", metavar="FILE",
        help="keep the translations, line by line with the source (default: do not)")
    add("--json", action="store_true",
        help="write all of it as one JSON object (default: for people)")
    _add_search(parser)
    _add_device(parser)


def _add_plots(commands: Any) -> None:
    parser = _add_command(commands, "attention", "show which tokens look at which", plot_attention)
    add = parser.add_argument
    output = {"required": True, "metavar": "FILE"}
    add("runs", metavar="RUN", nargs=1, help="the folder of a run")
    add("sentence", metavar="SENTENCE", help="the source sentence")
    add("--output", **output,
        help=".png, .svg or .pdf for a figure, .html for a page to explore (no default)")
    add("--target", metavar="TEXT",
        help="a translation to look at (default: the model's own)")
    add("--layer", type=_number(int, at_least=1), metavar="N",
        help="layer of a figure, 1 the lowest (default: the highest)")
    add("--head", type=_head, metavar="N|mean|all",
        help="head of a figure, from 1, their mean, or a panel for each (default: all)")
    _add_step(parser)
    purpose = "show the positional encoding in both its layouts"
    parser = _add_command(commands, "positions", purpose, plot_positions)
    parser.add_argument("--output", **output, help=".png, .svg or .pdf (no default)")
    parser = _add_command(commands, "curves", "show how the training of a run went", plot_curves)
    parser.add_argument("runs", metavar="RUN", nargs=1, help="the folder of a run")
    parser.add_argument("--output", **output, help=".png, .svg or .pdf (no default)")


def _add_runs(parser: _Parser) -> None:
    parser.add_argument(
        "runs",
        metavar="RUN",
        nargs="+",
        help="the folder of a run; the models of several runs with one vocabulary decide together",
    )


def _add_search(parser: _Parser) -> None:
    add = parser.add_argument
    add("--beam-size", type=_number(int, at_least=1), metavar="N",
        help=f"hypotheses a sentence; 1 is greedy ({OWN})")
    alpha = _number(float, at_least=0, at_most=LENGTH_PENALTY_LIMIT)
    add("--length-penalty", type=alpha, metavar="ALPHA",
        help=f"the larger, the longer the translations ({OWN})")
    add("--max-extra-tokens", type=_number(int, at_least=1, at_most=100_000), metavar="N",
        help=f"tokens a translation may have more than its source ({OWN})")
    add("--min-length", type=_number(int, at_least=0, at_most=100_000), metavar="N", default=0,
        help="tokens a translation must have (default: 0)")


def _add_sampling(parser: _Parser) -> None:
    parser = parser.add_argument_group("sampling")
    add = parser.add_argument
    add("--sample", action="store_true",
        help="draw N of --n-best at random; with --beam-size, the best N of so many "
        "(default: search for the best)")
    add("--temperature", type=_number(float, at_least=1e-6), metavar="T",
        help="below 1 for likelier words (default: 1)")
    add("--top-k", type=_number(int, at_least=1), metavar="K",
        help="draw from the K likeliest tokens (default: from all)")
    add("--top-p", type=_number(float, more_than=0, at_most=1), metavar="P",
        help="draw from the likeliest tokens that have this probability together "
        "(default: 1, all)")
    add("--seed", type=_number(int, at_least=0, at_most=2**32 - 1), metavar="N",
        help="other seeds, other samples (default: 0)")


def _add_device(parser: _Parser) -> None:
    _add_step(parser)
    parser.add_argument("--batch-size", type=_number(int, at_least=1), metavar="N",
        help=f"sentences at once on each device, fewer where they are long ({OWN})")


def _add_step(parser: _Parser) -> None:
    parser.add_argument("--step", type=_number(int, at_least=0), metavar="N",
        help="checkpoint of this step (default: the mean of the last ones where the run kept it, "
        "else the best by validation, else the newest)")


# fmt: on
def _number(
    kind: type,
    at_least: float = -math.inf,
    at_most: float = math.inf,
    more_than: float = -math.inf,
) -> Callable[[str], Any]:
    """Reads a number within limits."""
    limits = [
        f"{words} {limit:,}"
        for words, limit in (
            ("at least", at_least),
            ("more than", more_than),
            ("at most", at_most),
        )
        if math.isfinite(limit)
    ]
    name = "a whole number" if kind is int else "a number"
    rule = " and ".join([f"must be {name}", *limits])

    def read(text: str) -> Any:
        try:
            value = kind(text)
        except ValueError:
            value = math.nan
        # Also false for "nan".
        if not (at_least <= value <= at_most and value > more_than) or math.isinf(value):
            raise argparse.ArgumentTypeError(f"{rule}; got {text!r}")
        return value

    return read


def _head(text: str) -> int | str:
    if text in ("mean", "all"):
        return text
    try:
        return _number(int, at_least=1)(text)
    except argparse.ArgumentTypeError:
        rule = "must be mean, all or the number of a head, from 1"
        raise argparse.ArgumentTypeError(f"{rule}; got {text!r}") from None
