"""One language pair: what the server computes with the translator of a run."""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float

from flaxformer_min.decoding.batches import bucket, padded
from flaxformer_min.decoding.models import weights_of_layers
from flaxformer_min.decoding.results import PairScore, Translation
from flaxformer_min.decoding.translator import Translator
from flaxformer_min.server.documents import WITHOUT_SPACES, plain_language
from flaxformer_min.tokens import EOS, Batch, one_sentence_per_row

SHARE = 4
"""Batches have this part of a translator's own rows: less to wait for, and less to compile.

On two cores batches of 8 rows reach 0.8 of the sentences a second of batches of 32 rows, when the
sentences come 16 or 32 at a time instead of all at once.
"""

ALONE = 3
"""Up to this many sentences a core are searched one by one on all cores of a CPU.

A batch of 8 rows, on a single core, takes 3.5 times as long as one sentence, however many it has.
"""

USUAL_WIDTH = 48
"""Programs for sentences of up to this many tokens are compiled before a request needs them."""


class Word(NamedTuple):
    """A word of a translation: its text, log-probability in nats, and tokens [start, end)."""

    text: str
    log_prob: float
    start: int
    end: int


class Pair:
    """The translator of a run, for requests from the language `source` to the language `target`.

    Methods that take a list return a result for each item, which depends on that item alone.

    most: items that a `Batcher` should pass at once.
    """

    def __init__(self, translator: Translator, source: str, target: str):
        """Take the translator of a single model; nothing is compiled yet."""
        self.source, self.target = source, target
        self._translator, runner = translator, translator.runner
        self._rows = max(runner.rows // SHARE, 1)
        self._longest = runner.widths[-1]
        # Two batches a core: while one waits for its longest sentence, the core has the other.
        self.most = 2 * self._rows * max(runner.cores, len(runner.devices))
        self._attend = jax.jit(partial(translator.models[0].apply, mutable=["intermediates"]))

    @property
    def beam_size(self) -> int:
        """The most translations of a sentence that `several` can return."""
        return self._translator.decoding.beam_size

    def best(self, sentences: list[str]) -> list[list[Translation]]:
        """Return the best translation of each sentence."""
        return self._hypotheses(sentences, 1)

    def several(self, sentences: list[str]) -> list[list[Translation]]:
        """Return all translations of each sentence that the search found, best first."""
        return self._hypotheses(sentences, self.beam_size)

    def _hypotheses(self, sentences: list[str], n_best: int) -> list[list[Translation]]:
        rows, cores = self._rows, self._translator.runner.cores
        if 1 < cores and len(sentences) <= ALONE * cores:
            rows = 1
        return self._translator.hypotheses(sentences, n_best=n_best, batch_size=rows)

    def score(self, pairs: list[tuple[str, str]]) -> list[PairScore]:
        """Return the log-probability of each token of given translations."""
        return self._translator.score(pairs)

    def attention(
        self, pairs: list[tuple[str, str]]
    ) -> list[tuple[list[str], Float[np.ndarray, "target source"]]]:
        """Return the tokens of each source, and how much those of its translation attend to them.

        The mean of all layers and heads follows the words better than any single layer.
        """
        found = []
        for sides in pairs:
            source, target = map(self._encode, sides, (False, True))
            weights = self._cross_attention(source, target).mean((0, 1))
            found.append((self._translator.source_tokenizer.pieces(source), weights))
        return found

    def too_long(self, sentences: Sequence[str]) -> str | None:
        """Return the first sentence with more tokens than the model reads; None if there is none.

        A token is at least a byte, so short ones need not be encoded.
        """
        longest, encode = self._longest, self._translator.source_tokenizer.encode_batch
        for sentence in sentences:
            if len(sentence.encode()) >= longest - 1 and len(encode([sentence])[0]) > longest:
                return sentence
        return None

    def count_tokens(self, translation: str) -> int:
        """Return how many tokens a translation has, EOS included."""
        return len(self._encode(translation, True))

    def words(self, text: str, score: PairScore) -> list[Word]:
        """Return the words of a translation; its tokens, in a language without spaces."""
        starts = [
            number
            for number, token in enumerate(score.tokens[:-1])
            if not number or token.startswith("▁") or plain_language(self.target) in WITHOUT_SPACES
        ]
        ends = [*starts[1:], len(score.tokens) - 1]
        spelled = text.split()
        if len(spelled) != len(starts):
            pieces = ["".join(score.tokens[i:j]) for i, j in zip(starts, ends, strict=False)]
            spelled = [piece.replace("▁", " ").strip() for piece in pieces]
        return [
            Word(word, float(sum(score.log_probs[start:end])), start, end)
            for word, start, end in zip(spelled, starts, ends, strict=False)
        ]

    def programs(self) -> Iterator[Callable[[], Any]]:
        """Yield calls that compile a program each; the first one is for a first, short request."""
        runner, beam = self._translator.runner, self.beam_size
        for width in [each for each in runner.widths if each <= USUAL_WIDTH] or runner.widths[:1]:
            ids = [*[EOS + 1] * (width - 1), EOS]
            for rows in (1, 2):  # which is padded to a batch
                for n_best in sorted({1, beam}):
                    yield partial(self._search, ids, rows, n_best)
                yield lambda ids=ids, rows=rows: list(runner.score([(ids, ids)] * rows))
            yield partial(self._cross_attention, ids, ids)

    def _search(self, ids: list[int], rows: int, n_best: int) -> None:
        config = self._translator.search_config(n_best=n_best, batch_size=self._rows)
        sources = dict.fromkeys(range(rows), ids)
        list(self._translator.runner.search(sources, dict.fromkeys(sources, []), config))

    def _encode(self, text: str, is_target: bool) -> list[int]:
        tokenizers = self._translator.source_tokenizer, self._translator.target_tokenizer
        (ids,), longest = tokenizers[is_target].encode_batch([text]), self._longest
        return ids if len(ids) <= longest else [*ids[: longest - 1], EOS]

    def _cross_attention(
        self, source: list[int], target: list[int]
    ) -> Float[np.ndarray, "layers heads target source"]:
        """Return the weights, computed at one of a few widths: each needs compiling."""
        runner = self._translator.runner
        width = bucket(max(len(source), len(target)), runner.widths)
        sides = [one_sentence_per_row(jnp.asarray(padded([i], 1, width))) for i in (source, target)]
        _, state = self._attend({"params": runner.params}, Batch(*sides))
        weights = weights_of_layers(state["intermediates"], "decoder", "cross_attention")
        return weights[:, :, : len(target), : len(source)]
