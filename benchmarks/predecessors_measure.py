"""What benchmarks/predecessors.py measures of a model besides its translations."""

import contextlib
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn
from jax.extend import core

from flaxformer_min import Config, Translator
from flaxformer_min.data.batches import shard_batch
from flaxformer_min.model.embedding import Embedding
from flaxformer_min.tokens import Batch, one_sentence_per_row
from flaxformer_min.training.step import init_state, make_train_step

# Translations by length


def by_length(
    lengths: Sequence[int], edges: Sequence[int], score: Callable[[list[int]], float]
) -> list[float]:
    """Return the `score` of the sentences of each bin, which are from an edge up to the next."""
    found = []
    for low, high in zip(edges, edges[1:], strict=False):
        found.append(score([n for n, length in enumerate(lengths) if low <= length < high]))
    return found


def edges_of(lengths: Sequence[int], bins: int) -> list[int]:
    """Return the edges of bins of about as many sentences each.

    >>> edges_of([1, 2, 2, 3, 4, 4, 5, 9], 2)
    [1, 4, 10]
    """
    ordered = sorted(lengths)
    inner = [ordered[len(ordered) * each // bins] for each in range(1, bins)]
    return [ordered[0], *inner, ordered[-1] + 1]


# Gradients


@contextlib.contextmanager
def added_to_source(offsets: jax.Array) -> Iterator[None]:
    """Add `offsets` to the embeddings of the source: the first that a model computes."""
    waiting = [offsets]

    def intercept(call: Callable, arguments: tuple, names: dict, context: Any) -> Any:
        result = call(*arguments, **names)
        embeds = isinstance(context.module, Embedding) and context.method_name == "__call__"
        return result + waiting.pop() if embeds and waiting else result

    with nn.intercept_methods(intercept):
        yield


def gradient_norms(model: nn.Module, params: Any, batch: Batch, d_model: int) -> jax.Array:
    """Return ‖∂ loss of target token t / ∂ embedding of source token i‖ as [rows target source].

    batch: one sentence a row, so that rows do not depend on each other.
    """
    ids = batch.target.ids

    def losses(offsets: jax.Array) -> jax.Array:
        with added_to_source(offsets):
            log_probs = jax.nn.log_softmax(model.apply({"params": params}, batch))
        return -jnp.take_along_axis(log_probs, ids[:, :, None], axis=-1)[:, :, 0]

    @jax.jit
    def norms() -> jax.Array:
        _, back = jax.vjp(losses, jnp.zeros((*batch.source.ids.shape, d_model)))

        def of_token(number: jax.Array) -> jax.Array:
            chosen = jnp.zeros(ids.shape).at[:, number].set(1.0)
            return jnp.linalg.norm(back(chosen)[0], axis=-1)

        return jax.lax.map(of_token, jnp.arange(ids.shape[1])).swapaxes(0, 1)

    return norms()


def norms_by_distance(norms: np.ndarray, batch: Batch, width: int) -> dict[int, float]:
    """Return the median norm for each distance of source token i and target token t.

    The distance, i + t + 1 with both counted from 0, is the number of steps between them in a
    recurrent model that reads the source from its end. Distances are bins of `width`, called by
    their lower edges; those with fewer than 20 pairs of tokens are left out.
    """
    source, target = (np.asarray(side.segments, bool) for side in batch)
    row, t, i = np.nonzero(target[:, :, None] & source[:, None, :])
    bins, found = (i + t + 1) // width * width, {}
    for each in np.unique(bins):
        values = norms[row, t, i][bins == each]
        if len(values) >= 20:
            found[int(each)] = float(np.median(values))
    return found


# Time and chains


def step_seconds(model: nn.Module, config: Config, shape: tuple[int, int], steps: int) -> float:
    """Return the median seconds of a training step on rows that are full, `shape` on both sides."""
    rng = np.random.default_rng(0)
    ids = rng.integers(4, config.model.vocab_size, (2, *shape), np.int32)
    batch = shard_batch(Batch(*map(one_sentence_per_row, ids)), jax.local_device_count())
    state, train_step = init_state(model, config), make_train_step(model, config)
    seconds = []
    for _ in range(steps + 1):
        since = time.perf_counter()
        state, metrics = train_step(state, batch)
        jax.block_until_ready(metrics)
        seconds.append(time.perf_counter() - since)
    return statistics.median(seconds[1:])  # the first one compiles


def longest_chain(function: Callable, *arguments: Any) -> int:
    """Return how many matrix products of a computation depend on each other, one after the other.

    It is the least number of products that must be waited for, however many processors there are.
    A loop counts as often as it runs, as far as each round depends on the one before.

    >>> x = jnp.ones((2, 2))
    >>> longest_chain(lambda x: (x @ x) + (x @ x @ x), x)
    2
    >>> longest_chain(lambda x: jax.lax.scan(lambda h, x: (h @ h, x), x, jnp.ones(5)), x)
    5
    """
    closed = jax.make_jaxpr(function)(*arguments)
    return max(_depths(closed.jaxpr, [0] * len(closed.jaxpr.invars)))


def _depths(jaxpr: Any, inputs: Sequence[int]) -> list[int]:
    """Return the products before each output, given those before each input."""
    known = dict(zip(jaxpr.invars, inputs, strict=True))

    def depth(variable: Any) -> int:
        return 0 if isinstance(variable, core.Literal) else known.get(variable, 0)

    for equation in jaxpr.eqns:
        before = [depth(variable) for variable in equation.invars]
        inner = _inner_jaxpr(equation)
        if equation.primitive.name == "scan":
            after = _depths_of_loop(equation.params, before)
        elif equation.primitive.name in ("while", "cond"):
            raise NotImplementedError(f"the chain of {equation.primitive.name} is not known.")
        elif inner is not None:
            after = _depths(inner, before)
        else:
            product = equation.primitive.name == "dot_general"
            after = [max(before, default=0) + product] * len(equation.outvars)
        known.update(zip(equation.outvars, after, strict=True))
    return [depth(variable) for variable in jaxpr.outvars]


def _inner_jaxpr(equation: Any) -> Any:
    """Return the function that an equation calls, or None."""
    for name in ("jaxpr", "call_jaxpr", "fun_jaxpr"):
        if name in equation.params:
            inner = equation.params[name]
            return getattr(inner, "jaxpr", inner)
    return None


def _depths_of_loop(params: dict[str, Any], before: list[int]) -> list[int]:
    constants, carries = _constants_and_carries(params)
    carried = constants + carries
    carry, stacked = before[constants:carried], [0] * len(params["jaxpr"].jaxpr.outvars)
    for _ in range(params["length"]):
        after = _depths(params["jaxpr"].jaxpr, [*before[:constants], *carry, *before[carried:]])
        carry = after[:carries]
        stacked = list(map(max, stacked, after))
    return [*carry, *stacked[carries:]]


def _constants_and_carries(params: dict[str, Any]) -> tuple[int, int]:
    """Return how many arguments of a scan are constants, and how many are carried."""
    if "ft_in" in params:  # since jax 0.12
        constants, carry, _ = params["ft_in"].unpack()
        return len(constants), len(carry)
    return params["num_consts"], params["num_carry"]


def chain_of(model: nn.Module, length: int) -> int:
    """Return the `longest_chain` of the forward pass over a sentence of `length` and its target."""
    tokens = one_sentence_per_row(jnp.full((1, length), 5, jnp.int32))
    batch = Batch(tokens, tokens)
    params = jax.eval_shape(partial(model.init, jax.random.key(0)), batch)
    return longest_chain(model.apply, params, batch)


# Attention


def cross_attention(translator: Translator, source: str, target: str) -> dict[str, Any]:
    """Return the tokens of both sentences, and the weights [target source].

    Of the Transformer they are those of its last layer, as a mean over the heads.
    """
    tokenizers = translator.source_tokenizer, translator.target_tokenizer
    texts = (source, target)
    both = [tokenizer.encode(text) for tokenizer, text in zip(tokenizers, texts, strict=True)]
    batch = Batch(*(one_sentence_per_row(jnp.array([ids])) for ids in both))
    variables = {"params": translator.runner.params}
    _, state = translator.models[0].apply(variables, batch, mutable=["intermediates"])
    if "attention" in state["intermediates"]:
        weights = state["intermediates"]["attention"][0][0]
    else:
        weights = translator.attention(source, target).cross[-1].mean(axis=0)
    pieces = [tokenizer.pieces(ids) for tokenizer, ids in zip(tokenizers, both, strict=True)]
    rounded = np.asarray(weights, float).round(4).tolist()
    return {"source": pieces[0], "target": pieces[1], "weights": rounded}
