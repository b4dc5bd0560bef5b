"""Validation during training, and the score of the test set at its end."""

import dataclasses
import itertools
import json
import logging
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from flax import linen as nn

from flaxformer_min.config import Config
from flaxformer_min.data.batches import EpochBatches, shard_batch
from flaxformer_min.data.corpora.pairs import Pairs, is_empty
from flaxformer_min.decoding.translator import Translator
from flaxformer_min.evaluation import (
    Evaluation,
    better_tokenizer,
    bleu,
    default_tokenize,
    evaluate,
    perplexity,
)
from flaxformer_min.experiment.report import format_example
from flaxformer_min.languages import parse_languages
from flaxformer_min.system.distributed import count, gather, index
from flaxformer_min.system.signals import StopCheck, Stopped
from flaxformer_min.training.loss import Sums
from flaxformer_min.training.step import make_eval_step

LOGGER = logging.getLogger("flaxformer_min")

Pair = tuple[str, str]


class Validator:
    """Measures the loss on all, and BLEU on some, of the validation pairs.

    Called with parameters and the step; returns "validation_loss" in nats a token,
    "validation_perplexity", "validation_accuracy" and, if any sentences are translated,
    "validation_bleu". Returns None if `stop()` came true in between.
    """

    def __init__(
        self,
        config: Config,
        model: nn.Module,
        batches: EpochBatches,
        pairs: Pairs,
        translator: Translator | None,
        stop: StopCheck = None,
    ):
        """Choose the sentences to translate; None as `translator` chooses none."""
        self._language, self._batches, self._stop = target_language(config), batches, stop
        self._eval_step, self._translator = make_eval_step(model), translator
        self._number = itertools.count()
        usable = [pair for pair in pairs if not is_empty(pair)] if translator else []
        size = min(config.training.validation_sentences, len(usable))
        self._sample = [usable[number * len(usable) // size] for number in range(size)]
        if self._sample and (hint := better_tokenizer(self._language)):
            LOGGER.info("%s.", hint)

    def __call__(self, params: Any, step: int) -> dict[str, float] | None:
        """Validate the parameters of a step."""
        try:
            sums = self._sums(params)
            translations = self._translate(params)
        except Stopped:
            return None
        loss = float(sums.negative_log_likelihood / sums.tokens)
        scores = {
            "validation_loss": loss,
            "validation_perplexity": perplexity(-loss, tokens=1),
            "validation_accuracy": float(sums.correct / sums.tokens),
        }
        text = f"validation: loss {loss:.3f} nats, perplexity {scores['validation_perplexity']:.2f}"
        if self._sample:
            references = [reference for _, reference in self._sample]
            score = bleu(translations, references, target_language=self._language)
            scores["validation_bleu"] = score.value
            text += f", BLEU {score.value:.2f} on {len(translations)} sentences"
            examples = min(3, len(self._sample))
            for i in np.random.default_rng(step).choice(len(self._sample), examples, False):
                text += "\n" + format_example(self._sample[i], translations[i])
        LOGGER.info(text)
        return scores

    def _sums(self, params: Any) -> Sums:
        sums = []
        for number in range(len(self._batches)):
            if self._stop is not None and self._stop():
                raise Stopped
            batch = shard_batch(self._batches[number], jax.local_device_count())
            sums.append(self._eval_step(params, batch))
        return Sums(*np.sum(jax.device_get(sums), axis=0))

    def _translate(self, params: Any) -> list[str]:
        """Translate the sample; each process takes a share of it."""
        if not self._sample:
            return []
        self._translator.use_params([params])
        share = [source for source, _ in self._sample[index() :: count()]]
        # Several processes must poll their common stop request equally often.
        translated = self._translator.translate(share, stop=self._stop if count() == 1 else None)
        shares = gather(f"translations {next(self._number)}", translated)
        translations = [""] * len(self._sample)
        for process, share in enumerate(shares):
            translations[process :: count()] = share
        return translations


def score_test_set(
    translator: Translator, pairs: Sequence[Pair], config: Config, stop: StopCheck = None
) -> Evaluation | None:
    """Translate the test pairs that have text on both sides; report the scores and examples.

    The report names the step, and the score by which it was selected.

    Returns None if there is no such pair, or `stop()` came true in between.
    """
    pairs = [pair for pair in pairs if not is_empty(pair)]
    if not pairs:
        LOGGER.info("No test score: no pair of the test split has text on both sides.")
        return None
    sources, references = zip(*pairs, strict=True)
    try:
        translations = translator.translate(sources, stop=stop)
    except Stopped:
        return None
    evaluation = evaluate(translations, references, target_language=target_language(config))
    step, score = translator.restored[0].step, selecting_score(config, references)
    LOGGER.info("Test set, with step %s, selected by %s:", f"{step:,}", score)
    for line in evaluation.lines():
        LOGGER.info("  %s", line)
    for i in range(0, len(pairs), max(len(pairs) // 5, 1)):
        LOGGER.info(format_example(pairs[i], translations[i]))
    return evaluation


def selecting_score(config: Config, references: Sequence[str] = ()) -> str:
    """Return the name of the score that selects the best checkpoint, as in `best_by`.

    >>> selecting_score(Config())
    'validation loss'
    """
    if config.training.best_by == "loss":
        return "validation loss"
    return f"validation BLEU (tok:{default_tokenize(target_language(config), references)})"


def what_is_compared(config: Config, text: str) -> str:
    """Return what the scores that select a checkpoint are of: the digest of the validation text.

    For BLEU the sentences that are translated, its tokenizer and the options of the search follow.
    """
    if config.training.best_by != "bleu":
        return text
    settings = {**dataclasses.asdict(config.decoding), "batch_size": None}
    settings["sentences"] = config.training.validation_sentences
    settings["tokenize"] = default_tokenize(target_language(config))
    return f"{text} {json.dumps(settings, sort_keys=True)}"


def target_language(config: Config) -> str:
    """Return the target language: `ko` of `en-ko`, "" if none is named."""
    languages = config.data.languages
    return parse_languages(languages)[1] if languages else ""
