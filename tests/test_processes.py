"""Several processes: they train what one trains, stop together, and never wait for the dead."""

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
from training_jobs import changed, shared_programs, small_config, write_config

from benchmarks.crash import differences
from flaxformer_min.config import Config
from flaxformer_min.experiment import prepare
from flaxformer_min.experiment.run import train
from flaxformer_min.system.distributed import (
    Distributed,
    _cluster,
    any_process,
    distributed_session,
    gather,
    main_process_first,
)
from flaxformer_min.training.metrics import read_metrics

ALONE = os.environ["XLA_FLAGS"].replace("device_count=2", "device_count=1")


@contextlib.contextmanager
def pair(*command, flags=ALONE):
    """Two processes, of one device each if not told else, that find each other; none is left."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        where = f"127.0.0.1:{free.getsockname()[1]}"
    environment = os.environ | {"XLA_FLAGS": flags, "PYTHONPATH": str(ROOT)}
    meet = ["--distributed.coordinator", where, "--distributed.num-processes", "2"]
    both = [
        subprocess.Popen(
            [sys.executable, *command, *meet, "--distributed.process-id", str(number)],
            cwd=ROOT,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for number in (0, 1)
    ]
    try:
        yield both
    finally:
        for process in both:
            process.kill()
            process.communicate()


def wait_for(condition, both, seconds=120):
    deadline = time.monotonic() + seconds
    while not condition():
        ended = [process for process in both if process.poll() is not None]
        assert not ended, ended[0].communicate()
        assert time.monotonic() < deadline
        time.sleep(0.02)


@pytest.mark.slow
def test_two_processes_go_on_with_a_run_and_equal_one_process_bit_for_bit(tmp_path):
    """One process begins; two continue and save together, until one is killed; one ends it.

    Dropout is on, and all share one order of rows and one log. The kill comes between two
    checkpoints; amid one, the other process waits for jax's heartbeats.
    """
    seldom = {"log_every": 4, "save_every": 60, "validate_every": 50}
    file, config = write_config(tmp_path, **seldom), small_config(tmp_path, **seldom)
    workdir, uncut = tmp_path / "shared", tmp_path / "uncut"
    metrics = workdir / "metrics.jsonl"

    def train_until(step, folder):
        with shared_programs():
            train(changed(config, "training", steps=step), folder)

    def last_step():
        return max([line["step"] for line in read_metrics(metrics)], default=0)

    train_until(3, workdir)
    forever = ["--training.steps", "100000"]
    with pair("train.py", file, "--workdir", str(workdir), *forever) as both:
        wait_for(lambda: (workdir / "checkpoints" / "60").exists() and last_step() > 60, both)
        both[1].kill()
        killed = time.monotonic()
        printed, errors = both[0].communicate(timeout=60)
        silent, _ = both[1].communicate()
    assert time.monotonic() - killed < 60
    assert both[0].returncode in (2, -signal.SIGABRT), errors
    assert "process 0 of 2 cannot continue" in errors or "another task died" in errors
    assert "2 cpu devices (cpu) of 2 processes" in printed
    assert "Continuing from step 3." in printed
    assert "step" not in silent, "the first process reports for both"

    last = last_step() + 2
    for folder in (workdir, uncut):
        train_until(last, folder)
    found = differences(workdir, uncut)
    assert not [text for text in found if text.startswith(("the array", "the newest step"))]
    names = ("step", "loss", "accuracy", "gradient_norm", "padding", "skipped")
    of_pair, of_uncut = (
        [[line[name] for name in names] for line in read_metrics(path) if "loss" in line]
        for path in (metrics, uncut / "metrics.jsonl")
    )
    assert of_pair == of_uncut


MEET = """
import signal, sys, time
import jax, jax.numpy as jnp
from flaxformer_min.system.devices import configure_cpu_devices
from flaxformer_min.system.distributed import (
    Distributed, any_process, distributed_session, gather, is_main_process, main_process_first
)
from flaxformer_min.system.signals import StopRequest

def fail():
    for number in range(2):  # as several calls of train do in one session
        with main_process_first("start"):
            pass
        assert gather("start", number) == [number, number]
    if not is_main_process():
        raise OSError("the disk is full")
    gather("what never comes", 0)

def stop():
    with StopRequest() as request:
        steps, poll = 0, any_process(request)
        print("ready", flush=True)
        while not poll():
            steps += 1
            time.sleep(0 if is_main_process() else 0.002)
    assert len(set(gather("steps", steps))) == 1
    return max(gather("status", request.status))

def wait():
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a job in the background ignores it
    print("ready", flush=True)
    time.sleep(600)

def share():
    assert jax.local_device_count() == 1, "two rows for two processes"
    return 0

