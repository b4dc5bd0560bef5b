"""A few steps of training as a timeline: what devices and host did, and when."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax

WARM_UP_STEPS = 10
"""What is recorded comes after these: the first compiles, the next find full buffers of rows."""


class Profile:
    """Records `steps` steps of this start in `folder`; 0 records none.

    Used as a context manager around training, so that what was begun is written however training
    ends. A folder may hold several records.
    """

    def __init__(self, folder: Path, steps: int, say: Callable[[str], None] = print):
        """`say` is told where the record is and how to look at it."""
        self.folder, self.steps, self._say = folder, steps, say
        self._taken, self._first, self._recording = 0, 0, False

    def of(self, train_step: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
        """The same step, recorded when its time has come."""
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
        """Record nothing yet."""
        return self

    def __exit__(self, *_) -> None:
        """Write what was recorded so far."""
        if self._recording:
            self._stop()
        elif self.steps and self._taken <= WARM_UP_STEPS:
            self._say(
                f"No profile: it begins after {WARM_UP_STEPS} steps of a start, and there were "
                f"{self._taken}."
            )

    def _start(self, state: Any) -> None:
        jax.block_until_ready(state)  # what still runs is none of ours
        self._first = int(state.step) + 1
        options = jax.profiler.ProfileOptions()
        options.python_tracer_level = 0  # each call of Python would hide the rest, and slow it down
        jax.profiler.start_trace(self.folder, profiler_options=options)
        self._recording = True

    def _stop(self) -> None:
        self._recording = False
        last = self._first + self._taken - WARM_UP_STEPS - 1
        try:
            jax.profiler.stop_trace()
        except (OSError, RuntimeError) as error:  # training is worth more
            self._say(f"warning: the profile cannot be written to {self.folder}: {error}")
            return
        self._say(
            f"Profile of steps {self._first:,} to {last:,}: {self.folder}. Open its newest "
            "plugins/profile/*/*.trace.json.gz at https://ui.perfetto.dev, or all of it with "
            f"xprof --logdir {self.folder} (pip install xprof)."
        )
