"""What the server answers: translations of texts and documents, and languages."""

import asyncio
import math
from collections.abc import Sequence
from typing import Any

from babel import Locale, UnknownLocaleError

from flaxformer_min.decoding.results import Translation
from flaxformer_min.server.batching import Batcher
from flaxformer_min.server.documents import deal, split_html, split_text
from flaxformer_min.server.pair import Pair
from flaxformer_min.server.requests import Limits, Problem, Query, parse_query, parse_texts

SENTENCES_TO_DETECT = 8
"""The language of a text is detected by its first sentences."""


class Service:
    """The language pairs that are served, and the queue that they share."""

    def __init__(self, pairs: Sequence[Pair], limits: Limits):
        """Take the pairs, each of other languages, and start the queue's threads."""
        self.limits = limits
        self.batcher = Batcher(limits.waiting)
        self._pairs = {(_plain(pair.source), _plain(pair.target)): pair for pair in pairs}
        self._codes = {_plain(code): code for pair in pairs for code in (pair.source, pair.target)}

    def languages(self) -> list[dict[str, Any]]:
        """Return the languages by code, each with the targets that it can be translated to."""
        return [
            {
                "code": code,
                "name": language_name(code),
                "targets": [p.target for (source, _), p in self._pairs.items() if source == key],
            }
            for key, code in sorted(self._codes.items())
        ]

    async def detect(self, fields: dict[str, Any]) -> list[dict[str, Any]]:
        """Return the source languages that are served, the likeliest first.

        The confidence is the mean probability of a token of the best translation, in percent.
        """
        texts, _ = parse_texts(fields, self.limits)
        return await self._detect(texts, list(self._pairs.values()))

    async def translate(self, fields: dict[str, Any]) -> dict[str, Any]:
        """Return the translations that a request to /translate asks for."""
        query = parse_query(fields, self.limits)
        pair, detected = await self._choose_pair(query)
        split = split_html if query.is_html else split_text
        documents = [split(text, pair.source, pair.target) for text in query.texts]
        sentences = [sentence for document in documents for sentence in document.sentences]
        self._check(pair, sentences)
        search = pair.several if query.alternatives else pair.best
        found = await self.batcher.compute(search, sentences, pair.most)
        best = [hypotheses[0].text for hypotheses in found]
        response: dict[str, Any] = {
            "translatedText": [document.join(part) for document, part in deal(documents, best)]
        }
        if detected is not None:
            response["detectedLanguage"] = [detected] * len(documents)
        if query.alternatives:
            response["alternatives"] = [
                _others(document.join_hypotheses(part))[: query.alternatives]
                for document, part in deal(documents, found)
            ]
        if query.confidence or query.attention:
            details = await self._details(pair, sentences, best, query)
            response["sentences"] = [part for _, part in deal(documents, details)]
        return response if query.is_list else {name: one for name, (one,) in response.items()}

    async def _choose_pair(self, query: Query) -> tuple[Pair, dict[str, Any] | None]:
        """Return the pair, and the detected language if the request does not name it."""
        source, target = _plain(query.source), _plain(query.target)
        for given, key in ((query.source, source), (query.target, target)):
            if key not in self._codes and (key, given) != ("auto", query.source):
                raise Problem(400, f"{given:.40} is not supported")
        if source != "auto":
            if (source, target) in self._pairs:
                return self._pairs[source, target], None
        elif known := [pair for (_, other), pair in self._pairs.items() if other == target]:
            detected, *_ = await self._detect(query.texts, known)
            return self._pairs[_plain(detected["language"]), target], detected
        raise Problem(
            400,
            f"{language_name(self._codes[target])} ({query.target}) is not available as a target "
            f"language from {query.source}",
        )

    async def _detect(self, texts: list[str], pairs: list[Pair]) -> list[dict[str, Any]]:
        by_source: dict[str, Pair] = {}
        for pair in pairs:
            by_source.setdefault(pair.source, pair)
        found = []
        for pair in by_source.values():
            split = [split_text(text, pair.source).sentences for text in texts]
            sentences = sum(split, [])[:SENTENCES_TO_DETECT]
            self._check(pair, sentences)
            best = await self.batcher.compute(pair.best, sentences, pair.most)
            log_prob = sum(hypotheses[0].log_prob for hypotheses in best)
            tokens = sum(pair.count_tokens(hypotheses[0].text) for hypotheses in best)
            confidence = 100 * math.exp(log_prob / tokens) if tokens else 0.0
            found.append({"confidence": round(confidence, 1), "language": pair.source})
        return sorted(found, key=lambda each: -each["confidence"])

    def _check(self, pair: Pair, sentences: list[str]) -> None:
        if len(sentences) > self.limits.waiting:
            raise Problem(
                413,
                f"Invalid request: request ({len(sentences)} sentences) exceeds text limit "
                f"({self.limits.waiting})",
            )
        if pair.too_long(sentences):
            raise Problem(413, "Invalid request: a sentence is longer than the model can read")

    async def _details(
        self, pair: Pair, sentences: list[str], best: list[str], query: Query
    ) -> list[dict[str, Any]]:
        """Return what is known of each sentence: tokens, their probabilities, attention."""
        both = list(zip(sentences, best, strict=True))
        details: list[dict[str, Any]] = [{"source": s, "translation": t} for s, t in both]
        waiting = [self.batcher.compute(pair.score, both, pair.most)]
        if query.attention:
            waiting.append(self.batcher.compute(pair.attention, both, pair.most))
        scores, *attention = await asyncio.gather(*waiting)
        for detail, text, score in zip(details, best, scores, strict=True):
            words = pair.words(text, score)
            detail["tokens"] = score.tokens
            detail["words"] = [{"text": w.text, "start": w.start, "end": w.end} for w in words]
            if query.confidence:
                detail["logProbs"] = [_rounded(value) for value in score.log_probs]
                for shown, word in zip(detail["words"], words, strict=True):
                    shown["logProb"] = _rounded(word.log_prob)
        if query.attention:
            for detail, (tokens, weights) in zip(details, *attention, strict=True):
                detail["sourceTokens"] = tokens
                detail["attention"] = weights.astype(float).round(4).tolist()
        return details


def language_name(code: str) -> str:
    """Return the English name of a language; its code if it has none.

    >>> language_name("ko"), language_name("pt_BR"), language_name("xx")
    ('Korean', 'Portuguese (Brazil)', 'xx')
    """
    try:
        return Locale.parse(code.replace("-", "_")).get_display_name("en") or code
    except (UnknownLocaleError, ValueError):
        return code


def _plain(code: str) -> str:
    return code.lower().replace("_", "-")


def _others(found: list[Translation]) -> list[str]:
    """Return the texts that differ from the first one, each once."""
    texts = dict.fromkeys(each.text for each in found)
    return list(texts)[1:]


def _rounded(value: float) -> float | None:
    return round(value, 4) if math.isfinite(value) else None
