"""Checkpoints are restored bit for bit, or not at all."""

import errno
import json
import logging
import os
import random
import re
import shutil
import sys

import flax
import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest

from flaxformer_min.storage import checkpoint
from flaxformer_min.storage import restore as restoring
from flaxformer_min.storage.checkpoint import Checkpoints
from flaxformer_min.storage.metadata import Metric
from flaxformer_min.storage.restore import average_checkpoints, restore_params

# Orbax leaves coroutines behind where reading fails; they end with this file.
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")


META = {"batches": {"epoch": 1, "batch": 7}, "progress": {"window": {"loss": 0.1 + 0.2}}}


def a_state(step):
    rng = np.random.default_rng(step)
    # Large enough to be a file of its own, which Orbax does not check.
    params = {"layer": {"kernel": jnp.array(rng.normal(size=(61, 37)), jnp.float32)}}
    return {"step": jnp.int32(step), "params": params, "key": jax.random.key(step)}


def save(folder, *steps, keep=5, losses=()):
    checkpoints = Checkpoints(folder, keep)
    for step, loss in zip(steps, [*losses, *[None] * len(steps)], strict=False):
        metric = None if loss is None else Metric("validation_loss", loss)
        checkpoints.save(step, a_state(step), META, metric)
    checkpoints.close()


def save_tree(folder, tree):
    """Save a tree that is not a whole state, as step 1."""
    checkpoints = Checkpoints(folder, 5)
    checkpoints.save(1, tree, META)
    checkpoints.close()


def failing(error):
    """A function that raises the error, whatever it is called with."""

    def fail(*_, **__):
        raise error

    return fail


@pytest.fixture
def warnings(caplog):
    """A function that returns the package's warnings since its last call; Orbax logs, too."""

    def read():
        found = [each for each in caplog.records if each.name == "flaxformer_min"]
        caplog.clear()
        assert all(each.levelno == logging.WARNING for each in found)
        return [each.getMessage() for each in found]

    return read


def restore(folder):
    checkpoints = Checkpoints(folder, 5)
    try:
        return checkpoints.restore(a_state(0))
    finally:
        checkpoints.close()


def test_a_description_is_saved_as_it_was_given_though_its_owner_keeps_counting(
    tmp_path, monkeypatch
):
    """Orbax writes it later, in a thread of its own."""
    checkpoints = Checkpoints(tmp_path, 5)
    given, meta = [], {"progress": {"window": {"loss": 1.0}}}
    monkeypatch.setattr(checkpoints._manager, "save", lambda step, args, force: given.append(args))
    checkpoints.save(1, a_state(1), meta)
    meta["progress"]["window"]["loss"] += 1
    checkpoints.close()
    assert given[0].meta.item["progress"] == {"window": {"loss": 1.0}}


def assert_equal(state, step):
    expected = a_state(step)
    assert (
        jax.random.key_data(state["key"]).tolist() == jax.random.key_data(expected["key"]).tolist()
    )
    assert int(state["step"]) == step
    assert_kernel(state["params"], step)


def assert_kernel(params, step):
    expected = a_state(step)["params"]["layer"]["kernel"]
    np.testing.assert_array_equal(params["layer"]["kernel"], expected)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    folder = tmp_path_factory.mktemp("run") / "checkpoints"
    save(folder, 10, 20, losses=(3.0, 2.0))
    return folder


@pytest.fixture
def copy(saved, tmp_path):
    shutil.copytree(saved, tmp_path / "run" / "checkpoints")
    return tmp_path / "run" / "checkpoints"


def test_the_newest_checkpoint_is_restored_bit_for_bit(saved, warnings):
    step, state, meta = restore(saved)
    assert (step, warnings()) == (20, [])
    assert_equal(state, 20)
    assert {name: meta[name] for name in META} == META
    assert (meta["step"], meta["metric"]) == (20, ["validation_loss", 2.0])


def test_parameters_are_restored_without_opening_other_arrays(
    saved, warnings, opens_no_other_arrays
):
    step, params = restore_params(saved)
    assert (step, warnings()) == (20, [])
    assert_kernel(params, 20)
    assert restore_params(saved, 10)[0] == 10


