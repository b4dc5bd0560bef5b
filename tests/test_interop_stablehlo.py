"""The exported search runs with jax alone, and finds the translations of the run."""

import json
import subprocess
import sys
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import pytest
from flax import traverse_util
from tiny_run import LINES, TAGGED, make_imported_run, make_tiny_run

from flaxformer_min.config import SearchConfig
from flaxformer_min.decoding.translator import Translator
from flaxformer_min.interop.run_model import read_run
from flaxformer_min.interop.stablehlo import make_program
from flaxformer_min.kernels.backend import compiling_for

pytest.importorskip("flatbuffers")

ALONE = """
import importlib.abc, json, re, sys

class Barred(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("flaxformer_min", "flax", "orbax", "optax"):
            raise ImportError(f"{name} is barred")

sys.meta_path.insert(0, Barred())
FOLDER, calls = sys.argv[1], json.load(sys.stdin)
readme = open(f"{FOLDER}/README.md").read()
(code,) = re.findall("```python\\n(.*?)```", readme, re.DOTALL)
for lines in calls:
    exec(code)
    print(json.dumps([[i for i in ids if i] for ids in found.tolist()]))
"""
"""Runs the README's code for each list of texts; prints texts, and ids without padding."""


def alone(folder, *calls):
    """What a process prints in which neither this package nor flax can be imported."""
    command = [sys.executable, "-c", ALONE, str(folder)]
    done = subprocess.run(command, input=json.dumps(calls), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def ids_alone(folder, *calls):
    """The ids that such a process finds."""
    return [json.loads(line) for line in alone(folder, *calls) if line.startswith("[[")]


def export_alone(run, out, *options):
    """In a process of its own, for the shape checks of the tests do not know symbolic sizes."""
    command = [sys.executable, "-m", "flaxformer_min", "export", str(run), str(out)]
    done = subprocess.run(
        [*command, "--format", "stablehlo", *options], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr


def ids_of(translator, lines):
    """Our ids of the best translations."""
    sources = dict(enumerate(translator.source_tokenizer.encode_batch(lines)))
    found = {}
    searched = translator.runner.search(sources, dict.fromkeys(sources, []), translator.decoding)
    for batch, hypotheses in searched:
        for row, number in enumerate(batch):
            found[number] = [i for i in hypotheses.ids[row, 0].tolist() if i]
    return [found[number] for number in range(len(lines))]


@pytest.mark.slow
@pytest.mark.parametrize(
    "beam_size, weights, settings",
    [
        (1, "beside", {}),
        (3, "inside", {"norm": "pre", "embeddings": "separate"}),
        (2, "beside", {"positional_encoding": "learned", "max_positions": 64, "output_bias": True}),
    ],
)
def test_the_same_program_runs_alone_for_every_shape(tmp_path, beam_size, weights, settings):
    """Two calls with other numbers of texts and other lengths, on one artifact."""
    decoding = SearchConfig(beam_size=beam_size, max_extra_tokens=6, batch_size=8)
    run = make_tiny_run(tmp_path / "run", decoding=decoding, **settings)
    export_alone(run, tmp_path / "out", "--weights", weights)
    assert (tmp_path / "out" / "weights.npz").exists() == (weights == "beside")
    translator = Translator.load(run)
    calls = [LINES[:3], ["a longer line than these, with other words", *LINES[3:9]]]
    assert ids_alone(tmp_path / "out", *calls) == [ids_of(translator, lines) for lines in calls]
    texts, _ = alone(tmp_path / "out", ["", LINES[0]])
    assert [bool(text) for text in eval(texts)] == [False, True]


@pytest.mark.slow
def test_the_program_of_an_imported_model_reads_texts_as_its_run_does(tmp_path):
    """A language tag as one piece, and what the vocabulary lacks as unknown."""
    run = make_imported_run(tmp_path)
    export_alone(run, tmp_path / "out")
    assert ids_alone(tmp_path / "out", TAGGED) == [ids_of(Translator.load(run), TAGGED)]


def test_one_artifact_serves_every_platform(tmp_path):
    """It names the platforms and the number of texts; its README names the version of jax."""
    from jax import export

    export_alone(make_tiny_run(tmp_path / "run"), tmp_path / "out")
    readme = (tmp_path / "out" / "README.md").read_text()
    assert f"up to six months newer than {jax.__version__}" in readme
    program = export.deserialize(bytearray((tmp_path / "out" / "translate.stablehlo").read_bytes()))
    assert program.platforms == ("cpu", "cuda", "tpu")
    assert str(program.in_avals[-1].shape) == "(sentences, length)"


def test_a_model_of_fused_attention_is_exported_with_that_of_all_platforms(tmp_path, monkeypatch):
    run = make_tiny_run(tmp_path / "run", attention="fused", dtype="bfloat16")
    monkeypatch.setattr(jax.nn, "dot_product_attention", None)
    model = read_run(run)
    flat = traverse_util.flatten_dict(model.params, sep="/")
    gpu = SimpleNamespace(platform="gpu", compute_capability="9.0")
    with compiling_for([gpu]):
        ids, _ = jax.eval_shape(make_program(model), flat, jnp.ones((2, 8), jnp.int32))
    assert ids.shape[0] == 2
