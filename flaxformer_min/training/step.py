"""One training step, on all devices at once (sections 5.2-5.4)."""

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
from flaxformer_min.model.dropout import BY_ROW, masks_by_row
from flaxformer_min.model.parameters import copies_by_row
from flaxformer_min.model.target import compiling_for, in_few_kernels, target_platform
from flaxformer_min.runtime.devices import divided_among, same_on
from flaxformer_min.runtime.generator import GENERATOR
from flaxformer_min.tokens import Batch, Tokens
from flaxformer_min.training import shares
from flaxformer_min.training.loss import Sums, TokenLoss, sum_over_tokens
from flaxformer_min.training.optimizer import make_optimizer
from flaxformer_min.training.schedule import learning_rate

Params = Any
Metrics = dict[str, Float[Array, ""]]


class TrainState(NamedTuple):
    """The state of training, replicated on all devices but for `opt_state`.

    step:      steps taken, including skipped ones.
    opt_state: [devices ...], each device's share of the optimizer's state (see `shares`).
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
        """The parameters to translate with: the moving average if there is one."""
        return self.params if self.average is None else self.average

    def to_dict(self) -> dict[str, Any]:
        """Return the content of a checkpoint, which does not depend on the number of devices."""
        whole = self._replace(opt_state=shares.join(self.opt_state, self.params))
        return {name: value for name, value in whole._asdict().items() if value is not None}

    @classmethod
    def from_dict(cls, content: Mapping[str, Any]) -> "TrainState":
        """Return the state with this content, divided among the devices."""
        whole = cls(**content)
        return whole._replace(opt_state=shares.divide(whole.opt_state, whole.params))


ON_DEVICES = TrainState(None, None, 0, None, None)
"""The axis of devices of each part of the state, for `pmap`."""


def initial_state(
    model: nn.Module, config: Config, seed: UInt[Array, ""], devices: int, local: int
) -> TrainState:
    """Return the state before the first step, for `local` ones of so many devices."""
    tokens = Tokens(*(jnp.ones((1, 8), jnp.int32),) * 3)
    params_key, key = jax.random.split(jax.random.key(seed, impl=GENERATOR))
    params = model.init(params_key, Batch(tokens, tokens), method=_all_logits)["params"]
    of_device = make_optimizer(config.training).init(shares.like_shares(params, devices))
    opt_state = jax.tree.map(lambda x: jnp.broadcast_to(x, (local, *x.shape)), of_device)
    # A copy, because a buffer cannot be donated twice.
    average = jax.tree.map(jnp.copy, params) if config.training.ema_decay else None
    return TrainState(jnp.int32(0), params, opt_state, key, average)


def init_state(
    model: nn.Module, config: Config, while_compiling: Callable[[TrainState], Any] | None = None
) -> TrainState:
    """Return `initial_state` on the devices of this process.

    `while_compiling` is called with the shapes of the state while XLA computes it in a thread.
    """

    # Every process computes the same state.
    devices = jax.local_devices()
    same, divided = same_on(devices), divided_among(devices)
    make = jax.jit(
        partial(initial_state, model, config, devices=jax.device_count(), local=len(devices)),
        out_shardings=TrainState(same, same, divided, same, same),
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

    rngs: random keys, as Linen modules take them.
    rows: numbers of the rows in the whole batch, however many devices and accumulated batches share
          it (see `shard_batch`).
    """

    rngs: dict[str, Key[Array, ""]]
    rows: Int[Array, "rows"]


def randomness(
    state: TrainState,
    device: Int[Array, ""] | int,
    number: Int[Array, ""] | int,
    rows: int,
    config: TrainingConfig,
) -> Randomness:
    """Return the randomness of a step, device and accumulated batch of so many rows.

    The masks of `model.dropout` depend on the step and the number of the row alone. Modules that
    draw otherwise have a key of their own for each device and accumulated batch.
    """
    place = device * config.gradient_accumulation + number
    key = jax.random.fold_in(state.key, state.step)
    if target_platform() == "cuda":
        # The keys of all masks then have an operand in common: see `in_few_kernels`.
        key = jax.lax.optimization_barrier(key)
    rngs = {BY_ROW: key, "dropout": jax.random.fold_in(key, place)}
    return Randomness(rngs, place * rows + jnp.arange(rows, dtype=jnp.int32))


