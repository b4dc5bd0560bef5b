"""Loss, schedule and step: one update, on any number of devices."""

import dataclasses
import inspect
import json
import math
import struct
import subprocess
import sys
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from loss_curve import loss_curve

from flaxformer_min.config import Config, ModelConfig, TrainingConfig
from flaxformer_min.data.batches import shard_batch
from flaxformer_min.kernels.backend import compiling_for
from flaxformer_min.model.transformer import Transformer
from flaxformer_min.system.compilation import CompileClock
from flaxformer_min.tokens import Batch, Tokens, one_sentence_per_row
from flaxformer_min.training.loss import cross_entropy, score_token, sum_over_tokens
from flaxformer_min.training.metrics import MetricsLog, read_metrics
from flaxformer_min.training.optimizer import averaged_params, complete_optimizer, make_optimizer
from flaxformer_min.training.schedule import learning_rate
from flaxformer_min.training.step import (
    TrainState,
    init_state,
    initial_state,
    make_eval_step,
    make_train_step,
    randomness,
)

ROOT = Path(__file__).parents[1]


@cache
def curve(devices, accumulation=1, steps=50):
    """The losses of `devices`: of this process if it has as many, else of one of its own."""
    if devices <= jax.device_count():
        return loss_curve(devices, accumulation, steps)
    script = [sys.executable, "tests/loss_curve.py", *map(str, (devices, accumulation, steps))]
    done = subprocess.run(script, cwd=ROOT, capture_output=True, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


slow = pytest.mark.slow


@slow
@pytest.mark.parametrize("devices", [2, 8])
def test_many_devices_learn_what_one_learns(devices):
    """With dropout, and uneven token counts: sums are divided once, by the global number of tokens.

    The masks of a row depend on its place in the whole batch, not on the device that holds it.
    """
    one, many = curve(1), curve(devices)
    assert (one["devices"], many["devices"]) == (1, devices)
    np.testing.assert_allclose(many["loss"], one["loss"], rtol=1e-5)
    assert one["loss"][-1] < one["loss"][0] - 0.5


@slow
@pytest.mark.parametrize("devices, accumulation", [(1, 4), (2, 2)])
def test_accumulated_batches_make_the_step_of_one_large_batch(devices, accumulation):
    one, accumulated = curve(1), curve(devices, accumulation)
    np.testing.assert_allclose(accumulated["loss"], one["loss"], rtol=1e-5)
    np.testing.assert_allclose(accumulated["params"], one["params"], rtol=1e-4)


def test_smoothed_cross_entropy_is_the_mean_over_the_smoothed_truth():
    """Section 5.4, from its definition: -Σ q log p with q = (1 - ε) one-hot + ε / vocab."""
    logits, label, smoothing = [0.3, -1.0, 2.0, 0.0], 2, 0.1
    total = sum(math.exp(x) for x in logits)
    expected = 0.0
    for word, x in enumerate(logits):
        q = smoothing / 4 + (1 - smoothing if word == label else 0.0)
        expected -= q * math.log(math.exp(x) / total)
    actual = cross_entropy(jnp.array(logits), jnp.int32(label), smoothing)
    assert float(actual) == pytest.approx(expected, rel=1e-6)


def test_a_logit_of_minus_infinity_has_no_share_in_the_cross_entropy():
    """A model may mask pieces that way: -ln (e² / (e + e²)) of the other two."""
    logits = jnp.array([1.0, -jnp.inf, 2.0])
    expected = math.log(1 + math.exp(-1))
    loss, gradient = jax.value_and_grad(cross_entropy)(logits, jnp.int32(2), 0.0)
    assert float(loss) == pytest.approx(expected, rel=1e-6)
    share = 1 / (1 + math.e)
    np.testing.assert_allclose(gradient, [share, 0, -share], rtol=1e-6)
    sums = score_token(logits[None], jnp.int32(2), 0.0, 0.0, lambda logits, label: -logits[label])
    assert float(sums.negative_log_likelihood) == pytest.approx(expected, rel=1e-6)


H100 = {"platform": "gpu", "compute_capability": "9.0"}


@pytest.mark.parametrize("device", [{"platform": "tpu"}, H100], ids=["tpu", "h100"])
def test_the_loss_of_bfloat16_logits_and_its_gradient_are_those_of_any_device(device):
    rng = np.random.default_rng(0)
    hidden = jnp.asarray(rng.normal(size=(1, 2, 3, 40)), jnp.bfloat16)
    labels, real = jnp.array([[1, 2, 0], [3, 0, 0]]), jnp.array([[1, 1, 0], [2, 0, 0]])

    def loss_of(device):
        def loss(hidden):
            with compiling_for([SimpleNamespace(**device)]):
                sums = sum_over_tokens(lambda x: x * 3.0, hidden, labels, real, 0.1)
            return sums.loss, sums

        return jax.grad(loss, has_aux=True)(hidden)

    (ours, our_sums), (theirs, their_sums) = loss_of(device), loss_of({"platform": "cpu"})
    np.testing.assert_allclose(our_sums, their_sums, atol=3 * 2**-7)
    np.testing.assert_allclose(*(x.astype(jnp.float32) for x in (ours, theirs)), atol=2**-7)


def test_padding_counts_for_nothing_in_the_sums():
    rng = np.random.default_rng(0)
    logits = jnp.array(rng.normal(size=(2, 3, 5)), jnp.float32)
    labels, real = jnp.array([[1, 2, 0], [3, 0, 0]]), jnp.array([[1, 1, 0], [2, 0, 0]])
    sums = sum_over_tokens(lambda logits: logits, logits[None], labels, real)
    by_hand = [
        -float(jax.nn.log_softmax(logits[i, j])[labels[i, j]]) for i, j in ((0, 0), (0, 1), (1, 0))
    ]
    assert float(sums.tokens) == 3
    assert float(sums.negative_log_likelihood) == pytest.approx(sum(by_hand), rel=1e-5)
    broken = logits.at[:, 2].set(jnp.nan)
    assert float(sum_over_tokens(lambda logits: logits, broken[None], labels, real).loss) > 0


def test_the_learning_rate_is_equation_3():
    """Section 5.3, evaluated by hand for d_model 512 and 4,000 steps of warm-up."""
    rate = learning_rate(512, TrainingConfig(warmup_steps=4000, learning_rate_scale=2.0))
    for step in (1, 100, 4000, 4001, 100_000):
        expected = 2 * 512**-0.5 * min(step**-0.5, step * 4000**-1.5)
        assert float(rate(step - 1)) == pytest.approx(expected, rel=1e-5)


def test_the_cooldown_ends_near_zero_and_leaves_the_rest_alone():
    plain = learning_rate(64, TrainingConfig(steps=100, warmup_steps=10))
    cooled = learning_rate(64, TrainingConfig(steps=100, warmup_steps=10, cooldown_steps=20))
    assert float(cooled(79)) == float(plain(79))
    assert float(cooled(89)) == pytest.approx(float(plain(89)) * 11 / 21, rel=1e-5)
    assert 0 < float(cooled(99)) < float(plain(99)) / 15
    longest = TrainingConfig(steps=2**31 - 1, warmup_steps=10, cooldown_steps=1)
    assert float(learning_rate(64, longest)(89)) == float(plain(89))


def test_a_run_shorter_than_its_cooldown_begins_at_the_full_rate():
    whole, longer = (
        TrainingConfig(steps=100, warmup_steps=1, cooldown_steps=steps) for steps in (100, 1_000)
    )
    rates = [[float(learning_rate(64, each)(i)) for i in range(100)] for each in (whole, longer)]
    assert rates[0] == rates[1]
    assert rates[0][0] == pytest.approx(64**-0.5 * 100 / 101)


def test_a_step_keeps_the_types_of_parameters_and_of_all_that_a_checkpoint_has():
    """Those of a model of one's own may be bfloat16, but its gradients and the rate are float32."""

    class Half(Transformer):
        def init(self, *args, **kwargs):
            params = super().init(*args, **kwargs)
            return jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), params)

    model = Half(ModelConfig(30, num_layers=1, d_model=8, d_ff=8, num_heads=2))
    config = Config(model=model.config, training=TrainingConfig(ema_decay=0.9))
    start = partial(initial_state, model, config)
    before = jax.eval_shape(start, jax.ShapeDtypeStruct((), jnp.uint32))
    row = jax.ShapeDtypeStruct((2, 1, 2, 8), jnp.int32)
    batch = Batch(*(Tokens(row, row, row),) * 2)
    after, _ = jax.eval_shape(make_train_step(model, config), before, batch)
    assert jax.tree.map(lambda leaf: leaf.dtype, after) == jax.tree.map(
        lambda leaf: leaf.dtype, before
    )
    assert {leaf.dtype for leaf in jax.tree.leaves(after.params)} == {jnp.dtype(jnp.bfloat16)}


