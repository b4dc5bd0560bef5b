"""The command `flaxformer-min`: translate, score, evaluate and plot with a run that was trained.

What comes out is line-aligned with what went in, and streams: a million lines never lie in memory.
A user's mistake is one sentence on stderr and status 2. Heavy imports wait until they are needed,
so that `--help` is there at once.
"""

import argparse
import contextlib
import functools
import itertools
import json
import math
import os
import select
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

from flaxformer_min.stop import StopRequest

CHUNK = 1_024
"""Lines that are read, translated and written together, at most."""

BLOCK = 1 << 16
"""Bytes that are read at once, at most."""

CLOSED_PIPE = 141
"""The status of a program that a closed pipe ends, as a shell sees it: 128 + SIGPIPE."""

OWN = "default: the run's own setting"
SEARCH = ("beam_size", "length_penalty", "max_extra_tokens", "min_length")
FIGURES = (".png", ".svg", ".pdf")


def main(argv: list[str] | None = None) -> int:
    """Run one command and return its exit status; `argv` None: what the shell gave.

    0 when all is done, 2 for a mistake of the user, 130 and 143 after Ctrl-C and SIGTERM, 141 when
    the reader of a pipe has gone.
    """
    try:
        with Stop() as stop:
            try:
                args = make_parser().parse_args(argv)
                if argv is None:
                    _keep_compiled_programs()
                return args.command(args, stop)
            except KeyboardInterrupt:
                return stop.status or 130
    except BrokenPipeError:
        _drop_stdout()
        return CLOSED_PIPE
    except (ValueError, OSError, ImportError) as error:
        _drop_stdout()
        print(f"flaxformer-min: error: {_sentence(error)}", file=sys.stderr)
        return 2
    except RuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        print(
            "flaxformer-min: error: the device has not enough memory for this; choose a smaller "
            "--batch-size, --beam-size or --max-extra-tokens.",
            file=sys.stderr,
        )
        return 2


class Stop(StopRequest):
    """A signal ends at once what loads or waits; `patiently`, what is being done is finished.

    A second signal always ends at once. Either way it is a KeyboardInterrupt, so that what is half
    written is cleaned up.
    """

    patient = False

    def _handle(self, number, frame) -> None:
        again = bool(self)
        self.signal_number = number
        if again or not self.patient:
            raise KeyboardInterrupt

    @contextlib.contextmanager
    def patiently(self) -> Iterator[None]:
        """Do not interrupt what is inside, but what comes after it."""
        self.patient = True
        try:
            yield
        finally:
            self.patient = False
        if self:
            raise KeyboardInterrupt


def _drop_stdout() -> None:
    """Where it takes nothing more: Python flushes once more at its end, and would complain."""
    try:
        sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _sentence(error: Exception) -> str:
    if isinstance(error, OSError) and error.strerror:
        return f"{error.filename}: {error.strerror}" if error.filename else error.strerror
    return str(error)


def _warn(message: Any) -> None:
    """Tell it on stderr."""
    print(f"flaxformer-min: warning: {message}", file=sys.stderr)


def _keep_compiled_programs() -> None:
    from flaxformer_min.data.corpus import cache_folder
    from flaxformer_min.devices import keep_compiled_programs

    keep_compiled_programs(cache_folder())


# What is typed


class _Parser(argparse.ArgumentParser):
    """Tells a mistake as this program tells all of them, and takes no flag that is cut short."""

    def __init__(self, **settings: Any):
        """Of argparse's own settings."""
        super().__init__(allow_abbrev=False, **settings)

    def error(self, message: str) -> None:
        raise ValueError(f"{message}. See {self.prog} --help.")