@pytest.mark.parametrize(
    "of_kernel",
    [
        lambda kernel: {"layer": {"kernel": kernel.astype(jnp.bfloat16)}},
        lambda kernel: flax.core.freeze({"layer": {"kernel": kernel}}),
        lambda kernel: {"layers": [kernel, 2 * kernel]},
    ],
    ids=["of a type that Python has no buffer for", "in frozen dictionaries", "in lists"],
)
def test_parameters_are_restored_in_their_type_and_order(tmp_path, of_kernel):
    params = of_kernel(a_state(1)["params"]["layer"]["kernel"])
    save_tree(tmp_path, {"params": params})
    for found in (restore_params(tmp_path)[1], average_checkpoints(tmp_path, 1)[1]):
        for leaf, expected in zip(jax.tree.leaves(found), jax.tree.leaves(params), strict=True):
            assert leaf.dtype == expected.dtype
            np.testing.assert_array_equal(leaf, expected)


@pytest.fixture
def opens_no_other_arrays(monkeypatch):
    opened = failing(AssertionError("all arrays are opened"))
    monkeypatch.setattr(ocp.CheckpointManager, "item_metadata", opened)


def test_a_moving_average_is_restored_alone_in_its_own_type(tmp_path, opens_no_other_arrays):
    state = a_state(1)
    average = jax.tree.map(lambda leaf: (2 * leaf).astype(jnp.float16), state["params"])
    save_tree(tmp_path, {**state, "average": average})
    _, params = restore_params(tmp_path)
    assert params["layer"]["kernel"].dtype == jnp.float16
    np.testing.assert_array_equal(params["layer"]["kernel"], average["layer"]["kernel"])


def test_a_checkpoint_that_cannot_be_written_leaves_nothing_open(tmp_path, monkeypatch):
    checkpoints, closed = Checkpoints(tmp_path, 5), []
    full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    monkeypatch.setattr(checkpoints._manager, "wait_until_finished", failing(full))
    monkeypatch.setattr(checkpoints._manager, "close", lambda: closed.append(True))
    with pytest.raises(OSError, match="No space left on device"):
        checkpoints.close()
    assert closed == [True]
    monkeypatch.undo()
    checkpoints.close()


@pytest.mark.parametrize(
    "raised, expected, message",
    [
        (
            ValueError("Error writing: /a/b: No space left on device [os_error_code='28']"),
            OSError,
            r"/.*: No space left on device[.] Earlier ones are intact",
        ),
        (
            ValueError("No space left on device [tensorstore_spec='{}'] [source locations='a']"),
            OSError,
            r"/.*: No space left on device[.] Earlier ones are intact",
        ),
        (MemoryError("too little"), MemoryError, "too little"),
        (RuntimeError("RESOURCE_EXHAUSTED: too little"), RuntimeError, "too little"),
    ],
)
def test_of_a_failed_write_the_reason_is_told_without_tensorstores_details(
    tmp_path, monkeypatch, raised, expected, message
):
    """Which are a page long; and too little memory is no full disk."""
    checkpoints = Checkpoints(tmp_path, 5)
    monkeypatch.setattr(checkpoints._manager, "wait_until_finished", failing(raised))
    with pytest.raises(expected, match=message):
        checkpoints.wait()
    monkeypatch.undo()
    checkpoints.close()


def of_future(error):
    """As asyncio logs an error that nobody asked for; of several arrays Orbax raises only one."""
    text = "Future exception was never retrieved"
    told = (type(error), error, None)
    return logging.LogRecord("asyncio", logging.ERROR, "base_events.py", 1, text, (), told)


def of_absl(file):
    """The words of Orbax about an option that is set on purpose."""
    text = "the database is read only"
    return logging.LogRecord("absl", logging.WARNING, f"/lib/{file}", 1, text, (), None)


@pytest.mark.parametrize(
    ("record", "is_told"),
    [
        (of_future(OSError(errno.ENOSPC, "full")), False),
        (of_future(ValueError("Failed writing: full [os_error_code='28']")), False),
        (of_future(ConnectionResetError(errno.ECONNRESET, "gone")), True),
        (of_absl("orbax/manager.py"), False),
        (of_absl("own/db.py"), True),
    ],
)
def test_of_what_others_log_only_the_noise_of_orbax_is_not_told(record, is_told):
    assert bool(logging.getLogger(record.name).filter(record)) == is_told


def test_a_step_that_is_not_there_is_an_error_that_lists_those_that_are(saved, tmp_path):
    with pytest.raises(ValueError, match="no checkpoint of step 15; it has 20, 10"):
        restore_params(saved, 15)
    with pytest.raises(ValueError, match="holds no checkpoint yet"):
        restore_params(tmp_path / "checkpoints")
    assert restore(tmp_path / "checkpoints") is None  # training begins with its first step


