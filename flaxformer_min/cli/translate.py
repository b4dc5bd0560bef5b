"""`translate`: translate lines of text."""

import argparse
import contextlib
import json
import math
import os
import shlex
import sys
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from flaxformer_min.cli.lines import (
    Stop,
    aligned,
    json_number,
    on_one_line,
    open_lines,
    open_output,
    progress,
    write,
)
from flaxformer_min.cli.options import load
from flaxformer_min.cli.speed import Speed


def translate(args: argparse.Namespace, stop: Stop) -> int:
    """Run the command, and return its exit status."""
    check_sampling(args)
    _check_runs(args)
    _check_split(args)
    with contextlib.ExitStack() as stack:
        files = [stack.enter_context(open_lines(args.input))]
        if args.prefix_file:
            files.append(stack.enter_context(open_lines(args.prefix_file)))
        output = stack.enter_context(open_output(args.output))
        translator = load(args)
        search = partial(translator.hypotheses, scores=args.scores or args.json)
        if args.split_sentences:
            search = partial(_by_sentence, search, _languages(args.runs[0]))
        speed = Speed(translator)
        shown = not files[0].typed and (args.output is not None or not sys.stdout.isatty())
        advance = stack.enter_context(progress(None, shown))
        for number, (lines, *prefixes) in aligned(*files):
            with stop.patiently():
                found = search(lines, *prefixes, first_line=number, stop=stop)
                numbered = zip(range(number, number + len(lines)), lines, found, strict=True)
                write(output, [text for one in numbered for text in _translated(args, *one)])
            speed.count([of_line[0].text for of_line in found])
            advance(len(lines))
    if args.verbose:
        _print_speed(translator, speed)
    return 0


def _check_runs(args: argparse.Namespace) -> None:
    for run in args.runs:
        if os.path.isfile(run) and os.path.basename(run) != "config.json":
            option = shlex.join(["--input", run])
            raise ValueError(f"a run is a folder; {run} is a file. To translate it: {option}")


def _check_split(args: argparse.Namespace) -> None:
    if not args.split_sentences:
        return
    from flaxformer_min.server import check_installed

    check_installed("--split-sentences needs", "sentencex")
    if args.prefix_file:
        raise ValueError("--prefix-file constrains whole lines; leave out --split-sentences.")


def _languages(run: str) -> tuple[str, str]:
    from flaxformer_min.languages import parse_languages
    from flaxformer_min.storage.run_folder import RunFolder

    languages = RunFolder(run).config().data.languages
    return parse_languages(languages) if languages else ("", "")


def _by_sentence(
    search: Callable[..., list[Any]], languages: tuple[str, str], lines: list[str], **settings: Any
) -> list[Any]:
    """Search for translations of the sentences of each line, and return those of the lines."""
    from flaxformer_min.server.documents import deal, split_text

    documents = [split_text(line, *languages) for line in lines]
    found = search([each for document in documents for each in document.sentences], **settings)
    return [document.join_hypotheses(part) for document, part in deal(documents, found)]


def check_sampling(args: argparse.Namespace) -> None:
    """Raise ValueError for settings of samples without `--sample`."""
    for flag in ("temperature", "top_k", "top_p", "seed"):
        if getattr(args, flag) is not None and not args.sample:
            raise ValueError(f"--{flag.replace('_', '-')} is for sampling; add --sample.")


def _translated(
    args: argparse.Namespace, number: int, source: str, found: list[Any]
) -> Iterator[str]:
    """Yield the output lines of one input line."""
    if args.json:
        hypotheses = [
            {"text": text, "log_prob": json_number(log_prob), "score": json_number(score)}
            for text, log_prob, score in found
        ]
        content = {"line": number, "source": source, "hypotheses": hypotheses}
        yield json.dumps(content, ensure_ascii=False)
        return
    for text, log_prob, score in found + [("", -math.inf, -math.inf)] * (args.n_best - len(found)):
        text = on_one_line(text)
        yield f"{score:.4f}\t{log_prob:.4f}\t{text}" if args.scores else text


def _print_speed(translator: Any, speed: Speed) -> None:
    config, runner = translator.decoding, translator.runner
    widths = ", ".join(map(str, runner.widths))
    rows = config.batch_size or runner.rows
    print(
        f"{speed}\nat most {rows} sentences on each device, padded to {widths} tokens",
        file=sys.stderr,
    )
