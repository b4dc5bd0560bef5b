"""One training step, on all devices at once (sections 5.2-5.4)."""

import inspect
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn
from jaxtyping import Array, Bool, Float, Int, Key, UInt

from flaxformer_min.config import Config, TrainingConfig
from flaxformer_min.kernels.backend import compiling_for
from flaxformer_min.kernels.dropout import keep_mask
from flaxformer_min.system.devices import replicated
from flaxformer_min.system.generator import GENERATOR
from flaxformer_min.tokens import CUT, EOS, Batch, Tokens
from flaxformer_min.training.loss import Sums, TokenLoss, sum_over_tokens
from flaxformer_min.training.optimizer import averaged_params, complete_optimizer
from flaxformer_min.training.schedule import learning_rate

Params = Any
Metrics = dict[str, Float[Array, ""]]


class TrainState(NamedTuple):
    """The state of training, the same on all devices.

    step:      steps taken, including skipped ones.
    opt_state: the optimizer's own.
    key:       random key; dropout masks depend on it and on `step`.
    average:   the moving average of the parameters, or None if `ema_decay` is 0.
    """

    step: Int[Array, ""]
    params: Params
    opt_state: optax.OptState
    key: Key[Array, ""]
    average: Params | None = None

    @property
    def eval_params(self) -> Params:
        """The parameters to translate with: the average that there is, or `params`."""
        if self.average is not None:
            return self.average
        averaged = averaged_params(self.opt_state, self.params)
        return self.params if averaged is None else averaged

    def to_dict(self) -> dict[str, Any]:
        """Return the content of a checkpoint: the state, and as "average" the `eval_params`."""
        content = self._asdict()
        evaluated = self.eval_params
        content["average"] = None if evaluated is self.params else evaluated
        return {name: value for name, value in content.items() if value is not None}

    def restored(self, content: Mapping[str, Any]) -> "TrainState":
        """Return the state that had this content, in a training that began with this state."""
        average = None if self.average is None else content["average"]
        return TrainState(**{**content, "average": average})


def initial_state(
    model: nn.Module,
    config: Config,
    seed: UInt[Array, ""],
    optimizer: optax.GradientTransformation | None = None,
) -> TrainState:
    """Return the state before the first step."""
    tokens = Tokens(*(jnp.ones((1, 8), jnp.int32),) * 3)
    params_key, key = jax.random.split(jax.random.key(seed, impl=GENERATOR))
    params = model.init(params_key, Batch(tokens, tokens), method=_all_logits)["params"]
    opt_state = complete_optimizer(optimizer, config).init(params)
    # A copy, because a buffer cannot be donated twice.
    average = jax.tree.map(jnp.copy, params) if config.training.ema_decay else None
    return TrainState(jnp.int32(0), params, opt_state, key, average)


def init_state(
    model: nn.Module,
    config: Config,
    optimizer: optax.GradientTransformation | None = None,
    while_compiling: Callable[[TrainState], Any] | None = None,
) -> TrainState:
    """Return `initial_state` on the devices of this process; `optimizer` as in `make_train_step`.

    `while_compiling` is called with the shapes of the state while XLA computes it in a thread.
    """
    # Every process computes the same state.
    make = jax.jit(
        partial(initial_state, model, config, optimizer=optimizer),
        out_shardings=replicated(jax.local_devices()),
    )
    seed = np.uint32(config.training.seed)
    if while_compiling is None:
        return make(seed)
    lowered = make.lower(seed)
    with ThreadPoolExecutor(1) as pool:
        state = pool.submit(lambda: lowered.compile()(seed))
        while_compiling(lowered.out_info)
        return state.result()


def _all_logits(model: nn.Module, batch: Batch) -> Float[Array, "batch target vocab"]:
    return model.logits(model.hidden_states(batch))


class Randomness(NamedTuple):
    """What the dropout of an accumulated batch of a device depends on.

    rngs: random keys. `model.dropout` draws from "dropout", which all devices share, and `rows`;
          modules that draw otherwise find a key of their device and batch in "by_device".
    rows: numbers of the rows in the whole batch, however many devices and accumulated batches share
          it (see `shard_batch`).
    """

    rngs: dict[str, Key[Array, ""]]
    rows: Int[Array, " rows"]


def randomness(
    state: TrainState,
    device: Int[Array, ""] | int,
    number: Int[Array, ""] | int,
    rows: int,
    config: TrainingConfig,
) -> Randomness:
    """Return the randomness of a step, device and accumulated batch of this many rows."""
    part = device * config.gradient_accumulation + number
    key = jax.random.fold_in(state.key, state.step)
    rngs = {"dropout": key, "by_device": jax.random.fold_in(key, part)}
    return Randomness(rngs, part * rows + jnp.arange(rows, dtype=jnp.int32))


