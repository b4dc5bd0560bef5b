"""Training with several processes: how they connect, communicate, stop and end together.

With a single process, nothing here has any effect.
"""

import contextlib
import dataclasses
import json
import os
import re
import signal
import socket
import sys
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np

HEARTBEAT_SECONDS = 30
"""Seconds without a heartbeat after which a process counts as dead, and jax ends the others."""

TIMEOUT_MS = 7 * 24 * 3600 * 1000
"""Milliseconds to wait for another process to finish its work; heartbeats show that it lives."""

CONNECT_SECONDS = 300
"""Seconds to wait until all processes have connected."""

WAITING_SECONDS = 10
"""Seconds after which a process that waits for the others reports it, again and again."""

_ENDING = threading.Lock()

_USES: Counter[str] = Counter()
"""How often this process has used each topic of the store."""


@dataclasses.dataclass(frozen=True)
class Distributed:
    """How several processes connect: set all three or none. Slurm and TPU pods need none."""

    coordinator: str = ""
    """HOST:PORT at which the other processes reach process 0; the port must be free."""

    num_processes: int | None = None
    """Number of processes."""

    process_id: int | None = None
    """Number of this process, from 0."""

    def __post_init__(self):
        """Validate the combination of the three."""
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
    """Connect this process with the others, if settings or a cluster specify several.

    Enter it before jax computes anything. `prepare` is called with the number of processes, before
    jax initializes the devices. An error in the body of one process ends all processes with that
    error; otherwise they would wait for it forever at exit.
    """
    cluster = None if settings.coordinator else _cluster()
    if not (settings.coordinator or cluster):
        prepare(1)
        yield
        return
    # Its handler would intercept SIGTERM, which `any_process` passes to the others.
    jax.config.update("jax_enable_preemption_service", False)
    _connect(settings, cluster)
    watch = threading.Thread(target=_end_with_the_others, daemon=True)
    watch.start()
    try:
        prepare(_group().num_processes)  # jax.process_count() would initialize the devices
        _check_devices()
        yield
        gather("end", "well")
    except BaseException as error:
        _end_all(error)
    if is_main_process():
        _store().key_value_set("failure", "null")
    watch.join()
    jax.distributed.shutdown()


def _connect(settings: Distributed, cluster: str | None) -> None:
    """Connect to the others; end the process if that takes too long, or at a signal.

    jax waits in C++, where Python handles no signal, and aborts with a stack trace in the end. So
    it waits in a thread of its own, and longer than this function does.
    """
    if settings.process_id == 0:
        _check_port(settings.coordinator)
    waiting = threading.Thread(target=_initialize, args=(settings, cluster, errors := []))
    waiting.daemon = True
    waiting.start()
    since = time.monotonic()
    try:
        for seconds in range(WAITING_SECONDS, CONNECT_SECONDS + 1, WAITING_SECONDS):
            while waiting.is_alive() and time.monotonic() < since + seconds:
                waiting.join(0.2)
            if not waiting.is_alive():
                break
            # Not logged: only the main process logs, and none has a number yet.
            with contextlib.suppress(OSError):
                text = f"waiting for {_awaited(settings)}, since {seconds} s."
                print(text, file=sys.stderr, flush=True)
    except KeyboardInterrupt as error:
        _print_last("stopped while connecting to the other processes.")
        _end_now(128 + (error.args[0] if error.args else signal.SIGINT))
    if waiting.is_alive():
        _print_last(
            f"the processes of a run must all start within {CONNECT_SECONDS} s; gave up waiting "
            f"for {_awaited(settings)}. Start all of them, each with its own process id and the "
            "same coordinator and number of processes, and check the network between them."
        )
        _end_now(2)
    if errors:
        raise errors[0]


def _check_port(coordinator: str) -> None:
    """Raise ValueError unless this process can listen there; jax might end in a crash."""
    try:
        both = socket.has_dualstack_ipv6()  # as jax listens
        family = socket.AF_INET6 if both else socket.AF_INET
        address = ("", int(coordinator.rpartition(":")[2]))
        socket.create_server(address, family=family, dualstack_ipv6=both).close()
    except OSError as error:
        raise ValueError(
            f"process 0 must be able to listen at {coordinator}; {os.strerror(error.errno)}. Give "
            "all processes a free port of its host."
        ) from error


def _initialize(settings: Distributed, cluster: str | None, errors: list[Exception]) -> None:
    try:
        jax.distributed.initialize(
            settings.coordinator or None,
            settings.num_processes,
            settings.process_id,
            cluster_detection_method=cluster or "deactivate",
            initialization_timeout=10 * CONNECT_SECONDS,
            heartbeat_timeout_seconds=HEARTBEAT_SECONDS,
        )
    except Exception as error:  # for the main thread to raise
        errors.append(error)


def _awaited(settings: Distributed) -> str:
    if settings.process_id == 0:
        return f"the other processes to connect to {settings.coordinator}"
    if settings.coordinator:
        return f"process 0 and the others at {settings.coordinator}"
    return "the other processes of the cluster"


def _end_now(status: int) -> None:
    with contextlib.suppress(OSError):
        sys.stdout.flush()
    os._exit(status)  # a regular exit would wait for the thread


