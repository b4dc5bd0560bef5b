"""Reads of arrays that end with the call that began them, also after an error."""

import asyncio
import copy
import functools
from typing import Any

import jax


@functools.cache
def wait_for_reads() -> None:
    """Let Orbax end all reads of a checkpoint before it raises the error of the first.

    It leaves them to a closed event loop, for each of which TensorStore prints a traceback.
    """
    import orbax.checkpoint as ocp

    handler = copy.copy(ocp.type_handlers.get_type_handler(jax.Array))
    for name in ("deserialize", "metadata"):
        setattr(handler, name, _waiting(getattr(handler, name)))
    ocp.type_handlers.register_type_handler(jax.Array, handler, override=True)


def _waiting(read: Any) -> Any:
    @functools.wraps(read)
    async def read_and_wait(*args: Any, **settings: Any) -> Any:
        before = asyncio.all_tasks()
        try:
            return await read(*args, **settings)
        except BaseException:
            # Not cancelled: TensorStore answers all the same, and maybe too late.
            await asyncio.gather(*asyncio.all_tasks() - before, return_exceptions=True)
            raise

    return read_and_wait
