"""Profiles: timelines of a few training steps on devices and host."""

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax

LOGGER = logging.getLogger("flaxformer_min")

WARM_UP_STEPS = 10
"""Steps before the recording: the first one compiles, the next ones have prefetched batches."""


class Profile:
    """Records a profile of `steps` steps of this start in `folder`; 0 records none.

    A context manager around training, which writes the recording however training ends. A folder
    may hold several recordings.
    """

    def __init__(self, folder: Path, steps: int):
        """Take the folder and the number of steps."""
        self.folder, self.steps = folder, steps
        self._taken, self._first, self._recording = 0, 0, False

    def wrap(self, train_step: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
        """Return the same step, which starts and stops the recording."""
        if not self.steps:
            return train_step

        def step(state: Any, batch: Any) -> Any:
            if self._taken == WARM_UP_STEPS:
                self._start(state)
            self._taken += 1
            number = self._first + self._taken - WARM_UP_STEPS - 1
            with jax.profiler.StepTraceAnnotation("train", step_num=number):
                result = train_step(state, batch)
            if self._taken == WARM_UP_STEPS + self.steps:
                jax.block_until_ready(result)
                self._stop()
            return result

        return step

    def __enter__(self) -> "Profile":
        """Return this profile."""
        return self

    def __exit__(self, *_) -> None:
        """Write the recording, or log why there is none."""
        if self._recording:
            self._stop()
        elif self.steps and self._taken <= WARM_UP_STEPS:
            LOGGER.info(
                "No profile was recorded: it starts after %d steps, and only %d were taken.",
                WARM_UP_STEPS,
                self._taken,
            )

    def _start(self, state: Any) -> None:
        jax.block_until_ready(state)  # earlier steps are not part of it
        self._first = int(state.step) + 1
        options = jax.profiler.ProfileOptions()
        options.python_tracer_level = 0  # Python calls would hide the rest and slow it down
        jax.profiler.start_trace(self.folder, profiler_options=options)
        self._recording = True

    def _stop(self) -> None:
        self._recording = False
        last = self._first + self._taken - WARM_UP_STEPS - 1
        try:
            jax.profiler.stop_trace()
        except (OSError, RuntimeError) as error:  # training is more important
            LOGGER.warning("the profile cannot be written to %s: %s", self.folder, error)
            return
        LOGGER.info(
            f"Profile of steps {self._first:,} to {last:,}: {self.folder}. Open its newest "
            "plugins/profile/*/*.trace.json.gz at https://ui.perfetto.dev, or all of it with "
            f"xprof --logdir {self.folder} (pip install xprof)."
        )