class Learner(NamedTuple):
    """A model with dropout, and what is compiled for it once."""

    model: Transformer
    config: Config
    step: Callable
    first: TrainState

    def state(self):
        """The initial state, to be donated."""
        return jax.tree.map(jnp.copy, self.first)


@pytest.fixture(scope="module")
def learner():
    sizes = ModelConfig(vocab_size=12, num_layers=1, d_model=8, d_ff=8, num_heads=2, dropout=0.4)
    config = Config(model=sizes, training=TrainingConfig(warmup_steps=5))
    model = Transformer(sizes)
    return Learner(model, config, make_train_step(model, config), init_state(model, config))


def two_rows():
    ids = np.array([[5, 6, 3, 0], [7, 8, 9, 3]], np.int32)
    tokens = jax.tree.map(np.asarray, one_sentence_per_row(jnp.array(ids)))
    return shard_batch(Batch(tokens, tokens), 2)


def test_a_step_is_the_same_for_the_same_state_and_differs_by_step(learner):
    losses = []
    for start in (0, 0, 1):
        state = learner.state()._replace(step=jnp.int32(start))
        losses.append(float(learner.step(state, two_rows())[1]["loss"]))
    assert losses[0] == losses[1] != losses[2]


def test_a_step_compiled_while_the_state_is_made_is_not_compiled_again(learner):
    step, batch = make_train_step(learner.model, learner.config), two_rows()
    with CompileClock() as compiled:
        state = init_state(
            learner.model,
            learner.config,
            while_compiling=lambda shapes: step.lower(shapes, batch).compile(),
        )
    assert compiled.programs >= 2
    assert jax.tree.all(jax.tree.map(lambda a, b: bool((a == b).all()), state, learner.first))
    with CompileClock() as compiled:
        step(state, batch)
    assert compiled.programs == 0


