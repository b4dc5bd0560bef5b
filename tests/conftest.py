"""Two virtual devices, and every annotated shape checked, before jax or the package is imported."""

import os

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=2"

import jax
from jaxtyping import install_import_hook

jax.config.update("jax_numpy_rank_promotion", "raise")
install_import_hook(
    ["flaxformer_min." + name for name in ("tokens", "model", "training", "decoding")],
    "beartype.beartype",
)
