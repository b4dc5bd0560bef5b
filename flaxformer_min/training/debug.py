"""Search for the operation that produced the first NaN or infinity."""

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import flax
import jax
import jax.numpy as jnp
import jaxtyping
from flax import linen as nn
from jax.extend import core

from flaxformer_min.config import TrainingConfig
from flaxformer_min.runtime.distributed import gather
from flaxformer_min.tokens import Batch
from flaxformer_min.training.loss import TokenLoss
from flaxformer_min.training.step import Metrics, TrainState, gradient_sums, randomness

PACKAGE = Path(__file__).parents[1]
INNER = ("jaxpr", "call_jaxpr", "fun_jaxpr")
"""Parameters with the inner program of an operation."""

LOOPS = ("scan", "while", "cond")


class NotFinite(Exception):
    """An operation produced a value that is not finite from finite ones."""


def stopping_at_not_finite(
    train_step: Callable[[TrainState, Batch], tuple[TrainState, Metrics]],
    model: nn.Module,
    config: TrainingConfig,
    token_loss: TokenLoss | None = None,
) -> Callable[[TrainState, Batch], tuple[TrainState, Metrics]]:
    """Return the same step, which raises RuntimeError if it is skipped, naming the operation.

    A skipped step leaves the parameters unchanged, so it can be repeated with the same dropout, one
    operation after another. For finite steps, only their metrics are read.
    """

    def step(state: TrainState, batch: Batch) -> tuple[TrainState, Metrics]:
        state, metrics = train_step(state, batch)
        if metrics["skipped"]:
            taken = state._replace(step=state.step - 1)
            found = gather("not finite", find_not_finite(model, config, taken, batch, token_loss))
            cause = next(filter(None, found), "each gradient is finite, but their sum is not")
            raise RuntimeError(f"training stopped at step {int(state.step)}: {cause}.")
        return state, metrics

    return step


def find_not_finite(
    model: nn.Module,
    config: TrainingConfig,
    state: TrainState,
    batch: Batch,
    token_loss: TokenLoss | None = None,
) -> str | None:
    """Describe the first operation of this process's share of a step that is not finite.

    `batch` is [devices accumulation rows length], as the step takes it. None if there is no such
    operation.
    """
    for path, leaf in jax.tree_util.tree_leaves_with_path(state.params):
        if not jnp.isfinite(leaf).all():
            name = jax.tree_util.keystr(path, simple=True, separator="/")
            return f"the parameter {name} is not finite"
    for device, number, part in _parts(batch):
        device += jax.process_index() * jax.local_device_count()
        random = randomness(state, device, number, part.target.ids.shape[0], config)

        def gradients(params: Any, part: Batch = part, random: Any = random) -> Any:
            return gradient_sums(model, params, part, random, config, token_loss)

        with jax.disable_jit():  # then a loop over chunks of tokens is traced as its iterations
            program = jax.make_jaxpr(gradients)(state.params)
        try:
            _run(program.jaxpr, program.consts, jax.tree.leaves(state.params))
        except NotFinite as found:
            return str(found)
    return None


def _parts(batch: Batch) -> Iterator[tuple[int, int, Batch]]:
    devices, accumulation = batch.source.ids.shape[:2]
    for device in range(devices):
        for number in range(accumulation):
            yield (
                device,
                number,
                jax.tree.map(lambda x, at=(device, number): jnp.asarray(x[at]), batch),
            )


def _run(program: core.Jaxpr, constants: list, arguments: list, inside: str = "") -> list:
    """Evaluate a program. Raises NotFinite at the first operation with a result not finite."""
    known = dict(zip([*program.constvars, *program.invars], [*constants, *arguments], strict=True))

    def value(of: Any) -> Any:
        return of.val if isinstance(of, core.Literal) else known[of]

    for operation in program.eqns:
        given = [value(of) for of in operation.invars]
        scope = "/".join(filter(None, [inside, str(operation.source_info.name_stack)]))
        inner = next((operation.params[name] for name in INNER if name in operation.params), None)
        if inner is None or operation.primitive.name in LOOPS:
            made = operation.primitive.bind(*given, **operation.params)
            made = made if operation.primitive.multiple_results else [made]
            if all(map(_finite, given)) and not all(map(_finite, made)):
                raise NotFinite(_describe(operation, given, made, scope))
        elif isinstance(inner, core.ClosedJaxpr):
            made = _run(inner.jaxpr, inner.consts, given, scope)
        else:
            made = _run(inner, [], given, scope)
        known.update(zip(operation.outvars, made, strict=True))
    return [value(of) for of in program.outvars]


def _finite(array: Any) -> bool:
    return not _is_real(array) or bool(jnp.isfinite(array).all())


def _is_of_library(file: str) -> bool:
    """Return whether a frame is of jax, Flax or the like, or of this search."""
    if file in (__file__, contextlib.__file__):
        return True
    libraries = (Path(module.__file__).parent for module in (jax, flax, jaxtyping))
    return any(map(Path(file).is_relative_to, libraries))


def _describe(operation: core.JaxprEqn, given: list, made: list, scope: str) -> str:
    bad = "NaN" if any(_is_real(array) and jnp.isnan(array).any() for array in made) else "infinity"
    largest = max((float(jnp.abs(each).max()) for each in given if _is_real(each)), default=0.0)
    text = f"{operation.primitive.name} produced the first {bad}, from numbers up to {largest:.3g}"
    frames = operation.source_info.traceback.frames
    ours = [frame for frame in frames if not _is_of_library(frame.file_name)]
    if ours:
        file = Path(ours[0].file_name)
        where = file.relative_to(PACKAGE.parent) if file.is_relative_to(PACKAGE) else file
        text += f", at {where}:{ours[0].line_num}"
    return f"{text}, in {scope}"


def _is_real(array: Any) -> bool:
    return jnp.issubdtype(jnp.result_type(array), jnp.floating) and jnp.size(array) > 0