def test_a_batch_has_each_row_once_and_other_modules_have_keys_of_their_own():
    """Modules that draw without regard to rows would have one mask on all devices."""
    config = TrainingConfig(gradient_accumulation=2)
    state = TrainState(3, None, None, jax.random.key(0))
    parts = [randomness(state, device, number, 5, config) for device in (0, 1) for number in (0, 1)]
    assert jnp.concatenate([part.rows for part in parts]).tolist() == list(range(20))
    keys = {
        name: {tuple(jax.random.key_data(part.rngs[name]).tolist()) for part in parts}
        for name in ("dropout", "by_device")
    }
    assert [len(different) for different in keys.values()] == [1, 4]


def test_a_step_that_is_not_finite_changes_nothing_but_its_number(learner):
    broken = learner.state()
    table = broken.params["embedding"]["table"].at[5, 0].set(jnp.nan)
    broken = broken._replace(params={**broken.params, "embedding": {"table": table}})
    before = jax.device_get([broken.params, broken.opt_state])
    after, metrics = learner.step(broken, two_rows())
    assert (float(metrics["skipped"]), int(after.step)) == (1, 1)
    now = jax.device_get([after.params, after.opt_state])
    jax.tree.map(np.testing.assert_array_equal, before, now)


def test_the_rate_after_a_skipped_step_is_that_of_the_next_step(learner):
    """As logged, and as applied: Adam's first update changes a parameter by just the rate."""
    state = learner.state()
    whole = jax.device_get(state.params)
    broken = jax.tree.map(lambda value: value * jnp.nan, state.params)
    state, metrics = learner.step(state._replace(params=broken), two_rows())
    assert float(metrics["skipped"]) == 1
    state, metrics = learner.step(state._replace(params=whole), two_rows())
    assert float(metrics["skipped"]) == 0
    changes = jax.tree.map(lambda new, old: np.abs(new - old).max(), state.params, whole)
    rate = float(learning_rate(learner.config.model.d_model, learner.config.training)(1))
    assert float(metrics["learning_rate"]) == pytest.approx(rate)
    assert max(jax.tree.leaves(changes)) == pytest.approx(rate, rel=1e-3)


