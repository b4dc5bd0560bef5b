"""Checkpoints: what was saved comes back bit for bit, or not at all."""

import json
import random
import re
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from flaxformer_min.runs.checkpoint import Checkpoints, restore_params

pytestmark = [
    pytest.mark.usefixtures("failed_transfers"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]


META = {"rows": {"epoch": 1, "batch": 7}, "window": {"loss": 0.1 + 0.2}}


def a_state(step):
    rng = np.random.default_rng(step)
    # Large enough to be a file of its own, which Orbax does not check.
    params = {"layer": {"kernel": jnp.array(rng.normal(size=(61, 37)), jnp.float32)}}
    return {"step": jnp.int32(step), "params": params, "key": jax.random.key(step)}


def save(folder, *steps, keep=5, ranks=()):
    checkpoints = Checkpoints(folder, keep)
    for step, rank in zip(steps, [*ranks, *[None] * len(steps)], strict=False):
        checkpoints.save(step, a_state(step), META, rank)
    checkpoints.close()


def restore(folder):
    warnings = []
    checkpoints = Checkpoints(folder, 5)
    try:
        return checkpoints.restore(a_state(0), warnings.append), warnings
    finally:
        checkpoints.close()


def test_what_is_saved_is_what_was_given_though_its_owner_goes_on_counting(tmp_path, monkeypatch):
    """Orbax writes the description later, in a thread of its own."""
    checkpoints = Checkpoints(tmp_path, 5)
    given, meta = [], {"window": {"loss": 1.0}}
    monkeypatch.setattr(checkpoints._manager, "save", lambda step, args, force: given.append(args))
    checkpoints.save(1, a_state(1), meta)
    meta["window"]["loss"] += 1
    checkpoints.close()
    assert given[0].meta.item["window"] == {"loss": 1.0}


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
    save(folder, 10, 20, ranks=(3.0, 2.0))
    return folder


@pytest.fixture
def copy(saved, tmp_path):
    shutil.copytree(saved, tmp_path / "run" / "checkpoints")
    return tmp_path / "run" / "checkpoints"


def test_the_newest_checkpoint_comes_back_bit_for_bit(saved):
    (step, state, meta), warnings = restore(saved)
    assert (step, warnings) == (20, [])
    assert_equal(state, 20)
    assert (meta["rows"], meta["window"]) == (META["rows"], META["window"])


def test_a_run_without_checkpoints_begins_anew(tmp_path):
    assert restore(tmp_path / "checkpoints") == (None, [])


def test_parameters_come_back_alone(saved):
    step, params = restore_params(saved, None, pytest.fail)
    assert step == 20
    assert_kernel(params, 20)
    assert restore_params(saved, 10, pytest.fail)[0] == 10


def test_a_step_that_is_not_there_is_an_error_that_lists_those_that_are(saved):
    with pytest.raises(ValueError, match="no checkpoint of step 15; it has 20, 10"):
        restore_params(saved, 15, pytest.fail)


def test_no_checkpoint_at_all_is_an_error(tmp_path):
    with pytest.raises(ValueError, match="holds no checkpoint yet"):
        restore_params(tmp_path / "checkpoints", None, pytest.fail)


def test_the_newest_and_the_best_are_kept(tmp_path):
    """Rank 1 at step 2 is the best, however many newer ones come."""
    save(tmp_path, 1, 2, 3, 4, 5, keep=2, ranks=(3.0, 1.0, 2.0, 4.0, 5.0))
    assert sorted(int(path.name) for path in tmp_path.iterdir()) == [2, 4, 5]
    assert restore_params(tmp_path, None, pytest.fail)[0] == 2


def data_files(step_folder):
    """Every file that carries something: what Orbax and OCDBT write, metadata included."""
    return sorted(path for path in step_folder.rglob("*") if path.is_file())


def test_any_file_of_the_newest_that_is_lost_falls_back_to_the_one_before(copy, tmp_path):
    names = [path.relative_to(copy / "20") for path in data_files(copy / "20")]
    assert len(names) > 5
    fell_back = 0
    for number, name in enumerate(names):
        folder = tmp_path / str(number) / "checkpoints"
        shutil.copytree(copy, folder)
        (folder / "20" / name).unlink()
        (step, state, _), warnings = restore(folder)
        assert_equal(state, step)
        if step == 20:
            continue  # Orbax keeps some things twice
        fell_back += 1
        assert (step, len(warnings)) == (10, 1)
        assert "checkpoint 20" in warnings[0] and "is damaged" in warnings[0]
        assert (folder.parent / "damaged" / "20").is_dir()
        assert not (folder / "20").exists()
    assert fell_back >= 3, names


def corrupt(path, rng):
    """Damage one file, in one of the ways disks and people do."""
    content = path.read_bytes()
    place = rng.randrange(len(content) + 1)
    match rng.choice(["truncate", "flip", "flip", "delete", "empty", "garbage", "zeros"]):
        case "truncate":
            path.write_bytes(content[:place])
        case "flip" if content:
            flipped = bytearray(content)
            flipped[place - 1] ^= 1 << rng.randrange(8)
            path.write_bytes(flipped)
        case "delete":
            path.unlink()
        case "garbage":
            path.write_bytes(rng.randbytes(len(content)))
        case "zeros":
            path.write_bytes(content[:place] + bytes(len(content) - place))
        case _:
            path.write_bytes(b"")


def test_two_hundred_corruptions_never_become_parameters(saved, tmp_path):
    """Any file of the newest checkpoint, Orbax's metadata and ours; in each fifth case of both.

    What is restored is bit for bit what was saved: of the newest, where the damage did not matter
    (Orbax keeps some things twice); or of the one before it, and then the newest was named.
    """
    rng, fell_back, lost = random.Random(0), 0, 0
    for number in range(200):
        folder = tmp_path / str(number) / "checkpoints"
        shutil.copytree(saved, folder)
        corrupt(rng.choice(data_files(folder / "20")), rng)
        if number % 5 == 0:
            corrupt(rng.choice(data_files(folder / "10")), rng)
        named = []
        try:
            step, params = restore_params(folder, None, named.append)
            assert_kernel(params, step)
        except ValueError as error:
            assert re.search("no checkpoint in .* is whole", str(error))
            step = None
        try:
            (trained, state, meta), warnings = restore(folder)
            assert_equal(state, trained)
            assert meta["rows"] == META["rows"]
        except ValueError as error:
            assert re.search("no checkpoint in .* is whole; tried 20, 10", str(error))
            trained, warnings = None, ["checkpoint 20", "checkpoint 10"]
        for found, told in ((step, named), (trained, warnings)):
            names = {text.split()[1] for text in told}
            assert ("20" in names) == (found != 20) and ("10" in names or found is not None)
        fell_back += trained == 10
        lost += trained is None
        shutil.rmtree(folder.parent)
    assert fell_back > 20 and lost > 0


def test_a_description_that_was_changed_is_noticed(copy):
    meta = next((copy / "20" / "meta").glob("*"))
    content = json.loads(meta.read_text())
    content["rows"]["batch"] += 1
    meta.write_text(json.dumps(content))
    (step, _, _), warnings = restore(copy)
    assert step == 10
    assert "checksum of its description" in warnings[0]


def test_nothing_whole_is_an_error_and_never_a_fresh_start(copy):
    for step in ("10", "20"):
        for path in data_files(copy / step):
            path.write_bytes(b"")
    with pytest.raises(ValueError, match="no checkpoint in .* is whole; tried 20, 10"):
        restore(copy)
    with pytest.raises(ValueError, match="no checkpoint in .* is whole"):
        restore_params(copy, None, lambda text: None)


def test_a_damaged_checkpoint_that_was_asked_for_is_named_with_the_others(copy):
    for path in data_files(copy / "20"):
        path.write_bytes(b"")
    with pytest.raises(ValueError, match=r"of step 20 in .* is damaged. Those of steps 10 are the"):
        restore_params(copy, 20, lambda text: None)


def test_an_empty_folder_named_like_a_step_is_not_taken_for_one(copy):
    (copy / "30").mkdir()
    (step, state, _), warnings = restore(copy)
    assert step == 20
    assert len(warnings) == 1


def test_training_goes_on_saving_after_a_damaged_checkpoint(copy):
    """The damaged step is saved again, and is then the newest."""
    next((copy / "20" / "meta").glob("*")).write_text("{}")
    checkpoints = Checkpoints(copy, 5)
    assert checkpoints.restore(a_state(0), lambda text: None)[0] == 10
    checkpoints.save(20, a_state(20), META)
    checkpoints.close()
    (step, state, _), warnings = restore(copy)
    assert (step, warnings) == (20, [])
    assert_equal(state, 20)