def make_parser() -> argparse.ArgumentParser:
    """The commands, their arguments and what `--help` says of them."""
    parser = _Parser(prog="flaxformer-min", description=__doc__.split("\n")[0])
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
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
    add("--step", type=_number(int, at_least=0), metavar="N",
        help="checkpoint of this step (default: the best, else the newest)")
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
    add("--length-penalty", type=_number(float, at_least=0, at_most=100), metavar="ALPHA",
        help=f"the larger, the longer the translations ({OWN})")
    add("--max-extra-tokens", type=_number(int, at_least=1, at_most=100_000), metavar="N",
        help=f"tokens a translation may have more than its source ({OWN})")
    add("--min-length", type=_number(int, at_least=0), metavar="N", default=0,
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
    add = parser.add_argument
    add("--step", type=_number(int, at_least=0), metavar="N",
        help="checkpoint of this step (default: the best by validation, else the newest)")
    add("--batch-size", type=_number(int, at_least=1), metavar="N",
        help=f"sentences at once on each device ({OWN})")


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


# Lines in, lines out


class Lines:
    r"""Lines of an open file as they come, decoded; `count` of them were taken so far.

    Only \n ends a line; a \r before it and a BOM are dropped. Bytes that are no UTF-8 become U+FFFD
    with a warning. At a terminal it prompts.
    """

    def __init__(self, file: Any, name: str, warn: Callable[[str], None] = _warn):
        """`name` is what to call it in warnings."""
        self.name, self.count = name, 0
        self.typed = os.isatty(file.fileno())
        self._descriptor, self._warn = file.fileno(), warn
        self._lines: list[bytes] = []
        self._rest, self._ended = bytearray(), False

    def take(self, most: int, wait: bool = False) -> list[str]:
        """The next lines, `most` at most: those that are there already, and at least one.

        Fewer, with `wait`, only at the end. None at all: this was the end.
        """
        while len(self._lines) < most and not self._ended:
            if self._lines and not wait and not select.select([self._descriptor], [], [], 0)[0]:
                break
            self._read_block()
        taken, self._lines = self._lines[:most], self._lines[most:]
        return [self._decode(line) for line in taken]

    def _read_block(self) -> None:
        if self.typed and not self._rest:
            print("> ", end="", file=sys.stderr, flush=True)
        block = os.read(self._descriptor, BLOCK)
        self._rest += block
        if b"\n" in block:
            *lines, self._rest = self._rest.split(b"\n")
            self._lines += lines
        if not block:
            self._ended = True
            self._lines += [self._rest] if self._rest else []

    def _decode(self, line: bytes) -> str:
        self.count += 1
        line = line.removesuffix(b"\r")
        if self.count == 1:
            line = line.removeprefix(b"\xef\xbb\xbf")
        try:
            return line.decode()
        except UnicodeDecodeError as error:
            self._warn(
                f"{self.name}, line {self.count} is no UTF-8 from byte {error.start + 1} on; what "
                "cannot be read is replaced by U+FFFD."
            )
            return line.decode(errors="replace")


@contextlib.contextmanager
def open_lines(path: str | None, warn: Callable = _warn) -> Iterator[Lines]:
    """The lines of a file, or of stdin."""
    if path is None:
        yield Lines(sys.stdin, "stdin", warn)
    else:
        with open(path, "rb", buffering=0) as file:
            yield Lines(file, path, warn)


def aligned(first: Lines, *others: Lines) -> Iterator[tuple[int, list[list[str]]]]:
    """The number of the next line, and the next lines of each file, the same number of each.

    Raises ValueError, after the common lines, where one has more lines than another.
    """
    while True:
        number = first.count + 1
        lines = first.take(1 if first.typed else CHUNK)
        beside = [other.take(len(lines) or 1, wait=True) for other in others]
        if any(len(other) != len(lines) for other in beside):
            break
        if not lines:
            return
        yield number, [lines, *beside]
    counts = []
    for file in (first, *others):
        while file.take(CHUNK, wait=True):
            pass
        counts.append(f"{file.name} has {file.count:,}")
    raise ValueError(f"files must have the same number of lines; {' and '.join(counts)}.")


def read_aligned(*paths: str, warn: Callable = _warn) -> Iterator[tuple[int, list[list[str]]]]:
    """`aligned` for files by name."""
    with contextlib.ExitStack() as stack:
        yield from aligned(*[stack.enter_context(open_lines(path, warn)) for path in paths])


@contextlib.contextmanager
def open_output(path: str | None) -> Iterator[BinaryIO]:
    """Stdout, or a file that is there whole or not at all (a device or pipe is written to)."""
    if path is None:
        yield sys.stdout.buffer
        return
    place = Path(path).resolve()
    if place.exists() and not place.is_file():
        with place.open("wb") as file:
            yield file
        return
    if not place.parent.is_dir():
        raise ValueError(f"there is no folder {str(place.parent)!r} to write in; make it first.")
    scratch = place.with_name(f".{place.name}.{os.getpid()}.partial")
    try:
        with scratch.open("xb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(scratch, place)
    finally:
        scratch.unlink(missing_ok=True)


def write(output: BinaryIO, lines: list[str]) -> None:
    """Write lines, now."""
    output.write("".join(f"{line}\n" for line in lines).encode())
    output.flush()


@contextlib.contextmanager
def progress(total: int | None, shown: bool = True) -> Iterator[Callable[[int], Any]]:
    """Counts sentences on stderr, where that is a terminal; gives what to call with each few."""
    if not (shown and sys.stderr.isatty()):
        yield lambda count: None
        return
    from tqdm import tqdm

    with tqdm(total=total, unit=" sentences", leave=False) as bar:
        yield bar.update


# What all commands share


def load(args: argparse.Namespace) -> Any:
    """The translator of the runs that were named."""
    import dataclasses
    import logging

    from flaxformer_min.decoding.translator import Translator

    logging.getLogger("absl").setLevel(logging.ERROR)  # Orbax tells its own defaults
    translator = Translator.load(*args.runs, step=args.step, warn=_warn)
    if getattr(args, "batch_size", None):
        decoding = dataclasses.replace(translator.decoding, batch_size=args.batch_size)
        translator.decoding = decoding
    return translator


def search_options(args: argparse.Namespace, translator: Any) -> Any:
    """How to search: what was typed, else the run's own way."""
    from flaxformer_min.decoding.search import Sampling

    typed = {name: getattr(args, name, None) for name in (*SEARCH, "n_best")}
    changes = {name: value for name, value in typed.items() if value is not None}
    if getattr(args, "sample", False):
        sampling = Sampling(args.temperature or 1.0, args.top_k, args.top_p or 1.0)
        changes |= {"sampling": sampling, "seed": args.seed or 0}
        changes.setdefault("beam_size", args.n_best)
    options = translator.options(**changes)
    if options.n_best > options.beam_size:
        raise ValueError(
            f"--n-best must not exceed the hypotheses there are; got {options.n_best} of "
            f"{options.beam_size}. Raise --beam-size."
        )
    vocab_size = translator.target_tokenizer.vocab_size
    if options.beam_size > vocab_size:
        raise ValueError(
            f"--beam-size must not exceed the vocabulary of {vocab_size:,}, for there are no more "
            f"continuations; got {options.beam_size:,}."
        )
    return options


class Speed:
    """Counts what a translator writes, and the seconds since it began."""

    def __init__(self, translator: Any):
        """Begin now."""
        self._translator, self._since = translator, time.perf_counter()
        self.sentences = self.tokens = 0
        self.seconds, self.compilations = 0.0, 0

    def count(self, texts: list[str]) -> None:
        """Count these translations, EOS included."""
        self.seconds = time.perf_counter() - self._since
        self.compilations = self._translator.compilations
        self.sentences += len(texts)
        self.tokens += sum(map(len, self._translator.target_tokenizer.encode_batch(texts)))

    def to_dict(self) -> dict[str, Any]:
        """Counts and rates."""
        seconds = max(self.seconds, 1e-9)
        return {
            "seconds": round(self.seconds, 3),
            "sentences_per_second": round(self.sentences / seconds, 2),
            "tokens_per_second": round(self.tokens / seconds, 2),
            "compilations": self.compilations,
            "device": _device(),
        }

    def __str__(self) -> str:
        """One line for people."""
        seconds = max(self.seconds, 1e-9)
        return (
            f"{self.sentences:,} sentences, {self.tokens:,} tokens in {self.seconds:.1f} s = "
            f"{self.sentences / seconds:,.1f} sentences/s, {self.tokens / seconds:,.1f} tokens/s "
            f"on {_device()}; compilations, included: {self.compilations}"
        )


def _device() -> str:
    from flaxformer_min.devices import describe

    return describe()


def _finite(value: float) -> float | None:
    """JSON knows no infinity."""
    return round(value, 6) if math.isfinite(value) else None


def perplexity(log_prob: float, tokens: int) -> float:
    """Of tokens that together have this log-probability.

    >>> perplexity(2 * math.log(1 / 8), tokens=2)
    8.0
    """
    mean = -log_prob / tokens
    return math.exp(mean) if mean < 700 else math.inf


# The commands


def translate(args: argparse.Namespace, stop: Stop) -> int:
    """Lines in, translations out."""
    _check_sampling(args)
    with contextlib.ExitStack() as stack:
        files = [stack.enter_context(open_lines(args.input))]
        if args.prefix_file:
            files.append(stack.enter_context(open_lines(args.prefix_file)))
        output = stack.enter_context(open_output(args.output))
        translator = load(args)
        options = search_options(args, translator)
        speed = Speed(translator)
        shown = not files[0].typed and (args.output is not None or not sys.stdout.isatty())
        told = stack.enter_context(progress(None, shown))
        for number, (lines, *prefixes) in aligned(*files):
            with stop.patiently():
                found = translator.hypotheses(
                    lines, options, *prefixes, first_line=number, warn=_warn, stop=stop.__bool__
                )
                numbered = zip(range(number, number + len(lines)), lines, found, strict=True)
                write(output, [text for one in numbered for text in _translated(args, *one)])
            speed.count([of_line[0].text for of_line in found])
            told(len(lines))
    if args.verbose:
        _tell_speed(translator, speed)
    return 0


def _check_sampling(args: argparse.Namespace) -> None:
    for flag in ("temperature", "top_k", "top_p", "seed"):
        if getattr(args, flag) is not None and not args.sample:
            raise ValueError(f"--{flag.replace('_', '-')} is for sampling; add --sample.")


def _translated(
    args: argparse.Namespace, number: int, source: str, found: list[Any]
) -> Iterator[str]:
    """The lines that are written for one line."""
    if args.json:
        hypotheses = [
            {"text": text, "log_prob": _finite(log_prob), "score": _finite(score)}
            for text, log_prob, score in found
        ]
        content = {"line": number, "source": source, "hypotheses": hypotheses}
        yield json.dumps(content, ensure_ascii=False)
        return
    for text, log_prob, score in found + [("", -math.inf, -math.inf)] * (args.n_best - len(found)):
        text = _on_one_line(text)
        yield f"{score:.4f}\t{log_prob:.4f}\t{text}" if args.scores else text


def _on_one_line(text: str) -> str:
    """Bytes that a model spells may be a line break."""
    return text.replace("\n", " ").replace("\r", " ")


def _tell_speed(translator: Any, speed: Speed) -> None:
    from flaxformer_min.decoding.translator import BATCHES, LENGTHS

    full = translator.decoding.batch_size
    rows = ", ".join(map(str, [*(size for size in BATCHES if size < full), full]))
    print(
        f"{speed}\nsources are padded to {', '.join(map(str, LENGTHS))} tokens and batches to "
        f"{rows} sentences on each device",
        file=sys.stderr,
    )


def score(args: argparse.Namespace, stop: Stop) -> int:
    """The log-probability of each pair, and the perplexity of all."""
    paths = (args.source, args.target)
    if all(os.path.isfile(path) for path in paths):
        # Before hours of scores of the wrong pairs.
        for _ in read_aligned(*paths, warn=lambda message: None):
            pass
    total, pairs, tokens = 0.0, 0, 0
    with open_output(None) as output, progress(None, not sys.stdout.isatty()) as told:
        chunks = read_aligned(*paths)
        first = next(chunks, None)
        translator = load(args)
        for number, sides in itertools.chain([first] if first else [], chunks):
            with stop.patiently():
                found = translator.score(
                    list(zip(*sides, strict=True)),
                    first_line=number,
                    warn=_warn,
                    stop=stop.__bool__,
                )
                write(output, [_scored(args, number + i, one) for i, one in enumerate(found)])
            total += sum(one.log_prob for one in found)
            pairs, tokens = pairs + len(found), tokens + sum(len(one.tokens) for one in found)
            told(len(found))
    summary = f"{pairs:,} pairs, {tokens:,} target tokens, EOS included"
    if tokens:
        summary += f": perplexity {perplexity(total, tokens):.4f} per token"
    print(summary, file=sys.stderr)
    return 0


def _scored(args: argparse.Namespace, number: int, found: Any) -> str:
    if args.json:
        content = {"line": number, "log_prob": _finite(found.log_prob), "tokens": found.tokens}
        content["log_probs"] = [_finite(value) for value in found.log_probs]
        return json.dumps(content, ensure_ascii=False)
    columns = [f"{found.log_prob:.4f}"]
    if args.per_token:
        for token, log_prob in zip(found.tokens, found.log_probs, strict=True):
            columns += [token.replace("\t", "<0x09>"), f"{log_prob:.4f}"]
    return "\t".join(columns)


def evaluate(args: argparse.Namespace, stop: Stop) -> int:
    """All measures of one test set."""
    from flaxformer_min import evaluation

    with open_output(args.output) if args.output else contextlib.nullcontext() as kept:
        data, languages, pairs = _test_set(args)
        target = languages.partition("-")[2]
        tokenize = args.tokenize or evaluation.default_tokenize(target)
        evaluation.bleu(["a"], ["a"], tokenize=tokenize)  # fails before the work, not after it
        used = [bool(source.strip() and reference.strip()) for source, reference in pairs]
        if not any(used):
            raise ValueError(f"{data} has no pair with text on both sides; there is none to score.")
        # Skipped pairs keep their places, so that a warning names the right line.
        pairs = [pair if use else ("", "") for pair, use in zip(pairs, used, strict=True)]
        translator = load(args)
        options = search_options(args, translator)
        speed, texts, log_prob, tokens = _translate_and_score(translator, options, pairs, stop)
        if kept:
            write(kept, texts)
    hypotheses, references = (
        list(itertools.compress(side, used)) for side in (texts, [b for _, b in pairs])
    )
    measured = evaluation.evaluate(
        hypotheses, references, lowercase=args.lowercase, tokenize=tokenize
    )
    report = {
        "runs": args.runs,
        "steps": translator.steps,
        "data": data,
        "languages": languages,
        "skipped": len(pairs) - len(references),
        "tokenize": tokenize,
        "lowercase": args.lowercase,
        **{name: getattr(options, name) for name in SEARCH},
        **measured.to_dict(),
        "perplexity": _finite(perplexity(log_prob, tokens)),
        "target_tokens": tokens,
        **speed.to_dict(),
    }
    with open_output(None) as output:
        write(output, _report(args, report, measured, speed))
    return 0


def _test_set(args: argparse.Namespace) -> tuple[str, str, list[tuple[str, str]]]:
    """What it is called, its languages, its pairs."""
    from flaxformer_min.data.corpus import read_pairs
    from flaxformer_min.run_folder import RunFolder

    data = RunFolder(args.runs[0]).config().data
    if (args.source is None) != (args.reference is None):
        raise ValueError("--source and --reference belong together; give both or neither.")
    if args.source is None:
        split = args.split or "test"
        pairs = list(read_pairs(data.corpus, split, data.languages, data.cache_dir))
        return f"{split} of {data.corpus}", data.languages, pairs
    if args.split is not None:
        raise ValueError("--split is of the run's own corpus; leave it out beside --source.")
    chunks = read_aligned(args.source, args.reference)
    pairs = [pair for _, sides in chunks for pair in zip(*sides, strict=True)]
    return f"{args.source} and {args.reference}", data.languages, pairs


def _translate_and_score(
    translator: Any, options: Any, pairs: list[tuple[str, str]], stop: Stop
) -> tuple[Speed, list[str], float, int]:
    """Translations of all pairs, and the log-probability and number of the references' tokens."""
    warn = functools.cache(_warn)  # both readings of a line may say the same
    speed, texts, log_prob, tokens = Speed(translator), [], 0.0, 0
    with progress(len(pairs)) as told:
        for start in range(0, len(pairs), CHUNK):
            chunk = pairs[start : start + CHUNK]
            common = {"first_line": start + 1, "warn": warn, "stop": stop.__bool__}
            with stop.patiently():
                found = translator.hypotheses([source for source, _ in chunk], options, **common)
            new = [_on_one_line(of_line[0].text) for of_line in found]
            speed.count([text for text, pair in zip(new, chunk, strict=True) if pair != ("", "")])
            texts += new
            told(len(chunk))
    for start in range(0, len(pairs), CHUNK):
        chunk = pairs[start : start + CHUNK]
        common = {"first_line": start + 1, "warn": warn, "stop": stop.__bool__}
        with stop.patiently():
            scores = translator.score(chunk, **common)
        kept = [one for one, pair in zip(scores, chunk, strict=True) if pair != ("", "")]
        log_prob += sum(one.log_prob for one in kept)
        tokens += sum(len(one.tokens) for one in kept)
    return speed, texts, log_prob, tokens


def _report(
    args: argparse.Namespace, report: dict[str, Any], measured: Any, speed: Speed
) -> list[str]:
    """The lines that `evaluate` writes."""
    if args.json:
        return [json.dumps(report, ensure_ascii=False)]
    runs = zip(report["runs"], report["steps"], strict=True)
    chosen = "as asked for" if args.tokenize else f"which fits {report['languages']}"
    return [
        f"model: {', '.join(f'{run}, step {step:,}' for run, step in runs)}",
        f"data: {report['data']}, {measured.sentences:,} pairs; {report['skipped']:,} with an "
        "empty side skipped",
        "search: " + ", ".join(f"{name.replace('_', ' ')} {report[name]}" for name in SEARCH),
        f"BLEU's tokenizer: {report['tokenize']}, {chosen}",
        *measured.lines(),
        f"perplexity = {report['perplexity']} per target token, EOS included, of "
        f"{report['target_tokens']:,}",
        f"speed: {speed}",
    ]


# Plots


def plot_attention(args: argparse.Namespace, stop: Stop) -> int:
    """A figure of one layer, or the page of all."""
    page = Path(args.output).suffix.lower() == ".html"
    _check_suffix(args.output, (*FIGURES, ".html"))
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
    from flaxformer_min import plots
    from flaxformer_min.run_folder import RunFolder

    source, _, target = RunFolder(args.runs[0]).config().data.languages.partition("-")
    # The decoder's own attention looks at what was read, BOS first, which the page cannot name.
    page = plots.attention_page(
        {"cross": attention.cross, "encoder": attention.encoder},
        attention.source_tokens,
        attention.target_tokens,
        source_language=source.replace("_", "-"),
        target_language=target.replace("_", "-"),
    )
    with open_output(args.output) as output:
        output.write(page.encode())


def plot_positions(args: argparse.Namespace, stop: Stop) -> int:
    """The encoding of 100 positions by 128 numbers."""
    _check_suffix(args.output, FIGURES)
    import jax.numpy as jnp

    from flaxformer_min.model.positions import sinusoidal_encoding

    both = [
        sinusoidal_encoding(jnp.arange(100), 128, layout) for layout in ("interleaved", "halves")
    ]
    _save_figure(args.output, lambda plots: plots.positions_figure(*both))
    return 0


def plot_curves(args: argparse.Namespace, stop: Stop) -> int:
    """Loss, BLEU, learning rate and speed by step."""
    _check_suffix(args.output, FIGURES)
    from flaxformer_min.run_folder import RunFolder
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
        raise ValueError(f"--output must end in {', '.join(known)}; got {path!r}.")


def _save_figure(path: str, draw: Callable[[Any], Any]) -> None:
    import warnings

    from flaxformer_min import plots

    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always", UserWarning)
        plots.save(draw(plots), path)
    for warning in said:
        _warn(warning.message)
