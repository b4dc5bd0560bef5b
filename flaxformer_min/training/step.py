"""One step of learning, on all devices at once (sections 5.2-5.4)."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Float, Int, Key, UInt

from flaxformer_min.config import TrainingConfig
from flaxformer_min.model.transformer import Transformer
from flaxformer_min.runtime.devices import same_on
from flaxformer_min.tokens import Batch, Tokens
from flaxformer_min.training.loss import Sums, sum_over_tokens
from flaxformer_min.training.schedule import learning_rate

Params = Any
Metrics = dict[str, Float[Array, ""]]


class TrainState(NamedTuple):
    """All that training remembers. Save it, and nothing of the run is lost.

    step counts updates, key makes every dropout mask, average is the moving average of the
    parameters where the config asks for one; all of it is the same on all devices.
    """

    step: Int[Array, ""]
    params: Params
    opt_state: optax.OptState
    key: Key[Array, ""]
    average: Params | None = None

    @property
    def best_params(self) -> Params:
        """What to translate with: the moving average, or the parameters themselves."""
        return self.params if self.average is None else self.average

    def to_dict(self) -> dict[str, Any]:
        """What a checkpoint holds: all there is."""
        return {name: value for name, value in self._asdict().items() if value is not None}


def make_optimizer(d_model: int, config: TrainingConfig) -> optax.GradientTransformation:
    """Adam as in section 5.3, after clipping where the config asks for it."""
    adam = optax.adam(
        learning_rate(d_model, config), config.adam_b1, config.adam_b2, config.adam_epsilon
    )
    if config.clip_norm is None:
        return adam
    return optax.chain(optax.clip_by_global_norm(config.clip_norm), adam)


def init_state(
    model: Transformer, config: TrainingConfig, meanwhile: Callable[[TrainState], Any] | None = None
) -> TrainState:
    """A model that has learned nothing yet, on every device; all of it follows from the seed.

    `meanwhile` is called with the shapes of the state, while XLA makes it in another thread.
    """
    tokens = Tokens(*(np.ones((1, 8), np.int32),) * 3)

    def init(seed: UInt[Array, ""]) -> TrainState:
        params_key, key = jax.random.split(jax.random.key(seed))
        params = model.init(params_key, Batch(tokens, tokens))["params"]
        opt_state = make_optimizer(model.config.d_model, config).init(params)
        # A copy, for a buffer cannot be donated twice.
        average = jax.tree.map(jnp.copy, params) if config.ema_decay else None
        return TrainState(jnp.int32(0), params, opt_state, key, average)

    # Other processes make their own, which is equal.
    everywhere = same_on(jax.local_devices())
    make, seed = jax.jit(init, out_shardings=everywhere), np.uint32(config.seed)
    if meanwhile is None:
        return make(seed)
    lowered = make.lower(seed)
    with ThreadPoolExecutor(1) as aside:
        state = aside.submit(lambda: lowered.compile()(seed))
        meanwhile(lowered.out_info)
        return state.result()


def dropout_key(
    state: TrainState,
    device: Int[Array, ""] | int,
    number: Int[Array, ""] | int,
    config: TrainingConfig,
) -> Key[Array, ""]:
    """Another for each step, device and accumulated batch."""
    key = jax.random.fold_in(jax.random.fold_in(state.key, state.step), device)
    return key if config.gradient_accumulation == 1 else jax.random.fold_in(key, number)


def gradient_sums(
    model: Transformer, params: Params, batch: Batch, key: Key[Array, ""], config: TrainingConfig
) -> tuple[Params, Sums]:
    """The gradient of the loss summed over the tokens of `batch`, and the sums themselves."""

    def loss(params: Params) -> tuple[Float[Array, ""], Sums]:
        read = jax.tree.map(lambda x: jnp.concatenate([x, x]), batch) if config.r_drop else batch
        variables = {"params": params}
        features = model.apply(variables, read, method="features", rngs={"dropout": key})
        twice = features.reshape(-1, *batch.target.ids.shape, features.shape[-1])

        def logits(x: Float[Array, "rows target d_model"]) -> Float[Array, "rows target vocab"]:
            return model.apply(variables, x, method="logits")

        target = batch.target
        sums = sum_over_tokens(
            logits, twice, target.ids, target.segments, config.label_smoothing, config.r_drop
        )
        return sums.loss, sums

    return jax.grad(loss, has_aux=True)(params)


def moving_average(average: Params, params: Params, step: Int[Array, ""], decay: float) -> Params:
    """The average after one more step: `decay` of the old, the rest of the new.

    The first steps weigh the new more, (1 + step) / (10 + step) being the most that is kept: what a
    model is before it has learned is soon forgotten.

    >>> moving_average(jnp.float32(0), jnp.float32(1), jnp.int32(0), 0.999)
    Array(0.9, dtype=float32)
    """
    kept = jnp.minimum(decay, (1 + step) / (10 + step))
    return jax.tree.map(lambda old, new: kept * old + (1 - kept) * new, average, params)


def make_train_step(
    model: Transformer, config: TrainingConfig
) -> Callable[[TrainState, Batch], tuple[TrainState, Metrics]]:
    """`train_step(state, batch) -> (state, metrics)`, the batch [devices accumulation rows length].

    Loss and gradients are sums over all tokens of all devices and accumulated batches, divided by
    the number of these tokens: how tokens are spread does not matter. A step whose loss or gradient
    is not finite leaves parameters and moments as they are and counts as skipped. `state` is
    donated: use the returned one.
    """
    optimizer = make_optimizer(model.config.d_model, config)
    rate = learning_rate(model.config.d_model, config)

    def train_step(state: TrainState, batch: Batch) -> tuple[TrainState, Metrics]:
        device = jax.lax.axis_index("devices")

        def accumulate(total: tuple[Params, Sums], numbered: tuple[Int[Array, ""], Batch]):
            number, part = numbered
            key = dropout_key(state, device, number, config)
            new = gradient_sums(model, state.params, part, key, config)
            return jax.tree.map(jnp.add, total, new), None

        if config.gradient_accumulation == 1:
            part = jax.tree.map(lambda column: column[0], batch)
            key = dropout_key(state, device, 0, config)
            total = gradient_sums(model, state.params, part, key, config)
        else:
            zero = jax.tree.map(jnp.zeros_like, state.params), Sums(*(jnp.float32(0.0),) * 4)
            numbers = jnp.arange(config.gradient_accumulation)
            total, _ = jax.lax.scan(accumulate, zero, (numbers, batch))
        sides = [side.segments for side in batch]
        real = sum(jnp.count_nonzero(segments) for segments in sides)
        (gradients, sums), real = jax.lax.psum((total, real), "devices")
        tokens = jnp.maximum(sums.tokens, 1.0)
        gradients = jax.tree.map(lambda gradient: gradient / tokens, gradients)
        norm = optax.tree.norm(gradients)
        finite = jnp.isfinite(norm) & jnp.isfinite(sums.loss)
        updates, opt_state = optimizer.update(gradients, state.opt_state, state.params)
        params = optax.apply_updates(state.params, updates)
        average = state.average
        if average is not None:
            average = moving_average(average, params, state.step, config.ema_decay)
        params, opt_state, average = jax.tree.map(
            lambda new, old: jnp.where(finite, new, old),
            (params, opt_state, average),
            (state.params, state.opt_state, state.average),
        )
        opt_state = _scheduled_at(opt_state, state.step + 1)
        metrics = {
            "loss": sums.loss / tokens,
            "accuracy": sums.correct / tokens,
            "tokens": sums.tokens,
            "real": real.astype(jnp.float32),
            "places": jax.lax.psum(jnp.float32(sum(each.size for each in sides)), "devices"),
            "gradient_norm": norm,
            "learning_rate": rate(state.step),
            "skipped": 1.0 - finite,
        }
        return TrainState(state.step + 1, params, opt_state, state.key, average), metrics

    return jax.pmap(
        train_step, axis_name="devices", in_axes=(None, 0), out_axes=None, donate_argnums=0
    )


def _scheduled_at(opt_state: optax.OptState, step: Int[Array, ""]) -> optax.OptState:
    """With the learning rate of this step next: also after skipped ones it is the schedule's."""

    def set_count(part: Any) -> Any:
        return part._replace(count=step) if is_schedule(part) else part

    def is_schedule(part: Any) -> bool:
        return isinstance(part, optax.ScaleByScheduleState)

    return jax.tree.map(set_count, opt_state, is_leaf=is_schedule)


def make_eval_step(model: Transformer) -> Callable[[Params, Batch], Sums]:
    """`eval_step(params, batch) -> Sums` without dropout and smoothing, over all devices."""

    def eval_step(params: Params, batch: Batch) -> Sums:
        batch = jax.tree.map(lambda column: column[0], batch)
        features = model.apply({"params": params}, batch, method="features")
        target, logits = batch.target, partial(model.apply, {"params": params}, method="logits")
        sums = sum_over_tokens(logits, features[None], target.ids, target.segments)
        return jax.lax.psum(sums, "devices")

    return jax.pmap(eval_step, axis_name="devices", in_axes=(None, 0), out_axes=None)