def test_the_random_generator_of_a_run_is_not_the_choice_of_the_process(learner):
    """Checkpoints hold its key, so a run could not be continued with another."""
    with jax.default_prng_impl("rbg"):
        state = init_state(learner.model, learner.config)
    assert jax.random.key_impl(state.key) == "threefry2x32"
    np.testing.assert_array_equal(
        jax.random.key_data(state.key), jax.random.key_data(learner.state().key)
    )


@slow
def test_jax_names_the_line_behind_the_first_nan_of_a_step(learner):
    """Embeddings of 1e20 are finite; their products in the first attention are not. Padding and
    masks produce none in a step that is finite."""
    with jax.debug_nans(True):
        state, metrics = learner.step(learner.state(), two_rows())
        assert float(metrics["skipped"]) == 0
        table = state.params["embedding"]["table"] * 1e20
        params = {**state.params, "embedding": {"table": table}}
        with pytest.raises(FloatingPointError, match="nan") as raised:
            learner.step(state._replace(params=params), two_rows())
    files = {Path(str(entry.path)).name for entry in raised.traceback}
    assert "encoder.py" in files and "multi_head_attention.py" in files


def test_updates_are_those_of_adam_after_clipping():
    """Kingma and Ba 2015, algorithm 1, at the rate of equation 3: two steps of one parameter by
    hand. A gradient of (3, 4) has norm 5, and so is a fifth of itself where 1 is allowed.
    """
    training = TrainingConfig(
        adam_b1=0.8, adam_b2=0.9, adam_epsilon=1e-2, clip_norm=1.0, warmup_steps=4
    )
    optimizer = complete_optimizer(None, Config(model=ModelConfig(d_model=16), training=training))
    params = {"a": jnp.zeros(2)}
    state = optimizer.init(params)
    m, v = np.zeros(2), np.zeros(2)
    for step, gradient in enumerate(([3.0, 4.0], [0.3, -0.4]), 1):
        updates, state = optimizer.update({"a": jnp.array(gradient)}, state, params, step=step - 1)
        clipped = np.array(gradient) / (5 if step == 1 else 1)
        m, v = 0.8 * m + 0.2 * clipped, 0.9 * v + 0.1 * clipped**2
        rate = 16**-0.5 * step * 4**-1.5
        expected = -rate * (m / (1 - 0.8**step)) / (np.sqrt(v / (1 - 0.9**step)) + 1e-2)
        np.testing.assert_allclose(updates["a"], expected, rtol=1e-5)


