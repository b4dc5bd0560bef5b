"""The argument parser: every command, its options and their help."""

import argparse
import math
from collections.abc import Callable, Sequence
from typing import Any, get_type_hints

from flaxformer_min.cli.evaluate import evaluate
from flaxformer_min.cli.inspect import inspect
from flaxformer_min.cli.interop import export, import_
from flaxformer_min.cli.options import SHOWN
from flaxformer_min.cli.plot import plot_attention, plot_curves, plot_positions
from flaxformer_min.cli.score import score
from flaxformer_min.cli.serve import serve
from flaxformer_min.cli.translate import translate
from flaxformer_min.config import SearchConfig
from flaxformer_min.config_fields import field_descriptions
from flaxformer_min.interop import FORMATS, OPTIONS

DESCRIPTION = "Train translation models; translate, score, evaluate and plot with them."
OWN = "default: the run's own setting"


class _Parser(argparse.ArgumentParser):
    """A parser that raises ValueError and does not accept abbreviated options."""

    def __init__(self, **settings: Any):
        """Take the settings of argparse."""
        super().__init__(allow_abbrev=False, **settings)

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> tuple[Any, list[str]]:
        """Parse, and refuse unknown arguments here, where `prog` is the command that lacks them."""
        namespace, unknown = super().parse_known_args(args, namespace)
        if self.get_default("settings") is not None:  # of training: see `cli.distill`
            namespace.settings = unknown
            unknown = [each for each in unknown if each.startswith("--") and "." not in each]
        if unknown:
            self.error(f"unrecognized arguments: {' '.join(unknown)}")
        return namespace, unknown

    def error(self, message: str) -> None:
        raise ValueError(f"{message}. See {self.prog} --help.")


