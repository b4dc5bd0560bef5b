"""Translation of lines of text with a trained model."""

import dataclasses
import logging
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn

from flaxformer_min.config import SearchConfig
from flaxformer_min.decoding.batches import LONGEST_PREFIX, BatchRunner
from flaxformer_min.decoding.checks import check_parts
from flaxformer_min.decoding.ensemble import Ensemble
from flaxformer_min.decoding.models import (
    check_sows,
    model_of_run,
    prepare_for_decoding,
    weights_of_layers,
    with_explicit_attention,
)
from flaxformer_min.decoding.results import Attention, PairScore, Translation
from flaxformer_min.decoding.search import Hypotheses
from flaxformer_min.storage.run_folder import Restored, RunFolder
from flaxformer_min.system.compilation import check_jit
from flaxformer_min.system.signals import StopCheck
from flaxformer_min.tokens import EOS, Batch, one_sentence_per_row

LOGGER = logging.getLogger("flaxformer_min")

MOST_WARNINGS = 20
"""Of unknown tags, by one translator."""


class Translator:
    """One model, or an ensemble of several, with the tokenizers of both languages.

    All local devices are used. The translation of a line does not depend on the other lines; its
    log-probability does by about 1e-5, because batches of other shapes are rounded differently.
    `restored` is what `load` restored of each run: the step, the parameters, whether a mean.

    Any tokenizer with `encode_batch`, `decode` and `pieces` will do. An untrained model of the ten
    digits translates to digits, and an empty line to an empty one:

    >>> import jax
    >>> from flaxformer_min.config import ModelConfig
    >>> from flaxformer_min.model.transformer import Transformer
    >>> class Digits:
    ...     encode_batch = lambda self, texts: [[*(4 + int(c) for c in t), EOS] for t in texts]
    ...     decode = lambda self, ids: "".join(str(i - 4) for i in ids if i > EOS)
    >>> config = ModelConfig(vocab_size=14, num_layers=1, d_model=8, d_ff=8, num_heads=2)
    >>> batch = Batch(*(one_sentence_per_row(jnp.array([[4, EOS]])),) * 2)
    >>> params = Transformer(config).init(jax.random.key(0), batch)["params"]
    >>> translator = Translator([Transformer(config)], [params], (Digits(), Digits()))
    >>> number, empty = translator.translate(["12", ""], beam_size=1, max_extra_tokens=4)
    >>> number.isdigit(), empty
    (True, '')
    """

    def __init__(
        self,
        models: Sequence[nn.Module],
        params: Sequence[Any],
        tokenizers: tuple[Any, Any],
        decoding: SearchConfig | None = None,
        max_positions: int = 0,
    ):
        """Take models with the parameters of each, and the source and target tokenizers.

        `max_positions` limits sentences to the positions that the models have learned; 0: no limit.
        """
        check_jit()
        check_parts(models, params, tokenizers)
        self.models = [with_explicit_attention(model) for model in models]
        self.source_tokenizer, self.target_tokenizer = tokenizers
        self.decoding = decoding or SearchConfig()
        one = len(self.models) == 1
        model = self.models[0] if one else Ensemble(self.models)
        self.runner = BatchRunner(model, params[0] if one else list(params), max_positions)
        self.restored: list[Restored] = []
        self._loaded_from: tuple | None = None
        self._trained: list[nn.Module] | None = None  # the models before `prepare_for_decoding`
        self._unknown_tags: set[str] = set()
        self._attend = jax.jit(partial(self.models[0].apply, mutable=["intermediates"]))

    @classmethod
    def load(
        cls,
        *runs: str | Path,
        step: int | None = None,
        model: nn.Module | None = None,
        dtype: str | None = None,
    ) -> "Translator":
        """Load the model of a run, or an ensemble of several runs with the same vocabulary.

        Restores what `RunFolder.params` describes: the mean of the last checkpoints if one was
        kept, else the best by validation; or the checkpoint of `step`. Nothing in the folder is
        executed. A run that was trained with `train(model=...)` needs the same `model`. The layers
        compute in `dtype`, "float32", "bfloat16" or "auto"; None: as in training. On a CPU,
        bfloat16 applies to products with weights only.
        Raises ValueError for a folder that is not a run or has no intact checkpoint, and for
        different vocabularies.
        """
        if not runs:
            raise ValueError("a translator needs at least one run folder; got none.")
        folders = [RunFolder(run) for run in runs]
        tokenizers = [folder.tokenizers() for folder in folders]
        for folder, other in zip(folders, tokenizers, strict=True):
            if other != tokenizers[0]:
                raise ValueError(
                    "the models of an ensemble must have the same vocabulary; "
                    f"{folder.path} has another than {folders[0].path}. Train both with one."
                )
        configs = [folder.model_config() for folder in folders]
        trained = [
            model_of_run(each, model, folder.path, dtype)
            for each, folder in zip(configs, folders, strict=True)
        ]
        restored = [folder.params(step) for folder in folders]
        params = [each.params for each in restored]
        models, params = zip(*map(prepare_for_decoding, trained, params), strict=True)
        translator = cls(
            models,
            params,
            tokenizers[0],
            folders[0].config().decoding,
            min((each.max_positions for each in configs if each.max_positions), default=0),
        )
        translator.restored, translator._trained = restored, trained
        paths = tuple(folder.path.absolute() for folder in folders)
        translator._loaded_from = paths, {"step": step, "model": model, "dtype": dtype}
        return translator

    def __reduce__(self) -> tuple:
        """Pickle and copy the names of the run folders, which are loaded again."""
        if self._loaded_from is None:
            raise TypeError(
                "only a translator that Translator.load returned, with the parameters of its run "
                "folders, can be pickled or copied, by their names. Pickle the parameters, and "
                "make another from them."
            )
        return _load, self._loaded_from

    def use_params(self, params: Sequence[Any]) -> None:
        """Replace the parameters by others as trained, keeping the compiled programs.

        The translator can be neither pickled nor copied after that.
        """
        check_parts(self.models, params)
        self._loaded_from = None
        if self._trained is not None:
            pairs = zip(self._trained, params, strict=True)
            params = [prepare_for_decoding(model, each)[1] for model, each in pairs]
        self.runner.use_params(params[0] if len(self.models) == 1 else list(params))

    def search_config(self, **settings: Any) -> SearchConfig:
        """Return the search settings of the run, changed by `settings`."""
        known = {field.name for field in dataclasses.fields(SearchConfig)}
        if unknown := settings.keys() - known:
            raise TypeError(
                f"there is no search setting {min(unknown)!r}, only {', '.join(sorted(known))}."
            )
        config = dataclasses.replace(self.decoding, **settings)
        config.check_vocabulary(getattr(self.target_tokenizer, "vocab_size", 1 << 30))
        return config

    def translate(
        self, lines: Sequence[str], *, stop: StopCheck = None, **settings: Any
    ) -> list[str]:
        """Return the best translation of each line; an empty line gives an empty one.

        `settings` are those of `SearchConfig`, such as `beam_size=4`, in place of the run's own.
        With `sample=True`, `beam_size` samples are drawn, and the best by score is returned. For
        several translations of each line, use `hypotheses`. `stop` as there.
        """
        if settings.get("n_best", 1) != 1:
            raise ValueError(
                "translate returns one translation of each line; got n_best="
                f"{settings['n_best']}. For several, call hypotheses(lines, n_best=...)."
            )
        found = self.hypotheses(lines, stop=stop, scores=False, **settings)
        return [best[0].text for best in found]

    def hypotheses(
        self,
        lines: Sequence[str],
        prefixes: Sequence[str] | None = None,
        *,
        first_line: int = 1,
        stop: StopCheck = None,
        scores: bool = True,
        **settings: Any,
    ) -> list[list[Translation]]:
        """Return the `n_best` translations of each line, best first.

        A line without text has a single, empty translation. Translations begin with `prefixes`; ""
        is no constraint. A source of more than 1,024 tokens is truncated, and a warning gives its
        line number, counted from `first_line`. With learned positions, their number is the limit.
        Raises Stopped between two batches once `stop()`. Without `scores`, greedy decoding computes
        none, and they are NaN. `settings` are fields of `SearchConfig`; they override the run's.
        """
        _check_list("lines", lines)
        if prefixes is not None:
            _check_list("prefixes", prefixes)
        config = self.search_config(**settings)
        if prefixes is not None and len(prefixes) != len(lines):
            raise ValueError(
                f"there must be one prefix for each line; got {len(prefixes)} for {len(lines)}."
            )
        sources = self._encode_sources(lines, first_line)
        results = [[Translation("", 0.0, 0.0)] for _ in lines]
        has_text = [
            bool(line.strip()) and len(ids) > 1 for line, ids in zip(lines, sources, strict=True)
        ]
        nonempty = [number for number, has in enumerate(has_text) if has]
        wanted = [""] * len(lines) if prefixes is None else list(prefixes)
        for number, prefix in enumerate(wanted):
            if prefix and not has_text[number]:
                wanted[number] = ""
                LOGGER.warning(
                    "line %d is empty, and so is its translation; its prefix is not used.",
                    first_line + number,
                )
        forced = self._encode_prefixes(wanted, sources, first_line, config)
        by_line = {first_line + number: sources[number] for number in nonempty}
        forced_by_line = {first_line + number: forced[number] for number in nonempty}
        for batch, found in self.runner.search(by_line, forced_by_line, config, stop, scores):
            for row, line in enumerate(batch):
                results[line - first_line] = self._to_text(found, row, forced_by_line[line])
        return results

    def score(
        self,
        pairs: Sequence[tuple[str, str]],
        *,
        first_line: int = 1,
        stop: StopCheck = None,
    ) -> list[PairScore]:
        """Return the log-probability of each target given its source, per token, EOS included.

        Longer texts are truncated as by `hypotheses`; `first_line` and `stop` are the same, too.
        """
        _check_sequence("pairs must be a list of (source, target)", pairs)
        if any(
            not isinstance(pair, (tuple, list))
            or len(pair) != 2
            or not all(isinstance(side, str) for side in pair)
            for pair in pairs
        ):
            raise ValueError(
                "pairs must be (source, target) each; got one that is not. For one pair, give "
                "[(source, target)]."
            )
        sources = self._encode_sources([source for source, _ in pairs], first_line)
        encoded = self.target_tokenizer.encode_batch([target for _, target in pairs])
        targets = self._truncate(encoded, "target line", first_line)
        results: list[PairScore | None] = [None] * len(pairs)
        both = list(zip(sources, targets, strict=True))
        for batch, log_probs in self.runner.score(both, stop):
            for row, number in enumerate(batch):
                ids = targets[number]
                of_row = log_probs[row, : len(ids)].astype(float).tolist()
                results[number] = PairScore(self.target_tokenizer.pieces(ids), of_row)
        return results

    def attention(self, source: str, target: str | None = None) -> Attention:
        """Return all attention weights while `target` is predicted (default: the translation).

        Longer texts are truncated as by `hypotheses`. Raises ValueError for an ensemble, whose
        models have no attention in common, and for a model that sows no weights.
        """
        for name, text in (("source", source), ("target", "" if target is None else target)):
            if not isinstance(text, str):
                raise ValueError(f"{name} must be one text; got {text!r}.")
        if len(self.models) > 1:
            raise ValueError(
                f"attention() needs a single model; this ensemble has {len(self.models)}."
            )
        source_ids = self._encode_sources([source], 1)[0]
        if target is None:
            target = self._best_text(source_ids) if source.strip() and len(source_ids) > 1 else ""
        encoded = self.target_tokenizer.encode_batch([target])
        target_ids = self._truncate(encoded, "target line", 1)[0]
        both = [
            one_sentence_per_row(jnp.array([ids], jnp.int32)) for ids in (source_ids, target_ids)
        ]
        check_sows(self.models[0])
        _, state = self._attend({"params": self.runner.params}, Batch(*both))
        stack = partial(weights_of_layers, state.get("intermediates", {}))
        predicted = self.target_tokenizer.pieces(target_ids)
        return Attention(
            stack("encoder", "self_attention"),
            stack("decoder", "self_attention"),
            stack("decoder", "cross_attention"),
            self.source_tokenizer.pieces(source_ids),
            predicted,
            ["<s>", *predicted[:-1]],
        )

    def _best_text(self, source: list[int]) -> str:
        config = self.search_config(n_best=1)
        results = self.runner.search({1: source}, {1: []}, config)
        found = next(found for lines, found in results if lines)  # maybe once more, with full room
        return self._to_text(found, 0, [])[0].text

    def _encode_sources(self, lines: Sequence[str], first_line: int) -> list[list[int]]:
        """Return the ids of source texts; what is cut off or looks like a symbol is warned about.

        Each tag that the model does not know is warned about once, and `MOST_WARNINGS` at most.
        """
        encoded = self.source_tokenizer.encode_batch(list(lines))
        unknown_tags = getattr(self.source_tokenizer, "unknown_tags", lambda text: ())
        for number, line in enumerate(lines, first_line):
            for tag in unknown_tags(line):
                if tag in self._unknown_tags or len(self._unknown_tags) == MOST_WARNINGS:
                    continue
                self._unknown_tags.add(tag)
                LOGGER.warning(
                    "line %d has %s, which is no symbol of this model; it is read as other text.",
                    number,
                    tag,
                )
        return self._truncate(encoded, "line", first_line)

    def _truncate(self, sentences: list[list[int]], what: str, first_line: int) -> list[list[int]]:
        longest = self.runner.widths[-1]
        for number, ids in enumerate(sentences):
            if len(ids) > longest:
                LOGGER.warning(
                    "%s %d has %s tokens; only its first %s are read.",
                    what,
                    first_line + number,
                    f"{len(ids):,}",
                    f"{longest - 1:,}",
                )
                sentences[number] = [*ids[: longest - 1], EOS]
        return sentences

    def _encode_prefixes(
        self,
        prefixes: Sequence[str],
        sources: list[list[int]],
        first_line: int,
        config: SearchConfig,
    ) -> list[list[int]]:
        forced = [ids[:-1] for ids in self.target_tokenizer.encode_batch(list(prefixes))]
        for number, (ids, source) in enumerate(zip(forced, sources, strict=True)):
            limit = len(source) + config.max_extra_tokens - 1
            longest = LONGEST_PREFIX
            if self.runner.max_positions:
                longest = min(longest, self.runner.max_positions - 1)
            if len(ids) > min(limit, longest):
                way_out = "Raise max_extra_tokens" if limit < longest else "Shorten it"
                raise ValueError(
                    f"a prefix must be shorter than the longest translation allowed; prefix "
                    f"{first_line + number} has {len(ids)} tokens, the limit is "
                    f"{min(limit, longest)}. {way_out}."
                )
        return forced

    def _to_text(self, found: Hypotheses, row: int, forced: list[int]) -> list[Translation]:
        return [
            Translation(
                self.target_tokenizer.decode([*forced, *ids]), float(log_prob), float(score)
            )
            for ids, log_prob, score in zip(
                found.ids[row].tolist(), found.log_prob[row], found.score[row], strict=True
            )
            if log_prob != -np.inf
        ] or [Translation("", float("-inf"), float("-inf"))]


def _check_list(name: str, texts: Sequence[str]) -> None:
    if isinstance(texts, str):
        raise ValueError(f"{name} must be a list of texts; got one text. For one, give [text].")
    _check_sequence(f"{name} must be a list of texts", texts)
    for number, text in enumerate(texts):
        if not isinstance(text, str):
            raise ValueError(f"{name} must be texts; {name}[{number}] is {text!r}.")


def _check_sequence(rule: str, given: Any) -> None:
    if not hasattr(given, "__len__") or not hasattr(given, "__getitem__"):
        raise ValueError(f"{rule}; got {type(given).__name__}.")


def _load(runs: tuple, options: dict[str, Any]) -> Translator:
    return Translator.load(*runs, **options)