def test_muon_orthogonalizes_kernels_of_layers_and_leaves_the_rest_to_adam():
    """Jordan et al. 2024: all singular values of an update are near one, times 0.2 √max(rows,
    columns) as in Liu et al. 2025. In Adam's first step, each number changes by the rate."""
    optimizer = make_optimizer(16, TrainingConfig(optimizer="muon", warmup_steps=4))
    rng = np.random.default_rng(0)
    params = {
        "layer": {"kernel": rng.normal(size=(6, 24)), "bias": rng.normal(size=6)},
        "embedding": {"table": rng.normal(size=(8, 4))},
        "output_projection": {"kernel": rng.normal(size=(4, 8))},
    }
    params = jax.tree.map(jnp.float32, params)
    updates, _ = optimizer.update(params, optimizer.init(params), params, step=0)
    rate = 16**-0.5 * 4**-1.5
    values = np.linalg.svd(updates["layer"].pop("kernel") / rate, compute_uv=False)
    assert (np.abs(values / (0.2 * 24**0.5) - 1) < 0.35).all()
    for leaf in jax.tree.leaves(updates):
        np.testing.assert_allclose(np.abs(leaf), rate, rtol=1e-5)


def test_schedule_free_steps_at_a_constant_rate_and_evaluates_the_average():
    """Defazio et al. 2024, equations 3 to 5, by hand for one number and a gradient of y - 1.

    z is where steps are taken, x their mean weighted by squared rates, y = (1 - β) z + β x, where
    gradients are computed. Without a first moment, Adam divides by the root of the mean square.
    """
    training = TrainingConfig(
        optimizer="schedule_free", warmup_steps=2, adam_b1=0.8, adam_b2=0.5, steps=9
    )
    optimizer = make_optimizer(4, training)
    params = {"a": jnp.float32(3)}
    state, v, total = optimizer.init(params), 0.0, 0.0
    x = y = z = 3.0
    for step in range(1, 6):
        gradient = float(params["a"]) - 1
        updates, state = optimizer.update(
            {"a": jnp.float32(gradient)}, state, params, step=step - 1
        )
        params = optax.apply_updates(params, updates)
        rate = 4**-0.5 * 2**-0.5 * min(1, step / 2)
        v = 0.5 * v + 0.5 * (y - 1) ** 2
        z -= rate * (y - 1) / (v / (1 - 0.5**step)) ** 0.5
        total += rate**2
        x += rate**2 / total * (z - x)
        y = 0.2 * z + 0.8 * x
        assert float(params["a"]) == pytest.approx(y, rel=1e-5)
        assert float(averaged_params(state, params)["a"]) == pytest.approx(x, rel=1e-5)
    assert averaged_params(optax.adam(1e-3).init(params), params) is None


@slow
@pytest.mark.parametrize(
    "optimizer",
    [
        optax.adamw(1e-2, mask=lambda params: jax.tree.map(lambda x: x.ndim > 1, params)),
        optax.chain(optax.sgd(0.1), optax.contrib.reduce_on_plateau()),
    ],
    ids=["masked weight decay", "reducing on a plateau"],
)
def test_any_optimizer_of_optax_learns_and_a_broken_step_leaves_its_state_alone(learner, optimizer):
    config = dataclasses.replace(
        learner.config, model=dataclasses.replace(learner.config.model, dropout=0.0)
    )
    model = Transformer(config.model)
    state, step = init_state(model, config, optimizer), make_train_step(model, config, optimizer)
    losses = []
    for _ in range(9):
        state, metrics = step(state, two_rows())
        losses.append(float(metrics["loss"]))
    assert losses[-1] < losses[0] and "learning_rate" not in metrics
    before, whole = jax.device_get((state.opt_state, state.params))
    broken = jax.tree.map(lambda leaf: leaf * jnp.nan, state.params)
    state, metrics = step(state._replace(params=broken), two_rows())
    assert float(metrics["skipped"]) == 1
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(state.opt_state), before)


