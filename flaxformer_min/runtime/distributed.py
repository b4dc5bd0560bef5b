"""Several processes that train as one: how they meet, talk, stop and end together.

Nothing here does anything where a process is alone.
"""

import contextlib
import dataclasses
import json
import os
import re
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np

HEARTBEAT_SECONDS = 30
"""A process that was not heard of for so long is taken for dead, and jax ends the others."""


PATIENCE = 7 * 24 * 3600 * 1000
"""Milliseconds one waits for what another prepares. That it lives, the heartbeat tells."""


_ENDING = threading.Lock()


@dataclasses.dataclass(frozen=True)
class Distributed:
    """Where several processes meet: give all three, or none. Slurm and TPU pods need none."""

    coordinator: str = ""
    """HOST:PORT of process 0, as all others reach it; the port must be free."""

    num_processes: int | None = None
    """How many there are."""

    process_id: int | None = None
    """Which of them this is, from 0."""

    def __post_init__(self):
        """Check that the three make sense together."""
        given = self.coordinator, self.num_processes, self.process_id
        if given == ("", None, None):
            return
        if "" in given or None in given:
            raise ValueError(
                "several processes need distributed.coordinator, distributed.num-processes and "
                f"distributed.process-id; got {given[0]!r}, {given[1]} and {given[2]}. Give all "
                "three, or none to train in one process."
            )
        host, _, port = self.coordinator.rpartition(":")
        if not (host and port.isdecimal() and 0 < int(port) < 65536):
            raise ValueError(
                "distributed.coordinator must be HOST:PORT, as in '10.0.0.1:1234'; got "
                f"{self.coordinator!r}."
            )
        if not 0 <= self.process_id < self.num_processes:
            raise ValueError(
                "distributed.process-id must count from 0 up to distributed.num-processes - 1; got "
                f"{self.process_id} of {self.num_processes}."
            )


@contextlib.contextmanager
def distributed_session(
    settings: Distributed, prepare: Callable[[int], None] = lambda processes: None
) -> Iterator[None]:
    """Be one of several processes while the body runs, if told so or started so by a cluster.

    To be entered before jax computes anything. `prepare` is called with the number of processes,
    before jax looks for devices. An error in the body of one process ends all of them, with its
    words: waiting for it, as jax does at exit, would be for ever.
    """
    cluster = None if settings.coordinator else _cluster()
    if not (settings.coordinator or cluster):
        prepare(1)
        yield
        return
    # Its handler would swallow SIGTERM; `any_process` tells the others instead.
    jax.config.update("jax_enable_preemption_service", False)
    jax.distributed.initialize(
        settings.coordinator or None,
        settings.num_processes,
        settings.process_id,
        cluster_detection_method=cluster or "deactivate",
        heartbeat_timeout_seconds=HEARTBEAT_SECONDS,
    )
    watch = threading.Thread(target=_end_with_the_others, daemon=True)
    watch.start()
    try:
        prepare(_group().num_processes)  # jax.process_count() would look for devices
        _check_devices()
        yield
        gather("end", "well")
    except BaseException as error:
        _end_all(error)
    if is_main_process():
        _store().key_value_set("failure", "null")
    watch.join()
    jax.distributed.shutdown()


def count() -> int:
    """How many processes train together."""
    return jax.process_count() if jax.distributed.is_initialized() else 1


def index() -> int:
    """Which of them this is, from 0."""
    return jax.process_index() if jax.distributed.is_initialized() else 0


def is_main_process() -> bool:
    """Whether this is the one process that writes what is written once."""
    return index() == 0


@contextlib.contextmanager
def main_process_first(topic: str) -> Iterator[None]:
    """Process 0 runs the body; then the others do, and find what it left. A topic serves once."""
    if not is_main_process():
        _store().blocking_key_value_get(f"first/{topic}", PATIENCE)
    yield
    if is_main_process() and count() > 1:
        _store().key_value_set(f"first/{topic}", "done")