def test_the_newest_and_the_best_are_kept(tmp_path):
    """The loss of 1 at step 2 is the best, however many newer ones come."""
    save(tmp_path, 1, 2, 3, 4, 5, keep=2, losses=(3.0, 1.0, 2.0, 4.0, 5.0))
    assert sorted(int(path.name) for path in tmp_path.iterdir()) == [2, 4, 5]
    assert restore_params(tmp_path)[0] == 2


def data_files(step_folder):
    """Every file that carries something: what Orbax and OCDBT write, metadata included."""
    return sorted(path for path in step_folder.rglob("*") if path.is_file())


def test_any_file_of_the_newest_that_is_lost_falls_back_to_the_one_before(copy, tmp_path, warnings):
    names = [path.relative_to(copy / "20") for path in data_files(copy / "20")]
    assert len(names) > 5
    fell_back = 0
    for number, name in enumerate(names):
        folder = tmp_path / str(number) / "checkpoints"
        shutil.copytree(copy, folder)
        (folder / "20" / name).unlink()
        step, state, _ = restore(folder)
        assert_equal(state, step)
        warned = warnings()
        if step == 20:
            continue  # Orbax keeps some things twice
        fell_back += 1
        assert (step, len(warned)) == (10, 1)
        assert "checkpoint 20" in warned[0] and "is damaged" in warned[0]
        assert (folder.parent / "damaged" / "20").is_dir()
        assert not (folder / "20").exists()
    assert fell_back >= 3, names


def corrupt(path, kind, rng):
    """Damage one file as disks and people do."""
    content = path.read_bytes()
    index = rng.randrange(len(content) + 1)
    match kind:
        case "truncate":
            path.write_bytes(content[:index])
        case "flip" if content:
            flipped = bytearray(content)
            flipped[index - 1] ^= 1 << rng.randrange(8)
            path.write_bytes(flipped)
        case "delete":
            path.unlink()
        case "garbage":
            path.write_bytes(rng.randbytes(len(content)))
        case "zeros":
            path.write_bytes(content[:index] + bytes(len(content) - index))
        case _:
            path.write_bytes(b"")


def check_restored(folder, warnings):
    """Return the step that training continues from, None for an error.

    What is restored is bit for bit what was saved: of the newest, where the damage did not matter
    (Orbax keeps some things twice); or of the one before it, and then the newest was named.
    """
    try:
        step, params = restore_params(folder)
        assert_kernel(params, step)
    except ValueError as error:
        assert re.search("no checkpoint in .* is intact", str(error))
        step = None
    of_params = warnings()
    try:
        trained, state, meta = restore(folder)
        assert_equal(state, trained)
        assert {name: meta[name] for name in META} == META
    except ValueError as error:
        assert re.search("no checkpoint in .* is intact; tried 20, 10", str(error))
        trained = None
    for found, warned in ((step, of_params), (trained, warnings())):
        names = {text.split()[1] for text in warned}
        assert ("20" in names) == (found != 20) and ("10" in names or found is not None)
    return trained


KINDS = ["truncate", "flip", "delete", "empty", "garbage", "zeros"]


@pytest.mark.parametrize("kind", KINDS)
def test_a_corrupted_array_never_becomes_parameters(copy, kind, warnings):
    largest = max(data_files(copy / "20"), key=lambda path: path.stat().st_size)
    corrupt(largest, kind, random.Random(0))
    assert check_restored(copy, warnings) == 10


def test_lost_files_are_one_warning_and_nothing_on_stderr(tmp_path, warnings, capfd, monkeypatch):
    """TensorStore prints a traceback of each array that it still reads when Orbax has given up."""
    folder, state = tmp_path / "checkpoints", {"params": {f"{n}": jnp.ones(9) for n in range(90)}}
    checkpoints = Checkpoints(folder, 5)
    for step in (10, 20):
        checkpoints.save(step, state, META)
    checkpoints.close()
    shutil.rmtree(folder / "20" / "state" / "d")
    printed = []
    monkeypatch.setattr(sys, "unraisablehook", printed.append)
    for _ in range(5):  # it is a race
        assert restore_params(folder)[0] == 10
        assert len(warnings()) == 1
    assert [str(each.exc_value) for each in printed] == []
    assert capfd.readouterr().err == ""