@slow
@pytest.mark.parametrize("optimizer", ["adam", "muon"])
def test_the_step_under_shard_map_computes_the_same_bits(learner, optimizer):
    """The way on, should `jax.pmap` end. `check_vma` would sum gradients a second time."""
    training = dataclasses.replace(learner.config.training, optimizer=optimizer)
    config = dataclasses.replace(learner.config, training=training)
    train_step, states = make_train_step(learner.model, config), []
    mesh = jax.sharding.Mesh(np.array(jax.devices()), ("devices",))
    everywhere, by_device = jax.sharding.PartitionSpec(), jax.sharding.PartitionSpec("devices")

    def of_device(state, batch):
        return inspect.unwrap(train_step)(state, jax.tree.map(lambda column: column[0], batch))

    mapped = jax.shard_map(
        of_device,
        mesh=mesh,
        in_specs=(everywhere, by_device),
        out_specs=everywhere,
        check_vma=False,
    )
    for step in (train_step, jax.jit(mapped)):
        state = init_state(learner.model, config)
        for _ in range(3):
            state, metrics = step(state, two_rows())
        states.append(jax.device_get((state._replace(key=None), metrics)))
    jax.tree.map(np.testing.assert_array_equal, *states)


def test_validation_has_no_dropout_and_no_smoothing(learner):
    params, batch = learner.state().params, two_rows()
    sums = make_eval_step(learner.model)(params, batch)
    rows = jax.tree.map(lambda column: column.reshape(2, 4), batch)
    log_probs = jax.nn.log_softmax(jax.jit(learner.model.apply)({"params": params}, rows))
    expected = -sum(
        float(log_probs[i, j, rows.target.ids[i, j]]) for i in (0, 1) for j in range(3 + i)
    )
    assert float(sums.loss) == pytest.approx(expected, rel=1e-5)
    assert float(sums.tokens) == 7


def events(folder):
    """(step, name, value) of each scalar in TensorBoard's files, the oldest file first."""
    from tensorboardX.proto.event_pb2 import Event

    for path in sorted(folder.iterdir()):
        content = path.read_bytes()
        while content:
            (size,) = struct.unpack("<Q", content[:8])
            event, content = Event.FromString(content[12 : 12 + size]), content[16 + size :]
            for value in event.summary.value:
                yield event.step, value.tag, value.simple_value


def test_tensorboard_has_the_metrics_at_once(tmp_path):
    """Before the log is closed: a killed process closes nothing."""
    log = MetricsLog(tmp_path / "metrics.jsonl", tmp_path / "tensorboard", resumed_from=0)
    for step in (1, 2):
        log.write(step, {"loss": step / 4, "accuracy": 0.5})
    lines = read_metrics(tmp_path / "metrics.jsonl")
    assert lines == [{"step": step, "loss": step / 4, "accuracy": 0.5} for step in (1, 2)]
    expected = [(line["step"], name, line[name]) for line in lines for name in ("loss", "accuracy")]
    assert list(events(tmp_path / "tensorboard")) == expected
    log.close()


def test_a_resumed_run_drops_later_metrics_and_what_is_not_a_record(tmp_path):
    """A truncated line, bytes that are not text, a number, a record without a step."""
    path = tmp_path / "metrics.jsonl"
    far = b'{"step": 1%s}\n' % (b"0" * 5_000)
    path.write_bytes(far + b'{"step": 1}\n3\n{"loss": 1}\n\xff\x80\n{"step": 3}\n{"step": 2}\n{"st')
    MetricsLog(path, tmp_path / "tensorboard", resumed_from=2).close()
    assert path.read_text() == '{"step": 1}\n{"step": 2}\n'


def test_metrics_on_a_full_disk_are_an_error_with_a_way_out(tmp_path):
    log = MetricsLog(tmp_path / "metrics.jsonl", tmp_path / "tensorboard", resumed_from=0)
    log._file.close()
    log._file = open("/dev/full", "a")
    with pytest.raises(OSError, match="/dev/full: No space left on device. Free some space, and"):
        log.write(1, {"loss": 1.0})
    log.close()