def _hidden_states(
    model: nn.Module, params: Params, batch: Batch, random: Randomness
) -> Float[Array, "rows target d_model"]:
    """Call `hidden_states`, which may take the numbers of the rows, too."""
    takes_rows = "rows" in inspect.signature(model.hidden_states).parameters
    arguments = (batch, random.rows) if takes_rows else (batch,)
    variables = {"params": params}
    return model.apply(variables, *arguments, method="hidden_states", rngs=random.rngs)


def cut_copy(batch: Batch, random: Randomness, share: float) -> Batch:
    """Return the batch with CUT in place of ids, each with probability `share` (SimCut).

    As in the paper's code, EOS of the source and BOS of the target remain.
    """
    source, target = (
        jnp.where(keep_mask(key, share, side.ids.shape, random.rows), side.ids, CUT)
        for key, side in zip(jax.random.split(random.rngs["dropout"]), batch, strict=True)
    )
    source = jnp.where(batch.source.ids == EOS, EOS, source)
    return Batch(batch.source._replace(ids=source), batch.target._replace(ids=target))


def gradient_sums(
    model: nn.Module,
    params: Params,
    batch: Batch,
    random: Randomness,
    config: TrainingConfig,
    token_loss: TokenLoss | None = None,
) -> tuple[Params, Sums]:
    """Return the gradient of the loss summed over the tokens of `batch`, and the sums."""
    inputs = batch
    if config.r_drop or config.simcut:  # each row twice, under two masks
        second = cut_copy(batch, random, config.simcut_share) if config.simcut else batch
        inputs = jax.tree.map(lambda x, y: jnp.concatenate([x, y]), batch, second)
        random = random._replace(rows=jnp.concatenate([random.rows, -1 - random.rows]))

    def loss(params: Params) -> tuple[Float[Array, ""], Sums]:
        variables, target = {"params": params}, batch.target
        hidden_states = _hidden_states(model, params, inputs, random)
        with jax.named_scope("loss"):
            sums = sum_over_tokens(
                partial(model.apply, variables, method="logits"),
                hidden_states.reshape(-1, *target.ids.shape, hidden_states.shape[-1]),
                target.ids,
                target.segments,
                config.label_smoothing,
                config.r_drop,
                token_loss,
                config.simcut,
            )
        return sums.loss, sums

    return jax.grad(loss, has_aux=True)(params)


def moving_average(average: Params, params: Params, step: Int[Array, ""], decay: float) -> Params:
    """Return the exponential moving average after one more step.

    The decay is limited to (1 + step) / (10 + step), so that the initial parameters are soon
    forgotten.

    >>> moving_average(jnp.float32(0), jnp.float32(1), jnp.int32(0), 0.999)
    Array(0.9, dtype=float32)
    """
    step = step.astype(jnp.float32)
    decay = jnp.minimum(decay, (1 + step) / (10 + step))
    return jax.tree.map(lambda old, new: decay * old + (1 - decay) * new, average, params)


def make_train_step(
    model: nn.Module,
    config: Config,
    optimizer: optax.GradientTransformation | None = None,
    token_loss: TokenLoss | None = None,
    devices: Sequence[jax.Device] | None = None,
) -> Callable[[TrainState, Batch], tuple[TrainState, Metrics]]:
    """Return `train_step(state, batch) -> (state, metrics)` for all devices.

    The batch is [devices accumulation rows length] (see `shard_batch`). Loss and gradients are
    sums over all tokens of all devices and accumulated batches, divided by the number of these
    tokens, so their distribution does not matter. A step whose loss or gradient is not finite
    leaves parameters and optimizer unchanged and counts as skipped. `state` is donated: use the
    returned one.

    model:      any Linen module with `hidden_states(batch)` and `logits(x)`.
    optimizer:  any of optax, learning rate included; None: `config.training.optimizer`. It also
                gets `value`, the loss, and `step`, the number of steps before, if it takes them.
    token_loss: used instead of label-smoothed cross-entropy, if given.
    devices:    to compile for; None: all devices of jax. They need not be attached: see
                docs/accelerators.md.

    `jax.pmap` is in maintenance mode, but not deprecated, and states data parallelism in one line.
    It is `jit(shard_map)` underneath: a test gets the same bits from `jax.shard_map` directly.
    """
    training = config.training
    rates = {} if optimizer else {"learning_rate": learning_rate(config.model.d_model, training)}
    optimizer = complete_optimizer(optimizer, config)

    def train_step(state: TrainState, batch: Batch) -> tuple[TrainState, Metrics]:
        with compiling_for(devices):
            total = _sum_of_batches(model, state, batch, training, token_loss)
        sides = [side.segments for side in batch]
        real = sum(jnp.count_nonzero(segments) for segments in sides)
        positions = sum(segments.size for segments in sides)
        counts = jnp.array([real, positions], jnp.float32)
        gradients, sums, (real, positions) = jax.lax.psum((*total, counts), "devices")
        tokens = jnp.maximum(sums.tokens, 1.0)
        gradients = jax.tree.map(lambda gradient: gradient / tokens, gradients)
        loss, norm = sums.loss / tokens, optax.tree.norm(gradients)
        finite = jnp.isfinite(norm) & jnp.isfinite(loss)
        metrics = {
            "loss": loss,
            "accuracy": sums.correct / tokens,
            "tokens": sums.tokens,
            "real": real,
            "positions": positions,
            "gradient_norm": norm,
            "skipped": (~finite).astype(jnp.float32),
            **{name: rate(state.step) for name, rate in rates.items()},
        }
        return _updated(state, gradients, loss, finite, optimizer, training), metrics

    axes = {"in_axes": (None, 0), "out_axes": None}
    return jax.pmap(train_step, "devices", **axes, donate_argnums=0, devices=devices)


