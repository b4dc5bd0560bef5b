"""`translate`: translate lines of text."""

import argparse
import contextlib
import json
import math
import os
import shlex
import sys
from collections.abc import Iterator
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
    _check_sampling(args)
    _check_runs(args)
    with contextlib.ExitStack() as stack:
        files = [stack.enter_context(open_lines(args.input))]
        if args.prefix_file:
            files.append(stack.enter_context(open_lines(args.prefix_file)))
        output = stack.enter_context(open_output(args.output))
        translator = load(args)
        speed = Speed(translator)
        shown = not files[0].typed and (args.output is not None or not sys.stdout.isatty())
        advance = stack.enter_context(progress(None, shown))
        for number, (lines, *prefixes) in aligned(*files):
            with stop.patiently():
                found = translator.hypotheses(
                    lines, *prefixes, first_line=number, stop=stop, scores=args.scores or args.json
                )
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


def _check_sampling(args: argparse.Namespace) -> None:
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