def count() -> int:
    """Return the number of processes."""
    return jax.process_count() if jax.distributed.is_initialized() else 1


def index() -> int:
    """Return the number of this process, from 0."""
    return jax.process_index() if jax.distributed.is_initialized() else 0


def is_main_process() -> bool:
    """Return whether this is process 0, which does what is done once."""
    return index() == 0


@contextlib.contextmanager
def main_process_first(topic: str) -> Iterator[None]:
    """Run the body in process 0, and then in the others.

    All processes must use the same topics equally often.
    """
    if count() == 1:
        yield
        return
    key = _key(f"first/{topic}")
    if not is_main_process():
        _store().blocking_key_value_get(key, TIMEOUT_MS)
    yield
    if is_main_process():
        _store().key_value_set(key, "done")


def gather(topic: str, value: Any) -> list[Any]:
    """Return the value of each process, in their order.

    Values must be JSON-serializable. All processes must use the same topics equally often.

    >>> gather("weather", {"rain": 0.5})
    [{'rain': 0.5}]
    """
    if count() == 1:
        return [value]
    key = _key(topic)
    _store().key_value_set(f"{key}/{index()}", json.dumps(value))
    return [
        json.loads(_store().blocking_key_value_get(f"{key}/{other}", TIMEOUT_MS))
        for other in range(count())
    ]


def _key(topic: str) -> str:
    """Return a key of the store for one more use of a topic, for no key can be set twice."""
    _USES[topic] += 1
    return f"{topic}/{_USES[topic]}"


def any_process(poll: Callable[[], bool]) -> Callable[[], bool]:
    """Return a function that is true in all processes once `poll()` is true in any.

    All processes must call it equally often; it becomes true at the same call in all. It returns
    the result of its previous call, so that a step need not wait for the communication.
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
    """Return jax's name of the cluster that started several processes, or None."""
    # A shell within an allocation also has Slurm's variables, but only srun sets several tasks.
    tasks = os.environ.get("SLURM_STEP_NUM_TASKS", "1")
    if not tasks.isdecimal():
        raise ValueError(
            "SLURM_STEP_NUM_TASKS must be the number of processes that srun started; got "
            f"{tasks!r}. Start them with srun, or unset it to train in one process."
        )
    if int(tasks) > 1:
        return "slurm"
    from jax._src.clusters import GceTpuCluster, GkeTpuCluster  # there is no public name

    for pod in (GkeTpuCluster, GceTpuCluster):
        if pod.is_env_present() and pod.get_process_count() > 1:
            return pod.name
    return None


def _check_devices() -> None:
    numbers = {len(jax.local_devices(process)) for process in range(count())}
    if len(numbers) > 1:
        raise ValueError(
            "every process must have the same number of devices; got "
            f"{', '.join(map(str, sorted(numbers)))}. Hide some, for example with "
            "CUDA_VISIBLE_DEVICES."
        )


def _group() -> Any:
    from jax._src.distributed import global_state  # there is no public name

    return global_state


def _store() -> Any:
    """Return jax's key-value store, which process 0 hosts."""
    return _group().client


def _end_all(error: BaseException) -> None:
    """End all processes because of an error or a stop signal in this one."""
    status = 2
    if isinstance(error, (KeyboardInterrupt, SystemExit)):
        number = error.args[0] if error.args else signal.SIGINT
        status = error.code if isinstance(error, SystemExit) else 128 + number
        text = f"process {index()} of {count()} received a stop signal. The same commands continue."
    elif re.match("[A-Z_]+: ", str(error)):  # a status of XLA, whatever the exception's type
        text = _cannot_continue(error)
    else:
        text = f"process {index()} of {count()} failed: {str(error) or type(error).__name__}"
    if not isinstance(error, (ValueError, OSError, RuntimeError)) and status == 2:
        traceback.print_exception(error)
    _print_last(text)
    with contextlib.suppress(jax.errors.JaxRuntimeError):
        _store().key_value_set("failure", json.dumps([index(), text, status]), allow_overwrite=True)
    _end(status)


def _cannot_continue(error: BaseException) -> str:
    return (
        f"process {index()} of {count()} cannot continue: {str(error).splitlines()[0]}. If another "
        "process ended first, see its message for the cause. Start all of them again to continue "
        "from the last checkpoint."
    )


def _end_with_the_others() -> None:
    """Wait until a process fails, all have finished, or the store of process 0 is gone."""
    try:
        failure = json.loads(_store().blocking_key_value_get("failure", TIMEOUT_MS))
    except jax.errors.JaxRuntimeError as error:
        failure = [None, _cannot_continue(error), 2]
    if failure and failure[0] != index():
        _print_last(failure[1])
        _end(failure[2])


def _print_last(text: str) -> None:
    _ENDING.acquire()  # for good: whatever fails afterwards is a consequence
    with contextlib.suppress(OSError):  # the reader may be gone
        print(f"error: {text}", file=sys.stderr, flush=True)


def _end(status: int) -> None:
    """End immediately: at a regular exit jax would wait for the other processes."""
    with contextlib.suppress(OSError):
        sys.stdout.flush()
    if is_main_process():
        time.sleep(1)  # let the others read the store, which ends with this process
    os._exit(status)
