"""Parameters, their products, and the copies of vectors for each row that an NVIDIA GPU gets."""

import re
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax.errors import ScopeParamShapeError

from flaxformer_min.model.add_and_norm import LayerNorm
from flaxformer_min.model.linear import Linear, project
from flaxformer_min.model.parameters import COPIES, copies_by_row
from flaxformer_min.model.target import compiling_for

H100 = SimpleNamespace(platform="gpu", compute_capability="9.0")
MODULES = pytest.mark.parametrize(
    "module", [Linear(4, "float32"), LayerNorm(1e-6, "float32")], ids=["linear", "norm"]
)


def begin(module, shape):
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.normal(size=shape), jnp.float32)
    made = jax.eval_shape(module.init, jax.random.key(0), x)["params"]
    params = jax.tree.map(lambda leaf: jnp.asarray(rng.normal(size=leaf.shape), leaf.dtype), made)
    return x, params


def gradients(module, params, x, rows):
    """Of the copies of vectors, and of the parameters, with and without copies in use."""

    def loss(params, copies):
        return jnp.square(module.apply({"params": params} | copies, x)).sum()

    def of_params(params):
        return loss(params, copies_by_row(params, rows))

    with compiling_for([H100]):
        copies = copies_by_row(params, rows)
        return (
            jax.grad(loss, 1)(params, copies)[COPIES],
            jax.grad(of_params)(params),
            jax.grad(loss)(params, {}),
        )


@MODULES
def test_the_gradient_of_a_copy_is_that_of_its_row(module):
    x, params = begin(module, (3, 5, 4))
    of_copies, with_copies, without = gradients(module, params, x, rows=3)
    for number in range(3):
        _, _, of_row = gradients(module, params, x[number : number + 1], rows=1)
        for name, found in of_copies.items():
            if params[name].ndim == 1:
                np.testing.assert_allclose(found[number], of_row[name], rtol=1e-4, atol=1e-5)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4), with_copies, without)


@MODULES
@pytest.mark.parametrize("shape", [(4,), (5, 4), (2, 3, 4)])
def test_values_without_an_axis_of_rows_get_the_same_output_and_gradient(module, shape):
    x, params = begin(module, shape)
    _, with_copies, without = gradients(module, params, x, rows=3)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4), with_copies, without)


def test_other_devices_and_models_without_vectors_get_no_copies():
    vector, matrix = {"a": jnp.ones(2)}, {"a": jnp.ones((2, 2))}
    with compiling_for([H100]):
        assert copies_by_row(vector, 3)[COPIES]["a"].shape == (3, 2)
        assert copies_by_row(matrix, 3) == {}
    assert copies_by_row(vector, 3) == {}


def test_a_parameter_that_is_there_is_not_initialised_again(monkeypatch):
    module = Linear(4, "float32")
    x, params = begin(module, (2, 3))

    def fail(*_):
        raise AssertionError("initialised again")

    monkeypatch.setattr("flax.linen.initializers.xavier_uniform", lambda: fail)
    monkeypatch.setattr("flax.linen.initializers.zeros", fail)
    expected = np.asarray(x) @ np.asarray(params["kernel"]) + np.asarray(params["bias"])
    np.testing.assert_allclose(module.apply({"params": params}, x), expected, rtol=1e-5, atol=1e-6)


def test_a_parameter_of_another_shape_is_an_error():
    module = Linear(4, "float32")
    x, params = begin(module, (2, 3))
    with pytest.raises(ScopeParamShapeError, match="kernel"):
        module.apply({"params": params | {"kernel": jnp.zeros((3, 5))}}, x)


def test_the_gradient_of_float32_logits_is_multiplied_in_bfloat16_on_an_nvidia_gpu():
    """Which multiplies nothing else as fast. Sums are float32, as those of other products."""
    rng = np.random.default_rng(0)
    x, kernel = (jnp.asarray(rng.normal(size=size), jnp.bfloat16) for size in ((40, 16), (16, 30)))
    gradient = jnp.asarray(rng.normal(size=(40, 30)), jnp.bfloat16).astype(jnp.float32)

    def loss(x, kernel):
        return (project(x, kernel) * gradient).sum()

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