def gather(topic: str, value: Any) -> list[Any]:
    """What each process has to say, as JSON, by its number. A topic serves once.

    >>> gather("weather", {"rain": 0.5})
    [{'rain': 0.5}]
    """
    if count() == 1:
        return [value]
    _store().key_value_set(f"{topic}/{index()}", json.dumps(value))
    return [
        json.loads(_store().blocking_key_value_get(f"{topic}/{other}", PATIENCE))
        for other in range(count())
    ]


def any_process(poll: Callable[[], bool]) -> Callable[[], bool]:
    """`poll`, but true in every process at the same call once it is true in one.

    All must call it equally often. The answer is that of the call before, so that a step need not
    wait for the one before it.
    """
    if count() == 1:
        return poll
    in_any = jax.pmap(lambda flag: jax.lax.pmax(flag, "devices"), "devices", out_axes=None)
    known = np.int32(0)

    def poll_all() -> bool:
        nonlocal known
        answer, known = known, in_any(np.full(jax.local_device_count(), poll(), np.int32))
        return bool(answer)

    return poll_all


def _cluster() -> str | None:
    """What jax calls the cluster that started several of these, or None where this is alone."""
    # A shell within an allocation has Slurm's other variables too, and only srun has many tasks.
    if int(os.environ.get("SLURM_STEP_NUM_TASKS", 1)) > 1:
        return "slurm"
    from jax._src.clusters import GceTpuCluster, GkeTpuCluster  # jax shows them nowhere else

    for pod in (GkeTpuCluster, GceTpuCluster):
        if pod.is_env_present() and pod.get_process_count() > 1:
            return pod.name
    return None


def _check_devices() -> None:
    numbers = {len(jax.local_devices(process)) for process in range(count())}
    if len(numbers) > 1:
        raise ValueError(
            "every process must have the same number of devices; got "
            f"{', '.join(map(str, sorted(numbers)))}. Hide some, with CUDA_VISIBLE_DEVICES say."
        )


def _group() -> Any:
    from jax._src.distributed import global_state  # jax shows it nowhere else

    return global_state


def _store() -> Any:
    """The strings that process 0 keeps for all."""
    return _group().client


def _end_all(error: BaseException) -> None:
    """End this process for its error, or because it was asked to, and the others too."""
    status = 2
    if isinstance(error, (KeyboardInterrupt, SystemExit)):
        number = error.args[0] if error.args else signal.SIGINT
        status = error.code if isinstance(error, SystemExit) else 128 + number
        text = f"process {index()} of {count()} was asked to end. The same commands go on."
    elif re.match("[A-Z_]+: ", str(error)):  # a status of XLA's, whatever the exception's type
        text = _cannot_go_on(error)
    else:
        text = f"process {index()} of {count()} failed: {str(error) or type(error).__name__}"
    if not isinstance(error, (ValueError, OSError, RuntimeError)) and status == 2:
        traceback.print_exception(error)
    _say_last(text)
    with contextlib.suppress(jax.errors.JaxRuntimeError):
        _store().key_value_set("failure", json.dumps([index(), text, status]), allow_overwrite=True)
    _end(status)


def _cannot_go_on(error: BaseException) -> str:
    return (
        f"process {index()} of {count()} cannot go on: {str(error).splitlines()[0]}. If another "
        "one ended first, that one says why. Start all of them again, to go on from the last "
        "checkpoint."
    )


def _end_with_the_others() -> None:
    """Wait until one fails; or all are done, or process 0 is gone and the store with it."""
    try:
        failure = json.loads(_store().blocking_key_value_get("failure", PATIENCE))
    except jax.errors.JaxRuntimeError as error:
        failure = [None, _cannot_go_on(error), 2]
    if failure and failure[0] != index():
        _say_last(failure[1])
        _end(failure[2])


def _say_last(text: str) -> None:
    _ENDING.acquire()  # for ever: what fails afterwards fails because of it
    with contextlib.suppress(OSError):  # who reads may have gone
        print(f"error: {text}", file=sys.stderr, flush=True)


def _end(status: int) -> None:
    """End now: at a regular exit jax would wait for the other processes."""
    with contextlib.suppress(OSError):
        sys.stdout.flush()
    if is_main_process():
        time.sleep(1)  # the store ends with this process: let the others read
    os._exit(status)
