"""The speed of translating."""

import time
from typing import Any


class Speed:
    """Counts translations and the seconds since its creation."""

    def __init__(self, translator: Any):
        """Start the clock."""
        self._translator, self._since = translator, time.perf_counter()
        self.sentences = self.tokens = 0
        self.seconds, self.compilations = 0.0, 0

    def count(self, texts: list[str]) -> None:
        """Count these translations, EOS included."""
        self.seconds = time.perf_counter() - self._since
        self.compilations = self._translator.runner.compilations
        self.sentences += len(texts)
        self.tokens += sum(map(len, self._translator.target_tokenizer.encode_batch(texts)))

    def to_dict(self) -> dict[str, Any]:
        """Return counts and rates."""
        seconds = max(self.seconds, 1e-9)
        return {
            "seconds": round(self.seconds, 3),
            "sentences_per_second": round(self.sentences / seconds, 2),
            "tokens_per_second": round(self.tokens / seconds, 2),
            "compilations": self.compilations,
            "device": _device(),
        }

    def __str__(self) -> str:
        """Return a one-line summary."""
        seconds = max(self.seconds, 1e-9)
        return (
            f"{self.sentences:,} sentences, {self.tokens:,} tokens in {self.seconds:.1f} s = "
            f"{self.sentences / seconds:,.1f} sentences/s, {self.tokens / seconds:,.1f} tokens/s "
            f"on {_device()}; compilations, included: {self.compilations}"
        )


def _device() -> str:
    from flaxformer_min.system.devices import describe_devices

    return describe_devices()
