"""From lines of text to lines of text, with a trained model."""

import dataclasses
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax.errors import ScopeParamNotFoundError, ScopeParamShapeError

from flaxformer_min.config import DecodingConfig, ModelConfig
from flaxformer_min.decoding.batching import (
    BATCHES,
    LENGTHS,
    LONGEST_PREFIX,
    ON_ONE_CORE,
    PLACES,
    Options,
    _bucket,
    _padded,
    _score,
    _search,
)
from flaxformer_min.decoding.search import Hypotheses
from flaxformer_min.model.transformer import Transformer
from flaxformer_min.runtime.devices import replicate
from flaxformer_min.tokens import EOS, Batch, one_sentence_per_row


class Translation(NamedTuple):
    """One hypothesis for a line.

    text:     without the tokens' seams.
    log_prob: of the whole, in nats, EOS included.
    score:    log_prob over the length penalty; what hypotheses are ordered by.
    """

    text: str
    log_prob: float
    score: float


class PairScore(NamedTuple):
    """How likely a model finds a given translation.

    tokens:    the pieces of the target, EOS last.
    log_probs: of each of them, in nats.
    """

    tokens: list[str]
    log_probs: list[float]

    @property
    def log_prob(self) -> float:
        """Of the whole translation, in nats."""
        return float(np.sum(self.log_probs, dtype=np.float64))


class Attention(NamedTuple):
    """What attended to what, [layers heads queries keys] each; a row sums to one.

    source_tokens: queries and keys of `encoder`, keys of `cross`.
    target_tokens: queries of `decoder` and `cross`: the token that is written.
    read_tokens:   keys of `decoder`: the tokens read so far, from BOS on.
    """

    encoder: np.ndarray
    decoder: np.ndarray
    cross: np.ndarray
    source_tokens: list[str]
    target_tokens: list[str]
    read_tokens: list[str]


