"""The encoder-decoder Transformer of "Attention Is All You Need" in JAX and Flax.

The public names are in `__init__.pyi`, imported on first use: `flaxformer-min --help` needs no jax.
"""

import lazy_loader

__version__ = "0.1.0"

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
