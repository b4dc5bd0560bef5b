"""From command-line arguments to a translator and its search settings."""

import argparse
import dataclasses
from typing import Any

SHOWN = ("beam_size", "length_penalty", "early_stopping", "max_extra_tokens", "min_length")
"""Settings that `evaluate` reports."""


def load(args: argparse.Namespace) -> Any:
    """Return the translator of the given runs, which searches as the arguments say."""
    import logging

    from flaxformer_min.config import SearchConfig
    from flaxformer_min.decoding.translator import Translator

    logging.getLogger("absl").setLevel(logging.ERROR)  # Orbax warns about its own defaults
    translator = Translator.load(*args.runs, step=args.step, dtype=getattr(args, "dtype", None))
    names = [field.name for field in dataclasses.fields(SearchConfig)]
    given = {name: getattr(args, name, None) for name in names}
    settings = {name: value for name, value in given.items() if value is not None}
    if settings.get("sample"):
        settings.setdefault("beam_size", args.n_best)
    translator.decoding = translator.search_config(**settings)
    return translator
