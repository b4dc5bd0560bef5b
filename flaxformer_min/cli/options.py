"""From command-line arguments to a translator and its search options."""

import argparse
from typing import Any

SEARCH = ("beam_size", "length_penalty", "early_stopping", "max_extra_tokens", "min_length")


def load(args: argparse.Namespace) -> Any:
    """Return the translator of the given runs."""
    import logging

    from flaxformer_min.decoding.translator import Translator

    logging.getLogger("absl").setLevel(logging.ERROR)  # Orbax warns about its own defaults
    translator = Translator.load(*args.runs, step=args.step, dtype=getattr(args, "dtype", None))
    if getattr(args, "batch_size", None):
        translator.runner.batch_size = args.batch_size
    translator.keep_programs()
    return translator


def search_options(args: argparse.Namespace, translator: Any, scores: bool) -> Any:
    """Return the search options: those given, and the run's own for the rest.

    scores: whether the command shows log-probabilities and scores of translations.
    """
    from flaxformer_min.decoding.choices import Sampling

    given = {name: getattr(args, name, None) for name in (*SEARCH, "n_best")}
    changes = {name: value for name, value in given.items() if value is not None}
    if getattr(args, "sample", False):
        sampling = Sampling(args.temperature or 1.0, args.top_k, args.top_p or 1.0)
        changes |= {"sampling": sampling, "seed": args.seed or 0}
        changes.setdefault("beam_size", args.n_best)
    options = translator.options(**changes, scores=scores)
    vocab_size = translator.target_tokenizer.vocab_size
    if options.beam_size > vocab_size:
        raise ValueError(
            f"--beam-size must not exceed the vocabulary of {vocab_size:,}, the number of "
            f"continuations; got {options.beam_size:,}."
        )
    return options