@pytest.mark.slow
def test_two_hundred_corruptions_never_become_parameters(saved, tmp_path, warnings):
    """Of any file of the newest checkpoint, Orbax's metadata and ours; every fifth time of both."""
    rng, fell_back, lost = random.Random(0), 0, 0
    for number in range(200):
        folder = tmp_path / str(number) / "checkpoints"
        shutil.copytree(saved, folder)
        corrupt(rng.choice(data_files(folder / "20")), rng.choice(["flip", *KINDS]), rng)
        if number % 5 == 0:
            corrupt(rng.choice(data_files(folder / "10")), rng.choice(["flip", *KINDS]), rng)
        trained = check_restored(folder, warnings)
        fell_back += trained == 10
        lost += trained is None
        shutil.rmtree(folder.parent)
    assert fell_back > 20 and lost > 0


def test_a_changed_description_is_detected(copy, warnings):
    meta = next((copy / "20" / "meta").glob("*"))
    content = json.loads(meta.read_text())
    content["batches"]["batch"] += 1
    meta.write_text(json.dumps(content))
    step, _, _ = restore(copy)
    assert step == 10
    assert "checksum of its description" in warnings()[0]


def test_nothing_intact_is_an_error_and_never_a_fresh_start(copy):
    for step in ("10", "20"):
        for path in data_files(copy / step):
            path.write_bytes(b"")
    with pytest.raises(ValueError, match="no checkpoint in .* is intact; tried 20, 10"):
        restore(copy)
    with pytest.raises(ValueError, match="no checkpoint in .* is intact"):
        restore_params(copy)


def raise_in_place_of_reading(monkeypatch, error):
    for module in (checkpoint, restoring):
        monkeypatch.setattr(module, "restore_verified", failing(error))


def test_too_little_memory_of_a_device_is_no_damage_but_of_python_it_is(
    copy, monkeypatch, warnings
):
    """A checkpoint that may be intact would be moved away, and its steps taken again.

    A damaged file, however, may ask for more memory than there is.
    """
    raise_in_place_of_reading(monkeypatch, RuntimeError("RESOURCE_EXHAUSTED: Out of memory"))
    for read in (restore, restore_params):
        with pytest.raises(RuntimeError, match="RESOURCE_EXHAUSTED"):
            read(copy)
    assert not warnings() and (copy / "20").exists()
    raise_in_place_of_reading(monkeypatch, MemoryError())
    for read in (restore, restore_params):
        with pytest.raises(ValueError, match="no checkpoint in .* is intact"):
            read(copy)


@pytest.mark.parametrize(
    "error",
    [
        PermissionError(errno.EACCES, "Permission denied"),
        ValueError(
            'RESOURCE_EXHAUSTED: Error opening "zarr" driver: Failed to open: "/a/.zarray": '
            "Too many open files [os_error_code='24'] [tensorstore_spec='{}']"
        ),
    ],
)
def test_what_this_process_may_not_read_is_no_damage(copy, monkeypatch, warnings, error):
    raise_in_place_of_reading(monkeypatch, error)
    reason = "Too many open files|Permission denied"
    for read in (restore, restore_params):
        with pytest.raises(OSError, match=f"checkpoint 20 .* cannot be read: ({reason})[.] It may"):
            read(copy)
    assert not warnings() and not (copy.parent / "damaged").exists()
    monkeypatch.undo()
    assert restore(copy)[0] == 20


def test_a_checkpoint_of_other_parameters_is_no_damage(copy, warnings):
    like = a_state(0)
    like["params"]["layer"]["bias"] = jnp.zeros(37)
    checkpoints = Checkpoints(copy, 5)
    with pytest.raises(ValueError, match="layer/bias is missing in .*, float32.37. in the model"):
        checkpoints.restore(like)
    checkpoints.close()
    assert not warnings() and not (copy.parent / "damaged").exists()
    assert restore(copy)[0] == 20


def test_a_damaged_checkpoint_that_was_requested_is_an_error_that_lists_the_others(copy):
    for path in data_files(copy / "20"):
        path.write_bytes(b"")
    with pytest.raises(ValueError, match=r"of step 20 in .* is damaged. There are others of st"):
        restore_params(copy, 20)


def test_training_saves_again_after_a_damaged_checkpoint(copy, warnings):
    next((copy / "20" / "meta").glob("*")).write_text("{}")
    checkpoints = Checkpoints(copy, 5)
    assert checkpoints.restore(a_state(0))[0] == 10
    checkpoints.save(20, a_state(20), META)
    checkpoints.close()
    assert "checkpoint 20" in warnings()[0]
    step, state, _ = restore(copy)
    assert (step, warnings()) == (20, [])
    assert_equal(state, 20)
