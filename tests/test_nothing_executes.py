"""A run folder of any origin can be opened: nothing in it is executed or unpickled."""

import functools
import os
import pickle
import shutil

import jax
import numpy as np
import pytest
from make_golden_run import GOLDEN

from flaxformer_min.decoding.translator import Translator
from flaxformer_min.model.transformer import Transformer
from flaxformer_min.storage.run_folder import RunFolder
from flaxformer_min.training.metrics import MetricsLog
from flaxformer_min.training.step import init_state

# Orbax leaves coroutines behind where reading fails; they end with this file.
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")


FILES = [str(path.relative_to(GOLDEN)) for path in sorted(GOLDEN.rglob("*")) if path.is_file()]
FILES += ["lock", "tensorboard/events.out.tfevents.1.host", "__init__.py", "sitecustomize.py"]


class Planted:
    """Unpickling this makes a folder."""

    def __init__(self, marker):
        self.marker = marker

    def __reduce__(self):
        return os.mkdir, (str(self.marker),)


@pytest.fixture(scope="module")
def marker(tmp_path_factory):
    return tmp_path_factory.mktemp("marker") / "executed"


@pytest.fixture(scope="module")
def planted(marker, tmp_path_factory):
    """Contents that make `marker` when they are unpickled, loaded by numpy, or run by Python."""
    array = tmp_path_factory.mktemp("array") / "planted.npy"
    np.save(array, np.array([Planted(marker)], object), allow_pickle=True)
    contents = {
        "pickle": pickle.dumps(Planted(marker)),
        "old pickle": pickle.dumps(Planted(marker), protocol=0),
        "numpy": array.read_bytes(),
        "Python": f"import os\nos.mkdir({str(marker)!r})\n".encode(),
    }
    executors = [pickle.loads, pickle.loads, lambda _: np.load(array, allow_pickle=True), exec]
    for content, execute in zip(contents.values(), executors, strict=True):
        execute(content)
        marker.rmdir()  # fails unless the content was executed
    return contents


@pytest.fixture(scope="module")
def intact():
    """The parameters of the original folder, and the state that training restores."""
    run = RunFolder(GOLDEN)
    model = Transformer(run.model_config())
    return run.params().params, init_state(model, run.config()).to_dict()


def open_to_translate(folder):
    return Translator.load(folder).restored[0].params


def open_to_train(like, folder):
    """Open a folder as train.py does before its first step."""
    with RunFolder(folder).locked() as run:
        run.begin(run.config(), lambda paths: pytest.fail("the run has its tokenizer"))
        checkpoints = run.open_checkpoints(run.config())
        try:
            step, state, _ = checkpoints.restore(like)
        finally:
            checkpoints.close()
        MetricsLog(run.metrics, run.tensorboard, step).close()
    return state["params"]


def assert_unharmed(folder, params, marker, opened):
    """Opening is an error of ours, or gives the parameters of the original folder."""
    try:
        found = opened()
    except ValueError as error:
        assert str(folder) in str(error)
    else:
        jax.tree.map(np.testing.assert_array_equal, found, params)
    assert not marker.exists()


def plant(content, names, folder):
    shutil.copytree(GOLDEN, folder)
    for name in names:
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(content)
    return folder


slow = pytest.mark.slow


@slow
@pytest.mark.parametrize(
    "kind, opened", [("pickle", "to translate"), ("pickle", "to train"), ("Python", "to translate")]
)
def test_nothing_planted_in_any_file_executes(tmp_path, planted, intact, marker, kind, opened):
    params, like = intact
    open_ = {"to translate": open_to_translate, "to train": functools.partial(open_to_train, like)}
    for number, name in enumerate(FILES):
        folder = plant(planted[kind], [name], tmp_path / str(number))
        assert_unharmed(folder, params, marker, functools.partial(open_[opened], folder))


@pytest.mark.parametrize("kept", [(), ("config.json", "tokenizer.model")])
def test_nothing_planted_in_all_files_executes(tmp_path, planted, intact, marker, kept):
    """Also with settings and vocabulary as they were, so that the checkpoint is read at all."""
    params, like = intact
    for kind, content in planted.items():
        folder = plant(content, set(FILES) - set(kept), tmp_path / kind)
        for opened in (open_to_translate, functools.partial(open_to_train, like)):
            assert_unharmed(folder, params, marker, functools.partial(opened, folder))