def _sum_of_batches(
    model: nn.Module,
    state: TrainState,
    batch: Batch,
    config: TrainingConfig,
    token_loss: TokenLoss | None,
) -> tuple[Params, Sums]:
    """Return the gradients and sums of all accumulated batches of this device."""
    device = jax.lax.axis_index("devices")

    def of_batch(number: Int[Array, ""] | int, part: Batch) -> tuple[Params, Sums]:
        random = randomness(state, device, number, part.target.ids.shape[0], config)
        return gradient_sums(model, state.params, part, random, config, token_loss)

    _check_split(batch, config.gradient_accumulation)
    if config.gradient_accumulation == 1:
        return of_batch(0, jax.tree.map(lambda column: column[0], batch))

    def accumulate(total: tuple[Params, Sums], numbered: tuple[Int[Array, ""], Batch]):
        return jax.tree.map(jnp.add, total, of_batch(*numbered)), None

    zero = jax.tree.map(jnp.zeros_like, state.params), Sums(*(jnp.float32(0.0),) * 4)
    numbers = jnp.arange(config.gradient_accumulation, dtype=jnp.int32)
    return jax.lax.scan(accumulate, zero, (numbers, batch))[0]


def _check_split(batch: Batch, parts: int) -> None:
    """Raise ValueError unless a device's batch has this many parts, which are accumulated."""
    shape = batch.target.ids.shape
    if len(shape) != 3 or shape[0] != parts:
        raise ValueError(
            f"batches must be [devices {parts} rows length], where {parts} is the number of "
            f"accumulated parts; got [devices {' '.join(map(str, shape))}]. Use "
            f"shard_batch(batch, devices, {parts})."
        )


def _updated(
    state: TrainState,
    gradients: Params,
    loss: Float[Array, ""],
    finite: Bool[Array, ""],
    optimizer: optax.GradientTransformationExtraArgs,
    config: TrainingConfig,
) -> TrainState:
    """Return the state after the update, or with nothing but its step changed if not `finite`."""
    with jax.numpy_dtype_promotion("standard"), jax.named_scope("optimizer"):  # optax mixes types
        updates, opt_state = optimizer.update(
            gradients, state.opt_state, state.params, value=loss, step=state.step
        )
        params = optax.apply_updates(state.params, updates)

    def kept(new: Array, old: Array) -> Array:
        # A gradient of a wider type must not widen the state, whose types a checkpoint records.
        return jnp.where(finite, new.astype(old.dtype), old)

    params, opt_state = jax.tree.map(kept, (params, opt_state), (state.params, state.opt_state))
    average = state.average
    if average is not None:
        averaged = moving_average(average, params, state.step, config.ema_decay)
        average = jax.tree.map(kept, averaged, average)
    return TrainState(state.step + 1, params, opt_state, state.key, average)


def make_eval_step(
    model: nn.Module, devices: Sequence[jax.Device] | None = None
) -> Callable[[Params, Batch], Sums]:
    """Return `eval_step(params, batch) -> Sums` over all devices, without dropout and smoothing.

    `devices` as in `make_train_step`.
    """

    def eval_step(params: Params, batch: Batch) -> Sums:
        _check_split(batch, 1)
        batch = jax.tree.map(lambda column: column[0], batch)
        target, logits = batch.target, partial(model.apply, {"params": params}, method="logits")
        with compiling_for(devices):
            hidden_states = model.apply({"params": params}, batch, method="hidden_states")
            sums = sum_over_tokens(logits, hidden_states[None], target.ids, target.segments)
        return jax.lax.psum(sums, "devices")

    return jax.pmap(
        eval_step, axis_name="devices", in_axes=(None, 0), out_axes=None, devices=devices
    )
