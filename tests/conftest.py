"""Two virtual devices, and every annotated shape checked, before jax or the package is imported."""

import gc
import os
import tempfile

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=2"
# Programs compiled once a session, by whichever process of it; nothing of the user's is touched.
os.environ.setdefault("FLAXFORMER_TEST_CACHE", tempfile.mkdtemp(prefix="flaxformer_min-tests-"))
os.environ["XDG_CACHE_HOME"] = os.environ["FLAXFORMER_TEST_CACHE"]
os.environ["JAX_COMPILATION_CACHE_DIR"] = os.environ["FLAXFORMER_TEST_CACHE"] + "/compiled"
os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
os.environ["JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES"] = "-1"

import jax
import pytest
from jaxtyping import install_import_hook

jax.config.update("jax_numpy_rank_promotion", "raise")
install_import_hook(
    [
        "flaxformer_min." + name
        for name in ("tokens", "model", "training.loss", "training.step", "decoding")
    ],
    "beartype.beartype",
)


@pytest.fixture(autouse=True, scope="module")
def memory_is_given_back():
    """Compiled programs of one file are of no use to the next: together they take gigabytes."""
    yield
    jax.clear_caches()
    gc.collect()


@pytest.fixture
def failed_transfers():
    """Orbax leaves coroutines behind where reading or writing fails; they end with the test."""
    yield
    gc.collect()
