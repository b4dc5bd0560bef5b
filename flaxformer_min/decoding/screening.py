"""The next token of greedy decoding: few candidates by bfloat16, decided in float32.

The product with the vocabulary is a third of a greedy step, and a CPU with units for bfloat16 does
it in half of the time, or less where the weights come from memory. What that rounds away is
bounded. So if no token can be likelier than all candidates, which are multiplied in float32, the
choice is that of float32; otherwise all logits are computed in float32.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn
from jaxtyping import Array, Float, Int

from flaxformer_min.decoding.choices import FIRST_REGULAR_ID, Best, best_of, top_k_tokens
from flaxformer_min.model.embedding import OUTPUT_KERNEL, TIED_TABLES
from flaxformer_min.model.linear import project
from flaxformer_min.model.parameters import for_tokens
from flaxformer_min.model.transformer import Transformer
from flaxformer_min.tokens import EOS

KERNEL, ERROR = "screening_kernel", "screening_error"
"""Parameters added to the tied table: its transpose in bfloat16, and the most that a logit of it
differs from that in float32, for hidden states of length 1."""

CANDIDATES = 8
"""Tokens multiplied in float32. For captions no step computes all logits then; of 100 steps 0.5 do
with six candidates, 9 with four."""

ROUNDING = 1.05 * 2**-7
"""Most error of a product of two numbers rounded to bfloat16, relative to it. Each is rounded by at
most 2⁻⁸; the twentieth more is for sums in float32, of up to 1,024 terms in either type. A small
model is not wider."""


def screening_parameters(table: Float[np.ndarray, "vocab d_model"]) -> dict[str, Array]:
    """Return the parameters that `screened_best` needs besides those of the search."""
    longest = np.linalg.norm(table.astype(np.float32, copy=False), axis=1).max()
    kernel = table.T.astype(jnp.bfloat16, order="C")
    # By numpy, as in `suited_to_device`.
    return {KERNEL: jax.device_put(kernel), ERROR: jax.device_put(np.float32(ROUNDING * longest))}


def has_screening(model: Any, params: Any) -> bool:
    """Return whether the parameters are those of `screening_parameters`, too."""
    if type(model) is not Transformer:
        return False
    return KERNEL in params.get(TIED_TABLES.get(model.config.embeddings), {})


def screened_best(
    model: nn.Module,
    params: Any,
    x: Float[Array, "batch beam d_model"],
    suppressed: Sequence[int] = (),
) -> Best:
    """Return `best_of` the logits of hidden states, without those of suppressed tokens."""
    tied, bias = params[TIED_TABLES[model.config.embeddings]], params.get("output_bias")
    flat = x.reshape(-1, x.shape[-1])

    def all_logits(kernel: Float[Array, "d_model vocab"]) -> Float[Array, "rows vocab"]:
        logits = project(flat, kernel)
        logits = logits if bias is None else logits + for_tokens(bias, logits.shape)
        return logits.at[:, jnp.array(suppressed)].set(-jnp.inf) if suppressed else logits

    def logits_of(tokens: Int[Array, "rows some"]) -> Float[Array, "rows some"]:
        logits = jnp.einsum("rd,rsd->rs", flat, tied["table"][tokens])
        return logits if bias is None else logits + bias[tokens]

    likeliest, candidates = _candidates(all_logits(tied[KERNEL]))
    logits = logits_of(jnp.append(candidates, jnp.full_like(candidates[:, :1], EOS), axis=1))
    # Where there are fewer candidates, PAD stands for one.
    regular = jnp.where(candidates >= FIRST_REGULAR_ID, logits[:, :-1], -jnp.inf)
    best = regular.argmax(axis=1)[:, None]
    logit, token = (jnp.take_along_axis(each, best, axis=1)[:, 0] for each in (regular, candidates))
    # What any other token has at most. NaN is not certain.
    others = likeliest.min(axis=1) + tied[ERROR] * jnp.sqrt(jnp.square(flat).sum(axis=1))
    found = jax.lax.cond(
        (logit > others).all(),
        lambda: Best(logit, token, logits[:, -1]),
        lambda: jax.vmap(best_of)(all_logits(tied[OUTPUT_KERNEL])),
    )
    return jax.tree.map(lambda each: each.reshape(x.shape[:2]), found)


def _candidates(
    logits: Float[Array, "rows vocab"],
) -> tuple[Float[Array, "rows candidates"], Int[Array, "rows candidates"]]:
    """Return the largest logits of regular tokens, and the ids of these in increasing order.

    So the lower one wins a tie, as elsewhere.
    """

    def of_row(logits: Float[Array, " vocab"]) -> tuple[Array, Array]:
        base = jnp.zeros(1, logits.dtype)
        likeliest, _, tokens = top_k_tokens(base, logits[None], CANDIDATES)
        return likeliest, jnp.sort(tokens)

    return jax.vmap(of_row)(logits)
