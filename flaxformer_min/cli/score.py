"""`score`: the log-probability of given translations."""

import argparse
import itertools
import json
import os
import sys
from typing import Any

from flaxformer_min.cli.lines import (
    Stop,
    json_number,
    open_output,
    progress,
    read_aligned,
    write,
)
from flaxformer_min.cli.options import load
from flaxformer_min.evaluation import perplexity


def score(args: argparse.Namespace, stop: Stop) -> int:
    """Run the command, and return its exit status."""
    paths = (args.source, args.target)
    if all(os.path.isfile(path) for path in paths):
        # Compare the numbers of lines before the work.
        for _ in read_aligned(*paths, warn=lambda message: None):
            pass
    total, pairs, tokens = 0.0, 0, 0
    with open_output(None) as output, progress(None, not sys.stdout.isatty()) as advance:
        chunks = read_aligned(*paths)
        first = next(chunks, None)
        translator = load(args)
        for number, sides in itertools.chain([first] if first else [], chunks):
            with stop.patiently():
                found = translator.score(
                    list(zip(*sides, strict=True)),
                    first_line=number,
                    stop=stop,
                )
                write(output, [_scored(args, number + i, one) for i, one in enumerate(found)])
            total += sum(one.log_prob for one in found)
            pairs, tokens = pairs + len(found), tokens + sum(len(one.tokens) for one in found)
            advance(len(found))
    summary = f"{pairs:,} pairs, {tokens:,} target tokens, EOS included"
    if tokens:
        summary += f": perplexity {perplexity(total, tokens):.4f} per token"
    print(summary, file=sys.stderr)
    return 0


def _scored(args: argparse.Namespace, number: int, found: Any) -> str:
    if args.json:
        content = {"line": number, "log_prob": json_number(found.log_prob), "tokens": found.tokens}
        content["log_probs"] = [json_number(value) for value in found.log_probs]
        return json.dumps(content, ensure_ascii=False)
    columns = [f"{found.log_prob:.4f}"]
    if args.per_token:
        for token, log_prob in zip(found.tokens, found.log_probs, strict=True):
            columns += [token.replace("\t", "<0x09>"), f"{log_prob:.4f}"]
    return "\t".join(columns)