class Translator:
    """A model, or several that decide together, and the tokenizers of their languages.

    All devices of this machine are used: a batch is split among its accelerators, while on a CPU
    each core that jax made a device has a batch of its own and waits for no other. What is said of
    a line does not depend on the lines beside it. `compilations` counts the programs compiled so
    far, `steps` names the checkpoints it was loaded from, and `means` says which of them stand for
    a mean up to that step.

    Any tokenizer with `encode_batch`, `decode` and `pieces` will do. An untrained model that knows
    the ten digits answers with digits, and leaves an empty line empty:

    >>> class Digits:
    ...     encode_batch = lambda self, texts: [[*(4 + int(c) for c in t), EOS] for t in texts]
    ...     decode = lambda self, ids: "".join(str(i - 4) for i in ids if i > EOS)
    >>> config = ModelConfig(vocab_size=14, num_layers=1, d_model=8, d_ff=8, num_heads=2)
    >>> batch = Batch(*(one_sentence_per_row(jnp.array([[4, EOS]])),) * 2)
    >>> params = Transformer(config).init(jax.random.key(0), batch)["params"]
    >>> translator = Translator([config], [params], (Digits(), Digits()))
    >>> number, empty = translator.translate(["12", ""], beam_size=1, max_extra_tokens=4)
    >>> number.isdigit(), empty
    (True, '')
    """

    def __init__(
        self,
        configs: Sequence[ModelConfig],
        params: Sequence[Any],
        tokenizers: tuple[Any, Any],
        decoding: DecodingConfig | None = None,
    ):
        """`configs` and `params` of one model each; the tokenizers of source and target."""
        # A search writes few tokens at a time, whose weights are small, and `attention` shows them.
        self.models = [
            Transformer(dataclasses.replace(config, attention="explicit")) for config in configs
        ]
        self.source_tokenizer, self.target_tokenizer = tokenizers
        self.decoding = decoding or DecodingConfig()
        devices = jax.local_devices()
        on_cpu = devices[0].platform == "cpu"
        # Cores share one device: its program is compiled once, and weights lie in the cache once.
        self.devices, self.cores = (devices[:1], len(devices)) if on_cpu else (devices, 1)
        self.compilations = 0
        self.steps: list[int] = []
        self.means: list[bool] = []
        self._programs: dict[Any, Callable] = {}
        self.use_params(params)

    @classmethod
    def load(
        cls,
        *runs: str | Path,
        step: int | None = None,
        warn: Callable[[str], None] = warnings.warn,
    ) -> "Translator":
        """The model that a run left; several runs with one vocabulary decide together.

        It restores what `RunFolder.params` says: the mean of the last checkpoints where one was
        kept, else the best by validation; or that of `step`. Nothing in the folder is executed.
        Raises ValueError for what is no run, holds no whole checkpoint, or has another vocabulary
        than the first.
        """
        from flaxformer_min.runs.folder import RunFolder

        if not runs:
            raise ValueError("a translator needs at least one run folder; got none.")
        folders = [RunFolder(run) for run in runs]
        tokenizers = [folder.tokenizers() for folder in folders]
        for folder, other in zip(folders, tokenizers, strict=True):
            if other != tokenizers[0]:
                raise ValueError(
                    "models that decide together must have the same vocabulary; that of "
                    f"{folder.path} is not that of {folders[0].path}. Train both with one."
                )
        restored = [folder.params(step, warn) for folder in folders]
        translator = cls(
            [folder.model_config() for folder in folders],
            [each.params for each in restored],
            tokenizers[0],
            folders[0].config().decoding,
        )
        translator.steps = [each.step for each in restored]
        translator.means = [each.is_mean for each in restored]
        return translator

    def use_params(self, params: Sequence[Any]) -> None:
        """Go on with other parameters of the same models, keeping what is compiled."""
        self.params = replicate(list(params), self.devices)

    def options(self, **changes: Any) -> Options:
        """The run's own way of searching, with `changes`."""
        settings = {
            field.name: getattr(self.decoding, field.name)
            for field in dataclasses.fields(Options)
            if hasattr(self.decoding, field.name)
        }
        return Options(**{**settings, **changes})

    def translate(
        self, lines: Sequence[str], *, stop: Callable[[], bool] = bool, **options: Any
    ) -> list[str]:
        """The best translation of each line; an empty line gives an empty one.

        `options` are fields of `Options`, and `stop` is that of `hypotheses`.
        """
        found = self.hypotheses(lines, self.options(**options), stop=stop)
        return [best[0].text for best in found]

    def hypotheses(
        self,
        lines: Sequence[str],
        options: Options,
        prefixes: Sequence[str] | None = None,
        *,
        first_line: int = 1,
        warn: Callable[[str], None] = warnings.warn,
        stop: Callable[[], bool] = bool,
    ) -> list[list[Translation]]:
        """The `n_best` translations of each line, best first; of an empty line, one empty one.

        `prefixes` are how translations must begin, "" where they need not. A source of more tokens
        than the last of `LENGTHS` is cut and named to `warn`, counted from `first_line`. Raises
        KeyboardInterrupt between two batches once `stop()`.
        """
        _check_list("lines", lines)
        _check_list("prefixes", prefixes)
        if prefixes is not None and len(prefixes) != len(lines):
            raise ValueError(
                f"there must be one prefix for each line; got {len(prefixes)} for {len(lines)}."
            )
        encoded = self.source_tokenizer.encode_batch(list(lines))
        sources = self._cut(encoded, "line", first_line, warn)
        forced = self._cut_prefixes(prefixes or [""] * len(lines), sources, first_line, options)
        results = [[Translation("", 0.0, 0.0)] for _ in lines]
        wanted = [number for number, line in enumerate(lines) if line.strip()]
        lengths = [len(ids) for ids in sources]

        def search(batch: list[int]) -> Callable[[], Hypotheses]:
            lines = [first_line + i for i in batch]
            return self._search(
                [sources[i] for i in batch], [forced[i] for i in batch], lines, options
            )

        for batch, found in self._run_all(search, self._batches(wanted, lengths), stop):
            for row, number in enumerate(batch):
                results[number] = self._readable(found, row, forced[number])
        return results

    def score(
        self,
        pairs: Sequence[tuple[str, str]],
        *,
        first_line: int = 1,
        warn: Callable[[str], None] = warnings.warn,
        stop: Callable[[], bool] = bool,
    ) -> list[PairScore]:
        """How likely each target is, given its source: per token, EOS included.

        What is longer than the last of `LENGTHS` is cut; `warn`, `first_line` and `stop` are those
        of `hypotheses`.
        """
        if any(isinstance(pair, str) or len(pair) != 2 for pair in pairs):
            raise ValueError(
                "pairs must be (source, target) each; got one that is not. For one pair, give "
                "[(source, target)]."
            )
        encoded = [
            tokenizer.encode_batch([pair[side] for pair in pairs])
            for side, tokenizer in enumerate((self.source_tokenizer, self.target_tokenizer))
        ]
        sources = self._cut(encoded[0], "line", first_line, warn)
        targets = self._cut(encoded[1], "target line", first_line, warn)
        results: list[PairScore | None] = [None] * len(pairs)
        lengths = [max(len(a), len(b)) for a, b in zip(sources, targets, strict=True)]

        def score(batch: list[int]) -> Callable[[], np.ndarray]:
            rows = self._rows(len(batch), max(lengths[i] for i in batch))
            source = _padded([sources[i] for i in batch], rows, LENGTHS)
            target = _padded([targets[i] for i in batch], rows, LENGTHS)
            return self._program("score", _score, source, target)

        batches = self._batches(range(len(pairs)), lengths)
        for batch, log_probs in self._run_all(score, batches, stop):
            for row, number in enumerate(batch):
                ids = targets[number]
                of_row = log_probs[row, : len(ids)].astype(float).tolist()
                results[number] = PairScore(self.target_tokenizer.pieces(ids), of_row)
        return results

    def attention(
        self,
        source: str,
        target: str | None = None,
        *,
        warn: Callable[[str], None] = warnings.warn,
    ) -> Attention:
        """What attends to what while `target` is written, by default the model's own translation.

        What is longer than the last of `LENGTHS` is cut, and `warn` told. Raises ValueError for
        several models, which have no attention in common.
        """
        if len(self.models) > 1:
            raise ValueError(f"attention is that of one model; got {len(self.models)}.")
        source_ids = self._cut(self.source_tokenizer.encode_batch([source]), "line", 1, warn)[0]
        if target is None:
            found = self.hypotheses([source], self.options(), warn=lambda said: None)
            target = found[0][0].text
        encoded = self.target_tokenizer.encode_batch([target])
        target_ids = self._cut(encoded, "target line", 1, warn)[0]
        both = [one_sentence_per_row(jnp.array([ids])) for ids in (source_ids, target_ids)]
        _, state = self.models[0].apply(
            {"params": self.params[0]}, Batch(*both), mutable=["intermediates"]
        )
        sown = state["intermediates"]

        def gather(stack: str, box: str) -> np.ndarray:
            layers = range(self.models[0].config.num_layers)
            of_layer = [sown[stack][f"layer_{number}"][box]["weights"][0][0] for number in layers]
            return np.stack([np.asarray(weights, np.float32) for weights in of_layer])

        written = self.target_tokenizer.pieces(target_ids)
        return Attention(
            gather("encoder", "self_attention"),
            gather("decoder", "self_attention"),
            gather("decoder", "cross_attention"),
            self.source_tokenizer.pieces(source_ids),
            written,
            ["<s>", *written[:-1]],
        )

    def _cut(
        self, sentences: list[list[int]], what: str, first_line: int, warn: Callable
    ) -> list[list[int]]:
        for number, ids in enumerate(sentences):
            if len(ids) > LENGTHS[-1]:
                warn(
                    f"{what} {first_line + number} has {len(ids):,} tokens; only its first "
                    f"{LENGTHS[-1] - 1:,} are read."
                )
                sentences[number] = [*ids[: LENGTHS[-1] - 1], EOS]
        return sentences

    def _cut_prefixes(
        self,
        prefixes: Sequence[str],
        sources: list[list[int]],
        first_line: int,
        options: Options,
    ) -> list[list[int]]:
        forced = [ids[:-1] for ids in self.target_tokenizer.encode_batch(list(prefixes))]
        for number, (ids, source) in enumerate(zip(forced, sources, strict=True)):
            limit = len(source) + options.max_extra_tokens - 1
            if len(ids) > min(limit, LONGEST_PREFIX):
                way_out = "Raise max_extra_tokens" if limit < LONGEST_PREFIX else "Shorten it"
                raise ValueError(
                    f"a prefix must be shorter than the longest translation allowed; prefix "
                    f"{first_line + number} has {len(ids)} tokens, the limit is "
                    f"{min(limit, LONGEST_PREFIX)}. {way_out}."
                )
        return forced

    def _batches(self, numbers: Sequence[int], lengths: list[int]) -> Iterator[list[int]]:
        """Longest first, so that sentences of about one length share a batch.

        Few sentences are shared out among the cores; a batch that is not full costs as much.
        """
        waiting = sorted(numbers, key=lambda number: (-lengths[number], number))
        share = -(-len(waiting) // self.cores)
        while waiting:
            size = self._rows(share, lengths[waiting[0]])
            yield waiting[:size]
            waiting = waiting[size:]

    def _run_all(
        self,
        prepare: Callable[[list[int]], Callable[[], Any]],
        batches: Iterable[list[int]],
        stop: Callable[[], bool],
    ) -> Iterator[tuple[list[int], Any]]:
        """Each batch and what its prepared program gives; the next ones run while it is read."""
        waiting: list[tuple[list[int], Future]] = []
        pool = ThreadPoolExecutor(self.cores)
        try:
            for batch in batches:
                if stop():
                    raise KeyboardInterrupt
                waiting.append((batch, pool.submit(prepare(batch))))
                if len(waiting) > self.cores:
                    batch, running = waiting.pop(0)
                    yield batch, running.result()
            for batch, running in waiting:
                yield batch, running.result()
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
        pool.shutdown()

    def _rows(self, sentences: int, longest: int) -> int:
        """Rows a batch is padded to: a few sizes on each device, and `PLACES` at most."""
        full = min(self.decoding.batch_size, max(PLACES // _bucket(longest, LENGTHS), 1))
        sizes = [*(size for size in BATCHES if size < full), full]
        each = min(-(-sentences // len(self.devices)), full)
        return _bucket(each, sizes) * len(self.devices)

    def _search(
        self, sources: list[list[int]], forced: list[list[int]], lines: list[int], options: Options
    ) -> Callable[[], Hypotheses]:
        rows = self._rows(len(sources), max(map(len, sources)))
        source = _padded(sources, rows, LENGTHS)
        # Left out where nobody has one: an array of no size crashes the compiler of jax 0.11.
        prefix = [_padded(forced, rows, (*LENGTHS, LONGEST_PREFIX))] if any(forced) else []
        # A row that is only padding is through after one step.
        limit = [len(ids) + options.max_extra_tokens for ids in sources] + [1] * (rows - len(lines))
        numbers = np.array(lines + [0] * (rows - len(lines)), np.int32)
        seeds = np.zeros((rows, 1), np.uint32)
        if options.sampling is not None:
            # Given to the program and no part of it, or each seed would be compiled.
            key = jax.random.key_data(jax.random.key(options.seed))
            seeds = np.broadcast_to(key, (rows, *key.shape))
        options = dataclasses.replace(options, seed=0)
        arrays = source, np.array(limit, np.int32), numbers, seeds, *prefix
        return self._program(options, partial(_search, options=options), *arrays)

    def _program(self, name: Any, program: Callable, *arrays: np.ndarray) -> Callable[[], Any]:
        """A program that is compiled for these arrays, whose rows are split between all devices."""
        devices = len(self.devices)
        split = [
            array.reshape(devices, len(array) // devices, *array.shape[1:]) for array in arrays
        ]
        shape = (name, *(array.shape for array in arrays))
        if shape not in self._programs:
            self._programs[shape] = self._compiled(partial(program, self.models), split)
            self.compilations += 1

        def run() -> Any:
            result = jax.device_get(self._programs[shape](self.params, *split))
            return jax.tree.map(lambda array: array.reshape(-1, *array.shape[2:]), result)

        return run

    def _compiled(self, program: Callable, arrays: list[np.ndarray]) -> Callable:
        in_axes = (None, *[0] * len(arrays))
        mapped = jax.pmap(program, "devices", in_axes=in_axes, devices=self.devices)
        try:
            lowered = mapped.lower(self.params, *arrays)
        except (ScopeParamShapeError, ScopeParamNotFoundError) as error:
            raise ValueError(
                "settings, tokenizers and checkpoint must be those of one run; "
                f"{str(error).partition(' (http')[0]} Copy back the files that were made together."
            ) from error
        return lowered.compile(ON_ONE_CORE if self.cores > 1 else None)

    def _readable(self, found: Hypotheses, row: int, forced: list[int]) -> list[Translation]:
        return [
            Translation(
                self.target_tokenizer.decode([*forced, *ids]), float(log_prob), float(score)
            )
            for ids, log_prob, score in zip(
                found.ids[row].tolist(), found.log_prob[row], found.score[row], strict=True
            )
            if np.isfinite(log_prob)
        ] or [Translation("", float("-inf"), float("-inf"))]


def _check_list(name: str, texts: Sequence[str] | None) -> None:
    if isinstance(texts, str):
        raise ValueError(f"{name} must be a list of texts; got one text. For one, give [text].")