def gradient_sums(
    model: nn.Module,
    params: Params,
    batch: Batch,
    random: Randomness,
    config: TrainingConfig,
    token_loss: TokenLoss | None = None,
) -> tuple[Params, Sums]:
    """Return the gradient of the loss summed over the tokens of `batch`, and the sums."""
    inputs, rows = batch, random.rows
    if config.r_drop:  # each row twice, under two masks
        inputs = jax.tree.map(lambda x: jnp.concatenate([x, x]), batch)
        rows = jnp.concatenate([rows, -1 - rows])

    def loss(params: Params) -> tuple[Float[Array, ""], Sums]:
        variables, target = {"params": in_few_kernels(params)}, batch.target
        copies = copies_by_row(params, rows.size)
        with masks_by_row(rows):
            hidden_states = model.apply(
                variables | copies, inputs, method="hidden_states", rngs=random.rngs
            )
        with jax.named_scope("loss"):
            sums = sum_over_tokens(
                partial(model.apply, variables, method="logits"),
                hidden_states.reshape(-1, *target.ids.shape, hidden_states.shape[-1]),
                target.ids,
                target.segments,
                config.label_smoothing,
                config.r_drop,
                token_loss,
            )
        return sums.loss, sums

    return jax.grad(loss, has_aux=True)(params)


def sum_over_devices(tree: Any) -> Any:
    """Return the sum of each array over the devices of `pmap`, of all processes."""
    return jax.lax.psum(tree, "devices")


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
    token_loss: TokenLoss | None = None,
    devices: Sequence[jax.Device] | None = None,
) -> Callable[[TrainState, Batch], tuple[TrainState, Metrics]]:
    """Return `train_step(state, batch) -> (state, metrics)` for all devices.

    The batch is [devices accumulation rows length] (see `shard_batch`). Loss and gradients are
    sums over all tokens of all devices and accumulated batches, divided by the number of these
    tokens, so their distribution does not matter. A step whose loss or gradient is not finite
    leaves parameters and moments unchanged and counts as skipped. `state` is donated: use the
    returned one.

    model:      any Linen module with `hidden_states(batch)` and `logits(x)`.
    token_loss: used instead of label-smoothed cross-entropy, if given.
    devices:    to compile for; None: all devices of jax. They need not be attached: see
                docs/accelerators.md.
    """
    training = config.training
    optimizer, rate = make_optimizer(training), learning_rate(config.model.d_model, training)

    def train_step(state: TrainState, batch: Batch) -> tuple[TrainState, Metrics]:
        with compiling_for(devices):
            total = _sum_of_batches(model, state, batch, training, token_loss)
        sides = [side.segments for side in batch]
        real = sum(jnp.count_nonzero(segments) for segments in sides)
        gradients = shares.sum_of_share(total[0])
        sums, real = sum_over_devices((total[1], real))
        tokens = jnp.maximum(sums.tokens, 1.0)
        with jax.named_scope("gradient_norm"), compiling_for(devices):
            norm = shares.norm(gradients) / tokens
        # Behind the norm, so that an accelerator divides only where Adam reads the gradient.
        gradients = jax.tree.map(lambda gradient: gradient / tokens, gradients)
        finite = jnp.isfinite(norm) & jnp.isfinite(sums.loss)
        metrics = {
            "loss": sums.loss / tokens,
            "accuracy": sums.correct / tokens,
            "tokens": sums.tokens,
            "real": real.astype(jnp.float32),
            "positions": sum_over_devices(jnp.float32(sum(each.size for each in sides))),
            "gradient_norm": norm,
            "learning_rate": rate(state.step),
            "skipped": (~finite).astype(jnp.float32),
        }
        with jax.named_scope("adam"), compiling_for(devices):
            return _updated(state, gradients, norm, finite, optimizer, rate, training), metrics

    axes = {"in_axes": (ON_DEVICES, 0), "out_axes": (ON_DEVICES, None)}
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
    norm: Float[Array, ""],
    finite: Bool[Array, ""],
    optimizer: optax.GradientTransformationExtraArgs,
    rate: Callable[[Int[Array, ""]], Float[Array, ""]],
    config: TrainingConfig,
) -> TrainState:
    """Return the state after the update, or with nothing but its step changed if not `finite`.

    `gradients` are this device's shares; `norm` is that of the whole gradient.
    """
    own = shares.own(state.params)
    updates, opt_state = optimizer.update(gradients, state.opt_state, own, norm=norm)
    updates = jax.tree.map(lambda update: -rate(state.step) * update, updates)
    new = in_few_kernels((optax.apply_updates(own, updates), opt_state))

    def kept(new: Array, old: Array) -> Array:
        # In its own type, which that of the gradient may widen: a checkpoint has this type.
        return jnp.where(finite, new.astype(old.dtype), old)

    new_own, opt_state = jax.tree.map(kept, new, (own, state.opt_state))
    params = shares.gathered(new_own, state.params)
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
        return sum_over_devices(sums)

    return jax.pmap(
        eval_step, axis_name="devices", in_axes=(None, 0), out_axes=None, devices=devices
    )
