"""`evaluate`: translate a test set and print scores and speed."""

import argparse
import contextlib
import itertools
import json
import shlex
from typing import Any

from flaxformer_min.cli.lines import (
    CHUNK,
    Stop,
    json_number,
    on_one_line,
    open_output,
    progress,
    read_aligned,
    write,
)
from flaxformer_min.cli.options import SHOWN, load
from flaxformer_min.cli.speed import Speed
from flaxformer_min.evaluation import better_tokenizer, perplexity
from flaxformer_min.languages import parse_languages


def evaluate(args: argparse.Namespace, stop: Stop) -> int:
    """Run the command, and return its exit status."""
    from flaxformer_min import evaluation

    with open_output(args.output) if args.output else contextlib.nullcontext() as output:
        data, languages, pairs = _test_set(args)
        target = parse_languages(languages)[1] if languages else ""
        references = [reference for _, reference in pairs]
        tokenize = args.tokenize or evaluation.default_tokenize(target, references)
        evaluation.bleu(["a"], ["a"], tokenize=tokenize)  # raises before the work, not after it
        pairs, used = _without_text_of_skipped(pairs, data)
        translator = load(args)
        speed, texts, log_prob, tokens = _translate_and_score(translator, pairs, stop)
        if output:
            write(output, texts)
    hypotheses = list(itertools.compress(texts, used))
    references = list(itertools.compress((reference for _, reference in pairs), used))
    measured = evaluation.evaluate(
        hypotheses, references, lowercase=args.lowercase, tokenize=tokenize
    )
    report = {
        "runs": args.runs,
        "steps": [each.step for each in translator.restored],
        "means": [each.is_mean for each in translator.restored],
        "data": data,
        "languages": languages,
        "skipped": len(pairs) - len(references),
        "tokenize": tokenize,
        "lowercase": args.lowercase,
        **{name: getattr(translator.decoding, name) for name in SHOWN},
        **measured.to_dict(),
        "perplexity": perplexity(log_prob, tokens),
        "target_tokens": tokens,
        **speed.to_dict(),
    }
    with open_output(None) as output:
        write(output, _report(args, report, measured, speed))
    return 0


def _test_set(args: argparse.Namespace) -> tuple[str, str, list[tuple[str, str]]]:
    """Return the description, the languages and the pairs of the test set."""
    from flaxformer_min.data.corpora import read_pairs
    from flaxformer_min.storage.run_folder import RunFolder

    data = RunFolder(args.runs[0]).config().data
    if (args.source is None) != (args.reference is None):
        raise ValueError("--source and --reference belong together; give both or neither.")
    if args.source is None:
        corpus, split = args.corpus or _corpus_of_run(data.corpus), args.split or "test"
        try:
            languages = args.languages or data.languages
            pairs = list(read_pairs(corpus, split, languages, data.cache_dir))
        except ValueError as error:
            where = ""
            if "tfds:" in corpus:
                where = "TFDS_DATA_DIR may name the folder of prepared datasets. "
            raise ValueError(
                f"{error} {where}--corpus names another corpus; --source and --reference name "
                "files."
            ) from error
        return f"{split} of {corpus}", languages, pairs
    for name in ("split", "corpus"):
        if getattr(args, name) is not None:
            raise ValueError(f"--{name} has its own references; leave it out beside --source.")
    chunks = read_aligned(args.source, args.reference)
    pairs = [pair for _, sides in chunks for pair in zip(*sides, strict=True)]
    return f"{args.source} and {args.reference}", args.languages or data.languages, pairs


def _without_text_of_skipped(
    pairs: list[tuple[str, str]], data: str
) -> tuple[list[tuple[str, str]], list[bool]]:
    """Return the pairs, those with an empty side as ("", ""), and which have text on both.

    Skipped pairs keep their position, so that warnings have the right line number.
    """
    from flaxformer_min.data.corpora.pairs import is_empty

    used = [not is_empty(pair) for pair in pairs]
    if not any(used):
        raise ValueError(
            f"a test set must hold a pair with text on both sides; there is none in {data}."
        )
    return [pair if use else ("", "") for pair, use in zip(pairs, used, strict=True)], used


def _corpus_of_run(corpus: str) -> str:
    """Return the corpus that a run names, unless it is text somewhere on this machine."""
    from flaxformer_min.data.corpora.joined import split_corpora

    if any(name.startswith("text:") for name, _ in split_corpora(corpus)):
        raise ValueError(
            "text outside of the run is read only if you name it, because a run may come from a "
            f"stranger; this one names {corpus}. Give --corpus {shlex.quote(corpus)}, or --source "
            "and --reference."
        )
    return corpus


def _translate_and_score(
    translator: Any, pairs: list[tuple[str, str]], stop: Stop
) -> tuple[Speed, list[str], float, int]:
    """Return the speed, the translations, and log-probability and number of reference tokens."""
    speed, texts, log_prob, tokens = Speed(translator), [], 0.0, 0
    with progress(len(pairs)) as advance:
        for start in range(0, len(pairs), CHUNK):
            chunk = pairs[start : start + CHUNK]
            common = {"first_line": start + 1, "stop": stop}
            with stop.patiently():
                sources = [source for source, _ in chunk]
                found = translator.hypotheses(sources, scores=False, **common)
            new = [on_one_line(of_line[0].text) for of_line in found]
            speed.count([text for text, pair in zip(new, chunk, strict=True) if pair != ("", "")])
            texts += new
            advance(len(chunk))
    for start in range(0, len(pairs), CHUNK):
        chunk = pairs[start : start + CHUNK]
        common = {"first_line": start + 1, "stop": stop}
        with stop.patiently():
            scores = translator.score(chunk, **common)
        used = [score for score, pair in zip(scores, chunk, strict=True) if pair != ("", "")]
        log_prob += sum(score.log_prob for score in used)
        tokens += sum(len(score.tokens) for score in used)
    return speed, texts, log_prob, tokens


def _shown(value: Any) -> Any:
    """Return a setting as people write it."""
    if isinstance(value, bool):
        return "on" if value else "off"
    return value


def _report(
    args: argparse.Namespace, report: dict[str, Any], measured: Any, speed: Speed
) -> list[str]:
    """Return the lines of the output."""
    if args.json:
        finite = {"perplexity": json_number(report["perplexity"])}
        return [json.dumps(report | finite, ensure_ascii=False)]
    models = [
        f"{run}, {'mean up to ' if mean else ''}step {step:,}"
        for run, step, mean in zip(report["runs"], report["steps"], report["means"], strict=True)
    ]
    chosen = "as requested" if args.tokenize else f"the default of {report['languages']}"
    target = parse_languages(report["languages"])[1] if report["languages"] else ""
    if not args.tokenize and (hint := better_tokenizer(target)):
        chosen += f"; {hint}"
    if not report["languages"] and not args.tokenize:
        chosen = "by the references, as the run has no languages: name them with --languages"
    return [
        f"model: {', '.join(models)}",
        f"data: {report['data']}, {measured.sentences:,} pairs; {report['skipped']:,} with an "
        "empty side skipped",
        "search: "
        + ", ".join(f"{name.replace('_', ' ')} {_shown(report[name])}" for name in SHOWN),
        f"BLEU's tokenizer: {report['tokenize']}, {chosen}",
        *measured.lines(),
        f"perplexity = {report['perplexity']:.4f} per target token, EOS included, of "
        f"{report['target_tokens']:,}",
        f"speed: {speed}",
    ]
