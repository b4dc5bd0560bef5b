"""Messages of a training job, logged to "flaxformer_min"."""

import logging
import time
from collections.abc import Mapping
from typing import Any

import jax

from flaxformer_min.config import ModelConfig
from flaxformer_min.data.batches import EpochBatches
from flaxformer_min.system.devices import describe_devices
from flaxformer_min.training.loop import OnStep
from flaxformer_min.training.step import TrainState

LOGGER = logging.getLogger("flaxformer_min")

MUCH_PADDING = 0.05
"""Share of padding above which better row lengths are suggested, if there are any."""

MEMORY_ADVICE = (
    "Training needs less with --model.remat full or --model.dtype bfloat16, or, in a new run "
    "folder, with fewer --data.rows-per-batch and more --training.gradient-accumulation; "
    "translating, with a smaller --decoding.batch-size or --decoding.beam-size."
)


class Stopwatch:
    """Measures the stages of a job."""

    def __init__(self):
        """Start the first stage."""
        self.started = self._since = time.perf_counter()
        self.seconds: dict[str, float] = {}

    def finish(self, stage: str) -> None:
        """End a stage; the next one begins."""
        now = time.perf_counter()
        self.seconds[stage] = self.seconds.get(stage, 0.0) + now - self._since
        self._since = now

    def __str__(self) -> str:
        """Return the stages with their seconds."""
        return ", ".join(f"{stage} {seconds:.0f} s" for stage, seconds in self.seconds.items())


def reporting_first_step(on_step: OnStep | None, watch: Stopwatch) -> OnStep:
    """Return `on_step`, which reports the time of the first step since the start, too."""
    is_first = True

    def report(step: int, metrics: Mapping[str, float]) -> None:
        nonlocal is_first
        if is_first:
            is_first = False
            seconds = time.perf_counter() - watch.started
            LOGGER.info("The first step is done %.1f s after the start.", seconds)
        if on_step is not None:
            on_step(step, metrics)

    return report


def report_start(
    folder: Any, config: ModelConfig, state: TrainState, epoch: EpochBatches | None
) -> None:
    """Report devices, sizes of model, batch and epoch, and better row lengths if there are any.

    Without an epoch, as of batches that the caller makes, report devices and model alone.
    """
    parameters = sum(leaf.size for leaf in jax.tree.leaves(state.params))
    text = f"{describe_devices()}; run folder {folder}\n{parameters / 1e6:.1f} M parameters"
    text += f", vocabulary {config.vocab_size:,}"
    if epoch is None:
        LOGGER.info(text)
        return
    sides = epoch.encoded.source, epoch.encoded.target
    tokens = [side.lengths.sum() / len(epoch) for side in sides]
    LOGGER.info(
        f"{text}; a batch: {tokens[0]:,.0f} source and {tokens[1]:,.0f} target tokens, "
        f"{epoch.padding():.1%} padding; an epoch: {len(epoch):,} batches"
    )
    even = epoch.even_row_lengths()
    if (
        len(epoch) > 1
        and epoch.padding() > MUCH_PADDING
        and sum(even) > 1.02 * sum(epoch.row_lengths)
    ):
        LOGGER.info(
            f"Rows of {even[0]} source and {even[1]} target tokens would suit this text better: "
            f"--data.source-row-length {even[0]} --data.target-row-length {even[1]}"
        )


def format_example(pair: tuple[str, str], translation: str) -> str:
    """Return three lines: a source, its translation and the reference.

    >>> print(format_example(("one two", "two one"), "two two"))
        one two
          -> two two
           (two one)
    """
    source, reference = pair
    return f"    {source}\n      -> {translation}\n       ({reference})"
