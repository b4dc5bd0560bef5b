"""Linear layers: their parameters, and the type of their products."""

import re
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from flaxformer_min.kernels.backend import compiling_for
from flaxformer_min.kernels.linear import linear

H100 = SimpleNamespace(platform="gpu", compute_capability="9.0")


def test_the_gradient_of_float32_logits_is_multiplied_in_bfloat16_on_an_nvidia_gpu():
    """Which multiplies nothing else as fast. Sums are float32, as those of other products."""
    rng = np.random.default_rng(0)
    x, kernel = (jnp.asarray(rng.normal(size=size), jnp.bfloat16) for size in ((40, 16), (16, 30)))
    gradient = jnp.asarray(rng.normal(size=(40, 30)), jnp.bfloat16).astype(jnp.float32)

    def loss(x, kernel):
        return (linear(x, kernel) * gradient).sum()

    with compiling_for([H100]):
        lowered = jax.jit(jax.value_and_grad(loss, (0, 1))).lower(x, kernel)
    products = re.findall(r"dot_general.*: \((.*)\) ->", lowered.as_text())
    assert len(products) == 3
    assert all("bf16" in each and "f32" not in each for each in products)
    value, (of_x, of_kernel) = lowered.compile()(x, kernel)
    x, kernel, gradient = (np.float64(each) for each in (x, kernel, gradient))
    assert value == pytest.approx((x @ kernel * gradient).sum(), rel=1e-5)
    np.testing.assert_allclose(np.float64(of_x), gradient @ kernel.T, rtol=2**-8, atol=1e-3)
    np.testing.assert_allclose(np.float64(of_kernel), x.T @ gradient, rtol=2**-8, atol=1e-3)
