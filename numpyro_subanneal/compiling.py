# Copyright Contributors to the numpyro_subanneal project.
# SPDX-License-Identifier: Apache-2.0

"""Programs that run but once or twice, such as those that look at a model."""

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import jax
import jax.numpy as jnp


def compile_for(fn: Callable, *args: Any, quickly: bool = False) -> Callable:
    """
    `fn`, compiled for arguments like `args`. Calls are executed there and then, also
    while JAX traces the caller: `MCMC` traces `init` when it runs chains in parallel.

    :param bool quickly: whether to save time on the program rather than in it.
    """
    options = quick_options() if quickly else None
    return jax.jit(fn).lower(*args).compile(compiler_options=options)


@lru_cache(maxsize=1)
def quick_options() -> dict[str, Any]:
    """Options with which XLA takes less than half of the time to compile."""
    options: dict[str, Any] = {}
    for name, value in (
        ("xla_backend_optimization_level", 0),
        ("xla_cpu_use_fusion_emitters", False),
    ):
        # Not every version knows them.
        more = {**options, name: value}
        try:
            jax.jit(lambda: jnp.zeros(()), compiler_options=more).lower().compile()
        except jax.errors.JaxRuntimeError:
            continue
        options = more
    return options