class _Version(argparse.Action):
    """Prints versions and ends; they are read only then, and without importing the packages."""

    def __init__(self, option_strings: list[str], dest: str):
        super().__init__(
            option_strings, dest, nargs=0, help="print the version of this program, jax and Python"
        )

    def __call__(self, parser: argparse.ArgumentParser, *args: Any) -> None:
        import importlib.metadata
        import platform
        import sys

        # Not of the metadata, which a clone that is not installed lacks.
        own = sys.modules["flaxformer_min"].__version__
        jax, python = importlib.metadata.version("jax"), platform.python_version()
        print(f"{parser.prog} {own}, jax {jax}, Python {python}")
        parser.exit()


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of all commands."""
    parser = _Parser(prog="flaxformer-min", description=DESCRIPTION)
    parser.add_argument("--version", action=_Version)
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    # Only for --help: `main` passes its arguments to cli/train.py.
    _add_command(commands, "train", "train a model, or continue a run")
    _add_inspect(commands)
    _add_translate(commands)
    _add_score(commands)
    _add_evaluate(commands)
    _add_distill(commands)
    _add_serve(commands)
    _add_interop(commands)
    plots = _add_command(commands, "plot", "draw attention, positional encodings or curves")
    plots = plots.add_subparsers(title="what to plot", metavar="WHAT", required=True)
    _add_plots(plots)
    return parser


# fmt: off
def _add_command(commands: Any, name: str, purpose: str, run: Callable | None = None) -> _Parser:
    description = f"{purpose[0].upper()}{purpose[1:]}."
    parser = commands.add_parser(name, help=purpose, description=description)
    parser.set_defaults(command=run)
    return parser


def _add_inspect(commands: Any) -> None:
    purpose = "report what is unusual in the text of a corpus, line by line"
    parser = _add_command(commands, "inspect", purpose, inspect)
    add = parser.add_argument
    add("corpus", metavar="CORPUS", help="text:DIR or any other corpus of --data.corpus")
    add("--languages", metavar="SOURCE-TARGET",
        help="its languages, such as en-ko; required for files of text (default: the corpus's own)")
    add("--samples", type=_number(int, at_least=0), default=3, metavar="N",
        help="print at most N lines of each kind, evenly spaced (default: 3)")
    add("--json", action="store_true",
        help="write every finding as a JSON object: split, line, kind, detail, source and target "
        "(default: a report with samples)")
    add("--write", metavar="DIR",
        help="write the text to this folder, which must be new or empty, without the lines of the "
        "training split that have a kind of --drop (default: only report)")
    add("--drop", metavar="KIND", nargs="+", default=(),
        help="kinds to leave out of the copy, as the report names them (default: none)")


def _add_translate(commands: Any) -> None:
    purpose = "translate lines of text, from stdin to stdout"
    parser = _add_command(commands, "translate", purpose, translate)
    add = parser.add_argument
    _add_runs(parser)
    add("--input", metavar="FILE", help="read lines from this file (default: stdin)")
    add("--output", metavar="FILE", help="write to this file, atomically (default: stdout)")
    _add_search(parser)
    add("--n-best", type=_number(int, at_least=1), default=1, metavar="N",
        help="translations of each line, best first: N output lines (one with --json), the last "
        "ones empty if fewer were found (default: 1)")
    add("--prefix-file", metavar="FILE",
        help="how each translation must begin, line by line; an empty line for no constraint "
        "(default: no prefixes)")
    add("--split-sentences", action="store_true",
        help="translate each sentence of a line by itself, and put the line together again "
        "(default: a line is one sentence)")
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--scores", action="store_true",
        help="write score, log-probability in nats and text, separated by tabs "
        "(default: the text)")
    form.add_argument("--json", action="store_true",
        help="write one JSON object per line: line, source and hypotheses, each with text, "
        "log_prob and score (default: the text)")
    _add_sampling(parser)
    _add_device(parser)
    add("--verbose", action="store_true",
        help="print speed, compilations and the sizes of batches on stderr at the end "
        "(default: warnings only)")


def _add_score(commands: Any) -> None:
    purpose = "print the log-probability of given translations in nats"
    parser = _add_command(commands, "score", purpose, score)
    add = parser.add_argument
    add("runs", metavar="RUN", nargs=1, help="the folder of a run")
    add("source", metavar="SOURCE", help="file of sentences")
    add("target", metavar="TARGET", help="file of their translations, line by line")
    add("--per-token", action="store_true",
        help="write each token and its log-probability after the pair's, separated by tabs "
        "(default: the pair's only)")
    add("--json", action="store_true",
        help="write one JSON object per line: line, log_prob, tokens, log_probs "
        "(default: the number only)")
    _add_device(parser)


def _add_evaluate(commands: Any) -> None:
    purpose = "translate a test set and print BLEU, chrF, exact match, perplexity and speed"
    parser = _add_command(commands, "evaluate", purpose, evaluate)
    add = parser.add_argument
    _add_runs(parser)
    add("--corpus", metavar="CORPUS",
        help="where the split is from; required for a run trained on text: files (default: the "
        "run's own corpus)")
    add("--split", metavar="NAME", help="split of the corpus (default: test)")
    add("--source", metavar="FILE", help="sentences to translate (default: the split's)")
    add("--reference", metavar="FILE",
        help="their translations, line by line (default: the split's)")
    add("--languages", metavar="SOURCE-TARGET",
        help="languages of the test set, such as en-ja (default: the run's own)")
    add("--tokenize", metavar="NAME",
        help="sacreBLEU's tokenizer for BLEU (default: one that fits the target language)")
    add("--lowercase", action="store_true",
        help="ignore case in BLEU and chrF (default: case-sensitive)")
    add("--output", metavar="FILE",
        help="write the translations to this file, line by line (default: none)")
    add("--json", action="store_true",
        help="write everything as one JSON object (default: as text)")
    _add_search(parser)
    _add_device(parser)


def _add_distill(commands: Any) -> None:
    purpose = "translate training text with other models, and train a model on both"
    parser = _add_command(commands, "distill", purpose)
    parser.epilog = "Settings of the student follow as in train, such as --training.steps 8000."
    parser.set_defaults(settings=[])
    add = parser.add_argument
    add("teachers", metavar="TEACHER", nargs="+",
        help="the folder of a run, which translates the sources; or a file of translations, one "
        "line for each training pair")
    add("--config", required=True, metavar="CONFIG",
        help="config of the student, with the text to translate (no default)")
    add("--workdir", required=True, metavar="STUDENT",
        help="the run folder of the student (no default)")
    add("--monolingual", metavar="FILE", action="append", default=[],
        help="further sentences to translate, one a line; may be repeated (default: none)")
    add("--ensemble", action="store_true",
        help="translate with all runs together (default: with each by itself)")
    _add_search(parser)
    add("--n-best", type=_number(int, at_least=1), default=1, metavar="N",
        help="translations of each line to train on (default: 1)")
    _add_sampling(parser)
    _add_device(parser)


def _add_serve(commands: Any) -> None:
    parser = _add_command(commands, "serve", "serve translations over HTTP, and a page", serve)
    add = parser.add_argument
    add("runs", metavar="RUN", nargs="+",
        help="the folder of a run; each of several has other languages")
    add("--host", metavar="ADDRESS", default="127.0.0.1",
        help="address to listen on; one that other machines can reach needs --api-key-file or "
        "--insecure (default: 127.0.0.1)")
    add("--port", type=_number(int, 0, 65_535), default=5000, metavar="N",
        help="port to listen on; 0: any that is free (default: 5000)")
    add("--api-key-file", metavar="FILE",
        help="keys, one a line; a request must have one of them (default: none is needed)")
    add("--insecure", action="store_true",
        help="let other machines use the server without a key (default: this machine only)")
    add("--cors", metavar="ORIGIN", action="append",
        help="let pages from this origin, such as https://example.org, use the server; may be "
        "repeated (default: its own page only)")
    add("--char-limit", type=_number(int, at_least=1), default=20_000, metavar="N",
        help="most characters of a request (default: 20000)")
    add("--queue", type=_number(int, at_least=1), default=1_000, metavar="N",
        help="most sentences that wait; a request for which there is no room is refused (default: "
        "1000)")
    add("--deadline", type=_number(float, more_than=0, at_most=3_600), default=30.0, metavar="S",
        help="seconds after which a request is given up (default: 30)")
    add("--log-text", action="store_true",
        help="log texts and translations (default: neither is logged)")
    _add_search(parser)
    parser.set_defaults(step=None)


def _add_plots(commands: Any) -> None:
    purpose = "draw the attention weights of a sentence"
    parser = _add_command(commands, "attention", purpose, plot_attention)
    add = parser.add_argument
    output = {"required": True, "metavar": "FILE"}
    add("runs", metavar="RUN", nargs=1, help="the folder of a run")
    add("sentence", metavar="SENTENCE", help="the source sentence")
    add("--output", **output,
        help=".png, .svg or .pdf for a figure, .html for an interactive page (no default)")
    add("--target", metavar="TEXT",
        help="the translation (default: the model's own)")
    add("--layer", type=_number(int, at_least=1), metavar="N",
        help="layer of a figure, from 1, the lowest (default: the highest)")
    add("--head", type=_head, metavar="N|mean|all",
        help="head of a figure, from 1, the mean of all, or a panel for each (default: all)")
    _add_step(parser)
    purpose = "draw the positional encoding in both layouts"
    parser = _add_command(commands, "positions", purpose, plot_positions)
    parser.add_argument("--output", **output, help=".png, .svg or .pdf (no default)")
    parser = _add_command(commands, "curves", "draw the training curves of a run", plot_curves)
    parser.add_argument("runs", metavar="RUN", nargs=1, help="the folder of a run")
    parser.add_argument("--output", **output, help=".png, .svg or .pdf (no default)")


def _add_interop(commands: Any) -> None:
    parser = _add_command(commands, "export", "write a model for other software", export)
    add = parser.add_argument
    add("runs", metavar="RUN", nargs=1, help="the folder of a run")
    add("out", metavar="OUT", help="the folder to write; it must be new or empty")
    add("--format", required=True, choices=FORMATS,
        help="CTranslate2, Marian of Hugging Face, or a StableHLO program for jax (no default)")
    add("--quantization", choices=OPTIONS["quantization"][1],
        help="type of CTranslate2's weights (default: float32)")
    add("--weights", choices=OPTIONS["weights"][1],
        help="where a StableHLO program has its weights (default: beside)")
    purpose = "make a run from a Marian model, such as OPUS-MT's"
    parser = _add_command(commands, "import", purpose, import_)
    add = parser.add_argument
    add("model", metavar="MODEL",
        help="its folder: Hugging Face's, with model.safetensors, or Marian's own: an .npz with "
        "its vocabulary and .spm files; or an .npz in a folder with several")
    add("run", metavar="RUN", help="the run folder to make; it must be new or empty")
    add("--ignore", metavar="SETTING", action="append", default=[],
        help="leave out a setting of the model's search that this package does not have, such as "
        "no_repeat_ngram_size; may be repeated (default: refuse the model)")


def _add_runs(parser: _Parser) -> None:
    parser.add_argument(
        "runs",
        metavar="RUN",
        nargs="+",
        help="the folder of a run; several runs with the same vocabulary form an ensemble",
    )


def _add_search(parser: _Parser) -> None:
    _add_settings(parser, SHOWN)


def _add_sampling(parser: _Parser) -> None:
    parser = parser.add_argument_group("sampling")
    parser.add_argument("--sample", action="store_true",
        help="sample --n-best translations; with --beam-size, sample that many and return the best "
        "of them by score (default: search for the best)")
    _add_settings(parser, ("temperature", "top_k", "top_p", "seed"))


def _add_device(parser: _Parser) -> None:
    _add_step(parser)
    _add_settings(parser, ("batch_size",))
    parser.add_argument("--dtype", choices=("auto", "float32", "bfloat16"),
        help="type of the computations; on a CPU, bfloat16 applies to products with weights only; "
        "auto is bfloat16 on a TPU and on GPUs that have it (default: the type of training)")


def _add_settings(parser: Any, names: Sequence[str]) -> None:
    """Add settings of a search, with the types, limits and descriptions of `SearchConfig`."""
    descriptions, hints = field_descriptions(SearchConfig), get_type_hints(SearchConfig)
    for name in names:
        limits = SearchConfig.__dataclass_fields__[name].metadata
        option = {"action": argparse.BooleanOptionalAction}
        if hints[name] is not bool:
            kind = float if hints[name] is float else int
            most = limits["at_most"] if limits["less_than"] is None else limits["less_than"] - 1
            least, above = limits["at_least"], limits["more_than"]
            option = {
                "type": _number(
                    kind,
                    -math.inf if least is None else least,
                    math.inf if most is None else most,
                    -math.inf if above is None else above,
                ),
                "metavar": "N" if kind is int else "X",
            }
        help = f"{descriptions[name]} ({OWN})"
        parser.add_argument("--" + name.replace("_", "-"), help=help, **option)


def _add_step(parser: _Parser) -> None:
    parser.add_argument("--step", type=_number(int, at_least=0), metavar="N",
        help="checkpoint of this step (default: the averaged one if the run has one, else the best "
        "by validation, else the newest)")


# fmt: on
def _number(
    kind: type,
    at_least: float = -math.inf,
    at_most: float = math.inf,
    more_than: float = -math.inf,
) -> Callable[[str], Any]:
    """Return a function that reads a number within limits."""
    name = "a whole number" if kind is int else "a number"
    if math.isfinite(more_than):
        limits = f"greater than {_plain(more_than)} and at most {_plain(at_most)}"
    elif math.isfinite(at_most):
        limits = f"from {_plain(at_least)} to {_plain(at_most)}"
    else:
        limits = f"of at least {_plain(at_least)}"
    rule = f"must be {name} {limits}"

    def read(text: str) -> Any:
        try:
            value = kind(text)
        except ValueError:
            value = math.nan
        # Comparisons are false for NaN, too. `math.isinf` cannot take every whole number.
        if not (at_least <= value <= at_most and value > more_than) or value == math.inf:
            raise argparse.ArgumentTypeError(f"{rule}; got {text!r}")
        return value

    return read


def _plain(limit: float) -> str:
    """Return a limit without an exponent or superfluous zeros: 0.000001, 1,000,000."""
    return f"{limit:,.6f}".rstrip("0").rstrip(".")


def _head(text: str) -> int | str:
    if text in ("mean", "all"):
        return text
    try:
        return _number(int, at_least=1)(text)
    except argparse.ArgumentTypeError:
        rule = "must be mean, all or the number of a head, from 1"
        raise argparse.ArgumentTypeError(f"{rule}; got {text!r}") from None