def prepare(processes):
    if sys.argv[1] == "share":
        configure_cpu_devices(2 // processes)

with distributed_session(Distributed(sys.argv[3], 2, int(sys.argv[7])), prepare):
    status = {"fail": fail, "stop": stop, "wait": wait, "share": share}[sys.argv[1]]()
sys.exit(status)
"""


def wait_until_ready(both):
    for process in both:
        while process.stdout.readline() not in ("ready\n", ""):
            pass


def assert_both_end(both, status, error):
    for process in both:
        _, errors = process.communicate(timeout=60)
        assert process.returncode == status, errors
        assert error in errors and "Traceback" not in errors


def test_a_process_that_fails_ends_the_others_with_its_words():
    with pair("-c", MEET, "fail") as both:
        assert_both_end(both, 2, "error: process 1 of 2 failed: the disk is full\n")


@pytest.mark.slow
def test_the_cores_of_each_process_share_its_own_rows():
    with pair("-c", MEET, "share", flags="") as both:
        assert_both_end(both, 0, "")


def test_a_signal_to_one_process_stops_all_after_the_same_step():
    """jax would swallow SIGTERM among several processes. One is slower, and polls no less often."""
    with pair("-c", MEET, "stop") as both:
        wait_until_ready(both)
        both[1].send_signal(signal.SIGTERM)
        assert_both_end(both, 143, "")


@pytest.mark.parametrize(
    "number, status",
    [(signal.SIGINT, 130), pytest.param(signal.SIGTERM, 143, marks=pytest.mark.slow)],
)
def test_a_signal_before_training_ends_all_with_a_sentence(number, status):
    with pair("-c", MEET, "wait") as both:
        wait_until_ready(both)
        both[1].send_signal(number)
        assert_both_end(both, status, "error: process 1 of 2 received a stop signal. The same")


def test_a_killed_first_process_ends_the_others_with_a_sentence():
    """It holds what all meet at. Ours or jax's own words come first, both say what happened."""
    with pair("-c", MEET, "stop") as both:
        wait_until_ready(both)
        both[0].kill()
        _, errors = both[1].communicate(timeout=60)
    assert both[1].returncode in (2, -signal.SIGABRT), errors
    assert "process 1 of 2 cannot continue" in errors or "another task died" in errors


def test_a_port_that_another_process_uses_is_named():
    with socket.socket() as used:
        used.bind(("127.0.0.1", 0))
        used.listen()
        where = f"127.0.0.1:{used.getsockname()[1]}"
        rule = f"process 0 must be able to listen at {where}; Address already in use. Give"
        with pytest.raises(ValueError, match=re.escape(rule)):
            with distributed_session(Distributed(where, 2, 0), lambda processes: None):
                pass


def test_all_processes_must_be_given_the_same(monkeypatch):
    """Otherwise they would take different steps, and wait for each other."""
    monkeypatch.setattr(prepare, "gather", lambda _, mine: [mine, {**mine, "settings": "{}"}])
    with pytest.raises(ValueError, match="the settings of process 1 differ"):
        prepare.check_agreement(Config(), {})


@pytest.mark.parametrize(
    "settings, error",
    [
        (("host:1",), "distributed.process-id; got 'host:1', None and None. Give all three"),
        (("", 2, 0), "got '', 2 and 0"),
        (("host", 2, 0), "must be HOST:PORT, as in '10.0.0.1:1234'; got 'host'"),
        (("host:70000", 2, 0), "got 'host:70000'"),
        (("host:1", 2, 2), "must count from 0 up to distributed.num-processes - 1; got 2 of 2"),
        (("host:1", 0, 0), "got 0 of 0"),
    ],
)
def test_a_meeting_that_cannot_be_is_refused(settings, error):
    with pytest.raises(ValueError) as raised:
        Distributed(*settings)
    assert error in str(raised.value)


TASK = {
    name: "1" for name in ("SLURM_JOB_ID", "SLURM_STEP_NODELIST", "SLURM_PROCID", "SLURM_LOCALID")
}


@pytest.mark.parametrize(
    "environment, cluster",
    [
        ({}, None),
        (TASK | {"SLURM_NTASKS": "1", "SLURM_STEP_NUM_TASKS": "1"}, None),
        (TASK | {"SLURM_NTASKS": "4", "SLURM_STEP_NUM_TASKS": "1"}, None),  # a shell of salloc
        (TASK | {"SLURM_NTASKS": "4"}, None),  # a batch script, without srun
        (TASK | {"SLURM_NTASKS": "4", "SLURM_STEP_NUM_TASKS": "4"}, "slurm"),
        ({"TPU_WORKER_HOSTNAMES": "a,b", "MEGASCALE_NUM_SLICES": "1"}, "gketpu"),
        ({"TPU_WORKER_HOSTNAMES": "a", "MEGASCALE_NUM_SLICES": "1"}, None),
    ],
)
def test_only_a_cluster_that_started_several_processes_makes_them_meet(
    monkeypatch, environment, cluster
):
    for name in [name for name in os.environ if name.startswith("SLURM_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("TPU_SKIP_MDS_QUERY", "1")
    on_tpu = any(name.startswith("TPU_") for name in environment)
    monkeypatch.setattr("jax._src.clusters.cloud_tpu_cluster.running_in_cloud_tpu_vm", on_tpu)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert _cluster() == cluster


def test_a_number_of_processes_that_is_none_is_an_error_with_its_name(monkeypatch):
    """As Slurm writes SLURM_TASKS_PER_NODE, for example."""
    monkeypatch.setenv("SLURM_STEP_NUM_TASKS", "2(x3)")
    with pytest.raises(ValueError, match=r"^SLURM_STEP_NUM_TASKS must be .*; got '2\(x3\)'. Start"):
        _cluster()


def test_a_process_alone_talks_to_nobody():
    def poll():
        return True

    with main_process_first("anything"), main_process_first("anything"):
        assert gather("anything", {"a": 1}) == gather("anything", {"a": 1}) == [{"a": 1}]
    assert any_process(poll) is poll
