"""`translate`, `score` and `evaluate`: from what was typed to what is written."""

import argparse
import contextlib
import functools
import itertools
import json
import math
import os
import sys
import time
from collections.abc import Iterator
from typing import Any

from flaxformer_min.cli.lines import (
    CHUNK,
    Stop,
    aligned,
    open_lines,
    open_output,
    progress,
    read_aligned,
    warn_user,
    write,
)

SEARCH = ("beam_size", "length_penalty", "max_extra_tokens", "min_length")


def load(args: argparse.Namespace) -> Any:
    """The translator of the runs that were named."""
    import dataclasses
    import logging

    from flaxformer_min.decoding.translator import Translator

    logging.getLogger("absl").setLevel(logging.ERROR)  # Orbax tells its own defaults
    translator = Translator.load(*args.runs, step=args.step, warn=warn_user)
    if getattr(args, "batch_size", None):
        decoding = dataclasses.replace(translator.decoding, batch_size=args.batch_size)
        translator.decoding = decoding
    return translator


def search_options(args: argparse.Namespace, translator: Any) -> Any:
    """How to search: what was typed, else the run's own way."""
    from flaxformer_min.decoding.choices import Sampling

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
    from flaxformer_min.runtime.devices import describe

    return describe()


def _finite(value: float) -> float | None:
    """JSON knows no infinity."""
    return round(value, 6) if math.isfinite(value) else None


def perplexity(log_prob: float, tokens: int) -> float:
    """Of tokens that together have this log-probability.

    >>> round(perplexity(2 * math.log(1 / 8), tokens=2), 6)
    8.0
    """
    mean = -log_prob / tokens
    return math.exp(mean) if mean < 700 else math.inf


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
                    lines, options, *prefixes, first_line=number, warn=warn_user, stop=stop.__bool__
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
    from flaxformer_min.decoding.batching import BATCHES, LENGTHS

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
                    warn=warn_user,
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
    from flaxformer_min.data.corpora.pairs import is_empty

    with open_output(args.output) if args.output else contextlib.nullcontext() as kept:
        data, languages, pairs = _test_set(args)
        target = languages.partition("-")[2]
        tokenize = args.tokenize or evaluation.default_tokenize(target)
        evaluation.bleu(["a"], ["a"], tokenize=tokenize)  # fails before the work, not after it
        used = [not is_empty(pair) for pair in pairs]
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
        "means": translator.means,
        "data": data,
        "languages": languages,
        "skipped": len(pairs) - len(references),
        "tokenize": tokenize,
        "lowercase": args.lowercase,
        **{name: getattr(options, name) for name in SEARCH},
        **measured.to_dict(),
        "perplexity": perplexity(log_prob, tokens),
        "target_tokens": tokens,
        **speed.to_dict(),
    }
    with open_output(None) as output:
        write(output, _report(args, report, measured, speed))
    return 0


def _test_set(args: argparse.Namespace) -> tuple[str, str, list[tuple[str, str]]]:
    """What it is called, its languages, its pairs."""
    from flaxformer_min.data.corpora import read_pairs
    from flaxformer_min.runs.folder import RunFolder

    data = RunFolder(args.runs[0]).config().data
    if (args.source is None) != (args.reference is None):
        raise ValueError("--source and --reference belong together; give both or neither.")
    if args.source is None:
        split = args.split or "test"
        try:
            pairs = list(read_pairs(data.corpus, split, data.languages, data.cache_dir))
        except ValueError as error:
            raise ValueError(
                f"{error} That is the run's own corpus; --source and --reference name other text."
            ) from error
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
    warn = functools.cache(warn_user)  # both readings of a source say the same
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
        finite = {"perplexity": _finite(report["perplexity"])}
        return [json.dumps(report | finite, ensure_ascii=False)]
    models = [
        f"{run}, {'mean up to ' if mean else ''}step {step:,}"
        for run, step, mean in zip(report["runs"], report["steps"], report["means"], strict=True)
    ]
    chosen = "as asked for" if args.tokenize else f"which fits {report['languages']}"
    return [
        f"model: {', '.join(models)}",
        f"data: {report['data']}, {measured.sentences:,} pairs; {report['skipped']:,} with an "
        "empty side skipped",
        "search: " + ", ".join(f"{name.replace('_', ' ')} {report[name]}" for name in SEARCH),
        f"BLEU's tokenizer: {report['tokenize']}, {chosen}",
        *measured.lines(),
        f"perplexity = {report['perplexity']:.4f} per target token, EOS included, of "
        f"{report['target_tokens']:,}",
        f"speed: {speed}",
    ]
